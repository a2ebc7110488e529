//! Programs on mounts of a bucket: each makes one small piece of work after the other, and compares every answer with the models. It
//! knows no faults.

use super::super::hosts::SimMount;
use super::super::models::{ContestModel, version_content};
use super::super::programs::{Program, Shared, StopOnPanic, is_outage, locked, name, path, root};
use super::models::{BucketModel, DOCUMENT_COUNT, DocumentModel};
use crate::world::Dice;
use spurline_types::errno::{EEXIST, ENOENT, ESTALE};
use spurline_types::open_flags::{O_EXCL, O_RDWR, O_TRUNC};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::locks::LAST_BYTE;
use spurline_volume::writes::*;
use std::sync::atomic::Ordering;

/// The longest document that is written in one request, where space is not short.
const SMALL_DOCUMENT: usize = 60_000;
const COUNTER_FILE: &str = "counter";

/// Whether another writer has changed the object.
fn is_conflict(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Stale | ErrorKind::Io(ESTALE))
}

/// A document that a program has open.
struct DocumentSession {
    number: usize,
    file: String,
    /// The content after the last change.
    content: Vec<u8>,
    /// Changes of strangers before the open.
    strangers: u64,
    /// Versions of the object after the open.
    versions: usize,
}

/// A program.
pub struct BucketProgram<'a> {
    base: Program<'a>,
    model: &'a BucketModel,
    turn: u64,
    next_value: u64,
}

