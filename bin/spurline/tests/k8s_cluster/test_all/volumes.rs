//! The CSI driver with mount pods: their life, replacement and errors, what people see of it, and which rights it needs.

use crate::agent::{NAMESPACE, NodeAgent, PodPolicy};
use crate::relay::{RelayMode, ServerRelay};
use crate::server::ClusterRig;
use rustix::process::Signal;
use serde_json::{Value, json};
use spurline_csi::pb;
use spurline_rig::driver::{DriverRig, capability, pair};
use spurline_rig::program::{fuse, mounted_below, spurline, wait_for};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tonic::{Code, Status};

/// The account of the driver in the rendered manifests.
const ACCOUNT: &str = "spurline-csi";

/// A node with the driver, installed by the rendered manifests.
pub struct NodeRig {
    cluster: Arc<ClusterRig>,
    /// Before the agent: the driver ends first.
    pub driver: DriverRig,
    agent: NodeAgent,
}

/// Applies everything that is rendered from the defaults.
pub fn install(cluster: &ClusterRig) {
    let out = spurline().args(["k8s", "render"]).output().unwrap();
    let manifests = String::from_utf8(out.stdout).unwrap();
    cluster.namespace(&json!({ "metadata": { "name": NAMESPACE } }));
    let applied = cluster.kubectl(&["apply", "-f", "-"], &manifests);
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
}

impl NodeRig {
    /// A node whose driver has this account; `None` with a SKIP where there is no server or no FUSE.
    fn with_account(node: &str, account: &str) -> Option<Self> {
        Self::with_account_through(node, account, |_| None)
    }

    /// The same with a driver that reaches the server at another port, if `relay` makes one.
    fn with_account_through(node: &str, account: &str, relay: impl FnOnce(&ClusterRig) -> Option<u16>) -> Option<Self> {
        if !fuse() {
            return None;
        }
        let cluster = ClusterRig::shared()?;
        install(&cluster);
        let driver = DriverRig::with(node, |dir| {
            let mut variables = cluster.account_files(&dir.join("account"), NAMESPACE, account);
            variables.extend(relay(&cluster).map(|port| pair(("KUBERNETES_SERVICE_PORT", &port.to_string()))));
            let map = cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/configmaps/spurline-mount-pod")).unwrap();
            let template = dir.join("mount-pod.yaml");
            std::fs::write(&template, map["data"]["mount-pod.yaml"].as_str().unwrap()).unwrap();
            let words = ["--service-account".to_owned(), dir.join("account").display().to_string()];
            let template = ["--pod-template".to_owned(), template.display().to_string()];
            ([&words[..], &template, &["--trust-inline-volumes".to_owned()]].concat(), variables)
        });
        std::fs::create_dir_all(driver.path("logs")).unwrap();
        let agent = NodeAgent::start(&cluster, node, &driver.path("logs"));
        Some(NodeRig { cluster, driver, agent })
    }

    pub fn new(node: &str) -> Option<Self> {
        Self::with_account(node, ACCOUNT)
    }

    /// A pod of a user, which does not run here, and the attributes that the kubelet adds for it.
    pub fn user_pod(&self, name: &str) -> (String, HashMap<String, String>) {
        let spec = json!({
            "metadata": { "name": name },
            "spec": { "nodeName": "elsewhere", "containers": [{ "name": "main", "image": "debian" }] },
        });
        let pod = self.cluster.create("/api/v1/namespaces/default/pods", &spec);
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let words = [("name", name), ("namespace", "default"), ("uid", &uid)];
        let words = words.map(|(key, value)| (format!("csi.storage.k8s.io/pod.{key}"), value.to_owned()));
        let attributes = self.driver.attributes().into_iter().chain(words).collect();
        (uid, attributes)
    }

    fn pod_names(&self) -> Vec<String> {
        self.agent.pods().iter().map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    }

    fn check_empty(&self) {
        self.driver.check_empty();
        assert!(self.pod_names().is_empty(), "{:?}", self.pod_names());
    }

    fn kill_mount(&self) {
        self.driver.kill_mounts();
    }
}

