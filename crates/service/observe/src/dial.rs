//! Connections to admin sockets: whose they are, and that none is waited for without end. A process that stands still takes
//! none, and those that ask it again and again fill its queue. What is asked is not known here.

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

/// Whether somebody listens at a socket, told without waiting: also of a process that stands still. It has to be one of
/// `user` or of root, where that is given and can be told.
///
/// # Errors
/// When nobody listens there, it may not be asked, or another user's process has the place.
pub fn look(path: &Path, user: Option<u32>) -> Result<()> {
    match to(path, SocketFlags::NONBLOCK, None) {
        Ok(stream) => belongs(&stream, path, user),
        // Its queue is full, so there is one.
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error),
    }
}

/// The process that listens at a socket; not told of one in another process namespace, or of one whose queue is full.
pub fn process(path: &Path) -> Option<Pid> {
    let stream = to(path, SocketFlags::NONBLOCK, None).ok()?;
    Some(socket_peercred(&stream).ok()?.pid)
}

/// Connects to a socket of `user` or of root, all of whose reads and writes end at `until`.
pub(crate) fn open(path: &Path, user: Option<u32>, until: Instant) -> Result<Until<UnixStream>> {
    let stream = to(path, SocketFlags::empty(), Some(until))?;
    belongs(&stream, path, user)?;
    Ok(Until { stream, until })
}

fn to(path: &Path, flags: SocketFlags, until: Option<Instant>) -> Result<UnixStream> {
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags | SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        if let Some(until) = until {
            set_socket_timeout(&socket, Timeout::Send, Some(left(until)?))?;
        }
        match connect(&socket, &address) {
            Err(Errno::INTR) => {}
            done => return done.map(|()| socket.into()).map_err(Error::from),
        }
    }
}

/// Whoever comes first can listen at a place in `/tmp`, and say what they like.
fn belongs(stream: &UnixStream, path: &Path, user: Option<u32>) -> Result<()> {
    let Some(user) = user else { return Ok(()) };
    let theirs = match socket_peercred(stream) {
        Ok(peer) => peer.uid.as_raw(),
        // Of a process in another process namespace nothing is told; who made the socket is.
        Err(_) => std::fs::symlink_metadata(path)?.uid(),
    };
    if theirs == user || theirs == 0 || is_home_of(path, theirs) {
        return Ok(());
    }
    let why = format!("a process of user {theirs} answers there, in the place of user {user}'s");
    Err(Error::new(ErrorKind::PermissionDenied, why))
}

/// Whether the socket lies in a directory of that user's which only who may write above it can have made: a service's below
/// `/run`, say, of a user of its own.
fn is_home_of(path: &Path, user: u32) -> bool {
    let Some(dir) = path.parent() else { return false };
    let own = std::fs::symlink_metadata(dir).is_ok_and(|dir| dir.is_dir() && dir.uid() == user);
    let above = dir.parent().and_then(|above| std::fs::metadata(above).ok());
    own && above.is_some_and(|above| above.mode() & 0o022 == 0)
}

/// The time until then, of which there has to be some.
pub(crate) fn left(until: Instant) -> Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A connection all of whose reads and writes together end at a time, however little comes at once.
pub(crate) struct Until<S> {
    pub stream: S,
    pub until: Instant,
}

impl<S: Read + AsFd> Read for Until<S> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        set_socket_timeout(&self.stream, Timeout::Recv, Some(left(self.until)?))?;
        self.stream.read(into)
    }
}

impl<S: Write + AsFd> Write for Until<S> {
    fn write(&mut self, from: &[u8]) -> Result<usize> {
        set_socket_timeout(&self.stream, Timeout::Send, Some(left(self.until)?))?;
        self.stream.write(from)
    }
    fn flush(&mut self) -> Result<()> {
        self.stream.flush()
    }
}
