//! Volumes for pods: the CSI driver on each node, its controller, the template of mount pods, a StorageClass.

use crate::cluster::{add_pull_secrets, field, image_user, token_mount, token_volume, without_privileges};
use crate::context::{FieldSource, ValueCondition};
use crate::yaml::{expression, print, text_of};
use crate::{ManifestObject, args, labels};
use ValueCondition::{Any, Is, Set};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// The driver's name, as in the crate `csi`.
const DRIVER: &str = "csi.spurline.io";
/// Directory of mounts; the same path on the node, in the driver and in mount pods.
const STATE_DIR: &str = "/run/spurline-csi";

/// The network of pods that need interfaces of their own.
const NETWORK: &str = "spurline-rdma";
/// The file of the mount pods' template, which a chart reads whole for its checksum.
const TEMPLATE_FILE: &str = "csi-mount-pod";

/// The objects.
pub(crate) fn objects(source: FieldSource<'_>) -> Vec<ManifestObject> {
    let enabled = Set("csi.enabled");
    let part = |object| ManifestObject::new("csi", &[enabled], object);
    let mut objects = vec![part(driver_object()), part(account(source, "spurline-csi"))];
    objects.push(ManifestObject::new(TEMPLATE_FILE, &[enabled], template(source)));
    objects.extend(node_access(source).into_iter().map(part));
    objects.push(part(node_driver(source)));
    let controller = |object| ManifestObject::new("csi-controller", &[enabled, Set("storageClass.enabled")], object);
    objects.push(controller(account(source, "spurline-csi-controller")));
    objects.extend(controller_access(source).into_iter().map(controller));
    objects.push(controller(controller_driver(source)));
    objects.push(ManifestObject::new("csi-controller", &[enabled, Set("storageClass.enabled")], storage_class(source)));
    objects
}

fn driver_object() -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIDriver",
        "metadata": { "name": DRIVER },
        "spec": {
            "attachRequired": false,
            // Names the pods that events are for.
            "podInfoOnMount": true,
            "fsGroupPolicy": "None",
            "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        },
    })
}

fn account(source: FieldSource<'_>, name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": { "name": name, "namespace": source.namespace() },
    })
}

/// The pod of a volume; the driver adds name, node, arguments, secrets and the volume's directory.
fn mount_pod(source: FieldSource<'_>) -> Value {
    let mut pod = json!({
        "metadata": {
            "labels": labels("mount"),
            // The pod has no controller. Its end is the driver's business, so a node may be removed in spite of it.
            "annotations": { "cluster-autoscaler.kubernetes.io/safe-to-evict": "true" },
        },
        "spec": {
            "automountServiceAccountToken": false,
            "hostNetwork": source.value("csi.hostNetwork"),
            "dnsPolicy": "ClusterFirstWithHostNet",
            "priorityClassName": "system-node-critical",
            "terminationGracePeriodSeconds": 10,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "mount",
                "image": source.value("image"),
                "imagePullPolicy": source.value("imagePullPolicy"),
                "command": ["spurline"],
                "env": [
                    { "name": "SPURLINE_CACHE_DIR", "value": "/cache" },
                    { "name": "SPURLINE_CACHE_SIZE", "value": source.value("csi.cacheSize") },
                    { "name": "SPURLINE_METRICS", "value": "none" },
                ],
                "resources": { "limits": { "memory": source.value("csi.memory") } },
                // Mounting a file system for other pods takes this.
                "securityContext": { "privileged": true, "runAsUser": 0 },
                "volumeMounts": [{ "name": "cache", "mountPath": "/cache" }],
            }],
            "volumes": [{ "name": "cache", "emptyDir": {} }],
        },
    });
    add_pull_secrets(source, &mut pod["spec"]);
    pod
}

fn template(source: FieldSource<'_>) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "spurline-mount-pod", "namespace": source.namespace(), "labels": labels("csi") },
        "data": { "mount-pod.yaml": text_of(mount_pod(source)) },
    })
}

