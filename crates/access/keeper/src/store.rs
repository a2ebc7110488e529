//! Copies of a mount's descriptors outside of the keeper. In a container the keeper ends with everything else there, and the keeper of
//! the next container continues the mount with these copies. Both ends are here: the store, which listens at a socket, and the
//! keeper's link, which connects again after a restart of the process with the store.

use crate::messages::{KeeperMessage, KeptMount, LifeOrder, monotonic_ns};
use crate::stored_files::{FileConversation, FileStore};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, shutdown,
    socket_with,
};
use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The environment variable with the path of the socket.
pub const STORE_VARIABLE: &str = "SPURLINE_DESCRIPTOR_STORE";
/// Connections that wait: of the keeper, and of the next.
const STORE_BACKLOG: i32 = 4;
/// How long the store may take to answer a new connection.
const STORE_ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// The interval of attempts to connect again.
pub(crate) const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The store of a mount.
#[derive(Debug)]
pub struct DescriptorStore {
    shared: Arc<SharedStore>,
}

#[derive(Debug)]
struct SharedStore {
    listener: OwnedFd,
    held: Mutex<HeldMount>,
}

#[derive(Debug, Default)]
struct HeldMount {
    mount: Option<KeptMount>,
    /// When the last keeper was gone, by [`monotonic_ns`].
    ended_at_ns: u64,
    /// The connection of the keeper.
    keeper: Option<Arc<OwnedFd>>,
    /// The open files of the keeper.
    files: FileStore,
    is_closed: bool,
}

/// A process of the mount, as the keeper has reported it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedProcess {
    /// Earlier processes of the mount.
    pub takeovers: u64,
    /// Why the process before ended; empty at first.
    pub cause: String,
}

impl DescriptorStore {
    /// Listens at `path`, in the place of a socket that an earlier store left.
    ///
    /// # Errors
    /// When no socket can be made there.
    pub fn listen(path: &Path) -> io::Result<DescriptorStore> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = store_socket(SocketFlags::empty())?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        listen(&listener, STORE_BACKLOG)?;
        let shared = Arc::new(SharedStore { listener, held: Mutex::default() });
        let served = Arc::clone(&shared);
        std::thread::Builder::new().name("descriptor-store".into()).spawn(move || served.serve())?;
        Ok(DescriptorStore { shared })
    }

    /// Whether the copies belong to a mount that lives.
    pub fn holds_mount(&self) -> bool {
        self.shared.held.lock().mount.as_ref().is_some_and(|mount| !mount.descriptors.is_dead())
    }

    /// The last process that the keeper has reported.
    pub fn last_process(&self) -> Option<ReportedProcess> {
        let held = self.shared.held.lock();
        let mount = held.mount.as_ref()?;
        Some(ReportedProcess { takeovers: mount.takeovers, cause: mount.cause.clone() })
    }

    /// Lets the mount end: a stop signal to the keeper now unmounts, and no other keeper follows.
    pub fn end(self) {
        if let Some(keeper) = &self.shared.held.lock().keeper {
            // A keeper that is gone needs no message.
            let _ = KeeperMessage::End.send(keeper);
        }
    }
}

impl Drop for DescriptorStore {
    fn drop(&mut self) {
        let mut held = self.shared.held.lock();
        held.is_closed = true;
        held.mount = None;
        // Wakes the thread.
        let _ = shutdown(&self.shared.listener, Shutdown::Both);
        if let Some(keeper) = held.keeper.take() {
            let _ = shutdown(&*keeper, Shutdown::Both);
        }
    }
}

impl SharedStore {
    fn serve(&self) {
        loop {
            match accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(keeper) => self.serve_keeper(&Arc::new(keeper)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) if self.held.lock().is_closed => return,
                // No descriptor is free, for example.
                Err(_) => std::thread::sleep(STORE_RETRY_INTERVAL),
            }
        }
    }

    fn serve_keeper(&self, keeper: &Arc<OwnedFd>) {
        let files = self.held.lock().files.clone();
        let Ok(FileConversation { thread, own_socket, peer_socket }) = files.serve() else { return };
        self.converse(keeper, peer_socket);
        // What the keeper has sent before its end is read, and no more.
        let _ = shutdown(&*own_socket, Shutdown::Both);
        let _ = thread.join();
    }

    /// Takes the messages of a keeper, until the end of that.
    fn converse(&self, keeper: &Arc<OwnedFd>, files: OwnedFd) {
        let Ok(order) = self.next_order(files) else { return };
        if KeeperMessage::Order(order).send(keeper).is_err() {
            return;
        }
        {
            let mut held = self.held.lock();
            if held.is_closed {
                return;
            }
            held.keeper = Some(Arc::clone(keeper));
        }
        while let Ok(Some(message)) = KeeperMessage::receive(keeper) {
            let mut held = self.held.lock();
            if held.is_closed {
                return;
            }
            if let KeeperMessage::Keep(mount) = message {
                held.mount = Some(mount);
            }
        }
        let mut held = self.held.lock();
        held.keeper = None;
        held.ended_at_ns = monotonic_ns();
    }

    /// The order to the next keeper, whose process follows the last one that was reported.
    fn next_order(&self, files: OwnedFd) -> io::Result<LifeOrder> {
        let held = self.held.lock();
        let order = LifeOrder { keeper: std::process::id(), files: Some(files), ..LifeOrder::default() };
        let Some(mount) = &held.mount else { return Ok(order) };
        Ok(LifeOrder {
            takeovers: mount.takeovers + 1,
            cause: "its keeper ended".into(),
            ended_at_ns: held.ended_at_ns,
            unread_files: mount.files.as_ref().map(OwnedFd::try_clone).transpose()?,
            kept: Some(mount.descriptors.duplicate()?),
            ..order
        })
    }
}

