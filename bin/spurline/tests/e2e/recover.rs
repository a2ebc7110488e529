//! A mount with `--recover` goes on after the end of its process.

use rustix::process::Signal;
use spurline_rig::mount_process::{SERVICE_BETWEEN_ENDS, end_server, server, unmount_kept, wait_for_server};
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const FILES: usize = 24;
const FILE_LEN: usize = 300_000;

fn name(n: usize) -> String {
    format!("folder{}/file{n:02}", n % 3)
}

fn fill(origin: &Path) {
    for n in 0..FILES {
        let at = origin.join(name(n));
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        fs::write(at, bytes(n as u64, FILE_LEN)).unwrap();
    }
}

/// Reads a whole file by a new memory map.
fn read_mapped(file: &File) -> Vec<u8> {
    use std::os::fd::AsRawFd as _;
    let len = file.metadata().unwrap().len() as usize;
    // SAFETY: a new private mapping of an open file, read only within its length, and taken away below.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0);
        assert_ne!(start, libc::MAP_FAILED);
        let text = std::slice::from_raw_parts(start.cast::<u8>(), len).to_vec();
        libc::munmap(start, len);
        text
    }
}

/// Readers of a mount whose process ends again and again.
struct ReaderRun {
    at: PathBuf,
    stop: AtomicBool,
    /// Rounds of all readers of [`read_on`].
    rounds: AtomicU64,
}

impl ReaderRun {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::SeqCst)
    }
}

/// A reader with a number. Any error fails the test.
type Reader = fn(&ReaderRun, usize);

/// Reads and walks.
fn read_on(run: &ReaderRun, seed: usize) {
    let at = &run.at;
    let held: Vec<(usize, File)> = (0..4).map(|n| (n, File::open(at.join(name(n))).unwrap())).collect();
    let mut turn = seed;
    while run.goes_on() {
        turn += 1;
        let n = turn % FILES;
        let wanted = bytes(n as u64, FILE_LEN);
        let file = File::open(at.join(name(n))).unwrap();
        if turn.is_multiple_of(2) {
            assert!(read_mapped(&file) == wanted, "{}, mapped", name(n));
        } else {
            assert!(fs::read(at.join(name(n))).unwrap() == wanted, "{}", name(n));
        }
        // The next round reads from the mount again.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let (n, file) = &held[turn % held.len()];
        read_piece(file, *n, turn);
        let listed = fs::read_dir(at.join(format!("folder{}", turn % 3))).unwrap();
        assert_eq!(
            listed.map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>(),
            (FILES / 3 * FILE_LEN) as u64
        );
        run.rounds.fetch_add(1, Ordering::SeqCst);
    }
}

/// Reads a piece of file number `n` at an offset that depends on `turn`.
fn read_piece(file: &File, n: usize, turn: usize) {
    let mut piece = [0; 5000];
    let offset = (turn * 7919) % (FILE_LEN - piece.len());
    file.read_exact_at(&mut piece, offset as u64).unwrap();
    assert!(piece[..] == bytes(n as u64, FILE_LEN)[offset..offset + piece.len()]);
}

/// Keeps each file open for many reads: cached files are read past the mount's process then.
fn read_kept_open(run: &ReaderRun, seed: usize) {
    let mut turn = seed;
    while run.goes_on() {
        let n = turn % FILES;
        let file = File::open(run.at.join(name(n))).unwrap();
        for _ in 0..100 {
            turn += 1;
            read_piece(&file, n, turn);
        }
    }
}

/// Clones the repository at the source again and again.
fn clone_on(run: &ReaderRun, _: usize) {
    let repository = run.at.join(REPOSITORY);
    let head = git(&repository, &["rev-parse", "HEAD"]);
    let to = tempfile::tempdir().unwrap();
    let clone = to.path().join("clone");
    while run.goes_on() {
        git(to.path(), &["clone", "-q", &format!("file://{}", repository.display()), "clone"]);
        assert_eq!(git(&clone, &["rev-parse", "HEAD"]), head);
        assert_eq!(git(&clone, &["status", "--porcelain"]), "");
        git(&clone, &["fsck", "--strict"]);
        fs::remove_dir_all(&clone).unwrap();
    }
}

