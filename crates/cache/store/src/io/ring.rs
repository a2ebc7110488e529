//! An io_uring for each thread that reads or writes cache disks, and the handling of rings whose disk did not answer in time.
//! Knows descriptors, memory and deadlines, not the names or contents of files.
//!
//! Ownership makes a late completion harmless: at a missed deadline the whole ring leaves the thread, together with a box that
//! owns the memory the kernel may still write. [`RingSet::reap_late`] checks such rings from time to time and frees the memory
//! once every operation has ended. If the `RingSet` is dropped before, ring and memory are leaked on purpose.

use super::{ALIGN, ReadTarget, is_process_error};
use io_uring::{IoUring, opcode, squeue, types};
use parking_lot::Mutex;
use spurline_mem::BufferPool;
use std::cell::RefCell;
use std::ffi::CString;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A large transfer is split into pieces of this many bytes, so that the check of a piece overlaps with the read of the next. A
/// multiple of the checksum granule.
pub const TRANSFER_PIECE: usize = 512 << 10;
/// Pieces in flight at once: a block of 4 MiB, and as much again for larger blocks.
const RING_DEPTH: usize = 16;
/// Least length of a piece of the arena that is registered at once. A registration pins the pages of the piece, which are
/// resident then: an unused mount has none.
const PIECE_MIN: usize = 8 << 20;
/// Pieces of an arena: a ring that has not seen the newest piece copies the table in some 30 µs.
const PIECES_MAX: usize = 1024;
/// The largest registered buffer the kernel takes.
const PIECE_MAX: usize = 1 << 30;

thread_local! {
    /// This thread's rings, a ring for each `RingSet` that the thread worked for; a handful at most.
    static LOCAL: RefCell<Vec<LocalRing>> = const { RefCell::new(Vec::new()) };
}

struct LocalRing {
    owner: u64,
    alive: std::sync::Weak<()>,
    ring: ThreadRing,
}

struct ThreadRing {
    uring: IoUring,
    /// The pieces of the arena that are registered with this ring, by number; empty where the kernel registers none.
    pieces: Vec<bool>,
    /// Whether the ring has a slot for a direct descriptor.
    file_slot: bool,
}

/// A ring that missed a deadline, with the number of pending operations and the memory that these may access.
struct LateRing {
    uring: IoUring,
    owed: usize,
    disk: u8,
    opens: bool,
    keep: Option<Box<dyn Send>>,
}

/// The arena in pieces of the same length, a power of two that no buffer exceeds: a buffer lies in a single piece.
#[derive(Clone, Copy)]
struct ArenaPieces {
    start: usize,
    len: usize,
    piece: usize,
}

impl ArenaPieces {
    fn of(pool: &BufferPool) -> ArenaPieces {
        let (start, len) = pool.arena();
        let piece = len.div_ceil(PIECES_MAX).max(pool.largest_bytes()).max(PIECE_MIN);
        ArenaPieces { start: start as usize, len, piece: piece.next_power_of_two().min(PIECE_MAX) }
    }

    /// The piece that has all of these bytes.
    fn piece_of(&self, ptr: usize, len: usize) -> Option<usize> {
        let at = ptr.checked_sub(self.start).filter(|at| at + len <= self.len)?;
        (at / self.piece == (at + len - 1) / self.piece).then_some(at / self.piece)
    }

    fn vector_of(&self, piece: usize) -> libc::iovec {
        let at = piece * self.piece;
        libc::iovec { iov_base: (self.start + at) as *mut libc::c_void, iov_len: self.piece.min(self.len - at) }
    }
}

/// A ring that transfers nothing: the table has the pieces that are registered.
struct MasterRing {
    uring: IoUring,
    pieces: Vec<bool>,
}

/// Why a transfer failed.
enum TransferError {
    Os(io::Error),
    /// The deadline passed with this many operations still in flight.
    Late(usize),
}

/// The rings of all threads that work for a store.
pub struct RingSet {
    id: u64,
    alive: Arc<()>,
    /// Memory worth registering, which `_pool` keeps mapped.
    arena: Option<ArenaPieces>,
    _pool: Option<Arc<BufferPool>>,
    /// The ring with which pieces of the arena are first registered; the other rings clone this table.
    master: Mutex<Option<MasterRing>>,
    late: Mutex<Vec<LateRing>>,
    /// Set once the kernel refused a ring: plain system calls from then on.
    refused: AtomicBool,
}

