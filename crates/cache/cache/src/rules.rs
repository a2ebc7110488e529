//! Folder rules: data that is pinned, expires, or has a quota. This module selects a file's rule by source and path; the store
//! applies the rule, by the class of the blocks. Knows neither revisions nor where rules are stored.

use crate::CacheContext;
use parking_lot::{Mutex, RwLock};
use spurline_store::{BlockClass, Store, UNCLASSIFIED};
use spurline_types::{ObjectId, url};
pub use spurline_volume::info::{FolderRule, WriteClass};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The class of the blocks of a rule's folder: a 64-bit hash of the URL. Stored with each block.
pub fn rule_class(rule: &FolderRule) -> u64 {
    (ObjectId::from_text(&rule.url, b"", "").0 as u64).max(UNCLASSIFIED + 1)
}

/// Rules and the classes.
#[derive(Debug, Default)]
pub struct FolderRules(Vec<(FolderRule, u64)>);

impl FolderRules {
    /// Takes at most a single rule for each folder.
    pub fn new(rules: impl IntoIterator<Item = FolderRule>) -> Self {
        FolderRules(
            rules
                .into_iter()
                .map(|rule| {
                    let class = rule_class(&rule);
                    (rule, class)
                })
                .collect(),
        )
    }

    /// The rule for a file, that of the deepest folder, and the class.
    fn find(&self, source: &str, path: &[u8]) -> Option<&(FolderRule, u64)> {
        self.0.iter().filter(|(rule, _)| is_below(&rule.url, source, path)).max_by_key(|(rule, _)| rule.url.len())
    }

    /// The rule for a file: that of the deepest folder.
    pub fn rule_for(&self, source: &str, path: &[u8]) -> Option<&FolderRule> {
        self.find(source, path).map(|(rule, _)| rule)
    }
}

/// Whether the file `path` of `source` is `folder` or below.
fn is_below(folder: &str, source: &str, path: &[u8]) -> bool {
    let source = source.trim_end_matches('/');
    let in_source = |path: &[u8], below| is_at_or_below(path, &url::path_in(source, below));
    match folder.strip_prefix(source) {
        Some("") => true,
        // The URL of the root of all files has no trailing slash to match.
        Some(below) if source.ends_with(':') => in_source(path, below.trim_start_matches('/')),
        Some(below) if below.starts_with('/') => in_source(path, &below[1..]),
        _ => is_at_or_below(source.as_bytes(), folder.as_bytes()),
    }
}

struct RuleState {
    rules: Arc<FolderRules>,
    /// Whether the group's rules were ever set. Until then, blocks keep the classes from before.
    known: bool,
    /// The fraction of the group's blocks that this process stores.
    share: f64,
}

/// The rules of a process.
pub(crate) struct RuleTable {
    any: AtomicBool,
    /// Read by every writer of a block, so not held while the blocks on disk are brought under changed rules.
    state: RwLock<RuleState>,
    /// Serialises changes.
    changing: Mutex<()>,
}

impl Default for RuleTable {
    fn default() -> Self {
        RuleTable {
            any: AtomicBool::new(false),
            state: RwLock::new(RuleState { rules: Arc::default(), known: false, share: 1.0 }),
            changing: Mutex::default(),
        }
    }
}

impl RuleTable {
    /// The class of a file's blocks. Called for writes to disk, never for reads.
    pub fn class_for(&self, source: &str, path: &[u8]) -> u64 {
        if !self.any.load(Ordering::Acquire) {
            return UNCLASSIFIED;
        }
        self.state.read().rules.find(source, path).map_or(UNCLASSIFIED, |(_, class)| *class)
    }

    /// The result of `look` at the rule of a file's deepest folder.
    pub fn with_rule<T>(&self, source: &str, path: &[u8], look: impl FnOnce(Option<&FolderRule>) -> T) -> T {
        if !self.any.load(Ordering::Acquire) {
            return look(None);
        }
        look(self.state.read().rules.rule_for(source, path))
    }

