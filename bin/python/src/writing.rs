//! Files that are written: under a temporary name first, and renamed when whole, so that a reader finds the old file
//! or the new one. A source whose files appear whole at the close needs no temporary name. Knows the file service, and no volumes.

use crate::client::ClientParts;
use crate::failure::CallFailure;
use crate::open_source::OpenSource;
use crate::range_reads::{buffer_of_bytes, closed_failure};
use crate::source_paths::normal_path;
use crate::writing_names::{HeldName, NameHolder};
use parking_lot::Mutex;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use spurline_fs::{
    CallerGroups, CreateMode, DirName, FileService, FileWrite, FsCaller, FsError, HandleRef, HeldInode, KernelSide,
    MissingFolders, RequestNumber, find_folder,
};
use spurline_volume::writes::{S_IFREG, WritePlace};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Bytes of one write: between two writes signals are handled.
const WRITE_PIECE_BYTES: usize = 4 << 20;
/// Permission bits of files before the umask is taken off.
const NEW_FILE_MODE: u32 = 0o666;
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
///
/// # Errors
/// Failures of the source.
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
///
/// # Errors
/// Failures of the source.
pub(crate) fn remove_name(files: &dyn FileService, path: &[u8], is_folder: bool) -> Result<(), CallFailure> {
    let path = normal_path(path);
    let (folder, name) = split_name(&path)?;
    let folder = folder_at(files, folder, MissingFolders::Fail)?;
    let removed = files.remove(folder.ino(), name, is_folder, &caller());
    removed.map_err(|error| CallFailure::from(error).of_path(&path))
}

/// Renames `from` to `to`; with [`RenameFlags::NOREPLACE`] only if that name is free.
///
/// # Errors
/// Failures of the source.
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

/// How a file gets the name.
enum NameStep {
    /// By a rename of this path.
    Rename { first_path: Vec<u8> },
    /// At the close, whole.
    Close { is_new: bool, _held: HeldName },
}

/// A file that is open for writing.
pub(crate) struct PutFile {
    path: Vec<u8>,
    step: NameStep,
    file: HandleRef,
    written: u64,
}

impl PutFile {
    /// Makes the file for `path`, whose folder has to be there.
    ///
    /// # Errors
    /// Failures of the source; `EBUSY` for an object that another file of the client writes.
    pub fn create(open: &OpenSource, path: &[u8], holder: NameHolder) -> Result<PutFile, CallFailure> {
        let files = open.files()?;
        let path = normal_path(path);
        if open.publishes() {
            Self::create_object(open, &*files, path, holder)
        } else {
            Self::create_first(&*files, path)
        }
    }

    /// Opens the object of a name anew, without its bytes: others see these until the close.
    fn create_object(
        open: &OpenSource,
        files: &dyn FileService,
        path: Vec<u8>,
        holder: NameHolder,
    ) -> Result<PutFile, CallFailure> {
        let (folder, name) = split_name(&path)?;
        let held = open.writing_names().hold(&path, holder)?;
        let found = folder_at(files, folder, MissingFolders::Fail)?;
        let known = found.lookup(name, &caller()).map_err(|error| CallFailure::from(error).of_path(&path))?;
        let is_new = known.is_none();
        let flags = (OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY).bits();
        let how = CreateMode { flags, mode: S_IFREG | NEW_FILE_MODE };
        let made = files.create(found.ino(), name, how, &caller(), &KernelSide::default());
        let (entry, opened) = made.map_err(|error| CallFailure::from(error).of_path(&path))?;
        let file = HandleRef { ino: entry.ino, fh: opened.fh };
        Ok(PutFile { step: NameStep::Close { is_new, _held: held }, path, file, written: 0 })
    }

