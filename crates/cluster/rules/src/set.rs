//! A rule set: rules, revision, limits and JSON form. Does not know where the set is stored.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use spurline_cache::{FolderRule, rule_class};
use spurline_types::{Error, ErrorKind, Result};

/// Maximum number of rules of a group: each fetched block is compared with all rules.
pub const RULES_MAX: usize = 255;
/// Maximum length of a set as text: the text fits into a request to a node.
const TEXT_MAX: usize = 48 << 10;
/// Larger revisions are refused, so that each revision has a successor.
const REVISION_MAX: u64 = 1 << 53;
/// Maximum length of a rule's URL.
const URL_MAX: usize = 1024;

/// All folder rules of a group at a revision. As JSON: an object with these fields.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "UncheckedRules")]
pub struct RuleSet {
    /// Grows with every change; 0 before the first rule.
    pub revision: u64,
    /// By URL, at most a single rule for each folder.
    pub rules: Vec<FolderRule>,
}

/// A set from elsewhere.
#[derive(Deserialize)]
struct UncheckedRules {
    revision: u64,
    rules: Vec<FolderRule>,
}

impl TryFrom<UncheckedRules> for RuleSet {
    type Error = Error;

    fn try_from(UncheckedRules { revision, mut rules }: UncheckedRules) -> Result<RuleSet> {
        if revision > REVISION_MAX {
            return Err(wrong_rules("the revision is too large"));
        }
        if rules.len() > RULES_MAX {
            return Err(wrong_rules("there are too many"));
        }
        if !rules.iter().all(|rule| is_valid_url(&rule.url)) {
            return Err(wrong_rules("the URL of a folder is missing or too long"));
        }
        rules.sort_by(|a, b| a.url.cmp(&b.url));
        let set = RuleSet { revision, rules };
        if set.shared_class().is_some() {
            return Err(wrong_rules("a folder occurs twice"));
        }
        Ok(set)
    }
}

impl RuleSet {
    /// The set of a record in the registry; `Null` is the empty set.
    ///
    /// # Errors
    /// `Invalid` for any other value that is no rule set.
    pub fn from_record(record: &Value) -> Result<RuleSet> {
        if record.is_null() {
            return Ok(RuleSet::default());
        }
        RuleSet::deserialize(record).map_err(|error| wrong_rules(&error.to_string()))
    }

    /// The set as text, in the form of its JSON.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The rule for exactly this folder.
    pub fn rule_of(&self, url: &str) -> Option<&FolderRule> {
        self.rules.iter().find(|rule| rule.url == url)
    }

    /// The set with the larger revision; this set if the revisions are equal.
    pub fn or_newer(self, other: RuleSet) -> RuleSet {
        if other.revision > self.revision { other } else { self }
    }

    /// The next revision: the rules for `urls` changed, created where missing, and removed where empty. Without a difference, the
    /// same set.
    ///
    /// # Errors
    /// `Invalid` when the rules would exceed a limit.
    pub fn with_changes(&self, urls: &[String], change: &dyn Fn(&mut FolderRule)) -> Result<RuleSet> {
        let mut set = self.clone();
        for url in urls {
            if !is_valid_url(url) {
                return invalid_rules(format!("a URL of {} bytes; a rule's has at most {URL_MAX}", url.len()));
            }
            let at = set.rules.binary_search_by(|rule| rule.url.cmp(url)).unwrap_or_else(|at| {
                set.rules.insert(at, FolderRule { url: url.clone(), ..FolderRule::default() });
                at
            });
            change(&mut set.rules[at]);
        }
        set.rules.retain(|rule| !rule.is_empty());
        if set.rules == self.rules {
            return Ok(self.clone());
        }
        set.revision += 1;
        if set.rules.len() > RULES_MAX {
            return invalid_rules(format!(
                "a group has at most {RULES_MAX} rules: remove some, or name a parent folder"
            ));
        }
        if set.to_text().len() > TEXT_MAX {
            return invalid_rules(format!("the group's rules would be longer than {TEXT_MAX} bytes: remove some"));
        }
        if let Some((one, two)) = set.shared_class() {
            return invalid_rules(format!(
                "{one} and {two} have the same 64-bit hash: name a parent folder of one of them"
            ));
        }
        Ok(set)
    }

    /// Two rules with the same class: of the same folder, or with equal hashes.
    fn shared_class(&self) -> Option<(&str, &str)> {
        let mut classes: Vec<(u64, &str)> =
            self.rules.iter().map(|rule| (rule_class(rule), rule.url.as_str())).collect();
        classes.sort_unstable();
        classes.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| (pair[0].1, pair[1].1))
    }
}

fn wrong_rules(why: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("folder rules: {why}"))
}

fn invalid_rules<T>(what: String) -> Result<T> {
    Err(Error::new(ErrorKind::Invalid, what))
}

