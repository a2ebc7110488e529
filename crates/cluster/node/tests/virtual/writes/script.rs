//! What happens to nodes, links and mounts in a run, drawn from a seed, and what has to be true at its end.

use super::hosts::{SimMount, WriteCluster};
use super::programs::{Program, RANGE_SLOTS, SETTLED_AFTER, Shared, StopOnPanic, locked, open_file};
use super::source::SharedSource;
use crate::world::Dice;
use spurline_net_sim::{FaultRates, RailMode};
use spurline_types::ErrorKind;
use spurline_volume::writes::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Troubles last about as long as each of these: heartbeats, the grace period, the renewal, a node's locks, a cut-off process, an
/// answer, a session, and the end of repeated closes.
const LENGTHS_S: [u64; 12] = [1, 2, 4, 5, 6, 10, 20, 25, 30, 75, 120, 150];
/// Longest time until nothing is open any more after all programs have ended: a mount gives up to close a file then.
const CLOSED_AFTER: Duration = Duration::from_secs(200);

/// Files of each mount that stay open until the others are closed: enough that each node has some.
const KEPT_FILES: usize = 6;

/// What a run consists of.
#[derive(Debug)]
pub struct RunPlan {
    pub nodes: usize,
    pub mounts: usize,
    pub programs: usize,
    pub steps: usize,
    /// A node without trouble, if there is one.
    pub well: Option<usize>,
    /// Hosts can lose their power.
    pub power: bool,
    /// RDMA rails between each mount and each node.
    pub rails: usize,
    /// How long a call of the source takes at first.
    latency: Duration,
    /// Kinds of trouble of this run.
    pub kinds: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Trouble {
    Killed { power: bool },
    Stopped,
    Link(RailMode),
    Calls(FaultRates),
    Partition { mount: usize, mode: RailMode },
    Rail { mount: usize, rail: usize, mode: RailMode },
}

/// Lengths of troubles of a mount with a lock: shorter and longer than the grace period and the time until locks are idle.
const HOLDER_LENGTHS_S: [u64; 6] = [1, 2, 4, 6, 12, 25];

/// Kinds of [`Trouble`] of all runs, restarts without a pause, stopped mounts, a slow source, and a mount with a lock, or the others, cut off.
const KINDS: usize = 10;
/// The kind of trouble of the source.
pub const SOURCE_TROUBLE: usize = 7;
/// The kind of trouble of runs with rails.
const RAIL_TROUBLE: usize = KINDS;

pub struct WriteScript<'a> {
    dice: Dice,
    cluster: &'a WriteCluster,
    shared: &'a Shared,
    plan: &'a RunPlan,
    sick: Vec<(usize, Trouble, Instant)>,
}

impl<'a> WriteScript<'a> {
    pub fn new(dice: Dice, cluster: &'a WriteCluster, shared: &'a Shared, plan: &'a RunPlan) -> WriteScript<'a> {
        WriteScript { dice, cluster, shared, plan, sick: Vec::new() }
    }
}

impl WriteScript<'_> {
    fn draw_length(&mut self) -> Duration {
        let about = LENGTHS_S[self.dice.below(LENGTHS_S.len())] * 1000;
        Duration::from_millis(about / 2 + self.dice.below(about as usize) as u64)
    }

    fn draw_mode(&mut self) -> RailMode {
        match self.dice.below(4) {
            0 => RailMode::Silent,
            1 => RailMode::Down,
            2 => RailMode::HangsConnect,
            _ => RailMode::Slow(Duration::from_millis(1 + self.dice.below(400) as u64)),
        }
    }

