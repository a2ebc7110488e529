//! Open files and directories and their numbers. It knows no rule of what may be opened.

use crate::dir::DirState;
use crate::inode::Inode;
use crate::passthrough::LiveBacking;
use crate::readahead::ReadAhead;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// An open file or directory. It keeps its inode for as long as it is open, forgotten or not.
pub struct Handle {
    /// What is open.
    pub inode: Arc<Inode>,
    /// What only a file or only a directory has.
    pub open: Open,
}

/// What only an open file or only an open directory has.
pub enum Open {
    /// A file.
    File(OpenFile),
    /// A directory.
    Dir(Mutex<DirState>),
}

/// An open file.
pub struct OpenFile {
    /// What is read ahead of its readers; none where the file is a single block, or passed through.
    pub readahead: Option<Mutex<Box<ReadAhead>>>,
    /// The second in which it was last counted among the readers that are read ahead.
    pub counted: AtomicU64,
    /// The cached file the kernel reads instead.
    pub backing: Option<Arc<LiveBacking>>,
}

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
/// Slots of a shard are numbered by this many bits; what is above counts how often a slot was used, so that
/// a number that was released finds nothing.
const SLOT_BITS: u32 = 28;

/// All open handles.
pub struct Handles {
    shards: [RwLock<Slots>; SHARDS],
    turn: AtomicUsize,
}

#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    uses: u32,
    handle: Option<Arc<Handle>>,
}

fn split(fh: u64) -> (usize, usize, u32) {
    let slot = (fh >> SHARD_BITS) & ((1 << SLOT_BITS) - 1);
    (fh as usize & (SHARDS - 1), slot as usize, (fh >> (SHARD_BITS + SLOT_BITS)) as u32)
}

impl Handles {
    pub fn new() -> Self {
        Handles { shards: Default::default(), turn: AtomicUsize::new(0) }
    }

    /// Gives `handle` a number. `None` when 2^32 handles are open.
    pub fn insert(&self, handle: Arc<Handle>) -> Option<u64> {
        let shard = self.turn.fetch_add(1, Ordering::Relaxed) & (SHARDS - 1);
        let mut slots = self.shards[shard].write();
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(slots.slots.len()).ok().filter(|index| *index < 1 << SLOT_BITS)?;
                slots.slots.push(Slot::default());
                index
            }
        };
        let slot = &mut slots.slots[index as usize];
        slot.handle = Some(handle);
        Some(u64::from(slot.uses) << (SHARD_BITS + SLOT_BITS) | u64::from(index) << SHARD_BITS | shard as u64)
    }

    /// The handle of a number.
    pub fn get(&self, fh: u64) -> Option<Arc<Handle>> {
        let (shard, index, uses) = split(fh);
        let slots = self.shards[shard].read();
        slots.slots.get(index).filter(|slot| slot.uses == uses)?.handle.clone()
    }

    /// Takes a number back.
    pub fn remove(&self, fh: u64) -> Option<Arc<Handle>> {
        let (shard, index, uses) = split(fh);
        let mut slots = self.shards[shard].write();
        let slot = slots.slots.get_mut(index).filter(|slot| slot.uses == uses)?;
        let handle = slot.handle.take()?;
        slot.uses = slot.uses.wrapping_add(1);
        slots.free.push(index as u32);
        Some(handle)
    }
}