impl MasterRing {
    /// `None` where the kernel has no io_uring or no such tables.
    fn new(arena: &ArenaPieces) -> Option<MasterRing> {
        let uring = IoUring::new(1).ok()?;
        let count = arena.len.div_ceil(arena.piece);
        uring.submitter().register_buffers_sparse(u32::try_from(count).ok()?).ok()?;
        Some(MasterRing { uring, pieces: vec![false; count] })
    }

    /// Registers a piece at the first use; false when the kernel refuses.
    fn register(&mut self, arena: &ArenaPieces, piece: usize) -> bool {
        if !self.pieces[piece] {
            let vector = [arena.vector_of(piece)];
            // SAFETY: `_pool` keeps the arena mapped for as long as the rings live.
            match unsafe { self.uring.submitter().register_buffers_update(piece as u32, &vector, None) } {
                Ok(()) => self.pieces[piece] = true,
                Err(error) => tracing::info!(
                    "buffers are not registered with io_uring ({error}): disk reads cost about twice the CPU; raise `ulimit -l`"
                ),
            }
        }
        self.pieces[piece]
    }
}

impl ThreadRing {
    /// Takes over the table of the master. No operation of this ring is under way. Where the kernel can't clone tables (before
    /// Linux 6.12), the ring has none.
    fn clone_pieces(&mut self, master: &MasterRing) {
        let submitter = self.uring.submitter();
        if !self.pieces.is_empty() {
            let _ = submitter.unregister_buffers();
        }
        match submitter.register_buffers_clone(master.uring.as_raw_fd()) {
            Ok(()) => self.pieces.clone_from(&master.pieces),
            Err(_) => self.pieces.clear(),
        }
    }
}

impl Drop for RingSet {
    fn drop(&mut self) {
        self.reap_late();
        // The kernel may still write into that memory: leaked rather than reused.
        self.late.get_mut().drain(..).for_each(std::mem::forget);
    }
}

