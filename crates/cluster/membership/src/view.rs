//! Which members a process goes by, out of what its registry says: who is away keeps its place for a while, and a
//! registry that forgot everybody is not believed at once. No clock and no thread: the time is passed in.

use spurline_types::Member;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long places are kept.
#[derive(Debug, Clone, Copy)]
pub struct Holds {
    /// For a node that left the registry alone: a restart takes less, and moves no block.
    pub one: Duration,
    /// For nodes that left together, half of all or more, and for one that still answers its readers: then rather the
    /// registry has forgotten than the nodes are gone.
    pub many: Duration,
}

impl Default for Holds {
    fn default() -> Self {
        Holds { one: Duration::from_secs(60), many: Duration::from_secs(300) }
    }
}

/// A node whose last return is longer ago than this has a clean slate.
const FORGIVEN: Duration = Duration::from_secs(600);
/// The hold of a node that comes and goes doubles with every return, this often at most.
const DOUBLINGS: u32 = 4;

#[derive(Debug)]
struct Place {
    member: Arc<Member>,
    /// Since when it is there, or away.
    since: Instant,
    /// Until when its place is kept; `None` while it is there.
    away_until: Option<Instant>,
}

/// A member as a view has it.
#[derive(Debug, Clone)]
pub struct Placed {
    /// The member.
    pub member: Arc<Member>,
    /// Whether the registry has it; else its place is only kept.
    pub there: bool,
    /// Since when that is so.
    pub since: Instant,
}

/// The members a process goes by.
#[derive(Debug, Default)]
pub struct View {
    holds: Holds,
    places: BTreeMap<String, Place>,
    /// How often a node came back or was given up, and when it did last.
    returns: HashMap<String, (u32, Instant)>,
}

impl View {
    /// An empty view.
    pub fn new(holds: Holds) -> Self {
        View { holds, ..View::default() }
    }

    /// Takes what the registry says now; answers whether the members to go by changed. Of two entries under one name
    /// the first counts.
    pub fn apply(&mut self, now: Instant, members: &[Arc<Member>]) -> bool {
        // Registries tell them by name: to sort that and to go along both lists is less than to look each name up.
        let mut said: Vec<&Arc<Member>> = members.iter().collect();
        said.sort_by(|a, b| a.name.cmp(&b.name));
        said.dedup_by(|second, first| second.name == first.name);
        let (mut said, mut new) = (said.into_iter().peekable(), Vec::new());
        let of_place = |name: &String| {
            while let Some(member) = said.next_if(|member| member.name < *name) {
                new.push(member);
            }
            said.next_if(|member| member.name == *name)
        };
        let there: Vec<Option<&Arc<Member>>> = self.places.keys().map(of_place).collect();
        new.extend(said);
        let away = there.iter().filter(|member| member.is_none()).count();
        let forgotten = 2 * away >= self.places.len();
        let mut changed = false;
        for ((name, place), member) in self.places.iter_mut().zip(there) {
            match member {
                Some(member) => {
                    // The very same, most often: then nothing is compared.
                    if !Arc::ptr_eq(member, &place.member) {
                        changed |= *member != place.member;
                        place.member = Arc::clone(member);
                    }
                    if place.away_until.take().is_some() {
                        place.since = now;
                        count(&mut self.returns, name, now);
                    }
                }
                None if place.away_until.is_none() => {
                    let one = self.returns.get(name).map_or(self.holds.one, |(count, last)| {
                        let doublings = if now.duration_since(*last) > FORGIVEN { 0 } else { (*count).min(DOUBLINGS) };
                        self.holds.one * 2u32.pow(doublings)
                    });
                    place.away_until = Some(now + one);
                    place.since = now;
                }
                None => {}
            }
            if let Some(until) = &mut place.away_until
                && forgotten
            {
                *until = (*until).max(place.since + self.holds.many);
            }
        }
        for member in new {
            changed = true;
            let place = Place { member: Arc::clone(member), since: now, away_until: None };
            self.places.insert(member.name.clone(), place);
        }
        changed
    }

    /// Gives up the places whose time is over, unless `answers` says of a node that it answers its readers; the last
    /// members are never given up. Answers whether the members to go by changed.
    pub fn tick(&mut self, now: Instant, answers: &dyn Fn(&str) -> bool) -> bool {
        self.returns.retain(|_, (_, last)| now.duration_since(*last) <= FORGIVEN);
        let many = self.holds.many;
        let over = |name: &str, place: &Place| {
            place.away_until.is_some_and(|until| now >= until)
                && (now.duration_since(place.since) >= many || !answers(name))
        };
        let gone: Vec<String> =
            self.places.iter().filter(|(name, place)| over(name, place)).map(|(name, _)| name.clone()).collect();
        if gone.is_empty() || gone.len() == self.places.len() {
            return false;
        }
        for name in &gone {
            self.places.remove(name);
            // Should it come back, its next absence is given more time.
            count(&mut self.returns, name, now);
        }
        true
    }

