//! What a session is asked to be, and which of its two kinds is chosen and why. It touches the system only
//! to find out what it offers.

use crate::buffer::{AnonymousPages, BufferSource, HEAD_LEN};
use crate::dispatch::AccessLog;
use crate::options::MountOptions;
use crate::ring;
use spurline_types::Stats;
use std::fmt;
use std::sync::Arc;

/// How requests travel between kernel and session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FuseIo {
    /// Whichever is faster for [`SessionConfig::workload`] and offered by the kernel.
    #[default]
    Auto,
    /// Descriptors of /dev/fuse.
    Dev,
    /// FUSE over io_uring (Linux 6.14 and later); /dev/fuse, saying why, where it is not offered. Being asked
    /// by name and root, the session sets `/sys/module/fuse/parameters/enable_uring`, which is host-wide.
    Uring,
}

/// What the mount is mostly used for, as far as the caller knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Workload {
    /// Nothing known.
    #[default]
    Mixed,
    /// Many small or random reads, lookups and opens.
    SmallRandom,
    /// Long sequential reads through the page cache.
    Sequential,
}

/// The kind of session that runs, and why that one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Never [`FuseIo::Auto`].
    pub io: FuseIo,
    /// One sentence for a person.
    pub reason: String,
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let io = match self.io {
            FuseIo::Uring => "FUSE over io_uring",
            _ => "/dev/fuse",
        };
        write!(f, "{io}: {}", self.reason)
    }
}

/// What a session is asked to be. `Default` is a good start; the memory budget is the caller's to set.
#[derive(Clone)]
pub struct SessionConfig {
    /// Mount options.
    pub options: MountOptions,
    /// Largest request in bytes, a multiple of 4096 from 8 KiB or a page to 1 MiB (the kernel's own limits).
    pub max_write: u32,
    /// Which kind of session.
    pub io: FuseIo,
    /// What [`FuseIo::Auto`] goes by.
    pub workload: Workload,
    /// Bytes all slots together may have; a slot has `max_write` and a page. Decides how many threads
    /// /dev/fuse gets at most and how many entries each CPU's io_uring queue gets.
    pub slot_memory: u64,
    /// Most threads on /dev/fuse, instead of what `slot_memory` allows.
    pub max_threads: Option<usize>,
    /// Entries of each CPU's io_uring queue, instead of what `slot_memory` allows.
    pub depth: Option<usize>,
    /// How many read-ahead and asynchronous requests the kernel may have under way.
    pub max_background: u16,
    /// Longest read-ahead of the kernel in bytes. Above 128 KiB it takes root, who may raise it for this mount.
    /// Two requests' worth is where buffered sequential reads stop getting faster (2 cores: 1.6 GB/s at 128 KiB,
    /// 2.1-2.6 from 2 MiB on; over io_uring 1.4 and 2.2); more only makes page faults of mapped files dearer.
    pub max_readahead: u32,
    /// Ask for passthrough; see [`crate::InitInfo::backings`].
    pub passthrough: bool,
    /// Whether the handler answers readdirplus.
    pub readdirplus: bool,
    /// Where slots get their memory.
    pub buffers: Arc<dyn BufferSource>,
    /// Where requests are counted (section `fuse`).
    pub stats: Arc<Stats>,
    /// Is told of every request, when set.
    pub access_log: Option<Arc<dyn AccessLog>>,
}

impl Default for SessionConfig {
    fn default() -> Self {
        SessionConfig {
            options: MountOptions::default(),
            max_write: 1 << 20,
            io: FuseIo::Auto,
            workload: Workload::Mixed,
            slot_memory: 128 * ((1 << 20) + HEAD_LEN as u64),
            max_threads: None,
            depth: None,
            max_background: 64,
            max_readahead: 2 << 20,
            passthrough: false,
            readdirplus: true,
            buffers: Arc::new(AnonymousPages),
            stats: Arc::default(),
            access_log: None,
        }
    }
}

/// Enough for handlers that block on a network; 4, 8 and 16 entries were equally fast for those that do not.
const MAX_DEPTH: u64 = 16;
/// Fewer threads than this on /dev/fuse make no sense.
const MIN_THREADS: u64 = 2;
/// More threads than this on /dev/fuse only cost.
const MAX_THREADS: u64 = 256;

impl SessionConfig {
    /// Bytes of one slot.
    pub fn slot_len(&self) -> usize {
        HEAD_LEN + self.max_write as usize
    }

    /// Most threads a /dev/fuse session will run.
    pub fn dev_threads(&self) -> usize {
        let fit = self.slot_memory / self.slot_len() as u64;
        self.max_threads.unwrap_or(fit.clamp(MIN_THREADS, MAX_THREADS) as usize).max(MIN_THREADS as usize)
    }

    /// Entries of each io_uring queue: the memory left beside one /dev/fuse slot, shared by the CPUs that are on.
    pub(crate) fn ring_depth(&self, cpus: &ring::Cpus) -> usize {
        let fit = (self.slot_memory / self.slot_len() as u64).saturating_sub(cpus.off() as u64 + 1);
        self.depth.unwrap_or((fit / cpus.on.len().max(1) as u64).clamp(1, MAX_DEPTH) as usize).max(1)
    }

    /// Decides between the two kinds of session, as far as that is known before the kernel's INIT.
    ///
    /// The rule, from measurements of an empty file system on 2 cores, idle and busy: io_uring answers 1.2 to 8
    /// times as many small reads with one reader (its entry runs on the reader's own CPU, so no other CPU has to
    /// be woken) and is equal at 1 MiB and for the kernel's read-ahead; /dev/fuse takes a quarter less CPU for reads through
    /// the page cache, since data in memory goes to the kernel without a copy.
    pub(crate) fn choose(&self, cpus: &ring::Cpus) -> Chosen {
        let dev = |reason: String| Chosen { io: FuseIo::Dev, reason };
        let uring = |reason: String| Chosen { io: FuseIo::Uring, reason };
        let least = (cpus.all + 1) as u64 * self.slot_len() as u64;
        let too_many = (least > self.slot_memory).then(|| {
            format!(
                "it needs {least} bytes of buffers for {} possible CPUs, more than the {} there are for requests",
                cpus.all, self.slot_memory
            )
        });
        match self.io {
            FuseIo::Dev => dev("asked for".into()),
            // Who asks for it gets it, and is told what it takes beyond the budget.
            FuseIo::Uring => match (ring::available(true), too_many) {
                (Ok(note), None) => uring(format!("asked for{note}")),
                (Ok(note), Some(much)) => uring(format!("asked for{note}, though {much}")),
                (Err(why), _) => dev(format!("io_uring was asked for, but {why}")),
            },
            FuseIo::Auto => {
                if self.workload == Workload::Sequential {
                    return dev("it takes less CPU for sequential reads through the page cache".into());
                }
                if let Some(why) = too_many {
                    return dev(format!("io_uring is not taken: {why}; --fuse-io uring takes it all the same"));
                }
                match ring::available(false) {
                    Ok(note) => uring(format!("faster for small and random reads{note}")),
                    Err(why) => dev(format!("io_uring is not offered: {why}")),
                }
            }
        }
    }
}
