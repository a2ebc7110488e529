//! `spurline node drain`: the blocks a leaving node passes on, and its message when it can't.

use crate::group::coordinator;
use serde_json::Value;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, S3Server};

#[test]
fn after_a_drain_nobody_asks_the_under_store_for_what_the_node_held() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let texts: Vec<Vec<u8>> = (0..24).map(|n| bytes(n + 1, MIB / 2)).collect();
    texts.iter().enumerate().for_each(|(n, text)| drop(server.put("data", &format!("f{n}"), text)));
    let long = bytes(99, 5 * MIB);
    server.put("data", "f-long", &long);
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let endpoint = proxy.endpoint();
    let fetched = || proxy.requests().iter().filter(|(method, path)| method == "GET" && path.contains("/f")).count();
    let (_coordinator, address) = coordinator(&world, 0);
    let registry = format!("coordinator://{address}");
    let node = |name: &str| {
        let cache = world.dir(&format!("cache-{name}"));
        let mut command =
            world.command(&["node", "--source", "s3://data", "--endpoint-url", &endpoint, "--name", name]);
        command.args(["--cache-dir", cache.to_str().unwrap(), "--registry", &registry]);
        world.node_with(with_credentials(&mut command))
    };
    let one = node("one");
    let mut two = node("two");
    let mount = |at: &str| {
        let at = world.dir(at);
        // No read goes to a second node: each block is fetched once, by its owner.
        let words = ["mount", "s3://data", at.to_str().unwrap(), "--registry", &registry, "--hedge-after", "0"];
        let process = Process::start(&mut world.command(&words), &world.log_path("mount"));
        process.wait_for(" is mounted on ");
        (process, at)
    };
    let read_all = |at: &std::path::Path| {
        texts
            .iter()
            .enumerate()
            .for_each(|(n, text)| assert_eq!(std::fs::read(at.join(format!("f{n}"))).unwrap(), *text));
        assert_eq!(std::fs::read(at.join("f-long")).unwrap(), long);
    };
    let drain =
        |node: &str, more: &[&str]| world.run(&[&["node", "drain", node, "--registry", &registry], more].concat());
    let said = |out: &std::process::Output| -> Value {
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)))
    };
    let (_first, at) = mount("mnt");
    let _detach = Detach(at.clone());
    let members = || {
        let status: Value =
            serde_json::from_slice(&world.run(&["status", at.to_str().unwrap(), "--json"]).stdout).unwrap();
        status["group"]["members"].as_array().cloned().unwrap_or_default()
    };
    eventually("both nodes", || members().len() == 2);
    read_all(&at);
    refused(&drain("three", &[]), 1, &["no node three", "one, two"]);
    // From the node itself, and from no other.
    let before = fetched();
    let out = drain("two", &["--json"]);
    let first = said(&out);
    assert_eq!(
        (out.status.code(), &first["state"], &first["weight"]),
        (Some(0), &"drained".into(), &0.into()),
        "{first}"
    );
    assert!(first["bytes_moved"].as_u64().unwrap() > 0, "{first}");
    assert_eq!(
        (&first["bytes_handed_on"], &first["failed"]),
        (&first["bytes_total"], &Value::Array(Vec::new())),
        "{first}"
    );
    assert_eq!(fetched(), before, "{first}");
    eventually("its share to go", || members().iter().any(|m| m["name"] == "two" && m["weight"] == 0));
    // Once more nothing is left to be sent, and the other one is the last.
    let again = drain("two", &[]);
    let text = String::from_utf8_lossy(&again.stdout).into_owned();
    assert!(
        again.status.success() && text.contains("it had no share before") && text.contains("0 B sent now"),
        "{text}"
    );
    refused(&drain("one", &[]), 1, &["the only one", "start another node first"]);
    two.process.kill();
    // Whether its name is known still is the registry's matter.
    let dead = drain("two", &[]);
    let text = String::from_utf8_lossy(&dead.stderr).into_owned();
    assert!(matches!(dead.status.code(), Some(1 | 3)), "{text}");
    assert!(text.contains("does not answer, so nothing can be handed on") || text.contains("no node two"), "{text}");
    let (_second, at) = mount("mnt-2");
    let _detach = Detach(at.clone());
    read_all(&at);
    assert_eq!(fetched(), before, "no cold read: {}", one.stats());
}

/// The node keeps the names of what was used lately beside its blocks; blocks without a name are counted.
#[test]
fn a_node_drained_after_a_restart_hands_on_what_was_used_before() {
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    (0..24).for_each(|n| drop(server.put("data", &format!("f{n}"), &bytes(n, MIB / 2))));
    let (_coordinator, address) = coordinator(&world, 0);
    let registry = format!("coordinator://{address}");
    let node = |name: &str| {
        let cache = world.dir(&format!("cache-{name}"));
        let words = ["node", "--source", "s3://data", "--endpoint-url", &server.endpoint(), "--name", name];
        let mut command = world.command(&words);
        command.args(["--cache-dir", cache.to_str().unwrap(), "--registry", &registry]);
        world.node_with(with_credentials(&mut command))
    };
    let restart = |mut old: Node, forgets: bool| {
        old.process.signal(rustix::process::Signal::TERM);
        assert!(old.process.wait().success(), "{}", old.process.log());
        if forgets {
            std::fs::remove_file(world.path("cache-two/recent.json")).unwrap();
        }
        node("two")
    };
    let drain = |more: &[&str]| {
        let mut out = None;
        // The registry knows the node a moment after its start.
        eventually("the drain", || {
            let done = world.run(&[&["node", "drain", "two", "--registry", &registry], more].concat());
            let drained = done.status.success();
            out = Some(String::from_utf8_lossy(&done.stdout).into_owned());
            drained
        });
        out.unwrap()
    };
    let _one = node("one");
    let two = node("two");
    let load = world.run(&["load", "s3://data", "--source", "s3://data", "--registry", &registry]);
    assert!(load.status.success(), "{load:?}");
    let held = two.count("blockcache", "used_bytes");
    assert!(held > 0, "{}", two.stats());
    let two = restart(two, false);
    let outcome: Value = serde_json::from_str(&drain(&["--json"])).unwrap();
    let number = |key: &str| outcome[key].as_u64().unwrap();
    assert_eq!((number("bytes_handed_on"), number("bytes_total")), (held, held), "{outcome}");
    assert_eq!(number("bytes_not_listed"), 0, "{outcome}");
    // Without the names it says how much stays.
    let _two = restart(two, true);
    let said = drain(&[]);
    let kept = spurline_types::units::human_bytes(held);
    assert!(said.contains("0 B of 0 B") && said.contains(&format!("not handed on  {kept} of files")), "{said}");
}

/// Takes a mount away, also when an assertion failed before.
struct Detach(std::path::PathBuf);

impl Drop for Detach {
    fn drop(&mut self) {
        detach(&self.0);
    }
}
