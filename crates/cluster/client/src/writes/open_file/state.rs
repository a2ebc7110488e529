//! The states of an open file: which process has it, and what becomes of its locks when that process is lost. It knows no socket
//! and no clock: events and times go in, actions and steps come out.
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | open | process lost | moving | |
//! | open | locks forgotten | lock lost | begin loss |
//! | open | closed | gone | |
//! | moving | found again | open | |
//! | moving | opened next | reclaiming | |
//! | moving | entered | open | enter next, close left, resend |
//! | moving | locks forgotten | lock lost, moving | begin loss |
//! | moving | closed | gone | |
//! | reclaiming | entered | open | enter next, close left, resend |
//! | reclaiming | found again | open | close next |
//! | reclaiming | next lost | moving | close next later |
//! | reclaiming | locks changed | moving | close next |
//! | reclaiming | locks denied | lock lost | begin loss, enter next, close left, resend |
//! | reclaiming | locks forgotten | lock lost, moving | begin loss |
//! | reclaiming | closed | gone | close next later |
//! | lock lost | process lost | lock lost, moving | |
//! | lock lost | locks released | open | end loss |
//! | lock lost | closed | gone | end loss |
//! | lock lost, moving | found again | lock lost | close next |
//! | lock lost, moving | entered | lock lost | enter next, close left, resend |
//! | lock lost, moving | next lost | lock lost, moving | close next later |
//! | lock lost, moving | locks released | moving | end loss |
//! | lock lost, moving | closed | gone | close next later, end loss |
//! | gone | found again | gone | close left |
//! | gone | entered | gone | close next later, close left |
//!
//! Any other event leaves the state as it is: another thread was faster. A lock is never found again after its loss: only its
//! release or a close ends that.

use crate::writes::calls::HomeProcess;
use spurline_volume::locks::{KnownLock, KnownLocks, LockOwner};
use spurline_volume::writes::FileLock;
use std::time::{Duration, Instant};

/// How often the next process is tried once more after its connections broke.
const RECLAIM_RETRIES: usize = 3;

/// The state of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileState {
    /// Its process has it.
    Open,
    /// Its process is lost, and no other has it.
    Moving,
    /// The next process has it open, and its locks are set there.
    Reclaiming,
    /// Its process has it without its locks. It fails until they are released.
    LockLost,
    /// As [`FileState::Moving`], without its locks.
    LockLostMoving,
    /// The program has closed it.
    Gone,
}

/// What happens to an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileEvent {
    /// Its process can't be reached, or has another successor.
    ProcessLost,
    /// Its process has closed it, and released its locks.
    LocksForgotten,
    /// Its process has it open.
    FoundAgain,
    /// The next process has opened it, and its locks are to be set there.
    OpenedNext,
    /// The next process has it open, with its locks if there are some.
    Entered,
    /// The next process is lost as well.
    NextLost,
    /// A lock was set or released while they were set at the next process.
    LocksChanged,
    /// Another mount may have had the locks.
    LocksDenied,
    /// The program has released the last lock.
    LocksReleased,
    /// The program has closed it.
    Closed,
}

/// What has to be done after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileAction {
    /// All open files of the object fail from now on.
    BeginLoss,
    EndLoss,
    /// The next process is its process from now on.
    EnterNext,
    /// The next process closes it, now.
    CloseNext,
    /// The next process closes it when it can be reached.
    CloseNextLater,
    /// The process that it left closes it when it can be reached: it may only have been cut off.
    CloseLeft,
    /// The bytes that the lost process had are sent again.
    Resend,
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileTransition {
    pub next: FileState,
    pub actions: &'static [FileAction],
}

