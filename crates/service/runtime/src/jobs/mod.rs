//! Jobs on many files: the workers (a mount, or a coordinator for groups) and the targets. How a job is planned and resumed is
//! known to the jobs crate alone.

pub mod group;
mod remark;
mod shared_records;
pub mod target;
pub mod worker;
