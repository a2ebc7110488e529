//! The cache itself: namespace, coordinator, cache nodes, and what protects and watches them.

use crate::context::{FieldSource, ValueCondition};
use crate::{ManifestObject, args, devices, labels};
use ValueCondition::{Any, Is, Set, Unset};
use serde_json::{Value, json};

/// Where the group's token is in every container.
pub(crate) const TOKEN_DIR: &str = "/etc/spurline/group";
/// The user and group of the image, as in `scripts/image`.
const USER: u32 = 65532;
/// The metrics page of every process.
const METRICS_PORT: u16 = 9567;
/// Processes of the group that have addresses of hosts.
const HOST_NETWORK: ValueCondition =
    Any(&[&[Set("nodes.enabled"), Set("nodes.hostNetwork")], &[Set("csi.enabled"), Set("csi.hostNetwork")]]);

/// The objects.
pub(crate) fn objects(source: FieldSource<'_>) -> Vec<ManifestObject> {
    let mut objects = vec![namespace(source)];
    objects.extend(coordinator(source));
    objects.extend(nodes(source));
    objects.push(network_policy(source));
    objects.push(pod_monitor(source));
    objects
}

fn namespace(source: FieldSource<'_>) -> ManifestObject {
    let object = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        // Mount pods and the driver mount file systems, which restricted namespaces forbid.
        "metadata": { "name": source.namespace(), "labels": { "pod-security.kubernetes.io/enforce": "privileged" } },
    });
    ManifestObject::new("namespace", &[], object)
}

/// The volume and the mount of the group's secret.
pub(crate) fn token_volume(source: FieldSource<'_>) -> Value {
    json!({ "name": "group", "secret": { "secretName": source.value("groupSecret"), "defaultMode": 256 } })
}

pub(crate) fn token_mount() -> Value {
    json!({ "name": "group", "mountPath": TOKEN_DIR, "readOnly": true })
}

/// Arguments that prove the group, or accept all where there is no secret.
fn token_args(source: FieldSource<'_>) -> Vec<Value> {
    let token = format!("--group-token-file={TOKEN_DIR}/group-token");
    let mut list = source.items_if(Set("groupSecret"), vec![json!(token)]);
    list.extend(source.items_if(Unset("groupSecret"), vec![json!("--allow-anyone")]));
    list
}

pub(crate) fn field(name: &str, path: &str) -> Value {
    json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } })
}

pub(crate) fn health_probe(path: &str, threshold: u32) -> Value {
    json!({
        "httpGet": { "path": path, "port": "metrics" },
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": threshold,
    })
}

/// Gives a pod the secrets of its images' registry.
pub(crate) fn add_pull_secrets(source: FieldSource<'_>, pod: &mut Value) {
    let names = source.items_of("imagePullSecrets", |item| vec![json!({ "name": item.text("{}") })]);
    source.keys_if(pod, Set("imagePullSecrets"), &json!({ "imagePullSecrets": names }));
}

