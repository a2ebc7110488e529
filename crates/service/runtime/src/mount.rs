//! Starts a mount: a volume, the file system on top, the FUSE session and the admin services. Knows no signal and no command
//! line: a front end stops the mount by [`MountStop`].

use crate::admin::{AdminServices, ProcessTarget};
use crate::exported::{ExportedNames, KeepNames, resume_clients};
use crate::recovery::{KeeperView, MountRecovery};
use crate::volume::{OpenVolume, open_volume};
use crate::writes::{
    KernelRules, OpenWrites, UnsentBytes, describe_unsent, find_loss, find_reads, lock_word, open_writes,
    source_abilities, writes_behind,
};
use crate::{group, peer_status, setup};
use spurline_client::GroupVolume;
use spurline_config::{Fault, FuseConfig, FuseIo, MemoryBudget, MountConfig};
use spurline_fs::writable::{WritableConfig, WritableFileSystem};
use spurline_fs::{FileService, FileSystem};
use spurline_fuse::{FuseSession, MountOptions, SessionConfig, SessionUnmounter, SessionWrites, UnmountOutcome};
use spurline_jobs::{JobManager, JobTotals, NoJobRecords};
use spurline_keeper::MountLife;
use spurline_mem::{BufferPool, MemTier};
use spurline_membership::RegistryFollower;
use spurline_object_store::{SharedBuckets, SourceScheme};
use spurline_observe::access::{AccessLogWriter, InodePaths};
use spurline_observe::documents::{FUSE_STARTING, InfoDocument, MountStatus, MountWrites, ProcessRole};
use spurline_observe::locate::SocketOwner;
use spurline_store::Store;
use spurline_types::{Error, ErrorKind, FileKind, Result, Stats};
use spurline_volume::Volume;
use spurline_volume::delayed::DelayedWrites;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// How long an unmount waits for open files before the mount is detached.
pub const UNMOUNT_GRACE: Duration = Duration::from_secs(5);

/// The same for [`MountStop::abort`]: enough for an unmount that runs at the same time.
const ABORTED_MOUNT_GRACE: Duration = Duration::from_millis(100);

/// How long calls on the source may last after an abort, and the interval of looks.
const HUNG_GRACE: Duration = Duration::from_secs(3);
const HUNG_STEP: Duration = Duration::from_secs(1);

/// How long a health check tries to reach a node.
const HEALTH_LIMIT: Duration = Duration::from_secs(2);

/// Why `load` and `free` are refused where reads are not served from blocks.
const WRITABLE_MOUNT_HAS_NO_JOBS: &str = "the mount is writable (--rw), and its source is a directory of this host, which the kernel reads itself: there is nothing \
     to load or to free; name a path in a mount of the source without --rw";

/// A mount whose volume is open and whose admin services answer, but which is not mounted yet.
pub struct PreparedMount {
    config: MountConfig,
    files: MountedFiles,
    session: SessionConfig,
    parts: MountServices,
    stop: Arc<MountStop>,
    chosen: Arc<OnceLock<String>>,
    recovery: Option<MountRecovery>,
    exported: Arc<ExportedNames>,
}

/// The file system that serves the kernel's requests. Each kind has another type of session, so that calls are direct.
enum MountedFiles {
    Reads(Arc<FileSystem>),
    Changes(Arc<WritableFileSystem>),
}

impl MountedFiles {
    fn service(&self) -> Arc<dyn FileService> {
        match self {
            MountedFiles::Reads(files) => Arc::clone(files) as _,
            MountedFiles::Changes(files) => Arc::clone(files) as _,
        }
    }

    /// The present paths of inodes, for logs. Does not keep the file system alive.
    fn path_names(&self) -> InodePaths {
        let service = Arc::downgrade(&self.service());
        Box::new(move |ino| service.upgrade()?.path_of(ino))
    }

    /// How the file system keeps the names of inodes. Does not keep the file system alive.
    fn keep_names(&self) -> KeepNames {
        let service = Arc::downgrade(&self.service());
        Arc::new(move |records| {
            if let Some(service) = service.upgrade() {
                service.keep_names(records);
            }
        })
    }
}

