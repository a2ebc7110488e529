//! Readers of every kind against the read-ahead alone: wasted requests and misses.

use proptest::prelude::*;
use spurline_fs::readahead::ReadAhead;
use std::collections::HashSet;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4 * MIB;
const LIMIT: u32 = 16;

/// What became of one reader's blocks.
struct Sim {
    ahead: ReadAhead,
    size: u64,
    limit: u32,
    read: HashSet<u32>,
    requested: HashSet<u32>,
    /// Blocks requested before the first read of them.
    in_time: usize,
    calls: usize,
    reads: u64,
    /// The most blocks requested and not yet read, at any time.
    outstanding: usize,
}

impl Sim {
    fn new(size: u64) -> Sim {
        let (read, requested) = (HashSet::new(), HashSet::new());
        let ahead = ReadAhead::new(size, BLOCK);
        Sim { ahead, size, limit: LIMIT, read, requested, in_time: 0, calls: 0, reads: 0, outstanding: 0 }
    }

    fn read(&mut self, offset: u64, len: u64) {
        let len = len.min(self.size.saturating_sub(offset));
        let limit = self.limit;
        if let Some(blocks) = self.ahead.observe_read(offset, len as usize, || limit) {
            assert!(!blocks.is_empty() && u64::from(blocks.end) <= self.size.div_ceil(BLOCK), "{blocks:?}");
            assert!(blocks.len() <= limit.max(1) as usize, "{blocks:?} is more than the limit");
            self.calls += 1;
            self.requested.extend(blocks);
        }
        if len == 0 {
            return;
        }
        for block in offset / BLOCK..=(offset + len - 1) / BLOCK {
            let block = block as u32;
            if self.read.insert(block) && self.requested.contains(&block) {
                self.in_time += 1;
            }
        }
        self.reads += 1;
        if self.reads.is_multiple_of(8) {
            self.outstanding = self.outstanding.max(self.requested.difference(&self.read).count());
        }
    }

    /// Share of the requested blocks that were read.
    fn useful(&self) -> f64 {
        match self.requested.len() {
            0 => 1.0,
            requested => self.requested.intersection(&self.read).count() as f64 / requested as f64,
        }
    }

    /// Share of the read blocks that were requested before.
    fn coverage(&self) -> f64 {
        self.in_time as f64 / self.read.len() as f64
    }
}

/// A generator of numbers that needs no crate (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[test]
fn sequential_reads_find_all_blocks_but_the_first_asked_for() {
    for len in [4 << 10, 64 << 10, 128 << 10, MIB, 3 * MIB + 17] {
        let mut sim = Sim::new(256 * MIB + 99);
        let mut at = 0;
        while at < sim.size {
            sim.read(at, len);
            at += len;
        }
        assert_eq!(sim.in_time, sim.read.len() - 1, "reads of {len}");
        assert_eq!(sim.useful(), 1.0);
        assert!(sim.outstanding <= LIMIT as usize, "{} outstanding", sim.outstanding);
        assert!(sim.calls < 32, "{} calls for 64 blocks", sim.calls);
    }
}

#[test]
fn a_window_opens_with_what_was_read_and_no_faster() {
    let mut sim = Sim::new(1 << 30);
    sim.limit = 64;
    for i in 0..128 {
        sim.read(i * MIB, MIB);
        let ahead = sim.requested.difference(&sim.read).count() as u64;
        assert!(ahead <= 2 * (i + 1) * MIB / BLOCK + 1, "{ahead} blocks ahead after {} MiB", i + 1);
    }
    assert!(sim.outstanding >= 30, "and it does open: {}", sim.outstanding);
}

#[test]
fn a_reader_in_the_middle_is_followed_from_its_second_read() {
    let mut sim = Sim::new(256 * MIB);
    sim.read(99 * MIB, MIB);
    assert_eq!(sim.requested.len(), 0);
    sim.read(100 * MIB, MIB);
    assert!(sim.requested.contains(&26));
}

