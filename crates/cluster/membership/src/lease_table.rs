//! The coordinator's lease table: the registered nodes, the leases, and the changes since a revision. No clock, no thread and no
//! socket: the time is passed in.

use crate::{may_take_over, name_conflict};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Upper limits of a table, so that no caller can make the table grow without end.
#[derive(Debug, Clone, Copy)]
pub struct TableLimits {
    /// Groups.
    pub groups: usize,
    /// Nodes of a group.
    pub nodes: usize,
    /// Bytes of a name, a zone or an address.
    pub word: usize,
    /// Addresses of a node.
    pub addresses: usize,
}

impl Default for TableLimits {
    fn default() -> Self {
        TableLimits { groups: 1024, nodes: 100_000, word: 255, addresses: 32 }
    }
}

/// Removed nodes are remembered for slow watchers, at most this many; a slower watcher gets the whole list again.
const MAX_GONE: usize = 4096;

#[derive(Debug)]
struct LeasedNode {
    member: Member,
    until: Instant,
    revision: u64,
}

#[derive(Debug, Default)]
struct GroupTable {
    nodes: BTreeMap<String, LeasedNode>,
    gone: HashMap<String, u64>,
    /// The last change of each name, oldest first.
    order: BTreeMap<u64, String>,
    revision: u64,
    /// Changes up to here may be forgotten.
    floor: u64,
}

/// Changes since a revision.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MemberChanges {
    /// Whether to discard everything known before.
    pub reset: bool,
    /// New and changed nodes.
    pub put: Vec<Member>,
    /// Removed names.
    pub gone: Vec<String>,
    /// The revision after these.
    pub revision: u64,
}

/// The nodes of all groups.
#[derive(Debug)]
pub struct LeaseTable {
    lease_time: Duration,
    limits: TableLimits,
    groups: BTreeMap<String, GroupTable>,
}

impl GroupTable {
    fn record_change(&mut self, name: &str, before: Option<u64>) -> u64 {
        if let Some(before) = before {
            self.order.remove(&before);
        }
        self.revision += 1;
        self.order.insert(self.revision, name.to_owned());
        self.revision
    }

    fn remove_node(&mut self, name: &str) {
        let Some(held) = self.nodes.remove(name) else { return };
        let revision = self.record_change(name, Some(held.revision));
        self.gone.insert(name.to_owned(), revision);
        if self.gone.len() > MAX_GONE {
            self.floor = self.revision;
            for (_, revision) in self.gone.drain() {
                self.order.remove(&revision);
            }
        }
    }
}

impl LeaseTable {
    /// An empty table whose entries last for `lease`.
    pub fn new(lease: Duration, limits: TableLimits) -> Self {
        LeaseTable { lease_time: lease, limits, groups: BTreeMap::new() }
    }

    /// How long an entry lasts.
    pub fn lease(&self) -> Duration {
        self.lease_time
    }

    fn check_limits(&self, group: &str, member: &Member) -> Result<()> {
        let words = [group, &member.name].into_iter().chain(member.addresses.iter().map(String::as_str));
        for word in words {
            if word.is_empty() || word.len() > self.limits.word || word.chars().any(char::is_control) {
                return unsupported(format!("'{}' is no name or address", word.escape_debug()));
            }
        }
        if member.zone.len() > self.limits.word || member.zone.chars().any(char::is_control) {
            return unsupported(format!("the zone '{}' is too long", member.zone.escape_debug()));
        }
        if member.addresses.is_empty() || member.addresses.len() > self.limits.addresses {
            return unsupported(format!("a node has 1 to {} addresses", self.limits.addresses));
        }
        match self.groups.get(group) {
            None if self.groups.len() >= self.limits.groups => {
                unsupported(format!("at most {} groups are possible", self.limits.groups))
            }
            Some(known) if known.nodes.len() >= self.limits.nodes && !known.nodes.contains_key(&member.name) => {
                unsupported(format!("group {group} has {} nodes already, the most possible", self.limits.nodes))
            }
            _ => Ok(()),
        }
    }

