//! A process's member list, derived from the registry. An absent node keeps the place for a while, and an empty registry is not
//! believed at once. No clock and no thread: the time is passed in.

use spurline_types::Member;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long absent nodes keep places.
#[derive(Debug, Clone, Copy)]
pub struct HoldTimes {
    /// For a node that left the registry alone: longer than a restart, so that no block moves.
    pub single: Duration,
    /// For nodes that left together (at least half of all), and for a node that still answers readers: a registry that lost its
    /// list is more likely than the loss of the nodes.
    pub joint: Duration,
}

impl Default for HoldTimes {
    fn default() -> Self {
        HoldTimes { single: Duration::from_secs(60), joint: Duration::from_secs(300) }
    }
}

/// Returns longer ago than this are forgotten.
const RETURN_MEMORY: Duration = Duration::from_secs(600);
/// The hold time of an unstable node doubles with every return, this many times at most.
const MAX_HOLD_DOUBLINGS: u32 = 4;

#[derive(Debug)]
struct MemberEntry {
    member: Arc<Member>,
    /// Since when the node is present or absent.
    changed_at: Instant,
    /// When the place expires; `None` while the node is present.
    away_until: Option<Instant>,
}

/// A member with the status.
#[derive(Debug, Clone)]
pub struct MemberStatus {
    pub member: Arc<Member>,
    /// Whether the registry lists the member; otherwise only the place is kept.
    pub present: bool,
    /// Since when that is so.
    pub since: Instant,
}

/// The member list of a process.
#[derive(Debug, Default)]
pub struct MemberView {
    holds: HoldTimes,
    places: BTreeMap<String, MemberEntry>,
    /// How often a node returned or expired, and the last time.
    returns: HashMap<String, (u32, Instant)>,
}

impl MemberView {
    /// An empty list.
    pub fn new(holds: HoldTimes) -> Self {
        MemberView { holds, ..MemberView::default() }
    }

    /// Applies the registry's list; returns whether the members changed. Of two entries with the same name the first counts.
    pub fn apply_members(&mut self, now: Instant, members: &[Arc<Member>]) -> bool {
        // Registries deliver lists sorted by name: a sort and a merge cost less than a look-up per name.
        let mut said: Vec<&Arc<Member>> = members.iter().collect();
        said.sort_by(|a, b| a.name.cmp(&b.name));
        said.dedup_by(|second, first| second.name == first.name);
        let mut said = said.into_iter().peekable();
        let mut new = Vec::new();
        let there: Vec<Option<&Arc<Member>>> = self
            .places
            .keys()
            .map(|name| {
                while let Some(member) = said.next_if(|member| member.name < *name) {
                    new.push(member);
                }
                said.next_if(|member| member.name == *name)
            })
            .collect();
        new.extend(said);
        let away = there.iter().filter(|member| member.is_none()).count();
        let forgotten = 2 * away >= self.places.len();
        let mut changed = false;
        for ((name, place), member) in self.places.iter_mut().zip(there) {
            match member {
                Some(member) => {
                    // Most often the same `Arc`: then nothing is compared.
                    if !Arc::ptr_eq(member, &place.member) {
                        changed |= *member != place.member;
                        place.member = Arc::clone(member);
                    }
                    if place.away_until.take().is_some() {
                        place.changed_at = now;
                        count_return(&mut self.returns, name, now);
                    }
                }
                None if place.away_until.is_none() => {
                    let one = self.returns.get(name).map_or(self.holds.single, |(count, last)| {
                        let doublings = if now.duration_since(*last) > RETURN_MEMORY {
                            0
                        } else {
                            (*count).min(MAX_HOLD_DOUBLINGS)
                        };
                        self.holds.single * 2u32.pow(doublings)
                    });
                    place.away_until = Some(now + one);
                    place.changed_at = now;
                }
                None => {}
            }
            if let Some(until) = &mut place.away_until
                && forgotten
            {
                *until = (*until).max(place.changed_at + self.holds.joint);
            }
        }
        for member in new {
            changed = true;
            let place = MemberEntry { member: Arc::clone(member), changed_at: now, away_until: None };
            self.places.insert(member.name.clone(), place);
        }
        changed
    }

    /// Expires places whose time is over, unless `answers` reports that the node answers readers; never expires the last members.
    /// Returns whether the members changed.
    pub fn expire_absent(&mut self, now: Instant, answers: &dyn Fn(&str) -> bool) -> bool {
        self.returns.retain(|_, (_, last)| now.duration_since(*last) <= RETURN_MEMORY);
        let many = self.holds.joint;
        let gone: Vec<String> = self
            .places
            .iter()
            .filter(|(name, place)| {
                place.away_until.is_some_and(|until| now >= until)
                    && (now.duration_since(place.changed_at) >= many || !answers(name))
            })
            .map(|(name, _)| name.clone())
            .collect();
        if gone.is_empty() || gone.len() == self.places.len() {
            return false;
        }
        for name in &gone {
            self.places.remove(name);
            // After a return, the next absence gets more time.
            count_return(&mut self.returns, name, now);
        }
        true
    }

