//! An under-store that fails, stalls, cuts, throttles and replaces on demand, for the tests of the layers above.
//! It deliberately invents no data: what it lets through is the wrapped store's.

use crate::{Capabilities, StatFs, UnderStore};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Attr, Error, ErrorKind, ListPage, ObjectRef, Result, Sink};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The calls a fault is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
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

/// What is done to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Fail with this kind.
    Fail(ErrorKind),
    /// Answer only after this time; `Timeout` when the deadline is nearer.
    Stall(Duration),
    /// Let so many bytes of a read land, then fail as `Unavailable`.
    Cut(usize),
    /// Fail as `Throttled`.
    Throttle,
    /// Fail as `Stale`, as when the object is replaced in this moment.
    Replace,
}

#[derive(Default)]
struct Plan {
    faults: Vec<(On, Fault, u64)>,
    latency: Duration,
    holding: bool,
    waiting: usize,
}

/// A wrapper around any under-store.
pub struct FaultyUnder {
    inner: Arc<dyn UnderStore>,
    plan: Mutex<Plan>,
    changed: Condvar,
    lookups: AtomicU64,
    lists: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
}

impl FaultyUnder {
    /// Wraps `inner`; without faults it is as `inner`.
    pub fn new(inner: Arc<dyn UnderStore>) -> Self {
        FaultyUnder {
            inner,
            plan: Mutex::default(),
            changed: Condvar::new(),
            lookups: AtomicU64::new(0),
            lists: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        }
    }

    /// Does `fault` to the next `times` calls that `on` names; several plans are used in the order given.
    pub fn inject(&self, on: On, fault: Fault, times: u64) {
        self.plan.lock().faults.push((on, fault, times));
    }

    /// Delays every call by this long.
    pub fn set_latency(&self, latency: Duration) {
        self.plan.lock().latency = latency;
    }

    /// Holds all reads that come from now on (until their deadline) until [`FaultyUnder::release`].
    pub fn hold_reads(&self) {
        self.plan.lock().holding = true;
    }

    /// Lets held reads go on.
    pub fn release(&self) {
        self.plan.lock().holding = false;
        self.changed.notify_all();
    }

    /// Reads held now.
    pub fn held(&self) -> usize {
        self.plan.lock().waiting
    }

    /// Forgets all plans and lets everything go on.
    pub fn calm(&self) {
        *self.plan.lock() = Plan { waiting: self.held(), ..Plan::default() };
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
    /// Bytes asked for by reads so far.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Carries out what is planned for this call; answers how many bytes of a read may land.
    fn before(&self, on: On, deadline: Instant) -> Result<Option<usize>> {
        let (latency, fault) = {
            let mut plan = self.plan.lock();
            if on == On::Read && plan.holding {
                plan.waiting += 1;
                while plan.holding {
                    if self.changed.wait_until(&mut plan, deadline).timed_out() {
                        plan.waiting -= 1;
                        return Err(planned(ErrorKind::Timeout));
                    }
                }
                plan.waiting -= 1;
            }
            let found = plan.faults.iter().position(|(of, _, times)| (*of == on || *of == On::Any) && *times > 0);
            let fault = found.map(|i| {
                plan.faults[i].2 -= 1;
                plan.faults[i].1.clone()
            });
            plan.faults.retain(|(_, _, times)| *times > 0);
            (plan.latency, fault)
        };
        sleep(latency, deadline)?;
        match fault {
            None => Ok(None),
            Some(Fault::Stall(time)) => sleep(time, deadline).map(|()| None),
            Some(Fault::Cut(bytes)) if on == On::Read => Ok(Some(bytes)),
            Some(Fault::Fail(kind)) => Err(planned(kind)),
            Some(Fault::Cut(_)) => Err(planned(ErrorKind::Unavailable)),
            Some(Fault::Throttle) => Err(planned(ErrorKind::Throttled)),
            Some(Fault::Replace) => Err(planned(ErrorKind::Stale)),
        }
    }
}

/// The first bytes of another sink.
struct Short<'a> {
    sink: &'a mut dyn Sink,
    left: usize,
}

impl Sink for Short<'_> {
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

fn planned(kind: ErrorKind) -> Error {
    Error::new(kind, "a fault planned by a test")
}

fn sleep(time: Duration, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    std::thread::sleep(time.min(left));
    if time > left { Err(planned(ErrorKind::Timeout)) } else { Ok(()) }
}

impl UnderStore for FaultyUnder {
    fn source(&self) -> &str {
        self.inner.source()
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn check(&self, deadline: Instant) -> Result<()> {
        self.before(On::Any, deadline)?;
        self.inner.check(deadline)
    }
    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<Attr> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.before(On::Lookup, deadline)?;
        self.inner.lookup(path, deadline)
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.before(On::List, deadline)?;
        self.inner.list(path, cursor, max, deadline)
    }
    fn lists_all(&self, path: &[u8]) -> bool {
        self.inner.lists_all(path)
    }
    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.before(On::Readlink, deadline)?;
        self.inner.readlink(path, deadline)
    }
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(sink.spare().len() as u64, Ordering::Relaxed);
        match self.before(On::Read, deadline)? {
            None => self.inner.read(object, offset, sink, deadline),
            Some(bytes) => {
                self.inner.read(object, offset, &mut Short { sink, left: bytes }, deadline)?;
                Err(planned(ErrorKind::Unavailable))
            }
        }
    }
    fn statfs(&self, deadline: Instant) -> Result<Option<StatFs>> {
        self.inner.statfs(deadline)
    }
}
