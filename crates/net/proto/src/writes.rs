//! Requests that change the files of a source, or read them past every cache. The module knows the encoding of the writable
//! volume's values, and neither nodes nor the order of calls.
//!
//! A request that changes something carries the number of the change within the mount's session. The node keeps its
//! answer until a later request says that it arrived, so that a request sent twice is executed once. Open files and
//! directories are named by numbers that the mount chooses: opening is a change like any other.
//!
//! The bytes of a write, or the value of an extended attribute, are the payload of the request (see the crate's head).

use crate::codec::{ByteCursor, PutValue};
use crate::request::{VolumeId, check_name, take_path, take_volume};
use crate::wire_caller::WireCaller;
use crate::wire_value::{WireValue, wire_enum, wire_struct};
use crate::{FrameError, MAX_WRITE, OpenFlags};
use spurline_volume::repeated::ChangeMark;
use spurline_volume::writes::{
    AttrChange, Change, FileIdentity, FileTime, LockFamily, LockKind, LockRange, NamePath, NewTime, NodePath,
    OpenAttrCall,
};

/// Numbers of open files or of changes, eight bytes each. Decoding borrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumberList<'a>(&'a [[u8; 8]]);

impl<'a> NumberList<'a> {
    /// The numbers, encoded into `scratch`.
    pub fn new(numbers: &[u64], scratch: &'a mut Vec<[u8; 8]>) -> Self {
        scratch.clear();
        scratch.extend(numbers.iter().map(|number| number.to_le_bytes()));
        NumberList(scratch)
    }

    /// The numbers.
    pub fn iter(&self) -> impl Iterator<Item = u64> + 'a {
        self.0.iter().map(|number| u64::from_le_bytes(*number))
    }
}

impl<'a> WireValue<'a> for NumberList<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(self.0.as_flattened());
    }

    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        match take.take_bytes(what)?.as_chunks::<8>() {
            (numbers, []) => Ok(NumberList(numbers)),
            (_, rest) => Err(FrameError::Value { what: "the length of a list of numbers", value: rest.len() as u64 }),
        }
    }
}

/// One operation on a writable volume. The mount chooses the numbers of files when it opens files.
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
    /// Attributes of a name; opens the file under a new number if its user can open it.
    OpenName {
        /// The name.
        at: NamePath<'a>,
        /// The flags of the file.
        flags: OpenFlags,
        /// The number.
        file: u64,
    },
    /// Opens a file under the number that the file had in another process, which was lost. Answered by attributes where the file is open
    /// under this number already.
    OpenAgain {
        /// The file.
        at: NodePath<'a>,
        /// The flags.
        flags: OpenFlags,
        /// The number.
        file: u64,
    },
    /// Opens a file, and makes an absent file.
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
    /// Reads bytes of an open file into the payload of the answer.
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
        /// Whether the file loses privilege bits as if the caller wrote.
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
        /// The first byte there.
        offset: u64,
        /// The other file.
        to: u64,
        /// The first byte at the destination.
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
        /// Attributes, and the values.
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
        at: NodePath<'a>,
        /// The lock's family.
        family: LockFamily,
        /// Its range.
        range: LockRange,
        /// Its type.
        kind: LockKind,
    },
    /// Opens a path of a bucket under a number, for the locks of the object, whether there is an object or not.
    OpenPath {
        /// The path.
        at: NodePath<'a>,
        /// The number.
        file: u64,
        /// The mount is about to make the object: refused while another mount is.
        reserves: bool,
    },
    /// As [`WriteCall::FindGrant`], for the locks of a path of a bucket.
    FindPathLock {
        /// The path.
        at: NodePath<'a>,
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
        /// Whether each name has attributes.
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
        /// Changes below this number of the session may have opened these files, and open none later.
        opened_below: u64,
        /// Their numbers.
        files: NumberList<'a>,
    },
    /// Keeps the session and open files alive.
    Renew,
    /// Keeps the answers to these changes, and to no others that are answered: a process of the mount that has ended sent them, and
    /// the next process may send them again.
    KeepAnswers {
        /// Their numbers.
        changes: NumberList<'a>,
    },
}

