//! Writes blocks: chooses a disk, makes room, and orders data, index and log so that a crash neither loses nor tears
//! an acknowledged block.

use crate::classes::{BlockClass, ClassAdmission, PINNED_PERCENT, UNCLASSIFIED};
use crate::crc;
use crate::disk::{CacheDisk, DiskWork, disk_footprint};
use crate::files::FileKey;
use crate::index::{BlockEntry, HOLE, IndexShard, MAIN, WHOLE};
use crate::io::{ALIGN, DataFile, is_full, is_process_error};
use crate::log;
use crate::scratch::{self, SCRATCH_BYTES};
use crate::store::{EXTENT_BYTES, StoreCore};
use crate::write_permits::WritePermit;
use spurline_types::{BlockId, Error, ErrorKind, ObjectRef, Result};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Maximum evictions for a block, before the writer skips the block.
const MAX_EVICTIONS: usize = 64;

/// The result of storing a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The block is on disk.
    Stored,
    /// Not now: the block is being written or removed, the file is handed out, or nothing on the disk can be evicted. A later
    /// attempt can succeed.
    Busy,
    /// Not stored: other blocks of the class, as new as this block, fill the quota.
    Skipped,
    /// The block is longer than the class's whole quota.
    TooLong,
    /// No disk has room, or no disk is usable.
    NoRoom,
}

impl StoreCore {
    /// Stores a block. True when the block is on disk now; false when it was skipped because no disk had room or was usable, or
    /// because the block is being written or removed. `data` that is not aligned to 4096 is copied. Takes as long as the disk
    /// takes, at most about the write timeout. When no write to the disk has ended for as long as the read timeout, the block is
    /// skipped.
    ///
    /// # Errors
    /// `Invalid` when `data` has not the block's length. A failing disk is no error.
    pub fn put(&self, obj: &ObjectRef, index: u32, data: &[u8]) -> Result<bool> {
        self.put_classed(obj, index, data, UNCLASSIFIED).map(|kept| kept == PutOutcome::Stored)
    }

