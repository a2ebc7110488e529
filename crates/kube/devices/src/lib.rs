//! RDMA devices for pods, without a cluster: the configuration of the device plugin, the selected HCAs, the slots, findings about
//! configurations and pods, and advice. Knows neither kubelet's API nor sockets.
#![forbid(unsafe_code)]

pub mod advise;
mod claims;
mod config;
pub mod discover;
mod embedded;
mod functions;
mod hca;
mod json_tree;
mod lint;
pub mod perftest;
mod pod;
mod select;
mod slots;
pub mod verify;

pub use config::{
    ConfigReading, DeviceSelectors, ExtraDevices, PluginConfig, ResourceConfig, SelectorKey, read_config,
};
pub use embedded::{EmbeddedConfig, embedded_configs};
pub use hca::{Hca, HcaLink, NodeHcas};
pub use lint::{lint_config, lint_node};
pub use pod::{PodContext, explain_pods};
pub use select::{SelectorMiss, first_miss, select_hcas};
pub use slots::{DeviceSlot, SlotTable, hca_of_slot, spread_slots};
