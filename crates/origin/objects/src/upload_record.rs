//! The records of uploads under way, as objects that listings hide: an upload that a killed mount has left behind is found by its
//! record and aborted. A store lists open uploads without their metadata, so nothing else distinguishes them from those of other
//! programs. It knows no file.

use crate::probe::find_store_time;
use crate::requests::{BucketRequests, NewObject, marked, new_mark};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use spurline_object_store::{HIDDEN_NAME, ObjectAttributes, WriteCondition};
use spurline_types::{ErrorKind, Result};
use std::time::Duration;

/// The start of the names of records after [`HIDDEN_NAME`].
const UPLOAD_NAME: &str = "upload-";

/// The content of a record.
#[derive(Debug, Serialize, Deserialize)]
struct UploadRecord {
    key: String,
    upload: String,
}

fn record_prefix(root: &str) -> String {
    format!("{root}{HIDDEN_NAME}{UPLOAD_NAME}")
}

/// Records an upload; the key of the record. Without one, the upload is left behind if this process is killed.
pub(crate) async fn record_upload(requests: &BucketRequests, root: &str, key: &str, upload: &str) -> Option<String> {
    let record = UploadRecord { key: key.to_owned(), upload: upload.to_owned() };
    let body = serde_json::to_vec(&record).ok()?;
    let record_key = format!("{}{}", record_prefix(root), new_mark());
    let attributes = marked(ObjectAttributes::with_content_type("application/json"));
    let object = NewObject { key: &record_key, attributes: &attributes, condition: &WriteCondition::None };
    match requests.put(&object, Bytes::from(body)).await {
        Ok(_) => Some(record_key),
        Err(error) => {
            tracing::warn!("an upload of '{key}' has no record, and would be left behind by a crash: {error}");
            None
        }
    }
}

/// Aborts the uploads that were recorded at least `age` ago, and says how many are younger.
pub(crate) async fn abort_leftovers(requests: &BucketRequests, root: &str, age: Duration) {
    if let Err(error) = abort_old(requests, root, age).await {
        tracing::warn!("uploads that were left behind can't be looked for: {error}");
    }
}

async fn abort_old(requests: &BucketRequests, root: &str, age: Duration) -> Result<()> {
    let records = requests.list_below(&record_prefix(root), usize::MAX).await?;
    if records.is_empty() {
        return Ok(());
    }
    let now = find_store_time(requests, root).await?;
    let count = records.len();
    let old = records.into_iter().filter(|record| now.duration_since(record.mtime).unwrap_or_default() >= age);
    let old: Vec<String> = old.map(|record| record.key).collect();
    if count > old.len() {
        let kept = count - old.len();
        tracing::info!(
            "{kept} uploads of other mounts are under way or were left behind; a mount with --rw aborts them when they are {} old",
            in_hours(age)
        );
    }
    for key in old {
        if let Err(error) = abort_recorded(requests, &key).await {
            tracing::warn!("an upload that was left behind is not aborted: {error}");
        }
    }
    Ok(())
}

fn in_hours(age: Duration) -> String {
    format!("{} h", age.as_secs().div_ceil(3600))
}

async fn abort_recorded(requests: &BucketRequests, record_key: &str) -> Result<()> {
    let Some((bytes, _)) = requests.read_all(record_key).await? else { return Ok(()) };
    match serde_json::from_slice::<UploadRecord>(&bytes) {
        Ok(record) => {
            match requests.abort_upload(&record.key, &record.upload).await {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                Err(_) => {}
                Ok(()) => tracing::info!("an upload of '{}' that was left behind is aborted", record.key),
            }
            requests.delete(record_key, &WriteCondition::None).await
        }
        Err(error) => {
            tracing::warn!("'{record_key}' is no record of an upload that this release reads: {error}");
            Ok(())
        }
    }
}
