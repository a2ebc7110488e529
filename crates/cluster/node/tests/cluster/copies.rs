//! Blocks with several holders: fetched once from the origin, and by the other holders from the first.

use crate::loss::eventually;
use crate::sim::{BLOCK, Cluster, Mount, Waits, object};
use spurline_net_sim::RailMode;
use spurline_types::ObjectRef;
use std::sync::Barrier;
use std::time::Duration;

const NODES: usize = 4;
const MOUNTS: u64 = 8;
const READERS: usize = 64;

/// Long timeouts, so that a busy machine is never taken for a dead node.
fn mounts(cluster: &Cluster, copies: u32) -> Vec<Mount> {
    let waits = |number| Waits { silence: Duration::from_secs(60), copies, number, ..Waits::default() };
    (0..MOUNTS).map(|number| cluster.mount_as(0..NODES, waits(number))).collect()
}

fn cluster() -> Cluster {
    let cluster = Cluster::start(NODES, 1024);
    cluster.join(&(0..NODES).collect::<Vec<_>>());
    // So that all concurrent readers have begun before the first answer.
    *cluster.under.latency.lock() = Duration::from_millis(10);
    cluster
}

/// Many readers of all mounts start together and read everything.
fn all_at_once(mounts: &[Mount], objects: &[ObjectRef]) {
    let begin = Barrier::new(READERS);
    std::thread::scope(|scope| {
        for reader in 0..READERS {
            let (mount, begin) = (&mounts[reader % mounts.len()], &begin);
            scope.spawn(move || {
                begin.wait();
                objects.iter().for_each(|object| mount.read_all(object).unwrap());
            });
        }
    });
}

fn sent_on(cluster: &Cluster) -> u64 {
    cluster.hosts.iter().map(|host| host.stats.remotecache.sent_on.get()).sum()
}

fn held(cluster: &Cluster, object: &ObjectRef) -> u32 {
    (0..NODES).map(|node| cluster.held(node, object)).sum()
}

#[test]
fn what_many_readers_begin_at_once_is_fetched_once_whatever_the_copies() {
    for copies in [2, 3] {
        let cluster = cluster();
        let mounts = mounts(&cluster, copies);
        let long = object(u64::from(copies), 40 * BLOCK);
        all_at_once(&mounts, std::slice::from_ref(&long));
        assert_eq!(cluster.under.reads(), (40, 40), "with {copies} copies");
        let told: u64 = mounts.iter().map(|mount| mount.stats.remotecache.sent_on.get()).sum();
        assert!(told > 0 && told == sent_on(&cluster));
        // Requests create the copies, which then answer themselves.
        eventually("no reader is redirected", || {
            let before = sent_on(&cluster);
            mounts.iter().for_each(|mount| mount.read_all(&long).unwrap());
            sent_on(&cluster) == before
        });
        assert!(held(&cluster, &long) > 40);
        assert_eq!(cluster.under.reads(), (40, 40), "with {copies} copies");
    }
}

#[test]
fn a_sequential_reader_of_large_pieces_is_sent_on_without_harm() {
    let cluster = cluster();
    let mounts = mounts(&cluster, 2);
    let long = object(1, 64 * BLOCK);
    use spurline_volume::Volume as _;
    for mount in &mounts {
        mount.remote.prefetch(&long, 0..64, 1 << 20);
        mount.read_all(&long).unwrap();
    }
    assert_eq!(cluster.under.reads(), (64, 64));
}

#[test]
fn when_the_owner_is_killed_one_copy_stands_in_for_it() {
    let cluster = cluster();
    let mounts = mounts(&cluster, 3);
    let objects: Vec<_> = (0..12).map(|n| object(n, 4 * BLOCK)).collect();
    // Each mount has connections that break.
    mounts.iter().for_each(|mount| mount.read_all(&object(99, 16 * 4 * BLOCK)).unwrap());
    let (before, _) = cluster.under.reads();
    cluster.hosts[1].sim.kill();
    all_at_once(&mounts, &objects);
    assert_eq!(cluster.under.reads().0 - before, 48, "each block once");
    cluster.hosts[1].sim.start();
}

#[test]
fn a_copy_serves_its_readers_when_the_owner_stands_still() {
    let cluster = cluster();
    let waits = |number| Waits { copies: 2, number, ..Waits::default() };
    let mounts: Vec<_> = (0..4).map(|number| cluster.mount_as(0..NODES, waits(number))).collect();
    let objects: Vec<_> = (0..12).map(|n| object(n, 4 * BLOCK)).collect();
    cluster.hosts[1].link.set_mode(RailMode::Silent);
    std::thread::scope(|scope| {
        for mount in &mounts {
            scope.spawn(|| objects.iter().for_each(|object| mount.read_all(object).unwrap()));
        }
    });
    cluster.hosts[1].link.set_mode(RailMode::Up);
}
