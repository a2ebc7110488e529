//! `k8s discover`, `lint`, `explain` and `advise` on the files of made-up nodes.

use crate::rig::run;
use serde_json::Value;
use spurline_testkit::hosts;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_configuration_is_proposed_and_lints_clean() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    hosts::gb200().write_to(&one);
    hosts::roce_jumbo().write_to(&two);
    let from = ["--from", text(&one), "--from", text(&two)];
    let (code, config, reasons) = run(&[&["k8s", "discover"], &from[..]].concat());
    assert_eq!(code, 0, "{reasons}");
    assert!(reasons.contains("rdma/ib: InfiniBand rails") && reasons.contains("gb200-01: mlx5_0, mlx5_1"), "{reasons}");
    let parsed: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(parsed["configList"].as_array().unwrap().len(), 3, "{config}");
    let file = dir.path().join("config.json");
    std::fs::write(&file, &config).unwrap();
    let (code, out, _) = run(&[&["k8s", "lint", "--config", text(&file)], &from[..]].concat());
    assert!(code == 0 && out.contains("K8S-MATCH"), "{code} {out}");
    let (code, out, _) = run(&[&["k8s", "discover", "--json", "--slots", "5"], &from[..]].concat());
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["config"]["configList"][0]["rdmaHcaMax"]), (0, &Value::from(20)));
    assert_eq!(report["nodes"], serde_json::json!(["gb200-01", "roce-01"]));
}

#[test]
fn a_folder_is_a_node_only_with_facts_and_a_node_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let node = dir.path().join("one");
    hosts::gb200().write_to(&node);
    let (code, _, err) = run(&["k8s", "discover", "--from", text(dir.path())]);
    let remedy = format!("--from {}", text(&node));
    assert!(code == 3 && err.contains("holds no facts of a node") && err.contains(&remedy), "{code} {err}");
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let (code, _, err) = run(&["k8s", "advise", "--from", text(&empty)]);
    assert!(code == 3 && err.contains("spurline net collect"), "{code} {err}");
    let (code, out, _) = run(&["k8s", "discover", "--json", "--from", text(&node), "--from", text(&node)]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["nodes"]), (0, &serde_json::json!(["gb200-01"])));
    assert_eq!(report["groups"][0]["hcas"]["gb200-01"].as_array().unwrap().len(), 4, "{out}");
}

#[test]
fn lint_reports_in_the_projects_form_and_by_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    hosts::gb200().write_to(dir.path());
    let config = dir.path().join("config.json");
    std::fs::write(&config, "{\"configList\": [{\"resourceName\": \"x\", \"devices\": [\"ib7\"], \"rdmaHCAmax\": 3}]}")
        .unwrap();
    let (code, out, _) = run(&["k8s", "lint", "--json", "--config", text(&config), "--from", text(dir.path())]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 1, "{out}");
    let findings = report["findings"].as_array().unwrap();
    assert_eq!((&findings[0]["id"], &findings[0]["severity"]), (&"K8S-NO-MATCH".into(), &"error".into()));
    for finding in findings {
        for field in ["subject", "evidence", "remedy", "doc"] {
            assert!(!finding[field].as_str().unwrap().is_empty(), "{finding}");
        }
    }
    let (code, page, _) = run(&["net", "doctor", "--explain", "k8s-slots"]);
    assert!(code == 0 && page.contains("rdmaHcaMax"), "{page}");
    let (code, _, err) = run(&["k8s", "lint", "--config", "/nowhere/config.json"]);
    assert!(code == 3 && err.contains("/nowhere/config.json"), "{code} {err}");
    let (code, _, err) = run(&["k8s", "lint"]);
    assert!(code == 2 && err.contains("--config"), "{code} {err}");
}

#[test]
fn pods_are_explained_and_networks_advised() {
    let dir = tempfile::tempdir().unwrap();
    hosts::roce_jumbo().write_to(dir.path());
    let pod = dir.path().join("pod.yaml");
    std::fs::write(
        &pod,
        "kind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: c\n    resources: {limits: {rdma/roce: 1}}\n",
    )
    .unwrap();
    let from = ["--from", text(dir.path())];
    let (code, out, _) = run(&[&["k8s", "explain", "-f", text(&pod)], &from[..]].concat());
    assert!(code == 1 && out.contains("all GIDs are zero") && out.contains("IPC_LOCK"), "{code} {out}");
    let (code, out, err) = run(&[&["k8s", "advise"], &from[..]].concat());
    assert!(code == 0 && err.contains("Multus is needed"), "{code} {err}");
    assert!(out.contains("kind: NetworkAttachmentDefinition") && out.contains("\"master\": \"ens1f0np0\""), "{out}");
    // The advised attachment satisfies the pod.
    let manifest = std::fs::read_to_string(&pod).unwrap().replace(
        "metadata: {name: p}",
        "metadata: {name: p, annotations: {k8s.v1.cni.cncf.io/networks: rdma-ens1f0np0}}",
    );
    let both = manifest.replace("resources:", "securityContext: {capabilities: {add: [IPC_LOCK]}}\n    resources:");
    std::fs::write(&pod, format!("{both}---\n{out}")).unwrap();
    let (code, out, _) = run(&[&["k8s", "explain", "-f", text(&pod)], &from[..]].concat());
    assert!(code == 0 && !out.contains("K8S-POD-NETWORK"), "{code} {out}");
    let (code, _, err) = run(&[&["k8s", "advise", "--isolation", "host-network"], &from[..]].concat());
    assert!(code == 0 && err.contains("Multus is not needed"), "{err}");
}
