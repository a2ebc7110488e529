//! Events of a run, drawn from a seed, and the invariants that must hold in every run.

use crate::sim::{BLOCK, object, patience};
use crate::world::{Dice, Outcome, Plan, Seen, Stop, World, read_on};
use spurline_client::placement::{ReaderLocation, WantedBlock};
use spurline_net_sim::{FaultRates, RailMode};
use spurline_store::DiskFault;
use spurline_types::ObjectRef;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum nodes in trouble at once.
const SICK: usize = 2;
/// Longest delay of a read by one node in trouble: the silence limit, half of it again until detection, and one
/// connection attempt.
pub const PAUSE: Duration = Duration::from_millis(2000 + 1000 + 500);

/// Trouble of a node, or of a mount's link to it.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// No connections, and its registration expires.
    Killed,
    Link(RailMode),
    /// Answers of a live node are lost.
    Lost,
    /// Between one mount and the node.
    Partition(usize, RailMode),
    Frames,
    Disk(DiskFault),
    /// It cannot reach the registry, but serves on.
    Unheard,
    Drained,
    Left,
}

struct Script {
    dice: Dice,
    world: World,
    objects: Vec<ObjectRef>,
    /// Never in trouble, so that one node can always answer.
    alone: usize,
    sick: Vec<(usize, Trouble, Instant)>,
    /// End of the registry's outage.
    registry: Option<Instant>,
    /// Start of the run, and whether to print events.
    began: Instant,
    told: bool,
    /// Answers were lost.
    lost: bool,
    calm: bool,
    copies: u32,
}

impl Script {
    fn tell(&self, what: std::fmt::Arguments<'_>) {
        if self.told {
            println!("{:8.3} {what}", self.began.elapsed().as_secs_f64());
        }
    }

    fn trouble(&mut self, n: usize) -> Trouble {
        let dice = &mut self.dice;
        let disks = !self.world.disks.is_empty();
        match dice.below(if disks { 13 } else { 10 }) {
            0 => Trouble::Killed,
            1 => Trouble::Link(RailMode::Silent),
            2 => Trouble::Link(RailMode::Down),
            3 => Trouble::Link(RailMode::Slow(Duration::from_millis(1 + dice.below(300) as u64))),
            4 => {
                let mode = [RailMode::Silent, RailMode::Down, RailMode::HangsConnect][dice.below(3)];
                Trouble::Partition(dice.below(self.world.readers.len()), mode)
            }
            5 => Trouble::Frames,
            6 => Trouble::Unheard,
            7 => Trouble::Drained,
            8 => Trouble::Left,
            9 => Trouble::Lost,
            _ => {
                // At rest: bits in its files flip.
                self.corrupt(n);
                let dice = &mut self.dice;
                Trouble::Disk(
                    [DiskFault::Corrupts, DiskFault::Errors, DiskFault::Tears, DiskFault::Full][dice.below(4)],
                )
            }
        }
    }

    /// Flips a bit in every other file of a node's cache disk.
    fn corrupt(&mut self, n: usize) {
        use std::os::unix::fs::FileExt as _;
        let Ok(folders) = std::fs::read_dir(self.world.disks[n].dir.path().join("data")) else { return };
        let mut files: Vec<_> = folders
            .flatten()
            .filter_map(|f| std::fs::read_dir(f.path()).ok())
            .flatten()
            .flatten()
            .map(|f| f.path())
            .collect();
        // Directory order does not depend on the seed.
        files.sort();
        for path in files {
            if self.dice.below(2) == 0 {
                continue;
            }
            let Ok(file) = std::fs::OpenOptions::new().read(true).write(true).open(path) else { continue };
            let len = file.metadata().map_or(1, |meta| meta.len().max(1));
            let (at, mut byte) = (self.dice.below(len as usize) as u64, [0]);
            if file.read_exact_at(&mut byte, at).is_ok() {
                let _ = file.write_all_at(&[byte[0] ^ 0x10], at);
            }
        }
    }

    fn begin(&mut self, n: usize, trouble: Trouble) {
        self.tell(format_args!("node {n}: {trouble:?}"));
        let host = &self.world.cluster.hosts[n];
        match trouble {
            Trouble::Killed => {
                host.sim.kill();
                self.world.registry.set_reached(&host.member.name, false);
            }
            Trouble::Link(mode) => host.link.set_mode(mode),
            Trouble::Partition(mount, mode) => self.world.readers[mount].mount.links[n].set_mode(mode),
            Trouble::Frames => {
                let rates = FaultRates {
                    drop: self.dice.below(60) as u32,
                    cut: self.dice.below(60) as u32,
                    garbage: self.dice.below(30) as u32,
                    twice: self.dice.below(30) as u32,
                    delay: self.dice.below(300) as u32,
                    max_delay: Duration::from_millis(1 + self.dice.below(400) as u64),
                    ..FaultRates::default()
                };
                host.plan.set_rates(rates);
            }
            Trouble::Lost => {
                self.lost = true;
                host.plan.set_rates(FaultRates { stall: 1 + self.dice.below(20) as u32, ..FaultRates::default() });
            }
            Trouble::Disk(fault) => self.world.disks[n].fault.set_fault(fault),
            Trouble::Unheard => self.world.registry.set_reached(&host.member.name, false),
            Trouble::Drained => {
                self.world.announcers[n].iter().for_each(|a| a.update_member(|member| member.weight = 0))
            }
            Trouble::Left => drop(self.world.announcers[n].take()),
        }
    }

