//! An open file of a bucket, as the interface of writable volumes has it. The bytes are those of [`OpenObject`].

use crate::object::{OpenObject, learn_attributes};
use crate::volume::BucketFiles;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::hand_over::OpenHold;
use spurline_volume::locks::{LAST_BYTE, LockOwner};
use spurline_volume::writes::{
    AttrChange, Caller, FileIdentity, FileLock, LockConflict, LockKind, LockRange, NodeAttr, OpenAttrCall,
    WritableFile, WritableObject, WritePlace,
};
use std::any::Any;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Access modes of `open(2)`.
const ACCESS_MODE: u32 = libc::O_ACCMODE as u32;
/// Bytes of a copy at a time.
const COPY_PIECE: usize = 1 << 20;

/// An open file.
pub(crate) struct BucketFile {
    files: Arc<BucketFiles>,
    object: Arc<OpenObject>,
    flags: u32,
    /// The owners of locks among mounts that were set through this file, until they have none.
    lock_owners: Mutex<Vec<LockOwner>>,
}

impl BucketFile {
    /// Opens the object; `O_TRUNC` empties it.
    pub fn open(files: &Arc<BucketFiles>, object: Arc<OpenObject>, flags: u32) -> Result<BucketFile> {
        let file = BucketFile { files: Arc::clone(files), object, flags, lock_owners: Mutex::default() };
        if file.writes() {
            file.object.add_writer();
            if files.options.stage {
                learn_attributes(&file.object)?;
            }
            if flags & libc::O_TRUNC as u32 != 0 {
                file.object.set_len(0)?;
            }
        }
        Ok(file)
    }

    fn writes(&self) -> bool {
        self.flags & ACCESS_MODE != libc::O_RDONLY as u32
    }

    pub fn attr(&self) -> NodeAttr {
        self.files.open_attr(&self.object)
    }

    fn note_lock_owner(&self, owner: LockOwner) {
        let mut owners = self.lock_owners.lock();
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }

    /// Forgets an owner without locks: later ones of the same owner can be those of another open file.
    fn forget_lock_owner(&self, owner: LockOwner) {
        if !self.object.locks.has_locks_of(owner) {
            self.lock_owners.lock().retain(|known| *known != owner);
        }
    }
}

impl Drop for BucketFile {
    fn drop(&mut self) {
        for LockOwner { family, number: owner } in self.lock_owners.lock().drain(..) {
            let range = LockRange { start: 0, end: LAST_BYTE };
            self.object.end_lock(&FileLock { family, owner, range, kind: LockKind::Unlock });
        }
        if self.writes() {
            self.object.remove_writer();
        }
    }
}

impl WritableObject for BucketFile {
    fn stat(&self) -> Result<NodeAttr> {
        Ok(self.attr())
    }

    fn set_attr(&self, set: &AttrChange, _caller: &Caller) -> Result<NodeAttr> {
        self.object.check_locks()?;
        if let Some(len) = set.size {
            self.object.set_len(len)?;
        }
        self.files.change_file_attrs(&self.object, set)?;
        Ok(self.attr())
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        match call {
            // Every caller has all rights that the mode shows.
            OpenAttrCall::Access(_) => Ok(Vec::new()),
            OpenAttrCall::List => Ok(self.object.file_attrs().xattr_names()),
            OpenAttrCall::Get(name) => self.object.file_attrs().xattr(name),
            OpenAttrCall::Set { name, value, flags } => {
                self.files.check_xattr(name)?;
                self.object.change_attrs(&|attrs| attrs.set_xattr(name, value, *flags)).map(|()| Vec::new())
            }
            OpenAttrCall::Remove(name) => {
                self.files.check_xattr(name)?;
                self.object.change_attrs(&|attrs| attrs.remove_xattr(name)).map(|()| Vec::new())
            }
        }
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        self.object.publish()
    }
}

