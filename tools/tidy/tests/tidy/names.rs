//! Names say their subject: ceilings for one-word and shared names.

use spurline_tidy::names::{NameCensus, NamedItem};

/// The share of `part` in `all`, in per cent, must not exceed `ceiling`.
fn check_share(what: &str, part: &[&NamedItem], all: &[NamedItem], ceiling: f64) {
    let share = 100.0 * part.len() as f64 / all.len().max(1) as f64;
    println!("{what}: {share:.1} % (at most {ceiling} %)");
    assert!(
        share <= ceiling,
        "{what}: {share:.1} %, more than {ceiling} %; name the subject (PathState, not State). \
         `cargo run -p spurline-tidy -- --list` prints them"
    );
}

#[test]
fn names_say_their_subject() {
    let census = NameCensus::of_this_tree();
    check_share("one-word type names", &census.one_word_types(), &census.types, 25.0);
    check_share("type definitions that share a name", &census.shared_types(), &census.types, 12.0);
    check_share("one-word function names", &census.one_word_functions(), &census.functions, 50.0);
}
