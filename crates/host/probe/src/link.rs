//! The interface that traffic takes on this host: which it is, what its port can do, and whether its counters agree.
//! It reads kernel files and addresses only, and judges nothing.

use rustix::net::netdevice::index_to_name;
use rustix::net::{AddressFamily, SocketType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// What an interface is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Medium {
    /// An Ethernet port.
    Ethernet,
    /// IP over InfiniBand.
    Ipoib,
    /// The host talks to itself.
    Loopback,
    /// No port of its own: veth, bridge, tunnel.
    Virtual,
    /// It could not be found out.
    #[default]
    Unknown,
}

/// One end's interface, as far as it is known.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// Its name; empty when not known.
    pub interface: String,
    /// The address the traffic uses there.
    pub address: String,
    /// What it is.
    pub medium: Medium,
    /// What its port can carry in one direction, in bits per second.
    #[serde(rename = "bits_per_second")]
    pub rate_bits: Option<u64>,
    /// Where that was read, or why it is not known.
    pub evidence: String,
    /// Bytes of the largest packet.
    pub mtu: Option<u32>,
    /// Mode of IPoIB: datagram or connected.
    pub mode: Option<String>,
    /// The interface whose counters moved, when it is another than the one with the address.
    pub carried_by: Option<String>,
}

/// Where the kernel's files are; elsewhere in tests.
#[derive(Debug, Clone)]
pub struct Files {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
}

impl Default for Files {
    fn default() -> Self {
        Files { sys: "/sys".into(), proc: "/proc".into() }
    }
}

/// Bytes in and out of every interface of this network namespace so far.
pub type Counters = BTreeMap<String, u64>;

impl Files {
    /// The interface with a socket's own address.
    pub fn link_of(&self, address: SocketAddr) -> Link {
        let here = address.ip().to_canonical();
        let scope = if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 };
        let interface = if scope == 0 {
            let found = spurline_net_tcp::local_addresses().unwrap_or_default();
            found.into_iter().find(|a| a.ip.to_canonical() == here).map(|a| a.interface)
        } else {
            // A link-local address may be on many interfaces; its scope says on which.
            let any = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None);
            any.and_then(|any| index_to_name(any, scope)).ok()
        };
        match interface {
            Some(interface) => Link { address: here.to_string(), ..self.link(&interface) },
            None => Link {
                address: here.to_string(),
                evidence: "no interface of this host has the address".into(),
                ..Link::default()
            },
        }
    }

    /// An interface by its name.
    pub fn link(&self, interface: &str) -> Link {
        let dir = self.sys.join("class/net").join(interface);
        let mtu = number(&dir.join("mtu")).and_then(|n| u32::try_from(n).ok());
        let mut link = Link { interface: interface.to_owned(), mtu, ..Link::default() };
        if !dir.exists() {
            link.evidence = format!("{} is not there (of another network namespace?)", dir.display());
            return link;
        }
        match number(&dir.join("type")) {
            Some(772) => {
                link.medium = Medium::Loopback;
                link.evidence = "loopback has no port".into();
            }
            Some(32) => {
                link.medium = Medium::Ipoib;
                link.mode = text(&dir.join("mode")).map(|mode| mode.trim().to_owned());
                match self.rdma_rate(&dir).or_else(|| self.speed(&dir)) {
                    Some((rate, from)) => (link.rate_bits, link.evidence) = (Some(rate), from),
                    None => link.evidence = format!("no rate below {}/device/infiniband", dir.display()),
                }
            }
            _ => (link.medium, link.rate_bits, link.evidence) = self.ethernet(&dir, interface, 0),
        }
        link
    }

    /// A port's own rate, or that of the port a VLAN or a bond stands on.
    fn ethernet(&self, dir: &Path, interface: &str, above: usize) -> (Medium, Option<u64>, String) {
        if dir.join("device").exists() || dir.join("bonding").exists() {
            return match self.speed(dir) {
                Some((rate, from)) => (Medium::Ethernet, Some(rate), from),
                None => {
                    let why = format!("{interface} does not tell its speed ({})", dir.join("speed").display());
                    (Medium::Ethernet, None, why)
                }
            };
        }
        // Ports of a bridge are below it too, but which of them is taken is not said.
        let lower = if dir.join("bridge").exists() { None } else { lower(dir) };
        // A chain of interfaces is short; whoever made a circle of links gets an end.
        if let Some(lower) = lower.filter(|_| above < 4) {
            let below = self.sys.join("class/net").join(&lower);
            if number(&below.join("type")) == Some(1) {
                return self.ethernet(&below, &lower, above + 1);
            }
        }
        (Medium::Virtual, None, format!("{interface} is virtual (veth, bridge or tunnel) and has no port rate"))
    }

    /// Bits per second by what the driver says in megabits.
    fn speed(&self, dir: &Path) -> Option<(u64, String)> {
        let file = dir.join("speed");
        // Down and unknown read -1, an error, or on some drivers 4294967295.
        let megabits = number(&file).filter(|n| *n > 0 && *n < i64::from(u32::MAX))?;
        Some((u64::try_from(megabits).ok()? * 1_000_000, file.display().to_string()))
    }

    /// Bits per second of the RDMA port an IPoIB interface belongs to: `400 Gb/sec (4X NDR)`.
    fn rdma_rate(&self, dir: &Path) -> Option<(u64, String)> {
        let port = number(&dir.join("dev_port")).or_else(|| hexadecimal(&dir.join("dev_id"))).unwrap_or(0) + 1;
        let mut devices: Vec<_> = std::fs::read_dir(dir.join("device/infiniband")).ok()?.flatten().collect();
        devices.sort_by_key(std::fs::DirEntry::file_name);
        devices.iter().find_map(|device| {
            let file = device.path().join("ports").join(port.to_string()).join("rate");
            let gigabits: f64 = text(&file)?.split_whitespace().next()?.parse().ok()?;
            let sane = gigabits.is_finite() && gigabits > 0.0 && gigabits < 1e6;
            sane.then(|| ((gigabits * 1e9) as u64, file.display().to_string()))
        })
    }

    /// Reads the counters of all interfaces.
    pub fn counters(&self) -> Counters {
        // Of the thread's own namespace, which the mounted /sys need not be of.
        let table = text(&self.proc.join("thread-self/net/dev")).unwrap_or_default();
        table.lines().filter_map(line_of_dev).collect()
    }
}

