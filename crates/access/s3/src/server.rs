//! The listener of an endpoint: connections, their limits, TLS, and the end. Knows no bucket.

use crate::access_keys::AccessKeys;
use crate::bucket::{OpenBucket, SourceBucket};
use crate::chunks::PieceMemory;
use crate::client_rights::ClientRights;
use crate::client_socket::ClientSocket;
use crate::connections::{
    ClientConnection, ClientConnections, ConnectionPlace, ReadToEnd, RequestUnderWay, WatchedBody,
    end_after_unread_body,
};
use crate::error_documents::{complete_document, error_document};
use crate::service::BucketService;
use crate::signature_forms::check_signature_form;
use crate::special_requests::SpecialRequests;
use crate::tls::EndpointCertificate;
use crate::uploads::StagingDir;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE};
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::host::{S3Host, VirtualHost};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, HttpError, S3Result};
use spurline_sys::random;
use spurline_types::{Error, Result, Stats};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-amz-request-id");
/// How long a client may take for the head of a request, and how long an idle connection stays.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the handshake of TLS may take.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the refusal of a client may take.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after a failed accept: mostly, descriptors are missing.
const S3_ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of a connection's buffer: more than the largest head of a request. The HTTP library answers a head that does not fit with
/// 431.
pub(crate) const CONNECTION_BUFFER: usize = 64 << 10;
/// The largest head of a request: method, path, query and headers, as S3 has it.
const REQUEST_HEAD_MAX: usize = 8 << 10;
/// The largest XML document in a request: 1000 names to delete, or 10,000 parts.
pub(crate) const XML_MAX: usize = 4 << 20;

/// The settings of an endpoint.
pub struct EndpointConfig {
    /// Where to listen.
    pub listen: SocketAddr,
    /// The keys of clients; `None` serves every client that reaches the address.
    pub keys: Option<AccessKeys>,
    /// `None` for connections without encryption.
    pub certificate: Option<EndpointCertificate>,
    /// The name below which buckets are names of hosts; `None` for buckets in paths only.
    pub domain: Option<String>,
    /// The limits.
    pub limits: EndpointLimits,
    /// Directory for the parts of uploads until they are written to the source.
    pub upload_dir: PathBuf,
}

/// The limits of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointLimits {
    /// Connections at the same time. Each may take 192 KiB for the head of its request and small pieces of its answer.
    pub connections: usize,
    /// Pieces of 1 MiB of all answers together.
    pub large_pieces: usize,
    /// Pieces that may be pinned memory of the cache; others are copied.
    pub pinned_pieces: usize,
    /// Threads for calls that block.
    pub threads: usize,
}

/// An endpoint that serves until it is stopped or dropped.
pub struct S3Endpoint {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    connections: Arc<ClientConnections>,
    /// Taken only by the end.
    runtime: Option<Runtime>,
}

impl S3Endpoint {
    /// Whether the parts of uploads can lie in a directory.
    pub fn check_upload_dir(path: &Path) -> Result<()> {
        let shown = format_args!("--s3-upload-dir {}", path.display());
        StagingDir::check(path).map_err(|error| Error::io(shown, &error))
    }

