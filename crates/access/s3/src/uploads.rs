//! Bodies of requests, passed on and compared with the client's claims. Uploads in parts, with a file without a name for each,
//! which the kernel removes with this process. Knows no source.

use crate::aws_chunked::{BodyFraming, names_chunks};
use crate::client_pace::ClientPace;
use crate::errors::{lost_thread, other_error};
use crate::keys::common_prefix;
use crate::upload_checksums::check_part;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures::StreamExt as _;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Md5, Sha1, Sha256};
use s3s::dto::{Checksum, ETag, StreamingBlob, Timestamp};
use s3s::{Body, S3Error, S3ErrorCode, S3Result, s3_error};
use spurline_sys::random;
use spurline_types::ObjectHeaders;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Bytes that are gathered for a write, and that a body may have in memory.
const GATHERED_BYTES: usize = 128 << 10;
/// Bytes that are read from a file at a time.
const STAGED_PIECE_BYTES: usize = 1 << 20;
/// Bytes of an MD5 digest.
const MD5_LEN: usize = 16;
/// The least length of a part that is not the last, as in S3.
const PART_MIN_BYTES: u64 = 5 << 20;
pub(crate) const UPLOAD_PARTS_MAX: i32 = 10_000;
/// The most uploads in parts at a time.
const UPLOADS_MAX: usize = 1000;
/// An upload without a request for this long is removed.
const UPLOAD_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// A file for bytes, which are appended at reserved places; clones share the file.
#[derive(Clone)]
pub(crate) struct StagingFile(Arc<AppendedFile>);

struct AppendedFile {
    file: File,
    end: AtomicU64,
}

/// Bytes of an upload.
#[derive(Clone)]
pub(crate) struct StagedBytes {
    pub len: u64,
    file: StagingFile,
    offset: u64,
}

impl StagedBytes {
    /// Passes the bytes on, in pieces.
    ///
    /// # Errors
    /// That of `take`; an error of the disk.
    pub fn for_each_piece(&self, take: &mut dyn FnMut(&[u8]) -> S3Result<()>) -> S3Result<()> {
        let mut buffer = vec![0; STAGED_PIECE_BYTES.min(usize::try_from(self.len).unwrap_or(STAGED_PIECE_BYTES))];
        let mut done = 0;
        while done < self.len {
            let piece = buffer.len().min(usize::try_from(self.len - done).unwrap_or(STAGED_PIECE_BYTES));
            self.file.0.file.read_exact_at(&mut buffer[..piece], self.offset + done).map_err(disk_error)?;
            take(&buffer[..piece])?;
            done += piece as u64;
        }
        Ok(())
    }
}

/// A part that is being received.
pub(crate) struct PartWriter {
    file: StagingFile,
    offset: u64,
    written: u64,
}

impl PartWriter {
    /// The bytes that were written.
    pub fn into_staged(self) -> StagedBytes {
        let PartWriter { file, offset, written } = self;
        StagedBytes { len: written, file, offset }
    }
}

impl BodyTarget for PartWriter {
    fn write(&mut self, bytes: &[u8]) -> S3Result<()> {
        self.file.0.file.write_all_at(bytes, self.offset + self.written).map_err(disk_error)?;
        self.written += bytes.len() as u64;
        Ok(())
    }
}

impl BodyTarget for Vec<u8> {
    fn write(&mut self, bytes: &[u8]) -> S3Result<()> {
        self.extend_from_slice(bytes);
        Ok(())
    }
}

fn disk_error(error: io::Error) -> S3Error {
    tracing::warn!("the directory for uploads (--s3-upload-dir): {error}");
    s3_error!(InternalError, "the directory for uploads (--s3-upload-dir): {error}")
}

/// What a client says of a body, to be checked.
#[derive(Default)]
pub(crate) struct BodyChecks {
    pub content_md5: Option<String>,
    pub given: Checksum,
    /// The names of checksums that follow the body.
    pub trailer: Option<String>,
    pub framing: BodyFraming,
}

/// What takes the bytes of a body, in their order.
pub(crate) trait BodyTarget: Send + Sized + 'static {
    /// Takes the next bytes; blocks.
    fn write(&mut self, bytes: &[u8]) -> S3Result<()>;

    /// Ends without the rest of the body; blocks.
    fn discard(self) {}
}

