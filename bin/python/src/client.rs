//! The client of a source, as a Python object: names, attributes, reads, loads and writes. Belongs to the process that opened it.

use crate::failure::CallFailure;
use crate::loading::LoadJob;
use crate::open_source::OpenSource;
use crate::parallel::{BatchWork, ClientWorkers};
use crate::range_reads::{AbandonedMemory, RangeReads, RangeTuple, closed_failure, plan_reads, writable_buffers};
use crate::settings::ClientSettings;
use crate::source_paths::normal_path;
use crate::writing::{PutFile, WritingFile, make_folders, put_files};
use parking_lot::Mutex;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::io::Errno;
use spurline_jobs::{JobAction, JobRun, JobSpec};
use spurline_types::{DirEntry, FileKind, ObjectAttr, attr::unix_time};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval at which a waiting call looks for signals: the delay of Ctrl-C.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Waits for a moment without the interpreter's lock, and then runs the handlers of signals.
///
/// # Errors
/// The exception of a handler, `KeyboardInterrupt` above all.
pub(crate) fn wait_step<T: Send>(py: Python<'_>, wait: impl FnOnce(Duration) -> T + Send) -> PyResult<T> {
    let waited = py.detach(|| wait(SIGNAL_CHECK_INTERVAL));
    py.check_signals()?;
    Ok(waited)
}

/// Waits until `wait` returns true.
///
/// # Errors
/// As [`wait_step`].
pub(crate) fn interruptible(py: Python<'_>, wait: impl Fn(Duration) -> bool + Sync) -> PyResult<()> {
    while !wait_step(py, &wait)? {}
    Ok(())
}

/// The parts of an open client.
pub(crate) struct ClientParts {
    pub open: Arc<OpenSource>,
    workers: ClientWorkers,
    abandoned: Arc<AbandonedMemory>,
    loads: Mutex<Vec<Arc<JobRun>>>,
}

/// Calls of the same kind on threads of the client: a step for each item.
struct ItemCalls<T, F> {
    open: Weak<OpenSource>,
    call: F,
    results: Vec<Mutex<Option<Result<T, CallFailure>>>>,
}

impl<T, F> BatchWork for ItemCalls<T, F>
where
    T: Send,
    F: Fn(&OpenSource, usize) -> Result<T, CallFailure> + Send + Sync,
{
    fn steps(&self) -> usize {
        self.results.len()
    }

    fn run_step(&self, step: usize) -> Option<usize> {
        let open = self.open.upgrade()?;
        let result = (self.call)(&open, step);
        *self.results[step].lock() = Some(result);
        None
    }

    fn step_panicked(&self, step: usize, cause: &str) -> Option<usize> {
        *self.results[step].lock() = Some(Err(CallFailure::new(Errno::IO, format!("the call failed: {cause}"))));
        None
    }
}

impl ClientParts {
    /// Runs `call` on a thread of the client, and waits for the result so that Ctrl-C ends the wait.
    fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        call: impl Fn(&OpenSource) -> Result<T, CallFailure> + Send + Sync + 'static,
    ) -> PyResult<T> {
        let mut results = self.run_for_items(py, 1, Vec::new(), move |open, _| call(open))?;
        Ok(results.pop().unwrap_or_else(|| Err(closed_failure()))?)
    }

    /// Runs `call` for each of so many items, several at a time, and waits for all results. `buffers` are kept until no call uses
    /// them.
    ///
    /// # Errors
    /// `KeyboardInterrupt`, after which calls that run go on.
    pub fn run_for_items<T: Send + 'static>(
        &self,
        py: Python<'_>,
        items: usize,
        buffers: Vec<PyUntypedBuffer>,
        call: impl Fn(&OpenSource, usize) -> Result<T, CallFailure> + Send + Sync + 'static,
    ) -> PyResult<Vec<Result<T, CallFailure>>> {
        let results = (0..items).map(|_| Mutex::default()).collect();
        let calls = Arc::new(ItemCalls { open: Arc::downgrade(&self.open), call, results });
        let batch = py.detach(|| self.workers.start(Arc::clone(&calls) as _));
        if let Err(interrupt) = interruptible(py, |limit| batch.wait_idle(limit)) {
            batch.cancel();
            self.abandoned.keep(batch, buffers);
            return Err(interrupt);
        }
        let results = calls.results.iter().map(|result| result.lock().take().unwrap_or_else(|| Err(closed_failure())));
        Ok(results.collect())
    }
}

