//! What can be changed about a running host, one thing each, with the command that does it by hand and the value to
//! go back to. It changes nothing itself.

use crate::interface::IpoibMode;
use serde::{Deserialize, Serialize};

/// One change of a running host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "kebab-case")]
pub enum Change {
    /// Load a kernel module.
    Module {
        /// Its name.
        name: String,
    },
    /// Set an interface's MTU.
    Mtu {
        /// The interface.
        interface: String,
        /// Bytes until now.
        from: Option<u32>,
        /// Bytes from now on.
        to: u32,
    },
    /// Set an interface's IPoIB mode.
    Mode {
        /// The interface.
        interface: String,
        /// The mode until now.
        from: Option<IpoibMode>,
        /// The mode from now on.
        to: IpoibMode,
    },
    /// Switch an interface on.
    Up {
        /// The interface.
        interface: String,
    },
    /// Set a kernel parameter.
    Sysctl {
        /// Its key, `net.ipv4.conf.all.arp_ignore`.
        key: String,
        /// The value until now.
        from: Option<String>,
        /// The value from now on.
        to: String,
    },
}

impl Change {
    /// What to type to make it.
    pub fn command(&self) -> String {
        match self {
            Change::Module { name } => format!("modprobe {name}"),
            Change::Mtu { interface, to, .. } => format!("ip link set {interface} mtu {to}"),
            Change::Mode { interface, to, .. } => format!("echo {} > /sys/class/net/{interface}/mode", to.word()),
            Change::Up { interface } => format!("ip link set {interface} up"),
            Change::Sysctl { key, to, .. } => format!("sysctl -w {key}={to}"),
        }
    }

    /// The interface whose traffic it touches.
    pub fn interface(&self) -> Option<&str> {
        match self {
            Change::Mtu { interface, .. } | Change::Mode { interface, .. } | Change::Up { interface } => {
                Some(interface)
            }
            Change::Module { .. } | Change::Sysctl { .. } => None,
        }
    }

    /// Whether the value is the same before and after: what was set by hand, and is only to be kept.
    pub fn is_done(&self) -> bool {
        match self {
            Change::Mtu { from, to, .. } => *from == Some(*to),
            Change::Mode { from, to, .. } => *from == Some(*to),
            Change::Sysctl { from, to, .. } => from.as_ref() == Some(to),
            Change::Module { .. } | Change::Up { .. } => false,
        }
    }

    /// The change that takes it back; none where nobody knows the value before, or where it does no harm to stay.
    pub fn back(&self) -> Option<Change> {
        match self.clone() {
            Change::Mtu { interface, from: Some(from), to } => {
                Some(Change::Mtu { interface, from: Some(to), to: from })
            }
            Change::Mode { interface, from: Some(from), to } => {
                Some(Change::Mode { interface, from: Some(to), to: from })
            }
            Change::Sysctl { key, from: Some(from), to } => Some(Change::Sysctl { key, from: Some(to), to: from }),
            _ => None,
        }
    }
}

/// `/proc/sys/net/ipv4/conf/eth0.5/rp_filter` for `net.ipv4.conf.eth0/5.rp_filter`: as sysctl(8), a slash in a key is
/// a dot in the path.
pub fn sysctl_path(key: &str) -> String {
    let path: String = key
        .chars()
        .map(|c| {
            if c == '.' {
                '/'
            } else if c == '/' {
                '.'
            } else {
                c
            }
        })
        .collect();
    format!("/proc/sys/{path}")
}
