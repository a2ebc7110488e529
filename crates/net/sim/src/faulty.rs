//! A decorator that makes the channels of any transport fail. It knows no frames: it acts before and after calls.

use crate::{Fault, FaultPlan};
use spurline_proto::Request;
use spurline_transport::{Answer, CallError, Channel, Connector, Endpoints, TransportKind};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Instant;

/// Makes channels that fail by plan.
pub struct FaultyConnector {
    inner: Arc<dyn Connector>,
    plan: Arc<FaultPlan>,
}

impl FaultyConnector {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Connector>, plan: Arc<FaultPlan>) -> Self {
        FaultyConnector { inner, plan }
    }
}

impl Connector for FaultyConnector {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        let inner = self.inner.connect(deadline)?;
        Ok(Box::new(Faulty { endpoints: inner.endpoints().clone(), inner: Some(inner), plan: Arc::clone(&self.plan) }))
    }
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn peer(&self) -> &str {
        self.inner.peer()
    }
}

struct Faulty {
    /// Gone once a fault broke it.
    inner: Option<Box<dyn Channel>>,
    plan: Arc<FaultPlan>,
    endpoints: Endpoints,
}

impl Faulty {
    fn broken(&mut self, kind: ErrorKind, why: &str) -> Result<Answer, CallError> {
        self.inner = None;
        Err(CallError::Broken(Error::new(kind, format!("{}: {why} (injected)", self.endpoints))))
    }
}

impl Channel for Faulty {
    fn call(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<Answer, CallError> {
        let Some(inner) = &mut self.inner else {
            return self.broken(ErrorKind::Unavailable, "the channel broke in an earlier call");
        };
        match self.plan.draw() {
            // Of another transport no answer can be had twice: this one comes as it should.
            None | Some(Fault::Twice) => inner.call(request, body, dst, progress, deadline),
            Some(Fault::Delay(delay)) => {
                std::thread::sleep(delay.min(deadline.saturating_duration_since(Instant::now())));
                inner.call(request, body, dst, progress, deadline)
            }
            Some(Fault::Drop) => self.broken(ErrorKind::Unavailable, "the connection ended"),
            Some(Fault::Cut) => {
                // The bytes that landed were reported and are right; those behind are damaged.
                let cut = self.plan.below(dst.len() + 1);
                let mut within = |n: usize| progress(n.min(cut));
                if inner.call(request, body, dst, &mut within, deadline).is_ok() {
                    dst[cut..].fill(0xdb);
                }
                self.broken(ErrorKind::Unavailable, "the connection ended within the answer")
            }
            Some(Fault::Garbage) => {
                dst.fill(0xdb);
                self.broken(ErrorKind::Protocol, "the answer is no frame")
            }
            Some(Fault::Stall) => {
                std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
                self.broken(ErrorKind::Timeout, "no answer before the deadline")
            }
        }
    }

    fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    fn probe(&mut self) -> bool {
        self.inner.as_mut().is_some_and(|inner| inner.probe())
    }
}
