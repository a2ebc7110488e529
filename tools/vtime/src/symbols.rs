//! Redefines the C library functions behind Rust's clocks, locks and threads for our threads; calls of other threads
//! pass through. Knows the scheduler's interface and the C conventions.

use crate::sched::{self, StartedThread, current_thread, scheduler};
use libc::{c_int, c_long, c_uint, c_void, clockid_t, pthread_attr_t, pthread_t, size_t, ssize_t, timespec};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::OnceLock;

/// Start values in seconds of the monotonic and of the real-time clock.
const START_SECONDS: (u64, u64) = (1_000_000, 1_700_000_000);
const NANOSECONDS_PER_SECOND: u64 = 1_000_000_000;

type ThreadBody = extern "C" fn(*mut c_void) -> *mut c_void;

/// The C library's own functions.
struct LibcFunctions {
    clock_gettime: unsafe extern "C" fn(clockid_t, *mut timespec) -> c_int,
    clock_nanosleep: unsafe extern "C" fn(clockid_t, c_int, *const timespec, *mut timespec) -> c_int,
    nanosleep: unsafe extern "C" fn(*const timespec, *mut timespec) -> c_int,
    sched_yield: unsafe extern "C" fn() -> c_int,
    syscall: unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long,
    getrandom: unsafe extern "C" fn(*mut c_void, size_t, c_uint) -> ssize_t,
    pthread_create: unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, ThreadBody, *mut c_void) -> c_int,
    pthread_join: unsafe extern "C" fn(pthread_t, *mut *mut c_void) -> c_int,
    /// Key with a destructor that runs after the thread's other storage is gone.
    exit: libc::pthread_key_t,
}

static OWN: std::sync::atomic::AtomicPtr<LibcFunctions> = std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

/// The next definition of a function after this crate's.
///
/// # Safety
/// `T` must be the type of the function of that name.
unsafe fn next_symbol<T>(name: &std::ffi::CStr) -> T {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null() {
        std::process::abort();
    }
    // SAFETY: the caller guarantees the type; function pointers have pointer size here.
    unsafe { std::mem::transmute_copy(&found) }
}

/// Looks up the C library's functions. Takes no Rust lock: the first caller may hold a lock.
fn libc_functions() -> &'static LibcFunctions {
    use std::sync::atomic::Ordering;
    let known = OWN.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: leaked below, so alive for ever.
        return unsafe { &*known };
    }
    let mut exit = 0;
    // SAFETY: the key is ours and the destructor has the required type.
    unsafe { libc::pthread_key_create(&mut exit, Some(on_thread_exit)) };
    // SAFETY: the types are those of the C library's headers.
    let own = unsafe {
        LibcFunctions {
            clock_gettime: next_symbol(c"clock_gettime"),
            clock_nanosleep: next_symbol(c"clock_nanosleep"),
            nanosleep: next_symbol(c"nanosleep"),
            sched_yield: next_symbol(c"sched_yield"),
            syscall: next_symbol(c"syscall"),
            getrandom: next_symbol(c"getrandom"),
            pthread_create: next_symbol(c"pthread_create"),
            pthread_join: next_symbol(c"pthread_join"),
            exit,
        }
    };
    // If two threads race here, both results are correct and the other is unused.
    let own: &'static LibcFunctions = Box::leak(Box::new(own));
    OWN.store(std::ptr::from_ref(own).cast_mut(), Ordering::Release);
    own
}

/// Before a run, so that no lookup happens during the run.
pub(crate) fn resolve() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        libc_functions();
    });
}

/// Lets another thread of this CPU run, in real time.
pub(crate) fn let_run() {
    // SAFETY: the function has no arguments and only yields.
    unsafe { (libc_functions().sched_yield)() };
}

/// Pins the calling thread and its later children to the current CPU. If that is refused, equal seeds can run
/// differently.
pub(crate) fn pin_to_cpu() {
    // SAFETY: all zeroes is an empty CPU set; the set outlives the calls, and the size is that of the set.
    unsafe {
        let mut here: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut here);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &here);
    }
}

/// Shows the personality of the process and leaves it as it is.
const SHOW_PERSONALITY: libc::c_ulong = 0xffff_ffff;

