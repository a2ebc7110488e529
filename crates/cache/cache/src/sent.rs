//! Blocks of new objects whose bytes nodes have sent to the store. For some time these bytes lie in the memory of the senders,
//! under the numbers of the transfers, as objects that no reader names. Knows which transfer has which bytes of an
//! object, and how a block is made of these bytes; neither requests nor stores.
//!
//! | a block of a new object | then |
//! |---|---|
//! | this node sent the bytes | the block is copied from memory |
//! | another node did | the block is read from that node |
//! | several transfers have parts of the block, or the memory was needed | the origin is read |
//!
//! A node with disks brings the own blocks of a new object onto the disks at once.

use parking_lot::Mutex;
use spurline_types::{BlockId, ObjectId, ObjectRef, Version};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Most objects that are known.
const OBJECTS_MAX: usize = 4096;
/// Most ranges of these objects.
const RANGES_MAX: usize = 64 << 10;

/// Bytes of an object that a transfer has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentRange {
    /// The first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The number of the transfer.
    pub transfer: u64,
    /// The node that sent the bytes.
    pub node: Arc<str>,
}

/// The name of the bytes of a transfer in the cache.
pub fn sent_object(source: &str, transfer: u64, len: u64) -> ObjectRef {
    ObjectRef::new(source, b"", Version::new(&format!("sent {transfer:016x}")), len)
}

#[derive(Default)]
struct SentList {
    /// Ranges in order.
    objects: HashMap<ObjectId, Arc<[SentRange]>>,
    /// The oldest first.
    order: VecDeque<ObjectId>,
    ranges: usize,
}

/// The objects that nodes have sent last.
#[derive(Default)]
pub(crate) struct SentObjects {
    list: Mutex<SentList>,
}

/// A block within the bytes of a transfer.
pub(crate) struct SentBlock {
    /// The name of the bytes.
    pub object: ObjectRef,
    pub index: u32,
    pub len: usize,
    /// The node that sent the bytes.
    pub node: Arc<str>,
}

impl SentBlock {
    pub fn id(&self) -> BlockId {
        BlockId { object: self.object.id, index: self.index }
    }
}

impl SentObjects {
    /// Adds ranges of an object; the oldest objects go.
    pub(crate) fn insert(&self, id: ObjectId, ranges: Vec<SentRange>) {
        let mut list = self.list.lock();
        let list = &mut *list;
        let known = list.objects.remove(&id);
        match &known {
            Some(known) => list.ranges -= known.len(),
            None => list.order.push_back(id),
        }
        let mut all: Vec<SentRange> =
            ranges.into_iter().chain(known.iter().flat_map(|known| known.iter().cloned())).collect();
        // Stable: of two ranges with the same start the later note counts.
        all.sort_by_key(|range| range.offset);
        all.dedup_by_key(|range| range.offset);
        list.ranges += all.len();
        list.objects.insert(id, all.into());
        while list.objects.len() > OBJECTS_MAX || list.ranges > RANGES_MAX {
            let Some(oldest) = list.order.pop_front() else { return };
            list.ranges -= list.objects.remove(&oldest).map_or(0, |gone| gone.len());
        }
    }

    /// Forgets an object.
    pub(crate) fn remove(&self, id: ObjectId) {
        let mut list = self.list.lock();
        if let Some(gone) = list.objects.remove(&id) {
            list.ranges -= gone.len();
            list.order.retain(|known| *known != id);
        }
    }

    /// The block that has the bytes of this block in a transfer.
    pub(crate) fn find(&self, source: &str, object: &ObjectRef, index: u32, block_size: u64) -> Option<SentBlock> {
        let ranges = self.list.lock().objects.get(&object.id).map(Arc::clone)?;
        let start = u64::from(index) * block_size;
        let end = start + object.block_len(index, block_size) as u64;
        let after = ranges.partition_point(|range| range.offset <= start);
        let range = ranges.get(after.checked_sub(1)?)?;
        let within = start - range.offset;
        if !within.is_multiple_of(block_size) || range.offset.saturating_add(range.len) < end {
            return None;
        }
        let sent = sent_object(source, range.transfer, range.len);
        let index = u32::try_from(within / block_size).ok()?;
        let len = sent.block_len(index, block_size);
        (len as u64 == end - start).then(|| SentBlock { object: sent, index, len, node: Arc::clone(&range.node) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 4096;

    fn range(offset: u64, len: u64, transfer: u64) -> SentRange {
        SentRange { offset, len, transfer, node: "n".into() }
    }

    #[test]
    fn a_block_is_found_in_the_transfer_that_has_all_of_its_bytes() {
        let sent = SentObjects::default();
        let object = ObjectRef::new("s3://b", b"file", Version::new("etag"), 10 * BLOCK + 5);
        sent.insert(object.id, vec![range(0, 4 * BLOCK, 1), range(4 * BLOCK, BLOCK / 2, 2)]);
        // The third transfer begins within a block.
        sent.insert(object.id, vec![range(5 * BLOCK + 1, 2 * BLOCK, 3), range(8 * BLOCK, 2 * BLOCK + 5, 4)]);
        let found = |index| {
            let block = sent.find("s3://b", &object, index, BLOCK)?;
            let transfer = (1..=4).find(|number| {
                let len = [4 * BLOCK, BLOCK / 2, 2 * BLOCK, 2 * BLOCK + 5][*number as usize - 1];
                sent_object("s3://b", *number, len) == block.object
            });
            Some((transfer?, block.index))
        };
        let all: Vec<_> = (0..11).map(found).collect();
        let first = (0..4).map(|index| Some((1, index)));
        let last = (0..3).map(|index| Some((4, index)));
        assert_eq!(all, first.chain([None; 4]).chain(last).collect::<Vec<_>>());
        // The later note counts.
        sent.insert(object.id, vec![range(0, 4 * BLOCK, 4)]);
        assert_eq!(sent.find("s3://b", &object, 0, BLOCK).unwrap().object, sent_object("s3://b", 4, 4 * BLOCK));
        sent.remove(object.id);
        assert!(found(0).is_none() && sent.list.lock().ranges == 0);
    }

    #[test]
    fn the_oldest_objects_go() {
        let sent = SentObjects::default();
        for number in 0..=OBJECTS_MAX as u128 {
            sent.insert(ObjectId(number), vec![range(0, 1, 1)]);
        }
        let list = sent.list.lock();
        assert_eq!((list.objects.len(), list.order.len(), list.ranges), (OBJECTS_MAX, OBJECTS_MAX, OBJECTS_MAX));
        assert!(!list.objects.contains_key(&ObjectId(0)));
    }
}
