//! What a group goes by as one key of etcd, `/spurline/GROUP/rules`, changed by transactions that ask for what was read.

use crate::ANSWER;
use crate::book::{self, Book, revision};
use crate::etcd_session::Session;
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::{Compare, PutRequest, RangeRequest, RequestOp, TxnRequest};
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Others may be faster so many times.
const TRIES: usize = 8;

pub(crate) struct OfEtcd {
    pub group: String,
    pub session: Arc<Session>,
    pub runtime: Arc<Runtime>,
}

impl OfEtcd {
    async fn try_to(&self, given: &Value) -> Result<Value> {
        let key = format!("/spurline/{}/rules", self.group).into_bytes();
        for _ in 0..TRIES {
            let request = RangeRequest { key: key.clone(), ..RangeRequest::default() };
            let found = self.session.range(request).await?.kvs.into_iter().next();
            let (kept, seen) = match &found {
                // What is no JSON is in nobody's way.
                Some(kv) => (serde_json::from_slice(&kv.value).unwrap_or_default(), kv.mod_revision),
                None => (Value::Null, 0),
            };
            if revision(given) <= revision(&kept) {
                return Ok(kept);
            }
            let compare = Compare {
                result: CompareResult::Equal as i32,
                target: CompareTarget::Mod as i32,
                key: key.clone(),
                // 0 where there is no such key.
                target_union: Some(TargetUnion::ModRevision(seen)),
            };
            let put = PutRequest { key: key.clone(), value: book::write(given).into_bytes(), lease: 0 };
            let put = RequestOp { request: Some(Op::RequestPut(put)) };
            let txn = TxnRequest { compare: vec![compare], success: vec![put], failure: Vec::new() };
            if self.session.txn(txn).await?.succeeded {
                return Ok(given.clone());
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
