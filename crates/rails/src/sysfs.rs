//! What /sys says of RDMA devices and network interfaces, read without judging. An entry that can't be read is an
//! entry that is not there: an empty slot of a GID table answers EINVAL.

use std::cell::OnceCell;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// GID tables are at most this long; a driver that says more is cut off here.
const MOST_GIDS: u32 = 1024;

/// What a GID is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidType {
    /// InfiniBand, or RoCE v1 on an Ethernet port.
    IbOrRoceV1,
    /// RoCE v2.
    RoceV2,
}

impl fmt::Display for GidType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidType::IbOrRoceV1 => "RoCE v1",
            GidType::RoceV2 => "RoCE v2",
        })
    }
}

/// One slot of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gid {
    /// Its index.
    pub index: u32,
    /// Its sixteen bytes.
    pub raw: [u8; 16],
    /// What it is for; `None` where the kernel does not say.
    pub kind: Option<GidType>,
    /// The interface it stands for, where the kernel says.
    pub netdev: Option<String>,
}

impl Gid {
    /// The address it was made from, on RoCE: IPv4 addresses stand in it as `::ffff:a.b.c.d`.
    pub fn ip(&self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.raw);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GID {} {}", self.index, Ipv6Addr::from(self.raw))
    }
}

/// One port of an RDMA device.
#[derive(Debug, Clone)]
pub(crate) struct Port {
    pub device: String,
    pub number: u32,
    path: PathBuf,
    device_path: PathBuf,
    /// Its GID table, once it was read: a thousand files on some devices.
    table: OnceCell<Vec<Gid>>,
}

/// The line in a file, without its end.
pub(crate) fn line(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Names in a directory, in order; none when it is not there.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .map(|entries| entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect())
        .unwrap_or_default();
    names.sort();
    names
}

/// Every port of every RDMA device below `sys`.
pub(crate) fn ports(sys: &Path) -> Vec<Port> {
    let class = sys.join("class/infiniband");
    let mut found = Vec::new();
    for device in names(&class) {
        let device_path = class.join(&device);
        for port in names(&device_path.join("ports")) {
            let Ok(number) = port.parse() else { continue };
            let path = device_path.join("ports").join(&port);
            found.push(Port {
                device: device.clone(),
                number,
                path,
                device_path: device_path.clone(),
                table: OnceCell::new(),
            });
        }
    }
    found
}

/// Whether there is an interface called `netdev`.
pub(crate) fn netdev_exists(sys: &Path, netdev: &str) -> bool {
    // A name is one word: "../.." would look somewhere else.
    !netdev.is_empty() && !netdev.contains('/') && netdev != ".." && netdev != "." && net(sys, netdev).exists()
}

pub(crate) fn net(sys: &Path, netdev: &str) -> PathBuf {
    sys.join("class/net").join(netdev)
}

/// Sixteen bytes written as eight groups of hexadecimal digits, or as pairs of digits with colons between.
pub(crate) fn parse_gid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != ':').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(number.to_be_bytes())
}

impl Port {
    fn attribute(&self, name: &str) -> String {
        line(&self.path.join(name)).unwrap_or_default()
    }

    /// The word of `state` and that of `phys_state`: `4: ACTIVE` is `ACTIVE`.
    pub fn states(&self) -> (String, String) {
        let word = |text: String| text.split_once(':').map_or(text.clone(), |(_, word)| word.trim().to_owned());
        (word(self.attribute("state")), word(self.attribute("phys_state")))
    }

    pub fn active(&self) -> bool {
        self.attribute("state").starts_with('4')
    }

    pub fn infiniband(&self) -> bool {
        self.attribute("link_layer") == "InfiniBand"
    }

    /// Whether the device speaks iWARP: its node type is an RNIC.
    pub fn iwarp(&self) -> bool {
        line(&self.device_path.join("node_type")).is_some_and(|text| text.starts_with('4'))
    }

    /// The rate as the kernel writes it, and in megabits per second (0 when it is no number).
    pub fn rate(&self) -> (String, u32) {
        let text = self.attribute("rate");
        let gigabits = text.split_whitespace().next().and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0);
        (text, (gigabits * 1000.0).clamp(0.0, f64::from(u32::MAX)) as u32)
    }

    /// The processor node it is attached to, where that is known.
    pub fn numa_node(&self) -> Option<u32> {
        line(&self.device_path.join("device/numa_node")).and_then(|text| text.parse().ok())
    }

    /// The filled slots of its GID table, in order; read once.
    pub fn gids(&self) -> Vec<Gid> {
        self.table.get_or_init(|| self.read_gids()).clone()
    }

    fn read_gids(&self) -> Vec<Gid> {
        let mut slots: Vec<u32> =
            names(&self.path.join("gids")).iter().filter_map(|n| n.parse().ok()).filter(|n| *n < MOST_GIDS).collect();
        slots.sort_unstable();
        let gid = |index: u32| {
            let raw = line(&self.path.join(format!("gids/{index}"))).and_then(|text| parse_gid(&text))?;
            if raw == [0; 16] {
                return None;
            }
            let kind = match self.attribute(&format!("gid_attrs/types/{index}")).as_str() {
                "RoCE v2" => Some(GidType::RoceV2),
                "IB/RoCE v1" => Some(GidType::IbOrRoceV1),
                _ => None,
            };
            let netdev = line(&self.path.join(format!("gid_attrs/ndevs/{index}")));
            Some(Gid { index, raw, kind, netdev })
        };
        slots.into_iter().filter_map(gid).collect()
    }

    /// The interface whose driver is the device's own: Soft-RoCE and Soft-iWARP name it, others share a PCI function.
    pub fn owns(&self, sys: &Path, netdev: &str) -> bool {
        if let Some(parent) = line(&self.device_path.join("parent")) {
            return parent == netdev;
        }
        if !self.device_path.join("device/net").join(netdev).exists() {
            return false;
        }
        // Cards with one PCI function for both ports number their interfaces from 0, the RDMA ports from 1.
        let number = |name| line(&net(sys, netdev).join(name)).and_then(|text| parse_number(&text)).unwrap_or(0);
        let several = names(&self.device_path.join("ports")).len() > 1;
        !several || number("dev_port").max(number("dev_id")) + 1 == self.number
    }
}

fn parse_number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}