impl WritableFile for BucketFile {
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        self.object.check_locks()?;
        self.object.read(offset, dst)
    }

    fn write_placed(
        &self,
        place: WritePlace,
        offset: u64,
        data: &[u8],
        lose_privileges: Option<&Caller>,
    ) -> Result<usize> {
        self.object.check_locks_to_write()?;
        if lose_privileges.is_some() {
            self.object.lose_privileges();
        }
        let appends = match place {
            WritePlace::AsOpened => self.flags & libc::O_APPEND as u32 != 0,
            WritePlace::End => true,
            WritePlace::Offset | WritePlace::MappedPages => false,
        };
        let written = self.object.write((!appends).then_some(offset), data)?;
        if self.flags & (libc::O_SYNC | libc::O_DSYNC) as u32 != 0 {
            self.object.publish()?;
        }
        Ok(written)
    }

    fn allocate(&self, mode: u32, offset: u64, len: u64, _caller: &Caller) -> Result<()> {
        self.object.check_locks()?;
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE as u32 != 0;
        let end = offset.saturating_add(len);
        match mode & !(libc::FALLOC_FL_KEEP_SIZE as u32) {
            0 => {}
            other if other == libc::FALLOC_FL_PUNCH_HOLE as u32 || other == libc::FALLOC_FL_ZERO_RANGE as u32 => {
                self.object.clear(offset..end)?;
            }
            _ => return Err(Error::new(ErrorKind::Unsupported, "a bucket can't insert or collapse ranges")),
        }
        if !keeps_size && end > self.object.attr().size {
            self.object.set_len(end)?;
        }
        Ok(())
    }

    fn copy_range(
        &self,
        offset: u64,
        to: &dyn WritableFile,
        to_offset: u64,
        len: u64,
        _caller: &Caller,
    ) -> Result<u64> {
        let Some(to) = to.as_any().downcast_ref::<BucketFile>() else {
            return Err(Error::new(ErrorKind::Io(libc::EXDEV), "the files are of different sources"));
        };
        let mut buffer = vec![0; COPY_PIECE.min(usize::try_from(len).unwrap_or(COPY_PIECE))];
        let mut copied = 0;
        while copied < len {
            let piece = buffer.len().min(usize::try_from(len - copied).unwrap_or(COPY_PIECE));
            let read = self.object.read(offset + copied, &mut buffer[..piece])?;
            if read == 0 {
                break;
            }
            to.object.write(Some(to_offset + copied), &buffer[..read])?;
            copied += read as u64;
        }
        Ok(copied)
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64> {
        let size = self.object.attr().size;
        if offset >= size {
            return Err(Error::new(ErrorKind::Io(libc::ENXIO), "the offset is past the end of the file"));
        }
        // All of the file counts as data.
        Ok(if whence == libc::SEEK_HOLE as u32 { size } else { offset })
    }

    fn flush(&self) -> Result<()> {
        self.object.publish_at_close()
    }

    fn test_lock(&self, lock: &FileLock) -> Result<Option<LockConflict>> {
        self.object.find_lock_of_others(lock)
    }

    fn set_lock(&self, lock: &FileLock, _caller: &Caller) -> Result<()> {
        self.note_lock_owner(lock.owner());
        let set = self.object.set_lock(lock, &|| self.files.refresh(&self.object));
        self.forget_lock_owner(lock.owner());
        set
    }

    fn adopt_lock(&self, lock: &FileLock, _descriptor: Option<OwnedFd>) {
        self.note_lock_owner(lock.owner());
        self.object.adopt_lock(lock);
    }

    fn publishes_at_flush(&self) -> bool {
        true
    }

    fn hold(&self) -> OpenHold<BorrowedFd<'_>> {
        self.object.kept_log().map_or(OpenHold::Name, OpenHold::Descriptor)
    }

    fn new_identity(&self) -> Option<FileIdentity> {
        Some(self.object.identity())
    }

    fn reopen(&self, flags: u32, _caller: &Caller) -> Result<Box<dyn WritableFile>> {
        Ok(Box::new(BucketFile::open(&self.files, Arc::clone(&self.object), flags)?))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
