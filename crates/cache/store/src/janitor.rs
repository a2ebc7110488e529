//! The background thread of a disk: evicts ahead of writers, finishes removals, probes a failed disk, rewrites the log, removes
//! files that no index entry names. No request waits for the thread, which may block on the disk.

use crate::disk::{CacheDisk, DiskWork, disk_footprint};
use crate::evict::is_transient;
use crate::files::FileKey;
use crate::index::{PARTS, WHOLE};
use crate::io::ReadTarget;
use crate::journal::IndexJournal;
use crate::scratch;
use crate::store::StoreCore;
use crate::{layout, log};
use std::collections::HashSet;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often the thread runs without being woken.
const JANITOR_INTERVAL: Duration = Duration::from_secs(1);
/// Garbage records that a log of any size may have.
const GARBAGE_RECORDS: u64 = 4096;
/// Pause after a failed rewrite of the log, which writes as much as the new log holds.
const REWRITE_RETRY: Duration = Duration::from_secs(60);
/// Interval of redistributing the capacity: other users of the file systems come and go.
const REDISTRIBUTE_INTERVAL: Duration = Duration::from_secs(60);
/// After a refusal, the file system is tried again after this many probe intervals.
const REFUSAL_PROBES: u32 = 60;
/// Blocks expired per batch.
const EXPIRE_BATCH: usize = 1024;
/// Space that a file may take beyond the blocks before the sweep punches holes: file system metadata.
const METADATA_SLACK: u64 = 256 << 10;

/// Runs until the store closes.
pub fn run_janitor(core: &Arc<StoreCore>, disk: &Arc<CacheDisk>) {
    let mut sweep = DiskSweep::default();
    let mut later = HashSet::new();
    let mut last_probe = Instant::now();
    let mut rewrite_from = Instant::now();
    let mut share_from = Instant::now();
    let mut refused_until = None;
    let tick = JANITOR_INTERVAL.min(core.config.probe_interval);
    while !core.closing.load(Ordering::Acquire) {
        disk.io.late_count();
        if disk.health.usable() {
            // Before any write there: the directory may belong to another process by now.
            if let Some(why) = disk.root_lock.lost_reason(&disk.root) {
                disk.mark_unusable(why);
                continue;
            }
            disk.work.lock().extend(later.drain());
            while let Some(work) = next_work(disk) {
                perform_work(core, disk, work, &mut later);
            }
            disk.refresh_space();
            let none = disk.limit.load(Ordering::Relaxed) < u64::from(core.config.block_size);
            if none || Instant::now() >= share_from {
                core.redistribute();
                share_from = Instant::now() + REDISTRIBUTE_INTERVAL;
            }
            retry_refused(core, disk, &mut refused_until);
            make_room(core, disk);
            expire_blocks(core);
            if Instant::now() >= rewrite_from && !rewrite_log(core, disk) {
                rewrite_from = Instant::now() + REWRITE_RETRY;
            }
            let swept = sweep.is_done();
            sweep.step(core, disk, &mut later);
            if sweep.is_done() && !swept {
                // The sweep freed the space of unnamed files.
                share_from = Instant::now();
            }
        } else if last_probe.elapsed() >= core.config.probe_interval {
            last_probe = Instant::now();
            let result = probe_disk(core, disk).map_err(|e| format!("the probe failed: {e}"));
            if let Some(state) = disk.health.probe_finished(Instant::now(), result) {
                disk.log_state_change(state);
            }
        }
        core.count_states();
        let mut work = disk.work.lock();
        let idle = work.is_empty() || !disk.health.usable();
        if idle && !core.closing.load(Ordering::Acquire) && (sweep.is_done() || !disk.health.usable()) {
            disk.wake.wait_for(&mut work, tick);
        }
    }
}

/// The next task, if the disk is usable; tasks wait for a usable disk.
fn next_work(disk: &CacheDisk) -> Option<DiskWork> {
    disk.work.lock().pop_front_if(|_| disk.health.usable())
}

