//! Both file systems without FUSE: their rules, their models, and what a server of NFS asks of them. One program, so that it links once; the
//! tests of memory have programs of their own.

mod directories;
mod file_handles;
mod growth;
mod kernel_view;
mod model;
mod nfs_server;
mod nfs_service;
mod objects;
mod readahead;
mod records;
mod rules;
mod support;
mod writable_handles;
mod writable_life;
mod writable_locks;
mod writable_lookups;
mod writable_model;
