//! Jobs in etcd, shared by several coordinators: the specifications, the progress, and the coordinator that runs each. Ownership
//! is a lease, so that another coordinator takes over after a crash. The contents of a job are opaque here.
//!
//! `/spurline-jobs/now/` holds the few small keys of active jobs, which every coordinator reads once a second: GROUP/ID/open,
//! GROUP/ID/owner (bound to the coordinator's lease) and GROUP/ID/stop (a stop was requested). `/spurline-jobs/data/` holds
//! GROUP/ID/spec and GROUP/ID/state; the keys of ended jobs expire after a week.

use crate::etcd_session::EtcdSession;
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::response_op::Response as Done;
use crate::etcdpb::{
    Compare, DeleteRangeRequest, KeyValue, LeaseGrantRequest, LeaseRevokeRequest, PutRequest, RangeRequest, RequestOp,
    TxnRequest, TxnResponse,
};
use crate::url::EtcdUrl;
use crate::{ANSWER_TIMEOUT, LEASE_TIME, small_runtime};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const ACTIVE_PREFIX: &str = "/spurline-jobs/now/";
const DATA_PREFIX: &str = "/spurline-jobs/data/";
/// How long ended jobs stay readable.
const ENDED_JOB_RETENTION: Duration = Duration::from_secs(7 * 86_400);
/// A lease is unused this much before the end in etcd: clocks drift.
const LEASE_DRIFT_MARGIN: Duration = Duration::from_secs(2);
/// Between two tries to get a lost lease back.
const LEASE_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// A stored job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredJob {
    /// The specification.
    pub spec: Vec<u8>,
    /// The progress.
    pub state: Vec<u8>,
}

/// An active job, the same for all coordinators.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ActiveJob {
    /// Whether the job has not ended.
    pub open: bool,
    /// Whether a coordinator runs the job.
    pub owned: bool,
    /// Whether this process runs the job.
    pub mine: bool,
    /// Whether a stop was requested.
    pub stop: bool,
}

/// Result of beginning a job.
#[derive(Debug, PartialEq, Eq)]
pub enum BeginResult {
    /// This coordinator runs the job.
    Mine,
    /// Another coordinator runs the job, or will soon.
    Elsewhere(StoredJob),
}

/// Jobs in etcd.
pub struct JobStore {
    session: EtcdSession,
    runtime: Runtime,
    /// A name for this process that no other has.
    owner: String,
    lease: Mutex<Option<StoreLease>>,
    request_stop: Mutex<bool>,
    wake: Condvar,
}

#[derive(Clone, Copy)]
struct StoreLease {
    id: i64,
    /// By this process's clock, counted from before the request.
    expires: Instant,
}

fn job_key(area: &str, group: &str, id: &str, what: &str) -> Vec<u8> {
    format!("{area}{group}/{id}/{what}").into_bytes()
}

/// All keys that begin with `prefix`.
fn prefix_range(prefix: Vec<u8>) -> RangeRequest {
    let mut end = prefix.clone();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    RangeRequest { key: prefix, range_end: end, ..RangeRequest::default() }
}

fn put_op(key: Vec<u8>, value: &[u8], lease: i64) -> RequestOp {
    let put = PutRequest { key, value: value.to_vec(), lease, ..PutRequest::default() };
    RequestOp { request: Some(Op::RequestPut(put)) }
}

/// Keeps the value.
fn put_lease_op(key: Vec<u8>, lease: i64) -> RequestOp {
    RequestOp { request: Some(Op::RequestPut(PutRequest { key, lease, ignore_value: true, ..PutRequest::default() })) }
}

fn get_op(key: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Op::RequestRange(RangeRequest { key, ..RangeRequest::default() })) }
}

fn delete_op(key: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Op::RequestDeleteRange(DeleteRangeRequest { key, ..DeleteRangeRequest::default() })) }
}

fn key_absent(key: Vec<u8>) -> Compare {
    key_compare(key, CompareResult::Equal, CompareTarget::Version, TargetUnion::Version(0))
}

fn key_compare(key: Vec<u8>, result: CompareResult, target: CompareTarget, union: TargetUnion) -> Compare {
    Compare { result: result as i32, target: target as i32, key, target_union: Some(union) }
}