    /// Serves the buckets.
    ///
    /// # Errors
    /// When the address is not available.
    pub fn start(config: EndpointConfig, buckets: Vec<SourceBucket>, stats: &Arc<Stats>) -> Result<Self> {
        let EndpointConfig { listen, keys, certificate, domain, limits, upload_dir } = config;
        let failed = |error: io::Error| Error::io(format_args!("--s3-listen {listen}"), &error);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(std::thread::available_parallelism().map_or(2, |count| count.get().clamp(2, 16)))
            .max_blocking_threads(limits.threads)
            .thread_name("s3")
            .enable_all()
            .build()
            .map_err(failed)?;
        let listener = runtime.block_on(TcpListener::bind(listen)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let memory = PieceMemory::new(limits.large_pieces, limits.pinned_pieces);
        let staging = StagingDir(upload_dir);
        let scheme = if certificate.is_some() { "https" } else { "http" };
        let buckets = buckets.into_iter().map(OpenBucket::new);
        let service = BucketService::new(buckets, memory, staging, scheme, Arc::clone(stats));
        let is_open = keys.is_none();
        let s3 = s3_service(service, keys, domain.as_deref());
        let requests = RequestService { s3, is_open, peer: address, stats: Arc::clone(stats) };
        let (stop, stopped) = watch::channel(false);
        let connections = ClientConnections::new(limits.connections);
        runtime.spawn(accept_clients(listener, requests, certificate, Arc::clone(&connections), stopped));
        Ok(S3Endpoint { address, stop, connections, runtime: Some(runtime) })
    }

    /// The most connections at the same time.
    pub fn connection_limit(&self) -> usize {
        self.connections.limit()
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more requests, and ends when those under way are answered, or at the deadline.
    pub fn stop(mut self, deadline: Instant) {
        let _ = self.stop.send(true);
        let Some(runtime) = self.runtime.take() else { return };
        let all_ended = self.connections.all_ended();
        let ended = runtime.block_on(async { tokio::time::timeout_at(deadline.into(), all_ended).await });
        if ended.is_err() {
            tracing::warn!("requests to the S3 endpoint were still being answered");
        }
        runtime.shutdown_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

impl Drop for S3Endpoint {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn s3_service(service: BucketService, keys: Option<AccessKeys>, domain: Option<&str>) -> S3Service {
    let unchecked = unsigned_service(service.clone(), domain).build();
    let mut builder = unsigned_service(service, domain);
    builder.set_route(SpecialRequests { unchecked, keys: keys.clone() });
    if let Some(keys) = keys {
        builder.set_auth(keys.clone());
        builder.set_access(keys);
    }
    builder.build()
}

/// The calls for requests without signatures.
fn unsigned_service(service: BucketService, domain: Option<&str>) -> S3ServiceBuilder {
    let mut builder = S3ServiceBuilder::new(service);
    if let Some(domain) = domain {
        builder.set_host(HostsOfBuckets { suffix: format!(".{domain}") });
    }
    let mut config = S3Config::default();
    config.xml_max_body_size = XML_MAX;
    builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(config))));
    builder
}

/// Names of hosts that are buckets: `BUCKET.DOMAIN`.
struct HostsOfBuckets {
    suffix: String,
}

impl S3Host for HostsOfBuckets {
    fn parse_host_header<'a>(&'a self, host: &'a str) -> S3Result<VirtualHost<'a>> {
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        // Names of hosts have no case.
        let bucket_len = name.len().checked_sub(self.suffix.len()).filter(|len| name.is_char_boundary(*len));
        let split = bucket_len.map(|len| name.split_at(len));
        Ok(match split.filter(|(_, domain)| domain.eq_ignore_ascii_case(&self.suffix)) {
            Some((bucket, _)) => VirtualHost::new(&self.suffix[1..]).with_bucket(bucket.to_ascii_lowercase()),
            None => VirtualHost::new(host),
        })
    }
}

async fn accept_clients(
    listener: TcpListener,
    requests: RequestService,
    certificate: Option<EndpointCertificate>,
    connections: Arc<ClientConnections>,
    mut stopped: watch::Receiver<bool>,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        let Ok((socket, peer)) = accepted else {
            tokio::time::sleep(S3_ACCEPT_PAUSE).await;
            continue;
        };
        let acceptor = certificate.as_ref().map(|certificate| TlsAcceptor::from(certificate.config()));
        let Some(place) = connections.take_place().await else {
            connections.log_full();
            requests.stats.s3.errors.add(1);
            // One at a time: further clients wait in the kernel's queue.
            refuse_client(socket, acceptor.is_some()).await;
            continue;
        };
        let requests = RequestService { peer, ..requests.clone() };
        let stopped = stopped.clone();
        tokio::spawn(async move {
            requests.stats.s3.connections.add(1);
            let end = serve_client(socket, acceptor, &requests, &place, stopped).await;
            requests.stats.s3.connections.sub(1);
            if let Err(error) = end {
                tracing::debug!("the connection of {peer} ended: {error}");
            }
        });
    }
}

/// Answers the first request of a client that gets no connection. A client that encrypts sees the end of its connection.
async fn refuse_client(mut socket: TcpStream, is_encrypted: bool) {
    if is_encrypted {
        return;
    }
    let document = error_document("SlowDown", "requests of all connections of the endpoint are under way");
    let answer = format!(
        "HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{document}",
        document.len()
    );
    let _ = tokio::time::timeout(REFUSAL_TIMEOUT, async {
        // A connection with unread bytes ends with a reset, and the refusal would be lost.
        let _ = socket.read(&mut [0; REQUEST_HEAD_MAX]).await;
        socket.write_all(answer.as_bytes()).await
    })
    .await;
}

async fn serve_client(
    socket: TcpStream,
    acceptor: Option<TlsAcceptor>,
    requests: &RequestService,
    place: &ConnectionPlace,
    stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let socket = ClientSocket::new(socket);
    match acceptor {
        None => serve_requests(socket, requests, &place.connection, stopped).await,
        Some(acceptor) => {
            let encrypted = tokio::time::timeout(TLS_HANDSHAKE_TIMEOUT, acceptor.accept(socket)).await??;
            serve_requests(encrypted, requests, &place.connection, stopped).await
        }
    }
}

async fn serve_requests(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    requests: &RequestService,
    connection: &Arc<ClientConnection>,
    mut stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let service = service_fn(|request| requests.answer(request, connection));
    let mut served = pin!(
        hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(CONNECTION_BUFFER)
            .serve_connection(TokioIo::new(stream), service)
    );
    tokio::select! {
        ended = served.as_mut() => return ended.map_err(io::Error::other),
        _ = stopped.changed() => {}
        () = connection.ordered_to_end() => {}
    }
    served.as_mut().graceful_shutdown();
    served.await.map_err(io::Error::other)
}

/// Answers requests, and counts them.
#[derive(Clone)]
struct RequestService {
    s3: S3Service,
    /// The endpoint has no keys, so signatures are not checked.
    is_open: bool,
    /// The client of the connection.
    peer: SocketAddr,
    stats: Arc<Stats>,
}

impl RequestService {
    async fn answer(
        &self,
        request: Request<Incoming>,
        connection: &Arc<ClientConnection>,
    ) -> std::result::Result<Response<WatchedBody<Body, RequestUnderWay>>, HttpError> {
        let under_way = connection.begin_request();
        let started = Instant::now();
        let method = request.method().clone();
        let path = tracing::enabled!(tracing::Level::DEBUG).then(|| request.uri().path().to_owned());
        let (head, body) = request.into_parts();
        let (body, is_read) = WatchedBody::of_request(body);
        let mut answered = self.route(Request::from_parts(head, body)).await;
        let request_id = next_request_id();
        if let Ok(answer) = &mut answered {
            end_after_unread_body(answer, &is_read);
            // The library gives each answer to HeadObject the status of a whole object.
            if answer.status() == StatusCode::OK && answer.headers().contains_key(CONTENT_RANGE) {
                *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
            }
            complete_document(answer, &request_id);
            if let Ok(value) = HeaderValue::from_str(&request_id) {
                answer.headers_mut().insert(REQUEST_ID, value);
            }
        }
        let counted = &self.stats.s3;
        counted.ops.add(1);
        counted.busy_us.add_us(started.elapsed());
        let status = answered.as_ref().map_or(StatusCode::INTERNAL_SERVER_ERROR, Response::status);
        if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED {
            counted.errors.add(1);
        }
        if let (Some(path), Ok(answer)) = (path, &answered) {
            let len = answer.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()).unwrap_or("-");
            let micros = started.elapsed().as_micros();
            let RequestService { peer, .. } = self;
            let status = status.as_u16();
            tracing::debug!("{peer} {method} {path:?} status={status} len={len} us={micros} id={request_id}");
        }
        answered.map(|answer| answer.map(|body| WatchedBody { body, end: under_way }))
    }

