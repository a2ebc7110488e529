//! Finds the process of a mountpoint, a node's address or an admin socket. Reads the mount table and never accesses a mount.

use crate::mount_server::{MountServer, find_server};
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

/// Time limit of a query to a process.
pub const PROCESS_ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of each query while searching for a process.
const SEARCH_QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// The mount of Spurline at a mountpoint.
///
/// # Errors
/// When there is none, with the existing mounts.
pub fn find_mount(mountpoint: &Path) -> Result<SpurlineMount, Fault> {
    let mounts = locate::list_mounts()?;
    let found = locate::locate_mount(mountpoint, &mounts).filter(|located| located.below.is_empty());
    found.map(|located| located.mount).ok_or_else(|| {
        let known: Vec<String> = mounts.iter().map(|mount| mount.mountpoint.display().to_string()).collect();
        let what = format!("{} is not a mountpoint of spurline", mountpoint.display());
        if known.is_empty() {
            Fault::failed(format!("{what}: this host has none"), "")
        } else {
            Fault::failed(what, format!("its mounts are: {}", known.join(", ")))
        }
    })
}

/// The process of a target.
///
/// # Errors
/// When there is none, with what was found instead.
pub fn resolve_target(target: &str) -> Result<AdminPeer, Fault> {
    find_process(target).map_err(|absent| absent.fault)
}

/// The same; the error says whether a process that does not answer may run.
///
/// # Errors
/// When there is none, with what was found instead.
pub fn find_process(target: &str) -> Result<AdminPeer, UnreachableProcess> {
    let path = Path::new(target);
    let mounts = locate::list_mounts().map_err(Fault::from)?;
    if let Some(located) = locate::locate_mount(path, &mounts) {
        return mount_process(&located.mount);
    }
    process_by_name(target, path, &mounts)
}

/// The process of a target that lies in no mount.
fn process_by_name(target: &str, path: &Path, mounts: &[SpurlineMount]) -> Result<AdminPeer, UnreachableProcess> {
    // The path lies in no mount of spurline, so the access can't hang.
    let found = std::fs::symlink_metadata(path);
    if found.as_ref().is_ok_and(|meta| meta.file_type().is_socket()) {
        return process_at_socket(path, None);
    }
    if let Ok(address) = target.parse::<HostPort>() {
        return Ok(node_process(&address));
    }
    let full = absolute_path(path);
    for socket in own_candidates(SocketOwner::Mount(&full)) {
        if socket.exists() {
            let user = Some(locate::required_owner(&socket));
            return match dial::probe_socket(&socket, user) {
                Ok(()) => Ok(AdminPeer::Socket(socket, user)),
                Err(e) if e.kind() == ErrorKind::PermissionDenied => Err(not_permitted(&socket, &e)),
                Err(_) => {
                    let what =
                        format!("the mount at {} is gone: no process answers at {}", full.display(), socket.display());
                    Err(Fault::missing(what, "mount it again").into())
                }
            };
        }
    }
    let known: Vec<String> = mounts.iter().map(|m| m.mountpoint.display().to_string()).collect();
    let remedy = match known.as_slice() {
        [] => "nothing is mounted by spurline here; name a node by its HOST:PORT, or an admin socket".to_owned(),
        some => format!("name one of the mounts of spurline here: {}; or a node by its HOST:PORT", some.join(", ")),
    };
    let fault = match found {
        Ok(_) => Fault::failed(format!("{target} is not in a mount of spurline"), remedy),
        Err(e) if e.kind() == ErrorKind::NotFound => Fault::missing(format!("{target}: {e}"), remedy),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => return Err(not_permitted(path, &e)),
        Err(e) => Fault::failed(format!("{target}: {e}"), remedy),
    };
    Err(UnreachableProcess { fault, absence: ProcessAbsence::NoTarget })
}

/// The error for a process of another user.
fn not_permitted(path: &Path, error: &std::io::Error) -> UnreachableProcess {
    let fault = Fault::missing(format!("{}: {error}", path.display()), "ask as the user it belongs to, or as root");
    UnreachableProcess { fault, absence: ProcessAbsence::OutOfReach }
}

/// The mount that contains `path` and the process behind.
///
/// # Errors
/// When the path is in no mount, or the mount's process is gone.
pub fn locate_path(path: &Path) -> Result<(LocatedPath, AdminPeer), Fault> {
    let mounts = locate::list_mounts()?;
    let Some(located) = locate::locate_mount(path, &mounts) else {
        return Err(Fault::failed(
            format!("{} is not in a mount of spurline", path.display()),
            "name a file below a mountpoint; spurline status lists the mounts",
        ));
    };
    let peer = mount_process(&located.mount).map_err(|absent| absent.fault)?;
    Ok((located, peer))
}