/// `eth0: received-bytes packets errs drop fifo frame compressed multicast sent-bytes …`
fn line_of_dev(line: &str) -> Option<(String, u64)> {
    let (name, numbers) = line.split_once(':')?;
    let mut numbers = numbers.split_whitespace().map(str::parse::<u64>);
    let received = numbers.next()?.ok()?;
    let sent = numbers.nth(7)?.ok()?;
    Some((name.trim().to_owned(), received.saturating_add(sent)))
}

/// Sets [`Link::carried_by`] when the counters say that another interface than the one with the address moved most of
/// `bytes`.
pub fn compare(link: &mut Link, before: &Counters, after: &Counters, bytes: u64) {
    // Little traffic is lost among that of others.
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

fn lower(dir: &Path) -> Option<String> {
    let mut found: Vec<String> = std::fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("lower_").map(str::to_owned))
        .collect();
    // More than one: which carries what is not known.
    (found.len() == 1).then(|| found.remove(0))
}

fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn number(path: &Path) -> Option<i64> {
    text(path)?.trim().parse().ok()
}

fn hexadecimal(path: &Path) -> Option<i64> {
    i64::from_str_radix(text(path)?.trim().trim_start_matches("0x"), 16).ok().filter(|n| (0..256).contains(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files below a directory; a path that ends in `/` is a directory.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Files) {
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
        let files = Files { sys: dir.path().into(), proc: dir.path().into() };
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
            let link = files.link(name);
            (link.medium, link.rate_bits.map(|r| r / 1_000_000_000))
        };
        assert_eq!(seen("eth0"), (Medium::Ethernet, Some(100)));
        assert_eq!(files.link("eth0").mtu, Some(9000));
        assert_eq!(seen("vlan7"), (Medium::Ethernet, Some(100)));
        assert_eq!(seen("bond0"), (Medium::Ethernet, Some(200)));
        // veth claims 10 Gb/s, which means nothing.
        assert_eq!(seen("veth0"), (Medium::Virtual, None));
        assert_eq!(seen("br0"), (Medium::Virtual, None));
        assert_eq!(seen("down"), (Medium::Ethernet, None));
        assert!(files.link("down").evidence.contains("does not tell its speed"));
        assert_eq!(seen("lo"), (Medium::Loopback, None));
        assert_eq!(seen("loop0"), (Medium::Virtual, None));
        assert_eq!(seen("nothing"), (Medium::Unknown, None));
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
        let link = files.link("ib1");
        assert_eq!((link.medium, link.rate_bits), (Medium::Ipoib, Some(20_000_000_000)));
        assert_eq!(link.mode.as_deref(), Some("datagram"));
        assert!(link.evidence.ends_with("ports/2/rate"));
        assert_eq!(files.link("ib2").rate_bits, None);
    }

    #[test]
    fn counters_say_who_carried() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("thread-self/net")).unwrap();
        let table = "Inter-|   Receive\n face |bytes\n  eth0: 100 1 0 0 0 0 0 0 50 1 0 0 0 0 0 0\nbad: x\n";
        std::fs::write(dir.path().join("thread-self/net/dev"), table).unwrap();
        let files = Files { sys: dir.path().into(), proc: dir.path().into() };
        assert_eq!(files.counters(), Counters::from([("eth0".to_owned(), 150)]));
        let of = |eth0: u64, eth1: u64| Counters::from([("eth0".to_owned(), eth0), ("eth1".to_owned(), eth1)]);
        let carried = |after: Counters, bytes: u64| {
            let mut link = Link { interface: "eth0".into(), ..Link::default() };
            compare(&mut link, &of(10, 10), &after, bytes);
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
        let link = Files::default().link_of(([127, 0, 0, 1], 7).into());
        assert_eq!(link.interface, "lo");
        let scoped = std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 0, 1);
        assert_eq!(Files::default().link_of(scoped.into()).interface, "lo");
        assert!(Files::default().link_of(([192, 0, 2, 77], 7).into()).evidence.contains("no interface"));
        assert!(Files::default().counters().contains_key("lo"));
    }

    proptest::proptest! {
        #[test]
        fn never_panics(line in ".{0,80}", kind in ".{0,6}", rate in ".{0,12}") {
            let _ = line_of_dev(&line);
            let (_dir, files) = tree(&[
                ("x/type", if kind.is_empty() { "32" } else { &kind }),
                ("y/type", "32"),
                ("y/dev_id", if kind.is_empty() { "0x1" } else { &kind }),
                ("y/device/infiniband/a/ports/1/rate", if rate.is_empty() { "-" } else { &rate }),
            ]);
            let _ = (files.link("x"), files.link("y"));
        }
    }
}
