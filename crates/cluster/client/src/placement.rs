//! Computes which nodes hold which blocks: weighted rendezvous hashing of (object, block), copies spread over
//! zones. Pure arithmetic without network, clock or randomness.

use spurline_types::{Member, ObjectId};
use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64;

/// Maximum nodes found by one lookup of holders; more are tried when all of these fail.
pub const FIRST_HOLDERS: usize = 8;
/// From this group size on, each thread caches the holders of recent blocks.
const REMEMBER_FROM: usize = 24;
/// Entries of that cache.
const REMEMBERED: usize = 64;

/// Number of this release's placement rule, increased when the same group would place blocks differently. Nodes and mounts of a
/// group must use the same rule, or they look for blocks in different places.
pub const PLACEMENT_RULE: u16 = 3;

/// A block to find, and its number of holders.
///
/// Each block is placed for itself, so that the blocks that a reader requests together lie on several nodes: hosts that read
/// one file at the same moment would all wait for the link of one node if consecutive blocks lay there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedBlock {
    key: u64,
    copies: u32,
}

impl WantedBlock {
    /// Block `index` of `object`, held by `copies` nodes.
    pub fn of_block(object: ObjectId, index: u32, copies: u32) -> WantedBlock {
        let folded = object.0 as u64 ^ ((object.0 >> 64) as u64).rotate_left(32);
        WantedBlock {
            key: mix_bits(folded ^ u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            copies: copies.max(1),
        }
    }
}

impl WantedBlock {
    /// The hash of the block, equal on all hosts.
    pub(crate) fn key(self) -> u64 {
        self.key
    }

    /// Number of nodes that hold it.
    pub(crate) fn holder_count(self) -> usize {
        self.copies as usize
    }

    /// The same block with another number of holders.
    pub(crate) fn with_copies(self, copies: u32) -> WantedBlock {
        WantedBlock { copies: copies.max(1), ..self }
    }
}

/// Number of holders for each file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyCounts {
    all: u32,
    /// Exceptions by path prefix, longest first.
    below: Vec<(Vec<u8>, u32)>,
}

impl Default for CopyCounts {
    fn default() -> Self {
        CopyCounts::new(1, [])
    }
}

impl CopyCounts {
    /// `all` by default, with exceptions at and below some paths.
    pub fn new(all: u32, below: impl IntoIterator<Item = (Vec<u8>, u32)>) -> CopyCounts {
        let mut below: Vec<(Vec<u8>, u32)> = below.into_iter().map(|(path, n)| (path, n.max(1))).collect();
        below.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        CopyCounts { all: all.max(1), below }
    }

    /// The number for the file at `path`.
    pub fn copies_of(&self, path: &[u8]) -> u32 {
        self.below.iter().find(|(folder, _)| is_at_or_below(path, folder)).map_or(self.all, |(_, copies)| *copies)
    }
}

