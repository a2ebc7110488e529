//! The abilities of sources, and the check that refuses a call which a source can't answer. Knows no source.
//!
//! | call | needs | errno otherwise, as in the manual page of the call |
//! |---|---|---|
//! | link | `hard_links` | `EPERM` |
//! | symlink | `symlinks` | `EPERM` |
//! | rename of a directory | `rename_directory` | `EXDEV`: programs copy then |
//! | extended attributes of users | `xattrs` | `EOPNOTSUPP` |
//! | the headers of an object | `xattrs` or `publishes` | `EOPNOTSUPP` |
//! | access control lists | `acls` | `EOPNOTSUPP` |
//! | fallocate that does more than allocate | `holes` | `EOPNOTSUPP` |
//! | lseek to data or a hole | `holes` | `EINVAL`: programs read then |
//! | copy_file_range | `copy` | `EOPNOTSUPP`: programs read and write then |
//! | chmod, chown | `modes` | none: the call has no effect, since `cp -p`, tar and git need success |
//!
//! Whether the source has the locks is decided when a mount begins: locks of `LockScope::Mount` are the kernel's.

use crate::writes::AttrChange;
use spurline_types::errno::{EINVAL, EOPNOTSUPP, EPERM, EXDEV};
use spurline_types::{Error, ErrorKind, OBJECT_HEADERS_XATTR, Result, STAGED_XATTR};

/// From `linux/falloc.h`: space is allocated beyond the end, and the length stays.
const FALLOC_FL_KEEP_SIZE: u32 = 1;

/// What a source can do. Shown by `spurline info`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteCapabilities {
    /// How directories are renamed.
    pub rename_directory: DirectoryRename,
    /// Several names for the same file.
    pub hard_links: bool,
    /// Symbolic links.
    pub symlinks: bool,
    /// Permission bits and owners are stored.
    pub modes: bool,
    /// Extended attributes of users.
    pub xattrs: bool,
    /// POSIX access control lists.
    pub acls: bool,
    /// Who sees a lock.
    pub locks: LockScope,
    /// Holes can be punched and found.
    pub holes: bool,
    /// Bytes are copied within the source.
    pub copy: bool,
    /// Others see the changes of a file at the publication, by a close or a sync, all at once.
    pub publishes: bool,
}

/// How a source renames directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectoryRename {
    /// At once, or not at all.
    Atomic,
    /// Objects in turn, for up to this many, which the source counts.
    EachUpTo(u64),
    /// Not at all.
    No,
}

/// The processes among which a lock holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockScope {
    /// Those of a single mount.
    Mount,
    /// Those of all mounts that use the same nodes: the node of a file keeps its locks.
    Group,
    /// All that use the source.
    Source,
}

impl LockScope {
    /// Whether a lock is a request to the source. Otherwise the kernel keeps the locks of the mount.
    pub fn is_beyond_mount(self) -> bool {
        self != LockScope::Mount
    }
}

/// A call that some sources can't answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitedCall<'a> {
    /// Another name for a file.
    Link,
    /// A symbolic link.
    Symlink,
    /// A rename of a directory.
    RenameDirectory,
    /// A call on the extended attribute with this name.
    Xattr(&'a [u8]),
    /// Space, with this mode of `fallocate(2)`.
    Allocate(u32),
    /// The next data or hole.
    Seek,
    /// A copy within the source.
    Copy,
}

impl WriteCapabilities {
    /// A source that can do none of these things.
    pub const NONE: WriteCapabilities = WriteCapabilities {
        rename_directory: DirectoryRename::No,
        hard_links: false,
        symlinks: false,
        modes: false,
        xattrs: false,
        acls: false,
        locks: LockScope::Mount,
        holes: false,
        copy: false,
        publishes: false,
    };