/// Attributes for Python: kind, length in bytes, time of last change in nanoseconds since 1970, permission bits, version, etag.
type AttrTuple = (&'static str, u64, i64, u16, String, Option<String>);

fn attr_tuple(attr: &ObjectAttr) -> AttrTuple {
    let kind = match attr.kind {
        FileKind::File => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
    };
    let (seconds, nanoseconds) = unix_time(attr.mtime);
    let mtime = seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(nanoseconds));
    (kind, attr.size, mtime, attr.mode, attr.version.as_str().to_owned(), attr.etag.clone())
}

/// A name and its attributes for Python.
type NamedAttr<'py> = (Bound<'py, PyBytes>, AttrTuple);

fn named_attr<'py>(py: Python<'py>, name: &[u8], attr: &ObjectAttr) -> NamedAttr<'py> {
    (PyBytes::new(py, name), attr_tuple(attr))
}

/// A client of a source, of the process that opened the source: a child made by fork opens another.
#[pyclass(frozen, module = "spurline._native")]
pub(crate) struct NativeClient {
    process: u32,
    parts: Mutex<Option<Arc<ClientParts>>>,
}

impl NativeClient {
    fn parts(&self) -> PyResult<Arc<ClientParts>> {
        if self.process != std::process::id() {
            return Err(CallFailure::new(Errno::BADF, "the client belongs to the parent process").into());
        }
        let parts = self.parts.lock().clone();
        let parts = parts.ok_or_else(|| PyErr::from(closed_failure()))?;
        parts.abandoned.free_idle();
        Ok(parts)
    }

    fn take_parts(&self) -> Option<Arc<ClientParts>> {
        self.parts.lock().take()
    }
}

pub(crate) fn no_thread(error: std::io::Error) -> CallFailure {
    CallFailure::new(Errno::AGAIN, format!("no thread can be started: {error}"))
}

