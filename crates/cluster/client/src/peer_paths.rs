//! The one place that ranks the paths to a node: rails while any of them carries data, then TCP, unless `--transport
//! rdma` rules out TCP. It does not know how a path is connected, what requests contain, or when a node counts as lost.

use crate::node_rails::{NodeRails, RailSet};
use parking_lot::Mutex;
use spurline_transport::{CallError, ChannelLease, DemandPool, PeerReach};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The kind of path that the next request to a node takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPath {
    /// At least one rail path carries data.
    Rails,
    /// No rail path carries data, or there is none.
    Tcp,
    /// No rail path carries data, and TCP is ruled out.
    RuledOut,
}

/// Reason of a failed attempt.
pub(crate) enum PeerFailure {
    /// The node answered with an error.
    Answered(Error),
    /// The node was unreachable, or the connection broke.
    Broken(Error),
    /// The node refuses to serve this mount, for example because of another source. Waiting does not help; another
    /// node may.
    Refused(Error),
}

/// One call of a node.
#[derive(Clone, Copy)]
pub(crate) struct PathCall {
    /// The address of the bytes, whose NUMA node decides between equal rails.
    pub lands: Option<usize>,
    pub deadline: Instant,
    /// A request on an idle TCP connection that the node has closed is repeated once on another.
    pub may_repeat: bool,
    /// The only process of the node that may get the request, by the number in its handshake.
    pub process: Option<u64>,
}

/// Two or more rail paths that carry data, for a read in parts.
pub(crate) struct SplitRails {
    pub rails: Arc<RailSet>,
    /// Bit mask of the local rails near the destination.
    pub near: u64,
}

/// The paths to one node.
pub(crate) struct PeerPaths {
    tcp: DemandPool,
    /// Set once: the size of their buffers depends on the node's first answer.
    rails: OnceLock<Arc<NodeRails>>,
    /// Processes of this node that have ended.
    ended: Mutex<HashSet<u64>>,
}

impl PeerPaths {
    /// TCP alone.
    pub fn new(tcp: DemandPool) -> Self {
        PeerPaths { tcp, rails: OnceLock::new(), ended: Mutex::default() }
    }

    /// Adds rails. Only the first call has an effect.
    pub fn set_rails(&self, rails: NodeRails) {
        // Requests may already use the first set.
        let _ = self.rails.set(Arc::new(rails));
    }

    pub fn tcp(&self) -> &DemandPool {
        &self.tcp
    }

    pub fn rails(&self) -> Option<&Arc<NodeRails>> {
        self.rails.get()
    }

    /// The kind of path that the next request takes.
    pub fn data_path(&self) -> DataPath {
        match self.rails.get() {
            Some(rails) if rails.up_count() > 0 => DataPath::Rails,
            Some(rails) if rails.is_forced() => DataPath::RuledOut,
            _ => DataPath::Tcp,
        }
    }

    /// Whether any path is connected, as far as is known.
    pub fn is_up(&self) -> bool {
        if self.data_path() == DataPath::Rails {
            return true;
        }
        match self.tcp.reach() {
            PeerReach::Up => true,
            // One channel broke; others may be in use.
            PeerReach::Unknown => self.tcp.open_count() > 0,
            PeerReach::Down { .. } => false,
        }
    }

    /// Whether no path is connected and the last attempt over TCP failed.
    pub fn is_down(&self) -> bool {
        self.data_path() != DataPath::Rails && matches!(self.tcp.reach(), PeerReach::Down { .. })
    }

    /// Whether a connection to the node stands and none broke since the last answer.
    pub fn is_connected(&self) -> bool {
        // Where rails carry the data, TCP connections may be closed.
        self.data_path() == DataPath::Rails || self.tcp.reach() == PeerReach::Up && self.tcp.open_count() > 0
    }

    /// The rails for a read in parts; `None` while fewer than two carry data.
    pub fn several_rails(&self, lands: Option<usize>) -> Option<SplitRails> {
        let rails = self.rails.get().filter(|rails| rails.up_count() > 1)?;
        Some(SplitRails { rails: rails.current()?, near: rails.near_mask(lands) })
    }

