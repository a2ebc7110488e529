//! `spurline export --rw`, with the real binary: clients that write over the kernel's NFS server and client in the virtual
//! machine, outages of mounts and nodes, mounts that outlive their process, and the public suites.

mod outages;
mod suites;
mod takeovers;
mod writes;

use spurline_testkit::GuestKernel;

/// Mounts with `--recover` need Linux 6.9.
#[test]
#[ignore = "boots another kernel; .ci/nightly runs it"]
fn recovering_mounts_in_the_virtual_machine() {
    spurline_rig::nfs_rig::run_nfs_guest_of(GuestKernel::Backports, "takeover_");
}

/// Run by `make test-all` only.
mod test_all {
    #[test]
    fn in_the_virtual_machine() {
        spurline_rig::nfs_rig::run_nfs_guest();
    }
}
