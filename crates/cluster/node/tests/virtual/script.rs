//! What happens to a cluster, step by step, as a seed draws it; and what has to hold whatever that is.

use crate::sim::{BLOCK, object, patience};
use crate::world::{Dice, Outcome, Plan, Seen, Stop, World, read_on};
use spurline_client::placement::{Standpoint, Wanted};
use spurline_net_sim::{RailMode, Rates};
use spurline_store::Fault;
use spurline_types::ObjectRef;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Nodes that misbehave at one time.
const SICK: usize = 2;
/// How long one node in trouble holds up a read at the most: the silence after which it is given up, half of it again until
/// that is noticed, and a connection attempt.
pub const PAUSE: Duration = Duration::from_millis(2000 + 1000 + 500);

/// What is wrong with a node, or a mount's way to it.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// Nobody connects, and its registration runs out.
    Killed,
    Link(RailMode),
    /// Answers that are lost, of a node that lives.
    Lost,
    /// Of one mount.
    Partition(usize, RailMode),
    Frames,
    Disk(Fault),
    /// It does not reach the registry, and serves on.
    Unheard,
    Drained,
    Left,
}

struct Script {
    dice: Dice,
    world: World,
    objects: Vec<ObjectRef>,
    /// Never in trouble, so that there always is one to ask.
    alone: usize,
    sick: Vec<(usize, Trouble, Instant)>,
    /// When the registry is well again.
    registry: Option<Instant>,
    /// When the run began, and whether what happens is to be told.
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
                // At rest: bytes of its files are turned.
                self.corrupt(n);
                let dice = &mut self.dice;
                Trouble::Disk([Fault::Corrupts, Fault::Errors, Fault::Tears, Fault::Full][dice.below(4)])
            }
        }
    }

    /// Turns a bit of every other file of a node's cache disk.
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
        // The order of a directory is not the seed's.
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
            Trouble::Link(mode) => host.link.set(mode),
            Trouble::Partition(mount, mode) => self.world.readers[mount].mount.links[n].set(mode),
            Trouble::Frames => {
                let rates = Rates {
                    drop: self.dice.below(60) as u32,
                    cut: self.dice.below(60) as u32,
                    garbage: self.dice.below(30) as u32,
                    twice: self.dice.below(30) as u32,
                    delay: self.dice.below(300) as u32,
                    max_delay: Duration::from_millis(1 + self.dice.below(400) as u64),
                    ..Rates::default()
                };
                host.plan.set_rates(rates);
            }
            Trouble::Lost => {
                self.lost = true;
                host.plan.set_rates(Rates { stall: 1 + self.dice.below(20) as u32, ..Rates::default() });
            }
            Trouble::Disk(fault) => self.world.disks[n].fault.set(fault),
            Trouble::Unheard => self.world.registry.set_reached(&host.member.name, false),
            Trouble::Drained => self.world.announcers[n].iter().for_each(|a| a.set(|member| member.weight = 0)),
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
            Trouble::Link(_) => host.link.set(RailMode::Up),
            Trouble::Partition(mount, _) => self.world.readers[mount].mount.links[n].set(RailMode::Up),
            Trouble::Frames | Trouble::Lost => host.plan.set_rates(Rates::default()),
            Trouble::Disk(_) => self.world.disks[n].fault.set(Fault::None),
            Trouble::Unheard => self.world.registry.set_reached(&host.member.name, true),
            Trouble::Drained => self.world.announcers[n].iter().for_each(|a| a.set(|member| member.weight = 100)),
            Trouble::Left => self.world.announce(n),
        }
    }

    /// Ends what is over by now, or everything.
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
                // One mount hears nothing of the group for a while.
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

/// How long a group takes at the most to be whole again: nodes keep the places of those that left together for five
/// minutes, and tell the registry of themselves every five seconds.
const WHOLE_AGAIN: Duration = Duration::from_secs(330);

impl Script {
    /// All is well: every mount has to hear of every node, and read from all that it is to.
    fn recover(&mut self) {
        let names: Vec<String> = self.world.readers.iter().map(|reader| reader.name.clone()).collect();
        names.iter().for_each(|name| self.world.registry.set_reached(name, true));
        // A node that came back while there was no registry gave up, as its process does, and is started again.
        let out = (0..self.world.announcers.len()).filter(|n| self.world.announcers[*n].is_none()).collect::<Vec<_>>();
        out.into_iter().for_each(|n| self.world.announce(n));
        let until = Instant::now() + WHOLE_AGAIN;
        let whole = |reader: &crate::world::Reader| {
            let view = reader.mount.remote.roster().view();
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

    /// How every mount sees every node.
    fn states(&self) -> Vec<String> {
        let mut states = Vec::new();
        for reader in &self.world.readers {
            for peer in reader.mount.remote.roster().view().all_made() {
                states.push(format!("{}: {} {:?} {:?}", reader.name, peer.name(), peer.state(), peer.pace()));
            }
        }
        states
    }

    /// The nodes that some mount asks first for some block.
    fn owners(&self) -> BTreeSet<usize> {
        let (mut found, mut owners) = (Vec::new(), BTreeSet::new());
        for (reader, number) in self.world.readers.iter().zip(0..) {
            let view = reader.mount.remote.roster().view();
            // Of a block's copies a mount asks the same one first each time.
            let from = Standpoint { zone: String::new(), seed: number };
            for object in &self.objects {
                for index in 0..object.blocks(BLOCK) as u32 {
                    let wanted = Wanted::block(object.id, index, self.copies);
                    view.rank(wanted, &from, self.copies as usize, &mut found);
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
        old: dice.below(4).saturating_sub(1),
    };
    // Late reads are asked of a second node, which fetches them, too: with trouble that is none of the registry's.
    let plan =
        if plan.calm { Plan { blocks: 400, hedge_after: Duration::ZERO, disks: false, old: 0, ..plan } } else { plan };
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
    // What is lost on a connection that lives can't be told from what a slow under-store keeps back: it is waited for as
    // long as a request may take, and asked of a second node long before where late reads are.
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
