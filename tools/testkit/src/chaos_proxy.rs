//! A proxy on loopback that applies faults to chosen requests: stall, cut, throttle, refuse, delay. Deliberately understands only
//! heads and lengths of HTTP, so that all other bytes pass unchanged.

use crate::http1::{HttpHead, relay_body};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::{self, BufReader, BufWriter, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// A fault of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProxyFault {
    /// Return 503 SlowDown without a request to the server.
    SlowDown,
    /// Answer with this status, S3 error code and message.
    Error(u16, &'static str, &'static str),
    /// Answer 200 with an HTML page, as another kind of server would.
    Html,
    /// Return this status and an HTML page, as a proxy in between would.
    Page(u16),
    /// Return this text, head and body, and close the connection.
    Raw(String),
    /// Close the connection without an answer.
    Close,
    /// Accept the request and never answer.
    Stall,
    /// Forward the request, and close the connection in place of the answer.
    LoseAnswer,
    /// Close the connection after half of the answer's body.
    CutHalf,
    /// Close the connection after this many bytes of the answer's body.
    CutAfter(u64),
    /// Pass this many bytes of the answer's body, then stall.
    StallAfter(u64),
    /// Wait this long, then forward the request.
    Delay(Duration),
}

struct PlannedFault {
    method: Option<&'static str>,
    path: String,
    fault: ProxyFault,
    times: u32,
}

type RequestHook = Arc<dyn Fn(&str, &str) + Send + Sync>;

struct ProxyState {
    target: SocketAddr,
    planned: VecDeque<PlannedFault>,
    log: Vec<(String, String)>,
    latency: Duration,
    refusing: bool,
    closed: bool,
    hook: Option<RequestHook>,
    /// How far the server's clock is ahead, in seconds, for requests that state a time.
    clock_ahead_s: Option<i64>,
    connections: Vec<TcpStream>,
}

struct ProxyShared {
    state: Mutex<ProxyState>,
    closing: Condvar,
}

/// A proxy in front of `target`. A drop closes all connections.
pub struct ChaosProxy {
    address: SocketAddr,
    shared: Arc<ProxyShared>,
}

impl ChaosProxy {
    /// Listens on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// When no port is free.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let state = ProxyState {
            target,
            planned: VecDeque::new(),
            log: Vec::new(),
            latency: Duration::ZERO,
            refusing: false,
            closed: false,
            hook: None,
            clock_ahead_s: None,
            connections: Vec::new(),
        };
        let shared = Arc::new(ProxyShared { state: Mutex::new(state), closing: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("testkit-proxy".into())
            .spawn(move || accept_clients(&listener, &of_thread))?;
        Ok(ChaosProxy { address, shared })
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The endpoint URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Applies `fault` to the next `times` requests.
    pub fn inject(&self, fault: ProxyFault, times: u32) {
        self.inject_on(None, "", fault, times);
    }

    /// Applies `fault` to the next `times` requests of this method (any for `None`) with a path and query that contain
    /// `path`.
    pub fn inject_on(&self, method: Option<&'static str>, path: &str, fault: ProxyFault, times: u32) {
        self.shared.state.lock().planned.push_back(PlannedFault { method, path: path.into(), fault, times });
    }

    /// Removes all pending faults.
    pub fn clear_faults(&self) {
        let mut state = self.shared.state.lock();
        state.planned.clear();
        state.refusing = false;
        state.latency = Duration::ZERO;
    }

    /// Delays every request by this long.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.state.lock().latency = latency;
    }

    /// Closes all connections, and new connections at once.
    pub fn refuse_connections(&self, refuse: bool) {
        let mut state = self.shared.state.lock();
        state.refusing = refuse;
        if refuse {
            for connection in state.connections.drain(..) {
                let _ = connection.shutdown(Shutdown::Both);
            }
        }
    }

    /// Behaves as a server with a clock that is this many seconds ahead: refuses requests with another `x-amz-date`.
    pub fn set_clock_ahead(&self, seconds: i64) {
        self.shared.state.lock().clock_ahead_s = Some(seconds);
    }

    /// Calls `hook(method, path)` before each request is forwarded, on that request's own thread.
    pub fn on_request(&self, hook: impl Fn(&str, &str) + Send + Sync + 'static) {
        self.shared.state.lock().hook = Some(Arc::new(hook));
    }

    /// Number of requests of this method (any for `""`) with a path and query that contain `path`.
    pub fn count_requests(&self, method: &str, path: &str) -> usize {
        let state = self.shared.state.lock();
        state.log.iter().filter(|(m, p)| (method.is_empty() || m == method) && p.contains(path)).count()
    }

    /// All requests, oldest first.
    pub fn requests(&self) -> Vec<(String, String)> {
        self.shared.state.lock().log.clone()
    }

    /// Clears the log of requests.
    pub fn forget_requests(&self) {
        self.shared.state.lock().log.clear();
    }
}

