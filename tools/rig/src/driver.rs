//! A CSI driver and its client, for tests that play the kubelet. It does not know what runs mount processes.

use crate::program::{fuse, mounted_below, spurline, tempdir, wait_for};
use hyper_util::rt::TokioIo;
use spurline_csi::pb;
use spurline_csi::pb::node_client::NodeClient;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// A driver with a source of one file; ended, and its mounts with it, when dropped.
pub struct DriverRig {
    dir: tempfile::TempDir,
    driver: Option<Child>,
    pub runtime: tokio::runtime::Runtime,
    node: String,
    /// Further arguments and variables of the driver.
    more: (Vec<String>, Vec<(String, String)>),
}

impl DriverRig {
    /// A driver with processes of this host, which trusts inline volumes; `None` where file systems can't be mounted.
    pub fn new() -> Option<Arc<Self>> {
        let more = ["--launcher", "process", "--trust-inline-volumes"].map(str::to_owned).into();
        fuse().then(|| Arc::new(Self::with("node-1", |_| (more, Vec::new()))))
    }

    /// A driver of this node with further arguments and variables; `more` gets the rig's directory.
    pub fn with(node: &str, more: impl FnOnce(&Path) -> (Vec<String>, Vec<(String, String)>)) -> Self {
        let dir = tempdir();
        std::fs::create_dir_all(dir.path().join("src")).unwrap();
        std::fs::create_dir_all(dir.path().join("pods")).unwrap();
        std::fs::write(dir.path().join("src/file"), b"hello from the source").unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let more = more(dir.path());
        let mut rig = DriverRig { dir, driver: None, runtime, node: node.to_owned(), more };
        rig.start();
        rig
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn start(&mut self) {
        let mut command = spurline();
        command
            .args(["k8s", "csi-driver", "--node-id", &self.node])
            .args(&self.more.0)
            .envs(self.more.1.iter().cloned());
        command.arg("--endpoint");
        command.arg(format!("unix://{}", self.path("csi.sock").display()));
        command.arg("--state-dir").arg(self.path("state"));
        let log = std::fs::File::options().create(true).append(true).open(self.path("driver.log")).unwrap();
        let driver = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        self.driver = Some(driver);
        let socket = self.path("csi.sock");
        wait_for("the driver's socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    }

    /// The driver's process id.
    pub fn pid(&self) -> u32 {
        self.driver.as_ref().expect("the driver runs").id()
    }

    pub fn client(&self) -> NodeClient<Channel> {
        let socket = self.path("csi.sock");
        let connect = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        NodeClient::new(self.runtime.block_on(endpoint.connect_with_connector(connect)).unwrap())
    }

    /// The attributes of a volume of the source.
    pub fn attributes(&self) -> HashMap<String, String> {
        let source = self.path("src").display().to_string();
        [("source", source.as_str()), ("mountOptions", "cache-size=0,metrics=none")].map(pair).into()
    }

    pub fn stage(&self, id: &str, attributes: &HashMap<String, String>) -> Result<(), Status> {
        self.stage_as(id, attributes, capability())
    }

    /// The same with an access mode.
    pub fn stage_as(
        &self,
        id: &str,
        attributes: &HashMap<String, String>,
        mode: pb::VolumeCapability,
    ) -> Result<(), Status> {
        let request = pb::NodeStageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: self.path(&format!("staging-{id}")).display().to_string(),
            volume_capability: Some(mode),
            volume_context: attributes.clone(),
            ..Default::default()
        };
        self.runtime.block_on(self.client().node_stage_volume(request)).map(drop)
    }

    pub fn unstage(&self, id: &str) -> Result<(), Status> {
        let request = pb::NodeUnstageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: self.path(&format!("staging-{id}")).display().to_string(),
        };
        self.runtime.block_on(self.client().node_unstage_volume(request)).map(drop)
    }

    pub fn publish(&self, id: &str, pod: &str, attributes: &HashMap<String, String>) -> Result<(), Status> {
        self.publish_as(id, pod, attributes, capability(), false)
    }

    /// The same with an access mode, and `readOnly` of the pod's volume.
    pub fn publish_as(
        &self,
        id: &str,
        pod: &str,
        attributes: &HashMap<String, String>,
        mode: pb::VolumeCapability,
        readonly: bool,
    ) -> Result<(), Status> {
        let request = pb::NodePublishVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: self.path(&format!("staging-{id}")).display().to_string(),
            target_path: self.target(pod).display().to_string(),
            volume_capability: Some(mode),
            readonly,
            volume_context: attributes.clone(),
            ..Default::default()
        };
        self.runtime.block_on(self.client().node_publish_volume(request)).map(drop)
    }

