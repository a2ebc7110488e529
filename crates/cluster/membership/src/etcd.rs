//! `etcd://`: a node is a key that lives by a lease, and watchers follow the keys of their group. Calls and their
//! order; which server is asked and with which rights is the session's matter.

use crate::book::{Book, Merge};
use crate::etcd_book::OfEtcd;
use crate::etcd_session::{Session, Stream};
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::event::EventType;
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::response_op::Response as Done;
use crate::etcdpb::{
    Compare, KeyValue, LeaseGrantRequest, LeaseRevokeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    TxnResponse,
};
use crate::url::EtcdUrl;
use crate::{ANSWER, LEASE, Lease, Registry, Watch, record, runtime, takes_over, two_of_one_name};
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Member, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Changes that come together are given together.
const GATHER: Duration = Duration::from_millis(100);
/// Every so many renewals it is looked whether the key is still there as it was written.
const LOOK_EVERY: u32 = 12;

/// etcd as a registry.
pub(crate) struct Etcd {
    url: String,
    group: String,
    session: Arc<Session>,
    runtime: Arc<Runtime>,
}

impl Etcd {
    pub(crate) fn new(url: &EtcdUrl, group: &str) -> Result<Self> {
        let runtime = runtime("etcd")?;
        let inside = runtime.enter();
        let session = Session::new(url)?;
        drop(inside);
        Ok(Etcd {
            url: format!("etcd://{url}"),
            group: group.to_owned(),
            session: Arc::new(session),
            runtime: Arc::new(runtime),
        })
    }
}

/// Where the nodes of a group are.
fn prefix(group: &str) -> Vec<u8> {
    format!("/spurline/{group}/nodes/").into_bytes()
}

impl Registry for Etcd {
    fn describe(&self) -> &str {
        &self.url
    }

    fn watch(&self) -> Box<dyn Watch> {
        Box::new(Following {
            prefix: prefix(&self.group),
            session: Arc::clone(&self.session),
            runtime: Arc::clone(&self.runtime),
            stream: None,
            known: Known::default(),
        })
    }

    fn lease(&self) -> Option<Box<dyn Lease>> {
        Some(Box::new(Held {
            group: self.group.clone(),
            session: Arc::clone(&self.session),
            runtime: Arc::clone(&self.runtime),
            lease: None,
            written: None,
            renewals: 0,
        }))
    }

    fn book(&self, merge: Merge) -> Option<Box<dyn Book>> {
        let (session, runtime) = (Arc::clone(&self.session), Arc::clone(&self.runtime));
        Some(Box::new(OfEtcd { group: self.group.clone(), merge, session, runtime, seen: Mutex::default() }))
    }
}

struct Following {
    prefix: Vec<u8>,
    session: Arc<Session>,
    runtime: Arc<Runtime>,
    stream: Option<Stream>,
    known: Known,
}

/// The nodes of a group, and whether they are others than those given last: also after the watch broke off in between.
#[derive(Default)]
struct Known {
    nodes: BTreeMap<Vec<u8>, Arc<Member>>,
    changed: bool,
}

impl Known {
    fn replace(&mut self, nodes: BTreeMap<Vec<u8>, Arc<Member>>) {
        self.changed |= nodes != self.nodes || nodes.is_empty();
        self.nodes = nodes;
    }

    fn set(&mut self, key: Vec<u8>, node: Option<Arc<Member>>) {
        match node {
            Some(node) => self.nodes.insert(key, node),
            None => self.nodes.remove(&key),
        };
        self.changed = true;
    }

    fn give(&mut self) -> Option<Vec<Arc<Member>>> {
        std::mem::take(&mut self.changed).then(|| self.nodes.values().cloned().collect())
    }
}

impl Following {
    /// Reads all nodes, and follows from there.
    async fn open(&mut self) -> Result<()> {
        let mut end = self.prefix.clone();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let request = RangeRequest { key: self.prefix.clone(), range_end: end.clone(), ..RangeRequest::default() };
        let all = self.session.range(request).await?;
        let revision = all.header.map_or(0, |header| header.revision);
        self.stream = Some(self.session.watch(self.prefix.clone(), end, revision + 1).await?);
        let mut known = BTreeMap::new();
        for kv in all.kvs {
            if let Some(member) = self.read(&kv) {
                known.insert(kv.key, member);
            }
        }
        self.known.replace(known);
        Ok(())
    }

    fn read(&self, kv: &KeyValue) -> Option<Arc<Member>> {
        match record::member_of(&kv.value) {
            Ok(member) => Some(Arc::new(member)),
            Err(why) => {
                tracing::warn!("etcd has {} and it is no node ({why}); left out", String::from_utf8_lossy(&kv.key));
                None
            }
        }
    }

    async fn changes(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        if self.stream.is_none() {
            self.open().await?;
        }
        let mut limit = if self.known.changed { Instant::now() } else { until };
        while let Some(stream) = &mut self.stream {
            let wait = limit.saturating_duration_since(Instant::now());
            match tokio::time::timeout(wait, stream.next()).await {
                Err(_) => break,
                Ok(Err(error)) => {
                    self.stream = None;
                    return Err(error);
                }
                Ok(Ok(events)) => {
                    for event in events {
                        let kind = event.r#type();
                        let Some(kv) = event.kv else { continue };
                        let member = (kind == EventType::Put).then(|| self.read(&kv)).flatten();
                        if !self.known.changed {
                            limit = limit.min(Instant::now() + GATHER);
                        }
                        self.known.set(kv.key, member);
                    }
                }
            }
        }
        Ok(self.known.give())
    }
}

