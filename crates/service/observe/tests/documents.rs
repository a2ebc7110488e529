//! Documents of real processes are read into the types and written again without a difference, and those of older and
//! newer processes are read.

use serde_json::{Value, json};
use spurline_observe::documents::{InfoDocument, NodeDescription, ProcessRole, ProcessStatus};
use spurline_types::Stats;
use std::fs;
use std::path::Path;

fn document(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/documents/{name}.json"));
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

/// A status without the keys that `spurline status` adds.
fn status_document(name: &str) -> Value {
    let mut status = document(name);
    let keys = status.as_object_mut().unwrap();
    keys.retain(|key, _| !["target", "reasons"].contains(&key.as_str()));
    if keys["kind"] != "mount" {
        keys.remove("state");
    }
    status
}

#[test]
fn a_status_is_read_and_written_again() {
    let names = [
        "status-coordinator",
        "status-node",
        "status-node-rdma",
        "status-mount-alone",
        "status-mount-of-group",
        "status-mount-writable",
        "status-mount-rdma",
        "status-mount-exported",
    ];
    for name in names {
        let status = status_document(name);
        assert_eq!(ProcessStatus::from_json(&status).unwrap().to_json(), status, "{name}");
    }
}

#[test]
fn counters_are_read_and_written_again() {
    for name in ["stats", "stats-of-group"] {
        let stats = document(name);
        assert_eq!(Stats::from_json(&stats).unwrap().to_json(), stats, "{name}");
    }
}

#[test]
fn the_description_of_a_file_is_read_and_written_again() {
    for name in ["info-alone", "info-of-group", "info-writable", "info-ruled"] {
        let info = document(name);
        assert_eq!(InfoDocument::from_json(&info).unwrap().to_json(), info, "{name}");
    }
}

#[test]
fn a_node_that_starts_has_no_description() {
    assert!(NodeDescription::read(&NodeDescription::write(None)).unwrap().is_none());
    let status = ProcessStatus::from_json(&status_document("status-node")).unwrap();
    let stats = Stats::from_json(&document("stats")).unwrap();
    let written = NodeDescription::write(Some((&status, &stats)));
    let read = NodeDescription::read(&written).unwrap().unwrap();
    assert_eq!((read.status, read.stats.to_json()), (status, stats.to_json()));
}

#[test]
fn unknown_keys_are_ignored_and_missing_ones_have_defaults() {
    let mut newer = status_document("status-mount-of-group");
    let wanted = ProcessStatus::from_json(&newer).unwrap();
    newer["unknown"] = json!({"a": 1});
    newer["peers"][0]["unknown"] = json!([1]);
    newer["group"]["members"][0]["unknown"] = json!("text");
    assert_eq!(ProcessStatus::from_json(&newer).unwrap(), wanted);
    for kind in ["mount", "node", "coordinator", "device-plugin"] {
        let oldest = ProcessStatus::from_json(&json!({ "kind": kind })).unwrap();
        assert_eq!(oldest.role == ProcessRole::Other, kind == "device-plugin", "{kind}");
        assert_eq!((oldest.state(), oldest.pid, oldest.disks().len()), ("up", None, 0), "{kind}");
    }
    let stats = Stats::from_json(&json!({"fuse": {"ops": 7, "unknown": 1}, "unknown": {}})).unwrap();
    assert_eq!((stats.fuse.ops.get(), stats.tcp.recv_bytes.get()), (7, 0));
}
