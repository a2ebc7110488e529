//! The calls of S3 on the buckets of an endpoint; all others are answered with `NotImplemented`. Knows no socket and no signature.

use crate::aws_chunked::BodyFraming;
use crate::bucket::OpenBucket;
use crate::changes::{BucketChanges, NewObject, ObjectWriter, WriteCondition};
use crate::chunks::{ObjectRange, PieceMemory};
use crate::client_rights::ClientRights;
use crate::conditions::ReadConditions;
use crate::errors::{lost_thread, volume_error};
use crate::keys::KeyPath;
use crate::listing::{ListRequest, ListToken, ListedItem, ListedObject, ListedPage, list_objects};
use crate::metadata::{CONTENT_TYPE, headers_of_request, show_headers, wanted_headers};
use crate::objects::{
    CopiedObject, CopiedPart, ObjectBody, ReadRequest, WantedBytes, answer_range, copied_range, head_object,
    open_object, timestamp,
};
use crate::special_requests::{GivenExpires, check_version};
use crate::upload_checksums::check_object;
use crate::uploads::{
    BodyChecks, BodyTarget, ListedUpload, NamedPart, PartUploads, ReceivedBody, StagingDir, UploadRef, UploadsRequest,
    body_len, receive,
};
use async_trait::async_trait;
use http::Extensions;
use http::header::{EXPIRES, HOST, HeaderName, IF_MATCH, IF_NONE_MATCH};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3, S3ErrorCode, S3Request, S3Response, S3Result, TrailingHeaders, s3_error};
use spurline_types::{ObjectHeaders, Stats};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most keys of a page.
const KEYS_MAX: i32 = 1000;
/// The region of all buckets: that of clients that name none. Signatures for other regions count too.
const BUCKET_REGION: &str = "us-east-1";
/// The owner of everything, for clients that require an owner.
const OBJECT_OWNER: &str = "spurline";
/// What `encoding-type=url` escapes.
const KEY_BYTES_ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'/').remove(b'~');

/// The buckets of an endpoint; clones share all.
#[derive(Clone)]
pub(crate) struct BucketService {
    buckets: BTreeMap<String, Arc<OpenBucket>>,
    memory: Arc<PieceMemory>,
    staging: StagingDir,
    /// `http` or `https`.
    scheme: &'static str,
    uploads: PartUploads,
    stats: Arc<Stats>,
}

impl BucketService {
    pub fn new(
        buckets: impl IntoIterator<Item = OpenBucket>,
        memory: Arc<PieceMemory>,
        staging: StagingDir,
        scheme: &'static str,
        stats: Arc<Stats>,
    ) -> Self {
        let buckets = buckets.into_iter().map(|bucket| (bucket.name.clone(), Arc::new(bucket))).collect();
        BucketService { buckets, memory, staging, scheme, uploads: PartUploads::default(), stats }
    }

    /// A bucket, for a client that may know of it.
    fn bucket(&self, extensions: &Extensions, name: &str) -> S3Result<Arc<OpenBucket>> {
        ClientRights::of_request(extensions)?.check_bucket(name)?;
        self.find_bucket(name)
    }

    /// The bucket of an object, or of a listing below a prefix, for a client that may read there.
    fn read_bucket(&self, extensions: &Extensions, name: &str, key: &str) -> S3Result<Arc<OpenBucket>> {
        ClientRights::of_request(extensions)?.check_key(name, key)?;
        self.find_bucket(name)
    }

    /// The bucket of an object that is changed, before anything of a body is received.
    fn changed_bucket(&self, extensions: &Extensions, name: &str, key: &str) -> S3Result<Arc<OpenBucket>> {
        ClientRights::of_request(extensions)?.check_change(name, key)?;
        let bucket = self.find_bucket(name)?;
        BucketChanges::of(&bucket)?;
        Ok(bucket)
    }

