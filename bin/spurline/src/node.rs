//! Wires a node together and runs it until it is told to stop.

use crate::background::Ready;
use spurline_config::{Fault, NodeConfig};

/// Runs the node; returns when it has ended.
///
/// # Errors
/// When it can't start, or does not end cleanly.
pub fn run(_config: NodeConfig, _ready: Ready) -> Result<(), Fault> {
    Err(Fault::failed("node: not yet wired in this build", ""))
}
