//! Reads blocks: into the caller's memory, through the thread's scratch buffer, or by handing out a file. Every byte is checked
//! against a CRC32C, or belongs to a block that was checked since the store opened.

use crate::block_state::BlockState;
use crate::crc::GRANULE;
use crate::disk::{CacheDisk, DiskWork};
use crate::files::FileKey;
use crate::index::{BlockEntry, BlockIndex, ObjectActivity, WHOLE};
use crate::io::{ALIGN, DataFile, IoBuf, ReadTarget, is_process_error};
use crate::layout;
use crate::scratch::{self, SCRATCH_BYTES};
use crate::store::StoreCore;
use spurline_types::{BlockId, Error, ErrorKind, ObjectId, ObjectRef, Result};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How a read ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The bytes are in the buffer and verified.
    Hit,
    /// The block is absent, the disk is not usable, or the block was dropped. The buffer's contents are undefined.
    Miss,
    /// The disk missed its deadline and may still write into the buffer, which [`IoBuf::keep_alive`] has taken.
    Lost,
}

/// The position of a block when the read began.
struct BlockPlace {
    block: BlockId,
    disk: u8,
    flags: u8,
    state: BlockState,
    generation: u16,
    len: usize,
}

/// Protects an object's files from eviction until dropped.
struct ObjectPin {
    index: Arc<BlockIndex>,
    object: ObjectId,
    whole: bool,
}

impl Drop for ObjectPin {
    fn drop(&mut self) {
        let mut shard = self.index.shard_of(&self.object).write();
        shard.update_activity(&self.object, |a: &mut ObjectActivity| {
            a.pins = a.pins.saturating_sub(1);
            a.whole = a.whole.saturating_sub(u32::from(self.whole));
        });
    }
}

/// A fully verified cached file that is protected from eviction while this lives.
pub struct PinnedFile {
    /// The file, open for reading through the page cache; exactly as long as the object.
    pub file: File,
    pin: ObjectPin,
}

impl PinnedFile {
    /// Closes the file; the returned value continues the protection from eviction.
    pub fn close(self) -> impl Send + Sync + 'static {
        self.pin
    }
}

/// A range of a cached file for `sendfile` or `splice`, protected from eviction while this lives.
pub struct FileRange {
    file: Arc<DataFile>,
    /// Where the range begins in the file.
    pub offset: u64,
    _pin: ObjectPin,
}

impl FileRange {
    /// The file.
    pub fn file(&self) -> &File {
        &self.file.file
    }
}

impl StoreCore {
    fn range_error(&self, obj: &ObjectRef, index: u32, range: &Range<usize>, len: usize) -> Error {
        Error::new(
            ErrorKind::Invalid,
            format!("bytes {range:?} of block {index} of {} ({len} bytes long) do not fit the given buffer", obj.id),
        )
    }

    /// Finds a readable block, notes the use, and copies the checksums of the granules in `range` to `sums`.
    fn locate_block(
        &self,
        obj: &ObjectRef,
        index: u32,
        len: usize,
        range: &Range<usize>,
        sums: &mut Vec<u32>,
    ) -> Option<BlockPlace> {
        let block = BlockId { object: obj.id, index };
        let shard = self.index.shard_of(&obj.id).read();
        let entry = shard.get(&block)?;
        if entry.len as usize != len || !self.is_served(entry) {
            return None;
        }
        sums.clear();
        sums.extend_from_slice(entry.crcs.get(range.start / GRANULE..range.end.div_ceil(GRANULE))?);
        let BlockEntry { disk, flags, generation, slot, .. } = *entry;
        self.disks[usize::from(disk)].policy.touch(slot, self.policy_time());
        Some(BlockPlace { block, disk, flags, state: entry.state(), generation, len })
    }

    /// Reads `range` of a block into the first bytes of `buf`. Reads directly if the range starts and ends on
    /// granules (or at the block's end) and the buffer suits O_DIRECT, else through the thread's scratch buffer.
    ///
    /// # Errors
    /// `Invalid` when the range is outside the block or does not fit the buffer. A failing disk is no error: the read
    /// is a miss, and the disk is not used from then on.
    pub fn read<B: IoBuf>(&self, obj: &ObjectRef, index: u32, range: Range<usize>, buf: &mut B) -> Result<ReadOutcome> {
        let len = obj.block_len(index, u64::from(self.config.block_size));
        let (ptr, capacity) = buf.raw_parts();
        if range.start >= range.end || range.end > len || range.len() > capacity {
            return Err(self.range_error(obj, index, &range, len));
        }
        let whole_granules =
            range.start.is_multiple_of(GRANULE) && (range.end.is_multiple_of(GRANULE) || range.end == len);
        let suits = (ptr as usize).is_multiple_of(ALIGN) && range.len().next_multiple_of(ALIGN) <= capacity;
        if !whole_granules || !suits {
            // SAFETY: `raw_parts` names `capacity` bytes that belong to this call until `buf` is used again, and
            // `read_copied` writes to no memory but this slice.
            let dst = unsafe { std::slice::from_raw_parts_mut(ptr, range.len()) };
            return Ok(if self.read_copied(obj, index, range, dst)? { ReadOutcome::Hit } else { ReadOutcome::Miss });
        }
        scratch::with_scratch(|scratch| {
            let Some(place) = self.locate_block(obj, index, len, &range, &mut scratch.sums) else {
                return Ok(ReadOutcome::Miss);
            };
            let want = range.len();
            let outcome = self.read_granules(&place, range, buf, &scratch.sums);
            if outcome == ReadOutcome::Hit {
                self.stats.blockcache.disk_hit_bytes.add(want as u64);
            }
            Ok(outcome)
        })
    }

