//! The stage of a node: finds or becomes the leader, answers the calls of other nodes, and sends this node's own.
//!
//! | the registry says | this node |
//! |---|---|
//! | another node leads, and is present | sends calls there |
//! | another node leads, and is absent or gives no answer | takes over, if this node keeps staged files |
//! | this process leads | answers calls, as long as the registry or all nodes confirm that |
//! | no node has led ever | takes over likewise; without such a node nothing is staged, and the store is asked |
//! | nothing, for no answer | goes on as before |

use crate::disk::StageDisk;
use crate::holder::Holder;
use crate::leader::{Leader, take_over};
use crate::manifest::{BucketKey, Manifest};
use crate::message::{Answer, Located, Reply, StageCall, StageReply, unexpected};
use crate::peers::{PeerFailure, StagePeers, TermFacts, TermRecord, decode_call, no_leader, reply_of, succeeded};
use crate::shared::{OpenStore, StageShared, UploadMemory};
use parking_lot::{Condvar, Mutex, RwLock};
use spurline_object_store::{RequestFailure, RetryHint};
use spurline_sys::random;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How often a node looks at the registry and a leader at its nodes.
const REGISTRY_LOOK: Duration = Duration::from_secs(1);
/// How often a node looks at the registry that keeps no staged objects: leaders tell all nodes.
const BYSTANDER_INTERVAL: Duration = Duration::from_secs(5);
/// A leader that calls once a second, and has not for this long, is asked.
const LEADER_SILENCE: Duration = Duration::from_millis(1500);
/// A node that a leader has called within this time is a witness of that leader.
const WITNESS_SILENCE: Duration = Duration::from_millis(2500);
/// A leader that takes calls and gives no answers is abandoned after this time.
const LONG_SILENCE: Duration = Duration::from_secs(5);
/// A node that does not reach enough others to know all that is staged leads after this time only, if no other does.
const LAST_RESORT: Duration = Duration::from_secs(60);
/// The time that such a node leaves to others.
const CANDIDATE_REST: Duration = Duration::from_secs(5);
/// Nodes that are asked whether they hear the leader.
const WITNESSES: usize = 8;
/// How often parts are looked for that nothing names.
const ORPHAN_INTERVAL: Duration = Duration::from_secs(3600);
/// Longest time until a call has reached a leader.
const LEADER_TIME: Duration = Duration::from_secs(15);
const LEADER_PAUSE: Duration = Duration::from_millis(100);
/// The time of a call to the leader.
const ANSWER_TIME: Duration = Duration::from_secs(25);

/// A node that has failed to take a part is tried last for this long.
const REFUSED_TIME: Duration = Duration::from_secs(10);
/// The place of an object is believed for this long.
const LOCATED_TIME: Duration = Duration::from_secs(2);
const LOCATED_MAX: usize = 64;

struct LocatedManifest {
    manifest: Arc<Manifest>,
    when: Instant,
}

/// The place of a node for staged files.
pub struct StageSpace {
    /// The failure domain.
    pub domain: String,
    /// Most bytes.
    pub size: u64,
    /// The disks.
    pub disk: Arc<dyn StageDisk>,
}

/// What a [`StageService`] is made of.
pub struct StageParts {
    /// The node's name in the group.
    pub name: String,
    /// Disks for staged objects, if the node keeps any.
    pub space: Option<StageSpace>,
    /// The other nodes.
    pub peers: Arc<dyn StagePeers>,
    /// The registry's record.
    pub record: Arc<dyn TermRecord>,
    /// Opens the stores.
    pub open_store: Box<OpenStore>,
    /// Counters.
    pub stats: Arc<Stats>,
    /// Uploads at once.
    pub uploads: usize,
    /// Memory of the bytes on their way to the store.
    pub upload_memory: u64,
}

/// The place of a stage that starts after the stores are open.
#[derive(Default)]
pub struct StageSlot {
    service: OnceLock<Arc<StageService>>,
    /// The node has kept objects before: nothing is known of names until the stage runs.
    is_awaited: AtomicBool,
}

