//! The metrics server: Prometheus text, JSON, a page for people, a health check. A separate thread and runtime serve, also while
//! the rest of the process waits.

use crate::AdminTarget;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use spurline_types::stats::{METRICS, MetricKind};
use spurline_types::{IoContext, Result};
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};

/// Connection limit: scrapers, a few browsers, health checks.
const MAX_HTTP_CONNECTIONS: usize = 64;
/// A connection is closed after this time in any case; browsers and scrapers reconnect.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);
/// Deadline for a client's request line and headers.
const HEADER_LIMIT: Duration = Duration::from_secs(10);

/// How many ports after a taken default port are tried: more than a host has processes with metrics.
const NEXT_PORTS: u16 = 200;

const STATUS_PAGE: &str = include_str!("page.html");

/// The server's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsBind {
    /// This address, else an error.
    Exactly(SocketAddr),
    /// This address, or the next free port there.
    Near(SocketAddr),
}

/// A running metrics server; a drop ends the server.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    _stop: oneshot::Sender<()>,
}

impl MetricsServer {
    /// Serves `target`.
    ///
    /// # Errors
    /// When the address is not available; the error names the address.
    pub fn start(bind: MetricsBind, target: Arc<dyn AdminTarget>) -> Result<Self> {
        let (wanted, last_port) = match bind {
            MetricsBind::Exactly(address) => (address, address.port()),
            MetricsBind::Near(address) => (address, address.port().saturating_add(NEXT_PORTS)),
        };
        let listener = bind_first_free(wanted, last_port).io_context(format_args!("metrics at {wanted}"))?;
        listener.set_nonblocking(true).io_context(format_args!("metrics at {wanted}"))?;
        let address = listener.local_addr().io_context(format_args!("metrics at {wanted}"))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .io_context(format_args!("metrics at {wanted}"))?;
        let (stop, stopped) = oneshot::channel();
        std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = serve_metrics(listener, target) => {}
                        _ = stopped => {}
                    }
                });
                runtime.shutdown_background();
            })
            .io_context(format_args!("metrics at {wanted}"))?;
        Ok(MetricsServer { address, _stop: stop })
    }

    /// The address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Listens at the first free port from that of `wanted` to `last_port`.
fn bind_first_free(wanted: SocketAddr, last_port: u16) -> std::io::Result<TcpListener> {
    let mut at = wanted;
    loop {
        match TcpListener::bind(at) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && at.port() < last_port => {
                at.set_port(at.port() + 1);
            }
            bound => return bound,
        }
    }
}

async fn serve_metrics(listener: TcpListener, target: Arc<dyn AdminTarget>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%error, "the metrics server can't start");
            return;
        }
    };
    let room = Arc::new(Semaphore::new(MAX_HTTP_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, most likely.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let target = Arc::clone(&target);
        tokio::spawn(async move {
            let _place = place;
            let service = service_fn(move |request| {
                let target = Arc::clone(&target);
                async move { Ok::<_, Infallible>(route_request(&request, target.as_ref())) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_LIMIT)
                .serve_connection(TokioIo::new(stream), service);
            // A failure of a scraper's connection needs no action.
            let _ = tokio::time::timeout(CONNECTION_LIMIT, connection).await;
        });
    }
}

fn route_request(request: &Request<Incoming>, target: &dyn AdminTarget) -> Response<Full<Bytes>> {
    const TEXT_TYPE: &str = "text/plain; charset=utf-8";
    const JSON_TYPE: &str = "application/json";
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return build_response(StatusCode::METHOD_NOT_ALLOWED, TEXT_TYPE, "only GET is supported\n".into());
    }
    match request.uri().path() {
        "/metrics" => build_response(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", target.prometheus()),
        "/stats.json" => build_response(StatusCode::OK, JSON_TYPE, target.stats().to_string()),
        "/status.json" => build_response(StatusCode::OK, JSON_TYPE, target.status().to_string()),
        "/healthz" => match target.health() {
            Ok(()) => build_response(StatusCode::OK, TEXT_TYPE, "ok\n".into()),
            Err(error) => build_response(StatusCode::SERVICE_UNAVAILABLE, TEXT_TYPE, format!("{error}\n")),
        },
        "/" => build_response(StatusCode::OK, "text/html; charset=utf-8", metrics_page()),
        other => build_response(
            StatusCode::NOT_FOUND,
            TEXT_TYPE,
            format!("there is no {other}; the pages are /, /metrics, /stats.json, /status.json, /healthz\n"),
        ),
    }
}

fn build_response(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The page with the table of metrics; everything else comes from /stats.json.
fn metrics_page() -> String {
    let table: Vec<Value> = METRICS
        .iter()
        .map(|m| {
            let counter = m.kind == MetricKind::Counter;
            json!({"section": m.section, "name": m.name, "counter": counter, "unit": m.unit, "help": m.help})
        })
        .collect();
    // A `</script>` in a help text would end the script.
    STATUS_PAGE.replace("/*METRICS*/[]", &Value::from(table).to_string().replace('<', "\\u003c"))
}
