//! How a mount process is started, found again and ended, independent of the place. Does not know volumes.

use serde::{Deserialize, Serialize};
use spurline_config::Fault;
use std::path::PathBuf;

/// What a launcher needs to start a mount process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchPlan {
    /// The volume's name on this node, a word that is valid in the name of a pod.
    pub key: String,
    /// The volume's id, for labels and messages.
    pub volume_id: String,
    /// The volume's directory on the node. The process mounts below, and finds secrets there.
    pub dir: PathBuf,
    /// The arguments of `spurline`.
    pub words: Vec<String>,
    /// Environment variables; the variables name files of secrets, never the content.
    pub environment: Vec<(String, String)>,
    /// Memory limit of the process in bytes.
    pub memory: u64,
    /// Counts the processes of this volume, so that a new process differs from the last in name.
    pub launch: u32,
    /// The directory of the node that is the source, if any.
    pub source_dir: Option<PathBuf>,
    /// Whether the source is changed.
    pub writable: bool,
    /// Whether the mount outlives the process.
    pub recovers: bool,
}

/// A process that could not be started.
#[derive(Debug)]
pub struct LaunchFailure {
    /// Why.
    pub fault: Fault,
    /// The name of the process, if a process may run in spite of the failure, because an answer was lost.
    pub may_run: Option<String>,
}

impl From<Fault> for LaunchFailure {
    fn from(fault: Fault) -> Self {
        LaunchFailure { fault, may_run: None }
    }
}

/// The state of a mount process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessState {
    /// Not running yet; with the reason, if any.
    Pending(String),
    /// Running.
    Running,
    /// Ended or missing; with the cause.
    Ended(String),
}

/// A pod that uses a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodReference {
    /// The name.
    pub name: String,
    /// The namespace.
    pub namespace: String,
    /// The uid.
    pub uid: String,
}

/// An event of a volume, for the pods that use the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeEvent {
    /// The pods that use the volume.
    pub pods: Vec<PodReference>,
    /// Whether the event is a problem.
    pub warning: bool,
    /// A word in upper camel case.
    pub reason: &'static str,
    /// The sentence for a person.
    pub message: String,
}

/// Starts and ends mount processes.
#[tonic::async_trait]
pub trait MountLauncher: Send + Sync + 'static {
    /// Starts a process and returns the name, under which the process is found again after a restart of the driver. Returns
    /// before the mount is ready.
    ///
    /// # Errors
    /// When the process can't be started, or when the start is uncertain.
    async fn launch(&self, plan: &LaunchPlan) -> Result<String, LaunchFailure>;

    /// The state of a process.
    ///
    /// # Errors
    /// When the state can't be determined now.
    async fn process_state(&self, process: &str) -> Result<ProcessState, Fault>;

    /// Ends a process within bounded time, by force if necessary. A process that does not exist has ended.
    ///
    /// # Errors
    /// When the process may still run.
    async fn stop(&self, process: &str) -> Result<(), Fault>;

    /// Ends processes of this node that are none of `known` and that this driver did not start: such processes belong to volumes
    /// that are gone.
    ///
    /// # Errors
    /// When these can't be determined or ended.
    async fn end_others(&self, known: &[String]) -> Result<(), Fault>;

    /// Shows an event where an administrator looks. Failures are logged only.
    async fn report(&self, event: &VolumeEvent);
}
