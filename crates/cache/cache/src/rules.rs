//! Rules for folders: data that is pinned, expires, or has a quota. This module selects a file's rule by source and
//! path; the store applies it, by the rule's number.

use crate::CacheContext;
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use spurline_store::{BlockClass, Store, UNCLASSIFIED};
use spurline_types::{Error, ErrorKind, ObjectId, Result, url};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Maximum number of rules of a group: each fetched block is compared with all of them.
pub const RULES_MAX: usize = 255;
/// Maximum length of all rules as text.
const RULES_TEXT_MAX: usize = 48 << 10;
/// Maximum length including the records of ended rules: it fits into one request, with room for more ends than there
/// may be rules.
const SET_TEXT_MAX: usize = 60 << 10;
/// Ended rules that are remembered with their folders and numbers.
const NAMED_ENDED_MAX: usize = 64;
/// Older ones, of which only the end is remembered.
const ENDED_MAX: usize = 1000;
/// More changes than can ever be made; it has a successor.
const REVISION_MAX: u64 = 1 << 53;
/// Maximum length of a rule's URL.
const URL_MAX: usize = 1024;

/// The rule for a folder and everything below it that no rule for a deeper folder covers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// The folder: a source and a path below it, without a trailing slash.
    pub url: String,
    /// Never evicted for room.
    pub pin: bool,
    /// How long its blocks are kept.
    pub ttl_seconds: Option<u64>,
    /// The bytes that the group may store of it.
    pub quota_bytes: Option<u64>,
    /// From 1. Constant while the rule exists, unless another coordinator gave the number to another folder. Blocks
    /// are stored with it, so it is derived from the URL, and not reused while the end of this rule is remembered.
    pub number: u16,
    /// The set's revision of its last change.
    pub revision: u64,
}

/// An ended rule: it prevents a set that still has the rule from bringing it back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndedRule {
    /// The folder's URL.
    pub url: String,
    /// The number it had.
    pub number: u16,
    /// The set's revision at which it ended.
    pub revision: u64,
}

impl Rule {
    /// The rule as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "url": self.url, "pin": self.pin, "ttl_seconds": self.ttl_seconds, "quota_bytes": self.quota_bytes,
            "number": self.number, "revision": self.revision,
        })
    }

    fn is_empty(&self) -> bool {
        !self.pin && self.ttl_seconds.is_none() && self.quota_bytes.is_none()
    }
}

/// All rules; of two sets the later has the larger revision.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleSet {
    /// 0 while no rule was ever given.
    pub revision: u64,
    /// By URL, at most one per folder.
    pub rules: Vec<Rule>,
    /// The most recently ended ones, by URL.
    pub gone: Vec<EndedRule>,
    /// Those that ended before: the keys of their URLs, and the revision at which each ended.
    pub ended: BTreeMap<u64, u64>,
    /// For rules up to this revision that are in none of these, it is unknown whether they ended.
    pub floor: u64,
    /// Numbers that meant two folders before two coordinators met: stored blocks with such a number may be of either,
    /// so no rule uses it any more.
    pub retired: BTreeSet<u16>,
}

/// The key under which the end of a rule is remembered; its lowest 16 bits are the rule's preferred number.
pub(crate) fn url_key(url: &str) -> u64 {
    ObjectId::from_text(url, b"", "").0 as u64
}

impl RuleSet {
    /// The set as JSON.
    pub fn to_json(&self) -> Value {
        let rules: Vec<Value> = self.rules.iter().map(Rule::to_json).collect();
        let gone = |gone: &EndedRule| json!({"url": gone.url, "number": gone.number, "revision": gone.revision});
        let ended: Vec<Value> = self.gone.iter().map(gone).collect();
        let before: BTreeMap<String, u64> = self.ended.iter().map(|(key, at)| (format!("{key:x}"), *at)).collect();
        let mut set = json!({"revision": self.revision, "rules": rules, "gone": ended, "floor": self.floor});
        // Left out when empty: processes of both versions would otherwise rewrite the set in turn.
        if !before.is_empty() {
            set["ended"] = json!(before);
        }
        if !self.retired.is_empty() {
            set["retired"] = json!(self.retired);
        }
        set
    }

