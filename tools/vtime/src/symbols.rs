//! The C library's functions that Rust's clocks, locks and threads come down to, as our threads are to have them. Each
//! passes the calls of other threads on. It knows the scheduler's questions and the C library's conventions.

use crate::sched::{self, Begun, me, sched};
use libc::{c_int, c_long, c_uint, c_void, clockid_t, pthread_attr_t, pthread_t, size_t, ssize_t, timespec};
use std::sync::OnceLock;

/// What a clock that counts from some moment on shows when a run begins, and one that tells the time of day. Seconds.
const BEGUN: (u64, u64) = (1_000_000, 1_700_000_000);
const SECOND: u64 = 1_000_000_000;

type Body = extern "C" fn(*mut c_void) -> *mut c_void;

/// The C library's own.
struct Own {
    clock_gettime: unsafe extern "C" fn(clockid_t, *mut timespec) -> c_int,
    clock_nanosleep: unsafe extern "C" fn(clockid_t, c_int, *const timespec, *mut timespec) -> c_int,
    nanosleep: unsafe extern "C" fn(*const timespec, *mut timespec) -> c_int,
    sched_yield: unsafe extern "C" fn() -> c_int,
    syscall: unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long,
    getrandom: unsafe extern "C" fn(*mut c_void, size_t, c_uint) -> ssize_t,
    pthread_create: unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, Body, *mut c_void) -> c_int,
    pthread_join: unsafe extern "C" fn(pthread_t, *mut *mut c_void) -> c_int,
    /// A key whose destructor runs when all of a thread's other storage is gone.
    exit: libc::pthread_key_t,
}

static OWN: std::sync::atomic::AtomicPtr<Own> = std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

/// The next definition of a function behind this one.
///
/// # Safety
/// `T` has to be the type of the function of that name.
unsafe fn next<T>(name: &std::ffi::CStr) -> T {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null() {
        std::process::abort();
    }
    // SAFETY: the caller says so; pointers to functions have the size of pointers here.
    unsafe { std::mem::transmute_copy(&found) }
}

/// Looks the C library's own functions up. Takes no lock of Rust's: the first caller may be inside one.
fn own() -> &'static Own {
    use std::sync::atomic::Ordering;
    let known = OWN.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: leaked below, so it is there for ever.
        return unsafe { &*known };
    }
    let mut exit = 0;
    // SAFETY: the key is ours, and the destructor has the type that is wanted.
    unsafe { libc::pthread_key_create(&mut exit, Some(leave)) };
    // SAFETY: the types are those of the C library's headers.
    let own = unsafe {
        Own {
            clock_gettime: next(c"clock_gettime"),
            clock_nanosleep: next(c"clock_nanosleep"),
            nanosleep: next(c"nanosleep"),
            sched_yield: next(c"sched_yield"),
            syscall: next(c"syscall"),
            getrandom: next(c"getrandom"),
            pthread_create: next(c"pthread_create"),
            pthread_join: next(c"pthread_join"),
            exit,
        }
    };
    // Of two threads that come here first both are right; one copy is never used.
    let own: &'static Own = Box::leak(Box::new(own));
    OWN.store(std::ptr::from_ref(own).cast_mut(), Ordering::Release);
    own
}

/// Before a run: nothing has to be looked up within it.
pub(crate) fn resolve() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        own();
    });
}

/// Keeps the calling thread, and those that it starts, on the processor it runs on. Where that is refused, runs of one seed
/// can differ.
pub(crate) fn stay_here() {
    // SAFETY: all zeroes is a set of no processors; the set outlives the calls, and the size is its own.
    unsafe {
        let mut here: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut here);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &here);
    }
}

/// Has [`leave`] called when the calling thread ends.
pub(crate) fn on_exit() {
    // SAFETY: any value that is not null has the destructor called.
    unsafe { libc::pthread_setspecific(own().exit, std::ptr::dangling::<u8>().cast()) };
}

/// A thread of ours ends; everything else of its storage has been dropped.
extern "C" fn leave(_: *mut c_void) {
    if let Some(me) = me() {
        sched::exit(me);
    }
}

fn fail(errno: c_int) -> c_int {
    // SAFETY: the place of this thread's errno.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// # Safety
/// `at` has to point to a time or be null.
unsafe fn nanos(at: *const timespec) -> Option<u64> {
    // SAFETY: the caller says so.
    unsafe { at.as_ref() }.map(|at| at.tv_sec as u64 * SECOND + at.tv_nsec as u64)
}

/// What a clock shows at the beginning of a run. Nanoseconds.
fn begun(clock: clockid_t) -> u64 {
    let seconds = if matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE) { BEGUN.1 } else { BEGUN.0 };
    seconds * SECOND
}

/// As the C library's, see `clock_gettime(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, out: *mut timespec) -> c_int {
    let Some(me) = me() else {
        // SAFETY: the call is passed on as it came.
        return unsafe { (own().clock_gettime)(clock, out) };
    };
    let (now, give) = sched().look();
    if give {
        sched::give_way(me);
    }
    let shown = begun(clock) + now;
    // SAFETY: the caller's place for the time.
    unsafe { *out = timespec { tv_sec: (shown / SECOND) as _, tv_nsec: (shown % SECOND) as _ } };
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
    let Some(me) = me() else {
        // SAFETY: the call is passed on as it came.
        return unsafe { (own().clock_nanosleep)(clock, flags, time, left) };
    };
    // SAFETY: the caller's time.
    let time = unsafe { nanos(time) }.unwrap_or(0);
    let now = sched().now();
    let until = if flags & libc::TIMER_ABSTIME != 0 { time.saturating_sub(begun(clock)) } else { now + time };
    sched::wait(me, None, Some(until));
    0
}

