//! A node and a mount that consumes it over TCP: the same bytes, no credentials, and a node that comes and goes.

use rustix::process::Signal;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::sync::Barrier;

#[test]
fn a_directory_from_a_node_is_there_byte_for_byte() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let source = world.dir("source");
    for (n, name) in crate::lone::ODD_NAMES.iter().enumerate() {
        world.file(&format!("source/d{n}/{name}"), &bytes(n as u64, n * 100_000));
    }
    fs::create_dir(source.join("empty")).unwrap();
    std::os::unix::fs::symlink("d1", source.join("link")).unwrap();
    world.file("source/big", &bytes(77, 9 * MIB + 321));
    let url = source.to_str().unwrap();
    let node = world.node(&[url], 0, &["--block-size", "512K"]);
    let mount = world.consumer(url, &node.address, &["--block-size", "4M"]);
    assert_same(&tree(&mount.at), &tree(&source));
    assert_same(&tree(&mount.at), &tree(&source));
    // TCP carried them; both ends' counters confirm it.
    let (here, there) = (mount.stats(), node.stats());
    let all: u64 = tree(&source).values().map(|t| if let Thing::File(b) = t { b.len() as u64 } else { 0 }).sum();
    assert!(count(&here, "tcp", "recv_bytes") >= all, "{here}");
    assert!(count(&there, "tcp", "send_bytes") >= all, "{there}");
    assert_eq!(count(&here, "rdma", "recv_bytes"), 0);
    assert_eq!(count(&here, "object", "get_ops"), 0, "a consumer sends no request to the origin");
    // The address and the interface that carry them.
    let at = mount.at.to_str().unwrap();
    let status: serde_json::Value = serde_json::from_slice(&world.run(&["status", at, "--json"]).stdout).unwrap();
    let carries = serde_json::json!([{"address": "127.0.0.1", "interface": "lo"}]);
    assert_eq!(status["peers"][0]["local"], carries, "{status}");
    let text = String::from_utf8(world.run(&["status", at]).stdout).unwrap();
    assert!(text.contains("data over tcp from 127.0.0.1 on lo"), "{text}");
    // The node's block size holds, whatever the mount's setting: its 9.4 MB are 19 blocks of 512 KiB.
    let out = world.run(&["info", mount.path("big").to_str().unwrap(), "--json"]);
    let info: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON of info");
    assert_eq!(info["block_size"], 512 << 10, "{info}");
    assert_eq!(info["blocks"]["total"], 19, "{info}");
    mount.unmount();
}

#[test]
fn a_bucket_is_read_with_no_credentials_in_the_mount_and_each_block_once() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let text = bytes(5, 16 * MIB + 1);
    server.put("data", "dir/file", &text);
    let node = world.node(&["s3://data"], 0, &["--endpoint-url", &server.endpoint()]);
    let mount = world.consumer("s3://data", &node.address, &[]);
    let environment = fs::read(format!("/proc/{}/environ", mount.process().pid())).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("AWS_"));
    let (start, path) = (Barrier::new(32), mount.path("dir/file"));
    std::thread::scope(|scope| {
        for reader in 0..32 {
            let (start, path, text) = (&start, &path, &text);
            scope.spawn(move || {
                let file = File::open(path).unwrap();
                start.wait();
                let mut buf = vec![0; 256 << 10];
                // Each begins somewhere else, so that all blocks are wanted at the same time.
                for step in 0..=64 {
                    let at = ((step + reader * 2) % 65) * buf.len();
                    let n = file.read_at(&mut buf, at as u64).unwrap();
                    assert!(buf[..n] == text[at..at + n] && n == buf.len().min(text.len() - at), "at {at}");
                }
            });
        }
    });
    assert_eq!(node.count("object", "get_ops"), 17);
    assert_eq!(node.count("object", "get_bytes"), text.len() as u64);
    mount.unmount();
}

#[test]
fn a_node_killed_and_started_again_is_an_error_and_then_none() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let text = bytes(6, 8 * MIB);
    world.file("source/file", &text);
    world.file("source/other", b"other");
    let url = world.path("source").to_str().unwrap().to_owned();
    let mut node = world.node(&[&url], 0, &[]);
    let port = node.port();
    let caches = ["--attr-cache", "0", "--entry-cache", "0"];
    let more = [&["--peer-timeout", "1s", "--metrics", "127.0.0.1:0"][..], &caches].concat();
    let mount = world.consumer(&url, &node.address, &more);
    let line = mount.process().wait_for("metrics page address=");
    let page: SocketAddr = line.split("address=").nth(1).unwrap().split([' ', ';']).next().unwrap().parse().unwrap();
    let health = || {
        let mut asked = TcpStream::connect(page).unwrap();
        asked.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut said = String::new();
        asked.read_to_string(&mut said).unwrap();
        said
    };
    assert!(health().starts_with("HTTP/1.1 200"), "{}", health());
    // Reads run while the node dies: every one is right or an error, and none hangs.
    let (path, want) = (mount.path("file"), &text);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let errors = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|n| {
                let (path, stop) = (&path, &stop);
                scope.spawn(move || {
                    let mut errors = Vec::new();
                    let mut buf = vec![0; 128 << 10];
                    let mut at = n * MIB;
                    while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                        let result = direct(path).and_then(|file| file.read_exact_at(&mut buf, at as u64));
                        match result {
                            Ok(()) => assert!(buf[..] == want[at..at + buf.len()]),
                            Err(error) => errors.push(error.raw_os_error()),
                        }
                        at = (at + buf.len()) % want.len();
                    }
                    errors
                })
            })
            .collect();
        eventually("reads through the node", || mount.count("fuse", "read_ops") > 8);
        node.process.kill();
        let dead = || fs::read(mount.path("other")).err().and_then(|e| e.raw_os_error());
        eventually("an error of a dead node", || dead().is_some());
        let error = dead().expect("a dead node is an error each time");
        assert!([libc::EHOSTDOWN, libc::ETIMEDOUT].contains(&error), "errno {error}");
        let sick = health();
        assert!(sick.starts_with("HTTP/1.1 503") && sick.contains("no node of the group can be reached"), "{sick}");
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
    });
    let known = [Some(libc::EHOSTDOWN), Some(libc::ETIMEDOUT)];
    assert!(errors.iter().all(|e| known.contains(e)), "{errors:?}");
    assert!(mount.process().log().contains("does not answer"), "{}", mount.process().log());
    drop(node);
    let node = world.node(&[&url], port, &[]);
    // Also without readers.
    let at = mount.at.to_str().unwrap();
    eventually("the status of an idle mount", || world.run(&["status", at]).status.code() == Some(0));
    eventually("health", || health().starts_with("HTTP/1.1 200"));
    eventually("reads through the node that is back", || fs::read(mount.path("other")).is_ok_and(|b| b == b"other"));
    assert!(mount.read("file") == text);
    assert!(mount.process().log().contains("answers again"));
    drop(node);
    mount.unmount();
}

