//! All open files and directories of a mount, and its files with bytes that are not durable. It knows no requests of programs.

use super::{AdoptedFile, FileOpening, LockGrace, OpenFile, renew_locks};
use crate::remote::GroupClient;
use crate::writes::bytes::{FileBytes, SendQueue, WriteMemory};
use crate::writes::calls::{CallDeadline, CallTarget, HomeProcess, WriteCalls};
use parking_lot::Mutex;
use spurline_proto::{LOCK_TIMES, MAX_WRITE, WriteAnswer, WriteCall};
use spurline_types::open_flags::O_TRUNC;
use spurline_types::{Error, Result};
use spurline_volume::delayed::WriteLosses;
use spurline_volume::writes::{Caller, FileIdentity, KnownNames};
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};

/// Rounds of the renewal of locks between renewals of sessions.
const SESSION_RENEWAL_ROUNDS: u32 =
    (LOCK_TIMES.session_renewal.as_millis() / LOCK_TIMES.lock_renewal.as_millis()) as u32;

/// The file system continues with all its open files within this many rounds.
const EARLIER_SYNC_ROUNDS: u32 = 60;

/// The open files of a mount.
pub(crate) struct OpenFiles {
    pub client: Arc<GroupClient>,
    pub calls: Arc<WriteCalls>,
    /// The names that the file system over this volume knows.
    pub known_names: OnceLock<Weak<dyn KnownNames>>,
    /// Open files and directories by their numbers, whose paths move with renames.
    opened: Mutex<HashMap<u64, Weak<OpenFile>>>,
    /// Files with bytes that are not durable.
    pub(super) files: Mutex<HashMap<FileIdentity, Weak<FileBytes>>>,
    pub(super) memory: Arc<WriteMemory>,
    pub(super) queue: Arc<SendQueue>,
    /// Open files that the program has closed while no node took their bytes.
    pub(super) closing: Mutex<HashMap<u64, Arc<OpenFile>>>,
    /// A sync to make room is under way.
    pub(super) making_room: AtomicBool,
    pub losses: Mutex<WriteLosses>,
    pub lock_grace: LockGrace,
    /// For the threads, which end when the last file does.
    pub(super) this: Weak<OpenFiles>,
}

impl OpenFiles {
    /// No open files, and `memory` bytes for what is not durable.
    pub fn new(client: Arc<GroupClient>, calls: Arc<WriteCalls>, memory: u64) -> Arc<OpenFiles> {
        let memory = WriteMemory::new(client.tier.pool(), memory, &client.stats);
        Arc::new_cyclic(|this| OpenFiles {
            client,
            calls,
            known_names: OnceLock::new(),
            opened: Mutex::default(),
            files: Mutex::default(),
            memory,
            queue: Arc::default(),
            closing: Mutex::default(),
            making_room: AtomicBool::new(false),
            losses: Mutex::default(),
            lock_grace: LockGrace::default(),
            this: Weak::clone(this),
        })
    }

