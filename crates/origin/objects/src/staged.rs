//! The changed bytes of an open file of a bucket, above the object that they change: in memory as long as the file is small, else
//! in a local file without a name. Bytes that local space is too short for are read from spilled parts. It knows no request and no name.

use crate::byte_ranges::ByteRanges;
use crate::spilled::SpilledPart;
use crate::write_options::BucketWriteOptions;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

/// The piece of a read that a spilled part has, or else the object, from an offset in the one or the other.
pub(crate) type ReadBelow<'a> = dyn Fn(Option<&SpilledPart>, u64, &mut [u8]) -> Result<()> + 'a;

/// Changed bytes lie in memory up to this offset of their file. A local file costs as much as the request that writes a small object.
const SMALL_FILE_MAX: u64 = 128 << 10;
/// Least memory of a small file.
const SMALL_FILE_MIN: u64 = 4 << 10;
/// Memory for all small files, those that were just published included.
const SMALL_FILES_BYTES: u64 = 16 << 20;
/// Space is short while less than a quarter is free, and less than this.
const SHORT_SPACE: u64 = 64 << 20;

/// The space for changed bytes of all files.
pub(crate) struct StagingSpace {
    max: u64,
    used: Mutex<u64>,
    /// Memory of small files.
    small_used: Mutex<u64>,
}

impl StagingSpace {
    /// At most `max` bytes.
    pub fn new(max: u64) -> StagingSpace {
        StagingSpace { max, used: Mutex::new(0), small_used: Mutex::new(0) }
    }

    /// Bytes that are taken.
    pub fn used_bytes(&self) -> u64 {
        *self.used.lock()
    }

    /// Takes memory for a small file, if there is any left.
    fn take_small(&self, bytes: u64) -> bool {
        let mut used = self.small_used.lock();
        let fits = *used + bytes <= SMALL_FILES_BYTES;
        if fits {
            *used += bytes;
        }
        fits
    }

    fn give_back_small(&self, bytes: u64) {
        *self.small_used.lock() -= bytes;
    }

    /// Whether the bytes that are written next should soon make room.
    pub fn is_short(&self, options: &BucketWriteOptions) -> bool {
        let used = *self.used.lock();
        if self.max.saturating_sub(used) < SHORT_SPACE.min(self.max / 4) {
            return true;
        }
        let Some(dir) = &options.staging_dir else { return false };
        statvfs(dir)
            .is_ok_and(|disk| disk.f_bavail * disk.f_frsize < SHORT_SPACE.min(disk.f_blocks * disk.f_frsize / 4))
    }

    /// # Errors
    /// `NoSpace`.
    fn take(&self, bytes: u64) -> Result<()> {
        let mut used = self.used.lock();
        if bytes > self.max.saturating_sub(*used) {
            let why = format!(
                "changed bytes of files lie in memory until the store has them, and {bytes} more do not fit into {} bytes: give \
                 the mount a disk (--cache-dir, --cache-size), or more memory (--buffer-size)",
                self.max
            );
            return Err(Error::new(ErrorKind::NoSpace, why));
        }
        *used += bytes;
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        *self.used.lock() -= bytes;
    }
}

/// Where changed bytes lie, at their offsets in the file.
enum StagedPlace {
    /// With a capacity that is taken from the memory of small files.
    Memory(Vec<u8>),
    File(File),
}

impl StagedPlace {
    /// Gives the space of a range back.
    fn free(&self, range: Range<u64>) -> std::io::Result<()> {
        match self {
            StagedPlace::Memory(_) => Ok(()),
            StagedPlace::File(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(fallocate(file, flags, range.start, range.end - range.start)?)
            }
        }
    }

    fn read(&self, at: u64, piece: &mut [u8]) -> std::io::Result<()> {
        match self {
            StagedPlace::File(file) => file.read_exact_at(piece, at),
            StagedPlace::Memory(bytes) => {
                let at = at as usize;
                piece.copy_from_slice(&bytes[at..at + piece.len()]);
                Ok(())
            }
        }
    }
}

/// Where a byte comes from that is not in the local place.
enum Below<'a> {
    /// From the part that begins at this offset.
    Spilled(u64, &'a SpilledPart),
    Object,
    Zeros,
}

