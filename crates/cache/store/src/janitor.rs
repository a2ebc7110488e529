//! The background thread of one disk: evicts before writers have to, finishes what readers began, tries a failed disk,
//! rewrites the log, removes files no index entry names. Nobody waits for it, so it may block on the disk.

use crate::disk::{Disk, Work, footprint};
use crate::evict::may_go_well;
use crate::files::FileKey;
use crate::index::{LEAVING, MAIN, PARTS, WHOLE};
use crate::io::Target;
use crate::journal::Journal;
use crate::scratch;
use crate::store::Core;
use crate::{layout, log};
use std::collections::HashSet;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often the thread looks around when nothing wakes it.
const TICK: Duration = Duration::from_secs(1);
/// Records of garbage a log may have whatever its size.
const GARBAGE: u64 = 4096;
/// After a rewrite of the log that failed, none is tried for this long: it writes as much as the log is to have.
const REWRITE_AGAIN: Duration = Duration::from_secs(60);
/// The capacity is shared out again this often: others come and go on the file systems.
const SHARE_AGAIN: Duration = Duration::from_secs(60);
/// Where the file system refused more than it had, it is asked for more after so many times the interval of probes.
const TRY_REFUSED: u32 = 60;
/// Blocks that are taken off together when their time is up.
const EXPIRE_AT_ONCE: usize = 1024;
/// Space a file may take beyond its blocks before the sweep looks for holes to punch: file system metadata.
const SLACK: u64 = 256 << 10;

/// Runs until the store closes.
pub fn run(core: &Arc<Core>, disk: &Arc<Disk>) {
    let mut sweep = Sweep::default();
    let mut later = HashSet::new();
    let mut last_probe = Instant::now();
    let mut rewrite_from = Instant::now();
    let mut share_from = Instant::now();
    let mut refused_until = None;
    let tick = TICK.min(core.config.probe_interval);
    while !core.closing.load(Ordering::Acquire) {
        disk.io.late();
        if disk.health.usable() {
            // Before anything is written there: it may be another process's by now.
            if let Some(why) = disk.held.lost(&disk.root) {
                disk.put_out(why);
                continue;
            }
            disk.work.lock().extend(later.drain());
            while let Some(work) = next(disk) {
                act(core, disk, work, &mut later);
            }
            disk.refresh_space();
            let none = disk.limit.load(Ordering::Relaxed) < u64::from(core.config.block_size);
            if none || Instant::now() >= share_from {
                core.share_again();
                share_from = Instant::now() + SHARE_AGAIN;
            }
            try_refused(core, disk, &mut refused_until);
            make_room(core, disk);
            expire(core);
            if Instant::now() >= rewrite_from && !rewrite_log(core, disk) {
                rewrite_from = Instant::now() + REWRITE_AGAIN;
            }
            let swept = sweep.done();
            sweep.step(core, disk, &mut later);
            if sweep.done() && !swept {
                // What no entry named has left its room.
                share_from = Instant::now();
            }
        } else if last_probe.elapsed() >= core.config.probe_interval {
            last_probe = Instant::now();
            let result = probe(core, disk).map_err(|e| format!("the probe failed: {e}"));
            if let Some(state) = disk.health.probed(Instant::now(), result) {
                disk.entered(state);
            }
        }
        core.count_states();
        let mut work = disk.work.lock();
        let idle = work.is_empty() || !disk.health.usable();
        if idle && !core.closing.load(Ordering::Acquire) && (sweep.done() || !disk.health.usable()) {
            disk.wake.wait_for(&mut work, tick);
        }
    }
}

/// What is to be done next, if the disk is in use: else it waits until it is again.
fn next(disk: &Disk) -> Option<Work> {
    disk.work.lock().pop_front_if(|_| disk.health.usable())
}

/// Does what is asked for; what can't be done now comes to `later`.
fn act(core: &Core, disk: &Disk, work: Work, later: &mut HashSet<Work>) {
    let done = match work {
        Work::Discard(block) => {
            core.discard(disk, &block);
            true
        }
        Work::Forget(block, whole) => {
            let mut record = Vec::with_capacity(32);
            log::push_remove(&mut record, &block);
            // It may have come back to this very disk meanwhile. A writer enters a block in the index before the log, so
            // one that is not there at this append's turn has its record behind this one.
            let here = || core.index.shard(&block.object).read().get(&block).is_some_and(|e| e.disk == disk.number);
            let logged = disk.append_with(record, |_| u64::from(!here()));
            let broken = logged.is_err_and(|error| core.write_failed(disk, "writing to the index log", &error));
            if !broken && !core.reclaim(disk, &block, whole) {
                later.insert(Work::Reclaim(block, whole));
            }
            !broken
        }
        Work::Reclaim(block, whole) => core.reclaim(disk, &block, whole),
        Work::Tidy(key) => core.try_tidy(disk, &key),
    };
    if !done {
        later.insert(work);
    }
}

