//! Locks of an open file of the source. The byte ranges of each owner belong to an open file description of their own,
//! so that the kernel and a file server tell the owners apart as they tell processes apart, and programs that use the
//! source itself meet the same locks. It knows neither mounts nor waits.
//!
//! `fcntl` locks of a process would all belong to this process, and would go with any close of the file here. So the
//! locks are those of open file descriptions (`F_OFD_SETLK`). The code is unsafe because no library in use has them.
#![allow(unsafe_code, reason = "fcntl with locks of open file descriptions, which rustix does not have")]

use parking_lot::Mutex;
use rustix::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use spurline_sys::proc_path;
use spurline_volume::locks::LAST_BYTE;
use spurline_volume::writes::{FileLock, LockConflict, LockFamily, LockKind, LockRange};
use std::collections::HashMap;

/// The locks that were set through one open file.
#[derive(Default)]
pub(crate) struct SourceLocks {
    state: Mutex<SourceLocksState>,
}

#[derive(Default)]
struct SourceLocksState {
    /// The description of each owner of byte ranges.
    owners: HashMap<u64, OwnedFd>,
    /// The lock of `flock(2)`, which belongs to the open file itself.
    flock: Option<LockKind>,
}

impl SourceLocks {
    /// A lock that is in the way of `lock`; `file` is the open file.
    pub fn find_conflict(&self, file: BorrowedFd<'_>, lock: &FileLock) -> rustix::io::Result<Option<LockConflict>> {
        let state = self.state.lock();
        // An owner's own locks are never in its way.
        let fd = state.owners.get(&lock.owner).map_or(file, |fd| fd.as_fd());
        let mut record = lock_record(lock.range, lock.kind);
        lock_call(fd, libc::F_OFD_GETLK, &mut record)?;
        let kind = match libc::c_int::from(record.l_type) {
            libc::F_RDLCK => LockKind::Read,
            libc::F_WRLCK => LockKind::Write,
            _ => return Ok(None),
        };
        let start = record.l_start.max(0) as u64;
        let end = if record.l_len == 0 { LAST_BYTE } else { start + (record.l_len.max(1) as u64 - 1) };
        // A description has no process: the kernel says -1.
        let pid = u32::try_from(record.l_pid).unwrap_or(0);
        Ok(Some(LockConflict { kind, range: LockRange { start, end }, pid }))
    }

    /// Sets or removes a lock without a wait. `open` opens the file once more.
    pub fn set_lock(
        &self,
        file: BorrowedFd<'_>,
        lock: &FileLock,
        open: impl Fn(OFlags) -> rustix::io::Result<OwnedFd>,
    ) -> rustix::io::Result<()> {
        let mut state = self.state.lock();
        if lock.family == LockFamily::Flock {
            return state.set_flock(file, lock.kind);
        }
        let mut record = lock_record(lock.range, lock.kind);
        if let Some(fd) = state.owners.get(&lock.owner) {
            lock_call(fd.as_fd(), libc::F_OFD_SETLK, &mut record)?;
            if lock.kind == LockKind::Unlock && lock.range == (LockRange { start: 0, end: LAST_BYTE }) {
                state.owners.remove(&lock.owner);
            }
            return Ok(());
        }
        if lock.kind == LockKind::Unlock {
            return Ok(());
        }
        let fd = open_for_locks(file, open)?;
        lock_call(fd.as_fd(), libc::F_OFD_SETLK, &mut record)?;
        state.owners.insert(lock.owner, fd);
        Ok(())
    }

    /// A duplicate of the description that an owner's byte ranges belong to.
    pub fn duplicate_of(&self, owner: u64) -> Option<OwnedFd> {
        self.state.lock().owners.get(&owner)?.try_clone().ok()
    }

