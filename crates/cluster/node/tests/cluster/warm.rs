//! Loading and freeing in a group.

use crate::sim::{BLOCK, Cluster, object};
use spurline_client::ObjectExtent;
use spurline_net_sim::RailMode;
use std::time::Duration;

#[test]
fn a_group_is_warmed_where_it_will_be_read_and_freed_everywhere() {
    let cluster = Cluster::start(3, 256);
    let mount = cluster.mount_with(0..3, Duration::from_secs(60));
    // Long enough for several runs of blocks, and many small ones.
    let objects: Vec<_> = (0..40).map(|n| object(n, if n < 2 { 50 * BLOCK + 7 } else { 100 + n })).collect();
    let extents: Vec<ObjectExtent> =
        objects.iter().map(|o| ObjectExtent { object: o.clone(), bytes: 0..o.size }).collect();
    let total: u64 = objects.iter().map(|o| o.size).sum();
    let blocks: u64 = objects.iter().map(|o| o.block_count(BLOCK)).sum();
    let done = mount.remote.warm(&extents, Some(1), false);
    assert!(done.iter().all(|part| part.error.is_none() && part.held_bytes == 0), "{done:?}");
    assert_eq!(done.iter().map(|part| part.moved_bytes).sum::<u64>(), total);
    assert_eq!(cluster.under.reads(), (blocks, blocks as usize));
    assert_eq!(mount.stats.remotecache.recv_bytes.get(), 0, "nothing of it was sent");
    let warmed: u64 = cluster.hosts.iter().map(|host| host.stats.blockcache.warmed_bytes.get()).sum();
    assert_eq!(warmed, total);
    // Again: all is cached; and a read fetches nothing.
    let again = mount.remote.warm(&extents, Some(1), true);
    assert!(
        again.iter().zip(&objects).all(|(part, o)| (part.moved_bytes, part.held_bytes) == (0, o.size)),
        "{again:?}"
    );
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    assert_eq!(cluster.under.reads().0, blocks);
    // A part of one, by whole blocks.
    let part = ObjectExtent { object: objects[0].clone(), bytes: BLOCK + 5..3 * BLOCK };
    assert_eq!(mount.remote.drop_cached(&[part], false)[0].moved_bytes, 2 * BLOCK);
    // Everything, on every node.
    let dropped = mount.remote.drop_cached(&extents, false);
    assert_eq!(dropped.iter().map(|part| part.moved_bytes).sum::<u64>(), total - 2 * BLOCK);
    assert!((0..3).all(|node| objects.iter().all(|object| cluster.held(node, object) == 0)));
    let freed: u64 = cluster.hosts.iter().map(|host| host.stats.blockcache.freed_bytes.get()).sum();
    assert_eq!(freed, total);
    // Without names.
    objects.iter().for_each(|object| mount.read_all(object).unwrap());
    let dropped = mount.remote.drop_all(false, false);
    assert_eq!((dropped.error, dropped.moved_bytes), (None, total));
    assert!((0..3).all(|node| objects.iter().all(|object| cluster.held(node, object) == 0)));
    mount.read_all(&objects[0]).unwrap();
}

#[test]
fn as_many_copies_are_made_as_are_asked_for() {
    let cluster = Cluster::start(3, 256);
    cluster.join(&[0, 1, 2]);
    let mount = cluster.mount_with(0..3, Duration::from_secs(60));
    let long = object(1, 40 * BLOCK);
    let extent = ObjectExtent { object: long.clone(), bytes: 0..long.size };
    for (copies, held) in [(1, 40), (2, 80), (9, 120)] {
        let done = mount.remote.warm(std::slice::from_ref(&extent), Some(copies), false);
        assert_eq!(done[0].error, None);
        assert_eq!((0..3).map(|node| cluster.held(node, &long)).sum::<u32>(), held, "{copies} copies");
    }
    // All copies at once: they come from the node that fetched the block.
    let other = object(2, 40 * BLOCK);
    let done = mount.remote.warm(&[ObjectExtent { object: other.clone(), bytes: 0..other.size }], Some(3), false);
    assert_eq!((&done[0].error, done[0].moved_bytes), (&None, 3 * other.size));
    assert_eq!(cluster.under.reads(), (80, 80));
}

#[test]
fn what_is_not_there_is_said_of_its_part_alone() {
    let cluster = Cluster::start(2, 64);
    let mount = cluster.mount_with(0..2, Duration::from_secs(60));
    let mut gone = object(1, BLOCK);
    gone.path = b"no such".as_slice().into();
    let there = object(2, BLOCK);
    let extents = [gone, there].map(|object| ObjectExtent { bytes: 0..object.size, object });
    let done = mount.remote.warm(&extents, Some(1), false);
    assert!(done[0].error.is_some() && done[0].moved_bytes == 0, "{done:?}");
    assert_eq!((&done[1].error, done[1].moved_bytes), (&None, BLOCK));
}

#[test]
fn a_node_that_is_away_has_its_share_warmed_elsewhere_and_is_named_when_freeing() {
    let cluster = Cluster::start(3, 256);
    let mount = cluster.mount_with(0..3, Duration::from_secs(60));
    cluster.hosts[1].link.set_mode(RailMode::Down);
    cluster.hosts[1].sim.kill();
    let long = object(1, 100 * BLOCK);
    let extent = [ObjectExtent { object: long.clone(), bytes: 0..long.size }];
    let done = mount.remote.warm(&extent, Some(1), false);
    assert_eq!((&done[0].error, done[0].moved_bytes), (&None, long.size));
    let dropped = mount.remote.drop_cached(&extent, false);
    assert_eq!(dropped[0].moved_bytes, long.size);
    assert!(dropped[0].error.is_some(), "one node may still hold it");
}
