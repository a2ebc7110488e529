//! The table of open files and directories. It knows no rule about what may be opened.

use crate::block_reads::FileReadAhead;
use crate::dir::DirState;
use crate::inode::Inode;
use crate::passthrough::LiveBacking;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An open file or directory. It keeps its inode alive until it is closed.
pub struct OpenHandle {
    /// The inode.
    pub inode: Arc<Inode>,
    /// State specific to a file or a directory.
    pub open: OpenKind,
}

/// State specific to an open file or an open directory.
pub enum OpenKind {
    /// A file.
    File(OpenFileState),
    /// A directory.
    Dir(Mutex<DirState>),
}

/// An open file.
pub struct OpenFileState {
    /// Read-ahead state.
    pub readahead: FileReadAhead,
    /// The cached file that the kernel reads directly.
    pub backing: Option<Arc<LiveBacking>>,
}

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
/// Bits of the slot index. The bits above count the uses of the slot, so that a released number finds nothing.
const SLOT_BITS: u32 = 28;

/// All open handles of one kind.
pub struct HandleTable<T = OpenHandle> {
    shards: [RwLock<HandleShard<T>>; SHARDS],
    turn: AtomicUsize,
}

struct HandleShard<T> {
    slots: Vec<HandleSlot<T>>,
    free: Vec<u32>,
}

struct HandleSlot<T> {
    uses: u32,
    handle: Option<Arc<T>>,
}

fn split_handle(fh: u64) -> (usize, usize, u32) {
    let slot = (fh >> SHARD_BITS) & ((1 << SLOT_BITS) - 1);
    (fh as usize & (SHARDS - 1), slot as usize, (fh >> (SHARD_BITS + SLOT_BITS)) as u32)
}

impl<T> HandleTable<T> {
    pub fn new() -> Self {
        let shard = |_| RwLock::new(HandleShard { slots: Vec::new(), free: Vec::new() });
        HandleTable { shards: std::array::from_fn(shard), turn: AtomicUsize::new(0) }
    }

    /// Drops all handles.
    pub fn clear(&self) {
        for shard in &self.shards {
            let shard = std::mem::replace(&mut *shard.write(), HandleShard { slots: Vec::new(), free: Vec::new() });
            // Without the lock: closing a file may take as long as its source.
            drop(shard);
        }
    }

    /// Stores `handle` and returns its number. `None` when 2^32 handles are open.
    pub fn insert(&self, handle: Arc<T>) -> Option<u64> {
        let shard = self.turn.fetch_add(1, Ordering::Relaxed) & (SHARDS - 1);
        let mut slots = self.shards[shard].write();
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(slots.slots.len()).ok().filter(|index| *index < 1 << SLOT_BITS)?;
                slots.slots.push(HandleSlot { uses: 0, handle: None });
                index
            }
        };
        let slot = &mut slots.slots[index as usize];
        slot.handle = Some(handle);
        Some(u64::from(slot.uses) << (SHARD_BITS + SLOT_BITS) | u64::from(index) << SHARD_BITS | shard as u64)
    }

    /// The handle with number `fh`.
    pub fn get(&self, fh: u64) -> Option<Arc<T>> {
        let (shard, index, uses) = split_handle(fh);
        let slots = self.shards[shard].read();
        slots.slots.get(index).filter(|slot| slot.uses == uses)?.handle.clone()
    }

    /// Any handle that `wanted` selects. Looks at all of them.
    pub fn find(&self, wanted: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        self.shards.iter().find_map(|shard| {
            let slots = shard.read();
            slots.slots.iter().filter_map(|slot| slot.handle.as_ref()).find(|handle| wanted(handle)).cloned()
        })
    }

    /// Whether `fh` is the number of a handle.
    pub fn is_open(&self, fh: u64) -> bool {
        let (shard, index, uses) = split_handle(fh);
        let slots = self.shards[shard].read();
        slots.slots.get(index).is_some_and(|slot| slot.uses == uses && slot.handle.is_some())
    }

    /// Removes a handle.
    pub fn remove(&self, fh: u64) -> Option<Arc<T>> {
        let (shard, index, uses) = split_handle(fh);
        let mut slots = self.shards[shard].write();
        let slot = slots.slots.get_mut(index).filter(|slot| slot.uses == uses)?;
        let handle = slot.handle.take()?;
        slot.uses = slot.uses.wrapping_add(1);
        slots.free.push(index as u32);
        Some(handle)
    }
}
