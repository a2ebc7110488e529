//! The record of the rename of a folder, an object that listings hide: what is renamed, and how far it is. It knows how the
//! record is stored, and not how objects are copied.
//!
//! | phase | what is true | what happens next |
//! |---|---|---|
//! | `Copying` | every object has its old name | each is copied to its new name |
//! | `Copied` | every object of the record has both names | each loses its old name, then the record is removed |
//! | `Undoing` | every object has its old name | copies are removed, then the record |
//!
//! Copies may be made by several mounts at once: a copy that exists has the mark of the rename. An object is removed only in a
//! phase that permits it, and the phase changes under the condition that no other mount has changed the record.

use crate::requests::{BucketRequests, NewObject};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use spurline_object_store::{ObjectAttributes, WriteCondition, marked_as};
use spurline_types::{Error, ErrorKind, Result};

/// The start of the names of records, in the root of the source.
const RECORD_NAME: &str = ".spurline-rename-";
/// The form of records.
const RECORD_VERSION: u32 = 1;

/// How far a rename is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RenamePhase {
    Copying,
    Copied,
    Undoing,
}

/// An object that is renamed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RenamedObject {
    /// Its name below the folder; that of a marker ends with a slash, and the folder's own is empty.
    pub name: String,
    /// The version that is renamed.
    pub etag: Option<String>,
    pub size: u64,
}

impl RenamedObject {
    /// Whether it is the marker of a folder.
    pub fn is_marker(&self) -> bool {
        self.name.is_empty() || self.name.ends_with('/')
    }
}

/// The content of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RecordContent {
    version: u32,
    phase: RenamePhase,
    mark: String,
    from: String,
    to: String,
    objects: Vec<RenamedObject>,
}

/// A record in the bucket.
pub(crate) struct RenameRecord {
    key: String,
    /// The version of the record that this mount knows.
    etag: String,
    content: RecordContent,
}

/// The end of a change of phase.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PhaseChange {
    /// The record is in the phase that it says now.
    Known,
    /// Another mount has ended the rename.
    Ended,
}

impl RenameRecord {
    /// Records that the objects below the key `from` get names below the key `to`, both with a slash at the end.
    ///
    /// # Errors
    /// The store's; nothing is renamed then.
    pub async fn begin(
        requests: &BucketRequests,
        root: &str,
        mark: String,
        from: String,
        to: String,
        objects: Vec<RenamedObject>,
    ) -> Result<RenameRecord> {
        let key = format!("{root}{RECORD_NAME}{mark}");
        let content = RecordContent { version: RECORD_VERSION, phase: RenamePhase::Copying, mark, from, to, objects };
        let etag = put_content(requests, &key, &content, &WriteCondition::Absent).await?;
        Ok(RenameRecord { key, etag, content })
    }

    /// The keys of all records below the root of a source.
    pub async fn find_all(requests: &BucketRequests, root: &str) -> Result<Vec<String>> {
        let found = requests.list_below(&format!("{root}{RECORD_NAME}"), usize::MAX).await?;
        Ok(found.into_iter().map(|object| object.key).collect())
    }

    /// Reads a record; `None` if another mount has ended the rename.
    ///
    /// # Errors
    /// `Unsupported` for a record of a later release; the store's.
    pub async fn load(requests: &BucketRequests, key: &str) -> Result<Option<RenameRecord>> {
        let Some((bytes, etag)) = requests.read_all(key).await? else { return Ok(None) };
        let content: RecordContent = serde_json::from_slice(&bytes).map_err(|error| {
            Error::new(
                ErrorKind::Unsupported,
                format!("'{key}' is no record of a rename that this release reads: {error}"),
            )
        })?;
        if content.version != RECORD_VERSION {
            let why = format!("'{key}' has the form {}, and this release knows {RECORD_VERSION}", content.version);
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        Ok(Some(RenameRecord { key: key.to_owned(), etag, content }))
    }

    pub fn phase(&self) -> RenamePhase {
        self.content.phase
    }

    pub fn objects(&self) -> &[RenamedObject] {
        &self.content.objects
    }

    /// The mark that all copies of this rename have.
    pub fn mark(&self) -> &str {
        &self.content.mark
    }

    /// The old and the new folder, for messages.
    pub fn describe(&self) -> String {
        format!("the rename of '{}' to '{}'", self.content.from, self.content.to)
    }

    pub fn old_key(&self, object: &RenamedObject) -> String {
        format!("{}{}", self.content.from, object.name)
    }

    pub fn new_key(&self, object: &RenamedObject) -> String {
        format!("{}{}", self.content.to, object.name)
    }

    /// Enters a phase with these objects; if another mount has changed the record, that counts.
    ///
    /// # Errors
    /// The store's: whether the record has the phase is not known then.
    pub async fn enter(
        &mut self,
        requests: &BucketRequests,
        phase: RenamePhase,
        objects: Vec<RenamedObject>,
    ) -> Result<PhaseChange> {
        let content = RecordContent { phase, objects, ..self.content.clone() };
        match put_content(requests, &self.key, &content, &WriteCondition::Version(self.etag.clone())).await {
            Ok(etag) => {
                self.etag = etag;
                self.content = content;
                Ok(PhaseChange::Known)
            }
            Err(error) if matches!(error.kind(), ErrorKind::Stale | ErrorKind::NotFound) => {
                match RenameRecord::load(requests, &self.key).await? {
                    Some(record) => {
                        *self = record;
                        Ok(PhaseChange::Known)
                    }
                    None => Ok(PhaseChange::Ended),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Removes the record of a rename that has ended.
    ///
    /// # Errors
    /// The store's; the next mount removes it then.
    pub async fn remove(&self, requests: &BucketRequests) -> Result<()> {
        requests.delete(&self.key, &WriteCondition::None).await
    }
}

async fn put_content(
    requests: &BucketRequests,
    key: &str,
    content: &RecordContent,
    condition: &WriteCondition,
) -> Result<String> {
    let body = serde_json::to_vec(content)
        .map_err(|error| Error::new(ErrorKind::Invalid, format!("the record of a rename: {error}")))?;
    let attributes = marked_as(ObjectAttributes::with_content_type("application/json"), &crate::requests::new_mark());
    requests.put(&NewObject { key, attributes: &attributes, condition }, Bytes::from(body)).await
}
