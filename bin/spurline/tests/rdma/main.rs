//! Nodes and mounts over RDMA rails, with the real binary on real verbs in the virtual machine: the transport in use,
//! the view of a reader when links, devices and nodes fail and return, and the messages of failed starts. Every test
//! compares every byte, and reads from the counters which transport carried them.

mod clients;
#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the loss of power is tried on the host only")]
#[path = "../common/disk_image.rs"]
mod disk_image;
#[path = "../common/driver.rs"]
mod driver;
mod faults;
mod figures;
#[path = "../common/fsx.rs"]
mod fsx;
mod links;
mod loss;
mod numa;
#[path = "../common/pjdfstest.rs"]
mod pjdfstest;
mod rig;
mod starts;
mod volumes;
mod writes;

use spurline_testkit::{GuestNet, run_in_guest};

#[test]
fn in_the_virtual_machine() {
    run_in_guest(GuestNet::Two, &["guest_"], 2400);
}

#[test]
fn in_a_virtual_machine_of_two_numa_nodes() {
    run_in_guest(GuestNet::Numa, &["numa_"], 900);
}

#[test]
fn in_two_virtual_machines() {
    run_in_guest(GuestNet::Pair, &["side_"], 1800);
}
