//! RDMA devices for pods with the real binary: the commands' screens and exit codes, the plugin without kubelet, and the
//! plugin under the device manager of the real kubelet.

mod figures;
mod guest;
mod plugin;
mod rig;
mod screens;

/// Run by `make test-all` only.
mod test_all {
    mod kubelet;
}
