//! Slots: the units that kubelet counts and hands to pods. Each names an HCA (`mlx5_0-17`), so a pod gets exactly the HCAs of the
//! given slots. Shares, ids, the message's limit and the spread over HCAs are computed here; nothing is sent.

use std::collections::BTreeMap;

/// The longest message that kubelet's client accepts, less 64 KiB for frames and fields to come.
const MESSAGE_LIMIT: usize = (4 << 20) - (64 << 10);

/// A slot of an HCA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSlot {
    /// The id, `mlx5_0-17`.
    pub id: String,
    /// Position of the HCA in the table.
    pub hca: usize,
}

/// The slots of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotTable {
    /// The slots, HCA by HCA.
    pub slots: Vec<DeviceSlot>,
    /// The configured number, where larger than a message of the API allows.
    pub reduced_from: Option<u32>,
}

impl SlotTable {
    /// Divides `wanted` slots evenly among the HCAs; the first get the rest.
    pub fn divide(hcas: &[&str], wanted: u32) -> Self {
        if hcas.is_empty() {
            return SlotTable::default();
        }
        let longest = hcas.iter().map(|name| name.len()).max().unwrap_or(0);
        let fitting = u32::try_from(MESSAGE_LIMIT / slot_bytes(longest)).unwrap_or(u32::MAX);
        let total = wanted.min(fitting) as usize;
        let mut slots = Vec::with_capacity(total);
        for (hca, name) in hcas.iter().enumerate() {
            let share = total / hcas.len() + usize::from(hca < total % hcas.len());
            slots.extend((0..share).map(|n| DeviceSlot { id: format!("{name}-{n}"), hca }));
        }
        SlotTable { slots, reduced_from: (wanted > fitting).then_some(wanted) }
    }
}

/// The most bytes that a slot takes in a message: tags and lengths, an id with a number of seven digits, the longest
/// health (`Unhealthy`), a NUMA node.
fn slot_bytes(name: usize) -> usize {
    let id = 2 + name + 1 + 7;
    let health = 2 + "Unhealthy".len();
    let topology = 2 + 2 + 11;
    // The id's and the message's length may take two bytes.
    2 + id + health + topology + 2
}

/// The HCA that a slot's id names.
pub fn hca_of_slot(id: &str) -> Option<&str> {
    let (hca, number) = id.rsplit_once('-')?;
    (!hca.is_empty() && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(hca)
}

/// Chooses `size` of the available ids: all of `must_include`, then ids of HCAs that this request does not have yet, the
/// HCA with the most free slots first.
pub fn spread_slots(available: &[String], must_include: &[String], size: usize) -> Vec<String> {
    let mut chosen: Vec<String> = must_include.iter().take(size).cloned().collect();
    let mut free: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    for id in available.iter().filter(|id| !chosen.contains(id)) {
        free.entry(hca_of_slot(id).unwrap_or(id)).or_default().push(id);
    }
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for id in &chosen {
        *taken.entry(hca_of_slot(id).unwrap_or(id).to_owned()).or_default() += 1;
    }
    // The lowest number of an HCA is taken first.
    free.values_mut().for_each(|ids| ids.sort_by_key(|id| std::cmp::Reverse(slot_number(id))));
    while chosen.len() < size {
        let next = free
            .iter()
            .filter(|(_, ids)| !ids.is_empty())
            .min_by_key(|(hca, ids)| (taken.get(**hca).copied().unwrap_or(0), std::cmp::Reverse(ids.len())))
            .map(|(hca, _)| (*hca).to_owned());
        let Some(hca) = next else { break };
        if let Some(id) = free.get_mut(hca.as_str()).and_then(Vec::pop) {
            chosen.push(id.clone());
        }
        *taken.entry(hca).or_default() += 1;
    }
    chosen
}

fn slot_number(id: &str) -> u64 {
    id.rsplit_once('-').and_then(|(_, n)| n.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(hca: &str, numbers: std::ops::Range<usize>) -> Vec<String> {
        numbers.map(|n| format!("{hca}-{n}")).collect()
    }

    #[test]
    fn shares_are_even_and_ids_name_their_hca() {
        let table = SlotTable::divide(&["mlx5_0", "mlx5_bond_0"], 5);
        let all: Vec<&str> = table.slots.iter().map(|s| s.id.as_str()).collect();
        assert_eq!(all, ["mlx5_0-0", "mlx5_0-1", "mlx5_0-2", "mlx5_bond_0-0", "mlx5_bond_0-1"]);
        assert_eq!(table.reduced_from, None);
        assert_eq!(hca_of_slot("mlx5_bond_0-17"), Some("mlx5_bond_0"));
        assert_eq!(hca_of_slot("a-b-3"), Some("a-b"));
        for odd in ["", "7", "mlx5_0", "mlx5_0-", "-3", "mlx5_0-x"] {
            assert_eq!(hca_of_slot(odd), None, "{odd}");
        }
        assert_eq!(SlotTable::divide(&[], 1000), SlotTable::default());
        assert_eq!(SlotTable::divide(&["a", "b", "c"], 1).slots.len(), 1);
    }

    #[test]
    fn slots_fit_one_message() {
        let table = SlotTable::divide(&["mlx5_0"], 2_000_000);
        assert_eq!(table.reduced_from, Some(2_000_000));
        assert!(table.slots.len() > 50_000, "{}", table.slots.len());
    }

    #[test]
    fn a_pod_is_spread_over_hcas_the_least_loaded_first() {
        let mut free = ids("mlx5_0", 0..4);
        free.extend(ids("mlx5_1", 2..4));
        free.extend(ids("mlx5_2", 1..4));
        assert_eq!(spread_slots(&free, &[], 1), ["mlx5_0-0"]);
        assert_eq!(spread_slots(&free, &[], 3), ["mlx5_0-0", "mlx5_2-1", "mlx5_1-2"]);
        assert_eq!(spread_slots(&free, &[], 4)[3], "mlx5_0-1");
        assert_eq!(spread_slots(&free, &["mlx5_0-3".to_owned()], 2), ["mlx5_0-3", "mlx5_2-1"]);
        assert_eq!(spread_slots(&free[..1], &[], 9), ["mlx5_0-0"], "not more than there are");
    }

    proptest! {
        #[test]
        fn a_spread_is_a_choice_of_the_available(counts in prop::collection::vec(0usize..20, 1..6), size in 0usize..40) {
            let free: Vec<String> = counts.iter().enumerate().flat_map(|(h, n)| ids(&format!("hca{h}"), 0..*n)).collect();
            let chosen = spread_slots(&free, &[], size);
            prop_assert_eq!(chosen.len(), size.min(free.len()));
            let mut once = chosen.clone();
            once.sort();
            once.dedup();
            prop_assert_eq!(once.len(), chosen.len());
            prop_assert!(chosen.iter().all(|id| free.contains(id)));
            // No HCA has two more than another that still has a free slot.
            let has = |h: usize| chosen.iter().filter(|id| hca_of_slot(id) == Some(&format!("hca{h}"))).count();
            for a in 0..counts.len() {
                for (b, count) in counts.iter().enumerate() {
                    prop_assert!(has(a) <= has(b) + 1 || has(b) == *count);
                }
            }
        }
    }
}
