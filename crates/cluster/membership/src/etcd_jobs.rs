//! Jobs in etcd, shared by several coordinators: what each is to do, how far it is, and which coordinator works on it, by
//! a lease, so that another one takes over when it dies. What is in a job it does not know.
//!
//! Below `/spurline-jobs/now/` stand the few and small keys of jobs under way, which every coordinator looks at once a
//! second: GROUP/ID/open, GROUP/ID/owner (lives by its coordinator's lease) and GROUP/ID/stop (somebody wants its end).
//! Below `/spurline-jobs/data/` stand GROUP/ID/spec and GROUP/ID/state, those of ended jobs for a week.

use crate::etcd_session::Session;
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::response_op::Response as Done;
use crate::etcdpb::{
    Compare, DeleteRangeRequest, KeyValue, LeaseGrantRequest, LeaseRevokeRequest, PutRequest, RangeRequest, RequestOp,
    TxnRequest, TxnResponse,
};
use crate::url::EtcdUrl;
use crate::{ANSWER, LEASE, runtime};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const NOW: &str = "/spurline-jobs/now/";
const DATA: &str = "/spurline-jobs/data/";
/// How long ended jobs can be asked about.
const REMEMBERED: Duration = Duration::from_secs(7 * 86_400);
/// A lease is given up this much before etcd does: clocks do not run alike.
const EARLY: Duration = Duration::from_secs(2);
/// A pause before a lost lease is asked for again.
const PAUSE: Duration = Duration::from_secs(1);

/// A job as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredJob {
    /// What it is to do.
    pub spec: Vec<u8>,
    /// How far it is.
    pub state: Vec<u8>,
}

/// A job under way, as all coordinators see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobNow {
    /// Whether it has not ended.
    pub open: bool,
    /// Whether a coordinator works on it.
    pub owned: bool,
    /// Whether that is this process.
    pub mine: bool,
    /// Whether somebody wants its end.
    pub stop: bool,
}

/// What came of beginning a job.
#[derive(Debug, PartialEq, Eq)]
pub enum Begun {
    /// It is this coordinator's.
    Mine,
    /// Another one works on it already, or will soon.
    Elsewhere(StoredJob),
}

/// Jobs in etcd.
pub struct JobStore {
    session: Session,
    runtime: Runtime,
    /// This process, as no other calls itself.
    owner: String,
    lease: Mutex<Option<Lease>>,
    stop: Mutex<bool>,
    wake: Condvar,
}

#[derive(Clone, Copy)]
struct Lease {
    id: i64,
    /// By this process's clock, counted from before etcd was asked.
    until: Instant,
}

fn key(area: &str, group: &str, id: &str, what: &str) -> Vec<u8> {
    format!("{area}{group}/{id}/{what}").into_bytes()
}

/// All keys that begin with `prefix`.
fn below(prefix: Vec<u8>) -> RangeRequest {
    let mut end = prefix.clone();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    RangeRequest { key: prefix, range_end: end, ..RangeRequest::default() }
}

fn put(key: Vec<u8>, value: &[u8], lease: i64) -> RequestOp {
    let put = PutRequest { key, value: value.to_vec(), lease, ..PutRequest::default() };
    RequestOp { request: Some(Op::RequestPut(put)) }
}

/// Leaves the value as it is.
fn put_lease(key: Vec<u8>, lease: i64) -> RequestOp {
    RequestOp { request: Some(Op::RequestPut(PutRequest { key, lease, ignore_value: true, ..PutRequest::default() })) }
}

fn get(key: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Op::RequestRange(RangeRequest { key, ..RangeRequest::default() })) }
}

fn delete(key: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Op::RequestDeleteRange(DeleteRangeRequest { key, ..DeleteRangeRequest::default() })) }
}

fn absent(key: Vec<u8>) -> Compare {
    compare(key, CompareResult::Equal, CompareTarget::Version, TargetUnion::Version(0))
}

fn compare(key: Vec<u8>, result: CompareResult, target: CompareTarget, union: TargetUnion) -> Compare {
    Compare { result: result as i32, target: target as i32, key, target_union: Some(union) }
}

/// The keys that a transaction read, in order.
fn read(done: TxnResponse) -> Vec<Option<KeyValue>> {
    let one = |response: crate::etcdpb::ResponseOp| match response.response {
        Some(Done::ResponseRange(range)) => Some(range.kvs.into_iter().next()),
        _ => None,
    };
    done.responses.into_iter().filter_map(one).collect()
}

fn job(kvs: Vec<Option<KeyValue>>) -> Option<StoredJob> {
    let mut kvs = kvs.into_iter();
    Some(StoredJob { spec: kvs.next()??.value, state: kvs.next()??.value })
}

impl JobStore {
    /// Bytes that a new job may have, and how far it is later: etcd takes requests of 1.5 MiB.
    pub const MOST: usize = 1 << 20;