/// The services of a mount besides the session, in the order of the end.
struct MountServices {
    admin: AdminServices,
    jobs: Option<Arc<JobManager>>,
    access_log: Option<Arc<FuseAccessLog>>,
    volume: OpenVolume,
}

/// A mount that answers. A drop unmounts.
pub struct RunningMount {
    session: FuseSession,
    parts: MountServices,
    stop: Arc<MountStop>,
}

/// Prepares and starts a mount.
///
/// # Errors
/// When the mount can't start, or was stopped meanwhile.
pub fn start_mount(config: MountConfig) -> std::result::Result<RunningMount, Fault> {
    PreparedMount::open(config, None)?
        .start()?
        .ok_or_else(|| Fault::failed("the mount was stopped while it started", ""))
}

impl PreparedMount {
    /// Opens the volume and the admin services.
    ///
    /// # Errors
    /// When the mountpoint, the volume or an address can't be used.
    pub fn open(mut config: MountConfig, life: Option<MountLife>) -> std::result::Result<Self, Fault> {
        let started = Instant::now();
        let options = mount_options(&config)?;
        let recovery = life.map(|life| MountRecovery::begin(life, &config)).transpose()?;
        let mountpoint = match recovery.as_ref().and_then(MountRecovery::mountpoint) {
            // Not served at present: whatever looks at the mountpoint waits.
            Some(mountpoint) => mountpoint.to_owned(),
            // Errors about the mountpoint come before waiting for a server that may be far away.
            None => spurline_fuse::check_mountpoint(&config.mountpoint, &options).map_err(mount_fault)?,
        };
        config.mountpoint.clone_from(&mountpoint);
        let stats = Arc::new(Stats::default());
        let volume = open_volume(&config.volume, &stats)?;
        if config.volume.group.is_none() {
            // Only now: opening the volume reports a source that hangs.
            check_outside_source(&config, &mountpoint)?;
        }
        let kept = recovery.as_ref().map(MountRecovery::kept_writes);
        let rules = kernel_rules(&config.fuse);
        let writes = open_writes(&config.volume, &volume, &stats, rules, kept, "leave --rw out")?;
        if let Some(writes) = &writes {
            check_users(&config, &options, writes)?;
        }
        let files = match &writes {
            None => {
                let fs = FileSystem::new(Arc::clone(&volume.volume), fs_config(&config, &options), Arc::clone(&stats));
                MountedFiles::Reads(Arc::new(fs))
            }
            Some(writes) => {
                let volume = Arc::clone(&volume.volume);
                let source = Arc::clone(&writes.source);
                let fs_config = writable_config(&config, &options);
                let fs = WritableFileSystem::new(volume, source, fs_config, Arc::clone(&stats));
                let fs = fs.map_err(|error| Fault::failed(format!("{}: {error}", config.volume.source), ""))?;
                MountedFiles::Changes(Arc::new(fs))
            }
        };
        let access_log = match &config.access_log {
            Some(path) => Some(Arc::new(FuseAccessLog(AccessLogWriter::open(path, files.path_names())?))),
            None => None,
        };
        let exported = Arc::new(ExportedNames::new(config.volume.source.as_str(), &mountpoint, files.keep_names()));
        exported.open_if_exported();
        let mut session = session_config(&config, options, &volume, writes.as_ref(), access_log.clone(), &stats);
        session.kept = recovery.as_ref().map(MountRecovery::kept_session);
        let keeper = recovery.as_ref().map(MountRecovery::view);
        // Admin services come before the mount, so that a mount that is visible can be queried, also during the start.
        let chosen = Arc::new(OnceLock::new());
        let jobs = if volume.has_blocks { Some(start_jobs(&volume)?) } else { None };
        let stop = Arc::new(MountStop::default());
        let behind = writes.as_ref().and_then(|writes| writes.behind.clone());
        let _ = behind.map(|behind| stop.behind.set(behind));
        let view = MountView {
            source: config.volume.source.to_string(),
            mountpoint: config.mountpoint.display().to_string(),
            volume: Arc::clone(&volume.volume),
            pool: Arc::clone(&volume.pool),
            tier: Arc::clone(&volume.tier),
            store: volume.store.clone(),
            buckets: volume.buckets.clone(),
            remote: volume.remote.clone(),
            follower: volume.follower.clone(),
            writes,
            exported: Arc::clone(&exported),
            fuse: Arc::clone(&chosen),
            jobs: jobs.clone(),
            stop: Arc::clone(&stop),
            keeper,
            stats,
        };
        let target = admin_target(view, started);
        let admin = AdminServices::open(SocketOwner::Mount(&mountpoint), &config.metrics, &target)?;
        let parts = MountServices { admin, jobs, access_log, volume };
        Ok(PreparedMount { config, files, session, parts, stop, chosen, recovery, exported })
    }

