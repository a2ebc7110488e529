//! Google Cloud Storage and Azure Blob Storage through the object-store library, one attempt at a time. It
//! deliberately retries nothing and knows no folders.
//!
//! Credentials and endpoints come from the library's own variables: `GOOGLE_APPLICATION_CREDENTIALS`,
//! `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY` and so on. The library's paths
//! refuse some valid names (`a//b`, control characters): a listing that contains one is an error that names it, and
//! so is a request for one.

use crate::backend::{ObjectBackend, RawBody, RawObject, RawPage, RequestFailure, RetryHint};
use crate::ca_store::CaStore;
use crate::config::OriginOptions;
use crate::messages::root_cause;
use crate::source::{SourceLocation, SourceScheme};
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use http::header::{ACCEPT_ENCODING, HeaderValue, RANGE};
use http::{Method, StatusCode};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
    ReqwestConnector,
};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{ClientOptions, GetOptions, GetRange, ObjectMeta, ObjectStore, RetryConfig};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Bytes of an error's body that its message has.
const REFUSAL_BODY_MAX: usize = 4096;

/// An answer that is an error without a type in the library, which shows such a status in words only.
#[derive(Debug)]
struct RefusedRequest {
    status: StatusCode,
    body: String,
}

impl RefusedRequest {
    /// The refusal that an error of the library is about.
    fn find_in<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a RefusedRequest> {
        std::iter::successors(Some(error), |error| error.source()).find_map(|error| error.downcast_ref())
    }
}

impl std::fmt::Display for RefusedRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the server answered {}: {}", self.status, self.body.trim())
    }
}

impl std::error::Error for RefusedRequest {}

/// Makes clients whose refused requests have a status. With `stored_form`, requests for objects accept the packed form, so that the
/// store does not unpack what was stored with `Content-Encoding: gzip`; requests for listings, which would then arrive packed as
/// well, stay as they are.
#[derive(Debug)]
struct StatusConnector {
    stored_form: bool,
}

#[derive(Debug)]
struct StatusService {
    client: HttpClient,
    stored_form: bool,
}

impl HttpConnector for StatusConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(StatusService { client, stored_form: self.stored_form }))
    }
}

/// Whether an error has a type in the library. An error of a listing has none; and an absent token must not look like an
/// absent object.
fn is_typed_by_library(status: StatusCode, is_listing: bool) -> bool {
    !is_listing && matches!(status, StatusCode::NOT_FOUND | StatusCode::PRECONDITION_FAILED)
}

/// Whether a request lists a bucket (Google) or a container (Azure).
fn is_listing(request: &HttpRequest) -> bool {
    let query = request.uri().query().unwrap_or_default();
    query.split('&').any(|pair| pair == "list-type=2" || pair == "comp=list")
}

/// The first bytes of a body.
async fn read_start(body: HttpResponseBody) -> String {
    let mut start = Vec::new();
    let mut pieces = body.bytes_stream();
    while start.len() < REFUSAL_BODY_MAX
        && let Some(Ok(piece)) = pieces.next().await
    {
        start.extend_from_slice(&piece[..piece.len().min(REFUSAL_BODY_MAX - start.len())]);
    }
    String::from_utf8_lossy(&start).into_owned()
}

