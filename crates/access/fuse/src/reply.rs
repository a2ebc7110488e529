//! Replies with data: reads, listings, extended attributes. They write into the slot's payload, or straight from the
//! handler's memory to /dev/fuse. They do not interpret the bytes.

use crate::abi::{self, OutHeader, bytes_of};
use crate::errno::Errno;
use crate::handler::LookupReply;
use spurline_types::unix_time;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The most pieces that [`ReadReply::reply_vectored`] sends without a copy. A 1 MiB read of 4 KiB pieces fits, and with the
/// header it stays below the kernel's limit of 1024.
const MAX_PIECES: usize = 512;

/// Proof that a request has a reply.
#[derive(Debug)]
#[must_use = "return this as the reply to the request"]
pub struct ReplyReceipt {
    pub(crate) error: i32,
    /// Length of the reply, in the payload unless `sent`.
    pub(crate) len: usize,
    pub(crate) sent: bool,
}

impl ReplyReceipt {
    pub(crate) fn ok(len: usize) -> Self {
        ReplyReceipt { error: 0, len, sent: false }
    }
    pub(crate) fn error(errno: Errno) -> Self {
        ReplyReceipt { error: errno.wire_code(), len: 0, sent: false }
    }
}

/// /dev/fuse and the request whose reply may be written to it at once.
#[derive(Clone, Copy)]
pub(crate) struct DirectReply<'a> {
    pub(crate) device: BorrowedFd<'a>,
    pub(crate) unique: u64,
}

/// The reply to a read: fill the slot's own buffer, or pass memory that already has the bytes.
///
/// Cost: [`ReadReply::buffer`] and [`ReadReply::reply_filled`] copy nothing in this process with either transport.
/// [`ReadReply::reply_data`] and [`ReadReply::reply_vectored`] copy nothing on /dev/fuse, and once over io_uring.
pub struct ReadReply<'a> {
    payload: &'a mut [u8],
    len: usize,
    direct: Option<DirectReply<'a>>,
}

impl<'a> ReadReply<'a> {
    /// `None` when the slot has no room for `len` bytes: the kernel would take a shorter reply for the end of the
    /// file.
    pub(crate) fn new(payload: &'a mut [u8], len: usize, direct: Option<DirectReply<'a>>) -> Option<Self> {
        (len <= payload.len()).then_some(ReadReply { payload, len, direct })
    }

    /// The slot's payload, exactly as long as the request and page-aligned.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.payload[..self.len]
    }

    /// Replies with the first `n` bytes of [`ReadReply::buffer`].
    pub fn reply_filled(self, n: usize) -> ReplyReceipt {
        ReplyReceipt::ok(n.min(self.len))
    }

    /// Replies with `data`, cut to the length of the request.
    pub fn reply_data(self, data: &[u8]) -> ReplyReceipt {
        self.reply_vectored(&[IoSlice::new(data)])
    }

    /// Replies with the bytes of `pieces` in order.
    pub fn reply_vectored(self, pieces: &[IoSlice<'_>]) -> ReplyReceipt {
        if let Some(direct) = self.direct {
            let total: usize = pieces.iter().map(|p| p.len()).sum();
            if total <= self.len && pieces.len() <= MAX_PIECES && send_reply(direct, 0, pieces, total) {
                return ReplyReceipt { error: 0, len: total, sent: true };
            }
        }
        let mut filled = 0;
        for piece in pieces {
            let n = piece.len().min(self.len - filled);
            self.payload[filled..filled + n].copy_from_slice(&piece[..n]);
            filled += n;
        }
        ReplyReceipt::ok(filled)
    }

    /// Fails the read.
    pub fn reply_error(self, errno: Errno) -> ReplyReceipt {
        ReplyReceipt::error(errno)
    }
}

/// Writes a reply to /dev/fuse in one call. False: the device rejected it, and the request still needs a reply. A
/// withdrawn request (ENOENT) or an ended session counts as success.
pub(crate) fn send_reply(direct: DirectReply<'_>, error: i32, pieces: &[IoSlice<'_>], total: usize) -> bool {
    let header = OutHeader { len: (size_of::<OutHeader>() + total) as u32, error: -error, unique: direct.unique };
    let head = IoSlice::new(bytes_of(&header));
    let written = match pieces {
        [] => write_vectored(direct.device, &[head]),
        [one] => write_vectored(direct.device, &[head, *one]),
        more => {
            let mut all = [IoSlice::new(&[]); MAX_PIECES + 1];
            all[0] = head;
            all[1..=more.len()].copy_from_slice(more);
            write_vectored(direct.device, &all[..=more.len()])
        }
    };
    match written {
        Ok(()) => true,
        Err(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED) => true,
        Err(errno) => {
            tracing::warn!("the kernel refused a reply of {total} bytes: {}", Errno(errno));
            false
        }
    }
}

