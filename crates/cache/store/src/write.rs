//! Writing blocks: choosing a disk, making room, and the order data, index, log that keeps a crash from losing or
//! tearing anything that was acknowledged.

use crate::classes::{Admission, Class, PINNED_PERCENT, PLAIN};
use crate::crc;
use crate::disk::{Disk, Work, footprint};
use crate::files::FileKey;
use crate::index::{Entry, LEAVING, MAIN, Shard, WHOLE};
use crate::io::{ALIGN, OpenFile, is_full, is_own};
use crate::log;
use crate::scratch::{self, BOUNCE};
use crate::store::{Core, EXTENT_BYTES};
use crate::turns::Turn;
use spurline_types::{BlockId, Error, ErrorKind, ObjectRef, Result};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Blocks a writer evicts at most to fit one in, before it lets the block be.
const EVICT_AT_MOST: usize = 64;

/// What became of a block that was to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// It is on disk now.
    Here,
    /// Not now: it is being written or removed, its file is handed out, or nothing on its disk may go for it. Asked again it
    /// can be kept.
    Busy,
    /// Others of its class, as new as it is, have all the room of the class: it has come and gone again.
    Passed,
    /// It is longer than all the room of its class.
    TooLong,
    /// No disk has room for it, or is in use.
    NoRoom,
}

impl Core {
    /// Keeps a block; true when it is on disk now, false when it was let be because no disk had room or was in use,
    /// or because it is being written or removed just now. `data` is copied unless it starts on 4096.
    /// Takes as long as the disk takes, at most about the write timeout; where nothing that is written to it ends for as long
    /// as a read may take, the block is let be.
    ///
    /// # Errors
    /// `Invalid` when `data` is not as long as the block. A failing disk is no error.
    pub fn put(&self, obj: &ObjectRef, index: u32, data: &[u8]) -> Result<bool> {
        self.put_as(obj, index, data, PLAIN).map(|kept| kept == Kept::Here)
    }

