//! A run: nodes, programs, strangers, and trouble as a seed draws it. At most one failure domain is lost, down or cut off at a time; then the
//! group has time to copy.

use crate::bucket::store::StoreFaults;
use crate::cluster::StageCluster;
use crate::dice::Dice;
use crate::disk::DiskFaults;
use crate::model::{FoundObject, KEYS, StageModel};
use crate::network::{CallFaults, group_of};
use crate::programs::{Shared, StageProgram, StopOnPanic, locked};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The group copies what a lost disk had.
const COPY_TIME: Duration = Duration::from_secs(60);
/// Between two domains that are away.
const CALM_TIME: Duration = Duration::from_secs(25);
/// An object that has a single copy at the end of that time gets another within this.
const SETTLE_SECONDS: u32 = 20;
/// Everything is at the store at this time after all trouble.
const DRAIN_TIME: Duration = Duration::from_secs(600);
/// The ends of objects reach all holders, and the parts of calls that have ended lapse.
const END_TIME: Duration = Duration::from_secs(700);

struct StageScript<'a> {
    cluster: &'a StageCluster,
    dice: Dice,
    domains: &'a [usize],
    /// When the store is back.
    store_back: Option<Instant>,
    registry_back: Option<Instant>,
}

/// One run. `shared` outlives it.
pub fn run(seed: u64, shared: &Arc<Shared>) {
    let mut dice = Dice::new(seed);
    let began = Instant::now();
    *locked(&shared.began) = Some(began);
    let layouts: [&[usize]; 5] = [&[0, 1, 2], &[0, 1, 2, 3], &[0, 0, 1, 2], &[0, 0, 1, 1], &[0, 1, 2]];
    let domains = layouts[dice.below(layouts.len())];
    let cluster = StageCluster::new(seed, domains, shared);
    shared.tell(format_args!("domains {domains:?}"));
    (0..domains.len()).for_each(|node| cluster.start(node));
    wait_for_leader(&cluster);
    let model = StageModel::new(began);
    let has_stranger = dice.below(3) == 0;
    let is_unconditional = dice.below(2) == 0;
    let rounds = 2 + dice.below(4);
    std::thread::scope(|scope| {
        for number in 0..2 + dice.below(3) {
            let program = StageProgram {
                number,
                cluster: &cluster,
                model: &model,
                dice: Dice::new(seed ^ ((number as u64 + 1) << 40)),
                turn: 0,
                seen: BTreeMap::new(),
                is_unconditional,
            };
            scope.spawn(move || program.run());
        }
        if has_stranger {
            let stranger = Dice::new(!seed);
            let (cluster, model) = (&cluster, &model);
            scope.spawn(move || run_stranger(stranger, cluster, model));
        }
        scope.spawn(|| renew_names(&cluster));
        let _stop = StopOnPanic(shared);
        let mut script = StageScript { cluster: &cluster, dice, domains, store_back: None, registry_back: None };
        for _ in 0..rounds {
            if shared.is_over() {
                break;
            }
            script.run_round();
        }
        script.heal_all();
        script.wait(Duration::from_secs(20));
        shared.stop.store(true, Ordering::Release);
    });
    check_end(&cluster, &model);
    shared.tell(format_args!("the end, in term {}", cluster.network.term()));
    cluster.end();
}

/// Nodes renew their names as long as the run lasts.
fn renew_names(cluster: &StageCluster) {
    while !cluster.shared.is_over() {
        std::thread::sleep(Duration::from_secs(1));
        cluster.network.renew();
    }
}

fn wait_for_leader(cluster: &StageCluster) {
    let start = Instant::now();
    let is_ready = |node| cluster.process(node).is_some_and(|process| process.service.can_stage());
    while !(0..cluster.nodes.len()).all(is_ready) {
        assert!(start.elapsed() < Duration::from_secs(120), "the group has no leader");
        std::thread::sleep(Duration::from_secs(1));
        cluster.network.renew();
    }
}

