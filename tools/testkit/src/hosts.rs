//! Made-up hosts: the files a kernel shows of them, laid out like `/`. It knows the kernel's formats and nothing of
//! their readers, so tests of other crates and the examples use it too.

#![allow(missing_docs, reason = "the kernel's names")]

use std::collections::BTreeMap;
use std::path::Path;

/// Files and links by path, without the leading slash.
#[derive(Debug, Clone, Default)]
pub struct Made {
    pub files: BTreeMap<String, Vec<u8>>,
    pub links: BTreeMap<String, String>,
}

/// A PCI function with what a card has.
#[derive(Debug, Clone)]
pub struct Card {
    pub pci: &'static str,
    pub ids: (u16, u16),
    pub class: &'static str,
    pub driver: &'static str,
    pub numa: i32,
    /// Speed and width, and the most of both.
    pub link: (&'static str, u32, &'static str, u32),
}

/// An RDMA device of the host.
#[derive(Debug, Clone)]
pub struct Rdma {
    pub name: &'static str,
    pub node_type: &'static str,
    pub firmware: &'static str,
    pub hca_type: &'static str,
    pub board: &'static str,
    pub ports: Vec<PortFiles>,
}

#[derive(Debug, Clone)]
pub struct PortFiles {
    pub layer: &'static str,
    pub state: &'static str,
    pub phys: &'static str,
    pub rate: &'static str,
    pub lid: u32,
    pub sm_lid: u32,
    /// Address, type, interface.
    pub gids: Vec<(&'static str, &'static str, &'static str)>,
    pub slots: usize,
}

#[derive(Debug, Clone)]
pub struct Net {
    pub name: &'static str,
    pub kind: u32,
    pub mtu: u32,
    pub operstate: &'static str,
    pub speed: i32,
    pub mode: &'static str,
    pub dev_port: u32,
}

pub const GEN6: (&str, u32, &str, u32) = ("64.0 GT/s PCIe", 16, "64.0 GT/s PCIe", 16);
pub const GEN5: (&str, u32, &str, u32) = ("32.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16);
pub const GEN4: (&str, u32, &str, u32) = ("16.0 GT/s PCIe", 16, "16.0 GT/s PCIe", 16);
pub const GEN3: (&str, u32, &str, u32) = ("8.0 GT/s PCIe", 16, "8.0 GT/s PCIe", 16);
pub const GEN1: (&str, u32, &str, u32) = ("2.5 GT/s PCIe", 8, "2.5 GT/s PCIe", 8);

impl Made {
    /// The files and links as entries of a tree, whose kinds the caller names.
    pub fn entries<E>(&self, file: fn(Vec<u8>) -> E, link: fn(String) -> E) -> BTreeMap<String, E> {
        let files = self.files.iter().map(|(path, bytes)| (path.clone(), file(bytes.clone())));
        files.chain(self.links.iter().map(|(path, target)| (path.clone(), link(target.clone())))).collect()
    }

    pub fn put(&mut self, path: &str, text: impl AsRef<str>) -> &mut Self {
        self.files.insert(path.to_owned(), format!("{}\n", text.as_ref()).into_bytes());
        self
    }

    pub fn link(&mut self, path: &str, target: &str) -> &mut Self {
        self.links.insert(path.to_owned(), target.to_owned());
        self
    }

    pub fn remove(&mut self, prefix: &str) -> &mut Self {
        self.files.retain(|p, _| !p.starts_with(prefix));
        self.links.retain(|p, _| !p.starts_with(prefix));
        self
    }

    /// What every host has: names, modules of the RDMA stack, limits that are wide enough, libraries.
    pub fn host(name: &str, modules: &[&str]) -> Self {
        let mut made = Made::default();
        made.put("proc/sys/kernel/hostname", name).put("proc/sys/kernel/osrelease", "6.8.0-45-generic");
        let line = |m: &&str| format!("{m} 49152 0 - Live 0x0000000000000000");
        made.put("proc/modules", modules.iter().map(line).collect::<Vec<_>>().join("\n"));
        for module in modules {
            made.put(&format!("sys/module/{module}/refcnt"), "0");
        }
        let limit = |name: &str, value: &str, unit: &str| format!("{name:<26}{value:<21}{value:<21}{unit}");
        let limits = [
            "Limit                     Soft Limit           Hard Limit           Units     ".to_owned(),
            limit("Max open files", "1048576", "files"),
            limit("Max locked memory", "unlimited", "bytes"),
        ];
        made.put("proc/self/limits", limits.join("\n"));
        made.put("proc/self/status", "Name:\tspurline\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff");
        made.put(
            "proc/meminfo",
            "MemTotal: 1056287236 kB\nHugePages_Total:    1024\nHugePages_Free:     1024\nHugepagesize:       2048 kB",
        );
        made.put("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt");
        for library in ["libibverbs.so.1", "librdmacm.so.1", "libibverbs/libmlx5-rdmav34.so"] {
            made.put(&format!("usr/lib/x86_64-linux-gnu/{library}"), "\u{7f}ELF");
        }
        made.put("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance");
        made.put("sys/devices/system/node/node0/distance", "10 21")
            .put("sys/devices/system/node/node1/distance", "21 10");
        for (key, value) in [("arp_ignore", "0"), ("arp_announce", "0"), ("rp_filter", "0")] {
            made.put(&format!("proc/sys/net/ipv4/conf/all/{key}"), value);
        }
        made.net(
            None,
            &Net { name: "lo", kind: 772, mtu: 65536, operstate: "unknown", speed: -1, mode: "", dev_port: 0 },
        );
        made
    }

    /// The function's own directory below `/sys/devices`.
    fn at(pci: &str) -> String {
        format!("sys/devices/pci{}/{pci}", &pci[..7])
    }

    pub fn card(&mut self, card: &Card) -> &mut Self {
        let at = Made::at(card.pci);
        let pci = card.pci;
        self.put(&format!("{at}/vendor"), format!("0x{:04x}", card.ids.0));
        self.put(&format!("{at}/device"), format!("0x{:04x}", card.ids.1));
        self.put(&format!("{at}/class"), card.class);
        self.put(&format!("{at}/numa_node"), card.numa.to_string());
        let (speed, width, max_speed, max_width) = card.link;
        self.put(&format!("{at}/current_link_speed"), speed).put(&format!("{at}/max_link_speed"), max_speed);
        self.put(&format!("{at}/current_link_width"), width.to_string());
        self.put(&format!("{at}/max_link_width"), max_width.to_string());
        self.put(&format!("{at}/uevent"), format!("DRIVER={}\nPCI_SLOT_NAME={pci}", card.driver));
        self.link(&format!("{at}/driver"), &format!("../../../bus/pci/drivers/{}", card.driver));
        self.link(&format!("sys/bus/pci/devices/{pci}"), &format!("../../../devices/pci{}/{pci}", &pci[..7]));
        self
    }

    pub fn rdma(&mut self, pci: Option<&str>, rdma: &Rdma) -> &mut Self {
        let name = rdma.name;
        let at = match pci {
            Some(pci) => format!("{}/infiniband/{name}", Made::at(pci)),
            None => format!("sys/devices/virtual/infiniband/{name}"),
        };
        let class = format!("sys/class/infiniband/{name}");
        self.link(&class, &format!("../../../{at}"));
        if let Some(pci) = pci {
            self.link(&format!("{at}/device"), &format!("../../../{pci}"));
        }
        self.put(&format!("{at}/node_type"), rdma.node_type);
        self.put(&format!("{at}/node_guid"), "b83f:d203:00a1:7e5c");
        self.put(&format!("{at}/fw_ver"), rdma.firmware);
        self.put(&format!("{at}/hca_type"), rdma.hca_type).put(&format!("{at}/board_id"), rdma.board);
        for (i, port) in rdma.ports.iter().enumerate() {
            let at = format!("{at}/ports/{}", i + 1);
            self.put(&format!("{at}/link_layer"), port.layer).put(&format!("{at}/state"), port.state);
            self.put(&format!("{at}/phys_state"), port.phys).put(&format!("{at}/rate"), port.rate);
            self.put(&format!("{at}/lid"), format!("0x{:x}", port.lid));
            self.put(&format!("{at}/sm_lid"), format!("0x{:x}", port.sm_lid));
            self.put(&format!("{at}/cap_mask"), "0xa751e848");
            for slot in 0..port.slots.max(port.gids.len()) {
                let gid = port.gids.get(slot);
                self.put(&format!("{at}/gids/{slot}"), gid.map_or("0000:0000:0000:0000:0000:0000:0000:0000", |g| g.0));
                // Empty entries return EINVAL, like a missing file.
                let Some((_, kind, netdev)) = gid else { continue };
                self.put(&format!("{at}/gid_attrs/types/{slot}"), kind);
                if !netdev.is_empty() {
                    self.put(&format!("{at}/gid_attrs/ndevs/{slot}"), netdev);
                }
            }
            for counter in
                ["symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_xmit_discards"]
            {
                self.put(&format!("{at}/counters/{counter}"), "0");
            }
            for counter in
                ["out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "np_cnp_sent", "rp_cnp_handled"]
            {
                self.put(&format!("{at}/hw_counters/{counter}"), "0");
            }
            self.put(&format!("{at}/hw_counters/lifespan"), "10");
        }
        let number = self.links.keys().filter(|p| p.starts_with("sys/class/infiniband/")).count() - 1;
        self.put(&format!("dev/infiniband/uverbs{number}"), "");
        self.put("dev/infiniband/rdma_cm", "");
        self.put(&format!("sys/class/infiniband_verbs/uverbs{number}/ibdev"), name);
        for port in 1..=rdma.ports.len() {
            let mad =
                self.links.keys().chain(self.files.keys()).filter(|p| p.contains("/umad") && p.ends_with("/ibdev"));
            let next = mad.count();
            for class in ["umad", "issm"] {
                self.put(&format!("sys/class/infiniband_mad/{class}{next}/ibdev"), name);
                self.put(&format!("sys/class/infiniband_mad/{class}{next}/port"), port.to_string());
            }
        }
        self.put("sys/class/misc/rdma_cm/dev", "10:123");
        self
    }

    pub fn net(&mut self, pci: Option<&str>, net: &Net) -> &mut Self {
        let name = net.name;
        let at = match pci {
            Some(pci) => format!("{}/net/{name}", Made::at(pci)),
            None => format!("sys/devices/virtual/net/{name}"),
        };
        self.link(&format!("sys/class/net/{name}"), &format!("../../../{at}"));
        if let Some(pci) = pci {
            self.link(&format!("{at}/device"), &format!("../../../{pci}"));
        }
        self.put(&format!("{at}/type"), net.kind.to_string()).put(&format!("{at}/mtu"), net.mtu.to_string());
        self.put(&format!("{at}/operstate"), net.operstate).put(&format!("{at}/speed"), net.speed.to_string());
        let up = net.operstate != "down";
        self.put(&format!("{at}/flags"), if up { "0x1003" } else { "0x1002" });
        if up {
            self.put(&format!("{at}/carrier"), if net.operstate == "lowerlayerdown" { "0" } else { "1" });
        }
        self.put(&format!("{at}/dev_port"), net.dev_port.to_string()).put(&format!("{at}/dev_id"), "0x0");
        if !net.mode.is_empty() {
            self.put(&format!("{at}/mode"), net.mode);
        }
        self
    }

    /// An Ethernet bond with members.
    pub fn bond(&mut self, name: &'static str, mtu: u32, mode: &str, members: &[(&str, &str)]) -> &mut Self {
        self.net(None, &Net { name, kind: 1, mtu, operstate: "up", speed: 800_000, mode: "", dev_port: 0 });
        let at = format!("sys/devices/virtual/net/{name}");
        self.put(&format!("{at}/bonding/mode"), mode).put(&format!("{at}/bonding/mii_status"), "up");
        self.put(&format!("{at}/bonding/slaves"), members.iter().map(|(_, m)| *m).collect::<Vec<_>>().join(" "));
        for (pci, member) in members {
            let below = format!("{}/net/{member}", Made::at(pci));
            self.link(&format!("{at}/lower_{member}"), &format!("../../../../../{below}"));
            self.link(&format!("{below}/master"), &format!("../../../../../../devices/virtual/net/{name}"));
            self.put(&format!("{below}/bonding_slave/mii_status"), "up");
        }
        self
    }

    /// Addresses as reported by netlink: interface, address, prefix length.
    pub fn addresses(&mut self, list: &[(&str, &str, u8)]) -> &mut Self {
        let addresses: Vec<String> = list
            .iter()
            .map(|(name, ip, prefix)| format!(r#"{{"interface":"{name}","ip":"{ip}","prefix":{prefix}}}"#))
            .collect();
        let v4 = list.iter().filter(|(_, ip, _)| !ip.contains(':'));
        let routes: Vec<String> = v4
            .map(|(name, ip, prefix)| {
                let net = ip.rsplit_once('.').map_or("", |(n, _)| n);
                format!(r#"{{"to":"{net}.0","prefix":{prefix},"interface":"{name}","via":null}}"#)
            })
            .collect();
        let json = format!(
            r#"{{"addresses":[{}],"routes":[{}],"rdma_exclusive":false}}"#,
            addresses.join(","),
            routes.join(",")
        );
        self.put("netlink.json", json)
    }

    /// Lays the host out below a folder.
    pub fn write_to(&self, root: &Path) {
        for (path, bytes) in &self.files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        for (path, target) in &self.links {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(target, path).unwrap();
        }
    }
}

fn port(layer: &'static str, rate: &'static str) -> PortFiles {
    PortFiles { layer, state: "4: ACTIVE", phys: "5: LinkUp", rate, lid: 0, sm_lid: 0, gids: Vec::new(), slots: 0 }
}

fn ib(rate: &'static str, lid: u32) -> PortFiles {
    let gids = vec![("fe80:0000:0000:0000:b83f:d203:00a1:7e5c", "IB/RoCE v1", "")];
    PortFiles { lid, sm_lid: 1, gids, slots: 8, ..port("InfiniBand", rate) }
}

fn roce(rate: &'static str, netdev: &'static str, v4: &'static str) -> PortFiles {
    let own = "fe80:0000:0000:0000:ba3f:d2ff:fea1:7e5c";
    let gids = vec![
        (own, "IB/RoCE v1", netdev),
        (own, "RoCE v2", netdev),
        (v4, "IB/RoCE v1", netdev),
        (v4, "RoCE v2", netdev),
    ];
    PortFiles { gids, slots: 16, ..port("Ethernet", rate) }
}

const IB_CLASS: &str = "0x020700";
const ETH_CLASS: &str = "0x020000";
const STACK: &[&str] = &["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "ib_umad", "ib_ipoib", "mlx5_ib", "mlx5_core"];

fn mlx5(name: &'static str, firmware: &'static str, hca_type: &'static str, board: &'static str, p: PortFiles) -> Rdma {
    Rdma { name, node_type: "1: CA", firmware, hca_type, board, ports: vec![p] }
}

fn ipoib(name: &'static str, mtu: u32, mode: &'static str) -> Net {
    Net { name, kind: 32, mtu, operstate: "up", speed: -1, mode, dev_port: 0 }
}

fn ethernet(name: &'static str, mtu: u32, speed: i32) -> Net {
    Net { name, kind: 1, mtu, operstate: "up", speed, mode: "", dev_port: 0 }
}

/// A RoCE bond: its RDMA device and interface, and the two ports (PCI address, interface) below it.
struct Bond {
    device: &'static str,
    net: &'static str,
    gid: &'static str,
    members: [(&'static str, &'static str); 2],
    numa: i32,
}

/// Four NDR InfiniBand rails, and two RoCE bonds over two ports each, as on a GB200 node.
pub fn gb200() -> Made {
    let mut made = Made::host("gb200-01", STACK);
    let rails: [(&str, &'static str, &'static str, i32); 4] = [
        ("0000:03:00.0", "mlx5_0", "ibp3s0", 0),
        ("0002:03:00.0", "mlx5_1", "ibP2p3s0", 0),
        ("0010:03:00.0", "mlx5_4", "ibP16p3s0", 1),
        ("0012:03:00.0", "mlx5_5", "ibP18p3s0", 1),
    ];
    let card = |pci, class, numa| Card { pci, ids: (0x15b3, 0x1021), class, driver: "mlx5_core", numa, link: GEN5 };
    for (i, (pci, device, net, numa)) in rails.into_iter().enumerate() {
        made.card(&card(pci, IB_CLASS, numa));
        made.rdma(
            Some(pci),
            &mlx5(device, "28.43.2566", "MT4129", "MT_0000000838", ib("400 Gb/sec (4X NDR)", 10 + i as u32)),
        );
        made.net(Some(pci), &ipoib(net, 4092, "datagram"));
    }
    let bonds = [
        Bond {
            device: "mlx5_bond_0",
            net: "bond0",
            gid: "0000:0000:0000:0000:0000:ffff:0a14:0001",
            members: [("0006:03:00.0", "enP6p3s0f0np0"), ("0006:03:00.1", "enP6p3s0f1np1")],
            numa: 0,
        },
        Bond {
            device: "mlx5_bond_1",
            net: "bond1",
            gid: "0000:0000:0000:0000:0000:ffff:0a15:0001",
            members: [("0016:03:00.0", "enP22p3s0f0np0"), ("0016:03:00.1", "enP22p3s0f1np1")],
            numa: 1,
        },
    ];
    for Bond { device, net: bond, gid, members, numa } in bonds {
        for (pci, net) in members {
            made.card(&card(pci, ETH_CLASS, numa));
            made.net(Some(pci), &ethernet(net, 9000, 200_000));
        }
        made.rdma(
            Some(members[0].0),
            &mlx5(device, "28.43.2566", "MT4129", "MT_0000000884", roce("200 Gb/sec (4X HDR)", bond, gid)),
        );
        made.bond(bond, 9000, "802.3ad 4", &members);
    }
    made.addresses(&[
        ("ibp3s0", "10.10.0.1", 24),
        ("ibP2p3s0", "10.10.1.1", 24),
        ("ibP16p3s0", "10.10.2.1", 24),
        ("ibP18p3s0", "10.10.3.1", 24),
        ("bond0", "10.20.0.1", 24),
        ("bond1", "10.21.0.1", 24),
    ]);
    made
}

/// One ConnectX-6 Dx with RoCE and jumbo frames.
pub fn roce_jumbo() -> Made {
    let mut made = Made::host("roce-01", STACK);
    let pci = "0000:41:00.0";
    made.card(&Card { pci, ids: (0x15b3, 0x101d), class: ETH_CLASS, driver: "mlx5_core", numa: 1, link: GEN4 });
    let port = roce("100 Gb/sec (4X EDR)", "ens1f0np0", "0000:0000:0000:0000:0000:ffff:c0a8:0a0b");
    made.rdma(Some(pci), &mlx5("mlx5_0", "22.39.2048", "MT4125", "MT_0000000359", port));
    made.net(Some(pci), &ethernet("ens1f0np0", 9000, 100_000));
    made.addresses(&[("ens1f0np0", "192.168.10.11", 24)]);
    made
}

/// A ConnectX-6 VPI card whose second port runs Ethernet.
pub fn vpi_ethernet() -> Made {
    let mut made = Made::host("vpi-01", STACK);
    let card = |pci, class| Card { pci, ids: (0x15b3, 0x101b), class, driver: "mlx5_core", numa: 0, link: GEN4 };
    made.card(&card("0000:17:00.0", IB_CLASS)).card(&card("0000:17:00.1", ETH_CLASS));
    made.rdma(
        Some("0000:17:00.0"),
        &mlx5("mlx5_0", "20.39.1002", "MT4123", "MT_0000000228", ib("200 Gb/sec (4X HDR)", 4)),
    );
    let port = roce("100 Gb/sec (4X EDR)", "ens2f1np1", "0000:0000:0000:0000:0000:ffff:c0a8:0b0b");
    made.rdma(Some("0000:17:00.1"), &mlx5("mlx5_1", "20.39.1002", "MT4123", "MT_0000000228", port));
    made.net(Some("0000:17:00.0"), &ipoib("ib0", 2044, "datagram"));
    made.net(Some("0000:17:00.1"), &ethernet("ens2f1np1", 1500, 100_000));
    made.addresses(&[("ib0", "10.1.0.1", 24), ("ens2f1np1", "192.168.11.11", 24)]);
    made
}

/// A cloud machine: a ConnectX virtual function with IPoIB in datagram mode, no NUMA, MTU 9000 wanted by netplan's
/// networkd file.
pub fn cloud_ipoib() -> Made {
    let mut made = Made::host("cloud-01", STACK);
    let pci = "0101:00:00.0";
    made.card(&Card {
        pci,
        ids: (0x15b3, 0x101c),
        class: IB_CLASS,
        driver: "mlx5_core",
        numa: -1,
        link: ("Unknown", 0, "Unknown", 255),
    });
    made.rdma(Some(pci), &mlx5("mlx5_ib0", "20.31.1014", "MT4124", "MT_0000000010", ib("200 Gb/sec (4X HDR)", 731)));
    made.net(Some(pci), &ipoib("ib0", 2044, "datagram"));
    made.put(
        "etc/systemd/network/10-ib0.network",
        "[Match]\nName=ib0\n\n[Link]\nMTUBytes=9000\n\n[Network]\nAddress=172.16.1.7/16",
    );
    made.addresses(&[("ib0", "172.16.1.7", 16)]);
    made
}

/// An InfiniHost III with one cable: the second port polls.
pub fn mt25208() -> Made {
    let mut made =
        Made::host("old-01", &["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "ib_umad", "ib_ipoib", "ib_mthca"]);
    let pci = "0000:05:00.0";
    made.card(&Card { pci, ids: (0x15b3, 0x6282), class: "0x0c0600", driver: "ib_mthca", numa: -1, link: GEN1 });
    let up = PortFiles { lid: 2, ..ib("20 Gb/sec (4X DDR)", 2) };
    let polling =
        PortFiles { state: "1: DOWN", phys: "2: Polling", rate: "10 Gb/sec (4X)", lid: 0, sm_lid: 0, ..ib("", 0) };
    made.rdma(
        Some(pci),
        &Rdma {
            name: "mthca0",
            node_type: "1: CA",
            firmware: "5.1.400",
            hca_type: "MT25208",
            board: "MT_0150000001",
            ports: vec![up, polling],
        },
    );
    made.net(Some(pci), &ipoib("ib0", 2044, "datagram"));
    made.net(Some(pci), &Net { dev_port: 1, operstate: "down", ..ipoib("ib1", 4092, "datagram") });
    made.addresses(&[("ib0", "10.0.0.1", 24)]);
    made.put("usr/lib/x86_64-linux-gnu/libibverbs/libmthca-rdmav34.so", "\u{7f}ELF");
    made
}

/// The same card with a cable, and no subnet manager.
pub fn no_sm() -> Made {
    let mut made = mt25208();
    let at = format!("{}/infiniband/mthca0/ports/1", Made::at("0000:05:00.0"));
    made.put(&format!("{at}/state"), "2: INIT");
    made.put(&format!("{at}/sm_lid"), "0x0").put(&format!("{at}/lid"), "0x0");
    made
}

/// Soft-RoCE on an Ethernet card.
pub fn soft_roce() -> Made {
    let mut made = Made::host("rxe-01", &["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "rdma_rxe"]);
    let port = PortFiles { rate: "2.5 Gb/sec (1X SDR)", ..roce("", "eth9", "0000:0000:0000:0000:0000:ffff:0a09:0001") };
    made.rdma(
        None,
        &Rdma { name: "rxe0", node_type: "1: CA", firmware: "", hca_type: "", board: "", ports: vec![port] },
    );
    made.put("sys/devices/virtual/infiniband/rxe0/parent", "eth9");
    made.remove("sys/devices/virtual/infiniband/rxe0/ports/1/counters");
    made.net(None, &ethernet("eth9", 1500, -1));
    made.addresses(&[("eth9", "10.9.0.1", 24)]);
    made.put("usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so", "\u{7f}ELF");
    made
}

/// Two ports of an E810, one as iWARP and one as RoCE.
pub fn e810() -> Made {
    let mut made = Made::host("e810-01", &["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "irdma", "ice"]);
    let card = |pci| Card { pci, ids: (0x8086, 0x1592), class: ETH_CLASS, driver: "ice", numa: 0, link: GEN4 };
    made.card(&card("0000:98:00.0")).card(&card("0000:98:00.1"));
    let iwarp = PortFiles {
        gids: vec![("6805:caa3:7a4c:0000:0000:0000:0000:0000", "IB/RoCE v1", "ens3f0")],
        ..port("Ethernet", "100 Gb/sec (4X EDR)")
    };
    made.rdma(
        Some("0000:98:00.0"),
        &Rdma { name: "irdma0", node_type: "4: RNIC", firmware: "1.69", hca_type: "", board: "", ports: vec![iwarp] },
    );
    let mut two = roce("100 Gb/sec (4X EDR)", "ens3f1", "0000:0000:0000:0000:0000:ffff:0a38:0002");
    two.gids.retain(|g| g.1 == "RoCE v2");
    made.rdma(
        Some("0000:98:00.1"),
        &Rdma { name: "irdma1", node_type: "1: CA", firmware: "1.69", hca_type: "", board: "", ports: vec![two] },
    );
    made.net(Some("0000:98:00.0"), &ethernet("ens3f0", 9000, 100_000));
    made.net(Some("0000:98:00.1"), &ethernet("ens3f1", 9000, 100_000));
    made.addresses(&[("ens3f0", "10.56.0.2", 24), ("ens3f1", "10.57.0.2", 24)]);
    made.put("usr/lib/x86_64-linux-gnu/libibverbs/libirdma-rdmav34.so", "\u{7f}ELF");
    made
}

/// An instance with two EFA devices beside the ordinary interface.
pub fn efa() -> Made {
    let mut made = Made::host("efa-01", &["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "efa", "ena"]);
    for (pci, name) in [("0000:00:1b.0", "rdmap0s27"), ("0000:00:1c.0", "rdmap0s28")] {
        made.card(&Card {
            pci,
            ids: (0x1d0f, 0xefa1),
            class: ETH_CLASS,
            driver: "efa",
            numa: 0,
            link: ("Unknown", 0, "Unknown", 255),
        });
        let gids = vec![("fe80:0000:0000:0000:0c4f:acff:fe1d:3b0f", "IB/RoCE v1", "")];
        let port = PortFiles { gids, slots: 1, ..port("Unknown", "100 Gb/sec (4X EDR)") };
        made.rdma(
            Some(pci),
            &Rdma { name, node_type: "7: <unknown>", firmware: "", hca_type: "", board: "", ports: vec![port] },
        );
    }
    made.net(Some("0000:00:05.0"), &ethernet("ens5", 9001, -1));
    made.addresses(&[("ens5", "172.31.4.9", 20)]);
    made.put("usr/lib/x86_64-linux-gnu/libibverbs/libefa-rdmav34.so", "\u{7f}ELF");
    made
}

/// An Alibaba instance with eRDMA on the second interface.
pub fn erdma() -> Made {
    let mut made = Made::host("erdma-01", &["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "erdma", "virtio_net"]);
    let pci = "0000:00:07.0";
    made.card(&Card {
        pci,
        ids: (0x1ded, 0x107f),
        class: "0x020000",
        driver: "erdma",
        numa: -1,
        link: ("Unknown", 0, "Unknown", 255),
    });
    let iwarp = PortFiles {
        gids: vec![("0016:3e2a:9b4c:0000:0000:0000:0000:0000", "IB/RoCE v1", "eth1")],
        ..port("Ethernet", "100 Gb/sec (4X EDR)")
    };
    made.rdma(
        Some(pci),
        &Rdma { name: "erdma_0", node_type: "4: RNIC", firmware: "0.1.0", hca_type: "", board: "", ports: vec![iwarp] },
    );
    made.net(Some("0000:00:06.0"), &ethernet("eth1", 1500, -1));
    made.addresses(&[("eth1", "172.16.20.5", 24)]);
    made.put("usr/lib64/libibverbs/liberdma-rdmav34.so", "\u{7f}ELF");
    made
}

/// An active-backup bond over two RoCE cards, the first of them active.
pub fn bond_of_two_cards() -> Made {
    let mut made = Made::host("bond-01", STACK);
    let members = [("0000:18:00.0", "ens1f0"), ("0000:3b:00.0", "ens2f0")];
    for ((pci, net), device) in members.into_iter().zip(["mlx5_1", "mlx5_3"]) {
        made.card(&Card { pci, ids: (0x15b3, 0x1017), class: ETH_CLASS, driver: "mlx5_core", numa: 0, link: GEN3 });
        let mut port = roce("100 Gb/sec (4X EDR)", net, "0000:0000:0000:0000:0000:ffff:0a0a:0a01");
        port.gids.truncate(2);
        if device == "mlx5_1" {
            let address = "0000:0000:0000:0000:0000:ffff:0a0a:0a01";
            port.gids.extend([(address, "IB/RoCE v1", "bond0"), (address, "RoCE v2", "bond0")]);
        }
        made.rdma(Some(pci), &mlx5(device, "16.35.2000", "MT4119", "MT_0000000012", port));
        made.net(Some(pci), &ethernet(net, 9000, 100_000));
    }
    made.bond("bond0", 9000, "active-backup 1", &members);
    made.put("sys/devices/virtual/net/bond0/bonding/active_slave", "ens1f0");
    made.addresses(&[("bond0", "10.10.10.1", 24)]);
    made
}

/// An active-backup bond over two InfiniBand cards.
pub fn ipoib_bond() -> Made {
    let mut made = Made::host("ibbond-01", STACK);
    let members = [("0000:17:00.0", "ib0"), ("0000:ca:00.0", "ib1")];
    for ((pci, net), device) in members.into_iter().zip(["mlx5_0", "mlx5_1"]) {
        made.card(&Card { pci, ids: (0x15b3, 0x101b), class: IB_CLASS, driver: "mlx5_core", numa: 0, link: GEN4 });
        made.rdma(Some(pci), &mlx5(device, "20.35.1012", "MT4123", "MT_0000000223", ib("200 Gb/sec (4X HDR)", 7)));
        made.net(Some(pci), &ipoib(net, 2044, "datagram"));
    }
    made.bond("bond-ib", 2044, "active-backup 1", &members);
    let at = "sys/devices/virtual/net/bond-ib";
    made.put(&format!("{at}/type"), "32").put(&format!("{at}/bonding/active_slave"), "ib0");
    made.addresses(&[("bond-ib", "10.44.0.1", 24)]);
    made
}

/// Omni-Path with accelerated IPoIB.
pub fn omni_path() -> Made {
    let modules = ["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "ib_umad", "ib_ipoib", "hfi1"];
    let mut made = Made::host("opa-01", &modules);
    made.put("proc/sys/kernel/osrelease", "5.14.0-427.el9.x86_64");
    let pci = "0000:5e:00.0";
    made.card(&Card { pci, ids: (0x8086, 0x24f0), class: "0x020800", driver: "hfi1", numa: 0, link: GEN3 });
    made.rdma(
        Some(pci),
        &Rdma {
            name: "hfi1_0",
            node_type: "1: CA",
            firmware: "",
            hca_type: "",
            board: "Intel Omni-Path Host Fabric Interface Adapter 100 Series",
            ports: vec![ib("100 Gb/sec (4X EDR)", 3)],
        },
    );
    made.net(Some(pci), &ipoib("ibp94s0", 10236, "datagram"));
    made.addresses(&[("ibp94s0", "172.31.20.15", 24)]);
    made.put("usr/lib/x86_64-linux-gnu/libibverbs/libhfi1verbs-rdmav34.so", "\u{7f}ELF");
    made
}

/// An InfiniBand card, and a virtual function of the card that is up.
pub fn ib_virtual_function() -> Made {
    let mut made = Made::host("vf-01", STACK);
    let card =
        |pci, device, link| Card { pci, ids: (0x15b3, device), class: IB_CLASS, driver: "mlx5_core", numa: 0, link };
    made.card(&card("0000:61:00.0", 0x101b, GEN4));
    made.card(&card("0000:61:00.1", 0x101c, ("unknown", 0, "unknown", 0)));
    let physical = Made::at("0000:61:00.0");
    made.put(&format!("{physical}/sriov/0/policy"), "Follow");
    made.put(&format!("{physical}/sriov_numvfs"), "1").put(&format!("{physical}/sriov_totalvfs"), "8");
    made.link(&format!("{physical}/virtfn0"), "../0000:61:00.1");
    made.link(&format!("{}/physfn", Made::at("0000:61:00.1")), "../0000:61:00.0");
    for (pci, device, net) in [("0000:61:00.0", "mlx5_0", "ibp97s0"), ("0000:61:00.1", "mlx5_1", "ibp97s0v0")] {
        made.rdma(Some(pci), &mlx5(device, "20.35.1012", "MT4123", "MT_0000000223", ib("200 Gb/sec (4X HDR)", 3)));
        made.net(Some(pci), &ipoib(net, 4092, "datagram"));
    }
    made.addresses(&[("ibp97s0", "10.70.0.1", 24), ("ibp97s0v0", "10.71.0.1", 24)]);
    made
}

/// A soldered card with a part of the lanes in each of two PCI domains: two functions of one port.
pub fn gb10() -> Made {
    let mut made = Made::host("gb10-01", STACK);
    let link = ("32.0 GT/s PCIe", 4, "32.0 GT/s PCIe", 16);
    let functions = [
        ("0000:01:00.0", "rocep1s0f0", "enp1s0f0np0", "0000:0000:0000:0000:0000:ffff:c0a8:640a"),
        ("0002:01:00.0", "roceP2p1s0f0", "enP2p1s0f0np0", "0000:0000:0000:0000:0000:ffff:c0a8:650a"),
    ];
    for (pci, device, net, address) in functions {
        made.card(&Card { pci, ids: (0x15b3, 0x1021), class: ETH_CLASS, driver: "mlx5_core", numa: -1, link });
        let port = roce("200 Gb/sec (4X HDR)", net, address);
        made.rdma(Some(pci), &mlx5(device, "28.45.4028", "MT4129", "NVD0000000087", port));
        made.net(Some(pci), &ethernet(net, 9000, 200_000));
    }
    made.addresses(&[("enp1s0f0np0", "192.168.100.10", 24), ("enP2p1s0f0np0", "192.168.101.10", 24)]);
    made
}

/// An on-board function with iWARP, whose driver makes up a rate and whose PCI link is none.
pub fn on_board_iwarp() -> Made {
    let mut made = Made::host("x722-01", &["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "i40iw", "i40e"]);
    let pci = "0000:09:00.0";
    let link = ("2.5 GT/s", 1, "2.5 GT/s", 1);
    made.card(&Card { pci, ids: (0x8086, 0x37d2), class: ETH_CLASS, driver: "i40e", numa: 0, link });
    let gids = vec![("3ce1:a1fb:4c00:0000:0000:0000:0000:0000", "IB/RoCE v1", "")];
    let port = PortFiles { gids, ..port("Ethernet", "40 Gb/sec (4X QDR)") };
    made.rdma(
        Some(pci),
        &Rdma {
            name: "i40iw0",
            node_type: "4: RNIC",
            firmware: "0.2",
            hca_type: "I40IW",
            board: "",
            ports: vec![port],
        },
    );
    made.net(Some(pci), &ethernet("eno1", 9000, 10_000));
    made.addresses(&[("eno1", "10.1.1.5", 24)]);
    made.put("usr/lib/x86_64-linux-gnu/libibverbs/libirdma-rdmav34.so", "\u{7f}ELF");
    made
}

/// A ConnectX-8 in four planes over RoCE: of twelve ports each third carries data, with an interface and an address for each.
pub fn planes() -> Made {
    let mut made = Made::host("planes-01", STACK);
    made.put("proc/sys/kernel/osrelease", "6.14.0-1007-nvidia");
    let pci = "0000:03:00.0";
    made.card(&Card { pci, ids: (0x15b3, 0x1023), class: ETH_CLASS, driver: "mlx5_core", numa: 0, link: GEN6 });
    let data: [(u32, &'static str, &'static str, &'static str); 4] = [
        (3, "eth_p0", "0000:0000:0000:0000:0000:ffff:0a01:0107", "10.1.1.7"),
        (6, "eth_p1", "0000:0000:0000:0000:0000:ffff:0a01:0207", "10.1.2.7"),
        (9, "eth_p2", "0000:0000:0000:0000:0000:ffff:0a01:0307", "10.1.3.7"),
        (12, "eth_p3", "0000:0000:0000:0000:0000:ffff:0a01:0407", "10.1.4.7"),
    ];
    let unused =
        PortFiles { state: "1: DOWN", phys: "3: Disabled", slots: 16, ..port("Ethernet", "40 Gb/sec (4X QDR)") };
    let mut ports = vec![unused; 12];
    for (number, net, gid, _) in data {
        ports[number as usize - 1] = roce("200 Gb/sec (2X NDR)", net, gid);
        made.net(Some(pci), &Net { dev_port: number / 3 - 1, ..ethernet(net, 9000, 200_000) });
    }
    let device = mlx5("mlx5_0", "40.45.3048", "MT4131", "MT_0000001222", port("", ""));
    made.rdma(Some(pci), &Rdma { ports, ..device });
    made.addresses(&data.map(|(_, net, _, address)| (net, address, 24)));
    made
}

/// An InfiniBand card of 800 Gb/s, whose four planes have a device of type SMI: without verbs, LID and interface.
pub fn xdr() -> Made {
    let mut made = Made::host("xdr-01", STACK);
    made.put("proc/sys/kernel/osrelease", "6.14.0-1007-nvidia");
    let pci = "0000:03:00.0";
    made.card(&Card { pci, ids: (0x15b3, 0x1023), class: IB_CLASS, driver: "mlx5_core", numa: 0, link: GEN6 });
    made.rdma(Some(pci), &mlx5("mlx5_0", "40.45.3048", "MT4131", "MT_0000001222", ib("800 Gb/sec (4X XDR)", 10)));
    let plane = PortFiles { sm_lid: 0, slots: 1, ..ib("200 Gb/sec (1X XDR)", 0) };
    let device = mlx5("smi0", "40.45.3048", "MT4131", "MT_0000001222", plane.clone());
    made.rdma(Some(pci), &Rdma { ports: vec![plane; 4], ..device });
    made.remove("dev/infiniband/uverbs1").remove("sys/class/infiniband_verbs/uverbs1");
    made.net(Some(pci), &ipoib("ibp3s0", 4092, "datagram"));
    made.addresses(&[("ibp3s0", "10.9.0.2", 24)]);
    made
}

/// A RoCE card with three virtual functions that wait for pods: two with the card's driver, one without a driver.
pub fn roce_virtual_functions() -> Made {
    let mut made = roce_jumbo();
    made.put("proc/sys/kernel/hostname", "sriov-01");
    let physical = Made::at("0000:41:00.0");
    made.put(&format!("{physical}/sriov_numvfs"), "3").put(&format!("{physical}/sriov_totalvfs"), "8");
    let functions: [(&'static str, &'static str, &'static str); 3] =
        [("0000:41:00.2", "mlx5_1", "ens1f0v0"), ("0000:41:00.3", "mlx5_2", "ens1f0v1"), ("0000:41:00.4", "", "")];
    for (number, (pci, device, net)) in functions.into_iter().enumerate() {
        let link = ("Unknown", 0, "Unknown", 0);
        made.card(&Card { pci, ids: (0x15b3, 0x101e), class: ETH_CLASS, driver: "mlx5_core", numa: 1, link });
        made.link(&format!("{physical}/virtfn{number}"), &format!("../{pci}"));
        made.link(&format!("{}/physfn", Made::at(pci)), "../0000:41:00.0");
        if device.is_empty() {
            made.put(&format!("{}/uevent", Made::at(pci)), format!("PCI_SLOT_NAME={pci}"));
            made.remove(&format!("{}/driver", Made::at(pci)));
            continue;
        }
        let mut port = roce("100 Gb/sec (2X HDR)", net, "");
        port.gids.truncate(2);
        made.rdma(Some(pci), &mlx5(device, "22.39.2048", "MT4126", "MT_0000000359", port));
        made.net(Some(pci), &ethernet(net, 1500, 100_000));
    }
    let down = format!("{}/infiniband/mlx5_2/ports/1", Made::at("0000:41:00.3"));
    made.put(&format!("{down}/state"), "1: DOWN").put(&format!("{down}/phys_state"), "3: Disabled");
    made.addresses(&[("ens1f0np0", "192.168.10.11", 24), ("ens1f0v0", "fe80::b83f:d2ff:fea1:1", 64)]);
    made
}

/// A host that has never heard of RDMA.
pub fn plain() -> Made {
    let mut made = Made::host("plain-01", &["virtio_net"]);
    made.net(Some("0000:00:03.0"), &ethernet("eth0", 1500, -1));
    made.addresses(&[("eth0", "10.0.2.15", 24)]);
    made.remove("usr/lib");
    made
}

/// All of them, with their names.
pub fn all() -> Vec<(&'static str, Made)> {
    vec![
        ("gb200", gb200()),
        ("roce_jumbo", roce_jumbo()),
        ("vpi_ethernet", vpi_ethernet()),
        ("cloud_ipoib", cloud_ipoib()),
        ("mt25208", mt25208()),
        ("no_sm", no_sm()),
        ("soft_roce", soft_roce()),
        ("e810", e810()),
        ("efa", efa()),
        ("erdma", erdma()),
        ("bond_of_two_cards", bond_of_two_cards()),
        ("ipoib_bond", ipoib_bond()),
        ("omni_path", omni_path()),
        ("ib_virtual_function", ib_virtual_function()),
        ("gb10", gb10()),
        ("on_board_iwarp", on_board_iwarp()),
        ("planes", planes()),
        ("xdr", xdr()),
        ("roce_virtual_functions", roce_virtual_functions()),
        ("plain", plain()),
    ]
}

/// The hosts of the facts in docs/samples, by file name.
pub fn samples() -> [(&'static str, Made); 2] {
    [("gpu-node.tar.zst", gb200()), ("faulty-node.tar.zst", faulty())]
}

/// A node with an InfiniBand rail that works, another without a cable, and two RoCE interfaces in one subnet, one with a small MTU.
pub fn faulty() -> Made {
    let mut made = gb200();
    made.put("proc/sys/kernel/hostname", "faulty-01");
    let polling = format!("{}/infiniband/mlx5_1/ports/1", Made::at("0002:03:00.0"));
    made.put(&format!("{polling}/state"), "1: DOWN").put(&format!("{polling}/phys_state"), "2: Polling");
    made.put(&format!("{polling}/rate"), "10 Gb/sec (4X SDR)").put(&format!("{polling}/sm_lid"), "0x0");
    let narrow = format!("{}/infiniband/mlx5_4/ports/1", Made::at("0010:03:00.0"));
    made.put(&format!("{narrow}/rate"), "100 Gb/sec (1X NDR)");
    made.put(&format!("{narrow}/counters/symbol_error"), "8734");
    made.put("sys/devices/virtual/net/bond1/mtu", "1500");
    let limits = "Max open files            1024                 4096                 files\nMax locked memory         8388608              8388608              bytes";
    made.put("proc/self/limits", limits).put("proc/self/status", "CapEff:\t0000000000000000");
    made.addresses(&[
        ("ibp3s0", "10.10.0.1", 24),
        ("ibP2p3s0", "10.10.1.1", 24),
        ("ibP16p3s0", "10.10.2.1", 24),
        ("bond0", "10.20.0.1", 24),
        ("bond1", "10.20.0.2", 24),
    ]);
    made
}

/// Sixteen RoCE devices whose tables of 256 addresses are full.
pub fn large() -> Made {
    let mut made = Made::host("large-01", STACK);
    for i in 0..16usize {
        let leak = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
        let (pci, name, net) =
            (leak(format!("0000:{:02x}:00.0", 16 + i)), leak(format!("mlx5_{i}")), leak(format!("eth{i}")));
        made.card(&Card {
            pci,
            ids: (0x15b3, 0x1021),
            class: ETH_CLASS,
            driver: "mlx5_core",
            numa: (i / 8) as i32,
            link: GEN5,
        });
        let gids = (0..256).map(|n| {
            let address = leak(format!("0000:0000:0000:0000:0000:ffff:0a{:02x}:{:04x}", i, 1 + n / 2));
            (address, if n % 2 == 0 { "IB/RoCE v1" } else { "RoCE v2" }, net)
        });
        let port = PortFiles { gids: gids.collect(), slots: 256, ..port("Ethernet", "400 Gb/sec (4X NDR)") };
        made.rdma(Some(pci), &mlx5(name, "28.43.2566", "MT4129", "MT_0000000838", port));
        made.net(Some(pci), &ethernet(net, 9000, 400_000));
    }
    made
}