    /// Makes a file beside the path.
    fn create_first(files: &dyn FileService, path: Vec<u8>) -> Result<PutFile, CallFailure> {
        static NEXT_FIRST_NAME: AtomicU64 = AtomicU64::new(0);
        let (folder, _) = split_name(&path)?;
        let found = folder_at(files, folder, MissingFolders::Fail)?;
        let number = NEXT_FIRST_NAME.fetch_add(1, Ordering::Relaxed);
        let moment = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
        let first_name = format!(".spurline-{:x}-{moment:x}-{number:x}", std::process::id()).into_bytes();
        let how = CreateMode {
            flags: (OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY).bits(),
            mode: S_IFREG | NEW_FILE_MODE,
        };
        let made = files.create(found.ino(), &first_name, how, &caller(), &KernelSide::default());
        let (entry, opened) = made.map_err(|error| CallFailure::from(error).of_path(&path))?;
        let mut first_path = folder.to_owned();
        if !folder.is_empty() {
            first_path.push(b'/');
        }
        first_path.extend(first_name);
        let file = HandleRef { ino: entry.ino, fh: opened.fh };
        Ok(PutFile { step: NameStep::Rename { first_path }, path, file, written: 0 })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// Failures of the source.
    pub fn write(&mut self, files: &dyn FileService, mut data: &[u8]) -> Result<(), CallFailure> {
        while !data.is_empty() {
            let write = FileWrite { offset: self.written, place: WritePlace::Offset, data, lose_privileges: false };
            let written = files.write(self.file, &write, &caller()).map_err(|error| self.failed(error))?;
            if written == 0 {
                return Err(CallFailure::new(Errno::IO, "the source takes no bytes").of_path(&self.path));
            }
            self.written += written as u64;
            data = &data[written..];
        }
        Ok(())
    }

    /// Closes the file and sets the name; with `sync`, once the bytes are durable.
    ///
    /// # Errors
    /// Failures of the source, and with [`RenameFlags::NOREPLACE`] `EEXIST`; the file is removed then.
    pub fn commit(self, files: &dyn FileService, sync: bool, flags: RenameFlags) -> Result<(), CallFailure> {
        let first_path = match &self.step {
            NameStep::Rename { first_path } => first_path,
            NameStep::Close { is_new: false, .. } if flags.contains(RenameFlags::NOREPLACE) => {
                self.drop_object(files);
                return Err(CallFailure::new(Errno::EXIST, "the name is taken").of_path(&self.path));
            }
            NameStep::Close { .. } => return self.publish(files),
        };
        let closed = self.close(files, sync);
        let renamed = closed.and_then(|()| rename_path(files, first_path, &self.path, flags));
        renamed.map_err(|failure| {
            let _ = remove_name(files, first_path, false);
            failure.of_path(&self.path)
        })
    }

    /// Closes the file: the name leads to these bytes then, durably.
    fn publish(&self, files: &dyn FileService) -> Result<(), CallFailure> {
        if let Err(error) = files.fsync(self.file, false) {
            self.drop_object(files);
            return Err(self.failed(error));
        }
        self.end(files).map_err(|error| self.failed(error))
    }

    /// Closes the file without its bytes: the name leads to the object before.
    fn drop_object(&self, files: &dyn FileService) {
        let _ = files.discard(self.file);
        let _ = self.end(files);
    }

    fn end(&self, files: &dyn FileService) -> Result<(), FsError> {
        let released = files.release(self.file.fh);
        files.forget(self.file.ino, 1);
        released
    }

    fn close(&self, files: &dyn FileService, sync: bool) -> Result<(), CallFailure> {
        let synced = if sync { without_unserved(files.fsync(self.file, false)) } else { Ok(()) };
        let flushed = without_unserved(files.flush(self.file, 0, &caller()));
        synced.and(flushed).and(self.end(files)).map_err(|error| self.failed(error))
    }

    /// Closes the file; the name leads to what was there before.
    pub fn abort(self, files: &dyn FileService) {
        match &self.step {
            NameStep::Close { .. } => self.drop_object(files),
            NameStep::Rename { first_path } => {
                let _ = self.close(files, false);
                let _ = remove_name(files, first_path, false);
            }
        }
    }

    fn failed(&self, error: FsError) -> CallFailure {
        CallFailure::from(error).of_path(&self.path)
    }
}

/// A source without this call has nothing to do.
fn without_unserved(result: Result<(), FsError>) -> Result<(), FsError> {
    match result {
        Err(FsError::NotServed) => Ok(()),
        result => result,
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

    fn files(&self) -> Result<Arc<dyn FileService>, CallFailure> {
        self.open_source()?.files()
    }

    fn take(&self) -> Option<PutFile> {
        self.started.lock().take()
    }
}

#[pymethods]
impl WritingFile {
    /// Appends the bytes of a buffer; returns the number of bytes.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let files = self.files()?;
        let buffer = contiguous_buffer(data)?;
        let pieces = BufferBytes::of(&buffer);
        // Taken out, so that no thread waits for this lock with the interpreter's lock held.
        let mut file = self.take().ok_or_else(closed_failure)?;
        let written = write_pieces(py, &mut file, &*files, pieces);
        *self.started.lock() = Some(file);
        written.map(|()| pieces.len)
    }

    /// Sets the name of the file; with `sync`, once the bytes are durable, and with `exclusive` only if the name is free.
    fn commit(&self, py: Python<'_>, sync: bool, exclusive: bool) -> PyResult<()> {
        let open = self.open_source()?;
        let started = self.take().ok_or_else(closed_failure)?;
        let flags = if exclusive { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        Ok(py.detach(|| open.change(|files| started.commit(files, sync, flags)))?)
    }

    /// Removes the file.
    fn abort(&self, py: Python<'_>) {
        let Ok(files) = self.files() else { return };
        if let Some(started) = self.take() {
            py.detach(|| started.abort(&*files));
        }
    }
}

fn write_pieces(py: Python<'_>, file: &mut PutFile, files: &dyn FileService, bytes: BufferBytes) -> PyResult<()> {
    let mut done = 0;
    while done < bytes.len {
        let len = WRITE_PIECE_BYTES.min(bytes.len - done);
        py.detach(|| file.write(files, bytes.part(done, len)))?;
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
    let mut file = PutFile::create(open, path, NameHolder::Put)?;
    open.change(|files| match file.write(files, bytes) {
        Ok(()) => file.commit(files, sync, RenameFlags::empty()),
        Err(failure) => {
            file.abort(files);
            Err(failure)
        }
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
