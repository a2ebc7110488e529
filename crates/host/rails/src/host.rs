//! The addresses of this host's interfaces. Knows no device.

use spurline_types::{Error, Result};
use std::net::IpAddr;

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostAddress {
    /// The interface's name.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Length of the network part in bits.
    pub prefix_len: u8,
}

impl HostAddress {
    /// Whether other machines can send to this address: not loopback, and not link-local.
    pub fn is_routable(&self) -> bool {
        match self.ip {
            IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified(),
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local() && !ip.is_unspecified(),
        }
    }
}

/// Every address of this host.
///
/// # Errors
/// When the kernel does not list the addresses.
pub fn host_addresses() -> Result<Vec<HostAddress>> {
    let found = if_addrs::get_if_addrs().map_err(|e| Error::io("can't list this host's network interfaces", &e))?;
    Ok(found
        .into_iter()
        .map(|i| {
            let prefix_len = match &i.addr {
                if_addrs::IfAddr::V4(v4) => v4.prefixlen,
                if_addrs::IfAddr::V6(v6) => v6.prefixlen,
            };
            HostAddress { ip: i.ip(), interface: i.name, prefix_len }
        })
        .collect())
}
