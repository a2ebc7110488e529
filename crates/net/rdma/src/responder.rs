//! Answers a request: the payload by writes into the reader's region, the rest by messages. Does not manage the connection.

use crate::depths::{BOUNCE, PIECE, SLOT, SOON, WHOLE};
use crate::polled_set::PolledSet;
use crate::rail::NumaBytes;
use crate::session::RdmaSession;
use rustix::io::Errno;
use spurline_mem::PoolBuf;
use spurline_proto::rdma::{MessageKind, PayloadRegion, WriteNotice};
use spurline_proto::{FrameHeader, encode_error_message};
use spurline_transport::{AnswerState, Responder};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{MemoryRegion, RemoteRegion};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sends an answer.
pub(crate) struct RdmaResponder<'a> {
    hand: &'a PolledSet<'a>,
    session: &'a mut RdmaSession,
    memory: &'a Arc<MemoryRegion>,
    request: &'a FrameHeader,
    region: PayloadRegion,
    /// The rail's NUMA node, and the NUMA nodes of the carried bytes.
    numa_node: Option<u32>,
    pub nearness: NumaBytes,
    /// The device's longest write.
    max_message: usize,
    /// Whether writes carry immediate data; otherwise a final message announces the payload.
    announces: bool,
    /// Bytes after which the reader gets an announcement.
    piece: usize,
    timeout: Duration,
    /// Whether the request's bytes were just read from the reader's memory.
    fetched: bool,
    answer_deadline: Option<Instant>,
    state: AnswerState,
    /// Bytes of the payload: promised, written, and written but not announced.
    promised: usize,
    sent_bytes: usize,
    silent: usize,
    /// The final frame of the answer; empty when the last write ends the answer.
    ending: Vec<u8>,
    /// Number of RDMA writes, and the time from start to completion.
    pub writes: u64,
    pub writing: Duration,
}

