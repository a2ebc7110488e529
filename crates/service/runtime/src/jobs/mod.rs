//! Jobs on many files: their workers (a mount, or a coordinator for its groups) and their targets. How a job is
//! planned and resumed is known to the jobs crate alone.

pub mod group;
mod remark;
mod shared_records;
pub mod target;
pub mod worker;
