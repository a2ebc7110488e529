//! The checks, by subject. Each takes the facts and adds findings; none reads a file.

pub mod ip;
pub mod limits;
pub mod peer;
pub mod placement;
pub mod ports;
pub mod roce;
pub mod stack;
pub mod subnets;