    /// Enters a node or renews the lease; returns whether anything but the lease changed.
    ///
    /// # Errors
    /// `Invalid` when another process holds the name, `Unsupported` beyond the limits.
    pub fn enter_node(&mut self, now: Instant, group: &str, member: &Member) -> Result<bool> {
        self.check_limits(group, member)?;
        let until = now + self.lease_time;
        let group_name = group;
        let group = self.groups.entry(group.to_owned()).or_default();
        let before = match group.nodes.get_mut(&member.name) {
            Some(held) if held.until > now && !may_take_over(&held.member, member) => {
                return Err(Error::new(ErrorKind::Invalid, name_conflict(group_name, &held.member, member)));
            }
            Some(held) if held.member == *member => {
                held.until = until;
                return Ok(false);
            }
            Some(held) => Some(held.revision),
            None => group.gone.remove(&member.name),
        };
        let revision = group.record_change(&member.name, before);
        group.nodes.insert(member.name.clone(), LeasedNode { member: member.clone(), until, revision });
        Ok(true)
    }

    /// Removes a node; returns whether this process held the name.
    pub fn remove_own(&mut self, group: &str, name: &str, instance: u64) -> bool {
        let Some(group) = self.groups.get_mut(group) else { return false };
        let here = group.nodes.get(name).is_some_and(|held| held.member.instance == instance);
        if here {
            group.remove_node(name);
        }
        here
    }

    /// Removes nodes whose lease ran out; returns these with the group.
    pub fn remove_expired(&mut self, now: Instant) -> Vec<(String, Member)> {
        let mut swept = Vec::new();
        for (name, group) in &mut self.groups {
            let over: Vec<Member> =
                group.nodes.values().filter(|held| held.until <= now).map(|held| held.member.clone()).collect();
            for member in over {
                group.remove_node(&member.name);
                swept.push((name.clone(), member));
            }
        }
        swept
    }

    /// Changes in a group after `since`; 0 returns everything.
    pub fn changes_since(&self, group: &str, since: u64) -> MemberChanges {
        let Some(group) = self.groups.get(group) else {
            return MemberChanges { reset: since == 0, ..MemberChanges::default() };
        };
        if since == 0 || since < group.floor {
            let put = group.nodes.values().map(|held| held.member.clone()).collect();
            return MemberChanges { reset: true, put, gone: Vec::new(), revision: group.revision };
        }
        let mut changes = MemberChanges { revision: group.revision, ..MemberChanges::default() };
        for name in group.order.range(since + 1..).map(|(_, name)| name) {
            match group.nodes.get(name) {
                Some(held) => changes.put.push(held.member.clone()),
                None => changes.gone.push(name.clone()),
            }
        }
        changes
    }

    /// All nodes by group.
    pub fn all_groups(&self) -> BTreeMap<String, Vec<Member>> {
        self.groups.iter().map(|(name, group)| (name.clone(), members_of(group))).collect()
    }

