//! Asking a running mount or node: over its admin socket, or a node's metrics address. Every wait has a deadline.

use crate::dial::{self, Until, left};
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest answer taken: the blocks of a file of some terabytes.
const MAX_ANSWER: u64 = 64 << 20;

/// A process that answers questions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// At an admin socket, of this user or of root where one is given.
    Socket(PathBuf, Option<u32>),
    /// At a metrics address, which knows stats and health only.
    Http(String),
}

impl Peer {
    /// Absolute counters.
    ///
    /// # Errors
    /// When it can't be reached or does not answer in time.
    pub fn stats(&self, limit: Duration) -> Result<Value> {
        match self {
            Peer::Socket(path, user) => ask_of(path, *user, &json!({"op": "stats"}), limit),
            Peer::Http(address) => get_json(address, "/stats.json", limit),
        }
    }

    /// What it is and how it does.
    ///
    /// # Errors
    /// As [`Peer::stats`].
    pub fn status(&self, limit: Duration) -> Result<Value> {
        match self {
            Peer::Socket(path, user) => ask_of(path, *user, &json!({"op": "status"}), limit),
            Peer::Http(address) => get_json(address, "/status.json", limit),
        }
    }

    /// About one file; sockets only.
    ///
    /// # Errors
    /// As [`Peer::stats`], and as a lookup of the path.
    pub fn info(&self, path: &[u8], limit: Duration) -> Result<Value> {
        let request = match std::str::from_utf8(path) {
            Ok(text) => json!({"op": "info", "path": text}),
            Err(_) => {
                let mut hex = String::with_capacity(path.len() * 2);
                for byte in path {
                    let _ = write!(hex, "{byte:02x}");
                }
                json!({"op": "info", "path_hex": hex})
            }
        };
        match self {
            Peer::Socket(socket, user) => ask_of(socket, *user, &request, limit),
            Peer::Http(address) => {
                let text = format!("{address}: a metrics address can't be asked about a file");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Steers work on many files (`spurline_jobs::Board::answer`); sockets only.
    ///
    /// # Errors
    /// As [`Peer::stats`], and what the jobs answer.
    pub fn jobs(&self, request: &Value, limit: Duration) -> Result<Value> {
        let mut request = request.clone();
        request["op"] = json!("jobs");
        match self {
            Peer::Socket(socket, user) => ask_of(socket, *user, &request, limit),
            Peer::Http(address) => {
                let text = format!("{address}: a metrics address takes no jobs");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }
}

/// An error of a socket; a deadline that passed says so instead of what the system calls it.
fn waited(what: impl std::fmt::Display, error: &std::io::Error, limit: Duration) -> Error {
    match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            let text =
                format!("{what}: no answer within {} s: the process is stopped or very busy", limit.as_secs_f64());
            Error::new(ErrorKind::Timeout, text)
        }
        _ => Error::io(what, error),
    }
}

/// Sends one request to an admin socket, whoever's it is, and waits for its answer.
///
/// # Errors
/// Connection and deadline errors, and the error the other side answers.
pub fn ask(socket: &Path, request: &Value, limit: Duration) -> Result<Value> {
    ask_of(socket, None, request, limit)
}

/// The same of a socket that has to be `user`'s, or root's.
fn ask_of(socket: &Path, user: Option<u32>, request: &Value, limit: Duration) -> Result<Value> {
    let io = |e: std::io::Error| waited(format_args!("admin socket {}", socket.display()), &e, limit);
    let mut stream = dial::open(socket, user, Instant::now() + limit).map_err(io)?;
    stream.write_all(format!("{request}\n").as_bytes()).map_err(io)?;
    let mut line = Vec::new();
    BufReader::new(stream).take(MAX_ANSWER).read_until(b'\n', &mut line).map_err(io)?;
    if line.is_empty() {
        let text = format!("admin socket {}: closed without an answer", socket.display());
        return Err(Error::new(ErrorKind::Unavailable, text));
    }
    let mut answer: Value = serde_json::from_slice(&line).map_err(|e| {
        Error::new(ErrorKind::Protocol, format!("admin socket {}: the answer is not JSON: {e}", socket.display()))
    })?;
    if let Some(error) = answer.get("error") {
        let code = error["code"].as_u64().and_then(|c| u16::try_from(c).ok()).unwrap_or(0);
        let text = error["message"].as_str().unwrap_or("an error without a message");
        return Err(Error::new(ErrorKind::from_code(code), text));
    }
    Ok(answer["ok"].take())
}

/// A GET over HTTP/1.0 whose answer is JSON.
///
/// # Errors
/// Connection and deadline errors, and any answer but 200.
pub fn get_json(address: &str, path: &str, limit: Duration) -> Result<Value> {
    let body = get(address, path, limit)?;
    serde_json::from_slice(&body)
        .map_err(|e| Error::new(ErrorKind::Protocol, format!("http://{address}{path}: the answer is not JSON: {e}")))
}

/// A GET over HTTP/1.0: the body ends where the connection does, so nothing of HTTP/1.1 has to be understood.
fn get(address: &str, path: &str, limit: Duration) -> Result<Vec<u8>> {
    let io = |e: std::io::Error| waited(format_args!("http://{address}{path}"), &e, limit);
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    let until = Instant::now() + limit;
    let candidates: Vec<_> = address.to_socket_addrs().map_err(io)?.collect();
    for (candidate, others) in candidates.iter().zip((0..candidates.len() as u32).rev()) {
        // One that is silent leaves time for the others.
        let connected = left(until).and_then(|left| TcpStream::connect_timeout(candidate, left / (others + 1)));
        let stream = match connected {
            Ok(stream) => stream,
            Err(error) => {
                last = error;
                continue;
            }
        };
        let mut stream = Until { stream, until };
        let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).map_err(io)?;
        let mut answer = Vec::new();
        match stream.take(MAX_ANSWER).read_to_end(&mut answer) {
            // Somebody who has no use for the question; what it said is looked at below.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            read => drop(read.map_err(io)?),
        }
        let end = answer.windows(4).position(|w| w == b"\r\n\r\n");
        let first = String::from_utf8_lossy(answer.split(|b| *b == b'\r').next().unwrap_or_default()).into_owned();
        return match end {
            Some(end) if first.starts_with("HTTP/") && first.contains(" 200 ") => Ok(answer.split_off(end + 4)),
            _ => {
                let shown: String = first.chars().take(60).collect();
                let mut text = format!("http://{address}{path}: no metrics are served there (it answered '{shown}')");
                if !first.starts_with("HTTP/") {
                    text.push_str(
                        "; if a node serves its group there, ask at its --metrics address, or on its own machine as its user, \
                         or all of the group by spurline status --registry URL",
                    );
                }
                Err(Error::new(ErrorKind::Protocol, text))
            }
        };
    }
    Err(io(last))
}
