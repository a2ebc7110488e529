//! What all under-stores of a process have in common that are opened with clones of one [`InCommon`]: of each bucket its
//! connections, threads and places for requests, and one number of names held. It knows no prefix and no name.

use crate::backend::Backend;
use crate::lanes::{IDLE, Lanes};
use crate::{Scheme, Source, UnderConfig};
use parking_lot::Mutex;
use spurline_types::{Error, Result, Stats};
use spurline_volume::Cpus;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

/// While there are too many names, all their holders are asked for old ones no more often than this.
const ASKED: Duration = Duration::from_secs(5);

/// Shared by all that is opened with clones of it; [`InCommon::default`] shares nothing with anybody.
#[derive(Clone, Default)]
pub struct InCommon(Arc<Parts>);

#[derive(Default)]
struct Parts {
    buckets: Mutex<HashMap<(Scheme, String), Weak<Bucket>>>,
    names: AtomicUsize,
    holders: Mutex<Holders>,
}

/// Drops the names that are too old, if nobody is at them, and tells so; false when their holder is gone.
type Forget = dyn Fn(&InCommon) -> bool + Send;

#[derive(Default)]
struct Holders {
    all: Vec<Box<Forget>>,
    asked: Option<Instant>,
}

impl fmt::Debug for InCommon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InCommon(…)")
    }
}

impl InCommon {
    /// The bucket of `source`: what is open of it already, or what `make` makes.
    pub(crate) fn bucket(&self, source: &Source, make: impl FnOnce() -> Result<Arc<Bucket>>) -> Result<Arc<Bucket>> {
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

    /// A holder of names that had told `before` now has `now`; how many all have together.
    pub(crate) fn names(&self, before: usize, now: usize) -> usize {
        let all = &self.0.names;
        if now < before {
            all.fetch_sub(before - now, Ordering::Relaxed) - (before - now)
        } else {
            all.fetch_add(now - before, Ordering::Relaxed) + (now - before)
        }
    }

    /// Another holder of names.
    pub(crate) fn holds_names(&self, forget: Box<Forget>) {
        self.0.holders.lock().all.push(forget);
    }

    /// Has all holders drop what is too old, those that nobody asks for anything any more, too. Waits for none.
    pub(crate) fn forget_old(&self) {
        let Some(mut holders) = self.0.holders.try_lock() else { return };
        if holders.asked.is_none_or(|at| at.elapsed() >= ASKED) {
            holders.asked = Some(Instant::now());
            holders.all.retain(|forget| forget(self));
        }
    }
}

/// One bucket: how it is asked, and by how many at once.
pub(crate) struct Bucket {
    pub backend: Box<dyn Backend>,
    pub config: UnderConfig,
    pub stats: Arc<Stats>,
    /// Reads under way; questions have their own, so that no lookup waits for a slow transfer.
    pub reads: Semaphore,
    pub asks: Semaphore,
    pub lanes: Lanes,
    /// Taken only by drop.
    pub runtime: Option<Runtime>,
}

impl Bucket {
    /// # Errors
    /// `Unavailable` when the threads for the network can't be started.
    pub(crate) fn new(config: &UnderConfig, stats: Arc<Stats>, backend: Box<dyn Backend>) -> Result<Arc<Self>> {
        let threads = match config.net_threads {
            // One thread moves a few GB/s; a machine's other CPUs copy and checksum.
            0 => std::thread::available_parallelism().map_or(2, |n| n.get().clamp(1, 8)),
            n => n,
        };
        let cpus = Cpus::here();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("under-net")
            // Threads for the name service start when there is work for them.
            .on_thread_start(move || cpus.take())
            .enable_all()
            .build()
            .map_err(|e| Error::io("starting the threads for the object store", &e))?;
        backend.attach(runtime.handle());
        let places = config.max_downloads.clamp(1, Semaphore::MAX_PERMITS);
        let bucket = Arc::new(Bucket {
            backend,
            config: config.clone(),
            stats,
            reads: Semaphore::new(places),
            asks: Semaphore::new(places),
            lanes: Lanes::default(),
            runtime: Some(runtime),
        });
        let swept = Arc::downgrade(&bucket);
        let sweep = async move {
            loop {
                tokio::time::sleep(IDLE / 2).await;
                let Some(bucket) = swept.upgrade() else { return };
                bucket.lanes.drop_idle(IDLE);
            }
        };
        if let Some(runtime) = &bucket.runtime {
            runtime.spawn(sweep);
        }
        Ok(bucket)
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        // Connections have nothing to finish, and a destructor must not wait, least of all where it runs on the runtime itself.
        self.lanes.drop_idle(Duration::ZERO);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