    fn step(&mut self) {
        self.heal(false);
        let node = self.dice.below(self.plan.nodes);
        let kind = self.plan.kinds[self.dice.below(self.plan.kinds.len())];
        let spared = self.plan.well == Some(node) || self.sick.iter().any(|(other, ..)| *other == node);
        match kind {
            0..=4 | RAIL_TROUBLE if spared => {}
            0 => {
                let power = self.plan.power && self.dice.below(2) == 0;
                self.begin(node, Trouble::Killed { power });
            }
            1 => self.begin(node, Trouble::Stopped),
            2 => {
                let mode = self.draw_mode();
                self.begin(node, Trouble::Link(mode));
            }
            3 => {
                let rates = FaultRates {
                    drop: self.dice.below(80) as u32,
                    cut: self.dice.below(80) as u32,
                    garbage: self.dice.below(30) as u32,
                    stall: self.dice.below(12) as u32,
                    twice: self.dice.below(20) as u32,
                    delay: self.dice.below(200) as u32,
                    max_delay: Duration::from_millis(1 + self.dice.below(3000) as u64),
                };
                self.begin(node, Trouble::Calls(rates));
            }
            4 => {
                let (mount, mode) = (self.dice.below(self.plan.mounts), self.draw_mode());
                self.begin(node, Trouble::Partition { mount, mode });
            }
            5 if !self.sick.iter().any(|(other, ..)| *other == node) => self.start_again(node),
            6 => {
                let (mount, length) = (self.dice.below(self.plan.mounts), self.draw_length());
                self.shared.tell(format_args!("mount {mount} is stopped for {length:?}"));
                spurline_vtime::pause_group(self.cluster.mounts[mount].thread_group(), length);
            }
            SOURCE_TROUBLE => {
                let trouble = self.cluster.source.disturb(&mut self.dice);
                self.shared.tell(format_args!("{trouble}"));
            }
            8 => self.disturb_holder(),
            9 => self.disturb_others(),
            RAIL_TROUBLE => {
                let (mount, rail) = (self.dice.below(self.plan.mounts), self.dice.below(self.plan.rails));
                let mode = self.draw_mode();
                self.begin(node, Trouble::Rail { mount, rail, mode });
            }
            _ => {}
        }
        let pause = Duration::from_millis(50 + self.dice.below(9000) as u64);
        self.pause(pause);
    }

    /// Waits. A source that limits the length of partitions has none that lasts longer.
    fn pause(&mut self, length: Duration) {
        let until = Instant::now() + length;
        if self.cluster.source.longest_partition() == Duration::MAX {
            return std::thread::sleep(length);
        }
        loop {
            let ends = self.sick.iter().filter(|(_, trouble, _)| is_partition(trouble)).map(|(.., end)| *end);
            let wake = ends.min().unwrap_or(until).min(until);
            std::thread::sleep(wake.saturating_duration_since(Instant::now()));
            if wake == until {
                return;
            }
            let over: Vec<_> =
                self.sick.extract_if(.., |(_, trouble, end)| is_partition(trouble) && *end <= wake).collect();
            over.into_iter().for_each(|(node, trouble, _)| self.end(node, trouble));
        }
    }

    /// Cuts a mount that has a lock off from some nodes, and starts some of these again or stops them: whether the mount may take its
    /// lock again is decided then.
    fn disturb_holder(&mut self) {
        let holders = self.shared.mounts_with_locks();
        if holders.is_empty() {
            return;
        }
        let mount = holders[self.dice.below(holders.len())];
        self.shared.tell(format_args!("mount {mount} has a lock"));
        for node in 0..self.plan.nodes {
            if self.dice.below(3) == 0 {
                continue;
            }
            let mode = if self.dice.below(2) == 0 { RailMode::Silent } else { RailMode::Down };
            let length = self.draw_holder_length();
            self.begin_for(node, Trouble::Partition { mount, mode }, length);
            if self.plan.well == Some(node) {
                continue;
            }
            match self.dice.below(4) {
                0 => self.start_again(node),
                1 => {
                    let length = self.draw_holder_length();
                    self.begin_for(node, Trouble::Killed { power: false }, length);
                }
                _ => {}
            }
        }
    }

    /// Cuts the other mounts off from a node while a mount has a lock, and ends the node's process when these use other nodes for long: they
    /// know of no loss then. Sometimes another node is started again at once, and has forgotten its grants.
    fn disturb_others(&mut self) {
        let holders = self.shared.mounts_with_locks();
        let node = self.dice.below(self.plan.nodes);
        if holders.is_empty() || self.plan.well == Some(node) {
            return;
        }
        let holder = holders[self.dice.below(holders.len())];
        self.shared.tell(format_args!("mount {holder} has a lock, the others lose node {node}"));
        for mount in (0..self.plan.mounts).filter(|mount| *mount != holder) {
            self.begin_for(node, Trouble::Partition { mount, mode: RailMode::Down }, Duration::from_secs(30));
        }
        let pause = Duration::from_millis(2000 + self.dice.below(10_000) as u64);
        self.pause(pause);
        let length = self.draw_holder_length();
        self.begin_for(node, Trouble::Killed { power: false }, length);
        let other = self.dice.below(2 * self.plan.nodes);
        if other < self.plan.nodes && other != node && self.plan.well != Some(other) {
            let pause = Duration::from_millis(self.dice.below(3000) as u64);
            self.pause(pause);
            self.start_again(other);
        }
    }

    fn draw_holder_length(&mut self) -> Duration {
        let about = HOLDER_LENGTHS_S[self.dice.below(HOLDER_LENGTHS_S.len())] * 1000;
        Duration::from_millis(about / 2 + self.dice.below(about as usize) as u64)
    }