impl HttpService for StatusService {
    fn call<'a, 'b>(&'a self, mut request: HttpRequest) -> BoxFuture<'b, Result<HttpResponse, HttpError>>
    where
        'a: 'b,
        Self: 'b,
    {
        if self.stored_form && (request.method() == Method::HEAD || request.headers().contains_key(RANGE)) {
            request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        let is_listing = is_listing(&request);
        async move {
            let response = self.client.execute(request).await?;
            let status = response.status();
            let is_error = status.is_client_error() || status.is_server_error();
            if !is_error || is_typed_by_library(status, is_listing) {
                return Ok(response);
            }
            let body = read_start(response.into_body()).await;
            Err(HttpError::new(HttpErrorKind::Unknown, RefusedRequest { status, body }))
        }
        .boxed()
    }
}

/// A bucket or container, accessed through the library's own store.
pub(crate) struct ObjectStoreBackend {
    store: Arc<dyn ObjectStore>,
    lister: Arc<dyn PaginatedListStore>,
    name: String,
    variables: &'static str,
}

impl ObjectStoreBackend {
    /// # Errors
    /// `Invalid` for variables that can't be right.
    pub(crate) fn new(source: &SourceLocation, config: &OriginOptions) -> Result<Self> {
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let endpoint = |name: &str| config.endpoint.clone().or_else(|| config.env.get(name));
        let roots = CaStore::of_host();
        let options = |endpoint: Option<&str>| {
            let plain = endpoint.is_some_and(|e| e.starts_with("http://"));
            if !plain {
                roots.require_any(source.url())?;
            }
            let options = ClientOptions::new()
                .with_allow_http(plain)
                .with_connect_timeout(config.connect_timeout)
                .with_pool_idle_timeout(config.idle_timeout())
                .with_timeout_disabled();
            Ok::<_, Error>(roots.apply_to(options))
        };
        let variables = if source.scheme() == SourceScheme::Gcs {
            "GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT and the instance's account"
        } else {
            "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_CLIENT_ID and the \
             machine's identity"
        };
        let wrong = |e: object_store::Error| {
            let why = format!("{} can't be opened: {}; check {variables}", source.url(), root_cause(&e));
            Error::new(ErrorKind::Invalid, why)
        };
        if source.scheme() == SourceScheme::Gcs {
            let mut builder = GoogleCloudStorageBuilder::new();
            for (name, value) in config.env.starting_with("GOOGLE_") {
                if let Ok(key) = name.to_ascii_lowercase().parse() {
                    builder = builder.with_config(key, value);
                }
            }
            let base = endpoint("GOOGLE_BASE_URL");
            if let Some(base) = &base {
                builder = builder.with_base_url(base);
            }
            let store = builder
                .with_bucket_name(source.bucket())
                .with_http_connector(StatusConnector { stored_form: true })
                .with_retry(retry)
                .with_client_options(options(base.as_deref())?)
                .with_skip_signature(config.anonymous)
                .build();
            let store = Arc::new(store.map_err(wrong)?);
            Ok(ObjectStoreBackend { lister: store.clone(), store, name: "Google Cloud Storage".into(), variables })
        } else {
            let mut builder = MicrosoftAzureBuilder::new();
            for (name, value) in config.env.starting_with("AZURE_") {
                if let Ok(key) = name.to_ascii_lowercase().parse() {
                    builder = builder.with_config(key, value);
                }
            }
            let base = endpoint("AZURE_STORAGE_ENDPOINT");
            if let Some(base) = &base {
                builder = builder.with_endpoint(base.clone());
            }
            let store = builder
                .with_container_name(source.bucket())
                .with_http_connector(StatusConnector { stored_form: false })
                .with_retry(retry)
                .with_client_options(options(base.as_deref())?)
                .with_skip_signature(config.anonymous)
                .build();
            let store = Arc::new(store.map_err(wrong)?);
            Ok(ObjectStoreBackend { lister: store.clone(), store, name: "Azure Blob Storage".into(), variables })
        }
    }

    fn parse_path(&self, key: &str) -> Result<Path, RequestFailure> {
        Path::parse(key).map_err(|e| {
            let message = format!("the name '{}' can't be requested from {}: {e}", key.escape_debug(), self.name);
            RequestFailure::fatal(ErrorKind::Unsupported, message)
        })
    }

    fn classify_error(&self, what: &str, error: &object_store::Error) -> RequestFailure {
        use object_store::Error as E;
        let name = &self.name;
        // Only the cause is used: the whole message repeats the object's name.
        let cause = root_cause(error);
        match (RefusedRequest::find_in(error).map(|refused| refused.status), error) {
            (Some(StatusCode::NOT_FOUND), _) => RequestFailure::fatal(
                ErrorKind::NotFound,
                format!("{name} has no such bucket or container ({cause}); check its spelling"),
            ),
            (None, E::NotFound { .. }) => {
                RequestFailure::fatal(ErrorKind::NotFound, format!("{what}: no such object ({cause})"))
            }
            (None, E::Precondition { .. } | E::NotModified { .. }) => {
                RequestFailure::fatal(ErrorKind::Stale, format!("{what}: the object has been replaced ({cause})"))
            }
            (Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN), _) => RequestFailure::fatal(
                ErrorKind::PermissionDenied,
                format!("{name} refused {what} ({cause}); check {}", self.variables),
            ),
            (Some(StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE), _) => {
                let message = format!("{name} failed to serve {what}: {cause}");
                let error = Error::new(ErrorKind::Throttled, message);
                RequestFailure { error, advice: RetryHint::SlowDown(None) }
            }
            (_, E::InvalidPath { source }) => RequestFailure::fatal(
                ErrorKind::Unsupported,
                format!("{what} contains a name that can't be served here: {source}"),
            ),
            _ => RequestFailure::transient(ErrorKind::Unavailable, format!("{name} failed to serve {what}: {cause}")),
        }
    }
}

/// Modification time in whole seconds, as everywhere.
fn whole_seconds(meta: &ObjectMeta) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(meta.last_modified.timestamp()).unwrap_or(0))
}