    /// Continues with a lock of a process that has ended, whose description is open still.
    pub fn adopt(&self, lock: &FileLock, description: Option<OwnedFd>) {
        let mut state = self.state.lock();
        if lock.family == LockFamily::Flock {
            state.flock = Some(lock.kind);
        } else if let Some(description) = description {
            state.owners.insert(lock.owner, description);
        }
    }

    /// Releases all locks. Descriptors may have copies: the kernel keeps the open file for passthrough, and a program that this
    /// process has just started has all of them until it runs.
    pub fn release_all(&self, file: BorrowedFd<'_>) {
        let mut state = self.state.lock();
        if state.flock.take().is_some() {
            let _ = rustix::fs::flock(file, FlockOperation::NonBlockingUnlock);
        }
        for (_, fd) in state.owners.drain() {
            let mut all = lock_record(LockRange { start: 0, end: LAST_BYTE }, LockKind::Unlock);
            let _ = lock_call(fd.as_fd(), libc::F_OFD_SETLK, &mut all);
        }
    }
}

impl SourceLocksState {
    fn set_flock(&mut self, file: BorrowedFd<'_>, kind: LockKind) -> rustix::io::Result<()> {
        let operation = |kind| match kind {
            LockKind::Read => FlockOperation::NonBlockingLockShared,
            LockKind::Write => FlockOperation::NonBlockingLockExclusive,
            LockKind::Unlock => FlockOperation::NonBlockingUnlock,
        };
        let set = rustix::fs::flock(file, operation(kind));
        match (&set, self.flock) {
            (Ok(()), _) => self.flock = Some(kind).filter(|kind| *kind != LockKind::Unlock),
            // The kernel gives up the old lock before it finds the new one impossible.
            (Err(_), Some(old)) => {
                if rustix::fs::flock(file, operation(old)).is_err() {
                    self.flock = None;
                }
            }
            (Err(_), None) => {}
        }
        set
    }
}

/// One more description of the file, fit for every lock that the owner may set: a write lock wants write access.
fn open_for_locks(
    file: BorrowedFd<'_>,
    open: impl Fn(OFlags) -> rustix::io::Result<OwnedFd>,
) -> rustix::io::Result<OwnedFd> {
    let more = OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let own = rustix::fs::fcntl_getfl(file)? & OFlags::RWMODE;
    let as_self = |mode| rustix::fs::open(&*proc_path(file), mode | more, Mode::empty());
    // A server may map this process to a user without rights; the caller has the rights of the open file.
    let mut last = Errno::ACCESS;
    for attempt in [
        &|| as_self(OFlags::RDWR) as rustix::io::Result<OwnedFd>,
        &|| open(OFlags::RDWR | more),
        &|| as_self(own),
        &|| open(own | more),
    ] as [&dyn Fn() -> rustix::io::Result<OwnedFd>; 4]
    {
        match attempt() {
            Err(errno @ (Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY)) => last = errno,
            answer => return answer,
        }
    }
    Err(last)
}

fn lock_record(range: LockRange, kind: LockKind) -> libc::flock {
    let l_type = match kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    };
    let end = range.end.min(LAST_BYTE);
    // A length of 0 reaches to the end of any file. The process has to be 0 for locks of descriptions.
    let len = if end == LAST_BYTE { 0 } else { end - range.start.min(end) + 1 };
    libc::flock {
        l_type: l_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start.min(LAST_BYTE) as libc::off_t,
        l_len: len as libc::off_t,
        l_pid: 0,
    }
}

fn lock_call(fd: BorrowedFd<'_>, command: libc::c_int, record: &mut libc::flock) -> rustix::io::Result<()> {
    loop {
        // SAFETY: the descriptor is open for as long as it is borrowed, and both commands take a record that lives for
        // the call.
        match unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(record)) } {
            -1 => match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO) {
                Errno::INTR => {}
                // Two names of one condition.
                Errno::ACCESS => return Err(Errno::AGAIN),
                errno => return Err(errno),
            },
            _ => return Ok(()),
        }
    }
}
