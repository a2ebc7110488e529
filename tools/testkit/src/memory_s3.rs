//! An S3 bucket in memory that accepts every valid key: `a` beside `a/b`, `a//b`, `.`, control characters. Deliberately keeps no
//! versions and no access rights.

use crate::listing::{self, ListedItem};
use async_trait::async_trait;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures::TryStreamExt as _;
use parking_lot::RwLock;
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

/// Least length of a part that is not the last, as in AWS.
const LEAST_PART: usize = 5 << 20;

/// The attributes that are stored with an object.
#[derive(Clone, Default)]
struct StoredAttributes {
    content_type: Option<ContentType>,
    content_encoding: Option<ContentEncoding>,
    cache_control: Option<CacheControl>,
    metadata: Option<Metadata>,
    storage_class: Option<StorageClass>,
    encryption: Option<ServerSideEncryption>,
    encryption_key: Option<SSEKMSKeyId>,
}

#[derive(Clone)]
struct StoredObject {
    bytes: Bytes,
    etag: String,
    modified: SystemTime,
    attributes: StoredAttributes,
}

struct StoredUpload {
    bucket: String,
    key: String,
    initiated: SystemTime,
    attributes: StoredAttributes,
    parts: BTreeMap<i32, StoredObject>,
}

#[derive(Default)]
struct MemoryState {
    buckets: BTreeMap<String, BTreeMap<String, StoredObject>>,
    uploads: BTreeMap<String, StoredUpload>,
    writes: u64,
    /// How far the clock is behind that of the host.
    clock_behind: Duration,
    /// Changes with a condition are not offered.
    refuses_conditions: bool,
}

/// Buckets in memory; clones share them.
#[derive(Clone, Default)]
pub(crate) struct MemoryS3 {
    state: Arc<RwLock<MemoryState>>,
    assembly: Arc<RwLock<PartAssembly>>,
    completes: Arc<AtomicUsize>,
    wants_encryption: Arc<AtomicBool>,
}

/// How a server makes the object of an upload.
#[derive(Clone, Copy, Default)]
pub struct PartAssembly {
    /// How long it takes.
    pub takes: Duration,
    /// Whether the answer begins at once, with blanks until the object is there.
    pub answers_at_once: bool,
}

impl MemoryState {
    fn new_object(&mut self, bytes: Bytes, attributes: StoredAttributes) -> StoredObject {
        // Unlike AWS, each write gets a new etag, even for equal bytes, so that tests can distinguish writes.
        let etag = format!("{:032x}", self.writes);
        self.writes += 1;
        StoredObject { bytes, etag, modified: SystemTime::now() - self.clock_behind, attributes }
    }

    fn bucket(&mut self, bucket: &str) -> S3Result<&mut BTreeMap<String, StoredObject>> {
        self.buckets.get_mut(bucket).ok_or_else(|| s3_error!(NoSuchBucket))
    }

    fn object(&self, bucket: &str, key: &str) -> S3Result<StoredObject> {
        let bucket = self.buckets.get(bucket).ok_or_else(|| s3_error!(NoSuchBucket))?;
        bucket.get(key).cloned().ok_or_else(|| s3_error!(NoSuchKey))
    }

    /// The object of this upload, which belongs to this key.
    fn upload(&mut self, bucket: &str, key: &str, id: &str) -> S3Result<&mut StoredUpload> {
        let upload = self.uploads.get_mut(id).filter(|upload| upload.bucket == bucket && upload.key == key);
        upload.ok_or_else(|| s3_error!(NoSuchUpload))
    }

    /// Whether an object may be replaced or removed under these conditions.
    fn check_conditions(
        &mut self,
        bucket: &str,
        key: &str,
        if_match: Option<&ETagCondition>,
        if_none_match: Option<&ETagCondition>,
    ) -> S3Result<()> {
        if self.refuses_conditions && (if_match.is_some() || if_none_match.is_some()) {
            return Err(s3_error!(NotImplemented));
        }
        let stored = self.bucket(bucket)?.get(key).map(|stored| stored.etag.clone());
        match (if_match, &stored) {
            (Some(_), None) => return Err(s3_error!(NoSuchKey)),
            (Some(ETagCondition::ETag(wanted)), Some(etag)) if wanted.value() != etag => {
                return Err(s3_error!(PreconditionFailed));
            }
            _ => {}
        }
        match (if_none_match, &stored) {
            (Some(ETagCondition::Any), Some(_)) => Err(s3_error!(PreconditionFailed)),
            (Some(ETagCondition::ETag(unwanted)), Some(etag)) if unwanted.value() == etag => {
                Err(s3_error!(PreconditionFailed))
            }
            _ => Ok(()),
        }
    }

