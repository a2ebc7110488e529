//! Whether the listings of a store have the ETags that its heads have. Where they have not, a request for each name would be the only
//! way to a listing with ETags: the versions of all files of the bucket are then made of size and time, as for a store without ETags.
//! It knows no request.

use spurline_types::Stats;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The knowledge of a store's listings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ListingEtags {
    /// No object with an ETag was seen in a listing and in a head.
    Unknown,
    /// An object has the same ETag, or none, in listings and in heads.
    AsInHeads,
    /// Heads have ETags, and listings have none.
    Missing,
}

/// The knowledge of one bucket, for all who use it.
pub struct ListedEtags {
    state: AtomicU8,
    stats: Arc<Stats>,
}

impl ListedEtags {
    /// Of a store that is not known yet.
    pub fn new(stats: Arc<Stats>) -> ListedEtags {
        ListedEtags { state: AtomicU8::new(ListingEtags::Unknown as u8), stats }
    }

    /// What is known of the store.
    pub fn state(&self) -> ListingEtags {
        match self.state.load(Ordering::Relaxed) {
            state if state == ListingEtags::Unknown as u8 => ListingEtags::Unknown,
            state if state == ListingEtags::AsInHeads as u8 => ListingEtags::AsInHeads,
            _ => ListingEtags::Missing,
        }
    }

    /// A listing has an ETag, or neither a listing nor a head has one.
    pub fn note_as_in_heads(&self) {
        let unknown = ListingEtags::Unknown as u8;
        let known = ListingEtags::AsInHeads as u8;
        let _ = self.state.compare_exchange(unknown, known, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// A head has an ETag that listings do not have; `place` names the server for messages.
    pub fn note_missing(&self, place: &str) {
        let before = self.state.swap(ListingEtags::Missing as u8, Ordering::Relaxed);
        if before != ListingEtags::Missing as u8 {
            self.stats.metadata.etagless_buckets.add(1);
            tracing::warn!(
                "the listings of {place} have no ETags: a file's version is made of size and time in whole seconds, so that a change \
                 within the same second to bytes of the same length is not noticed"
            );
        }
    }
}

impl Drop for ListedEtags {
    fn drop(&mut self) {
        if self.state() == ListingEtags::Missing {
            self.stats.metadata.etagless_buckets.sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_known_once_an_etag_was_compared() {
        let stats = Arc::new(Stats::default());
        let count = || stats.metadata.etagless_buckets.get();
        let etags = ListedEtags::new(Arc::clone(&stats));
        assert_eq!(etags.state(), ListingEtags::Unknown);
        etags.note_as_in_heads();
        assert_eq!((etags.state(), count()), (ListingEtags::AsInHeads, 0));
        // A store that leaves out only some.
        etags.note_missing("the store");
        etags.note_missing("the store");
        etags.note_as_in_heads();
        assert_eq!((etags.state(), count()), (ListingEtags::Missing, 1));
        drop(etags);
        assert_eq!(count(), 0);
    }
}
