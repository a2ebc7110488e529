//! Files that callers without a kernel write whole: a name leads to all bytes of the new file, or to what was there before. Knows neither
//! the meaning of a path for the caller, nor when a change is permitted.
//!
//! | source | bytes until the publication | the publication |
//! |---|---|---|
//! | a directory | in a file with a hidden name, in the last folder of the path that is there | a rename |
//! | a bucket | in a file that no name leads to ([`UnpublishedFile`]) | the object appears |

use crate::held_inode::{HeldInode, MissingFolders, find_folder, last_folder};
use crate::service::{CallerGroups, CreateMode, DirName, FileService, FileWrite, FsCaller, HandleRef, KernelSide};
use crate::{FsError, FsResult, ROOT};
use spurline_sys::random;
use spurline_types::errno::{EIO, ENOENT, EOPNOTSUPP, ESTALE};
use spurline_types::{Error, ErrorKind, OBJECT_HEADERS_XATTR, ObjectHeaders};
use spurline_volume::whole_files::{MayReplace, UnpublishedFile};
use spurline_volume::writes::{Caller, S_IFREG, WritePlace};
use std::sync::Arc;

/// Files of a directory that are not published have names that begin so.
pub const UNPUBLISHED_PREFIX: &str = ".spurline-upload-";
/// Type and permission bits before the caller's umask is taken off.
const NEW_FILE_MODE: u32 = S_IFREG | 0o666;
/// Attempts to use a folder that others remove meanwhile.
const FOLDER_ATTEMPTS: usize = 5;

/// A new file without a name; the drop removes what was written.
pub struct WholeFile {
    files: Arc<dyn FileService>,
    caller: FsCaller<'static>,
    path: Vec<u8>,
    missing: MissingFolders,
    written: u64,
    bytes: FileBytes,
}

enum FileBytes {
    Hidden(HiddenFile),
    Apart(Box<dyn UnpublishedFile>),
}

/// A file with a hidden name. The inode and the folder are held.
struct HiddenFile {
    folder: u64,
    name: Vec<u8>,
    file: HandleRef,
    state: HiddenState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum HiddenState {
    Open,
    Closed,
    Renamed,
}

impl WholeFile {
    /// Begins the file of a path. Folders that are missing are made by the publication.
    ///
    /// # Errors
    /// `ENOTDIR` for a path through a file; `EISDIR` for the path of a folder, which a directory finds by the publication; the source's.
    pub fn begin(
        files: Arc<dyn FileService>,
        path: &[u8],
        missing: MissingFolders,
        caller: FsCaller<'static>,
    ) -> FsResult<WholeFile> {
        let (folder, _) = split_path(path);
        let bytes = match files.whole_files() {
            Some(whole) => {
                last_folder(&*files, folder, missing, &caller)?;
                FileBytes::Apart(whole.begin_file(path, NEW_FILE_MODE, &source_caller(&caller))?)
            }
            None => FileBytes::Hidden(with_folder(missing, || {
                HiddenFile::create(last_folder(&*files, folder, missing, &caller)?.0, &*files, &caller)
            })?),
        };
        Ok(WholeFile { caller, path: path.to_vec(), missing, written: 0, bytes, files })
    }

    /// Whether the file has the headers of what was there before unless others are set.
    pub fn takes_headers_over(&self) -> bool {
        matches!(&self.bytes, FileBytes::Apart(file) if !file.is_new())
    }

    /// Stores headers with the file, before the first byte: an upload in parts has them from the begin on. A directory without extended
    /// attributes keeps none.
    pub fn set_headers(&self, headers: &ObjectHeaders) -> FsResult<()> {
        let hidden = match &self.bytes {
            FileBytes::Apart(file) => return Ok(file.set_headers(headers)?),
            FileBytes::Hidden(hidden) => hidden,
        };
        let value = headers.to_xattr();
        match self.files.setxattr(hidden.file.ino, OBJECT_HEADERS_XATTR, &value, 0, &self.caller) {
            Err(error) if error.errno() == EOPNOTSUPP => Ok(()),
            stored => stored,
        }
    }

    /// Appends bytes.
    pub fn write(&mut self, mut data: &[u8]) -> FsResult<()> {
        while !data.is_empty() {
            let written = match &self.bytes {
                FileBytes::Apart(file) => {
                    file.write_at(self.written, data)?;
                    data.len()
                }
                FileBytes::Hidden(hidden) => {
                    let offset = self.written;
                    let write = FileWrite { offset, place: WritePlace::Offset, data, lose_privileges: false };
                    self.files.write(hidden.file, &write, &self.caller)?
                }
            };
            if written == 0 {
                return Err(Error::new(ErrorKind::Io(EIO), "the source takes no bytes").into());
            }
            self.written += written as u64;
            data = &data[written..];
        }
        Ok(())
    }

