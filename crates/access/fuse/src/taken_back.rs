//! What a reply gives to the kernel, taken back from the reply to a request that was answered otherwise before: references of
//! inodes, open files, locks. A change of names, attributes or bytes stays. Does not know why the request was answered.

use crate::abi::{self, InHeader, read_plain};
use crate::change_request::ChangeRequest;
use crate::dispatch::RequestDispatcher;
use crate::dispatch_change::file_lock;
use crate::kernel::caller_of;
use crate::reply::{ReplyReceipt, plus_entries};
use crate::request::FuseRequest;
use spurline_fs::{FileService, HandleRef, LockRequest};
use spurline_volume::writes::{FileLock, LockFamily, LockKind};

impl<S: FileService> RequestDispatcher<S> {
    /// Takes back what `reply` to `request`, with the bytes in `payload`, would have given to the kernel.
    pub(crate) fn take_back(&self, header: &InHeader, request: FuseRequest, reply: &ReplyReceipt, payload: &[u8]) {
        if reply.error != 0 {
            return;
        }
        let payload = &payload[..reply.len.min(payload.len())];
        match request {
            FuseRequest::Lookup { .. } => self.forget_entry(payload),
            FuseRequest::Readdir { plus: true, .. } => {
                plus_entries(payload).for_each(|entry| self.forget_entry(entry));
            }
            FuseRequest::Open { .. } => self.close_opened(payload),
            FuseRequest::Opendir { .. } => {
                if let Some(opened) = read_plain::<abi::OpenOut>(payload) {
                    let _ = self.service.releasedir(opened.fh);
                }
            }
            FuseRequest::Change(change) => self.take_change_back(header, change, payload),
            _ => {}
        }
    }

    fn take_change_back(&self, header: &InHeader, change: ChangeRequest, payload: &[u8]) {
        match change {
            ChangeRequest::Link { .. }
            | ChangeRequest::Symlink { .. }
            | ChangeRequest::Mknod { .. }
            | ChangeRequest::Mkdir { .. } => self.forget_entry(payload),
            ChangeRequest::Create { .. } | ChangeRequest::Tmpfile { .. } => {
                self.close_opened(payload.get(size_of::<abi::EntryOut>()..).unwrap_or_default());
                self.forget_entry(payload);
            }
            ChangeRequest::SetLock { lock: args, .. } => {
                // Locks of fcntl(2) end with the file: by now the kernel may have given the number of their owner to another process.
                let Some(lock) = file_lock(&args).ok().filter(|lock| lock.family == LockFamily::Flock) else { return };
                let lock = FileLock { kind: LockKind::Unlock, ..lock };
                let request = LockRequest { lock, pid: args.pid, number: header.unique };
                let file = HandleRef { ino: header.nodeid, fh: args.fh };
                let _ = self.service.set_lock(file, &request, false, &caller_of(header), &self.kernel.side());
            }
            _ => {}
        }
    }

    fn forget_entry(&self, entry: &[u8]) {
        if let Some(entry) = read_plain::<abi::EntryOut>(entry).filter(|entry| entry.nodeid != 0) {
            self.service.forget(entry.nodeid, 1);
        }
    }

    fn close_opened(&self, opened: &[u8]) {
        if let Some(opened) = read_plain::<abi::OpenOut>(opened) {
            let _ = self.service.release(opened.fh);
        }
    }
}