    async fn route(
        &self,
        mut request: Request<WatchedBody<Incoming, ReadToEnd>>,
    ) -> std::result::Result<Response<Body>, HttpError> {
        if head_bytes(&request) > REQUEST_HEAD_MAX {
            let why = "the headers and the query are larger than 8 KiB";
            return Ok(refusal(StatusCode::BAD_REQUEST, "RequestHeaderSectionTooLarge", why));
        }
        if request.method() == Method::POST {
            if has_type(&request, "multipart/form-data") {
                let why = "the endpoint takes no uploads by forms of browsers";
                return Ok(refusal(StatusCode::NOT_IMPLEMENTED, "NotImplemented", why));
            }
            // A POST has a document, which is in memory as a whole.
            if request.body().size_hint().lower() > XML_MAX as u64 {
                let why = "the document is larger than 4 MiB";
                return Ok(refusal(StatusCode::PAYLOAD_TOO_LARGE, "EntityTooLarge", why));
            }
        }
        if self.is_open {
            remove_signature(&mut request);
            request.extensions_mut().insert(Arc::new(ClientRights::default()));
        } else if let Err(error) = check_signature_form(request.uri(), request.headers()) {
            let status = error.status_code().unwrap_or(StatusCode::BAD_REQUEST);
            return Ok(refusal(status, error.code().as_str(), error.message().unwrap_or_default()));
        }
        self.s3.call(request.map(|body| Body::http_body_unsync(body.map_err(Box::new)))).await
    }
}

/// A number for a request; a restart begins at another number.
fn next_request_id() -> String {
    static FIRST: LazyLock<u64> = LazyLock::new(random);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{:016X}", FIRST.wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed)))
}

/// The length of a request's first line and headers.
fn head_bytes<B>(request: &Request<B>) -> usize {
    const FIRST_LINE_REST: usize = "  HTTP/1.1\r\n".len();
    const HEADER_REST: usize = ": \r\n".len();
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + HEADER_REST);
    request.method().as_str().len() + target + FIRST_LINE_REST + headers.sum::<usize>()
}

/// An answer that the library behind the calls would not give.
fn refusal(status: StatusCode, code: &str, why: &str) -> Response<Body> {
    let mut refused = Response::new(Body::http_body(Full::new(Bytes::from(error_document(code, why)))));
    *refused.status_mut() = status;
    refused.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    refused
}

fn has_type<B>(request: &Request<B>, wanted: &str) -> bool {
    let given = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    given.is_some_and(|given| given.trim_start().to_ascii_lowercase().starts_with(wanted))
}

/// Removes the signature of a request that is not checked, or has been.
pub(crate) fn remove_signature<B>(request: &mut Request<B>) {
    request.headers_mut().remove(AUTHORIZATION);
    let uri = request.uri();
    let Some(query) = uri.query() else { return };
    let is_signature = |pair: &&str| pair.starts_with("X-Amz-") || pair.starts_with("Signature=");
    if !query.split('&').any(|pair| is_signature(&pair)) {
        return;
    }
    let left: Vec<&str> = query.split('&').filter(|pair| !is_signature(pair)).collect();
    if let Ok(unsigned) = format!("{}?{}", uri.path(), left.join("&")).parse::<Uri>() {
        *request.uri_mut() = unsigned;
    }
}
