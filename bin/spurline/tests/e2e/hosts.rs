//! A cluster of hosts: five nodes, four clients, an etcd and an S3 server, each in a network namespace of its own on one
//! bridge. While every client reads, compares and has fio verify, hosts are killed, stopped, cut off, made lossy and slow,
//! and restarted in turn. No error and no wrong byte; how long the longest read took is printed.

use crate::cluster::{Reads, Stop, read_on, texts};
use rustix::process::Signal;
use spurline_rig::lan::Lan;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

const NODES: usize = 5;
const CLIENTS: usize = 4;
/// The hosts of etcd and S3 come after the nodes and the clients.
const ETCD: usize = NODES + CLIENTS;
const S3: usize = ETCD + 1;
const PORT: u16 = 7000;

/// The services on the hosts.
struct Cluster<'a> {
    world: &'a World,
    lan: &'a Lan,
    token: String,
    endpoint: String,
    registry: String,
}

impl Cluster<'_> {
    fn node(&self, n: usize) -> Node {
        let mut words = self.world.node_words(&["s3://data"], PORT);
        let own = words.iter().position(|word| word == "--cache-dir").unwrap();
        words[own + 1] = self.world.dir(&format!("cache-{n}")).into();
        let mut command = self.world.command(&[]);
        command.args(words).args(["--endpoint-url", &self.endpoint, "--group-token-file", &self.token]);
        command.args(["--registry", &self.registry, "--name", &format!("n{n}")]);
        command.args(["--group-network", &Lan::ip(n), "--buffer-size", "64M"]);
        self.world.node_with(&mut self.lan.on(n, with_credentials(&mut command)))
    }
    fn mount(&self, n: usize) -> (std::path::PathBuf, Process) {
        let at = self.world.dir(&format!("mnt-{n}"));
        let mut command = self.world.command(&["mount", "s3://data", at.to_str().unwrap()]);
        command.args(["--registry", &self.registry, "--group-token-file", &self.token, "--buffer-size", "64M"]);
        command.args(["--peer-silence", "1s", "--replicas", "2"]);
        let process = Process::start(&mut self.lan.on(NODES + n, &command), &self.world.log_path("mount"));
        process.wait_for(" is mounted on ");
        (at, process)
    }
    fn etcd(&self) -> Process {
        let (at, peers) = (Lan::ip(ETCD), "http://127.0.0.1:2380");
        let url = format!("http://{at}:2379");
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(self.world.dir("etcd"));
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url, "--listen-peer-urls", peers]);
        command.args(["--initial-advertise-peer-urls", peers, "--initial-cluster", &format!("default={peers}")]);
        let process = Process::start(&mut self.lan.on(ETCD, &command), &self.world.log_path("etcd"));
        process.wait_for("serving insecure client requests");
        process
    }
}

/// Has fio write a file whose every block carries its own checksum.
fn written_by_fio(world: &World) -> Option<Vec<u8>> {
    let path = world.path("fio.src");
    let mut fio = Command::new("fio");
    fio.args(["--name=w", "--rw=write", "--bs=64k", "--size=8m", "--verify=crc32c", "--do_verify=0"]);
    let out = fio.arg("--filename").arg(&path).current_dir(world.dir("fio")).output().ok()?;
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    std::fs::read(path).ok()
}

