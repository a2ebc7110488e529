//! The answers to requests for a writable volume. An error of the source is an answer like any other: the error is kept for a
//! repeated request, and no other node is called because of it.

use crate::answer::take_version;
use crate::codec::{ByteCursor, PutValue};
use crate::request::check_name;
use crate::wire_value::{WireValue, wire_enum, wire_struct};
use crate::{AnswerBody, FrameError};
use spurline_types::{Error, ErrorKind, Version};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::writes::{CacheVersion, ListedName, LockConflict, NodeAttr, SourceSpace};

/// The longest error message of an answer.
const MAX_MESSAGE: usize = 1024;

/// Answers a `WriteRequest`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteAnswer {
    /// It was done, and there is nothing to say; the bytes of a read are the payload.
    Done,
    /// It was done; the attributes now.
    Attr(NodeAttr),
    /// A file was made or opened; the attributes, and those of the directory after that.
    Created(NodeAttr, Option<NodeAttr>),
    /// A file was opened; the attributes, and the version whose cached bytes it may be read from.
    Opened(NodeAttr, CacheVersion),
    /// A number of bytes, or an offset.
    Number(u64),
    /// Bytes: a link's target, an extended attribute, or names.
    Bytes(Vec<u8>),
    /// Names of a directory.
    Names(Vec<ListedName>),
    /// A lock that is in the way, if there is one.
    Conflict(Option<LockConflict>),
    /// Sizes of the file system.
    Space(SourceSpace),
    /// What the source can do.
    Capabilities(WriteCapabilities),
    /// The source, or the node, refused.
    Failed(Error),
    /// The node has no such open file: it was started again, or the session was idle for too long.
    UnknownFile,
    /// Another process may have made the change, and the source does not show whether.
    Unclear(String),
    /// A lock was reclaimed, or its grants were looked up.
    Grants(KnownGrants),
}

/// The grants that a node remembers of a lock to other mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownGrants {
    /// How long ago the last one was, in microseconds: the mount knows whether it has had a lock since then.
    pub last_us: Option<u64>,
    /// How long the process has run: grants of the process before are unknown.
    pub up_us: u64,
    /// Such a lock that the node keeps for another mount now, of a path of a bucket.
    pub held: Option<LockConflict>,
}

impl AnswerBody for WriteAnswer {
    fn encode(&self, out: &mut Vec<u8>) {
        self.put(out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let answer = WriteAnswer::take(&mut take, "an answer")?;
        take.expect_end()?;
        Ok(answer)
    }
}

wire_enum! { 'a WriteAnswer, "an answer":
    0 Done,
    1 Attr(attr),
    2 Number(number),
    3 Bytes(bytes),
    4 Names(names),
    5 Conflict(conflict),
    6 Space(space),
    7 Capabilities(capabilities),
    8 Failed(error),
    9 UnknownFile,
    10 Unclear(why),
    11 Created(attr, directory),
    12 Opened(attr, version),
    13 Grants(grants),
}

wire_enum! { 'a CacheVersion, "a version":
    0 Settled(version),
    1 OpenForChanges,
    2 JustChanged,
    3 SourceIsNear,
    4 OwnCache,
}

wire_struct!(KnownGrants, "the grants of a lock": last_us, up_us, held);
wire_struct!(LockConflict, "a lock": kind, range, pid);
wire_struct!(SourceSpace, "the sizes of a source": block_size, blocks, blocks_free, blocks_available, files, files_free, name_max);
wire_struct!(
    NodeAttr,
    "the attributes of an object": identity, mode, nlink, uid, gid, blksize, inode, rdev, size, blocks, atime, mtime, ctime
);

/// A text for people, cut to the limit.
impl WireValue<'_> for String {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(&self.as_bytes()[..self.floor_char_boundary(MAX_MESSAGE)]);
    }

    fn take(take: &mut ByteCursor<'_>, _: &'static str) -> Result<Self, FrameError> {
        take_message(take).map(str::to_owned)
    }
}

impl WireValue<'_> for Error {
    fn put(&self, out: &mut Vec<u8>) {
        let message = self.message();
        out.put_u16(self.kind().code());
        out.put_bytes(&message.as_bytes()[..message.floor_char_boundary(MAX_MESSAGE)]);
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        let code = take.take_u16(what)?;
        Ok(Error::new(ErrorKind::from_code(code), take_message(take)?))
    }
}

