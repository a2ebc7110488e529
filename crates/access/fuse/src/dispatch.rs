//! Turns one request into one reply: calls the handler, counts, logs. It does not know how requests arrive or how
//! replies leave.

use crate::abi::{self, InHeader, fopen, read_plain};
use crate::dispatch_change::attr_reply;
use crate::errno::Errno;
use crate::failed_reads::FailedReads;
use crate::handler::{FuseHandler, HandleReply, RequestCaller};
use crate::reply::{DirPlusSink, DirSink, DirectReply, ReadReply, ReplyReceipt, XattrReply, entry_out, put_struct};
use crate::request::{BodySpan, FuseRequest};
use spurline_types::Stats;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest name passed to the handler, in bytes; a longer one fails with ENAMETOOLONG.
const NAME_MAX: usize = 255;

/// Records every request with a reply.
pub trait RequestRecorder: Send + Sync {
    /// One request: its name, inode, offset and length if any, 0 or an errno, and its duration.
    fn record(&self, op: &'static str, ino: u64, offset: u64, len: u64, errno: i32, took: Duration);
}

/// A slot's memory, divided for the dispatcher.
pub(crate) struct SlotIo<'a> {
    /// Body and payload; they may overlap.
    pub(crate) bytes: &'a mut [u8],
    /// Offset of the request's body in `bytes`.
    pub(crate) body: usize,
    /// Offset of the reply's payload in `bytes`.
    pub(crate) payload_mut: usize,
    /// Where read data may be written straight from the handler's memory.
    pub(crate) direct: Option<DirectReply<'a>>,
}

impl SlotIo<'_> {
    /// The request's body.
    pub(crate) fn body(&self) -> &[u8] {
        &self.bytes[self.body..]
    }
    pub(crate) fn checked_name(&self, name: BodySpan) -> Result<&[u8], Errno> {
        match name.slice_of(&self.bytes[self.body..]) {
            name if name.len() > NAME_MAX => Err(Errno::ENAMETOOLONG),
            name => Ok(name),
        }
    }
    pub(crate) fn payload(&mut self) -> &mut [u8] {
        &mut self.bytes[self.payload_mut..]
    }
}

pub(crate) struct RequestDispatcher<H> {
    pub(crate) handler: Arc<H>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) access_log: Option<Arc<dyn RequestRecorder>>,
    pub(crate) failed_reads: FailedReads,
}

impl<H: FuseHandler> RequestDispatcher<H> {
    /// The reply to `request`; `None` when it takes none.
    pub(crate) fn dispatch_request(
        &self,
        header: &InHeader,
        request: FuseRequest,
        io: SlotIo<'_>,
    ) -> Option<ReplyReceipt> {
        let start = Instant::now();
        // A panic in the handler must not end the slot's thread and, in the end, the mount.
        let replied =
            catch_unwind(AssertUnwindSafe(|| self.call_handler(header, request, io, start))).unwrap_or_else(|_| {
                tracing::error!("the file system panicked in {} of inode {}", request.op_name(), header.nodeid);
                match request {
                    FuseRequest::Forget { .. } | FuseRequest::BatchForget { .. } | FuseRequest::Interrupt { .. } => {
                        None
                    }
                    _ => Some(ReplyReceipt::error(Errno::EIO)),
                }
            });
        if let FuseRequest::Read { offset, len, cached: true, .. } = request
            && let Some(errno) = replied.as_ref().map(|reply| reply.error).filter(|errno| *errno != 0)
        {
            self.failed_reads.note_failure(header.nodeid, offset, len, Errno(errno), start);
        }
        self.record_stats(header, request, replied.as_ref(), start.elapsed());
        replied
    }

