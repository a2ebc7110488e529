//! Opens and describes the changing side of a mount's volume. Knows neither FUSE nor mountpoints.

use crate::setup;
use crate::volume::OpenVolume;
use spurline_client::RemoteStore;
use spurline_config::{BucketWrites, Fault, Registry, VolumeConfig, WritesConfig};
use spurline_directory::{Squash, WritableSource};
use spurline_object_store::{OriginOptions, SourceLocation, SourceScheme};
use spurline_objects::{BucketWriteOptions, WritableBucket};
use spurline_observe::documents::{
    FileByteCount, FileReads, LOCKS_OF_GROUP, LOCKS_OF_MOUNT, LOCKS_OF_SOURCE, SourceAbilities, WritesBehind,
};
use spurline_proto::{StoreOwner, StoreSettings};
use spurline_types::open_flags::O_RDONLY;
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::delayed::DelayedWrites;
use spurline_volume::kept_client::KeptClient;
use spurline_volume::writes::{CacheVersion, Caller, NodePath, WritableVolume};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A mount with --stage waits this long for nodes that have just started.
const STAGE_PATIENCE: Duration = Duration::from_secs(15);
const STAGE_PAUSE: Duration = Duration::from_millis(500);
/// The most files that a message names.
const UNSENT_SHOWN: usize = 5;

/// The changing side of a volume, and whether that acts for every user.
pub(crate) struct OpenWrites {
    pub source: Arc<dyn WritableVolume>,
    /// The same, if written bytes reach the source later: through nodes, and in a bucket.
    pub behind: Option<Arc<dyn DelayedWrites>>,
    pub serves_all_users: bool,
    /// `--local-locks`.
    pub local_locks: bool,
}

/// The state of an earlier process, for the changes of a mount with `--recover`.
pub(crate) struct KeptWrites {
    /// The client of nodes.
    pub client: Arc<dyn KeptClient>,
    /// There was a process before.
    pub goes_on: bool,
}

impl OpenWrites {
    /// The abilities of the source for programs of this mount.
    pub fn capabilities(&self) -> WriteCapabilities {
        let mut can = self.source.capabilities();
        if self.local_locks {
            can.locks = LockScope::Mount;
        }
        can
    }
}

/// What a mount's kernel has to do with changes; none of this without a kernel.
#[derive(Default)]
pub(crate) struct KernelRules {
    /// The kernel keeps the locks.
    pub local_locks: bool,
    /// How old an absence may be when the kernel gets the answer.
    pub absent_behind: Duration,
}

/// Opens the source of `config` for changes, in this process or through the nodes of `volume`; `None` for a volume that is
/// not changed. `or_else`: the remedy beside a source that can be changed.
///
/// # Errors
/// When the source is read-only, or this process can't act for callers.
pub(crate) fn open_writes(
    config: &VolumeConfig,
    volume: &OpenVolume,
    stats: &Arc<Stats>,
    rules: KernelRules,
    kept: Option<KeptWrites>,
    or_else: &str,
) -> Result<Option<OpenWrites>, Fault> {
    let local_locks = rules.local_locks;
    let Some(writes) = config.writes else { return Ok(None) };
    let location = SourceLocation::parse(config.source.as_str())?;
    let is_bucket = location.scheme() != SourceScheme::Directory;
    if let Some(remote) = &volume.remote
        && !is_bucket
    {
        // The nodes act for every user.
        let memory = config.budget.write_bytes;
        let opened = match kept {
            Some(kept) => remote.open_kept_writes(writes.squash, memory, kept.client),
            None => remote.open_writes(writes.squash, memory),
        };
        // The node's error names the remedy.
        let source = opened.map_err(|error| unwritable(error, ""))?;
        let behind: Option<Arc<dyn DelayedWrites>> = Some(Arc::clone(&source) as _);
        return Ok(Some(OpenWrites { behind, source, serves_all_users: true, local_locks }));
    }
    if is_bucket {
        let staging_dir = config.cache.dirs.first().cloned();
        let origin = setup::origin_options(&config.under, &volume.buckets);
        let goes_on = kept.as_ref().is_some_and(|kept| kept.goes_on);
        // A process that takes a mount over has written through these nodes: the closes wait until there are enough again.
        let needs_stage = writes.stage && !goes_on;
        let patience = if needs_stage && keeps_terms(config) { STAGE_PATIENCE } else { Duration::ZERO };
        let open = || volume.remote.as_ref().map(|nodes| nodes.open_store(origin.timeout)).transpose();
        let store = open_staging_store(open, patience).map_err(|error| unwritable(error, ""))?;
        if needs_stage {
            check_stage(store.as_ref().map(RemoteStore::settings))?;
        }
        let writes = store.as_ref().map_or(writes, |store| writes_of_nodes(writes, store.settings()));
        let mut options = bucket_options(&writes, staging_dir, config.budget.total);
        setup::keep_known_names(&mut options, &config.under, config.budget.metadata_bytes);
        options.conditions_known = goes_on;
        // The nodes have the bytes that they send.
        options.fills_cache = volume.remote.is_none();
        options.listings_exclude_for = rules.absent_behind;
        let source = open_bucket_writes(config, options, &origin, store, volume, stats)?;
        if let Some(nodes) = &volume.remote {
            source.share_paths(nodes.open_path_locks(kept.map(|kept| kept.client))?);
        }
        // All files have the same owner, so no caller acts as itself.
        let behind: Option<Arc<dyn DelayedWrites>> = Some(Arc::clone(&source) as _);
        return Ok(Some(OpenWrites { source, behind, serves_all_users: true, local_locks }));
    }
    let squash = writes.squash.map(|(uid, gid)| Squash { uid, gid });
    let opened = WritableSource::open_with_times(location.path(), squash, config.access_times);
    let source = opened.map_err(|error| unwritable(error, or_else))?;
    let serves_all_users = source.serves_all_users();
    Ok(Some(OpenWrites { source, behind: None, serves_all_users, local_locks }))
}