impl FileState {
    /// The table; `None` where the event changes nothing.
    pub fn after(self, event: FileEvent) -> Option<FileTransition> {
        use FileAction::{BeginLoss, CloseLeft, CloseNext, CloseNextLater, EndLoss, EnterNext, Resend};
        use FileEvent::{
            Closed, Entered, FoundAgain, LocksChanged, LocksDenied, LocksForgotten, LocksReleased, NextLost,
            OpenedNext, ProcessLost,
        };
        use FileState::{Gone, LockLost, LockLostMoving, Moving, Open, Reclaiming};
        match (self, event) {
            (Open, ProcessLost) => row(Moving, &[]),
            (Open, LocksForgotten) => row(LockLost, &[BeginLoss]),
            (Open | Moving, Closed) => row(Gone, &[]),
            (Moving, FoundAgain) => row(Open, &[]),
            (Moving, OpenedNext) => row(Reclaiming, &[]),
            (Moving | Reclaiming, Entered) => row(Open, &[EnterNext, CloseLeft, Resend]),
            (Moving | Reclaiming, LocksForgotten) => row(LockLostMoving, &[BeginLoss]),
            (Reclaiming, FoundAgain) => row(Open, &[CloseNext]),
            (Reclaiming, NextLost) => row(Moving, &[CloseNextLater]),
            (Reclaiming, LocksChanged) => row(Moving, &[CloseNext]),
            (Reclaiming, LocksDenied) => row(LockLost, &[BeginLoss, EnterNext, CloseLeft, Resend]),
            (Reclaiming, Closed) => row(Gone, &[CloseNextLater]),
            (LockLost, ProcessLost) => row(LockLostMoving, &[]),
            (LockLost, LocksReleased) => row(Open, &[EndLoss]),
            (LockLost, Closed) => row(Gone, &[EndLoss]),
            (LockLostMoving, FoundAgain) => row(LockLost, &[CloseNext]),
            (LockLostMoving, Entered) => row(LockLost, &[EnterNext, CloseLeft, Resend]),
            (LockLostMoving, NextLost) => row(LockLostMoving, &[CloseNextLater]),
            (LockLostMoving, LocksReleased) => row(Moving, &[EndLoss]),
            (LockLostMoving, Closed) => row(Gone, &[CloseNextLater, EndLoss]),
            (Gone, FoundAgain) => row(Gone, &[CloseLeft]),
            (Gone, Entered) => row(Gone, &[CloseNextLater, CloseLeft]),
            _ => None,
        }
    }
}

/// The end of the requests that set the locks at the next process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LocksEnd {
    Set,
    /// One is taken, perhaps by this mount at the lost process.
    Taken,
    /// The connections to the process broke.
    Broken,
    /// Another process has its place.
    Replaced,
    /// Another mount has had a lock.
    Denied,
}

/// What the thread that moves a file does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MoveStep {
    /// The file has a process.
    Done,
    /// The program has closed it.
    Closed,
    /// Open it at the next process; first wait for the requests that rely on its locks, if these are lost.
    OpenNext {
        lock_lost: bool,
    },
    /// Set its locks at this process.
    SetLocks {
        next: HomeProcess,
        locks: Vec<FileLock>,
    },
    /// Ask its process whether it has the file open: a process that is only cut off has the locks until it has heard nothing for long.
    AskLost,
    Pause,
    /// Enter the next process.
    Enter,
}

/// Times of a move.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MoveTerms {
    /// Locks are reclaimed only this soon after the last answer of the lost process.
    pub reclaim_within: Duration,
    /// How long a process is waited for that is only cut off.
    pub cut_off_wait: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReclaimPhase {
    Set,
    Ask,
    Pause,
}

/// When new locks are set: mounts that had locks in a lost process reclaim them first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SettleTime {
    /// Before the first lock.
    Unknown,
    /// The file has just entered another process.
    Entered,
    At(Instant),
}

/// An open file at the next process, until it enters that.
#[derive(Debug)]
struct NextProcess {
    process: HomeProcess,
    phase: ReclaimPhase,
    /// The last request for a lock found it taken.
    taken: bool,
    broken: usize,
}

/// A move that has begun.
#[derive(Debug)]
struct FileMove {
    terms: MoveTerms,
    /// Until when the lost process is waited for, since a next one has opened the file.
    wait_until: Option<Instant>,
    next: Option<NextProcess>,
    /// Processes that had it open and were lost as well.
    passed: Vec<HomeProcess>,
}

/// Actions, and the processes they are about.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FileOutcome {
    pub actions: &'static [FileAction],
    /// The process that the file has left, or that is its process.
    pub left: Option<HomeProcess>,
    pub next: Option<HomeProcess>,
}

