//! Worker threads: a pool with urgent work and work ahead of readers, permits that limit how many workers wait for events, and
//! the CPUs that threads run on. Does not know the work.
#![forbid(unsafe_code)]

mod cpus;
mod permits;
mod workers;

pub use cpus::{ThreadCpus, move_to_cpu};
pub use permits::{WorkerPermit, WorkerPermits};
pub use workers::{NoAnswer, PriorityWorkers};
