//! `bench checkpoint` as users run it, on plain folders: the report, workers over a stand-in for ssh, an interrupted run,
//! and what goes wrong. Mounts are in the tests of the program.

use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spurline-bench"));
    command.arg("checkpoint").args(words).args(["--spurline", "/bin/false"]);
    command
}

fn bench(words: &[&str]) -> Output {
    command(words).output().unwrap()
}

fn said(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

fn names(dir: &Path) -> Vec<String> {
    std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn folders_stand_beside_each_other_and_nothing_is_left() {
    let (plain, other, reports) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| reports.path().join(name).display().to_string();
    let (json, html) = (at("r.json"), at("r.html"));
    let first = format!("plain={}", plain.path().display());
    // The same folder under another path, as another mount would be.
    let second =
        format!("other={0}:{0}/../{1}", other.path().display(), other.path().file_name().unwrap().to_str().unwrap());
    let words = ["--dir", &first, "--dir", &second, "--ranks", "3", "--size", "2M", "--rounds", "2"];
    let out = bench(&[&words[..], &["--json", &json, "--html", &html, "--plot"]].concat());
    let text = said(&out);
    assert!(out.status.success(), "{text}");
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
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
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
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(page.contains("<svg") && !page.contains("http://") && !page.contains("https://"));
    assert_eq!((names(plain.path()), names(other.path())), (vec![], vec![]));
    // Once more: the run before left nothing that is in its way.
    let out = bench(&words);
    assert!(out.status.success() && names(plain.path()).is_empty(), "{}", said(&out));
}

#[test]
fn hosts_over_ssh_read_what_the_other_one_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir(at("data")).unwrap();
    let script = |name: &str, text: &str| {
        std::fs::write(at(name), text).unwrap();
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    // ssh OPTIONS -- HOST WORDS…, all on this host; and 'spurline bench' is this program.
    script("ssh", "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\nexec \"$@\"\n");
    script("spurline", &format!("#!/bin/sh\nshift\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_spurline-bench")));
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let json = at("r.json");
    let folder = format!("shared={}", at("data"));
    let words = ["--hosts", "h1,h2", "--dir", &folder, "--size", "1M", "--rounds", "1", "--model", "llama3-405b"];
    let run = || command(&[&words[..], &["--json", &json]].concat()).env("PATH", &path).output().unwrap();
    let out = run();
    assert!(out.status.success(), "{}", said(&out));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!((&report["hosts"], &report["ranks"]), (&serde_json::json!(["h1", "h2"]), &16.into()));
    assert_eq!(report["places"][0]["read"]["runs"][0]["ranks"].as_array().unwrap().len(), 16);
    assert!(names(Path::new(&at("data"))).is_empty());
    // A host without the program, and one that can't be reached.
    script("spurline", "#!/bin/sh\necho 'sh: spurline: not found' >&2\nexit 127\n");
    let out = run();
    assert!(out.status.code() == Some(3) && said(&out).contains("spurline: not found"), "{}", said(&out));
    script("ssh", "#!/bin/sh\necho 'Permission denied (publickey).' >&2; exit 255\n");
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

/// The program that mounts, which is built with all tests; none on a machine without FUSE.
fn spurline_or_skip() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_BIN_EXE_spurline-bench")).with_file_name("spurline");
    let lacks = [
        (!program.is_file()).then_some("spurline is not built"),
        (!Path::new("/dev/fuse").exists()).then_some("there is no /dev/fuse"),
        (!rustix::process::geteuid().is_root()).then_some("network namespaces need root"),
    ];
    let Some(why) = lacks.into_iter().flatten().next() else { return Some(program) };
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| matches!(word, "netns" | "fuse")), "{why}");
    println!("SKIP: {why}");
    None
}

#[test]
fn own_mounts_write_and_read_through_each_other() {
    let Some(spurline) = spurline_or_skip() else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir(at("work")).unwrap();
    let run = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spurline-bench"));
        command.arg("checkpoint").args(words).arg("--spurline").arg(&spurline).output().unwrap()
    };
    let (work, json) = (at("work"), at("r.json"));
    let out = run(&["--work-dir", &work, "--json", &json, "--ranks", "2", "--size", "2M", "--rounds", "1"]);
    assert!(out.status.success(), "{}", said(&out));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
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
    let (source, mnt) = (at("source"), at("mnt"));
    std::fs::create_dir(&source).unwrap();
    std::fs::create_dir(&mnt).unwrap();
    let mut mount = Command::new(&spurline);
    mount.args(["mount", &source, &mnt, "-d", "--metrics", "none", "--cache-dir", &at("cache"), "--log", &at("log")]);
    assert!(mount.status().unwrap().success());
    let out = run(&["--dir", &mnt, "--size", "64K"]);
    assert!(Command::new(&spurline).args(["umount", &mnt]).status().unwrap().success());
    assert!(out.status.code() == Some(3) && said(&out).contains("spurline mount --rw"), "{}", said(&out));
}

#[test]
fn wrong_words_and_places_say_what_is_right() {
    let refused = |words: &[&str], code: i32, says: &str| {
        let out = bench(words);
        assert!(out.status.code() == Some(code) && said(&out).contains(says), "{words:?}: {}", said(&out));
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