pub(crate) struct ReceivedBody<T> {
    pub target: T,
    /// The last bytes, which the target does not have yet.
    pub rest: Vec<u8>,
    /// The checksums that the client has given.
    pub checksums: Checksum,
}

/// A checksum of S3.
pub(crate) struct ChecksumField {
    /// The header's name.
    pub name: &'static str,
    /// Bytes of the checksum, which a header has in base64.
    len: usize,
    /// The place among the checksums.
    pub field: fn(&mut Checksum) -> &mut Option<String>,
}

pub(crate) const CHECKSUM_FIELDS: [ChecksumField; 5] = [
    ChecksumField { name: "x-amz-checksum-crc32", len: 4, field: |sums| &mut sums.checksum_crc32 },
    ChecksumField { name: "x-amz-checksum-crc32c", len: 4, field: |sums| &mut sums.checksum_crc32c },
    ChecksumField { name: "x-amz-checksum-crc64nvme", len: 8, field: |sums| &mut sums.checksum_crc64nvme },
    ChecksumField { name: "x-amz-checksum-sha1", len: 20, field: |sums| &mut sums.checksum_sha1 },
    ChecksumField { name: "x-amz-checksum-sha256", len: 32, field: |sums| &mut sums.checksum_sha256 },
];

impl ChecksumField {
    /// # Errors
    /// `InvalidRequest` for a text that can be no checksum of this kind.
    pub fn check_form(&self, text: &str) -> S3Result<()> {
        if is_digest(text, self.len) {
            return Ok(());
        }
        Err(s3_error!(InvalidRequest, "the value of {} is no checksum: {} bytes in base64", self.name, self.len))
    }
}

/// Whether a text is a digest of this length in base64.
fn is_digest(text: &str, len: usize) -> bool {
    BASE64_STANDARD.decode(text).is_ok_and(|digest| digest.len() == len)
}

/// The length of a body.
///
/// # Errors
/// `MissingContentLength`.
pub(crate) fn body_len(headers: &HeaderMap) -> S3Result<u64> {
    let number =
        |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
    let decoded = number("x-amz-decoded-content-length");
    if decoded.is_none() && names_chunks(headers) {
        return Err(s3_error!(MissingContentLength, "a body in chunks requires x-amz-decoded-content-length"));
    }
    decoded.or_else(|| number(CONTENT_LENGTH.as_str())).ok_or_else(|| S3ErrorCode::MissingContentLength.into())
}

impl BodyChecks {
    /// Checks the form of what a client says, before the body is received.
    ///
    /// # Errors
    /// `InvalidDigest` for a Content-MD5 that is none, `InvalidRequest` for another checksum that is none.
    fn check_forms(&mut self) -> S3Result<()> {
        if self.content_md5.as_ref().is_some_and(|text| !is_digest(text, MD5_LEN)) {
            return Err(s3_error!(InvalidDigest, "Content-MD5 is no digest: {MD5_LEN} bytes in base64"));
        }
        for checksum in &CHECKSUM_FIELDS {
            if let Some(text) = (checksum.field)(&mut self.given) {
                checksum.check_form(text)?;
            }
        }
        Ok(())
    }

    /// Whether the checksum with this name follows the body.
    fn announces(&self, name: &str) -> bool {
        let trailer = self.trailer.as_deref().unwrap_or_default();
        trailer.split(',').any(|word| word.trim().eq_ignore_ascii_case(name))
    }

    pub fn hasher(&self) -> ChecksumHasher {
        let mut hasher = ChecksumHasher::default();
        if self.given.checksum_crc32.is_some() || self.announces("x-amz-checksum-crc32") {
            hasher.crc32 = Some(Crc32::new());
        }
        if self.given.checksum_crc32c.is_some() || self.announces("x-amz-checksum-crc32c") {
            hasher.crc32c = Some(Crc32c::new());
        }
        if self.given.checksum_crc64nvme.is_some() || self.announces("x-amz-checksum-crc64nvme") {
            hasher.crc64nvme = Some(Crc64Nvme::new());
        }
        if self.given.checksum_sha1.is_some() || self.announces("x-amz-checksum-sha1") {
            hasher.sha1 = Some(Sha1::new());
        }
        if self.given.checksum_sha256.is_some() || self.announces("x-amz-checksum-sha256") {
            hasher.sha256 = Some(Sha256::new());
        }
        hasher
    }

