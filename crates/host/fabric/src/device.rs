//! RDMA devices and ports, from `/sys/class/infiniband`. Knows no addresses and judges nothing.

use crate::model::{self, DeviceModel};
use crate::netlink::ManagementDevice;
use crate::tree::{HostTree, parse_number};
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

const RDMA_CLASS_DIR: &str = "sys/class/infiniband";
const VERBS_CLASS_DIR: &str = "sys/class/infiniband_verbs";
/// The most ports of a card without planes.
const MAX_PLAIN_PORTS: usize = 2;
/// The permissive LID. A port that no subnet manager has configured may show this LID.
const PERMISSIVE_LID: u32 = 0xffff;
/// The link of an on-board function: 2.5 GT/s, in tenths, and a single lane. Such a function has no real link, and no RDMA card
/// is built with so slow a link.
const ON_BOARD_LINK_TENTHS_GTS: u32 = 25;
const ON_BOARD_LINK_LANES: u32 = 1;

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RdmaDevice {
    /// The name, `mlx5_0`.
    #[serde(rename = "device")]
    pub name: String,
    /// The kernel's node type: `CA` for InfiniBand and RoCE, `RNIC` for iWARP, or another text.
    pub node_type: Option<String>,
    /// Node GUID as written by the kernel, `0c42:a103:00b5:7a2c`.
    pub node_guid: Option<String>,
    /// Firmware version; `None` where the driver reports an empty version.
    pub firmware: Option<String>,
    /// `ib`, `roce` or `iw`, where reported by netlink.
    pub protocol: Option<String>,
    /// Adapter type of the driver, `MT4129`.
    pub hca_type: Option<String>,
    /// Board id (PSID), `MT_0000000838`.
    pub board_id: Option<String>,
    /// The network interface below a software device.
    pub parent: Option<String>,
    /// The PCI function; `None` for a software device.
    pub pci: Option<PciFunction>,
    /// Network interfaces of the same PCI function, on any port.
    #[serde(skip)]
    pub function_netdevs: Vec<String>,
    /// The ports, by number.
    pub ports: Vec<DevicePort>,
    /// Type of service that rdma_cm sets on RoCE connections, where shown by the kernel.
    pub roce_tos: Option<i64>,
    /// Traffic class forced by the driver, where shown.
    pub traffic_class: Option<String>,
}

impl RdmaDevice {
    /// Whether the device is an Omni-Path adapter, whose link layer is shown as InfiniBand, and whose fabric has another manager,
    /// other tools and other limits.
    pub fn is_omni_path(&self) -> bool {
        let driver = self.pci.as_ref().and_then(|pci| pci.driver.as_deref());
        driver == Some("hfi1") || self.name.starts_with("hfi1_")
    }

    /// Whether the device speaks iWARP.
    pub fn is_iwarp(&self) -> bool {
        self.protocol.as_deref() == Some("iw") || self.node_type.as_deref() == Some("RNIC")
    }

    /// Whether the device is an Elastic Fabric Adapter.
    pub fn is_efa(&self) -> bool {
        self.pci.as_ref().and_then(|pci| pci.driver.as_deref()) == Some("efa")
    }

    /// The number of planes that share the rate of the card: a port for each, among many unused ports.
    pub fn count_planes(&self) -> usize {
        if self.ports.len() <= MAX_PLAIN_PORTS {
            return 1;
        }
        let used = self.ports.iter().filter(|port| port.state == PortState::Active || !port.netdevs.is_empty());
        used.count().max(1)
    }

    /// Whether a card shows the port and does not use it: no address, no interface, and other ports are active.
    pub fn leaves_unused(&self, port: &DevicePort) -> bool {
        let has_active = self.ports.iter().any(|other| other.state == PortState::Active);
        port.state == PortState::Down && port.gids.is_empty() && port.netdevs.is_empty() && has_active
    }

    /// Whether the device is a virtual function.
    pub fn is_virtual(&self) -> bool {
        let pci = self.pci.as_ref();
        pci.is_some_and(|pci| pci.physical.is_some() || pci.model().is_some_and(|model| model.is_virtual))
    }

    /// Whether the node GUID is shown and zero.
    pub fn has_zero_guid(&self) -> bool {
        self.node_guid.as_deref().is_some_and(|guid| guid.bytes().all(|byte| matches!(byte, b'0' | b':')))
    }

    /// Whether the device's folder has no readable file.
    pub fn is_bare(&self) -> bool {
        self.node_type.is_none() && self.node_guid.is_none() && self.ports.is_empty()
    }
}

