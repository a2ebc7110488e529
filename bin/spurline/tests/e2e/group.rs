//! Nodes that enter a group, mounts that follow it, and the effect on readers when the registry dies.

use spurline_rig::world::*;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A coordinator on loopback, at a given port (0: any), without a file: its list dies with it.
pub fn coordinator(world: &World, port: u16) -> (Process, String) {
    let port = port.to_string();
    let mut command = world.command(&["coordinator", "--group-port", &port, "--state-file", "none"]);
    let process = Process::start(&mut command, &world.log_path("coordinator"));
    let line = process.wait_for("coordinating on ");
    let address = line.split("coordinating on ").nth(1).unwrap().trim().to_owned();
    (process, address)
}

/// A node of the group with a cache of its own.
fn node(world: &World, source: &str, registry: &str, name: &str) -> Node {
    let cache = world.dir(&format!("cache-{name}"));
    let mut command = world.command(&["node", "--source", source, "--cache-dir", cache.to_str().unwrap()]);
    world.node_with(command.args(["--registry", registry, "--name", name, "--zone", "rack1"]))
}

fn status(world: &World, at: &Path) -> serde_json::Value {
    let out = world.run(&["status", at.to_str().unwrap(), "--json"]);
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)))
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn a_mount_follows_its_group_and_reads_on_when_the_registry_forgets() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let text = bytes(3, 4 * MIB);
    world.file("source/a", &text);
    let source = world.path("source");
    let source = source.to_str().unwrap();
    let (mut first, address) = coordinator(&world, 0);
    let registry = format!("coordinator://{address}");
    let one = node(&world, source, &registry, "one");
    let at = world.dir("mnt");
    let mount = world.mount_with(&mut world.command(&["mount", source, at.to_str().unwrap(), "--registry", &registry]));
    let names = |word: &str| {
        let status = status(&world, &mount.at);
        let members = status["group"]["members"].as_array().unwrap().clone();
        let of = |m: &&serde_json::Value| m["state"] == word;
        members.iter().filter(of).map(|m| m["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(mount.read("a"), text);
    // A second node enters while the mount is there.
    let two = node(&world, source, &registry, "two");
    until("the second node", || names("up") == ["one", "two"]);
    // A reader runs all the while.
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut again = None;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(mount.read("a"), text);
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let guard = StopOnDrop(&stop);
        first.kill();
        until("the loss", || status(&world, &mount.at)["group"]["state"] == "lost");
        assert_eq!(names("up").len() + names("away").len(), 2, "the members last known stay");
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        again = Some(coordinator(&world, port));
        until("the registry", || status(&world, &mount.at)["group"]["state"] == "up");
        until("both nodes", || names("up") == ["one", "two"]);
        let seen = rounds.load(Ordering::Relaxed);
        until("a read after that", || rounds.load(Ordering::Relaxed) > seen + 1);
        drop(guard);
    });
    assert!(mount.process().log().contains("continuing with"), "{}", mount.process().log());
    // The status of the nodes themselves.
    until("the node's own word", || {
        let group = status(&world, Path::new(&one.address))["group"].clone();
        (&group["name"], &group["state"]) == (&"default".into(), &"up".into())
    });
    // And all of them at once, by the registry and by a list with one that is not there.
    let mut lines: Vec<serde_json::Value> = Vec::new();
    until("both nodes' answers", || {
        let all = world.run(&["status", "--registry", &registry, "--json"]);
        let text = String::from_utf8_lossy(&all.stdout).into_owned();
        lines = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        lines.len() == 2 && lines.iter().all(|line| line["state"] == "up")
    });
    for (line, name) in lines.iter().zip(["one", "two"]) {
        assert_eq!(line["name"], name, "{line}");
        assert_eq!((&line["zone"], &line["weight"]), (&"rack1".into(), &100.into()), "{line}");
        assert!(line["capacity_bytes"].as_u64().unwrap() > 0 && line["for_seconds"].is_u64(), "{line}");
        assert!(line["send_bytes_per_second"].is_number() && line["disks"][0]["state"] == "normal", "{line}");
    }
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let table = world.run(&["status", "--registry", &format!("static:{},{gone}", one.address)]);
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    assert_eq!(table.status.code(), Some(1), "{text}");
    for word in ["NODE", "WEIGHT", &one.address, &gone.to_string(), "down", "1 of 2 nodes up"] {
        assert!(text.contains(word), "{word} is missing in: {text}");
    }
    drop((two, again));
    mount.unmount();
}

/// Ends the reader also when an assertion beside it fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn nodes_of_one_host_without_a_name_are_distinguished_by_their_ports() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/a", &bytes(3, 4 * MIB));
    let source = world.path("source");
    let source = source.to_str().unwrap();
    let nodes = ["one", "two"].map(|name| {
        let cache = world.dir(&format!("cache-{name}"));
        let words = ["node", "--source", source, "--cache-dir", cache.to_str().unwrap()];
        world.node_with(&mut world.command(&words))
    });
    let (at, registry) = (world.dir("mnt"), format!("static:{},{}", nodes[0].address, nodes[1].address));
    let mount = world.mount_with(&mut world.command(&["mount", source, at.to_str().unwrap(), "--registry", &registry]));
    mount.read("a");
    let out = world.run(&["info", mount.at.join("a").to_str().unwrap(), "--json"]);
    let info: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
    let mut names: Vec<&str> = info["nodes"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    names.sort_unstable();
    let port = |node: &Node| node.address.rsplit(':').next().unwrap().to_owned();
    let mut ports = nodes.each_ref().map(port);
    ports.sort_unstable();
    assert_eq!(names.iter().map(|name| name.rsplit(':').next().unwrap()).collect::<Vec<_>>(), ports, "{info}");
    mount.unmount();
}

mod test_all {
    use super::*;

    #[test]
    fn a_registry_that_is_not_there_and_a_name_that_is_taken_are_told_apart() {
        let world = World::new();
        let source = world.dir("source");
        let source = source.to_str().unwrap();
        let (at, cache) = (world.dir("mnt"), world.dir("cache"));
        let start = |words: &[&str], registry: &str| -> Output {
            let mut command = world.command(words);
            finish(command.args(["--registry", registry, "--cache-group", "g"]))
        };
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let nowhere = format!("coordinator://{gone}");
        let (_coordinator, address) = coordinator(&world, 0);
        let registry = format!("coordinator://{address}");
        let mount = ["mount", source, at.to_str().unwrap()];
        let node = ["node", "--source", source, "--cache-dir", cache.to_str().unwrap(), "--name", "n"];
        // Each waits for a while.
        std::thread::scope(|scope| {
            scope.spawn(|| refused(&start(&node, &nowhere), 3, &[&gone.to_string()]));
            if is_root() {
                scope.spawn(|| refused(&start(&mount, &nowhere), 3, &["group g", &gone.to_string()]));
                refused(&start(&mount, &registry), 3, &["group g", "lists no node"]);
            }
        });
        let held = world.node(&[source], 0, &["--registry", &registry, "--cache-group", "g", "--name", "n"]);
        refused(&start(&node, &registry), 2, &["'n'", &held.address, "--name"]);
        // Invalid arguments.
        refused(&world.run(&["mount", source, "/mnt", "--cache-group", "g"]), 2, &["--registry"]);
        refused(&start(&["node", "--source", source, "--name", "a b"], &registry), 2, &["--name 'a b'"]);
    }
}
