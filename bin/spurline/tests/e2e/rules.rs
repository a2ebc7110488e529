//! Folder rules of a group: pinned files stay, a TTL frees files, a quota limits them; restarted nodes and
//! coordinators keep the rules.

use rustix::process::Signal;
use serde_json::Value;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, S3Server};
use std::process::Output;

/// An S3 server whose requests are counted, a coordinator, and nodes.
struct Group {
    world: World,
    proxy: ChaosProxy,
    server: S3Server,
    coordinator: Process,
    registry: String,
}

impl Group {
    fn new() -> Group {
        let world = World::new();
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("data");
        let proxy = ChaosProxy::start(server.address()).unwrap();
        let (coordinator, address) = Self::coordinator(&world, "0", true);
        let registry = format!("coordinator://{address}");
        Group { world, proxy, server, coordinator, registry }
    }

    fn coordinator(world: &World, port: &str, file: bool) -> (Process, String) {
        let file = if file { world.path("nodes").display().to_string() } else { "none".into() };
        let mut command = world.command(&["coordinator", "--group-port", port, "--state-file", &file]);
        let process = Process::start(&mut command, &world.log_path("coordinator"));
        let line = process.wait_for("coordinating on ");
        let address = line.split("coordinating on ").nth(1).unwrap().trim().to_owned();
        (process, address)
    }

    /// Kills the coordinator, and starts it again at its port.
    fn restart(&mut self, file: bool) {
        self.coordinator.kill();
        let port = self.registry.rsplit(':').next().unwrap().to_owned();
        self.coordinator = Self::coordinator(&self.world, &port, file).0;
    }

    fn put(&self, folder: &str, files: u64) {
        (0..files).for_each(|n| drop(self.server.put("data", &format!("{folder}/f{n}"), &bytes(n, MIB))));
    }

    fn node(&self, name: &str, size: &str) -> Node {
        self.node_at(name, size, 0)
    }

    /// At the port of one that was killed its name is its own at once.
    fn node_at(&self, name: &str, size: &str, port: u16) -> Node {
        let port = port.to_string();
        let cache = self.world.dir(&format!("cache-{name}"));
        let endpoint = self.proxy.endpoint();
        let mut command = self.world.command(&[
            "node",
            "--source",
            "s3://data",
            "--endpoint-url",
            &endpoint,
            "--name",
            name,
            "--group-port",
            &port,
        ]);
        command.args(["--cache-dir", cache.to_str().unwrap(), "--registry", &self.registry, "--cache-size", size]);
        self.world.node_with(with_credentials(&mut command))
    }

    fn try_to(&self, words: &[&str]) -> Output {
        self.world.run(&[words, &["--registry", &self.registry]].concat())
    }

    fn run(&self, words: &[&str]) -> String {
        let out = self.try_to(words);
        assert!(out.status.success(), "{words:?}: {out:?}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    fn load(&self, folder: &str, more: &[&str]) -> String {
        let url = format!("s3://data/{folder}");
        self.run(&[&["load", &url, "--source", "s3://data", "-p", "4"], more].concat())
    }

    /// Reads more than the disk can hold, one part after the other: each part has to fit.
    fn scan(&self) {
        ["f1*", "f2*", "f3*"].iter().for_each(|some| drop(self.load("train", &["--include", some])));
    }

    fn rules(&self) -> Value {
        let out = self.try_to(&["rules", "--json"]);
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)))
    }

    /// Bytes held by the rule for a folder; `None` when there is none.
    fn held(&self, folder: &str) -> Option<u64> {
        let (rules, url) = (self.rules(), format!("s3://data/{folder}"));
        rules["rules"].as_array()?.iter().find(|rule| rule["url"] == *url)?["held_bytes"].as_u64()
    }

    /// Requests for the bytes of files of a folder that reached the server.
    fn fetched(&self, folder: &str) -> usize {
        let of = format!("/{folder}/f");
        self.proxy.requests().iter().filter(|(method, path)| method == "GET" && path.contains(&of)).count()
    }
}

