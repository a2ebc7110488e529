//! The begin of a term: a node takes the leadership in the registry, has all nodes refuse the leader before, and learns from these which objects are
//! staged.
//!
//! | a record found | then |
//! |---|---|
//! | in phase `Done` or `Withdrawn` at any node | is done |
//! | with a later record of the same name, unless the latter was withdrawn | was replaced |
//! | at a node only that no leader has compared with others since | is not taken, unless two domains are away |
//! | at a node that a newer state of the record does not name, for a further copy was under way | is at that node, too |
//! | any other | is staged, also if a single node has the record: the writer got no answer, or two domains are away |

use super::nodes::NodeTable;
use super::{DOMAINS, Leader, VALID_TIME};
use crate::ledger::{Ledger, closed_at};
use crate::manifest::{BucketKey, Manifest, Phase};
use crate::message::NodeFacts;
use crate::peers::{TermFacts, TermRecord};
use crate::shared::StageShared;
use parking_lot::{Condvar, Mutex};
use spurline_types::Result;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A node that does not answer at the begin of a term is asked for this long.
const FENCE_TIME: Duration = Duration::from_secs(3);
/// The same, if more than one failure domain is away: acknowledged objects may be only there.
const LONG_FENCE_TIME: Duration = Duration::from_secs(60);
const FENCE_PAUSE: Duration = Duration::from_millis(500);
/// The first leader of a group waits this long: all nodes read the registry meanwhile.
const FIRST_WAIT: Duration = Duration::from_secs(3);

/// The objects of a node, by its answer.
struct FencedNode {
    facts: NodeFacts,
    manifests: Vec<Manifest>,
}

/// Takes the leadership from the leader that the registry names; `None` if another node was faster, or if too few nodes can be reached from
/// here to know all that is staged, while another node may reach more. `is_last_resort`: no other node has taken the leadership.
///
/// # Errors
/// The registry's.
pub fn take_over(
    shared: &Arc<StageShared>,
    record: &Arc<dyn TermRecord>,
    instance: u64,
    is_last_resort: bool,
) -> Result<Option<Arc<Leader>>> {
    let (version, before) = record.read()?;
    let mut facts = TermFacts { term: before.term + 1, leader: shared.name.clone(), instance, ..before.clone() };
    if let Some(holder) = &shared.holder {
        facts.nodes.insert(shared.name.clone(), holder.facts().domain);
    }
    if !record.replace(version, &facts)? {
        return Ok(None);
    }
    tracing::info!("this node keeps the order of staged files (term {})", facts.term);
    let begun = Instant::now();
    let fenced = fence_all(shared, &facts, is_last_resort);
    let has_told = |node: &str| fenced.get(node).is_some_and(|known| is_current(&facts, node, known));
    let is_any_silent = !facts.nodes.keys().all(|node| fenced.contains_key(node));
    if !is_last_resort && before.term > 0 && is_any_silent && missing_domains(&facts, has_told).len() >= DOMAINS {
        tracing::info!("another node is to keep the order of staged files: too few nodes are reached from here");
        // The one before keeps the name: the next leader waits until that one is not valid any more.
        let (version, now) = record.read()?;
        if now.term == facts.term {
            record.replace(version, &TermFacts { leader: before.leader, instance: before.instance, ..now })?;
        }
        return Ok(None);
    }
    if before.term == 0 {
        std::thread::sleep(FIRST_WAIT);
    } else if !before.leader.is_empty() && is_any_silent {
        // A leader before may not know of this term: the registry and the nodes have confirmed that one before they were asked here.
        // That leader is the one of the registry, or an earlier one if that one never began.
        std::thread::sleep((VALID_TIME + FENCE_PAUSE).saturating_sub(begun.elapsed()));
    }
    let (current, others): (HashMap<_, _>, HashMap<_, _>) =
        fenced.into_iter().partition(|(node, known)| is_current(&facts, node, known));
    let leader = build_leader(shared, record, instance, &facts, current);
    if !leader.is_complete.load(Ordering::Acquire) {
        for (node, known) in others {
            leader.note_records(&node, known.manifests);
        }
    }
    Ok(Some(leader))
}

/// Whether an earlier leader has compared the node with others, and the node has the same disks since.
fn is_current(facts: &TermFacts, node: &str, known: &FencedNode) -> bool {
    facts.current.is_empty() || facts.current.get(node) == Some(&known.facts.disk)
}