impl Drop for ChaosProxy {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.closed = true;
        for connection in state.connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
        drop(state);
        self.shared.closing.notify_all();
        // Wakes the accepting thread, which then ends.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

fn accept_clients(listener: &TcpListener, shared: &Arc<ProxyShared>) {
    for client in listener.incoming() {
        let Ok(client) = client else { continue };
        let mut state = shared.state.lock();
        if state.closed {
            return;
        }
        if state.refusing {
            continue;
        }
        if let Ok(copy) = client.try_clone() {
            state.connections.push(copy);
        }
        drop(state);
        let shared = Arc::clone(shared);
        // Errors of single connections are expected here.
        let _ = std::thread::Builder::new().name("testkit-proxy".into()).spawn(move || {
            let _ = serve_client(&client, &shared);
            let _ = client.shutdown(Shutdown::Both);
        });
    }
}

impl ProxyShared {
    /// The fault for this request, if planned.
    fn take_fault(&self, method: &str, path: &str) -> Option<ProxyFault> {
        let mut state = self.state.lock();
        state.log.push((method.into(), path.into()));
        let i = state
            .planned
            .iter()
            .position(|p| p.method.is_none_or(|m| m == method) && path.contains(&p.path) && p.times > 0)?;
        state.planned[i].times -= 1;
        let fault = state.planned[i].fault.clone();
        if state.planned[i].times == 0 {
            state.planned.remove(i);
        }
        Some(fault)
    }

