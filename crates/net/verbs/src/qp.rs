//! A queue pair with completion queues and posted memory. Knows no message.
//!
//! Receives and sends take slots by value. A NIC's access to loaned memory ends with the exchange, or with the queue
//! pair.

use crate::cm::{CmEventKind, CmId, ConnectOptions, unexpected_event};
use crate::error::{VerbsError, WcStatus};
use crate::load::VerbsLibrary;
use crate::loan::RemoteRegion;
use crate::memory::{MemorySlot, ProtectionDomain};
use crate::polling::{PollPacer, PollPermit};
use crate::queue::{BATCH, CompletionQueue, QueueSide, WakeReason};
use crate::sys;
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::{Duration, Instant};

/// Cause of an ended connection whose device reports no more events.
const DEVICE_LOST: &str = "its device was removed";

/// Capacity of a queue pair in work requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueDepths {
    /// Receives posted at once.
    pub receives: u32,
    /// Outstanding sends and writes.
    pub sends: u32,
}

/// A received message, or a peer's write with immediate data.
pub struct ReceiveCompletion {
    /// The consumed receive, whose bytes a write does not use.
    pub slot: MemorySlot,
    /// Length of the message, or of the write, in bytes.
    pub len: usize,
    /// The immediate data; `Some` for writes.
    pub immediate: Option<u32>,
}

/// The part of a queue pair that other threads may access.
pub(crate) struct QpHandle {
    verbs: Arc<VerbsLibrary>,
    /// NULL once destroyed. Only the owner reads the pointer without the lock.
    raw: AtomicPtr<sys::IbvQp>,
    id: AtomicPtr<sys::RdmaCmId>,
    broken: AtomicBool,
    /// The break failed, so posted requests never complete: the device was removed.
    lost: AtomicBool,
    /// Held while another thread changes the queue pair; contains the reason of the break.
    lock: Mutex<Option<&'static str>>,
}

impl QpHandle {
    fn break_now(&self, why: Option<&'static str>) {
        let mut reason = self.lock.lock();
        if reason.is_none() {
            *reason = why;
        }
        let raw = self.raw.load(Ordering::Acquire);
        self.broken.store(true, Ordering::Release);
        if !raw.is_null() {
            let mut attr = sys::IbvQpAttr::state(sys::QPS_ERR);
            // SAFETY: the queue pair exists while the lock is held and the pointer is not NULL.
            if unsafe { (self.verbs.ib.ibv_modify_qp)(raw, &mut attr, sys::QP_STATE) } != 0 {
                self.lost.store(true, Ordering::Release);
            }
        }
    }

    /// Destroys the queue pair: afterwards the NIC neither writes nor reads the memory.
    pub(crate) fn destroy(&self) {
        let _guard = self.lock.lock();
        self.broken.store(true, Ordering::Release);
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !raw.is_null() {
            // SAFETY: the id outlives the queue pair (the owner destroys it first, under this lock), and nothing is posted after
            // the pointer became NULL. After this call the NIC writes nothing.
            unsafe { (self.verbs.cm.rdma_destroy_qp)(self.id.load(Ordering::Acquire)) };
        }
    }
}

/// Breaks a queue pair from another thread: waiting threads wake up, and every later use fails.
#[derive(Clone)]
pub struct QueuePairBreaker(Arc<QpHandle>);

impl QueuePairBreaker {
    /// Breaks the queue pair, with `why` for the user. No effect on a broken or destroyed pair.
    pub fn break_now(&self, why: &'static str) {
        self.0.break_now(Some(why));
    }

    /// Whether the pair is broken.
    pub fn is_broken(&self) -> bool {
        self.0.broken.load(Ordering::Acquire)
    }