    /// The object that a copy is made from.
    async fn copied_range(
        &self,
        extensions: &Extensions,
        from: &CopySource,
        conditions: ReadConditions,
        part: CopiedPart,
    ) -> S3Result<CopiedObject> {
        let CopySource::Bucket { bucket, key, version_id } = from else {
            return Err(S3ErrorCode::NotImplemented.into());
        };
        check_version(version_id.as_deref())?;
        let bucket = self.read_bucket(extensions, bucket, key)?;
        let key = key.to_string();
        let memory = Arc::clone(&self.memory);
        on_thread(move || copied_range(&bucket, &memory, &key, &conditions, part)).await
    }

    fn show_uploads(&self) {
        self.stats.s3.uploads.set(self.uploads.count() as u64);
    }

    fn find_bucket(&self, name: &str) -> S3Result<Arc<OpenBucket>> {
        self.buckets.get(name).cloned().ok_or_else(|| S3ErrorCode::NoSuchBucket.into())
    }

    async fn list_page(&self, bucket: Arc<OpenBucket>, request: ListRequest) -> S3Result<ListedPage> {
        on_thread(move || list_objects(&bucket, &request).map_err(|error| volume_error(&error))).await
    }
}

/// Runs blocking work on a thread for that.
async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> S3Result<T> + Send + 'static) -> S3Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| lost_thread(&error))?
}

/// Writes the bytes of an object; blocks.
fn copy_bytes(mut range: ObjectRange, target: &mut impl BodyTarget) -> S3Result<()> {
    while range.at < range.end {
        let piece = range.read_piece().map_err(|error| volume_error(&error))?;
        target.write(&piece)?;
    }
    Ok(())
}

/// The number of keys of a page that a client requests.
fn page_keys(max_keys: Option<i32>) -> S3Result<usize> {
    let wanted = max_keys.unwrap_or(KEYS_MAX).min(KEYS_MAX);
    usize::try_from(wanted).map_err(|_| s3_error!(InvalidArgument, "max-keys is negative"))
}

/// How the names of a listing are written.
#[derive(Clone, Copy)]
struct NameEncoding {
    escapes: bool,
}

impl NameEncoding {
    fn new(wanted: Option<&EncodingType>) -> S3Result<Self> {
        match wanted.map(EncodingType::as_str) {
            None => Ok(NameEncoding { escapes: false }),
            Some(EncodingType::URL) => Ok(NameEncoding { escapes: true }),
            Some(_) => Err(s3_error!(InvalidArgument, "the only encoding-type is url")),
        }
    }

    fn write(self, name: &str) -> String {
        if self.escapes { utf8_percent_encode(name, KEY_BYTES_ESCAPED).to_string() } else { name.to_owned() }
    }
}

/// The items of a page as the answer has them.
struct PageParts {
    contents: Vec<Object>,
    common_prefixes: Vec<CommonPrefix>,
}

impl PageParts {
    fn new(items: Vec<ListedItem>, encoding: NameEncoding, with_owner: bool) -> Self {
        let mut parts = PageParts { contents: Vec::new(), common_prefixes: Vec::new() };
        for item in items {
            match item {
                ListedItem::Prefix(prefix) => {
                    parts.common_prefixes.push(CommonPrefix { prefix: Some(encoding.write(&prefix)) });
                }
                ListedItem::Object(ListedObject { key, attr, etag }) => parts.contents.push(Object {
                    key: Some(encoding.write(&key)),
                    size: i64::try_from(attr.size).ok(),
                    e_tag: Some(ETag::Strong(etag)),
                    last_modified: Some(timestamp(attr.mtime)),
                    storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
                    owner: with_owner.then(owner),
                    ..Object::default()
                }),
            }
        }
        parts
    }
}

fn owner() -> Owner {
    Owner { display_name: Some(OBJECT_OWNER.to_owned()), id: Some(OBJECT_OWNER.to_owned()) }
}

/// The token of a page before.
fn token_of(text: Option<&str>) -> S3Result<Option<ListToken>> {
    match text {
        None => Ok(None),
        Some(text) => match ListToken::from_text(text) {
            None => Err(s3_error!(InvalidArgument, "the continuation token is not of this endpoint")),
            token => Ok(token),
        },
    }
}

