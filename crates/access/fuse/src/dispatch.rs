//! Turns a request into a reply: calls the file system, converts types, counts, logs. All rules of the file system, errnos
//! included, are in `spurline-fs`, where a test needs no mount. Does not know how requests arrive or how replies leave.

use crate::abi::{self, InHeader, fopen, read_plain};
use crate::dispatch_change::attr_reply;
use crate::errno::Errno;
use crate::failed_reads::FailedReads;
use crate::kernel::{SessionKernel, caller_of};
use crate::reply::{
    DirSink, DirectReply, PLAIN_ENTRY_LEN, PLUS_ENTRY_LEN, ReplyReceipt, absent_out, data_reply, entry_out, put_struct,
    xattr_reply,
};
use crate::request::{BodySpan, FuseRequest};
use spurline_fs::{DirRead, FileService, FsError, FsResult, HandleRef, LookupOutcome, OpenedFile};
use spurline_types::Stats;
use spurline_volume::ReadData;
use spurline_volume::writes::SourceSpace;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest target of a symbolic link that the kernel accepts: a page less the NUL.
const LINK_TARGET_MAX: usize = 4095;

/// Records every request with a reply.
pub trait RequestRecorder: Send + Sync {
    /// A request: name, inode, offset and length if any, 0 or an errno, and the duration.
    fn record(&self, op: &'static str, ino: u64, offset: u64, len: u64, errno: i32, took: Duration);
}

/// A slot's memory, divided for the dispatcher.
pub(crate) struct SlotIo<'a> {
    /// Body and payload, which may overlap.
    pub(crate) bytes: &'a mut [u8],
    /// Offset of the request's body in `bytes`.
    pub(crate) body: usize,
    /// Offset of the reply's payload in `bytes`.
    pub(crate) payload_mut: usize,
    /// Where read data may be written straight from the memory of the cache.
    pub(crate) direct: Option<DirectReply<'a>>,
}

impl SlotIo<'_> {
    /// The request's body.
    pub(crate) fn body(&self) -> &[u8] {
        &self.bytes[self.body..]
    }
    pub(crate) fn checked_name(&self, name: BodySpan) -> FsResult<&[u8]> {
        let name = name.slice_of(self.body());
        if name.len() > spurline_fs::NAME_MAX { Err(FsError::NameTooLong) } else { Ok(name) }
    }
    pub(crate) fn payload(&mut self) -> &mut [u8] {
        &mut self.bytes[self.payload_mut..]
    }
}

/// A session's file system, and the kernel of the mount.
pub(crate) struct RequestDispatcher<S> {
    pub(crate) service: Arc<S>,
    pub(crate) kernel: SessionKernel,
    pub(crate) stats: Arc<Stats>,
    pub(crate) access_log: Option<Arc<dyn RequestRecorder>>,
    pub(crate) failed_reads: FailedReads,
}

