//! `etcd://`: a node is a key with a lease, and watchers follow the keys of the group. Owns the calls and the order of these;
//! [`EtcdSession`] chooses the server and holds the credentials.

use crate::etcd_record::EtcdRecord;
use crate::etcd_session::{EtcdSession, KeyWatch};
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::event::EventType;
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::response_op::Response as Done;
use crate::etcdpb::{
    Compare, KeyValue, LeaseGrantRequest, LeaseRevokeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    TxnResponse,
};
use crate::group_record::{GroupRecord, RecordName};
use crate::url::EtcdUrl;
use crate::{
    ANSWER_TIMEOUT, LEASE_TIME, MemberWatch, NodeLease, Registry, may_take_over, name_conflict, node_record,
    small_runtime,
};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Changes within this time are delivered together.
const ETCD_GATHER_WINDOW: Duration = Duration::from_millis(100);
/// Every this many renewals the key is read and compared.
const VERIFY_EVERY: u32 = 12;

pub(crate) struct EtcdRegistry {
    url: String,
    group: String,
    session: Arc<EtcdSession>,
    runtime: Arc<Runtime>,
}

impl EtcdRegistry {
    pub(crate) fn new(url: &EtcdUrl, group: &str) -> Result<Self> {
        let runtime = small_runtime("etcd")?;
        let inside = runtime.enter();
        let session = EtcdSession::new(url)?;
        drop(inside);
        Ok(EtcdRegistry {
            url: format!("etcd://{url}"),
            group: group.to_owned(),
            session: Arc::new(session),
            runtime: Arc::new(runtime),
        })
    }
}

/// The key prefix of a group's nodes.
fn nodes_prefix(group: &str) -> Vec<u8> {
    format!("/spurline/{group}/nodes/").into_bytes()
}

impl Registry for EtcdRegistry {
    fn description(&self) -> &str {
        &self.url
    }

    fn watch_members(&self) -> Box<dyn MemberWatch> {
        Box::new(EtcdWatch {
            prefix: nodes_prefix(&self.group),
            session: Arc::clone(&self.session),
            runtime: Arc::clone(&self.runtime),
            stream: None,
            known: KnownNodes::default(),
        })
    }

    fn node_lease(&self) -> Option<Box<dyn NodeLease>> {
        Some(Box::new(EtcdLease {
            group: self.group.clone(),
            session: Arc::clone(&self.session),
            runtime: Arc::clone(&self.runtime),
            lease: None,
            written: None,
            renewals: 0,
        }))
    }

    fn group_record(&self, name: RecordName) -> Option<Box<dyn GroupRecord>> {
        let session = Arc::clone(&self.session);
        let runtime = Arc::clone(&self.runtime);
        Some(Box::new(EtcdRecord::new(&self.group, name, session, runtime)))
    }
}

struct EtcdWatch {
    prefix: Vec<u8>,
    session: Arc<EtcdSession>,
    runtime: Arc<Runtime>,
    stream: Option<KeyWatch>,
    known: KnownNodes,
}

/// The nodes of a group, and whether these differ from the last delivery, also across an interrupted watch.
#[derive(Default)]
struct KnownNodes {
    nodes: BTreeMap<Vec<u8>, Arc<Member>>,
    changed: bool,
}

impl KnownNodes {
    fn replace_all(&mut self, nodes: BTreeMap<Vec<u8>, Arc<Member>>) {
        self.changed |= nodes != self.nodes || nodes.is_empty();
        self.nodes = nodes;
    }

    fn set_node(&mut self, key: Vec<u8>, node: Option<Arc<Member>>) {
        match node {
            Some(node) => self.nodes.insert(key, node),
            None => self.nodes.remove(&key),
        };
        self.changed = true;
    }

    fn take_changed(&mut self) -> Option<Vec<Arc<Member>>> {
        std::mem::take(&mut self.changed).then(|| self.nodes.values().cloned().collect())
    }
}

impl EtcdWatch {
    /// Reads all nodes, and watches from that revision on.
    async fn open_watch(&mut self) -> Result<()> {
        let mut end = self.prefix.clone();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let request = RangeRequest { key: self.prefix.clone(), range_end: end.clone(), ..RangeRequest::default() };
        let all = self.session.range(request).await?;
        let revision = all.header.map_or(0, |header| header.revision);
        self.stream = Some(self.session.watch_range(self.prefix.clone(), end, revision + 1).await?);
        let mut known = BTreeMap::new();
        for kv in all.kvs {
            if let Some(member) = self.parse_node(&kv) {
                known.insert(kv.key, member);
            }
        }
        self.known.replace_all(known);
        Ok(())
    }

    fn parse_node(&self, kv: &KeyValue) -> Option<Arc<Member>> {
        match node_record::parse_member(&kv.value) {
            Ok(member) => Some(Arc::new(member)),
            Err(why) => {
                tracing::warn!("etcd's key {} is no valid node ({why}); ignored", String::from_utf8_lossy(&kv.key));
                None
            }
        }
    }

