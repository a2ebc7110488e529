//! Spurline in a cluster with a real API server and etcd: the CSI driver with mount pods, and the manifests. No kubelet
//! runs pods here: a node agent of these tests starts the process that a mount pod describes.

mod agent;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/driver.rs"]
mod driver;
mod figures;
mod manifests;
mod provision;
mod relay;
mod server;
mod volumes;
