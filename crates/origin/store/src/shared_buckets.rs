//! State shared by all origins of a process that were opened with clones of one [`SharedBuckets`]: connections,
//! threads and permits of each bucket, and one count of held names. It knows no prefix and no name.

use crate::backend::ObjectBackend;
use crate::config::OriginOptions;
use crate::folder_times::FolderTimes;
use crate::listed_etags::ListedEtags;
use crate::refusals::RefusalWatch;
use crate::source::{SourceLocation, SourceScheme};
use crate::transfer_runtimes::{IDLE, TransferRuntimes};
use parking_lot::Mutex;
use spurline_exec::ThreadCpus;
use spurline_types::{Error, Result, Stats};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

/// While there are too many names, all holders drop expired ones at most this often.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Shared by all origins opened with clones of it; [`SharedBuckets::default`] starts a new set.
#[derive(Clone, Default)]
pub struct SharedBuckets(Arc<BucketRegistry>);

/// A bucket that stays open.
pub struct HeldBucket(#[expect(dead_code, reason = "its life counts")] Arc<SharedBucket>);

#[derive(Default)]
struct BucketRegistry {
    buckets: Mutex<HashMap<(SourceScheme, String), Weak<SharedBucket>>>,
    names: AtomicUsize,
    holders: Mutex<NameHolders>,
}

/// Drops expired names of a holder that is not in use, and reports the number left; false when the holder is gone.
type ForgetNames = dyn Fn(&SharedBuckets) -> bool + Send;

#[derive(Default)]
struct NameHolders {
    all: Vec<Box<ForgetNames>>,
    last_sweep: Option<Instant>,
}

impl fmt::Debug for SharedBuckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InCommon(…)")
    }
}

impl SharedBuckets {
    /// The bucket of `source`: the open one, or the result of `make`.
    pub(crate) fn get_or_open(
        &self,
        source: &SourceLocation,
        make: impl FnOnce() -> Result<Arc<SharedBucket>>,
    ) -> Result<Arc<SharedBucket>> {
        let mut buckets = self.0.buckets.lock();
        let key = (source.scheme(), source.bucket().to_owned());
        if let Some(open) = buckets.get(&key).and_then(Weak::upgrade) {
            return Ok(open);
        }
        buckets.retain(|_, bucket| bucket.strong_count() > 0);
        let made = make()?;
        buckets.insert(key, Arc::downgrade(&made));
        Ok(made)
    }

    /// The open buckets whose store refuses all requests of this process, each with the error.
    pub fn refusals(&self) -> BTreeMap<String, Error> {
        let mut refused = BTreeMap::new();
        for ((scheme, name), bucket) in self.0.buckets.lock().iter() {
            if let Some(error) = bucket.upgrade().and_then(|bucket| bucket.refusals.refusal()) {
                refused.insert(format!("{}{name}", scheme.url_start()), error);
            }
        }
        refused
    }

    /// Has all origins of the bucket of `source` use this store, as long as the result lives.
    ///
    /// # Errors
    /// `Unavailable` when the threads of the bucket can't be started.
    pub fn open_over(
        &self,
        source: &SourceLocation,
        config: &OriginOptions,
        stats: Arc<Stats>,
        store: Box<dyn ObjectBackend>,
    ) -> Result<HeldBucket> {
        self.get_or_open(source, || SharedBucket::new(config, stats, store)).map(HeldBucket)
    }

    /// A holder's count changes from `before` to `now`. Returns the sum over all holders.
    pub fn count_names(&self, before: usize, now: usize) -> usize {
        let all = &self.0.names;
        if now < before {
            all.fetch_sub(before - now, Ordering::Relaxed) - (before - now)
        } else {
            all.fetch_add(now - before, Ordering::Relaxed) + (now - before)
        }
    }

    /// Registers a holder of names.
    pub fn register_holder(&self, forget: Box<ForgetNames>) {
        self.0.holders.lock().all.push(forget);
    }

    /// Makes all holders drop expired names, including idle ones. It never blocks.
    pub fn forget_expired(&self) {
        let Some(mut holders) = self.0.holders.try_lock() else { return };
        if holders.last_sweep.is_none_or(|at| at.elapsed() >= SWEEP_INTERVAL) {
            holders.last_sweep = Some(Instant::now());
            holders.all.retain(|forget| forget(self));
        }
    }
}

