//! Reading blocks: into the caller's memory, through the thread's scratch, or by handing a file out. Every byte
//! that leaves is checked against its CRC32C, or belongs to a block that was since the store opened.

use crate::crc::GRANULE;
use crate::disk::{Disk, Work};
use crate::index::{Activity, Entry, Index, LEAVING, VERIFIED, WHOLE};
use crate::io::{ALIGN, IoBuf, OpenFile, Target, is_own};
use crate::layout;
use crate::scratch::{self, BOUNCE};
use crate::store::Core;
use spurline_types::{BlockId, Error, ErrorKind, ObjectId, ObjectRef, Result};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How a read ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The bytes are in the buffer, and right.
    Hit,
    /// The block is not here, its disk is not in use, or it had to be dropped. The buffer's bytes mean nothing.
    Miss,
    /// The disk missed its deadline and may still write into the buffer: [`IoBuf::keep`] has taken it.
    Lost,
}

/// Where a block was when its read began.
struct Place {
    block: BlockId,
    disk: u8,
    flags: u8,
    generation: u16,
    len: usize,
}

/// Keeps eviction away from an object's files for as long as it lives.
struct Pin {
    index: Arc<Index>,
    object: ObjectId,
    whole: bool,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut shard = self.index.shard(&self.object).write();
        shard.act(&self.object, |a: &mut Activity| {
            a.pins = a.pins.saturating_sub(1);
            a.whole = a.whole.saturating_sub(u32::from(self.whole));
        });
    }
}

/// A cached file with all its blocks, checked whole, that eviction leaves alone while this lives.
pub struct PinnedFile {
    /// The file, open for reading through the page cache; exactly as long as the object.
    pub file: File,
    pin: Pin,
}

impl PinnedFile {
    /// Closes the file; eviction leaves it alone for as long as the answer lives.
    pub fn close(self) -> impl Send + Sync + 'static {
        self.pin
    }
}

/// A range of a cached file for `sendfile` or `splice`, that eviction leaves alone while this lives.
pub struct FileRange {
    file: Arc<OpenFile>,
    /// Where the range begins in the file.
    pub offset: u64,
    _pin: Pin,
}

impl FileRange {
    /// The file.
    pub fn file(&self) -> &File {
        &self.file.file
    }
}

impl Core {
    fn range_error(&self, obj: &ObjectRef, index: u32, range: &Range<usize>, len: usize) -> Error {
        Error::new(
            ErrorKind::Invalid,
            format!("bytes {range:?} of block {index} of {} ({len} bytes long) can't be read into that buffer", obj.id),
        )
    }

    /// Finds a block that can be read, notes the use, and copies the checksums of `granules` to `sums`.
    fn locate(
        &self,
        obj: &ObjectRef,
        index: u32,
        len: usize,
        range: &Range<usize>,
        sums: &mut Vec<u32>,
    ) -> Option<Place> {
        let block = BlockId { object: obj.id, index };
        let shard = self.index.shard(&obj.id).read();
        let entry = shard.get(&block)?;
        if entry.len as usize != len || !self.serves(entry) {
            return None;
        }
        sums.clear();
        sums.extend_from_slice(entry.crcs.get(range.start / GRANULE..range.end.div_ceil(GRANULE))?);
        let Entry { disk, flags, generation, slot, .. } = *entry;
        self.disks[usize::from(disk)].policy.touch(slot, self.now());
        Some(Place { block, disk, flags, generation, len })
    }

