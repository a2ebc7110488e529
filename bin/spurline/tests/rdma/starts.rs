//! Failed starts: each names the interface, the problem and the remedy, with exit code 3; TCP is not affected.

use spurline_rig::rdma_rig::{BIN, Rig, mount_words, node_words, run, sh};
use std::process::Command;

/// A mount and a node with `words` behind `wrapper`: both end with code 3 and a message with all of `said`.
fn refused(rig: &Rig, wrapper: &[&str], words: &[&str], said: &[&str]) {
    let mut mount: Vec<String> = vec!["mount".into(), rig.dir.join("src").to_str().unwrap().into()];
    mount.push(rig.dir.join("nowhere").to_str().unwrap().into());
    mount.extend(mount_words(&rig.dir, "static:127.0.0.1:7040", words));
    for service in [mount, node_words(&rig.dir, &rig.source, 7049, words)] {
        let mut all: Vec<&str> = wrapper.to_vec();
        all.push(BIN);
        all.extend(service.iter().map(String::as_str));
        let out = Command::new("timeout").args(["400"]).args(&all).output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        println!("{text}");
        assert_eq!(out.status.code(), Some(3), "{all:?}: {text}");
        for word in said {
            assert!(text.contains(word), "'{word}' is not in the answer to {all:?}:\n{text}");
        }
    }
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_starts_that_can_not_be_say_why() {
    let rig = Rig::new();
    rig.fill();
    std::fs::create_dir(rig.dir.join("nowhere")).unwrap();
    // One node for all of them: a mount first gets the block size from it.
    let _node = rig.node(7040, &[]);
    refused(&rig, &[], &["--rdma-network", "rail0:nosuch0"], &["nosuch0", "no interface of that name", "rail0"]);
    sh("ip link add plain0 type dummy && ip link set plain0 up && ip addr add 10.99.0.1/24 dev plain0");
    refused(&rig, &[], &["--rdma-network", "plain0"], &["plain0", "no RDMA device belongs to it", "rail0"]);
    sh(
        "ip link add quiet0 type dummy && ip addr add 10.99.1.1/24 dev quiet0 && rdma link add rxe9 type rxe netdev quiet0",
    );
    refused(&rig, &[], &["--rdma-network", "quiet0"], &["quiet0", "rxe9", "not active", "ip link set quiet0 up"]);
    sh("ip address del 10.99.1.1/24 dev quiet0 && ip link set quiet0 up");
    refused(
        &rig,
        &[],
        &["--rdma-network", "quiet0"],
        &["quiet0", "no address that other machines can reach", "ip address add"],
    );
    sh("rdma link delete rxe9; ip link delete quiet0; ip link delete plain0");
    // Too little memory may be locked: the number needed, and how to raise it wherever the process runs.
    let limited =
        ["prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"];
    let how =
        ["the limit is 64K", "ulimit -l", "limits.conf", "LimitMEMLOCK=infinity", "containerd.service", "IPC_LOCK"];
    refused(&rig, &limited, &["--rdma-network", "rail0"], &how);
    libraries_missing(&rig);
}

/// Without the libraries the binary runs and TCP works; a request for RDMA names the library and its package.
fn libraries_missing(rig: &Rig) {
    // Only the guest's own view of the files changes.
    sh("mkdir /vmtmp/away && mv /usr/lib/*/libibverbs.so* /usr/lib/*/librdmacm.so* /vmtmp/away/ && ls /vmtmp/away");
    refused(rig, &[], &["--rdma-network", "rail0"], &["libibverbs.so.1", "libibverbs1"]);
    let _node = rig.node(7041, &[]);
    let mount = rig.mount("tcp", &[7041], &[]);
    mount.pass();
    let (rdma, tcp) = mount.received();
    assert!(rdma == 0 && tcp >= rig.data.len() as u64, "{rdma} bytes over RDMA, {tcp} over TCP");
    assert_eq!(mount.carries(), "tcp");
    // One of the two is not enough.
    sh("mv /vmtmp/away/libibverbs.so* /usr/lib/x86_64-linux-gnu/");
    refused(rig, &[], &["--rdma-network", "rail0"], &["librdmacm.so.1", "librdmacm1"]);
    sh("mv /vmtmp/away/* /usr/lib/x86_64-linux-gnu/");
    run("ldconfig", &[]);
}
