//! S3 over HTTP, one attempt at a time: list, head and ranged get, signed with the object-store library's own signer
//! and sent by its HTTP client. It deliberately retries nothing and knows no folders.
//!
//! The library's store is not used for the requests themselves because its paths refuse keys that buckets may contain
//! (`a//b`, `.`, control characters), and one such key would make its whole listing fail.

use crate::aws::{AwsSettings, RequestSigner};
use crate::backend::{ObjectBackend, RawBody, RawObject, RawPage, RequestFailure, RetryHint};
use crate::client::build_client;
use crate::config::OriginOptions;
use crate::messages::root_cause;
use crate::request_options::OptionHeaders;
use crate::s3_wire::{self, PageError, WireError, encode_path, encode_query};
use crate::sigv4::{SignedBody, sign_request};
use crate::source::SourceLocation;
use crate::write_backend::{AnswerProgress, ObjectWriteBackend};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, ETAG, IF_MATCH, LAST_MODIFIED, RANGE, RETRY_AFTER};
use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use object_store::PutPayload;
use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse};
use parking_lot::RwLock;
use reqsign_aws_v4::Credential;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

/// The largest answer other than object data: a listing of 1000 keys of 1 KiB, each escaped to three times its
/// length.
const MAX_DOCUMENT: usize = 8 << 20;

/// Requests for objects accept the packed form, so that a store does not unpack what was stored with
/// `Content-Encoding: gzip`: size, ranges and checksums are those of the stored bytes.
const STORED_FORM: HeaderValue = HeaderValue::from_static("gzip");

/// The names of requests that make objects begin so.
const WRITE_NAMES: [&str; 3] = ["the write of", "the start of an upload", "the copy of"];

/// A clock difference below this is no reason for a refusal. S3 accepts 15 minutes; AWS's SDKs correct from 4 on.
const CLOCK_TOLERANCE_S: i64 = 240;

/// A bucket accessed over HTTP.
pub(crate) struct S3Backend {
    shared: Arc<BucketEndpoint>,
    client: HttpClient,
}

/// A request: its name for messages, the region it was signed for, and the target of a redirect.
struct RequestContext<'a> {
    what: &'a str,
    region: &'a str,
    redirected_to: Option<&'a str>,
}

/// The credentials and the clock offset that a request was signed with.
pub(crate) struct SignedWith {
    credential: Arc<Credential>,
    clock_offset_s: i64,
}

/// The state that a backend shares with its duplicates: all but the connections.
pub(crate) struct BucketEndpoint {
    bucket: String,
    settings: AwsSettings,
    virtual_hosted: bool,
    /// The region in use; it changes when the server names another.
    region: RwLock<String>,
    connect_timeout: Duration,
    idle_timeout: Duration,
    /// How far the server's clock is ahead of ours, in seconds, as far as it matters.
    clock_offset_s: AtomicI64,
    stats: Arc<Stats>,
    options: OptionHeaders,
}

impl std::ops::Deref for S3Backend {
    type Target = BucketEndpoint;
    fn deref(&self) -> &BucketEndpoint {
        &self.shared
    }
}

