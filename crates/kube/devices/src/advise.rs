//! Is Multus needed? Answered for the HCAs of a cluster and a use, with reasons and the manifests that follow. Applies nothing.

use crate::discover::standby_note;
use crate::hca::{Hca, HcaLink, NodeHcas};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What pods do with RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RdmaUse {
    /// Verbs, with LIDs or GIDs that the programs exchange: MPI, NCCL, UCX, perftest.
    Verbs,
    /// Connections by IP address (librdmacm): Spurline, NVMe-oF, NFS over RDMA, rping.
    ConnectionManager,
}

/// How pods are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodIsolation {
    /// Pods share the HCAs of the node.
    Shared,
    /// Pods use the node's own network namespace.
    HostNetwork,
    /// A virtual function each: hard isolation, or an address per pod.
    VirtualFunction,
}

/// The answer for a network.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NetworkAdvice {
    /// The network: InfiniBand, RoCE.
    pub network: HcaLink,
    /// Whether Multus is needed.
    pub multus: bool,
    /// The attachment: `none`, `macvlan`, `ipoib`, `host-network`, `sr-iov`.
    pub attachment: &'static str,
    /// Why.
    pub reasons: Vec<String>,
    /// Interfaces of the HCAs, by node.
    pub interfaces: BTreeMap<String, Vec<String>>,
    /// The manifests that follow, YAML documents.
    pub manifests: Vec<String>,
}

/// The answer for a cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClusterAdvice {
    /// Whether Multus is needed for any network.
    pub multus: bool,
    /// An answer for each kind of network.
    pub networks: Vec<NetworkAdvice>,
    /// The manifests that all networks need, YAML documents.
    pub manifests: Vec<String>,
    /// What to do besides.
    pub notes: Vec<String>,
}

/// Answers for the HCAs of `nodes`.
pub fn advise(nodes: &[NodeHcas], usage: RdmaUse, isolation: PodIsolation) -> ClusterAdvice {
    let mut by_link: BTreeMap<HcaLink, Vec<(&NodeHcas, &Hca)>> = BTreeMap::new();
    for node in nodes {
        for hca in &node.hcas {
            by_link.entry(hca.link).or_default().push((node, hca));
        }
    }
    let mut subnets = ExampleSubnets::default();
    let networks: Vec<NetworkAdvice> =
        by_link.iter().map(|(link, hcas)| advise_network(*link, hcas, usage, isolation, &mut subnets)).collect();
    let has_functions = networks.iter().any(|n| n.attachment == "sr-iov");
    let mut notes = Vec::new();
    if networks.is_empty() {
        notes.push("no node has an RDMA device: pods use TCP, and nothing is needed".to_owned());
    }
    for node in nodes {
        notes.extend(node.hcas.iter().filter_map(|hca| standby_note(node, hca)));
    }
    let exclusive: Vec<&str> = nodes.iter().filter(|n| n.rdma_exclusive == Some(true)).map(NodeHcas::label).collect();
    if has_functions {
        let shared: Vec<&str> = nodes
            .iter()
            .filter(|n| !n.hcas.is_empty() && n.rdma_exclusive == Some(false))
            .map(NodeHcas::label)
            .collect();
        if !shared.is_empty() {
            notes.push(format!(
                "set exclusive mode before any pod starts, on {}: rdma system set netns exclusive",
                shared.join(", ")
            ));
        }
    } else if !exclusive.is_empty() {
        notes.push(format!(
            "{}: RDMA devices are exclusive to a network namespace, and shared HCAs do not work in pods: rdma system set \
             netns shared",
            exclusive.join(", ")
        ));
    }
    ClusterAdvice {
        multus: networks.iter().any(|n| n.multus),
        manifests: has_functions.then(exclusive_manifest).into_iter().collect(),
        networks,
        notes,
    }
}

/// Subnets for manifests, each another one: the kernel does not distinguish rails in the same subnet. Examples that an
/// administrator replaces.
#[derive(Default)]
struct ExampleSubnets {
    used: u8,
}

