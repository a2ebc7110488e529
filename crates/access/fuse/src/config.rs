//! The configuration of a session, and the choice between /dev/fuse and io_uring. Reads from the system only the supported
//! features.

use crate::buffer::{AnonymousPages, BufferSource, HEAD_LEN};
use crate::dispatch::RequestRecorder;
use crate::kept_state::KeptState;
use crate::notify::NotificationRelay;
use crate::options::MountOptions;
use crate::ring;
use spurline_types::Stats;
use spurline_volume::kept_files::KeptFiles;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// How requests travel between kernel and session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FuseIo {
    /// The faster way for [`SessionConfig::workload`], if the kernel has it.
    #[default]
    Auto,
    /// Descriptors of /dev/fuse.
    Dev,
    /// FUSE over io_uring (Linux 6.14 and later); /dev/fuse with a reason where not available. If requested by name as root, the
    /// session sets `/sys/module/fuse/parameters/enable_uring`, which is host-wide.
    Uring,
}

/// The mount's main workload, as far as the caller knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WorkloadHint {
    /// Unknown.
    #[default]
    Mixed,
    /// Many small or random reads, lookups and opens.
    SmallRandom,
    /// Long sequential reads through the page cache.
    Sequential,
}

/// The transport that a session uses, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportChoice {
    /// Never [`FuseIo::Auto`].
    pub io: FuseIo,
    /// A sentence for people.
    pub reason: String,
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let io = match self.io {
            FuseIo::Uring => "FUSE over io_uring",
            _ => "/dev/fuse",
        };
        write!(f, "{io}: {}", self.reason)
    }
}

/// The state of a session that outlives this process.
#[derive(Clone)]
pub struct KeptSession {
    /// Where inodes and handles are kept.
    pub state: Arc<KeptState>,
    /// Open files of the source, of a writable mount.
    pub files: Option<Arc<dyn KeptFiles>>,
    /// Notifications go through this.
    pub relay: Option<Arc<dyn NotificationRelay>>,
    /// Processes that have served the mount before.
    pub takeovers: u64,
    /// When the process before ended.
    pub ended_at: SystemTime,
}

/// What a session that takes changes requests from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionWrites {
    /// The kernel checks POSIX access control lists, too.
    pub acls: bool,
    /// Locks of fcntl(2) and flock(2) become requests; else the kernel keeps locks among the programs of the mount.
    pub locks: bool,
}

/// The configuration of a session. `Default` is a good start; the caller sets the memory budget.
#[derive(Clone)]
pub struct SessionConfig {
    /// Mount options.
    pub options: MountOptions,
    /// Largest request in bytes: a multiple of 4096 between 8 KiB (or a page) and 1 MiB, the kernel's own limits.
    pub max_write: u32,
    /// The transport.
    pub io: FuseIo,
    /// The input of [`FuseIo::Auto`].
    pub workload: WorkloadHint,
    /// Memory limit of all slots in bytes; a slot has `max_write` and a page. This limits the threads on /dev/fuse and the
    /// entries of each CPU's io_uring queue.
    pub slot_memory: u64,
    /// Thread limit on /dev/fuse, instead of the limit from `slot_memory`.
    pub max_threads: Option<usize>,
    /// Entries of each CPU's io_uring queue, instead of the number from `slot_memory`.
    pub depth: Option<usize>,
    /// The kernel's limit of read-ahead and asynchronous requests in flight.
    pub max_background: u16,
    /// The kernel's read-ahead limit in bytes; above 128 KiB the limit requires root. Buffered sequential reads stop getting
    /// faster at two requests' worth (2 cores: 1.6 GB/s at 128 KiB, 2.1-2.6 from 2 MiB on; over io_uring 1.4 and 2.2). More only
    /// makes page faults of mapped files slower.
    pub max_readahead: u32,
    /// Request passthrough: the kernel reads and writes files itself that the file system registers.
    pub passthrough: bool,
    /// Set for a file system that takes changes.
    pub writes: Option<SessionWrites>,
    /// Whether listings have entries.
    pub readdirplus: bool,
    /// Allocates the memory of slots.
    pub buffers: Arc<dyn BufferSource>,
    /// Where requests are counted (section `fuse`).
    pub stats: Arc<Stats>,
    /// Records every request, if set.
    pub access_log: Option<Arc<dyn RequestRecorder>>,
    /// Set for a session that a successor of this process continues; requests come over a single descriptor of /dev/fuse then.
    pub kept: Option<KeptSession>,
}

