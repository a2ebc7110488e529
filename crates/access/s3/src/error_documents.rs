//! The documents of errors: each gets a message, and the number of the request. Knows no bucket.

use bytes::Bytes;
use http::Response;
use http::header::CONTENT_LENGTH;
use s3s::Body;

/// Messages of errors that the library behind the calls sends without one.
const ERROR_MESSAGES: [(&str, &str); 14] = [
    ("AccessDenied", "the key of the client does not allow this request, or the request has no signature"),
    ("BadDigest", "the bytes do not have the checksum of the request"),
    ("InvalidAccessKeyId", "the endpoint has no such access key; its keys are in the file of --s3-keys"),
    ("InvalidPart", "a part was not uploaded, or has another etag"),
    ("InvalidPartOrder", "parts are named in the order of their numbers"),
    ("MissingContentLength", "the length of the body is missing"),
    ("NoSuchBucket", "the endpoint has no such bucket; ListBuckets names those it has"),
    ("NoSuchKey", "there is no such object"),
    (
        "NoSuchUpload",
        "there is no such upload: a client has completed or aborted the upload, or the endpoint has ended",
    ),
    ("NotImplemented", "the endpoint does not have this call"),
    ("PreconditionFailed", "a condition of the request does not hold"),
    ("RequestTimeTooSkewed", "the clocks of client and endpoint differ too much"),
    (
        "SignatureDoesNotMatch",
        "the signature is wrong: check the secret of the client, and whether a proxy changes requests",
    ),
    ("SlowDown", "the endpoint is busy: try again later"),
];

/// The document of an error that the library behind the calls would not give.
pub(crate) fn error_document(code: &str, why: &str) -> String {
    format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>{why}</Message></Error>")
}

/// Adds the number of the request to the document of an error, and a message to a document without one.
pub(crate) fn complete_document(answer: &mut Response<Body>, request_id: &str) {
    if !answer.status().is_client_error() && !answer.status().is_server_error() {
        return;
    }
    let Some(bytes) = answer.body().bytes().filter(|bytes| !bytes.is_empty()) else { return };
    let Ok(text) = std::str::from_utf8(&bytes) else { return };
    let Some(complete) = completed(text, request_id) else { return };
    answer.headers_mut().remove(CONTENT_LENGTH);
    *answer.body_mut() = Body::from(Bytes::from(complete));
}

fn completed(text: &str, request_id: &str) -> Option<String> {
    const CODE_END: &str = "</Code>";
    let (_, behind) = text.split_once("<Code>")?;
    let (code, _) = behind.split_once(CODE_END)?;
    let at = text.find(CODE_END)? + CODE_END.len();
    let known = ERROR_MESSAGES.iter().find(|(known, _)| *known == code).filter(|_| !text.contains("<Message>"));
    let message = known.map_or_else(String::new, |(_, message)| format!("<Message>{message}</Message>"));
    Some(format!("{}{message}<RequestId>{request_id}</RequestId>{}", &text[..at], &text[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_get_a_message_and_the_number_of_their_request() {
        let known = completed("<Error><Code>NoSuchBucket</Code></Error>", "7").unwrap();
        assert!(
            known.starts_with("<Error><Code>NoSuchBucket</Code><Message>the endpoint has no such bucket;"),
            "{known}"
        );
        assert!(known.ends_with("</Message><RequestId>7</RequestId></Error>"), "{known}");
        let own = "<Error><Code>NoSuchBucket</Code><Message>own</Message></Error>";
        let expected = "<Error><Code>NoSuchBucket</Code><RequestId>7</RequestId><Message>own</Message></Error>";
        assert_eq!(completed(own, "7").unwrap(), expected);
        assert_eq!(completed("<html>", "7"), None);
    }
}
