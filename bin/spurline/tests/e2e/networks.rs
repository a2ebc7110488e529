//! Hosts with several networks: which of their addresses they go out from, which they announce, and who answers there.

use crate::common::*;

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
        let mut strict = std::process::Command::new("sh");
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
