//! Names and folders for callers of a [`FileService`] that have paths in place of a kernel: an inode that was looked up is held until
//! the drop. Knows no file contents.

use crate::service::{FileEntry, FileService, FsCaller, NewNode};
use crate::{FsError, FsResult, LookupOutcome, ROOT};
use spurline_types::errno::{EEXIST, ENOENT};
use spurline_types::{Error, ErrorKind};
use spurline_volume::writes::{S_IFDIR, S_IFMT};

/// Permission bits of folders before the caller's umask is taken off.
const NEW_FOLDER_MODE: u32 = 0o777;

/// An inode that was looked up; the drop gives the lookup back.
pub struct HeldInode<'a> {
    files: &'a dyn FileService,
    ino: u64,
    mode: u32,
}

impl<'a> HeldInode<'a> {
    /// The root, which needs no lookup.
    pub fn root(files: &'a dyn FileService) -> Self {
        HeldInode { files, ino: ROOT, mode: S_IFDIR }
    }

    /// The inode of an answer that counts as a lookup.
    pub fn of_entry(files: &'a dyn FileService, entry: &FileEntry) -> Self {
        HeldInode { files, ino: entry.ino, mode: entry.attr.mode }
    }

    /// The inode's number.
    pub fn ino(&self) -> u64 {
        self.ino
    }

    /// The inode's number, with a lookup that the caller gives back by [`FileService::forget`]; the root needs none.
    pub fn keep(self) -> u64 {
        let ino = self.ino;
        std::mem::forget(self);
        ino
    }

    /// Whether the inode is a folder.
    pub fn is_folder(&self) -> bool {
        self.mode & S_IFMT == S_IFDIR
    }

    /// The inode of a name in this folder; `None` if there is none.
    pub fn lookup(&self, name: &[u8], caller: &FsCaller<'_>) -> FsResult<Option<HeldInode<'a>>> {
        match self.files.lookup(self.ino, name, caller)? {
            LookupOutcome::Found(entry) => Ok(Some(HeldInode::of_entry(self.files, &entry))),
            LookupOutcome::Absent { .. } => Ok(None),
        }
    }

    /// Makes a folder in this folder, or finds the folder that another caller has made.
    pub fn make_folder(&self, name: &[u8], caller: &FsCaller<'_>) -> FsResult<HeldInode<'a>> {
        self.make(name, NewNode::Directory { mode: NEW_FOLDER_MODE }, caller)
    }

    fn make(&self, name: &[u8], folder: NewNode<'_>, caller: &FsCaller<'_>) -> FsResult<HeldInode<'a>> {
        match self.files.make(self.ino, name, folder, caller) {
            Ok(entry) => Ok(HeldInode::of_entry(self.files, &entry)),
            // Another client was faster.
            Err(error) if error.errno() == EEXIST => self.lookup(name, caller)?.ok_or(error),
            Err(error) => Err(error),
        }
    }
}

impl Drop for HeldInode<'_> {
    fn drop(&mut self) {
        if self.ino != ROOT {
            self.files.forget(self.ino, 1);
        }
    }
}

/// What becomes of a path with folders that are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingFolders {
    /// `ENOENT`.
    Fail,
    /// They are made.
    Make,
    /// They are made on the way to a new file: a bucket keeps nothing of them.
    Imply,
}

/// The folder at a path below the root.
///
/// # Errors
/// As `last_folder`.
pub fn find_folder<'a>(
    files: &'a dyn FileService,
    path: &[u8],
    missing: MissingFolders,
    caller: &FsCaller<'_>,
) -> FsResult<HeldInode<'a>> {
    let (mut folder, absent) = last_folder(files, path, missing, caller)?;
    let mode = NEW_FOLDER_MODE;
    let implied = missing == MissingFolders::Imply;
    for name in absent {
        let new = if implied { NewNode::ImpliedDirectory { mode } } else { NewNode::Directory { mode } };
        folder = folder.make(name, new, caller)?;
    }
    Ok(folder)
}

/// The last folder on the way to a path that is there, and the names from there on; nothing is made.
///
/// # Errors
/// `ENOTDIR` for a path through a file; `ENOENT` where no folder may be missing; the source's.
pub(crate) fn last_folder<'a, 'p>(
    files: &'a dyn FileService,
    path: &'p [u8],
    missing: MissingFolders,
    caller: &FsCaller<'_>,
) -> FsResult<(HeldInode<'a>, Vec<&'p [u8]>)> {
    let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).peekable();
    let mut last = HeldInode::root(files);
    while let Some(name) = names.peek() {
        match last.lookup(name, caller)? {
            Some(found) if found.is_folder() => last = found,
            Some(_) => return Err(FsError::NotADirectory),
            None if missing == MissingFolders::Fail => {
                return Err(Error::new(ErrorKind::Io(ENOENT), "there is no such folder").into());
            }
            None => break,
        }
        names.next();
    }
    Ok((last, names.collect()))
}
