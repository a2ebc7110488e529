//! Requests that change a bucket, one attempt at a time: objects and their parts, copies and removals, each with its
//! condition. It deliberately retries nothing, and knows neither files nor folders.

use crate::backend::{RawObject, RawPage, RequestFailure, RetryHint};
use crate::request_options::{OptionHeaders, STORAGE_CLASS};
use crate::s3::{S3Backend, etag_of, header_text};
use crate::s3_wire::{self, bare_etag, encode_path, encode_query};
use crate::write_backend::{
    AnswerProgress, CopySource, ObjectAttributes, ObjectBody, ObjectWriteBackend, StoredObject, UploadedPart,
    WriteCondition,
};
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderName, IF_MATCH, IF_NONE_MATCH, LAST_MODIFIED};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use object_store::client::HttpResponse;
use reqsign_core::hash::base64_encode;
use spurline_types::{CONTENT_HEADERS, ErrorKind, USER_METADATA_PREFIX};
use std::ops::Range;
use std::time::{Duration, SystemTime};

const COPY_SOURCE: HeaderName = HeaderName::from_static("x-amz-copy-source");
const COPY_SOURCE_IF_MATCH: HeaderName = HeaderName::from_static("x-amz-copy-source-if-match");
const COPY_SOURCE_RANGE: HeaderName = HeaderName::from_static("x-amz-copy-source-range");
const METADATA_DIRECTIVE: HeaderName = HeaderName::from_static("x-amz-metadata-directive");
const CHECKSUM_CRC64NVME: HeaderName = HeaderName::from_static("x-amz-checksum-crc64nvme");
/// Most keys of one listing.
const KEYS_PER_PAGE: usize = 1000;

/// One request: its name for messages, and its parts.
struct ChangeRequest<'a> {
    what: String,
    method: Method,
    key: &'a str,
    /// Sorted by name, percent-encoded.
    query: String,
    headers: HeaderMap,
    /// In one piece or several.
    body: Vec<Bytes>,
}

impl<'a> ChangeRequest<'a> {
    fn new(what: String, method: Method, key: &'a str) -> Self {
        ChangeRequest { what, method, key, query: String::new(), headers: HeaderMap::new(), body: Vec::new() }
    }

    fn header(mut self, name: HeaderName, value: &str) -> Result<Self, RequestFailure> {
        let value = HeaderValue::from_bytes(value.as_bytes())
            .map_err(|e| RequestFailure::fatal(ErrorKind::Invalid, format!("{}: {name}: {e}", self.what)))?;
        self.headers.insert(name, value);
        Ok(self)
    }

    fn condition(self, condition: &WriteCondition) -> Result<Self, RequestFailure> {
        match condition {
            WriteCondition::None => Ok(self),
            WriteCondition::Absent => self.header(IF_NONE_MATCH, "*"),
            WriteCondition::Version(etag) => self.header(IF_MATCH, &format!("\"{etag}\"")),
        }
    }

    /// The attributes of the object that the request makes, and how the store keeps it.
    fn attributes(mut self, options: &OptionHeaders, attributes: &ObjectAttributes) -> Result<Self, RequestFailure> {
        let kept = options.add_to_written(&mut self.headers, attributes.storage_class.as_deref());
        kept.map_err(|error| RequestFailure { error, advice: RetryHint::Never })?;
        for (name, value) in &attributes.content {
            self = self.header(HeaderName::from_static(name), value)?;
        }
        for (name, value) in &attributes.user {
            let name = HeaderName::try_from(format!("{USER_METADATA_PREFIX}{name}"))
                .map_err(|e| RequestFailure::fatal(ErrorKind::Invalid, format!("{}: {name}: {e}", self.what)))?;
            self = self.header(name, value)?;
        }
        Ok(self)
    }

    /// A body whose bytes the store checks.
    fn checked_body(self, body: &ObjectBody) -> Result<Self, RequestFailure> {
        let checked = self.header(CHECKSUM_CRC64NVME, &base64_encode(&body.checksum().to_be_bytes()))?;
        Ok(ChangeRequest { body: body.pieces().to_vec(), ..checked })
    }
}

impl S3Backend {
    /// Sends a request; an answer that is not a success is a failure.
    async fn change(&self, request: ChangeRequest<'_>) -> Result<HttpResponse, RequestFailure> {
        let ChangeRequest { what, method, key, query, headers, body } = request;
        let region = self.region();
        let mut url = self.object_url(&region, key);
        if !query.is_empty() {
            url.push('?');
            url.push_str(&query);
        }
        let (response, signed_by) = self.send_body(method.clone(), &region, url, headers, &body).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(self.read_refusal(&what, &method, &region, signed_by.as_ref(), response).await)
    }

