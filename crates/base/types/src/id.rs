//! The identity of a cached byte: an object at a version, and a block of the object.

use crate::errno::EFBIG;
use crate::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::Arc;

/// Identifies a state of an object's bytes: an etag from an object store, or `ino-mtime-ctime-size` of a file. Two reads under
/// the same version are reads of the same bytes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(Arc<str>);

impl Version {
    /// Wraps the origin's own text.
    pub fn new(text: &str) -> Self {
        Version(text.into())
    }
    /// The origin's own text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// This version of a file whose bytes may still change under the same version, since the file is being written. Each handle
    /// passes a different `mark`, and so never gets bytes that another handle has read.
    pub fn with_unsettled_mark(&self, mark: u64) -> Self {
        Version(format!("{}{MARK_SEPARATOR}{mark:016x}", self.settled_text()).into())
    }
    /// Whether the bytes may still change under this version.
    pub fn is_unsettled(&self) -> bool {
        self.settled_text().len() < self.0.len()
    }
    /// The text without a mark: the origin's own version.
    pub fn settled_text(&self) -> &str {
        match self.0.rsplit_once(MARK_SEPARATOR) {
            Some((text, mark)) if mark.len() == 16 && mark.bytes().all(|b| b.is_ascii_hexdigit()) => text,
            _ => &self.0,
        }
    }
}

/// Separates a version's text from the mark; etags do not end so.
const MARK_SEPARATOR: &str = "~w";

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A 128-bit hash of (source, path, version): the cache's name for an object at a version. 16 bits are the [`SourceTag`], so that
/// all versions of all files of a source are found without names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(pub u128);

/// A hash of a source, which is part of the id of each object of the source. Two sources may share a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceTag(u16);

/// Position of the source's tag. The bits around the tag choose folders, shards of tables and the node that holds a block.
const SOURCE_TAG_SHIFT: u32 = 64;
const SOURCE_TAG_MASK: u128 = (u16::MAX as u128) << SOURCE_TAG_SHIFT;

impl SourceTag {
    /// The tag of a source's URL.
    pub fn of_source(source: &str) -> Self {
        SourceTag(xxhash_rust::xxh3::xxh3_64(source.as_bytes()) as u16)
    }
}

impl ObjectId {
    /// Hashes the three parts, each preceded by the length so that no two triples run together. Without a version the id names a
    /// path, and has no tag. Costs about 50 ns and allocates nothing.
    pub fn new(source: &str, path: &[u8], version: &Version) -> Self {
        Self::from_text(source, path, version.as_str())
    }

    /// As [`ObjectId::new`], from a version's text.
    pub fn from_text(source: &str, path: &[u8], version: &str) -> Self {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for part in [source.as_bytes(), path, version.as_bytes()] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let id = hash.digest128();
        if version.is_empty() {
            // A path, which has no blocks.
            return ObjectId(id);
        }
        let tag = u128::from(SourceTag::of_source(source).0) << SOURCE_TAG_SHIFT;
        ObjectId(id & !SOURCE_TAG_MASK | tag)
    }

    /// Whether the object may be of a source: equal tags mean the same source, except for sources that share a tag.
    pub fn has_tag(&self, source: SourceTag) -> bool {
        (self.0 & SOURCE_TAG_MASK) >> SOURCE_TAG_SHIFT == u128::from(source.0)
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A block of an object at a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId {
    /// The object at a version.
    pub object: ObjectId,
    /// The block's number; the first byte is at `index * block_size`.
    pub index: u32,
}

/// An object at a version with everything needed to fetch the bytes: the content of a file handle. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectRef {
    /// Hash of source, path and version.
    pub id: ObjectId,
    /// Path below the source, without a leading slash; any byte but NUL.
    pub path: Arc<[u8]>,
    /// The version the bytes must have.
    pub version: Version,
    /// Length in bytes at that version.
    pub size: u64,
}

impl ObjectRef {
    /// Names the object at `path` below `source` with the attributes of the lookup.
    pub fn new(source: &str, path: &[u8], version: Version, size: u64) -> Self {
        ObjectRef { id: ObjectId::new(source, path, &version), path: path.into(), version, size }
    }

    /// Number of blocks of `block_size` in the object.
    pub fn block_count(&self, block_size: u64) -> u64 {
        self.size.div_ceil(block_size)
    }

    /// Refuses an object with more blocks of `block_size` than there are block numbers.
    ///
    /// # Errors
    /// `Io` with EFBIG.
    pub fn check_block_count(&self, block_size: u64) -> Result<()> {
        if self.block_count(block_size) <= u64::from(u32::MAX) {
            return Ok(());
        }
        let path = String::from_utf8_lossy(&self.path);
        let size = self.size;
        let why = format!(
            "'{path}' is {size} bytes long, more than {} blocks of {block_size} bytes; give a larger --block-size",
            u32::MAX
        );
        Err(Error::new(ErrorKind::Io(EFBIG), why))
    }

    /// Length of block `index` (the last may be short; 0 past the end).
    pub fn block_len(&self, index: u32, block_size: u64) -> usize {
        self.size.saturating_sub(u64::from(index) * block_size).min(block_size) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_do_not_run_together() {
        let v = Version::new("v");
        assert_ne!(ObjectId::new("a", b"bc", &v), ObjectId::new("ab", b"c", &v));
        assert_ne!(ObjectId::new("a", b"b", &Version::new("1")), ObjectId::new("a", b"b", &Version::new("2")));
        assert_eq!(ObjectId::new("a", b"b", &v), ObjectId::new("a", b"b", &v));
    }

    #[test]
    fn a_mark_makes_another_version_of_the_same_text() {
        let plain = Version::new("1a-2.3-4");
        let (one, other) = (plain.with_unsettled_mark(1), plain.with_unsettled_mark(u64::MAX));
        assert!(one != other && one != plain && one.is_unsettled() && !plain.is_unsettled());
        assert_eq!(
            (one.settled_text(), other.settled_text(), plain.settled_text()),
            ("1a-2.3-4", "1a-2.3-4", "1a-2.3-4")
        );
        assert_eq!(one.with_unsettled_mark(u64::MAX), other);
        for etag in ["\"a~w0000000000000001\"", "a~w1", "~w", "a~w000000000000000g", ""] {
            assert!(!Version::new(etag).is_unsettled(), "{etag}");
        }
    }

    #[test]
    fn block_lengths() {
        let o = ObjectRef::new("s", b"p", Version::new("v"), 10);
        assert_eq!((o.block_count(4), o.block_len(0, 4), o.block_len(2, 4), o.block_len(3, 4)), (3, 4, 2, 0));
        assert!(o.check_block_count(4).is_ok());
        let most = u64::from(u32::MAX) * 4096;
        let sized = |size| ObjectRef::new("s", b"p", Version::new("v"), size);
        assert!(sized(most).check_block_count(4096).is_ok());
        assert_eq!(sized(most + 1).check_block_count(4096).unwrap_err().kind(), ErrorKind::Io(EFBIG));
    }
}