impl StageSlot {
    /// Until the stage runs, requests wait for its start.
    pub fn await_start(&self) {
        self.is_awaited.store(true, Ordering::Release);
    }

    /// The stage runs. Only the first call has an effect.
    pub fn set(&self, service: Arc<StageService>) {
        let _ = self.service.set(service);
    }

    /// Answers a call of another node, as encoded there.
    ///
    /// # Errors
    /// Before the start of the stage; for a call that this release does not know.
    pub fn serve_encoded(&self, call: &[u8], bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
        self.service().map_err(|failure| failure.error)?.serve_encoded(call, bytes)
    }

    /// The stage.
    ///
    /// # Errors
    /// Before its start.
    pub(crate) fn service(&self) -> Answer<&Arc<StageService>> {
        self.service.get().ok_or_else(no_leader)
    }

    /// See [`StageService::is_in_use`].
    pub(crate) fn is_in_use(&self) -> Answer<bool> {
        match self.service.get() {
            Some(service) => service.is_in_use(),
            None if self.is_awaited.load(Ordering::Acquire) => Err(no_leader()),
            None => Ok(false),
        }
    }
}

/// A node that tries to take the leadership.
struct CandidateTimes {
    since: Instant,
    /// Others come first.
    rests_until: Instant,
}

struct HeardLeader {
    term: u64,
    when: Instant,
}

/// See the head of this file.
pub struct StageService {
    shared: Arc<StageShared>,
    record: Arc<dyn TermRecord>,
    /// Identifies this process in the registry.
    instance: u64,
    uploads: usize,
    /// The registry's last answer.
    known: RwLock<Option<TermFacts>>,
    leader: RwLock<Option<Arc<Leader>>>,
    /// When a leader has called this node last.
    heard: Mutex<HeardLeader>,
    candidate: Mutex<Option<CandidateTimes>>,
    /// When nodes have failed to take a part.
    refused_parts: Mutex<HashMap<String, Instant>>,
    /// Where bytes lie, of objects that were read lately.
    located: Mutex<Vec<LocatedManifest>>,
    stop: Mutex<bool>,
    stopped: Condvar,
}

impl StageService {
    /// Starts the stage of a node.
    ///
    /// # Errors
    /// The disk's; when a thread can't be started.
    pub fn start(parts: StageParts) -> Result<Arc<StageService>> {
        let StageParts { name, space, peers, record, open_store, stats, uploads, upload_memory } = parts;
        let upload_memory = UploadMemory::new(upload_memory);
        let holder = match space {
            Some(StageSpace { domain, size, disk }) => Some(Holder::open(&name, &domain, size, disk)?),
            None => None,
        };
        let shared =
            Arc::new(StageShared { name, holder, peers, stats, upload_memory, open_store, stores: Mutex::default() });
        let service = Arc::new(StageService {
            shared,
            record,
            instance: random(),
            uploads,
            known: RwLock::default(),
            leader: RwLock::default(),
            heard: Mutex::new(HeardLeader { term: 0, when: Instant::now() }),
            located: Mutex::default(),
            refused_parts: Mutex::default(),
            candidate: Mutex::default(),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
        });
        if let Ok((_, facts)) = service.record.read() {
            *service.known.write() = Some(facts);
        }
        let looking = Arc::downgrade(&service);
        start_thread("stage", move || look_often(&looking))?;
        Ok(service)
    }

    /// Answers a call of another node, as encoded there.
    ///
    /// # Errors
    /// For a call that this release does not know.
    pub fn serve_encoded(&self, call: &[u8], bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
        let (call, bytes) = decode_call(call, bytes)?;
        let Reply { reply, bytes } = self.serve(call, bytes);
        let body = serde_json::to_vec(&reply)
            .map_err(|error| Error::new(ErrorKind::Protocol, format!("an answer about staged files: {error}")))?;
        Ok((body, bytes))
    }

