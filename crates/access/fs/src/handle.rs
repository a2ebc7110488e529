//! The table of open files and directories. It knows no rule about what may be opened.

use crate::block_reads::FileReadAhead;
use crate::dir::DirState;
use crate::inode::Inode;
use crate::kept_records::RecordSlot;
use crate::passthrough::LiveBacking;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// An open file or directory. It keeps its inode alive until it is closed.
pub struct OpenHandle {
    pub inode: Arc<Inode>,
    /// State specific to a file or a directory.
    pub open: OpenKind,
    /// The record that outlives this process.
    pub record: AtomicU32,
}

impl OpenHandle {
    /// A handle without a record.
    pub fn new(inode: Arc<Inode>, open: OpenKind) -> OpenHandle {
        OpenHandle { inode, open, record: AtomicU32::new(0) }
    }

    /// The cached file that the kernel reads directly.
    pub fn backing(&self) -> Option<&LiveBacking> {
        match &self.open {
            OpenKind::File(file) => file.backing.as_deref(),
            OpenKind::Dir(_) => None,
        }
    }

    /// The record that outlives this process; 0 for none.
    pub fn record(&self) -> RecordSlot {
        self.record.load(Ordering::Relaxed)
    }
}

/// State specific to an open file or an open directory.
pub enum OpenKind {
    File(OpenFileState),
    /// A directory.
    Dir(Mutex<DirState>),
}

pub struct OpenFileState {
    pub readahead: FileReadAhead,
    /// The cached file that the kernel reads directly.
    pub backing: Option<Arc<LiveBacking>>,
}

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
/// Bits of the slot index. The bits above count the uses of the slot, so that a released number finds nothing.
const SLOT_BITS: u32 = 28;

/// A slot is used less often than this power of two by one process.
const TAKEOVER_SHIFT: u32 = 20;

/// All open handles of one kind.
pub struct HandleTable<T = OpenHandle> {
    shards: [RwLock<HandleShard<T>>; SHARDS],
    turn: AtomicUsize,
    /// Uses of a slot that was never used by this process.
    first_uses: AtomicU32,
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

impl<T> Default for HandleTable<T> {
    fn default() -> Self {
        HandleTable {
            shards: std::array::from_fn(|_| RwLock::new(HandleShard { slots: Vec::new(), free: Vec::new() })),
            turn: AtomicUsize::new(0),
            first_uses: AtomicU32::new(0),
        }
    }
}

impl<T> HandleTable<T> {
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
                let uses = self.first_uses.load(Ordering::Relaxed);
                slots.slots.push(HandleSlot { uses, handle: None });
                index
            }
        };
        let slot = &mut slots.slots[index as usize];
        slot.handle = Some(handle);
        Some(u64::from(slot.uses) << (SHARD_BITS + SLOT_BITS) | u64::from(index) << SHARD_BITS | shard as u64)
    }

    /// New handles have none of the numbers of processes before: a request of the kernel that was made for a handle of that time,
    /// and comes again, finds nothing.
    pub fn set_takeovers(&self, takeovers: u64) {
        self.first_uses.store((takeovers as u32) << TAKEOVER_SHIFT, Ordering::Relaxed);
    }

    /// Stores a handle of the process before under its number; false if the number is in use.
    pub fn adopt(&self, fh: u64, handle: Arc<T>) -> bool {
        let (shard, index, uses) = split_handle(fh);
        let mut slots = self.shards[shard].write();
        while slots.slots.len() <= index {
            let free = slots.slots.len() as u32;
            slots.slots.push(HandleSlot { uses: self.first_uses.load(Ordering::Relaxed), handle: None });
            slots.free.push(free);
        }
        if slots.slots[index].handle.is_some() {
            return false;
        }
        slots.slots[index] = HandleSlot { uses, handle: Some(handle) };
        slots.free.retain(|free| *free != index as u32);
        true
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
