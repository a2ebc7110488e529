//! A change that another process may have executed before it died: what the source shows about it. It knows no session.
//!
//! | change | executed, when | not executed, when |
//! |---|---|---|
//! | rename | the new name leads to the known object and the old one does not | the old name leads to it |
//! | exchange | the new name leads to the known object | the old name leads to it |
//! | link | the new name leads to the object | otherwise |
//! | unlink, rmdir | the name leads to nothing, or to another object than the known one | it leads to the known one |
//! | mkdir, mknod, symlink, exclusive create | the object has the mark of this change | the name leads to nothing |
//! | append | the bytes, as far as the file goes, are at the known end: the rest is written | the file ends there |
//!
//! Anything else can't be known, and the mount reports `EIO` with the reason. A mark is the fraction of the second of
//! the access time, which the node sets after it made an object. Attributes and extended attributes are set again.

use spurline_proto::{ChangeId, OpenFlags, WriteAnswer, WriteCall};
use spurline_types::{ErrorKind, Result};
use spurline_volume::writes::{
    AttrChange, Caller, Change, FileIdentity, FileTime, NamePath, NewTime, NodeAttr, NodePath, WritableFile,
    WritableVolume,
};

/// From `asm-generic/fcntl.h` and `linux/fs.h`.
const O_RDONLY: u32 = 0;
const RENAME_EXCHANGE: u32 = 2;
/// From `asm-generic/errno-base.h`.
const ENOENT: i32 = 2;
const ENOTDIR: i32 = 20;

/// The mark of a change, in nanoseconds.
fn mark_of(id: ChangeId) -> u32 {
    let mixed = (id.session ^ id.number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    // Never a whole number of microseconds, which clocks of some sources give.
    ((mixed >> 32) % 999_999 * 1000 + 1 + (mixed & 0x1ff)) as u32
}

/// Marks an object that was made by change `id`; the attributes after that. A source that can't store the mark leaves
/// the object as it is.
pub(super) fn mark_new(
    volume: &dyn WritableVolume,
    at: &NamePath<'_>,
    attr: &NodeAttr,
    id: ChangeId,
) -> Option<NodeAttr> {
    let path = join_path(at.directory.path, at.name);
    let of = NodePath { path: &path, expected: Some(attr.identity) };
    let atime = FileTime { nanos: mark_of(id), ..attr.atime };
    let set = AttrChange { atime: Some(NewTime::At(atime)), ..AttrChange::default() };
    volume.change(&Change::SetAttr { of, set }, &Caller::default()).ok().flatten()
}

/// The path of `name` in `directory`.
pub(super) fn join_path(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, name].join(&b'/') }
}

/// A change that may have been executed.
pub(super) struct RepeatedChange<'a> {
    pub volume: &'a dyn WritableVolume,
    pub id: ChangeId,
    pub known: [Option<FileIdentity>; 2],
    pub caller: &'a Caller,
}

impl RepeatedChange<'_> {
    /// The answer if the change was executed, or if that can't be known; `None` if it was not.
    pub fn find_outcome(&self, call: &WriteCall<'_>) -> Result<Option<WriteAnswer>> {
        match call {
            WriteCall::Create { at, flags, .. } if flags.has_any(OpenFlags::EXCLUSIVE) => self.made(at),
            WriteCall::Change(Change::Mkdir { at, .. } | Change::Mknod { at, .. } | Change::Symlink { at, .. }) => {
                self.made(at)
            }
            WriteCall::Change(Change::Link { from, to }) => {
                let (object, named) = (self.volume.stat(*from, self.caller)?, self.find(to)?);
                Ok(named.filter(|named| named.identity == object.identity).map(WriteAnswer::Attr))
            }
            WriteCall::Change(Change::Unlink { at } | Change::Rmdir { at }) => match (self.find(at)?, self.known[0]) {
                (Some(found), Some(known)) if found.identity == known => Ok(None),
                (_, Some(_)) => Ok(Some(WriteAnswer::Done)),
                (Some(_), None) => Ok(None),
                (None, None) => Ok(Some(self.unclear("the name leads to nothing, and did perhaps before"))),
            },
            WriteCall::Change(Change::Rename { from, to, flags }) => {
                let Some(known) = self.known[0] else {
                    return Ok(Some(self.unclear("the mount did not know the object before")));
                };
                let is_known = |found: Option<NodeAttr>| found.is_some_and(|found| found.identity == known);
                match (is_known(self.find(from)?), is_known(self.find(to)?)) {
                    (false, true) => Ok(Some(WriteAnswer::Done)),
                    // Two names of one object: a rename between them changes nothing.
                    (true, _) if flags & RENAME_EXCHANGE == 0 => Ok(None),
                    (true, false) => Ok(None),
                    _ => Ok(Some(self.unclear("neither name leads to the object"))),
                }
            }
            WriteCall::LinkOpen { to, .. } => match self.find(to)? {
                None => Ok(None),
                Some(_) => Ok(Some(self.unclear("the name exists"))),
            },
            // Executed twice, they have the same result.
            _ => Ok(None),
        }
    }

    fn find(&self, at: &NamePath<'_>) -> Result<Option<NodeAttr>> {
        match self.volume.lookup(*at, self.caller) {
            Ok(attr) => Ok(Some(attr)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) if matches!(error.kind(), ErrorKind::Io(ENOENT | ENOTDIR)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn made(&self, at: &NamePath<'_>) -> Result<Option<WriteAnswer>> {
        let Some(found) = self.find(at)? else { return Ok(None) };
        if found.atime.nanos == mark_of(self.id) {
            return Ok(Some(WriteAnswer::Attr(found)));
        }
        Ok(Some(self.unclear("the name exists, without the mark of this change")))
    }

    fn unclear(&self, why: &str) -> WriteAnswer {
        WriteAnswer::Unclear(format!("a node was lost during change {}: {why}", self.id.number))
    }
}

/// How many of the bytes of an append at the end `at` the source has, if another process may have executed it. A lost host
/// can take the end of a file with it. `None` if the file shows neither.
pub(super) fn find_appended(file: &dyn WritableFile, at: u64, bytes: &[u8]) -> Result<Option<usize>> {
    let there = match file.stat()?.size.checked_sub(at) {
        None => return Ok(None),
        Some(0) => return Ok(Some(0)),
        Some(there) => usize::try_from(there).unwrap_or(usize::MAX).min(bytes.len()),
    };
    // It may be open for writing only.
    let reader = file.reopen(O_RDONLY, &Caller::default())?;
    let mut found = vec![0; there];
    let same = reader.read_at(at, &mut found)? == there && found == bytes[..there];
    Ok(same.then_some(there))
}
