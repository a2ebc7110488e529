//! Lays a made-up host out below a folder, to try `spurline net … --from` on: `cargo run -p spurline-fabric --example
//! host -- gb200 /tmp/gb200`. Without arguments it prints the names.

use spurline_testkit::hosts;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut all = hosts::all();
    all.push(("large", hosts::large()));
    let found = all.iter().find(|(name, _)| Some(*name) == words.first().map(String::as_str));
    let (Some((_, made)), Some(dir)) = (found, words.get(1)) else {
        all.iter().for_each(|(name, _)| println!("{name}"));
        return;
    };
    made.write_to(std::path::Path::new(dir));
}