/// The facts about a process that can't be queried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessAbsence {
    /// It has ended.
    Ended,
    /// It may run, and this command can't reach it.
    OutOfReach,
    /// It may run, and belongs to this user.
    OfUser(u32),
    /// The target names no process: the path is in no mount of Spurline.
    NoTarget,
}

/// Why the process of a mount can't be queried.
pub struct UnreachableProcess {
    /// The error.
    pub fault: Fault,
    /// The facts about the process.
    pub absence: ProcessAbsence,
}

impl From<Fault> for UnreachableProcess {
    fn from(fault: Fault) -> UnreachableProcess {
        UnreachableProcess { fault, absence: ProcessAbsence::Ended }
    }
}

/// The error for a process that may run, and that this command can't query.
fn out_of_reach(what: String, remedy: String) -> UnreachableProcess {
    UnreachableProcess { fault: Fault::missing(what, remedy), absence: ProcessAbsence::OutOfReach }
}

/// The process of a mount in the mount table.
///
/// # Errors
/// When none answers.
pub fn mount_process(mount: &SpurlineMount) -> Result<AdminPeer, UnreachableProcess> {
    let at = mount.mountpoint.display();
    let mut refused: Option<(PathBuf, std::io::Error)> = None;
    for socket in locate::socket_candidates(SocketOwner::Mount(&mount.mountpoint), mount.uid) {
        match dial::probe_socket(&socket, Some(mount.uid)) {
            Ok(()) => return Ok(AdminPeer::Socket(socket, Some(mount.uid))),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => refused = Some((socket, e)),
        }
    }
    match refused {
        Some((_, e)) if e.kind() == ErrorKind::PermissionDenied && is_of_another(mount) => Err(of_user(mount)),
        Some((socket, e)) if e.kind() == ErrorKind::PermissionDenied => Err(out_of_reach(
            format!("the mount at {at} belongs to user {}: {}: {e}", mount.uid, socket.display()),
            format!("ask with the {} that it was started with", locate::RUNTIME_DIR_ENV),
        )),
        Some((socket, e)) => {
            if let MountServer::Process(keeper) = find_server(mount, &locate::list_mounts().unwrap_or_default()) {
                return Err(out_of_reach(
                    format!(
                        "the mount at {at} has no process at present: no process answers at {}; its keeper, process {keeper}, \
                         starts the next, and programs wait",
                        socket.display()
                    ),
                    format!(
                        "ask again in a moment; its log says why the last ended; spurline umount {at} ends the mount"
                    ),
                ));
            }
            let what = format!(
                "the process of the mount at {at} is gone, it was killed or crashed; no process answers at {}: {e}",
                socket.display()
            );
            let remedy = format!("spurline umount {at}, then mount it again; its log may say why");
            Err(Fault::missing(what, remedy).into())
        }
        None => {
            let no_socket = format!("the mount at {at} has no admin socket where this user looks");
            let elsewhere = format!("ask with the {} that it was started with", locate::RUNTIME_DIR_ENV);
            Err(match find_server(mount, &locate::list_mounts().unwrap_or_default()) {
                MountServer::Process(pid) => out_of_reach(format!("{no_socket}, and runs as process {pid}"), elsewhere),
                MountServer::None => {
                    let what = format!(
                        "the process of the mount at {at} is gone, and its admin socket with it: no process of this \
                         machine has the mount open; when it ended nothing here tells"
                    );
                    let remedy = format!("spurline umount {at}, then mount it again; its log may say more");
                    Fault::missing(what, remedy).into()
                }
                MountServer::Unseen if is_of_another(mount) => of_user(mount),
                MountServer::Unseen => out_of_reach(
                    format!("{no_socket}, and whether its process runs can't be seen from here"),
                    format!(
                        "{elsewhere}, on the host and not in a container; where its process is gone: spurline umount {at}"
                    ),
                ),
            })
        }
    }
}

/// Whether this user can't query the mount's process.
fn is_of_another(mount: &SpurlineMount) -> bool {
    let user = rustix::process::geteuid();
    mount.uid != user.as_raw() && !user.is_root()
}

/// The error for the mount of another user.
fn of_user(mount: &SpurlineMount) -> UnreachableProcess {
    let what = format!("the mount at {} belongs to user {}", mount.mountpoint.display(), mount.uid);
    let fault = Fault::missing(what, "ask as that user or as root");
    UnreachableProcess { fault, absence: ProcessAbsence::OfUser(mount.uid) }
}

