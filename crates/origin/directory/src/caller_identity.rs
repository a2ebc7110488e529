//! Acts as the calling process: user, group, supplementary groups and file mode creation mask of one thread, for the
//! time of one system call. It knows no path and no file.
//!
//! The kernel keeps these values per thread; only the C library's wrappers change them for all threads, and they are
//! not used here. As another user than root, the thread also loses all capabilities, so that
//! set-user-ID bits are treated as the caller's own.
#![allow(unsafe_code, reason = "unshare, which gives a thread a mask of its own, and a close that reports errors")]

use rustix::fd::{BorrowedFd, IntoRawFd as _};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use rustix::thread::{
    CapabilitySet, UnshareFlags, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use rustix::{fs::Gid, fs::Uid};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::Caller;
use std::cell::Cell;
use std::marker::PhantomData;

/// User and group that all changes are made as, in place of the callers'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Squash {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// What the kernel has checked already for a caller with [`Caller::rights_checked`].
const CHECKED: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::FSETID);

/// How this process acts for callers.
pub(crate) struct CallerIdentities {
    uid: u32,
    gid: u32,
    switches: bool,
    squash: Option<Squash>,
}

thread_local! {
    /// Whether this thread has a mask of its own, and no supplementary groups.
    static PREPARED: Cell<bool> = const { Cell::new(false) };
}

impl CallerIdentities {
    /// Checks that this process can act as its callers.
    ///
    /// # Errors
    /// `PermissionDenied` for a squash to another user without the right to change users.
    pub fn new(squash: Option<Squash>) -> Result<Self> {
        let uid = geteuid().as_raw();
        let gid = getegid().as_raw();
        // On a thread of its own: a failure in between must not leave this one as another user.
        let tried = std::thread::spawn(move || {
            let other = Uid::from_raw(65534);
            let group = Gid::from_raw(65534);
            set_thread_groups(&[])?;
            set_thread_res_gid(None::<Gid>, group, None::<Gid>)?;
            set_thread_res_uid(None::<Uid>, other, None::<Uid>)
        });
        let switches = uid == 0 && matches!(tried.join(), Ok(Ok(())));
        if let Some(squash) = squash
            && !switches
            && squash != (Squash { uid, gid })
        {
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                format!(
                    "--squash {}:{} needs root with CAP_SETUID and CAP_SETGID; this process is user {uid}, group {gid}: \
                     mount as root, or give --squash {uid}:{gid}",
                    squash.uid, squash.gid
                ),
            ));
        }
        Ok(CallerIdentities { uid, gid, switches, squash })
    }

    /// Whether all callers' own identities are used.
    pub fn serves_all_users(&self) -> bool {
        self.switches || self.squash.is_some()
    }

    /// Makes this thread act as `caller` until the result is dropped.
    pub fn assume(&self, caller: &Caller) -> rustix::io::Result<AssumedIdentity<'_>> {
        let (uid, gid, groups) = match self.squash {
            Some(squash) => (squash.uid, squash.gid, &[][..]),
            None => (caller.uid, caller.gid, &caller.groups[..]),
        };
        let mut assumed =
            AssumedIdentity { of: self, uid: false, gid: false, groups: false, mask: None, _thread: PhantomData };
        if !PREPARED.get() {
            // SAFETY: the flag gives this thread its own mask, working directory and root; it unshares no descriptors,
            // and nothing in this process changes the directory.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS)? };
            if self.switches {
                set_thread_groups(&[])?;
            }
            PREPARED.set(true);
        }
        if !self.switches {
            return if uid == self.uid { Ok(assumed) } else { Err(Errno::ACCESS) };
        }
        if uid == u32::MAX || gid == u32::MAX {
            return Err(Errno::INVAL);
        }
        // Root needs no group.
        if uid != 0 && !groups.is_empty() {
            let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
            set_thread_groups(&groups)?;
            assumed.groups = true;
        }
        if gid != self.gid {
            set_thread_res_gid(None::<Gid>, Gid::from_raw(gid), None::<Gid>)?;
            assumed.gid = true;
        }
        if uid != self.uid {
            set_thread_res_uid(None::<Uid>, Uid::from_raw(uid), None::<Uid>)?;
            assumed.uid = true;
            if caller.rights_checked && self.squash.is_none() {
                // The way back to root gives the thread all that it is permitted, and takes nothing from that.
                let mut sets = capabilities(None)?;
                sets.effective = CHECKED & sets.permitted;
                set_capabilities(None, sets)?;
            }
        }
        Ok(assumed)
    }

    /// As [`CallerIdentities::assume`], with the caller's mask, for calls that make something.
    pub fn assume_with_mask(&self, caller: &Caller) -> rustix::io::Result<AssumedIdentity<'_>> {
        let mut assumed = self.assume(caller)?;
        assumed.mask = Some(rustix::process::umask(Mode::from_raw_mode(caller.umask & 0o777)));
        Ok(assumed)
    }
}

/// This thread acts as a caller. Dropping it restores the thread's own identity.
pub(crate) struct AssumedIdentity<'a> {
    of: &'a CallerIdentities,
    uid: bool,
    gid: bool,
    groups: bool,
    mask: Option<Mode>,
    // Another thread has another identity.
    _thread: PhantomData<*const ()>,
}

impl Drop for AssumedIdentity<'_> {
    fn drop(&mut self) {
        // The user first: it brings back the right to change the rest.
        let own = Uid::from_raw(self.of.uid);
        restore(self.uid, || set_thread_res_uid(None::<Uid>, own, None::<Uid>));
        let own = Gid::from_raw(self.of.gid);
        restore(self.gid, || set_thread_res_gid(None::<Gid>, own, None::<Gid>));
        restore(self.groups, || set_thread_groups(&[]));
        if let Some(mask) = self.mask {
            rustix::process::umask(mask);
        }
    }
}

/// The kernel always permits the way back; only memory for it can lack for a moment. A thread that stayed another user
/// would serve the next caller as that user.
fn restore(changed: bool, set: impl Fn() -> rustix::io::Result<()>) {
    if changed && (0..1000).all(|_| set().is_err()) {
        std::process::abort();
    }
}

/// Reports failures of earlier writes as the `close` of a process does, and keeps the file open.
pub(crate) fn close_copy(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let copy = rustix::io::fcntl_dupfd_cloexec(file, 0)?.into_raw_fd();
    // SAFETY: the descriptor was made above and belongs to nothing else.
    match unsafe { libc::close(copy) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// The source's errno, unchanged, with the operation.
pub(crate) fn failed(what: impl std::fmt::Display, errno: Errno) -> Error {
    let system = std::io::Error::from(errno);
    Error::new(ErrorKind::Io(errno.raw_os_error()), format!("{what}: {system}"))
}
