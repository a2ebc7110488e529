//! The form of signatures, before they are checked: forms that the library behind the calls takes, or refuses with another code than S3.
//! Knows no key.

use http::header::AUTHORIZATION;
use http::{HeaderMap, Uri};
use percent_encoding::percent_decode_str;
use s3s::{S3Error, S3Result, s3_error};

/// The only algorithm of signatures with version 4.
const ALGORITHM: &str = "AWS4-HMAC-SHA256";
/// The scheme of signatures with version 2.
const SCHEME_V2: &str = "AWS ";
/// The longest life of a signed URL, as in S3: a week.
const URL_LIFE_MAX_SECONDS: u64 = 7 * 24 * 3600;
/// The parameters of a signed URL.
const URL_PARAMETERS: [&str; 6] =
    ["X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature", "X-Amz-Date", "X-Amz-SignedHeaders", "X-Amz-Expires"];
const CREDENTIAL_FORM: &str = "ACCESS_KEY/YYYYMMDD/REGION/SERVICE/aws4_request";

/// Checks the form of a signature in a header or in the URL, if there is any.
///
/// # Errors
/// `AuthorizationHeaderMalformed`, `AuthorizationQueryParametersError`, or `InvalidArgument` for a scheme that is none of S3's.
pub(crate) fn check_signature_form(uri: &Uri, headers: &HeaderMap) -> S3Result<()> {
    if let Some(value) = headers.get(AUTHORIZATION) {
        return check_header(value.to_str().unwrap_or_default());
    }
    let query = uri.query().unwrap_or_default();
    if query.split('&').any(|pair| pair.starts_with("X-Amz-Signature=")) {
        return check_url(query);
    }
    Ok(())
}

fn check_header(value: &str) -> S3Result<()> {
    if value.starts_with(SCHEME_V2) {
        return Ok(());
    }
    let (scheme, rest) = value.trim().split_once(' ').unwrap_or((value.trim(), ""));
    if scheme != ALGORITHM {
        return Err(s3_error!(InvalidArgument, "the Authorization header has another scheme than {ALGORITHM}"));
    }
    let malformed =
        |why: String| s3_error!(AuthorizationHeaderMalformed, "the Authorization header is malformed: {why}");
    for name in ["Credential", "SignedHeaders", "Signature"] {
        if find_component(rest, name).is_none() {
            return Err(malformed(format!("it has no {name}; Credential, SignedHeaders and Signature are required")));
        }
    }
    if !find_component(rest, "Credential").is_some_and(is_credential) {
        return Err(malformed(format!("its Credential is not of the form {CREDENTIAL_FORM}")));
    }
    Ok(())
}

/// Whether a text is an access key with the scope of a signature. Some access keys have slashes.
fn is_credential(text: &str) -> bool {
    let mut parts = text.rsplitn(5, '/');
    let is_request = parts.next() == Some("aws4_request");
    let service = parts.next().is_some_and(|service| !service.is_empty());
    let region = parts.next().is_some();
    let day = parts.next().is_some_and(|day| day.len() == 8 && day.bytes().all(|byte| byte.is_ascii_digit()));
    let access_key = parts.next().is_some_and(|access_key| !access_key.is_empty());
    is_request && service && region && day && access_key
}

fn wrong_parameters(why: &str) -> S3Error {
    s3_error!(AuthorizationQueryParametersError, "the signed URL is malformed: {why}")
}

/// A component of the Authorization header; `None` if it is absent or empty.
fn find_component<'a>(rest: &'a str, name: &str) -> Option<&'a str> {
    let mut components = rest.split(',').filter_map(|part| part.trim().split_once('='));
    components.find(|(given, _)| *given == name).map(|(_, value)| value).filter(|value| !value.is_empty())
}

/// A decoded parameter of a URL's query.
fn find_parameter(query: &str, name: &str) -> Option<String> {
    let found = query.split('&').filter_map(|pair| pair.split_once('=')).find(|(given, _)| *given == name);
    found.map(|(_, value)| percent_decode_str(value).decode_utf8_lossy().into_owned())
}

