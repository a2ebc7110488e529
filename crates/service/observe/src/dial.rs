//! Connections to admin sockets: checks the owner, and bounds every wait. A stopped process accepts no connections, and repeated
//! requests fill the queue there. Does not know the requests.

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::Pid;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Whether a process listens at a socket, determined without waiting, also for a stopped process. The process must
/// belong to `user` or root, if a user is given and the owner can be determined.
///
/// # Errors
/// When no process listens there, access is denied, or another user's process listens there.
pub fn probe_socket(path: &Path, user: Option<u32>) -> Result<()> {
    match connect_socket(path, SocketFlags::NONBLOCK, None) {
        Ok(stream) => check_owner(&stream, path, user),
        // The queue is full, so a process listens.
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error),
    }
}

/// The process that listens at a socket; `None` for a process in another PID namespace, or with a full queue.
pub fn listener_process(path: &Path) -> Option<Pid> {
    let stream = connect_socket(path, SocketFlags::NONBLOCK, None).ok()?;
    Some(socket_peercred(&stream).ok()?.pid)
}

/// Connects to a socket of `user` or of root. All reads and writes end at `until`.
pub(crate) fn connect_until(path: &Path, user: Option<u32>, until: Instant) -> Result<DeadlineStream<UnixStream>> {
    let stream = connect_socket(path, SocketFlags::empty(), Some(until))?;
    check_owner(&stream, path, user)?;
    Ok(DeadlineStream { stream, until })
}

fn connect_socket(path: &Path, flags: SocketFlags, until: Option<Instant>) -> Result<UnixStream> {
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags | SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        if let Some(until) = until {
            set_socket_timeout(&socket, Timeout::Send, Some(time_left(until)?))?;
        }
        match connect(&socket, &address) {
            Err(Errno::INTR) => {}
            done => return done.map(|()| socket.into()).map_err(Error::from),
        }
    }
}

/// Any user can create a socket in `/tmp` and send any reply.
fn check_owner(stream: &UnixStream, path: &Path, user: Option<u32>) -> Result<()> {
    let Some(user) = user else { return Ok(()) };
    let owner = match socket_peercred(stream) {
        Ok(peer) => peer.uid.as_raw(),
        // The kernel reports no owner for a process in another PID namespace; the socket file's owner serves instead.
        Err(_) => std::fs::symlink_metadata(path)?.uid(),
    };
    if owner == user || owner == 0 || is_home_of(path, owner) {
        return Ok(());
    }
    let why = format!("a process of user {owner} listens there, in the place of user {user}'s");
    Err(Error::new(ErrorKind::PermissionDenied, why))
}

/// Whether the socket is in a directory of that user which only a privileged user can have made, for example a
/// service's directory below `/run`.
fn is_home_of(path: &Path, user: u32) -> bool {
    let Some(dir) = path.parent() else { return false };
    let own = std::fs::symlink_metadata(dir).is_ok_and(|dir| dir.is_dir() && dir.uid() == user);
    let above = dir.parent().and_then(|above| std::fs::metadata(above).ok());
    own && above.is_some_and(|above| above.mode() & 0o022 == 0)
}

/// The time left until `until`; an error if none.
pub(crate) fn time_left(until: Instant) -> Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A connection whose reads and writes together end at a given time, however slowly data arrives.
pub(crate) struct DeadlineStream<S> {
    pub stream: S,
    pub until: Instant,
}

impl<S: Read + AsFd> Read for DeadlineStream<S> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        set_socket_timeout(&self.stream, Timeout::Recv, Some(time_left(self.until)?))?;
        self.stream.read(into)
    }
}

impl<S: Write + AsFd> Write for DeadlineStream<S> {
    fn write(&mut self, from: &[u8]) -> Result<usize> {
        set_socket_timeout(&self.stream, Timeout::Send, Some(time_left(self.until)?))?;
        self.stream.write(from)
    }
    fn flush(&mut self) -> Result<()> {
        self.stream.flush()
    }
}
