//! Writable mounts over RDMA rails, with the real binary on real verbs in the virtual machine: writers that outlive links
//! and nodes, errors of the source, and the public suites of POSIX.

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
mod writes;

use spurline_testkit::{GuestNet, run_in_guest};

#[test]
fn in_the_virtual_machine() {
    run_in_guest(GuestNet::Two, &["guest_"]);
}