    /// Stops the mount, before and after the start. To be connected to signals before [`PreparedMount::start`]: a signal in
    /// between would end the process and leave a dead mount.
    pub fn stop(&self) -> Arc<MountStop> {
        Arc::clone(&self.stop)
    }

    /// Mounts; `None` when stopped before the first answer.
    ///
    /// # Errors
    /// When the kernel refuses the mount.
    pub fn start(self) -> std::result::Result<Option<RunningMount>, Fault> {
        let PreparedMount { config, files, session, parts, stop, chosen, mut recovery, exported } = self;
        let at = &config.mountpoint;
        let device = recovery.as_mut().map(MountRecovery::take_device).transpose()?.flatten();
        let session = match (device, files) {
            (Some(device), MountedFiles::Reads(files)) => FuseSession::resume(files, at, session, device),
            (Some(device), MountedFiles::Changes(files)) => FuseSession::resume(files, at, session, device),
            (None, MountedFiles::Reads(files)) => FuseSession::mount(files, at, session),
            (None, MountedFiles::Changes(files)) => FuseSession::mount(files, at, session),
        };
        let session = session.map_err(mount_fault)?;
        stop.set_mounted(session.unmounter());
        match session.wait_ready(Duration::from_secs(30)) {
            Err(_) if stop.asked.load(Ordering::Acquire) => {
                tracing::info!("unmounted");
                return Ok(None);
            }
            ready => ready.map_err(mount_fault)?,
        }
        if let Some(recovery) = &recovery {
            recovery.report_served(&session, &config)?;
            exported.store_inherited_names();
        }
        resume_clients(config.volume.source.as_str(), session.mountpoint());
        let fuse = chosen.get_or_init(|| session.transport().map_or_else(String::new, |chosen| chosen.to_string()));
        setup::log_memory(&config.volume.budget, config.volume.cache.size, parts.volume.store.is_some());
        tracing::info!("{} is mounted on {}; {fuse}", config.volume.source, session.mountpoint().display());
        Ok(Some(RunningMount { session, parts, stop }))
    }
}

impl RunningMount {
    /// As [`OpenVolume::keep_directories`].
    pub fn keep_directories(&mut self) {
        self.parts.volume.keep_directories();
    }

    /// Waits for the unmount, and ends the services.
    ///
    /// # Errors
    /// When the mount does not end cleanly.
    pub fn join(self) -> std::result::Result<(), Fault> {
        let RunningMount { session, parts: MountServices { admin, jobs, access_log, volume }, stop } = self;
        let at = session.mountpoint().display().to_string();
        if stop.behind.get().is_none() && !wait_or_abandon(&session) {
            tracing::error!("system calls on the source do not return: this process ends without them");
            return Err(Fault::failed(format!("{at} was unmounted by force while its source did not respond"), ""));
        }
        let joined = session.join().map_err(mount_fault);
        // Answers queries during that: an unmount shows the cause of the wait.
        if let Some(behind) = stop.behind.get() {
            behind.finish_closing();
            // By force, nothing else is waited for.
            if joined.is_ok() {
                behind.finish_durably();
            }
        }
        let behind = stop.behind.get().map(|writes| writes_behind(&**writes));
        admin.report_end(behind.as_ref());
        let lost = behind.as_ref().and_then(|behind| find_loss(&at, behind));
        let ended = if stop.aborted.load(Ordering::SeqCst) {
            Err(Fault::failed(format!("{at} was unmounted by force; its open files fail from now on"), ""))
        } else {
            joined
        };
        let ended = match (ended, lost) {
            (Err(ended), Some(lost)) => Err(Fault { what: format!("{}; {}", ended.what, lost.what), ..lost }),
            (Ok(()), Some(lost)) => Err(lost),
            (ended, None) => ended,
        };
        if let Some(log) = access_log {
            log.0.finish_log();
        }
        drop(admin);
        if let Some(jobs) = jobs {
            jobs.stop_all();
        }
        tracing::info!("unmounted");
        drop(volume);
        ended
    }
}