/// Changes with the template, so that drivers are restarted and read it.
fn template_checksum(source: FieldSource<'_>) -> Value {
    if source.chart {
        return expression(&format!(
            "include (print .Template.BasePath \"/{TEMPLATE_FILE}.yaml\") . | sha256sum | quote"
        ));
    }
    json!(format!("{:016x}", xxh3_64(print(&mount_pod(source)).as_bytes())))
}

fn rule(groups: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({ "apiGroups": [groups], "resources": resources, "verbs": verbs })
}

/// A role of one kind and its binding to an account.
fn access(source: FieldSource<'_>, cluster: bool, name: &str, account: &str, rules: Value) -> [Value; 2] {
    let (role, binding) = if cluster { ("ClusterRole", "ClusterRoleBinding") } else { ("Role", "RoleBinding") };
    let mut meta = json!({ "name": name });
    if !cluster {
        meta["namespace"] = source.namespace();
    }
    let api = "rbac.authorization.k8s.io/v1";
    [
        json!({ "apiVersion": api, "kind": role, "metadata": meta, "rules": rules }),
        json!({
            "apiVersion": api,
            "kind": binding,
            "metadata": meta,
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": account, "namespace": source.namespace() }],
        }),
    ]
}

fn node_access(source: FieldSource<'_>) -> Vec<Value> {
    let pods = json!([
        rule("", &["pods"], &["create", "get", "list", "delete"]),
        // Why a pod does not start.
        rule("", &["events"], &["list"]),
    ]);
    let events = json!([rule("", &["events"], &["create"])]);
    let account = "spurline-csi";
    [access(source, false, "spurline-csi", account, pods), access(source, true, "spurline-csi-events", account, events)]
        .concat()
}

fn host_path(name: &str, path: Value, kind: &str) -> Value {
    json!({ "name": name, "hostPath": { "path": path, "type": kind } })
}

fn node_driver(source: FieldSource<'_>) -> Value {
    let socket_dir = source.text(&format!("{{}}/plugins/{DRIVER}"), "csi.kubeletDir");
    let registration =
        source.text(&format!("--kubelet-registration-path={{}}/plugins/{DRIVER}/csi.sock"), "csi.kubeletDir");
    let driver = json!({
        "name": "driver",
        "image": source.value("image"),
        "imagePullPolicy": source.value("imagePullPolicy"),
        "command": ["spurline"],
        "args": args([
            vec![
                json!("k8s"),
                json!("csi-driver"),
                json!("--endpoint=unix:///csi/csi.sock"),
                json!("--node-id=$(NODE_NAME)"),
                json!(format!("--state-dir={STATE_DIR}")),
                json!("--pod-template=/etc/spurline/template/mount-pod.yaml"),
            ],
            source.items_if(Set("csi.trustInlineVolumes"), vec![json!("--trust-inline-volumes")]),
        ]),
        "env": [{ "name": "NODE_NAME", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }],
        "resources": { "requests": { "cpu": "10m", "memory": "32Mi" }, "limits": { "memory": "128Mi" } },
        // Binding mounts for other pods takes this.
        "securityContext": { "privileged": true, "runAsUser": 0 },
        "volumeMounts": [
            { "name": "socket", "mountPath": "/csi" },
            { "name": "template", "mountPath": "/etc/spurline/template", "readOnly": true },
            { "name": "state", "mountPath": STATE_DIR, "mountPropagation": "Bidirectional" },
            { "name": "kubelet", "mountPath": source.value("csi.kubeletDir"), "mountPropagation": "Bidirectional" },
        ],
    });
    let registrar = json!({
        "name": "registrar",
        "image": source.value("csi.registrarImage"),
        "args": ["--csi-address=/csi/csi.sock", registration],
        "resources": { "requests": { "cpu": "5m", "memory": "16Mi" }, "limits": { "memory": "64Mi" } },
        "volumeMounts": [
            { "name": "socket", "mountPath": "/csi" },
            { "name": "registration", "mountPath": "/registration" },
        ],
    });
    let volumes = json!([
        host_path("socket", socket_dir, "DirectoryOrCreate"),
        host_path("registration", source.text("{}/plugins_registry", "csi.kubeletDir"), "Directory"),
        host_path("kubelet", source.value("csi.kubeletDir"), "Directory"),
        host_path("state", json!(STATE_DIR), "DirectoryOrCreate"),
        { "name": "template", "configMap": { "name": "spurline-mount-pod" } },
    ]);
    let mut set = json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": { "name": "spurline-csi", "namespace": source.namespace(), "labels": labels("csi") },
        "spec": {
            "selector": { "matchLabels": labels("csi") },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": "10%" } },
            "template": {
                "metadata": {
                    "labels": labels("csi"), "annotations": { "checksum/mount-pod": template_checksum(source) },
                },
                "spec": {
                    "serviceAccountName": "spurline-csi",
                    "priorityClassName": "system-node-critical",
                    "nodeSelector": source.value("csi.nodeSelector"),
                    "tolerations": [{ "operator": "Exists" }],
                    "containers": [driver, registrar],
                    "volumes": volumes,
                },
            },
        },
    });
    add_pull_secrets(source, &mut set["spec"]["template"]["spec"]);
    set
}