fn is_valid_url(url: &str) -> bool {
    (1..=URL_MAX).contains(&url.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use spurline_cache::WriteClass;

    fn urls(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn sets_come_back_from_json_and_wrong_ones_are_refused() {
        let plain = FolderRule { url: "s3://b".into(), ..FolderRule::default() };
        let full = FolderRule {
            url: "s3://b/a".into(),
            pin: true,
            ttl_seconds: Some(60),
            quota_bytes: Some(1 << 40),
            ..FolderRule::default()
        };
        let staged = FolderRule { url: "s3://b/run".into(), stage: true, ..FolderRule::default() };
        let scratch = FolderRule { url: "s3://b/kv".into(), scratch: true, ..FolderRule::default() };
        let set = RuleSet { revision: 7, rules: vec![plain, full.clone(), scratch, staged] };
        assert_eq!(serde_json::from_str::<RuleSet>(&set.to_text()).unwrap(), set);
        // As an earlier release writes and reads.
        let earlier = json!({"revision": 7, "rules": [{"url": "s3://b/a", "pin": true, "ttl_seconds": 60, "quota_bytes": 1u64 << 40}]});
        let set = RuleSet { revision: 7, rules: vec![full] };
        assert_eq!(RuleSet::from_record(&earlier).unwrap(), set);
        assert_eq!(serde_json::to_value(&set).unwrap(), earlier);
        assert_eq!(RuleSet::from_record(&Value::Null).unwrap(), RuleSet::default());
        for wrong in [
            json!({}),
            json!({"revision": 1}),
            json!({"revision": -1, "rules": []}),
            json!({"revision": 1u64 << 54, "rules": []}),
            json!({"revision": 1, "rules": [{"url": ""}]}),
            json!({"revision": 1, "rules": [{"url": "a"}, {"url": "a"}]}),
            json!({"revision": 1, "rules": vec![json!({"url": "a"}); 256]}),
        ] {
            assert!(RuleSet::from_record(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rules_are_made_changed_and_taken_away() {
        let one = RuleSet::default().with_changes(&urls(&["s3://b/y", "s3://b/x"]), &|rule| rule.pin = true).unwrap();
        assert_eq!((one.revision, one.rules.len(), one.rules[0].url.as_str()), (1, 2, "s3://b/x"));
        let two = one.with_changes(&urls(&["s3://b/x"]), &|rule| rule.ttl_seconds = Some(60)).unwrap();
        assert!(two.revision == 2 && two.rules[0].pin && two.rules[0].ttl_seconds == Some(60));
        let staged = two.with_changes(&urls(&["s3://b/x"]), &|rule| rule.set_write_class(WriteClass::Staged)).unwrap();
        let scratch =
            staged.with_changes(&urls(&["s3://b/x"]), &|rule| rule.set_write_class(WriteClass::Scratch)).unwrap();
        assert!(staged.rules[0].stage && !scratch.rules[0].stage && scratch.rules[0].scratch && scratch.rules[0].pin);
        let two = scratch.with_changes(&urls(&["s3://b/x"]), &|rule| rule.set_write_class(WriteClass::Direct)).unwrap();
        let three = two.with_changes(&urls(&["s3://b/x", "s3://b/y"]), &|rule| rule.pin = false).unwrap();
        assert_eq!(three.rules.iter().map(|rule| rule.url.as_str()).collect::<Vec<_>>(), ["s3://b/x"]);
        assert_eq!(three.with_changes(&urls(&["s3://b/x", "s3://none"]), &|rule| rule.pin &= true).unwrap(), three);
        let class = |set: &RuleSet| set.rule_of("s3://b/x").map(rule_class);
        assert!(class(&one) == class(&three) && class(&one) != one.rule_of("s3://b/y").map(rule_class));
        let many: Vec<String> = (0..RULES_MAX).map(|n| format!("s3://m/{n}")).collect();
        assert!(three.with_changes(&many, &|rule| rule.pin = true).unwrap_err().to_string().contains("255"));
        assert!(three.with_changes(&["x".repeat(2000)], &|rule| rule.pin = true).is_err());
        let long: Vec<String> = (0..100).map(|n| format!("{n}{}", "x".repeat(900))).collect();
        assert!(three.with_changes(&long, &|rule| rule.pin = true).unwrap_err().to_string().contains("bytes"));
    }

    #[test]
    fn the_larger_revision_is_newer() {
        let set = |revision, rules: &[&str]| {
            let rules = rules.iter().map(|url| FolderRule { url: (*url).into(), pin: true, ..FolderRule::default() });
            RuleSet { revision, rules: rules.collect() }
        };
        assert_eq!(set(2, &["a"]).or_newer(set(3, &["b"])), set(3, &["b"]));
        assert_eq!(set(3, &["a"]).or_newer(set(3, &["b"])), set(3, &["a"]));
    }
}
