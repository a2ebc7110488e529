//! Small JSON records of each group, kept by the registry and replaced by compare-and-swap. The contents are opaque here.

use crate::coordinator_client::CoordinatorHandle;
use crate::pb::records_client::RecordsClient;
use crate::pb::records_server;
use crate::{ANSWER_TIMEOUT, TableLimits, pb, state_file};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tonic::{Request, Response, Status};

/// Most bytes of a record.
pub(crate) const RECORD_MAX: usize = 256 << 10;

/// Which record of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordName {
    /// The folder rules.
    Rules,
    /// The state of staged writes.
    Stage,
}

impl RecordName {
    const ALL: [RecordName; 2] = [RecordName::Rules, RecordName::Stage];

    /// The last part of the key in etcd.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            RecordName::Rules => "rules",
            RecordName::Stage => "stage",
        }
    }

    /// The name in a request to a coordinator. Older releases know only the rules, and send no name.
    const fn on_wire(self) -> &'static str {
        match self {
            RecordName::Rules => "",
            RecordName::Stage => self.as_str(),
        }
    }

    fn from_wire(name: &str) -> Result<Self, Status> {
        RecordName::ALL.into_iter().find(|known| known.on_wire() == name).ok_or_else(|| {
            Status::invalid_argument(format!("a record '{name}' is unknown: the coordinator's release is older"))
        })
    }

    /// The key in a coordinator's table. No name of a group has a slash.
    fn table_key(self, group: &str) -> String {
        match self {
            RecordName::Rules => group.to_owned(),
            RecordName::Stage => format!("{group}/{}", self.as_str()),
        }
    }
}

/// A record of a group.
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

