//! Wires a mount together and runs it until it is told to stop.

use crate::background::Ready;
use spurline_config::{Fault, MountConfig};

/// Runs the mount; returns when it has ended.
///
/// # Errors
/// When it can't start, or does not end cleanly.
pub fn run(_config: MountConfig, _ready: Ready) -> Result<(), Fault> {
    Err(Fault::failed("mount: not yet wired in this build", ""))
}