    /// Reaches etcd and takes a lease there; `owner` is what this process is called, as no other is.
    ///
    /// # Errors
    /// When the URL can't be right, or etcd gives no lease.
    pub fn open(url: &EtcdUrl, owner: &str) -> Result<Arc<JobStore>> {
        let runtime = runtime("etcd-jobs")?;
        let inside = runtime.enter();
        let session = Session::new(url)?;
        drop(inside);
        let store = Arc::new(JobStore {
            session,
            runtime,
            owner: owner.to_owned(),
            lease: Mutex::new(None),
            stop: Mutex::new(false),
            wake: Condvar::new(),
        });
        store.renew().map_err(|error| error.context("the jobs' store"))?;
        let kept = Arc::downgrade(&store);
        let keep = move || {
            while let Some(store) = kept.upgrade() {
                if !store.keep() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("jobs-lease".into())
            .spawn(keep)
            .map_err(|e| Error::io("a thread for the jobs' store", &e))?;
        Ok(store)
    }

    /// Whether what this process took is still its own.
    pub fn holds(&self) -> bool {
        self.lease.lock().is_some_and(|lease| Instant::now() + EARLY < lease.until)
    }

    /// Renews the lease after a while; `false` at the end.
    fn keep(&self) -> bool {
        let pause = if self.holds() { LEASE / 5 } else { PAUSE };
        let mut stop = self.stop.lock();
        let until = Instant::now() + pause;
        while !*stop && !self.wake.wait_until(&mut stop, until).timed_out() {}
        if *stop {
            return false;
        }
        drop(stop);
        let held = self.holds();
        match self.renew() {
            Ok(()) if !held => tracing::info!("the jobs' store in etcd is there again"),
            Ok(()) => {}
            Err(error) if held => {
                tracing::warn!(
                    "the jobs' store: {error}; without it jobs stand still, so that no two coordinators work on one"
                );
            }
            Err(_) => {}
        }
        true
    }

    fn renew(&self) -> Result<()> {
        let asked = Instant::now();
        let held = *self.lease.lock();
        let id = self.ask(async {
            if let Some(lease) = held
                && self.session.keep_alive(lease.id).await? > 0
            {
                return Ok(lease.id);
            }
            let granted = self.session.grant(LeaseGrantRequest { ttl: LEASE.as_secs() as i64, id: 0 }).await?;
            Ok(granted.id)
        })?;
        let mut lease = self.lease.lock();
        // Else it has been given up meanwhile.
        if !*self.stop.lock() {
            *lease = Some(Lease { id, until: asked + LEASE });
        }
        Ok(())
    }

    fn ask<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = 2 * ANSWER;
        self.runtime.block_on(async { tokio::time::timeout(limit, work).await }).unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unavailable, format!("etcd gave no answer within {} s", limit.as_secs())))
        })
    }

    fn txn(&self, compare: Vec<Compare>, success: Vec<RequestOp>, failure: Vec<RequestOp>) -> Result<TxnResponse> {
        self.ask(self.session.txn(TxnRequest { compare, success, failure }))
    }

    fn lease_id(&self) -> Result<i64> {
        let lease = *self.lease.lock();
        lease.map(|lease| lease.id).ok_or_else(|| Error::new(ErrorKind::Unavailable, "the jobs' store is not reached"))
    }

    /// All jobs under way, by group and name.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn now(&self) -> Result<BTreeMap<(String, String), JobNow>> {
        let found = self.ask(self.session.range(below(NOW.into())))?;
        let mut jobs: BTreeMap<(String, String), JobNow> = BTreeMap::new();
        for kv in found.kvs {
            let Some(rest) = std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(NOW)) else { continue };
            let mut words = rest.split('/');
            let (Some(group), Some(id), Some(what)) = (words.next(), words.next(), words.next()) else { continue };
            let job = jobs.entry((group.to_owned(), id.to_owned())).or_default();
            match what {
                "open" => job.open = true,
                "stop" => job.stop = true,
                "owner" => (job.owned, job.mine) = (true, kv.value == self.owner.as_bytes()),
                _ => {}
            }
        }
        Ok(jobs)
    }

    /// Takes a job that nobody works on; `None` when somebody does, or it has ended.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn claim(&self, group: &str, id: &str) -> Result<Option<StoredJob>> {
        let lease = self.lease_id()?;
        let (open, owner) = (key(NOW, group, id, "open"), key(NOW, group, id, "owner"));
        let there = compare(open, CompareResult::Greater, CompareTarget::Version, TargetUnion::Version(0));
        let success = vec![
            put(owner.clone(), self.owner.as_bytes(), lease),
            get(key(DATA, group, id, "spec")),
            get(key(DATA, group, id, "state")),
        ];
        let done = self.txn(vec![there, absent(owner)], success, Vec::new())?;
        Ok(if done.succeeded { job(read(done)) } else { None })
    }

    /// Begins a job anew, unless another coordinator works on it.
    ///
    /// # Errors
    /// When etcd does not answer, or the job is larger than it takes.
    pub fn begin(&self, group: &str, id: &str, new: &StoredJob) -> Result<Begun> {
        if new.spec.len() + new.state.len() > Self::MOST {
            let why = format!(
                "the job has {} bytes, the store of several coordinators takes {}: split its list of paths",
                new.spec.len() + new.state.len(),
                Self::MOST
            );
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let lease = self.lease_id()?;
        let (open, owner) = (key(NOW, group, id, "open"), key(NOW, group, id, "owner"));
        let (spec, state) = (key(DATA, group, id, "spec"), key(DATA, group, id, "state"));
        let success = vec![
            put(open.clone(), b"", 0),
            put(owner.clone(), self.owner.as_bytes(), lease),
            delete(key(NOW, group, id, "stop")),
            put(spec.clone(), &new.spec, 0),
            put(state.clone(), &new.state, 0),
        ];
        // One that nobody works on at this moment is soon taken over.
        let done = self.txn(vec![absent(owner), absent(open)], success, vec![get(spec), get(state)])?;
        if done.succeeded {
            return Ok(Begun::Mine);
        }
        let gone = || Error::new(ErrorKind::Unavailable, "the job ended while it was begun again; try again");
        job(read(done)).map(Begun::Elsewhere).ok_or_else(gone)
    }

    /// Keeps how far a job of this process is, at most [`JobStore::MOST`] bytes; `false` when it is another's by now.
    ///
    /// # Errors
    /// When etcd does not answer, or that is larger than it takes.
    pub fn save(&self, group: &str, id: &str, state: &[u8], ended: bool) -> Result<bool> {
        let lease = self.lease_id()?;
        let owner = key(NOW, group, id, "owner");
        let own = compare(
            owner.clone(),
            CompareResult::Equal,
            CompareTarget::Value,
            TargetUnion::Value(self.owner.clone().into_bytes()),
        );
        // A key of a lease that was lost meanwhile is no claim of the one held now.
        let held = compare(owner.clone(), CompareResult::Equal, CompareTarget::Lease, TargetUnion::Lease(lease));
        let (spec, key_of_state) = (key(DATA, group, id, "spec"), key(DATA, group, id, "state"));
        let success = if ended {
            let request = LeaseGrantRequest { ttl: REMEMBERED.as_secs() as i64, id: 0 };
            let week = self.ask(self.session.grant(request))?.id;
            vec![
                put_lease(spec, week),
                put(key_of_state, state, week),
                delete(key(NOW, group, id, "open")),
                delete(key(NOW, group, id, "stop")),
                delete(owner),
            ]
        } else {
            vec![put(key_of_state, state, 0)]
        };
        Ok(self.txn(vec![own, held], success, Vec::new())?.succeeded)
    }

    /// Gives a job up that goes on elsewhere.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn release(&self, group: &str, id: &str) -> Result<()> {
        let owner = key(NOW, group, id, "owner");
        let value = TargetUnion::Value(self.owner.clone().into_bytes());
        let own = compare(owner.clone(), CompareResult::Equal, CompareTarget::Value, value);
        self.txn(vec![own], vec![delete(owner)], Vec::new()).map(drop)
    }

    /// Asks whoever works on a job to end it; `false` when it has ended.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn stop(&self, group: &str, id: &str) -> Result<bool> {
        let open = key(NOW, group, id, "open");
        let there = compare(open, CompareResult::Greater, CompareTarget::Version, TargetUnion::Version(0));
        let wish = put(key(NOW, group, id, "stop"), b"", 0);
        Ok(self.txn(vec![there], vec![wish], Vec::new())?.succeeded)
    }

    /// A job, whoever works on it.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn read(&self, group: &str, id: &str) -> Result<Option<StoredJob>> {
        let both = vec![get(key(DATA, group, id, "spec")), get(key(DATA, group, id, "state"))];
        Ok(job(read(self.txn(Vec::new(), both, Vec::new())?)))
    }

    /// All jobs of a group whose names begin with `prefix`, by name.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn all(&self, group: &str, prefix: &str) -> Result<Vec<(String, StoredJob)>> {
        let area = format!("{DATA}{group}/");
        let found = self.ask(self.session.range(below(format!("{area}{prefix}").into_bytes())))?;
        let mut parts: BTreeMap<String, [Option<Vec<u8>>; 2]> = BTreeMap::new();
        for kv in found.kvs {
            let Some(rest) = std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(&area)) else {
                continue;
            };
            let Some((id, what)) = rest.split_once('/') else { continue };
            parts.entry(id.to_owned()).or_default()[usize::from(what == "state")] = Some(kv.value);
        }
        let whole =
            |(id, [spec, state]): (String, [Option<Vec<u8>>; 2])| Some((id, StoredJob { spec: spec?, state: state? }));
        Ok(parts.into_iter().filter_map(whole).collect())
    }

    /// Gives up everything: others may take it at once.
    pub fn end(&self) {
        *self.stop.lock() = true;
        self.wake.notify_all();
        if let Some(lease) = self.lease.lock().take() {
            // etcd that does not hear it sees the lease run out.
            let _ = self.ask(async { self.session.revoke(LeaseRevokeRequest { id: lease.id }).await.map(drop) });
        }
    }
}
