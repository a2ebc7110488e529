//! Makes a local file with all bytes of an object the object's data file: no byte is copied. Knows nothing of the file's origin.

use crate::crc;
use crate::disk::{CacheDisk, DiskWork, disk_footprint};
use crate::index::WHOLE;
use crate::store::{EXTENT_BYTES, Store, StoreCore};
use crate::write::PutOutcome;
use spurline_types::{BlockId, ObjectRef};
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;

/// All blocks of an object, claimed for a local file. Blocks that were not stored are given back when this is dropped.
pub struct FileAdoption {
    core: Arc<StoreCore>,
    disk: Arc<CacheDisk>,
    object: ObjectRef,
    /// The blocks that are not stored yet, the last one first.
    claimed: Vec<BlockId>,
}

impl Store {
    /// Begins to take over a file without a name that has all bytes of an object and that is not written to any more. `None` if the
    /// object has blocks here already, or no cache directory is on the file system of the file.
    pub fn begin_adoption(&self, object: &ObjectRef, file: &File) -> Option<FileAdoption> {
        let core = self.core();
        let disk = core.disk_of_file(object, file)?;
        let claimed = core.claim_object(object)?;
        Some(FileAdoption { core: Arc::clone(core), disk, object: object.clone(), claimed })
    }
}

impl StoreCore {
    /// A usable disk for a file with the bytes of an object, on the same file system.
    fn disk_of_file(&self, object: &ObjectRef, file: &File) -> Option<Arc<CacheDisk>> {
        let metadata = file.metadata().ok()?;
        let is_one_file = self.disks.len() == 1 || object.size <= EXTENT_BYTES;
        if metadata.len() != object.size || object.size == 0 || !is_one_file {
            return None;
        }
        let is_here = |disk: &&Arc<CacheDisk>| {
            disk.health.usable() && disk.root.metadata().is_ok_and(|root| root.dev() == metadata.dev())
        };
        self.disks.iter().find(is_here).cloned()
    }

    /// Claims all blocks of an object that has none, and none of whose files is in use.
    fn claim_object(&self, object: &ObjectRef) -> Option<Vec<BlockId>> {
        let count = u32::try_from(object.block_count(u64::from(self.config.block_size))).ok()?;
        let mut shard = self.index.shard_of(&object.id).write();
        let activity = shard.activity(&object.id);
        let has_blocks = !shard.all_blocks(&object.id, |_, _| false);
        if has_blocks || activity.writers > 0 || activity.unlinking > 0 || activity.whole > 0 {
            return None;
        }
        let blocks = (0..count).rev().map(|index| BlockId { object: object.id, index });
        Some(blocks.filter(|block| shard.begin_write(block)).collect())
    }
}

impl FileAdoption {
    /// Gives the file its name, and enters the blocks. Blocks that find no room are not stored, as with `StoreCore::put_classed`.
    /// A failing disk is no error.
    pub fn finish(mut self, file: &File, class: u64) {
        // The log must not name blocks that a crash takes away.
        if let Err(error) = file.sync_data() {
            self.core.write_failed(&self.disk, "syncing a written file", &error);
            return;
        }
        // No fault of the disk: a file system without links, or a process without /proc.
        if let Err(error) = self.disk.link_file(&self.core.file_key(self.object.id, 0, true), file) {
            tracing::debug!("cache disk {}: a written file stays outside: {error}", self.disk.root.display());
            return;
        }
        let mut bytes = Vec::new();
        while let Some(block) = self.claimed.pop() {
            let is_stored = self.store_block(block, file, class, &mut bytes);
            self.end_block(block, is_stored);
        }
    }

    /// Enters a claimed block whose bytes are in the file; `bytes` is memory for these.
    fn store_block(&self, block: BlockId, file: &File, class: u64, bytes: &mut Vec<u8>) -> bool {
        let block_size = u64::from(self.core.config.block_size);
        bytes.resize(self.object.block_len(block.index, block_size), 0);
        let len = bytes.len() as u32;
        let footprint = disk_footprint(len, WHOLE);
        let core = &self.core;
        let read = file.read_exact_at(bytes, u64::from(block.index) * block_size);
        if let Err(error) = &read {
            self.disk.note_failure("reading a written file", error);
        }
        if read.is_err()
            || core.admit_to_class(&self.disk, block, class, footprint) != PutOutcome::Stored
            || core.reserve_bytes(&self.disk, footprint) != PutOutcome::Stored
        {
            self.disk.enqueue(DiskWork::Reclaim(block, true));
            return false;
        }
        // The file has taken this space before.
        self.disk.adjust_free(footprint as i64);
        core.enter_block(&self.disk, &block, WHOLE, len, crc::checksums(bytes)) == PutOutcome::Stored
    }

    fn end_block(&self, block: BlockId, is_stored: bool) {
        self.core.end_block(&self.disk, &block, &self.core.file_key(block.object, 0, true), is_stored);
    }
}

impl Drop for FileAdoption {
    fn drop(&mut self) {
        while let Some(block) = self.claimed.pop() {
            self.end_block(block, false);
        }
    }
}