    /// Starts the threads that renew locks and sessions, send bytes, and close files.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn start(&self) -> Result<()> {
        self.start_renewal()?;
        if self.calls.goes_on() {
            self.start_earlier_syncs()?;
        }
        self.start_senders()?;
        self.start_closing()
    }

    /// As [`OpenFiles::start`], where nothing but paths is opened.
    pub fn start_locks(&self) -> Result<()> {
        self.start_renewal()?;
        self.start_closing()
    }

    /// Keeps the sessions and locks on nodes that have files open, although nothing happens to them.
    fn start_renewal(&self) -> Result<()> {
        let this = Weak::clone(&self.this);
        let spawned = std::thread::Builder::new().name("renew-writes".into()).spawn(move || {
            for round in 1u32.. {
                std::thread::sleep(LOCK_TIMES.lock_renewal);
                let Some(files) = this.upgrade() else { return };
                let open = files.open_files();
                open.iter().filter(|file| file.has_locks()).for_each(|file| renew_locks(&files, file));
                if !round.is_multiple_of(SESSION_RENEWAL_ROUNDS) {
                    continue;
                }
                let root = Caller::default();
                for home in files.homes() {
                    // A node that can't be reached now has its files opened elsewhere when they are used.
                    let target = CallTarget::Process(&home);
                    let _ = files.calls.query(target, &WriteCall::Renew, &root, files.calls.begin());
                }
            }
        });
        spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// Makes bytes of earlier processes durable, in files that the file system continues with by then.
    fn start_earlier_syncs(&self) -> Result<()> {
        let this = Weak::clone(&self.this);
        let spawned = std::thread::Builder::new().name("sync-earlier".into()).spawn(move || {
            for round in 1.. {
                std::thread::sleep(LOCK_TIMES.lock_renewal);
                let Some(files) = this.upgrade() else { return };
                if files.sync_earlier_bytes() && round >= EARLIER_SYNC_ROUNDS {
                    return;
                }
            }
        });
        spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// The processes that have files of this mount open.
    fn homes(&self) -> Vec<HomeProcess> {
        let mut homes: Vec<HomeProcess> = Vec::new();
        for file in self.open_files() {
            let home = file.home();
            if !homes.contains(&home) {
                homes.push(home);
            }
        }
        homes
    }

    /// The most bytes of one request: a node receives them into one buffer, and its largest is a block.
    pub fn most_bytes(&self) -> usize {
        usize::try_from(self.client.block_size()).unwrap_or(MAX_WRITE).min(MAX_WRITE)
    }

    /// Paths of open files follow a rename.
    pub fn move_open_files(&self, from: &[u8], to: &[u8], exchange: bool) {
        let mut opened = self.opened.lock();
        opened.retain(|_, file| match file.upgrade() {
            None => false,
            Some(file) => {
                file.follow_rename(from, to, exchange);
                true
            }
        });
    }

    pub fn names(&self) -> Option<Arc<dyn KnownNames>> {
        self.known_names.get().and_then(Weak::upgrade)
    }

    pub fn stats(&self) -> &spurline_types::stats::Writes {
        &self.client.stats.writes
    }

    /// All open files and directories.
    pub fn open_files(&self) -> Vec<Arc<OpenFile>> {
        self.opened.lock().values().filter_map(Weak::upgrade).collect()
    }

    pub fn open_file(&self, number: u64) -> Option<Arc<OpenFile>> {
        self.opened.lock().get(&number).and_then(Weak::upgrade)
    }

    pub fn add_open(&self, opened: OpenFile) -> Arc<OpenFile> {
        let opened = Arc::new(opened);
        self.opened.lock().insert(opened.number(), Arc::downgrade(&opened));
        opened
    }

    pub fn remove_open(&self, number: u64) {
        self.opened.lock().remove(&number);
    }

    /// Adds a file that a node has opened.
    pub fn add_file(&self, path: Vec<u8>, opened: FileOpening<'_>) -> Arc<OpenFile> {
        let bytes = self.bytes_of(opened.attr.identity);
        bytes.raise_end(opened.attr.size);
        if opened.flags & O_TRUNC != 0 {
            self.cut_bytes(&bytes, 0);
        }
        self.add_open(OpenFile::new(opened, path, bytes))
    }

    /// Whether a process has the file with this number open; `None` if it can't be reached.
    pub fn is_open_at(&self, process: &HomeProcess, number: u64, deadline: CallDeadline) -> Option<bool> {
        let call = WriteCall::StatOpen { file: number };
        let sent = self.calls.query(CallTarget::Process(process), &call, &Caller::default(), deadline);
        sent.ok().map(|sent| sent.answer != WriteAnswer::UnknownFile)
    }

    /// Adds a file that a node has open for an earlier process.
    pub fn adopt_file(&self, path: Vec<u8>, adopted: AdoptedFile<'_>) -> Arc<OpenFile> {
        let bytes = self.bytes_of(adopted.identity);
        self.add_open(OpenFile::adopted(adopted, path, bytes))
    }
}

impl Drop for OpenFiles {
    fn drop(&mut self) {
        self.queue.end();
        self.calls.end_closes();
    }
}
