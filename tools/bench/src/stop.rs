//! Interruption: Ctrl-C and SIGTERM set a flag that every wait of this crate checks, so that the guards of mounts,
//! namespaces and directories run as at a normal end.

use crate::error::{BenchError, Result};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static WISH: OnceLock<Arc<AtomicBool>> = OnceLock::new();

fn stop_flag() -> &'static Arc<AtomicBool> {
    WISH.get_or_init(Arc::default)
}

/// Catches SIGINT and SIGTERM from now on; a second signal ends the process at once.
pub fn catch_signals() -> Result<()> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        catch_signal(signal).map_err(|e| BenchError::io("can't catch signals", &e))?;
    }
    Ok(())
}

/// The first signal only sets the flag, and the second ends the process: the order of the two calls does that.
fn catch_signal(signal: i32) -> std::io::Result<()> {
    signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(stop_flag()))?;
    signal_hook::flag::register(signal, Arc::clone(stop_flag()))?;
    Ok(())
}

/// Ends all waits and measurements of this process, as a signal does.
pub fn request_stop() {
    stop_flag().store(true, Ordering::Relaxed);
}

pub fn check_stop() -> Result<()> {
    if stop_flag().load(Ordering::Relaxed) { Err(BenchError::Interrupted) } else { Ok(()) }
}

/// Calls `ready` every `pause` until there is a value.
pub fn wait_until<T>(
    what: &str,
    limit: Duration,
    pause: Duration,
    mut ready: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        check_stop()?;
        if Instant::now() >= end {
            return Err(BenchError::Failed(format!("{what}: not within {} s", limit.as_secs_f64())));
        }
        std::thread::sleep(pause);
    }
}