fn raw_object(meta: &ObjectMeta) -> RawObject {
    RawObject { key: meta.location.to_string(), size: meta.size, mtime: whole_seconds(meta), etag: meta.e_tag.clone() }
}

impl ObjectBackend for ObjectStoreBackend {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max: usize,
    ) -> BoxFuture<'a, Result<RawPage, RequestFailure>> {
        async move {
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                max_keys: Some(max),
                page_token: token.map(str::to_owned),
                ..PaginatedListOptions::default()
            };
            let answer = self.lister.list_paginated(Some(prefix).filter(|p| !p.is_empty()), options).await;
            let page = answer.map_err(|e| self.classify_error(&format!("the listing of '{prefix}'"), &e))?;
            // The library removes the trailing slash of prefixes and of folder markers.
            let marker = prefix.trim_end_matches('/');
            Ok(RawPage {
                objects: (page.result.objects.iter().map(raw_object))
                    .map(|o| if o.key == marker { RawObject { key: prefix.to_owned(), ..o } } else { o })
                    .collect(),
                prefixes: page.result.common_prefixes.iter().map(|p| format!("{p}/")).collect(),
                next: page.page_token.filter(|t| !t.is_empty()),
            })
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<RawObject, RequestFailure>> {
        async move {
            // The library can't name the marker of a folder, but lists it.
            if key.ends_with('/') {
                let marker = self.list(key, None, 1).await?.objects.into_iter().find(|object| object.key == key);
                return marker.ok_or_else(|| RequestFailure::fatal(ErrorKind::NotFound, format!("no object '{key}'")));
            }
            let options = GetOptions { head: true, ..GetOptions::default() };
            let answer = self.store.get_opts(&self.parse_path(key)?, options).await;
            Ok(raw_object(&answer.map_err(|e| self.classify_error(&format!("the head of '{key}'"), &e))?.meta))
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
            let what = format!("the read of '{key}' at {from}");
            let options = GetOptions {
                if_match: etag.map(|e| format!("\"{e}\"")),
                range: Some(GetRange::Bounded(from..to)),
                ..GetOptions::default()
            };
            let answer = self.store.get_opts(&self.parse_path(key)?, options).await;
            let answer = answer.map_err(|e| self.classify_error(&what, &e))?;
            let etag = answer.meta.e_tag.clone();
            let total = Some(answer.meta.size);
            let mtime = Some(whole_seconds(&answer.meta));
            let range = Some(answer.range.clone());
            let name = self.name.clone();
            let stream = answer.into_stream().map(move |chunk| {
                chunk.map_err(|e| {
                    let message = format!("{name} ended a transfer early: {}", root_cause(&e));
                    RequestFailure::transient(ErrorKind::Unavailable, message)
                })
            });
            Ok(RawBody { etag, mtime, total, range, partial: true, stream: stream.boxed() })
        }
        .boxed()
    }
}
