//! A stream of equal operations over some transport, several under way at a time. Knows no transport, and no clock except for
//! deadlines.

use crate::drive::StreamMeter;
use crate::message::TcpView;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a wait checks for the stop.
pub const WAIT_TICK: Duration = Duration::from_millis(250);

/// Progress since the last call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamProgress {
    /// Completed operations, in the order of start.
    pub ops: u32,
    /// Bytes that arrived, also of incomplete operations.
    pub bytes: u64,
}

/// A stream of a transport, used by one thread at a time.
pub trait ProbeStream: Send {
    /// Begins operations while the meter admits them, and reports progress to the meter; returns when the meter
    /// admits none and all have completed.
    ///
    /// # Errors
    /// When the stream failed, made no progress for [`StopSignal`]'s time limit, or was cut.
    fn run_operations(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()>;

    /// TCP's statistics of the stream at the end; `None` for other transports.
    fn tcp_view(&self) -> Option<TcpView> {
        None
    }
}

/// The stop signal and time limit of streams.
#[derive(Debug)]
pub struct StopSignal {
    requested: AtomicBool,
    cut: AtomicBool,
    patience: Duration,
}

impl StopSignal {
    /// A stream without progress for `patience` fails.
    pub fn new(patience: Duration) -> Self {
        StopSignal { requested: AtomicBool::new(false), cut: AtomicBool::new(false), patience }
    }
    /// Begin no further operation.
    pub fn request_stop(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }
    /// Abandon the operations under way too.
    pub fn cut(&self) {
        self.request_stop();
        self.cut.store(true, Ordering::Relaxed);
    }
    /// Whether [`StopSignal::request_stop`] was called.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }
    /// Whether [`StopSignal::cut`] was called.
    pub fn is_aborted(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    /// To be called after a tick without progress.
    ///
    /// # Errors
    /// `Timeout` when `since` is longer ago than the time limit, or after [`StopSignal::cut`].
    pub fn check_stalled(&self, since: Instant) -> Result<()> {
        if self.is_aborted() {
            return Err(Error::new(ErrorKind::Timeout, "aborted"));
        }
        if since.elapsed() >= self.patience {
            let why = format!("nothing moved for {:.1} s", self.patience.as_secs_f64());
            return Err(Error::new(ErrorKind::Timeout, why));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends() {
        let stop = StopSignal::new(Duration::from_secs(3600));
        stop.check_stalled(Instant::now()).unwrap();
        assert!(!stop.is_requested());
        stop.cut();
        assert!(stop.is_requested() && stop.check_stalled(Instant::now()).is_err());
        let error = StopSignal::new(Duration::ZERO).check_stalled(Instant::now()).unwrap_err();
        assert!(error.message().contains("nothing moved"), "{error}");
    }
}
