//! The way between the nodes, and the registry, in memory: calls and answers get lost or late, pairs of nodes are cut off, a node is known
//! as long as it renews its name.

use crate::dice::Dice;
use crate::programs::Shared;
use parking_lot::{Condvar, Mutex};
use spurline_stage::{PeerFailure, StagePeers, StageService, TermFacts, TermRecord};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A node that has not renewed its name for this long is not present.
pub const LEASE: Duration = Duration::from_secs(15);
/// The longest wait for a node that says nothing.
const SILENCE: Duration = Duration::from_secs(8);

/// How often calls fail, of a thousand each.
#[derive(Debug, Clone, Copy, Default)]
pub struct CallFaults {
    /// The call does not arrive.
    pub lost: u32,
    /// The answer does not arrive.
    pub answer_lost: u32,
    /// Longest delay of a call, and of an answer, in milliseconds.
    pub max_delay_ms: u32,
}

struct NodeOfNetwork {
    /// The process that runs; 0 for none.
    process: u64,
    service: Option<Arc<StageService>>,
    /// No answer comes at all while no process runs: the host is off.
    is_off: bool,
    is_stopped: bool,
    renewed: Instant,
    /// The registry can't be reached from here.
    is_without_registry: bool,
    /// The names that the node knows.
    names: BTreeSet<String>,
}

struct NetworkState {
    nodes: Vec<NodeOfNetwork>,
    /// From and to.
    cuts: BTreeSet<(usize, usize)>,
    faults: CallFaults,
    is_registry_away: bool,
    registry_faults: CallFaults,
    version: u64,
    facts: TermFacts,
    dice: Dice,
}

/// See the head of this file.
pub struct Network {
    state: Mutex<NetworkState>,
    shared: Arc<Shared>,
}

pub fn name_of(node: usize) -> String {
    format!("node-{node}")
}

fn number_of(name: &str) -> usize {
    name.trim_start_matches("node-").parse().unwrap_or(usize::MAX)
}

/// The threads of a node.
pub fn group_of(node: usize) -> u64 {
    node as u64 + 1
}

#[derive(Clone, Copy)]
enum Way {
    Open,
    /// The sender knows at once that nothing has been sent.
    Refused,
    /// No answer comes.
    Silent,
}

impl NetworkState {
    fn way(&mut self, from: usize, to: usize) -> Way {
        let target = &self.nodes[to];
        let is_off = target.process == 0 && target.is_off;
        if is_off || self.cuts.contains(&(from, to)) {
            return if self.dice.below(3) == 0 { Way::Refused } else { Way::Silent };
        }
        if target.process == 0 { Way::Refused } else { Way::Open }
    }
}

impl Network {
    pub fn new(nodes: usize, seed: u64, shared: &Arc<Shared>) -> Arc<Network> {
        let now = Instant::now();
        let node = |_| NodeOfNetwork {
            process: 0,
            service: None,
            is_off: false,
            is_stopped: false,
            renewed: now,
            is_without_registry: false,
            names: BTreeSet::new(),
        };
        let state = NetworkState {
            nodes: (0..nodes).map(node).collect(),
            cuts: BTreeSet::new(),
            faults: CallFaults::default(),
            is_registry_away: false,
            registry_faults: CallFaults::default(),
            version: 0,
            facts: TermFacts::default(),
            dice: Dice::new(seed),
        };
        Arc::new(Network { state: Mutex::new(state), shared: Arc::clone(shared) })
    }

    /// What a process of the node uses.
    pub fn start_process(self: &Arc<Self>, node: usize, process: u64) -> Arc<NodeLink> {
        let now = Instant::now();
        {
            let mut state = self.state.lock();
            state.nodes[node].process = process;
            state.nodes[node].renewed = now;
        }
        self.renew();
        Arc::new(NodeLink { network: Arc::clone(self), node, process })
    }

    pub fn set_service(&self, node: usize, service: &Arc<StageService>) {
        self.state.lock().nodes[node].service = Some(Arc::clone(service));
    }

