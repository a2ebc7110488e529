//! The file system against a model that is too simple to be wrong: random calls, one by one, then from many
//! threads at once while files are replaced under them.

use crate::support;
use proptest::prelude::*;
use spurline_fs::{FsConfig, LookupOutcome, ROOT};
use spurline_types::FileKind;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::{Node, Rig, byte};

const PATHS: [&[u8]; 7] = [b"a", b"b", b"d", b"d/a", b"d/b", b"d/e", b"d/e/a"];
const SIZE: u64 = 3000;

#[derive(Clone, Debug)]
enum Op {
    Lookup(usize),
    Forget(usize, u64),
    Open(usize),
    Read(usize, u64, usize),
    Release(usize),
    Getattr(usize),
    /// The path becomes a file of this version, a directory (0), or nothing (none).
    Replace(usize, Option<u64>),
    Evict,
    ReadDirPlus(usize, usize),
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let path = 0..PATHS.len();
    prop_oneof![
        6 => path.clone().prop_map(Op::Lookup),
        3 => (any::<usize>(), 1..3u64).prop_map(|(i, n)| Op::Forget(i, n)),
        4 => any::<usize>().prop_map(Op::Open),
        6 => (any::<usize>(), 0..SIZE + 100, 0..SIZE as usize).prop_map(|(i, at, len)| Op::Read(i, at, len)),
        2 => any::<usize>().prop_map(Op::Release),
        2 => any::<usize>().prop_map(Op::Getattr),
        3 => (path.clone(), prop_oneof![4 => (0..4u64).prop_map(Some), 1 => Just(None)]).prop_map(|(p, v)| Op::Replace(p, v)),
        1 => Just(Op::Evict),
        1 => (path, 0..4usize).prop_map(|(p, n)| Op::ReadDirPlus(p, n)),
        1 => (0..2000u64).prop_map(Op::Pass),
    ]
}

/// What the kernel knows of one inode.
#[derive(Clone, Debug)]
struct Known {
    path: Vec<u8>,
    node: Node,
    lookups: u64,
}

#[derive(Default)]
struct Model {
    known: HashMap<u64, Known>,
    /// Every number ever given out, with what it stood for.
    ever: HashMap<u64, (Vec<u8>, Node)>,
    order: Vec<u64>,
    handles: Vec<(u64, u64)>,
}

impl Model {
    fn record(&mut self, ino: u64, path: &[u8], node: &Node) {
        let before = self.ever.entry(ino).or_insert_with(|| (path.to_vec(), node.clone()));
        assert_eq!((&before.0[..], &before.1), (path, node), "inode {ino} never stands for anything else");
        let same = self.known.iter().find(|(_, k)| k.path == path && k.node == *node).map(|(ino, _)| *ino);
        assert!(same.is_none_or(|same| same == ino), "a version that is known has one number");
        let known = Known { path: path.to_vec(), node: node.clone(), lookups: 0 };
        self.known.entry(ino).or_insert(known).lookups += 1;
        if !self.order.contains(&ino) {
            self.order.push(ino);
        }
    }

    fn pick(&self, i: usize) -> Option<u64> {
        (!self.order.is_empty()).then(|| self.order[i % self.order.len()])
    }
}