/// A PCI function.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PciFunction {
    /// `0000:17:00.0`.
    pub address: Option<String>,
    /// Vendor id.
    pub vendor: Option<u16>,
    /// Device id.
    pub device: Option<u16>,
    /// The model name for these ids.
    pub known_model: Option<&'static str>,
    /// The bound driver.
    pub driver: Option<String>,
    /// NUMA node; `None` where the machine has a single node or does not report nodes.
    pub numa_node: Option<u32>,
    /// Current transfer rate of the link, in tenths of GT/s.
    pub speed: Option<u32>,
    /// The card's highest transfer rate, in the same unit.
    pub max_speed: Option<u32>,
    /// Current number of lanes.
    pub width: Option<u32>,
    /// The card's number of lanes.
    pub max_width: Option<u32>,
    /// Virtual functions: configured, and the maximum.
    pub virtual_functions: Option<(u32, u32)>,
    /// The physical function's address, when this function is virtual.
    pub physical: Option<String>,
}

/// A port of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DevicePort {
    /// The number, from 1.
    #[serde(rename = "port")]
    pub number: u32,
    /// InfiniBand or Ethernet.
    pub link_layer: LinkLayer,
    /// Logical state.
    pub state: PortState,
    /// Physical state.
    pub phys_state: PhysState,
    /// Rate and width.
    pub rate: Option<PortRate>,
    /// LID: the port's address on an InfiniBand fabric; 0 for none.
    pub lid: Option<u32>,
    /// LID of the subnet manager; 0 means that none has configured the port.
    pub sm_lid: Option<u32>,
    /// The kernel's capability mask.
    pub cap_mask: Option<i64>,
    /// GID table without empty entries.
    pub gids: Vec<PortGid>,
    /// Network interfaces on this port, the port's own first.
    pub netdevs: Vec<String>,
    /// Non-zero counters of `counters` and `hw_counters`.
    pub counters: BTreeMap<String, u64>,
    /// Names of the counters that are in `hw_counters`.
    #[serde(skip)]
    pub hw_counters: BTreeSet<String>,
}

impl DevicePort {
    /// Whether a counter has reached the maximum: there is no further growth, so the number of events is unknown.
    pub fn is_saturated(&self, counter: &str) -> bool {
        let end = last_count(counter);
        end.is_some() && self.counters.get(counter).copied() == end
    }
}

/// The value at which a counter of InfiniBand's attribute PortCounters ends (InfiniBand specification, 16.1.3.5); `None` for
/// other counters.
fn last_count(counter: &str) -> Option<u64> {
    let bits = match counter {
        "local_link_integrity_errors" | "excessive_buffer_overrun_errors" => 4,
        "link_error_recovery" | "link_downed" | "port_xmit_constraint_errors" | "port_rcv_constraint_errors" => 8,
        "symbol_error"
        | "port_rcv_errors"
        | "port_rcv_remote_physical_errors"
        | "port_rcv_switch_relay_errors"
        | "port_xmit_discards"
        | "VL15_dropped" => 16,
        "port_xmit_wait" | "port_xmit_data" | "port_rcv_data" | "port_xmit_packets" | "port_rcv_packets" => 32,
        _ => return None,
    };
    Some((1 << bits) - 1)
}

/// The link layer of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// Something else, or not shown (EFA).
    #[default]
    Unknown,
}

/// Logical state of a port, by number in the InfiniBand specification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PortState {
    /// Not shown, or an unknown number.
    #[default]
    Unknown,
    /// 1.
    Down,
    /// 2: the link is up, and no subnet manager has configured the port.
    Init,
    /// 3: a subnet manager is configuring the port.
    Armed,
    /// 4.
    Active,
    /// 5.
    ActiveDefer,
}

/// Physical state of a port, by number in the InfiniBand specification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PhysState {
    /// Not shown, or an unknown number.
    #[default]
    Unknown,
    /// 1.
    Sleep,
    /// 2: searching for a link partner.
    Polling,
    /// 3.
    Disabled,
    /// 4.
    Training,
    /// 5.
    LinkUp,
    /// 6.
    ErrorRecovery,
    /// 7.
    PhyTest,
}

