//! What readers see when links go down, devices are taken away and nodes die: nothing.

use spurline_rig::rdma_rig::{Mount, Rig, Running, ask, link_down, link_up, run, sh};
use std::time::{Duration, Instant};

/// Windows without reads, of which one has to be quiet.
const IDLE_WINDOWS_MAX: usize = 10;

/// Whether mount and node each use less than half of a processor in a window without reads.
fn uses_little_when_idle(mount: &Mount<'_>, node: &Running) -> bool {
    let begun = Instant::now();
    let mount_before = mount.cpu();
    let node_before = node.cpu();
    std::thread::sleep(Duration::from_secs(4));
    let idle = begun.elapsed().as_secs_f64();
    let mount_used = mount.cpu() - mount_before;
    let node_used = node.cpu() - node_before;
    println!("  in {idle:.1} s without reads the mount used {mount_used:.2} s of a processor, the node {node_used:.2}");
    mount_used.max(node_used) * 2.0 < idle
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_rails_carry_the_bytes_and_readers_outlive_links_and_devices() {
    let rig = Rig::new();
    rig.fill();
    let node = rig.node(7000, &["--rdma-network", "rail0:rail1", "--rdma-port", "7777"]);
    let mount = rig.mount("both", &[7000], &["--rdma-network", "rail0:rail1"]);
    mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    mount.pass();
    let (rdma, tcp) = mount.received();
    let all = mount.count("remotecache", "recv_bytes");
    assert!(all >= rig.data.len() as u64 && rdma * 100 >= all * 99, "{rdma} of {all} bytes over RDMA, {tcp} over TCP");
    assert_eq!(mount.carries(), "rdma");
    // Both rails carry data: their own addresses, which lead back to this host.
    let local = ask(&mount.log, "status")["peers"][0]["local"].to_string();
    assert!(local.contains("\"10.77.0.1\"") && local.contains("\"10.77.1.1\""), "{local}");
    let paths = ask(&mount.log, "stats")["paths"].as_array().unwrap().clone();
    let each = |name: &str| paths.iter().find(|p| p["path"] == name).and_then(|p| p["recv_bytes"].as_u64()).unwrap();
    assert!(each("rail0-rail0") > 0 && each("rail1-rail1") > 0, "{paths:?}");

    // The port is the one that was named, on every rail.
    let rails = ask(&rig.log("node-7000"), "status")["rails"].as_array().unwrap().clone();
    let addresses: Vec<&str> = rails.iter().filter_map(|rail| rail["address"].as_str()).collect();
    assert_eq!(addresses, ["10.77.0.1:7777", "10.77.1.1:7777"]);

    // Idle ends do not poll: polling would use most of every window. On a busy host an emulated processor that waits for a real
    // one counts as used, so that one quiet window is enough.
    let quiet = (0..IDLE_WINDOWS_MAX).any(|_| uses_little_when_idle(&mount, &node));
    assert!(quiet, "both ends used a processor in every window without reads");

    let fio = mount.fio();
    mount.wait_bytes("reads over two rails", 2, false);
    let of_rail0 = |name: &str| {
        let stats = ask(&mount.log, "stats");
        let path = stats["paths"].as_array().unwrap().iter().find(|p| p["path"] == "rail0-rail0").unwrap().clone();
        path[name].as_u64().unwrap_or_else(|| panic!("no {name} in {path}"))
    };
    mount.wait("what rail0 usually carries", |_| of_rail0("usual_bytes_per_s") > 0);
    assert_eq!(of_rail0("speed_checks"), 0, "nothing to compare with before a fault");
    link_down("rail0");
    mount.wait_bytes("its share on the other rail", 1, false);
    assert_eq!(mount.received().1, 0, "TCP while a rail was left");
    // Neither the node nor the mount keeps the device from going.
    let deleting = std::thread::spawn(|| sh("rdma link delete rxe1"));
    mount.wait_bytes("TCP, as no rail is left", 0, true);
    mount.wait("the device's end", |_| deleting.is_finished());
    deleting.join().unwrap();
    assert_eq!(mount.carries(), "tcp");
    link_up("rail0", "10.77.0.1");
    sh("rdma link add rxe1 type rxe netdev rail1");
    mount.wait_bytes("failback to both rails", 2, false);
    assert_eq!(mount.carries(), "rdma");
    // Its reads are compared with those before the fault, whatever comes of it on this machine.
    mount.wait("the check of rail0's speed", |_| of_rail0("speed_checks") > 0);
    let (before, after) = (of_rail0("usual_bytes_per_s"), of_rail0("checked_bytes_per_s"));
    println!("rail0 carried {before} bytes a second, and {after} since it is back; slower: {}", of_rail0("slower"));
    assert!(after > 0);
    fio.end();
    mount.pass();
    // The NIC wrote into the answers themselves.
    assert_eq!(mount.count("rdma", "bounced_bytes"), 0, "bytes copied on their way to the reader");
    assert!(mount.count("rdma", "failovers") >= 2 && mount.count("rdma", "failbacks") >= 2);
    let log = std::fs::read_to_string(&mount.log).unwrap();
    for line in ["a path carries data peer=", "a path failed: ", "no path is left", "a path carries data again"] {
        assert!(log.contains(line), "'{line}' is not in the log:\n{log}");
    }
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_readers_outlive_a_node() {
    let rig = Rig::new();
    rig.fill();
    let rails = ["--rdma-network", "rail0:rail1"];
    let ports = [7010, 7011];
    let mut nodes: Vec<_> = ports.iter().map(|port| rig.node(*port, &rails)).collect();
    let mount = rig.mount("nodes", &ports, &rails);
    mount.wait("all paths", |m| m.count("rdma", "paths_up") == 4);
    let fio = mount.fio();
    mount.wait_bytes("reads of two nodes", 4, false);
    // The one that carries the bytes: a file of this length may be all on one of them.
    let carried = |port: &u16| -> u64 {
        let (stats, peer) = (ask(&mount.log, "stats"), format!("127.0.0.1:{port}"));
        let paths = stats["paths"].as_array().unwrap().iter().filter(|p| p["peer"] == *peer);
        paths.filter_map(|p| p["recv_bytes"].as_u64()).sum()
    };
    let dies = (0..2).max_by_key(|at| carried(&ports[*at])).unwrap();
    let (dying, other) = (ports[dies], ports[1 - dies]);
    let before = carried(&other);
    nodes[dies].kill();
    mount.wait("the end of its paths", |m| m.count("rdma", "paths_up") == 2);
    mount.wait("its bytes from the other node", |_| carried(&other) > before + (2 << 20));
    let before = carried(&dying);
    let _again = rig.node(dying, &rails);
    mount.wait_bytes("the node's return", 4, false);
    mount.wait("bytes from it again", |_| carried(&dying) > before + (2 << 20));
    fio.end();
    mount.pass();
    // What went over TCP are questions of where a node's rails are, and what could not wait for them.
    let (rdma, tcp) = mount.received();
    println!("{rdma} bytes over RDMA, {tcp} over TCP");
    assert!(rdma > tcp, "{rdma} bytes over RDMA, {tcp} over TCP");
}

/// With `--transport rdma` a reader waits or fails, and no byte comes over TCP.
#[test]
#[ignore = "runs in the virtual machine"]
fn guest_rdma_that_is_forced_never_uses_tcp() {
    let rig = Rig::new();
    rig.fill();
    // A rail with an IPv6 address alone.
    sh("ip link add rail6 type dummy && ip link set rail6 mtu 9000 up && ip addr add fd77:6::1/64 dev rail6 nodad && \
        rdma link add rxe6 type rxe netdev rail6");
    let _node = rig.node(7020, &["--rdma-network", "rail6"]);
    let mount = rig.mount("forced", &[7020], &["--rdma-network", "rail6", "--transport", "rdma"]);
    mount.wait("the path", |m| m.count("rdma", "paths_up") == 1);
    mount.pass();
    let (rdma, tcp) = mount.received();
    assert!(rdma >= rig.data.len() as u64 && tcp == 0, "{rdma} bytes over RDMA, {tcp} over TCP");
    let log = std::fs::read_to_string(&mount.log).unwrap();
    assert!(log.contains("fd77:6::1"), "the rail's address is not in the log:\n{log}");

    link_down("rail6");
    mount.wait("the path's end", |m| m.count("rdma", "paths_up") == 0);
    std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    let refused = std::fs::read(mount.at.join("file")).expect_err("there is no way but TCP");
    println!("{refused}");
    assert_eq!(mount.received().1, 0, "bytes over TCP");
    let log = std::fs::read_to_string(&mount.log).unwrap();
    assert!(log.contains("--transport rdma rules out TCP"), "{log}");
    link_up("rail6", "fd77:6::1");
    mount.wait("the path's return", |m| m.count("rdma", "paths_up") == 1);
    mount.pass();
    assert_eq!(mount.received().1, 0, "bytes over TCP");
}

/// A rail whose link flaps faster than it settles: readers go on, and every wait ends.
#[test]
#[ignore = "runs in the virtual machine"]
fn guest_a_rail_that_flaps_hangs_nothing() {
    let rig = Rig::new();
    rig.fill();
    // A rail of its own: Soft-RoCE of this kernel does not always recover from a message to a link that is down.
    sh("ip link add rail7 type dummy && ip link set rail7 mtu 9000 up && ip addr add 10.77.7.1/24 dev rail7 && \
        rdma link add rxe7 type rxe netdev rail7");
    let rails = ["--rdma-network", "rail0:rail7"];
    let _node = rig.node(7025, &rails);
    let mount = rig.mount("flap", &[7025], &rails);
    mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    let fio = mount.fio();
    mount.wait_bytes("reads over two rails", 2, false);
    for turn in 0..6 {
        link_down("rail7");
        if turn % 2 == 0 {
            mount.wait("the path's end", |m| m.count("rdma", "paths_up") == 1);
        }
        let before = mount.received().0;
        run("ip", &["link", "set", "rail7", "up"]);
        mount.wait("reads meanwhile", |m| m.received().0 > before + (1 << 20));
    }
    fio.end();
    mount.pass();
    assert_eq!(mount.received().1, 0, "TCP while a rail was left");
    // The link is the cause each time: one failover for each time the path carried data.
    assert!((1..=6).contains(&mount.count("rdma", "failovers")));
    drop(mount);
    sh("rdma link delete rxe7; ip link delete rail7");
}