    /// Reads `range` of a block into the first bytes of `buf`, straight if the range starts and ends on granules (or
    /// at the block's end) and the buffer suits O_DIRECT, else by way of the thread's scratch.
    ///
    /// # Errors
    /// `Invalid` when the range is not inside the block or does not fit the buffer. A failing disk is no error:
    /// it is a miss, and the disk is gone round from then on.
    pub fn read<B: IoBuf>(&self, obj: &ObjectRef, index: u32, range: Range<usize>, buf: &mut B) -> Result<Outcome> {
        let len = obj.block_len(index, u64::from(self.config.block_size));
        let (ptr, capacity) = buf.parts();
        if range.start >= range.end || range.end > len || range.len() > capacity {
            return Err(self.range_error(obj, index, &range, len));
        }
        let whole_granules =
            range.start.is_multiple_of(GRANULE) && (range.end.is_multiple_of(GRANULE) || range.end == len);
        let suits = (ptr as usize).is_multiple_of(ALIGN) && range.len().next_multiple_of(ALIGN) <= capacity;
        if !whole_granules || !suits {
            // SAFETY: `parts` names `capacity` bytes that are this call's alone until `buf` is used again, and
            // `get` writes to no memory but this slice.
            let dst = unsafe { std::slice::from_raw_parts_mut(ptr, range.len()) };
            return Ok(if self.get(obj, index, range, dst)? { Outcome::Hit } else { Outcome::Miss });
        }
        scratch::with(|scratch| {
            let Some(place) = self.locate(obj, index, len, &range, &mut scratch.sums) else { return Ok(Outcome::Miss) };
            let (want, outcome) = (range.len(), self.read_granules(&place, range, buf, &scratch.sums));
            if outcome == Outcome::Hit {
                self.stats.blockcache.disk_hit_bytes.add(want as u64);
            }
            Ok(outcome)
        })
    }

    /// Copies `range` of a block to `dst`, which is as long; whether the block was here. Reads the granules the range
    /// touches through the thread's scratch.
    ///
    /// # Errors
    /// `Invalid` when the range is not inside the block or `dst` has another length.
    pub fn get(&self, obj: &ObjectRef, index: u32, range: Range<usize>, dst: &mut [u8]) -> Result<bool> {
        let len = obj.block_len(index, u64::from(self.config.block_size));
        if range.start >= range.end || range.end > len || range.len() != dst.len() {
            return Err(self.range_error(obj, index, &range, len));
        }
        scratch::with(|scratch| {
            let mut at = range.start;
            while at < range.end {
                let start = at / GRANULE * GRANULE;
                let end = range.end.next_multiple_of(GRANULE).min(len).min(start + BOUNCE);
                let (bounce, sums) = scratch.bounce();
                let Some(place) = self.locate(obj, index, len, &(start..end), sums) else { return Ok(false) };
                if self.read_granules(&place, start..end, bounce, sums) != Outcome::Hit {
                    return Ok(false);
                }
                self.stats.blockcache.disk_hit_bytes.add((end - start) as u64);
                let upto = end.min(range.end);
                dst[at - range.start..upto - range.start].copy_from_slice(&scratch.bytes()[at - start..upto - start]);
                at = upto;
            }
            Ok(true)
        })
    }

