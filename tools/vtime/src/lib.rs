//! Real threads on virtual time, for tests: the clock advances only when every thread waits, and a single thread runs at a time,
//! chosen by a seed. Knows nothing of the threads' work; code under test uses `std` and `parking_lot` unchanged.
//!
//! [`run`] starts a first thread. That thread and its descendants are ours. This crate redefines the C library's
//! functions for clocks, sleeping, futexes, yielding, random bytes, and starting and joining threads; the linker
//! prefers them. Calls from our threads go to the scheduler, all others to the C library. A wait costs no real time,
//! a pause is measured exactly on a busy machine, and a deadlock is detected at once.
//!
//! Any other wait in the kernel (a socket, a disk) stops all threads in real time without virtual time passing. All threads of a
//! run stay on a single CPU, because programs can see where they run. A program that used [`run`] must
//! not share `parking_lot` locks between its threads and others meanwhile.
//!
//! Equal seeds run equally in programs with equal addresses, which [`fix_addresses`] provides: `parking_lot` decides by addresses
//! which locks share a queue, and with it a clock of fairness, which also lasts from run to run of a process.

mod sched;
mod symbols;

use sched::VirtualScheduler;
pub use sched::{LeftThread, RunReport};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A single run at a time: there is a single scheduler.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs `first` and its descendant threads on virtual time, in an order set by `seed`. Returns when all have ended, or a virtual
/// hour after `first` returned.
///
/// # Panics
/// When `first` does, and when the linker left the virtual clock out. A deadlock ends the process with a list of what
/// each thread waits for.
pub fn run<T: Send>(seed: u64, first: impl FnOnce() -> T + Send) -> (T, RunReport) {
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    symbols::resolve();
    let out = std::thread::scope(|scope| {
        let begun = VirtualScheduler::begin(seed);
        let thread = std::thread::Builder::new().name("virtual".into()).spawn_scoped(scope, move || {
            symbols::pin_to_cpu();
            begun.enter();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let start = Instant::now();
                std::thread::sleep(Duration::from_secs(3600));
                let slept = start.elapsed();
                let virtual_time = (Duration::from_secs(3600)..Duration::from_secs(3601)).contains(&slept);
                assert!(virtual_time, "an hour of virtual time took {slept:?}");
                first()
            }))
        });
        let out = thread.expect("the thread can be started").join().expect("panics are caught inside");
        (out, VirtualScheduler::wait_done())
    });
    drop(alone);
    match out {
        (Ok(value), ran) => (value, ran),
        (Err(panic), _) => std::panic::resume_unwind(panic),
    }
}

/// Moves the calling thread of a run, and threads that it starts later, to a group; of no effect on other threads. Threads start
/// in the group of the thread that started them, the first thread in group 0.
pub fn set_group(group: u64) {
    if let Some(me) = sched::current_thread() {
        sched::scheduler().set_group(me, group);
    }
}

/// No thread of the group runs for this time from now on, like the threads of a stopped process; zero ends an earlier pause.
/// Locks of these threads stay locked.
pub fn pause_group(group: u64, time: Duration) {
    if sched::current_thread().is_some() {
        sched::scheduler().pause_group(group, time.as_nanos() as u64);
    }
}

/// The program that `command` starts has the same addresses whenever it is started, where the system allows that.
pub fn fix_addresses(command: &mut Command) {
    symbols::fix_addresses(command);
}

/// Whether [`fix_addresses`] has an effect.
pub fn can_fix_addresses() -> bool {
    let mut shown = Command::new("cat");
    fix_addresses(shown.arg("/proc/self/personality"));
    shown.output().is_ok_and(|shown| symbols::is_fixed(&String::from_utf8_lossy(&shown.stdout)))
}
