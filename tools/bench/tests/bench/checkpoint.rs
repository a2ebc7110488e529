//! `bench checkpoint` on plain folders and on own mounts.

use super::{
    NO_SPURLINE, bench, bench_command, check_page, names, passed, path_in, report, said, spurline_or_skip, write_script,
};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn command(words: &[&str]) -> Command {
    bench_command(&[&["checkpoint"], words, &NO_SPURLINE].concat())
}

#[test]
fn folders_stand_beside_each_other_and_nothing_is_left() {
    let (plain, other, reports) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (json, html) = (path_in(&reports, "r.json"), path_in(&reports, "r.html"));
    let first = format!("plain={}", plain.path().display());
    // The same folder under another path, as another mount would be.
    let second =
        format!("other={0}:{0}/../{1}", other.path().display(), other.path().file_name().unwrap().to_str().unwrap());
    let words = ["--dir", &first, "--dir", &second, "--ranks", "3", "--size", "2M", "--rounds", "2"];
    let text =
        passed(&command(&[&words[..], &["--json", &json, "--html", &html, "--plot"]].concat()).output().unwrap());
    for part in [
        "105 GB by 8 ranks",
        "6 MB by 3 ranks",
        "slowest rank s",
        "of plain",
        "all checksums agree",
        "Time of each rank, write",
        "plain: read back through the mount that wrote",
        "no mount of Spurline answers",
    ] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    assert!(!text.contains("other: read back through the mount that wrote"), "{text}");
    let report = report(&json);
    assert_eq!((&report["ranks"], &report["rank_bytes"]), (&3.into(), &(2 << 20).into()));
    let place = &report["places"][1];
    assert_eq!((&place["place"], &place["spurline_mount"]), (&"other".into(), &false.into()));
    for phase in ["write", "read"] {
        let runs = place[phase]["runs"].as_array().unwrap();
        assert_eq!((runs.len(), runs[1]["bytes"].as_u64()), (2, Some(3 * (2 << 20))));
        let slowest = runs[0]["ranks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank["seconds"].as_f64().unwrap())
            .fold(0.0, f64::max);
        assert_eq!(runs[0]["seconds"].as_f64(), Some(slowest), "the score is the slowest rank");
        assert!(place[phase]["ratio"].is_number() && runs[0]["cpu"]["ranks"]["seconds"].is_number(), "{place}");
    }
    check_page(&html);
    assert_eq!((names(plain.path()), names(other.path())), (vec![], vec![]));
    // Once more: the run before left nothing that is in its way.
    passed(&command(&words).output().unwrap());
    assert!(names(plain.path()).is_empty());
}

#[test]
fn hosts_over_ssh_read_what_the_other_one_wrote() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(path_in(&dir, "data")).unwrap();
    // ssh OPTIONS -- HOST WORDS…, all on this host; and 'spurline bench' is this program.
    write_script(path_in(&dir, "ssh"), "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\nexec \"$@\"\n");
    write_script(
        path_in(&dir, "spurline"),
        &format!("#!/bin/sh\nshift\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_spurline-bench")),
    );
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let json = path_in(&dir, "r.json");
    let folder = format!("shared={}", path_in(&dir, "data"));
    let words = ["--hosts", "h1,h2", "--dir", &folder, "--size", "1M", "--rounds", "1", "--model", "llama3-405b"];
    let run = || command(&[&words[..], &["--json", &json]].concat()).env("PATH", &path).output().unwrap();
    passed(&run());
    let report = report(&json);
    assert_eq!((&report["hosts"], &report["ranks"]), (&serde_json::json!(["h1", "h2"]), &16.into()));
    assert_eq!(report["places"][0]["read"]["runs"][0]["ranks"].as_array().unwrap().len(), 16);
    assert!(names(Path::new(&path_in(&dir, "data"))).is_empty());
    // A host without the program, and one that can't be reached.
    write_script(path_in(&dir, "spurline"), "#!/bin/sh\necho 'sh: spurline: not found' >&2\nexit 127\n");
    let out = run();
    assert!(out.status.code() == Some(3) && said(&out).contains("spurline: not found"), "{}", said(&out));
    write_script(path_in(&dir, "ssh"), "#!/bin/sh\necho 'Permission denied (publickey).' >&2; exit 255\n");
    let out = run();
    assert!(out.status.code() == Some(3) && said(&out).contains("Permission denied (publickey)"), "{}", said(&out));
}

