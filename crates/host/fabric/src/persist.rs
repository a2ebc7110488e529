//! Persistent settings of interfaces: ifupdown, systemd-networkd, NetworkManager, and the ifcfg files of older
//! systems. Of each file only relevant lines are read; keys and passwords are never stored.

use crate::address::same_network;
use crate::interface::IpoibMode;
use crate::tree::{HostTree, parse_number};
use std::net::IpAddr;

/// All persistent settings.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SavedSettings {
    /// Whether any of these systems is present.
    pub any: bool,
    /// The settings of each file.
    pub settings: Vec<SavedSetting>,
}

/// A file's settings of an interface.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SavedSetting {
    pub file: String,
    /// The interface; networkd allows patterns.
    pub interface: String,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// IPoIB mode.
    pub mode: Option<IpoibMode>,
    /// Static addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether addresses come from DHCP.
    pub dynamic: bool,
}

impl SavedSettings {
    pub fn of_interface<'a>(&'a self, interface: &'a str) -> impl Iterator<Item = &'a SavedSetting> {
        self.settings.iter().filter(move |s| s.interface.split_whitespace().any(|p| matches_pattern(p, interface)))
    }
}

impl SavedSetting {
    /// Whether an address of the interface comes from this file.
    pub fn assigns_address(&self, ip: IpAddr) -> bool {
        self.dynamic || self.addresses.iter().any(|a| same_network(*a, ip, if ip.is_ipv4() { 32 } else { 128 }))
    }
}