/// Runs fio on that file past the page cache with verification of every block, until stopped.
fn verify_on(world: &World, mount: &Path, reads: &Reads, passes: &AtomicU64) {
    while !reads.stop.load(Ordering::Acquire) {
        let mut fio = Command::new("fio");
        fio.args(["--name=r", "--rw=randread", "--bs=64k", "--size=8m", "--verify=crc32c", "--verify_fatal=1"]);
        fio.args(["--direct=1", "--filename"]).arg(mount.join("fio")).current_dir(world.dir("fio"));
        let out = fio.output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "fio on {}: {said}{}", mount.display(), String::from_utf8_lossy(&out.stdout));
        passes.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn five_nodes_and_four_clients_live_through_what_happens_to_hosts() {
    if !can_mount() {
        return;
    }
    if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("etcd", "there is no etcd here (package etcd-server)");
    }
    let Some(lan) = Lan::new(S3 + 1) else { return };
    let world = World::new();
    let server = lan.inside(S3, || S3Server::in_memory_on(format!("{}:9000", Lan::ip(S3)).parse().unwrap()).unwrap());
    server.create_bucket("data");
    let texts = texts();
    texts.iter().enumerate().for_each(|(n, text)| drop(server.put("data", &format!("f{n}"), text)));
    let fio = written_by_fio(&world);
    match &fio {
        Some(bytes) => drop(server.put("data", "fio", bytes)),
        None => skip("fio", "there is no fio here: no second opinion on the bytes"),
    }
    let token = world.file("token", b"the group's q5Ykm0WJ7b2uR1xTzv9sLd3f\n");
    rustix::fs::chmod(&token, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let cluster = Cluster {
        world: &world,
        lan: &lan,
        token: token.to_str().unwrap().to_owned(),
        endpoint: server.endpoint(),
        registry: format!("etcd://{}:2379", Lan::ip(ETCD)),
    };
    let mut etcd = cluster.etcd();
    let mut nodes: Vec<Node> = (0..NODES).map(|n| cluster.node(n)).collect();
    let mounts: Vec<_> = (0..CLIENTS).map(|n| cluster.mount(n)).collect();
    let (reads, passes) = (Reads::of(CLIENTS), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = Stop(&reads.stop);
        for (n, (at, _)) in mounts.iter().enumerate() {
            let (texts, reads, passes, world) = (&texts, &reads, &passes, &world);
            scope.spawn(move || {
                let _stop = Stop(&reads.stop);
                read_on(at, texts, n, reads);
            });
            if fio.is_some() {
                scope.spawn(move || {
                    let _stop = Stop(&reads.stop);
                    verify_on(world, at, reads, passes);
                });
            }
        }
        let step = |what: &str, more: u64| {
            reads.go_on(more);
            println!("the longest read: {:?} {what}", reads.longest());
        };
        step("while the cache fills", 100);
        nodes[0].process.kill();
        step("with a node killed", 60);
        nodes[0] = cluster.node(0);
        step("when it is back", 30);
        nodes[1].process.signal(Signal::STOP);
        step("with a node stopped", 60);
        nodes[1].process.signal(Signal::CONT);
        step("when it goes on", 30);
        lan.spoil(2);
        step("with a node whose link loses and delays", 200);
        lan.mend(2);
        step("when its link is mended", 30);
        lan.cable(3, false);
        step("with a node's cable out", 60);
        lan.cable(3, true);
        step("when it is in again", 30);
        lan.one_way(NODES, 4, true);
        step("with one client that does not reach one node", 60);
        lan.one_way(NODES, 4, false);
        step("when it does", 30);
        lan.cable(ETCD, false);
        step("with the registry out of reach", 30);
        lan.cable(ETCD, true);
        etcd.kill();
        step("with the registry dead", 30);
        etcd = cluster.etcd();
        for (n, node) in nodes.iter_mut().enumerate() {
            node.process.signal(Signal::TERM);
            assert!(node.process.wait().success(), "{}", node.process.log());
            *node = cluster.node(n);
            reads.go_on(30);
        }
        step("while every node was restarted in turn", 30);
        for (n, (_, process)) in mounts.iter().enumerate() {
            assert!(!process.log().contains("panicked"), "client {n}: {}", process.log());
        }
    });
    println!("{} passes of fio over its file, each block verified", passes.load(Ordering::Relaxed));
    for (at, mut process) in mounts {
        process.signal(Signal::TERM);
        assert!(process.wait().success(), "{}", process.log());
        assert!(!is_mounted(&at));
    }
    // All of them took part, and know it of each other again.
    assert!(nodes.iter().all(|node| node.count("blockcache", "blocks") > 0));
    drop(etcd);
}
