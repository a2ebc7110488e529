//! A mount with `--recover` goes on after the end of its process.

use crate::world::*;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
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

/// The process that serves the mount, and how many have before.
fn server(world: &World, at: &Path) -> Option<(u32, u64)> {
    let out = world.run(&["status", "--json", at.to_str().unwrap()]);
    let status: serde_json::Value = serde_json::from_slice(&out.stdout).ok()?;
    Some((status["pid"].as_u64()? as u32, status["keeper"]["restarts"].as_u64()?))
}

fn kill_server(world: &World, at: &Path) -> u64 {
    let (pid, restarts) = server(world, at).expect("a process answers");
    send(pid, rustix::process::Signal::KILL);
    restarts + 1
}

fn wait_for_server(world: &World, at: &Path, restarts: u64) {
    eventually("another process serves the mount", || server(world, at).is_some_and(|(_, now)| now >= restarts));
}

/// Reads and walks until `stop`; any error fails the test.
fn read_on(at: &Path, stop: &AtomicBool, rounds: &AtomicU64, seed: usize) {
    let held: Vec<(usize, File)> = (0..4).map(|n| (n, File::open(at.join(name(n))).unwrap())).collect();
    let mut turn = seed;
    while !stop.load(Ordering::SeqCst) {
        turn += 1;
        let n = turn % FILES;
        let wanted = bytes(n as u64, FILE_LEN);
        assert!(fs::read(at.join(name(n))).unwrap() == wanted, "{}", name(n));
        let (n, file) = &held[turn % held.len()];
        let mut piece = [0; 5000];
        let offset = (turn * 7919) % (FILE_LEN - piece.len());
        file.read_exact_at(&mut piece, offset as u64).unwrap();
        assert!(piece[..] == bytes(*n as u64, FILE_LEN)[offset..offset + piece.len()]);
        let listed = fs::read_dir(at.join(format!("folder{}", turn % 3))).unwrap();
        assert_eq!(
            listed.map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>(),
            (FILES / 3 * FILE_LEN) as u64
        );
        rounds.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn readers_go_on_when_the_process_of_their_mount_is_killed() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fill(&origin);
    let mut mount = world.mount(origin.to_str().unwrap(), &["--recover", "--attr-cache", "100ms"]);
    let at = mount.at.clone();
    let stop = Arc::new(AtomicBool::new(false));
    let rounds = Arc::new(AtomicU64::new(0));
    let readers: Vec<_> = (0..3)
        .map(|seed| {
            let (at, stop, rounds) = (at.clone(), Arc::clone(&stop), Arc::clone(&rounds));
            std::thread::spawn(move || read_on(&at, &stop, &rounds, seed))
        })
        .collect();
    let mut opened = File::open(mount.path(name(5))).unwrap();
    let mut listing = fs::read_dir(mount.path("folder1")).unwrap();
    assert!(listing.next().is_some());
    let kills: u64 = std::env::var("SPURLINE_KILLS").map_or(4, |kills| kills.parse().unwrap());
    for _ in 0..kills {
        let before = rounds.load(Ordering::SeqCst);
        eventually("programs read", || rounds.load(Ordering::SeqCst) > before + 3);
        let restarts = kill_server(&world, &at);
        wait_for_server(&world, &at, restarts);
        // A process that dies within a second has died early.
        std::thread::sleep(std::time::Duration::from_millis(1100));
    }
    let mut text = Vec::new();
    opened.seek(SeekFrom::Start(0)).unwrap();
    opened.read_to_end(&mut text).unwrap();
    assert!(text == bytes(5, FILE_LEN));
    assert_eq!(listing.inspect(|entry| assert!(entry.is_ok())).count(), FILES / 3 - 1);
    stop.store(true, Ordering::SeqCst);
    for reader in readers {
        reader.join().unwrap();
    }
    let shown = String::from_utf8(world.run(&["status", at.to_str().unwrap()]).stdout).unwrap();
    assert!(shown.contains(&format!("{kills} restarts")), "{shown}");
    drop(opened);
    let out = world.run(&["umount", at.to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    assert!(mount.process_mut().wait().success(), "the keeper ends with the mount");
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
    let refused = world.run(&["upgrade", at, "--program", "/bin/false"]);
    assert!(!refused.status.success());
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
    for flags in [&["--rw"][..], &["--fuse-io", "uring"]] {
        let words = [&["mount", origin.to_str().unwrap(), at.to_str().unwrap(), "--recover"], flags].concat();
        refused(&world.run(&words), 2, &["--recover", flags[0]]);
    }
}
