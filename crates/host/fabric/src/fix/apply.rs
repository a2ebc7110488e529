//! Applies changes to the running host: a write to a kernel file each, or modprobe, with a deadline.

use super::FixError;
use crate::change::{HostChange, sysctl_path};
use crate::interface::IpoibMode;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A card restarts the queues when the MTU changes, and a module probes the hardware; both take seconds.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Applies a change. Returns the reverse change, or `None` when nothing had to be changed.
///
/// # Errors
/// The kernel's error, or a missing answer.
pub fn apply_change(change: &HostChange) -> Result<Option<HostChange>, FixError> {
    let Some(path) = change_path(change) else {
        return match change {
            HostChange::Module { name } => load_module(name).map(|()| Some(change.clone())),
            _ => Ok(None),
        };
    };
    let now = std::fs::read_to_string(&path).map_err(|e| FixError::from_io(&path, &e))?.trim().to_owned();
    // The current value is restored later, not the value at the time of the finding.
    let (value, made) = match change.clone() {
        HostChange::Mtu { interface, to, .. } => {
            (to.to_string(), HostChange::Mtu { interface, from: now.parse().ok(), to })
        }
        HostChange::Mode { interface, to, .. } => {
            let from = [IpoibMode::Datagram, IpoibMode::Connected].into_iter().find(|m| m.as_str() == now);
            (to.as_str().to_owned(), HostChange::Mode { interface, from, to })
        }
        HostChange::Sysctl { key, to, .. } => (to.clone(), HostChange::Sysctl { key, from: Some(now.clone()), to }),
        HostChange::Up { interface } => {
            let flags = u32::from_str_radix(now.trim_start_matches("0x"), 16).unwrap_or(0x1002);
            (format!("{:#x}", flags | 1), HostChange::Up { interface })
        }
        module => return Ok(Some(module)),
    };
    if now == value {
        return Ok(None);
    }
    write_value(&path, &value, change)?;
    Ok(Some(made))
}

/// The kernel file to write for a change.
fn change_path(change: &HostChange) -> Option<String> {
    match change {
        HostChange::Mtu { interface, .. } => Some(format!("/sys/class/net/{interface}/mtu")),
        HostChange::Mode { interface, .. } => Some(format!("/sys/class/net/{interface}/mode")),
        HostChange::Up { interface } => Some(format!("/sys/class/net/{interface}/flags")),
        HostChange::Sysctl { key, .. } => Some(sysctl_path(key)),
        HostChange::Module { .. } => None,
    }
}

fn write_value(path: &str, value: &str, change: &HostChange) -> Result<(), FixError> {
    let (done, waits) = mpsc::channel();
    let to = path.to_owned();
    let text = value.to_owned();
    std::thread::spawn(move || done.send(std::fs::write(to, text)));
    match waits.recv_timeout(CHANGE_TIMEOUT) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => {
            let hint = match (e.raw_os_error(), change) {
                // `ip link` gives no reason here.
                (Some(22), HostChange::Mtu { .. }) => " (the driver or the mode allows less: see IPOIB-MTU-REFUSED)",
                (Some(34), HostChange::Mtu { .. }) => " (the interface below it has a smaller MTU)",
                (Some(1 | 13 | 30), _) => " (this needs root and a writable /sys)",
                _ => "",
            };
            Err(FixError::Refused { what: change.shell_command(), why: format!("{e}{hint}") })
        }
        Err(_) => Err(FixError::Late(change.shell_command(), CHANGE_TIMEOUT.as_secs())),
    }
}

fn load_module(name: &str) -> Result<(), FixError> {
    let what = format!("modprobe {name}");
    let mut child = Command::new("modprobe")
        .arg(name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| FixError::from_io(&what, &e))?;
    let end = Instant::now() + CHANGE_TIMEOUT;
    loop {
        match child.try_wait().map_err(|e| FixError::from_io(&what, &e))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => {
                let mut said = String::new();
                if let Some(mut pipe) = child.stderr.take() {
                    let _ = std::io::Read::read_to_string(&mut pipe, &mut said);
                }
                let why = said.lines().next().unwrap_or("").trim();
                let why = if why.is_empty() { status.to_string() } else { why.to_owned() };
                return Err(FixError::Refused { what, why });
            }
            None if Instant::now() > end => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(FixError::Late(what, CHANGE_TIMEOUT.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
