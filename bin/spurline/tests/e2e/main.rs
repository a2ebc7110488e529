//! The main job end to end with the real binary: mounts and nodes as processes, faults from outside.
//! One test program, so that linking stays cheap; `writable` has the writable mounts.

mod abuse;
mod automount;
mod cluster;
mod copies;
mod default_cache;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/disk_image.rs"]
mod disk_image;
mod disks;
#[path = "../../../../crates/cluster/membership/tests/dns/dns_server.rs"]
mod dns_server;
mod documents;
mod drain;
mod faults;
#[path = "../common/fsx.rs"]
mod fsx;
mod group;
mod hosts;
#[path = "../common/installed_tool.rs"]
mod installed_tool;
mod jobs;
#[path = "../common/lan.rs"]
mod lan;
mod load;
mod lone;
mod members;
#[path = "../common/mount_process.rs"]
mod mount_process;
mod networks;
mod outage;
mod probe;
mod programs;
mod recover;
mod recover_writes;
mod registries;
mod remote;
mod rules;
mod settings;
mod trust;
mod unmounts;
#[path = "../common/world.rs"]
mod world;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/writable_group.rs"]
mod writable_group;
