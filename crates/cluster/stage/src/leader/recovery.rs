//! The begin of a term: a node takes the leadership in the registry, has all nodes refuse the leader before, and learns from these what is
//! staged.
//!
//! | a record found | then |
//! |---|---|
//! | in phase `Done` at any node | is done |
//! | with a later one of the same name | was replaced |
//! | any other | is staged, also if a single node has the record: the writer got no answer, or two domains are away |

use super::nodes::NodeTable;
use super::{Leader, VALID_TIME};
use crate::ledger::Ledger;
use crate::manifest::{BucketKey, Manifest, Phase};
use crate::message::NodeFacts;
use crate::peers::{TermFacts, TermRecord};
use crate::shared::StageShared;
use parking_lot::{Condvar, Mutex};
use spurline_types::Result;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

/// A node that does not answer at the begin of a term is asked for this long.
const FENCE_TIME: Duration = Duration::from_secs(3);
/// The same, if more than one failure domain is away: acknowledged objects may be only there.
const LONG_FENCE_TIME: Duration = Duration::from_secs(60);
const FENCE_PAUSE: Duration = Duration::from_millis(500);
/// The first leader of a group waits this long: all nodes read the registry meanwhile.
const FIRST_WAIT: Duration = Duration::from_secs(3);

/// What a node keeps, by its answer.
struct FencedNode {
    facts: NodeFacts,
    manifests: Vec<Manifest>,
}

/// Takes the leadership from the leader that the registry names; `None` if another node was faster.
///
/// # Errors
/// The registry's.
pub fn take_over(
    shared: &Arc<StageShared>,
    record: &Arc<dyn TermRecord>,
    instance: u64,
) -> Result<Option<Arc<Leader>>> {
    let (version, before) = record.read()?;
    let mut facts =
        TermFacts { term: before.term + 1, leader: shared.name.clone(), instance, nodes: before.nodes.clone() };
    if let Some(holder) = &shared.holder {
        facts.nodes.insert(shared.name.clone(), holder.facts().domain);
    }
    if !record.replace(version, &facts)? {
        return Ok(None);
    }
    tracing::info!("this node keeps the order of staged files (term {})", facts.term);
    let begun = Instant::now();
    let fenced = fence_all(shared, &facts);
    if before.term == 0 {
        std::thread::sleep(FIRST_WAIT);
    } else if !before.leader.is_empty() && !fenced.contains_key(&before.leader) {
        // The leader before may not know of this term: the registry and the nodes have confirmed that one before they were asked here.
        std::thread::sleep((VALID_TIME + FENCE_PAUSE).saturating_sub(begun.elapsed()));
    }
    Ok(Some(build_leader(shared, record, instance, &facts, fenced)))
}

/// Has all nodes refuse earlier leaders; what those that answer keep.
fn fence_all(shared: &Arc<StageShared>, facts: &TermFacts) -> HashMap<String, FencedNode> {
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
        let away: BTreeSet<&String> = missing_domains(facts, &fenced);
        let patience = if away.len() > 1 { LONG_FENCE_TIME } else { FENCE_TIME };
        if away.is_empty() || started.elapsed() >= patience {
            return fenced;
        }
        std::thread::sleep(FENCE_PAUSE);
    }
}

/// The failure domains of nodes that do not answer.
fn missing_domains<'a>(facts: &'a TermFacts, fenced: &HashMap<String, FencedNode>) -> BTreeSet<&'a String> {
    let missing = facts.nodes.iter().filter(|(node, _)| !fenced.contains_key(*node));
    missing.map(|(_, domain)| domain).collect()
}

fn build_leader(
    shared: &Arc<StageShared>,
    record: &Arc<dyn TermRecord>,
    instance: u64,
    facts: &TermFacts,
    fenced: HashMap<String, FencedNode>,
) -> Arc<Leader> {
    let missing = missing_domains(facts, &fenced);
    if missing.len() > 1 {
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
    let mut found: HashMap<String, Manifest> = HashMap::new();
    for manifest in fenced.into_values().flat_map(|known| known.manifests) {
        let merged = found.entry(manifest.mark.clone()).or_insert_with(|| manifest.clone());
        let phase = merged.phase.max(manifest.phase);
        if manifest.revision > merged.revision {
            *merged = manifest;
        }
        merged.phase = phase;
    }
    let ledger = build_ledger(found);
    let is_complete = missing.len() <= 1;
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
        is_complete,
        valid_until: Mutex::new(Instant::now() + VALID_TIME),
        is_over: AtomicBool::new(false),
    })
}

fn build_ledger(found: HashMap<String, Manifest>) -> Ledger {
    let mut ledger = Ledger::default();
    let mut by_name: BTreeMap<BucketKey, Vec<Manifest>> = BTreeMap::new();
    for manifest in found.into_values() {
        match manifest.phase {
            Phase::Done => ledger.end(&manifest),
            Phase::Waiting | Phase::Removing => by_name.entry(manifest.at.clone()).or_default().push(manifest),
        }
    }
    for mut manifests in by_name.into_values() {
        manifests.sort_by_key(Manifest::place);
        let Some(mut newest) = manifests.pop() else { continue };
        for replaced in manifests {
            newest.begun.extend(replaced.begun.iter().cloned());
            newest.begun.push(replaced.mark.clone());
            ledger.end(&replaced);
        }
        let closed = closed_at(newest.closed_s);
        ledger.enter(newest, closed, true);
    }
    ledger
}

/// The time of a close by this process's clock, from seconds since 1970.
fn closed_at(closed_s: u64) -> Instant {
    let now_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let age = Duration::from_secs(now_s.saturating_sub(closed_s));
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}