/// The bytes of a file as the mount's programs see them: changed ones here, others in spilled parts, in the object, and zeros.
pub(crate) struct StagedBytes {
    place: StagedPlace,
    options: Arc<BucketWriteOptions>,
    changed: ByteRanges,
    /// Parts with all bytes of the file as they were when the part was spilled, by their offsets.
    spilled: BTreeMap<u64, SpilledPart>,
    len: u64,
    /// The object's bytes count up to here: a file that was cut keeps nothing behind its end.
    object_len: u64,
    space: Arc<StagingSpace>,
}

impl Drop for StagedBytes {
    fn drop(&mut self) {
        self.space.give_back(self.changed.len());
        if let StagedPlace::Memory(bytes) = &self.place {
            self.space.give_back_small(bytes.capacity() as u64);
        }
    }
}

impl StagedBytes {
    /// The bytes of an object of this length, without a change.
    pub fn over_object(options: Arc<BucketWriteOptions>, object_len: u64, space: Arc<StagingSpace>) -> StagedBytes {
        let place = StagedPlace::Memory(Vec::new());
        let spilled = BTreeMap::new();
        StagedBytes { place, options, changed: ByteRanges::default(), spilled, len: object_len, object_len, space }
    }

    /// Makes room for bytes up to `end`: in memory for a small file, else in a local file, which takes over what lies in memory.
    fn make_room(&mut self, end: u64) -> Result<()> {
        let StagedPlace::Memory(bytes) = &mut self.place else { return Ok(()) };
        let held = bytes.capacity() as u64;
        if end <= held {
            return Ok(());
        }
        let wanted = end.next_power_of_two().max(SMALL_FILE_MIN);
        if end <= SMALL_FILE_MAX && self.space.take_small(wanted - held) {
            bytes.reserve_exact(wanted as usize - bytes.len());
            // The allocator may have given more than was requested.
            let more = bytes.capacity() as u64 - wanted;
            *self.space.small_used.lock() += more;
            return Ok(());
        }
        self.use_file().map(drop)
    }

    /// The local file, with the bytes that lay in memory.
    pub fn use_file(&mut self) -> Result<&File> {
        if let StagedPlace::Memory(bytes) = &self.place {
            let file = self.options.new_staging_file()?;
            file.write_all_at(bytes, 0).map_err(|e| staging_error(&e))?;
            self.space.give_back_small(bytes.capacity() as u64);
            self.place = StagedPlace::File(file);
        }
        match &self.place {
            StagedPlace::File(file) => Ok(file),
            StagedPlace::Memory(_) => Err(Error::new(ErrorKind::Invalid, "changed bytes lie in memory")),
        }
    }

    /// The same bytes with the changes that a process before has made, in its local file.
    pub fn continued(
        self,
        file: OwnedFd,
        changed: ByteRanges,
        spilled: BTreeMap<u64, SpilledPart>,
        len: u64,
    ) -> StagedBytes {
        let mut continued = self;
        // Also if this mount has less space now.
        *continued.space.used.lock() += changed.len();
        continued.place = StagedPlace::File(File::from(file));
        continued.changed = changed;
        continued.spilled = spilled;
        continued.len = len;
        continued
    }

    /// How far the bytes of the object count.
    pub fn object_len(&self) -> u64 {
        self.object_len
    }

    /// The ranges that lie here.
    pub fn changed_ranges(&self) -> &ByteRanges {
        &self.changed
    }

    /// The parts that do not lie here, by their offsets.
    pub fn spilled_parts(&self) -> &BTreeMap<u64, SpilledPart> {
        &self.spilled
    }

    /// The part with exactly the bytes of a range, if none of them was changed since.
    pub fn spilled_part(&self, range: Range<u64>) -> Option<&SpilledPart> {
        let part = self.spilled.get(&range.start)?;
        (part.len == range.end - range.start && !self.changed.meets(range)).then_some(part)
    }

    /// The bytes of a range that lie here.
    pub fn local_len(&self, range: Range<u64>) -> u64 {
        range.end - range.start - self.changed.missing_in(range)
    }