/// Performs a task; a task that can't be done now goes to `later`.
fn perform_work(core: &StoreCore, disk: &CacheDisk, work: DiskWork, later: &mut HashSet<DiskWork>) {
    let done = match work {
        DiskWork::Discard(block) => {
            core.discard_block(disk, &block);
            true
        }
        DiskWork::Forget(block, whole) => {
            let mut record = Vec::with_capacity(32);
            log::push_remove(&mut record, &block);
            // The block may have returned to this disk meanwhile. A writer enters a block in the index before the log, so the
            // record of a block that is absent under the log's lock follows this record.
            let logged = disk.append_log_with(record, |_| {
                u64::from(core.index.shard_of(&block.object).read().get(&block).is_none_or(|e| e.disk != disk.number))
            });
            let broken = logged.is_err_and(|error| core.write_failed(disk, "writing to the index log", &error));
            if !broken && !core.reclaim_space(disk, &block, whole) {
                later.insert(DiskWork::Reclaim(block, whole));
            }
            !broken
        }
        DiskWork::Reclaim(block, whole) => core.reclaim_space(disk, &block, whole),
        DiskWork::RemoveEmpty(key) => core.try_remove_empty(disk, &key),
    };
    if !done {
        later.insert(work);
    }
}

/// Forgets a refusal after a while: others may have freed their part of a quota.
fn retry_refused(core: &StoreCore, disk: &CacheDisk, until: &mut Option<Instant>) {
    let now = Instant::now();
    if disk.refused_above.load(Ordering::Relaxed) == u64::MAX {
        *until = None;
    } else if now >= *until.get_or_insert(now + core.config.probe_interval * REFUSAL_PROBES) {
        disk.refused_above.store(u64::MAX, Ordering::Relaxed);
        disk.eviction_futile.store(false, Ordering::Relaxed);
    }
}

fn make_room(core: &StoreCore, disk: &Arc<CacheDisk>) {
    while !core.closing.load(Ordering::Acquire)
        && disk.health.usable()
        // The space of a file system that has not answered yet is unknown.
        && disk.total.load(Ordering::Relaxed) > 0
        && (core.above_watermark(disk) > 0
            || disk.overfull_bytes(core.config.free_space_ratio, 0) > 0
            || core.is_index_full(disk))
        && disk.blocks.load(Ordering::Relaxed) > 0
    {
        if !core.evict_one(disk) {
            break;
        }
    }
}

/// Expires blocks on all disks by the rules of the classes.
fn expire_blocks(core: &StoreCore) {
    while !core.closing.load(Ordering::Acquire) {
        let gone = core.expire_due(EXPIRE_BATCH);
        if gone.is_empty() {
            return;
        }
        if let Some(expired) = core.expired.get() {
            gone.iter().for_each(expired);
        }
    }
}

/// Writes a file, reads back and compares.
fn probe_disk(core: &StoreCore, disk: &CacheDisk) -> io::Result<()> {
    let late = disk.io.late_count();
    if late > 0 {
        return Err(io::Error::other(format!("{late} operations have not ended yet")));
    }
    if disk.write_permits.stalled_for() >= core.config.write_timeout {
        return Err(io::Error::other("writes to it have not ended yet"));
    }
    if let Some(why) = disk.root_lock.lost_reason(&disk.root) {
        return Err(io::Error::other(why));
    }
    let file = disk.io.open(&disk.root.join("probe"), true, core.config.write_timeout)?;
    scratch::with_scratch(|scratch| {
        let stamp = std::process::id() as u8 ^ Instant::now().elapsed().subsec_nanos() as u8 | 1;
        scratch.bounce_bytes()[..4096].fill(stamp);
        disk.io.write(&file, 0, &scratch.bounce_bytes()[..4096], core.config.write_timeout)?;
        scratch.bounce_bytes()[..4096].fill(0);
        let (bounce, _) = scratch.bounce();
        let ptr = crate::io::IoBuf::raw_parts(bounce).0;
        let mut keep = || crate::io::IoBuf::keep_alive(bounce);
        let mut target = ReadTarget { ptr, len: 4096, keep: &mut keep };
        let n = disk.io.read(&file, 0, &mut target, core.config.read_timeout, &mut |_| {})?;
        if n < 4096 || scratch.bounce_bytes()[..4096].iter().any(|b| *b != stamp) {
            return Err(io::Error::other("the bytes read back differ from those written"));
        }
        Ok(())
    })
}