#[test]
fn random_reads_ask_for_nothing() {
    for (size, len, align, reads, allowed) in [
        (1 << 30, 4 << 10, 4 << 10, 20_000, 0),
        (1 << 30, 128 << 10, 4 << 10, 4000, 0),
        (16 << 30, MIB, 4 << 10, 4000, 0),
        // Where every twentieth or second read meets another by chance, next to nothing.
        (1 << 30, MIB, MIB, 1000, 5),
        (64 * MIB, MIB, MIB, 40, 6),
    ] {
        let mut numbers = Numbers(len ^ size);
        let mut sim = Sim::new(size);
        for _ in 0..reads {
            sim.read(numbers.below((size - len) / align) * align, len);
        }
        assert!(sim.requested.len() <= allowed, "{} blocks for reads of {len} in {size}", sim.requested.len());
    }
}

#[test]
fn sixteen_interleaved_shards_are_followed_each() {
    for len in [64 << 10, MIB] {
        let mut sim = Sim::new(1 << 30);
        let shard = sim.size / 16;
        for step in 0..shard / len {
            for s in 0..16 {
                sim.read(s * shard + step * len, len);
            }
        }
        assert!(sim.coverage() > 0.9, "coverage {} with reads of {len}", sim.coverage());
        assert_eq!(sim.useful(), 1.0);
        assert!(sim.outstanding <= 2 * LIMIT as usize, "{} outstanding", sim.outstanding);
    }
}

#[test]
fn shards_read_in_bursts_and_in_any_order_are_followed_each() {
    let mut numbers = Numbers(5);
    let mut sim = Sim::new(1 << 30);
    let shard = sim.size / 16;
    let mut at = [0; 16];
    loop {
        let open: Vec<usize> = (0..16).filter(|s| at[*s] < shard).collect();
        let Some(s) = open.get(numbers.below(open.len().max(1) as u64) as usize).copied() else { break };
        for _ in 0..1 + numbers.below(6) {
            if at[s] < shard {
                sim.read(s as u64 * shard + at[s], 256 << 10);
                at[s] += 256 << 10;
            }
        }
    }
    assert!(sim.coverage() > 0.9, "coverage {}", sim.coverage());
    assert_eq!(sim.useful(), 1.0);
}

#[test]
fn requests_out_of_order_are_one_sequential_reader() {
    // The kernel's own read-ahead, and threads sharing a handle: each request may be overtaken by up to
    // `depth` others.
    for depth in [2, 4, 8, 16] {
        for len in [128 << 10, MIB] {
            let mut numbers = Numbers(depth);
            let mut sim = Sim::new(1 << 30);
            let mut next = 0;
            let mut flying: Vec<u64> = Vec::new();
            while next < sim.size || !flying.is_empty() {
                while next < sim.size && (flying.len() as u64) < depth {
                    flying.push(next);
                    next += len;
                }
                let at = flying.swap_remove(numbers.below(flying.len() as u64) as usize);
                sim.read(at, len);
            }
            assert!(sim.coverage() > 0.85, "depth {depth}, reads of {len}: coverage {}", sim.coverage());
            assert_eq!(sim.useful(), 1.0, "depth {depth}, reads of {len}");
        }
    }
}

#[test]
fn a_reader_going_backwards_asks_for_nothing() {
    let mut sim = Sim::new(256 * MIB);
    for i in (0..256).rev() {
        sim.read(i * MIB, MIB);
    }
    assert_eq!(sim.requested.len(), 0);
    // It turns round: now there is something ahead, though all of it was near once.
    for i in 0..64 {
        sim.read(i * MIB, MIB);
    }
    assert!(sim.requested.len() >= 15, "{} requested", sim.requested.len());
}

#[test]
fn a_second_pass_is_followed_like_the_first() {
    let mut sim = Sim::new(128 * MIB);
    for _ in 0..3 {
        sim.requested.clear();
        sim.read.clear();
        sim.in_time = 0;
        for i in 0..128 {
            sim.read(i * MIB, MIB);
        }
        assert!(sim.coverage() > 0.9, "coverage {}", sim.coverage());
    }
}