    /// Holds a connection open without an answer until the proxy ends or a minute has passed.
    fn hold_open(&self) {
        let mut state = self.state.lock();
        if !state.closed {
            self.closing.wait_for(&mut state, Duration::from_secs(60));
        }
    }
}

fn serve_client(client: &TcpStream, shared: &ProxyShared) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut from_client = BufReader::new(client);
    let mut to_client = BufWriter::with_capacity(256 << 10, client);
    let mut upstream: Option<TcpStream> = None;
    while let Some(request) = HttpHead::read(&mut from_client)? {
        let method = request.word(0).to_owned();
        let path = request.word(1).to_owned();
        let fault = shared.take_fault(&method, &path);
        let (latency, target, hook, clock) = {
            let state = shared.state.lock();
            (state.latency, state.target, state.hook.clone(), state.clock_ahead_s)
        };
        std::thread::sleep(latency);
        if let Some(hook) = hook {
            hook(&method, &path);
        }
        let skewed = clock.and_then(|ahead| skew_refusal(&request, ahead));
        let answer = match &fault {
            _ if skewed.is_some() => skewed,
            Some(ProxyFault::SlowDown) => Some(error_page(503, "SlowDown", "Please reduce your request rate.")),
            Some(ProxyFault::Error(status, code, message)) => Some(error_page(*status, code, message)),
            Some(ProxyFault::Html) => Some(http_page(200, "text/html", "<html><body>It works!</body></html>")),
            Some(ProxyFault::Page(status)) => Some(http_page(*status, "text/html", "<html><body>proxy</body></html>")),
            Some(ProxyFault::Close) => return Ok(()),
            Some(ProxyFault::Stall) => {
                shared.hold_open();
                return Ok(());
            }
            Some(ProxyFault::Delay(time)) => {
                std::thread::sleep(*time);
                None
            }
            _ => None,
        };
        if let Some(ProxyFault::Raw(words)) = &fault {
            relay_request_body(&request, &mut from_client, &mut io::sink())?;
            to_client.write_all(words.as_bytes())?;
            return to_client.flush();
        }
        if let Some((head, body)) = answer {
            relay_request_body(&request, &mut from_client, &mut io::sink())?;
            to_client.write_all(head.as_bytes())?;
            if method != "HEAD" {
                to_client.write_all(body.as_bytes())?;
            }
            to_client.flush()?;
            continue;
        }
        let server = match upstream.take() {
            Some(server) => server,
            None => {
                let server = TcpStream::connect(target)?;
                server.set_nodelay(true)?;
                server
            }
        };
        let mut to_server = BufWriter::new(&server);
        to_server.write_all(&request.raw)?;
        relay_request_body(&request, &mut from_client, &mut to_server)?;
        to_server.flush()?;
        drop(to_server);
        let mut from_server = BufReader::with_capacity(256 << 10, &server);
        let Some(response) = HttpHead::read(&mut from_server)? else { return Ok(()) };
        if fault == Some(ProxyFault::LoseAnswer) {
            return Ok(());
        }
        to_client.write_all(&response.raw)?;
        if response.has_body(&method) {
            let limit = match fault {
                Some(ProxyFault::CutHalf) => response.length.unwrap_or(2) / 2,
                Some(ProxyFault::CutAfter(n) | ProxyFault::StallAfter(n)) => n,
                _ => u64::MAX,
            };
            let mut left = limit;
            if !relay_body(&response, &mut from_server, &mut to_client, |n| {
                let allowed = n.min(left);
                left -= allowed;
                allowed
            })? {
                if matches!(fault, Some(ProxyFault::StallAfter(_))) {
                    shared.hold_open();
                }
                return Ok(());
            }
        }
        to_client.flush()?;
        if response.close || request.close {
            return Ok(());
        }
        drop(from_server);
        upstream = Some(server);
    }
    Ok(())
}

fn relay_request_body(request: &HttpHead, from: &mut impl io::BufRead, to: &mut impl Write) -> io::Result<()> {
    if request.chunked || request.length.is_some_and(|n| n > 0) {
        relay_body(request, from, to, |n| n)?;
    }
    Ok(())
}

/// The refusal of a server with a clock that is `ahead` seconds ahead, if the request's time differs by over 15 minutes.
fn skew_refusal(request: &HttpHead, ahead: i64) -> Option<(String, String)> {
    let head = String::from_utf8_lossy(&request.raw).to_ascii_lowercase();
    let date = head.lines().find_map(|line| line.strip_prefix("x-amz-date:"))?.trim().to_ascii_uppercase();
    let stated = chrono::NaiveDateTime::parse_from_str(&date, "%Y%m%dT%H%M%SZ").ok()?.and_utc();
    let now = chrono::DateTime::<chrono::Utc>::from(std::time::SystemTime::now()) + chrono::TimeDelta::seconds(ahead);
    if (now - stated).num_seconds().abs() <= 900 {
        return None;
    }
    let (head, body) = error_page(403, "RequestTimeTooSkewed", "The difference between the times is too large.");
    let date = now.format("%a, %d %b %Y %H:%M:%S GMT");
    Some((head.replacen("\r\n", &format!("\r\nDate: {date}\r\n"), 1), body))
}

fn http_page(status: u16, kind: &str, body: &str) -> (String, String) {
    let head = format!("HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
    (head, body.to_owned())
}

fn error_page(status: u16, code: &str, message: &str) -> (String, String) {
    let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>");
    http_page(status, "application/xml", &body)
}
