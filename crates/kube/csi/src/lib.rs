//! The CSI driver: volumes for the pods of a node. Starts mount processes through a launcher, binds mounts to the directories of
//! pods, replaces processes that ended, and reports the condition of volumes. Does not know the command line: the arguments of a
//! mount process come from a given function.
#![forbid(unsafe_code)]

mod api_server;
mod condition;
mod controller;
mod descriptors;
mod identity;
mod launcher;
mod mounts;
mod node;
mod pods;
mod process;
mod record;
mod secrets;
mod server;
mod settings;
mod volumes;

pub use api_server::SERVICE_ACCOUNT;
pub use launcher::{LaunchFailure, LaunchPlan, MountLauncher, PodReference, ProcessState, VolumeEvent};
pub use pods::PodLauncher;
pub use process::ProcessLauncher;
pub use server::{CsiDriver, CsiDriverConfig};
pub use settings::{MountArguments, MountRequest, MountWords, NO_RECOVERY_OPTION, VolumeSettings};

/// The driver's name, as in the CSIDriver object, in PersistentVolumes and in StorageClasses.
pub const DRIVER_NAME: &str = "csi.spurline.io";

/// Messages of the CSI, generated from `proto/csi.proto`.
pub mod pb {
    #![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
    tonic::include_proto!("csi.v1");
}