impl ExampleSubnets {
    fn next(&mut self) -> String {
        let subnet = format!("198.18.{}.0/24", self.used);
        self.used = self.used.wrapping_add(1);
        subnet
    }
}

/// Whether virtual functions can be made of an HCA.
fn is_divisible(hca: &Hca) -> bool {
    let has_functions = !matches!(hca.link, HcaLink::OmniPath | HcaLink::Other);
    hca.vendor.is_some() && !hca.is_virtual && !hca.interfaces.is_empty() && has_functions
}

fn advise_network(
    link: HcaLink,
    hcas: &[(&NodeHcas, &Hca)],
    usage: RdmaUse,
    isolation: PodIsolation,
    subnets: &mut ExampleSubnets,
) -> NetworkAdvice {
    let mut interfaces: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (node, hca) in hcas {
        let names = interfaces.entry(node.label().to_owned()).or_default();
        for master in hca.masters() {
            // A bond may be over several HCAs.
            if !names.iter().any(|name| name == master) {
                names.push(master.to_owned());
            }
        }
    }
    let is_ethernet = matches!(link, HcaLink::Roce | HcaLink::Iwarp | HcaLink::Mixed);
    let no_address = "in a pod whose network namespace has no interface on the HCA, all GIDs are zero";
    let (attachment, multus, reasons): (&'static str, bool, Vec<&str>) = match (isolation, link) {
        (PodIsolation::HostNetwork, _) => (
            "host-network",
            false,
            vec!["with hostNetwork: true a pod has the node's interfaces and GIDs", "its ports are the node's ports"],
        ),
        (PodIsolation::VirtualFunction, _) if hcas.iter().all(|(_, hca)| hca.is_virtual) => (
            "none",
            false,
            vec![
                "these HCAs are virtual functions already, made by the machine below, and can't be divided again",
                "share them among pods (--isolation shared), or give a pod a whole one by the host-device CNI",
            ],
        ),
        (PodIsolation::VirtualFunction, _) if !hcas.iter().any(|(_, hca)| is_divisible(hca)) => (
            "none",
            false,
            vec!["no virtual functions can be made of this kind of device; share it (--isolation shared)"],
        ),
        (PodIsolation::VirtualFunction, _) => (
            "sr-iov",
            true,
            vec![
                "a virtual function gives a pod an HCA and addresses of its own, and the HCA limits it",
                "the RDMA CNI moves the RDMA device into the pod; that needs exclusive mode",
                "the SR-IOV network device plugin replaces this one for these HCAs",
                "the manifests are for the SR-IOV network operator: for each rail a policy, and a network on it",
            ],
        ),
        (PodIsolation::Shared, link) if link.has_lids() && usage == RdmaUse::Verbs => (
            "none",
            false,
            vec![
                "verbs on InfiniBand and Omni-Path address each other by LID, which needs no interface in the pod",
                "the shared device plugin gives the device nodes",
            ],
        ),
        (PodIsolation::Shared, link) if link.has_lids() => (
            "ipoib",
            true,
            vec![
                "rdma_cm finds the HCA by an IP address of an IPoIB interface, which has to be in the pod",
                "macvlan on IPoIB is refused by the kernel, so the IPoIB CNI makes a child interface",
            ],
        ),
        (PodIsolation::Shared, _) if is_ethernet => (
            "macvlan",
            true,
            vec![
                no_address,
                "a macvlan (or ipvlan) on the HCA's interface brings an address and with it GIDs",
                "where a node has several of these HCAs, a pod attaches the interface of each that it may get",
                "pods on one node do not reach the node itself through a macvlan; use ipvlan where switches allow one MAC \
                 address per port",
            ],
        ),
        (PodIsolation::Shared, _) => ("none", false, vec!["this kind of device needs no interface in the pod"]),
    };
    let mut reasons: Vec<String> = reasons.into_iter().map(str::to_owned).collect();
    if attachment == "macvlan" && hcas.iter().any(|(_, hca)| !hca.planes.is_empty()) {
        reasons.push("an HCA in planes has an interface for each: a pod attaches all of them".to_owned());
    }
    let manifests = match attachment {
        "macvlan" | "ipoib" => {
            masters(&interfaces).iter().map(|m| attachment_manifest(attachment, m, &subnets.next())).collect()
        }
        "sr-iov" => sriov_manifests(link, hcas, subnets),
        _ => Vec::new(),
    };
    NetworkAdvice { network: link, multus, attachment, reasons, interfaces, manifests }
}

