//! Decodes the requests that change something, or that only a writable mount needs. Does not know how requests arrive.

use crate::abi::{self, opcode, read_plain};
use crate::request::{BodySpan, parse_name};

/// A request that a read-only mount refuses or does not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "field names are the protocol's own")]
pub enum ChangeRequest {
    Setattr(abi::SetattrIn),
    Symlink { name: BodySpan, target: BodySpan, group: Option<u32> },
    Mknod { name: BodySpan, mode: u32, rdev: u32, umask: u32, group: Option<u32> },
    Mkdir { name: BodySpan, mode: u32, umask: u32, group: Option<u32> },
    Unlink { name: BodySpan },
    Rmdir { name: BodySpan },
    Rename { name: BodySpan, newdir: u64, newname: BodySpan, flags: u32 },
    Link { oldnodeid: u64, name: BodySpan },
    Write { fh: u64, offset: u64, data: BodySpan, write_flags: u32, flags: u32 },
    Create { name: BodySpan, flags: u32, mode: u32, umask: u32, group: Option<u32> },
    Tmpfile { flags: u32, mode: u32, umask: u32, group: Option<u32> },
    Setxattr { name: BodySpan, value: BodySpan, flags: u32 },
    Removexattr { name: BodySpan },
    Fallocate { fh: u64, offset: u64, length: u64, mode: u32 },
    CopyFileRange(abi::CopyFileRangeIn),
    Flush { fh: u64, lock_owner: u64 },
    TestLock(abi::LkIn),
    SetLock { lock: abi::LkIn, wait: bool },
    Fsync { fh: u64, data_only: bool },
    Fsyncdir { fh: u64, data_only: bool },
}

impl ChangeRequest {
    /// The name in logs.
    pub fn op_name(&self) -> &'static str {
        match self {
            ChangeRequest::Setattr(_) => "setattr",
            ChangeRequest::Symlink { .. } => "symlink",
            ChangeRequest::Mknod { .. } => "mknod",
            ChangeRequest::Mkdir { .. } => "mkdir",
            ChangeRequest::Unlink { .. } => "unlink",
            ChangeRequest::Rmdir { .. } => "rmdir",
            ChangeRequest::Rename { .. } => "rename",
            ChangeRequest::Link { .. } => "link",
            ChangeRequest::Write { .. } => "write",
            ChangeRequest::Create { .. } => "create",
            ChangeRequest::Tmpfile { .. } => "tmpfile",
            ChangeRequest::Setxattr { .. } => "setxattr",
            ChangeRequest::Removexattr { .. } => "removexattr",
            ChangeRequest::Fallocate { .. } => "fallocate",
            ChangeRequest::CopyFileRange(_) => "copy_file_range",
            ChangeRequest::Flush { .. } => "flush",
            ChangeRequest::TestLock(_) => "getlk",
            ChangeRequest::SetLock { wait: false, .. } => "setlk",
            ChangeRequest::SetLock { wait: true, .. } => "setlkw",
            ChangeRequest::Fsync { .. } => "fsync",
            ChangeRequest::Fsyncdir { .. } => "fsyncdir",
        }
    }

    /// The offset and number of bytes, if any: of a copy those at the target.
    pub fn byte_range(&self) -> (u64, u64) {
        match self {
            ChangeRequest::Write { offset, data, .. } => (*offset, data.len() as u64),
            ChangeRequest::Fallocate { offset, length, .. } => (*offset, *length),
            ChangeRequest::CopyFileRange(args) => (args.off_out, args.len),
            ChangeRequest::Setxattr { value, .. } => (0, value.len() as u64),
            _ => (0, 0),
        }
    }
}

