//! Staged files while nodes are killed: eight ranks write a checkpoint each round, and a node is killed meanwhile. What a close has
//! acknowledged is read through another mount at once, and the bucket has all files at the end.

use crate::nodes::BUCKET;
use spurline_rig::staging_group::StagingGroup;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

const KILLED_NODES: usize = 3;
const RANKS: usize = 8;
/// The longest file of a rank.
const CHECKPOINT_BYTES: usize = 3 << 20;
/// The longest time for the uploads of a round.
const ROUND_UPLOADS: Duration = Duration::from_secs(90);
/// The longest time until a name is readable after a leader is gone.
const READ_PATIENCE: Duration = Duration::from_secs(40);

/// The bytes of an object once the store has these.
fn await_object(server: &S3Server, key: &str, content: &[u8]) {
    let start = Instant::now();
    while server.bytes(BUCKET, key).as_deref() != Some(content) {
        assert!(start.elapsed() < ROUND_UPLOADS, "the store does not get {key}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Writes a file as checkpoints are written: under another name first.
fn write_rank(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&new, path)
}

/// Reads a file, also while the leader is replaced.
fn read_soon(path: &Path) -> io::Result<Vec<u8>> {
    let start = Instant::now();
    loop {
        let read = fs::read(path);
        if read.is_ok() || start.elapsed() >= READ_PATIENCE {
            return read;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn run_rounds(rounds: usize) {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket(BUCKET);
    let mut group = StagingGroup::start(&world, KILLED_NODES, &format!("s3://{BUCKET}"), &server.endpoint());
    let flags = ["--peer-silence", "1s"];
    let one = group.mount(&world, "one", &flags);
    let two = group.mount(&world, "two", &flags);
    fs::create_dir(one.path("checkpoint")).unwrap();
    let mut saved: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for round in 0..rounds {
        let victim = round % KILLED_NODES;
        let contents: Vec<Vec<u8>> = (0..RANKS)
            .map(|rank| {
                bytes((round * RANKS + rank) as u64, 1 + (round * 7919 + rank * 104_729) * 131 % CHECKPOINT_BYTES)
            })
            .collect();
        let results: Vec<io::Result<()>> = std::thread::scope(|scope| {
            let writers: Vec<_> = contents
                .iter()
                .enumerate()
                .map(|(rank, content)| {
                    let path = one.path(format!("checkpoint/rank-{rank}"));
                    scope.spawn(move || write_rank(&path, content))
                })
                .collect();
            std::thread::sleep(Duration::from_millis((round * 37 % 150) as u64));
            group.restart(&world, victim);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        for (rank, result) in results.into_iter().enumerate() {
            result.unwrap_or_else(|error| panic!("round {round}, rank {rank}: {error}"));
            saved.insert(rank, contents[rank].clone());
        }
        for (rank, content) in &saved {
            let read = read_soon(&two.path(format!("checkpoint/rank-{rank}")));
            let read = read.unwrap_or_else(|error| panic!("round {round}: rank {rank} is not read: {error}"));
            assert!(read == *content, "round {round}: rank {rank} has other bytes");
        }
    }
    for (rank, content) in &saved {
        await_object(&server, &format!("checkpoint/rank-{rank}"), content);
    }
    let names: Vec<String> = server.keys(BUCKET).into_iter().filter(|key| !key.starts_with(".spurline-")).collect();
    assert!(!names.iter().any(|key| key.contains(".conflict-")), "{names:?}");
    two.unmount();
    one.unmount();
}

#[test]
fn staged_checkpoints_are_whole_while_each_node_is_killed() {
    run_rounds(KILLED_NODES);
}

/// Run by `make test-all` only.
mod test_all {
    /// `SPURLINE_TEST_KILLS=n` runs n rounds.
    #[test]
    fn staged_checkpoints_are_whole_while_a_node_is_killed_in_each_of_many_rounds() {
        let rounds = std::env::var(super::KILLS_VARIABLE).ok().and_then(|rounds| rounds.parse().ok());
        super::run_rounds(rounds.unwrap_or(30));
    }
}