fn end(mut node: Node) {
    node.process.signal(Signal::TERM);
    assert!(node.process.wait().success(), "{}", node.process.log());
}

#[test]
fn what_is_freed_leaves_pinned_blocks_and_takes_old_versions_along() {
    let group = Group::new();
    ["val", "train"].iter().for_each(|folder| group.put(folder, 2));
    let node = group.node("one", "64M");
    let used = |mib: u64| node.count("blockcache", "used_bytes") == mib << 20;
    group.run(&["pin", "s3://data/val"]);
    group.load("val", &[]);
    group.load("train", &[]);
    // Another version of a file, and one that is removed.
    group.server.put("data", "train/f0", &bytes(9, MIB));
    eventually("the new version", || {
        group.load("train", &[]);
        used(5)
    });
    group.server.remove("data", "train/f1");
    // The same folder as a source of its own.
    group.run(&["load", "--source", "s3://data/train", "f0"]);
    assert!(used(6), "{}", node.stats());
    let free = |words: &[&str]| group.run(&[&["free"], words].concat());
    let said = free(&["s3://data", "--source", "s3://data"]);
    assert!(said.contains("3.00 MiB freed") && said.contains("2.00 MiB are pinned and were kept; --pinned"), "{said}");
    eventually("the space", || used(3));
    assert_eq!((group.held("val"), node.count("blockcache", "pinned_bytes")), (Some(2 << 20), 2 << 20));
    let said = free(&["val", "--source", "s3://data", "--pinned"]);
    assert!(said.contains("2.00 MiB freed") && !said.contains("note"), "{said}");
    assert_eq!(group.held("val"), Some(0), "the folder stays pinned");
    group.load("val", &[]);
    let said = free(&["--all", "--source", "s3://data"]);
    assert!(
        said.contains("1.00 MiB freed") && !said.contains("files") && said.contains("2.00 MiB are pinned"),
        "{said}"
    );
    free(&["--all", "--pinned", "--source", "s3://data"]);
    eventually("an empty cache", || used(0));
    let part = ["free", "--all", "s3://data/val", "--source", "s3://data"];
    refused(&group.try_to(&part), 2, &["--all empties the whole cache", "name the mountpoint"]);
    refused(&group.try_to(&["free", "--rate", "1M", "val", "--source", "s3://data"]), 2, &["--rate"]);
    for command in ["load", "free"] {
        let out = group.try_to(&[command, "val", "--source", "s3://data", "--include", "*.jpeg"]);
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.code() == Some(1) && said.contains("no file matches --include"), "{out:?}");
    }
    end(node);
}

