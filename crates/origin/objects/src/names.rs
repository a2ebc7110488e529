//! Names and attributes of a bucket's files: keys, identities, owners and modes. It knows no request.

use crate::file_attrs::{FileAttrs, file_time};
use crate::write_options::BucketWriteOptions;
use spurline_object_store::HIDDEN_NAME;
use spurline_sys::{join_path, random};
use spurline_types::{Error, ErrorKind, FileKind, ObjectAttr, ObjectId, Result};
use spurline_volume::writes::{FileIdentity, FileTime, NamePath, NodeAttr, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};
use std::sync::Once;

/// Longest key of S3, in bytes.
pub(crate) const KEY_MAX: usize = 1024;

/// The path of a name.
pub(crate) fn path_of(at: &NamePath<'_>) -> Vec<u8> {
    join_path(at.directory.path, at.name)
}

/// The key of the object at `path` below the prefix `root`, which ends with a slash or is empty.
///
/// # Errors
/// `EILSEQ` for a name that is not UTF-8, `ENAMETOOLONG`.
pub(crate) fn key_of(root: &str, path: &[u8]) -> Result<String> {
    let path = std::str::from_utf8(path).map_err(|_| {
        let why = format!("'{}' is not UTF-8, and names of objects are", String::from_utf8_lossy(path));
        Error::new(ErrorKind::Io(libc::EILSEQ), why)
    })?;
    let key = format!("{root}{path}");
    if key.len() > KEY_MAX {
        let why = format!("the key '{key}' has {} bytes; S3 allows {KEY_MAX}", key.len());
        return Err(Error::new(ErrorKind::Io(libc::ENAMETOOLONG), why));
    }
    Ok(key)
}

/// Checks that a new name is none of the mount's own objects. The first refusal is logged.
///
/// # Errors
/// `EPERM`.
pub(crate) fn check_new_name(path: &[u8]) -> Result<()> {
    if !path.starts_with(HIDDEN_NAME.as_bytes()) {
        return Ok(());
    }
    let why = format!(
        "'{}' can't be made: names with '{HIDDEN_NAME}' at the root of the source are those of the mount's own objects",
        String::from_utf8_lossy(path)
    );
    static FIRST_REFUSAL: Once = Once::new();
    FIRST_REFUSAL.call_once(|| tracing::warn!("{why}"));
    Err(Error::new(ErrorKind::Io(libc::EPERM), why))
}

/// The identity of what a path leads to: a folder's path, a file's path and version. A link is never the same as a file with
/// its bytes.
pub(crate) fn identity_of(path: &[u8], attr: &ObjectAttr) -> FileIdentity {
    let hash = match attr.kind {
        FileKind::Directory => ObjectId::from_text("", path, "/").0,
        FileKind::Symlink => ObjectId::from_text("@", path, attr.version.as_str()).0,
        FileKind::File => ObjectId::from_text("", path, attr.version.as_str()).0,
    };
    identity_from(hash)
}

/// The place in an identity that says whether the file has not been published.
const UNPUBLISHED_AT: usize = 16;

/// An identity that nothing else has, for a file that is not published.
pub(crate) fn random_identity() -> FileIdentity {
    let mut bytes = *identity_from(u128::from(random()) << 64 | u128::from(random())).bytes();
    bytes[UNPUBLISHED_AT] = 1;
    FileIdentity::new(bytes, false)
}