    /// Compares what was received with what the client has said.
    ///
    /// # Errors
    /// `BadDigest`; `InvalidRequest` without an announced checksum.
    pub fn compare(mut self, trailer: &HeaderMap, md5: Option<Md5>, found: &mut Checksum) -> S3Result<Checksum> {
        if let (Some(wanted), Some(md5)) = (&self.content_md5, md5) {
            let md5 = BASE64_STANDARD.encode(md5.finalize());
            if md5 != *wanted {
                return Err(S3ErrorCode::BadDigest.into());
            }
        }
        for ChecksumField { name, field, .. } in CHECKSUM_FIELDS {
            if let Some(value) = trailer.get(name).and_then(|value| value.to_str().ok()) {
                *field(&mut self.given) = Some(value.to_owned());
            } else if self.announces(name) {
                return Err(s3_error!(
                    InvalidRequest,
                    "x-amz-trailer announces {name}, and the body has no such trailer"
                ));
            }
            let wanted = field(&mut self.given);
            let found = field(found);
            if wanted.is_some() && wanted != found {
                return Err(s3_error!(BadDigest, "the bytes do not have the {name} of the request"));
            }
        }
        Ok(self.given)
    }
}

/// The directory for the parts of uploads.
#[derive(Clone)]
pub(crate) struct StagingDir(pub PathBuf);

impl StagingDir {
    fn open(&self) -> S3Result<StagingFile> {
        let file = tempfile::tempfile_in(&self.0).map_err(disk_error)?;
        Ok(StagingFile(Arc::new(AppendedFile { file, end: AtomicU64::new(0) })))
    }

    /// Whether files can be made in the directory.
    pub fn check(path: &Path) -> io::Result<()> {
        tempfile::tempfile_in(path).map(drop)
    }
}

/// Bytes on the way to a target.
struct GatheredBody<T> {
    /// `None` after an error of the target.
    target: Option<T>,
    bytes: Vec<u8>,
}

impl<T: BodyTarget> GatheredBody<T> {
    /// Passes the bytes on, on a thread that may block.
    async fn pass_on(&mut self) -> S3Result<()> {
        let Some(mut target) = self.target.take() else { return Err(lost_target()) };
        let mut bytes = std::mem::take(&mut self.bytes);
        let written = tokio::task::spawn_blocking(move || match target.write(&bytes) {
            Ok(()) => {
                bytes.clear();
                Ok(GatheredBody { target: Some(target), bytes })
            }
            Err(error) => {
                target.discard();
                Err(error)
            }
        });
        *self = written.await.map_err(|error| lost_thread(&error))??;
        Ok(())
    }

    /// Receives a body of `len` bytes, without the rest that is gathered at the end; the checksums of the client.
    async fn receive(&mut self, body: Option<StreamingBlob>, len: u64, mut checks: BodyChecks) -> S3Result<Checksum> {
        checks.check_forms()?;
        let mut framing = std::mem::take(&mut checks.framing);
        let mut hasher = checks.hasher();
        let mut md5 = checks.content_md5.is_some().then(Md5::new);
        let mut received = 0;
        let mut pace = ClientPace::default();
        let mut body = body.unwrap_or_else(|| StreamingBlob::from(Body::empty()));
        loop {
            let begun = Instant::now();
            let next = tokio::time::timeout(pace.wait_left(), body.next()).await;
            let next =
                next.map_err(|_| s3_error!(RequestTimeout, "the client sent almost nothing of the body in a minute"))?;
            let Some(chunk) = next else { break };
            let mut chunk = chunk.map_err(body_error)?;
            pace.note(begun.elapsed(), chunk.len());
            while let Some(piece) = framing.next_piece(&mut chunk)? {
                received += piece.len() as u64;
                if received > len {
                    return Err(s3_error!(IncompleteBody, "the body is longer than its {len} bytes"));
                }
                hasher.update(&piece);
                if let Some(md5) = &mut md5 {
                    md5.update(&piece);
                }
                self.bytes.extend_from_slice(&piece);
                if self.bytes.len() >= GATHERED_BYTES {
                    self.pass_on().await?;
                }
            }
        }
        if received < len {
            return Err(s3_error!(IncompleteBody, "the body ended after {received} of {len} bytes"));
        }
        checks.compare(&framing.finish()?, md5, &mut hasher.finalize())
    }
}

fn lost_target() -> S3Error {
    s3_error!(InternalError, "the bytes of the body have no target any more")
}

