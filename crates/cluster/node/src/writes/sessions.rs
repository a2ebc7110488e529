//! The sessions of mounts that write: the answers that were given, until the mount has them, and its open files. It
//! knows neither the source nor the wire.

use crate::path_locks::OpenPath;
use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};
use spurline_proto::LOCK_TIMES;
use spurline_types::errno::{EBADF, EMFILE};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{WritableDirectory, WritableFile, WritableObject};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Limit of sessions: one per mount.
const SESSIONS_MAX: usize = 4096;
/// Limit of answers kept for one session: more than a mount has requests in flight.
const ANSWERS_MAX: usize = 4096;
/// Limit of open files of one session.
const FILES_MAX: usize = 1 << 20;
/// Limit of files of one session that are closed and may be opened late: more than a mount gives up while requests are late.
const CLOSED_MAX: usize = 4096;

/// An open file or directory of a session.
#[derive(Clone)]
pub(crate) enum OpenObject {
    File(Arc<dyn WritableFile>),
    Directory(Arc<dyn WritableDirectory>),
    /// The locks of an object that the mount writes itself.
    Path(Arc<OpenPath>),
}

impl OpenObject {
    /// The calls that files and directories have in common.
    ///
    /// # Errors
    /// `EBADF` for a path without bytes.
    pub fn object(&self) -> Result<&dyn WritableObject> {
        match self {
            OpenObject::File(file) => Ok(&**file),
            OpenObject::Directory(directory) => Ok(&**directory),
            OpenObject::Path(_) => Err(Error::new(ErrorKind::Io(EBADF), "it was opened for locks only")),
        }
    }

    /// Releases the locks that were set through it.
    fn release_locks(&self) {
        match self {
            OpenObject::File(file) => file.release_locks(),
            OpenObject::Path(path) => path.release(),
            OpenObject::Directory(_) => {}
        }
    }
}

/// An answer that is being made, or was given.
#[derive(Default)]
pub(crate) struct AnswerSlot {
    bytes: Mutex<Option<Arc<[u8]>>>,
    given: Condvar,
}

impl AnswerSlot {
    /// Waits for the answer until `deadline`.
    pub fn wait_answer(&self, deadline: Instant) -> Option<Arc<[u8]>> {
        let mut bytes = self.bytes.lock();
        while bytes.is_none() {
            if self.given.wait_until(&mut bytes, deadline).timed_out() {
                return None;
            }
        }
        bytes.clone()
    }

    pub fn give_answer(&self, answer: &[u8]) {
        *self.bytes.lock() = Some(answer.into());
        self.given.notify_all();
    }
}

/// Whether a change is new to the session.
pub(crate) enum ChangeState {
    /// It is: execute it, and give the answer to the slot.
    New(Arc<AnswerSlot>),
    /// Another thread executes it, or has.
    Known(Arc<AnswerSlot>),
}

/// The answers of a session.
#[derive(Default)]
struct KeptAnswers {
    slots: HashMap<u64, Arc<AnswerSlot>>,
    /// The mount has the answers to all changes below this number, but for those that may come again.
    answered: u64,
    /// The changes of a process that has ended, which the next process may send again.
    repeatable: HashSet<u64>,
}

/// One mount.
pub(crate) struct WriteSession {
    used: Mutex<Instant>,
    answers: Mutex<KeptAnswers>,
    /// The highest number of attempts that a write came with; held while a write is executed.
    attempts: RwLock<u64>,
    files: RwLock<HashMap<u64, OpenObject>>,
    /// The files that were closed without being open, each with the number below which changes may still come that open it: the
    /// mount has given them up.
    closed: Mutex<HashMap<u64, u64>>,
    /// The files that were locked since they were opened.
    locked: Mutex<HashSet<u64>>,
    uses_source: AtomicBool,
}

impl WriteSession {
    fn new() -> Self {
        WriteSession {
            used: Mutex::new(Instant::now()),
            answers: Mutex::default(),
            attempts: RwLock::default(),
            files: RwLock::default(),
            closed: Mutex::default(),
            locked: Mutex::default(),
            uses_source: AtomicBool::new(false),
        }
    }

    /// The mount uses the source here.
    pub fn note_source(&self) {
        self.uses_source.store(true, Ordering::Relaxed);
    }

    /// Whether the mount has used no file of the source here: a mount that writes objects itself has locks of paths only.
    pub fn has_no_source(&self) -> bool {
        !self.uses_source.load(Ordering::Relaxed)
    }