    /// The members, by name.
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.places.values().map(|place| Arc::clone(&place.member)).collect()
    }

    /// The members, each with the status.
    pub fn member_statuses(&self) -> Vec<MemberStatus> {
        self.places
            .values()
            .map(|p| MemberStatus { member: p.member.clone(), present: p.away_until.is_none(), since: p.changed_at })
            .collect()
    }

    /// The number of members, and the number of absent members.
    pub fn count_members(&self) -> (usize, usize) {
        (self.places.len(), self.places.values().filter(|place| place.away_until.is_some()).count())
    }
}

fn count_return(returns: &mut HashMap<String, (u32, Instant)>, name: &str, now: Instant) {
    let (count, last) = returns.entry(name.to_owned()).or_insert((0, now));
    *count = if now.duration_since(*last) > RETURN_MEMORY { 1 } else { *count + 1 };
    *last = now;
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDS: HoldTimes = HoldTimes { single: Duration::from_secs(60), joint: Duration::from_secs(300) };
    const NONE_ANSWERS: &dyn Fn(&str) -> bool = &|_| false;

    fn nodes(names: &[&str]) -> Vec<Arc<Member>> {
        names
            .iter()
            .map(|name| Arc::new(Member { name: (*name).into(), ..Member::from_address("10.0.0.1:1", 100) }))
            .collect()
    }

    fn names(view: &MemberView) -> String {
        view.members().iter().map(|member| member.name.as_str()).collect()
    }

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn who_leaves_keeps_its_place_for_the_hold() {
        let start = Instant::now();
        let mut view = MemberView::new(HOLDS);
        assert!(view.apply_members(start, &nodes(&["a", "b", "c"])));
        assert!(!view.apply_members(start, &nodes(&["c", "b", "a"])), "order means nothing");
        assert!(!view.apply_members(at(start, 10), &nodes(&["a", "b"])), "c keeps its blocks for now");
        assert_eq!((names(&view).as_str(), view.count_members()), ("abc", (3, 1)));
        assert!(!view.expire_absent(at(start, 69), NONE_ANSWERS));
        assert!(view.expire_absent(at(start, 70), NONE_ANSWERS));
        assert_eq!(names(&view), "ab");
    }

    #[test]
    fn who_still_answers_stays_longer_but_not_for_ever() {
        let start = Instant::now();
        let mut view = MemberView::new(HOLDS);
        view.apply_members(start, &nodes(&["a", "b", "c"]));
        view.apply_members(start, &nodes(&["a", "b"]));
        assert!(!view.expire_absent(at(start, 100), &|name| name == "c"));
        assert!(view.expire_absent(at(start, 300), &|name| name == "c"));
    }

    #[test]
    fn a_registry_that_forgot_everybody_is_not_believed() {
        let start = Instant::now();
        let mut view = MemberView::new(HOLDS);
        view.apply_members(start, &nodes(&["a", "b", "c"]));
        assert!(!view.apply_members(start, &[]));
        assert!(!view.expire_absent(at(start, 299), NONE_ANSWERS));
        // They return one after the other, as their leases are renewed.
        assert!(!view.apply_members(at(start, 299), &nodes(&["b"])));
        assert!(view.expire_absent(at(start, 300), NONE_ANSWERS), "two have not come back");
        assert_eq!(names(&view), "b");
        // The last one stays, whatever the registry lists.
        assert!(!view.apply_members(at(start, 301), &[]));
        assert!(!view.expire_absent(at(start, 9999), NONE_ANSWERS));
        assert_eq!(names(&view), "b");
    }

    #[test]
    fn a_node_that_comes_and_goes_moves_no_block() {
        let start = Instant::now();
        let mut view = MemberView::new(HOLDS);
        view.apply_members(start, &nodes(&["a", "b", "c"]));
        let mut changes = 0;
        for second in 0..1200 {
            let now = at(start, second);
            let there: &[&str] = if second % 90 < 15 { &["a", "b", "c"] } else { &["a", "b"] };
            changes += u32::from(view.apply_members(now, &nodes(there)));
            changes += u32::from(view.expire_absent(now, NONE_ANSWERS));
        }
        // Each absence lasts 75 s: the first hold is too short, later ones are long enough.
        assert!(changes <= 4, "{changes} changes of the members in 20 minutes");
    }

    #[test]
    fn what_a_member_says_of_itself_counts_at_once() {
        let start = Instant::now();
        let mut view = MemberView::new(HOLDS);
        view.apply_members(start, &nodes(&["a", "b"]));
        let mut other = nodes(&["a", "b"]);
        Arc::make_mut(&mut other[1]).weight = 0;
        assert!(view.apply_members(start, &other));
        assert_eq!(view.members()[1].weight, 0);
    }

    proptest::proptest! {
        #[test]
        fn never_empty_and_never_without_the_present(
            steps in proptest::collection::vec((0u8..32, 0u64..100), 1..60),
        ) {
            let start = Instant::now();
            let (mut now, mut view) = (start, MemberView::new(HOLDS));
            let all = ["a", "b", "c", "d", "e"];
            view.apply_members(now, &nodes(&all));
            for (mask, seconds) in steps {
                now += Duration::from_secs(seconds);
                let there: Vec<&str> = (0..5).filter(|i| mask & (1 << i) != 0).map(|i| all[i]).collect();
                view.apply_members(now, &nodes(&there));
                view.expire_absent(now, NONE_ANSWERS);
                let members = names(&view);
                proptest::prop_assert!(!members.is_empty());
                proptest::prop_assert!(there.iter().all(|name| members.contains(name)));
            }
        }
    }
}