/// `400 Gb/sec (4X NDR)`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PortRate {
    /// Gigabits per second.
    pub gbps: f64,
    /// Lanes; 0 when not shown.
    pub lanes: u32,
    /// `SDR` to `XDR`; empty when not shown.
    pub speed: String,
    /// The interface whose speed this is, where the driver's own figure contradicts the interface.
    #[serde(skip)]
    pub interface: Option<String>,
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PortGid {
    /// The index in the table.
    pub index: u32,
    /// The address.
    pub address: Ipv6Addr,
    /// The type.
    pub kind: GidType,
    /// The network interface behind.
    pub netdev: Option<String>,
}

/// The type of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum GidType {
    /// InfiniBand.
    #[serde(rename = "IB")]
    Ib,
    /// RoCE without IP: not routable.
    #[serde(rename = "RoCE v1")]
    RoceV1,
    /// RoCE over UDP.
    #[serde(rename = "RoCE v2")]
    RoceV2,
    /// Not shown.
    #[serde(rename = "unknown")]
    Unknown,
}

impl PortGid {
    /// The IP address of a RoCE v2 entry: the mapped IPv4 address, or the IPv6 address.
    pub fn ip_address(&self) -> IpAddr {
        self.address.to_ipv4_mapped().map_or(IpAddr::V6(self.address), IpAddr::V4)
    }

    /// Whether a router forwards packets to this address: RoCE v2, and not link-local.
    pub fn is_routable(&self) -> bool {
        let link_local = match self.ip_address() {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        self.kind == GidType::RoceV2 && !link_local
    }
}

impl fmt::Display for GidType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidType::Ib => "IB",
            GidType::RoceV1 => "RoCE v1",
            GidType::RoceV2 => "RoCE v2",
            GidType::Unknown => "-",
        })
    }
}

impl fmt::Display for PortGid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GID {} {}", self.index, self.address)
    }
}

impl Serialize for PortState {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

impl PortState {
    fn from_sysfs(text: &str) -> Self {
        match leading_number(text) {
            Some(1) => PortState::Down,
            Some(2) => PortState::Init,
            Some(3) => PortState::Armed,
            Some(4) => PortState::Active,
            Some(5) => PortState::ActiveDefer,
            _ => PortState::Unknown,
        }
    }

    /// The usual name of the state.
    pub fn as_str(self) -> &'static str {
        match self {
            PortState::Unknown => "?",
            PortState::Down => "DOWN",
            PortState::Init => "INIT",
            PortState::Armed => "ARMED",
            PortState::Active => "ACTIVE",
            PortState::ActiveDefer => "ACTIVE_DEFER",
        }
    }
}

impl Serialize for PhysState {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

impl PhysState {
    fn from_sysfs(text: &str) -> Self {
        match leading_number(text) {
            Some(1) => PhysState::Sleep,
            Some(2) => PhysState::Polling,
            Some(3) => PhysState::Disabled,
            Some(4) => PhysState::Training,
            Some(5) => PhysState::LinkUp,
            Some(6) => PhysState::ErrorRecovery,
            Some(7) => PhysState::PhyTest,
            _ => PhysState::Unknown,
        }
    }

    /// The usual name of the state.
    pub fn as_str(self) -> &'static str {
        match self {
            PhysState::Unknown => "?",
            PhysState::Sleep => "Sleep",
            PhysState::Polling => "Polling",
            PhysState::Disabled => "Disabled",
            PhysState::Training => "Training",
            PhysState::LinkUp => "LinkUp",
            PhysState::ErrorRecovery => "ErrorRecovery",
            PhysState::PhyTest => "PhyTest",
        }
    }
}

impl PortRate {
    /// `2.5 Gb/sec (1X SDR)`, `400 Gb/sec (4X NDR)`, `100 Gb/sec`.
    fn from_sysfs(text: &str) -> Option<Self> {
        let gbps: f64 = text.split_whitespace().next()?.parse().ok()?;
        let inside = text.split_once('(').map_or("", |(_, rest)| rest.trim_end_matches(')'));
        let mut words = inside.split_whitespace();
        let lanes = words.next().and_then(|w| w.trim_end_matches('X').parse().ok()).unwrap_or(0);
        let known = gbps.is_finite() && gbps > 0.0 && gbps < 1e6;
        // Before Linux 4.x, single data rate is not named.
        let speed = words.next().unwrap_or(if lanes > 0 { "SDR" } else { "" }).to_owned();
        known.then_some(PortRate { gbps, lanes, speed, interface: None })
    }

    /// The rate in the kernel's notation.
    pub fn describe(&self) -> String {
        match self.lanes {
            0 => format!("{} Gb/s", self.gbps),
            lanes => format!("{} Gb/s ({lanes}X {})", self.gbps, self.speed),
        }
    }
}

