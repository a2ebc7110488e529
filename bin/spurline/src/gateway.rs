//! `spurline gateway`: a gateway of the runtime, stopped by signals.

use crate::background::ReadySignal;
use crate::signals;
use spurline_config::{Fault, GatewayConfig};
use spurline_runtime::start_gateway;

/// Runs the gateway; returns at the end.
///
/// # Errors
/// When the gateway can't start, or loses written bytes.
pub fn run(config: GatewayConfig, ready: ReadySignal) -> Result<(), Fault> {
    let mut gateway = start_gateway(config)?;
    let stopped = signals::stop_channel()?;
    gateway.log_start();
    ready.signal_ready()?;
    gateway.keep_directories();
    let _ = stopped.recv();
    gateway.stop()
}