#[test]
fn limited_folders_go_and_nodes_that_join_know_the_rules() {
    let group = Group::new();
    group.put("scratch", 8);
    let node = group.node("one", "64M");
    // Before anything is there: a rule for what will come. A share has to hold a block.
    refused(
        &group.try_to(&["limit", "s3://data/none", "--quota", "512K"]),
        1,
        &["a block of 1.00 MiB", "at least 1.00 MiB"],
    );
    let said = group.run(&["limit", "s3://data/scratch", "--quota", "4M"]);
    assert!(said.contains("s3://data/scratch: at most 4.00 MiB"), "{said}");
    group.load("scratch", &["--include", "f[0-3]"]);
    group.load("scratch", &["--include", "f[4-7]"]);
    assert_eq!((group.held("scratch"), node.count("blockcache", "limited_blocks")), (Some(4 << 20), 4));
    // A larger quota keeps all. A shorter TTL frees all, including blocks cached before.
    group.run(&["limit", "s3://data/scratch", "--quota", "none", "--ttl", "1h"]);
    group.load("scratch", &[]);
    assert_eq!(group.held("scratch"), Some(8 << 20));
    let said = group.run(&["limit", "s3://data/scratch", "--ttl", "1s"]);
    assert!(said.contains("kept for 1 s"), "{said}");
    eventually("the end of its time", || group.held("scratch") == Some(0));
    let before = group.fetched("scratch");
    group.load("scratch", &[]);
    assert!(group.fetched("scratch") >= before + 8, "it is fetched again");
    // A new node gets the rules.
    let other = group.node("two", "64M");
    assert!(other.process.log().contains("folder rules: 1, revision"), "{}", other.process.log());
    eventually("both are in the list", || {
        group.rules()["most_pinned_bytes"].as_u64() == Some(2 * ((64 << 20) / 100 * 80))
    });
    end(other);
    group.run(&["limit", "s3://data/scratch", "--ttl", "none"]);
    assert_eq!(group.held("scratch"), None);
    // Classes of new files are rules, too.
    let class = |words: &[&str]| group.run(&[&["limit", "s3://data/scratch"], words].concat());
    let said = class(&["--stage"]);
    assert!(said.contains("s3://data/scratch: new files are staged"), "{said}");
    assert_eq!(group.rules()["rules"][0]["stage"], true);
    let said = class(&["--scratch", "--quota", "4M"]);
    assert!(said.contains("at most 4.00 MiB, new files are scratch data, never uploaded"), "{said}");
    let rules = group.rules();
    assert_eq!((&rules["rules"][0]["scratch"], rules["rules"][0].get("stage")), (&Value::Bool(true), None), "{rules}");
    class(&["--direct", "--quota", "none"]);
    assert_eq!(group.held("scratch"), None);
    refused(&group.try_to(&["limit", "/data", "--stage"]), 2, &["--stage: file:///data is in a directory"]);
    refused(&group.try_to(&["limit", "s3://data/scratch", "--stage", "--scratch"]), 2, &["--scratch"]);
    end(node);
}

#[test]
fn a_rule_holds_for_a_directory_whatever_its_name() {
    let group = Group::new();
    let source = group.world.dir("my data, 100% \u{e9}");
    let folder = source.join("v al #1?");
    std::fs::create_dir(&folder).unwrap();
    (0..4).for_each(|n| std::fs::write(folder.join(format!("f {n}%")), bytes(n, MIB)).unwrap());
    let [source, folder] = [&source, &folder].map(|dir| dir.to_str().unwrap());
    let cache = group.world.dir("cache");
    let words = ["node", "--source", source, "--registry", &group.registry, "--cache-size", "32M", "--cache-dir"];
    let mut command = group.world.command(&words);
    let node = group.world.node_with(command.arg(&cache));
    let said = group.run(&["pin", folder]);
    assert!(said.contains("/my%20data,%20100%25%20%C3%A9/v%20al%20%231%3F: pinned"), "{said}");
    let load = |path: &str| group.run(&["load", path, "--source", source]);
    load(&format!("{folder}/f 0%"));
    load("v al #1?");
    let rules = group.rules();
    let (url, held) = (rules["rules"][0]["url"].as_str().unwrap(), &rules["rules"][0]["held_bytes"]);
    assert!(url.starts_with("file:///") && url.is_ascii() && *held == 4 << 20, "{rules}");
    assert_eq!((rules["rules"].as_array().unwrap().len(), node.count("blockcache", "pinned_bytes")), (1, 4 << 20));
    // The URL works like the path, and finds the same cached blocks.
    let said = group.run(&["limit", url, "--ttl", "1d"]);
    assert!(said.contains("4.00 MiB of it held now"), "{said}");
    group.run(&["unpin", url]);
    assert_eq!(node.count("blockcache", "pinned_bytes"), 0);
    end(node);
}

mod test_all {
    use super::*;