/// Waits for the end of the session; false after an abort with threads that stay in calls on the source. The end of the process
/// ends such calls, where the source's kernel allows that (NFS).
fn wait_or_abandon(session: &FuseSession) -> bool {
    let mut broken_for = Duration::ZERO;
    while !session.wait_ended(HUNG_STEP) {
        if session.is_broken() {
            broken_for += HUNG_STEP;
        }
        if broken_for >= HUNG_GRACE {
            return false;
        }
    }
    true
}

/// Unmounts a mount, also before the mount is there.
#[derive(Default)]
pub struct MountStop {
    /// Written bytes reach the source later.
    behind: OnceLock<Arc<dyn DelayedWrites>>,
    asked: AtomicBool,
    /// Unmounted while files were open, which keep the session alive.
    detached: AtomicBool,
    /// [`MountStop::abort`] broke the connection.
    aborted: AtomicBool,
    unmounter: OnceLock<SessionUnmounter>,
}

impl MountStop {
    /// The written bytes that are not in the source yet, in words: lost if this process ends now. `None` if there are none.
    pub fn describe_unsent(&self) -> Option<UnsentBytes> {
        describe_unsent(&writes_behind(&**self.behind.get()?))
    }

    /// Unmounts: at once, or as soon as the mount exists. Returns after the unmount, or after the detachment at the end of a
    /// grace.
    pub fn unmount(&self) {
        self.asked.store(true, Ordering::SeqCst);
        // Each side stores and then loads: at least one has to see the other's store.
        fence(Ordering::SeqCst);
        if let Some(unmounter) = self.unmounter.get() {
            self.unmount_by(unmounter);
        }
    }

    /// Ends the mount by force, within the grace of [`MountStop::unmount`] or later: detaches the mount and aborts the connection
    /// to the kernel, so that pending requests and open files fail. A mount that was unmounted cleanly meanwhile is left alone.
    ///
    /// # Errors
    /// When there is no mount yet, or the kernel refuses to abort the connection.
    pub fn abort(&self) -> Result<()> {
        self.asked.store(true, Ordering::SeqCst);
        let Some(unmounter) = self.unmounter.get() else {
            return Err(Error::new(ErrorKind::Unavailable, "the mount is being made"));
        };
        // Detached first: the process may end without being able to abort the connection.
        let outcome = unmounter.unmount(ABORTED_MOUNT_GRACE);
        let clean = matches!(outcome, Ok(UnmountOutcome::Clean)) && !self.detached.load(Ordering::SeqCst);
        // Another mount namespace may hold the mount: then the session goes on.
        if clean && unmounter.ends_within(ABORTED_MOUNT_GRACE) {
            return Ok(());
        }
        self.aborted.store(true, Ordering::SeqCst);
        unmounter.abort().map_err(|error| Error::io("the connection to the kernel can't be aborted", &error))
    }

    /// Checks that the mount exists and stays.
    fn check_serves(&self) -> Result<()> {
        let serves = match self.unmounter.get() {
            _ if self.asked.load(Ordering::Acquire) => Err("it is being unmounted"),
            None => Err("the mount is being made"),
            Some(unmounter) => unmounter.check_serving(),
        };
        serves.map_err(|why| Error::new(ErrorKind::Unavailable, why))
    }

