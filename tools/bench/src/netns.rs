//! Network namespaces as hosts, from the view of TCP: two joined by a veth pair, or several on a bridge. Knows no service.

use crate::child;
use crate::error::{BenchError, Result};
use crate::scratch;
use std::net::SocketAddr;
use std::ops::Range;
use std::process::Command;
use std::time::Duration;

const SERVER_IP: [u8; 4] = [10, 231, 77, 1];

/// The pair; a drop removes both.
#[derive(Debug)]
pub struct NamespacePair {
    /// The namespace of the node.
    pub server: String,
    /// The namespace of the mount.
    pub client: String,
    pub server_ip: &'static str,
    pub client_ip: &'static str,
    /// The name of the interface in both.
    pub interface: &'static str,
}

impl NamespacePair {
    /// Creates the pair.
    /// `Missing` without permission or without `ip`; `Failed` for other errors of the kernel.
    pub fn new() -> Result<Self> {
        require_namespaces()?;
        let pid = std::process::id();
        let pair = NamespacePair {
            server: format!("{}-{pid}-s", scratch::PREFIX),
            client: format!("{}-{pid}-c", scratch::PREFIX),
            server_ip: "10.231.77.1",
            client_ip: "10.231.77.2",
            interface: "bench0",
        };
        let s = &pair.server;
        let c = &pair.client;
        let add = run_ip(&format!("netns add {s}")).and_then(|()| run_ip(&format!("netns add {c}")));
        add.map_err(|e| not_available("network namespaces are", e))?;
        let i = pair.interface;
        run_ip(&format!("-n {s} link add {i} type veth peer name {i} netns {c}"))?;
        for (ns, addr) in [(s, pair.server_ip), (c, pair.client_ip)] {
            run_ip(&format!("-n {ns} addr add {addr}/24 dev {i}"))?;
            run_ip(&format!("-n {ns} link set {i} up"))?;
            run_ip(&format!("-n {ns} link set lo up"))?;
        }
        Ok(pair)
    }

    /// An address of the node's side.
    pub fn server_address(&self, port: u16) -> SocketAddr {
        SocketAddr::from((SERVER_IP, port))
    }
}

impl Drop for NamespacePair {
    fn drop(&mut self) {
        // The deletion of a namespace deletes an end of the pair.
        remove_namespaces([&self.server, &self.client]);
    }
}

/// Hosts on one bridge, each a namespace with one interface; a drop removes all.
#[derive(Debug)]
pub struct BridgedHosts {
    /// The namespace of the bridge.
    bridge: String,
    hosts: Vec<String>,
}

impl BridgedHosts {
    /// Creates `count` hosts.
    /// `Missing` without permission or without `ip`; `Failed` for other errors of the kernel.
    pub fn new(count: usize) -> Result<Self> {
        require_namespaces()?;
        let prefix = format!("{}-{}", scratch::PREFIX, std::process::id());
        let bridge = format!("{prefix}-b");
        let hosts = (0..count).map(|host| format!("{prefix}-h{host}")).collect();
        let lan = BridgedHosts { bridge, hosts };
        let bridge = &lan.bridge;
        run_ip(&format!("netns add {bridge}")).map_err(|e| not_available("network namespaces are", e))?;
        run_ip(&format!("-n {bridge} link add br0 type bridge")).map_err(|e| not_available("a bridge is", e))?;
        run_ip(&format!("-n {bridge} link set br0 up"))?;
        for (number, host) in lan.hosts.iter().enumerate() {
            let address = lan.address(number);
            run_ip(&format!("netns add {host}"))?;
            run_ip(&format!("link add p{number} netns {bridge} type veth peer name lan0 netns {host}"))?;
            run_ip(&format!("-n {bridge} link set p{number} master br0 up"))?;
            run_ip(&format!("-n {host} addr add {address}/24 dev lan0"))?;
            run_ip(&format!("-n {host} link set lan0 up"))?;
            run_ip(&format!("-n {host} link set lo up"))?;
        }
        Ok(lan)
    }

    pub fn namespace(&self, host: usize) -> &str {
        &self.hosts[host]
    }

    pub fn address(&self, host: usize) -> String {
        format!("10.231.78.{}", host + 1)
    }

