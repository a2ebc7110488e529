//! The main job end to end with the real binary: mounts and nodes as processes, faults from outside.
//! One test program, so that linking stays cheap.

mod abuse;
mod automount;
mod cluster;
mod common;
mod copies;
mod default_cache;
#[path = "../common/disk_image.rs"]
mod disk_image;
mod disks;
#[path = "../../../../crates/cluster/membership/tests/dns/dns_server.rs"]
mod dns_server;
mod drain;
mod faults;
#[path = "../common/fsx.rs"]
mod fsx;
mod group;
mod hosts;
mod jobs;
mod load;
mod locks;
mod lone;
mod members;
mod networks;
mod outage;
#[path = "../common/pjdfstest.rs"]
mod pjdfstest;
mod posix_suites;
mod probe;
mod programs;
mod registries;
mod remote;
mod rules;
mod settings;
mod trust;
mod unmounts;
mod writable_calls;
mod writable_faults;
mod writable_group;
mod writable_programs;
mod writable_promises;
mod writes;
mod writes_behind;
mod writes_nodes;
mod writes_places;
mod writes_unnamed;
