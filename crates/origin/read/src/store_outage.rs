//! Whether a store answers: an outage begins with a request without an answer, and ends with any answer. Knows neither names nor
//! requests.

use crate::OriginStore;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between the requests that test whether the store responds again.
pub(crate) const PROBE_PAUSE: Duration = Duration::from_secs(1);
/// Deadline of such a request: far longer than a slow answer takes.
pub(crate) const PROBE_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for an answer if the last known one may be served instead.
const KNOWN_PATIENCE: Duration = Duration::from_secs(3);

/// Whether an error means that the store did not respond, or failed; all others are answers.
pub(crate) fn is_unanswered(error: &Error) -> bool {
    use ErrorKind::{OriginFailed, Throttled, Timeout, Unavailable};
    matches!(error.kind(), Timeout | Unavailable | Throttled | OriginFailed)
}

/// Whether an error means that nothing answers, so that other requests would be repeated until their deadlines.
pub(crate) fn is_silence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable)
}

/// Whether a test that began at `began` shows that unknown names would wait. A directory that has vanished refuses requests at
/// once, and serves the first one when it is back.
pub(crate) fn shows_silence(origin: &dyn OriginStore, error: &Error, began: Instant) -> bool {
    is_silence(error) && (!origin.capabilities().modes || began.elapsed() >= KNOWN_PATIENCE)
}

/// The error of a request that is not sent, because nothing answers.
pub(crate) fn silence_error(url: &str) -> Error {
    Error::new(ErrorKind::OriginFailed, format!("{url} does not respond"))
}

/// Whether an error means that the origin does not serve this process: it did not respond, failed, or refuses everything. All
/// others are answers.
pub(crate) fn is_unserved(origin: &dyn OriginStore, error: &Error, deadline: Instant) -> bool {
    is_unanswered(error) || (is_refusal(error) && origin.refusal(deadline).is_some())
}