    /// The name leads to the file, with `sync` durably; in a bucket always so. A directory checks only [`MayReplace::Nothing`]: all else is
    /// replaced.
    ///
    /// # Errors
    /// `EEXIST`, and `ESTALE` for another change in a bucket; that of the check; the source's. The name leads to what was there before.
    pub fn publish(mut self, may_replace: MayReplace<'_>, sync: bool) -> FsResult<()> {
        let hidden = match &mut self.bytes {
            FileBytes::Apart(file) => return Ok(file.publish(may_replace)?),
            FileBytes::Hidden(hidden) => hidden,
        };
        hidden.close(&*self.files, sync, &self.caller)?;
        let flags = if matches!(may_replace, MayReplace::Nothing) { libc::RENAME_NOREPLACE } else { 0 };
        let (folder, name) = split_path(&self.path);
        let folder = with_folder(self.missing, || {
            let found = find_folder(&*self.files, folder, self.missing, &self.caller)?;
            let from = DirName { parent: hidden.folder, name: &hidden.name };
            let to = DirName { parent: found.ino(), name };
            self.files.rename(from, to, flags, &self.caller)?;
            Ok(found)
        })?;
        hidden.state = HiddenState::Renamed;
        if sync { sync_folder(&*self.files, &folder, &self.caller) } else { Ok(()) }
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if let FileBytes::Hidden(hidden) = &mut self.bytes {
            hidden.end(&*self.files, &self.caller);
        }
    }
}

impl HiddenFile {
    fn create(folder: HeldInode<'_>, files: &dyn FileService, caller: &FsCaller<'_>) -> FsResult<HiddenFile> {
        let name = format!("{UNPUBLISHED_PREFIX}{:016x}", random()).into_bytes();
        let how = CreateMode { flags: (libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY) as u32, mode: NEW_FILE_MODE };
        let (entry, opened) = files.create(folder.ino(), &name, how, caller, &KernelSide::default())?;
        let file = HandleRef { ino: entry.ino, fh: opened.fh };
        Ok(HiddenFile { folder: folder.keep(), name, file, state: HiddenState::Open })
    }

    /// Closes the file with all bytes, with `sync` durably.
    fn close(&mut self, files: &dyn FileService, sync: bool, caller: &FsCaller<'_>) -> FsResult<()> {
        let written = if sync { files.fsync(self.file, false) } else { files.flush(self.file, 0, caller) };
        self.state = HiddenState::Closed;
        written.and(files.release(self.file.fh))
    }

    /// Gives the inodes back, and removes a file that has got no other name.
    fn end(&mut self, files: &dyn FileService, caller: &FsCaller<'_>) {
        if self.state == HiddenState::Open {
            let _ = files.release(self.file.fh);
        }
        if self.state != HiddenState::Renamed {
            let _ = files.remove(self.folder, &self.name, false, caller);
        }
        files.forget(self.file.ino, 1);
        if self.folder != ROOT {
            files.forget(self.folder, 1);
        }
    }
}

/// The folder and the name of a path.
fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    let slash = path.iter().rposition(|byte| *byte == b'/');
    slash.map_or((&[], path), |slash| (&path[..slash], &path[slash + 1..]))
}

/// Runs a call in a folder, again while others remove the folder with its last file.
fn with_folder<T>(missing: MissingFolders, call: impl Fn() -> FsResult<T>) -> FsResult<T> {
    let mut attempt = 1;
    loop {
        match call() {
            Err(error)
                if matches!(error.errno(), ENOENT | ESTALE)
                    && missing != MissingFolders::Fail
                    && attempt < FOLDER_ATTEMPTS =>
            {
                attempt += 1;
            }
            done => return done,
        }
    }
}

/// Makes the names of a folder durable, where that is a call of its own.
fn sync_folder(files: &dyn FileService, folder: &HeldInode<'_>, caller: &FsCaller<'_>) -> FsResult<()> {
    let fh = files.opendir(folder.ino(), caller)?;
    let synced = files.fsyncdir(HandleRef { ino: folder.ino(), fh }, false);
    files.releasedir(fh)?;
    match synced {
        Err(FsError::NotServed) => Ok(()),
        synced => synced,
    }
}

/// The caller as the source sees it.
fn source_caller(caller: &FsCaller<'_>) -> Caller {
    let FsCaller { uid, gid, pid, umask, groups, .. } = *caller;
    let groups = match groups {
        CallerGroups::All(groups) => groups.to_vec(),
        _ => Vec::new(),
    };
    Caller { uid, gid, groups, pid, umask, rights_checked: false }
}
