//! The plugin under the device manager of the real kubelet.

use crate::rig::{KubeletRig, NodeRig, ib_config, texts, wait_for};
use spurline_testkit::hosts;

const PORT: &str = "sys/devices/pci0000:03/0000:03:00.0/infiniband/mlx5_0/ports/1";

/// A node with a plugin and kubelet; `None` where there is no kubelet.
fn started(slots: u32, policy: &str, more: &[&str]) -> Option<(NodeRig, KubeletRig)> {
    let mut node = NodeRig::new(&hosts::gb200(), &ib_config(slots));
    let kubelet = KubeletRig::start(&node, policy)?;
    node.start(more);
    Some((node, kubelet))
}

/// The HCAs of a pod, from the names of its slots.
fn hcas(pod: &serde_json::Value) -> Vec<String> {
    let slots = texts(&pod["slots"]);
    slots.iter().map(|s| s.split(' ').nth(1).unwrap().rsplit_once('-').unwrap().0.to_owned()).collect()
}

#[test]
fn a_pod_gets_its_own_hcas_and_no_more() {
    let Some((node, mut kubelet)) = started(8, "none", &[]) else { return };
    kubelet.wait_capacity("rdma/ib", (8, 8));
    let pod = kubelet.pod("one", "rdma/ib", 1);
    assert_eq!(pod["admitted"], true, "{pod}");
    let own = hcas(&pod);
    assert_eq!(own.len(), 1);
    assert_eq!(pod["envs"]["SPURLINE_HCAS_RDMA_IB"], own[0]);
    let number = ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"].iter().position(|h| *h == own[0]).unwrap();
    assert_eq!(
        texts(&pod["devices"]),
        ["/dev/infiniband/rdma_cm rw".to_owned(), format!("/dev/infiniband/uverbs{number} rw")],
        "no other HCA, no umad, no issm, no mknod"
    );
    // Three more are spread over the other HCAs, and so are four more.
    let mut three = hcas(&kubelet.pod("three", "rdma/ib", 3));
    three.push(own[0].clone());
    three.sort();
    assert_eq!(three, ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"]);
    let mut four = hcas(&kubelet.pod("four", "rdma/ib", 4));
    four.sort();
    assert_eq!(four, three);
    let full = kubelet.pod("full", "rdma/ib", 1);
    assert_eq!(full["admitted"], false, "{full}");
    assert_eq!(node.metric("spurline_k8s_allocations_total{resource=\"rdma/ib\",hca=\"mlx5_0\"}"), Some(2));
    // A removed pod's slots are handed out again.
    kubelet.ask("remove four");
    assert_eq!(kubelet.pod("again", "rdma/ib", 4)["admitted"], true);
}

#[test]
fn device_nodes_for_diagnosis_only_where_they_are_named() {
    let config = ib_config(8).replace("\"rdmaHcaMax\"", "\"extraDevices\": [\"umad\", \"issm\"], \"rdmaHcaMax\"");
    let mut node = NodeRig::new(&hosts::gb200(), &config);
    let Some(mut kubelet) = KubeletRig::start(&node, "none") else { return };
    node.start(&[]);
    kubelet.wait_capacity("rdma/ib", (8, 8));
    let given = |pod: &serde_json::Value| {
        let names = texts(&pod["devices"]).into_iter().map(|one| one.trim_start_matches("/dev/infiniband/").to_owned());
        names.map(|one| one.replace(|c: char| c.is_ascii_digit(), "")).collect::<Vec<_>>()
    };
    assert_eq!(given(&kubelet.pod("one", "rdma/ib", 1)), ["issm rw", "rdma_cm rw", "umad rw", "uverbs rw"]);
    node.configure(&config.replace(", \"issm\"", ""));
    node.wait_log("a new configuration is in force", 1);
    assert_eq!(given(&kubelet.pod("two", "rdma/ib", 1)), ["rdma_cm rw", "umad rw", "uverbs rw"]);
}

#[test]
fn an_unhealthy_hca_takes_its_slots_away_and_brings_them_back() {
    let Some((node, mut kubelet)) = started(8, "none", &[]) else { return };
    kubelet.wait_capacity("rdma/ib", (8, 8));
    node.set(&format!("{PORT}/state"), "1: DOWN");
    kubelet.wait_capacity("rdma/ib", (8, 6));
    assert!(!hcas(&kubelet.pod("down", "rdma/ib", 6)).contains(&"mlx5_0".to_owned()));
    node.wait_log("mlx5_0 is unhealthy: no port is active: DOWN", 1);
    node.set(&format!("{PORT}/state"), "4: ACTIVE");
    kubelet.wait_capacity("rdma/ib", (8, 8));
    node.wait_log("mlx5_0 is healthy again", 1);
    // The driver is unloaded and loaded.
    let verbs = "sys/class/infiniband_verbs/uverbs0/ibdev";
    std::fs::remove_file(node.path("host").join(verbs)).unwrap();
    kubelet.wait_capacity("rdma/ib", (8, 6));
    node.set(verbs, "mlx5_0");
    kubelet.wait_capacity("rdma/ib", (8, 8));
    // An HCA goes and comes back: without it the others share its slots.
    let link = node.path("host/sys/class/infiniband/mlx5_0");
    let target = std::fs::read_link(&link).unwrap();
    std::fs::remove_file(&link).unwrap();
    node.wait_log("mlx5_0 is gone", 1);
    kubelet.wait_capacity("rdma/ib", (8, 8));
    std::os::unix::fs::symlink(target, &link).unwrap();
    node.wait_log("mlx5_0 is advertised", 2);
}

#[test]
fn plugin_and_kubelet_survive_each_others_restarts() {
    let Some((mut node, mut kubelet)) = started(8, "none", &[]) else { return };
    kubelet.wait_capacity("rdma/ib", (8, 8));
    assert_eq!(kubelet.pod("before", "rdma/ib", 2)["admitted"], true);
    // Killed: kubelet sees the end of the stream, and the new plugin replaces the stale socket.
    node.kill();
    kubelet.wait_capacity("rdma/ib", (8, 0));
    node.start(&[]);
    kubelet.wait_capacity("rdma/ib", (8, 8));
    // Kubelet restarts: it removes the sockets and has a new one.
    kubelet.ask("restart");
    node.wait_log("rdma/ib: registered at kubelet", 3);
    kubelet.wait_capacity("rdma/ib", (8, 8));
    // Its checkpoint keeps the pod's slots; six are free.
    assert_eq!(kubelet.pod("after", "rdma/ib", 6)["admitted"], true);
    assert_eq!(kubelet.pod("more", "rdma/ib", 1)["admitted"], false);
    // Kubelet is away for a while.
    kubelet.ask("stop");
    node.wait_log("rdma/ib is not registered", 1);
    kubelet.ask("start");
    kubelet.wait_capacity("rdma/ib", (8, 8));
    assert_eq!(node.stop(), Some(0));
    kubelet.wait_capacity("rdma/ib", (8, 0));
    assert!(node.sockets().is_empty());
}

#[test]
fn numa_policies_align_and_refuse() {
    let Some((_node, mut kubelet)) = started(8, "single-numa-node", &[]) else { return };
    kubelet.wait_capacity("rdma/ib", (8, 8));
    // mlx5_0 and mlx5_1 are on NUMA node 0, mlx5_4 and mlx5_5 on node 1.
    let near = |pod: &serde_json::Value| {
        let mut names = hcas(pod);
        names.sort();
        names.dedup();
        names
    };
    let first = near(&kubelet.pod("a", "rdma/ib", 4));
    assert!(first == ["mlx5_0", "mlx5_1"] || first == ["mlx5_4", "mlx5_5"], "{first:?}");
    let second = near(&kubelet.pod("b", "rdma/ib", 2));
    assert!(second.len() == 2 && second != first, "{second:?}");
    let wide = kubelet.pod("c", "rdma/ib", 3);
    assert_eq!(wide["admitted"], false, "{wide}");
}

#[test]
fn a_node_without_rdma_is_idle_and_a_changed_configuration_is_taken_over() {
    let mut node = NodeRig::new(&hosts::plain(), &ib_config(8));
    let Some(mut kubelet) = KubeletRig::start(&node, "none") else { return };
    node.start(&[]);
    node.wait_log("registered at kubelet, 0 slots", 1);
    assert!(node.log().contains("no HCA of this node matches; 0 slots"), "{}", node.log());
    assert!(matches!(kubelet.capacity("rdma/ib"), None | Some((0, 0))));
    let refused = kubelet.pod("p", "rdma/ib", 1);
    assert_eq!(refused["admitted"], false, "{refused}");
    drop(node);
    let Some((node, mut kubelet)) = started(8, "none", &[]) else { return };
    kubelet.wait_capacity("rdma/ib", (8, 8));
    node.configure(&ib_config(40));
    kubelet.wait_capacity("rdma/ib", (40, 40));
    node.configure(&ib_config(12).replace("\"ib\"", "\"other\""));
    kubelet.wait_capacity("rdma/other", (12, 12));
    kubelet.wait_capacity("rdma/ib", (40, 0));
}

#[test]
fn cdi_names_replace_device_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let cdi = dir.path().join("cdi");
    let Some((_node, mut kubelet)) = started(8, "none", &["--use-cdi", "--cdi-dir", cdi.to_str().unwrap()]) else {
        return;
    };
    kubelet.wait_capacity("rdma/ib", (8, 8));
    let pod = kubelet.pod("p", "rdma/ib", 4);
    assert!(texts(&pod["devices"]).is_empty(), "{pod}");
    assert_eq!(
        texts(&pod["cdi"]),
        ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"].map(|hca| format!("spurline/rdma-ib={hca}"))
    );
    let spec = std::fs::read_to_string(cdi.join("spurline-rdma-ib.json")).unwrap();
    let spec: serde_json::Value = serde_json::from_str(&spec).unwrap();
    assert_eq!(spec["kind"], "spurline/rdma-ib");
    assert_eq!(spec["devices"][1]["name"], "mlx5_1");
    let nodes = &spec["devices"][1]["containerEdits"]["deviceNodes"];
    assert_eq!((&nodes[0]["path"], &nodes[0]["permissions"]), (&"/dev/infiniband/uverbs1".into(), &"rw".into()));
}

