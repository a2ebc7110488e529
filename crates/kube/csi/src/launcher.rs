//! How a mount process is started, found again and ended, apart from where it runs. It does not know volumes.

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
    /// The volume's directory on the node. The process mounts below it and finds its secrets there.
    pub dir: PathBuf,
    /// The arguments of `spurline`.
    pub words: Vec<String>,
    /// Environment variables; they name files of secrets, never their content.
    pub environment: Vec<(String, String)>,
    /// Memory limit of the process in bytes.
    pub memory: u64,
    /// Counts the processes of this volume, so that a new one differs from the last in name.
    pub launch: u32,
    /// The directory of the node that is the source, if it is one.
    pub source_dir: Option<PathBuf>,
    /// Whether the source is changed.
    pub writable: bool,
}

/// A process that could not be started.
#[derive(Debug)]
pub struct LaunchFailure {
    /// Why.
    pub fault: Fault,
    /// The name of the process if it may run in spite of it, because an answer was lost.
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
    /// It does not run yet; with the reason, if there is one.
    Pending(String),
    /// It runs.
    Running,
    /// It ended or does not exist; with the cause.
    Ended(String),
}

/// A pod that uses a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodReference {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its uid.
    pub uid: String,
}

/// What happened to a volume, for the pods that use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeEvent {
    /// The pods that use the volume.
    pub pods: Vec<PodReference>,
    /// Whether it is a problem.
    pub warning: bool,
    /// One word in upper camel case.
    pub reason: &'static str,
    /// The sentence for a person.
    pub message: String,
}

/// Starts and ends mount processes.
#[tonic::async_trait]
pub trait MountLauncher: Send + Sync + 'static {
    /// Starts a process and returns its name, under which it is found again after a restart of the driver. Returns
    /// before the mount is ready.
    ///
    /// # Errors
    /// When it can't be started, or it is not known whether it was.
    async fn launch(&self, plan: &LaunchPlan) -> Result<String, LaunchFailure>;

    /// The state of a process.
    ///
    /// # Errors
    /// When the state can't be determined now.
    async fn process_state(&self, process: &str) -> Result<ProcessState, Fault>;

    /// Ends a process within bounded time, by force if it does not end by itself. A process that does not exist has
    /// ended.
    ///
    /// # Errors
    /// When it may still run.
    async fn stop(&self, process: &str) -> Result<(), Fault>;

    /// Ends processes of this node that are none of `known` and that this driver did not start: they belong to volumes
    /// that are gone.
    ///
    /// # Errors
    /// When they can't be determined or ended.
    async fn end_others(&self, known: &[String]) -> Result<(), Fault>;

    /// Shows an event where an administrator looks. Failures are logged only.
    async fn report(&self, event: &VolumeEvent);
}
