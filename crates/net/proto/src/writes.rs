//! Requests that change the files of a source, or read them past every cache. It knows the encoding of the writable
//! volume's values, and neither nodes nor the order of calls.
//!
//! A request that changes something carries the number of the change within the mount's session. The node keeps its
//! answer until a later request says that it arrived, so that a request sent twice is executed once. Open files and
//! directories are named by numbers that the mount chooses: opening is a change like any other.
//!
//! The bytes of a write, or the value of an extended attribute, are the payload of the request (see the crate's head).

use crate::codec::{ByteCursor, PutValue};
use crate::open_attrs::{put_attr_call, take_attr_call};
use crate::request::{VolumeId, check_name, take_path, take_switch, take_volume};
use crate::wire_caller::WireCaller;
use crate::{FrameError, MAX_WRITE, OpenFlags};
use spurline_volume::repeated::ChangeMark;
use spurline_volume::writes::{
    AttrChange, Change, FileIdentity, FileTime, LockFamily, LockKind, LockRange, NamePath, NewTime, NodePath,
    OpenAttrCall, PendingVersion,
};

/// Numbers of open files, eight bytes each. Decoding borrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileNumbers<'a>(&'a [[u8; 8]]);

impl<'a> FileNumbers<'a> {
    /// The numbers, encoded into `scratch`.
    pub fn new(numbers: &[u64], scratch: &'a mut Vec<[u8; 8]>) -> Self {
        scratch.clear();
        scratch.extend(numbers.iter().map(|number| number.to_le_bytes()));
        FileNumbers(scratch)
    }

    /// The numbers.
    pub fn iter(&self) -> impl Iterator<Item = u64> + 'a {
        self.0.iter().map(|number| u64::from_le_bytes(*number))
    }

    fn take(take: &mut ByteCursor<'a>) -> Result<Self, FrameError> {
        match take.take_bytes("numbers of open files")?.as_chunks::<8>() {
            (numbers, []) => Ok(FileNumbers(numbers)),
            (_, rest) => {
                Err(FrameError::Value { what: "the length of a list of open files", value: rest.len() as u64 })
            }
        }
    }
}