    /// As [`StoreCore::put`] for a block of a class, with the detailed result.
    pub fn put_classed(&self, obj: &ObjectRef, index: u32, data: &[u8], class: u64) -> Result<PutOutcome> {
        let len = obj.block_len(index, u64::from(self.config.block_size));
        if data.len() != len || len == 0 {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("block {index} of {} is {len} bytes long, {} were given", obj.id, data.len()),
            ));
        }
        if self.disks.is_empty() {
            return Ok(PutOutcome::NoRoom);
        }
        let kept = self.store_block(obj, index, data, class);
        if kept != PutOutcome::Stored {
            self.stats.blockcache.write_skipped.add(1);
        }
        if kept == PutOutcome::Skipped {
            self.stats.blockcache.limited_blocks.add(1);
        }
        Ok(kept)
    }

    fn store_block(&self, obj: &ObjectRef, index: u32, data: &[u8], class: u64) -> PutOutcome {
        let block = BlockId { object: obj.id, index };
        let whole = self.disks.len() == 1 || obj.size <= EXTENT_BYTES;
        let key = self.file_key(obj.id, index, whole);
        let Some((disk, first)) = self.begin_block(&block, &key, whole) else {
            return if self.is_logged(&block) {
                PutOutcome::Stored
            } else if self.disks.iter().any(|disk| disk.health.usable() && disk.limit.load(Ordering::Relaxed) > 0) {
                PutOutcome::Busy
            } else {
                PutOutcome::NoRoom
            };
        };
        let flags = if whole { WHOLE } else { 0 } | if is_hole(data) { HOLE } else { 0 };
        let bytes = disk_footprint(data.len() as u32, flags);
        let kept = match self.admit_to_class(disk, block, class, bytes) {
            PutOutcome::Stored => match self.acquire_write(disk, bytes) {
                Some(_permit) => self.write_block(disk, &block, &key, flags, first, data),
                None => PutOutcome::Busy,
            },
            other => other,
        };
        self.end_block(disk, &block, &key, kept == PutOutcome::Stored);
        kept
    }

    /// Whether a usable disk has a block that outlives this process.
    fn is_logged(&self, block: &BlockId) -> bool {
        let shard = self.index.shard_of(&block.object).read();
        shard.get(block).is_some_and(|entry| self.is_served(entry) && !entry.state().is_being_written())
    }

    /// Ends the write of a block.
    pub(crate) fn end_block(&self, disk: &CacheDisk, block: &BlockId, key: &FileKey, is_stored: bool) {
        if is_stored {
            self.classes.mark_stored(block);
        } else {
            self.classes.forget_block(block);
        }
        let revoked = self.index.shard_of(&block.object).write().end_write(block);
        if revoked {
            // The removal must follow the block in the log.
            disk.enqueue(DiskWork::Discard(*block));
        } else if !is_stored {
            self.remove_file_if_empty(disk, key);
        }
    }

    /// Waits for a permit to write to a disk. `None` when the disk has stopped answering, which is detected here when
    /// none of the current writers has a deadline.
    fn acquire_write<'a>(&self, disk: &'a CacheDisk, bytes: u64) -> Option<WritePermit<'a>> {
        let turn = disk.write_permits.acquire(bytes, self.config.read_timeout);
        if turn.is_none() && disk.write_permits.stalled_for() >= self.config.write_timeout {
            disk.note_failure("writing a block", &io::ErrorKind::TimedOut.into());
        }
        turn.filter(|_| disk.health.usable())
    }

    /// Chooses the disk for a block and claims the right to write. Also returns whether the file is still empty. `None` when the
    /// block is present, is being written or removed, the file is handed out, or no disk is usable.
    fn begin_block(&self, block: &BlockId, key: &FileKey, whole: bool) -> Option<(&Arc<CacheDisk>, bool)> {
        let mut shard = self.index.shard_of(&block.object).write();
        if let Some(entry) = shard.get(block) {
            let old = &self.disks[usize::from(entry.disk)];
            if old.health.usable() || entry.state().is_being_written() || self.disks.iter().all(|d| !d.health.usable())
            {
                return None;
            }
            // The disk that holds or is to remove the block is not usable: the block goes to another disk, and the old disk
            // forgets the block once usable again.
            let whole = entry.flags & WHOLE != 0;
            let slot = entry.slot;
            let bytes = disk_footprint(entry.len, entry.flags);
            self.remove_entry(&mut shard, block);
            self.uncount_block(old, bytes);
            old.enqueue(DiskWork::Forget(*block, whole));
            drop(shard);
            old.policy.remove(slot);
            shard = self.index.shard_of(&block.object).write();
            if shard.get(block).is_some() {
                return None;
            }
        }
        if shard.activity(&block.object).unlinking > 0 {
            return None;
        }
        let mut home = None;
        shard.blocks_within(&block.object, self.index_range(key), |i, entry| {
            let same = (entry.flags & WHOLE != 0) == whole && self.file_key(block.object, i, whole) == *key;
            if same && self.disks[usize::from(entry.disk)].health.usable() {
                home = Some(entry.disk);
            }
            home.is_none()
        });
        let disk = match home {
            // The kernel reads the file directly: that would show unchecked bytes, and an end on a multiple of 4096.
            Some(_) if shard.activity(&block.object).whole > 0 => return None,
            Some(number) => &self.disks[usize::from(number)],
            None => self.choose_disk(key)?,
        };
        // The blocks are gone, but the file could not be removed.
        if shard.activity(&block.object).whole > 0 && crate::layout::data_path(&disk.root, key).exists() {
            return None;
        }
        shard.begin_write(block).then_some((disk, home.is_none()))
    }

    /// Weighted rendezvous hashing: each disk draws a number for the file, weighted by size; the best usable disk wins. A disk
    /// that comes or goes moves only the files that the disk wins or had.
    fn choose_disk(&self, key: &FileKey) -> Option<&Arc<CacheDisk>> {
        let mut best: Option<(&Arc<CacheDisk>, f64)> = None;
        for disk in self.disks.iter().filter(|d| d.health.usable()) {
            let mut seed = [0; 20];
            seed[..16].copy_from_slice(&key.object.0.to_le_bytes());
            seed[16..].copy_from_slice(&key.tag.to_le_bytes());
            let draw = xxhash_rust::xxh3::xxh3_64_with_seed(&seed, disk.root_lock.id);
            let uniform = ((draw >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            let score = disk.limit.load(Ordering::Relaxed) as f64 / -uniform.ln();
            if score > 0.0 && best.is_none_or(|(_, most)| score > most) {
                best = Some((disk, score));
            }
        }
        best.map(|(disk, _)| disk)
    }

    fn write_block(
        &self,
        disk: &Arc<CacheDisk>,
        block: &BlockId,
        key: &FileKey,
        flags: u8,
        first: bool,
        data: &[u8],
    ) -> PutOutcome {
        let began = Instant::now();
        let len = data.len() as u32;
        let whole = flags & WHOLE != 0;
        let bytes = disk_footprint(len, flags);
        let reserved = self.reserve_bytes(disk, bytes);
        if reserved != PutOutcome::Stored {
            return reserved;
        }
        let crcs = crc::checksums(data);
        let first = first || self.is_file_removed(disk, key);
        let offset = u64::from(block.index) * u64::from(self.config.block_size);
        let write = || {
            if flags & HOLE != 0 {
                disk.file_for_write(key, first).and_then(|file| self.write_hole(disk, &file, offset, data))
            } else if first && offset == 0 && data.len() <= SCRATCH_BYTES {
                self.create_small(disk, key, data)
            } else {
                disk.file_for_write(key, first).and_then(|file| self.write_data(disk, &file, offset, data))
            }
        };
        let mut written = write();
        let gave_way = written.as_ref().is_err_and(|error| self.evict_for_refusal(disk, "writing a block", len, error));
        if gave_way {
            written = write();
            disk.eviction_futile.store(written.as_ref().is_err_and(is_full), Ordering::Relaxed);
        }
        if let Err(error) = written {
            self.release_bytes(disk, bytes);
            self.write_failed(disk, "writing a block", &error);
            // A part of the block may be on disk.
            disk.enqueue(DiskWork::Reclaim(*block, whole));
            // Space of evicted blocks may become free only later.
            return if gave_way { PutOutcome::Busy } else { PutOutcome::NoRoom };
        }
        let kept = self.enter_block(disk, block, flags, len, crcs);
        if kept == PutOutcome::Stored {
            let stats = &self.stats.blockcache;
            stats.write_bytes.add(bytes.min(u64::from(len)));
            stats.write_us.add_us(began.elapsed());
        }
        kept
    }

    /// Enters a block, whose bytes are on disk and whose space is reserved, into the policy, the index and the log.
    pub(crate) fn enter_block(
        &self,
        disk: &Arc<CacheDisk>,
        block: &BlockId,
        flags: u8,
        len: u32,
        crcs: Box<[u32]>,
    ) -> PutOutcome {
        let bytes = disk_footprint(len, flags);
        let whole = flags & WHOLE != 0;
        let place = disk.policy.insert(*block, block_fingerprint(block), bytes as u32, self.policy_time());
        let Some((slot, main)) = place else {
            self.release_bytes(disk, bytes);
            disk.enqueue(DiskWork::Reclaim(*block, whole));
            return PutOutcome::NoRoom;
        };
        let flags = flags | if main { MAIN } else { 0 };
        let mut record = Vec::with_capacity(128 + crcs.len() * 4);
        log::push_put(&mut record, block, len, flags, &crcs);
        let entry = BlockEntry::new(crcs, len, flags, disk.number, slot, self.next_generation());
        // Into the index before the log: a rewrite of the log that begins in between finds the block in either.
        let entered = self.index.shard_of(&block.object).write().enter(*block, entry);
        debug_assert!(entered, "only the owner of the right to write a block enters it");
        disk.blocks.fetch_add(1, Ordering::Relaxed);
        let stats = &self.stats.blockcache;
        stats.blocks.add(1);
        stats.used_bytes.add(bytes);
        if let Err(error) = self.log_put(disk, block, record) {
            self.write_failed(disk, "writing to the index log", &error);
            self.index.shard_of(&block.object).write().begin_removal(block);
            let gave_way = self.evict_for_refusal(disk, "writing to the index log", len, &error);
            return if gave_way { PutOutcome::Busy } else { PutOutcome::NoRoom };
        }
        PutOutcome::Stored
    }

    /// Whether a file that should hold blocks was removed from the cache directory; if so, these are dropped.
    fn is_file_removed(&self, disk: &CacheDisk, key: &FileKey) -> bool {
        let removed = disk.open_file(key).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if removed {
            self.drop_removed_file(disk, key);
        }
        removed
    }

    /// Evicts a block when the file system refused a write in spite of free space: a quota, or no inodes left. Returns whether a
    /// block was evicted. Does nothing when the last such eviction was futile.
    fn evict_for_refusal(&self, disk: &Arc<CacheDisk>, what: &str, len: u32, error: &io::Error) -> bool {
        if !is_full(error) || disk.eviction_futile.load(Ordering::Relaxed) {
            return false;
        }
        disk.note_refusal(what, disk_footprint(len, 0), error);
        self.evict_one(disk)
    }

    /// Logs that a block is present, with the current class. A later change of the class is logged behind this record.
    fn log_put(&self, disk: &CacheDisk, block: &BlockId, record: Vec<u8>) -> io::Result<()> {
        disk.append_log_with(record, |out| 1 + self.push_class(out, block))
    }

    /// Handles a failed write, or a failed attempt to free space. Returns whether the disk is at fault; if so,
    /// retries end, by success or because the disk becomes unusable.
    pub(crate) fn write_failed(&self, disk: &CacheDisk, what: &str, error: &io::Error) -> bool {
        if is_full(error) {
            // Other users filled the file system: not a fault of the disk. The background thread queries the free
            // space and makes room.
            disk.wake.notify_one();
            tracing::debug!("cache disk {}: {what}: {error}", disk.root.display());
            return false;
        }
        disk.note_failure(what, error);
        !is_process_error(error)
    }

    /// Creates a file of a single small block through the thread's scratch buffer.
    fn create_small(&self, disk: &CacheDisk, key: &FileKey, data: &[u8]) -> io::Result<()> {
        scratch::with_scratch(|scratch| {
            let padded = data.len().next_multiple_of(ALIGN);
            let bounce = &mut scratch.bounce_bytes()[..padded];
            bounce[..data.len()].copy_from_slice(data);
            bounce[data.len()..].fill(0);
            disk.create_file(key, bounce, data.len())
        })
    }

    /// Writes a block's bytes; the last bytes are padded to 4096 where O_DIRECT requires it.
    fn write_data(&self, disk: &CacheDisk, file: &DataFile, offset: u64, data: &[u8]) -> io::Result<()> {
        let timeout = self.config.write_timeout;
        if !file.direct {
            return disk.io.write(file, offset, data, timeout);
        }
        let aligned = (data.as_ptr() as usize).is_multiple_of(ALIGN);
        let straight = if aligned && (data.len() > SCRATCH_BYTES || data.len().is_multiple_of(ALIGN)) {
            data.len() / ALIGN * ALIGN
        } else {
            0
        };
        if straight > 0 {
            disk.io.write(file, offset, &data[..straight], timeout)?;
        }
        scratch::with_scratch(|scratch| {
            let mut at = straight;
            while at < data.len() {
                let n = (data.len() - at).min(SCRATCH_BYTES);
                let padded = n.next_multiple_of(ALIGN);
                let bounce = scratch.bounce_bytes();
                bounce[..n].copy_from_slice(&data[at..at + n]);
                bounce[n..padded].fill(0);
                disk.io.write(file, offset + at as u64, &bounce[..padded], timeout)?;
                at += n;
            }
            Ok(())
        })
    }

    /// Leaves a hole in place of a block of zeros, and writes the last page, so that the file is long enough for reads.
    fn write_hole(&self, disk: &CacheDisk, file: &DataFile, offset: u64, data: &[u8]) -> io::Result<()> {
        let last = (data.len() - 1) / ALIGN * ALIGN;
        // An earlier write that failed may have left bytes there.
        match disk.io.punch(file, offset, last as u64, self.config.write_timeout) {
            // On a file system without holes the block takes more than is counted; the free-space ratio still holds.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => self.write_data(disk, file, offset, data),
            Err(error) => Err(error),
            Ok(()) => self.write_data(disk, file, offset + last as u64, &data[last..]),
        }
    }

    /// Reserves `bytes` on a disk, evicting if necessary; [`PutOutcome::Stored`] on success.
    pub(crate) fn reserve_bytes(&self, disk: &Arc<CacheDisk>, bytes: u64) -> PutOutcome {
        if bytes > disk.limit.load(Ordering::Relaxed) {
            return PutOutcome::NoRoom;
        }
        for _ in 0..MAX_EVICTIONS {
            // Whatever was refused, a single block is always tried.
            let room = disk.room_bytes().max(bytes);
            let filled_by_others = disk.overfull_bytes(self.config.free_space_ratio, bytes) > 0;
            let index_full = self.is_index_full(disk);
            if index_full {
                disk.warn_index_full();
            }
            if !filled_by_others && !index_full {
                let fits = disk.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                    (used + bytes <= room).then_some(used + bytes)
                });
                if fits.is_ok() {
                    disk.adjust_free(-(bytes as i64));
                    if self.above_watermark(disk) > 0 {
                        disk.wake.notify_one();
                    }
                    return PutOutcome::Stored;
                }
            }
            if !self.evict_one(disk) {
                // Space filled by others stays full. Pins leave a part of each disk to other blocks, and such blocks can be
                // evicted once written, removed or no longer open.
                let no_use = filled_by_others || disk.used.load(Ordering::Relaxed) < bytes;
                return if no_use { PutOutcome::NoRoom } else { PutOutcome::Busy };
            }
        }
        PutOutcome::Busy
    }

    /// Admits a block to a class on a disk by evicting older blocks; [`PutOutcome::Stored`] on success.
    pub(crate) fn admit_to_class(&self, disk: &CacheDisk, block: BlockId, class: u64, bytes: u64) -> PutOutcome {
        loop {
            match self.classes.admit(block, class, bytes, disk.number, pinned_limit(disk)) {
                ClassAdmission::Admitted => return PutOutcome::Stored,
                ClassAdmission::Full => return PutOutcome::Skipped,
                ClassAdmission::TooLong => return PutOutcome::TooLong,
                // Each round removes a block of the class, so this ends.
                ClassAdmission::EvictFirst(oldest) => drop(self.expire_block(&oldest)),
            }
        }
    }

    /// Appends the block's class, if any, to a log buffer; returns the number of records.
    pub(crate) fn push_class(&self, out: &mut Vec<u8>, block: &BlockId) -> u64 {
        let Some((class, came)) = self.classes.class_of(block) else { return 0 };
        log::push_class(out, block, class, came);
        1
    }

    /// The bytes that pinned blocks may take on all disks.
    pub fn most_pinned(&self) -> u64 {
        self.disks.iter().map(|disk| pinned_limit(disk)).sum()
    }

    /// Replaces the rules of all classes of blocks.
    pub fn set_classes(&self, rules: BTreeMap<u64, BlockClass>) {
        let most: Vec<u64> = self.disks.iter().map(|disk| pinned_limit(disk)).collect();
        self.classes.set_rules(rules, &most);
        self.disks.iter().for_each(|disk| disk.policy.clear_barren());
    }

    /// The quota of a class on these disks, when a block of `len` bytes is longer.
    pub fn quota_below(&self, class: u64, len: usize) -> Option<u64> {
        self.classes.quota_below(class, disk_footprint(u32::try_from(len).unwrap_or(u32::MAX), 0))
    }

    /// Bytes of the blocks of a class.
    pub fn class_used(&self, class: u64) -> u64 {
        self.classes.used_bytes(class)
    }

    /// Assigns a present block to `class`, as if the block came now. A block of this class is not changed.
    pub fn classify_block(&self, obj: &ObjectRef, index: u32, class: u64) {
        let block = BlockId { object: obj.id, index };
        if self.classes.has_class(&block, class) {
            return;
        }
        let here = || {
            let shard = self.index.shard_of(&block.object).read();
            shard
                .get(&block)
                .filter(|entry| self.is_served(entry))
                .map(|entry| (entry.disk, disk_footprint(entry.len, entry.flags)))
        };
        let Some((number, bytes)) = here() else { return };
        let disk = &self.disks[usize::from(number)];
        let pinned = self.classes.is_pinned(&block);
        if class == UNCLASSIFIED {
            self.classes.forget_block(&block);
        } else if self.admit_to_class(disk, block, class, bytes) != PutOutcome::Stored {
            self.expire_block(&block);
            return;
        }
        self.classes.mark_stored(&block);
        if pinned && !self.classes.is_pinned(&block) {
            disk.policy.clear_barren();
        }
        // A leaving block is marked before the removal is logged, so a served block has no removal in the log yet. Of two
        // concurrent changes of the class, the last writer logs the valid class.
        if let Err(error) = disk.append_log_with(Vec::with_capacity(64), |out| {
            if here().is_none_or(|(now, _)| now != number) {
                return 0;
            }
            if self.push_class(out, &block) == 0 {
                log::push_class(out, &block, UNCLASSIFIED, 0);
            }
            1
        }) {
            self.write_failed(disk, "writing to the index log", &error);
        }
        let mut shard = self.index.shard_of(&block.object).write();
        // For a block removed meanwhile; the writer of a block that is being rewritten updates the class.
        if shard.get(&block).is_none() && shard.begin_write(&block) {
            self.classes.forget_block(&block);
            shard.end_write(&block);
        }
    }

    fn release_bytes(&self, disk: &CacheDisk, bytes: u64) {
        disk.used.fetch_sub(bytes, Ordering::Relaxed);
        disk.adjust_free(bytes as i64);
    }

    /// Removes a block from the index and from the class. Both under the same lock, since the block may be rewritten right after.
    pub(crate) fn remove_entry(&self, shard: &mut IndexShard, block: &BlockId) -> Option<BlockEntry> {
        self.classes.forget_block(block);
        shard.remove(block)
    }

    /// Subtracts a block that is no longer in the index from the counters.
    pub(crate) fn uncount_block(&self, disk: &CacheDisk, bytes: u64) {
        self.release_bytes(disk, bytes);
        disk.blocks.fetch_sub(1, Ordering::Relaxed);
        self.stats.blockcache.blocks.sub(1);
        self.stats.blockcache.used_bytes.sub(bytes);
    }
}

