//! A writable mount with `--recover` goes on after the end of its process: each change is made once.

use rustix::fs::FlockOperation;
use rustix::process::Signal;
use spurline_rig::fsx;
use spurline_rig::installed_tool::tool;
use spurline_rig::mount_process::{
    SERVICE_BETWEEN_ENDS, end_server, kill_servers_beside, server, unmount_kept, wait_for_server,
};
use spurline_rig::world::*;
use spurline_rig::writable_group::Group;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

const SLOTS: u64 = 32;
const SLOT_LEN: usize = 4096;
const APPENDERS: usize = 2;
const MAPPED_LEN: usize = 64 * SLOT_LEN;

/// What runs until the end, and how far it has come.
#[derive(Clone)]
struct Work {
    at: PathBuf,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
}

impl Work {
    /// Runs `round` until the end, with the number of each round.
    fn start(&self, name: &str, mut round: impl FnMut(&Path, u64) + Send + 'static) -> JoinHandle<u64> {
        let Work { at, stop, rounds } = self.clone();
        let thread = std::thread::Builder::new().name(name.into());
        thread
            .spawn(move || {
                let mut done = 0;
                while !stop.load(Ordering::SeqCst) {
                    round(&at, done);
                    done += 1;
                    rounds.fetch_add(1, Ordering::SeqCst);
                }
                done
            })
            .unwrap()
    }
}

fn read_write(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// The content of a slot after its write in a round.
fn slot(n: u64) -> Vec<u8> {
    bytes(n + 1, SLOT_LEN)
}

/// Writes slots, reads them back, and syncs.
fn write_slots(work: &Work) -> JoinHandle<u64> {
    let file = read_write(&work.at.join("slots"));
    work.start("slots", move |_, round| {
        let offset = round % SLOTS * SLOT_LEN as u64;
        file.write_all_at(&slot(round), offset).unwrap();
        let mut seen = vec![0; SLOT_LEN];
        file.read_exact_at(&mut seen, offset).unwrap();
        assert!(seen == slot(round), "round {round}");
        if round % 8 == 7 {
            file.sync_all().unwrap();
        }
    })
}

/// Appends records of some lengths, one write each.
fn append_records(work: &Work, writer: usize) -> JoinHandle<u64> {
    let options = OpenOptions::new().append(true).create(true).clone();
    let flags = if writer == 0 { 0 } else { libc::O_SYNC };
    let mut log = options.clone().custom_flags(flags).open(work.at.join("log")).unwrap();
    work.start("log", move |_, round| {
        let record = record(writer, round);
        assert_eq!(log.write(record.as_bytes()).unwrap(), record.len());
    })
}

fn record(writer: usize, round: u64) -> String {
    format!("{writer} {round} {}\n", "r".repeat((round * 37 % 200) as usize))
}

/// Makes, renames, links and removes; any error fails.
fn change_names(work: &Work, worker: usize) -> JoinHandle<u64> {
    let own = format!("names{worker}");
    fs::create_dir(work.at.join(&own)).unwrap();
    work.start("names", move |at, round| {
        let at = at.join(&own);
        let text = format!("text {round}");
        let mut made = OpenOptions::new();
        // As git does: the file can't be opened for writing once more.
        made.read(true).write(true).create_new(true).mode(0o444);
        let new = at.join("new");
        let mut file = made.open(&new).unwrap_or_else(|error| panic!("round {round}: {error}"));
        file.write_all(text.as_bytes()).unwrap();
        drop(file);
        fs::hard_link(&new, at.join("link")).unwrap();
        fs::rename(&new, at.join("name")).unwrap();
        assert_eq!(fs::read_to_string(at.join("name")).unwrap(), text);
        fs::remove_file(at.join("link")).unwrap();
        fs::create_dir(at.join("folder")).unwrap();
        std::os::unix::fs::symlink(&text, at.join("folder/symlink")).unwrap();
        fs::rename(at.join("folder"), at.join("moved")).unwrap();
        assert_eq!(fs::read_link(at.join("moved/symlink")).unwrap(), Path::new(&text));
        fs::remove_file(at.join("moved/symlink")).unwrap();
        fs::remove_dir(at.join("moved")).unwrap();
        let names: Vec<_> = fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["name"], "round {round}");
    })
}

