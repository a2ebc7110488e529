//! What tests of the program share: its processes, mounts, nodes, hosts and guests, and the programs that run on them. It knows the
//! program by its command line, its log lines and its sockets only.
#![allow(missing_docs, reason = "names of tests' parts say what they are")]
#![allow(clippy::new_without_default, clippy::must_use_candidate, reason = "parts of tests")]

pub mod disk_image;
pub mod driver;
pub mod file_locks;
pub mod fsx;
pub mod installed_tool;
pub mod lan;
pub mod mount_process;
pub mod nfs_rig;
pub mod pjdfstest;
pub mod program;
pub mod python_packages;
pub mod rdma_rig;
pub mod s3_clients;
pub mod staging_group;
pub mod steady_work;
pub mod world;
pub mod writable_group;
