//! The HCAs of a node for a device plugin: identity, interfaces, device nodes, state. Selects none.

use serde::{Serialize, Serializer};
use spurline_fabric::{
    DevicePort, HostFacts, HostTree, LinkLayer, ManagementDevice, PortState, RdmaDevice, port_state,
};
use std::collections::BTreeMap;

/// The kind of network that an HCA's ports are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HcaLink {
    /// InfiniBand.
    InfiniBand,
    /// Omni-Path, whose link layer is shown as InfiniBand and which does not reach Omni-Path.
    OmniPath,
    /// RDMA over Ethernet.
    Roce,
    /// RDMA over TCP.
    Iwarp,
    /// Ports on both kinds of network.
    Mixed,
    /// Another kind, such as EFA.
    Other,
}

impl HcaLink {
    /// The name.
    pub fn as_str(self) -> &'static str {
        match self {
            HcaLink::InfiniBand => "InfiniBand",
            HcaLink::OmniPath => "Omni-Path",
            HcaLink::Roce => "RoCE",
            HcaLink::Iwarp => "iWARP",
            HcaLink::Mixed => "InfiniBand and Ethernet",
            HcaLink::Other => "other",
        }
    }

    /// Whether the ports have LIDs and the interfaces carry IP as IPoIB.
    pub fn has_lids(self) -> bool {
        matches!(self, HcaLink::InfiniBand | HcaLink::OmniPath)
    }
}

impl Serialize for HcaLink {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

/// An RDMA device of a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hca {
    /// The name, `mlx5_0`.
    #[serde(rename = "hca")]
    pub name: String,
    /// Address of the PCI function.
    pub pci: Option<String>,
    /// Vendor id in the notation of selectors, `15b3`.
    pub vendor: Option<String>,
    /// Device id in the notation of selectors, `1021`.
    pub device_id: Option<String>,
    /// Driver of the PCI function, `mlx5_core`.
    pub driver: Option<String>,
    /// The model, where known.
    pub model: Option<&'static str>,
    /// Whether this is a virtual function.
    pub is_virtual: bool,
    /// The NUMA node.
    pub numa_node: Option<u32>,
    /// The kind of network.
    pub link: HcaLink,
    /// Interfaces whose traffic the HCA carries: the HCA's own first, then bonds, VLANs and members of bonds.
    pub interfaces: Vec<String>,
    /// The bonds among the interfaces.
    pub bonds: Vec<String>,
    /// The interfaces of a card in planes, one for each; empty for other HCAs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub planes: Vec<String>,
    /// Rate of the fastest active port in Gb/s: a port that is down shows the lowest rate, not the port's own.
    pub rate_gbps: Option<f64>,
    /// States of the ports, in order.
    pub port_states: Vec<PortState>,
    /// Link layers of the ports, in order.
    #[serde(skip)]
    pub port_layers: Vec<LinkLayer>,
    /// The active-backup bond whose standby the HCA is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standby_of: Option<String>,
    /// Node GUID.
    pub node_guid: Option<String>,
    /// The device node for verbs, `uverbs0`.
    pub uverbs: Option<String>,
    /// Whether the node's `/dev/infiniband` is known and has no such file.
    #[serde(skip)]
    pub lacks_file: bool,
    /// The device nodes for management datagrams, one a port.
    pub umad: Vec<String>,
    /// The device nodes for a subnet manager, one a port.
    pub issm: Vec<String>,
}

impl Hca {
    /// Whether a port is active.
    pub fn has_active_port(&self) -> bool {
        self.port_states.contains(&PortState::Active)
    }

