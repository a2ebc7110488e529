//! Two sets of rules brought together: those that operators gave two coordinators, or a coordinator and nodes that knew
//! more. In whichever order all of them meet, the same comes of it, and nothing that was taken by one of them is lost. It
//! knows sets of rules, not where they are kept.

use crate::rules::{Gone, RULES_MAX, Rule, RuleSet};
use serde_json::Value;
use spurline_types::Result;
use std::collections::{BTreeMap, BTreeSet};

/// One folder in a set: its rule, or that it has none any more.
type Place<'a> = BTreeMap<&'a str, (u64, Option<&'a Rule>, u16)>;

fn places(set: &RuleSet) -> Place<'_> {
    let rules = set.rules.iter().map(|rule| (rule.url.as_str(), (rule.revision, Some(rule), rule.number)));
    let gone = set.gone.iter().map(|gone| (gone.url.as_str(), (gone.revision, None, gone.number)));
    gone.chain(rules).collect()
}

impl RuleSet {
    /// What holds when this set and `other` were both taken: for each folder what was said last of it, by the revision at
    /// which it was. Of two things said at one revision that keeps more of the folder; where one said what the other did
    /// not touch, both. Its revision is later than that of either unless it is one of them.
    pub fn merged(&self, other: &RuleSet) -> RuleSet {
        let revision = self.revision.max(other.revision);
        // Where nothing else decides, the later set does; the order in which the two are named never does.
        let (first, second) = if self.revision >= other.revision { (self, other) } else { (other, self) };
        let even = first.revision == second.revision;
        let (of_first, of_second) = (places(first), places(second));
        let mut set = RuleSet { revision, floor: first.floor.max(second.floor), ..RuleSet::default() };
        let urls: BTreeSet<&str> = of_first.keys().chain(of_second.keys()).copied().collect();
        for url in urls {
            let (place, missing_in) = match (of_first.get(url), of_second.get(url)) {
                (Some(one), Some(two)) => (of_both(one, two, even), None),
                (Some(one), None) => (owned(one), Some(second)),
                (None, Some(two)) => (owned(two), Some(first)),
                (None, None) => continue,
            };
            let (revision, rule, number) = place;
            // Whose end the other set has forgotten, with others that ended so long ago.
            if missing_in.is_some_and(|other| revision <= other.floor) {
                continue;
            }
            match rule {
                Some(rule) => set.rules.push(Rule { number, revision, ..rule }),
                None => set.gone.push(Gone { url: url.to_owned(), number, revision }),
            }
        }
        set.number_apart();
        set.shorten();
        let mut left = Vec::new();
        while set.rules.len() > RULES_MAX || !set.fits() {
            // Two sets that together are too large: what was said last has no room.
            let last = set.rules.iter().enumerate().max_by_key(|(_, rule)| (rule.revision, &rule.url));
            let Some((last, _)) = last else { break };
            left.push(set.rules.remove(last).url);
        }
        if !left.is_empty() {
            tracing::error!(
                "rules for folders: those of two coordinators are too many together; none holds any more for {}",
                left.join(", ")
            );
        }
        if set.says_as(first) && (!even || set.says_as(second)) {
            return first.clone();
        }
        set.revision += 1;
        set
    }

    fn says_as(&self, other: &RuleSet) -> bool {
        (&self.rules, &self.gone, self.floor) == (&other.rules, &other.gone, other.floor)
    }

    /// Gives those rules other numbers that have the number of one that was there before them.
    fn number_apart(&mut self) {
        let mut order: Vec<usize> = (0..self.rules.len()).collect();
        order.sort_by(|a, b| {
            let key = |at: &usize| (self.rules[*at].revision, &self.rules[*at].url);
            key(a).cmp(&key(b))
        });
        let mut taken = BTreeSet::new();
        let doubled: Vec<usize> = order.into_iter().filter(|at| !taken.insert(self.rules[*at].number)).collect();
        for at in doubled {
            let number = self.free_number(&self.rules[at].url);
            self.rules[at].number = number;
        }
    }
}

fn owned(&(revision, rule, number): &(u64, Option<&Rule>, u16)) -> (u64, Option<Rule>, u16) {
    (revision, rule.cloned(), number)
}

fn of_both(one: &(u64, Option<&Rule>, u16), two: &(u64, Option<&Rule>, u16), even: bool) -> (u64, Option<Rule>, u16) {
    if one.0 != two.0 {
        return owned(if one.0 > two.0 { one } else { two });
    }
    let rule = match (one.1, two.1) {
        (Some(one), Some(two)) => Some(Rule {
            pin: one.pin || two.pin,
            // None is less than some.
            ttl_seconds: one.ttl_seconds.max(two.ttl_seconds),
            quota_bytes: one.quota_bytes.max(two.quota_bytes),
            ..one.clone()
        }),
        (one, two) => one.or(two).cloned(),
    };
    (one.0, rule, if even { one.2.min(two.2) } else { one.2 })
}

