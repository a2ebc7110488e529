//! Reads of many ranges of many files into memory of the program, as one batch. Each range is cut into pieces that end with a block,
//! so that the pieces of one range run in parallel too.

use crate::client::{interruptible, wait_step};
use crate::failure::CallFailure;
use crate::open_source::OpenSource;
use crate::parallel::{Batch, BatchWork, ItemWait};
use parking_lot::Mutex;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use rustix::io::Errno;
use spurline_types::{FileKind, ObjectRef, Version};
use spurline_volume::{ReadData, Volume};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// A range, as a tuple of Python.
#[derive(FromPyObject)]
pub(crate) struct RangeTuple(
    /// Path below the source.
    Vec<u8>,
    /// The version that the bytes must have; without a version the path is looked up, and the range is read in one piece.
    Option<String>,
    /// Length of the file at that version.
    u64,
    /// Bytes from the start of the file.
    u64,
    /// Bytes to read.
    usize,
    /// Number of the buffer.
    usize,
    /// Bytes from the start of the buffer.
    usize,
);

/// The file of a range.
enum RangeSource {
    Pinned(ObjectRef),
    Path(Vec<u8>),
}

struct ReadRange {
    source: RangeSource,
    /// Pieces that have not ended.
    pieces_left: AtomicUsize,
    /// Bytes that were read; fewer than wanted mean the end of the file.
    read: AtomicUsize,
    failure: Mutex<Option<CallFailure>>,
}

/// Destination of a piece in memory that the batch's owner keeps.
#[derive(Clone, Copy)]
struct PieceMemory(*mut u8);

// SAFETY: the pointer is used by the one thread that runs the step, while the owner of the batch keeps the buffer.
unsafe impl Send for PieceMemory {}
// SAFETY: as above.
unsafe impl Sync for PieceMemory {}

/// A part of a range inside one block.
struct ReadPiece {
    range: usize,
    offset: u64,
    len: usize,
    memory: PieceMemory,
}

pub(crate) struct ReadWork {
    source: Weak<OpenSource>,
    ranges: Vec<ReadRange>,
    pieces: Vec<ReadPiece>,
}

impl ReadWork {
    fn read_piece(&self, piece: &ReadPiece) -> Result<usize, CallFailure> {
        let open = self.source.upgrade().ok_or_else(closed_failure)?;
        // SAFETY: the owner of the batch keeps the buffer until no step runs, and no other piece of the batch has these bytes.
        let dst = unsafe { std::slice::from_raw_parts_mut(piece.memory.0, piece.len) };
        match &self.ranges[piece.range].source {
            RangeSource::Pinned(object) => {
                read_full(open.volume(), object, piece.offset, dst).map_err(|failure| failure.of_path(&object.path))
            }
            RangeSource::Path(path) => {
                let object = find_object(&open, path)?;
                read_full(open.volume(), &object, piece.offset, dst).map_err(|failure| failure.of_path(path))
            }
        }
    }

    fn end_piece(&self, piece: &ReadPiece, read: Result<usize, CallFailure>) -> Option<usize> {
        let range = &self.ranges[piece.range];
        match read {
            Ok(bytes) => {
                range.read.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(failure) => {
                range.failure.lock().get_or_insert(failure);
            }
        }
        (range.pieces_left.fetch_sub(1, Ordering::AcqRel) == 1).then_some(piece.range)
    }
}

impl BatchWork for ReadWork {
    fn steps(&self) -> usize {
        self.pieces.len()
    }

    fn run_step(&self, step: usize) -> Option<usize> {
        let piece = &self.pieces[step];
        let failed = self.ranges[piece.range].failure.lock().is_some();
        // The first failure is that of the range.
        let read = if failed { Ok(0) } else { self.read_piece(piece) };
        self.end_piece(piece, read)
    }

