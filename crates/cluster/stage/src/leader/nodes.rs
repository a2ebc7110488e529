//! The nodes that may keep staged objects, as the leader knows them: where copies go, what a lost node had, and whether this leader still
//! is the leader.

use super::{DOMAINS, Leader, VALID_TIME, holders_of};
use crate::manifest::{Manifest, Phase, StageClass};
use crate::message::{Answer, NodeFacts, Reply, StageCall, StageReply};
use crate::peers::TermFacts;
use crate::shared::CALL_TIME;
use parking_lot::Mutex;
use spurline_object_store::RequestFailure;
use spurline_types::ErrorKind;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A node that gives no answer for this long is lost: others get copies of what it had.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// A node that gives no answer for this long does not come back.
const GONE_AFTER: Duration = Duration::from_secs(24 * 3600);
/// Objects that are copied before the nodes are looked at again.
const HEALED_AT_ONCE: usize = 64;

/// A node.
#[derive(Debug, Clone)]
pub struct StageNode {
    pub facts: NodeFacts,
    /// The last answer.
    pub heard: Instant,
    /// No answer to the last call.
    pub is_silent: bool,
}

impl StageNode {
    fn is_usable(&self) -> bool {
        !self.is_silent && self.facts.size > 0
    }

    fn is_lost(&self) -> bool {
        self.is_silent && self.heard.elapsed() >= LOST_AFTER
    }
}

/// All nodes.
#[derive(Default)]
pub struct NodeTable(Mutex<BTreeMap<String, StageNode>>);

impl NodeTable {
    /// Notes an answer; a node that was not known is added.
    pub fn note(&self, node: &str, facts: NodeFacts) {
        let heard = Instant::now();
        self.0.lock().insert(node.to_owned(), StageNode { facts, heard, is_silent: false });
    }

    /// Notes a node that gives no answer.
    pub fn note_absent(&self, node: &str, domain: &str) {
        let facts = NodeFacts { domain: domain.to_owned(), size: 0, used: 0 };
        let node_facts = StageNode { facts, heard: Instant::now(), is_silent: true };
        self.0.lock().insert(node.to_owned(), node_facts);
    }

    /// A call to a node failed.
    pub fn note_silent(&self, node: &str) {
        if let Some(known) = self.0.lock().get_mut(node) {
            known.is_silent = true;
        }
    }

    fn all(&self) -> BTreeMap<String, StageNode> {
        self.0.lock().clone()
    }

    /// Whether nobody waits for this node any more.
    pub fn is_gone(&self, node: &str) -> bool {
        self.0.lock().get(node).is_none_or(|known| known.is_silent && known.heard.elapsed() >= GONE_AFTER)
    }

    fn forget(&self, node: &str) {
        self.0.lock().remove(node);
    }

    fn domain_of(&self, node: &str) -> Option<String> {
        self.0.lock().get(node).map(|known| known.facts.domain.clone())
    }

    /// The usable node with the most space whose domain is none of these.
    fn pick(&self, domains: &BTreeSet<String>, without: &BTreeSet<String>) -> Option<String> {
        let table = self.0.lock();
        let fitting = table.iter().filter(|(name, node)| {
            node.is_usable() && !domains.contains(&node.facts.domain) && !without.contains(*name)
        });
        let most = fitting.max_by_key(|(_, node)| node.facts.size.saturating_sub(node.facts.used));
        most.map(|(name, _)| name.clone())
    }
}

fn too_few_domains() -> RequestFailure {
    let why = "staged files need two nodes with --stage-size in two failure domains (--failure-domain), and fewer can be \
               reached now";
    RequestFailure::transient(ErrorKind::Unavailable, why.to_owned())
}

impl Leader {
    /// The nodes for a small object: this one, and one of another domain.
    pub(super) fn choose_holders(&self, class: StageClass) -> Answer<Vec<String>> {
        let wanted = if class == StageClass::Staged { DOMAINS } else { 1 };
        let table = self.nodes.all();
        let mut holders = Vec::new();
        let mut domains = BTreeSet::new();
        let own = table.get(&self.shared.name).filter(|own| own.is_usable() && own.facts.used < own.facts.size);
        if let Some(own) = own {
            holders.push(self.shared.name.clone());
            domains.insert(own.facts.domain.clone());
        }
        while holders.len() < wanted {
            let Some(node) = self.nodes.pick(&domains, &BTreeSet::new()) else { return Err(too_few_domains()) };
            domains.extend(self.nodes.domain_of(&node));
            holders.push(node);
        }
        Ok(holders)
    }