    fn serve(&self, call: StageCall, bytes: &[u8]) -> Reply {
        if let StageCall::Describe { term, leader } | StageCall::Fence { term, leader } = &call {
            self.note_leader(*term, leader);
        }
        if let StageCall::HearsLeader { term } = &call {
            return reply_of(self.has_heard(*term).map(Reply::from));
        }
        let leader = self.leader.read().clone();
        if let (Some(leader), StageCall::Describe { term, .. } | StageCall::Fence { term, .. }) = (&leader, &call) {
            // From the answer on, the new leader may answer otherwise.
            leader.step_down_before(*term);
        }
        match leader {
            Some(leader) => leader.serve_any(call, bytes),
            None => reply_of(self.shared.serve(call, bytes)),
        }
    }

    fn note_leader(&self, term: u64, leader: &str) {
        {
            let mut heard = self.heard.lock();
            if term >= heard.term {
                *heard = HeardLeader { term, when: Instant::now() };
            }
        }
        let mut known = self.known.write();
        let is_newer = known.as_ref().is_none_or(|known| known.term < term);
        if is_newer {
            let facts = known.clone().unwrap_or_default();
            *known = Some(TermFacts { term, leader: leader.to_owned(), instance: 0, ..facts });
        }
    }

    /// Whether objects of this group may be staged.
    ///
    /// # Errors
    /// Before the first word of the registry or of a leader: staged objects may be missing at the store.
    pub fn is_in_use(&self) -> Answer<bool> {
        match self.known.read().as_ref() {
            Some(known) => Ok(known.term > 0),
            None => Err(no_leader()),
        }
    }

    /// Sends a call to the leader, and waits for one if there is none. A call without an answer is sent again, for each may be.
    ///
    /// # Errors
    /// The call's.
    pub fn ask_leader(&self, call: &StageCall, bytes: &[u8]) -> Answer<Reply> {
        let deadline = Instant::now() + LEADER_TIME;
        let mut maybe_executed = false;
        loop {
            let failure = match self.try_leader(call, bytes) {
                Ok(reply) => match reply.reply {
                    StageReply::NotLeader(_) => no_leader(),
                    _ => match succeeded(reply) {
                        Err(failure) if failure.advice != RetryHint::Never => {
                            maybe_executed = true;
                            failure
                        }
                        // The caller is to know that an earlier attempt may have had success.
                        Err(failure) if maybe_executed && call.is_change() => {
                            let why = format!("an earlier answer was lost, and now: {}", failure.error.message());
                            return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
                        }
                        answer => return answer,
                    },
                },
                Err(failure) => {
                    maybe_executed = true;
                    failure
                }
            };
            if Instant::now() >= deadline || *self.stop.lock() {
                return Err(failure);
            }
            std::thread::sleep(LEADER_PAUSE);
        }
    }

    fn try_leader(&self, call: &StageCall, bytes: &[u8]) -> Answer<Reply> {
        let name = self.known.read().as_ref().map(|known| known.leader.clone()).ok_or_else(no_leader)?;
        if name == self.shared.name {
            let leader = self.leader.read().clone().ok_or_else(no_leader)?;
            return Ok(leader.serve_any(call.clone(), bytes));
        }
        self.shared.call(&name, call, bytes, ANSWER_TIME + call.work_time()).map_err(|failure| match failure {
            PeerFailure::Answered(error) => crate::peers::failure_of(error),
            other => RequestFailure::transient(ErrorKind::Unavailable, other.into_error().message().to_owned()),
        })
    }

    /// Where the bytes of a version lie, as the leader said lately; `None` if the version is not staged any more.
    pub(crate) fn locate(&self, at: &BucketKey, etag: &str) -> Answer<Located> {
        let now = Instant::now();
        {
            let mut located = self.located.lock();
            located.retain(|known| now.saturating_duration_since(known.when) < LOCATED_TIME);
            if let Some(known) = located.iter().find(|known| known.manifest.etag() == etag && known.manifest.at == *at)
            {
                return Ok(Located::Here(Box::new((*known.manifest).clone())));
            }
        }
        let call = StageCall::Locate { at: at.clone(), etag: etag.to_owned() };
        let found = match self.ask_leader(&call, &[])?.reply {
            StageReply::Located(found) => found,
            other => return Err(unexpected(&other)),
        };
        if let Located::Here(manifest) = &found {
            let mut located = self.located.lock();
            if located.len() >= LOCATED_MAX {
                located.remove(0);
            }
            located.push(LocatedManifest { manifest: Arc::new((**manifest).clone()), when: now });
        }
        Ok(found)
    }