/// Whether the registry of the mount can name a node that keeps the order of staged files.
fn keeps_terms(config: &VolumeConfig) -> bool {
    let registry = config.group.as_ref().map(|group| &group.registry);
    matches!(registry, Some(Registry::Coordinator(_) | Registry::Etcd(_)))
}

/// Opens the store of nodes, which may need a moment after their start to take staged files.
fn open_staging_store(
    open: impl Fn() -> Result<Option<RemoteStore>>,
    patience: Duration,
) -> Result<Option<RemoteStore>> {
    let start = Instant::now();
    loop {
        let store = open()?;
        let stages = store.as_ref().is_none_or(|store| store.settings().stages);
        if stages || start.elapsed() >= patience {
            return Ok(store);
        }
        std::thread::sleep(STAGE_PAUSE);
    }
}

/// Checks that nodes with these settings keep the staged files of a mount.
fn check_stage(nodes: Option<StoreSettings>) -> Result<(), Fault> {
    if nodes.is_some_and(|nodes| nodes.stages) {
        return Ok(());
    }
    Err(Fault::missing(
        "the nodes of the group keep no staged files: fewer than two failure domains have room for them",
        "start nodes with --stage-size on two machines, or with two names of --failure-domain; or leave --stage out",
    ))
}

/// How mounts change a bucket through a node with these flags.
pub(crate) fn store_settings(writes: &WritesConfig) -> StoreSettings {
    let bucket = writes.bucket;
    StoreSettings {
        last_writer_wins: bucket.last_writer_wins,
        allow_unguarded_writes: bucket.allow_unguarded_writes,
        object_attrs: bucket.object_attrs,
        rename_limit: bucket.rename_limit,
        abort_uploads_after_s: bucket.abort_uploads_after.as_secs(),
        squash: writes.squash.map(|(uid, gid)| StoreOwner { uid, gid }),
        // The node adds whether staged files are kept now.
        stages: false,
    }
}

/// How a mount changes a bucket through nodes with these settings.
fn writes_of_nodes(mount: WritesConfig, nodes: StoreSettings) -> WritesConfig {
    let bucket = BucketWrites {
        last_writer_wins: nodes.last_writer_wins,
        allow_unguarded_writes: nodes.allow_unguarded_writes,
        object_attrs: nodes.object_attrs,
        rename_limit: nodes.rename_limit,
        abort_uploads_after: Duration::from_secs(nodes.abort_uploads_after_s),
    };
    WritesConfig {
        squash: nodes.squash.map(|owner| (owner.uid, owner.gid)).or(mount.squash),
        bucket,
        stage: mount.stage,
    }
}

/// The owner of files that have no owner in the source: the user of this process.
fn owner_of_files(writes: &WritesConfig) -> (u32, u32) {
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    writes.squash.unwrap_or(own)
}