/// The keys that a transaction read, in order.
fn range_results(done: TxnResponse) -> Vec<Option<KeyValue>> {
    done.responses
        .into_iter()
        .filter_map(|response| match response.response {
            Some(Done::ResponseRange(range)) => Some(range.kvs.into_iter().next()),
            _ => None,
        })
        .collect()
}

fn stored_job(kvs: Vec<Option<KeyValue>>) -> Option<StoredJob> {
    let mut kvs = kvs.into_iter();
    Some(StoredJob { spec: kvs.next()??.value, state: kvs.next()??.value })
}

impl JobStore {
    /// Most bytes of a new job, and of the progress later: etcd accepts requests up to 1.5 MiB.
    pub const MAX_JOB_BYTES: usize = 1 << 20;

    /// Connects to etcd and takes a lease; `owner` must be unique to this process.
    ///
    /// # Errors
    /// When the URL is invalid, or etcd grants no lease.
    pub fn open(url: &EtcdUrl, owner: &str) -> Result<Arc<JobStore>> {
        let runtime = small_runtime("etcd-jobs")?;
        let inside = runtime.enter();
        let session = EtcdSession::new(url)?;
        drop(inside);
        let store = Arc::new(JobStore {
            session,
            runtime,
            owner: owner.to_owned(),
            lease: Mutex::new(None),
            request_stop: Mutex::new(false),
            wake: Condvar::new(),
        });
        store.renew_lease().map_err(|error| error.context("the jobs' store"))?;
        let kept = Arc::downgrade(&store);
        std::thread::Builder::new()
            .name("jobs-lease".into())
            .spawn(move || {
                while let Some(store) = kept.upgrade() {
                    if !store.renew_after_pause() {
                        return;
                    }
                }
            })
            .map_err(|e| Error::io("a thread for the jobs' store", &e))?;
        Ok(store)
    }

    /// Whether this process still owns the claimed jobs.
    pub fn holds_lease(&self) -> bool {
        self.lease.lock().is_some_and(|lease| Instant::now() + LEASE_DRIFT_MARGIN < lease.expires)
    }

    /// Renews the lease after a pause; `false` at the end.
    fn renew_after_pause(&self) -> bool {
        let pause = if self.holds_lease() { LEASE_TIME / 5 } else { LEASE_RETRY_PAUSE };
        let mut stop = self.request_stop.lock();
        let until = Instant::now() + pause;
        while !*stop && !self.wake.wait_until(&mut stop, until).timed_out() {}
        if *stop {
            return false;
        }
        drop(stop);
        let held = self.holds_lease();
        match self.renew_lease() {
            Ok(()) if !held => tracing::info!("the jobs' store in etcd is reachable again"),
            Ok(()) => {}
            Err(error) if held => {
                tracing::warn!(
                    "the jobs' store: {error}; jobs are paused, so that no two coordinators run the same one"
                );
            }
            Err(_) => {}
        }
        true
    }

    fn renew_lease(&self) -> Result<()> {
        let asked = Instant::now();
        let held = *self.lease.lock();
        let id = self.run_limited(async {
            if let Some(lease) = held
                && self.session.keep_alive(lease.id).await? > 0
            {
                return Ok(lease.id);
            }
            let granted =
                self.session.grant_lease(LeaseGrantRequest { ttl: LEASE_TIME.as_secs() as i64, id: 0 }).await?;
            Ok(granted.id)
        })?;
        let mut lease = self.lease.lock();
        // A closed store must not get a lease again.
        if !*self.request_stop.lock() {
            *lease = Some(StoreLease { id, expires: asked + LEASE_TIME });
        }
        Ok(())
    }

