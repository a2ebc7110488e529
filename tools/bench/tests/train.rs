//! `bench train` as users run it, on plain folders: the files, the reports, and wrong words.

use serde_json::Value;
use std::process::{Command, Output};

fn bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spurline-bench")).arg("train").args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn files_are_made_and_a_folder_feeds_what_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (files, json, html) = (at("files"), at("report.json"), at("report.html"));
    let model = ["--model", "retinanet", "--accelerator", "b200"];
    let made = bench(&[&model[..], &["--make", &files, "--data", "8M"]].concat());
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert!(text(&made.stdout).contains("26 files of retinanet"), "{}", text(&made.stdout));
    // No spurline answers for a plain folder.
    let words =
        ["--dir", &files, "--accelerators", "1", "--time", "300ms", "--rounds", "2", "--spurline", "/bin/false"];
    let reports = ["--json", &json, "--html", &html, "--work-dir", dir.path().to_str().unwrap(), "--plot"];
    let out = bench(&[&model[..], &words, &reports].concat());
    let said = text(&out.stdout);
    assert!(out.status.success(), "{said}{}", text(&out.stderr));
    for part in ["0.163 GB/s and 505 opens/s", "85 %", "CPU-s/GiB reader", "Throughput over time", "- required"] {
        assert!(said.contains(part), "{part:?} is missing: {said}");
    }
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!((&report["model"], &report["required_utilisation"]), (&"retinanet".into(), &0.85.into()));
    let feed = &report["feeds"][0];
    assert_eq!((feed["feed"].as_str().unwrap(), feed["runs"].as_array().unwrap().len()), (&*files, 2));
    let run = &feed["runs"][0];
    assert!(run["bytes"].as_u64() > Some(0) && run["opens"].as_u64() > Some(0), "{run}");
    assert!(run["cpu"]["reader"]["seconds_per_gib"].is_number() && run["over_time"].is_array(), "{run}");
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(page.contains("<svg") && !page.contains("http://") && !page.contains("https://"));
    // Nothing is left behind but what was asked for.
    let left: Vec<String> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn wrong_words_say_what_is_right() {
    let refused = |words: &[&str], code: i32, says: &str| {
        let out = bench(words);
        let said = text(&out.stderr);
        assert!(out.status.code() == Some(code) && said.contains(says), "{words:?}: {said}");
    };
    refused(&["--model", "cosmoflow", "--accelerator", "b200"], 2, "give --accelerator h100");
    refused(&["--model", "bert"], 2, "unet3d");
    refused(&["--model", "unet3d", "--time", "1ms"], 2, "--time below 100ms");
    let empty = tempfile::tempdir().unwrap();
    let dir = empty.path().to_str().unwrap();
    refused(&["--model", "unet3d", "--dir", dir, "--spurline", "/bin/false"], 3, "bench train --make");
    refused(&["--model", "unet3d", "--make", dir, "--data", "20T"], 3, "MiB free");
    let absent = empty.path().join("absent/files");
    refused(&["--model", "unet3d", "--make", absent.to_str().unwrap(), "--data", "20T"], 3, "MiB free");
    assert!(!absent.parent().unwrap().exists(), "nothing is made when the files do not fit");
}