/// Has all nodes refuse earlier leaders; what those that answer keep.
fn fence_all(shared: &Arc<StageShared>, facts: &TermFacts, is_last_resort: bool) -> HashMap<String, FencedNode> {
    let mut fenced = HashMap::new();
    let started = Instant::now();
    loop {
        // This node first: from then on no leader is confirmed by all nodes.
        let others = facts.nodes.keys().filter(|node| **node != shared.name);
        for node in [&shared.name].into_iter().chain(others) {
            if fenced.contains_key(node) {
                continue;
            }
            if let Ok((node_facts, manifests)) = shared.fence(node, facts.term) {
                fenced.insert(node.clone(), FencedNode { facts: node_facts, manifests });
            }
        }
        let away: BTreeSet<&String> =
            missing_domains(facts, |node| fenced.get(node).is_some_and(|known| is_current(facts, node, known)));
        let patience = if away.len() >= DOMAINS && is_last_resort { LONG_FENCE_TIME } else { FENCE_TIME };
        if facts.nodes.keys().all(|node| fenced.contains_key(node)) || started.elapsed() >= patience {
            return fenced;
        }
        std::thread::sleep(FENCE_PAUSE);
    }
}

/// The failure domains of nodes that have not told what they keep; and, as long as there is such a node, of those that lack objects.
pub fn missing_domains(facts: &TermFacts, has_told: impl Fn(&str) -> bool) -> BTreeSet<&String> {
    let is_any_away = facts.nodes.keys().any(|node| !has_told(node));
    let lacks = |node: &String| is_any_away && facts.lacking.contains(node);
    let missing = facts.nodes.iter().filter(|(node, _)| !has_told(node) || lacks(node));
    missing.map(|(_, domain)| domain).collect()
}

/// A record and the nodes that have it.
struct FoundRecord {
    manifest: Manifest,
    nodes: BTreeSet<String>,
    /// The states that the nodes have told.
    told: Vec<(String, Manifest)>,
}

impl FoundRecord {
    /// Names all nodes that have the bytes.
    fn name_holders(mut self) -> FoundRecord {
        for (node, told) in std::mem::take(&mut self.told) {
            if self.manifest.phase == Phase::Waiting {
                self.manifest.note_holder(&told, &node);
            }
        }
        self
    }

    /// The manifest with all nodes: one that got the record in the place of another may not be named.
    fn into_manifest(self) -> Manifest {
        let FoundRecord { mut manifest, nodes, .. } = self;
        let unnamed: Vec<String> = nodes.into_iter().filter(|node| !manifest.is_at(node)).collect();
        manifest.former.extend(unnamed);
        manifest
    }
}

fn build_leader(
    shared: &Arc<StageShared>,
    record: &Arc<dyn TermRecord>,
    instance: u64,
    facts: &TermFacts,
    fenced: HashMap<String, FencedNode>,
) -> Arc<Leader> {
    let is_complete = missing_domains(facts, |node| fenced.contains_key(node)).len() < DOMAINS;
    if !is_complete {
        let away: Vec<&str> =
            facts.nodes.keys().filter(|node| !fenced.contains_key(*node)).map(String::as_str).collect();
        tracing::error!(
            "nodes {} give no answer: staged files that only these have can't be read until one of them is back",
            away.join(", ")
        );
    }
    let nodes = NodeTable::default();
    for (node, domain) in &facts.nodes {
        match fenced.get(node) {
            Some(known) => nodes.note(node, known.facts.clone()),
            None => nodes.note_absent(node, domain),
        }
    }
    let told: BTreeSet<String> = fenced.keys().cloned().collect();
    let mut ledger = build_ledger(merge_records(fenced), &told);
    ledger.unheard_nodes = facts.nodes.keys().filter(|node| !told.contains(*node)).cloned().collect();
    let staged = ledger.entries.len();
    if staged > 0 {
        tracing::info!("{staged} staged files wait for their upload");
    }
    Arc::new(Leader {
        shared: Arc::clone(shared),
        record: Arc::clone(record),
        term: facts.term,
        instance,
        ledger: Mutex::new(ledger),
        changed: Condvar::new(),
        nodes,
        facts: Mutex::new(facts.clone()),
        is_complete: AtomicBool::new(is_complete),
        began: Instant::now(),
        store_silent_until: Mutex::default(),
        valid_until: Mutex::new(Instant::now() + VALID_TIME),
        is_over: AtomicBool::new(false),
    })
}

