//! The disk of a node, in memory: outlives the processes of the node, fails as a script says, and forgets what no call has returned. A
//! process has a handle, which does nothing after the end of the process.

use crate::dice::Dice;
use parking_lot::Mutex;
use spurline_stage::{KeptPart, Manifest, PartWriter, RecordChange, StageDisk};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

struct MemPart {
    bytes: Arc<Vec<u8>>,
    made: Instant,
}

/// How a disk fails.
#[derive(Debug, Clone, Copy, Default)]
pub struct DiskFaults {
    /// Changes fail for want of space.
    pub is_full: bool,
    /// Of a thousand calls.
    pub failing: u32,
    /// Longest time of a call, in milliseconds.
    pub slow_ms: u32,
}

struct DiskState {
    /// The process that may use the disk.
    process: u64,
    identity: u64,
    term: u64,
    records: BTreeMap<String, (Manifest, Vec<u8>)>,
    parts: BTreeMap<String, MemPart>,
    /// Parts with a damaged byte.
    flipped: BTreeSet<String>,
    /// Parts that a manifest of this disk had when it was done.
    named: BTreeSet<String>,
    /// Parts that a manifest had which was withdrawn.
    withdrawn: BTreeSet<String>,
    faults: DiskFaults,
    dice: Dice,
}

/// See the head of this file.
pub struct MemDisk {
    node: String,
    state: Mutex<DiskState>,
}

impl MemDisk {
    pub fn new(node: &str, seed: u64) -> Arc<MemDisk> {
        let state = DiskState {
            process: 0,
            identity: seed,
            term: 0,
            records: BTreeMap::new(),
            parts: BTreeMap::new(),
            flipped: BTreeSet::new(),
            named: BTreeSet::new(),
            withdrawn: BTreeSet::new(),
            faults: DiskFaults::default(),
            dice: Dice::new(seed),
        };
        Arc::new(MemDisk { node: node.to_owned(), state: Mutex::new(state) })
    }

    /// The handle of a new process.
    pub fn open(self: &Arc<Self>, process: u64) -> Arc<dyn StageDisk> {
        self.state.lock().process = process;
        Arc::new(DiskHandle { disk: Arc::clone(self), process })
    }

    /// The process has ended.
    pub fn end_process(&self) {
        self.state.lock().process = 0;
    }

    /// An empty disk takes the place of this disk.
    pub fn replace(&self) {
        let mut state = self.state.lock();
        state.term = 0;
        state.identity += 1;
        state.records.clear();
        state.parts.clear();
        state.flipped.clear();
        state.named.clear();
    }

    pub fn set_faults(&self, faults: DiskFaults) {
        self.state.lock().faults = faults;
    }

    /// Damages all parts; the number of these.
    pub fn flip_all(&self) -> usize {
        let mut state = self.state.lock();
        let names: BTreeSet<String> = state.parts.keys().cloned().collect();
        state.flipped = names;
        state.flipped.len()
    }

    pub fn unflip(&self) {
        self.state.lock().flipped.clear();
    }

    /// All records, each with whether all its parts are here and undamaged.
    pub fn records(&self) -> Vec<(Manifest, bool)> {
        let state = self.state.lock();
        let records = state.records.values().map(|(manifest, _)| {
            let mut parts = manifest.parts_at(&self.node);
            let is_whole =
                parts.all(|slice| state.parts.contains_key(&slice.part) && !state.flipped.contains(&slice.part));
            (manifest.clone(), is_whole)
        });
        records.collect()
    }

    /// Whether there is a record of an object with this mark.
    pub fn has_mark(&self, mark: &str) -> bool {
        self.state.lock().records.values().any(|(manifest, _)| manifest.mark == mark)
    }

    /// Leftovers: manifests that are not done, parts that a manifest had, and parts of calls.
    pub fn leftovers(&self) -> Vec<String> {
        let state = self.state.lock();
        let records = state.records.values().filter(|(manifest, _)| is_live(manifest));
        let records = records.map(|(manifest, _)| {
            format!("{}: '{}' with mark {:.6} is {:?}", self.node, manifest.at.key, manifest.mark, manifest.phase)
        });
        let parts = state.parts.iter().filter(|(part, _)| {
            part.starts_with("call-") || state.named.contains(*part) && !state.withdrawn.contains(*part)
        });
        let parts = parts.map(|(part, kept)| {
            let is_done = state.named.contains(part);
            format!(
                "{}: part {part}, made {:?} ago, of an object that is done: {is_done}",
                self.node,
                kept.made.elapsed()
            )
        });
        records.chain(parts).collect()
    }

    fn failure(&self, kind: ErrorKind, what: &str) -> Error {
        Error::new(kind, format!("the disk of {}: {what}", self.node))
    }
}

/// Whether a manifest is of an object that the store does not have yet.
fn is_live(manifest: &Manifest) -> bool {
    matches!(format!("{:?}", manifest.phase).as_str(), "Waiting" | "Removing")
}

struct DiskHandle {
    disk: Arc<MemDisk>,
    process: u64,
}

impl DiskHandle {
    fn wait(&self) {
        let time = {
            let mut state = self.disk.state.lock();
            let most = state.faults.slow_ms.max(2) as usize;
            state.dice.below(most) as u64
        };
        std::thread::sleep(Duration::from_millis(time));
    }

