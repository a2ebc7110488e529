//! Changes that another process may have made before the process was lost, and the evidence of these changes in the names and
//! access times of a source. Knows neither nodes nor sessions.
//!
//! | change | made, when | not made, when |
//! |---|---|---|
//! | rename | the new name leads to the known object and the old name does not | the old name leads to it |
//! | exchange | the new name leads to the known object | the old name leads to it |
//! | link, name for an open file | the new name leads to the object | otherwise |
//! | unlink, rmdir | the name leads to nothing, or to another object than the known one | it leads to the known one |
//! | mkdir, mknod, symlink, create | the object has the mark of this change, or was made as by this change and at its time | the name leads to nothing |
//! | append | the bytes, as far as the file goes, are at the known end: the rest is written | the file ends there |
//!
//! Nothing else shows whether a change was made. Attributes and extended attributes are set again.

use crate::writes::{
    AttrChange, Caller, Change, FileIdentity, FileTime, NamePath, NewTime, NodeAttr, NodePath, WritableVolume,
};
use spurline_types::errno::{EIO, ENOENT, ENOTDIR};
use spurline_types::{Error, ErrorKind, Result};

/// From `linux/fs.h`.
const RENAME_EXCHANGE: u32 = 2;

/// Distinguishes a change from all others. If possible, a source stores the mark with the object that the change makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeMark(pub u128);

/// A change that is requested again after the loss of the process that got the first request.
#[derive(Debug, Clone, Copy)]
pub struct RepeatedChange<'a> {
    /// The call.
    pub call: RepeatedCall<'a>,
    /// The mark that the change has had from the first request on.
    pub mark: ChangeMark,
    /// The object that the name led to before the change, if that is known; for an exchange also that of the other name.
    pub known: [Option<FileIdentity>; 2],
    /// The caller.
    pub caller: &'a Caller,
}

