//! The admin socket's server: a JSON object per line in each direction. Separate threads serve, also while every other thread of
//! the process waits.

use crate::documents::WritesBehind;
use crate::{AdminTarget, dial};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Longest request line: a job may name a hundred thousand files.
const MAX_LINE: u64 = 16 << 20;
/// An idle connection is closed after this time.
const IDLE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Connection limit: people, a scraper, and requests that wait for a slow origin.
const MAX_CONVERSATIONS: usize = 32;
/// Longest wait for a client that takes a report.
const REPORT_LIMIT: Duration = Duration::from_secs(1);

/// A running admin socket; a drop removes the socket.
#[derive(Debug)]
pub struct AdminServer {
    path: PathBuf,
    /// Device and inode of the socket: another process may have replaced the socket.
    place: Option<(u64, u64)>,
    listener: UnixListener,
    stop: Arc<AtomicBool>,
    watches: Arc<EndWatches>,
}

/// Connections that wait for the end of this process.
#[derive(Debug, Default)]
struct EndWatches(Mutex<Vec<UnixStream>>);

impl EndWatches {
    /// Keeps a connection, and answers there that the report follows; the error for a connection too many.
    fn add(&self, mut stream: UnixStream) -> Result<()> {
        let mut watches = self.0.lock();
        watches.retain(|stream| !is_closed(stream));
        if watches.len() >= MAX_CONVERSATIONS {
            return Err(Error::new(ErrorKind::Throttled, "many others wait for the end of this process; try again"));
        }
        // Before the report, which takes the connection: a client that is gone needs no answer.
        let _ = stream.set_write_timeout(Some(REPORT_LIMIT));
        let _ = writeln!(stream, "{}", json!({ "ok": "watched" }));
        watches.push(stream);
        Ok(())
    }

    fn send_report(&self, report: Option<&WritesBehind>) {
        for mut stream in self.0.lock().drain(..) {
            // A client that is gone, or reads nothing, does not delay the end.
            let _ = writeln!(stream, "{}", json!({ "ok": report }));
        }
    }
}

