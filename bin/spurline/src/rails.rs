//! The rails of a mount or a node: interfaces of --rdma-network made into RDMA devices at start, or a refusal that
//! names the interface.

use spurline_config::{Fault, RdmaConfig};
use spurline_rails::{LocalRail, Memlock, check_memlock, host_addresses, resolve};
use std::path::Path;

/// Where the kernel tells of devices.
pub const SYS: &str = "/sys";

/// Resolves the interfaces and logs what each is; `registered` is the memory that will be locked for them, in bytes.
///
/// # Errors
/// The first interface that can't be used, with what is wrong and what to do (exit 3).
pub fn find(config: &RdmaConfig, registered: u64) -> Result<Vec<LocalRail>, Fault> {
    let missing = |e: spurline_rails::Unusable| Fault::missing(e.to_string(), e.remedy());
    let rails = resolve(&config.interfaces, Path::new(SYS), &host_addresses()?).map_err(missing)?;
    for rail in &rails {
        check_memlock(&rail.rail.name, registered, Memlock::here()).map_err(missing)?;
        tracing::info!("rail {}", rail.why);
    }
    Ok(rails)
}

/// What is left to say while nothing carries data over rails.
pub fn not_here() -> Fault {
    Fault::missing("--rdma-network: RDMA is not in this version of spurline", "leave --rdma-network out: TCP")
}
