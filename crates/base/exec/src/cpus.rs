//! The CPUs that threads run on: those of a pool's creator, and a move to another CPU. Does not know the work.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The CPUs of the thread that created a pool. A thread inherits the CPUs of the creator, and a FUSE ring thread is pinned to a
/// single CPU: without this, all threads of a pool would share that CPU with the reader.
#[derive(Debug, Clone, Copy)]
pub struct ThreadCpus(Option<CpuSet>);

impl ThreadCpus {
    /// The CPUs of the calling thread; unknown if the kernel does not report the CPUs or has more than 1024.
    pub fn of_current_thread() -> ThreadCpus {
        ThreadCpus(sched_getaffinity(None).ok())
    }

    /// Applies the CPUs to the calling thread if that thread is pinned to a single CPU. A later choice by the administrator
    /// (`taskset -ap`) stays. Errors (a changed cpuset) are ignored: this is an optimisation.
    pub fn apply_to_current_thread(&self) {
        if let Some(cpus) = &self.0
            && sched_getaffinity(None).is_ok_and(|now| now.count() == 1 && cpus.count() > 1)
        {
            let _ = sched_setaffinity(None, cpus);
        }
    }
}

/// Moves this thread to an allowed CPU, without pinning: where another CPU is idle the kernel moves the thread at the next
/// wake-up. Errors are ignored: this is an optimisation.
pub fn move_to_cpu(cpu: usize) {
    if cpu >= CpuSet::MAX_CPU || cpu == sched_getcpu() {
        return;
    }
    let Ok(anywhere) = sched_getaffinity(None) else { return };
    if !anywhere.is_set(cpu) {
        return;
    }
    let mut only = CpuSet::new();
    only.set(cpu);
    if sched_setaffinity(None, &only).is_ok() {
        let _ = sched_setaffinity(None, &anywhere);
    }
}