/// Pages of a file that are shared with the kernel.
struct SharedPages {
    start: usize,
}

impl SharedPages {
    fn new(file: &File) -> SharedPages {
        file.set_len(MAPPED_LEN as u64).unwrap();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of an open file with that length.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), MAPPED_LEN, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        SharedPages { start: start as usize }
    }

    fn change(&self, round: u64) {
        let place = self.start + round as usize * SLOT_LEN % MAPPED_LEN;
        // SAFETY: a place in the mapping, whose pages no other thread of this program uses.
        unsafe { (place as *mut u64).write_volatile(round) };
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        // SAFETY: the mapping is used no more.
        unsafe { libc::munmap(self.start as *mut libc::c_void, MAPPED_LEN) };
    }
}

/// Changes the pages of a file, while another program locks that: each lock drops the pages, and waits until the dirty pages are
/// written.
fn write_mapped(work: &Work) -> [JoinHandle<u64>; 2] {
    // The rounds of these count for themselves: there are many.
    let work = Work { rounds: Arc::default(), ..work.clone() };
    let pages = SharedPages::new(&read_write(&work.at.join("mapped")));
    let locked = read_write(&work.at.join("mapped"));
    let writer = work.start("mapped", move |_, round| {
        pages.change(round);
        std::thread::sleep(std::time::Duration::from_micros(100));
    });
    let locker = work.start("locker", move |_, _| {
        ofd_lock(&locked, libc::F_OFD_SETLKW, libc::F_WRLCK).unwrap();
        ofd_lock(&locked, libc::F_OFD_SETLK, libc::F_UNLCK).unwrap();
    });
    [writer, locker]
}

fn ofd_lock(file: &File, command: i32, kind: i32) -> io::Result<()> {
    // SAFETY: all fields are integers.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = kind as libc::c_short;
    // SAFETY: the file is open, and the record lives for the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut record) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Counts in a file under a lock that others wait for.
fn count_locked(work: &Work, name: &'static str) -> JoinHandle<u64> {
    let file = read_write(&work.at.join(name));
    work.start(name, move |_, _| {
        if name == "flock" {
            rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
        } else {
            ofd_lock(&file, libc::F_OFD_SETLKW, libc::F_WRLCK).unwrap();
        }
        let mut count = [0; 8];
        let had = file.read_at(&mut count, 0).unwrap();
        assert!(had == 0 || had == 8);
        file.write_all_at(&(u64::from_le_bytes(count) + 1).to_le_bytes(), 0).unwrap();
        if name == "flock" {
            rustix::fs::flock(&file, FlockOperation::Unlock).unwrap();
        } else {
            ofd_lock(&file, libc::F_OFD_SETLK, libc::F_UNLCK).unwrap();
        }
    })
}

/// A shell that works in a directory of the mount, until a file ends that.
fn shell_in(at: &Path) -> Child {
    fs::create_dir(at.join("shell")).unwrap();
    let loops = "set -e; while [ ! -e end ]; do echo text > new; mv new old; [ \"$(cat old)\" = text ]; rm old; done";
    let mut shell = Command::new("sh");
    shell.args(["-c", loops]).current_dir(at.join("shell")).stdin(Stdio::null()).spawn().unwrap()
}

/// An open file without a name, whose bytes are read and changed.
struct RemovedFile {
    file: File,
    text: Vec<u8>,
}

impl RemovedFile {
    fn new(at: &Path) -> RemovedFile {
        let path = at.join("removed");
        let file = read_write(&path);
        file.write_all_at(&bytes(9, 10_000), 0).unwrap();
        fs::remove_file(path).unwrap();
        RemovedFile { file, text: bytes(9, 10_000) }
    }

    fn check(&mut self, seed: u64) {
        let mut seen = vec![0; self.text.len()];
        self.file.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen == self.text, "the bytes of a removed file");
        self.text[..100].copy_from_slice(&bytes(seed, 100));
        self.file.write_all_at(&self.text[..100], 0).unwrap();
        assert_eq!(self.file.metadata().unwrap().len(), self.text.len() as u64);
    }
}