/// The number before the colon in `4: ACTIVE`.
fn leading_number(text: &str) -> Option<u32> {
    text.split(':').next()?.trim().parse().ok()
}

/// The RDMA devices that carry data, by name. Counters are optional, as most of the files are counters.
pub fn read_devices(tree: &HostTree, counters: bool) -> Vec<RdmaDevice> {
    DeviceInventory::read_from(tree, counters, &[]).devices
}

/// All RDMA devices, by use.
#[derive(Debug)]
pub(crate) struct DeviceInventory {
    /// The devices that carry data, by name.
    pub(crate) devices: Vec<RdmaDevice>,
    /// The management devices, by name.
    pub(crate) management: Vec<ManagementDevice>,
}

impl DeviceInventory {
    /// Reads the devices; `listed` are the management devices that netlink lists.
    pub(crate) fn read_from(tree: &HostTree, counters: bool, listed: &[ManagementDevice]) -> Self {
        let all: Vec<RdmaDevice> =
            tree.list_names(RDMA_CLASS_DIR).iter().map(|name| read_device(tree, name, counters)).collect();
        let with_verbs = devices_with_verbs(tree);
        let mut inventory = DeviceInventory { devices: Vec::new(), management: Vec::new() };
        for device in &all {
            let known = listed.iter().find(|known| known.device == device.name).cloned();
            match known.or_else(|| management_of(device, &all, &with_verbs)) {
                Some(management) => inventory.management.push(management),
                None => inventory.devices.push(device.clone()),
            }
        }
        inventory
    }
}

fn devices_with_verbs(tree: &HostTree) -> BTreeSet<String> {
    let nodes = tree.list_names(VERBS_CLASS_DIR);
    nodes.iter().filter_map(|node| tree.read_text(&format!("{VERBS_CLASS_DIR}/{node}/ibdev"))).collect()
}

/// An InfiniBand device without verbs, on the PCI function of another device that has verbs: the kernel makes none for the type
/// SMI, which sysfs does not show.
fn management_of(device: &RdmaDevice, all: &[RdmaDevice], with_verbs: &BTreeSet<String>) -> Option<ManagementDevice> {
    let address = device.pci.as_ref()?.address.as_ref()?;
    let is_infiniband = device.ports.iter().all(|port| port.link_layer == LinkLayer::InfiniBand);
    if with_verbs.contains(&device.name) || device.ports.is_empty() || !is_infiniband {
        return None;
    }
    let parent = all.iter().find(|other| {
        let is_near = other.pci.as_ref().and_then(|pci| pci.address.as_ref()) == Some(address);
        is_near && with_verbs.contains(&other.name)
    })?;
    Some(ManagementDevice { device: device.name.clone(), parent: parent.name.clone() })
}

/// The state of a port; no other file is read.
pub fn port_state(tree: &HostTree, device: &str, port: u32) -> PortState {
    let text = tree.read_text(&format!("{RDMA_CLASS_DIR}/{device}/ports/{port}/state"));
    text.as_deref().map_or(PortState::Unknown, PortState::from_sysfs)
}

fn read_device(tree: &HostTree, name: &str, counters: bool) -> RdmaDevice {
    let at = format!("{RDMA_CLASS_DIR}/{name}");
    let node_type = device_text(tree, &at, "node_type").map(|t| t.rsplit(':').next().unwrap_or(&t).trim().to_owned());
    let is_ca = node_type.as_deref() == Some("CA");
    let mut ports: Vec<DevicePort> = tree
        .list_names(&format!("{at}/ports"))
        .iter()
        .filter_map(|n| Some(read_port(tree, &format!("{at}/ports/{n}"), n.parse().ok()?, is_ca, counters)))
        .collect();
    ports.sort_by_key(|p| p.number);
    let tos = format!("sys/kernel/config/rdma_cm/{name}/ports/1/default_roce_tos");
    RdmaDevice {
        name: name.to_owned(),
        node_type,
        node_guid: device_text(tree, &at, "node_guid"),
        firmware: device_text(tree, &at, "fw_ver"),
        protocol: None,
        hca_type: device_text(tree, &at, "hca_type"),
        board_id: device_text(tree, &at, "board_id"),
        parent: device_text(tree, &at, "parent"),
        pci: PciFunction::read_from(tree, &format!("{at}/device")),
        function_netdevs: tree.list_names(&format!("{at}/device/net")),
        ports,
        roce_tos: tree.read_number(&tos),
        traffic_class: device_text(tree, &at, "tc/1/traffic_class"),
    }
}

