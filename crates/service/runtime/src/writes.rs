//! Opens the changing side of a mount's volume, and describes it. It knows neither FUSE nor mountpoints.

use serde_json::{Value, json};
use spurline_client::{GroupVolume, GroupWrites};
use spurline_config::{Fault, MountConfig, WritesConfig};
use spurline_origin::{SourceLocation, Squash, WritableSource};
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{DirectoryRename, LockScope, WritableVolume, WriteCapabilities};
use std::sync::Arc;

/// The most files that a message names.
const UNSENT_SHOWN: usize = 5;

/// The changing side of a volume, and whether it acts for every user.
pub(crate) struct OpenWrites {
    pub source: Arc<dyn WritableVolume>,
    /// The same through nodes, which get written bytes later.
    pub behind: Option<Arc<GroupWrites>>,
    pub serves_all_users: bool,
    /// `--local-locks`.
    pub local_locks: bool,
}

impl OpenWrites {
    /// What the source can do for programs of this mount.
    pub fn capabilities(&self) -> WriteCapabilities {
        let mut can = self.source.capabilities();
        if self.local_locks {
            can.locks = LockScope::Mount;
        }
        can
    }
}

/// Opens the source of `config` for changes, in this process or through the nodes of `remote`.
///
/// # Errors
/// When it is read-only, or this process can't act for its callers.
pub(crate) fn open_writes(
    config: &MountConfig,
    writes: &WritesConfig,
    remote: Option<&GroupVolume>,
) -> Result<OpenWrites, Fault> {
    if let Some(remote) = remote {
        // The nodes act for every user.
        let opened = remote.open_writes(writes.squash, config.volume.budget.write_bytes);
        // The node's error names its remedy.
        let source = opened.map_err(|error| unwritable(error, ""))?;
        let behind = Some(Arc::clone(&source));
        return Ok(OpenWrites { behind, source, serves_all_users: true, local_locks: config.fuse.local_locks });
    }
    let source = SourceLocation::parse(config.volume.source.as_str())?;
    let squash = writes.squash.map(|(uid, gid)| Squash { uid, gid });
    let opened = WritableSource::open(source.path(), squash);
    let source = opened.map_err(|error| unwritable(error, "leave --rw out"))?;
    let serves_all_users = source.serves_all_users();
    Ok(OpenWrites { source, behind: None, serves_all_users, local_locks: config.fuse.local_locks })
}

/// The error of a source that can't be changed, which is a missing prerequisite if it is read-only.
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

/// Opens a node's source for changes.
///
/// # Errors
/// When it is read-only, or this process can't act for its callers.
pub(crate) fn open_node_writes(source: &str, writes: &WritesConfig) -> Result<Arc<WritableSource>> {
    let location = SourceLocation::parse(source)?;
    let opened = WritableSource::open(location.path(), writes.squash.map(|(uid, gid)| Squash { uid, gid }))?;
    if writes.squash.is_none() && !opened.serves_all_users() {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let why = format!(
            "--writable needs root with CAP_SETUID and CAP_SETGID, to make changes as their callers, and this process is \
             user {uid}: start the node as root, or make all changes as this user: --squash {uid}:{gid}"
        );
        return Err(Error::new(ErrorKind::PermissionDenied, why));
    }
    Ok(opened)
}

/// Files with bytes that no node has yet, for `status`: the most first.
pub(crate) fn unsent_json(writes: &GroupWrites) -> Value {
    let mut files = writes.unsent_files();
    files.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    let shown = files.iter().take(UNSENT_SHOWN).map(|(path, bytes)| json!({ "path": path, "bytes": bytes }));
    json!({
        "unsent_bytes": bytes,
        "unsent_files": files.len(),
        "unsent": shown.collect::<Vec<_>>(),
        "finishing": writes.is_finishing(),
    })
}

/// The bytes of [`unsent_json`] in words; `None` if there are none.
pub fn describe_unsent(status: &Value) -> Option<String> {
    let (bytes, files) = (status["unsent_bytes"].as_u64()?, status["unsent_files"].as_u64()?);
    let shown = status["unsent"].as_array().into_iter().flatten().filter_map(|file| {
        let size = human_bytes(file["bytes"].as_u64()?);
        Some(format!("/{} ({size})", file["path"].as_str()?))
    });
    let shown: Vec<String> = shown.collect();
    let more = files.saturating_sub(shown.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (bytes > 0).then(|| format!("{} of written bytes: {}{more}", human_bytes(bytes), shown.join(", ")))
}

/// What the source can do, for `spurline info`.
pub(crate) fn capabilities_json(can: &WriteCapabilities) -> Value {
    json!({
        "rename_directory": match can.rename_directory {
            DirectoryRename::Atomic => "atomic".to_owned(),
            DirectoryRename::EachUpTo(n) => format!("each, up to {n}"),
            DirectoryRename::No => "no".to_owned(),
        },
        "hard_links": can.hard_links,
        "symlinks": can.symlinks,
        "modes": can.modes,
        "xattrs": can.xattrs,
        "acls": can.acls,
        "random_write": can.random_write,
        "atomic_append": can.atomic_append,
        "locks": lock_word(can.locks),
        "holes": can.holes,
        "copy": can.copy,
    })
}

/// A scope as a word of JSON.
pub(crate) fn lock_word(scope: LockScope) -> &'static str {
    match scope {
        LockScope::Mount => "mount",
        LockScope::Source => "source",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsent_files_are_named() {
        let status = |bytes, files| json!({ "unsent_bytes": bytes, "unsent_files": files, "unsent": [{ "path": "a/b", "bytes": bytes }] });
        assert_eq!(describe_unsent(&status(0, 0)), None);
        assert_eq!(describe_unsent(&status(2048, 1)).unwrap(), "2.00 KiB of written bytes: /a/b (2.00 KiB)");
        assert!(describe_unsent(&status(2048, 3)).unwrap().ends_with("and 2 more"));
        assert_eq!(describe_unsent(&Value::Null), None);
    }
}
