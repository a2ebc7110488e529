//! A queue pair with its completion queues and the memory that is posted on it. It knows no message.
//!
//! Receives and sends take slots by value. What a NIC may write into lent memory ends with the exchange it was lent
//! for, or with the queue pair.

use crate::cm::{CmEventKind, CmId, ConnectOptions, unexpected};
use crate::error::{VerbsError, WcStatus};
use crate::lend::RemoteRegion;
use crate::load::Verbs;
use crate::memory::{ProtectionDomain, Slot};
use crate::polling::{Pace, Polling};
use crate::queue::{BATCH, CompletionQueue, Side, Wake};
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

/// Why a connection is over whose device tells of nothing any more.
const LOST: &str = "its device was taken away";

/// How many work requests a queue pair holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueDepths {
    /// Receives posted at once.
    pub receives: u32,
    /// Sends and writes under way at once.
    pub sends: u32,
}

/// A message, or a peer's write that announced itself.
pub struct Completion {
    /// The receive it took; for a write nothing of it is used.
    pub slot: Slot,
    /// Length of the message, or of the write, in bytes.
    pub len: usize,
    /// The number that came with it; `Some` for writes.
    pub immediate: Option<u32>,
}

/// The queue pair as other threads may reach it.
pub(crate) struct Handle {
    verbs: Arc<Verbs>,
    /// NULL once it is destroyed. Read without the lock by the owner alone.
    raw: AtomicPtr<sys::Qp>,
    id: AtomicPtr<sys::CmId>,
    broken: AtomicBool,
    /// It could not be broken, so nothing that is posted ever completes: its device was taken away.
    lost: AtomicBool,
    /// Held while the queue pair is changed from outside; why somebody broke it.
    lock: Mutex<Option<&'static str>>,
}

impl Handle {
    fn break_now(&self, why: Option<&'static str>) {
        let mut reason = self.lock.lock();
        if reason.is_none() {
            *reason = why;
        }
        let raw = self.raw.load(Ordering::Acquire);
        self.broken.store(true, Ordering::Release);
        if !raw.is_null() {
            let mut attr = sys::QpAttr::state(sys::QPS_ERR);
            // SAFETY: the queue pair lives while the lock is held and the pointer not NULL.
            if unsafe { (self.verbs.ib.ibv_modify_qp)(raw, &mut attr, sys::QP_STATE) } != 0 {
                self.lost.store(true, Ordering::Release);
            }
        }
    }

    /// After this the NIC neither writes nor reads memory for it.
    pub(crate) fn destroy(&self) {
        let _guard = self.lock.lock();
        self.broken.store(true, Ordering::Release);
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !raw.is_null() {
            // SAFETY: the id outlives its queue pair (the owner destroys it first, under this lock), and nothing is
            // posted after the pointer became NULL. After this call the NIC writes nothing for it.
            unsafe { (self.verbs.cm.rdma_destroy_qp)(self.id.load(Ordering::Acquire)) };
        }
    }
}

/// Breaks a queue pair from another thread: whoever waits on it is woken, and every later use fails.
#[derive(Clone)]
pub struct Breaker(Arc<Handle>);

impl Breaker {
    /// Breaks it; `why` is what its user is told. Does nothing when it is broken or gone.
    pub fn break_now(&self, why: &'static str) {
        self.0.break_now(Some(why));
    }

    /// Whether it is broken.
    pub fn is_broken(&self) -> bool {
        self.0.broken.load(Ordering::Acquire)
    }

