//! Decodes one request of the kernel. Every length is checked. Names are not copied: a [`BodySpan`] refers to them.
//! It does not know how requests arrive.

use crate::abi::{self, InHeader, opcode, read_plain};
use std::ops::Range;

/// A part of the request's body, by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodySpan {
    start: usize,
    end: usize,
}

impl BodySpan {
    /// The bytes of `body` in this span; empty when it lies outside.
    pub fn slice_of(self, body: &[u8]) -> &[u8] {
        body.get(Range { start: self.start, end: self.end }).unwrap_or_default()
    }
}

/// The read-side requests; [`FuseRequest::Modify`] stands for all that would change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "field names are the protocol's own")]
pub enum FuseRequest {
    Lookup { name: BodySpan },
    Forget { nlookup: u64 },
    BatchForget { entries: BodySpan },
    Getattr { fh: Option<u64> },
    Readlink,
    Open { flags: u32 },
    Read { fh: u64, offset: u64, len: u32 },
    Release { fh: u64 },
    Opendir { flags: u32 },
    Readdir { fh: u64, cookie: u64, len: u32, plus: bool },
    Releasedir { fh: u64 },
    Statfs,
    Access { mask: u32 },
    Getxattr { name: BodySpan, size: u32 },
    Listxattr { size: u32 },
    Lseek { fh: u64, offset: u64, whence: u32 },
    Init { major: u32, minor: u32, max_readahead: u32, flags: u64 },
    Interrupt { unique: u64 },
    Destroy,
    Ioctl,
    Modify(ModifyOp),
    Unknown(u32),
}

macro_rules! modify_ops {
    ($($Name:ident $op:ident $text:literal),+ $(,)?) => {
        /// A request that would change something.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names are the protocol's own")]
        pub enum ModifyOp { $($Name),+ }
        impl ModifyOp {
            fn from_opcode(op: u32) -> Option<Self> {
                match op { $(opcode::$op => Some(ModifyOp::$Name),)+ _ => None }
            }
            /// Its name in logs.
            pub fn name(self) -> &'static str {
                match self { $(ModifyOp::$Name => $text),+ }
            }
        }
    };
}

modify_ops! {
    Setattr SETATTR "setattr", Symlink SYMLINK "symlink", Mknod MKNOD "mknod", Mkdir MKDIR "mkdir", Unlink UNLINK "unlink",
    Rmdir RMDIR "rmdir", Rename RENAME "rename", Rename2 RENAME2 "rename2", Link LINK "link", Write WRITE "write",
    Create CREATE "create", Tmpfile TMPFILE "tmpfile", Setxattr SETXATTR "setxattr", Removexattr REMOVEXATTR "removexattr",
    Fallocate FALLOCATE "fallocate", CopyFileRange COPY_FILE_RANGE "copy_file_range",
}

impl FuseRequest {
    /// Its name in logs.
    pub fn op_name(&self) -> &'static str {
        match self {
            FuseRequest::Lookup { .. } => "lookup",
            FuseRequest::Forget { .. } => "forget",
            FuseRequest::BatchForget { .. } => "batch_forget",
            FuseRequest::Getattr { .. } => "getattr",
            FuseRequest::Readlink => "readlink",
            FuseRequest::Open { .. } => "open",
            FuseRequest::Read { .. } => "read",
            FuseRequest::Release { .. } => "release",
            FuseRequest::Opendir { .. } => "opendir",
            FuseRequest::Readdir { plus: false, .. } => "readdir",
            FuseRequest::Readdir { plus: true, .. } => "readdirplus",
            FuseRequest::Releasedir { .. } => "releasedir",
            FuseRequest::Statfs => "statfs",
            FuseRequest::Access { .. } => "access",
            FuseRequest::Getxattr { .. } => "getxattr",
            FuseRequest::Listxattr { .. } => "listxattr",
            FuseRequest::Lseek { .. } => "lseek",
            FuseRequest::Init { .. } => "init",
            FuseRequest::Interrupt { .. } => "interrupt",
            FuseRequest::Destroy => "destroy",
            FuseRequest::Ioctl => "ioctl",
            FuseRequest::Modify(op) => op.name(),
            FuseRequest::Unknown(opcode::FLUSH) => "flush",
            FuseRequest::Unknown(opcode::FSYNC | opcode::FSYNCDIR | opcode::SYNCFS) => "fsync",
            FuseRequest::Unknown(_) => "unknown",
        }
    }
}

/// Why a message is not a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeError {
    /// Too short for a header, or the header's length differs from the message's: no reply is possible.
    NoHeader,
    /// The header is valid but the arguments are not: the request fails with EINVAL.
    BadArguments(InHeader),
}

