//! Version 4 of the state of a mount. Does not know who keeps the file, nor other versions.
//!
//! The file is a table of words. A block is a header word and a body; the header says kind and length, so that blocks follow each
//! other without an index. A body is complete before its header says so, and a removed block keeps its length for ever, so that each
//! store leaves a table that can be read. Free blocks are found again by reading the table.

mod client;

use super::{AT_MAGIC, AT_VERSION, MAGIC};
use crate::init::InitAgreement;
pub(crate) use client::set_thread_request;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use spurline_fs::{
    KeptChange, KeptHandle, KeptInode, KeptLock, KeptName, KeptNode, KeptRecord, KeptRecords, KeptVersion, MadeChange,
    RecordSlot,
};
use spurline_types::{FileKind, unix_time};
use spurline_volume::kept_client::{HeldFile, SentChange};
use spurline_volume::writes::{FileIdentity, FileLock, LockFamily, LockKind, LockRange};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

/// The version of this table.
pub const VERSION: u64 = 4;
/// Words of the table's own header.
const HEADER_WORDS: usize = 16;
const AT_MINOR: usize = 2;
const AT_FLAGS: usize = 3;
/// The client of nodes: the session, the last number that is reserved, and the number of processes.
const AT_SESSION: usize = 5;
const AT_NUMBERS: usize = 6;
const AT_CLIENTS: usize = 7;

/// Lengths of blocks in words, header included. The longest holds the longest path.
const BLOCK_WORDS: [usize; 11] = [8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024];

const KIND_END: u64 = 0;
const KIND_FREE: u64 = 1;
const KIND_INODE: u64 = 2;
const KIND_HANDLE: u64 = 3;
const KIND_MOUNT: u64 = 4;
const KIND_NODE: u64 = 5;
const KIND_NAME: u64 = 6;
const KIND_LOCK: u64 = 7;
const KIND_CHANGE: u64 = 8;
/// The kinds of records, in the order in which a successor needs them.
const RECORD_KINDS: [u64; 6] = [KIND_INODE, KIND_NODE, KIND_NAME, KIND_HANDLE, KIND_LOCK, KIND_CHANGE];

/// Words of a change: its state, the fact before, the count, whether there is an object, and that; then number, process and place
/// of what was sent, and the two objects that were known.
const CHANGE_WORDS: usize = 4 + IDENTITY_WORDS + 3 + 2 * KNOWN_WORDS;
/// The first word of what was sent, from the header of a change.
const AT_SENT: usize = 5 + IDENTITY_WORDS;
/// Words of an object that may be there.
const KNOWN_WORDS: usize = 1 + IDENTITY_WORDS;
/// The number of a process has 22 bits at most, and is above the flags of a handle.
const OPENER_SHIFT: u32 = 40;
/// The word of a handle with its flags, from the header.
const AT_HANDLE_FLAGS: usize = 5;
/// The first word of a handle about the file at a node: its number, node and process.
const AT_HELD: usize = 7;
/// The mark of a handle whose file a node is about to close.
const HANDLE_CLOSING: u64 = 1 << 35;
/// States of a change.
const CHANGE_NONE: u64 = 0;
const CHANGE_BEGUN: u64 = 1;
const CHANGE_MADE: u64 = 2;
const IDENTITY_WORDS: usize = FileIdentity::LEN / 8;

/// Words of an inode before the texts.
const INODE_WORDS: usize = 10;
/// The mark of a missing etag in a length.
const NO_ETAG: u64 = 0xffff;
/// The table of a mount has at least this length, and at most `u32::MAX` words.
const TABLE_MIN_BYTES: u64 = 4 << 20;
const TABLE_MAX_BYTES: u64 = 16 << 30;

/// The state of a mount.
pub struct KeptState {
    /// The state was written from that of another version.
    pub(super) is_converted: bool,
    file: OwnedFd,
    words: &'static [AtomicU64],
    blocks: Mutex<FreeBlocks>,
    /// Records of changes whose threads have ended.
    idle_changes: Arc<Mutex<Vec<RecordSlot>>>,
    /// What processes before have sent, by the requests.
    earlier_sent: Mutex<HashMap<u64, SentChange>>,
}