    /// Whether breaking it failed, so that nobody who waits on it is woken: its device was taken away.
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

/// A reliable connection's queue pair, with its id, its queues and what is posted.
///
/// Dropping it ends the connection and destroys the queue pair; only then is the memory given back that was posted.
pub struct QueuePair {
    pub(crate) handle: Arc<Handle>,
    queue: CompletionQueue,
    pub(crate) domain: Arc<ProtectionDomain>,
    receives: Vec<Option<Slot>>,
    free_receives: Vec<u32>,
    /// What was sent and is not acknowledged yet, in order.
    sends: VecDeque<(u64, Option<Slot>)>,
    pub(crate) posted: u64,
    completed: u64,
    /// Slots that were sent, to be used again.
    spare: Vec<Slot>,
    /// What the last poll for arrivals took, of which those in `untaken` are still to be looked at.
    arrived: [sys::WorkCompletion; BATCH],
    untaken: Range<usize>,
    /// Room for what a poll for sends takes: it would cost as much as the poll to make it anew each time.
    batch: [sys::WorkCompletion; BATCH],
    depths: QueueDepths,
    max_inline: u32,
    /// Reads of the peer's memory that may be under way, and reads of the peer.
    reads: u8,
    connected: bool,
    /// Its id is the only one of its channel, so that waiting here includes events of the connection.
    own_events: bool,
    subject: String,
    qpn: u32,
    fault: Option<VerbsError>,
    pace: Pace,
    soon: bool,
    processors: usize,
    /// Empty only while it is dropped.
    id: Option<CmId>,
    /// Driven by one thread at a time.
    _not_sync: PhantomData<Cell<()>>,
}

impl QueuePair {
    /// A queue pair for `id`, whose device is known: it resolved its route, or came with a connect request. Depths above
    /// the device's limits are an error.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the device refuses, [`VerbsError::Misuse`] when the id is bound to another device.
    pub fn new(id: CmId, domain: &Arc<ProtectionDomain>, depths: QueueDepths, spread: u32) -> Result<Self, VerbsError> {
        let context = domain.context();
        if id.context_raw() != context.raw() {
            let why = format!("{} is not on {}, whose memory it was to use", id.subject(), context.name());
            return Err(VerbsError::Misuse(why));
        }
        let queue = CompletionQueue::new(context, depths.receives, depths.sends, spread)?;
        let verbs = Arc::clone(context.verbs());
        let mut failed = None;
        let mut max_inline = 0;
        // Inline data saves the NIC a read where there is any; no device says how much it takes but by refusing.
        for inline in [128, 0] {
            let mut init = sys::QpInitAttr {
                qp_context: std::ptr::null_mut(),
                send_cq: queue.raw(Side::Send),
                recv_cq: queue.raw(Side::Receive),
                srq: std::ptr::null_mut(),
                cap: sys::QpCap {
                    max_send_wr: depths.sends,
                    max_recv_wr: depths.receives,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: sys::QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: id, domain and queues are open and of one context; `init` is read and its `cap` written.
            match unsafe { (verbs.cm.rdma_create_qp)(id.raw(), domain.raw(), &mut init) } {
                0 => {
                    failed = None;
                    max_inline = init.cap.max_inline_data.min(128);
                    break;
                }
                _ => failed = Some(VerbsError::last("rdma_create_qp", id.subject())),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        // SAFETY: rdma_create_qp put the new queue pair there.
        let (raw, qpn) = unsafe { ((*id.raw()).qp, (*(*id.raw()).qp).qp_num) };
        let handle = Handle {
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
            arrived: [sys::WorkCompletion::default(); BATCH],
            untaken: 0..0,
            batch: [sys::WorkCompletion::default(); BATCH],
            depths,
            max_inline,
            reads: 1,
            connected: false,
            own_events: false,
            subject: id.subject(),
            qpn,
            fault: None,
            pace: Pace::new(),
            soon: true,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            id: Some(id),
            _not_sync: PhantomData,
        })
    }

    /// Connects, and answers with what the peer's program sent along (padded with zeros by some devices). The id has a
    /// channel of its own.
    ///
    /// # Errors
    /// [`VerbsError::Rejected`], [`VerbsError::Unreachable`], or [`VerbsError::Timeout`] when `deadline` passed: long
    /// before the kernel gives up.
    pub fn connect(
        &mut self,
        options: ConnectOptions,
        private: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, VerbsError> {
        let mut param = self.param(options, private)?;
        // SAFETY: the id has its route and its queue pair; `param` and what it points to outlive the call.
        if unsafe { (self.handle.verbs.cm.rdma_connect)(self.id().raw(), &mut param) } != 0 {
            return Err(VerbsError::last("rdma_connect", &*self.subject));
        }
        match self.id().expect(deadline, "connecting")? {
            CmEventKind::Established { private } => {
                self.connected = true;
                self.own_events = true;
                self.subject = self.id().subject();
                Ok(private)
            }
            other => Err(unexpected(self.subject.clone(), &other)),
        }
    }

    /// Accepts the connect request that the id came with. That the connection stands is an event of the channel.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the peer went away meanwhile.
    pub fn accept(&mut self, options: ConnectOptions, private: &[u8]) -> Result<(), VerbsError> {
        let mut param = self.param(options, private)?;
        // SAFETY: the id came with a connect request and has its queue pair; `param` outlives the call.
        if unsafe { (self.handle.verbs.cm.rdma_accept)(self.id().raw(), &mut param) } != 0 {
            return Err(VerbsError::last("rdma_accept", &*self.subject));
        }
        self.connected = true;
        Ok(())
    }

    /// Lets `count` reads be under way each way, as far as the device can; to be called before connecting or accepting.
    /// Without this it is one, as iWARP may need it to start up.
    pub fn allow_reads(&mut self, count: u8) {
        self.reads = count.max(1);
    }

    fn param(&mut self, options: ConnectOptions, private: &[u8]) -> Result<sys::ConnParam, VerbsError> {
        if let Some(exponent) = options.ack_timeout {
            self.id_mut().set_ack_timeout(exponent);
        }
        // A device that has none is asked for none.
        let reads = self.domain.context().limits()?.reads.min(self.reads.into()) as u8;
        Ok(sys::ConnParam {
            private_data: private.as_ptr().cast(),
            // More does not fit in a connect request over IP addresses.
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
    pub fn number(&self) -> u32 {
        self.qpn
    }

    /// The connection's id.
    pub fn id(&self) -> &CmId {
        // It is taken out only by `drop`.
        self.id.as_ref().expect("a queue pair has an id")
    }

    fn id_mut(&mut self) -> &mut CmId {
        self.id.as_mut().expect("a queue pair has an id")
    }

    /// To break it from another thread.
    pub fn breaker(&self) -> Breaker {
        Breaker(Arc::clone(&self.handle))
    }

    /// Becomes readable when there is a completion that was asked for with [`QueuePair::arm`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.queue.fd()
    }

    fn raw(&self) -> Result<*mut sys::Qp, VerbsError> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let raw = self.handle.raw.load(Ordering::Relaxed);
        if raw.is_null() {
            return Err(self.over("its queue pair was destroyed"));
        }
        if self.handle.lost.load(Ordering::Relaxed) { Err(self.over(LOST)) } else { Ok(raw) }
    }

    /// Remembers that the device tells of nothing any more.
    fn lost(&mut self) -> VerbsError {
        self.handle.break_now(Some(LOST));
        let error = self.over(LOST);
        self.fault.get_or_insert(error).clone()
    }

    fn over(&self, why: &str) -> VerbsError {
        VerbsError::Disconnected { subject: self.subject.clone(), why: why.into() }
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when as many are posted as there may be, or the slot is of another protection domain.
    pub fn post_receive(&mut self, slot: Slot) -> Result<(), VerbsError> {
        let raw = self.raw()?;
        if !Arc::ptr_eq(slot.domain(), &self.domain) {
            return Err(VerbsError::Misuse("the slot's memory is registered in another protection domain".into()));
        }
        let Some(index) = self.free_receives.pop() else {
            return Err(VerbsError::Misuse(format!("more than {} receives", self.depths.receives)));
        };
        let mut sge = slot.sge(u32::MAX);
        let mut wr = sys::RecvWr { wr_id: index.into(), next: std::ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
        // From here on the slot belongs to the queue pair.
        self.receives[index as usize] = Some(slot);
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives; its operations do not change after the device was opened.
        let post = unsafe { (*(*raw).context).ops.post_recv };
        let Some(post) = post else { return Err(VerbsError::Misuse("the driver has no post_recv".into())) };
        // SAFETY: request and element are read during the call; the slot's memory stays until its completion.
        match unsafe { post(raw, &mut wr, &mut bad) } {
            0 => Ok(()),
            failed => {
                self.receives[index as usize] = None;
                self.free_receives.push(index);
                Err(VerbsError::returned("ibv_post_recv", &*self.subject, failed))
            }
        }
    }

    /// Sends and writes under way.
    pub fn under_way(&self) -> u64 {
        self.posted - self.completed
    }

    /// Waits until at most `most` sends and writes are under way.
    ///
    /// # Errors
    /// When the connection failed; [`VerbsError::Timeout`] when more are at `deadline`, and nothing else is changed then.
    pub fn settle(&mut self, most: u64, deadline: Instant) -> Result<(), VerbsError> {
        self.wait_sent(self.posted.saturating_sub(most), deadline)
    }

    /// A slot that was sent and is free again.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn free_slot(&mut self) -> Result<Option<Slot>, VerbsError> {
        Ok(if self.has_free_slot()? { self.spare.pop() } else { None })
    }

    /// Whether there is such a slot.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn has_free_slot(&mut self) -> Result<bool, VerbsError> {
        if self.spare.is_empty() {
            self.take_sent()?;
        }
        Ok(!self.spare.is_empty())
    }

    /// The same, waiting for one until `deadline`.
    ///
    /// # Errors
    /// When the connection failed, none came free in time, or there are none.
    pub fn take_slot(&mut self, deadline: Instant) -> Result<Slot, VerbsError> {
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

    /// Looks, without waiting, whether the connection has failed or ended.
    ///
    /// # Errors
    /// When it has.
    pub fn check(&mut self) -> Result<(), VerbsError> {
        self.take_sent()?;
        if self.own_events { self.take_events() } else { Ok(()) }
    }

    /// Leaves a slot for sending.
    pub fn keep_slot(&mut self, slot: Slot) {
        self.spare.push(slot);
    }

    /// Waits for room for one more send or write. The completions of earlier ones are looked at only when there is none:
    /// a look before each message would be in that message's time.
    pub(crate) fn room(&mut self, deadline: Instant) -> Result<(), VerbsError> {
        if self.under_way() < self.depths.sends.into() {
            return self.raw().map(drop);
        }
        self.take_sent()?;
        while self.under_way() >= self.depths.sends.into() {
            self.wait_sent(self.posted - u64::from(self.depths.sends) + 1, deadline)?;
        }
        Ok(())
    }

    /// Sends the first `len` bytes of `slot` as a message. Waits for room until `deadline`.
    ///
    /// # Errors
    /// When the connection failed, or there was no room in time.
    pub fn send(&mut self, slot: Slot, len: usize, deadline: Instant) -> Result<(), VerbsError> {
        self.post_slot(slot, len, sys::WR_SEND, None, None, deadline)
    }

    /// Writes the first `len` bytes of `slot` into `region`, which the peer learns of by the number `immediate`, or
    /// without one by looking; for payloads short enough that copying them into a slot is cheaper than waiting until
    /// borrowed bytes are acknowledged.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when they do not fit in the region or in the slot; when the connection failed, or there was
    /// no room in time.
    pub fn write_slot(
        &mut self,
        slot: Slot,
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

    /// Reads the first `len` bytes of `region` into `slot`, which comes back with its completion ([`QueuePair::settle`]
    /// waits for it, [`QueuePair::free_slot`] gives it back). The peer's program takes no part and learns nothing of it.
    /// As many are under way as [`QueuePair::allow_reads`] said on both sides; the device lets the others wait.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when they do not fit in the region or in the slot; when the connection failed, or there was
    /// no room in time.
    pub fn read_slot(
        &mut self,
        slot: Slot,
        len: usize,
        region: RemoteRegion,
        deadline: Instant,
    ) -> Result<(), VerbsError> {
        if len > slot.len() || len as u64 > region.len || len == 0 {
            let why = format!("{len} bytes of a region of {} do not fit in a slot of {}", region.len, slot.len());
            return Err(VerbsError::Misuse(why));
        }
        // From here on the slot belongs to the queue pair, which the NIC's late writes end with.
        self.post_slot(slot, len, sys::WR_RDMA_READ, Some(region), None, deadline)
    }

    /// Posts a request about the first `len` bytes of `slot`. One whose bytes are sent inline is free at once: the call
    /// has copied them.
    fn post_slot(
        &mut self,
        slot: Slot,
        len: usize,
        opcode: sys::Enum,
        region: Option<RemoteRegion>,
        immediate: Option<u32>,
        deadline: Instant,
    ) -> Result<(), VerbsError> {
        if !Arc::ptr_eq(slot.domain(), &self.domain) {
            return Err(VerbsError::Misuse("the slot's memory is registered in another protection domain".into()));
        }
        self.room(deadline)?;
        let mut sge = slot.sge(u32::try_from(len).unwrap_or(u32::MAX));
        let inline = opcode != sys::WR_RDMA_READ && sge.length <= self.max_inline;
        let flags = sys::SEND_SIGNALED | if inline { sys::SEND_INLINE } else { 0 };
        let mut wr = sys::SendWr::new(self.posted + 1, opcode, flags);
        wr.imm_data = immediate.unwrap_or(0).to_be();
        if let Some(region) = region {
            (wr.remote_addr, wr.rkey) = (region.addr, region.rkey);
        }
        wr.sg_list = &mut sge;
        wr.num_sge = 1;
        self.post(&mut wr, Some(slot))?;
        if inline && let Some((_, slot)) = self.sends.back_mut() {
            self.spare.extend(slot.take());
        }
        Ok(())
    }

    /// Says whether what is waited for is expected soon, so that polling may pay: a small answer, not bulk data.
    pub fn expect_soon(&mut self, soon: bool) {
        self.soon = soon;
    }

    /// Writes nothing to the peer: only its NIC's acknowledgement says whether the path works.
    ///
    /// # Errors
    /// When the connection failed, or there was no room in time.
    pub fn probe(&mut self, deadline: Instant) -> Result<(), VerbsError> {
        self.room(deadline)?;
        let mut wr = sys::SendWr::new(self.posted + 1, sys::WR_RDMA_WRITE, sys::SEND_SIGNALED);
        self.post(&mut wr, None)
    }

    pub(crate) fn post(&mut self, wr: &mut sys::SendWr, slot: Option<Slot>) -> Result<(), VerbsError> {
        let raw = self.raw()?;
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_receive`.
        let post = unsafe { (*(*raw).context).ops.post_send };
        let Some(post) = post else { return Err(VerbsError::Misuse("the driver has no post_send".into())) };
        // SAFETY: the request is read during the call; its memory is a slot kept until its completion, or borrowed for
        // as long as `writing` runs, which waits for completions or destroys the queue pair.
        match unsafe { post(raw, wr, &mut bad) } {
            0 => {
                self.posted += 1;
                self.sends.push_back((self.posted, slot));
                Ok(())
            }
            failed => {
                self.spare.extend(slot);
                Err(VerbsError::returned("ibv_post_send", &*self.subject, failed))
            }
        }
    }

    /// Takes the completions of sends and writes.
    fn take_sent(&mut self) -> Result<(), VerbsError> {
        self.raw()?;
        loop {
            let n = self.queue.poll(Side::Send, &mut self.batch)?;
            for at in 0..n {
                let wc = self.batch[at];
                if wc.status != 0 {
                    return Err(self.fail("a send or write", &wc));
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

    /// Waits until number `until` of what was posted has completed.
    pub(crate) fn wait_sent(&mut self, until: u64, deadline: Instant) -> Result<(), VerbsError> {
        self.take_sent()?;
        while self.completed < until {
            if self.spin(|pair| pair.take_sent().map(|()| pair.completed >= until))? {
                return Ok(());
            }
            self.queue.arm(Side::Send)?;
            self.take_sent()?;
            if self.completed >= until {
                return Ok(());
            }
            match self.queue.sleep(self.events_fd(), deadline) {
                Wake::Completion => {}
                Wake::Event => self.take_events()?,
                Wake::Lost => return Err(self.lost()),
                Wake::Deadline => {
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

    /// Looks at what happened to the connection.
    fn take_events(&mut self) -> Result<(), VerbsError> {
        while let Some(event) = self.id().channel().next(Instant::now())? {
            if matches!(event.kind, CmEventKind::Disconnected | CmEventKind::DeviceRemoved) {
                // What arrived before the end is still there to be taken.
                self.own_events = false;
                let error = unexpected(self.subject.clone(), &event.kind);
                self.handle.break_now(None);
                self.fault.get_or_insert(error);
            }
        }
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(()),
        }
    }

    /// Remembers why the connection failed: the first completion that is no consequence of another's failure.
    fn fail(&mut self, what: &'static str, wc: &sys::WorkCompletion) -> VerbsError {
        let describe = |wc: &sys::WorkCompletion, what| VerbsError::Work {
            what,
            subject: self.subject.clone(),
            qpn: self.qpn,
            status: WcStatus(wc.status),
            vendor_err: wc.vendor_err,
        };
        let mut error = describe(wc, what);
        if WcStatus(wc.status) == WcStatus::FLUSHED {
            let mut batch = [sys::WorkCompletion::default(); BATCH];
            for (side, what) in [(Side::Send, "a send or write"), (Side::Receive, "a receive")] {
                let n = self.queue.poll(side, &mut batch).unwrap_or(0);
                let cause = batch[..n].iter().find(|wc| wc.status != 0 && WcStatus(wc.status) != WcStatus::FLUSHED);
                if let Some(cause) = cause {
                    error = describe(cause, what);
                    break;
                }
            }
            if matches!(&error, VerbsError::Work { status, .. } if *status == WcStatus::FLUSHED) {
                let why = *self.handle.lock.lock();
                error = self.over(why.unwrap_or("the peer ended it, its process died, or the device failed"));
                if self.own_events
                    && let Ok(Some(event)) = self.id().channel().next(Instant::now())
                    && matches!(event.kind, CmEventKind::Disconnected | CmEventKind::DeviceRemoved)
                {
                    error = unexpected(self.subject.clone(), &event.kind);
                }
            }
        }
        self.handle.break_now(None);
        self.fault.get_or_insert(error).clone()
    }

    /// The next message or announced write that has arrived, if any.
    ///
    /// # Errors
    /// Why the connection failed, once all that arrived before was taken.
    pub fn poll(&mut self) -> Result<Option<Completion>, VerbsError> {
        if self.untaken.is_empty() && self.handle.raw.load(Ordering::Relaxed).is_null() {
            self.raw()?;
        }
        self.has_arrived()?;
        let Some(wc) = self.untaken.next().map(|at| self.arrived[at]) else {
            return match &self.fault {
                Some(fault) => Err(fault.clone()),
                None => self.raw().map(|_| None),
            };
        };
        if wc.status != 0 {
            return Err(self.fail("a receive", &wc));
        }
        let index = usize::try_from(wc.wr_id).unwrap_or(usize::MAX);
        let Some(slot) = self.receives.get_mut(index).and_then(Option::take) else {
            return Err(VerbsError::Misuse(format!("the device completed receive {index}, which is not posted")));
        };
        self.free_receives.push(index as u32);
        let immediate = (wc.wc_flags & sys::WC_WITH_IMM != 0).then(|| u32::from_be(wc.imm_data));
        debug_assert!(wc.opcode & sys::WC_RECV != 0);
        Ok(Some(Completion { slot, len: wc.byte_len as usize, immediate }))
    }

    /// Asks for the descriptor to become readable with the next arrival; says whether something is there already, in
    /// which case it may not.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn arm(&mut self) -> Result<bool, VerbsError> {
        self.raw()?;
        // An event that is none: whoever waits for the descriptor would be woken again and again.
        if !self.queue.drain() && self.queue.is_lost() {
            return Err(self.lost());
        }
        if let Err(error) = self.queue.arm(Side::Receive) {
            // What has arrived is taken before it.
            return Err(self.fault.get_or_insert(error).clone());
        }
        self.has_arrived()
    }

    /// Looks whether something has arrived.
    ///
    /// # Errors
    /// When the device gives no completions any more.
    pub fn has_arrived(&mut self) -> Result<bool, VerbsError> {
        if self.untaken.is_empty() {
            self.untaken = 0..self.queue.poll(Side::Receive, &mut self.arrived)?;
        }
        Ok(!self.untaken.is_empty())
    }

    /// Waits until something has arrived, the connection failed (which the next [`QueuePair::poll`] says), or
    /// `deadline`; polls first where that was worth it lately. Says whether there is something.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn wait(&mut self, deadline: Instant) -> Result<bool, VerbsError> {
        if self.has_arrived()? || self.spin(Self::has_arrived)? {
            return Ok(true);
        }
        loop {
            self.raw()?;
            self.queue.arm(Side::Receive)?;
            if self.has_arrived()? {
                return Ok(true);
            }
            match self.queue.sleep(self.events_fd(), deadline) {
                Wake::Completion => {
                    if self.has_arrived()? {
                        return Ok(true);
                    }
                }
                Wake::Event => {
                    if let Err(fault) = self.take_events() {
                        return if self.has_arrived()? { Ok(true) } else { Err(fault) };
                    }
                }
                Wake::Lost => {
                    let fault = self.lost();
                    return if self.has_arrived()? { Ok(true) } else { Err(fault) };
                }
                Wake::Deadline => return Ok(false),
            }
        }
    }

    /// Polls with `there` for a moment, where that was worth it lately and a processor is left over.
    fn spin(&mut self, there: impl Fn(&mut Self) -> Result<bool, VerbsError>) -> Result<bool, VerbsError> {
        if !self.soon {
            return Ok(false);
        }
        let Some(limit) = self.pace.next() else { return Ok(false) };
        let Some(_polling) = Polling::begin(self.processors) else { return Ok(false) };
        let begun = Instant::now();
        let (mut looks, mut took) = (0u32, Duration::ZERO);
        let found = loop {
            if there(self)? {
                // As of the last look at the clock: whoever waits for this does not wait for another one.
                break Some(took);
            }
            looks = looks.wrapping_add(1);
            if Polling::pause(looks) {
                took = begun.elapsed();
                if took > limit {
                    break None;
                }
            }
        };
        self.pace.learn(found);
        Ok(found.is_some())
    }

    /// Ends the connection without destroying anything. Over a port that is down nothing is sent.
    pub fn disconnect(&mut self) {
        if self.connected && self.port_active() && !self.handle.raw.load(Ordering::Relaxed).is_null() {
            self.connected = false;
            if let Some(id) = &self.id {
                // SAFETY: the id is open and was connected. The call tells the peer and does not wait for it.
                unsafe { (self.handle.verbs.cm.rdma_disconnect)(id.raw()) };
            }
        }
    }

    /// Whether the port is active, as far as it can be asked.
    fn port_active(&self) -> bool {
        let port = self.id.as_ref().map_or(0, CmId::port);
        self.domain.context().port_state(port).map_or(true, |state| state.is_active())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.disconnect();
        // Before the slots, the queues and the id, which are dropped after this.
        self.handle.destroy();
        if !self.port_active()
            && let Some(id) = self.id.take()
        {
            self.domain.context().leave(id);
        }
    }
}