    /// A part has all bytes of the file from `start` on, as far as the part goes: the local ones go.
    pub fn note_spilled(&mut self, start: u64, part: SpilledPart) {
        let range = start..start + part.len;
        self.spilled.insert(start, part);
        let freed = self.local_len(range.clone());
        self.changed.remove(range.clone());
        if let StagedPlace::Memory(bytes) = &self.place
            && self.changed.len() == 0
        {
            self.space.give_back_small(bytes.capacity() as u64);
            self.place = StagedPlace::Memory(Vec::new());
        }
        if let Err(error) = self.place.free(range) {
            tracing::warn!("the space of bytes that the store has is not given back: {error}");
        }
        self.space.give_back(freed);
    }

    fn write_place(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset + data.len() as u64;
        self.make_room(end)?;
        match &mut self.place {
            StagedPlace::File(file) => file.write_all_at(data, offset).map_err(|e| staging_error(&e)),
            StagedPlace::Memory(bytes) => {
                if bytes.len() < end as usize {
                    bytes.resize(end as usize, 0);
                }
                bytes[offset as usize..end as usize].copy_from_slice(data);
                Ok(())
            }
        }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// # Errors
    /// The local file system's, as when it is full.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let range = offset..offset + data.len() as u64;
        let added = self.changed.missing_in(range.clone());
        self.space.take(added)?;
        if let Err(error) = self.write_place(offset, data) {
            self.space.give_back(added);
            return Err(error);
        }
        self.len = self.len.max(range.end);
        self.changed.insert(range);
        Ok(())
    }

    /// Cuts the file, or lengthens it by zeros.
    pub fn set_len(&mut self, len: u64) -> Result<()> {
        if len < self.len {
            let before = self.changed.len();
            self.changed.cut(len);
            self.space.give_back(before - self.changed.len());
            self.object_len = self.object_len.min(len);
            self.spilled.split_off(&len);
            if let Some(mut last) = self.spilled.last_entry() {
                let start = *last.key();
                last.get_mut().len = last.get().len.min(len - start);
            }
            // Frees the space. Bytes that are written there later are marked as changed again.
            if let StagedPlace::File(file) = &self.place {
                file.set_len(len).map_err(|e| Error::io("cutting the changed bytes of a file", &e))?;
            }
        }
        self.len = len;
        Ok(())
    }

    /// Whether all bytes of a range were changed.
    pub fn is_changed(&self, range: Range<u64>) -> bool {
        self.changed.covers(range)
    }

    /// The local file, if all bytes lie there.
    pub fn whole_file(&self) -> Option<&File> {
        match &self.place {
            StagedPlace::File(file) if self.is_changed(0..self.len) => Some(file),
            _ => None,
        }
    }

    /// Whether the object has all bytes of a range.
    pub fn is_of_object(&self, range: Range<u64>) -> bool {
        let is_spilled =
            self.spilled.range(..range.end).next_back().is_some_and(|(at, part)| at + part.len > range.start);
        range.end <= self.object_len && !self.changed.meets(range) && !is_spilled
    }

    /// The first bytes that only the object has, at most this many.
    pub fn first_of_object(&self, most: u64) -> Option<Range<u64>> {
        let end = self.object_len.min(self.len);
        let mut at = 0;
        while at < end {
            let (is_changed, piece_end) = self.changed.piece_at(at);
            let (below, below_end) = self.below_at(at);
            if !is_changed && matches!(below, Below::Object) {
                return Some(at..piece_end.min(below_end).min(end).min(at + most));
            }
            at = if is_changed { piece_end } else { piece_end.min(below_end) };
        }
        None
    }

    /// Where a byte comes from that does not lie here, and how far that goes.
    fn below_at(&self, at: u64) -> (Below<'_>, u64) {
        if let Some((start, part)) = self.spilled.range(..=at).next_back()
            && at < start + part.len
        {
            return (Below::Spilled(*start, part), start + part.len);
        }
        let next = self.spilled.range(at..).next().map_or(u64::MAX, |(start, _)| *start);
        if at < self.object_len { (Below::Object, next.min(self.object_len)) } else { (Below::Zeros, next) }
    }