/// One operation on a writable volume. Numbers of files are those the mount chose when it opened them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteCall<'a> {
    /// What the source can do; answered by capabilities.
    Capabilities,
    /// Sizes of the file system.
    Space,
    /// Makes all changes of the source durable.
    SyncAll,
    /// Attributes of an object.
    Stat(NodePath<'a>),
    /// Attributes of a name.
    Lookup(NamePath<'a>),
    /// Target of a symbolic link.
    ReadLink(NodePath<'a>),
    /// Whether the caller has these rights.
    Access(NodePath<'a>, u32),
    /// The value of an extended attribute.
    GetXattr(NodePath<'a>, &'a [u8]),
    /// The names of the extended attributes.
    ListXattr(NodePath<'a>),
    /// Opens a file under a new number.
    Open {
        /// The file.
        at: NodePath<'a>,
        /// Its flags.
        flags: OpenFlags,
        /// The number.
        file: u64,
    },
    /// Opens a file under the number that the file had in another process, which was lost. Answered as an opening where the
    /// file was opened anew, without the changes that were not published, else by attributes.
    OpenAgain {
        /// The file.
        at: NodePath<'a>,
        /// The flags.
        flags: OpenFlags,
        /// The number.
        file: u64,
        /// The numbers of the pending version.
        pending: PendingVersion,
    },
    /// Opens a file that is made if it does not exist.
    Create {
        /// Its name.
        at: NamePath<'a>,
        /// Its flags.
        flags: OpenFlags,
        /// Permission bits of a new file.
        mode: u32,
        /// The number.
        file: u64,
    },
    /// Makes a file without a name in a directory.
    CreateUnnamed {
        /// The directory.
        directory: NodePath<'a>,
        /// Its flags.
        flags: OpenFlags,
        /// Permission bits.
        mode: u32,
        /// The number.
        file: u64,
    },
    /// Gives an open file a name.
    LinkOpen {
        /// The file.
        file: u64,
        /// The name.
        to: NamePath<'a>,
    },
    /// Opens a directory under a new number.
    OpenDirectory {
        /// The directory.
        at: NodePath<'a>,
        /// The number.
        file: u64,
    },
    /// Changes names or attributes. The value of an extended attribute is the payload.
    Change(Change<'a>),
    /// Reads bytes of an open file; they are the payload of the answer.
    Read {
        /// The file.
        file: u64,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// Writes the payload.
    Write {
        /// The file.
        file: u64,
        /// First byte; of an append, where the mount expects it.
        offset: u64,
        /// Whether the bytes go to the end, and not to the offset, whatever the file was opened for.
        append: bool,
        /// Whether the file loses its privilege bits as if the caller wrote.
        lose_privileges: bool,
        /// Whether failures of earlier writes are reported too, as by [`WriteCall::Flush`].
        flush: bool,
    },
    /// Allocates or frees space.
    Allocate {
        /// The file.
        file: u64,
        /// As for `fallocate(2)`.
        mode: u32,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Copies bytes between two open files.
    CopyRange {
        /// The file with the bytes.
        file: u64,
        /// Their first one.
        offset: u64,
        /// The other file.
        to: u64,
        /// Where they go.
        to_offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The next data or hole.
    Seek {
        /// The file.
        file: u64,
        /// Where the search starts.
        offset: u64,
        /// `SEEK_DATA` or `SEEK_HOLE`.
        whence: u32,
    },
    /// Makes an open file or directory durable.
    Sync {
        /// The file or directory.
        file: u64,
        /// The bytes only.
        data_only: bool,
    },
    /// Reports failures of earlier writes.
    Flush {
        /// The file.
        file: u64,
    },
    /// Attributes of an open file or directory.
    StatOpen {
        /// The file or directory.
        file: u64,
    },
    /// Sets attributes of an open file or directory.
    SetAttrOpen {
        /// The file.
        file: u64,
        /// Which, and their values.
        set: AttrChange,
    },
    /// Answers a call about the rights or extended attributes of an open file or directory. A value that is set is the payload.
    AttrOpen {
        /// The file.
        file: u64,
        /// The call.
        call: OpenAttrCall<'a>,
    },
    /// A lock that is in the way.
    TestLock {
        /// The file.
        file: u64,
        /// The lock's owner.
        owner: u64,
        /// Its range.
        range: LockRange,
        /// Its type.
        kind: LockKind,
    },
    /// Sets or removes a lock.
    SetLock {
        /// The file.
        file: u64,
        /// The lock's family.
        family: LockFamily,
        /// Its owner.
        owner: u64,
        /// Its range.
        range: LockRange,
        /// Its type.
        kind: LockKind,
    },
    /// How long ago another mount was granted a lock of an object that excludes this one, if the node knows of such a grant.
    FindGrant {
        /// The object.
        of: FileIdentity,
        /// The lock's family.
        family: LockFamily,
        /// Its range.
        range: LockRange,
        /// Its type.
        kind: LockKind,
    },
    /// Names of an open directory.
    ReadDirectory {
        /// The directory.
        file: u64,
        /// The position to start from.
        from: u64,
        /// The most names.
        max: u32,
        /// Whether each name has its attributes.
        attrs: bool,
    },
    /// Opens an open file once more, under a new number.
    Reopen {
        /// The open file.
        of: u64,
        /// Its flags.
        flags: OpenFlags,
        /// The new number.
        file: u64,
    },
    /// Closes open files and directories.
    Close {
        /// Changes below this number of the session may have opened them, and open none of them later.
        opened_below: u64,
        /// Their numbers.
        files: FileNumbers<'a>,
    },
    /// Keeps the session and its open files alive.
    Renew,
}

/// A change of a mount, which the node makes once however often its request arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChangeId {
    /// The mount's session, drawn at random.
    pub session: u64,
    /// The number within the session.
    pub number: u64,
}

impl ChangeId {
    /// The mark of the change, for objects that the change makes.
    pub fn mark(self) -> ChangeMark {
        ChangeMark(u128::from(self.session) << 64 | u128::from(self.number))
    }
}

/// A request for a writable volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteRequest<'a> {
    /// The volume.
    pub volume: VolumeId,
    /// Of the change; its number is 0 for a request that changes nothing.
    pub id: ChangeId,
    /// The answers to all changes with lower numbers have arrived. In a request with number 0: the mount's number of attempts
    /// that got no answer.
    pub answered: u64,
    /// Another process may have executed this change: the node compares the source with it first.
    pub again: bool,
    /// Several nodes serve the source: a change that makes a name leaves a mark, which a later node recognises.
    pub marked: bool,
    /// The object that a name led to before the change, if the mount knows it; for an exchange also the other's.
    pub known: [Option<FileIdentity>; 2],
    /// The caller.
    pub caller: WireCaller<'a>,
    /// The operation.
    pub call: WriteCall<'a>,
    /// Its bytes.
    pub payload: &'a [u8],
}

impl WriteRequest<'_> {
    /// Whether the request changes the source or the node's open files, so that its answer is kept.
    pub fn is_change(&self) -> bool {
        self.id.number != 0
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(self.volume.0);
        for n in [self.id.session, self.id.number, self.answered] {
            out.put_u64(n);
        }
        out.put_u8(u8::from(self.again) | u8::from(self.marked) << 1);
        self.known.iter().for_each(|known| put_identity(known.as_ref(), out));
        self.caller.put(out);
        put_call(&self.call, out);
    }
}

impl<'a> WriteRequest<'a> {
    pub(crate) fn take(take: &mut ByteCursor<'a>) -> Result<Self, FrameError> {
        let volume = take_volume(take)?;
        let id = ChangeId { session: take.take_u64("a session")?, number: take.take_u64("a change's number")? };
        let answered = take.take_u64("a change's number")?;
        let bits = take.take_u8("the flags of a change")?;
        if bits > 3 {
            return Err(FrameError::Value { what: "the flags of a change", value: bits.into() });
        }
        let known = [take_identity(take)?, take_identity(take)?];
        let (caller, call) = (WireCaller::take(take)?, take_call(take)?);
        let (again, marked) = (bits & 1 != 0, bits & 2 != 0);
        Ok(WriteRequest { volume, id, answered, again, marked, known, caller, call, payload: &[] })
    }

    /// The request with its bytes, which are the value of an extended attribute where one is set.
    pub(crate) fn with_payload(mut self, payload: &'a [u8]) -> Result<Self, FrameError> {
        match &mut self.call {
            WriteCall::Change(Change::SetXattr { value, .. })
            | WriteCall::AttrOpen { call: OpenAttrCall::Set { value, .. }, .. } => *value = payload,
            WriteCall::Write { .. } => {}
            _ if payload.is_empty() => {}
            _ => return Err(FrameError::Value { what: "the payload of a request", value: payload.len() as u64 }),
        }
        if payload.len() > MAX_WRITE {
            let (len, max) = (payload.len() as u64, MAX_WRITE as u64);
            return Err(FrameError::TooLong { what: "the bytes of a write", len, max });
        }
        Ok(WriteRequest { payload, ..self })
    }
}

/// Before the bytes of an identity: there is none, it may belong to a later object, or it lasts.
const NO_IDENTITY: u8 = 0;
const REUSED_IDENTITY: u8 = 1;
const LASTING_IDENTITY: u8 = 2;

pub(crate) fn put_identity(identity: Option<&FileIdentity>, out: &mut Vec<u8>) {
    let Some(identity) = identity else { return out.put_u8(NO_IDENTITY) };
    out.put_u8(if identity.is_lasting() { LASTING_IDENTITY } else { REUSED_IDENTITY });
    out.extend_from_slice(identity.bytes());
}

pub(crate) fn take_identity(take: &mut ByteCursor<'_>) -> Result<Option<FileIdentity>, FrameError> {
    let kind = take.take_u8("whether an identity follows")?;
    match kind {
        NO_IDENTITY => Ok(None),
        REUSED_IDENTITY | LASTING_IDENTITY => {
            Ok(Some(FileIdentity::new(take.take_array("an identity")?, kind == LASTING_IDENTITY)))
        }
        value => Err(FrameError::Value { what: "whether an identity follows", value: value.into() }),
    }
}

pub(crate) fn put_time(time: FileTime, out: &mut Vec<u8>) {
    out.put_u64(time.seconds as u64);
    out.put_u32(time.nanos);
}

pub(crate) fn take_time(take: &mut ByteCursor<'_>) -> Result<FileTime, FrameError> {
    let (seconds, nanos) = (take.take_u64("a time")? as i64, take.take_u32("a time")?);
    if nanos >= 1_000_000_000 {
        return Err(FrameError::Value { what: "the nanoseconds of a time", value: nanos.into() });
    }
    Ok(FileTime { seconds, nanos })
}

fn put_node(node: &NodePath<'_>, out: &mut Vec<u8>) {
    out.put_bytes(node.path);
    put_identity(node.expected.as_ref(), out);
}

fn take_node<'a>(take: &mut ByteCursor<'a>) -> Result<NodePath<'a>, FrameError> {
    Ok(NodePath { path: take_path(take)?, expected: take_identity(take)? })
}

fn put_name(at: &NamePath<'_>, out: &mut Vec<u8>) {
    put_node(&at.directory, out);
    out.put_bytes(at.name);
}

fn take_name<'a>(take: &mut ByteCursor<'a>) -> Result<NamePath<'a>, FrameError> {
    let at = NamePath { directory: take_node(take)?, name: take.take_bytes("a name")? };
    check_name(at.name)?;
    if at.name.contains(&b'/') {
        return Err(FrameError::Path("a slash in a name"));
    }
    Ok(at)
}

fn put_set(set: &AttrChange, out: &mut Vec<u8>) {
    for n in [set.mode, set.uid, set.gid] {
        out.put_u8(u8::from(n.is_some()));
        n.iter().for_each(|n| out.put_u32(*n));
    }
    out.put_u8(u8::from(set.size.is_some()));
    set.size.iter().for_each(|size| out.put_u64(*size));
    for time in [set.atime, set.mtime] {
        match time {
            None => out.put_u8(0),
            Some(NewTime::Now) => out.put_u8(1),
            Some(NewTime::At(time)) => {
                out.put_u8(2);
                put_time(time, out);
            }
        }
    }
}

fn take_set(take: &mut ByteCursor<'_>) -> Result<AttrChange, FrameError> {
    fn number(take: &mut ByteCursor<'_>) -> Result<Option<u32>, FrameError> {
        take_switch(take, "whether an attribute follows")?.then(|| take.take_u32("an attribute")).transpose()
    }
    fn time(take: &mut ByteCursor<'_>) -> Result<Option<NewTime>, FrameError> {
        Ok(match take.take_u8("the kind of a time")? {
            0 => None,
            1 => Some(NewTime::Now),
            2 => Some(NewTime::At(take_time(take)?)),
            value => return Err(FrameError::Value { what: "the kind of a time", value: value.into() }),
        })
    }
    let (mode, uid, gid) = (number(take)?, number(take)?, number(take)?);
    let size = take_switch(take, "whether a size follows")?.then(|| take.take_u64("a size")).transpose()?;
    Ok(AttrChange { mode, uid, gid, size, atime: time(take)?, mtime: time(take)? })
}

pub(crate) fn lock_code(kind: LockKind) -> u8 {
    match kind {
        LockKind::Read => 0,
        LockKind::Write => 1,
        LockKind::Unlock => 2,
    }
}

pub(crate) fn take_lock_kind(take: &mut ByteCursor<'_>) -> Result<LockKind, FrameError> {
    Ok(match take.take_u8("the type of a lock")? {
        0 => LockKind::Read,
        1 => LockKind::Write,
        2 => LockKind::Unlock,
        value => return Err(FrameError::Value { what: "the type of a lock", value: value.into() }),
    })
}

fn put_change(change: &Change<'_>, out: &mut Vec<u8>) {
    match change {
        Change::Mkdir { at, mode } => {
            out.put_u8(1);
            put_name(at, out);
            out.put_u32(*mode);
        }
        Change::Mknod { at, mode, rdev } => {
            out.put_u8(2);
            put_name(at, out);
            out.put_u32(*mode);
            out.put_u64(*rdev);
        }
        Change::Symlink { at, target } => {
            out.put_u8(3);
            put_name(at, out);
            out.put_bytes(target);
        }
        Change::Link { from, to } => {
            out.put_u8(4);
            put_node(from, out);
            put_name(to, out);
        }
        Change::Unlink { at } => {
            out.put_u8(5);
            put_name(at, out);
        }
        Change::Rmdir { at } => {
            out.put_u8(6);
            put_name(at, out);
        }
        Change::Rename { from, to, flags } => {
            out.put_u8(7);
            put_name(from, out);
            put_name(to, out);
            out.put_u32(*flags);
        }
        Change::SetAttr { of, set } => {
            out.put_u8(8);
            put_node(of, out);
            put_set(set, out);
        }
        Change::SetXattr { of, name, value: _, flags } => {
            out.put_u8(9);
            put_node(of, out);
            out.put_bytes(name);
            out.put_u32(*flags);
        }
        Change::RemoveXattr { of, name } => {
            out.put_u8(10);
            put_node(of, out);
            out.put_bytes(name);
        }
    }
}

fn take_change<'a>(take: &mut ByteCursor<'a>) -> Result<Change<'a>, FrameError> {
    Ok(match take.take_u8("the kind of a change")? {
        1 => Change::Mkdir { at: take_name(take)?, mode: take.take_u32("a mode")? },
        2 => Change::Mknod { at: take_name(take)?, mode: take.take_u32("a mode")?, rdev: take.take_u64("a device")? },
        3 => Change::Symlink { at: take_name(take)?, target: take.take_bytes("a link's target")? },
        4 => Change::Link { from: take_node(take)?, to: take_name(take)? },
        5 => Change::Unlink { at: take_name(take)? },
        6 => Change::Rmdir { at: take_name(take)? },
        7 => Change::Rename { from: take_name(take)?, to: take_name(take)?, flags: take.take_u32("flags")? },
        8 => Change::SetAttr { of: take_node(take)?, set: take_set(take)? },
        9 => {
            let (of, name) = (take_node(take)?, take.take_bytes("an attribute's name")?);
            Change::SetXattr { of, name, value: &[], flags: take.take_u32("flags")? }
        }
        10 => Change::RemoveXattr { of: take_node(take)?, name: take.take_bytes("an attribute's name")? },
        value => return Err(FrameError::Value { what: "the kind of a change", value: value.into() }),
    })
}