    /// Parses the set from JSON.
    ///
    /// # Errors
    /// `Invalid` when it is none.
    pub fn from_json(value: &Value) -> Result<RuleSet> {
        let wrong =
            |what: &str| Error::new(ErrorKind::Invalid, format!("rules for folders: {what} is missing or wrong"));
        let revision = |value: &Value| value["revision"].as_u64().filter(|n| *n <= REVISION_MAX);
        let number =
            |one: &Value| one["number"].as_u64().and_then(|n| u16::try_from(n).ok()).filter(|n| *n != UNCLASSIFIED);
        let url = |one: &Value| one["url"].as_str().filter(|url| is_valid_url(url)).map(str::to_owned);
        let list = value["rules"].as_array().filter(|list| list.len() <= RULES_MAX).ok_or_else(|| wrong("the list"))?;
        let mut rules: Vec<Rule> = Vec::with_capacity(list.len());
        for one in list {
            let rule = Rule {
                url: url(one).ok_or_else(|| wrong("a folder"))?,
                pin: one["pin"].as_bool().unwrap_or(false),
                ttl_seconds: one["ttl_seconds"].as_u64(),
                quota_bytes: one["quota_bytes"].as_u64(),
                number: number(one).ok_or_else(|| wrong("a number"))?,
                // A set of a version without revisions per rule.
                revision: revision(one).or(revision(value)).unwrap_or(0),
            };
            if rules.iter().any(|other| other.number == rule.number || other.url == rule.url) {
                return Err(wrong("a folder or number that is used once"));
            }
            rules.push(rule);
        }
        let mut gone: Vec<EndedRule> = Vec::new();
        for one in value["gone"].as_array().into_iter().flatten().take(NAMED_ENDED_MAX) {
            let (Some(url), Some(number), Some(revision)) = (url(one), number(one), revision(one)) else {
                return Err(wrong("a rule that ended"));
            };
            if !rules.iter().any(|rule| rule.url == url) && !gone.iter().any(|other| other.url == url) {
                gone.push(EndedRule { url, number, revision });
            }
        }
        rules.sort_by(|a, b| a.url.cmp(&b.url));
        gone.sort_by(|a, b| a.url.cmp(&b.url));
        let mut ended = BTreeMap::new();
        for (known_by, at) in value["ended"].as_object().into_iter().flatten() {
            let (Ok(known_by), Some(at)) =
                (u64::from_str_radix(known_by, 16), at.as_u64().filter(|n| *n <= REVISION_MAX))
            else {
                return Err(wrong("the end of a rule"));
            };
            ended.insert(known_by, at);
        }
        let of_others = rules.iter().map(|rule| &rule.url).chain(gone.iter().map(|gone| &gone.url));
        of_others.for_each(|url| _ = ended.remove(&url_key(url)));
        let retired = value["retired"].as_array().into_iter().flatten();
        let retired: Option<BTreeSet<u16>> = retired.map(|n| n.as_u64().and_then(|n| u16::try_from(n).ok())).collect();
        let retired = retired.ok_or_else(|| wrong("a retired number"))?;
        let floor = value["floor"].as_u64().unwrap_or(0);
        let revision = revision(value).ok_or_else(|| wrong("the revision"))?;
        Ok(RuleSet { revision, rules, gone, ended, floor, retired })
    }