    /// Fills `dst` from `offset`, up to the end of the file; returns the number of bytes.
    ///
    /// # Errors
    /// The local file system's, and those of `read_below`.
    pub fn read(&self, offset: u64, dst: &mut [u8], read_below: &ReadBelow<'_>) -> Result<usize> {
        let count = self.len.saturating_sub(offset).min(dst.len() as u64);
        let end = offset + count;
        let mut at = offset;
        while at < end {
            let (is_changed, piece_end) = self.changed.piece_at(at);
            let (below, below_end) = self.below_at(at);
            let piece_end = if is_changed { piece_end } else { piece_end.min(below_end) }.min(end);
            let piece = &mut dst[(at - offset) as usize..(piece_end - offset) as usize];
            match below {
                _ if is_changed => {
                    self.place.read(at, piece).map_err(|e| Error::io("reading the changed bytes of a file", &e))?;
                }
                Below::Spilled(start, part) => read_below(Some(part), at - start, piece)?,
                Below::Object => read_below(None, at, piece)?,
                Below::Zeros => piece.fill(0),
            }
            at = piece_end;
        }
        Ok(count as usize)
    }
}

fn staging_error(error: &std::io::Error) -> Error {
    let error = Error::io("writing the changed bytes of a file into the cache directory", error);
    if error.kind() != ErrorKind::NoSpace {
        return error;
    }
    let remedy = "free space there, or give the mount a larger disk as the first --cache-dir";
    Error::new(ErrorKind::NoSpace, format!("{}: {remedy}", error.message()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::BucketRequests;
    use crate::requests::tests::options_for;
    use crate::spilled::SpillGroup;
    use proptest::test_runner::{Config, TestRunner};
    use spurline_object_store::SourceLocation;
    use spurline_testkit::S3Server;

    /// Changed bytes above an object of ten bytes, with this space.
    fn staged_over_ten(space: &Arc<StagingSpace>) -> StagedBytes {
        StagedBytes::over_object(Arc::new(BucketWriteOptions::new(0, 0)), 10, Arc::clone(space))
    }

    #[test]
    fn a_small_file_lies_in_memory_until_it_grows_or_there_is_none() {
        let space = Arc::new(StagingSpace::new(u64::MAX));
        let text = |staged: &StagedBytes, at: u64| {
            let mut bytes = [b'?'; 4];
            let len = staged
                .read(at, &mut bytes, &|_, _, piece| {
                    piece.fill(b'o');
                    Ok(())
                })
                .unwrap();
            String::from_utf8(bytes[..len].to_vec()).unwrap().replace('\0', ".")
        };
        let is_small = |staged: &StagedBytes| matches!(staged.place, StagedPlace::Memory(_));
        let mut first = staged_over_ten(&space);
        first.write(12, b"abcd").unwrap();
        assert!(is_small(&first) && *space.small_used.lock() >= SMALL_FILE_MIN);
        first.write(SMALL_FILE_MAX - 2, b"wxyz").unwrap();
        assert!(!is_small(&first) && *space.small_used.lock() == 0);
        for (at, bytes) in [(8, "oo.."), (12, "abcd"), (SMALL_FILE_MAX - 2, "wxyz"), (SMALL_FILE_MAX - 3, ".wxy")] {
            assert_eq!(text(&first, at), bytes);
        }
        let mut small = Vec::new();
        for _ in 0..SMALL_FILES_BYTES / SMALL_FILE_MAX {
            let mut staged = staged_over_ten(&space);
            staged.write(SMALL_FILE_MAX - 1, b"e").unwrap();
            small.push(staged);
        }
        assert!(small.iter().all(is_small));
        let mut last = staged_over_ten(&space);
        last.write(0, b"abcd").unwrap();
        assert!(!is_small(&last));
        assert_eq!((text(&last, 0), text(&last, 4)), ("abcd".into(), "oooo".into()));
        drop(small);
        assert_eq!(*space.small_used.lock(), 0);
        assert_eq!(*space.used.lock(), first.changed.len() + last.changed.len());
    }

    #[test]
    fn changes_lie_over_the_object_and_a_cut_forgets() {
        let object = *b"0123456789";
        let read_object = |_: Option<&SpilledPart>, at: u64, dst: &mut [u8]| {
            dst.copy_from_slice(&object[at as usize..at as usize + dst.len()]);
            Ok(())
        };
        let mut staged = staged_over_ten(&Arc::new(StagingSpace::new(14)));
        let text = |staged: &StagedBytes| {
            let mut bytes = vec![b'?'; 40];
            let len = staged.read(0, &mut bytes, &read_object).unwrap();
            String::from_utf8(bytes[..len].to_vec()).unwrap().replace('\0', ".")
        };
        assert_eq!(text(&staged), "0123456789");
        staged.write(3, b"abc").unwrap();
        assert_eq!(text(&staged), "012abc6789");
        assert!(staged.is_changed(3..6) && staged.is_of_object(6..10) && !staged.is_of_object(5..7));
        staged.set_len(5).unwrap();
        staged.set_len(8).unwrap();
        assert_eq!(text(&staged), "012ab...");
        staged.write(12, b"z").unwrap();
        assert_eq!(text(&staged), "012ab.......z");
        staged.write(1, &[0; 3]).unwrap();
        assert_eq!(text(&staged), "0...b.......z");
        // Zeros between changed bytes take no space: 0 to 5, and 12.
        assert_eq!(staged.write(20, &[1; 10]).unwrap_err().kind(), ErrorKind::NoSpace);
        staged.write(13, &[1; 8]).unwrap();
        staged.set_len(13).unwrap();
        staged.write(13, &[1; 8]).unwrap();
        staged.set_len(13).unwrap();
        let mut few = [0; 2];
        assert_eq!(staged.read(12, &mut few, &read_object).unwrap(), 1);
    }

    /// Writes, cuts and spilled parts of a file above an object of 50 bytes, compared with a list of bytes.
    #[test]
    fn spilled_parts_lie_below_later_changes() {
        const OBJECT: u64 = 50;
        const PART: u64 = 16;
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        let source = SourceLocation::parse("s3://bucket").unwrap();
        let bucket = spurline_object_store::open_bucket(&source, &options_for(&server), Arc::default()).unwrap();
        let requests = Arc::new(BucketRequests::new(bucket, "").unwrap());
        let group = SpillGroup::new(&requests, "");
        let read_below = |part: Option<&SpilledPart>, at: u64, dst: &mut [u8]| {
            let bytes = part.map_or_else(|| vec![b'o'; 50], |part| server.bytes("bucket", part.key()).unwrap());
            dst.copy_from_slice(&bytes[at as usize..at as usize + dst.len()]);
            Ok(())
        };
        let read = |staged: &StagedBytes, range: Range<u64>| {
            let mut bytes = vec![b'?'; (range.end - range.start) as usize];
            let len = staged.read(range.start, &mut bytes, &read_below).unwrap();
            bytes.truncate(len);
            bytes
        };
        let steps = proptest::collection::vec((0..100_u64, 1..40_u64, 0..5), 1..40);
        let ran = TestRunner::new(Config::with_cases(60)).run(&steps, |steps| {
            let space = Arc::new(StagingSpace::new(1 << 20));
            let options = Arc::new(BucketWriteOptions::new(0, 0));
            let mut staged = StagedBytes::over_object(options, OBJECT, Arc::clone(&space));
            let mut model = vec![b'o'; OBJECT as usize];
            if steps.len() % 2 == 0 {
                staged.use_file().unwrap();
            }
            for (number, (at, len, step)) in steps.into_iter().enumerate() {
                let start = at / PART * PART;
                match step {
                    0 => {
                        staged.set_len(at).unwrap();
                        model.resize(at as usize, 0);
                    }
                    1 | 2 if start < staged.len() => {
                        let body = read(&staged, start..staged.len().min(start + PART));
                        let part = requests.run(Arc::clone(&group).store(body.into())).unwrap();
                        staged.note_spilled(start, part);
                    }
                    _ => {
                        let bytes = vec![b'a' + (number % 20) as u8; len as usize];
                        staged.write(at, &bytes).unwrap();
                        model.resize(model.len().max((at + len) as usize), 0);
                        model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
                    }
                }
                proptest::prop_assert_eq!(read(&staged, 0..200), model.clone());
                proptest::prop_assert_eq!(*space.used.lock(), staged.changed.len());
            }
            drop(staged);
            proptest::prop_assert_eq!((*space.used.lock(), *space.small_used.lock()), (0, 0));
            Ok(())
        });
        ran.unwrap();
    }
}
