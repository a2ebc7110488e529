//! Access to the origin: settings and checks. Sends no request.

use crate::settings::{check_positive, unused_flags};
use spurline_types::fault::Fault;
use spurline_types::parse_duration;
use std::time::Duration;

/// The encryptions of S3.
const ENCRYPTIONS: [&str; 3] = ["AES256", "aws:kms", "aws:kms:dsse"];
/// Storage classes whose objects can't be read at once.
const ARCHIVES: [&str; 2] = ["GLACIER", "DEEP_ARCHIVE"];

settings! {
    /// Access to the origin; the checks change no value.
    #[command(next_help_heading = "Origin")]
    pub struct OriginConfig {
        /// Endpoint of an S3-compatible server (also AWS_ENDPOINT_URL) [default: Amazon's]
        #[arg(long, value_name = "URL")]
        pub endpoint_url: Option<String>,
        /// Region of the bucket (also AWS_REGION)
        #[arg(long, value_name = "NAME")]
        pub region: Option<String>,
        /// Send unsigned requests, for public buckets
        #[arg(long, visible_alias = "no-sign-request")]
        pub anonymous: bool,
        /// Pay for the requests, where the bucket wants that of its requesters (S3)
        #[arg(long, visible_alias = "requester-pays")]
        pub request_payer: bool,
        /// Account that the bucket has to belong to; the store refuses requests for another's (S3)
        #[arg(long, value_name = "ACCOUNT")]
        pub expected_bucket_owner: Option<String>,
        /// Encryption of objects written to S3: AES256, aws:kms or aws:kms:dsse [default: the bucket's]
        #[arg(long, value_name = "KIND")]
        pub sse: Option<String>,
        /// Key of an encryption with aws:kms [default: the account's]
        #[arg(long, value_name = "KEY")]
        pub sse_kms_key_id: Option<String>,
        /// Storage class of all objects written to S3 [default: the bucket's for new objects, and that of a changed or renamed one]
        #[arg(long, value_name = "CLASS")]
        pub storage_class: Option<String>,
        /// Deadline of one read, lookup or listing of the origin
        ///
        /// Transient failures (status 5xx, 503 SlowDown, a broken connection, no answer) are retried with growing pauses
        /// until then. After that the error is EIO if the server failed, and ETIMEDOUT if it did not answer.
        #[arg(long = "origin-timeout", alias = "under-timeout", value_name = "TIME")]
        pub timeout: Duration = parse_duration("60s"),
        /// Send a request again, up to twice, when there is no answer for this long (also writes of up to 128 KiB); resume a
        /// transfer that stalls for this long on another connection
        #[arg(long = "origin-stall-timeout", alias = "under-stall-timeout", value_name = "TIME")]
        pub stall_timeout: Duration = parse_duration("10s"),
        /// Concurrent requests to the origin, not counting repeated ones
        #[arg(long, value_name = "N")]
        pub max_downloads: u32 = 200,
        /// While the origin does not respond, keep using the last known names, attributes and listings for this long; 0
        /// for never
        ///
        /// Cached files stay readable for that time. The first requests wait up to 3 s for the origin. An answer of the
        /// origin replaces the last known one at once.
        #[arg(long, value_name = "TIME")]
        pub stale_if_error: Duration = parse_duration("5m"),
    }
}

impl OriginConfig {
    /// Checks the values.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        if let Some(url) = &self.endpoint_url
            && !(url.starts_with("http://") || url.starts_with("https://"))
        {
            return Err(Fault::usage(
                format!("--endpoint-url '{url}' does not start with http:// or https://"),
                "write http://HOST:PORT or https://HOST",
            ));
        }
        self.check_storage()?;
        check_positive("--origin-timeout", self.timeout)?;
        check_positive("--origin-stall-timeout", self.stall_timeout)?;
        if self.max_downloads == 0 {
            return Err(Fault::usage("--max-downloads 0 leaves no way to fetch anything", "give 1 or more"));
        }
        Ok(())
    }

    /// Checks how the store keeps written objects.
    fn check_storage(&self) -> Result<(), Fault> {
        if let Some(sse) = self.sse.as_deref().filter(|sse| !ENCRYPTIONS.contains(sse)) {
            return Err(Fault::usage(
                format!("--sse '{sse}' is no encryption of S3"),
                format!("give {}", ENCRYPTIONS.join(", ")),
            ));
        }
        if self.sse_kms_key_id.is_some() && !self.sse.as_deref().is_some_and(|sse| sse.starts_with("aws:kms")) {
            return Err(Fault::usage(
                "--sse-kms-key-id is the key of an encryption with KMS",
                "give --sse aws:kms too",
            ));
        }
        if let Some(class) = self.storage_class.as_deref().filter(|class| ARCHIVES.contains(class)) {
            return Err(Fault::usage(
                format!("objects of --storage-class {class} can't be read before they are restored"),
                "give GLACIER_IR, or move objects to the archive by a lifecycle rule of the bucket",
            ));
        }
        for (flag, value) in
            [("--storage-class", &self.storage_class), ("--expected-bucket-owner", &self.expected_bucket_owner)]
        {
            if value
                .as_ref()
                .is_some_and(|value| value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_graphic()))
            {
                return Err(Fault::usage(format!("{flag} is empty or has blanks"), "give one word"));
            }
        }
        Ok(())
    }

    /// The warning about given flags that a reader from nodes does not use.
    pub(crate) fn unused_with_nodes(&self) -> Option<String> {
        let unused = [
            ("--endpoint-url", self.endpoint_url.is_some()),
            ("--region", self.region.is_some()),
            ("--anonymous", self.anonymous),
            ("--request-payer", self.request_payer),
            ("--expected-bucket-owner", self.expected_bucket_owner.is_some()),
            ("--sse", self.sse.is_some()),
            ("--sse-kms-key-id", self.sse_kms_key_id.is_some()),
            ("--storage-class", self.storage_class.is_some()),
            ("--max-downloads", self.max_downloads != OriginConfig::default().max_downloads),
        ];
        unused_flags(&unused, "with --registry the nodes read the source")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(config: OriginConfig) -> String {
        config.check().map_err(|fault| fault.to_string()).err().unwrap_or_default()
    }

    fn text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn what_a_store_can_not_keep_is_refused() {
        let plain = OriginConfig::default();
        assert!(refused(OriginConfig { sse: text("kms"), ..plain.clone() }).contains("aws:kms"));
        assert!(refused(OriginConfig { sse_kms_key_id: text("key"), ..plain.clone() }).contains("--sse aws:kms"));
        assert!(refused(OriginConfig { storage_class: text("GLACIER"), ..plain.clone() }).contains("GLACIER_IR"));
        assert!(refused(OriginConfig { storage_class: text("A B"), ..plain.clone() }).contains("--storage-class"));
        assert!(refused(OriginConfig { expected_bucket_owner: text(""), ..plain.clone() }).contains("--expected"));
        let sse = text("aws:kms");
        let kept = OriginConfig { sse, sse_kms_key_id: text("key"), storage_class: text("STANDARD_IA"), ..plain };
        kept.check().unwrap();
    }
}