fn put_range(range: &LockRange, out: &mut Vec<u8>) {
    out.put_u64(range.start);
    out.put_u64(range.end);
}

fn take_range(take: &mut ByteCursor<'_>) -> Result<LockRange, FrameError> {
    Ok(LockRange { start: take.take_u64("a lock's start")?, end: take.take_u64("a lock's end")? })
}

impl WriteCall<'_> {
    /// The number on the wire, and a name for messages.
    fn code(&self) -> (u8, &'static str) {
        match self {
            WriteCall::Capabilities => (1, "abilities of the source"),
            WriteCall::Space => (2, "sizes of the source"),
            WriteCall::SyncAll => (3, "sync of the source"),
            WriteCall::Stat(_) => (4, "attributes"),
            WriteCall::Lookup(_) => (5, "lookup"),
            WriteCall::ReadLink(_) => (6, "target of link"),
            WriteCall::Access(..) => (7, "rights"),
            WriteCall::GetXattr(..) => (8, "extended attribute"),
            WriteCall::ListXattr(_) => (9, "extended attributes"),
            WriteCall::Open { .. } => (10, "opening"),
            WriteCall::Create { .. } => (11, "creation"),
            WriteCall::CreateUnnamed { .. } => (12, "creation of a file without a name"),
            WriteCall::LinkOpen { .. } => (13, "naming of an open file"),
            WriteCall::OpenDirectory { .. } => (14, "opening of a directory"),
            WriteCall::Change(_) => (15, "change"),
            WriteCall::Read { .. } => (16, "read of an open file"),
            WriteCall::Write { .. } => (17, "write"),
            WriteCall::Allocate { .. } => (18, "allocation"),
            WriteCall::CopyRange { .. } => (19, "copy"),
            WriteCall::Seek { .. } => (20, "search for data or a hole"),
            WriteCall::Sync { .. } => (21, "sync"),
            WriteCall::Flush { .. } => (22, "flush"),
            WriteCall::StatOpen { .. } => (23, "attributes of an open object"),
            WriteCall::SetAttrOpen { .. } => (24, "change of an open object's attributes"),
            WriteCall::TestLock { .. } => (25, "test of a lock"),
            WriteCall::SetLock { .. } => (26, "lock"),
            WriteCall::ReadDirectory { .. } => (27, "listing of an open directory"),
            WriteCall::Close { .. } => (28, "close"),
            WriteCall::Renew => (29, "renewal of a session"),
            WriteCall::Reopen { .. } => (30, "second opening of an open file"),
            WriteCall::AttrOpen { .. } => (31, "rights or extended attributes of an open object"),
            WriteCall::FindGrant { .. } => (32, "search for a granted lock"),
            WriteCall::OpenAgain { .. } => (33, "opening of a file of a lost node"),
        }
    }

    /// A name for messages.
    pub fn name(&self) -> &'static str {
        self.code().1
    }

    /// The path for messages, where the call has one.
    pub fn path(&self) -> Option<&[u8]> {
        match self {
            WriteCall::Stat(at)
            | WriteCall::ReadLink(at)
            | WriteCall::Access(at, _)
            | WriteCall::GetXattr(at, _)
            | WriteCall::ListXattr(at)
            | WriteCall::Open { at, .. }
            | WriteCall::OpenAgain { at, .. }
            | WriteCall::CreateUnnamed { directory: at, .. }
            | WriteCall::OpenDirectory { at, .. } => Some(at.path),
            _ => None,
        }
    }
}

