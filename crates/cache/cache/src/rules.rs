//! Rules for folders: what of them is never evicted, goes after a time, or may take only so much room. Which rule a file
//! is under is decided here, by its source and path; what a rule does to blocks the store knows, by the rule's number.

use crate::Shared;
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use spurline_store::{Class, PLAIN, Store};
use spurline_types::{Error, ErrorKind, ObjectId, Result, url};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The most rules a group may have: each block that is fetched is compared with all of them.
pub const RULES_MAX: usize = 255;
/// All rules together, as a text.
const TEXT_MAX: usize = 48 << 10;
/// The same with what is remembered of those that ended: it fits into one request, with room for more ends than there may
/// be rules.
const WHOLE_MAX: usize = 60 << 10;
/// Rules that ended and are remembered with their folders and numbers.
const GONE_MAX: usize = 64;
/// Those before them, of which it is remembered that they ended.
const ENDED_MAX: usize = 1000;
/// So many changes nobody ever makes, and it has one to follow it.
const REVISION_MAX: u64 = 1 << 53;
/// The longest URL of a rule.
const URL_MAX: usize = 1024;

/// What holds for a folder and all below it, where no rule for a folder further down does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// The folder: a source and a path below it, with no slash at the end.
    pub url: String,
    /// Never evicted for room.
    pub pin: bool,
    /// How long its blocks are kept.
    pub ttl_seconds: Option<u64>,
    /// The bytes that the group may keep of it.
    pub quota_bytes: Option<u64>,
    /// From 1; the same for as long as the rule is there, unless another coordinator gave it to another folder. Blocks are
    /// kept with it, so it is made of the URL, and no other rule's as long as the end of this one is remembered.
    pub number: u16,
    /// The set's revision at which it was changed last.
    pub revision: u64,
}

/// A rule that ended: a set that has it still is not told by it that it was made anew.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gone {
    /// Of which folder.
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

    fn says_nothing(&self) -> bool {
        !self.pin && self.ttl_seconds.is_none() && self.quota_bytes.is_none()
    }
}

/// All rules; the later of two sets has the larger revision.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleSet {
    /// 0 while nobody ever gave a rule.
    pub revision: u64,
    /// By URL, none twice for one folder.
    pub rules: Vec<Rule>,
    /// Those that ended last, by URL.
    pub gone: Vec<Gone>,
    /// Those that ended before them: what their URLs are known by, and the revision at which each ended.
    pub ended: BTreeMap<u64, u64>,
    /// Of rules of up to this revision that are in none of these it is not known any more whether they ended.
    pub floor: u64,
    /// Numbers that meant two folders, before two coordinators met: blocks that are kept with one may be of either, so
    /// it is no rule's any more.
    pub retired: BTreeSet<u16>,
}

/// What the end of a rule is remembered by; the lowest 16 bits are the number that the rule had, or wanted.
pub(crate) fn key(url: &str) -> u64 {
    ObjectId::hash(url, b"", "").0 as u64
}

impl RuleSet {
    /// The set as JSON.
    pub fn to_json(&self) -> Value {
        let rules: Vec<Value> = self.rules.iter().map(Rule::to_json).collect();
        let gone = |gone: &Gone| json!({"url": gone.url, "number": gone.number, "revision": gone.revision});
        let ended: Vec<Value> = self.gone.iter().map(gone).collect();
        let before: BTreeMap<String, u64> = self.ended.iter().map(|(key, at)| (format!("{key:x}"), *at)).collect();
        let mut set = json!({"revision": self.revision, "rules": rules, "gone": ended, "floor": self.floor});
        // A process of before would write the set anew without them, and one of now with them, in turn.
        if !before.is_empty() {
            set["ended"] = json!(before);
        }
        if !self.retired.is_empty() {
            set["retired"] = json!(self.retired);
        }
        set
    }

