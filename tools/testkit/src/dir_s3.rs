//! S3 over a directory of buckets. s3s-fs writes; reads and listings are our own, because a test server must honour `If-Match`,
//! use the same etag for the same state of a file everywhere, and list a large folder in pages at speed. Deliberately keeps no
//! state but the names of listed folders.

use crate::listing::{self, ListedItem};
use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use s3s_fs::FileSystem;
use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Bytes read from a file at once.
const FILE_CHUNK_BYTES: usize = 512 << 10;

/// Sorted names of a folder; names of folders have a trailing `/`.
type FolderNames = Arc<Vec<String>>;

pub(crate) struct DirS3 {
    inner: FileSystem,
    root: PathBuf,
    listed: Mutex<HashMap<PathBuf, (SystemTime, FolderNames)>>,
}

impl DirS3 {
    pub(crate) fn new(root: &Path) -> io::Result<Self> {
        let inner = FileSystem::new(root).map_err(|e| io::Error::other(format!("{e:?}")))?;
        Ok(DirS3 { inner, root: root.to_path_buf(), listed: Mutex::default() })
    }

    fn bucket_dir(&self, bucket: &str) -> S3Result<PathBuf> {
        let path = self.root.join(bucket);
        if path.is_dir() { Ok(path) } else { Err(s3_error!(NoSuchBucket)) }
    }

    /// The file of a key; a key that can't be a file name does not exist.
    fn key_path(&self, bucket: &str, key: &str) -> S3Result<PathBuf> {
        let bucket = self.bucket_dir(bucket)?;
        let folder = key.strip_suffix('/').unwrap_or(key);
        if folder.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(s3_error!(NoSuchKey));
        }
        let path = bucket.join(folder);
        let found = path.metadata().map_err(|_| s3_error!(NoSuchKey))?;
        // A key with a trailing slash is an empty folder's marker.
        if found.is_dir() == key.ends_with('/') { Ok(path) } else { Err(s3_error!(NoSuchKey)) }
    }

    fn folder_names(&self, folder: &Path) -> io::Result<FolderNames> {
        let modified = folder.metadata()?.modified()?;
        if let Some((at, names)) = self.listed.lock().get(folder)
            && *at == modified
        {
            return Ok(Arc::clone(names));
        }
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let Ok(mut name) = entry.file_name().into_string() else { continue };
            if entry.file_type()?.is_dir() {
                name.push('/');
            }
            names.push(name);
        }
        names.sort_unstable();
        let names = Arc::new(names);
        // A folder changed just now may change again without another time.
        if modified.elapsed().is_ok_and(|age| age.as_millis() > 50) {
            self.listed.lock().insert(folder.into(), (modified, Arc::clone(&names)));
        }
        Ok(names)
    }
}

fn object_size(metadata: &Metadata) -> u64 {
    if metadata.is_dir() { 0 } else { metadata.len() }
}

fn stat_etag(m: &Metadata) -> String {
    format!("{:x}-{:x}.{:x}-{:x}-{:x}", m.ino(), m.ctime(), m.ctime_nsec(), m.mtime_nsec(), object_size(m))
}

fn modified_time(m: &Metadata) -> Option<Timestamp> {
    m.modified().ok().map(Timestamp::from)
}

fn internal_error(error: io::Error) -> s3s::S3Error {
    s3s::S3Error::internal_error(error)
}

