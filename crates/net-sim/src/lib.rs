//! An in-memory transport with seeded faults, for tests of what stands on the transport crate.
#![forbid(unsafe_code)]
