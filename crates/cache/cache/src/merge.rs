//! Merges two sets of rules: those of two coordinators, or of a coordinator and nodes that know more. The result does
//! not depend on the order of merging, and no accepted change is lost. It knows sets of rules, not where they are
//! stored.

use crate::rules::{EndedRule, RULES_MAX, Rule, RuleSet, url_key};
use serde_json::Value;
use spurline_types::Result;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// A set's record of a folder.
#[derive(Clone, Copy)]
enum FolderRecord<'a> {
    Rule(&'a Rule),
    Gone(&'a EndedRule),
    /// It has no rule any more, and its URL is forgotten.
    Ended,
}

impl FolderRecord<'_> {
    fn rule_number(&self) -> Option<u16> {
        match self {
            FolderRecord::Rule(rule) => Some(rule.number),
            FolderRecord::Gone(gone) => Some(gone.number),
            FolderRecord::Ended => None,
        }
    }
}

/// The last record of each folder in a set, with its revision.
fn folder_records(set: &RuleSet) -> BTreeMap<u64, (u64, FolderRecord<'_>)> {
    let ended = set.ended.iter().map(|(key, at)| (*key, (*at, FolderRecord::Ended)));
    let gone = set.gone.iter().map(|gone| (url_key(&gone.url), (gone.revision, FolderRecord::Gone(gone))));
    let rules = set.rules.iter().map(|rule| (url_key(&rule.url), (rule.revision, FolderRecord::Rule(rule))));
    ended.chain(gone).chain(rules).collect()
}

/// The numbers of a set's folders.
fn known_numbers(set: &RuleSet) -> impl Iterator<Item = (u16, &str)> {
    let rules = set.rules.iter().map(|rule| (rule.number, rule.url.as_str()));
    rules.chain(set.gone.iter().map(|gone| (gone.number, gone.url.as_str())))
}

impl RuleSet {
    /// The merge of this set and `other`: for each folder the record with the latest revision. Of two records at one
    /// revision, the one that keeps more of the folder holds; two rules are combined field by field. The result's
    /// revision is later than both unless the result equals one of them.
    pub fn merged_with(&self, other: &RuleSet) -> RuleSet {
        let revision = self.revision.max(other.revision);
        // Ties go to the set with the later revision, never to the order of the arguments.
        let (first, second) = if self.revision >= other.revision { (self, other) } else { (other, self) };
        let even = first.revision == second.revision;
        let (of_first, of_second) = (folder_records(first), folder_records(second));
        let floor = first.floor.max(second.floor);
        let retired = first.retired.union(&second.retired).copied().collect();
        let mut set = RuleSet { revision, floor, retired, ..RuleSet::default() };
        let (mut meant, mut unsure) = (BTreeMap::new(), Vec::new());
        for (number, url) in known_numbers(first).chain(known_numbers(second)) {
            if meant.insert(number, url).is_some_and(|other| other != url) {
                set.retired.insert(number);
            }
        }
        let keys: BTreeSet<u64> = of_first.keys().chain(of_second.keys()).copied().collect();
        for key in keys {
            let ((at, said), missing_in) = match (of_first.get(&key), of_second.get(&key)) {
                (Some((_, FolderRecord::Rule(one))), Some((_, FolderRecord::Rule(two)))) => {
                    let rule = merge_rule_pair(one, two, &mut set.retired);
                    set.rules.push(rule);
                    continue;
                }
                (Some(one), Some(two)) => {
                    let last = latest_record(one, two);
                    let other_numbers = [one, two].map(|(_, said)| said.rule_number()).into_iter().flatten();
                    set.retired
                        .extend(other_numbers.filter(|n| last.1.rule_number().is_some_and(|number| number != *n)));
                    (last, None)
                }
                (Some(one), None) => (*one, Some(second)),
                (None, Some(two)) => (*two, Some(first)),
                (None, None) => continue,
            };
            // The other set has forgotten this folder's end among old ones, or never knew the folder.
            let forgotten = missing_in.is_some_and(|other| at <= other.floor);
            match said {
                FolderRecord::Rule(rule) if forgotten => unsure.push(rule.url.as_str()),
                FolderRecord::Rule(rule) => set.rules.push(rule.clone()),
                _ if forgotten => {}
                FolderRecord::Gone(gone) => set.gone.push(gone.clone()),
                FolderRecord::Ended => _ = set.ended.insert(key, at),
            }
        }
        if !unsure.is_empty() {
            tracing::error!(
                "rules for folders: it is unknown whether those for {} have ended: they were given to one \
                 coordinator, while many rules ended on another that could not be reached; they are dropped; give \
                 those that should hold again with 'spurline pin' or 'spurline limit'",
                unsure.join(", ")
            );
        }
        set.rules.sort_by(|a, b| a.url.cmp(&b.url));
        set.renumber_conflicts();
        set.trim_ended();
        let mut left = Vec::new();
        while set.rules.len() > RULES_MAX || !set.fits_request() {
            // The two sets together are too large: the latest rules do not fit.
            let last = set.rules.iter().enumerate().max_by_key(|(_, rule)| (rule.revision, &rule.url));
            let Some((last, _)) = last else { break };
            left.push(set.rules.remove(last).url);
        }
        if !left.is_empty() {
            tracing::error!(
                "rules for folders: those of two coordinators together exceed the limit; the latest are dropped, \
                 for {}",
                left.join(", ")
            );
        }
        if set.equals_except_revision(first) && (!even || set.equals_except_revision(second)) {
            return first.clone();
        }
        set.revision += 1;
        set
    }

