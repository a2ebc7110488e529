//! Writable mounts end to end with the real binary: lone ones and those through nodes, what programs do on them, locks,
//! promises, and faults from outside.

mod cached_reads;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/disk_image.rs"]
mod disk_image;
#[path = "../common/file_locks.rs"]
mod file_locks;
#[path = "../common/fsx.rs"]
mod fsx;
#[path = "../common/installed_tool.rs"]
mod installed_tool;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/lan.rs"]
mod lan;
mod locks;
#[path = "../common/pjdfstest.rs"]
mod pjdfstest;
mod posix_suites;
#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../common/world.rs"]
mod world;
mod writable_calls;
mod writable_faults;
#[path = "../common/writable_group.rs"]
mod writable_group;
mod writable_programs;
mod writable_promises;
mod writes;
mod writes_behind;
mod writes_nodes;
mod writes_places;
mod writes_unnamed;
