//! The nodes of a run: each a stage over a disk in memory, which processes come and go above, and the store that all of them reach.

use crate::bucket::store::{SimStore, StoreAccess, StoreFaults, hash_of};
use crate::disk::MemDisk;
use crate::model::KEYS;
use crate::network::{Network, group_of, name_of};
use crate::programs::Shared;
use parking_lot::Mutex;
use spurline_object_store::{OriginOptions, SourceLocation, SourceRequests};
use spurline_stage::{Manifest, StageParts, StageService, StageSlot, StageSpace, StagedBackend};
use spurline_types::Stats;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BUCKET_URL: &str = "s3://bucket";
/// Bytes that a node may keep.
const STAGE_SIZE: u64 = 64 << 20;

/// A process of a node.
pub struct NodeProcess {
    pub service: Arc<StageService>,
    pub backend: StagedBackend,
    pub runtime: tokio::runtime::Runtime,
    store_process: u64,
}

pub struct StageNode {
    pub domain: String,
    pub disk: Arc<MemDisk>,
    process: Mutex<Option<Arc<NodeProcess>>>,
}

pub struct StageCluster {
    pub nodes: Vec<StageNode>,
    pub network: Arc<Network>,
    pub store: SimStore,
    pub shared: Arc<Shared>,
    last_process: Mutex<u64>,
    /// Disks that were lost.
    lost_disks: AtomicU64,
    store_trouble: Mutex<StoreTrouble>,
}

/// Whether requests to the store fail, and when that has ended last.
#[derive(Default)]
struct StoreTrouble {
    is_on: bool,
    ended: Option<Instant>,
}

/// A leader does not ask a store for this long that has given no answer.
const STORE_PAUSE: Duration = Duration::from_secs(25);

impl StageCluster {
    /// A cluster whose nodes have these domains; no node runs yet.
    pub fn new(seed: u64, domains: &[usize], shared: &Arc<Shared>) -> StageCluster {
        let nodes = domains.iter().enumerate().map(|(number, domain)| StageNode {
            domain: format!("rack-{domain}"),
            disk: MemDisk::new(&name_of(number), seed ^ ((number as u64 + 1) << 20)),
            process: Mutex::new(None),
        });
        StageCluster {
            nodes: nodes.collect(),
            network: Network::new(domains.len(), seed ^ 0x5a5a, shared),
            store: SimStore::new(seed ^ 0x1234_5678, shared),
            shared: Arc::clone(shared),
            last_process: Mutex::new(0),
            lost_disks: AtomicU64::new(0),
            store_trouble: Mutex::default(),
        }
    }

    /// Has requests to the store fail from now on.
    pub fn trouble_store(&self, faults: StoreFaults) {
        self.store.set_faults(faults);
        self.store_trouble.lock().is_on = true;
    }

    /// The store works from now on.
    pub fn heal_store(&self) {
        self.store.set_faults(StoreFaults::default());
        *self.store_trouble.lock() = StoreTrouble { is_on: false, ended: Some(Instant::now()) };
    }

    /// Whether a leader may have taken a change since then without an answer of the store to the question of its condition.
    pub fn may_doubt(&self, since: Instant) -> bool {
        let trouble = self.store_trouble.lock();
        trouble.is_on || trouble.ended.is_some_and(|ended| ended + STORE_PAUSE > since)
    }

    /// The process of a node.
    pub fn process(&self, node: usize) -> Option<Arc<NodeProcess>> {
        self.nodes[node].process.lock().clone()
    }

    /// Starts a process, whose threads are those of the node.
    pub fn start(&self, node: usize) {
        let process = {
            let mut last = self.last_process.lock();
            *last += 1;
            *last
        };
        let started = std::thread::scope(|scope| {
            let starting = scope.spawn(|| {
                spurline_vtime::set_group(group_of(node));
                self.start_process(node, process)
            });
            starting.join().expect("a node starts")
        });
        *self.nodes[node].process.lock() = Some(Arc::new(started));
        self.shared.tell(format_args!("node {node} runs as process {process}"));
    }

