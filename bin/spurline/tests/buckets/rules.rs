//! Pinned folders of a bucket that is written through nodes, and the jobs on it.

use crate::nodes::BUCKET;
use serde_json::Value;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, S3Server};
use std::fs;

/// A coordinator, a node and a mount.
struct PinRig {
    server: S3Server,
    proxy: ChaosProxy,
    node: Node,
    mount: Mount,
    registry: String,
    world: World,
    _coordinator: Process,
}

impl PinRig {
    fn start() -> Option<PinRig> {
        if !can_mount() {
            return None;
        }
        let world = World::new();
        let server = S3Server::in_memory().unwrap();
        server.create_bucket(BUCKET);
        (0..4).for_each(|number| drop(server.put(BUCKET, &format!("p/val/f{number}"), &bytes(number, MIB))));
        let proxy = ChaosProxy::start(server.address()).unwrap();
        let words = ["coordinator", "--group-port", "0", "--state-file", "none"];
        let coordinator = Process::start(&mut world.command(&words), &world.log_path("coordinator"));
        let line = coordinator.wait_for("coordinating on ");
        let registry = format!("coordinator://{}", line.split("coordinating on ").nth(1).unwrap().trim());
        let source = format!("s3://{BUCKET}/p");
        let endpoint = proxy.endpoint();
        let words = ["node", "--writable", "--source", &source, "--endpoint-url", &endpoint, "--registry", &registry];
        let mut command = world.command(&words);
        command.args(["--group-port", "0", "--cache-size", "32M", "--cache-dir"]).arg(world.dir("node-cache"));
        let node = world.node_with(with_credentials(&mut command));
        let at = world.dir("mnt");
        let words = ["mount", &source, at.to_str().unwrap(), "--rw", "--registry", &registry];
        let mount = world.mount_at(&mut world.command(&words), &at);
        Some(PinRig { server, proxy, node, mount, registry, world, _coordinator: coordinator })
    }

    /// Runs a command on the folder `val` of the mount.
    fn run(&self, command: &str, more: &[&str]) -> String {
        let folder = self.mount.path("val");
        let out = self.world.run(&[&[command, folder.to_str().unwrap()], more].concat());
        assert!(out.status.success(), "{command}: {out:?}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// MiB that the nodes hold under the rule.
    fn held(&self) -> u64 {
        let out = self.world.run(&["rules", "--json", "--registry", &self.registry]);
        let rules: Value = serde_json::from_slice(&out.stdout).unwrap();
        rules["rules"][0]["held_bytes"].as_u64().unwrap() >> 20
    }

    fn pinned(&self) -> u64 {
        self.node.count("blockcache", "pinned_bytes") >> 20
    }

    /// Requests for bytes of the folder that reached the store.
    fn fetched(&self) -> usize {
        self.proxy.count_requests("GET", "/p/val/f")
    }
}

/// A file that is written into a pinned folder is pinned without being read back, in each of its versions.
#[test]
fn files_that_are_written_into_a_pinned_folder_are_pinned() {
    let Some(rig) = PinRig::start() else { return };
    let said = rig.run("pin", &["--registry", &rig.registry]);
    assert!(said.contains("s3://bucket/p/val: pinned"), "{said}");
    rig.run("load", &[]);
    assert_eq!((rig.held(), rig.pinned(), rig.fetched()), (4, 4, 4));
    fs::write(rig.mount.path("val/new"), bytes(7, MIB)).unwrap();
    eventually("the new file is pinned", || (rig.held(), rig.pinned()) == (5, 5));
    // A pin follows the name: the next version is pinned too. The one before stays until it is freed.
    fs::write(rig.mount.path("val/f0"), bytes(8, MIB)).unwrap();
    eventually("the new version is pinned", || (rig.held(), rig.pinned()) == (6, 6));
    // Other files do not displace them.
    for number in 0..40 {
        fs::write(rig.mount.path(format!("other{number}")), bytes(100 + number, MIB)).unwrap();
    }
    eventually("the disk is full", || rig.node.count("blockcache", "evictions") > 0);
    assert_eq!((rig.held(), rig.pinned()), (6, 6));
    assert!(rig.mount.read("val/f0") == bytes(8, MIB) && rig.mount.read("val/new") == bytes(7, MIB));
    assert_eq!(rig.fetched(), 4, "{:?}", rig.proxy.requests());
    // The jobs agree with the rule.
    let said = rig.run("load", &[]);
    assert!(said.contains("5 of 5 done"), "{said}");
    assert_eq!(rig.fetched(), 4, "all is there");
    let said = rig.run("free", &[]);
    assert!(said.contains("5.00 MiB are pinned and were kept"), "{said}");
    let info = rig.world.run(&["info", "--json", rig.mount.path("val/f0").to_str().unwrap()]);
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!((&info["reads"]["cached"], &info["rule"]["pin"]), (&true.into(), &true.into()), "{info}");
    rig.run("unpin", &["--registry", &rig.registry]);
    assert_eq!(rig.pinned(), 0);
    assert_eq!(rig.server.bytes(BUCKET, "p/val/f0").unwrap(), bytes(8, MIB));
    rig.mount.unmount();
}
