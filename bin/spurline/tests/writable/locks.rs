//! Locks of writable mounts: among the programs of a mount, of several mounts, and of the source itself; waits for them,
//! signals, and a node that is lost.

use rustix::fs::FlockOperation;
use rustix::process::Signal;
use spurline_rig::file_locks::*;
use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, WAYS, has};
use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Locks a file, closes it, and locks it again through the next descriptor without a wait.
const CLOSE_AND_LOCK: &str = r#"
import fcntl, os, struct, sys
name, rounds, family = sys.argv[1], int(sys.argv[2]), sys.argv[3]
F_OFD_SETLK = 37
record = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
for done in range(rounds):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    if family == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        fcntl.fcntl(fd, F_OFD_SETLK, record)
    os.close(fd)
"#;

/// More than there are processors: the threads of the mount then serve requests in another order than they came.
const CLOSING_PROGRAMS: usize = 8;

/// Each program has files of its own, so that no lock is ever taken. The kernel reports the end of an open file after close(2) has
/// returned.
fn close_and_lock_again(mount: &Mount) {
    const ROUNDS: &str = "400";
    let start = |n: usize| {
        // A process of its own: this one has copies of its descriptors while it starts programs.
        let mut program = Command::new("python3");
        program
            .args(["-c", CLOSE_AND_LOCK])
            .arg(mount.path(format!("again-{n}")))
            .args([ROUNDS, if n.is_multiple_of(2) { "ofd" } else { "flock" }]);
        program.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let programs: Vec<Child> = (0..CLOSING_PROGRAMS).map(start).collect();
    for program in programs {
        let out = program.wait_with_output().unwrap();
        assert!(out.status.success(), "a lock was refused: {out:?}");
    }
}

#[test]
fn a_lock_of_a_closed_file_is_free_at_once() {
    if !has("python3") || !can_mount() {
        return;
    }
    for way in [WAYS[1], WAYS[2]] {
        let world = World::new();
        let source = world.dir("source");
        let mount = world.mount(source.to_str().unwrap(), &[&["--rw"], way].concat());
        close_and_lock_again(&mount);
    }
    let Some(group) = Group::start(2) else { return };
    for name in ["dev", "uring"] {
        let mount = group.mount(name, 0, &["--fuse-io", name]);
        close_and_lock_again(&mount);
        for n in 0..CLOSING_PROGRAMS {
            let file = open(&group.source.join(format!("again-{n}")));
            eventually("no lock is left behind", || {
                try_lock(&file, libc::F_WRLCK, 0..10) && try_flock(&file, EXCLUSIVE)
            });
        }
        mount.unmount();
    }
}

#[test]
fn locks_hold_in_a_mount_and_in_its_source() {
    for way in WAYS {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let source = world.dir("source");
        let mount = world.mount(source.to_str().unwrap(), &[&["--rw"], way].concat());
        check_exclusion(&mount.path("a"), &mount.path("a"));
        check_exclusion(&mount.path("b"), &source.join("b"));
        check_exclusion(&source.join("c"), &mount.path("c"));
        // A lock names its process.
        let (mine, other) = (open(&mount.path("d")), open(&mount.path("d")));
        assert!(try_lock(&mine, libc::F_WRLCK, 0..10));
        let mut seen = record(libc::F_WRLCK, 0..1);
        call(&other, libc::F_GETLK, &mut seen).unwrap();
        assert_eq!(seen.l_pid, std::process::id() as i32);
        drop((mine, other));
        let info = world.run(&["info", "--json", mount.path("a").to_str().unwrap()]);
        let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
        assert_eq!(info["writes"]["locks"], "source", "{info}");
    }
}

fn waiting_flock(path: &Path) -> Child {
    let mut command = Command::new("flock");
    command.arg(path).arg("true").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    command.spawn().unwrap()
}

/// More programs wait than the session has slots; it serves all else meanwhile, a signal ends a wait, and so does the
/// release.
#[test]
fn waits_for_a_lock_hold_up_nothing_else_and_end_by_signals() {
    const WAITERS: usize = 60;
    for way in [WAYS[1], WAYS[2]] {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let source = world.dir("source");
        let mount = world.mount(source.to_str().unwrap(), &[&["--rw"], way].concat());
        let path = mount.path("lock");
        let file = open(&path);
        assert!(try_flock(&file, EXCLUSIVE));
        let mut waiters: Vec<Child> = (0..WAITERS).map(|_| waiting_flock(&path)).collect();
        // Each has opened the file and waits.
        eventually("all wait", || mount.count("fuse", "open_handles") > WAITERS as u64);
        std::thread::sleep(Duration::from_millis(200));
        assert!(waiters.iter_mut().all(|waiter| waiter.try_wait().unwrap().is_none()));
        for n in 0..100 {
            fs::write(mount.path(format!("f{n}")), bytes(n, 10_000)).unwrap();
            assert_eq!(fs::read(mount.path(format!("f{n}"))).unwrap().len(), 10_000);
        }
        for (n, signal) in [Signal::KILL, Signal::TERM, Signal::KILL].into_iter().enumerate() {
            let mut waiter = waiters.remove(n);
            send(waiter.id(), signal);
            assert!(!waiter.wait().unwrap().success());
        }
        assert!(waiters.iter_mut().all(|waiter| waiter.try_wait().unwrap().is_none()));
        rustix::fs::flock(&file, FlockOperation::Unlock).unwrap();
        assert!(waiters.iter_mut().all(|waiter| waiter.wait().unwrap().success()));
        // The end of the file's last descriptor releases its lock.
        assert!(try_flock(&file, EXCLUSIVE));
        let mut waiter = waiting_flock(&path);
        eventually("it waits", || mount.count("fuse", "open_handles") > 1);
        drop(file);
        assert!(waiter.wait().unwrap().success());
    }
}

#[test]
fn two_mounts_through_nodes_see_each_others_locks() {
    const ADDED_BY_THREAD: u64 = 50;
    let Some(group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    for name in ["a", "b", "c"] {
        check_exclusion(&one.path(name), &two.path(name));
        check_exclusion(&one.path(name), &group.source.join(name));
    }
    // Whatever the one has written under its lock, the other reads under its own.
    for flock in [true, false] {
        let name = format!("number-{flock}");
        count_together(&[one.path(&name), two.path(&name)], ADDED_BY_THREAD, flock);
        let number: [u8; 8] = fs::read(group.source.join(&name)).unwrap().try_into().unwrap();
        assert_eq!(u64::from_le_bytes(number), 4 * ADDED_BY_THREAD, "{name}");
    }
}

/// Each lock and each open of another program makes the kernel drop answers about the length of the file. A reader
/// that holds its lock finds the whole file all the same.
#[test]
fn a_reader_with_a_lock_reads_up_to_the_end() {
    const WRITES: usize = 60;
    let Some(group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    drop(open(&one.path("log")));
    let (written, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let file = open(&two.path("log"));
                while !ended.load(Ordering::SeqCst) {
                    rustix::fs::flock(&file, FlockOperation::LockShared).unwrap();
                    let wanted = 8 * written.load(Ordering::SeqCst);
                    let mut bytes = vec![0; wanted];
                    file.read_exact_at(&mut bytes, 0).unwrap();
                    assert_eq!((&file).seek(SeekFrom::End(0)).unwrap(), wanted as u64);
                    rustix::fs::flock(&file, FlockOperation::Unlock).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                drop(File::open(two.path("log")).unwrap());
            }
        });
        let file = open(&one.path("log"));
        for n in 0..WRITES {
            rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
            file.write_all_at(&n.to_le_bytes(), 8 * n as u64).unwrap();
            written.store(n + 1, Ordering::SeqCst);
            rustix::fs::flock(&file, FlockOperation::Unlock).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        ended.store(true, Ordering::SeqCst);
    });
}

/// A file that is mapped shared and writable, until the end of the value.
struct SharedMap {
    start: *mut u8,
    len: usize,
}

impl SharedMap {
    fn new(file: &File, len: usize) -> SharedMap {
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a new mapping of an open file, removed when the value is dropped.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        SharedMap { start: start.cast(), len }
    }

    fn byte(&self, at: usize) -> *mut u8 {
        assert!(at < self.len);
        self.start.wrapping_add(at)
    }

    fn store(&self, at: usize, byte: u8) {
        // SAFETY: within the mapping, of a file that long.
        unsafe { self.byte(at).write_volatile(byte) }
    }

    fn load(&self, at: usize) -> u8 {
        // SAFETY: within the mapping, of a file that long.
        unsafe { self.byte(at).read_volatile() }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made with this length.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// What a program stores into a shared map under its lock is there for the next one that gets the lock.
#[test]
fn stores_into_a_shared_map_are_written_before_their_lock_is_released() {
    const LEN: usize = 3 * 4096;
    let Some(group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    for flock in [true, false] {
        let name = format!("map-{flock}");
        fs::write(one.path(&name), bytes(1, LEN)).unwrap();
        let files = [&one, &two].map(|mount| open(&mount.path(&name)));
        let maps = files.each_ref().map(|file| SharedMap::new(file, LEN));
        let lock = |file: &File, locked: bool| match (flock, locked) {
            (true, true) => rustix::fs::flock(file, FlockOperation::LockExclusive).unwrap(),
            (true, false) => rustix::fs::flock(file, FlockOperation::Unlock).unwrap(),
            (false, true) => call(file, libc::F_OFD_SETLKW, &mut record(libc::F_WRLCK, 0..1)).unwrap(),
            (false, false) => call(file, libc::F_OFD_SETLK, &mut record(libc::F_UNLCK, 0..1)).unwrap(),
        };
        for n in 0..40 {
            let (mine, other) = (n % 2, (n + 1) % 2);
            let at = (n * 2011) % LEN;
            lock(&files[mine], true);
            maps[mine].store(at, n as u8);
            lock(&files[mine], false);
            lock(&files[other], true);
            let mut byte = [0xff];
            files[other].read_exact_at(&mut byte, at as u64).unwrap();
            assert_eq!((byte[0], maps[other].load(at)), (n as u8, n as u8), "{name}, store {n}");
            lock(&files[other], false);
        }
    }
}

/// Two mounts count under a lock while both nodes are lost in turn: each finds its lock again before the other gets one, so
/// that no update is lost and no call fails.
#[test]
fn a_counter_under_a_lock_survives_lost_nodes() {
    let Some(mut group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    drop(open(&one.path("number")));
    let ended = AtomicBool::new(false);
    let turns = AtomicUsize::new(0);
    let counted: usize = std::thread::scope(|scope| {
        let counters: Vec<_> = [&one, &two]
            .map(|mount| {
                let ended = &ended;
                let turns = &turns;
                scope.spawn(move || {
                    let (file, mut count) = (open(&mount.path("number")), 0);
                    while !ended.load(Ordering::SeqCst) {
                        add_one(&file, true);
                        count += 1;
                        turns.fetch_add(1, Ordering::SeqCst);
                        // The other one gets its turn.
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    count
                })
            })
            .into_iter()
            .collect();
        for n in [0, 1] {
            // A node that has just started grants no new locks for a while.
            let before = turns.load(Ordering::SeqCst);
            while turns.load(Ordering::SeqCst) < before + 10 && !counters.iter().any(|counter| counter.is_finished()) {
                std::thread::sleep(Duration::from_millis(20));
            }
            group.nodes[n].process.kill();
            std::thread::sleep(Duration::from_millis(300));
            let port = group.nodes[n].port();
            group.nodes[n] = group.node(n, port);
        }
        ended.store(true, Ordering::SeqCst);
        counters.into_iter().map(|counter| counter.join().unwrap()).sum()
    });
    let number: [u8; 8] = fs::read(group.source.join("number")).unwrap().try_into().unwrap();
    assert_eq!(u64::from_le_bytes(number), counted as u64);
}

mod test_all {
    use super::*;

    /// Files move to the next node with all locks.
    #[test]
    fn locks_outlive_a_lost_node() {
        let Some(mut group) = Group::start(2) else { return };
        let more = ["--peer-silence", "1s"];
        let (one, two) = (group.mount("one", 0, &more), group.mount("two", 1, &more));
        let names: Vec<String> = (0..6).map(|n| format!("f{n}")).collect();
        let held: Vec<File> = names.iter().map(|name| open(&one.path(name))).collect();
        let others: Vec<File> = names.iter().map(|name| open(&two.path(name))).collect();
        for file in &held {
            assert!(try_lock(file, libc::F_WRLCK, 0..10) && try_flock(file, EXCLUSIVE));
        }
        for n in [0, 1] {
            group.nodes[n].process.kill();
            // The first use of a file takes its locks again.
            for file in &held {
                file.write_all_at(b"still mine", 0).unwrap();
                file.sync_data().unwrap();
            }
            for other in &others {
                assert!(!try_lock(other, libc::F_WRLCK, 5..6) && !try_flock(other, SHARED), "node {n}");
                assert!(try_lock(other, libc::F_WRLCK, 10..20) && try_lock(other, libc::F_UNLCK, 10..20));
            }
            let port = group.nodes[n].port();
            group.nodes[n] = group.node(n, port);
            // The other node answers once more: a node that was started after the last answer of a lost one does not know all grants.
            for file in &held {
                file.write_all_at(b"still mine", 0).unwrap();
                file.sync_data().unwrap();
            }
        }
        for file in &held {
            assert!(try_lock(file, libc::F_UNLCK, 0..10) && try_flock(file, FlockOperation::NonBlockingUnlock));
        }
        assert!(others.iter().all(|other| try_lock(other, libc::F_WRLCK, 0..10) && try_flock(other, EXCLUSIVE)));
        drop((held, others));
    }
}
