//! A written bucket, alone and through nodes, goes on after the end of the mount's process.

use crate::nodes::{BUCKET, NodesRig};
use crate::objects::BucketRig;
use rustix::process::Signal;
use spurline_rig::file_locks::{add_one, open};
use spurline_rig::fsx;
use spurline_rig::installed_tool::tool;
use spurline_rig::mount_process::{
    SERVICE_BETWEEN_ENDS, end_server, kill_servers_beside, server, unmount_kept, wait_for_server,
};
use spurline_rig::world::*;
use spurline_rig::writable_group::TmpFs;
use spurline_testkit::{ChaosProxy, S3Server};
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
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

/// Makes, changes and removes a file and a folder; any error fails.
fn change_names(at: &Path, round: u64) {
    let name = at.join(format!("name{}", round % 3));
    let mut made = OpenOptions::new().write(true).create_new(true).open(&name).unwrap();
    made.write_all(round.to_string().as_bytes()).unwrap();
    drop(made);
    fs::set_permissions(&name, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::read_to_string(&name).unwrap(), round.to_string());
    fs::remove_file(name).unwrap();
    fs::create_dir(at.join("folder")).unwrap();
    fs::remove_dir(at.join("folder")).unwrap();
}

fn record(round: u64) -> String {
    format!("{round} {}\n", "r".repeat((round * 37 % 200) as usize))
}

/// Ends the process of the mount while programs write, after up to `most_rounds`.
fn end_processes(world: &World, at: &Path, writers: &Writers, most_rounds: u8) {
    let ends: u64 = std::env::var(KILLS_VARIABLE).map_or(4, |kills| kills.parse().unwrap());
    let draws = bytes(31, ends as usize * 2);
    for draw in draws.chunks(2) {
        let wanted = writers.rounds.load(Ordering::SeqCst) + 1 + u64::from(draw[0] % most_rounds);
        eventually("programs write", || writers.rounds.load(Ordering::SeqCst) >= wanted);
        let restarts = if draw[1] % 4 == 0 {
            let restarts = server(world, at).unwrap().1 + 1;
            let out = world.run(&["upgrade", at.to_str().unwrap()]);
            assert!(out.status.success(), "{out:?}");
            restarts
        } else {
            end_server(world, at, Signal::KILL)
        };
        wait_for_server(world, at, restarts);
        if ends > 4 {
            std::thread::sleep(SERVICE_BETWEEN_ENDS);
        }
    }
    println!("{ends} ends");
}

/// The rounds that writers have made.
struct Rounds {
    saved: u64,
    logged: u64,
    counted: u64,
}

impl Rounds {
    fn check_objects(&self, server: &S3Server) {
        println!("rounds: {} {} {}", self.saved, self.logged, self.counted);
        assert!(server.bytes(BUCKET, "p/checkpoint").unwrap() == checkpoint(self.saved - 1));
        let log = String::from_utf8(server.bytes(BUCKET, "p/log").unwrap()).unwrap();
        let want: String = (0..self.logged).map(record).collect();
        assert!(log == want, "{} bytes of {}", log.len(), want.len());
        let count = server.bytes(BUCKET, "p/count").unwrap();
        assert_eq!(u64::from_le_bytes(count.try_into().unwrap()), self.counted);
    }
}

/// Ends the process of the mount `at` while programs write there, and count under a lock in the mounts `counting`.
fn write_beside_ends(world: &World, at: &Path, counting: &[&Path]) -> Rounds {
    let mut log = OpenOptions::new().append(true).create(true).open(at.join("log")).unwrap();
    let writers = Writers::default();
    std::thread::scope(|scope| {
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
        let counters: Vec<_> = counting
            .iter()
            .map(|at| {
                let writers = &writers;
                scope.spawn(move || {
                    let file = open(&at.join("count"));
                    writers.run(|_| add_one(&file, true))
                })
            })
            .collect();
        end_processes(world, at, &writers, 32);
        writers.ended.store(true, Ordering::SeqCst);
        let counted = counters.into_iter().map(|counter| counter.join().unwrap()).sum();
        Rounds { saved: saver.join().unwrap(), logged: logger.join().unwrap(), counted }
    })
}

#[test]
fn writers_of_a_bucket_go_on_when_the_process_of_their_mount_dies() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &["--recover", "--attr-cache", "100ms", "--object-attrs"]);
    let probes = proxy.count_requests("PUT", "probe-");
    let rounds = write_beside_ends(&rig.world, &mount.at, &[&mount.at]);
    assert!(probes > 0 && proxy.count_requests("PUT", "probe-") == probes, "the store was tried once");
    unmount_kept(&rig.world, mount);
    rounds.check_objects(&rig.server);
    assert_eq!(rig.server.open_uploads(), 0);
}

