//! Owns whether the origin of a source answers this node. Reads that wait too long and refused requests start a probe; while
//! probes fail, requests that need the origin fail at once, so that readers use another node. Knows neither blocks nor readers.

use parking_lot::Mutex;
use spurline_origin::OriginStore;
use spurline_types::{Error, ErrorKind, Result, url};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A request without a result for this long starts a probe. Far longer than an origin in order takes, and short
/// against the patience of a reader.
const SUSPECT_AFTER: Duration = Duration::from_secs(1);
/// Deadline of a probe. This time and [`SUSPECT_AFTER`] bound the pause of the first readers.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between probes, and between a good probe and the next.
const PROBE_PAUSE: Duration = Duration::from_secs(1);
/// Interval at which a waiting read checks the result of the probe.
const PROBE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Whether an origin answers.
pub(crate) struct OriginHealth {
    origin: Arc<dyn OriginStore>,
    /// Set while `error` is.
    down: AtomicBool,
    error: Mutex<Option<Error>>,
    probing: AtomicBool,
    /// End of the last good probe.
    answered: Mutex<Option<Instant>>,
}

impl OriginHealth {
    pub fn new(origin: Arc<dyn OriginStore>) -> Arc<OriginHealth> {
        Arc::new(OriginHealth {
            origin,
            down: AtomicBool::new(false),
            error: Mutex::default(),
            probing: AtomicBool::new(false),
            answered: Mutex::default(),
        })
    }

    /// Why the origin is down; `None`, without a lock, while the origin answers.
    pub fn down_error(&self) -> Option<Error> {
        if !self.down.load(Ordering::Acquire) {
            return None;
        }
        self.error.lock().clone()
    }

    /// Starts a probe, unless a probe is running or has just succeeded.
    pub fn suspect(self: &Arc<Self>) {
        let lately = self.answered.lock().is_some_and(|at| at.elapsed() < PROBE_PAUSE);
        if lately || self.probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let health = Arc::downgrade(self);
        // A new thread: the workers may all wait for this origin.
        if let Err(error) = std::thread::Builder::new().name("probe-origin".into()).spawn(move || {
            while health.upgrade().is_some_and(|health| health.probe_fails()) {
                std::thread::sleep(PROBE_PAUSE);
            }
        }) {
            tracing::warn!(%error, "cannot start the thread that probes the origin");
            self.probing.store(false, Ordering::Release);
        }
    }

    /// Sends a probe; false, which ends the probes, when the probe succeeded.
    fn probe_fails(&self) -> bool {
        let source = self.origin.source_url();
        match self.origin.check(Instant::now() + PROBE_TIMEOUT) {
            Ok(()) => self.probe_passed(),
            // The origin answers, and requests of another node would only add load.
            Err(error) if error.kind() == ErrorKind::Throttled => self.probe_passed(),
            Err(error) => {
                // Refused credentials are final when a second node reports the same, and so is the answer that a directory is
                // missing or no directory; other errors pass.
                let kind = match error.kind() {
                    ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
                    kind if url::is_directory(source) && kind != ErrorKind::Timeout => kind,
                    _ => ErrorKind::OriginDown,
                };
                let why = format!("the origin does not serve this node, others may: {}", error.message());
                *self.error.lock() = Some(Error::new(kind, why));
                if !self.down.swap(true, Ordering::AcqRel) {
                    tracing::warn!(source, %error, "the origin does not serve this node: readers use other nodes for uncached data");
                }
                true
            }
        }
    }

    fn probe_passed(&self) -> bool {
        *self.answered.lock() = Some(Instant::now());
        if self.down.swap(false, Ordering::AcqRel) {
            tracing::info!(source = self.origin.source_url(), "the origin serves this node again");
        }
        *self.error.lock() = None;
        self.probing.store(false, Ordering::Release);
        false
    }

    /// Sends a metadata request by `ask`, which gets the deadline. While the origin is down, only cached answers count.
    ///
    /// # Errors
    /// As `ask`, or why the origin is down.
    pub fn ask_origin<T>(self: &Arc<Self>, timeout: Duration, ask: impl Fn(Instant) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        if let Some(down) = self.down_error() {
            return ask(began).map_err(|error| if is_outage(error.kind()) { down } else { error });
        }
        // The first part of the time: a hanging request must not keep a reader from another node.
        let first = timeout.min(PROBE_TIMEOUT);
        let error = match ask(began + first) {
            Err(error) if is_outage(error.kind()) => error,
            done => return done,
        };
        self.suspect();
        if !matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::OriginFailed)
            || first == timeout
        {
            return Err(self.down_error().unwrap_or(error));
        }
        // Only the probe shows whether the origin is down or this request takes long.
        let probed = Instant::now() + 2 * PROBE_TIMEOUT;
        while self.probing.load(Ordering::Acquire) && Instant::now() < probed {
            if let Some(down) = self.down_error() {
                return Err(down);
            }
            std::thread::sleep(PROBE_CHECK_INTERVAL);
        }
        ask(began + timeout)
    }

    /// Waits for data of the origin by `attempt`, which gets the deadline, but not while the origin is down.
    ///
    /// # Errors
    /// As `attempt`, or why the origin is down.
    pub fn wait_origin<T>(
        self: &Arc<Self>,
        deadline: Instant,
        mut attempt: impl FnMut(Instant) -> Result<T>,
    ) -> Result<T> {
        let mut until = Instant::now() + SUSPECT_AFTER;
        loop {
            if let Some(down) = self.down_error() {
                return Err(down);
            }
            match attempt(until.min(deadline)) {
                // The end of this part of the wait, and not of the request.
                Err(error) if error.kind() == ErrorKind::Timeout && (until..deadline).contains(&Instant::now()) => {
                    self.suspect();
                    until = Instant::now() + PROBE_CHECK_INTERVAL;
                }
                Err(error) => {
                    if is_outage(error.kind()) {
                        self.suspect();
                    }
                    return Err(error);
                }
                done => return done,
            }
        }
    }
}

/// Whether an error may mean that the origin serves this node nothing at all.
fn is_outage(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Timeout
            | ErrorKind::Unavailable
            | ErrorKind::OriginFailed
            | ErrorKind::PermissionDenied
            | ErrorKind::Io(_)
            | ErrorKind::OriginDown
    )
}