/// Runs `work` on a separate thread, which an interrupted caller leaves behind; `None` if the thread failed.
fn run_apart<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<Option<T>> {
    let (sender, receiver) = mpsc::channel();
    let receiver = Mutex::new(receiver);
    let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
        let _ = sender.send(work());
    });
    let thread = spawned.map_err(no_thread)?;
    loop {
        match wait_step(py, |limit| receiver.lock().recv_timeout(limit))? {
            Ok(result) => {
                let _ = py.detach(|| thread.join());
                return Ok(Some(result));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

#[pymethods]
impl NativeClient {
    /// Opens `source` with settings as pairs of names and texts.
    #[new]
    fn open(py: Python<'_>, source: &str, settings: Vec<(String, String)>) -> PyResult<NativeClient> {
        let settings = ClientSettings::parse(source, &settings)?;
        let workers = ClientWorkers::new(settings.threads);
        let opened = run_apart(py, "spurline-open", move || OpenSource::open(settings))?;
        let failed = "the thread that opened the source has failed";
        let open = Arc::new(opened.ok_or_else(|| CallFailure::new(Errno::IO, failed))??);
        let parts = ClientParts { open, workers, abandoned: Arc::default(), loads: Mutex::default() };
        Ok(NativeClient { process: std::process::id(), parts: Mutex::new(Some(Arc::new(parts))) })
    }

    /// Bytes of a block, the unit of caching.
    fn block_size(&self) -> PyResult<u64> {
        Ok(self.parts()?.open.volume().block_size())
    }

    /// The source's URL.
    fn source(&self) -> PyResult<String> {
        Ok(self.parts()?.open.volume().source().to_owned())
    }

    /// The attributes of `path`, behind symbolic links, with the path without links.
    fn find<'py>(&self, py: Python<'py>, path: Vec<u8>) -> PyResult<NamedAttr<'py>> {
        let wanted = path.clone();
        let found = self
            .parts()?
            .run(py, move |open| open.find_path(&wanted).map_err(|error| CallFailure::from(error).of_path(&wanted)))?;
        Ok(named_attr(py, &found.path, &found.attr))
    }

    /// As `find`, for many paths at once: for each the attributes, or the exception.
    fn find_many<'py>(&self, py: Python<'py>, paths: Vec<Vec<u8>>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let found = self.parts()?.run_for_items(py, paths.len(), Vec::new(), move |open, item| {
            let path = &paths[item];
            open.find_path(path).map_err(|error| CallFailure::from(error).of_path(path))
        })?;
        let found = found.into_iter().map(|found| match found {
            Ok(found) => Ok(named_attr(py, &found.path, &found.attr).into_pyobject(py)?.into_any()),
            Err(failure) => Ok(failure.into_exception(py)),
        });
        found.collect()
    }

    /// A page of the names of the folder `path`, and the cursor of the next page; links are not followed.
    fn list_page<'py>(
        &self,
        py: Python<'py>,
        path: Vec<u8>,
        cursor: Option<Vec<u8>>,
        most: usize,
    ) -> PyResult<(Vec<NamedAttr<'py>>, Option<Bound<'py, PyBytes>>)> {
        let page = self.parts()?.run(py, move |open| {
            let listed = match &cursor {
                Some(cursor) => open.volume().list(&path, Some(cursor), most),
                None => open
                    .find_path(&path)
                    .and_then(|found| open.volume().list_within(&found.path, None, most, open.since_change())),
            };
            listed.map_err(|error| CallFailure::from(error).of_path(&path))
        })?;
        let entries = page.entries.iter().map(|DirEntry { name, attr }| named_attr(py, name, attr)).collect();
        Ok((entries, page.next.map(|next| PyBytes::new(py, &next))))
    }

    /// The target of the symbolic link `path`.
    fn read_link<'py>(&self, py: Python<'py>, path: Vec<u8>) -> PyResult<Bound<'py, PyBytes>> {
        let target = self.parts()?.run(py, move |open: &OpenSource| {
            open.volume().readlink(&normal_path(&path)).map_err(|error| CallFailure::from(error).of_path(&path))
        })?;
        Ok(PyBytes::new(py, &target))
    }

    /// The blocks of `path` in the cache, as JSON.
    fn info(&self, py: Python<'_>, path: Vec<u8>) -> PyResult<String> {
        self.parts()?.run(py, move |open: &OpenSource| {
            let found = open.find_path(&path).and_then(|found| open.volume().info(&found.path));
            let info = found.map_err(|error| CallFailure::from(error).of_path(&path))?;
            serde_json::to_string(&info).map_err(|error| CallFailure::new(Errno::IO, error.to_string()))
        })
    }

    /// The counters of the client, as JSON.
    fn stats(&self) -> PyResult<String> {
        Ok(self.parts()?.open.stats.to_json().to_string())
    }

    /// Starts to read ranges into buffers.
    fn start_reads(
        &self,
        py: Python<'_>,
        ranges: Vec<RangeTuple>,
        buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<RangeReads> {
        let parts = self.parts()?;
        let buffers = writable_buffers(&buffers)?;
        let work = plan_reads(&parts.open, ranges, &buffers)?;
        let batch = py.detach(|| parts.workers.start(Arc::clone(&work) as _));
        Ok(RangeReads::start(work, batch, buffers, Arc::clone(&parts.abandoned)))
    }

    /// Starts to load files and folders into the cache.
    fn start_load(&self, paths: Vec<String>, verify: bool, parallel: u32) -> PyResult<LoadJob> {
        let parts = self.parts()?;
        let target = parts.open.job_target();
        let spec = JobSpec {
            action: JobAction::Load,
            source: target.source().to_owned(),
            paths,
            listed: false,
            include: Vec::new(),
            exclude: Vec::new(),
            metadata_only: false,
            verify,
            skip_if_exists: false,
            replicas: None,
            rate: 0,
            with_pinned: false,
            everything: false,
            parallel,
        };
        let job = LoadJob::start(spec, target)?;
        let mut loads = parts.loads.lock();
        loads.retain(|run| !run.progress().state.is_ended());
        loads.push(job.run());
        Ok(job)
    }

    /// Makes a folder, with all folders above.
    fn make_folders(&self, py: Python<'_>, path: Vec<u8>) -> PyResult<()> {
        self.parts()?.run(py, move |open: &OpenSource| open.change(|files| make_folders(files, &path)))
    }

    /// Starts a file that gets the name `path` by the commit.
    fn create(&self, py: Python<'_>, path: Vec<u8>) -> PyResult<WritingFile> {
        let parts = self.parts()?;
        let started = parts.run(py, move |open: &OpenSource| PutFile::create(open, &path))?;
        Ok(WritingFile::new(Arc::downgrade(&parts.open), started))
    }

    /// Removes the file, or the empty folder, `path`.
    fn remove(&self, py: Python<'_>, path: Vec<u8>, is_folder: bool) -> PyResult<()> {
        self.parts()?
            .run(py, move |open: &OpenSource| open.change(|files| crate::writing::remove_name(files, &path, is_folder)))
    }

    /// Renames a file or folder; a file at the new path is replaced.
    fn rename(&self, py: Python<'_>, from: Vec<u8>, to: Vec<u8>) -> PyResult<()> {
        let flags = rustix::fs::RenameFlags::empty();
        self.parts()?.run(py, move |open: &OpenSource| {
            open.change(|files| crate::writing::rename_path(files, &from, &to, flags))
        })
    }

    /// Writes whole files from buffers, several at a time; for each None, or the exception.
    fn put_many<'py>(
        &self,
        py: Python<'py>,
        paths: Vec<Vec<u8>>,
        contents: Vec<Bound<'py, PyAny>>,
        sync: bool,
    ) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
        let parts = self.parts()?;
        put_files(py, &parts, paths, &contents, sync)
    }

    /// Whether no call, no read and no load uses the client.
    fn is_idle(&self) -> bool {
        let parts = self.parts.lock();
        let Some(parts) = parts.as_ref() else { return true };
        let is_loading = parts.loads.lock().iter().any(|run| !run.progress().state.is_ended());
        // Reads under way share this memory.
        let is_read = Arc::strong_count(&parts.abandoned) > 1;
        Arc::strong_count(parts) == 1 && !is_read && !is_loading
    }

    /// Ends all calls and threads; waits until nodes have written bytes durably.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let Some(parts) = self.take_parts() else { return Ok(()) };
        Ok(run_apart(py, "spurline-close", move || close_parts(parts))?.unwrap_or(Ok(()))?)
    }
}

/// Interval at which the last step of a close looks whether the calls of other threads have ended.
const CALL_END_INTERVAL: Duration = Duration::from_millis(1);

fn close_parts(parts: Arc<ClientParts>) -> Result<(), CallFailure> {
    for run in parts.loads.lock().drain(..) {
        run.stop();
    }
    parts.workers.close();
    let mut open = {
        let mut parts = parts;
        loop {
            match Arc::try_unwrap(parts) {
                Ok(parts) => break parts.open,
                // Calls of other threads end, now that nothing runs for them.
                Err(shared) => parts = shared,
            }
            std::thread::sleep(CALL_END_INTERVAL);
        }
    };
    loop {
        match Arc::try_unwrap(open) {
            Ok(open) => return open.finish(),
            Err(shared) => open = shared,
        }
        std::thread::sleep(CALL_END_INTERVAL);
    }
}

impl Drop for NativeClient {
    fn drop(&mut self) {
        let Some(parts) = self.take_parts() else { return };
        if self.process != std::process::id() {
            // The threads and the state of the locks are the parent's.
            std::mem::forget(parts);
            return;
        }
        // No wait in a destructor.
        let _ = std::thread::Builder::new().name("spurline-close".into()).spawn(move || close_parts(parts));
    }
}