pub(crate) fn write_vectored(device: BorrowedFd<'_>, pieces: &[IoSlice<'_>]) -> Result<(), i32> {
    loop {
        // SAFETY: IoSlice has the layout of iovec, and every piece is borrowed for the whole call.
        let n = unsafe { libc::writev(device.as_raw_fd(), pieces.as_ptr().cast(), pieces.len() as libc::c_int) };
        if n >= 0 {
            return Ok(());
        }
        match std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
            libc::EINTR => {}
            errno => return Err(errno),
        }
    }
}

/// The reply to getxattr and listxattr.
pub struct XattrReply<'a> {
    payload: &'a mut [u8],
    size: usize,
}

impl<'a> XattrReply<'a> {
    pub(crate) fn new(payload: &'a mut [u8], size: usize) -> Self {
        XattrReply { payload, size }
    }

    /// Replies with `value`, or with its length if the caller queries that; ERANGE when it does not fit into the
    /// caller's buffer.
    pub fn reply_value(self, value: &[u8]) -> ReplyReceipt {
        if self.size == 0 {
            let out = abi::GetxattrOut { size: u32::try_from(value.len()).unwrap_or(u32::MAX), padding: 0 };
            return put_struct(self.payload, &out);
        }
        if value.len() > self.size.min(self.payload.len()) {
            return ReplyReceipt::error(Errno::ERANGE);
        }
        self.payload[..value.len()].copy_from_slice(value);
        ReplyReceipt::ok(value.len())
    }

    /// Fails the request.
    pub fn reply_error(self, errno: Errno) -> ReplyReceipt {
        ReplyReceipt::error(errno)
    }
}

/// Writes a fixed struct into the payload as the whole reply.
pub(crate) fn put_struct<T: abi::PlainBytes>(payload: &mut [u8], value: &T) -> ReplyReceipt {
    let bytes = bytes_of(value);
    payload[..bytes.len()].copy_from_slice(bytes);
    ReplyReceipt::ok(bytes.len())
}

/// Collects the entries of one readdir.
pub struct DirSink<'a> {
    payload: &'a mut [u8],
    used: usize,
}

impl<'a> DirSink<'a> {
    pub(crate) fn new(payload: &'a mut [u8], len: usize) -> Self {
        let len = len.min(payload.len());
        DirSink { payload: &mut payload[..len], used: 0 }
    }

    /// Adds an entry. `next` is the cookie that continues after it; `mode` gives its file type. False: it did not
    /// fit, and no other will; stop.
    pub fn add_entry(&mut self, ino: u64, next: u64, mode: u32, name: &[u8]) -> bool {
        append_dirent(self.payload, &mut self.used, &[], ino, next, mode, name)
    }

    /// Bytes that are left.
    pub fn room(&self) -> usize {
        self.payload.len() - self.used
    }

    pub(crate) fn finish(self) -> ReplyReceipt {
        ReplyReceipt::ok(self.used)
    }
}

/// Collects the entries of one readdirplus.
pub struct DirPlusSink<'a>(DirSink<'a>);

impl<'a> DirPlusSink<'a> {
    pub(crate) fn new(payload: &'a mut [u8], len: usize) -> Self {
        DirPlusSink(DirSink::new(payload, len))
    }

    /// Adds an entry, as [`DirSink::add_entry`]; true counts as a lookup of `entry.ino`. For `.` and `..`, and without
    /// attributes, use [`DirPlusSink::add_plain`].
    pub fn add_entry(&mut self, entry: &LookupReply, next: u64, name: &[u8]) -> bool {
        let out = entry_out(entry);
        let (ino, mode) = (entry.attr.ino, entry.attr.mode);
        append_dirent(self.0.payload, &mut self.0.used, bytes_of(&out), ino, next, mode, name)
    }

    /// Adds an entry without attributes: the kernel looks it up when it needs them.
    pub fn add_plain(&mut self, ino: u64, next: u64, mode: u32, name: &[u8]) -> bool {
        let none = abi::EntryOut::default();
        append_dirent(self.0.payload, &mut self.0.used, bytes_of(&none), ino, next, mode, name)
    }

