//! Access to the origin: settings and checks. Sends no request.

use crate::settings::{check_positive, unused_flags};
use spurline_types::fault::Fault;
use spurline_types::parse_duration;
use std::time::Duration;

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
        /// Deadline of one read, lookup or listing of the origin
        ///
        /// Transient failures (status 5xx, 503 SlowDown, a broken connection, no answer) are retried with growing pauses
        /// until then. After that the error is EIO if the server failed, and ETIMEDOUT if it did not answer.
        #[arg(long = "origin-timeout", alias = "under-timeout", value_name = "TIME")]
        pub timeout: Duration = parse_duration("60s"),
        /// Send a request again, up to twice, when there is no answer for this long; resume a transfer that stalls for
        /// this long on another connection
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
        check_positive("--origin-timeout", self.timeout)?;
        check_positive("--origin-stall-timeout", self.stall_timeout)?;
        if self.max_downloads == 0 {
            return Err(Fault::usage("--max-downloads 0 leaves no way to fetch anything", "give 1 or more"));
        }
        Ok(())
    }

    /// The warning about given flags that a reader from nodes does not use.
    pub(crate) fn unused_with_nodes(&self) -> Option<String> {
        let unused = [
            ("--endpoint-url", self.endpoint_url.is_some()),
            ("--region", self.region.is_some()),
            ("--anonymous", self.anonymous),
            ("--max-downloads", self.max_downloads != OriginConfig::default().max_downloads),
        ];
        unused_flags(&unused, "with --registry the nodes read the source")
    }
}