    /// Reads of a version have failed: the leader is asked again.
    pub(crate) fn forget_located(&self, etag: &str) {
        self.located.lock().retain(|known| known.manifest.etag() != etag);
    }

    /// The parts that this node shares with the leader.
    pub(crate) fn shared(&self) -> &Arc<StageShared> {
        &self.shared
    }

    /// The present nodes that keep objects, with their failure domains.
    pub(crate) fn known_nodes(&self) -> Vec<(String, String)> {
        let Some(known) = self.known.read().clone() else { return Vec::new() };
        let present = self.shared.peers.names();
        known.nodes.into_iter().filter(|(node, _)| present.contains(node)).collect()
    }

    /// A node has failed to take a part.
    pub(crate) fn note_refused_part(&self, node: &str) {
        self.refused_parts.lock().insert(node.to_owned(), Instant::now());
    }

    /// Whether a node has failed to take a part lately.
    pub(crate) fn has_refused_part(&self, node: &str) -> bool {
        self.refused_parts.lock().get(node).is_some_and(|when| when.elapsed() < REFUSED_TIME)
    }

    /// Whether two nodes of different failure domains keep objects now, as far as this node knows.
    pub fn can_stage(&self) -> bool {
        let domains: BTreeSet<String> = self.known_nodes().into_iter().map(|(_, domain)| domain).collect();
        domains.len() >= crate::leader::DOMAINS
    }

    /// Has this node take no further objects, or take them again.
    pub fn set_closed(&self, is_closed: bool) {
        if let Some(holder) = &self.shared.holder {
            holder.set_closed(is_closed);
        }
    }

    /// The number of staged objects that this node keeps.
    pub fn kept_objects(&self) -> usize {
        self.shared.holder.as_ref().map_or(0, Holder::kept_objects)
    }

    /// Waits until the group has uploaded everything, as long as `patience`; the number of objects left.
    pub fn drain(&self, patience: Duration) -> usize {
        let deadline = Instant::now() + patience;
        loop {
            let left = self.kept_objects();
            if left == 0 || Instant::now() >= deadline {
                return left;
            }
            std::thread::sleep(LEADER_PAUSE);
        }
    }

    /// Ends the stage: another node takes over.
    pub fn stop(&self) {
        *self.stop.lock() = true;
        self.stopped.notify_all();
        let leader = self.leader.write().take();
        if let Some(leader) = leader {
            leader.resign();
        }
    }

    /// Waits; true at the end.
    fn pause(&self, time: Duration) -> bool {
        let mut stop = self.stop.lock();
        if !*stop {
            self.stopped.wait_for(&mut stop, time);
        }
        *stop
    }

    /// Looks at the registry once, and takes over if no node leads.
    fn look(self: &Arc<Self>) {
        let leader = self.leader.read().clone();
        if let Some(leader) = leader {
            let facts = leader.look_at_nodes();
            if !leader.is_over() {
                if facts.is_some() {
                    *self.known.write() = facts;
                }
                return;
            }
            *self.leader.write() = None;
        }
        let Ok((_, facts)) = self.record.read() else { return };
        let present = self.shared.peers.names();
        let has_leader = facts.term > 0 && facts.leader != self.shared.name && present.contains(&facts.leader);
        let has_leader = has_leader && self.hears_leader(&facts);
        let is_newest = self.known.read().as_ref().is_none_or(|known| known.term <= facts.term);
        if is_newest {
            *self.known.write() = Some(facts.clone());
        }
        // Until the registry lists this node, others may not reach it.
        let is_listed = present.contains(&self.shared.name);
        if has_leader || self.shared.holder.is_none() || !is_listed {
            if has_leader {
                *self.candidate.lock() = None;
            }
            return;
        }
        let now = Instant::now();
        let is_last_resort = {
            let mut candidate = self.candidate.lock();
            let candidate = candidate.get_or_insert(CandidateTimes { since: now, rests_until: now });
            if now < candidate.rests_until {
                return;
            }
            candidate.since.elapsed() >= LAST_RESORT
        };
        match take_over(&self.shared, &self.record, self.instance, is_last_resort) {
            Ok(Some(leader)) => {
                *self.candidate.lock() = None;
                self.begin_term(leader);
            }
            Ok(None) => {
                if let Some(candidate) = &mut *self.candidate.lock() {
                    candidate.rests_until = Instant::now() + CANDIDATE_REST;
                }
            }
            Err(error) => tracing::debug!("the order of staged files is not taken over: {error}"),
        }
    }

