//! What a finding is: its stable id, how bad it is, what it rests on, what to do, and its page. It finds nothing.

use crate::change::Change;
use serde::Serialize;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It does not work, or will not.
    Error,
    /// It works, and worse than it could.
    Warning,
    /// Worth knowing; nothing has to be done.
    Info,
}

/// One thing an examination found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable id, `IPOIB-MODE`.
    pub id: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What it is about: a port, an interface, a file.
    pub subject: String,
    /// The file and its value, or what was asked and what came back.
    pub evidence: String,
    /// What to do, as exact commands where there are such.
    pub remedy: String,
    /// The page about it, below the project's root.
    pub doc: String,
    /// What `net fix` can change about it.
    #[serde(skip)]
    pub changes: Vec<Change>,
}

impl Finding {
    /// A finding that has no change.
    pub fn new(
        id: &'static str,
        severity: Severity,
        subject: impl Into<String>,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let doc = format!("docs/findings/{id}.md");
        Finding {
            id,
            severity,
            subject: subject.into(),
            evidence: evidence.into(),
            remedy: remedy.into(),
            doc,
            changes: Vec::new(),
        }
    }

    /// The same, with what can be changed about it; the change's command is the remedy's first words.
    pub fn with(mut self, changes: impl IntoIterator<Item = Change>) -> Self {
        self.changes.extend(changes);
        let commands: Vec<String> = self.changes.iter().map(Change::command).collect();
        let rest = std::mem::take(&mut self.remedy);
        self.remedy =
            [commands.join(" && "), rest].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("; ");
        self
    }
}

/// Defines the ids, each with the page that documents it: a page that is missing does not compile.
macro_rules! ids {
    ($($name:ident = $id:literal,)*) => {
        /// The ids of all findings.
        pub mod id {
            $(#[doc = concat!("The id `", $id, "`.")] pub const $name: &str = $id;)*
        }
        /// Every id with the text of its page.
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
}

/// The page about an id, in Markdown; letters may be small.
pub fn page(id: &str) -> Option<&'static str> {
    PAGES.iter().find(|(known, _)| known.eq_ignore_ascii_case(id)).map(|(_, text)| *text)
}