    /// Another process at once: no mount has seen the node away.
    fn start_again(&mut self, node: usize) {
        let power = self.plan.power && self.dice.below(2) == 0;
        self.shared.tell(format_args!("node {node} is started again, power lost: {power}"));
        self.cluster.hosts[node].kill(power);
        self.cluster.hosts[node].start_process();
    }

    fn begin(&mut self, node: usize, trouble: Trouble) {
        let length = self.draw_length();
        self.begin_for(node, trouble, length);
    }

    fn begin_for(&mut self, node: usize, trouble: Trouble, length: Duration) {
        let length = if is_partition(&trouble) { length.min(self.cluster.source.longest_partition()) } else { length };
        self.shared.tell(format_args!("node {node}: {trouble:?} for {length:?}"));
        let host = &self.cluster.hosts[node];
        match trouble {
            Trouble::Killed { power } => host.kill(power),
            Trouble::Stopped => host.set_stopped(true),
            Trouble::Link(mode) => host.link.set_mode(mode),
            Trouble::Calls(rates) => host.plan.set_rates(rates),
            Trouble::Partition { mount, mode } => self.cluster.mounts[mount].links[node].set_mode(mode),
            Trouble::Rail { mount, rail, mode } => self.cluster.mounts[mount].rails[node][rail].set_mode(mode),
        }
        self.sick.push((node, trouble, Instant::now() + length));
    }

    fn end(&self, node: usize, trouble: Trouble) {
        self.shared.tell(format_args!("node {node}: the end of {trouble:?}"));
        let host = &self.cluster.hosts[node];
        match trouble {
            Trouble::Killed { .. } => host.start_process(),
            Trouble::Stopped => host.set_stopped(false),
            Trouble::Link(_) => host.link.set_mode(RailMode::Up),
            Trouble::Calls(_) => host.plan.set_rates(FaultRates::default()),
            Trouble::Partition { mount, .. } => self.cluster.mounts[mount].links[node].set_mode(RailMode::Up),
            Trouble::Rail { mount, rail, .. } => self.cluster.mounts[mount].rails[node][rail].set_mode(RailMode::Up),
        }
    }

    /// Ends trouble that is over by now, or all of it.
    fn heal(&mut self, everything: bool) {
        let now = Instant::now();
        let over: Vec<_> = self.sick.extract_if(.., |(_, _, until)| everything || *until <= now).collect();
        over.into_iter().for_each(|(node, trouble, _)| self.end(node, trouble));
    }
}

fn is_partition(trouble: &Trouble) -> bool {
    matches!(trouble, Trouble::Partition { .. })
}

pub fn draw_plan(dice: &mut Dice, rails: usize) -> RunPlan {
    let nodes = 1 + dice.below(3);
    let well = dice.below(nodes);
    // Few kinds at a time show more of what each does.
    let mut kinds: Vec<usize> = (0..1 + dice.below(4)).map(|_| dice.below(KINDS)).collect();
    if rails > 0 {
        kinds.push(RAIL_TROUBLE);
    }
    RunPlan {
        nodes,
        mounts: 1 + dice.below(3),
        programs: 1 + dice.below(2),
        steps: 6 + dice.below(14),
        well: Some(well).filter(|_| nodes > 1 && dice.below(3) > 0),
        power: dice.below(3) == 0,
        rails,
        latency: Duration::from_micros([0, 300, 5000][dice.below(3)]),
        kinds,
    }
}

/// One run. `shared` outlives it, with the events.
pub fn run(seed: u64, events: &Arc<Shared>) {
    let mut dice = Dice::new(seed);
    // In every second run, each mount reaches each node over one or two rails too.
    let rails = Dice::new(!seed).below(4).saturating_sub(1);
    let plan = draw_plan(&mut dice, rails);
    let source = SharedSource::new();
    let cluster = WriteCluster::start(Arc::new(source.clone()), plan.nodes, plan.mounts, plan.rails);
    let shared = &**events;
    *locked(&shared.began) = Some(Instant::now());
    shared.power.store(plan.power, Ordering::Relaxed);
    *source.latency.lock() = plan.latency;
    shared.tell(format_args!("{plan:?}"));
    let script = WriteScript::new(dice, &cluster, shared, &plan);
    let start_program = |number: usize, mount: &SimMount, dice: Dice| Program::new(number, mount, shared, dice).run();
    let kept = run_programs(seed, script, &start_program);
    wait_closed(&cluster, &source, kept.len());
    drop(kept);
    wait_closed(&cluster, &source, 0);
    check_end(&cluster, &source, shared);
    cluster.end();
}