    fn end(&mut self, n: usize, trouble: Trouble) {
        self.tell(format_args!("node {n}: the end of {trouble:?}"));
        let host = &self.world.cluster.hosts[n];
        match trouble {
            Trouble::Killed => {
                host.sim.start();
                self.world.registry.set_reached(&host.member.name, true);
            }
            Trouble::Link(_) => host.link.set_mode(RailMode::Up),
            Trouble::Partition(mount, _) => self.world.readers[mount].mount.links[n].set_mode(RailMode::Up),
            Trouble::Frames | Trouble::Lost => host.plan.set_rates(FaultRates::default()),
            Trouble::Disk(_) => self.world.disks[n].fault.set_fault(DiskFault::None),
            Trouble::Unheard => self.world.registry.set_reached(&host.member.name, true),
            Trouble::Drained => {
                self.world.announcers[n].iter().for_each(|a| a.update_member(|member| member.weight = 100))
            }
            Trouble::Left => self.world.announce(n),
        }
    }

    /// Ends trouble that is over by now, or all of it.
    fn heal(&mut self, everything: bool) {
        let now = Instant::now();
        if self.registry.is_some_and(|until| everything || until <= now) {
            self.world.registry.set_up(true);
            self.registry = None;
        }
        let over: Vec<_> = self.sick.extract_if(.., |(_, _, until)| everything || *until <= now).collect();
        over.into_iter().for_each(|(n, trouble, _)| self.end(n, trouble));
    }

    fn step(&mut self) {
        self.heal(false);
        let n = self.dice.below(self.world.cluster.hosts.len());
        match self.dice.below(10) {
            0 => {
                self.tell(format_args!("the registry is lost"));
                self.world.registry.set_up(false);
                self.registry = Some(Instant::now() + Duration::from_secs(self.dice.below(120) as u64));
            }
            1 => {
                self.tell(format_args!("the registry is restarted empty"));
                self.world.registry.restart_empty();
            }
            2 => {
                // One mount does not reach the registry for a while.
                let name = &self.world.readers[self.dice.below(self.world.readers.len())].name;
                let reached = self.dice.below(2) == 0;
                self.world.registry.set_reached(name, reached);
                self.tell(format_args!("{name} reaches the registry: {reached}"));
            }
            3 => *self.world.cluster.under.latency.lock() = Duration::from_millis(self.dice.below(200) as u64),
            _ if self.calm
                || n == self.alone
                || self.sick.len() >= SICK
                || self.sick.iter().any(|(other, ..)| *other == n) => {}
            _ => {
                let trouble = self.trouble(n);
                let until = Instant::now() + Duration::from_secs(1 + self.dice.below(90) as u64);
                self.begin(n, trouble);
                self.sick.push((n, trouble, until));
            }
        }
        std::thread::sleep(Duration::from_millis(100 + self.dice.below(8000) as u64));
    }
}

/// Longest time until a group is complete again: nodes keep the places of nodes that left together for five minutes,
/// and renew their registration every five seconds.
const WHOLE_AGAIN: Duration = Duration::from_secs(330);

impl Script {
    /// No trouble left: every mount must find every node and read from all of its owners.
    fn recover(&mut self) {
        let names: Vec<String> = self.world.readers.iter().map(|reader| reader.name.clone()).collect();
        names.iter().for_each(|name| self.world.registry.set_reached(name, true));
        // A node that came back during a registry outage exited, as a real process does, and is started again.
        let out = (0..self.world.announcers.len()).filter(|n| self.world.announcers[*n].is_none()).collect::<Vec<_>>();
        out.into_iter().for_each(|n| self.world.announce(n));
        let until = Instant::now() + WHOLE_AGAIN;
        let whole = |reader: &crate::world::Reader| {
            let view = reader.mount.remote.members().snapshot();
            view.members().len() == self.world.cluster.hosts.len() && view.members().iter().all(|m| m.weight == 100)
        };
        while !self.world.readers.iter().all(|reader| whole(reader)) {
            assert!(Instant::now() < until, "the group is not whole again after {WHOLE_AGAIN:?}");
            std::thread::sleep(Duration::from_secs(1));
        }
        let served = || self.world.cluster.hosts.iter().map(|host| host.stats.remotecache.served_ops.get());
        let before: Vec<u64> = served().collect();
        let until = Instant::now() + WHOLE_AGAIN;
        let owners = self.owners();
        while owners.iter().any(|n| served().nth(*n).is_some_and(|now| now <= before[*n])) {
            assert!(
                Instant::now() < until,
                "a node that is well is not asked again: of {owners:?}; answered {before:?} before and {:?} since then; {:?}",
                served().collect::<Vec<_>>(),
                self.states()
            );
            std::thread::sleep(Duration::from_secs(1));
        }
        self.tell(format_args!("the group is whole, and every node is asked"));
    }

