//! A decorator that makes the channels of any transport fail. Knows no frames, and acts before and after calls.

use crate::{FaultPlan, SimFault};
use spurline_proto::NodeRequest;
use spurline_transport::{CallAnswer, CallError, Channel, ConnectionEndpoints, Connector, TransportKind};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Instant;

/// Makes channels that fail according to a plan.
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
        Ok(Box::new(FaultyChannel {
            endpoints: inner.endpoints().clone(),
            inner: Some(inner),
            plan: Arc::clone(&self.plan),
        }))
    }
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn peer(&self) -> &str {
        self.inner.peer()
    }
}

struct FaultyChannel {
    /// `None` after a fault that broke the channel.
    inner: Option<Box<dyn Channel>>,
    plan: Arc<FaultPlan>,
    endpoints: ConnectionEndpoints,
}

impl FaultyChannel {
    fn break_with(&mut self, kind: ErrorKind, why: &str) -> Result<CallAnswer, CallError> {
        self.inner = None;
        Err(CallError::Broken(Error::new(kind, format!("{}: {why} (injected)", self.endpoints))))
    }
}

impl Channel for FaultyChannel {
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        let Some(inner) = &mut self.inner else {
            return self.break_with(ErrorKind::Unavailable, "the channel broke in an earlier call");
        };
        match self.plan.draw_fault() {
            // Other transports can't repeat an answer: the answer arrives normally.
            None | Some(SimFault::Twice) => inner.call(request, body, dst, progress, deadline),
            Some(SimFault::Delay(delay)) => {
                let answer = inner.call(request, body, dst, progress, deadline);
                let left = deadline.saturating_duration_since(Instant::now());
                std::thread::sleep(delay.min(left));
                if delay < left { answer } else { self.break_with(ErrorKind::Timeout, "no answer before the deadline") }
            }
            Some(SimFault::Drop) => self.break_with(ErrorKind::Unavailable, "the connection ended"),
            Some(SimFault::Cut) => {
                // The bytes reported as landed are correct; those behind are damaged.
                let cut = self.plan.draw_below(dst.len() + 1);
                if inner.call(request, body, dst, &mut |n| progress(n.min(cut)), deadline).is_ok() {
                    dst[cut..].fill(0xdb);
                }
                self.break_with(ErrorKind::Unavailable, "the connection ended within the answer")
            }
            Some(SimFault::Garbage) => {
                dst.fill(0xdb);
                self.break_with(ErrorKind::Protocol, "the answer is no frame")
            }
            Some(SimFault::Stall) => {
                std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
                self.break_with(ErrorKind::Timeout, "no answer before the deadline")
            }
        }
    }

    fn endpoints(&self) -> &ConnectionEndpoints {
        &self.endpoints
    }

    fn looks_alive(&mut self) -> bool {
        self.inner.as_mut().is_some_and(|inner| inner.looks_alive())
    }
}
