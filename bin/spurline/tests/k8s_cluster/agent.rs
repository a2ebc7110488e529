//! Stands in for the kubelet of one node: it starts the process that a mount pod of the node describes, reports its state
//! to the API server, and ends it when the pod is deleted. It runs no containers: the process sees this host's files.

use crate::server::ClusterRig;
use parking_lot::Mutex;
use serde_json::{Value, json};
use spurline_rig::program::spurline;
use std::collections::HashMap;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Where the rendered manifests put mount pods.
pub const NAMESPACE: &str = "spurline";
/// Interval of looking at the pods.
const POLL: Duration = Duration::from_millis(50);
/// Longest message of an ended container.
const MOST_LOG: usize = 2048;

/// What a node does with new pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodPolicy {
    /// It runs them.
    Run,
    /// Their image can't be pulled.
    NoImage,
    /// It does nothing, as a node that is cut off.
    Unreachable,
}

/// A node of a cluster; its pods' processes end when it is dropped.
pub struct NodeAgent {
    shared: Arc<AgentState>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct AgentState {
    cluster: Arc<ClusterRig>,
    node: String,
    dir: PathBuf,
    policy: Mutex<PodPolicy>,
    out_of_memory: AtomicBool,
    stop: AtomicBool,
}

impl NodeAgent {
    /// Starts a node; logs of processes are in `dir`.
    pub fn start(cluster: &Arc<ClusterRig>, node: &str, dir: &Path) -> Self {
        let shared = Arc::new(AgentState {
            cluster: Arc::clone(cluster),
            node: node.to_owned(),
            dir: dir.to_owned(),
            policy: Mutex::new(PodPolicy::Run),
            out_of_memory: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let state = Arc::clone(&shared);
        NodeAgent { shared, thread: Some(std::thread::spawn(move || state.run())) }
    }

    /// The policy for new pods from now on.
    pub fn set_policy(&self, policy: PodPolicy) {
        *self.shared.policy.lock() = policy;
    }

    /// Reports processes that end from now on as ended by their memory limit, or not.
    pub fn set_out_of_memory(&self, on: bool) {
        self.shared.out_of_memory.store(on, Ordering::SeqCst);
    }

    /// The pods of the node.
    pub fn pods(&self) -> Vec<Value> {
        self.shared.pods()
    }
}

impl Drop for NodeAgent {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl AgentState {
    fn pods(&self) -> Vec<Value> {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods?fieldSelector=spec.nodeName%3D{}", self.node);
        self.cluster.list(&path)
    }

    fn run(&self) {
        let mut running: HashMap<String, Child> = HashMap::new();
        while !self.stop.load(Ordering::SeqCst) {
            for pod in self.pods() {
                let name = pod["metadata"]["name"].as_str().unwrap();
                if !pod["metadata"]["deletionTimestamp"].is_null() {
                    if let Some(child) = running.remove(name) {
                        end(child);
                    }
                    self.cluster.call("DELETE", &pod_path(name), &json!({ "gracePeriodSeconds": 0 }));
                } else if let Some(child) = running.get_mut(name) {
                    if let Some(status) = child.try_wait().unwrap() {
                        end_group(child.id());
                        running.remove(name);
                        self.report_end(name, status);
                    }
                } else if pod["status"]["phase"] == "Pending"
                    && let Some(child) = self.start_pod(name, &pod)
                {
                    self.set_status(name, "Running", &json!({ "running": {} }));
                    running.insert(name.to_owned(), child);
                }
            }
            std::thread::sleep(POLL);
        }
        running.into_values().for_each(end);
    }

    fn start_pod(&self, name: &str, pod: &Value) -> Option<Child> {
        match *self.policy.lock() {
            PodPolicy::Run => {}
            PodPolicy::Unreachable => return None,
            PodPolicy::NoImage => {
                let why = "Back-off pulling image \"spurline:0.1.0\"";
                self.set_status(
                    name,
                    "Pending",
                    &json!({ "waiting": { "reason": "ImagePullBackOff", "message": why } }),
                );
                return None;
            }
        }
        for volume in pod["spec"]["volumes"].as_array().into_iter().flatten() {
            let path = volume["hostPath"]["path"].as_str().unwrap_or("/");
            if !Path::new(path).is_dir() {
                self.refuse_volume(name, pod, &volume["name"], path);
                return None;
            }
        }
        let container = &pod["spec"]["containers"][0];
        assert_eq!(container["command"], json!(["spurline"]));
        let mut command = spurline();
        let words = container["args"].as_array().unwrap().iter().map(|word| expand(word.as_str().unwrap()));
        command.args(words);
        for variable in container["env"].as_array().into_iter().flatten() {
            command.env(variable["name"].as_str().unwrap(), expand(variable["value"].as_str().unwrap()));
        }
        let log = std::fs::File::create(self.dir.join(name)).unwrap();
        command.process_group(0);
        Some(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    /// The event of the kubelet when a directory of the node is missing. The pod stays pending.
    fn refuse_volume(&self, name: &str, pod: &Value, volume: &Value, path: &str) {
        let uid = &pod["metadata"]["uid"];
        let volume = volume.as_str().unwrap();
        let message = format!(
            "MountVolume.SetUp failed for volume \"{volume}\" : hostPath type check failed: {path} is not a directory"
        );
        let event = json!({
            "metadata": { "name": format!("{name}.mount"), "namespace": NAMESPACE },
            "involvedObject": { "kind": "Pod", "name": name, "namespace": NAMESPACE, "uid": uid },
            "type": "Warning",
            "reason": "FailedMount",
            "message": message,
            "lastTimestamp": "2026-01-01T00:00:00Z",
        });
        self.cluster.call("POST", &format!("/api/v1/namespaces/{NAMESPACE}/events"), &event);
    }

    fn report_end(&self, name: &str, status: std::process::ExitStatus) {
        let log = std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        let reason = match (self.out_of_memory.load(Ordering::SeqCst), code) {
            (true, _) => "OOMKilled",
            (false, 0) => "Completed",
            (false, _) => "Error",
        };
        let tail = &log[log.ceil_char_boundary(log.len().saturating_sub(MOST_LOG))..];
        let ended = json!({ "terminated": { "exitCode": code, "reason": reason, "message": tail } });
        self.set_status(name, if code == 0 { "Succeeded" } else { "Failed" }, &ended);
    }

    fn set_status(&self, name: &str, phase: &str, container: &Value) {
        let one = json!({
            "name": "mount", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": container,
        });
        let status = json!({ "status": { "phase": phase, "containerStatuses": [one] } });
        let (code, answer) = self.cluster.call("PATCH", &format!("{}/status", pod_path(name)), &status);
        // The pod may be gone.
        assert!([200, 404].contains(&code), "{answer}");
    }
}

fn pod_path(name: &str) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}")
}

/// What Kubernetes makes of a text in a pod: `$$` is `$`. References to variables are not expected.
fn expand(text: &str) -> String {
    text.replace("$$", "$")
}

fn end(mut child: Child) {
    let _ = std::process::Command::new("kill").arg(child.id().to_string()).status();
    for _ in 0..100 {
        if child.try_wait().unwrap().is_some() {
            return end_group(child.id());
        }
        std::thread::sleep(POLL);
    }
    let _ = child.kill();
    let _ = child.wait();
    end_group(child.id());
}

/// All processes of a container end with the first.
fn end_group(leader: u32) {
    let leader = rustix::process::Pid::from_raw(leader as i32).unwrap();
    let _ = rustix::process::kill_process_group(leader, rustix::process::Signal::KILL);
}