fn device_text(tree: &HostTree, at: &str, file: &str) -> Option<String> {
    tree.read_text(&format!("{at}/{file}"))
}

fn read_port(tree: &HostTree, at: &str, number: u32, is_ca: bool, with_counters: bool) -> DevicePort {
    let files = tree.read_texts(at);
    let file = |name: &str| files.get(name).map(String::as_str);
    let n = |name: &str| file(name).and_then(parse_number);
    let lid = |name: &str| {
        let number = n(name).and_then(|v| u32::try_from(v).ok());
        number.map(|lid| if lid == PERMISSIVE_LID { 0 } else { lid })
    };
    let mut counters = BTreeMap::new();
    let mut hw_counters = BTreeSet::new();
    for dir in ["counters", "hw_counters"].iter().filter(|_| with_counters) {
        for (name, text) in tree.read_texts(&format!("{at}/{dir}")) {
            if let Ok(value @ 1..) = text.parse::<u64>()
                && name != "lifespan"
            {
                if *dir == "hw_counters" {
                    hw_counters.insert(name.clone());
                }
                counters.insert(name, value);
            }
        }
    }
    let gids = read_gids(tree, at);
    let mut netdevs: Vec<String> = Vec::new();
    for gid in &gids {
        if let Some(netdev) = &gid.netdev
            && !netdevs.contains(netdev)
        {
            netdevs.push(netdev.clone());
        }
    }
    DevicePort {
        number,
        link_layer: match file("link_layer") {
            Some("InfiniBand") => LinkLayer::InfiniBand,
            Some("Ethernet") => LinkLayer::Ethernet,
            // Kernels without this file supported InfiniBand only; libibverbs assumes the same.
            None if is_ca && file("sm_lid").is_some() => LinkLayer::InfiniBand,
            _ => LinkLayer::Unknown,
        },
        state: file("state").map_or(PortState::Unknown, PortState::from_sysfs),
        phys_state: file("phys_state").map_or(PhysState::Unknown, PhysState::from_sysfs),
        rate: file("rate").and_then(PortRate::from_sysfs),
        lid: lid("lid"),
        sm_lid: lid("sm_lid"),
        cap_mask: n("cap_mask"),
        gids,
        netdevs,
        counters,
        hw_counters,
    }
}

/// Up to this many entries, attributes are read singly. Tables have up to 1024 entries, mostly empty, and reading an attribute of
/// an empty entry costs as much and returns EINVAL.
const MAX_SHORT_TABLE: usize = 32;

fn read_gids(tree: &HostTree, at: &str) -> Vec<PortGid> {
    let addresses = tree.read_texts(&format!("{at}/gids")).into_iter().filter_map(|(index, text)| {
        let address: Ipv6Addr = text.parse().ok()?;
        Some((index.parse().ok()?, address)).filter(|_| !address.is_unspecified())
    });
    let addresses: BTreeMap<u32, Ipv6Addr> = addresses.collect();
    let attributes = |kind: &str| {
        let dir = format!("{at}/gid_attrs/{kind}");
        if addresses.len() > MAX_SHORT_TABLE {
            return tree.read_texts(&dir);
        }
        addresses
            .keys()
            .filter_map(|index| Some((index.to_string(), tree.read_text(&format!("{dir}/{index}"))?)))
            .collect()
    };
    let types = attributes("types");
    let netdevs = attributes("ndevs");
    addresses
        .iter()
        .map(|(index, address)| {
            let key = index.to_string();
            let kind = match types.get(&key).map(String::as_str) {
                Some("IB/RoCE v1") if netdevs.contains_key(&key) => GidType::RoceV1,
                Some("IB/RoCE v1") => GidType::Ib,
                Some("RoCE v2") => GidType::RoceV2,
                _ => GidType::Unknown,
            };
            PortGid { index: *index, address: *address, kind, netdev: netdevs.get(&key).cloned() }
        })
        .collect()
}