/// Receives a body of `len` bytes into `target`, which has taken all of it but the rest when the body is whole and right.
///
/// # Errors
/// `IncompleteBody`, `BadDigest`, `InvalidDigest`, `XAmzContentSHA256Mismatch`, `RequestTimeout`, `InvalidRequest` for a body that is
/// framed otherwise than its headers say, and errors of the target. The target is discarded then.
pub(crate) async fn receive<T: BodyTarget>(
    body: Option<StreamingBlob>,
    len: u64,
    target: T,
    checks: BodyChecks,
) -> S3Result<ReceivedBody<T>> {
    let bytes = Vec::with_capacity(GATHERED_BYTES.min(usize::try_from(len).unwrap_or(GATHERED_BYTES)));
    let mut gathered = GatheredBody { target: Some(target), bytes };
    let received = gathered.receive(body, len, checks).await;
    match (received, gathered.target) {
        (Ok(checksums), Some(target)) => Ok(ReceivedBody { target, rest: gathered.bytes, checksums }),
        (Ok(_), None) => Err(lost_target()),
        (Err(error), None) => Err(error),
        (Err(error), Some(target)) => {
            let discarded = tokio::task::spawn_blocking(move || target.discard());
            discarded.await.map_err(|error| lost_thread(&error))?;
            Err(error)
        }
    }
}

/// The error of a body that ends early, or whose signature is wrong.
fn body_error(error: s3s::StdError) -> S3Error {
    let text = error.to_string();
    if text.contains("Sha256Mismatch") {
        let why = "the body does not have the x-amz-content-sha256 of the request";
        return other_error(StatusCode::BAD_REQUEST, "XAmzContentSHA256Mismatch", why);
    }
    let code = if text.contains("SignatureMismatch") {
        S3ErrorCode::SignatureDoesNotMatch
    } else {
        S3ErrorCode::IncompleteBody
    };
    S3Error::with_message(code, text)
}

/// A part of an upload.
#[derive(Clone)]
pub(crate) struct StagedPart {
    pub staged: StagedBytes,
    pub etag: String,
    pub modified: SystemTime,
    pub checksums: Checksum,
}

struct PartUpload {
    bucket: String,
    key: String,
    /// Content headers and metadata of the new object.
    headers: Arc<ObjectHeaders>,
    initiated: SystemTime,
    last_used: Instant,
    file: StagingFile,
    parts: BTreeMap<i32, StagedPart>,
}

/// A description of an upload in parts.
#[derive(Debug, PartialEq)]
pub(crate) struct UploadEntry {
    pub key: String,
    pub id: String,
    pub initiated: Timestamp,
}

/// Which uploads to list.
pub(crate) struct UploadsRequest<'a> {
    pub bucket: &'a str,
    pub prefix: &'a str,
    pub delimiter: &'a str,
    /// The last key or common prefix of the page before.
    pub after_key: &'a str,
    /// The last upload of that key.
    pub after_id: &'a str,
    pub max_items: usize,
}

/// An upload of a listing, or a prefix for all uploads below.
#[derive(Debug, PartialEq)]
pub(crate) enum ListedUpload {
    Upload(UploadEntry),
    Prefix(String),
}

pub(crate) struct UploadsPage {
    pub items: Vec<ListedUpload>,
    /// `None` for the last page.
    pub next: Option<UploadMarker>,
}

/// Where a page of uploads ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UploadMarker {
    /// A key or a common prefix.
    pub key: String,
    pub id: Option<String>,
}

impl ListedUpload {
    fn marker(&self) -> UploadMarker {
        match self {
            ListedUpload::Upload(upload) => UploadMarker { key: upload.key.clone(), id: Some(upload.id.clone()) },
            ListedUpload::Prefix(prefix) => UploadMarker { key: prefix.clone(), id: None },
        }
    }
}

impl UploadsRequest<'_> {
    /// The page of uploads that are sorted by key and id, and all wanted but for those of the page before.
    fn page_of(&self, uploads: Vec<UploadEntry>) -> UploadsPage {
        let mut page = UploadsPage { items: Vec::new(), next: None };
        if self.max_items == 0 {
            return page;
        }
        for upload in uploads {
            let item = match common_prefix(&upload.key, self.prefix, self.delimiter) {
                // The prefix stands for all uploads below.
                Some(common) if common == self.after_key => continue,
                Some(common) => ListedUpload::Prefix(common),
                None => ListedUpload::Upload(upload),
            };
            if page.items.last() == Some(&item) {
                continue;
            }
            if page.items.len() == self.max_items {
                page.next = page.items.last().map(ListedUpload::marker);
                break;
            }
            page.items.push(item);
        }
        page
    }
}

