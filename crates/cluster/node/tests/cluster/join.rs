//! Nodes that join and leave without cold reads: blocks come from other nodes before the origin.

use crate::sim::{BLOCK, Cluster, object};
use spurline_net_sim::RailMode;
use std::sync::Arc;
use std::time::Duration;

/// So long that a busy machine is never taken for a dead node.
const PATIENT: Duration = Duration::from_secs(60);

#[test]
fn a_node_that_joins_gets_its_blocks_from_their_former_owners() {
    let cluster = Cluster::start(4, 1024);
    let mount = cluster.mount_with(0..3, PATIENT);
    let objects: Vec<_> = (0..10).map(|n| object(n, 40 * BLOCK)).collect();
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    let (fetched, blocks) = cluster.under.reads();
    assert_eq!(fetched, blocks as u64);
    let all: Vec<usize> = (0..4).collect();
    cluster.join(&all);
    mount.remote.set_members(&cluster.members(0..4));
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    let taken: u32 = objects.iter().map(|object| cluster.held(3, object)).sum();
    assert!(taken > 0, "the new node has its share");
    assert_eq!(cluster.under.reads().0, fetched, "and none of it is read from the origin again");
    assert_eq!(cluster.hosts[3].stats.remotecache.pulled_bytes.get(), u64::from(taken) * BLOCK);
}

#[test]
fn nodes_that_join_together_get_their_blocks_from_their_former_owners() {
    let cluster = Cluster::start(6, 1024);
    let mount = cluster.mount_with(0..3, PATIENT);
    let objects: Vec<_> = (0..10).map(|n| object(n, 40 * BLOCK)).collect();
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    let fetched = cluster.under.reads().0;
    cluster.join(&(0..6).collect::<Vec<_>>());
    mount.remote.set_members(&cluster.members(0..6));
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    assert!((3..6).all(|node| objects.iter().any(|object| cluster.held(node, object) > 0)), "each has its share");
    assert_eq!(cluster.under.reads().0, fetched);
}

#[test]
fn the_blocks_of_a_drained_node_are_taken_from_it() {
    let cluster = Cluster::start(6, 1024);
    let mount = cluster.mount_with(0..6, PATIENT);
    let objects: Vec<_> = (0..10).map(|n| object(n, 40 * BLOCK)).collect();
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    let fetched = cluster.under.reads().0;
    let siblings = cluster.join(&(0..6).collect::<Vec<_>>());
    let mut members = cluster.members(0..6);
    Arc::make_mut(&mut members[1]).weight = 0;
    siblings.iter().for_each(|siblings| siblings.set_members(&members));
    mount.remote.set_members(&members);
    let before = cluster.hosts[1].stats.remotecache.served_ops.get();
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    assert_eq!(cluster.under.reads().0, fetched);
    assert!(cluster.hosts[1].stats.remotecache.served_ops.get() > before, "it was asked for what it had");
    // From now on it gets no request.
    let before = cluster.hosts[1].stats.remotecache.served_ops.get();
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    assert_eq!(cluster.hosts[1].stats.remotecache.served_ops.get(), before);
}

#[test]
fn nodes_that_ask_each_other_for_what_none_has_do_not_wait_for_each_other() {
    let cluster = Cluster::start(3, 1024);
    // Each has a different view of the group and believes that another owns the block.
    for n in 0..3 {
        let others: Vec<usize> = (0..3).map(|i| (n + i) % 3).take(2).collect();
        cluster.join(&others);
    }
    let objects: Vec<_> = (0..4).map(|n| object(n, 20 * BLOCK)).collect();
    let mounts: Vec<_> = (0..3).map(|n| cluster.mount_with([n], PATIENT)).collect();
    std::thread::scope(|scope| {
        for mount in &mounts {
            scope.spawn(|| objects.iter().for_each(|object| mount.read_all(object).unwrap()));
        }
    });
    let (reads, blocks) = cluster.under.reads();
    assert_eq!(blocks, 80);
    assert!(reads <= 3 * 80, "{reads} reads of {blocks} blocks by three nodes");
}

#[test]
fn a_sibling_that_stands_still_costs_a_moment_and_no_error() {
    let cluster = Cluster::start(2, 256);
    cluster.join(&[0, 1]);
    let mount = cluster.mount_with([0], PATIENT);
    cluster.hosts[1].link.set_mode(RailMode::Silent);
    mount.read_all(&object(1, 4 * BLOCK)).unwrap();
    assert_eq!(cluster.hosts[0].stats.remotecache.pulled_bytes.get(), 0);
}
