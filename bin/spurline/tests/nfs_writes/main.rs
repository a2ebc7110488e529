//! `spurline export --rw`, with the real binary: clients that write over the kernel's NFS server and client in the virtual
//! machine, outages of mounts and nodes, mounts that outlive their process, and the public suites.

#[path = "../common/fsx.rs"]
mod fsx;
mod outages;
#[path = "../common/pjdfstest.rs"]
mod pjdfstest;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/nfs_rig.rs"]
mod rig;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/steady_work.rs"]
mod steady_work;
mod suites;
mod takeovers;
mod writes;

use spurline_testkit::GuestKernel;

#[test]
fn in_the_virtual_machine() {
    rig::run_nfs_guest();
}

/// Mounts with `--recover` need Linux 6.9.
#[test]
#[ignore = "boots another kernel; .ci/nightly runs it"]
fn recovering_mounts_in_the_virtual_machine() {
    rig::run_nfs_guest_of(GuestKernel::Backports, "takeover_");
}
