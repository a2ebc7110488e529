//! Open files of a mount's process that a keeper holds for the next process. The files have a conversation of their own, which a
//! thread of the keeper serves: an open waits for no other message. Knows the names of the files, and not what they are.
//!
//! The keeper sends all stored files and an end mark, and then takes files and names of closed files.

use crate::descriptor_socket::{conversation, receive_message, send_message};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of a file's name.
pub const STORED_NAME_BYTES: usize = 17;
/// The name of a stored file.
pub type StoredName = [u8; STORED_NAME_BYTES];

/// How long a process waits for a keeper that takes no file.
const SEND_LIMIT: Duration = Duration::from_secs(1);
/// The thread of the keeper needs little.
const STACK_BYTES: usize = 64 << 10;

const STORE: u8 = 1;
const CLOSE: u8 = 2;
const END: u8 = 3;

/// A message: its kind, and a name.
struct FileMessage {
    kind: u8,
    name: StoredName,
    file: Option<OwnedFd>,
}

fn send(socket: &OwnedFd, kind: u8, name: &StoredName, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut bytes = [kind; 1 + STORED_NAME_BYTES];
    bytes[1..].copy_from_slice(name);
    send_message(socket, &bytes, file.as_slice())
}

/// The next message; `None` at the end of the other side.
fn receive(socket: &OwnedFd) -> Option<FileMessage> {
    let mut bytes = [0; 1 + STORED_NAME_BYTES];
    let received = receive_message(socket, &mut bytes).ok()?;
    if received.len == 0 {
        return None;
    }
    let mut name = [0; STORED_NAME_BYTES];
    name.copy_from_slice(&bytes[1..]);
    Some(FileMessage { kind: bytes[0], name, file: received.descriptors.into_iter().next() })
}

/// The keeper's side.
#[derive(Debug)]
pub(crate) struct FileStore {
    files: HashMap<StoredName, OwnedFd>,
    /// How many.
    count: Arc<AtomicUsize>,
}

impl FileStore {
    /// No files; their number is shown in `count`.
    pub(crate) fn new(count: Arc<AtomicUsize>) -> FileStore {
        FileStore { files: HashMap::new(), count }
    }

    /// Serves a process until that has ended; with the process's side of the conversation.
    pub(crate) fn serve(self) -> io::Result<(JoinHandle<FileStore>, OwnedFd)> {
        let (ours, theirs) = conversation()?;
        let thread = std::thread::Builder::new().name("stored-files".into()).stack_size(STACK_BYTES);
        Ok((thread.spawn(move || self.converse(&ours))?, theirs))
    }

    fn converse(mut self, socket: &OwnedFd) -> FileStore {
        // A process that is gone already is found below.
        let all = self.files.iter().try_for_each(|(name, file)| send(socket, STORE, name, Some(file.as_fd())));
        let _ = all.and_then(|()| send(socket, END, &[0; STORED_NAME_BYTES], None));
        while let Some(FileMessage { kind, name, file }) = receive(socket) {
            match (kind, file) {
                (STORE, Some(file)) => {
                    self.files.insert(name, file);
                }
                // Without a free descriptor, the file has not arrived.
                _ => {
                    self.files.remove(&name);
                }
            }
            self.count.store(self.files.len(), Ordering::SeqCst);
        }
        self
    }
}

/// The side of the mount's process.
#[derive(Debug)]
pub struct StoredFiles {
    socket: OwnedFd,
}

impl StoredFiles {
    /// Begins the conversation; with the files of the processes before.
    ///
    /// # Errors
    /// When the keeper is gone.
    pub fn begin(socket: OwnedFd) -> io::Result<(StoredFiles, HashMap<StoredName, OwnedFd>)> {
        let mut files = HashMap::new();
        loop {
            match receive(&socket) {
                Some(FileMessage { kind: STORE, name, file: Some(file) }) => files.insert(name, file),
                Some(FileMessage { kind: END, .. }) => break,
                Some(_) => None,
                None => return Err(io::Error::other("the keeper of this mount gave no open files")),
            };
        }
        set_socket_timeout(&socket, Timeout::Send, Some(SEND_LIMIT))?;
        Ok((StoredFiles { socket }, files))
    }

    /// Stores a duplicate of a file, in place of another of the same name.
    ///
    /// # Errors
    /// When the keeper is gone, or takes nothing.
    pub fn store(&self, name: &StoredName, file: BorrowedFd<'_>) -> io::Result<()> {
        send(&self.socket, STORE, name, Some(file))
    }

    /// Closes a stored file.
    ///
    /// # Errors
    /// As [`StoredFiles::store`].
    pub fn close(&self, name: &StoredName) -> io::Result<()> {
        send(&self.socket, CLOSE, name, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Seek as _, Write as _};

    #[test]
    fn the_next_process_gets_what_was_stored_and_not_closed() {
        let mut file =
            std::fs::File::from(rustix::fs::memfd_create("stored", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all(b"bytes").unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        let (thread, socket) = FileStore::new(Arc::clone(&count)).serve().unwrap();
        let (link, before) = StoredFiles::begin(socket).unwrap();
        assert!(before.is_empty());
        let names = [[1; STORED_NAME_BYTES], [2; STORED_NAME_BYTES], [3; STORED_NAME_BYTES]];
        for name in &names {
            link.store(name, file.as_fd()).unwrap();
        }
        link.close(&names[1]).unwrap();
        link.store(&names[2], file.as_fd()).unwrap();
        drop((link, file));
        let (thread, socket) = thread.join().unwrap().serve().unwrap();
        // A process that ends at once changes nothing.
        drop(socket);
        let (thread, socket) = thread.join().unwrap().serve().unwrap();
        let (link, mut stored) = StoredFiles::begin(socket).unwrap();
        let mut kept: Vec<StoredName> = stored.keys().copied().collect();
        kept.sort_unstable();
        assert_eq!(kept, [names[0], names[2]]);
        let mut file = std::fs::File::from(stored.remove(&names[0]).unwrap());
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "bytes");
        drop(link);
        assert_eq!(thread.join().unwrap().files.len(), 2);
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }
}
