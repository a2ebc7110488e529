//! The program as `spurline bench` runs it.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

fn bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spurline-bench")).args(words).output().unwrap()
}

#[test]
fn help_names_every_flag_and_says_how_it_is_called() {
    let out = bench(&["suite", "--help"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && text.contains("spurline bench suite"), "{text}");
    for flag in ["--quick", "--only", "--json", "--html", "--plot", "--markdown", "--spurline", "--strict"] {
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

#[test]
fn folders_that_are_missing_stay_missing() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let refused = |words: &[&str], says: &str| {
        let out = bench(words);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(3) && said.contains(says), "{words:?}: {said}");
    };
    let (absent, report, here) = (at("absent"), at("absent/report.json"), at(""));
    let suite = ["suite", "--only", "start", "--spurline", "/bin/false", "--memory-dir", &here];
    refused(&[&suite[..], &["--disk-dir", &absent]].concat(), "--disk-dir");
    refused(&[&suite[..], &["--disk-dir", &here, "--json", &report]].concat(), "--json");
    refused(&[&suite[..], &["--disk-dir", &here, "--markdown", &report]].concat(), "--markdown");
    refused(&["train", "--model", "unet3d", "--spurline", "/bin/false", "--work-dir", &absent], "--work-dir");
    refused(&["checkpoint", "--spurline", "/bin/false", "--html", &report], "--html");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is made");
}

#[test]
fn an_interruption_is_not_taken_for_something_missing() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: network namespaces need root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Ctrl-C arrives while a namespace is made.
    let ip = dir.path().join("ip");
    std::fs::write(&ip, "#!/bin/sh\n[ \"$2\" = add ] && kill -INT $PPID && exec sleep 60\nexit 0\n").unwrap();
    std::fs::set_permissions(&ip, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let words = ["train", "--model", "retinanet", "--accelerator", "b200", "--data", "2M", "--feed", "node"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_spurline-bench"));
    command.args(words).args(["--spurline", "/bin/false", "--work-dir"]).arg(dir.path()).env("PATH", path);
    let out = command.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(1) && said.contains("interrupted"), "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "only the stand-in is left");
}
