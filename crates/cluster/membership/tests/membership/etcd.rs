//! Real etcd servers on free ports: leases and watches, a server that dies and comes back, TLS, users.

use crate::common;
use common::{node, of_group, open, wait_for};
use spurline_membership::{HoldTimes, NodeAnnouncer, RecordName, Registry, RegistryFollower, RegistryState};
use spurline_testkit::EtcdServer;
use spurline_types::{ErrorKind, Stats};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn start(dir: &Path, port: u16, scheme: &str, more: &[&str]) -> EtcdServer {
    EtcdServer::start(dir, port, scheme, more).unwrap()
}

fn enter(registry: &Arc<dyn Registry>, name: &str, port: u16) -> NodeAnnouncer {
    NodeAnnouncer::start(registry, node(name, port), Arc::new(Stats::default())).unwrap().unwrap()
}

fn follow(registry: &Arc<dyn Registry>) -> RegistryFollower {
    RegistryFollower::start(registry, HoldTimes::default(), Arc::new(Stats::default())).unwrap()
}

fn names(follower: &RegistryFollower, there: bool) -> Vec<String> {
    let seen = follower.group_status().members;
    seen.into_iter().filter(|placed| placed.present == there).map(|placed| placed.member.name.clone()).collect()
}

#[test]
fn nodes_enter_and_leave_and_a_server_that_dies_changes_nothing() {
    if !EtcdServer::is_installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), 0, "http", &[]);
    let registry = open(&server.url());
    let follower = follow(&registry);
    let (a, b) = (enter(&registry, "a", 1), enter(&registry, "b", 2));
    wait_for("both", || names(&follower, true) == ["a", "b"]);
    let mut thief = node("a", 3);
    thief.instance = 77;
    let mut lease = registry.node_lease().unwrap();
    let mut refused = None;
    // On a very slow machine the holder may have missed its lease, and has it again soon.
    wait_for("the refusal", || {
        refused = lease.renew(&thief, Instant::now() + Duration::from_secs(60)).err();
        refused.as_ref().is_some_and(|error| error.kind() == ErrorKind::Invalid)
    });
    let refused = refused.unwrap();
    assert!(refused.message().contains("127.0.0.1:1") && refused.message().contains("127.0.0.1:3"), "{refused}");
    a.update_member(|member| member.zone = "z".into());
    wait_for("the zone", || follower.group_status().members[0].member.zone == "z");
    drop(b);
    wait_for("the leaving", || names(&follower, false) == ["b"]);
    // It dies, and comes back with what it wrote.
    let port = server.port();
    drop(server);
    wait_for("the loss", || matches!(follower.group_status().state, RegistryState::Lost { .. }));
    assert_eq!(follower.group_status().members.len(), 2, "the members last known stay");
    let server = start(dir.path(), port, "http", &[]);
    wait_for("the registry", || matches!(follower.group_status().state, RegistryState::Up));
    wait_for("the node", || names(&follower, true) == ["a"]);
    // It dies, and comes back empty.
    drop(server);
    let empty = tempfile::tempdir().unwrap();
    let _server = start(empty.path(), port, "http", &[]);
    wait_for("the node again", || a.registration_failure().is_none() && names(&follower, true) == ["a"]);
    assert_eq!(follower.group_status().members.len(), 2, "an absent node keeps its place");
}

#[test]
fn a_record_is_a_key_with_one_writer_at_a_time() {
    if !EtcdServer::is_installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), 0, "http", &[]);
    let text = |n: u64| serde_json::json!({"revision": n});
    let record_of = |server: &EtcdServer| open(&server.url()).group_record(RecordName::Rules).unwrap();
    let record = record_of(&server);
    assert_eq!(record.read(None).unwrap().unwrap().version, 0);
    // Of several writers at one version one succeeds.
    let replaced: usize = std::thread::scope(|scope| {
        let writer = |n: u64| {
            let record = record_of(&server);
            scope.spawn(move || usize::from(record.replace(0, &text(n)).unwrap()))
        };
        let writers: Vec<_> = (1..5).map(writer).collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).sum()
    });
    assert_eq!(replaced, 1);
    let first = record.read(Some(0)).unwrap().unwrap();
    // Unchanged: the first read compares revisions, and later ones rely on a watch.
    (0..3).for_each(|_| assert_eq!(record.read(Some(first.version)).unwrap(), None));
    let stage = open(&server.url()).group_record(RecordName::Stage).unwrap();
    assert_eq!(stage.read(None).unwrap().unwrap().version, 0);
    assert!(stage.replace(0, &text(3)).unwrap() && !stage.replace(0, &text(4)).unwrap());
    assert_eq!(stage.read(None).unwrap().unwrap().value, text(3));
    assert_eq!(record.read(Some(first.version)).unwrap(), None, "the rules did not change");
    assert!(record_of(&server).replace(first.version, &text(7)).unwrap());
    let mut second = None;
    wait_for("the change", || {
        second = record.read(Some(first.version)).unwrap();
        second.is_some()
    });
    let second = second.unwrap();
    assert_eq!(second.value, text(7));
    assert_eq!(
        of_group(&server.url(), "other").group_record(RecordName::Rules).unwrap().read(None).unwrap().unwrap().version,
        0
    );
    // The record is back with etcd, and so is the watch.
    let port = server.port();
    drop(server);
    assert_eq!(record.read(None).unwrap_err().kind(), ErrorKind::Unavailable);
    let server = start(dir.path(), port, "http", &[]);
    wait_for("the record", || record.read(None).is_ok_and(|found| found.is_some_and(|found| found == second)));
    (0..3).for_each(|_| assert_eq!(record.read(Some(second.version)).unwrap(), None));
    assert!(record_of(&server).replace(second.version, &text(8)).unwrap());
    wait_for("the change", || {
        record.read(Some(second.version)).is_ok_and(|found| found.is_some_and(|found| found.value == text(8)))
    });
}

