//! What single values make of the objects.

use serde_json::{Value, json};
use spurline_manifests::{ClusterValues, ManifestForm, render};

/// The objects for some settings.
fn objects(settings: &[&str]) -> Vec<Value> {
    let values = settings.iter().fold(ClusterValues::defaults().unwrap(), |v, s| v.with_setting(s).unwrap());
    let text = render(&values, ManifestForm::Yaml).unwrap().remove(0).text;
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    documents.into_iter().filter(|object| !object.is_null()).collect()
}

/// One object.
fn object(settings: &[&str], kind: &str, name: &str) -> Value {
    let all = objects(settings);
    all.into_iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name).unwrap()
}

#[test]
fn a_node_follows_its_values() {
    let node = |settings: &[&str]| object(settings, "DaemonSet", "spurline-node")["spec"]["template"]["spec"].clone();
    let container = |settings: &[&str]| node(settings)["containers"][0].clone();
    // A privileged container may escalate: the API server refuses anything else.
    let rights = |settings: &[&str]| {
        let context = &container(settings)["securityContext"];
        (context["privileged"].clone(), context["allowPrivilegeEscalation"].clone())
    };
    assert_eq!(rights(&[]), (json!(false), json!(false)));
    assert_eq!(rights(&["nodes.rdmaNetwork=ib0:ib1"]), (json!(true), json!(true)));
    let device = ["nodes.rdmaNetwork=ib0:ib1", "nodes.rdmaResource=rdma/ib"];
    assert_eq!(rights(&device), (json!(false), json!(false)));
    assert_eq!(container(&device)["resources"]["limits"], json!({ "memory": "3Gi", "rdma/ib": 2 }));
    assert_eq!(container(&["nodes.rdmaNetwork=ib0:ib1"])["resources"]["limits"], json!({ "memory": "3Gi" }));
    let tainted = node(&["nodes.tolerations=[{key: gpu, operator: Exists}]", "nodes.priorityClassName=high"]);
    assert_eq!(tainted["tolerations"], json!([{ "key": "gpu", "operator": "Exists" }]));
    assert_eq!(tainted["priorityClassName"], "high");
    let writable = container(&["nodes.writable=true"]);
    assert!(writable["args"].as_array().unwrap().contains(&json!("--writable")));
}

#[test]
fn ports_of_the_group_are_open_where_hosts_use_them() {
    let ports = |settings: &[&str]| {
        let policy = object(settings, "NetworkPolicy", "spurline");
        let open = policy["spec"]["ingress"].as_array().unwrap().iter().filter(|rule| rule["from"].is_null());
        let of_rule = |rule: &Value| rule["ports"].as_array().unwrap().iter().map(|one| one["port"].clone()).collect();
        open.flat_map(|rule| -> Vec<Value> { of_rule(rule) }).collect::<Vec<_>>()
    };
    let all = [9567, 9568, 7400, 7000].map(Value::from).to_vec();
    let metrics = all[..2].to_vec();
    assert_eq!(ports(&[]), all);
    assert_eq!(ports(&["nodes.hostNetwork=false"]), all);
    assert_eq!(ports(&["csi.hostNetwork=false"]), all);
    assert_eq!(ports(&["nodes.hostNetwork=false", "csi.hostNetwork=false"]), metrics);
    assert_eq!(ports(&["nodes.hostNetwork=false", "csi.enabled=false", "storageClass.enabled=false"]), metrics);
    let template = object(&[], "ConfigMap", "spurline-mount-pod")["data"]["mount-pod.yaml"].clone();
    let template: Value = serde_saphyr::from_str(template.as_str().unwrap()).unwrap();
    assert_eq!(template["metadata"]["labels"]["app.kubernetes.io/part-of"], "spurline");
}

#[test]
fn test_pods_use_the_network_whose_addresses_are_unique() {
    let on = ["test.enabled=true", "networkAttachment.enabled=true", "networkAttachment.subnet=10.9.0.0/16"];
    let network = object(&on, "NetworkAttachmentDefinition", "spurline-rdma");
    let config: Value = serde_json::from_str(network["spec"]["config"].as_str().unwrap()).unwrap();
    assert_eq!(config["ipam"], json!({ "type": "whereabouts", "range": "10.9.0.0/16" }));
    let notes = |settings: &[&str]| object(settings, "Pod", "spurline-test-a")["metadata"]["annotations"].clone();
    assert_eq!(notes(&on), json!({ "k8s.v1.cni.cncf.io/networks": "spurline-rdma" }));
    assert_eq!(notes(&on[..1]), Value::Null);
}

