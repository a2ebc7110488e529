//! Wires a mount together and runs it until it is unmounted or told to stop.

use crate::background::Ready;
use crate::peers::Reach;
use crate::service::{Outside, Target};
use crate::{group, jobs, parts, rails, signals};
use serde_json::{Value, json};
use spurline_cache::{Cache, CacheContext};
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{GroupMembers, GroupVolume, GroupVolumeConfig, PathMonitor, RequestPatience};
use spurline_config::{Fault, FuseIo, GroupConfig, MountConfig};
use spurline_fs::Fs;
use spurline_fuse::{MountOptions, Session, SessionConfig, Unmounter};
use spurline_jobs::{JobManager, JobTotals, NoJobRecords};
use spurline_mem::{BufferPool, MemTier};
use spurline_membership::RegistryFollower;
use spurline_observe::AdminTarget;
use spurline_observe::access::AccessLogWriter;
use spurline_observe::place::Owner;
use spurline_origin::{SharedBuckets, SourceScheme};
use spurline_rails::LocalRail;
use spurline_store::{FreshDirs, Store};
use spurline_transport::{PathPhase, PathView, PoolState};
use spurline_types::{Error, ErrorKind, FileKind, Result, Stats};
use spurline_volume::Volume;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a question about health tries to reach a node.
const HEALTH_LIMIT: Duration = Duration::from_secs(2);

/// What the mount reads from, and what is to be told of it.
struct Reads {
    volume: Arc<dyn Volume>,
    pool: Arc<BufferPool>,
    tier: Arc<MemTier>,
    store: Option<Arc<Store>>,
    remote: Option<Arc<GroupVolume>>,
    /// What jobs work on.
    jobs: Arc<dyn spurline_jobs::JobTarget>,
    /// Follows the members of the group while the mount reads.
    follower: Option<Arc<RegistryFollower>>,
    /// Keeps the paths over rails while the mount reads.
    _keeper: Option<PathMonitor>,
    /// The cache directories that were made for it; last, because a start that fails takes them away.
    fresh: FreshDirs,
}

/// Runs the mount; returns when it has ended.
///
/// # Errors
/// When it can't start, or does not end cleanly.
pub fn run(config: MountConfig, ready: Ready) -> Result<(), Fault> {
    let started = Instant::now();
    let options = options(&config)?;
    // Words about the mountpoint come before waiting for a server that may be far away.
    let mountpoint = spurline_fuse::check(&config.mountpoint, &options).map_err(mount_fault)?;
    let stats = Arc::new(Stats::default());
    // Before anything is waited for: what was asked for has to be there, whether it will be needed or not.
    let found = config.net.rdma.as_ref().map(|rdma| rails::find(rdma, &config.budget, 0)).transpose()?;
    let reads = match &config.group {
        None => {
            let reads = alone(&config, &stats)?;
            // Only now: a source that hangs has been told.
            apart(&config, &mountpoint)?;
            reads
        }
        Some(group) => consumer(&config, group, found, &stats)?,
    };
    let fs = Arc::new(Fs::new(Arc::clone(&reads.volume), fs_config(&config), Arc::clone(&stats)));
    let access_log = config.access_log.as_deref().map(AccessLogWriter::open).transpose()?;
    let access_log = access_log.map(|log| Arc::new(AccessLog(log)));
    let session_config = session_config(&config, options, &reads, access_log.clone(), &stats);
    let handler = Arc::new(spurline_fuse::FsHandler::new(fs));
    // Before the mount is there: whoever sees it can ask about it, also while it starts.
    let chosen = Arc::new(OnceLock::new());
    // Jobs that a mount does end with it.
    let works_on = Arc::clone(&reads.jobs);
    let board = JobManager::start(Arc::new(NoJobRecords), None, Arc::new(move |_| Ok(Arc::clone(&works_on))))?;
    let stop = Arc::new(Stop::default());
    let look = look(&config, &reads, stats, started, Arc::clone(&chosen), Arc::clone(&board), Arc::clone(&stop));
    let outside = Outside::open(Owner::Mount(&mountpoint), &config.metrics, &look)?;
    // Before the mount is there, too: a signal in between would end the process and leave a dead mount.
    let on_signal = Arc::clone(&stop);
    signals::on_stop(move |count| on_signal.signal(count))?;
    let session = Session::mount(handler, &config.mountpoint, session_config).map_err(mount_fault)?;
    stop.mounted(session.unmounter());
    match session.wait_ready(Duration::from_secs(30)) {
        Err(_) if stop.asked.load(Ordering::Acquire) => {
            tracing::info!("unmounted");
            return Ok(());
        }
        ready => ready.map_err(mount_fault)?,
    }
    let fuse = chosen.get_or_init(|| session.describe().map_or_else(String::new, |chosen| chosen.to_string()));
    tracing::info!("memory: {}", config.budget);
    tracing::info!("{} is mounted on {}; {fuse}", config.source, session.mountpoint().display());
    ready.signal()?;
    reads.fresh.keep();
    let ended = session.join().map_err(mount_fault);
    if let Some(log) = access_log {
        log.0.finish();
    }
    drop(outside);
    board.stop_all();
    tracing::info!("unmounted");
    ended
}

