//! Claims of a StorageClass, with the real csi-provisioner at a real API server. It has the rendered arguments and the
//! rendered rights. The work of a cluster's volume controller with claims is done here.

use crate::agent::NAMESPACE;
use crate::server::ClusterRig;
use crate::test_all::volumes::install;
use serde_json::{Value, json};
use spurline_rig::driver::DriverRig;
use spurline_rig::program::{fuse, spurline, tempdir, wait_for};
use std::collections::{BTreeSet, HashMap};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// The account of the controller in the rendered manifests.
const ACCOUNT: &str = "spurline-csi-controller";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const CLASSES: &str = "/apis/storage.k8s.io/v1/storageclasses";

/// The programs of the rendered controller; ended when dropped.
struct ControllerRig {
    cluster: Arc<ClusterRig>,
    dir: tempfile::TempDir,
    children: Vec<Child>,
}

impl ControllerRig {
    fn start() -> Option<Self> {
        let cluster = ClusterRig::shared()?;
        let program = spurline_testkit::go_program("csi-provisioner", "kubernetes")?;
        install(&cluster);
        let dir = tempdir();
        let mut rig = ControllerRig { cluster, dir, children: Vec::new() };
        let path = format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{ACCOUNT}");
        let deployment = rig.cluster.get(&path).unwrap();
        let containers = deployment["spec"]["template"]["spec"]["containers"].as_array().unwrap().clone();
        let socket_dir = rig.dir.path().join("csi");
        std::fs::create_dir(&socket_dir).unwrap();
        let words = |container: &Value| -> Vec<String> {
            let words = container["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned());
            words.map(|word| word.replace("/csi/", &format!("{}/", socket_dir.display()))).collect()
        };
        assert_eq!((&containers[0]["name"], &containers[1]["name"]), (&json!("driver"), &json!("provisioner")));
        let mut driver = spurline();
        driver.args(words(&containers[0]));
        rig.run("driver", driver);
        wait_for("the driver's socket", || socket_dir.join("csi.sock").exists());
        let mut provisioner = Command::new(program);
        provisioner.args(words(&containers[1])).arg(format!("--leader-election-namespace={NAMESPACE}"));
        provisioner.arg("--kubeconfig").arg(rig.cluster.kubeconfig(rig.dir.path(), Some((NAMESPACE, ACCOUNT))));
        rig.run("provisioner", provisioner);
        Some(rig)
    }

    fn run(&mut self, name: &str, mut command: Command) {
        let log = std::fs::File::create(self.dir.path().join(format!("{name}.log"))).unwrap();
        let out = log.try_clone().unwrap();
        self.children.push(command.stdin(Stdio::null()).stdout(out).stderr(log).spawn().unwrap());
    }

    /// Makes a class with these parameters and mount options, and a claim of the same name; the claim's uid.
    fn claim(&self, name: &str, parameters: &Value, options: &[&str], more: &Value) -> String {
        let class = json!({
            "metadata": { "name": name },
            "provisioner": "csi.spurline.io",
            "parameters": parameters,
            "mountOptions": options,
        });
        self.cluster.create(CLASSES, &class);
        self.claim_of(name, name, more)
    }

    /// A claim whose class waits for a pod, as the scheduler marks it when it has chosen the pod's node.
    fn claim_of_a_pod(&self, name: &str, parameters: &Value) -> String {
        let class = json!({
            "metadata": { "name": name },
            "provisioner": "csi.spurline.io",
            "parameters": parameters,
            "volumeBindingMode": "WaitForFirstConsumer",
        });
        self.cluster.create(CLASSES, &class);
        let uid = self.claim_of(name, name, &json!({}));
        let chosen = json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": "node-1" } } });
        assert_eq!(self.cluster.call("PATCH", &format!("{CLAIMS}/{name}"), &chosen).0, 200);
        uid
    }

    fn claim_of(&self, name: &str, class: &str, more: &Value) -> String {
        let mut spec = json!({
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        // The volume controller names the driver of the volume.
        let meta =
            json!({ "name": name, "annotations": { "volume.kubernetes.io/storage-provisioner": "csi.spurline.io" } });
        let made = self.cluster.create(CLAIMS, &json!({ "metadata": meta, "spec": spec }));
        made["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Waits for the volume of a claim, and binds both as the volume controller does; the volume.
    fn wait_bound(&self, name: &str, uid: &str) -> Value {
        let mut found = None;
        wait_for(&format!("the volume of {name}"), || {
            let volumes = self.cluster.list(VOLUMES);
            found = volumes.into_iter().find(|volume| volume["spec"]["claimRef"]["uid"] == uid);
            found.is_some()
        });
        let volume = found.unwrap();
        let claim = json!({ "spec": { "volumeName": volume["metadata"]["name"] } });
        assert_eq!(self.cluster.call("PATCH", &format!("{CLAIMS}/{name}"), &claim).0, 200);
        let bound = json!({ "status": { "phase": "Bound" } });
        for path in [format!("{CLAIMS}/{name}/status"), format!("{}/status", path_of(&volume))] {
            let (status, answer) = self.cluster.call("PATCH", &path, &bound);
            assert_eq!(status, 200, "{path}: {answer}");
        }
        volume
    }

    /// Ends a claim, and releases its volume as the volume controller does; waits until the provisioner has removed it.
    fn end(&self, name: &str, volume: &Value) {
        self.end_claim(name);
        let released = json!({ "status": { "phase": "Released" } });
        let path = path_of(volume);
        assert_eq!(self.cluster.call("PATCH", &format!("{path}/status"), &released).0, 200);
        wait_for("the end of the volume", || {
            let left = self.cluster.get(&path);
            // The protection of volumes that are in use, which the volume controller takes away.
            if left.as_ref().is_some_and(|volume| !volume["metadata"]["deletionTimestamp"].is_null()) {
                self.drop_protection(&path, &left.unwrap(), "kubernetes.io/pv-protection");
            }
            self.cluster.get(&path).is_none()
        });
    }

    /// The rights of the account in the rendered roles, as `VERB RESOURCE`.
    fn granted(&self) -> BTreeSet<String> {
        let api = "/apis/rbac.authorization.k8s.io/v1";
        let roles = [format!("clusterroles/{ACCOUNT}"), format!("namespaces/{NAMESPACE}/roles/{ACCOUNT}")];
        let roles = roles.map(|path| self.cluster.get(&format!("{api}/{path}")).unwrap());
        let rules = roles.iter().flat_map(|role| role["rules"].as_array().unwrap());
        let words = |value: &Value| -> Vec<String> {
            value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
        };
        rules
            .flat_map(|rule| {
                let verbs = words(&rule["verbs"]);
                let of = move |resource| verbs.clone().into_iter().map(move |verb| format!("{verb} {resource}"));
                words(&rule["resources"]).into_iter().flat_map(of)
            })
            .collect()
    }

    fn end_claim(&self, name: &str) {
        let path = format!("{CLAIMS}/{name}");
        self.delete(&path);
        if let Some(claim) = self.cluster.get(&path) {
            self.drop_protection(&path, &claim, "kubernetes.io/pvc-protection");
        }
        wait_for("the end of the claim", || self.cluster.get(&path).is_none());
    }

    fn drop_protection(&self, path: &str, object: &Value, which: &str) {
        let finalizers = object["metadata"]["finalizers"].as_array().into_iter().flatten();
        let kept: Vec<&Value> = finalizers.filter(|one| *one != which).collect();
        self.cluster.call("PATCH", path, &json!({ "metadata": { "finalizers": kept } }));
    }

    fn delete(&self, path: &str) {
        let (status, answer) = self.cluster.call("DELETE", path, &Value::Null);
        assert!([200, 202].contains(&status), "{path}: {answer}");
    }
}

impl Drop for ControllerRig {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for name in ["driver", "provisioner"] {
                let text = std::fs::read_to_string(self.dir.path().join(format!("{name}.log"))).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                eprintln!("{name}:\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
            }
        }
    }
}

fn path_of(volume: &Value) -> String {
    format!("{VOLUMES}/{}", volume["metadata"]["name"].as_str().unwrap())
}

fn text_map(value: &Value) -> HashMap<String, String> {
    let map = value.as_object().unwrap().iter();
    map.map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned())).collect()
}

/// What a claim of the rendered class becomes, a pod's mount of a provisioned volume, and its end.
#[test]
#[ignore = "csi-provisioner takes minutes to build: .ci/nightly does"]
fn claims_become_volumes_and_end() {
    let Some(rig) = ControllerRig::start() else { return };
    let uid = rig.claim_of("rendered", "spurline", &json!({}));
    let volume = rig.wait_bound("rendered", &uid);
    let (spec, csi) = (&volume["spec"], &volume["spec"]["csi"]);
    assert_eq!((&csi["driver"], &spec["accessModes"]), (&json!("csi.spurline.io"), &json!(["ReadOnlyMany"])));
    assert!(csi["volumeHandle"].as_str().unwrap().starts_with("spurline-"), "{volume}");
    let mut attributes = text_map(&csi["volumeAttributes"]);
    // Who made the volume.
    assert!(attributes.remove("storage.kubernetes.io/csiProvisionerIdentity").is_some(), "{volume}");
    let registry = "coordinator://spurline-coordinator.spurline.svc:7400";
    let wanted = [("source", "s3://datasets"), ("registry", registry), ("cacheGroup", "default")];
    assert_eq!(attributes, wanted.map(spurline_rig::driver::pair).into());
    assert_eq!(csi["nodeStageSecretRef"], json!({ "name": "spurline-group", "namespace": "spurline" }));
    rig.end("rendered", &volume);

    let uid = rig.claim_of_a_pod("of-a-pod", &json!({ "source": "s3://datasets" }));
    let volume = rig.wait_bound("of-a-pod", &uid);
    // Every node reaches it.
    assert!(volume["spec"]["nodeAffinity"].is_null(), "{volume}");
    rig.end("of-a-pod", &volume);

    // A pod's node mounts what the provisioner wrote. The end of the claim leaves the source as it is.
    if fuse() {
        let driver = DriverRig::new().unwrap();
        let source = driver.path("src").display().to_string();
        let options = ["cache-size=0", "metrics=none"];
        let uid = rig.claim("of-a-directory", &json!({ "source": source }), &options, &json!({}));
        let volume = rig.wait_bound("of-a-directory", &uid);
        assert_eq!(volume["spec"]["mountOptions"], json!(options));
        let mut attributes = text_map(&volume["spec"]["csi"]["volumeAttributes"]);
        // The kubelet passes them beside the attributes.
        attributes.insert("mountOptions".into(), options.join(","));
        let id = volume["spec"]["csi"]["volumeHandle"].as_str().unwrap();
        driver.stage(id, &attributes).unwrap();
        driver.publish(id, "a", &attributes).unwrap();
        assert_eq!(driver.read("a").unwrap(), b"hello from the source");
        driver.unpublish(id, "a").unwrap();
        driver.unstage(id).unwrap();
        driver.check_empty();
        rig.end("of-a-directory", &volume);
        assert!(driver.path("src/file").exists());
    }

    // Its rights are enough, and none is left over but that to repeat an event.
    let events: Vec<Value> = rig.cluster.list("/api/v1/namespaces/default/events");
    assert!(
        !events
            .iter()
            .any(|event| event["reason"] == "ProvisioningFailed" && event["involvedObject"]["name"] == "rendered")
    );
    let done = rig.cluster.requests_of(NAMESPACE, ACCOUNT);
    assert!(!done.iter().any(|one| one.ends_with(" refused")), "{done:?}");
    // Without a resource: the server's version.
    let words = |one: &String| one.split_once(' ').unwrap().1.to_owned();
    let mut used: BTreeSet<String> = done.iter().map(words).filter(|one| !one.ends_with(' ')).collect();
    used.insert("patch events".to_owned());
    assert_eq!(used, rig.granted());
}

#[test]
#[ignore = "csi-provisioner takes minutes to build: .ci/nightly does"]
fn wrong_parameters_are_named_in_the_event_of_the_claim() {
    let Some(rig) = ControllerRig::start() else { return };
    let source = json!({ "source": "s3://datasets" });
    let none = json!({});
    let cases = [
        ("wrong-key", json!({ "sorce": "s3://datasets" }), &[][..], &none, "did you mean source?"),
        ("wrong-scheme", json!({ "source": "s4://datasets" }), &[], &none, "did you mean s3://?"),
        ("wrong-option", source.clone(), &["cachesize=1G"], &none, "did you mean cache-size?"),
        ("wrong-mode", json!({ "source": "/data" }), &["rw"], &none, "write accessModes: [ReadWriteMany]"),
        ("wrong-kind", source, &[], &json!({ "volumeMode": "Block" }), "leave volumeMode: Block out"),
    ];
    for (name, parameters, options, more, says) in &cases {
        let uid = rig.claim(name, parameters, options, more);
        let said = rig.cluster.wait_event("default", &uid, "ProvisioningFailed");
        println!("{name}: {said}");
        assert!(said.contains(says), "{name}: {said}");
        assert_eq!(rig.cluster.get(&format!("{CLAIMS}/{name}")).unwrap()["status"]["phase"], "Pending");
    }
    let volumes = rig.cluster.list(VOLUMES);
    let of = |volume: &Value| volume["spec"]["claimRef"]["name"].as_str().unwrap_or_default().to_owned();
    assert!(!volumes.iter().any(|volume| of(volume).starts_with("wrong-")), "{volumes:?}");
    for (name, ..) in &cases {
        rig.end_claim(name);
        rig.delete(&format!("{CLASSES}/{name}"));
    }
}
