//! Programs that a signal ends while the file system does not answer.

use crate::common;
use common::*;
use rustix::process::{Pid, Signal, kill_process};
use spurline_fuse::*;
use std::fs::{self, File};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A program that is to wait for an answer.
struct WaitingProgram {
    child: Child,
}

impl WaitingProgram {
    /// Starts `words`, and waits until the call blocks.
    fn start(mount: &Mount, held: &'static str, words: &[&str]) -> WaitingProgram {
        let before = mount.fs.blocked_now();
        *mount.fs.held_call.lock().unwrap() = held;
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        eventually(held, || mount.fs.blocked_now() > before);
        WaitingProgram { child }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end, which comes while calls block.
    fn end(mut self, mount: &Mount) -> ExitStatus {
        *mount.fs.held_call.lock().unwrap() = "";
        let ended = self.child.wait().unwrap();
        assert!(!mount.fs.blocked.lock().unwrap().1, "it has waited for its call");
        ended
    }
}

/// A read of `slow`, which blocks always: an unmount does not wait for it.
const CHANGES_NOTHING: &str = "read";

/// A call, the name that the program uses, and the program.
type WaitingCall = (&'static str, &'static str, &'static [&'static str]);

/// The read is the last: over io_uring it ends with the answer, which lands in the memory of the queue.
const WAITING_CALLS: [WaitingCall; 4] = [
    ("lookup", "data", &["stat"]),
    ("open", "data", &["cat"]),
    ("readdir", "odd", &["ls"]),
    (CHANGES_NOTHING, "slow", &["head", "-c", "1"]),
];

fn programs_end(io: FuseIo, calls: &[WaitingCall]) {
    for &(held, name, words) in calls {
        let mut mount = Mount::new(io);
        let path = mount.path(name).display().to_string();
        let program = WaitingProgram::start(&mount, held, &[words, &[path.as_str()]].concat());
        program.signal(Signal::KILL);
        program.end(&mount);
        let again = WaitingProgram::start(&mount, held, &[&["timeout", "0.2"], words, &[path.as_str()]].concat());
        assert_eq!(again.end(&mount).code(), Some(124), "{held}");
        // The mount serves on.
        assert!(fs::read_link(mount.path("link")).is_ok());
        // What the kernel did not get is taken back.
        let forgotten = mount.fs.forgotten.load(Ordering::SeqCst);
        let released = mount.fs.released.load(Ordering::SeqCst);
        if held == CHANGES_NOTHING {
            assert!(mount.session.take().unwrap().shutdown(Duration::from_secs(5)).unwrap());
        }
        mount.fs.unblock();
        match held {
            "lookup" => eventually(held, || mount.fs.forgotten.load(Ordering::SeqCst) >= forgotten + 2),
            "open" => eventually(held, || mount.fs.released.load(Ordering::SeqCst) >= released + 2),
            "readdir" => {
                eventually(held, || mount.fs.forgotten.load(Ordering::SeqCst) >= forgotten + 200);
            }
            _ => {}
        }
    }
}

#[test]
fn programs_end_before_the_answer() {
    if can_mount() {
        programs_end(FuseIo::Dev, &WAITING_CALLS);
    }
}

#[test]
fn programs_end_before_the_answer_over_io_uring() {
    if !can_mount() {
        return;
    }
    let Some(_parameter) = UringParameter::enable() else { return };
    programs_end(FuseIo::Uring, &WAITING_CALLS[..3]);
}

/// The kernel reports the first signal only.
#[test]
fn a_signal_with_a_handler_leaves_a_program_waiting_until_it_is_killed() {
    if !can_mount() {
        return;
    }
    let mount = Mount::new(FuseIo::Dev);
    let path = mount.path("data").display().to_string();
    let script = "trap : USR1; exec 3<\"$0\"";
    let program = WaitingProgram::start(&mount, "open", &["bash", "-c", script, &path]);
    program.signal(Signal::USR1);
    let status = format!("/proc/{}/status", program.child.id());
    eventually("the signal is pending", || {
        let status = fs::read_to_string(&status).unwrap();
        status.lines().any(|line| line.starts_with("ShdPnd") && !line.ends_with("0000000000000000"))
    });
    assert!(fs::metadata(mount.path("filled")).is_ok());
    program.signal(Signal::KILL);
    program.end(&mount);
}

/// In close(2), and at the end of the process, which no signal interrupts.
#[test]
fn a_killed_process_waits_for_no_close() {
    if !can_mount() {
        return;
    }
    let mount = Mount::new(FuseIo::Dev);
    let path = mount.path("filled").display().to_string();
    let program = WaitingProgram::start(&mount, "flush", &["bash", "-c", "exec 3<\"$0\"; exec 3<&-", &path]);
    program.signal(Signal::KILL);
    program.end(&mount);
    let killed = WaitingProgram::start(&mount, "flush", &["bash", "-c", "exec 3<\"$0\"; kill -9 $$", &path]);
    killed.end(&mount);
}

#[test]
fn requests_that_wait_are_counted() {
    if !can_mount() {
        return;
    }
    let mount = Mount::new(FuseIo::Dev);
    let counters = &mount.stats.fuse;
    let reader = std::thread::spawn({
        let path = mount.path("slow");
        move || std::io::Read::read(&mut File::open(path).unwrap(), &mut [0])
    });
    eventually("the wait is counted", || counters.waiting_ops.get() == 1 && counters.longest_wait_seconds.get() >= 3);
    mount.fs.unblock();
    reader.join().unwrap().unwrap();
    eventually("nothing waits", || counters.waiting_ops.get() == 0 && counters.longest_wait_seconds.get() == 0);
}