/// Replaces and removes objects at the store.
fn run_stranger(mut dice: Dice, cluster: &StageCluster, model: &StageModel) {
    let mut number = 0;
    while !cluster.shared.is_over() {
        std::thread::sleep(Duration::from_millis(500 + dice.below(25_000) as u64));
        number += 1;
        // Two keys only.
        let key = 3 * dice.below(2);
        if dice.below(4) == 0 {
            model.note_stranger(key, None);
            cluster.shared.tell(format_args!("a stranger removes {}", KEYS[key]));
            cluster.store.remove_as_stranger(KEYS[key]);
            continue;
        }
        let bytes = format!("of a stranger, number {number}: {}", "s".repeat(dice.below(300))).into_bytes();
        let content = model.note_content(&bytes.clone().into());
        model.note_stranger(key, Some(content));
        cluster.shared.tell(format_args!("a stranger writes {}", KEYS[key]));
        cluster.store.put_as_stranger(KEYS[key], bytes);
    }
}

impl StageScript<'_> {
    fn tell(&self, what: std::fmt::Arguments<'_>) {
        self.cluster.shared.tell(format_args!("script: {what}"));
    }

    /// Waits, and ends what lasts a while.
    fn wait(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until && !self.cluster.shared.is_over() {
            std::thread::sleep(Duration::from_secs(1).min(until.saturating_duration_since(Instant::now())));
            if self.store_back.is_some_and(|back| Instant::now() >= back) {
                self.store_back = None;
                self.tell(format_args!("the store is well"));
                self.cluster.heal_store();
            }
            if self.registry_back.is_some_and(|back| Instant::now() >= back) {
                self.registry_back = None;
                self.tell(format_args!("the registry is back"));
                self.cluster.network.set_registry_away(false);
            }
        }
    }

    fn wait_up_to(&mut self, seconds: usize) {
        let time = Duration::from_millis(self.dice.below(seconds * 1000) as u64);
        self.wait(time);
    }

    /// Trouble of one domain, with some of the network, of the registry and of the store.
    fn run_round(&mut self) {
        self.trouble_network();
        self.trouble_store();
        self.wait_up_to(20);
        // Half of the trouble is the leader's.
        let any = self.dice.below(self.domains.len());
        let leader = self.cluster.network.leader().filter(|_| self.dice.below(2) == 0);
        let domain = self.domains[leader.unwrap_or(any)];
        let mut is_lost = false;
        for _ in 0..1 + self.dice.below(3) {
            is_lost |= self.trouble_domain(domain);
            self.wait_up_to(30);
        }
        self.wait_up_to(90);
        self.heal_domain(domain);
        self.cluster.network.heal();
        self.registry_back = None;
        self.tell(format_args!("nodes and network are well"));
        self.wait(if is_lost { COPY_TIME } else { CALM_TIME });
        self.check_copies();
    }

    /// After a while without trouble two failure domains have what the store does not have.
    fn check_copies(&mut self) {
        let mut single = self.cluster.single_copies();
        for _ in 0..SETTLE_SECONDS {
            if single.is_empty() {
                return;
            }
            self.wait(Duration::from_secs(1));
            let now = self.cluster.single_copies();
            single.retain(|copy| now.contains(copy));
        }
        let is_over = self.cluster.shared.is_over();
        assert!(single.is_empty() || is_over, "a single failure domain has {single:?}, and all is well");
    }

    fn trouble_network(&mut self) {
        let mut rate = |most: usize| if self.dice.below(2) == 0 { 0 } else { self.dice.below(most) as u32 };
        let mut faults = || CallFaults { lost: rate(80), answer_lost: rate(80), max_delay_ms: rate(1500) };
        let calls = faults();
        let registry = faults();
        self.tell(format_args!("calls have {calls:?}, the registry has {registry:?}"));
        self.cluster.network.set_faults(calls, registry);
        if self.dice.below(4) == 0 {
            let seconds = 5 + self.dice.below(200) as u64;
            self.tell(format_args!("the registry is away for {seconds} s"));
            self.cluster.network.set_registry_away(true);
            self.registry_back = Some(Instant::now() + Duration::from_secs(seconds));
        }
    }

    fn trouble_store(&mut self) {
        let (faults, seconds) = match self.dice.below(6) {
            0 | 4 => (StoreFaults { lost: 1000, ..StoreFaults::default() }, 3600),
            1 | 2 => (StoreFaults { lost: 1000, ..StoreFaults::default() }, 200),
            3 => (StoreFaults::draw(&mut self.dice), 60),
            _ => return,
        };
        let seconds = 1 + self.dice.below(seconds) as u64;
        self.tell(format_args!("the store has {faults:?} for {seconds} s"));
        self.cluster.trouble_store(faults);
        self.store_back = Some(Instant::now() + Duration::from_secs(seconds));
    }

    fn nodes_of(&self, domain: usize) -> Vec<usize> {
        (0..self.domains.len()).filter(|node| self.domains[*node] == domain).collect()
    }

    /// Trouble of one kind; whether disks are lost.
    fn trouble_domain(&mut self, domain: usize) -> bool {
        let nodes = self.nodes_of(domain);
        let node = nodes[self.dice.below(nodes.len())];
        let others: Vec<usize> = (0..self.domains.len()).filter(|other| *other != node).collect();
        let other = others[self.dice.below(others.len())];
        let kind = self.dice.below(12);
        match kind {
            0 | 1 => {
                let is_off = self.dice.below(2) == 0;
                nodes.iter().for_each(|node| self.cluster.kill(*node, is_off));
                self.wait_up_to(60);
                nodes.iter().for_each(|node| self.restart(*node));
            }
            2 => {
                self.cluster.kill(node, self.dice.below(2) == 0);
                self.wait_up_to(6);
                self.restart(node);
            }
            3 | 10 | 11 => {
                self.tell(format_args!("the disks of {nodes:?} are lost"));
                nodes.iter().for_each(|node| self.cluster.kill(*node, false));
                nodes.iter().for_each(|node| self.cluster.lose_disk(*node));
                self.wait_up_to(40);
                nodes.iter().for_each(|node| self.restart(*node));
            }
            4 => {
                let seconds = [3, 10, 40][self.dice.below(3)];
                self.tell(format_args!("node {node} stops for {seconds} s"));
                self.cluster.network.set_stopped(node, true);
                spurline_vtime::pause_group(group_of(node), Duration::from_secs(seconds));
                self.wait(Duration::from_secs(seconds));
                self.cluster.network.set_stopped(node, false);
            }
            5 => {
                self.tell(format_args!("nodes {nodes:?} are cut off"));
                let with_registry = self.dice.below(3) == 0;
                for node in &nodes {
                    self.cluster.network.set_without_registry(*node, !with_registry);
                    for other in (0..self.domains.len()).filter(|other| !nodes.contains(other)) {
                        self.cluster.network.cut(*node, other);
                        self.cluster.network.cut(other, *node);
                    }
                }
            }
            6 => {
                self.tell(format_args!("node {node} is cut off from node {other}"));
                self.cluster.network.cut(node, other);
                self.cluster.network.cut(other, node);
            }
            7 => {
                self.tell(format_args!("node {node} does not reach node {other}"));
                self.cluster.network.cut(node, other);
            }
            8 => {
                self.tell(format_args!("node {node} has no registry"));
                self.cluster.network.set_without_registry(node, true);
            }
            _ => self.trouble_disk(node),
        }
        matches!(kind, 3 | 10 | 11)
    }

    fn trouble_disk(&mut self, node: usize) {
        let disk = &self.cluster.nodes[node].disk;
        if self.dice.below(3) == 0 {
            let count = disk.flip_all();
            self.tell(format_args!("{count} parts of node {node} are damaged"));
            return;
        }
        let faults = DiskFaults {
            is_full: self.dice.below(3) == 0,
            failing: [0, 50, 1000][self.dice.below(3)],
            slow_ms: [0, 20, 3000, 8000][self.dice.below(4)],
        };
        self.tell(format_args!("the disk of node {node} has {faults:?}"));
        disk.set_faults(faults);
    }

    /// Starts a node again, whose disk works.
    fn restart(&mut self, node: usize) {
        if self.cluster.process(node).is_none() {
            self.cluster.nodes[node].disk.set_faults(DiskFaults::default());
            self.cluster.start(node);
        }
    }

    fn heal_domain(&mut self, domain: usize) {
        for node in self.nodes_of(domain) {
            let disk = &self.cluster.nodes[node].disk;
            disk.set_faults(DiskFaults::default());
            disk.unflip();
            self.restart(node);
        }
    }

    fn heal_all(&mut self) {
        self.tell(format_args!("all trouble ends"));
        (0..self.domains.len()).for_each(|domain| self.heal_domain(domain));
        self.cluster.network.heal();
        self.cluster.heal_store();
        self.store_back = None;
    }
}

