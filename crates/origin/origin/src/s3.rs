//! S3 over HTTP, one attempt at a time: list, head and ranged get, signed with the object-store library's own signer
//! on its own HTTP client. It deliberately retries nothing and knows no folders.
//!
//! The library's store is not used for the requests themselves because its paths refuse keys that buckets do hold
//! (`a//b`, `.`, control characters), and one such key would make the whole listing around it fail.

use crate::aws::{AwsSettings, Signer, root_cause};
use crate::backend::{Again, Backend, Failure, RawBody, RawObject, RawPage};
use crate::client::connect;
use crate::s3_wire::{self, NoPage, WireError, encode, encode_path};
use crate::{Source, UnderConfig};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use http::header::{ETAG, IF_MATCH, LAST_MODIFIED, RANGE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use object_store::aws::AwsAuthorizer;
use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse};
use parking_lot::RwLock;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The largest answer that is not an object's bytes: a listing of 1000 keys of 1 KiB, each escaped to thrice that.
const MAX_DOCUMENT: usize = 8 << 20;

/// A bucket reached over HTTP.
pub(crate) struct S3Backend {
    place: Arc<Place>,
    client: HttpClient,
}

/// A request: its name in messages, the region it was signed for, and where its answer sends it on to.
struct Asked<'a> {
    what: &'a str,
    region: &'a str,
    sent_on: Option<&'a str>,
}

/// What a backend and its twins share: all but the connections.
pub(crate) struct Place {
    bucket: String,
    settings: AwsSettings,
    virtual_hosted: bool,
    /// The region in use; a server that names another is followed.
    region: RwLock<String>,
    connect_timeout: Duration,
    idle_timeout: Duration,
    stats: Arc<Stats>,
}

impl std::ops::Deref for S3Backend {
    type Target = Place;
    fn deref(&self) -> &Place {
        &self.place
    }
}