/// As the C library's, see `nanosleep(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nanosleep(time: *const timespec, left: *mut timespec) -> c_int {
    if me().is_none() {
        // SAFETY: the call is passed on as it came.
        return unsafe { (own().nanosleep)(time, left) };
    }
    // SAFETY: as the caller says.
    unsafe { clock_nanosleep(libc::CLOCK_MONOTONIC, 0, time, left) }
}

/// As the C library's, see `sched_yield(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn sched_yield() -> c_int {
    match me() {
        Some(me) => sched::give_way(me),
        // SAFETY: it takes nothing and only lets others run.
        None => return unsafe { (own().sched_yield)() },
    }
    0
}

/// As the C library's, see `getrandom(2)`: of our threads, drawn from the seed.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(out: *mut c_void, len: size_t, flags: c_uint) -> ssize_t {
    if me().is_none() {
        // SAFETY: the call is passed on as it came.
        return unsafe { (own().getrandom)(out, len, flags) };
    }
    let sched = sched();
    for at in 0..len {
        // SAFETY: within the caller's memory.
        unsafe { *out.cast::<u8>().add(at) = (sched.draw() >> 32) as u8 };
    }
    len as ssize_t
}

/// As the C library's, see `syscall(2)`: futexes are the scheduler's, everything else is passed on. Arguments that were
/// not given are whatever the registers held, as they are for the C library's own.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    match me() {
        // SAFETY: the arguments are those of futex(2).
        Some(me) if number == libc::SYS_futex => unsafe { futex(me, a, b as c_int, c as u32, d as *const timespec) },
        // SAFETY: the call is passed on as it came.
        _ => unsafe { (own().syscall)(number, a, b, c, d, e, f) },
    }
}

/// # Safety
/// `at` has to be the address of a futex, `time` a time or null where there may be one.
unsafe fn futex(me: u64, at: usize, op: c_int, value: u32, time: *const timespec) -> c_long {
    let clock = if op & libc::FUTEX_CLOCK_REALTIME != 0 { libc::CLOCK_REALTIME } else { libc::CLOCK_MONOTONIC };
    let command = op & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    match command {
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => {
            // SAFETY: the address of a futex.
            let found =
                unsafe { (*(at as *const std::sync::atomic::AtomicU32)).load(std::sync::atomic::Ordering::SeqCst) };
            if found != value {
                return c_long::from(fail(libc::EAGAIN));
            }
            // SAFETY: as the caller says.
            let time = unsafe { nanos(time) };
            let until = match command {
                libc::FUTEX_WAIT => time.map(|time| sched().now() + time),
                _ => time.map(|time| time.saturating_sub(begun(clock))),
            };
            if sched::wait(me, Some(at), until) { 0 } else { c_long::from(fail(libc::ETIMEDOUT)) }
        }
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => {
            // The kernel reads the number as one with a sign: -1 is no way to say all, i32::MAX is.
            sched::wake(sched(), at, value.min(i32::MAX as u32) as usize) as c_long
        }
        _ => std::process::abort(),
    }
}

/// What a thread of ours begins with.
struct Start {
    begun: Begun,
    body: Body,
    argument: *mut c_void,
}

extern "C" fn start(start: *mut c_void) -> *mut c_void {
    // SAFETY: made by `pthread_create` below, for this thread alone.
    let start = unsafe { Box::from_raw(start.cast::<Start>()) };
    start.begun.enter();
    let (body, argument) = (start.body, start.argument);
    drop(start);
    body(argument)
}

/// As the C library's, see `pthread_create(3)`: what one of our threads starts is one of ours.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    native: *mut pthread_t,
    attributes: *const pthread_attr_t,
    body: Body,
    argument: *mut c_void,
) -> c_int {
    if me().is_none() {
        // SAFETY: the call is passed on as it came.
        return unsafe { (own().pthread_create)(native, attributes, body, argument) };
    }
    let begun = sched().add();
    let number = begun.number();
    let given = Box::into_raw(Box::new(Start { begun, body, argument }));
    // SAFETY: as the caller says, with a body and an argument that belong together.
    let result = unsafe { (own().pthread_create)(native, attributes, start, given.cast()) };
    if result == 0 {
        // SAFETY: it was written just now.
        sched().name(number, unsafe { *native } as usize);
    } else {
        // SAFETY: no thread has it.
        let given = unsafe { Box::from_raw(given) };
        sched().remove(&given.begun);
    }
    result
}

/// As the C library's, see `pthread_join(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_join(native: pthread_t, out: *mut *mut c_void) -> c_int {
    if let Some(me) = me() {
        sched::join(me, native as usize);
    }
    // SAFETY: the call is passed on as it came. A thread of ours that has left the scheduler waits for nothing any more.
    unsafe { (own().pthread_join)(native, out) }
}
