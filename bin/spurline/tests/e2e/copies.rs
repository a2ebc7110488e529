//! Cold files that many readers begin at once while several nodes hold each block: how many requests the S3 server
//! gets.

use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, S3Server};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const NODES: usize = 3;
const MOUNTS: usize = 4;
const READERS: usize = 64;
const BLOCKS: usize = 24;
const SMALL_FILES: usize = 40;
/// Copies send readers on for half a minute.
const SENDS_ON: Duration = Duration::from_secs(25);

/// Reads a file past the page cache, so that each reader sends requests to the nodes.
fn read_whole(path: &Path, len: usize) -> Vec<u8> {
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let mut memory = vec![0u8; MIB + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let mut whole = Vec::with_capacity(len);
    while whole.len() < len {
        let got = file.read_at(&mut memory[skip..skip + MIB], whole.len() as u64).unwrap();
        assert!(got > 0, "{} ends at {}", path.display(), whole.len());
        whole.extend_from_slice(&memory[skip..skip + got]);
    }
    whole
}

/// Reads of objects that the S3 server got.
fn gets(proxy: &ChaosProxy) -> usize {
    proxy.count_requests("GET", "/data/")
}

#[test]
fn a_cold_block_is_asked_of_the_bucket_once_however_many_hold_it() {
    if !can_mount() {
        return;
    }
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let large = bytes(1, BLOCKS * MIB);
    let small: Vec<Vec<u8>> = (0..SMALL_FILES).map(|n| bytes(100 + n as u64, 3000 + n)).collect();
    server.put("data", "large", &large);
    small.iter().enumerate().for_each(|(n, text)| drop(server.put("data", &format!("small/{n}"), text)));
    for copies in ["2", "3"] {
        let world = World::new();
        let proxy = ChaosProxy::start(server.address()).unwrap();
        // All readers have begun before the first is answered.
        proxy.set_latency(Duration::from_millis(20));
        let (_coordinator, address) = crate::group::coordinator(&world, 0);
        let registry = format!("coordinator://{address}");
        let nodes: Vec<Node> = (0..NODES)
            .map(|n| {
                let cache = world.dir(&format!("cache-{n}"));
                let mut command =
                    world.command(&["node", "--source", "s3://data", "--cache-dir", cache.to_str().unwrap()]);
                command.args([
                    "--registry",
                    &registry,
                    "--name",
                    &format!("n{n}"),
                    "--endpoint-url",
                    &proxy.endpoint(),
                ]);
                world.node_with(with_credentials(&mut command))
            })
            .collect();
        let mounts: Vec<_> = (0..MOUNTS)
            .map(|n| {
                let at = world.dir(&format!("mnt-{n}"));
                // On a busy machine no node may count as late or dead: a second node would fetch too.
                let words = ["mount", "s3://data", at.to_str().unwrap(), "--registry", &registry, "--replicas", copies];
                let mut command = world.command(&words);
                command.args(["--hedge-after", "0", "--peer-silence", "60s"]);
                let process = Process::start(&mut command, &world.log_path("mount"));
                process.wait_for(" is mounted on ");
                (at, process)
            })
            .collect();
        let deadline = Instant::now() + PATIENCE;
        let know = |target: &OsStr| count(&stats(&world.path("run"), target), "group", "members") == NODES as u64;
        let targets = nodes.iter().map(|node| OsStr::new(&node.address)).chain(mounts.iter().map(|m| m.0.as_os_str()));
        for target in targets {
            while !know(target) {
                assert!(Instant::now() < deadline, "{} does not know all nodes", target.display());
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        proxy.forget_requests();
        let began = Instant::now();
        let begin = Barrier::new(READERS);
        std::thread::scope(|scope| {
            for reader in 0..READERS {
                let (at, begin, large, small) = (&mounts[reader % MOUNTS].0, &begin, &large, &small);
                scope.spawn(move || {
                    begin.wait();
                    for (n, text) in small.iter().enumerate() {
                        assert!(read_whole(&at.join(format!("small/{n}")), text.len()) == *text, "small/{n}");
                    }
                    assert!(read_whole(&at.join("large"), large.len()) == *large);
                });
            }
        });
        let sent_on: u64 = nodes.iter().map(|node| node.count("remotecache", "sent_on")).sum();
        println!(
            "{READERS} readers, --replicas {copies}: {} reads of {} cold blocks; {sent_on} reads were sent on",
            gets(&proxy),
            BLOCKS + SMALL_FILES
        );
        if began.elapsed() < SENDS_ON {
            assert_eq!(gets(&proxy), BLOCKS + SMALL_FILES, "{:?}", proxy.requests());
        } else {
            // A copy that has had to send readers on for so long fetches for itself.
            println!("SLOW: {:?}; each node may have fetched each block", began.elapsed());
            assert!(gets(&proxy) <= NODES * (BLOCKS + SMALL_FILES), "{:?}", proxy.requests());
        }
        assert!(sent_on > 0);
        for (at, mut process) in mounts {
            process.signal(rustix::process::Signal::TERM);
            assert!(process.wait().success(), "{}", process.log());
            assert!(!is_mounted(&at));
        }
    }
}