#[test]
fn every_pod_has_the_secrets_of_its_registry() {
    let mut pods = 0;
    for object in objects(&["imagePullSecrets=[keys]", "test.enabled=true"]) {
        let template = match object["kind"].as_str().unwrap() {
            "Pod" => object,
            "ConfigMap" if object["metadata"]["name"] == "spurline-mount-pod" => {
                serde_saphyr::from_str(object["data"]["mount-pod.yaml"].as_str().unwrap()).unwrap()
            }
            _ => object["spec"]["template"].clone(),
        };
        if template["spec"]["containers"].is_array() {
            pods += 1;
            assert_eq!(template["spec"]["imagePullSecrets"], json!([{ "name": "keys" }]), "{template}");
        }
    }
    assert_eq!(pods, 8, "coordinator, node, driver, controller, mount, device plugin, two tests");
}

#[test]
fn volumes_have_the_secret_of_their_class() {
    let secret = |settings: &[&str]| {
        let class = object(settings, "StorageClass", "spurline");
        class["parameters"]["csi.storage.k8s.io/node-stage-secret-name"].clone()
    };
    assert_eq!(secret(&[]), "spurline-group");
    assert_eq!(secret(&["storageClass.secret=keys", "nodes.enabled=false"]), "keys");
    assert_eq!(secret(&["storageClass.secret=keys", "groupSecret="]), "keys");
    assert_eq!(secret(&["groupSecret="]), Value::Null);
    assert_eq!(
        object(&["podMonitor.enabled=true", "podMonitor.labels={release: p}"], "PodMonitor", "spurline")["metadata"]["labels"],
        json!({ "release": "p" })
    );
}

/// A wrong configuration of devices, disks that are down and an origin that is away are no reasons to restart.
#[test]
fn services_are_restarted_only_when_they_hang() {
    for (kind, name) in
        [("DaemonSet", "spurline-devices"), ("DaemonSet", "spurline-node"), ("StatefulSet", "spurline-coordinator")]
    {
        let container = object(&[], kind, name)["spec"]["template"]["spec"]["containers"][0].clone();
        assert_eq!(container["readinessProbe"]["httpGet"]["path"], "/healthz", "{name}");
        assert_eq!(container["livenessProbe"]["httpGet"]["path"], "/metrics", "{name}");
    }
}

/// The disk of the system is not filled in the place of a disk that is not mounted.
#[test]
fn cache_directories_have_to_exist() {
    let node = object(&["nodes.cacheDirs=[/nvme0/c, /nvme1/c]"], "DaemonSet", "spurline-node");
    let volumes = node["spec"]["template"]["spec"]["volumes"].as_array().unwrap().clone();
    let dirs: Vec<&Value> = volumes.iter().map(|volume| &volume["hostPath"]).filter(|path| path.is_object()).collect();
    let dir = |path: &str| json!({ "path": path, "type": "Directory" });
    assert_eq!(dirs, [&dir("/nvme0/c"), &dir("/nvme1/c")]);
}

/// Keys that are replaced in the secret are used without a restart; a variable would keep the old ones.
#[test]
fn keys_of_nodes_are_files_of_the_secret() {
    let node = object(&["nodes.credentialsSecret=keys"], "DaemonSet", "spurline-node");
    let spec = &node["spec"]["template"]["spec"];
    let container = &spec["containers"][0];
    let variables = container["env"].as_array().unwrap();
    let value = |name: &str| variables.iter().find(|variable| variable["name"] == name);
    assert_eq!(value("AWS_SHARED_CREDENTIALS_FILE").unwrap()["value"], "/etc/spurline/credentials");
    assert!(value("AWS_SECRET_ACCESS_KEY").is_none() && container["envFrom"].is_null());
    let mounts = container["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["name"] == "credentials").unwrap();
    assert_eq!(mount["mountPath"], "/etc/spurline/credentials");
    let volumes = spec["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|volume| volume["name"] == "credentials").unwrap();
    assert_eq!(volume["secret"]["secretName"], "keys");
}