    fn start_process(&self, node: usize, process: u64) -> NodeProcess {
        let StageNode { domain, disk, .. } = &self.nodes[node];
        let store_process = self.store.start_process();
        let options = OriginOptions { net_threads: 1, ..OriginOptions::default() };
        let stats = Arc::<Stats>::default();
        let access = || StoreAccess { store: self.store.clone(), process: store_process };
        let location = SourceLocation::parse(BUCKET_URL).expect("a URL");
        let held = options.shared_buckets.open_over(&location, &options, Arc::clone(&stats), Box::new(access()));
        let held = held.expect("threads");
        let link = self.network.start_process(node, process);
        let of_requests = Arc::clone(&stats);
        let service = StageService::start(StageParts {
            name: name_of(node),
            space: Some(StageSpace { domain: domain.clone(), size: STAGE_SIZE, disk: disk.open(process) }),
            peers: Arc::clone(&link) as _,
            record: link,
            // Threads that outlive the process for a while reach no other store.
            open_store: Box::new(move |bucket| {
                let _store = &held;
                SourceRequests::open(bucket, &options, Arc::clone(&of_requests))
            }),
            stats: Arc::clone(&stats),
            uploads: 2,
            upload_memory: 64 << 20,
        });
        let service = service.expect("a stage starts");
        self.network.set_service(node, &service);
        let slot = Arc::new(StageSlot::default());
        slot.set(Arc::clone(&service));
        let backend = StagedBackend::new(Box::new(access()), slot, BUCKET_URL, Arc::new(|_: &str| None));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build();
        NodeProcess { service, backend, runtime: runtime.expect("threads"), store_process }
    }

    /// Kills the process of a node. Nothing of the process reaches anything later.
    pub fn kill(&self, node: usize, is_off: bool) {
        let Some(process) = self.nodes[node].process.lock().take() else { return };
        self.shared.tell(format_args!("node {node} is killed"));
        drop(self.network.end_process(node, is_off));
        self.nodes[node].disk.end_process();
        self.store.end_process(process.store_process);
        process.service.stop();
    }

    /// The number of objects that wait for their upload, as each node counts them.
    pub fn kept_objects(&self) -> Vec<usize> {
        let nodes = 0..self.nodes.len();
        nodes.map(|node| self.process(node).map_or(0, |process| process.service.kept_objects())).collect()
    }

    /// An empty disk takes the place of a node's.
    pub fn lose_disk(&self, node: usize) {
        self.lost_disks.fetch_add(1, Ordering::Relaxed);
        self.nodes[node].disk.replace();
    }

    pub fn lost_disks(&self) -> u64 {
        self.lost_disks.load(Ordering::Relaxed)
    }

    /// The failure domains whose disks have a record of an object with this mark.
    pub fn domains_with(&self, mark: &str) -> BTreeSet<&str> {
        let having = self.nodes.iter().filter(|node| node.disk.has_mark(mark));
        having.map(|node| node.domain.as_str()).collect()
    }

    /// The newest waiting object of each key that fewer than two failure domains have whole, by key and record.
    pub fn single_copies(&self) -> BTreeSet<(String, String)> {
        let mut newest: BTreeMap<String, Manifest> = BTreeMap::new();
        let mut domains: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        let mut ended: BTreeSet<String> = BTreeSet::new();
        for node in &self.nodes {
            for (manifest, is_whole) in node.disk.records() {
                if is_whole {
                    domains.entry(manifest.record.clone()).or_default().insert(&node.domain);
                }
                if format!("{:?}", manifest.phase) != "Waiting" {
                    ended.insert(manifest.record.clone());
                }
                let known = newest.entry(manifest.at.key.clone()).or_insert_with(|| manifest.clone());
                if manifest.place() > known.place() {
                    *known = manifest;
                }
            }
        }
        let waiting = newest.into_iter().filter(|(_, manifest)| !ended.contains(&manifest.record));
        let single = waiting.filter(|(_, manifest)| domains.get(&manifest.record).is_none_or(|known| known.len() < 2));
        single.map(|(key, manifest)| (key, manifest.record)).collect()
    }

    /// The contents that the store has had of a key, also as conflicts.
    pub fn shown_contents(&self, key: usize) -> HashSet<u64> {
        let name = KEYS[key];
        let conflicts = self.store.keys().into_iter().filter(|other| other.starts_with(&format!("{name}.conflict-")));
        let names = conflicts.chain([name.to_owned()]);
        let versions = names.flat_map(|name| self.store.versions(&name)).flatten();
        versions.map(|version| hash_of(&version.bytes)).collect()
    }

    /// Ends all processes.
    pub fn end(&self) {
        for node in 0..self.nodes.len() {
            self.kill(node, false);
        }
    }
}

impl Drop for StageCluster {
    fn drop(&mut self) {
        self.end();
    }
}