impl<S: FileService> RequestDispatcher<S> {
    /// The reply to `request`; `None` for a request without a reply.
    pub(crate) fn dispatch_request(
        &self,
        header: &InHeader,
        request: FuseRequest,
        mut io: SlotIo<'_>,
    ) -> Option<ReplyReceipt> {
        let start = Instant::now();
        // A panic in the file system must not end the slot's thread and, in the end, the mount.
        let replied = catch_unwind(AssertUnwindSafe(|| self.call_service(header, request, &mut io, start)))
            .unwrap_or_else(|_| {
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

    fn call_service(
        &self,
        header: &InHeader,
        request: FuseRequest,
        io: &mut SlotIo<'_>,
        start: Instant,
    ) -> Option<ReplyReceipt> {
        let service = &*self.service;
        let ino = header.nodeid;
        match request {
            FuseRequest::Forget { nlookup } => service.forget(ino, nlookup),
            FuseRequest::BatchForget { entries } => {
                for one in entries.slice_of(io.body()).chunks_exact(size_of::<abi::ForgetOne>()) {
                    if let Some(one) = read_plain::<abi::ForgetOne>(one) {
                        service.forget(one.nodeid, one.nlookup);
                    }
                }
            }
            FuseRequest::Interrupt { unique } => service.interrupt(unique),
            FuseRequest::Unknown(abi::opcode::NOTIFY_REPLY) => {}
            request => {
                let answer = match request {
                    FuseRequest::Change(change) => self.change_reply(header, change, io),
                    FuseRequest::Read { .. } => self.read_reply(ino, request, io, start),
                    request => self.query_reply(header, request, io),
                };
                return Some(answer.unwrap_or_else(|error| {
                    service.log_failure(request.op_name(), ino, &error);
                    ReplyReceipt::error(Errno(error.errno()))
                }));
            }
        }
        None
    }

    fn read_reply(
        &self,
        ino: u64,
        request: FuseRequest,
        io: &mut SlotIo<'_>,
        start: Instant,
    ) -> FsResult<ReplyReceipt> {
        let FuseRequest::Read { fh, offset, len, cached } = request else { return Err(FsError::NotServed) };
        if cached && let Some(errno) = self.failed_reads.refuse_repetition(ino, offset, len, start) {
            tracing::debug!(ino, offset, "the kernel's repetition of a read that has just failed is refused");
            return Ok(ReplyReceipt::error(errno));
        }
        let direct = io.direct;
        // The kernel would take a shorter reply for the end of the file.
        let Some(room) = io.payload().get_mut(..len as usize) else {
            tracing::error!("the kernel requests {len} bytes at a time, above the limit set at INIT");
            return Ok(ReplyReceipt::error(Errno::EIO));
        };
        Ok(match self.service.read(HandleRef { ino, fh }, offset, room)? {
            ReadData::Copied(n) => ReplyReceipt::ok(n.min(room.len())),
            ReadData::Shared(slice) => data_reply(room, direct, &slice),
        })
    }

    /// The reply to a request that neither reads a file nor changes anything.
    fn query_reply(&self, header: &InHeader, request: FuseRequest, io: &mut SlotIo<'_>) -> FsResult<ReplyReceipt> {
        let service = &*self.service;
        let ino = header.nodeid;
        let caller = caller_of(header);
        Ok(match request {
            FuseRequest::Lookup { name } => {
                let out = match service.lookup(ino, io.checked_name(name)?, &caller)? {
                    LookupOutcome::Found(entry) => entry_out(&entry),
                    LookupOutcome::Absent { ttl } => absent_out(ttl),
                };
                put_struct(io.payload(), &out)
            }
            FuseRequest::Getattr { fh } => {
                let (attr, ttl) = service.getattr(ino, fh, &caller)?;
                attr_reply(io, &attr, ttl)
            }
            FuseRequest::Readlink => {
                let target = service.readlink(ino, &caller)?;
                if target.len() > LINK_TARGET_MAX {
                    return Err(FsError::NameTooLong);
                }
                io.payload()[..target.len()].copy_from_slice(&target);
                ReplyReceipt::ok(target.len())
            }
            FuseRequest::Open { flags } => {
                let opened = service.open(ino, flags, &caller, &self.kernel.side())?;
                put_struct(io.payload(), &open_out(&opened))
            }
            FuseRequest::Opendir { .. } => {
                let fh = service.opendir(ino, &caller)?;
                put_struct(io.payload(), &abi::OpenOut { fh, open_flags: 0, backing_id: 0 })
            }
            FuseRequest::Release { fh } => {
                log_unopened(ino, fh, service.release(fh));
                ReplyReceipt::ok(0)
            }
            FuseRequest::Releasedir { fh } => {
                log_unopened(ino, fh, service.releasedir(fh));
                ReplyReceipt::ok(0)
            }
            FuseRequest::Readdir { fh, cookie, len, plus } => {
                let mut sink = DirSink::new(io.payload(), len as usize, plus);
                let entry_len = if plus { PLUS_ENTRY_LEN } else { PLAIN_ENTRY_LEN };
                let directory = HandleRef { ino, fh };
                let read = DirRead { directory, from: cookie, names_max: sink.room() / entry_len, plus };
                service.readdir(&read, &caller, &mut |listed| sink.add_entry(listed))?;
                sink.finish()
            }
            FuseRequest::Statfs => put_struct(io.payload(), &statfs_out(&service.statfs()?)),
            FuseRequest::Access { mask } => {
                service.access(ino, mask, &caller)?;
                ReplyReceipt::ok(0)
            }
            FuseRequest::Getxattr { name, size } => {
                let value = service.getxattr(ino, io.checked_name(name)?, &caller)?;
                xattr_reply(io.payload(), size as usize, &value)
            }
            FuseRequest::Listxattr { size } => {
                let names = service.listxattr(ino, &caller)?;
                xattr_reply(io.payload(), size as usize, &names)
            }
            FuseRequest::Lseek { fh, offset, whence } => {
                let offset = service.lseek(HandleRef { ino, fh }, offset, whence)?;
                put_struct(io.payload(), &abi::LseekOut { offset })
            }
            FuseRequest::Destroy => ReplyReceipt::ok(0),
            FuseRequest::Ioctl => ReplyReceipt::error(Errno::ENOTTY),
            // INIT comes once, before the dispatcher; a second INIT fails.
            FuseRequest::Init { .. } => ReplyReceipt::error(Errno::EIO),
            // Poll, bmap and future requests: after ENOSYS the kernel sends no more.
            _ => ReplyReceipt::error(Errno::ENOSYS),
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
            // Open handles are counted by the file system.
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

/// A handle that is not open can't be closed; no program learns of that.
fn log_unopened(ino: u64, fh: u64, released: FsResult<()>) {
    if let Err(error) = released {
        tracing::warn!(ino, fh, "release of a handle that is not open: {error}");
    }
}

fn statfs_out(space: &SourceSpace) -> abi::StatfsOut {
    let unit = space.block_size as u32;
    abi::StatfsOut {
        blocks: space.blocks,
        bfree: space.blocks_free,
        bavail: space.blocks_available,
        files: space.files,
        ffree: space.files_free,
        bsize: unit,
        namelen: space.name_max,
        frsize: unit,
        ..Default::default()
    }
}

/// The reply to an open of a file.
pub(crate) fn open_out(opened: &OpenedFile) -> abi::OpenOut {
    let mut open_flags = 0;
    if opened.direct_io {
        open_flags |= fopen::DIRECT_IO;
    }
    // A FLUSH is needed only where close(2) can report an error.
    if !opened.flush {
        open_flags |= fopen::NOFLUSH;
    }
    if opened.parallel_direct_writes {
        open_flags |= fopen::PARALLEL_DIRECT_WRITES;
    }
    let backing_id = match &opened.backing {
        Some(backing) => {
            open_flags |= fopen::PASSTHROUGH;
            backing.id()
        }
        None => {
            if opened.keep_cache {
                open_flags |= fopen::KEEP_CACHE;
            }
            0
        }
    };
    abi::OpenOut { fh: opened.fh, open_flags, backing_id }
}
