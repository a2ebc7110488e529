//! Buckets that are changed, over a server of the tests.

mod kept_files;
