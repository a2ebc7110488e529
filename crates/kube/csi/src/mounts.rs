//! Mountpoints of the driver: checked, bound and detached by the mount table alone. Nothing here accesses the content of a mount,
//! which may hang. Does not know volumes.

use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_change, mount_remount, unmount,
};
use spurline_config::Fault;
use spurline_observe::locate::FS_TYPE;
use spurline_sys::{MountEntry, MountTable};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path};

/// Most mounts on a mountpoint that are detached.
pub(crate) const MOST_LAYERS: usize = 64;

fn read_table() -> Result<MountTable, Fault> {
    MountTable::read().map_err(|e| Fault::failed(format!("/proc/self/mountinfo: {e}"), "mount /proc"))
}

/// The topmost mount at `path`.
///
/// # Errors
/// When the mount table can't be read.
pub(crate) fn mount_at(path: &Path) -> Result<Option<MountEntry>, Fault> {
    Ok(topmost(&read_table()?, path).cloned())
}

/// The last entry of a path, which covers earlier entries.
fn topmost<'a>(table: &'a MountTable, path: &Path) -> Option<&'a MountEntry> {
    table.entries().iter().rev().find(|entry| entry.mountpoint == path)
}

/// The part of `paths` that does not show the file system that is mounted at `point`.
///
/// # Errors
/// As [`mount_at`].
pub(crate) fn paths_without_mount<'a>(point: &Path, paths: &[&'a Path]) -> Result<Vec<&'a Path>, Fault> {
    let table = read_table()?;
    let Some(mount) = topmost(&table, point) else { return Ok(paths.to_vec()) };
    let stale = paths.iter().filter(|path| topmost(&table, path).is_none_or(|entry| entry.device != mount.device));
    Ok(stale.copied().collect())
}

/// The FUSE mount of a Spurline process at `path`.
///
/// # Errors
/// As [`mount_at`].
pub(crate) fn spurline_mount_at(path: &Path) -> Result<Option<MountEntry>, Fault> {
    Ok(mount_at(path)?.filter(|entry| entry.fstype == FS_TYPE))
}

/// The number of mounts at `path`, over each other.
///
/// # Errors
/// As [`mount_at`].
pub(crate) fn count_layers(path: &Path) -> Result<usize, Fault> {
    let table = read_table()?;
    Ok(table.entries().iter().filter(|entry| entry.mountpoint == path).count())
}

/// Whether anything is mounted at `dir` or below.
///
/// # Errors
/// As [`mount_at`].
pub(crate) fn is_mounted_below(dir: &Path) -> Result<bool, Fault> {
    let table = read_table()?;
    Ok(table.entries().iter().any(|entry| entry.mountpoint.starts_with(dir)))
}

/// Binds the mount at `from` to the directory `to`, which is created, or to the mount there; also read-only. `step` is a directory
/// of the driver, through which the bind is made: the mount there is private, so that no two directories share later mounts, and
/// is read-only already before the bind, so that no copy is ever writable.
///
/// # Errors
/// When a directory can't be made, or the kernel refuses the bind.
pub(crate) fn bind(from: &Path, to: &Path, read_only: bool, step: &Path) -> Result<(), Fault> {
    remove_mountpoint(step)?;
    make_dir(step)?;
    // A dead mount does not even answer whether this is a directory.
    if mount_at(to)?.is_none() {
        make_dir(to)?;
    }
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    let bound = mount_bind(from, step)
        .and_then(|()| mount_change(step, MountPropagationFlags::PRIVATE))
        .and_then(|()| if read_only { mount_remount(step, flags, "") } else { Ok(()) })
        .and_then(|()| mount_bind(step, to));
    remove_mountpoint(step)?;
    bound.map_err(|e| {
        let _ = std::fs::remove_dir(to);
        let remedy = if e == Errno::PERM { "run the driver as root, in a pod with privileged: true" } else { "" };
        Fault::failed(format!("binding {} to {}: {e}", from.display(), to.display()), remedy)
    })
}

fn make_dir(dir: &Path) -> Result<(), Fault> {
    let made = DirBuilder::new().recursive(true).mode(0o750).create(dir);
    made.map_err(|e| Fault::failed(format!("the directory {}: {e}", dir.display()), ""))
}

/// Detaches all mounts at `path`, also dead and busy mounts, which leave the tree at once.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn detach_all(path: &Path) -> Result<(), Fault> {
    for _ in 0..MOST_LAYERS {
        if mount_at(path)?.is_none() {
            return Ok(());
        }
        match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // Another process was faster.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(e) => return Err(Fault::failed(format!("detaching {}: {e}", path.display()), "")),
        }
    }
    Err(Fault::failed(format!("{} has more than {MOST_LAYERS} mounts over each other", path.display()), ""))
}

/// Detaches all mounts at `path` and removes the empty directory.
///
/// # Errors
/// As [`detach_all`], and when the directory can't be removed.
pub(crate) fn remove_mountpoint(path: &Path) -> Result<(), Fault> {
    detach_all(path)?;
    match std::fs::remove_dir(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Fault::failed(format!("removing {}: {e}", path.display()), "look at what it holds, and remove that"))
        }
        _ => Ok(()),
    }
}

/// Whether `path` is absolute and has no part that leads upwards.
pub(crate) fn is_plain(path: &Path) -> bool {
    path.is_absolute() && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_upwards_are_refused() {
        assert!(is_plain(Path::new("/var/lib/kubelet/pods/a/mount")));
        for path in ["", "some/path", "/a/../b"] {
            assert!(!is_plain(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn removing_what_is_not_there_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        remove_mountpoint(&dir.path().join("none")).unwrap();
        let point = dir.path().join("point");
        std::fs::create_dir(&point).unwrap();
        remove_mountpoint(&point).unwrap();
        assert!(!point.exists());
        // A directory with files is reported, not emptied.
        std::fs::create_dir(&point).unwrap();
        std::fs::write(point.join("file"), b"x").unwrap();
        assert!(remove_mountpoint(&point).unwrap_err().what.contains("point"));
    }
}
