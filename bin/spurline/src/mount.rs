//! `spurline mount`: a mount of the runtime, stopped by signals.

use crate::background::ReadySignal;
use crate::{report, signals};
use spurline_config::{Fault, MountConfig};
use spurline_keeper::MountLife;
use spurline_runtime::{MountStop, PreparedMount, UnsentBytes, check_takeover};
use std::sync::Arc;

/// Runs the mount, in the background or not; returns at the end.
///
/// # Errors
/// When the mount can't start, or does not end cleanly.
pub fn run(config: MountConfig, background: bool, ready: ReadySignal) -> Result<(), Fault> {
    let life = MountLife::begin().map_err(|error| Fault::failed(format!("the keeper of this mount: {error}"), ""))?;
    if life.as_ref().is_some_and(|life| life.order.check_only) {
        // The old process serves the mount meanwhile.
        return life.map_or(Ok(()), |life| check_takeover(life, &config));
    }
    let is_kept = life.is_some();
    let mount = PreparedMount::open(config, life)?;
    let stop = mount.stop();
    signals::on_stop(move |count| stop_by_signal(&stop, count))?;
    let Some(mut mount) = mount.start()? else { return Ok(()) };
    if is_kept {
        ready.leave_terminal(background)?;
    } else {
        ready.signal_ready()?;
    }
    mount.keep_directories();
    mount.join()
}

/// The first signal unmounts, the second ends the mount by force, the third does not wait for nodes.
fn stop_by_signal(stop: &Arc<MountStop>, count: u32) {
    if let Some(unsent) = stop.describe_unsent() {
        let UnsentBytes { bytes, .. } = &unsent;
        let taker = unsent.taker();
        match count {
            1 => {
                tracing::warn!(
                    "waiting for {taker} to take {bytes}; they are sent when their files are closed, or this process ends"
                )
            }
            2 => tracing::warn!("lost, unless {taker} takes them now: {bytes}"),
            _ => {
                tracing::error!("lost: {bytes}");
                // The log may be a file.
                let remedy = format!("write these files again when {taker} answers");
                report::print_fault(&Fault::failed(format!("lost: {bytes}"), remedy));
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