impl<'a> BucketProgram<'a> {
    pub fn new(
        number: usize,
        mount: &'a SimMount,
        shared: &'a Shared,
        model: &'a BucketModel,
        dice: Dice,
    ) -> BucketProgram<'a> {
        BucketProgram { base: Program::new(number, mount, shared, dice), model, turn: 0, next_value: 0 }
    }

    /// Works until it is stopped.
    pub fn run(mut self) {
        let _stop = StopOnPanic(self.base.shared);
        while !self.base.shared.is_over() {
            self.turn += 1;
            match self.base.dice.below(12) {
                0..=2 => self.count(),
                3..=5 => self.write_document(),
                6 => self.read_document(),
                7 | 8 => self.contest(),
                9 => self.rename_own(),
                10 => self.replace(),
                _ => self.read_replaced(),
            }
            self.base.pause(1500);
        }
    }

    /// Makes a call that only an outage can fail, for an object that no other program changes.
    fn made<T>(&self, what: std::fmt::Arguments<'_>, run: impl FnOnce() -> Result<T>) -> Option<T> {
        match self.base.call(what, run) {
            Ok(value) => Some(value),
            Err(error) if is_conflict(&error) => panic!("{what}: no other writer has changed the object: {error}"),
            Err(error) if is_outage(&error) => None,
            Err(error) => panic!("program {} on mount {}: {what}: {error}", self.base.number, self.base.mount.number),
        }
    }

    // A counter under a lock.

    /// Reads the counter under a lock, and publishes the next value.
    fn count(&mut self) {
        let Some(open) = self.open_counter() else { return };
        let owner = self.base.number as u64 + 1;
        let range = LockRange { start: 0, end: LAST_BYTE };
        let shared = self.base.dice.below(5) == 0;
        let kind = if shared { LockKind::Read } else { LockKind::Write };
        let lock = FileLock { family: LockFamily::Flock, owner, range, kind };
        if self.base.wait_lock(COUNTER_FILE, &*open, &lock) {
            for _ in 0..1 + self.base.dice.below(2) {
                let done = if shared { self.look(&*open) } else { self.add(&*open) };
                if done.is_err() {
                    self.base.shared.lost_locks.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
        drop(open);
        self.base.with_mount_locks(COUNTER_FILE, |known| known.remove_owner(lock.owner()));
    }

    /// Opens the counter as the kernel does: a name that a lookup does not find is created.
    fn open_counter(&self) -> Option<Box<dyn WritableFile>> {
        let volume = self.base.volume();
        match self.base.call(format_args!("lookup of {COUNTER_FILE}"), || volume.lookup(name(COUNTER_FILE), &root())) {
            Ok(found) => {
                let at = NodePath { path: COUNTER_FILE.as_bytes(), expected: Some(found.identity) };
                self.base.made(format_args!("open {COUNTER_FILE}"), || volume.open(at, O_RDWR, &root()))
            }
            Err(error) if error.kind() == ErrorKind::NotFound || error.kind() == ErrorKind::Io(ENOENT) => {
                self.base.made(format_args!("create {COUNTER_FILE}"), || self.base.create(COUNTER_FILE, 0))
            }
            Err(_) => None,
        }
    }

    fn read_value(&self, open: &dyn WritableFile) -> Result<u64> {
        let mut bytes = [0; 8];
        self.base.call(format_args!("read the counter"), || open.read_at(0, &mut bytes))?;
        let value = u64::from_le_bytes(bytes);
        let is_known = locked(&self.base.shared.whole).is_known(value);
        assert!(is_known, "the counter has {value:x}, which no program has written");
        Ok(value)
    }

    fn keep_lock(&mut self) {
        let seconds = [1, 3, 6, 12, 32][self.base.dice.below(5)];
        self.base.pause(seconds * 1000);
    }

    fn add(&mut self, open: &dyn WritableFile) -> Result<()> {
        let before = self.read_value(open)?;
        if self.base.dice.below(2) == 0 {
            self.keep_lock();
        }
        self.next_value += 1;
        let value = (self.base.number as u64 + 1) << 32 | self.next_value;
        locked(&self.base.shared.whole).begin_write(value, before);
        self.model.note_content(COUNTER_FILE, &value.to_le_bytes());
        self.model.note_content(COUNTER_FILE, b"");
        self.base
            .call(format_args!("write {value:x} over {before:x}"), || open.write_at(0, &value.to_le_bytes(), None))?;
        self.base.call(format_args!("sync of {value:x}"), || open.sync(true))?;
        locked(&self.base.shared.whole).acknowledge(value);
        Ok(())
    }

    /// Under a shared lock the value stays.
    fn look(&mut self, open: &dyn WritableFile) -> Result<()> {
        let first = self.read_value(open)?;
        self.keep_lock();
        let second = self.read_value(open)?;
        assert_eq!(first, second, "the counter has changed under a shared lock");
        Ok(())
    }

    // Documents.

    fn write_document(&mut self) {
        let number = self.base.dice.below(DOCUMENT_COUNT);
        let model = &self.model.documents[number];
        let (mut session, exists) = {
            let mut document = locked(model);
            if document.writing || document.readers > 0 {
                return;
            }
            document.writing = true;
            let file = format!("document-{number}-{}", document.generation);
            let content = document.content.clone();
            let strangers = document.strangers;
            (DocumentSession { number, file, content, strangers, versions: 0 }, document.exists)
        };
        let written = self.change_document(&mut session, exists);
        let mut document = locked(model);
        document.writing = false;
        self.check_strangers_kept(&session);
        if written.is_none() {
            let generation = document.generation + 1;
            *document = DocumentModel { generation, strangers: document.strangers, ..DocumentModel::default() };
            return;
        }
        let versions = self.model.store.versions(&session.file);
        let last = versions.last().cloned().flatten();
        let last = last.unwrap_or_else(|| panic!("{} was closed and does not exist", session.file));
        assert!(
            last.writer.is_none() || last.bytes == session.content,
            "{} was closed with {} bytes, and has {}",
            session.file,
            session.content.len(),
            last.bytes.len()
        );
        document.exists = true;
        document.content = last.bytes.to_vec();
    }

    /// Nothing that this program has published lies over a version that a stranger has written since the open.
    fn check_strangers_kept(&self, session: &DocumentSession) {
        let versions = self.model.store.versions(&session.file);
        let since = versions.into_iter().skip(session.versions).flatten();
        let own_after = since.skip_while(|version| version.writer.is_some()).find(|version| version.writer.is_some());
        assert!(own_after.is_none(), "{} was written over the change of a stranger", session.file);
    }

    /// Makes a call on a document; a conflict needs a stranger.
    fn on_document<T>(&self, session: &DocumentSession, what: &str, run: impl FnOnce() -> Result<T>) -> Option<T> {
        let what = format_args!("{what} of {}", session.file);
        match self.base.call(what, run) {
            Ok(value) => Some(value),
            // The name of a new file can be a stranger's too.
            Err(error) if is_conflict(&error) || error.kind() == ErrorKind::Io(EEXIST) => {
                let strangers = locked(&self.model.documents[session.number]).strangers;
                assert!(strangers > session.strangers, "{what}: no stranger has changed the object: {error}");
                None
            }
            Err(error) if is_outage(&error) => None,
            Err(error) => panic!("program {} on mount {}: {what}: {error}", self.base.number, self.base.mount.number),
        }
    }

    fn change_document(&mut self, session: &mut DocumentSession, exists: bool) -> Option<()> {
        let truncates = self.base.dice.below(4) == 0;
        let file = session.file.clone();
        let volume = self.base.volume();
        let opened = if exists {
            let flags = O_RDWR | if truncates { O_TRUNC } else { 0 };
            self.on_document(session, "open", || volume.open(path(&file), flags, &root()))
        } else {
            self.on_document(session, "creation", || self.base.create(&file, O_EXCL))
        };
        session.versions = self.model.store.versions(&file).len();
        // A new file may be published empty.
        self.model.note_content(&file, b"");
        let open = opened?;
        if truncates {
            session.content.clear();
        } else {
            self.take_stranger(session, &*open)?;
        }
        for _ in 0..1 + self.base.dice.below(5) {
            self.change_once(session, &*open)?;
            match self.base.dice.below(6) {
                0 => self.expect_content(session, &*open)?,
                1 | 2 => {
                    self.model.note_content(&file, &session.content);
                    self.on_document(session, "sync", || open.sync(true))?;
                }
                3 => self.base.pause(2500),
                _ => {}
            }
        }
        if self.base.dice.below(3) == 0 {
            // Until a node with unpublished bytes may be lost.
            self.base.pause(40_000);
        }
        self.model.note_content(&file, &session.content);
        self.on_document(session, "close", || open.flush())
    }

    /// A document that a stranger has replaced before it was open has the stranger's bytes.
    fn take_stranger(&self, session: &mut DocumentSession, open: &dyn WritableFile) -> Option<()> {
        let found = self.on_document(session, "first read", || read_all(open, session.content.len()))?;
        if found != session.content {
            let strangers = locked(&self.model.documents[session.number]).strangers;
            assert!(strangers > session.strangers, "{} has other bytes than at its close", session.file);
            let versions = self.model.store.versions(&session.file);
            let is_whole = versions.iter().flatten().any(|version| version.bytes == found);
            assert!(is_whole, "{} has bytes that are no version of it", session.file);
            session.content = found;
        }
        Some(())
    }

    fn change_once(&mut self, session: &mut DocumentSession, open: &dyn WritableFile) -> Option<()> {
        let before = session.content.clone();
        if self.base.dice.below(6) == 0 {
            let large = self.base.dice.below(12) == 0;
            let size = if large { self.model.large_document } else { self.base.dice.below(SMALL_DOCUMENT) };
            let set = AttrChange { size: Some(size as u64), ..AttrChange::default() };
            session.content.resize(size, 0);
            let cut = self.on_document(session, &format!("cut to {size}"), || open.set_attr(&set, &root()));
            return self.note_change(session, &before, cut);
        }
        let offset = self.base.dice.below(SMALL_DOCUMENT.max(session.content.len()));
        let len = 1 + self.base.dice.below(20_000);
        let seed = self.turn * 13 + self.base.number as u64;
        let bytes: Vec<u8> = (0..len).map(|at| (at as u64 * 7 + seed) as u8).collect();
        session.content.resize(session.content.len().max(offset + len), 0);
        session.content[offset..offset + len].copy_from_slice(&bytes);
        let what = format!("write of {len} at {offset}");
        let written = self.on_document(session, &what, || open.write_at(offset as u64, &bytes, None));
        self.note_change(session, &before, written)
    }

    /// After a change without an answer, the end of the open file publishes the bytes with the change or without.
    fn note_change<T>(&self, session: &DocumentSession, before: &[u8], made: Option<T>) -> Option<()> {
        if made.is_none() {
            self.model.note_content(&session.file, before);
            self.model.note_content(&session.file, &session.content);
        }
        made.map(drop)
    }

    fn expect_content(&self, session: &DocumentSession, open: &dyn WritableFile) -> Option<()> {
        let found = self.on_document(session, "read", || read_all(open, session.content.len()));
        if found.is_none() {
            self.model.note_content(&session.file, &session.content);
        }
        check_bytes(&session.file, &found?, &session.content);
        Some(())
    }

    fn read_document(&mut self) {
        let number = self.base.dice.below(DOCUMENT_COUNT);
        let (file, content) = {
            let mut document = locked(&self.model.documents[number]);
            if document.writing || !document.exists {
                return;
            }
            document.readers += 1;
            (format!("document-{number}-{}", document.generation), document.content.clone())
        };
        let volume = self.base.volume();
        let open = self.made(format_args!("open {file}"), || volume.open(path(&file), 0, &root()));
        if let Some(open) = open {
            if let Some(found) = self.made(format_args!("read of {file}"), || read_all(&*open, content.len())) {
                check_bytes(&file, &found, &content);
            }
            let attr = self.made(format_args!("stat of {file}"), || open.stat());
            assert!(attr.is_none_or(|attr| attr.size == content.len() as u64), "{file} has another size");
        }
        locked(&self.model.documents[number]).readers -= 1;
    }

    // Names.

    fn contest(&mut self) {
        let number = {
            let mut contests = locked(&self.base.shared.contests);
            if contests.is_empty()
                || self.base.dice.below(3) == 0 && contests.last().is_some_and(|last| last.winners > 0)
            {
                contests.push(ContestModel::default());
            }
            contests.len() - 1
        };
        let file = format!("contest-{number}");
        let content = format!("made by {} in turn {}", self.base.number, self.turn).into_bytes();
        let answer = self.make_exclusively(&file, &content);
        let mut contests = locked(&self.base.shared.contests);
        let contest = &mut contests[number];
        match answer {
            Ok(()) => {
                contest.winners += 1;
                self.model.note_winner(&file, &content);
            }
            Err(error) if error.kind() == ErrorKind::Io(EEXIST) || is_conflict(&error) => contest.losers += 1,
            Err(error) if is_outage(&error) => contest.unclear += 1,
            Err(error) => panic!("{file}: {error}"),
        }
    }

    fn make_exclusively(&self, file: &str, content: &[u8]) -> Result<()> {
        let open = self.base.call(format_args!("create {file}"), || self.base.create(file, O_EXCL))?;
        self.model.note_content(file, b"");
        self.model.note_content(file, content);
        self.base.call(format_args!("write of {file}"), || open.write_at(0, content, None))?;
        self.base.call(format_args!("close of {file}"), || open.flush())
    }

    /// Makes, renames and removes names that no other program uses: each call can only succeed.
    fn rename_own(&mut self) {
        let base = format!("own-{}-{}", self.base.number, self.turn);
        let file = format!("{base}a");
        let renamed = format!("{base}b");
        let folder = format!("{base}d");
        if self.rename_steps(&file, &renamed, &folder).is_none() {
            return;
        }
        for gone in [&file, &renamed, &folder] {
            let volume = self.base.volume();
            let found = self.base.call(format_args!("lookup of {gone}"), || volume.lookup(name(gone), &root()));
            // A request for a new file names no version: a late request of a lost node finds the name free.
            if let Ok(found) = found
                && !self.model.store.is_made_late(gone)
            {
                panic!("{gone} is there again, as {:?}", found.identity);
            }
        }
    }

    fn rename_steps(&mut self, a: &str, b: &str, d: &str) -> Option<()> {
        let volume = self.base.volume();
        let open = self.made(format_args!("create {a}"), || self.base.create(a, O_EXCL))?;
        let content = format!("bytes of {a}").into_bytes();
        for name in [a, b] {
            self.model.note_content(name, b"");
            self.model.note_content(name, &content);
        }
        self.made(format_args!("write of {a}"), || open.write_at(0, &content, None))?;
        let mut open = Some(open);
        if self.base.dice.below(2) == 0 {
            self.close(a, open.take())?;
        }
        self.look_up(a)?;
        self.change(format_args!("rename {a} {b}"), &Change::Rename { from: name(a), to: name(b), flags: 0 })?;
        self.base.pause(1000);
        self.close(b, open.take())?;
        self.look_up(b)?;
        self.change(format_args!("mkdir {d}"), &Change::Mkdir { at: name(d), mode: 0o755, implied: false })?;
        self.look_up(d)?;
        self.change(format_args!("rmdir {d}"), &Change::Rmdir { at: name(d) })?;
        let open = self.made(format_args!("open {b}"), || volume.open(path(b), O_RDWR, &root()))?;
        let found = self.made(format_args!("read of {b}"), || read_all(&*open, content.len()))?;
        check_bytes(b, &found, &content);
        drop(open);
        self.change(format_args!("unlink {b}"), &Change::Unlink { at: name(b) })
    }

    fn close(&self, file: &str, open: Option<Box<dyn WritableFile>>) -> Option<()> {
        let Some(open) = open else { return Some(()) };
        self.made(format_args!("close of {file}"), || open.flush())
    }

    fn look_up(&self, file: &str) -> Option<NodeAttr> {
        let volume = self.base.volume();
        self.made(format_args!("lookup of {file}"), || volume.lookup(name(file), &root()))
    }

    fn change(&self, what: std::fmt::Arguments<'_>, change: &Change<'_>) -> Option<()> {
        let volume = self.base.volume();
        self.made(what, || volume.change(change, &root())).map(drop)
    }

    // Replacement by rename.

    fn replace(&mut self) {
        let version = {
            let mut replaced = locked(&self.base.shared.replaced);
            if replaced.writing {
                return;
            }
            replaced.writing = true;
            replaced.begun += 1;
            replaced.begun
        };
        let made = self.replace_steps(version);
        let mut replaced = locked(&self.base.shared.replaced);
        replaced.writing = false;
        if made.is_some() {
            replaced.acknowledged = version;
        }
    }

    fn replace_steps(&mut self, version: u64) -> Option<()> {
        let file = format!("new-{version}");
        let content = version_content(version);
        let open = self.made(format_args!("create {file}"), || self.base.create(&file, O_EXCL))?;
        self.model.note_content(&file, b"");
        self.model.note_content(&file, &content);
        self.model.note_content("replaced", &content);
        self.made(format_args!("write of {file}"), || open.write_at(0, &content, None))?;
        self.made(format_args!("close of {file}"), || open.flush())?;
        drop(open);
        self.look_up(&file)?;
        self.change(
            format_args!("rename {file} replaced"),
            &Change::Rename { from: name(&file), to: name("replaced"), flags: 0 },
        )
    }

    fn read_replaced(&mut self) {
        let least = locked(&self.base.shared.replaced).acknowledged;
        if least == 0 {
            return;
        }
        let volume = self.base.volume();
        let open = self.base.made(format_args!("open replaced"), || volume.open(path("replaced"), 0, &root()));
        let Some(open) = open else { return };
        let found = self.base.made(format_args!("read of replaced"), || read_all(&*open, SMALL_DOCUMENT));
        let Some(found) = found else { return };
        let head = found.first_chunk().copied().map_or(0, u64::from_le_bytes);
        let most = locked(&self.base.shared.replaced).begun;
        let is_expected = (least..=most).contains(&head);
        assert!(is_expected, "version {head} was found, {least} was there before, {most} is the last");
        assert!(found == version_content(head), "version {head} has {} bytes, or wrong ones", found.len());
    }
}

/// The bytes of a file, which should have this length.
fn read_all(open: &dyn WritableFile, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len.max(SMALL_DOCUMENT) + 100_000];
    let len = open.read_at(0, &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

fn check_bytes(file: &str, found: &[u8], wanted: &[u8]) {
    let wrong = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    assert!(
        found == wanted,
        "{file} has {} bytes, {} were written; the first wrong one is at {wrong:?}",
        found.len(),
        wanted.len()
    );
}
