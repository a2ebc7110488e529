//! RDMA devices for pods with the real binary: the commands' screens and exit codes, the plugin without kubelet, and the
//! plugin under the device manager of the real kubelet.

#[path = "../common/mod.rs"]
mod common;
mod figures;
mod guest;
#[path = "../../../../crates/host/fabric/tests/hosts/mod.rs"]
mod hosts;
mod kubelet;
mod plugin;
mod rig;
mod screens;
