//! `stats`, `info`, `status` and `umount` against a process that answers, one that does not, and none.

use serde_json::{Value, json};
use spurline_observe::http::{MetricsBind, MetricsServer};
use spurline_observe::server::AdminServer;
use spurline_observe::{AdminTarget, locate};
use spurline_types::{Result, Stats};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

struct Target(Stats);

impl AdminTarget for Target {
    fn stats(&self) -> Value {
        self.0.fuse.read_bytes.add(10 << 20);
        self.0.to_json()
    }
    fn prometheus(&self) -> String {
        self.0.to_prometheus()
    }
    fn info(&self, _path: &[u8]) -> Result<Value> {
        Ok(json!({}))
    }
    fn status(&self) -> Value {
        let disks = [json!({"path": "/nvme0", "state": "down", "reason": "3 reads failed: EIO"})];
        let addresses = ["192.0.2.1:7001", "[2001:db8::1]:7001"];
        json!({"kind": "node", "sources": ["s3://b"], "addresses": addresses, "weight": 70, "disks": disks})
    }
}

fn target() -> Arc<dyn AdminTarget> {
    Arc::new(Target(Stats::default()))
}

fn spurline(runtime: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spurline"))
        .args(words)
        .env(locate::RUNTIME_DIR_ENV, runtime)
        .env_remove("SPURLINE_REGISTRY")
        .output()
        .unwrap()
}

fn out(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The output of a query for a process that answers and does not work as it should.
fn degraded(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output, code: i32, says: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(says.iter().all(|part| text.contains(part)), "{says:?} in: {text}");
}

#[test]
fn a_node_of_this_machine_is_asked_by_socket_or_address() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join(locate::SocketOwner::Node("127.0.0.1:7001").file_name());
    let _server = AdminServer::start(&socket, target()).unwrap();
    let run = |words: &[&str]| spurline(dir.path(), words);
    for name in [socket.to_str().unwrap(), "127.0.0.1:7001"] {
        let answer: Value = serde_json::from_str(&out(&run(&["stats", name, "--json", "-c", "1"]))).unwrap();
        for section in ["usage", "fuse", "metadata", "blockcache", "remotecache", "rdma", "tcp", "object"] {
            assert!(answer[section].is_object(), "{section}");
        }
        assert!(answer["fuse"]["read_bytes"].as_u64().unwrap() >= 10 << 20);
    }
    let table = out(&run(&["stats", "127.0.0.1:7001", "--schema", "fo", "-l", "0.05", "-c", "22"]));
    assert_eq!(table.lines().count(), 22 + 2 * 2, "{table}");
    assert!(table.starts_with(" ---------fuse") && !table.contains('\u{1b}') && !table.contains("usage"), "{table}");
    // Mounts that other tests have at this moment are in the list too, and may not answer here.
    let status = String::from_utf8(run(&["status"]).stdout).unwrap();
    assert!(status.contains("s3://b") && status.contains("/nvme0") && status.contains("down"), "{status}");
    let status = degraded(&run(&["status", "127.0.0.1:7001"]));
    assert!(status.contains("127.0.0.1:7001  degraded  node  ") && !status.contains("  up  "), "{status}");
    assert!(status.contains("disk /nvme0  down  3 reads failed: EIO"), "{status}");
    assert!(status.contains("addresses: 192.0.2.1:7001, [2001:db8::1]:7001\n  weight: 70\n"), "{status}");
    let status: Value = serde_json::from_str(&degraded(&run(&["status", "127.0.0.1:7001", "--json"]))).unwrap();
    assert_eq!((&status["target"], &status["state"]), (&"127.0.0.1:7001".into(), &"degraded".into()));
    assert_eq!(status["reasons"], json!(["cache disk /nvme0 is down: 3 reads failed: EIO"]));
    refused(&run(&["stats", "127.0.0.1:7001", "--schema", "fz"]), 2, &["no section 'z'", "u usage"]);
    refused(&run(&["stats", "127.0.0.1:7001", "-l", "often"]), 2, &["is not a duration"]);
    refused(&run(&["stats", "127.0.0.1:7001", "-l", "0"]), 2, &["--interval"]);
}

#[test]
fn a_node_elsewhere_is_asked_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let server = MetricsServer::start(MetricsBind::Exactly("127.0.0.1:0".parse().unwrap()), target()).unwrap();
    let name = server.address().to_string();
    let run = |words: &[&str]| spurline(dir.path(), words);
    assert!(out(&run(&["stats", &name, "--json", "-c", "1"])).contains("read_bytes"));
    assert!(degraded(&run(&["status", &name])).contains("s3://b"));
    // A registry has the addresses of the nodes themselves, which speak no HTTP.
    let answer = run(&["status", "--registry", &format!("static:{name}")]);
    assert_eq!(answer.status.code(), Some(1), "{answer:?}");
    assert!(String::from_utf8_lossy(&answer.stdout).contains("down"), "{answer:?}");
    drop(server);
}

#[test]
fn what_is_no_target_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| spurline(dir.path(), words);
    refused(&run(&["stats", "/usr"]), 1, &["/usr is not in a mount of spurline", "fix"]);
    refused(&run(&["stats", "/nowhere/at/all"]), 3, &["/nowhere/at/all", "No such file"]);
    refused(&run(&["info", "/usr/bin"]), 1, &["not in a mount"]);
    refused(&run(&["umount", "/usr"]), 1, &["not a mountpoint of spurline"]);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    refused(&run(&["stats", &nobody]), 3, &[&nobody, "refused"]);
    let status = run(&["status", &nobody]);
    assert_eq!(status.status.code(), Some(3), "no named service answers");
    assert!(String::from_utf8_lossy(&status.stdout).contains("down"));
    // A path that never was a mount is not down.
    for (path, code) in [("/usr", 1), ("/nowhere/at/all", 3)] {
        let status = run(&["status", path]);
        let text = String::from_utf8_lossy(&status.stdout);
        assert_eq!(status.status.code(), Some(code), "{text}");
        assert!(text.contains("no target") && text.contains("HOST:PORT") && !text.contains("down"), "{text}");
    }

    // A socket whose process is gone, by its path and as a mount that is gone.
    let socket = dir.path().join(locate::SocketOwner::Mount(Path::new("/nowhere/mnt")).file_name());
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    refused(&run(&["stats", socket.to_str().unwrap()]), 3, &["no process answers", "refused"]);
    refused(&run(&["stats", "/nowhere/mnt"]), 3, &["mount at /nowhere/mnt is gone"]);
    if locate::list_mounts().unwrap().is_empty() {
        let status = run(&["status"]);
        let text = String::from_utf8_lossy(&status.stderr);
        assert!(text.contains("nothing of spurline runs") || !locate::list_mounts().unwrap().is_empty(), "{text}");
    }
}
