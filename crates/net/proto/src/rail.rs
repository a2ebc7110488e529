//! A rail as a node tells it to its peers: a network interface over which RDMA reaches it. It knows no device:
//! what stands here is what the other side needs to find out whether it can reach it.

use crate::FrameError;
use crate::codec::{Put, Take};
use std::fmt;
use std::net::IpAddr;

/// The most rails one node tells of: twice what the largest machines have.
pub const MAX_RAILS: usize = 16;

/// What a rail's RDMA runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Link {
    /// InfiniBand, addressed by a subnet manager.
    InfiniBand,
    /// RoCE v2: UDP over Ethernet, routable.
    RoceV2,
    /// RoCE v1: Ethernet frames, one broadcast domain.
    RoceV1,
    /// iWARP: TCP over Ethernet, routable.
    Iwarp,
    /// A link of a newer peer; the number is kept.
    Other(u8),
}

impl Link {
    const NAMED: [(Link, u8); 4] = [(Link::InfiniBand, 1), (Link::RoceV2, 2), (Link::RoceV1, 3), (Link::Iwarp, 4)];

    /// The number on the wire.
    pub fn code(self) -> u8 {
        match self {
            Link::Other(code) => code,
            named => Self::NAMED.iter().find(|(link, _)| *link == named).map_or(0, |(_, code)| *code),
        }
    }

    /// The link of a number from the wire.
    pub fn from_code(code: u8) -> Self {
        Self::NAMED.iter().find(|(_, c)| *c == code).map_or(Link::Other(code), |(link, _)| *link)
    }

    /// Whether packets pass from one IP subnet to another.
    pub fn routable(self) -> bool {
        matches!(self, Link::RoceV2 | Link::Iwarp)
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Link::InfiniBand => f.write_str("InfiniBand"),
            Link::RoceV2 => f.write_str("RoCE v2"),
            Link::RoceV1 => f.write_str("RoCE v1"),
            Link::Iwarp => f.write_str("iWARP"),
            Link::Other(code) => write!(f, "link kind {code}"),
        }
    }
}

/// One rail of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rail {
    /// The interface's name on its own machine, for logs.
    pub name: String,
    /// The address RDMA connections are made to.
    pub address: IpAddr,
    /// Length of the network part of the address in bits.
    pub prefix_len: u8,
    /// The port RDMA connections are made to; 0 on a side that only connects.
    pub port: u16,
    /// What it runs on.
    pub link: Link,
    /// The subnet prefix of an InfiniBand fabric; 0 for the others.
    pub fabric: u64,
    /// Megabits per second; 0 when not known.
    pub speed_mbit: u32,
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} {}/{}", self.name, self.link, self.address, self.prefix_len)?;
        if self.link == Link::InfiniBand {
            write!(f, ", subnet prefix {:016x}", self.fabric)?;
        }
        if self.speed_mbit > 0 {
            write!(f, ", {} Gb/s", f64::from(self.speed_mbit) / 1000.0)?;
        }
        f.write_str(")")
    }
}

/// Appends at most [`MAX_RAILS`] rails.
pub(crate) fn put_rails(rails: &[Rail], out: &mut Vec<u8>) {
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

pub(crate) fn take_rails(take: &mut Take<'_>) -> Result<Vec<Rail>, FrameError> {
    let count = usize::from(take.u8("a number of rails")?);
    if count > MAX_RAILS {
        return Err(FrameError::TooLong { what: "a list of rails", len: count as u64, max: MAX_RAILS as u64 });
    }
    let mut rails = Vec::new();
    for _ in 0..count {
        let name = take.text("a rail's name")?.to_owned();
        let bytes = take.bytes("a rail's address")?;
        let wrong = FrameError::Value { what: "the length of a rail's address", value: bytes.len() as u64 };
        let address = match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
            (Ok(v4), _) => IpAddr::from(v4),
            (_, Ok(v6)) => IpAddr::from(v6),
            _ => return Err(wrong),
        };
        let prefix_len = take.u8("a rail's network")?;
        if prefix_len > if address.is_ipv4() { 32 } else { 128 } {
            return Err(FrameError::Value { what: "the length of a rail's network", value: prefix_len.into() });
        }
        rails.push(Rail {
            name,
            address,
            prefix_len,
            port: take.u16("a rail's port")?,
            link: Link::from_code(take.u8("a rail's link")?),
            fabric: take.u64("a rail's fabric")?,
            speed_mbit: take.u32("a rail's speed")?,
        });
    }
    Ok(rails)
}
