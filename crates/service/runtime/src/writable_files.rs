//! Opens a directory for a program that makes changes without a mount, in this process or through the nodes of a group. Knows
//! neither FUSE nor mountpoints; [`FileService`] has the calls on files.

use crate::mount::readahead_budget;
use crate::volume::{OpenVolume, open_volume};
use crate::writes::{finish_writes, open_writes};
use spurline_config::{Fault, MemoryBudget, VolumeConfig};
use spurline_fs::FileService;
use spurline_fs::writable::{WritableConfig, WritableFileSystem};
use spurline_types::Stats;
use spurline_volume::Volume;
use spurline_volume::delayed::DelayedWrites;
use spurline_volume::writes::WritableVolume;
use std::sync::Arc;
use std::time::Duration;

/// How long attributes that came with the answer to a change may be used again. A lookup is always a call of the source.
const ANSWER_TTL: Duration = Duration::from_secs(1);

/// The files of a source that is changed. Field order is drop order: files are closed before the end of the services.
pub struct WritableFiles {
    files: Arc<WritableFileSystem>,
    behind: Option<Arc<dyn DelayedWrites>>,
    source: String,
    volume: OpenVolume,
}

impl WritableFiles {
    /// The files, from the root (`spurline_fs::ROOT`) on. A call is made as the caller. Callers other than this process's user
    /// need root, or nodes, or a single user for all changes (`WritesConfig::squash`).
    ///
    /// Cost: a call on a directory is the system call on the file, and allocates nothing for reads and writes. Through nodes, a
    /// call is a request to a node, but writes return as soon as the bytes are in the memory of this process, up to the budget's
    /// term of written bytes (`MemoryBudget::write_bytes`).
    pub fn service(&self) -> Arc<dyn FileService> {
        Arc::clone(&self.files) as _
    }

    /// The same source for reading by path and version, with the cache.
    pub fn open_volume(&self) -> &OpenVolume {
        &self.volume
    }

    /// Closes all files, and waits until nodes have the written bytes durably. A directory has all writes already; there, only
    /// [`FileService::fsync`] makes writes durable. Without this call, bytes that no node has yet are lost with the process.
    ///
    /// # Errors
    /// When bytes are lost, because no node or store took the bytes within the time of a request, or are not durable; the message names
    /// the files.
    pub fn finish(self) -> Result<(), Fault> {
        self.files.close_all();
        self.behind.as_ref().map_or(Ok(()), |writes| finish_writes(&**writes, &self.source))
    }
}

/// Opens the source of a configuration made by `RawVolume::check_writable`.
///
/// # Errors
/// As [`open_volume`]; exit code 3 when the source or the nodes take no changes; exit code 2 for a configuration without changes.
pub fn open_writable_files(config: &VolumeConfig, stats: &Arc<Stats>) -> Result<WritableFiles, Fault> {
    let volume = open_volume(config, stats)?;
    let remedy = "open it for reading only";
    let Some(writes) = open_writes(config, &volume, stats, false, None, remedy)? else {
        return Err(Fault::usage(
            format!("{} was configured for reading only", config.source),
            "check the configuration with RawVolume::check_writable",
        ));
    };
    let squash = config.writes.and_then(|writes| writes.squash);
    let budget = Some(&config.budget);
    let files = files_without_kernel(&volume.volume, writes.source, squash, budget, stats)?;
    Ok(WritableFiles { files, behind: writes.behind, source: config.source.to_string(), volume })
}

/// The files of a changed source, as this process's user, for callers without a kernel. They read ahead within a budget, if one is
/// given.
pub(crate) fn files_without_kernel(
    volume: &Arc<dyn Volume>,
    source: Arc<dyn WritableVolume>,
    squash: Option<(u32, u32)>,
    budget: Option<&MemoryBudget>,
    stats: &Arc<Stats>,
) -> Result<Arc<WritableFileSystem>, Fault> {
    let config = WritableConfig {
        attr_ttl: ANSWER_TTL,
        entry_ttl: ANSWER_TTL,
        dir_entry_ttl: ANSWER_TTL,
        negative_ttl: ANSWER_TTL,
        // No kernel has checked anything before: the source decides.
        kernel_checks: false,
        // The caller's own lookup counts limit the memory.
        inode_bytes: u64::MAX,
        max_readahead: budget.map_or(0, |budget| budget.readahead),
        readahead_budget: budget.map_or(0, readahead_budget),
        owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
        squash,
    };
    let files = WritableFileSystem::new(Arc::clone(volume), source, config, Arc::clone(stats));
    files.map(Arc::new).map_err(|error| Fault::failed(format!("{}: {error}", volume.source()), ""))
}