thread_local! {
    /// The record of this thread's last change.
    static THREAD_CHANGE: RefCell<Option<ThreadChange>> = const { RefCell::new(None) };
}

/// A record of changes that belongs to a thread.
struct ThreadChange {
    slot: RecordSlot,
    idle: Weak<Mutex<Vec<RecordSlot>>>,
}

impl Drop for ThreadChange {
    fn drop(&mut self) {
        if let Some(idle) = self.idle.upgrade() {
            idle.lock().push(self.slot);
        }
    }
}

#[derive(Default)]
struct FreeBlocks {
    free: [Vec<u32>; BLOCK_WORDS.len()],
    /// The first word that was never used.
    end: usize,
    used_words: usize,
    /// Records for which there was no room.
    refused: u64,
}

fn header(kind: u64, class: usize) -> u64 {
    kind | (class as u64) << 8
}

impl KeptState {
    /// An empty state, for records of at most so many bytes.
    ///
    /// # Errors
    /// When the system has no memory file.
    pub fn create(bytes: u64) -> io::Result<KeptState> {
        let file = memfd_create("spurline-mount", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes.clamp(TABLE_MIN_BYTES, TABLE_MAX_BYTES))?;
        let state = KeptState::map(file)?;
        state.words[AT_VERSION].store(VERSION, Ordering::Relaxed);
        state.words[AT_MAGIC].store(MAGIC, Ordering::Release);
        Ok(state)
    }

    /// The state of a process before, of this version.
    ///
    /// # Errors
    /// When the system can't map the memory file.
    pub(super) fn open_same(file: OwnedFd) -> io::Result<KeptState> {
        let state = KeptState::map(file)?;
        state.find_blocks();
        state.find_sent();
        Ok(state)
    }

