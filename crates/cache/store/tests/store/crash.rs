//! `kill -9` at any moment: what was acknowledged is there and right, and nothing torn is ever served. A child process
//! (this same test binary) writes, is killed at a random moment, and the store is opened again.

use crate::common;
use common::*;
use spurline_store::{BlockClass, PutOutcome, Store};
use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const CHILD: &str = "SPURLINE_TEST_STORE_CRASH_CHILD";
const OBJECTS: u64 = 40;
const ROUNDS: u64 = 24;

fn size_of(name: u64) -> u64 {
    if name.is_multiple_of(3) { 1 + name * 997 } else { u64::from(BLOCK) * (1 + name % 5) + name }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Objects are of three classes, of which 0 is none.
fn class_of(name: u64) -> u64 {
    name % 3
}

fn classes() -> BTreeMap<u64, BlockClass> {
    BTreeMap::from([(1, BlockClass { pinned: true, ..BlockClass::default() }), (2, BlockClass::default())])
}

/// Every block that is here is of its class, and nothing else is.
fn classes_are_known(store: &Store, names: impl Iterator<Item = u64>) {
    store.set_classes(classes());
    let names: Vec<u64> = names.collect();
    let expected = || {
        let mut expected = [0; 3];
        for name in &names {
            let obj = object(*name, size_of(*name));
            let here = (0..obj.block_count(u64::from(BLOCK)) as u32).filter(|index| store.contains_block(&obj, *index));
            let bytes = here.map(|index| obj.block_len(index, u64::from(BLOCK)).next_multiple_of(4096) as u64);
            expected[class_of(*name) as usize] += bytes.sum::<u64>();
        }
        expected
    };
    // What was over the capacity goes meanwhile, in the background.
    eventually("the classes are those of what is here", || {
        [store.class_used(1), store.class_used(2)] == expected()[1..]
    });
}

/// Not a test of its own: does nothing unless it runs as the child.
#[test]
fn child() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let mut parts = spec.splitn(3, ':');
    let seed: u64 = parts.next().unwrap().parse().unwrap();
    let capacity: u64 = parts.next().unwrap().parse().unwrap();
    let (store, _) = open(config(Path::new(parts.next().unwrap()), capacity));
    store.set_classes(classes());
    println!("\nready");
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let store = &store;
            scope.spawn(move || {
                let mut state = seed * 31 + thread * 7 + 1;
                loop {
                    // With room for all, each round writes objects of its own, so that a write is always possible.
                    let base = if capacity < 1 << 30 { 0 } else { seed * OBJECTS };
                    let name = base + random(&mut state) % OBJECTS;
                    let obj = object(name, size_of(name));
                    if random(&mut state).is_multiple_of(200) && capacity < 1 << 30 {
                        store.remove_object(&obj);
                        continue;
                    }
                    let index = (random(&mut state) % obj.block_count(u64::from(BLOCK))) as u32;
                    if store.put_classed(&obj, index, &bytes(&obj, index), class_of(name)).unwrap()
                        == PutOutcome::Stored
                    {
                        // One line, one write: the parent reads what was acknowledged before the kill.
                        let line = format!("\n+{name}:{index}\n");
                        let mut out = std::io::stdout().lock();
                        out.write_all(line.as_bytes()).unwrap();
                        out.flush().unwrap();
                    }
                }
            });
        }
    });
}

/// Runs a child for a while, kills the child, and returns the acknowledged blocks.
fn crash(dir: &Path, capacity: u64, seed: u64) -> HashSet<(u64, u32)> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["crash::child", "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, format!("{seed}:{capacity}:{}", dir.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while lines.next().is_some_and(|line| line.unwrap() != "ready") {}
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let (enough, micros) = (1 + random(&mut state) % 20, random(&mut state) % 20_000);
    let mut done = HashSet::new();
    let mut killed = false;
    for line in lines {
        let Ok(line) = line else { break };
        let parsed = line.strip_prefix('+').and_then(|l| l.split_once(':'));
        if let Some((Ok(name), Ok(index))) = parsed.map(|(n, i)| (n.parse(), i.parse())) {
            done.insert((name, index));
        }
        // The acknowledgements of a killed child are still in the pipe, and are read.
        if done.len() as u64 >= enough && !std::mem::replace(&mut killed, true) {
            std::thread::sleep(Duration::from_micros(micros));
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    done
}

#[test]
fn nothing_acknowledged_is_lost_to_kill_9() {
    let dir = scratch_dir();
    let mut all = HashSet::new();
    for round in 0..ROUNDS {
        let new = crash(dir.path(), 4 << 30, round + 1);
        let last = round + 1 == ROUNDS;
        all.extend(new.iter().copied());
        let (store, stats) = open(config(dir.path(), 4 << 30));
        for (name, index) in if last { &all } else { &new } {
            let obj = object(*name, size_of(*name));
            let found = read(&store, &obj, *index).is_some();
            let counters = &stats.blockcache;
            assert!(
                found,
                "round {round}: block {index} of object {name} is lost; {} errors, {} wrong, known: {}; {:?}",
                counters.io_errors.get(),
                counters.checksum_errors.get(),
                store.contains_block(&obj, *index),
                store.disks()
            );
        }
        assert_eq!(stats.blockcache.checksum_errors.get(), 0);
        assert_eq!(store.used_bytes(), stats.blockcache.used_bytes.get());
        if last {
            classes_are_known(&store, 0..(ROUNDS + 1) * OBJECTS);
        }
    }
    println!("{} blocks outlived {ROUNDS} kills", all.len());
    assert!(all.len() > 50, "the children wrote too little to show anything: {}", all.len());
}

#[test]
fn nothing_torn_is_served_after_kill_9_under_eviction() {
    let dir = fast_dir();
    let capacity = 24 * u64::from(BLOCK);
    let (mut hits, mut removed_late) = (0, 0);
    for round in 0..ROUNDS {
        crash(dir.path(), capacity, 100 + round);
        let (store, stats) = open(config(dir.path(), capacity));
        classes_are_known(&store, 0..OBJECTS);
        for name in 0..OBJECTS {
            let obj = object(name, size_of(name));
            // `read` fails the test when a hit has wrong bytes.
            hits += (0..obj.block_count(u64::from(BLOCK))).filter(|i| read(&store, &obj, *i as u32).is_some()).count();
        }
        assert!(store.used_bytes() <= capacity);
        removed_late += stats.blockcache.checksum_errors.get();
    }
    println!("{hits} hits after {ROUNDS} kills, {removed_late} blocks found gone by their checksums");
    assert!(hits > 20);
    // Files no index entry names are removed in the background, so space does not leak away.
    let (store, _) = open(config(dir.path(), capacity));
    eventually("orphans are gone", || {
        let mut files = HashSet::new();
        for folder in std::fs::read_dir(dir.path().join("data")).unwrap().flatten() {
            files.extend(std::fs::read_dir(folder.path()).unwrap().flatten().map(|f| f.file_name()));
        }
        let mut objects = HashSet::new();
        store.for_each_block(|block, _| {
            objects.insert(block.object);
        });
        files.len() == objects.len()
    });
}
