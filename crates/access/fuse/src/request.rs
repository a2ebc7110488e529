//! Decodes one request of the kernel. Every length is checked. Names are not copied: a [`BodySpan`] refers to them.
//! It does not know how requests arrive.

use crate::abi::{self, InHeader, opcode, take};
use std::ops::Range;

/// A part of the request's body, by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    start: usize,
    end: usize,
}

impl Span {
    /// The bytes of `body` in this span; empty when it lies outside.
    pub fn of(self, body: &[u8]) -> &[u8] {
        body.get(Range { start: self.start, end: self.end }).unwrap_or_default()
    }
}

/// The read-side requests; [`FuseRequest::Modify`] stands for all that would change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "field names are the protocol's own")]
pub enum Request {
    Lookup { name: Span },
    Forget { nlookup: u64 },
    BatchForget { entries: Span },
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
    Getxattr { name: Span, size: u32 },
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

impl Request {
    /// Its name in logs.
    pub fn name(&self) -> &'static str {
        match self {
            Request::Lookup { .. } => "lookup",
            Request::Forget { .. } => "forget",
            Request::BatchForget { .. } => "batch_forget",
            Request::Getattr { .. } => "getattr",
            Request::Readlink => "readlink",
            Request::Open { .. } => "open",
            Request::Read { .. } => "read",
            Request::Release { .. } => "release",
            Request::Opendir { .. } => "opendir",
            Request::Readdir { plus: false, .. } => "readdir",
            Request::Readdir { plus: true, .. } => "readdirplus",
            Request::Releasedir { .. } => "releasedir",
            Request::Statfs => "statfs",
            Request::Access { .. } => "access",
            Request::Getxattr { .. } => "getxattr",
            Request::Listxattr { .. } => "listxattr",
            Request::Lseek { .. } => "lseek",
            Request::Init { .. } => "init",
            Request::Interrupt { .. } => "interrupt",
            Request::Destroy => "destroy",
            Request::Ioctl => "ioctl",
            Request::Modify(op) => op.name(),
            Request::Unknown(opcode::FLUSH) => "flush",
            Request::Unknown(opcode::FSYNC | opcode::FSYNCDIR | opcode::SYNCFS) => "fsync",
            Request::Unknown(_) => "unknown",
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
pub fn decode(message: &[u8]) -> Result<(InHeader, Request, usize), DecodeError> {
    let header: InHeader = take(message).ok_or(DecodeError::NoHeader)?;
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
pub fn decode_split(header: &InHeader, args: &[u8], body: &[u8]) -> Option<Request> {
    Some(match header.opcode {
        opcode::LOOKUP => Request::Lookup { name: name(body)? },
        opcode::FORGET => Request::Forget { nlookup: take::<abi::ForgetIn>(args)?.nlookup },
        opcode::BATCH_FORGET => {
            let count = take::<abi::BatchForgetIn>(args)?.count as usize;
            let end = count.checked_mul(size_of::<abi::ForgetOne>())?;
            if end > body.len() {
                return None;
            }
            Request::BatchForget { entries: Span { start: 0, end } }
        }
        opcode::GETATTR => {
            let a: abi::GetattrIn = take(args)?;
            Request::Getattr { fh: (a.flags & abi::GETATTR_FH != 0).then_some(a.fh) }
        }
        opcode::READLINK => Request::Readlink,
        opcode::OPEN => Request::Open { flags: take::<abi::OpenIn>(args)?.flags },
        opcode::OPENDIR => Request::Opendir { flags: take::<abi::OpenIn>(args)?.flags },
        opcode::READ => {
            let a: abi::ReadIn = take(args)?;
            Request::Read { fh: a.fh, offset: a.offset, len: a.size }
        }
        opcode::READDIR | opcode::READDIRPLUS => {
            let a: abi::ReadIn = take(args)?;
            let plus = header.opcode == opcode::READDIRPLUS;
            Request::Readdir { fh: a.fh, cookie: a.offset, len: a.size, plus }
        }
        opcode::RELEASE => Request::Release { fh: take::<abi::ReleaseIn>(args)?.fh },
        opcode::RELEASEDIR => Request::Releasedir { fh: take::<abi::ReleaseIn>(args)?.fh },
        opcode::STATFS => Request::Statfs,
        opcode::ACCESS => Request::Access { mask: take::<abi::AccessIn>(args)?.mask },
        opcode::GETXATTR => Request::Getxattr { size: take::<abi::GetxattrIn>(args)?.size, name: name(body)? },
        opcode::LISTXATTR => Request::Listxattr { size: take::<abi::GetxattrIn>(args)?.size },
        opcode::LSEEK => {
            let a: abi::LseekIn = take(args)?;
            Request::Lseek { fh: a.fh, offset: a.offset, whence: a.whence }
        }
        opcode::INIT => {
            let a: abi::InitIn = take(args)?;
            // The second half of the flags came with INIT_EXT; older kernels end before it.
            let flags2 = match a.flags as u64 & abi::init::INIT_EXT {
                0 => 0,
                _ => u64::from(u32::from_ne_bytes(body.get(..4)?.try_into().ok()?)),
            };
            Request::Init {
                major: a.major,
                minor: a.minor,
                max_readahead: a.max_readahead,
                flags: u64::from(a.flags) | flags2 << 32,
            }
        }
        opcode::INTERRUPT => Request::Interrupt { unique: take::<abi::InterruptIn>(args)?.unique },
        opcode::DESTROY => Request::Destroy,
        opcode::IOCTL => Request::Ioctl,
        other => match ModifyOp::from_opcode(other) {
            Some(op) => Request::Modify(op),
            None => Request::Unknown(other),
        },
    })
}

/// A name ends with its only NUL and is not empty.
fn name(body: &[u8]) -> Option<Span> {
    match body.iter().position(|b| *b == 0) {
        None | Some(0) => None,
        Some(end) => Some(Span { start: 0, end }),
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
        let (header, request, body) = decode(&m).unwrap();
        assert_eq!(header.unique, 7);
        let Request::Lookup { name } = request else { panic!("{request:?}") };
        assert_eq!(name.of(&m[body..]), b"a\xff\n b");
        for bad in [&b""[..], b"\0", b"unterminated"] {
            assert!(matches!(decode(&message(opcode::LOOKUP, bad)), Err(DecodeError::BadArguments(_))));
        }
    }

    #[test]
    fn lengths_are_checked() {
        assert_eq!(decode(&[0; 39]), Err(DecodeError::NoHeader));
        let mut m = message(opcode::READ, &[0; 40]);
        assert!(matches!(decode(&m), Ok((_, Request::Read { .. }, 80))));
        m.push(0);
        assert_eq!(decode(&m), Err(DecodeError::NoHeader));
        assert!(matches!(decode(&message(opcode::READ, &[0; 39])), Err(DecodeError::BadArguments(_))));
        let many = abi::BatchForgetIn { count: u32::MAX, dummy: 0 };
        assert!(decode(&message(opcode::BATCH_FORGET, abi::bytes_of(&many))).is_err());
    }

    #[test]
    fn init_of_old_and_new_kernels() {
        let old = abi::InitIn { major: 7, minor: 31, max_readahead: 131_072, flags: 1 };
        let m = message(opcode::INIT, abi::bytes_of(&old));
        assert!(matches!(decode(&m).unwrap().1, Request::Init { minor: 31, flags: 1, .. }));
        let new = abi::InitIn { flags: abi::init::INIT_EXT as u32, ..old };
        let m = message(opcode::INIT, &[abi::bytes_of(&new), &[0, 2, 0, 0], &[0; 44]].concat());
        let Request::Init { flags, .. } = decode(&m).unwrap().1 else { panic!() };
        assert_eq!(flags, abi::init::INIT_EXT | abi::init::OVER_IO_URING);
        assert!(decode(&message(opcode::INIT, abi::bytes_of(&new))).is_err());
    }

    #[test]
    fn every_write_is_a_modify_and_the_rest_unknown() {
        for op in [opcode::SETATTR, opcode::WRITE, opcode::CREATE, opcode::RENAME2, opcode::COPY_FILE_RANGE] {
            assert!(matches!(decode(&message(op, b"")).unwrap().1, Request::Modify(_)), "{op}");
        }
        assert_eq!(decode(&message(9999, b"")).unwrap().1, Request::Unknown(9999));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn garbage_never_panics(op in 0u32..60, lie in proptest::bool::weighted(0.1), rest in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut m = message(op, &rest);
            if lie { m[0] ^= 1; }
            if let Ok((_, request, body)) = decode(&m) {
                prop_assert!(body <= m.len());
                match request {
                    Request::Lookup { name } | Request::Getxattr { name, .. } => {
                        let name = name.of(&m[body..]);
                        prop_assert!(!name.is_empty() && !name.contains(&0));
                    }
                    Request::BatchForget { entries } => prop_assert_eq!(entries.of(&m[body..]).len() % 16, 0),
                    _ => {}
                }
            }
        }
        #[test]
        fn raw_garbage_never_panics(m in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&m);
        }
        #[test]
        fn split_garbage_never_panics(op in 0u32..60, args in proptest::collection::vec(any::<u8>(), 0..129), body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let header = InHeader { opcode: op, ..Default::default() };
            let _ = decode_split(&header, &args, &body);
        }
    }
}
