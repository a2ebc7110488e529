//! `--from`, repeatable: the RDMA devices of this node, or of others from files.

use crate::net::facts::open_facts;
use clap::Args;
use spurline_config::Fault;
use spurline_fabric::HostTree;
use spurline_kube_devices::NodeHcas;
use std::path::{Path, PathBuf};

/// The flag.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Facts of other nodes: files of `net collect`, or folders laid out like /; repeat for more [default: this node]
    #[arg(long, value_name = "FILE|DIR")]
    pub from: Vec<PathBuf>,
}

impl NodeArgs {
    /// The nodes, each once.
    ///
    /// # Errors
    /// When a file or folder does not exist or holds no facts.
    pub fn read(&self) -> Result<Vec<NodeHcas>, Fault> {
        if self.from.is_empty() {
            return Ok(vec![NodeHcas::read_from(&HostTree::live())]);
        }
        let mut nodes: Vec<NodeHcas> = Vec::new();
        for path in &self.from {
            let tree = open_facts(path)?;
            if !tree.exists("sys") {
                return Err(no_facts(path));
            }
            let mut node = NodeHcas::read_from(&tree);
            if node.hostname.is_none() {
                node.hostname = path.file_name().map(|name| name.to_string_lossy().into_owned());
            }
            // The HCAs of a node that is given twice would count twice.
            if !nodes.contains(&node) {
                nodes.push(node);
            }
        }
        Ok(nodes)
    }
}

/// A folder that is not laid out like `/`; often the folder above those of the nodes.
fn no_facts(path: &Path) -> Fault {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut below: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|entry| entry.join("sys").is_dir()).collect();
    below.sort();
    let remedy = match below.first() {
        Some(first) => format!("name each node's folder in it, as in --from {}", first.display()),
        None => "give a file that `spurline net collect -o FILE.tar.zst` wrote, or a folder laid out like /".to_owned(),
    };
    Fault::missing(format!("--from {}: it has no folder sys, so it holds no facts of a node", path.display()), remedy)
}
