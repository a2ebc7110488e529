//! Origins: directories and object stores, with servers that misbehave.

mod cached;
mod common;
mod dir;
mod held;
mod odd_servers;
mod s3;
mod s3_between;
