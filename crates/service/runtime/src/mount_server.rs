//! Finds the process that serves a mount without a known admin socket, as far as this user may see. Does not access the mount:
//! /proc lists the processes with FUSE devices open.

use spurline_observe::locate::SpurlineMount;
use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

/// The initial PID namespace has this number on every kernel.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// The process behind a mount.
#[derive(Debug, PartialEq, Eq)]
pub enum MountServer {
    /// A process runs, with this PID.
    Process(u32),
    /// No process of this machine serves the mount.
    None,
    /// Unknown: some processes are hidden from this user or container.
    Unseen,
}

/// The process of `mount`, an element of `mounts`.
pub fn find_server(mount: &SpurlineMount, mounts: &[SpurlineMount]) -> MountServer {
    let Ok(processes) = fs::read_dir("/proc") else { return MountServer::Unseen };
    // A container does not see the processes outside, which may have mounted.
    let mut unseen = fs::read_link("/proc/self/ns/pid").map_or(true, |link| link != Path::new(FIRST_NAMESPACE));
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let process = process.path();
        match fuse_connections(&process) {
            Ok(held) if held.contains(&Some(mount.minor)) => return MountServer::Process(pid),
            // Some kernels do not show the connection; then the arguments of the process show the mount.
            Ok(held) if held.contains(&None) && is_ours(&process) => {
                if names_path(&process, &mount.mountpoint) {
                    return MountServer::Process(pid);
                }
                unseen |= !mounts.iter().any(|other| names_path(&process, &other.mountpoint));
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => unseen |= is_ours(&process),
            // The process serves another mount, or has ended meanwhile.
            _ => {}
        }
    }
    if unseen { MountServer::Unseen } else { MountServer::None }
}

/// The FUSE connections that a process has open; `None` for a connection without a number in /proc.
fn fuse_connections(process: &Path) -> Result<Vec<Option<u32>>, Error> {
    let mut held = Vec::new();
    for descriptor in fs::read_dir(process.join("fd"))?.flatten() {
        if fs::read_link(descriptor.path()).is_ok_and(|to| to == Path::new("/dev/fuse")) {
            let info = fs::read_to_string(process.join("fdinfo").join(descriptor.file_name())).unwrap_or_default();
            held.push(connection_of(&info));
        }
    }
    Ok(held)
}

fn connection_of(info: &str) -> Option<u32> {
    info.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())
}

/// Whether the process runs this program, by name.
fn is_ours(process: &Path) -> bool {
    let of = program_name(process);
    of.starts_with("spurline") || (!of.is_empty() && of == program_name(Path::new("/proc/self")))
}

fn program_name(process: &Path) -> String {
    fs::read_to_string(process.join("comm")).unwrap_or_default()
}

/// Whether an argument is this path, relative to the working directory.
fn names_path(process: &Path, place: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt as _;
    let from = fs::read_link(process.join("cwd")).unwrap_or_else(|_| PathBuf::from("/"));
    let words = fs::read(process.join("cmdline")).unwrap_or_default();
    words.split(|byte| *byte == 0).any(|word| from.join(std::ffi::OsStr::from_bytes(word)) == place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_which_connection_a_device_is_of_or_does_not() {
        assert_eq!(connection_of("pos:\t0\nflags:\t02100002\nmnt_id:\t26\nfuse_connection:\t47\n"), Some(47));
        assert_eq!(connection_of("pos:\t0\nflags:\t02100002\n"), None);
        assert_eq!(connection_of("fuse_connection:\tx\n"), None);
    }

    #[test]
    fn a_mount_that_nobody_has_open_is_served_by_nobody_or_that_can_not_be_seen() {
        let mount = SpurlineMount {
            mountpoint: "/no/such/mount".into(),
            source: "s".into(),
            uid: 0,
            minor: u32::MAX,
            allow_other: false,
            read_only: true,
        };
        assert!(!matches!(find_server(&mount, &[]), MountServer::Process(_)));
    }
}
