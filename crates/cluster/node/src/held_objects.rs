//! Lists the cached objects that readers used lately, page by page, for handing them on before a drain; and writes all
//! objects used lately as a record, by which the next process of the node knows them.

use crate::CacheNode;
use crate::recent::RecentObject;
use serde::{Deserialize, Serialize};
use spurline_types::{ObjectId, ObjectRef, Version};
use spurline_volume::Volume as _;
use std::collections::HashMap;

/// Page size in bytes of text; an answer may be four times as long.
const PAGE: usize = 1 << 20;
/// Maximum runs listed per object; the rest is not handed on.
const RUNS_MAX: usize = 50_000;

/// An object used lately.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentRecord {
    /// The source.
    pub source: String,
    /// Hexadecimal, as a path may hold any byte.
    path: String,
    version: String,
    size: u64,
    /// Number of uses.
    #[serde(default = "one_use")]
    pub times: u64,
}

fn one_use() -> u64 {
    1
}

impl RecentRecord {
    fn new(source: &str, asked: &RecentObject) -> RecentRecord {
        let RecentObject { object, times, .. } = asked;
        RecentRecord {
            source: source.to_owned(),
            path: object.path.iter().map(|byte| format!("{byte:02x}")).collect(),
            version: object.version.as_str().to_owned(),
            size: object.size,
            times: *times,
        }
    }

    /// The object; `None` when the path is malformed.
    pub fn object(&self) -> Option<ObjectRef> {
        let path = bytes_of_hex(&self.path)?;
        Some(ObjectRef::new(&self.source, &path, Version::new(&self.version), self.size))
    }
}

/// An object with cached blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldObject {
    /// The object.
    #[serde(flatten)]
    pub recent: RecentRecord,
    /// Runs of cached blocks: the first block, and the block after the last.
    pub runs: Vec<[u32; 2]>,
}

/// A page of the objects with cached blocks, by id.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPage {
    /// The objects.
    pub objects: Vec<HeldObject>,
    /// The id after which the next page begins.
    pub next: Option<String>,
    /// In the first page: bytes of all blocks, of whatever object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_bytes: Option<u64>,
}

impl CacheNode {
    /// The page of the held objects after an id.
    pub fn held_page(&self, after: Option<ObjectId>) -> HeldPage {
        let mut page = self.list_held_objects(after);
        if after.is_none() {
            page.cached_bytes = Some(self.shared.cached_bytes());
        }
        page
    }

    fn list_held_objects(&self, after: Option<ObjectId>) -> HeldPage {
        let mut page = HeldPage::default();
        let mut bytes = 0;
        let mut last = None;
        for asked in self.recent.objects_after(after) {
            if bytes >= PAGE {
                page.next = last;
                return page;
            }
            last = Some(asked.object.id.to_string());
            if let Some(object) = self.held_object(&asked) {
                bytes += serde_json::to_string(&object).map_or(0, |text| text.len());
                page.objects.push(object);
            }
        }
        page
    }

    fn held_object(&self, asked: &RecentObject) -> Option<HeldObject> {
        let cache = self.volumes().get(asked.volume).cloned()?;
        let object = &asked.object;
        let size = self.shared.block_size;
        let mut runs: Vec<[u32; 2]> = Vec::new();
        for index in 0..u32::try_from(object.block_count(size)).unwrap_or(u32::MAX) {
            if !cache.has_range(object, u64::from(index) * size, object.block_len(index, size)) {
                continue;
            }
            let many = runs.len() == RUNS_MAX;
            match runs.last_mut() {
                Some([_, end]) if *end == index => *end += 1,
                _ if many => break,
                _ => runs.push([index, index + 1]),
            }
        }
        (!runs.is_empty()).then(|| HeldObject { recent: RecentRecord::new(cache.source(), asked), runs })
    }

    /// The number of objects added to those used lately since the start.
    pub fn recent_count(&self) -> u64 {
        self.recent.added_count()
    }

    /// The objects used lately, for the next process.
    pub fn recent_records(&self) -> Vec<RecentRecord> {
        let volumes = self.volumes();
        let objects = self.recent.objects_after(None);
        let known = objects.iter().filter_map(|asked| Some((volumes.get(asked.volume)?.source(), asked)));
        known.map(|(source, asked)| RecentRecord::new(source, asked)).collect()
    }

    /// Takes the records whose sources are served; returns their number.
    pub fn restore_recent(&self, records: &[RecentRecord]) -> usize {
        let mut volumes: HashMap<&str, Option<usize>> = HashMap::new();
        let mut restored = 0;
        for record in records {
            let Some(object) = record.object() else { continue };
            let source = record.source.as_str();
            if let Some(volume) =
                *volumes.entry(source).or_insert_with(|| self.volume_for(source).ok().map(|volume| volume.0 as usize))
            {
                self.recent.restore_object(volume, object, record.times);
                restored += 1;
            }
        }
        restored
    }
}

fn bytes_of_hex(text: &str) -> Option<Vec<u8>> {
    let (digits, rest) = text.as_bytes().as_chunks::<2>();
    rest.is_empty()
        .then(|| digits.iter().map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_any_bytes_come_back() {
        assert_eq!(bytes_of_hex("00ff612f"), Some(vec![0, 255, b'a', b'/']));
        assert_eq!((bytes_of_hex("0"), bytes_of_hex("zz"), bytes_of_hex("")), (None, None, Some(Vec::new())));
        let object = ObjectRef::new("s", b"a\xff", Version::new("1"), 9);
        let asked = RecentObject { volume: 0, object: object.clone(), times: 3 };
        let record = RecentRecord::new("s", &asked);
        assert_eq!(record.object(), Some(object));
        assert_eq!(RecentRecord { path: "zz".into(), ..record }.object(), None);
    }
}
