//! Files that are written whole, so that a reader finds the old file or the new one. Knows the file service, and no volumes.

use crate::client::ClientParts;
use crate::failure::CallFailure;
use crate::open_source::OpenSource;
use crate::range_reads::{buffer_of_bytes, closed_failure};
use crate::source_paths::normal_path;
use parking_lot::Mutex;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use rustix::fs::RenameFlags;
use rustix::io::Errno;
use spurline_fs::{
    CallerGroups, DirName, FileService, FsCaller, FsError, HeldInode, MissingFolders, RequestNumber, WholeFile,
    find_folder,
};
use spurline_volume::whole_files::MayReplace;
use std::sync::{Arc, OnceLock, Weak};

/// Bytes of one write: between two writes signals are handled.
const WRITE_PIECE_BYTES: usize = 4 << 20;
/// The file mode creation mask: a library can't read the process's mask without a change of the mask.
const CREATION_MASK: u32 = 0o022;

/// The user of this process; the source checks the rights.
fn caller() -> FsCaller<'static> {
    static PROCESS_GROUPS: OnceLock<Vec<u32>> = OnceLock::new();
    let groups = PROCESS_GROUPS.get_or_init(|| {
        rustix::process::getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()).collect()
    });
    FsCaller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: CallerGroups::All(groups),
        pid: std::process::id(),
        umask: CREATION_MASK,
        request: RequestNumber::NONE,
    }
}

fn folder_at<'a>(
    files: &'a dyn FileService,
    path: &[u8],
    missing: MissingFolders,
) -> Result<HeldInode<'a>, CallFailure> {
    find_folder(files, path, missing, &caller()).map_err(|error| CallFailure::from(error).of_path(path))
}

/// Makes the folder `path`, and all folders above.
pub(crate) fn make_folders(files: &dyn FileService, path: &[u8]) -> Result<(), CallFailure> {
    folder_at(files, &normal_path(path), MissingFolders::Make).map(drop)
}

/// The folder and the name of a path.
fn split_name(path: &[u8]) -> Result<(&[u8], &[u8]), CallFailure> {
    let slash = path.iter().rposition(|byte| *byte == b'/');
    let (folder, name) = slash.map_or((&[][..], path), |slash| (&path[..slash], &path[slash + 1..]));
    if name.is_empty() {
        return Err(CallFailure::new(Errno::ISDIR, "the path names no file").of_path(path));
    }
    Ok((folder, name))
}

/// Removes a name.
pub(crate) fn remove_name(files: &dyn FileService, path: &[u8], is_folder: bool) -> Result<(), CallFailure> {
    let path = normal_path(path);
    let (folder, name) = split_name(&path)?;
    let folder = folder_at(files, folder, MissingFolders::Fail)?;
    let removed = files.remove(folder.ino(), name, is_folder, &caller());
    removed.map_err(|error| CallFailure::from(error).of_path(&path))
}

/// Renames `from` to `to`; with [`RenameFlags::NOREPLACE`] only if that name is free.
pub(crate) fn rename_path(
    files: &dyn FileService,
    from: &[u8],
    to: &[u8],
    flags: RenameFlags,
) -> Result<(), CallFailure> {
    let from = normal_path(from);
    let to = normal_path(to);
    let (old_folder, old_name) = split_name(&from)?;
    let (new_folder, new_name) = split_name(&to)?;
    let old = folder_at(files, old_folder, MissingFolders::Fail)?;
    let new = folder_at(files, new_folder, MissingFolders::Fail)?;
    let old = DirName { parent: old.ino(), name: old_name };
    let new = DirName { parent: new.ino(), name: new_name };
    files.rename(old, new, flags.bits(), &caller()).map_err(|error| CallFailure::from(error).of_path(&from))
}

/// A file that is open for writing; the drop leaves what was there before.
pub(crate) struct PutFile {
    path: Vec<u8>,
    file: WholeFile,
}

impl PutFile {
    /// Makes the file for `path`, whose folder has to be there.
    pub fn create(open: &OpenSource, path: &[u8]) -> Result<PutFile, CallFailure> {
        let path = normal_path(path);
        split_name(&path)?;
        let begun = WholeFile::begin(open.files()?, &path, MissingFolders::Fail, caller());
        let file = begun.map_err(|error| CallFailure::from(error).of_path(&path))?;
        Ok(PutFile { path, file })
    }

    /// Appends bytes.
    pub fn write(&mut self, data: &[u8]) -> Result<(), CallFailure> {
        let written = self.file.write(data);
        written.map_err(|error| self.failed(error))
    }

    /// Sets the name; with `sync`, once the bytes are durable.
    ///
    /// # Errors
    /// Failures of the source, and `EEXIST` for a name that has to be free; the file is removed then.
    pub fn commit(self, sync: bool, may_replace: MayReplace<'_>) -> Result<(), CallFailure> {
        let PutFile { path, file } = self;
        file.publish(may_replace, sync).map_err(|error| CallFailure::from(error).of_path(&path))
    }