/// A request for a lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LockAttempt {
    pub sent: Instant,
    /// How often the file had begun to move before.
    pub moves: u64,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct FileMachine {
    state: FileState,
    home: HomeProcess,
    locks: KnownLocks,
    /// When the request for the first of its locks was sent.
    locked_since: Option<Instant>,
    /// When the last request was sent that its process answered: the process had the locks then.
    confirmed: Option<Instant>,
    settled: SettleTime,
    moving: Option<FileMove>,
    /// How often the file has begun to move.
    moves: u64,
}

impl FileMachine {
    pub fn new(home: HomeProcess) -> FileMachine {
        FileMachine {
            state: FileState::Open,
            home,
            locks: KnownLocks::default(),
            locked_since: None,
            confirmed: None,
            settled: SettleTime::Unknown,
            moving: None,
            moves: 0,
        }
    }

    /// A request for a lock is about to be sent.
    pub fn begin_lock(&self, now: Instant) -> LockAttempt {
        LockAttempt { sent: now, moves: self.moves }
    }

    /// The process that has it, or had it last.
    pub fn home(&self) -> &HomeProcess {
        &self.home
    }

    pub fn has_locks(&self) -> bool {
        !self.locks.is_empty()
    }

    /// The locks of all owners.
    pub fn all_locks(&self) -> Vec<FileLock> {
        self.locks.iter().map(|known| known.lock).collect()
    }

    /// The locks of an owner.
    pub fn locks_of(&self, owner: LockOwner) -> Vec<FileLock> {
        self.locks.iter().map(|known| known.lock).filter(|lock| lock.owner() == owner).collect()
    }

    #[cfg(test)]
    pub fn state(&self) -> FileState {
        self.state
    }

    pub fn locked_since(&self) -> Option<Instant> {
        self.locked_since
    }

    /// When the last request was sent that the process of the file answered.
    pub fn confirmed(&self) -> Option<Instant> {
        self.confirmed
    }

    /// Processes that had it open and were lost as well.
    pub fn passed(&self) -> &[HomeProcess] {
        self.moving.as_ref().map_or(&[], |moving| &moving.passed)
    }

    /// When new locks are set.
    pub fn settled(&self) -> SettleTime {
        self.settled
    }

    pub fn settle(&mut self, at: Instant) {
        self.settled = SettleTime::At(at);
    }

    /// As [`FileMachine::settle`], before the first lock.
    pub fn settle_first(&mut self, at: Instant) {
        if self.settled == SettleTime::Unknown {
            self.settle(at);
        }
    }

    /// Its process answered a request that was sent at `sent`.
    pub fn confirm(&mut self, sent: Instant, home: &HomeProcess) {
        if self.home == *home {
            self.confirmed = self.confirmed.max(Some(sent));
        }
    }

    /// Process `home` granted a lock. False if the file has begun to move since the attempt, be it to the same process: the lock was not
    /// among those that were set there.
    pub fn note_granted(&mut self, lock: &FileLock, attempt: LockAttempt, home: &HomeProcess) -> bool {
        if self.home != *home || self.moves != attempt.moves {
            return false;
        }
        self.locks.set_range(KnownLock { lock: *lock, pid: 0 });
        self.locked_since.get_or_insert(attempt.sent);
        true
    }

    /// Continues with a lock that a process before has set through the file. Without an answer since, it is not reclaimed.
    pub fn adopt_lock(&mut self, lock: &FileLock, now: Instant) {
        self.locks.set_range(KnownLock { lock: *lock, pid: 0 });
        self.locked_since.get_or_insert(now);
    }

    /// Forgets a lock that is to be released.
    pub fn forget_lock(&mut self, lock: &FileLock) -> FileOutcome {
        self.locks.set_range(KnownLock { lock: *lock, pid: 0 });
        if self.has_locks() {
            return FileOutcome::default();
        }
        self.locked_since = None;
        self.enter(FileEvent::LocksReleased)
    }

    /// Whether the program has closed the file.
    pub fn is_closed(&self) -> bool {
        self.state == FileState::Gone
    }

    /// The program has closed it.
    pub fn close(&mut self) -> FileOutcome {
        self.enter(FileEvent::Closed)
    }

    /// Process `home` does not know the file: it has closed it, and released its locks.
    pub fn note_forgotten(&mut self, home: &HomeProcess) -> FileOutcome {
        if self.home != *home || !self.has_locks() {
            return FileOutcome::default();
        }
        self.enter(FileEvent::LocksForgotten)
    }