    fn run_limited<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = 2 * ANSWER_TIMEOUT;
        self.runtime.block_on(async { tokio::time::timeout(limit, work).await }).unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unavailable, format!("etcd gave no answer within {} s", limit.as_secs())))
        })
    }

    fn run_txn(&self, compare: Vec<Compare>, success: Vec<RequestOp>, failure: Vec<RequestOp>) -> Result<TxnResponse> {
        self.run_limited(self.session.txn(TxnRequest { compare, success, failure }))
    }

    fn lease_id(&self) -> Result<i64> {
        let lease = *self.lease.lock();
        lease.map(|lease| lease.id).ok_or_else(|| Error::new(ErrorKind::Unavailable, "etcd can't be reached"))
    }

    /// All active jobs, by group and name.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn active_jobs(&self) -> Result<BTreeMap<(String, String), ActiveJob>> {
        let found = self.run_limited(self.session.range(prefix_range(ACTIVE_PREFIX.into())))?;
        let mut jobs: BTreeMap<(String, String), ActiveJob> = BTreeMap::new();
        for kv in found.kvs {
            let Some(rest) = std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(ACTIVE_PREFIX)) else {
                continue;
            };
            let mut words = rest.split('/');
            let (Some(group), Some(id), Some(what)) = (words.next(), words.next(), words.next()) else { continue };
            let job = jobs.entry((group.to_owned(), id.to_owned())).or_default();
            match what {
                "open" => job.open = true,
                "stop" => job.stop = true,
                "owner" => {
                    job.owned = true;
                    job.mine = kv.value == self.owner.as_bytes();
                }
                _ => {}
            }
        }
        Ok(jobs)
    }

    /// Claims a job that no coordinator runs; `None` when a coordinator does, or the job has ended.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn claim_job(&self, group: &str, id: &str) -> Result<Option<StoredJob>> {
        let lease = self.lease_id()?;
        let open = job_key(ACTIVE_PREFIX, group, id, "open");
        let owner = job_key(ACTIVE_PREFIX, group, id, "owner");
        let there = key_compare(open, CompareResult::Greater, CompareTarget::Version, TargetUnion::Version(0));
        let success = vec![
            put_op(owner.clone(), self.owner.as_bytes(), lease),
            get_op(job_key(DATA_PREFIX, group, id, "spec")),
            get_op(job_key(DATA_PREFIX, group, id, "state")),
        ];
        let done = self.run_txn(vec![there, key_absent(owner)], success, Vec::new())?;
        Ok(if done.succeeded { stored_job(range_results(done)) } else { None })
    }

    /// Begins a job anew, unless another coordinator runs the job.
    ///
    /// # Errors
    /// When etcd does not answer, or the job exceeds [`JobStore::MAX_JOB_BYTES`].
    pub fn begin_job(&self, group: &str, id: &str, new: &StoredJob) -> Result<BeginResult> {
        if new.spec.len() + new.state.len() > Self::MAX_JOB_BYTES {
            let why = format!(
                "the job has {} bytes, at most {} fit into etcd: split its list of paths",
                new.spec.len() + new.state.len(),
                Self::MAX_JOB_BYTES
            );
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let lease = self.lease_id()?;
        let open = job_key(ACTIVE_PREFIX, group, id, "open");
        let owner = job_key(ACTIVE_PREFIX, group, id, "owner");
        let spec = job_key(DATA_PREFIX, group, id, "spec");
        let state = job_key(DATA_PREFIX, group, id, "state");
        let success = vec![
            put_op(open.clone(), b"", 0),
            put_op(owner.clone(), self.owner.as_bytes(), lease),
            delete_op(job_key(ACTIVE_PREFIX, group, id, "stop")),
            put_op(spec.clone(), &new.spec, 0),
            put_op(state.clone(), &new.state, 0),
        ];
        // An open job without an owner is about to be taken over.
        let done =
            self.run_txn(vec![key_absent(owner), key_absent(open)], success, vec![get_op(spec), get_op(state)])?;
        if done.succeeded {
            return Ok(BeginResult::Mine);
        }
        stored_job(range_results(done))
            .map(BeginResult::Elsewhere)
            .ok_or_else(|| Error::new(ErrorKind::Unavailable, "the job ended while it was begun again; try again"))
    }

    /// Stores the progress of a job of this process, at most [`JobStore::MAX_JOB_BYTES`]; `false` when another process owns the
    /// job by now.
    ///
    /// # Errors
    /// When etcd does not answer, or refuses the size.
    pub fn save_state(&self, group: &str, id: &str, state: &[u8], ended: bool) -> Result<bool> {
        let lease = self.lease_id()?;
        let owner = job_key(ACTIVE_PREFIX, group, id, "owner");
        let own = key_compare(
            owner.clone(),
            CompareResult::Equal,
            CompareTarget::Value,
            TargetUnion::Value(self.owner.clone().into_bytes()),
        );
        // A key from an earlier, lost lease is no claim under the present lease.
        let held = key_compare(owner.clone(), CompareResult::Equal, CompareTarget::Lease, TargetUnion::Lease(lease));
        let spec = job_key(DATA_PREFIX, group, id, "spec");
        let key_of_state = job_key(DATA_PREFIX, group, id, "state");
        let success = if ended {
            let request = LeaseGrantRequest { ttl: ENDED_JOB_RETENTION.as_secs() as i64, id: 0 };
            let week = self.run_limited(self.session.grant_lease(request))?.id;
            vec![
                put_lease_op(spec, week),
                put_op(key_of_state, state, week),
                delete_op(job_key(ACTIVE_PREFIX, group, id, "open")),
                delete_op(job_key(ACTIVE_PREFIX, group, id, "stop")),
                delete_op(owner),
            ]
        } else {
            vec![put_op(key_of_state, state, 0)]
        };
        Ok(self.run_txn(vec![own, held], success, Vec::new())?.succeeded)
    }

    /// Releases a job so that another coordinator can continue.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn release_job(&self, group: &str, id: &str) -> Result<()> {
        let owner = job_key(ACTIVE_PREFIX, group, id, "owner");
        let value = TargetUnion::Value(self.owner.clone().into_bytes());
        let own = key_compare(owner.clone(), CompareResult::Equal, CompareTarget::Value, value);
        self.run_txn(vec![own], vec![delete_op(owner)], Vec::new()).map(drop)
    }

    /// Requests the stop of a job at the coordinator; `false` when the job has ended.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn stop(&self, group: &str, id: &str) -> Result<bool> {
        let open = job_key(ACTIVE_PREFIX, group, id, "open");
        let there = key_compare(open, CompareResult::Greater, CompareTarget::Version, TargetUnion::Version(0));
        let wish = put_op(job_key(ACTIVE_PREFIX, group, id, "stop"), b"", 0);
        Ok(self.run_txn(vec![there], vec![wish], Vec::new())?.succeeded)
    }

    /// Reads a job, of any coordinator.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn read_job(&self, group: &str, id: &str) -> Result<Option<StoredJob>> {
        let both =
            vec![get_op(job_key(DATA_PREFIX, group, id, "spec")), get_op(job_key(DATA_PREFIX, group, id, "state"))];
        Ok(stored_job(range_results(self.run_txn(Vec::new(), both, Vec::new())?)))
    }

    /// All jobs of a group whose names begin with `prefix`, by name.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn list_jobs(&self, group: &str, prefix: &str) -> Result<Vec<(String, StoredJob)>> {
        let area = format!("{DATA_PREFIX}{group}/");
        let found = self.run_limited(self.session.range(prefix_range(format!("{area}{prefix}").into_bytes())))?;
        let mut parts: BTreeMap<String, [Option<Vec<u8>>; 2]> = BTreeMap::new();
        for kv in found.kvs {
            let Some(rest) = std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(&area)) else {
                continue;
            };
            let Some((id, what)) = rest.split_once('/') else { continue };
            parts.entry(id.to_owned()).or_default()[usize::from(what == "state")] = Some(kv.value);
        }
        Ok(parts
            .into_iter()
            .filter_map(|(id, [spec, state])| Some((id, StoredJob { spec: spec?, state: state? })))
            .collect())
    }

    /// Releases everything, so that others can take over at once.
    pub fn close_store(&self) {
        *self.request_stop.lock() = true;
        self.wake.notify_all();
        if let Some(lease) = self.lease.lock().take() {
            // If etcd does not get the request, the lease runs out.
            let _ = self
                .run_limited(async { self.session.revoke_lease(LeaseRevokeRequest { id: lease.id }).await.map(drop) });
        }
    }
}
