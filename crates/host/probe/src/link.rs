//! The interface that traffic takes on this host: name, port rate, and whether the counters agree. Reads kernel files and
//! addresses only, and judges nothing.

use rustix::net::netdevice::index_to_name;
use rustix::net::{AddressFamily, SocketType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Kind of an interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkMedium {
    /// An Ethernet port.
    Ethernet,
    /// IP over InfiniBand.
    Ipoib,
    /// Traffic within the host.
    Loopback,
    /// No port: veth, bridge, tunnel.
    Virtual,
    /// Not determined.
    #[default]
    Unknown,
}

/// The interface of an end.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterfaceLink {
    /// The name; empty when unknown.
    pub interface: String,
    /// The address of the traffic.
    pub address: String,
    /// The kind.
    pub medium: LinkMedium,
    /// Rate of the port in one direction, in bits per second.
    #[serde(rename = "bits_per_second")]
    pub rate_bits: Option<u64>,
    /// Where the rate was read, or why the rate is unknown.
    pub evidence: String,
    /// Largest packet in bytes.
    pub mtu: Option<u32>,
    /// Mode of IPoIB: datagram or connected.
    pub mode: Option<String>,
    /// The interface whose counters moved, if not the interface with the address.
    pub carried_by: Option<String>,
}

/// Paths of the kernel's files; tests use others.
#[derive(Debug, Clone)]
pub struct KernelFiles {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
}

impl Default for KernelFiles {
    fn default() -> Self {
        KernelFiles { sys: "/sys".into(), proc: "/proc".into() }
    }
}

/// Bytes in and out of every interface of this network namespace.
pub type InterfaceCounters = BTreeMap<String, u64>;

impl KernelFiles {
    /// The interface with a socket's local address.
    pub fn link_of(&self, address: SocketAddr) -> InterfaceLink {
        let here = address.ip().to_canonical();
        let scope = if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 };
        let interface = if scope == 0 {
            let found = spurline_net_tcp::local_addresses().unwrap_or_default();
            found.into_iter().find(|a| a.ip.to_canonical() == here).map(|a| a.interface)
        } else {
            // A link-local address may be on many interfaces; the scope names a single interface.
            let any = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None);
            any.and_then(|any| index_to_name(any, scope)).ok()
        };
        match interface {
            Some(interface) => InterfaceLink { address: here.to_string(), ..self.link_named(&interface) },
            None => InterfaceLink {
                address: here.to_string(),
                evidence: "no interface of this host has the address".into(),
                ..InterfaceLink::default()
            },
        }
    }

    /// An interface by name.
    pub fn link_named(&self, interface: &str) -> InterfaceLink {
        let dir = self.sys.join("class/net").join(interface);
        let mtu = read_number(&dir.join("mtu")).and_then(|n| u32::try_from(n).ok());
        let mut link = InterfaceLink { interface: interface.to_owned(), mtu, ..InterfaceLink::default() };
        if !dir.exists() {
            link.evidence = format!("{} does not exist (an interface of another network namespace?)", dir.display());
            return link;
        }
        match read_number(&dir.join("type")) {
            Some(772) => {
                link.medium = LinkMedium::Loopback;
                link.evidence = "loopback has no port".into();
            }
            Some(32) => {
                link.medium = LinkMedium::Ipoib;
                link.mode = read_text(&dir.join("mode")).map(|mode| mode.trim().to_owned());
                match self.rdma_rate(&dir).or_else(|| self.driver_speed(&dir)) {
                    Some((rate, from)) => {
                        link.rate_bits = Some(rate);
                        link.evidence = from;
                    }
                    None => link.evidence = format!("no rate below {}/device/infiniband", dir.display()),
                }
            }
            _ => (link.medium, link.rate_bits, link.evidence) = self.ethernet_rate(&dir, interface, 0),
        }
        link
    }

    /// The port's own rate, or that of the port below a VLAN or bond.
    fn ethernet_rate(&self, dir: &Path, interface: &str, above: usize) -> (LinkMedium, Option<u64>, String) {
        if dir.join("device").exists() || dir.join("bonding").exists() {
            return match self.driver_speed(dir) {
                Some((rate, from)) => (LinkMedium::Ethernet, Some(rate), from),
                None => {
                    let why = format!("{interface} does not report its speed ({})", dir.join("speed").display());
                    (LinkMedium::Ethernet, None, why)
                }
            };
        }
        // A bridge has several ports, and the port in use is unknown.
        let lower = if dir.join("bridge").exists() { None } else { lower_interface(dir) };
        // Real chains are short; the limit ends a circle of links.
        if let Some(lower) = lower.filter(|_| above < 4) {
            let below = self.sys.join("class/net").join(&lower);
            if read_number(&below.join("type")) == Some(1) {
                return self.ethernet_rate(&below, &lower, above + 1);
            }
        }
        (LinkMedium::Virtual, None, format!("{interface} is virtual (veth, bridge or tunnel) and has no port rate"))
    }

    /// Bits per second from the driver's megabits.
    fn driver_speed(&self, dir: &Path) -> Option<(u64, String)> {
        let file = dir.join("speed");
        // Down or unknown reads as -1, as an error, or on some drivers as 4294967295.
        let megabits = read_number(&file).filter(|n| *n > 0 && *n < i64::from(u32::MAX))?;
        Some((u64::try_from(megabits).ok()? * 1_000_000, file.display().to_string()))
    }

    /// Bits per second of an IPoIB interface's RDMA port: `400 Gb/sec (4X NDR)`.
    fn rdma_rate(&self, dir: &Path) -> Option<(u64, String)> {
        let port =
            read_number(&dir.join("dev_port")).or_else(|| read_hexadecimal(&dir.join("dev_id"))).unwrap_or(0) + 1;
        let mut devices: Vec<_> = std::fs::read_dir(dir.join("device/infiniband")).ok()?.flatten().collect();
        devices.sort_by_key(std::fs::DirEntry::file_name);
        devices.iter().find_map(|device| {
            let file = device.path().join("ports").join(port.to_string()).join("rate");
            let gigabits: f64 = read_text(&file)?.split_whitespace().next()?.parse().ok()?;
            let sane = gigabits.is_finite() && gigabits > 0.0 && gigabits < 1e6;
            sane.then(|| ((gigabits * 1e9) as u64, file.display().to_string()))
        })
    }

    /// Reads the counters of all interfaces.
    pub fn read_counters(&self) -> InterfaceCounters {
        // The thread's own network namespace; a mounted /sys may belong to another.
        let table = read_text(&self.proc.join("thread-self/net/dev")).unwrap_or_default();
        table.lines().filter_map(parse_counters).collect()
    }
}

