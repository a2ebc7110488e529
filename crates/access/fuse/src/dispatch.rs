//! Turns one request into one reply: calls the handler, counts, logs. It does not know how requests arrive or how
//! replies leave.

use crate::abi::{self, InHeader, fopen, take};
use crate::errno::Errno;
use crate::handler::{Caller, Handler, Opened};
use crate::reply::{DirPlusSink, DirSink, Direct, ReadReply, Replied, XattrReply, attr_out, entry_out, put};
use crate::request::{Request, Span};
use spurline_types::Stats;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest name passed to the handler, in bytes; a longer one fails with ENAMETOOLONG.
const NAME_MAX: usize = 255;

/// Records every request with a reply.
pub trait AccessLog: Send + Sync {
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
    pub(crate) payload: usize,
    /// Where read data may be written straight from the handler's memory.
    pub(crate) direct: Option<Direct<'a>>,
}

impl SlotIo<'_> {
    fn name(&self, name: Span) -> Result<&[u8], Errno> {
        match name.of(&self.bytes[self.body..]) {
            name if name.len() > NAME_MAX => Err(Errno::ENAMETOOLONG),
            name => Ok(name),
        }
    }
    fn payload(&mut self) -> &mut [u8] {
        &mut self.bytes[self.payload..]
    }
}

pub(crate) struct Dispatcher<H> {
    pub(crate) handler: Arc<H>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) access_log: Option<Arc<dyn AccessLog>>,
}

impl<H: Handler> Dispatcher<H> {
    /// The reply to `request`; `None` when it takes none.
    pub(crate) fn dispatch(&self, header: &InHeader, request: Request, io: SlotIo<'_>) -> Option<Replied> {
        let start = Instant::now();
        // A panic in the handler must not end the slot's thread and, in the end, the mount.
        let replied = catch_unwind(AssertUnwindSafe(|| self.call(header, request, io))).unwrap_or_else(|_| {
            tracing::error!("the file system panicked in {} of inode {}", request.name(), header.nodeid);
            match request {
                Request::Forget { .. } | Request::BatchForget { .. } | Request::Interrupt { .. } => None,
                _ => Some(Replied::error(Errno::EIO)),
            }
        });
        self.account(header, request, replied.as_ref(), start.elapsed());
        replied
    }

