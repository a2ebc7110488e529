//! Groups by external registries, with real nodes and mounts: a real etcd, and a DNS name whose records change; and
//! the jobs that coordinators share in etcd.

use serde_json::Value;
use spurline_rig::world::*;
use spurline_testkit::EtcdServer;
use spurline_testkit::dns_server::DnsServer;
use std::time::{Duration, Instant};

fn status(world: &World, mount: &Mount) -> Value {
    let out = world.run(&["status", mount.at.to_str().unwrap(), "--json"]);
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"))
}

fn members(world: &World, mount: &Mount, word: &str) -> Vec<String> {
    let status = status(world, mount);
    let members = status["group"]["members"].as_array().unwrap();
    members.iter().filter(|m| m["state"] == word).map(|m| m["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn nodes_enter_by_etcd_and_readers_go_on_without_a_node_and_without_etcd() {
    if !can_mount() || !EtcdServer::is_installed() {
        return;
    }
    let world = World::new();
    let text = bytes(31, 4 * MIB);
    world.file("source/a", &text);
    let source = world.path("source").to_str().unwrap().to_owned();
    let data = world.dir("etcd");
    let server = EtcdServer::start(&data, 0, "http", &[]).unwrap();
    let (url, port) = (server.url(), server.port());
    let node = |name: &str| {
        let cache = world.dir(&format!("cache-{name}"));
        let mut command = world.command(&["node", "--source", &source, "--cache-dir", cache.to_str().unwrap()]);
        world.node_with(command.args(["--registry", &url, "--cache-group", "train", "--name", name]))
    };
    let (mut one, _two) = (node("one"), node("two"));
    let at = world.dir("mnt");
    let mut command = world.command(&["mount", &source, at.to_str().unwrap(), "--registry", &url]);
    let mount = world.mount_with(command.args(["--cache-group", "train"]));
    eventually("both nodes", || members(&world, &mount, "up") == ["one", "two"]);
    assert!(mount.read("a") == text);
    // A node is killed: readers lose nothing, and its etcd lease ends after a while.
    one.process.kill();
    assert!(mount.read("a") == text);
    eventually("the end of its lease", || members(&world, &mount, "away") == ["one"]);
    // etcd dies: those last known stay.
    drop(server);
    eventually("the loss", || status(&world, &mount)["group"]["state"] == "lost");
    assert!(mount.read("a") == text);
    let _again = EtcdServer::start(&data, port, "http", &[]).unwrap();
    eventually("etcd", || status(&world, &mount)["group"]["state"] == "up");
    let _one = node("one");
    eventually("the node", || members(&world, &mount, "up") == ["one", "two"]);
    assert!(mount.read("a") == text);
    mount.unmount();
}

/// Longer than [`PATIENCE`]: a lease has to run out meanwhile.
fn at_last(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(100), "never came: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

mod test_all {
    use super::*;

    #[test]
    fn nodes_behind_a_name_of_dns_come_and_go() {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let text = bytes(32, 4 * MIB);
        world.file("source/a", &text);
        let source = world.path("source").to_str().unwrap().to_owned();
        let mut first = world.node(&[&source], 0, &[]);
        let port = first.port();
        let dns = DnsServer::start().unwrap();
        dns.addresses("nodes.test.", &["127.0.0.1"]);
        let registry = format!("dns:nodes.test:{port}?server={}", dns.address());
        let at = world.dir("mnt");
        let mount =
            world.mount_with(&mut world.command(&["mount", &source, at.to_str().unwrap(), "--registry", &registry]));
        assert!(mount.read("a") == text);
        assert_eq!(members(&world, &mount, "up"), [format!("127.0.0.1:{port}")]);
        if std::net::TcpListener::bind(("::1", port)).is_ok() {
            let mut command = world.command(&["node", "--source", &source, "--group-network", "[::1]"]);
            command.args(["--group-port", &port.to_string(), "--cache-dir", world.dir("second").to_str().unwrap()]);
            let _second = world.node_with(&mut command);
            dns.addresses("nodes.test.", &["127.0.0.1", "::1"]);
            eventually("the second node", || members(&world, &mount, "up").len() == 2);
            first.process.kill();
            assert!(mount.read("a") == text);
            dns.addresses("nodes.test.", &["::1"]);
            eventually("the first to be away", || members(&world, &mount, "away") == [format!("127.0.0.1:{port}")]);
            dns.silent(true);
            eventually("the loss", || status(&world, &mount)["group"]["state"] == "lost");
            assert!(mount.read("a") == text);
        } else {
            skip("ipv6", "there is no IPv6 on loopback, or its port is taken");
        }
        mount.unmount();
    }

    #[test]
    fn coordinators_share_jobs_and_one_goes_on_with_what_a_killed_one_began() {
        if !EtcdServer::is_installed() {
            return;
        }
        let world = World::new();
        for n in 0..40 {
            world.file(&format!("source/{n}"), &bytes(n, n as usize * 1000));
        }
        world.file("source/deep/large", &bytes(99, 300_000));
        let source = world.path("source").to_str().unwrap().to_owned();
        let etcd = EtcdServer::start(&world.dir("etcd"), 0, "http", &[]).unwrap();
        let start = || {
            let words = ["coordinator", "--state-file", "none", "--job-store", &etcd.url()];
            let process = Process::start(&mut world.command(&words), &world.log_path("coordinator"));
            let line = process.wait_for("coordinating on ");
            (process, line.split("coordinating on ").nth(1).unwrap().trim().to_owned())
        };
        let ((mut one, first), (two, second)) = (start(), start());
        // The coordinators find the node in the etcd that they share.
        let _node = world.node(&[&source], 0, &["--registry", &etcd.url()]);
        let ask = |registry: &str, path: &str, words: &[&str]| {
            world.run(&[&["load", path, "--source", &source, "--registry", registry][..], words].concat())
        };
        let job = |registry: &str, path: &str| -> Value {
            let out = ask(registry, path, &["--progress", "--json"]);
            serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"))
        };
        let [begins, other] = [first, second].map(|address| format!("coordinator://{address}"));
        // One begins a job that would take for ever, the other ends it.
        let out = ask(&begins, &source, &["--submit", "--rate", "4K", "-p", "1"]);
        assert_eq!(out.status.code(), Some(0), "{out:?}");
        refused(&ask(&other, &source, &["--submit"]), 2, &["stop it first"]);
        let out = ask(&other, &source, &["--stop"]);
        assert_eq!(out.status.code(), Some(0), "{out:?}");
        assert!(String::from_utf8_lossy(&out.stdout).contains("STOPPED"), "{out:?}");
        // One begins a job of some ten seconds and is killed in the middle of it.
        let out = ask(&begins, &source, &["--submit", "--rate", "100K"]);
        assert_eq!(out.status.code(), Some(0), "{out:?}");
        eventually("some work, as the other sees it", || job(&other, &source)["files_done"].as_u64() > Some(5));
        one.kill();
        let mut last = Value::Null;
        at_last("the end", || {
            last = job(&other, &source);
            last["state"] == "SUCCEEDED"
        });
        assert_eq!((last["files_done"].as_u64(), last["files_total"].as_u64()), (Some(41), Some(41)), "{last}");
        assert_eq!(last["bytes_done"], last["bytes_total"], "{last}");
        assert!(two.log().contains("is taken over"), "{}", two.log());
    }
}
