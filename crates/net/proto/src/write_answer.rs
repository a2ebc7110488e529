//! The answers to requests for a writable volume. An error of the source is an answer like any other: it is kept for a
//! repeated request, and no other node is called because of it.

use crate::answer::take_version;
use crate::codec::{ByteCursor, PutValue};
use crate::request::{check_name, take_switch};
use crate::writes::{lock_code, put_identity, put_time, take_identity, take_lock_kind, take_time};
use crate::{AnswerBody, FrameError};
use spurline_types::{Error, ErrorKind};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::writes::{CacheVersion, FileIdentity, ListedName, LockConflict, LockRange, NodeAttr, SourceSpace};

/// The longest error message of an answer.
const MAX_MESSAGE: usize = 1024;

/// Answers a `WriteRequest`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteAnswer {
    /// It was done, and there is nothing to say; the bytes of a read are the payload.
    Done,
    /// It was done; the attributes now.
    Attr(NodeAttr),
    /// A file was made or opened; its attributes, and those of its directory after that.
    Created(NodeAttr, Option<NodeAttr>),
    /// A file was opened; its attributes, and the version whose cached bytes it may be read from.
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
    /// Another process may have done it, and the source does not show whether it did.
    Unclear(String),
}

impl WriteAnswer {
    /// Gives all objects of the answer to this user and group.
    pub fn set_owner(&mut self, uid: u32, gid: u32) {
        let set = |attr: &mut NodeAttr| {
            attr.uid = uid;
            attr.gid = gid;
        };
        match self {
            WriteAnswer::Attr(attr) | WriteAnswer::Opened(attr, _) => set(attr),
            WriteAnswer::Created(attr, directory) => {
                set(attr);
                directory.iter_mut().for_each(set);
            }
            WriteAnswer::Names(names) => names.iter_mut().filter_map(|name| name.attr.as_mut()).for_each(set),
            _ => {}
        }
    }

    fn code(&self) -> u8 {
        match self {
            WriteAnswer::Done => 0,
            WriteAnswer::Attr(_) => 1,
            WriteAnswer::Number(_) => 2,
            WriteAnswer::Bytes(_) => 3,
            WriteAnswer::Names(_) => 4,
            WriteAnswer::Conflict(_) => 5,
            WriteAnswer::Space(_) => 6,
            WriteAnswer::Capabilities(_) => 7,
            WriteAnswer::Failed(_) => 8,
            WriteAnswer::UnknownFile => 9,
            WriteAnswer::Unclear(_) => 10,
            WriteAnswer::Created(..) => 11,
            WriteAnswer::Opened(..) => 12,
        }
    }
}

impl AnswerBody for WriteAnswer {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u8(self.code());
        match self {
            WriteAnswer::Done | WriteAnswer::UnknownFile => {}
            WriteAnswer::Attr(attr) => put_node_attr(attr, out),
            WriteAnswer::Created(attr, directory) => {
                put_node_attr(attr, out);
                out.put_u8(u8::from(directory.is_some()));
                directory.iter().for_each(|attr| put_node_attr(attr, out));
            }
            WriteAnswer::Opened(attr, version) => {
                put_node_attr(attr, out);
                put_cache_version(version, out);
            }
            WriteAnswer::Number(n) => out.put_u64(*n),
            WriteAnswer::Bytes(bytes) => out.put_bytes(bytes),
            WriteAnswer::Names(names) => {
                out.put_u32(u32::try_from(names.len()).unwrap_or(u32::MAX));
                for listed in names {
                    out.put_bytes(&listed.name);
                    out.put_u32(listed.file_type);
                    out.put_u64(listed.inode);
                    out.put_u64(listed.next);
                    out.put_u8(u8::from(listed.attr.is_some()));
                    listed.attr.iter().for_each(|attr| put_node_attr(attr, out));
                }
            }
            WriteAnswer::Conflict(conflict) => {
                out.put_u8(u8::from(conflict.is_some()));
                if let Some(conflict) = conflict {
                    out.put_u8(lock_code(conflict.kind));
                    out.put_u64(conflict.range.start);
                    out.put_u64(conflict.range.end);
                    out.put_u32(conflict.pid);
                }
            }
            WriteAnswer::Space(space) => {
                let SourceSpace { block_size, blocks, blocks_free, blocks_available, files, files_free, name_max } =
                    *space;
                for n in [block_size, blocks, blocks_free, blocks_available, files, files_free] {
                    out.put_u64(n);
                }
                out.put_u32(name_max);
            }
            WriteAnswer::Capabilities(can) => put_capabilities(can, out),
            WriteAnswer::Failed(error) => {
                out.put_u16(error.kind().code());
                let message = error.message();
                out.put_bytes(&message.as_bytes()[..message.floor_char_boundary(MAX_MESSAGE)]);
            }
            WriteAnswer::Unclear(why) => out.put_bytes(&why.as_bytes()[..why.floor_char_boundary(MAX_MESSAGE)]),
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let answer = match take.take_u8("the kind of an answer")? {
            0 => WriteAnswer::Done,
            1 => WriteAnswer::Attr(take_node_attr(&mut take)?),
            2 => WriteAnswer::Number(take.take_u64("a number")?),
            3 => WriteAnswer::Bytes(take.take_bytes("bytes")?.to_vec()),
            4 => WriteAnswer::Names(take_names(&mut take)?),
            5 => WriteAnswer::Conflict(match take_switch(&mut take, "whether a lock follows")? {
                false => None,
                true => Some(LockConflict {
                    kind: take_lock_kind(&mut take)?,
                    range: LockRange { start: take.take_u64("a lock's start")?, end: take.take_u64("a lock's end")? },
                    pid: take.take_u32("a process")?,
                }),
            }),
            6 => WriteAnswer::Space(SourceSpace {
                block_size: take.take_u64("a size")?,
                blocks: take.take_u64("a size")?,
                blocks_free: take.take_u64("a size")?,
                blocks_available: take.take_u64("a size")?,
                files: take.take_u64("a size")?,
                files_free: take.take_u64("a size")?,
                name_max: take.take_u32("a size")?,
            }),
            7 => WriteAnswer::Capabilities(take_capabilities(&mut take)?),
            8 => {
                let code = take.take_u16("a status")?;
                WriteAnswer::Failed(Error::new(ErrorKind::from_code(code), take_message(&mut take)?))
            }
            9 => WriteAnswer::UnknownFile,
            10 => WriteAnswer::Unclear(take_message(&mut take)?.to_owned()),
            11 => {
                let attr = take_node_attr(&mut take)?;
                let directory = take_switch(&mut take, "whether a directory follows")?;
                WriteAnswer::Created(attr, directory.then(|| take_node_attr(&mut take)).transpose()?)
            }
            12 => {
                let attr = take_node_attr(&mut take)?;
                WriteAnswer::Opened(attr, take_cache_version(&mut take)?)
            }
            value => return Err(FrameError::Value { what: "the kind of an answer", value: value.into() }),
        };
        take.expect_end()?;
        Ok(answer)
    }
}