/// Checks the store and the disks after the run.
fn check_end(cluster: &StageCluster, model: &StageModel) {
    let keep_names = |time: Duration| {
        let until = Instant::now() + time;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_secs(1));
            cluster.network.renew();
        }
    };
    let start = Instant::now();
    while cluster.kept_objects().iter().any(|count| *count > 0) {
        if start.elapsed() >= DRAIN_TIME {
            let kept: Vec<String> = cluster.nodes.iter().flat_map(|node| node.disk.leftovers()).collect();
            panic!("not uploaded after {DRAIN_TIME:?}: {kept:#?}");
        }
        keep_names(Duration::from_secs(1));
    }
    keep_names(END_TIME);
    let left: Vec<String> = cluster.nodes.iter().flat_map(|node| node.disk.leftovers()).collect();
    assert!(left.is_empty(), "left on disks: {left:#?}");
    let now = Instant::now();
    let names = cluster.store.keys();
    for (key, name) in KEYS.iter().enumerate() {
        let at_store = cluster.store.content(name).map(|bytes| crate::bucket::store::hash_of(&bytes));
        let found = at_store.map_or(FoundObject::Nothing, FoundObject::Content);
        // A condition of absence holds again after a removal.
        let is_late = cluster.store.is_made_late(name) && model.has_removals(key);
        if !is_late {
            model.check_read(key, &found, now, "the store");
        }
        let conflicts = names.iter().filter(|other| other.starts_with(&format!("{name}.conflict-")));
        let conflicts: Vec<u64> = conflicts
            .filter_map(|other| cluster.store.content(other))
            .map(|bytes| crate::bucket::store::hash_of(&bytes))
            .collect();
        for content in model.kept_contents(key) {
            // A stranger may have replaced or removed the object after the upload.
            let is_replaced = model.is_strange(key) && was_at_store(cluster, name, content);
            let is_kept = at_store == Some(content) || conflicts.contains(&content) || is_replaced;
            assert!(is_kept || is_late, "{name} has lost {content:016x}; there are {found:x?} and {conflicts:x?}");
        }
        check_strangers(cluster, model, name);
        if !conflicts.is_empty() {
            cluster.shared.tell(format_args!("{name} has {} conflicts", conflicts.len()));
            assert!(
                model.is_strange(key) || model.has_doubts(key),
                "{name} has conflicts, and no stranger has changed it"
            );
        }
    }
    let marked = names.iter().filter(|name| !name.contains(".conflict-"));
    cluster.shared.tell(format_args!("{} objects at the store", marked.count()));
}

fn was_at_store(cluster: &StageCluster, name: &str, content: u64) -> bool {
    let versions = cluster.store.versions(name);
    versions.iter().flatten().any(|version| crate::bucket::store::hash_of(&version.bytes) == content)
}

/// A version of a stranger is replaced only by a change that knew it, or by one without a condition.
fn check_strangers(cluster: &StageCluster, model: &StageModel, name: &str) {
    let versions = cluster.store.versions(name);
    for pair in versions.windows(2) {
        let [Some(before), Some(after)] = pair else { continue };
        if before.writer.is_none() && after.writer.is_some() {
            let mark = after.mark().unwrap_or_default();
            let content = crate::bucket::store::hash_of(&before.bytes);
            assert!(
                model.may_replace(mark, content),
                "{name}: {mark:.8} has replaced the version {content:016x} of a stranger"
            );
        }
    }
}
