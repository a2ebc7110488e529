//! A rail with faults on demand: channels of any transport as over a network interface whose link can go down, drop everything,
//! be slow, or hang new connections. Knows no frames.

use parking_lot::{Condvar, Mutex};
use spurline_proto::NodeRequest;
use spurline_transport::{
    CallAnswer, CallError, Channel, ChannelBreaker, ConnectionEndpoints, Connector, TransportKind,
};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The behaviour of a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RailMode {
    /// Normal.
    Up,
    /// The link is down: calls break at once, connecting fails.
    Down,
    /// Drops everything: calls and connection attempts wait until the deadlines. Data sent meanwhile arrives late if the rail
    /// recovers before that.
    Silent,
    /// Existing connections work; new connections get no answer.
    HangsConnect,
    /// Answers arrive this much later.
    Slow(Duration),
}

struct SimRailState {
    mode: Mutex<RailMode>,
    changed: Condvar,
    /// Interrupt the calls under way.
    breakers: Mutex<BTreeMap<u64, Arc<dyn ChannelBreaker>>>,
    calls: AtomicU64,
    bytes: AtomicU64,
    connects: AtomicU64,
    channels: AtomicU64,
}

/// A rail. Cheap to clone.
#[derive(Clone)]
pub struct SimRail {
    inner: Arc<SimRailState>,
}

impl Default for SimRail {
    fn default() -> Self {
        Self::new()
    }
}

impl SimRail {
    /// A rail that works.
    pub fn new() -> Self {
        let inner = SimRailState {
            mode: Mutex::new(RailMode::Up),
            changed: Condvar::new(),
            breakers: Mutex::default(),
            calls: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            connects: AtomicU64::new(0),
            channels: AtomicU64::new(0),
        };
        SimRail { inner: Arc::new(inner) }
    }

    /// Changes the behaviour from now on.
    pub fn set_mode(&self, mode: RailMode) {
        *self.inner.mode.lock() = mode;
        self.inner.changed.notify_all();
        if mode == RailMode::Down {
            let under_way: Vec<_> = self.inner.breakers.lock().values().cloned().collect();
            under_way.iter().for_each(|breaker| breaker.break_channel());
        }
    }

    /// The behaviour.
    pub fn mode(&self) -> RailMode {
        *self.inner.mode.lock()
    }

    /// Whether the link is up as the operating system would report: a silent rail looks up.
    pub fn link_up(&self) -> bool {
        self.mode() != RailMode::Down
    }

    /// Calls answered over the rail.
    pub fn call_count(&self) -> u64 {
        self.inner.calls.load(Ordering::Relaxed)
    }

    /// Payload bytes received over the rail.
    pub fn payload_bytes(&self) -> u64 {
        self.inner.bytes.load(Ordering::Relaxed)
    }

    /// Connection attempts over the rail.
    pub fn connect_count(&self) -> u64 {
        self.inner.connects.load(Ordering::Relaxed)
    }

    /// Current channels on the rail.
    pub fn channel_count(&self) -> u64 {
        self.inner.channels.load(Ordering::Relaxed)
    }

    /// Runs the channels of `inner` over this rail, as a transport of `kind`.
    pub fn connector(&self, inner: Arc<dyn Connector>, kind: TransportKind) -> Arc<dyn Connector> {
        Arc::new(RailConnector { rail: self.clone(), kind, inner })
    }

    /// Waits until `until`, or until the call is interrupted.
    fn wait_delay(&self, until: Instant, broken: &AtomicBool) {
        let mut mode = self.inner.mode.lock();
        while !broken.load(Ordering::Acquire) && !self.inner.changed.wait_until(&mut mode, until).timed_out() {}
    }

    /// Waits while the rail drops everything.
    fn pass_rail(&self, deadline: Instant, broken: &AtomicBool) -> Result<RailMode> {
        let mut mode = self.inner.mode.lock();
        while *mode == RailMode::Silent && !broken.load(Ordering::Acquire) {
            if self.inner.changed.wait_until(&mut mode, deadline).timed_out() {
                return Err(Error::new(ErrorKind::Timeout, "no answer before the deadline (the rail is silent)"));
            }
        }
        if broken.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "the channel was interrupted"));
        }
        if *mode == RailMode::Down {
            return Err(Error::new(ErrorKind::Unavailable, "the rail's link is down"));
        }
        Ok(*mode)
    }
}

