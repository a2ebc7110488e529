//! The empty file system of the FUSE crate as a process, ended by SIGTERM or `umount`.

use super::{NullPart, print_ready};
use crate::error::{BenchError, Result};
use spurline_fuse::{FuseIo, FuseSession, NullFs, SessionConfig, SessionWrites};
use std::sync::Arc;
use std::time::Duration;

pub(super) fn mount(part: &NullPart) -> Result<()> {
    let io = match part.io.as_str() {
        "dev" => FuseIo::Dev,
        "uring" => FuseIo::Uring,
        other => return Err(BenchError::Failed(format!("io {other}: dev or uring"))),
    };
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])
        .map_err(|e| BenchError::io("can't catch signals", &e))?;
    let mut config = SessionConfig { io, ..SessionConfig::default() };
    if part.writable {
        config.options.read_only = false;
        config.writes = Some(SessionWrites { acls: false, locks: false });
    }
    let files = NullFs::with_buffer(part.len, part.held).map_err(|e| BenchError::Failed(e.to_string()))?;
    let session = FuseSession::mount(Arc::new(files), &part.at, config).map_err(mount_error)?;
    session.wait_ready(Duration::from_secs(10)).map_err(mount_error)?;
    let chosen = session.transport();
    if chosen.as_ref().is_some_and(|c| c.io != io) {
        // Not the requested ceiling: better none than a wrong one.
        return Err(BenchError::Missing(chosen.map(|c| c.to_string()).unwrap_or_default()));
    }
    print_ready(chosen.map(|c| c.to_string()).unwrap_or_default());
    let unmounter = session.unmounter();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if let Err(e) = unmounter.unmount(Duration::from_millis(500)) {
                eprintln!("{e}");
            }
        }
    });
    session.join().map_err(mount_error)
}

fn mount_error(e: spurline_fuse::MountError) -> BenchError {
    BenchError::Failed(e.to_string())
}