/// What a signal to end does, from before the mount is there.
#[derive(Default)]
struct Stop {
    asked: AtomicBool,
    unmounter: OnceLock<Unmounter>,
}

impl Stop {
    fn signal(&self, count: u32) {
        self.asked.store(true, Ordering::SeqCst);
        // Each side tells and then looks: at least one of them has to see the other's word.
        fence(Ordering::SeqCst);
        match self.unmounter.get() {
            // The mount is being made: it is taken away as soon as it is there.
            None if count == 1 => {}
            None => std::process::exit(1),
            Some(unmounter) if count == 1 => Self::unmount(unmounter),
            Some(unmounter) => {
                if let Err(error) = unmounter.abort() {
                    tracing::error!(%error, "the connection could not be broken");
                    std::process::exit(1);
                }
            }
        }
    }

    /// Whether the mount is there and stays.
    fn serves(&self) -> Result<()> {
        let serves = match self.unmounter.get() {
            _ if self.asked.load(Ordering::Acquire) => Err("it is being unmounted"),
            None => Err("the mount is starting"),
            Some(unmounter) => unmounter.serves(),
        };
        serves.map_err(|why| Error::new(ErrorKind::Unavailable, why))
    }

    /// The mount is there.
    fn mounted(&self, unmounter: Unmounter) {
        let unmounter = self.unmounter.get_or_init(|| unmounter);
        fence(Ordering::SeqCst);
        if self.asked.load(Ordering::SeqCst) {
            Self::unmount(unmounter);
        }
    }

    fn unmount(unmounter: &Unmounter) {
        tracing::info!("unmounting");
        if let Err(error) = unmounter.unmount(parts::STOP_PATIENCE / 2) {
            tracing::error!("{error}");
        }
    }
}

fn mount_fault(error: spurline_fuse::MountError) -> Fault {
    let text = error.to_string();
    match error.exit_code() {
        2 => Fault::usage(text, ""),
        3 => Fault::missing(text, ""),
        _ => Fault::failed(text, ""),
    }
}

fn options(config: &MountConfig) -> Result<MountOptions, Fault> {
    let mut options = MountOptions {
        fsname: config.source.to_string(),
        // Writes come in a later version; with this flag the kernel itself answers EROFS.
        read_only: true,
        ..MountOptions::default()
    };
    for word in &config.fuse.options {
        options.apply(word).map_err(|error| Fault::usage(error.to_string(), ""))?;
    }
    options.read_only = true;
    Ok(options)
}

/// The folder and the name of the object that the source names, if it names one.
fn object_itself(config: &MountConfig, stats: &Arc<Stats>) -> Option<(String, String)> {
    let (parent, name) = config.source.as_str().trim_end_matches('/').rsplit_once('/')?;
    if parent.ends_with('/') {
        return None;
    }
    let under =
        parts::open_under(parent, &[], &config.under, metadata_ttl(config), stats, &SharedBuckets::default()).ok()?;
    let found = under.lookup(name.as_bytes(), Instant::now() + config.under.timeout).ok()?;
    (found.kind == FileKind::File).then(|| (parent.to_owned(), name.to_owned()))
}

