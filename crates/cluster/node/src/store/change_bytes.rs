//! The bytes of changes on the way to a store. These lie in the memory of the node's blocks (`--buffer-size`), as blocks of an
//! object that no reader names. After the request the bytes stay until the memory is needed, and blocks of the new object are made
//! from there. Knows neither requests nor stores.
//!
//! A change is sent when all bytes are there. The first thousand parts of a file have two frames: a stream would save the memory of
//! a frame, while the node keeps both for readers anyway, the HTTP client takes whole bodies, and a signature over an unencrypted
//! connection covers all bytes.

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use spurline_cache::sent_object;
use spurline_mem::{BlockFill, BlockSlice, BufferPool, MemTier, TierLookup};
use spurline_proto::StoreBody;
use spurline_types::{BlockId, ByteSink as _, Error, ErrorKind, ObjectRef, Result};
use std::sync::Arc;
use std::time::Instant;

/// Divisor of the memory that all changes share. Readers have the rest.
const CHANGES_SHARE: u64 = 3;
/// Divisor of the memory for the frames of changes that wait for memory: a frame lies in the same memory. With more, none of the
/// changes under way would get the memory for the next frame.
const WAITING_SHARE: u64 = 6;

#[derive(Default)]
struct UsedMemory {
    changes_bytes: u64,
    waiting_bytes: u64,
}

/// The memory of the bytes of all changes.
#[derive(Default)]
pub struct ChangesMemory {
    used: Mutex<UsedMemory>,
    freed: Condvar,
}

/// A share of the memory, returned when dropped.
struct MemoryShare {
    memory: Arc<ChangesMemory>,
    bytes: u64,
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.memory.used.lock().changes_bytes -= self.bytes;
        self.memory.freed.notify_all();
    }
}

/// The frame of a change that waits.
pub struct WaitingFrame {
    memory: Arc<ChangesMemory>,
    bytes: u64,
}

impl Drop for WaitingFrame {
    fn drop(&mut self) {
        self.memory.used.lock().waiting_bytes -= self.bytes;
    }
}

impl ChangesMemory {
    /// Lets a change with a frame of this length wait; `None` if too many do.
    pub fn admit_waiting(self: &Arc<Self>, tier: &MemTier, frame_len: usize) -> Option<WaitingFrame> {
        let bytes = BufferPool::footprint(frame_len);
        let mut used = self.used.lock();
        if used.waiting_bytes + bytes > tier.pool().limit_bytes() / WAITING_SHARE {
            return None;
        }
        used.waiting_bytes += bytes;
        Some(WaitingFrame { memory: Arc::clone(self), bytes })
    }

    /// Waits for memory for `body` in the blocks of `tier`; `None` when there is none until `deadline`. A body that is larger than the
    /// share waits until no other change has a part of the share, and lies outside.
    pub fn reserve(
        self: &Arc<Self>,
        tier: &Arc<MemTier>,
        block_size: u64,
        source: &str,
        body: StoreBody,
        deadline: Instant,
    ) -> Option<ChangeBytes> {
        let share = tier.pool().limit_bytes() / CHANGES_SHARE;
        let blocks = (body.len / block_size).saturating_mul(footprint_of(block_size));
        let wanted = blocks.saturating_add(footprint_of(body.len % block_size));
        let bytes = wanted.min(share);
        let mut used = self.used.lock();
        while used.changes_bytes + bytes > share {
            if self.freed.wait_until(&mut used, deadline).timed_out() {
                return None;
            }
        }
        used.changes_bytes += bytes;
        drop(used);
        let place = if wanted <= share {
            BytesPlace::Blocks { full: Vec::new(), last: None }
        } else {
            BytesPlace::Apart(Vec::new())
        };
        Some(ChangeBytes {
            transfer: body.transfer,
            object: sent_object(source, body.transfer, body.len),
            block_size,
            tier: Arc::clone(tier),
            place,
            filled: 0,
            stays: false,
            _share: MemoryShare { memory: Arc::clone(self), bytes },
        })
    }
}

/// The memory of a block with this many bytes.
fn footprint_of(len: u64) -> u64 {
    if len == 0 { 0 } else { BufferPool::footprint(len as usize) }
}

/// Where the bytes lie.
enum BytesPlace {
    /// In blocks, the last of which is being filled.
    Blocks { full: Vec<BlockSlice>, last: Option<BlockFill> },
    /// Outside of the memory for blocks.
    Apart(Vec<u8>),
}

/// The bytes of a change. A drop removes the bytes from memory.
pub struct ChangeBytes {
    transfer: u64,
    /// The name of the bytes in memory.
    object: ObjectRef,
    block_size: u64,
    tier: Arc<MemTier>,
    place: BytesPlace,
    filled: u64,
    stays: bool,
    _share: MemoryShare,
}

/// The bytes of a block, as an owner.
struct BlockBytes(BlockSlice);

impl AsRef<[u8]> for BlockBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl ChangeBytes {
    /// The number of bytes that have come.
    pub fn filled(&self) -> u64 {
        self.filled
    }

    /// The number of the transfer.
    pub fn transfer(&self) -> u64 {
        self.transfer
    }

    /// The number of all bytes.
    pub fn len(&self) -> u64 {
        self.object.size
    }

    /// Adds bytes; waits for memory until `deadline`.
    ///
    /// # Errors
    /// `NoMemory`; `Invalid` for more bytes than there are.
    pub fn append(&mut self, mut piece: &[u8], deadline: Instant) -> Result<()> {
        if self.filled + piece.len() as u64 > self.len() {
            let why = format!("{} further bytes came for an object or a part of {}", piece.len(), self.len());
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        self.filled += piece.len() as u64;
        let BytesPlace::Blocks { full, last } = &mut self.place else {
            if let BytesPlace::Apart(bytes) = &mut self.place {
                bytes.extend_from_slice(piece);
            }
            return Ok(());
        };
        while !piece.is_empty() {
            let mut fill = match last.take() {
                Some(fill) => fill,
                None => {
                    let index = full.len() as u32;
                    let len = self.object.block_len(index, self.block_size);
                    match self.tier.find_or_fill(BlockId { object: self.object.id, index }, len, deadline)? {
                        TierLookup::Vacant(fill) => fill,
                        TierLookup::Here(_) => {
                            return Err(Error::new(ErrorKind::Invalid, "the number of a transfer came twice"));
                        }
                    }
                }
            };
            let taken = fill.spare().len().min(piece.len());
            fill.spare()[..taken].copy_from_slice(&piece[..taken]);
            fill.commit(taken);
            piece = &piece[taken..];
            match fill.finished() {
                Some(slice) => full.push(slice),
                None => *last = Some(fill),
            }
        }
        Ok(())
    }

    /// All bytes, in order.
    pub fn pieces(&mut self) -> Vec<Bytes> {
        match &mut self.place {
            BytesPlace::Blocks { full, .. } => {
                full.iter().map(|slice| Bytes::from_owner(BlockBytes(slice.clone()))).collect()
            }
            BytesPlace::Apart(bytes) => vec![std::mem::take(bytes).into()],
        }
    }

    /// Leaves the bytes in memory, until the memory is needed; false for bytes that lie elsewhere.
    pub fn stay(mut self) -> bool {
        self.stays = matches!(self.place, BytesPlace::Blocks { .. });
        self.stays
    }
}

impl Drop for ChangeBytes {
    fn drop(&mut self) {
        if let BytesPlace::Blocks { full, .. } = &self.place
            && !self.stays
        {
            for index in 0..full.len() as u32 {
                self.tier.remove(&BlockId { object: self.object.id, index });
            }
        }
    }
}