    pub fn unpublish(&self, id: &str, pod: &str) -> Result<(), Status> {
        let target_path = self.target(pod).display().to_string();
        let request = pb::NodeUnpublishVolumeRequest { volume_id: id.to_owned(), target_path };
        self.runtime.block_on(self.client().node_unpublish_volume(request)).map(drop)
    }

    pub fn condition(&self, id: &str, pod: &str) -> Result<pb::VolumeCondition, Status> {
        let request = pb::NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: self.target(pod).display().to_string(),
            staging_target_path: String::new(),
        };
        let answer = self.runtime.block_on(self.client().node_get_volume_stats(request))?.into_inner();
        Ok(answer.volume_condition.unwrap())
    }

    pub fn target(&self, pod: &str) -> PathBuf {
        self.path(&format!("pods/{pod}/mount"))
    }

    /// What a pod reads.
    pub fn read(&self, pod: &str) -> std::io::Result<Vec<u8>> {
        std::fs::read(self.target(pod).join("file"))
    }

    /// The mount processes of this rig.
    pub fn processes(&self) -> Vec<i32> {
        let state = self.path("state").display().to_string();
        let all =
            std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        all.filter(|pid: &i32| {
            let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words = String::from_utf8_lossy(&words).into_owned();
            words.contains(&state) && words.contains("\0mount\0")
        })
        .collect()
    }

    /// The processes that the driver has started: keepers, and mounts without a keeper.
    pub fn launched(&self) -> Vec<i32> {
        self.processes().into_iter().filter(|pid| !has_keeper(*pid)).collect()
    }

    /// The processes that serve mounts with a keeper.
    pub fn servers(&self) -> Vec<i32> {
        self.processes().into_iter().filter(|pid| has_keeper(*pid)).collect()
    }

    /// Kills all mount processes and their keepers at once, as the end of a container does.
    pub fn kill_mounts(&self) {
        for pid in self.processes() {
            // A process may end together with the keeper.
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    /// Checks that nothing is left of any volume.
    pub fn check_empty(&self) {
        assert!(!mounted_below(self.dir.path()), "{}", std::fs::read_to_string("/proc/self/mountinfo").unwrap());
        let left: Vec<_> = std::fs::read_dir(self.path("state/v")).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
        wait_for("the end of the mount processes", || self.processes().is_empty());
    }

    pub fn signal(&self, pid: i32, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    pub fn end_driver(&mut self, signal: rustix::process::Signal) {
        if let Some(mut driver) = self.driver.take() {
            self.signal(driver.id() as i32, signal);
            driver.wait().unwrap();
        }
    }
}

impl Drop for DriverRig {
    fn drop(&mut self) {
        self.end_driver(rustix::process::Signal::KILL);
        self.kill_mounts();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        for at in table
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .filter(|at| Path::new(at).starts_with(self.dir.path()))
        {
            let _ = rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH);
        }
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.path("driver.log")).unwrap_or_default());
        }
    }
}

/// Whether a keeper has started the process.
fn has_keeper(pid: i32) -> bool {
    let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    variables.split(|byte| *byte == 0).any(|variable| variable.starts_with(b"SPURLINE_MOUNT_LIFE="))
}

pub fn pair((key, value): (&str, &str)) -> (String, String) {
    (key.to_owned(), value.to_owned())
}

/// A file system that many pods read.
pub fn capability() -> pb::VolumeCapability {
    capability_of(pb::volume_capability::access_mode::Mode::MultiNodeReaderOnly)
}

/// A file system with an access mode.
pub fn capability_of(mode: pb::volume_capability::access_mode::Mode) -> pb::VolumeCapability {
    use pb::volume_capability::{AccessMode, AccessType, MountVolume};
    pb::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}