    #[test]
    fn a_load_of_more_than_a_quota_passes_through_it_and_says_what_is_held() {
        let group = Group::new();
        (0..3).for_each(|n| drop(group.server.put("data", &format!("big/f{n}"), &bytes(n, 8 * MIB))));
        let nodes = ["one", "two", "three"].map(|name| group.node(name, "64M"));
        eventually("all are in the list", || {
            group.rules()["most_pinned_bytes"].as_u64() == Some(3 * ((64 << 20) / 100 * 80))
        });
        // Two blocks for each node, and a file is eight on one of them.
        group.run(&["limit", "s3://data/big", "--quota", "6M"]);
        for _ in 0..3 {
            let said = group.load("big", &[]);
            assert!(said.contains("SUCCEEDED") && said.contains("3 of 3 done"), "{said}");
            assert!(
                said.contains("of s3://data/big 24.0 MiB were loaded and ") && said.contains("at most 6.00 MiB"),
                "{said}"
            );
            eventually("the quota holds", || group.held("big").is_some_and(|held| held > 0 && held <= 6 << 20));
        }
        // A second read shows again what was freed.
        let out = group.try_to(&["load", "s3://data/big", "--source", "s3://data", "--verify", "--json"]);
        let said: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
        assert!(out.status.code() == Some(1) && said["state"] == "FAILED", "{said}");
        assert_eq!((&said["files_done"], said["files_total"].as_u64()), (&said["files_total"], Some(3)), "{said}");
        let why = said["failed"][0]["reason"].as_str().unwrap();
        assert!(
            why.contains("after loading: node ") && why.contains("big is kept by a rule, 6.00 MiB of it at most"),
            "{why}"
        );
        refused(
            &group.try_to(&["limit", "s3://nosuch/x", "--quota", "1G"]),
            1,
            &["s3://nosuch/x: no node serves it; the nodes' sources (--source) are s3://data", "nothing was changed"],
        );
        nodes.into_iter().for_each(end);
    }

    #[test]
    fn pinned_folders_stay_over_scans_restarts_and_a_smaller_disk() {
        let mut group = Group::new();
        for (folder, files) in [("val", 8), ("train", 40), ("huge", 30)] {
            group.put(folder, files);
        }
        let node = group.node("one", "32M");
        // What does not fit is refused, with the figures, and nothing is changed.
        refused(
            &group.try_to(&["pin", "s3://data/huge"]),
            1,
            &["s3://data/huge has 30.0 MiB", "can pin 25.6 MiB", "80 %", "nothing was changed", "--cache-size"],
        );
        assert_eq!(group.held("huge"), None);
        // The rule covers cached and later blocks. A second time changes nothing.
        group.load("val", &["--include", "f[0-3]"]);
        let said = group.run(&["pin", "s3://data/val"]);
        assert!(said.contains("s3://data/val: pinned") && said.contains("4.00 MiB of it held"), "{said}");
        assert_eq!(group.held("val"), Some(4 << 20));
        group.load("val", &[]);
        let before = group.rules();
        assert_eq!((group.held("val"), group.fetched("val")), (Some(8 << 20), 8));
        group.run(&["pin", "s3://data/val/"]);
        assert_eq!(group.rules(), before);
        group.scan();
        assert!(node.count("blockcache", "evictions") > 0 && node.count("blockcache", "pinned_bytes") == 8 << 20);
        // The node and the coordinator start again, each by a kill; and the node's disk is smaller then.
        group.restart(true);
        assert_eq!(group.rules()["rules"].as_array().unwrap().len(), 1, "the coordinator's file has them");
        eventually("the node is in the list again", || group.held("val") == Some(8 << 20));
        end(node);
        let mut node = group.node("one", "24M");
        eventually("the smaller disk", || node.count("blockcache", "used_bytes") <= 24 << 20);
        group.scan();
        group.load("val", &[]);
        assert_eq!((group.fetched("val"), group.held("val")), (8, Some(8 << 20)), "pinned, and each fetched once");
        let port = node.port();
        node.process.kill();
        // Started while the registry is gone it knows the rules still.
        group.coordinator.kill();
        let node = group.node_at("one", "24M", port);
        assert_eq!(node.count("blockcache", "pinned_bytes"), 8 << 20, "{}", node.process.log());
        // A coordinator that comes back empty is given the rules by the node.
        group.restart(false);
        eventually("the rules are given back", || group.held("val") == Some(8 << 20));
        let said = group.run(&["unpin", "s3://data/val"]);
        assert!(said.contains("s3://data/val: no rule"), "{said}");
        assert_eq!((group.held("val"), node.count("blockcache", "pinned_bytes")), (None, 0));
        refused(&group.try_to(&["unpin", "s3://data/val"]), 1, &["s3://data/val is not pinned in group default"]);
        // Pinned and loaded by one command; a file is a folder's equal.
        group.load("train/f1", &["--pin"]);
        assert_eq!(group.held("train/f1"), Some(1 << 20));
        refused(&group.try_to(&["load", "--pin", "s3://data/huge", "--source", "s3://data"]), 1, &["can pin 19.2 MiB"]);
        end(node);
    }

