//! Everything that `render` makes, in each form, as a server with the schemas of all kinds takes it.

use crate::server::ClusterRig;
use serde_json::json;
use spurline_rig::program::spurline;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names that no other test of the cluster uses.
const NAMES: [&str; 2] = ["namespace=elsewhere", "storageClass.name=elsewhere"];
/// Parts that are off by default are on, and the other way round.
const OTHER_SETTINGS: [&str; 20] = [
    "nodes.priorityClassName=system-node-critical",
    "nodes.hostNetwork=false",
    "csi.hostNetwork=false",
    "storageClass.secret=bucket-keys",
    "podMonitor.labels.release=prometheus",
    "nodes.kind=StatefulSet",
    "nodes.rdmaNetwork=ib0:ib1",
    "nodes.rdmaResource=rdma/ib",
    "nodes.credentialsSecret=keys",
    "nodes.endpointUrl=http://minio:9000",
    "nodes.writable=true",
    "coordinator.storage=1Gi",
    "devicePlugin.nfdLabel=true",
    "devicePlugin.useCdi=true",
    "devicePlugin.memlock=unlimited",
    "test.enabled=true",
    "networkAttachment.enabled=true",
    "podMonitor.enabled=true",
    "networkPolicy.enabled=false",
    "groupSecret=",
];

/// Renders one form to a directory.
fn render(settings: &[&str], form: &str, out: &Path) -> PathBuf {
    let mut command = spurline();
    command.args(["k8s", "render", "--form", form, "--out"]).arg(out);
    command.args(settings.iter().flat_map(|setting| ["--set", setting]));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    out.to_owned()
}

#[test]
fn a_server_takes_all_forms() {
    let Some(cluster) = ClusterRig::shared() else { return };
    let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/crds");
    let applied = cluster.kubectl(&["apply", "-f", crds.to_str().unwrap()], "");
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    let waited = cluster.kubectl(&["wait", "--for=condition=Established", "--timeout=120s", "crd", "--all"], "");
    assert!(waited.status.success(), "{}", String::from_utf8_lossy(&waited.stderr));
    cluster.namespace(&json!({ "metadata": { "name": "elsewhere" } }));
    let dir = tempfile::tempdir().unwrap();
    let mut counts = Vec::new();
    // Nodes with the device nodes of the host.
    let privileged = [&NAMES[..], &["nodes.rdmaNetwork=ib0:ib1"]].concat();
    for (number, settings) in [&NAMES[..], &[&NAMES[..], &OTHER_SETTINGS].concat(), &privileged].into_iter().enumerate()
    {
        let at = |form: &str| dir.path().join(format!("{form}-{number}"));
        let plain = render(settings, "yaml", &at("yaml"));
        let base = render(settings, "kustomize", &at("kustomize"));
        let chart = render(&[], "helm", &at("helm"));
        let mut helm = Command::new(cluster.tool("helm"));
        // A helm from the Go module proxy assumes an old Kubernetes.
        helm.args(["template", "spurline"]).arg(chart).args(["--namespace", "elsewhere", "--kube-version", "1.30.0"]);
        helm.args(settings.iter().flat_map(|setting| ["--set", setting]));
        let made = helm.output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let made = String::from_utf8(made.stdout).unwrap();
        for (words, input) in [
            (["-f", plain.join("spurline.yaml").to_str().unwrap()], ""),
            (["-k", base.to_str().unwrap()], ""),
            (["-f", "-"], made.as_str()),
        ] {
            // Unknown fields are errors, and a warning of the server is one here.
            let words = [&["apply", "--dry-run=server", "--validate=strict"][..], &words].concat();
            let out = cluster.kubectl(&words, input);
            let said = String::from_utf8_lossy(&out.stderr);
            let warnings: Vec<&str> =
                said.lines().filter(|line| !line.contains("last-applied-configuration")).collect();
            assert!(out.status.success() && warnings.is_empty(), "{words:?} of {settings:?}: {said}");
            let taken = String::from_utf8(out.stdout).unwrap();
            assert!(taken.lines().all(|line| line.contains("(server dry run)")), "{taken}");
            counts.push(taken.lines().count());
        }
    }
    // Helm makes the namespace of a release.
    for forms in counts.chunks(3) {
        assert_eq!((forms[0], forms[0]), (forms[1], forms[2] + 1), "{counts:?}");
    }
}
