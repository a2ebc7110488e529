//! Settings in the system's configuration files: the new text of each file, from the current text. Writes nothing; lines that are
//! not about the setting stay.

use super::FixError;
use crate::change::HostChange;
use crate::host::HostFacts;
use crate::interface::IpoibMode;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

/// The system that configures interfaces at boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkSystem {
    /// `/etc/network/interfaces`.
    Ifupdown,
    /// `/etc/systemd/network`.
    Networkd,
    /// `/etc/NetworkManager/system-connections`.
    NetworkManager,
    /// Kernel modules only: `/etc/modules-load.d`.
    ModulesLoad,
}

/// A file with new content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedFile {
    /// Below the root, without the leading slash.
    pub path: String,
    /// The new content.
    pub text: String,
    /// Whether only root may read the file.
    pub private: bool,
}

/// Settings to write for an interface.
#[derive(Debug, Clone, Default, PartialEq)]
struct InterfaceSettings {
    mtu: Option<u32>,
    mode: Option<IpoibMode>,
    is_ipoib: bool,
    addresses: Vec<(IpAddr, u8)>,
}

const FILE_HEADER: &str = "# Written by `spurline net fix --persist`; `spurline net fix --revert` takes it back.\n";

/// The files below `root` that make the changes persistent.
///
/// # Errors
/// When a file cannot be read, or cannot be changed without affecting other interfaces.
pub fn wanted_files(
    changes: &[HostChange],
    host: &HostFacts,
    system: NetworkSystem,
    root: &Path,
) -> Result<Vec<WantedFile>, FixError> {
    let mut interfaces: BTreeMap<&str, InterfaceSettings> = BTreeMap::new();
    let mut modules = Vec::new();
    let mut sysctls = BTreeMap::new();
    for change in changes {
        match change {
            HostChange::Mtu { interface, to, .. } => interfaces.entry(interface).or_default().mtu = Some(*to),
            HostChange::Mode { interface, to, .. } => interfaces.entry(interface).or_default().mode = Some(*to),
            HostChange::Module { name } => modules.push(name.clone()),
            HostChange::Sysctl { key, to, .. } => drop(sysctls.insert(key.clone(), to.clone())),
            HostChange::Up { .. } => {}
        }
    }
    let mut files = Vec::new();
    if !modules.is_empty() {
        let path = "etc/modules-load.d/spurline.conf";
        let old = read_config(root, path)?;
        files.push(WantedFile { path: path.into(), text: with_lines(old.as_deref(), &modules), private: false });
    }
    if system == NetworkSystem::ModulesLoad {
        return Ok(files);
    }
    if !sysctls.is_empty() {
        let path = "etc/sysctl.d/90-spurline.conf";
        let old = read_config(root, path)?;
        files.push(WantedFile { path: path.into(), text: with_values(old.as_deref(), &sysctls), private: false });
    }
    for (name, mut want) in interfaces {
        if let Some(interface) = host.interface(name) {
            want.is_ipoib = interface.is_ipoib();
            want.addresses = interface.addresses.clone();
        }
        let file = match system {
            NetworkSystem::Ifupdown => ifupdown_file(root, name, &want, &files)?,
            NetworkSystem::Networkd => networkd_file(root, name, &want)?,
            _ => network_manager_file(root, name, &want)?,
        };
        // Two interfaces may share a file: the later text includes the earlier.
        files.retain(|f| f.path != file.path);
        files.push(file);
    }
    Ok(files)
}

fn read_config(root: &Path, path: &str) -> Result<Option<String>, FixError> {
    match std::fs::read_to_string(root.join(path)) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(FixError::from_io(format!("/{path}"), &e)),
    }
}