/// The repository at the source of [`clone_on`].
const REPOSITORY: &str = "repository.git";

fn git(dir: &Path, words: &[&str]) -> String {
    let mut command = std::process::Command::new("git");
    let settings = ["-c", "safe.directory=*", "-c", "user.name=t", "-c", "user.email=t@localhost"];
    let out = command.arg("-C").arg(dir).args(settings).args(words).output().unwrap();
    assert!(out.status.success(), "git {words:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Makes a bare repository with some commits, partly packed.
fn make_repository(world: &World, origin: &Path) {
    let work = world.dir("work");
    git(&work, &["init", "-q"]);
    for commit in 0..6 {
        for n in 0..10 {
            fs::write(work.join(format!("file{n}")), bytes(commit * 100 + n, 20_000)).unwrap();
        }
        git(&work, &["add", "."]);
        git(&work, &["commit", "-q", "-m", "change"]);
        if commit == 3 {
            git(&work, &["gc", "-q"]);
        }
    }
    let bare = origin.join(REPOSITORY);
    git(&work, &["clone", "-q", "--bare", "--no-hardlinks", ".", bare.to_str().unwrap()]);
}

/// How often an environment variable wants something.
fn count_of(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |count| count.parse().unwrap())
}

/// The pauses that the processes of a mount have reported, in milliseconds.
#[derive(Default)]
struct Pauses {
    after_kills: Vec<u64>,
    after_upgrades: Vec<u64>,
}

impl Pauses {
    fn print(mut self) {
        for (what, pauses) in [("kills", &mut self.after_kills), ("upgrades", &mut self.after_upgrades)] {
            pauses.sort_unstable();
            if let Some(longest) = pauses.last() {
                let count = pauses.len();
                let (median, p99) = (pauses[count / 2], pauses[count * 99 / 100]);
                println!("{count} {what}: pauses of {median} ms (median), {p99} ms (p99), {longest} ms (longest)");
            }
        }
    }
}

/// How long programs waited for the process that serves now, in milliseconds.
fn last_pause(world: &World, at: &Path) -> u64 {
    let out = world.run(&["status", "--json", at.to_str().unwrap()]);
    let status: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    status["keeper"]["pause_ms"].as_u64().unwrap()
}

/// Ends the process of a mount of the files of [`fill`] under readers again and again, with kinds, causes and moments by the seed,
/// then unmounts. Beside three readers of [`read_on`] there are `more`.
fn readers_survive(world: &World, mount: Mount, seed: u64, more: &[Reader]) {
    let mut kills_left = count_of(KILLS_VARIABLE, 3);
    let mut upgrades_left = count_of("SPURLINE_TEST_UPGRADES", 1);
    let ends = kills_left + upgrades_left;
    let draws = bytes(seed, ends as usize * 3);
    let at = mount.at.clone();
    let run = Arc::new(ReaderRun { at: at.clone(), stop: AtomicBool::new(false), rounds: AtomicU64::new(0) });
    let kinds = [read_on as Reader; 3].into_iter().chain(more.iter().copied());
    let readers: Vec<_> = kinds
        .enumerate()
        .map(|(number, reader)| {
            let run = Arc::clone(&run);
            std::thread::spawn(move || reader(&run, number))
        })
        .collect();
    let mut opened = File::open(mount.path(name(5))).unwrap();
    let mut listing = fs::read_dir(mount.path("folder1")).unwrap();
    assert!(listing.next().is_some());
    let mut pauses = Pauses::default();
    for draw in draws.chunks(3) {
        let before = run.rounds.load(Ordering::SeqCst);
        let wanted = before + 1 + u64::from(draw[0] % 16);
        eventually("programs read", || {
            assert!(readers.iter().all(|reader| !reader.is_finished()), "a reader failed");
            run.rounds.load(Ordering::SeqCst) >= wanted
        });
        if u64::from(draw[1]) * (kills_left + upgrades_left) < 256 * kills_left {
            kills_left -= 1;
            let signal = [Signal::KILL, Signal::SEGV, Signal::ABORT][usize::from(draw[2]) % 3];
            let restarts = end_server(world, &at, signal);
            wait_for_server(world, &at, restarts);
            pauses.after_kills.push(last_pause(world, &at));
            if ends > 8 {
                std::thread::sleep(SERVICE_BETWEEN_ENDS);
            }
        } else {
            upgrades_left -= 1;
            let out = world.run(&["upgrade", at.to_str().unwrap()]);
            assert!(out.status.success(), "{out:?}");
            pauses.after_upgrades.push(last_pause(world, &at));
        }
    }
    let mut text = Vec::new();
    opened.seek(SeekFrom::Start(0)).unwrap();
    opened.read_to_end(&mut text).unwrap();
    assert!(text == bytes(5, FILE_LEN));
    assert_eq!(listing.inspect(|entry| assert!(entry.is_ok())).count(), FILES / 3 - 1);
    run.stop.store(true, Ordering::SeqCst);
    for reader in readers {
        reader.join().unwrap();
    }
    pauses.print();
    let shown = String::from_utf8(world.run(&["status", at.to_str().unwrap()]).stdout).unwrap();
    assert!(shown.contains(&format!("{ends} restarts")), "{shown}");
    drop(opened);
    unmount_kept(world, mount);
}

/// Clones, reads of cached files past the process, and all other readers.
#[test]
fn a_clone_and_files_that_stay_open_go_on_when_the_process_of_their_mount_dies() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    make_repository(&world, &origin);
    let mount = world.mount(origin.to_str().unwrap(), &["--recover", "--attr-cache", "100ms"]);
    for n in 0..FILES {
        assert!(mount.read(name(n)) == bytes(n as u64, FILE_LEN));
    }
    readers_survive(&world, mount, 4, &[clone_on, read_kept_open]);
}