/// Whether the other end of a connection is closed.
fn is_closed(stream: &UnixStream) -> bool {
    let mut seen = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut seen, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

fn socket_identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

impl AdminServer {
    /// Serves `target` at `path`, accessible to this user only. Replaces a socket left by a dead process.
    ///
    /// # Errors
    /// When another process listens there, or the socket cannot be made.
    pub fn start(path: &Path, target: Arc<dyn AdminTarget>) -> Result<Self> {
        let what = format!("admin socket {}", path.display());
        if dial::probe_socket(path, None).is_ok() {
            let text = format!("{what}: another process answers there; unmount it first");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&what, &e)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(|e| Error::io(&what, &e))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(|e| Error::io(&what, &e))?;
        let stop = Arc::new(AtomicBool::new(false));
        let watches = Arc::new(EndWatches::default());
        let accepting = listener.try_clone().map_err(|e| Error::io(&what, &e))?;
        let stopped = Arc::clone(&stop);
        let kept = Arc::clone(&watches);
        std::thread::Builder::new()
            .name("admin".into())
            .spawn(move || accept_connections(&accepting, &stopped, &target, &kept))
            .map_err(|e| Error::io(&what, &e))?;
        Ok(AdminServer { path: path.to_owned(), place: socket_identity(path), listener, stop, watches })
    }

    /// Reports the end of this process to the waiting clients, with the losses of a mount that writes through nodes.
    pub fn report_end(&self, report: Option<&WritesBehind>) {
        self.watches.send_report(report);
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the accepting thread.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if socket_identity(&self.path) == self.place {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn accept_connections(
    listener: &UnixListener,
    stop: &AtomicBool,
    target: &Arc<dyn AdminTarget>,
    watches: &Arc<EndWatches>,
) {
    let talking = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if stop.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else {
            // Probably out of descriptors: wait until others close some.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if talking.load(Ordering::Acquire) >= MAX_CONVERSATIONS {
            let busy = Error::new(ErrorKind::Throttled, "the admin socket is busy; try again");
            let _ = writeln!(&stream, "{}", error_reply(&busy));
            continue;
        }
        talking.fetch_add(1, Ordering::AcqRel);
        let target = Arc::clone(target);
        let held = AdminPermit(Arc::clone(&talking));
        let watches = Arc::clone(watches);
        let spawned = std::thread::Builder::new().name("admin-talk".into()).spawn(move || {
            let _held = held;
            let _ = serve_connection(stream, target.as_ref(), &watches);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for a connection to the admin socket");
        }
    }
}

/// A permit for a connection.
struct AdminPermit(Arc<AtomicUsize>);

impl Drop for AdminPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn serve_connection(stream: UnixStream, target: &dyn AdminTarget, watches: &EndWatches) -> std::io::Result<()> {
    stream.set_read_timeout(Some(IDLE_CONNECTION_TIMEOUT))?;
    stream.set_write_timeout(Some(IDLE_CONNECTION_TIMEOUT))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    loop {
        let mut line = Vec::new();
        reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        let whole = line.ends_with(b"\n");
        let answer = if is_end_watch(&line) {
            match watches.add(writer.try_clone()?) {
                Ok(()) => return Ok(()),
                Err(error) => error_reply(&error),
            }
        } else if whole || (line.len() as u64) < MAX_LINE {
            reply_to(&line, target)
        } else {
            error_reply(&Error::new(ErrorKind::Invalid, format!("the request is longer than {MAX_LINE} bytes")))
        };
        writer.write_all(format!("{answer}\n").as_bytes())?;
        if !whole {
            return Ok(());
        }
    }
}

/// Whether a request waits for the end of this process.
fn is_end_watch(line: &[u8]) -> bool {
    // Most requests are short; a long request is a job.
    line.len() < 100 && serde_json::from_slice(line).is_ok_and(|request: Value| request["op"] == "end")
}

fn reply_to(line: &[u8], target: &dyn AdminTarget) -> Value {
    let request: Value = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(e) => return invalid_reply(format!("the request is not JSON: {e}")),
    };
    let answer = match request["op"].as_str() {
        Some("stats") => Ok(target.stats()),
        Some("status") => Ok(target.status()),
        Some("info") => match path_of(&request) {
            Some(path) => target.info(&path),
            None => return invalid_reply("info needs a path: text in 'path', or hexadecimal in 'path_hex'".into()),
        },
        Some("jobs") => target.jobs(&request),
        Some("export") => target.prepare_export().map(|()| json!("ok")),
        Some("upgrade") => match request["program"].as_str() {
            Some(program) => target.upgrade(Path::new(program)).map(|()| json!("ok")),
            None => return invalid_reply("upgrade needs a program".into()),
        },
        Some("health") => target.health().map(|()| json!("ok")),
        other => {
            let named = other.unwrap_or("(none)");
            return invalid_reply(format!(
                "unknown op '{named}'; there are stats, status, info, jobs, export, upgrade, health, end"
            ));
        }
    };
    match answer {
        Ok(value) => json!({ "ok": value }),
        Err(error) => error_reply(&error),
    }
}

fn invalid_reply(text: String) -> Value {
    error_reply(&Error::new(ErrorKind::Invalid, text))
}

fn error_reply(error: &Error) -> Value {
    json!({ "error": { "code": error.kind().code(), "message": error.message() } })
}

/// The path of a request. Names may hold any byte, so paths that are not UTF-8 have a hexadecimal form.
fn path_of(request: &Value) -> Option<Vec<u8>> {
    if let Some(text) = request["path"].as_str() {
        return Some(text.as_bytes().to_vec());
    }
    let hex = request["path_hex"].as_str()?.as_bytes();
    if !hex.len().is_multiple_of(2) {
        return None;
    }
    hex.chunks(2).map(|pair| Some((hex_digit(pair[0])? * 16 + hex_digit(pair[1])?) as u8)).collect()
}

fn hex_digit(b: u8) -> Option<u32> {
    (b as char).to_digit(16)
}
