//! The bytes of an answer, in pieces: pinned memory of the cache where the volume has it, else buffers of a pool. An answer never
//! waits for memory: without a free buffer its pieces are small. Knows no request.

use crate::bucket::OpenBucket;
use crate::errors::{lost_thread, volume_error};
use bytes::Bytes;
use futures::Stream;
use parking_lot::Mutex;
use s3s::stream::{ByteStream, RemainingLength};
use s3s::{S3Result, StdError};
use spurline_mem::BlockSlice;
use spurline_types::{Error, ErrorKind, ObjectRef, Result};
use spurline_volume::ReadData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

/// Bytes of a large piece: a piece is written while the next is read.
pub(crate) const LARGE_PIECE: usize = 1 << 20;
/// Bytes of a small piece, which is copied and pins nothing. Each connection may have two.
pub(crate) const SMALL_PIECE: usize = 64 << 10;
/// Blocks that are fetched ahead of an answer.
const BLOCKS_AHEAD: u32 = 2;

/// The memory of large pieces.
pub(crate) struct PieceMemory {
    permits: Arc<Semaphore>,
    pins: Arc<Semaphore>,
    free: Mutex<Vec<Box<[u8]>>>,
}

impl PieceMemory {
    /// Memory for `buffers` large pieces, taken when used, and for as many pieces in the cache as `pins`.
    pub fn new(buffers: usize, pins: usize) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(buffers));
        Arc::new(PieceMemory { permits, pins: Arc::new(Semaphore::new(pins)), free: Mutex::default() })
    }

    /// The right to pin a piece; `None` while too much of the cache is pinned.
    fn take_pin(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.pins).try_acquire_owned().ok()
    }

    fn take(self: &Arc<Self>) -> Option<PieceBuffer> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let bytes = self.free.lock().pop().unwrap_or_else(|| vec![0; LARGE_PIECE].into_boxed_slice());
        Some(PieceBuffer { bytes: Some(bytes), len: 0, memory: Arc::clone(self), _permit: permit })
    }
}

/// A buffer of the pool, which goes back with the drop.
struct PieceBuffer {
    /// Taken only by the drop.
    bytes: Option<Box<[u8]>>,
    len: usize,
    memory: Arc<PieceMemory>,
    _permit: OwnedSemaphorePermit,
}

impl PieceBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        self.bytes.as_deref_mut().unwrap_or_default()
    }
}

impl AsRef<[u8]> for PieceBuffer {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_deref().and_then(|bytes| bytes.get(..self.len)).unwrap_or_default()
    }
}

impl Drop for PieceBuffer {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes.take() {
            // Before the permit is back, so that the list has at most as many buffers as there are permits.
            self.memory.free.lock().push(bytes);
        }
    }
}

/// Pinned memory of the cache.
struct PinnedPiece {
    slice: BlockSlice,
    _pin: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for PinnedPiece {
    fn as_ref(&self) -> &[u8] {
        &self.slice
    }
}

/// A range of an object in one version.
#[derive(Clone)]
pub(crate) struct ObjectRange {
    pub bucket: Arc<OpenBucket>,
    pub object: Arc<ObjectRef>,
    pub at: u64,
    pub end: u64,
    pub memory: Arc<PieceMemory>,
}

impl ObjectRange {
    /// Reads the next piece; blocks.
    ///
    /// # Errors
    /// The errors of the volume; `Corrupt` for an object that ends early.
    pub fn read_piece(&mut self) -> Result<Bytes> {
        self.fetch_ahead();
        let left = self.end - self.at;
        if left > SMALL_PIECE as u64
            && let Some(buffer) = self.memory.take()
        {
            return self.read_large(buffer, left);
        }
        let mut bytes = vec![0; (SMALL_PIECE as u64).min(left) as usize];
        let len = match self.bucket.volume.read(&self.object, self.at, &mut bytes)? {
            ReadData::Copied(len) => len,
            ReadData::Shared(slice) => {
                bytes[..slice.len()].copy_from_slice(&slice);
                slice.len()
            }
        };
        bytes.truncate(len);
        self.advance(bytes.into())
    }

