//! `--from`, repeatable: the RDMA devices of this node, or of others from their files.

use crate::net::facts::open_facts;
use clap::Args;
use spurline_config::Fault;
use spurline_fabric::HostTree;
use spurline_kube_devices::NodeHcas;
use std::path::PathBuf;

/// The flag.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Facts of other nodes: files of `net collect`, or folders laid out like /; repeat for more [default: this node]
    #[arg(long, value_name = "FILE|DIR")]
    pub from: Vec<PathBuf>,
}

impl NodeArgs {
    /// The nodes.
    ///
    /// # Errors
    /// When a file or folder does not exist or holds no facts.
    pub fn read(&self) -> Result<Vec<NodeHcas>, Fault> {
        if self.from.is_empty() {
            return Ok(vec![NodeHcas::read_from(&HostTree::live())]);
        }
        let read = |path: &PathBuf| {
            let mut node = NodeHcas::read_from(&open_facts(path)?);
            if node.hostname.is_none() {
                node.hostname = path.file_name().map(|name| name.to_string_lossy().into_owned());
            }
            Ok(node)
        };
        self.from.iter().map(read).collect()
    }
}
