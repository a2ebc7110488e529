//! The program as `spurline bench` runs it.

use super::{bench, bench_command, names, path_in, refused, said, write_script};

#[test]
fn help_names_every_flag_and_says_how_it_is_called() {
    let text = super::passed(&bench(&["suite", "--help"]));
    assert!(text.contains("spurline bench suite"), "{text}");
    for flag in ["--quick", "--only", "--json", "--html", "--plot", "--spurline", "--strict"] {
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
    let refused = |words: &[&str], says| refused(words, 3, says);
    let (absent, report, here) = (path_in(&dir, "absent"), path_in(&dir, "absent/report.json"), path_in(&dir, ""));
    let suite = ["suite", "--only", "start", "--spurline", "/bin/false", "--memory-dir", &here];
    refused(&[&suite[..], &["--disk-dir", &absent]].concat(), "--disk-dir");
    refused(&[&suite[..], &["--disk-dir", &here, "--json", &report]].concat(), "--json");
    refused(&["train", "--model", "unet3d", "--spurline", "/bin/false", "--work-dir", &absent], "--work-dir");
    refused(&["checkpoint", "--spurline", "/bin/false", "--html", &report], "--html");
    assert!(names(dir.path()).is_empty(), "nothing is made");
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
    write_script(&ip, "#!/bin/sh\n[ \"$2\" = add ] && kill -INT $PPID && exec sleep 60\nexit 0\n");
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let words = ["train", "--model", "retinanet", "--accelerator", "b200", "--data", "2M", "--feed", "node"];
    let mut command = bench_command(&words);
    command.args(["--spurline", "/bin/false", "--work-dir"]).arg(dir.path()).env("PATH", path);
    let out = command.output().unwrap();
    assert!(out.status.code() == Some(1) && said(&out).contains("interrupted"), "{}", said(&out));
    assert_eq!(names(dir.path()).len(), 1, "only the stand-in is left");
}