/// How this process changes a bucket; bytes that are not published lie in a file of `staging_dir`,
/// or in memory, up to `memory_bytes`.
pub(crate) fn bucket_options(
    writes: &WritesConfig,
    staging_dir: Option<PathBuf>,
    memory_bytes: u64,
) -> BucketWriteOptions {
    let (uid, gid) = owner_of_files(writes);
    let mut options = BucketWriteOptions::new(uid, gid);
    options.last_writer_wins = writes.bucket.last_writer_wins;
    options.allow_unguarded_writes = writes.bucket.allow_unguarded_writes;
    options.rename_limit = writes.bucket.rename_limit;
    options.object_attrs = writes.bucket.object_attrs;
    options.abort_uploads_after = writes.bucket.abort_uploads_after;
    options.stage = writes.stage;
    options.squashes = writes.squash.is_some();
    if staging_dir.is_none() {
        // In memory.
        options.staging_max = memory_bytes;
    }
    options.staging_dir = staging_dir;
    options
}

/// Opens a bucket for changes by this process.
fn open_bucket_writes(
    config: &VolumeConfig,
    options: BucketWriteOptions,
    origin: &OriginOptions,
    store: Option<RemoteStore>,
    volume: &OpenVolume,
    stats: &Arc<Stats>,
) -> Result<Arc<WritableBucket>, Fault> {
    let reads = Arc::clone(volume.volume());
    let published = Arc::clone(&volume.published);
    let source = config.source.as_str();
    // The writer keeps the store open from here on.
    let _held = match store {
        None => None,
        Some(store) => {
            let location = SourceLocation::parse(source)?;
            Some(origin.shared_buckets.open_over(&location, origin, Arc::clone(stats), Box::new(store))?)
        }
    };
    let opened = WritableBucket::open(source, origin, options, reads, published, Arc::clone(stats));
    opened.map_err(|error| unwritable_bucket(error, "--rw"))
}

/// The error of a bucket that can't be changed; `flag` requests changes.
pub(crate) fn unwritable_bucket(error: Error, flag: &str) -> Fault {
    match error.kind() {
        ErrorKind::Unsupported => Fault::missing(error.message(), format!("use another store, or leave {flag} out")),
        _ => unwritable(error, &format!("leave {flag} out")),
    }
}

/// The error of a source that can't be changed, which is a missing prerequisite for a read-only source.
pub(crate) fn unwritable(error: Error, or_else: &str) -> Fault {
    match error.kind() {
        ErrorKind::ReadOnly if or_else.is_empty() => Fault::missing(error.message(), ""),
        ErrorKind::ReadOnly => Fault::missing(
            error.message(),
            format!("mount that file system for writing (mount -o remount,rw), or {or_else}"),
        ),
        _ => error.into(),
    }
}

/// Opens a node's directory for changes.
///
/// # Errors
/// When the source is read-only, or this process can't act for callers.
pub(crate) fn open_node_directory(source: &str, writes: &WritesConfig) -> Result<Arc<WritableSource>> {
    let location = SourceLocation::parse(source)?;
    let opened = WritableSource::open_for_node(location.path(), writes.squash.map(|(uid, gid)| Squash { uid, gid }))?;
    if writes.squash.is_none() && !opened.serves_all_users() {
        let uid = rustix::process::getuid().as_raw();
        let gid = rustix::process::getgid().as_raw();
        let why = format!(
            "--writable needs root with CAP_SETUID and CAP_SETGID, to make changes as their callers, and this process is \
             user {uid}: start the node as root, or make all changes as this user: --squash {uid}:{gid}"
        );
        return Err(Error::new(ErrorKind::PermissionDenied, why));
    }
    Ok(opened)
}

/// Written bytes that are not in the source yet and lost bytes, for `status` and for the report of an unmount.
pub(crate) fn writes_behind(writes: &dyn DelayedWrites) -> WritesBehind {
    let mut unsent = file_bytes(writes.unsent_files());
    unsent.sort_by_key(|file| std::cmp::Reverse(file.bytes));
    let unsent_bytes = unsent.iter().map(|file| file.bytes).sum();
    let unsent_files = unsent.len() as u64;
    unsent.truncate(UNSENT_SHOWN);
    let losses = writes.losses();
    WritesBehind {
        publishes: writes.publishes(),
        unsent_bytes,
        unsent_files,
        unsent,
        lost_bytes: losses.bytes,
        lost_files: losses.file_count,
        lost: file_bytes(losses.first_files),
        not_durable: losses.not_durable,
        maybe_not_durable: losses.maybe_not_durable,
        finishing: writes.is_finishing(),
    }
}