    fn call_handler(
        &self,
        header: &InHeader,
        request: FuseRequest,
        mut io: SlotIo<'_>,
        start: Instant,
    ) -> Option<ReplyReceipt> {
        let h = &*self.handler;
        let ino = header.nodeid;
        let caller = RequestCaller::of(header);
        let done = |result: Result<(), Errno>| match result {
            Ok(()) => ReplyReceipt::ok(0),
            Err(errno) => ReplyReceipt::error(errno),
        };
        Some(match request {
            FuseRequest::Read { fh, offset, len, cached } => {
                if cached && let Some(errno) = self.failed_reads.refuse_repetition(ino, offset, len, start) {
                    tracing::debug!(ino, offset, "the kernel's repetition of a read that has just failed is refused");
                    return Some(ReplyReceipt::error(errno));
                }
                let direct = io.direct;
                match ReadReply::new(io.payload(), len as usize, direct) {
                    Some(reply) => h.read(ino, fh, offset, len, reply),
                    None => {
                        tracing::error!("the kernel requests {len} bytes at a time, above the limit set at INIT");
                        ReplyReceipt::error(Errno::EIO)
                    }
                }
            }
            FuseRequest::Lookup { name } => match io.checked_name(name).and_then(|name| h.lookup(ino, name, &caller)) {
                Ok(entry) => put_struct(io.payload(), &entry_out(&entry)),
                Err(errno) => ReplyReceipt::error(errno),
            },
            FuseRequest::Getattr { fh } => match h.getattr(ino, fh, &caller) {
                Ok(answer) => attr_reply(&mut io, &answer),
                Err(errno) => ReplyReceipt::error(errno),
            },
            FuseRequest::Forget { nlookup } => {
                h.forget(ino, nlookup);
                return None;
            }
            FuseRequest::BatchForget { entries } => {
                for one in entries.slice_of(&io.bytes[io.body..]).chunks_exact(size_of::<abi::ForgetOne>()) {
                    if let Some(one) = read_plain::<abi::ForgetOne>(one) {
                        h.forget(one.nodeid, one.nlookup);
                    }
                }
                return None;
            }
            FuseRequest::Readlink => {
                // The kernel accepts at most one page less its NUL.
                match h.readlink(ino, &mut io.payload()[..4095], &caller) {
                    Ok(len) => ReplyReceipt::ok(len.min(4095)),
                    Err(errno) => ReplyReceipt::error(errno),
                }
            }
            FuseRequest::Open { flags } => match h.open(ino, flags, &caller) {
                Ok(opened) => put_struct(io.payload(), &open_out(opened, false)),
                Err(errno) => ReplyReceipt::error(errno),
            },
            FuseRequest::Opendir { flags } => match h.opendir(ino, flags, &caller) {
                Ok(opened) => put_struct(io.payload(), &open_out(opened, true)),
                Err(errno) => ReplyReceipt::error(errno),
            },
            FuseRequest::Release { fh } => {
                h.release(ino, fh);
                ReplyReceipt::ok(0)
            }
            FuseRequest::Releasedir { fh } => {
                h.releasedir(ino, fh);
                ReplyReceipt::ok(0)
            }
            FuseRequest::Readdir { fh, cookie, len, plus: false } => {
                let mut sink = DirSink::new(io.payload(), len as usize);
                match h.readdir(ino, fh, cookie, &mut sink, &caller) {
                    Ok(()) => sink.finish(),
                    Err(errno) => ReplyReceipt::error(errno),
                }
            }
            FuseRequest::Readdir { fh, cookie, len, plus: true } => {
                let mut sink = DirPlusSink::new(io.payload(), len as usize);
                match h.readdirplus(ino, fh, cookie, &mut sink, &caller) {
                    Ok(()) => sink.finish(),
                    Err(errno) => ReplyReceipt::error(errno),
                }
            }
            FuseRequest::Statfs => match h.statfs(ino) {
                Ok(s) => put_struct(
                    io.payload(),
                    &abi::StatfsOut {
                        blocks: s.blocks,
                        bfree: s.bfree,
                        bavail: s.bavail,
                        files: s.files,
                        ffree: s.ffree,
                        bsize: s.bsize,
                        namelen: s.namelen,
                        frsize: s.bsize,
                        ..Default::default()
                    },
                ),
                Err(errno) => ReplyReceipt::error(errno),
            },
            FuseRequest::Access { mask } => done(h.access(ino, mask, &caller)),
            FuseRequest::Getxattr { name, size } => {
                // The value overwrites the memory that may hold the name, so the name is copied.
                let mut copy = [0u8; NAME_MAX];
                let len = match io.checked_name(name) {
                    Ok(name) => {
                        copy[..name.len()].copy_from_slice(name);
                        name.len()
                    }
                    Err(errno) => return Some(ReplyReceipt::error(errno)),
                };
                h.getxattr(ino, &copy[..len], XattrReply::new(io.payload(), size as usize), &caller)
            }
            FuseRequest::Listxattr { size } => h.listxattr(ino, XattrReply::new(io.payload(), size as usize), &caller),
            FuseRequest::Lseek { fh, offset, whence } => match h.lseek(ino, fh, offset, whence) {
                Ok(offset) => put_struct(io.payload(), &abi::LseekOut { offset }),
                Err(errno) => ReplyReceipt::error(errno),
            },
            FuseRequest::Interrupt { unique } => {
                h.interrupt(unique);
                return None;
            }
            FuseRequest::Destroy => ReplyReceipt::ok(0),
            FuseRequest::Ioctl => ReplyReceipt::error(Errno::ENOTTY),
            FuseRequest::Change(change) => self.call_change(header, change, io),
            // INIT comes once, before the dispatcher; a second one fails.
            FuseRequest::Init { .. } => ReplyReceipt::error(Errno::EIO),
            FuseRequest::Unknown(abi::opcode::NOTIFY_REPLY) => return None,
            // Locks, poll, bmap and future requests: after ENOSYS the kernel stops sending them.
            FuseRequest::Unknown(_) => ReplyReceipt::error(Errno::ENOSYS),
        })
    }

