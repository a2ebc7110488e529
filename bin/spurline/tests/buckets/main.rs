//! Buckets that are written, end to end with the real binary: alone and through nodes, attributes, renames, faults of the store,
//! unmounts, and the S3 programs of others.

mod attrs;
mod faults;
#[path = "../common/file_locks.rs"]
mod file_locks;
#[path = "../common/fsx.rs"]
mod fsx;
#[path = "../common/installed_tool.rs"]
mod installed_tool;
mod locks;
#[path = "../common/mount_process.rs"]
mod mount_process;
mod nodes;
mod objects;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/pjdfstest.rs"]
mod pjdfstest;
mod programs;
mod promises;
#[path = "../common/python_packages.rs"]
mod python_packages;
mod recover;
mod renames;
mod rules;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/s3_clients.rs"]
mod s3_clients;
mod strangers;
mod unmounts;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/world.rs"]
mod world;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/writable_group.rs"]
mod writable_group;
