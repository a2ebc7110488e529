//! AWS Signature Version 4 of a request at a given time.
//! It deliberately knows neither clock nor credential source: the signers of the libraries in use take no time from
//! their caller, and a request to a server with another clock must be signed with the server's.
//!
//! Source: <https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html>

use aws_lc_rs::digest::{Context, SHA256};
use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST, HeaderName};
use http::{HeaderMap, HeaderValue, Method, Uri};
use reqsign_aws_v4::{Credential, EMPTY_STRING_SHA256};
use reqsign_core::hash::{hex_hmac_sha256, hex_sha256, hmac_sha256};
use spurline_types::{Error, ErrorKind, Result};
use std::borrow::Cow;
use std::time::SystemTime;

const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");

/// A request's body, as its signature covers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignedBody<'a> {
    /// There is none.
    Empty,
    /// Signed with the bytes, in one piece or several.
    Bytes(&'a [Bytes]),
    /// Not signed: the connection itself protects the bytes (TLS).
    Unsigned,
}

impl SignedBody<'_> {
    /// The value of `x-amz-content-sha256`.
    fn content_sha256(self) -> Cow<'static, str> {
        match self {
            SignedBody::Empty => EMPTY_STRING_SHA256.into(),
            SignedBody::Bytes(pieces) => hex_sha256_of(pieces).into(),
            SignedBody::Unsigned => "UNSIGNED-PAYLOAD".into(),
        }
    }
}

fn hex_sha256_of(pieces: &[Bytes]) -> String {
    let mut hash = Context::new(&SHA256);
    pieces.iter().for_each(|piece| hash.update(piece));
    hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Adds the headers of a signature by `credential` to a request for S3 in `region`. The signature covers the host and all
/// headers `x-amz-*`. The path and query of `uri` must be percent-encoded as the signature needs them, the query sorted by
/// name.
///
/// # Errors
/// `Invalid` for a URI without a host, or a credential that no header can carry.
pub(crate) fn sign_request(
    method: &Method,
    uri: &Uri,
    headers: &mut HeaderMap,
    body: SignedBody<'_>,
    credential: &Credential,
    region: &str,
    at: SystemTime,
) -> Result<()> {
    let authority = uri.authority().ok_or_else(|| Error::new(ErrorKind::Invalid, "a request without a host"))?;
    let time = chrono::DateTime::<chrono::Utc>::from(at).format("%Y%m%dT%H%M%SZ").to_string();
    let day = &time[..8];
    let content_sha256 = body.content_sha256();
    headers.insert(HOST, header_value(authority.as_str())?);
    headers.insert(DATE, header_value(&time)?);
    headers.insert(CONTENT_SHA256, header_value(&content_sha256)?);
    if let Some(token) = &credential.session_token {
        let mut value = header_value(token)?;
        value.set_sensitive(true);
        headers.insert(TOKEN, value);
    }

    let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).filter(|name| is_signed(name)).collect();
    names.sort_unstable();
    let mut canonical = format!("{method}\n{}\n{}\n", uri.path(), uri.query().unwrap_or_default()).into_bytes();
    for name in &names {
        canonical.extend_from_slice(name.as_bytes());
        for (index, value) in headers.get_all(*name).iter().enumerate() {
            canonical.push(if index == 0 { b':' } else { b',' });
            push_signed_value(value.as_bytes(), &mut canonical);
        }
        canonical.push(b'\n');
    }
    let signed = names.join(";");
    canonical.extend_from_slice(format!("\n{signed}\n{content_sha256}").as_bytes());

    let scope = format!("{day}/{region}/s3/aws4_request");
    let to_sign = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex_sha256(&canonical));
    let mut key = format!("AWS4{}", credential.secret_access_key).into_bytes();
    for part in [day, region, "s3", "aws4_request"] {
        key = hmac_sha256(&key, part.as_bytes());
    }
    let signature = hex_hmac_sha256(&key, to_sign.as_bytes());
    let id = &credential.access_key_id;
    let mut value = header_value(&format!(
        "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={signed}, Signature={signature}"
    ))?;
    value.set_sensitive(true);
    headers.insert(AUTHORIZATION, value);
    Ok(())
}

/// Appends a value as a signature covers it: without blanks at the ends, and with a single space in place of each run of blanks. The
/// request itself keeps the value. The reference names spaces only; AWS's libraries and servers treat tabs alike.
fn push_signed_value(value: &[u8], canonical: &mut Vec<u8>) {
    let words = value.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    for (index, word) in words.enumerate() {
        if index > 0 {
            canonical.push(b' ');
        }
        canonical.extend_from_slice(word);
    }
}

fn is_signed(name: &str) -> bool {
    name == "host" || name.starts_with("x-amz-")
}

fn header_value(text: &str) -> Result<HeaderValue> {
    // The value may be secret.
    HeaderValue::from_str(text)
        .map_err(|_| Error::new(ErrorKind::Invalid, "a credential has characters that no header can carry"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// The example of a GET without a body in the S3 API reference ("Signature Calculations for the Authorization
    /// Header"), without its Range header, which is not signed here.
    #[test]
    fn a_listing_of_the_reference() {
        let credential = Credential {
            access_key_id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret_access_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            session_token: None,
            expires_in: None,
        };
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_369_353_600);
        let uri: Uri = "https://examplebucket.s3.amazonaws.com/?max-keys=2&prefix=J".parse().unwrap();
        let mut headers = HeaderMap::new();
        sign_request(&Method::GET, &uri, &mut headers, SignedBody::Empty, &credential, "us-east-1", at).unwrap();
        assert_eq!(headers[&DATE], "20130524T000000Z");
        let signature = "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7";
        assert!(headers[AUTHORIZATION].to_str().unwrap().ends_with(signature), "{headers:?}");
    }

    /// The rules of the canonical request in the reference ("Trimall"): blanks at the ends are left out, and a run of blanks is one.
    #[test]
    fn values_are_signed_without_runs_of_blanks() {
        for (value, signed) in [
            ("plain", "plain"),
            ("two  blanks", "two blanks"),
            (" \t four    and\t tab \t", "four and tab"),
            ("\u{a0}no  blank\u{a0}", "\u{a0}no blank\u{a0}"),
            ("  ", ""),
            ("", ""),
        ] {
            let mut canonical = Vec::new();
            push_signed_value(value.as_bytes(), &mut canonical);
            assert_eq!(String::from_utf8(canonical).unwrap(), signed, "{value:?}");
        }
    }

    #[test]
    fn all_values_of_a_name_are_signed() {
        let signature_of = |values: &[&str]| {
            let credential = Credential {
                access_key_id: "id".into(),
                secret_access_key: "secret".into(),
                session_token: None,
                expires_in: None,
            };
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append("x-amz-meta-a", HeaderValue::from_str(value).unwrap());
            }
            let uri: Uri = "http://store/bucket/key".parse().unwrap();
            let body = SignedBody::Empty;
            sign_request(&Method::PUT, &uri, &mut headers, body, &credential, "r", SystemTime::UNIX_EPOCH).unwrap();
            headers[AUTHORIZATION].to_str().unwrap().to_owned()
        };
        assert_eq!(signature_of(&["1", "2"]), signature_of(&["1,2"]));
        assert_eq!(signature_of(&["1  2"]), signature_of(&["1 2"]));
        assert_ne!(signature_of(&["1", "2"]), signature_of(&["1"]));
    }
}