#[test]
fn two_readers_of_all_on_one_handle_are_both_followed() {
    let mut sim = Sim::new(512 * MIB);
    for i in 0..256 {
        sim.read(i * MIB, MIB);
    }
    sim.requested.clear();
    for i in 0..250 {
        sim.read((256 + i) * MIB, MIB);
        sim.read(i * MIB, MIB);
    }
    let first: Vec<u32> = (2..60).filter(|b| !sim.requested.contains(b)).collect();
    let second: Vec<u32> = (66 + LIMIT..120).filter(|b| !sim.requested.contains(b)).collect();
    assert!(first.is_empty() && second.is_empty(), "not requested again: {first:?}, not at all: {second:?}");
}

#[test]
fn looking_at_headers_asks_for_nothing_and_starting_to_read_all_for_a_block() {
    let mut sim = Sim::new(64 * MIB);
    sim.read(0, 4096);
    assert_eq!(sim.requested.len(), 0);
    let mut sim = Sim::new(64 * MIB);
    sim.read(0, 128 << 10);
    assert_eq!(sim.requested, HashSet::from([1]));
    // Header, then the index at the end, then back: a columnar reader.
    let mut sim = Sim::new(64 * MIB);
    for at in [0, 64 * MIB - 8, 64 * MIB - 9000, 12 * MIB + 3] {
        sim.read(at, 5000);
    }
    assert_eq!(sim.requested.len(), 0);
}

#[test]
fn runs_with_small_holes_count() {
    // Every other record of 64 KiB.
    let mut sim = Sim::new(256 * MIB);
    for i in 0..2048 {
        sim.read(i * (128 << 10), 64 << 10);
    }
    assert!(sim.coverage() > 0.9, "coverage {}", sim.coverage());
}

#[test]
fn a_limit_of_nothing_asks_for_nothing() {
    let mut sim = Sim::new(64 * MIB);
    let mut ahead = ReadAhead::new(sim.size, BLOCK);
    for i in 0..64 {
        assert_eq!(ahead.observe_read(i * MIB, MIB as usize, || 0), None);
    }
    sim.read(u64::MAX, 5);
    sim.read(0, 0);
}

#[test]
fn the_end_of_the_largest_file() {
    let size = (u64::from(u32::MAX) - 1) * BLOCK;
    let mut sim = Sim::new(size);
    for i in (1..64).rev() {
        sim.read(size - i * MIB, MIB);
    }
    assert_eq!(sim.useful(), 1.0);
    // One of more blocks than have numbers is read, if not read ahead to its end.
    let mut ahead = ReadAhead::new(u64::MAX, BLOCK);
    for i in (1..64).rev() {
        ahead.observe_read(u64::MAX - i * MIB, MIB as usize, || LIMIT);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]
    /// For all reads, the requested blocks lie in the file, is within the limit, and stays in proportion to
    /// what was read: at most twice that, a block per run, and the one of the first read.
    #[test]
    fn never_out_of_bounds_or_proportion(
        size in 1..200 * MIB,
        reads in proptest::collection::vec((0..220 * MIB, 1..2 * MIB, 1..8u64), 1..200),
        limit in 0..20u32,
    ) {
        let mut sim = Sim::new(size);
        sim.limit = limit;
        let (mut bytes, mut starts) = (0, 0);
        for (offset, len, repeat) in reads {
            starts += 1;
            for i in 0..repeat {
                let at = offset + i * len;
                bytes += len.min(size.saturating_sub(at));
                sim.read(at, len);
            }
        }
        let requested = sim.requested.len() as u64;
        prop_assert!(requested <= 3 * bytes / BLOCK + 2 * starts + 1, "{requested} blocks for {bytes} bytes in {starts} runs");
        if limit == 0 { prop_assert_eq!(requested, 0); }
    }

    /// A sequential reader among random ones on the same handle is still followed.
    #[test]
    fn noise_does_not_hide_a_stream(seed: u64, noise in 0..3u64) {
        let mut numbers = Numbers(seed);
        let mut sim = Sim::new(1 << 30);
        let mut stream = HashSet::new();
        for i in 0..256 {
            sim.read(512 * MIB + i * MIB, MIB);
            stream.insert((128 + i / 4) as u32);
            for _ in 0..numbers.below(noise + 1) {
                sim.read(numbers.below(256 * MIB), 4096);
            }
        }
        let followed = stream.intersection(&sim.requested).count() as f64 / stream.len() as f64;
        prop_assert!(followed > 0.5, "{followed} of the stream was requested");
    }
}