impl<'a> RdmaResponder<'a> {
    pub fn new(
        hand: &'a PolledSet<'a>,
        session: &'a mut RdmaSession,
        memory: &'a Arc<MemoryRegion>,
        request: &'a FrameHeader,
        region: PayloadRegion,
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
            nearness: NumaBytes::default(),
            max_message: max_message.max(4096),
            announces: true,
            piece: PIECE,
            timeout,
            fetched: false,
            answer_deadline: None,
            state: AnswerState::None,
            promised: 0,
            sent_bytes: 0,
            silent: 0,
            ending: Vec::new(),
            writes: 0,
            writing: Duration::ZERO,
        }
    }

    /// Sets the NUMA node of the rail: buffers come from there.
    pub fn near_node(mut self, numa_node: Option<u32>) -> Self {
        self.numa_node = numa_node;
        self
    }

    /// Sets whether writes carry immediate data.
    pub fn with_announcements(mut self, announces: bool) -> Self {
        self.announces = announces;
        self
    }

    /// Sets whether the request's bytes were just read from the reader's memory.
    pub fn after_fetch(mut self, fetched: bool) -> Self {
        self.fetched = fetched;
        self
    }

    /// Payload bytes written.
    pub fn sent(&self) -> usize {
        self.sent_bytes
    }

    /// The deadline of the answer: a reader that accepts nothing for the timeout loses the connection; long answers get a second
    /// per MiB in addition.
    fn deadline(&mut self) -> Instant {
        let len = self.promised;
        *self
            .answer_deadline
            .get_or_insert_with(|| Instant::now() + self.timeout + Duration::from_secs((len >> 20) as u64))
    }

    /// Fixes the answer's lengths and final frame; returns whether the payload may be written.
    fn start_answer(&mut self, status: u16, body: &[u8], payload_len: usize) -> Result<bool> {
        if self.state != AnswerState::None {
            return Err(Error::new(ErrorKind::Invalid, "a request can be answered only once"));
        }
        let header = self.request.new_answer(status, body.len(), payload_len).map_err(|e| {
            Error::new(ErrorKind::Invalid, format!("the answer does not fit in a frame, request less: {e}"))
        })?;
        if payload_len > SLOT || !self.session.can_send_now() {
            // Otherwise the answer waits for an acknowledgement, or for a credit of the reader.
            self.hand.release_all();
        }
        self.state = AnswerState::Partial;
        self.promised = payload_len;
        self.piece = if payload_len <= WHOLE { WHOLE } else { PIECE };
        self.session.pair.expect_soon(payload_len <= SOON);
        // A payload larger than the reader's region is visible to the reader in the header.
        let fits = payload_len as u64 <= self.region.len;
        if payload_len == 0 || !body.is_empty() || !fits || !self.announces {
            self.ending = [&header.encode()[..], body].concat();
        }
        Ok(fits)
    }

    fn finish_answer(&mut self) -> Result<()> {
        if !self.ending.is_empty() {
            let deadline = self.deadline();
            self.session.send_frame(MessageKind::Answer, PayloadRegion::default(), &self.ending, deadline)?;
        }
        self.state = AnswerState::Whole;
        Ok(())
    }

    /// Writes registered bytes and waits for the acknowledgement of the reader's NIC, as the bytes are borrowed.
    fn write_registered(&mut self, run: &[&[u8]]) -> Result<()> {
        let deadline = self.deadline();
        let remote = RemoteRegion { addr: self.region.addr, len: self.region.len, rkey: self.region.rkey };
        let RdmaSession { pair, line } = &mut *self.session;
        let sent = &mut self.sent_bytes;
        let silent = &mut self.silent;
        let writes = &mut self.writes;
        let promised = self.promised;
        let piece = self.piece;
        let memory = self.memory;
        let announces = self.announces;
        let longest = piece.min(self.max_message);
        let last = self.ending.is_empty();
        run.iter().for_each(|slice| self.nearness.count_bytes(memory.pool(), self.numa_node, slice));
        let begun = Instant::now();
        let written = pair.write_borrowed(deadline, |writing| {
            for chunk in run.iter().flat_map(|slice| slice.chunks(longest)) {
                let offset = *sent;
                let so_far = *sent + chunk.len();
                *silent += chunk.len();
                let end = so_far == promised;
                let mut number = None;
                if announces && (end || *silent >= piece) {
                    line.await_credit(writing.pair(), deadline)?;
                    let granted = line.announce_write();
                    number = Some(WriteNotice { so_far: so_far as u32, granted, last: end && last }.encode());
                    *silent = 0;
                }
                writing.post_write(memory, chunk, remote, offset as u64, number)?;
                *sent = so_far;
                *writes += 1;
            }
            Ok::<(), Error>(())
        });
        self.writing += begun.elapsed();
        written
    }

    /// A buffer for unregistered bytes.
    fn bounce_buffer(&mut self, len: usize) -> Result<PoolBuf> {
        let deadline = self.deadline();
        self.memory.pool().alloc_near(len.clamp(1, BOUNCE), self.numa_node, deadline)
    }

    /// Writes a whole payload from a slot, without waiting for the acknowledgement.
    fn write_short(&mut self, slices: &[&[u8]]) -> Result<()> {
        let deadline = self.deadline();
        let remote = RemoteRegion { addr: self.region.addr, len: self.region.len, rkey: self.region.rkey };
        let RdmaSession { pair, line } = &mut *self.session;
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
            let granted = line.announce_write();
            WriteNotice { so_far: filled as u32, granted, last: self.ending.is_empty() }.encode()
        });
        pair.write_slot(slot, filled, remote, number, deadline)?;
        self.sent_bytes = filled;
        self.writes += 1;
        Ok(())
    }

    /// Writes bytes from any memory.
    fn write_slices(&mut self, slices: &[&[u8]]) -> Result<()> {
        let len: usize = slices.iter().map(|slice| slice.len()).sum();
        if len == self.promised && (1..=SLOT).contains(&len) {
            return self.write_short(slices);
        }
        let mut slices = slices;
        while let Some(first) = slices.first() {
            let registered = self.memory.contains(first);
            let n = slices.iter().take_while(|slice| self.memory.contains(slice) == registered).count();
            let (run, rest) = slices.split_at(n);
            slices = rest;
            if registered {
                self.write_registered(run)?;
                continue;
            }
            let len = run.iter().map(|slice| slice.len()).sum();
            if len == 0 {
                continue;
            }
            let mut bounce = self.bounce_buffer(len)?;
            let mut filled = 0;
            for slice in run {
                let mut slice = *slice;
                while !slice.is_empty() {
                    let n = slice.len().min(bounce.len() - filled);
                    bounce[filled..filled + n].copy_from_slice(&slice[..n]);
                    filled += n;
                    slice = &slice[n..];
                    if filled == bounce.len() {
                        self.write_registered(&[&bounce])?;
                        filled = 0;
                    }
                }
            }
            if filled > 0 {
                self.write_registered(&[&bounce[..filled]])?;
            }
        }
        Ok(())
    }
}

