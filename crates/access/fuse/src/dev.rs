//! Requests over /dev/fuse: a blocking thread per slot, each with a separate descriptor where allowed, and more threads while all
//! are busy. Does not interpret requests.

use crate::abi::{self, InHeader};
use crate::buffer::{HEAD_LEN, SlotBuffer};
use crate::dispatch::SlotIo;
use crate::errno::Errno;
use crate::reply::{DirectReply, ReplyReceipt, send_reply};
use crate::request::{DecodeError, FuseRequest, decode_message};
use crate::session::{RequestSlot, SessionShared};
use crate::under_way::{RequestWaiter, ServingThread};
use rustix::event::{PollFd, PollFlags, Timespec};
use spurline_fs::FileService;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The offset of a request in the slot: header and arguments of a WRITE (and of a READ) then end where the page-aligned payload
/// starts.
const REQUEST_AT: usize = HEAD_LEN - 80;

/// Why reading the device ended.
pub(crate) enum ConnectionEnd {
    /// The file system was unmounted.
    Unmounted,
    Aborted,
    /// The device failed.
    Failed(io::Error),
}

/// The memory of a slot as a single slice.
pub(crate) fn slot_bytes(buffer: &mut dyn SlotBuffer) -> &mut [u8] {
    // SAFETY: the trait promises `len` initialised bytes that only this value's owner touches, and the
    // exclusive borrow of the value lasts as long as the slice. The kernel writes there only during calls
    // that are given the slice.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr().as_ptr(), buffer.len()) }
}

/// Reads a message into the slot; the bytes lie at [`REQUEST_AT`].
fn receive_request(device: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, ConnectionEnd> {
    let room = &mut bytes[REQUEST_AT..];
    loop {
        // SAFETY: the kernel writes at most `len` bytes into memory borrowed exclusively for the call.
        let n = unsafe { libc::read(device.as_raw_fd(), room.as_mut_ptr().cast(), room.len()) };
        if n >= 0 {
            return Ok(n as usize);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // ENOENT: the request was withdrawn during the hand-over.
            Some(libc::EINTR | libc::ENOENT | libc::EAGAIN) => {}
            Some(libc::ENODEV) => return Err(ConnectionEnd::Unmounted),
            Some(libc::ECONNABORTED) => return Err(ConnectionEnd::Aborted),
            _ => return Err(ConnectionEnd::Failed(error)),
        }
    }
}

/// Whether no request waits in the device for a thread.
pub(crate) fn is_empty(device: &OwnedFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(device, PollFlags::IN)], Some(&at_once)) == Ok(0)
}

/// Reads the kernel's INIT and replies with the result of `negotiate`.
///
/// # Errors
/// When the device ends first, or the protocol versions do not match; the sentence gives the reason.
pub(crate) fn negotiate_session(
    device: &OwnedFd,
    bytes: &mut [u8],
    mut negotiate: impl FnMut(u32, u32, u64) -> Result<abi::InitOut, String>,
) -> Result<(), String> {
    let device = device.as_fd();
    loop {
        let n = receive_request(device, bytes).map_err(|end| match end {
            ConnectionEnd::Failed(error) => format!("reading /dev/fuse failed: {error}"),
            _ => "it was unmounted before the kernel's first request".into(),
        })?;
        let (header, major, minor, readahead, flags) = match decode_message(&bytes[REQUEST_AT..REQUEST_AT + n]) {
            Ok((header, crate::FuseRequest::Init { major, minor, max_readahead, flags }, _)) => {
                (header, major, minor, max_readahead, flags)
            }
            other => return Err(format!("the kernel's first request is not INIT: {other:?}")),
        };
        let direct = DirectReply { device, unique: header.unique };
        if major > abi::MAJOR {
            // By protocol: reply with our major version, and the kernel repeats INIT with that version.
            let out = abi::InitOut { major: abi::MAJOR, minor: abi::MINOR, ..Default::default() };
            send_init_reply(direct, &out);
            continue;
        }
        let refuse = |why: String| {
            send_reply(direct, libc::EPROTO, &[]);
            Err(why)
        };
        if major < abi::MAJOR {
            return refuse(format!(
                "the kernel speaks FUSE {major}.{minor}; 7.28 (Linux 4.20) is the oldest that works"
            ));
        }
        return match negotiate(minor, readahead, flags) {
            Ok(out) if send_init_reply(direct, &out) => Ok(()),
            Ok(_) => Err("the kernel refused the reply to INIT".into()),
            Err(why) => refuse(why),
        };
    }
}

fn send_init_reply(direct: DirectReply<'_>, out: &abi::InitOut) -> bool {
    let bytes = abi::bytes_of(out);
    send_reply(direct, 0, bytes)
}

