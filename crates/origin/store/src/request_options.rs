//! What requests say beyond keys and bytes: who pays, whose bucket it has to be, and how the store keeps written objects. Sends no
//! request.

use http::{HeaderMap, HeaderName, HeaderValue};
use spurline_types::{Error, ErrorKind, Result};

const REQUEST_PAYER: HeaderName = HeaderName::from_static("x-amz-request-payer");
const BUCKET_OWNER: HeaderName = HeaderName::from_static("x-amz-expected-bucket-owner");
const SOURCE_BUCKET_OWNER: HeaderName = HeaderName::from_static("x-amz-source-expected-bucket-owner");
const ENCRYPTION: HeaderName = HeaderName::from_static("x-amz-server-side-encryption");
const ENCRYPTION_KEY: HeaderName = HeaderName::from_static("x-amz-server-side-encryption-aws-kms-key-id");
/// The storage class of an object.
pub(crate) const STORAGE_CLASS: HeaderName = HeaderName::from_static("x-amz-storage-class");

/// What requests to S3 say beyond keys and bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestOptions {
    /// This process pays for its requests.
    pub request_payer: bool,
    /// The account that the bucket has to belong to.
    pub expected_bucket_owner: Option<String>,
    /// Encryption of written objects: `AES256`, `aws:kms`.
    pub sse: Option<String>,
    /// The key of an encryption `aws:kms`.
    pub sse_kms_key_id: Option<String>,
    /// The storage class of all written objects. Without it, new objects have the class of the bucket, and changed, renamed and
    /// copied ones keep theirs.
    pub storage_class: Option<String>,
}

pub(crate) struct OptionHeaders {
    of_all: HeaderMap,
    of_copies: HeaderMap,
    of_written: HeaderMap,
    options: RequestOptions,
}

impl OptionHeaders {
    /// # Errors
    /// `Invalid` for a value that no header can carry.
    pub(crate) fn new(options: &RequestOptions) -> Result<OptionHeaders> {
        let payer = options.request_payer.then_some("requester");
        let owner = options.expected_bucket_owner.as_deref();
        Ok(OptionHeaders {
            of_all: present_headers([(REQUEST_PAYER, payer), (BUCKET_OWNER, owner)])?,
            of_copies: present_headers([(SOURCE_BUCKET_OWNER, owner)])?,
            of_written: present_headers([
                (ENCRYPTION, options.sse.as_deref()),
                (ENCRYPTION_KEY, options.sse_kms_key_id.as_deref()),
                (STORAGE_CLASS, options.storage_class.as_deref()),
            ])?,
            options: options.clone(),
        })
    }

    /// Adds the headers of any request.
    pub(crate) fn add_to_any(&self, headers: &mut HeaderMap) {
        headers.extend(self.of_all.clone());
    }

    /// Adds the headers of a copy.
    pub(crate) fn add_to_copy(&self, headers: &mut HeaderMap) {
        headers.extend(self.of_copies.clone());
    }

    /// Adds the headers of a request that makes an object, which keeps `storage_class` where the options name none.
    ///
    /// # Errors
    /// `Invalid` for a class that no header can carry.
    pub(crate) fn add_to_written(&self, headers: &mut HeaderMap, storage_class: Option<&str>) -> Result<()> {
        headers.extend(present_headers([(STORAGE_CLASS, storage_class)])?);
        headers.extend(self.of_written.clone());
        Ok(())
    }

    /// The options that a bucket's policy may want, and that are not given, as the end of a refusal.
    pub(crate) fn missing_hint(&self, writes: bool) -> String {
        let wants = [
            (writes && self.options.sse.is_none(), "encryption (--sse, --sse-kms-key-id)"),
            (writes && self.options.storage_class.is_none(), "a storage class (--storage-class)"),
            (!self.options.request_payer, "that the requester pays (--request-payer)"),
        ];
        let missing: Vec<&str> =
            wants.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, want)| want).collect();
        if missing.is_empty() {
            return String::new();
        }
        format!(", or the bucket's policy wants {}", missing.join(" or "))
    }
}

/// Those of the headers that have a value.
fn present_headers<const N: usize>(values: [(HeaderName, Option<&str>); N]) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in values {
        let Some(value) = value else { continue };
        let value = HeaderValue::from_str(value)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("'{value}' can't be sent as {name}: {error}")))?;
        headers.insert(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(options: &RequestOptions, storage_class: Option<&str>) -> Vec<String> {
        let mut headers = HeaderMap::new();
        OptionHeaders::new(options).unwrap().add_to_written(&mut headers, storage_class).unwrap();
        let mut lines: Vec<String> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        lines.sort();
        lines
    }

    #[test]
    fn written_objects_keep_their_class_unless_the_options_name_one() {
        let plain = RequestOptions::default();
        assert_eq!(written(&plain, None), [""; 0]);
        assert_eq!(written(&plain, Some("STANDARD_IA")), ["x-amz-storage-class: STANDARD_IA"]);
        let named = RequestOptions {
            sse: Some("aws:kms".to_owned()),
            sse_kms_key_id: Some("key".to_owned()),
            storage_class: Some("GLACIER_IR".to_owned()),
            ..RequestOptions::default()
        };
        let lines = [
            "x-amz-server-side-encryption-aws-kms-key-id: key",
            "x-amz-server-side-encryption: aws:kms",
            "x-amz-storage-class: GLACIER_IR",
        ];
        assert_eq!(written(&named, Some("STANDARD_IA")), lines);
    }

    fn hint(options: &RequestOptions, writes: bool) -> String {
        OptionHeaders::new(options).unwrap().missing_hint(writes)
    }

    #[test]
    fn a_refusal_names_the_options_that_are_not_given() {
        let plain = RequestOptions::default();
        assert_eq!(hint(&plain, false), ", or the bucket's policy wants that the requester pays (--request-payer)");
        assert!(hint(&plain, true).contains("--sse-kms-key-id) or a storage class (--storage-class) or that"));
        let paying = RequestOptions { request_payer: true, ..plain };
        assert_eq!(hint(&paying, false), "");
        assert!(!hint(&paying, true).contains("payer"));
    }
}
