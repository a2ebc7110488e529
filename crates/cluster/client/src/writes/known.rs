//! The objects that names led to when they were last looked up: a change that is repeated on another node is compared
//! with them. A table of fixed size; a name that lost its entry is only less certain.

use parking_lot::Mutex;
use spurline_types::ObjectId;
use spurline_volume::writes::FileIdentity;

/// Entries, each 48 bytes.
const ENTRIES: usize = 8192;
/// Locks, so that threads rarely meet.
const SHARDS: usize = 16;

type KnownName = Option<(u64, FileIdentity)>;

/// The table.
pub(crate) struct KnownObjects {
    shards: Box<[Mutex<Box<[KnownName]>>]>,
}

impl Default for KnownObjects {
    fn default() -> Self {
        KnownObjects {
            shards: std::iter::repeat_with(|| Mutex::new(vec![None; ENTRIES / SHARDS].into_boxed_slice()))
                .take(SHARDS)
                .collect(),
        }
    }
}

impl KnownObjects {
    fn place(path: &[u8]) -> (u64, usize, usize) {
        let hash = ObjectId::from_text("", path, "").0 as u64;
        (hash, hash as usize % SHARDS, (hash >> 32) as usize % (ENTRIES / SHARDS))
    }

    /// Records what `path` leads to.
    pub fn note_object(&self, path: &[u8], identity: FileIdentity) {
        let (hash, shard, at) = Self::place(path);
        self.shards[shard].lock()[at] = Some((hash, identity));
    }

    /// Records that `path` leads to nothing.
    pub fn note_absence(&self, path: &[u8]) {
        let (hash, shard, at) = Self::place(path);
        let mut shard = self.shards[shard].lock();
        if shard[at].is_some_and(|(known, _)| known == hash) {
            shard[at] = None;
        }
    }

    /// What `path` led to.
    pub fn object(&self, path: &[u8]) -> Option<FileIdentity> {
        let (hash, shard, at) = Self::place(path);
        self.shards[shard].lock()[at].filter(|(known, _)| *known == hash).map(|(_, identity)| identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lookup_counts() {
        let known = KnownObjects::default();
        let identity = FileIdentity::from_number;
        assert_eq!(known.object(b"a"), None);
        known.note_object(b"a", identity(1));
        known.note_object(b"a", identity(2));
        assert_eq!((known.object(b"a"), known.object(b"b")), (Some(identity(2)), None));
        known.note_absence(b"a");
        assert_eq!(known.object(b"a"), None);
    }
}
