//! Turns a request that changes something into a reply. Does not know how requests arrive or how replies leave.

use crate::abi::{self, InHeader, fattr};
use crate::change_request::ChangeRequest;
use crate::dispatch::{RequestDispatcher, SlotIo, open_out};
use crate::kernel::caller_of;
use crate::reply::{ReplyReceipt, attr_out, entry_out, put_struct};
use spurline_fs::{
    CreateMode, DirName, FileEntry, FilePosition, FileService, FileWrite, FsError, FsResult, HandleRef, LockRequest,
    NewNode, OpenedFile, StatAttr,
};
use spurline_volume::writes::{
    AttrChange, FileLock, FileTime, LockConflict, LockFamily, LockKind, LockRange, NewTime, WritePlace,
};
use std::time::Duration;

impl<S: FileService> RequestDispatcher<S> {
    /// The reply to a request that changes something.
    pub(crate) fn change_reply(
        &self,
        header: &InHeader,
        request: ChangeRequest,
        io: &mut SlotIo<'_>,
    ) -> FsResult<ReplyReceipt> {
        let service = &*self.service;
        let ino = header.nodeid;
        let caller = caller_of(header);
        match request {
            ChangeRequest::Setattr(args) => {
                let fh = (args.valid & fattr::FH != 0).then_some(args.fh);
                let (attr, ttl) = service.setattr(ino, fh, &attr_change(&args), &caller)?;
                return Ok(attr_reply(io, &attr, ttl));
            }
            ChangeRequest::Link { oldnodeid, name } => {
                let entry = service.link(oldnodeid, ino, io.checked_name(name)?, &caller)?;
                return Ok(entry_reply(io, &entry));
            }
            ChangeRequest::Symlink { .. }
            | ChangeRequest::Mknod { .. }
            | ChangeRequest::Mkdir { .. }
            | ChangeRequest::Create { .. }
            | ChangeRequest::Tmpfile { .. } => return self.make_reply(header, request, io),
            ChangeRequest::Write { .. }
            | ChangeRequest::CopyFileRange(_)
            | ChangeRequest::TestLock(_)
            | ChangeRequest::SetLock { .. } => return self.file_reply(header, request, io),
            ChangeRequest::Unlink { name } => service.remove(ino, io.checked_name(name)?, false, &caller)?,
            ChangeRequest::Rmdir { name } => service.remove(ino, io.checked_name(name)?, true, &caller)?,
            ChangeRequest::Rename { name, newdir, newname, flags } => {
                let from = DirName { parent: ino, name: io.checked_name(name)? };
                let to = DirName { parent: newdir, name: io.checked_name(newname)? };
                service.rename(from, to, flags, &caller)?;
            }
            ChangeRequest::Setxattr { name, value, flags } => {
                service.setxattr(ino, io.checked_name(name)?, value.slice_of(io.body()), flags, &caller)?;
            }
            ChangeRequest::Removexattr { name } => service.removexattr(ino, io.checked_name(name)?, &caller)?,
            ChangeRequest::Fallocate { fh, offset, length, mode } => {
                let file = HandleRef { ino, fh };
                service.fallocate(FilePosition { file, offset }, length, mode, &caller)?;
                self.refresh_privileges(file);
            }
            ChangeRequest::Flush { fh, lock_owner } => service.flush(HandleRef { ino, fh }, lock_owner, &caller)?,
            ChangeRequest::Fsync { fh, data_only } => service.fsync(HandleRef { ino, fh }, data_only)?,
            ChangeRequest::Fsyncdir { fh, data_only } => service.fsyncdir(HandleRef { ino, fh }, data_only)?,
        }
        Ok(ReplyReceipt::ok(0))
    }

