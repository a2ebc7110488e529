//! Replies with data: reads, listings, extended attributes, and the layouts of attributes. Replies are written into the slot's
//! payload, or straight from the cache's memory to /dev/fuse. The bytes are not interpreted.

use crate::abi::{self, OutHeader, bytes_of};
use crate::errno::Errno;
use spurline_fs::{FileEntry, ListedEntry, StatAttr};
use std::io::IoSlice;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Bytes of a listing's entry without the name, padded: a `fuse_dirent`.
pub(crate) const PLAIN_ENTRY_LEN: usize = 32;
/// The same with attributes: a `fuse_entry_out` before the `fuse_dirent`.
pub(crate) const PLUS_ENTRY_LEN: usize = 160;

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

/// /dev/fuse, and the request whose reply may be written there at once.
#[derive(Clone, Copy)]
pub(crate) struct DirectReply<'a> {
    pub(crate) device: BorrowedFd<'a>,
    pub(crate) unique: u64,
}

/// The reply to a read with bytes that lie in other memory than the slot's, cut to the length of `room`, which is the part of
/// the slot's payload that the kernel requests.
///
/// Cost: nothing is copied in this process on /dev/fuse, and everything once over io_uring.
pub(crate) fn data_reply(room: &mut [u8], direct: Option<DirectReply<'_>>, data: &[u8]) -> ReplyReceipt {
    if let Some(direct) = direct
        && data.len() <= room.len()
        && send_reply(direct, 0, data)
    {
        return ReplyReceipt { error: 0, len: data.len(), sent: true };
    }
    let len = data.len().min(room.len());
    room[..len].copy_from_slice(&data[..len]);
    ReplyReceipt::ok(len)
}

