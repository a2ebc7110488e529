//! The places of a server's connections: how many there are, and whose goes to a further one. It knows neither what a
//! connection is made of nor who accepts it, nor what a place is asked for.

use crate::{ConnState, Crewed, Responder, Service};
use parking_lot::Mutex;
use spurline_proto::{Hello, Request, Welcome};
use spurline_trust::Reason;
use spurline_types::stats::Metric;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of all places one in so many is not for connections that are asked for data: greetings and signs of life have room when
/// all others are taken.
const NOT_FOR_DATA: usize = 8;
/// Parked connections that are looked at for one further: where requests wait for workers, they wait on those parked longest.
const LOOKED_AT: usize = 64;
/// That places are short is said no more often than this.
const REMIND: Duration = Duration::from_secs(60);

/// What has a place.
pub trait Seated {
    /// What is known of it.
    fn state(&self) -> &ConnState;

    /// Whether a parked one may be ended for another, as nothing came on it that nobody took yet. Never where its end would
    /// cost its peer more than a new connection.
    fn may_go(&self) -> bool {
        false
    }
}

/// What a further connection finds.
pub enum Room<C> {
    /// A place.
    Free,
    /// The place of this one, which is to be ended first.
    Of(Arc<C>),
    /// None.
    None,
}

struct Inner<C> {
    conns: HashMap<u64, Arc<C>>,
    /// Those that are asked for data.
    for_data: usize,
    /// Those of them that were parked when they were last looked at, the longest parked first.
    parked: VecDeque<(u64, u64)>,
    /// Those that had not greeted when they were last looked at, oldest first.
    ungreeted: VecDeque<u64>,
    said: Option<Instant>,
}

/// The connections of a server.
pub struct Places<C> {
    most: usize,
    most_for_data: usize,
    most_ungreeted: usize,
    /// What there may be more of, for who has it all in use.
    remedy: String,
    stats: Arc<Stats>,
    now: fn(&Stats) -> &Metric,
    inner: Mutex<Inner<C>>,
}

impl<C: Seated> Places<C> {
    /// `most` places, no more than `most_ungreeted` of them of those that have not greeted. `gauges` are of connections
    /// there are and there may be; `remedy` says how there would be more.
    pub fn new(
        most: usize,
        most_ungreeted: usize,
        remedy: &str,
        stats: Arc<Stats>,
        gauges: [fn(&Stats) -> &Metric; 2],
    ) -> Self {
        let [now, limit] = gauges;
        limit(&stats).set(most as u64);
        Places {
            most,
            most_for_data: most - most / NOT_FOR_DATA,
            most_ungreeted: most_ungreeted.max(1),
            remedy: remedy.to_owned(),
            stats,
            now,
            inner: Mutex::new(Inner {
                conns: HashMap::new(),
                for_data: 0,
                parked: VecDeque::new(),
                ungreeted: VecDeque::new(),
                said: None,
            }),
        }
    }

