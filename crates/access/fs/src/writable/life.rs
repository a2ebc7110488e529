//! What a writable mount keeps for the process after this one, and requests that come again because the process before has ended
//! without an answer. It knows how changes are recognised, and not how they are made.
//!
//! | a repeated request | is known to be made if |
//! |---|---|
//! | any change with a record of its result | the record says so |
//! | mkdir, mknod, symlink, create | the name leads to an object as it was to be made, from between the first attempt and the end of its process |
//! | link, unlink, rmdir, rename | the names lead to the objects as in the table of [`spurline_volume::repeated`] |
//! | append | the bytes, as far as the file goes, are at the former end: the rest is written |
//! | open | the handle has the number of the request |
//!
//! Other requests have the same result the second time. A source that numbers its changes recognises a change without a record of
//! its result itself.

use super::WritableFileSystem;
use super::open::{OpenNodeDirectory, OpenNodeFile};
use crate::errno::{FsError, FsResult, errno_error};
use crate::kept_records::{
    KeptChange, KeptHandle, KeptLife, KeptLock, KeptRecord, KeptRecords, MadeChange, RecordSlot,
};
use crate::passthrough::RegisterBacking;
use crate::service::{DirName, FsCaller};
use parking_lot::Mutex;
use spurline_sys::random;
use spurline_types::Result;
use spurline_volume::kept_client::HeldFile;
use spurline_volume::kept_files::{KeptFileKey, KeptFiles};
use spurline_volume::repeated::{
    ChangeMark, ChangeOutcome, RepeatedCall, RepeatedChange, find_name, outcome_by_objects,
};
use spurline_volume::writes::{
    Caller, Change, FileIdentity, FileTime, NodeAttr, NodePath, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, WritableDirectory,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The kernel sends requests again before all others. After this time, records of earlier processes are of no use.
const REPEATS_LIMIT: Duration = Duration::from_secs(60);
/// File systems round times to the ticks of a clock.
const CLOCK_TICK: Duration = Duration::from_millis(20);

/// The records of this process and of those before.
pub(super) struct MountRecords {
    pub records: Arc<dyn KeptRecords>,
    pub files: Arc<dyn KeptFiles>,
    ended_at: SystemTime,
    since: Instant,
    has_repeats: AtomicBool,
    repeats: Mutex<EarlierRequests>,
}

/// What processes before have noted of requests without an answer.
#[derive(Default)]
struct EarlierRequests {
    changes: HashMap<u64, EarlierChange>,
    /// Handles by the requests that opened them.
    opens: HashMap<u64, u64>,
}

struct EarlierChange {
    change: KeptChange,
    record: RecordSlot,
}

/// A request that comes again.
#[derive(Clone, Copy)]
pub(super) struct RepeatedRequest {
    /// The fact before the change, if the request had come so far.
    pub before: Option<u64>,
    /// The result, if the change was certainly made.
    pub made: Option<MadeChange>,
}

/// What a request was to make.
#[derive(Clone, Copy)]
struct NewObject {
    /// The file type, as in a mode.
    file_type: u32,
    /// The length of a symbolic link's target.
    size: u64,
}

impl MountRecords {
    fn new(life: &KeptLife<'_>, files: Arc<dyn KeptFiles>) -> MountRecords {
        MountRecords {
            records: Arc::clone(&life.records),
            files,
            ended_at: life.ended_at,
            since: Instant::now(),
            has_repeats: AtomicBool::new(life.takeovers > 0),
            repeats: Mutex::default(),
        }
    }

    fn find_change(&self, request: u64) -> Option<KeptChange> {
        let earlier = self.repeats.lock().changes.remove(&request)?;
        // This thread's record first: also this process may end before it answers.
        self.records.note_change(&KeptChange { made: None, ..earlier.change });
        if earlier.change.made.is_some() {
            self.records.note_change(&earlier.change);
        }
        self.records.remove_record(earlier.record);
        Some(earlier.change)
    }

    /// Forgets the requests of earlier processes, when all of them have come again.
    fn forget_repeats(&self) {
        if self.has_repeats.load(Ordering::Relaxed)
            && self.since.elapsed() > REPEATS_LIMIT
            && self.has_repeats.swap(false, Ordering::Relaxed)
        {
            let earlier = std::mem::take(&mut *self.repeats.lock());
            earlier.changes.values().for_each(|change| self.records.remove_record(change.record));
        }
    }

    /// Keeps an open file or directory.
    pub fn keep_handle(&self, kept: &KeptHandle) -> RecordSlot {
        self.records.keep(&KeptRecord::Handle(*kept))
    }
}

impl WritableFileSystem {
    /// Keeps nodes, handles, locks and changes from now on, and continues with those of the processes before. Called before the
    /// first request.
    pub(super) fn begin_life(&self, life: &KeptLife<'_>) -> bool {
        let Some(files) = life.files.clone() else { return false };
        self.files.set_takeovers(life.takeovers);
        self.directories.set_takeovers(life.takeovers);
        self.source.keep_files(Arc::clone(&files));
        let mount = MountRecords::new(life, files);
        self.nodes.keep_records(&life.records);
        if life.takeovers > 0 {
            life.records.for_each(&mut |slot, record| {
                let is_adopted = match record {
                    KeptRecord::Node(node) => self.nodes.adopt_node(slot, node),
                    KeptRecord::Name(name) => self.nodes.adopt_name(slot, name),
                    KeptRecord::Handle(handle) => self.adopt_handle(slot, handle, &mount, life.register),
                    KeptRecord::Lock(lock) => self.adopt_lock(slot, lock, &mount),
                    KeptRecord::Change(change) => {
                        let earlier = EarlierChange { change: *change, record: slot };
                        mount.repeats.lock().changes.insert(change.request, earlier);
                        true
                    }
                    KeptRecord::Inode(_) => false,
                };
                if !is_adopted {
                    life.records.remove_record(slot);
                }
            });
            mount.files.drop_untaken();
        }
        self.locks.keep_records(&mount.records, &mount.files);
        let _ = self.life.set(mount);
        true
    }

    fn adopt_handle(
        &self,
        slot: RecordSlot,
        kept: &KeptHandle,
        mount: &MountRecords,
        register: Option<&dyn RegisterBacking>,
    ) -> bool {
        if let Some(held) = &kept.held {
            let is_adopted = self.adopt_held(slot, kept, held);
            return self.end_adoption(kept, mount, is_adopted);
        }
        let key = if kept.directory { KeptFileKey::Directory(kept.fh) } else { KeptFileKey::File(kept.fh) };
        let file = mount.files.take_file(key);
        let is_adopted = match (kept.directory, file) {
            (true, file) => {
                let opened = file.and_then(|file| self.source.adopt_directory(file).ok());
                let named = opened.or_else(|| self.directory_at_name(kept.ino));
                let directory = named.or_else(|| self.removed_directory(kept.ino));
                directory.is_some_and(|directory| {
                    let open = OpenNodeDirectory { ino: kept.ino, directory, record: slot.into() };
                    self.directories.adopt(kept.fh, Arc::new(open))
                })
            }
            (false, Some(file)) => self
                .source
                .adopt_file(file, kept.flags as u32)
                .is_ok_and(|file| self.adopt_open(slot, kept, file, register)),
            (false, None) => false,
        };
        self.end_adoption(kept, mount, is_adopted)
    }

    fn directory_at_name(&self, ino: u64) -> Option<Box<dyn WritableDirectory>> {
        let path = self.nodes.resolve(ino)?.path;
        self.source.adopt_directory_at(NodePath { path: &path, expected: self.nodes.identity_of(ino) }).ok()
    }

    /// Continues with a file or directory that a node has open.
    fn adopt_held(&self, slot: RecordSlot, kept: &KeptHandle, held: &HeldFile) -> bool {
        let [uid, gid] = kept.owner;
        let caller = Caller { uid, gid, ..Caller::default() };
        // Without a name, only the node's process has the file.
        let path = self.nodes.resolve(kept.ino).map_or(Vec::new(), |found| found.path);
        let at = NodePath { path: &path, expected: self.nodes.identity_of(kept.ino) };
        if !kept.directory {
            let adopted = self.source.adopt_held(held, at, kept.flags as u32, &caller);
            return adopted.is_ok_and(|file| self.adopt_open(slot, kept, file, None));
        }
        self.source.adopt_held_directory(held, at, &caller).is_ok_and(|directory| {
            let open = OpenNodeDirectory { ino: kept.ino, directory, record: slot.into() };
            self.directories.adopt(kept.fh, Arc::new(open))
        })
    }

    fn end_adoption(&self, kept: &KeptHandle, mount: &MountRecords, is_adopted: bool) -> bool {
        if is_adopted {
            self.stats.fuse.open_handles.add(1);
            mount.repeats.lock().opens.insert(kept.request, kept.fh);
        } else if !kept.held.is_some_and(|held| held.closing) {
            tracing::warn!(ino = kept.ino, fh = kept.fh, "an open file of the process before is lost");
        }
        is_adopted
    }

    fn adopt_lock(&self, slot: RecordSlot, kept: &KeptLock, mount: &MountRecords) -> bool {
        let Some(file) = self.files.get(kept.fh) else { return false };
        self.locks.adopt(slot, kept);
        // The first of an owner's locks has the descriptor.
        let descriptor = mount.files.take_file(KeptFileKey::Lock { fh: kept.fh, owner: kept.lock.owner });
        file.file.adopt_lock(&kept.lock, descriptor);
        true
    }

    /// How far an earlier process has come with a request that comes again.
    pub(super) fn find_repeat(&self, caller: &FsCaller<'_>) -> Option<RepeatedRequest> {
        let life = self.life.get()?;
        if !caller.request.repeated {
            life.forget_repeats();
            return None;
        }
        let change = life.find_change(caller.request.number);
        if self.source.numbers_changes() && change.is_none_or(|change| change.made.is_none()) {
            // The source makes the change, or finds it made.
            return None;
        }
        Some(RepeatedRequest {
            before: change.map(|change| change.before),
            made: change.and_then(|change| change.made),
        })
    }

    /// Makes a change of names, unless the change is known to be made: by its mark where the source recognises marks, or by the
    /// names. `repeat` is the request's own, and `known` the object that the name which the change takes away led to before.
    pub(super) fn change_names(
        &self,
        change: &Change<'_>,
        repeat: Option<RepeatedRequest>,
        known: Option<FileIdentity>,
        caller: &Caller,
        request: &FsCaller<'_>,
    ) -> Result<Option<NodeAttr>> {
        let call = RepeatedCall::Change(*change);
        if self.life.get().is_none() || !self.source.recognises_marks() {
            if let Some(repeat) = repeat
                && let ChangeOutcome::Made(attr) = self.find_outcome(call, repeat, known, caller)?
            {
                return Ok(attr);
            }
            if new_object(&call).is_some() {
                self.note_making(request);
            }
            return self.source.change(change, caller);
        }
        if let Some(mark) = repeat.and_then(|repeat| repeat.before) {
            let mark = ChangeMark(u128::from(mark));
            return self.source.repeat(&RepeatedChange { call, mark, known: [known, None], caller });
        }
        let mark = random();
        self.note_begun(request, mark);
        self.source.change_marked(change, caller, Some(ChangeMark(u128::from(mark))))
    }

    /// The request has made its change of names.
    pub(super) fn note_names_made(&self, caller: &FsCaller<'_>, made: MadeChange) {
        // The mark of the change has to stay.
        if !self.source.recognises_marks() {
            self.note_made(caller, made);
        }
    }

    /// The file that the request has opened already, with its handle.
    pub(super) fn find_opened(&self, caller: &FsCaller<'_>) -> Option<(u64, Arc<OpenNodeFile>)> {
        let fh = self.find_opened_handle(caller)?;
        Some((fh, self.files.get(fh)?))
    }

    /// The handle that the request has opened already.
    pub(super) fn find_opened_handle(&self, caller: &FsCaller<'_>) -> Option<u64> {
        let life = self.life.get().filter(|_| caller.request.repeated)?;
        life.repeats.lock().opens.get(&caller.request.number).copied()
    }

    /// The request is about to make a change; `before` is a fact by which the change is recognised.
    pub(super) fn note_begun(&self, caller: &FsCaller<'_>, before: u64) {
        if let Some(life) = self.life.get() {
            let request = caller.request.number;
            life.records.note_change(&KeptChange { request, before, ..KeptChange::default() });
        }
    }

    /// As [`WritableFileSystem::note_begun`], with the time, unless the source recognises the change by a mark.
    pub(super) fn note_making(&self, caller: &FsCaller<'_>) {
        if self.life.get().is_some() && !self.source.recognises_marks() {
            self.note_begun(caller, nanos_of(SystemTime::now()));
        }
    }

    /// The request has made its change.
    pub(super) fn note_made(&self, caller: &FsCaller<'_>, made: MadeChange) {
        if let Some(life) = self.life.get() {
            let request = caller.request.number;
            life.records.note_change(&KeptChange { request, made: Some(made), ..KeptChange::default() });
        }
    }

    /// Whether a process before has made the change of a repeated request, by the names of the source.
    pub(super) fn find_outcome(
        &self,
        call: RepeatedCall<'_>,
        repeat: RepeatedRequest,
        known: Option<FileIdentity>,
        caller: &Caller,
    ) -> Result<ChangeOutcome> {
        let new = new_object(&call);
        if repeat.made.is_some() && new.is_none() {
            return Ok(ChangeOutcome::Made(None));
        }
        let is_made = |found: &NodeAttr| {
            let by_time = |new, began| self.may_be_made(found, new, began, caller);
            repeat.made.is_some() || new.zip(repeat.before).is_some_and(|(new, began)| by_time(new, began))
        };
        let outcome = outcome_by_objects(&*self.source, call, [known, None], caller, is_made)?;
        Ok(match (outcome, call) {
            // The kernel removes only names that it has seen.
            (ChangeOutcome::Unclear(_), RepeatedCall::Change(Change::Unlink { .. } | Change::Rmdir { .. })) => {
                ChangeOutcome::Made(None)
            }
            (ChangeOutcome::Unclear(_), _) => ChangeOutcome::NotMade,
            (outcome, _) => outcome,
        })
    }

    /// Whether an object is as a request that began at that time was to make it.
    fn may_be_made(&self, found: &NodeAttr, new: NewObject, began: u64, caller: &Caller) -> bool {
        let Some(life) = self.life.get() else { return false };
        let owner = self.config.squash.map_or(caller.uid, |squash| squash.0);
        let is_new = new.file_type == S_IFDIR || found.nlink == 1 && found.size == new.size;
        let tick = CLOCK_TICK.as_nanos() as u64;
        let changed = since_1970(found.ctime);
        let ended_at = nanos_of(life.ended_at);
        // A process that ended before it reported itself leaves the end of the one before it.
        let in_time = changed >= began.saturating_sub(tick) && (changed <= ended_at + tick || began > ended_at);
        found.mode & S_IFMT == new.file_type
            && is_new
            && (found.uid == owner || !self.source.has_host_clock())
            && (in_time || !self.source.has_host_clock())
    }

    /// Whether the table of nodes has the name as the source has.
    pub(super) fn knows_name(&self, at: DirName<'_>, caller: &FsCaller<'_>) -> FsResult<bool> {
        let found = self.on_name(at.parent, at.name, caller, false, |at, by| find_name(&*self.source, at, by))?;
        Ok(found.map(|found| found.identity) == self.nodes.identity_at(at.parent, at.name))
    }
}

/// The object that a change makes.
fn new_object(call: &RepeatedCall<'_>) -> Option<NewObject> {
    let (file_type, size) = match *call {
        RepeatedCall::CreateExclusive(_) => (S_IFREG, 0),
        RepeatedCall::Change(Change::Mkdir { .. }) => (S_IFDIR, 0),
        RepeatedCall::Change(Change::Mknod { mode, .. }) => (mode & S_IFMT, 0),
        RepeatedCall::Change(Change::Symlink { target, .. }) => (S_IFLNK, target.len() as u64),
        _ => return None,
    };
    Some(NewObject { file_type, size })
}

/// The result of a request that has made an object.
pub(super) fn made_object(identity: FileIdentity) -> MadeChange {
    MadeChange { count: 0, object: Some(identity) }
}

/// The error of an append of which the source shows neither that it was made nor that it was not.
pub(super) fn unclear_append() -> FsError {
    errno_error(libc::EIO, "another host has appended meanwhile: whether the append was made is not known")
}

fn nanos_of(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn since_1970(time: FileTime) -> u64 {
    u64::try_from(time.seconds).map_or(0, |seconds| seconds * 1_000_000_000 + u64::from(time.nanos))
}
