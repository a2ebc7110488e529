//! RDMA devices for pods: the device plugin, networks for pods, the pair of test pods.

use crate::cluster::{add_pull_secrets, health_probe};
use crate::context::{FieldSource, ValueCondition};
use crate::yaml::text_of;
use crate::{ManifestObject, args, labels, volumes};
use ValueCondition::{Set, Unset};
use serde_json::{Value, json};

/// The metrics page.
pub(crate) const METRICS_PORT: u16 = 9568;

/// The objects.
pub(crate) fn objects(source: FieldSource<'_>) -> Vec<ManifestObject> {
    let enabled = Set("devicePlugin.enabled");
    let mut objects = vec![
        ManifestObject::new("device-plugin", &[enabled], configuration(source)),
        ManifestObject::new("device-plugin", &[enabled], plugin(source)),
    ];
    objects.extend(volumes::network_attachments(source));
    objects.extend(volumes::test_pods(source));
    objects
}

fn configuration(source: FieldSource<'_>) -> Value {
    let config = source.json_text("devicePlugin.config");
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "spurline-devices", "namespace": source.namespace(), "labels": labels("devices") },
        "data": { "config.json": if source.chart { text_of(config) } else { config } },
    })
}

fn plugin(source: FieldSource<'_>) -> Value {
    let cdi = Set("devicePlugin.useCdi");
    let container = json!({
        "name": "device-plugin",
        "image": source.value("image"),
        "imagePullPolicy": source.value("imagePullPolicy"),
        "command": ["spurline"],
        "args": args([
            vec![
                json!("k8s"),
                json!("device-plugin"),
                json!("--config-file=/config/config.json"),
                json!("--plugin-dir=/var/lib/kubelet/device-plugins"),
                json!("--host-root=/host"),
                json!(format!("--metrics=0.0.0.0:{METRICS_PORT}")),
            ],
            source.items_if(cdi, vec![json!("--use-cdi")]),
            source.items_if(
                Set("devicePlugin.memlock"),
                vec![source.text("--cdi-memlock={}", "devicePlugin.memlock")],
            ),
        ]),
        "ports": [{ "name": "metrics", "containerPort": METRICS_PORT }],
        "readinessProbe": health_probe("/healthz", 3),
        // A wrong configuration and a kubelet that is away are no reasons to restart: this page answers then.
        "livenessProbe": health_probe("/metrics", 6),
        "resources": { "requests": { "cpu": "5m", "memory": "16Mi" }, "limits": { "memory": "64Mi" } },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": { "drop": ["ALL"] },
            "readOnlyRootFilesystem": true,
            // The folder of the kubelet's sockets belongs to root. All capabilities are dropped.
            "runAsUser": 0,
        },
        "volumeMounts": args([
            vec![
                json!({ "name": "plugins", "mountPath": "/var/lib/kubelet/device-plugins" }),
                json!({ "name": "config", "mountPath": "/config", "readOnly": true }),
                json!({ "name": "sys", "mountPath": "/host/sys", "readOnly": true }),
                json!({ "name": "dev", "mountPath": "/host/dev", "readOnly": true }),
            ],
            source.items_if(cdi, vec![json!({ "name": "cdi", "mountPath": "/var/run/cdi" })]),
        ]),
    });
    let host =
        |name: &str, path: Value, kind: &str| json!({ "name": name, "hostPath": { "path": path, "type": kind } });
    let mut spec = json!({
        "automountServiceAccountToken": false,
        "priorityClassName": "system-node-critical",
        "tolerations": [{ "operator": "Exists" }],
        "containers": [container],
        "volumes": args([
            vec![
                host("plugins", source.text("{}/device-plugins", "devicePlugin.kubeletDir"), "Directory"),
                json!({ "name": "config", "configMap": { "name": "spurline-devices" } }),
                host("sys", json!("/sys"), "Directory"),
                host("dev", json!("/dev"), "Directory"),
            ],
            source.items_if(cdi, vec![host("cdi", json!("/var/run/cdi"), "DirectoryOrCreate")]),
        ]),
    });
    let nodes = json!({ "nodeSelector": source.value("devicePlugin.nodeSelector") });
    let label = json!({ "nodeSelector": { "feature.node.kubernetes.io/custom-rdma.available": "true" } });
    source.keys_if(&mut spec, Unset("devicePlugin.nfdLabel"), &nodes);
    source.keys_if(&mut spec, Set("devicePlugin.nfdLabel"), &label);
    add_pull_secrets(source, &mut spec);
    json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": { "name": "spurline-devices", "namespace": source.namespace(), "labels": labels("devices") },
        "spec": {
            "selector": { "matchLabels": labels("devices") },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": "10%" } },
            "template": { "metadata": { "labels": labels("devices") }, "spec": spec },
        },
    })
}
