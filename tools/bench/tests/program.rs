//! The program as `spurline bench` runs it.

use std::process::{Command, Output};

fn bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spurline-bench")).args(words).output().unwrap()
}

#[test]
fn help_names_every_flag_and_says_how_it_is_called() {
    let out = bench(&["suite", "--help"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && text.contains("spurline bench suite"), "{text}");
    for flag in ["--quick", "--only", "--json", "--html", "--markdown", "--spurline", "--strict"] {
        assert!(text.contains(flag), "{flag} is missing: {text}");
    }
    assert_eq!(bench(&["suite", "--no-such-flag"]).status.code(), Some(2));
}

#[test]
fn man_pages_are_written() {
    let dir = tempfile::tempdir().unwrap();
    assert!(bench(&["man", dir.path().to_str().unwrap()]).status.success());
    assert!(dir.path().join("spurline-bench-suite.1").is_file());
}
