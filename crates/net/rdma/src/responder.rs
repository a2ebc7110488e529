//! Answers one request: payload by writes into the reader's region, the rest by messages. It knows no connection's
//! life.

use crate::depths::{BOUNCE, PIECE, SLOT, SOON, WHOLE};
use crate::hand::Hand;
use crate::rail::Nearness;
use crate::session::Session;
use rustix::io::Errno;
use spurline_mem::Buf;
use spurline_proto::rdma::{Announced, MessageKind, Region};
use spurline_proto::{Header, encode_error_message};
use spurline_transport::{AnswerState, Responder};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{MemoryRegion, RemoteRegion};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Writes one answer.
pub(crate) struct RdmaResponder<'a> {
    hand: &'a Hand<'a>,
    session: &'a mut Session,
    memory: &'a Arc<MemoryRegion>,
    request: &'a Header,
    region: Region,
    /// The rail's, and where the bytes were that went over it.
    numa_node: Option<u32>,
    pub nearness: Nearness,
    /// The longest write that the device can make.
    max_message: usize,
    /// Whether writes can tell the reader of themselves; otherwise a message that ends the answer does.
    announces: bool,
    /// After so many bytes the reader is told of them.
    piece: usize,
    timeout: Duration,
    deadline: Option<Instant>,
    state: AnswerState,
    /// Bytes of the payload: promised, written, and written but not announced.
    promised: usize,
    sent: usize,
    silent: usize,
    /// The frame that ends the answer; empty when the last write does.
    ending: Vec<u8>,
    /// RDMA writes made, and the time from their start to their completion.
    pub writes: u64,
    pub writing: Duration,
}

impl<'a> RdmaResponder<'a> {
    pub fn new(
        hand: &'a Hand<'a>,
        session: &'a mut Session,
        memory: &'a Arc<MemoryRegion>,
        request: &'a Header,
        region: Region,
        max_message: usize,
        timeout: Duration,
    ) -> Self {
        RdmaResponder {
            hand,
            session,
            memory,
            request,
            region,
            numa_node: None,
            nearness: Nearness::default(),
            max_message: max_message.max(4096),
            announces: true,
            piece: PIECE,
            timeout,
            deadline: None,
            state: AnswerState::None,
            promised: 0,
            sent: 0,
            silent: 0,
            ending: Vec::new(),
            writes: 0,
            writing: Duration::ZERO,
        }
    }

    /// The same over a rail of this NUMA node: buffers are taken from there.
    pub fn near(mut self, numa_node: Option<u32>) -> Self {
        self.numa_node = numa_node;
        self
    }

    /// The same, with writes that tell of themselves or don't.
    pub fn announcing(mut self, announces: bool) -> Self {
        self.announces = announces;
        self
    }

    /// Payload bytes written.
    pub fn sent(&self) -> usize {
        self.sent
    }

    /// A reader that takes nothing for this long loses its connection; long answers get a second per MiB on top.
    fn deadline(&mut self) -> Instant {
        let len = self.promised;
        *self.deadline.get_or_insert_with(|| Instant::now() + self.timeout + Duration::from_secs((len >> 20) as u64))
    }

    /// Fixes the answer's lengths and the frame that ends it; says whether the payload may be written.
    fn start(&mut self, status: u16, body: &[u8], payload_len: usize) -> Result<bool> {
        if self.state != AnswerState::None {
            return Err(Error::new(ErrorKind::Invalid, "a request is answered once"));
        }
        let header = self.request.answer(status, body.len(), payload_len).map_err(|e| {
            Error::new(ErrorKind::Invalid, format!("the answer does not fit in a frame, ask for less: {e}"))
        })?;
        if payload_len > SLOT || !self.session.is_free() {
            // Its acknowledgement is waited for, or the reader's leave to send at all.
            self.hand.let_go();
        }
        self.state = AnswerState::Partial;
        self.promised = payload_len;
        self.piece = if payload_len <= WHOLE { WHOLE } else { PIECE };
        self.session.pair.expect_soon(payload_len <= SOON);
        // A reader that asked for more than it has room for finds out from the header.
        let fits = payload_len as u64 <= self.region.len;
        if payload_len == 0 || !body.is_empty() || !fits || !self.announces {
            self.ending = [&header.encode()[..], body].concat();
        }
        Ok(fits)
    }

    fn finish(&mut self) -> Result<()> {
        if !self.ending.is_empty() {
            let deadline = self.deadline();
            self.session.send_frame(MessageKind::Answer, Region::default(), &self.ending, deadline)?;
        }
        self.state = AnswerState::Whole;
        Ok(())
    }

    /// Writes registered bytes and waits until the reader's NIC has them: they are borrowed.
    fn write(&mut self, run: &[&[u8]]) -> Result<()> {
        let deadline = self.deadline();
        let remote = RemoteRegion { addr: self.region.addr, len: self.region.len, rkey: self.region.rkey };
        let Session { pair, line } = &mut *self.session;
        let (sent, silent, writes) = (&mut self.sent, &mut self.silent, &mut self.writes);
        let (promised, piece, memory, announces) = (self.promised, self.piece, self.memory, self.announces);
        let longest = piece.min(self.max_message);
        let last = self.ending.is_empty();
        run.iter().for_each(|slice| self.nearness.count(memory.pool(), self.numa_node, slice));
        let begun = Instant::now();
        let written = pair.writing(deadline, |writing| {
            for chunk in run.iter().flat_map(|slice| slice.chunks(longest)) {
                let (offset, so_far) = (*sent, *sent + chunk.len());
                *silent += chunk.len();
                let end = so_far == promised;
                let mut number = None;
                if announces && (end || *silent >= piece) {
                    line.await_credit(writing.pair(), deadline)?;
                    let granted = line.announced();
                    number = Some(Announced { so_far: so_far as u32, granted, last: end && last }.encode());
                    *silent = 0;
                }
                writing.write(memory, chunk, remote, offset as u64, number)?;
                *sent = so_far;
                *writes += 1;
            }
            Ok::<(), Error>(())
        });
        self.writing += begun.elapsed();
        written
    }