    /// The next revision of the set: the rules for `urls` changed, created where missing, and removed where they
    /// become empty.
    ///
    /// # Errors
    /// `Invalid` when there are too many rules, or a URL is too long.
    pub fn with_changes(&self, urls: &[String], change: &dyn Fn(&mut Rule)) -> Result<RuleSet> {
        let mut set = self.clone();
        // Checked first: that many could not be numbered.
        if urls.len() > RULES_MAX {
            let what = format!("{} folders in one request; a group has at most {RULES_MAX} rules", urls.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        set.revision += 1;
        for url in urls {
            if !is_valid_url(url) {
                let what = format!("a URL of {} bytes; a rule's has at most {URL_MAX}", url.len());
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            let at = set.rules.binary_search_by(|rule| rule.url.cmp(url)).unwrap_or_else(|at| {
                let rule = Rule { url: url.clone(), number: set.free_number(url), ..Rule::default() };
                set.rules.insert(at, rule);
                at
            });
            let before = set.rules[at].clone();
            change(&mut set.rules[at]);
            if set.rules[at] == before && !before.is_empty() {
                continue;
            }
            let gone = set.gone.iter().position(|gone| gone.url == *url);
            if set.rules[at].is_empty() {
                let Rule { url, number, .. } = set.rules.remove(at);
                if !before.is_empty() {
                    set.gone.push(EndedRule { url, number, revision: set.revision });
                }
                continue;
            }
            set.rules[at].revision = set.revision;
            gone.map(|gone| set.gone.remove(gone));
            set.ended.remove(&url_key(url));
        }
        set.trim_ended();
        if set.rules.len() > RULES_MAX {
            let what = format!("a group has at most {RULES_MAX} rules: remove some, or name a parent folder");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if !set.fits_request() {
            let what = format!("the group's rules would be longer than {RULES_TEXT_MAX} bytes: remove some");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(set)
    }

    /// Whether the rules are short enough to be sent to a node, with the records of ended ones.
    pub(crate) fn fits_request(&self) -> bool {
        let rules: Vec<Value> = self.rules.iter().map(Rule::to_json).collect();
        Value::from(rules).to_string().len() <= RULES_TEXT_MAX
    }

    /// Forgets the URLs of rules that ended some time ago, and then older ends, as far as there is no room for them.
    pub(crate) fn trim_ended(&mut self) {
        self.gone.sort_by(|a, b| (b.revision, &b.url).cmp(&(a.revision, &a.url)));
        let (mut named, mut most) = (NAMED_ENDED_MAX, ENDED_MAX);
        loop {
            for EndedRule { url, number, revision } in self.gone.drain(named.min(self.gone.len())..) {
                self.ended.insert(url_key(&url), revision);
                // A number that the key does not imply.
                if number != url_key(&url) as u16 {
                    self.retired.insert(number);
                }
            }
            self.forget_oldest(most);
            if self.gone.is_empty() && self.ended.is_empty() || self.to_json().to_string().len() <= SET_TEXT_MAX {
                break;
            }
            if self.gone.is_empty() {
                most = self.ended.len() * 7 / 8;
            }
            named = self.gone.len() / 2;
        }
        self.gone.sort_by(|a, b| a.url.cmp(&b.url));
    }

    /// Keeps the latest `most` of those that ended long ago.
    fn forget_oldest(&mut self, most: usize) {
        let mut order: Vec<(u64, u64)> = self.ended.iter().map(|(key, at)| (*at, *key)).collect();
        order.sort_unstable();
        for (at, key) in &order[..order.len().saturating_sub(most)] {
            self.ended.remove(key);
            self.floor = self.floor.max(*at);
        }
    }

    /// The number of a new rule for `url`: the same on every coordinator, if it is free.
    pub(crate) fn free_number(&self, url: &str) -> u16 {
        let of_rules = |number: u16| self.rules.iter().any(|rule| rule.number == number);
        let own = self.gone.iter().find(|gone| gone.url == url).map(|gone| gone.number);
        let of_others = |number: u16| {
            self.gone.iter().any(|gone| gone.number == number && gone.url != url)
                || self.ended.keys().any(|other| *other as u16 == number && *other != url_key(url))
                || self.retired.contains(&number)
        };
        // Each folder has its own sequence, so that a folder whose first number is taken does not take another
        // folder's.
        let drawn = (1..=u16::MAX).map(|n| ObjectId::from_text(url, b"", &n.to_string()).0 as u16);
        let numbers = own.into_iter().chain([url_key(url) as u16]).chain(drawn);
        numbers.into_iter().find(|n| *n != UNCLASSIFIED && !of_rules(*n) && !of_others(*n)).unwrap_or(UNCLASSIFIED)
    }

    /// The rule for a file: that of the deepest folder.
    pub fn rule_for(&self, source: &str, path: &[u8]) -> Option<&Rule> {
        self.rules.iter().filter(|rule| is_below(&rule.url, source, path)).max_by_key(|rule| rule.url.len())
    }
}

fn is_valid_url(url: &str) -> bool {
    (1..=URL_MAX).contains(&url.len())
}

/// Whether the file `path` of `source` is `folder` or below it.
fn is_below(folder: &str, source: &str, path: &[u8]) -> bool {
    let starts = |whole: &[u8], with: &[u8]| {
        whole
            .strip_prefix(with)
            .is_some_and(|rest| with.is_empty() || with.ends_with(b"/") || matches!(rest, [] | [b'/', ..]))
    };
    let source = source.trim_end_matches('/');
    let in_source = |path: &[u8], below| starts(path, &url::path_in(source, below));
    match folder.strip_prefix(source) {
        Some("") => true,
        // The URL of the root of all files has no trailing slash to match.
        Some(below) if source.ends_with(':') => in_source(path, below.trim_start_matches('/')),
        Some(below) if below.starts_with('/') => in_source(path, &below[1..]),
        _ => starts(source.as_bytes(), folder.as_bytes()),
    }
}

struct RuleState {
    set: Arc<RuleSet>,
    /// The fraction of the group's blocks that this process stores.
    share: f64,
}

/// The rules of one process.
pub(crate) struct RuleTable {
    any: AtomicBool,
    /// Read by every writer of a block, so not held while the blocks on disk are brought under changed rules.
    inner: RwLock<RuleState>,
    /// Serialises changes.
    changing: Mutex<()>,
}

impl Default for RuleTable {
    fn default() -> Self {
        RuleTable {
            any: AtomicBool::new(false),
            inner: RwLock::new(RuleState { set: Arc::default(), share: 1.0 }),
            changing: Mutex::default(),
        }
    }
}

impl RuleTable {
    /// The number of the rule for a file. Called when a block is written to disk, never when it is read.
    pub fn rule_number(&self, source: &str, path: &[u8]) -> u16 {
        if !self.any.load(Ordering::Acquire) {
            return UNCLASSIFIED;
        }
        self.inner.read().set.rule_for(source, path).map_or(UNCLASSIFIED, |rule| rule.number)
    }

    pub fn current_set(&self) -> Arc<RuleSet> {
        Arc::clone(&self.inner.read().set)
    }

    /// Merges a set into the current one; false when that changes nothing.
    pub fn merge_set(&self, set: &RuleSet, store: Option<&Store>) -> bool {
        let _one = self.changing.lock();
        let (set, share) = {
            let inner = self.inner.read();
            let merged = inner.set.merged_with(set);
            if merged == *inner.set {
                return false;
            }
            (merged, inner.share)
        };
        let before = self.current_set();
        let means_another =
            |rule: &Rule| before.rules.iter().any(|old| old.number == rule.number && old.url != rule.url);
        if set.rules.iter().any(means_another) {
            // Blocks of the other folder's rule become unclassified, rather than fall under this one.
            let rules = set.rules.iter().filter(|rule| !means_another(rule)).cloned().collect();
            apply_rules(&RuleSet { rules, ..RuleSet::default() }, share, store);
        }
        // The store first: a number that it does not know yet would be unclassified.
        apply_rules(&set, share, store);
        self.any.store(!set.rules.is_empty(), Ordering::Release);
        self.inner.write().set = Arc::new(set);
        true
    }

    /// Sets this process's fraction of the group's blocks.
    pub fn set_share(&self, share: f64, store: Option<&Store>) {
        let _one = self.changing.lock();
        let share = share.clamp(0.0, 1.0);
        let (before, set) = {
            let mut inner = self.inner.write();
            (std::mem::replace(&mut inner.share, share), Arc::clone(&inner.set))
        };
        // While no rules are known, blocks from before keep their classes. Only quotas depend on the share.
        if set.revision > 0 && share != before && set.rules.iter().any(|rule| rule.quota_bytes.is_some()) {
            apply_rules(&set, share, store);
        }
    }
}

fn apply_rules(set: &RuleSet, share: f64, store: Option<&Store>) {
    let Some(store) = store else { return };
    let class = |rule: &Rule| BlockClass {
        pinned: rule.pin,
        ttl: rule.ttl_seconds.map(Duration::from_secs),
        quota_bytes: rule.quota_bytes.map(|quota| (quota as f64 * share) as u64),
    };
    store.set_classes(set.rules.iter().map(|rule| (rule.number, class(rule))).collect::<BTreeMap<_, _>>());
}

impl CacheContext {
    /// The rules for folders.
    pub fn rules(&self) -> Arc<RuleSet> {
        self.rules.current_set()
    }

    /// Merges these rules into the current ones; returns whether anything changed. Blocks on disk stay under the rule
    /// they came under, if it still exists, until [`crate::Cache::classify_blocks`].
    pub fn adopt_rules(&self, set: &RuleSet) -> bool {
        self.rules.merge_set(set, self.enabled_store())
    }

    /// Sets the fraction of the group's blocks that this process stores, between 0 and 1: its part of each quota.
    pub fn set_group_share(&self, share: f64) {
        self.rules.set_share(share, self.enabled_store());
    }

    /// Bytes that the cache disks may hold; `None` where there are none.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.enabled_store().map(|store| store.disks().iter().map(|disk| disk.capacity).sum())
    }

    /// Bytes on disk under a rule.
    pub fn bytes_under_rule(&self, rule: &Rule) -> u64 {
        self.enabled_store().map_or(0, |store| store.class_used(rule.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(url: &str, number: u16) -> Rule {
        Rule { url: url.into(), number, ..Rule::default() }
    }

    fn of_rules(rules: Vec<Rule>) -> RuleSet {
        RuleSet { revision: 1, rules, ..RuleSet::default() }
    }

    #[test]
    fn the_longest_folder_that_a_file_is_below_decides() {
        let set = of_rules(vec![rule("s3://b", 1), rule("s3://b/train/a", 2), rule("s3://b/train", 3)]);
        let of = |source: &str, path: &str| set.rule_for(source, path.as_bytes()).map_or(0, |rule| rule.number);
        assert_eq!((of("s3://b", "x"), of("s3://b", "train/x"), of("s3://b", "train/a/x")), (1, 3, 2));
        assert_eq!((of("s3://b", "trainer/x"), of("s3://b", "train/ab"), of("s3://b", "train/a")), (1, 3, 2));
        // Another source of the same bucket, and another bucket.
        assert_eq!((of("s3://b/train", "a/x"), of("s3://b/train/", "c"), of("s3://b/train/a/deep", "x")), (2, 3, 2));
        assert_eq!((of("s3://bucket", "x"), of("s3://c", "x"), of("s3://b/trai", "x")), (0, 0, 1));
        // Directories' names are escaped, those of objects as they are.
        let odd =
            of_rules(vec![rule("file:///a%20b", 1), rule("file:///a%20b/100%25/%C3%A9", 2), rule("s3://b/x%20", 3)]);
        let number = |source: &str, path: &str| odd.rule_for(source, path.as_bytes()).map_or(0, |rule| rule.number);
        assert_eq!((number("file:///a%20b", "100%/\u{e9}/x"), number("file:///", "a b/100%/e")), (2, 1));
        assert_eq!((number("file:///a%20b/100%25", "\u{e9}"), number("file:///a%20b/100%25/%C3%A9/c", "x")), (2, 2));
        assert_eq!((number("s3://b", "x%20/y"), number("s3://b", "x /y"), number("file:///a%2520b", "x")), (3, 0, 0));
        let root = of_rules(vec![rule("/", 1), rule("/data", 2)]);
        assert_eq!(root.rule_for("/data", b"x").unwrap().number, 2);
        let all = of_rules(vec![rule("file:///data", 1), rule("file:///", 2)]);
        let number = |path: &str| all.rule_for("file:///", path.as_bytes()).map_or(0, |rule| rule.number);
        assert_eq!((number("data/x"), number("database/x"), number("x")), (1, 2, 2));
        assert_eq!((root.rule_for("/", b"data/x").unwrap().number, root.rule_for("/", b"x").unwrap().number), (2, 1));
    }

    #[test]
    fn sets_come_back_from_json_and_wrong_ones_are_refused() {
        let whole = Rule { pin: true, ttl_seconds: Some(60), quota_bytes: Some(1 << 40), ..rule("s3://b/a", 65_535) };
        let whole = Rule { revision: 6, ..whole };
        let gone = vec![EndedRule { url: "s3://c".into(), number: 3, revision: 5 }];
        let (ended, retired) = (BTreeMap::from([(url_key("s3://d"), 4), (u64::MAX, 2)]), BTreeSet::from([7, 65_535]));
        let set = RuleSet { revision: 7, rules: vec![rule("s3://b", 1), whole], gone, ended, floor: 2, retired };
        assert_eq!(RuleSet::from_json(&set.to_json()).unwrap(), set);
        for wrong in [
            json!({}),
            json!({"revision": 1}),
            json!({"revision": -1, "last": 1, "rules": []}),
            json!({"revision": 1, "last": 1, "rules": [{"url": "", "number": 1}]}),
            json!({"revision": 1, "last": 1, "rules": [{"url": "a", "number": 0}]}),
            json!({"revision": 1, "last": 1, "rules": [{"url": "a", "number": 65536}]}),
            json!({"revision": 1, "last": 1, "rules": [{"url": "a", "number": 1}, {"url": "b", "number": 1}]}),
            json!({"revision": 1, "last": 1, "rules": [{"url": "a", "number": 1}, {"url": "a", "number": 2}]}),
            json!({"revision": 1, "rules": [], "gone": [{"url": "a", "number": 0, "revision": 1}]}),
            json!({"revision": 1, "rules": [], "ended": {"x": 1}}),
            json!({"revision": 1, "rules": [], "ended": {"a": -1}}),
            json!({"revision": 1, "rules": [], "retired": [65536]}),
        ] {
            assert!(RuleSet::from_json(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rules_are_made_changed_and_taken_away() {
        let urls = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let one = RuleSet::default().with_changes(&urls(&["s3://b/x", "s3://b/y"]), &|rule| rule.pin = true).unwrap();
        assert_eq!((one.revision, one.rules.len()), (1, 2));
        let two = one.with_changes(&urls(&["s3://b/x"]), &|rule| rule.ttl_seconds = Some(60)).unwrap();
        assert!(two.rules[0].pin && two.rules[0].ttl_seconds == Some(60));
        assert_eq!((two.rules[0].number, two.rules[0].revision, two.rules[1].revision), (one.rules[0].number, 2, 1));
        let three = two.with_changes(&urls(&["s3://b/x", "s3://b/y"]), &|rule| rule.pin = false).unwrap();
        assert_eq!(three.rules.iter().map(|rule| rule.url.as_str()).collect::<Vec<_>>(), ["s3://b/x"]);
        assert_eq!((three.gone[0].url.as_str(), three.gone[0].revision), ("s3://b/y", 3));
        // A number is not reused while its rule is remembered; a URL gets the same number again.
        let mut like_y = three.clone();
        like_y.gone[0].number = like_y.free_number("s3://b/z");
        assert_ne!(like_y.free_number("s3://b/z"), like_y.gone[0].number);
        let four = three.with_changes(&urls(&["s3://b/y"]), &|rule| rule.quota_bytes = Some(1)).unwrap();
        assert_eq!((four.revision, four.rules[1].number, four.gone.len()), (4, one.rules[1].number, 0));
        let same = four.with_changes(&urls(&["s3://b/y", "s3://b/none"]), &|rule| rule.pin &= true).unwrap();
        assert_eq!((same.rules, same.gone), (four.rules.clone(), four.gone.clone()));
        let many: Vec<String> = (0..RULES_MAX).map(|n| format!("s3://m/{n}")).collect();
        assert!(four.with_changes(&many, &|rule| rule.pin = true).unwrap_err().to_string().contains("255"));
        assert!(four.with_changes(&["x".repeat(2000)], &|rule| rule.pin = true).is_err());
    }

    #[test]
    fn an_older_set_is_not_taken() {
        let rules = RuleTable::default();
        let url = ["s3://b".to_owned()];
        let one = RuleSet::default().with_changes(&url, &|rule| rule.pin = true).unwrap();
        let none = one.with_changes(&url, &|rule| rule.pin = false).unwrap();
        let number = || rules.rule_number("s3://b", b"x");
        assert_eq!(number(), UNCLASSIFIED);
        assert!(rules.merge_set(&one, None) && number() == one.rules[0].number);
        assert!(!rules.merge_set(&one, None) && !rules.merge_set(&RuleSet::default(), None));
        assert!(rules.merge_set(&none, None) && number() == UNCLASSIFIED);
        assert!(!rules.merge_set(&one, None) && number() == UNCLASSIFIED);
        // A concurrent change of another replica is merged.
        let other = one.with_changes(&["s3://c".to_owned()], &|rule| rule.pin = true).unwrap();
        assert!(
            rules.merge_set(&other, None)
                && number() == UNCLASSIFIED
                && rules.rule_number("s3://c", b"x") != UNCLASSIFIED
        );
        assert_eq!(rules.current_set().revision, 3);
    }
}