/// Rewrites the log when more than half is garbage; false when that failed.
fn rewrite_log(core: &StoreCore, disk: &CacheDisk) -> bool {
    // A classified block has two records.
    let live = disk.blocks.load(Ordering::Relaxed) + core.classes.block_count();
    {
        let mut journal = disk.journal.lock();
        if journal.records < live * 2 + GARBAGE_RECORDS {
            return true;
        }
        journal.begin_rewrite();
    }
    let result = write_new_log(core, disk);
    if let Err(error) = &result {
        disk.journal.lock().abandon_rewrite();
        core.write_failed(disk, "rewriting the index log", error);
    }
    result.is_ok()
}

fn write_new_log(core: &StoreCore, disk: &CacheDisk) -> io::Result<()> {
    let file = IndexJournal::new_file(&disk.root)?;
    let mut len = 0u64;
    let mut records = 0;
    let mut pending = log::encode_header(core.config.block_size).to_vec();
    // No shard is locked while the disk is written to: readers need the shards.
    for part in 0..PARTS {
        core.index.for_each_in_part(part, |block, entry| {
            if entry.disk == disk.number && entry.is_readable() {
                log::push_put(&mut pending, &block, entry.len, entry.flags, &entry.crcs);
                records += 1 + core.push_class(&mut pending, &block);
            }
        });
        file.write_all_at(&pending, len)?;
        len += pending.len() as u64;
        pending.clear();
    }
    // Most is synced before writers have to wait for the rest.
    file.sync_data()?;
    // The directory may belong to another process by now.
    if let Some(why) = disk.root_lock.lost_reason(&disk.root) {
        return Err(io::Error::other(why));
    }
    disk.journal.lock().finish_rewrite(file, len, records)
}

/// A pass over the data folders after start, a folder in each step.
#[derive(Default)]
struct DiskSweep {
    folder: u32,
    /// The folder is being swept again: the disk became unusable the first time.
    second_try: bool,
    /// Files that were being written or held open.
    postponed: Vec<FileKey>,
}

impl DiskSweep {
    fn is_done(&self) -> bool {
        self.folder >= 256
    }

    /// Sweeps a folder, or after all folders the postponed files: removes files and punches blocks that no entry names.
    fn step(&mut self, core: &StoreCore, disk: &CacheDisk, later: &mut HashSet<DiskWork>) {
        if self.is_done() {
            self.postponed.retain(|key| !disk.health.usable() || !sweep_file(core, disk, key));
            return;
        }
        // The cause of the disk's failure may lie in this folder: the sweep is retried once, not for ever.
        let all = self.sweep_folder(core, disk, later);
        self.second_try = !all && !self.second_try;
        self.folder += u32::from(!self.second_try);
    }

    /// Returns whether the folder's end was reached.
    fn sweep_folder(&mut self, core: &StoreCore, disk: &CacheDisk, later: &mut HashSet<DiskWork>) -> bool {
        let folder = disk.root.join(format!("data/{:02x}", self.folder));
        let Ok(list) = std::fs::read_dir(&folder) else { return true };
        for file in list.flatten() {
            if core.closing.load(Ordering::Acquire) || !disk.health.usable() {
                return false;
            }
            if let Some(key) = file.file_name().to_str().and_then(layout::parse_name) {
                // Tasks that readers depend on go first.
                while let Some(work) = next_work(disk) {
                    perform_work(core, disk, work, later);
                }
                if !sweep_file(core, disk, &key) {
                    self.postponed.push(key);
                }
            }
        }
        disk.health.usable()
    }
}

