//! The store against a model: a map of what was put. Whatever the order of operations and restarts, a hit has the bytes
//! that were put, and with room enough everything put is a hit.

use crate::common;
use common::*;
use proptest::prelude::*;
use std::collections::HashSet;

#[derive(Debug, Clone)]
enum Op {
    Put(u64, u32),
    Get(u64, u32, usize, usize),
    Whole(u64),
    Remove(u64),
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u64..8, 0u32..5).prop_map(|(o, i)| Op::Put(o, i)),
        6 => (0u64..8, 0u32..5, 0usize..300_000, 1usize..300_000).prop_map(|(o, i, a, n)| Op::Get(o, i, a, n)),
        1 => (0u64..8).prop_map(Op::Whole),
        1 => (0u64..8).prop_map(Op::Remove),
        1 => Just(Op::Reopen),
    ]
}

fn run(ops: &[Op], capacity: u64, exact: bool) {
    let dir = fast_dir();
    let mut store = Some(open(config(dir.path(), capacity)).0);
    let mut model: HashSet<(u64, u32)> = HashSet::new();
    for op in ops {
        let s = store.as_ref().unwrap();
        match *op {
            Op::Put(name, index) => {
                let obj = object(name, 60_000 + name * 150_000);
                if u64::from(index) < obj.block_count(u64::from(BLOCK)) {
                    let mut kept = put(s, &obj, index);
                    if exact && !kept {
                        // What left the index a moment ago may not have left the disk.
                        eventually("room for a block", || put(s, &obj, index));
                        kept = true;
                    }
                    model.insert((name, index));
                }
            }
            Op::Get(name, index, at, n) => {
                let obj = object(name, 60_000 + name * 150_000);
                let len = obj.block_len(index, u64::from(BLOCK));
                if at >= len {
                    continue;
                }
                let end = (at + n).min(len);
                let mut dst = vec![0xaa; end - at];
                let hit = s.read_copied(&obj, index, at..end, &mut dst).unwrap();
                if exact {
                    assert_eq!(hit, model.contains(&(name, index)));
                }
                if hit {
                    assert!(model.contains(&(name, index)), "a hit on what was never put");
                    assert!(dst == bytes(&obj, index)[at..end]);
                }
            }
            Op::Whole(name) => {
                let obj = object(name, 60_000 + name * 150_000);
                let blocks = obj.block_count(u64::from(BLOCK)) as u32;
                let complete = (0..blocks).all(|i| model.contains(&(name, i)));
                let file = s.whole_file(&obj);
                if exact {
                    assert_eq!(file.is_some(), complete);
                }
                if let Some(mut file) = file {
                    let mut all = Vec::new();
                    std::io::Read::read_to_end(&mut file.file, &mut all).unwrap();
                    assert!(all == (0..blocks).flat_map(|i| bytes(&obj, i)).collect::<Vec<_>>());
                }
            }
            Op::Remove(name) => {
                s.remove_object(&object(name, 60_000 + name * 150_000));
                model.retain(|(n, _)| *n != name);
            }
            Op::Reopen => {
                drop(store.take());
                store = Some(open(config(dir.path(), capacity)).0);
            }
        }
        if exact {
            let s = store.as_ref().unwrap();
            assert_eq!(s.disks()[0].blocks, model.len() as u64);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn with_room_the_store_is_a_map(ops in proptest::collection::vec(op(), 1..60)) {
        run(&ops, 1 << 30, true);
    }

    #[test]
    fn without_room_it_forgets_but_never_lies(ops in proptest::collection::vec(op(), 1..60)) {
        run(&ops, 5 * u64::from(BLOCK), false);
    }
}