    /// The reply to a request that makes an object.
    fn make_reply(&self, header: &InHeader, request: ChangeRequest, io: &mut SlotIo<'_>) -> FsResult<ReplyReceipt> {
        let service = &*self.service;
        let ino = header.nodeid;
        let entry = match request {
            ChangeRequest::Symlink { name, target, group } => {
                let new = NewNode::Symlink { target: target.slice_of(io.body()) };
                service.make(ino, io.checked_name(name)?, new, &self.kernel.creator(header, 0, group))?
            }
            ChangeRequest::Mknod { name, mode, rdev, umask, group } => {
                let new = NewNode::Node { mode, rdev: decode_device(rdev) };
                service.make(ino, io.checked_name(name)?, new, &self.kernel.creator(header, umask, group))?
            }
            ChangeRequest::Mkdir { name, mode, umask, group } => {
                let new = NewNode::Directory { mode };
                service.make(ino, io.checked_name(name)?, new, &self.kernel.creator(header, umask, group))?
            }
            ChangeRequest::Create { name, flags, mode, umask, group } => {
                let how = CreateMode { flags, mode };
                let caller = self.kernel.creator(header, umask, group);
                let name = io.checked_name(name)?;
                let (entry, opened) = service.create(ino, name, how, &caller, &self.kernel.side())?;
                return Ok(create_reply(io, &entry, &opened));
            }
            ChangeRequest::Tmpfile { flags, mode, umask, group } => {
                let how = CreateMode { flags, mode };
                let caller = self.kernel.creator(header, umask, group);
                let (entry, opened) = service.tmpfile(ino, how, &caller, &self.kernel.side())?;
                return Ok(create_reply(io, &entry, &opened));
            }
            _ => return Err(FsError::NotServed),
        };
        Ok(entry_reply(io, &entry))
    }

    /// The reply to a request on an open file that returns something.
    fn file_reply(&self, header: &InHeader, request: ChangeRequest, io: &mut SlotIo<'_>) -> FsResult<ReplyReceipt> {
        let service = &*self.service;
        let ino = header.nodeid;
        let caller = caller_of(header);
        Ok(match request {
            ChangeRequest::Write { fh, offset, data, write_flags, flags } => {
                let write = FileWrite {
                    offset,
                    place: write_place(write_flags, flags),
                    data: data.slice_of(io.body()),
                    lose_privileges: write_flags & abi::WRITE_KILL_SUIDGID != 0,
                };
                let file = HandleRef { ino, fh };
                let written = service.write(file, &write, &caller)?;
                if write.lose_privileges {
                    self.refresh_privileges(file);
                }
                put_struct(io.payload(), &abi::WriteOut { size: written as u32, padding: 0 })
            }
            ChangeRequest::CopyFileRange(args) => {
                let from = FilePosition { file: HandleRef { ino, fh: args.fh_in }, offset: args.off_in };
                let to_file = HandleRef { ino: args.nodeid_out, fh: args.fh_out };
                let to = FilePosition { file: to_file, offset: args.off_out };
                let copied = service.copy_file_range(from, to, args.len, &caller)?;
                self.refresh_privileges(to_file);
                // The reply has 32 bits for the number.
                put_struct(io.payload(), &abi::WriteOut { size: copied as u32, padding: 0 })
            }
            ChangeRequest::TestLock(args) => {
                let file = HandleRef { ino, fh: args.fh };
                let lock = file_lock(&args)?;
                let found = service.test_lock(file, &lock, header.unique, &self.kernel.side())?;
                put_struct(io.payload(), &lock_reply(found))
            }
            ChangeRequest::SetLock { lock: args, wait } => {
                let file = HandleRef { ino, fh: args.fh };
                let lock = LockRequest { lock: file_lock(&args)?, pid: args.pid, number: header.unique };
                service.set_lock(file, &lock, wait, &caller, &self.kernel.side())?;
                ReplyReceipt::ok(0)
            }
            _ => return Err(FsError::NotServed),
        })
    }

    /// Before the answer to a change of bytes: set-user-ID and set-group-ID bits that it took are gone in the kernel too.
    fn refresh_privileges(&self, file: HandleRef) {
        if let Some(view) = self.kernel.side().view {
            self.service.refresh_privileges(file, view);
        }
    }
}

/// Where the bytes of a write go, by the flags that the open file has now.
fn write_place(write_flags: u32, flags: u32) -> WritePlace {
    match (write_flags & abi::WRITE_CACHE != 0, flags & libc::O_APPEND as u32 != 0) {
        (true, _) => WritePlace::MappedPages,
        (false, true) => WritePlace::End,
        (false, false) => WritePlace::Offset,
    }
}

fn entry_reply(io: &mut SlotIo<'_>, entry: &FileEntry) -> ReplyReceipt {
    put_struct(io.payload(), &entry_out(entry))
}

/// The reply with an inode's attributes.
pub(crate) fn attr_reply(io: &mut SlotIo<'_>, attr: &StatAttr, ttl: Duration) -> ReplyReceipt {
    let out =
        abi::AttrOut { attr_valid: ttl.as_secs(), attr_valid_nsec: ttl.subsec_nanos(), dummy: 0, attr: attr_out(attr) };
    put_struct(io.payload(), &out)
}