    pub fn rules(&self) -> Arc<FolderRules> {
        Arc::clone(&self.state.read().rules)
    }

    pub fn is_known(&self) -> bool {
        self.state.read().known
    }

    /// Replaces all rules.
    pub fn set_rules(&self, rules: FolderRules, store: Option<&Store>) {
        let _one = self.changing.lock();
        let share = self.state.read().share;
        // The store first: blocks of a class that is unknown there would be unclassified.
        apply_rules(&rules, share, store);
        self.any.store(!rules.0.is_empty(), Ordering::Release);
        let mut state = self.state.write();
        state.rules = Arc::new(rules);
        state.known = true;
    }

    /// Sets this process's fraction of the group's blocks.
    pub fn set_share(&self, share: f64, store: Option<&Store>) {
        let _one = self.changing.lock();
        let share = share.clamp(0.0, 1.0);
        let (before, rules) = {
            let mut state = self.state.write();
            (std::mem::replace(&mut state.share, share), Arc::clone(&state.rules))
        };
        // Only quotas depend on the share.
        if share != before && rules.0.iter().any(|(rule, _)| rule.quota_bytes.is_some()) {
            apply_rules(&rules, share, store);
        }
    }
}

fn apply_rules(rules: &FolderRules, share: f64, store: Option<&Store>) {
    let Some(store) = store else { return };
    store.set_classes(
        rules
            .0
            .iter()
            .map(|(rule, id)| {
                (
                    *id,
                    BlockClass {
                        pinned: rule.pin,
                        ttl: rule.ttl_seconds.map(Duration::from_secs),
                        quota_bytes: rule.quota_bytes.map(|quota| (quota as f64 * share) as u64),
                    },
                )
            })
            .collect::<BTreeMap<_, _>>(),
    );
}

impl CacheContext {
    /// The folder rules.
    pub fn folder_rules(&self) -> Arc<FolderRules> {
        self.rules.rules()
    }

    /// The result of `look` at the folder rule of the file `path`. Allocates nothing.
    pub fn with_rule<T>(&self, source: &str, path: &str, look: impl FnOnce(Option<&FolderRule>) -> T) -> T {
        self.rules.with_rule(source, path.as_bytes(), look)
    }

    /// Replaces the folder rules. Until `classify_blocks`, blocks on disk stay under the rule of their arrival, if that rule
    /// still exists.
    pub fn set_folder_rules(&self, rules: impl IntoIterator<Item = FolderRule>) {
        self.rules.set_rules(FolderRules::new(rules), self.enabled_store());
    }

    /// Sets the fraction of the group's blocks that this process stores, between 0 and 1: the same part of each quota.
    pub fn set_group_share(&self, share: f64) {
        self.rules.set_share(share, self.enabled_store());
    }

    /// Bytes that the cache disks may hold; `None` where there are none.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.enabled_store().map(|store| store.disks().iter().map(|disk| disk.capacity).sum())
    }

    /// Bytes on disk under a rule.
    pub fn bytes_under_rule(&self, rule: &FolderRule) -> u64 {
        self.enabled_store().map_or(0, |store| store.class_used(rule_class(rule)))
    }
}

