//! A rail as a node announces the rail to peers: a network interface with RDMA. The module knows no device, and holds the fields
//! a peer needs to decide whether it can reach the rail.

use crate::FrameError;
use crate::codec::{ByteCursor, PutValue};
use std::fmt;
use std::net::IpAddr;

/// The most rails a node announces: twice the number in the largest machines.
pub const MAX_RAILS: usize = 16;

/// The link type of a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RailLink {
    /// InfiniBand, addressed by a subnet manager.
    InfiniBand,
    /// RoCE v2: UDP over Ethernet, routable.
    RoceV2,
    /// RoCE v1: Ethernet frames, one broadcast domain.
    RoceV1,
    /// iWARP: TCP over Ethernet, routable.
    Iwarp,
    /// A link type of a newer peer; the number is kept.
    Other(u8),
}

impl RailLink {
    const NAMED: [(RailLink, u8); 4] =
        [(RailLink::InfiniBand, 1), (RailLink::RoceV2, 2), (RailLink::RoceV1, 3), (RailLink::Iwarp, 4)];

    /// The number on the wire.
    pub fn code(self) -> u8 {
        match self {
            RailLink::Other(code) => code,
            named => Self::NAMED.iter().find(|(link, _)| *link == named).map_or(0, |(_, code)| *code),
        }
    }

    /// The link type with a wire number.
    pub fn from_code(code: u8) -> Self {
        Self::NAMED.iter().find(|(_, c)| *c == code).map_or(RailLink::Other(code), |(link, _)| *link)
    }

    /// Whether packets are routed between IP subnets.
    pub fn is_routable(self) -> bool {
        matches!(self, RailLink::RoceV2 | RailLink::Iwarp)
    }
}

impl fmt::Display for RailLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RailLink::InfiniBand => f.write_str("InfiniBand"),
            RailLink::RoceV2 => f.write_str("RoCE v2"),
            RailLink::RoceV1 => f.write_str("RoCE v1"),
            RailLink::Iwarp => f.write_str("iWARP"),
            RailLink::Other(code) => write!(f, "link kind {code}"),
        }
    }
}

/// A rail of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailInfo {
    /// The interface's name on the rail's machine, for logs.
    pub name: String,
    /// The address for RDMA connections.
    pub address: IpAddr,
    /// Length of the network part of the address in bits.
    pub prefix_len: u8,
    /// The port for RDMA connections; 0 on a side that only connects.
    pub port: u16,
    /// The link type.
    pub link: RailLink,
    /// The subnet prefix of an InfiniBand fabric; 0 for the others.
    pub fabric: u64,
    /// Megabits per second; 0 when unknown.
    pub speed_mbit: u32,
}

impl fmt::Display for RailInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} {}/{}", self.name, self.link, self.address, self.prefix_len)?;
        if self.link == RailLink::InfiniBand {
            write!(f, ", subnet prefix {:016x}", self.fabric)?;
        }
        if self.speed_mbit > 0 {
            write!(f, ", {} Gb/s", f64::from(self.speed_mbit) / 1000.0)?;
        }
        f.write_str(")")
    }
}

/// Appends at most [`MAX_RAILS`] rails.
pub(crate) fn put_rails(rails: &[RailInfo], out: &mut Vec<u8>) {
    let rails = &rails[..rails.len().min(MAX_RAILS)];
    out.put_u8(rails.len() as u8);
    for rail in rails {
        out.put_bytes(rail.name.as_bytes());
        match rail.address {
            IpAddr::V4(ip) => out.put_bytes(&ip.octets()),
            IpAddr::V6(ip) => out.put_bytes(&ip.octets()),
        }
        out.put_u8(rail.prefix_len);
        out.put_u16(rail.port);
        out.put_u8(rail.link.code());
        out.put_u64(rail.fabric);
        out.put_u32(rail.speed_mbit);
    }
}

pub(crate) fn take_rails(take: &mut ByteCursor<'_>) -> Result<Vec<RailInfo>, FrameError> {
    let count = usize::from(take.take_u8("a number of rails")?);
    if count > MAX_RAILS {
        return Err(FrameError::TooLong { what: "a list of rails", len: count as u64, max: MAX_RAILS as u64 });
    }
    let mut rails = Vec::new();
    for _ in 0..count {
        let name = take.take_text("a rail's name")?.to_owned();
        let bytes = take.take_bytes("a rail's address")?;
        let wrong = FrameError::Value { what: "the length of a rail's address", value: bytes.len() as u64 };
        let address = match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
            (Ok(v4), _) => IpAddr::from(v4),
            (_, Ok(v6)) => IpAddr::from(v6),
            _ => return Err(wrong),
        };
        let prefix_len = take.take_u8("a rail's network")?;
        if prefix_len > if address.is_ipv4() { 32 } else { 128 } {
            return Err(FrameError::Value { what: "the length of a rail's network", value: prefix_len.into() });
        }
        rails.push(RailInfo {
            name,
            address,
            prefix_len,
            port: take.take_u16("a rail's port")?,
            link: RailLink::from_code(take.take_u8("a rail's link")?),
            fabric: take.take_u64("a rail's fabric")?,
            speed_mbit: take.take_u32("a rail's speed")?,
        });
    }
    Ok(rails)
}