/// A call that has another result the second time.
#[derive(Debug, Clone, Copy)]
pub enum RepeatedCall<'a> {
    /// [`WritableVolume::create_marked`] with `O_EXCL`.
    CreateExclusive(NamePath<'a>),
    /// [`WritableVolume::link_open`] to this name, of the known object.
    LinkOpen(NamePath<'a>),
    /// [`WritableVolume::change_marked`].
    Change(Change<'a>),
}

/// What a source says about a [`RepeatedChange`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangeOutcome {
    /// The change was made; the attributes of the new object, as the change returns.
    Made(Option<NodeAttr>),
    /// The change was not made, or has the same result the second time.
    NotMade,
    /// The source does not show whether the change was made, for this reason.
    Unclear(&'static str),
}

/// The outcome of a change by names, identities and access times.
pub fn outcome_by_names(volume: &dyn WritableVolume, repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
    let RepeatedChange { call, mark, known, caller } = *repeated;
    outcome_by_objects(volume, call, known, caller, |found| found.atime.nanos == mark_nanos(mark))
}

/// The outcome of a change by names and identities, where `is_made` tells an object that the change has made from others.
pub fn outcome_by_objects(
    volume: &dyn WritableVolume,
    call: RepeatedCall<'_>,
    known: [Option<FileIdentity>; 2],
    caller: &Caller,
    is_made: impl Fn(&NodeAttr) -> bool,
) -> Result<ChangeOutcome> {
    let find = |at: NamePath<'_>| find_name(volume, at, caller);
    match call {
        RepeatedCall::CreateExclusive(at)
        | RepeatedCall::Change(Change::Mkdir { at, .. } | Change::Mknod { at, .. } | Change::Symlink { at, .. }) => {
            Ok(match find(at)? {
                None => ChangeOutcome::NotMade,
                Some(found) if is_made(&found) => ChangeOutcome::Made(Some(found)),
                Some(_) => ChangeOutcome::Unclear("the name exists, without the mark of this change"),
            })
        }
        RepeatedCall::Change(Change::Link { from, to }) => {
            let object = volume.stat(from, caller)?;
            Ok(match find(to)? {
                Some(named) if named.identity == object.identity => ChangeOutcome::Made(Some(named)),
                _ => ChangeOutcome::NotMade,
            })
        }
        RepeatedCall::Change(Change::Unlink { at } | Change::Rmdir { at }) => Ok(match (find(at)?, known[0]) {
            (Some(found), Some(known)) if found.identity == known => ChangeOutcome::NotMade,
            (_, Some(_)) => ChangeOutcome::Made(None),
            (Some(_), None) => ChangeOutcome::NotMade,
            (None, None) => ChangeOutcome::Unclear("the name leads to nothing, and did perhaps before"),
        }),
        RepeatedCall::Change(Change::Rename { from, to, flags }) => {
            let Some(known) = known[0] else {
                return Ok(ChangeOutcome::Unclear("the mount did not know the object before"));
            };
            let is_at_old = find(from)?.is_some_and(|found| found.identity == known);
            let is_at_new = find(to)?.is_some_and(|found| found.identity == known);
            Ok(match (is_at_old, is_at_new) {
                (false, true) => ChangeOutcome::Made(None),
                // Two names of the same object: a rename between the two changes nothing.
                (true, _) if flags & RENAME_EXCHANGE == 0 => ChangeOutcome::NotMade,
                (true, false) => ChangeOutcome::NotMade,
                _ => ChangeOutcome::Unclear("neither name leads to the object"),
            })
        }
        RepeatedCall::LinkOpen(to) => Ok(match (find(to)?, known[0]) {
            (Some(named), Some(known)) if named.identity == known => ChangeOutcome::Made(Some(named)),
            (None, _) | (Some(_), Some(_)) => ChangeOutcome::NotMade,
            (Some(_), None) => ChangeOutcome::Unclear("the name exists"),
        }),
        RepeatedCall::Change(Change::SetAttr { .. } | Change::SetXattr { .. } | Change::RemoveXattr { .. }) => {
            Ok(ChangeOutcome::NotMade)
        }
    }
}

/// Makes a change of names that a process which has ended may have made, unless the source recognises by the mark that it was made; the
/// attributes as [`WritableVolume::change_marked`] has them.
///
/// # Errors
/// `EIO` if the source does not show whether the change was made; as [`WritableVolume::change_marked`].
pub fn repeat_marked(volume: &dyn WritableVolume, repeated: &RepeatedChange<'_>) -> Result<Option<NodeAttr>> {
    let RepeatedCall::Change(change) = repeated.call else {
        return Err(Error::new(ErrorKind::Invalid, "an open is no change of names"));
    };
    match volume.outcome_of(repeated)? {
        ChangeOutcome::Made(attr) => Ok(attr),
        ChangeOutcome::NotMade => {
            let made = volume.change_marked(&change, repeated.caller, Some(repeated.mark));
            let Err(error) = made else { return made };
            // The source has executed the first request meanwhile.
            match volume.outcome_of(repeated)? {
                ChangeOutcome::Made(attr) => Ok(attr),
                ChangeOutcome::NotMade | ChangeOutcome::Unclear(_) => Err(error),
            }
        }
        // The mount does not know the name any more, because it has removed it.
        ChangeOutcome::Unclear(_) if matches!(change, Change::Unlink { .. }) => Ok(None),
        ChangeOutcome::Unclear(why) => Err(Error::new(ErrorKind::Io(EIO), why)),
    }
}

/// The object that a name leads to; `None` when it leads to nothing.
pub fn find_name(volume: &dyn WritableVolume, at: NamePath<'_>, caller: &Caller) -> Result<Option<NodeAttr>> {
    match volume.lookup(at, caller) {
        Ok(attr) => Ok(Some(attr)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) if matches!(error.kind(), ErrorKind::Io(ENOENT | ENOTDIR)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Stores a mark as the fraction of the second of a new object's access time; the attributes after that. A source that can't
/// store the mark does not change the object.
pub fn mark_access_time(volume: &dyn WritableVolume, at: &NamePath<'_>, attr: NodeAttr, mark: ChangeMark) -> NodeAttr {
    let path = at.path();
    let of = NodePath { path: &path, expected: Some(attr.identity) };
    let atime = FileTime { nanos: mark_nanos(mark), ..attr.atime };
    let set = AttrChange { atime: Some(NewTime::At(atime)), ..AttrChange::default() };
    let marked = volume.change(&Change::SetAttr { of, set }, &Caller::default());
    marked.ok().flatten().unwrap_or(attr)
}

/// A mark in nanoseconds.
fn mark_nanos(mark: ChangeMark) -> u32 {
    let high = (mark.0 >> 64) as u64;
    let low = mark.0 as u64;
    let mixed = (high ^ low.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    // Never a whole number of microseconds, which clocks of some sources give.
    ((mixed >> 32) % 999_999 * 1000 + 1 + (mixed & 0x1ff)) as u32
}
