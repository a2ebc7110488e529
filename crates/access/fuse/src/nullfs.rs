//! A minimal file system: one directory with one file, `data`, served from one static buffer; what is written is dropped, and
//! files that are made are forgotten. It measures the upper limit for file systems on the same session code.

use crate::errno::Errno;
use crate::handler::{FuseHandler, HandleReply, LookupReply, RequestCaller, StatAttr, StatfsReply};
use crate::reply::{DirPlusSink, DirSink, ReadReply, ReplyReceipt};
use spurline_volume::writes::WritePlace;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const ROOT: u64 = crate::abi::ROOT_ID;
const DATA: u64 = 2;
/// Nothing ever changes.
const TTL: Duration = Duration::from_secs(86_400);
/// The longest read; the bytes repeat with this period.
const PATTERN: usize = 1 << 20;

/// See the module.
pub struct NullFs {
    size: u64,
    /// Longer than its nominal length by the longest read, so that a read from any offset is one piece.
    held: Box<[u8]>,
    fill: bool,
    /// The number of the last file that was made.
    made: AtomicU64,
}

impl NullFs {
    /// A file system whose file has `size` bytes, served from one mebibyte, which stays in the processor's cache.
    pub fn new(size: u64) -> Self {
        NullFs::with_buffer(size, PATTERN as u64)
    }

    /// The same served from `held` bytes of memory (a mebibyte at least), like a file system with its data in memory.
    pub fn with_buffer(size: u64, held: u64) -> Self {
        let held = (held as usize).next_multiple_of(PATTERN).max(PATTERN);
        let byte = |i: usize| ((i % PATTERN) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0];
        let first: Vec<u8> = (0..PATTERN).map(byte).collect();
        NullFs { size, held: first.repeat(held / PATTERN + 1).into(), fill: false, made: AtomicU64::new(DATA) }
    }

    /// The same served from the slot's own buffer without writing to it: the cost of a file system whose bytes a
    /// device writes.
    pub fn from_slot_buffers(size: u64) -> Self {
        NullFs { fill: true, ..NullFs::new(size) }
    }

    /// The byte at `offset`.
    pub fn byte_at(&self, offset: u64) -> u8 {
        self.held[(offset % PATTERN as u64) as usize]
    }

    fn inode_attr(&self, ino: u64) -> Option<StatAttr> {
        match ino {
            ROOT => Some(StatAttr { nlink: 2, ..StatAttr::new(ROOT, libc::S_IFDIR | 0o555, 0) }),
            DATA => Some(StatAttr::new(DATA, libc::S_IFREG | 0o444, self.size)),
            made if made <= self.made.load(Ordering::Relaxed) => Some(StatAttr::new(made, libc::S_IFREG | 0o644, 0)),
            _ => None,
        }
    }
    fn lookup_reply(&self, ino: u64) -> Result<LookupReply, Errno> {
        let attr = self.inode_attr(ino).ok_or(Errno::ENOENT)?;
        Ok(LookupReply { ino, generation: 0, attr, entry_ttl: TTL, attr_ttl: TTL })
    }
    fn dir_names() -> [(u64, u32, &'static [u8]); 3] {
        [(ROOT, libc::S_IFDIR, b"."), (ROOT, libc::S_IFDIR, b".."), (DATA, libc::S_IFREG, b"data")]
    }
}

impl FuseHandler for NullFs {
    fn lookup(&self, _parent: u64, name: &[u8], _caller: &RequestCaller) -> Result<LookupReply, Errno> {
        match name {
            b"." | b".." => self.lookup_reply(ROOT),
            b"data" => self.lookup_reply(DATA),
            _ => Ok(LookupReply::negative(TTL)),
        }
    }

    fn getattr(&self, ino: u64, _fh: Option<u64>, _caller: &RequestCaller) -> Result<(StatAttr, Duration), Errno> {
        Ok((self.inode_attr(ino).ok_or(Errno::ESTALE)?, TTL))
    }

    fn open(&self, ino: u64, _flags: u32, _caller: &RequestCaller) -> Result<HandleReply, Errno> {
        match ino {
            DATA => Ok(HandleReply { keep_cache: true, ..HandleReply::default() }),
            _ => Err(Errno::EISDIR),
        }
    }

    fn read(&self, _ino: u64, _fh: u64, offset: u64, len: u32, reply: ReadReply<'_>) -> ReplyReceipt {
        let len = self.size.saturating_sub(offset).min(u64::from(len)).min(PATTERN as u64) as usize;
        if self.fill {
            return reply.reply_filled(len);
        }
        let start = (offset % (self.held.len() - PATTERN) as u64) as usize;
        reply.reply_data(&self.held[start..start + len])
    }

    fn write(
        &self,
        _handle: (u64, u64),
        _at: (u64, WritePlace),
        data: &[u8],
        _lose_privileges: bool,
        _caller: &RequestCaller,
    ) -> Result<usize, Errno> {
        Ok(data.len())
    }

    fn create(
        &self,
        _parent: u64,
        _name: &[u8],
        _flags: u32,
        _mode: u32,
        _caller: &RequestCaller,
    ) -> Result<(LookupReply, HandleReply), Errno> {
        let ino = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        // As where a source has the locks: each close is a request.
        let opened = HandleReply { flush: true, direct_io: true, ..HandleReply::default() };
        Ok((self.lookup_reply(ino)?, opened))
    }

    fn flush(&self, _ino: u64, _fh: u64, _lock_owner: u64) -> Result<(), Errno> {
        Ok(())
    }

    fn readdir(
        &self,
        _ino: u64,
        _fh: u64,
        cookie: u64,
        sink: &mut DirSink<'_>,
        _caller: &RequestCaller,
    ) -> Result<(), Errno> {
        for (i, (ino, mode, name)) in (1..).zip(Self::dir_names()).skip(cookie as usize) {
            if !sink.add_entry(ino, i, mode, name) {
                break;
            }
        }
        Ok(())
    }

    fn readdirplus(
        &self,
        _ino: u64,
        _fh: u64,
        cookie: u64,
        sink: &mut DirPlusSink<'_>,
        _caller: &RequestCaller,
    ) -> Result<(), Errno> {
        for (i, (ino, mode, name)) in (1..).zip(Self::dir_names()).skip(cookie as usize) {
            let added = if ino == DATA {
                sink.add_entry(&self.lookup_reply(DATA)?, i, name)
            } else {
                sink.add_plain(ino, i, mode, name)
            };
            if !added {
                break;
            }
        }
        Ok(())
    }

    fn statfs(&self, _ino: u64) -> Result<StatfsReply, Errno> {
        let blocks = self.size.div_ceil(4096);
        Ok(StatfsReply { blocks, files: 2, ..StatfsReply::default() })
    }
}
