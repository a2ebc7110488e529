//! Requests over io_uring. Each entry of each CPU's queue has a thread and a ring, so a request costs a single system call and a
//! call that blocks holds up only that entry. Does not interpret requests. Commands and layouts: the kernel's
//! `fs/fuse/dev_uring.c`.

use crate::abi::{self, InHeader, OutHeader, ReadIn, UringCmdReq, UringEntInOut, UringReqHeader, bytes_of, read_plain};
use crate::buffer::{AnonymousPages, BufferSource as _, HEAD_LEN};
use crate::change_request::ChangeRequest;
use crate::dev::ConnectionEnd;
use crate::dispatch::SlotIo;
use crate::errno::Errno;
use crate::reply::ReplyReceipt;
use crate::request::{FuseRequest, decode_split};
use crate::session::{RequestSlot, SessionShared};
use crate::under_way::{RequestWaiter, RingEntry, ServingThread};
use crate::waiting::serve_queue_of;
use io_uring::{IoUring, cqueue, squeue};
use parking_lot::{Condvar, Mutex};
use spurline_fs::FileService;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

const URING_PARAMETER_FILE: &str = "/sys/module/fuse/parameters/enable_uring";
/// Deadline for all entries to have memory and rings.
const PREPARE_DEADLINE: Duration = Duration::from_secs(30);

/// The CPUs that need a queue.
#[derive(Debug, Clone)]
pub(crate) struct QueueCpus {
    /// CPUs online.
    pub(crate) on: Vec<usize>,
    /// Number of possible CPUs; the kernel requires a queue with an entry for each.
    pub(crate) all: usize,
}

impl QueueCpus {
    pub(crate) fn detect() -> QueueCpus {
        let on = read_cpu_list("online");
        let possible = read_cpu_list("possible");
        let all = possible.len().max(on.len()).max(1);
        QueueCpus { on: if on.is_empty() { (0..all).collect() } else { on }, all }
    }
    pub(crate) fn offline_count(&self) -> usize {
        self.all.saturating_sub(self.on.len())
    }
}

fn read_cpu_list(file: &str) -> Vec<usize> {
    let text = fs::read_to_string(format!("/sys/devices/system/cpu/{file}")).unwrap_or_default();
    parse_cpu_list(&text)
}

