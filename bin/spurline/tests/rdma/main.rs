//! Nodes and mounts over RDMA rails, with the real binary on real verbs in the virtual machine: the transport in use,
//! the view of a reader when links, devices and nodes fail and return, and the messages of failed starts. Every test
//! compares every byte, and reads from the counters which transport carried them. `rdma_writes` has the writers,
//! `rdma_hosts` machines of two NUMA nodes, two machines, and the figures.

mod clients;
mod faults;
mod links;
mod starts;
mod volumes;

use spurline_testkit::{GuestNet, run_in_guest};

/// Rails carry the bytes, links, devices and nodes fail and return.
#[test]
fn in_the_virtual_machine() {
    run_in_guest(GuestNet::Two, &["guest_rails_carry", "guest_readers_outlive_a_node"]);
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_the_virtual_machine() {
        run_in_guest(GuestNet::Two, &["guest_"]);
    }
}