    /// One attempt on the node: over one rail after the other while they break, then over TCP.
    pub fn call<T>(
        &self,
        call: PathCall,
        ask: &mut dyn FnMut(&mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T, PeerFailure> {
        if let Some(rails) = self.rails.get() {
            if let Some(result) = self.call_over_rails(rails, call, ask) {
                return result;
            }
            if rails.is_forced() {
                return Err(PeerFailure::Broken(rails.unavailable_error()));
            }
        }
        self.call_over_tcp(call, ask)
    }

    fn has_ended(&self, process: Option<u64>) -> bool {
        process.is_some_and(|process| self.ended.lock().contains(&process))
    }

    /// Another process of the node runs.
    fn process_ended(&self, process: Option<u64>) -> PeerFailure {
        self.ended.lock().extend(process);
        let why = format!("node {} was started again", self.tcp.peer());
        PeerFailure::Answered(Error::new(ErrorKind::Stale, why))
    }

    /// `None` when no rail path carries data, or no longer.
    fn call_over_rails<T>(
        &self,
        rails: &NodeRails,
        PathCall { lands, deadline, process, .. }: PathCall,
        ask: &mut dyn FnMut(&mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
    ) -> Option<Result<T, PeerFailure>> {
        let near = rails.near_mask(lands);
        while let Some(current) = rails.current() {
            let mut lease = match current.pool.checkout(deadline, near) {
                Ok(lease) => lease?,
                Err(error) => return Some(Err(PeerFailure::Broken(error))),
            };
            if is_of_another(&lease, process) {
                // A new TCP connection tells which of the two processes runs.
                return rails.is_forced().then(|| Err(self.process_ended(process)));
            }
            match ask(&mut lease, deadline) {
                Ok(value) => return Some(Ok(value)),
                Err(CallError::Answered(error)) => return Some(Err(PeerFailure::Answered(error))),
                // Past its own deadline: no other path can help.
                Err(CallError::Broken(error)) if Instant::now() >= deadline => {
                    return Some(Err(PeerFailure::Broken(error)));
                }
                Err(CallError::Broken(error)) => {
                    tracing::debug!(peer = %self.tcp.peer(), %error, "a request moves to another path");
                    lease.count_retry();
                }
            }
        }
        None
    }

    /// A node closes idle connections when it needs their slots; a request on such a connection may be repeated once
    /// on another. An idle connection can be that of a process that has ended, without notice yet, so only a new connection
    /// shows that another process runs.
    fn call_over_tcp<T>(
        &self,
        PathCall { deadline, mut may_repeat, process, .. }: PathCall,
        ask: &mut dyn FnMut(&mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T, PeerFailure> {
        loop {
            let mut lease = self.tcp.checkout(deadline).map_err(failure_to_connect)?;
            if is_of_another(&lease, process) {
                if !lease.was_idle() || self.has_ended(process) {
                    return Err(self.process_ended(process));
                }
                lease.discard_channel();
                continue;
            }
            match ask(&mut lease, deadline) {
                Ok(value) => return Ok(value),
                Err(CallError::Answered(error)) => return Err(PeerFailure::Answered(error)),
                Err(CallError::Broken(error)) => {
                    let ended = error.kind() == ErrorKind::Unavailable && lease.was_idle();
                    if !ended || !std::mem::take(&mut may_repeat) || Instant::now() >= deadline {
                        return Err(PeerFailure::Broken(error));
                    }
                }
            }
        }
    }
}

/// Whether a connection leads to another process than the one that may get the request.
fn is_of_another(lease: &ChannelLease<'_>, process: Option<u64>) -> bool {
    process.is_some_and(|process| process != lease.welcome().instance)
}

fn failure_to_connect(error: Error) -> PeerFailure {
    match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::Unsupported | ErrorKind::Invalid => PeerFailure::Refused(error),
        // Of no use to this mount now, though it may serve others.
        ErrorKind::Throttled => PeerFailure::Broken(Error::new(ErrorKind::Unavailable, error.message())),
        _ => PeerFailure::Broken(error),
    }
}