/// Matches a pattern with `*` and `?`, as networkd does.
pub(crate) fn matches_pattern(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let mut p = 0;
    let mut n = 0;
    let mut star = None;
    while n < name.len() {
        if p < pattern.len() && (pattern[p] == '?' || pattern[p] == name[n]) {
            p += 1;
            n += 1;
        } else if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, n));
            p += 1;
        } else if let Some((at, from)) = star {
            p = at + 1;
            n = from + 1;
            star = Some((at, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Reads all persistent settings.
pub fn read_saved(tree: &HostTree) -> SavedSettings {
    let mut saved = SavedSettings::default();
    let roots = [
        "etc/network",
        "etc/systemd/network",
        "run/systemd/network",
        "etc/NetworkManager",
        "etc/sysconfig/network-scripts",
        "etc/netplan",
    ];
    saved.any = roots.iter().any(|r| tree.exists(r));
    let mut interfaces = vec!["etc/network/interfaces".to_owned()];
    interfaces
        .extend(tree.list_names("etc/network/interfaces.d").iter().map(|n| format!("etc/network/interfaces.d/{n}")));
    for file in interfaces {
        if let Some(text) = tree.read_text_filtered(&file, keep_ifupdown_lines) {
            saved.settings.extend(parse_ifupdown(&file, &text));
        }
    }
    for dir in ["etc/systemd/network", "run/systemd/network", "usr/lib/systemd/network"] {
        for name in tree.list_names(dir).iter().filter(|n| n.ends_with(".network")) {
            let file = format!("{dir}/{name}");
            let mut text = tree.read_text_filtered(&file, keep_ini_lines).unwrap_or_default();
            for drop_in in tree.list_names(&format!("{file}.d")) {
                text.push('\n');
                text.push_str(
                    &tree.read_text_filtered(&format!("{file}.d/{drop_in}"), keep_ini_lines).unwrap_or_default(),
                );
            }
            saved.settings.extend(parse_networkd(&file, &text));
        }
    }
    for dir in ["etc/NetworkManager/system-connections", "run/NetworkManager/system-connections"] {
        for name in tree.list_names(dir) {
            let file = format!("{dir}/{name}");
            if let Some(text) = tree.read_text_filtered(&file, keep_ini_lines) {
                saved.settings.extend(parse_network_manager(&file, &text));
            }
        }
    }
    let dir = "etc/sysconfig/network-scripts";
    for name in tree.list_names(dir).iter().filter(|n| n.starts_with("ifcfg-") && *n != "ifcfg-lo") {
        let file = format!("{dir}/{name}");
        if let Some(text) = tree.read_text_filtered(&file, keep_ini_lines) {
            saved.settings.extend(parse_ifcfg(&file, &text));
        }
    }
    saved
}

/// Keys whose values are stored, in any of the formats.
const STORED_KEYS: &[&str] = &[
    "name",
    "mtubytes",
    "mode",
    "dhcp",
    "address",
    "address1",
    "address2",
    "method",
    "interface-name",
    "mtu",
    "type",
    "transport-mode",
    "device",
    "bootproto",
    "ipaddr",
    "connected_mode",
    "id",
    "gateway",
];

fn keep_ini_lines(text: &str) -> String {
    text.lines()
        .filter(|line| {
            let line = line.trim();
            let key = line.split('=').next().unwrap_or_default().trim().to_ascii_lowercase();
            line.starts_with('[') || STORED_KEYS.contains(&key.as_str())
        })
        .collect::<Vec<_>>()
        .join("\n")
}

fn keep_ifupdown_lines(text: &str) -> String {
    text.lines()
        .filter(|line| {
            let mut words = line.split_whitespace();
            match words.next().unwrap_or_default() {
                "auto" | "iface" | "address" | "netmask" | "mtu" | "gateway" => true,
                "pre-up" | "up" | "post-up" => line.contains("/mode") || line.contains(" mtu "),
                word => word.starts_with("allow-"),
            }
        })
        .collect::<Vec<_>>()
        .join("\n")
}

fn parse_ip(text: &str) -> Option<IpAddr> {
    text.split(['/', ',']).next()?.trim().trim_matches('"').parse().ok()
}

fn parse_u32(text: &str) -> Option<u32> {
    // networkd accepts `9000`, and `9K`.
    let text = text.trim().trim_matches('"');
    let (digits, factor) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1024),
        None => (text, 1),
    };
    parse_number(digits).and_then(|n| u32::try_from(n.checked_mul(factor)?).ok())
}

fn parse_mode(text: &str) -> Option<IpoibMode> {
    match text.trim().trim_matches('"').to_ascii_lowercase().as_str() {
        "connected" | "yes" => Some(IpoibMode::Connected),
        "datagram" | "no" => Some(IpoibMode::Datagram),
        _ => None,
    }
}

fn parse_ifupdown(file: &str, text: &str) -> Vec<SavedSetting> {
    let mut all: Vec<SavedSetting> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(key) = words.next() else { continue };
        let rest: Vec<&str> = words.collect();
        if key == "iface" {
            let Some(name) = rest.first() else { continue };
            let dynamic = matches!(rest.last(), Some(&"dhcp" | &"auto"));
            all.push(SavedSetting {
                file: format!("/{file}"),
                interface: (*name).to_owned(),
                dynamic,
                ..SavedSetting::default()
            });
            continue;
        }
        let Some(setting) = all.last_mut() else { continue };
        let value = rest.join(" ");
        match key {
            "address" => setting.addresses.extend(parse_ip(&value)),
            "mtu" => setting.mtu = parse_u32(&value),
            "pre-up" | "up" | "post-up" => {
                if value.contains("/mode") {
                    let words = ["connected", "datagram"];
                    setting.mode =
                        words.iter().find(|w| value.contains(**w)).and_then(|w| parse_mode(w)).or(setting.mode);
                } else if let Some((_, mtu)) = value.split_once(" mtu ") {
                    setting.mtu = parse_u32(mtu).or(setting.mtu);
                }
            }
            _ => {}
        }
    }
    all
}