    fn step_panicked(&self, step: usize, cause: &str) -> Option<usize> {
        self.end_piece(&self.pieces[step], Err(CallFailure::new(Errno::IO, format!("a read failed: {cause}"))))
    }
}

/// The failure of a call of a client that is closed.
pub(crate) fn closed_failure() -> CallFailure {
    CallFailure::new(Errno::BADF, "the client is closed")
}

/// The file at `path` at the present version.
///
/// # Errors
/// `ENOENT`; `EISDIR`; failures of the volume.
pub(crate) fn find_object(open: &OpenSource, path: &[u8]) -> Result<ObjectRef, CallFailure> {
    let found = open.find_path(path).map_err(|error| CallFailure::from(error).of_path(path))?;
    if found.attr.kind == FileKind::Directory {
        return Err(CallFailure::new(Errno::ISDIR, "is a directory").of_path(path));
    }
    Ok(ObjectRef::new(open.volume().source(), &found.path, found.attr.version, found.attr.size))
}

/// Reads until `dst` is full or the file ends.
fn read_full(volume: &dyn Volume, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<usize, CallFailure> {
    let want = object.size.saturating_sub(offset).min(dst.len() as u64) as usize;
    let mut done = 0;
    while done < want {
        let rest = &mut dst[done..want];
        let bytes = match volume.read(object, offset + done as u64, rest)? {
            ReadData::Copied(bytes) => bytes,
            ReadData::Shared(slice) => {
                rest[..slice.len()].copy_from_slice(&slice);
                slice.len()
            }
        };
        if bytes == 0 {
            break;
        }
        done += bytes;
    }
    Ok(done)
}

/// Memory of reads that were given up while steps still ran; freed once the steps have ended.
#[derive(Default)]
pub(crate) struct AbandonedMemory(Mutex<Vec<AbandonedReads>>);

struct AbandonedReads {
    batch: Arc<Batch>,
    _buffers: Vec<PyUntypedBuffer>,
}

impl AbandonedMemory {
    /// Frees the memory of steps that have ended.
    pub fn free_idle(&self) {
        let mut idle = Vec::new();
        let mut reads = self.0.lock();
        idle.extend(reads.extract_if(.., |reads| reads.batch.is_idle()));
        // The release of a buffer may run code of the program, which may call this client.
        drop(reads);
        drop(idle);
    }

    /// Takes over the buffers of a batch that was cancelled.
    pub fn keep(&self, batch: Arc<Batch>, buffers: Vec<PyUntypedBuffer>) {
        let reads = AbandonedReads { batch, _buffers: buffers };
        self.0.lock().push(reads);
    }
}

/// The buffer of an object, whose elements are bytes, numbers or structures of these: references to objects are not read or written.
///
/// # Errors
/// `TypeError` without a buffer; `BufferError` for references to objects.
pub(crate) fn buffer_of_bytes(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object)?;
    if buffer.format().to_bytes().contains(&b'O') {
        return Err(PyBufferError::new_err("a buffer has references to objects; give memory with bytes or numbers"));
    }
    Ok(buffer)
}

/// Checked buffers of the program.
///
/// # Errors
/// `BufferError` for a buffer that can't be written, or is not contiguous.
pub(crate) fn writable_buffers(objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<PyUntypedBuffer>> {
    let mut buffers = Vec::with_capacity(objects.len());
    for object in objects {
        let buffer = buffer_of_bytes(object)?;
        if buffer.readonly() {
            return Err(PyBufferError::new_err("a buffer is read-only; give memory that can be written"));
        }
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("a buffer is not contiguous; give one block of memory for each"));
        }
        buffers.push(buffer);
    }
    Ok(buffers)
}

/// The work for `ranges` into `buffers`.
///
/// # Errors
/// `ValueError` for a range outside of the buffer, and for ranges that share memory.
pub(crate) fn plan_reads(
    source: &Arc<OpenSource>,
    tuples: Vec<RangeTuple>,
    buffers: &[PyUntypedBuffer],
) -> PyResult<Arc<ReadWork>> {
    let block = source.volume().block_size().max(1);
    let name = source.volume().source();
    let mut work = ReadWork { source: Arc::downgrade(source), ranges: Vec::new(), pieces: Vec::new() };
    for RangeTuple(path, version, size, offset, len, buffer, at) in tuples {
        let range = work.ranges.len();
        let target =
            buffers.get(buffer).filter(|target| at.checked_add(len).is_some_and(|end| end <= target.len_bytes()));
        let Some(target) = target else {
            return Err(PyValueError::new_err(format!("range {range} does not fit in its buffer")));
        };
        let first_piece = work.pieces.len();
        let is_pinned = version.is_some();
        let mut done = 0;
        loop {
            let start = offset.saturating_add(done as u64);
            let in_block = (block - start % block) as usize;
            let piece_len = if is_pinned { in_block.min(len - done) } else { len };
            // SAFETY: the piece is inside of the buffer, as checked above.
            let memory = PieceMemory(unsafe { target.buf_ptr().cast::<u8>().add(at + done) });
            work.pieces.push(ReadPiece { range, offset: start, len: piece_len, memory });
            done += piece_len;
            if done >= len {
                break;
            }
        }
        work.ranges.push(ReadRange {
            source: match version {
                Some(version) => RangeSource::Pinned(ObjectRef::new(name, &path, Version::new(&version), size)),
                None => RangeSource::Path(path),
            },
            pieces_left: AtomicUsize::new(work.pieces.len() - first_piece),
            read: AtomicUsize::new(0),
            failure: Mutex::new(None),
        });
    }
    check_overlaps(&work.pieces)?;
    Ok(Arc::new(work))
}

