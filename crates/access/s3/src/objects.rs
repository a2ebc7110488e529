//! Attributes and bytes of objects: GetObject and HeadObject. Knows no socket.

use crate::bucket::OpenBucket;
use crate::chunks::{ObjectRange, ObjectStream, PieceMemory, open_stream};
use crate::conditions::{ReadConditions, strong_etag, whole_seconds};
use crate::errors::{other_error, volume_error};
use crate::http_dates::parse_http_date;
use crate::keys::KeyPath;
use crate::metadata::{CONTENT_TYPE, FOLDER_TYPE, type_by_name};
use crate::uploads::UPLOAD_PARTS_MAX;
use http::StatusCode;
use s3s::dto::{ETag, Range, Timestamp};
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};
use spurline_types::{Error, ErrorKind, FileKind, ObjectAttr, ObjectHeaders};
use std::sync::Arc;
use std::time::SystemTime;

/// How often an object that other writers replace meanwhile is opened.
const OPEN_ATTEMPTS: usize = 5;

/// A read of an object.
pub(crate) struct ReadRequest {
    pub key: String,
    pub wanted: WantedBytes,
    /// `If-Range`: the range counts for this version only.
    pub if_range: Option<String>,
    pub conditions: ReadConditions,
}

/// What headers show of an object.
#[derive(Debug, Clone)]
pub(crate) struct ObjectHead {
    pub size: u64,
    pub etag: ETag,
    pub modified: SystemTime,
    pub content_type: String,
    /// Stored content headers and metadata.
    pub headers: Arc<ObjectHeaders>,
}

/// The answer to a read.
pub(crate) struct ObjectBody {
    pub head: ObjectHead,
    /// The bytes of the answer, and the header that names them.
    pub content_len: u64,
    pub content_range: Option<String>,
    pub stream: ObjectStream,
}

/// An object that a key leads to.
struct FoundObject<'a> {
    path: &'a str,
    attr: ObjectAttr,
    etag: ETag,
}

impl FoundObject<'_> {
    fn check(&self, conditions: &ReadConditions) -> S3Result<()> {
        conditions.check(self.etag.value(), self.attr.mtime)
    }

    /// Whether `If-Range` names this version, by its etag or its time.
    fn is_version(&self, named: &str) -> bool {
        match parse_http_date(named) {
            Some(time) => whole_seconds(self.attr.mtime) == time,
            None => named.trim_matches('"') == self.etag.value(),
        }
    }

    fn is_folder(&self) -> bool {
        self.attr.kind == FileKind::Directory
    }

    /// The bytes of the object; a folder has none.
    fn size(&self) -> u64 {
        if self.is_folder() { 0 } else { self.attr.size }
    }

    fn head(&self, headers: Arc<ObjectHeaders>) -> ObjectHead {
        let type_by_name = if self.is_folder() { FOLDER_TYPE } else { type_by_name(self.path) };
        let content_type = headers.0.get(CONTENT_TYPE).cloned().unwrap_or_else(|| type_by_name.to_owned());
        ObjectHead { size: self.size(), etag: self.etag.clone(), modified: self.attr.mtime, content_type, headers }
    }
}

fn find<'a>(bucket: &OpenBucket, key: &'a str) -> S3Result<FoundObject<'a>> {
    let key = KeyPath::of_key(key);
    let attr = bucket.lookup_key(key).map_err(|error| volume_error(&error))?;
    let path = key.path();
    let etag = strong_etag(&bucket.etag(path.as_bytes(), &attr));
    Ok(FoundObject { path, attr, etag })
}

/// The attributes of an object; blocks.
///
/// # Errors
/// `NoSuchKey`; those of the conditions and of the volume.
pub(crate) fn head_object(bucket: &OpenBucket, key: &str, conditions: &ReadConditions) -> S3Result<ObjectHead> {
    let found = find(bucket, key)?;
    found.check(conditions)?;
    Ok(found.head(bucket.headers_of(found.path, &found.attr)))
}

pub(crate) struct AnswerRange {
    pub start: u64,
    pub end: u64,
    pub content_range: Option<String>,
}

/// The bytes of an object of `size` bytes that a request wants.
///
/// # Errors
/// 416 for a range past the end.
pub(crate) fn answer_range(wanted: WantedBytes, size: u64) -> S3Result<AnswerRange> {
    let range = match wanted {
        WantedBytes::Range(range) => range,
        WantedBytes::OnlyPart if size > 0 => Range::Int { first: 0, last: None },
        // No range names the bytes of an empty object.
        WantedBytes::OnlyPart | WantedBytes::Whole => {
            return Ok(AnswerRange { start: 0, end: size, content_range: None });
        }
    };
    let part = range.check(size).map_err(|_| unsatisfiable(size))?;
    let content_range = Some(format!("bytes {}-{}/{size}", part.start, part.end.saturating_sub(1)));
    if part.is_empty() {
        return Err(unsatisfiable(size));
    }
    Ok(AnswerRange { start: part.start, end: part.end, content_range })
}

