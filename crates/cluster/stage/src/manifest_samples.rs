//! Manifests for the tests of this crate.

use crate::manifest::{BucketKey, KeptAttributes, Manifest, Phase, StageClass, StoreBase};

/// A small object that waits for the upload, in the first term.
pub fn sample(key: &str, mark: &str, order: u64) -> Manifest {
    Manifest {
        at: BucketKey::new("s3://bucket", key),
        record: format!("record-{mark}"),
        mark: mark.to_owned(),
        term: 1,
        order,
        phase: Phase::Waiting,
        class: StageClass::Staged,
        base: StoreBase::Absent,
        begun: Vec::new(),
        may_be_absent: false,
        attributes: KeptAttributes::default().marked(mark),
        size: 3,
        pieces: Vec::new(),
        closed_s: 1_700_000_000,
        holders: vec!["node-0".to_owned(), "node-1".to_owned()],
        former: Vec::new(),
        revision: 0,
    }
}