    /// One call, which is executed at a moment of its time.
    fn run<T>(&self, is_change: bool, work: impl FnOnce(&mut DiskState) -> Result<T>) -> Result<T> {
        self.wait();
        let done = {
            let mut state = self.disk.state.lock();
            let failing = state.faults.failing as usize;
            if state.process != self.process {
                Err(self.disk.failure(ErrorKind::Io(5), "the process has ended"))
            } else if state.dice.below(1000) < failing {
                Err(self.disk.failure(ErrorKind::Io(5), "input/output error"))
            } else if is_change && state.faults.is_full {
                Err(self.disk.failure(ErrorKind::NoSpace, "no space left"))
            } else {
                work(&mut state)
            }
        };
        self.wait();
        done
    }

    fn part(&self, state: &DiskState, name: &str) -> Result<Arc<Vec<u8>>> {
        let found = state.parts.get(name).map(|part| Arc::clone(&part.bytes));
        found.ok_or_else(|| self.disk.failure(ErrorKind::NotFound, &format!("no part {name}")))
    }
}

struct ArrivingPart {
    handle: DiskHandle,
    name: String,
    bytes: Vec<u8>,
}

impl PartWriter for ArrivingPart {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.handle.run(true, |_| Ok(()))?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let ArrivingPart { handle, name, bytes } = *self;
        let made = Instant::now();
        handle.run(true, |state| {
            state.flipped.remove(&name);
            state.parts.insert(name, MemPart { bytes: Arc::new(bytes), made });
            Ok(())
        })
    }
}

impl StageDisk for DiskHandle {
    fn begin_part(&self, name: &str) -> Result<Box<dyn PartWriter>> {
        self.run(true, |_| Ok(()))?;
        let handle = DiskHandle { disk: Arc::clone(&self.disk), process: self.process };
        Ok(Box::new(ArrivingPart { handle, name: name.to_owned(), bytes: Vec::new() }))
    }

    fn read_part(&self, name: &str, from: u64, out: &mut [u8]) -> Result<()> {
        self.run(false, |state| {
            let bytes = self.part(state, name)?;
            if state.flipped.contains(name) {
                return Err(self.disk.failure(ErrorKind::Corrupt, &format!("part {name} is damaged")));
            }
            let found = bytes.get(from as usize..from as usize + out.len());
            let found = found.ok_or_else(|| self.disk.failure(ErrorKind::Invalid, "bytes behind the end"))?;
            out.copy_from_slice(found);
            Ok(())
        })
    }

    fn part_len(&self, name: &str) -> Result<u64> {
        self.run(false, |state| Ok(self.part(state, name)?.len() as u64))
    }

    fn link_parts(&self, names: &[(String, String)]) -> Result<()> {
        let made = Instant::now();
        self.run(true, |state| {
            for (old, new) in names {
                let bytes = self.part(state, old)?;
                if state.flipped.contains(old) {
                    state.flipped.insert(new.clone());
                }
                state.parts.insert(new.clone(), MemPart { bytes, made });
            }
            Ok(())
        })
    }

    fn remove_part(&self, name: &str) -> Result<()> {
        self.run(false, |state| {
            state.parts.remove(name);
            // A copy that comes late is one of an upload that never ends.
            state.named.remove(name);
            Ok(())
        })
    }

    fn parts(&self) -> Result<Vec<KeptPart>> {
        let now = Instant::now();
        self.run(false, |state| {
            let parts = state.parts.iter().map(|(name, part)| {
                let age = now.saturating_duration_since(part.made);
                KeptPart { name: name.clone(), len: part.bytes.len() as u64, age }
            });
            Ok(parts.collect())
        })
    }

    fn change_records(&self, changes: Vec<RecordChange>) -> Result<()> {
        let is_growing = changes.iter().any(|change| matches!(change, RecordChange::Put(_, Some(_))));
        self.run(is_growing, |state| {
            for change in changes {
                match change {
                    RecordChange::Term(term) => state.term = term,
                    RecordChange::Remove(mark) => drop(state.records.remove(&mark)),
                    RecordChange::Put(manifest, bytes) => {
                        let parts = manifest.parts_at(&self.disk.node).map(|slice| slice.part.clone());
                        let parts: Vec<String> = parts.collect();
                        match format!("{:?}", manifest.phase).as_str() {
                            "Done" => state.named.extend(parts),
                            // These stay for a while: the object may be sent again.
                            "Withdrawn" => state.withdrawn.extend(parts),
                            _ => {}
                        }
                        let before = state.records.remove(&manifest.record).map(|(_, bytes)| bytes);
                        let bytes = bytes.or(before).unwrap_or_default();
                        state.records.insert(manifest.record.clone(), (*manifest, bytes));
                    }
                }
            }
            Ok(())
        })
    }

    fn manifests(&self) -> Result<Vec<(Manifest, u64)>> {
        self.run(false, |state| {
            Ok(state.records.values().map(|(manifest, bytes)| (manifest.clone(), bytes.len() as u64)).collect())
        })
    }

    fn read_inline(&self, mark: &str) -> Result<Vec<u8>> {
        self.run(false, |state| {
            let found = state.records.get(mark).map(|(_, bytes)| bytes.clone());
            found.ok_or_else(|| self.disk.failure(ErrorKind::NotFound, "no such record"))
        })
    }

    fn note_loss(&self) -> Result<()> {
        self.run(true, |state| {
            state.identity += 1;
            Ok(())
        })
    }

    fn identity(&self) -> Result<u64> {
        self.run(false, |state| Ok(state.identity))
    }

    fn term(&self) -> Result<u64> {
        self.run(false, |state| Ok(state.term))
    }
}