/// Parses `0-3,8`, the kernel's format; invalid parts are skipped.
fn parse_cpu_list(text: &str) -> Vec<usize> {
    text.split(',')
        .filter_map(|part| -> Option<std::ops::RangeInclusive<usize>> {
            let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .flatten()
        .take(1 << 16)
        .collect()
}

/// Whether FUSE over io_uring is available, with a note for the reason; else why not, and the remedy. `enable`: set the kernel's
/// parameter if off and if permissions allow.
pub(crate) fn check_available(enable: bool) -> Result<String, String> {
    let parameter = fs::read_to_string(URING_PARAMETER_FILE).map_err(|_| {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        format!("this kernel ({}) does not have it; it came with Linux 6.14", release.trim())
    })?;
    let mut note = String::new();
    if parameter.trim() != "Y" {
        if !enable {
            return Err(format!("it is off on this host; as root: echo Y > {URING_PARAMETER_FILE}"));
        }
        fs::write(URING_PARAMETER_FILE, "Y").map_err(|e| {
            format!("it is off on this host and could not be set ({e}); as root: echo Y > {URING_PARAMETER_FILE}")
        })?;
        note = format!(", and {URING_PARAMETER_FILE} was set to Y for the whole host");
    }
    new_ring().map(|_| note).map_err(|e| {
        format!(
            "io_uring_setup failed ({e}); see /proc/sys/kernel/io_uring_disabled and the container's seccomp profile"
        )
    })
}

type FuseRing = IoUring<squeue::Entry128, cqueue::Entry>;

fn new_ring() -> io::Result<FuseRing> {
    // A single command is in flight at any time. Completions are processed in this thread, during waits.
    IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(2)
}

/// IOSQE_FIXED_FILE: `fd` is an index into the ring's registered files. The device is the only such file; this avoids a reference
/// count per request that all threads share.
const FIXED_FILE: u8 = 1;

/// A submission entry of 128 bytes with a FUSE command, in the kernel's layout.
#[repr(C)]
struct UringSqe {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    cmd_op: u32,
    pad: u32,
    addr: u64,
    len: u32,
    cmd_flags: u32,
    user_data: u64,
    buf_index: u16,
    personality: u16,
    file_index: u32,
    cmd: UringCmdReq,
    rest: [u8; 56],
}

const _: () = assert!(size_of::<UringSqe>() == 128 && offset_of!(UringSqe, cmd) == 48);
const _: () = assert!(size_of::<squeue::Entry128>() == 128 && align_of::<UringSqe>() == align_of::<squeue::Entry128>());

fn build_sqe(cmd_op: u32, iovecs: &[libc::iovec], cmd: UringCmdReq) -> squeue::Entry128 {
    let sqe = UringSqe {
        opcode: io_uring::opcode::UringCmd80::CODE,
        flags: FIXED_FILE,
        ioprio: 0,
        fd: 0,
        cmd_op,
        pad: 0,
        addr: if iovecs.is_empty() { 0 } else { iovecs.as_ptr() as u64 },
        len: iovecs.len() as u32,
        cmd_flags: 0,
        user_data: 0,
        buf_index: 0,
        personality: 0,
        file_index: 0,
        cmd,
        rest: [0; 56],
    };
    // SAFETY: both are the kernel's 128-byte io_uring_sqe, plain integers without padding; size and alignment
    // are asserted above. The library's own constructor leaves `len` unset, which REGISTER needs.
    unsafe { std::mem::transmute::<UringSqe, squeue::Entry128>(sqe) }
}

/// Synchronises the start of all entries. All get memory and rings first, so that the kernel switches to io_uring
/// only when no allocation can fail any more.
pub(crate) struct StartGate {
    state: Mutex<StartGateState>,
    changed: Condvar,
}

#[derive(Default)]
struct StartGateState {
    prepared: usize,
    registered: usize,
    failed: Option<String>,
    go: Option<bool>,
}

impl StartGate {
    fn update_state(&self, f: impl FnOnce(&mut StartGateState)) {
        f(&mut self.state.lock());
        self.changed.notify_all();
    }
    fn wait_for(&self, mut done: impl FnMut(&StartGateState) -> bool) -> Result<(), String> {
        let until = Instant::now() + PREPARE_DEADLINE;
        let mut state = self.state.lock();
        while !done(&state) {
            if let Some(why) = &state.failed {
                return Err(why.clone());
            }
            if self.changed.wait_until(&mut state, until).timed_out() {
                return Err(format!("the entries were not ready after {PREPARE_DEADLINE:?}"));
            }
        }
        Ok(())
    }

    /// Makes the entries register with the kernel, and waits until all have.
    pub(crate) fn open_gate(&self, entries: usize) -> Result<(), String> {
        self.update_state(|s| s.go = Some(true));
        self.wait_for(|s| s.registered == entries)
    }

    /// Ends the entries.
    pub(crate) fn cancel_start(&self) {
        self.update_state(|s| s.go = Some(false));
    }
}

/// A ring for requests of the session.
fn new_session_ring<S>(shared: &SessionShared<S>) -> io::Result<FuseRing> {
    let ring = new_ring()?;
    ring.submitter().register_files(&[shared.device.as_raw_fd()])?;
    Ok(ring)
}

/// Starts the threads of all entries up to the gate; returns the gate and the number of entries.
pub(crate) fn prepare_entries<S: FileService>(
    shared: &Arc<SessionShared<S>>,
    cpus: &QueueCpus,
) -> Result<(Arc<StartGate>, usize), String> {
    let gate = Arc::new(StartGate { state: Mutex::default(), changed: Condvar::new() });
    let depth = shared.config.ring_depth(cpus);
    let mut entries = 0;
    let started = (|| {
        for cpu in 0..cpus.all {
            // The kernel requires a single entry for a CPU that is offline.
            for _ in 0..if cpus.on.contains(&cpu) { depth } else { 1 } {
                let buffer = shared.config.buffers.allocate(shared.config.slot_len())?;
                let slot = RequestSlot::new(buffer, shared)?;
                let gate = gate.clone();
                shared.spawn_slot("fuse-ring", slot, move |shared, slot| run_entry(shared, slot, cpu, &gate, false))?;
                entries += 1;
            }
        }
        Ok(())
    })();
    let ready = match started {
        Ok(()) => gate.wait_for(|s| s.prepared == entries),
        Err(e) => io::Result::Err(e).map_err(|e| format!("entry {entries} got no memory or thread: {e}")),
    };
    match ready {
        Ok(()) => Ok((gate, entries)),
        Err(why) => {
            gate.cancel_start();
            Err(why)
        }
    }
}

/// Adds an entry to the queue of `cpu`, while the session runs.
pub(crate) fn add_entry<S: FileService>(shared: &Arc<SessionShared<S>>, cpu: usize) -> Result<(), String> {
    let gate = Arc::new(StartGate { state: Mutex::default(), changed: Condvar::new() });
    let entry = gate.clone();
    let started = shared.config.buffers.allocate(shared.config.slot_len()).and_then(|buffer| {
        let slot = RequestSlot::new(buffer, shared)?;
        shared.spawn_slot("fuse-ring", slot, move |shared, slot| run_entry(shared, slot, cpu, &entry, true))
    });
    started.map_err(|e| e.to_string())?;
    gate.open_gate(1)
}

/// `joined_late`: the queue is used already.
fn run_entry<S: FileService>(
    shared: &Arc<SessionShared<S>>,
    slot: &mut RequestSlot,
    cpu: usize,
    gate: &StartGate,
    joined_late: bool,
) {
    let mut seat = ThreadPlacement::new(cpu);
    serve_queue_of(cpu);
    let mut ring = match new_session_ring(shared) {
        Ok(ring) => ring,
        Err(e) => return gate.update_state(|s| s.failed = Some(format!("io_uring_setup for CPU {cpu} failed: {e}"))),
    };
    gate.update_state(|s| s.prepared += 1);
    let go = gate.wait_for(|s| s.go.is_some());
    if go.is_err() || gate.state.lock().go != Some(true) {
        return;
    }
    let thread = shared.under_way.add_thread(Some(cpu), joined_late);
    thread.note_waiting();
    match register_entry(slot, cpu, &mut ring) {
        Ok(()) => gate.update_state(|s| s.registered += 1),
        Err(e) => {
            return gate.update_state(|s| s.failed = Some(format!("the kernel refused an entry for CPU {cpu}: {e}")));
        }
    }
    serve_ring(shared, slot, &mut seat, &mut ring, &thread);
}

/// Answers request `unique` of the entry of `from` with EINTR in a new thread, which serves the entry from then on. The thread
/// `from` goes on with the call, and ends after that.
pub(crate) fn take_entry_over<S: FileService>(
    shared: &Arc<SessionShared<S>>,
    from: &Arc<ServingThread>,
    cpu: usize,
    unique: u64,
) -> io::Result<()> {
    let from = Arc::clone(from);
    shared.spawn_thread("fuse-ring", move |shared| {
        let mut seat = ThreadPlacement::new(cpu);
        serve_queue_of(cpu);
        // Before the request is taken: without a ring there would be no answer.
        let ring = match new_session_ring(shared) {
            Ok(ring) => ring,
            Err(error) => {
                tracing::warn!("no io_uring for the answer to a program that ends: {error}");
                from.with_request(|request| request.is_leaving = false);
                return;
            }
        };
        let Some(mut left) = shared.leave_request(&from, unique, |request| request.entry.is_some()) else { return };
        let Some(RingEntry { slot, commit_id }) = &mut left.entry else { return };
        // Dropped before the slot.
        let mut ring = ring;
        let thread = shared.under_way.add_thread(Some(cpu), false);
        write_reply(slot.bytes(), unique, &ReplyReceipt::error(Errno(libc::EINTR)));
        match push_commit(&mut ring, cpu, *commit_id) {
            Ok(()) => serve_ring(shared, slot, &mut seat, &mut ring, &thread),
            Err(error) => shared.connection_ended(ConnectionEnd::Failed(error)),
        }
    })
}

/// Consecutive requests that suggest the other placement before a thread changes: a change costs about as much as a
/// small read.
const PLACEMENT_CHANGE_REQUESTS: u32 = 4;
/// From this length on, a page cache read may be read-ahead.
const AHEAD_FROM: u32 = 64 << 10;

/// Whether a page cache read is probably read-ahead. The first bytes of a file are not: the reader waits, and a small file has no
/// others.
fn is_ahead(offset: u64, size: u32, flags: u32) -> bool {
    offset > 0 && size >= AHEAD_FROM && flags & libc::O_DIRECT as u32 == 0
}

/// Where an entry's thread may run. By default the thread stays on the CPU of the queue: the request's data is in that CPU's
/// cache, and the reader sleeps. But the kernel queues read-ahead on the CPU of a reader that continues to work; the thread then
/// leaves that CPU to the reader. This is an optimisation, so a refusal (a CPU offline, a cpuset) is harmless.
pub(crate) struct ThreadPlacement {
    cpu: usize,
    own: libc::cpu_set_t,
    /// The process's own affinity; `None` if the kernel returned none.
    anywhere: Option<libc::cpu_set_t>,
    fixed: bool,
    row: u32,
}

impl ThreadPlacement {
    fn new(cpu: usize) -> ThreadPlacement {
        // SAFETY: cpu_set_t is plain integers, CPU_SET checks the bounds, pid 0 is this thread, and the kernel writes no more
        // than the size given.
        let (own, anywhere) = unsafe {
            let mut own: libc::cpu_set_t = std::mem::zeroed();
            let mut anywhere: libc::cpu_set_t = std::mem::zeroed();
            if cpu < libc::CPU_SETSIZE as usize {
                libc::CPU_SET(cpu, &mut own);
            }
            let known = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut anywhere) == 0;
            (own, known.then_some(anywhere))
        };
        let seat = ThreadPlacement { cpu, own, anywhere, fixed: true, row: 0 };
        seat.set_affinity(&own);
        seat
    }

    /// Records whether a request was read-ahead into the page cache.
    fn note_request(&mut self, ahead: bool) {
        self.row = if ahead == self.fixed { self.row + 1 } else { 0 };
        let Some(anywhere) = self.anywhere.filter(|_| self.row >= PLACEMENT_CHANGE_REQUESTS) else { return };
        self.set_affinity(if ahead { &anywhere } else { &self.own });
        self.fixed = !ahead;
        self.row = 0;
    }

    /// Makes a request to the file system at `path` from `cpu`, so that the entries of that CPU's queue take queued requests.
    pub(crate) fn poke_queue(cpu: usize, path: &std::path::Path) {
        let _seat = ThreadPlacement::new(cpu);
        let Ok(path) = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()) else { return };
        // SAFETY: the path ends with a NUL, and the kernel writes a statfs, which is plain integers.
        unsafe {
            let mut sizes: libc::statfs = std::mem::zeroed();
            libc::statfs(path.as_ptr(), &raw mut sizes);
        }
    }

    fn set_affinity(&self, set: &libc::cpu_set_t) {
        // SAFETY: pid 0 is this thread, and the set is as long as said.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
    }
}

