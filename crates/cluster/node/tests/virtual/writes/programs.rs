//! Programs on mounts: each makes one small piece of work after the other, and compares every answer with the models. It knows
//! no faults.

use super::hosts::SimMount;
use super::models::{ContestModel, CounterModel, DocumentModel, LogModel, ReplacedModel, version_content};
use crate::world::Dice;
use spurline_types::errno::{EAGAIN, EEXIST, EIO, ESTALE};
use spurline_types::open_flags::{O_APPEND, O_CREAT, O_DSYNC, O_EXCL, O_RDWR, O_TRUNC};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::locks::{KnownLock, KnownLocks, LAST_BYTE};
use spurline_volume::writes::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Counters under byte-range locks, and the bytes of each.
pub const RANGE_SLOTS: u64 = 3;
const SLOT_BYTES: u64 = 16;
pub const DOCUMENTS: usize = 3;
/// No call takes longer: it has its deadline of two answers, and some pieces of earlier calls theirs.
const CALL_MAX: Duration = Duration::from_secs(400);
/// A call that begins this long after all trouble finds its node.
pub const SETTLED_AFTER: Duration = Duration::from_secs(30);

/// What all programs of a run share.
#[derive(Default)]
pub struct Shared {
    pub events: Mutex<Vec<String>>,
    pub stop: AtomicBool,
    /// Hosts can lose their power: only what was synced has to be there then.
    pub power: AtomicBool,
    pub began: Mutex<Option<Instant>>,
    /// When all trouble has ended.
    pub healed: Mutex<Option<Instant>>,
    pub ranges: [Mutex<CounterModel>; RANGE_SLOTS as usize],
    pub whole: Mutex<CounterModel>,
    pub log: Mutex<LogModel>,
    pub own_logs: Mutex<BTreeMap<String, LogModel>>,
    pub contests: Mutex<Vec<ContestModel>>,
    pub documents: [Mutex<DocumentModel>; DOCUMENTS],
    pub replaced: Mutex<ReplacedModel>,
    next_value: AtomicU64,
    pub calls: AtomicU64,
    pub outages: AtomicU64,
    pub lost_locks: AtomicU64,
    /// Requests went over another path, and back.
    pub failovers: AtomicU64,
    pub failbacks: AtomicU64,
    /// The locks of each mount's programs by file: the file system of a mount refuses what another program of the mount has.
    mount_locks: Mutex<BTreeMap<(usize, &'static str), KnownLocks>>,
    pub longest: Mutex<(Duration, String)>,
}

/// A lock of std: the events are read after the run, by another thread.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Shared {
    pub fn tell(&self, what: std::fmt::Arguments<'_>) {
        let at = locked(&self.began).map_or(0.0, |began| began.elapsed().as_secs_f64());
        locked(&self.events).push(format!("{at:9.3} {what}"));
    }

    /// Whether all trouble had ended for so long at this time that no node can be away any more.
    fn had_settled(&self, at: Instant) -> bool {
        locked(&self.healed).is_some_and(|healed| at > healed + SETTLED_AFTER)
    }

    /// The mounts whose programs have locks, in order.
    pub fn mounts_with_locks(&self) -> Vec<usize> {
        let locks = locked(&self.mount_locks);
        let mut mounts: Vec<usize> =
            locks.iter().filter(|(_, known)| !known.is_empty()).map(|((mount, _), _)| *mount).collect();
        mounts.dedup();
        mounts
    }

    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// Ends the other programs when one has failed.
pub struct StopOnPanic<'a>(pub &'a Shared);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop.store(true, Ordering::Release);
        }
    }
}

/// Whether nothing is known about the outcome of a call: no node could be reached, or one was lost. Other errors are answers.
pub(super) fn is_outage(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Timeout
        | ErrorKind::Unavailable
        | ErrorKind::Throttled
        | ErrorKind::OriginFailed
        | ErrorKind::OriginDown
        | ErrorKind::Stale => true,
        ErrorKind::Io(errno) => matches!(errno, EIO | ESTALE),
        _ => false,
    }
}

