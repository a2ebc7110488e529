//! What becomes of a program that waits for a request, by the program's file in /proc. Does not know the request.
//!
//! Only `status` is read: the kernel gives other files of a process in execve(2) when that is done, which may have to wait for
//! requests to this mount.

use std::fs;

/// What becomes of a thread that waits in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerFate {
    /// The thread goes on, or ends by itself.
    GoesOn,
    /// A signal ends the thread. The kernel keeps the signal of a process that closes files before the end.
    Ends,
    /// SIGINT has come, and the program has a handler: a user wants the wait to end.
    Interrupted,
    /// The thread is not visible from this PID namespace, or to this user.
    Unseen,
}

/// SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG and SIGWINCH end no program.
const HARMLESS: [i32; 8] = [
    libc::SIGCHLD,
    libc::SIGCONT,
    libc::SIGSTOP,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGURG,
    libc::SIGWINCH,
];

impl CallerFate {
    /// What becomes of thread `pid`, 0 where that is not known.
    pub(crate) fn of_thread(pid: u32) -> CallerFate {
        if pid == 0 {
            return CallerFate::Unseen;
        }
        fs::read_to_string(format!("/proc/{pid}/status"))
            .map_or(CallerFate::Unseen, |status| CallerFate::from_status(&status))
    }

    fn from_status(status: &str) -> CallerFate {
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        let signals = |name| field(name).and_then(|set| u64::from_str_radix(set, 16).ok()).unwrap_or(0);
        let harmless: u64 = HARMLESS.into_iter().map(signal_bit).sum();
        let pending = (signals("SigPnd") | signals("ShdPnd")) & !signals("SigBlk") & !signals("SigIgn") & !harmless;
        let caught = signals("SigCgt");
        if pending & !caught != 0 {
            CallerFate::Ends
        } else if pending & signal_bit(libc::SIGINT) != 0 {
            CallerFate::Interrupted
        } else {
            CallerFate::GoesOn
        }
    }
}

fn signal_bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fate(pending: &[i32], caught: &[i32], ignored: &[i32], blocked: &[i32]) -> CallerFate {
        let set = |signals: &[i32]| format!("{:016x}", signals.iter().copied().map(signal_bit).sum::<u64>());
        let (shared, blocked, ignored, caught) = (set(pending), set(blocked), set(ignored), set(caught));
        CallerFate::from_status(&format!(
            "Name:\tcat\nSigQ:\t0/3\nSigPnd:\t{:016x}\nShdPnd:\t{shared}\nSigBlk:\t{blocked}\n\
             SigIgn:\t{ignored}\nSigCgt:\t{caught}\n",
            0
        ))
    }

    #[test]
    fn a_signal_ends_a_program_without_a_handler_for_it() {
        use libc::{SIGCHLD, SIGINT, SIGKILL, SIGTERM, SIGTSTP};
        for (pending, caught, ignored, blocked, want) in [
            (&[][..], &[][..], &[][..], &[][..], CallerFate::GoesOn),
            (&[SIGKILL], &[SIGTERM, SIGINT], &[], &[], CallerFate::Ends),
            (&[SIGTERM], &[SIGINT], &[], &[], CallerFate::Ends),
            (&[SIGTERM], &[SIGTERM], &[], &[], CallerFate::GoesOn),
            (&[SIGTERM], &[], &[SIGTERM], &[], CallerFate::GoesOn),
            (&[SIGTERM], &[], &[], &[SIGTERM], CallerFate::GoesOn),
            (&[SIGINT], &[SIGINT], &[], &[], CallerFate::Interrupted),
            (&[SIGCHLD, SIGTSTP], &[SIGCHLD], &[], &[], CallerFate::GoesOn),
        ] {
            assert_eq!(fate(pending, caught, ignored, blocked), want, "{pending:?} {caught:?} {ignored:?} {blocked:?}");
        }
    }

    #[test]
    fn this_process_goes_on() {
        assert_eq!(CallerFate::of_thread(std::process::id()), CallerFate::GoesOn);
        assert_eq!(CallerFate::of_thread(0), CallerFate::Unseen);
    }
}