    /// Bytes that are left.
    pub fn room(&self) -> usize {
        self.0.room()
    }

    pub(crate) fn finish(self) -> ReplyReceipt {
        self.0.finish()
    }
}

fn append_dirent(
    payload: &mut [u8],
    used: &mut usize,
    prefix: &[u8],
    ino: u64,
    next: u64,
    mode: u32,
    name: &[u8],
) -> bool {
    let dirent = abi::Dirent { ino, off: next, namelen: name.len() as u32, kind: (mode & libc::S_IFMT) >> 12 };
    let parts = [prefix, bytes_of(&dirent), name];
    let len = parts.iter().map(|p| p.len()).sum::<usize>();
    let padded = len.next_multiple_of(8);
    let Some(room) = payload.get_mut(*used..*used + padded) else { return false };
    let mut at = 0;
    for part in parts {
        room[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    room[len..].fill(0);
    *used += padded;
    true
}

pub(crate) fn entry_out(entry: &LookupReply) -> abi::EntryOut {
    abi::EntryOut {
        nodeid: entry.ino,
        generation: entry.generation,
        entry_valid: entry.entry_ttl.as_secs(),
        attr_valid: entry.attr_ttl.as_secs(),
        entry_valid_nsec: entry.entry_ttl.subsec_nanos(),
        attr_valid_nsec: entry.attr_ttl.subsec_nanos(),
        attr: attr_out(&entry.attr),
    }
}

pub(crate) fn attr_out(attr: &crate::handler::StatAttr) -> abi::Attr {
    let [(atime, atimensec), (mtime, mtimensec), (ctime, ctimensec)] =
        [attr.atime, attr.mtime, attr.ctime].map(unix_time);
    // The kernel treats the seconds as a signed number.
    let [atime, mtime, ctime] = [atime, mtime, ctime].map(|seconds| seconds as u64);
    abi::Attr {
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime,
        mtime,
        ctime,
        atimensec,
        mtimensec,
        ctimensec,
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: crate::dispatch_change::encode_device(attr.rdev),
        blksize: attr.blksize,
        flags: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::StatAttr;

    #[test]
    fn directory_entries_are_padded_and_stop_when_full() {
        let mut payload = [0xffu8; 80];
        let mut sink = DirSink::new(&mut payload, 72);
        assert!(sink.add_entry(5, 1, libc::S_IFREG, b"abc"));
        assert!(sink.add_entry(6, 2, libc::S_IFDIR, b"12345678"));
        assert!(!sink.add_entry(7, 3, libc::S_IFREG, b"x"));
        assert_eq!(sink.finish().len, 64);
        assert_eq!(abi::read_plain::<abi::Dirent>(&payload), Some(abi::Dirent { ino: 5, off: 1, namelen: 3, kind: 8 }));
        assert_eq!(&payload[24..32], b"abc\0\0\0\0\0");
        let entry = LookupReply {
            ino: 9,
            attr: StatAttr::new(9, libc::S_IFREG, 1),
            ..LookupReply::negative(Default::default())
        };
        let mut sink = DirPlusSink::new(&mut payload, 72);
        assert!(!sink.add_entry(&entry, 1, b"n"));
    }

    #[test]
    fn xattr_sizes() {
        let mut payload = [0u8; 64];
        assert_eq!(XattrReply::new(&mut payload, 0).reply_value(b"hello").len, 8);
        assert_eq!(payload[0], 5);
        assert_eq!(XattrReply::new(&mut payload, 4).reply_value(b"hello").error, libc::ERANGE);
        assert_eq!(XattrReply::new(&mut payload, 5).reply_value(b"hello").len, 5);
    }

    #[test]
    fn read_replies_never_exceed_the_request() {
        let mut payload = [0u8; 8];
        assert_eq!(ReadReply::new(&mut payload, 4, None).unwrap().reply_data(b"123456").len, 4);
        assert_eq!(ReadReply::new(&mut payload, 8, None).unwrap().reply_filled(1000).len, 8);
        let pieces = [IoSlice::new(b"ab"), IoSlice::new(b"cd")];
        assert_eq!(ReadReply::new(&mut payload, 8, None).unwrap().reply_vectored(&pieces).len, 4);
        assert_eq!(&payload[..4], b"abcd");
        // The kernel would take fewer bytes for the end of the file.
        assert!(ReadReply::new(&mut payload, 9, None).is_none());
    }
}