/// What a request wants of an object.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WantedBytes {
    Whole,
    Range(Range),
    /// The only part that an object is shown as: all bytes, with an answer as to a range.
    OnlyPart,
}

impl WantedBytes {
    /// What a range header and a part number name.
    ///
    /// # Errors
    /// `InvalidPartNumber` for another part; `InvalidArgument` for a number that no part has; `InvalidRequest` for a range and a part.
    pub fn of_request(range: Option<Range>, part: Option<i32>) -> S3Result<Self> {
        match (range, part) {
            (None, None) => Ok(WantedBytes::Whole),
            (Some(range), None) => Ok(WantedBytes::Range(range)),
            (Some(_), Some(_)) => Err(s3_error!(InvalidRequest, "a request names a range or a part")),
            (None, Some(1)) => Ok(WantedBytes::OnlyPart),
            (None, Some(2..=UPLOAD_PARTS_MAX)) => {
                let why = "the object is shown as one part";
                Err(other_error(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidPartNumber", why))
            }
            (None, Some(_)) => Err(s3_error!(InvalidArgument, "part numbers are 1 to {UPLOAD_PARTS_MAX}")),
        }
    }
}

fn unsatisfiable(size: u64) -> S3Error {
    let mut error = s3_error!(InvalidRange, "the object has {size} bytes");
    if let Ok(value) = http::HeaderValue::try_from(format!("bytes */{size}")) {
        error.set_headers([(http::header::CONTENT_RANGE, value)].into_iter().collect());
    }
    error
}

/// Opens an object, with the first bytes of the answer; blocks. An object that is replaced between lookup and read is looked up
/// again.
///
/// # Errors
/// `NoSuchKey`; those of the range, the conditions and the volume.
pub(crate) fn open_object(
    bucket: &Arc<OpenBucket>,
    memory: &Arc<PieceMemory>,
    request: &ReadRequest,
) -> S3Result<ObjectBody> {
    for _ in 1..OPEN_ATTEMPTS {
        match try_open(bucket, memory, request) {
            // The lookup that follows is newer than this change of another writer.
            Err(OpenFailure::Read(error)) if error.kind() == ErrorKind::Stale => bucket.note_change(),
            opened => return opened.map_err(S3Error::from),
        }
    }
    try_open(bucket, memory, request).map_err(S3Error::from)
}

enum OpenFailure {
    Refused(S3Error),
    Read(Error),
}

impl From<S3Error> for OpenFailure {
    fn from(error: S3Error) -> Self {
        OpenFailure::Refused(error)
    }
}

impl From<OpenFailure> for S3Error {
    fn from(failure: OpenFailure) -> Self {
        match failure {
            OpenFailure::Refused(error) => error,
            OpenFailure::Read(error) => volume_error(&error),
        }
    }
}

fn try_open(
    bucket: &Arc<OpenBucket>,
    memory: &Arc<PieceMemory>,
    request: &ReadRequest,
) -> Result<ObjectBody, OpenFailure> {
    let found = find(bucket, &request.key)?;
    found.check(&request.conditions)?;
    let is_other_version = request.if_range.as_ref().is_some_and(|version| !found.is_version(version));
    let wanted = if is_other_version { WantedBytes::Whole } else { request.wanted };
    // Programs that read a bucket of millions of objects once get each by one request.
    let headers = match &bucket.writes {
        Some(_) => bucket.headers_of(found.path, &found.attr),
        None => bucket.kept_headers_of(found.path, &found.attr),
    };
    let head = found.head(headers);
    let AnswerRange { start, end, content_range } = answer_range(wanted, head.size)?;
    let object = Arc::new(bucket.object_ref(found.path, &found.attr));
    let range = ObjectRange { bucket: Arc::clone(bucket), object, at: start, end, memory: Arc::clone(memory) };
    let stream = open_stream(range).map_err(OpenFailure::Read)?;
    Ok(ObjectBody { head, content_len: end - start, content_range, stream })
}

/// How much of an object is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopiedPart {
    Whole,
    /// From the first byte to the last; the object has to have both.
    Bytes {
        first: u64,
        last: u64,
    },
}

impl CopiedPart {
    /// The part that `x-amz-copy-source-range` names.
    ///
    /// # Errors
    /// `InvalidArgument` for anything but `bytes=FIRST-LAST`.
    pub fn of_header(range: Option<&str>) -> S3Result<Self> {
        let Some(range) = range else { return Ok(CopiedPart::Whole) };
        match Range::parse(range) {
            Ok(Range::Int { first, last: Some(last) }) => Ok(CopiedPart::Bytes { first, last }),
            _ => Err(s3_error!(InvalidArgument, "x-amz-copy-source-range is not of the form bytes=FIRST-LAST")),
        }
    }

