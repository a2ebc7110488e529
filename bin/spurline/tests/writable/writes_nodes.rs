//! Writable mounts through nodes: what one mount has closed the other reads, whichever node serves it, and a node that
//! is killed costs a pause.

use rustix::process::Signal;
use spurline_rig::world::*;
use spurline_rig::writable_group::Group;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn what_one_mount_has_closed_another_reads() {
    let Some(group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    fs::create_dir_all(one.path("a/b")).unwrap();
    let long = bytes(1, 5 * MIB + 77);
    for round in 0..8u64 {
        let path = format!("a/b/f{}", round % 3);
        let text = bytes(round, 200_000 + round as usize);
        fs::write(one.path(&path), &text).unwrap();
        assert!(fs::read(two.path(&path)).unwrap() == text, "{path} in round {round}");
        // And the other way, in place.
        let file = OpenOptions::new().write(true).open(two.path(&path)).unwrap();
        file.write_all_at(b"changed", 1000).unwrap();
        file.sync_all().unwrap();
        let seen = fs::read(one.path(&path)).unwrap();
        assert!(seen[1000..1007] == *b"changed" && seen.len() == text.len(), "{path} in round {round}");
    }
    fs::write(one.path("long"), &long).unwrap();
    assert!(fs::read(two.path("long")).unwrap() == long && fs::read(group.source.join("long")).unwrap() == long);
    // A directory is renamed with an open file in it, and an open file is removed.
    let mut open = OpenOptions::new().read(true).write(true).open(one.path("a/b/f0")).unwrap();
    fs::rename(one.path("a"), one.path("z")).unwrap();
    open.write_all(b"renamed").unwrap();
    assert_eq!(&fs::read(one.path("z/b/f0")).unwrap()[..7], b"renamed");
    fs::hard_link(one.path("z/b/f0"), one.path("link")).unwrap();
    assert_eq!(fs::metadata(one.path("link")).unwrap().nlink(), 2);
    fs::remove_file(one.path("z/b/f0")).unwrap();
    fs::remove_file(one.path("link")).unwrap();
    open.rewind().unwrap();
    let mut text = [0; 7];
    open.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"renamed");
    // Records of two mounts never overwrite each other.
    let append = |mount: &Mount| OpenOptions::new().append(true).create(true).open(mount.path("log")).unwrap();
    let (mut first, mut second) = (append(&one), append(&two));
    for _ in 0..100 {
        first.write_all(b"one\n").unwrap();
        second.write_all(b"second\n").unwrap();
    }
    drop((first, second));
    let log = fs::read_to_string(group.source.join("log")).unwrap();
    assert_eq!((log.matches("one\n").count(), log.matches("second\n").count(), log.len()), (100, 100, 1100));
    fs::set_permissions(one.path("long"), fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(group.source.join("long")).unwrap().mode() & 0o777, 0o640);
    drop(open);
    one.unmount();
    two.unmount();
}

