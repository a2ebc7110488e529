//! SIGTERM, SIGINT, SIGHUP and SIGQUIT as calls of a function on a thread of its own.

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use spurline_config::Fault;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

/// Calls `stop` with 1 at the first signal to end (unmount cleanly), with 2 at the second (by force), and so on.
///
/// # Errors
/// When the handlers can't be installed.
pub fn on_stop(mut stop: impl FnMut(u32) + Send + 'static) -> Result<(), Fault> {
    let failed = |e: std::io::Error| Fault::failed(format!("signal handlers: {e}"), "");
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGQUIT]).map_err(failed)?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for (count, _) in (1..).zip(signals.forever()) {
                stop(count);
            }
        })
        .map_err(failed)?;
    Ok(())
}

/// A flag that the first signal to end raises; the second ends the process with `code`.
///
/// # Errors
/// As [`on_stop`].
pub fn raised(code: i32) -> Result<Arc<AtomicBool>, Fault> {
    let raised = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&raised);
    on_stop(move |count| {
        flag.store(true, Ordering::Release);
        if count > 1 {
            std::process::exit(code);
        }
    })?;
    Ok(raised)
}

/// Gets a message at each signal to end; the second ends the process.
///
/// # Errors
/// As [`on_stop`].
pub fn stops() -> Result<mpsc::Receiver<u32>, Fault> {
    let (stop, stopped) = mpsc::channel();
    on_stop(move |count| {
        let _ = stop.send(count);
        if count > 1 {
            std::process::exit(1);
        }
    })?;
    Ok(stopped)
}
