//! A small DNS server with changing records: addresses, SRV records, no records, silence.

use crate::common;
use common::{open, wait_for};
use spurline_membership::{HoldTimes, RegistryFollower, RegistryState};
use spurline_testkit::dns_server::DnsServer;
use spurline_types::Stats;
use std::sync::Arc;
use std::time::Duration;

/// No place expires in a test, however slow the machine.
const HOLDS: HoldTimes = HoldTimes { single: Duration::from_secs(1 << 20), joint: Duration::from_secs(1 << 20) };

fn follow(url: &str) -> (RegistryFollower, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    (RegistryFollower::start(&open(url), HOLDS, Arc::clone(&stats)).unwrap(), stats)
}

fn names(follower: &RegistryFollower) -> Vec<String> {
    let there = follower.group_status().members.into_iter().filter(|placed| placed.present);
    there.map(|placed| placed.member.name.clone()).collect()
}

#[test]
fn addresses_come_and_go_and_a_server_that_is_silent_changes_nothing() {
    let server = DnsServer::start().unwrap();
    server.addresses("nodes.test.", &["10.0.0.1", "10.0.0.2", "fd00::1"]);
    let (follower, stats) = follow(&format!("dns:nodes.test.:7000?server={}", server.address()));
    wait_for("all", || names(&follower) == ["10.0.0.1:7000", "10.0.0.2:7000", "[fd00::1]:7000"]);
    server.addresses("nodes.test.", &["10.0.0.2", "10.0.0.3"]);
    wait_for("the change", || names(&follower) == ["10.0.0.2:7000", "10.0.0.3:7000"]);
    let known = follower.group_status().members.len();
    // A name without records, then a silent server: the last known members stay.
    server.addresses("nodes.test.", &[]);
    wait_for("an empty list", || names(&follower).is_empty());
    assert_eq!(follower.group_status().members.len(), known);
    server.silent(true);
    wait_for("the loss", || matches!(follower.group_status().state, RegistryState::Lost { .. }));
    assert_eq!(follower.group_status().members.len(), known);
    assert!(stats.group.registry_losses.get() > 0);
    server.silent(false);
    server.addresses("nodes.test.", &["10.0.0.2"]);
    wait_for("the node", || names(&follower) == ["10.0.0.2:7000"]);
}

#[test]
fn srv_records_bring_names_and_ports() {
    let server = DnsServer::start().unwrap();
    server.services("_spurline._tcp.test.", &[("node-0.test.", 7000), ("node-1.test.", 7001)]);
    let (follower, _) = follow(&format!("dns:_spurline._tcp.test.?server={}", server.address()));
    wait_for("both", || names(&follower) == ["node-0.test:7000", "node-1.test:7001"]);
}

#[test]
fn many_addresses_do_not_fit_into_one_datagram() {
    let server = DnsServer::start().unwrap();
    let all: Vec<String> = (0..1000).map(|n| format!("10.1.{}.{}", n / 250, n % 250 + 1)).collect();
    server.addresses("many.test.", &all.iter().map(String::as_str).collect::<Vec<_>>());
    let (follower, _) = follow(&format!("dns:many.test.:7000?server={}", server.address()));
    wait_for("all", || names(&follower).len() == 1000);
}
