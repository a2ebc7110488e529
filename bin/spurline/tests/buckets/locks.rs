//! Locks of a bucket's files between mounts that use the same nodes: exclusion, waits, bytes that were written under a lock,
//! and lost nodes.

use crate::nodes::{BUCKET, NodesRig};
use rustix::fs::FlockOperation;
use spurline_rig::file_locks::*;
use spurline_rig::world::*;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const UNLOCK: FlockOperation = FlockOperation::NonBlockingUnlock;

fn number_in(rig: &NodesRig, name: &str) -> u64 {
    let object = rig.server.bytes(BUCKET, &format!("p/{name}")).unwrap();
    u64::from_le_bytes(object.try_into().unwrap())
}

#[test]
fn locks_of_a_bucket_hold_between_mounts() {
    const ADDED_BY_THREAD: u64 = 8;
    let Some(rig) = NodesRig::start_with(2, &[]) else { return };
    let one = rig.mount("one", &["--fuse-io", "dev"]);
    let two = rig.mount("two", &["--fuse-io", "uring"]);
    for name in ["a", "b", "c"] {
        check_exclusion(&one.path(name), &two.path(name));
    }
    // Whatever the one has written under its lock, the other reads under its own.
    for flock in [true, false] {
        let name = format!("number-{flock}");
        count_together(&[one.path(&name), two.path(&name)], ADDED_BY_THREAD, flock);
        assert_eq!(number_in(&rig, &name), 4 * ADDED_BY_THREAD, "{name}");
    }
    check_kept_files(&rig, &one, &two);
    ["a", "b", "c"].iter().for_each(|name| check_renamed(&one, &two, name));
    let info = rig.world.run(&["info", "--json", one.path("log").to_str().unwrap()]);
    let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(info["writes"]["locks"], "group", "{info}");
    one.unmount();
    two.unmount();
}

/// A release publishes, a lock without changes does not, and a file that another mount has made longer is appended to at its end.
fn check_kept_files(rig: &NodesRig, one: &Mount, two: &Mount) {
    let mine = open(&one.path("log"));
    let other = fs::OpenOptions::new().append(true).create(true).open(two.path("log")).unwrap();
    assert!(try_lock(&mine, libc::F_WRLCK, 0..100) && !try_lock(&other, libc::F_WRLCK, 0..1));
    mine.write_all_at(&[1; 3000], 0).unwrap();
    assert!(rig.server.bytes(BUCKET, "p/log").unwrap().is_empty(), "visible before the release");
    assert!(try_lock(&mine, libc::F_RDLCK, 0..100));
    assert_eq!(rig.server.bytes(BUCKET, "p/log").unwrap().len(), 3000, "a lock that lets others in publishes");
    assert!(try_lock(&mine, libc::F_UNLCK, 0..100) && try_lock(&other, libc::F_WRLCK, 0..100));
    assert_eq!(other.metadata().unwrap().len(), 3000);
    (&other).write_all(&[2; 50]).unwrap();
    assert!(try_lock(&other, libc::F_UNLCK, 0..100) && try_lock(&mine, libc::F_WRLCK, 0..100));
    let mut bytes = vec![0; 4000];
    assert_eq!(mine.read_at(&mut bytes, 0).unwrap(), 3050);
    assert!(bytes[..3000] == [1; 3000] && bytes[3000..3050] == [2; 50]);
    mine.set_len(10).unwrap();
    assert!(try_lock(&mine, libc::F_UNLCK, 0..100) && try_lock(&other, libc::F_WRLCK, 0..100));
    assert_eq!(other.metadata().unwrap().len(), 10);
    (&other).write_all(&[3; 5]).unwrap();
    drop((mine, other));
    let object = rig.server.bytes(BUCKET, "p/log").unwrap();
    assert_eq!(object, [[1; 10].as_slice(), &[3; 5]].concat());
}