fn process_at_socket(path: &Path, user: Option<u32>) -> Result<AdminPeer, UnreachableProcess> {
    match dial::probe_socket(path, user) {
        Ok(()) => Ok(AdminPeer::Socket(path.to_owned(), user)),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Err(not_permitted(path, &e)),
        Err(e) => {
            let what = format!("no process answers at the admin socket {}: {e}", path.display());
            Err(Fault::missing(what, "start it again").into())
        }
    }
}

/// The admin socket for a node of this machine, the metrics address for any other.
fn node_process(address: &HostPort) -> AdminPeer {
    let name = address.to_string();
    let mut called = own_candidates(SocketOwner::Node(&name)).into_iter().map(own_peer);
    let called =
        called.find(|peer| matches!(peer, AdminPeer::Socket(at, user) if dial::probe_socket(at, *user).is_ok()));
    called.or_else(|| by_other_address(&name)).unwrap_or(AdminPeer::Http(name))
}

/// The socket of a local process that listens at the address; the socket is named by the first address.
fn by_other_address(name: &str) -> Option<AdminPeer> {
    let here: Vec<IpAddr> = local_addresses().ok()?.into_iter().map(|local| local.ip).collect();
    let mut wanted = resolve_address(name, Instant::now() + SEARCH_QUERY_TIMEOUT).ok()?;
    wanted.retain(|at| at.ip().is_loopback() || here.contains(&at.ip()));
    if wanted.is_empty() {
        return None;
    }
    let processes: Vec<_> = node_sockets()
        .into_iter()
        .filter_map(|(_, socket)| {
            let peer = own_peer(socket);
            let status = peer.fetch_status(SEARCH_QUERY_TIMEOUT).ok()?;
            let addresses = status.addresses().iter().filter_map(|at| at.parse().ok());
            Some((peer, addresses.collect::<Vec<SocketAddr>>()))
        })
        .collect();
    let find = |is: &dyn Fn(&SocketAddr) -> bool| {
        processes.iter().find(|(_, addresses)| addresses.iter().any(is)).map(|(peer, _)| peer.clone())
    };
    // localhost means this machine, also when no process listens at the loopback address.
    find(&|at| wanted.contains(at))
        .or_else(|| find(&|at| wanted.iter().any(|w| w.ip().is_loopback() && w.port() == at.port())))
}

/// The admin sockets of this user's nodes and coordinators, by name, whether or not a process answers there.
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

/// The process at a socket in this user's directories.
fn own_peer(socket: PathBuf) -> AdminPeer {
    let user = locate::required_owner(&socket);
    AdminPeer::Socket(socket, Some(user))
}

fn own_candidates(owner: SocketOwner<'_>) -> Vec<PathBuf> {
    locate::socket_candidates(owner, rustix::process::geteuid().as_raw())
}

/// A name, and the process.
pub type NamedProcess = (String, Result<AdminPeer, UnreachableProcess>);

/// All processes of this user (for root, of all users) on this machine: mounts, then nodes.
///
/// # Errors
/// When /proc is not mounted.
pub fn all_processes() -> Result<Vec<NamedProcess>, Fault> {
    let mut all: Vec<NamedProcess> = Vec::new();
    for mount in locate::list_mounts()? {
        all.push((mount.mountpoint.display().to_string(), mount_process(&mount)));
    }
    for (node, socket) in node_sockets() {
        if !all.iter().any(|(known, _)| *known == node)
            && let Ok(peer) = process_at_socket(&socket, Some(locate::required_owner(&socket)))
        {
            all.push((node, Ok(peer)));
        }
    }
    if all.iter().all(|(_, peer)| is_foreign(peer)) {
        // Without access, there may be processes in this user's directories.
        let dirs = locate::runtime_dirs(rustix::process::geteuid().as_raw()).into_iter();
        let unseen = dirs.filter_map(|dir| Some((std::fs::read_dir(&dir).err()?, dir)));
        let mut unseen = unseen.filter(|(error, _)| error.kind() == ErrorKind::PermissionDenied);
        all.extend(unseen.next().map(|(error, dir)| (dir.display().to_string(), Err(not_permitted(&dir, &error)))));
    }
    Ok(all)
}

/// Whether the process of a mount belongs to another user.
pub fn is_foreign(peer: &Result<AdminPeer, UnreachableProcess>) -> bool {
    peer.as_ref().is_err_and(|absent| matches!(absent.absence, ProcessAbsence::OfUser(_)))
}

/// Whether a directory of root's processes exists that this user can't read.
pub fn may_have_processes_of_root() -> bool {
    locate::runtime_dirs(0)
        .iter()
        .any(|dir| std::fs::read_dir(dir).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied))
}
