//! Lays a made-up host out below a folder, or writes its facts to a file, to try `spurline net … --from` on: `cargo run -p
//! spurline-fabric --example host -- gb200 /tmp/gb200` or `-- gb200 gb200.tar.zst`. `samples DIR` writes those of docs/samples.
//! Without arguments it prints the names.

use spurline_fabric::{TreeEntry, archive};
use spurline_testkit::hosts;
use std::path::Path;

fn main() -> std::io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut all = hosts::all();
    all.push(("large", hosts::large()));
    if let [what, dir] = words.as_slice()
        && what == "samples"
    {
        return hosts::samples().iter().try_for_each(|(name, made)| write_facts(made, &Path::new(dir).join(name)));
    }
    let found = all.iter().find(|(name, _)| Some(*name) == words.first().map(String::as_str));
    let (Some((_, made)), Some(path)) = (found, words.get(1)) else {
        all.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(());
    };
    if path.ends_with(".tar.zst") {
        return write_facts(made, Path::new(path));
    }
    made.write_to(Path::new(path));
    Ok(())
}

fn write_facts(made: &hosts::Made, path: &Path) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    archive::write_archive(&made.entries(TreeEntry::File, TreeEntry::Link), &mut file)
}
