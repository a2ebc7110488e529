//! Hosts with several networks: the addresses they connect from, the addresses they announce, and the host that
//! answers there.

use serde_json::Value;
use spurline_rig::world::*;
use std::process::Command;

/// Two hosts on two networks. Neither takes on one network what it would answer over the other.
fn on_two_networks() -> Option<Hosts> {
    let hosts = Hosts::new()?;
    let (a, b) = (&hosts.0, &hosts.1);
    let mut steps = vec![format!("link add spl1 netns {a} type veth peer name spl1 netns {b}")];
    for (host, at) in [(a, "10.213.1.1"), (b, "10.213.1.2")] {
        steps.push(format!("-n {host} addr add {at}/24 dev spl1"));
        steps.push(format!("-n {host} link set spl1 up"));
    }
    for step in steps {
        ip(&step).unwrap_or_else(|why| panic!("{why}"));
    }
    for host in [a, b] {
        let mut strict = Command::new("sh");
        strict.args(["-c", "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter"]);
        let out = finish(&mut Hosts::on(host, &strict));
        assert!(out.status.success(), "{out:?}");
    }
    Some(hosts)
}

#[test]
fn a_node_on_the_second_network_is_reached_from_the_address_in_it() {
    if !can_mount() {
        return;
    }
    let Some(hosts) = on_two_networks() else { return };
    let world = World::new();
    let text = bytes(3, MIB);
    world.file("source/file", &text);
    let source = world.path("source").to_str().unwrap().to_owned();
    let mut node = world.command(&[]);
    node.args(world.node_words(&[&source], 0)).args(["--group-network", "spl1", "--allow-anyone"]);
    let node = world.node_with(&mut Hosts::on(&hosts.0, &node));
    for network in ["spl0:spl1", "0.0.0.0/0"] {
        let words = ["--group-network", network, "--peer-timeout", "20s"];
        let mount = world.consumer_command(&source, &node.address, &words);
        let mount = world.mount_with(&mut Hosts::on(&hosts.1, &mount));
        assert_eq!(mount.read("file"), text, "{network}");
        mount.unmount();
    }
}

/// Two machines with the same address on a bridge for containers, and nodes that announce it first.
#[test]
fn a_node_is_not_taken_for_another_at_an_address_that_both_machines_have() {
    let Some(hosts) = on_two_networks() else { return };
    let world = World::new();
    for host in [&hosts.0, &hosts.1] {
        for step in ["link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"] {
            ip(&format!("-n {host} {step}")).unwrap();
        }
    }
    let anyone = ["--allow-anyone", "--group-network"];
    let mut command = world.command(&["coordinator", "--state-file", "none"]);
    command.args(anyone).arg("10.213.0.1");
    let coordinator = Process::start(&mut Hosts::on(&hosts.0, &command), &world.log_path("coordinator"));
    let line = coordinator.wait_for("coordinating on ");
    let registry = format!("coordinator://{}", line.split("coordinating on ").nth(1).unwrap().trim());
    let source = |name: &str| world.dir(&format!("source-{name}")).to_str().unwrap().to_owned();
    // Each machine has its own directory for sockets; commands for it use that directory.
    let on = |host: &str, name: &str, words: &[&str]| {
        let mut command = world.command(words);
        command.env("SPURLINE_RUNTIME_DIR", world.path(format!("run-{name}")));
        Hosts::on(host, &command)
    };
    let node = |host: &str, name: &str| {
        let source = source(name);
        let words = ["node", "--source", &source, "--cache-size", "0", "--group-port", "7000", "--name", name];
        let networks = [&anyone[..], &["docker0:lo:spl0:spl1", "--registry", &registry]].concat();
        world.node_with(&mut on(host, name, &[&words[..], &networks].concat()))
    };
    let _nodes = [node(&hosts.0, "a"), node(&hosts.1, "b")];
    let ask = |host: &str, name: &str, words: &[&str]| finish(&mut on(host, name, words));
    let listed = |host: &str, name: &str| -> Vec<Value> {
        let out = ask(host, name, &["status", "--json", "--registry", &registry]);
        String::from_utf8_lossy(&out.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    eventually("both nodes in the list", || listed(&hosts.0, "a").len() == 2);
    for (host, name) in [(&hosts.0, "a"), (&hosts.1, "b")] {
        for (line, node) in listed(host, name).iter().zip(["a", "b"]) {
            assert_eq!(
                (&line["name"], &line["sources"][0]),
                (&node.into(), &format!("file://{}", source(node)).into()),
                "on {name}: {line}"
            );
            let told = line["addresses"].to_string();
            assert!(told.contains("172.17.0.1:7000") && !told.contains("127.0.0.1"), "{told}");
        }
    }
    // By any of its addresses on its own machine, and by the name that people have for that.
    for at in ["10.213.1.2:7000", "172.17.0.1:7000", "localhost:7000"] {
        let out = ask(&hosts.1, "b", &["status", "--json", at]);
        assert!(out.status.success(), "{at}: {out:?}");
        assert_eq!(serde_json::from_slice::<Value>(&out.stdout).unwrap()["name"], "b", "{at}");
    }
    let there = ask(&hosts.0, "a", &["stats", "-c", "1", "10.213.1.2:7000"]);
    let said = String::from_utf8_lossy(&there.stderr);
    assert!(!there.status.success() && said.contains("--metrics") && said.contains("--registry"), "{there:?}");
    let drained = ask(&hosts.1, "b", &["node", "drain", "a", "--registry", &registry]);
    assert!(drained.status.success(), "{drained:?}");
    let weight = |line: &Value| line["weight"].as_u64();
    eventually("a without a share, and b with its own", || {
        let lines = listed(&hosts.1, "b");
        lines.len() == 2 && weight(&lines[0]) == Some(0) && weight(&lines[1]) > Some(0)
    });
}
