//! The coordinator's list of nodes: who is there by which lease, and what changed since when. No clock, no thread and
//! no socket: the time is passed in.

use crate::{takes_over, two_of_one_name};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// What a list takes at most, so that no caller makes it grow without end.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Groups.
    pub groups: usize,
    /// Nodes of one group.
    pub nodes: usize,
    /// Bytes of a name, a zone or an address.
    pub word: usize,
    /// Addresses of a node.
    pub addresses: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { groups: 1024, nodes: 100_000, word: 255, addresses: 32 }
    }
}

/// Nodes that are gone are remembered for watchers that lag behind, this many; who lags further starts again.
const GONE_KEPT: usize = 4096;

#[derive(Debug)]
struct Held {
    member: Member,
    until: Instant,
    revision: u64,
}

#[derive(Debug, Default)]
struct Group {
    nodes: BTreeMap<String, Held>,
    gone: HashMap<String, u64>,
    /// The last change of each name, oldest first.
    order: BTreeMap<u64, String>,
    revision: u64,
    /// Changes up to here may be forgotten.
    floor: u64,
}

/// What changed since a revision.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Everything known before is to be forgotten.
    pub reset: bool,
    /// New and changed nodes.
    pub put: Vec<Member>,
    /// Names that are gone.
    pub gone: Vec<String>,
    /// The revision after these.
    pub revision: u64,
}

/// The nodes of all groups.
#[derive(Debug)]
pub struct Roll {
    lease: Duration,
    limits: Limits,
    groups: BTreeMap<String, Group>,
}

impl Group {
    fn touch(&mut self, name: &str, before: Option<u64>) -> u64 {
        if let Some(before) = before {
            self.order.remove(&before);
        }
        self.revision += 1;
        self.order.insert(self.revision, name.to_owned());
        self.revision
    }

    fn remove(&mut self, name: &str) {
        let Some(held) = self.nodes.remove(name) else { return };
        let revision = self.touch(name, Some(held.revision));
        self.gone.insert(name.to_owned(), revision);
        if self.gone.len() > GONE_KEPT {
            self.floor = self.revision;
            for (_, revision) in self.gone.drain() {
                self.order.remove(&revision);
            }
        }
    }
}

impl Roll {
    /// An empty list whose entries last for `lease` each time.
    pub fn new(lease: Duration, limits: Limits) -> Self {
        Roll { lease, limits, groups: BTreeMap::new() }
    }