    /// The bytes of an object of this size.
    fn of_size(self, size: u64) -> S3Result<std::ops::Range<u64>> {
        match self {
            CopiedPart::Whole => Ok(0..size),
            CopiedPart::Bytes { first, last } if last < size => Ok(first..last + 1),
            CopiedPart::Bytes { .. } => Err(unsatisfiable(size)),
        }
    }
}

/// The object that a copy is made from.
pub(crate) struct CopiedObject {
    pub range: ObjectRange,
    pub headers: Arc<ObjectHeaders>,
}

/// Finds an object that a copy is made from; blocks.
///
/// # Errors
/// `NoSuchKey`; those of the range and the conditions, where 304 is 412.
pub(crate) fn copied_range(
    bucket: &Arc<OpenBucket>,
    memory: &Arc<PieceMemory>,
    key: &str,
    conditions: &ReadConditions,
    part: CopiedPart,
) -> S3Result<CopiedObject> {
    let found = find(bucket, key)?;
    if found.check(conditions).is_err() {
        return Err(S3ErrorCode::PreconditionFailed.into());
    }
    let bytes = part.of_size(found.size())?;
    let object = Arc::new(bucket.object_ref(found.path, &found.attr));
    let memory = Arc::clone(memory);
    let range = ObjectRange { bucket: Arc::clone(bucket), object, at: bytes.start, end: bytes.end, memory };
    Ok(CopiedObject { range, headers: bucket.headers_of(found.path, &found.attr) })
}

/// A time as headers and listings show it.
pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::from(time.max(SystemTime::UNIX_EPOCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copied_parts_are_not_cut() {
        let bytes = |header: &str, size| CopiedPart::of_header(Some(header)).and_then(|part| part.of_size(size));
        assert_eq!(bytes("bytes=1-4", 5).unwrap(), 1..5);
        for (range, code) in [
            ("bytes=1-5", S3ErrorCode::InvalidRange),
            ("bytes=5-5", S3ErrorCode::InvalidRange),
            ("bytes=1-", S3ErrorCode::InvalidArgument),
            ("bytes=-2", S3ErrorCode::InvalidArgument),
            ("bytes=2-1", S3ErrorCode::InvalidArgument),
            ("1-2", S3ErrorCode::InvalidArgument),
        ] {
            assert_eq!(*bytes(range, 5).unwrap_err().code(), code, "{range}");
        }
        assert_eq!(CopiedPart::of_header(None).unwrap().of_size(0).unwrap(), 0..0);
    }

    #[test]
    fn ranges_are_cut_at_the_end() {
        let part = |range: &str, size| {
            let range = Range::parse(range).unwrap();
            answer_range(WantedBytes::Range(range), size)
                .ok()
                .map(|answer| (answer.start, answer.end, answer.content_range.unwrap()))
        };
        assert_eq!(part("bytes=0-0", 5), Some((0, 1, "bytes 0-0/5".into())));
        assert_eq!(part("bytes=3-9", 5), Some((3, 5, "bytes 3-4/5".into())));
        assert_eq!(part("bytes=-2", 5), Some((3, 5, "bytes 3-4/5".into())));
        assert_eq!(part("bytes=-9", 5), Some((0, 5, "bytes 0-4/5".into())));
        assert_eq!(part("bytes=2-", 5), Some((2, 5, "bytes 2-4/5".into())));
        assert_eq!(part("bytes=5-", 5), None);
        assert_eq!(part("bytes=-0", 5), None);
        assert_eq!(part("bytes=0-", 0), None);
        assert_eq!(part("bytes=-1", 0), None);
    }

    #[test]
    fn an_object_is_one_part() {
        let part = |number, size| answer_range(WantedBytes::of_request(None, Some(number))?, size);
        let answer = part(1, 5).ok().unwrap();
        assert_eq!((answer.end, answer.content_range.as_deref()), (5, Some("bytes 0-4/5")));
        let answer = part(1, 0).ok().unwrap();
        assert_eq!((answer.end, answer.content_range), (0, None));
        for (number, status, code) in
            [(2, 416, "InvalidPartNumber"), (0, 400, "InvalidArgument"), (-1, 400, "InvalidArgument")]
        {
            let error = part(number, 5).err().unwrap();
            assert_eq!((error.status_code().unwrap().as_u16(), error.code().as_str()), (status, code), "{number}");
        }
        let range = Range::parse("bytes=0-1").unwrap();
        assert_eq!(*WantedBytes::of_request(Some(range), Some(1)).unwrap_err().code(), S3ErrorCode::InvalidRequest);
    }
}
