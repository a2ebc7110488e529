//! From what a person types (a mountpoint, a node's address, a socket) to a process that answers.
//! A mount is found in the mount table and never touched.

use crate::serving::{Serving, serving};
use spurline_config::values::absolute_path;
use spurline_config::{Fault, HostPort};
use spurline_net_tcp::{local_addresses, resolve_peer as resolve_address};
use spurline_observe::client::AdminPeer;
use spurline_observe::dial;
use spurline_observe::locate::{self, LocatedPath, SocketOwner, SpurlineMount};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a process may take to answer a question about itself.
pub const ANSWER: Duration = Duration::from_secs(10);
/// How long each of them may take that is only looked at for whether it is the one meant.
const LOOK: Duration = Duration::from_secs(2);

/// The process that a person means.
///
/// # Errors
/// When there is none, saying what was found instead.
pub fn resolve(target: &str) -> Result<AdminPeer, Fault> {
    find(target).map_err(|absent| absent.fault)
}

/// The same, and whether one that does not answer may well run.
///
/// # Errors
/// When there is none, saying what was found instead.
pub fn find(target: &str) -> Result<AdminPeer, Absent> {
    let path = Path::new(target);
    let mounts = locate::list_mounts().map_err(Fault::from)?;
    if let Some(located) = locate::locate_mount(path, &mounts) {
        return of_mount(&located.mount);
    }
    of_words(target, path, &mounts)
}

/// The process that a person means who names no place in a mount.
fn of_words(target: &str, path: &Path, mounts: &[SpurlineMount]) -> Result<AdminPeer, Absent> {
    // The path is in no mount of ours, so looking at it can't hang for our reasons.
    let found = std::fs::symlink_metadata(path);
    if found.as_ref().is_ok_and(|meta| meta.file_type().is_socket()) {
        return of_socket(path, None);
    }
    if let Ok(address) = target.parse::<HostPort>() {
        return Ok(of_node(&address));
    }
    let full = absolute_path(path);
    for socket in own_candidates(SocketOwner::Mount(&full)) {
        if socket.exists() {
            let user = Some(locate::required_owner(&socket));
            return match dial::probe_socket(&socket, user) {
                Ok(()) => Ok(AdminPeer::Socket(socket, user)),
                Err(e) if e.kind() == ErrorKind::PermissionDenied => Err(closed(&socket, &e)),
                Err(_) => {
                    let what =
                        format!("the mount at {} is gone: nobody answers at {}", full.display(), socket.display());
                    Err(Fault::missing(what, "mount it again").into())
                }
            };
        }
    }
    let known: Vec<String> = mounts.iter().map(|m| m.mountpoint.display().to_string()).collect();
    let remedy = match known.as_slice() {
        [] => {
            "nothing is mounted by spurline here; name a mountpoint, a node's HOST:PORT or an admin socket".to_owned()
        }
        some => format!("mounts of spurline here: {}", some.join(", ")),
    };
    Err(match found {
        Ok(_) => Fault::failed(format!("{target} is not in a mount of spurline"), remedy).into(),
        Err(e) if e.kind() == ErrorKind::NotFound => Fault::missing(format!("{target}: {e}"), remedy).into(),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => closed(path, &e),
        Err(e) => Fault::failed(format!("{target}: {e}"), remedy).into(),
    })
}

/// One that this user may not ask.
fn closed(path: &Path, error: &std::io::Error) -> Absent {
    let fault = Fault::missing(format!("{}: {error}", path.display()), "ask as the user it belongs to, or as root");
    Absent { fault, theirs: true }
}

/// The mount that `path` lies in and the process behind it.
///
/// # Errors
/// When the path is in no mount, or its process is gone.
pub fn locate(path: &Path) -> Result<(LocatedPath, AdminPeer), Fault> {
    let mounts = locate::list_mounts()?;
    let Some(located) = locate::locate_mount(path, &mounts) else {
        return Err(Fault::failed(
            format!("{} is not in a mount of spurline", path.display()),
            "name a file below a mountpoint; spurline status lists the mounts",
        ));
    };
    let peer = of_mount(&located.mount).map_err(|absent| absent.fault)?;
    Ok((located, peer))
}

