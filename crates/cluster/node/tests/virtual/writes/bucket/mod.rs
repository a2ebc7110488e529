//! A written bucket on virtual time: the real writer in each mount, and nodes that send its requests to a store in memory, which fail as a
//! seed draws.
//!
//! Each version of an object is one that a program has published, or a stranger has written, whole. What a close, a sync or the
//! release of a lock has acknowledged is there. Nothing replaces the change of a stranger, an exclusive creation has one winner,
//! no update under a lock is lost, and no publication fails for a conflict that does not exist.

mod models;
mod programs;
mod script;
mod store;

use super::hosts::{MountWrites, SimSource, SourceOfProcess};
use super::seeds::{SeededTest, run_in_process, seed_of_process};
use super::{run_here, run_seeds};
use crate::world::Dice;
use spurline_client::GroupVolume;
use spurline_object_store::{HeldBucket, OriginOptions, SourceLocation, SourceRequests};
use spurline_objects::{BucketWriteOptions, PublishedBytes, PublishingOrigin, WritableBucket};
use spurline_origin::OriginStore;
use spurline_proto::LOCK_TIMES;
use spurline_types::{Result, Stats};
use spurline_volume::Volume;
use spurline_volume::delayed::DelayedWrites as _;
use spurline_volume::writes::WritableVolume;
use std::sync::Arc;
use std::time::Duration;
use store::{SimStore, StoreAccess, StoreFaults};

const BUCKET_URL: &str = "s3://bucket";
/// Space for changed bytes of a node or of a mount, in runs where it is never short.
const STAGING_BYTES: u64 = 256 << 20;
/// Space in the other runs, for the bytes of a few writes.
const SHORT_STAGING_BYTES: u64 = 72 << 10;
/// Length of the first parts of uploads there.
const SHORT_PARTS: u64 = 16 << 10;

const BUCKET_TEST: SeededTest = SeededTest {
    name: "writes::bucket::a_bucket_has_what_was_published_through_all_trouble",
    filter: "a_bucket_has",
    seeds: 30,
};

/// A bucket that nodes serve.
struct BucketSource {
    store: SimStore,
    /// Local space is short: parts of open files are moved to the store.
    short_space: bool,
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
            write_options: self.write_options(),
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
        let origin = OriginOptions { net_threads: 1, ..OriginOptions::default() };
        let stats = Arc::<Stats>::default();
        let store = Box::new(volume.open_store(origin.timeout)?);
        let location = SourceLocation::parse(BUCKET_URL)?;
        let _held = origin.shared_buckets.open_over(&location, &origin, Arc::clone(&stats), store)?;
        let reads = Arc::clone(volume) as _;
        let mut options = self.write_options();
        options.fills_cache = false;
        let bucket = WritableBucket::open(BUCKET_URL, &origin, options, reads, Arc::default(), stats)?;
        bucket.share_paths(volume.open_path_locks(None)?);
        Ok(bucket)
    }

    /// After the grace period, a node that can't be asked keeps no locks.
    fn longest_partition(&self) -> Duration {
        LOCK_TIMES.grace - LOCK_TIMES.lock_renewal
    }
}

impl MountWrites for WritableBucket {
    fn kept_bytes(&self) -> u64 {
        self.unsent_files().iter().map(|(_, bytes)| bytes).sum()
    }
}

impl BucketSource {
    fn write_options(&self) -> BucketWriteOptions {
        let mut options = BucketWriteOptions::new(0, 0);
        options.staging_max = STAGING_BYTES;
        if self.short_space {
            options.staging_max = SHORT_STAGING_BYTES;
            options.part_len = SHORT_PARTS;
        }
        options
    }
}

/// The bucket as a process of a node has it.
struct BucketOfProcess {
    store: SimStore,
    process: u64,
    options: OriginOptions,
    write_options: BucketWriteOptions,
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
            self.write_options.clone(),
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

#[test]
fn a_seed_of_a_bucket_runs_the_same_way_again() {
    if !spurline_vtime::can_fix_addresses() {
        println!("SKIP: this system does not let a program choose that its addresses are not random");
        return;
    }
    for seed in [9551, 9556] {
        let first = run_in_process(BUCKET_TEST, seed, false);
        assert_eq!(run_in_process(BUCKET_TEST, seed, false), first, "seed {seed}");
    }
}