/// Locks of both families that are held through everything.
struct HeldLocks {
    flock: File,
    range: File,
    path: PathBuf,
}

impl HeldLocks {
    fn new(at: &Path) -> HeldLocks {
        let path = at.join("held");
        let flock = read_write(&path);
        let range = read_write(&path);
        rustix::fs::flock(&flock, FlockOperation::NonBlockingLockExclusive).unwrap();
        ofd_lock(&range, libc::F_OFD_SETLK, libc::F_WRLCK).unwrap();
        HeldLocks { flock, range, path }
    }

    fn check(&self) {
        let other = read_write(&self.path);
        rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).unwrap_err();
        ofd_lock(&other, libc::F_OFD_SETLK, libc::F_RDLCK).unwrap_err();
    }

    /// A program that waits gets the lock when that is released.
    fn release(self) {
        let path = self.path.clone();
        let waiter = std::thread::spawn(move || {
            let other = read_write(&path);
            rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
            ofd_lock(&other, libc::F_OFD_SETLKW, libc::F_WRLCK).unwrap();
        });
        self.check();
        rustix::fs::flock(&self.flock, FlockOperation::Unlock).unwrap();
        drop(self.range);
        waiter.join().unwrap();
    }
}

/// Each record that was acknowledged is in the log, once, in the order of its writer.
fn check_log(log: &str, done: &[u64]) {
    let mut next: HashMap<usize, u64> = HashMap::new();
    for line in log.lines() {
        let writer: usize = line.split(' ').next().unwrap().parse().unwrap();
        let round = next.entry(writer).or_default();
        assert_eq!(format!("{line}\n"), record(writer, *round));
        *round += 1;
    }
    for (writer, done) in done.iter().enumerate() {
        assert_eq!(next.get(&writer).copied().unwrap_or(0), *done, "records of writer {writer}");
    }
}

/// The pauses that a mount's log has, in milliseconds.
fn pauses(log: &str) -> Vec<u64> {
    let waited = log.lines().filter_map(|line| line.split("programs waited ").nth(1)?.split(' ').next());
    let mut pauses: Vec<u64> = waited.map(|pause| pause.parse().unwrap()).collect();
    pauses.sort_unstable();
    pauses
}

