//! Rails on top of other interfaces: a VLAN of a card, and a bond that loses its active member.

use spurline_rig::rdma_rig::{Rig, ask, sh};

/// VLANs and bonds have GIDs of their own in the table of the device below them.
#[test]
#[ignore = "runs in the virtual machine"]
fn guest_vlans_and_bonds_are_rails() {
    let rig = Rig::new();
    rig.fill();
    sh("modprobe -a 8021q bonding && \
        ip link add link rail0 name vlan5 type vlan id 5 && ip link set vlan5 up && ip addr add 10.55.0.1/24 dev vlan5 && \
        ip link add bond7 type bond mode active-backup miimon 50 && ip link add one7 type dummy && \
        ip link add two7 type dummy && ip link set one7 master bond7 && ip link set two7 master bond7 && \
        ip link set one7 up && ip link set two7 up && ip link set bond7 mtu 9000 up && \
        ip addr add 10.57.0.1/24 dev bond7 && rdma link add rxe7 type rxe netdev bond7");
    let rails = ["--rdma-network", "vlan5:bond7"];
    let node = rig.node(7080, &rails);
    let mount = rig.mount("links", &[7080], &rails);
    mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    let log = std::fs::read_to_string(&mount.log).unwrap();
    for word in ["rail vlan5 is rxe0 port 1", "10.55.0.1", "rail bond7 is rxe7 port 1", "10.57.0.1"] {
        assert!(log.contains(word), "'{word}' is not in the log:\n{log}");
    }
    let fio = mount.fio();
    mount.wait_bytes("reads over both", 2, false);
    // The bond goes on with its other member, and so do the readers, whatever the device makes of it.
    sh("ip link set \"$(cat /sys/class/net/bond7/bonding/active_slave)\" down");
    mount.wait_bytes("reads after the change", 2, false);
    fio.end();
    mount.pass();
    let paths = ask(&mount.log, "stats")["paths"].as_array().unwrap().clone();
    let of = |name: &str| paths.iter().find(|p| p["path"] == name).and_then(|p| p["recv_bytes"].as_u64()).unwrap();
    assert!(of("vlan5-vlan5") > 0 && of("bond7-bond7") > 0, "{paths:?}");
    let (rdma, tcp) = mount.received();
    assert!(rdma >= rig.data.len() as u64 && tcp * 99 <= rdma, "{rdma} bytes over RDMA, {tcp} over TCP");
    drop(mount);
    drop(node);
    sh("rdma link delete rxe7; ip link delete bond7; ip link delete one7; ip link delete two7; ip link delete vlan5");
}