/// Section and key in lower case, and value, of each line.
fn parse_ini(text: &str) -> Vec<(String, String, String)> {
    let mut section = String::new();
    let mut out = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_ascii_lowercase();
        } else if let Some((key, value)) = line.split_once('=') {
            out.push((section.clone(), key.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    out
}

fn parse_networkd(file: &str, text: &str) -> Option<SavedSetting> {
    let mut setting = SavedSetting { file: format!("/{file}"), ..SavedSetting::default() };
    for (section, key, value) in parse_ini(text) {
        match (section.as_str(), key.as_str()) {
            ("match", "name") => setting.interface = value,
            ("link", "mtubytes") => setting.mtu = parse_u32(&value),
            ("ipoib", "mode") => setting.mode = parse_mode(&value),
            ("network" | "address", "address") => setting.addresses.extend(parse_ip(&value)),
            ("network", "dhcp") => setting.dynamic |= !matches!(value.as_str(), "no" | "false" | "0"),
            _ => {}
        }
    }
    (!setting.interface.is_empty()).then_some(setting)
}

fn parse_network_manager(file: &str, text: &str) -> Option<SavedSetting> {
    let mut setting = SavedSetting { file: format!("/{file}"), ..SavedSetting::default() };
    for (section, key, value) in parse_ini(text) {
        match (section.as_str(), key.as_str()) {
            ("connection", "interface-name") => setting.interface = value,
            ("ethernet" | "infiniband" | "802-3-ethernet", "mtu") => setting.mtu = parse_u32(&value).filter(|m| *m > 0),
            ("infiniband", "transport-mode") => setting.mode = parse_mode(&value),
            ("ipv4" | "ipv6", "method") => setting.dynamic |= value == "auto" && section == "ipv4",
            ("ipv4" | "ipv6", "address1" | "address2") => setting.addresses.extend(parse_ip(&value)),
            _ => {}
        }
    }
    (!setting.interface.is_empty()).then_some(setting)
}

fn parse_ifcfg(file: &str, text: &str) -> Option<SavedSetting> {
    let mut setting = SavedSetting { file: format!("/{file}"), ..SavedSetting::default() };
    setting.interface = file.rsplit("ifcfg-").next()?.to_owned();
    for (_, key, value) in parse_ini(text) {
        let value = value.trim_matches('"').to_owned();
        match key.as_str() {
            "device" => setting.interface = value,
            "mtu" => setting.mtu = parse_u32(&value),
            "connected_mode" => setting.mode = parse_mode(&value),
            "ipaddr" => setting.addresses.extend(parse_ip(&value)),
            "bootproto" => setting.dynamic |= value == "dhcp",
            _ => {}
        }
    }
    Some(setting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::TreeEntry;

    fn saved(files: &[(&str, &str)]) -> SavedSettings {
        read_saved(&HostTree::from_memory(
            files.iter().map(|(p, t)| ((*p).to_owned(), TreeEntry::File(t.as_bytes().to_vec()))).collect(),
        ))
    }

    #[test]
    fn four_ways_of_saying_the_same() {
        let all = saved(&[
            (
                "etc/network/interfaces",
                "auto ib0\niface ib0 inet static\n  address 10.0.0.1/24\n  pre-up echo connected > /sys/class/net/ib0/mode\n  mtu 65520\n  wpa-psk secret\n",
            ),
            (
                "etc/systemd/network/10-ib.network",
                "[Match]\nName=ib1 ib2*\n[Link]\nMTUBytes=65520\n[IPoIB]\nMode=connected\n[Network]\nAddress=10.0.0.1/24\n",
            ),
            (
                "etc/NetworkManager/system-connections/ib3.nmconnection",
                "[connection]\ninterface-name=ib3\n[infiniband]\ntransport-mode=connected\nmtu=65520\n[ipv4]\naddress1=10.0.0.1/24,10.0.0.254\n[802-1x]\npassword=secret\n",
            ),
            (
                "etc/sysconfig/network-scripts/ifcfg-ib4",
                "DEVICE=\"ib4\"\nMTU=65520\nCONNECTED_MODE=yes\nIPADDR=10.0.0.1\n",
            ),
        ]);
        assert!(all.any);
        for name in ["ib0", "ib1", "ib22", "ib3", "ib4"] {
            let one: Vec<_> = all.of_interface(name).collect();
            assert_eq!(one.len(), 1, "{name}");
            let seen = (one[0].mtu, one[0].mode, one[0].assigns_address("10.0.0.1".parse().unwrap()));
            assert_eq!(seen, (Some(65520), Some(IpoibMode::Connected), true), "{name}");
        }
        assert_eq!(all.of_interface("ib9").count(), 0);
    }

    #[test]
    fn secrets_are_not_kept() {
        let text = "[wifi-security]\npsk=hunter2\n[connection]\nid=x\n[802-1x]\npassword = hunter2\n";
        assert!(!keep_ini_lines(text).contains("hunter2"));
        assert!(
            !keep_ifupdown_lines("iface wlan0 inet dhcp\n wpa-psk hunter2\n up mount -o password=hunter2 /x\n")
                .contains("hunter2")
        );
    }
}