/// A coordinator's records of all groups, by [`RecordName::table_key`], with an optional state file.
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
        let versions = records.iter().map(|(key, value)| (key.clone(), text_version(value))).collect();
        Ok(RecordTable { records: Mutex::new(records), versions: RwLock::new(versions), file })
    }

    /// The version of a group's rules.
    pub(crate) fn rules_version(&self, group: &str) -> u64 {
        self.versions.read().get(group).copied().unwrap_or(0)
    }

    pub(crate) fn record_of(&self, group: &str, name: RecordName) -> StoredRecord {
        let value = self.records.lock().get(&name.table_key(group)).cloned().unwrap_or_default();
        StoredRecord { version: text_version(&value), value }
    }

    /// # Errors
    /// `Invalid` for an invalid group, `Unavailable` when the record can't be stored.
    pub(crate) fn replace_record(&self, group: &str, name: RecordName, version: u64, value: Value) -> Result<bool> {
        let key = name.table_key(group);
        let mut records = self.records.lock();
        let before = records.get(&key).cloned();
        if before.as_ref().map_or(0, text_version) != version {
            return Ok(false);
        }
        check_group(&records, group)?;
        let new_version = text_version(&value);
        records.insert(key.clone(), value);
        if let Err(error) = self.save_file(&records) {
            match before {
                Some(before) => records.insert(key, before),
                None => records.remove(&key),
            };
            return Err(error);
        }
        self.versions.write().insert(key, new_version);
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

/// Checks that a record of the group may be stored beside the others.
///
/// # Errors
/// `Invalid` for an invalid name, or beyond the number of groups.
fn check_group(records: &BTreeMap<String, Value>, group: &str) -> Result<()> {
    let limits = TableLimits::default();
    let mut others: BTreeSet<&str> = records.keys().map(|key| key.split('/').next().unwrap_or(key)).collect();
    others.remove(group);
    if group.is_empty() || group.len() > limits.word || group.contains('/') || others.len() >= limits.groups {
        let what = format!("a group '{}', beside {} others", group.escape_debug(), others.len());
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

fn parse_records(text: &[u8]) -> std::result::Result<BTreeMap<String, Value>, String> {
    serde_json::from_slice::<BTreeMap<String, Value>>(text).map_err(|e| e.to_string())
}

pub(crate) struct RecordsService(pub Arc<RecordTable>);

#[tonic::async_trait]
impl records_server::Records for RecordsService {
    async fn read(&self, request: Request<pb::ReadRecordRequest>) -> Result<Response<pb::ReadRecordReply>, Status> {
        let pb::ReadRecordRequest { group, name } = request.into_inner();
        let StoredRecord { version, value } = self.0.record_of(&group, RecordName::from_wire(&name)?);
        let json = if value.is_null() { String::new() } else { value.to_string() };
        Ok(Response::new(pb::ReadRecordReply { version, json, name }))
    }

    async fn replace(
        &self,
        request: Request<pb::ReplaceRecordRequest>,
    ) -> Result<Response<pb::ReplaceRecordReply>, Status> {
        let pb::ReplaceRecordRequest { group, version, json, name } = request.into_inner();
        let record = RecordName::from_wire(&name)?;
        if json.len() > RECORD_MAX {
            return Err(Status::invalid_argument(format!("a record of {} bytes, at most {RECORD_MAX}", json.len())));
        }
        let value = serde_json::from_str(&json).map_err(|e| Status::invalid_argument(format!("invalid JSON: {e}")))?;
        let table = Arc::clone(&self.0);
        // The change may wait for a disk.
        let result = tokio::task::spawn_blocking(move || table.replace_record(&group, record, version, value)).await;
        match result.map_err(|e| Status::internal(e.to_string()))? {
            Ok(replaced) => Ok(Response::new(pb::ReplaceRecordReply { replaced, name })),
            Err(error) if error.kind() == ErrorKind::Invalid => Err(Status::invalid_argument(error.message())),
            Err(error) => Err(Status::unavailable(error.message())),
        }
    }
}

/// A record of a group on a coordinator.
pub(crate) struct CoordinatorRecord {
    coordinator: Arc<CoordinatorHandle>,
    name: RecordName,
    /// The coordinator has shown that it knows the name, and has answered every request since then.
    is_known: AtomicBool,
}

impl CoordinatorRecord {
    pub(crate) fn new(coordinator: Arc<CoordinatorHandle>, name: RecordName) -> Self {
        // Every release knows the rules.
        let is_known = AtomicBool::new(name == RecordName::Rules);
        CoordinatorRecord { coordinator, name, is_known }
    }

    /// Waits for the answer to a request. After an error another process may be the coordinator, of an older release.
    fn call<T>(&self, request: impl Future<Output = Result<Response<T>, Status>>) -> Result<T> {
        self.coordinator.call(ANSWER_TIMEOUT, request).inspect_err(|_| self.note_known(false))
    }

    fn note_known(&self, is_known: bool) {
        self.is_known.store(is_known || self.name == RecordName::Rules, Ordering::Release);
    }

    /// Checks that a reply is about this record: an older coordinator ignores the name, and answers for the rules.
    fn check_name(&self, replied: &str) -> Result<()> {
        let is_known = replied == self.name.on_wire();
        self.note_known(is_known);
        if is_known || self.name == RecordName::Rules {
            return Ok(());
        }
        let what = format!(
            "{}: the coordinator's release is older than this one and stores no record '{}'; upgrade spurline on its host",
            self.coordinator.address,
            self.name.as_str()
        );
        Err(Error::new(ErrorKind::Unsupported, what))
    }

    fn request_record(&self) -> Result<pb::ReadRecordReply> {
        let at = &self.coordinator;
        let mut client = RecordsClient::new(at.channel.clone());
        let request = pb::ReadRecordRequest { group: at.group.clone(), name: self.name.on_wire().to_owned() };
        let reply = self.call(client.read(request))?;
        self.check_name(&reply.name)?;
        Ok(reply)
    }

    /// Notes the version of the rules; announcements carry no version of other records.
    fn note_version(&self, version: u64) {
        if self.name == RecordName::Rules {
            self.coordinator.note_rules(version);
        }
    }
}

impl GroupRecord for CoordinatorRecord {
    fn read(&self, known: Option<u64>) -> Result<Option<StoredRecord>> {
        // The answer to each announcement carries the version of the rules.
        if self.name == RecordName::Rules && known.is_some_and(|known| self.coordinator.has_rules(known)) {
            return Ok(None);
        }
        let reply = self.request_record()?;
        let value = match reply.json.as_str() {
            "" => Value::Null,
            json => serde_json::from_str(json).map_err(|e| {
                Error::new(ErrorKind::Protocol, format!("the coordinator's record of the group is no JSON: {e}"))
            })?,
        };
        self.note_version(reply.version);
        Ok((known != Some(reply.version)).then_some(StoredRecord { version: reply.version, value }))
    }

    fn replace(&self, version: u64, value: &Value) -> Result<bool> {
        // An older coordinator would replace the rules instead.
        if !self.is_known.load(Ordering::Acquire) {
            self.request_record()?;
        }
        let at = &self.coordinator;
        let mut client = RecordsClient::new(at.channel.clone());
        let name = self.name.on_wire().to_owned();
        let request = pb::ReplaceRecordRequest { group: at.group.clone(), version, json: value.to_string(), name };
        let reply = self.call(client.replace(request))?;
        self.check_name(&reply.name)?;
        if reply.replaced {
            self.note_version(text_version(value));
        }
        Ok(reply.replaced)
    }
}

#[cfg(test)]
mod tests {
    use super::RecordName::{Rules, Stage};
    use super::*;
    use serde_json::json;

    #[test]
    fn a_record_is_replaced_at_its_version_only_and_outlives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nodes.rules");
        let table = RecordTable::open(Some(file.clone())).unwrap();
        assert_eq!(table.record_of("g", Rules), StoredRecord { version: 0, value: Value::Null });
        assert!(table.replace_record("g", Rules, 0, json!({"revision": 1})).unwrap());
        let first = table.rules_version("g");
        assert!(first != 0 && first == table.record_of("g", Rules).version);
        assert!(!table.replace_record("g", Rules, 0, json!({"revision": 9})).unwrap(), "another writer was first");
        assert!(table.replace_record("g", Rules, first, json!({"revision": 2})).unwrap());
        assert!(table.replace_record(&"g".repeat(10_000), Rules, 0, json!(1)).is_err());
        drop(table);
        let table = RecordTable::open(Some(file.clone())).unwrap();
        let second = StoredRecord { version: text_version(&json!({"revision": 2})), value: json!({"revision": 2}) };
        assert_eq!((table.record_of("g", Rules), table.rules_version("g")), (second.clone(), second.version));
        drop(table);
        std::fs::write(&file, "{").unwrap();
        let table = RecordTable::open(Some(file)).unwrap();
        assert_eq!(table.rules_version("g"), 0);
        assert!(table.replace_record("g", Rules, 0, second.value).unwrap());
        assert_eq!(std::fs::read(dir.path().join("nodes.rules.spoilt")).unwrap(), b"{");
    }

    #[test]
    fn the_records_of_a_group_have_versions_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nodes.rules");
        let table = RecordTable::open(Some(file.clone())).unwrap();
        assert!(table.replace_record("g", Stage, 0, json!({"term": 1})).unwrap());
        assert_eq!((table.record_of("g", Rules).version, table.rules_version("g")), (0, 0));
        assert!(table.replace_record("g", Rules, 0, json!({"revision": 1})).unwrap());
        let stage = table.record_of("g", Stage);
        assert!(!table.replace_record("g", Stage, table.rules_version("g"), json!({"term": 9})).unwrap());
        assert!(table.replace_record("g", Stage, stage.version, json!({"term": 2})).unwrap());
        assert!(table.replace_record("g/stage", Rules, table.record_of("g", Stage).version, json!(1)).is_err());
        drop(table);
        let kept: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(kept, json!({"g": {"revision": 1}, "g/stage": {"term": 2}}));
        let table = RecordTable::open(Some(file)).unwrap();
        assert_eq!(table.record_of("g", Stage).value, json!({"term": 2}));
        assert_eq!(table.record_of("g", Rules).value, json!({"revision": 1}));
        // A group with both records counts once.
        let most = TableLimits::default().groups;
        let table = RecordTable::open(None).unwrap();
        for number in 0..most {
            for name in RecordName::ALL {
                assert!(table.replace_record(&format!("g-{number}"), name, 0, json!(number)).unwrap());
            }
        }
        for name in RecordName::ALL {
            let error = table.replace_record("another", name, 0, json!(1)).unwrap_err();
            assert!(error.message().contains("beside 1024 others"), "{error}");
        }
    }

    #[test]
    fn a_record_that_can_not_be_written_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let table = RecordTable::open(Some(dir.path().join("gone/nodes.rules"))).unwrap();
        let error = table.replace_record("g", Rules, 0, json!({"revision": 1})).unwrap_err();
        assert!(error.message().contains("gone/nodes.rules"), "{error}");
        assert_eq!((table.rules_version("g"), table.record_of("g", Rules).value), (0, Value::Null));
    }
}
