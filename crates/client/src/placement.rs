//! Which node holds which blocks: weighted rendezvous hashing of (object, run of blocks). Pure arithmetic;
//! it knows no network, no clock and no randomness.

use spurline_types::{Member, ObjectId};
use std::hash::Hasher;

/// Blocks that stay together on one node. A run is long enough that read-ahead asks one node for several
/// blocks, and short enough that a large file spreads over all nodes.
pub const RUN_BLOCKS: u32 = 16;

/// The index of each member in the order in which they are asked for block `index` of `object`, best first,
/// written to `out` (cleared first, its capacity reused). Members of weight 0 come last, as a last resort.
pub fn rank(members: &[Member], object: ObjectId, index: u32, out: &mut Vec<u32>) {
    out.clear();
    if let [_] = members {
        out.push(0);
        return;
    }
    out.extend(0..members.len() as u32);
    let run = index / RUN_BLOCKS;
    out.sort_by(|a, b| {
        let score = |i: u32| score(&members[i as usize], object, run);
        score(*b).total_cmp(&score(*a)).then(a.cmp(b))
    });
}

/// The larger, the better the member. With h uniform in (0, 1), -w / ln(h) gives each member the first place
/// as often as its weight says, and a member's coming or going moves no block between two others.
fn score(member: &Member, object: ObjectId, run: u32) -> f64 {
    if member.weight == 0 {
        return 0.0;
    }
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.write(member.name.as_bytes());
    hash.write(&object.0.to_le_bytes());
    hash.write(&run.to_le_bytes());
    // 53 bits, moved off both ends of the interval.
    let uniform = ((hash.finish() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -f64::from(member.weight) / uniform.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(n: usize) -> Vec<Member> {
        (0..n).map(|i| Member::at(&format!("10.0.0.{i}:7000"), 100)).collect()
    }

    fn first(members: &[Member], object: u128, index: u32) -> String {
        let mut out = Vec::new();
        rank(members, ObjectId(object), index, &mut out);
        members[out[0] as usize].name.clone()
    }

    #[test]
    fn balanced_by_weight_and_runs_stay_together() {
        let mut three = members(3);
        three[2].weight = 200;
        let mut count = std::collections::HashMap::new();
        for object in 0..20_000u128 {
            *count.entry(first(&three, object, 0)).or_insert(0) += 1;
        }
        for (name, share) in [(0, 0.25), (1, 0.25), (2, 0.5)].map(|(i, s)| (three[i].name.clone(), s)) {
            let got = f64::from(count[&name]) / 20_000.0;
            assert!((got - share).abs() < 0.02, "{name}: {got} of the blocks for a share of {share}");
        }
        assert_eq!(first(&three, 5, 0), first(&three, 5, RUN_BLOCKS - 1));
        let spread: std::collections::HashSet<_> = (0..40).map(|run| first(&three, 5, run * RUN_BLOCKS)).collect();
        assert_eq!(spread.len(), 3, "a large file spreads over all nodes");
    }

    #[test]
    fn a_joining_node_takes_only_its_share() {
        let (old, new) = (members(9), members(10));
        let moved = (0..10_000u128).filter(|o| first(&old, *o, 0) != first(&new, *o, 0)).collect::<Vec<_>>();
        assert!(moved.iter().all(|o| first(&new, *o, 0) == new[9].name), "blocks move only to the new node");
        assert!((800..1200).contains(&moved.len()), "{} of 10000 moved for a share of a tenth", moved.len());
    }

    #[test]
    fn weight_zero_is_the_last_resort() {
        let mut two = members(2);
        two[0].weight = 0;
        assert!((0..100).all(|o| first(&two, o, 0) == two[1].name));
        let mut out = Vec::new();
        rank(&two, ObjectId(1), 0, &mut out);
        assert_eq!(out, [1, 0]);
    }
}
