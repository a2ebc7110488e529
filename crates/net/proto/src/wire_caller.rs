//! The caller of a request on the wire. Knows the encoding alone, and no call.

use crate::FrameError;
use crate::codec::{ByteCursor, PutValue};
use spurline_volume::writes::Caller;

/// The most supplementary groups of a caller: the kernel's own limit.
pub const MAX_GROUPS: usize = 65_536 / 8;
/// The bit beside the mask that says [`Caller::rights_checked`]. A node without this bit leaves the bit out with the mask.
const RIGHTS_CHECKED: u32 = 1 << 31;

/// The caller of a request, as the mount reports the caller. Decoding borrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WireCaller<'a> {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its thread, for messages.
    pub pid: u32,
    /// Its file mode creation mask, and a flag.
    mask_and_flag: u32,
    /// Its supplementary groups, four bytes each.
    groups: &'a [u8],
}

impl<'a> WireCaller<'a> {
    /// The caller with the groups encoded into `scratch`.
    pub fn new(caller: &Caller, scratch: &'a mut Vec<u8>) -> Self {
        scratch.clear();
        caller.groups.iter().for_each(|group| scratch.put_u32(*group));
        let flag = if caller.rights_checked { RIGHTS_CHECKED } else { 0 };
        let mask_and_flag = caller.umask & !RIGHTS_CHECKED | flag;
        WireCaller { uid: caller.uid, gid: caller.gid, pid: caller.pid, mask_and_flag, groups: scratch }
    }

    /// The caller as the writable volume has it.
    pub fn to_caller(&self) -> Caller {
        let groups = self.groups.as_chunks::<4>().0.iter().map(|group| u32::from_le_bytes(*group)).collect();
        let umask = self.mask_and_flag & !RIGHTS_CHECKED;
        let rights_checked = self.mask_and_flag & RIGHTS_CHECKED != 0;
        Caller { uid: self.uid, gid: self.gid, groups, pid: self.pid, umask, rights_checked }
    }

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        for n in [self.uid, self.gid, self.pid, self.mask_and_flag] {
            out.put_u32(n);
        }
        out.put_bytes(self.groups);
    }

    pub(crate) fn take(take: &mut ByteCursor<'a>) -> Result<Self, FrameError> {
        let caller = WireCaller {
            uid: take.take_u32("a user")?,
            gid: take.take_u32("a group")?,
            pid: take.take_u32("a thread")?,
            mask_and_flag: take.take_u32("a mask")?,
            groups: take.take_bytes("groups")?,
        };
        if !caller.groups.len().is_multiple_of(4) {
            return Err(FrameError::Value { what: "the length of groups", value: caller.groups.len() as u64 });
        }
        if caller.groups.len() / 4 > MAX_GROUPS {
            let len = caller.groups.len() as u64 / 4;
            let max = MAX_GROUPS as u64;
            return Err(FrameError::TooLong { what: "the groups of a caller", len, max });
        }
        Ok(caller)
    }
}