impl RingSet {
    /// Rings for a pool of buffers. The pool's memory is registered with the kernel in pieces, at the first use by a transfer, so that
    /// reads cost less CPU.
    pub fn new(pool: Option<Arc<BufferPool>>) -> Arc<RingSet> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let arena = pool.as_ref().map(|pool| ArenaPieces::of(pool));
        Arc::new(RingSet {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            alive: Arc::new(()),
            master: Mutex::new(arena.as_ref().and_then(MasterRing::new)),
            arena,
            _pool: pool,
            late: Mutex::new(Vec::new()),
            refused: AtomicBool::new(false),
        })
    }

    /// Rings as on a kernel without io_uring: every transfer falls back to plain system calls.
    pub fn refused() -> Arc<RingSet> {
        let rings = RingSet::new(None);
        rings.refused.store(true, Ordering::Relaxed);
        rings
    }

    fn make_ring(&self) -> io::Result<ThreadRing> {
        let uring = IoUring::builder()
            .setup_coop_taskrun()
            .build(RING_DEPTH as u32)
            .or_else(|_| IoUring::new(RING_DEPTH as u32))?;
        if !uring.params().is_feature_ext_arg() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let place = uring.submitter().register_files_sparse(1).is_ok();
        let mut ring = ThreadRing { uring, pieces: Vec::new(), file_slot: place };
        if let Some(master) = &*self.master.lock() {
            ring.clone_pieces(master);
        }
        Ok(ring)
    }

    /// Takes this thread's ring; `None` where the kernel has or allows no io_uring.
    fn take_ring(&self) -> Option<ThreadRing> {
        if self.refused.load(Ordering::Relaxed) {
            return None;
        }
        let found = LOCAL.with_borrow_mut(|all| {
            let at = all.iter().position(|l| l.owner == self.id)?;
            Some(all.swap_remove(at).ring)
        });
        found.or_else(|| self.accept_ring(self.make_ring()))
    }

    fn accept_ring(&self, result: io::Result<ThreadRing>) -> Option<ThreadRing> {
        match result {
            Ok(ring) => Some(ring),
            // The next attempt may succeed; this time plain system calls are used.
            Err(error) if is_process_error(&error) => {
                tracing::debug!("no io_uring for this operation: {error}");
                None
            }
            Err(error) => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "io_uring is not available ({error}): cache disks are read by plain system calls, and a \
                         hung disk blocks its readers; allow io_uring_setup in the container's seccomp profile"
                    );
                }
                None
            }
        }
    }

    fn return_ring(&self, ring: ThreadRing) {
        // A thread that is ending can't store the ring; then the ring is closed.
        let _ = LOCAL.try_with(|all| {
            let mut all = all.borrow_mut();
            all.retain(|l| l.alive.strong_count() > 0);
            all.push(LocalRing { owner: self.id, alive: Arc::downgrade(&self.alive), ring });
        });
    }

    fn set_aside(&self, ring: ThreadRing, owed: usize, disk: u8, opens: bool, keep: Option<Box<dyn Send>>) {
        self.reap_late();
        self.late.lock().push(LateRing { uring: ring.uring, owed, disk, opens, keep });
    }

    /// Frees the memory of late operations that have ended. Cheap when there are none.
    pub fn reap_late(&self) {
        self.late.lock().retain_mut(|late| {
            for done in late.uring.completion() {
                late.owed = late.owed.saturating_sub(1);
                if late.opens && done.result() >= 0 {
                    // SAFETY: the open that just ended created this descriptor, and there is no other owner.
                    drop(unsafe { OwnedFd::from_raw_fd(done.result()) });
                }
            }
            if late.owed == 0 {
                late.keep = None;
            }
            late.owed > 0
        });
    }

    /// Number of rings with a late operation of a disk.
    pub fn late(&self, disk: u8) -> usize {
        self.late.lock().iter().filter(|late| late.disk == disk).count()
    }

    /// Gives a ring back after a transfer; sets the ring of a late transfer aside, with the memory that the transfer uses.
    fn end_transfer(
        &self,
        ring: ThreadRing,
        disk: u8,
        result: Result<usize, TransferError>,
        keep: impl FnOnce() -> Option<Box<dyn Send>>,
    ) -> io::Result<usize> {
        let owed = match result {
            Ok(bytes) => {
                self.return_ring(ring);
                return Ok(bytes);
            }
            Err(TransferError::Os(error)) => {
                self.return_ring(ring);
                return Err(error);
            }
            Err(TransferError::Late(owed)) => owed,
        };
        self.set_aside(ring, owed, disk, false, keep());
        Err(io::ErrorKind::TimedOut.into())
    }

    /// The number of the registered buffer that has these bytes. The first transfer of a ring with a piece takes a lock, and the
    /// first of all rings registers the piece.
    fn fixed_index(&self, ring: &mut ThreadRing, ptr: usize, len: usize) -> Option<u16> {
        let arena = self.arena.as_ref().filter(|_| !ring.pieces.is_empty())?;
        let piece = arena.piece_of(ptr, len)?;
        if !ring.pieces[piece] {
            let mut master = self.master.lock();
            if let Some(known) = &mut *master
                && known.register(arena, piece)
            {
                ring.clone_pieces(known);
            } else {
                *master = None;
                ring.pieces.clear();
            }
        }
        u16::try_from(piece).ok().filter(|_| ring.pieces.get(piece) == Some(&true))
    }

    /// Reads into `target`; `None` when there is no io_uring and the caller must read in another way.
    pub fn read(
        &self,
        disk: u8,
        fd: RawFd,
        offset: u64,
        target: &mut ReadTarget<'_>,
        timeout: Duration,
        done: &mut dyn FnMut(Range<usize>),
    ) -> Option<io::Result<usize>> {
        let mut ring = self.take_ring()?;
        let fixed = self.fixed_index(&mut ring, target.ptr as usize, target.len.max(1));
        let base = target.ptr;
        let entry = |at: usize, len: usize| {
            // The address stays inside the target, whose owner the caller holds.
            let ptr = base.wrapping_add(at);
            match fixed {
                Some(index) => {
                    opcode::ReadFixed::new(types::Fd(fd), ptr, len as u32, index).offset(offset + at as u64).build()
                }
                None => opcode::Read::new(types::Fd(fd), ptr, len as u32).offset(offset + at as u64).build(),
            }
        };
        let result = run_transfer(&mut ring.uring, target.len, &entry, Instant::now() + timeout, done);
        Some(self.end_transfer(ring, disk, result, || Some((target.keep)())))
    }

    /// Writes `data`; `None` when there is no io_uring.
    pub fn write(&self, disk: u8, fd: RawFd, offset: u64, data: &[u8], timeout: Duration) -> Option<io::Result<usize>> {
        let mut ring = self.take_ring()?;
        let fixed = self.fixed_index(&mut ring, data.as_ptr() as usize, data.len().max(1));
        let base = data.as_ptr();
        let entry = |at: usize, len: usize| {
            let ptr = base.wrapping_add(at);
            match fixed {
                Some(index) => {
                    opcode::WriteFixed::new(types::Fd(fd), ptr, len as u32, index).offset(offset + at as u64).build()
                }
                None => opcode::Write::new(types::Fd(fd), ptr, len as u32).offset(offset + at as u64).build(),
            }
        };
        let result = run_transfer(&mut ring.uring, data.len(), &entry, Instant::now() + timeout, &mut |_| {});
        // The kernel holds the pages that a late write is from. Late bytes on disk are in a file that no index entry names,
        // or differ from the entry's checksum.
        Some(self.end_transfer(ring, disk, result, || None))
    }

    /// Opens a file, writes `data` to the start and closes the file, in a single submission: a small file costs a single wait
    /// instead of three, and no process descriptor. Returns the bytes written; `None` when the kernel can't do that.
    pub fn create(
        &self,
        disk: u8,
        path: &CString,
        flags: i32,
        data: &[u8],
        timeout: Duration,
    ) -> Option<io::Result<usize>> {
        let mut ring = self.take_ring()?;
        let (true, Ok(slot)) = (ring.file_slot, types::DestinationSlot::try_from_slot_target(0)) else {
            self.return_ring(ring);
            return None;
        };
        let at = types::Fd(libc::AT_FDCWD);
        let open = opcode::OpenAt::new(at, path.as_ptr()).flags(flags).mode(0o600).file_index(Some(slot)).build();
        let write = opcode::Write::new(types::Fixed(0), data.as_ptr(), data.len() as u32).offset(0).build();
        let steps = [
            open.flags(squeue::Flags::IO_LINK),
            // The file is closed whatever the write's result.
            write.flags(squeue::Flags::IO_HARDLINK),
            opcode::Close::new(types::Fixed(0)).build(),
        ];
        match run_chain(&mut ring.uring, steps, Instant::now() + timeout) {
            Ok([opened, written, _]) => {
                self.return_ring(ring);
                let failed = [opened, written].into_iter().find(|result| *result < 0);
                Some(failed.map_or(Ok(written as usize), |error| Err(io::Error::from_raw_os_error(-error))))
            }
            Err(TransferError::Os(error)) => {
                self.return_ring(ring);
                Some(Err(error))
            }
            Err(TransferError::Late(owed)) => {
                // As with a late write: the bytes are in a file that no index entry names.
                self.set_aside(ring, owed, disk, false, Some(Box::new(path.clone())));
                Some(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }

    /// Opens a file with a deadline; `None` when there is no io_uring.
    pub fn open(&self, disk: u8, path: &CString, flags: i32, timeout: Duration) -> Option<io::Result<OwnedFd>> {
        let mut ring = self.take_ring()?;
        let entry = |_: usize, _: usize| {
            opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).flags(flags).mode(0o600).build()
        };
        let mut fd = None;
        // A single operation whose result is a descriptor: `run_transfer` passes the result as the end of a range.
        match run_transfer(&mut ring.uring, 0, &entry, Instant::now() + timeout, &mut |range| {
            fd = Some(range.end as RawFd)
        }) {
            Ok(_) => {
                self.return_ring(ring);
                // SAFETY: the kernel just made this descriptor for this call.
                Some(fd.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).ok_or_else(|| io::ErrorKind::Other.into()))
            }
            Err(TransferError::Os(error)) => {
                self.return_ring(ring);
                Some(Err(error))
            }
            Err(TransferError::Late(owed)) => {
                self.set_aside(ring, owed, disk, true, Some(Box::new(path.clone())));
                Some(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl RingSet {
    /// Frees or allocates a range of a file, as `fallocate(2)` does; `None` when the kernel can't do that here.
    pub fn fallocate(
        &self,
        disk: u8,
        fd: RawFd,
        mode: i32,
        offset: u64,
        len: u64,
        timeout: Duration,
    ) -> Option<io::Result<()>> {
        self.run_single(
            disk,
            opcode::Fallocate::new(types::Fd(fd), len).offset(offset).mode(mode).build(),
            None,
            timeout,
        )
    }

    /// Sets a file's length; `None` when the kernel can't do that here (kernels before Linux 6.9).
    pub fn truncate(&self, disk: u8, fd: RawFd, len: u64, timeout: Duration) -> Option<io::Result<()>> {
        self.run_single(disk, opcode::Ftruncate::new(types::Fd(fd), len).build(), None, timeout)
    }

    /// Removes a file; `None` when the kernel can't do that here.
    pub fn unlink(&self, disk: u8, path: &CString, timeout: Duration) -> Option<io::Result<()>> {
        let at = types::Fd(libc::AT_FDCWD);
        let name = path.clone();
        let entry = opcode::UnlinkAt::new(at, name.as_ptr()).build();
        self.run_single(disk, entry, Some(Box::new(name)), timeout)
    }

    /// Syncs a file's data; `None` when the kernel can't do that here.
    pub fn sync(&self, disk: u8, fd: RawFd, timeout: Duration) -> Option<io::Result<()>> {
        let flags = types::FsyncFlags::DATASYNC;
        self.run_single(disk, opcode::Fsync::new(types::Fd(fd)).flags(flags).build(), None, timeout)
    }

    /// Runs an operation that accesses no memory but that of `keep`.
    fn run_single(
        &self,
        disk: u8,
        entry: squeue::Entry,
        keep: Option<Box<dyn Send>>,
        timeout: Duration,
    ) -> Option<io::Result<()>> {
        let mut ring = self.take_ring()?;
        match run_chain(&mut ring.uring, [entry], Instant::now() + timeout) {
            // The kernel reports an unknown operation as invalid.
            Ok([result]) if result == -libc::EINVAL => {
                self.return_ring(ring);
                None
            }
            Ok([result]) => {
                self.return_ring(ring);
                Some(if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) })
            }
            Err(TransferError::Os(error)) => {
                self.return_ring(ring);
                Some(Err(error))
            }
            Err(TransferError::Late(owed)) => {
                self.set_aside(ring, owed, disk, false, keep);
                Some(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

/// Submits the queue and waits for `least` completions until the deadline; false when the ring is unusable.
fn submit_and_wait(uring: &mut IoUring, least: usize, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let wait = types::Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
    match uring.submitter().submit_with_args(least, &types::SubmitArgs::new().timespec(&wait)) {
        Ok(_) => true,
        Err(error) => match error.raw_os_error() {
            Some(libc::ETIME | libc::EINTR | libc::EBUSY) => true,
            // The kernel is short of memory and returned at once.
            Some(libc::EAGAIN) => {
                std::thread::sleep(left.min(Duration::from_millis(1)));
                true
            }
            _ => false,
        },
    }
}

/// The error for `owed` abandoned operations, less those that the kernel never took, and never will without the ring.
fn late_error(uring: &mut IoUring, owed: usize) -> TransferError {
    TransferError::Late(owed.saturating_sub(uring.submission().len()))
}

/// Runs linked steps and returns the results in order.
fn run_chain<const N: usize>(
    uring: &mut IoUring,
    steps: [squeue::Entry; N],
    deadline: Instant,
) -> Result<[i32; N], TransferError> {
    let mut results = [0; N];
    let mut owed = N;
    for (n, step) in steps.into_iter().enumerate() {
        // SAFETY: the memory and names that the steps point to live until the completions were seen, or the caller moves them to
        // `LateRing`.
        if unsafe { uring.submission().push(&step.user_data(n as u64)) }.is_err() {
            return Err(TransferError::Os(io::Error::other("the submission queue is full")));
        }
    }
    while owed > 0 {
        let goes_on = submit_and_wait(uring, owed, deadline);
        for completion in uring.completion() {
            owed -= 1;
            results[completion.user_data() as usize] = completion.result();
        }
        if owed > 0 && (!goes_on || Instant::now() >= deadline) {
            return Err(late_error(uring, owed));
        }
    }
    Ok(results)
}

/// Runs the pieces of a transfer, at most [`RING_DEPTH`] at once, and returns the bytes moved up to the first short piece. With
/// `len` 0, runs a single operation and passes the result to `done` unchanged.
fn run_transfer(
    uring: &mut IoUring,
    len: usize,
    entry: &dyn Fn(usize, usize) -> io_uring::squeue::Entry,
    deadline: Instant,
    done: &mut dyn FnMut(Range<usize>),
) -> Result<usize, TransferError> {
    // A remainder below an alignment unit joins the last piece.
    let piece = |at: usize| if len - at <= TRANSFER_PIECE + ALIGN { len - at } else { TRANSFER_PIECE };
    let mut next = 0;
    let mut owed = 0;
    let mut end = len;
    let mut failed: Option<io::Error> = None;
    let mut first = true;
    loop {
        while failed.is_none() && (next < len || first) && owed < RING_DEPTH {
            let n = piece(next);
            let sqe = entry(next, n).user_data(next as u64);
            // SAFETY: the memory and names that the entry points to live until the completion was seen, or the caller moves them
            // to `LateRing`.
            if unsafe { uring.submission().push(&sqe) }.is_err() {
                break;
            }
            next += n;
            owed += 1;
            first = false;
        }
        if owed == 0 {
            break;
        }
        let goes_on = submit_and_wait(uring, 1, deadline);
        for completion in uring.completion() {
            owed -= 1;
            let at = completion.user_data() as usize;
            match completion.result() {
                error if error < 0 => failed = Some(io::Error::from_raw_os_error(-error)),
                fd if len == 0 => done(0..fd as usize),
                n => {
                    let n = n as usize;
                    if n < piece(at) {
                        end = end.min(at + n);
                    }
                    done(at..at + n);
                }
            }
        }
        if owed > 0 && (!goes_on || Instant::now() >= deadline) {
            return Err(late_error(uring, owed));
        }
    }
    failed.map_or(Ok(end), |error| Err(TransferError::Os(error)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const SHORT: Duration = Duration::from_millis(50);
    /// From `linux/fcntl.h`; not in the libc crate.
    const F_SETSIG: i32 = 10;

    fn available(rings: &RingSet) -> bool {
        let Some(ring) = rings.take_ring() else {
            assert!(!std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default().contains("io_uring"), "no io_uring");
            println!("SKIP: no io_uring here");
            return false;
        };
        rings.return_ring(ring);
        true
    }

    fn reaped(rings: &RingSet) -> bool {
        (0..2000).any(|_| {
            rings.reap_late();
            std::thread::sleep(Duration::from_millis(5));
            rings.late(3) == 0
        })
    }

    #[test]
    fn to_be_short_of_descriptors_is_not_to_have_no_io_uring() {
        let rings = RingSet::new(None);
        if !available(&rings) {
            return;
        }
        let error = |code| Err(io::Error::from_raw_os_error(code));
        for code in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            assert!(rings.accept_ring(error(code)).is_none() && available(&rings));
        }
        for code in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
            let rings = RingSet::new(None);
            assert!(rings.accept_ring(error(code)).is_none() && rings.take_ring().is_none());
        }
    }

    /// An empty pipe is a disk that does not answer.
    #[test]
    fn a_late_read_keeps_its_memory_until_it_ends() {
        let rings = RingSet::new(None);
        if !available(&rings) {
            return;
        }
        let (reader, mut writer) = std::io::pipe().unwrap();
        let memory = Arc::new(parking_lot::Mutex::new(Some(Box::new([0u8; 4096]))));
        let ptr = memory.lock().as_mut().unwrap().as_mut_ptr();
        let held = Arc::downgrade(&memory);
        let mut owner = Some(memory);
        let mut keep = || Box::new(owner.take()) as Box<dyn Send>;
        let mut target = ReadTarget { ptr, len: 4096, keep: &mut keep };
        let end = rings.read(3, reader.as_raw_fd(), 0, &mut target, SHORT, &mut |_| {}).unwrap();
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::TimedOut);
        rings.reap_late();
        assert_eq!((rings.late(3), rings.late(0)), (1, 0));
        assert!(held.upgrade().is_some(), "the memory is kept while the kernel may write it");
        // The thread has a new ring and goes on meanwhile.
        let (ready, mut data) = std::io::pipe().unwrap();
        data.write_all(b"here").unwrap();
        let mut other = [0u8; 4];
        let mut none = || Box::new(()) as Box<dyn Send>;
        let mut target = ReadTarget { ptr: other.as_mut_ptr(), len: 4, keep: &mut none };
        assert_eq!(rings.read(3, ready.as_raw_fd(), 0, &mut target, SHORT * 100, &mut |_| {}).unwrap().unwrap(), 4);
        assert_eq!(&other, b"here");
        writer.write_all(b"late").unwrap();
        assert!(reaped(&rings));
        assert!(held.upgrade().is_none(), "the memory is free once the answer came");
    }

    #[test]
    fn what_the_kernel_never_took_is_not_waited_for() {
        let rings = RingSet::new(None);
        if !available(&rings) {
            return;
        }
        // A ring that is not enabled takes nothing.
        let Ok(uring) = IoUring::builder().setup_r_disabled().build(RING_DEPTH as u32) else {
            println!("SKIP: no rings that are made disabled here");
            return;
        };
        LOCAL.with_borrow_mut(|all| all.retain(|local| local.owner != rings.id));
        rings.return_ring(ThreadRing { uring, pieces: Vec::new(), file_slot: false });
        let file = tempfile::tempfile().unwrap();
        let end = rings.write(3, file.as_raw_fd(), 0, b"bytes", Duration::from_secs(60)).unwrap();
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::TimedOut);
        rings.reap_late();
        assert_eq!(rings.late(3), 0);
        // And the thread has another ring.
        assert_eq!(rings.write(3, file.as_raw_fd(), 0, b"bytes", Duration::from_secs(60)).unwrap().unwrap(), 5);
    }

    #[test]
    fn pieces_of_the_arena_are_registered_as_they_are_used() {
        let pool = BufferPool::new(3 * PIECE_MIN as u64 + (16 << 10), 1 << 20).unwrap();
        let rings = RingSet::new(Some(Arc::clone(&pool)));
        if !available(&rings) {
            return;
        }
        let mut early = rings.make_ring().unwrap();
        if early.pieces.is_empty() {
            println!("SKIP: this kernel clones no tables of buffers");
            return;
        }
        let registered = || rings.master.lock().as_ref().unwrap().pieces.clone();
        assert_eq!(registered(), [false; 4]);
        let file = tempfile::tempfile().unwrap();
        let mut buf = pool.try_alloc(1 << 20).unwrap();
        buf.fill(7);
        assert_eq!(rings.write(3, file.as_raw_fd(), 0, &buf, SHORT * 1000).unwrap().unwrap(), 1 << 20);
        let used = ArenaPieces::of(&pool).piece_of(buf.as_ptr() as usize, buf.len()).unwrap();
        assert_eq!(registered(), [0, 1, 2, 3].map(|piece| piece == used));
        // A ring that was there before has the piece as well, and none has bytes that lie in two pieces.
        assert_eq!(rings.fixed_index(&mut early, buf.as_ptr() as usize, buf.len()), Some(used as u16));
        let first_end = pool.arena().0 as usize + PIECE_MIN;
        assert_eq!(rings.fixed_index(&mut early, first_end - 1, 2), None);
        LOCAL.with_borrow_mut(|all| all.retain(|local| local.owner != rings.id));
        rings.return_ring(early);
        buf.fill(0);
        let mut none = || Box::new(()) as Box<dyn Send>;
        let mut target = ReadTarget { ptr: buf.as_ptr(), len: buf.len(), keep: &mut none };
        rings.read(3, file.as_raw_fd(), 0, &mut target, SHORT * 1000, &mut |_| {}).unwrap().unwrap();
        assert!(buf.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_late_open_closes_what_it_opened() {
        let rings = RingSet::new(None);
        if !available(&rings) {
            return;
        }
        // A file under a write lease is one whose open waits; a second lease is granted only when it is not open.
        let file = tempfile::NamedTempFile::new().unwrap();
        let lease = |fd: RawFd, kind: i32| {
            // SAFETY: plain calls on a descriptor that is open; SIGURG is ignored by default.
            unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) == 0 && libc::fcntl(fd, libc::F_SETLEASE, kind) == 0 }
        };
        let fd = file.as_file().as_raw_fd();
        if !lease(fd, libc::F_WRLCK) {
            println!("SKIP: no leases on this file system");
            return;
        }
        let name = CString::new(file.path().as_os_str().as_encoded_bytes()).unwrap();
        let end = rings.open(3, &name, libc::O_RDONLY, SHORT).unwrap();
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(rings.late(3), 1);
        assert!(lease(fd, libc::F_UNLCK));
        assert!(reaped(&rings));
        assert!(lease(fd, libc::F_WRLCK), "the late descriptor was closed");
    }
}
