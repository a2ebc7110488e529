//! Mount processes as pods of this node, made from a template. These pods belong to no controller: the driver starts, finds and
//! deletes each. Does not know volumes, nor when a pod has to be replaced.

use crate::DRIVER_NAME;
use crate::api_server::ApiServer;
use crate::launcher::{LaunchFailure, LaunchPlan, MountLauncher, ProcessState, VolumeEvent};
use crate::process::cause_of_end;
use crate::settings::parse_quantity;
use parking_lot::Mutex;
use reqwest::Method;
use serde_json::{Value, json};
use spurline_config::Fault;
use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// The label of mount pods, with the node as value, hashed because names of nodes may be too long.
const NODE_LABEL: &str = "spurline.io/node";
/// Time for a pod to end by itself.
const GRACE_SECONDS: u64 = 10;
/// Longest wait for a deleted pod to be gone.
const DELETE_LIMIT: Duration = Duration::from_secs(45);
/// Interval of looking at a deleted pod.
const DELETE_POLL: Duration = Duration::from_millis(200);
/// Longest text of an event.
const MOST_TEXT: usize = 1000;
/// Why a container waits, where waiting longer does not help.
const HOPELESS_REASONS: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
];
/// The text of the kubelet's event about a missing directory of the node; the directory follows.
const NO_DIRECTORY: &str = "hostPath type check failed: ";

/// Starts mount pods.
#[derive(Debug)]
pub struct PodLauncher {
    api: ApiServer,
    node: String,
    template: Value,
    /// Pods that this driver made, or may have made, and has not deleted.
    own: Mutex<HashSet<String>>,
}

impl PodLauncher {
    /// Makes pods for `node` from the template, a pod object in YAML; `account` holds the service account's files.
    ///
    /// # Errors
    /// When this process is in no cluster, or the template is no pod.
    pub fn new(node: &str, template: &str, account: &Path) -> Result<Self, Fault> {
        let template: Value = serde_saphyr::from_str(template).map_err(|e| {
            let text = e.to_string();
            let first = text.lines().next().unwrap_or_default();
            Fault::usage(format!("the pod template is not YAML: {first}"), TEMPLATE_REMEDY)
        })?;
        if template["spec"]["containers"].as_array().is_none_or(|containers| containers.is_empty()) {
            return Err(Fault::usage("the pod template has no spec.containers", TEMPLATE_REMEDY));
        }
        Ok(PodLauncher { api: ApiServer::in_cluster(account)?, node: node.to_owned(), template, own: Mutex::default() })
    }

    /// The memory limit of the template in bytes, which is that of volumes that name none.
    pub fn default_memory(&self) -> Option<u64> {
        let limit = &self.template["spec"]["containers"][0]["resources"]["limits"]["memory"];
        parse_quantity(limit.as_str()?)
    }

    fn pods_path(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.api.namespace)
    }

    fn node_word(&self) -> String {
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(self.node.as_bytes()))
    }

    /// The name of a volume's pod: the same volume has a pod on each node.
    fn name_of(&self, plan: &LaunchPlan) -> String {
        let word = format!("{}/{}", self.node, plan.key);
        format!("spurline-mount-{:016x}-{}", xxhash_rust::xxh3::xxh3_64(word.as_bytes()), plan.launch)
    }

    /// The kubelet's last complaint about a pod: the reason of a missing start is in no field of the pod.
    async fn last_warning(&self, pod: &Value) -> Result<Option<String>, Fault> {
        let Some(uid) = pod["metadata"]["uid"].as_str() else { return Ok(None) };
        let selector = format!("fieldSelector=involvedObject.uid%3D{uid}%2Ctype%3DWarning");
        let path = format!("/api/v1/namespaces/{}/events?{selector}", self.api.namespace);
        let answer = self.api.expect(Method::GET, &path, None, &[]).await?;
        let events = answer.object["items"].as_array().into_iter().flatten();
        let last = events.max_by_key(|event| {
            event["lastTimestamp"]
                .as_str()
                .unwrap_or_default()
                .max(event["eventTime"].as_str().unwrap_or_default())
                .to_owned()
        });
        Ok(last.and_then(|event| Some(event["message"].as_str()?.to_owned())))
    }

    /// Makes a pod in the place of another of the same name.
    async fn create(&self, name: &str, pod: &Value) -> Result<(), LaunchFailure> {
        let path = self.pods_path();
        for also in [&[409][..], &[]] {
            let sent = self.api.send(Method::POST, &path, Some(pod)).await;
            let answer = sent
                .map_err(|none| LaunchFailure { may_run: none.was_sent.then(|| name.to_owned()), fault: none.fault })?;
            answer.check(&Method::POST, &path, also)?;
            if answer.status != 409 {
                break;
            }
            // Left from before a reboot of the node, whose records are gone.
            self.delete(name).await?;
        }
        Ok(())
    }

    /// Deletes a pod and waits for the end.
    async fn delete(&self, name: &str) -> Result<(), Fault> {
        let path = format!("{}/{name}", self.pods_path());
        let body = json!({ "gracePeriodSeconds": GRACE_SECONDS });
        let started = Instant::now();
        let answer = self.api.expect(Method::DELETE, &path, Some(&body), &[404]).await?;
        let mut status = answer.status;
        while status != 404 {
            if started.elapsed() > DELETE_LIMIT {
                return Err(Fault::failed(
                    format!("the pod {name} is not gone {} s after it was deleted", DELETE_LIMIT.as_secs()),
                    format!("kubectl -n {} describe pod {name}", self.api.namespace),
                ));
            }
            tokio::time::sleep(DELETE_POLL).await;
            status = self.api.expect(Method::GET, &path, None, &[404]).await?.status;
        }
        Ok(())
    }
}