    /// The manifest with other nodes in the place of `lost`, which get copies of the parts. `has_bytes`: the caller has the
    /// bytes of a small object at hand.
    pub(super) fn replace_holders(
        self: &Arc<Self>,
        manifest: &Manifest,
        lost: &[String],
        has_bytes: bool,
    ) -> Answer<Manifest> {
        let wanted = if manifest.class == StageClass::Staged { DOMAINS } else { 1 };
        let avoided: BTreeSet<String> = lost.iter().cloned().collect();
        let mut replaced = manifest.clone();
        if manifest.pieces.is_empty() {
            replaced.holders = self.complete_holders(&manifest.holders, &avoided, wanted)?;
            let is_orphaned = !has_bytes && manifest.size > 0;
            if is_orphaned && manifest.holders.iter().all(|holder| avoided.contains(holder)) {
                return Err(RequestFailure::fatal(ErrorKind::Io(5), format!("no node has '{}'", manifest.at.key)));
            }
            return Ok(replaced);
        }
        for slice in replaced.pieces.iter_mut().flat_map(|piece| &mut piece.slices) {
            let alive: Vec<String> = slice.holders.iter().filter(|node| !avoided.contains(*node)).cloned().collect();
            let Some(source) = alive.first().cloned() else {
                return Err(RequestFailure::fatal(ErrorKind::Io(5), format!("no node has '{}'", manifest.at.key)));
            };
            let completed = self.complete_holders(&slice.holders, &avoided, wanted)?;
            for node in completed.iter().filter(|node| !alive.contains(node)) {
                let call = StageCall::SendPart { part: slice.part.clone(), to: node.clone() };
                let reply = self.shared.call(&source, &call, &[], 12 * CALL_TIME)?;
                crate::peers::succeeded(reply)?;
            }
            slice.holders = completed;
        }
        replaced.holders = holders_of(&replaced.pieces);
        Ok(replaced)
    }

    /// These nodes without the lost ones, and others, until there are enough domains.
    fn complete_holders(&self, holders: &[String], lost: &BTreeSet<String>, wanted: usize) -> Answer<Vec<String>> {
        let mut alive: Vec<String> = holders.iter().filter(|node| !lost.contains(*node)).cloned().collect();
        let mut domains: BTreeSet<String> = alive.iter().filter_map(|node| self.nodes.domain_of(node)).collect();
        while domains.len() < wanted {
            let Some(node) = self.nodes.pick(&domains, lost) else { return Err(too_few_domains()) };
            domains.extend(self.nodes.domain_of(&node));
            alive.push(node);
        }
        Ok(alive)
    }

    /// Looks at all nodes and at the registry once: who answers, who is lost, who is new, and whether this leader is still the leader.
    /// Returns what the registry has.
    pub fn look_at_nodes(self: &Arc<Self>) -> Option<TermFacts> {
        let started = Instant::now();
        let record = self.record.read();
        match &record {
            Ok((_, facts)) if facts.term == self.term && facts.instance == self.instance => {
                *self.valid_until.lock() = started + VALID_TIME;
            }
            Ok((_, facts)) => {
                self.step_down(&format!("node {} leads, in term {}", facts.leader, facts.term));
                return None;
            }
            Err(_) => {}
        }
        let mut names: BTreeSet<String> = self.shared.peers.names().into_iter().collect();
        let table = self.nodes.all();
        names.extend(table.keys().cloned());
        names.insert(self.shared.name.clone());
        let mut all_answered = true;
        let call = StageCall::Describe { term: self.term, leader: self.shared.name.clone() };
        let nodes: Vec<String> = names.into_iter().collect();
        let mut fresh = Vec::new();
        for (node, result) in self.call_all(&nodes, &call, &[]) {
            match result {
                Ok(Reply { reply: StageReply::Facts(facts), .. }) => match table.get(&node) {
                    Some(known) if !known.is_silent => self.nodes.note(&node, facts),
                    _ if facts.size > 0 => fresh.push((node, facts)),
                    _ => {}
                },
                Ok(_) => all_answered = false,
                Err(failure) => {
                    tracing::debug!(node, "a node does not say how much space there is: {}", failure.error);
                    all_answered = false;
                }
            }
        }
        if self.is_over() {
            return None;
        }
        if all_answered {
            *self.valid_until.lock() = started + VALID_TIME;
        }
        let known = record.ok().map(|(version, facts)| self.change_nodes(version, facts, &fresh));
        self.heal();
        self.set_gauges();
        known
    }