/// Runs programs on all mounts while trouble comes and goes, and for a while after its end. Returns files that are still open.
pub fn run_programs(
    seed: u64,
    mut script: WriteScript<'_>,
    run_program: &(dyn Fn(usize, &SimMount, Dice) + Sync),
) -> Vec<Box<dyn WritableFile>> {
    let WriteScript { cluster, shared, plan, .. } = script;
    let mut kept = Vec::new();
    std::thread::scope(|scope| {
        let _stop = StopOnPanic(shared);
        for (mount, number) in cluster.mounts.iter().cycle().zip(0..plan.mounts * plan.programs) {
            let dice = Dice::new(seed ^ (number as u64 + 1) << 40);
            scope.spawn(move || {
                spurline_vtime::set_group(mount.thread_group());
                run_program(number, mount, dice);
            });
        }
        for _ in 0..plan.steps {
            if shared.is_over() {
                break;
            }
            script.step();
        }
        script.heal(true);
        cluster.heal();
        shared.tell(format_args!("all trouble has ended"));
        *locked(&shared.healed) = Some(Instant::now());
        kept = keep_sessions(cluster);
        std::thread::sleep(SETTLED_AFTER + Duration::from_secs(10));
        shared.stop.store(true, Ordering::Release);
    });
    kept
}

/// Files with locks that stay open: their mounts renew the sessions, so that no node closes what a mount has forgotten.
fn keep_sessions(cluster: &WriteCluster) -> Vec<Box<dyn WritableFile>> {
    let numbers = cluster.mounts.iter().flat_map(|mount| (0..KEPT_FILES).map(move |number| (mount, number)));
    let kept = numbers.map(|(mount, number)| {
        let file = open_file(mount, &format!("kept-{}-{number}", mount.number));
        let range = LockRange { start: 0, end: 9 };
        let lock = FileLock { family: LockFamily::Posix, owner: 1, range, kind: LockKind::Write };
        while let Err(error) = file.set_lock(&lock, &Caller::default()) {
            assert!(error.kind() == ErrorKind::Throttled, "a lock that no other program wants: {error}");
            std::thread::sleep(Duration::from_secs(1));
        }
        file
    });
    kept.collect()
}

/// No program runs any more; waits until this many files are open, with a lock each at most.
fn wait_closed(cluster: &WriteCluster, source: &SharedSource, kept: usize) {
    let until = Instant::now() + CLOSED_AFTER;
    let open_files = || cluster.hosts.iter().map(|host| host.open_files()).sum::<u64>();
    loop {
        let (files, locks) = source.in_use();
        // A stopped mount loses locks, and has its files open again without them.
        if files == kept && locks <= kept && open_files() == kept as u64 {
            return;
        }
        assert!(
            Instant::now() < until,
            "{files} files and {locks} locks of the source are still in use, and {} files on nodes: programs have {kept}; open: {:?}",
            open_files(),
            source.open_names()
        );
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// What the source has after the run.
fn check_end(cluster: &WriteCluster, source: &SharedSource, shared: &Shared) {
    let mut programs_know = 0;
    for mount in &cluster.mounts {
        shared.failovers.fetch_add(mount.stats.rdma.failovers.get(), Ordering::Relaxed);
        shared.failbacks.fetch_add(mount.stats.rdma.failbacks.get(), Ordering::Relaxed);
        mount.writes.finish_closing();
        let unsent = mount.writes.unsent_files();
        assert!(unsent.is_empty(), "mount {} has unsent bytes of closed files: {unsent:?}", mount.number);
        assert_eq!(mount.writes.kept_bytes(), 0, "mount {} keeps written bytes of closed files", mount.number);
    }
    let value_at = |file: &str, place: usize| {
        let content = source.content(file).unwrap_or_default();
        content.get(place..place + 8).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    };
    for slot in 0..RANGE_SLOTS as usize {
        let model = locked(&shared.ranges[slot]);
        model.check(value_at("ranges", 16 * slot));
        programs_know += model.acknowledged();
    }
    let whole = locked(&shared.whole);
    whole.check(value_at("whole", 0));
    programs_know += whole.acknowledged();
    let log = locked(&shared.log);
    log.check("log", &source.content("log").unwrap_or_default());
    programs_know += log.acknowledged();
    for (file, log) in &*locked(&shared.own_logs) {
        log.check(file, &source.content(file).unwrap_or_default());
        programs_know += log.acknowledged();
    }
    for (number, contest) in locked(&shared.contests).iter().enumerate() {
        contest.check(&format!("contest-{number}"));
    }
    for (number, document) in shared.documents.iter().enumerate() {
        let document = locked(document);
        let file = format!("document-{number}-{}", document.generation);
        if document.exists {
            assert!(source.content(&file).unwrap_or_default() == document.content, "{file} is not as it was closed");
        }
    }
    shared.tell(format_args!("{programs_know} acknowledged values and appends are there, once"));
}
