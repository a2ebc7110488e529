//! The changing side of a directory: each change is one system call as its caller, without a deadline. It deliberately knows no
//! bucket, no inode table, no wire format and no FUSE.
#![deny(unsafe_code)]

mod caller_identity;
mod object_identity;
mod open_versions;
mod source_locks;
mod source_mount;
mod writable_directory;
mod writable_file;

pub use caller_identity::Squash;
pub use writable_directory::WritableSource;
