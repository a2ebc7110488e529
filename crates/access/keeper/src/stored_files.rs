//! Open files of a mount's process that a keeper holds for the next process, and a store for the next keeper. The files have a
//! conversation of their own, which a thread of the holder serves: an open waits for no other message. Knows the names of the files,
//! and not what they are.
//!
//! The holder sends all stored files and an end mark, and then takes files and names of closed files. A keeper has the same conversation
//! with the store: there the keeper is the side that gives the files.

use crate::descriptor_socket::{conversation, receive_as, send_message};
use parking_lot::Mutex;
use rustix::net::RecvFlags;
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
/// How long another holder may take to answer.
const HOLDER_ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// The thread of a holder needs little.
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
    receive_with(socket, RecvFlags::empty())
}

fn receive_with(socket: &OwnedFd, flags: RecvFlags) -> Option<FileMessage> {
    let mut bytes = [0; 1 + STORED_NAME_BYTES];
    let received = receive_as(socket, &mut bytes, flags).ok()?;
    if received.len == 0 {
        return None;
    }
    let mut name = [0; STORED_NAME_BYTES];
    name.copy_from_slice(&bytes[1..]);
    Some(FileMessage { kind: bytes[0], name, file: received.descriptors.into_iter().next() })
}

/// Files by their names, and the holder of the same files outside of this process.
#[derive(Debug, Default)]
struct HeldFiles {
    files: HashMap<StoredName, OwnedFd>,
    mirror: Option<StoredFiles>,
}

impl HeldFiles {
    /// Stores a file, or forgets a closed one. A mirror that takes nothing is abandoned.
    fn change(&mut self, name: StoredName, file: Option<OwnedFd>) {
        let mirrored = match (&self.mirror, &file) {
            (Some(mirror), Some(file)) => mirror.store(&name, file.as_fd()),
            (Some(mirror), None) => mirror.close(&name),
            (None, _) => Ok(()),
        };
        if mirrored.is_err() {
            self.mirror = None;
        }
        match file {
            Some(file) => drop(self.files.insert(name, file)),
            None => drop(self.files.remove(&name)),
        }
    }
}

/// The side that holds the files: a keeper, and outside of its container the store.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileStore {
    held: Arc<Mutex<HeldFiles>>,
    /// Files that only this process holds.
    only_here: Arc<AtomicUsize>,
}

/// A conversation of the side that holds the files.
pub(crate) struct FileConversation {
    /// Ends with the other side.
    pub thread: JoinHandle<()>,
    /// The socket of this side.
    pub own_socket: Arc<OwnedFd>,
    /// The socket for the other side.
    pub peer_socket: OwnedFd,
}

impl FileStore {
    /// No files. The number of files that only this process holds is shown in `only_here`.
    pub(crate) fn new(only_here: Arc<AtomicUsize>) -> FileStore {
        FileStore { held: Arc::default(), only_here }
    }

    fn show_count(&self, held: &HeldFiles) {
        let count = if held.mirror.is_some() { 0 } else { held.files.len() };
        self.only_here.store(count, Ordering::SeqCst);
    }

    /// Begins to serve another process, until the end of that.
    pub(crate) fn serve(&self) -> io::Result<FileConversation> {
        let (own_socket, peer_socket) = conversation()?;
        let own_socket = Arc::new(own_socket);
        let socket = Arc::clone(&own_socket);
        let store = self.clone();
        let thread = std::thread::Builder::new().name("stored-files".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || store.converse(&socket))?;
        Ok(FileConversation { thread, own_socket, peer_socket })
    }

    fn converse(&self, socket: &OwnedFd) {
        {
            let held = self.held.lock();
            // A process that is gone already is found below.
            let all = held.files.iter().try_for_each(|(name, file)| send(socket, STORE, name, Some(file.as_fd())));
            let _ = all.and_then(|()| send(socket, END, &[0; STORED_NAME_BYTES], None));
        }
        // A message leaves the socket once the mirror has it: if this process ends before, the next keeper reads the message.
        while let Some(message) = receive_with(socket, RecvFlags::PEEK) {
            self.take(message);
            let _ = receive(socket);
        }
    }

    fn take(&self, message: FileMessage) {
        let FileMessage { kind, name, file } = message;
        let file = match kind {
            // Without a free descriptor, a file has not arrived.
            STORE => file,
            CLOSE => None,
            // Of another release.
            _ => return,
        };
        let mut held = self.held.lock();
        held.change(name, file);
        self.show_count(&held);
    }

    /// Takes the messages that a process has left in the socket of a keeper that has ended.
    pub(crate) fn take_unread(&self, socket: &OwnedFd) {
        while let Some(message) = receive_with(socket, RecvFlags::DONTWAIT) {
            self.take(message);
        }
    }

