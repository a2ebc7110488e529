//! A channel taken from a pool: calls are counted, and the channel goes back or is dropped, by the result. Knows neither the
//! choice of a path nor how channels are made.

use crate::channel_set::PooledChannel;
use crate::{CallAnswer, CallError, Channel, ChannelBreaker};
use spurline_proto::{AnswerBody, NodeRequest, WelcomeAnswer};
use spurline_types::{Error, ErrorKind, PathStats, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A wait shorter than this proves nothing about the peer: an answer takes as long under load.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// A channel with a request in flight whose answer is not awaited yet. The channel must go back to the pool by
/// [`DemandPool::resume_call`](crate::DemandPool::resume_call) or [`DemandPool::abandon_call`](crate::DemandPool::abandon_call).
pub struct BegunCall(pub(crate) PooledChannel);

/// How a channel was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelLoss {
    Broke,
    /// No answer arrived in time.
    Silent,
    /// The deadline left no time for an answer.
    NotAwaited,
    /// The call was interrupted because another source had answered.
    NotNeeded,
}

/// The pool that a leased channel belongs to. `path` is the index of the channel's path within the pool.
pub(crate) trait ChannelOwner: Sync {
    /// The peer's address as configured.
    fn peer(&self) -> &str;
    /// The counters of this process.
    fn stats(&self) -> &Stats;
    fn path_counters(&self, path: usize) -> &PathStats;
    /// A request on the path stops waiting.
    fn request_ended(&self, path: usize);
    /// An answer of `len` bytes arrived over the path.
    fn record_read(&self, path: usize, len: usize, took: Duration);
    /// Takes a channel back after the call.
    fn return_channel(&self, path: usize, channel: PooledChannel);
    /// Closes a channel after the call.
    fn drop_channel(&self, path: usize, channel: PooledChannel, loss: ChannelLoss, error: Option<&Error>);
}

/// A channel taken from a pool; a drop returns the channel, unless a call broke it.
pub struct ChannelLease<'a> {
    owner: &'a dyn ChannelOwner,
    path: usize,
    welcome: Arc<WelcomeAnswer>,
    /// Empty only after a call that broke the channel.
    channel: Option<PooledChannel>,
    /// The channel was idle before.
    was_idle: bool,
}

impl<'a> ChannelLease<'a> {
    /// The pool counts the request in flight that the lease stands for.
    pub(crate) fn new(owner: &'a dyn ChannelOwner, path: usize, channel: PooledChannel, was_idle: bool) -> Self {
        ChannelLease { owner, path, welcome: Arc::clone(&channel.welcome), channel: Some(channel), was_idle }
    }

    /// Whether the channel was idle before the lease: the peer may just have closed it.
    pub fn was_idle(&self) -> bool {
        self.was_idle
    }

    #[cfg(test)]
    pub(crate) fn path(&self) -> usize {
        self.path
    }

    /// Counts a request that is repeated elsewhere because this path failed.
    pub fn count_retry(&self) {
        self.owner.stats().rdma.retries.add(1);
        self.owner.path_counters(self.path).retries.add(1);
    }

    /// The node's answer to this connection's handshake, including the number for the volume.
    pub fn welcome(&self) -> &WelcomeAnswer {
        &self.welcome
    }

