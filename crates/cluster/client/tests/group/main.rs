//! A group with nodes that join and leave under readers.

mod nodes;

use nodes::{BLOCK, Nodes, byte_at, object_ref};
use spurline_client::ObjectExtent;
use spurline_net_sim::SimFault;
use spurline_types::ErrorKind;
use spurline_types::errno::EMFILE;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[test]
fn nodes_that_stay_keep_their_connections_and_others_are_made_anew() {
    let group = Nodes::start(3);
    let remote = group.mount(&[0, 1, 2]);
    for object in 0..200 {
        group.read(&remote, object, 0, 4096).unwrap();
    }
    let before: Vec<u64> = (0..3).map(|node| group.connects(node)).collect();
    assert!(before.iter().all(|n| *n > 0), "every node was asked: {before:?}");
    // The same nodes in another order and with another weight: no new connection.
    let mut members = group.members(&[2, 1, 0]);
    Arc::make_mut(&mut members[1]).weight = 50;
    remote.set_members(&members);
    for object in 0..200 {
        group.read(&remote, object, 0, 4096).unwrap();
    }
    assert_eq!(before, (0..3).map(|node| group.connects(node)).collect::<Vec<_>>());
    // Another address needs a new connection.
    Arc::make_mut(&mut members[0]).addresses = vec!["elsewhere:7000".into()];
    remote.set_members(&members);
    for object in 0..200 {
        group.read(&remote, object, 0, 4096).unwrap();
    }
    assert!(group.connects(2) > before[2]);
    assert_eq!((group.connects(0), group.connects(1)), (before[0], before[1]));
}

#[test]
fn copies_go_to_other_nodes_where_one_is_dead() {
    let group = Nodes::start(4);
    let remote = group.mount(&[0, 1, 2, 3]);
    let run = 16 * BLOCK;
    let extents: Vec<ObjectExtent> =
        (0..40).map(|n| ObjectExtent { object: object_ref(n), bytes: 0..2 * run }).collect();
    let copies = |wanted: u32, there: usize| {
        for (n, done) in remote.warm(&extents, Some(wanted), false).iter().enumerate() {
            assert_eq!(done.error, None, "object {n}, {wanted} copies");
            assert!(done.moved_bytes + done.held_bytes >= there as u64 * 2 * run, "object {n}: {done:?}");
            let took = |at: u64| group.warmed(n as u64, at).len();
            assert!(took(0) >= there && took(run) >= there, "object {n}, {wanted} copies: {} {}", took(0), took(run));
        }
    };
    group.nodes[1].kill();
    copies(2, 2);
    assert!((0..40).all(|n| !group.warmed(n, 0).contains(&1)));
    group.nodes[3].kill();
    copies(2, 2);
    copies(3, 2);
    // As many copies as possible: one with one node; an error without any.
    group.nodes[0].kill();
    copies(2, 1);
    group.nodes[2].kill();
    let failed = remote.warm(&extents[..2], Some(2), false);
    assert!(failed.iter().all(|done| done.error.as_ref().is_some_and(|e| e.kind() == ErrorKind::Unavailable)));
}

#[test]
fn of_two_nodes_under_one_name_one_is_asked() {
    let group = Nodes::start(1);
    let remote = group.mount(&[0, 0]);
    assert_eq!(remote.members().snapshot().members().len(), 1);
    group.read(&remote, 1, 0, 4096).unwrap();
}

#[test]
fn a_group_without_nodes_says_so_and_reads_again_when_there_is_one() {
    let group = Nodes::start(1);
    let remote = group.mount(&[0]);
    remote.set_members(&[]);
    let error = group.read(&remote, 1, 0, 4096).unwrap_err();
    assert!(error.to_string().contains("no node"), "{error}");
    remote.set_members(&group.members(&[0]));
    group.read(&remote, 1, 0, 4096).unwrap();
}

