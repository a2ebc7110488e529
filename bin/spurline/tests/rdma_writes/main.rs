//! Writable mounts over RDMA rails, with the real binary on real verbs in the virtual machine: writers that outlive links
//! and nodes, and the end of their mount's process, errors of the source, and the public suites of POSIX.

mod takeovers;
mod writes;

use spurline_testkit::{GuestKernel, GuestNet, run_in_guest, run_in_guest_of};

/// Mounts with `--recover` need Linux 6.9.
#[test]
#[ignore = "boots another kernel; .ci/nightly runs it"]
fn recovering_mounts_in_the_virtual_machine() {
    run_in_guest_of(GuestKernel::Backports, GuestNet::Two, &["takeover_"]);
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_the_virtual_machine() {
        run_in_guest(GuestNet::Two, &["guest_"]);
    }
}