fn controller_access(source: FieldSource<'_>) -> Vec<Value> {
    // What csi-provisioner does for a driver without topology, attachments, snapshots and copies.
    let cluster = json!([
        rule("", &["persistentvolumes"], &["list", "watch", "create", "patch", "delete"]),
        rule("", &["persistentvolumeclaims"], &["list", "watch"]),
        // A repeated event is a patch.
        rule("", &["events"], &["create", "patch"]),
        rule("storage.k8s.io", &["storageclasses"], &["list", "watch"]),
    ]);
    let lease = json!([rule("coordination.k8s.io", &["leases"], &["create", "get", "update"])]);
    let (name, account) = ("spurline-csi-controller", "spurline-csi-controller");
    [access(source, true, name, account, cluster), access(source, false, name, account, lease)].concat()
}

fn controller_driver(source: FieldSource<'_>) -> Value {
    let driver = json!({
        "name": "driver",
        "image": source.value("image"),
        "imagePullPolicy": source.value("imagePullPolicy"),
        "command": ["spurline"],
        "args": [
            "k8s",
            "csi-driver",
            "--endpoint=unix:///csi/csi.sock",
            "--node-id=controller",
            // It mounts nothing here.
            "--launcher=process",
            "--state-dir=/csi/state",
        ],
        "securityContext": without_privileges(),
        "resources": { "requests": { "cpu": "5m", "memory": "32Mi" }, "limits": { "memory": "128Mi" } },
        "volumeMounts": [{ "name": "socket", "mountPath": "/csi" }],
    });
    let provisioner = json!({
        "name": "provisioner",
        "image": source.value("csi.provisionerImage"),
        "args": ["--csi-address=/csi/csi.sock", "--leader-election"],
        "resources": { "requests": { "cpu": "5m", "memory": "32Mi" }, "limits": { "memory": "128Mi" } },
        "volumeMounts": [{ "name": "socket", "mountPath": "/csi" }],
    });
    let mut deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "spurline-csi-controller", "namespace": source.namespace(), "labels": labels("csi-controller"),
        },
        "spec": {
            "replicas": 1,
            "selector": { "matchLabels": labels("csi-controller") },
            "template": {
                "metadata": { "labels": labels("csi-controller") },
                "spec": {
                    "serviceAccountName": "spurline-csi-controller",
                    "priorityClassName": "system-cluster-critical",
                    // Both containers, which share a socket.
                    "securityContext": image_user(),
                    "containers": [driver, provisioner],
                    "volumes": [{ "name": "socket", "emptyDir": {} }],
                },
            },
        },
    });
    add_pull_secrets(source, &mut deployment["spec"]["template"]["spec"]);
    deployment
}