    /// How long an entry lasts.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    fn check(&self, group: &str, member: &Member) -> Result<()> {
        let wrong = |what: String| Err(Error::new(ErrorKind::Unsupported, what));
        let words = [group, &member.name].into_iter().chain(member.addresses.iter().map(String::as_str));
        for word in words {
            if word.is_empty() || word.len() > self.limits.word || word.chars().any(char::is_control) {
                return wrong(format!("'{}' is no name or address", word.escape_debug()));
            }
        }
        if member.zone.len() > self.limits.word || member.zone.chars().any(char::is_control) {
            return wrong(format!("the zone '{}' is too long", member.zone.escape_debug()));
        }
        if member.addresses.is_empty() || member.addresses.len() > self.limits.addresses {
            return wrong(format!("a node has 1 to {} addresses", self.limits.addresses));
        }
        match self.groups.get(group) {
            None if self.groups.len() >= self.limits.groups => {
                wrong(format!("{} groups are enough", self.limits.groups))
            }
            Some(known) if known.nodes.len() >= self.limits.nodes && !known.nodes.contains_key(&member.name) => {
                wrong(format!("group {group} has {} nodes already", self.limits.nodes))
            }
            _ => Ok(()),
        }
    }

    /// Enters a node or renews its lease; answers whether anything but the lease changed.
    ///
    /// # Errors
    /// `Invalid` when another process holds the name, `Unsupported` when it is beyond the limits.
    pub fn announce(&mut self, now: Instant, group: &str, member: &Member) -> Result<bool> {
        self.check(group, member)?;
        let until = now + self.lease;
        let group_name = group;
        let group = self.groups.entry(group.to_owned()).or_default();
        let before = match group.nodes.get_mut(&member.name) {
            Some(held) if held.until > now && !takes_over(&held.member, member) => {
                return Err(Error::new(ErrorKind::Invalid, two_of_one_name(group_name, &held.member, member)));
            }
            Some(held) if held.member == *member => {
                held.until = until;
                return Ok(false);
            }
            Some(held) => Some(held.revision),
            None => group.gone.remove(&member.name),
        };
        let revision = group.touch(&member.name, before);
        group.nodes.insert(member.name.clone(), Held { member: member.clone(), until, revision });
        Ok(true)
    }

    /// Takes a node off; answers whether it was there as this process.
    pub fn leave(&mut self, group: &str, name: &str, instance: u64) -> bool {
        let Some(group) = self.groups.get_mut(group) else { return false };
        let here = group.nodes.get(name).is_some_and(|held| held.member.instance == instance);
        if here {
            group.remove(name);
        }
        here
    }

    /// Takes off whose lease ran out; answers them with their group.
    pub fn sweep(&mut self, now: Instant) -> Vec<(String, Member)> {
        let mut swept = Vec::new();
        for (name, group) in &mut self.groups {
            let over: Vec<Member> =
                group.nodes.values().filter(|held| held.until <= now).map(|held| held.member.clone()).collect();
            for member in over {
                group.remove(&member.name);
                swept.push((name.clone(), member));
            }
        }
        swept
    }

    /// What changed in a group after `since`; 0 asks for everything.
    pub fn changes(&self, group: &str, since: u64) -> Changes {
        let Some(group) = self.groups.get(group) else { return Changes { reset: since == 0, ..Changes::default() } };
        if since == 0 || since < group.floor {
            let put = group.nodes.values().map(|held| held.member.clone()).collect();
            return Changes { reset: true, put, gone: Vec::new(), revision: group.revision };
        }
        let mut changes = Changes { revision: group.revision, ..Changes::default() };
        for name in group.order.range(since + 1..).map(|(_, name)| name) {
            match group.nodes.get(name) {
                Some(held) => changes.put.push(held.member.clone()),
                None => changes.gone.push(name.clone()),
            }
        }
        changes
    }

    /// All nodes by group.
    pub fn all(&self) -> BTreeMap<String, Vec<Member>> {
        let members = |group: &Group| group.nodes.values().map(|held| held.member.clone()).collect();
        self.groups.iter().map(|(name, group)| (name.clone(), members(group))).collect()
    }

    /// Nodes of all groups.
    pub fn len(&self) -> usize {
        self.groups.values().map(|group| group.nodes.len()).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, instance: u64, port: u16) -> Member {
        Member { name: name.into(), instance, ..Member::at(&format!("10.0.0.1:{port}"), 100) }
    }

    fn roll() -> Roll {
        Roll::new(Duration::from_secs(15), Limits { nodes: 3, ..Limits::default() })
    }

    #[test]
    fn a_name_belongs_to_one_process_until_its_lease_is_over() {
        let (now, mut roll) = (Instant::now(), roll());
        assert!(roll.announce(now, "g", &node("n", 1, 1)).unwrap());
        assert!(!roll.announce(now, "g", &node("n", 1, 1)).unwrap());
        let refused = roll.announce(now, "g", &node("n", 2, 2)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        for word in ["'n'", "10.0.0.1:1;", "10.0.0.1:2", "--name"] {
            assert!(refused.message().contains(word), "{word}: {refused}");
        }
        // The same place after a restart: only one process can listen there.
        assert!(roll.announce(now, "g", &node("n", 3, 1)).unwrap());
        // The other one once the lease is over, and in another group at once.
        assert!(roll.announce(now, "h", &node("n", 2, 2)).unwrap());
        assert!(roll.announce(now + Duration::from_secs(15), "g", &node("n", 2, 2)).unwrap());
        assert!(!roll.leave("g", "n", 3), "only who holds a name gives it back");
        assert!(roll.leave("g", "n", 2));
    }

    #[test]
    fn watchers_hear_each_name_once_however_far_behind() {
        let (now, mut roll) = (Instant::now(), roll());
        assert!(roll.changes("g", 0).reset);
        roll.announce(now, "g", &node("a", 1, 1)).unwrap();
        let first = roll.changes("g", 0);
        assert!(first.reset && first.put.len() == 1);
        for port in 2..9u16 {
            roll.announce(now, "g", &node("b", u64::from(port), 2)).unwrap();
        }
        roll.leave("g", "a", 1);
        let then = roll.changes("g", first.revision);
        assert_eq!((then.reset, then.put.len(), then.gone), (false, 1, vec!["a".to_owned()]));
        roll.announce(now, "g", &node("a", 1, 1)).unwrap();
        let last = roll.changes("g", then.revision);
        assert_eq!((last.put.len(), last.gone.len()), (1, 0));
        assert_eq!(roll.changes("g", last.revision), Changes { revision: last.revision, ..Changes::default() });
        assert_eq!(roll.sweep(now + Duration::from_secs(15)).len(), 2);
        assert_eq!(roll.changes("g", last.revision).gone.len(), 2);
    }

    #[test]
    fn those_gone_are_not_remembered_for_ever() {
        let (now, mut roll) = (Instant::now(), Roll::new(Duration::from_secs(15), Limits::default()));
        roll.announce(now, "g", &node("stays", 1, 1)).unwrap();
        let early = roll.changes("g", 0).revision;
        for i in 0..3 * GONE_KEPT {
            let name = format!("n{i}");
            roll.announce(now, "g", &node(&name, 1, 1)).unwrap();
            roll.leave("g", &name, 1);
        }
        let group = &roll.groups["g"];
        assert!(group.gone.len() <= GONE_KEPT && group.order.len() <= GONE_KEPT + 1);
        let late = roll.changes("g", early);
        assert!(late.reset && late.put.len() == 1, "who lags too far behind starts again");
    }

    #[test]
    fn limits_hold() {
        let (now, mut roll) = (Instant::now(), roll());
        for name in ["a", "b", "c"] {
            roll.announce(now, "g", &node(name, 1, 1)).unwrap();
        }
        assert!(roll.announce(now, "g", &node("d", 1, 1)).is_err());
        assert!(roll.announce(now, "g", &node("a", 1, 1)).is_ok());
        assert!(roll.announce(now, "g", &node("", 1, 1)).is_err());
        assert!(roll.announce(now, "g", &node("a\n", 1, 1)).is_err());
        assert!(roll.announce(now, &"g".repeat(300), &node("a", 1, 1)).is_err());
        assert!(roll.announce(now, "g", &Member { addresses: Vec::new(), ..node("a", 1, 1) }).is_err());
    }
}