    /// Takes nodes that are new or back, and gives up those that are gone.
    fn change_nodes(self: &Arc<Self>, version: u64, facts: TermFacts, fresh: &[(String, NodeFacts)]) -> TermFacts {
        let mut changed = facts.clone();
        let mut welcomed = Vec::new();
        for (node, node_facts) in fresh {
            match self.welcome(node) {
                Ok(()) => welcomed.push((node, node_facts)),
                Err(failure) => {
                    tracing::debug!(node, "a node is not taken for staged files yet: {}", failure.error);
                }
            }
        }
        for (node, node_facts) in &welcomed {
            changed.nodes.insert((*node).clone(), node_facts.domain.clone());
        }
        let gone: Vec<String> = changed.nodes.keys().filter(|node| self.nodes.is_gone(node)).cloned().collect();
        let gone: Vec<String> = gone.into_iter().filter(|node| !self.has_objects(node)).collect();
        changed.nodes.retain(|node, _| !gone.contains(node));
        if changed != facts {
            match self.record.replace(version, &changed) {
                Ok(true) => {}
                Ok(false) => return facts,
                Err(error) => {
                    tracing::debug!("the registry does not record the nodes with staged files: {error}");
                    return facts;
                }
            }
        }
        gone.iter().for_each(|node| self.nodes.forget(node));
        for (node, node_facts) in welcomed {
            self.nodes.note(node, node_facts.clone());
        }
        changed
    }

    fn has_objects(&self, node: &str) -> bool {
        self.ledger.lock().entries.values().any(|entry| entry.manifest.is_at(node))
    }

    /// Has a node that is new or was away follow this term, and forget what others know to be done.
    fn welcome(self: &Arc<Self>, node: &str) -> Answer<()> {
        let (_, manifests) = self.shared.fence(node, self.term)?;
        let mut old = Vec::new();
        let mut ledger = self.ledger.lock();
        for manifest in manifests {
            let entry = ledger.entries.get(&manifest.at).filter(|entry| entry.manifest.mark == manifest.mark);
            match entry {
                Some(entry) if entry.manifest.is_at(node) => {}
                None if !self.is_complete
                    && manifest.phase != Phase::Done
                    && !ledger.done.contains_key(&manifest.mark) =>
                {
                    ledger.adopt(manifest);
                }
                _ => old.push(manifest.mark),
            }
        }
        drop(ledger);
        if !old.is_empty() {
            self.order(node, &StageCall::Forget { term: self.term, marks: old }, &[])?;
        }
        Ok(())
    }

    /// Gives objects of lost nodes further holders.
    fn heal(self: &Arc<Self>) {
        let table = self.nodes.all();
        let lost: BTreeSet<String> =
            table.iter().filter(|(_, node)| node.is_lost()).map(|(name, _)| name.clone()).collect();
        if lost.is_empty() {
            return;
        }
        let wounded: Vec<Manifest> = {
            let ledger = self.ledger.lock();
            let entries = ledger.entries.values().filter(|entry| entry.manifest.phase == Phase::Waiting);
            let with_lost = entries.filter(|entry| lost.iter().any(|node| entry.manifest.is_at(node)));
            with_lost.take(HEALED_AT_ONCE).map(|entry| entry.manifest.clone()).collect()
        };
        for manifest in wounded {
            if self.is_over() {
                return;
            }
            let lost: Vec<String> = lost.iter().cloned().collect();
            if let Err(failure) = self.heal_object(&manifest, &lost) {
                tracing::debug!("'{}' has no further copy yet: {}", manifest.at.key, failure.error);
                let mut ledger = self.ledger.lock();
                let Some(entry) = ledger.entries.get_mut(&manifest.at) else { continue };
                if manifest.class != StageClass::Staged && failure.error.kind() == ErrorKind::Io(5) {
                    ledger.remove(&manifest.at);
                } else {
                    entry.error = Some(failure.error.message().to_owned());
                }
            }
        }
    }

    fn heal_object(self: &Arc<Self>, manifest: &Manifest, lost: &[String]) -> Answer<()> {
        let _lock = self.lock_name(&manifest.at, Instant::now() + CALL_TIME)?;
        let is_same = |found: Option<&crate::ledger::Entry>| found.is_some_and(|entry| entry.manifest == *manifest);
        if !is_same(self.ledger.lock().entries.get(&manifest.at)) {
            return Ok(());
        }
        let mut healed = self.replace_holders(manifest, lost, false)?;
        healed.revision += 1;
        healed.former.extend(lost.iter().filter(|node| manifest.is_at(node)).cloned());
        let inline =
            if manifest.pieces.is_empty() { self.shared.read_manifest(manifest)?.to_vec() } else { Vec::new() };
        let call = StageCall::Hold { term: self.term, manifest: Box::new(healed.clone()) };
        for (_, result) in self.call_all(&healed.holders, &call, &inline) {
            result?;
        }
        if let Some(entry) = self.ledger.lock().entries.get_mut(&manifest.at) {
            entry.manifest = healed;
            entry.error = None;
        }
        Ok(())
    }
}