/// A mount in its own source would read itself without end.
fn apart(config: &MountConfig, mountpoint: &Path) -> Result<(), Fault> {
    let source = spurline_origin::SourceLocation::parse(config.source.as_str())?;
    if source.scheme() != SourceScheme::Directory {
        return Ok(());
    }
    // One that is not there is told by who opens it.
    let inside = source.path().canonicalize().is_ok_and(|folder| mountpoint.starts_with(folder));
    match inside {
        false => Ok(()),
        true => Err(Fault::usage(
            format!("{} lies in the source {}: the mount would read itself", mountpoint.display(), config.source),
            "mount it on a folder outside of the source, or only a part of the source that does not hold the mountpoint",
        )),
    }
}

fn alone(config: &MountConfig, stats: &Arc<Stats>) -> Result<Reads, Fault> {
    let under = parts::open_under(
        config.source.as_str(),
        &[],
        &config.under,
        metadata_ttl(config),
        stats,
        &SharedBuckets::default(),
    )?;
    under.check(Instant::now() + config.under.timeout)?;
    tracing::info!("source {}", under.describe());
    // A bucket has no folder that could be missing: a misspelt prefix is an empty one.
    let until = Instant::now() + config.under.timeout;
    let empty = || under.list(b"", None, 1, until).is_ok_and(|page| page.entries.is_empty());
    if config.source.scheme() != "file" && empty() {
        if let Some((parent, name)) = object_itself(config, stats) {
            return Err(Fault::usage(
                format!("{} is an object, and a folder is mounted", config.source),
                format!("mount {parent}, where it is the file {name}"),
            ));
        }
        tracing::warn!("{} is empty: nothing is there under this name now; is it spelt right?", config.source);
    }
    let pool = BufferPool::new(pool_bytes(config), config.cache.block_size as usize)?;
    let (fresh, store) = parts::open_store(&config.cache, &pool, stats)?;
    parts::warn_of_caches_in(config.source.as_str(), &config.cache);
    let tier = MemTier::new(Arc::clone(&pool));
    let shared = CacheContext::new(
        Arc::clone(&tier),
        store.clone(),
        config.cache.block_size,
        config.under.max_downloads as usize,
        config.under.timeout,
        // A mount sends to nobody.
        false,
        Arc::clone(stats),
    );
    let cache = Cache::new(shared, under);
    let jobs = Arc::new(jobs::target::Own(Arc::clone(&cache)));
    Ok(Reads { volume: cache, pool, tier, store, remote: None, jobs, follower: None, _keeper: None, fresh })
}

/// What is left of the budget beside the slots of the FUSE session.
fn pool_bytes(config: &MountConfig) -> u64 {
    config.budget.total - config.budget.fuse_slots * config.budget.fuse_slot_bytes
}