impl Default for SessionConfig {
    fn default() -> Self {
        SessionConfig {
            options: MountOptions::default(),
            max_write: 1 << 20,
            io: FuseIo::Auto,
            workload: WorkloadHint::Mixed,
            slot_memory: 128 * ((1 << 20) + HEAD_LEN as u64),
            max_threads: None,
            depth: None,
            max_background: 64,
            max_readahead: 2 << 20,
            passthrough: false,
            writes: None,
            readdirplus: true,
            buffers: Arc::new(AnonymousPages),
            stats: Arc::default(),
            access_log: None,
            kept: None,
        }
    }
}

/// Enough for file systems that block on a network; 4, 8 and 16 entries were equally fast for file systems that do not.
const MAX_QUEUE_DEPTH: u64 = 16;
/// Thread minimum on /dev/fuse.
const MIN_THREADS: u64 = 2;
/// Thread limit on /dev/fuse; more threads bring no speed.
const MAX_THREADS: u64 = 256;

impl SessionConfig {
    /// Bytes of a slot.
    pub fn slot_len(&self) -> usize {
        HEAD_LEN + self.max_write as usize
    }

    /// Thread limit of a /dev/fuse session.
    pub fn dev_threads(&self) -> usize {
        let fit = self.slot_memory / self.slot_len() as u64;
        self.max_threads.unwrap_or(fit.clamp(MIN_THREADS, MAX_THREADS) as usize).max(MIN_THREADS as usize)
    }

    /// Entries of each io_uring queue: the memory left beside a /dev/fuse slot, divided by the CPUs online.
    pub(crate) fn ring_depth(&self, cpus: &ring::QueueCpus) -> usize {
        let fit = (self.slot_memory / self.slot_len() as u64).saturating_sub(cpus.offline_count() as u64 + 1);
        self.depth.unwrap_or((fit / cpus.on.len().max(1) as u64).clamp(1, MAX_QUEUE_DEPTH) as usize).max(1)
    }

    /// Chooses the transport, as far as that is possible before the kernel's INIT.
    ///
    /// The rule comes from measurements of an empty file system on 2 cores, idle and busy. With a single reader io_uring serves
    /// 1.2 to 8 times as many small reads: the entry runs on the reader's CPU, so no other CPU has to wake up. At 1 MiB and for
    /// the kernel's read-ahead both are equal. /dev/fuse takes a quarter less CPU for reads through the page cache, since data in
    /// memory goes to the kernel without a copy.
    pub(crate) fn choose_transport(&self, cpus: &ring::QueueCpus) -> TransportChoice {
        if self.kept.is_some() {
            return dev_choice("a successor can't take the entries of io_uring over (--recover)".into());
        }
        let least = (cpus.all + 1) as u64 * self.slot_len() as u64;
        let too_many = (least > self.slot_memory).then(|| {
            format!(
                "it needs {least} bytes of buffers for {} possible CPUs, more than the {} allowed for requests",
                cpus.all, self.slot_memory
            )
        });
        match self.io {
            FuseIo::Dev => dev_choice("requested".into()),
            // An explicit request is granted, with a note on the memory beyond the budget.
            FuseIo::Uring => match (ring::check_available(true), too_many) {
                (Ok(note), None) => uring_choice(format!("requested{note}")),
                (Ok(note), Some(much)) => uring_choice(format!("requested{note}, though {much}")),
                (Err(why), _) => dev_choice(format!("io_uring was requested, but {why}")),
            },
            FuseIo::Auto => {
                if self.workload == WorkloadHint::Sequential {
                    return dev_choice("it takes less CPU for sequential reads through the page cache".into());
                }
                if let Some(why) = too_many {
                    return dev_choice(format!("io_uring is not used: {why}; --fuse-io uring forces it"));
                }
                match ring::check_available(false) {
                    Ok(note) => uring_choice(format!("faster for small and random reads{note}")),
                    Err(why) => dev_choice(format!("io_uring is not offered: {why}")),
                }
            }
        }
    }
}

fn dev_choice(reason: String) -> TransportChoice {
    TransportChoice { io: FuseIo::Dev, reason }
}

fn uring_choice(reason: String) -> TransportChoice {
    TransportChoice { io: FuseIo::Uring, reason }
}
