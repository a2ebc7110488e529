//! The nodes that may keep staged objects, as the leader knows them: where copies go, what a lost node had, and whether this leader still
//! is the leader.

use super::recovery::missing_domains;
use super::{DOMAINS, Leader, VALID_TIME, holders_of};
use crate::ledger::Entry;
use crate::manifest::{Manifest, Phase, StageClass};
use crate::message::{Answer, NodeFacts, Reply, StageCall, StageReply};
use crate::peers::TermFacts;
use crate::shared::STAGE_CALL_TIME;
use parking_lot::Mutex;
use spurline_object_store::RequestFailure;
use spurline_types::ErrorKind;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A node that gives no answer for this long is lost: others get copies of its objects.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// Objects that get further copies at once: nodes sync the records of several together, and a large object does not hold up others.
const HEALS_AT_ONCE: usize = 8;
/// A node that gives no answer for this long does not come back.
const GONE_AFTER: Duration = Duration::from_secs(24 * 3600);
/// How often objects are looked for that lack a copy.
const HEAL_INTERVAL: Duration = Duration::from_secs(1);

/// A node.
#[derive(Debug, Clone)]
pub struct StageNode {
    pub facts: NodeFacts,
    /// The last answer.
    pub heard: Instant,
    /// No answer to the last call.
    pub is_silent: bool,
    /// The leader knows the node's records.
    pub has_told: bool,
}

impl StageNode {
    fn is_usable(&self) -> bool {
        !self.is_silent && self.facts.size > 0
    }

    fn is_lost(&self) -> bool {
        self.is_silent && self.heard.elapsed() >= LOST_AFTER
    }

    fn is_gone(&self) -> bool {
        self.is_silent && self.heard.elapsed() >= GONE_AFTER
    }
}

/// All nodes.
#[derive(Default)]
pub struct NodeTable(Mutex<BTreeMap<String, StageNode>>);

impl NodeTable {
    /// Notes an answer; a node that was not known is added.
    pub fn note(&self, node: &str, facts: NodeFacts) {
        let heard = Instant::now();
        self.0.lock().insert(node.to_owned(), StageNode { facts, heard, is_silent: false, has_told: true });
    }