fn consumer(
    config: &MountConfig,
    group: &GroupConfig,
    found: Option<Vec<LocalRail>>,
    stats: &Arc<Stats>,
) -> Result<Reads, Fault> {
    let name = format!("{}:{}", group::hostname(), config.mountpoint.display());
    let trust = parts::open_trust(&config.trust, &name)?;
    let registry = spurline_membership::open_registry(&group.registry, &group.name, &trust)?;
    let (follower, members) = group::follow(&registry, &group.name, group.hold, stats)?;
    let reach = Reach::by(&config.net, &name, config.source.as_str(), &trust, stats)?;
    let roster = GroupMembers::new(&members, move |member| reach.peer(member));
    group::keep_up(&follower, &roster);
    let remote_config = GroupVolumeConfig {
        patience: RequestPatience::new(config.net.peer_timeout),
        fetchers: (config.net.nconnect / 2).max(2),
        metadata_age: metadata_ttl(config),
        copies: CopyCounts::new(config.replicas.all, config.replicas.below.clone()),
        // Drawn, as all processes of containers may have the same number: readers are to share copies evenly.
        standpoint: ReaderLocation { zone: group.zone.clone(), seed: RandomState::new().build_hasher().finish() },
        silence: config.net.peer_silence,
        hedge_after: config.hedge_after,
    };
    let mut memory = None;
    let mut keeper = Ok(None);
    let remote = GroupVolume::connect(
        config.source.as_str(),
        Arc::clone(&roster),
        remote_config,
        Arc::clone(stats),
        |block_size| {
            // With rails the slots are part of the registered arena, so that answers land in them without a copy.
            let slots = if found.is_some() { config.budget.fuse_bytes() } else { 0 };
            let pool = BufferPool::with_annex(pool_bytes(config), block_size as usize, slots)?;
            let tier = MemTier::new(Arc::clone(&pool));
            if let (Some(rdma), Some(found)) = (&config.net.rdma, found) {
                keeper = rails::keep(config, rdma, found, &pool, &trust, &roster, stats).map(Some);
            }
            memory = Some((pool, Arc::clone(&tier)));
            Ok(tier)
        },
    )?;
    let (pool, tier) = memory.ok_or_else(|| Fault::failed("the node named no block size", ""))?;
    // What the nodes say of the source now they would say to every reader, unless it passes by itself.
    match remote.lookup(b"") {
        Err(e) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Throttled | ErrorKind::Io(_)) => {
            tracing::warn!("{}: {e}", config.source);
        }
        looked_up => drop(looked_up?),
    }
    let jobs = Arc::new(jobs::target::Group::of(Arc::clone(&remote)));
    Ok(Reads {
        volume: Arc::clone(&remote) as _,
        pool,
        tier,
        store: None,
        remote: Some(remote),
        jobs,
        follower: Some(Arc::new(follower)),
        _keeper: keeper?,
        fresh: FreshDirs::default(),
    })
}

/// How long what lies between the kernel and the under-store may hold metadata.
fn metadata_ttl(config: &MountConfig) -> Duration {
    config.fuse.times().behind
}

fn fs_config(config: &MountConfig) -> spurline_fs::Config {
    let times = config.fuse.times();
    spurline_fs::Config {
        attr_ttl: times.attr,
        entry_ttl: times.entry,
        dir_entry_ttl: times.dir_entry,
        negative_ttl: times.absent,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        max_readahead: config.budget.readahead,
        readahead_budget: config.budget.readahead.max(config.budget.total / 3),
        ..spurline_fs::Config::default()
    }
}

fn session_config(
    config: &MountConfig,
    options: MountOptions,
    reads: &Reads,
    access_log: Option<Arc<AccessLog>>,
    stats: &Arc<Stats>,
) -> SessionConfig {
    let defaults = SessionConfig::default();
    SessionConfig {
        options,
        max_write: config.fuse.max_write,
        io: match config.fuse.io {
            FuseIo::Auto => spurline_fuse::FuseIo::Auto,
            FuseIo::Uring => spurline_fuse::FuseIo::Uring,
            FuseIo::Dev => spurline_fuse::FuseIo::Dev,
        },
        slot_memory: config.budget.fuse_slots * config.budget.fuse_slot_bytes,
        buffers: match config.net.rdma {
            Some(_) => Arc::new(spurline_fuse::PoolAnnex(Arc::clone(&reads.pool))),
            None => defaults.buffers,
        },
        max_readahead: config.fuse.kernel_readahead,
        passthrough: config.fuse.passthrough && reads.store.is_some(),
        stats: Arc::clone(stats),
        access_log: access_log.map(|log| log as _),
        ..defaults
    }
}

struct AccessLog(AccessLogWriter);

impl spurline_fuse::AccessLog for AccessLog {
    fn record(&self, op: &'static str, ino: u64, offset: u64, len: u64, errno: i32, took: Duration) {
        self.0.record(op, ino, offset, len, errno, took);
    }
}

