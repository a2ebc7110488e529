//! What a group goes by as one key of etcd, `/spurline/GROUP/rules`, changed by transactions that ask for what was read.

use crate::ANSWER;
use crate::book::{self, Book, Merge, digest};
use crate::etcd_session::Session;
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::{Compare, PutRequest, RangeRequest, RequestOp, TxnRequest};
use parking_lot::Mutex;
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Others may be faster so many times.
const TRIES: usize = 8;

pub(crate) struct OfEtcd {
    pub group: String,
    pub merge: Merge,
    pub session: Arc<Session>,
    pub runtime: Arc<Runtime>,
    /// What was found last: etcd's revision of the key, and a digest.
    pub seen: Mutex<Option<(i64, String)>>,
}

impl OfEtcd {
    /// Whether the key is what it was when `known` was found in it; its text, which all nodes would ask for all the time, is
    /// not asked for.
    async fn is_as_seen(&self, key: &[u8], known: &Value) -> Result<bool> {
        let Some((at, seen)) = self.seen.lock().clone() else { return Ok(false) };
        if seen != digest(known) {
            return Ok(false);
        }
        let request = RangeRequest { key: key.to_vec(), keys_only: true, ..RangeRequest::default() };
        let found = self.session.range(request).await?.kvs;
        Ok(found.first().map_or(0, |kv| kv.mod_revision) == at)
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
                *self.seen.lock() = Some((at, digest(&kept)));
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
