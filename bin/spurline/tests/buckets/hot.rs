//! The bytes of files that a mount has just written through nodes: other mounts read these without a request to the store.

use crate::nodes::BUCKET;
use crate::objects::BucketRig;
use serde_json::Value;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, S3Server};
use std::fs;

/// A coordinator, nodes that know each other, and a store behind a proxy.
struct HotRig {
    server: S3Server,
    proxy: ChaosProxy,
    _nodes: Vec<Node>,
    registry: String,
    world: World,
    _coordinator: Process,
}

fn source() -> String {
    format!("s3://{BUCKET}/p")
}

impl HotRig {
    fn start(node_count: usize) -> HotRig {
        let world = World::new();
        let server = S3Server::in_memory().unwrap();
        server.create_bucket(BUCKET);
        let proxy = ChaosProxy::start(server.address()).unwrap();
        let words = ["coordinator", "--group-port", "0", "--state-file", "none"];
        let coordinator = Process::start(&mut world.command(&words), &world.log_path("coordinator"));
        let line = coordinator.wait_for("coordinating on ");
        let registry = format!("coordinator://{}", line.split("coordinating on ").nth(1).unwrap().trim());
        let nodes = (0..node_count).map(|number| {
            let mut command = world.command(&["node", "--writable", "--source", &source(), "--group-port", "0"]);
            // Memory for the longest file.
            command.args(["--buffer-size", "600M"]);
            command.args(["--endpoint-url", &proxy.endpoint(), "--registry", &registry, "--cache-dir"]);
            command.arg(world.dir(&format!("node-cache-{number}")));
            world.node_with(with_credentials(&mut command))
        });
        let nodes: Vec<Node> = nodes.collect();
        eventually("the nodes know each other", || {
            nodes.iter().all(|node| node.count("group", "members") == node_count as u64)
        });
        HotRig { server, proxy, _nodes: nodes, registry, world, _coordinator: coordinator }
    }

    fn mount(&self, name: &str) -> Mount {
        let at = self.world.dir(name);
        let words = ["mount", &source(), at.to_str().unwrap(), "--rw", "--buffer-size", "100M"];
        let mut command = self.world.command(&words);
        self.world.mount_at(command.args(["--registry", &self.registry]), &at)
    }

    /// Waits until the nodes have all blocks of a file.
    fn wait_until_hot(&self, mount: &Mount, name: &str) {
        eventually(&format!("the blocks of {name} are with their nodes"), || {
            let out = self.world.run(&["info", "--json", mount.path(name).to_str().unwrap()]);
            let info: Value = serde_json::from_slice(&out.stdout).unwrap();
            info["blocks"]["total"].as_u64() > Some(0) && info["blocks"]["cached"] == info["blocks"]["total"]
        });
    }
}

#[test]
fn a_file_written_through_nodes_is_read_without_a_request() {
    if !can_mount() {
        return;
    }
    for node_count in [1, 3] {
        let rig = HotRig::start(node_count);
        let one = rig.mount("one");
        let two = rig.mount("two");
        let written = [
            ("small", bytes(1, 10_000)),
            ("whole", bytes(2, 7 * MIB)),
            ("parts", bytes(3, 30 * MIB + 17)),
            // Longer than the space of the mount: parts are hidden objects before.
            ("long", bytes(4, 110 * MIB + 5)),
        ];
        for (name, content) in &written {
            fs::write(one.path(name), content).unwrap();
            rig.wait_until_hot(&two, name);
            assert!(two.read(name) == *content, "{name}");
            // A program that writes a file under another name first.
            let renamed = format!("{name}-renamed");
            fs::rename(one.path(name), one.path(&renamed)).unwrap();
            rig.wait_until_hot(&one, &renamed);
            assert!(two.read(&renamed) == *content, "{renamed}");
            assert!(rig.server.bytes(BUCKET, &format!("p/{renamed}")).unwrap() == *content);
            let fetched = rig.proxy.count_requests("GET", &format!("/p/{name}"));
            assert_eq!(fetched, 0, "{name} through {node_count} nodes: {:?}", rig.proxy.requests());
            let spilled = rig.proxy.count_requests("PUT", "/p/.spurline-part-");
            assert_eq!(spilled > 3, *name == "long", "{name}: {spilled} parts were moved to the store");
        }
        two.unmount();
        one.unmount();
    }
}

/// A file that is longer than the memory for blocks: the cache disk takes it over when others follow.
#[test]
fn a_file_written_by_a_lone_mount_stays_on_the_cache_disk() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("alone", &proxy.endpoint(), &["--buffer-size", "100M"]);
    let long = bytes(1, 130 * MIB + 5);
    fs::write(mount.path("written"), &long).unwrap();
    fs::rename(mount.path("written"), mount.path("long")).unwrap();
    for number in 0..64 {
        fs::write(mount.path(format!("small-{number}")), b"small").unwrap();
    }
    eventually("the file is on the cache disk", || {
        let out = rig.world.run(&["info", "--json", mount.path("long").to_str().unwrap()]);
        let info: Value = serde_json::from_slice(&out.stdout).unwrap();
        info["blocks"]["cached"] == info["blocks"]["total"]
    });
    assert!(mount.read("long") == long);
    assert_eq!(proxy.count_requests("GET", "/p/long"), 0);
    let copied = mount.count("blockcache", "write_bytes");
    assert!(copied < MIB as u64, "{copied} bytes were copied to the cache disk");
    mount.unmount();
}