    /// A lock was set through this file.
    pub fn note_lock(&self, file: u64) {
        self.locked.lock().insert(file);
    }

    /// Closes the files that were locked; returns them, so that the caller releases their locks and drops them.
    fn close_locked(&self) -> Vec<OpenObject> {
        let locked = std::mem::take(&mut *self.locked.lock());
        let mut files = self.files.write();
        locked.iter().filter_map(|file| files.remove(file)).collect()
    }

    /// Registers change `number`; forgets the answers to changes below `answered`. `again` if another process may have
    /// executed it: bytes of a lost process can come again after their answer.
    ///
    /// # Errors
    /// `Throttled` when the mount takes no notice of its answers; `Unavailable` for a request that is late: the mount has
    /// its answer, from another connection.
    pub fn begin_change(&self, number: u64, answered: u64, again: bool) -> Result<ChangeState> {
        let mut kept = self.answers.lock();
        if answered > kept.answered {
            kept.answered = answered;
            let KeptAnswers { slots, repeatable, .. } = &mut *kept;
            slots.retain(|number, _| *number >= answered || repeatable.contains(number));
        }
        if let Some(slot) = kept.slots.get(&number) {
            return Ok(ChangeState::Known(Arc::clone(slot)));
        }
        if number < kept.answered && !again && !kept.repeatable.contains(&number) {
            return Err(Error::new(ErrorKind::Unavailable, "the mount has the answer to this change already"));
        }
        if kept.slots.len() >= ANSWERS_MAX {
            let why = format!("the mount has {ANSWERS_MAX} changes without having confirmed an answer");
            return Err(Error::new(ErrorKind::Throttled, why));
        }
        let slot = Arc::new(AnswerSlot::default());
        kept.slots.insert(number, Arc::clone(&slot));
        Ok(ChangeState::New(slot))
    }

    /// Keeps the answers to these changes, and of others below the number of answered ones none.
    pub fn keep_answers(&self, changes: impl Iterator<Item = u64>) {
        let mut kept = self.answers.lock();
        let KeptAnswers { slots, answered, repeatable } = &mut *kept;
        *repeatable = changes.collect();
        slots.retain(|number, _| number >= answered || repeatable.contains(number));
    }

    /// Forgets a change that was not executed, so that it can be sent again.
    pub fn forget_change(&self, number: u64) {
        self.answers.lock().slots.remove(&number);
    }

    /// Begins a write at an offset, a lock or a close, which ends when the result is dropped. `attempts` is the mount's count
    /// of attempts without an answer: a request with a higher count waits for those with lower ones, and afterwards these are
    /// not executed any more. So an attempt that the mount gave up never undoes what came after it.
    ///
    /// # Errors
    /// `Throttled` when the count is out of date: the mount sends a request that it still wants again, with the new one.
    pub fn begin_attempt(&self, attempts: u64) -> Result<RwLockReadGuard<'_, u64>> {
        loop {
            let highest = self.attempts.read();
            if attempts == *highest {
                return Ok(highest);
            }
            if attempts < *highest {
                let why = "the mount repeated a request since it sent this one";
                return Err(Error::new(ErrorKind::Throttled, why));
            }
            drop(highest);
            let mut highest = self.attempts.write();
            *highest = attempts.max(*highest);
        }
    }

    /// The open object with this number.
    pub fn open_object(&self, file: u64) -> Option<OpenObject> {
        self.files.read().get(&file).cloned()
    }

    /// Adds an object that the change `number` has opened.
    ///
    /// # Errors
    /// `EMFILE` at the limit; `Unavailable` for a change that is late: the mount has closed the file.
    pub fn add_object(&self, file: u64, number: u64, object: OpenObject) -> Result<()> {
        let mut files = self.files.write();
        if self.closed.lock().remove(&file).is_some_and(|below| number < below) {
            return Err(Error::new(ErrorKind::Unavailable, "the mount has closed this file already"));
        }
        if files.len() >= FILES_MAX {
            let why = format!("this mount has {FILES_MAX} files open on the node");
            return Err(Error::new(ErrorKind::Io(EMFILE), why));
        }
        files.insert(file, object);
        Ok(())
    }

    /// Closes an open object. Its locks are released although another request may still use it, such as one that shows the
    /// mount to be there: the mount gives them to the next owner once it has the answer. A change below the number
    /// `opened_below` that comes later does not open it again.
    pub fn close_object(&self, file: u64, opened_below: u64) {
        let was_locked = self.locked.lock().remove(&file);
        let mut files = self.files.write();
        let object = files.remove(&file);
        if object.is_none() {
            self.note_closed(file, opened_below);
        }
        drop(files);
        object.iter().filter(|_| was_locked).for_each(OpenObject::release_locks);
    }

    fn note_closed(&self, file: u64, opened_below: u64) {
        let mut closed = self.closed.lock();
        if closed.len() >= CLOSED_MAX
            && let Some(oldest) = closed.iter().min_by_key(|(_, below)| **below).map(|(file, _)| *file)
        {
            closed.remove(&oldest);
        }
        closed.insert(file, opened_below);
    }

    /// Number of open objects.
    pub fn open_count(&self) -> usize {
        self.files.read().len()
    }
}