    /// Process `lost` can't be reached. False if the file has moved since.
    pub fn begin_move(&mut self, lost: &HomeProcess, terms: MoveTerms) -> bool {
        if self.home != *lost {
            return false;
        }
        self.moves += 1;
        self.enter(FileEvent::ProcessLost);
        if self.state != FileState::Gone {
            // A move that another call began goes on.
            self.moving.get_or_insert(FileMove { terms, wait_until: None, next: None, passed: Vec::new() });
        }
        true
    }

    /// What to do next to have a process for the file.
    pub fn next_step(&self, now: Instant) -> MoveStep {
        let lock_lost = match self.state {
            FileState::Open | FileState::LockLost => return MoveStep::Done,
            FileState::Gone => return MoveStep::Closed,
            FileState::LockLostMoving => true,
            FileState::Moving | FileState::Reclaiming => false,
        };
        let Some(next) = self.moving.as_ref().and_then(|moving| moving.next.as_ref()) else {
            return MoveStep::OpenNext { lock_lost };
        };
        if lock_lost || !self.has_locks() {
            return MoveStep::Enter;
        }
        match next.phase {
            ReclaimPhase::Set if self.is_in_time(now) => {
                MoveStep::SetLocks { next: next.process.clone(), locks: self.all_locks() }
            }
            ReclaimPhase::Set | ReclaimPhase::Ask => MoveStep::AskLost,
            ReclaimPhase::Pause => MoveStep::Pause,
        }
    }

    /// Whether locks may be reclaimed at `now`.
    pub fn is_in_time(&self, now: Instant) -> bool {
        let within = self.moving.as_ref().map_or(Duration::ZERO, |moving| moving.terms.reclaim_within);
        self.confirmed.is_some_and(|confirmed| now < confirmed + within)
    }

    /// The process as before has opened the file at `now`. It has kept a file with locks open for `kept` after a request.
    pub fn check_kept(&mut self, now: Instant, kept: Duration) -> FileOutcome {
        if self.has_locks() && self.confirmed.is_none_or(|at| now.saturating_duration_since(at) >= kept) {
            return self.enter(FileEvent::LocksForgotten);
        }
        FileOutcome::default()
    }

    /// A process has opened the file at `now`.
    pub fn note_opened(&mut self, process: HomeProcess, now: Instant) -> FileOutcome {
        if process.instance == self.home.instance {
            return self.enter(FileEvent::FoundAgain);
        }
        let has_locks = self.has_locks();
        let Some(moving) = &mut self.moving else {
            // The program has closed it meanwhile.
            return FileOutcome { actions: &[FileAction::CloseNextLater], left: None, next: Some(process) };
        };
        moving.wait_until.get_or_insert(now + moving.terms.cut_off_wait);
        moving.next = Some(NextProcess { process, phase: ReclaimPhase::Set, taken: false, broken: 0 });
        // Lost locks are not set again.
        self.enter(if has_locks && self.state == FileState::Moving {
            FileEvent::OpenedNext
        } else {
            FileEvent::Entered
        })
    }

    /// The file enters the next process without locks to set.
    pub fn enter_next(&mut self) -> FileOutcome {
        if self.state == FileState::Reclaiming && self.has_locks() {
            return FileOutcome::default();
        }
        self.enter(FileEvent::Entered)
    }

    /// The requests have ended that set `locks` at the next process.
    pub fn note_locks(&mut self, locks: &[FileLock], end: LocksEnd, now: Instant) -> FileOutcome {
        let in_time = self.is_in_time(now);
        let unchanged = self.locks.iter().map(|known| known.lock).eq(locks.iter().copied());
        let Some(next) = self.moving.as_mut().and_then(|moving| moving.next.as_mut()) else {
            return FileOutcome::default();
        };
        next.phase = ReclaimPhase::Ask;
        match end {
            // They were executed in time if the answer is.
            LocksEnd::Set if in_time && unchanged => self.enter(FileEvent::Entered),
            // A lock that was released since is set there.
            LocksEnd::Set if in_time => self.enter(FileEvent::LocksChanged),
            LocksEnd::Set => FileOutcome::default(),
            LocksEnd::Taken => {
                next.taken = true;
                FileOutcome::default()
            }
            LocksEnd::Broken if next.broken < RECLAIM_RETRIES => {
                next.taken = false;
                next.broken += 1;
                FileOutcome::default()
            }
            LocksEnd::Broken | LocksEnd::Replaced => {
                let passed = next.process.clone();
                let outcome = self.enter(FileEvent::NextLost);
                self.moving.iter_mut().for_each(|moving| moving.passed.push(passed.clone()));
                outcome
            }
            LocksEnd::Denied => self.deny_locks(),
        }
    }