/// The program of a command gets addresses that are not random. If that is refused, they are.
pub(crate) fn fix_addresses(command: &mut Command) {
    let fix = || {
        // SAFETY: the calls have no memory in common with this process.
        unsafe {
            let present = libc::personality(SHOW_PERSONALITY);
            libc::personality((present | libc::ADDR_NO_RANDOMIZE) as libc::c_ulong);
        }
        Ok(())
    };
    // SAFETY: the function only makes system calls, as is allowed between fork and exec.
    unsafe { command.pre_exec(fix) };
}

/// Whether a personality, as `/proc` shows it, has addresses that are not random.
pub(crate) fn is_fixed(shown: &str) -> bool {
    c_int::from_str_radix(shown.trim(), 16).is_ok_and(|shown| shown & libc::ADDR_NO_RANDOMIZE != 0)
}

/// Arranges the call of [`on_thread_exit`] when the calling thread ends.
pub(crate) fn on_exit() {
    // SAFETY: any non-null value makes the destructor run.
    unsafe { libc::pthread_setspecific(libc_functions().exit, std::ptr::dangling::<u8>().cast()) };
}

/// Called at the end of a thread of the run, after the drop of other storage.
extern "C" fn on_thread_exit(_: *mut c_void) {
    if let Some(me) = current_thread() {
        sched::exit_thread(me);
    }
}

fn set_errno(errno: c_int) -> c_int {
    // SAFETY: the address of this thread's errno.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// # Safety
/// `at` must point to a valid time or be null.
unsafe fn nanos(at: *const timespec) -> Option<u64> {
    // SAFETY: guaranteed by the caller.
    unsafe { at.as_ref() }.map(|at| at.tv_sec as u64 * NANOSECONDS_PER_SECOND + at.tv_nsec as u64)
}

/// Value of a clock at the start of a run, in nanoseconds.
fn clock_start(clock: clockid_t) -> u64 {
    let seconds = if matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE) {
        START_SECONDS.1
    } else {
        START_SECONDS.0
    };
    seconds * NANOSECONDS_PER_SECOND
}

/// As the C library's, see `clock_gettime(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, out: *mut timespec) -> c_int {
    let Some(me) = current_thread() else {
        // SAFETY: the call is passed through unchanged.
        return unsafe { (libc_functions().clock_gettime)(clock, out) };
    };
    let (now, give) = scheduler().read_clock();
    if give {
        sched::yield_thread(me);
    }
    let shown = clock_start(clock) + now;
    // SAFETY: `out` is the caller's valid pointer.
    unsafe {
        *out =
            timespec { tv_sec: (shown / NANOSECONDS_PER_SECOND) as _, tv_nsec: (shown % NANOSECONDS_PER_SECOND) as _ }
    };
    0
}

/// As the C library's, see `clock_nanosleep(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_nanosleep(
    clock: clockid_t,
    flags: c_int,
    time: *const timespec,
    left: *mut timespec,
) -> c_int {
    let Some(me) = current_thread() else {
        // SAFETY: the call is passed through unchanged.
        return unsafe { (libc_functions().clock_nanosleep)(clock, flags, time, left) };
    };
    // SAFETY: `time` is the caller's valid pointer.
    let time = unsafe { nanos(time) }.unwrap_or(0);
    let now = scheduler().now();
    let until = if flags & libc::TIMER_ABSTIME != 0 { time.saturating_sub(clock_start(clock)) } else { now + time };
    sched::wait_on(me, None, Some(until));
    0
}

/// As the C library's, see `nanosleep(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nanosleep(time: *const timespec, left: *mut timespec) -> c_int {
    if current_thread().is_none() {
        // SAFETY: the call is passed through unchanged.
        return unsafe { (libc_functions().nanosleep)(time, left) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe { clock_nanosleep(libc::CLOCK_MONOTONIC, 0, time, left) }
}

/// As the C library's, see `sched_yield(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn sched_yield() -> c_int {
    match current_thread() {
        Some(me) => sched::yield_thread(me),
        // SAFETY: the function has no arguments and only yields.
        None => return unsafe { (libc_functions().sched_yield)() },
    }
    0
}

