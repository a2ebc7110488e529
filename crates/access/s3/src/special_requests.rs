//! Requests that the library behind the calls would answer otherwise than S3 does: those that want what no object here has are
//! refused, a `Range` that is no range is ignored, dates have three forms, and documents are checked before they count. Knows no bucket.

use crate::access_keys::AccessKeys;
use crate::aws_chunked::BodyFraming;
use crate::errors::other_error;
use crate::http_dates::{has_other_dates, is_standard_date, standardize_dates};
use crate::server::{XML_MAX, remove_signature};
use crate::uploads::{BodyChecks, CHECKSUM_FIELDS, ReceivedBody, body_len, receive};
use async_trait::async_trait;
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPIRES, RANGE};
use http::{Extensions, HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use s3s::dto::{Range, StreamingBlob};
use s3s::route::S3Route;
use s3s::service::S3Service;
use s3s::{Body, S3Error, S3Request, S3Response, S3Result, StdError, s3_error};

/// A header that wants what the endpoint does not have. An answer of success would promise it.
struct UnservedHeader {
    /// The start of the header's name.
    prefix: &'static str,
    /// Values that change nothing, and that some clients always send.
    harmless: &'static [&'static str],
    reason: &'static str,
}

const fn unserved(prefix: &'static str, harmless: &'static [&'static str], reason: &'static str) -> UnservedHeader {
    UnservedHeader { prefix, harmless, reason }
}

/// The first that fits a name counts.
const UNSERVED_HEADERS: [UnservedHeader; 12] = [
    unserved(
        "x-amz-acl",
        &["private", "bucket-owner-read", "bucket-owner-full-control"],
        "objects have no access control lists, and each key of the endpoint has all rights",
    ),
    unserved("x-amz-grant-", &[], "objects have no access control lists, and each key of the endpoint has all rights"),
    unserved("x-amz-storage-class", &["STANDARD"], "the endpoint has the storage class STANDARD only"),
    unserved("x-amz-server-side-encryption-", &[], "the endpoint encrypts nothing, and has no keys for that"),
    unserved(
        "x-amz-server-side-encryption",
        &["AES256"],
        "the endpoint encrypts nothing, and has no keys for that; the source decides how bytes are stored",
    ),
    unserved("x-amz-copy-source-server-side-encryption-", &[], "the endpoint decrypts nothing"),
    unserved("x-amz-tagging", &[], "objects have no tags"),
    unserved("x-amz-website-redirect-location", &[], "objects redirect to no other place"),
    unserved("x-amz-object-lock-", &[], "objects have no retention and no legal hold"),
    unserved("x-amz-write-offset-bytes", &[], "an object is written whole, and nothing is appended"),
    unserved("x-amz-rename-source", &[], "a rename is a copy and a removal"),
    unserved("x-amz-if-match-", &[], "a removal has no condition but If-Match"),
];

/// Headers with a choice of these values; a copy without one copies.
const DIRECTIVES: [&str; 2] = ["x-amz-metadata-directive", "x-amz-tagging-directive"];
const DIRECTIVE_VALUES: [&str; 2] = ["COPY", "REPLACE"];

/// The parameter with the version of an object, and the version that an object without versions has.
const VERSION_PARAMETER: &str = "versionId";
const ONLY_VERSION: &str = "null";

/// The error of a version that a request names.
///
/// # Errors
/// `NotImplemented` for any but the only version of an object.
pub(crate) fn check_version(version: Option<&str>) -> S3Result<()> {
    match version {
        None | Some("" | ONLY_VERSION) => Ok(()),
        Some(_) => Err(s3_error!(NotImplemented, "objects have no versions: leave {VERSION_PARAMETER} out")),
    }
}

/// Why a header, or a parameter of a signed URL in its place, is not served.
fn refusal_of(name: &str, value: &[u8]) -> Option<S3Error> {
    if let Some(directive) = DIRECTIVES.iter().find(|directive| directive.eq_ignore_ascii_case(name)) {
        let is_known = value.is_empty() || DIRECTIVE_VALUES.iter().any(|known| known.as_bytes() == value);
        return (!is_known).then(|| s3_error!(InvalidArgument, "{directive} is {}", DIRECTIVE_VALUES.join(" or ")));
    }
    let found = UNSERVED_HEADERS.iter().find(|header| {
        name.get(..header.prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(header.prefix))
    })?;
    if value.is_empty() || found.harmless.iter().any(|harmless| harmless.as_bytes() == value) {
        return None;
    }
    let harmless = match found.harmless {
        [] => String::new(),
        values => format!(", or send {}", values.join(", ")),
    };
    let name = name.to_ascii_lowercase();
    Some(s3_error!(NotImplemented, "{name}: {}; leave this header out{harmless}", found.reason))
}

/// Why a request is not served.
fn refusal_of_request(uri: &Uri, headers: &HeaderMap) -> Option<S3Error> {
    let by_header = headers.iter().find_map(|(name, value)| refusal_of(name.as_str(), value.as_bytes()));
    let mut parameters = uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    by_header.or_else(|| {
        parameters.find_map(|(name, value)| {
            if name == VERSION_PARAMETER {
                check_version(Some(value)).err()
            } else {
                refusal_of(name, value.as_bytes())
            }
        })
    })
}

/// Whether a read has a `Range` that is no range. S3 ignores it, as well as several ranges, and answers with the whole object.
fn has_no_range(method: &Method, headers: &HeaderMap) -> bool {
    let is_read = matches!(*method, Method::GET | Method::HEAD);
    let Some(range) = headers.get(RANGE).filter(|_| is_read) else { return false };
    match range.to_str() {
        // The library takes a range without any number for the last 0 bytes.
        Ok(text) => text == "bytes=-" || Range::parse(text).is_err(),
        Err(_) => true,
    }
}

/// Whether the body of a request is a document that removes objects or makes one.
fn has_document(method: &Method, uri: &Uri) -> bool {
    is_removal(method, uri) || *method == Method::POST && has_parameter(uri, "uploadId")
}

fn is_removal(method: &Method, uri: &Uri) -> bool {
    *method == Method::POST && has_parameter(uri, "delete")
}

fn has_parameter(uri: &Uri, wanted: &str) -> bool {
    let mut names = uri.query().unwrap_or_default().split('&').map(|pair| pair.split('=').next().unwrap_or_default());
    names.any(|name| name == wanted)
}

/// `Expires` as a client has sent it: S3 stores any text, and the library reads dates of one form.
#[derive(Clone)]
pub(crate) struct GivenExpires(pub HeaderValue);

/// Takes these requests out of the way of all others, once their signatures are checked.
pub(crate) struct SpecialRequests {
    /// The same calls for requests that were checked here.
    pub unchecked: S3Service,
    /// `None` for an endpoint without keys.
    pub keys: Option<AccessKeys>,
}

impl SpecialRequests {
    /// Receives a document, and compares it with the checksums that the client has sent: those of the document, which are in the end of
    /// an upload those of the object.
    async fn receive_document(&self, request: &mut S3Request<Body>) -> S3Result<Bytes> {
        let header = |name: &str| request.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let mut checks = BodyChecks {
            content_md5: header("content-md5"),
            trailer: header("x-amz-trailer"),
            framing: BodyFraming::of(&request.headers, request.trailing_headers.take()),
            ..BodyChecks::default()
        };
        if is_removal(&request.method, &request.uri) {
            for checksum in &CHECKSUM_FIELDS {
                *(checksum.field)(&mut checks.given) = header(checksum.name);
            }
        }
        let len = body_len(&request.headers)?;
        if len > XML_MAX as u64 {
            return Err(other_error(
                StatusCode::PAYLOAD_TOO_LARGE,
                "EntityTooLarge",
                "the document is larger than 4 MiB",
            ));
        }
        let body = StreamingBlob::from(std::mem::take(&mut request.input));
        let ReceivedBody { mut target, rest, .. } = receive(Some(body), len, Vec::new(), checks).await?;
        target.extend(rest);
        Ok(target.into())
    }
}

#[async_trait]
impl S3Route for SpecialRequests {
    fn is_match(&self, method: &Method, uri: &Uri, headers: &HeaderMap, _: &mut Extensions) -> bool {
        has_no_range(method, headers)
            || has_other_dates(headers)
            || headers.get(EXPIRES).is_some_and(|value| !is_standard_date(value))
            || has_document(method, uri)
            || refusal_of_request(uri, headers).is_some()
    }

    async fn check_access(&self, request: &mut S3Request<Body>) -> S3Result<()> {
        if let Some(keys) = &self.keys {
            let rights = keys.rights_of(request.credentials.as_ref())?;
            request.extensions.insert(rights);
        }
        Ok(())
    }

    async fn call(&self, mut request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        if let Some(refusal) = refusal_of_request(&request.uri, &request.headers) {
            return Err(refusal);
        }
        if has_document(&request.method, &request.uri) {
            let document = self.receive_document(&mut request).await?;
            request.headers.insert(CONTENT_LENGTH, document.len().into());
            request.headers.remove(CONTENT_ENCODING);
            request.input = Body::from(document);
        }
        if has_no_range(&request.method, &request.headers) {
            request.headers.remove(RANGE);
        }
        standardize_dates(&mut request.headers);
        let expires = request.headers.remove(EXPIRES);
        let S3Request { input, method, uri, headers, extensions, trailing_headers, .. } = request;
        let mut checked = Request::new(input);
        *checked.method_mut() = method;
        *checked.uri_mut() = uri;
        *checked.headers_mut() = headers;
        *checked.extensions_mut() = extensions;
        if let Some(expires) = expires {
            checked.extensions_mut().insert(GivenExpires(expires));
        }
        if let Some(trailer) = trailing_headers {
            checked.extensions_mut().insert(trailer);
        }
        remove_signature(&mut checked);
        let answered = self.unchecked.call(checked).await;
        let answered = answered.map_err(|error| s3_error!(InternalError, "{}", StdError::from(error)))?;
        let (head, body) = answered.into_parts();
        let mut answer = S3Response::new(body);
        answer.status = Some(head.status);
        answer.headers = head.headers;
        answer.extensions = head.extensions;
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn wishes_are_refused_by_header_or_parameter() {
        for (name, value, part) in [
            ("x-amz-acl", "public-read", Some("x-amz-acl: objects have no access control lists")),
            ("x-amz-acl", "private", None),
            ("x-amz-storage-class", "GLACIER", Some("or send STANDARD")),
            ("x-amz-storage-class", "STANDARD", None),
            ("x-amz-server-side-encryption", "AES256", None),
            ("x-amz-server-side-encryption", "aws:kms", Some("encrypts nothing")),
            ("x-amz-server-side-encryption-customer-algorithm", "AES256", Some("encrypts nothing")),
            ("x-amz-tagging-directive", "REPLACE", None),
            ("x-amz-tagging-directive", "BOGUS", Some("COPY or REPLACE")),
            ("x-amz-metadata-directive", "COPY", None),
            ("x-amz-metadata-directive", "copy", Some("x-amz-metadata-directive is COPY or REPLACE")),
            ("x-amz-tagging", "", None),
            ("x-amz-tagging", "a=b", Some("no tags")),
            ("x-amz-meta-x-amz-acl", "public-read", None),
            ("x-amz", "x", None),
        ] {
            let headers = HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_static(value))]);
            let by_header = refusal_of_request(&Uri::from_static("/b/k"), &headers);
            let uri: Uri = format!("/b/k?{}={value}", name.to_ascii_uppercase()).parse().unwrap();
            let by_parameter = refusal_of_request(&uri, &HeaderMap::new());
            for refusal in [by_header, by_parameter] {
                let text = refusal.map(|refusal| refusal.message().unwrap_or_default().to_owned());
                match part {
                    None => assert_eq!(text, None, "{name}"),
                    Some(part) => assert!(text.unwrap().contains(part), "{name}"),
                }
            }
        }
        for (query, is_refused) in [("versionId=3", true), ("versionId=null", false), ("a&versionId=", false)] {
            let uri: Uri = format!("/b/k?{query}").parse().unwrap();
            assert_eq!(refusal_of_request(&uri, &HeaderMap::new()).is_some(), is_refused, "{query}");
        }
    }

    #[test]
    fn ranges_that_are_none_are_found() {
        let is_ignored = |method: Method, range: &'static str| {
            has_no_range(&method, &HeaderMap::from_iter([(RANGE, HeaderValue::from_static(range))]))
        };
        for range in ["bytes=3-1", "abc", "bytes=", "bytes=1-2,4-5", "lines=1-2", "bytes=a-b", "bytes=-"] {
            assert!(is_ignored(Method::GET, range) && is_ignored(Method::HEAD, range), "{range}");
            assert!(!is_ignored(Method::PUT, range));
        }
        for range in ["bytes=0-0", "bytes=4-", "bytes=-7"] {
            assert!(!is_ignored(Method::GET, range), "{range}");
        }
    }
}