/// A change of a mount, which the node makes once however often the request arrives.
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
    /// Of the change; the number is 0 for a request that changes nothing.
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
    /// Whether the request changes the source or the node's open files, so that the answer is kept.
    pub fn is_change(&self) -> bool {
        self.id.number != 0
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(self.volume.0);
        for n in [self.id.session, self.id.number, self.answered] {
            out.put_u64(n);
        }
        out.put_u8(u8::from(self.again) | u8::from(self.marked) << 1);
        self.known.iter().for_each(|known| known.put(out));
        self.caller.put(out);
        self.call.put(out);
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
        const KNOWN: &str = "an identity that the mount knows";
        let known = [WireValue::take(take, KNOWN)?, WireValue::take(take, KNOWN)?];
        let caller = WireCaller::take(take)?;
        let call = WriteCall::take(take, "a call")?;
        let again = bits & 1 != 0;
        let marked = bits & 2 != 0;
        Ok(WriteRequest { volume, id, answered, again, marked, known, caller, call, payload: &[] })
    }

    /// The request with bytes, which are the value of an extended attribute where one is set.
    pub(crate) fn with_payload(mut self, payload: &'a [u8]) -> Result<Self, FrameError> {
        match &mut self.call {
            WriteCall::Change(Change::SetXattr { value, .. })
            | WriteCall::AttrOpen { call: OpenAttrCall::Set { value, .. }, .. } => *value = payload,
            WriteCall::Write { .. } => {}
            _ if payload.is_empty() => {}
            _ => return Err(FrameError::Value { what: "the payload of a request", value: payload.len() as u64 }),
        }
        if payload.len() > MAX_WRITE {
            let len = payload.len() as u64;
            let max = MAX_WRITE as u64;
            return Err(FrameError::TooLong { what: "the bytes of a write", len, max });
        }
        Ok(WriteRequest { payload, ..self })
    }
}

impl WireValue<'_> for FileIdentity {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_lasting().put(out);
        out.extend_from_slice(self.bytes());
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        let lasting = bool::take(take, what)?;
        Ok(FileIdentity::new(take.take_array(what)?, lasting))
    }
}

impl WireValue<'_> for FileTime {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_u64(self.seconds as u64);
        out.put_u32(self.nanos);
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        let seconds = take.take_u64(what)? as i64;
        let nanos = take.take_u32(what)?;
        if nanos >= 1_000_000_000 {
            return Err(FrameError::Value { what: "the nanoseconds of a time", value: nanos.into() });
        }
        Ok(FileTime { seconds, nanos })
    }
}

impl<'a> WireValue<'a> for NodePath<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        self.path.put(out);
        self.expected.put(out);
    }

    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        Ok(NodePath { path: take_path(take)?, expected: WireValue::take(take, what)? })
    }
}

impl<'a> WireValue<'a> for NamePath<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        self.directory.put(out);
        self.name.put(out);
    }

    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        let at = NamePath { directory: WireValue::take(take, what)?, name: take.take_bytes(what)? };
        check_name(at.name)?;
        if at.name.contains(&b'/') {
            return Err(FrameError::Path("a slash in a name"));
        }
        Ok(at)
    }
}

impl WireValue<'_> for OpenFlags {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.bits());
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        take.take_u32(what).map(OpenFlags::new)
    }
}

wire_struct!(LockRange, "the range of a lock": start, end);
wire_struct!(AttrChange, "a change of attributes": mode, uid, gid, size, atime, mtime);

wire_enum! { 'a NewTime, "a new time":
    0 Now,
    1 At(time),
}

wire_enum! { 'a LockKind, "a lock":
    0 Read,
    1 Write,
    2 Unlock,
}

wire_enum! { 'a LockFamily, "a family of locks":
    0 Posix,
    1 Flock,
}

wire_enum! { 'a OpenAttrCall<'a>, "a call about attributes":
    1 Access(mask),
    2 Get(name),
    3 List,
    4 Set { name, flags; value },
    5 Remove(name),
}

wire_enum! { 'a Change<'a>, "a change":
    1 Mkdir { at, mode, implied },
    2 Mknod { at, mode, rdev },
    3 Symlink { at, target },
    4 Link { from, to },
    5 Unlink { at },
    6 Rmdir { at },
    7 Rename { from, to, flags },
    8 SetAttr { of, set },
    9 SetXattr { of, name, flags; value },
    10 RemoveXattr { of, name },
}