impl S3Backend {
    /// # Errors
    /// `Invalid` for settings that can't be right.
    pub(crate) fn new(source: &SourceLocation, config: &OriginOptions, stats: Arc<Stats>) -> Result<Self> {
        let settings = AwsSettings::gather(config)?;
        let client = build_client(&settings, config.connect_timeout, config.idle_timeout())?;
        // A bucket name with dots does not match AWS's certificate as a host name.
        let by_default = settings.endpoint.is_none() && !source.bucket().contains('.');
        let place = BucketEndpoint {
            bucket: source.bucket().to_owned(),
            virtual_hosted: config.virtual_hosted.unwrap_or(by_default),
            region: RwLock::new(settings.region.clone()),
            settings,
            connect_timeout: config.connect_timeout,
            idle_timeout: config.idle_timeout(),
            clock_offset_s: AtomicI64::new(0),
            stats,
            options: OptionHeaders::new(&config.request_options)?,
        };
        let backend = S3Backend { shared: Arc::new(place), client };
        // Not every bucket name can be part of a host name, and the client panics at an invalid URL.
        if let Err(why) = reqwest::Url::parse(&backend.object_url(&backend.region(), "")) {
            let message = format!(
                "the bucket '{}' has no URL at {}: {why}; check its name, the endpoint (AWS_ENDPOINT_URL) and the region",
                backend.bucket,
                backend.server_name()
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(backend)
    }

    /// The URL of a key (percent-encoded here), or of the bucket for an empty one.
    pub(crate) fn object_url(&self, region: &str, key: &str) -> String {
        let endpoint = match &self.settings.endpoint {
            Some(endpoint) => endpoint.clone(),
            None => format!("https://s3.{region}.amazonaws.com"),
        };
        let mut url = if self.virtual_hosted {
            let (scheme, rest) = endpoint.split_once("://").unwrap_or(("https", &endpoint));
            let mut url = format!("{scheme}://{}.{rest}/", self.bucket);
            let _ = write!(url, "{}", encode_path(key));
            url
        } else {
            let mut url = format!("{endpoint}/{}", self.bucket);
            if !key.is_empty() {
                let _ = write!(url, "/{}", encode_path(key));
            }
            url
        };
        url.shrink_to_fit();
        url
    }

    /// The headers by the options of the source.
    pub(crate) fn options(&self) -> &OptionHeaders {
        &self.options
    }

    /// The region in use.
    pub(crate) fn region(&self) -> String {
        self.region.read().clone()
    }

    /// The answer to a request without a body, and its signature's credentials.
    async fn send_signed(
        &self,
        method: Method,
        region: &str,
        url: String,
        headers: HeaderMap,
    ) -> Result<(HttpResponse, Option<SignedWith>), RequestFailure> {
        self.send_body(method, region, url, headers, &[]).await
    }

    /// The answer to a request with a body in one piece or several, and its signature's credentials.
    pub(crate) async fn send_body(
        &self,
        method: Method,
        region: &str,
        url: String,
        headers: HeaderMap,
        body: &[Bytes],
    ) -> Result<(HttpResponse, Option<SignedWith>), RequestFailure> {
        let len: usize = body.iter().map(Bytes::len).sum();
        let mut request = HttpRequest::new(match body {
            [] => HttpRequestBody::empty(),
            [whole] => HttpRequestBody::from(whole.clone()),
            pieces => HttpRequestBody::from(pieces.iter().cloned().collect::<PutPayload>()),
        });
        *request.method_mut() = method;
        *request.headers_mut() = headers;
        self.options.add_to_any(request.headers_mut());
        *request.uri_mut() = url.parse().map_err(|e| {
            RequestFailure::fatal(ErrorKind::Invalid, format!("a request to {} can't be made: {e}", self.server_name()))
        })?;
        let credential = self.settings.credential().await.map_err(|error| match error.kind() {
            ErrorKind::Unavailable => RequestFailure { error, advice: RetryHint::AfterPause },
            _ => RequestFailure { error, advice: RetryHint::Never },
        })?;
        let clock_offset_s = self.clock_offset_s.load(Ordering::Relaxed);
        if let Some(credential) = &credential {
            let method = request.method().clone();
            let uri = request.uri().clone();
            let at = shifted(SystemTime::now(), clock_offset_s);
            let signed = if len == 0 {
                SignedBody::Empty
            } else if uri.scheme() == Some(&Scheme::HTTPS) {
                SignedBody::Unsigned
            } else {
                SignedBody::Bytes(body)
            };
            sign_request(&method, &uri, request.headers_mut(), signed, credential, region, at)
                .map_err(|error| RequestFailure { error, advice: RetryHint::Never })?;
        }
        // The HTTP library states no length of an empty body or of one in pieces, and S3 requires one (411).
        if matches!(*request.method(), Method::PUT | Method::POST) {
            request.headers_mut().insert(CONTENT_LENGTH, len.into());
        }
        let response = self.client.execute(request).await.map_err(|e| self.connection_failure(&e))?;
        Ok((response, credential.map(|credential| SignedWith { credential, clock_offset_s })))
    }

    /// The server's name for messages.
    pub(crate) fn server_name(&self) -> String {
        match &self.settings.endpoint {
            Some(endpoint) => endpoint.clone(),
            None => format!("AWS S3 in {}", self.region()),
        }
    }

    fn connection_failure(&self, error: &HttpError) -> RequestFailure {
        let cause = root_cause(error);
        let place = self.server_name();
        let message = match error.kind() {
            HttpErrorKind::Connect if cause.contains("corrupt message") => format!(
                "{place} does not speak TLS: {cause}; if its server has no TLS, write http:// in the endpoint \
                 (AWS_ENDPOINT_URL), else check its port"
            ),
            HttpErrorKind::Connect if cause.contains("certificate") => format!(
                "the certificate of {place} is not trusted: {cause}; set AWS_CA_BUNDLE to a PEM file of the authority \
                 that signed it, or add that authority to the host"
            ),
            HttpErrorKind::Connect | HttpErrorKind::Timeout => format!(
                "{place} can't be reached: {cause}; check that the endpoint (AWS_ENDPOINT_URL) is right and its \
                 server runs"
            ),
            _ if cause.contains("invalid HTTP") => format!(
                "{place} does not speak HTTP: {cause}; if its server has TLS, write https:// in the endpoint \
                 (AWS_ENDPOINT_URL), else check its port"
            ),
            _ => format!("the connection to {place} broke: {cause}"),
        };
        // A name that does not resolve, or another protocol, is permanent, but a server that restarts is not, and the
        // two can't be distinguished with certainty.
        let again = match error.kind() {
            HttpErrorKind::Connect if !cause.contains("certificate") => RetryHint::AfterRestart,
            _ => RetryHint::AfterPause,
        };
        RequestFailure { error: Error::new(ErrorKind::Unavailable, message), advice: again }
    }

    /// Turns an error answer into a failure with the reason; `asked` is the region that the request was signed for.
    pub(crate) async fn read_refusal(
        &self,
        what: &str,
        method: &Method,
        asked: &str,
        signed_by: Option<&SignedWith>,
        response: HttpResponse,
    ) -> RequestFailure {
        let status = response.status();
        let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let retry_after = header(RETRY_AFTER.as_str()).and_then(|v| v.parse().ok()).map(Duration::from_secs);
        let region = header("x-amz-bucket-region");
        let date = header("date");
        let server = header("server");
        let location = header("location").and_then(|l| self.parse_location(asked, &l));
        let body = read_document(response).await.unwrap_or_default();
        let parsed = s3_wire::parse_error(&body);
        // An answer to HEAD has no body with an error document.
        let told = parsed.is_some() || *method == Method::HEAD;
        let mut wire = parsed.unwrap_or_default();
        let elsewhere = || s3_wire::region_of(location.as_ref().filter(|_| status.is_redirection())?.host_str()?);
        wire.region = wire.region.or(region).or_else(|| elsewhere().map(str::to_owned));
        let sent_on = location.as_ref().map(|to| to.origin().ascii_serialization());
        wire.server_time = wire.server_time.or(date);
        let asked = RequestContext { what, region: asked, redirected_to: sent_on.as_deref() };
        let failure = self.classify_refusal(&asked, status, &wire, told, retry_after, server.as_deref());
        let corrected = match signed_by {
            Some(signed) if failure.error.kind() == ErrorKind::PermissionDenied => {
                self.follow_clock(&wire, signed.clock_offset_s)
                    || self.has_new_credentials(&wire, &signed.credential).await
            }
            _ => false,
        };
        if corrected { RequestFailure { advice: RetryHint::AtOnce, ..failure } } else { failure }
    }

    /// The failure of a request whose answer began as a success and then holds an error document.
    pub(crate) fn late_refusal(&self, what: &str, wire: &WireError) -> RequestFailure {
        let region = self.region();
        let request = RequestContext { what, region: &region, redirected_to: None };
        self.classify_refusal(&request, StatusCode::OK, wire, true, None, None)
    }

    /// A page of the keys that start with `prefix`; those with a further `/` are `folded` into prefixes, or not.
    pub(crate) async fn list_page(
        &self,
        prefix: &str,
        token: Option<&str>,
        max: usize,
        folded: bool,
    ) -> Result<RawPage, RequestFailure> {
        // With a trailing slash a bucket's URL is the same to S3, but not to every compatible server.
        let region = self.region();
        let mut url = self.object_url(&region, "");
        url.push('?');
        if let Some(token) = token {
            let _ = write!(url, "continuation-token={}&", encode_query(token));
        }
        if folded {
            url.push_str("delimiter=%2F&");
        }
        let _ = write!(url, "encoding-type=url&list-type=2&max-keys={max}&prefix={}", encode_query(prefix));
        let what = format!("the listing of '{prefix}'");
        let (response, signed_by) = self.send_signed(Method::GET, &region, url, HeaderMap::new()).await?;
        if response.status() != StatusCode::OK {
            return Err(self.read_refusal(&what, &Method::GET, &region, signed_by.as_ref(), response).await);
        }
        let body = read_document(response).await.map_err(|error| match error {
            DocumentError::Cut => {
                let message = format!("{} ended the connection in the middle of {what}", self.server_name());
                RequestFailure::transient(ErrorKind::Unavailable, message)
            }
            DocumentError::TooLong => {
                let message = format!(
                    "{} answered {what} with more than {} MiB for {max} names: it does not divide listings into pages",
                    self.server_name(),
                    MAX_DOCUMENT >> 20
                );
                RequestFailure::fatal(ErrorKind::Unsupported, message)
            }
        })?;
        let (page, skipped) = s3_wire::parse_list(&body).map_err(|why| {
            let server = self.server_name();
            let message = match why {
                PageError::NotListing => format!(
                    "{server} answered {what} with another document than a listing: it is not an S3 server; check the \
                     endpoint (AWS_ENDPOINT_URL)"
                ),
                PageError::NoContinuation => format!(
                    "{server} truncated {what} without a continuation token (IsTruncated without \
                     NextContinuationToken): it does not support ListObjectsV2, and names would be missing; use a \
                     newer release of that server"
                ),
            };
            RequestFailure::fatal(ErrorKind::Unavailable, message)
        })?;
        self.stats.metadata.skipped_names.add(skipped);
        Ok(page)
    }

    /// The bytes of an answer; `None` when the connection broke.
    pub(crate) async fn read_bytes_of(&self, response: HttpResponse) -> Option<Vec<u8>> {
        read_body(response, usize::MAX, &AnswerProgress::default()).await.ok()
    }

    /// The document of an answer; `None` when the connection broke or the document is too long.
    pub(crate) async fn read_document_of(&self, response: HttpResponse, progress: &AnswerProgress) -> Option<Vec<u8>> {
        read_body(response, MAX_DOCUMENT, progress).await.ok()
    }

    /// The bucket's name.
    pub(crate) fn bucket(&self) -> &str {
        &self.bucket
    }

    /// Takes over the server's time when the refusal may come from a clock difference; `used` is the offset of the refused
    /// request. Whether it did, or another request has.
    fn follow_clock(&self, wire: &WireError, used: i64) -> bool {
        // An answer to HEAD has no code.
        if !matches!(wire.code.as_str(), "RequestTimeTooSkewed" | "RequestExpired" | "") {
            return false;
        }
        let Some(server) = wire.server_time.as_deref().and_then(s3_wire::parse_time) else { return false };
        let offset = seconds_ahead(server, SystemTime::now());
        if (offset - used).abs() <= CLOCK_TOLERANCE_S {
            return false;
        }
        let offset = if offset.abs() <= CLOCK_TOLERANCE_S { 0 } else { offset };
        // Of several requests that were refused together one reports it.
        let before = self.clock_offset_s.swap(offset, Ordering::Relaxed);
        if (before - offset).abs() > CLOCK_TOLERANCE_S {
            let server = self.server_name();
            let seconds = offset.abs();
            match offset {
                0 => tracing::info!("the clock of this host agrees with that of {server} again"),
                ..0 => tracing::warn!(
                    "the clock of this host is {seconds} s ahead of that of {server}, which refuses its requests; they are \
                     now signed with the server's time; set this host's clock"
                ),
                _ => tracing::warn!(
                    "the clock of this host is {seconds} s behind that of {server}, which refuses its requests; they are \
                     now signed with the server's time; set this host's clock"
                ),
            }
        }
        true
    }

    /// Whether the credentials have been replaced at their source since `refused` were loaded.
    async fn has_new_credentials(&self, wire: &WireError, refused: &Arc<Credential>) -> bool {
        let of_credentials = matches!(
            wire.code.as_str(),
            "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "InvalidToken"
                | "ExpiredToken"
                | "TokenRefreshRequired"
                | "InvalidSecurity"
                | "NotSignedUp"
                | ""
        );
        of_credentials && self.settings.replaced(refused).await
    }

    fn classify_refusal(
        &self,
        &RequestContext { what, region: asked, redirected_to: sent_on }: &RequestContext<'_>,
        status: StatusCode,
        wire: &WireError,
        told: bool,
        retry_after: Option<Duration>,
        server: Option<&str>,
    ) -> RequestFailure {
        let place = self.server_name();
        let bucket = &self.bucket;
        let said = describe_refusal(status, wire);
        match (wire.code.as_str(), status.as_u16()) {
            ("NoSuchBucket", _) => RequestFailure::fatal(
                // A request for an object must not make it absent.
                if what.starts_with("the listing") { ErrorKind::NotFound } else { ErrorKind::Unavailable },
                format!(
                    "there is no bucket '{bucket}' at {place} ({said}); check its spelling, the endpoint \
                     (AWS_ENDPOINT_URL) and the region"
                ),
            ),
            ("PreconditionFailed", _) | (_, 412) => {
                RequestFailure::fatal(ErrorKind::Stale, format!("{what}: the object has been replaced ({said})"))
            }
            ("InvalidRange", _) | (_, 416) => {
                RequestFailure::fatal(ErrorKind::Stale, format!("{what}: the object has become shorter ({said})"))
            }
            ("RequestTimeTooSkewed" | "RequestExpired", _) => self.clock_failure(what, &said, wire),
            // It has status 403, but permissions are not the reason.
            ("InvalidObjectState", _) => RequestFailure::fatal(
                ErrorKind::PermissionDenied,
                format!("{place} refused {what} ({said}): the object is in an archive; restore it from there first"),
            ),
            ("SlowDown" | "RequestLimitExceeded" | "Throttling" | "ThrottlingException" | "TooManyRequests", _)
            // Some stores and gateways return 509 or 529 for 503.
            | (_, 429 | 503 | 509 | 529) => RequestFailure {
                error: Error::new(ErrorKind::Throttled, format!("{place} limits the request rate ({said})")),
                advice: RetryHint::SlowDown(retry_after),
            },
            ("NotImplemented", _) | (_, 501) => {
                RequestFailure::fatal(ErrorKind::Unsupported, format!("{place} does not offer {what} ({said})"))
            }
            ("QuotaExceeded" | "XMinioStorageFull" | "InsufficientStorage", _) | (_, 507) => RequestFailure::fatal(
                ErrorKind::Io(libc::ENOSPC),
                format!("{place} has no space for {what} ({said}); free some, or raise the bucket's quota"),
            ),
            // Two conditional writes met.
            ("ConditionalRequestConflict", _)
            | ("RequestTimeout" | "InternalError" | "OperationAborted", _)
            | (_, 408 | 500 | 502 | 504) => {
                RequestFailure::transient(ErrorKind::Unavailable, format!("{place} failed to serve {what} ({said})"))
            }
            (
                "PermanentRedirect"
                | "TemporaryRedirect"
                | "AuthorizationHeaderMalformed"
                | "IllegalLocationConstraintException",
                _,
            )
            | (_, 301 | 302 | 303 | 307 | 308) => match sent_on {
                Some(to) if wire.region.is_none() => self.redirect_failure(what, &said, status, to),
                _ => self.follow_region(what, asked, &said, wire.region.as_deref()),
            },
            // An answer to HEAD has no body: 400 with a region means the same as AuthorizationHeaderMalformed.
            ("", 400) if wire.region.as_deref().is_some_and(|region| region != asked) => {
                self.follow_region(what, asked, &said, wire.region.as_deref())
            }
            (
                "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "InvalidToken"
                | "ExpiredToken"
                | "TokenRefreshRequired"
                | "InvalidSecurity"
                | "NotSignedUp"
                | "AccessDenied"
                | "AllAccessDisabled"
                | "AccountProblem"
                | "Forbidden",
                _,
            )
            | (_, 401 | 403) => self.permission_failure(what, &said, &wire.code),
            ("NoSuchKey" | "NoSuchVersion" | "NoSuchUpload" | "NotFound", _) | ("", 404) => self.missing_object(what, &said, told),
            // Before answers without an S3 error: a gateway's own status codes (520, 530, …) are as transient as 502.
            _ if status.is_server_error() => {
                RequestFailure::transient(ErrorKind::Unavailable, format!("{place} failed to serve {what} ({said})"))
            }
            ("", _) => RequestFailure::fatal(
                ErrorKind::Unavailable,
                format!(
                    "{place} answered {what} with {said}{} and no S3 error: it may not be an S3 server; check the \
                     endpoint (AWS_ENDPOINT_URL)",
                    server.map(|s| format!(" ({s})")).unwrap_or_default()
                ),
            ),
            _ => RequestFailure::fatal(ErrorKind::Unavailable, format!("{place} refused {what} ({said})")),
        }
    }

    /// S3 returns an error document for a missing object. A gateway in between knows no bucket, and its 404 must not make every
    /// file absent.
    fn missing_object(&self, what: &str, said: &str, told: bool) -> RequestFailure {
        if told {
            return RequestFailure::fatal(ErrorKind::NotFound, format!("{what}: no such object ({said})"));
        }
        let message = format!(
            "{} answered {what} with {said} and no S3 error: it is a proxy or not an S3 server; check the endpoint \
             (AWS_ENDPOINT_URL)",
            self.server_name()
        );
        RequestFailure::transient(ErrorKind::Unavailable, message)
    }

    fn clock_failure(&self, what: &str, said: &str, wire: &WireError) -> RequestFailure {
        let message = format!(
            "{} refused {what} because clocks differ ({said}; its time is {}, ours {}); set this machine's clock",
            self.server_name(),
            wire.server_time.as_deref().unwrap_or("unknown"),
            chrono::DateTime::<chrono::Utc>::from(SystemTime::now()).format("%Y-%m-%dT%H:%M:%SZ"),
        );
        RequestFailure::fatal(ErrorKind::PermissionDenied, message)
    }

    /// The server refused the credentials, or their rights do not suffice.
    fn permission_failure(&self, what: &str, said: &str, code: &str) -> RequestFailure {
        let is_anonymous = matches!(self.settings.signer, RequestSigner::Anonymous);
        let cause = match code {
            _ if is_anonymous => "it does not serve unsigned requests, so credentials are needed",
            "InvalidAccessKeyId" => "the server does not know this access key",
            "SignatureDoesNotMatch" => "the secret does not fit the access key",
            "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken" => {
                "the session token (AWS_SESSION_TOKEN) has expired or belongs to another key"
            }
            _ => {
                "this identity has no right to it (s3:ListBucket, s3:GetObject; for changes s3:PutObject and s3:DeleteObject)"
            }
        };
        let place = self.server_name();
        let bucket = &self.bucket;
        let origin = &self.settings.origin;
        let is_of_rights = matches!(code, "AccessDenied" | "Forbidden" | "") && !is_anonymous;
        let writes = WRITE_NAMES.iter().any(|name| what.starts_with(name));
        let hint = if is_of_rights { self.options.missing_hint(writes) } else { String::new() };
        let message = format!("{place} refused {what} in bucket '{bucket}' ({said}): {cause}{hint}; used {origin}");
        RequestFailure::fatal(ErrorKind::PermissionDenied, message)
    }

    /// The target of a `Location` header.
    fn parse_location(&self, region: &str, location: &str) -> Option<reqwest::Url> {
        let asked = reqwest::Url::parse(&self.object_url(region, "")).ok()?;
        asked.join(location).ok().filter(|to| matches!(to.scheme(), "http" | "https"))
    }

    /// A signed request can't follow a redirect; the message names the target.
    fn redirect_failure(&self, what: &str, said: &str, status: StatusCode, to: &str) -> RequestFailure {
        let place = self.server_name();
        let message = format!(
            "{place} redirects {what} to {to} ({said}), and a signed request can't follow; if the store is there, set it as \
             the endpoint (AWS_ENDPOINT_URL), else check the proxies in between: one may need a login"
        );
        match status.as_u16() {
            301 | 308 => RequestFailure::fatal(ErrorKind::Unavailable, message),
            _ => RequestFailure::transient(ErrorKind::Unavailable, message),
        }
    }

    /// Switches to the region that the server names, unless the request was signed for it; otherwise says what to
    /// set. Requests that began before another one switched are repeated as well.
    fn follow_region(&self, what: &str, asked: &str, said: &str, named: Option<&str>) -> RequestFailure {
        let message = format!(
            "the bucket '{}' is not in region {asked}{} ({what}: {said}); set AWS_REGION, or the endpoint \
             (AWS_ENDPOINT_URL) it is reached at",
            self.bucket,
            named.map(|n| format!(" but in {n}")).unwrap_or_default()
        );
        let Some(named) = named.filter(|named| is_region_name(named) && *named != asked) else {
            return RequestFailure::fatal(ErrorKind::Unavailable, message);
        };
        let mut region = self.region.write();
        if *region != named {
            tracing::info!(bucket = %self.bucket, from = %*region, to = %named, "following the bucket's region");
            *region = named.to_owned();
        }
        RequestFailure { error: Error::new(ErrorKind::Unavailable, message), advice: RetryHint::AtOnce }
    }
}

/// A refusal in the words of the store.
fn describe_refusal(status: StatusCode, wire: &WireError) -> String {
    match (wire.code.as_str(), wire.message.as_str()) {
        ("", _) => format!("HTTP {status}"),
        (code, "") => format!("HTTP {} {code}", status.as_u16()),
        (code, message) => format!("HTTP {} {code}: {message}", status.as_u16()),
    }
}

fn shifted(time: SystemTime, seconds: i64) -> SystemTime {
    let by = Duration::from_secs(seconds.unsigned_abs());
    (if seconds < 0 { time.checked_sub(by) } else { time.checked_add(by) }).unwrap_or(time)
}

/// How far `a` is after `b`, in whole seconds.
fn seconds_ahead(a: SystemTime, b: SystemTime) -> i64 {
    a.duration_since(b).map_or_else(|e| -whole_seconds(e.duration()), whole_seconds)
}

/// Why a document can't be read.
enum DocumentError {
    /// The connection broke.
    Cut,
    /// It exceeds [`MAX_DOCUMENT`].
    TooLong,
}

/// Reads an answer's document.
async fn read_document(response: HttpResponse) -> Result<Vec<u8>, DocumentError> {
    read_body(response, MAX_DOCUMENT, &AnswerProgress::default()).await
}

/// Reads an answer of at most `limit` bytes.
async fn read_body(response: HttpResponse, limit: usize, progress: &AnswerProgress) -> Result<Vec<u8>, DocumentError> {
    let mut stream = response.into_body().bytes_stream();
    let mut all = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk: Bytes = chunk.map_err(|_| DocumentError::Cut)?;
        progress.note_bytes();
        if all.len() + chunk.len() > limit {
            return Err(DocumentError::TooLong);
        }
        all.extend_from_slice(&chunk);
    }
    Ok(all)
}

pub(crate) fn header_text(headers: &HeaderMap, name: http::HeaderName) -> Option<String> {
    headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned)
}