    /// Connections there are now.
    pub fn len(&self) -> usize {
        self.inner.lock().conns.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The connection of this number, unless it is gone.
    pub fn get(&self, id: u64) -> Option<Arc<C>> {
        self.inner.lock().conns.get(&id).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<C>> {
        self.inner.lock().conns.values().cloned().collect()
    }

    /// Room for one more that has not greeted: a free place, or that of the longest idle one, or of the stranger that
    /// waits longest.
    pub fn room(&self) -> Room<C> {
        let mut inner = self.inner.lock();
        if inner.conns.len() < self.most {
            return Room::Free;
        }
        let idle = inner.longest_idle().inspect(|_| self.made_room(&mut inner));
        idle.or_else(|| inner.stranger(0)).map_or(Room::None, Room::Of)
    }

    /// Gives a place to a connection that has not greeted; names one that has not for longer and is to be ended where there
    /// are too many of them.
    pub fn put(&self, conn: Arc<C>) -> Option<Arc<C>> {
        let mut inner = self.inner.lock();
        let id = conn.state().id();
        inner.conns.insert(id, conn);
        inner.ungreeted.push_back(id);
        (self.now)(&self.stats).set(inner.conns.len() as u64);
        inner.stranger(self.most_ungreeted)
    }

    /// Lets a connection in that greets for data; names the one that is to be ended for it.
    ///
    /// # Errors
    /// `Throttled` when all of those for data are in use.
    pub fn admit(&self, state: &ConnState) -> Result<Option<Arc<C>>> {
        let mut inner = self.inner.lock();
        if !inner.conns.contains_key(&state.id()) || state.is_admitted() {
            return Ok(None);
        }
        let mut goes = None;
        if inner.for_data >= self.most_for_data {
            goes = inner.longest_idle();
            if goes.is_none() {
                return Err(Error::new(ErrorKind::Throttled, self.full()));
            }
            self.made_room(&mut inner);
        }
        state.set_admitted(true);
        inner.for_data += 1;
        Ok(goes)
    }

    /// Takes the place of a connection that is over away; whether it had one.
    pub fn remove(&self, state: &ConnState) -> bool {
        let mut inner = self.inner.lock();
        inner.leave(state);
        let had = inner.conns.remove(&state.id()).is_some();
        (self.now)(&self.stats).set(inner.conns.len() as u64);
        had
    }

    /// Takes all away.
    pub fn drain(&self) -> Vec<Arc<C>> {
        let mut inner = self.inner.lock();
        (self.now)(&self.stats).set(0);
        (inner.for_data, inner.parked) = (0, VecDeque::new());
        inner.conns.drain().map(|(_, conn)| conn).collect()
    }

    /// That all are in use, and what to do.
    pub fn full(&self) -> String {
        format!(
            "all {} connections for data (of {} in all) are in use by requests under way: {}",
            self.most_for_data, self.most, self.remedy
        )
    }

    /// Says now and then that connections have to make room.
    fn made_room(&self, inner: &mut Inner<C>) {
        self.stats.trust.idle_closed.add(1);
        if inner.said.is_none_or(|at| at.elapsed() > REMIND) {
            inner.said = Some(Instant::now());
            tracing::warn!(
                "all {} connections for data are taken: those idle longest are closed for new ones, {} so far, and mounts \
                 make them anew when they need them; {}",
                self.most_for_data,
                self.stats.trust.idle_closed.get(),
                self.remedy
            );
        }
    }
}

impl<C: Seated> Inner<C> {
    /// The connection for data that is parked longest and may go; it has given up its place already.
    fn longest_idle(&mut self) -> Option<Arc<C>> {
        let mut looked_at = 0;
        // Who parks later is behind all who were parked when these were looked at.
        for fresh in [false, true] {
            if fresh {
                let parked = |conn: &Arc<C>| {
                    let state = conn.state();
                    state.parked().filter(|_| state.is_admitted()).map(|turn| (turn, state.id()))
                };
                let mut parked: Vec<_> = self.conns.values().filter_map(parked).collect();
                parked.sort_unstable();
                self.parked = parked.into();
            }
            while let Some((turn, id)) = self.parked.pop_front() {
                let Some(conn) = self.conns.get(&id).filter(|conn| conn.state().parked() == Some(turn)) else {
                    continue;
                };
                if looked_at == LOOKED_AT {
                    return None;
                }
                looked_at += 1;
                if conn.may_go() && conn.state().give_up_place(turn) {
                    let conn = Arc::clone(conn);
                    self.leave(conn.state());
                    return Some(conn);
                }
            }
        }
        None
    }

    /// The one that has not greeted for longest, where there are more than `most`.
    fn stranger(&mut self, most: usize) -> Option<Arc<C>> {
        if self.ungreeted.len() <= most {
            return None;
        }
        let conns = &self.conns;
        self.ungreeted.retain(|id| conns.get(id).is_some_and(|conn| conn.state().peer_name().is_none()));
        if self.ungreeted.len() <= most {
            return None;
        }
        self.ungreeted.pop_front().and_then(|id| self.conns.get(&id).cloned())
    }

    /// It counts among those for data no longer.
    fn leave(&mut self, state: &ConnState) {
        if state.is_admitted() {
            state.set_admitted(false);
            // None is left where all were taken away.
            self.for_data = self.for_data.saturating_sub(1);
        }
    }
}

/// A service before which who greets for data has to have a place.
pub struct Door<'a, S>(pub &'a S, pub &'a dyn Service);

impl<S: Crewed> Service for Door<'_, S> {
    fn hello(&self, conn: &ConnState, hello: &Hello<'_>) -> Result<Welcome> {
        let Door(shared, service) = self;
        if !hello.source.is_empty() {
            let full = |why: &Error| shared.refusals().refused(&conn.endpoints().peer, Reason::Limit, why);
            if let Some(longest_idle) = shared.places().admit(conn).inspect_err(full)? {
                shared.remove(&longest_idle);
            }
        }
        service.hello(conn, hello)
    }
    fn serve(&self, conn: &ConnState, request: Request<'_>, responder: &mut dyn Responder) -> Result<()> {
        self.1.serve(conn, request, responder)
    }
}