    /// Whether the lost process has the file open, as far as it answered.
    pub fn note_asked(&mut self, open: Option<bool>, now: Instant) -> FileOutcome {
        let in_time = self.is_in_time(now);
        match open {
            Some(true) => return self.enter(FileEvent::FoundAgain),
            Some(false) => return self.deny_locks(),
            None => {}
        }
        let Some(moving) = &mut self.moving else { return FileOutcome::default() };
        let is_waited_for = moving.wait_until.is_some_and(|until| now < until);
        let Some(next) = &mut moving.next else { return FileOutcome::default() };
        if is_waited_for && (in_time || next.taken) {
            next.phase = ReclaimPhase::Pause;
            return FileOutcome::default();
        }
        self.deny_locks()
    }

    /// Locks that the program has released meanwhile are not lost.
    fn deny_locks(&mut self) -> FileOutcome {
        self.enter(if self.has_locks() { FileEvent::LocksDenied } else { FileEvent::Entered })
    }

    /// A pause is over.
    pub fn note_pause(&mut self) {
        if let Some(next) = self.moving.as_mut().and_then(|moving| moving.next.as_mut()) {
            next.phase = ReclaimPhase::Set;
        }
    }

    /// The time of the call that moves the file is over; the next call goes on.
    pub fn stop_move(&mut self) -> FileOutcome {
        self.enter(FileEvent::NextLost)
    }

    /// Looks up the table, and applies the row to what this machine knows.
    fn enter(&mut self, event: FileEvent) -> FileOutcome {
        let Some(FileTransition { next: state, actions }) = self.state.after(event) else {
            return FileOutcome::default();
        };
        self.state = state;
        let left = Some(self.home.clone());
        let mut next = None;
        if actions
            .iter()
            .any(|action| matches!(action, FileAction::EnterNext | FileAction::CloseNext | FileAction::CloseNextLater))
        {
            next = self.moving.as_mut().and_then(|moving| moving.next.take()).map(|next| next.process);
        }
        if actions.contains(&FileAction::EnterNext)
            && let Some(next) = &next
        {
            self.home = next.clone();
            self.settled = SettleTime::Entered;
        }
        if !matches!(state, FileState::Moving | FileState::Reclaiming | FileState::LockLostMoving) {
            self.moving = None;
        }
        FileOutcome { actions, left, next }
    }
}

/// A row of the table.
fn row(next: FileState, actions: &'static [FileAction]) -> Option<FileTransition> {
    Some(FileTransition { next, actions })
}

#[cfg(test)]
mod tests {
    use super::FileAction::{BeginLoss, CloseLeft, CloseNext, CloseNextLater, EndLoss, EnterNext, Resend};
    use super::FileState::{Gone, LockLost, LockLostMoving, Moving, Open, Reclaiming};
    use super::*;
    use spurline_volume::writes::{LockFamily, LockKind, LockRange};

    const STATES: [FileState; 6] = [Open, Moving, Reclaiming, LockLost, LockLostMoving, Gone];
    const EVENTS: [FileEvent; 10] = [
        FileEvent::ProcessLost,
        FileEvent::LocksForgotten,
        FileEvent::FoundAgain,
        FileEvent::OpenedNext,
        FileEvent::Entered,
        FileEvent::NextLost,
        FileEvent::LocksChanged,
        FileEvent::LocksDenied,
        FileEvent::LocksReleased,
        FileEvent::Closed,
    ];
    const TERMS: MoveTerms =
        MoveTerms { reclaim_within: Duration::from_secs(5), cut_off_wait: Duration::from_secs(30) };
    const KEPT: Duration = Duration::from_secs(20);