/// The rounds of threads that end.
fn rounds_of(threads: Vec<JoinHandle<u64>>) -> Vec<u64> {
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Ends the mount's process under writers, with causes and moments by the seed, then checks every byte at the source. Programs in
/// `other`, another mount of the source, count under the same locks.
fn writers_survive(world: &World, origin: &Path, mount: Mount, other: &Mount, seed: u64) {
    let ends: u64 = std::env::var("SPURLINE_TEST_KILLS").map_or(4, |kills| kills.parse().unwrap());
    let draws = bytes(seed, ends as usize * 2);
    let work = Work { at: mount.at.clone(), stop: Arc::default(), rounds: Arc::default() };
    let at = mount.at.clone();
    let slots = write_slots(&work);
    let appenders: Vec<_> = (0..APPENDERS).map(|writer| append_records(&work, writer)).collect();
    let namers: Vec<_> = (0..2).map(|worker| change_names(&work, worker)).collect();
    let work_there = Work { at: other.at.clone(), ..work.clone() };
    let counters = [&work, &work, &work_there];
    let flocks: Vec<_> = counters.iter().map(|work| count_locked(work, "flock")).collect();
    let ranges: Vec<_> = counters.iter().map(|work| count_locked(work, "ranges")).collect();
    let mapped = write_mapped(&work);
    let mut shell = shell_in(&at);
    let mut removed = RemovedFile::new(&at);
    let held = HeldLocks::new(&at);
    for draw in draws.chunks(2) {
        let wanted = work.rounds.load(Ordering::SeqCst) + 1 + u64::from(draw[0] % 64);
        eventually("programs write", || work.rounds.load(Ordering::SeqCst) >= wanted);
        let restarts = server(world, &at).expect("a process answers").1 + 1;
        match draw[1] % 4 {
            0 => {
                let out = world.run(&["upgrade", at.to_str().unwrap()]);
                assert!(out.status.success(), "{out:?}");
            }
            cause => {
                end_server(world, &at, [Signal::KILL, Signal::SEGV, Signal::ABORT][usize::from(cause) - 1]);
            }
        }
        wait_for_server(world, &at, restarts);
        removed.check(u64::from(draw[0]));
        held.check();
        if ends > 4 {
            std::thread::sleep(SERVICE_BETWEEN_ENDS);
        }
    }
    work.stop.store(true, Ordering::SeqCst);
    let slots = slots.join().unwrap();
    let appended = rounds_of(appenders);
    let named = rounds_of(namers);
    let flocked = rounds_of(flocks);
    let ranged = rounds_of(ranges);
    let [mapped, _] = mapped.map(|thread| thread.join().unwrap());
    fs::write(at.join("shell/end"), "").unwrap();
    assert!(shell.wait().unwrap().success(), "the shell in the mount");
    held.release();
    drop(removed);
    let shown = pauses(&mount.process().log());
    println!("{ends} ends: pauses {shown:?} ms; rounds: {slots} {appended:?} {named:?} {flocked:?} {ranged:?}");
    unmount_kept(world, mount);
    let mut text = Vec::new();
    File::open(origin.join("slots")).unwrap().read_to_end(&mut text).unwrap();
    for round in slots.saturating_sub(SLOTS)..slots {
        let offset = (round % SLOTS) as usize * SLOT_LEN;
        assert!(text[offset..offset + SLOT_LEN] == slot(round), "slot of round {round}");
    }
    let pages = fs::read(origin.join("mapped")).unwrap();
    for round in mapped.saturating_sub(64)..mapped {
        let place = round as usize * SLOT_LEN % MAPPED_LEN;
        let found = u64::from_le_bytes(pages[place..place + 8].try_into().unwrap());
        assert_eq!(found, round, "the page of round {round}");
    }
    check_log(&fs::read_to_string(origin.join("log")).unwrap(), &appended);
    for (name, counted) in [("flock", flocked), ("ranges", ranged)] {
        let count = fs::read(origin.join(name)).unwrap();
        assert_eq!(u64::from_le_bytes(count.try_into().unwrap()), counted.iter().sum::<u64>(), "{name}");
    }
    let left: Vec<_> = fs::read_dir(origin).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name == "removed"), "{left:?}");
}

#[test]
fn writers_go_on_when_the_process_of_their_mount_dies() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    let flags = ["--rw", "--recover", "--no-passthrough", "--attr-cache", "100ms"];
    let mount = world.mount(origin.to_str().unwrap(), &flags);
    let second = World::new();
    let other = second.mount(origin.to_str().unwrap(), &["--rw", "--attr-cache", "0s"]);
    writers_survive(&world, &origin, mount, &other, 11);
    other.unmount();
}

#[test]
fn writers_that_the_kernel_serves_go_on_when_the_process_of_their_mount_dies() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    // On the disk of the build: the kernel reads files of a stacked file system through the process.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mount = world.mount(folder.path().to_str().unwrap(), &["--rw", "--recover"]);
    let second = World::new();
    let other = second.mount(folder.path().to_str().unwrap(), &["--rw"]);
    writers_survive(&world, folder.path(), mount, &other, 12);
    other.unmount();
}

