//! Seeded runs of all failures of a group, under readers that compare every byte. The seed decides the events and
//! their order; thread scheduling differs. A failure prints its command.
//!
//! `SPURLINE_TEST_SEED=n` runs one seed, `SPURLINE_TEST_SEEDS=n` the first n instead of a few dozen.

use crate::sim::{BLOCK, Cluster, Mount, Waits, object};
use spurline_client::placement::{ReaderLocation, WantedBlock};
use spurline_net_sim::{FaultRates, RailMode};
use spurline_types::ObjectRef;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// xorshift64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

/// State of the nodes under the script. One node is never harmed, so that one can always answer.
struct Script {
    alone: usize,
    members: Vec<bool>,
    weights: Vec<u32>,
}

impl Script {
    fn tell(&self, cluster: &Cluster, mount: &Mount) {
        let mut members = Vec::new();
        for (n, host) in cluster.hosts.iter().enumerate().filter(|(n, _)| self.members[*n] || *n == self.alone) {
            let mut member = host.member.clone();
            member.weight = self.weights[n];
            members.push(Arc::new(member));
        }
        mount.remote.set_members(&members);
    }

    fn step(&mut self, dice: &mut Dice, cluster: &Cluster, mounts: &[Mount]) {
        let n = dice.below(cluster.hosts.len());
        let (host, mount) = (&cluster.hosts[n], &mounts[dice.below(mounts.len())]);
        let spared = n == self.alone;
        match dice.below(12) {
            0 if !spared => host.sim.kill(),
            1 | 2 => host.sim.start(),
            3 if !spared => host.link.set_mode(RailMode::Silent),
            4 if !spared => host.link.set_mode(RailMode::Down),
            5 => host.link.set_mode(RailMode::Slow(Duration::from_millis(1 + dice.below(8) as u64))),
            6 => host.link.set_mode(RailMode::Up),
            // A partition between one mount and one node, and its end.
            7 if !spared => {
                mount.links[n].set_mode([RailMode::Silent, RailMode::Down, RailMode::HangsConnect][dice.below(3)])
            }
            8 => mount.links[n].set_mode(RailMode::Up),
            9 => self.members[n] = !self.members[n],
            10 => self.weights[n] = [0, 50, 100, 300][dice.below(4)],
            // Cut connections, invalid answers or late ones.
            _ if !spared => host.plan.set_rates(FaultRates {
                drop: dice.below(60) as u32,
                cut: dice.below(60) as u32,
                garbage: dice.below(30) as u32,
                delay: dice.below(200) as u32,
                max_delay: Duration::from_millis(5),
                ..FaultRates::default()
            }),
            _ => {}
        }
        // The registry reaches one mount earlier than another, and sometimes not at all.
        for mount in mounts {
            if dice.below(3) > 0 {
                self.tell(cluster, mount);
            }
        }
    }
}

/// Ends the readers, also when the script panics.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The first nodes that a mount tries for blocks of these objects.
fn asked_first(cluster: &Cluster, mount: &Mount, objects: &[ObjectRef], copies: u32) -> BTreeSet<usize> {
    let view = mount.remote.members().snapshot();
    let mut found = Vec::new();
    let mut owner = |object: &ObjectRef, index| {
        view.rank_holders(WantedBlock::of_block(object.id, index, copies), &ReaderLocation::default(), 8, &mut found);
        let name = &view.members()[found[0] as usize].name;
        cluster.hosts.iter().position(|host| host.member.name == *name).unwrap()
    };
    objects
        .iter()
        .flat_map(|o| (0..o.block_count(BLOCK) as u32).map(move |i| (o, i)))
        .map(|(o, i)| owner(o, i))
        .collect()
}

fn run(seed: u64) {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let nodes = 2 + dice.below(5);
    // Less memory than data: blocks are evicted and fetched again all the time.
    let cluster = Cluster::start(nodes, 24 + dice.below(100) as u64);
    // With hedging (nearly all reads count as late), and without.
    let hedge_after = Duration::from_millis([0, 2][dice.below(2)]);
    let copies = 1 + dice.below(2) as u32;
    let waits = || Waits { hedge_after, copies, ..Waits::default() };
    let mounts: Vec<Mount> = (0..1 + dice.below(3)).map(|_| cluster.mount_as(0..nodes, waits())).collect();
    let mut script = Script { alone: dice.below(nodes), members: vec![true; nodes], weights: vec![100; nodes] };
    let objects: Vec<_> =
        (0..6).map(|n| object(n, (1 + dice.below(40) as u64) * BLOCK - dice.below(999) as u64)).collect();
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for reader in 0..4 {
            let (mount, objects, stop, reads) = (&mounts[reader % mounts.len()], &objects, &stop, &reads);
            let mut dice = Dice(seed ^ (reader as u64 + 1) << 40 | 1);
            scope.spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    let object = &objects[dice.below(objects.len())];
                    let offset = dice.below(object.size as usize) as u64;
                    let len = [100, 5000, BLOCK as usize, 3 * BLOCK as usize][dice.below(4)];
                    if let Err(error) = mount.read(object, offset, len) {
                        panic!("seed {seed}: a read failed: {error}");
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..25 {
            script.step(&mut dice, &cluster, &mounts);
            std::thread::sleep(Duration::from_millis(1 + dice.below(30) as u64));
        }
        // All faults end, and abandoned nodes come back.
        script.members.fill(true);
        script.weights.fill(100);
        for host in &cluster.hosts {
            host.sim.start();
            host.link.set_mode(RailMode::Up);
            host.plan.set_rates(FaultRates::default());
        }
        for mount in &mounts {
            mount.links.iter().for_each(|link| link.set_mode(RailMode::Up));
            script.tell(&cluster, mount);
        }
        let owners = asked_first(&cluster, &mounts[0], &objects, copies);
        let served = |n: &usize| cluster.hosts[*n].stats.remotecache.served_ops.get();
        let before: Vec<u64> = owners.iter().map(served).collect();
        let deadline = Instant::now() + Duration::from_secs(60);
        while owners.iter().zip(&before).any(|(n, before)| served(n) <= *before) {
            assert!(Instant::now() < deadline, "seed {seed}: not every node of {owners:?} is asked again");
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    assert!(reads.load(Ordering::Relaxed) > 0);
}

/// Runs seeds in parallel and reports failing ones.
fn run_all(seeds: std::ops::RangeInclusive<u64>) {
    let next = AtomicU64::new(*seeds.start());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > *seeds.end() {
                        return;
                    }
                    if std::panic::catch_unwind(|| run(seed)).is_err() {
                        let command = "cargo test -p spurline-node --test cluster whatever";
                        panic!("seed {seed} failed; this runs it again: SPURLINE_TEST_SEED={seed} {command}");
                    }
                }
            });
        }
    });
}

#[test]
fn whatever_happens_to_a_group() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("SPURLINE_TEST_SEED") {
        Some(seed) => run(seed),
        None => run_all(1..=number("SPURLINE_TEST_SEEDS").unwrap_or(24)),
    }
}