    /// Nodes of all groups.
    pub fn len(&self) -> usize {
        self.groups.values().map(|group| group.nodes.len()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn unsupported(what: String) -> Result<()> {
    Err(Error::new(ErrorKind::Unsupported, what))
}

fn members_of(group: &GroupTable) -> Vec<Member> {
    group.nodes.values().map(|held| held.member.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, instance: u64, port: u16) -> Member {
        Member { name: name.into(), instance, ..Member::from_address(&format!("10.0.0.1:{port}"), 100) }
    }

    fn roll() -> LeaseTable {
        LeaseTable::new(Duration::from_secs(15), TableLimits { nodes: 3, ..TableLimits::default() })
    }

    #[test]
    fn a_name_belongs_to_one_process_until_its_lease_is_over() {
        let (now, mut roll) = (Instant::now(), roll());
        assert!(roll.enter_node(now, "g", &node("n", 1, 1)).unwrap());
        assert!(!roll.enter_node(now, "g", &node("n", 1, 1)).unwrap());
        let refused = roll.enter_node(now, "g", &node("n", 2, 2)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        for word in ["'n'", "10.0.0.1:1;", "10.0.0.1:2", "--name"] {
            assert!(refused.message().contains(word), "{word}: {refused}");
        }
        // The same address after a restart: only one process can listen there.
        assert!(roll.enter_node(now, "g", &node("n", 3, 1)).unwrap());
        // Another process may take the name once the lease is over, and in another group at once.
        assert!(roll.enter_node(now, "h", &node("n", 2, 2)).unwrap());
        assert!(roll.enter_node(now + Duration::from_secs(15), "g", &node("n", 2, 2)).unwrap());
        assert!(!roll.remove_own("g", "n", 3), "only the holder removes its name");
        assert!(roll.remove_own("g", "n", 2));
    }

    #[test]
    fn watchers_hear_each_name_once_however_far_behind() {
        let (now, mut roll) = (Instant::now(), roll());
        assert!(roll.changes_since("g", 0).reset);
        roll.enter_node(now, "g", &node("a", 1, 1)).unwrap();
        let first = roll.changes_since("g", 0);
        assert!(first.reset && first.put.len() == 1);
        for port in 2..9u16 {
            roll.enter_node(now, "g", &node("b", u64::from(port), 2)).unwrap();
        }
        roll.remove_own("g", "a", 1);
        let then = roll.changes_since("g", first.revision);
        assert_eq!((then.reset, then.put.len(), then.gone), (false, 1, vec!["a".to_owned()]));
        roll.enter_node(now, "g", &node("a", 1, 1)).unwrap();
        let last = roll.changes_since("g", then.revision);
        assert_eq!((last.put.len(), last.gone.len()), (1, 0));
        assert_eq!(
            roll.changes_since("g", last.revision),
            MemberChanges { revision: last.revision, ..MemberChanges::default() }
        );
        assert_eq!(roll.remove_expired(now + Duration::from_secs(15)).len(), 2);
        assert_eq!(roll.changes_since("g", last.revision).gone.len(), 2);
    }

    #[test]
    fn those_gone_are_not_remembered_for_ever() {
        let (now, mut roll) = (Instant::now(), LeaseTable::new(Duration::from_secs(15), TableLimits::default()));
        roll.enter_node(now, "g", &node("stays", 1, 1)).unwrap();
        let early = roll.changes_since("g", 0).revision;
        for i in 0..3 * MAX_GONE {
            let name = format!("n{i}");
            roll.enter_node(now, "g", &node(&name, 1, 1)).unwrap();
            roll.remove_own("g", &name, 1);
        }
        let group = &roll.groups["g"];
        assert!(group.gone.len() <= MAX_GONE && group.order.len() <= MAX_GONE + 1);
        let late = roll.changes_since("g", early);
        assert!(late.reset && late.put.len() == 1, "a watcher too far behind gets the whole list");
    }

    #[test]
    fn limits_hold() {
        let (now, mut roll) = (Instant::now(), roll());
        for name in ["a", "b", "c"] {
            roll.enter_node(now, "g", &node(name, 1, 1)).unwrap();
        }
        assert!(roll.enter_node(now, "g", &node("d", 1, 1)).is_err());
        assert!(roll.enter_node(now, "g", &node("a", 1, 1)).is_ok());
        assert!(roll.enter_node(now, "g", &node("", 1, 1)).is_err());
        assert!(roll.enter_node(now, "g", &node("a\n", 1, 1)).is_err());
        assert!(roll.enter_node(now, &"g".repeat(300), &node("a", 1, 1)).is_err());
        assert!(roll.enter_node(now, "g", &Member { addresses: Vec::new(), ..node("a", 1, 1) }).is_err());
    }
}