fn put_new_file(flags: OpenFlags, mode: u32, file: u64, out: &mut Vec<u8>) {
    out.put_u32(flags.bits());
    out.put_u32(mode);
    out.put_u64(file);
}

fn put_lock(owner: u64, range: &LockRange, kind: LockKind, out: &mut Vec<u8>) {
    out.put_u64(owner);
    put_range(range, out);
    out.put_u8(lock_code(kind));
}

fn put_call(call: &WriteCall<'_>, out: &mut Vec<u8>) {
    out.put_u8(call.code().0);
    match call {
        WriteCall::Capabilities | WriteCall::Space | WriteCall::SyncAll | WriteCall::Renew => {}
        WriteCall::Stat(at) | WriteCall::ReadLink(at) | WriteCall::ListXattr(at) => put_node(at, out),
        WriteCall::Lookup(at) => put_name(at, out),
        WriteCall::Access(at, mask) => {
            put_node(at, out);
            out.put_u32(*mask);
        }
        WriteCall::GetXattr(at, name) => {
            put_node(at, out);
            out.put_bytes(name);
        }
        WriteCall::Open { at, flags, file } => {
            put_node(at, out);
            out.put_u32(flags.bits());
            out.put_u64(*file);
        }
        WriteCall::Create { at, flags, mode, file } => {
            put_name(at, out);
            put_new_file(*flags, *mode, *file, out);
        }
        WriteCall::CreateUnnamed { directory, flags, mode, file } => {
            put_node(directory, out);
            put_new_file(*flags, *mode, *file, out);
        }
        WriteCall::Reopen { of, flags, file } => {
            out.put_u64(*of);
            out.put_u32(flags.bits());
            out.put_u64(*file);
        }
        WriteCall::OpenAgain { at, flags, file, pending } => {
            put_node(at, out);
            out.put_u32(flags.bits());
            for n in [*file, pending.known, pending.next] {
                out.put_u64(n);
            }
        }
        WriteCall::LinkOpen { file, to } => {
            out.put_u64(*file);
            put_name(to, out);
        }
        WriteCall::OpenDirectory { at, file } => {
            put_node(at, out);
            out.put_u64(*file);
        }
        WriteCall::Change(change) => put_change(change, out),
        WriteCall::Read { file, offset, len } => {
            out.put_u64(*file);
            out.put_u64(*offset);
            out.put_u32(*len);
        }
        WriteCall::Write { file, offset, append, lose_privileges, flush } => {
            out.put_u64(*file);
            out.put_u64(*offset);
            out.put_u8(u8::from(*lose_privileges) | u8::from(*flush) << 1 | u8::from(*append) << 2);
        }
        WriteCall::Allocate { file, mode, offset, len } => {
            out.put_u64(*file);
            out.put_u32(*mode);
            out.put_u64(*offset);
            out.put_u64(*len);
        }
        WriteCall::CopyRange { file, offset, to, to_offset, len } => {
            for n in [file, offset, to, to_offset, len] {
                out.put_u64(*n);
            }
        }
        WriteCall::Seek { file, offset, whence } => {
            out.put_u64(*file);
            out.put_u64(*offset);
            out.put_u32(*whence);
        }
        WriteCall::Sync { file, data_only } => {
            out.put_u64(*file);
            out.put_u8(u8::from(*data_only));
        }
        WriteCall::Flush { file } | WriteCall::StatOpen { file } => out.put_u64(*file),
        WriteCall::Close { opened_below, files } => {
            out.put_u64(*opened_below);
            out.put_bytes(files.0.as_flattened());
        }
        WriteCall::SetAttrOpen { file, set } => {
            out.put_u64(*file);
            put_set(set, out);
        }
        WriteCall::AttrOpen { file, call } => {
            out.put_u64(*file);
            put_attr_call(call, out);
        }
        WriteCall::TestLock { file, owner, range, kind } => {
            out.put_u64(*file);
            put_lock(*owner, range, *kind, out);
        }
        WriteCall::SetLock { file, family, owner, range, kind } => {
            out.put_u64(*file);
            out.put_u8(u8::from(*family == LockFamily::Flock));
            put_lock(*owner, range, *kind, out);
        }
        WriteCall::FindGrant { of, family, range, kind } => {
            put_identity(Some(of), out);
            out.put_u8(u8::from(*family == LockFamily::Flock));
            put_range(range, out);
            out.put_u8(lock_code(*kind));
        }
        WriteCall::ReadDirectory { file, from, max, attrs } => {
            out.put_u64(*file);
            out.put_u64(*from);
            out.put_u32(*max);
            out.put_u8(u8::from(*attrs));
        }
    }
}