/// Why the process behind a mount can't be asked.
pub struct Absent {
    /// In words.
    pub fault: Fault,
    /// It may well run: another user's, or one that was started elsewhere.
    pub theirs: bool,
}

impl From<Fault> for Absent {
    fn from(fault: Fault) -> Absent {
        Absent { fault, theirs: false }
    }
}

/// The process behind a mount of the mount table.
///
/// # Errors
/// When nobody answers for it.
pub fn of_mount(mount: &SpurlineMount) -> Result<AdminPeer, Absent> {
    let at = mount.mountpoint.display();
    let theirs = |what, remedy: String| Absent { fault: Fault::missing(what, remedy), theirs: true };
    let mut refused: Option<(PathBuf, std::io::Error)> = None;
    for socket in locate::socket_candidates(SocketOwner::Mount(&mount.mountpoint), mount.uid) {
        match dial::probe_socket(&socket, Some(mount.uid)) {
            Ok(()) => return Ok(AdminPeer::Socket(socket, Some(mount.uid))),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => refused = Some((socket, e)),
        }
    }
    match refused {
        Some((socket, e)) if e.kind() == ErrorKind::PermissionDenied => Err(theirs(
            format!("the mount at {at} belongs to user {}: {}: {e}", mount.uid, socket.display()),
            if rustix::process::geteuid().is_root() {
                format!("ask with the {} that it was started with", locate::RUNTIME_DIR_ENV)
            } else {
                "ask as that user or as root".to_owned()
            },
        )),
        Some((socket, e)) => {
            let what = format!(
                "the process of the mount at {at} is gone, it was killed or crashed; nobody answers at {}: {e}",
                socket.display()
            );
            let remedy = format!("spurline umount {at}, then mount it again; its log may say why");
            Err(Absent { fault: Fault::missing(what, remedy), theirs: false })
        }
        None => {
            let user = rustix::process::geteuid();
            let whose = format!("the mount at {at} has no admin socket where this user looks");
            let elsewhere = format!("ask with the {} that it was started with", locate::RUNTIME_DIR_ENV);
            Err(match serving(mount, &locate::list_mounts().unwrap_or_default()) {
                Serving::Process(pid) => theirs(format!("{whose}, and runs as process {pid}"), elsewhere),
                Serving::Nobody => {
                    let what = format!(
                        "the process of the mount at {at} is gone, and its admin socket with it: no process of this \
                         machine has the mount open; when it ended nothing here tells"
                    );
                    let remedy = format!("spurline umount {at}, then mount it again; its log may say more");
                    Absent { fault: Fault::missing(what, remedy), theirs: false }
                }
                Serving::Unseen if mount.uid != user.as_raw() && !user.is_root() => theirs(
                    format!("the mount at {at} belongs to user {}", mount.uid),
                    "ask as that user or as root".to_owned(),
                ),
                Serving::Unseen => theirs(
                    format!("{whose}, and whether its process runs can't be seen from here"),
                    format!(
                        "{elsewhere}, on the host and not in a container; where its process is gone: spurline umount {at}"
                    ),
                ),
            })
        }
    }
}

fn of_socket(path: &Path, user: Option<u32>) -> Result<AdminPeer, Absent> {
    match dial::probe_socket(path, user) {
        Ok(()) => Ok(AdminPeer::Socket(path.to_owned(), user)),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Err(closed(path, &e)),
        Err(e) => {
            let what = format!("nobody answers at the admin socket {}: {e}", path.display());
            Err(Fault::missing(what, "start it again").into())
        }
    }
}