#[test]
fn it_needs_no_capability() {
    let mut node = NodeRig::new(&hosts::gb200(), &ib_config(8));
    let Some(mut kubelet) = KubeletRig::start(&node, "none") else { return };
    let plain = node.command(&[]);
    let mut command = std::process::Command::new("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]);
    command.arg(plain.get_program()).args(plain.get_args());
    let Ok(mut child) = command.stderr(std::process::Stdio::null()).spawn() else {
        return spurline_testkit::skip("setpriv", "there is no setpriv here");
    };
    kubelet.wait_capacity("rdma/ib", (8, 8));
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    assert!(status.lines().any(|l| l.starts_with("CapEff:") && l.ends_with("0000000000000000")), "{status}");
    assert_eq!(kubelet.pod("p", "rdma/ib", 1)["admitted"], true);
    let _ = child.kill();
    let _ = child.wait();
    node.kill();
}

#[test]
fn four_hundred_slots_and_the_messages_limit() {
    let mut node = NodeRig::new(&hosts::gb200(), &ib_config(400));
    let Some(mut kubelet) = KubeletRig::start(&node, "none") else { return };
    node.start(&[]);
    kubelet.wait_capacity("rdma/ib", (400, 400));
    for pod in 0..400 {
        let answer = kubelet.pod(&format!("p{pod}"), "rdma/ib", 1);
        assert_eq!(answer["admitted"], true, "{answer}");
    }
    assert_eq!(kubelet.pod("one-more", "rdma/ib", 1)["admitted"], false);
    for hca in ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"] {
        let line = format!("spurline_k8s_allocations_total{{resource=\"rdma/ib\",hca=\"{hca}\"}}");
        assert_eq!(node.metric(&line), Some(100), "evenly spread");
    }
    // As many as fit one message, and kubelet takes them.
    node.configure(&ib_config(1_000_000));
    let page = || node.metric("spurline_k8s_slots{resource=\"rdma/ib\"}").filter(|n| *n > 400);
    let slots = wait_for("the reduced number", page);
    assert!(slots < 1_000_000, "{slots}");
    kubelet.wait_capacity("rdma/ib", (slots, slots));
    assert!(node.log().contains("slots fit a message of kubelet's API"), "{}", node.log());
}