#[test]
fn a_volume_has_one_pod_on_its_node_and_takes_it_along() {
    let Some(rig) = NodeRig::new("node-life") else { return };
    let (uid_a, a) = rig.user_pod("life-a");
    let (uid_b, b) = rig.user_pod("life-b");
    assert_ne!(uid_a, uid_b);
    rig.driver.stage("pv", &rig.driver.attributes()).unwrap();
    rig.driver.publish("pv", "a", &a).unwrap();
    rig.driver.publish("pv", "b", &b).unwrap();
    assert_eq!(rig.driver.read("a").unwrap(), b"hello from the source");
    assert_eq!(rig.driver.read("b").unwrap(), b"hello from the source");
    let pods = rig.agent.pods();
    assert_eq!(pods.len(), 1, "{pods:?}");
    // The stored pod.
    let (meta, spec) = (&pods[0]["metadata"], &pods[0]["spec"]);
    assert_eq!(meta["annotations"]["spurline.io/volume"], "pv");
    assert_eq!(meta["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"], "true");
    assert_eq!((&spec["nodeName"], &spec["restartPolicy"]), (&json!("node-life"), &json!("Never")));
    assert_eq!(
        (&spec["priorityClassName"], &spec["priority"]),
        (&json!("system-node-critical"), &json!(2_000_001_000))
    );
    let container = &spec["containers"][0];
    assert_eq!(container["resources"]["limits"]["memory"], (512 << 20).to_string());
    assert!(!rig.driver.condition("pv", "a").unwrap().abnormal);
    // As docs/kubernetes.md finds it.
    let words = ["-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=spurline-mount", "-o", "wide"];
    let shown = String::from_utf8(rig.cluster.kubectl(&words, "").stdout).unwrap();
    println!("{shown}");
    let line = shown.lines().find(|line| line.contains("node-life")).unwrap_or_default();
    assert!(line.starts_with("spurline-mount-") && line.contains("Running"), "{shown}");
    for pod in ["a", "b"] {
        rig.driver.unpublish("pv", pod).unwrap();
    }
    rig.driver.unstage("pv").unwrap();
    rig.check_empty();
    // An inline volume, whose options have a character that Kubernetes would expand.
    let (_, mut inline) = rig.user_pod("life-inline");
    std::fs::create_dir(rig.driver.path("$$(HOME)")).unwrap();
    std::fs::write(rig.driver.path("$$(HOME)/file"), b"odd").unwrap();
    inline.insert("source".into(), rig.driver.path("$$(HOME)").display().to_string());
    inline.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
    rig.driver.publish("csi-1", "i", &inline).unwrap();
    assert_eq!(rig.driver.read("i").unwrap(), b"odd");
    rig.driver.unpublish("csi-1", "i").unwrap();
    rig.check_empty();
}

#[test]
fn an_ended_pod_is_replaced_and_its_users_get_the_cause() {
    let Some(rig) = NodeRig::new("node-replace") else { return };
    let (uid, attributes) = rig.user_pod("replace-a");
    rig.driver.stage("pv", &rig.driver.attributes()).unwrap();
    rig.driver.publish("pv", "a", &attributes).unwrap();
    let first = rig.pod_names();
    rig.agent.set_out_of_memory(true);
    rig.kill_mount();
    let said = rig.cluster.wait_event("default", &uid, "VolumeMountEnded");
    let source = rig.driver.path("src").display().to_string();
    assert!(
        said.contains(&source) && said.contains("more memory than its limit; raise the volume's attribute"),
        "{said}"
    );
    rig.agent.set_out_of_memory(false);
    let said = rig.cluster.wait_event("default", &uid, "VolumeMountReplaced");
    assert!(said.contains("open files are kept"), "{said}");
    wait_for("the mount", || rig.driver.read("a").is_ok());
    let second = rig.pod_names();
    assert!(second.len() == 1 && second != first, "{second:?}");
    let condition = rig.driver.condition("pv", "a").unwrap();
    assert!(!condition.abnormal && condition.message.contains("attribute memory"), "{condition:?}");
    // An administrator deletes the pod.
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", second[0]);
    assert_eq!(rig.cluster.call("DELETE", &path, &Value::Null).0, 200);
    wait_for("the event", || {
        let path = format!("/api/v1/namespaces/default/events?fieldSelector=involvedObject.uid%3D{uid}");
        let wanted = format!("the pod {} was deleted", second[0]);
        rig.cluster.list(&path).iter().any(|event| event["message"].as_str().unwrap().contains(&wanted))
    });
    wait_for("the mount", || rig.driver.read("a").is_ok());
    rig.driver.unpublish("pv", "a").unwrap();
    rig.driver.unstage("pv").unwrap();
    rig.check_empty();
}

