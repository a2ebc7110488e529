//! Rails on different NUMA nodes of one machine: where their memory is, and which rail a read takes.

use spurline_rig::rdma_rig::{LEN, Rig, ask, count, sh};
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

const O_DIRECT: i32 = 0o40_000;
/// Less than is split over rails.
const READ: usize = 128 << 10;

#[test]
#[ignore = "in_a_virtual_machine_of_two_numa_nodes runs it in the guest"]
fn numa_a_read_takes_the_rail_of_its_buffers_node_while_that_is_idle() {
    let rig = Rig::new();
    rig.fill();
    // The program is large, and its page cache would leave one of the nodes without free memory.
    std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    sh("grep -h -E 'MemFree|FilePages|Shmem:' /sys/devices/system/node/node*/meminfo");
    let rails = ["--rdma-network", "rail0:rail1"];
    let _node = rig.node(7070, &rails);
    let mount = rig.mount("numa", &[7070], &rails);
    mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    let node_log = rig.log("node-7070");
    for log in [&mount.log, &node_log] {
        let text = std::fs::read_to_string(log).unwrap();
        for word in ["rail rail0 is rxe0", ", NUMA node 0)", "rail rail1 is rxe1", ", NUMA node 1)"] {
            assert!(text.contains(word), "'{word}' is not in the log:\n{text}");
        }
        // The kernel's own placement of the pages.
        let said = text.split("pages looked at ").nth(1).expect("the log says where the pages are");
        let said = said.lines().next().unwrap();
        println!("  of {said}");
        assert!(said.contains(", 0 elsewhere"), "{said}");
    }
    let status = ask(&node_log, "status");
    let nodes: Vec<u64> = status["rails"].as_array().unwrap().iter().filter_map(|r| r["numa_node"].as_u64()).collect();
    assert_eq!(nodes, [0, 1]);

    // One reader, so that every rail is idle at each request. Its buffers are on both nodes.
    let near_and_far = || (mount.count("rdma", "near_bytes"), mount.count("rdma", "far_bytes"));
    let before = near_and_far();
    let carried = |name: &str| {
        let stats = ask(&mount.log, "stats");
        let path = stats["paths"].as_array().unwrap().iter().find(|p| p["path"] == name).unwrap().clone();
        path["recv_bytes"].as_u64().unwrap()
    };
    let (paths, direct) = (
        ["rail0-rail0", "rail1-rail1"],
        OpenOptions::new().read(true).custom_flags(O_DIRECT).open(mount.at.join("file")),
    );
    let (start, direct) = (paths.map(carried), direct.unwrap());
    let mut buf = vec![0u8; READ];
    for n in 0..160usize {
        // Neither in order, so that nothing is read ahead, nor twice.
        let at = n * 97 % (LEN / READ) * READ;
        direct.read_exact_at(&mut buf, at as u64).expect("a reader sees no error");
        assert!(buf == rig.data[at..at + READ], "wrong bytes at {at}");
    }
    let (near, far) = (near_and_far().0 - before.0, near_and_far().1 - before.1);
    let shares = [0, 1].map(|rail| carried(paths[rail]) - start[rail]);
    println!("  read near {near} far {far}, by rail {shares:?}");
    // By chance it would be as much as the other. A read that meets another one is none of an idle rail.
    assert!(near >= (LEN / 4) as u64 && far * 4 <= near, "{near} bytes near, {far} far");
    assert_eq!(mount.received().1, 0, "bytes over TCP");

    // Many at once and large: no rail is spared for the sake of nearness.
    mount.pass();
    let fio = mount.fio();
    mount.wait_bytes("reads over two rails", 2, false);
    mount.wait("bytes from afar", |_| near_and_far().1 > before.1 + far);
    fio.end();
    let written = [count(&node_log, "rdma", "near_bytes"), count(&node_log, "rdma", "far_bytes")];
    println!("  the node wrote near {} far {}", written[0], written[1]);
    assert!(written.iter().sum::<u64>() > 0);
}
