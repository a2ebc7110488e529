//! A written bucket through nodes goes on after the end of the mount's process: the nodes have what is not published.

use crate::file_locks::{add_one, open};
use crate::fsx;
use crate::installed_tool::tool;
use crate::mount_process::{
    SERVICE_BETWEEN_ENDS, end_server, kill_servers_beside, server, unmount_kept, wait_for_server,
};
use crate::nodes::{BUCKET, NodesRig};
use crate::world::*;
use rustix::process::Signal;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Rounds of all writers, and whether they end.
#[derive(Default)]
struct Writers {
    rounds: AtomicU64,
    ended: AtomicBool,
}

impl Writers {
    /// Calls `round` with its number until the end; returns how often.
    fn run(&self, mut round: impl FnMut(u64)) -> u64 {
        for done in 0.. {
            if self.ended.load(Ordering::SeqCst) {
                return done;
            }
            round(done);
            self.rounds.fetch_add(1, Ordering::SeqCst);
        }
        unreachable!("the range has no end")
    }
}

fn checkpoint(round: u64) -> Vec<u8> {
    bytes(round, 200_000 + (round % 7 * 700_000) as usize)
}

/// Writes a file, gives it the name of the last one, and reads it.
fn save_checkpoint(at: &Path, round: u64) {
    let text = checkpoint(round);
    let mut file = fs::File::create(at.join("new")).unwrap();
    text.chunks(150_000).for_each(|part| file.write_all(part).unwrap());
    drop(file);
    fs::rename(at.join("new"), at.join("checkpoint")).unwrap();
    assert!(fs::read(at.join("checkpoint")).unwrap() == text, "round {round}");
}

/// Makes and removes a file and a folder; any error fails.
fn change_names(at: &Path, round: u64) {
    let name = at.join(format!("name{}", round % 3));
    let mut made = OpenOptions::new().write(true).create_new(true).open(&name).unwrap();
    made.write_all(round.to_string().as_bytes()).unwrap();
    drop(made);
    assert_eq!(fs::read_to_string(&name).unwrap(), round.to_string());
    fs::remove_file(name).unwrap();
    fs::create_dir(at.join("folder")).unwrap();
    fs::remove_dir(at.join("folder")).unwrap();
}

fn record(round: u64) -> String {
    format!("{round} {}\n", "r".repeat((round * 37 % 200) as usize))
}

/// Ends the process of the mount while programs write.
fn end_processes(rig: &NodesRig, at: &Path, writers: &Writers) {
    let ends: u64 = std::env::var(KILLS_VARIABLE).map_or(4, |kills| kills.parse().unwrap());
    let draws = bytes(31, ends as usize * 2);
    for draw in draws.chunks(2) {
        let wanted = writers.rounds.load(Ordering::SeqCst) + 1 + u64::from(draw[0] % 32);
        eventually("programs write", || writers.rounds.load(Ordering::SeqCst) >= wanted);
        let restarts = if draw[1] % 4 == 0 {
            let restarts = server(&rig.world, at).unwrap().1 + 1;
            let out = rig.world.run(&["upgrade", at.to_str().unwrap()]);
            assert!(out.status.success(), "{out:?}");
            restarts
        } else {
            end_server(&rig.world, at, Signal::KILL)
        };
        wait_for_server(&rig.world, at, restarts);
        if ends > 4 {
            std::thread::sleep(SERVICE_BETWEEN_ENDS);
        }
    }
    println!("{ends} ends");
}

#[test]
fn writers_of_a_bucket_go_on_when_the_process_of_their_mount_dies() {
    let Some(rig) = NodesRig::start_with(2, &[]) else { return };
    let mount = rig.mount("mnt", &["--recover", "--attr-cache", "100ms"]);
    let other = rig.mount("other", &["--attr-cache", "0s"]);
    let at = mount.at.as_path();
    let mut log = OpenOptions::new().append(true).create(true).open(at.join("log")).unwrap();
    let writers = Writers::default();
    let (saved, logged, counted) = std::thread::scope(|scope| {
        let saver = scope.spawn(|| writers.run(|round| save_checkpoint(at, round)));
        scope.spawn(|| writers.run(|round| change_names(at, round)));
        let logger = scope.spawn(|| {
            writers.run(|round| {
                let record = record(round);
                assert_eq!(log.write(record.as_bytes()).unwrap(), record.len());
                if round % 4 == 3 {
                    log.sync_all().unwrap();
                }
            })
        });
        let counters: Vec<_> = [at, other.at.as_path()]
            .map(|at| {
                let writers = &writers;
                scope.spawn(move || {
                    let file = open(&at.join("count"));
                    writers.run(|_| add_one(&file, true))
                })
            })
            .into_iter()
            .collect();
        end_processes(&rig, at, &writers);
        writers.ended.store(true, Ordering::SeqCst);
        let counted: u64 = counters.into_iter().map(|counter| counter.join().unwrap()).sum();
        (saver.join().unwrap(), logger.join().unwrap(), counted)
    });
    drop(log);
    unmount_kept(&rig.world, mount);
    other.unmount();
    println!("rounds: {saved} {logged} {counted}");
    assert!(rig.server.bytes(BUCKET, "p/checkpoint").unwrap() == checkpoint(saved - 1));
    let log = String::from_utf8(rig.server.bytes(BUCKET, "p/log").unwrap()).unwrap();
    let want: String = (0..logged).map(record).collect();
    assert!(log == want, "{} bytes of {}", log.len(), want.len());
    let count = rig.server.bytes(BUCKET, "p/count").unwrap();
    assert_eq!(u64::from_le_bytes(count.try_into().unwrap()), counted);
}

#[test]
fn fsx_finds_no_wrong_byte_in_a_bucket_while_processes_of_the_mount_die() {
    let Some(program) = tool("fsx") else { return };
    let Some(rig) = NodesRig::start_with(2, &[]) else { return };
    let mount = rig.mount("mnt", &["--recover"]);
    let config = rig.world.file("fsx.toml", fsx::OPERATIONS.as_bytes());
    let ops = fsx::more_operations().map_or(1_500, |ops| ops / 20).to_string();
    let mut command = Command::new(program);
    command
        .args(["-N", &ops, "-S", "7", "-f"])
        .arg(config)
        .arg("-P")
        .arg(rig.world.dir("left"))
        .arg(mount.path("file"));
    let ends = kill_servers_beside(&rig.world, &mount.at, &mut command);
    println!("{ops} operations during {ends} ends");
    let text = mount.read("file");
    unmount_kept(&rig.world, mount);
    assert!(rig.server.bytes(BUCKET, "p/file").unwrap() == text);
}
