//! Putting things right: which changes findings ask for, in which order; making them; writing them into the system's
//! configuration; and taking all of it back. It judges nothing: what is to be changed stands in the findings.

pub mod apply;
pub mod files;
pub mod journal;

use crate::address::route_to;
use crate::change::Change;
use crate::finding::Finding;
use crate::host::Host;
use crate::interface::Interface;
use std::net::IpAddr;

/// Why something could not be put right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FixError {
    /// The kernel or a program refused.
    #[error("{what}: {why}")]
    Refused {
        /// The command or file.
        what: String,
        /// Its words.
        why: String,
    },
    /// No answer in time.
    #[error("{0}: no answer within {1} s")]
    Late(String, u64),
    /// A file is not as it was left.
    #[error("{0}")]
    File(String),
}

impl FixError {
    pub(crate) fn io(what: impl Into<String>, error: &std::io::Error) -> Self {
        FixError::Refused { what: what.into(), why: error.to_string() }
    }
}

/// A change with the finding it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Id of the finding.
    pub id: &'static str,
    /// The change.
    pub change: Change,
}

/// The changes of all findings, each once, in the order they have to be made: what stands below goes first.
pub fn plan(found: &[Finding], host: &Host) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for finding in found {
        for change in &finding.changes {
            // Two findings may want different values for one thing; the worse finding comes first and wins.
            if is_sane(change) && !steps.iter().any(|s| same_target(&s.change, change)) {
                steps.push(Step { id: finding.id, change: change.clone() });
            }
        }
    }
    let height = |change: &Change| {
        let interface = change.interface().and_then(|n| host.interface(n));
        interface.map_or(0, |i| usize::from(host.physical(i).iter().all(|p| p.name != i.name)))
    };
    let rank = |change: &Change| match change {
        Change::Module { .. } => 0,
        Change::Mode { .. } => 1,
        Change::Mtu { .. } => 2 + height(change),
        Change::Sysctl { .. } => 4,
        Change::Up { .. } => 5,
    };
    steps.sort_by_key(|s| rank(&s.change));
    steps
}

fn same_target(a: &Change, b: &Change) -> bool {
    match (a, b) {
        (Change::Module { name: a }, Change::Module { name: b }) => a == b,
        (Change::Sysctl { key: a, .. }, Change::Sysctl { key: b, .. }) => a == b,
        (Change::Mtu { .. }, Change::Mtu { .. })
        | (Change::Mode { .. }, Change::Mode { .. })
        | (Change::Up { .. }, Change::Up { .. }) => a.interface() == b.interface(),
        _ => false,
    }
}

/// Names come from files that may say anything, and go into paths and commands.
fn is_sane(change: &Change) -> bool {
    let plain = |name: &str, more: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.:@".contains(c) || more.contains(c);
        !name.is_empty()
            && name.len() < 128
            && name.chars().all(fits)
            && !name.starts_with(['-', '.'])
            && !name.contains("..")
    };
    match change {
        Change::Module { name } => plain(name, ""),
        Change::Sysctl { key, to, .. } => plain(key, "/") && plain(to, ""),
        other => other.interface().is_some_and(|i| plain(i, "") && i.len() < 16),
    }
}

/// Whether a change is made only where its finding is named: a larger Ethernet MTU ends all traffic through a switch port
/// that does not carry it, and nobody can see that from here. IPoIB's neighbours agree on a size by themselves.
pub fn needs_naming(host: &Host, change: &Change) -> bool {
    match change {
        Change::Mtu { interface, from, to } => {
            let ipoib = host.interface(interface).is_some_and(Interface::is_ipoib);
            !ipoib && from.is_none_or(|from| from < *to)
        }
        _ => false,
    }
}

/// The interface that this session's own packets leave by: towards the SSH client, else by the default route.
pub fn session_interface(host: &Host, ssh_client: Option<IpAddr>) -> Option<String> {
    let any = IpAddr::from([0, 0, 0, 0]);
    let default = host.routes.iter().filter(|r| r.prefix == 0).min_by_key(|r| r.metric);
    let route = match ssh_client {
        Some(ip) if ip.is_loopback() => return None,
        Some(ip) => route_to(&host.routes, ip),
        None => default.or_else(|| route_to(&host.routes, any)),
    };
    route.map(|r| r.interface.clone())
}

/// Whether a change touches the interface, or what it stands on.
pub fn touches(host: &Host, change: &Change, session: &str) -> bool {
    let Some(name) = change.interface() else { return false };
    let own = host.interface(session);
    name == session
        || own.is_some_and(|i| host.physical(i).iter().any(|p| p.name == name) || i.master.as_deref() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Severity;

    fn mtu(interface: &str, to: u32) -> Change {
        Change::Mtu { interface: interface.into(), from: Some(1500), to }
    }

    #[test]
    fn each_thing_once_and_no_strange_names() {
        let up = Change::Up { interface: "ib0".into() };
        let module = Change::Module { name: "ib_ipoib".into() };
        let found = [
            Finding::new("A", Severity::Error, "x", "y", "").with([up.clone(), mtu("ib0", 65520)]),
            Finding::new("B", Severity::Error, "x", "y", "").with([
                mtu("ib0", 2044),
                mtu("../../etc", 1),
                module.clone(),
            ]),
        ];
        let steps: Vec<Change> = plan(&found, &Host::default()).into_iter().map(|s| s.change).collect();
        assert_eq!(steps, [module, mtu("ib0", 65520), up]);
    }
}