/// What a client names to complete an upload.
pub(crate) struct NamedPart {
    pub number: i32,
    pub etag: Option<ETag>,
    pub checksums: Checksum,
}

/// The uploads in parts that are under way; clones share them.
#[derive(Clone, Default)]
pub(crate) struct PartUploads(Arc<Mutex<HashMap<String, PartUpload>>>);

/// Which upload a request is about.
#[derive(Clone, Copy)]
pub(crate) struct UploadRef<'a> {
    pub bucket: &'a str,
    pub key: &'a str,
    pub id: &'a str,
}

impl PartUploads {
    /// Begins an upload, and returns its id. Uploads that were not used for a day are removed.
    ///
    /// # Errors
    /// `SlowDown` while there are too many; errors of the disk.
    pub fn begin(&self, bucket: &str, key: &str, headers: Arc<ObjectHeaders>, dir: &StagingDir) -> S3Result<String> {
        let file = dir.open()?;
        let id = format!("{:016x}{:016x}", random(), random());
        let mut uploads = self.0.lock();
        uploads.retain(|_, upload| upload.last_used.elapsed() < UPLOAD_LIFETIME);
        if uploads.len() >= UPLOADS_MAX {
            return Err(s3_error!(SlowDown, "{UPLOADS_MAX} uploads are under way; complete or abort some"));
        }
        let upload = PartUpload {
            bucket: bucket.to_owned(),
            key: key.to_owned(),
            headers,
            initiated: SystemTime::now(),
            last_used: Instant::now(),
            file,
            parts: BTreeMap::new(),
        };
        uploads.insert(id.clone(), upload);
        Ok(id)
    }

    fn on_upload<T>(&self, of: UploadRef<'_>, work: impl FnOnce(&mut PartUpload) -> S3Result<T>) -> S3Result<T> {
        let mut uploads = self.0.lock();
        let upload = uploads.get_mut(of.id).filter(|upload| upload.bucket == of.bucket && upload.key == of.key);
        let upload = upload.ok_or(S3ErrorCode::NoSuchUpload)?;
        upload.last_used = Instant::now();
        work(upload)
    }

    /// Begins the part with this number, of `len` bytes.
    ///
    /// # Errors
    /// `NoSuchUpload`, `InvalidArgument`.
    pub fn begin_part(&self, of: UploadRef<'_>, number: i32, len: u64) -> S3Result<PartWriter> {
        if !(1..=UPLOAD_PARTS_MAX).contains(&number) {
            return Err(s3_error!(InvalidArgument, "part numbers are 1 to {UPLOAD_PARTS_MAX}"));
        }
        self.on_upload(of, |upload| {
            let offset = upload.file.0.end.fetch_add(len, Ordering::Relaxed);
            Ok(PartWriter { file: upload.file.clone(), offset, written: 0 })
        })
    }

    /// Adds a part, or replaces it; returns its etag.
    ///
    /// # Errors
    /// `NoSuchUpload`.
    pub fn add_part(&self, of: UploadRef<'_>, number: i32, part: PartWriter, checksums: Checksum) -> S3Result<String> {
        let etag = format!("{:016x}{:016x}-1", random(), random());
        let staged = part.into_staged();
        let part = StagedPart { staged, etag: etag.clone(), modified: SystemTime::now(), checksums };
        self.on_upload(of, |upload| {
            upload.parts.insert(number, part);
            Ok(etag)
        })
    }

    /// The parts of an upload.
    ///
    /// # Errors
    /// `NoSuchUpload`.
    pub fn parts(&self, of: UploadRef<'_>) -> S3Result<BTreeMap<i32, StagedPart>> {
        self.on_upload(of, |upload| Ok(upload.parts.clone()))
    }

    /// The headers of the new object.
    ///
    /// # Errors
    /// `NoSuchUpload`.
    pub fn headers(&self, of: UploadRef<'_>) -> S3Result<Arc<ObjectHeaders>> {
        self.on_upload(of, |upload| Ok(Arc::clone(&upload.headers)))
    }

