//! `bench load` on plain folders, and on network namespaces as hosts.

use super::{NO_SPURLINE, bench, passed, report, said, skip, spurline_or_skip};
use std::path::Path;
use std::process::Output;

fn load(words: &[&str]) -> Output {
    bench(&[&["load"], words, &NO_SPURLINE].concat())
}

#[test]
fn a_model_is_made_and_loaded_in_every_way() {
    let models = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let dir = models.path().to_str().unwrap();
    let made = load(&["--make", dir, "--size", "24M", "--files", "2"]);
    assert!(made.status.success() && said(&made).contains("tensors in 2 files"), "{}", said(&made));
    let again = load(&["--make", dir, "--size", "24M"]);
    assert!(again.status.code() == Some(2) && said(&again).contains("has a model already"), "{}", said(&again));
    let json = work.path().join("load.json");
    let work_dir = work.path().to_str().unwrap();
    let words =
        ["--dir", &format!("first={dir}"), "--dir", &format!("again={dir}"), "--threads", "1,3", "--rounds", "2"];
    let loaded = load(&[&words[..], &["--work-dir", work_dir, "--json", json.to_str().unwrap()]].concat());
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
    let out = load(&[&words[..], &["--work-dir", work_dir, "--json", json.to_str().unwrap()]].concat());
    assert!(out.status.success() && said(&out).contains("absent us, p99"), "{}", said(&out));
    let figures = &report(&json)["kv"][0];
    for name in ["write_bytes_per_second", "read_bytes_per_second", "absent_us", "absent_p99_us", "present_us"] {
        assert!(figures[name].as_f64().unwrap() > 0.0, "{figures}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A round that mounts, and works where the report is.
fn load_mounted(spurline: &Path, words: &[&str], json: &Path) -> Output {
    let mut command = super::bench_command(&[&["load", "--rounds", "1"], words].concat());
    command.arg("--spurline").arg(spurline).arg("--work-dir").arg(json.parent().unwrap()).arg("--json").arg(json);
    command.output().unwrap()
}

#[test]
fn a_distant_node_is_read_through_a_delayed_link() {
    let Some(spurline) = spurline_or_skip() else { return };
    let work = tempfile::tempdir().unwrap();
    let json = work.path().join("delayed.json");
    let words =
        ["--feed", "node", "--delay", "40ms", "--size", "4M", "--files", "1", "--case", "cat,mmap", "--threads", "2"];
    let text = passed(&load_mounted(&spurline, &words, &json));
    assert!(text.contains("the node has a round trip of 40 ms"), "{text}");
    let report = report(&json);
    assert_eq!(report["round_trip_seconds"].as_f64(), Some(0.04));
    for case in report["cases"].as_array().unwrap() {
        assert!(case["rounds"][0]["seconds"].as_f64().unwrap() >= 0.04, "{report}");
    }
    assert_eq!(std::fs::read_dir(work.path()).unwrap().count(), 1, "nothing but the report is left");
}

#[test]
fn one_host_and_all_load_cold_models_over_their_links() {
    let Some(spurline) = spurline_or_skip() else { return };
    let work = tempfile::tempdir().unwrap();
    let json = work.path().join("hosts.json");
    let words = ["--hosts", "3", "--link", "2000", "--size", "12M", "--files", "1", "--case", "cat"];
    let out = load_mounted(&spurline, &words, &json);
    if out.status.code() == Some(3) {
        return skip("netns", &said(&out));
    }
    assert!(passed(&out).contains("busiest node"), "{}", said(&out));
    let report = report(&json);
    assert_eq!((report["hosts"].as_u64(), report["link_bits_per_second"].as_u64()), (Some(3), Some(2_000_000_000)));
    let case = &report["cases"][0];
    for load in [&case["alone"][0], &case["together"][0]] {
        // A late answer makes a second node read the block too.
        let copies = load["source_copies"].as_f64().unwrap();
        assert!((1.0..3.1).contains(&copies), "{report}");
        assert!(load["seconds"].as_f64().unwrap() > 0.0 && load["busiest_node"].as_f64().unwrap() >= 1.0, "{report}");
    }
    assert_eq!(std::fs::read_dir(work.path()).unwrap().count(), 1, "nothing but the report is left");
}

#[test]
fn folders_without_a_model_are_refused() {
    let empty = tempfile::tempdir().unwrap();
    let dir = empty.path().to_str().unwrap();
    let out = load(&["--dir", dir, "--work-dir", dir]);
    assert_eq!(out.status.code(), Some(2));
    assert!(said(&out).contains("--make"), "{}", said(&out));
    let out = load(&["--size", "1K", "--work-dir", dir]);
    assert!(out.status.code() == Some(2) && said(&out).contains("give 2G"), "{}", said(&out));
}