fn storage_class(source: FieldSource<'_>) -> Value {
    let mut parameters = json!({ "source": source.value("storageClass.source") });
    let group = json!({ "registry": source.registry("{}"), "cacheGroup": source.value("cacheGroup") });
    source.keys_if(&mut parameters, Set("nodes.enabled"), &group);
    let secret = json!({
        "csi.storage.k8s.io/node-stage-secret-name": source.either("storageClass.secret", "groupSecret"),
        "csi.storage.k8s.io/node-stage-secret-namespace": source.namespace(),
    });
    let has_secret = Any(&[&[Set("storageClass.secret")], &[Set("groupSecret")]]);
    source.keys_if(&mut parameters, has_secret, &secret);
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": { "name": source.value("storageClass.name") },
        "provisioner": DRIVER,
        "parameters": parameters,
        "mountOptions": source.value("storageClass.mountOptions"),
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    })
}

/// Two pods on two nodes with a volume and an RDMA device each.
pub(crate) fn test_pods(source: FieldSource<'_>) -> Vec<ManifestObject> {
    let enabled = [Set("test.enabled")];
    let claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": "spurline-test", "namespace": source.namespace() },
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": source.value("storageClass.name"),
            "resources": { "requests": { "storage": "1Gi" } },
        },
    });
    let pod = |name: &str| {
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name, "namespace": source.namespace(), "labels": labels("test") },
            "spec": {
                "automountServiceAccountToken": false,
                "affinity": {
                    "podAntiAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [{
                            "labelSelector": { "matchLabels": labels("test") },
                            "topologyKey": "kubernetes.io/hostname",
                        }],
                    },
                },
                "containers": [{
                    "name": "test",
                    "image": source.value("image"),
                    "imagePullPolicy": source.value("imagePullPolicy"),
                    "command": ["spurline"],
                    "args": args([
                        vec![json!("net"), json!("serve"), json!("--bind=all")],
                        source.items_if(
                            Set("groupSecret"),
                            vec![json!("--group-token-file=/etc/spurline/group/group-token")],
                        ),
                    ]),
                    "env": [field("NODE_NAME", "spec.nodeName")],
                    "resources": source.limits_of("test.rdmaResource"),
                    "securityContext": { "runAsUser": 0, "capabilities": { "add": ["IPC_LOCK"] } },
                    "volumeMounts": args([
                        vec![json!({ "name": "data", "mountPath": "/data", "readOnly": true })],
                        source.items_if(Set("groupSecret"), vec![token_mount()]),
                    ]),
                }],
                "volumes": args([
                    vec![json!({
                        "name": "data", "persistentVolumeClaim": { "claimName": "spurline-test", "readOnly": true },
                    })],
                    source.items_if(Set("groupSecret"), vec![token_volume(source)]),
                ]),
            },
        });
        let network = json!({ "annotations": { "k8s.v1.cni.cncf.io/networks": NETWORK } });
        source.keys_if(&mut pod["metadata"], Set("networkAttachment.enabled"), &network);
        add_pull_secrets(source, &mut pod["spec"]);
        pod
    };
    [claim, pod("spurline-test-a"), pod("spurline-test-b")]
        .map(|object| ManifestObject::new("test", &enabled, object))
        .into()
}

/// A network for pods. Its addresses are unique in the cluster: `host-local` would give the same ones on each node.
pub(crate) fn network_attachments(source: FieldSource<'_>) -> Vec<ManifestObject> {
    let plugin = |kind: &str, more: &str| {
        source.network_config(&format!(
            "{{\"cniVersion\": \"0.3.1\", \"type\": \"{kind}\", \"master\": \"MASTER\"{more}, \"ipam\": {{\"type\": \
             \"whereabouts\", \"range\": \"SUBNET\"}}}}"
        ))
    };
    [("macvlan", ", \"mode\": \"bridge\""), ("ipvlan", ", \"mode\": \"l2\""), ("ipoib", "")]
        .map(|(kind, more)| {
            let object = json!({
                "apiVersion": "k8s.cni.cncf.io/v1",
                "kind": "NetworkAttachmentDefinition",
                "metadata": { "name": NETWORK, "namespace": source.namespace() },
                "spec": { "config": plugin(kind, more) },
            });
            let conditions = [Set("networkAttachment.enabled"), Is("networkAttachment.type", kind)];
            ManifestObject::new("network-attachment", &conditions, object)
        })
        .into()
}