    /// Called when the mount exists.
    fn set_mounted(&self, unmounter: SessionUnmounter) {
        let unmounter = self.unmounter.get_or_init(|| unmounter);
        fence(Ordering::SeqCst);
        if self.asked.load(Ordering::SeqCst) {
            self.unmount_by(unmounter);
        }
    }

    fn unmount_by(&self, unmounter: &SessionUnmounter) {
        tracing::info!("unmounting");
        match unmounter.unmount(UNMOUNT_GRACE) {
            Ok(UnmountOutcome::Clean) => {}
            Ok(UnmountOutcome::Detached) => self.detached.store(true, Ordering::SeqCst),
            Err(error) => tracing::error!("{error}"),
        }
    }
}

/// The jobs of a mount, which end with the mount.
fn start_jobs(volume: &OpenVolume) -> Result<Arc<JobManager>> {
    let works_on = Arc::clone(&volume.jobs);
    JobManager::start(Arc::new(NoJobRecords), None, Arc::new(move |_| Ok(Arc::clone(&works_on))))
}

fn mount_fault(error: spurline_fuse::MountError) -> Fault {
    let text = error.to_string();
    match error.exit_code() {
        2 => Fault::usage(text, ""),
        3 => Fault::missing(text, ""),
        _ => Fault::failed(text, ""),
    }
}

fn mount_options(config: &MountConfig) -> Result<MountOptions, Fault> {
    let fsname = config.volume.source.to_string();
    let noatime = config.volume.writes.is_none();
    let mut options = MountOptions { fsname, noatime, ..MountOptions::default() };
    for word in &config.fuse.options {
        options.apply_word(word).map_err(|error| Fault::usage(error.to_string(), ""))?;
    }
    // Read-only, the kernel answers writes with EROFS.
    options.read_only = config.volume.writes.is_none();
    if config.volume.writes.is_some_and(|writes| writes.squash.is_some()) {
        // The kernel would check the caller's rights, and the source checks those of the single user.
        options.default_permissions.get_or_insert(false);
    }
    Ok(options)
}

/// Checks that a mount for all users can act as each of them.
fn check_users(config: &MountConfig, options: &MountOptions, writes: &OpenWrites) -> Result<(), Fault> {
    if writes.serves_all_users || !options.allow_other {
        return Ok(());
    }
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
    Err(Fault::missing(
        format!(
            "{}: -o allow_other with --rw needs root with CAP_SETUID and CAP_SETGID, to make changes as their callers; \
             this process is user {uid}",
            config.volume.source
        ),
        format!("mount as root, leave allow_other out, or make all changes as this user: --squash {uid}:{gid}"),
    ))
}

fn kernel_rules(fuse: &FuseConfig) -> KernelRules {
    KernelRules { local_locks: fuse.local_locks, absent_behind: fuse.cache_times().behind }
}

fn writable_config(config: &MountConfig, options: &MountOptions) -> WritableConfig {
    // Nothing between kernel and source keeps attributes, so that the kernel has all of the time; absences of a bucket can be of a
    // listing.
    let fuse = &config.fuse;
    let is_bucket = config.volume.source.scheme() != "file";
    let behind = if is_bucket { fuse.cache_times().behind } else { Duration::ZERO };
    WritableConfig {
        attr_ttl: fuse.attr_ttl,
        entry_ttl: fuse.entry_ttl.min(fuse.attr_ttl),
        dir_entry_ttl: fuse.dir_entry_ttl,
        negative_ttl: fuse.attr_ttl.min(fuse.entry_ttl).min(fuse.dir_entry_ttl) - behind,
        kernel_checks: options.checks_modes(),
        inode_bytes: config.volume.budget.inode_bytes,
        max_readahead: config.volume.budget.readahead,
        readahead_budget: readahead_budget(&config.volume.budget),
        owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
        squash: config.volume.writes.and_then(|writes| writes.squash),
    }
}

