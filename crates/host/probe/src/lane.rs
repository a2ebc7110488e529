//! What a transport offers to a measurement: a stream of equal operations, some of them under way at a time. It knows
//! no transport and no clock but the one deadlines are kept by.

use crate::drive::Meter;
use crate::message::TcpView;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a wait looks at whether it should end.
pub const TICK: Duration = Duration::from_millis(250);

/// What moved since the last look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Operations that ended, in the order they were begun.
    pub ops: u32,
    /// Bytes that arrived, also those of an operation that has not ended.
    pub bytes: u64,
}

/// One stream of one transport, used by one thread at a time. Another transport is another implementation.
pub trait Lane: Send {
    /// Begins an operation whenever the meter lets it and tells the meter what moved, until the meter lets no more
    /// begin and all that was begun has ended.
    ///
    /// # Errors
    /// When the stream is of no more use, nothing moved for as long as [`Stop`] says, or [`Stop::is_cut`].
    fn run(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()>;

    /// What TCP says of the stream at its end; `None` for other transports.
    fn tcp(&self) -> Option<TcpView> {
        None
    }
}

/// When streams are to end.
#[derive(Debug)]
pub struct Stop {
    asked: AtomicBool,
    cut: AtomicBool,
    patience: Duration,
}

impl Stop {
    /// A stream on which nothing moves for `patience` fails.
    pub fn new(patience: Duration) -> Self {
        Stop { asked: AtomicBool::new(false), cut: AtomicBool::new(false), patience }
    }
    /// No further operation is begun.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }
    /// What is under way is given up too.
    pub fn cut(&self) {
        self.ask();
        self.cut.store(true, Ordering::Relaxed);
    }
    /// Whether [`Stop::ask`] was called.
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }
    /// Whether [`Stop::cut`] was called.
    pub fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    /// To be called after a tick in which nothing moved.
    ///
    /// # Errors
    /// `Timeout` when `since` is too long ago, or the stream is to end now.
    pub fn still_nothing(&self, since: Instant) -> Result<()> {
        if self.is_cut() {
            return Err(Error::new(ErrorKind::Timeout, "given up"));
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
        let stop = Stop::new(Duration::from_secs(3600));
        stop.still_nothing(Instant::now()).unwrap();
        assert!(!stop.is_asked());
        stop.cut();
        assert!(stop.is_asked() && stop.still_nothing(Instant::now()).is_err());
        let error = Stop::new(Duration::ZERO).still_nothing(Instant::now()).unwrap_err();
        assert!(error.message().contains("nothing moved"), "{error}");
    }
}