/// The bytes that pinned blocks may take on a disk.
fn pinned_limit(disk: &CacheDisk) -> u64 {
    disk.limit.load(Ordering::Relaxed) / 100 * PINNED_PERCENT
}

/// Whether a block is all zeros and longer than a page, the size of a hole on disk. The scan ends at the first page with another
/// byte, so only blocks whose write is saved pay for the scan.
fn is_hole(data: &[u8]) -> bool {
    const ZERO_PAGE: [u8; ALIGN] = [0; ALIGN];
    data.len() > ALIGN && data.chunks(ALIGN).all(|page| *page == ZERO_PAGE[..page.len()])
}

/// A hash of a block's name for the policy's ghost queue.
pub fn block_fingerprint(block: &BlockId) -> u32 {
    ((block.object.0 as u64 ^ u64::from(block.index)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheCapacity, Store, StoreConfig};
    use spurline_types::Version;

    #[test]
    fn a_block_is_of_its_class_after_a_restart_though_that_was_logged_before_the_block() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let config = StoreConfig {
                block_size: 64 << 10,
                free_space_ratio: 0.0,
                ..StoreConfig::new(vec![dir.path().into()], CacheCapacity::Bytes(1 << 20))
            };
            let store = Store::open(config, Arc::default()).unwrap();
            store.set_classes(BTreeMap::from([(1, BlockClass { pinned: true, ..BlockClass::default() })]));
            store
        };
        let store = open();
        let obj = ObjectRef::new("test:", b"a", Version::new("1"), 4096);
        assert!(store.put(&obj, 0, &[7; 4096]).unwrap());
        // A writer enters a block in the index before the log: from then on the block can be classified.
        store.classify_block(&obj, 0, 1);
        let block = BlockId { object: obj.id, index: 0 };
        let mut record = Vec::new();
        log::push_put(&mut record, &block, 4096, WHOLE, &crc::checksums(&[7; 4096]));
        store.log_put(&store.disks[0], &block, record).unwrap();
        drop(store);
        let store = open();
        assert_eq!(store.class_used(1), 4096);
        assert!(store.classes.is_pinned(&block));
    }
}