/// Another descriptor of the session, for another thread.
fn clone_device(device: &OwnedFd) -> io::Result<OwnedFd> {
    let fresh: OwnedFd = OpenOptions::new().read(true).write(true).open("/dev/fuse")?.into();
    let session = device.as_raw_fd() as u32;
    // SAFETY: both descriptors are open and the kernel only reads the 4 bytes of `session`.
    match unsafe { libc::ioctl(fresh.as_raw_fd(), abi::DEV_IOC_CLONE as _, &raw const session) } {
        0 => Ok(fresh),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Starts another thread if memory and limits allow.
pub(crate) fn grow_threads<S: FileService>(shared: &Arc<SessionShared<S>>) {
    // A thread whose request waits for others does not count.
    let max = shared.config.dev_threads() + shared.waits.count() + shared.left_requests.load(Ordering::Acquire);
    let reserved = shared.dev_threads.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n < max).then_some(n + 1));
    if reserved.is_err() {
        return;
    }
    let started = shared.config.buffers.allocate(shared.config.slot_len()).and_then(|buffer| {
        let slot = RequestSlot::new(buffer, shared)?;
        // Without permission to open /dev/fuse, the thread shares the session's descriptor.
        // What a channel of this process alone has taken fails with the end of the process, so that a kept session has none.
        let own = if shared.config.kept.is_none() { clone_device(&shared.device).ok().map(Arc::new) } else { None };
        shared.spawn_slot("fuse-dev", slot, move |shared, slot| {
            serve_device(shared, slot, own.as_ref().unwrap_or(&shared.device), true);
        })
    });
    if let Err(error) = started {
        shared.dev_threads.fetch_sub(1, Ordering::AcqRel);
        tracing::debug!("no further thread for /dev/fuse: {error}");
    }
}

/// Serves requests until the session ends or the thread is surplus. `growing`: all requests come over /dev/fuse, and
/// not only forgets, so the number of threads follows the load.
pub(crate) fn serve_device<S: FileService>(
    shared: &Arc<SessionShared<S>>,
    slot: &mut RequestSlot,
    device: &Arc<OwnedFd>,
    growing: bool,
) {
    let bytes = slot.bytes();
    // A request that the kernel copies into memory that has no page yet fails with EIO if this process is killed meanwhile.
    if shared.config.kept.is_some() {
        bytes.fill(0);
    }
    let thread = shared.under_way.add_device_thread(device);
    loop {
        thread.note_waiting();
        shared.dev_idle.fetch_add(1, Ordering::Relaxed);
        let received = receive_request(device.as_fd(), bytes);
        thread.note_taken();
        let was_idle = shared.dev_idle.fetch_sub(1, Ordering::Relaxed);
        let n = match received {
            Ok(n) => n,
            Err(end) => {
                shared.dev_threads.fetch_sub(1, Ordering::AcqRel);
                shared.connection_ended(end);
                return;
            }
        };
        // This was the last idle thread: without another, the next request would wait for a thread.
        if was_idle == 1 && growing {
            grow_threads(shared);
        }
        serve_one(shared, device.as_fd(), &thread, bytes, n);
        if growing && shared.dev_idle.load(Ordering::Relaxed) >= shared.dev_keep {
            let keep = shared.dev_keep;
            let leave =
                shared.dev_threads.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n > keep).then_some(n - 1));
            if leave.is_ok() {
                return;
            }
        }
    }
}

fn serve_one<S: FileService>(
    shared: &Arc<SessionShared<S>>,
    device: BorrowedFd<'_>,
    thread: &ServingThread,
    bytes: &mut [u8],
    n: usize,
) {
    let (header, replied): (InHeader, Option<ReplyReceipt>) = match decode_message(&bytes[REQUEST_AT..REQUEST_AT + n]) {
        Ok((header, request, body)) => {
            thread.note_request(&request);
            if let FuseRequest::Interrupt { unique } = request {
                shared.note_interrupt(unique);
            }
            thread.begin_request(&header, RequestWaiter::of_request(&request), None);
            let direct = Some(DirectReply { device, unique: header.unique });
            let io = SlotIo { bytes, body: REQUEST_AT + body, payload_mut: HEAD_LEN, direct };
            let replied = shared.dispatcher.dispatch_request(&header, request, io);
            if thread.end_request().is_none() {
                shared.request_done_later(&header, request, replied, &bytes[HEAD_LEN..]);
                return;
            }
            (header, replied)
        }
        Err(DecodeError::BadArguments(header)) => {
            tracing::warn!("request {} of {n} bytes has malformed arguments", header.opcode);
            (header, Some(ReplyReceipt::error(Errno::EINVAL)))
        }
        Err(DecodeError::NoHeader) => {
            tracing::warn!("a message of {n} bytes on /dev/fuse is no request");
            return;
        }
    };
    let Some(replied) = replied.filter(|r| !r.sent) else { return };
    let direct = DirectReply { device, unique: header.unique };
    let data = &bytes[HEAD_LEN..HEAD_LEN + replied.len];
    let taken = match replied {
        ReplyReceipt { error: 0, len: 1.., .. } => send_reply(direct, 0, data),
        ReplyReceipt { error, .. } => send_reply(direct, error, &[]),
    };
    // A reply rejected by the kernel must not leave the caller waiting.
    if !taken {
        send_reply(direct, libc::EIO, &[]);
    }
}
