//! Rails on other machines than one of one NUMA node, with the real binary on real verbs: a virtual machine of two NUMA
//! nodes, and two virtual machines whose cables lose packets. The figures of RDMA are measured here too, by hand.

mod figures;
mod loss;
mod numa;

use spurline_testkit::{GuestNet, run_in_guest};

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_a_virtual_machine_of_two_numa_nodes() {
        run_in_guest(GuestNet::Numa, &["numa_"]);
    }

    #[test]
    fn in_two_virtual_machines() {
        run_in_guest(GuestNet::Pair, &["side_"]);
    }
}