    /// Limits the link of each of `hosts` to `megabits` per second, each way, and delays each packet by half of `round_trip`.
    /// `Missing` when the kernel has no token bucket filter, or no `netem` for a delay.
    pub fn shape_links(&self, hosts: Range<usize>, megabits: u32, round_trip: Duration) -> Result<()> {
        // Tokens of 8 ms: the kernel's timer may be as slow as 250 Hz.
        let burst_bytes = (u64::from(megabits) * 1000).max(64 << 10);
        for number in hosts {
            let host = &self.hosts[number];
            for link in [format!("-n {host} qdisc add dev lan0"), format!("-n {} qdisc add dev p{number}", self.bridge)]
            {
                run_tc(&format!("{link} root handle 1: tbf rate {megabits}mbit burst {burst_bytes} latency 50ms"))
                    .map_err(|e| not_available("a slower link is", e))?;
            }
            if !round_trip.is_zero() {
                // On the way out alone: an answer and its request cross two hosts' ways out.
                let delay_us = round_trip.as_micros() / 2;
                let words = format!("parent 1:1 handle 10: netem delay {delay_us}us limit 100000");
                run_tc(&format!("-n {host} qdisc add dev lan0 {words}"))
                    .map_err(|e| not_available("a link with a delay is", e))?;
            }
        }
        Ok(())
    }
}

impl Drop for BridgedHosts {
    fn drop(&mut self) {
        remove_namespaces(self.hosts.iter().chain([&self.bridge]));
    }
}

fn require_namespaces() -> Result<()> {
    child::require_program("ip", "iproute2")?;
    child::require_program("nsenter", "util-linux")?;
    if !rustix::process::geteuid().is_root() {
        return Err(BenchError::Missing("network namespaces need root".into()));
    }
    sweep_stale();
    Ok(())
}

/// Removes namespaces, without those that an interruption prevented.
fn remove_namespaces<'a>(names: impl IntoIterator<Item = &'a String>) {
    for name in names.into_iter().filter(|name| std::path::Path::new("/run/netns").join(name).exists()) {
        // After Ctrl-C too: `run_to_end` would be interrupted.
        let _ = Command::new("ip").args(["netns", "del", name]).status();
    }
}

/// A refusal by the kernel means a missing prerequisite; an interruption stays an interruption.
fn not_available(what: &str, error: BenchError) -> BenchError {
    match error {
        BenchError::Interrupted => BenchError::Interrupted,
        error => BenchError::Missing(format!("{what} not available here: {error}")),
    }
}

fn run_ip(words: &str) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(words.split(' '));
    child::run_to_end(command, Duration::from_secs(20)).map(|_| ())
}

fn run_tc(words: &str) -> Result<()> {
    let mut command = Command::new(child::require_program("tc", "iproute2")?);
    command.args(words.split(' '));
    child::run_to_end(command, Duration::from_secs(20)).map(|_| ())
}

/// Removes the namespaces of runs that were killed.
fn sweep_stale() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if scratch::is_stale(&name) {
            // Another process may have removed the namespace.
            let _ = run_ip(&format!("netns del {name}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interruption_is_nothing_missing() {
        assert_eq!(not_available("x is", BenchError::Interrupted), BenchError::Interrupted);
        let missing = BenchError::Missing("x is not available here: no".into());
        assert_eq!(not_available("x is", BenchError::Failed("no".into())), missing);
    }

    #[test]
    fn two_hosts_and_nothing_left() {
        let pair = match NamespacePair::new() {
            Ok(pair) => pair,
            Err(BenchError::Missing(why)) => {
                let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
                assert!(!required.split(',').any(|word| word == "netns"), "{why}");
                println!("SKIP: {why}");
                return;
            }
            Err(e) => panic!("{e}"),
        };
        let ping = child::find_program("ping");
        if let Some(ping) = ping {
            let mut command = child::command_in(&ping, Some(&pair.client));
            command.args(["-c", "1", "-W", "5", pair.server_ip]);
            child::run_to_end(command, Duration::from_secs(20)).unwrap();
        }
        let file = std::path::PathBuf::from(format!("/run/netns/{}", pair.server));
        assert!(file.exists());
        drop(pair);
        assert!(!file.exists());
    }
}