wire_enum! { 'a WriteCall<'a>, "a call":
    1 Capabilities,
    2 Space,
    3 SyncAll,
    4 Stat(at),
    5 Lookup(at),
    6 ReadLink(at),
    7 Access(at, mask),
    8 GetXattr(at, name),
    9 ListXattr(at),
    10 Open { at, flags, file },
    11 Create { at, flags, mode, file },
    12 CreateUnnamed { directory, flags, mode, file },
    13 LinkOpen { file, to },
    14 OpenDirectory { at, file },
    15 Change(change),
    16 Read { file, offset, len },
    17 Write { file, offset, append, lose_privileges, flush },
    18 Allocate { file, mode, offset, len },
    19 CopyRange { file, offset, to, to_offset, len },
    20 Seek { file, offset, whence },
    21 Sync { file, data_only },
    22 Flush { file },
    23 StatOpen { file },
    24 SetAttrOpen { file, set },
    25 TestLock { file, owner, range, kind },
    26 SetLock { file, family, owner, range, kind },
    27 ReadDirectory { file, from, max, attrs },
    28 Close { opened_below, files },
    29 Renew,
    30 Reopen { of, flags, file },
    31 AttrOpen { file, call },
    32 FindGrant { at, family, range, kind },
    33 OpenAgain { at, flags, file },
    35 KeepAnswers { changes },
    36 OpenPath { at, file, reserves },
    37 FindPathLock { at, family, range, kind },
    38 OpenName { at, flags, file },
}

impl WriteCall<'_> {
    /// A name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            WriteCall::Capabilities => "abilities of the source",
            WriteCall::Space => "sizes of the source",
            WriteCall::SyncAll => "sync of the source",
            WriteCall::Stat(_) => "attributes",
            WriteCall::Lookup(_) => "lookup",
            WriteCall::ReadLink(_) => "target of link",
            WriteCall::Access(..) => "rights",
            WriteCall::GetXattr(..) => "extended attribute",
            WriteCall::ListXattr(_) => "extended attributes",
            WriteCall::Open { .. } => "opening",
            WriteCall::Create { .. } => "creation",
            WriteCall::CreateUnnamed { .. } => "creation of a file without a name",
            WriteCall::LinkOpen { .. } => "naming of an open file",
            WriteCall::OpenDirectory { .. } => "opening of a directory",
            WriteCall::Change(_) => "change",
            WriteCall::Read { .. } => "read of an open file",
            WriteCall::Write { .. } => "write",
            WriteCall::Allocate { .. } => "allocation",
            WriteCall::CopyRange { .. } => "copy",
            WriteCall::Seek { .. } => "search for data or a hole",
            WriteCall::Sync { .. } => "sync",
            WriteCall::Flush { .. } => "flush",
            WriteCall::StatOpen { .. } => "attributes of an open object",
            WriteCall::SetAttrOpen { .. } => "change of an open object's attributes",
            WriteCall::TestLock { .. } => "test of a lock",
            WriteCall::SetLock { .. } => "lock",
            WriteCall::ReadDirectory { .. } => "listing of an open directory",
            WriteCall::Close { .. } => "close",
            WriteCall::Renew => "renewal of a session",
            WriteCall::KeepAnswers { .. } => "changes that may come again",
            WriteCall::Reopen { .. } => "second opening of an open file",
            WriteCall::AttrOpen { .. } => "rights or extended attributes of an open object",
            WriteCall::FindGrant { .. } | WriteCall::FindPathLock { .. } => "search for a granted lock",
            WriteCall::OpenPath { .. } => "opening of a path for locks",
            WriteCall::OpenName { .. } => "lookup and opening",
            WriteCall::OpenAgain { .. } => "opening of a file of a lost node",
        }
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
            | WriteCall::OpenPath { at, .. }
            | WriteCall::CreateUnnamed { directory: at, .. }
            | WriteCall::OpenDirectory { at, .. } => Some(at.path),
            _ => None,
        }
    }
}