#[async_trait]
impl S3 for DirS3 {
    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let path = self.key_path(&req.input.bucket, &req.input.key)?;
        let file = std::fs::File::open(path).map_err(|_| s3_error!(NoSuchKey))?;
        let metadata = file.metadata().map_err(internal_error)?;
        let etag = stat_etag(&metadata);
        if let Some(ETagCondition::ETag(wanted)) = &req.input.if_match
            && wanted.value() != etag
        {
            return Err(s3_error!(PreconditionFailed));
        }
        let total = object_size(&metadata);
        let (range, content_range) = match req.input.range {
            Some(range) => {
                let r = range.check(total)?;
                let shown = format!("bytes {}-{}/{total}", r.start, r.end - 1);
                (r, Some(shown))
            }
            None => (0..total, None),
        };
        let length = range.end - range.start;
        let (sender, receiver) = tokio::sync::mpsc::channel::<io::Result<Bytes>>(2);
        tokio::task::spawn_blocking(move || {
            let mut at = range.start;
            while at < range.end {
                let mut buffer = vec![0; FILE_CHUNK_BYTES.min((range.end - at) as usize)];
                let read = file.read_exact_at(&mut buffer, at).map(|()| Bytes::from(buffer));
                at += FILE_CHUNK_BYTES as u64;
                let failed = read.is_err();
                if sender.blocking_send(read).is_err() || failed {
                    return;
                }
            }
        });
        let stream = futures::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|chunk| (chunk, receiver))
        });
        Ok(S3Response::new(GetObjectOutput {
            body: Some(StreamingBlob::wrap(stream)),
            content_length: i64::try_from(length).ok(),
            content_range,
            e_tag: Some(ETag::Strong(etag)),
            last_modified: modified_time(&metadata),
            ..Default::default()
        }))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let metadata = self.key_path(&req.input.bucket, &req.input.key)?.metadata().map_err(internal_error)?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: i64::try_from(object_size(&metadata)).ok(),
            e_tag: Some(ETag::Strong(stat_etag(&metadata))),
            last_modified: modified_time(&metadata),
            ..Default::default()
        }))
    }

    async fn list_objects_v2(&self, req: S3Request<ListObjectsV2Input>) -> S3Result<S3Response<ListObjectsV2Output>> {
        if req.input.delimiter.as_deref() != Some("/") {
            return self.inner.list_objects_v2(req).await;
        }
        let input = req.input;
        let bucket = self.bucket_dir(&input.bucket)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let (folder, partial) = prefix.rsplit_once('/').unwrap_or(("", &prefix));
        let head = &prefix[..prefix.len() - partial.len()];
        let valid = folder.is_empty() || !folder.split('/').any(|part| matches!(part, "" | "." | ".."));
        let path = bucket.join(folder);
        // A path that is not a folder has no keys below.
        let names = if valid && path.is_dir() {
            self.folder_names(&path).map_err(internal_error)?
        } else {
            FolderNames::default()
        };
        let start = listing::page_start(&input);
        let limit = listing::page_limit(&input);
        let mut items = Vec::new();
        let mut last = None;
        let mut more = false;
        let marker = valid && !folder.is_empty() && partial.is_empty() && start.is_none() && path.is_dir();
        if marker && limit > 0 {
            // A folder is a marker, so that empty folders are listed.
            let metadata = path.metadata().map_err(internal_error)?;
            items.push(ListedItem::Object(Box::new(listed_object(head.to_owned(), &metadata))));
        }
        let begin = match start.as_deref().and_then(|s| s.strip_prefix(head)) {
            Some(after) => names.partition_point(|n| n.as_str() <= after),
            None => 0,
        };
        for name in names.iter().skip(begin).filter(|n| n.starts_with(partial)) {
            if items.len() >= limit {
                more = limit > 0;
                break;
            }
            let key = format!("{head}{name}");
            if name.ends_with('/') {
                items.push(ListedItem::Prefix(key.clone()));
            } else {
                match path.join(name).metadata() {
                    Ok(metadata) => items.push(ListedItem::Object(Box::new(listed_object(key.clone(), &metadata)))),
                    Err(_) => continue,
                }
            }
            last = Some(key);
        }
        let last = if more { Some(last.unwrap_or_else(|| head.to_owned())) } else { None };
        Ok(S3Response::new(listing::page_output(input, items, last)))
    }

    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let bucket = req.input.bucket.clone();
        let key = req.input.key.clone();
        let mut response = self.inner.put_object(req).await?;
        let metadata = self.key_path(&bucket, &key)?.metadata().map_err(internal_error)?;
        response.output.e_tag = Some(ETag::Strong(stat_etag(&metadata)));
        Ok(response)
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        self.inner.head_bucket(req).await
    }
    async fn create_bucket(&self, req: S3Request<CreateBucketInput>) -> S3Result<S3Response<CreateBucketOutput>> {
        self.inner.create_bucket(req).await
    }
    async fn list_buckets(&self, req: S3Request<ListBucketsInput>) -> S3Result<S3Response<ListBucketsOutput>> {
        self.inner.list_buckets(req).await
    }
    async fn delete_object(&self, req: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.inner.delete_object(req).await
    }
    async fn delete_objects(&self, req: S3Request<DeleteObjectsInput>) -> S3Result<S3Response<DeleteObjectsOutput>> {
        self.inner.delete_objects(req).await
    }
}

fn listed_object(key: String, metadata: &Metadata) -> Object {
    Object {
        key: Some(key),
        size: i64::try_from(object_size(metadata)).ok(),
        e_tag: Some(ETag::Strong(stat_etag(metadata))),
        last_modified: modified_time(metadata),
        ..Default::default()
    }
}
