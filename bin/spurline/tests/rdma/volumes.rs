//! A volume of a pod over RDMA rails: the CSI driver with mount processes of this machine, and nodes beside it.

use spurline_csi::pb::NodeStageVolumeRequest;
use spurline_rig::driver::{DriverRig, capability, pair};
use spurline_rig::rdma_rig::{Rig, ask_socket, token};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The admin socket of a mount process below the driver's directory.
fn find_socket(dir: &Path) -> Option<PathBuf> {
    std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path())).find_map(|path| {
        if path.extension().is_some_and(|end| end == "sock") {
            return Some(path);
        }
        // The mount itself is not looked into.
        if path.ends_with("mnt") { None } else { find_socket(&path) }
    })
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_a_volume_of_a_pod_is_read_over_rdma() {
    let rig = Rig::new();
    rig.fill();
    let _node = rig.node(7140, &["--rdma-network", "rail0:rail1"]);
    let process = ["--launcher", "process"].map(str::to_owned);
    let driver = DriverRig::with("node-1", |_| (process.into(), Vec::new()));
    let source = rig.dir.join("src").display().to_string();
    let options = "rdma-network=rail0:rail1,block-size=1M,peer-timeout=100s,rdma-silence=60s,metrics=none";
    let attributes: HashMap<_, _> =
        [("source", source.as_str()), ("registry", "static:127.0.0.1:7140"), ("mountOptions", options)]
            .map(pair)
            .into();
    let group_token = std::fs::read_to_string(token(&rig.dir)).unwrap();
    let request = NodeStageVolumeRequest {
        volume_id: "pv".into(),
        staging_target_path: driver.path("staging").display().to_string(),
        volume_capability: Some(capability()),
        volume_context: attributes.clone(),
        secrets: [pair(("group-token", group_token.trim()))].into(),
        ..Default::default()
    };
    driver.runtime.block_on(driver.client().node_stage_volume(request)).unwrap();
    driver.publish("pv", "a", &attributes).unwrap();
    assert!(std::fs::read(driver.target("a").join("file")).unwrap() == rig.data, "wrong bytes");
    let stats = ask_socket(&find_socket(&driver.path("state")).expect("a mount process"), "stats");
    let received = |transport: &str| stats[transport]["recv_bytes"].as_u64().unwrap();
    println!("a volume: {} bytes over RDMA, {} over TCP", received("rdma"), received("tcp"));
    assert!(received("rdma") >= rig.data.len() as u64 && received("tcp") == 0, "{stats}");
    driver.unpublish("pv", "a").unwrap();
    driver.unstage("pv").unwrap();
    driver.check_empty();
}
