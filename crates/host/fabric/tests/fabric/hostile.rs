//! Hostile folders on a real disk: an examination ends, whatever they contain, and reports its findings.

use proptest::prelude::*;
use spurline_fabric::{DoctorOptions, HostFacts, HostTree, archive, collect_facts, examine, finding};
use spurline_testkit::hosts;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Hostile replacements for files of the kernel.
#[derive(Debug, Clone)]
enum Harm {
    Gone,
    Empty,
    Garbage(Vec<u8>),
    /// Far larger than memory, and all holes.
    Huge,
    Directory,
    Fifo,
    Link(String),
    /// Many names.
    Crowd,
}

fn harm() -> impl Strategy<Value = Harm> {
    let targets = prop_oneof![
        Just(".".to_owned()),
        Just("..".to_owned()),
        Just("../..".to_owned()),
        Just("/".to_owned()),
        Just("/sys/class/infiniband".to_owned()),
        Just("/dev/zero".to_owned()),
        Just("/proc/self/fd/0".to_owned()),
        Just("x/".repeat(1500)),
        "[a-z./]{1,30}",
    ];
    prop_oneof![
        2 => Just(Harm::Gone),
        1 => Just(Harm::Empty),
        3 => proptest::collection::vec(any::<u8>(), 1..60).prop_map(Harm::Garbage),
        2 => "[0-9A-Za-z:./() -]{1,60}".prop_map(|text| Harm::Garbage(text.into_bytes())),
        1 => Just(Harm::Huge),
        2 => Just(Harm::Directory),
        1 => Just(Harm::Fifo),
        3 => targets.prop_map(Harm::Link),
        1 => Just(Harm::Crowd),
    ]
}

fn remove(path: &Path) {
    let Ok(found) = fs::symlink_metadata(path) else { return };
    if found.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
}

/// Does harm to the file, or to the directory so many levels above it; below the root in any case.
fn strike(root: &Path, file: &str, above: usize, harm: &Harm) {
    let parts: Vec<&str> = file.split('/').collect();
    let path: PathBuf = root.join(parts[..parts.len().saturating_sub(above).max(2).min(parts.len())].join("/"));
    // An earlier strike may have taken what this one would stand on.
    if !path.parent().is_some_and(|dir| dir.canonicalize().is_ok_and(|dir| dir.is_dir() && dir.starts_with(root))) {
        return;
    }
    remove(&path);
    match harm {
        Harm::Gone => {}
        Harm::Empty => fs::write(&path, "").unwrap(),
        Harm::Garbage(bytes) => fs::write(&path, bytes).unwrap(),
        Harm::Huge => fs::File::create(&path).unwrap().set_len(64 << 30).unwrap(),
        Harm::Directory => fs::create_dir(&path).unwrap(),
        Harm::Fifo => {
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, &path, kind, 0o600.into(), 0).unwrap();
        }
        Harm::Link(target) => symlink(target, &path).unwrap(),
        Harm::Crowd => {
            fs::create_dir(&path).unwrap();
            (0..300).for_each(|n| symlink("..", path.join(n.to_string())).unwrap());
        }
    }
}

proptest! {
    // Each case writes a host's files.
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn no_folder_is_a_panic_or_a_hang(
        host in 0usize..11,
        strikes in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..4, harm()), 1..25),
    ) {
        let all = hosts::all();
        let made = &all[host % all.len()].1;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        made.write_to(&root);
        let files: Vec<&str> = made.files.keys().chain(made.links.keys()).map(String::as_str).collect();
        for (at, above, harm) in &strikes {
            strike(&root, files[at.index(files.len())], *above, harm);
        }
        let tree = HostTree::from_folder(&root).with_recording();
        let peer = HostFacts::read_from(&HostTree::from_folder(&root));
        serde_json::to_string(&peer).unwrap();
        let names = peer.interfaces.iter().map(|i| i.name.clone()).take(2).collect();
        let ask = DoctorOptions { for_rdma: names, peer: Some(peer), ..DoctorOptions::default() };
        let mut found = Vec::new();
        let entries = collect_facts(&tree, |tree| found = examine(tree, &ask));
        // The collected files can be examined elsewhere.
        let mut packed = Vec::new();
        archive::write_archive(&entries, &mut packed).unwrap();
        found.extend(examine(&HostTree::from_memory(archive::read_archive(packed.as_slice()).unwrap()), &ask));
        for f in found {
            prop_assert!(finding::page_of(f.id).is_some() && !f.evidence.is_empty() && !f.remedy.is_empty(), "{f:?}");
        }
    }
}
