//! The content headers and the metadata of objects: taken from requests, kept with a file, shown by answers. A bucket keeps the headers
//! themselves; a directory keeps them in an extended attribute. Knows no bytes.

use crate::bucket::OpenBucket;
use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use s3s::dto::GetObjectInput;
use s3s::{S3Result, s3_error};
use spurline_types::{FileKind, ObjectAttr, ObjectHeaders, ObjectId, content_type_of};
use std::collections::HashMap;
use std::sync::Arc;

/// The type of an object whose name suggests none, as S3 has it.
const UNKNOWN_TYPE: &str = "binary/octet-stream";
pub(crate) const FOLDER_TYPE: &str = "application/x-directory";
/// The header with the type.
pub(crate) const CONTENT_TYPE: &str = "content-type";
/// Bytes of names and values of an object's metadata, the limit of S3.
const METADATA_MAX: usize = 2048;
/// The coding of bodies in chunks, which ends with the upload.
const CHUNKED_CODING: &str = "aws-chunked";
/// Versions of objects whose headers are kept.
const KEPT_HEADERS_MAX: usize = 4096;

/// The type that the name of an object suggests.
pub(crate) fn type_by_name(path: &str) -> &'static str {
    content_type_of(path.as_bytes()).unwrap_or(UNKNOWN_TYPE)
}

/// The headers of a request that are stored with the object.
///
/// # Errors
/// `MetadataTooLarge`, `InvalidArgument`.
pub(crate) fn headers_of_request(request: &HeaderMap) -> S3Result<ObjectHeaders> {
    let mut headers = ObjectHeaders::default();
    for name in request.keys().map(HeaderName::as_str).filter(|name| ObjectHeaders::has_place_for(name)) {
        let mut values = Vec::new();
        for value in request.get_all(name) {
            let text = std::str::from_utf8(value.as_bytes());
            values.push(text.map_err(|_| s3_error!(InvalidArgument, "the value of {name} is not UTF-8"))?);
        }
        let mut value = values.join(",");
        if name == "content-encoding" {
            let codings = value.split(',').map(str::trim);
            value = codings.filter(|coding| !coding.eq_ignore_ascii_case(CHUNKED_CODING)).collect::<Vec<_>>().join(",");
        }
        if !value.is_empty() || name.starts_with(spurline_types::USER_METADATA_PREFIX) {
            headers.0.insert(name.to_owned(), value);
        }
    }
    let len: usize = headers.user_metadata().map(|(name, value)| name.len() + value.len()).sum();
    if len > METADATA_MAX {
        return Err(s3_error!(MetadataTooLarge, "the metadata have {len} bytes, and S3 allows {METADATA_MAX}"));
    }
    Ok(headers)
}

/// Adds stored headers to an answer, but for the type.
pub(crate) fn show_headers(stored: &ObjectHeaders, answer: &mut HeaderMap) {
    for (name, value) in stored.0.iter().filter(|(name, _)| *name != CONTENT_TYPE) {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_bytes(value.as_bytes())) {
            answer.insert(name, value);
        }
    }
}

/// The headers that a request for an object wants in place of the stored headers.
pub(crate) fn wanted_headers(input: &GetObjectInput) -> ObjectHeaders {
    let given = [
        (CONTENT_TYPE, &input.response_content_type),
        ("cache-control", &input.response_cache_control),
        ("content-disposition", &input.response_content_disposition),
        ("content-encoding", &input.response_content_encoding),
        ("content-language", &input.response_content_language),
    ];
    ObjectHeaders(given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value.clone()?))).collect())
}

/// The headers of objects that were read from the source, by version.
#[derive(Default)]
pub(crate) struct KeptHeaders(Mutex<HashMap<u128, Arc<ObjectHeaders>>>);

impl OpenBucket {
    /// The headers that are stored with an object, by a request to the source for each version; none while the source does not
    /// answer.
    pub fn headers_of(&self, path: &str, attr: &ObjectAttr) -> Arc<ObjectHeaders> {
        let id = self.version_id(path, attr);
        if let Some(known) = id.and_then(|id| self.headers.get(id)) {
            return known;
        }
        let Ok(mut found) = self.volume.object_headers(path.as_bytes()) else { return Arc::default() };
        found.take_staged();
        let found = Arc::new(found);
        if let Some(id) = id {
            self.headers.insert(id, Arc::clone(&found));
        }
        found
    }

    /// The headers of an object, if an earlier request has read them.
    pub fn kept_headers_of(&self, path: &str, attr: &ObjectAttr) -> Arc<ObjectHeaders> {
        self.version_id(path, attr).and_then(|id| self.headers.get(id)).unwrap_or_default()
    }

    /// What the headers of an object are kept by. The version of a folder does not tell whether the headers have changed.
    fn version_id(&self, path: &str, attr: &ObjectAttr) -> Option<u128> {
        let (seconds, nanos) = spurline_types::unix_time(attr.mtime);
        let version = format!("{} {seconds}.{nanos}", attr.version.settled_text());
        (attr.kind == FileKind::File).then(|| ObjectId::from_text(&self.name, path.as_bytes(), &version).0)
    }
}

impl KeptHeaders {
    fn get(&self, id: u128) -> Option<Arc<ObjectHeaders>> {
        self.0.lock().get(&id).map(Arc::clone)
    }

    fn insert(&self, id: u128, headers: Arc<ObjectHeaders>) {
        let mut kept = self.0.lock();
        if kept.len() >= KEPT_HEADERS_MAX {
            kept.clear();
        }
        kept.insert(id, headers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    #[test]
    fn stored_headers_are_those_of_the_object() {
        let given = request(&[
            ("host", "x"),
            ("content-type", "text/x"),
            ("content-encoding", "aws-chunked, gzip"),
            ("x-amz-meta-a", "1"),
            ("x-amz-meta-a", "2"),
            ("x-amz-meta-empty", ""),
            ("x-amz-meta-name", "größe"),
        ]);
        let stored = headers_of_request(&given).unwrap();
        let expected = [
            ("content-encoding", "gzip"),
            ("content-type", "text/x"),
            ("x-amz-meta-a", "1,2"),
            ("x-amz-meta-empty", ""),
            ("x-amz-meta-name", "größe"),
        ];
        assert!(stored.0.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(expected));
        let mut shown = HeaderMap::new();
        show_headers(&stored, &mut shown);
        assert_eq!(shown.len(), 4);
        assert_eq!(shown["x-amz-meta-name"].as_bytes(), "größe".as_bytes());
        let chunked = headers_of_request(&request(&[("content-encoding", "aws-chunked")])).unwrap();
        assert_eq!(chunked, ObjectHeaders::default());
        assert!(headers_of_request(&request(&[("x-amz-meta-a", &"x".repeat(METADATA_MAX))])).is_err());
    }
}