fn file_bytes(files: Vec<(String, u64)>) -> Vec<FileByteCount> {
    files.into_iter().map(|(path, bytes)| FileByteCount { path, bytes }).collect()
}

/// Written bytes that are not in the source yet, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsentBytes {
    /// The bytes, with the first files.
    pub bytes: String,
    /// As [`WritesBehind::publishes`].
    pub publishes: bool,
}

impl UnsentBytes {
    /// What has to take the bytes.
    pub fn taker(&self) -> &'static str {
        if self.publishes { "the store" } else { "a node" }
    }
}

/// The unsent bytes in words; `None` if there are none.
pub fn describe_unsent(behind: &WritesBehind) -> Option<UnsentBytes> {
    let bytes = describe_files(behind.unsent_bytes, behind.unsent_files, &behind.unsent)?;
    Some(UnsentBytes { bytes, publishes: behind.publishes })
}

/// The losses in words; `None` if there are none.
pub fn describe_losses(behind: &WritesBehind) -> Option<String> {
    let files = describe_files(behind.lost_bytes, behind.lost_files, &behind.lost);
    let lost = files.map(|files| {
        if behind.publishes {
            format!("lost, as the store did not take them: {files}")
        } else {
            format!("lost, as no node took them: {files}")
        }
    });
    let undone =
        behind.not_durable.as_ref().map(|why| format!("not all changes of the mount are durable on its nodes: {why}"));
    let all: Vec<String> = lost.into_iter().chain(undone).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// The doubts about durability at the end of a mount, in words; `None` if nothing is in doubt.
pub(crate) fn describe_doubt(behind: &WritesBehind) -> Option<String> {
    let why = behind.maybe_not_durable.as_ref()?;
    Some(format!(
        "it is not certain that all changes of the mount are durable: {why}; the host of that node still writes them unless it went down"
    ))
}

/// All bytes of a state, with the first files; `None` without files.
fn describe_files(bytes: u64, file_count: u64, first_files: &[FileByteCount]) -> Option<String> {
    if file_count == 0 {
        return None;
    }
    let named: Vec<String> =
        first_files.iter().map(|file| format!("/{} ({})", file.path, human_bytes(file.bytes))).collect();
    let more = file_count.saturating_sub(named.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!("{} of written bytes: {}{more}", human_bytes(bytes), named.join(", ")))
}

/// Waits until nodes have the written bytes durably; a doubt is logged.
///
/// # Errors
/// When bytes are lost; the message names the files.
pub(crate) fn finish_writes(writes: &dyn DelayedWrites, source: &str) -> std::result::Result<(), Fault> {
    writes.finish_closing();
    writes.finish_durably();
    let behind = writes_behind(writes);
    if let Some(doubt) = describe_doubt(&behind) {
        tracing::warn!("{source}: {doubt}");
    }
    find_loss(source, &behind).map_or(Ok(()), Err)
}

/// The error of a mount with losses; `None` without any.
pub(crate) fn find_loss(mountpoint: &str, behind: &WritesBehind) -> Option<Fault> {
    describe_losses(behind).map(|losses| loss_fault(mountpoint, &losses, behind.publishes))
}

/// The error of a mount that has lost bytes.
pub(crate) fn loss_fault(mountpoint: &str, losses: &str, publishes: bool) -> Fault {
    let remedy = if publishes {
        "write these files again when the store takes changes; the log of the mount has the store's answers"
    } else {
        "write these files again when a node answers; if a disk refused changes, check that disk and the files that were written last"
    };
    Fault::failed(format!("{mountpoint}: {losses}"), remedy)
}

/// The abilities of the source, for `spurline info`.
pub(crate) fn source_abilities(can: &WriteCapabilities) -> SourceAbilities {
    SourceAbilities {
        rename_directory: match can.rename_directory {
            DirectoryRename::Atomic => "atomic".to_owned(),
            DirectoryRename::EachUpTo(n) => format!("each, up to {n}"),
            DirectoryRename::No => "no".to_owned(),
        },
        hard_links: can.hard_links,
        symlinks: can.symlinks,
        modes: can.modes,
        xattrs: can.xattrs,
        acls: can.acls,
        // By every source that can be written at all.
        random_write: true,
        atomic_append: true,
        locks: lock_word(can.locks).to_owned(),
        holes: can.holes,
        copy: can.copy,
    }
}

/// Where the next open of a file reads from. The file is opened for a moment, as this process's user.
pub(crate) fn find_reads(source: &dyn WritableVolume, path: &[u8]) -> FileReads {
    let caller = Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        ..Caller::default()
    };
    let opened = source.open(NodePath { path, expected: None }, O_RDONLY, &caller);
    let version = opened.and_then(|file| Ok(file.cache_version(&file.attr_at_open()?)));
    let why_not = match version {
        Ok(CacheVersion::Settled(_) | CacheVersion::OwnCache) => None,
        Ok(CacheVersion::OpenForChanges) => Some("a process has it open for changes".to_owned()),
        Ok(CacheVersion::JustChanged) => {
            Some("it was changed so recently that a further change could keep its times".to_owned())
        }
        Ok(CacheVersion::SourceIsNear) => {
            Some("the source is a directory of this host, which the kernel reads itself".to_owned())
        }
        Err(error) => Some(error.to_string()),
    };
    FileReads { cached: why_not.is_none(), why_not }
}

