//! Reads the node's HCAs, completely or only the states. Decides nothing.

use spurline_fabric::{HostTree, NetlinkFacts};
use spurline_kube_devices::NodeHcas;
use std::path::PathBuf;

/// Where the node's files are.
#[derive(Debug, Clone, Default)]
pub struct NodeReader {
    /// A folder laid out like the host's `/`; `None` for `/` itself.
    pub host_root: Option<PathBuf>,
}

impl NodeReader {
    fn tree(&self) -> HostTree {
        self.host_root.as_deref().map_or_else(HostTree::live, HostTree::from_folder)
    }

    /// Reads everything.
    pub fn scan(&self) -> NodeHcas {
        let mut node = NodeHcas::read_from(&self.tree());
        // A mounted folder shows files; the mode of the RDMA subsystem is known to netlink only.
        node.rdma_exclusive = node.rdma_exclusive.or_else(|| NetlinkFacts::query_kernel().rdma_exclusive);
        node
    }

    /// Reads the states of known HCAs.
    pub fn refresh(&self, node: &NodeHcas) -> NodeHcas {
        node.refresh(&self.tree())
    }
}
