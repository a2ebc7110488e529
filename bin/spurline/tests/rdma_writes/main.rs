//! Writable mounts over RDMA rails, with the real binary on real verbs in the virtual machine: writers that outlive links
//! and nodes, and the end of their mount's process, errors of the source, and the public suites of POSIX.

#[allow(dead_code, reason = "the loss of power is tried on the host only")]
#[path = "../common/disk_image.rs"]
mod disk_image;
#[path = "../common/fsx.rs"]
mod fsx;
#[path = "../common/pjdfstest.rs"]
mod pjdfstest;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/rdma_rig.rs"]
mod rig;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/steady_work.rs"]
mod steady_work;
mod takeovers;
mod writes;

use spurline_testkit::{GuestKernel, GuestNet, run_in_guest, run_in_guest_of};

#[test]
fn in_the_virtual_machine() {
    run_in_guest(GuestNet::Two, &["guest_"]);
}

/// Mounts with `--recover` need Linux 6.9.
#[test]
#[ignore = "boots another kernel; .ci/nightly runs it"]
fn recovering_mounts_in_the_virtual_machine() {
    run_in_guest_of(GuestKernel::Backports, GuestNet::Two, &["takeover_"]);
}