fn take_flags(take: &mut ByteCursor<'_>) -> Result<OpenFlags, FrameError> {
    take.take_u32("flags").map(OpenFlags::new)
}

fn take_call<'a>(take: &mut ByteCursor<'a>) -> Result<WriteCall<'a>, FrameError> {
    const FILE: &str = "the number of an open file";
    Ok(match take.take_u8("the kind of a call")? {
        1 => WriteCall::Capabilities,
        2 => WriteCall::Space,
        3 => WriteCall::SyncAll,
        4 => WriteCall::Stat(take_node(take)?),
        5 => WriteCall::Lookup(take_name(take)?),
        6 => WriteCall::ReadLink(take_node(take)?),
        7 => WriteCall::Access(take_node(take)?, take.take_u32("rights")?),
        8 => WriteCall::GetXattr(take_node(take)?, take.take_bytes("an attribute's name")?),
        9 => WriteCall::ListXattr(take_node(take)?),
        10 => WriteCall::Open { at: take_node(take)?, flags: take_flags(take)?, file: take.take_u64(FILE)? },
        11 => WriteCall::Create {
            at: take_name(take)?,
            flags: take_flags(take)?,
            mode: take.take_u32("a mode")?,
            file: take.take_u64(FILE)?,
        },
        12 => WriteCall::CreateUnnamed {
            directory: take_node(take)?,
            flags: take_flags(take)?,
            mode: take.take_u32("a mode")?,
            file: take.take_u64(FILE)?,
        },
        13 => WriteCall::LinkOpen { file: take.take_u64(FILE)?, to: take_name(take)? },
        14 => WriteCall::OpenDirectory { at: take_node(take)?, file: take.take_u64(FILE)? },
        15 => WriteCall::Change(take_change(take)?),
        16 => WriteCall::Read {
            file: take.take_u64(FILE)?,
            offset: take.take_u64("an offset")?,
            len: take.take_u32("a read's length")?,
        },
        17 => {
            let (file, offset) = (take.take_u64(FILE)?, take.take_u64("an offset")?);
            let bits = take.take_u8("the flags of a write")?;
            if bits > 7 {
                return Err(FrameError::Value { what: "the flags of a write", value: bits.into() });
            }
            let (lose_privileges, flush, append) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            WriteCall::Write { file, offset, append, lose_privileges, flush }
        }
        18 => WriteCall::Allocate {
            file: take.take_u64(FILE)?,
            mode: take.take_u32("a mode")?,
            offset: take.take_u64("an offset")?,
            len: take.take_u64("a length")?,
        },
        19 => WriteCall::CopyRange {
            file: take.take_u64(FILE)?,
            offset: take.take_u64("an offset")?,
            to: take.take_u64(FILE)?,
            to_offset: take.take_u64("an offset")?,
            len: take.take_u64("a length")?,
        },
        20 => WriteCall::Seek {
            file: take.take_u64(FILE)?,
            offset: take.take_u64("an offset")?,
            whence: take.take_u32("a direction")?,
        },
        21 => WriteCall::Sync { file: take.take_u64(FILE)?, data_only: take_switch(take, "whether attributes wait")? },
        22 => WriteCall::Flush { file: take.take_u64(FILE)? },
        23 => WriteCall::StatOpen { file: take.take_u64(FILE)? },
        24 => WriteCall::SetAttrOpen { file: take.take_u64(FILE)?, set: take_set(take)? },
        25 => WriteCall::TestLock {
            file: take.take_u64(FILE)?,
            owner: take.take_u64("a lock's owner")?,
            range: take_range(take)?,
            kind: take_lock_kind(take)?,
        },
        26 => {
            let file = take.take_u64(FILE)?;
            let flock = take_switch(take, "the family of a lock")?;
            WriteCall::SetLock {
                file,
                family: if flock { LockFamily::Flock } else { LockFamily::Posix },
                owner: take.take_u64("a lock's owner")?,
                range: take_range(take)?,
                kind: take_lock_kind(take)?,
            }
        }
        32 => {
            let missing = FrameError::Value { what: "the object of a lock", value: 0 };
            let of = take_identity(take)?.ok_or(missing)?;
            let flock = take_switch(take, "the family of a lock")?;
            let family = if flock { LockFamily::Flock } else { LockFamily::Posix };
            WriteCall::FindGrant { of, family, range: take_range(take)?, kind: take_lock_kind(take)? }
        }
        27 => WriteCall::ReadDirectory {
            file: take.take_u64(FILE)?,
            from: take.take_u64("a position")?,
            max: take.take_u32("a page's length")?,
            attrs: take_switch(take, "whether attributes follow")?,
        },
        28 => {
            let opened_below = take.take_u64("the number of a change")?;
            WriteCall::Close { opened_below, files: FileNumbers::take(take)? }
        }
        29 => WriteCall::Renew,
        30 => WriteCall::Reopen { of: take.take_u64(FILE)?, flags: take_flags(take)?, file: take.take_u64(FILE)? },
        31 => WriteCall::AttrOpen { file: take.take_u64(FILE)?, call: take_attr_call(take)? },
        33 => WriteCall::OpenAgain {
            at: take_node(take)?,
            flags: take_flags(take)?,
            file: take.take_u64(FILE)?,
            pending: PendingVersion {
                known: take.take_u64("a pending version")?,
                next: take.take_u64("a pending version")?,
            },
        },
        value => return Err(FrameError::Value { what: "the kind of a call", value: value.into() }),
    })
}
