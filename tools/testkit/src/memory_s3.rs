//! An S3 bucket in memory that accepts every valid key: `a` beside `a/b`, `a//b`, `.`, control characters. It
//! deliberately serves only what a reader and a simple writer need.

use crate::listing::{self, ListedItem};
use async_trait::async_trait;
use bytes::Bytes;
use futures::TryStreamExt as _;
use parking_lot::RwLock;
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

#[derive(Clone)]
struct StoredObject {
    bytes: Bytes,
    etag: String,
    modified: SystemTime,
}

/// Buckets in memory; clones share them.
#[derive(Clone, Default)]
pub(crate) struct MemoryS3 {
    buckets: Arc<RwLock<BTreeMap<String, BTreeMap<String, StoredObject>>>>,
    writes: Arc<AtomicU64>,
}

impl MemoryS3 {
    pub(crate) fn create_bucket(&self, bucket: &str) {
        self.buckets.write().entry(bucket.into()).or_default();
    }
    pub(crate) fn put(&self, bucket: &str, key: &str, bytes: Bytes) -> String {
        // Unlike AWS, each write gets a new etag, even for equal bytes, so that tests can distinguish writes.
        let etag = format!("{:032x}", self.writes.fetch_add(1, Ordering::Relaxed));
        let stored = StoredObject { bytes, etag: etag.clone(), modified: SystemTime::now() };
        self.buckets.write().entry(bucket.into()).or_default().insert(key.into(), stored);
        etag
    }
    pub(crate) fn remove(&self, bucket: &str, key: &str) {
        if let Some(bucket) = self.buckets.write().get_mut(bucket) {
            bucket.remove(key);
        }
    }
    fn get(&self, bucket: &str, key: &str) -> S3Result<StoredObject> {
        let buckets = self.buckets.read();
        let bucket = buckets.get(bucket).ok_or_else(|| s3_error!(NoSuchBucket))?;
        bucket.get(key).cloned().ok_or_else(|| s3_error!(NoSuchKey))
    }
}

fn listed_object(key: &str, stored: &StoredObject) -> Object {
    Object {
        key: Some(key.into()),
        size: i64::try_from(stored.bytes.len()).ok(),
        e_tag: Some(ETag::Strong(stored.etag.clone())),
        last_modified: Some(Timestamp::from(stored.modified)),
        ..Default::default()
    }
}

#[async_trait]
impl S3 for MemoryS3 {
    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let stored = self.get(&req.input.bucket, &req.input.key)?;
        if let Some(ETagCondition::ETag(wanted)) = &req.input.if_match
            && wanted.value() != stored.etag
        {
            return Err(s3_error!(PreconditionFailed));
        }
        let total = stored.bytes.len() as u64;
        let (range, content_range) = match req.input.range {
            Some(range) => {
                let r = range.check(total)?;
                let shown = format!("bytes {}-{}/{total}", r.start, r.end - 1);
                (r.start as usize..r.end as usize, Some(shown))
            }
            None => (0..stored.bytes.len(), None),
        };
        let bytes = stored.bytes.slice(range);
        Ok(S3Response::new(GetObjectOutput {
            content_length: i64::try_from(bytes.len()).ok(),
            body: Some(StreamingBlob::from(s3s::Body::from(bytes))),
            content_range,
            e_tag: Some(ETag::Strong(stored.etag)),
            last_modified: Some(Timestamp::from(stored.modified)),
            ..Default::default()
        }))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let stored = self.get(&req.input.bucket, &req.input.key)?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: i64::try_from(stored.bytes.len()).ok(),
            e_tag: Some(ETag::Strong(stored.etag)),
            last_modified: Some(Timestamp::from(stored.modified)),
            ..Default::default()
        }))
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        match self.buckets.read().contains_key(&req.input.bucket) {
            true => Ok(S3Response::new(HeadBucketOutput::default())),
            false => Err(s3_error!(NoSuchBucket)),
        }
    }

    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let mut bytes = Vec::new();
        if let Some(mut body) = req.input.body {
            while let Some(chunk) = body.try_next().await.map_err(|_| s3_error!(IncompleteBody))? {
                bytes.extend_from_slice(&chunk);
            }
        }
        if !self.buckets.read().contains_key(&req.input.bucket) {
            return Err(s3_error!(NoSuchBucket));
        }
        let etag = self.put(&req.input.bucket, &req.input.key, bytes.into());
        Ok(S3Response::new(PutObjectOutput { e_tag: Some(ETag::Strong(etag)), ..Default::default() }))
    }

    async fn delete_object(&self, req: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.remove(&req.input.bucket, &req.input.key);
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn list_objects_v2(&self, req: S3Request<ListObjectsV2Input>) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = req.input;
        let buckets = self.buckets.read();
        let bucket = buckets.get(&input.bucket).ok_or_else(|| s3_error!(NoSuchBucket))?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let delimiter = input.delimiter.clone().unwrap_or_default();
        let limit = listing::page_limit(&input);
        let (mut items, mut last, mut more) = (Vec::new(), None, false);
        let mut from = Bound::Included(prefix.clone());
        if let Some(start) = listing::page_start(&input).filter(|s| *s >= prefix) {
            // Nothing is left below a prefix that has been listed.
            from = match !delimiter.is_empty() && start.ends_with(&delimiter) && start.len() > prefix.len() {
                true => Bound::Excluded(format!("{start}\u{10ffff}")),
                false => Bound::Excluded(start),
            };
        }
        loop {
            let next = bucket.range::<String, _>((from, Bound::Unbounded)).next();
            let Some((key, stored)) = next.filter(|(k, _)| k.starts_with(&prefix)) else { break };
            if items.len() == limit {
                more = limit > 0;
                break;
            }
            let folder = match delimiter.is_empty() {
                true => None,
                false => key[prefix.len()..].find(&delimiter).map(|i| &key[..prefix.len() + i + delimiter.len()]),
            };
            match folder {
                Some(folder) => {
                    items.push(ListedItem::Prefix(folder.to_owned()));
                    last = Some(folder.to_owned());
                    from = Bound::Excluded(format!("{folder}\u{10ffff}"));
                }
                None => {
                    items.push(ListedItem::Object(Box::new(listed_object(key, stored))));
                    last = Some(key.clone());
                    from = Bound::Excluded(key.clone());
                }
            }
        }
        drop(buckets);
        Ok(S3Response::new(listing::page_output(input, items, last.filter(|_| more))))
    }
}