/// Checks that the mountpoint lies outside the source: the mount would read itself without end.
fn check_outside_source(config: &MountConfig, mountpoint: &Path) -> Result<(), Fault> {
    let source = spurline_object_store::SourceLocation::parse(config.volume.source.as_str())?;
    if source.scheme() != SourceScheme::Directory {
        return Ok(());
    }
    // Opening the volume reports a missing folder.
    let inside = source.path().canonicalize().is_ok_and(|folder| mountpoint.starts_with(folder));
    if inside {
        Err(Fault::usage(
            format!(
                "{} lies in the source {}: the mount would read itself",
                mountpoint.display(),
                config.volume.source
            ),
            "mount it on a folder outside of the source, or only a part of the source that does not hold the mountpoint",
        ))
    } else {
        Ok(())
    }
}

/// The read-ahead limit of all readers together, in bytes.
pub(crate) fn readahead_budget(budget: &MemoryBudget) -> u64 {
    budget.readahead.max(budget.total / 3)
}

fn fs_config(config: &MountConfig, options: &MountOptions) -> spurline_fs::FsConfig {
    let fuse = &config.fuse;
    let times = config.fuse.cache_times();
    spurline_fs::FsConfig {
        attr_ttl: times.attr,
        entry_ttl: times.entry,
        dir_entry_ttl: times.dir_entry,
        negative_ttl: times.absent,
        uid: fuse.uid.unwrap_or_else(|| rustix::process::getuid().as_raw()),
        gid: fuse.gid.unwrap_or_else(|| rustix::process::getgid().as_raw()),
        file_mode: fuse.file_mode,
        dir_mode: fuse.dir_mode,
        check_modes: options.checks_modes(),
        max_readahead: config.volume.budget.readahead,
        inode_bytes: config.volume.budget.inode_bytes,
        readahead_budget: readahead_budget(&config.volume.budget),
        folder_time: (config.volume.source.scheme() != "file").then(SystemTime::now),
        ..spurline_fs::FsConfig::default()
    }
}

fn session_config(
    config: &MountConfig,
    options: MountOptions,
    reads: &OpenVolume,
    writes: Option<&OpenWrites>,
    access_log: Option<Arc<FuseAccessLog>>,
    stats: &Arc<Stats>,
) -> SessionConfig {
    let defaults = SessionConfig::default();
    // The kernel takes files from root only.
    let backing = match writes {
        None => reads.store.is_some(),
        Some(_) => rustix::process::geteuid().is_root(),
    };
    SessionConfig {
        writes: writes.map(|writes| {
            let can = writes.capabilities();
            SessionWrites { acls: can.acls && options.checks_modes(), locks: can.locks.is_beyond_mount() }
        }),
        options,
        max_write: config.fuse.max_write,
        io: match config.fuse.io {
            FuseIo::Auto => spurline_fuse::FuseIo::Auto,
            FuseIo::Uring => spurline_fuse::FuseIo::Uring,
            FuseIo::Dev => spurline_fuse::FuseIo::Dev,
        },
        slot_memory: config.volume.budget.fuse_slots * config.volume.budget.fuse_slot_bytes,
        buffers: match config.volume.net.rdma {
            Some(_) => Arc::new(spurline_fuse::PoolAnnex(Arc::clone(&reads.pool))),
            None => defaults.buffers,
        },
        max_readahead: config.fuse.kernel_readahead,
        passthrough: config.fuse.passthrough && backing,
        stats: Arc::clone(stats),
        access_log: access_log.map(|log| log as _),
        ..defaults
    }
}

struct FuseAccessLog(AccessLogWriter);

impl spurline_fuse::RequestRecorder for FuseAccessLog {
    fn record(&self, op: &'static str, ino: u64, offset: u64, len: u64, errno: i32, took: Duration) {
        self.0.record_request(op, ino, offset, len, errno, took);
    }
}