    /// State of every node in every mount.
    fn states(&self) -> Vec<String> {
        let mut states = Vec::new();
        for reader in &self.world.readers {
            for peer in reader.mount.remote.members().snapshot().existing_peers() {
                states.push(format!("{}: {} {:?} {:?}", reader.name, peer.name(), peer.tcp_reach(), peer.latency()));
            }
        }
        states
    }

    /// The first node of each block, over all mounts.
    fn owners(&self) -> BTreeSet<usize> {
        let (mut found, mut owners) = (Vec::new(), BTreeSet::new());
        for (reader, number) in self.world.readers.iter().zip(0..) {
            let view = reader.mount.remote.members().snapshot();
            // A mount tries the same copy of a block first each time.
            let from = ReaderLocation { zone: String::new(), seed: number };
            for object in &self.objects {
                for index in 0..object.block_count(BLOCK) as u32 {
                    let wanted = WantedBlock::of_block(object.id, index, self.copies);
                    view.rank_holders(wanted, &from, self.copies as usize, &mut found);
                    let name = &view.members()[found[0] as usize].name;
                    owners.extend(self.world.cluster.hosts.iter().position(|host| host.member.name == *name));
                }
            }
        }
        owners
    }
}

pub fn run(seed: u64, told: bool) -> Outcome {
    let mut dice = Dice::new(seed);
    let plan = Plan {
        nodes: 2 + dice.below(5),
        mounts: 1 + dice.below(3),
        blocks: if dice.below(2) == 0 { 24 + dice.below(60) as u64 } else { 400 },
        copies: 1 + dice.below(3) as u32,
        hedge_after: Duration::from_millis([0, 50][dice.below(2)]),
        disks: dice.below(3) == 0,
        calm: dice.below(5) == 0,
    };
    // Hedging adds fetches by second nodes, so only registry trouble is used here.
    let plan = if plan.calm { Plan { blocks: 400, hedge_after: Duration::ZERO, disks: false, ..plan } } else { plan };
    let objects: Vec<_> =
        (0..6).map(|n| object(n, (1 + dice.below(30) as u64) * BLOCK - dice.below(999) as u64)).collect();
    let (began, alone) = (Instant::now(), dice.below(plan.nodes));
    let mut script = Script {
        dice,
        world: World::start(&plan),
        objects: objects.clone(),
        alone,
        sick: Vec::new(),
        registry: None,
        began,
        told,
        lost: false,
        calm: plan.calm,
        copies: plan.copies,
    };
    script.tell(format_args!("{plan:?}, node {alone} is left alone"));
    let seen = Seen { told, ..Seen::default() };
    std::thread::scope(|scope| {
        let _stop = Stop(&seen.stop);
        for n in 0..4u64 {
            let readers = &script.world.readers;
            let (reader, objects, seen) = (Arc::clone(&readers[n as usize % readers.len()]), &objects, &seen);
            scope.spawn(move || read_on(&reader, objects, seen, Dice::new(seed ^ (n + 1) << 40)));
        }
        for _ in 0..30 {
            script.step();
        }
        script.heal(true);
        script.recover();
    });
    let fetched = script.world.cluster.under.reads();
    let longest = *seen.longest.lock();
    // A lost answer on a live connection looks like a slow origin: the read waits for its full timeout, or far less
    // with hedging.
    let bound = if script.lost { patience().answer + PAUSE } else { PAUSE * SICK as u32 };
    assert!(longest <= bound, "a read took {longest:?}, {bound:?} at the most");
    let (reads, blocks) = (fetched.0, fetched.1 as u64);
    if plan.calm {
        assert_eq!(reads, blocks, "whatever the registry does, nothing is fetched twice, by {} holders", plan.copies);
    } else if plan.blocks == 400 && !plan.disks {
        assert!(reads <= blocks * plan.nodes as u64, "{reads} reads of {blocks} blocks by {} nodes", plan.nodes);
    }
    Outcome {
        reads: seen.reads.load(Ordering::Relaxed),
        longest,
        time: began.elapsed(),
        fetched,
        corrupt: script.world.corrupt(),
    }
}
