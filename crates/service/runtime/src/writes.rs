//! Opens the changing side of a mount's volume, and describes it. It knows neither FUSE nor mountpoints.

use serde_json::{Value, json};
use spurline_client::{GroupVolume, GroupWrites};
use spurline_config::{Fault, MountConfig, WritesConfig};
use spurline_origin::{SourceLocation, Squash, WritableSource};
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::writes::WritableVolume;
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

/// Written bytes that no node has yet and lost ones, for `status` and for the report of an unmount.
pub(crate) fn behind_json(writes: &GroupWrites) -> Value {
    let mut files = writes.unsent_files();
    files.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    let count = files.len();
    files.truncate(UNSENT_SHOWN);
    let losses = writes.losses();
    json!({
        "unsent_bytes": bytes,
        "unsent_files": count,
        "unsent": files_json(&files),
        "lost_bytes": losses.bytes,
        "lost_files": losses.file_count,
        "lost": files_json(&losses.first_files),
        "not_durable": losses.not_durable,
        "maybe_not_durable": losses.maybe_not_durable,
        "finishing": writes.is_finishing(),
    })
}

fn files_json(files: &[(String, u64)]) -> Value {
    files.iter().map(|(path, bytes)| json!({ "path": path, "bytes": bytes })).collect()
}

/// The unsent bytes of [`behind_json`] in words; `None` if there are none.
pub fn describe_unsent(behind: &Value) -> Option<String> {
    describe_files(behind, "unsent")
}

/// The losses of [`behind_json`] in words; `None` if there are none.
pub fn describe_losses(behind: &Value) -> Option<String> {
    let lost = describe_files(behind, "lost").map(|files| format!("lost, as no node took them: {files}"));
    let undone = behind["not_durable"].as_str();
    let undone = undone.map(|why| format!("not all changes of the mount are durable on its nodes: {why}"));
    let all: Vec<String> = lost.into_iter().chain(undone).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// What [`behind_json`] leaves open at the end of a mount, in words; `None` if nothing is in doubt.
pub(crate) fn describe_doubt(behind: &Value) -> Option<String> {
    let why = behind["maybe_not_durable"].as_str()?;
    Some(format!(
        "it is not certain that all changes of the mount are durable: {why}; the host of that node still writes them unless it went down"
    ))
}

/// The bytes of one state in [`behind_json`], and their files.
fn describe_files(behind: &Value, state: &str) -> Option<String> {
    let bytes = behind[format!("{state}_bytes")].as_u64().filter(|bytes| *bytes > 0)?;
    let files = behind[format!("{state}_files")].as_u64()?;
    let shown = behind[state].as_array().into_iter().flatten().filter_map(|file| {
        let size = human_bytes(file["bytes"].as_u64()?);
        Some(format!("/{} ({size})", file["path"].as_str()?))
    });
    let shown: Vec<String> = shown.collect();
    let more = files.saturating_sub(shown.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!("{} of written bytes: {}{more}", human_bytes(bytes), shown.join(", ")))
}

/// The error of a mount whose log has losses.
pub(crate) fn loss_fault(mountpoint: &str, losses: &str) -> Fault {
    Fault::failed(
        format!("{mountpoint}: {losses}"),
        "write these files again when a node answers; if a disk refused changes, check that disk and the files that were written last",
    )
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
        // By every source that can be written at all.
        "random_write": true,
        "atomic_append": true,
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

    #[test]
    fn losses_are_named() {
        let lost = |bytes, why: Option<&str>| json!({ "lost_bytes": bytes, "lost_files": 1, "lost": [{ "path": "f", "bytes": bytes }], "not_durable": why });
        assert_eq!(describe_losses(&lost(0, None)), None);
        assert_eq!(describe_losses(&Value::Null), None);
        let both = describe_losses(&lost(2048, Some("no space"))).unwrap();
        let wanted = "lost, as no node took them: 2.00 KiB of written bytes: /f (2.00 KiB); not all changes of the mount are durable \
                      on its nodes: no space";
        assert_eq!(both, wanted);
        let doubt = describe_doubt(&json!({ "maybe_not_durable": "node n was lost" })).unwrap();
        assert!(
            doubt.starts_with("it is not certain that all changes of the mount are durable: node n was lost"),
            "{doubt}"
        );
    }
}