    fn equals_except_revision(&self, other: &RuleSet) -> bool {
        RuleSet { revision: other.revision, ..self.clone() } == *other
    }

    /// Renumbers those rules whose number also meant another folder.
    fn renumber_conflicts(&mut self) {
        let mut moved = Vec::new();
        for at in 0..self.rules.len() {
            if self.retired.contains(&self.rules[at].number) {
                self.rules[at].number = self.free_number(&self.rules[at].url);
                moved.push(self.rules[at].url.as_str().to_owned());
            }
        }
        if !moved.is_empty() {
            tracing::warn!(
                "rules for folders: two separated coordinators gave one number to different folders; cached blocks \
                 of {} are under no rule until 'spurline pin' or 'spurline limit' is run for it again",
                moved.join(", ")
            );
        }
    }
}

/// The later record; at one revision the one that keeps more of the folder, or is remembered shorter.
fn latest_record<'a>(one: &(u64, FolderRecord<'a>), two: &(u64, FolderRecord<'a>)) -> (u64, FolderRecord<'a>) {
    let order = |(at, said): &(u64, FolderRecord<'_>)| {
        (*at, matches!(said, FolderRecord::Rule(_)), matches!(said, FolderRecord::Ended), said.rule_number())
    };
    if order(one) >= order(two) { *one } else { *two }
}

/// The later of two rules for a folder; at one revision their combination. A number that is dropped is retired.
fn merge_rule_pair(one: &Rule, two: &Rule, retired: &mut BTreeSet<u16>) -> Rule {
    let mut numbers = [one.number, two.number];
    numbers.sort_by_key(|number| (retired.contains(number), *number));
    let [number, other] = numbers;
    if other != number {
        retired.insert(other);
    }
    let rule = match one.revision.cmp(&two.revision) {
        Ordering::Greater => one.clone(),
        Ordering::Less => two.clone(),
        Ordering::Equal => Rule {
            pin: one.pin || two.pin,
            // `None` is less than `Some`.
            ttl_seconds: one.ttl_seconds.max(two.ttl_seconds),
            quota_bytes: one.quota_bytes.max(two.quota_bytes),
            ..one.clone()
        },
    };
    Rule { number, ..rule }
}