    /// The document of an answer with status 200, which can be an error that the store found after it had begun to answer.
    async fn changed_document(
        &self,
        what: &str,
        response: HttpResponse,
        progress: &AnswerProgress,
    ) -> Result<Vec<u8>, RequestFailure> {
        let Some(document) = self.read_document_of(response, progress).await else {
            let message = format!("{} ended the connection in the middle of its answer to {what}", self.server_name());
            return Err(RequestFailure::transient(ErrorKind::Unavailable, message));
        };
        match s3_wire::parse_error(document.trim_ascii_start()) {
            Some(error) => Err(self.late_refusal(what, &error)),
            None => Ok(document),
        }
    }

    /// The etag in the headers of an answer.
    fn etag_in_headers(&self, what: &str, response: &HttpResponse) -> Result<String, RequestFailure> {
        let etag = etag_of(response.headers()).map(|etag| bare_etag(&etag).to_owned());
        etag.ok_or_else(|| self.odd_answer(what, "no ETag"))
    }

    /// The etag in a document `root`.
    async fn etag_in_document(
        &self,
        what: &str,
        root: &str,
        response: HttpResponse,
        progress: &AnswerProgress,
    ) -> Result<String, RequestFailure> {
        let document = self.changed_document(what, response, progress).await?;
        let etag = s3_wire::parse_field(document.trim_ascii_start(), root, "ETag");
        let etag = etag.map(|etag| bare_etag(&etag).to_owned()).filter(|etag| !etag.is_empty());
        etag.ok_or_else(|| self.odd_answer(what, "no ETag"))
    }

    fn odd_answer(&self, what: &str, why: &str) -> RequestFailure {
        let message = format!(
            "the answer of {} to {what} has {why}: it is not an S3 server that this mount can write to",
            self.server_name()
        );
        RequestFailure::fatal(ErrorKind::Unsupported, message)
    }

    async fn send_copy(
        &self,
        request: ChangeRequest<'_>,
        from: &CopySource<'_>,
        root: &str,
    ) -> Result<String, RequestFailure> {
        let what = request.what.clone();
        let source = format!("/{}/{}", self.bucket(), encode_path(from.key));
        let mut request = request.header(COPY_SOURCE, &source)?;
        if let Some(etag) = from.etag {
            request = request.header(COPY_SOURCE_IF_MATCH, &format!("\"{etag}\""))?;
        }
        self.options().add_to_copy(&mut request.headers);
        let response = self.change(request).await?;
        self.etag_in_document(&what, root, response, &AnswerProgress::default()).await
    }
}

/// The headers about the content that an answer has.
fn content_headers(headers: &HeaderMap) -> Vec<(&'static str, String)> {
    let present = CONTENT_HEADERS.iter().filter_map(|name| {
        let value = headers.get(*name)?;
        Some((*name, String::from_utf8_lossy(value.as_bytes()).into_owned()))
    });
    present.collect()
}

