//! Whether as much memory may be locked as RDMA registers. It registers none.

use crate::Unusable;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use spurline_types::Size;

/// How much memory this process may lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock {
    /// The limit in bytes (`ulimit -l`); `None` for none.
    pub limit: Option<u64>,
    /// Whether CAP_IPC_LOCK lifts it.
    pub lifted: bool,
}

impl Memlock {
    /// The limit of this process.
    pub fn here() -> Self {
        let lifted = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
        Memlock { limit: getrlimit(Resource::Memlock).current, lifted }
    }
}

/// Checks that `needed` bytes of registered memory may be locked for the rail of `interface`.
///
/// # Errors
/// [`Unusable::Memlock`] with the number needed.
pub fn check_memlock(interface: &str, needed: u64, memlock: Memlock) -> Result<(), Unusable> {
    match memlock.limit {
        Some(limit) if !memlock.lifted && limit < needed => Err(Unusable::Memlock {
            interface: interface.to_owned(),
            limit: Size(limit).to_string(),
            needed: Size(needed).to_string(),
            kib: needed.div_ceil(1024),
        }),
        _ => Ok(()),
    }
}