/// As [`RuleSet::merged_with`], for serialised sets; `Null` is an empty one.
///
/// # Errors
/// `Invalid` when one of them is no set of rules.
pub fn merge_rules(one: &Value, two: &Value) -> Result<Value> {
    let read = |set: &Value| if set.is_null() { Ok(RuleSet::default()) } else { RuleSet::from_json(set) };
    let merged = read(one)?.merged_with(&read(two)?);
    Ok(if merged == RuleSet::default() { Value::Null } else { merged.to_json() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn urls(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    fn pin(set: &RuleSet, url: &str) -> RuleSet {
        set.with_changes(&urls(&[url]), &|rule| rule.pin = true).unwrap()
    }

    fn unpin(set: &RuleSet, url: &str) -> RuleSet {
        set.with_changes(&urls(&[url]), &|rule| rule.pin = false).unwrap()
    }

    fn pinned(set: &RuleSet) -> Vec<&str> {
        set.rules.iter().filter(|rule| rule.pin).map(|rule| rule.url.as_str()).collect()
    }

    #[test]
    fn what_two_coordinators_took_at_one_revision_holds_both() {
        let base = pin(&pin(&RuleSet::default(), "s3://b/old"), "s3://b/x");
        let (one, two) = (pin(&base, "s3://b/one"), unpin(&pin(&base, "s3://b/two"), "s3://b/old"));
        let one = pin(&one, "s3://b/late");
        assert_eq!(one.revision, two.revision);
        let both = one.merged_with(&two);
        assert_eq!((both.clone(), both.revision), (two.merged_with(&one), one.revision + 1));
        assert_eq!(pinned(&both), ["s3://b/late", "s3://b/one", "s3://b/two", "s3://b/x"]);
        // Merging into a set that has everything changes nothing.
        assert_eq!(
            (both.merged_with(&one), two.merged_with(&both), both.merged_with(&base)),
            (both.clone(), both.clone(), both)
        );
    }

    #[test]
    fn of_one_folder_what_was_said_last_holds_and_at_one_revision_what_keeps_more() {
        let base = pin(&RuleSet::default(), "s3://b/x");
        let gone = unpin(&base, "s3://b/x");
        assert!(base.merged_with(&gone).rules.is_empty() && gone.merged_with(&base) == gone);
        let limited = base.with_changes(&urls(&["s3://b/x"]), &|rule| rule.ttl_seconds = Some(60)).unwrap();
        assert_eq!(limited.revision, gone.revision);
        assert_eq!(
            (pinned(&gone.merged_with(&limited)), gone.merged_with(&limited).rules[0].ttl_seconds),
            (vec!["s3://b/x"], Some(60))
        );
        let quota = base.with_changes(&urls(&["s3://b/x"]), &|rule| rule.quota_bytes = Some(7)).unwrap();
        let rule = &quota.merged_with(&limited).rules[0];
        assert_eq!((rule.pin, rule.ttl_seconds, rule.quota_bytes), (true, Some(60), Some(7)));
        assert_eq!(pinned(&pin(&gone, "s3://b/x").merged_with(&gone)), ["s3://b/x"]);
    }

    #[test]
    fn rules_that_end_many_at_a_time_do_not_come_back_and_cost_no_other() {
        // Of any length: at least as many ends as there may be rules are remembered.
        for name in ["s3://m/", &format!("s3://m/{}/", "long".repeat(20))] {
            let many: Vec<String> = (0..RULES_MAX).map(|n| format!("{name}{n}")).collect();
            let full = RuleSet::default().with_changes(&many, &|rule| rule.pin = true).unwrap();
            let none = full.with_changes(&many, &|rule| rule.pin = false).unwrap();
            assert!(none.rules.is_empty() && none.gone.len() < many.len() && none.floor == 0);
            assert_eq!((full.merged_with(&none), none.merged_with(&full)), (none.clone(), none.clone()));
            let again = pin(&none, &many[0]);
            assert_eq!(pinned(&again.merged_with(&full)), [&many[0]]);
            // Given meanwhile to an unreachable coordinator with few changes.
            let other = pin(&RuleSet::default(), "s3://b/other");
            let both = none.merged_with(&other);
            assert_eq!((pinned(&both), &both), (vec!["s3://b/other"], &other.merged_with(&none)));
            assert_eq!((both.merged_with(&full), both.merged_with(&other)), (both.clone(), both));
        }
    }

    #[test]
    fn ends_are_forgotten_only_when_there_are_very_many() {
        let other = pin(&RuleSet::default(), "s3://b/other");
        let mut set = RuleSet::default();
        for round in 0..5 {
            let many: Vec<String> = (0..RULES_MAX).map(|n| format!("s3://m/{round}/{n}")).collect();
            set = set.with_changes(&many, &|rule| rule.pin = true).unwrap();
            set = set.with_changes(&many, &|rule| rule.pin = false).unwrap();
            let known = round < 4;
            assert_eq!((set.floor == 0, pinned(&set.merged_with(&other)).len()), (known, usize::from(known)));
        }
        // Logged once: a set that includes the merge has no rule left out.
        let both = set.merged_with(&other);
        assert!(both == set && other.merged_with(&set) == set);
        assert!(set.to_json().to_string().len() <= 60 << 10);
        assert_eq!(RuleSet::from_json(&set.to_json()).unwrap(), set);
        assert_eq!(pinned(&pin(&set, "s3://b/other").merged_with(&other)), ["s3://b/other"]);
    }

    /// Folders whose rules would all have one number.
    fn of_one_number() -> Vec<String> {
        let mut by_number: BTreeMap<u16, Vec<String>> = BTreeMap::new();
        for n in 0.. {
            let url = format!("s3://same/{n}");
            let same = by_number.entry(url_key(&url) as u16).or_default();
            same.push(url);
            if same.len() == 4 {
                return same.clone();
            }
        }
        Vec::new()
    }

    #[test]
    fn a_number_that_meant_two_folders_means_none() {
        let same = of_one_number();
        let (one, two) = (pin(&RuleSet::default(), &same[0]), pin(&RuleSet::default(), &same[1]));
        let number = one.rules[0].number;
        assert_eq!(number, two.rules[0].number);
        let both = one.merged_with(&two);
        assert_eq!(&both, &two.merged_with(&one));
        assert!(both.retired == BTreeSet::from([number]) && both.rules.len() == 2);
        assert!(both.rules.iter().all(|rule| rule.number != number));
        assert_eq!((both.merged_with(&two), both.merged_with(&one)), (both.clone(), both.clone()));
        // Nor after a later merge.
        let third = pin(&both, &same[2]);
        assert!(third.rules.iter().all(|rule| rule.number != number));
        // One of them has ended meanwhile.
        let ended = unpin(&two, &same[1]).merged_with(&one);
        assert!(ended.rules.len() == 1 && ended.rules[0].number != number && ended.retired.contains(&number));
    }

    #[test]
    fn what_is_too_much_together_is_cut_for_all_alike() {
        let of = |host: &str| {
            let many: Vec<String> = (0..200).map(|n| format!("s3://{host}/{n}")).collect();
            RuleSet::default().with_changes(&many, &|rule| rule.pin = true).unwrap()
        };
        let (one, two) = (of("a"), of("b"));
        let both = one.merged_with(&two);
        assert!(both.rules.len() == RULES_MAX && both == two.merged_with(&one) && both.merged_with(&one) == both);
    }

    #[test]
    fn as_they_are_kept() {
        let (one, null) = (pin(&RuleSet::default(), "s3://b/one"), Value::Null);
        assert_eq!(merge_rules(&null, &null).unwrap(), null);
        assert_eq!(merge_rules(&null, &one.to_json()).unwrap(), one.to_json());
        assert!(merge_rules(&one.to_json(), &serde_json::json!({"revision": 1})).is_err());
    }

    proptest! {
        /// Three replicas of one group, each changed on its own, merging in any order: in the end all are equal,
        /// nothing changes any more, and the last record of a folder that only one replica changed holds.
        #[test]
        fn all_come_to_one_set(
            steps in proptest::collection::vec((0usize..3, 0usize..3, 0u8..4, 0u8..6), 0..40),
            order in proptest::collection::vec((0usize..3, 0usize..3), 3),
        ) {
            let mut sets = [RuleSet::default(), RuleSet::default(), RuleSet::default()];
            let mut said: BTreeMap<String, (usize, bool)> = BTreeMap::new();
            for (at, with, what, name) in steps {
                match what {
                    0 | 1 => {
                        // Each changes its own folders.
                        let url = format!("s3://{at}/{name}");
                        sets[at] = if what == 0 { pin(&sets[at], &url) } else { unpin(&sets[at], &url) };
                        said.insert(url, (at, what == 0));
                    }
                    2 => {
                        let url = format!("s3://shared/{name}");
                        sets[at] = sets[at].with_changes(&[url], &|rule| rule.quota_bytes = Some(u64::from(name))).unwrap();
                    }
                    _ => {
                        let merged = sets[at].merged_with(&sets[with]);
                        prop_assert_eq!(&merged, &sets[with].merged_with(&sets[at]));
                        prop_assert!(merged.merged_with(&sets[at]) == merged && merged.merged_with(&sets[with]) == merged);
                        sets[at] = merged;
                    }
                }
            }
            for (at, with) in order.into_iter().chain([(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0), (0, 1)]) {
                let merged = sets[at].merged_with(&sets[with]);
                sets[at] = merged.clone();
                sets[with] = merged;
            }
            prop_assert!(sets[0] == sets[1] && sets[1] == sets[2], "{sets:#?}");
            for (url, (_, there)) in said {
                prop_assert_eq!(pinned(&sets[0]).contains(&url.as_str()), there, "{} of {:#?}", url, sets[0]);
            }
            let mut numbers: Vec<u16> = sets[0].rules.iter().map(|rule| rule.number).collect();
            numbers.sort_unstable();
            numbers.dedup();
            prop_assert_eq!(numbers.len(), sets[0].rules.len());
        }

        /// Many rules end at one replica while others are given elsewhere.
        #[test]
        fn no_rule_is_lost_to_the_ends_of_others(
            steps in proptest::collection::vec((0usize..3, 0usize..3, 0u8..5, 0usize..3), 1..12),
        ) {
            let mut sets = [RuleSet::default(), RuleSet::default(), RuleSet::default()];
            let mut said: BTreeMap<String, bool> = BTreeMap::new();
            for (at, with, what, name) in steps {
                match what {
                    0 | 1 => {
                        let many: Vec<String> = (0..100).map(|n| format!("s3://{at}/many/{name}/{n}")).collect();
                        sets[at] = sets[at].with_changes(&many, &|rule| rule.pin = true).unwrap();
                        sets[at] = sets[at].with_changes(&many, &|rule| rule.pin = false).unwrap();
                    }
                    2 | 3 => {
                        let url = format!("s3://{at}/{name}");
                        sets[at] = if what == 2 { pin(&sets[at], &url) } else { unpin(&sets[at], &url) };
                        said.insert(url, what == 2);
                    }
                    _ => sets[at] = sets[at].merged_with(&sets[with]),
                }
            }
            for (at, with) in [(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0), (0, 1)] {
                let merged = sets[at].merged_with(&sets[with]);
                prop_assert_eq!(&merged, &sets[with].merged_with(&sets[at]));
                sets[at] = merged.clone();
                sets[with] = merged;
            }
            prop_assert!(sets[0] == sets[1] && sets[1] == sets[2]);
            let there: Vec<&str> = said.iter().filter(|(_, there)| **there).map(|(url, _)| url.as_str()).collect();
            prop_assert_eq!(pinned(&sets[0]), there);
        }

        /// Whatever numbers replicas gave folders before they met, no number in use meant another folder anywhere.
        #[test]
        fn a_number_means_one_folder(
            steps in proptest::collection::vec((0usize..3, 0usize..3, 0u8..3, 0usize..4), 0..30),
        ) {
            static SAME: std::sync::LazyLock<Vec<String>> = std::sync::LazyLock::new(of_one_number);
            let mut sets = [RuleSet::default(), RuleSet::default(), RuleSet::default()];
            let mut meant: BTreeSet<(u16, String)> = BTreeSet::new();
            for (at, with, what, name) in steps {
                sets[at] = match what {
                    0 => pin(&sets[at], &SAME[name]),
                    1 => unpin(&sets[at], &SAME[name]),
                    _ => sets[at].merged_with(&sets[with]),
                };
                meant.extend(sets[at].rules.iter().map(|rule| (rule.number, rule.url.clone())));
            }
            for (at, with) in [(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0), (0, 1)] {
                let merged = sets[at].merged_with(&sets[with]);
                sets[at] = merged.clone();
                sets[with] = merged;
            }
            prop_assert!(sets[0] == sets[1] && sets[1] == sets[2], "{sets:#?}");
            for rule in &sets[0].rules {
                let others = meant.iter().filter(|(number, url)| *number == rule.number && *url != rule.url);
                prop_assert_eq!(others.count(), 0, "{:?} of {:#?}", rule, meant);
            }
        }
    }
}
