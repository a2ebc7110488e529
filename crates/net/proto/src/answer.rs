//! The answers of a node: bodies, and errors with their kind. Payloads are raw bytes and need no code.

use crate::codec::{ByteCursor, PutValue};
use crate::rail::{put_rails, take_rails};
use crate::request::check_name;
use crate::{FrameError, MAX_ANSWER_BODY, MAX_VERSION_TEXT, RailInfo, VolumeId};
use spurline_types::{DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, Version, unix_time};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A value that is the body of an answer.
pub trait AnswerBody: Sized {
    /// Appends the value to `out`.
    fn encode(&self, out: &mut Vec<u8>);
    /// Decodes the value.
    ///
    /// # Errors
    /// When the bytes do not encode such a value.
    fn decode(bytes: &[u8]) -> Result<Self, FrameError>;
}

/// Answers `Hello`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WelcomeAnswer {
    /// The protocol version of this connection.
    pub version: u16,
    /// The node's number for the requested source; of no meaning without a source.
    pub volume: VolumeId,
    /// Cache block size in bytes.
    pub block_size: u64,
    /// The node's name for logs.
    pub node: String,
    /// The placement rule of the node's release; 0 when unannounced.
    pub placement_rule: u16,
    /// A random number of this process, so that a peer detects a restart; 0 when unknown.
    pub instance: u64,
    /// Its RDMA rails; empty for a node that serves TCP only.
    pub rails: Vec<RailInfo>,
}

/// The body of an answer to a read of a hot block; the body is empty otherwise. A reader may ignore the body.
pub const HOT_BODY: &[u8] = &[1];

/// Whether the body of an answer to a read marks the block as hot.
pub fn is_hot_answer(body: &[u8]) -> bool {
    body.first() == HOT_BODY.first()
}

/// The body of an answer to a read with [`ReadFlags::MAY_REDIRECT`](crate::ReadFlags::MAY_REDIRECT) of an uncached
/// block: the reader must send the read to the node that fetches the block for all.
pub const REDIRECT_BODY: &[u8] = &[2];

/// Whether the body of an answer to a read is a redirect.
pub fn is_redirect(body: &[u8]) -> bool {
    body == REDIRECT_BODY
}

/// Capacity of a volume, as `df` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CapacityAnswer {
    /// All bytes.
    pub total_bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// All inodes.
    pub total_files: u64,
    /// Inodes free.
    pub free_files: u64,
}

impl AnswerBody for WelcomeAnswer {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(self.version);
        out.put_u32(self.volume.0);
        out.put_u64(self.block_size);
        out.put_bytes(self.node.as_bytes());
        out.put_u16(self.placement_rule);
        out.put_u64(self.instance);
        put_rails(&self.rails, out);
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let welcome = WelcomeAnswer {
            version: take.take_u16("a version")?,
            volume: VolumeId(take.take_u32("a volume")?),
            block_size: take.take_u64("a block size")?,
            node: take.take_text("a node's name")?.to_owned(),
            placement_rule: take.take_u16("a placement rule")?,
            instance: take.take_u64("an instance")?,
            rails: take_rails(&mut take)?,
        };
        take.expect_end()?;
        Ok(welcome)
    }
}

impl AnswerBody for CapacityAnswer {
    fn encode(&self, out: &mut Vec<u8>) {
        for n in [self.total_bytes, self.free_bytes, self.total_files, self.free_files] {
            out.put_u64(n);
        }
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let stat = CapacityAnswer {
            total_bytes: take.take_u64("a capacity")?,
            free_bytes: take.take_u64("a capacity")?,
            total_files: take.take_u64("a capacity")?,
            free_files: take.take_u64("a capacity")?,
        };
        take.expect_end()?;
        Ok(stat)
    }
}

impl AnswerBody for ObjectAttr {
    fn encode(&self, out: &mut Vec<u8>) {
        put_attr(self, out);
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let attr = take_attr(&mut take)?;
        take.expect_end()?;
        Ok(attr)
    }
}