#[test]
fn readers_go_on_when_the_process_of_their_mount_dies() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let mount = world.mount(origin.to_str().unwrap(), &["--recover", "--attr-cache", "100ms"]);
    readers_survive(&world, mount, 1, &[]);
}

#[test]
fn readers_go_on_when_the_process_of_a_mount_through_a_node_dies() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let source = origin.to_str().unwrap();
    let node = world.node(&[source], 0, &[]);
    let mount = world.consumer(source, &node.address, &["--recover", "--attr-cache", "100ms"]);
    readers_survive(&world, mount, 2, &[]);
}

#[test]
fn readers_go_on_when_the_process_of_a_mount_of_a_bucket_dies() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    for n in 0..FILES {
        server.put("data", &name(n), &bytes(n as u64, FILE_LEN));
    }
    let more = ["--endpoint-url", &server.endpoint(), "--recover", "--attr-cache", "100ms"];
    let mount = world.mount("s3://data", &more);
    readers_survive(&world, mount, 3, &[]);
}

/// What `status` says of a mount without a process.
fn failed_status(world: &World, at: &Path) -> String {
    let out = world.run(&["status", at.to_str().unwrap()]);
    assert!(!out.status.success(), "{out:?}");
    String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned()
}

fn error_number(failed: std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(&failed).unwrap()
}

