//! Handlers for SIGTERM, SIGINT, SIGHUP and SIGQUIT, which run on a separate thread.

use crate::background;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use spurline_config::Fault;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

/// Calls `stop` with 1 at the first signal (end cleanly), with 2 at the second (end by force), and so on. SIGHUP is left alone
/// where ignored at start, as under `nohup`. In a background start only SIGTERM counts, which the end of the waiting command
/// sends as well.
///
/// # Errors
/// When the handlers can't be installed.
pub fn on_stop(mut stop: impl FnMut(u32) + Send + 'static) -> Result<(), Fault> {
    let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGQUIT].into_iter().chain(hangup)).map_err(handler_fault)?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut count = 0;
            for signal in signals.forever() {
                if signal == SIGTERM || !background::shares_terminal_signals() {
                    count += 1;
                    stop(count);
                }
            }
        })
        .map_err(handler_fault)?;
    Ok(())
}

fn handler_fault(e: std::io::Error) -> Fault {
    Fault::failed(format!("signal handlers: {e}"), "")
}

/// Lets a write above `ulimit -f` fail with EFBIG, as any other failed write, instead of ending the process.
///
/// # Errors
/// When the handler can't be installed.
pub fn survive_file_limit() -> Result<(), Fault> {
    signal_hook::flag::register(SIGXFSZ, Arc::default())
        .map(drop)
        .map_err(|e| Fault::failed(format!("signal handlers: {e}"), ""))
}

/// Whether this process ignores a signal now; the parent process may have set that.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// A flag that the first signal sets; the second ends the process with `code`.
///
/// # Errors
/// As [`on_stop`].
pub fn stop_flag(code: i32) -> Result<Arc<AtomicBool>, Fault> {
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

/// A channel that receives each signal; the second also ends the process.
///
/// # Errors
/// As [`on_stop`].
pub fn stop_channel() -> Result<mpsc::Receiver<u32>, Fault> {
    let (stop, stopped) = mpsc::channel();
    on_stop(move |count| {
        let _ = stop.send(count);
        if count > 1 {
            std::process::exit(1);
        }
    })?;
    Ok(stopped)
}