    /// The link types that selectors name.
    pub fn link_types(&self) -> &'static [&'static str] {
        match self.link {
            HcaLink::InfiniBand | HcaLink::OmniPath => &["infiniband"],
            HcaLink::Roce | HcaLink::Iwarp => &["ether"],
            HcaLink::Mixed => &["infiniband", "ether"],
            HcaLink::Other => &[],
        }
    }

    /// Why pods cannot use it now; `None` when that is possible.
    pub fn obstacle(&self) -> Option<String> {
        if self.uverbs.is_none() {
            return Some("it has no device node (uverbs): the module ib_uverbs is not loaded".to_owned());
        }
        if self.port_states.is_empty() {
            return Some("it shows no port".to_owned());
        }
        if !self.has_active_port() {
            let states: Vec<&str> = self.port_states.iter().map(|s| s.as_str()).collect();
            return Some(format!("no port is active: {}", states.join(", ")));
        }
        None
    }

    /// Whether pods reach the HCA only by an interface of the HCA in the pod's network namespace: the GIDs are made of the
    /// interface's addresses.
    pub fn needs_interface(&self) -> bool {
        matches!(self.link, HcaLink::Roce | HcaLink::Iwarp | HcaLink::Mixed)
    }

    /// The interfaces that attachments of this HCA have as masters: one for each plane, else a bond rather than a member.
    pub fn masters(&self) -> Vec<&str> {
        if !self.planes.is_empty() {
            return self.planes.iter().map(String::as_str).collect();
        }
        self.bonds.first().or_else(|| self.interfaces.first()).map(String::as_str).into_iter().collect()
    }

    /// Why the plugin can't give the HCA to pods although the kernel has it: the file is missing. Only of the node's own `/dev`,
    /// which a container of the plugin may not show.
    pub fn missing_file(&self) -> Option<String> {
        let node = self.uverbs.as_ref().filter(|_| self.lacks_file)?;
        Some(format!("/dev/infiniband/{node} does not exist"))
    }

    /// `port 1 Ethernet (ACTIVE), port 2 InfiniBand (DOWN)`.
    pub fn describe_ports(&self) -> String {
        let ports = (1..).zip(&self.port_layers).zip(&self.port_states);
        let words = ports.map(|((number, layer), state)| {
            let layer = match layer {
                LinkLayer::InfiniBand => "InfiniBand",
                LinkLayer::Ethernet => "Ethernet",
                LinkLayer::Unknown => "of another kind",
            };
            format!("port {number} {layer} ({})", state.as_str())
        });
        words.collect::<Vec<_>>().join(", ")
    }

    /// `mlx5_0 (InfiniBand, 400 Gb/s, 15b3:1021)`.
    pub fn describe(&self) -> String {
        let mut words = vec![self.link.as_str().to_owned()];
        words.extend(self.rate_gbps.map(|rate| format!("{rate} Gb/s")));
        if let (Some(vendor), Some(device)) = (&self.vendor, &self.device_id) {
            words.push(format!("{vendor}:{device}"));
        }
        words.extend(self.interfaces.first().cloned());
        format!("{} ({})", self.name, words.join(", "))
    }
}

/// The RDMA side of a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct NodeHcas {
    /// The host name.
    pub hostname: Option<String>,
    /// The HCAs, by name.
    pub hcas: Vec<Hca>,
    /// Devices for management datagrams, which pods can't use.
    pub management: Vec<ManagementDevice>,
    /// Whether the device node of the connection manager exists.
    pub rdma_cm: bool,
    /// Whether each RDMA device belongs to a single network namespace; `None` when unknown.
    pub rdma_exclusive: Option<bool>,
    /// All interfaces, with or without an HCA.
    #[serde(skip)]
    pub interfaces: Vec<String>,
}

impl NodeHcas {
    /// Reads the HCAs. Never fails: missing files leave fields empty.
    pub fn read_from(tree: &HostTree) -> Self {
        let facts = HostFacts::read_from(tree);
        let nodes = DeviceNodes::read_from(tree);
        NodeHcas {
            hcas: facts.devices.iter().map(|device| read_hca(&facts, device, &nodes)).collect(),
            rdma_cm: has_connection_manager(tree),
            rdma_exclusive: facts.rdma_exclusive,
            interfaces: facts.interfaces.iter().map(|i| i.name.clone()).collect(),
            management: facts.management,
            hostname: facts.hostname,
        }
    }

    /// The same HCAs with the present device nodes and port states, from few files. Appearance or removal of an HCA leads to a
    /// full read.
    pub fn refresh(&self, tree: &HostTree) -> Self {
        let management = self.management.iter().map(|management| management.device.as_str());
        let mut names: Vec<&str> = self.hcas.iter().map(|h| h.name.as_str()).chain(management).collect();
        names.sort_unstable();
        let mut present = tree.list_names("sys/class/infiniband");
        present.sort_unstable();
        if present != names {
            return NodeHcas { rdma_exclusive: self.rdma_exclusive, ..NodeHcas::read_from(tree) };
        }
        let nodes = DeviceNodes::read_from(tree);
        let mut now = self.clone();
        now.rdma_cm = has_connection_manager(tree);
        for hca in &mut now.hcas {
            nodes.assign_to(hca);
            for (number, state) in (1..).zip(&mut hca.port_states) {
                *state = port_state(tree, &hca.name, number);
            }
        }
        now
    }

    /// The node's name for messages.
    pub fn label(&self) -> &str {
        self.hostname.as_deref().unwrap_or("this node")
    }
}

/// Device nodes by RDMA device.
#[derive(Default)]
struct DeviceNodes {
    /// Names in `/dev/infiniband`; empty where the folder is not known.
    files: Vec<String>,
    uverbs: BTreeMap<String, String>,
    umad: BTreeMap<String, Vec<String>>,
    issm: BTreeMap<String, Vec<String>>,
}

impl DeviceNodes {
    fn read_from(tree: &HostTree) -> Self {
        let mut nodes = DeviceNodes { files: tree.list_names("dev/infiniband"), ..DeviceNodes::default() };
        let named = |class: &str, prefix: &str| -> Vec<(String, String)> {
            let dir = format!("sys/class/{class}");
            let names = tree.list_names(&dir).into_iter().filter(|n| n.starts_with(prefix));
            names.filter_map(|n| Some((tree.read_text(&format!("{dir}/{n}/ibdev"))?, n))).collect()
        };
        nodes.uverbs.extend(named("infiniband_verbs", "uverbs"));
        for (device, node) in named("infiniband_mad", "umad") {
            nodes.umad.entry(device).or_default().push(node);
        }
        for (device, node) in named("infiniband_mad", "issm") {
            nodes.issm.entry(device).or_default().push(node);
        }
        nodes
    }

