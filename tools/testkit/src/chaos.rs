//! A proxy on loopback that does to the next requests what a test asks for: stall, cut, throttle, refuse, delay.
//! It deliberately understands HTTP only as far as heads and lengths, so that what it does not break stays untouched.

use crate::http1::{Head, relay_body};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::{self, BufReader, BufWriter, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// What is done to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Answer 503 SlowDown without asking the server.
    SlowDown,
    /// Answer with this status, S3 error code and message.
    Error(u16, &'static str, &'static str),
    /// Answer 200 with an HTML page, as another kind of server would.
    Html,
    /// Answer with this status and an HTML page, as a proxy between would.
    Page(u16),
    /// Answer with these words, head and body as they are, and close the connection.
    Raw(String),
    /// Close the connection without an answer.
    Close,
    /// Take the request and never answer.
    Stall,
    /// Close the connection when half of the answer's body has passed.
    CutHalf,
    /// Close the connection after so many bytes of the answer's body.
    CutAfter(u64),
    /// Let so many bytes of the answer's body pass and then nothing more.
    StallAfter(u64),
    /// Wait this long, then serve as ever.
    Delay(Duration),
}

struct Planned {
    method: Option<&'static str>,
    path: String,
    fault: Fault,
    times: u32,
}

type Hook = Arc<dyn Fn(&str, &str) + Send + Sync>;

struct State {
    target: SocketAddr,
    planned: VecDeque<Planned>,
    log: Vec<(String, String)>,
    latency: Duration,
    refusing: bool,
    closed: bool,
    hook: Option<Hook>,
    connections: Vec<TcpStream>,
}

struct Shared {
    state: Mutex<State>,
    closing: Condvar,
}

/// A proxy in front of `target`. Dropping it closes all its connections.
pub struct ChaosProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl ChaosProxy {
    /// Listens on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// When no port can be had.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let state = State {
            target,
            planned: VecDeque::new(),
            log: Vec::new(),
            latency: Duration::ZERO,
            refusing: false,
            closed: false,
            hook: None,
            connections: Vec::new(),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), closing: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("testkit-proxy".into()).spawn(move || accept(&listener, &of_thread))?;
        Ok(ChaosProxy { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its endpoint URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Does `fault` to the next `times` requests.
    pub fn inject(&self, fault: Fault, times: u32) {
        self.inject_on(None, "", fault, times);
    }

    /// Does `fault` to the next `times` requests of this method (any for `None`) whose path and query contain `path`.
    pub fn inject_on(&self, method: Option<&'static str>, path: &str, fault: Fault, times: u32) {
        self.shared.state.lock().planned.push_back(Planned { method, path: path.into(), fault, times });
    }

    /// Forgets all faults not done yet.
    pub fn calm(&self) {
        let mut state = self.shared.state.lock();
        state.planned.clear();
        state.refusing = false;
        state.latency = Duration::ZERO;
    }

    /// Delays every request by this long.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.state.lock().latency = latency;
    }

    /// Closes new connections at once and those there are.
    pub fn refuse(&self, refuse: bool) {
        let mut state = self.shared.state.lock();
        state.refusing = refuse;
        if refuse {
            for connection in state.connections.drain(..) {
                let _ = connection.shutdown(Shutdown::Both);
            }
        }
    }

    /// Calls `hook(method, path)` before each request is passed on, on that request's own thread.
    pub fn on_request(&self, hook: impl Fn(&str, &str) + Send + Sync + 'static) {
        self.shared.state.lock().hook = Some(Arc::new(hook));
    }

    /// Requests seen of this method (any for `""`) whose path and query contain `path`.
    pub fn count(&self, method: &str, path: &str) -> usize {
        let state = self.shared.state.lock();
        state.log.iter().filter(|(m, p)| (method.is_empty() || m == method) && p.contains(path)).count()
    }

    /// All requests seen, oldest first.
    pub fn requests(&self) -> Vec<(String, String)> {
        self.shared.state.lock().log.clone()
    }

    /// Forgets the requests seen.
    pub fn forget(&self) {
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
        // Wakes the listener's thread, which sees that it is over.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
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
        // Broken connections are what this is for.
        let _ = std::thread::Builder::new().name("testkit-proxy".into()).spawn(move || {
            let _ = serve(&client, &shared);
            let _ = client.shutdown(Shutdown::Both);
        });
    }
}

impl Shared {
    /// The fault for this request, if one is planned.
    fn take(&self, method: &str, path: &str) -> Option<Fault> {
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

    /// Holds a connection open without a word until the proxy ends or a minute has passed.
    fn hold(&self) {
        let mut state = self.state.lock();
        if !state.closed {
            self.closing.wait_for(&mut state, Duration::from_secs(60));
        }
    }
}

fn serve(client: &TcpStream, shared: &Shared) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut from_client = BufReader::new(client);
    let mut to_client = BufWriter::with_capacity(256 << 10, client);
    let mut upstream: Option<TcpStream> = None;
    while let Some(request) = Head::read(&mut from_client)? {
        let (method, path) = (request.word(0).to_owned(), request.word(1).to_owned());
        let fault = shared.take(&method, &path);
        let (latency, target, hook) = {
            let state = shared.state.lock();
            (state.latency, state.target, state.hook.clone())
        };
        std::thread::sleep(latency);
        if let Some(hook) = hook {
            hook(&method, &path);
        }
        let answer = match &fault {
            Some(Fault::SlowDown) => Some(error_page(503, "SlowDown", "Please reduce your request rate.")),
            Some(Fault::Error(status, code, message)) => Some(error_page(*status, code, message)),
            Some(Fault::Html) => Some(page(200, "text/html", "<html><body>It works!</body></html>")),
            Some(Fault::Page(status)) => Some(page(*status, "text/html", "<html><body>proxy</body></html>")),
            Some(Fault::Close) => return Ok(()),
            Some(Fault::Stall) => {
                shared.hold();
                return Ok(());
            }
            Some(Fault::Delay(time)) => {
                std::thread::sleep(*time);
                None
            }
            _ => None,
        };
        if let Some(Fault::Raw(words)) = &fault {
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
        let Some(response) = Head::read(&mut from_server)? else { return Ok(()) };
        to_client.write_all(&response.raw)?;
        if response.has_body(&method) {
            let limit = match fault {
                Some(Fault::CutHalf) => response.length.unwrap_or(2) / 2,
                Some(Fault::CutAfter(n) | Fault::StallAfter(n)) => n,
                _ => u64::MAX,
            };
            let mut left = limit;
            let gate = |n: u64| {
                let allowed = n.min(left);
                left -= allowed;
                allowed
            };
            if !relay_body(&response, &mut from_server, &mut to_client, gate)? {
                if matches!(fault, Some(Fault::StallAfter(_))) {
                    shared.hold();
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

fn relay_request_body(request: &Head, from: &mut impl io::BufRead, to: &mut impl Write) -> io::Result<()> {
    if request.chunked || request.length.is_some_and(|n| n > 0) {
        relay_body(request, from, to, |n| n)?;
    }
    Ok(())
}

fn page(status: u16, kind: &str, body: &str) -> (String, String) {
    let head = format!("HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
    (head, body.to_owned())
}

fn error_page(status: u16, code: &str, message: &str) -> (String, String) {
    let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>");
    page(status, "application/xml", &body)
}