    /// A buffer for bytes that are not registered.
    fn bounce(&mut self, len: usize) -> Result<Buf> {
        let deadline = self.deadline();
        self.memory.pool().alloc_near(len.clamp(1, BOUNCE), self.numa_node, deadline)
    }

    /// Writes a whole payload out of a slot, without waiting for its acknowledgement.
    fn put_short(&mut self, slices: &[&[u8]]) -> Result<()> {
        let deadline = self.deadline();
        let remote = RemoteRegion { addr: self.region.addr, len: self.region.len, rkey: self.region.rkey };
        let Session { pair, line } = &mut *self.session;
        if self.announces {
            line.await_credit(pair, deadline)?;
        }
        let mut slot = pair.take_slot(deadline)?;
        let mut filled = 0;
        for slice in slices {
            slot.bytes_mut()[filled..filled + slice.len()].copy_from_slice(slice);
            filled += slice.len();
        }
        let number = self.announces.then(|| {
            let granted = line.announced();
            Announced { so_far: filled as u32, granted, last: self.ending.is_empty() }.encode()
        });
        pair.write_slot(slot, filled, remote, number, deadline)?;
        self.sent = filled;
        self.writes += 1;
        Ok(())
    }

    /// Writes bytes wherever they are.
    fn put(&mut self, slices: &[&[u8]]) -> Result<()> {
        let len: usize = slices.iter().map(|slice| slice.len()).sum();
        if len == self.promised && (1..=SLOT).contains(&len) {
            return self.put_short(slices);
        }
        let mut slices = slices;
        while let Some(first) = slices.first() {
            let registered = self.memory.contains(first);
            let n = slices.iter().take_while(|slice| self.memory.contains(slice) == registered).count();
            let (run, rest) = slices.split_at(n);
            slices = rest;
            if registered {
                self.write(run)?;
                continue;
            }
            let len = run.iter().map(|slice| slice.len()).sum();
            if len == 0 {
                continue;
            }
            let mut bounce = self.bounce(len)?;
            let mut filled = 0;
            for slice in run {
                let mut slice = *slice;
                while !slice.is_empty() {
                    let n = slice.len().min(bounce.len() - filled);
                    bounce[filled..filled + n].copy_from_slice(&slice[..n]);
                    (filled, slice) = (filled + n, &slice[n..]);
                    if filled == bounce.len() {
                        self.write(&[&bounce])?;
                        filled = 0;
                    }
                }
            }
            if filled > 0 {
                self.write(&[&bounce[..filled]])?;
            }
        }
        Ok(())
    }
}

impl Responder for RdmaResponder<'_> {
    fn data(&mut self, body: &[u8], slices: &[&[u8]]) -> Result<()> {
        let len = slices.iter().map(|slice| slice.len()).sum();
        if self.start(0, body, len)? {
            self.put(slices)?;
        }
        self.finish()
    }

    fn file(&mut self, body: &[u8], file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<()> {
        if !self.start(0, body, len)? {
            return self.finish();
        }
        let mut left = len;
        if left > 0 {
            self.waits();
            let mut bounce = self.bounce(left)?;
            while left > 0 {
                let want = left.min(bounce.len());
                let mut filled = 0;
                while filled < want {
                    let at = offset + (len - left + filled) as u64;
                    match rustix::io::pread(file, &mut bounce[filled..want], at) {
                        Ok(0) => {
                            let why = format!("the file ends {} bytes before the end of the answer", left - filled);
                            return Err(Error::new(ErrorKind::Corrupt, why));
                        }
                        Ok(n) => filled += n,
                        Err(Errno::INTR) => {}
                        Err(e) => return Err(Error::io("reading a file for an answer failed", &e.into())),
                    }
                }
                self.write(&[&bounce[..want]])?;
                left -= want;
            }
        }
        self.finish()
    }

    fn begin(&mut self, body: &[u8], len: usize) -> Result<()> {
        let fits = self.start(0, body, len)?;
        if len == 0 || !fits { self.finish() } else { Ok(()) }
    }

    fn push(&mut self, bytes: &[u8]) -> Result<()> {
        if self.state == AnswerState::Whole && self.sent < self.promised {
            // The reader has been told that it lacks room.
            return Ok(());
        }
        if bytes.len() > self.promised - self.sent {
            let left = self.promised - self.sent;
            let why = format!("{} bytes pushed, {left} were left of what was promised", bytes.len());
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        self.put(&[bytes])?;
        if self.sent == self.promised && !bytes.is_empty() { self.finish() } else { Ok(()) }
    }

    fn error(&mut self, error: &Error) -> Result<()> {
        let mut body = Vec::new();
        encode_error_message(error, &mut body);
        // A code of 0 would read as success.
        self.start(error.kind().code().max(1), &body, 0)?;
        self.finish()
    }

    fn waits(&mut self) {
        self.hand.waits();
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn progress(&self) -> AnswerState {
        self.state
    }
}