/// A file keeps its locks under its new name, on whichever node.
fn check_renamed(one: &Mount, two: &Mount, name: &str) {
    let mine = open(&one.path(name));
    assert!(try_flock(&mine, EXCLUSIVE) && try_lock(&mine, libc::F_WRLCK, 0..10));
    mine.write_all_at(b"renamed", 0).unwrap();
    let new_name = format!("new-{name}");
    fs::rename(one.path(name), one.path(&new_name)).unwrap();
    let other = open(&two.path(&new_name));
    assert!(!try_flock(&other, SHARED) && !try_lock(&other, libc::F_WRLCK, 9..20));
    mine.write_all_at(b"written", 0).unwrap();
    assert!(try_flock(&mine, UNLOCK) && try_lock(&mine, libc::F_UNLCK, 0..10));
    assert!(try_flock(&other, EXCLUSIVE) && try_lock(&other, libc::F_WRLCK, 9..20));
    let mut bytes = [0; 7];
    other.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"written");
}

/// Two mounts can have a file at two nodes: the first one opened its files before the second node was there.
#[test]
fn a_lock_at_another_node_is_found() {
    let Some(rig) = NodesRig::start_with(2, &[]) else { return };
    let one = rig.mount_of(&rig.nodes[..1], "one", &[]);
    let two = rig.mount("two", &[]);
    let names: Vec<String> = (0..6).map(|n| format!("f{n}")).collect();
    let held: Vec<File> = names.iter().map(|name| open(&one.path(name))).collect();
    let others: Vec<File> = names.iter().map(|name| open(&two.path(name))).collect();
    for (file, other) in held.iter().zip(&others) {
        assert!(try_lock(file, libc::F_WRLCK, 0..10) && try_lock(other, libc::F_RDLCK, 10..20));
        // The lock before stays.
        assert!(!try_lock(other, libc::F_WRLCK, 5..15));
        let mut seen = record(libc::F_RDLCK, 0..100);
        call(other, libc::F_OFD_GETLK, &mut seen).unwrap();
        assert_eq!((seen.l_type, seen.l_start, seen.l_len), (libc::F_WRLCK as i16, 0, 10));
        file.write_all_at(b"first", 0).unwrap();
        assert!(try_lock(file, libc::F_UNLCK, 0..10) && try_lock(other, libc::F_WRLCK, 0..10));
        let mut bytes = [0; 5];
        other.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"first");
    }
    drop((held, others));
    one.unmount();
    two.unmount();
}

/// Files with locks move to the next node with them, and with what was written under the locks.
#[test]
fn locks_of_a_bucket_outlive_a_lost_node() {
    let Some(mut rig) = NodesRig::start_with(2, &[]) else { return };
    let one = rig.mount("one", &[]);
    let two = rig.mount("two", &[]);
    let names: Vec<String> = (0..6).map(|n| format!("f{n}")).collect();
    let held: Vec<File> = names.iter().map(|name| open(&one.path(name))).collect();
    let others: Vec<File> = names.iter().map(|name| open(&two.path(name))).collect();
    for file in &held {
        assert!(try_lock(file, libc::F_WRLCK, 0..10) && try_flock(file, EXCLUSIVE));
        file.write_all_at(b"mine", 0).unwrap();
    }
    rig.nodes[0].process.kill();
    for file in &held {
        file.write_all_at(b" still", 4).unwrap();
    }
    for other in &others {
        assert!(!try_lock(other, libc::F_WRLCK, 5..6) && !try_flock(other, SHARED));
        assert!(try_lock(other, libc::F_WRLCK, 10..20) && try_lock(other, libc::F_UNLCK, 10..20));
    }
    for file in &held {
        assert!(try_lock(file, libc::F_UNLCK, 0..10) && try_flock(file, UNLOCK));
    }
    for other in &others {
        assert!(try_lock(other, libc::F_WRLCK, 0..10) && try_flock(other, EXCLUSIVE));
        let mut bytes = [0; 10];
        other.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"mine still");
    }
    drop((held, others));
    one.unmount();
    two.unmount();
}