/// The user of the image, for a pod. The group makes volumes and secrets accessible to it.
pub(crate) fn image_user() -> Value {
    json!({ "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER })
}

/// A container of that user that needs nothing of the host.
pub(crate) fn without_privileges() -> Value {
    json!({ "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } })
}

fn coordinator(source: FieldSource<'_>) -> Vec<ManifestObject> {
    let wanted = [Set("coordinator.enabled"), Unset("registry")];
    let meta =
        json!({ "name": "spurline-coordinator", "namespace": source.namespace(), "labels": labels("coordinator") });
    let container = json!({
        "name": "coordinator",
        "image": source.value("image"),
        "imagePullPolicy": source.value("imagePullPolicy"),
        "command": ["spurline"],
        "args": args([
            vec![
                json!("coordinator"),
                json!("--group-network=$(POD_IP)"),
                source.text("--group-port={}", "coordinator.port"),
                json!("--state-file=/var/lib/spurline/coordinator.json"),
                json!(format!("--metrics=0.0.0.0:{METRICS_PORT}")),
            ],
            token_args(source),
        ]),
        "env": [field("POD_IP", "status.podIP")],
        "ports": [
            { "name": "group", "containerPort": source.value("coordinator.port") },
            { "name": "metrics", "containerPort": METRICS_PORT },
        ],
        "readinessProbe": health_probe("/healthz", 3),
        "securityContext": without_privileges(),
        "resources": {
            "requests": { "cpu": "50m", "memory": source.value("coordinator.memory") },
            "limits": { "memory": source.value("coordinator.memory") },
        },
        "volumeMounts": args([
            vec![json!({ "name": "state", "mountPath": "/var/lib/spurline" })],
            source.items_if(Set("groupSecret"), vec![token_mount()]),
        ]),
    });
    let state = json!({
        "metadata": { "name": "state" },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": source.value("coordinator.storage") } },
        },
    });
    let mut set = json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            "serviceName": "spurline-coordinator",
            "replicas": 1,
            "selector": { "matchLabels": labels("coordinator") },
            "template": {
                "metadata": { "labels": labels("coordinator") },
                "spec": {
                    "automountServiceAccountToken": false,
                    "securityContext": image_user(),
                    "containers": [container],
                    "volumes": args([
                        source.items_if(Unset("coordinator.storage"), vec![json!({ "name": "state", "emptyDir": {} })]),
                        source.items_if(Set("groupSecret"), vec![token_volume(source)]),
                    ]),
                },
            },
        },
    });
    source.keys_if(&mut set["spec"], Set("coordinator.storage"), &json!({ "volumeClaimTemplates": [state] }));
    add_pull_secrets(source, &mut set["spec"]["template"]["spec"]);
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "selector": labels("coordinator"),
            "ports": [{ "name": "group", "port": source.value("coordinator.port"), "targetPort": "group" }],
        },
    });
    [set, service].into_iter().map(|object| ManifestObject::new("coordinator", &wanted, object)).collect()
}

fn nodes(source: FieldSource<'_>) -> Vec<ManifestObject> {
    let meta = json!({ "name": "spurline-node", "namespace": source.namespace(), "labels": labels("node") });
    let mut spec = json!({
        "selector": { "matchLabels": labels("node") },
        "template": { "metadata": { "labels": labels("node") }, "spec": node_pod(source) },
    });
    let daemon_set = {
        let mut spec = spec.clone();
        spec["updateStrategy"] = json!({ "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 1 } });
        json!({ "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta, "spec": spec })
    };
    let stateful_set = {
        spec["serviceName"] = json!("spurline-node");
        spec["replicas"] = source.value("nodes.replicas");
        spec["podManagementPolicy"] = json!("Parallel");
        // Two nodes on one host would share its disks and its addresses.
        spec["template"]["spec"]["affinity"] = json!({
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [{
                    "labelSelector": { "matchLabels": labels("node") },
                    "topologyKey": "kubernetes.io/hostname",
                }],
            },
        });
        json!({ "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": spec })
    };
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            "selector": labels("node"),
            "ports": [{ "name": "group", "port": source.value("nodes.port"), "targetPort": "group" }],
        },
    });
    let budget = json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta,
        "spec": { "maxUnavailable": 1, "selector": { "matchLabels": labels("node") } },
    });
    let enabled = Set("nodes.enabled");
    vec![
        ManifestObject::new("nodes", &[enabled, Is("nodes.kind", "DaemonSet")], daemon_set),
        ManifestObject::new("nodes", &[enabled, Is("nodes.kind", "StatefulSet")], stateful_set),
        ManifestObject::new("nodes", &[enabled], service),
        // The budget of a DaemonSet's pods can't be counted, because it has no scale; a drain leaves them out.
        ManifestObject::new("nodes", &[enabled, Is("nodes.kind", "StatefulSet")], budget),
    ]
}

