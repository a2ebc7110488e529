//! Queries a running mount or node over the admin socket or the metrics address. Every wait has a deadline.

use crate::dial::{self, DeadlineStream, time_left};
use crate::documents::{ProcessStatus, WritesBehind};
use serde::Deserialize as _;
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest reply accepted: the blocks of a file of several terabytes.
const MAX_ANSWER: u64 = 64 << 20;

/// The address of a process that accepts queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminPeer {
    /// An admin socket, which must belong to this user or root if a user is given.
    Socket(PathBuf, Option<u32>),
    /// A metrics address, which serves stats, status and health only.
    Http(String),
}

impl AdminPeer {
    /// Absolute counters.
    ///
    /// # Errors
    /// When the process cannot be reached, or sends no reply in time.
    pub fn fetch_stats(&self, limit: Duration) -> Result<Stats> {
        Stats::from_json(&self.fetch_stats_json(limit)?)
    }

    /// Absolute counters as sent by the process.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`].
    pub fn fetch_stats_json(&self, limit: Duration) -> Result<Value> {
        match self {
            AdminPeer::Socket(path, user) => send_request_to(path, *user, &json!({"op": "stats"}), limit),
            AdminPeer::Http(address) => get_json(address, "/stats.json", limit),
        }
    }

    /// Identity and state.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`].
    pub fn fetch_status(&self, limit: Duration) -> Result<ProcessStatus> {
        ProcessStatus::from_json(&self.fetch_status_json(limit)?)
    }

    /// Identity and state as sent by the process.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`].
    pub fn fetch_status_json(&self, limit: Duration) -> Result<Value> {
        match self {
            AdminPeer::Socket(path, user) => send_request_to(path, *user, &json!({"op": "status"}), limit),
            AdminPeer::Http(address) => get_json(address, "/status.json", limit),
        }
    }

