//! `spurline mount`: a mount of the runtime, stopped by signals.

use crate::background::ReadySignal;
use crate::{report, signals};
use spurline_config::{Fault, MountConfig};
use spurline_runtime::{MountStop, PreparedMount};
use std::sync::Arc;

/// Runs the mount; returns at the end.
///
/// # Errors
/// When the mount can't start, or does not end cleanly.
pub fn run(config: MountConfig, ready: ReadySignal) -> Result<(), Fault> {
    let mount = PreparedMount::open(config)?;
    let stop = mount.stop();
    signals::on_stop(move |count| stop_by_signal(&stop, count))?;
    let Some(mut mount) = mount.start()? else { return Ok(()) };
    ready.signal_ready()?;
    mount.keep_directories();
    mount.join()
}

/// The first signal unmounts, the second ends the mount by force, the third does not wait for nodes.
fn stop_by_signal(stop: &Arc<MountStop>, count: u32) {
    if let Some(unsent) = stop.describe_unsent() {
        match count {
            1 => {
                tracing::warn!("no node has {unsent}; they are sent when their files are closed, or this process ends")
            }
            2 => tracing::warn!("lost, unless a node takes them now: {unsent}"),
            _ => {
                tracing::error!("lost: {unsent}");
                // The log may be a file.
                report::print_fault(&Fault::failed(
                    format!("lost: {unsent}"),
                    "write these files again when a node answers",
                ));
                std::process::exit(1);
            }
        }
    }
    if count == 1 {
        let own = Arc::clone(stop);
        // On a separate thread: an unmount takes a grace, within which a second signal counts.
        if std::thread::Builder::new().name("unmount".into()).spawn(move || own.unmount()).is_err() {
            stop.unmount();
        }
    } else if let Err(error) = stop.abort() {
        tracing::error!("{error}");
        std::process::exit(1);
    }
}
