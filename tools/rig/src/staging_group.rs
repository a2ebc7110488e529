//! A coordinator, and nodes of a bucket that keep staged files, each of a failure domain of its own.

use crate::world::*;

/// See the head of this file.
pub struct StagingGroup {
    pub registry: String,
    pub nodes: Vec<Node>,
    ports: Vec<u16>,
    source: String,
    endpoint: String,
    _coordinator: Process,
}

impl StagingGroup {
    /// This many nodes of `source` at an S3 server.
    pub fn start(world: &World, count: usize, source: &str, endpoint: &str) -> StagingGroup {
        let words = ["coordinator", "--group-port", "0", "--state-file", "none"];
        let coordinator = Process::start(&mut world.command(&words), &world.log_path("coordinator"));
        let line = coordinator.wait_for("coordinating on ");
        let registry = format!("coordinator://{}", line.split("coordinating on ").nth(1).unwrap().trim());
        let (source, endpoint) = (source.to_owned(), endpoint.to_owned());
        let (nodes, ports) = (Vec::new(), Vec::new());
        let mut group = StagingGroup { registry, nodes, ports, source, endpoint, _coordinator: coordinator };
        for number in 0..count {
            let node = group.start_node(world, number, 0);
            group.ports.push(node.port());
            group.nodes.push(node);
        }
        group
    }

    fn start_node(&self, world: &World, number: usize, port: u16) -> Node {
        let name = format!("node-{number}");
        let words = ["node", "--writable", "--source", &self.source, "--endpoint-url", &self.endpoint, "--name", &name];
        let mut command = world.command(&words);
        command.args(["--registry", &self.registry, "--group-port", &port.to_string()]);
        command.args(["--log-filter", "info,spurline_stage=debug", "--object-attrs", "--stage-size", "500M"]);
        command.args(["--failure-domain", &format!("rack-{number}"), "--cache-dir"]);
        command.arg(world.dir(&format!("node-cache-{number}")));
        world.node_with(with_credentials(&mut command))
    }

    /// Kills a node, and starts a process on the same disk.
    pub fn restart(&mut self, world: &World, number: usize) {
        self.nodes[number].process.kill();
        self.nodes[number] = self.start_node(world, number, self.ports[number]);
    }

    /// A mount below `at`, whose files are staged, once the node that leads knows enough others: until then such a mount is refused.
    pub fn mount(&self, world: &World, name: &str, flags: &[&str]) -> Mount {
        let at = world.dir(name);
        let words = ["mount", &self.source, at.to_str().unwrap(), "--rw", "--stage", "--registry", &self.registry];
        let words = [&words[..], flags].concat();
        let log = world.log_path("staged-mount");
        eventually("files can be staged", || {
            world.run(&[&words[..], &["-d", "--log", log.to_str().unwrap()]].concat()).status.success()
        });
        detach(&at);
        world.mount_at(&mut world.command(&words), &at)
    }
}
