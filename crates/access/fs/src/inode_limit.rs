//! The limit of the memory for inodes: while the table is over it, the kernel is requested to forget the inodes that it has
//! not used for longest. It knows neither how the kernel is reached nor what an inode is used for.

use crate::fs::{FileSystem, parent_of};
use crate::inode::Inode;
use parking_lot::{Condvar, Mutex};
use spurline_types::FileKind;
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
    /// calls of [`FileSystem::forget`]. The caller holds no lock and serves no request meanwhile.
    ///
    /// # Errors
    /// When the kernel cannot be reached.
    fn request_forgets(&self, inodes: &[ForgetCandidate]) -> io::Result<()>;
}

/// An inode that no program has open.
pub struct ForgetCandidate {
    inode: Arc<Inode>,
    /// The number of its directory, if the kernel references that.
    pub parent: Option<u64>,
}

impl ForgetCandidate {
    /// The inode number.
    pub fn ino(&self) -> u64 {
        self.inode.ino
    }

    /// File, directory or symbolic link.
    pub fn kind(&self) -> FileKind {
        self.inode.kind
    }

    /// Its name in its directory.
    pub fn name(&self) -> &[u8] {
        let path = self.inode.path();
        match parent_of(path).len() {
            0 => path,
            parent => &path[parent + 1..],
        }
    }
}

/// Wakes the limiter.
#[derive(Default)]
pub(crate) struct LimitAlarm {
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

/// Keeps the memory of a file system's inodes below [`crate::FsConfig::inode_bytes`], in a thread of its own, until it is
/// dropped.
pub struct InodeLimiter {
    file_system: Arc<FileSystem>,
    thread: Option<JoinHandle<()>>,
}

impl InodeLimiter {
    /// Starts the thread; `None` without a limit.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(file_system: &Arc<FileSystem>, kernel: Box<dyn RequestForgets>) -> io::Result<Option<Self>> {
        if file_system.config.inode_bytes == u64::MAX {
            return Ok(None);
        }
        let limited = Arc::clone(file_system);
        let thread = std::thread::Builder::new().name("inode-limit".into());
        let thread = thread.spawn(move || limited.limit_inodes(&*kernel))?;
        Ok(Some(InodeLimiter { file_system: Arc::clone(file_system), thread: Some(thread) }))
    }
}

impl Drop for InodeLimiter {
    fn drop(&mut self) {
        self.file_system.limit_alarm.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The inodes by the time since their last use, in steps of 9 %: the oldest are found without a list of all of them.
struct AgeHistogram {
    bytes: [u64; Self::STEPS],
}

impl AgeHistogram {
    const STEPS: usize = 512;

    fn step(age: Duration) -> usize {
        // Eight steps between two powers of two, from the three bits after the highest.
        let ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX).max(1);
        let log = ms.ilog2();
        let fraction = (ms << (63 - log) >> 60) & 7;
        (log as usize * 8 + fraction as usize).min(Self::STEPS - 1)
    }

    /// The newest step that is needed for `bytes`, with the bytes needed of it; `None` if there are not so many.
    fn step_reaching(&self, bytes: u64) -> Option<(usize, u64)> {
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

impl FileSystem {
    /// Requests forgets for the inodes that were not used for longest and take about `bytes` together. Returns whether
    /// these are all that no program has open.
    ///
    /// # Errors
    /// When the kernel cannot be reached.
    pub fn request_forgets(&self, kernel: &dyn RequestForgets, bytes: u64) -> io::Result<bool> {
        let now = self.now();
        let step = |inode: &Inode| AgeHistogram::step(now.saturating_sub(inode.seen_at()));
        let mut ages = AgeHistogram { bytes: [0; AgeHistogram::STEPS] };
        self.inodes.for_each(|inode| {
            if !inode.opens.lock().is_open() {
                ages.bytes[step(inode)] += inode.memory_bytes();
            }
        });
        let newest = ages.step_reaching(bytes);
        // Of the newest step only a part is needed: during a walk most inodes have one age.
        let (newest_step, mut left) = newest.unwrap_or((0, u64::MAX));
        let mut cold: Vec<Arc<Inode>> = Vec::new();
        self.inodes.for_each(|inode| {
            let age = step(inode);
            if age < newest_step || (age == newest_step && left == 0) || inode.opens.lock().is_open() {
                return;
            }
            if age == newest_step {
                left = left.saturating_sub(inode.memory_bytes());
            }
            cold.push(Arc::clone(inode));
        });
        for batch in cold.chunks(BATCH) {
            let parent = |inode: &Inode| self.inodes.directory_ino(parent_of(inode.path()));
            let batch: Vec<_> =
                batch.iter().map(|inode| ForgetCandidate { inode: Arc::clone(inode), parent: parent(inode) }).collect();
            self.stats.fuse.forgets_requested.add(batch.len() as u64);
            kernel.request_forgets(&batch)?;
        }
        Ok(newest.is_none())
    }

    /// Whether forgets do not keep up with new inodes.
    pub(crate) fn is_far_over_limit(&self) -> bool {
        let limit = self.config.inode_bytes;
        self.inodes.bytes() > limit.saturating_add(limit / 8)
    }

    fn limit_inodes(&self, kernel: &dyn RequestForgets) {
        let limit = self.config.inode_bytes;
        let target = limit - limit / 8;
        let mut reported: Option<Instant> = None;
        while self.limit_alarm.wait_raised() {
            // How many times the excess is requested: inodes in use are not forgotten, and the next are newer.
            let mut reach = 1u64;
            loop {
                let before = self.inodes.bytes();
                if before <= limit {
                    break;
                }
                let all = match self.request_forgets(kernel, (before - target).saturating_mul(reach)) {
                    Ok(all) => all,
                    // The mount ends.
                    Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
                    Err(error) => {
                        tracing::warn!("the kernel could not be requested to forget inodes: {error}");
                        true
                    }
                };
                if !self.wait_for_forgets(target) {
                    return;
                }
                let after = self.inodes.bytes();
                reach = if after < before - before / 16 { 1 } else { reach.saturating_mul(2).min(1 << 10) };
                if !all || after <= limit {
                    continue;
                }
                if reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                    reported = Some(Instant::now());
                    self.report_excess(after);
                }
                if !self.limit_alarm.pause(PAUSE) {
                    return;
                }
            }
        }
    }

    /// Waits for the forgets of a round; false when the limiter is stopped.
    fn wait_for_forgets(&self, target: u64) -> bool {
        let (began, mut bytes, mut changed) = (Instant::now(), self.inodes.bytes(), Instant::now());
        while bytes > target && began.elapsed() < ROUND && changed.elapsed() < QUIET {
            if !self.limit_alarm.pause(QUIET / 10) {
                return false;
            }
            let now = self.inodes.bytes();
            if now < bytes {
                changed = Instant::now();
            }
            bytes = now;
        }
        true
    }

    fn report_excess(&self, bytes: u64) {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        tracing::warn!(
            "the kernel keeps {} inodes of this mount, which take {} MiB of memory here; {} MiB of --buffer-size are set aside \
             for them. Programs have these files open, or work in these folders; before Linux 6.18 the kernel also keeps \
             all folders. Raise --buffer-size",
            self.inodes.len(),
            mib(bytes),
            mib(self.config.inode_bytes)
        );
    }
}
