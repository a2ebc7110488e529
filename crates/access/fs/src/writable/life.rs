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

use crate::errno::{FsError, errno_error};
use crate::kept_records::{KeptChange, KeptLife, KeptRecord, KeptRecords, MadeChange, RecordSlot};
use crate::service::FsCaller;
use parking_lot::Mutex;
use spurline_sys::random;
use spurline_types::Result;
use spurline_volume::hand_over::RepeatRule;
use spurline_volume::kept_files::KeptFiles;
use spurline_volume::repeated::{
    ChangeMark, ChangeOutcome, RepeatedCall, RepeatedChange, outcome_by_objects, repeat_marked,
};
use spurline_volume::writes::{
    Caller, Change, FileIdentity, FileTime, NodeAttr, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, WritableVolume,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// The kernel sends requests again before all others. After this time, records of earlier processes are of no use.
const REPEATS_LIMIT: Duration = Duration::from_secs(60);
/// File systems round times to the ticks of a clock.
const CLOCK_TICK: Duration = Duration::from_millis(20);

/// The records of a mount that outlives its processes.
pub(super) struct KeptMount {
    pub records: Arc<dyn KeptRecords>,
    pub files: Arc<dyn KeptFiles>,
    /// How the source recognises changes.
    rule: RepeatRule,
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

impl KeptMount {
    fn new(life: &KeptLife<'_>, files: Arc<dyn KeptFiles>, rule: RepeatRule) -> KeptMount {
        KeptMount {
            records: Arc::clone(&life.records),
            files,
            rule,
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

    fn adopt_change(&self, record: RecordSlot, change: &KeptChange) {
        let earlier = EarlierChange { change: *change, record };
        self.repeats.lock().changes.insert(change.request, earlier);
    }

    /// The handle of the request that has opened it in a process before.
    pub fn adopt_opened(&self, request: u64, fh: u64) {
        self.repeats.lock().opens.insert(request, fh);
    }
}

/// What a mount keeps for the process after this one, and requests that come again.
pub(super) struct MountRecords {
    source: Arc<dyn WritableVolume>,
    /// The user that the source makes all changes as, if that is not the caller.
    squash_uid: Option<u32>,
    /// Of a mount that outlives this process.
    kept: OnceLock<KeptMount>,
}

impl MountRecords {
    pub fn new(source: Arc<dyn WritableVolume>, squash_uid: Option<u32>) -> MountRecords {
        MountRecords { source, squash_uid, kept: OnceLock::new() }
    }

    /// The records of a mount that outlives this process.
    pub fn kept(&self) -> Option<&KeptMount> {
        self.kept.get()
    }

    /// How the source recognises changes, of such a mount.
    pub fn repeat_rule(&self) -> Option<RepeatRule> {
        self.kept.get().map(|kept| kept.rule)
    }

    /// Keeps changes and handles from now on, and continues with the records of the processes before: `adopt` takes each record but
    /// changes, and returns whether the record stays. Called before the first request; false for a source whose open files end with a
    /// process.
    pub fn begin(
        &self,
        life: &KeptLife<'_>,
        files: &Arc<dyn KeptFiles>,
        adopt: impl Fn(&KeptMount, RecordSlot, &KeptRecord<'_>) -> bool,
    ) -> bool {
        let Some(source) = self.source.hand_over() else { return false };
        source.keep(Arc::clone(files));
        let kept = self.kept.get_or_init(|| KeptMount::new(life, Arc::clone(files), source.repeat_rule()));
        if life.takeovers == 0 {
            return true;
        }
        life.records.for_each(&mut |slot, record| match record {
            KeptRecord::Change(change) => kept.adopt_change(slot, change),
            record if adopt(kept, slot, record) => {}
            _ => life.records.remove_record(slot),
        });
        kept.files.drop_untaken();
        true
    }

    /// How far an earlier process has come with a request that comes again.
    pub fn find_repeat(&self, caller: &FsCaller<'_>) -> Option<RepeatedRequest> {
        let life = self.kept.get()?;
        if !caller.request.repeated {
            life.forget_repeats();
            return None;
        }
        let change = life.find_change(caller.request.number);
        if life.rule == RepeatRule::Numbers && change.is_none_or(|change| change.made.is_none()) {
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
    pub fn change_names(
        &self,
        change: &Change<'_>,
        repeat: Option<RepeatedRequest>,
        known: Option<FileIdentity>,
        caller: &Caller,
        request: &FsCaller<'_>,
    ) -> Result<Option<NodeAttr>> {
        let call = RepeatedCall::Change(*change);
        if self.repeat_rule() != Some(RepeatRule::Marks) {
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
            return repeat_marked(&*self.source, &RepeatedChange { call, mark, known: [known, None], caller });
        }
        let mark = random();
        self.note_begun(request, mark);
        self.source.change_marked(change, caller, Some(ChangeMark(u128::from(mark))))
    }

    /// The request has made its change of names.
    pub fn note_names_made(&self, caller: &FsCaller<'_>, made: MadeChange) {
        // The mark of the change has to stay.
        if self.repeat_rule() != Some(RepeatRule::Marks) {
            self.note_made(caller, made);
        }
    }

    /// The handle that the request has opened already.
    pub fn find_opened_handle(&self, caller: &FsCaller<'_>) -> Option<u64> {
        let life = self.kept.get().filter(|_| caller.request.repeated)?;
        life.repeats.lock().opens.get(&caller.request.number).copied()
    }

    /// The request is about to make a change; `before` is a fact by which the change is recognised.
    pub fn note_begun(&self, caller: &FsCaller<'_>, before: u64) {
        if let Some(life) = self.kept.get() {
            let request = caller.request.number;
            life.records.note_change(&KeptChange { request, before, ..KeptChange::default() });
        }
    }

    /// As [`MountRecords::note_begun`], with the time, unless the source recognises the change by a mark.
    pub fn note_making(&self, caller: &FsCaller<'_>) {
        if self.repeat_rule().is_some_and(|rule| rule != RepeatRule::Marks) {
            self.note_begun(caller, nanos_of(SystemTime::now()));
        }
    }

    /// The request has made its change.
    pub fn note_made(&self, caller: &FsCaller<'_>, made: MadeChange) {
        if let Some(life) = self.kept.get() {
            let request = caller.request.number;
            life.records.note_change(&KeptChange { request, made: Some(made), ..KeptChange::default() });
        }
    }

    /// Whether a process before has made the change of a repeated request, by the names of the source.
    pub fn find_outcome(
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
        let Some(life) = self.kept.get() else { return false };
        let owner = self.squash_uid.unwrap_or(caller.uid);
        let is_new = new.file_type == S_IFDIR || found.nlink == 1 && found.size == new.size;
        let tick = CLOCK_TICK.as_nanos() as u64;
        let changed = since_1970(found.ctime);
        let ended_at = nanos_of(life.ended_at);
        // A process that ended before it reported itself leaves the end of the one before it.
        let in_time = changed >= began.saturating_sub(tick) && (changed <= ended_at + tick || began > ended_at);
        found.mode & S_IFMT == new.file_type
            && is_new
            && (found.uid == owner && in_time || life.rule != RepeatRule::Names { host_clock: true })
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