/// One bucket: its backend, and how many requests it may have at once.
pub struct SharedBucket {
    /// The client of the store.
    pub backend: Box<dyn ObjectBackend>,
    /// The options of the first origin that opened the bucket.
    pub config: OriginOptions,
    /// Whether listings have the etags of heads.
    pub listed_etags: ListedEtags,
    /// The times of folders, as answers have shown them.
    pub folder_times: FolderTimes,
    /// The counters of the first origin that opened the bucket.
    pub stats: Arc<Stats>,
    /// Permits of reads; metadata requests have their own, so that no lookup waits for a slow transfer.
    pub read_permits: Semaphore,
    /// Permits of metadata requests.
    pub metadata_permits: Semaphore,
    transfer_runtimes: TransferRuntimes,
    /// Whether the store refuses all requests.
    pub(crate) refusals: RefusalWatch,
    /// Taken only by drop.
    pub(crate) runtime: Option<Runtime>,
}

impl SharedBucket {
    /// # Errors
    /// `Unavailable` when the threads for the network can't be started.
    pub(crate) fn new(config: &OriginOptions, stats: Arc<Stats>, backend: Box<dyn ObjectBackend>) -> Result<Arc<Self>> {
        let threads = match config.net_threads {
            // One thread moves a few GB/s; the other CPUs copy and compute checksums.
            0 => std::thread::available_parallelism().map_or(2, |n| n.get().clamp(1, 8)),
            n => n,
        };
        let cpus = ThreadCpus::of_current_thread();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime
            .worker_threads(threads)
            .thread_name("under-net")
            // Threads for name resolution start on demand.
            .on_thread_start(move || cpus.apply_to_current_thread())
            .enable_time();
        if backend.uses_sockets() {
            runtime.enable_io();
        }
        let runtime = runtime.build().map_err(|e| Error::io("starting the threads for the object store", &e))?;
        backend.attach_runtime(runtime.handle());
        let places = config.max_downloads.clamp(1, Semaphore::MAX_PERMITS);
        let bucket = Arc::new(SharedBucket {
            backend,
            config: config.clone(),
            listed_etags: ListedEtags::new(Arc::clone(&stats)),
            folder_times: FolderTimes::default(),
            stats,
            read_permits: Semaphore::new(places),
            metadata_permits: Semaphore::new(places),
            transfer_runtimes: TransferRuntimes::default(),
            refusals: RefusalWatch::default(),
            runtime: Some(runtime),
        });
        let swept = Arc::downgrade(&bucket);
        let sweep = async move {
            loop {
                tokio::time::sleep(IDLE / 2).await;
                let Some(bucket) = swept.upgrade() else { return };
                bucket.transfer_runtimes.drop_idle(IDLE);
            }
        };
        if let Some(runtime) = &bucket.runtime {
            runtime.spawn(sweep);
        }
        Ok(bucket)
    }

    /// The runtime of requests that several threads wait for; `None` after the end of the bucket.
    pub fn runtime(&self) -> Option<&Runtime> {
        self.runtime.as_ref()
    }

    /// Runs `work` on a transfer runtime if one is free, otherwise on the shared runtime. The transfer runtime is
    /// kept when `went` approves the result. `None` after the end of the bucket.
    pub fn run_transfer<T>(
        &self,
        work: impl AsyncFnOnce(&dyn ObjectBackend) -> T,
        went: impl FnOnce(&T) -> bool,
    ) -> Option<T> {
        let Some(runtime) = self.transfer_runtimes.take_runtime(&*self.backend) else {
            return self.runtime.as_ref().map(|runtime| runtime.block_on(work(&*self.backend)));
        };
        let answer = runtime.run_transfer(work)?;
        if went(&answer) {
            runtime.put_back();
        }
        Some(answer)
    }
}

impl Drop for SharedBucket {
    fn drop(&mut self) {
        if self.refusals.refusal().is_some() {
            self.stats.object.refused_buckets.sub(1);
        }
        // Connections have nothing to finish, and a destructor must not block, least of all on the runtime itself.
        self.transfer_runtimes.drop_idle(Duration::ZERO);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