/// Whether the origin refused the credentials.
pub(crate) fn is_refusal(error: &Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

/// A time in which the origin does not respond, or refuses everything.
pub(crate) struct Outage {
    /// The first request without an answer failed.
    pub since: Instant,
    pub last_probe: Instant,
    pub probing: bool,
    /// Nothing answers: a request for an unknown name would wait until its deadline.
    pub is_tested: bool,
    pub stale_answers: u64,
    /// Whether the origin refuses everything; otherwise it does not respond.
    pub refused: bool,
}

/// Notes that the origin did not respond, or refuses everything; logged once per outage. Whether a silence begins.
pub(crate) fn begin_outage(
    current: &mut Option<Outage>,
    stats: &Stats,
    url: &str,
    error: &Error,
    valid: Duration,
) -> bool {
    let refused = is_refusal(error);
    if let Some(outage) = current {
        if refused && !std::mem::replace(&mut outage.refused, true) {
            outage.is_tested = false;
            stats.metadata.silent_origins.sub(1);
        }
        return false;
    }
    let now = Instant::now();
    *current =
        Some(Outage { since: now, last_probe: now, probing: false, is_tested: false, stale_answers: 0, refused });
    if refused {
        // The refusal itself is logged for the bucket.
        let seconds = valid.as_secs();
        tracing::info!(
            "{url} is refused: the last known names, attributes and listings stay valid for {seconds} s (--stale-if-error)"
        );
        return false;
    }
    stats.metadata.silent_origins.add(1);
    if valid.is_zero() {
        tracing::warn!("{url} does not respond: {error}");
    } else {
        let seconds = valid.as_secs();
        tracing::warn!(
            "{url} does not respond: {error}; the last known names, attributes and listings stay valid for {seconds} s \
             (--stale-if-error)"
        );
    }
    true
}

/// Notes that the origin responded and serves.
pub(crate) fn end_outage(current: &mut Option<Outage>, stats: &Stats, url: &str) {
    let Some(outage) = current.take() else { return };
    if !outage.refused {
        stats.metadata.silent_origins.sub(1);
    }
    let seconds = outage.since.elapsed().as_secs_f64();
    let stale = outage.stale_answers;
    tracing::info!("{url} responds again after {seconds:.1} s; {stale} answers were stale");
}

/// A time in which the store does not respond.
struct StoreOutage {
    since: Instant,
    /// A test has failed too: it is not only one object that the store does not serve.
    is_tested: bool,
    stale_answers: u64,
}

/// The outage of a store, if there is one.
pub struct OutageWatch {
    store: Arc<dyn OriginStore>,
    stats: Arc<Stats>,
    /// For how long known answers are served; zero for never.
    known_for: Duration,
    outage: Mutex<Option<StoreOutage>>,
}

impl OutageWatch {
    /// The watch of a store whose known answers are served for `known_for`.
    pub fn new(store: Arc<dyn OriginStore>, stats: Arc<Stats>, known_for: Duration) -> Arc<OutageWatch> {
        Arc::new(OutageWatch { store, stats, known_for, outage: Mutex::default() })
    }

    /// Whether answers are kept for outages.
    pub fn keeps_answers(&self) -> bool {
        !self.known_for.is_zero()
    }

    /// Whether the store does not respond.
    pub fn is_silent(&self) -> bool {
        self.outage.lock().is_some()
    }

    /// Whether a test has shown that the store does not respond: what is not known fails at once.
    pub fn is_tested(&self) -> bool {
        self.outage.lock().as_ref().is_some_and(|outage| outage.is_tested)
    }

    /// The answer of the store to `request`, which gets the deadline; while the store does not respond, the `known` one. Without
    /// that, a request in an outage fails at once.
    ///
    /// # Errors
    /// Those of the request; `OriginFailed` in an outage.
    pub fn answer<T>(
        self: &Arc<Self>,
        known: Option<Result<T>>,
        deadline: Instant,
        request: impl Fn(Instant) -> Result<T>,
    ) -> Result<T> {
        if !self.keeps_answers() {
            return request(deadline);
        }
        if let Some(outage) = self.outage.lock().as_mut() {
            match known {
                Some(known) if outage.since.elapsed() < self.known_for => return self.serve_known(outage, known),
                _ if outage.is_tested => return Err(silence_error(self.store.source_url())),
                _ => {}
            }
        }
        let patience = match &known {
            Some(_) => deadline.min(Instant::now() + KNOWN_PATIENCE),
            // The test that is under way shows whether the store does not respond, or this request takes long.
            None if self.is_silent() => deadline.min(Instant::now() + PROBE_LIMIT),
            None => deadline,
        };
        let mut answer = request(patience);
        if known.is_none() && patience < deadline && answer.as_ref().is_err_and(is_unanswered) && !self.is_tested() {
            answer = request(deadline);
        }
        let Some(error) = answer.as_ref().err().filter(|error| is_unanswered(error)) else {
            self.end();
            return answer;
        };
        self.begin(error);
        match (known, self.outage.lock().as_mut()) {
            (Some(known), Some(outage)) if outage.since.elapsed() < self.known_for => self.serve_known(outage, known),
            _ => answer,
        }
    }

    fn serve_known<T>(&self, outage: &mut StoreOutage, known: Result<T>) -> Result<T> {
        outage.stale_answers += 1;
        self.stats.metadata.stale_answers.add(1);
        known
    }

    fn begin(self: &Arc<Self>, error: &Error) {
        let mut outage = self.outage.lock();
        if outage.is_some() {
            return;
        }
        let watch = Arc::downgrade(self);
        let probes = std::thread::Builder::new().name("probe-store".into()).spawn(move || {
            while watch.upgrade().is_some_and(|watch| watch.probe_fails()) {
                std::thread::sleep(PROBE_PAUSE);
            }
        });
        if let Err(error) = probes {
            return tracing::warn!(%error, "no thread can test whether the store responds");
        }
        *outage = Some(StoreOutage { since: Instant::now(), is_tested: false, stale_answers: 0 });
        self.stats.metadata.silent_origins.add(1);
        let url = self.store.source_url();
        let seconds = self.known_for.as_secs();
        tracing::warn!(
            "{url} does not respond: {error}; the last known names, attributes and listings stay valid for {seconds} s \
             (--stale-if-error)"
        );
    }

    /// Sends a test; false when the outage has ended.
    fn probe_fails(&self) -> bool {
        let probed = self.store.check(Instant::now() + PROBE_LIMIT);
        if let Some(error) = probed.as_ref().err().filter(|error| is_unanswered(error)) {
            return match self.outage.lock().as_mut() {
                Some(outage) => {
                    outage.is_tested |= is_silence(error);
                    true
                }
                None => false,
            };
        }
        self.end();
        false
    }

    fn end(&self) {
        let Some(outage) = self.outage.lock().take() else { return };
        self.stats.metadata.silent_origins.sub(1);
        let url = self.store.source_url();
        let seconds = outage.since.elapsed().as_secs_f64();
        let stale = outage.stale_answers;
        tracing::info!("{url} responds again after {seconds:.1} s; {stale} answers were stale");
    }
}

impl Drop for OutageWatch {
    fn drop(&mut self) {
        if self.outage.lock().take().is_some() {
            self.stats.metadata.silent_origins.sub(1);
        }
    }
}