impl PciFunction {
    /// The PCI function behind a `device` link; `None` when there is none.
    pub(crate) fn read_from(tree: &HostTree, at: &str) -> Option<Self> {
        let files = ["vendor", "device", "uevent"].map(|f| tree.read_text(&format!("{at}/{f}")));
        let [vendor, device, uevent] = files;
        let vendor = id_of_text(vendor);
        let device = id_of_text(device);
        let said = |key: &str| {
            let line = uevent.as_deref()?.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix('='))?;
            Some(line.trim().to_owned())
        };
        let linked = tree.link_name(at).filter(|name| is_pci_address(name));
        let address = linked.or_else(|| said("PCI_SLOT_NAME"));
        if address.is_none() && vendor.is_none() {
            return None;
        }
        let gts = |file: &str| tree.read_text(&format!("{at}/{file}")).and_then(|t| transfer_rate(&t));
        // 0 and 255 mean an unknown width; a virtual function has no link.
        let lanes = |file: &str| device_number(tree, at, file).filter(|w| (1..=32).contains(w));
        let speed = gts("current_link_speed");
        let max_speed = gts("max_link_speed");
        let width = lanes("current_link_width");
        let max_width = lanes("max_link_width");
        let is_on_board = max_speed == Some(ON_BOARD_LINK_TENTHS_GTS) && max_width == Some(ON_BOARD_LINK_LANES);
        let virtual_functions = device_number(tree, at, "sriov_totalvfs")
            .filter(|t| *t > 0)
            .map(|t| (device_number(tree, at, "sriov_numvfs").unwrap_or(0), t));
        Some(PciFunction {
            address,
            vendor,
            device,
            known_model: vendor.zip(device).and_then(|(v, d)| model::model_of(v, d)).map(|m| m.name),
            driver: tree.link_name(&format!("{at}/driver")).or_else(|| said("DRIVER")),
            // A virtual device has no node: the PCI function has.
            numa_node: device_number(tree, at, "numa_node").or_else(|| device_number(tree, at, "../numa_node")),
            speed: speed.filter(|_| !is_on_board),
            max_speed: max_speed.filter(|_| !is_on_board),
            width: width.filter(|_| !is_on_board),
            max_width: max_width.filter(|_| !is_on_board),
            virtual_functions,
            physical: tree.link_name(&format!("{at}/physfn")),
        })
    }

    /// The known model with these ids.
    pub fn model(&self) -> Option<DeviceModel> {
        self.vendor.zip(self.device).and_then(|(v, d)| model::model_of(v, d))
    }

    /// `15b3:1021`.
    pub fn id_text(&self) -> Option<String> {
        self.vendor.zip(self.device).map(|(v, d)| format!("{v:04x}:{d:04x}"))
    }
}

fn device_number(tree: &HostTree, at: &str, file: &str) -> Option<u32> {
    tree.read_number(&format!("{at}/{file}")).and_then(|v| u32::try_from(v).ok())
}

fn id_of_text(text: Option<String>) -> Option<u16> {
    u16::try_from(parse_number(&text?)?).ok()
}

/// Tenths of GT/s in `16.0 GT/s PCIe`, `8 GT/s`; `None` for `Unknown`.
fn transfer_rate(text: &str) -> Option<u32> {
    let rate: f64 = text.split_whitespace().next()?.parse().ok()?;
    (rate > 0.0 && rate < 1000.0).then_some((rate * 10.0).round() as u32)
}

/// `0000:17:00.0`; the domain is longer behind a volume management device.
pub(crate) fn is_pci_address(name: &str) -> bool {
    let mut parts = name.split(':');
    let (Some(domain), Some(bus), Some(slot), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    is_hex(domain) && is_hex(bus) && slot.split_once('.').is_some_and(|(d, f)| is_hex(d) && is_hex(f))
}

fn is_hex(s: &str) -> bool {
    !s.is_empty() && s.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_kernel() {
        let rate = |t| PortRate::from_sysfs(t).map(|r| (r.gbps, r.lanes, r.speed));
        assert_eq!(rate("400 Gb/sec (4X NDR)"), Some((400.0, 4, "NDR".into())));
        assert_eq!(rate("2.5 Gb/sec (1X)"), Some((2.5, 1, "SDR".into())));
        assert_eq!(rate("100 Gb/sec"), Some((100.0, 0, String::new())));
        for odd in ["", "NaN Gb/sec", "-1 Gb/sec", "inf (4X", "1e99"] {
            assert_eq!(rate(odd), None, "{odd}");
        }
        assert_eq!(
            (PortState::from_sysfs("4: ACTIVE"), PortState::from_sysfs("9: ?")),
            (PortState::Active, PortState::Unknown)
        );
        assert_eq!(PhysState::from_sysfs("2: Polling"), PhysState::Polling);
        assert_eq!(transfer_rate("32.0 GT/s PCIe"), Some(320));
        assert_eq!(transfer_rate("Unknown"), None);
        assert!(is_pci_address("0000:17:00.0") && is_pci_address("10000:e1:00.1") && !is_pci_address("efa_0"));
    }
}