    fn failed(&self, error: FsError) -> CallFailure {
        CallFailure::from(error).of_path(&self.path)
    }
}

/// A file that is written from Python.
#[pyclass(frozen, module = "spurline._native")]
pub(crate) struct WritingFile {
    open: Weak<OpenSource>,
    started: Mutex<Option<PutFile>>,
    process: u32,
}

impl WritingFile {
    /// A file that was started.
    pub fn new(open: Weak<OpenSource>, started: PutFile) -> Self {
        WritingFile { open, started: Mutex::new(Some(started)), process: std::process::id() }
    }

    fn open_source(&self) -> Result<Arc<OpenSource>, CallFailure> {
        if self.process != std::process::id() {
            return Err(CallFailure::new(Errno::BADF, "the file belongs to the parent process"));
        }
        self.open.upgrade().ok_or_else(closed_failure)
    }

    fn take(&self) -> Option<PutFile> {
        self.started.lock().take()
    }
}

#[pymethods]
impl WritingFile {
    /// Appends the bytes of a buffer; returns the number of bytes.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.open_source()?;
        let buffer = contiguous_buffer(data)?;
        let pieces = BufferBytes::of(&buffer);
        // Taken out, so that no thread waits for this lock with the interpreter's lock held.
        let mut file = self.take().ok_or_else(closed_failure)?;
        let written = write_pieces(py, &mut file, pieces);
        *self.started.lock() = Some(file);
        written.map(|()| pieces.len)
    }

    /// Sets the name of the file; with `sync`, once the bytes are durable, and with `exclusive` only if the name is free. An object that
    /// has changed since the file was started is not replaced.
    fn commit(&self, py: Python<'_>, sync: bool, exclusive: bool) -> PyResult<()> {
        let open = self.open_source()?;
        let started = self.take().ok_or_else(closed_failure)?;
        Ok(py.detach(|| {
            let may_replace = if exclusive { MayReplace::Nothing } else { MayReplace::Unchanged };
            open.change(|_| started.commit(sync, may_replace))
        })?)
    }

    /// Removes the file.
    fn abort(&self, py: Python<'_>) {
        if self.open_source().is_ok() {
            let started = self.take();
            py.detach(|| drop(started));
        }
    }
}

impl Drop for WritingFile {
    /// A child that has a copy by a fork leaves the file to the parent.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.started.get_mut().take());
        }
    }
}

fn write_pieces(py: Python<'_>, file: &mut PutFile, bytes: BufferBytes) -> PyResult<()> {
    let mut done = 0;
    while done < bytes.len {
        let len = WRITE_PIECE_BYTES.min(bytes.len - done);
        py.detach(|| file.write(bytes.part(done, len)))?;
        done += len;
        py.check_signals()?;
    }
    Ok(())
}

fn contiguous_buffer(data: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = buffer_of_bytes(data)?;
    if !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err("a buffer is not contiguous; give one block of memory"));
    }
    Ok(buffer)
}

/// The bytes of a buffer that outlives this value.
#[derive(Clone, Copy)]
struct BufferBytes {
    start: *const u8,
    len: usize,
}

// SAFETY: the bytes are only read, and the buffer is kept by the caller.
unsafe impl Send for BufferBytes {}
// SAFETY: as above.
unsafe impl Sync for BufferBytes {}

impl BufferBytes {
    fn of(buffer: &PyUntypedBuffer) -> BufferBytes {
        BufferBytes { start: buffer.buf_ptr().cast(), len: buffer.len_bytes() }
    }

    fn part(&self, at: usize, len: usize) -> &[u8] {
        assert!(at <= self.len && len <= self.len - at, "a part inside of the buffer");
        if len == 0 {
            return &[];
        }
        // SAFETY: inside of the buffer, which is kept during the write.
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }
    }
}

fn put_file(open: &OpenSource, path: &[u8], bytes: &[u8], sync: bool) -> Result<(), CallFailure> {
    let mut file = PutFile::create(open, path)?;
    open.change(|_| {
        file.write(bytes)?;
        file.commit(sync, MayReplace::Anything)
    })
}

/// Writes whole files; for each None, or the exception.
///
/// # Errors
/// `BufferError` for contents that are not contiguous; `KeyboardInterrupt`.
pub(crate) fn put_files<'py>(
    py: Python<'py>,
    parts: &ClientParts,
    paths: Vec<Vec<u8>>,
    contents: &[Bound<'py, PyAny>],
    sync: bool,
) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
    let buffers = contents.iter().map(contiguous_buffer).collect::<PyResult<Vec<_>>>()?;
    let contents: Vec<BufferBytes> = buffers.iter().map(BufferBytes::of).collect();
    let results = parts.run_for_items(py, paths.len(), buffers, move |open, item| {
        let bytes = contents[item];
        put_file(open, &paths[item], bytes.part(0, bytes.len), sync)
    })?;
    Ok(results.into_iter().map(|result| result.err().map(|failure| failure.into_exception(py))).collect())
}