    /// Reads whole granules and checks them while others are still on their way.
    fn read_granules<B: IoBuf>(&self, place: &Place, range: Range<usize>, buf: &mut B, sums: &[u32]) -> Outcome {
        let began = Instant::now();
        let disk = &self.disks[usize::from(place.disk)];
        let key = self.file_key(place.block.object, place.block.index, place.flags & WHOLE != 0);
        let file = match disk.file(&key) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.drop_wrong(disk, place, "its file is gone");
                return Outcome::Miss;
            }
            Err(error) => {
                self.unreadable(disk, place, "opening a data file", &error);
                return Outcome::Miss;
            }
        };
        let want = range.len();
        let (ptr, capacity) = buf.parts();
        let padded = if file.direct { want.next_multiple_of(ALIGN).min(capacity) } else { want };
        let (mut checked, mut wrong) = (0, false);
        let mut check = |part: Range<usize>| {
            let mut at = part.start;
            while at < want {
                let end = (at + GRANULE).min(want);
                if end > part.end {
                    break;
                }
                // SAFETY: the part was read and nobody writes it any more; `want` lies inside the buffer.
                let granule = unsafe { std::slice::from_raw_parts(ptr.add(at), end - at) };
                wrong |= sums.get(at / GRANULE) != Some(&crc32c::crc32c(granule));
                checked += end - at;
                at = end;
            }
        };
        let mut kept = false;
        let mut keep = || {
            kept = true;
            buf.keep()
        };
        let mut target = Target { ptr, len: padded, keep: &mut keep };
        let offset = u64::from(place.block.index) * u64::from(self.config.block_size) + range.start as u64;
        let result = disk.io.read(&file, offset, &mut target, self.config.read_timeout, &mut check);
        let stats = &self.stats.blockcache;
        stats.read_ops.add(1);
        stats.read_us.add_us(began.elapsed());
        match result {
            Ok(_) if checked == want && !wrong => {
                if want == place.len && place.flags & VERIFIED == 0 {
                    self.mark_verified(place);
                }
                Outcome::Hit
            }
            Ok(n) => {
                self.drop_wrong(disk, place, if n < want { "its file is too short" } else { "its checksum is wrong" });
                Outcome::Miss
            }
            Err(error) => {
                self.unreadable(disk, place, "reading a block", &error);
                if kept { Outcome::Lost } else { Outcome::Miss }
            }
        }
    }

    fn mark_verified(&self, place: &Place) {
        let mut shard = self.index.shard(&place.block.object).write();
        if let Some(entry) = shard.get_mut(&place.block).filter(|e| e.generation == place.generation) {
            entry.flags |= VERIFIED;
        }
    }

    /// Drops a block whose bytes are wrong.
    fn drop_wrong(&self, disk: &Disk, place: &Place, why: &str) {
        if self.drop_block(disk, place, why) {
            self.stats.blockcache.checksum_errors.add(1);
        }
    }

    /// Notes that a block could not be read, and drops it when that is most likely its own fault: one in a bad sector would
    /// take the whole disk out of use again and again, and never be written anew. A disk that fails as a whole loses the
    /// few blocks by which that is found out.
    fn unreadable(&self, disk: &Disk, place: &Place, what: &str, error: &io::Error) {
        let put_out = disk.failed(what, error);
        let its_own = if error.kind() == io::ErrorKind::TimedOut {
            // One that is late says nothing yet; the same one again does.
            let block = Some((place.block, place.generation));
            put_out && std::mem::replace(&mut *disk.put_out_by.lock(), block) == block
        } else {
            !is_own(error) && disk.health.usable()
        };
        if its_own {
            self.drop_block(disk, place, &format!("{what}: {error}"));
        }
    }

    /// Drops a block, unless it was evicted or written anew while it was read: then what was read is no wonder. Whether it
    /// did.
    fn drop_block(&self, disk: &Disk, place: &Place, why: &str) -> bool {
        let mut shard = self.index.shard(&place.block.object).write();
        let Some(entry) = shard
            .get_mut(&place.block)
            .filter(|e| e.generation == place.generation && e.disk == place.disk && e.flags & LEAVING == 0)
        else {
            return false;
        };
        entry.flags |= LEAVING;
        drop(shard);
        tracing::warn!(
            "cache disk {}: block {} of {} is dropped: {why}; it will be fetched again",
            disk.root.display(),
            place.block.index,
            place.block.object
        );
        disk.ask(Work::Discard(place.block));
        true
    }

    /// Pins an object if `fit` holds for its blocks; checked and pinned under one lock. Nobody writes to one that is pinned
    /// `whole`.
    fn pin(&self, object: &ObjectId, whole: bool, fit: impl FnOnce(&crate::index::Shard) -> bool) -> Option<Pin> {
        let mut shard = self.index.shard(object).write();
        if !fit(&shard) {
            return None;
        }
        shard.act(object, |a| {
            a.pins += 1;
            a.whole += u32::from(whole);
        });
        Some(Pin { index: Arc::clone(&self.index), object: *object, whole })
    }

    /// The one file of an object all of whose blocks are here, to hand to the kernel. Blocks not checked since the
    /// store opened are read and checked first, which takes as long as reading them does. `None` when a block is
    /// missing or wrong, the blocks are not in one file, or the disk is not in use. No step of it waits for the disk longer
    /// than a read may take.
    pub fn whole_file(&self, obj: &ObjectRef) -> Option<PinnedFile> {
        self.pinned_file(obj, true)
    }

    /// As [`Core::whole_file`], but `None` where a block would have to be checked first. Reads nothing.
    pub fn whole_file_if_checked(&self, obj: &ObjectRef) -> Option<PinnedFile> {
        self.pinned_file(obj, false)
    }

    fn pinned_file(&self, obj: &ObjectRef, check: bool) -> Option<PinnedFile> {
        let block_size = u64::from(self.config.block_size);
        let blocks = u32::try_from(obj.blocks(block_size)).ok().filter(|n| *n > 0)?;
        let mut disk = None;
        let pin = self.pin(&obj.id, true, |shard| {
            let mut n = 0;
            let one_file = shard.all(&obj.id, |index, entry| {
                n += 1;
                entry.flags & WHOLE != 0
                    && (check || entry.flags & VERIFIED != 0)
                    && *disk.get_or_insert(entry.disk) == entry.disk
                    && self.serves(entry)
                    && entry.len as usize == obj.block_len(index, block_size)
            });
            one_file && n == blocks
        })?;
        let disk = &self.disks[usize::from(disk?)];
        for index in 0..blocks {
            if check && !self.verify(obj, index) {
                return None;
            }
        }
        let key = self.file_key(obj.id, 0, true);
        let open = || -> io::Result<File> {
            let file = disk.file(&key)?;
            // O_DIRECT writes end on 4096; the kernel must see the object's own length.
            if file.file.metadata()?.len() != obj.size {
                disk.io.truncate(&file, obj.size, self.config.read_timeout)?;
            }
            disk.io.open_to_share(&layout::data_path(&disk.root, &key), self.config.read_timeout)
        };
        match open() {
            Ok(file) => Some(PinnedFile { file, pin }),
            Err(error) => {
                disk.failed("opening a whole file", &error);
                None
            }
        }
    }

    /// Reads and checks a block unless that was done since the store opened.
    fn verify(&self, obj: &ObjectRef, index: u32) -> bool {
        let block = BlockId { object: obj.id, index };
        let len = obj.block_len(index, u64::from(self.config.block_size));
        let flags = self.index.shard(&obj.id).read().get(&block).map(|e| e.flags);
        if flags.is_none_or(|f| f & LEAVING != 0) {
            return false;
        }
        if flags.is_some_and(|f| f & VERIFIED != 0) {
            return true;
        }
        scratch::with(|scratch| {
            let mut at = 0;
            let mut first = None;
            while at < len {
                let end = (at + BOUNCE).min(len);
                let (bounce, sums) = scratch.bounce();
                let Some(place) = self.locate(obj, index, len, &(at..end), sums) else { return false };
                // The block must be the same from its first byte to its last.
                if *first.get_or_insert(place.generation) != place.generation
                    || self.read_granules(&place, at..end, bounce, sums) != Outcome::Hit
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

    /// A range of a block as a file and an offset, for `sendfile` and `splice`; only in the modes that read through
    /// the page cache, and only when the whole block was checked since the store opened.
    pub fn file_range(&self, obj: &ObjectRef, index: u32, range: &Range<usize>) -> Option<FileRange> {
        let block = BlockId { object: obj.id, index };
        let len = obj.block_len(index, u64::from(self.config.block_size));
        let mut place = None;
        let pin = self.pin(&obj.id, false, |shard| {
            place = shard
                .get(&block)
                .filter(|e| e.flags & VERIFIED != 0 && self.serves(e) && e.len as usize == len && range.end <= len)
                .map(|e| (e.disk, e.flags, e.slot));
            place.is_some()
        })?;
        let (disk, flags, slot) = place?;
        let disk = &self.disks[usize::from(disk)];
        disk.policy.touch(slot, self.now());
        let file = disk.file(&self.file_key(obj.id, index, flags & WHOLE != 0)).ok().filter(|f| !f.direct)?;
        self.stats.blockcache.disk_hit_bytes.add(range.len() as u64);
        let offset = u64::from(index) * u64::from(self.config.block_size) + range.start as u64;
        Some(FileRange { file, offset, _pin: pin })
    }

    /// Bytes of all blocks here.
    pub fn used_bytes(&self) -> u64 {
        self.disks.iter().map(|d| d.used.load(Ordering::Relaxed)).sum()
    }
}