/// The names of a directory's files, sorted.
fn list_configs(root: &Path, dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root.join(dir)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn with_lines(old: Option<&str>, lines: &[String]) -> String {
    let mut text = old.unwrap_or(FILE_HEADER).to_owned();
    for line in lines {
        if !text.lines().any(|l| l.trim() == line) {
            if !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

fn with_values(old: Option<&str>, values: &BTreeMap<String, String>) -> String {
    let kept = old.unwrap_or(FILE_HEADER).lines().filter(|l| {
        let key = l.split('=').next().unwrap_or_default().trim();
        !values.contains_key(key)
    });
    let mut text: String = kept.map(|l| format!("{l}\n")).collect();
    for (key, value) in values {
        text.push_str(&format!("{key} = {value}\n"));
    }
    text
}

/// Changes the stanza of the interface; without a stanza, adds a new file.
fn ifupdown_file(
    root: &Path,
    name: &str,
    want: &InterfaceSettings,
    made: &[WantedFile],
) -> Result<WantedFile, FixError> {
    let mut paths = vec!["etc/network/interfaces".to_owned()];
    paths
        .extend(list_configs(root, "etc/network/interfaces.d").iter().map(|n| format!("etc/network/interfaces.d/{n}")));
    let own = |line: &str| {
        let mut words = line.split_whitespace();
        words.next() == Some("iface") && words.next() == Some(name)
    };
    for path in paths {
        let earlier = made.iter().find(|f| f.path == path).map(|f| f.text.clone());
        let Some(text) = earlier.map_or_else(|| read_config(root, &path), |t| Ok(Some(t)))? else { continue };
        if text.lines().any(own) {
            return Ok(WantedFile { text: in_stanza(&text, own, name, want), path, private: false });
        }
    }
    let path = format!("etc/network/interfaces.d/spurline-{name}");
    let mut text = format!("{FILE_HEADER}auto {name}\niface {name} inet manual\n");
    text = in_stanza(&text, own, name, want);
    Ok(WantedFile { path, text, private: false })
}

fn in_stanza(text: &str, own: impl Fn(&str) -> bool, name: &str, want: &InterfaceSettings) -> String {
    let mode_file = format!("/sys/class/net/{name}/mode");
    let mut out = String::new();
    let mut inside = false;
    let mut done = false;
    for line in text.lines() {
        if begins_stanza(line) {
            inside = own(line);
        }
        let word = line.split_whitespace().next().unwrap_or_default();
        let replaced = inside
            && (want.mtu.is_some() && word == "mtu"
                || want.mode.is_some() && line.contains(&mode_file) && word != "iface");
        if replaced {
            continue;
        }
        out.push_str(line);
        out.push('\n');
        // The interface's first stanza gets the settings; which apply to IPv6 too.
        if own(line) && !done {
            done = true;
            if let Some(mode) = want.mode {
                out.push_str(&format!("    pre-up echo {} > {mode_file}\n", mode.as_str()));
            }
            if let Some(mtu) = want.mtu {
                out.push_str(&format!("    mtu {mtu}\n"));
            }
        }
    }
    out
}

fn begins_stanza(line: &str) -> bool {
    let word = line.split_whitespace().next().unwrap_or_default();
    matches!(word, "iface" | "auto" | "mapping" | "source" | "source-directory" | "no-auto-down" | "no-scripts")
        || word.starts_with("allow-")
}

/// A drop-in for the file that matches the interface; without such a file, a new file that keeps the addresses.
fn networkd_file(root: &Path, name: &str, want: &InterfaceSettings) -> Result<WantedFile, FixError> {
    let mut settings = String::new();
    if let Some(mtu) = want.mtu {
        settings.push_str(&format!("[Link]\nMTUBytes={mtu}\n"));
    }
    if let Some(mode) = want.mode {
        settings.push_str(&format!("[IPoIB]\nMode={}\n", mode.as_str()));
    }
    let own = format!("10-spurline-{name}.network");
    for dir in ["etc/systemd/network", "run/systemd/network", "usr/lib/systemd/network"] {
        for file in list_configs(root, dir).iter().filter(|n| n.ends_with(".network") && **n != own) {
            let text = read_config(root, &format!("{dir}/{file}"))?.unwrap_or_default();
            let Some(pattern) = match_name(&text) else { continue };
            if pattern == name {
                let path = format!("etc/systemd/network/{file}.d/50-spurline.conf");
                return Ok(WantedFile { path, text: format!("{FILE_HEADER}{settings}"), private: false });
            }
            if pattern.split_whitespace().any(|p| crate::persist::matches_pattern(p, name)) && pattern != "*" {
                return Err(FixError::File(format!(
                    "/{dir}/{file} is for all of '{pattern}': what is written there would change other interfaces than \
                     {name}; give {name} a file of its own first"
                )));
            }
        }
    }
    let text = format!("{FILE_HEADER}[Match]\nName={name}\n\n{settings}\n[Network]\nKeepConfiguration=yes\n");
    Ok(WantedFile { path: format!("etc/systemd/network/{own}"), text, private: false })
}

fn match_name(text: &str) -> Option<String> {
    let mut inside = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            inside = line == "[Match]";
        } else if let Some((key, value)) = line.split_once('=')
            && inside
            && key.trim() == "Name"
        {
            return Some(value.trim().to_owned());
        }
    }
    None
}

/// Changes the interface's connection; without a connection, adds a connection with the current addresses.
fn network_manager_file(root: &Path, name: &str, want: &InterfaceSettings) -> Result<WantedFile, FixError> {
    let dir = "etc/NetworkManager/system-connections";
    let section = if want.is_ipoib { "infiniband" } else { "ethernet" };
    let mut keys = Vec::new();
    if let Some(mode) = want.mode {
        keys.push(("transport-mode", mode.as_str().to_owned()));
    }
    if let Some(mtu) = want.mtu {
        keys.push(("mtu", mtu.to_string()));
    }
    for file in list_configs(root, dir) {
        let path = format!("{dir}/{file}");
        let Some(text) = read_config(root, &path)? else { continue };
        if text.lines().any(|l| l.replace(' ', "") == format!("interface-name={name}")) {
            return Ok(WantedFile { text: in_section(&text, section, &keys), path, private: true });
        }
    }
    let mut text = format!(
        "{FILE_HEADER}[connection]\nid=spurline-{name}\ntype={section}\ninterface-name={name}\n\n[{section}]\n"
    );
    if want.is_ipoib && want.mode.is_none() {
        text.push_str("transport-mode=datagram\n");
    }
    for (family, is_v4) in [("ipv4", true), ("ipv6", false)] {
        let own: Vec<_> = want
            .addresses
            .iter()
            .filter(|(ip, _)| ip.is_ipv4() == is_v4 && !crate::address::is_link_local(*ip))
            .collect();
        text.push_str(&format!("\n[{family}]\nmethod={}\n", if own.is_empty() { "auto" } else { "manual" }));
        for (i, (ip, prefix)) in own.iter().enumerate() {
            text.push_str(&format!("address{}={ip}/{prefix}\n", i + 1));
        }
    }
    Ok(WantedFile {
        path: format!("{dir}/spurline-{name}.nmconnection"),
        text: in_section(&text, section, &keys),
        private: true,
    })
}

/// Sets keys in a section, which is added when missing.
fn in_section(text: &str, section: &str, keys: &[(&str, String)]) -> String {
    let head = format!("[{section}]");
    let mut out = String::new();
    let mut inside = false;
    let mut seen = false;
    for line in text.lines() {
        if line.trim().starts_with('[') {
            inside = line.trim() == head;
        }
        let key = line.split('=').next().unwrap_or_default().trim();
        if inside && line.contains('=') && keys.iter().any(|(k, _)| *k == key) {
            continue;
        }
        out.push_str(line);
        out.push('\n');
        if inside && line.trim() == head && !seen {
            seen = true;
            keys.iter().for_each(|(k, v)| out.push_str(&format!("{k}={v}\n")));
        }
    }
    if !seen {
        out.push_str(&format!("\n{head}\n"));
        keys.iter().for_each(|(k, v)| out.push_str(&format!("{k}={v}\n")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stanza_keeps_what_is_in_it() {
        let text = "auto ib0\niface ib0 inet static\n  address 10.0.0.1/24\n  mtu 2044\n# a word\niface ib0 inet6 auto\nauto eth0\niface eth0 inet dhcp\n  mtu 9000\n";
        let want =
            InterfaceSettings { mtu: Some(65520), mode: Some(IpoibMode::Connected), ..InterfaceSettings::default() };
        let own = |l: &str| l.starts_with("iface ib0");
        let once = in_stanza(text, own, "ib0", &want);
        assert_eq!(
            once,
            "auto ib0\niface ib0 inet static\n    pre-up echo connected > /sys/class/net/ib0/mode\n    mtu 65520\n  address 10.0.0.1/24\n# a word\niface ib0 inet6 auto\nauto eth0\niface eth0 inet dhcp\n  mtu 9000\n"
        );
        assert_eq!(in_stanza(&once, own, "ib0", &want), once, "twice is once");
    }

    #[test]
    fn a_section_keeps_what_is_in_it() {
        let text = "[connection]\ninterface-name=ib0\n[infiniband]\nmtu=2044\nmac-address=80:00\n[ipv4]\nmethod=auto\n";
        let keys = [("transport-mode", "connected".to_owned()), ("mtu", "65520".to_owned())];
        let once = in_section(text, "infiniband", &keys);
        assert!(
            once.contains("[infiniband]\ntransport-mode=connected\nmtu=65520\nmac-address=80:00\n[ipv4]"),
            "{once}"
        );
        assert_eq!(in_section(&once, "infiniband", &keys), once);
        assert!(
            in_section("[connection]\n", "ethernet", &keys)
                .ends_with("\n[ethernet]\ntransport-mode=connected\nmtu=65520\n")
        );
    }
}
