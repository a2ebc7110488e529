//! The FUSE session with real mounts, and what the kernel does with connections.

mod common;
mod ended_programs;
mod life;
mod mounted_fs;
mod outlived;
mod reads;