/// Runs a tool; panics with its standard error when it fails.
fn run(program: &str, words: &[&str], dir: &Path) {
    let out = Command::new(program).args(words).current_dir(dir).env("ETCDCTL_API", "3").output();
    let out = out.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(out.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn tls_with_certificates_of_both_sides_and_a_user_with_few_rights() {
    if !EtcdServer::is_installed() {
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
    let server = start(&at.join("data"), 0, "https", &words);
    let endpoint = format!("https://127.0.0.1:{}", server.port());
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
    assert!(!registry.description().contains("secret"));
    let _a = enter(&registry, "a", 1);
    let follower = follow(&registry);
    wait_for("the node", || names(&follower, true) == ["a"]);
    let fails = |url: &str| {
        let soon = Instant::now() + Duration::from_secs(60);
        let error = open(url).node_lease().unwrap().renew(&node("b", 2), soon).unwrap_err();
        error.message().to_owned()
    };
    assert!(fails(&with(&format!("&user=node&password-file={}", path("wrong")))).contains("user node"));
    // A group that this user has no rights to.
    let other = of_group(registry.description(), "other");
    let soon = Instant::now() + Duration::from_secs(60);
    let error = other.node_lease().unwrap().renew(&node("a", 1), soon).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    // Without a certificate of its own, and without TLS.
    let refused = fails(&format!("{}?ca={ca}", server.url()));
    assert!(refused.contains(&server.port().to_string()), "{refused}");
    let refused = fails(&server.url());
    assert!(refused.contains(&server.port().to_string()), "{refused}");
}

#[test]
fn a_server_with_users_that_comes_back_empty_has_its_members_again() {
    if !EtcdServer::is_installed() || Command::new("etcdctl").arg("version").stdout(Stdio::null()).status().is_err() {
        return spurline_testkit::skip("etcd", "there is no etcd with its etcdctl here");
    }
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let with_users = |dir: &Path, port: u16, entries: u64| {
        let server = start(dir, port, "http", &[]);
        let record = open(&server.url()).group_record(RecordName::Rules).unwrap();
        for n in 1..=entries {
            let version = record.read(None).unwrap().unwrap().version;
            assert!(record.replace(version, &serde_json::json!({"revision": n})).unwrap());
        }
        let endpoint = format!("http://127.0.0.1:{}", server.port());
        for words in ["user add root:top", "user grant-role root root", "auth enable"] {
            let words: Vec<&str> = words.split(' ').collect();
            run("etcdctl", &[&["--endpoints", &endpoint, "--command-timeout=60s"], &words[..]].concat(), dir);
        }
        server
    };
    // A token refers to its server's revision: a server behind it waits until it has caught up.
    let server = with_users(dirs[0].path(), 0, 300);
    std::fs::write(dirs[0].path().join("password"), "top").unwrap();
    let (port, password) = (server.port(), dirs[0].path().join("password"));
    let registry = open(&format!("{}?user=root&password-file={}", server.url(), password.display()));
    let _a = enter(&registry, "a", 1);
    let follower = follow(&registry);
    wait_for("the node", || names(&follower, true) == ["a"]);
    drop(server);
    wait_for("the loss", || matches!(follower.group_status().state, RegistryState::Lost { .. }));
    let _server = with_users(dirs[1].path(), port, 0);
    let afresh = follow(&open(registry.description()));
    wait_for("the node again", || names(&afresh, true) == ["a"]);
    wait_for("what was known before", || matches!(follower.group_status().state, RegistryState::Up));
}

#[test]
fn of_several_servers_one_that_answers_is_enough() {
    if !EtcdServer::is_installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), 0, "http", &[]);
    let registry = open(&format!("etcd://127.0.0.1:1,127.0.0.1:{}", server.port()));
    let _a = enter(&registry, "a", 1);
    let follower = follow(&registry);
    wait_for("the node", || names(&follower, true) == ["a"]);
}

#[test]
fn a_server_that_hangs_keeps_no_node_from_the_others() {
    if !EtcdServer::is_installed() {
        return;
    }
    // Two independent servers: data in the second was written there.
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = dirs.each_ref().map(|dir| start(dir.path(), 0, "http", &[]));
    let url = format!("etcd://127.0.0.1:{},127.0.0.1:{}", first.port(), second.port());
    let (in_first, in_second) = (follow(&open(&first.url())), follow(&open(&second.url())));
    let _a = enter(&open(&url), "a", 1);
    wait_for("the node", || names(&in_first, true) == ["a"]);
    first.hang();
    wait_for("the node elsewhere", || names(&in_second, true) == ["a"]);
    // A client that begins with it gets in, too.
    let _b = enter(&open(&url), "b", 2);
    wait_for("both", || names(&in_second, true) == ["a", "b"]);
}