fn take_message<'a>(take: &mut ByteCursor<'a>) -> Result<&'a str, FrameError> {
    let message = take.take_text("an error's message")?;
    if message.len() > MAX_MESSAGE {
        let len = message.len() as u64;
        let max = MAX_MESSAGE as u64;
        return Err(FrameError::TooLong { what: "an error's message", len, max });
    }
    Ok(message)
}

impl WireValue<'_> for Version {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(self.as_str().as_bytes());
    }

    fn take(take: &mut ByteCursor<'_>, _: &'static str) -> Result<Self, FrameError> {
        take_version(take)
    }
}

impl WireValue<'_> for Vec<ListedName> {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(u32::try_from(self.len()).unwrap_or(u32::MAX));
        for ListedName { name, file_type, inode, next, attr } in self {
            name.put(out);
            file_type.put(out);
            inode.put(out);
            next.put(out);
            attr.put(out);
        }
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        // A name of one byte without attributes.
        const SHORTEST: usize = 5 + 4 + 8 + 8 + 1;
        let count = take.take_u32("a page's length")? as usize;
        let mut names = Vec::with_capacity(count.min(take.0.len() / SHORTEST));
        for _ in 0..count {
            let name = take.take_bytes("a name")?;
            // A listing has the directory itself and the one above it.
            if !matches!(name, b"." | b"..") {
                check_name(name)?;
            }
            if name.contains(&b'/') {
                return Err(FrameError::Path("a slash in a name"));
            }
            names.push(ListedName {
                name: name.to_vec(),
                file_type: WireValue::take(take, what)?,
                inode: WireValue::take(take, what)?,
                next: WireValue::take(take, what)?,
                attr: WireValue::take(take, what)?,
            });
        }
        Ok(names)
    }
}

impl WireValue<'_> for WriteCapabilities {
    fn put(&self, out: &mut Vec<u8>) {
        put_capabilities(self, out);
    }

    fn take(take: &mut ByteCursor<'_>, _: &'static str) -> Result<Self, FrameError> {
        take_capabilities(take)
    }
}

/// Numbers of the abilities on the wire, in order.
fn put_capabilities(can: &WriteCapabilities, out: &mut Vec<u8>) {
    match can.rename_directory {
        DirectoryRename::Atomic => out.put_u8(0),
        DirectoryRename::EachUpTo(most) => {
            out.put_u8(1);
            out.put_u64(most);
        }
        DirectoryRename::No => out.put_u8(2),
    }
    let bits = [
        can.hard_links,
        can.symlinks,
        can.modes,
        can.xattrs,
        can.acls,
        can.holes,
        can.copy,
        can.locks == LockScope::Source,
        can.publishes,
        can.locks == LockScope::Group,
    ];
    out.put_u16(bits.iter().rev().fold(0, |all, bit| all << 1 | u16::from(*bit)));
}

fn take_capabilities(take: &mut ByteCursor<'_>) -> Result<WriteCapabilities, FrameError> {
    let rename_directory = match take.take_u8("how directories are renamed")? {
        0 => DirectoryRename::Atomic,
        1 => DirectoryRename::EachUpTo(take.take_u64("a limit")?),
        2 => DirectoryRename::No,
        value => return Err(FrameError::Value { what: "how directories are renamed", value: value.into() }),
    };
    let bits = take.take_u16("abilities")?;
    if bits >= 1 << 10 {
        return Err(FrameError::Value { what: "abilities", value: bits.into() });
    }
    let bit = |at: u16| bits >> at & 1 != 0;
    Ok(WriteCapabilities {
        rename_directory,
        hard_links: bit(0),
        symlinks: bit(1),
        modes: bit(2),
        xattrs: bit(3),
        acls: bit(4),
        holes: bit(5),
        copy: bit(6),
        locks: match (bit(7), bit(9)) {
            (false, false) => LockScope::Mount,
            (false, true) => LockScope::Group,
            (true, _) => LockScope::Source,
        },
        publishes: bit(8),
    })
}