/// The etag of an answer; an empty one counts as none.
pub(crate) fn etag_of(headers: &HeaderMap) -> Option<String> {
    header_text(headers, ETAG).filter(|e| !s3_wire::bare_etag(e).is_empty())
}

impl ObjectBackend for S3Backend {
    fn try_clone(&self) -> Option<Box<dyn ObjectBackend>> {
        let client = build_client(&self.settings, self.connect_timeout, self.idle_timeout).ok()?;
        Some(Box::new(S3Backend { shared: Arc::clone(&self.shared), client }))
    }

    fn attach_runtime(&self, shared: &tokio::runtime::Handle) {
        if let RequestSigner::Store(store) = &self.settings.signer {
            store.attach_runtime(shared);
        }
    }

    fn writes(&self) -> Option<&dyn ObjectWriteBackend> {
        Some(self)
    }

    fn describe(&self) -> String {
        let style = if self.virtual_hosted { "virtual-hosted" } else { "path" };
        format!("{} region {} ({style} style, {})", self.server_name(), self.region(), self.settings.origin)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max: usize,
    ) -> BoxFuture<'a, Result<RawPage, RequestFailure>> {
        self.list_page(prefix, token, max, true).boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<RawObject, RequestFailure>> {
        async move {
            let region = self.region();
            let headers = HeaderMap::from_iter([(ACCEPT_ENCODING, STORED_FORM)]);
            let (response, signed_by) =
                self.send_signed(Method::HEAD, &region, self.object_url(&region, key), headers).await?;
            if response.status() != StatusCode::OK {
                return Err(self
                    .read_refusal(&format!("the head of '{key}'"), &Method::HEAD, &region, signed_by.as_ref(), response)
                    .await);
            }
            let headers = response.headers();
            let size = header_text(headers, http::header::CONTENT_LENGTH).and_then(|v| v.parse().ok());
            let Some(size) = size else {
                let message = format!(
                    "{} returned no length of '{key}': it is not an S3 server, or it unpacks objects with a \
                     Content-Encoding (gzip)",
                    self.server_name()
                );
                return Err(RequestFailure::fatal(ErrorKind::Unavailable, message));
            };
            let mtime = header_text(headers, LAST_MODIFIED).and_then(|v| s3_wire::parse_time(&v));
            Ok(RawObject {
                key: key.to_owned(),
                size,
                mtime: mtime.unwrap_or(SystemTime::UNIX_EPOCH),
                etag: etag_of(headers),
            })
        }
        .boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a str,
        from: u64,
        to: u64,
        etag: Option<&'a str>,
    ) -> BoxFuture<'a, Result<RawBody, RequestFailure>> {
        async move {
            let what = || format!("the read of '{key}' at {from}");
            let mut headers = HeaderMap::with_capacity(8);
            headers.insert(ACCEPT_ENCODING, STORED_FORM);
            let header = |value: String| {
                HeaderValue::try_from(value)
                    .map_err(|e| RequestFailure::fatal(ErrorKind::Invalid, format!("{}: {e}", what())))
            };
            headers.insert(RANGE, header(format!("bytes={from}-{}", to - 1))?);
            if let Some(etag) = etag {
                headers.insert(IF_MATCH, header(format!("\"{etag}\""))?);
            }
            let region = self.region();
            let (response, signed_by) =
                self.send_signed(Method::GET, &region, self.object_url(&region, key), headers).await?;
            let range = header_text(response.headers(), http::header::CONTENT_RANGE);
            let got = etag_of(response.headers());
            let mtime = header_text(response.headers(), LAST_MODIFIED).and_then(|v| s3_wire::parse_time(&v));
            let partial = response.status() == StatusCode::PARTIAL_CONTENT;
            if !partial && response.status() != StatusCode::OK {
                return Err(self.read_refusal(&what(), &Method::GET, &region, signed_by.as_ref(), response).await);
            }
            let len = header_text(response.headers(), http::header::CONTENT_LENGTH).and_then(|v| v.parse::<u64>().ok());
            let (range, total) = if partial {
                s3_wire::parse_content_range(range.as_deref().unwrap_or_default())
            } else {
                (len.map(|len| 0..len), len)
            };
            // A body of another length than its range has lost something on its way.
            let range = range.filter(|range| len.is_none_or(|len| len == range.end - range.start));
            let place = self.server_name();
            let stream = response.into_body().bytes_stream().map(move |chunk| {
                chunk.map_err(|e| {
                    let message = format!("{place} ended a transfer early: {}", root_cause(&e));
                    RequestFailure::transient(ErrorKind::Unavailable, message)
                })
            });
            Ok(RawBody { etag: got, mtime, total, range, partial, stream: stream.boxed() })
        }
        .boxed()
    }
}

/// Whether a text of an answer can be the name of a region.
fn is_region_name(text: &str) -> bool {
    text.len() < 64 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn whole_seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}