    /// Nothing of the process reaches anything from now on.
    pub fn end_process(&self, node: usize, is_off: bool) -> Option<Arc<StageService>> {
        let mut state = self.state.lock();
        state.nodes[node].process = 0;
        state.nodes[node].is_off = is_off;
        state.nodes[node].service.take()
    }

    pub fn set_stopped(&self, node: usize, is_stopped: bool) {
        self.state.lock().nodes[node].is_stopped = is_stopped;
    }

    pub fn cut(&self, from: usize, to: usize) {
        self.state.lock().cuts.insert((from, to));
    }

    pub fn set_without_registry(&self, node: usize, is_without: bool) {
        self.state.lock().nodes[node].is_without_registry = is_without;
    }

    pub fn set_registry_away(&self, is_away: bool) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.is_registry_away = is_away;
        if !is_away {
            state.nodes.iter_mut().filter(|node| node.process != 0).for_each(|node| node.renewed = now);
        }
    }

    pub fn set_faults(&self, calls: CallFaults, registry: CallFaults) {
        let mut state = self.state.lock();
        state.faults = calls;
        state.registry_faults = registry;
    }

    /// Ends all trouble but that of nodes without a process.
    pub fn heal(&self) {
        self.set_faults(CallFaults::default(), CallFaults::default());
        self.set_registry_away(false);
        let mut state = self.state.lock();
        state.cuts.clear();
        state.nodes.iter_mut().for_each(|node| node.is_without_registry = false);
    }

    /// The leader that the registry names.
    pub fn leader(&self) -> Option<usize> {
        let state = self.state.lock();
        (state.facts.term > 0).then(|| number_of(&state.facts.leader)).filter(|node| *node < state.nodes.len())
    }

    pub fn term(&self) -> u64 {
        self.state.lock().facts.term
    }

    /// Nodes renew their names, and learn those of others.
    pub fn renew(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.is_registry_away {
            return;
        }
        let mut names = BTreeSet::new();
        for (number, node) in state.nodes.iter_mut().enumerate() {
            if node.process != 0 && !node.is_stopped && !node.is_without_registry {
                node.renewed = now;
            }
            if now.saturating_duration_since(node.renewed) < LEASE {
                names.insert(name_of(number));
            }
        }
        for node in state.nodes.iter_mut().filter(|node| !node.is_stopped && !node.is_without_registry) {
            node.names = names.clone();
        }
    }
}

/// The other nodes and the registry, as a process has them.
pub struct NodeLink {
    network: Arc<Network>,
    node: usize,
    process: u64,
}

/// The body and the bytes of an answer.
type CallAnswer = Result<(Vec<u8>, Vec<u8>), PeerFailure>;

/// An answer on its way.
#[derive(Default)]
struct AnswerSlot {
    answer: Mutex<Option<CallAnswer>>,
    changed: Condvar,
}

fn away(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, what.to_owned())
}

/// Executes a call at the node, on a thread of the node; nothing if the call or the answer gets lost.
fn deliver(
    network: &Network,
    link: &(usize, usize, u64),
    call: (&[u8], &[u8]),
    delays: [Duration; 2],
    is_answer_lost: bool,
) -> Option<CallAnswer> {
    let (from, to, process) = *link;
    std::thread::sleep(delays[0]);
    let service = {
        let state = network.state.lock();
        let target = &state.nodes[to];
        let is_same = target.process == process && !state.cuts.contains(&(from, to));
        is_same.then(|| target.service.clone()).flatten()
    }?;
    let answer = service.serve_encoded(call.0, call.1).map_err(PeerFailure::Answered);
    drop(service);
    std::thread::sleep(delays[1]);
    let state = network.state.lock();
    let is_lost = is_answer_lost || state.nodes[to].process != process || state.cuts.contains(&(to, from));
    (!is_lost).then_some(answer)
}

impl StagePeers for NodeLink {
    fn names(&self) -> Vec<String> {
        self.network.state.lock().nodes[self.node].names.iter().cloned().collect()
    }