    /// The set that a JSON text means.
    ///
    /// # Errors
    /// `Invalid` when it means none.
    pub fn from_json(value: &Value) -> Result<RuleSet> {
        let wrong =
            |what: &str| Error::new(ErrorKind::Invalid, format!("rules for folders: {what} is missing or wrong"));
        let revision = |value: &Value| value["revision"].as_u64().filter(|n| *n <= REVISION_MAX);
        let number = |one: &Value| one["number"].as_u64().and_then(|n| u16::try_from(n).ok()).filter(|n| *n != PLAIN);
        let url = |one: &Value| one["url"].as_str().filter(|url| fits(url)).map(str::to_owned);
        let list = value["rules"].as_array().filter(|list| list.len() <= RULES_MAX).ok_or_else(|| wrong("the list"))?;
        let mut rules: Vec<Rule> = Vec::with_capacity(list.len());
        for one in list {
            let rule = Rule {
                url: url(one).ok_or_else(|| wrong("a folder"))?,
                pin: one["pin"].as_bool().unwrap_or(false),
                ttl_seconds: one["ttl_seconds"].as_u64(),
                quota_bytes: one["quota_bytes"].as_u64(),
                number: number(one).ok_or_else(|| wrong("a number"))?,
                // Of a release before there were any.
                revision: revision(one).or(revision(value)).unwrap_or(0),
            };
            if rules.iter().any(|other| other.number == rule.number || other.url == rule.url) {
                return Err(wrong("a rule that is there once"));
            }
            rules.push(rule);
        }
        let mut gone: Vec<Gone> = Vec::new();
        for one in value["gone"].as_array().into_iter().flatten().take(GONE_MAX) {
            let (Some(url), Some(number), Some(revision)) = (url(one), number(one), revision(one)) else {
                return Err(wrong("a rule that ended"));
            };
            if !rules.iter().any(|rule| rule.url == url) && !gone.iter().any(|other| other.url == url) {
                gone.push(Gone { url, number, revision });
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
        of_others.for_each(|url| _ = ended.remove(&key(url)));
        let retired = value["retired"].as_array().into_iter().flatten();
        let retired: Option<BTreeSet<u16>> = retired.map(|n| n.as_u64().and_then(|n| u16::try_from(n).ok())).collect();
        let retired = retired.ok_or_else(|| wrong("a number that is no rule's"))?;
        let floor = value["floor"].as_u64().unwrap_or(0);
        let revision = revision(value).ok_or_else(|| wrong("the revision"))?;
        Ok(RuleSet { revision, rules, gone, ended, floor, retired })
    }

    /// The set one revision on, with the rules for `urls` changed, made where there are none, and left out where they say
    /// nothing any more.
    ///
    /// # Errors
    /// `Invalid` when there are too many rules, or a URL is too long.
    pub fn changed(&self, urls: &[String], change: &dyn Fn(&mut Rule)) -> Result<RuleSet> {
        let mut set = self.clone();
        // Sooner than at the end: that many could not be numbered.
        if urls.len() > RULES_MAX {
            let what = format!("{} folders at once; a group has at most {RULES_MAX} rules", urls.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        set.revision += 1;
        for url in urls {
            if !fits(url) {
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
            if set.rules[at] == before && !before.says_nothing() {
                continue;
            }
            let gone = set.gone.iter().position(|gone| gone.url == *url);
            if set.rules[at].says_nothing() {
                let Rule { url, number, .. } = set.rules.remove(at);
                if !before.says_nothing() {
                    set.gone.push(Gone { url, number, revision: set.revision });
                }
                continue;
            }
            set.rules[at].revision = set.revision;
            gone.map(|gone| set.gone.remove(gone));
            set.ended.remove(&key(url));
        }
        set.shorten();
        if set.rules.len() > RULES_MAX {
            let what = format!("a group has at most {RULES_MAX} rules: take some away, or name a folder above");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if !set.fits() {
            let what = format!("the group's rules would be longer than {TEXT_MAX} bytes: take some away");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(set)
    }

    /// Whether the rules are short enough to be told to a node, with what is remembered of others.
    pub(crate) fn fits(&self) -> bool {
        let rules: Vec<Value> = self.rules.iter().map(Rule::to_json).collect();
        Value::from(rules).to_string().len() <= TEXT_MAX
    }

    /// Forgets the names of rules that ended some time ago, and of those before them that they ended, as many as there is no
    /// room for.
    pub(crate) fn shorten(&mut self) {
        self.gone.sort_by(|a, b| (b.revision, &b.url).cmp(&(a.revision, &a.url)));
        let (mut named, mut most) = (GONE_MAX, ENDED_MAX);
        loop {
            for Gone { url, number, revision } in self.gone.drain(named.min(self.gone.len())..) {
                self.ended.insert(key(&url), revision);
                // One that the key does not tell.
                if number != key(&url) as u16 {
                    self.retired.insert(number);
                }
            }
            self.forget(most);
            if self.gone.is_empty() && self.ended.is_empty() || self.to_json().to_string().len() <= WHOLE_MAX {
                break;
            }
            if self.gone.is_empty() {
                most = self.ended.len() * 7 / 8;
            }
            named = self.gone.len() / 2;
        }
        self.gone.sort_by(|a, b| a.url.cmp(&b.url));
    }

    /// Leaves `most` of those that ended long ago.
    fn forget(&mut self, most: usize) {
        let mut order: Vec<(u64, u64)> = self.ended.iter().map(|(key, at)| (*at, *key)).collect();
        order.sort_unstable();
        for (at, key) in &order[..order.len().saturating_sub(most)] {
            self.ended.remove(key);
            self.floor = self.floor.max(*at);
        }
    }

    /// The number of a rule that is made for `url`: of every coordinator's making the same, if it is nobody's.
    pub(crate) fn free_number(&self, url: &str) -> u16 {
        let of_rules = |number: u16| self.rules.iter().any(|rule| rule.number == number);
        let own = self.gone.iter().find(|gone| gone.url == url).map(|gone| gone.number);
        let of_others = |number: u16| {
            self.gone.iter().any(|gone| gone.number == number && gone.url != url)
                || self.ended.keys().any(|other| *other as u16 == number && *other != key(url))
                || self.retired.contains(&number)
        };
        // Each folder has its own order of them, so that one that can't have its first takes nobody else's.
        let drawn = (1..=u16::MAX).map(|n| ObjectId::hash(url, b"", &n.to_string()).0 as u16);
        let numbers = own.into_iter().chain([key(url) as u16]).chain(drawn);
        numbers.into_iter().find(|n| *n != PLAIN && !of_rules(*n) && !of_others(*n)).unwrap_or(PLAIN)
    }

    /// The rule for a file, the one for the longest folder.
    pub fn of(&self, source: &str, path: &[u8]) -> Option<&Rule> {
        self.rules.iter().filter(|rule| is_below(&rule.url, source, path)).max_by_key(|rule| rule.url.len())
    }
}

fn fits(url: &str) -> bool {
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
        // Of the root of all files no slash is left to end with.
        Some(below) if source.ends_with(':') => in_source(path, below.trim_start_matches('/')),
        Some(below) if below.starts_with('/') => in_source(path, &below[1..]),
        _ => starts(source.as_bytes(), folder.as_bytes()),
    }
}

struct Inner {
    set: Arc<RuleSet>,
    /// The share of the group's blocks that this process holds.
    share: f64,
}

/// The rules of one process.
pub(crate) struct Rules {
    any: AtomicBool,
    /// Asked by whoever writes a block, so not held while all that is on disk comes under other rules.
    inner: RwLock<Inner>,
    /// One change after the other.
    changing: Mutex<()>,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            any: AtomicBool::new(false),
            inner: RwLock::new(Inner { set: Arc::default(), share: 1.0 }),
            changing: Mutex::default(),
        }
    }
}

impl Rules {
    /// The number of the rule for a file. Asked when a block is written to disk, never when it is read.
    pub fn number(&self, source: &str, path: &[u8]) -> u16 {
        if !self.any.load(Ordering::Acquire) {
            return PLAIN;
        }
        self.inner.read().set.of(source, path).map_or(PLAIN, |rule| rule.number)
    }

    pub fn set(&self) -> Arc<RuleSet> {
        Arc::clone(&self.inner.read().set)
    }

    /// Takes what a set says that is not known here; false when that is nothing.
    pub fn take(&self, set: &RuleSet, store: Option<&Store>) -> bool {
        let _one = self.changing.lock();
        let (set, share) = {
            let inner = self.inner.read();
            let merged = inner.set.merged(set);
            if merged == *inner.set {
                return false;
            }
            (merged, inner.share)
        };
        let before = self.set();
        let means_another =
            |rule: &Rule| before.rules.iter().any(|old| old.number == rule.number && old.url != rule.url);
        if set.rules.iter().any(means_another) {
            // What came under the other folder's rule comes under none, rather than under this one's.
            let rules = set.rules.iter().filter(|rule| !means_another(rule)).cloned().collect();
            apply(&RuleSet { rules, ..RuleSet::default() }, share, store);
        }
        // The store first: a number that it does not know yet would be none.
        apply(&set, share, store);
        self.any.store(!set.rules.is_empty(), Ordering::Release);
        self.inner.write().set = Arc::new(set);
        true
    }

    /// This process holds another share of the group's blocks.
    pub fn share(&self, share: f64, store: Option<&Store>) {
        let _one = self.changing.lock();
        let share = share.clamp(0.0, 1.0);
        let (before, set) = {
            let mut inner = self.inner.write();
            (std::mem::replace(&mut inner.share, share), Arc::clone(&inner.set))
        };
        // While no rules are known, blocks from before keep the classes they have. Quotas alone depend on the share.
        if set.revision > 0 && share != before && set.rules.iter().any(|rule| rule.quota_bytes.is_some()) {
            apply(&set, share, store);
        }
    }
}

fn apply(set: &RuleSet, share: f64, store: Option<&Store>) {
    let Some(store) = store else { return };
    let class = |rule: &Rule| Class {
        pinned: rule.pin,
        ttl: rule.ttl_seconds.map(Duration::from_secs),
        quota_bytes: rule.quota_bytes.map(|quota| (quota as f64 * share) as u64),
    };
    store.set_classes(set.rules.iter().map(|rule| (rule.number, class(rule))).collect::<BTreeMap<_, _>>());
}

impl Shared {
    /// The rules for folders.
    pub fn rules(&self) -> Arc<RuleSet> {
        self.rules.set()
    }

    /// Goes by these rules for folders from now on together with those of now; whether they say anything new. What is on
    /// disk already is under the rule that it came under, if there is that still, until [`crate::Cache::classify`].
    pub fn take_rules(&self, set: &RuleSet) -> bool {
        self.rules.take(set, self.disks())
    }

    /// Of the group's blocks this process holds `share`, between 0 and 1: so much of each quota is its own.
    pub fn holds_share(&self, share: f64) {
        self.rules.share(share, self.disks());
    }

    /// Bytes that the cache disks may hold; `None` where there are none.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.disks().map(|store| store.disks().iter().map(|disk| disk.capacity).sum())
    }

    /// Bytes on disk under a rule.
    pub fn held_by_rule(&self, rule: &Rule) -> u64 {
        self.disks().map_or(0, |store| store.class_used(rule.number))
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
        let of = |source: &str, path: &str| set.of(source, path.as_bytes()).map_or(0, |rule| rule.number);
        assert_eq!((of("s3://b", "x"), of("s3://b", "train/x"), of("s3://b", "train/a/x")), (1, 3, 2));
        assert_eq!((of("s3://b", "trainer/x"), of("s3://b", "train/ab"), of("s3://b", "train/a")), (1, 3, 2));
        // Another source of the same bucket, and another bucket.
        assert_eq!((of("s3://b/train", "a/x"), of("s3://b/train/", "c"), of("s3://b/train/a/deep", "x")), (2, 3, 2));
        assert_eq!((of("s3://bucket", "x"), of("s3://c", "x"), of("s3://b/trai", "x")), (0, 0, 1));
        // Directories' names are escaped, those of objects as they are.
        let odd =
            of_rules(vec![rule("file:///a%20b", 1), rule("file:///a%20b/100%25/%C3%A9", 2), rule("s3://b/x%20", 3)]);
        let number = |source: &str, path: &str| odd.of(source, path.as_bytes()).map_or(0, |rule| rule.number);
        assert_eq!((number("file:///a%20b", "100%/\u{e9}/x"), number("file:///", "a b/100%/e")), (2, 1));
        assert_eq!((number("file:///a%20b/100%25", "\u{e9}"), number("file:///a%20b/100%25/%C3%A9/c", "x")), (2, 2));
        assert_eq!((number("s3://b", "x%20/y"), number("s3://b", "x /y"), number("file:///a%2520b", "x")), (3, 0, 0));
        let root = of_rules(vec![rule("/", 1), rule("/data", 2)]);
        assert_eq!(root.of("/data", b"x").unwrap().number, 2);
        let all = of_rules(vec![rule("file:///data", 1), rule("file:///", 2)]);
        let number = |path: &str| all.of("file:///", path.as_bytes()).map_or(0, |rule| rule.number);
        assert_eq!((number("data/x"), number("database/x"), number("x")), (1, 2, 2));
        assert_eq!((root.of("/", b"data/x").unwrap().number, root.of("/", b"x").unwrap().number), (2, 1));
    }

    #[test]
    fn sets_come_back_from_json_and_wrong_ones_are_refused() {
        let whole = Rule { pin: true, ttl_seconds: Some(60), quota_bytes: Some(1 << 40), ..rule("s3://b/a", 65_535) };
        let whole = Rule { revision: 6, ..whole };
        let gone = vec![Gone { url: "s3://c".into(), number: 3, revision: 5 }];
        let (ended, retired) = (BTreeMap::from([(key("s3://d"), 4), (u64::MAX, 2)]), BTreeSet::from([7, 65_535]));
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
        let one = RuleSet::default().changed(&urls(&["s3://b/x", "s3://b/y"]), &|rule| rule.pin = true).unwrap();
        assert_eq!((one.revision, one.rules.len()), (1, 2));
        let two = one.changed(&urls(&["s3://b/x"]), &|rule| rule.ttl_seconds = Some(60)).unwrap();
        assert!(two.rules[0].pin && two.rules[0].ttl_seconds == Some(60));
        assert_eq!((two.rules[0].number, two.rules[0].revision, two.rules[1].revision), (one.rules[0].number, 2, 1));
        let three = two.changed(&urls(&["s3://b/x", "s3://b/y"]), &|rule| rule.pin = false).unwrap();
        assert_eq!(three.rules.iter().map(|rule| rule.url.as_str()).collect::<Vec<_>>(), ["s3://b/x"]);
        assert_eq!((three.gone[0].url.as_str(), three.gone[0].revision), ("s3://b/y", 3));
        // A number is nobody else's as long as its rule is remembered; of one URL it is the same again.
        let mut like_y = three.clone();
        like_y.gone[0].number = like_y.free_number("s3://b/z");
        assert_ne!(like_y.free_number("s3://b/z"), like_y.gone[0].number);
        let four = three.changed(&urls(&["s3://b/y"]), &|rule| rule.quota_bytes = Some(1)).unwrap();
        assert_eq!((four.revision, four.rules[1].number, four.gone.len()), (4, one.rules[1].number, 0));
        let same = four.changed(&urls(&["s3://b/y", "s3://b/none"]), &|rule| rule.pin &= true).unwrap();
        assert_eq!((same.rules, same.gone), (four.rules.clone(), four.gone.clone()));
        let many: Vec<String> = (0..RULES_MAX).map(|n| format!("s3://m/{n}")).collect();
        assert!(four.changed(&many, &|rule| rule.pin = true).unwrap_err().to_string().contains("255"));
        assert!(four.changed(&["x".repeat(2000)], &|rule| rule.pin = true).is_err());
    }

    #[test]
    fn an_older_set_is_not_taken() {
        let rules = Rules::default();
        let url = ["s3://b".to_owned()];
        let one = RuleSet::default().changed(&url, &|rule| rule.pin = true).unwrap();
        let none = one.changed(&url, &|rule| rule.pin = false).unwrap();
        let number = || rules.number("s3://b", b"x");
        assert_eq!(number(), PLAIN);
        assert!(rules.take(&one, None) && number() == one.rules[0].number);
        assert!(!rules.take(&one, None) && !rules.take(&RuleSet::default(), None));
        assert!(rules.take(&none, None) && number() == PLAIN);
        assert!(!rules.take(&one, None) && number() == PLAIN);
        // What was said elsewhere at the same time is taken besides.
        let other = one.changed(&["s3://c".to_owned()], &|rule| rule.pin = true).unwrap();
        assert!(rules.take(&other, None) && number() == PLAIN && rules.number("s3://c", b"x") != PLAIN);
        assert_eq!(rules.set().revision, 3);
    }
}
