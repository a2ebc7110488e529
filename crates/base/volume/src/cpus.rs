//! Where threads may run that are started late, by whoever has the first work for them. It does not know what they do.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs of the thread that made a pool. A thread begins with those of the thread that starts it, and one that serves a
/// FUSE ring keeps to a single CPU: without this a pool's threads would all share that one with the reader.
#[derive(Debug, Clone, Copy)]
pub struct Cpus(Option<CpuSet>);

impl Cpus {
    /// Those that the calling thread may run on. None are known where the kernel does not say, or has more than 1024.
    pub fn here() -> Cpus {
        Cpus(sched_getaffinity(None).ok())
    }

    /// Lets the calling thread run on them where it has a single one. What somebody chose for the process since then (`taskset
    /// -ap`) stays. It is an optimisation, so a refusal (a cpuset that has changed) changes nothing.
    pub fn take(&self) {
        if let Some(cpus) = &self.0
            && sched_getaffinity(None).is_ok_and(|now| now.count() == 1 && cpus.count() > 1)
        {
            let _ = sched_setaffinity(None, cpus);
        }
    }
}