fn store_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)?)
}

/// The keeper's link to the store.
#[derive(Debug)]
pub struct StoreLink {
    path: PathBuf,
    socket: Option<OwnedFd>,
}

impl StoreLink {
    /// The link to the store that the environment names.
    pub fn from_environment() -> Option<StoreLink> {
        let path: OsString = std::env::var_os(STORE_VARIABLE)?;
        Some(StoreLink { path: path.into(), socket: None })
    }

    /// Connects; returns the order of the store, with the descriptors there.
    ///
    /// # Errors
    /// When the store does not answer.
    pub(crate) fn connect(&mut self) -> io::Result<LifeOrder> {
        // A process that is stopped accepts no connection, and the keeper does not wait for that.
        let socket = store_socket(SocketFlags::NONBLOCK)?;
        connect(&socket, &SocketAddrUnix::new(&self.path)?)?;
        let limit = Timespec::try_from(STORE_ANSWER_LIMIT).map_err(io::Error::other)?;
        if poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match KeeperMessage::receive(&socket)? {
            Some(KeeperMessage::Order(order)) => {
                self.socket = Some(socket);
                Ok(order)
            }
            _ => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// Gives copies to the store; without a connection the copies follow after the next connect. Returns the conversation about open
    /// files of a connection that was made now.
    pub(crate) fn keep(&mut self, mount: KeptMount) -> Option<OwnedFd> {
        let files = if self.socket.is_none() { self.connect().ok()?.files } else { None };
        if KeeperMessage::Keep(mount).send(self.socket.as_ref()?).is_err() {
            self.socket = None;
        }
        files
    }

    /// Reads a message of the store; whether the mount is to end.
    pub(crate) fn read_end(&mut self) -> bool {
        match self.socket.as_ref().map(KeeperMessage::receive) {
            Some(Ok(Some(KeeperMessage::End))) => true,
            Some(Ok(Some(_))) | None => false,
            Some(Ok(None) | Err(_)) => {
                self.socket = None;
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::KeptDescriptors;
    use crate::stored_files::{STORED_NAME_BYTES, StoredFiles};
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::time::Instant;

    /// Descriptors that stand for those of a mount.
    fn descriptors() -> KeptDescriptors {
        let open = || File::open("/dev/null").unwrap().into();
        KeptDescriptors { device: open(), state: open() }
    }

    fn mount(takeovers: u64, cause: &str) -> KeptMount {
        KeptMount { descriptors: descriptors(), takeovers, cause: cause.to_owned(), files: None }
    }

    fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_next_keeper_gets_what_the_last_has_kept() {
        let dir = std::env::temp_dir().join(format!("spurline-store-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("store");
        let link = || StoreLink { path: path.clone(), socket: None };
        let store = DescriptorStore::listen(&path).unwrap();
        let mut first = link();
        let order = first.connect().unwrap();
        assert!(order.kept.is_none() && !store.holds_mount());
        let (files, before) = StoredFiles::begin(order.files.unwrap()).unwrap();
        assert!(before.is_empty());
        let name = [1; STORED_NAME_BYTES];
        files.store(&name, descriptors().device.as_fd()).unwrap();
        first.keep(mount(2, "killed"));
        wait_until("the copies", || store.holds_mount());
        let last = ReportedProcess { takeovers: 2, cause: "killed".into() };
        assert_eq!(store.last_process(), Some(last));
        // The copies of files are read although the keeper has ended.
        drop((first, files));
        let mut second = link();
        let order = second.connect().unwrap();
        assert!(order.kept.is_some() && order.ended_at_ns > 0);
        let (_, stored) = StoredFiles::begin(order.files.unwrap()).unwrap();
        assert!(stored.len() == 1 && stored.contains_key(&name));
        assert_eq!((order.takeovers, order.cause.as_str()), (3, "its keeper ended"));

        // Another store in the place of the first knows nothing until the keeper has connected again.
        drop(store);
        wait_until("the end of the connection", || {
            assert!(!second.read_end());
            second.socket().is_none()
        });
        second.keep(mount(3, ""));
        assert!(second.socket().is_none());
        let store = DescriptorStore::listen(&path).unwrap();
        second.keep(mount(3, ""));
        wait_until("the copies", || store.holds_mount());
        store.end();
        wait_until("the end of the mount", || second.read_end());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