    fn map(file: OwnedFd) -> io::Result<KeptState> {
        let len = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
        if len < HEADER_WORDS * 8 {
            return Err(io::Error::other("the kept memory is too short"));
        }
        // SAFETY: a new shared mapping at an address of the kernel's choice; the descriptor is open.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping is page-aligned, has `len` bytes, and stays until the state is dropped, which lends no words; any bytes are
        // valid words, and all access is atomic. The file is never made shorter.
        let words = unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), len / 8) };
        let blocks = Mutex::new(FreeBlocks { end: HEADER_WORDS, ..FreeBlocks::default() });
        Ok(KeptState {
            is_converted: false,
            file,
            words,
            blocks,
            idle_changes: Arc::default(),
            earlier_sent: Mutex::default(),
        })
    }

    /// The memory file once more.
    ///
    /// # Errors
    /// When no descriptor is free.
    pub fn duplicate_file(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// The length of the table, in bytes.
    pub(super) fn len_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// Memory in use, in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.blocks.lock().used_words as u64 * 8
    }

    /// Records for which there was no room since this process started.
    pub fn refused_records(&self) -> u64 {
        self.blocks.lock().refused
    }

    /// Keeps where the mount is and which source it shows.
    pub fn keep_mount(&self, mountpoint: &Path, settings: &str) -> RecordSlot {
        let mountpoint = mountpoint.as_os_str().as_encoded_bytes();
        let lens = mountpoint.len() as u64 | (settings.len() as u64) << 32;
        self.add_block(KIND_MOUNT, &[lens], &[mountpoint, settings.as_bytes()])
    }

    /// The mountpoint, and the settings that [`KeptState::keep_mount`] was given.
    pub fn mount(&self) -> Option<(PathBuf, String)> {
        let mut found = None;
        self.for_each_block(|at, kind, class| {
            if kind == KIND_MOUNT {
                let lens = self.word(at + 1);
                let texts = self.bytes_at(at + 2, BLOCK_WORDS[class] - 2);
                let (place, rest) = texts.split_at((lens as u32 as usize).min(texts.len()));
                let settings = &rest[..((lens >> 32) as usize).min(rest.len())];
                let place = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(place);
                found = Some((PathBuf::from(place), String::from_utf8_lossy(settings).into_owned()));
            }
        });
        found
    }

    pub(crate) fn set_agreement(&self, agreed: &InitAgreement) {
        let flags =
            u64::from(agreed.passthrough) | u64::from(agreed.create_group) << 1 | u64::from(agreed.direct_mmap) << 2;
        self.words[AT_FLAGS].store(flags, Ordering::Relaxed);
        self.words[AT_MINOR].store(agreed.minor.into(), Ordering::Release);
    }

    /// What was agreed with the kernel; `None` before that.
    pub(crate) fn agreement(&self) -> Option<InitAgreement> {
        let minor = self.words[AT_MINOR].load(Ordering::Acquire) as u32;
        let flags = self.word(AT_FLAGS);
        (minor > 0).then_some(InitAgreement {
            minor,
            passthrough: flags & 1 != 0,
            uring: false,
            create_group: flags & 2 != 0,
            direct_mmap: flags & 4 != 0,
        })
    }

    fn word(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::Relaxed)
    }

    fn bytes_at(&self, at: usize, words: usize) -> Vec<u8> {
        self.words[at..at + words].iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    /// Calls `f` with place, kind and class of each block; returns the end.
    fn for_each_block(&self, mut f: impl FnMut(usize, u64, usize)) -> usize {
        let mut at = HEADER_WORDS;
        while at < self.words.len() {
            let header = self.words[at].load(Ordering::Acquire);
            let kind = header & 0xff;
            let class = (header >> 8) as usize;
            if kind == KIND_END || class >= BLOCK_WORDS.len() || at + BLOCK_WORDS[class] > self.words.len() {
                break;
            }
            f(at, kind, class);
            at += BLOCK_WORDS[class];
        }
        at
    }

    fn find_blocks(&self) {
        let mut blocks = FreeBlocks::default();
        blocks.end = self.for_each_block(|at, kind, class| {
            if kind == KIND_FREE {
                blocks.free[class].push(at as u32);
            } else {
                blocks.used_words += BLOCK_WORDS[class];
            }
        });
        *self.blocks.lock() = blocks;
    }

    /// A free block of this class, else a new one, else a longer one that is free; with its class.
    fn take_block(&self, blocks: &mut FreeBlocks, wanted: usize) -> Option<(usize, usize)> {
        if let Some(at) = blocks.free[wanted].pop() {
            return Some((at as usize, wanted));
        }
        if blocks.end + BLOCK_WORDS[wanted] > self.words.len() {
            return (wanted + 1..BLOCK_WORDS.len()).find_map(|class| Some((blocks.free[class].pop()? as usize, class)));
        }
        // Under the lock until the header is written: a block after a missing header would be lost.
        let at = blocks.end;
        self.words[at].store(header(KIND_FREE, wanted), Ordering::Release);
        blocks.end += BLOCK_WORDS[wanted];
        Some((at, wanted))
    }

    /// Adds a block of numbers and texts; 0 if there is no room.
    fn add_block(&self, kind: u64, numbers: &[u64], texts: &[&[u8]]) -> RecordSlot {
        let text_bytes: usize = texts.iter().map(|text| text.len()).sum();
        let wanted = 1 + numbers.len() + text_bytes.div_ceil(8);
        let Some(class) = BLOCK_WORDS.iter().position(|words| *words >= wanted) else {
            self.blocks.lock().refused += 1;
            return 0;
        };
        let mut blocks = self.blocks.lock();
        let Some((at, class)) = self.take_block(&mut blocks, class) else {
            blocks.refused += 1;
            return 0;
        };
        blocks.used_words += BLOCK_WORDS[class];
        drop(blocks);
        for (place, number) in self.words[at + 1..].iter().zip(numbers) {
            place.store(*number, Ordering::Relaxed);
        }
        let mut place = self.words[at + 1 + numbers.len()..].iter();
        let mut word = [0; 8];
        let mut filled = 0;
        for byte in texts.iter().flat_map(|text| text.iter()) {
            word[filled] = *byte;
            filled += 1;
            if filled == word.len() {
                if let Some(place) = place.next() {
                    place.store(u64::from_le_bytes(word), Ordering::Relaxed);
                }
                filled = 0;
            }
        }
        if filled > 0
            && let Some(place) = place.next()
        {
            place.store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        self.words[at].store(header(kind, class), Ordering::Release);
        at as u32
    }

    fn read_inode(&self, at: usize, class: usize, visit: &mut dyn FnMut(RecordSlot, &KeptRecord<'_>)) {
        let packed = self.word(at + 3);
        let lens = self.word(at + 7);
        let grown_lens = self.word(at + 9);
        let texts = self.bytes_at(at + 1 + INODE_WORDS, BLOCK_WORDS[class] - 1 - INODE_WORDS);
        let mut rest = &*texts;
        let path = take_text(&mut rest, lens & 0xffff);
        let first = take_version(&mut rest, self.word(at + 6), lens >> 16);
        let grown = take_version(&mut rest, self.word(at + 8), grown_lens);
        let seconds = Duration::from_secs(self.word(at + 4).cast_signed().unsigned_abs());
        let nanos = Duration::from_nanos(self.word(at + 5));
        let mtime = if self.word(at + 4).cast_signed() < 0 {
            SystemTime::UNIX_EPOCH - seconds + nanos
        } else {
            SystemTime::UNIX_EPOCH + seconds + nanos
        };
        let kind = match packed & 0xff {
            0 => FileKind::File,
            1 => FileKind::Directory,
            _ => FileKind::Symlink,
        };
        let inode = KeptInode {
            ino: self.word(at + 1),
            kind,
            lookups: self.word(at + 2),
            mtime,
            mode: (packed >> 8) as u16,
            path,
            first,
            grown: (packed >> 24 & 1 == 1).then_some(grown),
        };
        visit(at as u32, &KeptRecord::Inode(inode));
    }

    fn keep_inode(&self, inode: &KeptInode<'_>) -> RecordSlot {
        let (seconds, nanos) = unix_time(inode.mtime);
        let kind = match inode.kind {
            FileKind::File => 0,
            FileKind::Directory => 1,
            FileKind::Symlink => 2,
        };
        let none = KeptVersion { size: 0, version: "", etag: None };
        let grown = inode.grown.unwrap_or(none);
        let packed = kind | u64::from(inode.mode) << 8 | u64::from(inode.grown.is_some()) << 24;
        let numbers: [u64; INODE_WORDS] = [
            inode.ino,
            inode.lookups,
            packed,
            seconds.cast_unsigned(),
            u64::from(nanos),
            inode.first.size,
            inode.path.len() as u64 | version_lens(&inode.first) << 16,
            grown.size,
            version_lens(&grown),
            0,
        ];
        let texts = [
            inode.path,
            inode.first.version.as_bytes(),
            inode.first.etag.unwrap_or_default().as_bytes(),
            grown.version.as_bytes(),
            grown.etag.unwrap_or_default().as_bytes(),
        ];
        self.add_block(KIND_INODE, &numbers, &texts)
    }

    fn keep_node(&self, node: &KeptNode) -> RecordSlot {
        let flags = u64::from(node.identity.is_lasting())
            | u64::from(node.directory) << 1
            | u64::from(node.known_generation.is_some()) << 2
            | u64::from(node.removed.is_some()) << 3;
        let [mode, uid, gid] = node.removed.unwrap_or_default().map(u64::from);
        let known_generation = node.known_generation.unwrap_or(0);
        let identity = identity_words(&node.identity);
        let numbers = [node.ino, node.lookups, flags, known_generation, mode, uid << 32 | gid];
        self.add_block(KIND_NODE, &[&numbers[..], &identity].concat(), &[])
    }

    fn read_node(&self, at: usize) -> KeptNode {
        let flags = self.word(at + 3);
        let owner = self.word(at + 6);
        KeptNode {
            ino: self.word(at + 1),
            lookups: self.word(at + 2),
            identity: self.identity_at(at + 7, flags & 1 != 0),
            known_generation: (flags & 4 != 0).then(|| self.word(at + 4)),
            directory: flags & 2 != 0,
            removed: (flags & 8 != 0).then(|| [self.word(at + 5) as u32, (owner >> 32) as u32, owner as u32]),
        }
    }

    fn keep_handle(&self, handle: &KeptHandle) -> RecordSlot {
        let backing = u64::from(handle.backing_id.cast_unsigned());
        let flags = u64::from(handle.flags.cast_unsigned())
            | u64::from(handle.directory) << 32
            | u64::from(handle.direct_writer) << 33
            | u64::from(handle.held.is_some()) << 34
            | if handle.held.is_some_and(|held| held.closing) { HANDLE_CLOSING } else { 0 }
            | u64::from(handle.opener) << OPENER_SHIFT;
        let numbers = [handle.fh, handle.ino, backing, handle.request, flags];
        let Some(held) = handle.held else { return self.add_block(KIND_HANDLE, &numbers, &[]) };
        let [uid, gid] = handle.owner.map(u64::from);
        let held = [uid << 32 | gid, held.number, held.node, held.process];
        self.add_block(KIND_HANDLE, &[&numbers[..], &held].concat(), &[])
    }

    fn read_handle(&self, at: usize) -> KeptHandle {
        let flags = self.word(at + AT_HANDLE_FLAGS);
        let is_held = flags >> 34 & 1 != 0;
        let owner = if is_held { self.word(at + 6) } else { 0 };
        let held = is_held.then(|| HeldFile {
            number: self.word(at + AT_HELD),
            node: self.word(at + AT_HELD + 1),
            process: self.word(at + AT_HELD + 2),
            closing: flags & HANDLE_CLOSING != 0,
        });
        KeptHandle {
            owner: [(owner >> 32) as u32, owner as u32],
            held,
            fh: self.word(at + 1),
            ino: self.word(at + 2),
            backing_id: (self.word(at + 3) as u32).cast_signed(),
            request: self.word(at + 4),
            flags: (flags as u32).cast_signed(),
            directory: flags >> 32 & 1 != 0,
            direct_writer: flags >> 33 & 1 != 0,
            opener: (flags >> OPENER_SHIFT) as u32,
        }
    }

    fn keep_lock(&self, kept: &KeptLock) -> RecordSlot {
        let KeptLock { ino, fh, lock, pid } = *kept;
        let kind = match lock.kind {
            LockKind::Read => 0,
            LockKind::Write => 1,
            LockKind::Unlock => 2,
        };
        let packed = u64::from(pid) | kind << 32 | u64::from(lock.family == LockFamily::Flock) << 40;
        self.add_block(KIND_LOCK, &[ino, fh, lock.owner, lock.range.start, lock.range.end, packed], &[])
    }

    fn read_lock(&self, at: usize) -> KeptLock {
        let packed = self.word(at + 6);
        let kind = match packed >> 32 & 0xff {
            0 => LockKind::Read,
            1 => LockKind::Write,
            _ => LockKind::Unlock,
        };
        let family = if packed >> 40 & 1 == 0 { LockFamily::Posix } else { LockFamily::Flock };
        let range = LockRange { start: self.word(at + 4), end: self.word(at + 5) };
        let lock = FileLock { family, owner: self.word(at + 3), range, kind };
        KeptLock { ino: self.word(at + 1), fh: self.word(at + 2), lock, pid: packed as u32 }
    }

    /// `None` where no request is recorded.
    fn read_change(&self, at: usize) -> Option<KeptChange> {
        let state = self.word(at + 1);
        let object = self.known_at(at + 4);
        let made = (state & 3 == CHANGE_MADE).then(|| MadeChange { count: self.word(at + 3), object });
        (state != CHANGE_NONE).then(|| KeptChange {
            request: state >> 2,
            before: self.word(at + 2),
            made,
            sent: self.read_sent(at),
        })
    }

    /// Writes how far a request has come, unless `slot` is 0.
    fn write_change(&self, slot: RecordSlot, change: &KeptChange) {
        let slot = slot as usize;
        if slot == 0 {
            return;
        }
        let state = &self.words[slot + 1];
        self.begin_record(slot, change);
        let Some(made) = change.made else { return };
        self.words[slot + 3].store(made.count, Ordering::Relaxed);
        store_known(&self.words[slot + 4..], made.object.as_ref());
        state.store(change.request << 2 | CHANGE_MADE, Ordering::Release);
    }

    /// A record of this request, which has made nothing yet, in place of another request's.
    fn begin_record(&self, slot: usize, change: &KeptChange) {
        let state = &self.words[slot + 1];
        if state.load(Ordering::Relaxed) >> 2 == change.request {
            return;
        }
        state.store(CHANGE_NONE, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        self.words[slot + 2].store(change.before, Ordering::Relaxed);
        self.words[slot + 4].store(0, Ordering::Relaxed);
        self.write_sent(slot, &change.sent);
        state.store(change.request << 2 | CHANGE_BEGUN, Ordering::Release);
    }

    /// The object that may be there, as [`store_known`] writes it.
    fn known_at(&self, at: usize) -> Option<FileIdentity> {
        match self.word(at) {
            0 => None,
            lasting => Some(self.identity_at(at + 1, lasting == 1)),
        }
    }

    fn identity_at(&self, at: usize, lasting: bool) -> FileIdentity {
        let mut bytes = [0; FileIdentity::LEN];
        bytes.copy_from_slice(&self.bytes_at(at, IDENTITY_WORDS));
        FileIdentity::new(bytes, lasting)
    }

    /// The record that this thread has for its changes; 0 if it has none.
    fn present_change(&self) -> RecordSlot {
        THREAD_CHANGE.with_borrow(|change| match change {
            Some(change) if std::ptr::eq(change.idle.as_ptr(), Arc::as_ptr(&self.idle_changes)) => change.slot,
            _ => 0,
        })
    }

    /// The record of this thread's changes; 0 if there is no room.
    fn thread_change(&self) -> RecordSlot {
        let present = self.present_change();
        if present != 0 {
            return present;
        }
        let free = self.idle_changes.lock().pop();
        let slot = free.unwrap_or_else(|| self.add_block(KIND_CHANGE, &[0; CHANGE_WORDS], &[]));
        if slot != 0 {
            THREAD_CHANGE.set(Some(ThreadChange { slot, idle: Arc::downgrade(&self.idle_changes) }));
        }
        slot
    }
}

/// Writes an object that may be there.
fn store_known(words: &[AtomicU64], known: Option<&FileIdentity>) {
    if let Some(identity) = known {
        for (place, word) in words[1..].iter().zip(identity_words(identity)) {
            place.store(word, Ordering::Relaxed);
        }
    }
    let kind = known.map_or(0, |identity| if identity.is_lasting() { 1 } else { 2 });
    words[0].store(kind, Ordering::Relaxed);
}

fn identity_words(identity: &FileIdentity) -> [u64; IDENTITY_WORDS] {
    let mut words = [0; IDENTITY_WORDS];
    for (word, bytes) in words.iter_mut().zip(identity.bytes().as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// The next text of `len` bytes.
fn take_text<'a>(rest: &mut &'a [u8], len: u64) -> &'a [u8] {
    let (text, after) = rest.split_at((len as usize).min(rest.len()));
    *rest = after;
    text
}

/// A version by the lengths of its two texts, 16 bits each.
fn take_version<'a>(rest: &mut &'a [u8], size: u64, lens: u64) -> KeptVersion<'a> {
    let version = std::str::from_utf8(take_text(rest, lens & 0xffff)).unwrap_or_default();
    let etag_len = lens >> 16 & 0xffff;
    let etag = (etag_len != NO_ETAG).then(|| std::str::from_utf8(take_text(rest, etag_len)).unwrap_or_default());
    KeptVersion { size, version, etag }
}

fn version_lens(version: &KeptVersion<'_>) -> u64 {
    version.version.len() as u64 | version.etag.map_or(NO_ETAG, |etag| etag.len() as u64) << 16
}

impl KeptRecords for KeptState {
    fn keep(&self, record: &KeptRecord<'_>) -> RecordSlot {
        match record {
            KeptRecord::Inode(inode) => self.keep_inode(inode),
            KeptRecord::Node(node) => self.keep_node(node),
            KeptRecord::Name(KeptName { ino, parent, name }) => {
                self.add_block(KIND_NAME, &[*ino, *parent, name.len() as u64], &[name])
            }
            KeptRecord::Handle(handle) => self.keep_handle(handle),
            KeptRecord::Lock(lock) => self.keep_lock(lock),
            KeptRecord::Change(change) => {
                let slot = self.add_block(KIND_CHANGE, &[0; CHANGE_WORDS], &[]);
                self.write_change(slot, change);
                slot
            }
        }
    }

    fn add_lookup(&self, slot: RecordSlot) {
        if slot != 0 {
            self.words[slot as usize + 2].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn sub_lookups(&self, slot: RecordSlot, n: u64) {
        if slot != 0 {
            let left = |lookups: u64| Some(lookups.saturating_sub(n));
            let _ = self.words[slot as usize + 2].fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        }
    }

    fn note_closing(&self, slot: RecordSlot) {
        if slot != 0 {
            self.words[slot as usize + AT_HANDLE_FLAGS].fetch_or(HANDLE_CLOSING, Ordering::Relaxed);
        }
    }

    fn remove_record(&self, slot: RecordSlot) {
        if slot == 0 {
            return;
        }
        let at = slot as usize;
        let class = (self.words[at].load(Ordering::Relaxed) >> 8) as usize;
        self.words[at].store(header(KIND_FREE, class), Ordering::Release);
        let mut blocks = self.blocks.lock();
        blocks.used_words -= BLOCK_WORDS[class];
        blocks.free[class].push(slot);
    }

    fn for_each(&self, visit: &mut dyn FnMut(RecordSlot, &KeptRecord<'_>)) {
        for wanted in RECORD_KINDS {
            self.for_each_block(|at, kind, class| {
                let slot = at as u32;
                match kind {
                    _ if kind != wanted => {}
                    KIND_INODE => self.read_inode(at, class, visit),
                    KIND_NODE => visit(slot, &KeptRecord::Node(self.read_node(at))),
                    KIND_NAME => {
                        let text = self.bytes_at(at + 4, BLOCK_WORDS[class] - 4);
                        let name = &text[..(self.word(at + 3) as usize).min(text.len())];
                        let name = KeptName { ino: self.word(at + 1), parent: self.word(at + 2), name };
                        visit(slot, &KeptRecord::Name(name));
                    }
                    KIND_HANDLE => visit(slot, &KeptRecord::Handle(self.read_handle(at))),
                    KIND_LOCK => visit(slot, &KeptRecord::Lock(self.read_lock(at))),
                    _ => {
                        // A record without a request belongs to a thread of this process, or will.
                        if let Some(change) = self.read_change(at) {
                            visit(slot, &KeptRecord::Change(change));
                        }
                    }
                }
            });
        }
    }

    fn note_change(&self, change: &KeptChange) {
        self.write_change(self.thread_change(), change);
    }
}

impl Drop for KeptState {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and nothing has words of the mapping after this.
        unsafe { libc::munmap(self.words.as_ptr().cast_mut().cast(), self.words.len() * 8) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inode<'a>(ino: u64, path: &'a [u8], grown: Option<KeptVersion<'a>>) -> KeptInode<'a> {
        KeptInode {
            ino,
            kind: FileKind::File,
            lookups: 1,
            mtime: SystemTime::UNIX_EPOCH + Duration::from_nanos(1_700_000_000_000_000_005),
            mode: 0o644,
            path,
            first: KeptVersion { size: 9, version: "first-version", etag: Some("an etag") },
            grown,
        }
    }

    #[test]
    fn a_successor_reads_what_was_kept_and_uses_free_blocks_again() {
        let state = KeptState::create(0).unwrap();
        assert!(state.agreement().is_none());
        let agreed =
            InitAgreement { minor: 45, passthrough: true, uring: false, create_group: false, direct_mmap: true };
        state.set_agreement(&agreed);
        state.keep_mount(Path::new("/mnt/a"), "rw=no");
        let longer = KeptVersion { size: 19, version: "second", etag: None };
        let long_path = vec![b'p'; 4000];
        let slots = [
            state.keep_inode(&inode(5, b"a/b", None)),
            state.keep_inode(&inode(6, &long_path, Some(longer))),
            state.keep_inode(&inode(7, b"", None)),
        ];
        state.add_lookup(slots[0]);
        state.add_lookup(slots[0]);
        state.sub_lookups(slots[1], 7);
        let handle = KeptHandle { fh: u64::MAX - 1, ino: 5, backing_id: 3, flags: -1, ..KeptHandle::default() };
        let closed = state.keep_handle(&KeptHandle { fh: 1, ..handle });
        state.keep_handle(&handle);
        state.remove_record(slots[2]);
        state.remove_record(closed);
        let used = state.used_bytes();
        let next = KeptState::open_same(state.duplicate_file().unwrap()).unwrap();
        assert_eq!(next.agreement(), Some(agreed));
        assert_eq!(next.mount(), Some(("/mnt/a".into(), "rw=no".into())));
        assert_eq!(next.used_bytes(), used);
        let mut found = Vec::new();
        let mut handles = Vec::new();
        next.for_each(&mut |_, record| match record {
            KeptRecord::Inode(kept) => {
                let sizes = (kept.first.size, kept.grown.map(|grown| grown.size));
                assert_eq!(kept.first, inode(0, b"", None).first);
                assert_eq!((kept.mtime, kept.mode), (inode(0, b"", None).mtime, 0o644));
                found.push((kept.ino, kept.lookups, kept.path.to_vec(), sizes));
            }
            KeptRecord::Handle(kept) => handles.push(*kept),
            other => panic!("{other:?}"),
        });
        assert_eq!(found, [(5, 3, b"a/b".to_vec(), (9, None)), (6, 0, long_path, (9, Some(19)))]);
        assert_eq!(handles, [handle]);
        assert_eq!(next.keep_handle(&handle), closed, "a free block of the same length");
        assert_eq!(next.refused_records(), 0);
        next.keep_inode(&inode(8, &[b'p'; 9000], None));
        assert_eq!(next.refused_records(), 1);
    }

    #[test]
    fn records_of_a_writable_mount_are_read_as_they_were_kept() {
        let state = KeptState::create(0).unwrap();
        let identity = FileIdentity::new([7; FileIdentity::LEN], true);
        let removed = Some([0o40755, 1000, u32::MAX]);
        let node = KeptNode { ino: 9, lookups: 2, identity, known_generation: Some(4), directory: true, removed };
        let name = KeptName { ino: 9, parent: 1, name: b"a name that is longer than a word" };
        let range = LockRange { start: 3, end: u64::MAX };
        let lock = FileLock { family: LockFamily::Flock, owner: u64::MAX, range, kind: LockKind::Read };
        let lock = KeptLock { ino: 9, fh: 8, lock, pid: u32::MAX };
        let made = Some(MadeChange { count: 5, object: Some(identity) });
        let change = KeptChange { request: 1 << 61, before: 77, made, ..KeptChange::default() };
        for record in [KeptRecord::Lock(lock), KeptRecord::Name(name), KeptRecord::Node(node)] {
            assert_ne!(state.keep(&record), 0);
        }
        state.note_change(&KeptChange { request: 6, ..KeptChange::default() });
        state.note_change(&KeptChange { made: None, ..change });
        state.note_change(&change);
        // The record of a thread that has ended, which a join waits for, serves the next.
        for (request, before) in [(8, 1), (10, 2)] {
            let change = KeptChange { request, before, ..KeptChange::default() };
            std::thread::scope(|scope| scope.spawn(|| state.note_change(&change)).join().unwrap());
        }
        let next = KeptState::open_same(state.duplicate_file().unwrap()).unwrap();
        let mut seen = Vec::new();
        next.for_each(&mut |_, record| seen.push(format!("{record:?}")));
        let second = KeptChange { request: 10, before: 2, ..KeptChange::default() };
        let wanted = [
            KeptRecord::Node(node),
            KeptRecord::Name(name),
            KeptRecord::Lock(lock),
            KeptRecord::Change(change),
            KeptRecord::Change(second),
        ];
        assert_eq!(seen, wanted.map(|record| format!("{record:?}")));
    }

    #[test]
    fn a_full_table_uses_longer_free_blocks_and_counts_what_it_refuses() {
        let state = KeptState::create(0).unwrap();
        let path = [b'p'; 1000];
        let mut slots = Vec::new();
        while slots.last() != Some(&0) {
            slots.push(state.keep_inode(&inode(slots.len() as u64 + 2, &path, None)));
        }
        assert_eq!(state.refused_records(), 1);
        // The rest of the table has no room for a long block, and some for short ones.
        while state.keep_inode(&inode(9, b"", None)) != 0 {}
        assert_eq!(state.refused_records(), 2);
        state.remove_record(slots[3]);
        assert_eq!(state.keep_inode(&inode(9, b"short", None)), slots[3]);
        let next = KeptState::open_same(state.duplicate_file().unwrap()).unwrap();
        assert_eq!(next.used_bytes(), state.used_bytes());
        next.remove_record(slots[3]);
        assert_eq!(next.keep_inode(&inode(9, &path, None)), slots[3], "the block keeps its length");
    }
}
