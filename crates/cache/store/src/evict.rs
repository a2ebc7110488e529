//! Removes blocks from a disk: evicted, wrong, expired, or of a removed object.
//!
//! A block leaves in steps: the block is marked (readers miss the block, writers skip it), the removal is logged, the space is
//! freed, the entry is removed. A crash between two steps costs space until the next sweep, nothing else. Space that can't be
//! freed at once (an open handle, other writers, a full disk) is freed later by the background thread.

use crate::disk::{CacheDisk, DiskWork, disk_footprint};
use crate::files::FileKey;
use crate::index::{BlockEntry, IndexShard, MAIN, PARTS, WHOLE};
use crate::io::{is_full, is_process_error};
use crate::log;
use crate::store::StoreCore;
use crate::write::block_fingerprint;
use spurline_types::{BlockId, ObjectId, ObjectRef};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl StoreCore {
    /// Bytes above the mark at which background eviction starts: a 64th below the limit, so that writers seldom have
    /// to evict.
    pub(crate) fn above_watermark(&self, disk: &CacheDisk) -> u64 {
        let room = disk.room_bytes();
        let mark = room - room / 64;
        disk.used.load(Ordering::Relaxed).saturating_sub(mark)
    }

    /// Evicts a block; false when no block can be evicted.
    pub(crate) fn evict_one(&self, disk: &Arc<CacheDisk>) -> bool {
        if !disk.health.usable() {
            return false;
        }
        let mut promoted = Vec::new();
        let victim = disk.policy.victim(
            self.policy_time(),
            block_fingerprint,
            |block, slot| {
                let mut shard = self.index.shard_of(&block.object).write();
                if shard.activity(&block.object).pins > 0 || self.classes.is_pinned(block) {
                    return true;
                }
                !shard.get(block).is_some_and(|entry| entry.slot == slot && entry.disk == disk.number)
                    || shard.begin_removal(block).is_none()
            },
            |block| promoted.push(*block),
        );
        if !promoted.is_empty() {
            self.note_promoted(disk, &promoted);
        }
        let Some((block, _)) = victim else { return false };
        self.stats.blockcache.evictions.add(1);
        self.discard_block(disk, &block);
        true
    }

    /// Logs promotions to the main queue, so that ranks outlive a restart.
    fn note_promoted(&self, disk: &CacheDisk, blocks: &[BlockId]) {
        let mut records = Vec::with_capacity(blocks.len() * 32);
        for block in blocks {
            if let Some(entry) = self.index.shard_of(&block.object).write().get_mut(block) {
                entry.flags |= MAIN;
            }
            log::push_promote(&mut records, block);
        }
        if let Err(error) = disk.append_log(records, blocks.len() as u64) {
            tracing::debug!("cache disk {}: logging promoted blocks: {error}", disk.root.display());
        }
    }

    /// Removes a block that is marked as leaving. An unusable disk removes the block once usable again.
    pub(crate) fn discard_block(&self, disk: &CacheDisk, block: &BlockId) {
        if !disk.health.usable() {
            disk.enqueue(DiskWork::Discard(*block));
            return;
        }
        let mut record = Vec::with_capacity(32);
        log::push_remove(&mut record, block);
        // Not for a block that another disk took meanwhile, nor before the writer has logged the block.
        let leaves = |_: &mut Vec<u8>| u64::from(is_leaving(&self.index.shard_of(&block.object).read(), disk, block));
        if let Err(error) = disk.append_log_with(record, leaves) {
            // A full disk has no room for the record either. Without the record the block comes back after a crash, and the
            // checksums reveal that the bytes are gone.
            let broken = self.write_failed(disk, "writing to the index log", &error);
            if broken || !disk.health.usable() {
                disk.enqueue(DiskWork::Discard(*block));
                return;
            }
        }
        let Some((key, len, alone, pinned)) = self.plan_discard(disk, block) else { return };
        let result = if alone {
            disk.remove_file(&key)
        } else if pinned {
            // A handle may be reading the file directly: the bytes must not change.
            Ok(())
        } else {
            self.punch_block(disk, &key, block.index, len)
        };
        let late = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        if let Err(error) = &result {
            self.write_failed(disk, "giving space back", error);
        }
        let given_back = result.is_ok() && (alone || !pinned);
        let mut shard = self.index.shard_of(&block.object).write();
        if alone {
            shard.update_activity(&block.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
        }
        if late {
            drop(shard);
            disk.enqueue(DiskWork::Discard(*block));
            return;
        }
        // Another disk may have taken the block.
        let leaves = shard.get(block).is_some_and(|entry| entry.leaves_disk(disk.number));
        if leaves && let Some(entry) = self.remove_entry(&mut shard, block) {
            drop(shard);
            disk.policy.remove(entry.slot);
            self.uncount_block(disk, disk_footprint(entry.len, entry.flags));
        } else {
            drop(shard);
        }
        if !given_back {
            // Retried once, or until success if the disk was not at fault.
            disk.enqueue(DiskWork::Reclaim(*block, key.tag == 0));
        } else if !alone {
            self.remove_file_if_empty(disk, &key);
        }
    }

    /// The file of a leaving block, its length, whether the file is removed too (then marked as being unlinked), and whether the
    /// object is pinned.
    fn plan_discard(&self, disk: &CacheDisk, block: &BlockId) -> Option<(FileKey, u32, bool, bool)> {
        let mut shard = self.index.shard_of(&block.object).write();
        if !is_leaving(&shard, disk, block) {
            return None;
        }
        let entry = shard.get(block)?;
        let whole = entry.flags & WHOLE != 0;
        let len = entry.len;
        let key = self.file_key(block.object, block.index, whole);
        let activity = shard.activity(&block.object);
        let alone = activity.writers == 0 && self.count_in_file(&shard, disk, &key, 2) == 1;
        if alone {
            shard.update_activity(&block.object, |a| a.unlinking += 1);
        }
        Some((key, len, alone, activity.pins > 0))
    }

    /// Number of blocks in a file, counted up to `enough`.
    pub(crate) fn count_in_file(&self, shard: &IndexShard, disk: &CacheDisk, key: &FileKey, enough: usize) -> usize {
        let mut n = 0;
        shard.blocks_within(&key.object, self.index_range(key), |i, entry| {
            let whole = entry.flags & WHOLE != 0;
            n += usize::from(entry.disk == disk.number && self.file_key(key.object, i, whole) == *key);
            n < enough
        });
        n
    }

    /// Removes a file that holds no block. A file that is being written, or an unusable disk, is left to the background thread.
    pub(crate) fn remove_file_if_empty(&self, disk: &CacheDisk, key: &FileKey) {
        if !self.try_remove_empty(disk, key) {
            disk.enqueue(DiskWork::RemoveEmpty(*key));
        }
    }

    /// Removes a file without blocks; false when that must be retried.
    pub(crate) fn try_remove_empty(&self, disk: &CacheDisk, key: &FileKey) -> bool {
        // A late write may land after this.
        if !disk.health.usable() || disk.io.late_count() > 0 {
            return false;
        }
        let mut shard = self.index.shard_of(&key.object).write();
        if self.count_in_file(&shard, disk, key, 1) > 0 {
            return true;
        }
        if shard.activity(&key.object).writers > 0 {
            return false;
        }
        shard.update_activity(&key.object, |a| a.unlinking += 1);
        drop(shard);
        let result = disk.remove_file(key);
        if let Err(error) = &result {
            self.write_failed(disk, "removing an empty file", error);
        }
        self.index
            .shard_of(&key.object)
            .write()
            .update_activity(&key.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
        !result.is_err_and(|error| is_transient(&error))
    }

    /// Frees the space of a block that a disk does not hold: the remains of a failed write, or a block that another
    /// disk holds now. False when that must be retried.
    pub(crate) fn reclaim_space(&self, disk: &CacheDisk, block: &BlockId, whole: bool) -> bool {
        if !disk.health.usable() || disk.io.late_count() > 0 {
            return false;
        }
        let key = self.file_key(block.object, block.index, whole);
        let mut shard = self.index.shard_of(&block.object).write();
        let is_here = shard.get(block).is_some_and(|entry| {
            entry.disk == disk.number && self.file_key(block.object, block.index, entry.flags & WHOLE != 0) == key
        });
        if is_here {
            return true;
        }
        if self.count_in_file(&shard, disk, &key, 1) == 0 {
            drop(shard);
            return self.try_remove_empty(disk, &key);
        }
        // A writer may be writing to this very place, or a handle may be reading the file directly.
        if shard.state(block).is_being_written() || shard.activity(&block.object).pins > 0 {
            return false;
        }
        // This mark prevents new writers of the file; current writers write beside this block.
        shard.update_activity(&block.object, |a| a.unlinking += 1);
        drop(shard);
        let result = self.punch_block(disk, &key, block.index, self.config.block_size);
        self.index
            .shard_of(&block.object)
            .write()
            .update_activity(&block.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
        let Err(error) = result else { return true };
        // Punching may need space itself; that says nothing about the room for blocks.
        if is_full(&error) {
            return false;
        }
        // Space that a broken disk did not free is freed by the sweep after the next start.
        self.write_failed(disk, "giving space back", &error) && error.kind() != io::ErrorKind::TimedOut
    }

    /// Frees the space of a block of a file.
    pub(crate) fn punch_block(&self, disk: &CacheDisk, key: &FileKey, index: u32, len: u32) -> io::Result<()> {
        let size = u64::from(self.config.block_size);
        disk.open_file(key)
            .and_then(|file| {
                disk.io.punch(&file, u64::from(index) * size, disk_footprint(len, 0), self.config.write_timeout)
            })
            .or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
    }

    /// Marks a block as leaving and queues its removal; returns whether the block was present.
    pub(crate) fn expire_block(&self, block: &BlockId) -> bool {
        let mut shard = self.index.shard_of(&block.object).write();
        // Also on an unusable disk: nothing would expire the block again once the disk is back.
        let disk = shard.begin_removal(block);
        // The class regains room at once, the disk with the removal. Under the lock: afterwards the block may be gone and
        // rewritten.
        self.classes.forget_block(block);
        drop(shard);
        let Some(disk) = disk else { return false };
        self.stats.blockcache.limited_blocks.add(1);
        self.disks[usize::from(disk)].enqueue(DiskWork::Discard(*block));
        true
    }

    /// Expires blocks by the rules of the classes, and returns the blocks.
    pub(crate) fn expire_due(&self, most: usize) -> Vec<BlockId> {
        let due = self.classes.due_blocks(crate::classes::unix_seconds(), most);
        due.into_iter().filter(|block| self.expire_block(block)).collect()
    }

    /// Removes all blocks of an object. Handles pinned on the file continue to read.
    pub fn remove_object(&self, obj: &ObjectRef) {
        self.remove_blocks(obj, 0..u32::MAX, true);
    }

    /// Removes an object's blocks in the range, pinned blocks only with `with_pinned`.
    pub fn remove_blocks(&self, obj: &ObjectRef, range: Range<u32>, with_pinned: bool) -> RemovedBytes {
        let mut bytes = RemovedBytes::default();
        let mut found = Vec::new();
        self.index.shard_of(&obj.id).read().blocks_within(&obj.id, range, |index, entry| {
            found.extend(self.choose_removal(BlockId { object: obj.id, index }, entry, with_pinned, &mut bytes));
            true
        });
        self.remove_chosen(found);
        bytes
    }

    /// Removes the blocks of the objects that `wanted` chooses from a part of the index, pinned blocks only with `with_pinned`;
    /// `None` beyond the last part. A part holds about a 64th of all blocks.
    pub fn remove_in_part(
        &self,
        part: usize,
        wanted: impl Fn(&ObjectId) -> bool,
        with_pinned: bool,
    ) -> Option<RemovedBytes> {
        if part >= PARTS {
            return None;
        }
        let mut bytes = RemovedBytes::default();
        let mut found = Vec::new();
        self.index.for_each_in_part(part, |block, entry| {
            if wanted(&block.object) {
                found.extend(self.choose_removal(block, entry, with_pinned, &mut bytes));
            }
        });
        self.remove_chosen(found);
        Some(bytes)
    }

    /// The block, if removed; counts the bytes.
    fn choose_removal(
        &self,
        block: BlockId,
        entry: &BlockEntry,
        with_pinned: bool,
        bytes: &mut RemovedBytes,
    ) -> Option<BlockId> {
        if !entry.is_readable() {
            return None;
        }
        if !with_pinned && self.classes.is_pinned(&block) {
            bytes.kept_pinned += u64::from(entry.len);
            return None;
        }
        bytes.removed += u64::from(entry.len);
        Some(block)
    }

    fn remove_chosen(&self, mut blocks: Vec<BlockId>) {
        // Not in the map's order: each search for a remaining block would step over all removed blocks.
        blocks.sort_unstable();
        for block in blocks {
            let disk = self.index.shard_of(&block.object).write().begin_removal(&block);
            if let Some(disk) = disk {
                self.discard_block(&self.disks[usize::from(disk)], &block);
            }
        }
    }
}

/// The bytes of a removal of blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemovedBytes {
    /// Removed.
    pub removed: u64,
    /// Not removed, because the blocks are pinned.
    pub kept_pinned: u64,
}

impl std::ops::AddAssign for RemovedBytes {
    fn add_assign(&mut self, other: RemovedBytes) {
        self.removed += other.removed;
        self.kept_pinned += other.kept_pinned;
    }
}

/// Whether a block is to be removed from a disk now. A block that is still being written is left to the writer.
fn is_leaving(shard: &IndexShard, disk: &CacheDisk, block: &BlockId) -> bool {
    shard.get(block).is_some_and(|entry| entry.leaves_disk(disk.number))
}

/// Whether a failed operation is worth a retry once nothing is late: the disk was not at fault, or the outcome is
/// unknown.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut || is_full(error) || is_process_error(error)
}