fn is_at_or_below(path: &[u8], folder: &[u8]) -> bool {
    folder.is_empty() || path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Location of a reader.
#[derive(Debug, Clone, Default)]
pub struct ReaderLocation {
    /// Its zone; empty when unknown.
    pub zone: String,
    /// Chooses among equally near copies.
    pub seed: u64,
}

/// Nodes of one weight in one zone: a larger hash wins, so no logarithm is needed.
struct WeightClass {
    weight: u32,
    zone: u32,
    /// Hashes of the names.
    hashes: Vec<u64>,
    indices: Vec<u32>,
}

/// The nodes of a group, prepared for the choice among them.
pub struct NodePlacement {
    classes: Vec<WeightClass>,
    zones: Vec<String>,
    count: usize,
    /// Unique in this process, so that cached holders of another group do not match.
    number: u64,
}

/// A node with its score.
#[derive(Clone, Copy)]
struct ScoredNode {
    score: f64,
    index: u32,
    zone: u32,
}

struct RememberedHolders {
    number: u64,
    wanted: WantedBlock,
    nodes: [u32; FIRST_HOLDERS],
    len: usize,
}

thread_local! {
    static FOUND: RefCell<Vec<ScoredNode>> = const { RefCell::new(Vec::new()) };
    static BEFORE: RefCell<Vec<Option<RememberedHolders>>> = const { RefCell::new(Vec::new()) };
}

/// Mixes 64 bits so that each output bit depends on all input bits (finaliser of MurmurHash3).
fn mix_bits(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// With h uniform in (0, 1), -w / ln(h) ranks each node first in proportion to its weight. A node that joins or
/// leaves moves no block between two others.
fn score_hash(hash: u64, weight: u32) -> f64 {
    // 53 bits, moved off both ends of the interval.
    let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -f64::from(weight) / uniform.ln()
}

impl NodePlacement {
    /// Over `members`; results are indices into it.
    pub fn new<M: Borrow<Member>>(members: &[M]) -> NodePlacement {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let mut zones: Vec<String> = Vec::new();
        let mut classes: BTreeMap<(u32, u32), WeightClass> = BTreeMap::new();
        for (index, member) in members.iter().map(Borrow::borrow).enumerate() {
            let zone = zones.iter().position(|zone| *zone == member.zone).unwrap_or_else(|| {
                zones.push(member.zone.clone());
                zones.len() - 1
            }) as u32;
            let weight = member.weight;
            let class = classes.entry((zone, weight)).or_insert_with(|| WeightClass {
                weight,
                zone,
                hashes: Vec::new(),
                indices: Vec::new(),
            });
            class.hashes.push(xxh3_64(member.name.as_bytes()));
            class.indices.push(index as u32);
        }
        let classes = classes.into_values().collect();
        let count = members.len();
        NodePlacement { classes, zones, count, number: NUMBER.fetch_add(1, Ordering::Relaxed) }
    }

    /// Writes the nodes for `wanted` to `out`, best first, at most `most` (cleared first, capacity reused). Order:
    /// owner, other holders, their successors; nodes of weight 0 come last.
    pub fn find_holders(&self, wanted: WantedBlock, most: usize, out: &mut Vec<u32>) {
        out.clear();
        if self.count <= 1 {
            out.extend(0..self.count as u32);
            return;
        }
        if self.count < REMEMBER_FROM || most > FIRST_HOLDERS {
            return self.compute_holders(wanted, most, out);
        }
        BEFORE.with_borrow_mut(|before| {
            before.resize_with(REMEMBERED, || None);
            let slot = &mut before[(wanted.key >> 32) as usize % REMEMBERED];
            if let Some(known) = slot.as_ref().filter(|r| r.number == self.number && r.wanted == wanted) {
                return out.extend(known.nodes[..known.len].iter().take(most));
            }
            self.compute_holders(wanted, FIRST_HOLDERS, out);
            let mut nodes = [0; FIRST_HOLDERS];
            nodes[..out.len()].copy_from_slice(out);
            *slot = Some(RememberedHolders { number: self.number, wanted, nodes, len: out.len() });
            out.truncate(most);
        });
    }

    /// Moves holders in the reader's zone to the front. Among equals the reader's seed decides, so that readers share
    /// the copies.
    pub fn near_first<M: Borrow<Member>>(
        &self,
        wanted: WantedBlock,
        members: &[M],
        from: &ReaderLocation,
        out: &mut [u32],
    ) {
        let copies = (wanted.copies as usize).min(out.len());
        let held = &mut out[..copies];
        if held.len() < 2 {
            return;
        }
        let near = |index: &u32| !from.zone.is_empty() && members[*index as usize].borrow().zone == from.zone;
        let of_weight = |index: &u32| members[*index as usize].borrow().weight > 0;
        // Stable and short: a few copies.
        held.sort_by_key(|index| (!of_weight(index), !near(index)));
        let equal =
            held.iter().take_while(|i| (near(i), of_weight(i)) == (near(&held[0]), of_weight(&held[0]))).count();
        held[..equal].rotate_left((mix_bits(from.seed ^ wanted.key) % equal as u64) as usize);
    }

    /// The best node of weight 0.
    pub fn drained_holder(&self, wanted: WantedBlock) -> Option<u32> {
        FOUND.with_borrow_mut(|found| {
            found.clear();
            for class in self.classes.iter().filter(|class| class.weight == 0) {
                class.append_best(wanted.key, 1, found);
            }
            found.iter().max_by(|a, b| a.score.total_cmp(&b.score)).map(|found| found.index)
        })
    }

    fn compute_holders(&self, wanted: WantedBlock, most: usize, out: &mut Vec<u32>) {
        let most = most.clamp(1, self.count);
        FOUND.with_borrow_mut(|found| {
            found.clear();
            for class in self.classes.iter().filter(|class| class.weight > 0) {
                class.append_best(wanted.key, most, found);
            }
            found.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.index.cmp(&b.index)));
            let positive = found.len();
            if positive < most {
                for class in self.classes.iter().filter(|class| class.weight == 0) {
                    class.append_best(wanted.key, most - positive, found);
                }
                found[positive..].sort_by(|a, b| b.score.total_cmp(&a.score).then(a.index.cmp(&b.index)));
            }
            if wanted.copies > 1 && self.zones.len() > 1 {
                spread_zones(&mut found[..positive], wanted.copies as usize);
            }
            out.extend(found.iter().take(most).map(|found| found.index));
        });
    }
}

