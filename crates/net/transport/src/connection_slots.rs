//! The connection slots of a server: how many there are, and which connection gives a slot to a new connection. Knows neither the
//! bytes of a connection, nor how connections are accepted, nor the meaning of requests.

use crate::{ConnState, PooledServer, Responder, Service};
use parking_lot::Mutex;
use spurline_proto::{HelloRequest, NodeRequest, WelcomeAnswer};
use spurline_trust::RefusalReason;
use spurline_types::stats::Metric;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A slot in this many is reserved for control connections, so that handshakes and heartbeats succeed when all others are in use.
const CONTROL_SHARE: usize = 8;
/// Parked connections examined to free a slot. Where requests wait for workers, the requests are on the connections parked
/// longest.
const MAX_EXAMINED: usize = 64;
/// Interval of the warning that slots are short.
const SLOTS_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A connection that holds a slot.
pub trait SlotHolder {
    /// The state shared with the transport.
    fn conn_state(&self) -> &ConnState;

    /// Whether a parked connection may be closed for another, because no unread bytes have arrived. False where closing would
    /// cost the peer more than a new connection.
    fn is_evictable(&self) -> bool {
        false
    }
}

/// The slot offered to a new connection.
pub enum SlotOffer<C> {
    /// A free slot.
    Free,
    /// The slot of this connection, which must be closed first.
    Evict(Arc<C>),
    /// No slot.
    None,
}

struct SlotTable<C> {
    conns: HashMap<u64, Arc<C>>,
    /// Number of connections for data.
    for_data: usize,
    /// Data connections that were parked when last examined, longest first.
    parked: VecDeque<(u64, u64)>,
    /// Connections that had not finished the handshake when last examined, oldest first.
    pending: VecDeque<u64>,
    last_logged: Option<Instant>,
}

/// The connections of a server.
pub struct ConnectionSlots<C> {
    max_connections: usize,
    max_for_data: usize,
    max_pending: usize,
    /// How to raise the limit, for messages.
    remedy: String,
    stats: Arc<Stats>,
    now: fn(&Stats) -> &Metric,
    inner: Mutex<SlotTable<C>>,
}

impl<C: SlotHolder> ConnectionSlots<C> {
    /// `most` slots, of which at most `most_ungreeted` are for connections before the handshake. `gauges` show the current number
    /// and the limit; `remedy` explains how to raise the limit.
    pub fn new(
        most: usize,
        most_ungreeted: usize,
        remedy: &str,
        stats: Arc<Stats>,
        gauges: [fn(&Stats) -> &Metric; 2],
    ) -> Self {
        let [now, limit] = gauges;
        limit(&stats).set(most as u64);
        ConnectionSlots {
            max_connections: most,
            max_for_data: most - most / CONTROL_SHARE,
            max_pending: most_ungreeted.max(1),
            remedy: remedy.to_owned(),
            stats,
            now,
            inner: Mutex::new(SlotTable {
                conns: HashMap::new(),
                for_data: 0,
                parked: VecDeque::new(),
                pending: VecDeque::new(),
                last_logged: None,
            }),
        }
    }