/// The number of a file, as its identity before the publication has it.
pub(crate) fn file_number(identity: &FileIdentity) -> u64 {
    identity.bytes()[..size_of::<u64>()].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The same bytes can be the same version again later.
fn identity_from(hash: u128) -> FileIdentity {
    let mut bytes = [0; FileIdentity::LEN];
    bytes[..UNPUBLISHED_AT].copy_from_slice(&hash.to_le_bytes());
    FileIdentity::new(bytes, false)
}

/// The inode number that programs see: it stays when the file is written.
pub(crate) fn inode_of(path: &[u8]) -> u64 {
    ObjectId::from_text("", path, "").0 as u64
}

/// The file type and the permission bits of an object without a mode of its own.
pub(crate) fn default_mode(options: &BucketWriteOptions, kind: FileKind) -> u32 {
    match kind {
        FileKind::Directory => S_IFDIR | options.folder_mode,
        FileKind::File => S_IFREG | options.file_mode,
        FileKind::Symlink => S_IFLNK | 0o777,
    }
}

/// The attributes of a file or folder at `path`, whose metadata have `own`.
pub(crate) fn node_attr(options: &BucketWriteOptions, path: &[u8], attr: &ObjectAttr, own: &FileAttrs) -> NodeAttr {
    let changed_at = file_time(attr.mtime);
    let mtime = own.mtime.unwrap_or(changed_at);
    let default_mode = default_mode(options, attr.kind);
    let identity = identity_of(path, attr);
    NodeAttr {
        identity,
        inode: inode_of(path),
        mode: default_mode & S_IFMT | own.mode.unwrap_or(default_mode) & !S_IFMT,
        nlink: if attr.kind == FileKind::Directory { 2 } else { 1 },
        uid: own.uid.unwrap_or(options.uid),
        gid: own.gid.unwrap_or(options.gid),
        rdev: 0,
        size: attr.size,
        blocks: attr.size.div_ceil(512),
        blksize: 1 << 20,
        atime: own.atime.unwrap_or(mtime),
        mtime,
        ctime: distinct_time(changed_at, &identity),
    }
}

/// The time of a version. Stores give whole seconds: a fraction tells two versions of one second apart, for the kernel keeps the pages of a
/// file whose length and times are the same.
fn distinct_time(time: FileTime, identity: &FileIdentity) -> FileTime {
    if time.nanos > 0 {
        return time;
    }
    let number = file_number(identity) % 1_000_000_000;
    FileTime { nanos: number as u32, ..time }
}

/// The content type that a name suggests; stores and browsers show an object by it.
pub(crate) fn content_type_of(path: &[u8]) -> &'static str {
    spurline_types::content_type_of(path).unwrap_or("application/octet-stream")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_checked() {
        assert_eq!(key_of("p/", b"a/b").unwrap(), "p/a/b");
        assert_eq!(key_of("", b"\xff").unwrap_err().kind(), ErrorKind::Io(libc::EILSEQ));
        assert_eq!(key_of("", &[b'a'; 1025]).unwrap_err().kind(), ErrorKind::Io(libc::ENAMETOOLONG));
    }

    #[test]
    fn names_of_hidden_objects_are_refused() {
        for path in [&b".spurline-part-1"[..], b".spurline-", b".spurline-x/a"] {
            assert_eq!(check_new_name(path).unwrap_err().kind(), ErrorKind::Io(libc::EPERM));
        }
        for path in [&b"a/.spurline-part-1"[..], b".spurline", b""] {
            check_new_name(path).unwrap();
        }
    }

    #[test]
    fn versions_and_kinds_are_told_apart() {
        let file = |etag: &str| spurline_origin::object_attr(1, std::time::SystemTime::UNIX_EPOCH, etag.to_owned());
        let link = ObjectAttr { kind: FileKind::Symlink, ..file("1") };
        assert_ne!(identity_of(b"a", &link), identity_of(b"a", &file("1")));
        let first = identity_of(b"a", &file("1"));
        assert_eq!(first, identity_of(b"a", &file("1")));
        assert_ne!(first, identity_of(b"a", &file("2")));
        assert_ne!(first, identity_of(b"b", &file("1")));
        assert_ne!(first, identity_of(b"a", &spurline_origin::folder_attr()));
    }

    #[test]
    fn content_types_follow_extensions() {
        assert_eq!(content_type_of(b"a/b.JSON"), "application/json");
        assert_eq!(content_type_of(b"json"), "application/octet-stream");
        assert_eq!(content_type_of(b"x.tar/model.safetensors"), "application/octet-stream");
    }
}
