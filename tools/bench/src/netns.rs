//! Two network namespaces joined by a veth pair: two hosts, as far as TCP can tell. It knows no service.

use crate::child;
use crate::error::{Error, Result};
use crate::scratch;
use std::process::Command;
use std::time::Duration;

/// The pair; dropping it removes both.
#[derive(Debug)]
pub struct Pair {
    /// The namespace of the node.
    pub server: String,
    /// The namespace of the mount.
    pub client: String,
    /// The node's address.
    pub server_ip: &'static str,
    /// The mount's address.
    pub client_ip: &'static str,
    /// The name of the interface in both.
    pub interface: &'static str,
}

impl Pair {
    /// Makes the pair.
    ///
    /// # Errors
    /// `Missing` without the right to, or without `ip`; `Failed` when the kernel refuses otherwise.
    pub fn new() -> Result<Self> {
        child::need("ip", "iproute2")?;
        child::need("nsenter", "util-linux")?;
        if !rustix::process::geteuid().is_root() {
            return Err(Error::Missing("network namespaces need root".into()));
        }
        sweep();
        let pid = std::process::id();
        let pair = Pair {
            server: format!("{}-{pid}-s", scratch::PREFIX),
            client: format!("{}-{pid}-c", scratch::PREFIX),
            server_ip: "10.231.77.1",
            client_ip: "10.231.77.2",
            interface: "bench0",
        };
        let (s, c) = (&pair.server, &pair.client);
        let add = ip(&format!("netns add {s}")).and_then(|()| ip(&format!("netns add {c}")));
        add.map_err(|e| Error::Missing(format!("network namespaces are not to be had here: {e}")))?;
        let i = pair.interface;
        ip(&format!("-n {s} link add {i} type veth peer name {i} netns {c}"))?;
        for (ns, addr) in [(s, pair.server_ip), (c, pair.client_ip)] {
            ip(&format!("-n {ns} addr add {addr}/24 dev {i}"))?;
            ip(&format!("-n {ns} link set {i} up"))?;
            ip(&format!("-n {ns} link set lo up"))?;
        }
        Ok(pair)
    }

    /// Makes what the node's side sends take a link of `gbit` Gbit/s.
    ///
    /// # Errors
    /// `Missing` when the kernel has no token bucket filter.
    pub fn limit(&self, gbit: u32) -> Result<()> {
        let tc = child::need("tc", "iproute2")?;
        let mut command = Command::new(tc);
        let words = format!(
            "-n {} qdisc add dev {} root tbf rate {gbit}gbit burst 1m latency 20ms",
            self.server, self.interface
        );
        command.args(words.split(' '));
        child::run(command, Duration::from_secs(20))
            .map(|_| ())
            .map_err(|e| Error::Missing(format!("a slower link is not to be had here: {e}")))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for ns in [&self.server, &self.client] {
            // With the namespace its end of the pair goes.
            let _ = ip(&format!("netns del {ns}"));
        }
    }
}

fn ip(words: &str) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(words.split(' '));
    child::run(command, Duration::from_secs(20)).map(|_| ())
}

/// Removes the namespaces of runs that were killed.
fn sweep() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if scratch::is_stale(&name) {
            // Somebody else's sweep may be quicker.
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_hosts_and_nothing_left() {
        let pair = match Pair::new() {
            Ok(pair) => pair,
            Err(Error::Missing(why)) => {
                let required = std::env::var("SPURLINE_REQUIRE").is_ok_and(|r| r.split(',').any(|w| w == "netns"));
                assert!(!required, "{why}");
                println!("SKIP: {why}");
                return;
            }
            Err(e) => panic!("{e}"),
        };
        let ping = child::find("ping");
        if let Some(ping) = ping {
            let mut command = child::command(&ping, Some(&pair.client));
            command.args(["-c", "1", "-W", "5", pair.server_ip]);
            child::run(command, Duration::from_secs(20)).unwrap();
        }
        let file = std::path::PathBuf::from(format!("/run/netns/{}", pair.server));
        assert!(file.exists());
        drop(pair);
        assert!(!file.exists());
    }
}