/// All sessions of a node.
#[derive(Default)]
pub(crate) struct WriteSessions {
    sessions: Mutex<HashMap<u64, Arc<WriteSession>>>,
}

impl WriteSessions {
    /// The session with this number; a new one if there is none.
    ///
    /// # Errors
    /// `Throttled` at the limit.
    pub fn session(&self, number: u64) -> Result<Arc<WriteSession>> {
        let mut sessions = self.sessions.lock();
        if let Some(session) = sessions.get(&number) {
            *session.used.lock() = Instant::now();
            return Ok(Arc::clone(session));
        }
        if sessions.len() >= SESSIONS_MAX {
            let why = format!("the node has {SESSIONS_MAX} sessions of writing mounts already");
            return Err(Error::new(ErrorKind::Throttled, why));
        }
        let session = Arc::new(WriteSession::new());
        sessions.insert(number, Arc::clone(&session));
        Ok(session)
    }

    /// Ends the sessions that were idle for too long at `now`, and closes the locked files of those that were idle for less;
    /// returns the numbers of both.
    pub fn expire_idle(&self, now: Instant) -> (usize, usize) {
        let mut ended = Vec::new();
        let mut unlocked = Vec::new();
        self.sessions.lock().retain(|_, session| {
            let idle = now.saturating_duration_since(*session.used.lock());
            // A request that is being executed holds it.
            let keep = Arc::strong_count(session) > 1 || idle < LOCK_TIMES.session_idle;
            if !keep {
                ended.push(Arc::clone(session));
            } else if idle >= LOCK_TIMES.locks_idle {
                unlocked.extend(session.close_locked());
            }
            keep
        });
        // Files are closed without the lock: that may take as long as the source does.
        unlocked.iter().for_each(OpenObject::release_locks);
        (ended.len(), unlocked.len())
    }

    /// Numbers of sessions and of open files.
    pub fn counts(&self) -> (usize, usize) {
        let sessions = self.sessions.lock();
        (sessions.len(), sessions.values().map(|session| session.open_count()).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_answer_is_kept_until_the_mount_has_it() {
        let sessions = WriteSessions::default();
        let session = sessions.session(7).unwrap();
        let ChangeState::New(slot) = session.begin_change(1, 0, false).unwrap() else { panic!("it is new") };
        let ChangeState::Known(again) = session.begin_change(1, 0, false).unwrap() else { panic!("it is known") };
        assert!(again.wait_answer(Instant::now()).is_none(), "not answered yet");
        slot.give_answer(b"done");
        assert_eq!(again.wait_answer(Instant::now()).as_deref(), Some(&b"done"[..]));
        // The next change confirms it.
        assert!(matches!(session.begin_change(2, 2, false).unwrap(), ChangeState::New(_)));
        let late = session.begin_change(1, 0, false).err().unwrap();
        assert_eq!(late.kind(), ErrorKind::Unavailable, "a request that was given up arrives after its repetition");
        session.forget_change(2);
        assert!(matches!(session.begin_change(2, 0, false).unwrap(), ChangeState::New(_)));
        for number in 3..=ANSWERS_MAX as u64 + 1 {
            session.begin_change(number, 0, false).unwrap();
        }
        assert_eq!(session.begin_change(1 << 40, 0, false).err().unwrap().kind(), ErrorKind::Throttled);
    }

    #[test]
    fn changes_of_a_process_that_has_ended_can_come_again_beside_any_number_of_others() {
        let sessions = WriteSessions::default();
        let session = sessions.session(7).unwrap();
        let ChangeState::New(slot) = session.begin_change(5, 0, false).unwrap() else { panic!("it is new") };
        slot.give_answer(b"done");
        // The node has not got the second one.
        session.keep_answers([5, 6].into_iter());
        for number in 1 << 16..(1 << 16) + 2 * ANSWERS_MAX as u64 {
            session.begin_change(number, number, false).unwrap();
        }
        let ChangeState::Known(again) = session.begin_change(5, 0, false).unwrap() else { panic!("it is known") };
        assert_eq!(again.wait_answer(Instant::now()).as_deref(), Some(&b"done"[..]));
        assert!(matches!(session.begin_change(6, 0, false).unwrap(), ChangeState::New(_)));
        assert_eq!(session.begin_change(7, 0, false).err().unwrap().kind(), ErrorKind::Unavailable);
        session.keep_answers([6].into_iter());
        assert_eq!(session.begin_change(5, 0, false).err().unwrap().kind(), ErrorKind::Unavailable);
        assert!(matches!(session.begin_change(6, 0, false).unwrap(), ChangeState::Known(_)));
    }

    #[test]
    fn a_write_that_was_given_up_ends_before_its_repetition_or_never_begins() {
        let sessions = WriteSessions::default();
        let session = sessions.session(7).unwrap();
        let slow = session.begin_attempt(0).unwrap();
        drop(session.begin_attempt(0).unwrap());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let repeated = scope.spawn(|| {
                let _write = session.begin_attempt(1).unwrap();
                assert!(over.load(Ordering::SeqCst), "it waits for the attempt before");
            });
            std::thread::sleep(Duration::from_millis(20));
            over.store(true, Ordering::SeqCst);
            drop(slow);
            repeated.join().unwrap();
        });
        assert_eq!(session.begin_attempt(0).err().unwrap().kind(), ErrorKind::Throttled);
        assert_eq!(*session.begin_attempt(5).unwrap(), 5);
    }