    /// As [`Core::put`], a block of a class, with what became of it.
    ///
    /// # Errors
    /// As [`Core::put`].
    pub fn put_as(&self, obj: &ObjectRef, index: u32, data: &[u8], class: u16) -> Result<Kept> {
        let len = obj.block_len(index, u64::from(self.config.block_size));
        if data.len() != len || len == 0 {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("block {index} of {} is {len} bytes long, {} were given", obj.id, data.len()),
            ));
        }
        if self.disks.is_empty() {
            return Ok(Kept::NoRoom);
        }
        let kept = self.store_block(obj, index, data, class);
        if kept != Kept::Here {
            self.stats.blockcache.write_skipped.add(1);
        }
        if kept == Kept::Passed {
            self.stats.blockcache.limited_blocks.add(1);
        }
        Ok(kept)
    }

    fn store_block(&self, obj: &ObjectRef, index: u32, data: &[u8], class: u16) -> Kept {
        let block = BlockId { object: obj.id, index };
        let whole = self.disks.len() == 1 || obj.size <= EXTENT_BYTES;
        let key = self.file_key(obj.id, index, whole);
        let Some((disk, first)) = self.begin(&block, &key, whole) else {
            let usable = |disk: &Arc<Disk>| disk.health.usable() && disk.limit.load(Ordering::Relaxed) > 0;
            return match self.contains(obj, index) {
                true => Kept::Here,
                false if self.disks.iter().any(usable) => Kept::Busy,
                false => Kept::NoRoom,
            };
        };
        let kept = match self.make_way(disk, block, class, footprint(data.len() as u32)) {
            Kept::Here => match self.turn(disk, data.len()) {
                Some(_turn) => self.write_block(disk, &block, &key, whole, first, data),
                None => Kept::Busy,
            },
            other => other,
        };
        let done = kept == Kept::Here;
        if done {
            self.classes.arrived(&block);
        } else {
            self.classes.gone(&block);
        }
        let mut shard = self.index.shard(&obj.id).write();
        shard.end_write(&block);
        let leaves = shard.get(&block).is_some_and(|entry| entry.leaves(disk.number));
        drop(shard);
        if leaves {
            // Whoever told it to go meanwhile left it to its writer: its removal stands behind it in the log.
            disk.ask(Work::Discard(block));
        } else if !done {
            self.tidy_file(disk, &key);
        }
        kept
    }

    /// Waits for the turn to write to a disk; `None` when that has stopped answering, which is found out here if none of those
    /// who write has a deadline.
    fn turn<'a>(&self, disk: &'a Disk, bytes: usize) -> Option<Turn<'a>> {
        let turn = disk.turns.take(bytes as u64, self.config.read_timeout);
        if turn.is_none() && disk.turns.stalled() >= self.config.write_timeout {
            disk.failed("writing a block", &io::ErrorKind::TimedOut.into());
        }
        turn.filter(|_| disk.health.usable())
    }

    /// Chooses the disk for a block and claims the right to write it; also whether its file is still empty. `None`
    /// when the block is here, is being written or removed, its file is handed out, or no disk is in use.
    fn begin(&self, block: &BlockId, key: &FileKey, whole: bool) -> Option<(&Arc<Disk>, bool)> {
        let mut shard = self.index.shard(&block.object).write();
        if let Some(entry) = shard.get(block) {
            let old = &self.disks[usize::from(entry.disk)];
            if old.health.usable() || self.disks.iter().all(|d| !d.health.usable()) {
                return None;
            }
            // The disk that has it, or is to take it off, is not in use: it goes to another, and the old one forgets it
            // once it is back.
            let (whole, slot, len) = (entry.flags & WHOLE != 0, entry.slot, entry.len);
            self.take_out(&mut shard, block);
            self.uncount(old, len);
            old.ask(Work::Forget(*block, whole));
            drop(shard);
            old.policy.remove(slot);
            shard = self.index.shard(&block.object).write();
            if shard.get(block).is_some() {
                return None;
            }
        }
        if shard.activity(&block.object).unlinking > 0 {
            return None;
        }
        let mut home = None;
        shard.within(&block.object, self.indexes(key), |i, entry| {
            let same = (entry.flags & WHOLE != 0) == whole && self.file_key(block.object, i, whole) == *key;
            if same && self.disks[usize::from(entry.disk)].health.usable() {
                home = Some(entry.disk);
            }
            home.is_none()
        });
        let disk = match home {
            // The kernel reads it past us: it would see the bytes before they are checked, and an end on 4096.
            Some(_) if shard.activity(&block.object).whole > 0 => return None,
            Some(number) => &self.disks[usize::from(number)],
            None => self.choose(key)?,
        };
        // Its blocks are gone, and the file could not be removed.
        if shard.activity(&block.object).whole > 0 && crate::layout::data_path(&disk.root, key).exists() {
            return None;
        }
        shard.begin_write(block).then_some((disk, home.is_none()))
    }

    /// Weighted rendezvous: every disk draws a number for the file, larger disks better ones; the best in use wins.
    /// A disk that comes or goes moves only the files it wins or had.
    fn choose(&self, key: &FileKey) -> Option<&Arc<Disk>> {
        let mut best: Option<(&Arc<Disk>, f64)> = None;
        for disk in self.disks.iter().filter(|d| d.health.usable()) {
            let mut seed = [0; 20];
            seed[..16].copy_from_slice(&key.object.0.to_le_bytes());
            seed[16..].copy_from_slice(&key.tag.to_le_bytes());
            let draw = xxhash_rust::xxh3::xxh3_64_with_seed(&seed, disk.held.id);
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
        disk: &Arc<Disk>,
        block: &BlockId,
        key: &FileKey,
        whole: bool,
        first: bool,
        data: &[u8],
    ) -> Kept {
        let began = Instant::now();
        let len = data.len() as u32;
        let reserved = self.reserve(disk, footprint(len));
        if reserved != Kept::Here {
            return reserved;
        }
        let crcs = crc::checksums(data);
        let offset = u64::from(block.index) * u64::from(self.config.block_size);
        let write = || {
            if first && offset == 0 && data.len() <= BOUNCE {
                self.create_small(disk, key, data)
            } else {
                disk.file_for_write(key, first).and_then(|file| self.write_data(disk, &file, offset, data))
            }
        };
        let mut written = write();
        let gave_way = written.as_ref().is_err_and(|error| self.give_way(disk, "writing a block", len, error));
        if gave_way {
            written = write();
            disk.in_vain.store(written.as_ref().is_err_and(is_full), Ordering::Relaxed);
        }
        if let Err(error) = written {
            self.unreserve(disk, footprint(len));
            self.write_failed(disk, "writing a block", &error);
            // A part of it may be there.
            disk.ask(Work::Reclaim(*block, whole));
            // What went may leave its room only later.
            return if gave_way { Kept::Busy } else { Kept::NoRoom };
        }
        let place = disk.policy.insert(*block, fingerprint(block), footprint(len) as u32, self.now());
        let Some((slot, main)) = place else {
            self.unreserve(disk, footprint(len));
            disk.ask(Work::Reclaim(*block, whole));
            return Kept::NoRoom;
        };
        let flags = if whole { WHOLE } else { 0 } | if main { MAIN } else { 0 };
        let mut record = Vec::with_capacity(128 + crcs.len() * 4);
        log::push_put(&mut record, block, len, flags, &crcs);
        let entry = Entry { crcs, slot, len, generation: self.next_generation(), disk: disk.number, flags };
        // In the index before the log: a rewrite of the log that began in between finds it in one of the two.
        let old = self.index.shard(&block.object).write().insert(*block, entry);
        debug_assert!(old.is_none(), "only the holder of the right to write a block adds it");
        disk.blocks.fetch_add(1, Ordering::Relaxed);
        let stats = &self.stats.blockcache;
        stats.blocks.add(1);
        stats.used_bytes.add(footprint(len));
        if let Err(error) = self.log_put(disk, block, record) {
            self.write_failed(disk, "writing to the index log", &error);
            if let Some(entry) = self.index.shard(&block.object).write().get_mut(block) {
                entry.flags |= LEAVING;
            }
            let gave_way = self.give_way(disk, "writing to the index log", len, &error);
            return if gave_way { Kept::Busy } else { Kept::NoRoom };
        }
        stats.write_bytes.add(u64::from(len));
        stats.write_us.add_us(began.elapsed());
        Kept::Here
    }

    /// Has a block go where the file system refused a write for want of room that it said it had: a quota, or inodes, of which
    /// it does not tell. Whether one went. None goes where the last one brought nothing.
    fn give_way(&self, disk: &Arc<Disk>, what: &str, len: u32, error: &io::Error) -> bool {
        if !is_full(error) || disk.in_vain.load(Ordering::Relaxed) {
            return false;
        }
        disk.refuses(what, footprint(len), error);
        self.evict_one(disk)
    }

    /// Logs that a block is here, and its class as it is when this is written: whoever changes that from then on writes
    /// behind this.
    fn log_put(&self, disk: &Disk, block: &BlockId, record: Vec<u8>) -> io::Result<()> {
        disk.append_with(record, |out| 1 + self.push_class(out, block))
    }

    /// Notes that writing to a disk failed, or giving its space back; whether that is the disk's fault. Where it is, what is
    /// tried again ends: it goes well, or the disk is not in use any more.
    pub(crate) fn write_failed(&self, disk: &Disk, what: &str, error: &io::Error) -> bool {
        if is_full(error) {
            // Somebody else filled the file system: not a fault of the disk. Room is made in the background, which asks how
            // much there is.
            disk.wake.notify_one();
            tracing::debug!("cache disk {}: {what}: {error}", disk.root.display());
            return false;
        }
        disk.failed(what, error);
        !is_own(error)
    }

    /// Makes a file of one small block, by way of the thread's scratch.
    fn create_small(&self, disk: &Disk, key: &FileKey, data: &[u8]) -> io::Result<()> {
        scratch::with(|scratch| {
            let padded = data.len().next_multiple_of(ALIGN);
            let bounce = &mut scratch.bytes()[..padded];
            bounce[..data.len()].copy_from_slice(data);
            bounce[data.len()..].fill(0);
            disk.create(key, bounce, data.len())
        })
    }

    /// Writes a block's bytes, the last ones padded to 4096 where O_DIRECT wants it.
    fn write_data(&self, disk: &Disk, file: &OpenFile, offset: u64, data: &[u8]) -> io::Result<()> {
        let timeout = self.config.write_timeout;
        if !file.direct {
            return disk.io.write(file, offset, data, timeout);
        }
        let aligned = (data.as_ptr() as usize).is_multiple_of(ALIGN);
        let straight = if aligned && (data.len() > BOUNCE || data.len().is_multiple_of(ALIGN)) {
            data.len() / ALIGN * ALIGN
        } else {
            0
        };
        if straight > 0 {
            disk.io.write(file, offset, &data[..straight], timeout)?;
        }
        scratch::with(|scratch| {
            let mut at = straight;
            while at < data.len() {
                let n = (data.len() - at).min(BOUNCE);
                let padded = n.next_multiple_of(ALIGN);
                let bounce = scratch.bytes();
                bounce[..n].copy_from_slice(&data[at..at + n]);
                bounce[n..padded].fill(0);
                disk.io.write(file, offset + at as u64, &bounce[..padded], timeout)?;
                at += n;
            }
            Ok(())
        })
    }

    /// Makes sure of room for `bytes` on a disk, evicting if need be; [`Kept::Here`] when they have it.
    fn reserve(&self, disk: &Arc<Disk>, bytes: u64) -> Kept {
        if bytes > disk.limit.load(Ordering::Relaxed) {
            return Kept::NoRoom;
        }
        for _ in 0..EVICT_AT_MOST {
            // Whatever was refused, one block is always tried.
            let room = disk.room().max(bytes);
            let filled_by_others = disk.overfull(self.config.free_space_ratio, bytes) > 0;
            if !filled_by_others {
                let fits = disk.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                    (used + bytes <= room).then_some(used + bytes)
                });
                if fits.is_ok() {
                    disk.adjust_free(-(bytes as i64));
                    if self.above_watermark(disk) > 0 {
                        disk.wake.notify_one();
                    }
                    return Kept::Here;
                }
            }
            if !self.evict_one(disk) {
                // What others filled stays full. Pins leave a part of each disk to the rest, and that can go once it is
                // written, removed or no longer open.
                let no_use = filled_by_others || disk.used.load(Ordering::Relaxed) < bytes;
                return if no_use { Kept::NoRoom } else { Kept::Busy };
            }
        }
        Kept::Busy
    }

    /// Takes the room that a block's class gives it on a disk, by having older ones go; [`Kept::Here`] when it has it.
    fn make_way(&self, disk: &Disk, block: BlockId, class: u16, bytes: u64) -> Kept {
        loop {
            match self.classes.admit(block, class, bytes, disk.number, most_pinned(disk)) {
                Admission::Comes => return Kept::Here,
                Admission::Full => return Kept::Passed,
                Admission::TooLong => return Kept::TooLong,
                // Each time one fewer is of the class, so this ends.
                Admission::After(oldest) => drop(self.expire(&oldest)),
            }
        }
    }

    /// Appends the class of a block, if it has one, to what goes to the log; the number of records.
    pub(crate) fn push_class(&self, out: &mut Vec<u8>, block: &BlockId) -> u64 {
        let Some((class, came)) = self.classes.of(block) else { return 0 };
        log::push_class(out, block, class, came);
        1
    }

    /// The bytes that pinned blocks may take of all disks.
    pub fn most_pinned(&self) -> u64 {
        self.disks.iter().map(|disk| most_pinned(disk)).sum()
    }

    /// Replaces the rules of all classes of blocks.
    pub fn set_classes(&self, rules: BTreeMap<u16, Class>) {
        let most: Vec<u64> = self.disks.iter().map(|disk| most_pinned(disk)).collect();
        self.classes.set(rules, &most);
        self.disks.iter().for_each(|disk| disk.policy.stir());
    }

    /// The bytes that the blocks of a class may take, where a block of `len` bytes is longer than that.
    pub fn quota_below(&self, class: u16, len: usize) -> Option<u64> {
        self.classes.quota_below(class, footprint(u32::try_from(len).unwrap_or(u32::MAX)))
    }

    /// Bytes of the blocks of a class.
    pub fn class_used(&self, class: u16) -> u64 {
        self.classes.used(class)
    }

    /// Makes a block that is here one of `class`, as if it came now; one that is of it already stays as it is.
    pub fn classify(&self, obj: &ObjectRef, index: u32, class: u16) {
        let block = BlockId { object: obj.id, index };
        if self.classes.is_settled(&block, class) {
            return;
        }
        let here = || {
            let shard = self.index.shard(&block.object).read();
            shard.get(&block).filter(|entry| self.serves(entry)).map(|entry| (entry.disk, entry.len))
        };
        let Some((number, len)) = here() else { return };
        let disk = &self.disks[usize::from(number)];
        let pinned = self.classes.is_pinned(&block);
        if class == PLAIN {
            self.classes.gone(&block);
        } else if self.make_way(disk, block, class, footprint(len)) != Kept::Here {
            self.expire(&block);
            return;
        }
        self.classes.arrived(&block);
        if pinned && !self.classes.is_pinned(&block) {
            disk.policy.stir();
        }
        // What leaves is marked before that is logged, so a block that serves now has no removal in the log yet. Of two that
        // change its class at one time the last to write finds what the other one did.
        let record = |out: &mut Vec<u8>| {
            if here().is_none_or(|(now, _)| now != number) {
                return 0;
            }
            if self.push_class(out, &block) == 0 {
                log::push_class(out, &block, PLAIN, 0);
            }
            1
        };
        if let Err(error) = disk.append_with(Vec::with_capacity(64), record) {
            self.write_failed(disk, "writing to the index log", &error);
        }
        let mut shard = self.index.shard(&block.object).write();
        // One that went meanwhile, unless it comes anew and is counted by who writes it.
        if shard.get(&block).is_none() && shard.begin_write(&block) {
            self.classes.gone(&block);
            shard.end_write(&block);
        }
    }

    fn unreserve(&self, disk: &Disk, bytes: u64) {
        disk.used.fetch_sub(bytes, Ordering::Relaxed);
        disk.adjust_free(bytes as i64);
    }

    /// Takes a block out of the index and out of its class: both at once, for it may be written anew right after.
    pub(crate) fn take_out(&self, shard: &mut Shard, block: &BlockId) -> Option<Entry> {
        self.classes.gone(block);
        shard.remove(block)
    }

    /// Takes a block that is no longer in the index out of the books.
    pub(crate) fn uncount(&self, disk: &Disk, len: u32) {
        self.unreserve(disk, footprint(len));
        disk.blocks.fetch_sub(1, Ordering::Relaxed);
        self.stats.blockcache.blocks.sub(1);
        self.stats.blockcache.used_bytes.sub(footprint(len));
    }
}

/// The bytes that pinned blocks may take of a disk.
fn most_pinned(disk: &Disk) -> u64 {
    disk.limit.load(Ordering::Relaxed) / 100 * PINNED_PERCENT
}

/// A hash of a block's name for the policy's memory of what it evicted.
pub fn fingerprint(block: &BlockId) -> u32 {
    ((block.object.0 as u64 ^ u64::from(block.index)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capacity, Store, StoreConfig};
    use spurline_types::Version;

    #[test]
    fn a_block_is_of_its_class_after_a_restart_though_that_was_logged_before_the_block() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let config = StoreConfig {
                block_size: 64 << 10,
                free_space_ratio: 0.0,
                ..StoreConfig::new(vec![dir.path().into()], Capacity::Bytes(1 << 20))
            };
            let store = Store::open(config, Arc::default()).unwrap();
            store.set_classes(BTreeMap::from([(1, Class { pinned: true, ..Class::default() })]));
            store
        };
        let store = open();
        let obj = ObjectRef::new("test:", b"a", Version::new("1"), 4096);
        assert!(store.put(&obj, 0, &[7; 4096]).unwrap());
        // A writer enters its block in the index before the log: from then on it can be classified.
        store.classify(&obj, 0, 1);
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
