//! Parts of open files whose bytes were moved from local space to hidden objects of the bucket, because local space is short. It knows
//! no file.
//!
//! Each file with such parts has a heartbeat, a hidden object without bytes that is written again from time to time. The objects
//! of a killed mount are recognised by the age of the newest object of their file.

use crate::probe::find_store_time;
use crate::requests::{BucketRequests, NewObject, marked, new_mark};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use spurline_object_store::{HIDDEN_NAME, ObjectAttributes, WriteCondition};
use spurline_sys::random;
use spurline_types::Result;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

/// The start of the names of these objects after [`HIDDEN_NAME`].
pub(crate) const PART_NAME: &str = "part-";
/// Length of the mark of a file in these names.
const MARK_LEN: usize = 32;
/// How often the heartbeat of a file is written.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(600);
/// The least age of objects that are removed: several heartbeats are missing, and nothing else has these bytes.
const LEAST_AGE: Duration = Duration::from_secs(3600);
/// Objects that are removed at once.
const REMOVALS_AT_ONCE: usize = 16;

/// The hidden objects of a file.
pub(crate) struct SpillGroup {
    requests: Arc<BucketRequests>,
    /// The source's prefix with a trailing slash, or empty.
    root: String,
    mark: String,
    permits: Semaphore,
    /// Removals that have not ended.
    removals: watch::Sender<usize>,
    /// A removal has failed: all others are left to the mount that finds old objects, and do not wait for the store.
    leaves_objects: AtomicBool,
}

impl SpillGroup {
    /// The objects of a file without spilled parts.
    pub fn new(requests: &Arc<BucketRequests>, root: &str) -> Arc<SpillGroup> {
        SpillGroup::continued(requests, root, new_mark())
    }

    /// The objects of the file with this mark.
    pub fn continued(requests: &Arc<BucketRequests>, root: &str, mark: String) -> Arc<SpillGroup> {
        let permits = Semaphore::new(REMOVALS_AT_ONCE);
        let requests = Arc::clone(requests);
        let removals = watch::Sender::new(0);
        let leaves_objects = AtomicBool::new(false);
        Arc::new(SpillGroup { requests, root: root.to_owned(), mark, permits, removals, leaves_objects })
    }

    pub fn mark(&self) -> &str {
        &self.mark
    }

    fn heartbeat_key(&self) -> String {
        format!("{}{}", part_prefix(&self.root), self.mark)
    }

    /// Writes the heartbeat until the result is dropped.
    pub fn begin_heartbeats(self: &Arc<Self>) -> Heartbeats {
        let group = Arc::clone(self);
        let task = self.requests.spawn(async move {
            let key = group.heartbeat_key();
            loop {
                let attributes = marked(ObjectAttributes::default());
                let beat = NewObject { key: &key, attributes: &attributes, condition: &WriteCondition::None };
                if let Err(error) = group.requests.put(&beat, Bytes::new()).await {
                    tracing::debug!("the heartbeat '{key}' is written again: {error}");
                }
                tokio::time::sleep(HEARTBEAT_INTERVAL).await;
            }
        });
        Heartbeats { group: Arc::clone(self), task: task.ok() }
    }

    /// Stores the bytes of a part in a hidden object.
    pub async fn store(self: Arc<Self>, bytes: Bytes) -> Result<SpilledPart> {
        let key = format!("{}-{:016x}", self.heartbeat_key(), random());
        let object = HiddenObject { group: Arc::clone(&self), key };
        let len = bytes.len() as u64;
        let attributes = marked(ObjectAttributes::with_content_type("application/octet-stream"));
        let new = NewObject { key: &object.key, attributes: &attributes, condition: &WriteCondition::Absent };
        let etag = self.requests.put(&new, bytes).await?;
        Ok(SpilledPart { object, etag, object_len: len, len })
    }

    /// Removes an object, after this call.
    fn remove(self: &Arc<Self>, key: String) {
        let group = Arc::clone(self);
        self.removals.send_modify(|count| *count += 1);
        let removed = self.requests.spawn(async move {
            let permit = group.permits.acquire().await;
            if !group.leaves_objects.load(Ordering::Relaxed)
                && let Err(error) = group.requests.delete(&key, &WriteCondition::None).await
            {
                tracing::warn!("'{key}' and others stay in the bucket until a mount finds that they are old: {error}");
                group.leaves_objects.store(true, Ordering::Relaxed);
            }
            drop(permit);
            group.removals.send_modify(|count| *count -= 1);
        });
        if removed.is_err() {
            self.removals.send_modify(|count| *count -= 1);
        }
    }