    /// The source of a copy, which has this version.
    fn copied(&self, from: &CopySource, if_match: Option<&ETagCondition>) -> S3Result<StoredObject> {
        let CopySource::Bucket { bucket, key, .. } = from else { return Err(s3_error!(NotImplemented)) };
        let stored = self.object(bucket, key)?;
        match if_match {
            Some(ETagCondition::ETag(wanted)) if wanted.value() != stored.etag => Err(s3_error!(PreconditionFailed)),
            _ => Ok(stored),
        }
    }
}

impl MemoryS3 {
    /// From now on the times of objects are this far behind those of the host.
    pub(crate) fn set_clock_behind(&self, by: Duration) {
        self.state.write().clock_behind = by;
    }

    /// From now on changes with a condition are not offered.
    pub(crate) fn refuse_conditions(&self) {
        self.state.write().refuses_conditions = true;
    }

    /// How many requests to make the object of an upload have come.
    pub(crate) fn completes(&self) -> usize {
        self.completes.load(Ordering::Relaxed)
    }

    /// From now on the objects of uploads are made in this way.
    pub(crate) fn set_assembly(&self, assembly: PartAssembly) {
        *self.assembly.write() = assembly;
    }

    /// Makes the object of an upload.
    fn assemble(&self, input: CompleteMultipartUploadInput) -> S3Result<CompleteMultipartUploadOutput> {
        let mut state = self.state.write();
        let upload = state.upload(&input.bucket, &input.key, &input.upload_id)?;
        let listed = input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
        if listed.is_empty() {
            return Err(s3_error!(MalformedXML));
        }
        let mut bytes = Vec::new();
        let mut last_number = 0;
        for (index, part) in listed.iter().enumerate() {
            let number = part.part_number.unwrap_or_default();
            if number <= last_number {
                return Err(s3_error!(InvalidPartOrder));
            }
            last_number = number;
            let stored = upload.parts.get(&number).ok_or_else(|| s3_error!(InvalidPart))?;
            if part.e_tag.as_ref().is_none_or(|etag| etag.value() != stored.etag) {
                return Err(s3_error!(InvalidPart));
            }
            if index + 1 < listed.len() && stored.bytes.len() < LEAST_PART {
                return Err(s3_error!(EntityTooSmall));
            }
            bytes.extend_from_slice(&stored.bytes);
        }
        let attributes = upload.attributes.clone();
        state.check_conditions(&input.bucket, &input.key, input.if_match.as_ref(), input.if_none_match.as_ref())?;
        state.uploads.remove(&input.upload_id);
        let mut stored = state.new_object(bytes.into(), attributes);
        stored.etag = format!("{}-{}", stored.etag, listed.len());
        let etag = stored.etag.clone();
        state.bucket(&input.bucket)?.insert(input.key.clone(), stored);
        Ok(CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(ETag::Strong(etag)),
            ..Default::default()
        })
    }

    pub(crate) fn create_bucket(&self, bucket: &str) {
        self.state.write().buckets.entry(bucket.into()).or_default();
    }
    pub(crate) fn put(&self, bucket: &str, key: &str, bytes: Bytes) -> String {
        let mut state = self.state.write();
        let stored = state.new_object(bytes, StoredAttributes::default());
        let etag = stored.etag.clone();
        state.buckets.entry(bucket.into()).or_default().insert(key.into(), stored);
        etag
    }
    pub(crate) fn put_with_metadata(&self, bucket: &str, key: &str, bytes: Bytes, metadata: &[(&str, &str)]) {
        let metadata: Metadata =
            metadata.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut state = self.state.write();
        let attributes = StoredAttributes { metadata: Some(metadata), ..StoredAttributes::default() };
        let stored = state.new_object(bytes, attributes);
        state.buckets.entry(bucket.into()).or_default().insert(key.into(), stored);
    }
    pub(crate) fn put_with_class(&self, bucket: &str, key: &str, bytes: Bytes, class: &str) {
        let mut state = self.state.write();
        let storage_class = Some(StorageClass::from(class.to_owned()));
        let stored = state.new_object(bytes, StoredAttributes { storage_class, ..StoredAttributes::default() });
        state.buckets.entry(bucket.into()).or_default().insert(key.into(), stored);
    }
    /// From now on writes without an encryption are refused, as by a bucket's policy.
    pub(crate) fn want_encryption(&self) {
        self.wants_encryption.store(true, Ordering::Relaxed);
    }
    /// Storage class, encryption and its key of an object, each empty where none was named.
    pub(crate) fn kept_as(&self, bucket: &str, key: &str) -> Option<[String; 3]> {
        let StoredAttributes { storage_class, encryption, encryption_key, .. } = self.get(bucket, key).ok()?.attributes;
        let class = storage_class.map(|class| class.as_str().to_owned()).unwrap_or_default();
        let encryption = encryption.map(|encryption| encryption.as_str().to_owned()).unwrap_or_default();
        Some([class, encryption, encryption_key.unwrap_or_default()])
    }
    /// The value of an attribute of the user that an object has.
    pub(crate) fn metadata(&self, bucket: &str, key: &str, name: &str) -> Option<String> {
        self.get(bucket, key).ok()?.attributes.metadata?.get(name).cloned()
    }
    pub(crate) fn remove(&self, bucket: &str, key: &str) {
        if let Some(bucket) = self.state.write().buckets.get_mut(bucket) {
            bucket.remove(key);
        }
    }
    /// The bytes of an object.
    pub(crate) fn bytes(&self, bucket: &str, key: &str) -> Option<Bytes> {
        self.state.read().object(bucket, key).ok().map(|stored| stored.bytes)
    }
    /// The names of all objects of a bucket.
    pub(crate) fn keys(&self, bucket: &str) -> Vec<String> {
        self.state.read().buckets.get(bucket).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }
    /// Begins an upload, as another program does.
    pub(crate) fn begin_upload(&self, bucket: &str, key: &str) {
        let mut state = self.state.write();
        let id = format!("other-{:08x}", state.writes);
        let upload = StoredUpload {
            bucket: bucket.into(),
            key: key.into(),
            initiated: SystemTime::now(),
            attributes: StoredAttributes::default(),
            parts: BTreeMap::new(),
        };
        state.uploads.insert(id, upload);
    }
    /// The number of objects, parts and uploads that were ever made.
    pub(crate) fn writes(&self) -> u64 {
        self.state.read().writes
    }
    /// The number of uploads that are neither completed nor aborted.
    pub(crate) fn open_uploads(&self) -> usize {
        self.state.read().uploads.len()
    }
    fn get(&self, bucket: &str, key: &str) -> S3Result<StoredObject> {
        self.state.read().object(bucket, key)
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

/// All bytes of a request, whose checksum, if any, is right.
async fn received(body: Option<StreamingBlob>, crc64nvme: Option<&str>) -> S3Result<Bytes> {
    let mut bytes = Vec::new();
    if let Some(mut body) = body {
        while let Some(chunk) = body.try_next().await.map_err(|_| s3_error!(IncompleteBody))? {
            bytes.extend_from_slice(&chunk);
        }
    }
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &bytes);
    match crc64nvme {
        Some(wanted) if wanted != BASE64_STANDARD.encode(sum.to_be_bytes()) => Err(s3_error!(BadDigest)),
        _ => Ok(bytes.into()),
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
            content_type: stored.attributes.content_type,
            content_encoding: stored.attributes.content_encoding,
            cache_control: stored.attributes.cache_control,
            metadata: stored.attributes.metadata,
            storage_class: stored.attributes.storage_class,
            ..Default::default()
        }))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let stored = self.get(&req.input.bucket, &req.input.key)?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: i64::try_from(stored.bytes.len()).ok(),
            e_tag: Some(ETag::Strong(stored.etag)),
            last_modified: Some(Timestamp::from(stored.modified)),
            content_type: stored.attributes.content_type,
            content_encoding: stored.attributes.content_encoding,
            cache_control: stored.attributes.cache_control,
            metadata: stored.attributes.metadata,
            storage_class: stored.attributes.storage_class,
            ..Default::default()
        }))
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        if self.state.read().buckets.contains_key(&req.input.bucket) {
            Ok(S3Response::new(HeadBucketOutput::default()))
        } else {
            Err(s3_error!(NoSuchBucket))
        }
    }

    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let input = req.input;
        if self.wants_encryption.load(Ordering::Relaxed) && input.server_side_encryption.is_none() {
            return Err(s3_error!(AccessDenied));
        }
        let bytes = received(input.body, input.checksum_crc64nvme.as_deref()).await?;
        let mut state = self.state.write();
        state.check_conditions(&input.bucket, &input.key, input.if_match.as_ref(), input.if_none_match.as_ref())?;
        let attributes = StoredAttributes {
            content_type: input.content_type,
            content_encoding: input.content_encoding,
            cache_control: input.cache_control,
            metadata: input.metadata,
            storage_class: input.storage_class,
            encryption: input.server_side_encryption,
            encryption_key: input.ssekms_key_id,
        };
        let stored = state.new_object(bytes, attributes);
        let etag = stored.etag.clone();
        state.bucket(&input.bucket)?.insert(input.key, stored);
        Ok(S3Response::new(PutObjectOutput { e_tag: Some(ETag::Strong(etag)), ..Default::default() }))
    }

    async fn delete_object(&self, req: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        let DeleteObjectInput { bucket, key, if_match, .. } = req.input;
        let mut state = self.state.write();
        state.check_conditions(&bucket, &key, if_match.as_ref(), None)?;
        state.bucket(&bucket)?.remove(&key);
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn copy_object(&self, req: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        let input = req.input;
        let mut state = self.state.write();
        let from = state.copied(&input.copy_source, input.copy_source_if_match.as_ref())?;
        // s3s reads no other condition of a copy.
        let replaces = input.metadata_directive.as_ref().is_some_and(|how| how.as_str() == MetadataDirective::REPLACE);
        let attributes = if replaces {
            StoredAttributes {
                content_type: input.content_type,
                content_encoding: input.content_encoding,
                cache_control: input.cache_control,
                metadata: input.metadata,
                storage_class: input.storage_class,
                encryption: input.server_side_encryption,
                encryption_key: input.ssekms_key_id,
            }
        } else {
            from.attributes
        };
        let stored = state.new_object(from.bytes, attributes);
        let result = CopyObjectResult {
            e_tag: Some(ETag::Strong(stored.etag.clone())),
            last_modified: Some(Timestamp::from(stored.modified)),
            ..Default::default()
        };
        state.bucket(&input.bucket)?.insert(input.key, stored);
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() }))
    }

    async fn create_multipart_upload(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = req.input;
        let mut state = self.state.write();
        state.bucket(&input.bucket)?;
        state.writes += 1;
        let id = format!("upload-{:08x}", state.writes);
        let upload = StoredUpload {
            bucket: input.bucket.clone(),
            key: input.key.clone(),
            initiated: SystemTime::now(),
            attributes: StoredAttributes {
                content_type: input.content_type,
                content_encoding: input.content_encoding,
                cache_control: input.cache_control,
                metadata: input.metadata,
                storage_class: input.storage_class,
                encryption: input.server_side_encryption,
                encryption_key: input.ssekms_key_id,
            },
            parts: BTreeMap::new(),
        };
        state.uploads.insert(id.clone(), upload);
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..Default::default()
        }))
    }

    async fn upload_part(&self, req: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let input = req.input;
        let bytes = received(input.body, input.checksum_crc64nvme.as_deref()).await?;
        let mut state = self.state.write();
        let stored = state.new_object(bytes, StoredAttributes::default());
        let etag = stored.etag.clone();
        let upload = state.upload(&input.bucket, &input.key, &input.upload_id)?;
        upload.parts.insert(input.part_number, stored);
        Ok(S3Response::new(UploadPartOutput { e_tag: Some(ETag::Strong(etag)), ..Default::default() }))
    }

    async fn upload_part_copy(
        &self,
        req: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        let input = req.input;
        let mut state = self.state.write();
        let from = state.copied(&input.copy_source, input.copy_source_if_match.as_ref())?;
        let range = input.copy_source_range.as_deref().and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let (first, last) = range.ok_or_else(|| s3_error!(InvalidArgument))?;
        let first: usize = first.parse().map_err(|_| s3_error!(InvalidArgument))?;
        let last: usize = last.parse().map_err(|_| s3_error!(InvalidArgument))?;
        if first > last || last >= from.bytes.len() {
            return Err(s3_error!(InvalidArgument));
        }
        let stored = state.new_object(from.bytes.slice(first..=last), StoredAttributes::default());
        let result = CopyPartResult { e_tag: Some(ETag::Strong(stored.etag.clone())), ..Default::default() };
        let upload = state.upload(&input.bucket, &input.key, &input.upload_id)?;
        upload.parts.insert(input.part_number, stored);
        Ok(S3Response::new(UploadPartCopyOutput { copy_part_result: Some(result), ..Default::default() }))
    }

    async fn complete_multipart_upload(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        self.completes.fetch_add(1, Ordering::Relaxed);
        let assembly = *self.assembly.read();
        let store = self.clone();
        let assembled = async move {
            tokio::time::sleep(assembly.takes).await;
            store.assemble(req.input)
        };
        if !assembly.answers_at_once {
            return Ok(S3Response::new(assembled.await?));
        }
        Ok(S3Response::new(CompleteMultipartUploadOutput { future: Some(Box::pin(assembled)), ..Default::default() }))
    }

    async fn abort_multipart_upload(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = req.input;
        let mut state = self.state.write();
        state.upload(&input.bucket, &input.key, &input.upload_id)?;
        state.uploads.remove(&input.upload_id);
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_parts(&self, req: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
        let input = req.input;
        let mut state = self.state.write();
        let upload = state.upload(&input.bucket, &input.key, &input.upload_id)?;
        let parts = upload.parts.iter().map(|(number, stored)| Part {
            part_number: Some(*number),
            e_tag: Some(ETag::Strong(stored.etag.clone())),
            size: i64::try_from(stored.bytes.len()).ok(),
            ..Default::default()
        });
        Ok(S3Response::new(ListPartsOutput {
            parts: Some(parts.collect()),
            is_truncated: Some(false),
            ..Default::default()
        }))
    }

    async fn list_multipart_uploads(
        &self,
        req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = req.input;
        let prefix = input.prefix.unwrap_or_default();
        let state = self.state.read();
        let open =
            state.uploads.iter().filter(|(_, upload)| upload.bucket == input.bucket && upload.key.starts_with(&prefix));
        let uploads = open.map(|(id, upload)| MultipartUpload {
            key: Some(upload.key.clone()),
            upload_id: Some(id.clone()),
            initiated: Some(Timestamp::from(upload.initiated)),
            ..Default::default()
        });
        Ok(S3Response::new(ListMultipartUploadsOutput {
            uploads: Some(uploads.collect()),
            is_truncated: Some(false),
            ..Default::default()
        }))
    }

    async fn list_objects_v2(&self, req: S3Request<ListObjectsV2Input>) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = req.input;
        let state = self.state.read();
        let bucket = state.buckets.get(&input.bucket).ok_or_else(|| s3_error!(NoSuchBucket))?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let delimiter = input.delimiter.clone().unwrap_or_default();
        let limit = listing::page_limit(&input);
        let mut items = Vec::new();
        let mut last = None;
        let mut more = false;
        let mut from = Bound::Included(prefix.clone());
        if let Some(start) = listing::page_start(&input).filter(|s| *s >= prefix) {
            // Nothing is left below a prefix that has been listed.
            from = if !delimiter.is_empty() && start.ends_with(&delimiter) && start.len() > prefix.len() {
                Bound::Excluded(format!("{start}\u{10ffff}"))
            } else {
                Bound::Excluded(start)
            };
        }
        loop {
            let next = bucket.range::<String, _>((from, Bound::Unbounded)).next();
            let Some((key, stored)) = next.filter(|(k, _)| k.starts_with(&prefix)) else { break };
            if items.len() == limit {
                more = limit > 0;
                break;
            }
            let folder = if delimiter.is_empty() {
                None
            } else {
                key[prefix.len()..].find(&delimiter).map(|i| &key[..prefix.len() + i + delimiter.len()])
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
        drop(state);
        Ok(S3Response::new(listing::page_output(input, items, last.filter(|_| more))))
    }
}