fn masters(interfaces: &BTreeMap<String, Vec<String>>) -> BTreeSet<&str> {
    interfaces.values().flatten().map(String::as_str).collect()
}

/// The name of an object for an interface.
fn object_name(interface: &str) -> String {
    format!("rdma-{interface}").to_ascii_lowercase().replace(['.', '_', ':'], "-")
}

/// A NetworkAttachmentDefinition on an interface.
fn attachment_manifest(kind: &str, master: &str, subnet: &str) -> String {
    let name = object_name(master);
    let mode = if kind == "macvlan" { "\n      \"mode\": \"bridge\"," } else { "" };
    format!(
        "apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata:
  name: {name}
spec:
  config: |
    {{
      \"cniVersion\": \"0.3.1\",
      \"type\": \"{kind}\",
      \"master\": \"{master}\",{mode}
      \"ipam\": {{\"type\": \"whereabouts\", \"range\": \"{subnet}\"}}
    }}
"
    )
}

/// The nodes whose functions can be divided, by the label of node feature discovery.
const SRIOV_NODES: &str = "feature.node.kubernetes.io/network-sriov.capable: \"true\"";

/// A policy that makes virtual functions, and a network on these, for each function: each rail is a separate network.
fn sriov_manifests(link: HcaLink, hcas: &[(&NodeHcas, &Hca)], subnets: &mut ExampleSubnets) -> Vec<String> {
    let divisible = hcas.iter().map(|(_, hca)| hca).filter(|hca| is_divisible(hca));
    // The first interface is the function's own.
    let functions: BTreeMap<String, String> =
        divisible.filter_map(|hca| Some((hca.interfaces.first()?.clone(), hca.vendor.clone()?))).collect();
    let link_type = match link {
        HcaLink::InfiniBand => "\n  linkType: IB",
        HcaLink::Roce | HcaLink::Iwarp => "\n  linkType: ETH",
        HcaLink::OmniPath | HcaLink::Mixed | HcaLink::Other => "",
    };
    let kind = if link == HcaLink::InfiniBand { "SriovIBNetwork" } else { "SriovNetwork" };
    let mut manifests = Vec::new();
    for (function, vendor) in functions {
        let name = object_name(&function);
        let resource = name.replace('-', "_");
        manifests.push(format!(
            "apiVersion: sriovnetwork.openshift.io/v1
kind: SriovNetworkNodePolicy
metadata:
  name: {name}-vf
  namespace: sriov-network-operator
spec:
  resourceName: {resource}_vf
  nodeSelector:
    {SRIOV_NODES}
  numVfs: 8
  nicSelector:
    vendor: \"{vendor}\"
    pfNames: [\"{function}\"]{link_type}
  isRdma: true
"
        ));
        manifests.push(format!(
            "apiVersion: sriovnetwork.openshift.io/v1
kind: {kind}
metadata:
  name: {name}-vf
  namespace: sriov-network-operator
spec:
  resourceName: {resource}_vf
  networkNamespace: default
  ipam: |
    {{\"type\": \"whereabouts\", \"range\": \"{subnet}\"}}
  metaPlugins: |
    {{\"type\": \"rdma\"}}
",
            subnet = subnets.next()
        ));
    }
    manifests
}

/// Exclusive mode, which the RDMA CNI needs, on the nodes with virtual functions.
fn exclusive_manifest() -> String {
    format!(
        "apiVersion: sriovnetwork.openshift.io/v1
kind: SriovNetworkPoolConfig
metadata:
  name: rdma-exclusive
  namespace: sriov-network-operator
spec:
  nodeSelector:
    matchLabels:
      {SRIOV_NODES}
  rdmaMode: exclusive
"
    )
}
