//! Opens the changing side of a mount's volume, and describes it. It knows neither FUSE nor mountpoints.

use serde_json::{Value, json};
use spurline_config::{Fault, MountConfig, WritesConfig};
use spurline_origin::{SourceLocation, Squash, WritableSource};
use spurline_volume::writes::{DirectoryRename, LockScope, WritableVolume, WriteCapabilities};
use std::sync::Arc;

/// The changing side of a volume, and whether it acts for every user.
pub(crate) struct OpenWrites {
    pub source: Arc<dyn WritableVolume>,
    pub serves_all_users: bool,
}

/// Opens the source of `config` for changes.
///
/// # Errors
/// When it is read-only, or this process can't act for its callers.
pub(crate) fn open_writes(config: &MountConfig, writes: &WritesConfig) -> Result<OpenWrites, Fault> {
    let source = SourceLocation::parse(config.volume.source.as_str())?;
    let squash = writes.squash.map(|(uid, gid)| Squash { uid, gid });
    let source = WritableSource::open(source.path(), squash)?;
    let serves_all_users = source.serves_all_users();
    Ok(OpenWrites { source, serves_all_users })
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
