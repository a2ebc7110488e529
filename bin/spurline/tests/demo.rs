//! The demo, run and interrupted: right figures, and nothing left behind either way.

use serde_json::Value;
use spurline_rig::program::{mounted_below, spurline, wait_for};
use std::path::Path;
use std::process::{Command, Stdio};

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn it_runs_and_leaves_nothing() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let dir = spurline_rig::program::tempdir();
    let out = spurline().args(["demo", "--json", "--size", "6M", "--dir"]).arg(dir.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["checksums"], "equal");
    let bytes = report["bytes"].as_u64().unwrap();
    let [cold, hot] = [&report["passes"][0], &report["passes"][1]];
    // Every byte came from the origin once, and over the network in each pass.
    assert!(cold["under_store_bytes"].as_u64().unwrap() >= bytes, "{report}");
    assert_eq!(hot["under_store_bytes"], 0, "{report}");
    assert!(hot["remote_bytes"].as_u64().unwrap() >= bytes, "{report}");
    assert!(is_empty(dir.path()) && !mounted_below(dir.path()));
}

#[test]
fn interrupted_it_leaves_nothing_either() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let dir = spurline_rig::program::tempdir();
    let mut demo = spurline()
        .args(["demo", "--size", "256M", "--dir"])
        .arg(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the demo's mount", || mounted_below(dir.path()) || demo.try_wait().unwrap().is_some());
    let sent = Command::new("kill").args(["-INT", &demo.id().to_string()]).status().unwrap();
    assert!(sent.success());
    wait_for("the demo's end", || demo.try_wait().unwrap().is_some());
    assert_eq!(demo.wait().unwrap().code(), Some(1));
    assert!(is_empty(dir.path()) && !mounted_below(dir.path()));
}