/// `eth0: received-bytes packets errs drop fifo frame compressed multicast sent-bytes …`
fn parse_counters(line: &str) -> Option<(String, u64)> {
    let (name, numbers) = line.split_once(':')?;
    let mut numbers = numbers.split_whitespace().map(str::parse::<u64>);
    let received = numbers.next()?.ok()?;
    let sent = numbers.nth(7)?.ok()?;
    Some((name.trim().to_owned(), received.saturating_add(sent)))
}

/// Sets [`InterfaceLink::carried_by`] when the counters show that another interface than that with the address carried most of
/// `bytes`.
pub fn detect_carrier(link: &mut InterfaceLink, before: &InterfaceCounters, after: &InterfaceCounters, bytes: u64) {
    // A little traffic cannot be distinguished from other traffic.
    if bytes < 1 << 20 || link.interface.is_empty() {
        return;
    }
    let grown = |name: &str| {
        let after = after.get(name).copied().unwrap_or(0);
        after.saturating_sub(before.get(name).copied().unwrap_or(0))
    };
    if grown(&link.interface) >= bytes / 4 {
        return;
    }
    let other = after.keys().map(|name| (grown(name), name)).max();
    if let Some((_, name)) = other.filter(|(most, _)| *most >= bytes / 10 * 9) {
        link.carried_by = Some(name.clone());
    }
}

fn lower_interface(dir: &Path) -> Option<String> {
    let mut found: Vec<String> = std::fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("lower_").map(str::to_owned))
        .collect();
    // With several, the carrier is unknown.
    (found.len() == 1).then(|| found.remove(0))
}

fn read_text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn read_number(path: &Path) -> Option<i64> {
    read_text(path)?.trim().parse().ok()
}

