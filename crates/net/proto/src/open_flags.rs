//! The flags of `open(2)` on the wire. It knows which of them reach the source, and no kernel.

use spurline_types::open_flags::{FMODE_EXEC, O_ACCMODE, O_APPEND, O_CREAT, O_EXCL, O_NOATIME, O_SYNC, O_TRUNC};

/// Flags of an open, by numbers that every host has: those of `asm-generic/fcntl.h`, which amd64 and arm64 share.
///
/// `O_DIRECT`, `O_DIRECTORY`, `O_NOFOLLOW` and `O_LARGEFILE` have other numbers on arm64 than on amd64: an `O_DIRECT` of one is
/// the `O_DIRECTORY` of the other. They are not sent. The mount acts on `O_DIRECT` itself, its kernel has checked the
/// kind of the object, and a node opens the object that it has found without following links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFlags(u32);

impl OpenFlags {
    /// Read, write, or both.
    pub const ACCESS: u32 = O_ACCMODE;
    /// `O_CREAT`
    pub const CREATE: u32 = O_CREAT;
    /// `O_EXCL`
    pub const EXCLUSIVE: u32 = O_EXCL;
    /// `O_TRUNC`
    pub const TRUNCATE: u32 = O_TRUNC;
    const SENT: u32 = O_ACCMODE | O_CREAT | O_EXCL | O_TRUNC | O_APPEND | O_SYNC | O_NOATIME | FMODE_EXEC;

    /// The flags of an open on this host, or those that arrived: what has no meaning for a source is left out.
    pub const fn new(flags: u32) -> OpenFlags {
        OpenFlags(flags & Self::SENT)
    }

    /// As for `open(2)` on this host.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether one of `flags` is set.
    pub const fn has_any(self, flags: u32) -> bool {
        self.0 & flags != 0
    }

    /// The flags without `flags`.
    #[must_use]
    pub const fn without(self, flags: u32) -> OpenFlags {
        OpenFlags(self.0 & !flags)
    }
}

#[cfg(test)]
mod tests {
    use super::OpenFlags;

    /// `O_LARGEFILE`, `O_DIRECT`, `O_DIRECTORY` and `O_NOFOLLOW` of `arch/arm64/include/uapi/asm/fcntl.h`.
    const ARM64: [u32; 4] = [0o400_000, 0o200_000, 0o40_000, 0o100_000];
    /// The same of `asm-generic/fcntl.h`, which amd64 has.
    const GENERIC: [u32; 4] = [0o100_000, 0o40_000, 0o200_000, 0o400_000];

    #[test]
    fn flags_of_another_architecture_open_the_same_file() {
        // O_RDWR | O_CREAT | O_EXCL | O_TRUNC | O_APPEND | O_SYNC | O_NOATIME | FMODE_EXEC: the same number everywhere.
        let wanted = 0o2 | 0o100 | 0o200 | 0o1000 | 0o2000 | 0o4_010_000 | 0o1_000_000 | 0o40;
        for [large, direct, directory, no_follow] in [ARM64, GENERIC] {
            // As a 64-bit program sends them, and as O_TMPFILE, which contains O_DIRECTORY.
            for own in [large, large | direct, large | no_follow, 0o20_000_000 | directory | large] {
                let sent = OpenFlags::new(wanted | own);
                assert_eq!(sent.bits(), wanted, "{own:o}");
                assert_eq!(OpenFlags::new(sent.bits()), sent);
            }
        }
    }
}
