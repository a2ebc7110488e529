//! Frames over a byte stream: how an answer is received into the reader's memory, and how an answer is sent. Knows no socket: TCP
//! and the simulated transport supply the stream; RDMA does not use this module.

use crate::service::{AnswerState, Responder};
use crate::{CallAnswer, CallError};
use spurline_proto::{FrameHeader, FrameOp, HEADER_LEN, decode_error, encode_error_message, frame_padding};
use spurline_types::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// The receiving half of a connection.
pub trait ByteStream {
    /// Receives at least one byte, into `first` and then `second`, and returns the count. With `all`, waits until both are full
    /// where cheap for the transport; the caller loops in any case.
    ///
    /// # Errors
    /// `Timeout` when `deadline` passed, `Unavailable` when the stream ended.
    fn receive_into(&mut self, first: &mut [u8], second: &mut [u8], all: bool, deadline: Instant) -> Result<usize>;
}

/// Payload bytes per receive call. Small enough that a caller that forwards bytes gets them early and the sender's
/// next packets find buffer space; large enough that four system calls per MiB do not show.
const PAYLOAD_PIECE_BYTES: usize = 256 << 10;
/// Room for header and body of an answer without payload, received with a single call.
const SMALL_BODY: usize = 4 << 10;

/// Receives the answer to request `id`: payload into `dst`, body into `body`.
///
/// # Errors
/// As [`crate::Channel::call`]; the caller adds the peer and the request.
pub fn receive_answer(
    stream: &mut impl ByteStream,
    op: FrameOp,
    id: u64,
    body: &mut Vec<u8>,
    dst: &mut [u8],
    progress: &mut dyn FnMut(usize),
    deadline: Instant,
) -> Result<CallAnswer, CallError> {
    // The first call receives the header and any payload directly behind it. An answer without payload has its body
    // there.
    let mut head = [0u8; HEADER_LEN];
    let mut got = 0;
    let no_payload = dst.is_empty();
    body.clear();
    if no_payload {
        body.resize(SMALL_BODY, 0);
    }
    while got < HEADER_LEN {
        let first_piece = dst.len().min(PAYLOAD_PIECE_BYTES);
        let rest: &mut [u8] = if no_payload { body } else { &mut dst[..first_piece] };
        got += stream.receive_into(&mut head[got..], rest, false, deadline).map_err(CallError::Broken)?;
        FrameHeader::check_start(&head[..got.min(HEADER_LEN)]).map_err(|e| CallError::Broken(e.into()))?;
    }
    let header = FrameHeader::decode(&head).map_err(|e| CallError::Broken(e.into()))?;
    header.check_answer(op, id).map_err(|e| CallError::Broken(e.into()))?;
    let payload_len = header.payload_len as usize;
    let body_len = header.body_len as usize;
    if payload_len > dst.len() {
        return Err(protocol_error(format!(
            "the payload has {payload_len} bytes, at most {} were requested",
            dst.len()
        )));
    }

    // The tail (body and padding) follows the payload. The part that was received already lies behind the payload in `dst`, or in
    // `body`.
    let tail_len = body_len + frame_padding(payload_len + body_len).len();
    let mut landed = (got - HEADER_LEN).min(payload_len);
    let mut tail_got = got - HEADER_LEN - landed;
    if tail_got > tail_len {
        return Err(protocol_error(format!("{} bytes follow the answer", tail_got - tail_len)));
    }
    if !no_payload {
        body.extend_from_slice(&dst[landed..landed + tail_got]);
    }
    body.resize(tail_len, 0);
    if landed > 0 {
        progress(landed);
    }
    while landed < payload_len || tail_got < tail_len {
        let until = payload_len.min(landed + PAYLOAD_PIECE_BYTES);
        // The last piece includes the tail.
        let tail = if until == payload_len { &mut body[tail_got..] } else { &mut [] };
        let piece = until - landed;
        let n = if piece > 0 {
            stream.receive_into(&mut dst[landed..until], tail, true, deadline)
        } else {
            stream.receive_into(tail, &mut [], true, deadline)
        }
        .map_err(|e| CallError::Broken(e.context(format_args!("{landed} of {payload_len} bytes had arrived"))))?;
        tail_got += n.saturating_sub(piece);
        if piece > 0 {
            landed += n.min(piece);
            progress(landed);
        }
    }
    body.truncate(body_len);
    if header.status == 0 {
        Ok(CallAnswer { payload_len })
    } else {
        Err(CallError::Answered(decode_error(header.status, body)))
    }
}

fn protocol_error(why: String) -> CallError {
    CallError::Broken(Error::new(ErrorKind::Protocol, why))
}