    async fn next_changes(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        if self.stream.is_none() {
            self.open_watch().await?;
        }
        let mut limit = if self.known.changed { Instant::now() } else { until };
        while let Some(stream) = &mut self.stream {
            let wait = limit.saturating_duration_since(Instant::now());
            match tokio::time::timeout(wait, stream.next_events()).await {
                Err(_) => break,
                Ok(Err(error)) => {
                    self.stream = None;
                    return Err(error);
                }
                Ok(Ok(events)) => {
                    for event in events {
                        let kind = event.r#type();
                        let Some(kv) = event.kv else { continue };
                        let member = (kind == EventType::Put).then(|| self.parse_node(&kv)).flatten();
                        if !self.known.changed {
                            limit = limit.min(Instant::now() + ETCD_GATHER_WINDOW);
                        }
                        self.known.set_node(kv.key, member);
                    }
                }
            }
        }
        Ok(self.known.take_changed())
    }
}

impl MemberWatch for EtcdWatch {
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        let runtime = Arc::clone(&self.runtime);
        runtime.block_on(self.next_changes(until))
    }
}

struct EtcdLease {
    group: String,
    session: Arc<EtcdSession>,
    runtime: Arc<Runtime>,
    lease: Option<i64>,
    /// The member in the key at the last read or write.
    written: Option<Member>,
    renewals: u32,
}

impl EtcdLease {
    async fn keep_registered(&mut self, member: &Member) -> Result<Duration> {
        self.renewals += 1;
        if self.renewals.is_multiple_of(VERIFY_EVERY) {
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
                let request = LeaseGrantRequest { ttl: LEASE_TIME.as_secs() as i64, id: 0 };
                let granted = self.session.grant_lease(request).await?;
                *self.lease.insert(granted.id)
            }
        };
        if self.written.as_ref() != Some(member) {
            self.write_key(member, lease).await?;
            self.written = Some(member.clone());
        }
        Ok(LEASE_TIME)
    }

    /// Writes the key if missing, or if the key belongs to this node.
    async fn write_key(&self, member: &Member, lease: i64) -> Result<()> {
        let key = [nodes_prefix(&self.group), member.name.as_bytes().to_vec()].concat();
        let put = |target: CompareTarget, union: TargetUnion| {
            let compare = Compare {
                result: CompareResult::Equal as i32,
                target: target as i32,
                key: key.clone(),
                target_union: Some(union),
            };
            let put = PutRequest {
                key: key.clone(),
                value: node_record::format_member(member).into_bytes(),
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
        // Create a missing key.
        let done = self.session.txn(put(CompareTarget::Version, TargetUnion::Version(0))).await?;
        if done.succeeded {
            return Ok(());
        }
        let Some(held) = first_range(done) else { return Err(changed_concurrently()) };
        // A value that is no node may be overwritten.
        if let Ok(holder) = node_record::parse_member(&held.value) {
            if holder == *member && held.lease == lease {
                return Ok(());
            }
            if !may_take_over(&holder, member) {
                return Err(Error::new(ErrorKind::Invalid, name_conflict(&self.group, &holder, member)));
            }
        }
        let union = TargetUnion::ModRevision(held.mod_revision);
        let done = self.session.txn(put(CompareTarget::Mod, union)).await?;
        if done.succeeded { Ok(()) } else { Err(changed_concurrently()) }
    }
}

fn first_range(done: TxnResponse) -> Option<KeyValue> {
    match done.responses.into_iter().next()?.response? {
        Done::ResponseRange(range) => range.kvs.into_iter().next(),
        _ => None,
    }
}

fn changed_concurrently() -> Error {
    Error::new(ErrorKind::Unavailable, "the key of this node changed during the write; retrying")
}

impl NodeLease for EtcdLease {
    fn renew(&mut self, member: &Member, until: Instant) -> Result<Duration> {
        let runtime = Arc::clone(&self.runtime);
        let limit = until.saturating_duration_since(Instant::now()).min(3 * ANSWER_TIMEOUT);
        runtime.block_on(async { tokio::time::timeout(limit, self.keep_registered(member)).await }).unwrap_or_else(
            |_| {
                let text = format!("etcd gave no answer within {:.0} s", limit.as_secs_f64());
                Err(Error::new(ErrorKind::Unavailable, text))
            },
        )
    }

    fn release(&mut self, until: Instant) {
        let Some(id) = self.lease.take() else { return };
        let limit = until.saturating_duration_since(Instant::now());
        let revoke = self.session.revoke_lease(LeaseRevokeRequest { id });
        // If etcd does not get the request, the lease runs out.
        let _ = self.runtime.block_on(async { tokio::time::timeout(limit, revoke).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_came_before_the_watch_broke_off_is_given_after_it() {
        let node =
            |name: &str| Some(Arc::new(Member { name: name.to_owned(), ..Member::from_address("127.0.0.1:1", 100) }));
        let names = |given: Option<Vec<Arc<Member>>>| {
            given.map(|nodes| nodes.iter().map(|node| node.name.clone()).collect::<Vec<_>>())
        };
        let mut known = KnownNodes::default();
        known.replace_all(BTreeMap::new());
        assert_eq!(names(known.take_changed()), Some(vec![]));
        known.set_node(b"a".to_vec(), node("a"));
        // The watch ends here; the next read returns the same nodes.
        known.replace_all(known.nodes.clone());
        assert_eq!(names(known.take_changed()), Some(vec!["a".to_owned()]));
        known.replace_all(known.nodes.clone());
        assert_eq!(names(known.take_changed()), None);
        known.set_node(b"a".to_vec(), None);
        assert_eq!(names(known.take_changed()), Some(vec![]));
    }
}
