//! Mounts the empty in-memory file system, the ceiling of the benchmarks, until SIGINT, SIGTERM or `umount`.
//! `nullfs MOUNTPOINT [--size 4G] [--io auto|dev|uring] [--threads N] [--depth N] [--slot-buffers] [-o LIST]`

use spurline_fuse::{FuseIo, FuseSession, MountError, NullFs, SessionConfig};
use spurline_types::Size;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, why)) => {
            eprintln!("nullfs: {why}");
            ExitCode::from(code)
        }
    }
}

fn run() -> Result<(), (u8, String)> {
    let usage = |why: String| (2, why);
    let fail = |e: MountError| (e.exit_code(), e.to_string());
    let (mut mountpoint, mut size, mut slot_buffers) = (None, Size(4 << 30), false);
    let mut config = SessionConfig::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| usage(format!("{word} needs a value")));
        let number = |text: String| text.parse::<usize>().map_err(|e| usage(format!("'{text}': {e}")));
        match word.as_str() {
            "--size" => size = value()?.parse().map_err(|e| usage(format!("{e}")))?,
            "--io" => {
                config.io = match value()?.as_str() {
                    "auto" => FuseIo::Auto,
                    "dev" => FuseIo::Dev,
                    "uring" => FuseIo::Uring,
                    other => return Err(usage(format!("--io {other}: auto, dev or uring"))),
                }
            }
            "--threads" => config.max_threads = Some(number(value()?)?),
            "--depth" => config.depth = Some(number(value()?)?),
            "--slot-buffers" => slot_buffers = true,
            "-o" => config.options.apply_list(&value()?).map_err(|e| usage(e.to_string()))?,
            flag if flag.starts_with('-') => return Err(usage(format!("unknown flag {flag}"))),
            path => mountpoint = Some(std::path::PathBuf::from(path)),
        }
    }
    let mountpoint = mountpoint.ok_or_else(|| usage("name a mountpoint".into()))?;
    let fs = if slot_buffers { NullFs::from_slot_buffers(size.0) } else { NullFs::new(size.0) };
    let fs = fs.map_err(|e| (1, e.to_string()))?;
    // Blocked before the session's threads start, so that only the waiting thread below takes them.
    let signals = block_signals();
    let session = FuseSession::mount(Arc::new(fs), &mountpoint, config).map_err(fail)?;
    session.wait_ready(Duration::from_secs(10)).map_err(fail)?;
    if let Some(chosen) = session.transport() {
        println!("{} serves {size} by {chosen}", session.mountpoint().display());
    }
    let unmounter = session.unmounter();
    std::thread::spawn(move || {
        let mut signal = 0;
        // SAFETY: the set was initialised and both pointers are good for the call.
        while unsafe { libc::sigwait(&raw const signals, &raw mut signal) } == 0 {
            if let Err(e) = unmounter.unmount(Duration::from_millis(500)) {
                eprintln!("nullfs: {e}");
            }
        }
    });
    session.join().map_err(fail)
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: sigset_t is plain data that sigemptyset initialises; the calls have no other conditions.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        set
    }
}