    /// Copies `range` of a block to `dst`, which has the same length; returns whether the block was present. Reads
    /// the touched granules through the thread's scratch buffer.
    ///
    /// # Errors
    /// `Invalid` when the range is outside the block or `dst` has another length.
    pub fn read_copied(&self, obj: &ObjectRef, index: u32, range: Range<usize>, dst: &mut [u8]) -> Result<bool> {
        let len = obj.block_len(index, u64::from(self.config.block_size));
        if range.start >= range.end || range.end > len || range.len() != dst.len() {
            return Err(self.range_error(obj, index, &range, len));
        }
        scratch::with_scratch(|scratch| {
            let mut at = range.start;
            while at < range.end {
                let start = at / GRANULE * GRANULE;
                let end = range.end.next_multiple_of(GRANULE).min(len).min(start + SCRATCH_BYTES);
                let (bounce, sums) = scratch.bounce();
                let Some(place) = self.locate_block(obj, index, len, &(start..end), sums) else { return Ok(false) };
                if self.read_granules(&place, start..end, bounce, sums) != ReadOutcome::Hit {
                    return Ok(false);
                }
                self.stats.blockcache.disk_hit_bytes.add((end - start) as u64);
                let upto = end.min(range.end);
                dst[at - range.start..upto - range.start]
                    .copy_from_slice(&scratch.bounce_bytes()[at - start..upto - start]);
                at = upto;
            }
            Ok(true)
        })
    }