fn is_at_or_below(path: &[u8], folder: &[u8]) -> bool {
    path.strip_prefix(folder)
        .is_some_and(|rest| folder.is_empty() || folder.ends_with(b"/") || matches!(rest, [] | [b'/', ..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(urls: &[&str]) -> FolderRules {
        FolderRules::new(urls.iter().map(|url| FolderRule { url: (*url).into(), ..FolderRule::default() }))
    }

    #[test]
    fn the_longest_folder_that_a_file_is_below_decides() {
        let number = |rules: &FolderRules, source: &str, path: &str| {
            let rule = rules.rule_for(source, path.as_bytes());
            rule.map_or(0, |rule| 1 + rules.0.iter().position(|(other, _)| other == rule).unwrap())
        };
        let set = rules(&["s3://b", "s3://b/train/a", "s3://b/train"]);
        let of = |source: &str, path: &str| number(&set, source, path);
        assert_eq!((of("s3://b", "x"), of("s3://b", "train/x"), of("s3://b", "train/a/x")), (1, 3, 2));
        assert_eq!((of("s3://b", "trainer/x"), of("s3://b", "train/ab"), of("s3://b", "train/a")), (1, 3, 2));
        // Another source of the same bucket, and another bucket.
        assert_eq!((of("s3://b/train", "a/x"), of("s3://b/train/", "c"), of("s3://b/train/a/deep", "x")), (2, 3, 2));
        assert_eq!((of("s3://bucket", "x"), of("s3://c", "x"), of("s3://b/trai", "x")), (0, 0, 1));
        // Names of directories are escaped, those of objects are not.
        let odd = rules(&["file:///a%20b", "file:///a%20b/100%25/%C3%A9", "s3://b/x%20"]);
        let of = |source: &str, path: &str| number(&odd, source, path);
        assert_eq!((of("file:///a%20b", "100%/\u{e9}/x"), of("file:///", "a b/100%/e")), (2, 1));
        assert_eq!((of("file:///a%20b/100%25", "\u{e9}"), of("file:///a%20b/100%25/%C3%A9/c", "x")), (2, 2));
        assert_eq!((of("s3://b", "x%20/y"), of("s3://b", "x /y"), of("file:///a%2520b", "x")), (3, 0, 0));
        let root = rules(&["/", "/data"]);
        assert_eq!((number(&root, "/data", "x"), number(&root, "/", "data/x"), number(&root, "/", "x")), (2, 2, 1));
        let all = rules(&["file:///data", "file:///"]);
        let of = |path: &str| number(&all, "file:///", path);
        assert_eq!((of("data/x"), of("database/x"), of("x")), (1, 2, 2));
    }

    #[test]
    fn a_file_has_the_class_of_its_folder() {
        let table = RuleTable::default();
        let class = || table.class_for("s3://b", b"x");
        assert!(class() == UNCLASSIFIED && !table.is_known());
        let rule = FolderRule { url: "s3://b".into(), pin: true, ..FolderRule::default() };
        table.set_rules(FolderRules::new([rule.clone()]), None);
        assert!(class() == rule_class(&rule) && rule_class(&rule) != UNCLASSIFIED && table.is_known());
        table.set_rules(FolderRules::default(), None);
        assert!(class() == UNCLASSIFIED && table.is_known());
    }

    #[test]
    fn new_files_go_where_the_rule_of_the_deepest_folder_says() {
        let table = RuleTable::default();
        let class = |source: &str, path: &str| {
            table.with_rule(source, path.as_bytes(), |rule| rule.map_or(WriteClass::Direct, FolderRule::write_class))
        };
        assert_eq!(class("s3://b", "x"), WriteClass::Direct);
        let rule = |url: &str, class: WriteClass| {
            let mut rule = FolderRule { url: url.into(), pin: true, ..FolderRule::default() };
            rule.set_write_class(class);
            rule
        };
        let rules = [
            rule("s3://b/run", WriteClass::Staged),
            rule("s3://b/run/kv", WriteClass::Scratch),
            rule("s3://b/run/final", WriteClass::Direct),
        ];
        table.set_rules(FolderRules::new(rules), None);
        assert_eq!(class("s3://b", "x"), WriteClass::Direct);
        assert_eq!((class("s3://b", "run/x"), class("s3://b/run", "a/x")), (WriteClass::Staged, WriteClass::Staged));
        assert_eq!(
            (class("s3://b", "run/kv/x"), class("s3://b/run/kv", "x")),
            (WriteClass::Scratch, WriteClass::Scratch)
        );
        assert_eq!(
            (class("s3://b", "run/final/x"), class("s3://b", "runner/x")),
            (WriteClass::Direct, WriteClass::Direct)
        );
    }
}
