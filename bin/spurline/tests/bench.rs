//! `spurline bench` runs the program spurline-bench, which is no part of this one.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A copy of the program, so that nothing is beside it but what the test puts there.
fn copied(dir: &Path) -> PathBuf {
    let copy = dir.join("spurline");
    fs::copy(env!("CARGO_BIN_EXE_spurline"), &copy).unwrap();
    copy
}

/// A stand-in that prints its arguments.
fn stand_in(dir: &Path, name: &str) {
    let file = dir.join("spurline-bench");
    fs::write(&file, format!("#!/bin/sh\necho {name} \"$@\"\nexit 7\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn it_is_found_beside_the_program_and_then_in_path() {
    let (own, path) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let program = copied(own.path());
    let run = |words: &[&str]| {
        let out = Command::new(&program)
            .arg("bench")
            .args(words)
            .env("PATH", path.path())
            .env("COLUMNS", "120")
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (out.status.code(), text(out.stdout), text(out.stderr))
    };
    let (code, _, said) = run(&["suite"]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("spurline-bench is neither beside") && said.contains("make install"), "{said}");
    // Its help is there all the same, with the sentences of that program.
    let source = include_str!("../../../tools/bench/src/main.rs");
    for words in [&["--help"][..], &["-h"], &[], &["suite", "--help"]] {
        let (code, help, said) = run(words);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{words:?}");
        for name in ["suite", "fio", "train", "checkpoint", "load"] {
            let line = help.lines().find(|line| line.trim_start().starts_with(&format!("{name} ")));
            let sentence = line.and_then(|line| line.trim().split_once("  ")).map(|(_, sentence)| sentence.trim());
            assert!(source.contains(&format!("    /// {}\n", sentence.unwrap_or("missing"))), "{name}: {help}");
        }
        assert!(help.contains("make install"), "{help}");
    }
    stand_in(path.path(), "in path:");
    let words = ["suite", "--quick", "--only", "remote", "--", "-x"];
    assert_eq!(run(&words), (Some(7), "in path: suite --quick --only remote -- -x\n".into(), String::new()));
    stand_in(own.path(), "beside:");
    // Help and version are the other program's too.
    for words in [&["--help"][..], &["suite", "--help"], &["--version"], &["-h"], &[]] {
        let said = format!("beside: {}", words.join(" "));
        let (code, out, _) = run(words);
        assert_eq!((code, out.trim_end()), (Some(7), said.trim_end()));
    }
}