fn create_reply(io: &mut SlotIo<'_>, entry: &FileEntry, opened: &OpenedFile) -> ReplyReceipt {
    let payload = io.payload();
    let first = put_struct(payload, &entry_out(entry)).len;
    let second = put_struct(&mut payload[first..], &open_out(opened)).len;
    ReplyReceipt::ok(first + second)
}

fn attr_change(args: &abi::SetattrIn) -> AttrChange {
    let set = |flag: u32| args.valid & flag != 0;
    let time = |flag, now, seconds: u64, nanos| {
        if !set(flag) {
            None
        } else if set(now) {
            Some(NewTime::Now)
        } else {
            Some(NewTime::At(FileTime { seconds: seconds as i64, nanos }))
        }
    };
    AttrChange {
        mode: set(fattr::MODE).then_some(args.mode),
        uid: set(fattr::UID).then_some(args.uid),
        gid: set(fattr::GID).then_some(args.gid),
        size: set(fattr::SIZE).then_some(args.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, args.atime, args.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, args.mtime, args.mtimensec),
    }
}

pub(crate) fn file_lock(args: &abi::LkIn) -> FsResult<FileLock> {
    let kind = match args.kind as libc::c_int {
        libc::F_RDLCK => LockKind::Read,
        libc::F_WRLCK => LockKind::Write,
        libc::F_UNLCK => LockKind::Unlock,
        _ => return Err(FsError::Invalid("a lock of an unknown type")),
    };
    if args.start > args.end {
        return Err(FsError::Invalid("a lock that ends before its start"));
    }
    let flock = args.lk_flags & abi::LK_FLOCK != 0;
    let family = if flock { LockFamily::Flock } else { LockFamily::Posix };
    // The kernel's owner of a flock stands for the open file, and is used again at once when that is closed.
    let owner = if flock { args.fh } else { args.owner };
    Ok(FileLock { family, owner, range: LockRange { start: args.start, end: args.end }, kind })
}

fn lock_reply(found: Option<LockConflict>) -> abi::LkOut {
    let Some(LockConflict { kind, range, pid }) = found else {
        return abi::LkOut { kind: libc::F_UNLCK as u32, ..Default::default() };
    };
    let kind = if kind == LockKind::Write { libc::F_WRLCK } else { libc::F_RDLCK };
    abi::LkOut { start: range.start, end: range.end, kind: kind as u32, pid }
}

/// A device number in the kernel's form (`new_encode_dev`), in the form of makedev(3).
fn decode_device(rdev: u32) -> u64 {
    let major = (rdev & 0xf_ff00) >> 8;
    let minor = (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00);
    libc::makedev(major, minor)
}

/// The inverse of [`decode_device`].
pub(crate) fn encode_device(device: u64) -> u32 {
    let major = libc::major(device);
    let minor = libc::minor(device);
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_both_ways() {
        for (major, minor) in [(0, 0), (1, 3), (259, 70_000), (4095, 0xf_ffff)] {
            let device = libc::makedev(major, minor);
            assert_eq!(decode_device(encode_device(device)), device, "{major}:{minor}");
        }
    }

    #[test]
    fn pages_and_writes_that_append_no_more_go_to_their_offset() {
        let append = libc::O_APPEND as u32;
        let places = [(0, append), (0, 0), (abi::WRITE_CACHE, append), (abi::WRITE_KILL_SUIDGID, append)];
        let wanted = [WritePlace::End, WritePlace::Offset, WritePlace::MappedPages, WritePlace::End];
        assert_eq!(places.map(|(write_flags, flags)| write_place(write_flags, flags)), wanted);
    }

    #[test]
    fn only_what_is_marked_is_set() {
        let args =
            abi::SetattrIn { valid: fattr::SIZE | fattr::MTIME | fattr::MTIME_NOW, size: 7, ..Default::default() };
        let set = attr_change(&args);
        assert_eq!(set, AttrChange { size: Some(7), mtime: Some(NewTime::Now), ..AttrChange::default() });
        let args = abi::SetattrIn { valid: fattr::ATIME, atime: u64::MAX, atimensec: 5, ..Default::default() };
        let before = FileTime { seconds: -1, nanos: 5 };
        assert_eq!(attr_change(&args).atime, Some(NewTime::At(before)));
    }
}
