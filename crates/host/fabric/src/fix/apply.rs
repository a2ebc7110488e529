//! Making changes on the running host: one write to a kernel file each, or modprobe, with a deadline.

use super::FixError;
use crate::change::{Change, sysctl_path};
use crate::interface::IpoibMode;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A card restarts its queues when its MTU changes, and a module probes its hardware: seconds, not minutes.
const DEADLINE: Duration = Duration::from_secs(30);

/// Makes a change; says whether anything had to be changed, and how to take it back.
///
/// # Errors
/// The kernel's refusal, or that it did not answer in time.
pub fn apply(change: &Change) -> Result<Option<Change>, FixError> {
    let Some(path) = path(change) else {
        return match change {
            Change::Module { name } => modprobe(name).map(|()| Some(change.clone())),
            _ => Ok(None),
        };
    };
    let now = std::fs::read_to_string(&path).map_err(|e| FixError::io(&path, &e))?.trim().to_owned();
    // What is there now is what to go back to, whatever was there when the finding was made.
    let (value, made) = match change.clone() {
        Change::Mtu { interface, to, .. } => (to.to_string(), Change::Mtu { interface, from: now.parse().ok(), to }),
        Change::Mode { interface, to, .. } => {
            let from = [IpoibMode::Datagram, IpoibMode::Connected].into_iter().find(|m| m.word() == now);
            (to.word().to_owned(), Change::Mode { interface, from, to })
        }
        Change::Sysctl { key, to, .. } => (to.clone(), Change::Sysctl { key, from: Some(now.clone()), to }),
        Change::Up { interface } => {
            let flags = u32::from_str_radix(now.trim_start_matches("0x"), 16).unwrap_or(0x1002);
            (format!("{:#x}", flags | 1), Change::Up { interface })
        }
        module => return Ok(Some(module)),
    };
    if now == value {
        return Ok(None);
    }
    write(&path, &value, change)?;
    Ok(Some(made))
}

/// The kernel file that a change writes.
fn path(change: &Change) -> Option<String> {
    match change {
        Change::Mtu { interface, .. } => Some(format!("/sys/class/net/{interface}/mtu")),
        Change::Mode { interface, .. } => Some(format!("/sys/class/net/{interface}/mode")),
        Change::Up { interface } => Some(format!("/sys/class/net/{interface}/flags")),
        Change::Sysctl { key, .. } => Some(sysctl_path(key)),
        Change::Module { .. } => None,
    }
}

fn write(path: &str, value: &str, change: &Change) -> Result<(), FixError> {
    let (done, waits) = mpsc::channel();
    let (to, text) = (path.to_owned(), value.to_owned());
    std::thread::spawn(move || done.send(std::fs::write(to, text)));
    match waits.recv_timeout(DEADLINE) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => {
            let hint = match (e.raw_os_error(), change) {
                // What `ip link` says without a word of why.
                (Some(22), Change::Mtu { .. }) => " (the driver or the mode allows less: see IPOIB-MTU-REFUSED)",
                (Some(34), Change::Mtu { .. }) => " (what it stands on has a smaller MTU)",
                (Some(1 | 13 | 30), _) => " (this needs root, and a /sys that can be written)",
                _ => "",
            };
            Err(FixError::Refused { what: change.command(), why: format!("{e}{hint}") })
        }
        Err(_) => Err(FixError::Late(change.command(), DEADLINE.as_secs())),
    }
}

fn modprobe(name: &str) -> Result<(), FixError> {
    let what = format!("modprobe {name}");
    let mut child = Command::new("modprobe")
        .arg(name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| FixError::io(&what, &e))?;
    let end = Instant::now() + DEADLINE;
    loop {
        match child.try_wait().map_err(|e| FixError::io(&what, &e))? {
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
                return Err(FixError::Late(what, DEADLINE.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