/// Forgets after a while that the file system refused more: others may have left their part of a quota.
fn try_refused(core: &Core, disk: &Disk, until: &mut Option<Instant>) {
    let now = Instant::now();
    if disk.refused.load(Ordering::Relaxed) == u64::MAX {
        *until = None;
    } else if now >= *until.get_or_insert(now + core.config.probe_interval * TRY_REFUSED) {
        disk.refused.store(u64::MAX, Ordering::Relaxed);
        disk.in_vain.store(false, Ordering::Relaxed);
    }
}

fn make_room(core: &Core, disk: &Arc<Disk>) {
    while !core.closing.load(Ordering::Acquire)
        && disk.health.usable()
        // Of a file system that has not answered yet nothing is known.
        && disk.total.load(Ordering::Relaxed) > 0
        && (core.above_watermark(disk) > 0 || disk.overfull(core.config.free_space_ratio, 0) > 0)
        && disk.blocks.load(Ordering::Relaxed) > 0
    {
        if !core.evict_one(disk) {
            break;
        }
    }
}

/// Has blocks go whose class says so, whichever disk they are on.
fn expire(core: &Core) {
    while !core.closing.load(Ordering::Acquire) {
        let gone = core.expire_due(EXPIRE_AT_ONCE);
        if gone.is_empty() {
            return;
        }
        if let Some(expired) = core.expired.get() {
            gone.iter().for_each(expired);
        }
    }
}

/// Writes a file, reads it back and compares.
fn probe(core: &Core, disk: &Disk) -> io::Result<()> {
    let late = disk.io.late();
    if late > 0 {
        return Err(io::Error::other(format!("{late} operations have not ended yet")));
    }
    if disk.turns.stalled() >= core.config.write_timeout {
        return Err(io::Error::other("what is being written to it has not ended yet"));
    }
    if let Some(why) = disk.held.lost(&disk.root) {
        return Err(io::Error::other(why));
    }
    let file = disk.io.open(&disk.root.join("probe"), true, core.config.write_timeout)?;
    scratch::with(|scratch| {
        let stamp = std::process::id() as u8 ^ Instant::now().elapsed().subsec_nanos() as u8 | 1;
        scratch.bytes()[..4096].fill(stamp);
        disk.io.write(&file, 0, &scratch.bytes()[..4096], core.config.write_timeout)?;
        scratch.bytes()[..4096].fill(0);
        let (bounce, _) = scratch.bounce();
        let ptr = crate::io::IoBuf::parts(bounce).0;
        let mut keep = || crate::io::IoBuf::keep(bounce);
        let mut target = Target { ptr, len: 4096, keep: &mut keep };
        let n = disk.io.read(&file, 0, &mut target, core.config.read_timeout, &mut |_| {})?;
        if n < 4096 || scratch.bytes()[..4096].iter().any(|b| *b != stamp) {
            return Err(io::Error::other("it read back other bytes than were written"));
        }
        Ok(())
    })
}

/// Rewrites the log when more of it is garbage than not; false when that failed.
fn rewrite_log(core: &Core, disk: &Disk) -> bool {
    // Those of a class have two records.
    let live = disk.blocks.load(Ordering::Relaxed) + core.classes.count();
    {
        let mut journal = disk.journal.lock();
        if journal.records < live * 2 + GARBAGE {
            return true;
        }
        journal.begin_rewrite();
    }
    let rewrite = || -> io::Result<()> {
        let file = Journal::new_file(&disk.root)?;
        let mut len = 0u64;
        let mut records = 0;
        let mut pending = log::header(core.config.block_size).to_vec();
        // The disk is waited for when no part of the index is held: readers need it.
        for part in 0..PARTS {
            core.index.for_each_of(part, |block, entry| {
                if entry.disk == disk.number && entry.flags & LEAVING == 0 {
                    log::push_put(&mut pending, &block, entry.len, entry.flags & (WHOLE | MAIN), &entry.crcs);
                    records += 1 + core.push_class(&mut pending, &block);
                }
            });
            file.write_all_at(&pending, len)?;
            len += pending.len() as u64;
            pending.clear();
        }
        // Most of it is on disk before writers have to wait for the rest.
        file.sync_data()?;
        // Its name may be another process's by now.
        if let Some(why) = disk.held.lost(&disk.root) {
            return Err(io::Error::other(why));
        }
        disk.journal.lock().finish_rewrite(file, len, records)
    };
    let result = rewrite();
    if let Err(error) = &result {
        disk.journal.lock().abandon_rewrite();
        core.write_failed(disk, "rewriting the index log", error);
    }
    result.is_ok()
}

/// A pass over the data folders after the start, one folder at a step.
#[derive(Default)]
struct Sweep {
    folder: u32,
    /// The folder is looked at for the second time: the disk went out of use the first time.
    again: bool,
    /// Files that were written to or held open then.
    passed: Vec<FileKey>,
}

