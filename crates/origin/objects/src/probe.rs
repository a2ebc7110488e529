//! Finds out whether a store keeps the conditions of writes, and which time the store has, by writes of an object that is removed again.
//! Stores misreport what they can do, and one that ignores a condition would replace the changes of others. It changes no other object.

use crate::requests::{BucketRequests, NewObject, marked};
use bytes::Bytes;
use spurline_object_store::{HIDDEN_NAME, ObjectAttributes, UploadedPart, WriteCondition};
use spurline_sys::random;
use spurline_types::{ErrorKind, Result};
use std::time::SystemTime;

/// An etag that no object has.
const NO_ETAG: &str = "00000000000000000000000000000000-spurline";

/// The first condition that a store does not keep, in words; `None` when it keeps all of them.
///
/// # Errors
/// Those of the store: a bucket that this identity may not change.
pub(crate) async fn find_ignored_condition(requests: &BucketRequests, root: &str) -> Result<Option<&'static str>> {
    let key = probe_key(root);
    let found = probe_conditions(requests, &key).await;
    let removed = requests.delete(&key, &WriteCondition::None).await;
    let found = found?;
    removed?;
    Ok(found)
}

/// The time by the clock that stamps objects, in whole seconds. The clock of this host says nothing about the age of an object: either
/// clock can be wrong.
pub(crate) async fn find_store_time(requests: &BucketRequests, root: &str) -> Result<SystemTime> {
    let key = probe_key(root);
    put(requests, &key, &WriteCondition::None).await?;
    let found = requests.head(&key).await;
    requests.delete(&key, &WriteCondition::None).await?;
    Ok(found?.raw.mtime)
}

fn probe_key(root: &str) -> String {
    format!("{root}{HIDDEN_NAME}probe-{:016x}", random())
}

async fn probe_conditions(requests: &BucketRequests, key: &str) -> Result<Option<&'static str>> {
    put(requests, key, &WriteCondition::Absent).await?;
    if is_taken(put(requests, key, &WriteCondition::Absent).await)? {
        return Ok(Some("PutObject with If-None-Match: *"));
    }
    if is_taken(put(requests, key, &WriteCondition::Version(NO_ETAG.to_owned())).await)? {
        return Ok(Some("PutObject with If-Match"));
    }
    for (condition, name) in [
        (WriteCondition::Absent, "CompleteMultipartUpload with If-None-Match: *"),
        (WriteCondition::Version(NO_ETAG.to_owned()), "CompleteMultipartUpload with If-Match"),
    ] {
        let attributes = marked(ObjectAttributes::default());
        let upload = requests.begin_unrecorded_upload(key, &attributes).await?;
        let etag = requests.upload_part(key, &upload.id, 1, Bytes::from_static(b"probe")).await?;
        let object = NewObject { key, attributes: &attributes, condition: &condition };
        let completed = requests.complete(&object, &upload, &[UploadedPart { number: 1, etag }]).await;
        if is_taken(completed)? {
            return Ok(Some(name));
        }
        requests.abort(key, &upload).await;
    }
    Ok(None)
}

async fn put(requests: &BucketRequests, key: &str, condition: &WriteCondition) -> Result<String> {
    let attributes = marked(ObjectAttributes::default());
    let object = NewObject { key, attributes: &attributes, condition };
    requests.put(&object, Bytes::from_static(b"probe")).await
}

/// Whether the store took a write whose condition does not hold. One that does not know the condition says so.
fn is_taken(written: Result<String>) -> Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::Stale | ErrorKind::NotFound) => Ok(false),
        Err(error) => Err(error),
    }
}

/// What a store that ignores a condition means, in words.
pub(crate) fn describe_unguarded(server: &str, ignored: &str) -> String {
    format!("{server} ignores the condition of {ignored}: this mount could replace changes of others without a word")
}