/// Reorders so that the first `copies` nodes lie in different zones as far as possible: losing a zone then loses one
/// copy, and more readers have a near one.
fn spread_zones(found: &mut [ScoredNode], copies: usize) {
    for place in 1..copies.min(found.len()) {
        let (chosen, rest) = found.split_at(place);
        let other = rest.iter().position(|f| chosen.iter().all(|c| c.zone != f.zone));
        if let Some(at) = other {
            found[place..=place + at].rotate_right(1);
        }
    }
}

impl WeightClass {
    /// Appends the best `most` nodes of the class.
    fn append_best(&self, key: u64, most: usize, found: &mut Vec<ScoredNode>) {
        let start = found.len();
        let score_of = |hash| if self.weight == 0 { hash as f64 } else { score_hash(hash, self.weight) };
        // The worst hash kept so far; lower ones are skipped.
        let mut bar = 0;
        let mut kept: [(u64, u32); FIRST_HOLDERS] = [(0, 0); FIRST_HOLDERS];
        if most > FIRST_HOLDERS || self.hashes.len() <= most {
            let all = self.hashes.iter().zip(&self.indices);
            found.extend(all.map(|(name, index)| ScoredNode {
                score: score_of(mix_bits(name ^ key)),
                index: *index,
                zone: self.zone,
            }));
            if self.hashes.len() > most {
                found[start..].sort_by(|a, b| b.score.total_cmp(&a.score));
                found.truncate(start + most);
            }
            return;
        }
        let mut len = 0;
        for (name, index) in self.hashes.iter().zip(&self.indices) {
            let hash = mix_bits(name ^ key);
            if len == most && hash <= bar {
                continue;
            }
            let at = kept[..len].iter().position(|(h, _)| *h < hash).unwrap_or(len);
            len = (len + 1).min(most);
            kept.copy_within(at..len - 1, at + 1);
            kept[at] = (hash, *index);
            bar = kept[len - 1].0;
        }
        found.extend(kept[..len].iter().map(|(hash, index)| ScoredNode {
            score: score_of(*hash),
            index: *index,
            zone: self.zone,
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};
    use std::time::Instant;

    fn members(n: usize) -> Vec<Member> {
        (0..n).map(|i| Member::from_address(&format!("10.0.{}.{}:7000", i >> 8, i & 255), 100)).collect()
    }

    fn holders(placement: &NodePlacement, object: u64, index: u32, copies: u32, most: usize) -> Vec<u32> {
        // Object ids are hashes.
        let object = ObjectId(u128::from(xxh3_64(&object.to_le_bytes())) << 64 | u128::from(object));
        let mut out = Vec::new();
        placement.find_holders(WantedBlock::of_block(object, index, copies), most, &mut out);
        out
    }

    fn first(placement: &NodePlacement, object: u64) -> u32 {
        holders(placement, object, 0, 1, 1)[0]
    }

    /// The share of blocks that `new` places elsewhere than `old`, and whether all of it moved to `to`.
    fn moved(old: &NodePlacement, new: &NodePlacement, objects: u64, to: impl Fn(u32) -> bool) -> (f64, bool) {
        let moved: Vec<u32> =
            (0..objects).filter_map(|o| Some(first(new, o)).filter(|n| first(old, o) != *n)).collect();
        (moved.len() as f64 / objects as f64, moved.iter().all(|n| to(*n)))
    }

    #[test]
    fn balanced_by_weight_and_files_spread() {
        let mut three = members(3);
        three[2].weight = 200;
        let placement = NodePlacement::new(&three);
        let mut count = [0; 3];
        (0..20_000).for_each(|object| count[first(&placement, object) as usize] += 1);
        for (got, share) in count.map(|n| f64::from(n) / 20_000.0).into_iter().zip([0.25, 0.25, 0.5]) {
            assert!((got - share).abs() < 0.02, "{got} of the blocks for a share of {share}");
        }
        let spread: HashSet<_> = (0..40).map(|block| holders(&placement, 5, block, 1, 1)).collect();
        assert_eq!(spread.len(), 3, "a large file spreads over all nodes");
    }

    #[test]
    fn joining_nodes_take_only_their_share_and_leaving_ones_leave_only_their_own() {
        for (n, more, objects) in [(3, 1, 30_000), (100, 1, 50_000), (10_000, 500, 1500)] {
            let all = members(n + more);
            let (old, new) = (NodePlacement::new(&all[..n]), NodePlacement::new(&all));
            let (share, all_to_it) = moved(&old, &new, objects, |to| to >= n as u32);
            let ideal = more as f64 / (n + more) as f64;
            println!("{n} nodes and {more} more: {share:.5} of the blocks move, the ideal is {ideal:.5}");
            assert!(all_to_it, "blocks move only to the new nodes");
            // Four standard deviations of a fair draw.
            assert!((share - ideal).abs() < 4.0 * (ideal / objects as f64).sqrt(), "{share} for {ideal}");
            let (back, _) = moved(&new, &old, objects, |_| true);
            assert!((back - share).abs() < f64::EPSILON, "what they took is what moves when they go");
        }
    }

    #[test]
    fn the_load_is_balanced_at_every_size() {
        for (n, objects) in [(3, 30_000u64), (100, 50_000), (10_000, 8000)] {
            let placement = NodePlacement::new(&members(n));
            let mut count: HashMap<u32, u64> = HashMap::new();
            (0..objects).for_each(|object| *count.entry(first(&placement, object)).or_default() += 1);
            let mean = objects as f64 / n as f64;
            let most = count.values().max().copied().unwrap_or(0) as f64;
            println!("{n} nodes: {mean:.1} blocks each on average, {most} at most");
            assert!(most < mean + 6.0 * mean.sqrt() + 3.0, "{most} on one of {n}, {mean} on average");
        }
    }

    #[test]
    fn the_first_few_are_those_of_the_whole_order() {
        let mut many = members(500);
        for (i, member) in many.iter_mut().enumerate() {
            member.weight = [0, 50, 100, 101][i % 4];
            member.zone = ["", "a", "b"][i % 3].into();
        }
        let placement = NodePlacement::new(&many);
        for object in 0..200 {
            let whole = holders(&placement, object, 0, 1, 500);
            assert_eq!(whole.iter().collect::<HashSet<_>>().len(), 500, "every node once");
            assert!(whole[375..].iter().all(|i| many[*i as usize].weight == 0), "weight 0 is the last resort");
            for most in [1, 3, FIRST_HOLDERS, 20] {
                assert_eq!(holders(&placement, object, 0, 1, most), whole[..most]);
                // Again, from the cache.
                assert_eq!(holders(&placement, object, 0, 1, most), whole[..most]);
            }
        }
    }

    #[test]
    fn weight_zero_drains() {
        let mut two = members(2);
        two[0].weight = 0;
        let placement = NodePlacement::new(&two);
        assert!((0..100).all(|o| holders(&placement, o, 0, 2, 2) == [1, 0]));
        let full = members(10);
        let mut drained = full.clone();
        drained[4].weight = 0;
        let (share, _) = moved(&NodePlacement::new(&full), &NodePlacement::new(&drained), 20_000, |to| to != 4);
        assert!((share - 0.1).abs() < 0.01, "{share} moved off one of ten");
    }

    #[test]
    fn copies_are_in_different_zones_and_the_near_one_is_asked() {
        let mut nodes = members(30);
        for (i, member) in nodes.iter_mut().enumerate() {
            member.zone = ["a", "b", "c"][i % 3].into();
        }
        let placement = NodePlacement::new(&nodes);
        let mut owners = [0u32; 3];
        for object in 0..3000 {
            let held = holders(&placement, object, 0, 3, FIRST_HOLDERS);
            let zones: HashSet<u32> = held[..3].iter().map(|i| i % 3).collect();
            assert_eq!(zones.len(), 3);
            assert_eq!(held[0], first(&placement, object), "the owner is the same for any number of copies");
            owners[held[0] as usize % 3] += 1;
            let wanted = WantedBlock::of_block(ObjectId(u128::from(object)), 0, 3);
            let mut near = held.clone();
            let from = ReaderLocation { zone: "b".into(), seed: 7 };
            placement.near_first(wanted, &nodes, &from, &mut near);
            assert_eq!(near[0] % 3, 1, "the copy in the reader's zone comes first");
            assert_eq!(near[3..], held[3..]);
        }
        assert!(owners.iter().all(|n| (900..1100).contains(n)), "{owners:?}");
        // Five copies in three zones: no zone has three of them.
        let held = holders(&placement, 1, 0, 5, FIRST_HOLDERS);
        assert!((0..3).all(|zone| held[..5].iter().filter(|i| *i % 3 == zone).count() >= 1));
    }

    #[test]
    fn readers_without_zones_share_the_copies() {
        let nodes = members(5);
        let placement = NodePlacement::new(&nodes);
        let held = holders(&placement, 9, 0, 2, FIRST_HOLDERS);
        let mut count = [0; 2];
        for seed in 0..1000 {
            let mut mine = held.clone();
            let from = ReaderLocation { zone: String::new(), seed };
            placement.near_first(WantedBlock::of_block(ObjectId(9), 0, 2), &nodes, &from, &mut mine);
            count[held.iter().position(|i| *i == mine[0]).unwrap()] += 1;
        }
        assert!(count.iter().all(|n| *n > 400), "{count:?}");
    }

    #[test]
    fn a_path_has_the_copies_of_its_longest_prefix() {
        let copies = CopyCounts::new(0, [(b"a".to_vec(), 2), (b"a/b".to_vec(), 3), (b"c".to_vec(), 0)]);
        let of = |path: &str| copies.copies_of(path.as_bytes());
        assert_eq!((of("a"), of("a/x"), of("a/b/c"), of("ab"), of("c/d"), of("")), (2, 2, 3, 1, 1, 1));
        assert_eq!(CopyCounts::new(1, [(Vec::new(), 4)]).copies_of(b"any"), 4);
    }

    /// Prints the cost of a choice; asserts nothing about time.
    #[test]
    fn what_a_choice_costs() {
        for n in [3, 100, 10_000] {
            let placement = NodePlacement::new(&members(n));
            let (mut out, rounds) = (Vec::new(), 2000u32);
            let mut each = |of: &dyn Fn(u32) -> u32| {
                let start = Instant::now();
                for i in 0..rounds {
                    placement.find_holders(
                        WantedBlock::of_block(ObjectId(u128::from(of(i)) << 64), 0, 1),
                        FIRST_HOLDERS,
                        &mut out,
                    );
                }
                start.elapsed() / rounds
            };
            let (new, known) = (each(&|i| i), each(&|_| 7));
            println!("{n} nodes: {new:?} for a block not seen before, {known:?} for the same one again");
        }
    }
}