impl AnswerBody for ListPage {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(u32::try_from(self.entries.len()).unwrap_or(u32::MAX));
        for entry in &self.entries {
            out.put_bytes(&entry.name);
            put_attr(&entry.attr, out);
        }
        out.put_option(self.next.as_deref());
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        // The shortest entry: a name of one byte with its length, and an attribute with empty texts.
        const SHORTEST: usize = 5 + 28;
        let mut take = ByteCursor(bytes);
        let count = take.take_u32("a page's length")? as usize;
        let mut entries = Vec::with_capacity(count.min(bytes.len() / SHORTEST));
        for _ in 0..count {
            let name = take.take_bytes("a name")?;
            check_name(name)?;
            if name.contains(&b'/') {
                return Err(FrameError::Path("a slash in a name"));
            }
            entries.push(DirEntry { name: name.to_vec(), attr: take_attr(&mut take)? });
        }
        let next = take.take_option("a cursor")?.map(<[u8]>::to_vec);
        take.expect_end()?;
        Ok(ListPage { entries, next, marker: None })
    }
}

fn put_attr(attr: &ObjectAttr, out: &mut Vec<u8>) {
    out.put_u8(match attr.kind {
        FileKind::File => 1,
        FileKind::Directory => 2,
        FileKind::Symlink => 3,
    });
    out.put_u16(attr.mode);
    out.put_u64(attr.size);
    let (secs, nanos) = unix_time(attr.mtime);
    out.put_u64(secs as u64);
    out.put_u32(nanos);
    out.put_bytes(attr.version.as_str().as_bytes());
    out.put_option(attr.etag.as_deref().map(str::as_bytes));
}

fn take_attr(take: &mut ByteCursor<'_>) -> Result<ObjectAttr, FrameError> {
    let kind = match take.take_u8("a file kind")? {
        1 => FileKind::File,
        2 => FileKind::Directory,
        3 => FileKind::Symlink,
        value => return Err(FrameError::Value { what: "a file kind", value: value.into() }),
    };
    let mode = take.take_u16("a mode")?;
    let size = take.take_u64("a size")?;
    let secs = take.take_u64("a time")? as i64;
    let nanos = take.take_u32("a time")?;
    let whole = Duration::from_secs(secs.unsigned_abs());
    let mtime: Option<SystemTime> =
        if secs < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    let mtime = mtime
        .filter(|_| nanos < 1_000_000_000)
        .and_then(|t| t.checked_add(Duration::from_nanos(nanos.into())))
        .ok_or(FrameError::Value { what: "a time", value: secs as u64 })?;
    let version = take_version(take)?;
    let etag = match take.take_option("an etag")? {
        None => None,
        Some(etag) => Some(std::str::from_utf8(etag).map_err(|_| FrameError::NotText("an etag"))?.to_owned()),
    };
    Ok(ObjectAttr { kind, size, mtime, mode, version, etag })
}

pub(crate) fn take_version(take: &mut ByteCursor<'_>) -> Result<Version, FrameError> {
    let version = take.take_text("a version text")?;
    if version.len() > MAX_VERSION_TEXT {
        let len = version.len() as u64;
        let max = MAX_VERSION_TEXT as u64;
        return Err(FrameError::TooLong { what: "a version text", len, max });
    }
    Ok(Version::new(version))
}

/// The body of an error answer: the message, cut to a length that always fits. The header's status carries the kind.
pub fn encode_error_message(error: &Error, out: &mut Vec<u8>) {
    const LONGEST: usize = 4096;
    const { assert!(LONGEST <= MAX_ANSWER_BODY) };
    let message = error.message();
    out.extend_from_slice(&message.as_bytes()[..message.floor_char_boundary(LONGEST)]);
}

/// The error of an answer with a `status` other than 0.
pub fn decode_error(status: u16, body: &[u8]) -> Error {
    Error::new(ErrorKind::from_code(status), String::from_utf8_lossy(body))
}