fn look(
    config: &MountConfig,
    reads: &Reads,
    stats: Arc<Stats>,
    started: Instant,
    fuse: Arc<OnceLock<String>>,
    board: Arc<JobManager>,
    stop: Arc<Stop>,
) -> Arc<dyn AdminTarget> {
    let (volume, pool, tier) = (Arc::clone(&reads.volume), Arc::clone(&reads.pool), Arc::clone(&reads.tier));
    let (store, remote, follower) = (reads.store.clone(), reads.remote.clone(), reads.follower.clone());
    let asked = remote.clone();
    let (source, mountpoint) = (config.source.to_string(), config.mountpoint.display().to_string());
    let status = move || {
        json!({
            "kind": "mount",
            "version": env!("CARGO_PKG_VERSION"),
            "source": source,
            "mountpoint": mountpoint,
            "fuse": fuse.get().map_or("starting", String::as_str),
            "disks": parts::disks(store.as_deref()),
            "peers": remote.as_deref().map(peers).unwrap_or_default(),
            "group": follower.as_deref().map(group::seen),
        })
    };
    Arc::new(Target {
        stats,
        started,
        gauges: {
            let board = Arc::clone(&board);
            Box::new(move |stats| {
                parts::gauges(&pool, &tier, stats);
                let mut totals = JobTotals::default();
                board.add_totals(&mut totals);
                totals.set_gauges(&stats.jobs);
            })
        },
        info: Box::new(move |path| volume.info(path)),
        status: Box::new(status),
        jobs: Some(board),
        health: Box::new(move || {
            stop.serves()?;
            asked.as_ref().map_or(Ok(()), |remote| remote.check_reachable(Instant::now() + HEALTH_LIMIT))
        }),
    })
}

fn peers(remote: &GroupVolume) -> Vec<Value> {
    let view = remote.members().snapshot();
    (0..view.members().len() as u32)
        .map(|index| {
            let member = &view.members()[index as usize];
            let Some(peer) = view.existing_peer(index) else {
                // In a large group a node that was not needed yet is not known.
                return json!({ "address": member.name, "state": "unknown", "connections": 0, "slow": false, "paths": [] });
            };
            let (state, connections) = peer.pool_state();
            let (word, reason) = match state {
                PoolState::Unknown => ("unknown", String::new()),
                PoolState::Up => ("up", String::new()),
                PoolState::Down { error, .. } => ("down", error.to_string()),
            };
            let (paths, why_none) = peer.paths().map(|paths| paths.path_views()).unwrap_or_default();
            let rdma = paths.iter().any(|path| path.phase == PathPhase::Up);
            let forced = peer.paths().is_some_and(|paths| paths.is_forced());
            json!({
                "address": peer.name(),
                "state": if rdma { "up" } else { word },
                "reason": reason,
                // What carries data now.
                "transport": match (rdma, forced) {
                    (true, _) => "rdma",
                    (false, true) => "none",
                    (false, false) => "tcp",
                },
                "connections": connections,
                // Others are asked before it.
                "slow": peer.pace().is_shunned(),
                "paths": paths.iter().map(path).collect::<Vec<_>>(),
                "no_paths": why_none,
            })
        })
        .collect()
}

fn path(path: &PathView) -> Value {
    json!({
        "path": path.spec.name,
        "transport": path.spec.kind.to_string(),
        "speed_mbit": path.spec.speed_mbit,
        "state": path.phase.name(),
        "for_seconds": path.for_time.as_secs(),
        "channels": path.channels,
        "in_flight": path.in_flight,
        // Null while it carries no data.
        "silent_seconds": path.silent.map(|silent| silent.as_secs()),
        "failovers": path.failovers,
        "failbacks": path.failbacks,
        "last_failure": path.reason,
        // Against what it was before it last failed; null when that is not known yet.
        "speed_check": path.speed.map(|check| json!({
            "before_bytes_per_s": check.before,
            "after_bytes_per_s": check.after,
            "slower": check.slower,
        })),
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_checked_as_a_mount_option_is_one() {
        for word in spurline_config::MOUNT_OPTIONS {
            super::MountOptions::default().apply(word).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
