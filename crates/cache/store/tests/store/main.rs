//! Cache disks: blocks, eviction, faults, kills. The test of memory has a program of its own.

mod classes;
mod common;
mod crash;
mod faults;
mod model;
mod space;
mod whole;
