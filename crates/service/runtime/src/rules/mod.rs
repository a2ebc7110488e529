//! Rules for folders of a group: how nodes follow them, and how a change reaches the registry and the nodes.

pub mod change;
pub(crate) mod follow;
pub mod nodes;
pub(crate) mod state_file;

use spurline_types::units::human_bytes;
use spurline_volume::info::{FolderRule, WriteClass};

/// A rule in words.
pub fn describe_rule(rule: &FolderRule) -> String {
    let mut words = Vec::new();
    if rule.pin {
        words.push("pinned".to_owned());
    }
    if let Some(ttl) = rule.ttl_seconds {
        words.push(format!("kept for {}", human_time(ttl)));
    }
    if let Some(quota) = rule.quota_bytes {
        words.push(format!("at most {}", human_bytes(quota)));
    }
    match rule.write_class() {
        WriteClass::Direct => {}
        WriteClass::Staged => words.push("new files are staged".to_owned()),
        WriteClass::Scratch => words.push("new files are scratch data, never uploaded".to_owned()),
    }
    if words.is_empty() { "no rule".to_owned() } else { words.join(", ") }
}

/// Seconds in a unit that keeps two or three digits.
pub fn human_time(seconds: u64) -> String {
    match seconds {
        s if s < 120 => format!("{s} s"),
        s if s < 7200 => format!("{} min", s / 60),
        s if s < 172_800 => format!("{} h", s / 3600),
        s => format!("{} d", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_in_words() {
        let url = "s3://b/x".to_owned();
        let rule =
            FolderRule { url, pin: true, ttl_seconds: Some(60), quota_bytes: Some(1 << 30), ..FolderRule::default() };
        assert_eq!(describe_rule(&rule), "pinned, kept for 60 s, at most 1.00 GiB");
        let staged = FolderRule { stage: true, ..rule };
        assert_eq!(describe_rule(&staged), "pinned, kept for 60 s, at most 1.00 GiB, new files are staged");
        let scratch = FolderRule { scratch: true, ..FolderRule::default() };
        assert_eq!(describe_rule(&scratch), "new files are scratch data, never uploaded");
        assert_eq!(describe_rule(&FolderRule::default()), "no rule");
    }
}
