//! Real threads on virtual time, for tests: a clock that moves only when every thread waits, and one thread at a time,
//! chosen by a seed. It knows nothing of what the threads do; code under test uses `std` and `parking_lot` as always.
//!
//! [`run`] starts a first thread; that one and all that come of it are ours. The C library's functions through which Rust
//! reads clocks, sleeps, waits on futexes, yields, draws random bytes, starts and joins threads are defined here a second
//! time, and the linker prefers these. Called by one of our threads they ask the scheduler, called by any other they pass
//! the call on. So a wait costs no time, a pause is measured exactly however busy the machine is, and threads that all wait
//! for each other are seen at once.
//!
//! What waits in the kernel for anything else (a socket, a disk) holds everybody up, in real time: it keeps the baton, so no
//! virtual time passes, and a disk that is late on a busy machine is in time here. All threads of a run stay on one
//! processor: where they run, which programs ask for, is no matter of chance then, and equal seeds run equally. A program that has run
//! one of these runs must not share locks of `parking_lot` between its threads and others meanwhile.

mod sched;
mod symbols;

use sched::Sched;
pub use sched::{Left, Ran};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One run at a time: there is one scheduler.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs `first` and all threads that come of it on virtual time, in an order that `seed` decides; returns when all have
/// ended, or what is left of them an hour (of virtual time) after `first` returned.
///
/// # Panics
/// When `first` does, and when the clock is not the virtual one because the linker left it out. Threads that wait for each
/// other for ever end the process, with what each of them waits for.
pub fn run<T: Send>(seed: u64, first: impl FnOnce() -> T + Send) -> (T, Ran) {
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    symbols::resolve();
    let out = std::thread::scope(|scope| {
        let begun = Sched::begin(seed);
        let body = move || {
            symbols::stay_here();
            begun.enter();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let start = Instant::now();
                std::thread::sleep(Duration::from_secs(3600));
                let slept = start.elapsed();
                let virtual_time = (Duration::from_secs(3600)..Duration::from_secs(3601)).contains(&slept);
                assert!(virtual_time, "an hour of virtual time took {slept:?}");
                first()
            }))
        };
        let thread = std::thread::Builder::new().name("virtual".into()).spawn_scoped(scope, body);
        let out = thread.expect("a thread can be had").join().expect("panics are caught inside");
        (out, Sched::wait())
    });
    drop(alone);
    match out {
        (Ok(value), ran) => (value, ran),
        (Err(panic), _) => std::panic::resume_unwind(panic),
    }
}
