//! Buckets that are changed, over a server of the tests.

mod common;
mod kept_files;
mod staging;
