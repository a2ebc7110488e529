//! Code and comments that read at once: ceilings for habits that make a reader look twice. A ceiling is lowered when the
//! count has fallen; no change may raise one.

use spurline_tidy::dialect::DialectCensus;

/// A count, the ceiling of today and the aim.
struct Habit {
    name: &'static str,
    rate: f64,
    ceiling: f64,
    aim: f64,
    instead: &'static str,
}

fn habits() -> Vec<Habit> {
    let census = DialectCensus::of_this_tree();
    let habit = |name, rate, ceiling, aim, instead| Habit { name, rate, ceiling, aim, instead };
    let per_code = |count| census.per_code(count);
    let per_comment = |count| census.per_comment(count);
    vec![
        habit("let (a, b) = (x, y)", per_code(census.tuple_lets), 2.4, 5.0, "two statements"),
        habit("local closures", per_code(census.local_closures), 27.8, 30.0, "a function, or the expression in place"),
        habit("arms of true and false", per_code(census.bool_arms), 2.7, 4.0, "if"),
        habit("tuples as parameters", census.tuple_parameters as f64, 1.0, 5.0, "named arguments or a struct"),
        habit("pronouns", per_comment(census.pronouns), 132.8, 200.0, "the noun"),
        habit("one, ones", per_comment(census.ones), 39.4, 40.0, "the noun"),
        habit("what is, what the, what it", per_comment(census.what_clauses), 3.1, 7.0, "the noun of the field"),
        habit("one-word constants, in per cent", census.one_word_constants(), 22.6, 30.0, "subject and unit"),
        habit("constants that share a name, in per cent", census.shared_constants(), 11.2, 15.0, "subject and unit"),
    ]
}

#[test]
fn habits_do_not_grow() {
    let habits = habits();
    for Habit { name, rate, ceiling, aim, .. } in &habits {
        println!("{name}: {rate:.1} (at most {ceiling}, the aim is {aim})");
    }
    let above = habits.iter().filter(|habit| habit.rate > habit.ceiling);
    let above: Vec<String> = above
        .map(|habit| format!("{}: {:.1}, more than {}; write {}", habit.name, habit.rate, habit.ceiling, habit.instead))
        .collect();
    assert!(above.is_empty(), "`cargo run -p spurline-tidy` prints the counts\n  {}", above.join("\n  "));
}
