//! Settings into the system's configuration files: what each file has to hold, given what it holds. It works on texts
//! and writes nothing; every line that is not about the setting stays as it is.

use super::FixError;
use crate::change::Change;
use crate::host::Host;
use crate::interface::IpoibMode;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

/// The system that sets interfaces up at start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// `/etc/network/interfaces`.
    Ifupdown,
    /// `/etc/systemd/network`.
    Networkd,
    /// `/etc/NetworkManager/system-connections`.
    NetworkManager,
    /// Kernel modules only: `/etc/modules-load.d`.
    ModulesLoad,
}

/// A file as it has to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Below the root, without the leading slash.
    pub path: String,
    /// What has to be in it.
    pub text: String,
    /// Whether others must not read it.
    pub private: bool,
}

/// What an interface has to be set to.
#[derive(Debug, Clone, Default, PartialEq)]
struct Want {
    mtu: Option<u32>,
    mode: Option<IpoibMode>,
    is_ipoib: bool,
    addresses: Vec<(IpAddr, u8)>,
}

const HEAD: &str = "# Written by `spurline net fix --persist`; `spurline net fix --revert` takes it back.\n";

/// The files below `root` that make the changes outlive a restart.
///
/// # Errors
/// When an existing file can't be read, or can't be changed without touching other interfaces.
pub fn wanted(changes: &[Change], host: &Host, system: System, root: &Path) -> Result<Vec<Wanted>, FixError> {
    let mut interfaces: BTreeMap<&str, Want> = BTreeMap::new();
    let (mut modules, mut sysctls) = (Vec::new(), BTreeMap::new());
    for change in changes {
        match change {
            Change::Mtu { interface, to, .. } => interfaces.entry(interface).or_default().mtu = Some(*to),
            Change::Mode { interface, to, .. } => interfaces.entry(interface).or_default().mode = Some(*to),
            Change::Module { name } => modules.push(name.clone()),
            Change::Sysctl { key, to, .. } => drop(sysctls.insert(key.clone(), to.clone())),
            Change::Up { .. } => {}
        }
    }
    let mut files = Vec::new();
    if !modules.is_empty() {
        let path = "etc/modules-load.d/spurline.conf";
        let old = read(root, path)?;
        files.push(Wanted { path: path.into(), text: with_lines(old.as_deref(), &modules), private: false });
    }
    if system == System::ModulesLoad {
        return Ok(files);
    }
    if !sysctls.is_empty() {
        let path = "etc/sysctl.d/90-spurline.conf";
        let old = read(root, path)?;
        files.push(Wanted { path: path.into(), text: with_values(old.as_deref(), &sysctls), private: false });
    }
    for (name, mut want) in interfaces {
        if let Some(interface) = host.interface(name) {
            want.is_ipoib = interface.is_ipoib();
            want.addresses = interface.addresses.clone();
        }
        let file = match system {
            System::Ifupdown => ifupdown(root, name, &want, &files)?,
            System::Networkd => networkd(root, name, &want)?,
            _ => network_manager(root, name, &want)?,
        };
        // Two interfaces may stand in one file: the later text was made from the earlier.
        files.retain(|f| f.path != file.path);
        files.push(file);
    }
    Ok(files)
}

fn read(root: &Path, path: &str) -> Result<Option<String>, FixError> {
    match std::fs::read_to_string(root.join(path)) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(FixError::io(format!("/{path}"), &e)),
    }
}

