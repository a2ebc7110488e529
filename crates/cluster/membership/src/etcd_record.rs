//! A record of a group in a key of etcd, `/spurline/GROUP/rules` or `/spurline/GROUP/stage`, replaced in a transaction at the key's revision.

use crate::ANSWER_TIMEOUT;
use crate::etcd_session::{EtcdSession, KeyWatch};
use crate::etcdpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::etcdpb::request_op::Request as Op;
use crate::etcdpb::{Compare, PutRequest, RangeRequest, RequestOp, TxnRequest};
use crate::group_record::{GroupRecord, RecordName, StoredRecord};
use parking_lot::Mutex;
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

pub(crate) struct EtcdRecord {
    key: Vec<u8>,
    session: Arc<EtcdSession>,
    runtime: Arc<Runtime>,
    seen: Mutex<Option<SeenKey>>,
}

/// The key as read last.
struct SeenKey {
    /// The key's revision in etcd; 0 without a key.
    version: u64,
    /// Opened after a second unchanged read.
    watch: Option<KeyWatch>,
}

impl EtcdRecord {
    pub(crate) fn new(group: &str, name: RecordName, session: Arc<EtcdSession>, runtime: Arc<Runtime>) -> Self {
        let key = format!("/spurline/{group}/{}", name.as_str()).into_bytes();
        EtcdRecord { key, session, runtime, seen: Mutex::default() }
    }

    /// Whether the key still has this revision. The first time this reads the revision; after that a watch reports
    /// changes, so that idle nodes send no requests.
    async fn is_unchanged(&self, known: u64) -> Result<bool> {
        let seen = self.seen.lock().take();
        let Some(mut seen) = seen.filter(|seen| seen.version == known) else { return Ok(false) };
        if let Some(watch) = &mut seen.watch {
            // Only what has arrived by now; an ended watch reports nothing more.
            while let Ok(came) = tokio::time::timeout(Duration::ZERO, watch.next_events()).await {
                if !came.is_ok_and(|events| events.is_empty()) {
                    return Ok(false);
                }
            }
        } else {
            let request = RangeRequest { key: self.key.clone(), keys_only: true, ..RangeRequest::default() };
            let found = self.session.range(request).await?;
            if found.kvs.first().map_or(0, |kv| kv.mod_revision as u64) != seen.version {
                return Ok(false);
            }
            let next = found.header.map_or(0, |header| header.revision) + 1;
            seen.watch = self.session.watch_range(self.key.clone(), [&self.key[..], &[0]].concat(), next).await.ok();
        }
        *self.seen.lock() = Some(seen);
        Ok(true)
    }

    async fn read_key(&self, known: Option<u64>) -> Result<Option<StoredRecord>> {
        if let Some(known) = known
            && self.is_unchanged(known).await?
        {
            return Ok(None);
        }
        let request = RangeRequest { key: self.key.clone(), ..RangeRequest::default() };
        let found = self.session.range(request).await?.kvs.into_iter().next();
        let (version, value) = match &found {
            // A value that is no JSON may be overwritten.
            Some(kv) => (kv.mod_revision as u64, serde_json::from_slice(&kv.value).unwrap_or_default()),
            None => (0, Value::Null),
        };
        *self.seen.lock() = Some(SeenKey { version, watch: None });
        Ok((known != Some(version)).then_some(StoredRecord { version, value }))
    }

    async fn replace_key(&self, version: u64, value: &Value) -> Result<bool> {
        let compare = Compare {
            result: CompareResult::Equal as i32,
            target: CompareTarget::Mod as i32,
            key: self.key.clone(),
            target_union: Some(TargetUnion::ModRevision(version as i64)),
        };
        let value = value.to_string().into_bytes();
        let put = PutRequest { key: self.key.clone(), value, ..PutRequest::default() };
        let put = RequestOp { request: Some(Op::RequestPut(put)) };
        let txn = TxnRequest { compare: vec![compare], success: vec![put], failure: Vec::new() };
        Ok(self.session.txn(txn).await?.succeeded)
    }

    fn run_limited<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = 3 * ANSWER_TIMEOUT;
        self.runtime.block_on(async { tokio::time::timeout(limit, work).await }).unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unavailable, format!("etcd gave no answer within {} s", limit.as_secs())))
        })
    }
}

impl GroupRecord for EtcdRecord {
    fn read(&self, known: Option<u64>) -> Result<Option<StoredRecord>> {
        self.run_limited(self.read_key(known))
    }

    fn replace(&self, version: u64, value: &Value) -> Result<bool> {
        self.run_limited(self.replace_key(version, value))
    }
}