    /// The parts of an object, as a client names them, in order.
    ///
    /// # Errors
    /// `NoSuchUpload`, `InvalidPartOrder`, `InvalidPart`, `EntityTooSmall`, `MalformedXML`.
    pub fn assemble(&self, of: UploadRef<'_>, named: &[NamedPart]) -> S3Result<Vec<StagedPart>> {
        if named.is_empty() {
            return Err(s3_error!(MalformedXML, "the request names no part"));
        }
        if named.windows(2).any(|pair| pair[0].number >= pair[1].number) {
            return Err(S3ErrorCode::InvalidPartOrder.into());
        }
        self.on_upload(of, |upload| {
            let mut parts = Vec::new();
            for (index, part) in named.iter().enumerate() {
                let known = upload.parts.get(&part.number).ok_or(S3ErrorCode::InvalidPart)?;
                if part.etag.as_ref().is_some_and(|etag| etag.value() != known.etag) {
                    return Err(S3ErrorCode::InvalidPart.into());
                }
                check_part(part.number, part.checksums.clone(), &known.checksums)?;
                if index + 1 < named.len() && known.staged.len < PART_MIN_BYTES {
                    return Err(s3_error!(EntityTooSmall, "part {} is smaller than 5 MiB", part.number));
                }
                parts.push(known.clone());
            }
            Ok(parts)
        })
    }

    /// Ends an upload.
    ///
    /// # Errors
    /// `NoSuchUpload`.
    pub fn end(&self, of: UploadRef<'_>) -> S3Result<()> {
        self.on_upload(of, |_| Ok(()))?;
        self.0.lock().remove(of.id);
        Ok(())
    }

    /// A page of uploads, in the order of keys and ids.
    pub fn list(&self, wanted: &UploadsRequest<'_>) -> UploadsPage {
        let UploadsRequest { bucket, prefix, after_key, after_id, .. } = wanted;
        let uploads = self.0.lock();
        let mut listed = Vec::new();
        for (id, upload) in uploads.iter() {
            let key = upload.key.as_str();
            let is_behind = key > *after_key || key == *after_key && !after_id.is_empty() && id.as_str() > *after_id;
            if upload.bucket == *bucket && key.starts_with(prefix) && is_behind {
                let initiated = Timestamp::from(upload.initiated);
                listed.push(UploadEntry { key: upload.key.clone(), id: id.clone(), initiated });
            }
        }
        drop(uploads);
        listed.sort_by(|a, b| a.key.cmp(&b.key).then_with(|| a.id.cmp(&b.id)));
        wanted.page_of(listed)
    }

    /// The number of uploads under way.
    pub fn count(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys and prefixes of all pages of uploads of these keys.
    fn listed(keys: &[&str], prefix: &str, delimiter: &str, max_items: usize) -> Vec<String> {
        let initiated = Timestamp::default();
        let uploads = |after: &UploadMarker| {
            let mut uploads = Vec::new();
            for (number, key) in keys.iter().enumerate() {
                let id = format!("{number:03}");
                let is_behind =
                    **key > *after.key || **key == *after.key && after.id.as_ref().is_some_and(|last| id > *last);
                if key.starts_with(prefix) && is_behind {
                    uploads.push(UploadEntry { key: (*key).to_owned(), id, initiated: initiated.clone() });
                }
            }
            uploads
        };
        let mut all = Vec::new();
        let mut after = UploadMarker { key: String::new(), id: None };
        loop {
            let after_id = after.id.as_deref().unwrap_or_default();
            let request = UploadsRequest { bucket: "b", prefix, delimiter, after_key: &after.key, after_id, max_items };
            let page = request.page_of(uploads(&after));
            assert!(page.items.len() <= max_items && (page.next.is_none() || page.items.len() == max_items));
            all.extend(page.items.iter().map(|item| item.marker().key));
            let Some(next) = page.next else { return all };
            after = next;
        }
    }

    #[test]
    fn uploads_are_listed_by_pages_and_prefixes() {
        let keys = ["a", "a", "d/1", "d/2", "d/e/3", "d0", "z/4"];
        for max_items in 1..=8 {
            assert_eq!(listed(&keys, "", "", max_items), keys, "{max_items}");
            assert_eq!(listed(&keys, "", "/", max_items), ["a", "a", "d/", "d0", "z/"], "{max_items}");
            assert_eq!(listed(&keys, "d/", "/", max_items), ["d/1", "d/2", "d/e/"], "{max_items}");
        }
        assert_eq!(listed(&keys, "", "/", 0), [""; 0]);
    }
}
