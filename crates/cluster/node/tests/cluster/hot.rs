//! A block that all mounts request at once gets copies on several nodes, and loses them later.

use crate::loss::eventually;
use crate::sim::{BLOCK, Cluster, Mount, Waits, object};
use crate::simulation::Stop;
use spurline_types::ObjectRef;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

const NODES: usize = 5;

fn holders(cluster: &Cluster, object: &ObjectRef) -> usize {
    (0..NODES).filter(|node| cluster.held(*node, object) > 0).count()
}

fn served(cluster: &Cluster) -> Vec<u64> {
    cluster.hosts.iter().map(|host| host.stats.remotecache.served_ops.get()).collect()
}

#[test]
fn a_hot_block_spreads_its_readers_share_the_copies_and_they_go_when_it_cools() {
    let cluster = Cluster::start(NODES, 512);
    let _siblings = cluster.join(&[0, 1, 2, 3, 4]);
    // Long timeouts: a busy machine must not look like a dead node, whose blocks would be fetched again.
    let waits = |number| Waits { silence: Duration::from_secs(60), number, ..Waits::default() };
    let mounts: Vec<Mount> = (0..12).map(|number| cluster.mount_as(0..NODES, waits(number))).collect();
    let (hot, others) = (object(1, BLOCK), (2..102).map(|n| object(n, BLOCK)).collect::<Vec<_>>());
    let (stop, is_hot, reads) = (AtomicBool::new(false), AtomicBool::new(true), AtomicU64::new(0));
    let turn = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    let n = turn.fetch_add(1, Ordering::Relaxed);
                    let what = if is_hot.load(Ordering::Acquire) { &hot } else { &others[n % others.len()] };
                    // The mounts take turns, and each reads all of the others.
                    mounts[(n + n / others.len()) % mounts.len()].read(what, 0, BLOCK as usize).unwrap();
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        eventually("the block is on most nodes", || holders(&cluster, &hot) >= 4);
        eventually("its readers share the copies", || {
            let (before, from) = (served(&cluster), reads.load(Ordering::Relaxed));
            eventually("reads go on", || reads.load(Ordering::Relaxed) >= from + 300);
            let took: Vec<u64> = served(&cluster).iter().zip(&before).map(|(now, before)| now - before).collect();
            println!("{took:?} requests by node while it is hot");
            let all: u64 = took.iter().sum();
            took.iter().all(|one| one * 10 < all * 6) && took.iter().filter(|one| **one * 20 > all).count() >= 3
        });
        assert_eq!(cluster.under.reads(), (1, 1), "the copies were taken from the node that had it");
        is_hot.store(false, Ordering::Release);
        eventually("the copies are dropped", || holders(&cluster, &hot) == 1);
    });
    assert!(others.iter().all(|object| holders(&cluster, object) <= 1), "what is no hotter than the rest stays put");
    let spread: u64 = cluster.hosts.iter().map(|host| host.stats.blockcache.spread_blocks.get()).sum();
    assert_eq!(spread, 0);
    let told: u64 = mounts.iter().map(|mount| mount.stats.remotecache.hot_answers.get()).sum();
    assert!(told > 0);
}

#[test]
fn one_reader_alone_makes_nothing_hot() {
    let cluster = Cluster::start(3, 64);
    let mount = cluster.mount_as(0..3, Waits { silence: Duration::from_secs(60), ..Waits::default() });
    let one = object(1, BLOCK);
    (0..2000).for_each(|_| mount.read(&one, 0, BLOCK as usize).unwrap());
    assert_eq!((mount.stats.remotecache.hot_answers.get(), cluster.under.reads()), (0, (1, 1)));
}
