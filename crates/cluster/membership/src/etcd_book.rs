//! What a group goes by as one key of etcd, `/spurline/GROUP/rules`, changed by transactions that ask for what was read.

use crate::ANSWER;
use crate::book::{self, Book, Merge, digest};
use crate::etcd_session::{Session, Stream};
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::{Compare, PutRequest, RangeRequest, RequestOp, TxnRequest};
use parking_lot::Mutex;
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Others may be faster so many times.
const TRIES: usize = 8;

pub(crate) struct OfEtcd {
    pub group: String,
    pub merge: Merge,
    pub session: Arc<Session>,
    pub runtime: Arc<Runtime>,
    pub seen: Mutex<Option<Seen>>,
}

/// What was found last.
pub(crate) struct Seen {
    /// etcd's revision of the key.
    at: i64,
    digest: String,
    /// Its changes since then, once nothing else was found twice.
    changes: Option<Stream>,
}

impl OfEtcd {
    /// Whether the key is what it was when `known` was found in it. The second time that is asked for, and a watch tells from
    /// then on: the nodes of a group would ask all the time.
    async fn is_as_seen(&self, key: &[u8], known: &Value) -> Result<bool> {
        let seen = self.seen.lock().take();
        let Some(mut seen) = seen.filter(|seen| seen.digest == digest(known)) else { return Ok(false) };
        if let Some(changes) = &mut seen.changes {
            // What has come by now; a watch that ended tells nothing any more.
            while let Ok(came) = tokio::time::timeout(Duration::ZERO, changes.next()).await {
                if !came.is_ok_and(|events| events.is_empty()) {
                    return Ok(false);
                }
            }
        } else {
            let request = RangeRequest { key: key.to_vec(), keys_only: true, ..RangeRequest::default() };
            let found = self.session.range(request).await?;
            if found.kvs.first().map_or(0, |kv| kv.mod_revision) != seen.at {
                return Ok(false);
            }
            let next = found.header.map_or(0, |header| header.revision) + 1;
            seen.changes = self.session.watch(key.to_vec(), [key, &[0]].concat(), next).await.ok();
        }
        *self.seen.lock() = Some(seen);
        Ok(true)
    }

    async fn try_to(&self, given: &Value) -> Result<Value> {
        let key = format!("/spurline/{}/rules", self.group).into_bytes();
        if self.is_as_seen(&key, given).await? {
            return Ok(given.clone());
        }
        for _ in 0..TRIES {
            let request = RangeRequest { key: key.clone(), ..RangeRequest::default() };
            let found = self.session.range(request).await?.kvs.into_iter().next();
            let (kept, at) = match &found {
                // What is no JSON is in nobody's way.
                Some(kv) => (serde_json::from_slice(&kv.value).unwrap_or_default(), kv.mod_revision),
                None => (Value::Null, 0),
            };
            let merged = (self.merge)(&kept, given)?;
            if merged == kept {
                *self.seen.lock() = Some(Seen { at, digest: digest(&kept), changes: None });
                return Ok(kept);
            }
            let compare = Compare {
                result: CompareResult::Equal as i32,
                target: CompareTarget::Mod as i32,
                key: key.clone(),
                // 0 where there is no such key.
                target_union: Some(TargetUnion::ModRevision(at)),
            };
            let put =
                PutRequest { key: key.clone(), value: book::write(&merged).into_bytes(), ..PutRequest::default() };
            let put = RequestOp { request: Some(Op::RequestPut(put)) };
            let txn = TxnRequest { compare: vec![compare], success: vec![put], failure: Vec::new() };
            if self.session.txn(txn).await?.succeeded {
                return Ok(merged);
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "etcd: others change the rules of the group all the time; try again"))
    }
}

impl Book for OfEtcd {
    fn exchange(&self, given: &Value) -> Result<Value> {
        let limit = 3 * ANSWER;
        self.runtime.block_on(async { tokio::time::timeout(limit, self.try_to(given)).await }).unwrap_or_else(|_| {
            let text = format!("etcd gave no answer within {} s", limit.as_secs());
            Err(Error::new(ErrorKind::Unavailable, text))
        })
    }
}