/// Refuses two pieces with the same memory, which two threads would write.
fn check_overlaps(pieces: &[ReadPiece]) -> PyResult<()> {
    let mut ranges: Vec<Range<usize>> = Vec::with_capacity(pieces.len());
    for piece in pieces.iter().filter(|piece| piece.len > 0) {
        let start = piece.memory.0.addr();
        ranges.push(start..start + piece.len);
    }
    ranges.sort_unstable_by_key(|range| range.start);
    if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(PyValueError::new_err("two items have the same memory; give each item memory of its own"));
    }
    Ok(())
}

/// Reads under way. The memory is the reads' until each has ended, or this object is gone.
#[pyclass(frozen, module = "spurline._native")]
pub(crate) struct RangeReads {
    inner: Mutex<Option<ReadsUnderWay>>,
    process: u32,
}

struct ReadsUnderWay {
    work: Arc<ReadWork>,
    batch: Arc<Batch>,
    buffers: Vec<PyUntypedBuffer>,
    abandoned: Arc<AbandonedMemory>,
}

impl RangeReads {
    /// Reads of `work` by `batch` into `buffers`.
    pub fn start(
        work: Arc<ReadWork>,
        batch: Arc<Batch>,
        buffers: Vec<PyUntypedBuffer>,
        abandoned: Arc<AbandonedMemory>,
    ) -> RangeReads {
        let reads = ReadsUnderWay { work, batch, buffers, abandoned };
        RangeReads { inner: Mutex::new(Some(reads)), process: std::process::id() }
    }

    fn parts(&self) -> PyResult<(Arc<ReadWork>, Arc<Batch>)> {
        let inner = self.inner.lock();
        let reads = inner.as_ref().ok_or_else(|| PyErr::from(closed_failure()))?;
        if self.process != std::process::id() {
            return Err(CallFailure::new(Errno::BADF, "the reads belong to the parent process").into());
        }
        Ok((Arc::clone(&reads.work), Arc::clone(&reads.batch)))
    }

    fn end(&self) {
        let reads = self.inner.lock().take();
        let Some(reads) = reads else { return };
        if self.process != std::process::id() {
            // The threads and the state of the locks are the parent's.
            std::mem::forget(reads);
            return;
        }
        reads.batch.cancel();
        if !reads.batch.is_idle() {
            reads.abandoned.keep(reads.batch, reads.buffers);
        }
    }
}

impl ReadWork {
    /// Whether all ranges have ended.
    fn has_ended(&self) -> bool {
        self.ranges.iter().all(|range| range.pieces_left.load(Ordering::Acquire) == 0)
    }

    /// The bytes that an ended range has read, or the failure as an exception.
    fn result<'py>(&self, py: Python<'py>, range: usize) -> PyResult<Bound<'py, PyAny>> {
        let range = &self.ranges[range];
        let failure = range.failure.lock().clone();
        match failure {
            Some(failure) => Ok(failure.into_exception(py)),
            None => Ok(range.read.load(Ordering::Acquire).into_pyobject(py)?.into_any()),
        }
    }
}

#[pymethods]
impl RangeReads {
    /// The next range that has ended: the number, and the bytes read or the exception; None after the last.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<(usize, Bound<'py, PyAny>)>> {
        let (work, batch) = self.parts()?;
        loop {
            match wait_step(py, |limit| batch.wait_item(limit)) {
                Ok(ItemWait::Ended(range)) => return Ok(Some((range, work.result(py, range)?))),
                Ok(ItemWait::NoneLeft) if work.has_ended() => return Ok(None),
                // The client was closed meanwhile.
                Ok(ItemWait::NoneLeft) => return Err(closed_failure().into()),
                Ok(ItemWait::Later) => {}
                Err(interrupt) => {
                    self.end();
                    return Err(interrupt);
                }
            }
        }
    }

    /// Waits for all ranges; the bytes read of each, or the exception.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (work, batch) = self.parts()?;
        if let Err(interrupt) = interruptible(py, |limit| batch.wait_idle(limit)) {
            self.end();
            return Err(interrupt);
        }
        if !work.has_ended() {
            // The client was closed meanwhile.
            return Err(closed_failure().into());
        }
        (0..work.ranges.len()).map(|range| work.result(py, range)).collect()
    }

    /// Gives the reads up; the memory is freed as soon as no read writes there.
    fn cancel(&self) {
        self.end();
    }
}

impl Drop for RangeReads {
    fn drop(&mut self) {
        self.end();
    }
}