/// A scope as a word of JSON.
pub(crate) fn lock_word(scope: LockScope) -> &'static str {
    match scope {
        LockScope::Mount => LOCKS_OF_MOUNT,
        LockScope::Group => LOCKS_OF_GROUP,
        LockScope::Source => LOCKS_OF_SOURCE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsent_files_are_named() {
        let behind = |bytes, files| WritesBehind {
            unsent_bytes: bytes,
            unsent_files: files,
            unsent: file_bytes(vec![("a/b".to_owned(), bytes)]),
            ..WritesBehind::default()
        };
        assert_eq!(describe_unsent(&behind(0, 0)), None);
        let to_node = describe_unsent(&behind(2048, 1)).unwrap();
        assert_eq!((&*to_node.bytes, to_node.taker()), ("2.00 KiB of written bytes: /a/b (2.00 KiB)", "a node"));
        assert!(describe_unsent(&behind(2048, 3)).unwrap().bytes.ends_with("and 2 more"));
        let empty = describe_unsent(&WritesBehind { publishes: true, ..behind(0, 1) }).unwrap();
        assert_eq!((&*empty.bytes, empty.taker()), ("0 B of written bytes: /a/b (0 B)", "the store"));
        assert_eq!(describe_unsent(&WritesBehind::default()), None);
    }

    #[test]
    fn a_mount_with_stage_needs_nodes_that_keep_staged_files() {
        let settings = |stages| StoreSettings { stages, ..store_settings(&WritesConfig::default()) };
        assert_eq!(check_stage(Some(settings(true))), Ok(()));
        for nodes in [Some(settings(false)), None] {
            let fault = check_stage(nodes).unwrap_err();
            assert_eq!(fault.code, spurline_config::ExitKind::Missing);
            let wanted = "the nodes of the group keep no staged files: fewer than two failure domains have room for them; start \
                          nodes with --stage-size on two machines, or with two names of --failure-domain; or leave --stage out";
            assert_eq!(fault.to_string(), wanted);
        }
        let mount = WritesConfig { stage: true, ..WritesConfig::default() };
        assert!(bucket_options(&writes_of_nodes(mount, settings(true)), None, 0).stage);
        assert!(!bucket_options(&writes_of_nodes(WritesConfig::default(), settings(true)), None, 0).stage);
    }

    #[test]
    fn losses_are_named() {
        let lost = |bytes, why: Option<&str>| WritesBehind {
            lost_bytes: bytes,
            lost_files: bytes.min(1),
            lost: file_bytes(vec![("f".to_owned(), bytes)]),
            not_durable: why.map(ToOwned::to_owned),
            ..WritesBehind::default()
        };
        assert_eq!(describe_losses(&lost(0, None)), None);
        assert_eq!(describe_losses(&WritesBehind::default()), None);
        let both = describe_losses(&lost(2048, Some("no space"))).unwrap();
        let wanted = "lost, as no node took them: 2.00 KiB of written bytes: /f (2.00 KiB); not all changes of the mount are durable \
                      on its nodes: no space";
        assert_eq!(both, wanted);
        let in_doubt =
            WritesBehind { maybe_not_durable: Some("node n was lost".to_owned()), ..WritesBehind::default() };
        let doubt = describe_doubt(&in_doubt).unwrap();
        assert!(
            doubt.starts_with("it is not certain that all changes of the mount are durable: node n was lost"),
            "{doubt}"
        );
    }
}
