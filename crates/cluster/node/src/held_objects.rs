//! Lists the cached objects that readers used lately, page by page, for handing them on before a drain; and writes all
//! objects used lately as a record, by which the next process of the node knows them.

use crate::CacheNode;
use crate::recent::RecentObject;
use serde_json::{Value, json};
use spurline_types::{ObjectId, ObjectRef, Version};
use spurline_volume::Volume as _;
use std::collections::HashMap;
use std::ops::Range;

/// Page size in bytes of text; an answer may be four times as long.
const PAGE: usize = 1 << 20;
/// Maximum runs listed per object; the rest is not handed on.
const RUNS_MAX: usize = 50_000;

impl CacheNode {
    /// A page of the held objects as JSON, ordered by id: source, path (hexadecimal, as it may hold any byte),
    /// version, size, number of uses and runs of blocks. `next` is the id for the next page. The first page has the bytes
    /// of all blocks, of whatever object, as `cached_bytes`.
    pub fn held_page(&self, after: Option<ObjectId>) -> Value {
        let mut page = self.list_held_objects(after);
        if after.is_none() {
            page["cached_bytes"] = self.shared.cached_bytes().into();
        }
        page
    }

    fn list_held_objects(&self, after: Option<ObjectId>) -> Value {
        let mut objects = Vec::new();
        let mut bytes = 0;
        let mut last = None;
        for asked in self.recent.objects_after(after) {
            if bytes >= PAGE {
                return json!({ "objects": objects, "next": last });
            }
            last = Some(asked.object.id.to_string());
            if let Some(object) = self.held_object(&asked) {
                bytes += object.to_string().len();
                objects.push(object);
            }
        }
        json!({ "objects": objects, "next": Value::Null })
    }

    fn held_object(&self, asked: &RecentObject) -> Option<Value> {
        let cache = self.volumes().get(asked.volume).cloned()?;
        let object = &asked.object;
        let size = self.shared.block_size;
        let mut runs: Vec<Range<u32>> = Vec::new();
        for index in 0..u32::try_from(object.block_count(size)).unwrap_or(u32::MAX) {
            if !cache.has_range(object, u64::from(index) * size, object.block_len(index, size)) {
                continue;
            }
            let many = runs.len() == RUNS_MAX;
            match runs.last_mut() {
                Some(run) if run.end == index => run.end += 1,
                _ if many => break,
                _ => runs.push(index..index + 1),
            }
        }
        (!runs.is_empty()).then(|| {
            let mut listed = object_json(cache.source(), asked);
            listed["runs"] = runs.iter().map(|run| [run.start, run.end]).collect();
            listed
        })
    }

    /// The number of objects added to those used lately since the start.
    pub fn recent_count(&self) -> u64 {
        self.recent.added_count()
    }

    /// The objects used lately, as a record for the next process.
    pub fn recent_record(&self) -> Value {
        let volumes = self.volumes();
        let objects = self.recent.objects_after(None);
        objects.iter().filter_map(|asked| Some(object_json(volumes.get(asked.volume)?.source(), asked))).collect()
    }

    /// Takes the objects of a record whose sources are served; returns their number.
    pub fn restore_recent(&self, record: &Value) -> usize {
        let mut volumes: HashMap<&str, Option<usize>> = HashMap::new();
        let mut restored = 0;
        for listed in record.as_array().into_iter().flatten() {
            let Some((source, object)) = object_of_json(listed) else { continue };
            if let Some(volume) =
                *volumes.entry(source).or_insert_with(|| self.volume_for(source).ok().map(|volume| volume.0 as usize))
            {
                self.recent.restore_object(volume, object, listed["times"].as_u64().unwrap_or(1));
                restored += 1;
            }
        }
        restored
    }
}

/// An object used lately; its path is hexadecimal, as it may hold any byte.
fn object_json(source: &str, asked: &RecentObject) -> Value {
    let RecentObject { object, times, .. } = asked;
    let path: String = object.path.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "source": source, "path": path, "version": object.version.as_str(), "size": object.size, "times": times,
    })
}

/// The source and the object of an entry of [`CacheNode::held_page`] or [`CacheNode::recent_record`]; `None` when it is
/// malformed.
pub fn object_of_json(listed: &Value) -> Option<(&str, ObjectRef)> {
    let source = listed["source"].as_str()?;
    let path = bytes_of_hex(listed["path"].as_str()?)?;
    let version = Version::new(listed["version"].as_str()?);
    Some((source, ObjectRef::new(source, &path, version, listed["size"].as_u64()?)))
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
        assert_eq!(object_of_json(&object_json("s", &asked)), Some(("s", object)));
        assert_eq!(object_of_json(&json!({"source": "s", "path": "zz", "version": "1", "size": 9})), None);
    }
}