    /// Refuses a call that the source can't answer.
    ///
    /// # Errors
    /// As in the table at the head of this module.
    pub fn check(&self, call: LimitedCall<'_>) -> Result<()> {
        let (can, errno, what) = match call {
            LimitedCall::Link => (self.hard_links, EPERM, "hard links"),
            LimitedCall::Symlink => (self.symlinks, EPERM, "symbolic links"),
            LimitedCall::RenameDirectory => {
                (self.rename_directory != DirectoryRename::No, EXDEV, "renames of directories")
            }
            // A source of objects has the headers themselves.
            LimitedCall::Xattr(OBJECT_HEADERS_XATTR) => {
                (self.xattrs || self.publishes, EOPNOTSUPP, "headers of objects")
            }
            // A source of objects says which files the store has.
            LimitedCall::Xattr(STAGED_XATTR) => (self.xattrs || self.publishes, EOPNOTSUPP, "staged files"),
            LimitedCall::Xattr(name) if name.starts_with(b"user.") => {
                (self.xattrs, EOPNOTSUPP, "extended attributes of users")
            }
            LimitedCall::Xattr(name) if name.starts_with(b"system.posix_acl_") => {
                (self.acls, EOPNOTSUPP, "access control lists")
            }
            LimitedCall::Xattr(_) => return Ok(()),
            LimitedCall::Allocate(mode) => {
                (self.holes || mode & !FALLOC_FL_KEEP_SIZE == 0, EOPNOTSUPP, "changes of allocated space")
            }
            LimitedCall::Seek => (self.holes, EINVAL, "searches for holes"),
            LimitedCall::Copy => (self.copy, EOPNOTSUPP, "copies within the source"),
        };
        if can {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Io(errno), format!("the source has no {what}")))
    }

    /// The attributes of a change that the source stores; the others stay.
    pub fn stored_attributes(&self, set: &AttrChange) -> AttrChange {
        if self.modes {
            return *set;
        }
        AttrChange { mode: None, uid: None, gid: None, ..*set }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_needs_its_ability_and_no_other() {
        let none = WriteCapabilities::NONE;
        let user = LimitedCall::Xattr(b"user.a");
        let acl = LimitedCall::Xattr(b"system.posix_acl_access");
        let cases = [
            (LimitedCall::Link, EPERM, WriteCapabilities { hard_links: true, ..none.clone() }),
            (LimitedCall::Symlink, EPERM, WriteCapabilities { symlinks: true, ..none.clone() }),
            (
                LimitedCall::RenameDirectory,
                EXDEV,
                WriteCapabilities { rename_directory: DirectoryRename::EachUpTo(1), ..none.clone() },
            ),
            (user, EOPNOTSUPP, WriteCapabilities { xattrs: true, ..none.clone() }),
            (acl, EOPNOTSUPP, WriteCapabilities { acls: true, ..none.clone() }),
            (LimitedCall::Allocate(3), EOPNOTSUPP, WriteCapabilities { holes: true, ..none.clone() }),
            (LimitedCall::Seek, EINVAL, WriteCapabilities { holes: true, ..none.clone() }),
            (LimitedCall::Copy, EOPNOTSUPP, WriteCapabilities { copy: true, ..none.clone() }),
        ];
        for (call, errno, able) in &cases {
            assert_eq!(none.check(*call).unwrap_err().kind(), ErrorKind::Io(*errno), "{call:?}");
            let refused = cases.iter().filter(|(other, ..)| able.check(*other).is_err()).count();
            assert!(able.check(*call).is_ok() && refused >= cases.len() - 2, "{call:?}");
        }
        // Any source has them, or refuses them itself.
        for call in [LimitedCall::Allocate(FALLOC_FL_KEEP_SIZE), LimitedCall::Xattr(b"security.capability")] {
            assert!(none.check(call).is_ok(), "{call:?}");
        }
        let bucket = WriteCapabilities { publishes: true, ..none.clone() };
        for name in [OBJECT_HEADERS_XATTR, STAGED_XATTR] {
            assert!(bucket.check(LimitedCall::Xattr(name)).is_ok() && none.check(LimitedCall::Xattr(name)).is_err());
        }
        let set = AttrChange { mode: Some(0o600), uid: Some(1), size: Some(7), ..AttrChange::default() };
        assert_eq!(none.stored_attributes(&set), AttrChange { size: Some(7), ..AttrChange::default() });
        assert_eq!(WriteCapabilities { modes: true, ..none }.stored_attributes(&set), set);
    }
}