impl Watch for Following {
    fn next(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        let runtime = Arc::clone(&self.runtime);
        runtime.block_on(self.changes(until))
    }
}

struct Held {
    group: String,
    session: Arc<Session>,
    runtime: Arc<Runtime>,
    lease: Option<i64>,
    /// What the key was last seen to say.
    written: Option<Member>,
    renewals: u32,
}

impl Held {
    async fn keep(&mut self, member: &Member) -> Result<Duration> {
        self.renewals += 1;
        if self.renewals.is_multiple_of(LOOK_EVERY) {
            self.written = None;
        }
        if let Some(lease) = self.lease
            && self.session.keep_alive(lease).await? <= 0
        {
            self.lease = None;
        }
        let lease = match self.lease {
            Some(lease) => lease,
            None => {
                self.written = None;
                let request = LeaseGrantRequest { ttl: LEASE.as_secs() as i64, id: 0 };
                let granted = self.session.grant(request).await?;
                *self.lease.insert(granted.id)
            }
        };
        if self.written.as_ref() != Some(member) {
            self.write(member, lease).await?;
            self.written = Some(member.clone());
        }
        Ok(LEASE)
    }

    /// Writes the key if it is nobody's, or this node's own from before.
    async fn write(&self, member: &Member, lease: i64) -> Result<()> {
        let key = [prefix(&self.group), member.name.as_bytes().to_vec()].concat();
        let put = |target: CompareTarget, union: TargetUnion| {
            let compare = Compare {
                result: CompareResult::Equal as i32,
                target: target as i32,
                key: key.clone(),
                target_union: Some(union),
            };
            let put = PutRequest {
                key: key.clone(),
                value: record::of_member(member).into_bytes(),
                lease,
                ..PutRequest::default()
            };
            let get = RangeRequest { key: key.clone(), ..RangeRequest::default() };
            TxnRequest {
                compare: vec![compare],
                success: vec![RequestOp { request: Some(Op::RequestPut(put)) }],
                failure: vec![RequestOp { request: Some(Op::RequestRange(get)) }],
            }
        };
        // Nobody's.
        let done = self.session.txn(put(CompareTarget::Version, TargetUnion::Version(0))).await?;
        if done.succeeded {
            return Ok(());
        }
        let Some(held) = first(done) else { return Err(changed_meanwhile()) };
        // A key that is no node is in nobody's way.
        if let Ok(holder) = record::member_of(&held.value) {
            if holder == *member && held.lease == lease {
                return Ok(());
            }
            if !takes_over(&holder, member) {
                return Err(Error::new(ErrorKind::Invalid, two_of_one_name(&self.group, &holder, member)));
            }
        }
        let union = TargetUnion::ModRevision(held.mod_revision);
        let done = self.session.txn(put(CompareTarget::Mod, union)).await?;
        if done.succeeded { Ok(()) } else { Err(changed_meanwhile()) }
    }
}

fn first(done: TxnResponse) -> Option<KeyValue> {
    match done.responses.into_iter().next()?.response? {
        Done::ResponseRange(range) => range.kvs.into_iter().next(),
        _ => None,
    }
}

fn changed_meanwhile() -> Error {
    Error::new(ErrorKind::Unavailable, "the key of this node changed while it was written; it is tried again")
}

impl Lease for Held {
    fn renew(&mut self, member: &Member, until: Instant) -> Result<Duration> {
        let runtime = Arc::clone(&self.runtime);
        let limit = until.saturating_duration_since(Instant::now()).min(3 * ANSWER);
        runtime.block_on(async { tokio::time::timeout(limit, self.keep(member)).await }).unwrap_or_else(|_| {
            let text = format!("etcd gave no answer within {:.0} s", limit.as_secs_f64());
            Err(Error::new(ErrorKind::Unavailable, text))
        })
    }

    fn release(&mut self, until: Instant) {
        let Some(id) = self.lease.take() else { return };
        let limit = until.saturating_duration_since(Instant::now());
        let revoke = self.session.revoke(LeaseRevokeRequest { id });
        // etcd that does not hear it sees the lease run out.
        let _ = self.runtime.block_on(async { tokio::time::timeout(limit, revoke).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_came_before_the_watch_broke_off_is_given_after_it() {
        let node = |name: &str| Some(Arc::new(Member { name: name.to_owned(), ..Member::at("127.0.0.1:1", 100) }));
        let names = |given: Option<Vec<Arc<Member>>>| {
            given.map(|nodes| nodes.iter().map(|node| node.name.clone()).collect::<Vec<_>>())
        };
        let mut known = Known::default();
        known.replace(BTreeMap::new());
        assert_eq!(names(known.give()), Some(vec![]));
        known.set(b"a".to_vec(), node("a"));
        // Here the watch breaks off, and what is read anew is what was heard.
        known.replace(known.nodes.clone());
        assert_eq!(names(known.give()), Some(vec!["a".to_owned()]));
        known.replace(known.nodes.clone());
        assert_eq!(names(known.give()), None);
        known.set(b"a".to_vec(), None);
        assert_eq!(names(known.give()), Some(vec![]));
    }
}
