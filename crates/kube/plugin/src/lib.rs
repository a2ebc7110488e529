//! The device plugin: serves kubelet's API v1beta1 for every resource of a configuration, registers, follows the node's HCAs and
//! the configuration, and survives restarts of kubelet. Knows no command line and no signal; which HCAs a resource has is decided
//! in `spurline-kube-devices`.
#![forbid(unsafe_code)]

mod advertised;
mod cdi;
mod kubelet;
mod metrics;
mod node_watch;
mod plugin;
mod server;
mod service;

pub use cdi::LockedMemory;
pub use metrics::PluginStatus;
pub use plugin::{PluginSettings, RunningPlugin, start_plugin};

/// Messages of kubelet's API, generated from `proto/deviceplugin/v1beta1.proto`.
mod pb {
    #![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
    tonic::include_proto!("v1beta1");
}