impl S3Backend {
    /// # Errors
    /// `Invalid` for settings that can't be right.
    pub(crate) fn new(source: &Source, config: &UnderConfig, stats: Arc<Stats>) -> Result<Self> {
        let settings = AwsSettings::gather(config)?;
        let client = connect(&settings, config.connect_timeout, config.idle_timeout())?;
        // A bucket with dots does not match AWS's certificate as a host name.
        let by_default = settings.endpoint.is_none() && !source.bucket().contains('.');
        let place = Place {
            bucket: source.bucket().to_owned(),
            virtual_hosted: config.virtual_hosted.unwrap_or(by_default),
            region: RwLock::new(settings.region.clone()),
            settings,
            connect_timeout: config.connect_timeout,
            idle_timeout: config.idle_timeout(),
            stats,
        };
        let backend = S3Backend { place: Arc::new(place), client };
        // A bucket can't be the first part of every host name, and the client panics at what is no URL.
        if let Err(why) = reqwest::Url::parse(&backend.url(&backend.region(), "")) {
            let message = format!(
                "the bucket '{}' has no URL at {}: {why}; look at its name, the endpoint (AWS_ENDPOINT_URL) and region",
                backend.bucket,
                backend.server()
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(backend)
    }

    /// The URL of a key (percent-encoded here), or of the bucket for an empty one.
    fn url(&self, region: &str, key: &str) -> String {
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

    /// The region in use now.
    fn region(&self) -> String {
        self.region.read().clone()
    }

    async fn send(
        &self,
        method: Method,
        region: &str,
        url: String,
        headers: HeaderMap,
    ) -> Result<HttpResponse, Failure> {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method;
        *request.headers_mut() = headers;
        *request.uri_mut() = url.parse().map_err(|e| {
            Failure::fatal(ErrorKind::Invalid, format!("a request to {} can't be made: {e}", self.server()))
        })?;
        let credential = self.settings.credential().await.map_err(|error| Failure { error, again: Again::Yes })?;
        if let Some(credential) = credential {
            AwsAuthorizer::new(&credential, "s3", region).try_authorize(&mut request, None).map_err(|e| {
                Failure::fatal(ErrorKind::Invalid, format!("a request can't be signed: {}", root_cause(&e)))
            })?;
        }
        self.client.execute(request).await.map_err(|e| self.unreached(&e))
    }

    /// Where requests go, for messages.
    fn server(&self) -> String {
        match &self.settings.endpoint {
            Some(endpoint) => endpoint.clone(),
            None => format!("AWS S3 in {}", self.region()),
        }
    }

    fn unreached(&self, error: &HttpError) -> Failure {
        let cause = root_cause(error);
        let place = self.server();
        let message = match error.kind() {
            HttpErrorKind::Connect if cause.contains("certificate") => format!(
                "{place} shows a certificate that is not trusted: {cause}; name a PEM file of the authority that signed \
                 it with AWS_CA_BUNDLE, or give it to the host"
            ),
            HttpErrorKind::Connect | HttpErrorKind::Timeout => format!(
                "{place} can't be reached: {cause}; look whether the endpoint (AWS_ENDPOINT_URL) is right and its \
                 server runs"
            ),
            _ => format!("the connection to {place} broke: {cause}"),
        };
        // A name that does not resolve, a refused certificate or another protocol does not change in a moment, but a
        // server that restarts does, and the two can't be told apart with certainty.
        let again = match error.kind() {
            HttpErrorKind::Connect if !cause.contains("certificate") => Again::WhenBack,
            _ => Again::Yes,
        };
        Failure { error: Error::new(ErrorKind::Unavailable, message), again }
    }

    /// Turns an answer other than the one hoped for into a failure that says why; `asked` is the region that the request
    /// was signed for.
    async fn refusal(&self, what: &str, method: &Method, asked: &str, response: HttpResponse) -> Failure {
        let status = response.status();
        let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let retry_after = header(RETRY_AFTER.as_str()).and_then(|v| v.parse().ok()).map(Duration::from_secs);
        let (region, date) = (header("x-amz-bucket-region"), header("date"));
        let server = header("server");
        let location = header("location").and_then(|l| self.location(asked, &l));
        let body = document(response).await.unwrap_or_default();
        let parsed = s3_wire::parse_error(&body);
        // An answer to HEAD has no body that could tell.
        let told = parsed.is_some() || *method == Method::HEAD;
        let mut wire = parsed.unwrap_or_default();
        let elsewhere = || s3_wire::region_of(location.as_ref().filter(|_| status.is_redirection())?.host_str()?);
        wire.region = wire.region.or(region).or_else(|| elsewhere().map(str::to_owned));
        let sent_on = location.as_ref().map(|to| to.origin().ascii_serialization());
        wire.server_time = wire.server_time.or(date);
        let asked = Asked { what, region: asked, sent_on: sent_on.as_deref() };
        self.classify(&asked, status, &wire, told, retry_after, server.as_deref())
    }

    fn classify(
        &self,
        &Asked { what, region: asked, sent_on }: &Asked<'_>,
        status: StatusCode,
        wire: &WireError,
        told: bool,
        retry_after: Option<Duration>,
        server: Option<&str>,
    ) -> Failure {
        let place = self.server();
        let bucket = &self.bucket;
        let said = match (wire.code.as_str(), wire.message.as_str()) {
            ("", _) => format!("HTTP {status}"),
            (code, "") => format!("HTTP {} {code}", status.as_u16()),
            (code, message) => format!("HTTP {} {code}: {message}", status.as_u16()),
        };
        let origin = &self.settings.origin;
        match (wire.code.as_str(), status.as_u16()) {
            ("NoSuchBucket", _) => Failure::fatal(
                ErrorKind::Unavailable,
                format!(
                    "there is no bucket '{bucket}' at {place} ({said}); look at its spelling, and at the endpoint \
                     (AWS_ENDPOINT_URL) and region"
                ),
            ),
            ("PreconditionFailed", _) | (_, 412) => {
                Failure::fatal(ErrorKind::Stale, format!("{what}: the object has another version by now ({said})"))
            }
            ("InvalidRange", _) | (_, 416) => {
                Failure::fatal(ErrorKind::Stale, format!("{what}: the object has become shorter ({said})"))
            }
            ("RequestTimeTooSkewed" | "RequestExpired", _) => Failure::fatal(
                ErrorKind::PermissionDenied,
                format!(
                    "{place} refused {what} because clocks differ ({said}; its time is {}, ours {}); set this \
                     machine's clock",
                    wire.server_time.as_deref().unwrap_or("unknown"),
                    chrono::DateTime::<chrono::Utc>::from(SystemTime::now()).format("%Y-%m-%dT%H:%M:%SZ"),
                ),
            ),
            // With status 403, though nobody's rights are at fault.
            ("InvalidObjectState", _) => Failure::fatal(
                ErrorKind::PermissionDenied,
                format!("{place} refused {what} ({said}): the object is in an archive; restore it from there first"),
            ),
            ("SlowDown" | "RequestLimitExceeded" | "Throttling" | "ThrottlingException" | "TooManyRequests", _)
            // 509 and 529 are what some stores and gateways say for 503.
            | (_, 429 | 503 | 509 | 529) => Failure {
                error: Error::new(ErrorKind::Throttled, format!("{place} asks to slow down ({said})")),
                again: Again::SlowDown(retry_after),
            },
            ("RequestTimeout" | "InternalError" | "OperationAborted", _) | (_, 408 | 500 | 502 | 504) => {
                Failure::passing(ErrorKind::Unavailable, format!("{place} failed to serve {what} ({said})"))
            }
            (
                "PermanentRedirect"
                | "TemporaryRedirect"
                | "AuthorizationHeaderMalformed"
                | "IllegalLocationConstraintException",
                _,
            )
            | (_, 301 | 302 | 303 | 307 | 308) => match sent_on {
                Some(to) if wire.region.is_none() => self.another_place(what, &said, status, to),
                _ => self.other_region(what, asked, &said, wire.region.as_deref()),
            },
            // An answer to HEAD has no body: 400 with a region means the same as AuthorizationHeaderMalformed.
            ("", 400) if wire.region.as_deref().is_some_and(|region| region != asked) => {
                self.other_region(what, asked, &said, wire.region.as_deref())
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
            | (_, 401 | 403) => {
                let remedy = match wire.code.as_str() {
                    "InvalidAccessKeyId" => "the server does not know this access key",
                    "SignatureDoesNotMatch" => "the secret does not fit the access key",
                    "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken" => {
                        "the session token (AWS_SESSION_TOKEN) has run out or is another's"
                    }
                    _ => "this identity may not s3:ListBucket or s3:GetObject here",
                };
                Failure::fatal(
                    ErrorKind::PermissionDenied,
                    format!(
                        "{place} refused {what} in bucket '{bucket}' ({said}): {remedy}; used was {origin}, looked at \
                         were {}",
                        crate::aws::LOOKED_AT
                    ),
                )
            }
            ("NoSuchKey" | "NoSuchVersion" | "NotFound", _) | ("", 404) => {
                // S3 says it in a document: something between, which knows no bucket, must not make every file absent.
                if !told {
                    let message = format!(
                        "{place} answered {what} with {said} and no S3 error: something between, or no S3 server; look at \
                         the endpoint (AWS_ENDPOINT_URL)"
                    );
                    return Failure::passing(ErrorKind::Unavailable, message);
                }
                Failure::fatal(ErrorKind::NotFound, format!("{what}: no such object ({said})"))
            }
            // Before what has no S3 error: a gateway's own numbers (520, 530, …) come and go as 502 does.
            _ if status.is_server_error() => {
                Failure::passing(ErrorKind::Unavailable, format!("{place} failed to serve {what} ({said})"))
            }
            ("", _) => Failure::fatal(
                ErrorKind::Unavailable,
                format!(
                    "{place} answered {what} with {said}{} and no S3 error: it may be no S3 server; look at the \
                     endpoint (AWS_ENDPOINT_URL)",
                    server.map(|s| format!(" ({s})")).unwrap_or_default()
                ),
            ),
            _ => Failure::fatal(ErrorKind::Unavailable, format!("{place} refused {what} ({said})")),
        }
    }

    /// Where a `Location` points to.
    fn location(&self, region: &str, location: &str) -> Option<reqwest::Url> {
        let asked = reqwest::Url::parse(&self.url(region, "")).ok()?;
        asked.join(location).ok().filter(|to| matches!(to.scheme(), "http" | "https"))
    }

    /// What is signed for one place is not sent to another: says which.
    fn another_place(&self, what: &str, said: &str, status: StatusCode, to: &str) -> Failure {
        let place = self.server();
        let message = format!(
            "{place} sends {what} on to {to} ({said}), and a signed request can't follow; if the store is there, name it as \
             the endpoint (AWS_ENDPOINT_URL), else look what is between: it may want a login"
        );
        match status.as_u16() {
            301 | 308 => Failure::fatal(ErrorKind::Unavailable, message),
            _ => Failure::passing(ErrorKind::Unavailable, message),
        }
    }

    /// Follows a server that names the bucket's region, unless it was that region that was `asked`; says what to set
    /// otherwise. Requests that began before another one had followed it are sent again as well.
    fn other_region(&self, what: &str, asked: &str, said: &str, named: Option<&str>) -> Failure {
        let message = format!(
            "the bucket '{}' is not in region {asked}{} ({what}: {said}); set AWS_REGION, or the endpoint \
             (AWS_ENDPOINT_URL) it is reached at",
            self.bucket,
            named.map(|n| format!(" but in {n}")).unwrap_or_default()
        );
        let safe = |n: &&str| n.len() < 64 && n.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        let Some(named) = named.filter(safe).filter(|named| *named != asked) else {
            return Failure::fatal(ErrorKind::Unavailable, message);
        };
        let mut region = self.region.write();
        if *region != named {
            tracing::info!(bucket = %self.bucket, from = %*region, to = %named, "following the bucket's region");
            *region = named.to_owned();
        }
        Failure { error: Error::new(ErrorKind::Unavailable, message), again: Again::Now }
    }
}

/// Reads an answer that is a document; `None` when it breaks off or is longer than any document.
async fn document(response: HttpResponse) -> Option<Vec<u8>> {
    let mut stream = response.into_body().bytes_stream();
    let mut all = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk: Bytes = chunk.ok()?;
        if all.len() + chunk.len() > MAX_DOCUMENT {
            return None;
        }
        all.extend_from_slice(&chunk);
    }
    Some(all)
}

fn text(headers: &HeaderMap, name: http::HeaderName) -> Option<String> {
    headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned)
}

/// What an answer calls the version; one that is empty is none.
fn etag_of(headers: &HeaderMap) -> Option<String> {
    text(headers, ETAG).filter(|e| !s3_wire::bare_etag(e).is_empty())
}

impl Backend for S3Backend {
    fn twin(&self) -> Option<Box<dyn Backend>> {
        let client = connect(&self.settings, self.connect_timeout, self.idle_timeout).ok()?;
        Some(Box::new(S3Backend { place: Arc::clone(&self.place), client }))
    }

    fn attach(&self, shared: &tokio::runtime::Handle) {
        if let Signer::Role(role) = &self.settings.signer {
            role.attach(shared);
        }
    }

    fn describe(&self) -> String {
        let style = if self.virtual_hosted { "virtual-hosted" } else { "path" };
        format!("{} region {} ({style} style, {})", self.server(), self.region(), self.settings.origin)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max: usize,
    ) -> BoxFuture<'a, Result<RawPage, Failure>> {
        async move {
            // With a slash at its end a bucket's URL is the same to S3 but not to all that imitate it.
            let region = self.region();
            let mut url = self.url(&region, "");
            url.push('?');
            if let Some(token) = token {
                let _ = write!(url, "continuation-token={}&", encode(token));
            }
            let _ = write!(url, "delimiter=%2F&encoding-type=url&list-type=2&max-keys={max}&prefix={}", encode(prefix));
            let what = format!("the listing of '{prefix}'");
            let response = self.send(Method::GET, &region, url, HeaderMap::new()).await?;
            if response.status() != StatusCode::OK {
                return Err(self.refusal(&what, &Method::GET, &region, response).await);
            }
            let Some(body) = document(response).await else {
                let message = format!("{} broke off in the middle of {what}", self.server());
                return Err(Failure::passing(ErrorKind::Unavailable, message));
            };
            let (page, skipped) = s3_wire::parse_list(&body).map_err(|why| {
                let server = self.server();
                let message = match why {
                    NoPage::Other => format!(
                        "{server} answered {what} with something else than a listing: it is no S3 server; look at the \
                         endpoint (AWS_ENDPOINT_URL)"
                    ),
                    NoPage::NoWayOn => format!(
                        "{server} cut {what} short and did not say how to ask for the rest (IsTruncated without \
                         NextContinuationToken): it does not answer ListObjectsV2, and names would be missing; a newer \
                         release of that server may"
                    ),
                };
                Failure::fatal(ErrorKind::Unavailable, message)
            })?;
            self.stats.metadata.skipped_names.add(skipped);
            Ok(page)
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<RawObject, Failure>> {
        async move {
            let region = self.region();
            let response = self.send(Method::HEAD, &region, self.url(&region, key), HeaderMap::new()).await?;
            if response.status() != StatusCode::OK {
                return Err(self.refusal(&format!("the head of '{key}'"), &Method::HEAD, &region, response).await);
            }
            let headers = response.headers();
            let size = text(headers, http::header::CONTENT_LENGTH).and_then(|v| v.parse().ok());
            let Some(size) = size else {
                let message = format!("{} told no length of '{key}'; it is no S3 server", self.server());
                return Err(Failure::fatal(ErrorKind::Unavailable, message));
            };
            let mtime = text(headers, LAST_MODIFIED).and_then(|v| s3_wire::parse_time(&v));
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
    ) -> BoxFuture<'a, Result<RawBody, Failure>> {
        async move {
            let what = || format!("the read of '{key}' at {from}");
            let mut headers = HeaderMap::with_capacity(8);
            let header = |value: String| {
                HeaderValue::try_from(value).map_err(|e| Failure::fatal(ErrorKind::Invalid, format!("{}: {e}", what())))
            };
            headers.insert(RANGE, header(format!("bytes={from}-{}", to - 1))?);
            if let Some(etag) = etag {
                headers.insert(IF_MATCH, header(format!("\"{etag}\""))?);
            }
            let region = self.region();
            let response = self.send(Method::GET, &region, self.url(&region, key), headers).await?;
            let range = text(response.headers(), http::header::CONTENT_RANGE);
            let got = etag_of(response.headers());
            let mtime = text(response.headers(), LAST_MODIFIED).and_then(|v| s3_wire::parse_time(&v));
            let ranged = response.status() == StatusCode::PARTIAL_CONTENT;
            match response.status() {
                StatusCode::PARTIAL_CONTENT => {
                    let starts =
                        range.as_deref().and_then(|r| r.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok());
                    if starts != Some(from) {
                        let got = range.unwrap_or_default();
                        let message = format!("{} answered {} with another range ('{got}')", self.server(), what());
                        return Err(Failure::fatal(ErrorKind::Unavailable, message));
                    }
                }
                // The whole object, because the range is all of it or because ranges are not understood.
                StatusCode::OK if from == 0 => {}
                StatusCode::OK if got.is_none() && mtime.is_none() => return Err(Failure::nameless(&self.server())),
                StatusCode::OK => {
                    let message = format!("{} does not serve ranges: it answered {} from 0", self.server(), what());
                    return Err(Failure::fatal(ErrorKind::Unsupported, message));
                }
                _ => return Err(self.refusal(&what(), &Method::GET, &region, response).await),
            }
            let total = match &range {
                Some(range) => range.rsplit_once('/').and_then(|(_, total)| total.parse().ok()),
                None => text(response.headers(), http::header::CONTENT_LENGTH).and_then(|v| v.parse().ok()),
            };
            let place = self.server();
            let stream = response.into_body().bytes_stream().map(move |chunk| {
                chunk.map_err(|e| {
                    let message = format!("{place} broke off in the middle of a transfer: {}", root_cause(&e));
                    Failure::passing(ErrorKind::Unavailable, message)
                })
            });
            Ok(RawBody { etag: got, mtime, total, ranged, stream: stream.boxed() })
        }
        .boxed()
    }
}