pub(super) fn root() -> Caller {
    Caller::default()
}

pub(super) fn path(path: &str) -> NodePath<'_> {
    NodePath { path: path.as_bytes(), expected: None }
}

pub(super) fn name(name: &str) -> NamePath<'_> {
    NamePath { directory: path(""), name: name.as_bytes() }
}

/// Opens a file that no program uses, once a node is found again.
pub fn open_file(mount: &SimMount, file: &str) -> Box<dyn WritableFile> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match mount.writes.create(name(file), O_RDWR | O_CREAT, 0o644, &root()) {
            Ok(created) => return created.file,
            Err(error) => assert!(Instant::now() < until, "{file} can't be opened without trouble: {error}"),
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// A program.
pub struct Program<'a> {
    pub number: usize,
    pub mount: &'a SimMount,
    pub shared: &'a Shared,
    pub(super) dice: Dice,
    turn: u64,
    /// Its log, and the records that no sync has covered.
    own_log: Option<(String, Box<dyn WritableFile>, Vec<String>)>,
    shared_log: Option<(Box<dyn WritableFile>, Vec<String>)>,
    /// Open files with counters: under byte-range locks, and under `flock`.
    counters: [Option<Box<dyn WritableFile>>; 2],
    names: u64,
    appends: u64,
}

