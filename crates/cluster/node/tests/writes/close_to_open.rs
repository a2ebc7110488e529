//! Two mounts of two nodes agree with a model of close-to-open, with faults of the network and nodes that are started again.

use super::rig::{Node, mount};
use super::{O_EXCL, O_RDWR, create, dir, lock_of, pattern, root};
use spurline_client::GroupWrites;
use spurline_net_sim::{FaultPlan, FaultRates};
use spurline_types::ErrorKind;
use spurline_types::errno::EAGAIN;
use spurline_volume::writes::{AttrChange, LockKind, WritableFile, WritableVolume as _};
use std::fs;
use std::sync::Arc;

const MODEL_FILES: usize = 4;

/// An open file of the model.
struct ModelFile {
    mount: usize,
    file: usize,
    writes: bool,
    open: Box<dyn WritableFile>,
}

fn model_path(file: usize) -> String {
    format!("f{file}")
}

fn read_all(open: &dyn WritableFile) -> Vec<u8> {
    let mut bytes = vec![0; 40_000];
    let n = open.read_at(0, &mut bytes).unwrap();
    bytes.truncate(n);
    bytes
}

/// Two mounts beside the contents and locks that their files have to have.
struct CloseToOpenModel {
    /// For messages.
    seed: u64,
    mounts: [Arc<GroupWrites>; 2],
    opened: Vec<ModelFile>,
    content: Vec<Vec<u8>>,
    /// The mount with writes that no close, sync or unlock has published.
    unpublished: [Option<usize>; MODEL_FILES],
    locks: [Option<usize>; MODEL_FILES],
}

impl CloseToOpenModel {
    fn find_open(&self, mount: usize, file: usize) -> Option<usize> {
        self.opened.iter().position(|open| (open.mount, open.file) == (mount, file))
    }

    fn open_for_writing(&mut self, mount: usize, file: usize, step: usize) {
        let open = self.mounts[mount].open(dir(model_path(file).as_bytes()), O_RDWR, &root()).unwrap();
        let seed = self.seed;
        assert_eq!(read_all(&*open), self.content[file], "seed {seed}, step {step}: an open for writing");
        self.opened.push(ModelFile { mount, file, writes: true, open });
    }

    fn open_for_reading(&self, mount: usize, file: usize, step: usize) {
        let open = self.mounts[mount].open(dir(model_path(file).as_bytes()), 0, &root()).unwrap();
        if self.unpublished[file].is_none_or(|writer| writer == mount) {
            let seed = self.seed;
            assert_eq!(read_all(&*open), self.content[file], "seed {seed}, step {step}: an open for reading");
        }
    }

    fn write(&mut self, at: usize, offset: usize, bytes: &[u8]) {
        let ModelFile { mount, file, open, .. } = &self.opened[at];
        assert_eq!(open.write_at(offset as u64, bytes, None).unwrap(), bytes.len());
        let content = &mut self.content[*file];
        content.resize(content.len().max(offset + bytes.len()), 0);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.unpublished[*file] = Some(*mount);
    }

    fn cut(&mut self, at: usize, len: usize) {
        let set = AttrChange { size: Some(len as u64), ..AttrChange::default() };
        self.opened[at].open.set_attr(&set, &root()).unwrap();
        self.content[self.opened[at].file].resize(len, 0);
    }

    fn sync(&mut self, at: usize, step: usize) {
        let ModelFile { file, open, .. } = &self.opened[at];
        let seed = self.seed;
        assert_eq!(read_all(&**open), self.content[*file], "seed {seed}, step {step}: own writes");
        open.sync(step.is_multiple_of(2)).unwrap();
        self.unpublished[*file] = None;
    }

    fn close(&mut self, at: usize) {
        let ModelFile { mount, file, open, .. } = self.opened.swap_remove(at);
        open.flush().unwrap();
        drop(open);
        self.unpublished[file] = None;
        self.locks[file] = self.locks[file].filter(|holder| *holder != mount);
    }

    /// The open file of a mount, if the mount has the file open once: locks belong to that.
    fn find_only_open(&self, mount: usize, file: usize) -> Option<&ModelFile> {
        let mut own = self.opened.iter().filter(|open| (open.mount, open.file) == (mount, file));
        let first = own.next()?;
        own.next().is_none().then_some(first)
    }

