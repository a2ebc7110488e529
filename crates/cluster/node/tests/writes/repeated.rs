//! Changes that are sent again, to the node that got them before and to others.

use super::rig::{Node, mount};
use super::{O_APPEND, O_EXCL, create, dir, name, root};
use spurline_net_sim::{FaultPlan, FaultRates, SimFault};
use spurline_volume::writes::{Change, WritableVolume as _};
use std::fs;
use std::sync::Arc;

/// The answer of one node is lost, and then so many connections that each of the next requests once ends on its way.
#[test]
fn a_change_without_an_answer_is_compared_however_often_the_next_node_is_tried() {
    let source = tempfile::tempdir().unwrap();
    let nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let plan = Arc::new(FaultPlan::new(7, FaultRates::default()));
    let (_volume, writes) = mount(source.path(), &[&nodes[0], &nodes[1]], Some(Arc::clone(&plan))).unwrap();
    drop(create(&*writes, "file", O_EXCL).unwrap());
    let lose_answer = |lost_requests: usize| {
        plan.inject_fault(SimFault::Cut);
        (0..lost_requests).for_each(|_| plan.inject_fault(SimFault::Drop));
    };
    let mut wanted = Vec::new();
    let log = create(&*writes, "log", O_APPEND).unwrap();
    for lost_requests in 1..5 {
        let linked = format!("link-{lost_requests}");
        lose_answer(lost_requests);
        let link = Change::Link { from: dir(b"file"), to: name(b"", linked.as_bytes()) };
        writes.change(&link, &root()).unwrap_or_else(|e| panic!("{linked}: {e}"));
        let line = format!("{lost_requests}\n");
        lose_answer(lost_requests);
        log.write_at(0, line.as_bytes(), None).unwrap();
        log.flush().unwrap();
        wanted.extend(line.into_bytes());
        // Faults that are left meet requests that change nothing.
        for _ in 0..20 {
            let _ = writes.lookup(name(b"", b"file"), &root());
        }
    }
    assert_eq!(String::from_utf8(fs::read(source.path().join("log")).unwrap()), String::from_utf8(wanted));
}