struct RailConnector {
    rail: SimRail,
    kind: TransportKind,
    inner: Arc<dyn Connector>,
}

impl Connector for RailConnector {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        let number = self.rail.inner.connects.fetch_add(1, Ordering::Relaxed);
        let never = AtomicBool::new(false);
        if self.rail.mode() == RailMode::HangsConnect {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            return Err(Error::new(ErrorKind::Timeout, "no answer to the connection attempt"));
        }
        self.rail.pass_rail(deadline, &never)?;
        let inner = self.inner.connect(deadline)?;
        let endpoints = ConnectionEndpoints { kind: self.kind, ..inner.endpoints().clone() };
        self.rail.inner.channels.fetch_add(1, Ordering::Relaxed);
        let broken = Arc::new(AtomicBool::new(false));
        Ok(Box::new(RailChannel { rail: self.rail.clone(), number, inner: Some(inner), endpoints, broken }))
    }
    fn kind(&self) -> TransportKind {
        self.kind
    }
    fn peer(&self) -> &str {
        self.inner.peer()
    }
}

struct RailChannel {
    rail: SimRail,
    /// Unique on the rail.
    number: u64,
    /// `None` after a break.
    inner: Option<Box<dyn Channel>>,
    endpoints: ConnectionEndpoints,
    broken: Arc<AtomicBool>,
}

struct RailBreaker {
    rail: SimRail,
    broken: Arc<AtomicBool>,
    inner: Option<Arc<dyn ChannelBreaker>>,
}

impl ChannelBreaker for RailBreaker {
    fn break_channel(&self) {
        // Under the lock, so that a waiting call can't check before and sleep after.
        let mode = self.rail.inner.mode.lock();
        self.broken.store(true, Ordering::Release);
        self.rail.inner.changed.notify_all();
        drop(mode);
        if let Some(inner) = &self.inner {
            inner.break_channel();
        }
    }
}

impl Channel for RailChannel {
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        let Some(inner) = &mut self.inner else {
            return Err(CallError::Broken(Error::new(ErrorKind::Unavailable, "the channel broke in an earlier call")));
        };
        let rail = &self.rail;
        let broken = &self.broken;
        let mut landed = 0;
        // A fault may strike before the request is sent and after the answer is.
        let result = rail.pass_rail(deadline, broken).map_err(CallError::Broken).and_then(|mode| {
            if let RailMode::Slow(delay) = mode {
                rail.wait_delay(deadline.min(Instant::now() + delay), broken);
            }
            if let Some(breaker) = inner.breaker() {
                rail.inner.breakers.lock().insert(self.number, breaker);
            }
            let answer = inner.call(
                request,
                body,
                dst,
                &mut |n| {
                    landed = n;
                    progress(n);
                },
                deadline,
            );
            rail.inner.breakers.lock().remove(&self.number);
            rail.pass_rail(deadline, broken).map_err(CallError::Broken).and(answer)
        });
        match result {
            Ok(answer) => {
                rail.inner.calls.fetch_add(1, Ordering::Relaxed);
                rail.inner.bytes.fetch_add(answer.payload_len as u64, Ordering::Relaxed);
                Ok(answer)
            }
            Err(CallError::Broken(error)) => {
                // Reported bytes are correct; until the channel is dropped, anything may be written behind.
                dst[landed..].fill(0xdb);
                self.inner = None;
                Err(CallError::Broken(error.context(format_args!("{request} of {}", self.endpoints))))
            }
            Err(answered) => Err(answered),
        }
    }

    fn breaker(&self) -> Option<Arc<dyn ChannelBreaker>> {
        let inner = self.inner.as_ref().and_then(|inner| inner.breaker());
        Some(Arc::new(RailBreaker { rail: self.rail.clone(), broken: Arc::clone(&self.broken), inner }))
    }

    fn endpoints(&self) -> &ConnectionEndpoints {
        &self.endpoints
    }

    fn looks_alive(&mut self) -> bool {
        !self.broken.load(Ordering::Acquire)
            && self.rail.link_up()
            && self.inner.as_mut().is_some_and(|inner| inner.looks_alive())
    }
}

impl Drop for RailChannel {
    fn drop(&mut self) {
        self.rail.inner.channels.fetch_sub(1, Ordering::Relaxed);
    }
}