    #[test]
    fn what_can_not_be_a_rule_is_refused_in_plain_words() {
        let mut group = Group::new();
        group.put("val", 1);
        let node = group.node("one", "32M");
        let run = |words: &[&str]| group.world.run(words);
        refused(
            &run(&["pin", "s3://data/val"]),
            2,
            &["none is named", "--registry coordinator://HOST:PORT", "runs alone"],
        );
        refused(
            &run(&["pin", "s3://data/val", "--registry", "static:127.0.0.1:1"]),
            2,
            &["static:127.0.0.1:1 lists nodes and keeps nothing", "spurline coordinator"],
        );
        refused(&run(&["rules", "--registry", "dns:nodes.example:1"]), 2, &["lists nodes and keeps nothing"]);
        refused(&group.try_to(&["pin", "s4://data/val"]), 2, &["unknown scheme 's4'"]);
        refused(&group.try_to(&["pin", "s3://data/vel"]), 1, &["s3://data/vel", "name a folder or file that is there"]);
        refused(&group.try_to(&["pin", "s3://other"]), 1, &["no node serves it", "s3://data"]);
        refused(&group.try_to(&["limit", "s3://data/val"]), 2, &["--ttl TIME or --quota SIZE"]);
        refused(&group.try_to(&["limit", "s3://data/val", "--ttl", "soon"]), 2, &["'soon' is not a duration"]);
        refused(&group.try_to(&["limit", "s3://data/val", "--ttl", "0s"]), 2, &["would keep nothing"]);
        refused(&group.try_to(&["limit", "s3://data/val", "--quota", "much"]), 2, &["much"]);
        let token = group.world.file("token", b"a secret of thirty-two characters\n");
        let token = token.to_str().unwrap();
        refused(&group.try_to(&["rules", "--group-token-file", token]), 3, &["group default", "token"]);
        // Interrupted while it counts, nothing is changed.
        group.proxy.forget_requests();
        group.proxy.set_latency(std::time::Duration::from_secs(2));
        let mut command = group.world.command(&["pin", "s3://data/val", "--registry", &group.registry]);
        let mut pin = Process::start(&mut command, &group.world.log_path("pin"));
        eventually("it counts", || !group.proxy.requests().is_empty());
        pin.signal(Signal::INT);
        assert_eq!(pin.wait().code(), Some(1), "{}", pin.log());
        assert!(pin.log().contains("interrupted") && pin.log().contains("nothing was changed"), "{}", pin.log());
        group.proxy.clear_faults();
        group.proxy.set_latency(std::time::Duration::ZERO);
        assert_eq!(group.held("val"), None);
        // A node that does not answer learns of it later; a registry that is gone is an error.
        node.process.signal(Signal::STOP);
        let out = group.try_to(&["limit", "s3://data/val", "--ttl", "1d"]);
        node.process.signal(Signal::CONT);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("node one does not answer"), "{out:?}");
        eventually("the rule on the node", || {
            group.held("val").is_some() && node.process.log().contains("folder rules: 1")
        });
        group.coordinator.kill();
        refused(&group.try_to(&["rules"]), 3, &["group default", "start the registry"]);
        end(node);
    }
}