fn take_message<'a>(take: &mut ByteCursor<'a>) -> Result<&'a str, FrameError> {
    let message = take.take_text("an error's message")?;
    if message.len() > MAX_MESSAGE {
        let (len, max) = (message.len() as u64, MAX_MESSAGE as u64);
        return Err(FrameError::TooLong { what: "an error's message", len, max });
    }
    Ok(message)
}

/// Before a version: its bytes are final. Other numbers have no version behind them.
const SETTLED: u8 = 0;
const OPEN_FOR_CHANGES: u8 = 1;
const JUST_CHANGED: u8 = 2;
const SOURCE_IS_NEAR: u8 = 3;
const OWN_CACHE: u8 = 4;

fn put_cache_version(version: &CacheVersion, out: &mut Vec<u8>) {
    match version {
        CacheVersion::Settled(version) => {
            out.put_u8(SETTLED);
            out.put_bytes(version.as_str().as_bytes());
        }
        CacheVersion::OpenForChanges => out.put_u8(OPEN_FOR_CHANGES),
        CacheVersion::JustChanged => out.put_u8(JUST_CHANGED),
        CacheVersion::SourceIsNear => out.put_u8(SOURCE_IS_NEAR),
        CacheVersion::OwnCache => out.put_u8(OWN_CACHE),
    }
}

fn take_cache_version(take: &mut ByteCursor<'_>) -> Result<CacheVersion, FrameError> {
    Ok(match take.take_u8("the state of a version")? {
        SETTLED => CacheVersion::Settled(take_version(take)?),
        OPEN_FOR_CHANGES => CacheVersion::OpenForChanges,
        JUST_CHANGED => CacheVersion::JustChanged,
        SOURCE_IS_NEAR => CacheVersion::SourceIsNear,
        OWN_CACHE => CacheVersion::OwnCache,
        value => return Err(FrameError::Value { what: "the state of a version", value: value.into() }),
    })
}

fn put_node_attr(attr: &NodeAttr, out: &mut Vec<u8>) {
    put_identity(Some(&attr.identity), out);
    for n in [attr.mode, attr.nlink, attr.uid, attr.gid, attr.blksize] {
        out.put_u32(n);
    }
    for n in [attr.inode, attr.rdev, attr.size, attr.blocks] {
        out.put_u64(n);
    }
    for time in [attr.atime, attr.mtime, attr.ctime] {
        put_time(time, out);
    }
}

fn take_node_attr(take: &mut ByteCursor<'_>) -> Result<NodeAttr, FrameError> {
    let identity: FileIdentity =
        take_identity(take)?.ok_or(FrameError::Value { what: "the identity of an object", value: 0 })?;
    let mode = take.take_u32("a mode")?;
    let nlink = take.take_u32("a number of names")?;
    let (uid, gid) = (take.take_u32("a user")?, take.take_u32("a group")?);
    let blksize = take.take_u32("a block size")?;
    let inode = take.take_u64("an inode number")?;
    let rdev = take.take_u64("a device")?;
    let size = take.take_u64("a size")?;
    let blocks = take.take_u64("a size")?;
    let (atime, mtime, ctime) = (take_time(take)?, take_time(take)?, take_time(take)?);
    Ok(NodeAttr { identity, inode, mode, nlink, uid, gid, rdev, size, blocks, blksize, atime, mtime, ctime })
}

fn take_names(take: &mut ByteCursor<'_>) -> Result<Vec<ListedName>, FrameError> {
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
            file_type: take.take_u32("a file type")?,
            inode: take.take_u64("an inode number")?,
            next: take.take_u64("a position")?,
            attr: take_switch(take, "whether attributes follow")?.then(|| take_node_attr(take)).transpose()?,
        });
    }
    Ok(names)
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
    if bits >= 1 << 9 {
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
        locks: if bit(7) { LockScope::Source } else { LockScope::Mount },
        publishes: bit(8),
    })
}