/// Length of the arguments before the body.
pub(crate) fn change_args_len(op: u32) -> usize {
    match op {
        opcode::SETATTR => size_of::<abi::SetattrIn>(),
        opcode::MKNOD => size_of::<abi::MknodIn>(),
        opcode::MKDIR => size_of::<abi::MkdirIn>(),
        opcode::RENAME => size_of::<abi::RenameIn>(),
        opcode::RENAME2 => size_of::<abi::Rename2In>(),
        opcode::LINK => size_of::<abi::LinkIn>(),
        opcode::WRITE => size_of::<abi::WriteIn>(),
        opcode::CREATE | opcode::TMPFILE => size_of::<abi::CreateIn>(),
        opcode::SETXATTR => size_of::<abi::SetxattrIn>(),
        opcode::FALLOCATE => size_of::<abi::FallocateIn>(),
        opcode::COPY_FILE_RANGE => size_of::<abi::CopyFileRangeIn>(),
        opcode::FLUSH => size_of::<abi::FlushIn>(),
        opcode::GETLK | opcode::SETLK | opcode::SETLKW => size_of::<abi::LkIn>(),
        opcode::FSYNC | opcode::FSYNCDIR => size_of::<abi::FsyncIn>(),
        _ => 0,
    }
}

/// Decodes such a request, whose body ends with `extensions`; the outer `None` is another kind of request, the inner `None`
/// malformed arguments.
pub(crate) fn decode_change(op: u32, args: &[u8], body: &[u8], extensions: &[u8]) -> Option<Option<ChangeRequest>> {
    let known = matches!(
        op,
        opcode::SETATTR
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::LINK
            | opcode::WRITE
            | opcode::CREATE
            | opcode::TMPFILE
            | opcode::SETXATTR
            | opcode::REMOVEXATTR
            | opcode::FALLOCATE
            | opcode::COPY_FILE_RANGE
            | opcode::FLUSH
            | opcode::GETLK
            | opcode::SETLK
            | opcode::SETLKW
            | opcode::FSYNC
            | opcode::FSYNCDIR
    );
    known.then(|| decode_known(op, args, body, group_of(extensions)))
}

/// The supplementary group in the extensions of a request that makes something.
fn group_of(mut extensions: &[u8]) -> Option<u32> {
    while let Some(head) = read_plain::<abi::ExtHeader>(extensions) {
        let len = (head.size as usize).max(size_of::<abi::ExtHeader>());
        if head.kind == abi::EXT_GROUPS {
            let groups: abi::SuppGroups = read_plain(&extensions[size_of::<abi::ExtHeader>()..])?;
            return (groups.count > 0).then_some(groups.first);
        }
        extensions = extensions.get(len..)?;
    }
    None
}

