//! What a node says it holds of what readers asked it for lately, page by page, for whoever hands it on.

use crate::Node;
use crate::recent::Asked;
use serde_json::{Value, json};
use spurline_types::ObjectId;
use spurline_volume::Volume as _;
use std::ops::Range;

/// The path that `Info` of no volume has to ask for the first page; the page after an object has a slash and its id
/// behind it.
pub const HELD: &[u8] = b"held";
/// Bytes of text that end a page; an answer may have four times as many.
const PAGE: usize = 1 << 20;
/// Runs of blocks that are told of one object: what is more is not handed on.
const RUNS_MAX: usize = 50_000;

/// The object after which a page begins, out of the path that asks for it; `None` when it asks for something else.
pub(crate) fn page_after(path: &[u8]) -> Option<Option<ObjectId>> {
    let rest = path.strip_prefix(HELD)?;
    if rest.is_empty() {
        return Some(None);
    }
    let id = std::str::from_utf8(rest.strip_prefix(b"/")?).ok()?;
    u128::from_str_radix(id, 16).ok().map(|id| Some(ObjectId(id)))
}

impl Node {
    /// A page of the objects held, in the order of their ids, as JSON: for each its source, path (in hexadecimal, as any
    /// byte may be in it), version, size, how often it was come to and runs of blocks; and `next`, after which the next
    /// page begins.
    pub fn held(&self, after: Option<ObjectId>) -> Value {
        let (mut objects, mut bytes, mut last) = (Vec::new(), 0, None);
        for asked in self.recent.after(after) {
            if bytes >= PAGE {
                return json!({ "objects": objects, "next": last });
            }
            last = Some(asked.object.id.to_string());
            if let Some(object) = self.held_of(&asked) {
                bytes += object.to_string().len();
                objects.push(object);
            }
        }
        json!({ "objects": objects, "next": Value::Null })
    }

    fn held_of(&self, asked: &Asked) -> Option<Value> {
        let (cache, object, size) = (self.volumes().get(asked.volume).cloned()?, &asked.object, self.shared.block_size);
        let mut runs: Vec<Range<u32>> = Vec::new();
        for index in 0..u32::try_from(object.blocks(size)).unwrap_or(u32::MAX) {
            if !cache.has(object, u64::from(index) * size, object.block_len(index, size)) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_asked_for_by_path() {
        assert_eq!(page_after(HELD), Some(None));
        let id = ObjectId(0xabc << 64);
        assert_eq!(page_after(format!("held/{id}").as_bytes()), Some(Some(id)));
        assert_eq!([&b"held/"[..], b"", b"heldover", b"a/b"].map(page_after), [None; 4]);
    }
}