    fn call(
        &self,
        node: &str,
        call: &[u8],
        bytes: &[u8],
        room: usize,
        deadline: Instant,
    ) -> Result<(Vec<u8>, Vec<u8>), PeerFailure> {
        let to = number_of(node);
        let silence = deadline.min(Instant::now() + SILENCE);
        let mut state = self.network.state.lock();
        if state.nodes[self.node].process != self.process {
            return Err(PeerFailure::NotSent(away("the process has ended")));
        }
        let way = state.way(self.node, to);
        let faults = state.faults;
        let drawn = state.dice.below(1000) as u32;
        let is_lost = drawn < faults.lost;
        let is_answer_lost = !is_lost && drawn < faults.lost + faults.answer_lost;
        let most = faults.max_delay_ms.max(2) as usize;
        let delays = [(); 2].map(|()| Duration::from_millis(state.dice.below(most) as u64));
        let process = state.nodes[to].process;
        drop(state);
        match way {
            Way::Open if !is_lost => {}
            Way::Refused => {
                std::thread::sleep(Duration::from_millis(1));
                return Err(PeerFailure::NotSent(away("the node refuses connections")));
            }
            Way::Open | Way::Silent => {
                std::thread::sleep(silence.saturating_duration_since(Instant::now()));
                return Err(PeerFailure::Lost(away("the node says nothing")));
            }
        }
        let slot = Arc::new(AnswerSlot::default());
        let answered = Arc::clone(&slot);
        let network = Arc::clone(&self.network);
        let link = (self.node, to, process);
        let call = (call.to_vec(), bytes.to_vec());
        let work = move || {
            spurline_vtime::set_group(group_of(to));
            let answer = deliver(&network, &link, (&call.0, &call.1), delays, is_answer_lost);
            if let Some(answer) = answer {
                *answered.answer.lock() = Some(answer);
                answered.changed.notify_all();
            }
        };
        std::thread::Builder::new().name("call".into()).spawn(work).expect("a thread");
        let until = if is_answer_lost { silence } else { deadline };
        let mut answer = slot.answer.lock();
        while answer.is_none() {
            if slot.changed.wait_until(&mut answer, until).timed_out() {
                return Err(PeerFailure::Lost(away("no answer in time")));
            }
        }
        let answer = answer.take().expect("there is an answer");
        if let Ok((_, bytes)) = &answer {
            assert!(bytes.len() <= room, "{} bytes in an answer with room for {room}", bytes.len());
        }
        answer
    }
}

impl NodeLink {
    /// Sends a request to the registry.
    fn ask_registry<T>(&self, request: impl FnOnce(&mut NetworkState) -> T) -> Result<T> {
        let mut state = self.network.state.lock();
        let faults = state.registry_faults;
        let delay = state.dice.below(faults.max_delay_ms.max(20) as usize) as u64;
        let drawn = state.dice.below(1000) as u32;
        drop(state);
        std::thread::sleep(Duration::from_millis(delay));
        let mut state = self.network.state.lock();
        let node = &state.nodes[self.node];
        let is_away = state.is_registry_away || node.is_without_registry || node.process != self.process;
        if is_away || drawn < faults.lost {
            drop(state);
            std::thread::sleep(Duration::from_secs(2));
            return Err(away("the registry gives no answer"));
        }
        let answer = request(&mut state);
        drop(state);
        if drawn < faults.lost + faults.answer_lost {
            std::thread::sleep(Duration::from_secs(2));
            return Err(away("the registry gave no answer"));
        }
        Ok(answer)
    }
}

impl TermRecord for NodeLink {
    fn read(&self) -> Result<(u64, TermFacts)> {
        self.ask_registry(|state| (state.version, state.facts.clone()))
    }

    fn replace(&self, version: u64, facts: &TermFacts) -> Result<bool> {
        let replaced = self.ask_registry(|state| {
            let is_same = state.version == version;
            if is_same {
                state.version += 1;
                state.facts = facts.clone();
            }
            is_same
        })?;
        if replaced {
            self.network.shared.tell(format_args!("the registry has {facts:?}"));
        }
        Ok(replaced)
    }
}
