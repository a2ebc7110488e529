//! Executes requests on other threads than the one that answers. It knows neither the source nor what a request means.
//!
//! The kernel refuses RDMA requests and calls of the connection manager on descriptors that the thread's user did not open,
//! and takes a thread that became another user and came back for another user. So a thread that answers over RDMA never acts
//! as a caller. What a request and its answer need is copied: names and attributes; the
//! bytes of a write into a buffer of the node's budget. Reads are answered where they arrive.

use crate::CacheNode;
use parking_lot::Mutex;
use spurline_exec::PriorityWorkers;
use spurline_proto::{FrameHeader, FrameOp, HEADER_LEN, NodeRequest, WriteCall, WriteRequest};
use spurline_transport::{AnswerState, Responder};
use spurline_types::{Error, ErrorKind, Result};
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock, Weak};

/// Limit of threads: the requests that a node's workers serve at once.
const THREADS_MAX: usize = 256;

/// The threads that act as callers.
#[derive(Default)]
pub(crate) struct CallerThreads {
    node: OnceLock<Weak<CacheNode>>,
    workers: Mutex<Option<Arc<PriorityWorkers>>>,
}

/// Whether the call is executed as its caller; others use open files only.
pub(crate) fn acts_as_caller(call: &WriteCall<'_>) -> bool {
    !matches!(
        call,
        WriteCall::Read { .. }
            | WriteCall::Write { lose_privileges: false, .. }
            | WriteCall::Sync { .. }
            | WriteCall::Flush { .. }
            | WriteCall::FindGrant { .. }
            | WriteCall::Renew
            | WriteCall::KeepAnswers { .. }
    )
}

impl CallerThreads {
    pub fn set_node(&self, node: &Arc<CacheNode>) {
        // Only the first call has an effect.
        let _ = self.node.set(Arc::downgrade(node));
    }

    /// Executes the request on another thread, and answers it on this one.
    ///
    /// # Errors
    /// Those of the request; `Throttled` when there is no thread, or no memory for the bytes of a write.
    pub fn serve(&self, request: &WriteRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        let node = self.node.get().and_then(Weak::upgrade).ok_or_else(no_thread_error)?;
        let mut frame = Vec::with_capacity(512);
        NodeRequest::Write(*request).encode(0, &mut frame)?;
        let payload = copy_payload(&node, request, responder.numa_node())?;
        let (sender, answered) = sync_channel(1);
        let workers = Arc::clone(
            self.workers.lock().get_or_insert_with(|| Arc::new(PriorityWorkers::new("change", THREADS_MAX))),
        );
        workers.run_urgent(move || {
            // The receiver waits; it is gone only if its thread panicked.
            let _ = sender.send(execute_frame(&node, &frame, &payload));
        });
        responder.send_data(&answered.recv().map_err(|_| no_thread_error())??, &[])
    }
}

/// The bytes of a request, for another thread. A request with a buffer does not wait for a second one: those that wait for
/// theirs could hold them all.
fn copy_payload(
    node: &CacheNode,
    request: &WriteRequest<'_>,
    near: Option<u32>,
) -> Result<Box<dyn Deref<Target = [u8]> + Send>> {
    let payload = request.payload;
    if payload.is_empty() || !matches!(request.call, WriteCall::Write { .. }) {
        return Ok(Box::new(payload.to_vec()));
    }
    let mut buffer = node
        .shared
        .tier
        .pool()
        .try_alloc_near(payload.len(), near)
        .ok_or_else(|| Error::new(ErrorKind::Throttled, "the node has no memory for the bytes of a write"))?;
    buffer.copy_from_slice(payload);
    Ok(Box::new(buffer))
}

fn execute_frame(node: &CacheNode, frame: &[u8], payload: &[u8]) -> Result<Vec<u8>> {
    let (head, body) = frame.split_first_chunk::<HEADER_LEN>().ok_or_else(no_frame_error)?;
    let body = body.get(..FrameHeader::decode(head)?.body_len as usize).ok_or_else(no_frame_error)?;
    let request = NodeRequest::decode(FrameOp::Write, body).and_then(|request| request.with_payload(payload))?;
    let NodeRequest::Write(write) = request else {
        return Err(Error::new(ErrorKind::Invalid, "no change"));
    };
    let mut answer = AnswerCopy::default();
    node.serve_write(&write, &mut answer)?;
    answer.0.ok_or_else(|| Error::new(ErrorKind::Invalid, "no answer"))
}

/// An answer without payload.
#[derive(Default)]
struct AnswerCopy(Option<Vec<u8>>);

impl Responder for AnswerCopy {
    fn send_data(&mut self, body: &[u8], slices: &[&[u8]]) -> Result<()> {
        if slices.iter().any(|slice| !slice.is_empty()) {
            return Err(no_payload());
        }
        self.0 = Some(body.to_vec());
        Ok(())
    }
    fn send_file(&mut self, _: &[u8], _: BorrowedFd<'_>, _: u64, _: usize) -> Result<()> {
        Err(no_payload())
    }
    fn begin_payload(&mut self, _: &[u8], _: usize) -> Result<()> {
        Err(no_payload())
    }
    fn push_payload(&mut self, _: &[u8]) -> Result<()> {
        Err(no_payload())
    }
    fn send_error(&mut self, error: &Error) -> Result<()> {
        Err(error.clone())
    }
    fn answer_state(&self) -> AnswerState {
        if self.0.is_some() { AnswerState::Whole } else { AnswerState::None }
    }
}

fn no_payload() -> Error {
    Error::new(ErrorKind::Invalid, "an answer with bytes of a file is not copied")
}

fn no_thread_error() -> Error {
    Error::new(ErrorKind::Throttled, "the node has no thread for the request")
}

fn no_frame_error() -> Error {
    Error::new(ErrorKind::Invalid, "no frame")
}