/// The parts of a mount for the answers of the admin services.
struct MountView {
    source: String,
    mountpoint: String,
    volume: Arc<dyn Volume>,
    pool: Arc<BufferPool>,
    tier: Arc<MemTier>,
    store: Option<Arc<Store>>,
    buckets: SharedBuckets,
    remote: Option<Arc<GroupVolume>>,
    follower: Option<Arc<RegistryFollower>>,
    writes: Option<OpenWrites>,
    exported: Arc<ExportedNames>,
    fuse: Arc<OnceLock<String>>,
    jobs: Option<Arc<JobManager>>,
    stop: Arc<MountStop>,
    keeper: Option<Arc<KeeperView>>,
    stats: Arc<Stats>,
}

impl MountView {
    fn status(&self) -> MountStatus {
        MountStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            state: setup::origin_state(&self.stats).to_owned(),
            source: self.source.clone(),
            mountpoint: self.mountpoint.clone(),
            fuse: self.fuse.get().map_or(FUSE_STARTING, String::as_str).to_owned(),
            writes: MountWrites {
                writable: self.writes.is_some(),
                through_nodes: self.writes.is_some() && self.remote.is_some(),
                locks: self.writes.as_ref().map(|writes| lock_word(writes.capabilities().locks).to_owned()),
                behind: self.writes.as_ref().and_then(|writes| writes.behind.as_deref()).map(writes_behind),
            },
            disks: setup::disk_status(self.store.as_deref()),
            peers: self.remote.as_deref().map(peer_status::peer_status).unwrap_or_default(),
            group: self.follower.as_deref().map(group::group_status),
            export: self.exported.status(),
            keeper: self.keeper.as_deref().map(|keeper| Box::new(keeper.status())),
            origin_errors: setup::origin_errors(&self.buckets),
        }
    }

    fn set_gauges(&self, stats: &Stats) {
        self.exported.set_counters(&stats.export);
        if let Some(keeper) = &self.keeper {
            keeper.set_gauges(&stats.recovery);
        }
        setup::set_memory_gauges(&self.pool, &self.tier, stats);
        let mut totals = JobTotals::default();
        if let Some(jobs) = &self.jobs {
            jobs.add_totals(&mut totals);
        }
        totals.set_gauges(&stats.jobs);
    }

    /// The cached blocks of a file, and the abilities of a writable source.
    fn file_info(&self, path: &[u8]) -> Result<InfoDocument> {
        let writes = self.writes.as_ref().map(|writes| source_abilities(&writes.capabilities()));
        let file = self.volume.info(path)?;
        let reads = self.writes.as_ref().filter(|_| file.kind == FileKind::File);
        let reads = reads.map(|writes| find_reads(&*writes.source, path));
        Ok(InfoDocument { file, writes, reads })
    }

    fn check_health(&self) -> Result<()> {
        self.stop.check_serves()?;
        setup::check_credentials(&self.buckets)?;
        self.remote.as_ref().map_or(Ok(()), |remote| remote.check_reachable(Instant::now() + HEALTH_LIMIT))
    }
}

fn admin_target(view: MountView, started: Instant) -> Arc<ProcessTarget> {
    let view = Arc::new(view);
    let status = Arc::clone(&view);
    let gauges = Arc::clone(&view);
    let info = Arc::clone(&view);
    let health = Arc::clone(&view);
    let keeper = view.keeper.clone();
    Arc::new(ProcessTarget {
        stats: Arc::clone(&view.stats),
        started,
        gauges: Box::new(move |stats| gauges.set_gauges(stats)),
        info: Box::new(move |path| info.file_info(path)),
        role: Box::new(move || ProcessRole::Mount(status.status())),
        jobs: view.jobs.clone().ok_or(WRITABLE_MOUNT_HAS_NO_JOBS),
        export: Some(Box::new(move || view.exported.keep_names())),
        upgrade: keeper.map(|keeper| Box::new(move |program: &Path| keeper.request_upgrade(program)) as _),
        health: Box::new(move || health.check_health()),
        metrics_address: OnceLock::new(),
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_checked_as_a_mount_option_is_one() {
        for word in spurline_config::MOUNT_OPTIONS {
            super::MountOptions::default().apply_list(word).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
