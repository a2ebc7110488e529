//! The admin socket and the metrics server against a target that hangs, fails and counts on demand.

use serde_json::{Value, json};
use spurline_observe::client::{AdminPeer, send_request};
use spurline_observe::documents::ProcessRole;
use spurline_observe::http::{MetricsBind, MetricsServer};
use spurline_observe::server::AdminServer;
use spurline_observe::{AdminTarget, dial, locate};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);

struct Target {
    stats: Stats,
    hang: std::sync::Mutex<Receiver<()>>,
    sick: bool,
}

fn target(sick: bool) -> (Arc<Target>, Sender<()>) {
    let (sender, receiver) = channel();
    let target = Target { stats: Stats::default(), hang: receiver.into(), sick };
    target.stats.fuse.read_bytes.add(42);
    (Arc::new(target), sender)
}

impl AdminTarget for Target {
    fn stats(&self) -> Value {
        self.stats.to_json()
    }
    fn prometheus(&self) -> String {
        self.stats.to_prometheus()
    }
    fn info(&self, path: &[u8]) -> Result<Value> {
        if path == b"hang" {
            let _ = self.hang.lock().unwrap().recv();
        }
        if path == b"missing" {
            return Err(Error::new(ErrorKind::NotFound, "no such file: missing"));
        }
        Ok(json!({ "bytes": path.to_vec() }))
    }
    fn status(&self) -> Value {
        json!({"kind": "test"})
    }
    fn health(&self) -> Result<()> {
        if self.sick { Err(Error::new(ErrorKind::Unavailable, "the origin is gone")) } else { Ok(()) }
    }
}

