//! Continues a mount with another program: the mount's keeper lets that program check the state, and then replaces the process.

use crate::locator::{PROCESS_ANSWER_LIMIT, mount_process};
use spurline_config::Fault;
use spurline_keeper::{CHECK_LIMIT, UPGRADE_CAUSE};
use spurline_observe::client::AdminPeer;
use spurline_observe::documents::{MountStatus, ProcessRole};
use spurline_observe::locate::SpurlineMount;
use spurline_types::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the new process may take to serve.
const TAKEOVER_LIMIT: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// How much longer than the check of a program its answer may take.
const ANSWER_MARGIN: Duration = Duration::from_secs(10);

/// A mount that continues with another program.
#[derive(Debug)]
pub struct UpgradedMount {
    /// The version before.
    pub before: String,
    /// The version now.
    pub after: String,
    /// How long programs waited, in milliseconds.
    pub pause_ms: u64,
}

fn mount_status(peer: &AdminPeer, limit: Duration) -> spurline_types::Result<(Option<u32>, MountStatus)> {
    let status = peer.fetch_status(limit)?;
    match status.role {
        ProcessRole::Mount(mount) => Ok((status.pid, mount)),
        _ => Err(spurline_types::Error::new(ErrorKind::Invalid, "that process is no mount")),
    }
}

/// Continues `mount` with `program`; `None` for a mount without a keeper, which can't.
///
/// # Errors
/// When the program can't take over, or fails; the mount then goes on as before.
pub fn upgrade_mount(mount: &SpurlineMount, program: &Path) -> Result<Option<UpgradedMount>, Fault> {
    let at = mount.mountpoint.display();
    let peer = mount_process(mount).map_err(|absent| absent.fault)?;
    let (old_process, before) = mount_status(&peer, PROCESS_ANSWER_LIMIT)?;
    let Some(keeper) = before.keeper else { return Ok(None) };
    match peer.request_upgrade(program, CHECK_LIMIT + ANSWER_MARGIN) {
        Err(error) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::Timeout) => {
            return Err(Fault::failed(format!("{at} goes on as before: {}", error.message()), ""));
        }
        // The process has ended before it could answer.
        _ => {}
    }
    let until = Instant::now() + TAKEOVER_LIMIT;
    while Instant::now() < until {
        std::thread::sleep(LOOK_INTERVAL);
        let Ok((process, now)) = mount_status(&peer, PROCESS_ANSWER_LIMIT) else { continue };
        let Some(kept) = now.keeper.filter(|kept| process != old_process && kept.restarts > keeper.restarts) else {
            continue;
        };
        if now.fuse == spurline_observe::documents::FUSE_STARTING {
            continue;
        }
        if !kept.cause.starts_with(UPGRADE_CAUSE) {
            return Err(Fault::failed(
                format!("{at} goes on with the program of before: {}", kept.cause),
                "look at the mount's log",
            ));
        }
        return Ok(Some(UpgradedMount { before: before.version, after: now.version, pause_ms: kept.pause_ms }));
    }
    Err(Fault::failed(
        format!("no process of {at} answers after {} s", TAKEOVER_LIMIT.as_secs()),
        "look at the mount's log",
    ))
}