    /// A name of the code as the table writes it: `LockLostMoving` is "lock lost, moving".
    fn words(name: &str) -> String {
        let mut words = String::new();
        for letter in name.chars() {
            if letter.is_uppercase() && !words.is_empty() {
                words.push(' ');
            }
            words.extend(letter.to_lowercase());
        }
        words.replace("lost moving", "lost, moving")
    }

    #[test]
    fn the_code_is_what_the_table_shows() {
        let shown: Vec<&str> =
            include_str!("state.rs").lines().filter(|line| line.starts_with("//! | ")).skip(1).collect();
        let mut rows = Vec::new();
        for state in STATES {
            for event in EVENTS {
                let Some(row) = state.after(event) else { continue };
                let actions: Vec<String> = row.actions.iter().map(|action| words(&format!("{action:?}"))).collect();
                let cells = [state, row.next].map(|state| words(&format!("{state:?}")));
                let line = format!(
                    "//! | {} | {} | {} | {} |",
                    cells[0],
                    words(&format!("{event:?}")),
                    cells[1],
                    actions.join(", ")
                );
                rows.push(line.replace("|  |", "| |"));
            }
        }
        for row in &rows {
            assert!(shown.contains(&row.as_str()), "the table lacks a row: {row}");
        }
        assert_eq!(shown.len(), rows.len(), "the table has rows that the code has not");
    }

    #[test]
    fn a_lost_lock_is_found_again_by_its_release_alone() {
        for state in STATES {
            for event in EVENTS {
                let Some(row) = state.after(event) else { continue };
                let is_lost = |state| matches!(state, LockLost | LockLostMoving);
                let counted = |action| usize::from(row.actions.contains(&action));
                assert_eq!(
                    counted(BeginLoss),
                    usize::from(!is_lost(state) && is_lost(row.next)),
                    "{state:?} {event:?}"
                );
                assert_eq!(counted(EndLoss), usize::from(is_lost(state) && !is_lost(row.next)), "{state:?} {event:?}");
                if counted(EndLoss) == 1 {
                    assert!(matches!(event, FileEvent::LocksReleased | FileEvent::Closed), "{state:?} {event:?}");
                }
                // Bytes follow the file, and the process that it left closes it.
                assert_eq!(counted(EnterNext), counted(Resend), "{state:?} {event:?}");
                assert!(counted(EnterNext) <= counted(CloseLeft), "{state:?} {event:?}");
                assert!(counted(EnterNext) + counted(CloseNext) + counted(CloseNextLater) <= 1, "{state:?} {event:?}");
                assert!(state != Gone || row.next == Gone, "{event:?}");
            }
        }
    }

    fn process(instance: u64) -> HomeProcess {
        HomeProcess { node: format!("n{instance}").into(), instance }
    }

    fn lock(kind: LockKind) -> FileLock {
        FileLock { family: LockFamily::Posix, owner: 1, range: LockRange { start: 0, end: 9 }, kind }
    }

    /// A file with a lock that its process 1 confirmed at `start`.
    fn locked(start: Instant) -> FileMachine {
        let mut file = FileMachine::new(process(1));
        assert!(file.note_granted(&lock(LockKind::Write), file.begin_lock(start), &process(1)));
        file.confirm(start, &process(1));
        file
    }

    #[test]
    fn a_file_without_locks_moves_to_the_next_process() {
        let now = Instant::now();
        let mut file = FileMachine::new(process(1));
        assert!(!file.begin_move(&process(7), TERMS), "it was never there");
        assert!(file.begin_move(&process(1), TERMS));
        assert_eq!(file.next_step(now), MoveStep::OpenNext { lock_lost: false });
        let outcome = file.note_opened(process(2), now);
        assert_eq!(outcome.actions, [EnterNext, CloseLeft, Resend]);
        assert_eq!((outcome.left, file.home(), file.next_step(now)), (Some(process(1)), &process(2), MoveStep::Done));
        assert_eq!(file.settled(), SettleTime::Entered, "no new lock before it is known when the loss was seen");
    }

    #[test]
    fn a_lock_that_is_granted_while_the_file_is_opened_again_is_requested_again() {
        let start = Instant::now();
        let mut file = FileMachine::new(process(1));
        let attempt = file.begin_lock(start);
        file.begin_move(&process(1), TERMS);
        file.note_opened(process(1), start);
        assert!(!file.note_granted(&lock(LockKind::Write), attempt, &process(1)));
        assert!(file.note_granted(&lock(LockKind::Write), file.begin_lock(start), &process(1)));
    }

