//! The limit of locked memory compared with the amount that RDMA registers. Registers none.

use crate::UnusableRail;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use spurline_types::Size;

/// The limit of locked memory of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemlockLimit {
    /// The limit in bytes (`ulimit -l`); `None` for unlimited.
    pub limit: Option<u64>,
    /// Whether CAP_IPC_LOCK lifts the limit.
    pub lifted: bool,
}

impl MemlockLimit {
    /// The limit of this process.
    pub fn of_process() -> Self {
        let lifted = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
        MemlockLimit { limit: getrlimit(Resource::Memlock).current, lifted }
    }
}

/// Checks that `needed` bytes of registered memory may be locked for the rail of `interface`.
///
/// # Errors
/// [`UnusableRail::Memlock`] with the needed number.
pub fn check_memlock(interface: &str, needed: u64, memlock: MemlockLimit) -> Result<(), UnusableRail> {
    match memlock.limit {
        Some(limit) if !memlock.lifted && limit < needed => Err(UnusableRail::Memlock {
            interface: interface.to_owned(),
            limit: Size(limit).to_string(),
            needed: Size(needed).to_string(),
            kib: needed.div_ceil(1024),
        }),
        _ => Ok(()),
    }
}
