//! The wish to stop: Ctrl-C and SIGTERM set a flag that every wait of this crate looks at, so that the guards of
//! mounts, namespaces and directories run as they do at a normal end.

use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static WISH: OnceLock<Arc<AtomicBool>> = OnceLock::new();

fn flag() -> &'static Arc<AtomicBool> {
    WISH.get_or_init(Arc::default)
}

/// Catches SIGINT and SIGTERM from now on; a second one ends the process at once.
///
/// # Errors
/// When the system refuses handlers.
pub fn catch() -> Result<()> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let set = || -> std::io::Result<()> {
            // In this order the first signal only sets the flag, and the second finds it set.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(flag()))?;
            signal_hook::flag::register(signal, Arc::clone(flag()))?;
            Ok(())
        };
        set().map_err(|e| Error::io("can't catch signals", &e))?;
    }
    Ok(())
}

/// # Errors
/// `Interrupted` once the user wished for an end.
pub fn check() -> Result<()> {
    if flag().load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}

/// Asks `ready` every `pause` until it gives something.
///
/// # Errors
/// `Interrupted`, what `ready` fails with, or `Failed` naming `what` after `limit`.
pub fn wait<T>(
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
        check()?;
        if Instant::now() >= end {
            return Err(Error::Failed(format!("{what}: not within {} s", limit.as_secs_f64())));
        }
        std::thread::sleep(pause);
    }
}
