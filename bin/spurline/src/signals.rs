//! SIGTERM, SIGINT, SIGHUP and SIGQUIT as calls of a function on a thread of its own.

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use spurline_config::Fault;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

/// Calls `stop` with 1 at the first signal to end (unmount cleanly), with 2 at the second (by force), and so on.
/// SIGHUP is none where it was ignored at start: `nohup` asks for that.
///
/// # Errors
/// When the handlers can't be installed.
pub fn on_stop(mut stop: impl FnMut(u32) + Send + 'static) -> Result<(), Fault> {
    let failed = |e: std::io::Error| Fault::failed(format!("signal handlers: {e}"), "");
    let hangup = (!ignored(SIGHUP)).then_some(SIGHUP);
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGQUIT].into_iter().chain(hangup)).map_err(failed)?;
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

/// Whether this process ignores a signal now, as it may have been told by who started it.
fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
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
