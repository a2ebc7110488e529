//! Opens the changing side of a mount's volume, and describes it. It knows neither FUSE nor mountpoints.

use serde_json::{Value, json};
use spurline_client::GroupVolume;
use spurline_config::{Fault, MountConfig, WritesConfig};
use spurline_origin::{SourceLocation, Squash, WritableSource};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{DirectoryRename, LockScope, WritableVolume, WriteCapabilities};
use std::sync::Arc;

/// The changing side of a volume, and whether it acts for every user.
pub(crate) struct OpenWrites {
    pub source: Arc<dyn WritableVolume>,
    pub serves_all_users: bool,
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
        return Ok(OpenWrites {
            source: remote.open_writes(writes.squash, config.volume.budget.write_bytes)?,
            serves_all_users: true,
        });
    }
    let source = SourceLocation::parse(config.volume.source.as_str())?;
    let squash = writes.squash.map(|(uid, gid)| Squash { uid, gid });
    let source = WritableSource::open(source.path(), squash)?;
    let serves_all_users = source.serves_all_users();
    Ok(OpenWrites { source, serves_all_users })
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
        "locks": match can.locks {
            LockScope::Mount => "mount",
            LockScope::Source => "source",
        },
        "holes": can.holes,
        "copy": can.copy,
    })
}