#[test]
fn a_crash_loop_ends_with_a_dead_mount_that_can_be_removed() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let mut mount = world.mount(origin.to_str().unwrap(), &["--recover"]);
    let at = mount.at.clone();
    eventually("the keeper gives up", || {
        if let Some((pid, _)) = server(&world, &at) {
            send(pid, Signal::KILL);
        }
        mount.process().log().contains("the keeper gives up")
    });
    assert_eq!(mount.process_mut().wait().code(), Some(1));
    assert!(mount.process().log().contains("died 5 times in a row"), "{}", mount.process().log());
    assert_eq!(error_number(fs::read_dir(&at).unwrap_err()), rustix::io::Errno::NOTCONN);
    let shown = failed_status(&world, &at);
    assert!(shown.contains("is gone") && shown.contains("umount"), "{shown}");
    let out = world.run(&["umount", at.to_str().unwrap()]);
    assert!(out.status.success() && !is_mounted(&at), "{out:?}");
}

#[test]
fn a_source_that_is_out_of_reach_for_a_while_delays_the_next_process() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let away = world.path("away");
    let mut mount = world.mount(origin.to_str().unwrap(), &["--recover", "--attr-cache", "0s"]);
    let at = mount.at.clone();
    let file = mount.path(name(7));
    fs::rename(&origin, &away).unwrap();
    let restarts = end_server(&world, &at, Signal::KILL);
    let reader = std::thread::spawn(move || fs::read(file).unwrap());
    let starts = |mount: &Mount| mount.process().log().matches("it is started again").count();
    eventually("several processes fail to start", || starts(&mount) > 6);
    assert!(!reader.is_finished(), "programs wait");
    fs::rename(&away, &origin).unwrap();
    wait_for_server(&world, &at, restarts);
    assert!(reader.join().unwrap() == bytes(7, FILE_LEN));

    // Without a process, `status` says so, the mount can be unmounted, and nothing else can be mounted there.
    let mut second = world.command(&[]);
    second.args(world.mount_words(away.to_str().unwrap())).arg("--recover");
    fs::rename(&origin, &away).unwrap();
    end_server(&world, &at, Signal::KILL);
    let failed = starts(&mount);
    eventually("the next process fails to start", || starts(&mount) > failed + 1);
    let shown = failed_status(&world, &at);
    assert!(shown.contains("no process at present") && shown.contains("its keeper, process"), "{shown}");
    refused(&finish(&mut second), 1, &["umount"]);
    let out = world.run(&["umount", at.to_str().unwrap()]);
    assert!(out.status.success() && !is_mounted(&at), "{out:?}");
    assert!(mount.process_mut().wait().success(), "{}", mount.process().log());
}

#[test]
fn a_keeper_that_is_stopped_unmounts_with_and_without_a_process() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    for has_process in [true, false] {
        let mut mount = world.mount(origin.to_str().unwrap(), &["--recover"]);
        assert_eq!(mount.read(name(1)).len(), FILE_LEN);
        if !has_process {
            fs::rename(&origin, world.path("away")).unwrap();
            end_server(&world, &mount.at, Signal::KILL);
        }
        mount.process().signal(Signal::TERM);
        let ended = mount.process_mut().wait();
        assert!(!is_mounted(&mount.at), "{}", mount.process().log());
        assert!(ended.success() || !has_process, "{ended}: {}", mount.process().log());
    }
}

#[test]
fn a_mount_goes_on_without_its_keeper_and_says_so() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let mut mount = world.mount(origin.to_str().unwrap(), &["--recover"]);
    let at = mount.at.to_str().unwrap().to_owned();
    let mut second = world.command(&[]);
    second.args(world.mount_words(origin.to_str().unwrap())).arg("--recover");
    refused(&finish(&mut second), 1, &["is busy", "umount"]);
    assert_eq!(mount.count("recovery", "has_keeper"), 1);
    mount.process_mut().kill();
    assert_eq!(mount.count("recovery", "has_keeper"), 0);
    assert_eq!(mount.read(name(1)), bytes(1, FILE_LEN));
    let shown = String::from_utf8(world.run(&["status", &at]).stdout).unwrap();
    assert!(shown.contains("no keeper"), "{shown}");
    eventually("a line of the log", || mount.process().log().contains("has ended: the mount goes on"));
    refused(&world.run(&["upgrade", &at]), 1, &["goes on as before", "keeper"]);
    assert_eq!(mount.read(name(2)), bytes(2, FILE_LEN));
    let out = world.run(&["umount", &at]);
    assert!(out.status.success() && !is_mounted(&mount.at), "{out:?}");
}