const TEMPLATE_REMEDY: &str = "use the ConfigMap of 'spurline k8s render'";

/// The pod of a plan.
fn pod_of(template: &Value, plan: &LaunchPlan, name: &str, node: &str, node_word: &str) -> Value {
    let mut pod = template.clone();
    let dir = plan.dir.display().to_string();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!(name);
    pod["metadata"]["labels"]["app.kubernetes.io/name"] = json!("spurline-mount");
    pod["metadata"]["labels"]["app.kubernetes.io/part-of"] = json!("spurline");
    pod["metadata"]["labels"][NODE_LABEL] = json!(node_word);
    pod["metadata"]["annotations"]["spurline.io/volume"] = json!(plan.volume_id);
    let spec = &mut pod["spec"];
    spec["nodeName"] = json!(node);
    // The driver decides about a pod that ended: another pod continues the mount, or mounts again.
    spec["restartPolicy"] = json!("Never");
    append(&mut spec["volumes"], json!({ "name": "volume", "hostPath": { "path": dir, "type": "Directory" } }));
    let container = &mut spec["containers"][0];
    container["args"] = plan.words.iter().map(|word| literal(word)).collect();
    // The error of a mount that fails is what an event shows.
    container["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    container["resources"]["limits"]["memory"] = json!(plan.memory.to_string());
    container["resources"]["requests"]["memory"] = json!(plan.memory.to_string());
    for (name, value) in &plan.environment {
        append(&mut container["env"], json!({ "name": name, "value": literal(value) }));
    }
    append(
        &mut container["volumeMounts"],
        json!({ "name": "volume", "mountPath": dir, "mountPropagation": "Bidirectional" }),
    );
    // A directory of the node as the source.
    if let Some(source) = plan.source_dir.as_ref().map(|path| path.display().to_string()) {
        append(
            &mut container["volumeMounts"],
            json!({
                "name": "source", "mountPath": source, "readOnly": !plan.writable, "mountPropagation": "HostToContainer",
            }),
        );
        append(&mut spec["volumes"], json!({ "name": "source", "hostPath": { "path": source, "type": "Directory" } }));
    }
    pod
}

/// A text of a pod in which Kubernetes expands nothing: there `$(NAME)` is a variable and `$$` a dollar sign.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

/// Why a pod is being deleted, to follow the word; `None` for another pod.
fn deletion_of(pod: &Value) -> Option<String> {
    pod["metadata"]["deletionTimestamp"].as_str()?;
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut disruptions = conditions.filter(|one| one["type"] == "DisruptionTarget" && one["status"] == "True");
    let message = disruptions.next().and_then(|one| one["message"].as_str());
    Some(message.map(|text| format!(": {text}")).unwrap_or_default())
}

/// What a complaint of the kubelet means for a pod that is not started.
fn state_after(warning: String, node: &str) -> ProcessState {
    match warning.split_once(NO_DIRECTORY) {
        Some((_, which)) => {
            ProcessState::Ended(format!("on the node {node}, {which}; name a directory that every node has"))
        }
        None => ProcessState::Pending(warning),
    }
}

/// Appends to an array, which is made when missing.
fn append(array: &mut Value, item: Value) {
    match array {
        Value::Array(items) => items.push(item),
        other => *other = json!([item]),
    }
}

/// The state that a pod object shows.
fn state_of(pod: &Value) -> ProcessState {
    let status = &pod["status"];
    let container = &status["containerStatuses"][0]["state"];
    match status["phase"].as_str() {
        Some("Running") => ProcessState::Running,
        Some("Succeeded") => ProcessState::Ended("it was unmounted by another program".to_owned()),
        Some("Failed") => {
            let ended = &container["terminated"];
            if ended["reason"] == "OOMKilled" {
                let why = "the mount process used more memory than its limit; raise the volume's attribute memory";
                return ProcessState::Ended(why.to_owned());
            }
            let how = match ended["exitCode"].as_i64() {
                Some(code) => format!("exit code {code}"),
                None => [text_of(&status["reason"]), text_of(&status["message"])].join(": "),
            };
            ProcessState::Ended(cause_of_end(text_of(&ended["message"]).as_bytes(), &how))
        }
        _ => {
            let waiting = &container["waiting"];
            let why = match waiting["message"].as_str() {
                Some(message) => format!("{}: {message}", text_of(&waiting["reason"])),
                None => text_of(&waiting["reason"]),
            };
            if HOPELESS_REASONS.iter().any(|reason| waiting["reason"] == *reason) {
                ProcessState::Ended(format!("its pod can't start: {why}"))
            } else {
                ProcessState::Pending(why)
            }
        }
    }
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[tonic::async_trait]
impl MountLauncher for PodLauncher {
    async fn launch(&self, plan: &LaunchPlan) -> Result<String, LaunchFailure> {
        let name = self.name_of(plan);
        self.own.lock().insert(name.clone());
        let pod = pod_of(&self.template, plan, &name, &self.node, &self.node_word());
        let made = self.create(&name, &pod).await;
        if made.as_ref().is_err_and(|failure| failure.may_run.is_none()) {
            self.own.lock().remove(&name);
        }
        made.map(|()| name)
    }

    async fn process_state(&self, process: &str) -> Result<ProcessState, Fault> {
        let path = format!("{}/{process}", self.pods_path());
        let answer = self.api.expect(Method::GET, &path, None, &[404]).await?;
        if answer.status == 404 {
            return Ok(ProcessState::Ended(format!("the pod {process} was deleted")));
        }
        if let Some(why) = deletion_of(&answer.object) {
            return Ok(ProcessState::Ended(format!("the pod {process} was deleted{why}")));
        }
        let state = state_of(&answer.object);
        let ProcessState::Pending(_) = state else { return Ok(state) };
        Ok(match self.last_warning(&answer.object).await? {
            Some(warning) => state_after(warning, &self.node),
            None => state,
        })
    }

    async fn stop(&self, process: &str) -> Result<(), Fault> {
        self.delete(process).await?;
        self.own.lock().remove(process);
        Ok(())
    }

    async fn end_others(&self, known: &[String]) -> Result<(), Fault> {
        let path = format!("{}?labelSelector={NODE_LABEL}%3D{}", self.pods_path(), self.node_word());
        let answer = self.api.expect(Method::GET, &path, None, &[]).await?;
        for pod in answer.object["items"].as_array().into_iter().flatten() {
            if let Some(name) = pod["metadata"]["name"]
                .as_str()
                .filter(|name| !known.iter().any(|one| one == name) && !self.own.lock().contains(*name))
            {
                tracing::info!("the pod {name} belongs to no volume of this node and is deleted");
                self.delete(name).await?;
            }
        }
        Ok(())
    }

    async fn report(&self, event: &VolumeEvent) {
        if event.warning {
            tracing::warn!("{}: {}", event.reason, event.message)
        } else {
            tracing::info!("{}: {}", event.reason, event.message)
        }
        let now = chrono::DateTime::<chrono::Utc>::from(std::time::SystemTime::now());
        let now = now.to_rfc3339_opts(chrono::SecondsFormat::Secs, true);
        for pod in &event.pods {
            let object = json!({
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": { "generateName": format!("{}.", pod.name), "namespace": pod.namespace },
                "involvedObject": {
                    "apiVersion": "v1", "kind": "Pod", "name": pod.name, "namespace": pod.namespace, "uid": pod.uid,
                },
                "type": if event.warning { "Warning" } else { "Normal" },
                "reason": event.reason,
                "message": event.message.chars().take(MOST_TEXT).collect::<String>(),
                "source": { "component": DRIVER_NAME, "host": self.node },
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            });
            let path = format!("/api/v1/namespaces/{}/events", pod.namespace);
            let sent = self.api.send(Method::POST, &path, Some(&object)).await;
            // The volume waits for this: a server that does not answer is not tried again for each pod.
            let is_silent = sent.is_err();
            let done = sent.map_err(Fault::from).and_then(|answer| answer.check(&Method::POST, &path, &[]));
            if let Err(fault) = done {
                tracing::warn!("an event for pod {}/{}: {fault}", pod.namespace, pod.name);
            }
            if is_silent {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> LaunchPlan {
        LaunchPlan {
            key: "00ff".into(),
            volume_id: "pv/1".into(),
            dir: "/run/spurline-csi/v/00ff".into(),
            words: ["mount", "--", "/data", "/m"].map(String::from).into(),
            environment: vec![("AWS_SHARED_CREDENTIALS_FILE".into(), "/s".into())],
            memory: 512 << 20,
            launch: 3,
            source_dir: Some("/data".into()),
            writable: false,
            recovers: true,
        }
    }

    #[test]
    fn a_pod_is_the_template_with_the_plan() {
        let template = json!({
            "metadata": { "labels": { "team": "a" } },
            "spec": { "containers": [{ "image": "i", "env": [{ "name": "A", "value": "b" }] }], "hostNetwork": true },
        });
        let pod = pod_of(&template, &plan(), "p-3", "node-1", "77");
        let spec = &pod["spec"];
        assert_eq!((&pod["metadata"]["labels"]["team"], &spec["hostNetwork"]), (&json!("a"), &json!(true)));
        assert_eq!((&spec["nodeName"], &spec["restartPolicy"]), (&json!("node-1"), &json!("Never")));
        let container = &spec["containers"][0];
        assert_eq!(container["args"], json!(["mount", "--", "/data", "/m"]));
        assert_eq!(container["env"].as_array().unwrap().len(), 2);
        assert_eq!(container["resources"]["limits"]["memory"], "536870912");
        assert_eq!(container["volumeMounts"][0]["mountPropagation"], "Bidirectional");
        assert_eq!(spec["volumes"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn the_state_names_the_cause() {
        let ended = |status: Value| match state_of(&json!({ "status": status })) {
            ProcessState::Ended(why) | ProcessState::Pending(why) => why,
            ProcessState::Running => "running".to_owned(),
        };
        let terminated =
            |value: Value| json!({ "phase": "Failed", "containerStatuses": [{ "state": { "terminated": value } }] });
        let printed = json!({ "exitCode": 3, "message": "error: no bucket b\n  fix: name another\n" });
        assert_eq!(ended(terminated(printed)), "no bucket b; name another");
        assert!(ended(terminated(json!({ "reason": "OOMKilled", "exitCode": 137 }))).contains("attribute memory"));
        assert_eq!(ended(json!({ "phase": "Failed", "reason": "Evicted", "message": "disk" })), "Evicted: disk");
        let waiting = |reason: &str| {
            let state = json!({ "waiting": { "reason": reason, "message": "why" } });
            state_of(&json!({ "status": { "phase": "Pending", "containerStatuses": [{ "state": state }] } }))
        };
        assert_eq!(waiting("ContainerCreating"), ProcessState::Pending("ContainerCreating: why".into()));
        let hopeless = ProcessState::Ended("its pod can't start: ErrImagePull: why".into());
        assert_eq!(waiting("ErrImagePull"), hopeless);
        let mut evicted = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } });
        assert_eq!((deletion_of(&json!({})), deletion_of(&evicted)), (None, Some(String::new())));
        evicted["status"]["conditions"] =
            json!([{ "type": "DisruptionTarget", "status": "True", "message": "drained" }]);
        assert_eq!(deletion_of(&evicted), Some(": drained".into()));
        let missing = state_after(format!("x : {NO_DIRECTORY}/d is not a directory"), "n");
        let wanted = "on the node n, /d is not a directory; name a directory that every node has";
        assert_eq!(missing, ProcessState::Ended(wanted.into()));
        assert_eq!(state_after("slow".into(), "n"), ProcessState::Pending("slow".into()));
        assert_eq!(ended(json!({ "phase": "Running" })), "running");
    }
}
