//! Decodes a request of the kernel. Every length is checked. Names are not copied: a [`BodySpan`] refers to a name. Does not know
//! how requests arrive.

use crate::abi::{self, InHeader, opcode, read_plain};
use crate::change_request::{ChangeRequest, change_args_len, decode_change};
use std::ops::Range;

/// A part of the request's body, by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodySpan {
    start: usize,
    end: usize,
}

impl BodySpan {
    /// The first `len` bytes of `body`.
    pub(crate) fn first(len: usize, body: &[u8]) -> Option<BodySpan> {
        (len <= body.len()).then_some(BodySpan { start: 0, end: len })
    }

    /// What comes after this name's NUL.
    pub(crate) fn after(self, body: &[u8]) -> Option<&[u8]> {
        body.get(self.end + 1..)
    }

    /// The `len` bytes after this name's NUL.
    pub(crate) fn following(self, len: usize, body: &[u8]) -> Option<BodySpan> {
        (len <= self.after(body)?.len()).then_some(BodySpan { start: self.end + 1, end: self.end + 1 + len })
    }

    /// The length in bytes.
    pub(crate) fn len(self) -> usize {
        self.end - self.start
    }

    /// The same span, `by` bytes further on.
    pub(crate) fn moved(self, by: usize) -> BodySpan {
        BodySpan { start: self.start + by, end: self.end + by }
    }

    /// The bytes of `body` in this span; empty when the span lies outside.
    pub fn slice_of(self, body: &[u8]) -> &[u8] {
        body.get(Range { start: self.start, end: self.end }).unwrap_or_default()
    }
}

/// The read-side requests; [`FuseRequest::Change`] stands for all that would change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "field names are the protocol's own")]
pub enum FuseRequest {
    Lookup {
        name: BodySpan,
    },
    Forget {
        nlookup: u64,
    },
    BatchForget {
        entries: BodySpan,
    },
    Getattr {
        fh: Option<u64>,
    },
    Readlink,
    Open {
        flags: u32,
    },
    /// `cached`: into the kernel's page cache.
    Read {
        fh: u64,
        offset: u64,
        len: u32,
        cached: bool,
    },
    Release {
        fh: u64,
    },
    Opendir {
        flags: u32,
    },
    Readdir {
        fh: u64,
        cookie: u64,
        len: u32,
        plus: bool,
    },
    Releasedir {
        fh: u64,
    },
    Statfs,
    Access {
        mask: u32,
    },
    Getxattr {
        name: BodySpan,
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Lseek {
        fh: u64,
        offset: u64,
        whence: u32,
    },
    Init {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u64,
    },
    Interrupt {
        unique: u64,
    },
    Destroy,
    Ioctl,
    Change(ChangeRequest),
    Unknown(u32),
}

impl FuseRequest {
    /// The name in logs.
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
            FuseRequest::Change(change) => change.op_name(),
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

/// Length of the arguments before the body, for the requests decoded here. Over io_uring the kernel puts the arguments into the
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
        other => change_args_len(other),
    }
}

/// Decodes a message in the form of /dev/fuse: header, arguments and body in a single piece. Spans count from the returned start
/// of the body.
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

/// Decodes arguments and body from separate buffers, as in io_uring. `None`: malformed.
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
            let cached = a.read_flags & abi::READ_LOCKOWNER == 0;
            FuseRequest::Read { fh: a.fh, offset: a.offset, len: a.size, cached }
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
            // The second half of the flags came with INIT_EXT; older kernels end before that.
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
        other => match decode_change(other, args, body, extensions(header, body)) {
            Some(change) => FuseRequest::Change(change?),
            None => FuseRequest::Unknown(other),
        },
    })
}

/// The extensions at the end of a request.
fn extensions<'a>(header: &InHeader, body: &'a [u8]) -> &'a [u8] {
    // The header counts units of eight bytes.
    let len = usize::from(header.total_extlen) * 8;
    body.len().checked_sub(len).map_or(&[], |start| &body[start..])
}

/// A name ends with the only NUL and is not empty.
pub(crate) fn parse_name(body: &[u8]) -> Option<BodySpan> {
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
    fn changes_have_their_names_and_bytes_and_the_rest_is_unknown() {
        let args = abi::Rename2In { newdir: 9, flags: 2, padding: 0 };
        let m = message(opcode::RENAME2, &[abi::bytes_of(&args), b"old\0new\0"].concat());
        let (_, request, body) = decode_message(&m).unwrap();
        let FuseRequest::Change(ChangeRequest::Rename { name, newdir: 9, newname, flags: 2 }) = request else {
            panic!("{request:?}");
        };
        assert_eq!((name.slice_of(&m[body..]), newname.slice_of(&m[body..])), (&b"old"[..], &b"new"[..]));
        let args = abi::SetxattrIn { size: 3, flags: 1 };
        let m = message(opcode::SETXATTR, &[abi::bytes_of(&args), b"user.a\0xyz"].concat());
        let (_, request, body) = decode_message(&m).unwrap();
        let FuseRequest::Change(ChangeRequest::Setxattr { name, value, flags: 1 }) = request else {
            panic!("{request:?}");
        };
        assert_eq!((name.slice_of(&m[body..]), value.slice_of(&m[body..])), (&b"user.a"[..], &b"xyz"[..]));
        let args = abi::WriteIn { fh: 1, offset: 5, size: 4, ..Default::default() };
        let m = message(opcode::WRITE, &[abi::bytes_of(&args), b"data"].concat());
        let (_, request, body) = decode_message(&m).unwrap();
        let FuseRequest::Change(ChangeRequest::Write { data, offset: 5, .. }) = request else { panic!("{request:?}") };
        assert_eq!((data.slice_of(&m[body..]), body), (&b"data"[..], 80));
        // Bytes, a name or a NUL that are missing.
        for (op, args, body) in [
            (opcode::WRITE, abi::bytes_of(&args), &b"dat"[..]),
            (opcode::RENAME, &[0; 8], b"old\0new"),
            (opcode::SYMLINK, b"", b"name\0"),
            (opcode::SETATTR, b"", b""),
        ] {
            let m = message(op, &[args, body].concat());
            assert!(matches!(decode_message(&m), Err(DecodeError::BadArguments(_))), "{op}");
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
