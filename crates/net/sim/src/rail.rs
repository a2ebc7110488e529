//! A rail that misbehaves on demand: channels of any transport as if they ran over one network interface, whose link
//! can go down, swallow everything, be slow, or hang whoever connects. It knows no frames.

use parking_lot::{Condvar, Mutex};
use spurline_proto::Request;
use spurline_transport::{Answer, Breaker, CallError, Channel, Connector, Endpoints, TransportKind};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How a rail behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RailMode {
    /// As it should.
    Up,
    /// Its link is down: calls break at once, nobody connects.
    Down,
    /// Everything is swallowed: calls and connection attempts wait until their deadline. What is sent meanwhile
    /// arrives late when the rail works again before that.
    Silent,
    /// Connections made before work; new ones are never answered.
    HangsConnect,
    /// Answers come this much later.
    Slow(Duration),
}

struct Inner {
    mode: Mutex<RailMode>,
    changed: Condvar,
    calls: AtomicU64,
    bytes: AtomicU64,
    connects: AtomicU64,
    channels: AtomicU64,
}

/// One rail. Cheap to clone.
#[derive(Clone)]
pub struct SimRail {
    inner: Arc<Inner>,
}

impl Default for SimRail {
    fn default() -> Self {
        Self::new()
    }
}

impl SimRail {
    /// A rail that works.
    pub fn new() -> Self {
        let inner = Inner {
            mode: Mutex::new(RailMode::Up),
            changed: Condvar::new(),
            calls: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            connects: AtomicU64::new(0),
            channels: AtomicU64::new(0),
        };
        SimRail { inner: Arc::new(inner) }
    }

    /// Behaves otherwise from now on.
    pub fn set(&self, mode: RailMode) {
        *self.inner.mode.lock() = mode;
        self.inner.changed.notify_all();
    }

    /// How it behaves.
    pub fn mode(&self) -> RailMode {
        *self.inner.mode.lock()
    }

    /// Whether its link is up as the operating system would say: a silent rail looks fine.
    pub fn link_up(&self) -> bool {
        self.mode() != RailMode::Down
    }

    /// Calls answered over it.
    pub fn calls(&self) -> u64 {
        self.inner.calls.load(Ordering::Relaxed)
    }

    /// Payload bytes that came over it.
    pub fn bytes(&self) -> u64 {
        self.inner.bytes.load(Ordering::Relaxed)
    }

    /// Connections tried over it.
    pub fn connects(&self) -> u64 {
        self.inner.connects.load(Ordering::Relaxed)
    }

    /// Channels there are on it.
    pub fn channels(&self) -> u64 {
        self.inner.channels.load(Ordering::Relaxed)
    }

    /// Makes the channels of `inner` run over this rail, as those of a transport of `kind`.
    pub fn connector(&self, inner: Arc<dyn Connector>, kind: TransportKind) -> Arc<dyn Connector> {
        Arc::new(RailConnector { rail: self.clone(), kind, inner })
    }

    /// Waits until `until`, or until the call is broken off.
    fn dawdle(&self, until: Instant, broken: &AtomicBool) {
        let mut mode = self.inner.mode.lock();
        while !broken.load(Ordering::Acquire) && !self.inner.changed.wait_until(&mut mode, until).timed_out() {}
    }

    /// Waits while everything is swallowed.
    fn pass(&self, deadline: Instant, broken: &AtomicBool) -> Result<RailMode> {
        let mut mode = self.inner.mode.lock();
        while *mode == RailMode::Silent && !broken.load(Ordering::Acquire) {
            if self.inner.changed.wait_until(&mut mode, deadline).timed_out() {
                return Err(Error::new(ErrorKind::Timeout, "no answer before the deadline (the rail is silent)"));
            }
        }
        if broken.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "the channel was broken off"));
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
        self.rail.inner.connects.fetch_add(1, Ordering::Relaxed);
        let never = AtomicBool::new(false);
        if self.rail.mode() == RailMode::HangsConnect {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            return Err(Error::new(ErrorKind::Timeout, "no answer to the connection attempt"));
        }
        self.rail.pass(deadline, &never)?;
        let inner = self.inner.connect(deadline)?;
        let endpoints = Endpoints { kind: self.kind, ..inner.endpoints().clone() };
        self.rail.inner.channels.fetch_add(1, Ordering::Relaxed);
        let broken = Arc::new(AtomicBool::new(false));
        Ok(Box::new(RailChannel { rail: self.rail.clone(), inner: Some(inner), endpoints, broken }))
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
    /// Gone once it broke.
    inner: Option<Box<dyn Channel>>,
    endpoints: Endpoints,
    broken: Arc<AtomicBool>,
}

struct BreakOff {
    rail: SimRail,
    broken: Arc<AtomicBool>,
    inner: Option<Arc<dyn Breaker>>,
}

impl Breaker for BreakOff {
    fn break_off(&self) {
        // Under the lock, so that a waiting call can't look before and sleep after.
        let mode = self.rail.inner.mode.lock();
        self.broken.store(true, Ordering::Release);
        self.rail.inner.changed.notify_all();
        drop(mode);
        if let Some(inner) = &self.inner {
            inner.break_off();
        }
    }
}

impl Channel for RailChannel {
    fn call(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<Answer, CallError> {
        let Some(inner) = &mut self.inner else {
            return Err(CallError::Broken(Error::new(ErrorKind::Unavailable, "the channel broke in an earlier call")));
        };
        let (rail, broken) = (&self.rail, &self.broken);
        let mut landed = 0;
        // A fault may strike before the request is on its way, and after the answer is.
        let result = rail.pass(deadline, broken).map_err(CallError::Broken).and_then(|mode| {
            if let RailMode::Slow(delay) = mode {
                rail.dawdle(deadline.min(Instant::now() + delay), broken);
            }
            let mut report = |n: usize| {
                landed = n;
                progress(n);
            };
            let answer = inner.call(request, body, dst, &mut report, deadline);
            rail.pass(deadline, broken).map_err(CallError::Broken).and(answer)
        });
        match result {
            Ok(answer) => {
                rail.inner.calls.fetch_add(1, Ordering::Relaxed);
                rail.inner.bytes.fetch_add(answer.payload_len as u64, Ordering::Relaxed);
                Ok(answer)
            }
            Err(CallError::Broken(error)) => {
                // What was reported is right; until the channel is dropped, anything may be written behind it.
                dst[landed..].fill(0xdb);
                self.inner = None;
                Err(CallError::Broken(error.context(format_args!("{request} of {}", self.endpoints))))
            }
            Err(answered) => Err(answered),
        }
    }

    fn breaker(&self) -> Option<Arc<dyn Breaker>> {
        let inner = self.inner.as_ref().and_then(|inner| inner.breaker());
        Some(Arc::new(BreakOff { rail: self.rail.clone(), broken: Arc::clone(&self.broken), inner }))
    }

    fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    fn probe(&mut self) -> bool {
        !self.broken.load(Ordering::Acquire)
            && self.rail.link_up()
            && self.inner.as_mut().is_some_and(|inner| inner.probe())
    }
}

impl Drop for RailChannel {
    fn drop(&mut self) {
        self.rail.inner.channels.fetch_sub(1, Ordering::Relaxed);
    }
}
