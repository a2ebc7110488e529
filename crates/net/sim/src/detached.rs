//! A decorator whose channels work on separate threads: a reader that gives up, or whose connection breaks, leaves the node at
//! work on the request, as a real network does. Knows no faults and no meaning of requests.

use parking_lot::{Condvar, Mutex};
use spurline_proto::{FrameHeader, FrameOp, HEADER_LEN, NodeRequest};
use spurline_transport::{
    CallAnswer, CallError, Channel, ChannelBreaker, ConnectionEndpoints, Connector, TransportKind,
};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Instant;

/// Called on each thread of a channel before the first request.
pub type ThreadStart = dyn Fn() + Send + Sync;

/// Makes channels with a thread each.
pub struct DetachedConnector {
    inner: Arc<dyn Connector>,
    at_start: Arc<ThreadStart>,
}

impl DetachedConnector {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Connector>, at_start: Arc<ThreadStart>) -> Self {
        DetachedConnector { inner, at_start }
    }
}

impl Connector for DetachedConnector {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        let inner = self.inner.connect(deadline)?;
        let endpoints = inner.endpoints().clone();
        let breaker = Arc::new(DetachedBreaker { call: DetachedCall::default(), inner: inner.breaker() });
        let inner = Arc::new(Mutex::new(inner));
        let served = Arc::clone(&breaker);
        let channel = Arc::clone(&inner);
        let at_start = Arc::clone(&self.at_start);
        let spawned = std::thread::Builder::new().name("channel".into()).spawn(move || {
            at_start();
            served.call.serve(&channel);
        });
        spawned.map_err(|e| Error::io("can't start a thread", &e))?;
        Ok(Box::new(DetachedChannel { breaker, inner, endpoints }))
    }
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn peer(&self) -> &str {
        self.inner.peer()
    }
}

/// A request on the way to the thread.
struct SentCall {
    op: FrameOp,
    body: Vec<u8>,
    payload: Vec<u8>,
    answer_max: usize,
    deadline: Instant,
}

/// The answer on the way back.
struct ReturnedAnswer {
    body: Vec<u8>,
    bytes: Vec<u8>,
    result: Result<CallAnswer, CallError>,
}

#[derive(Default)]
struct CallState {
    sent: Option<SentCall>,
    returned: Option<ReturnedAnswer>,
    /// The reader is gone.
    left: bool,
}

#[derive(Default)]
struct DetachedCall {
    state: Mutex<CallState>,
    changed: Condvar,
}

impl DetachedCall {
    /// Sends the requests in turn, until the reader is gone.
    fn serve(&self, inner: &Mutex<Box<dyn Channel>>) {
        loop {
            let mut state = self.state.lock();
            let sent = loop {
                if let Some(sent) = state.sent.take() {
                    break sent;
                }
                if state.left {
                    return;
                }
                self.changed.wait(&mut state);
            };
            drop(state);
            let mut body = Vec::new();
            let mut bytes = vec![0; sent.answer_max];
            let request = NodeRequest::decode(sent.op, &sent.body).and_then(|call| call.with_payload(&sent.payload));
            let result = match request {
                Ok(request) => inner.lock().call(&request, &mut body, &mut bytes, &mut |_| {}, sent.deadline),
                Err(error) => Err(CallError::Broken(error.into())),
            };
            let mut state = self.state.lock();
            state.returned = Some(ReturnedAnswer { body, bytes, result });
            self.changed.notify_all();
        }
    }
}

struct DetachedBreaker {
    call: DetachedCall,
    inner: Option<Arc<dyn ChannelBreaker>>,
}

impl ChannelBreaker for DetachedBreaker {
    fn break_channel(&self) {
        self.call.state.lock().left = true;
        self.call.changed.notify_all();
        if let Some(inner) = &self.inner {
            inner.break_channel();
        }
    }
}

struct DetachedChannel {
    breaker: Arc<DetachedBreaker>,
    /// Locked during a call.
    inner: Arc<Mutex<Box<dyn Channel>>>,
    endpoints: ConnectionEndpoints,
}

impl Channel for DetachedChannel {
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        let mut frame = Vec::new();
        request.encode(0, &mut frame).map_err(|e| CallError::not_sent(&e))?;
        let mut sent_body = frame.split_off(HEADER_LEN);
        let head: Option<&[u8; HEADER_LEN]> = frame.first_chunk();
        let header = head.map(FrameHeader::decode).and_then(std::result::Result::ok);
        // Padding follows.
        sent_body.truncate(header.map_or(0, |header| header.body_len as usize));
        let payload = request.payload().to_vec();
        let call = &self.breaker.call;
        let mut state = call.state.lock();
        state.sent = Some(SentCall { op: request.op(), body: sent_body, payload, answer_max: dst.len(), deadline });
        call.changed.notify_all();
        let failure = loop {
            if let Some(returned) = state.returned.take() {
                drop(state);
                *body = returned.body;
                dst.copy_from_slice(&returned.bytes);
                if let Ok(answer) = &returned.result {
                    progress(answer.payload_len);
                }
                return returned.result;
            }
            if state.left {
                break crate::node::broken_call(ErrorKind::Unavailable, "the connection ended");
            }
            if call.changed.wait_until(&mut state, deadline).timed_out() {
                break crate::node::broken_call(ErrorKind::Timeout, "no answer before the deadline");
            }
        };
        drop(state);
        self.breaker.break_channel();
        Err(failure)
    }

    fn breaker(&self) -> Option<Arc<dyn ChannelBreaker>> {
        Some(Arc::clone(&self.breaker) as Arc<dyn ChannelBreaker>)
    }

    fn endpoints(&self) -> &ConnectionEndpoints {
        &self.endpoints
    }

    fn looks_alive(&mut self) -> bool {
        let left = self.breaker.call.state.lock().left;
        !left && self.inner.try_lock().is_some_and(|mut inner| inner.looks_alive())
    }
}

impl Drop for DetachedChannel {
    fn drop(&mut self) {
        self.breaker.break_channel();
    }
}
