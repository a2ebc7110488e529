//! The unmount of a written bucket: files whose publication no program waits for are named until they are in the store, and so are
//! those that never come there.

use crate::nodes::NodesRig;
use crate::objects::{BUCKET, BucketRig};
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, ProxyFault, S3Server};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};

/// A mount through a proxy, alone or through a node.
struct ProxiedMount {
    server: S3Server,
    proxy: ChaosProxy,
    mount: Mount,
    world: World,
    /// The node.
    _nodes: Vec<Node>,
}

fn alone() -> Option<ProxiedMount> {
    let rig = BucketRig::start()?;
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &[]);
    Some(ProxiedMount { server: rig.server, proxy, mount, world: rig.world, _nodes: Vec::new() })
}

fn through_a_node() -> Option<ProxiedMount> {
    if !can_mount() {
        return None;
    }
    let server = S3Server::in_memory().unwrap();
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let rig = NodesRig::start_over(1, server, &proxy.endpoint())?;
    let mount = rig.mount("mnt", &["--peer-timeout", "2s"]);
    Some(ProxiedMount { server: rig.server, proxy, mount, world: rig.world, _nodes: rig.nodes })
}

impl ProxiedMount {
    /// Another program than that which opened the file has written it, and the last close is its own: no program waits for the
    /// publication, whose requests meet `fault`.
    fn write_late(&self, fault: ProxyFault, times: u32) {
        let file = File::create(self.mount.path("late")).unwrap();
        let mut writer = Command::new("sh");
        writer.args(["-c", "read word; printf late"]).stdin(Stdio::piped()).stdout(file);
        let mut child = writer.spawn().unwrap();
        // Closes the file here.
        drop(writer);
        assert!(self.server.bytes(BUCKET, "p/late").unwrap().is_empty());
        self.proxy.inject_on(Some("PUT"), "late", fault, times);
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        assert!(child.wait().unwrap().success());
    }

    fn umount(&self) -> Command {
        let mut umount = self.world.command(&["umount", "--timeout", "300s"]);
        umount.arg(&self.mount.at).stdout(Stdio::piped()).stderr(Stdio::piped());
        umount
    }
}

#[test]
fn an_unmount_waits_for_publications_and_names_the_files() {
    for start in [alone, through_a_node] {
        let Some(mut rig) = start() else { return };
        rig.write_late(ProxyFault::Stall, 1);
        eventually("the publication has begun", || rig.proxy.count_requests("PUT", "late") == 2);
        let mut umount = rig.umount().spawn().unwrap();
        let mut said = BufReader::new(umount.stderr.take().unwrap());
        let mut lines = String::new();
        while !lines.contains("waiting for the store to take 4 B of written bytes: /late (4 B)") {
            assert!(said.read_line(&mut lines).unwrap() > 0, "{lines}");
        }
        // The stalled connection ends.
        rig.proxy.refuse_connections(true);
        rig.proxy.refuse_connections(false);
        said.read_to_string(&mut lines).unwrap();
        assert!(umount.wait().unwrap().success(), "{lines}");
        assert_eq!(lines.matches("waiting for").count(), 1, "a line for each change: {lines}");
        assert!(rig.mount.process_mut().wait().success());
        assert_eq!(rig.server.bytes(BUCKET, "p/late").unwrap(), b"late");
    }
}

#[test]
fn an_unmount_names_files_that_are_not_published() {
    let lost =
        ["lost, as the store did not take them: 4 B of written bytes: /late (4 B)", "fix:", "the store's answers"];
    for start in [alone, through_a_node] {
        let Some(mut rig) = start() else { return };
        rig.write_late(ProxyFault::Error(403, "AccessDenied", "no"), 1_000_000);
        refused(&finish(&mut rig.umount()), 1, &lost);
        assert_eq!(rig.mount.process_mut().wait().code(), Some(1));
        let log = rig.mount.process().log();
        assert!(lost.iter().all(|part| log.contains(part)) && log.contains("AccessDenied"), "{log}");
        assert!(rig.server.bytes(BUCKET, "p/late").unwrap().is_empty(), "the object before stays");
    }
}
