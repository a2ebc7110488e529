//! Locks after the loss of a node whose successor answers slowly.

use super::*;
use spurline_net_sim::SimFault;

/// A slow answer about the lock of another mount, which was earlier, takes no lock away.
#[test]
fn slow_answers_lose_no_lock() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let plan = Arc::new(FaultPlan::new(1, FaultRates::default()));
    let (_volume, writes) = mount(source.path(), &[&nodes[0], &nodes[1]], Some(Arc::clone(&plan))).unwrap();
    let (_other, second) = mount(source.path(), &[&nodes[0], &nodes[1]], None).unwrap();
    let mine = lock_of(1, 0, u64::MAX >> 1, LockKind::Write);
    let unlock = FileLock { kind: LockKind::Unlock, ..mine };
    drop(create(&*writes, "f", O_EXCL).unwrap());
    // One of them is the home of the file.
    for lost in [0, 1] {
        nodes[lost].kill();
        let other = second.open(dir(b"f"), O_RDWR, &root()).unwrap();
        other.set_lock(&mine, &root()).unwrap();
        other.set_lock(&unlock, &root()).unwrap();
        drop(other);
        nodes[lost].restart();
        let file = writes.open(dir(b"f"), O_RDWR, &root()).unwrap();
        file.set_lock(&mine, &root()).unwrap();
        nodes[lost].kill();
        // More than the requests for the next node.
        (0..8).for_each(|_| plan.inject_fault(SimFault::Delay(Duration::from_millis(300))));
        file.write_at(0, b"mine", None).unwrap();
        file.set_lock(&unlock, &root()).unwrap();
        nodes[lost].restart();
    }
}