    /// Whether the leader has called this node lately, or answers.
    fn hears_leader(&self, facts: &TermFacts) -> bool {
        {
            // A leader that is new has its time, too.
            let mut heard = self.heard.lock();
            if heard.term < facts.term {
                *heard = HeardLeader { term: facts.term, when: Instant::now() };
            }
            if heard.when.elapsed() < LEADER_SILENCE {
                return true;
            }
        }
        let call = StageCall::Describe { term: facts.term, leader: facts.leader.clone() };
        match self.shared.call(&facts.leader, &call, &[], REGISTRY_LOOK) {
            Ok(_) => {
                self.heard.lock().when = Instant::now();
                return true;
            }
            // No process listens there, or no way leads there.
            Err(PeerFailure::NotSent(_)) => {}
            Err(_) if self.heard.lock().when.elapsed() < LONG_SILENCE => return true,
            Err(_) => {}
        }
        // Two nodes that do not reach each other would take the lead from each other for ever.
        let call = StageCall::HearsLeader { term: facts.term };
        let others = self.shared.peers.names().into_iter();
        let others = others.filter(|node| *node != facts.leader && *node != self.shared.name);
        others.take(WITNESSES).any(|node| {
            let answer = self.shared.call(&node, &call, &[], REGISTRY_LOOK);
            answer.is_ok_and(|reply| matches!(reply.reply, StageReply::Done))
        })
    }

    fn has_heard(&self, term: u64) -> Answer<StageReply> {
        let heard = self.heard.lock();
        let is_recent = heard.term == term && heard.when.elapsed() < WITNESS_SILENCE;
        if is_recent { Ok(StageReply::Done) } else { Err(no_leader()) }
    }

    fn begin_term(self: &Arc<Self>, leader: Arc<Leader>) {
        let facts = leader.look_at_nodes();
        if facts.is_some() {
            *self.known.write() = facts;
        }
        *self.leader.write() = Some(Arc::clone(&leader));
        let mut started = Ok(());
        for _ in 0..self.uploads.max(1) {
            let leader = Arc::clone(&leader);
            started = started.and_then(|()| start_thread("stage-upload", move || leader.run_uploads()));
        }
        let ending = Arc::clone(&leader);
        started = started.and_then(|()| start_thread("stage-ends", move || ending.run_ends()));
        let healing = Arc::clone(&leader);
        started = started.and_then(|()| start_thread("stage-heals", move || healing.run_heals()));
        if let Err(error) = started {
            leader.step_down(error.message());
        }
    }
}

impl Drop for StageService {
    fn drop(&mut self) {
        self.stop();
    }
}

fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map(drop).map_err(|error| Error::io("a thread for staged files", &error))
}

fn look_often(service: &Weak<StageService>) {
    let mut swept = Instant::now();
    while let Some(service) = service.upgrade() {
        service.look();
        if let Some(holder) = &service.shared.holder {
            holder.remove_lapsed();
        }
        if swept.elapsed() >= ORPHAN_INTERVAL {
            swept = Instant::now();
            if let Some(holder) = &service.shared.holder {
                holder.sweep();
            }
        }
        let interval = if service.shared.holder.is_some() { REGISTRY_LOOK } else { BYSTANDER_INTERVAL };
        if service.pause(interval) {
            return;
        }
    }
}