/// Both nodes are lost at once: the next ones do not know which locks they had granted.
#[test]
fn a_lost_lock_of_a_bucket_publishes_nothing() {
    let Some(mut rig) = NodesRig::start_with(2, &[]) else { return };
    let mount = rig.mount("one", &[]);
    let changed = open(&mount.path("changed"));
    let unchanged = open(&mount.path("unchanged"));
    for file in [&changed, &unchanged] {
        assert!(try_flock(file, EXCLUSIVE));
        file.write_all_at(b"before", 0).unwrap();
        file.sync_all().unwrap();
    }
    changed.write_all_at(b"lost..", 0).unwrap();
    let endpoint = rig.server.endpoint();
    rig.nodes.iter_mut().for_each(|node| node.process.kill());
    for number in 0..2 {
        let port = rig.nodes[number].port();
        rig.nodes[number] = rig.node(number, port, &endpoint);
    }
    // The mount takes changes until it has noticed the loss, and publishes none of them.
    let is_refused = |error: std::io::Error| error.raw_os_error() == Some(libc::EIO);
    eventually("a change is refused", || unchanged.set_len(6).is_err_and(is_refused));
    eventually("a write is refused", || changed.write_at(b"refused", 0).is_err_and(is_refused));
    // Without changes, a release is enough.
    assert!(try_flock(&unchanged, UNLOCK));
    unchanged.write_all_at(b"after.", 0).unwrap();
    unchanged.sync_all().unwrap();
    assert_eq!(rustix::fs::fsync(&changed), Err(rustix::io::Errno::IO));
    drop((changed, unchanged));
    assert_eq!(rig.server.bytes(BUCKET, "p/changed").unwrap(), b"before");
    assert_eq!(rig.server.bytes(BUCKET, "p/unchanged").unwrap(), b"after.");
    let again = open(&mount.path("changed"));
    eventually("another lock is granted", || try_flock(&again, EXCLUSIVE));
    again.write_all_at(b"again.", 0).unwrap();
    drop(again);
    assert_eq!(rig.server.bytes(BUCKET, "p/changed").unwrap(), b"again.");
    mount.unmount();
}

/// Counts under the lock of a file until the end; returns how often.
fn count_up(mount: &Mount, name: &str, turns: &AtomicUsize, ended: &AtomicBool) -> u64 {
    let file = open(&mount.path(name));
    let mut count = 0;
    while !ended.load(Ordering::SeqCst) {
        add_one(&file, true);
        count += 1;
        turns.fetch_add(1, Ordering::SeqCst);
        // The other one gets its turn.
        std::thread::sleep(Duration::from_millis(10));
    }
    count
}

/// Waits until each file was counted up ten times more, or a thread has ended.
fn wait_for_turns(turns: &[AtomicUsize], is_over: impl Fn() -> bool) {
    let before: Vec<usize> = turns.iter().map(|turns| turns.load(Ordering::SeqCst)).collect();
    while turns.iter().zip(&before).any(|(turns, before)| turns.load(Ordering::SeqCst) < before + 10) && !is_over() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Two mounts count under a lock while a node is lost: no update is lost, and no call fails.
#[test]
fn a_counter_in_a_bucket_survives_a_lost_node() {
    let Some(mut rig) = NodesRig::start_with(2, &[]) else { return };
    let one = rig.mount("one", &[]);
    let two = rig.mount("two", &[]);
    let names = ["n0", "n1", "n2"];
    let ended = AtomicBool::new(false);
    let turns = names.map(|_| AtomicUsize::new(0));
    let counted: Vec<u64> = std::thread::scope(|scope| {
        let mut counters = Vec::new();
        let ended = &ended;
        for (name, turns) in names.iter().zip(&turns) {
            for mount in [&one, &two] {
                counters.push(scope.spawn(move || count_up(mount, name, turns, ended)));
            }
        }
        wait_for_turns(&turns, || counters.iter().any(|counter| counter.is_finished()));
        rig.nodes[0].process.kill();
        wait_for_turns(&turns, || counters.iter().any(|counter| counter.is_finished()));
        ended.store(true, Ordering::SeqCst);
        counters.into_iter().map(|counter| counter.join().unwrap()).collect()
    });
    for (name, counted) in names.iter().zip(counted.chunks(2)) {
        assert_eq!(number_in(&rig, name), counted.iter().sum::<u64>(), "{name}");
    }
    one.unmount();
    two.unmount();
}
