//! A group's rules in one key of etcd, `/spurline/GROUP/rules`, changed by compare-and-swap.

use crate::ANSWER_TIMEOUT;
use crate::etcd_session::{EtcdSession, KeyWatch};
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::{Compare, PutRequest, RangeRequest, RequestOp, TxnRequest};
use crate::rule_store::{self, MergeRules, RuleStore, rules_digest};
use parking_lot::Mutex;
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Retries after concurrent changes.
const TRIES: usize = 8;

pub(crate) struct EtcdRuleStore {
    pub group: String,
    pub merge: MergeRules,
    pub session: Arc<EtcdSession>,
    pub runtime: Arc<Runtime>,
    pub seen: Mutex<Option<SeenKey>>,
}

/// The version read last.
pub(crate) struct SeenKey {
    /// The key's revision in etcd.
    at: i64,
    digest: String,
    /// A watch of the key, opened after a second unchanged read.
    changes: Option<KeyWatch>,
}

impl EtcdRuleStore {
    /// Whether the key still holds `known`. The first time this reads the key's revision; after that a watch reports
    /// changes, so that idle nodes send no requests.
    async fn is_unchanged(&self, key: &[u8], known: &Value) -> Result<bool> {
        let seen = self.seen.lock().take();
        let Some(mut seen) = seen.filter(|seen| seen.digest == rules_digest(known)) else { return Ok(false) };
        if let Some(changes) = &mut seen.changes {
            // Only what has arrived by now; an ended watch reports nothing more.
            while let Ok(came) = tokio::time::timeout(Duration::ZERO, changes.next_events()).await {
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
            seen.changes = self.session.watch_range(key.to_vec(), [key, &[0]].concat(), next).await.ok();
        }
        *self.seen.lock() = Some(seen);
        Ok(true)
    }

    async fn exchange_once(&self, given: &Value) -> Result<Value> {
        let key = format!("/spurline/{}/rules", self.group).into_bytes();
        if self.is_unchanged(&key, given).await? {
            return Ok(given.clone());
        }
        for _ in 0..TRIES {
            let request = RangeRequest { key: key.clone(), ..RangeRequest::default() };
            let found = self.session.range(request).await?.kvs.into_iter().next();
            let (kept, at) = match &found {
                // A value that is no JSON may be overwritten.
                Some(kv) => (serde_json::from_slice(&kv.value).unwrap_or_default(), kv.mod_revision),
                None => (Value::Null, 0),
            };
            let merged = (self.merge)(&kept, given)?;
            if merged == kept {
                *self.seen.lock() = Some(SeenKey { at, digest: rules_digest(&kept), changes: None });
                return Ok(kept);
            }
            let compare = Compare {
                result: CompareResult::Equal as i32,
                target: CompareTarget::Mod as i32,
                key: key.clone(),
                // 0 when the key does not exist.
                target_union: Some(TargetUnion::ModRevision(at)),
            };
            let put = PutRequest {
                key: key.clone(),
                value: rule_store::format_rules(&merged).into_bytes(),
                ..PutRequest::default()
            };
            let put = RequestOp { request: Some(Op::RequestPut(put)) };
            let txn = TxnRequest { compare: vec![compare], success: vec![put], failure: Vec::new() };
            if self.session.txn(txn).await?.succeeded {
                return Ok(merged);
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "etcd: concurrent changes of the group's rules; try again"))
    }
}

impl RuleStore for EtcdRuleStore {
    fn exchange_rules(&self, given: &Value) -> Result<Value> {
        let limit = 3 * ANSWER_TIMEOUT;
        self.runtime.block_on(async { tokio::time::timeout(limit, self.exchange_once(given)).await }).unwrap_or_else(
            |_| {
                let text = format!("etcd gave no answer within {} s", limit.as_secs());
                Err(Error::new(ErrorKind::Unavailable, text))
            },
        )
    }
}