/// A node of this machine answers at its socket; any other at its metrics address.
fn of_node(address: &HostPort) -> AdminPeer {
    let name = address.to_string();
    let mut called = own_candidates(SocketOwner::Node(&name)).into_iter().map(own);
    let called =
        called.find(|peer| matches!(peer, AdminPeer::Socket(at, user) if dial::probe_socket(at, *user).is_ok()));
    called.or_else(|| by_other_address(&name)).unwrap_or(AdminPeer::Http(name))
}

/// The socket of a process of this machine that listens there: one with several addresses calls it after the first.
fn by_other_address(name: &str) -> Option<AdminPeer> {
    let here: Vec<IpAddr> = local_addresses().ok()?.into_iter().map(|local| local.ip).collect();
    let mut wanted = resolve_address(name, Instant::now() + LOOK).ok()?;
    wanted.retain(|at| at.ip().is_loopback() || here.contains(&at.ip()));
    if wanted.is_empty() {
        return None;
    }
    let listens = |(_, socket): (String, PathBuf)| {
        let peer = own(socket);
        let status = peer.fetch_status(LOOK).ok()?;
        let addresses = status["addresses"].as_array()?.iter().filter_map(|at| at.as_str()?.parse().ok());
        Some((peer, addresses.collect::<Vec<SocketAddr>>()))
    };
    let processes: Vec<_> = node_sockets().into_iter().filter_map(listens).collect();
    let find = |is: &dyn Fn(&SocketAddr) -> bool| {
        processes.iter().find(|(_, addresses)| addresses.iter().any(is)).map(|(peer, _)| peer.clone())
    };
    // By localhost people mean this machine, also where nobody listens at its loopback address.
    let loopback = |at: &SocketAddr| wanted.iter().any(|w| w.ip().is_loopback() && w.port() == at.port());
    find(&|at| wanted.contains(at)).or_else(|| find(&loopback))
}

/// The nodes and coordinators of this user, by name: their sockets, whether or not anybody answers there.
fn node_sockets() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for dir in locate::runtime_dirs(rustix::process::geteuid().as_raw()) {
        let Ok(entries) = std::fs::read_dir(dir) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(node) = name.strip_prefix("node-").and_then(|n| n.strip_suffix(".sock")) {
                found.push((node.to_owned(), entry.path()));
            }
        }
    }
    found
}

/// What answers at a socket that is looked for in this user's directories.
fn own(socket: PathBuf) -> AdminPeer {
    let user = locate::required_owner(&socket);
    AdminPeer::Socket(socket, Some(user))
}

fn own_candidates(owner: SocketOwner<'_>) -> Vec<PathBuf> {
    locate::socket_candidates(owner, rustix::process::geteuid().as_raw())
}

/// A name, and who answers to it.
pub type Asked = (String, Result<AdminPeer, Absent>);

/// Everything of this user (of anybody, for root) that runs on this machine: mounts, then nodes.
///
/// # Errors
/// When /proc is not there.
pub fn everything() -> Result<Vec<Asked>, Fault> {
    let mut all: Vec<Asked> = Vec::new();
    for mount in locate::list_mounts()? {
        all.push((mount.mountpoint.display().to_string(), of_mount(&mount)));
    }
    for (node, socket) in node_sockets() {
        if !all.iter().any(|(known, _)| *known == node)
            && let Ok(peer) = of_socket(&socket, Some(locate::required_owner(&socket)))
        {
            all.push((node, Ok(peer)));
        }
    }
    if all.is_empty() {
        // Root's as well: that nothing runs can't be said without a look at it.
        let dirs = locate::runtime_dirs(rustix::process::geteuid().as_raw()).into_iter().chain(locate::runtime_dirs(0));
        let unseen = dirs.filter_map(|dir| Some((std::fs::read_dir(&dir).err()?, dir)));
        let mut unseen = unseen.filter(|(error, _)| error.kind() == ErrorKind::PermissionDenied);
        all.extend(unseen.next().map(|(error, dir)| (dir.display().to_string(), Err(closed(&dir, &error)))));
    }
    Ok(all)
}
