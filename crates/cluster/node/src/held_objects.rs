//! Lists the cached objects that readers used lately, page by page, for handing them on before a drain.

use crate::CacheNode;
use crate::recent::RecentObject;
use serde_json::{Value, json};
use spurline_types::ObjectId;
use spurline_volume::Volume as _;
use std::ops::Range;

/// Page size in bytes of text; an answer may be four times as long.
const PAGE: usize = 1 << 20;
/// Maximum runs listed per object; the rest is not handed on.
const RUNS_MAX: usize = 50_000;

impl CacheNode {
    /// A page of the held objects as JSON, ordered by id: source, path (hexadecimal, as it may hold any byte),
    /// version, size, number of uses and runs of blocks. `next` is the id for the next page.
    pub fn held_page(&self, after: Option<ObjectId>) -> Value {
        let (mut objects, mut bytes, mut last) = (Vec::new(), 0, None);
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
        let (cache, object, size) = (self.volumes().get(asked.volume).cloned()?, &asked.object, self.shared.block_size);
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
        let path: String = object.path.iter().map(|byte| format!("{byte:02x}")).collect();
        (!runs.is_empty()).then(|| {
            json!({
                "source": cache.source(), "path": path, "version": object.version.as_str(), "size": object.size,
                "times": asked.times, "runs": runs.iter().map(|run| [run.start, run.end]).collect::<Vec<_>>(),
            })
        })
    }
}
