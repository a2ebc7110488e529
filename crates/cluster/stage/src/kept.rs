//! What a holder keeps, in memory: manifests, parts, and the sums of both. Knows no disk and no term.

use crate::manifest::{Manifest, StageClass};
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

struct KeptManifest {
    manifest: Manifest,
    /// Bytes of a small object, which lie beside the manifest.
    inline_bytes: u64,
}

/// See the head of this file.
pub struct KeptObjects {
    /// The name of this node.
    node: String,
    /// By record.
    manifests: BTreeMap<String, KeptManifest>,
    /// Bytes of each part.
    parts: HashMap<String, u64>,
    /// How many live manifests name a part.
    named: HashMap<String, usize>,
    bytes: u64,
    unsaved: usize,
}

impl KeptObjects {
    /// Nothing, at this node.
    pub fn new(node: &str) -> KeptObjects {
        KeptObjects {
            node: node.to_owned(),
            manifests: BTreeMap::new(),
            parts: HashMap::new(),
            named: HashMap::new(),
            bytes: 0,
            unsaved: 0,
        }
    }

    /// Bytes of all parts and small objects.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of objects that wait for their upload or their removal.
    pub fn unsaved(&self) -> usize {
        self.unsaved
    }

    /// The manifest of a record.
    pub fn manifest(&self, record: &str) -> Option<&Manifest> {
        self.manifests.get(record).map(|kept| &kept.manifest)
    }

    /// Bytes beside a manifest.
    pub fn inline_bytes(&self, record: &str) -> u64 {
        self.manifests.get(record).map_or(0, |kept| kept.inline_bytes)
    }

    /// The manifests of records behind `after`, in order.
    pub fn manifests_after<'a>(&'a self, after: &'a str) -> impl Iterator<Item = &'a Manifest> {
        let behind = (Bound::Excluded(after), Bound::Unbounded);
        self.manifests.range::<str, _>(behind).map(|(_, kept)| &kept.manifest)
    }

    /// The parts of a manifest that lie at this node.
    pub fn parts_of(&self, manifest: &Manifest) -> Vec<String> {
        manifest.parts_at(&self.node).map(|slice| slice.part.clone()).collect()
    }

    /// Keeps a manifest in the place of the one of the same record.
    pub fn insert(&mut self, manifest: Manifest, inline_bytes: u64) {
        self.remove(&manifest.record);
        if manifest.is_live() {
            self.unsaved += usize::from(manifest.class == StageClass::Staged);
            for part in self.parts_of(&manifest) {
                *self.named.entry(part).or_default() += 1;
            }
        }
        self.bytes += inline_bytes;
        self.manifests.insert(manifest.record.clone(), KeptManifest { manifest, inline_bytes });
    }

    /// Forgets a manifest.
    pub fn remove(&mut self, record: &str) -> Option<Manifest> {
        let KeptManifest { manifest, inline_bytes } = self.manifests.remove(record)?;
        self.bytes -= inline_bytes;
        if manifest.is_live() {
            self.unsaved -= usize::from(manifest.class == StageClass::Staged);
            for part in self.parts_of(&manifest) {
                self.release(&part);
            }
        }
        Some(manifest)
    }

    fn release(&mut self, part: &str) {
        if let Some(count) = self.named.get_mut(part) {
            *count -= 1;
            if *count == 0 {
                self.named.remove(part);
            }
        }
    }

    /// Whether a live manifest names the part.
    pub fn is_named(&self, part: &str) -> bool {
        self.named.contains_key(part)
    }

    /// Whether the part is here.
    pub fn has_part(&self, part: &str) -> bool {
        self.parts.contains_key(part)
    }

    /// The bytes of a part.
    pub fn part_len(&self, part: &str) -> u64 {
        self.parts.get(part).copied().unwrap_or_default()
    }

    /// All names of parts.
    pub fn part_names(&self) -> impl Iterator<Item = &String> {
        self.parts.keys()
    }

    /// A part is here.
    pub fn insert_part(&mut self, part: &str, len: u64) {
        self.bytes += len;
        self.bytes -= self.parts.insert(part.to_owned(), len).unwrap_or_default();
    }

    /// A part is here no longer; the number of bytes.
    pub fn remove_part(&mut self, part: &str) -> u64 {
        let len = self.parts.remove(part).unwrap_or_default();
        self.bytes -= len;
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Phase, Piece, Slice};
    use crate::manifest_samples::sample;

    fn with_part(record: &str, part: &str) -> Manifest {
        let holders = vec!["n1".to_owned()];
        let slices = vec![Slice { part: part.to_owned(), from: 0, len: 10, holders }];
        let pieces = vec![Piece { slices }];
        Manifest { record: record.to_owned(), pieces, ..sample("key", "mark", 1) }
    }

    #[test]
    fn sums_follow_each_change() {
        let mut kept = KeptObjects::new("n1");
        kept.insert_part("part", 10);
        kept.insert_part("part", 12);
        kept.insert(with_part("a", "part"), 0);
        kept.insert(with_part("b", "part"), 0);
        kept.insert(Manifest { record: "c".to_owned(), ..sample("small", "mark", 2) }, 7);
        assert_eq!((kept.bytes(), kept.unsaved()), (19, 3));
        let after: Vec<&str> = kept.manifests_after("a").map(|manifest| manifest.record.as_str()).collect();
        assert_eq!(after, ["b", "c"]);

        let done = Manifest { phase: Phase::Done, ..with_part("a", "part") };
        kept.insert(done, 0);
        assert!(kept.is_named("part"), "the other record has the part, too");
        kept.remove("b");
        assert!(!kept.is_named("part"));
        assert_eq!(kept.remove_part("part"), 12);
        kept.remove("c");
        assert_eq!((kept.bytes(), kept.unsaved()), (0, 0));
    }
}