/// Waits until a run has written something.
fn wait_for_files(dir: &Path) {
    for _ in 0..3000 {
        if names(dir).iter().any(|name| !names(&dir.join(name)).is_empty()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("nothing was written");
}

#[test]
fn an_interrupted_run_removes_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().display().to_string();
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::KILL] {
        let words = ["--dir", &folder, "--ranks", "2", "--size", "64M", "--rounds", "99"];
        let mut child = command(&words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for_files(dir.path());
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let status = child.wait().unwrap();
        if signal == rustix::process::Signal::INT {
            assert_eq!(status.code(), Some(1));
            assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
        }
        // The worker of a killed run sees the end of its input.
        for _ in 0..3000 {
            if names(dir.path()).is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }
}

#[test]
fn own_mounts_write_and_read_through_each_other() {
    let Some(spurline) = spurline_or_skip() else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(path_in(&dir, "work")).unwrap();
    let run = |words: &[&str]| -> Output {
        bench(&[&["checkpoint", "--spurline", spurline.to_str().unwrap()], words].concat())
    };
    let (work, json) = (path_in(&dir, "work"), path_in(&dir, "r.json"));
    let out = run(&["--work-dir", &work, "--json", &json, "--ranks", "2", "--size", "2M", "--rounds", "1"]);
    passed(&out);
    let report = report(&json);
    let shape: Vec<(&str, bool)> = report["places"]
        .as_array()
        .unwrap()
        .iter()
        .map(|place| (place["place"].as_str().unwrap(), place["spurline_mount"].as_bool().unwrap()))
        .collect();
    assert_eq!(shape, [("directory", false), ("mount", true), ("node", true)], "{}", said(&out));
    // The counters prove the way of the bytes.
    let counters = |phase: &str, name: &str| report["places"][2][phase]["runs"][0]["counters"][name].as_u64();
    assert!(counters("write", "mount.tcp.send_bytes") >= Some(4 << 20), "{report}");
    assert!(counters("read", "mount.tcp.recv_bytes") >= Some(4 << 20), "{report}");
    assert!(names(Path::new(&work)).is_empty());
    // A mount that is read-only is refused before anything is written.
    let (source, mnt) = (path_in(&dir, "source"), path_in(&dir, "mnt"));
    std::fs::create_dir(&source).unwrap();
    std::fs::create_dir(&mnt).unwrap();
    let mut mount = Command::new(&spurline);
    mount.args([
        "mount",
        &source,
        &mnt,
        "-d",
        "--metrics",
        "none",
        "--cache-dir",
        &path_in(&dir, "cache"),
        "--log",
        &path_in(&dir, "log"),
    ]);
    assert!(mount.status().unwrap().success());
    let out = run(&["--dir", &mnt, "--size", "64K"]);
    assert!(Command::new(&spurline).args(["umount", &mnt]).status().unwrap().success());
    assert!(out.status.code() == Some(3) && said(&out).contains("spurline mount --rw"), "{}", said(&out));
}

#[test]
fn wrong_words_and_places_say_what_is_right() {
    let refused = |words: &[&str], code, says| {
        super::refused(&[&["checkpoint"], words, &NO_SPURLINE].concat(), code, says);
    };
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    refused(&["--model", "gpt"], 2, "llama3-8b");
    refused(&["--dir", "mnt"], 2, "absolute folders");
    refused(&["--dir", folder, "--size", "1K"], 2, "--size below 64K");
    refused(&["--hosts", "a,b", "--ranks", "1", "--dir", folder], 2, "each has a rank");
    refused(&["--hosts", "a,b"], 2, "--dir");
    refused(&["--dir", "/no/such/folder"], 3, "there is no folder /no/such/folder");
    refused(&["--dir", folder, "--size", "1000T"], 3, "fewer --ranks");
    let elsewhere = tempfile::tempdir().unwrap();
    let pair = format!("{folder}:{}", elsewhere.path().display());
    refused(&["--dir", &pair], 1, "is it the same source");
    // Read-only places: a file system, and a folder of another user.
    refused(&["--dir", "/proc/self", "--size", "64K", "--ranks", "1"], 3, "/proc/self");
    assert!(names(dir.path()).is_empty() && names(elsewhere.path()).is_empty());
}
