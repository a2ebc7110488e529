//! Spurline in a cluster with a real API server and etcd: the CSI driver with mount pods, and the manifests. No kubelet
//! runs pods here: a node agent of these tests starts the process that a mount pod describes.

mod agent;
mod figures;
mod relay;
mod server;

/// Run by `make test-all` only.
mod test_all {
    mod manifests;
    mod provision;
    pub mod volumes;
}