fn check_url(query: &str) -> S3Result<()> {
    for name in URL_PARAMETERS {
        if find_parameter(query, name).is_none_or(|value| value.is_empty()) {
            return Err(wrong_parameters(&format!("it has no {name}; {} are required", URL_PARAMETERS.join(", "))));
        }
    }
    if find_parameter(query, "X-Amz-Algorithm").as_deref() != Some(ALGORITHM) {
        return Err(wrong_parameters(&format!("the only X-Amz-Algorithm is {ALGORITHM}")));
    }
    if !find_parameter(query, "X-Amz-Credential").is_some_and(|text| is_credential(&text)) {
        return Err(wrong_parameters(&format!("X-Amz-Credential is not of the form {CREDENTIAL_FORM}")));
    }
    match find_parameter(query, "X-Amz-Expires").and_then(|text| text.parse::<u64>().ok()) {
        Some(1..=URL_LIFE_MAX_SECONDS) => Ok(()),
        _ => Err(wrong_parameters(&format!(
            "X-Amz-Expires is a number of seconds, from 1 to {URL_LIFE_MAX_SECONDS} (a week)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use s3s::S3ErrorCode;

    const SCOPE: &str = "client/20260102/us-east-1/s3/aws4_request";

    fn code_of(uri: &str, authorization: Option<&str>) -> Option<S3ErrorCode> {
        let mut headers = HeaderMap::new();
        if let Some(value) = authorization {
            headers.insert(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        }
        check_signature_form(&uri.parse().unwrap(), &headers).err().map(|error| error.code().clone())
    }

    #[test]
    fn headers_are_well_formed_or_named() {
        let right = format!("{ALGORITHM} Credential={SCOPE}, SignedHeaders=host;x-amz-date,Signature=0a");
        let with_slash = right.replace("client", "cli/ent");
        for value in [right.as_str(), &with_slash, "AWS client:c2lnbmF0dXJl"] {
            assert_eq!(code_of("/b/k", Some(value)), None, "{value}");
        }
        for wrong in [
            ALGORITHM.to_owned(),
            format!("{ALGORITHM} x"),
            format!("{ALGORITHM} Credential={SCOPE},SignedHeaders=host"),
            right.replace("Signature=0a", "Signature="),
            right.replace(SCOPE, "Credentials"),
            right.replace(SCOPE, "a/b/c"),
            right.replace("20260102", "2026"),
            right.replace("aws4_request", "aws4"),
        ] {
            assert_eq!(code_of("/b/k", Some(&wrong)), Some(S3ErrorCode::AuthorizationHeaderMalformed), "{wrong}");
        }
        for other in ["", "Basic Y2xpZW50OnNlY3JldA==", "Bearer x", "AWS4-HMAC-SHA1 Credential=x"] {
            assert_eq!(code_of("/b/k", Some(other)), Some(S3ErrorCode::InvalidArgument), "{other}");
        }
        assert_eq!(code_of("/b/k", None), None);
    }

    #[test]
    fn signed_urls_are_well_formed_or_named() {
        let credential = SCOPE.replace('/', "%2F");
        let right = format!(
            "/b/k?X-Amz-Algorithm={ALGORITHM}&X-Amz-Credential={credential}&X-Amz-Date=20260102T000000Z&X-Amz-Expires=604800\
             &X-Amz-SignedHeaders=host&X-Amz-Signature=0a"
        );
        assert_eq!(code_of(&right, None), None);
        assert_eq!(code_of("/b/k?versionId=null", None), None);
        for (from, to) in [
            ("Expires=604800", "Expires=604801"),
            ("Expires=604800", "Expires=0"),
            ("Expires=604800", "Expires=-1"),
            ("Expires=604800", "Expires=soon"),
            ("&X-Amz-Expires=604800", ""),
            ("&X-Amz-SignedHeaders=host", ""),
            (credential.as_str(), "client"),
            (ALGORITHM, "AWS4-HMAC-SHA1"),
        ] {
            let wrong = right.replace(from, to);
            assert_eq!(code_of(&wrong, None), Some(S3ErrorCode::AuthorizationQueryParametersError), "{wrong}");
        }
    }
}