fn run(ops: Vec<Op>) {
    let rig = Rig::new(FsConfig { list_page: 2, ..FsConfig::default() });
    let mut model = Model::default();
    for (i, path) in PATHS.iter().enumerate() {
        if i == 2 || i == 5 { rig.tree.dir(path) } else { rig.tree.put(path, 1, SIZE) }
    }
    let node_at = |path: &[u8]| rig.tree.nodes.lock().get(path).cloned();
    for op in ops {
        match op {
            Op::Lookup(p) => {
                let path = PATHS[p];
                let cut = path.iter().rposition(|b| *b == b'/');
                let (dir, name) = cut.map_or((&b""[..], path), |cut| (&path[..cut], &path[cut + 1..]));
                let parent = match dir {
                    b"" => Some(ROOT),
                    dir => model.known.iter().find(|(_, k)| k.path == dir && k.node == Node::Dir).map(|(ino, _)| *ino),
                };
                let Some(parent) = parent else { continue };
                match (rig.fs.lookup(parent, name).unwrap(), node_at(path)) {
                    (LookupOutcome::Found(entry), Some(node)) => {
                        let kind = if node == Node::Dir { FileKind::Directory } else { FileKind::File };
                        assert_eq!(entry.attr.kind, kind);
                        model.record(entry.attr.ino, path, &node);
                    }
                    (LookupOutcome::Absent { .. }, None) => {}
                    (answer, node) => panic!("{answer:?} for {node:?}"),
                }
            }
            Op::Forget(i, n) => {
                let Some(ino) = model.pick(i) else { continue };
                if let Some(known) = model.known.get_mut(&ino) {
                    let n = n.min(known.lookups);
                    rig.fs.forget(ino, n);
                    known.lookups -= n;
                    if known.lookups == 0 {
                        model.known.remove(&ino);
                    }
                }
            }
            Op::Open(i) => {
                let Some(ino) = model.pick(i) else { continue };
                let answer = rig.fs.open(ino, 0, None);
                match model.known.get(&ino) {
                    None => assert_eq!(Rig::errno(answer), libc::ESTALE),
                    Some(Known { node: Node::Dir, .. }) => assert_eq!(Rig::errno(answer), libc::EISDIR),
                    Some(known) => match answer {
                        Ok(opened) => model.handles.push((opened.fh, ino)),
                        Err(error) => {
                            assert_eq!(error.errno(), libc::ESTALE);
                            assert_ne!(
                                node_at(&known.path).as_ref(),
                                Some(&known.node),
                                "only a replaced one is stale"
                            );
                        }
                    },
                }
            }
            Op::Read(i, at, len) => {
                if model.handles.is_empty() {
                    continue;
                }
                let (fh, ino) = model.handles[i % model.handles.len()];
                let (path, node) = &model.ever[&ino];
                let Node::File { version, size } = *node else { panic!("only files are open") };
                let held =
                    rig.tree.cached.lock().contains(&(path.clone(), version)) || node_at(path).as_ref() == Some(node);
                let expected = (at..(at + len as u64).min(size)).map(|i| byte(version, i)).collect::<Vec<_>>();
                match rig.read(ino, fh, at, len) {
                    Ok(bytes) => assert!(bytes == expected, "the bytes of version {version} and no other"),
                    Err(error) => assert!(error.errno() == libc::ESTALE && !held && !expected.is_empty()),
                }
            }
            Op::Release(i) => {
                if !model.handles.is_empty() {
                    let (fh, _) = model.handles.swap_remove(i % model.handles.len());
                    rig.fs.release(fh).unwrap();
                    assert_eq!(Rig::errno(rig.fs.release(fh)), libc::EBADF);
                }
            }
            Op::Getattr(i) => {
                let Some(ino) = model.pick(i) else { continue };
                match (rig.fs.getattr(ino, None), model.known.get(&ino)) {
                    (Ok((attr, _)), Some(Known { node: Node::File { size, .. }, .. })) => assert_eq!(attr.size, *size),
                    (Ok((attr, _)), Some(_)) => assert_eq!(attr.kind, FileKind::Directory),
                    (Err(error), known) => {
                        assert_eq!(error.errno(), libc::ESTALE);
                        assert!(
                            known
                                .is_none_or(|known| known.node == Node::Dir && node_at(&known.path) != Some(Node::Dir))
                        );
                    }
                    (Ok(_), None) => panic!("a forgotten inode has no attributes"),
                }
            }
            Op::Replace(p, version) => {
                if let Some(Node::File { version, .. }) = node_at(PATHS[p]) {
                    rig.tree.cached.lock().push((PATHS[p].to_vec(), version));
                }
                match version {
                    None => rig.tree.remove(PATHS[p]),
                    Some(0) => rig.tree.dir(PATHS[p]),
                    Some(version) => rig.tree.put(PATHS[p], version, SIZE - version),
                }
            }
            Op::Evict => rig.tree.cached.lock().clear(),
            Op::ReadDirPlus(p, stop) => {
                let dir = PATHS[p];
                let open = model.known.iter().find(|(_, k)| k.path == dir && k.node == Node::Dir);
                let Some(ino) = open.map(|(ino, _)| *ino).filter(|_| node_at(dir) == Some(Node::Dir)) else { continue };
                let fh = rig.fs.opendir(ino).unwrap();
                let mut left = stop;
                let mut listed = Vec::new();
                let mut take = |item: &spurline_fs::DirItem<'_>| {
                    if item.entry.is_some() {
                        if left == 0 {
                            return false;
                        }
                        left -= 1;
                        listed.push(([dir, b"/", item.name].concat(), item.ino));
                    }
                    true
                };
                rig.fs.readdirplus(ino, fh, 0, &mut take).unwrap();
                rig.fs.release(fh).unwrap();
                for (path, ino) in listed {
                    model.record(ino, &path, &node_at(&path).expect("it was listed"));
                }
            }
            Op::Pass(ms) => rig.pass(ms),
        }
        assert_eq!(rig.stats.fuse.inodes.get(), 1 + model.known.len() as u64);
        assert_eq!(rig.stats.fuse.open_handles.get(), model.handles.len() as u64);
    }
    for (fh, _) in model.handles {
        rig.fs.release(fh).unwrap();
    }
    for (ino, known) in model.known {
        rig.fs.forget(ino, known.lookups);
    }
    assert_eq!((rig.fs.known_inodes(), rig.stats.fuse.inodes.get(), rig.stats.fuse.open_handles.get()), (1, 1, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
    #[test]
    fn any_calls_in_a_row(ops in proptest::collection::vec(op(), 1..120)) {
        run(ops);
    }
}

#[test]
fn many_threads_at_once() {
    let rig = Rig::new(FsConfig { list_page: 5, ..FsConfig::default() });
    rig.tree.dir(b"d");
    let names: Vec<Vec<u8>> = (0..16).map(|i| format!("d/{i:02}").into_bytes()).collect();
    for name in &names {
        rig.tree.put(name, 1, SIZE);
    }
    let dir = rig.walk(b"d").unwrap();
    let (stop, reads, stale) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // One thread replaces files and forgets their old bytes.
        scope.spawn(|| {
            let mut version = 2;
            while !stop.load(Ordering::Relaxed) {
                for name in &names {
                    rig.tree.put(name, version, SIZE);
                    version += 1;
                }
                rig.pass(300);
                std::thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..6)
            .map(|worker| {
                let (rig, names, reads, stale) = (&rig, &names, &reads, &stale);
                scope.spawn(move || {
                    let mut seen = HashSet::new();
                    for round in 0..3000usize {
                        let name = &names[(round * 7 + worker) % names.len()][2..];
                        let LookupOutcome::Found(entry) = rig.fs.lookup(dir, name).unwrap() else {
                            panic!("it is there")
                        };
                        let ino = entry.attr.ino;
                        seen.insert(ino);
                        if let Ok(opened) = rig.fs.open(ino, 0, None) {
                            match rig.read(ino, opened.fh, 0, SIZE as usize) {
                                Ok(bytes) => {
                                    // Which version it is shows in the first byte; the rest has to agree.
                                    let version = (0..256).find(|v| byte(*v, 0) == bytes[0]).unwrap();
                                    assert!(bytes.iter().enumerate().all(|(i, b)| *b == byte(version, i as u64)));
                                    reads.fetch_add(1, Ordering::Relaxed);
                                }
                                Err(error) => {
                                    assert_eq!(error.errno(), libc::ESTALE);
                                    stale.fetch_add(1, Ordering::Relaxed);
                                }
                            }
                            rig.fs.release(opened.fh).unwrap();
                        }
                        if round % 50 == 0 {
                            let fh = rig.fs.opendir(dir).unwrap();
                            let (mut listed, mut from, mut more) = (Vec::new(), 0, true);
                            while std::mem::take(&mut more) {
                                rig.fs
                                    .readdirplus(dir, fh, from, &mut |item| {
                                        listed.extend(item.entry.map(|entry| entry.attr.ino));
                                        (from, more) = (item.next, true);
                                        true
                                    })
                                    .unwrap();
                            }
                            rig.fs.release(fh).unwrap();
                            assert_eq!(listed.len(), 16);
                            listed.into_iter().for_each(|ino| rig.fs.forget(ino, 1));
                        }
                        assert!(rig.fs.getattr(ino, None).is_ok(), "what is looked up is known");
                        rig.fs.forget(ino, 1);
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(reads.load(Ordering::Relaxed) > 1000, "{} read, {} stale", reads.into_inner(), stale.into_inner());
    assert_eq!((rig.fs.known_inodes(), rig.stats.fuse.inodes.get(), rig.stats.fuse.open_handles.get()), (2, 2, 0));
    rig.fs.forget(dir, 1);
    assert_eq!(rig.fs.known_inodes(), 1);
}
