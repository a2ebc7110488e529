//! `bench train` on plain folders: the files, the reports, and wrong words.

use super::{NO_SPURLINE, bench, check_page, names, passed, path_in, report};

#[test]
fn files_are_made_and_a_folder_feeds_what_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let (files, json, html) = (path_in(&dir, "files"), path_in(&dir, "report.json"), path_in(&dir, "report.html"));
    let model = ["train", "--model", "retinanet", "--accelerator", "b200"];
    let made = passed(&bench(&[&model[..], &["--make", &files, "--data", "8M"]].concat()));
    assert!(made.contains("26 files of retinanet"), "{made}");
    // No spurline answers for a plain folder.
    let words = ["--dir", &files, "--accelerators", "1", "--time", "300ms", "--rounds", "2"];
    let reports = ["--json", &json, "--html", &html, "--work-dir", dir.path().to_str().unwrap(), "--plot"];
    let said = passed(&bench(&[&model[..], &words, &reports, &NO_SPURLINE].concat()));
    for part in ["0.163 GB/s and 505 opens/s", "85 %", "CPU-s/GiB reader", "Throughput over time", "- required"] {
        assert!(said.contains(part), "{part:?} is missing: {said}");
    }
    let report = report(&json);
    assert_eq!((&report["model"], &report["required_utilisation"]), (&"retinanet".into(), &0.85.into()));
    let feed = &report["feeds"][0];
    assert_eq!((feed["feed"].as_str().unwrap(), feed["runs"].as_array().unwrap().len()), (&*files, 2));
    let run = &feed["runs"][0];
    assert!(run["bytes"].as_u64() > Some(0) && run["opens"].as_u64() > Some(0), "{run}");
    assert!(run["cpu"]["reader"]["seconds_per_gib"].is_number() && run["over_time"].is_array(), "{run}");
    check_page(&html);
    // Nothing is left behind but what was asked for.
    assert_eq!(names(dir.path()).len(), 3, "{:?}", names(dir.path()));
}

#[test]
fn wrong_words_say_what_is_right() {
    let refused = |words: &[&str], code, says| super::refused(&[&["train"], words].concat(), code, says);
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
