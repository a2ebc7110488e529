//! A small JSON record of each group, kept by the registry and replaced by compare-and-swap. The contents are opaque here.

use crate::coordinator_client::CoordinatorHandle;
use crate::pb::records_client::RecordsClient;
use crate::pb::records_server;
use crate::{ANSWER_TIMEOUT, TableLimits, pb, state_file};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// Most bytes of a record.
pub(crate) const RECORD_MAX: usize = 256 << 10;

/// The record of a group.
pub trait GroupRecord: Send + Sync {
    /// Reads the record; `None` when the version is still `known`. An unchanged record costs little or no traffic.
    ///
    /// # Errors
    /// When the registry can't be reached or refuses, with what was tried.
    fn read(&self, known: Option<u64>) -> Result<Option<StoredRecord>>;

    /// Replaces a record of this version; returns whether that was so.
    ///
    /// # Errors
    /// As [`GroupRecord::read`]; after an error the record may have been replaced.
    fn replace(&self, version: u64, value: &Value) -> Result<bool>;
}

/// A record as read.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRecord {
    /// Identifies the contents; 0 when there is no record.
    pub version: u64,
    /// The contents; `Null` when there is no record.
    pub value: Value,
}

/// The version of a record on a coordinator: XXH3-64 of the text, so that the version outlives restarts.
pub(crate) fn text_version(value: &Value) -> u64 {
    if value.is_null() { 0 } else { xxhash_rust::xxh3::xxh3_64(value.to_string().as_bytes()).max(1) }
}

/// A coordinator's records of all groups, with an optional state file.
pub(crate) struct RecordTable {
    records: Mutex<BTreeMap<String, Value>>,
    /// Read with every announcement, and never locked while a file is written.
    versions: RwLock<BTreeMap<String, u64>>,
    file: Option<PathBuf>,
}

impl RecordTable {
    /// # Errors
    /// When the file exists and can't be read.
    pub(crate) fn open(file: Option<PathBuf>) -> Result<Self> {
        let records = file.as_deref().map(|file| state_file::read_file(file, parse_records)).transpose()?.flatten();
        let records = records.unwrap_or_default();
        let versions = records.iter().map(|(group, value)| (group.clone(), text_version(value))).collect();
        Ok(RecordTable { records: Mutex::new(records), versions: RwLock::new(versions), file })
    }

    /// The version of a group's record.
    pub(crate) fn version_of(&self, group: &str) -> u64 {
        self.versions.read().get(group).copied().unwrap_or(0)
    }

    pub(crate) fn record_of(&self, group: &str) -> StoredRecord {
        let value = self.records.lock().get(group).cloned().unwrap_or_default();
        StoredRecord { version: text_version(&value), value }
    }

