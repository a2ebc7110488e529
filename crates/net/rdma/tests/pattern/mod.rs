//! A service with known bytes, and calls of it.

use spurline_mem::BufferPool;
use spurline_net_rdma::RdmaChannel;
use spurline_proto::{
    AnswerBody as _, HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer, WireCaller,
    WriteAnswer, WriteCall, WriteRequest,
};
use spurline_transport::{CallError, Channel as _, ConnState, Responder, Service};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

pub const DATA: usize = 4 << 20;

fn byte(i: usize) -> u8 {
    (i.wrapping_mul(31) ^ (i >> 9)) as u8
}

/// Serves one pattern from registered memory; `slow` and `slower` wait first, `stuck` until it is released, `vec` serves
/// from memory that is not registered.
pub struct Pattern {
    registered: spurline_mem::PoolBuf,
    plain: Vec<u8>,
    /// Requests for `stuck` that were begun, and whether they may end.
    stuck: Mutex<(usize, bool)>,
    changed: Condvar,
    /// What was written: the file's number and the length.
    written: Mutex<Vec<(u64, usize)>>,
}

/// A write to this file waits until it is released.
#[allow(dead_code, reason = "not in every test program")]
pub const STUCK_FILE: u64 = 9;

impl Pattern {
    pub fn new(pool: &Arc<BufferPool>) -> Arc<Self> {
        let mut registered = pool.try_alloc(DATA).unwrap();
        registered.iter_mut().enumerate().for_each(|(i, b)| *b = byte(i));
        let plain = registered.to_vec();
        Arc::new(Pattern {
            registered,
            plain,
            stuck: Mutex::default(),
            changed: Condvar::new(),
            written: Mutex::default(),
        })
    }

    /// Waits until so many requests are stuck.
    #[allow(dead_code, reason = "not in every test program")]
    pub fn wait_stuck(&self, count: usize) {
        let end = Duration::from_secs(90);
        let stuck = self.stuck.lock().unwrap();
        let (stuck, late) = self.changed.wait_timeout_while(stuck, end, |(stuck, _)| *stuck < count).unwrap();
        assert!(!late.timed_out(), "{} requests are stuck", stuck.0);
    }

    /// How many were stuck.
    #[allow(dead_code, reason = "not in every test program")]
    pub fn stuck(&self) -> usize {
        self.stuck.lock().unwrap().0
    }

    /// What was written so far.
    #[allow(dead_code, reason = "not in every test program")]
    pub fn written(&self) -> Vec<(u64, usize)> {
        self.written.lock().unwrap().clone()
    }

    fn wait_release(&self) {
        let mut stuck = self.stuck.lock().unwrap();
        stuck.0 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(stuck, |(_, released)| !*released).unwrap());
    }

    /// Takes bytes of the pattern, as from the file's offset on.
    fn take_write(&self, write: &WriteRequest<'_>, to: &mut dyn Responder) -> Result<()> {
        let WriteCall::Write { file, offset, .. } = write.call else {
            return Err(Error::new(ErrorKind::Unsupported, "not here"));
        };
        if file == STUCK_FILE {
            self.wait_release();
        }
        to.check_reader()?;
        check(write.payload, offset as usize);
        self.written.lock().unwrap().push((file, write.payload.len()));
        let mut body = Vec::new();
        WriteAnswer::Number(write.payload.len() as u64).encode(&mut body);
        to.send_data(&body, &[])
    }

    #[allow(dead_code, reason = "not in every test program")]
    pub fn release(&self) {
        self.stuck.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

impl Service for Pattern {
    fn handle_hello(&self, _: &ConnState, hello: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        Ok(WelcomeAnswer { block_size: 4 << 20, node: hello.peer.to_owned(), ..WelcomeAnswer::default() })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, to: &mut dyn Responder) -> Result<()> {
        let read = match request {
            NodeRequest::Read(read) => read,
            NodeRequest::Write(write) => return self.take_write(&write, to),
            _ => return Err(Error::new(ErrorKind::Unsupported, "not here")),
        };
        let range = read.offset as usize..read.offset as usize + read.len as usize;
        match read.path {
            b"slow" => {
                std::thread::sleep(Duration::from_secs(4));
                to.send_data(&[], &[&self.registered[range]])
            }
            b"slower" => {
                std::thread::sleep(Duration::from_secs(60));
                to.send_data(&[], &[&self.registered[range]])
            }
            b"stuck" => {
                self.wait_release();
                to.send_data(&[], &[&self.registered[range]])
            }
            b"vec" => to.send_data(&[], &[&self.plain[range]]),
            _ => to.send_data(&[], &[&self.registered[range]]),
        }
    }
}

pub fn read<'a>(path: &'a str, offset: usize, len: usize) -> NodeRequest<'a> {
    let (path, size) = (path.as_bytes(), DATA as u64);
    NodeRequest::Read(ReadRequest {
        volume: VolumeId(0),
        path,
        version: "",
        size,
        offset: offset as u64,
        len: len as u32,
        flags: ReadFlags::NONE,
    })
}

/// A write of bytes of the pattern, which begin at `offset`.
#[allow(dead_code, reason = "not in every test program")]
pub fn write(file: u64, offset: usize, payload: &[u8]) -> NodeRequest<'_> {
    NodeRequest::Write(WriteRequest {
        volume: VolumeId(0),
        id: spurline_proto::ChangeId { session: 1, number: 0 },
        answered: 0,
        again: false,
        marked: false,
        known: [None; 2],
        caller: WireCaller::default(),
        call: WriteCall::Write { file, offset: offset as u64, append: false, lose_privileges: false, flush: false },
        payload,
    })
}

/// Fills `bytes` with the pattern from `offset` on.
#[allow(dead_code, reason = "not in every test program")]
pub fn fill(bytes: &mut [u8], offset: usize) {
    bytes.iter_mut().enumerate().for_each(|(i, b)| *b = byte(offset + i));
}

pub fn call(
    channel: &mut RdmaChannel,
    request: &NodeRequest<'_>,
    dst: &mut [u8],
    deadline: Instant,
) -> Result<usize, CallError> {
    Ok(channel.call(request, &mut Vec::new(), dst, &mut |_| {}, deadline)?.payload_len)
}

pub fn check(dst: &[u8], offset: usize) {
    let wrong = dst.iter().enumerate().find(|(i, b)| **b != byte(offset + i));
    assert!(wrong.is_none(), "a wrong byte at {wrong:?} of {} from {offset}", dst.len());
}
