//! Findings: stable id, severity, evidence, remedy and page. Runs no check.

use crate::change::HostChange;
use serde::Serialize;

/// How severe a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Does not work, or will stop working.
    Error,
    /// Works, but worse than possible.
    Warning,
    /// For information; no action needed.
    Info,
}

/// A result of an examination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostFinding {
    /// Stable id, `IPOIB-MODE`.
    pub id: &'static str,
    /// The severity.
    pub severity: Severity,
    /// The subject: a port, an interface, a file.
    pub subject: String,
    /// The file and the value, or the query and the reply.
    pub evidence: String,
    /// The remedy, as exact commands where possible.
    pub remedy: String,
    /// The page, relative to the project's root.
    pub doc: String,
    /// The changes that `net fix` can make.
    #[serde(skip)]
    pub changes: Vec<HostChange>,
}

impl HostFinding {
    /// A finding without changes.
    pub fn new(
        id: &'static str,
        severity: Severity,
        subject: impl Into<String>,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let doc = format!("docs/findings/{id}.md");
        HostFinding {
            id,
            severity,
            subject: subject.into(),
            evidence: evidence.into(),
            remedy: remedy.into(),
            doc,
            changes: Vec::new(),
        }
    }

    /// Adds the changes that resolve the finding; the commands come first in the remedy.
    pub fn with_changes(mut self, changes: impl IntoIterator<Item = HostChange>) -> Self {
        self.changes.extend(changes);
        let commands: Vec<String> = self.changes.iter().map(HostChange::shell_command).collect();
        let rest = std::mem::take(&mut self.remedy);
        self.remedy =
            [commands.join(" && "), rest].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("; ");
        self
    }
}

/// Defines the ids, each with a page: a missing page is a compile error.
macro_rules! ids {
    ($($name:ident = $id:literal,)*) => {
        /// The ids of all findings.
        pub mod id {
            $(#[doc = concat!("The id `", $id, "`.")] pub const $name: &str = $id;)*
        }
        /// Every id with the text of the page.
        pub const PAGES: &[(&str, &str)] = &[
            $(($id, include_str!(concat!("../../../../docs/findings/", $id, ".md"))),)*
        ];
    };
}

ids! {
    ARP_FLUX = "ARP-FLUX",
    BOND_MEMBER = "BOND-MEMBER",
    BOND_MODE = "BOND-MODE",
    CHECK_LEFT_OUT = "CHECK-LEFT-OUT",
    CONGESTION = "CONGESTION",
    CONTAINER_DEVICES = "CONTAINER-DEVICES",
    CONTAINER_IPC_LOCK = "CONTAINER-IPC-LOCK",
    CPU_GOVERNOR = "CPU-GOVERNOR",
    DRIVER_MISSING = "DRIVER-MISSING",
    FIRMWARE_MIXED = "FIRMWARE-MIXED",
    GID_ROCE_V2 = "GID-ROCE-V2",
    GUID_ZERO = "GUID-ZERO",
    HUGE_PAGES = "HUGE-PAGES",
    IOMMU = "IOMMU",
    IPOIB_MODE = "IPOIB-MODE",
    IPOIB_MTU_REFUSED = "IPOIB-MTU-REFUSED",
    K8S_CONFIG_FILE = "K8S-CONFIG-FILE",
    K8S_CONFIG_KEY = "K8S-CONFIG-KEY",
    K8S_HCA_SHARED = "K8S-HCA-SHARED",
    K8S_HCA_UNCLAIMED = "K8S-HCA-UNCLAIMED",
    K8S_HCA_UNUSABLE = "K8S-HCA-UNUSABLE",
    K8S_MATCH = "K8S-MATCH",
    K8S_MIXED_HCAS = "K8S-MIXED-HCAS",
    K8S_NO_MATCH = "K8S-NO-MATCH",
    K8S_ONE_HCA = "K8S-ONE-HCA",
    K8S_POD_DEVICES = "K8S-POD-DEVICES",
    K8S_POD_MEMLOCK = "K8S-POD-MEMLOCK",
    K8S_POD_NETWORK = "K8S-POD-NETWORK",
    K8S_POD_REQUEST = "K8S-POD-REQUEST",
    K8S_RESOURCE_NAME = "K8S-RESOURCE-NAME",
    K8S_SELECTOR = "K8S-SELECTOR",
    K8S_SLOTS = "K8S-SLOTS",
    KERNEL_MODULE = "KERNEL-MODULE",
    LINK_LAYER = "LINK-LAYER",
    LINK_RATE = "LINK-RATE",
    LINK_WIDTH = "LINK-WIDTH",
    MEMLOCK_CONTAINER = "MEMLOCK-CONTAINER",
    MEMLOCK_LIMIT = "MEMLOCK-LIMIT",
    MEMLOCK_SYSTEMD = "MEMLOCK-SYSTEMD",
    MTU_LOW = "MTU-LOW",
    NO_ADDRESS = "NO-ADDRESS",
    NO_RDMA_DEVICE = "NO-RDMA-DEVICE",
    NO_RELIABLE_CONNECTION = "NO-RELIABLE-CONNECTION",
    NO_SUBNET_MANAGER = "NO-SUBNET-MANAGER",
    NOT_PERSISTED = "NOT-PERSISTED",
    NUMA_DISTANCE = "NUMA-DISTANCE",
    OPEN_FILES = "OPEN-FILES",
    PCIE_BANDWIDTH = "PCIE-BANDWIDTH",
    PCIE_SPEED = "PCIE-SPEED",
    PCIE_WIDTH = "PCIE-WIDTH",
    PEER_LINK_LAYER = "PEER-LINK-LAYER",
    PEER_MTU = "PEER-MTU",
    PEER_ROUTE = "PEER-ROUTE",
    PEER_SUBNET = "PEER-SUBNET",
    PIPE_MAX_SIZE = "PIPE-MAX-SIZE",
    PORT_DOWN = "PORT-DOWN",
    PORT_ERRORS = "PORT-ERRORS",
    PORT_POLLING = "PORT-POLLING",
    RDMA_LIBRARY = "RDMA-LIBRARY",
    RDMA_NAMESPACE = "RDMA-NAMESPACE",
    RELAXED_ORDERING = "RELAXED-ORDERING",
    RETRANSMISSIONS = "RETRANSMISSIONS",
    ROCE_FLOW_CONTROL = "ROCE-FLOW-CONTROL",
    ROCE_TRAFFIC_CLASS = "ROCE-TRAFFIC-CLASS",
    RP_FILTER = "RP-FILTER",
    SAME_SUBNET = "SAME-SUBNET",
    SM_SILENT = "SM-SILENT",
    SOFT_RDMA = "SOFT-RDMA",
    UVERBS_ACCESS = "UVERBS-ACCESS",
    VF_DOWN = "VF-DOWN",
}

/// The page of an id, in Markdown; case does not matter.
pub fn page_of(id: &str) -> Option<&'static str> {
    PAGES.iter().find(|(known, _)| known.eq_ignore_ascii_case(id)).map(|(_, text)| *text)
}