/// Length of the arguments before the body, for the requests decoded here. Over io_uring the kernel puts them into the
/// entry's header and the body into the payload.
fn args_len(op: u32) -> usize {
    match op {
        opcode::FORGET => size_of::<abi::ForgetIn>(),
        opcode::BATCH_FORGET => size_of::<abi::BatchForgetIn>(),
        opcode::GETATTR => size_of::<abi::GetattrIn>(),
        opcode::OPEN | opcode::OPENDIR => size_of::<abi::OpenIn>(),
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => size_of::<abi::ReadIn>(),
        opcode::RELEASE | opcode::RELEASEDIR => size_of::<abi::ReleaseIn>(),
        opcode::ACCESS => size_of::<abi::AccessIn>(),
        opcode::GETXATTR | opcode::LISTXATTR => size_of::<abi::GetxattrIn>(),
        opcode::LSEEK => size_of::<abi::LseekIn>(),
        opcode::INIT => size_of::<abi::InitIn>(),
        opcode::INTERRUPT => size_of::<abi::InterruptIn>(),
        _ => 0,
    }
}

/// Decodes a message as /dev/fuse gives it: header, arguments and body in one piece. Spans count from the
/// returned start of the body.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode_message(message: &[u8]) -> Result<(InHeader, FuseRequest, usize), DecodeError> {
    let header: InHeader = read_plain(message).ok_or(DecodeError::NoHeader)?;
    if header.len as usize != message.len() {
        return Err(DecodeError::NoHeader);
    }
    let args_start = size_of::<InHeader>();
    let body_start = (args_start + args_len(header.opcode)).min(message.len());
    let request = decode_split(&header, &message[args_start..body_start], &message[body_start..])
        .ok_or(DecodeError::BadArguments(header))?;
    Ok((header, request, body_start))
}

/// Decodes arguments and body from separate buffers, as in io_uring. `None`: they are malformed.
pub fn decode_split(header: &InHeader, args: &[u8], body: &[u8]) -> Option<FuseRequest> {
    Some(match header.opcode {
        opcode::LOOKUP => FuseRequest::Lookup { name: parse_name(body)? },
        opcode::FORGET => FuseRequest::Forget { nlookup: read_plain::<abi::ForgetIn>(args)?.nlookup },
        opcode::BATCH_FORGET => {
            let count = read_plain::<abi::BatchForgetIn>(args)?.count as usize;
            let end = count.checked_mul(size_of::<abi::ForgetOne>())?;
            if end > body.len() {
                return None;
            }
            FuseRequest::BatchForget { entries: BodySpan { start: 0, end } }
        }
        opcode::GETATTR => {
            let a: abi::GetattrIn = read_plain(args)?;
            FuseRequest::Getattr { fh: (a.flags & abi::GETATTR_FH != 0).then_some(a.fh) }
        }
        opcode::READLINK => FuseRequest::Readlink,
        opcode::OPEN => FuseRequest::Open { flags: read_plain::<abi::OpenIn>(args)?.flags },
        opcode::OPENDIR => FuseRequest::Opendir { flags: read_plain::<abi::OpenIn>(args)?.flags },
        opcode::READ => {
            let a: abi::ReadIn = read_plain(args)?;
            FuseRequest::Read { fh: a.fh, offset: a.offset, len: a.size }
        }
        opcode::READDIR | opcode::READDIRPLUS => {
            let a: abi::ReadIn = read_plain(args)?;
            let plus = header.opcode == opcode::READDIRPLUS;
            FuseRequest::Readdir { fh: a.fh, cookie: a.offset, len: a.size, plus }
        }
        opcode::RELEASE => FuseRequest::Release { fh: read_plain::<abi::ReleaseIn>(args)?.fh },
        opcode::RELEASEDIR => FuseRequest::Releasedir { fh: read_plain::<abi::ReleaseIn>(args)?.fh },
        opcode::STATFS => FuseRequest::Statfs,
        opcode::ACCESS => FuseRequest::Access { mask: read_plain::<abi::AccessIn>(args)?.mask },
        opcode::GETXATTR => {
            FuseRequest::Getxattr { size: read_plain::<abi::GetxattrIn>(args)?.size, name: parse_name(body)? }
        }
        opcode::LISTXATTR => FuseRequest::Listxattr { size: read_plain::<abi::GetxattrIn>(args)?.size },
        opcode::LSEEK => {
            let a: abi::LseekIn = read_plain(args)?;
            FuseRequest::Lseek { fh: a.fh, offset: a.offset, whence: a.whence }
        }
        opcode::INIT => {
            let a: abi::InitIn = read_plain(args)?;
            // The second half of the flags came with INIT_EXT; older kernels end before it.
            let flags2 = match a.flags as u64 & abi::init::INIT_EXT {
                0 => 0,
                _ => u64::from(u32::from_ne_bytes(body.get(..4)?.try_into().ok()?)),
            };
            FuseRequest::Init {
                major: a.major,
                minor: a.minor,
                max_readahead: a.max_readahead,
                flags: u64::from(a.flags) | flags2 << 32,
            }
        }
        opcode::INTERRUPT => FuseRequest::Interrupt { unique: read_plain::<abi::InterruptIn>(args)?.unique },
        opcode::DESTROY => FuseRequest::Destroy,
        opcode::IOCTL => FuseRequest::Ioctl,
        other => match ModifyOp::from_opcode(other) {
            Some(op) => FuseRequest::Modify(op),
            None => FuseRequest::Unknown(other),
        },
    })
}

