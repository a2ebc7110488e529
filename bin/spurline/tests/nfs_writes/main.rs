//! `spurline export --rw`, with the real binary: clients that write over the kernel's NFS server and client in the virtual
//! machine, outages of mounts and nodes, and the public suites.

#[path = "../common/fsx.rs"]
mod fsx;
mod outages;
#[path = "../common/pjdfstest.rs"]
mod pjdfstest;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/nfs_rig.rs"]
mod rig;
mod suites;
mod writes;

#[test]
fn in_the_virtual_machine() {
    rig::run_nfs_guest();
}
