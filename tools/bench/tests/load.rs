//! `bench load` as users run it, on plain folders. Mounts are in the tests of the program.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn bench(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spurline-bench"));
    command.arg("load").args(words).args(["--spurline", "/bin/false"]).output().unwrap()
}

fn said(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

fn report(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_model_is_made_and_loaded_in_every_way() {
    let models = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let dir = models.path().to_str().unwrap();
    let made = bench(&["--make", dir, "--size", "24M", "--files", "2"]);
    assert!(made.status.success() && said(&made).contains("tensors in 2 files"), "{}", said(&made));
    let json = work.path().join("load.json");
    let work_dir = work.path().to_str().unwrap();
    let words =
        ["--dir", &format!("first={dir}"), "--dir", &format!("again={dir}"), "--threads", "1,3", "--rounds", "2"];
    let loaded = bench(&[&words[..], &["--work-dir", work_dir, "--json", json.to_str().unwrap()]].concat());
    let text = said(&loaded);
    assert!(loaded.status.success(), "{text}");
    for word in ["mmap-shuffled", "pread-16m", "of cat", "of the first", "faults", "CPU s/GiB"] {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
    let report = report(&json);
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2 * (2 + 6 * 2));
    for case in cases.iter().filter(|case| case["refused"].is_null()) {
        assert!(case["bytes_per_second"].as_f64().unwrap() > 0.0 && case["rounds"].as_array().unwrap().len() == 2);
    }
    assert_eq!(std::fs::read_dir(work.path()).unwrap().count(), 1, "nothing but the report is left");
}

#[test]
fn a_cache_of_blocks_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let json = work.path().join("kv.json");
    let dir = format!("plain={}", folder.path().display());
    let work_dir = work.path().to_str().unwrap();
    let words = ["--kv", "--dir", &dir, "--block", "256K", "--blocks", "6", "--lookups", "200", "--rounds", "2"];
    let out = bench(&[&words[..], &["--work-dir", work_dir, "--json", json.to_str().unwrap()]].concat());
    assert!(out.status.success() && said(&out).contains("absent us, p99"), "{}", said(&out));
    let figures = &report(&json)["kv"][0];
    for name in ["write_bytes_per_second", "read_bytes_per_second", "absent_us", "absent_p99_us", "present_us"] {
        assert!(figures[name].as_f64().unwrap() > 0.0, "{figures}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn folders_without_a_model_are_refused() {
    let empty = tempfile::tempdir().unwrap();
    let dir = empty.path().to_str().unwrap();
    let out = bench(&["--dir", dir, "--work-dir", dir]);
    assert_eq!(out.status.code(), Some(2));
    assert!(said(&out).contains("--make"), "{}", said(&out));
    let out = bench(&["--size", "1K", "--work-dir", dir]);
    assert!(out.status.code() == Some(2) && said(&out).contains("give 2G"), "{}", said(&out));
}