fn read_hexadecimal(path: &Path) -> Option<i64> {
    i64::from_str_radix(read_text(path)?.trim().trim_start_matches("0x"), 16).ok().filter(|n| (0..256).contains(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files in a directory; empty content makes a directory.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, KernelFiles) {
        let dir = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = dir.path().join("class/net").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            if content.is_empty() {
                std::fs::create_dir_all(&path).unwrap();
            } else {
                std::fs::write(&path, content).unwrap();
            }
        }
        let files = KernelFiles { sys: dir.path().into(), proc: dir.path().into() };
        (dir, files)
    }

    #[test]
    fn ports_and_what_stands_on_them() {
        let (_dir, files) = tree(&[
            ("eth0/type", "1\n"),
            ("eth0/device", ""),
            ("eth0/speed", "100000\n"),
            ("eth0/mtu", "9000\n"),
            ("vlan7/type", "1\n"),
            ("vlan7/lower_eth0", ""),
            ("vlan7/speed", "100000\n"),
            ("bond0/type", "1\n"),
            ("bond0/bonding", ""),
            ("bond0/speed", "200000\n"),
            ("veth0/type", "1\n"),
            ("veth0/speed", "10000\n"),
            ("br0/type", "1\n"),
            ("br0/bridge", ""),
            ("br0/lower_eth0", ""),
            ("down/type", "1\n"),
            ("down/device", ""),
            ("down/speed", "-1\n"),
            ("lo/type", "772\n"),
            ("loop0/type", "1\n"),
            ("loop0/lower_loop0", ""),
        ]);
        let seen = |name: &str| {
            let link = files.link_named(name);
            (link.medium, link.rate_bits.map(|r| r / 1_000_000_000))
        };
        assert_eq!(seen("eth0"), (LinkMedium::Ethernet, Some(100)));
        assert_eq!(files.link_named("eth0").mtu, Some(9000));
        assert_eq!(seen("vlan7"), (LinkMedium::Ethernet, Some(100)));
        assert_eq!(seen("bond0"), (LinkMedium::Ethernet, Some(200)));
        // veth reports 10 Gb/s, which means nothing.
        assert_eq!(seen("veth0"), (LinkMedium::Virtual, None));
        assert_eq!(seen("br0"), (LinkMedium::Virtual, None));
        assert_eq!(seen("down"), (LinkMedium::Ethernet, None));
        assert!(files.link_named("down").evidence.contains("does not report its speed"));
        assert_eq!(seen("lo"), (LinkMedium::Loopback, None));
        assert_eq!(seen("loop0"), (LinkMedium::Virtual, None));
        assert_eq!(seen("nothing"), (LinkMedium::Unknown, None));
    }

    #[test]
    fn ipoib_has_the_rate_of_its_port() {
        let (_dir, files) = tree(&[
            ("ib1/type", "32\n"),
            ("ib1/mode", "datagram\n"),
            ("ib1/mtu", "2044\n"),
            ("ib1/dev_port", "1\n"),
            ("ib1/device/infiniband/mthca0/ports/1/rate", "10 Gb/sec (4X)\n"),
            ("ib1/device/infiniband/mthca0/ports/2/rate", "20 Gb/sec (4X DDR)\n"),
            ("ib2/type", "32\n"),
            ("ib2/device/infiniband/x/ports/1/rate", "garbage\n"),
        ]);
        let link = files.link_named("ib1");
        assert_eq!((link.medium, link.rate_bits), (LinkMedium::Ipoib, Some(20_000_000_000)));
        assert_eq!(link.mode.as_deref(), Some("datagram"));
        assert!(link.evidence.ends_with("ports/2/rate"));
        assert_eq!(files.link_named("ib2").rate_bits, None);
    }

    #[test]
    fn counters_say_who_carried() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("thread-self/net")).unwrap();
        let table = "Inter-|   Receive\n face |bytes\n  eth0: 100 1 0 0 0 0 0 0 50 1 0 0 0 0 0 0\nbad: x\n";
        std::fs::write(dir.path().join("thread-self/net/dev"), table).unwrap();
        let files = KernelFiles { sys: dir.path().into(), proc: dir.path().into() };
        assert_eq!(files.read_counters(), InterfaceCounters::from([("eth0".to_owned(), 150)]));
        let of = |eth0: u64, eth1: u64| InterfaceCounters::from([("eth0".to_owned(), eth0), ("eth1".to_owned(), eth1)]);
        let carried = |after: InterfaceCounters, bytes: u64| {
            let mut link = InterfaceLink { interface: "eth0".into(), ..InterfaceLink::default() };
            detect_carrier(&mut link, &of(10, 10), &after, bytes);
            link.carried_by
        };
        let gig = 1 << 30;
        assert_eq!(carried(of(gig, 10), gig), None);
        assert_eq!(carried(of(10, gig + 10), gig).as_deref(), Some("eth1"));
        // A bond and its port both count.
        assert_eq!(carried(of(gig, gig), gig), None);
        assert_eq!(carried(of(10, 20), gig), None);
        assert_eq!(carried(of(10, gig), 1000), None);
    }

    #[test]
    fn this_host() {
        let link = KernelFiles::default().link_of(([127, 0, 0, 1], 7).into());
        assert_eq!(link.interface, "lo");
        let scoped = std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 0, 1);
        assert_eq!(KernelFiles::default().link_of(scoped.into()).interface, "lo");
        assert!(KernelFiles::default().link_of(([192, 0, 2, 77], 7).into()).evidence.contains("no interface"));
        assert!(KernelFiles::default().read_counters().contains_key("lo"));
    }

    proptest::proptest! {
        #[test]
        fn never_panics(line in ".{0,80}", kind in ".{0,6}", rate in ".{0,12}") {
            let _ = parse_counters(&line);
            let (_dir, files) = tree(&[
                ("x/type", if kind.is_empty() { "32" } else { &kind }),
                ("y/type", "32"),
                ("y/dev_id", if kind.is_empty() { "0x1" } else { &kind }),
                ("y/device/infiniband/a/ports/1/rate", if rate.is_empty() { "-" } else { &rate }),
            ]);
            let _ = (files.link_named("x"), files.link_named("y"));
        }
    }
}