#[test]
fn writers_of_a_bucket_through_nodes_go_on_when_the_process_of_their_mount_dies() {
    let Some(rig) = NodesRig::start_with(2, &[]) else { return };
    let mount = rig.mount("mnt", &["--recover", "--attr-cache", "100ms"]);
    let other = rig.mount("other", &["--attr-cache", "0s"]);
    let rounds = write_beside_ends(&rig.world, &mount.at, &[&mount.at, &other.at]);
    unmount_kept(&rig.world, mount);
    other.unmount();
    rounds.check_objects(&rig.server);
}

/// Pieces of a file in parts.
const PARTS: u8 = 20;

/// Writes a file in parts, and changes the middle; each piece counts as a round.
fn save_parts(at: &Path, round: u64, writers: &Writers) {
    let name = at.join(format!("parts{}", round % 2));
    let text = bytes(round, usize::from(PARTS) * MIB + round as usize);
    let mut file = fs::File::create(&name).unwrap();
    for part in text.chunks(MIB) {
        file.write_all(part).unwrap();
        writers.rounds.fetch_add(1, Ordering::SeqCst);
    }
    if round.is_multiple_of(3) {
        file.sync_all().unwrap();
    }
    file.write_all_at(b"changed", 9 * MIB as u64).unwrap();
    drop(file);
    let found = fs::read(name).unwrap();
    let mut want = text;
    want[9 * MIB..9 * MIB + 7].copy_from_slice(b"changed");
    assert!(found == want, "round {round}");
}

#[test]
fn files_in_parts_go_on_when_the_process_of_their_mount_dies() {
    save_parts_beside_ends(None);
}

/// The disk has no space for a whole file: parts lie in hidden objects.
#[test]
fn files_longer_than_the_disk_go_on_when_the_process_of_their_mount_dies() {
    save_parts_beside_ends(Some("size=24m"));
}

fn save_parts_beside_ends(disk: Option<&str>) {
    let Some(rig) = BucketRig::start() else { return };
    let disk = disk.map(|options| TmpFs::mount(&rig.world.dir("cache-mnt"), options));
    let mount = rig.mount("mnt", &["--recover", "--free-space-ratio", "0.01"]);
    let writers = Writers::default();
    let saved = std::thread::scope(|scope| {
        let saver = scope.spawn(|| writers.run(|round| save_parts(&mount.at, round, &writers)));
        end_processes(&rig.world, &mount.at, &writers, PARTS);
        writers.ended.store(true, Ordering::SeqCst);
        saver.join().unwrap()
    });
    println!("{saved} files");
    unmount_kept(&rig.world, mount);
    assert_eq!(rig.server.open_uploads(), 0);
    drop(disk);
}

fn run_fsx_beside_ends(program: &Path, world: &World, mount: &Mount) {
    let config = world.file("fsx.toml", fsx::OPERATIONS.as_bytes());
    let ops = fsx::more_operations().map_or(1_500, |ops| ops / 20).to_string();
    let mut command = Command::new(program);
    command.args(["-N", &ops, "-S", "7", "-f"]).arg(config).arg("-P").arg(world.dir("left")).arg(mount.path("file"));
    let ends = kill_servers_beside(world, &mount.at, &mut command);
    println!("{ops} operations during {ends} ends");
}

#[test]
fn fsx_finds_no_wrong_byte_in_a_bucket_while_processes_of_the_mount_die() {
    let Some(program) = tool("fsx") else { return };
    let Some(rig) = BucketRig::start() else { return };
    let mount = rig.mount("mnt", &["--recover"]);
    run_fsx_beside_ends(&program, &rig.world, &mount);
    let text = mount.read("file");
    unmount_kept(&rig.world, mount);
    assert!(rig.object("p/file").unwrap() == text);
}

mod test_all {
    use super::*;

    #[test]
    fn fsx_finds_no_wrong_byte_in_a_bucket_through_nodes_while_processes_of_the_mount_die() {
        let Some(program) = tool("fsx") else { return };
        let Some(rig) = NodesRig::start_with(2, &[]) else { return };
        let mount = rig.mount("mnt", &["--recover"]);
        run_fsx_beside_ends(&program, &rig.world, &mount);
        let text = mount.read("file");
        unmount_kept(&rig.world, mount);
        assert!(rig.server.bytes(BUCKET, "p/file").unwrap() == text);
    }
}