#[test]
fn a_pod_that_can_not_start_is_named_with_the_cause_and_leaves_nothing() {
    let Some(rig) = NodeRig::new("node-errors") else { return };
    let with = |more: &[(&str, &str)]| {
        let more = more.iter().copied().map(pair);
        rig.driver.attributes().into_iter().chain(more).collect::<HashMap<_, _>>()
    };
    let none = rig.driver.path("none").display().to_string();
    let refused = |attributes: &HashMap<_, _>, code: Code, says: &str| {
        let error = rig.driver.stage("pv", attributes).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(says) && !error.message().contains('\n'), "{error}");
        rig.check_empty();
    };
    refused(&with(&[("mountOptions", "cachesize=1G")]), Code::InvalidArgument, "did you mean cache-size?");
    // The kubelet's event about the pod.
    refused(&with(&[("source", &none)]), Code::FailedPrecondition, &format!("{none} is not a directory"));
    // The process's own error.
    refused(&with(&[("registry", "static:127.0.0.1:1")]), Code::FailedPrecondition, "127.0.0.1:1");
    rig.agent.set_policy(PodPolicy::NoImage);
    refused(&with(&[]), Code::FailedPrecondition, "Back-off pulling image");
    // The node does nothing, and the pod that wanted the volume is deleted.
    rig.agent.set_policy(PodPolicy::Unreachable);
    let (_, mut attributes) = rig.user_pod("errors-a");
    attributes.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
    let error = std::thread::scope(|scope| {
        let start = scope.spawn(|| rig.driver.publish("csi-1", "a", &attributes).unwrap_err());
        wait_for("the mount pod", || !rig.pod_names().is_empty());
        rig.driver.unpublish("csi-1", "a").unwrap();
        start.join().unwrap()
    });
    assert_eq!(error.code(), Code::Aborted, "{error}");
    rig.check_empty();
}

/// A pod that the server has made, while its answer was lost, is removed with the volume when the server answers again.
#[test]
fn a_lost_answer_leaves_no_pod_and_readers_see_nothing_of_it() {
    let mut made = None;
    let rig = NodeRig::with_account_through("node-lost", ACCOUNT, |cluster| {
        let relay = ServerRelay::start(cluster.address());
        let port = relay.port;
        made = Some(relay);
        Some(port)
    });
    let (Some(rig), Some(relay)) = (rig, made) else { return };
    let (_, attributes) = rig.user_pod("lost-a");
    rig.driver.stage("pv", &rig.driver.attributes()).unwrap();
    rig.driver.publish("pv", "a", &attributes).unwrap();
    // The request goes over the connection that is open.
    relay.set_mode(RelayMode::AnswersLost);
    let error = std::thread::scope(|scope| {
        let start = scope.spawn(|| rig.driver.stage("pv-lost", &rig.driver.attributes()).unwrap_err());
        wait_for("the pod", || rig.pod_names().len() == 2);
        start.join().unwrap()
    });
    assert!(error.message().contains("does not answer POST") && error.message().contains("10 s"), "{error}");
    // Whether the pod exists is not known, and its record says so.
    let left = || std::fs::read_dir(rig.driver.path("state/v")).unwrap().count();
    assert_eq!(left(), 2);
    // Mounted volumes need no server, but to end their pod.
    assert!(rig.driver.read("a").is_ok());
    rig.driver.unpublish("pv", "a").unwrap();
    let error = rig.driver.unstage("pv").unwrap_err();
    assert!(error.message().contains("does not answer DELETE"), "{error}");
    assert!(!rig.driver.target("a").exists());
    relay.set_mode(RelayMode::Open);
    // As the kubelet does: connections that have lost answers end first.
    wait_for("the end of the volume", || rig.driver.unstage("pv").is_ok());
    wait_for("the end of both pods", || rig.pod_names().is_empty());
    wait_for("the end of both volumes", || left() == 0);
    rig.check_empty();
}

/// The volume of a secret with a wrong key of the group, and one with a right one.
fn stage_with_secret(rig: &DriverRig, secrets: &[(&str, &str)]) -> Result<(), Status> {
    let request = pb::NodeStageVolumeRequest {
        volume_id: "pv-secret".into(),
        staging_target_path: rig.path("staging").display().to_string(),
        volume_capability: Some(capability()),
        volume_context: rig.attributes(),
        secrets: secrets.iter().copied().map(pair).collect(),
        ..Default::default()
    };
    rig.runtime.block_on(rig.client().node_stage_volume(request)).map(drop)
}

