//! What is heavy shows: ceilings for lines, owners of many methods, optional methods, circles of modules. A ceiling is lowered when
//! the count has fallen; no change may raise one.

use spurline_tidy::weights::TreeWeights;

/// A count, the ceiling of today and the aim.
struct TreeWeight {
    name: &'static str,
    count: f64,
    ceiling: f64,
    aim: f64,
    heaviest: Vec<String>,
}

fn tree_weights() -> Vec<TreeWeight> {
    let weights = TreeWeights::of_this_tree();
    let owners = weights.owners();
    let most_methods = owners.first().map_or(0, |(_, count)| *count);
    let first_owners = owners.iter().take(5).map(|(owner, count)| format!("{owner} {count}")).collect();
    let single = weights.single_methods(&["WritableVolume", "WritableFile"]);
    let (circles, circular) = weights.circles();
    let weight = |name, count, ceiling, aim, heaviest: Vec<String>| TreeWeight { name, count, ceiling, aim, heaviest };
    vec![
        weight("inherent methods of one type", most_methods as f64, 97.0, 40.0, first_owners),
        weight("optional methods of writes with one implementer", single.len() as f64, 10.0, 6.0, single),
        weight("modules in import circles, in per cent", circular, 21.8, 12.0, circles),
        weight("assignments (a, b) = (x, y)", weights.tuple_assignments as f64, 0.0, 0.0, vec![]),
        weight("functions over 100 lines", weights.long_functions.len() as f64, 0.0, 0.0, weights.long_functions),
        weight("lines of source", weights.lines as f64, 176_730.0, 140_000.0, vec![]),
        weight("lines of tools/bench", weights.bench_lines as f64, 11_700.0, 8_000.0, vec![]),
    ]
}

#[test]
fn the_tree_grows_no_heavier() {
    let weights = tree_weights();
    for TreeWeight { name, count, ceiling, aim, heaviest } in &weights {
        println!("{name}: {count:.1} (at most {ceiling}, the aim is {aim})");
        heaviest.iter().for_each(|item| println!("    {item}"));
    }
    let above = weights.iter().filter(|weight| weight.count > weight.ceiling);
    let above: Vec<String> =
        above.map(|weight| format!("{}: {:.1}, more than {}", weight.name, weight.count, weight.ceiling)).collect();
    assert!(above.is_empty(), "the output has the heaviest of each\n  {}", above.join("\n  "));
}
