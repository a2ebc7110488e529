//! Prints how much the names of this tree say: `cargo run -p spurline-tidy`. The ceilings are a test of this crate.
#![forbid(unsafe_code)]

use spurline_tidy::names::{NameCensus, NamedItem};

fn main() {
    let census = NameCensus::of_this_tree();
    let share = |part: &[&NamedItem], all: &[NamedItem]| 100.0 * part.len() as f64 / all.len().max(1) as f64;
    println!("{} types, {} functions", census.types.len(), census.functions.len());
    println!("one-word type names      {:5.1} %", share(&census.one_word_types(), &census.types));
    println!("types that share a name  {:5.1} %", share(&census.shared_types(), &census.types));
    println!("one-word function names  {:5.1} %", share(&census.one_word_functions(), &census.functions));
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
