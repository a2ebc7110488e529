//! Slow nodes that are alive: late reads go to a second node, and a repeatedly late node is deprioritised until it is
//! in time again.

use crate::loss::{eventually, objects, read_while};
use crate::sim::{BLOCK, Cluster, Mount, Waits, object};
use spurline_net_sim::RailMode;
use std::time::Duration;

/// A busy machine makes any read late now and then, so only final states are asserted.
fn mount(cluster: &Cluster, nodes: usize, copies: u32) -> Mount {
    let waits = Waits { silence: Duration::from_secs(60), hedge_after: Duration::from_millis(40), copies, number: 0 };
    cluster.mount_as(0..nodes, waits)
}

fn a_slow_node(copies: u32) {
    let cluster = Cluster::start(3, 512);
    let siblings = cluster.join(&[0, 1, 2]);
    let mount = mount(&cluster, 3, copies);
    let objects = objects(10, 20);
    let counted = &mount.stats.remotecache;
    read_while(&mount, &objects, || {
        eventually("enough is read to know what is late", || counted.ops.get() > 2000);
        cluster.hosts[1].link.set_mode(RailMode::Slow(Duration::from_secs(5)));
        eventually("a second node is asked, and is first", || counted.hedges_won.get() > 0);
        eventually("it is known to be slow", || counted.peers_slow.get() > 0);
        let before = counted.ops.get();
        eventually("reads go on without it", || counted.ops.get() > before + 500);
        cluster.hosts[1].link.set_mode(RailMode::Up);
        eventually("it is trusted again", || counted.peers_slow.get() == 0);
        let before = cluster.hosts[1].stats.remotecache.served_ops.get();
        eventually("it is asked again", || cluster.hosts[1].stats.remotecache.served_ops.get() > before + 50);
    });
    let (hedges, ops) = (counted.hedges.get(), counted.ops.get());
    println!("{ops} requests, {hedges} of them second ones, {} of these first", counted.hedges_won.get());
    assert!(hedges * 20 <= ops, "{hedges} second requests of {ops}");
    drop(siblings);
}

#[test]
fn a_slow_node_is_gone_round_when_others_hold_its_blocks() {
    a_slow_node(2);
}

#[test]
fn a_slow_node_is_gone_round_when_no_other_holds_its_blocks() {
    a_slow_node(1);
}

#[test]
fn a_group_that_is_slow_as_a_whole_is_not_asked_for_more_than_its_share() {
    let cluster = Cluster::start(3, 512);
    let mount = mount(&cluster, 3, 2);
    let objects = objects(4, 20);
    let counted = &mount.stats.remotecache;
    read_while(&mount, &objects, || {
        eventually("enough is read to know what is late", || counted.ops.get() > 500);
        cluster.hosts.iter().for_each(|host| host.link.set_mode(RailMode::Slow(Duration::from_millis(120))));
        let before = counted.ops.get();
        eventually("reads go on", || counted.ops.get() > before + 60);
    });
    let (hedges, ops) = (counted.hedges.get(), counted.ops.get());
    println!("{ops} requests, {hedges} of them second ones");
    assert!(hedges * 20 <= ops, "{hedges} second requests of {ops}");
}

#[test]
fn a_second_node_fetches_nothing_for_a_read_that_is_a_little_late() {
    let cluster = Cluster::start(3, 1024);
    let waits = Waits { silence: Duration::from_secs(60), hedge_after: Duration::from_secs(1), copies: 1, number: 0 };
    let mount = cluster.mount_as(0..3, waits);
    let objects: Vec<_> = (0..60).map(|n| object(n, BLOCK)).collect();
    // Enough reads for a lateness threshold and a budget of second requests.
    (0..10).flat_map(|_| &objects).for_each(|object| mount.read_all(object).unwrap());
    let held = |node, object| cluster.held(node, object) > 0;
    let late = objects.iter().find(|o| held(1, o) && !held(0, o) && !held(2, o)).expect("a block of this node alone");
    let before = cluster.under.reads();
    cluster.hosts[1].link.set_mode(RailMode::Slow(Duration::from_millis(1500)));
    mount.read_all(late).unwrap();
    assert_eq!(mount.stats.remotecache.hedges.get(), 1);
    assert_eq!(cluster.under.reads(), before);
}

#[test]
fn nothing_is_asked_twice_where_that_is_switched_off() {
    let cluster = Cluster::start(2, 128);
    let mount = cluster.mount_as(0..2, Waits { silence: Duration::from_secs(60), ..Waits::default() });
    let one = object(1, 32 * BLOCK);
    mount.read_all(&one).unwrap();
    cluster.hosts.iter().for_each(|host| host.link.set_mode(RailMode::Slow(Duration::from_millis(30))));
    mount.read_all(&one).unwrap();
    assert_eq!((mount.stats.remotecache.hedges.get(), cluster.under.reads()), (0, (32, 32)));
}

#[test]
fn a_node_that_stands_in_for_a_lost_one_fetches_alone() {
    let cluster = Cluster::start(3, 1024);
    let mount = mount(&cluster, 3, 1);
    let objects: Vec<_> = (0..60).map(|n| object(n, BLOCK)).collect();
    // Enough reads for a lateness threshold and a budget of second requests.
    (0..10).flat_map(|_| &objects).for_each(|object| mount.read_all(object).unwrap());
    // After a late read on a busy machine, a second node has the block too.
    let held = |node, object| cluster.held(node, object) > 0;
    let lost: Vec<_> = objects.iter().filter(|o| held(1, o) && !held(0, o) && !held(2, o)).collect();
    assert!(!lost.is_empty());
    let (before, hedges) = (cluster.under.reads().0, mount.stats.remotecache.hedges.get());
    cluster.hosts[1].link.set_mode(RailMode::Down);
    *cluster.under.latency.lock() = Duration::from_millis(400);
    lost.iter().for_each(|object| mount.read_all(object).unwrap());
    assert_eq!(cluster.under.reads().0 - before, lost.len() as u64);
    assert_eq!(mount.stats.remotecache.hedges.get(), hedges);
}