/// As [`RuleSet::merged`], of the sets as they are kept; `Null` is one that nobody ever made.
///
/// # Errors
/// `Invalid` when one of them is no set of rules.
pub fn merge_rules(one: &Value, two: &Value) -> Result<Value> {
    let read = |set: &Value| if set.is_null() { Ok(RuleSet::default()) } else { RuleSet::from_json(set) };
    let merged = read(one)?.merged(&read(two)?);
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
        set.changed(&urls(&[url]), &|rule| rule.pin = true).unwrap()
    }

    fn unpin(set: &RuleSet, url: &str) -> RuleSet {
        set.changed(&urls(&[url]), &|rule| rule.pin = false).unwrap()
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
        let both = one.merged(&two);
        assert_eq!((both.clone(), both.revision), (two.merged(&one), one.revision + 1));
        assert_eq!(pinned(&both), ["s3://b/late", "s3://b/one", "s3://b/two", "s3://b/x"]);
        // Who has it takes nothing back from who has not.
        assert_eq!((both.merged(&one), two.merged(&both), both.merged(&base)), (both.clone(), both.clone(), both));
    }

    #[test]
    fn of_one_folder_what_was_said_last_holds_and_at_one_revision_what_keeps_more() {
        let base = pin(&RuleSet::default(), "s3://b/x");
        let gone = unpin(&base, "s3://b/x");
        assert!(base.merged(&gone).rules.is_empty() && gone.merged(&base) == gone);
        let limited = base.changed(&urls(&["s3://b/x"]), &|rule| rule.ttl_seconds = Some(60)).unwrap();
        assert_eq!(limited.revision, gone.revision);
        assert_eq!(
            (pinned(&gone.merged(&limited)), gone.merged(&limited).rules[0].ttl_seconds),
            (vec!["s3://b/x"], Some(60))
        );
        let quota = base.changed(&urls(&["s3://b/x"]), &|rule| rule.quota_bytes = Some(7)).unwrap();
        let rule = &quota.merged(&limited).rules[0];
        assert_eq!((rule.pin, rule.ttl_seconds, rule.quota_bytes), (true, Some(60), Some(7)));
        assert_eq!(pinned(&pin(&gone, "s3://b/x").merged(&gone)), ["s3://b/x"]);
    }

    #[test]
    fn rules_that_end_many_at_a_time_do_not_come_back() {
        let many: Vec<String> = (0..RULES_MAX).map(|n| format!("s3://m/{n}")).collect();
        let full = RuleSet::default().changed(&many, &|rule| rule.pin = true).unwrap();
        let none = full.changed(&many, &|rule| rule.pin = false).unwrap();
        assert!(none.rules.is_empty() && none.gone.len() < many.len());
        assert_eq!((full.merged(&none), none.merged(&full)), (none.clone(), none.clone()));
        let again = pin(&none, "s3://m/0");
        assert_eq!(pinned(&again.merged(&full)), ["s3://m/0"]);
    }

    #[test]
    fn rules_of_one_number_are_told_apart() {
        let mut one = pin(&RuleSet::default(), "s3://b/one");
        let mut two = pin(&RuleSet::default(), "s3://b/two");
        (one.rules[0].number, two.rules[0].number) = (7, 7);
        let both = one.merged(&two);
        assert_eq!((&both, both.rules[0].number), (&two.merged(&one), 7));
        assert_ne!(both.rules[1].number, 7);
        assert_eq!((both.merged(&two), both.merged(&one)), (both.clone(), both));
    }

    #[test]
    fn what_is_too_much_together_is_cut_for_all_alike() {
        let of = |host: &str| {
            let many: Vec<String> = (0..200).map(|n| format!("s3://{host}/{n}")).collect();
            RuleSet::default().changed(&many, &|rule| rule.pin = true).unwrap()
        };
        let (one, two) = (of("a"), of("b"));
        let both = one.merged(&two);
        assert!(both.rules.len() == RULES_MAX && both == two.merged(&one) && both.merged(&one) == both);
    }

    #[test]
    fn as_they_are_kept() {
        let (one, null) = (pin(&RuleSet::default(), "s3://b/one"), Value::Null);
        assert_eq!(merge_rules(&null, &null).unwrap(), null);
        assert_eq!(merge_rules(&null, &one.to_json()).unwrap(), one.to_json());
        assert!(merge_rules(&one.to_json(), &serde_json::json!({"revision": 1})).is_err());
    }

    proptest! {
        /// Three places of one group, each changed on its own, meeting in any order: in the end all have the same, it does not
        /// change any more, and what was said last of a folder, where only one place spoke of it, holds.
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
                        // Each speaks of its own folders.
                        let url = format!("s3://{at}/{name}");
                        sets[at] = if what == 0 { pin(&sets[at], &url) } else { unpin(&sets[at], &url) };
                        said.insert(url, (at, what == 0));
                    }
                    2 => {
                        let url = format!("s3://shared/{name}");
                        sets[at] = sets[at].changed(&[url], &|rule| rule.quota_bytes = Some(u64::from(name))).unwrap();
                    }
                    _ => {
                        let merged = sets[at].merged(&sets[with]);
                        prop_assert_eq!(&merged, &sets[with].merged(&sets[at]));
                        prop_assert!(merged.merged(&sets[at]) == merged && merged.merged(&sets[with]) == merged);
                        sets[at] = merged;
                    }
                }
            }
            for (at, with) in order.into_iter().chain([(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0), (0, 1)]) {
                let merged = sets[at].merged(&sets[with]);
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
    }
}