#[test]
fn a_mount_over_the_working_directory_goes_on() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let at = world.dir("mnt");
    let mut command = world.command(&["mount", "../origin", ".", "--recover", "--attr-cache", "0s"]);
    let mount = world.mount_with(command.current_dir(&at));
    let restarts = end_server(&world, &at, Signal::KILL);
    wait_for_server(&world, &at, restarts);
    assert_eq!(mount.read(name(1)), bytes(1, FILE_LEN));
    mount.unmount();
}

#[test]
fn what_changed_at_the_source_meanwhile_is_stale_or_listed_anew() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let mount = world.mount(origin.to_str().unwrap(), &["--recover", "--attr-cache", "0s"]);
    let at = mount.at.clone();
    let gone = File::open(mount.path(name(3))).unwrap();
    let mut listing = fs::read_dir(mount.path("folder1")).unwrap();
    assert!(listing.next().is_some());
    fs::remove_file(origin.join(name(3))).unwrap();
    fs::write(origin.join("folder1/another"), b"new").unwrap();
    fs::remove_file(origin.join(name(4))).unwrap();
    let restarts = end_server(&world, &at, Signal::KILL);
    wait_for_server(&world, &at, restarts);
    let failed = gone.read_at(&mut [0; 16], 0).unwrap_err();
    assert_eq!(error_number(failed), rustix::io::Errno::STALE);
    assert!(listing.all(|entry| entry.is_ok()));
    assert_eq!(mount.read("folder1/another"), b"new");
    assert_eq!(error_number(fs::read(mount.path(name(3))).unwrap_err()), rustix::io::Errno::NOENT);
    drop(gone);
    drop(listing);
    mount.unmount();
}

#[test]
fn a_mount_continues_with_another_program_or_as_before() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let mount = world.mount(origin.to_str().unwrap(), &["--recover"]);
    let at = mount.at.to_str().unwrap();
    let mut opened = File::open(mount.path(name(1))).unwrap();
    let (first, _) = server(&world, &mount.at).unwrap();
    let failed = world.run(&["upgrade", at, "--program", "/bin/false"]);
    assert!(!failed.status.success());
    // A successor could not start without the source.
    fs::rename(&origin, world.path("away")).unwrap();
    refused(&world.run(&["upgrade", at]), 1, &["goes on as before", origin.to_str().unwrap()]);
    fs::rename(world.path("away"), &origin).unwrap();
    assert_eq!(server(&world, &mount.at).unwrap(), (first, 0), "the old process goes on");
    let out = world.run(&["upgrade", at]);
    assert!(out.status.success(), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("after a pause of"), "{out:?}");
    // One that says yes, and can't serve.
    let out = world.run(&["upgrade", at, "--program", "/bin/true"]);
    assert!(!out.status.success() && String::from_utf8_lossy(&out.stderr).contains("program of before"), "{out:?}");
    let mut text = Vec::new();
    opened.read_to_end(&mut text).unwrap();
    assert!(text == bytes(1, FILE_LEN));
    drop(opened);
    mount.unmount();
}

#[test]
fn what_does_not_survive_yet_is_refused_by_name() {
    let world = World::new();
    let origin = world.dir("origin");
    let at = world.dir("mnt");
    let origin = origin.to_str().unwrap();
    let words = ["mount", origin, at.to_str().unwrap(), "--recover", "--fuse-io", "uring"];
    refused(&world.run(&words), 2, &["--recover", "--fuse-io uring"]);
}