impl<'a> Program<'a> {
    pub fn new(number: usize, mount: &'a SimMount, shared: &'a Shared, dice: Dice) -> Program<'a> {
        let counters = [None, None];
        Program {
            number,
            mount,
            shared,
            dice,
            turn: 0,
            own_log: None,
            shared_log: None,
            counters,
            names: 0,
            appends: 0,
        }
    }

    /// Works until it is stopped, then closes its files.
    pub fn run(mut self) {
        let _stop = StopOnPanic(self.shared);
        while !self.shared.is_over() {
            self.turn += 1;
            match self.dice.below(16) {
                0..=4 => self.count(),
                5 | 6 => self.append_own(),
                7 | 8 => self.append_shared(),
                9 => self.contest(),
                10 => self.write_document(),
                11 => self.read_document(),
                12 => self.replace(),
                13 => self.read_replaced(),
                _ => self.rename_own(),
            }
            self.pause(1500);
        }
        self.sync_logs();
    }

    pub(super) fn volume(&self) -> &'a dyn WritableVolume {
        &*self.mount.writes
    }

    /// Whether hosts can lose their power.
    fn loses_power(&self) -> bool {
        self.shared.power.load(Ordering::Relaxed)
    }

    pub(super) fn pause(&mut self, most_ms: usize) {
        std::thread::sleep(Duration::from_millis(self.dice.below(most_ms) as u64));
    }

    pub(super) fn tell(&self, what: std::fmt::Arguments<'_>) {
        self.shared.tell(format_args!("program {} on mount {}: {what}", self.number, self.mount.number));
    }

    /// Makes a call, and notes how long it takes.
    pub(super) fn call<T>(&self, what: std::fmt::Arguments<'_>, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let begun = Instant::now();
        let answer = run();
        let took = begun.elapsed();
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = &answer
            && is_outage(error)
        {
            let away = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable);
            assert!(!(away && self.shared.had_settled(begun)), "{what} failed without trouble: {error}");
            // Fewer nodes are lost during a call than it may move.
            assert!(!error.message().contains("moved from node to node"), "{what} failed: {error}");
            self.shared.outages.fetch_add(1, Ordering::Relaxed);
            self.tell(format_args!("{what} failed after {took:?}: {error}"));
        } else {
            let refused = answer.as_ref().err().map(|error| format!(", refused: {error}")).unwrap_or_default();
            self.tell(format_args!("{what} took {took:?}{refused}"));
        }
        let mut longest = locked(&self.shared.longest);
        if took > longest.0 {
            *longest = (took, what.to_string());
        }
        drop(longest);
        assert!(took < CALL_MAX, "{what} took {took:?}");
        answer
    }

    /// As [`Program::call`], for calls that nothing but an outage can fail.
    pub(super) fn made<T>(&self, what: std::fmt::Arguments<'_>, run: impl FnOnce() -> Result<T>) -> Option<T> {
        match self.call(what, run) {
            Ok(value) => Some(value),
            Err(error) if is_outage(&error) => None,
            Err(error) => panic!("program {} on mount {}: {what}: {error}", self.number, self.mount.number),
        }
    }

    pub(super) fn create(&self, file: &str, flags: u32) -> Result<Box<dyn WritableFile>> {
        let created = self.volume().create(name(file), O_RDWR | O_CREAT | flags, 0o644, &root());
        created.map(|created| created.file)
    }

    pub(super) fn read_all(&self, file: &dyn WritableFile) -> Result<Vec<u8>> {
        let mut bytes = vec![0; 200_000];
        let len = file.read_at(0, &mut bytes)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    // Counters under locks.

    /// Reads a counter under a lock, and writes the next value.
    fn count(&mut self) {
        let ranges = self.dice.below(3) > 0;
        let (at, file_name) = if ranges { (0, "ranges") } else { (1, "whole") };
        let open = match self.counters[at].take() {
            Some(open) => open,
            None => match self.made(format_args!("open {file_name}"), || self.create(file_name, 0)) {
                Some(open) => open,
                None => return,
            },
        };
        let slot = self.dice.below(RANGE_SLOTS as usize) as u64;
        let family = if ranges { LockFamily::Posix } else { LockFamily::Flock };
        let slots = if self.dice.below(4) == 0 { RANGE_SLOTS - slot } else { 1 };
        let start = slot * SLOT_BYTES;
        let range = LockRange { start, end: start + slots * SLOT_BYTES - 1 };
        let shared = self.dice.below(4) == 0;
        let kind = if shared { LockKind::Read } else { LockKind::Write };
        let lock = FileLock { family, owner: self.number as u64 + 1, range, kind };
        let keep = match self.wait_lock(file_name, &*open, &lock) {
            false => self.unlock(&*open, &lock),
            true => {
                let place = if ranges { start } else { 0 };
                let model = if ranges { &self.shared.ranges[slot as usize] } else { &self.shared.whole };
                let done = if shared { self.look(&*open, place, model) } else { self.add(&*open, place, model) };
                if done.is_err() {
                    self.shared.lost_locks.fetch_add(1, Ordering::Relaxed);
                }
                // A close releases the lock as well.
                self.dice.below(3) > 0 && self.unlock(&*open, &lock)
            }
        };
        if keep {
            self.counters[at] = Some(open);
        } else {
            drop(open);
        }
        self.with_mount_locks(file_name, |known| known.remove_owner(lock.owner()));
    }

    pub(super) fn with_mount_locks<T>(&self, file: &'static str, run: impl FnOnce(&mut KnownLocks) -> T) -> T {
        run(locked(&self.shared.mount_locks).entry((self.mount.number, file)).or_default())
    }

    /// Waits for a lock, as the file system above does; false if it is not to be had.
    pub(super) fn wait_lock(&mut self, file: &'static str, open: &dyn WritableFile, lock: &FileLock) -> bool {
        let begun = Instant::now();
        loop {
            let refused = || Error::new(ErrorKind::Io(EAGAIN), "another program of the mount has it");
            let is_taken = self.with_mount_locks(file, |known| known.find_conflict(lock).is_some());
            let answer = if is_taken { Err(refused()) } else { open.set_lock(lock, &root()) };
            match answer {
                Ok(()) => {
                    self.with_mount_locks(file, |known| known.set_range(KnownLock { lock: *lock, pid: 0 }));
                    self.tell(format_args!("has {:?} lock {:?} after {:?}", lock.kind, lock.range, begun.elapsed()));
                    return true;
                }
                Err(error) if error.kind() == ErrorKind::Io(EAGAIN) || error.kind() == ErrorKind::Throttled => {}
                Err(error) if is_outage(&error) => {
                    self.tell(format_args!("no lock {:?}: {error}", lock.range));
                    return false;
                }
                Err(error) => panic!("a lock: {error}"),
            }
            if self.shared.is_over() {
                return false;
            }
            self.pause(400);
        }
    }

    pub(super) fn unlock(&self, open: &dyn WritableFile, lock: &FileLock) -> bool {
        let all = FileLock { kind: LockKind::Unlock, range: LockRange { start: 0, end: LAST_BYTE }, ..*lock };
        self.made(format_args!("unlock"), || open.set_lock(&all, &root())).is_some()
    }

    /// Waits between two uses of a counter: as long as each of the lock times, and longer.
    fn keep_lock(&mut self) {
        let seconds = [1, 3, 4, 6, 12, 21, 32][self.dice.below(7)];
        self.pause(seconds * 1000);
    }

    fn read_value(&self, open: &dyn WritableFile, place: u64, model: &Mutex<CounterModel>) -> Result<u64> {
        let mut bytes = [0; 8];
        self.call(format_args!("read a counter at {place}"), || open.read_at(place, &mut bytes))?;
        let value = u64::from_le_bytes(bytes);
        assert!(locked(model).is_known(value), "a counter has {value:x}, which no program has written");
        Ok(value)
    }

    fn add(&mut self, open: &dyn WritableFile, place: u64, model: &Mutex<CounterModel>) -> Result<()> {
        let before = self.read_value(open, place, model)?;
        if self.dice.below(2) == 0 {
            self.keep_lock();
        }
        let value = self.shared.next_value.fetch_add(1, Ordering::Relaxed) + 1;
        locked(model).begin_write(value, before);
        self.call(format_args!("write {value:x} over {before:x} at {place}"), || {
            open.write_at(place, &value.to_le_bytes(), None)
        })?;
        if self.loses_power() || self.dice.below(3) == 0 {
            self.call(format_args!("sync of {value:x}"), || open.sync(true))?;
        }
        locked(model).acknowledge(value);
        Ok(())
    }

    /// Under a shared lock the value stays.
    fn look(&mut self, open: &dyn WritableFile, place: u64, model: &Mutex<CounterModel>) -> Result<()> {
        let first = self.read_value(open, place, model)?;
        self.keep_lock();
        let second = self.read_value(open, place, model)?;
        assert_eq!(first, second, "the value at {place} has changed under a shared lock");
        Ok(())
    }

    // Appends.

    fn append(&mut self, open: &dyn WritableFile, file: &str) -> Option<String> {
        let pad = "x".repeat(self.dice.below(3) * self.dice.below(300));
        self.appends += 1;
        let record = format!("{}-{}-{}{pad}", self.mount.number, self.number, self.appends);
        self.with_log(file, |log| log.begin_append(&record));
        let line = format!("{record}\n");
        let written =
            self.call(format_args!("append {record:.12} to {file}"), || open.write_at(0, line.as_bytes(), None));
        match written {
            Ok(len) => assert_eq!(len, line.len(), "an append was cut"),
            Err(error) => {
                assert!(is_outage(&error), "an append to {file}: {error}");
                return None;
            }
        }
        Some(record)
    }

    fn with_log<T>(&self, file: &str, run: impl FnOnce(&mut LogModel) -> T) -> T {
        match file {
            "log" => run(&mut locked(&self.shared.log)),
            _ => run(locked(&self.shared.own_logs).entry(file.to_owned()).or_default()),
        }
    }

    /// Notes an append: durable at once, or after the next sync.
    fn note_appended(&self, file: &str, record: String, unsynced: &mut Vec<String>) {
        if self.loses_power() {
            unsynced.push(record);
        } else {
            self.with_log(file, |log| log.acknowledge(self.number, &record));
        }
    }

    fn sync_log(&self, file: &str, open: &dyn WritableFile, unsynced: &mut Vec<String>) {
        let synced = self.made(format_args!("sync of {file}"), || open.sync(true));
        let records = std::mem::take(unsynced);
        if synced.is_some() {
            records.iter().for_each(|record| self.with_log(file, |log| log.acknowledge(self.number, record)));
        }
    }

    fn append_own(&mut self) {
        let (file, open, mut unsynced) = match self.own_log.take() {
            Some(known) => known,
            None => {
                let file = format!("log-{}-{}", self.number, self.turn);
                let flags = [O_APPEND, O_APPEND | O_DSYNC][self.dice.below(4) / 3];
                match self.made(format_args!("create {file}"), || self.create(&file, flags | O_EXCL)) {
                    Some(open) => (file, open, Vec::new()),
                    None => return,
                }
            }
        };
        for _ in 0..1 + self.dice.below(4) {
            match self.append(&*open, &file) {
                Some(record) => self.note_appended(&file, record, &mut unsynced),
                None => break,
            }
        }
        match self.dice.below(6) {
            0 => self.sync_log(&file, &*open, &mut unsynced),
            1 => return self.sync_log(&file, &*open, &mut unsynced),
            _ => {}
        }
        self.own_log = Some((file, open, unsynced));
    }

    fn append_shared(&mut self) {
        let (open, mut unsynced) = match self.shared_log.take() {
            Some(known) => known,
            None => match self.made(format_args!("open log"), || self.create("log", O_APPEND)) {
                Some(open) => (open, Vec::new()),
                None => return,
            },
        };
        if let Some(record) = self.append(&*open, "log") {
            self.note_appended("log", record, &mut unsynced);
        }
        match self.dice.below(6) {
            0 => self.sync_log("log", &*open, &mut unsynced),
            1 => return self.sync_log("log", &*open, &mut unsynced),
            _ => {}
        }
        self.shared_log = Some((open, unsynced));
    }

    fn sync_logs(&mut self) {
        if let Some((file, open, mut unsynced)) = self.own_log.take() {
            self.sync_log(&file, &*open, &mut unsynced);
        }
        if let Some((open, mut unsynced)) = self.shared_log.take() {
            self.sync_log("log", &*open, &mut unsynced);
        }
    }

    // Names.

    fn contest(&mut self) {
        let number = {
            let mut contests = locked(&self.shared.contests);
            if contests.is_empty() || self.dice.below(3) == 0 && contests.last().is_some_and(|last| last.winners > 0) {
                contests.push(ContestModel::default());
            }
            contests.len() - 1
        };
        let file = format!("contest-{number}");
        let answer = self.call(format_args!("create {file}"), || self.create(&file, O_EXCL));
        let mut contests = locked(&self.shared.contests);
        let contest = &mut contests[number];
        match answer {
            Ok(_) => contest.winners += 1,
            Err(error) if error.kind() == ErrorKind::Io(EEXIST) => contest.losers += 1,
            Err(error) if is_outage(&error) => contest.unclear += 1,
            Err(error) => panic!("{file}: {error}"),
        }
        assert!(contest.winners <= 1, "two programs have created {file} exclusively");
    }

    /// Makes, renames, links and removes names that no other program uses: each call can only succeed.
    fn rename_own(&mut self) {
        self.names += 1;
        let base = format!("own-{}-{}", self.number, self.names);
        let (a, b, c, d) = (format!("{base}a"), format!("{base}b"), format!("{base}c"), format!("{base}d"));
        let ended = self.rename_steps(&a, &b, &c, &d);
        if ended.is_some() {
            for gone in [&a, &b, &c, &d] {
                let found = self.call(format_args!("lookup of {gone}"), || self.volume().lookup(name(gone), &root()));
                if let Ok(found) = found {
                    panic!("{gone} is there again, as {:?}", found.identity);
                }
            }
        }
    }

    fn rename_steps(&mut self, a: &str, b: &str, c: &str, d: &str) -> Option<()> {
        let open = self.made(format_args!("create {a}"), || self.create(a, O_EXCL))?;
        let content = format!("bytes of {a}").into_bytes();
        self.made(format_args!("write of {a}"), || open.write_at(0, &content, None))?;
        let keeps_open = self.dice.below(2) == 0;
        let open = if keeps_open {
            Some(open)
        } else {
            self.made(format_args!("close of {a}"), || open.flush())?;
            drop(open);
            None
        };
        self.look_up(a)?;
        self.change(format_args!("rename {a} {b}"), &Change::Rename { from: name(a), to: name(b), flags: 0 })?;
        self.pause(1000);
        let of = self.look_up(b)?;
        let from = NodePath { path: b.as_bytes(), expected: Some(of.identity) };
        self.change(format_args!("link {b} {c}"), &Change::Link { from, to: name(c) })?;
        self.change(format_args!("mkdir {d}"), &Change::Mkdir { at: name(d), mode: 0o755, implied: false })?;
        self.look_up(d)?;
        self.change(format_args!("rmdir {d}"), &Change::Rmdir { at: name(d) })?;
        self.look_up(b)?;
        self.change(format_args!("unlink {b}"), &Change::Unlink { at: name(b) })?;
        // The open file is found by its other name only where the file system knows names: here it may be stale.
        drop(open);
        let open = self.made(format_args!("open {c}"), || self.volume().open(path(c), O_RDWR, &root()))?;
        let found = self.made(format_args!("read of {c}"), || self.read_all(&*open))?;
        assert!(self.loses_power() || found == content, "{c} has {} bytes of {}", found.len(), content.len());
        drop(open);
        self.look_up(c)?;
        self.change(format_args!("unlink {c}"), &Change::Unlink { at: name(c) })
    }

    pub(super) fn look_up(&self, file: &str) -> Option<NodeAttr> {
        self.made(format_args!("lookup of {file}"), || self.volume().lookup(name(file), &root()))
    }

    pub(super) fn change(&self, what: std::fmt::Arguments<'_>, change: &Change<'_>) -> Option<()> {
        self.made(what, || self.volume().change(change, &root())).map(drop)
    }

    // Close-to-open.

    fn write_document(&mut self) {
        let number = self.dice.below(DOCUMENTS);
        let model = &self.shared.documents[number];
        let (file, mut content, exists) = {
            let mut document = locked(model);
            if document.writing || document.readers > 0 {
                return;
            }
            document.writing = true;
            (format!("document-{number}-{}", document.generation), document.content.clone(), document.exists)
        };
        let written = self.change_document(&file, &mut content, exists);
        let mut document = locked(model);
        document.writing = false;
        match written {
            Some(()) => (document.exists, document.content) = (true, content),
            None => {
                let generation = document.generation + 1;
                *document = DocumentModel { generation, ..DocumentModel::default() };
            }
        }
    }

    fn change_document(&mut self, file: &str, content: &mut Vec<u8>, exists: bool) -> Option<()> {
        let truncates = self.dice.below(4) == 0;
        let open = if exists {
            let flags = O_RDWR | if truncates { O_TRUNC } else { 0 };
            self.made(format_args!("open {file}"), || self.volume().open(path(file), flags, &root()))?
        } else {
            self.made(format_args!("create {file}"), || self.create(file, O_EXCL))?
        };
        if truncates {
            content.clear();
        }
        self.expect_content(file, &*open, content)?;
        for _ in 0..1 + self.dice.below(5) {
            if self.dice.below(6) == 0 {
                let size = self.dice.below(30_000);
                let set = AttrChange { size: Some(size as u64), ..AttrChange::default() };
                self.made(format_args!("cut {file} to {size}"), || open.set_attr(&set, &root()))?;
                content.resize(size, 0);
            }
            let (offset, len) = (self.dice.below(60_000), 1 + self.dice.below(20_000));
            let bytes: Vec<u8> =
                (0..len).map(|at| (at as u64 * 7 + self.turn * 13 + self.number as u64) as u8).collect();
            self.made(format_args!("write {len} at {offset} of {file}"), || {
                open.write_at(offset as u64, &bytes, None)
            })?;
            content.resize(content.len().max(offset + len), 0);
            content[offset..offset + len].copy_from_slice(&bytes);
            match self.dice.below(5) {
                0 => self.expect_content(file, &*open, content)?,
                1 => self.made(format_args!("sync of {file}"), || open.sync(true))?,
                2 => self.pause(2500),
                _ => {}
            }
        }
        if self.dice.below(3) == 0 {
            // Until a node with unsynced bytes may be lost.
            self.pause(40_000);
        }
        if self.loses_power() || self.dice.below(2) == 0 {
            self.made(format_args!("sync of {file}"), || open.sync(false))?;
        }
        self.made(format_args!("close of {file}"), || open.flush())
    }

    fn expect_content(&self, file: &str, open: &dyn WritableFile, content: &[u8]) -> Option<()> {
        let found = self.made(format_args!("read of {file}"), || self.read_all(open))?;
        let wrong = found.iter().zip(content).position(|(found, wanted)| found != wanted);
        assert!(
            found == content,
            "{file} has {} bytes, {} were written; the first wrong one is at {wrong:?}",
            found.len(),
            content.len()
        );
        Some(())
    }

    fn read_document(&mut self) {
        let number = self.dice.below(DOCUMENTS);
        let model = &self.shared.documents[number];
        let (file, content) = {
            let mut document = locked(model);
            if document.writing || !document.exists {
                return;
            }
            document.readers += 1;
            (format!("document-{number}-{}", document.generation), document.content.clone())
        };
        let open = self.made(format_args!("open {file}"), || self.volume().open(path(&file), 0, &root()));
        if let Some(open) = open {
            self.expect_content(&file, &*open, &content);
            let attr = self.made(format_args!("stat of {file}"), || open.stat());
            assert!(attr.is_none_or(|attr| attr.size == content.len() as u64), "{file} has another size");
        }
        locked(model).readers -= 1;
    }

    // Replacement by rename.

    fn replace(&mut self) {
        let version = {
            let mut replaced = locked(&self.shared.replaced);
            if replaced.writing {
                return;
            }
            replaced.writing = true;
            replaced.begun += 1;
            replaced.begun
        };
        let made = self.replace_steps(version);
        let mut replaced = locked(&self.shared.replaced);
        replaced.writing = false;
        if made.is_some() {
            replaced.acknowledged = version;
        }
    }

    fn replace_steps(&mut self, version: u64) -> Option<()> {
        let file = format!("new-{version}");
        let open = self.made(format_args!("create {file}"), || self.create(&file, O_EXCL))?;
        self.made(format_args!("write of {file}"), || open.write_at(0, &version_content(version), None))?;
        if self.loses_power() || self.dice.below(2) == 0 {
            self.made(format_args!("sync of {file}"), || open.sync(false))?;
        }
        self.made(format_args!("close of {file}"), || open.flush())?;
        drop(open);
        self.look_up(&file)?;
        self.change(
            format_args!("rename {file} replaced"),
            &Change::Rename { from: name(&file), to: name("replaced"), flags: 0 },
        )
    }

    fn read_replaced(&mut self) {
        let least = locked(&self.shared.replaced).acknowledged;
        if least == 0 {
            return;
        }
        let open = self.made(format_args!("open replaced"), || self.volume().open(path("replaced"), 0, &root()));
        let Some(open) = open else { return };
        let Some(found) = self.made(format_args!("read of replaced"), || self.read_all(&*open)) else { return };
        let head = found.first_chunk().copied().map_or(0, u64::from_le_bytes);
        let most = locked(&self.shared.replaced).begun;
        assert!(
            (least..=most).contains(&head),
            "version {head} was found, {least} was there before, {most} is the last"
        );
        assert!(found == version_content(head), "version {head} has {} bytes, or wrong ones", found.len());
    }
}