    /// Reads whole granules, and checks the first while others are still being read.
    fn read_granules<B: IoBuf>(
        &self,
        place: &BlockPlace,
        range: Range<usize>,
        buf: &mut B,
        sums: &[u32],
    ) -> ReadOutcome {
        let began = Instant::now();
        let disk = &self.disks[usize::from(place.disk)];
        let key = self.file_key(place.block.object, place.block.index, place.flags & WHOLE != 0);
        let file = match disk.open_file(&key) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.drop_missing(disk, place, "its file was removed");
                return ReadOutcome::Miss;
            }
            Err(error) => {
                self.note_unreadable(disk, place, "opening a data file", &error);
                return ReadOutcome::Miss;
            }
        };
        let want = range.len();
        let (ptr, capacity) = buf.raw_parts();
        let padded = if file.direct { want.next_multiple_of(ALIGN).min(capacity) } else { want };
        let mut checked = 0;
        let mut wrong = false;
        let mut check = |part: Range<usize>| {
            let mut at = part.start;
            while at < want {
                let end = (at + GRANULE).min(want);
                if end > part.end {
                    break;
                }
                // SAFETY: this part has been read and has no other writer; `want` lies inside the buffer.
                let granule = unsafe { std::slice::from_raw_parts(ptr.add(at), end - at) };
                wrong |= sums.get(at / GRANULE) != Some(&crc32c::crc32c(granule));
                checked += end - at;
                at = end;
            }
        };
        let mut kept = false;
        let mut keep = || {
            kept = true;
            buf.keep_alive()
        };
        let mut target = ReadTarget { ptr, len: padded, keep: &mut keep };
        let offset = u64::from(place.block.index) * u64::from(self.config.block_size) + range.start as u64;
        let result = disk.io.read(&file, offset, &mut target, self.config.read_timeout, &mut check);
        let stats = &self.stats.blockcache;
        stats.read_ops.add(1);
        stats.read_us.add_us(began.elapsed());
        match result {
            Ok(_) if checked == want && !wrong => {
                if want == place.len && place.state == BlockState::Stored {
                    self.mark_verified(place);
                }
                ReadOutcome::Hit
            }
            Ok(n) if n < want => {
                self.drop_missing(disk, place, "its file is too short");
                ReadOutcome::Miss
            }
            Ok(_) => {
                self.drop_corrupt(disk, place, "its checksum is wrong");
                ReadOutcome::Miss
            }
            Err(error) => {
                self.note_unreadable(disk, place, "reading a block", &error);
                if kept { ReadOutcome::Lost } else { ReadOutcome::Miss }
            }
        }
    }

    fn mark_verified(&self, place: &BlockPlace) {
        let mut shard = self.index.shard_of(&place.block.object).write();
        if shard.get(&place.block).is_some_and(|e| e.generation == place.generation) {
            shard.verified(&place.block);
        }
    }

    /// Drops a block whose bytes are wrong.
    fn drop_corrupt(&self, disk: &CacheDisk, place: &BlockPlace, why: &str) {
        if self.drop_block(disk, place, why) {
            self.stats.blockcache.checksum_errors.add(1);
        }
    }

    /// Drops a block whose bytes were removed from the cache directory. That is not the disk's fault.
    fn drop_missing(&self, disk: &CacheDisk, place: &BlockPlace, why: &str) {
        if self.drop_block(disk, place, why) {
            self.stats.blockcache.missing_blocks.add(1);
        }
    }

    /// Drops the blocks of a file that was removed from the cache directory.
    pub(crate) fn drop_removed_file(&self, disk: &CacheDisk, key: &FileKey) {
        let mut shard = self.index.shard_of(&key.object).write();
        let mut found = Vec::new();
        shard.blocks_within(&key.object, self.index_range(key), |index, entry| {
            let whole = entry.flags & WHOLE != 0;
            if entry.disk == disk.number && entry.is_readable() && self.file_key(key.object, index, whole) == *key {
                found.push(BlockId { object: key.object, index });
            }
            true
        });
        found.retain(|block| shard.begin_removal(block).is_some());
        drop(shard);
        if found.is_empty() {
            return;
        }
        tracing::warn!(
            "cache disk {}: the file of {} was removed; its {} blocks are dropped and will be fetched again",
            disk.root.display(),
            key.object,
            found.len()
        );
        self.stats.blockcache.missing_blocks.add(found.len() as u64);
        found.into_iter().for_each(|block| disk.enqueue(DiskWork::Discard(block)));
    }

    /// Handles a block that could not be read, and drops the block when the fault is most likely there. Otherwise a block in a
    /// bad sector would make the whole disk unusable again and again, and never be rewritten. A disk that fails as a whole loses
    /// only the few blocks that reveal the failure.
    fn note_unreadable(&self, disk: &CacheDisk, place: &BlockPlace, what: &str, error: &io::Error) {
        let put_out = disk.note_failure(what, error);
        let its_own = if error.kind() == io::ErrorKind::TimedOut {
            // A single late read proves nothing about the block; the same block late again does.
            let block = Some((place.block, place.generation));
            put_out && std::mem::replace(&mut *disk.disabled_by.lock(), block) == block
        } else {
            !is_process_error(error) && disk.health.usable()
        };
        if its_own {
            self.drop_block(disk, place, &format!("{what}: {error}"));
        }
    }

    /// Drops a block, unless the block was evicted or rewritten during the read. Returns whether the block was dropped.
    fn drop_block(&self, disk: &CacheDisk, place: &BlockPlace, why: &str) -> bool {
        let mut shard = self.index.shard_of(&place.block.object).write();
        let entry = shard.get(&place.block);
        let is_same = entry.is_some_and(|entry| entry.generation == place.generation && entry.disk == place.disk);
        if !is_same || shard.begin_removal(&place.block).is_none() {
            return false;
        }
        drop(shard);
        tracing::warn!(
            "cache disk {}: block {} of {} is dropped: {why}; it will be fetched again",
            disk.root.display(),
            place.block.index,
            place.block.object
        );
        disk.enqueue(DiskWork::Discard(place.block));
        true
    }

    /// Pins an object if `fit` holds for the blocks; checks and pins under the same lock. An object pinned `whole` is not written
    /// to.
    fn pin_object(
        &self,
        object: &ObjectId,
        whole: bool,
        fit: impl FnOnce(&crate::index::IndexShard) -> bool,
    ) -> Option<ObjectPin> {
        let mut shard = self.index.shard_of(object).write();
        if !fit(&shard) {
            return None;
        }
        shard.update_activity(object, |a| {
            a.pins += 1;
            a.whole += u32::from(whole);
        });
        Some(ObjectPin { index: Arc::clone(&self.index), object: *object, whole })
    }

    /// The single file of an object whose blocks are all present, for the kernel to read. Blocks not verified since the store
    /// opened are read and checked first, which takes as long as a read. `None` when a block is missing or wrong, the blocks are
    /// not in a single file, or the disk is not usable. No step waits for the disk longer than the read timeout.
    pub fn whole_file(&self, obj: &ObjectRef) -> Option<PinnedFile> {
        self.pinned_file(obj, true)
    }

    /// As [`StoreCore::whole_file`], but `None` when a block would have to be verified first. Reads nothing.
    pub fn whole_file_if_checked(&self, obj: &ObjectRef) -> Option<PinnedFile> {
        self.pinned_file(obj, false)
    }

    fn pinned_file(&self, obj: &ObjectRef, check: bool) -> Option<PinnedFile> {
        let block_size = u64::from(self.config.block_size);
        let blocks = u32::try_from(obj.block_count(block_size)).ok().filter(|n| *n > 0)?;
        let mut disk = None;
        let pin = self.pin_object(&obj.id, true, |shard| {
            let mut n = 0;
            let one_file = shard.all_blocks(&obj.id, |index, entry| {
                n += 1;
                entry.flags & WHOLE != 0
                    && (check || entry.state() == BlockState::Verified)
                    && *disk.get_or_insert(entry.disk) == entry.disk
                    && self.is_served(entry)
                    && entry.len as usize == obj.block_len(index, block_size)
            });
            one_file && n == blocks
        })?;
        let disk = &self.disks[usize::from(disk?)];
        for index in 0..blocks {
            if check && !self.verify_block(obj, index) {
                return None;
            }
        }
        let key = self.file_key(obj.id, 0, true);
        let open = || -> io::Result<File> {
            let file = disk.open_file(&key)?;
            // O_DIRECT writes end on a multiple of 4096; the kernel must see the object's own length.
            let len = file.file.metadata()?.len();
            if len < obj.size {
                return Err(io::ErrorKind::NotFound.into());
            }
            if len > obj.size {
                disk.io.truncate(&file, obj.size, self.config.read_timeout)?;
            }
            disk.io.open_to_share(&layout::data_path(&disk.root, &key), self.config.read_timeout)
        };
        match open() {
            Ok(file) => Some(PinnedFile { file, pin }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // The open descriptor of a removed file would show the bytes until closed.
                disk.files.remove(&key);
                self.drop_removed_file(disk, &key);
                None
            }
            Err(error) => {
                disk.note_failure("opening a whole file", &error);
                None
            }
        }
    }

    /// Reads and checks a block unless that was done since the store opened.
    fn verify_block(&self, obj: &ObjectRef, index: u32) -> bool {
        let block = BlockId { object: obj.id, index };
        let len = obj.block_len(index, u64::from(self.config.block_size));
        let state = self.index.shard_of(&obj.id).read().state(&block);
        if !state.is_readable() || state == BlockState::Verified {
            return state == BlockState::Verified;
        }
        scratch::with_scratch(|scratch| {
            let mut at = 0;
            let mut first = None;
            while at < len {
                let end = (at + SCRATCH_BYTES).min(len);
                let (bounce, sums) = scratch.bounce();
                let Some(place) = self.locate_block(obj, index, len, &(at..end), sums) else { return false };
                // The block must be the same from the first byte to the last.
                if *first.get_or_insert(place.generation) != place.generation
                    || self.read_granules(&place, at..end, bounce, sums) != ReadOutcome::Hit
                {
                    return false;
                }
                at = end;
                if at == len {
                    self.mark_verified(&place);
                }
            }
            true
        })
    }

    /// A range of a block as file and offset, for `sendfile` and `splice`. Only in the modes that read through the
    /// page cache, and only when the whole block was verified since the store opened.
    pub fn file_range(&self, obj: &ObjectRef, index: u32, range: &Range<usize>) -> Option<FileRange> {
        let block = BlockId { object: obj.id, index };
        let len = obj.block_len(index, u64::from(self.config.block_size));
        let mut place = None;
        let pin = self.pin_object(&obj.id, false, |shard| {
            place = shard
                .get(&block)
                .filter(|e| {
                    e.state() == BlockState::Verified && self.is_served(e) && e.len as usize == len && range.end <= len
                })
                .map(|e| (e.disk, e.flags, e.slot));
            place.is_some()
        })?;
        let (disk, flags, slot) = place?;
        let disk = &self.disks[usize::from(disk)];
        disk.policy.touch(slot, self.policy_time());
        let file = disk.open_file(&self.file_key(obj.id, index, flags & WHOLE != 0)).ok().filter(|f| !f.direct)?;
        self.stats.blockcache.disk_hit_bytes.add(range.len() as u64);
        let offset = u64::from(index) * u64::from(self.config.block_size) + range.start as u64;
        Some(FileRange { file, offset, _pin: pin })
    }

    /// Bytes of all blocks.
    pub fn used_bytes(&self) -> u64 {
        self.disks.iter().map(|d| d.used.load(Ordering::Relaxed)).sum()
    }
}