#[test]
fn secrets_are_in_no_pod_and_no_request() {
    let Some(rig) = NodeRig::new("node-secret") else { return };
    let keys = [("AWS_ACCESS_KEY_ID", "hush-id"), ("AWS_SECRET_ACCESS_KEY", "hush-hush"), ("group-token", "hush-word")];
    stage_with_secret(&rig.driver, &keys).unwrap();
    let pods = rig.agent.pods();
    let text = serde_json::to_string(&pods).unwrap();
    assert!(text.contains("aws-credentials") && !text.contains("hush"), "{text}");
    rig.driver.unstage("pv-secret").unwrap();
    rig.check_empty();
}

/// Everything that the driver does, by an account with exactly the rendered rights: the server refuses nothing, and every
/// right is used.
#[test]
fn the_rendered_rights_are_exactly_enough() {
    let Some(mut rig) = NodeRig::new("node-rights") else { return };
    let (uid, attributes) = rig.user_pod("rights-a");
    rig.driver.stage("pv", &rig.driver.attributes()).unwrap();
    rig.driver.publish("pv", "a", &attributes).unwrap();
    rig.kill_mount();
    rig.cluster.wait_event("default", &uid, "VolumeMountReplaced");
    let process = rig.driver.processes();
    rig.driver.end_driver(Signal::KILL);
    rig.driver.start();
    // The restarted driver touches no mount.
    assert_eq!(rig.driver.processes(), process);
    assert!(rig.driver.read("a").is_ok());
    // A pod of this node whose volume is gone ends with the next start of the driver.
    rig.driver.end_driver(Signal::KILL);
    for point in [rig.driver.target("a"), mount_of(&rig.driver)] {
        // A replaced mount lies over the dead one.
        while rustix::mount::unmount(&point, rustix::mount::UnmountFlags::DETACH).is_ok() {}
    }
    std::fs::remove_dir_all(rig.driver.path("state/v")).unwrap();
    rig.driver.start();
    wait_for("the end of the pod", || rig.pod_names().is_empty());
    // A directory that is missing is known from the kubelet's event.
    let none = rig.driver.path("none").display().to_string();
    let missing = rig.driver.attributes().into_iter().chain([pair(("source", &none))]).collect();
    rig.driver.stage("pv", &missing).unwrap_err();
    rig.check_empty();

    let done = rig.cluster.requests_of(NAMESPACE, ACCOUNT);
    let mut granted = BTreeSet::new();
    let role = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/spurline-csi");
    let cluster_role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/spurline-csi-events".to_owned();
    for (path, namespace) in [(role, NAMESPACE), (cluster_role, "default")] {
        for rule in rig.cluster.get(&path).unwrap()["rules"].as_array().unwrap() {
            let words = |key: &str| rule[key].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
            granted.extend(
                words("resources").flat_map(|r| words("verbs").map(move |verb| format!("{namespace} {verb} {r}"))),
            );
        }
    }
    assert_eq!(done, granted);
}

/// The mount of the one volume of a driver.
fn mount_of(rig: &DriverRig) -> std::path::PathBuf {
    let volume = std::fs::read_dir(rig.path("state/v")).unwrap().next().unwrap().unwrap();
    volume.path().join("mnt")
}

#[test]
fn without_rights_or_without_a_server_the_remedy_is_named() {
    let Some(rig) = NodeRig::with_account("node-denied", "default") else { return };
    let error = rig.driver.stage("pv", &rig.driver.attributes()).unwrap_err();
    let wanted = "apply the ServiceAccount, Role and RoleBinding of 'spurline k8s render'";
    assert!(error.message().contains("forbidden") && error.message().contains(wanted), "{error}");
    rig.check_empty();
    // A token that the server does not know.
    std::fs::write(rig.driver.path("account/token"), "x").unwrap();
    let error = rig.driver.stage("pv", &rig.driver.attributes()).unwrap_err();
    assert!(error.message().contains("status 401") && error.message().contains(wanted), "{error}");
    assert!(!mounted_below(&rig.driver.path("state")));
}