    #[test]
    fn locks_are_reclaimed_in_time_or_lost() {
        let start = Instant::now();
        let mut file = locked(start);
        file.begin_move(&process(1), TERMS);
        file.note_opened(process(2), start);
        let wanted = vec![lock(LockKind::Write)];
        assert_eq!(file.next_step(start), MoveStep::SetLocks { next: process(2), locks: wanted.clone() });
        assert_eq!(file.note_locks(&wanted, LocksEnd::Set, start).actions, [EnterNext, CloseLeft, Resend]);
        assert_eq!((file.state(), file.home()), (Open, &process(2)));

        let late = start + TERMS.reclaim_within;
        let mut file = locked(start);
        file.begin_move(&process(1), TERMS);
        file.note_opened(process(2), late);
        assert_eq!(file.next_step(late), MoveStep::AskLost);
        assert_eq!(file.note_asked(None, late).actions, [BeginLoss, EnterNext, CloseLeft, Resend]);
        assert_eq!(file.state(), LockLost);
        file.forget_lock(&lock(LockKind::Unlock));
        assert_eq!(file.state(), Open);
    }

    #[test]
    fn a_process_that_is_cut_off_is_waited_for() {
        let start = Instant::now();
        let mut file = locked(start);
        file.begin_move(&process(1), TERMS);
        file.note_opened(process(2), start);
        let wanted = vec![lock(LockKind::Write)];
        let late = start + TERMS.cut_off_wait - Duration::from_secs(1);
        for now in [start, late] {
            file.note_locks(&wanted, LocksEnd::Taken, now);
            file.note_asked(None, now);
            assert_eq!(file.next_step(now), MoveStep::Pause);
            file.note_pause();
        }
        assert_eq!(file.note_asked(Some(true), late).actions, [CloseNext], "it has kept the locks");
        assert_eq!((file.state(), file.home()), (Open, &process(1)));
    }

    #[test]
    fn a_lock_that_was_released_while_it_was_set_again_is_not_kept() {
        let start = Instant::now();
        let mut file = locked(start);
        file.begin_move(&process(1), TERMS);
        file.note_opened(process(2), start);
        let wanted = vec![lock(LockKind::Write)];
        file.forget_lock(&lock(LockKind::Unlock));
        assert_eq!(file.note_locks(&wanted, LocksEnd::Set, start).actions, [CloseNext]);
        assert_eq!(file.next_step(start), MoveStep::OpenNext { lock_lost: false });
    }

    #[test]
    fn the_same_process_keeps_the_locks_for_a_while() {
        let start = Instant::now();
        for (silence, state) in [(KEPT - Duration::from_secs(1), Open), (KEPT, LockLost)] {
            let mut file = locked(start);
            file.begin_move(&process(1), TERMS);
            file.check_kept(start + silence, KEPT);
            file.note_opened(process(1), start + silence);
            assert_eq!(file.state(), state);
        }
    }

    #[test]
    fn a_file_that_is_closed_while_it_moves_stays_open_nowhere() {
        let start = Instant::now();
        let mut file = FileMachine::new(process(1));
        file.begin_move(&process(1), TERMS);
        file.close();
        assert_eq!(file.next_step(start), MoveStep::Closed);
        assert_eq!(file.note_opened(process(2), start).actions, [CloseNextLater]);
        assert_eq!(file.note_opened(process(1), start).actions, [CloseLeft]);
        let mut file = locked(start);
        file.begin_move(&process(1), TERMS);
        file.note_opened(process(2), start);
        assert_eq!(file.close().next, Some(process(2)));
    }

    #[test]
    fn a_loss_that_another_thread_sees_ends_the_reclaim() {
        let start = Instant::now();
        let mut file = locked(start);
        file.begin_move(&process(1), TERMS);
        file.note_opened(process(2), start);
        assert_eq!(file.note_forgotten(&process(1)).actions, [BeginLoss]);
        assert_eq!(file.next_step(start), MoveStep::Enter);
        assert_eq!(file.enter_next().actions, [EnterNext, CloseLeft, Resend]);
        assert_eq!((file.state(), file.home()), (LockLost, &process(2)));
    }
}
