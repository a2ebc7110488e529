//! The limit of the memory for inodes: while a table is over it, the kernel is requested to forget the inodes that it has
//! not used for longest. It knows neither how the kernel is reached nor what an inode is used for.

use parking_lot::{Condvar, Mutex};
use spurline_types::Stats;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Inodes per request to the kernel.
const BATCH: usize = 512;
/// Longest wait for the forgets of one round.
const ROUND: Duration = Duration::from_millis(500);
/// A round ends early when no forget arrives for this long: the rest is in use.
const QUIET: Duration = Duration::from_millis(50);
/// The pause after a round in which the kernel kept nearly all inodes.
const PAUSE: Duration = Duration::from_secs(5);
/// Shortest time between two log lines about the limit.
const REPORT_EVERY: Duration = Duration::from_secs(600);

/// Makes the kernel forget inodes.
pub trait RequestForgets: Send + Sync {
    /// Requests that the kernel forgets these inodes. It keeps those in use; the forgets of the others arrive later, as
    /// calls of `forget`. The caller holds no lock and serves no request meanwhile.
    ///
    /// # Errors
    /// When the kernel cannot be reached.
    fn request_forgets(&self, inodes: &[ForgetCandidate]) -> io::Result<()>;
}

/// An inode that no program has open.
pub struct ForgetCandidate {
    /// The inode number.
    pub ino: u64,
    /// Whether it is a directory.
    pub directory: bool,
    /// The number of its directory, if the kernel references that.
    pub parent: Option<u64>,
    /// Its name in its directory.
    pub name: Arc<[u8]>,
}

/// A file system whose inodes have a limit of memory.
pub trait LimitedInodes: Send + Sync {
    /// Raised while the table is over its limit.
    fn limit_alarm(&self) -> &LimitAlarm;

    /// The limit, in bytes; `u64::MAX` for none.
    fn inode_limit(&self) -> u64;

    /// The memory of all inodes but the root, in bytes.
    fn inode_memory(&self) -> u64;

    /// The number of inodes.
    fn inode_count(&self) -> usize;

    /// Requests forgets for the inodes that were not used for longest and take about `bytes` together. Returns whether
    /// these are all that no program has open.
    ///
    /// # Errors
    /// When the kernel cannot be reached.
    fn request_forgets(&self, kernel: &dyn RequestForgets, bytes: u64) -> io::Result<bool>;

    /// Whether forgets do not keep up with new inodes.
    fn is_far_over_limit(&self) -> bool {
        let limit = self.inode_limit();
        self.inode_memory() > limit.saturating_add(limit / 8)
    }
}

/// Requests forgets for `candidates` in batches.
pub(crate) fn send_forgets(
    kernel: &dyn RequestForgets,
    stats: &Stats,
    mut candidates: impl Iterator<Item = ForgetCandidate>,
) -> io::Result<()> {
    loop {
        let batch: Vec<_> = candidates.by_ref().take(BATCH).collect();
        if batch.is_empty() {
            return Ok(());
        }
        stats.fuse.forgets_requested.add(batch.len() as u64);
        kernel.request_forgets(&batch)?;
    }
}

/// Wakes the limiter.
#[derive(Default)]
pub struct LimitAlarm {
    raised: AtomicBool,
    stopped: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl LimitAlarm {
    /// Reports that the table is over its limit.
    pub(crate) fn raise(&self) {
        if !self.raised.load(Ordering::Relaxed) && !self.raised.swap(true, Ordering::AcqRel) {
            self.notify();
        }
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.notify();
    }

    fn notify(&self) {
        let _lock = self.lock.lock();
        self.changed.notify_all();
    }

    /// Waits until the alarm is raised, and clears it; false when the limiter is stopped.
    fn wait_raised(&self) -> bool {
        let mut lock = self.lock.lock();
        while !self.raised.load(Ordering::Acquire) && !self.stopped.load(Ordering::Acquire) {
            self.changed.wait(&mut lock);
        }
        self.raised.store(false, Ordering::Release);
        !self.stopped.load(Ordering::Acquire)
    }

    /// Waits for `time`; false when the limiter is stopped meanwhile.
    fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut lock = self.lock.lock();
        while !self.stopped.load(Ordering::Acquire) {
            if self.changed.wait_until(&mut lock, until).timed_out() {
                return true;
            }
        }
        false
    }
}