impl Responder for RdmaResponder<'_> {
    fn send_data(&mut self, body: &[u8], slices: &[&[u8]]) -> Result<()> {
        let len = slices.iter().map(|slice| slice.len()).sum();
        if self.start_answer(0, body, len)? {
            self.write_slices(slices)?;
        }
        self.finish_answer()
    }

    fn send_file(&mut self, body: &[u8], file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<()> {
        if !self.start_answer(0, body, len)? {
            return self.finish_answer();
        }
        let mut left = len;
        if left > 0 {
            self.before_wait();
            let mut bounce = self.bounce_buffer(left)?;
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
                self.write_registered(&[&bounce[..want]])?;
                left -= want;
            }
        }
        self.finish_answer()
    }

    fn begin_payload(&mut self, body: &[u8], len: usize) -> Result<()> {
        let fits = self.start_answer(0, body, len)?;
        if len == 0 || !fits { self.finish_answer() } else { Ok(()) }
    }

    fn push_payload(&mut self, bytes: &[u8]) -> Result<()> {
        if self.state == AnswerState::Whole && self.sent_bytes < self.promised {
            // The reader already knows from the header that the region is too small.
            return Ok(());
        }
        if bytes.len() > self.promised - self.sent_bytes {
            let left = self.promised - self.sent_bytes;
            let why = format!("{} bytes pushed, {left} of the promised length remain", bytes.len());
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        self.write_slices(&[bytes])?;
        if self.sent_bytes == self.promised && !bytes.is_empty() { self.finish_answer() } else { Ok(()) }
    }

    fn send_error(&mut self, error: &Error) -> Result<()> {
        let mut body = Vec::new();
        encode_error_message(error, &mut body);
        // A code of 0 would read as success.
        self.start_answer(error.kind().code().max(1), &body, 0)?;
        self.finish_answer()
    }

    fn before_wait(&mut self) {
        self.hand.release_before_wait();
    }

    /// The reader's NIC shows whether the reader waits: a queue pair that was given up answers neither a read nor a write of no
    /// bytes.
    fn check_reader(&mut self) -> Result<()> {
        if self.fetched {
            return Ok(());
        }
        let pair = &mut self.session.pair;
        let deadline = Instant::now() + self.timeout;
        pair.expect_soon(true);
        let probed = pair.post_probe(deadline).and_then(|()| pair.wait_in_flight(0, deadline));
        probed.map_err(|error| {
            pair.breaker().break_now("the reader's NIC does not respond");
            Error::from(error).context("the reader gave the request up before it was executed")
        })
    }

    /// `uverbs` and `rdma_cm` compare the credentials of the thread with the credentials at open.
    fn keeps_identity(&self) -> bool {
        true
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn answer_state(&self) -> AnswerState {
        self.state
    }
}