    /// The other open files stay: without a lock, none is in the way of another mount.
    #[test]
    fn idle_sessions_lose_the_files_with_locks_first() {
        use spurline_volume::writes::{Caller, NodePath, WritableVolume as _};
        let folder = tempfile::tempdir().unwrap();
        let source = spurline_directory::WritableSource::open(folder.path(), None).unwrap();
        let sessions = WriteSessions::default();
        let session = sessions.session(1).unwrap();
        for file in 1..=3 {
            let at = NodePath { path: b"", expected: None };
            let open = source.open_directory(at, &Caller::default()).unwrap();
            session.add_object(file, 1, OpenObject::Directory(open.into())).unwrap();
        }
        session.note_lock(1);
        session.note_lock(2);
        session.close_object(2, 2);
        assert_eq!(sessions.expire_idle(Instant::now() + LOCK_TIMES.locks_idle / 2), (0, 0));
        assert_eq!(sessions.expire_idle(Instant::now() + LOCK_TIMES.locks_idle), (0, 1));
        assert!(session.open_object(1).is_none() && session.open_object(3).is_some());
    }

    #[test]
    fn a_late_change_does_not_open_a_file_that_the_mount_has_closed() {
        use spurline_volume::writes::{Caller, NodePath, WritableVolume as _};
        let folder = tempfile::tempdir().unwrap();
        let source = spurline_directory::WritableSource::open(folder.path(), None).unwrap();
        let session = WriteSession::new();
        let opened = |file, number| {
            let open = source.open_directory(NodePath { path: b"", expected: None }, &Caller::default()).unwrap();
            session.add_object(file, number, OpenObject::Directory(open.into())).map_err(|error| error.kind())
        };
        session.close_object(1, 8);
        session.close_object(2, 8);
        assert_eq!(opened(1, 7), Err(ErrorKind::Unavailable));
        assert_eq!(opened(2, 8), Ok(()), "a file that came back to this process");
        assert_eq!(session.open_count(), 1);
        (0..2 * CLOSED_MAX as u64).for_each(|file| session.close_object(10 + file, 9 + file));
        assert_eq!(session.closed.lock().len(), CLOSED_MAX);
        let last = 9 + 2 * CLOSED_MAX as u64;
        assert_eq!(opened(last, 9), Err(ErrorKind::Unavailable), "the files closed last are known");
    }

    #[test]
    fn idle_sessions_end() {
        let sessions = WriteSessions::default();
        let busy = sessions.session(1).unwrap();
        drop(sessions.session(2).unwrap());
        assert_eq!(sessions.expire_idle(Instant::now()), (0, 0));
        assert_eq!(sessions.expire_idle(Instant::now() + LOCK_TIMES.session_idle), (1, 0), "one is in use");
        drop(busy);
        assert_eq!(
            (sessions.expire_idle(Instant::now() + LOCK_TIMES.session_idle), sessions.counts()),
            ((1, 0), (0, 0))
        );
    }
}
