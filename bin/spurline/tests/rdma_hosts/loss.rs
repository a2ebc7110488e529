//! A node and a mount on two machines, joined by two cables that lose every packet of RDMA, one after the other, under
//! readers; TCP goes on over the same cables.

use spurline_rig::rdma_rig::{Rig, ask, sh};
use std::path::{Path, PathBuf};

/// Known on both machines; each has its own.
pub const DIR: &str = "/vmtmp/rig";
/// Long enough that two emulated machines on a busy one are not taken for a cable that was cut.
const RAILS: [&str; 4] = ["--rdma-network", "rail0:rail1", "--rdma-silence", "12s"];

pub fn shared(name: &str) -> PathBuf {
    PathBuf::from(std::env::var_os("SPURLINE_TEST_VM_SHARE").unwrap()).join(name)
}

#[test]
#[ignore = "in_two_virtual_machines runs it in the second guest"]
fn side_b_serves() {
    let rig = Rig::at(Path::new(DIR));
    rig.fill();
    let _node = rig.node(7000, &[&RAILS[..], &["--group-network", "rail0"]].concat());
    std::fs::write(shared("serving"), "").unwrap();
    // The first guest ends both.
    while !shared("done").exists() {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

const ROCE: &str = "protocol ip u32 match ip protocol 17 0xff match ip dport 4791 0xffff";

/// Gives a rail the queue that [`lose`] needs; to be called before the rail carries anything. While a queue is
/// replaced the kernel reports packets as lost to their sender, and Soft-RoCE sends such a packet again for ever.
pub fn prepare(rail: &str) {
    sh(&format!(
        "tc qdisc add dev {rail} root handle 1: prio bands 3 priomap 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 && \
         tc qdisc add dev {rail} parent 1:3 handle 30: netem limit 100000 loss 0% && \
         tc filter add dev {rail} parent 1: {ROCE} flowid 1:3 && tc qdisc add dev {rail} clsact"
    ));
}

/// No RoCE packet passes this machine's end of the cable, in either direction, and nothing reports that to the sender.
pub fn lose(rail: &str) {
    sh(&format!(
        "tc qdisc change dev {rail} parent 1:3 handle 30: netem limit 100000 loss 100% && \
         tc filter add dev {rail} ingress {ROCE} action drop"
    ));
}

pub fn pass_all(rail: &str) {
    sh(&format!(
        "tc filter del dev {rail} ingress && \
         tc qdisc change dev {rail} parent 1:3 handle 30: netem limit 100000 loss 0%"
    ));
}

#[test]
#[ignore = "in_two_virtual_machines runs it in the first guest"]
fn side_a_reads_while_packets_are_lost() {
    let rig = Rig::at(Path::new(DIR));
    prepare("rail0");
    prepare("rail1");
    spurline_rig::rdma_rig::wait("the node on the other machine", &[], || shared("serving").exists());
    let mount = rig.mount_of("mount", "static:10.77.0.2:7000", &RAILS);
    mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    mount.pass();
    let (rdma, tcp) = mount.received();
    assert!(rdma >= rig.data.len() as u64, "{rdma} bytes over RDMA, {tcp} over TCP");
    let fio = mount.fio();
    mount.wait_bytes("reads over two rails", 2, false);
    lose("rail0");
    mount.wait_bytes("its share on the other rail", 1, false);
    lose("rail1");
    mount.wait_bytes("TCP, as no rail is left", 0, true);
    pass_all("rail0");
    pass_all("rail1");
    mount.wait_bytes("failback to both rails", 2, false);
    assert_eq!(mount.carries(), "rdma");
    fio.end();
    mount.pass();
    assert!(mount.count("rdma", "failovers") >= 2 && mount.count("rdma", "failbacks") >= 2);
    let paths = ask(&mount.log, "stats")["paths"].to_string();
    println!("{paths}");
    std::fs::write(shared("done"), "").unwrap();
}
