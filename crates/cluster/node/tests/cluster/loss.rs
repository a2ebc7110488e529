//! Nodes lost under readers: no error, no wrong byte, a pause of known length, and no burst on the origin. Pauses are
//! printed; the assertions hold on a machine of any speed.

use crate::sim::{BLOCK, Cluster, Mount, OriginFault, object};
use crate::simulation::Stop;
use spurline_net_sim::RailMode;
use spurline_types::{ErrorKind, ObjectRef};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub fn objects(count: u64, blocks: u64) -> Vec<ObjectRef> {
    (0..count).map(|n| object(n, blocks * BLOCK)).collect()
}

/// Reads blocks of `objects` from several threads while `during` runs; returns the number of reads and the longest
/// time.
pub fn read_while(mount: &Mount, objects: &[ObjectRef], during: impl FnOnce()) -> (u64, Duration) {
    let (stop, reads, longest) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::new(Duration::ZERO));
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for reader in 0..4u64 {
            let (stop, reads, longest) = (&stop, &reads, &longest);
            scope.spawn(move || {
                let mut at = reader * 17;
                while !stop.load(Ordering::Acquire) {
                    at += 7;
                    let object = &objects[at as usize % objects.len()];
                    let offset = at * 4099 % object.size;
                    let start = Instant::now();
                    mount.read(object, offset, 5000).unwrap();
                    let took = start.elapsed();
                    reads.fetch_add(1, Ordering::Relaxed);
                    let mut longest = longest.lock().unwrap();
                    *longest = took.max(*longest);
                }
            });
        }
        during();
    });
    (reads.load(Ordering::Relaxed), longest.into_inner().unwrap())
}