    /// # Errors
    /// `Invalid` for an invalid group, `Unavailable` when the record can't be stored.
    pub(crate) fn replace_record(&self, group: &str, version: u64, value: Value) -> Result<bool> {
        let mut records = self.records.lock();
        let before = records.get(group).cloned();
        if before.as_ref().map_or(0, text_version) != version {
            return Ok(false);
        }
        let limits = TableLimits::default();
        if group.is_empty() || group.len() > limits.word || before.is_none() && records.len() >= limits.groups {
            let what = format!("a group with a name of {} bytes, beside {} others", group.len(), records.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let new_version = text_version(&value);
        records.insert(group.to_owned(), value);
        if let Err(error) = self.save_file(&records) {
            match before {
                Some(before) => records.insert(group.to_owned(), before),
                None => records.remove(group),
            };
            return Err(error);
        }
        self.versions.write().insert(group.to_owned(), new_version);
        Ok(true)
    }

    fn save_file(&self, records: &BTreeMap<String, Value>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let text = serde_json::to_vec_pretty(records).unwrap_or_default();
        spurline_sys::replace_file(file, &text, 0o600).map_err(|e| {
            let what = format!("the coordinator can't write {}: {e}", file.display());
            Error::new(ErrorKind::Unavailable, what)
        })
    }
}

fn parse_records(text: &[u8]) -> std::result::Result<BTreeMap<String, Value>, String> {
    serde_json::from_slice::<BTreeMap<String, Value>>(text).map_err(|e| e.to_string())
}

pub(crate) struct RecordsService(pub Arc<RecordTable>);

#[tonic::async_trait]
impl records_server::Records for RecordsService {
    async fn read(&self, request: Request<pb::ReadRecordRequest>) -> Result<Response<pb::ReadRecordReply>, Status> {
        let StoredRecord { version, value } = self.0.record_of(&request.into_inner().group);
        let json = if value.is_null() { String::new() } else { value.to_string() };
        Ok(Response::new(pb::ReadRecordReply { version, json }))
    }

    async fn replace(
        &self,
        request: Request<pb::ReplaceRecordRequest>,
    ) -> Result<Response<pb::ReplaceRecordReply>, Status> {
        let pb::ReplaceRecordRequest { group, version, json } = request.into_inner();
        if json.len() > RECORD_MAX {
            return Err(Status::invalid_argument(format!("a record of {} bytes, at most {RECORD_MAX}", json.len())));
        }
        let value = serde_json::from_str(&json).map_err(|e| Status::invalid_argument(format!("invalid JSON: {e}")))?;
        let table = Arc::clone(&self.0);
        // The change may wait for a disk.
        let result = tokio::task::spawn_blocking(move || table.replace_record(&group, version, value)).await;
        match result.map_err(|e| Status::internal(e.to_string()))? {
            Ok(replaced) => Ok(Response::new(pb::ReplaceRecordReply { replaced })),
            Err(error) if error.kind() == ErrorKind::Invalid => Err(Status::invalid_argument(error.message())),
            Err(error) => Err(Status::unavailable(error.message())),
        }
    }
}

/// The record of a group on a coordinator.
pub(crate) struct CoordinatorRecord(pub Arc<CoordinatorHandle>);

impl GroupRecord for CoordinatorRecord {
    fn read(&self, known: Option<u64>) -> Result<Option<StoredRecord>> {
        let at = &self.0;
        // The answer to each announcement carries the version.
        if known.is_some_and(|known| at.has_record(known)) {
            return Ok(None);
        }
        let mut client = RecordsClient::new(at.channel.clone());
        let reply = at.call(ANSWER_TIMEOUT, client.read(pb::ReadRecordRequest { group: at.group.clone() }))?;
        let value = match reply.json.as_str() {
            "" => Value::Null,
            json => serde_json::from_str(json).map_err(|e| {
                Error::new(ErrorKind::Protocol, format!("the coordinator's record of the group is no JSON: {e}"))
            })?,
        };
        at.note_record(reply.version);
        Ok((known != Some(reply.version)).then_some(StoredRecord { version: reply.version, value }))
    }

    fn replace(&self, version: u64, value: &Value) -> Result<bool> {
        let at = &self.0;
        let mut client = RecordsClient::new(at.channel.clone());
        let request = pb::ReplaceRecordRequest { group: at.group.clone(), version, json: value.to_string() };
        let replaced = at.call(ANSWER_TIMEOUT, client.replace(request))?.replaced;
        if replaced {
            at.note_record(text_version(value));
        }
        Ok(replaced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_record_is_replaced_at_its_version_only_and_outlives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nodes.rules");
        let table = RecordTable::open(Some(file.clone())).unwrap();
        assert_eq!(table.record_of("g"), StoredRecord { version: 0, value: Value::Null });
        assert!(table.replace_record("g", 0, json!({"revision": 1})).unwrap());
        let first = table.version_of("g");
        assert!(first != 0 && first == table.record_of("g").version);
        assert!(!table.replace_record("g", 0, json!({"revision": 9})).unwrap(), "another writer was first");
        assert!(table.replace_record("g", first, json!({"revision": 2})).unwrap());
        assert!(table.replace_record(&"g".repeat(10_000), 0, json!(1)).is_err());
        drop(table);
        let table = RecordTable::open(Some(file.clone())).unwrap();
        let second = StoredRecord { version: text_version(&json!({"revision": 2})), value: json!({"revision": 2}) };
        assert_eq!((table.record_of("g"), table.version_of("g")), (second.clone(), second.version));
        drop(table);
        std::fs::write(&file, "{").unwrap();
        let table = RecordTable::open(Some(file)).unwrap();
        assert_eq!(table.version_of("g"), 0);
        assert!(table.replace_record("g", 0, second.value).unwrap());
        assert_eq!(std::fs::read(dir.path().join("nodes.rules.spoilt")).unwrap(), b"{");
    }

    #[test]
    fn a_record_that_can_not_be_written_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let table = RecordTable::open(Some(dir.path().join("gone/nodes.rules"))).unwrap();
        let error = table.replace_record("g", 0, json!({"revision": 1})).unwrap_err();
        assert!(error.message().contains("gone/nodes.rules"), "{error}");
        assert_eq!((table.version_of("g"), table.record_of("g").value), (0, Value::Null));
    }
}
