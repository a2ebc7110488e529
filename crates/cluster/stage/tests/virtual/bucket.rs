//! The store in memory, which the tests of written buckets share.

#[allow(dead_code, reason = "for other tests")]
#[path = "../../../node/tests/virtual/writes/bucket/store.rs"]
pub mod store;