/// The sending half of a connection.
pub trait FrameSink {
    /// Sends `head`, `slices` and both parts of `tail` in order; `more` means that the frame continues.
    ///
    /// # Errors
    /// `Timeout` when the reader does not read, `Unavailable` when the reader is gone.
    fn send_parts(&mut self, head: &[u8], slices: &[&[u8]], tail: [&[u8]; 2], more: bool) -> Result<()>;

    /// Sends `len` bytes of a file.
    ///
    /// # Errors
    /// The same, and the errors of reading the file.
    fn send_file(&mut self, file: BorrowedFd<'_>, offset: u64, len: usize, more: bool) -> Result<()>;

    /// As [`Responder::before_wait`].
    fn before_wait(&mut self) {}

    /// As [`Responder::check_reader`].
    ///
    /// # Errors
    /// The same.
    fn check_reader(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A [`Responder`] that writes an answer's frame to a [`FrameSink`].
pub struct FrameResponder<'a, S> {
    sink: &'a mut S,
    request: &'a FrameHeader,
    state: AnswerState,
    /// Payload bytes still owed after `begin_payload`, and the body and padding that follow.
    owed: usize,
    late_body: Vec<u8>,
    sent: usize,
}

impl<'a, S: FrameSink> FrameResponder<'a, S> {
    /// A responder to `request`.
    pub fn new(sink: &'a mut S, request: &'a FrameHeader) -> Self {
        FrameResponder { sink, request, state: AnswerState::None, owed: 0, late_body: Vec::new(), sent: 0 }
    }

    /// Payload bytes sent so far.
    pub fn sent(&self) -> usize {
        self.sent
    }

    fn answer_header(&mut self, status: u16, body_len: usize, payload_len: usize) -> Result<[u8; HEADER_LEN]> {
        if self.state != AnswerState::None {
            return Err(Error::new(ErrorKind::Invalid, "the request was answered already"));
        }
        let header = self.request.new_answer(status, body_len, payload_len).map_err(|e| {
            Error::new(ErrorKind::Invalid, format!("the answer does not fit in a frame, request less: {e}"))
        })?;
        self.state = AnswerState::Partial;
        Ok(header.encode())
    }
}

impl<S: FrameSink> Responder for FrameResponder<'_, S> {
    fn send_data(&mut self, body: &[u8], slices: &[&[u8]]) -> Result<()> {
        let len = slices.iter().map(|slice| slice.len()).sum();
        let head = self.answer_header(0, body.len(), len)?;
        self.sink.send_parts(&head, slices, [body, frame_padding(len + body.len())], false)?;
        self.sent = len;
        self.state = AnswerState::Whole;
        Ok(())
    }

    fn send_file(&mut self, body: &[u8], file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<()> {
        let head = self.answer_header(0, body.len(), len)?;
        let pad = frame_padding(len + body.len());
        let tail = !body.is_empty() || !pad.is_empty();
        self.sink.send_parts(&head, &[], [&[], &[]], len > 0 || tail)?;
        self.sink.send_file(file, offset, len, tail)?;
        if tail {
            self.sink.send_parts(&[], &[], [body, pad], false)?;
        }
        self.sent = len;
        self.state = AnswerState::Whole;
        Ok(())
    }

    fn begin_payload(&mut self, body: &[u8], len: usize) -> Result<()> {
        if len == 0 {
            return self.send_data(body, &[]);
        }
        let head = self.answer_header(0, body.len(), len)?;
        self.sink.send_parts(&head, &[], [&[], &[]], true)?;
        self.owed = len;
        self.late_body = body.to_vec();
        self.late_body.extend_from_slice(frame_padding(len + body.len()));
        Ok(())
    }

    fn push_payload(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() > self.owed {
            let why = format!("{} bytes pushed, but only {} of the announced ones were left", bytes.len(), self.owed);
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let last = bytes.len() == self.owed;
        let tail: &[u8] = if last { &self.late_body } else { &[] };
        // Without `more`: the reader can use these bytes while the rest is in transit.
        self.sink.send_parts(&[], &[bytes], [tail, &[]], false)?;
        self.owed -= bytes.len();
        self.sent += bytes.len();
        if last && !bytes.is_empty() {
            self.state = AnswerState::Whole;
        }
        Ok(())
    }

    fn send_error(&mut self, error: &Error) -> Result<()> {
        let mut body = Vec::new();
        encode_error_message(error, &mut body);
        // A code of 0 would read as success.
        let head = self.answer_header(error.kind().code().max(1), body.len(), 0)?;
        self.sink.send_parts(&head, &[], [&body, frame_padding(body.len())], false)?;
        self.state = AnswerState::Whole;
        Ok(())
    }

    fn answer_state(&self) -> AnswerState {
        self.state
    }

    fn before_wait(&mut self) {
        self.sink.before_wait();
    }

    fn check_reader(&mut self) -> Result<()> {
        self.sink.check_reader()
    }
}