impl Sweep {
    fn done(&self) -> bool {
        self.folder >= 256
    }

    /// Looks at one folder, or at the files that were passed by when all folders were looked at: removes files no entry
    /// names, and punches blocks no entry names.
    fn step(&mut self, core: &Core, disk: &Disk, later: &mut HashSet<Work>) {
        if self.done() {
            self.passed.retain(|key| !disk.health.usable() || !tidy(core, disk, key));
            return;
        }
        // What puts the disk out of use may lie in this very folder: it is tried once more, and not for ever.
        let all = self.look_at_folder(core, disk, later);
        self.again = !all && !self.again;
        self.folder += u32::from(!self.again);
    }

    /// Whether it came to the folder's end.
    fn look_at_folder(&mut self, core: &Core, disk: &Disk, later: &mut HashSet<Work>) -> bool {
        let folder = disk.root.join(format!("data/{:02x}", self.folder));
        let Ok(list) = std::fs::read_dir(&folder) else { return true };
        for file in list.flatten() {
            if core.closing.load(Ordering::Acquire) || !disk.health.usable() {
                return false;
            }
            if let Some(key) = file.file_name().to_str().and_then(layout::parse_name) {
                // Work that readers wait for goes first.
                while let Some(work) = next(disk) {
                    act(core, disk, work, later);
                }
                if !tidy(core, disk, &key) {
                    self.passed.push(key);
                }
            }
        }
        disk.health.usable()
    }
}

/// Gives back what no entry names of a file; false when that has to be tried again: it is written to or held open, or it failed
/// without a fault of the disk.
fn tidy(core: &Core, disk: &Disk, key: &FileKey) -> bool {
    let mut expected = 0;
    let mut here = Vec::new();
    let mut shard = core.index.shard(&key.object).write();
    let activity = shard.activity(&key.object);
    if activity.writers > 0 || activity.unlinking > 0 || activity.pins > 0 {
        return false;
    }
    shard.within(&key.object, core.indexes(key), |i, entry| {
        if entry.disk == disk.number && core.file_key(key.object, i, entry.flags & WHOLE != 0) == *key {
            expected += footprint(entry.len);
            here.push(i);
        }
        true
    });
    if here.is_empty() {
        drop(shard);
        core.tidy_file(disk, key);
        return true;
    }
    // While this is noted nobody writes to the file.
    shard.act(&key.object, |a| a.unlinking += 1);
    drop(shard);
    let mut done = true;
    if let Ok(metadata) = std::fs::metadata(layout::data_path(&disk.root, key))
        && metadata.blocks() * 512 > expected + SLACK
    {
        let size = u64::from(core.config.block_size);
        let last = metadata.len().div_ceil(size).min(u64::from(u32::MAX)) as u32;
        here.sort_unstable();
        for index in (0..last).filter(|i| here.binary_search(i).is_err()) {
            if let Err(error) = core.punch(disk, key, index, core.config.block_size) {
                core.write_failed(disk, "giving space back", &error);
                done = !may_go_well(&error);
                break;
            }
        }
    }
    core.index.shard(&key.object).write().act(&key.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capacity, Store, StoreConfig};
    use spurline_types::{ObjectRef, Version};

    #[test]
    fn a_file_that_is_held_open_is_swept_once_it_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let block = 256 << 10;
        let config = StoreConfig {
            block_size: block,
            free_space_ratio: 0.0,
            ..StoreConfig::new(vec![dir.path().into()], Capacity::Bytes(64 << 20))
        };
        let store = Store::open(config, Arc::default()).unwrap();
        let obj = ObjectRef::new("test:", b"a", Version::new("1"), u64::from(block));
        assert!(store.put(&obj, 0, &vec![7; block as usize]).unwrap());
        let held = store.whole_file(&obj).unwrap();
        let (key, disk) = (FileKey { object: obj.id, tag: 0 }, &store.disks[0]);
        // Behind its block, what no entry names.
        let file = std::fs::OpenOptions::new().write(true).open(layout::data_path(&disk.root, &key)).unwrap();
        file.write_all_at(&vec![7; 4 * block as usize], u64::from(block)).unwrap();
        file.sync_all().unwrap();
        let (mut sweep, mut later) = (Sweep::default(), HashSet::new());
        while !sweep.done() {
            sweep.step(&store, disk, &mut later);
        }
        assert_eq!(sweep.passed, [key]);
        sweep.step(&store, disk, &mut later);
        assert_eq!(sweep.passed, [key]);
        drop(held);
        // The disk's own thread may be at it.
        let deadline = Instant::now() + Duration::from_secs(30);
        while !sweep.passed.is_empty() {
            assert!(Instant::now() < deadline, "it is passed by for ever");
            sweep.step(&store, disk, &mut later);
        }
        while file.metadata().unwrap().blocks() * 512 > u64::from(block) + SLACK {
            assert!(Instant::now() < deadline, "its space does not come back");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