/// Opened so that no page cache answers for the mount.
fn direct(path: &std::path::Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

#[test]
fn a_node_that_stands_still_is_an_error_in_time_and_goes_on() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/file", &bytes(8, 4 * MIB));
    let url = world.path("source").to_str().unwrap().to_owned();
    let node = world.node(&[&url], 0, &[]);
    let more = ["--peer-timeout", "1s", "--attr-cache", "0", "--entry-cache", "0"];
    let mount = world.consumer(&url, &node.address, &more);
    node.process.signal(Signal::STOP);
    let error = fs::read(mount.path("file")).unwrap_err().raw_os_error().unwrap();
    assert!([libc::EHOSTDOWN, libc::ETIMEDOUT].contains(&error), "errno {error}");
    // Its counters can still be read, though every read would wait.
    assert!(mount.count("remotecache", "errors") + mount.count("remotecache", "retries") > 0);
    node.process.signal(Signal::CONT);
    eventually("reads through the node that goes on", || {
        fs::read(mount.path("file")).is_ok_and(|b| b == bytes(8, 4 * MIB))
    });
    mount.unmount();
}

#[test]
fn what_a_node_does_not_serve_or_no_node_is_said_at_the_start() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/file", b"1");
    world.dir("elsewhere");
    let url = world.path("source").to_str().unwrap().to_owned();
    let node = world.node(&[&url], 0, &[]);
    let elsewhere = world.path("elsewhere").to_str().unwrap().to_owned();
    let mut command = world.consumer_command(&elsewhere, &node.address, &[]);
    let out = finish(&mut command);
    let text = refused(&out, 3, &["elsewhere", "--source"]);
    assert!(text.contains(&url) || text.contains("serves"), "{text}");
    drop(node);
    let closed = closed_port();
    let out = finish(&mut world.consumer_command(&url, &closed, &["--peer-timeout", "1s"]));
    refused(&out, 3, &[&closed]);
    assert!(!is_mounted(&world.path("mnt")));
}

/// An address of this machine without a listener.
pub fn closed_port() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn what_is_no_directory_at_the_node_is_said_at_the_start() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/file", b"1");
    let url = world.path("source").to_str().unwrap().to_owned();
    let node = world.node(&[&url], 0, &[]);
    for (name, says) in [("file", "give a directory"), ("missing", "create it or mount it first")] {
        let out = finish(&mut world.consumer_command(&format!("{url}/{name}"), &node.address, &[]));
        assert!(!out.status.success());
        refused(&out, out.status.code().unwrap(), &[name, says]);
        assert!(!is_mounted(&world.path("mnt")));
    }
}

#[test]
fn two_hosts_joined_by_a_network_chosen_by_interface_name() {
    if !can_mount() {
        return;
    }
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let text = bytes(12, 10 * MIB + 7);
    world.file("source/file", &text);
    let url = world.path("source").to_str().unwrap().to_owned();
    let mut command = world.command(&[]);
    command.args(world.node_words(&[&url], 7900)).args(["--group-network", "spl0", "--allow-anyone"]);
    let node = world.node_with(&mut Hosts::on(&hosts.0, &command));
    assert_eq!(node.address, "10.213.0.1:7900");
    let command = world.consumer_command(&url, "10.213.0.1:7900", &["--group-network", "spl0"]);
    let mount = world.mount_with(&mut Hosts::on(&hosts.1, &command));
    assert!(mount.read("file") == text);
    assert!(mount.count("tcp", "recv_bytes") >= text.len() as u64);
    mount.unmount();
    // An unknown interface is reported, with the existing ones.
    let command = world.consumer_command(&url, "10.213.0.1:7900", &["--group-network", "spl1"]);
    let out = finish(&mut Hosts::on(&hosts.1, &command));
    let code = out.status.code().unwrap();
    assert!(code == 2 || code == 3);
    refused(&out, code, &["spl1", "spl0"]);
}