    /// Notes a node that gives no answer.
    pub fn note_absent(&self, node: &str, domain: &str) {
        let facts = NodeFacts { domain: domain.to_owned(), size: 0, used: 0, process: 0, disk: 0 };
        let node_facts = StageNode { facts, heard: Instant::now(), is_silent: true, has_told: false };
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

    /// Whether the node is not expected back any more.
    pub fn is_gone(&self, node: &str) -> bool {
        self.0.lock().get(node).is_none_or(StageNode::is_gone)
    }

    fn forget(&self, node: &str) {
        self.0.lock().remove(node);
    }

    fn domain_of(&self, node: &str) -> Option<String> {
        self.0.lock().get(node).map(|known| known.facts.domain.clone())
    }

    /// The number of failure domains of these nodes.
    pub fn count_domains(&self, nodes: &BTreeSet<String>) -> usize {
        let domains: BTreeSet<String> = nodes.iter().filter_map(|node| self.domain_of(node)).collect();
        domains.len()
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

    /// Whether a node gave no answer to the last call, and may come back.
    pub fn is_silent(&self, node: &str) -> bool {
        self.0.lock().get(node).is_some_and(|known| known.is_silent)
    }

    /// The nodes that have told in this term what they keep, with the identities of their disks.
    fn disks(&self) -> BTreeMap<String, u64> {
        let table = self.0.lock();
        let told = table.iter().filter(|(_, node)| node.has_told);
        told.map(|(name, node)| (name.clone(), node.facts.disk)).collect()
    }

    /// Whether a node has listed its records in this term.
    fn has_told(&self, node: &str) -> bool {
        self.0.lock().get(node).is_some_and(|known| known.has_told)
    }
}

fn too_few_domains() -> RequestFailure {
    let why = "staged files need two nodes with --stage-size in two failure domains (--failure-domain), and fewer can be \
               reached now";
    RequestFailure::transient(ErrorKind::Unavailable, why.to_owned())
}

impl Leader {
    /// The nodes for a small object: this node, and a node of another domain.
    pub(super) fn choose_holders(&self, class: StageClass) -> Answer<Vec<String>> {
        let wanted = class.domains();
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

    /// The manifest with other nodes in the place of `avoided`, which get copies of the parts; none of these is `refused`. `has_bytes`: the caller has the
    /// bytes of a small object.
    pub(super) fn replace_holders(
        self: &Arc<Self>,
        manifest: &Manifest,
        avoided: &BTreeSet<String>,
        refused: &BTreeSet<String>,
        has_bytes: bool,
    ) -> Answer<Manifest> {
        let wanted = manifest.class.domains();
        let mut replaced = manifest.clone();
        if manifest.pieces.is_empty() {
            replaced.holders = self.complete_holders(&manifest.holders, avoided, refused, wanted)?;
            let is_orphaned = !has_bytes && manifest.size > 0;
            if is_orphaned && manifest.holders.iter().all(|holder| avoided.contains(holder)) {
                return Err(RequestFailure::fatal(ErrorKind::Io(5), format!("no node has '{}'", manifest.at.key)));
            }
            return Ok(replaced);
        }
        for slice in replaced.pieces.iter_mut().flat_map(|piece| &mut piece.slices) {
            let alive: Vec<String> = slice.holders.iter().filter(|node| !avoided.contains(*node)).cloned().collect();
            if alive.is_empty() {
                return Err(RequestFailure::fatal(ErrorKind::Io(5), format!("no node has '{}'", manifest.at.key)));
            }
            let completed = self.complete_holders(&slice.holders, avoided, refused, wanted)?;
            for node in completed.iter().filter(|node| !alive.contains(node)) {
                self.copy_part(&alive, &slice.part, node)?;
            }
            slice.holders = completed;
        }
        replaced.holders = holders_of(&replaced.pieces);
        Ok(replaced)
    }

    /// Has the first of these nodes that can send a part to another.
    fn copy_part(self: &Arc<Self>, sources: &[String], part: &str, to: &str) -> Answer<()> {
        let mut last = too_few_domains();
        for source in sources {
            let call = StageCall::SendPart { part: part.to_owned(), to: to.to_owned() };
            match self.shared.ask(source, &call, &[], 12 * STAGE_CALL_TIME) {
                Ok(_) => return Ok(()),
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    /// A further node to know what these know, if they are of too few domains.
    pub(super) fn further_holder(
        &self,
        told: &BTreeSet<String>,
        tried: &BTreeSet<String>,
        wanted: usize,
    ) -> Answer<Option<String>> {
        let domains: BTreeSet<String> = told.iter().filter_map(|node| self.nodes.domain_of(node)).collect();
        if domains.len() >= wanted {
            return Ok(None);
        }
        self.nodes.pick(&domains, tried).map(Some).ok_or_else(too_few_domains)
    }

    /// These nodes without lost nodes, and others, until there are enough domains.
    fn complete_holders(
        &self,
        holders: &[String],
        lost: &BTreeSet<String>,
        refused: &BTreeSet<String>,
        wanted: usize,
    ) -> Answer<Vec<String>> {
        let mut alive: Vec<String> = holders.iter().filter(|node| !lost.contains(*node)).cloned().collect();
        let mut domains: BTreeSet<String> = alive.iter().filter_map(|node| self.nodes.domain_of(node)).collect();
        while domains.len() < wanted {
            let Some(node) = self.nodes.pick(&domains, refused) else { return Err(too_few_domains()) };
            domains.extend(self.nodes.domain_of(&node));
            alive.push(node);
        }
        Ok(alive)
    }

    /// Looks at all nodes and at the registry once: nodes that answer, are lost or are new, and whether this leader is still the leader.
    /// Returns the registry's record.
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
                    Some(known) if !known.is_silent && known.facts.process == facts.process => {
                        self.nodes.note(&node, facts);
                    }
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
        let known = match record {
            Ok((version, facts)) => Some(self.change_nodes(Some(version), facts, &fresh)),
            Err(_) => {
                let facts = self.facts.lock().clone();
                self.change_nodes(None, facts, &fresh);
                None
            }
        };
        self.expire_scratch();
        self.set_gauges();
        known
    }

    /// Takes nodes that are new or back, and gives up those that are gone. Without the registry (no `version`), only nodes are taken whose
    /// record stays as it is.
    fn change_nodes(
        self: &Arc<Self>,
        version: Option<u64>,
        facts: TermFacts,
        fresh: &[(String, NodeFacts)],
    ) -> TermFacts {
        let mut changed = facts.clone();
        let mut welcomed = Vec::new();
        for (node, node_facts) in fresh {
            if version.is_none() && !is_recorded(&facts, node, node_facts) {
                continue;
            }
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
        let is_welcomed = |node: &str| welcomed.iter().any(|(other, _)| *other == node);
        let gone = changed.nodes.keys().filter(|node| self.nodes.is_gone(node) && !is_welcomed(node));
        let gone: Vec<String> = gone.cloned().collect();
        let gone: Vec<String> = gone.into_iter().filter(|node| !self.has_objects(node)).collect();
        changed.nodes.retain(|node, _| !gone.contains(node));
        changed.lacking = self.lacking_nodes(&facts, &welcomed);
        let has_told = |node: &str| self.nodes.has_told(node) || is_welcomed(node);
        let is_complete = missing_domains(&changed, has_told).len() < DOMAINS;
        let mut current = self.nodes.disks();
        current.extend(welcomed.iter().map(|(node, node_facts)| ((*node).clone(), node_facts.disk)));
        current.retain(|node, _| changed.nodes.contains_key(node));
        if is_complete || self.is_complete.load(Ordering::Acquire) {
            changed.current = current;
        } else {
            changed.current.extend(current);
        }
        let is_changed = changed == facts || version.is_some_and(|version| self.replace_record(version, &changed));
        for (node, node_facts) in welcomed {
            if is_changed || is_recorded(&facts, node, node_facts) {
                self.nodes.note(node, node_facts.clone());
                self.ledger.lock().note_back(node);
            }
        }
        if !is_changed {
            return facts;
        }
        if is_complete {
            self.is_complete.store(true, Ordering::Release);
        }
        gone.iter().for_each(|node| self.nodes.forget(node));
        self.facts.lock().clone_from(&changed);
        changed
    }

    /// The nodes that may lack objects that were staged there: those that this leader has not heard, and those with lost objects. A leader
    /// that does not know all objects does not know which nodes these are.
    fn lacking_nodes(&self, facts: &TermFacts, welcomed: &[(&String, &NodeFacts)]) -> BTreeSet<String> {
        let mut lacking = if self.is_complete.load(Ordering::Acquire) {
            facts.nodes.keys().filter(|node| !self.nodes.has_told(node)).cloned().collect()
        } else {
            let is_replaced = |node: &str, disk: u64| facts.current.get(node).is_some_and(|known| *known != disk);
            let replaced = welcomed.iter().filter(|(node, node_facts)| is_replaced(node, node_facts.disk));
            let mut lacking = facts.lacking.clone();
            lacking.extend(replaced.map(|(node, _)| (*node).clone()));
            lacking.retain(|node| facts.nodes.contains_key(node));
            lacking
        };
        lacking.extend(self.ledger.lock().lacking_nodes());
        lacking
    }

    fn replace_record(&self, version: u64, changed: &TermFacts) -> bool {
        match self.record.replace(version, changed) {
            Ok(replaced) => replaced,
            Err(error) => {
                tracing::debug!("the registry does not record the nodes with staged files: {error}");
                false
            }
        }
    }

    fn has_objects(&self, node: &str) -> bool {
        self.ledger.lock().entries.values().any(|entry| entry.manifest.is_at(node))
    }

    /// Has a node that is new or was away follow this term, and forget what others know to be done.
    fn welcome(self: &Arc<Self>, node: &str) -> Answer<()> {
        let (_, manifests) = self.shared.fence(node, self.term)?;
        let old = self.note_records(node, manifests);
        if !old.is_empty() {
            self.order(node, &StageCall::Forget { term: self.term, records: old }, &[])?;
        }
        self.ledger.lock().unheard_nodes.remove(node);
        Ok(())
    }

    /// Compares the records of a node with those of others; the records that the node is to forget.
    pub(super) fn note_records(&self, node: &str, manifests: Vec<Manifest>) -> Vec<String> {
        let mut old = Vec::new();
        let mut ledger = self.ledger.lock();
        let mut found: BTreeSet<String> = BTreeSet::new();
        let is_complete = self.is_complete.load(Ordering::Acquire);
        for manifest in manifests {
            if manifest.phase == Phase::Done && !is_complete {
                ledger.note_done(&manifest, &node.to_owned());
                continue;
            }
            // An earlier leader has withdrawn the object there, and this leader has found that at other nodes.
            let is_waiting = ledger.entry_of(&manifest).is_some_and(|entry| entry.manifest.phase == Phase::Waiting);
            if is_waiting && !manifest.is_live() {
                old.push(manifest.record);
                continue;
            }
            found.insert(manifest.record.clone());
            // A call that is under way decides.
            if ledger.in_flight.contains(&manifest.record) {
                continue;
            }
            if let Some(entry) = ledger.entry_of_mut(&manifest) {
                if entry.manifest.is_at(node) {
                    continue;
                }
                // The nodes in the place of this node may not have the object.
                if entry.manifest.phase == Phase::Waiting && !entry.is_confirmed() {
                    entry.manifest.note_holder(&manifest, node);
                    continue;
                }
                // An earlier leader has told the node of the removal: the node is to hear of the end, too.
                if entry.manifest.phase == Phase::Removing && manifest.phase == Phase::Removing {
                    entry.manifest.former.push(node.to_owned());
                    continue;
                }
            }
            if ledger.ended.add_holder(&manifest.record, node) {
                continue;
            }
            // A single node has scratch data: no other could tell this leader of these.
            let is_scratch = manifest.class.domains() < DOMAINS && ledger.unheard_nodes.contains(node);
            let may_be_unknown = is_scratch || !is_complete;
            if ledger.entry_of(&manifest).is_none() && may_be_unknown && manifest.is_live() {
                ledger.adopt(manifest, node, |other| self.nodes.has_told(other));
            } else {
                old.push(manifest.record);
            }
        }
        for entry in ledger.entries.values_mut().filter(|entry| entry.manifest.is_at(node)) {
            entry.unheard.remove(node);
            // A call that is under way may bring the object.
            if found.contains(&entry.manifest.record) {
                entry.missing.remove(node);
            } else {
                entry.missing.insert(node.to_owned());
            }
        }
        ledger.has_missing = true;
        old
    }

    /// Gives objects of lost nodes further holders, until the term is over.
    pub fn run_heals(self: &Arc<Self>) {
        while !self.is_over() {
            std::thread::sleep(HEAL_INTERVAL);
            self.heal();
        }
    }

    fn heal(self: &Arc<Self>) {
        let table = self.nodes.all();
        let lost: BTreeSet<String> =
            table.iter().filter(|(_, node)| node.is_lost()).map(|(name, _)| name.clone()).collect();
        let is_gone = |node: &str| table.get(node).is_none_or(StageNode::is_gone);
        let wounded: Vec<(Manifest, BTreeSet<String>)> = {
            let mut ledger = self.ledger.lock();
            if lost.is_empty() && !ledger.has_missing {
                return;
            }
            ledger.has_missing = ledger.entries.values().any(Entry::is_wounded);
            let entries = ledger.entries.values().filter(|entry| !entry.is_away || entry.manifest.nodes().any(is_gone));
            let lacking = entries.filter_map(|entry| {
                let lost = lost.iter().filter(|node| entry.manifest.is_at(node));
                let lacking: BTreeSet<String> = lost.chain(&entry.missing).cloned().collect();
                (!lacking.is_empty() || entry.is_wounded()).then(|| (entry.manifest.clone(), lacking))
            });
            lacking.collect()
        };
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 1..HEALS_AT_ONCE.min(wounded.len()) {
                scope.spawn(|| self.heal_some(&wounded, &next));
            }
            self.heal_some(&wounded, &next);
        });
    }

    /// Heals the next objects, until all are taken.
    fn heal_some(self: &Arc<Self>, wounded: &[(Manifest, BTreeSet<String>)], next: &AtomicUsize) {
        while let Some((manifest, lacking)) = wounded.get(next.fetch_add(1, Ordering::Relaxed)) {
            if self.is_over() {
                return;
            }
            if let Err(failure) = self.heal_object(manifest, lacking) {
                tracing::debug!("'{}' has no further copy yet: {}", manifest.at.key, failure.error);
                self.note_unhealed(manifest, &failure);
            }
        }
    }

    /// Notes that an object has no further copy. Scratch data and parts that no node has any more are lost.
    fn note_unhealed(&self, manifest: &Manifest, failure: &RequestFailure) {
        let mut ledger = self.ledger.lock();
        let Some(entry) = ledger.entry_of_mut(manifest) else { return };
        entry.error = Some(failure.error.message().to_owned());
        if manifest.class == StageClass::Staged || failure.error.kind() != ErrorKind::Io(5) {
            return;
        }
        let is_lost = |node: &String| entry.missing.contains(node) || self.nodes.is_gone(node);
        let slices = manifest.pieces.iter().flat_map(|piece| &piece.slices);
        let is_slice_lost = slices.map(|slice| &slice.holders).any(|holders| holders.iter().all(is_lost));
        if is_slice_lost || manifest.holders.iter().all(is_lost) {
            ledger.remove(&manifest.at, []);
        } else {
            let is_silent = manifest.nodes().any(|node| self.nodes.is_silent(node));
            entry.is_away = is_silent && matches!(manifest.class, StageClass::Scratch { .. });
        }
    }

    fn heal_object(self: &Arc<Self>, manifest: &Manifest, lacking: &BTreeSet<String>) -> Answer<()> {
        if manifest.phase == Phase::Waiting {
            return self.heal_waiting(manifest, lacking);
        }
        let _lock = self.lock_name(&manifest.at, Instant::now() + STAGE_CALL_TIME)?;
        if self.is_unchanged(manifest) { self.heal_removal(manifest) } else { Ok(()) }
    }

    fn is_unchanged(&self, manifest: &Manifest) -> bool {
        self.ledger.lock().entry_of(manifest).is_some_and(|entry| entry.manifest == *manifest)
    }

    /// Has nodes of two domains know a removal again, of which some were lost. No bytes are needed any more.
    fn heal_removal(self: &Arc<Self>, manifest: &Manifest) -> Answer<()> {
        let told = self.settle(manifest, Phase::Removing)?;
        let mut ledger = self.ledger.lock();
        let Some(entry) = ledger.entry_of_mut(manifest) else { return Ok(()) };
        let before: BTreeSet<String> = entry.manifest.nodes().map(str::to_owned).collect();
        entry.manifest.former.extend(before.difference(&told).cloned());
        entry.manifest.former.retain(|node| !told.contains(node));
        entry.manifest.pieces.clear();
        entry.manifest.holders = told.into_iter().collect();
        entry.missing.clear();
        entry.unheard.clear();
        // A node may have brought earlier objects meanwhile.
        entry.is_untold = entry.manifest.begun != manifest.begun;
        ledger.end_replaced(&manifest.at);
        Ok(())
    }

    /// Removes the parts that a repair has copied for an object that was changed meanwhile.
    fn drop_copies(self: &Arc<Self>, manifest: &Manifest, healed: &Manifest) {
        let before = manifest.pieces.iter().flat_map(|piece| &piece.slices);
        let after = healed.pieces.iter().flat_map(|piece| &piece.slices);
        for (before, after) in before.zip(after) {
            let copies: Vec<String> =
                after.holders.iter().filter(|node| !before.holders.contains(node)).cloned().collect();
            self.call_all(&copies, &StageCall::DropUpload(after.part.clone()), &[]);
        }
    }

    /// Has nodes that lack an object keep the record, if they have the parts: a call that ended early has not told them. Returns the others.
    fn tell_missing(self: &Arc<Self>, manifest: &Manifest, lacking: &BTreeSet<String>) -> BTreeSet<String> {
        if manifest.pieces.is_empty() {
            return lacking.clone();
        }
        let answering: Vec<String> = lacking.iter().filter(|node| !self.nodes.is_silent(node)).cloned().collect();
        let call = StageCall::Hold { term: self.term, manifest: Box::new(manifest.clone()) };
        let results = self.call_all(&answering, &call, &[]);
        let told: BTreeSet<String> =
            results.into_iter().filter(|(_, held)| held.is_ok()).map(|(node, _)| node).collect();
        lacking.difference(&told).cloned().collect()
    }

    /// Gives an object further holders in the place of those that lack it. The name is free while parts are copied: that may take minutes.
    fn heal_waiting(self: &Arc<Self>, manifest: &Manifest, lacking: &BTreeSet<String>) -> Answer<()> {
        if !self.is_unchanged(manifest) {
            return Ok(());
        }
        let lacking = &self.tell_missing(manifest, lacking);
        let mut healed = self.replace_holders(manifest, lacking, &BTreeSet::new(), false)?;
        let _lock = self.lock_name(&manifest.at, Instant::now() + STAGE_CALL_TIME)?;
        if !self.is_unchanged(manifest) {
            self.drop_copies(manifest, &healed);
            return Ok(());
        }
        let _in_flight = self.note_in_flight(&manifest.record);
        healed.revision += 1;
        healed.former.extend(lacking.iter().filter(|node| !healed.is_at(node)).cloned().collect::<Vec<_>>());
        let inline =
            if manifest.pieces.is_empty() { self.shared.read_manifest(manifest)?.to_vec() } else { Vec::new() };
        let call = StageCall::Hold { term: self.term, manifest: Box::new(healed.clone()) };
        let mut failed = None;
        let mut told = Vec::new();
        for (node, result) in self.call_all(&healed.holders, &call, &inline) {
            match result {
                Ok(_) => told.push(node),
                Err(failure) => failed = Some(failure),
            }
        }
        let mut ledger = self.ledger.lock();
        let Some(entry) = ledger.entry_of_mut(manifest) else {
            // The object has ended meanwhile: the new holders are to know that too.
            ledger.end(&healed, Phase::Done, []);
            return Ok(());
        };
        if let Some(failed) = failed {
            // The new holders may have the object.
            let former = std::mem::take(&mut entry.manifest.former);
            let others = healed.nodes().filter(|node| !manifest.is_at(node)).map(str::to_owned);
            entry.manifest.former = former.into_iter().chain(others).collect::<BTreeSet<_>>().into_iter().collect();
            entry.manifest.revision = entry.manifest.revision.max(healed.revision);
            entry.missing.retain(|node| !told.contains(node));
            return Err(failed);
        }
        healed.phase = entry.manifest.phase.max(healed.phase);
        healed.former =
            healed.former.iter().chain(&entry.manifest.former).cloned().collect::<BTreeSet<_>>().into_iter().collect();
        // A node may have brought earlier objects meanwhile.
        let now = &entry.manifest;
        entry.is_untold = now.base != healed.base || now.begun != healed.begun;
        healed.base = now.base.clone();
        healed.begun.clone_from(&now.begun);
        healed.may_be_absent = now.may_be_absent;
        entry.manifest = healed;
        entry.missing.clear();
        entry.unheard.retain(|node| entry.manifest.is_at(node) && !lacking.contains(node) && !told.contains(node));
        entry.error = None;
        ledger.end_replaced(&manifest.at);
        Ok(())
    }
}

/// Whether the registry has the node as one whose objects are known.
fn is_recorded(facts: &TermFacts, node: &str, node_facts: &NodeFacts) -> bool {
    facts.current.get(node) == Some(&node_facts.disk) && facts.nodes.get(node) == Some(&node_facts.domain)
}
