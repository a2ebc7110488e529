//! Applying remedies: the order of the findings' changes, their application, persistence and reversal. Judges nothing: the
//! findings contain the changes.

pub mod apply;
pub mod files;
pub mod journal;

use crate::address::route_to;
use crate::change::HostChange;
use crate::finding::HostFinding;
use crate::host::HostFacts;
use crate::interface::NetInterface;
use std::net::IpAddr;

/// Why a change failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FixError {
    /// The kernel or a program returned an error.
    #[error("{what}: {why}")]
    Refused {
        /// The command or file.
        what: String,
        /// The message.
        why: String,
    },
    /// No answer in time.
    #[error("{0}: no answer within {1} s")]
    Late(String, u64),
    /// A file was changed since.
    #[error("{0}")]
    File(String),
}

impl FixError {
    pub(crate) fn from_io(what: impl Into<String>, error: &std::io::Error) -> Self {
        FixError::Refused { what: what.into(), why: error.to_string() }
    }
}

/// A change and the finding behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixStep {
    /// Id of the finding.
    pub id: &'static str,
    /// The change.
    pub change: HostChange,
}

/// The changes of all findings, each once, in the order of application: lower interfaces first.
pub fn plan_steps(found: &[HostFinding], host: &HostFacts) -> Vec<FixStep> {
    let mut steps: Vec<FixStep> = Vec::new();
    for finding in found {
        for change in &finding.changes {
            // Two findings may want different values for the same setting; the more severe comes first and wins.
            if is_sane(change) && !steps.iter().any(|s| same_target(&s.change, change)) {
                steps.push(FixStep { id: finding.id, change: change.clone() });
            }
        }
    }
    steps.sort_by_key(|s| match &s.change {
        HostChange::Module { .. } => 0,
        HostChange::Mode { .. } => 1,
        HostChange::Mtu { interface, .. } => 2 + usize::from(lies_over_others(host, interface)),
        HostChange::Sysctl { .. } => 4,
        HostChange::Up { .. } => 5,
    });
    steps
}

fn same_target(a: &HostChange, b: &HostChange) -> bool {
    match (a, b) {
        (HostChange::Module { name: a }, HostChange::Module { name: b }) => a == b,
        (HostChange::Sysctl { key: a, .. }, HostChange::Sysctl { key: b, .. }) => a == b,
        (HostChange::Mtu { .. }, HostChange::Mtu { .. })
        | (HostChange::Mode { .. }, HostChange::Mode { .. })
        | (HostChange::Up { .. }, HostChange::Up { .. }) => a.interface() == b.interface(),
        _ => false,
    }
}

/// Names come from files that may contain anything, and are used in paths and commands.
fn is_sane(change: &HostChange) -> bool {
    match change {
        HostChange::Module { name } => is_plain(name, ""),
        HostChange::Sysctl { key, to, .. } => is_plain(key, "/") && is_plain(to, ""),
        other => other.interface().is_some_and(|i| is_plain(i, "") && i.len() < 16),
    }
}

fn is_plain(name: &str, more: &str) -> bool {
    !name.is_empty()
        && name.len() < 128
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.:@".contains(c) || more.contains(c))
        && !name.starts_with(['-', '.'])
        && !name.contains("..")
}

/// Whether a change is made only when the finding is named. A larger Ethernet MTU stops all traffic through a switch port that
/// does not support it, which cannot be detected from here. IPoIB neighbours agree on a size.
pub fn needs_naming(host: &HostFacts, change: &HostChange) -> bool {
    match change {
        HostChange::Mtu { interface, from, to } => {
            let ipoib = host.interface(interface).is_some_and(NetInterface::is_ipoib);
            !ipoib && from.is_none_or(|from| from < *to)
        }
        _ => false,
    }
}

/// The interface that carries this login session: the route to the SSH client, else the default route.
pub fn session_interface(host: &HostFacts, ssh_client: Option<IpAddr>) -> Option<String> {
    let any = IpAddr::from([0, 0, 0, 0]);
    let default = host.routes.iter().filter(|r| r.prefix == 0).min_by_key(|r| r.metric);
    let route = match ssh_client {
        Some(ip) if ip.is_loopback() => return None,
        Some(ip) => route_to(&host.routes, ip),
        None => default.or_else(|| route_to(&host.routes, any)),
    };
    route.map(|r| r.interface.clone())
}

/// Whether a change affects the interface, or another below.
pub fn affects_session(host: &HostFacts, change: &HostChange, session: &str) -> bool {
    let Some(name) = change.interface() else { return false };
    let own = host.interface(session);
    name == session
        || own.is_some_and(|i| {
            host.physical_interfaces(i).iter().any(|p| p.name == name) || i.master.as_deref() == Some(name)
        })
}

/// Whether an interface is none of the host's physical interfaces, like a bond, whose parts take a size first.
fn lies_over_others(host: &HostFacts, name: &str) -> bool {
    let interface = host.interface(name);
    interface.is_some_and(|above| host.physical_interfaces(above).iter().all(|physical| physical.name != above.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Severity;

    fn mtu(interface: &str, to: u32) -> HostChange {
        HostChange::Mtu { interface: interface.into(), from: Some(1500), to }
    }

    #[test]
    fn each_thing_once_and_no_strange_names() {
        let up = HostChange::Up { interface: "ib0".into() };
        let module = HostChange::Module { name: "ib_ipoib".into() };
        let found = [
            HostFinding::new("A", Severity::Error, "x", "y", "").with_changes([up.clone(), mtu("ib0", 65520)]),
            HostFinding::new("B", Severity::Error, "x", "y", "").with_changes([
                mtu("ib0", 2044),
                mtu("../../etc", 1),
                module.clone(),
            ]),
        ];
        let steps: Vec<HostChange> = plan_steps(&found, &HostFacts::default()).into_iter().map(|s| s.change).collect();
        assert_eq!(steps, [module, mtu("ib0", 65520), up]);
    }
}