/// The newest state of each record.
fn merge_records(fenced: HashMap<String, FencedNode>) -> Vec<FoundRecord> {
    let mut found: BTreeMap<String, FoundRecord> = BTreeMap::new();
    for (node, known) in fenced {
        for manifest in known.manifests {
            let merged = found.entry(manifest.record.clone());
            let merged = merged.or_insert_with(|| FoundRecord {
                manifest: manifest.clone(),
                nodes: BTreeSet::new(),
                told: Vec::new(),
            });
            merged.nodes.insert(node.clone());
            let phase = merged.manifest.phase.max(manifest.phase);
            if manifest.revision > merged.manifest.revision {
                merged.manifest = manifest.clone();
            }
            merged.manifest.phase = phase;
            merged.told.push((node.clone(), manifest));
        }
    }
    found.into_values().map(FoundRecord::name_holders).collect()
}

/// The table of what nodes keep; `told`: the nodes that have told.
fn build_ledger(found: Vec<FoundRecord>, told: &BTreeSet<String>) -> Ledger {
    let mut ledger = Ledger::default();
    let mut by_name: BTreeMap<BucketKey, Vec<FoundRecord>> = BTreeMap::new();
    for record in found {
        let manifest = &record.manifest;
        if manifest.is_live() {
            by_name.entry(manifest.at.clone()).or_default().push(record);
            continue;
        }
        if manifest.phase == Phase::Done {
            ledger.unsettled.insert(manifest.at.clone(), manifest.record.clone());
        }
        let manifest = record.into_manifest();
        ledger.end(&manifest, manifest.phase, []);
    }
    for (at, mut records) in by_name {
        records.sort_by_key(|record| record.manifest.place());
        let Some(newest) = records.pop() else { continue };
        let replaced: Vec<Manifest> = records.into_iter().map(FoundRecord::into_manifest).collect();
        let nodes = newest.nodes.clone();
        let mut manifest = newest.into_manifest();
        if ledger.ended.is_replaced(&at, manifest.place()) {
            replaced.iter().chain([&manifest]).for_each(|manifest| ledger.end(manifest, Phase::Done, []));
            continue;
        }
        // An object that was taken by one node only does not name those that were uploaded since.
        let uploaded = ledger.ended.marks_of(&at);
        let is_untold = !(uploaded.is_empty() && replaced.is_empty());
        uploaded.iter().for_each(|mark| manifest.add_begun(mark));
        replaced.iter().rev().for_each(|earlier| manifest.absorb(earlier));
        let lacking: Vec<String> = manifest.nodes().filter(|node| !nodes.contains(*node)).map(str::to_owned).collect();
        let closed = closed_at(manifest.closed_s);
        ledger.enter(manifest, closed, true);
        if let Some(entry) = ledger.entries.get_mut(&at) {
            let (missing, unheard) = lacking.into_iter().partition(|node| told.contains(node));
            entry.missing = missing;
            entry.unheard = unheard;
            entry.replaced = replaced;
            entry.is_untold = is_untold;
        }
        ledger.has_missing = true;
    }
    ledger
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest_samples::sample;

    fn told(node: &str, manifest: &Manifest) -> (String, FencedNode) {
        let facts = NodeFacts { domain: node.to_owned(), size: 1, used: 0, process: 1, disk: 1 };
        (node.to_owned(), FencedNode { facts, manifests: vec![manifest.clone()] })
    }

    #[test]
    fn a_node_whose_copy_was_to_be_replaced_keeps_being_a_holder() {
        let before = sample("a", "first", 1);
        assert_eq!(before.holders, ["node-0", "node-1"]);
        // The heal ended before node-2 had the object.
        let holders = vec!["node-0".to_owned(), "node-2".to_owned()];
        let after = Manifest { holders, former: vec!["node-1".to_owned()], revision: 1, ..before.clone() };
        let found = merge_records(HashMap::from([told("node-0", &after), told("node-1", &before)]));
        let nodes = ["node-0", "node-1", "node-2"].map(str::to_owned);
        let ledger = build_ledger(found, &nodes.clone().into());
        let entry = &ledger.entries[&before.at];
        assert_eq!(entry.manifest.nodes().collect::<Vec<_>>(), ["node-0", "node-2", "node-1"]);
        assert!(entry.manifest.former.is_empty() && entry.missing == [nodes[2].clone()].into());
    }
}