    fn read_large(&mut self, mut buffer: PieceBuffer, left: u64) -> Result<Bytes> {
        // A piece within a block can be pinned.
        let block = self.bucket.volume.block_size();
        let want = left.min(block - self.at % block).min(LARGE_PIECE as u64) as usize;
        let piece = match self.bucket.volume.read(&self.object, self.at, &mut buffer.bytes()[..want])? {
            ReadData::Copied(len) => {
                buffer.len = len;
                Bytes::from_owner(buffer)
            }
            ReadData::Shared(slice) => match self.memory.take_pin() {
                Some(pin) => Bytes::from_owner(PinnedPiece { slice, _pin: pin }),
                None => {
                    buffer.bytes()[..slice.len()].copy_from_slice(&slice);
                    buffer.len = slice.len();
                    Bytes::from_owner(buffer)
                }
            },
        };
        self.advance(piece)
    }

    fn advance(&mut self, piece: Bytes) -> Result<Bytes> {
        if piece.is_empty() {
            let why =
                format!("the object ends at {}, before the {} bytes of its attributes", self.at, self.object.size);
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        self.at += piece.len() as u64;
        Ok(piece)
    }

    /// Starts to fetch the following blocks, once per block.
    fn fetch_ahead(&self) {
        let block = self.bucket.volume.block_size();
        let next = (self.at / block) as u32 + 1;
        let last = self.end.div_ceil(block) as u32;
        let begins_block = self.at % block < LARGE_PIECE as u64;
        if begins_block && next < last {
            let blocks = next..last.min(next + BLOCKS_AHEAD);
            self.bucket.volume.prefetch(&self.object, blocks, LARGE_PIECE);
        }
    }

    fn is_complete(&self) -> bool {
        self.at == self.end
    }
}

/// Reads the first piece of a range on a thread that may block, with the stream of all pieces.
pub(crate) fn open_stream(mut range: ObjectRange) -> Result<ObjectStream> {
    let first = if range.is_complete() { None } else { Some(range.read_piece()?) };
    let left = first.as_ref().map_or(0, Bytes::len) as u64 + (range.end - range.at);
    Ok(ObjectStream { first, left, range: Some(range), reading: None })
}

/// The result of a read on another thread: the range goes along.
type PieceRead = (ObjectRange, Result<Bytes>);

/// The bytes of a range.
pub(crate) struct ObjectStream {
    first: Option<Bytes>,
    /// Bytes that were not handed out.
    left: u64,
    /// `None` while a thread reads.
    range: Option<ObjectRange>,
    reading: Option<JoinHandle<PieceRead>>,
}

impl ObjectStream {
    /// Reads the next piece while the one before is sent.
    fn begin_read(&mut self) {
        if let Some(mut range) = self.range.take_if(|range| !range.is_complete()) {
            self.reading = Some(tokio::task::spawn_blocking(move || {
                let piece = range.read_piece();
                (range, piece)
            }));
        }
    }

    fn hand_out(&mut self, piece: Bytes) -> Poll<Option<Result<Bytes, StdError>>> {
        self.left -= piece.len() as u64;
        self.begin_read();
        Poll::Ready(Some(Ok(piece)))
    }

    /// All of a small object, if that is the first piece.
    pub fn into_single_piece(mut self) -> S3Result<Bytes, Self> {
        if self.left == self.first.as_ref().map_or(0, Bytes::len) as u64 {
            return Ok(self.first.take().unwrap_or_default());
        }
        Err(self)
    }
}

impl Stream for ObjectStream {
    type Item = Result<Bytes, StdError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return self.hand_out(first);
        }
        let Some(reading) = &mut self.reading else { return Poll::Ready(None) };
        let Poll::Ready(read) = Pin::new(reading).poll(context) else { return Poll::Pending };
        self.reading = None;
        match read {
            Ok((range, Ok(piece))) => {
                self.range = Some(range);
                self.hand_out(piece)
            }
            Ok((_, Err(error))) => Poll::Ready(Some(Err(Box::new(volume_error(&error))))),
            Err(error) => Poll::Ready(Some(Err(Box::new(lost_thread(&error))))),
        }
    }
}

impl ByteStream for ObjectStream {
    fn remaining_length(&self) -> RemainingLength {
        RemainingLength::new_exact(usize::try_from(self.left).unwrap_or(usize::MAX))
    }
}