    /// Waits until all removals have ended.
    pub async fn wait_for_removals(&self) {
        // The sender lives as long as `self`.
        let _ = self.removals.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// The heartbeats of a file, of which the last one is removed when this is dropped.
pub(crate) struct Heartbeats {
    group: Arc<SpillGroup>,
    task: Option<JoinHandle<()>>,
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
        self.group.remove(self.group.heartbeat_key());
    }
}

/// A hidden object, which is removed when this is dropped.
struct HiddenObject {
    group: Arc<SpillGroup>,
    key: String,
}

impl Drop for HiddenObject {
    fn drop(&mut self) {
        self.group.remove(std::mem::take(&mut self.key));
    }
}

/// What is kept of a part for the process after this one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct KeptPart {
    key: String,
    etag: String,
    object_len: u64,
    pub len: u64,
}

/// A part whose bytes lie in a hidden object, which is removed with this.
pub(crate) struct SpilledPart {
    object: HiddenObject,
    pub etag: String,
    /// Length of the object.
    pub object_len: u64,
    /// The first bytes that count; the file was cut behind.
    pub len: u64,
}

impl SpilledPart {
    /// The part of a process that has ended.
    pub fn continued(group: &Arc<SpillGroup>, kept: KeptPart) -> SpilledPart {
        let KeptPart { key, etag, object_len, len } = kept;
        let object = HiddenObject { group: Arc::clone(group), key };
        SpilledPart { object, etag, object_len, len }
    }

    pub fn kept(&self) -> KeptPart {
        KeptPart { key: self.object.key.clone(), etag: self.etag.clone(), object_len: self.object_len, len: self.len }
    }

    pub fn key(&self) -> &str {
        &self.object.key
    }

    /// The path of the object below the source.
    pub fn path(&self) -> &[u8] {
        &self.object.key.as_bytes()[self.object.group.root.len()..]
    }
}

fn part_prefix(root: &str) -> String {
    format!("{root}{HIDDEN_NAME}{PART_NAME}")
}

/// Removes the spilled parts of files without a heartbeat for `age`, and for an hour at least.
pub(crate) async fn remove_leftovers(requests: &BucketRequests, root: &str, age: Duration) {
    if let Err(error) = remove_old(requests, root, age.max(LEAST_AGE)).await {
        tracing::warn!("parts of open files that killed mounts have left behind are not removed: {error}");
    }
}

async fn remove_old(requests: &BucketRequests, root: &str, age: Duration) -> Result<()> {
    let prefix = part_prefix(root);
    let found = requests.list_below(&prefix, usize::MAX).await?;
    let mut files: BTreeMap<String, (SystemTime, Vec<String>)> = BTreeMap::new();
    for object in found {
        let Some(mark) = object.key[prefix.len()..].get(..MARK_LEN) else { continue };
        let (newest, keys) = files.entry(mark.to_owned()).or_insert((SystemTime::UNIX_EPOCH, Vec::new()));
        *newest = object.mtime.max(*newest);
        keys.push(object.key);
    }
    if files.is_empty() {
        return Ok(());
    }
    let now = find_store_time(requests, root).await?;
    for (newest, keys) in files.into_values() {
        if now.duration_since(newest).unwrap_or_default() < age {
            continue;
        }
        let count = keys.len();
        for key in keys {
            requests.delete(&key, &WriteCondition::None).await?;
        }
        tracing::info!("{count} hidden objects with parts of a file of a killed mount are removed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::tests::options_for;
    use spurline_object_store::SourceLocation;
    use spurline_testkit::S3Server;

    #[test]
    fn objects_without_a_heartbeat_are_removed() {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        let source = SourceLocation::parse("s3://bucket").unwrap();
        let bucket = spurline_object_store::open_bucket(&source, &options_for(&server), Arc::default()).unwrap();
        let requests = Arc::new(BucketRequests::new(bucket, "p/").unwrap());
        let group = SpillGroup::new(&requests, "p/");
        let heartbeats = group.begin_heartbeats();
        let store = || requests.run(Arc::clone(&group).store(Bytes::from_static(b"bytes"))).unwrap();
        let stored = store();
        let key = stored.key().to_owned();
        assert!(key.as_bytes().ends_with(stored.path()) && stored.path().starts_with(b".spurline-part-"));
        assert_eq!(server.bytes("bucket", &key).unwrap(), b"bytes");
        let leave = |age: Duration| requests.run(remove_old(&requests, "p/", age)).unwrap();
        leave(LEAST_AGE);
        assert!(server.keys("bucket").contains(&key));
        // Old by the clock of this host, and young by that of the store.
        server.set_clock_behind(2 * LEAST_AGE);
        let other = SpillGroup::new(&requests, "p/");
        let young = requests.run(Arc::clone(&other).store(Bytes::from_static(b"bytes"))).unwrap();
        leave(LEAST_AGE);
        assert!(server.keys("bucket").contains(&young.key().to_owned()));
        drop(young);
        server.set_clock_behind(Duration::ZERO);
        leave(Duration::ZERO);
        assert!(!server.keys("bucket").contains(&key));
        drop(store());
        drop(heartbeats);
        let removed = async {
            group.wait_for_removals().await;
            other.wait_for_removals().await;
            Ok(())
        };
        requests.run(removed).unwrap();
        assert_eq!(server.keys("bucket"), [""; 0]);
    }
}