#[test]
fn a_node_is_found_also_when_the_first_eight_of_a_run_are_away() {
    let group = Nodes::start(12);
    let remote = group.mount(&(0..12).collect::<Vec<_>>());
    (0..10).for_each(|node| group.nodes[node].kill());
    // Longer than the mount's absence timeout.
    for _ in 0..2 {
        (0..100).for_each(|object| group.read(&remote, object, 0, 4096).unwrap());
        std::thread::sleep(Duration::from_millis(250));
    }
    (10..12).for_each(|node| group.nodes[node].kill());
    let all_gone = |object| group.read(&remote, object, 0, 4096);
    assert_eq!(all_gone(1).and_then(|()| all_gone(2)).unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn what_ails_one_node_is_asked_of_another_and_what_ails_two_is_the_answer() {
    let group = Nodes::start(3);
    let remote = group.mount(&[0, 1, 2]);
    let read = |object| group.read(&remote, object, 0, 4096);
    for kind in [ErrorKind::PermissionDenied, ErrorKind::Io(EMFILE), ErrorKind::Unknown(99)] {
        group.ail(0, Some(kind));
        (0..50).for_each(|object| read(object).unwrap());
        group.ail(1, Some(kind));
        group.ail(2, Some(kind));
        assert_eq!(read(1).unwrap_err().kind(), kind);
        (0..3).for_each(|node| group.ail(node, None));
    }
    // No node has a missing object.
    group.ail(0, Some(ErrorKind::NotFound));
    assert!((0..50).filter_map(|object| read(object).err()).any(|error| error.kind() == ErrorKind::NotFound));
}

#[test]
fn a_request_whose_connection_is_closed_at_this_very_moment_is_sent_over_another_one() {
    let nodes = Nodes::start(2);
    let mount = nodes.mount(&[0, 1]);
    nodes.read(&mount, 1, 0, 5000).unwrap();
    let before = [nodes.connects(0), nodes.connects(1)];
    // Both close idle connections to free slots: the called node closes it under the request.
    nodes.plans.iter().for_each(|plan| plan.inject_fault(SimFault::Drop));
    nodes.read(&mount, 1, 0, 5000).unwrap();
    let made = [nodes.connects(0) - before[0], nodes.connects(1) - before[1]];
    assert!(made == [1, 0] || made == [0, 1], "{made:?}: one more connection, and no request to another node");
}

#[test]
fn one_that_is_being_restarted_is_waited_for_though_another_says_that_it_can_not() {
    let group = Nodes::start(2);
    let remote = group.mount_waiting(&[0, 1], Duration::from_secs(60));
    (0..20).for_each(|object| group.read(&remote, object, 0, 4096).unwrap());
    group.ail(0, Some(ErrorKind::Unavailable));
    group.nodes[1].kill();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| group.read(&remote, 1, 0, 4096));
        std::thread::sleep(Duration::from_millis(20));
        group.nodes[1].start();
        reader.join().unwrap().unwrap();
    });
}

#[test]
fn readers_notice_nothing_of_nodes_that_come_and_go() {
    let group = Nodes::start(5);
    let remote = group.mount(&[0, 1, 2, 3, 4]);
    let stop = AtomicBool::new(false);
    let reads: u64 = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4u64)
            .map(|reader| {
                let (group, remote, stop) = (&group, Arc::clone(&remote), &stop);
                scope.spawn(move || {
                    let mut reads = 0;
                    while !stop.load(Ordering::Acquire) || reads == 0 {
                        group.read(&remote, reader << 32 | reads, reads * 77, 8192).unwrap();
                        reads += 1;
                    }
                    reads
                })
            })
            .collect();
        for round in 0..200u32 {
            // Never an empty list.
            let present: Vec<usize> =
                (0..5).filter(|node| (round >> node) & 1 == 1 || *node == round as usize % 5).collect();
            remote.set_members(&group.members(&present));
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Release);
        readers.into_iter().map(|reader| reader.join().unwrap()).sum()
    });
    assert!(reads > 0);
    assert_ne!(byte_at(1, 2), byte_at(2, 2), "the bytes of two objects differ");
}