    /// [`Channel::call`], counted. A broken channel is closed before this returns.
    ///
    /// # Errors
    /// As [`Channel::call`]; `Unavailable` after a call that broke the channel.
    pub fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        let sent = request.payload().len();
        let result =
            self.counted_call(deadline, None, |channel, deadline| channel.call(request, body, dst, progress, deadline));
        if sent > 0 && result.is_ok() {
            self.owner.path_counters(self.path).send_bytes.add(sent as u64);
        }
        result
    }

    /// [`ChannelLease::call`] that another thread may interrupt through [`ChannelLease::breaker`] after setting `unless`. The
    /// channel is closed as usual, but neither the peer nor the path counts as failed.
    pub fn call_unless(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        deadline: Instant,
        unless: Option<&AtomicBool>,
    ) -> Result<CallAnswer, CallError> {
        self.counted_call(deadline, unless, |channel, deadline| channel.call(request, body, dst, &mut |_| {}, deadline))
    }

    /// Receives the answer to a request begun on this channel, as [`ChannelLease::call_unless`] would.
    ///
    /// # Errors
    /// As [`ChannelLease::call`].
    pub fn finish_call(
        &mut self,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        deadline: Instant,
        unless: Option<&AtomicBool>,
    ) -> Result<CallAnswer, CallError> {
        self.counted_call(deadline, unless, |channel, deadline| channel.finish_call(body, dst, deadline))
    }

    /// Sends a request and returns with the channel, for [`DemandPool::begin_call`](crate::DemandPool::begin_call).
    pub(crate) fn begin_call(mut self, request: &NodeRequest<'_>, deadline: Instant) -> Option<BegunCall> {
        // The answer counts as the operation.
        let time = deadline.saturating_duration_since(Instant::now());
        self.attempt_call(None, time, |channel| channel.begin_call(request, deadline)).ok()?;
        let channel = self.channel.take()?;
        self.owner.request_ended(self.path);
        Some(BegunCall(channel))
    }

    /// Closes the channel, which another thread may have interrupted after the last call.
    pub fn discard_channel(&mut self) {
        if let Some(channel) = self.channel.take() {
            self.owner.drop_channel(self.path, channel, ChannelLoss::NotNeeded, None);
        }
    }

    /// A handle that ends the channel's call from another thread.
    pub fn breaker(&self) -> Option<&Arc<dyn ChannelBreaker>> {
        self.channel.as_ref()?.breaker.as_ref()
    }

    /// [`Channel::call_while`], counted.
    ///
    /// # Errors
    /// As [`ChannelLease::call`].
    pub fn call_while(
        &mut self,
        request: &NodeRequest<'_>,
        dst: &mut [u8],
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<CallAnswer, CallError> {
        self.counted_call(deadline, None, |channel, deadline| {
            channel.call_while(request, &mut Vec::new(), dst, &mut |_| {}, deadline, meanwhile)
        })
    }

    fn counted_call(
        &mut self,
        deadline: Instant,
        unless: Option<&AtomicBool>,
        call: impl FnOnce(&mut dyn Channel, Instant) -> Result<CallAnswer, CallError>,
    ) -> Result<CallAnswer, CallError> {
        let counted = &self.owner.stats().remotecache;
        let path = self.owner.path_counters(self.path);
        let whole = self.channel.is_some();
        let start = Instant::now();
        let time = deadline.saturating_duration_since(start);
        let result = self.attempt_call(unless, time, |channel| call(channel, deadline));
        if whole {
            let took = start.elapsed();
            counted.ops.add(1);
            counted.lat_us.add_us(took);
            path.ops.add(1);
            path.lat_us.add_us(took);
            if let Ok(answer) = &result {
                self.owner.record_read(self.path, answer.payload_len, took);
            }
        }
        match &result {
            Ok(answer) => {
                counted.recv_bytes.add(answer.payload_len as u64);
                path.recv_bytes.add(answer.payload_len as u64);
            }
            Err(CallError::Answered(error)) => counted.errors.add(u64::from(error.kind() != ErrorKind::NotFound)),
            Err(CallError::Broken(_)) => {}
        }
        result
    }

    /// Runs a call for which there is `time` left; a channel that breaks is counted and dropped.
    fn attempt_call<T>(
        &mut self,
        unless: Option<&AtomicBool>,
        time: Duration,
        call: impl FnOnce(&mut dyn Channel) -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        let Some(entry) = &mut self.channel else {
            let why = format!("{}: the channel broke in an earlier call", self.owner.peer());
            return Err(CallError::Broken(Error::new(ErrorKind::Unavailable, why)));
        };
        let result = call(&mut *entry.channel);
        if let Err(CallError::Broken(error)) = &result {
            let loss = match error.kind() {
                _ if unless.is_some_and(|answered| answered.load(Ordering::Acquire)) => ChannelLoss::NotNeeded,
                ErrorKind::Timeout if time < SHORT_WAIT => ChannelLoss::NotAwaited,
                ErrorKind::Timeout => ChannelLoss::Silent,
                _ => ChannelLoss::Broke,
            };
            if loss != ChannelLoss::NotNeeded {
                self.owner.stats().remotecache.errors.add(1);
                self.owner.path_counters(self.path).errors.add(1);
            }
            if let Some(channel) = self.channel.take() {
                self.owner.drop_channel(self.path, channel, loss, Some(error));
            }
        }
        result
    }

    /// A call whose answer is a single value in the body. `body` is scratch space.
    ///
    /// # Errors
    /// As [`ChannelLease::call`]; `Protocol` when the body does not decode.
    pub fn call_for<T: AnswerBody>(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<T, CallError> {
        self.call(request, body, &mut [], &mut |_| {}, deadline)?;
        T::decode(body).map_err(|e| {
            let what = format_args!("{request} of {}: the answer can't be decoded", self.owner.peer()).to_string();
            CallError::Answered(Error::from(e).context(what))
        })
    }
}

impl Drop for ChannelLease<'_> {
    fn drop(&mut self) {
        if let Some(channel) = self.channel.take() {
            self.owner.return_channel(self.path, channel);
        }
    }
}
