//! A written bucket on virtual time: the real bucket layer in each node, over a store in memory whose requests fail as a seed draws.
//!
//! Each version of an object is one that a program has published, or a stranger has written, whole. What a close, a sync or the
//! release of a lock has acknowledged is there. Nothing replaces the change of a stranger, an exclusive creation has one winner,
//! no update under a lock is lost, and no publication fails for a conflict that does not exist.

mod models;
mod programs;
mod script;
mod store;

use super::hosts::{MountWrites, SimSource, SourceOfProcess, WRITE_MEMORY_BYTES};
use super::seeds::{SeededTest, run_in_process, seed_of_process};
use super::{run_here, run_seeds};
use crate::world::Dice;
use spurline_client::GroupVolume;
use spurline_origin::{
    BucketWriteOptions, HeldBucket, OriginOptions, OriginStore, PublishedBytes, PublishingOrigin, SourceLocation,
    SourceRequests, WritableBucket,
};
use spurline_proto::LOCK_TIMES;
use spurline_types::{Result, Stats};
use spurline_volume::Volume;
use spurline_volume::delayed::DelayedWrites as _;
use spurline_volume::writes::WritableVolume;
use std::sync::Arc;
use std::time::Duration;
use store::{SimStore, StoreAccess, StoreFaults};

const BUCKET_URL: &str = "s3://bucket";
/// Space for changed bytes of a node.
const STAGING_BYTES: u64 = 256 << 20;

/// The writer of each mount sends its own requests, through the nodes.
const STORE_TEST: SeededTest = SeededTest {
    name: "writes::bucket::a_bucket_written_by_mounts_has_what_was_published_through_all_trouble",
    filter: "a_bucket_written_by_mounts",
    seeds: 12,
};

const BUCKET_TEST: SeededTest = SeededTest {
    name: "writes::bucket::a_bucket_has_what_was_published_through_all_trouble",
    filter: "a_bucket_has",
    seeds: 30,
};

/// A bucket that nodes serve.
struct BucketSource {
    store: SimStore,
    writer: BucketWriter,
}

/// Where the files of a bucket are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BucketWriter {
    /// In a node, which keeps the open files.
    Node,
    /// In the mount, whose requests nodes send to the store.
    Mount,
}

impl SimSource for BucketSource {
    fn url(&self) -> &'static str {
        BUCKET_URL
    }

    fn start_process(&self, _host: usize) -> Arc<dyn SourceOfProcess> {
        let process = self.store.start_process();
        let options = OriginOptions { net_threads: 1, ..OriginOptions::default() };
        let stats = Arc::<Stats>::default();
        let access = StoreAccess { store: self.store.clone(), process };
        let location = SourceLocation::parse(BUCKET_URL).expect("a BUCKET_URL");
        let held = options.shared_buckets.open_over(&location, &options, Arc::clone(&stats), Box::new(access));
        let held = held.expect("threads");
        Arc::new(BucketOfProcess {
            store: self.store.clone(),
            process,
            options,
            published: Arc::default(),
            stats,
            _held: held,
        })
    }

    fn disturb(&self, dice: &mut Dice) -> String {
        let faults = if dice.below(4) == 0 { StoreFaults::default() } else { StoreFaults::draw(dice) };
        self.store.set_faults(faults);
        format!("the store has {faults:?}")
    }

    fn heal(&self) {
        self.store.set_faults(StoreFaults::default());
    }

    fn open_mount(&self, volume: &Arc<GroupVolume>) -> Result<Arc<dyn MountWrites>> {
        if self.writer == BucketWriter::Node {
            return Ok(volume.open_writes(None, WRITE_MEMORY_BYTES)?);
        }
        let origin = OriginOptions { net_threads: 1, ..OriginOptions::default() };
        let stats = Arc::<Stats>::default();
        let store = Box::new(volume.open_store(origin.timeout)?);
        let location = SourceLocation::parse(BUCKET_URL)?;
        let _held = origin.shared_buckets.open_over(&location, &origin, Arc::clone(&stats), store)?;
        let reads = Arc::clone(volume) as _;
        let mut options = write_options();
        options.fills_cache = false;
        Ok(WritableBucket::open(BUCKET_URL, &origin, options, reads, Arc::default(), stats)?)
    }

    /// After the grace period, a node that can't be asked keeps no locks.
    fn longest_partition(&self) -> Duration {
        match self.writer {
            BucketWriter::Node => LOCK_TIMES.grace - LOCK_TIMES.lock_renewal,
            BucketWriter::Mount => Duration::MAX,
        }
    }
}

impl MountWrites for WritableBucket {
    fn kept_bytes(&self) -> u64 {
        self.unsent_files().iter().map(|(_, bytes)| bytes).sum()
    }
}

fn write_options() -> BucketWriteOptions {
    let mut options = BucketWriteOptions::new(0, 0);
    options.staging_max = STAGING_BYTES;
    options
}

/// The bucket as a process of a node has it.
struct BucketOfProcess {
    store: SimStore,
    process: u64,
    options: OriginOptions,
    published: Arc<PublishedBytes>,
    stats: Arc<Stats>,
    _held: HeldBucket,
}

impl SourceOfProcess for BucketOfProcess {
    fn open_reads(&self) -> Result<Arc<dyn OriginStore>> {
        let origin = spurline_origin::open(BUCKET_URL, &self.options, Arc::clone(&self.stats))?;
        Ok(Arc::new(PublishingOrigin::new(origin, Arc::clone(&self.published))))
    }

    fn open_writes(&self, reads: &Arc<dyn Volume>) -> Result<Arc<dyn WritableVolume>> {
        let published = Arc::clone(&self.published);
        // A node whose store fails at its start ends at once.
        self.store.set_starting(self.process, true);
        let opened = WritableBucket::open(
            BUCKET_URL,
            &self.options,
            write_options(),
            Arc::clone(reads),
            published,
            Arc::clone(&self.stats),
        );
        self.store.set_starting(self.process, false);
        Ok(opened?)
    }

    fn open_requests(&self) -> Result<SourceRequests> {
        SourceRequests::open(BUCKET_URL, &self.options, Arc::clone(&self.stats))
    }

    fn end(&self, _power: bool) {
        self.store.end_process(self.process);
    }
}

/// Thirty seeds. `SPURLINE_TEST_SEEDS=n` runs the first n, `SPURLINE_TEST_SEEDS=n..m` others, `SPURLINE_TEST_SEED=n` one with all its calls.
#[test]
fn a_bucket_has_what_was_published_through_all_trouble() {
    if let Some(seed) = seed_of_process() {
        return run_here(seed, script::run);
    }
    run_seeds(BUCKET_TEST);
}

/// The same seeds and faults, while the writer of a bucket is in the mount.
#[test]
fn a_bucket_written_by_mounts_has_what_was_published_through_all_trouble() {
    if let Some(seed) = seed_of_process() {
        return run_here(seed, script::run_over_store);
    }
    run_seeds(STORE_TEST);
}

#[test]
fn a_seed_of_a_bucket_runs_the_same_way_again() {
    if !spurline_vtime::can_fix_addresses() {
        println!("SKIP: this system does not let a program choose that its addresses are not random");
        return;
    }
    for (test, seed) in [(BUCKET_TEST, 9551), (BUCKET_TEST, 9556), (STORE_TEST, 9551)] {
        let first = run_in_process(test, seed, false);
        assert_eq!(run_in_process(test, seed, false), first, "seed {seed} of {}", test.name);
    }
}
