//! Changes of a running host: each with a shell command and the previous value. Applies none.

use crate::interface::IpoibMode;
use serde::{Deserialize, Serialize};

/// A change of a running host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "kebab-case")]
pub enum HostChange {
    /// Load a kernel module.
    Module {
        /// The name.
        name: String,
    },
    /// Set an interface's MTU.
    Mtu {
        /// The interface.
        interface: String,
        /// Bytes before the change.
        from: Option<u32>,
        /// Bytes after the change.
        to: u32,
    },
    /// Set an interface's IPoIB mode.
    Mode {
        /// The interface.
        interface: String,
        /// The mode before the change.
        from: Option<IpoibMode>,
        /// The mode after the change.
        to: IpoibMode,
    },
    /// Set an interface up.
    Up {
        /// The interface.
        interface: String,
    },
    /// Set a kernel parameter.
    Sysctl {
        /// The key, `net.ipv4.conf.all.arp_ignore`.
        key: String,
        /// The value before the change.
        from: Option<String>,
        /// The value after the change.
        to: String,
    },
}

impl HostChange {
    /// The shell command that makes the change.
    pub fn shell_command(&self) -> String {
        match self {
            HostChange::Module { name } => format!("modprobe {name}"),
            HostChange::Mtu { interface, to, .. } => format!("ip link set {interface} mtu {to}"),
            HostChange::Mode { interface, to, .. } => format!("echo {} > /sys/class/net/{interface}/mode", to.as_str()),
            HostChange::Up { interface } => format!("ip link set {interface} up"),
            HostChange::Sysctl { key, to, .. } => format!("sysctl -w {key}={to}"),
        }
    }

    /// The interface whose traffic the change affects.
    pub fn interface(&self) -> Option<&str> {
        match self {
            HostChange::Mtu { interface, .. } | HostChange::Mode { interface, .. } | HostChange::Up { interface } => {
                Some(interface)
            }
            HostChange::Module { .. } | HostChange::Sysctl { .. } => None,
        }
    }

    /// Whether old and new value are equal: the value was set by hand and is only to be made persistent.
    pub fn is_done(&self) -> bool {
        match self {
            HostChange::Mtu { from, to, .. } => *from == Some(*to),
            HostChange::Mode { from, to, .. } => *from == Some(*to),
            HostChange::Sysctl { from, to, .. } => from.as_ref() == Some(to),
            HostChange::Module { .. } | HostChange::Up { .. } => false,
        }
    }

    /// The reverse change; `None` where the previous value is unknown, or where the change does no harm.
    pub fn back(&self) -> Option<HostChange> {
        match self.clone() {
            HostChange::Mtu { interface, from: Some(from), to } => {
                Some(HostChange::Mtu { interface, from: Some(to), to: from })
            }
            HostChange::Mode { interface, from: Some(from), to } => {
                Some(HostChange::Mode { interface, from: Some(to), to: from })
            }
            HostChange::Sysctl { key, from: Some(from), to } => {
                Some(HostChange::Sysctl { key, from: Some(to), to: from })
            }
            _ => None,
        }
    }
}

/// The file of a kernel parameter: `/proc/sys/net/ipv4/conf/eth0.5/rp_filter` for `net.ipv4.conf.eth0/5.rp_filter`.
/// As in sysctl(8), a slash in a key is a dot in the path.
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