#[test]
fn writers_through_nodes_go_on_when_the_process_of_their_mount_dies() {
    let Some(group) = Group::start(2) else { return };
    let mount = group.mount("mnt", 0, &["--recover", "--attr-cache", "100ms"]);
    let other = group.mount("other", 1, &["--attr-cache", "0s"]);
    writers_survive(&group.world, &group.source, mount, &other, 13);
    other.unmount();
}

/// Random operations on one file, each read compared, while processes of the mount die. `SPURLINE_TEST_FSX_OPS` asks for more of them.
fn fsx_survives(nodes: usize, words: &[&str]) {
    let Some(program) = tool("fsx").filter(|_| can_mount()) else { return };
    let Some(group) = Group::start_in_memory(nodes, "64m") else { return };
    let config = group.world.file("fsx.toml", fsx::OPERATIONS.as_bytes());
    let mount = group.mount("mnt", 0, &[&["--recover"], words].concat());
    let ops = fsx::more_operations().unwrap_or(8_000).to_string();
    let mut command = Command::new(program);
    command.args(["-N", &ops, "-S", "18", "-f"]).arg(config).arg("-P").arg(group.world.dir("left"));
    let ends = kill_servers_beside(&group.world, &mount.at, command.arg(mount.path("file")));
    println!("{nodes} nodes {words:?}: {ops} operations during {ends} ends");
    unmount_kept(&group.world, mount);
}

/// Appends numbered lines, and syncs each; returns those that were synced. An error of the sync is that of bytes which a node may
/// have lost.
fn append_synced(work: &Work, name: String) -> JoinHandle<Vec<u64>> {
    let Work { at, stop, rounds } = work.clone();
    std::thread::spawn(move || {
        let mut log = OpenOptions::new().append(true).create(true).open(at.join(name)).unwrap();
        let mut synced = Vec::new();
        for round in 0.. {
            if stop.load(Ordering::SeqCst) {
                break;
            }
            let line = format!("{round}\n");
            assert_eq!(log.write(line.as_bytes()).unwrap(), line.len());
            match log.sync_all() {
                Ok(()) => synced.push(round),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO), "round {round}"),
            }
            rounds.fetch_add(1, Ordering::SeqCst);
        }
        synced
    })
}

#[test]
fn what_was_synced_outlives_a_node_and_the_process_of_the_mount() {
    let Some(mut group) = Group::start(2) else { return };
    let mut mount = group.mount("mnt", 0, &["--recover"]);
    let at = mount.at.clone();
    let work = Work { at: at.clone(), stop: Arc::default(), rounds: Arc::default() };
    let writers: Vec<_> = (0..4).map(|writer| append_synced(&work, format!("log{writer}"))).collect();
    eventually("programs write", || work.rounds.load(Ordering::SeqCst) > 100);
    group.nodes[0].process.kill();
    let restarts = end_server(&group.world, &at, Signal::KILL);
    wait_for_server(&group.world, &at, restarts);
    let before = work.rounds.load(Ordering::SeqCst);
    eventually("programs write on", || work.rounds.load(Ordering::SeqCst) > before + 100);
    work.stop.store(true, Ordering::SeqCst);
    for (writer, synced) in writers.into_iter().enumerate() {
        let synced = synced.join().unwrap();
        let log = fs::read_to_string(group.source.join(format!("log{writer}"))).unwrap();
        let lines: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
        assert!(lines.is_sorted_by(|line, next| line < next), "writer {writer}: a line is there twice");
        assert!(synced.iter().all(|line| lines.contains(line)), "writer {writer}: a synced line is lost");
        assert!(synced.last().is_some_and(|last| *last > 10));
    }
    let out = group.world.run(&["umount", at.to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    mount.process_mut().wait();
}

mod test_all {
    use super::*;

    #[test]
    fn fsx_finds_no_wrong_byte_while_processes_of_the_mount_die() {
        fsx_survives(0, &["--no-passthrough"]);
    }

    #[test]
    fn fsx_through_nodes_finds_no_wrong_byte_while_processes_of_the_mount_die() {
        fsx_survives(2, &[]);
    }
}