/// The condition of a request that writes an object.
fn write_condition(if_match: Option<ETagCondition>, if_none_match: Option<&ETagCondition>) -> S3Result<WriteCondition> {
    match if_none_match {
        None => Ok(WriteCondition { absent: false, etag: if_match }),
        Some(ETagCondition::Any) if if_match.is_none() => Ok(WriteCondition { absent: true, etag: None }),
        Some(_) => Err(s3_error!(NotImplemented, "writes take If-Match, or If-None-Match: *")),
    }
}

/// A condition that the library does not read.
fn etag_condition(headers: &http::HeaderMap, name: HeaderName) -> S3Result<Option<ETagCondition>> {
    let condition = headers.get(&name).map(|value| ETagCondition::parse_http_header(value.as_bytes()));
    condition.transpose().map_err(|_| s3_error!(InvalidArgument, "{name} has no etag"))
}

/// The headers of a request that are stored with the object.
fn headers_to_store<T>(request: &S3Request<T>) -> S3Result<ObjectHeaders> {
    let mut headers = headers_of_request(&request.headers)?;
    if let Some(GivenExpires(value)) = request.extensions.get()
        && let Ok(text) = value.to_str()
    {
        headers.0.insert(EXPIRES.as_str().to_owned(), text.to_owned());
    }
    Ok(headers)
}

/// How the bytes of an object lie in the body of a request.
fn framing_of<T>(request: &mut S3Request<T>) -> BodyFraming {
    let decoded = request.trailing_headers.take().or_else(|| request.extensions.remove::<TrailingHeaders>());
    BodyFraming::of(&request.headers, decoded)
}

/// The URL of the object of a request, as the client has reached it.
fn location_of<T>(scheme: &str, request: &S3Request<T>) -> Option<String> {
    let host = request.headers.get(HOST)?.to_str().ok()?;
    Some(format!("{scheme}://{host}{}", request.uri.path()))
}