#[test]
fn questions_and_answers() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("a.sock");
    let (target, _hang) = target(false);
    let server = AdminServer::start(&socket, target).unwrap();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let peer = AdminPeer::Socket(socket.clone(), None);
    assert_eq!(peer.fetch_stats(LIMIT).unwrap().fuse.read_bytes.get(), 42);
    assert_eq!(peer.fetch_status(LIMIT).unwrap().role, ProcessRole::Other);
    assert_eq!(peer.fetch_info_json("ä/b".as_bytes(), LIMIT).unwrap()["bytes"], json!("ä/b".as_bytes()));
    assert_eq!(peer.fetch_info_json(b"\xff\x01", LIMIT).unwrap()["bytes"], json!([255, 1]));
    let error = peer.fetch_info_json(b"missing", LIMIT).unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::NotFound, "no such file: missing"));
    let error = send_request(&socket, &json!({"op": "dance"}), LIMIT).unwrap_err();
    assert!(error.message().contains("there are stats"), "{error}");

    // A line that is no JSON, then a right one, over the same connection.
    let mut raw = UnixStream::connect(&socket).unwrap();
    raw.set_read_timeout(Some(LIMIT)).unwrap();
    raw.write_all(b"what?\n{\"op\":\"status\"}\n").unwrap();
    raw.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    raw.read_to_string(&mut text).unwrap();
    assert!(text.lines().next().unwrap().contains("not JSON") && text.lines().nth(1).unwrap().contains("test"));

    // A request without an end is cut off.
    let mut raw = UnixStream::connect(&socket).unwrap();
    raw.set_read_timeout(Some(LIMIT)).unwrap();
    let _ = raw.write_all(&vec![b'x'; (16 << 20) + 1]);
    let mut text = String::new();
    let _ = raw.read_to_string(&mut text);
    assert!(text.contains("longer than") || text.is_empty(), "{text}");

    drop(server);
    assert!(!socket.exists());
    assert_eq!(peer.fetch_stats(LIMIT).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn it_answers_while_another_question_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("a.sock");
    let (target, hang) = target(false);
    let _server = AdminServer::start(&socket, target).unwrap();
    let peer = AdminPeer::Socket(socket, None);
    let other = peer.clone();
    let waiting = std::thread::spawn(move || other.fetch_info_json(b"hang", LIMIT));
    assert_eq!(peer.fetch_info_json(b"hang", Duration::from_millis(200)).unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(peer.fetch_stats(LIMIT).unwrap().fuse.read_bytes.get(), 42);
    drop(hang);
    assert!(waiting.join().unwrap().is_ok());
}

#[test]
fn a_socket_of_the_dead_is_replaced_and_one_of_the_living_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("a.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert_eq!(AdminPeer::Socket(socket.clone(), None).fetch_stats(LIMIT).unwrap_err().kind(), ErrorKind::Unavailable);
    let _server = AdminServer::start(&socket, target(false).0).unwrap();
    let error = AdminServer::start(&socket, target(false).0).unwrap_err();
    assert!(error.message().contains("another process answers"), "{error}");
}

fn get(address: std::net::SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_metrics_server_serves() {
    let any = "127.0.0.1:0".parse().unwrap();
    let server = MetricsServer::start(MetricsBind::Exactly(any), target(false).0).unwrap();
    let path =
        |path: &str| get(server.address(), &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
    let metrics = path("/metrics");
    assert!(metrics.contains("version=0.0.4") && metrics.contains("\nspurline_fuse_read_bytes_total 42\n"));
    let page = path("/");
    assert!(page.contains("text/html") && page.contains("\"read_bytes\"") && !page.contains("/*METRICS*/"));
    assert!(!page.contains("src=") && !page.contains("http://") && !page.contains("https://"), "an asset from outside");
    assert!(path("/healthz").starts_with("HTTP/1.1 200"));
    assert!(path("/nothing").starts_with("HTTP/1.1 404"));
    let post =
        get(server.address(), "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    assert!(post.starts_with("HTTP/1.1 405"), "{post}");
    let peer = AdminPeer::Http(server.address().to_string());
    assert_eq!(peer.fetch_stats(LIMIT).unwrap().fuse.read_bytes.get(), 42);
    assert_eq!(peer.fetch_status(LIMIT).unwrap().role, ProcessRole::Other);
    assert_eq!(peer.fetch_info_json(b"x", LIMIT).unwrap_err().kind(), ErrorKind::Unsupported);

    // The wanted port is taken: the next free one if it was the default, an error if it was requested.
    let error = MetricsServer::start(MetricsBind::Exactly(server.address()), target(false).0).unwrap_err();
    assert!(error.message().contains(&server.address().to_string()), "{error}");
    let second = MetricsServer::start(MetricsBind::Near(server.address()), target(true).0).unwrap();
    assert!(second.address().port() > server.address().port(), "{:?}", second.address());
    let sick = get(second.address(), "GET /healthz HTTP/1.0\r\n\r\n");
    assert!(sick.contains(" 503 ") && sick.contains("the origin is gone"), "{sick}");
}

#[test]
fn something_that_is_no_metrics_server_is_told_apart() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(b"SSH-2.0-something\r\n");
    });
    let error = AdminPeer::Http(address.to_string()).fetch_stats(LIMIT).unwrap_err();
    other.join().unwrap();
    assert!(error.message().contains("no metrics") || error.kind() == ErrorKind::Unavailable, "{error}");
}

/// Sends single bytes to the first client until it disconnects.
fn trickle(mut stream: impl Write) {
    while stream.write_all(b" ").is_ok() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_process_that_takes_no_connections_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("a.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    // More than the queue holds; the listener is detected all the same.
    for _ in 0..4 {
        dial::probe_socket(&socket, None).unwrap();
    }
    let error = send_request(&socket, &json!({"op": "status"}), Duration::from_millis(300)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.message().contains("stopped or very busy"), "{error}");
    assert!(dial::listener_process(&socket).is_none());
    assert!(!locate::is_detached(&socket, Path::new("/mnt/x")));
    let error = AdminServer::start(&socket, target(false).0).unwrap_err();
    assert!(error.message().contains("another process answers there"), "{error}");
    drop(listener);
    assert!(dial::probe_socket(&socket, None).is_err());
}

#[test]
fn an_answer_that_trickles_in_ends_at_its_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("a.sock");
    let admin = UnixListener::bind(&socket).unwrap();
    let page = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let peers = [AdminPeer::Socket(socket, None), AdminPeer::Http(page.local_addr().unwrap().to_string())];
    let slow = [
        std::thread::spawn(move || trickle(admin.accept().unwrap().0)),
        std::thread::spawn(move || trickle(page.accept().unwrap().0)),
    ];
    for peer in peers {
        let error = peer.fetch_stats(Duration::from_secs(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    }
    slow.into_iter().for_each(|one| one.join().unwrap());
}

#[test]
fn a_socket_in_somebody_elses_place_is_not_asked() {
    use rustix::process::{Uid, geteuid};
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let socket = dir.path().join("a.sock");
    // Root's sockets are accepted from any user, so the test uses another user.
    let theirs = if geteuid().is_root() { Uid::from_raw(65534) } else { geteuid() };
    let at = socket.clone();
    let _listener = std::thread::spawn(move || {
        rustix::thread::set_thread_res_uid(theirs, theirs, theirs).unwrap();
        UnixListener::bind(at).unwrap()
    })
    .join()
    .unwrap();
    dial::probe_socket(&socket, Some(theirs.as_raw())).unwrap();
    let other = theirs.as_raw() - 1;
    assert_eq!(dial::probe_socket(&socket, Some(other)).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    let error = AdminPeer::Socket(socket, Some(other)).fetch_status(LIMIT).unwrap_err();
    assert!(error.message().contains("in the place of user"), "{error}");
}

#[test]
fn sockets_are_found_where_they_are_made() {
    let dir = tempfile::tempdir().unwrap();
    let owner = locate::SocketOwner::Mount(Path::new("/mnt/x"));
    // Variables belong to the whole process, so a child process runs this test again.
    if std::env::var_os("SPURLINE_TEST_PLACE").is_some() {
        let made = locate::make_socket_path(owner).unwrap();
        assert!(locate::socket_candidates(owner, 12345).contains(&made));
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sockets_are_found_where_they_are_made"])
        .env("SPURLINE_TEST_PLACE", "1")
        .env(locate::RUNTIME_DIR_ENV, dir.path().join("run"))
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert!(dir.path().join("run").is_dir());
}