    fn record_stats(&self, header: &InHeader, request: FuseRequest, replied: Option<&ReplyReceipt>, took: Duration) {
        let stats = &self.stats.fuse;
        let (error, len) = replied.map_or((0, 0), |r| (r.error, r.len as u64));
        stats.ops.add(1);
        stats.busy_us.add_us(took);
        // Frequent normal results are not errors: no such name, attribute or terminal.
        if !matches!(error, 0 | libc::ENOENT | libc::ENOSYS | libc::ENODATA | libc::ENOTTY) {
            stats.errors.add(1);
        }
        match request {
            FuseRequest::Read { .. } => {
                stats.read_ops.add(1);
                stats.read_us.add_us(took);
                stats.read_bytes.add(len);
            }
            FuseRequest::Lookup { .. } => stats.lookup_ops.add(1),
            // Open handles are counted by the handler.
            FuseRequest::Open { .. } if error == 0 => stats.open_ops.add(1),
            _ => {}
        }
        if let Some(log) = &self.access_log {
            let (offset, len) = match request {
                FuseRequest::Read { offset, .. } | FuseRequest::Lseek { offset, .. } => (offset, len),
                FuseRequest::Change(change) => change.byte_range(),
                FuseRequest::Readdir { cookie, .. } => (cookie, len),
                FuseRequest::Getxattr { .. } | FuseRequest::Listxattr { .. } | FuseRequest::Readlink => (0, len),
                _ => (0, 0),
            };
            log.record(request.op_name(), header.nodeid, offset, len, error, took);
        }
    }
}

pub(crate) fn open_out(opened: HandleReply, directory: bool) -> abi::OpenOut {
    let mut flags = 0;
    let mut set = |on: bool, flag: u32| {
        if on {
            flags |= flag;
        }
    };
    set(opened.direct_io, fopen::DIRECT_IO);
    // Only where close(2) can report an error, it needs a FLUSH.
    set(!directory && !opened.flush, fopen::NOFLUSH);
    set(opened.parallel_direct_writes, fopen::PARALLEL_DIRECT_WRITES);
    let mut backing_id = 0;
    match opened.backing {
        Some(id) if !directory => {
            set(true, fopen::PASSTHROUGH);
            backing_id = id.0;
        }
        _ => {
            set(opened.keep_cache, fopen::KEEP_CACHE);
            set(opened.nonseekable, fopen::NONSEEKABLE);
            set(directory && opened.cache_dir, fopen::CACHE_DIR);
        }
    }
    abi::OpenOut { fh: opened.fh, open_flags: flags, backing_id }
}