/// A name ends with its only NUL and is not empty.
fn parse_name(body: &[u8]) -> Option<BodySpan> {
    match body.iter().position(|b| *b == 0) {
        None | Some(0) => None,
        Some(end) => Some(BodySpan { start: 0, end }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(op: u32, rest: &[u8]) -> Vec<u8> {
        let header = InHeader {
            len: (size_of::<InHeader>() + rest.len()) as u32,
            opcode: op,
            unique: 7,
            nodeid: 1,
            ..Default::default()
        };
        [abi::bytes_of(&header), rest].concat()
    }

    #[test]
    fn names_end_at_their_nul() {
        let m = message(opcode::LOOKUP, b"a\xff\n b\0");
        let (header, request, body) = decode_message(&m).unwrap();
        assert_eq!(header.unique, 7);
        let FuseRequest::Lookup { name } = request else { panic!("{request:?}") };
        assert_eq!(name.slice_of(&m[body..]), b"a\xff\n b");
        for bad in [&b""[..], b"\0", b"unterminated"] {
            assert!(matches!(decode_message(&message(opcode::LOOKUP, bad)), Err(DecodeError::BadArguments(_))));
        }
    }

    #[test]
    fn lengths_are_checked() {
        assert_eq!(decode_message(&[0; 39]), Err(DecodeError::NoHeader));
        let mut m = message(opcode::READ, &[0; 40]);
        assert!(matches!(decode_message(&m), Ok((_, FuseRequest::Read { .. }, 80))));
        m.push(0);
        assert_eq!(decode_message(&m), Err(DecodeError::NoHeader));
        assert!(matches!(decode_message(&message(opcode::READ, &[0; 39])), Err(DecodeError::BadArguments(_))));
        let many = abi::BatchForgetIn { count: u32::MAX, dummy: 0 };
        assert!(decode_message(&message(opcode::BATCH_FORGET, abi::bytes_of(&many))).is_err());
    }

    #[test]
    fn init_of_old_and_new_kernels() {
        let old = abi::InitIn { major: 7, minor: 31, max_readahead: 131_072, flags: 1 };
        let m = message(opcode::INIT, abi::bytes_of(&old));
        assert!(matches!(decode_message(&m).unwrap().1, FuseRequest::Init { minor: 31, flags: 1, .. }));
        let new = abi::InitIn { flags: abi::init::INIT_EXT as u32, ..old };
        let m = message(opcode::INIT, &[abi::bytes_of(&new), &[0, 2, 0, 0], &[0; 44]].concat());
        let FuseRequest::Init { flags, .. } = decode_message(&m).unwrap().1 else { panic!() };
        assert_eq!(flags, abi::init::INIT_EXT | abi::init::OVER_IO_URING);
        assert!(decode_message(&message(opcode::INIT, abi::bytes_of(&new))).is_err());
    }

    #[test]
    fn every_write_is_a_modify_and_the_rest_unknown() {
        for op in [opcode::SETATTR, opcode::WRITE, opcode::CREATE, opcode::RENAME2, opcode::COPY_FILE_RANGE] {
            assert!(matches!(decode_message(&message(op, b"")).unwrap().1, FuseRequest::Modify(_)), "{op}");
        }
        assert_eq!(decode_message(&message(9999, b"")).unwrap().1, FuseRequest::Unknown(9999));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn garbage_never_panics(op in 0u32..60, lie in proptest::bool::weighted(0.1), rest in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut m = message(op, &rest);
            if lie { m[0] ^= 1; }
            if let Ok((_, request, body)) = decode_message(&m) {
                prop_assert!(body <= m.len());
                match request {
                    FuseRequest::Lookup { name } | FuseRequest::Getxattr { name, .. } => {
                        let name = name.slice_of(&m[body..]);
                        prop_assert!(!name.is_empty() && !name.contains(&0));
                    }
                    FuseRequest::BatchForget { entries } => prop_assert_eq!(entries.slice_of(&m[body..]).len() % 16, 0),
                    _ => {}
                }
            }
        }
        #[test]
        fn raw_garbage_never_panics(m in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_message(&m);
        }
        #[test]
        fn split_garbage_never_panics(op in 0u32..60, args in proptest::collection::vec(any::<u8>(), 0..129), body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let header = InHeader { opcode: op, ..Default::default() };
            let _ = decode_split(&header, &args, &body);
        }
    }
}
