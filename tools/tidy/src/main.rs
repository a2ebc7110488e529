//! Prints how much the names of this tree say: `cargo run -p spurline-tidy`. The ceilings are a test of this crate.
#![forbid(unsafe_code)]

use spurline_tidy::dialect::DialectCensus;
use spurline_tidy::names::{NameCensus, NamedItem};

fn main() {
    let census = NameCensus::of_this_tree();
    println!("{} types, {} functions", census.types.len(), census.functions.len());
    println!("one-word type names      {:5.1} %", share_of(&census.one_word_types(), &census.types));
    println!("types that share a name  {:5.1} %", share_of(&census.shared_types(), &census.types));
    println!("one-word function names  {:5.1} %", share_of(&census.one_word_functions(), &census.functions));
    let dialect = DialectCensus::of_this_tree();
    println!("{} lines of code, {} words of comments", dialect.code_lines, dialect.comment_words);
    println!("per 10,000 lines of code:");
    println!("  let (a, b) = (x, y)    {:5.1}", dialect.per_code(dialect.tuple_lets));
    println!("  local closures         {:5.1}", dialect.per_code(dialect.local_closures));
    println!("  arms of true or false  {:5.1}", dialect.per_code(dialect.bool_arms));
    println!("tuples as parameters     {:5}", dialect.tuple_parameters);
    println!("per 10,000 words of comments:");
    println!("  pronouns               {:5.1}", dialect.per_comment(dialect.pronouns));
    println!("  one, ones              {:5.1}", dialect.per_comment(dialect.ones));
    println!("  what is, the, it       {:5.1}", dialect.per_comment(dialect.what_clauses));
    println!("one-word constants       {:5.1} %", dialect.one_word_constants());
    println!("constants sharing a name {:5.1} %", dialect.shared_constants());
    if std::env::args().nth(1).as_deref() == Some("--list") {
        let mut shared = census.shared_types();
        shared.sort();
        for item in shared {
            println!("shared    {:24} {}", item.name, item.file.display());
        }
        for item in census.one_word_types() {
            println!("type      {:24} {}", item.name, item.file.display());
        }
        for item in census.one_word_functions() {
            println!("function  {:24} {}", item.name, item.file.display());
        }
    }
}

fn share_of(part: &[&NamedItem], all: &[NamedItem]) -> f64 {
    100.0 * part.len() as f64 / all.len().max(1) as f64
}
