//! Real etcd servers on free ports: leases and watches, a server that dies and comes back, TLS, users.

mod common;

use common::{node, of_group, open, wait_for};
use spurline_group::{Announcer, Follower, Holds, Registry, State};
use spurline_types::{ErrorKind, Stats};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An etcd server with its data in a directory; killed when dropped.
struct Server {
    child: Child,
    port: u16,
}

/// Whether there is an etcd; says SKIP when not.
fn there() -> bool {
    let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !found {
        spurline_testkit::skip("etcd", "there is no etcd here (package etcd-server)");
    }
    found
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Server {
    /// Starts one at a port of choice (0: any), with more words, and waits until it listens.
    fn start(dir: &Path, port: u16, scheme: &str, more: &[&str]) -> Server {
        let begun = Instant::now();
        loop {
            let (at, peers) = (if port == 0 { free_port() } else { port }, free_port());
            let url = format!("{scheme}://127.0.0.1:{at}");
            let peer = format!("http://127.0.0.1:{peers}");
            let mut command = Command::new("etcd");
            command.arg("--data-dir").arg(dir).args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
            command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            command.arg("--initial-cluster").arg(format!("default={peer}")).args(more);
            let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let mut server = Server { child, port: at };
            // Somebody else may have taken a port in between: then it ends, and others are tried.
            while server.child.try_wait().unwrap().is_none() {
                if std::net::TcpStream::connect(("127.0.0.1", at)).is_ok() {
                    return server;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "etcd does not start");
        }
    }

    fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn enter(registry: &Arc<dyn Registry>, name: &str, port: u16) -> Announcer {
    Announcer::start(registry, node(name, port), Arc::new(Stats::default())).unwrap().unwrap()
}

fn follow(registry: &Arc<dyn Registry>) -> Follower {
    Follower::start(registry, Holds::default(), Arc::new(Stats::default())).unwrap()
}

fn names(follower: &Follower, there: bool) -> Vec<String> {
    let seen = follower.seen().members;
    seen.into_iter().filter(|placed| placed.there == there).map(|placed| placed.member.name).collect()
}

#[test]
fn nodes_enter_and_leave_and_a_server_that_dies_changes_nothing() {
    if !there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 0, "http", &[]);
    let registry = open(&server.url());
    let follower = follow(&registry);
    let (a, b) = (enter(&registry, "a", 1), enter(&registry, "b", 2));
    wait_for("both", || names(&follower, true) == ["a", "b"]);
    let mut thief = node("a", 3);
    thief.instance = 77;
    let mut lease = registry.lease().unwrap();
    let mut refused = None;
    // On a very slow machine the holder may have missed its lease, and has it again soon.
    wait_for("the refusal", || {
        refused = lease.renew(&thief, Instant::now() + Duration::from_secs(60)).err();
        refused.as_ref().is_some_and(|error| error.kind() == ErrorKind::Invalid)
    });
    let refused = refused.unwrap();
    assert!(refused.message().contains("127.0.0.1:1") && refused.message().contains("127.0.0.1:3"), "{refused}");
    a.set(|member| member.zone = "z".into());
    wait_for("the zone", || follower.seen().members[0].member.zone == "z");
    drop(b);
    wait_for("the leaving", || names(&follower, false) == ["b"]);
    // It dies, and comes back with what it wrote.
    let port = server.port;
    drop(server);
    wait_for("the loss", || matches!(follower.seen().state, State::Lost { .. }));
    assert_eq!(follower.seen().members.len(), 2, "the members last known stay");
    let server = Server::start(dir.path(), port, "http", &[]);
    wait_for("the registry", || matches!(follower.seen().state, State::Up));
    wait_for("the node", || names(&follower, true) == ["a"]);
    // It dies, and comes back empty.
    drop(server);
    let empty = tempfile::tempdir().unwrap();
    let _server = Server::start(empty.path(), port, "http", &[]);
    wait_for("the node again", || a.trouble().is_none() && names(&follower, true) == ["a"]);
    assert_eq!(follower.seen().members.len(), 2, "who is away keeps its place");
}

/// Runs a tool; its words on standard error when it fails.
fn run(program: &str, words: &[&str], dir: &Path) {
    let out = Command::new(program).args(words).current_dir(dir).env("ETCDCTL_API", "3").output();
    let out = out.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(out.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn tls_with_certificates_of_both_sides_and_a_user_with_few_rights() {
    if !there() {
        return;
    }
    for tool in ["openssl", "etcdctl"] {
        if Command::new(tool).arg("version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
            return spurline_testkit::skip("etcd", &format!("there is no {tool} here"));
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
    let ca = [&["req", "-x509", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem"][..], &curve].concat();
    run("openssl", &ca, at);
    std::fs::write(at.join("names"), "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n").unwrap();
    for name in ["server", "client"] {
        let (key, request, cert) = (format!("{name}.key"), format!("{name}.csr"), format!("{name}.pem"));
        let words = [&["req", "-subj", "/O=spurline", "-keyout", &key, "-out", &request][..], &curve[..5]].concat();
        run("openssl", &words, at);
        let sign = ["x509", "-req", "-in", &request, "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"];
        run("openssl", &[&sign[..], &["-days", "2", "-extfile", "names", "-out", &cert]].concat(), at);
    }
    let path = |name: &str| at.join(name).to_str().unwrap().to_owned();
    let (cert, key, ca) = (path("server.pem"), path("server.key"), path("ca.pem"));
    let words = ["--cert-file", &cert, "--key-file", &key, "--trusted-ca-file", &ca, "--client-cert-auth"];
    let server = Server::start(&at.join("data"), 0, "https", &words);
    let endpoint = format!("https://127.0.0.1:{}", server.port);
    let (own, own_key) = (path("client.pem"), path("client.key"));
    let ctl = |more: &[&str]| {
        let base = ["--endpoints", &endpoint, "--cacert", &ca, "--cert", &own, "--key", &own_key];
        run("etcdctl", &[&base[..], &["--command-timeout=60s"], more].concat(), at);
    };
    ctl(&["user", "add", "root:top"]);
    ctl(&["user", "grant-role", "root", "root"]);
    ctl(&["role", "add", "group"]);
    ctl(&["role", "grant-permission", "group", "--prefix=true", "readwrite", "/spurline/g/"]);
    ctl(&["user", "add", "node:secret"]);
    ctl(&["user", "grant-role", "node", "group"]);
    ctl(&["auth", "enable"]);
    std::fs::write(at.join("password"), "secret\n").unwrap();
    std::fs::write(at.join("wrong"), "guess\n").unwrap();
    let with = |more: &str| format!("{}?ca={ca}&cert={own}&key={own_key}{more}", server.url());
    let registry = open(&with(&format!("&user=node&password-file={}", path("password"))));
    assert!(!registry.describe().contains("secret"));
    let _a = enter(&registry, "a", 1);
    let follower = follow(&registry);
    wait_for("the node", || names(&follower, true) == ["a"]);
    let fails = |url: &str| {
        let soon = Instant::now() + Duration::from_secs(60);
        let error = open(url).lease().unwrap().renew(&node("b", 2), soon).unwrap_err();
        error.message().to_owned()
    };
    assert!(fails(&with(&format!("&user=node&password-file={}", path("wrong")))).contains("user node"));
    // A group that this user has no rights to.
    let other = of_group(registry.describe(), "other");
    let soon = Instant::now() + Duration::from_secs(60);
    let error = other.lease().unwrap().renew(&node("a", 1), soon).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    // Without a certificate of its own, and without TLS.
    let refused = fails(&format!("{}?ca={ca}", server.url()));
    assert!(refused.contains(&server.port.to_string()), "{refused}");
    let refused = fails(&server.url());
    assert!(refused.contains(&server.port.to_string()), "{refused}");
}

#[test]
fn of_several_servers_one_that_answers_is_enough() {
    if !there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 0, "http", &[]);
    let registry = open(&format!("etcd://127.0.0.1:{},127.0.0.1:{}", free_port(), server.port));
    let _a = enter(&registry, "a", 1);
    let follower = follow(&registry);
    wait_for("the node", || names(&follower, true) == ["a"]);
}