    /// Requests a report of the process at the end; sockets only. A process that ends by itself from now on sends the report.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`].
    pub fn watch_end(&self, limit: Duration) -> Result<EndWatch> {
        match self {
            AdminPeer::Socket(path, user) => {
                let stream = open_request(path, *user, &json!({"op": "end"}), limit)?;
                let mut answers = BufReader::new(stream);
                read_answer(&mut answers, path, limit)?;
                Ok(EndWatch { answers, socket: path.clone() })
            }
            AdminPeer::Http(address) => {
                let text = format!("{address}: a metrics address reports no end; use the admin socket");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Information about a file as sent by the process; sockets only.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`], and as a lookup of the path.
    pub fn fetch_info_json(&self, path: &[u8], limit: Duration) -> Result<Value> {
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
            AdminPeer::Socket(socket, user) => send_request_to(socket, *user, &request, limit),
            AdminPeer::Http(address) => {
                let text = format!("{address}: a metrics address has no information about files; use the admin socket");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Controls jobs on many files; sockets only.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`], and errors of the job.
    pub fn send_job_request(&self, request: &Value, limit: Duration) -> Result<Value> {
        let mut request = request.clone();
        request["op"] = json!("jobs");
        match self {
            AdminPeer::Socket(socket, user) => send_request_to(socket, *user, &request, limit),
            AdminPeer::Http(address) => {
                let text = format!("{address}: a metrics address takes no jobs");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Makes a mount continue with the program at an absolute path; sockets only.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`]: `Unavailable` and connection errors also after the old process has ended, as agreed; and the
    /// reason of a refusal.
    pub fn request_upgrade(&self, program: &Path, limit: Duration) -> Result<()> {
        match self {
            AdminPeer::Socket(socket, user) => {
                let request = json!({"op": "upgrade", "program": program.display().to_string()});
                send_request_to(socket, *user, &request, limit).map(drop)
            }
            AdminPeer::Http(address) => {
                let text = format!("{address}: a metrics address upgrades nothing");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Makes a mount keep the names of inodes for an NFS server; sockets only.
    ///
    /// # Errors
    /// As [`AdminPeer::fetch_stats`], and when the names can't be stored.
    pub fn prepare_export(&self, limit: Duration) -> Result<()> {
        match self {
            AdminPeer::Socket(socket, user) => {
                send_request_to(socket, *user, &json!({"op": "export"}), limit).map(|_| ())
            }
            AdminPeer::Http(address) => {
                let text = format!("{address}: a metrics address prepares no export");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }
}

/// An error of a socket. A missed deadline gets a clear text in place of the system's.
fn deadline_error(what: impl std::fmt::Display, error: &std::io::Error, limit: Duration) -> Error {
    match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            let text =
                format!("{what}: no answer within {} s: the process is stopped or very busy", limit.as_secs_f64());
            Error::new(ErrorKind::Timeout, text)
        }
        _ => Error::io(what, error),
    }
}

/// Sends a request to an admin socket of any user and waits for the reply.
///
/// # Errors
/// Connection and deadline errors, and the error in the reply.
pub fn send_request(socket: &Path, request: &Value, limit: Duration) -> Result<Value> {
    send_request_to(socket, None, request, limit)
}

/// The same for a socket that must belong to `user` or root.
fn send_request_to(socket: &Path, user: Option<u32>, request: &Value, limit: Duration) -> Result<Value> {
    read_answer(&mut BufReader::new(open_request(socket, user, request, limit)?), socket, limit)
}

/// Sends a request; the answer is to be read within `limit` as well.
fn open_request(
    socket: &Path,
    user: Option<u32>,
    request: &Value,
    limit: Duration,
) -> Result<DeadlineStream<UnixStream>> {
    let connected = dial::connect_until(socket, user, Instant::now() + limit);
    let sent = connected.and_then(|mut stream| stream.write_all(format!("{request}\n").as_bytes()).map(|()| stream));
    sent.map_err(|e| deadline_error(format_args!("admin socket {}", socket.display()), &e, limit))
}

fn read_answer(answers: &mut BufReader<DeadlineStream<UnixStream>>, socket: &Path, limit: Duration) -> Result<Value> {
    let mut line = Vec::new();
    answers
        .take(MAX_ANSWER)
        .read_until(b'\n', &mut line)
        .map_err(|e| deadline_error(format_args!("admin socket {}", socket.display()), &e, limit))?;
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

/// A connection on which a process reports the end.
pub struct EndWatch {
    answers: BufReader<DeadlineStream<UnixStream>>,
    socket: PathBuf,
}

impl EndWatch {
    /// The report of a process that has ended, or ends within `limit`.
    ///
    /// # Errors
    /// When the process ended without a report, as a killed process does, or does not end in time.
    pub fn read_report(mut self, limit: Duration) -> Result<Option<WritesBehind>> {
        self.answers.get_mut().until = Instant::now() + limit;
        let report = read_answer(&mut self.answers, &self.socket, limit)?;
        Option::deserialize(report).map_err(|error| {
            Error::new(ErrorKind::Protocol, format!("the report of a mount's end is malformed: {error}"))
        })
    }
}

/// A GET over HTTP/1.0 with a JSON reply.
///
/// # Errors
/// Connection and deadline errors, and any status but 200.
pub fn get_json(address: &str, path: &str, limit: Duration) -> Result<Value> {
    let body = http_get(address, path, limit)?;
    serde_json::from_slice(&body)
        .map_err(|e| Error::new(ErrorKind::Protocol, format!("http://{address}{path}: the answer is not JSON: {e}")))
}

/// A GET over HTTP/1.0: the body ends with the connection, so no HTTP/1.1 parser is needed.
fn http_get(address: &str, path: &str, limit: Duration) -> Result<Vec<u8>> {
    let io = |e: std::io::Error| deadline_error(format_args!("http://{address}{path}"), &e, limit);
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    let until = Instant::now() + limit;
    let candidates: Vec<_> = address.to_socket_addrs().map_err(io)?.collect();
    for (candidate, others) in candidates.iter().zip((0..candidates.len() as u32).rev()) {
        // A silent address leaves time for the others.
        let connected = time_left(until).and_then(|left| TcpStream::connect_timeout(candidate, left / (others + 1)));
        let stream = match connected {
            Ok(stream) => stream,
            Err(error) => {
                last = error;
                continue;
            }
        };
        let mut stream = DeadlineStream { stream, until };
        let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).map_err(io)?;
        let mut answer = Vec::new();
        match stream.take(MAX_ANSWER).read_to_end(&mut answer) {
            // The server closed the connection on our request; the bytes read so far are checked below.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            read => drop(read.map_err(io)?),
        }
        let end = answer.windows(4).position(|w| w == b"\r\n\r\n");
        let first = String::from_utf8_lossy(answer.split(|b| *b == b'\r').next().unwrap_or_default()).into_owned();
        return match end {
            Some(end) if first.starts_with("HTTP/") && first.contains(" 200 ") => Ok(answer.split_off(end + 4)),
            _ => {
                let shown: String = first.chars().take(60).collect();
                let mut text = format!("http://{address}{path}: no metrics are served there (the reply was '{shown}')");
                if !first.starts_with("HTTP/") {
                    text.push_str(
                        "; if that is a node's group port, use its --metrics address, or query it on its own machine as \
                         its user, or query the whole group with spurline status --registry URL",
                    );
                }
                Err(Error::new(ErrorKind::Protocol, text))
            }
        };
    }
    Err(io(last))
}