fn push_entry(ring: &mut FuseRing, entry: &squeue::Entry128) -> io::Result<()> {
    // SAFETY: all that the entry points to (the iovecs, copied on submission, and the slot's memory) outlives the ring, and the
    // ring with the command is dropped before the slot.
    unsafe { ring.submission().push(entry) }.map_err(|_| io::Error::other("the submission queue is full"))
}

fn register_entry(slot: &mut RequestSlot, cpu: usize, ring: &mut FuseRing) -> io::Result<()> {
    let bytes = slot.bytes();
    let (head, payload) = bytes.split_at_mut(HEAD_LEN);
    let len = payload.len();
    let iovecs = [io_part(head, size_of::<UringReqHeader>()), io_part(payload, len)];
    let cmd = UringCmdReq { qid: cpu as u16, ..Default::default() };
    let until = Instant::now() + Duration::from_secs(2);
    loop {
        push_entry(ring, &build_sqe(abi::URING_CMD_REGISTER, &iovecs, cmd))?;
        ring.submit()?;
        // A refusal completes at once; a registered entry completes with the first request.
        let refused = ring.completion().next().map_or(0, |c| c.result());
        match -refused {
            0 => return Ok(()),
            libc::EAGAIN if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn io_part(bytes: &mut [u8], len: usize) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len }
}

/// Serves the requests of an entry until the connection ends, or another thread has the entry.
fn serve_ring<S: FileService>(
    shared: &SessionShared<S>,
    slot: &mut RequestSlot,
    seat: &mut ThreadPlacement,
    ring: &mut FuseRing,
    thread: &ServingThread,
) {
    let mut own_memory = allocate_own_memory(slot);
    let end = loop {
        thread.note_waiting();
        let completed = loop {
            if let Some(c) = ring.completion().next() {
                break c.result();
            }
            match ring.submit_and_wait(1) {
                Err(e) if e.raw_os_error() != Some(libc::EINTR) => {
                    return shared.connection_ended(ConnectionEnd::Failed(e));
                }
                _ => {}
            }
        };
        thread.note_taken();
        if completed < 0 {
            break match -completed {
                libc::ENOTCONN | libc::ENODEV => ConnectionEnd::Unmounted,
                libc::ECONNABORTED | libc::ECANCELED => ConnectionEnd::Aborted,
                errno => ConnectionEnd::Failed(io::Error::from_raw_os_error(errno)),
            };
        }
        let Some((commit_id, ahead)) = serve_one(shared, thread, slot, own_memory.bytes()) else { return };
        seat.note_request(ahead);
        if let Err(e) = push_commit(ring, seat.cpu, commit_id) {
            break ConnectionEnd::Failed(e);
        }
    };
    shared.connection_ended(end);
}

fn push_commit(ring: &mut FuseRing, cpu: usize, commit_id: u64) -> io::Result<()> {
    let cmd = UringCmdReq { qid: cpu as u16, commit_id, ..Default::default() };
    push_entry(ring, &build_sqe(abi::URING_CMD_COMMIT_AND_FETCH, &[], cmd))
}

/// Memory of a thread for requests that can be answered before the thread is done: the entry's memory then gets the next request.
/// Enough for a name and the longest extended attribute. Most requests touch one page.
const OWN_MEMORY_LEN: usize = 72 << 10;

/// The own memory of a thread, no longer than the payload of `slot`; without memory, each request is answered when done.
fn allocate_own_memory(slot: &mut RequestSlot) -> RequestSlot {
    let len = OWN_MEMORY_LEN.min(slot.bytes().len() - HEAD_LEN);
    AnonymousPages.allocate(len).map(RequestSlot::of_buffer).unwrap_or_default()
}

/// A write of more bytes is made from the entry's memory, without a copy.
const COPIED_WRITE_MAX: usize = 4 << 10;

/// Whether a request is served from the thread's own memory. Reads are not: their bytes land in the entry's memory, which NICs reach.
fn is_served_from_own_memory(request: &FuseRequest, body_len: usize, own_len: usize) -> bool {
    match request {
        FuseRequest::Read { .. } => false,
        FuseRequest::Change(ChangeRequest::Write { .. }) => body_len <= COPIED_WRITE_MAX,
        _ => body_len <= own_len,
    }
}

/// Serves the request in the slot's memory and leaves the reply there for the commit with the returned number. The
/// second value is true for read-ahead into the page cache. `None`: the request was answered before, and another thread has the
/// slot.
fn serve_one<S: FileService>(
    shared: &SessionShared<S>,
    thread: &ServingThread,
    slot: &mut RequestSlot,
    own_memory: &mut [u8],
) -> Option<(u64, bool)> {
    // A new slice for each request: while the entry waits, the kernel owns the memory.
    let (head, payload) = slot.bytes().split_at_mut(HEAD_LEN);
    let header: InHeader = read_plain(head).unwrap_or_default();
    let at = offset_of!(UringReqHeader, ent);
    let ent: UringEntInOut = read_plain(&head[at..]).unwrap_or_default();
    let commit_id = ent.commit_id;
    let args = &head[offset_of!(UringReqHeader, op_in)..at];
    let ahead = header.opcode == abi::opcode::READ
        && read_plain::<ReadIn>(args).is_some_and(|a| is_ahead(a.offset, a.size, a.flags));
    let body = &payload[..(ent.payload_sz as usize).min(payload.len())];
    let replied = match decode_split(&header, args, body) {
        Some(request) => {
            thread.note_request(&request);
            let waiter = RequestWaiter::of_request(&request);
            if waiter.can_leave() && is_served_from_own_memory(&request, body.len(), own_memory.len()) {
                own_memory[..body.len()].copy_from_slice(body);
                let entry = RingEntry { slot: std::mem::take(slot), commit_id };
                thread.begin_request(&header, waiter, Some(entry));
                let io = SlotIo { bytes: &mut *own_memory, body: 0, payload_mut: 0, direct: None };
                let replied = shared.dispatcher.dispatch_request(&header, request, io);
                let Some(RingEntry { slot: given_back, .. }) = thread.end_request().and_then(|request| request.entry)
                else {
                    shared.request_done_later(&header, request, replied, own_memory);
                    return None;
                };
                *slot = given_back;
                let len = replied.as_ref().map_or(0, |reply| reply.len);
                slot.bytes()[HEAD_LEN..][..len].copy_from_slice(&own_memory[..len]);
                replied
            } else {
                let waiter = if waiter.can_leave() { RequestWaiter::ProgramUntilDone } else { waiter };
                thread.begin_request(&header, waiter, None);
                let io = SlotIo { bytes: payload, body: 0, payload_mut: 0, direct: None };
                let replied = shared.dispatcher.dispatch_request(&header, request, io);
                thread.end_request();
                replied
            }
        }
        None => {
            tracing::warn!("request {} of {} bytes over io_uring has malformed arguments", header.opcode, header.len);
            Some(ReplyReceipt::error(Errno::EINVAL))
        }
    };
    // Requests without a reply come over /dev/fuse. If such a request comes here, the entry is returned all the same.
    write_reply(slot.bytes(), header.unique, &replied.unwrap_or(ReplyReceipt::ok(0)));
    Some((commit_id, ahead))
}

/// Writes the heads of a reply whose bytes are in the payload.
fn write_reply(bytes: &mut [u8], unique: u64, reply: &ReplyReceipt) {
    let ReplyReceipt { error, len, .. } = *reply;
    let head = &mut bytes[..HEAD_LEN];
    let at = offset_of!(UringReqHeader, ent);
    let ent: UringEntInOut = read_plain(&head[at..]).unwrap_or_default();
    let out = OutHeader { len: (size_of::<OutHeader>() + len) as u32, error: -error, unique };
    head[..size_of::<OutHeader>()].copy_from_slice(bytes_of(&out));
    let answer = UringEntInOut { payload_sz: len as u32, ..ent };
    head[at..at + size_of::<UringEntInOut>()].copy_from_slice(bytes_of(&answer));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpu_list("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(parse_cpu_list("0\n"), [0]);
        assert!(parse_cpu_list("").is_empty() && parse_cpu_list("x-y").is_empty());
        let cpus = QueueCpus::detect();
        assert!(cpus.all >= cpus.on.len() && !cpus.on.is_empty());
    }

    /// The CPUs this thread may run on.
    fn allowed() -> usize {
        // SAFETY: plain integers; the kernel writes no more than the size given, and CPU_COUNT reads as much.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
            libc::CPU_COUNT(&set) as usize
        }
    }

    #[test]
    fn a_thread_leaves_its_cpu_to_a_reader_with_read_ahead_and_returns() {
        std::thread::spawn(|| {
            let before = allowed();
            if before < 2 {
                println!("SKIP: this process may run on one CPU only");
                return;
            }
            let mut seat = ThreadPlacement::new(QueueCpus::detect().on[0]);
            let serve = |seat: &mut ThreadPlacement, ahead: bool, n: u32| (0..n).for_each(|_| seat.note_request(ahead));
            assert_eq!(allowed(), 1);
            serve(&mut seat, true, PLACEMENT_CHANGE_REQUESTS - 1);
            serve(&mut seat, false, 1);
            serve(&mut seat, true, PLACEMENT_CHANGE_REQUESTS - 1);
            assert_eq!(allowed(), 1, "one small read between them and it stays");
            serve(&mut seat, true, 1);
            assert_eq!(allowed(), before);
            serve(&mut seat, false, PLACEMENT_CHANGE_REQUESTS);
            assert_eq!(allowed(), 1);
        })
        .join()
        .unwrap();
    }
}