fn decode_known(op: u32, args: &[u8], body: &[u8], group: Option<u32>) -> Option<ChangeRequest> {
    Some(match op {
        opcode::SETATTR => ChangeRequest::Setattr(read_plain(args)?),
        opcode::SYMLINK => {
            let (name, target) = parse_two_names(body)?;
            ChangeRequest::Symlink { name, target, group }
        }
        opcode::MKNOD => {
            let a: abi::MknodIn = read_plain(args)?;
            ChangeRequest::Mknod { name: parse_name(body)?, mode: a.mode, rdev: a.rdev, umask: a.umask, group }
        }
        opcode::MKDIR => {
            let a: abi::MkdirIn = read_plain(args)?;
            ChangeRequest::Mkdir { name: parse_name(body)?, mode: a.mode, umask: a.umask, group }
        }
        opcode::UNLINK => ChangeRequest::Unlink { name: parse_name(body)? },
        opcode::RMDIR => ChangeRequest::Rmdir { name: parse_name(body)? },
        opcode::RENAME => {
            let (name, newname) = parse_two_names(body)?;
            let newdir = read_plain::<abi::RenameIn>(args)?.newdir;
            ChangeRequest::Rename { name, newdir, newname, flags: 0 }
        }
        opcode::RENAME2 => {
            let (name, newname) = parse_two_names(body)?;
            let a: abi::Rename2In = read_plain(args)?;
            ChangeRequest::Rename { name, newdir: a.newdir, newname, flags: a.flags }
        }
        opcode::LINK => {
            let oldnodeid = read_plain::<abi::LinkIn>(args)?.oldnodeid;
            ChangeRequest::Link { oldnodeid, name: parse_name(body)? }
        }
        opcode::WRITE => {
            let a: abi::WriteIn = read_plain(args)?;
            let data = BodySpan::first(a.size as usize, body)?;
            ChangeRequest::Write { fh: a.fh, offset: a.offset, data, write_flags: a.write_flags, flags: a.flags }
        }
        opcode::CREATE => {
            let a: abi::CreateIn = read_plain(args)?;
            ChangeRequest::Create { name: parse_name(body)?, flags: a.flags, mode: a.mode, umask: a.umask, group }
        }
        opcode::TMPFILE => {
            let a: abi::CreateIn = read_plain(args)?;
            ChangeRequest::Tmpfile { flags: a.flags, mode: a.mode, umask: a.umask, group }
        }
        opcode::SETXATTR => {
            let a: abi::SetxattrIn = read_plain(args)?;
            let name = parse_name(body)?;
            let value = name.following(a.size as usize, body)?;
            ChangeRequest::Setxattr { name, value, flags: a.flags }
        }
        opcode::REMOVEXATTR => ChangeRequest::Removexattr { name: parse_name(body)? },
        opcode::FALLOCATE => {
            let a: abi::FallocateIn = read_plain(args)?;
            ChangeRequest::Fallocate { fh: a.fh, offset: a.offset, length: a.length, mode: a.mode }
        }
        opcode::COPY_FILE_RANGE => ChangeRequest::CopyFileRange(read_plain(args)?),
        opcode::FLUSH => {
            let a: abi::FlushIn = read_plain(args)?;
            ChangeRequest::Flush { fh: a.fh, lock_owner: a.lock_owner }
        }
        opcode::GETLK => ChangeRequest::TestLock(read_plain(args)?),
        opcode::SETLK | opcode::SETLKW => {
            ChangeRequest::SetLock { lock: read_plain(args)?, wait: op == opcode::SETLKW }
        }
        opcode::FSYNC | opcode::FSYNCDIR => {
            let a: abi::FsyncIn = read_plain(args)?;
            let fh = a.fh;
            let data_only = a.fsync_flags & abi::FSYNC_FDATASYNC != 0;
            match op {
                opcode::FSYNC => ChangeRequest::Fsync { fh, data_only },
                _ => ChangeRequest::Fsyncdir { fh, data_only },
            }
        }
        _ => return None,
    })
}

/// Two names, each ended by a NUL.
fn parse_two_names(body: &[u8]) -> Option<(BodySpan, BodySpan)> {
    let first = parse_name(body)?;
    let rest = first.after(body)?;
    let second = parse_name(rest)?;
    Some((first, second.moved(body.len() - rest.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_a_directory_comes_after_the_names() {
        let groups = |kind, first| {
            let (head, groups) = (abi::ExtHeader { size: 16, kind }, abi::SuppGroups { count: 1, first });
            [abi::bytes_of(&head), abi::bytes_of(&groups)].concat()
        };
        let (args, extension) = (abi::MkdirIn { mode: 0o2755, umask: 0o22 }, groups(abi::EXT_GROUPS, 4321));
        let body = [b"name\0", &extension[..]].concat();
        let decoded = decode_change(opcode::MKDIR, abi::bytes_of(&args), &body, &extension).flatten();
        let Some(ChangeRequest::Mkdir { name, group, .. }) = decoded else { panic!("{decoded:?}") };
        assert_eq!((name.slice_of(&body), group), (&b"name"[..], Some(4321)));
        assert_eq!(group_of(&[groups(99, 1), groups(abi::EXT_GROUPS, 7)].concat()), Some(7));
        for malformed in [&b""[..], b"abc", &extension[..9], &groups(99, 1), &[0; 64]] {
            assert_eq!(group_of(malformed), None, "{malformed:?}");
        }
    }
}