/// Writers go on while a node is killed, stopped and started again: no wrong byte, nothing twice, and no error.
#[test]
fn a_lost_node_costs_writers_a_pause() {
    let Some(mut group) = Group::start(2) else { return };
    let mount = group.mount("mnt", 0, &["--peer-silence", "1s"]);
    let (stop, steps) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 3]);
    let longest = AtomicU64::new(0);
    // A process that is stopped between its last check and the system call executes late, as docs/design/writes-nodes.md says:
    // here, no change is under way in a node that is stopped.
    let under_way = RwLock::new(());
    let timed = |step: &AtomicU64, job: &mut dyn FnMut()| {
        let _under_way = under_way.read();
        let start = Instant::now();
        job();
        longest.fetch_max(start.elapsed().as_millis() as u64, Ordering::Relaxed);
        step.fetch_add(1, Ordering::Release);
    };
    let block = bytes(9, 256 << 10);
    let (blocks, lines, names) = std::thread::scope(|scope| {
        let blocks = scope.spawn(|| {
            let file = File::create(mount.path("blocks")).unwrap();
            let mut done = 0u64;
            while !stop.load(Ordering::Acquire) {
                timed(&steps[0], &mut || {
                    file.write_all_at(&block, done % 64 * block.len() as u64).unwrap();
                    if done % 16 == 15 {
                        file.sync_all().unwrap();
                    }
                });
                done += 1;
            }
            file.sync_all().unwrap();
            done
        });
        let lines = scope.spawn(|| {
            let mut file = OpenOptions::new().append(true).create(true).open(mount.path("lines")).unwrap();
            let mut done = 0u64;
            while !stop.load(Ordering::Acquire) {
                timed(&steps[1], &mut || {
                    file.write_all(format!("line {done}\n").as_bytes()).unwrap();
                    if done.is_multiple_of(32) {
                        file.sync_all().unwrap();
                    }
                });
                done += 1;
            }
            done
        });
        let names = scope.spawn(|| {
            let mut done = 0u64;
            while !stop.load(Ordering::Acquire) {
                timed(&steps[2], &mut || {
                    let (a, b) = (mount.path(format!("a{done}")), mount.path(format!("b{done}")));
                    fs::write(&a, "x").unwrap();
                    fs::rename(&a, &b).unwrap();
                    if done.is_multiple_of(2) {
                        fs::remove_file(&b).unwrap();
                    }
                });
                done += 1;
            }
            done
        });
        let ended = || blocks.is_finished() || lines.is_finished() || names.is_finished();
        let go_on = |more: u64| {
            let deadline = Instant::now() + PATIENCE;
            let until: Vec<u64> = steps.iter().map(|step| step.load(Ordering::Acquire) + more).collect();
            while !steps.iter().zip(&until).all(|(step, until)| step.load(Ordering::Acquire) >= *until) {
                assert!(Instant::now() < deadline && !ended(), "writers do not go on");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let script = std::panic::AssertUnwindSafe(|| {
            go_on(20);
            for n in [0, 1, 0] {
                group.nodes[n].process.kill();
                go_on(20);
                let port = group.nodes[n].port();
                group.nodes[n] = group.node(n, port);
                go_on(20);
                println!("node {n} killed: longest operation {} ms", longest.swap(0, Ordering::Relaxed));
            }
            for n in [1, 0] {
                let between = under_way.write();
                group.nodes[n].process.signal(Signal::STOP);
                drop(between);
                go_on(20);
                group.nodes[n].process.signal(Signal::CONT);
                go_on(20);
                println!("node {n} stopped: longest operation {} ms", longest.swap(0, Ordering::Relaxed));
            }
        });
        let outcome = std::panic::catch_unwind(script);
        stop.store(true, Ordering::Release);
        let done = (blocks.join(), lines.join(), names.join());
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (done.0.unwrap(), done.1.unwrap(), done.2.unwrap())
    });
    assert!(blocks >= 64, "{blocks} blocks");
    assert!(fs::read(group.source.join("blocks")).unwrap() == block.repeat(64));
    let wanted: String = (0..lines).map(|n| format!("line {n}\n")).collect();
    assert!(fs::read_to_string(group.source.join("lines")).unwrap() == wanted);
    for n in 0..names {
        let there = (group.source.join(format!("a{n}")).exists(), group.source.join(format!("b{n}")).exists());
        assert_eq!(there, (false, n % 2 == 1), "{n} of {names}");
    }
    mount.unmount();
}

/// What `copy_file_range` reports as copied stays, whichever node is killed: without an error, also of the sync behind it.
#[test]
fn copies_outlive_killed_nodes() {
    const CHUNK: usize = 64 << 10;
    let Some(mut group) = Group::start(2) else { return };
    let mount = group.mount("mnt", 0, &["--peer-silence", "1s"]);
    let text = bytes(4, 16 * CHUNK);
    fs::write(mount.path("from"), &text).unwrap();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let ended = std::thread::scope(|scope| {
        let copies = scope.spawn(|| {
            let from = File::open(mount.path("from")).unwrap();
            let options = || OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
            // Both are on one node, as soon as their names are.
            let names = (0..8).map(|n| format!("to{n}"));
            let to: Vec<File> = names.map(|name| options().open(mount.path(name)).unwrap()).collect();
            while !stop.load(Ordering::Acquire) {
                for to in &to {
                    // Bytes that the copy lies over, and some that lie over the copy.
                    to.write_all_at(&vec![1; 16 * CHUNK], 0).unwrap();
                    let (mut at, mut into) = (0, 0);
                    while (at as usize) < text.len() {
                        let copied =
                            rustix::fs::copy_file_range(&from, Some(&mut at), to, Some(&mut into), CHUNK).unwrap();
                        assert!(copied > 0, "at {at}");
                    }
                    to.write_all_at(b"over", 5).unwrap();
                }
                for to in &to {
                    to.sync_all().unwrap();
                    let mut seen = vec![0; text.len()];
                    to.read_exact_at(&mut seen, 0).unwrap();
                    assert!(seen[..5] == text[..5] && seen[5..9] == *b"over" && seen[9..] == text[9..]);
                }
                rounds.fetch_add(1, Ordering::Release);
            }
        });
        let script = std::panic::AssertUnwindSafe(|| {
            let go_on = |more: u64| {
                let until = rounds.load(Ordering::Acquire) + more;
                eventually("copies go on", || copies.is_finished() || rounds.load(Ordering::Acquire) >= until);
                assert!(!copies.is_finished(), "copies ended");
            };
            go_on(1);
            for n in [0, 1, 0, 1] {
                group.nodes[n].process.kill();
                go_on(1);
                let port = group.nodes[n].port();
                group.nodes[n] = group.node(n, port);
                go_on(2);
            }
        });
        let outcome = std::panic::catch_unwind(script);
        stop.store(true, Ordering::Release);
        let ended = copies.join();
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended
    });
    ended.unwrap();
    for n in 0..8 {
        assert!(fs::read(group.source.join(format!("to{n}"))).unwrap()[9..] == text[9..], "to{n}");
    }
    mount.unmount();
}

/// Open files of lost nodes are opened again by any of their names, and a file that can't be found is stale.
#[test]
fn open_files_are_found_again_under_other_names() {
    let Some(mut group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &["--peer-silence", "1s"]), group.mount("two", 1, &[]));
    let make = |name: &str| {
        let mut file = OpenOptions::new().create_new(true).append(true).open(one.path(name)).unwrap();
        file.write_all(b"before, ").unwrap();
        file.sync_all().unwrap();
        file
    };
    for folder in ["folder", "other", "gone"] {
        fs::create_dir(one.path(folder)).unwrap();
    }
    let linked = make("first");
    fs::hard_link(one.path("first"), one.path("folder/second")).unwrap();
    fs::remove_file(one.path("first")).unwrap();
    // Another mount rotates a log, and moves a file to where this one has seen it since.
    let rotated = make("log");
    fs::rename(two.path("log"), two.path("log.1")).unwrap();
    fs::write(two.path("log"), "a new log").unwrap();
    let moved = make("moved");
    fs::rename(two.path("moved"), two.path("other/moved")).unwrap();
    eventually("the mount sees the new name", || fs::metadata(one.path("other/moved")).is_ok());
    let lost = make("gone/file");
    fs::rename(two.path("gone"), two.path("renamed")).unwrap();
    for n in 0..2 {
        group.nodes[n].process.kill();
        let port = group.nodes[n].port();
        group.nodes[n] = group.node(n, port);
        // Each file is used on the node that is left.
        for mut file in [&linked, &rotated, &moved] {
            file.write_all(b"after").unwrap();
            file.sync_all().unwrap();
        }
        if n == 1 {
            let written = (&lost).write_all(b"after").and_then(|()| lost.sync_all());
            assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::ESTALE));
        }
    }
    for name in ["folder/second", "log.1", "other/moved"] {
        assert_eq!(fs::read_to_string(group.source.join(name)).unwrap(), "before, afterafter", "{name}");
    }
    assert_eq!(fs::read(group.source.join("renamed/file")).unwrap(), b"before, ");
    drop((linked, rotated, moved, lost));
    one.unmount();
    two.unmount();
}

#[test]
fn a_node_without_writable_is_named() {
    let Some(mut group) = Group::start(0) else { return };
    let source = group.source.to_str().unwrap().to_owned();
    let node = group.world.node(&[&source], 0, &[]);
    let at = group.world.dir("mnt");
    let registry = format!("static:{}", node.address);
    let out = group.world.run(&["mount", &source, at.to_str().unwrap(), "--rw", "--registry", &registry]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && said.contains("takes no changes") && said.contains("--writable"), "{said}");
    group.nodes.push(node);
    // A source that can't be changed, and a squash without changes.
    for words in [["--writable", "--source", "gs://b"], ["--squash", "1:1", "--source=/tmp"]] {
        let out = group.world.run(&[&["node"], &words[..]].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{words:?}: {said}");
        assert!(said.contains("--writable"), "{said}");
    }
}
