//! Taking blocks off a disk: evicted, wrong, or of an object nobody wants any more.
//!
//! A block leaves in steps: it is marked (readers miss it, writers leave it alone), its removal is logged, its
//! space is given back, its entry goes. A crash between two steps costs space until the next sweep, nothing else. What can't
//! be given back at once (a handle is open, others write, a disk is full) is tried again by the background thread.

use crate::disk::{Disk, Work, footprint};
use crate::files::FileKey;
use crate::index::{Entry, LEAVING, MAIN, Shard, WHOLE};
use crate::io::{is_full, is_own};
use crate::log;
use crate::store::Core;
use crate::write::fingerprint;
use spurline_types::{BlockId, ObjectRef};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Core {
    /// Bytes above the mark at which the background starts to evict: a 64th below the limit, so that writers
    /// seldom have to evict themselves.
    pub(crate) fn above_watermark(&self, disk: &Disk) -> u64 {
        let room = disk.room();
        let mark = room - room / 64;
        disk.used.load(Ordering::Relaxed).saturating_sub(mark)
    }

    /// Evicts one block; false when there is none that may go.
    pub(crate) fn evict_one(&self, disk: &Arc<Disk>) -> bool {
        if !disk.health.usable() {
            return false;
        }
        let mut promoted = Vec::new();
        let victim = disk.policy.victim(
            self.now(),
            fingerprint,
            |block, slot| {
                let mut shard = self.index.shard(&block.object).write();
                if shard.activity(&block.object).pins > 0 || self.classes.is_pinned(block) {
                    return true;
                }
                match shard.get_mut(block) {
                    Some(entry) if entry.slot == slot && entry.disk == disk.number && entry.flags & LEAVING == 0 => {
                        entry.flags |= LEAVING;
                        false
                    }
                    _ => true,
                }
            },
            |block| promoted.push(*block),
        );
        if !promoted.is_empty() {
            self.note_promoted(disk, &promoted);
        }
        let Some((block, _)) = victim else { return false };
        self.stats.blockcache.evictions.add(1);
        self.discard(disk, &block);
        true
    }

    /// Logs which blocks proved their worth, so that they keep their rank over a restart.
    fn note_promoted(&self, disk: &Disk, blocks: &[BlockId]) {
        let mut records = Vec::with_capacity(blocks.len() * 32);
        for block in blocks {
            if let Some(entry) = self.index.shard(&block.object).write().get_mut(block) {
                entry.flags |= MAIN;
            }
            log::push_promote(&mut records, block);
        }
        if let Err(error) = disk.append(records, blocks.len() as u64) {
            tracing::debug!("cache disk {}: noting promoted blocks: {error}", disk.root.display());
        }
    }

    /// Takes a block off its disk that was marked as leaving. A disk that is not in use does it once it is again.
    pub(crate) fn discard(&self, disk: &Disk, block: &BlockId) {
        if !disk.health.usable() {
            disk.ask(Work::Discard(*block));
            return;
        }
        let mut record = Vec::with_capacity(32);
        log::push_remove(&mut record, block);
        // Not of one that another disk took meanwhile, nor before its writer has logged it.
        let leaves = |_: &mut Vec<u8>| u64::from(is_leaving(&self.index.shard(&block.object).read(), disk, block));
        if let Err(error) = disk.append_with(record, leaves) {
            // A full disk has no room for the record either. Without it the block comes back after a crash, and its checksums
            // tell that it is gone.
            let broken = self.write_failed(disk, "writing to the index log", &error);
            if broken || !disk.health.usable() {
                disk.ask(Work::Discard(*block));
                return;
            }
        }
        let Some((key, len, alone, pinned)) = self.look_at_leaving(disk, block) else { return };
        let result = if alone {
            disk.unlink(&key)
        } else if pinned {
            // A handle may be reading the file past us: its bytes stay as they are.
            Ok(())
        } else {
            self.punch(disk, &key, block.index, len)
        };
        let late = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        if let Err(error) = &result {
            self.write_failed(disk, "giving space back", error);
        }
        let given_back = result.is_ok() && (alone || !pinned);
        let mut shard = self.index.shard(&block.object).write();
        if alone {
            shard.act(&block.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
        }
        if late {
            drop(shard);
            disk.ask(Work::Discard(*block));
            return;
        }
        // Another disk may have taken it.
        let leaves = shard.get(block).is_some_and(|entry| entry.leaves(disk.number));
        if leaves && let Some(entry) = self.take_out(&mut shard, block) {
            drop(shard);
            disk.policy.remove(entry.slot);
            self.uncount(disk, entry.len);
        } else {
            drop(shard);
        }
        if !given_back {
            // Once more, or until it goes well where that was no fault of the disk.
            disk.ask(Work::Reclaim(*block, key.tag == 0));
        } else if !alone {
            self.tidy_file(disk, &key);
        }
    }

    /// The file of a leaving block, its length, whether the file goes with it (noted as being unlinked then), and
    /// whether the object is pinned.
    fn look_at_leaving(&self, disk: &Disk, block: &BlockId) -> Option<(FileKey, u32, bool, bool)> {
        let mut shard = self.index.shard(&block.object).write();
        if !is_leaving(&shard, disk, block) {
            return None;
        }
        let entry = shard.get(block)?;
        let (whole, len) = (entry.flags & WHOLE != 0, entry.len);
        let key = self.file_key(block.object, block.index, whole);
        let activity = shard.activity(&block.object);
        let alone = activity.writers == 0 && self.count_in_file(&shard, disk, &key, 2) == 1;
        if alone {
            shard.act(&block.object, |a| a.unlinking += 1);
        }
        Some((key, len, alone, activity.pins > 0))
    }

    /// How many blocks a file holds, counted up to `enough`.
    pub(crate) fn count_in_file(&self, shard: &Shard, disk: &Disk, key: &FileKey, enough: usize) -> usize {
        let mut n = 0;
        shard.within(&key.object, self.indexes(key), |i, entry| {
            let whole = entry.flags & WHOLE != 0;
            n += usize::from(entry.disk == disk.number && self.file_key(key.object, i, whole) == *key);
            n < enough
        });
        n
    }

    /// Removes a file that holds no block, or has the disk's background thread do it once nobody writes to it and the disk is
    /// in use.
    pub(crate) fn tidy_file(&self, disk: &Disk, key: &FileKey) {
        if !self.try_tidy(disk, key) {
            disk.ask(Work::Tidy(*key));
        }
    }

    /// Removes a file if it holds no block; false when that has to be tried again.
    pub(crate) fn try_tidy(&self, disk: &Disk, key: &FileKey) -> bool {
        // What is late may land after this.
        if !disk.health.usable() || disk.io.late() > 0 {
            return false;
        }
        let mut shard = self.index.shard(&key.object).write();
        if self.count_in_file(&shard, disk, key, 1) > 0 {
            return true;
        }
        if shard.activity(&key.object).writers > 0 {
            return false;
        }
        shard.act(&key.object, |a| a.unlinking += 1);
        drop(shard);
        let result = disk.unlink(key);
        if let Err(error) = &result {
            self.write_failed(disk, "removing an empty file", error);
        }
        self.index.shard(&key.object).write().act(&key.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
        !result.is_err_and(|error| may_go_well(&error))
    }

    /// Gives back the space of a block that a disk does not hold: what a write that failed has left there, or what another
    /// disk holds now. False when that has to be tried again.
    pub(crate) fn reclaim(&self, disk: &Disk, block: &BlockId, whole: bool) -> bool {
        if !disk.health.usable() || disk.io.late() > 0 {
            return false;
        }
        let key = self.file_key(block.object, block.index, whole);
        let mut shard = self.index.shard(&block.object).write();
        let is_here = |entry: &Entry| {
            entry.disk == disk.number && self.file_key(block.object, block.index, entry.flags & WHOLE != 0) == key
        };
        if shard.get(block).is_some_and(is_here) {
            return true;
        }
        if self.count_in_file(&shard, disk, &key, 1) == 0 {
            drop(shard);
            return self.try_tidy(disk, &key);
        }
        // It may be on its way to this very place, or a handle may be reading the file past us.
        if shard.is_written(block) || shard.activity(&block.object).pins > 0 {
            return false;
        }
        // While this is noted nobody begins to write to the file; who does already writes beside this block.
        shard.act(&block.object, |a| a.unlinking += 1);
        drop(shard);
        let result = self.punch(disk, &key, block.index, self.config.block_size);
        self.index.shard(&block.object).write().act(&block.object, |a| a.unlinking = a.unlinking.saturating_sub(1));
        let Err(error) = result else { return true };
        // Punching may want space itself; that says nothing of the room there is for blocks.
        if is_full(&error) {
            return false;
        }
        // What a broken disk did not give back the sweep after the next start does.
        self.write_failed(disk, "giving space back", &error) && error.kind() != io::ErrorKind::TimedOut
    }

    /// Gives back the space of one block of a file.
    pub(crate) fn punch(&self, disk: &Disk, key: &FileKey, index: u32, len: u32) -> io::Result<()> {
        let size = u64::from(self.config.block_size);
        disk.file(key)
            .and_then(|file| disk.io.punch(&file, u64::from(index) * size, footprint(len), self.config.write_timeout))
            .or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
    }

    /// Marks a block as leaving, and has its disk take it off soon; whether it was here.
    pub(crate) fn expire(&self, block: &BlockId) -> bool {
        let mut shard = self.index.shard(&block.object).write();
        // Also on a disk that is not in use: once that is back, nothing tells that the block's time was up.
        let disk = shard.get_mut(block).filter(|entry| entry.flags & LEAVING == 0).map(|entry| {
            entry.flags |= LEAVING;
            entry.disk
        });
        // Its room is its class's again at once; the disk's own is when it has gone. Under the lock: afterwards it may be
        // gone and written anew.
        self.classes.gone(block);
        drop(shard);
        let Some(disk) = disk else { return false };
        self.stats.blockcache.limited_blocks.add(1);
        self.disks[usize::from(disk)].ask(Work::Discard(*block));
        true
    }

    /// Has blocks go whose class says so; gives those that went.
    pub(crate) fn expire_due(&self, most: usize) -> Vec<BlockId> {
        let due = self.classes.due(crate::classes::now(), most);
        due.into_iter().filter(|block| self.expire(block)).collect()
    }

    /// Forgets all blocks of an object. Handles pinned on its file keep reading it.
    pub fn remove_object(&self, obj: &ObjectRef) {
        self.remove_blocks(obj, 0..u32::MAX);
    }

    /// Forgets those of an object's blocks that are in the range, and says how many bytes they had.
    pub fn remove_blocks(&self, obj: &ObjectRef, range: Range<u32>) -> u64 {
        let mut leaving: Vec<(BlockId, u8)> = Vec::new();
        let mut bytes = 0;
        let mut shard = self.index.shard(&obj.id).write();
        let mut found = Vec::new();
        shard.within(&obj.id, range, |index, entry| {
            if entry.flags & LEAVING == 0 {
                found.push((BlockId { object: obj.id, index }, entry.disk));
                bytes += u64::from(entry.len);
            }
            true
        });
        // Not in the map's own order: who looks for one that is left would pass by all that went, each time.
        found.sort_unstable_by_key(|(block, _)| block.index);
        for (block, disk) in found {
            if let Some(entry) = shard.get_mut(&block) {
                entry.flags |= LEAVING;
                leaving.push((block, disk));
            }
        }
        drop(shard);
        for (block, disk) in leaving {
            self.discard(&self.disks[usize::from(disk)], &block);
        }
        bytes
    }
}

/// Whether a block is to be taken off a disk now. One that is being written still is left to its writer.
fn is_leaving(shard: &Shard, disk: &Disk, block: &BlockId) -> bool {
    shard.get(block).is_some_and(|entry| entry.leaves(disk.number)) && !shard.is_written(block)
}

/// Whether what failed is worth another try once nothing is late: it was no fault of the disk, or nobody knows yet.
pub(crate) fn may_go_well(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut || is_full(error) || is_own(error)
}