fn trailer_of(headers: &http::HeaderMap) -> Option<String> {
    headers.get("x-amz-trailer").and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Conditions and attributes of requests that have the same fields in different types.
macro_rules! checksums_of {
    ($input:ident) => {
        Checksum {
            checksum_crc32: $input.checksum_crc32.take(),
            checksum_crc32c: $input.checksum_crc32c.take(),
            checksum_crc64nvme: $input.checksum_crc64nvme.take(),
            checksum_sha1: $input.checksum_sha1.take(),
            checksum_sha256: $input.checksum_sha256.take(),
            ..Checksum::default()
        }
    };
}

macro_rules! conditions_of {
    ($input:ident) => {
        ReadConditions {
            if_match: $input.if_match,
            if_none_match: $input.if_none_match,
            if_modified_since: $input.if_modified_since,
            if_unmodified_since: $input.if_unmodified_since,
        }
    };
}

macro_rules! copy_conditions_of {
    ($input:ident) => {
        ReadConditions {
            if_match: $input.copy_source_if_match,
            if_none_match: $input.copy_source_if_none_match,
            if_modified_since: $input.copy_source_if_modified_since,
            if_unmodified_since: $input.copy_source_if_unmodified_since,
        }
    };
}

#[async_trait]
impl S3 for BucketService {
    async fn list_buckets(&self, request: S3Request<ListBucketsInput>) -> S3Result<S3Response<ListBucketsOutput>> {
        let rights = ClientRights::of_request(&request.extensions)?;
        let buckets = self.buckets.values().filter(|bucket| rights.has_bucket(&bucket.name)).map(|bucket| Bucket {
            name: Some(bucket.name.clone()),
            creation_date: Some(timestamp(bucket.opened)),
            ..Bucket::default()
        });
        let buckets = Some(buckets.collect());
        Ok(S3Response::new(ListBucketsOutput { buckets, owner: Some(owner()), ..ListBucketsOutput::default() }))
    }

    async fn head_bucket(&self, request: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        self.bucket(&request.extensions, &request.input.bucket)?;
        let bucket_region = Some(BUCKET_REGION.to_owned());
        Ok(S3Response::new(HeadBucketOutput { bucket_region, ..HeadBucketOutput::default() }))
    }

    async fn get_bucket_location(
        &self,
        request: S3Request<GetBucketLocationInput>,
    ) -> S3Result<S3Response<GetBucketLocationOutput>> {
        self.bucket(&request.extensions, &request.input.bucket)?;
        Ok(S3Response::new(GetBucketLocationOutput::default()))
    }

    /// Without versions, which clients take from the empty answer.
    async fn get_bucket_versioning(
        &self,
        request: S3Request<GetBucketVersioningInput>,
    ) -> S3Result<S3Response<GetBucketVersioningOutput>> {
        self.bucket(&request.extensions, &request.input.bucket)?;
        Ok(S3Response::new(GetBucketVersioningOutput::default()))
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        let bucket = self.read_bucket(&request.extensions, &input.bucket, &input.key)?;
        let conditions = conditions_of!(input);
        let key = input.key;
        let wanted = WantedBytes::of_request(input.range, input.part_number)?;
        let head = on_thread(move || head_object(&bucket, &key, &conditions)).await?;
        let part = answer_range(wanted, head.size)?;
        let output = HeadObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: i64::try_from(part.end - part.start).ok(),
            content_range: part.content_range,
            content_type: Some(head.content_type),
            e_tag: Some(head.etag),
            last_modified: Some(timestamp(head.modified)),
            ..HeadObjectOutput::default()
        };
        let mut answer = S3Response::new(output);
        show_headers(&head.headers, &mut answer.headers);
        Ok(answer)
    }

    /// No tags: clients read them before they copy an object in parts.
    async fn get_object_tagging(
        &self,
        request: S3Request<GetObjectTaggingInput>,
    ) -> S3Result<S3Response<GetObjectTaggingOutput>> {
        let GetObjectTaggingInput { bucket, key, version_id, .. } = request.input;
        check_version(version_id.as_deref())?;
        let bucket = self.read_bucket(&request.extensions, &bucket, &key)?;
        on_thread(move || head_object(&bucket, &key, &ReadConditions::default())).await?;
        Ok(S3Response::new(GetObjectTaggingOutput::default()))
    }

    async fn get_object(&self, request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let if_range = request.headers.get(http::header::IF_RANGE).and_then(|value| value.to_str().ok());
        let if_range = if_range.map(str::to_owned);
        let input = request.input;
        let bucket = self.read_bucket(&request.extensions, &input.bucket, &input.key)?;
        let shown = wanted_headers(&input);
        let conditions = conditions_of!(input);
        let wanted = WantedBytes::of_request(input.range, input.part_number)?;
        let read = ReadRequest { key: input.key, wanted, if_range, conditions };
        let memory = Arc::clone(&self.memory);
        let ObjectBody { head, content_len, content_range, stream } =
            on_thread(move || open_object(&bucket, &memory, &read)).await?;
        self.stats.s3.read_bytes.add(content_len);
        let body = match stream.into_single_piece() {
            Ok(bytes) => StreamingBlob::from(s3s::Body::from(bytes)),
            Err(stream) => StreamingBlob::new(stream),
        };
        let output = GetObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            body: Some(body),
            content_length: i64::try_from(content_len).ok(),
            content_range,
            content_type: Some(shown.0.get(CONTENT_TYPE).cloned().unwrap_or(head.content_type)),
            e_tag: Some(head.etag),
            last_modified: Some(timestamp(head.modified)),
            ..GetObjectOutput::default()
        };
        let mut answer = S3Response::new(output);
        show_headers(&head.headers, &mut answer.headers);
        show_headers(&shown, &mut answer.headers);
        Ok(answer)
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = request.input;
        let prefix = input.prefix.as_deref().unwrap_or_default();
        let bucket = self.read_bucket(&request.extensions, &input.bucket, prefix)?;
        let encoding = NameEncoding::new(input.encoding_type.as_ref())?;
        let token = token_of(input.continuation_token.as_deref().filter(|token| !token.is_empty()))?;
        let max_keys = page_keys(input.max_keys)?;
        let wanted = ListRequest {
            prefix: input.prefix.clone().unwrap_or_default(),
            delimiter: input.delimiter.clone().unwrap_or_default(),
            start_after: input.start_after.clone().unwrap_or_default(),
            token,
            max_keys,
        };
        let page = self.list_page(bucket, wanted).await?;
        let key_count = page.items.len();
        let parts = PageParts::new(page.items, encoding, input.fetch_owner == Some(true));
        let output = ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: Some(encoding.write(&input.prefix.unwrap_or_default())),
            max_keys: i32::try_from(max_keys).ok(),
            key_count: i32::try_from(key_count).ok(),
            continuation_token: input.continuation_token,
            is_truncated: Some(page.next.is_some()),
            next_continuation_token: page.next.map(|token| token.to_text()),
            contents: Some(parts.contents),
            common_prefixes: Some(parts.common_prefixes),
            delimiter: input.delimiter.map(|delimiter| encoding.write(&delimiter)),
            encoding_type: input.encoding_type,
            start_after: input.start_after.map(|key| encoding.write(&key)),
            ..ListObjectsV2Output::default()
        };
        Ok(S3Response::new(output))
    }

    async fn list_objects(&self, request: S3Request<ListObjectsInput>) -> S3Result<S3Response<ListObjectsOutput>> {
        let input = request.input;
        let prefix = input.prefix.as_deref().unwrap_or_default();
        let bucket = self.read_bucket(&request.extensions, &input.bucket, prefix)?;
        let encoding = NameEncoding::new(input.encoding_type.as_ref())?;
        let max_keys = page_keys(input.max_keys)?;
        let wanted = ListRequest {
            prefix: input.prefix.clone().unwrap_or_default(),
            delimiter: input.delimiter.clone().unwrap_or_default(),
            start_after: input.marker.clone().unwrap_or_default(),
            token: None,
            max_keys,
        };
        let page = self.list_page(bucket, wanted).await?;
        let parts = PageParts::new(page.items, encoding, true);
        let output = ListObjectsOutput {
            name: Some(input.bucket),
            prefix: Some(encoding.write(&input.prefix.unwrap_or_default())),
            marker: Some(encoding.write(&input.marker.unwrap_or_default())),
            max_keys: i32::try_from(max_keys).ok(),
            is_truncated: Some(page.next.is_some()),
            next_marker: page.next.map(|token| encoding.write(&token.last)),
            contents: Some(parts.contents),
            common_prefixes: Some(parts.common_prefixes),
            delimiter: input.delimiter.map(|delimiter| encoding.write(&delimiter)),
            encoding_type: input.encoding_type,
            ..ListObjectsOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn put_object(&self, mut request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let bucket = self.changed_bucket(&request.extensions, &request.input.bucket, &request.input.key)?;
        let len = body_len(&request.headers)?;
        let trailer = trailer_of(&request.headers);
        let headers = Arc::new(headers_to_store(&request)?);
        let framing = framing_of(&mut request);
        let mut input = request.input;
        let condition = write_condition(input.if_match.take(), input.if_none_match.as_ref())?;
        let checks =
            BodyChecks { content_md5: input.content_md5.take(), given: checksums_of!(input), trailer, framing };
        let writer = ObjectWriter::new(bucket, NewObject { key: input.key, headers, condition })?;
        let ReceivedBody { target, rest, checksums: sums } = receive(input.body, len, writer, checks).await?;
        let etag = on_thread(move || target.publish(|writer| writer.write(&rest))).await?;
        self.stats.s3.write_bytes.add(len);
        let output = PutObjectOutput {
            e_tag: Some(ETag::Strong(etag)),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..PutObjectOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn delete_object(&self, request: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = request.input;
        let bucket = self.changed_bucket(&request.extensions, &input.bucket, &input.key)?;
        on_thread(move || BucketChanges::of(&bucket)?.delete(&input.key, input.if_match.as_ref())).await?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let input = request.input;
        let rights = ClientRights::of_request(&request.extensions)?.clone();
        rights.check_writes()?;
        let bucket = self.bucket(&request.extensions, &input.bucket)?;
        BucketChanges::of(&bucket)?;
        let objects = input.delete.objects;
        if objects.len() > KEYS_MAX as usize {
            return Err(s3_error!(MalformedXML, "a request removes up to {KEYS_MAX} objects"));
        }
        let is_quiet = input.delete.quiet == Some(true);
        let output = on_thread(move || {
            let changes = BucketChanges::of(&bucket)?;
            let mut deleted = Vec::new();
            let mut errors = Vec::new();
            for object in objects {
                let condition = object.e_tag.map(ETagCondition::ETag);
                let removed = rights
                    .check_change(&bucket.name, &object.key)
                    .and_then(|()| check_version(object.version_id.as_deref()))
                    .and_then(|()| changes.delete(&object.key, condition.as_ref()));
                match removed {
                    Ok(()) if is_quiet => {}
                    Ok(()) => deleted.push(DeletedObject { key: Some(object.key), ..DeletedObject::default() }),
                    Err(error) => errors.push(s3s::dto::Error {
                        code: Some(error.code().as_str().to_owned()),
                        key: Some(object.key),
                        message: error.message().map(str::to_owned),
                        ..s3s::dto::Error::default()
                    }),
                }
            }
            Ok(DeleteObjectsOutput { deleted: Some(deleted), errors: Some(errors), ..DeleteObjectsOutput::default() })
        });
        Ok(S3Response::new(output.await?))
    }

    async fn copy_object(&self, request: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        let given = headers_to_store(&request)?;
        let if_match = etag_condition(&request.headers, IF_MATCH)?;
        let condition = write_condition(if_match, etag_condition(&request.headers, IF_NONE_MATCH)?.as_ref())?;
        let input = request.input;
        let bucket = self.changed_bucket(&request.extensions, &input.bucket, &input.key)?;
        let conditions = copy_conditions_of!(input);
        let directive = input.metadata_directive.as_ref().map(MetadataDirective::as_str);
        let replaces = directive == Some(MetadataDirective::REPLACE);
        let is_itself = matches!(&input.copy_source, CopySource::Bucket { bucket, key, .. }
            if **bucket == *input.bucket && **key == *input.key);
        if is_itself && !replaces {
            return Err(s3_error!(
                InvalidRequest,
                "a copy onto itself changes nothing without x-amz-metadata-directive: REPLACE"
            ));
        }
        let source = &input.copy_source;
        let copied = self.copied_range(&request.extensions, source, conditions, CopiedPart::Whole).await?;
        let len = copied.range.end;
        let headers = if replaces { Arc::new(given) } else { copied.headers };
        let writer = ObjectWriter::new(bucket, NewObject { key: input.key, headers, condition })?;
        let etag = on_thread(move || writer.publish(|writer| copy_bytes(copied.range, writer))).await?;
        self.stats.s3.write_bytes.add(len);
        let result = CopyObjectResult {
            e_tag: Some(ETag::Strong(etag)),
            last_modified: Some(timestamp(std::time::SystemTime::now())),
            ..CopyObjectResult::default()
        };
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..CopyObjectOutput::default() }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let headers = Arc::new(headers_to_store(&request)?);
        let input = request.input;
        self.changed_bucket(&request.extensions, &input.bucket, &input.key)?;
        if !matches!(KeyPath::of_key(&input.key), KeyPath::File(_)) {
            return Err(s3_error!(InvalidArgument, "the source can't have a file of this name"));
        }
        let id = self.uploads.begin(&input.bucket, &input.key, headers, &self.staging)?;
        self.show_uploads();
        let output = CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            checksum_algorithm: input.checksum_algorithm,
            checksum_type: input.checksum_type,
            ..CreateMultipartUploadOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn upload_part(&self, mut request: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        self.changed_bucket(&request.extensions, &request.input.bucket, &request.input.key)?;
        let len = body_len(&request.headers)?;
        let trailer = trailer_of(&request.headers);
        let framing = framing_of(&mut request);
        let mut input = request.input;
        let upload = UploadRef { bucket: &input.bucket, key: &input.key, id: &input.upload_id };
        let part = self.uploads.begin_part(upload, input.part_number, len)?;
        let checks =
            BodyChecks { content_md5: input.content_md5.take(), given: checksums_of!(input), trailer, framing };
        let ReceivedBody { mut target, rest, checksums: sums } = receive(input.body.take(), len, part, checks).await?;
        let part = on_thread(move || target.write(&rest).map(|()| target)).await?;
        let upload = UploadRef { bucket: &input.bucket, key: &input.key, id: &input.upload_id };
        let etag = self.uploads.add_part(upload, input.part_number, part, sums.clone())?;
        self.stats.s3.write_bytes.add(len);
        let output = UploadPartOutput {
            e_tag: Some(ETag::Strong(etag)),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..UploadPartOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn upload_part_copy(
        &self,
        request: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        let input = request.input;
        self.changed_bucket(&request.extensions, &input.bucket, &input.key)?;
        let upload = UploadRef { bucket: &input.bucket, key: &input.key, id: &input.upload_id };
        let conditions = copy_conditions_of!(input);
        let part = CopiedPart::of_header(input.copy_source_range.as_deref())?;
        let copied = self.copied_range(&request.extensions, &input.copy_source, conditions, part).await?.range;
        let mut part = self.uploads.begin_part(upload, input.part_number, copied.end - copied.at)?;
        let part = on_thread(move || copy_bytes(copied, &mut part).map(|()| part)).await?;
        let etag = self.uploads.add_part(upload, input.part_number, part, Checksum::default())?;
        let result = CopyPartResult {
            e_tag: Some(ETag::Strong(etag)),
            last_modified: Some(timestamp(std::time::SystemTime::now())),
            ..CopyPartResult::default()
        };
        Ok(S3Response::new(UploadPartCopyOutput { copy_part_result: Some(result), ..UploadPartCopyOutput::default() }))
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let location = location_of(self.scheme, &request);
        let mut input = request.input;
        let bucket = self.changed_bucket(&request.extensions, &input.bucket, &input.key)?;
        let condition = write_condition(input.if_match.take(), input.if_none_match.as_ref())?;
        let of_object = checksums_of!(input);
        let upload = UploadRef { bucket: &input.bucket, key: &input.key, id: &input.upload_id };
        let mut named = Vec::new();
        for mut part in input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default() {
            let number = part.part_number.unwrap_or(0);
            named.push(NamedPart { number, etag: part.e_tag.take(), checksums: checksums_of!(part) });
        }
        let parts = self.uploads.assemble(upload, &named)?;
        let size: u64 = parts.iter().map(|part| part.staged.len).sum();
        if input.mpu_object_size.is_some_and(|wanted| u64::try_from(wanted) != Ok(size)) {
            return Err(s3_error!(
                InvalidRequest,
                "the parts have {size} bytes, and x-amz-mp-object-size another number"
            ));
        }
        let of_client = of_object.clone();
        let headers = self.uploads.headers(upload)?;
        let writer = ObjectWriter::new(bucket, NewObject { key: input.key.clone(), headers, condition })?;
        let etag = on_thread(move || {
            check_object(of_client, &parts)?;
            writer.publish(|writer| {
                parts.iter().try_for_each(|part| part.staged.for_each_piece(&mut |piece| writer.write(piece)))
            })
        });
        let etag = etag.await?;
        // Another request may have ended the upload meanwhile.
        let _ = self.uploads.end(upload);
        self.show_uploads();
        let output = CompleteMultipartUploadOutput {
            location,
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(ETag::Strong(etag)),
            checksum_crc32: of_object.checksum_crc32,
            checksum_crc32c: of_object.checksum_crc32c,
            checksum_crc64nvme: of_object.checksum_crc64nvme,
            checksum_sha1: of_object.checksum_sha1,
            checksum_sha256: of_object.checksum_sha256,
            ..CompleteMultipartUploadOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = request.input;
        self.changed_bucket(&request.extensions, &input.bucket, &input.key)?;
        self.uploads.end(UploadRef { bucket: &input.bucket, key: &input.key, id: &input.upload_id })?;
        self.show_uploads();
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_parts(&self, request: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
        let input = request.input;
        self.read_bucket(&request.extensions, &input.bucket, &input.key)?;
        let upload = UploadRef { bucket: &input.bucket, key: &input.key, id: &input.upload_id };
        let max_parts = page_keys(input.max_parts)?;
        let marker = input.part_number_marker.unwrap_or(0);
        let mut parts = self.uploads.parts(upload)?.into_iter().filter(|(number, _)| *number > marker).peekable();
        let mut page = Vec::new();
        while page.len() < max_parts
            && let Some((number, part)) = parts.next()
        {
            page.push(Part {
                part_number: Some(number),
                e_tag: Some(ETag::Strong(part.etag)),
                size: i64::try_from(part.staged.len).ok(),
                last_modified: Some(timestamp(part.modified)),
                checksum_crc32: part.checksums.checksum_crc32,
                checksum_crc32c: part.checksums.checksum_crc32c,
                checksum_crc64nvme: part.checksums.checksum_crc64nvme,
                checksum_sha1: part.checksums.checksum_sha1,
                checksum_sha256: part.checksums.checksum_sha256,
            });
        }
        let is_truncated = parts.peek().is_some();
        let output = ListPartsOutput {
            next_part_number_marker: page.last().and_then(|part| part.part_number).filter(|_| is_truncated),
            parts: Some(page),
            is_truncated: Some(is_truncated),
            part_number_marker: Some(marker),
            max_parts: i32::try_from(max_parts).ok(),
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            ..ListPartsOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = request.input;
        let prefix = input.prefix.unwrap_or_default();
        self.read_bucket(&request.extensions, &input.bucket, &prefix)?;
        let encoding = NameEncoding::new(input.encoding_type.as_ref())?;
        let wanted = UploadsRequest {
            bucket: &input.bucket,
            prefix: &prefix,
            delimiter: input.delimiter.as_deref().unwrap_or_default(),
            after_key: input.key_marker.as_deref().unwrap_or_default(),
            after_id: input.upload_id_marker.as_deref().unwrap_or_default(),
            max_items: page_keys(input.max_uploads)?,
        };
        let page = self.uploads.list(&wanted);
        let mut uploads = Vec::new();
        let mut common_prefixes = Vec::new();
        for item in page.items {
            match item {
                ListedUpload::Prefix(prefix) => {
                    common_prefixes.push(CommonPrefix { prefix: Some(encoding.write(&prefix)) });
                }
                ListedUpload::Upload(upload) => uploads.push(MultipartUpload {
                    key: Some(encoding.write(&upload.key)),
                    upload_id: Some(upload.id),
                    initiated: Some(upload.initiated),
                    ..MultipartUpload::default()
                }),
            }
        }
        let output = ListMultipartUploadsOutput {
            is_truncated: Some(page.next.is_some()),
            next_key_marker: page.next.as_ref().map(|next| encoding.write(&next.key)),
            next_upload_id_marker: page.next.and_then(|next| next.id),
            uploads: Some(uploads),
            common_prefixes: Some(common_prefixes),
            max_uploads: i32::try_from(wanted.max_items).ok(),
            prefix: Some(encoding.write(&prefix)),
            bucket: Some(input.bucket),
            delimiter: input.delimiter.map(|delimiter| encoding.write(&delimiter)),
            key_marker: input.key_marker.map(|key| encoding.write(&key)),
            upload_id_marker: input.upload_id_marker,
            encoding_type: input.encoding_type,
            ..ListMultipartUploadsOutput::default()
        };
        Ok(S3Response::new(output))
    }
}
