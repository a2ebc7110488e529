//! An origin that fails, stalls, cuts, throttles and replaces on demand, for the tests of the layers above. It
//! deliberately invents no data: all data comes from the wrapped origin.

use crate::{OriginCapabilities, OriginCapacity, OriginStore, forward_to};
use parking_lot::{Condvar, Mutex};
use spurline_types::{ByteSink, Error, ErrorKind, ListPage, ObjectAttr, ObjectHeaders, ObjectRef, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The calls that a fault affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultTarget {
    /// `lookup`
    Lookup,
    /// `list`
    List,
    /// `readlink`
    Readlink,
    /// `read`
    Read,
    /// Any of them, and `check`.
    Any,
}

/// The effect of a fault on a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OriginFault {
    /// Fail with this kind.
    Fail(ErrorKind),
    /// Return only after this time; `Timeout` when the deadline is nearer.
    Stall(Duration),
    /// Deliver this many bytes of a read, then fail as `Unavailable`.
    Cut(usize),
    /// Fail as `Throttled`.
    Throttle,
    /// Fail as `Stale`, as when the object has just been replaced.
    Replace,
}

#[derive(Default)]
struct OriginFaultPlan {
    faults: Vec<(FaultTarget, OriginFault, u64)>,
    latency: Duration,
    holding: bool,
    waiting: usize,
}

/// A wrapper around any origin.
pub struct FaultyOrigin {
    inner: Arc<dyn OriginStore>,
    plan: Mutex<OriginFaultPlan>,
    changed: Condvar,
    lookups: AtomicU64,
    lists: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
}

impl FaultyOrigin {
    /// Wraps `inner`; without faults it behaves as `inner`.
    pub fn new(inner: Arc<dyn OriginStore>) -> Self {
        FaultyOrigin {
            inner,
            plan: Mutex::default(),
            changed: Condvar::new(),
            lookups: AtomicU64::new(0),
            lists: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        }
    }

    /// Applies `fault` to the next `times` calls that `on` names; several plans apply in the given order.
    pub fn inject(&self, on: FaultTarget, fault: OriginFault, times: u64) {
        self.plan.lock().faults.push((on, fault, times));
    }

    /// Delays every call by this long.
    pub fn set_latency(&self, latency: Duration) {
        self.plan.lock().latency = latency;
    }

    /// Blocks all new reads (at most until their deadline) until [`FaultyOrigin::release_reads`].
    pub fn hold_reads(&self) {
        self.plan.lock().holding = true;
    }

    /// Unblocks held reads.
    pub fn release_reads(&self) {
        self.plan.lock().holding = false;
        self.changed.notify_all();
    }

    /// Number of reads held.
    pub fn held_reads(&self) -> usize {
        self.plan.lock().waiting
    }

    /// Removes all plans and unblocks all calls.
    pub fn clear_faults(&self) {
        *self.plan.lock() = OriginFaultPlan { waiting: self.held_reads(), ..OriginFaultPlan::default() };
        self.changed.notify_all();
    }

    /// Calls of `lookup` so far.
    pub fn lookups(&self) -> u64 {
        self.lookups.load(Ordering::Relaxed)
    }
    /// Calls of `list` so far.
    pub fn lists(&self) -> u64 {
        self.lists.load(Ordering::Relaxed)
    }
    /// Calls of `read` so far.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
    /// Bytes requested by reads so far.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Applies the planned faults to this call; returns how many bytes of a read may be delivered.
    fn apply_faults(&self, on: FaultTarget, deadline: Instant) -> Result<Option<usize>> {
        let (latency, fault) = {
            let mut plan = self.plan.lock();
            if on == FaultTarget::Read && plan.holding {
                plan.waiting += 1;
                while plan.holding {
                    if self.changed.wait_until(&mut plan, deadline).timed_out() {
                        plan.waiting -= 1;
                        return Err(planned_error(ErrorKind::Timeout));
                    }
                }
                plan.waiting -= 1;
            }
            let found =
                plan.faults.iter().position(|(of, _, times)| (*of == on || *of == FaultTarget::Any) && *times > 0);
            let fault = found.map(|i| {
                plan.faults[i].2 -= 1;
                plan.faults[i].1.clone()
            });
            plan.faults.retain(|(_, _, times)| *times > 0);
            (plan.latency, fault)
        };
        sleep_until_deadline(latency, deadline)?;
        match fault {
            None => Ok(None),
            Some(OriginFault::Stall(time)) => sleep_until_deadline(time, deadline).map(|()| None),
            Some(OriginFault::Cut(bytes)) if on == FaultTarget::Read => Ok(Some(bytes)),
            Some(OriginFault::Fail(kind)) => Err(planned_error(kind)),
            Some(OriginFault::Cut(_)) => Err(planned_error(ErrorKind::Unavailable)),
            Some(OriginFault::Throttle) => Err(planned_error(ErrorKind::Throttled)),
            Some(OriginFault::Replace) => Err(planned_error(ErrorKind::Stale)),
        }
    }
}

/// The first bytes of another sink.
struct TruncatedSink<'a> {
    sink: &'a mut dyn ByteSink,
    left: usize,
}

impl ByteSink for TruncatedSink<'_> {
    fn spare(&mut self) -> &mut [u8] {
        let spare = self.sink.spare();
        let n = self.left.min(spare.len());
        &mut spare[..n]
    }
    fn commit(&mut self, n: usize) {
        self.left -= n.min(self.left);
        self.sink.commit(n);
    }
}

fn planned_error(kind: ErrorKind) -> Error {
    Error::new(kind, "a fault planned by a test")
}

fn sleep_until_deadline(time: Duration, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    std::thread::sleep(time.min(left));
    if time > left { Err(planned_error(ErrorKind::Timeout)) } else { Ok(()) }
}

impl OriginStore for FaultyOrigin {
    forward_to! { inner:
        fn source_url(&self) -> &str;
        fn describe(&self) -> String;
        fn capabilities(&self) -> OriginCapabilities;
        fn lists_all(&self, path: &[u8]) -> bool;
        fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>>;
    }

    fn check(&self, deadline: Instant) -> Result<()> {
        self.apply_faults(FaultTarget::Any, deadline)?;
        self.inner.check(deadline)
    }
    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.apply_faults(FaultTarget::Lookup, deadline)?;
        self.inner.lookup(path, deadline)
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.apply_faults(FaultTarget::List, deadline)?;
        self.inner.list(path, cursor, max, deadline)
    }
    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.apply_faults(FaultTarget::Readlink, deadline)?;
        self.inner.readlink(path, deadline)
    }
    fn object_headers(&self, path: &[u8], deadline: Instant) -> Result<ObjectHeaders> {
        self.apply_faults(FaultTarget::Any, deadline)?;
        self.inner.object_headers(path, deadline)
    }
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(sink.spare().len() as u64, Ordering::Relaxed);
        match self.apply_faults(FaultTarget::Read, deadline)? {
            None => self.inner.read(object, offset, sink, deadline),
            Some(bytes) => {
                self.inner.read(object, offset, &mut TruncatedSink { sink, left: bytes }, deadline)?;
                Err(planned_error(ErrorKind::Unavailable))
            }
        }
    }
}