    /// Whether the break failed and so wakes no waiting thread: the device was removed.
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

/// A reliable connection's queue pair, with id, queues and posted memory.
///
/// A drop ends the connection and destroys the queue pair; only then is posted memory returned.
pub struct QueuePair {
    pub(crate) handle: Arc<QpHandle>,
    queue: CompletionQueue,
    pub(crate) domain: Arc<ProtectionDomain>,
    receives: Vec<Option<MemorySlot>>,
    free_receives: Vec<u32>,
    /// Unacknowledged sends, in order.
    sends: VecDeque<(u64, Option<MemorySlot>)>,
    pub(crate) posted: u64,
    completed: u64,
    /// Completed send slots, for reuse.
    spare: Vec<MemorySlot>,
    /// Completions of the last poll for arrivals; completions in `unread` are not yet processed.
    arrived: [sys::IbvWc; BATCH],
    unread: Range<usize>,
    /// Buffer for send completions: a new buffer for each poll would cost as much as the poll.
    batch: [sys::IbvWc; BATCH],
    depths: QueueDepths,
    max_inline: u32,
    /// Outstanding RDMA reads allowed in each direction.
    reads: u8,
    connected: bool,
    /// The id is the only id of the channel, so that waiting here includes connection events.
    own_events: bool,
    subject: String,
    qpn: u32,
    fault: Option<VerbsError>,
    pace: PollPacer,
    expects_soon: bool,
    processors: usize,
    /// `None` only during drop.
    id: Option<CmId>,
    /// Used by a single thread at a time.
    _not_sync: PhantomData<Cell<()>>,
}

impl QueuePair {
    /// A queue pair for `id`, whose device is known: the route is resolved, or the id came with a connect request. Depths above
    /// the device's limits are an error.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the device refuses, [`VerbsError::Misuse`] when the id is bound to another device.
    pub fn new(id: CmId, domain: &Arc<ProtectionDomain>, depths: QueueDepths, spread: u32) -> Result<Self, VerbsError> {
        let context = domain.context();
        if id.context_raw() != context.raw() {
            let why = format!("{} is not on {}, whose memory it needs", id.subject(), context.name());
            return Err(VerbsError::Misuse(why));
        }
        let queue = CompletionQueue::new(context, depths.receives, depths.sends, spread)?;
        let verbs = Arc::clone(context.verbs());
        let mut failed = None;
        let mut max_inline = 0;
        // Inline data saves the NIC a memory read where supported; devices report the limit only by refusing.
        for inline in [128, 0] {
            let mut init = sys::IbvQpInitAttr {
                qp_context: std::ptr::null_mut(),
                send_cq: queue.raw(QueueSide::Send),
                recv_cq: queue.raw(QueueSide::Receive),
                srq: std::ptr::null_mut(),
                cap: sys::IbvQpCap {
                    max_send_wr: depths.sends,
                    max_recv_wr: depths.receives,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: sys::QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: id, domain and queues are open and of the same context; `init` is read and `cap` there written.
            match unsafe { (verbs.cm.rdma_create_qp)(id.raw(), domain.raw(), &mut init) } {
                0 => {
                    failed = None;
                    max_inline = init.cap.max_inline_data.min(128);
                    break;
                }
                _ => failed = Some(VerbsError::last_os("rdma_create_qp", id.subject())),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        // SAFETY: rdma_create_qp stored the new queue pair there.
        let (raw, qpn) = unsafe { ((*id.raw()).qp, (*(*id.raw()).qp).qp_num) };
        let handle = QpHandle {
            verbs,
            raw: AtomicPtr::new(raw),
            id: AtomicPtr::new(id.raw()),
            broken: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            lock: Mutex::new(None),
        };
        Ok(QueuePair {
            handle: Arc::new(handle),
            queue,
            domain: Arc::clone(domain),
            receives: (0..depths.receives).map(|_| None).collect(),
            free_receives: (0..depths.receives).rev().collect(),
            sends: VecDeque::with_capacity(depths.sends as usize),
            posted: 0,
            completed: 0,
            spare: Vec::with_capacity(depths.sends as usize),
            arrived: [sys::IbvWc::default(); BATCH],
            unread: 0..0,
            batch: [sys::IbvWc::default(); BATCH],
            depths,
            max_inline,
            reads: 1,
            connected: false,
            own_events: false,
            subject: id.subject(),
            qpn,
            fault: None,
            pace: PollPacer::new(),
            expects_soon: true,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            id: Some(id),
            _not_sync: PhantomData,
        })
    }

    /// Connects; returns the private data of the peer's program (padded with zeros by some devices). The id has a separate
    /// channel.
    ///
    /// # Errors
    /// [`VerbsError::Rejected`], [`VerbsError::Unreachable`], or [`VerbsError::Timeout`] when `deadline` passed, long
    /// before the kernel's own timeout.
    pub fn connect(
        &mut self,
        options: ConnectOptions,
        private: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, VerbsError> {
        let mut param = self.conn_param(options, private)?;
        // SAFETY: the id has a route and a queue pair; `param` and the pointed-to data outlive the call.
        if unsafe { (self.handle.verbs.cm.rdma_connect)(self.id().raw(), &mut param) } != 0 {
            return Err(VerbsError::last_os("rdma_connect", &*self.subject));
        }
        match self.id().expect_event(deadline, "connecting")? {
            CmEventKind::Established { private } => {
                self.connected = true;
                self.own_events = true;
                self.subject = self.id().subject();
                Ok(private)
            }
            other => Err(unexpected_event(self.subject.clone(), &other)),
        }
    }

    /// Accepts the connect request of this id. The channel reports the established connection as an event. Outstanding RDMA reads
    /// are limited, in each direction, to the peer's announced number and to this device's limit.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the peer is gone meanwhile.
    pub fn accept(&mut self, options: ConnectOptions, private: &[u8]) -> Result<(), VerbsError> {
        let mut param = self.conn_param(options, private)?;
        // librdmacm takes the smaller of both sides' limits for these values. More than the peer allows would be refused by the
        // peer's NIC.
        param.responder_resources = sys::MOST_READS;
        param.initiator_depth = sys::MOST_READS;
        // SAFETY: the id came with a connect request and has a queue pair; `param` outlives the call.
        if unsafe { (self.handle.verbs.cm.rdma_accept)(self.id().raw(), &mut param) } != 0 {
            return Err(VerbsError::last_os("rdma_accept", &*self.subject));
        }
        self.connected = true;
        Ok(())
    }

    /// Allows `count` outstanding RDMA reads each way, within the device's limit; before connecting. The default is a single
    /// read, as iWARP may need that for connection setup.
    pub fn allow_reads(&mut self, count: u8) {
        self.reads = count.max(1);
    }

    fn conn_param(&mut self, options: ConnectOptions, private: &[u8]) -> Result<sys::RdmaConnParam, VerbsError> {
        if let Some(exponent) = options.ack_timeout {
            self.id_mut().set_ack_timeout(exponent);
        }
        // A device without RDMA READ gets 0.
        let reads = self.domain.context().limits()?.reads.min(self.reads.into()) as u8;
        Ok(sys::RdmaConnParam {
            private_data: private.as_ptr().cast(),
            // The limit of a connect request over IP addresses.
            private_data_len: private.len().min(56) as u8,
            responder_resources: reads,
            initiator_depth: reads,
            flow_control: 1,
            retry_count: options.retries.min(7),
            rnr_retry_count: options.rnr_retries.min(7),
            srq: 0,
            qp_num: 0,
        })
    }

    /// Device, port, GIDs and addresses.
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// The queue pair's number.
    pub fn qp_number(&self) -> u32 {
        self.qpn
    }

    /// The connection's id.
    pub fn id(&self) -> &CmId {
        // Only `drop` takes the id.
        self.id.as_ref().expect("a queue pair has an id")
    }

    fn id_mut(&mut self) -> &mut CmId {
        self.id.as_mut().expect("a queue pair has an id")
    }

    /// To break the pair from another thread.
    pub fn breaker(&self) -> QueuePairBreaker {
        QueuePairBreaker(Arc::clone(&self.handle))
    }

    /// Becomes readable at a completion after [`QueuePair::arm_receive`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.queue.fd()
    }

    fn raw(&self) -> Result<*mut sys::IbvQp, VerbsError> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let raw = self.handle.raw.load(Ordering::Relaxed);
        if raw.is_null() {
            return Err(self.ended_error("its queue pair was destroyed"));
        }
        if self.handle.lost.load(Ordering::Relaxed) { Err(self.ended_error(DEVICE_LOST)) } else { Ok(raw) }
    }

    /// Records that the device reports no more events.
    fn lost_error(&mut self) -> VerbsError {
        self.handle.break_now(Some(DEVICE_LOST));
        let error = self.ended_error(DEVICE_LOST);
        self.fault.get_or_insert(error).clone()
    }

    fn ended_error(&self, why: &str) -> VerbsError {
        VerbsError::Disconnected { subject: self.subject.clone(), why: why.into() }
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when all receives are posted, or the slot is of another protection domain.
    pub fn post_receive(&mut self, slot: MemorySlot) -> Result<(), VerbsError> {
        let raw = self.raw()?;
        if !Arc::ptr_eq(slot.domain(), &self.domain) {
            return Err(VerbsError::Misuse("the slot's memory is registered in another protection domain".into()));
        }
        let Some(index) = self.free_receives.pop() else {
            return Err(VerbsError::Misuse(format!("more than {} receives", self.depths.receives)));
        };
        let mut sge = slot.sge(u32::MAX);
        let mut wr = sys::IbvRecvWr { wr_id: index.into(), next: std::ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
        // From here on the slot belongs to the queue pair.
        self.receives[index as usize] = Some(slot);
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives; the operations do not change after the device was opened.
        let post = unsafe { (*(*raw).context).ops.post_recv };
        let Some(post) = post else { return Err(VerbsError::Misuse("the driver has no post_recv".into())) };
        // SAFETY: request and element are read during the call; the slot's memory stays until the completion.
        match unsafe { post(raw, &mut wr, &mut bad) } {
            0 => Ok(()),
            failed => {
                self.receives[index as usize] = None;
                self.free_receives.push(index);
                Err(VerbsError::from_return("ibv_post_recv", &*self.subject, failed))
            }
        }
    }

    /// Outstanding sends and writes.
    pub fn in_flight(&self) -> u64 {
        self.posted - self.completed
    }

    /// Waits until at most `most` sends and writes are outstanding.
    ///
    /// # Errors
    /// When the connection failed; [`VerbsError::Timeout`] when more are outstanding at `deadline`, without other
    /// effects.
    pub fn wait_in_flight(&mut self, most: u64, deadline: Instant) -> Result<(), VerbsError> {
        self.wait_sent(self.posted.saturating_sub(most), deadline)
    }

    /// A free send slot.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn free_slot(&mut self) -> Result<Option<MemorySlot>, VerbsError> {
        Ok(if self.has_free_slot()? { self.spare.pop() } else { None })
    }

    /// Whether there is a free send slot.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn has_free_slot(&mut self) -> Result<bool, VerbsError> {
        if self.spare.is_empty() {
            self.take_sent()?;
        }
        Ok(!self.spare.is_empty())
    }

    /// A free send slot, waiting until `deadline`.
    ///
    /// # Errors
    /// When the connection failed, none became free in time, or there are none.
    pub fn take_slot(&mut self, deadline: Instant) -> Result<MemorySlot, VerbsError> {
        loop {
            if let Some(slot) = self.free_slot()? {
                return Ok(slot);
            }
            let Some(number) = self.sends.iter().find_map(|(number, slot)| slot.is_some().then_some(*number)) else {
                return Err(VerbsError::Misuse("no slot was left for sending".into()));
            };
            self.wait_sent(number, deadline)?;
        }
    }

    /// Checks, without waiting, whether the connection has failed or ended.
    ///
    /// # Errors
    /// When the connection has ended.
    pub fn check_connection(&mut self) -> Result<(), VerbsError> {
        self.take_sent()?;
        if self.own_events { self.take_events() } else { Ok(()) }
    }

    /// Adds a slot for sending.
    pub fn keep_slot(&mut self, slot: MemorySlot) {
        self.spare.push(slot);
    }

    /// Waits for room for another send or write. Earlier completions are polled only without room: polling before each message
    /// would add latency.
    pub(crate) fn wait_room(&mut self, deadline: Instant) -> Result<(), VerbsError> {
        if self.in_flight() < self.depths.sends.into() {
            return self.raw().map(drop);
        }
        self.take_sent()?;
        while self.in_flight() >= self.depths.sends.into() {
            self.wait_sent(self.posted - u64::from(self.depths.sends) + 1, deadline)?;
        }
        Ok(())
    }

    /// Sends the first `len` bytes of `slot` as a message. Waits for room until `deadline`.
    ///
    /// # Errors
    /// When the connection failed, or there was no room in time.
    pub fn send_message(&mut self, slot: MemorySlot, len: usize, deadline: Instant) -> Result<(), VerbsError> {
        self.post_slot(slot, len, sys::WR_SEND, None, None, deadline)
    }

    /// Writes the first `len` bytes of `slot` into `region`. The peer gets a completion with `immediate`; without it, the peer
    /// must look at the memory. For payloads so short that copying into a slot is cheaper than waiting for the acknowledgement of
    /// borrowed bytes.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when the bytes do not fit in the region or in the slot; when the connection failed, or there was no
    /// room in time.
    pub fn write_slot(
        &mut self,
        slot: MemorySlot,
        len: usize,
        region: RemoteRegion,
        immediate: impl Into<Option<u32>>,
        deadline: Instant,
    ) -> Result<(), VerbsError> {
        if len > slot.len() || len as u64 > region.len || len == 0 {
            let why = format!("{len} bytes out of a slot of {} do not fit in a region of {}", slot.len(), region.len);
            return Err(VerbsError::Misuse(why));
        }
        let immediate = immediate.into();
        let opcode = if immediate.is_some() { sys::WR_RDMA_WRITE_WITH_IMM } else { sys::WR_RDMA_WRITE };
        self.post_slot(slot, len, opcode, Some(region), immediate, deadline)
    }

    /// Reads the first `len` bytes of `region` into `slot`, which returns with the completion ([`QueuePair::wait_in_flight`]
    /// waits for that, [`QueuePair::free_slot`] returns the slot). The peer's program is not involved. [`QueuePair::allow_reads`]
    /// on both sides limits the outstanding reads; the device queues the others.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when the bytes do not fit in the region or in the slot; when the connection failed, or there was no
    /// room in time.
    pub fn read_slot(
        &mut self,
        slot: MemorySlot,
        len: usize,
        region: RemoteRegion,
        deadline: Instant,
    ) -> Result<(), VerbsError> {
        if len > slot.len() || len as u64 > region.len || len == 0 {
            let why = format!("{len} bytes of a region of {} do not fit in a slot of {}", region.len, slot.len());
            return Err(VerbsError::Misuse(why));
        }
        // From here on the slot belongs to the queue pair, whose destruction ends the NIC's late writes.
        self.post_slot(slot, len, sys::WR_RDMA_READ, Some(region), None, deadline)
    }

    /// Posts a request for the first `len` bytes of `slot`. With inline data the slot is free at once: the call has copied the
    /// bytes.
    fn post_slot(
        &mut self,
        slot: MemorySlot,
        len: usize,
        opcode: sys::CEnum,
        region: Option<RemoteRegion>,
        immediate: Option<u32>,
        deadline: Instant,
    ) -> Result<(), VerbsError> {
        if !Arc::ptr_eq(slot.domain(), &self.domain) {
            return Err(VerbsError::Misuse("the slot's memory is registered in another protection domain".into()));
        }
        self.wait_room(deadline)?;
        let mut sge = slot.sge(u32::try_from(len).unwrap_or(u32::MAX));
        let inline = opcode != sys::WR_RDMA_READ && sge.length <= self.max_inline;
        let flags = sys::SEND_SIGNALED | if inline { sys::SEND_INLINE } else { 0 };
        let mut wr = sys::IbvSendWr::new(self.posted + 1, opcode, flags);
        wr.imm_data = immediate.unwrap_or(0).to_be();
        if let Some(region) = region {
            wr.remote_addr = region.addr;
            wr.rkey = region.rkey;
        }
        wr.sg_list = &mut sge;
        wr.num_sge = 1;
        self.post_send(&mut wr, Some(slot))?;
        if inline && let Some((_, slot)) = self.sends.back_mut() {
            self.spare.extend(slot.take());
        }
        Ok(())
    }

    /// Sets whether the awaited completion is expected soon, so that polling may pay: a small answer, not bulk data.
    pub fn expect_soon(&mut self, soon: bool) {
        self.expects_soon = soon;
    }

    /// Writes zero bytes to the peer: only the acknowledgement by the peer's NIC shows whether the path works.
    ///
    /// # Errors
    /// When the connection failed, or there was no room in time.
    pub fn post_probe(&mut self, deadline: Instant) -> Result<(), VerbsError> {
        self.wait_room(deadline)?;
        let mut wr = sys::IbvSendWr::new(self.posted + 1, sys::WR_RDMA_WRITE, sys::SEND_SIGNALED);
        self.post_send(&mut wr, None)
    }

    pub(crate) fn post_send(&mut self, wr: &mut sys::IbvSendWr, slot: Option<MemorySlot>) -> Result<(), VerbsError> {
        let raw = self.raw()?;
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_receive`.
        let post = unsafe { (*(*raw).context).ops.post_send };
        let Some(post) = post else { return Err(VerbsError::Misuse("the driver has no post_send".into())) };
        // SAFETY: the request is read during the call; the memory is a slot kept until the completion, or borrowed while
        // `write_borrowed` runs, which waits for completions or destroys the queue pair.
        match unsafe { post(raw, wr, &mut bad) } {
            0 => {
                self.posted += 1;
                self.sends.push_back((self.posted, slot));
                Ok(())
            }
            failed => {
                self.spare.extend(slot);
                Err(VerbsError::from_return("ibv_post_send", &*self.subject, failed))
            }
        }
    }

    /// Takes the completions of sends and writes.
    fn take_sent(&mut self) -> Result<(), VerbsError> {
        self.raw()?;
        loop {
            let n = self.queue.poll_side(QueueSide::Send, &mut self.batch)?;
            for at in 0..n {
                let wc = self.batch[at];
                if wc.status != 0 {
                    return Err(self.fail_completion("a send or write", &wc));
                }
                self.completed = wc.wr_id;
                while let Some((number, _)) = self.sends.front()
                    && *number <= self.completed
                {
                    let slot = self.sends.pop_front().and_then(|(_, slot)| slot);
                    self.spare.extend(slot);
                }
            }
            if n < BATCH {
                return Ok(());
            }
        }
    }

    /// Waits until request number `until` has completed.
    pub(crate) fn wait_sent(&mut self, until: u64, deadline: Instant) -> Result<(), VerbsError> {
        self.take_sent()?;
        while self.completed < until {
            if self.spin_until(|pair| pair.take_sent().map(|()| pair.completed >= until))? {
                return Ok(());
            }
            self.queue.arm_side(QueueSide::Send)?;
            self.take_sent()?;
            if self.completed >= until {
                return Ok(());
            }
            match self.queue.wait_event(self.events_fd(), deadline) {
                WakeReason::Completion => {}
                WakeReason::Event => self.take_events()?,
                WakeReason::Lost => return Err(self.lost_error()),
                WakeReason::Deadline => {
                    return Err(VerbsError::Timeout { what: format!("writing to {}", self.subject) });
                }
            }
            self.take_sent()?;
        }
        Ok(())
    }

    fn events_fd(&self) -> Option<i32> {
        self.own_events.then(|| self.id().channel().raw_fd())
    }

    /// Processes events of the connection.
    fn take_events(&mut self) -> Result<(), VerbsError> {
        while let Some(event) = self.id().channel().next_event(Instant::now())? {
            if matches!(event.kind, CmEventKind::Disconnected | CmEventKind::DeviceRemoved) {
                // What arrived before the end remains available.
                self.own_events = false;
                let error = unexpected_event(self.subject.clone(), &event.kind);
                self.handle.break_now(None);
                self.fault.get_or_insert(error);
            }
        }
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(()),
        }
    }

    /// Records why the connection failed: the first completion that is not a consequence of another failure.
    fn fail_completion(&mut self, what: &'static str, wc: &sys::IbvWc) -> VerbsError {
        let describe = |wc: &sys::IbvWc, what| VerbsError::Work {
            what,
            subject: self.subject.clone(),
            qpn: self.qpn,
            status: WcStatus(wc.status),
            vendor_err: wc.vendor_err,
        };
        let mut error = describe(wc, what);
        if WcStatus(wc.status) == WcStatus::FLUSHED {
            let mut batch = [sys::IbvWc::default(); BATCH];
            for (side, what) in [(QueueSide::Send, "a send or write"), (QueueSide::Receive, "a receive")] {
                let n = self.queue.poll_side(side, &mut batch).unwrap_or(0);
                let cause = batch[..n].iter().find(|wc| wc.status != 0 && WcStatus(wc.status) != WcStatus::FLUSHED);
                if let Some(cause) = cause {
                    error = describe(cause, what);
                    break;
                }
            }
            if matches!(&error, VerbsError::Work { status, .. } if *status == WcStatus::FLUSHED) {
                let why = *self.handle.lock.lock();
                error = self.ended_error(why.unwrap_or("the peer ended it, its process died, or the device failed"));
                if self.own_events
                    && let Ok(Some(event)) = self.id().channel().next_event(Instant::now())
                    && matches!(event.kind, CmEventKind::Disconnected | CmEventKind::DeviceRemoved)
                {
                    error = unexpected_event(self.subject.clone(), &event.kind);
                }
            }
        }
        self.handle.break_now(None);
        self.fault.get_or_insert(error).clone()
    }

    /// The next message or announced write that has arrived, if any.
    ///
    /// # Errors
    /// Why the connection failed, after everything that arrived before was taken.
    pub fn poll_receive(&mut self) -> Result<Option<ReceiveCompletion>, VerbsError> {
        if self.unread.is_empty() && self.handle.raw.load(Ordering::Relaxed).is_null() {
            self.raw()?;
        }
        self.has_arrived()?;
        let Some(wc) = self.unread.next().map(|at| self.arrived[at]) else {
            return match &self.fault {
                Some(fault) => Err(fault.clone()),
                None => self.raw().map(|_| None),
            };
        };
        if wc.status != 0 {
            return Err(self.fail_completion("a receive", &wc));
        }
        let index = usize::try_from(wc.wr_id).unwrap_or(usize::MAX);
        let Some(slot) = self.receives.get_mut(index).and_then(Option::take) else {
            return Err(VerbsError::Misuse(format!("the device completed receive {index}, which is not posted")));
        };
        self.free_receives.push(index as u32);
        let immediate = (wc.wc_flags & sys::WC_WITH_IMM != 0).then(|| u32::from_be(wc.imm_data));
        debug_assert!(wc.opcode & sys::WC_RECV != 0);
        Ok(Some(ReceiveCompletion { slot, len: wc.byte_len as usize, immediate }))
    }

    /// Arms the descriptor for the next arrival. Returns whether something has already arrived, for which there may
    /// be no event.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn arm_receive(&mut self) -> Result<bool, VerbsError> {
        self.raw()?;
        // The descriptor reports an event that does not exist: a waiting thread would wake up again and again.
        if !self.queue.drain_event() && self.queue.is_lost() {
            return Err(self.lost_error());
        }
        if let Err(error) = self.queue.arm_side(QueueSide::Receive) {
            // Arrived completions come before the error.
            return Err(self.fault.get_or_insert(error).clone());
        }
        self.has_arrived()
    }

    /// Whether something has arrived.
    ///
    /// # Errors
    /// When the device delivers no more completions.
    pub fn has_arrived(&mut self) -> Result<bool, VerbsError> {
        if self.unread.is_empty() {
            self.unread = 0..self.queue.poll_side(QueueSide::Receive, &mut self.arrived)?;
        }
        Ok(!self.unread.is_empty())
    }

    /// Waits until something has arrived, the connection failed (reported by the next [`QueuePair::poll_receive`]),
    /// or `deadline`. Polls first where that paid recently. Returns whether something has arrived.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn wait_arrival(&mut self, deadline: Instant) -> Result<bool, VerbsError> {
        if self.has_arrived()? || self.spin_until(Self::has_arrived)? {
            return Ok(true);
        }
        loop {
            self.raw()?;
            self.queue.arm_side(QueueSide::Receive)?;
            if self.has_arrived()? {
                return Ok(true);
            }
            match self.queue.wait_event(self.events_fd(), deadline) {
                WakeReason::Completion => {
                    if self.has_arrived()? {
                        return Ok(true);
                    }
                }
                WakeReason::Event => {
                    if let Err(fault) = self.take_events() {
                        return if self.has_arrived()? { Ok(true) } else { Err(fault) };
                    }
                }
                WakeReason::Lost => {
                    let fault = self.lost_error();
                    return if self.has_arrived()? { Ok(true) } else { Err(fault) };
                }
                WakeReason::Deadline => return Ok(false),
            }
        }
    }

    /// Polls `there` for a short time, where that paid recently and a processor is free.
    fn spin_until(&mut self, there: impl Fn(&mut Self) -> Result<bool, VerbsError>) -> Result<bool, VerbsError> {
        if !self.expects_soon {
            return Ok(false);
        }
        let Some(limit) = self.pace.next_limit() else { return Ok(false) };
        let Some(_polling) = PollPermit::try_begin(self.processors) else { return Ok(false) };
        let begun = Instant::now();
        let mut looks = 0u32;
        let mut took = Duration::ZERO;
        let found = loop {
            if there(self)? {
                // The time of the last clock reading: another reading would add latency.
                break Some(took);
            }
            looks = looks.wrapping_add(1);
            if PollPermit::spin_pause(looks) {
                took = begun.elapsed();
                if took > limit {
                    break None;
                }
            }
        };
        self.pace.record_wait(found);
        Ok(found.is_some())
    }

    /// Ends the connection without destroying anything. Sends nothing over a port that is down.
    pub fn disconnect(&mut self) {
        if self.connected && self.is_port_active() && !self.handle.raw.load(Ordering::Relaxed).is_null() {
            self.connected = false;
            if let Some(id) = &self.id {
                // SAFETY: the id is open and was connected. The call notifies the peer and does not wait.
                unsafe { (self.handle.verbs.cm.rdma_disconnect)(id.raw()) };
            }
        }
    }

    /// Whether the port is active; true when the query fails.
    fn is_port_active(&self) -> bool {
        let port = self.id.as_ref().map_or(0, CmId::port_number);
        self.domain.context().port_state(port).map_or(true, |state| state.is_active())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.disconnect();
        // Before the slots, the queues and the id, which are dropped after this.
        self.handle.destroy();
        if !self.is_port_active()
            && let Some(id) = self.id.take()
        {
            self.domain.context().defer_destroy(id);
        }
    }
}