    fn call(&self, header: &InHeader, request: Request, mut io: SlotIo<'_>) -> Option<Replied> {
        let h = &*self.handler;
        let ino = header.nodeid;
        let caller = || Caller { unique: header.unique, uid: header.uid, gid: header.gid, pid: header.pid };
        let done = |result: Result<(), Errno>| match result {
            Ok(()) => Replied::ok(0),
            Err(errno) => Replied::error(errno),
        };
        Some(match request {
            Request::Read { fh, offset, len } => {
                let direct = io.direct;
                match ReadReply::new(io.payload(), len as usize, direct) {
                    Some(reply) => h.read(ino, fh, offset, len, reply),
                    None => {
                        tracing::error!("the kernel requests {len} bytes at a time, above the limit set at INIT");
                        Replied::error(Errno::EIO)
                    }
                }
            }
            Request::Lookup { name } => match io.name(name).and_then(|name| h.lookup(ino, name)) {
                Ok(entry) => put(io.payload(), &entry_out(&entry)),
                Err(errno) => Replied::error(errno),
            },
            Request::Getattr { fh } => match h.getattr(ino, fh) {
                Ok((attr, ttl)) => {
                    let (attr_valid, attr_valid_nsec) = (ttl.as_secs(), ttl.subsec_nanos());
                    put(io.payload(), &abi::AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr: attr_out(&attr) })
                }
                Err(errno) => Replied::error(errno),
            },
            Request::Forget { nlookup } => {
                h.forget(ino, nlookup);
                return None;
            }
            Request::BatchForget { entries } => {
                for one in entries.of(&io.bytes[io.body..]).chunks_exact(size_of::<abi::ForgetOne>()) {
                    if let Some(one) = take::<abi::ForgetOne>(one) {
                        h.forget(one.nodeid, one.nlookup);
                    }
                }
                return None;
            }
            Request::Readlink => {
                // The kernel accepts at most one page less its NUL.
                match h.readlink(ino, &mut io.payload()[..4095]) {
                    Ok(len) => Replied::ok(len.min(4095)),
                    Err(errno) => Replied::error(errno),
                }
            }
            Request::Open { flags } => match h.open(ino, flags) {
                Ok(opened) => put(io.payload(), &open_out(opened, false)),
                Err(errno) => Replied::error(errno),
            },
            Request::Opendir { flags } => match h.opendir(ino, flags) {
                Ok(opened) => put(io.payload(), &open_out(opened, true)),
                Err(errno) => Replied::error(errno),
            },
            Request::Release { fh } => {
                h.release(ino, fh);
                Replied::ok(0)
            }
            Request::Releasedir { fh } => {
                h.releasedir(ino, fh);
                Replied::ok(0)
            }
            Request::Readdir { fh, cookie, len, plus: false } => {
                let mut sink = DirSink::new(io.payload(), len as usize);
                match h.readdir(ino, fh, cookie, &mut sink) {
                    Ok(()) => sink.finish(),
                    Err(errno) => Replied::error(errno),
                }
            }
            Request::Readdir { fh, cookie, len, plus: true } => {
                let mut sink = DirPlusSink::new(io.payload(), len as usize);
                match h.readdirplus(ino, fh, cookie, &mut sink) {
                    Ok(()) => sink.finish(),
                    Err(errno) => Replied::error(errno),
                }
            }
            Request::Statfs => match h.statfs(ino) {
                Ok(s) => put(
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
                Err(errno) => Replied::error(errno),
            },
            Request::Access { mask } => done(h.access(ino, mask, &caller())),
            Request::Getxattr { name, size } => {
                // The value overwrites the memory that may hold the name, so the name is copied.
                let mut copy = [0u8; NAME_MAX];
                let len = match io.name(name) {
                    Ok(name) => {
                        copy[..name.len()].copy_from_slice(name);
                        name.len()
                    }
                    Err(errno) => return Some(Replied::error(errno)),
                };
                h.getxattr(ino, &copy[..len], XattrReply::new(io.payload(), size as usize))
            }
            Request::Listxattr { size } => h.listxattr(ino, XattrReply::new(io.payload(), size as usize)),
            Request::Lseek { fh, offset, whence } => match h.lseek(ino, fh, offset, whence) {
                Ok(offset) => put(io.payload(), &abi::LseekOut { offset }),
                Err(errno) => Replied::error(errno),
            },
            Request::Interrupt { unique } => {
                h.interrupt(unique);
                return None;
            }
            Request::Destroy => Replied::ok(0),
            Request::Ioctl => Replied::error(Errno::ENOTTY),
            Request::Modify(op) => Replied::error(h.modify(op, ino, &caller())),
            // INIT comes once, before the dispatcher; a second one fails.
            Request::Init { .. } => Replied::error(Errno::EIO),
            Request::Unknown(abi::opcode::NOTIFY_REPLY) => return None,
            // FLUSH, FSYNC, locks, poll, bmap and future requests: after ENOSYS the kernel stops sending them.
            Request::Unknown(_) => Replied::error(Errno::ENOSYS),
        })
    }

    fn account(&self, header: &InHeader, request: Request, replied: Option<&Replied>, took: Duration) {
        let stats = &self.stats.fuse;
        let (error, len) = replied.map_or((0, 0), |r| (r.error, r.len as u64));
        stats.ops.add(1);
        stats.busy_us.add_us(took);
        // Frequent normal results are not errors: no such name, attribute or terminal.
        if !matches!(error, 0 | libc::ENOENT | libc::ENOSYS | libc::ENODATA | libc::ENOTTY) {
            stats.errors.add(1);
        }
        match request {
            Request::Read { .. } => {
                stats.read_ops.add(1);
                stats.read_us.add_us(took);
                stats.read_bytes.add(len);
            }
            Request::Lookup { .. } => stats.lookup_ops.add(1),
            // Open handles are counted by the handler.
            Request::Open { .. } if error == 0 => stats.open_ops.add(1),
            _ => {}
        }
        if let Some(log) = &self.access_log {
            let (offset, len) = match request {
                Request::Read { offset, .. } | Request::Lseek { offset, .. } => (offset, len),
                Request::Readdir { cookie, .. } => (cookie, len),
                Request::Getxattr { .. } | Request::Listxattr { .. } | Request::Readlink => (0, len),
                _ => (0, 0),
            };
            log.record(request.name(), header.nodeid, offset, len, error, took);
        }
    }
}

fn open_out(opened: Opened, directory: bool) -> abi::OpenOut {
    let mut flags = 0;
    let mut set = |on: bool, flag: u32| {
        if on {
            flags |= flag;
        }
    };
    set(opened.direct_io, fopen::DIRECT_IO);
    // The file system is read-only, so close(2) needs no FLUSH.
    set(!directory, fopen::NOFLUSH);
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
