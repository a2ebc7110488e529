//! What a node answers: bodies of answers, and errors with their kind. Payloads are bytes and need no code.

use crate::codec::{Put, Take};
use crate::rail::{put_rails, take_rails};
use crate::request::check_name;
use crate::{FrameError, MAX_ANSWER_BODY, MAX_VERSION_TEXT, RAILS_VERSION, Rail, VolumeId};
use spurline_types::{Attr, DirEntry, Error, ErrorKind, FileKind, ListPage, Version, unix_time};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A value that is the body of an answer.
pub trait Body: Sized {
    /// Appends the value to `out`.
    fn encode(&self, out: &mut Vec<u8>);
    /// Reads the value.
    ///
    /// # Errors
    /// When the bytes are no such value.
    fn decode(bytes: &[u8]) -> Result<Self, FrameError>;
}

/// What a node can do beyond the first version, as bits; unknown ones are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// The upper 16 bits are no bits but a number.
    const RULE_SHIFT: u32 = 48;
    const SENDS_ON: u64 = 1;

    /// The same with the number of the rule by which this node's release finds the holders of blocks.
    pub fn placing_by(self, rule: u16) -> Self {
        Capabilities(self.0 & !(0xffff << Self::RULE_SHIFT) | u64::from(rule) << Self::RULE_SHIFT)
    }

    /// The same of a node that knows `ReadHere` and `Seek`.
    pub fn sending_on(self) -> Self {
        Capabilities(self.0 | Self::SENDS_ON)
    }

    /// Whether the node knows `ReadHere` and `Seek`; one of an older release takes neither.
    pub fn sends_on(self) -> bool {
        self.0 & Self::SENDS_ON != 0
    }

    /// The number of the rule; `None` of a release that does not tell it.
    pub fn placing_rule(self) -> Option<u16> {
        Some((self.0 >> Self::RULE_SHIFT) as u16).filter(|rule| *rule != 0)
    }
}

/// Answers `Hello`. What is only in a newer version is empty when the connection speaks an older one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Welcome {
    /// The protocol version of this connection.
    pub version: u16,
    /// The node's number for the source asked for; 0 when none was.
    pub volume: VolumeId,
    /// Unit of caching in bytes.
    pub block_size: u64,
    /// The node's name for logs.
    pub node: String,
    /// What it can do.
    pub capabilities: Capabilities,
    /// A number drawn when the node started, so that a peer sees that it is another process than before; 0 when not
    /// known. From version 2 on.
    pub instance: u64,
    /// Where RDMA reaches it; none where it serves TCP only. From version 2 on.
    pub rails: Vec<Rail>,
}

/// The body of an answer to a read whose block many readers ask for at once; the body is empty otherwise. A reader that
/// does not know it loses nothing.
pub const HOT: &[u8] = &[1];

/// Whether the body of an answer to a read says that its block is hot.
pub fn says_hot(body: &[u8]) -> bool {
    body.first() == HOT.first()
}

/// The body of an answer to a `ReadHere` of what this node does not hold: the node that fetches the block for all is to be
/// asked, by a `Read`.
pub const SENT_ON: &[u8] = &[2];

/// Whether the body of an answer to a `ReadHere` sends the reader on.
pub fn says_sent_on(body: &[u8]) -> bool {
    body == SENT_ON
}

/// Capacity of a volume, as `df` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StatFs {
    /// All bytes.
    pub total_bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// All inodes.
    pub total_files: u64,
    /// Inodes free.
    pub free_files: u64,
}

impl Body for Welcome {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(self.version);
        out.put_u32(self.volume.0);
        out.put_u64(self.block_size);
        out.put_bytes(self.node.as_bytes());
        out.put_u64(self.capabilities.0);
        if self.version >= RAILS_VERSION {
            out.put_u64(self.instance);
            put_rails(&self.rails, out);
        }
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = Take(bytes);
        let mut welcome = Welcome {
            version: take.u16("a version")?,
            volume: VolumeId(take.u32("a volume")?),
            block_size: take.u64("a block size")?,
            node: take.text("a node's name")?.to_owned(),
            capabilities: Capabilities(take.u64("capabilities")?),
            ..Welcome::default()
        };
        if welcome.version >= RAILS_VERSION {
            welcome.instance = take.u64("an instance")?;
            welcome.rails = take_rails(&mut take)?;
        }
        take.end()?;
        Ok(welcome)
    }
}

impl Body for StatFs {
    fn encode(&self, out: &mut Vec<u8>) {
        for n in [self.total_bytes, self.free_bytes, self.total_files, self.free_files] {
            out.put_u64(n);
        }
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = Take(bytes);
        let stat = StatFs {
            total_bytes: take.u64("a capacity")?,
            free_bytes: take.u64("a capacity")?,
            total_files: take.u64("a capacity")?,
            free_files: take.u64("a capacity")?,
        };
        take.end()?;
        Ok(stat)
    }
}

impl Body for Attr {
    fn encode(&self, out: &mut Vec<u8>) {
        put_attr(self, out);
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = Take(bytes);
        let attr = take_attr(&mut take)?;
        take.end()?;
        Ok(attr)
    }
}

impl Body for ListPage {
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
        let mut take = Take(bytes);
        let count = take.u32("a page's length")? as usize;
        let mut entries = Vec::with_capacity(count.min(bytes.len() / SHORTEST));
        for _ in 0..count {
            let name = take.bytes("a name")?;
            check_name(name)?;
            if name.contains(&b'/') {
                return Err(FrameError::Path("a slash in a name"));
            }
            entries.push(DirEntry { name: name.to_vec(), attr: take_attr(&mut take)? });
        }
        let next = take.option("a cursor")?.map(<[u8]>::to_vec);
        take.end()?;
        Ok(ListPage { entries, next })
    }
}

fn put_attr(attr: &Attr, out: &mut Vec<u8>) {
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

fn take_attr(take: &mut Take<'_>) -> Result<Attr, FrameError> {
    let kind = match take.u8("a file kind")? {
        1 => FileKind::File,
        2 => FileKind::Directory,
        3 => FileKind::Symlink,
        value => return Err(FrameError::Value { what: "a file kind", value: value.into() }),
    };
    let mode = take.u16("a mode")?;
    let size = take.u64("a size")?;
    let secs = take.u64("a time")? as i64;
    let nanos = take.u32("a time")?;
    let whole = Duration::from_secs(secs.unsigned_abs());
    let mtime: Option<SystemTime> =
        if secs < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    let mtime = mtime
        .filter(|_| nanos < 1_000_000_000)
        .and_then(|t| t.checked_add(Duration::from_nanos(nanos.into())))
        .ok_or(FrameError::Value { what: "a time", value: secs as u64 })?;
    let version = take.text("a version text")?;
    if version.len() > MAX_VERSION_TEXT {
        let (len, max) = (version.len() as u64, MAX_VERSION_TEXT as u64);
        return Err(FrameError::TooLong { what: "a version text", len, max });
    }
    let etag = match take.option("an etag")? {
        None => None,
        Some(etag) => Some(std::str::from_utf8(etag).map_err(|_| FrameError::NotText("an etag"))?.to_owned()),
    };
    Ok(Attr { kind, size, mtime, mode, version: Version::new(version), etag })
}

/// The body of an error answer: its sentence, cut to a length that always fits.
/// The kind travels as the header's status.
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