    fn lock(&mut self, mount: usize, file: usize, step: usize) {
        let Some(open) = self.find_only_open(mount, file) else { return };
        let answer = open.open.set_lock(&lock_of(3, 0, u64::MAX >> 1, LockKind::Write), &root());
        match (answer, self.locks[file]) {
            (Ok(()), None) => self.locks[file] = Some(mount),
            (Ok(()), Some(holder)) if holder == mount => {}
            (Err(error), Some(holder)) if holder != mount => assert_eq!(error.kind(), ErrorKind::Io(EAGAIN)),
            (answer, holder) => panic!("seed {}, step {step}: {answer:?} while {holder:?} has it", self.seed),
        }
    }

    fn unlock(&mut self, mount: usize, file: usize) {
        let Some(open) = self.find_only_open(mount, file) else { return };
        if self.locks[file] == Some(mount) {
            open.open.set_lock(&lock_of(3, 0, u64::MAX >> 1, LockKind::Unlock), &root()).unwrap();
            self.locks[file] = None;
            self.unpublished[file] = None;
        }
    }

    fn sync_all(&mut self) {
        for open in self.opened.drain(..) {
            open.open.flush().unwrap();
            open.open.sync(false).unwrap();
        }
    }
}

/// Two mounts and two nodes, with calls drawn by a seed, faults of the network and nodes that are started again. What one
/// has closed, synced or unlocked, every later open reads; own writes are read at once; locks are those of one table.
fn close_to_open(seed: u64, steps: usize) {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let plan = Arc::new(FaultPlan::new(seed, FaultRates::default()));
    let mounts = [[0, 1], [1, 0]]
        .map(|order| mount(source.path(), &order.map(|n: usize| &nodes[n]), Some(Arc::clone(&plan))).unwrap());
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((state ^ state >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as usize % below
    };
    (0..MODEL_FILES).for_each(|file| drop(create(&*mounts[0].1, &model_path(file), O_EXCL).unwrap()));
    let mut model = CloseToOpenModel {
        seed,
        mounts: [Arc::clone(&mounts[0].1), Arc::clone(&mounts[1].1)],
        opened: Vec::new(),
        content: vec![Vec::new(); MODEL_FILES],
        unpublished: [None; MODEL_FILES],
        locks: [None; MODEL_FILES],
    };
    plan.set_rates(FaultRates { drop: 15, cut: 30, garbage: 15, ..FaultRates::default() });
    for step in 0..steps {
        let mount = draw(2);
        let file = draw(MODEL_FILES);
        let found = model.find_open(mount, file);
        // A file is written by one mount at a time, as its lock would have it.
        let foreign = model.opened.iter().any(|open| open.writes && open.file == file && open.mount != mount);
        // The one open file that has a lock stays the only one.
        let writable = !foreign && (model.locks[file] != Some(mount) || found.is_none());
        match (draw(16), found) {
            (0..=2, _) if writable && model.opened.len() < 8 => model.open_for_writing(mount, file, step),
            (3 | 4, _) => model.open_for_reading(mount, file, step),
            (5..=8, Some(at)) => {
                let offset = draw(20_000);
                let len = 1 + draw(6000);
                model.write(at, offset, &pattern(len, step));
            }
            (9, Some(at)) => model.cut(at, draw(20_000)),
            (10, Some(at)) => model.sync(at, step),
            (11 | 12, Some(at)) => model.close(at),
            (5..=12, None) => {}
            (13, _) => model.lock(mount, file, step),
            (14, _) => model.unlock(mount, file),
            _ if draw(4) == 0 => {
                nodes[draw(2)].restart();
                // Each mount finds its files on the next process before another one asks for their locks.
                for open in &model.opened {
                    open.open.stat().unwrap();
                }
            }
            _ => {}
        }
    }
    plan.set_rates(FaultRates::default());
    model.sync_all();
    for (file, wanted) in model.content.iter().enumerate() {
        assert!(fs::read(source.path().join(model_path(file))).unwrap() == *wanted, "seed {seed}: f{file}");
    }
}

/// `SPURLINE_TEST_WRITE_SEEDS=10..500` runs other seeds.
#[test]
fn two_mounts_agree_with_a_close_to_open_model() {
    let seeds = std::env::var("SPURLINE_TEST_WRITE_SEEDS").unwrap_or("0..4".into());
    let (first, last) = seeds.split_once("..").expect("SPURLINE_TEST_WRITE_SEEDS is FIRST..LAST");
    for seed in first.parse().unwrap()..last.parse().unwrap() {
        println!("SPURLINE_TEST_WRITE_SEEDS={seed}..{}", seed + 1);
        close_to_open(seed, 200);
    }
}