/// As the C library's, see `getrandom(2)`; our threads get bytes drawn from the seed.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(out: *mut c_void, len: size_t, flags: c_uint) -> ssize_t {
    if current_thread().is_none() {
        // SAFETY: the call is passed through unchanged.
        return unsafe { (libc_functions().getrandom)(out, len, flags) };
    }
    let sched = scheduler();
    for at in 0..len {
        // SAFETY: within the caller's memory.
        unsafe { *out.cast::<u8>().add(at) = (sched.draw_random() >> 32) as u8 };
    }
    len as ssize_t
}

/// As the C library's, see `syscall(2)`: futex calls go to the scheduler, all others pass through. Missing arguments
/// are whatever the registers hold, as for the C library's own function.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    match current_thread() {
        // SAFETY: the arguments are those of futex(2).
        Some(me) if number == libc::SYS_futex => unsafe { futex(me, a, b as c_int, c as u32, d as *const timespec) },
        // SAFETY: the call is passed through unchanged.
        _ => unsafe { (libc_functions().syscall)(number, a, b, c, d, e, f) },
    }
}

/// # Safety
/// `at` must be the address of a futex, `time` a valid time or null.
unsafe fn futex(me: u64, at: usize, op: c_int, value: u32, time: *const timespec) -> c_long {
    let clock = if op & libc::FUTEX_CLOCK_REALTIME != 0 { libc::CLOCK_REALTIME } else { libc::CLOCK_MONOTONIC };
    let command = op & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    match command {
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => {
            // SAFETY: the address of a futex.
            let found =
                unsafe { (*(at as *const std::sync::atomic::AtomicU32)).load(std::sync::atomic::Ordering::SeqCst) };
            if found != value {
                return c_long::from(set_errno(libc::EAGAIN));
            }
            // SAFETY: guaranteed by the caller.
            let time = unsafe { nanos(time) };
            let until = match command {
                libc::FUTEX_WAIT => time.map(|time| scheduler().now() + time),
                _ => time.map(|time| time.saturating_sub(clock_start(clock))),
            };
            if sched::wait_on(me, Some(at), until) { 0 } else { c_long::from(set_errno(libc::ETIMEDOUT)) }
        }
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => {
            // The kernel reads a signed number: i32::MAX means all, -1 does not.
            sched::wake_waiters(scheduler(), at, value.min(i32::MAX as u32) as usize) as c_long
        }
        _ => std::process::abort(),
    }
}

/// Arguments of a new thread of ours.
struct ThreadStart {
    begun: StartedThread,
    body: ThreadBody,
    argument: *mut c_void,
}

extern "C" fn start_thread(start: *mut c_void) -> *mut c_void {
    // SAFETY: made by `pthread_create` below, for this thread alone.
    let start = unsafe { Box::from_raw(start.cast::<ThreadStart>()) };
    start.begun.enter();
    let body = start.body;
    let argument = start.argument;
    drop(start);
    body(argument)
}

/// As the C library's, see `pthread_create(3)`: a thread started by a thread of a run belongs to the run.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    native: *mut pthread_t,
    attributes: *const pthread_attr_t,
    body: ThreadBody,
    argument: *mut c_void,
) -> c_int {
    let Some(me) = current_thread() else {
        // SAFETY: the call is passed through unchanged.
        return unsafe { (libc_functions().pthread_create)(native, attributes, body, argument) };
    };
    let begun = scheduler().add_thread(me);
    let number = begun.number();
    let given = Box::into_raw(Box::new(ThreadStart { begun, body, argument }));
    // SAFETY: guaranteed by the caller; body and argument belong together.
    let result = unsafe { (libc_functions().pthread_create)(native, attributes, start_thread, given.cast()) };
    if result == 0 {
        // SAFETY: written by the call above.
        scheduler().set_native(number, unsafe { *native } as usize);
    } else {
        // SAFETY: no thread received the box.
        let given = unsafe { Box::from_raw(given) };
        scheduler().remove_thread(&given.begun);
    }
    result
}

/// As the C library's, see `pthread_join(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_join(native: pthread_t, out: *mut *mut c_void) -> c_int {
    if let Some(me) = current_thread() {
        sched::join_thread(me, native as usize);
    }
    // SAFETY: the call is passed through. A thread of ours that left the scheduler waits for nothing else.
    unsafe { (libc_functions().pthread_join)(native, out) }
}