/// Waits for a condition.
pub fn eventually(what: &str, mut until: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(150);
    while !until() {
        assert!(Instant::now() < deadline, "{what} does not come about");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_killed_node_costs_no_error_and_is_asked_again_when_it_is_back() {
    let cluster = Cluster::start(3, 512);
    let mount = cluster.mount(0..3);
    let objects = objects(20, 20);
    let (reads, longest) = read_while(&mount, &objects, || {
        eventually("node 1 is asked", || cluster.hosts[1].stats.remotecache.served_ops.get() > 20);
        cluster.hosts[1].sim.kill();
        let before = mount.stats.remotecache.ops.get();
        eventually("reads go on", || mount.stats.remotecache.ops.get() > before + 200);
        cluster.hosts[1].sim.start();
        let before = cluster.hosts[1].stats.remotecache.served_ops.get();
        eventually("node 1 is asked again", || cluster.hosts[1].stats.remotecache.served_ops.get() > before + 20);
    });
    println!("{reads} reads, the longest took {longest:?} with a node killed");
    assert!(mount.stats.remotecache.retries.get() > 0);
}

#[test]
fn passing_a_node_that_is_known_to_be_down_is_no_retry() {
    let cluster = Cluster::start(3, 512);
    let mount = cluster.mount(0..3);
    let objects = objects(20, 20);
    let read_all = || {
        for (object, block) in objects.iter().flat_map(|object| (0..20).map(move |block| (object, block))) {
            mount.read(object, block * BLOCK, 5000).unwrap();
        }
    };
    read_all();
    cluster.hosts[1].sim.kill();
    let retries = &mount.stats.remotecache.retries;
    // Connections that were open at the kill break with a request each.
    eventually("reads without a retry", || {
        let before = (retries.get(), mount.stats.remotecache.ops.get());
        read_all();
        assert!(mount.stats.remotecache.ops.get() > before.1, "nodes are asked");
        retries.get() == before.0
    });
}

#[test]
fn a_node_that_stands_still_is_given_up_and_asked_again_when_it_goes_on() {
    let cluster = Cluster::start(3, 512);
    let mount = cluster.mount(0..3);
    let objects = objects(20, 20);
    let (reads, longest) = read_while(&mount, &objects, || {
        eventually("node 1 is asked", || cluster.hosts[1].stats.remotecache.served_ops.get() > 20);
        cluster.hosts[1].link.set_mode(RailMode::Silent);
        eventually("it is abandoned", || mount.stats.remotecache.given_up.get() > 0);
        let before = mount.stats.remotecache.ops.get();
        eventually("reads go on", || mount.stats.remotecache.ops.get() > before + 200);
        cluster.hosts[1].link.set_mode(RailMode::Up);
        let before = cluster.hosts[1].stats.remotecache.served_ops.get();
        eventually("node 1 is asked again", || cluster.hosts[1].stats.remotecache.served_ops.get() > before + 20);
    });
    println!("{reads} reads, the longest took {longest:?} with a stalled node");
}

#[test]
fn a_node_that_waits_for_a_slow_under_store_is_not_given_up() {
    let cluster = Cluster::start(2, 512);
    let mount = cluster.mount_with(0..2, Duration::from_secs(1));
    // Longer than the silence limit: if slow counted as dead, each node would be tried in turn.
    *cluster.under.latency.lock() = Duration::from_millis(2500);
    mount.read(&object(1, BLOCK), 0, 100).unwrap();
    assert_eq!(mount.stats.remotecache.given_up.get(), 0);
    assert_eq!(cluster.under.reads(), (1, 1));
}

#[test]
fn a_node_without_its_origin_costs_no_error() {
    let cluster = Cluster::start(3, 512);
    let mount = cluster.mount_with(0..3, Duration::from_secs(60));
    for (n, fault) in [OriginFault::Refuses(ErrorKind::PermissionDenied), OriginFault::Silent].into_iter().enumerate() {
        *cluster.hosts[1].origin.fault.lock() = Some(fault);
        (0..30).for_each(|object_n| mount.read_all(&object(object_n + 100 * n as u64, BLOCK)).unwrap());
        *cluster.hosts[1].origin.fault.lock() = None;
        let declines = &cluster.hosts[1].stats.remotecache.origin_declines;
        assert!(fault != OriginFault::Silent || declines.get() > 0);
        let mut fresh = 1000 * (n as u64 + 1);
        eventually("node 1 fetches again", || {
            fresh += 20;
            let again: Vec<_> = (0..20).map(|k| object(fresh + k, BLOCK)).collect();
            again.iter().for_each(|object| mount.read_all(object).unwrap());
            again.iter().any(|object| cluster.held(1, object) > 0)
        });
    }
}

#[test]
fn the_one_node_of_a_group_is_waited_for() {
    let cluster = Cluster::start(1, 64);
    let mount = cluster.mount(0..1);
    mount.read(&object(1, BLOCK), 0, 100).unwrap();
    cluster.hosts[0].link.set_mode(RailMode::Silent);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| mount.read(&object(2, BLOCK), 0, 100));
        // Longer than it takes to abandon a node of a larger group.
        std::thread::sleep(crate::sim::silence() * 5);
        cluster.hosts[0].link.set_mode(RailMode::Up);
        reader.join().unwrap().unwrap();
    });
    assert_eq!(mount.stats.remotecache.given_up.get(), 0);
}

#[test]
fn losing_a_node_under_64_readers_costs_one_read_of_the_under_store_for_each_block_it_held() {
    let cluster = Cluster::start(4, 1024);
    // Long timeouts, so that a busy machine is never taken for a dead node.
    let mounts: Vec<Mount> = (0..4).map(|_| cluster.mount_with(0..4, Duration::from_secs(60))).collect();
    let objects = objects(16, 24);
    objects.iter().for_each(|object| mounts[0].read_all(object).unwrap());
    let blocks: u64 = objects.iter().map(|object| object.block_count(BLOCK)).sum();
    assert_eq!(cluster.under.reads(), (blocks, blocks as usize));
    let lost: u32 = objects.iter().map(|object| cluster.held(2, object)).sum();
    assert!(lost > 0);
    cluster.hosts[2].sim.kill();
    std::thread::scope(|scope| {
        for reader in 0..64 {
            let (mount, objects) = (&mounts[reader % 4], &objects);
            scope.spawn(move || {
                // Each starts at another object.
                let order = objects.iter().cycle().skip(reader % objects.len()).take(objects.len());
                order.for_each(|object| mount.read_all(object).unwrap());
            });
        }
    });
    let (reads, _) = cluster.under.reads();
    println!("{lost} of {blocks} blocks were lost under 64 readers: {} reads of the origin", reads - blocks);
    assert_eq!(reads - blocks, u64::from(lost), "one read for each block that was lost");
}
