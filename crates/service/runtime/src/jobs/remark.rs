//! The remark on a load that succeeded: more was loaded than the rules for folders, or the cache disks, keep. Reads the nodes'
//! answers and sends no request.

use crate::rules;
use spurline_cache::FolderRules;
use spurline_rules::{NodeRules, RuleSet};
use spurline_types::units::human_bytes;
use std::collections::BTreeMap;

/// Blocks take multiples of this on disk.
const DISK_PAGE_BYTES: u64 = 4096;
const REMARK_FOLDERS: usize = 3;

/// The rules and the space of the nodes, from the answers.
pub struct GroupCapacity<'a> {
    told: &'a [NodeRules],
    set: RuleSet,
    folders: FolderRules,
}

impl GroupCapacity<'_> {
    /// Combines the answers of the nodes.
    pub fn from_answers(told: &[NodeRules]) -> GroupCapacity<'_> {
        let sets = told.iter().map(NodeRules::to_set);
        let set = sets.fold(RuleSet::default(), RuleSet::or_newer);
        let folders = FolderRules::new(set.rules.iter().cloned());
        GroupCapacity { told, set, folders }
    }

    /// Space of the cache disks without pins; `None` where a node has no disk or does not report the size.
    fn unpinned_bytes(&self) -> Option<u64> {
        let capacity: Option<u64> = self.told.iter().map(|node| node.capacity_bytes).sum();
        let pinned = self.told.iter().map(|node| node.pinned_bytes).sum();
        Some(capacity?.saturating_sub(pinned))
    }

    /// Whether `bytes` more can't be pinned: no space in all, or less than a block on a node.
    fn refuses_pins(&self, bytes: u64) -> bool {
        let room: u64 = self.told.iter().map(NodeRules::pin_room).sum();
        room < bytes || self.told.iter().any(|node| node.pin_room() < node.block_size)
    }

    /// Whether `bytes` fit for certain, whatever the files.
    pub fn surely_holds(&self, bytes: u64) -> bool {
        self.set.rules.is_empty() && self.unpinned_bytes().is_none_or(|room| bytes <= room)
    }

    /// The remark on these files of `source`: paths, sizes and numbers of copies.
    pub fn load_remark(&self, source: &str, files: impl Iterator<Item = (Vec<u8>, u64, u64)>) -> Option<String> {
        // Rules do not apply to memory.
        let room = self.unpinned_bytes()?;
        let mut by_rule = BTreeMap::new();
        let mut rest = 0u64;
        for (path, size, copies) in files {
            let bytes = size.next_multiple_of(DISK_PAGE_BYTES).saturating_mul(copies);
            let sum = match self.folders.rule_for(source, &path) {
                Some(rule) => by_rule.entry(rule.url.as_str()).or_insert(0u64),
                None => &mut rest,
            };
            *sum = sum.saturating_add(bytes);
        }
        let mut said = Vec::new();
        for (url, loaded) in by_rule {
            let held = self.told.iter().map(|node| node.held_bytes(url)).sum();
            let rule = self.set.rule_of(url)?;
            if loaded <= held || said.len() == REMARK_FOLDERS {
                continue;
            }
            let why = match (rule.ttl_seconds, rule.quota_bytes) {
                (None, None) if self.refuses_pins(loaded - held) => "not all of it could be pinned".to_owned(),
                // A pin alone evicts nothing.
                (None, None) => continue,
                _ => rules::describe_rule(rule),
            };
            let loaded = human_bytes(loaded);
            let held = human_bytes(held);
            said.push(format!("of {url} {loaded} were loaded and {held} are held: {why}"));
        }
        if rest > room {
            let rest = human_bytes(rest);
            let room = human_bytes(room);
            said.push(format!("{rest} were loaded where the cache disks have room for {room}: not all of it is held"));
        }
        (!said.is_empty()).then(|| said.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_cache::FolderRule;
    use spurline_rules::HeldRule;

    fn node(rules: &[(FolderRule, u64)], capacity: u64, pinned: u64) -> NodeRules {
        let rules = rules.iter().map(|(rule, held_bytes)| HeldRule { rule: rule.clone(), held_bytes: *held_bytes });
        NodeRules {
            revision: 1,
            rules: rules.collect(),
            capacity_bytes: Some(capacity),
            pinned_bytes: pinned,
            most_pinned_bytes: capacity,
            ..NodeRules::default()
        }
    }

    fn files(list: &[(&str, u64)]) -> impl Iterator<Item = (Vec<u8>, u64, u64)> {
        list.iter().map(|(path, mib)| (path.as_bytes().to_vec(), mib << 20, 1))
    }

    #[test]
    fn what_rules_and_disks_do_not_keep_is_said_with_figures() {
        let rule = |url: &str| FolderRule { url: url.into(), ..FolderRule::default() };
        let quota = FolderRule { quota_bytes: Some(30 << 20), ..rule("s3://b/x") };
        let timed = FolderRule { ttl_seconds: Some(5), ..rule("s3://b/t") };
        let rules = |x, t| [(quota.clone(), x), (timed.clone(), t)];
        let told = [node(&rules(10 << 20, 0), 64 << 20, 8 << 20), node(&rules(14 << 20, 1 << 20), 64 << 20, 0)];
        let group = GroupCapacity::from_answers(&told);
        let remark = |list: &[(&str, u64)]| group.load_remark("s3://b", files(list));
        assert_eq!(remark(&[("x/1", 12), ("x/2", 12), ("t/1", 1), ("y", 120)]), None);
        assert!(!group.surely_holds(1), "there are rules");
        assert_eq!(
            remark(&[("x/1", 20), ("x/2", 40), ("t/1", 1)]).unwrap(),
            "of s3://b/x 60.0 MiB were loaded and 24.0 MiB are held: at most 30.0 MiB"
        );
        assert_eq!(
            remark(&[("t/1", 4)]).unwrap(),
            "of s3://b/t 4.00 MiB were loaded and 1.00 MiB are held: kept for 5 s"
        );
        assert_eq!(
            remark(&[("y", 121)]).unwrap(),
            "121 MiB were loaded where the cache disks have room for 120 MiB: not all of it is held"
        );
        let pinned = FolderRule { pin: true, ..rule("s3://b/p") };
        let pins = |most: u64| {
            let mut told = [64 << 20, 64 << 20].map(|room| node(&[(pinned.clone(), 10 << 20)], room, 10 << 20));
            for node in &mut told {
                node.most_pinned_bytes = most;
                node.block_size = 4096;
            }
            GroupCapacity::from_answers(&told).load_remark("s3://b", files(&[("p/1", 30)]))
        };
        assert_eq!(pins(50 << 20), None, "there is room for its pins");
        for most in [14 << 20, 10 << 20] {
            let said = pins(most).unwrap();
            assert_eq!(said, "of s3://b/p 30.0 MiB were loaded and 20.0 MiB are held: not all of it could be pinned");
        }
        let plain = [node(&[], 64 << 20, 0)];
        assert!(
            GroupCapacity::from_answers(&plain).surely_holds(64 << 20)
                && !GroupCapacity::from_answers(&plain).surely_holds(65 << 20)
        );
        let without_disks = [NodeRules::default(), node(&[], 1, 0)];
        assert!(
            GroupCapacity::from_answers(&without_disks).surely_holds(9)
                && GroupCapacity::from_answers(&without_disks).load_remark("s3://b", files(&[("y", 9)])).is_none()
        );
    }
}