    /// The members to go by, by name.
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.places.values().map(|place| Arc::clone(&place.member)).collect()
    }

    /// The same, with what is known of each.
    pub fn placed(&self) -> Vec<Placed> {
        let placed = |p: &Place| Placed { member: p.member.clone(), there: p.away_until.is_none(), since: p.since };
        self.places.values().map(placed).collect()
    }

    /// How many there are, and how many of them are away with their place kept.
    pub fn count(&self) -> (usize, usize) {
        (self.places.len(), self.places.values().filter(|place| place.away_until.is_some()).count())
    }
}

fn count(returns: &mut HashMap<String, (u32, Instant)>, name: &str, now: Instant) {
    let (count, last) = returns.entry(name.to_owned()).or_insert((0, now));
    *count = if now.duration_since(*last) > FORGIVEN { 1 } else { *count + 1 };
    *last = now;
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDS: Holds = Holds { one: Duration::from_secs(60), many: Duration::from_secs(300) };
    const NOBODY: &dyn Fn(&str) -> bool = &|_| false;

    fn nodes(names: &[&str]) -> Vec<Arc<Member>> {
        names.iter().map(|name| Arc::new(Member { name: (*name).into(), ..Member::at("10.0.0.1:1", 100) })).collect()
    }

    fn names(view: &View) -> String {
        view.members().iter().map(|member| member.name.as_str()).collect()
    }

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn who_leaves_keeps_its_place_for_the_hold() {
        let start = Instant::now();
        let mut view = View::new(HOLDS);
        assert!(view.apply(start, &nodes(&["a", "b", "c"])));
        assert!(!view.apply(start, &nodes(&["c", "b", "a"])), "order means nothing");
        assert!(!view.apply(at(start, 10), &nodes(&["a", "b"])), "nobody else takes c's blocks yet");
        assert_eq!((names(&view).as_str(), view.count()), ("abc", (3, 1)));
        assert!(!view.tick(at(start, 69), NOBODY));
        assert!(view.tick(at(start, 70), NOBODY));
        assert_eq!(names(&view), "ab");
    }

    #[test]
    fn who_still_answers_stays_longer_but_not_for_ever() {
        let start = Instant::now();
        let mut view = View::new(HOLDS);
        view.apply(start, &nodes(&["a", "b", "c"]));
        view.apply(start, &nodes(&["a", "b"]));
        assert!(!view.tick(at(start, 100), &|name| name == "c"));
        assert!(view.tick(at(start, 300), &|name| name == "c"));
    }

    #[test]
    fn a_registry_that_forgot_everybody_is_not_believed() {
        let start = Instant::now();
        let mut view = View::new(HOLDS);
        view.apply(start, &nodes(&["a", "b", "c"]));
        assert!(!view.apply(start, &[]));
        assert!(!view.tick(at(start, 299), NOBODY));
        // They come back one after the other, as their leases are renewed.
        assert!(!view.apply(at(start, 299), &nodes(&["b"])));
        assert!(view.tick(at(start, 300), NOBODY), "two have not come back");
        assert_eq!(names(&view), "b");
        // The last one stays whatever the registry says.
        assert!(!view.apply(at(start, 301), &[]));
        assert!(!view.tick(at(start, 9999), NOBODY));
        assert_eq!(names(&view), "b");
    }

    #[test]
    fn a_node_that_comes_and_goes_moves_no_block() {
        let start = Instant::now();
        let mut view = View::new(HOLDS);
        view.apply(start, &nodes(&["a", "b", "c"]));
        let mut changes = 0;
        for second in 0..1200 {
            let now = at(start, second);
            let there: &[&str] = if second % 90 < 15 { &["a", "b", "c"] } else { &["a", "b"] };
            changes += u32::from(view.apply(now, &nodes(there)));
            changes += u32::from(view.tick(now, NOBODY));
        }
        // Away for 75 s each time: the first time its hold is too short, and then it is long enough.
        assert!(changes <= 4, "{changes} changes of the members in 20 minutes");
    }

    #[test]
    fn what_a_member_says_of_itself_counts_at_once() {
        let start = Instant::now();
        let mut view = View::new(HOLDS);
        view.apply(start, &nodes(&["a", "b"]));
        let mut other = nodes(&["a", "b"]);
        Arc::make_mut(&mut other[1]).weight = 0;
        assert!(view.apply(start, &other));
        assert_eq!(view.members()[1].weight, 0);
    }

    proptest::proptest! {
        #[test]
        fn never_empty_and_never_without_the_present(
            steps in proptest::collection::vec((0u8..32, 0u64..100), 1..60),
        ) {
            let start = Instant::now();
            let (mut now, mut view) = (start, View::new(HOLDS));
            let all = ["a", "b", "c", "d", "e"];
            view.apply(now, &nodes(&all));
            for (mask, seconds) in steps {
                now += Duration::from_secs(seconds);
                let there: Vec<&str> = (0..5).filter(|i| mask & (1 << i) != 0).map(|i| all[i]).collect();
                view.apply(now, &nodes(&there));
                view.tick(now, NOBODY);
                let members = names(&view);
                proptest::prop_assert!(!members.is_empty());
                proptest::prop_assert!(there.iter().all(|name| members.contains(name)));
            }
        }
    }
}
