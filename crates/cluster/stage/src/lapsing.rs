//! Parts that no manifest names yet, or none any more: these stay for a while, for a call may name them. Knows no disk.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// The begin of the names of parts that a single call makes: the call names these in a manifest soon, or nothing does.
pub const CALL_PART: &str = "call-";

/// The begin of the names of the parts of a call.
pub fn call_upload(name: &str) -> String {
    format!("{CALL_PART}{name}")
}

struct LapsingUpload {
    /// When the last part was added.
    since: Instant,
    parts: BTreeSet<String>,
}

/// See the head of this file. All parts of an upload lapse together: a call names many parts at its end.
#[derive(Default)]
pub struct LapsingParts(HashMap<String, LapsingUpload>);

/// The upload of a part; a part that is named otherwise is an upload.
fn upload_of(part: &str) -> &str {
    part.rsplit_once('-').map_or(part, |(upload, _)| upload)
}

impl LapsingParts {
    /// Nothing names the part from now on.
    pub fn add(&mut self, part: &str, now: Instant) {
        let upload = self.0.entry(upload_of(part).to_owned());
        let upload = upload.or_insert_with(|| LapsingUpload { since: now, parts: BTreeSet::new() });
        upload.since = now;
        upload.parts.insert(part.to_owned());
    }

    /// A manifest names the part.
    pub fn remove(&mut self, part: &str) {
        let Some(upload) = self.0.get_mut(upload_of(part)) else { return };
        upload.parts.remove(part);
        if upload.parts.is_empty() {
            self.0.remove(upload_of(part));
        }
    }

    /// Whether nothing names the part.
    pub fn contains(&self, part: &str) -> bool {
        self.0.get(upload_of(part)).is_some_and(|upload| upload.parts.contains(part))
    }

    /// Takes out the parts of uploads that got no part for this time.
    pub fn take_lapsed(&mut self, now: Instant, time: Duration) -> Vec<String> {
        let lapsed = self.0.extract_if(|_, upload| now.saturating_duration_since(upload.since) >= time);
        lapsed.flat_map(|(_, upload)| upload.parts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_an_upload_lapse_together() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let time = Duration::from_secs(600);
        let mut lapsing = LapsingParts::default();
        lapsing.add("call-a-1", at(0));
        lapsing.add("call-b-1", at(0));
        lapsing.add("call-a-2", at(500));
        lapsing.add("call-a-3", at(500));
        assert_eq!(lapsing.take_lapsed(at(700), time), ["call-b-1"], "another part of a has come");
        lapsing.remove("call-a-1");
        assert!(lapsing.contains("call-a-2") && !lapsing.contains("call-a-1"));
        assert_eq!(lapsing.take_lapsed(at(1100), time), ["call-a-2", "call-a-3"]);
        assert!(lapsing.take_lapsed(at(9999), time).is_empty());
    }
}