/// The names of a directory's files, sorted.
fn names(root: &Path, dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root.join(dir)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn with_lines(old: Option<&str>, lines: &[String]) -> String {
    let mut text = old.unwrap_or(HEAD).to_owned();
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
    let kept = old.unwrap_or(HEAD).lines().filter(|l| {
        let key = l.split('=').next().unwrap_or_default().trim();
        !values.contains_key(key)
    });
    let mut text: String = kept.map(|l| format!("{l}\n")).collect();
    for (key, value) in values {
        text.push_str(&format!("{key} = {value}\n"));
    }
    text
}

/// In the stanza of the interface; without one, a new file beside.
fn ifupdown(root: &Path, name: &str, want: &Want, made: &[Wanted]) -> Result<Wanted, FixError> {
    let mut paths = vec!["etc/network/interfaces".to_owned()];
    paths.extend(names(root, "etc/network/interfaces.d").iter().map(|n| format!("etc/network/interfaces.d/{n}")));
    let own = |line: &str| {
        let mut words = line.split_whitespace();
        words.next() == Some("iface") && words.next() == Some(name)
    };
    for path in paths {
        let earlier = made.iter().find(|f| f.path == path).map(|f| f.text.clone());
        let Some(text) = earlier.map_or_else(|| read(root, &path), |t| Ok(Some(t)))? else { continue };
        if text.lines().any(own) {
            return Ok(Wanted { text: in_stanza(&text, own, name, want), path, private: false });
        }
    }
    let path = format!("etc/network/interfaces.d/spurline-{name}");
    let mut text = format!("{HEAD}auto {name}\niface {name} inet manual\n");
    text = in_stanza(&text, own, name, want);
    Ok(Wanted { path, text, private: false })
}

fn in_stanza(text: &str, own: impl Fn(&str) -> bool, name: &str, want: &Want) -> String {
    let begins = |line: &str| {
        let word = line.split_whitespace().next().unwrap_or_default();
        matches!(word, "iface" | "auto" | "mapping" | "source" | "source-directory" | "no-auto-down" | "no-scripts")
            || word.starts_with("allow-")
    };
    let mode_file = format!("/sys/class/net/{name}/mode");
    let (mut out, mut inside, mut done) = (String::new(), false, false);
    for line in text.lines() {
        if begins(line) {
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
        // The interface's first stanza has it; IPv6 follows the same interface.
        if own(line) && !done {
            done = true;
            if let Some(mode) = want.mode {
                out.push_str(&format!("    pre-up echo {} > {mode_file}\n", mode.word()));
            }
            if let Some(mtu) = want.mtu {
                out.push_str(&format!("    mtu {mtu}\n"));
            }
        }
    }
    out
}

/// A drop-in beside the file that matches the interface; without one, a file of its own that keeps the addresses.
fn networkd(root: &Path, name: &str, want: &Want) -> Result<Wanted, FixError> {
    let mut settings = String::new();
    if let Some(mtu) = want.mtu {
        settings.push_str(&format!("[Link]\nMTUBytes={mtu}\n"));
    }
    if let Some(mode) = want.mode {
        settings.push_str(&format!("[IPoIB]\nMode={}\n", mode.word()));
    }
    let own = format!("10-spurline-{name}.network");
    for dir in ["etc/systemd/network", "run/systemd/network", "usr/lib/systemd/network"] {
        for file in names(root, dir).iter().filter(|n| n.ends_with(".network") && **n != own) {
            let text = read(root, &format!("{dir}/{file}"))?.unwrap_or_default();
            let Some(pattern) = match_name(&text) else { continue };
            if pattern == name {
                let path = format!("etc/systemd/network/{file}.d/50-spurline.conf");
                return Ok(Wanted { path, text: format!("{HEAD}{settings}"), private: false });
            }
            if pattern.split_whitespace().any(|p| crate::persist::matches(p, name)) && pattern != "*" {
                return Err(FixError::File(format!(
                    "/{dir}/{file} is for all of '{pattern}': what is written there would change other interfaces than \
                     {name}; give {name} a file of its own first"
                )));
            }
        }
    }
    let text = format!("{HEAD}[Match]\nName={name}\n\n{settings}\n[Network]\nKeepConfiguration=yes\n");
    Ok(Wanted { path: format!("etc/systemd/network/{own}"), text, private: false })
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

/// In the interface's own connection; without one, a connection with the addresses it has now.
fn network_manager(root: &Path, name: &str, want: &Want) -> Result<Wanted, FixError> {
    let dir = "etc/NetworkManager/system-connections";
    let section = if want.is_ipoib { "infiniband" } else { "ethernet" };
    let mut keys = Vec::new();
    if let Some(mode) = want.mode {
        keys.push(("transport-mode", mode.word().to_owned()));
    }
    if let Some(mtu) = want.mtu {
        keys.push(("mtu", mtu.to_string()));
    }
    for file in names(root, dir) {
        let path = format!("{dir}/{file}");
        let Some(text) = read(root, &path)? else { continue };
        if text.lines().any(|l| l.replace(' ', "") == format!("interface-name={name}")) {
            return Ok(Wanted { text: in_section(&text, section, &keys), path, private: true });
        }
    }
    let mut text =
        format!("{HEAD}[connection]\nid=spurline-{name}\ntype={section}\ninterface-name={name}\n\n[{section}]\n");
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
    Ok(Wanted {
        path: format!("{dir}/spurline-{name}.nmconnection"),
        text: in_section(&text, section, &keys),
        private: true,
    })
}

/// The keys with their values in a section, which is added when it is not there.
fn in_section(text: &str, section: &str, keys: &[(&str, String)]) -> String {
    let head = format!("[{section}]");
    let (mut out, mut inside, mut seen) = (String::new(), false, false);
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
        let want = Want { mtu: Some(65520), mode: Some(IpoibMode::Connected), ..Want::default() };
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