    fn assign_to(&self, hca: &mut Hca) {
        hca.uverbs = self.uverbs.get(&hca.name).cloned();
        hca.lacks_file = !self.files.is_empty() && hca.uverbs.as_ref().is_some_and(|node| !self.files.contains(node));
        hca.umad = self.umad.get(&hca.name).cloned().unwrap_or_default();
        hca.issm = self.issm.get(&hca.name).cloned().unwrap_or_default();
    }
}

fn has_connection_manager(tree: &HostTree) -> bool {
    tree.exists("sys/class/misc/rdma_cm") || tree.exists("dev/infiniband/rdma_cm")
}

fn read_hca(facts: &HostFacts, device: &RdmaDevice, nodes: &DeviceNodes) -> Hca {
    let pci = device.pci.as_ref();
    let (interfaces, bonds) = interfaces_of(facts, device);
    let active = device.ports.iter().filter(|p| p.state == PortState::Active);
    let rate = active.filter_map(|p| p.rate.as_ref().map(|r| r.gbps)).max_by(f64::total_cmp);
    let standby = device.ports.iter().find_map(|port| facts.standby_bond(port));
    let mut hca = Hca {
        name: device.name.clone(),
        pci: pci.and_then(|p| p.address.clone()),
        vendor: hex_id(pci.and_then(|p| p.vendor)),
        device_id: hex_id(pci.and_then(|p| p.device)),
        driver: pci.and_then(|p| p.driver.clone()),
        model: pci.and_then(|p| p.known_model),
        is_virtual: device.is_virtual(),
        numa_node: pci.and_then(|p| p.numa_node),
        link: link_of(device),
        interfaces,
        bonds,
        planes: plane_interfaces(device),
        rate_gbps: rate,
        port_states: device.ports.iter().map(|p| p.state).collect(),
        port_layers: device.ports.iter().map(|p| p.link_layer).collect(),
        standby_of: standby.map(|bond| bond.name.clone()),
        node_guid: device.node_guid.clone(),
        uverbs: None,
        lacks_file: false,
        umad: Vec::new(),
        issm: Vec::new(),
    };
    nodes.assign_to(&mut hca);
    hca
}

fn plane_interfaces(device: &RdmaDevice) -> Vec<String> {
    if device.count_planes() == 1 {
        return Vec::new();
    }
    device.ports.iter().filter_map(|port| port.netdevs.first().cloned()).collect()
}

fn hex_id(id: Option<u16>) -> Option<String> {
    id.map(|id| format!("{id:04x}"))
}

fn link_of(device: &RdmaDevice) -> HcaLink {
    if device.is_iwarp() {
        return HcaLink::Iwarp;
    }
    if device.is_omni_path() {
        return HcaLink::OmniPath;
    }
    match (has_layer(device, LinkLayer::InfiniBand), has_layer(device, LinkLayer::Ethernet)) {
        (true, true) => HcaLink::Mixed,
        (true, false) => HcaLink::InfiniBand,
        (false, true) => HcaLink::Roce,
        (false, false) => HcaLink::Other,
    }
}

fn has_layer(device: &RdmaDevice, layer: LinkLayer) -> bool {
    device.ports.iter().any(|p: &DevicePort| p.link_layer == layer)
}

/// The interfaces whose traffic a device carries, and the bonds among these.
fn interfaces_of(facts: &HostFacts, device: &RdmaDevice) -> (Vec<String>, Vec<String>) {
    let mut names: Vec<String> = device.function_netdevs.clone();
    names.extend(device.ports.iter().flat_map(|p| p.netdevs.iter().cloned()));
    names.extend(device.parent.clone());
    let carries = |name: &str| {
        let interface = facts.interface(name);
        interface.is_some_and(|i| facts.ports_of(i).iter().any(|(d, _)| d.name == device.name))
    };
    for interface in &facts.interfaces {
        // An RDMA device may carry a bond's traffic, and belongs to the function of the first member only, and the others have no
        // device. A member with a separate device names that device alone.
        let has_device = facts.devices.iter().any(|other| other.function_netdevs.contains(&interface.name));
        let of_bond = interface.master.as_deref().filter(|master| is_bond(facts, master) && !has_device);
        if carries(&interface.name) || of_bond.is_some_and(carries) {
            names.push(interface.name.clone());
        }
    }
    let mut unique: Vec<String> = Vec::new();
    for name in names {
        if !unique.contains(&name) {
            unique.push(name);
        }
    }
    let bonds = unique.iter().filter(|n| is_bond(facts, n)).cloned().collect();
    (unique, bonds)
}

fn is_bond(facts: &HostFacts, name: &str) -> bool {
    facts.interface(name).is_some_and(|i| i.bond_mode.is_some())
}