/// Frees space of a file that no entry names. False when that must be retried: the file is being written or held
/// open, or an operation failed without a fault of the disk.
fn sweep_file(core: &StoreCore, disk: &CacheDisk, key: &FileKey) -> bool {
    let mut expected = 0;
    let mut here = Vec::new();
    let mut shard = core.index.shard_of(&key.object).write();
    let activity = shard.activity(&key.object);
    if activity.writers > 0 || activity.unlinking > 0 || activity.pins > 0 {
        return false;
    }
    shard.blocks_within(&key.object, core.index_range(key), |i, entry| {
        if entry.disk == disk.number && core.file_key(key.object, i, entry.flags & WHOLE != 0) == *key {
            expected += disk_footprint(entry.len, entry.flags);
            here.push(i);
        }
        true
    });
    if here.is_empty() {
        drop(shard);
        core.remove_file_if_empty(disk, key);
        return true;
    }
    // This mark prevents writes to the file.
    shard.update_activity(&key.object, |a| a.unlinking += 1);
    drop(shard);
    let mut done = true;
    if let Ok(metadata) = std::fs::metadata(layout::data_path(&disk.root, key))
        && metadata.blocks() * 512 > expected + METADATA_SLACK
    {
        let size = u64::from(core.config.block_size);
        let last = metadata.len().div_ceil(size).min(u64::from(u32::MAX)) as u32;
        here.sort_unstable();
        for index in (0..last).filter(|i| here.binary_search(i).is_err()) {
            if let Err(error) = core.punch_block(disk, key, index, core.config.block_size) {
                core.write_failed(disk, "giving space back", &error);
                done = !is_transient(&error);
                break;
            }
        }
    }
    core.index
        .shard_of(&key.object)
        .write()
        .update_activity(&key.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheCapacity, Store, StoreConfig};
    use spurline_types::{ObjectRef, Version};

    #[test]
    fn a_file_that_is_held_open_is_swept_once_it_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let block = 256 << 10;
        let config = StoreConfig {
            block_size: block,
            free_space_ratio: 0.0,
            ..StoreConfig::new(vec![dir.path().into()], CacheCapacity::Bytes(64 << 20))
        };
        let store = Store::open(config, Arc::default()).unwrap();
        let obj = ObjectRef::new("test:", b"a", Version::new("1"), u64::from(block));
        assert!(store.put(&obj, 0, &vec![7; block as usize]).unwrap());
        let held = store.whole_file(&obj).unwrap();
        let (key, disk) = (FileKey { object: obj.id, tag: 0 }, &store.disks[0]);
        // Bytes behind the block that no entry names.
        let file = std::fs::OpenOptions::new().write(true).open(layout::data_path(&disk.root, &key)).unwrap();
        file.write_all_at(&vec![7; 4 * block as usize], u64::from(block)).unwrap();
        file.sync_all().unwrap();
        let (mut sweep, mut later) = (DiskSweep::default(), HashSet::new());
        while !sweep.is_done() {
            sweep.step(&store, disk, &mut later);
        }
        assert_eq!(sweep.postponed, [key]);
        sweep.step(&store, disk, &mut later);
        assert_eq!(sweep.postponed, [key]);
        drop(held);
        // The disk's own thread may be at this file.
        let deadline = Instant::now() + Duration::from_secs(30);
        while !sweep.postponed.is_empty() {
            assert!(Instant::now() < deadline, "it is passed by for ever");
            sweep.step(&store, disk, &mut later);
        }
        while file.metadata().unwrap().blocks() * 512 > u64::from(block) + METADATA_SLACK {
            assert!(Instant::now() < deadline, "its space does not come back");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