    /// Continues with the files of another holder, which gets all changes from now on.
    ///
    /// # Errors
    /// When the holder does not answer.
    pub(crate) fn continue_from(&self, holder: OwnedFd) -> io::Result<()> {
        let (mirror, files) = begin_mirror(holder)?;
        let mut held = self.held.lock();
        *held = HeldFiles { files, mirror: Some(mirror) };
        self.show_count(&held);
        Ok(())
    }

    /// Gives the files to another holder, which gets all changes from now on. Files there that are not held here are closed.
    ///
    /// # Errors
    /// When the holder does not answer.
    pub(crate) fn mirror_to(&self, holder: OwnedFd) -> io::Result<()> {
        let (mirror, outdated) = begin_mirror(holder)?;
        let mut held = self.held.lock();
        outdated.keys().filter(|name| !held.files.contains_key(*name)).try_for_each(|name| mirror.close(name))?;
        held.files.iter().try_for_each(|(name, file)| mirror.store(name, file.as_fd()))?;
        held.mirror = Some(mirror);
        self.show_count(&held);
        Ok(())
    }

    /// The other holder is gone.
    pub(crate) fn forget_mirror(&self) {
        let mut held = self.held.lock();
        held.mirror = None;
        self.show_count(&held);
    }
}

fn begin_mirror(holder: OwnedFd) -> io::Result<(StoredFiles, HashMap<StoredName, OwnedFd>)> {
    // A holder that is stopped answers nothing, and the keeper does not wait for that.
    set_socket_timeout(&holder, Timeout::Recv, Some(HOLDER_ANSWER_LIMIT))?;
    StoredFiles::begin(holder)
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
        let store = FileStore::new(Arc::clone(&count));
        let first = store.serve().unwrap();
        let (link, before) = StoredFiles::begin(first.peer_socket).unwrap();
        assert!(before.is_empty());
        let names = [[1; STORED_NAME_BYTES], [2; STORED_NAME_BYTES], [3; STORED_NAME_BYTES]];
        for name in &names {
            link.store(name, file.as_fd()).unwrap();
        }
        link.close(&names[1]).unwrap();
        link.store(&names[2], file.as_fd()).unwrap();
        drop((link, file));
        first.thread.join().unwrap();
        // A process that ends at once changes nothing.
        let second = store.serve().unwrap();
        drop(second.peer_socket);
        second.thread.join().unwrap();
        let third = store.serve().unwrap();
        let (link, mut stored) = StoredFiles::begin(third.peer_socket).unwrap();
        let mut kept: Vec<StoredName> = stored.keys().copied().collect();
        kept.sort_unstable();
        assert_eq!(kept, [names[0], names[2]]);
        let mut file = std::fs::File::from(stored.remove(&names[0]).unwrap());
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "bytes");
        drop(link);
        third.thread.join().unwrap();
        assert_eq!(store.held.lock().files.len(), 2);
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn another_holder_has_the_files_of_a_keeper_that_has_ended() {
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let names = |store: &FileStore| {
            let mut names: Vec<StoredName> = store.held.lock().files.keys().copied().collect();
            names.sort_unstable();
            names
        };
        let only_here = Arc::new(AtomicUsize::new(0));
        let (outside, keeper) = (FileStore::default(), FileStore::new(Arc::clone(&only_here)));
        let [one, two, three] = [1, 2, 3].map(|first| [first; STORED_NAME_BYTES]);
        outside.held.lock().change(one, Some(open()));
        keeper.held.lock().change(two, Some(open()));
        let conversation = outside.serve().unwrap();
        keeper.mirror_to(conversation.peer_socket).unwrap();
        let process = keeper.serve().unwrap();
        let (link, before) = StoredFiles::begin(process.peer_socket).unwrap();
        assert_eq!(before.len(), 1);
        link.store(&three, open().as_fd()).unwrap();
        link.close(&two).unwrap();
        drop(link);
        process.thread.join().unwrap();
        assert_eq!(only_here.load(Ordering::SeqCst), 0, "the other holder has the file, too");
        // The keeper ends.
        keeper.forget_mirror();
        assert_eq!(only_here.load(Ordering::SeqCst), 1);
        conversation.thread.join().unwrap();
        assert_eq!(names(&outside), [three]);

        // A message that no keeper has read comes after these.
        let (unread, process) = crate::descriptor_socket::conversation().unwrap();
        send(&process, STORE, &two, Some(open().as_fd())).unwrap();
        let next = FileStore::default();
        next.continue_from(outside.serve().unwrap().peer_socket).unwrap();
        next.take_unread(&unread);
        assert_eq!(names(&next), [two, three]);
    }
}