/// Writes a reply to /dev/fuse in a single call. False: the device rejected it, and the request still needs a reply. A withdrawn
/// request (ENOENT) or an ended session counts as success.
pub(crate) fn send_reply(direct: DirectReply<'_>, error: i32, data: &[u8]) -> bool {
    let len = (size_of::<OutHeader>() + data.len()) as u32;
    let header = OutHeader { len, error: -error, unique: direct.unique };
    match write_vectored(direct.device, &[IoSlice::new(bytes_of(&header)), IoSlice::new(data)]) {
        Ok(()) => true,
        Err(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED) => true,
        Err(errno) => {
            tracing::warn!("the kernel refused a reply of {} bytes: {}", data.len(), Errno(errno));
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

/// The reply to getxattr and listxattr: `value`, or the length if the caller queries that with a `size` of 0; ERANGE when the
/// value does not fit into the caller's buffer.
pub(crate) fn xattr_reply(payload: &mut [u8], size: usize, value: &[u8]) -> ReplyReceipt {
    if size == 0 {
        let out = abi::GetxattrOut { size: u32::try_from(value.len()).unwrap_or(u32::MAX), padding: 0 };
        return put_struct(payload, &out);
    }
    if value.len() > size.min(payload.len()) {
        return ReplyReceipt::error(Errno::ERANGE);
    }
    payload[..value.len()].copy_from_slice(value);
    ReplyReceipt::ok(value.len())
}

/// Writes a fixed struct into the payload as the whole reply.
pub(crate) fn put_struct<T: abi::PlainBytes>(payload: &mut [u8], value: &T) -> ReplyReceipt {
    let bytes = bytes_of(value);
    payload[..bytes.len()].copy_from_slice(bytes);
    ReplyReceipt::ok(bytes.len())
}

/// Collects the entries of a readdir, or with `plus` of a readdirplus.
pub(crate) struct DirSink<'a> {
    payload: &'a mut [u8],
    used: usize,
    plus: bool,
}

impl<'a> DirSink<'a> {
    pub(crate) fn new(payload: &'a mut [u8], len: usize, plus: bool) -> Self {
        let len = len.min(payload.len());
        DirSink { payload: &mut payload[..len], used: 0, plus }
    }

    /// Adds an entry. False: the entry did not fit, and no other will.
    pub(crate) fn add_entry(&mut self, listed: &ListedEntry<'_>) -> bool {
        let ListedEntry { name, next, .. } = *listed;
        let (ino, file_type) = match &listed.entry {
            Some(entry) => (entry.attr.ino, entry.attr.mode),
            None => (listed.ino, listed.file_type),
        };
        if !self.plus {
            return append_dirent(self.payload, &mut self.used, &[], ino, next, file_type, name);
        }
        // Without attributes, the kernel looks the name up when necessary.
        let out = listed.entry.as_ref().map_or_else(abi::EntryOut::default, entry_out);
        append_dirent(self.payload, &mut self.used, bytes_of(&out), ino, next, file_type, name)
    }

    /// Bytes that are left.
    pub(crate) fn room(&self) -> usize {
        self.payload.len() - self.used
    }

    pub(crate) fn finish(self) -> ReplyReceipt {
        ReplyReceipt::ok(self.used)
    }
}

/// The entries of a readdirplus, each with the bytes behind it.
pub(crate) fn plus_entries(mut listing: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let entry = listing;
        let dirent: abi::Dirent = abi::read_plain(entry.get(size_of::<abi::EntryOut>()..)?)?;
        let len = size_of::<abi::EntryOut>() + size_of::<abi::Dirent>() + dirent.namelen as usize;
        listing = listing.get(len.next_multiple_of(8)..).unwrap_or_default();
        Some(entry)
    })
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

pub(crate) fn entry_out(entry: &FileEntry) -> abi::EntryOut {
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

/// "No such name", valid for `ttl`.
pub(crate) fn absent_out(ttl: Duration) -> abi::EntryOut {
    abi::EntryOut { entry_valid: ttl.as_secs(), entry_valid_nsec: ttl.subsec_nanos(), ..Default::default() }
}

pub(crate) fn attr_out(attr: &StatAttr) -> abi::Attr {
    // The kernel treats the seconds as a signed number.
    abi::Attr {
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.atime.seconds as u64,
        mtime: attr.mtime.seconds as u64,
        ctime: attr.ctime.seconds as u64,
        atimensec: attr.atime.nanos,
        mtimensec: attr.mtime.nanos,
        ctimensec: attr.ctime.nanos,
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

    #[test]
    fn directory_entries_are_padded_and_stop_when_full() {
        let mut payload = [0xffu8; 80];
        let listed = |ino, next, file_type, name| ListedEntry { name, next, ino, file_type, entry: None };
        let mut sink = DirSink::new(&mut payload, 72, false);
        assert!(sink.add_entry(&listed(5, 1, libc::S_IFREG, b"abc")));
        assert!(sink.add_entry(&listed(6, 2, libc::S_IFDIR, b"12345678")));
        assert!(!sink.add_entry(&listed(7, 3, libc::S_IFREG, b"x")));
        assert_eq!(sink.finish().len, 64);
        assert_eq!(abi::read_plain::<abi::Dirent>(&payload), Some(abi::Dirent { ino: 5, off: 1, namelen: 3, kind: 8 }));
        assert_eq!(&payload[24..32], b"abc\0\0\0\0\0");
        let attr = StatAttr::new(9, libc::S_IFREG, 1);
        let entry = FileEntry { ino: 9, generation: 0, attr, entry_ttl: Duration::ZERO, attr_ttl: Duration::ZERO };
        let mut sink = DirSink::new(&mut payload, 72, true);
        assert!(!sink.add_entry(&ListedEntry { entry: Some(entry), ..listed(9, 1, libc::S_IFREG, b"n") }));
    }

    #[test]
    fn the_shortest_entry_has_the_length_that_limits_a_listing() {
        for (plus, len) in [(false, PLAIN_ENTRY_LEN), (true, PLUS_ENTRY_LEN)] {
            let mut payload = [0; 200];
            let mut sink = DirSink::new(&mut payload, 200, plus);
            assert!(sink.add_entry(&ListedEntry { name: b"x", next: 1, ino: 2, file_type: 0, entry: None }));
            assert_eq!(sink.finish().len, len);
        }
    }

    #[test]
    fn xattr_sizes() {
        let mut payload = [0u8; 64];
        assert_eq!(xattr_reply(&mut payload, 0, b"hello").len, 8);
        assert_eq!(payload[0], 5);
        assert_eq!(xattr_reply(&mut payload, 4, b"hello").error, libc::ERANGE);
        assert_eq!(xattr_reply(&mut payload, 5, b"hello").len, 5);
    }

    #[test]
    fn read_replies_never_exceed_the_request() {
        let mut payload = [0u8; 8];
        assert_eq!(data_reply(&mut payload[..4], None, b"123456").len, 4);
        assert_eq!(&payload, b"1234\0\0\0\0");
    }
}