fn node_pod(source: FieldSource<'_>) -> Value {
    let own_devices = [Set("nodes.rdmaNetwork"), Unset("nodes.rdmaResource")];
    let mut container = json!({
        "name": "node",
        "image": source.value("image"),
        "imagePullPolicy": source.value("imagePullPolicy"),
        "command": ["spurline"],
        "args": args([
            vec![json!("node")],
            source.items_of("nodes.sources", |item| vec![item.text("--source={}")]),
            vec![
                source.registry("--registry={}"),
                source.text("--cache-group={}", "cacheGroup"),
                json!("--name=$(NODE_NAME)"),
                json!("--group-network=$(POD_IP)"),
                source.text("--group-port={}", "nodes.port"),
                source.joined("--cache-dir={}", ":", "nodes.cacheDirs"),
                source.text("--cache-size={}", "nodes.cacheSize"),
                source.text("--buffer-size={}", "nodes.bufferSize"),
                json!(format!("--metrics=0.0.0.0:{METRICS_PORT}")),
            ],
            token_args(source),
            source.items_if(Set("nodes.endpointUrl"), vec![source.text("--endpoint-url={}", "nodes.endpointUrl")]),
            source.items_if(Set("nodes.rdmaNetwork"), vec![source.text("--rdma-network={}", "nodes.rdmaNetwork")]),
        ]),
        "env": [field("NODE_NAME", "spec.nodeName"), field("POD_IP", "status.podIP")],
        "ports": [
            { "name": "group", "containerPort": source.value("nodes.port") },
            { "name": "metrics", "containerPort": METRICS_PORT },
        ],
        "readinessProbe": health_probe("/healthz", 3),
        "resources": {
            "requests": { "cpu": "100m", "memory": source.value("nodes.memory") },
            "limits": source.limits("nodes.memory", "nodes.rdmaResource", "nodes.rdmaNetwork"),
        },
        "securityContext": {
            // Device nodes of RDMA that no device plugin gives need privileges, and a privileged container may escalate.
            "privileged": source.truth(&own_devices),
            "allowPrivilegeEscalation": source.truth(&own_devices),
            // Directories of the host belong to root.
            "runAsUser": 0,
            // Registered memory beyond ulimit -l.
            "capabilities": { "add": ["IPC_LOCK"] },
            // Cache disks are read through io_uring, which default profiles refuse.
            "seccompProfile": { "type": "Unconfined" },
        },
        "volumeMounts": args([
            source.items_of("nodes.cacheDirs", |item| {
                vec![json!({ "name": item.numbered("cache-{}"), "mountPath": item.text("{}") })]
            }),
            source.items_if(Set("groupSecret"), vec![token_mount()]),
        ]),
    });
    let keys = json!({ "envFrom": [{ "secretRef": { "name": source.value("nodes.credentialsSecret") } }] });
    source.keys_if(&mut container, Set("nodes.credentialsSecret"), &keys);
    let mut pod = json!({
        "automountServiceAccountToken": false,
        "containers": [container],
        "hostNetwork": source.value("nodes.hostNetwork"),
        // With the host's network, names of services need this.
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": source.value("nodes.nodeSelector"),
        "tolerations": source.value("nodes.tolerations"),
        "terminationGracePeriodSeconds": 60,
        "volumes": args([
            source.items_of("nodes.cacheDirs", |item| {
                let path = json!({ "path": item.text("{}"), "type": "DirectoryOrCreate" });
                vec![json!({ "name": item.numbered("cache-{}"), "hostPath": path })]
            }),
            source.items_if(Set("groupSecret"), vec![token_volume(source)]),
        ]),
    });
    let class = json!({ "priorityClassName": source.value("nodes.priorityClassName") });
    source.keys_if(&mut pod, Set("nodes.priorityClassName"), &class);
    add_pull_secrets(source, &mut pod);
    pod
}

fn network_policy(source: FieldSource<'_>) -> ManifestObject {
    let part = json!({ "app.kubernetes.io/part-of": "spurline" });
    let tcp = |port: Value| json!({ "port": port, "protocol": "TCP" });
    let group_ports = ["coordinator.port", "nodes.port"].map(|path| tcp(source.value(path)));
    let object = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "name": "spurline", "namespace": source.namespace() },
        "spec": {
            "podSelector": { "matchLabels": part },
            "policyTypes": ["Ingress"],
            "ingress": args([
                vec![
                    json!({ "from": [{ "podSelector": { "matchLabels": part } }] }),
                    json!({ "ports": [tcp(json!(METRICS_PORT)), tcp(json!(devices::METRICS_PORT))] }),
                ],
                // No selector matches addresses of hosts. The group's token is the check then.
                source.items_if(HOST_NETWORK, vec![json!({ "ports": group_ports })]),
            ]),
        },
    });
    ManifestObject::new("network-policy", &[Set("networkPolicy.enabled")], object)
}

fn pod_monitor(source: FieldSource<'_>) -> ManifestObject {
    let object = json!({
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {
            "name": "spurline", "namespace": source.namespace(), "labels": source.value("podMonitor.labels"),
        },
        "spec": {
            "selector": { "matchLabels": { "app.kubernetes.io/part-of": "spurline" } },
            "podMetricsEndpoints": [{ "port": "metrics" }],
        },
    });
    ManifestObject::new("pod-monitor", &[Set("podMonitor.enabled")], object)
}
