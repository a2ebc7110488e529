//! Objects of one kind by age, with the sum of their bytes. Knows no manifest.

use crate::manifest::BucketKey;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::time::{Duration, Instant};

/// See the head of this file.
#[derive(Default)]
pub struct AgedObjects {
    bytes: u64,
    by_close: BTreeSet<(Instant, BucketKey)>,
}

impl AgedObjects {
    /// Adds an object with the time of its close.
    pub fn add(&mut self, closed: Instant, at: &BucketKey, size: u64) {
        if self.by_close.insert((closed, at.clone())) {
            self.bytes += size;
        }
    }

    /// Takes out an object.
    pub fn remove(&mut self, closed: Instant, at: &BucketKey, size: u64) {
        if self.by_close.remove(&(closed, at.clone())) {
            self.bytes -= size;
        }
    }

    /// Bytes of all objects.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of objects.
    pub fn count(&self) -> u64 {
        self.by_close.len() as u64
    }

    /// All objects, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &(Instant, BucketKey)> {
        self.by_close.iter()
    }

    /// The objects that were closed after `since` and not after `until`.
    pub fn closed_between(&self, since: Option<Instant>, until: Instant) -> impl Iterator<Item = &BucketKey> {
        let behind = |since: Instant| Bound::Included((since + Duration::from_nanos(1), BucketKey::new("", "")));
        let first = since.map_or(Bound::Unbounded, behind);
        let closed = self.by_close.range((first, Bound::Unbounded));
        closed.take_while(move |(closed, _)| *closed <= until).map(|(_, at)| at)
    }
}