    /// Current number of connections.
    pub fn len(&self) -> usize {
        self.inner.lock().conns.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The connection with this number, unless closed.
    pub fn get(&self, id: u64) -> Option<Arc<C>> {
        self.inner.lock().conns.get(&id).cloned()
    }

    /// All connections.
    pub fn all_connections(&self) -> Vec<Arc<C>> {
        self.inner.lock().conns.values().cloned().collect()
    }

    /// A slot for a new connection: a free slot, or that of the longest idle data connection, or that of the oldest connection
    /// before the handshake.
    pub fn find_slot(&self) -> SlotOffer<C> {
        let mut inner = self.inner.lock();
        if inner.conns.len() < self.max_connections {
            return SlotOffer::Free;
        }
        let idle = inner.evict_longest_idle().inspect(|_| self.record_eviction(&mut inner));
        idle.or_else(|| inner.oldest_pending(0)).map_or(SlotOffer::None, SlotOffer::Evict)
    }

    /// Adds a connection before the handshake. Returns the oldest such connection when there are too many; the caller closes it.
    pub fn add_connection(&self, conn: Arc<C>) -> Option<Arc<C>> {
        let mut inner = self.inner.lock();
        let id = conn.conn_state().id();
        inner.conns.insert(id, conn);
        inner.pending.push_back(id);
        (self.now)(&self.stats).set(inner.conns.len() as u64);
        inner.oldest_pending(self.max_pending)
    }

    /// Admits a connection after a handshake with a source. Returns the connection to close in exchange, if any.
    ///
    /// # Errors
    /// `Throttled` when all slots for data are in use.
    pub fn admit_for_data(&self, state: &ConnState) -> Result<Option<Arc<C>>> {
        let mut inner = self.inner.lock();
        if !inner.conns.contains_key(&state.id()) || state.is_admitted() {
            return Ok(None);
        }
        let mut goes = None;
        if inner.for_data >= self.max_for_data {
            goes = inner.evict_longest_idle();
            if goes.is_none() {
                return Err(Error::new(ErrorKind::Throttled, self.full_message()));
            }
            self.record_eviction(&mut inner);
        }
        state.set_admitted(true);
        inner.for_data += 1;
        Ok(goes)
    }

    /// Removes a connection that is over. Returns whether the connection had a slot.
    pub fn remove_connection(&self, state: &ConnState) -> bool {
        let mut inner = self.inner.lock();
        inner.release_data_slot(state);
        let had = inner.conns.remove(&state.id()).is_some();
        (self.now)(&self.stats).set(inner.conns.len() as u64);
        had
    }

    /// Removes all connections.
    pub fn drain(&self) -> Vec<Arc<C>> {
        let mut inner = self.inner.lock();
        (self.now)(&self.stats).set(0);
        inner.for_data = 0;
        inner.parked = VecDeque::new();
        inner.conns.drain().map(|(_, conn)| conn).collect()
    }

    /// The message that all slots are in use, with the remedy.
    pub fn full_message(&self) -> String {
        format!(
            "all {} connections for data (of {} in all) have requests in progress: {}",
            self.max_for_data, self.max_connections, self.remedy
        )
    }

    /// Counts an eviction, and logs evictions from time to time.
    fn record_eviction(&self, inner: &mut SlotTable<C>) {
        self.stats.trust.idle_closed.add(1);
        if inner.last_logged.is_none_or(|at| at.elapsed() > SLOTS_LOG_INTERVAL) {
            inner.last_logged = Some(Instant::now());
            tracing::warn!(
                "all {} connections for data are in use: the longest idle ones are closed for new ones, {} so far, and mounts \
                 reconnect when needed; {}",
                self.max_for_data,
                self.stats.trust.idle_closed.get(),
                self.remedy
            );
        }
    }
}

impl<C: SlotHolder> SlotTable<C> {
    /// The longest parked data connection that may be closed; the slot is already released.
    fn evict_longest_idle(&mut self) -> Option<Arc<C>> {
        let mut looked_at = 0;
        // Connections parked later come after all that were parked when the list was made.
        for fresh in [false, true] {
            if fresh {
                let parked = |conn: &Arc<C>| {
                    let state = conn.conn_state();
                    state.parked().filter(|_| state.is_admitted()).map(|turn| (turn, state.id()))
                };
                let mut parked: Vec<_> = self.conns.values().filter_map(parked).collect();
                parked.sort_unstable();
                self.parked = parked.into();
            }
            while let Some((turn, id)) = self.parked.pop_front() {
                let Some(conn) = self.conns.get(&id).filter(|conn| conn.conn_state().parked() == Some(turn)) else {
                    continue;
                };
                if looked_at == MAX_EXAMINED {
                    return None;
                }
                looked_at += 1;
                if conn.is_evictable() && conn.conn_state().mark_evicted(turn) {
                    let conn = Arc::clone(conn);
                    self.release_data_slot(conn.conn_state());
                    return Some(conn);
                }
            }
        }
        None
    }

    /// The oldest connection before the handshake, if there are more than `most`.
    fn oldest_pending(&mut self, most: usize) -> Option<Arc<C>> {
        if self.pending.len() <= most {
            return None;
        }
        let conns = &self.conns;
        self.pending.retain(|id| conns.get(id).is_some_and(|conn| conn.conn_state().peer_name().is_none()));
        if self.pending.len() <= most {
            return None;
        }
        self.pending.pop_front().and_then(|id| self.conns.get(&id).cloned())
    }

    /// Releases the connection's slot for data.
    fn release_data_slot(&mut self, state: &ConnState) {
        if state.is_admitted() {
            state.set_admitted(false);
            // After [`ConnectionSlots::drain`] the count is 0 already.
            self.for_data = self.for_data.saturating_sub(1);
        }
    }
}

/// A service that requires a data slot before the handshake.
pub struct AdmissionGate<'a, S>(pub &'a S, pub &'a dyn Service);

impl<S: PooledServer> Service for AdmissionGate<'_, S> {
    fn handle_hello(&self, conn: &ConnState, hello: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        let AdmissionGate(shared, service) = self;
        if !hello.source.is_empty() {
            let admitted = shared.connection_slots().admit_for_data(conn);
            let admitted = admitted.inspect_err(|why| {
                shared.refusals().record_refusal(&conn.endpoints().peer, RefusalReason::Limit, why);
            });
            if let Some(longest_idle) = admitted? {
                shared.remove_connection(&longest_idle);
            }
        }
        service.handle_hello(conn, hello)
    }
    fn serve_request(&self, conn: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        self.1.serve_request(conn, request, responder)
    }
}
