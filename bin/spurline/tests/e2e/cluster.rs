//! Three nodes as one cache, over a real S3 server: killed, stopped and restarted one after another while two mounts
//! read. No error and no wrong byte; how long the longest read took is printed, and bounded by the flags alone.

use rustix::process::Signal;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const FILES: usize = 6;
const LEN: usize = 20 * MIB + 4096;
const PIECE: usize = 128 << 10;

/// Counts of the readers since the last query.
pub struct Reads {
    pub stop: AtomicBool,
    /// How many each of them has done.
    counts: Vec<AtomicU64>,
    longest: Mutex<Duration>,
}

impl Reads {
    pub fn of(readers: usize) -> Reads {
        let counts = (0..readers).map(|_| AtomicU64::new(0)).collect();
        Reads { stop: AtomicBool::new(false), counts, longest: Mutex::default() }
    }

    /// Waits until so many more reads of every reader have begun and ended.
    pub fn go_on(&self, more: u64) {
        let deadline = Instant::now() + PATIENCE;
        let until: Vec<u64> = self.counts.iter().map(|count| count.load(Ordering::Acquire) + more).collect();
        while !self.counts.iter().zip(&until).all(|(count, until)| count.load(Ordering::Acquire) >= *until) {
            assert!(Instant::now() < deadline && !self.stop.load(Ordering::Acquire), "reads do not go on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The longest read since the last time.
    pub fn longest(&self) -> Duration {
        std::mem::take(&mut *self.longest.lock().unwrap())
    }
}

/// Contents of the files `f0`, `f1` and so on.
pub fn texts() -> Vec<Vec<u8>> {
    (0..FILES).map(|n| bytes(n as u64 + 1, LEN)).collect()
}

/// Ends the readers, also when the script panics.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Reads pieces of the files past the page cache until stopped, and compares each.
pub fn read_on(mount: &Path, texts: &[Vec<u8>], reader: usize, reads: &Reads) {
    let files: Vec<File> = (0..FILES)
        .map(|n| {
            let path = mount.join(format!("f{n}"));
            File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
        })
        .collect();
    let mut memory = vec![0u8; PIECE + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let mut dice = (reader as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while !reads.stop.load(Ordering::Acquire) {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        let (n, at) = (dice as usize % FILES, (dice >> 20) as usize % (LEN / PIECE) * PIECE);
        let start = Instant::now();
        let buf = &mut memory[skip..skip + PIECE];
        let got = files[n].read_at(buf, at as u64);
        let got = got.unwrap_or_else(|error| panic!("reading f{n} at {at} after {:?}: {error}", start.elapsed()));
        assert!(buf[..got] == texts[n][at..at + got] && got > 0, "wrong bytes of f{n} at {at}");
        let took = start.elapsed();
        let mut longest = reads.longest.lock().unwrap();
        *longest = took.max(*longest);
        drop(longest);
        reads.counts[reader].fetch_add(1, Ordering::AcqRel);
    }
}

#[test]
fn nodes_that_are_killed_stopped_and_restarted_cost_readers_a_pause_and_no_error() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let texts = texts();
    texts.iter().enumerate().for_each(|(n, text)| drop(server.put("data", &format!("f{n}"), text)));
    let endpoint = server.endpoint();
    let start = |n: usize, port: u16| {
        let mut words = world.node_words(&["s3://data"], port);
        words.extend(["--cache-dir".into(), world.dir(&format!("cache-{n}")).into()]);
        words.extend(["--endpoint-url".into(), endpoint.clone().into()]);
        let given = words.iter().position(|word| word == "--cache-dir").unwrap();
        // A cache of its own instead of the one of a lone node.
        words.drain(given..given + 2);
        let mut command = world.command(&[]);
        command.args(words);
        world.node_with(with_credentials(&mut command))
    };
    let mut nodes: Vec<Node> = (0..3).map(|n| start(n, 0)).collect();
    let ports: Vec<u16> = nodes.iter().map(Node::port).collect();
    let registry = format!("static:{}", nodes.iter().map(|n| n.address.clone()).collect::<Vec<_>>().join(","));
    let mounts: Vec<_> = (0..2)
        .map(|n| {
            let at = world.dir(&format!("mnt-{n}"));
            let words = ["mount", "s3://data", at.to_str().unwrap(), "--registry", &registry, "--peer-silence", "1s"];
            let process = Process::start(&mut world.command(&words), &world.log_path("mount"));
            process.wait_for(" is mounted on ");
            (at, process)
        })
        .collect();
    let reads = Reads::of(4);
    std::thread::scope(|scope| {
        let _stop = Stop(&reads.stop);
        for reader in 0..4 {
            let (at, texts, reads) = (&mounts[reader % 2].0, &texts, &reads);
            // One that fails ends the others, and the script.
            scope.spawn(move || {
                let _stop = Stop(&reads.stop);
                read_on(at, texts, reader, reads);
            });
        }
        reads.go_on(75);
        println!("the longest read: {:?} while the cache fills", reads.longest());
        nodes[0].process.kill();
        reads.go_on(50);
        println!("the longest read: {:?} with a node killed", reads.longest());
        nodes[0] = start(0, ports[0]);
        reads.go_on(25);
        reads.longest();
        nodes[1].process.signal(Signal::STOP);
        reads.go_on(50);
        println!("the longest read: {:?} with a node stopped", reads.longest());
        nodes[1].process.signal(Signal::CONT);
        reads.go_on(25);
        reads.longest();
        for n in 0..3 {
            let blocks = nodes[n].count("blockcache", "blocks");
            nodes[n].process.signal(Signal::TERM);
            assert!(nodes[n].process.wait().success());
            nodes[n] = start(n, ports[n]);
            assert!(nodes[n].count("blockcache", "blocks") >= blocks, "the cache is warm at once");
            reads.go_on(12);
        }
        println!("the longest read: {:?} while every node was restarted in turn", reads.longest());
    });
    for (at, mut process) in mounts {
        process.signal(Signal::TERM);
        assert!(process.wait().success(), "{}", process.log());
        assert!(!is_mounted(&at));
    }
    // Blocks outlive a node's process on its disk.
    assert!(nodes.iter().all(|node| node.count("blockcache", "blocks") > 0));
}

#[test]
fn a_node_that_joins_takes_its_blocks_from_the_others_and_not_from_the_bucket() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let texts: Vec<Vec<u8>> = (0..4).map(|n| bytes(n + 40, 40 * MIB)).collect();
    texts.iter().enumerate().for_each(|(n, text)| drop(server.put("data", &format!("f{n}"), text)));
    let (_coordinator, address) = crate::group::coordinator(&world, 0);
    let registry = format!("coordinator://{address}");
    let start = |name: &str| {
        let cache = world.dir(&format!("cache-{name}"));
        let mut command = world.command(&["node", "--source", "s3://data", "--cache-dir", cache.to_str().unwrap()]);
        command.args(["--registry", &registry, "--name", name, "--endpoint-url", &server.endpoint()]);
        world.node_with(with_credentials(&mut command))
    };
    let first = start("one");
    let at = world.dir("mnt");
    let words = ["mount", "s3://data", at.to_str().unwrap(), "--registry", &registry];
    let mount = world.mount_with(&mut world.command(&words));
    let read_all = || texts.iter().enumerate().for_each(|(n, text)| assert!(mount.read(format!("f{n}")) == *text));
    read_all();
    assert!(first.count("object", "get_bytes") >= 160 * MIB as u64);
    let second = start("two");
    // Half of the runs of blocks are its own from the moment when all know of it.
    let deadline = Instant::now() + PATIENCE;
    while second.count("remotecache", "pulled_bytes") == 0 {
        assert!(Instant::now() < deadline, "the second node is asked for nothing: {}", second.process.log());
        drop_page_cache(&at, texts.len());
        read_all();
    }
    drop_page_cache(&at, texts.len());
    read_all();
    let (pulled, got) = (second.count("remotecache", "pulled_bytes"), second.count("object", "get_bytes"));
    println!("of the second node's blocks {pulled} bytes came from the first and {got} from the bucket");
    mount.unmount();
}

/// Drops the kernel's page cache of the files.
fn drop_page_cache(mount: &Path, files: usize) {
    for n in 0..files {
        let file = File::open(mount.join(format!("f{n}"))).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
}

mod test_all {
    use super::*;

    #[test]
    fn a_mount_that_stood_still_for_longer_than_answers_are_waited_for_reads_on() {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let texts = texts();
        texts.iter().enumerate().for_each(|(n, text)| drop(world.file(&format!("source/f{n}"), text)));
        let source = world.dir("source").to_str().unwrap().to_owned();
        let nodes: Vec<Node> = (0..2)
            .map(|n| {
                let cache = world.dir(&format!("cache-{n}"));
                world.node_with(&mut world.command(&[
                    "node",
                    "--source",
                    &source,
                    "--cache-dir",
                    cache.to_str().unwrap(),
                ]))
            })
            .collect();
        let registry = format!("static:{},{}", nodes[0].address, nodes[1].address);
        let at = world.dir("mnt");
        let words = ["mount", &source, at.to_str().unwrap(), "--registry", &registry, "--peer-timeout", "4s"];
        let mount = world.mount_with(&mut world.command(&words));
        let reads = Reads::of(4);
        std::thread::scope(|scope| {
            let _stop = Stop(&reads.stop);
            for reader in 0..4 {
                let (at, texts, reads) = (&at, &texts, &reads);
                scope.spawn(move || {
                    let _stop = Stop(&reads.stop);
                    read_on(at, texts, reader, reads);
                });
            }
            reads.go_on(50);
            for _ in 0..2 {
                mount.process().signal(Signal::STOP);
                std::thread::sleep(Duration::from_secs(6));
                mount.process().signal(Signal::CONT);
                reads.go_on(25);
            }
        });
        mount.unmount();
    }
}