/// The attributes that an object's own headers hold.
fn user_attributes(headers: &HeaderMap) -> Vec<(String, String)> {
    let of_user = headers.iter().filter_map(|(name, value)| {
        let name = name.as_str().strip_prefix(USER_METADATA_PREFIX)?;
        Some((name.to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
    });
    of_user.collect()
}

impl ObjectWriteBackend for S3Backend {
    fn head_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<StoredObject, RequestFailure>> {
        async move {
            let what = format!("the head of '{key}'");
            let request = ChangeRequest::new(what.clone(), Method::HEAD, key).header(ACCEPT_ENCODING, "gzip")?;
            let response = self.change(request).await?;
            let headers = response.headers();
            let size = header_text(headers, http::header::CONTENT_LENGTH).and_then(|v| v.parse().ok());
            let mtime = header_text(headers, LAST_MODIFIED).and_then(|v| s3_wire::parse_time(&v));
            let raw = RawObject {
                key: key.to_owned(),
                size: size.ok_or_else(|| self.odd_answer(&what, "no length"))?,
                mtime: mtime.unwrap_or(SystemTime::UNIX_EPOCH),
                etag: etag_of(headers),
            };
            let attributes = ObjectAttributes {
                content: content_headers(headers),
                user: user_attributes(headers),
                storage_class: header_text(headers, STORAGE_CLASS),
            };
            Ok(StoredObject { raw, attributes })
        }
        .boxed()
    }

    fn list_below<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> BoxFuture<'a, Result<RawPage, RequestFailure>> {
        self.list_page(prefix, token, KEYS_PER_PAGE, false).boxed()
    }

    fn read_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(Vec<u8>, String), RequestFailure>> {
        async move {
            let what = format!("the read of '{key}'");
            let request = ChangeRequest::new(what.clone(), Method::GET, key).header(ACCEPT_ENCODING, "gzip")?;
            let response = self.change(request).await?;
            let etag = self.etag_in_headers(&what, &response)?;
            match self.read_bytes_of(response).await {
                Some(bytes) => Ok((bytes, etag)),
                None => {
                    let message = format!("{} ended {what} early", self.server_name());
                    Err(RequestFailure::transient(ErrorKind::Unavailable, message))
                }
            }
        }
        .boxed()
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: ObjectBody,
        attributes: &'a ObjectAttributes,
        condition: &'a WriteCondition,
    ) -> BoxFuture<'a, Result<String, RequestFailure>> {
        async move {
            let what = format!("the write of '{key}'");
            let request = ChangeRequest::new(what.clone(), Method::PUT, key)
                .attributes(self.options(), attributes)?
                .condition(condition)?
                .checked_body(&body)?;
            let response = self.change(request).await?;
            self.etag_in_headers(&what, &response)
        }
        .boxed()
    }

    fn begin_upload<'a>(
        &'a self,
        key: &'a str,
        attributes: &'a ObjectAttributes,
    ) -> BoxFuture<'a, Result<String, RequestFailure>> {
        async move {
            let what = format!("the start of an upload of '{key}'");
            let mut request =
                ChangeRequest::new(what.clone(), Method::POST, key).attributes(self.options(), attributes)?;
            request.query.push_str("uploads=");
            let response = self.change(request).await?;
            let document = self.changed_document(&what, response, &AnswerProgress::default()).await?;
            let id = s3_wire::parse_field(&document, "InitiateMultipartUploadResult", "UploadId");
            id.ok_or_else(|| self.odd_answer(&what, "no UploadId"))
        }
        .boxed()
    }

    fn upload_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        body: ObjectBody,
    ) -> BoxFuture<'a, Result<String, RequestFailure>> {
        async move {
            let what = format!("part {number} of '{key}'");
            let mut request = ChangeRequest::new(what.clone(), Method::PUT, key).checked_body(&body)?;
            request.query = format!("partNumber={number}&uploadId={}", encode_query(upload));
            let response = self.change(request).await?;
            self.etag_in_headers(&what, &response)
        }
        .boxed()
    }

    fn copy_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        from: CopySource<'a>,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<String, RequestFailure>> {
        async move {
            let what = format!("the copy of part {number} of '{key}'");
            let range = format!("bytes={}-{}", range.start, range.end - 1);
            let mut request = ChangeRequest::new(what, Method::PUT, key).header(COPY_SOURCE_RANGE, &range)?;
            request.query = format!("partNumber={number}&uploadId={}", encode_query(upload));
            self.send_copy(request, &from, "CopyPartResult").await
        }
        .boxed()
    }

    fn complete<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        parts: &'a [UploadedPart],
        condition: &'a WriteCondition,
        progress: &'a AnswerProgress,
    ) -> BoxFuture<'a, Result<String, RequestFailure>> {
        async move {
            let what = format!("the end of the upload of '{key}'");
            let body = s3_wire::complete_body(parts.iter().map(|part| (part.number, part.etag.as_str())));
            let request = ChangeRequest::new(what.clone(), Method::POST, key)
                .header(CONTENT_TYPE, "application/xml")?
                .condition(condition)?;
            let query = format!("uploadId={}", encode_query(upload));
            let response = self.change(ChangeRequest { query, body: vec![body.into()], ..request }).await?;
            progress.note_bytes();
            self.etag_in_document(&what, "CompleteMultipartUploadResult", response, progress).await
        }
        .boxed()
    }

    fn abort<'a>(&'a self, key: &'a str, upload: &'a str) -> BoxFuture<'a, Result<(), RequestFailure>> {
        async move {
            let mut request = ChangeRequest::new(format!("the end of an upload of '{key}'"), Method::DELETE, key);
            request.query = format!("uploadId={}", encode_query(upload));
            self.change(request).await.map(drop)
        }
        .boxed()
    }

    fn copy<'a>(
        &'a self,
        from: CopySource<'a>,
        to: &'a str,
        attributes: Option<&'a ObjectAttributes>,
        condition: &'a WriteCondition,
        _work_time: Duration,
    ) -> BoxFuture<'a, Result<String, RequestFailure>> {
        async move {
            let what = format!("the copy of '{}' to '{to}'", from.key);
            let mut request = ChangeRequest::new(what, Method::PUT, to).condition(condition)?;
            if let Some(attributes) = attributes {
                request = request.attributes(self.options(), attributes)?.header(METADATA_DIRECTIVE, "REPLACE")?;
            }
            self.send_copy(request, &from, "CopyObjectResult").await
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str, condition: &'a WriteCondition) -> BoxFuture<'a, Result<(), RequestFailure>> {
        async move {
            let request = ChangeRequest::new(format!("the removal of '{key}'"), Method::DELETE, key);
            let response = self.change(request.condition(condition)?).await?;
            match response.status() {
                StatusCode::OK | StatusCode::NO_CONTENT => Ok(()),
                other => Err(self.odd_answer(&format!("the removal of '{key}'"), &format!("the status {other}"))),
            }
        }
        .boxed()
    }
}