/// Keeps the memory of a file system's inodes below their limit, in a thread of its own, until it is dropped.
pub struct InodeLimiter {
    file_system: Arc<dyn LimitedInodes>,
    thread: Option<JoinHandle<()>>,
}

impl InodeLimiter {
    /// Starts the thread; `None` without a limit.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(file_system: Arc<dyn LimitedInodes>, kernel: Box<dyn RequestForgets>) -> io::Result<Option<Self>> {
        if file_system.inode_limit() == u64::MAX {
            return Ok(None);
        }
        let limited = Arc::clone(&file_system);
        let thread = std::thread::Builder::new().name("inode-limit".into());
        let thread = thread.spawn(move || limit_inodes(&*limited, &*kernel))?;
        Ok(Some(InodeLimiter { file_system, thread: Some(thread) }))
    }
}

impl Drop for InodeLimiter {
    fn drop(&mut self) {
        self.file_system.limit_alarm().stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The inodes by the time since their last use, in steps of 9 %: the oldest are found without a list of all of them.
pub(crate) struct AgeHistogram {
    bytes: [u64; Self::STEPS],
}

impl AgeHistogram {
    const STEPS: usize = 512;

    pub fn new() -> AgeHistogram {
        AgeHistogram { bytes: [0; Self::STEPS] }
    }

    /// Adds the memory of an inode whose age is in this step.
    pub fn add_memory(&mut self, step: usize, bytes: u64) {
        self.bytes[step] += bytes;
    }

    pub fn step(age: Duration) -> usize {
        // Eight steps between two powers of two, from the three bits after the highest.
        let ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX).max(1);
        let log = ms.ilog2();
        let fraction = (ms << (63 - log) >> 60) & 7;
        (log as usize * 8 + fraction as usize).min(Self::STEPS - 1)
    }

    /// The newest step that is needed for `bytes`, with the bytes needed of it; `None` if there are not so many.
    pub fn step_reaching(&self, bytes: u64) -> Option<(usize, u64)> {
        let mut left = bytes;
        for step in (0..Self::STEPS).rev() {
            if self.bytes[step] >= left {
                return Some((step, left));
            }
            left -= self.bytes[step];
        }
        None
    }
}

fn limit_inodes(inodes: &dyn LimitedInodes, kernel: &dyn RequestForgets) {
    let limit = inodes.inode_limit();
    let target = limit - limit / 8;
    let mut reported: Option<Instant> = None;
    while inodes.limit_alarm().wait_raised() {
        // How many times the excess is requested: inodes in use are not forgotten, and the next are newer.
        let mut reach = 1u64;
        loop {
            let before = inodes.inode_memory();
            if before <= limit {
                break;
            }
            let all = match inodes.request_forgets(kernel, (before - target).saturating_mul(reach)) {
                Ok(all) => all,
                // The mount ends.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
                Err(error) => {
                    tracing::warn!("the kernel could not be requested to forget inodes: {error}");
                    true
                }
            };
            if !wait_for_forgets(inodes, target) {
                return;
            }
            let after = inodes.inode_memory();
            reach = if after < before - before / 16 { 1 } else { reach.saturating_mul(2).min(1 << 10) };
            if !all || after <= limit {
                continue;
            }
            if reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                reported = Some(Instant::now());
                report_excess(inodes, after);
            }
            if !inodes.limit_alarm().pause(PAUSE) {
                return;
            }
        }
    }
}

/// Waits for the forgets of a round; false when the limiter is stopped.
fn wait_for_forgets(inodes: &dyn LimitedInodes, target: u64) -> bool {
    let began = Instant::now();
    let mut bytes = inodes.inode_memory();
    let mut changed = Instant::now();
    while bytes > target && began.elapsed() < ROUND && changed.elapsed() < QUIET {
        if !inodes.limit_alarm().pause(QUIET / 10) {
            return false;
        }
        let now = inodes.inode_memory();
        if now < bytes {
            changed = Instant::now();
        }
        bytes = now;
    }
    true
}

fn report_excess(inodes: &dyn LimitedInodes, bytes: u64) {
    tracing::warn!(
        "the kernel keeps {} inodes of this mount, which take {} MiB of memory here; {} MiB of --buffer-size are set aside \
             for them. Programs have these files open, or work in these folders; before Linux 6.18 the kernel also keeps \
             all folders. Raise --buffer-size",
        inodes.inode_count(),
        mib(bytes),
        mib(inodes.inode_limit())
    );
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
