//! A directory as an origin: a local disk, an NFS mount, any file system. It deliberately knows no cache of
//! attributes; every call is a system call on a thread of the pool.

use crate::file_stat::{ClockLag, FileStat, stat_on_server};
use crate::open_writers::WriterCheck;
use crate::snapshots::{ListingSnapshots, SortedNames};
use crate::validated::{validate_path, validate_range};
use crate::{OriginCapabilities, OriginCapacity, OriginStore};
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use spurline_exec::{NoAnswer, PriorityWorkers};
use spurline_object_store::{OriginOptions, SourceLocation};
use spurline_sys::{open_by_parts, proc_path, read_growing, show_path, split_path};
use spurline_types::{
    ByteSink, DirEntry, Error, ErrorKind, FileKind, ListPage, OBJECT_HEADERS_XATTR, ObjectAttr, ObjectHeaders,
    ObjectRef, Result, Stats,
};
use std::collections::HashSet;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

/// Flags of opening a file: no link is followed, and no pipe or lease is waited for.
const FILE: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Most folders with skipped names that are remembered.
const INCOMPLETE: usize = 1000;

/// A directory read through the operating system.
pub(crate) struct DirectoryOrigin {
    source: SourceLocation,
    workers: PriorityWorkers,
    stats: Arc<Stats>,
    inner: Arc<DirectoryReader>,
}

struct DirectoryReader {
    root: PathBuf,
    /// The directory that the operator named, the root itself or one above it. Links are followed up to here only.
    base: PathBuf,
    /// The path from `base` to the root.
    below: Vec<u8>,
    /// `openat2` is missing (an old kernel or a sandbox); paths are opened part by part.
    no_openat2: AtomicBool,
    /// The source directory did not exist at the last access.
    gone: AtomicBool,
    /// It was opened before. An error at the first time is that of the start, and is reported there.
    opened: AtomicBool,
    snapshots: ListingSnapshots,
    lag: ClockLag,
    writer_check: WriterCheck,
    /// Folders whose last listing skipped existing names.
    incomplete: Mutex<HashSet<Vec<u8>>>,
}

impl DirectoryOrigin {
    pub(crate) fn new(source: SourceLocation, config: &OriginOptions, stats: Arc<Stats>) -> Self {
        let root = source.path();
        let named = config.within.iter().filter_map(|url| Some(SourceLocation::parse(url).ok()?.path().to_path_buf()));
        // The nearest of several: the operator also controls what is above it.
        let base = named.filter(|base| !base.as_os_str().is_empty() && root.starts_with(base));
        let base = base.max_by_key(|base| base.as_os_str().len()).unwrap_or_else(|| root.to_path_buf());
        let below = root.strip_prefix(&base).unwrap_or(Path::new("")).as_os_str().as_bytes().to_vec();
        let inner = Arc::new(DirectoryReader {
            root: root.to_path_buf(),
            base,
            below,
            no_openat2: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            opened: AtomicBool::new(false),
            snapshots: ListingSnapshots::default(),
            lag: ClockLag::default(),
            writer_check: WriterCheck::default(),
            incomplete: Mutex::default(),
        });
        DirectoryOrigin { source, workers: PriorityWorkers::new("under-dir", config.dir_threads), stats, inner }
    }

    fn timeout_error(&self, what: &str, path: &[u8], why: &str) -> Error {
        let why = format!("{what} '{}' of {} took too long: {why}", show_path(path), self.source.url());
        Error::new(ErrorKind::Timeout, why)
    }

    fn pool_error(&self, what: &str, path: &[u8], why: NoAnswer) -> Error {
        let evidence = match why {
            NoAnswer::Queued => "all threads for this directory are waiting for the operating system",
            NoAnswer::Running => "the operating system has not responded",
        };
        self.timeout_error(what, path, &format!("{evidence}; check that this file system responds (df, dmesg)"))
    }

    /// Calls `ask`, and calls it again after a wait if the file is too young. The caller's thread waits, because the
    /// pool has few threads and lookups need them.
    fn retry_young<T>(
        &self,
        what: &str,
        path: &[u8],
        deadline: Instant,
        mut ask: impl FnMut(bool) -> Result<SettledAnswer<T>>,
    ) -> Result<T> {
        let mut waited = false;
        loop {
            match ask(waited)? {
                SettledAnswer::Final(told) => return Ok(told),
                SettledAnswer::Young(left) if Instant::now() + left < deadline => std::thread::sleep(left),
                SettledAnswer::Young(left) => {
                    let why = format!("for another {left:?} it can change without changing its times; try again later");
                    return Err(self.timeout_error(what, path, &why));
                }
            }
            waited = true;
        }
    }

    /// Runs a metadata call on the pool, with its counters.
    fn run_on_pool<T: Send + 'static>(
        &self,
        what: &'static str,
        path: &[u8],
        deadline: Instant,
        f: impl FnOnce(&DirectoryReader, &[u8]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let started = Instant::now();
        let inner = Arc::clone(&self.inner);
        let owned = path.to_vec();
        let answer = self
            .workers
            .call_until(deadline, move || f(&inner, &owned))
            .unwrap_or_else(|why| Err(self.pool_error(what, path, why)));
        self.stats.metadata.ops.add(1);
        self.stats.metadata.lat_us.add_us(started.elapsed());
        if answer.as_ref().is_err_and(|e| e.kind() != ErrorKind::NotFound) {
            self.stats.metadata.errors.add(1);
        }
        answer
    }
}

impl OriginStore for DirectoryOrigin {
    fn source_url(&self) -> &str {
        self.source.url()
    }

    fn describe(&self) -> String {
        format!("{} (directory)", self.source.url())
    }

    fn capabilities(&self) -> OriginCapabilities {
        OriginCapabilities { symlinks: true, byte_names: true, modes: true, etags: false, concurrent_reads: false }
    }

    fn check(&self, deadline: Instant) -> Result<()> {
        let url = self.source.url().to_owned();
        self.run_on_pool("checking", b"", deadline, move |inner, _| {
            let root = inner.root()?;
            let mut buffer = Vec::with_capacity(4096);
            let mut entries = rustix::fs::RawDir::new(&root, buffer.spare_capacity_mut());
            match entries.next() {
                Some(Err(errno)) => Err(os_error(&format!("{url} can't be listed"), errno)),
                _ => Ok(()),
            }
        })
    }

    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr> {
        validate_path(path)?;
        let what = "looking up";
        let seen = self.retry_young(what, path, deadline, |waited| {
            self.run_on_pool(what, path, deadline, move |inner, path| inner.stat_path(path, waited))
        })?;
        seen.object_attr().ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                format!("'{}' is a socket, a pipe or a device, and those are left out", show_path(path)),
            )
        })
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        validate_path(path)?;
        let cursor = cursor.map(<[u8]>::to_vec);
        let stats = Arc::clone(&self.stats);
        self.run_on_pool("listing", path, deadline, move |inner, path| {
            inner.list(path, cursor.as_deref(), max.max(1), &stats)
        })
    }

    fn lists_all(&self, path: &[u8]) -> bool {
        !self.inner.incomplete.lock().contains(path)
    }

    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        validate_path(path)?;
        let what = "reading the link";
        self.retry_young(what, path, deadline, |waited| {
            self.run_on_pool(what, path, deadline, move |inner, path| inner.read_link(path, waited))
        })
    }

    fn object_headers(&self, path: &[u8], deadline: Instant) -> Result<ObjectHeaders> {
        validate_path(path)?;
        self.run_on_pool("reading the headers", path, deadline, DirectoryReader::object_headers)
    }

    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        validate_path(&object.path)?;
        validate_range(object, offset, sink.spare().len())?;
        let started = Instant::now();
        self.stats.object.in_flight.add(1);
        let answer = self.retry_young("reading", &object.path, deadline, |waited| {
            self.read_pieces(object, offset, sink, deadline, waited)
        });
        self.stats.object.in_flight.sub(1);
        self.stats.object.get_ops.add(1);
        self.stats.object.get_us.add_us(started.elapsed());
        if answer.is_err() {
            self.stats.object.errors.add(1);
        }
        answer
    }

    fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>> {
        self.run_on_pool("statfs of", b"", deadline, |inner, _| {
            let s = rustix::fs::fstatvfs(inner.root()?).map_err(|e| os_error("statfs", e))?;
            Ok(Some(OriginCapacity {
                block_size: s.f_frsize,
                blocks: s.f_blocks,
                blocks_free: s.f_bfree,
                blocks_available: s.f_bavail,
                files: s.f_files,
                files_free: s.f_ffree,
            }))
        })
    }
}

/// A buffer sent from the reading thread to the caller: its bytes are of the right version.
type FilePiece = Result<SettledAnswer<(Vec<u8>, usize)>>;

/// The result of a pool thread for a file or a link.
enum SettledAnswer<T> {
    Final(T),
    /// No result yet: for this long, the file can change without changing its times, and so its version.
    Young(Duration),
}

impl DirectoryOrigin {
    /// A pool thread reads pieces into its own buffers and this thread copies them out: a thread that hangs in a
    /// system call must not hold the caller's memory.
    fn read_pieces(
        &self,
        object: &ObjectRef,
        offset: u64,
        sink: &mut dyn ByteSink,
        deadline: Instant,
        waited: bool,
    ) -> Result<SettledAnswer<()>> {
        let (full, filled) = mpsc::sync_channel::<FilePiece>(2);
        let (empty, emptied) = mpsc::sync_channel::<Vec<u8>>(2);
        let inner = Arc::clone(&self.inner);
        let wanted = object.clone();
        let len = sink.spare().len();
        if !self.workers.try_run_urgent(move || inner.send_pieces(&wanted, offset, len, waited, &full, &emptied)) {
            return Err(self.pool_error("reading", &object.path, NoAnswer::Queued));
        }
        let mut done = 0;
        while done < len {
            let left = deadline.saturating_duration_since(Instant::now());
            match filled.recv_timeout(left) {
                Ok(Ok(SettledAnswer::Young(left))) => return Ok(SettledAnswer::Young(left)),
                Ok(Ok(SettledAnswer::Final((buffer, n)))) => {
                    sink.spare()[..n].copy_from_slice(&buffer[..n]);
                    sink.commit(n);
                    done += n;
                    self.stats.object.get_bytes.add(n as u64);
                    // The reading thread may have ended.
                    let _ = empty.send(buffer);
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(self.pool_error("reading", &object.path, NoAnswer::Running)),
            }
        }
        Ok(SettledAnswer::Final(()))
    }
}

impl DirectoryReader {
    fn root(&self) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let base = rustix::fs::open(&self.base, flags, Mode::empty());
        let opened = match &*self.below {
            b"" => base,
            below => base.and_then(|base| self.open_beneath(base, below, flags | OFlags::NOFOLLOW)),
        };
        let opened = opened.map_err(|errno| self.root_error(errno));
        match &opened {
            Ok(_) if self.gone.load(Ordering::Relaxed) && self.gone.swap(false, Ordering::Relaxed) => {
                tracing::info!("the source directory '{}' is available again", self.root.display());
            }
            Err(error) if self.opened.load(Ordering::Relaxed) && !self.gone.swap(true, Ordering::Relaxed) => {
                tracing::warn!("{error}");
            }
            Ok(_) if !self.opened.load(Ordering::Relaxed) => self.opened.store(true, Ordering::Relaxed),
            _ => {}
        }
        opened
    }

    fn root_error(&self, errno: Errno) -> Error {
        let what = format!("the source directory '{}' can't be opened", self.root.display());
        let is_link = match errno {
            Errno::LOOP => true,
            Errno::NOTDIR => std::fs::symlink_metadata(&self.root).is_ok_and(|found| found.is_symlink()),
            _ => false,
        };
        if !self.below.is_empty() && is_link {
            let why = format!(
                "{what}: a part of it is a symbolic link, and none is followed below '{}'; name the directory itself",
                self.base.display()
            );
            return Error::new(ErrorKind::PermissionDenied, why);
        }
        let hint = match errno {
            Errno::NOENT => "; create it or mount it first",
            Errno::NOTDIR => "; give a directory",
            _ => "",
        };
        let error = os_error(&format!("{what}{hint}"), errno);
        // It is not reported as a deleted file: callers would forget files that still exist.
        if errno == Errno::NOENT { Error::new(ErrorKind::Unavailable, error.message()) } else { error }
    }

    /// Opens `path` without following any symbolic link in it.
    fn open_path(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        let root = self.root()?;
        if path.is_empty() {
            return Ok(root);
        }
        self.open_beneath(root, path, flags).map_err(|errno| open_error(path, errno))
    }

    /// The stat of `path`, from its server. It is looked up by name: when an NFS client finds that its file is gone
    /// from the server, it looks up the name again.
    fn stat_path(&self, path: &[u8], waited: bool) -> Result<SettledAnswer<FileStat>> {
        let (folder, name) = split_path(path);
        let mut dir = self.root()?;
        if !folder.is_empty() {
            let opened = self.open_beneath(dir, folder, OFlags::PATH | OFlags::DIRECTORY);
            dir = opened.map_err(|errno| open_error(path, errno))?;
        }
        let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
        let seen = stat_on_server(dir.as_fd(), name, flags | AtFlags::NO_AUTOMOUNT);
        let seen = seen.inspect(|seen| self.note_time(seen)).map_err(|errno| open_error(path, errno))?;
        let (seen, left) = self.settle_version(seen, dir.as_fd(), name);
        Ok(if waited || left.is_zero() { SettledAnswer::Final(seen) } else { SettledAnswer::Young(left) })
    }

    /// Opens `path` below a directory; a link on the way is `LOOP`.
    fn open_beneath(&self, dir: OwnedFd, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        if !self.no_openat2.load(Ordering::Relaxed) {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            // With O_PATH and O_NOFOLLOW, a link at the end is opened itself; one on the way is refused.
            let mut tries = 0;
            loop {
                match rustix::fs::openat2(&dir, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                    Ok(fd) => return Ok(fd),
                    Err(Errno::AGAIN | Errno::INTR) if tries < 16 => tries += 1,
                    Err(Errno::NOSYS | Errno::PERM | Errno::INVAL | Errno::TOOBIG) => break,
                    Err(Errno::LOOP | Errno::XDEV) => return Err(Errno::LOOP),
                    Err(errno) => return Err(errno),
                }
            }
            self.no_openat2.store(true, Ordering::Relaxed);
        }
        open_by_parts(dir, path, flags)
    }

    /// The stat of `name` in `dir`, marked where its bytes may still change under its version, and the time until the
    /// clock has ticked, if nothing else prevents a final version.
    fn settle_version(&self, seen: FileStat, dir: BorrowedFd<'_>, name: &[u8]) -> (FileStat, Duration) {
        self.writer_check.settle_stat(seen, || rustix::fs::openat(dir, name, FILE | OFlags::CLOEXEC, Mode::empty()))
    }

    /// A newer file gives a closer bound on its server's clock, and so shorter waits of reads.
    fn note_time(&self, seen: &FileStat) {
        self.lag.observe_file(seen, SystemTime::now());
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, stats: &Stats) -> Result<ListPage> {
        let dir = self.open_path(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW)?;
        let names = match cursor.and_then(|_| self.snapshots.names_of(path)) {
            Some(names) => names,
            None => Arc::new(read_names(dir.as_fd(), path)?),
        };
        let start = cursor.map_or(0, |c| names.index_after(c));
        let end = names.len().min(start.saturating_add(max));
        let (entries, left_out) = page_entries(&names, start..end, |name| {
            let seen = FileStat::from(&rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?);
            self.note_time(&seen);
            Ok(self.settle_version(seen, dir.as_fd(), name).0)
        })
        .map_err(|(name, errno)| os_error(&format!("stat of '{}' in '{}'", show_path(name), show_path(path)), errno))?;
        stats.metadata.skipped_names.add(left_out.of_no_kind + left_out.unreadable);
        self.note_skipped(path, &left_out, end - start == names.len());
        let more = end < names.len();
        let page = ListPage { entries, next: more.then(|| names.get(end - 1).to_vec()), marker: None };
        self.snapshots.keep_listed(path, names, more);
        Ok(page)
    }

    /// Records, and logs once, that a folder's listing skipped existing names; `whole` is set for a listing of all
    /// names.
    fn note_skipped(&self, path: &[u8], left_out: &SkippedNames<'_>, whole: bool) {
        let mut incomplete = self.incomplete.lock();
        match left_out.first {
            Some((name, errno)) if !incomplete.contains(path) => {
                if incomplete.len() >= INCOMPLETE {
                    incomplete.clear();
                }
                incomplete.insert(path.to_vec());
                drop(incomplete);
                tracing::warn!(
                    "'{}' is left out of '{}' of '{}': {errno}; the mount there is dead, or only its owner may access it",
                    show_path(name),
                    show_path(path),
                    self.root.display()
                );
            }
            None if whole => {
                incomplete.remove(path);
            }
            _ => {}
        }
    }

    /// The target of the link at `path`. The kernel keeps it for as long as the link has its version. A young link
    /// needs a wait, as a file does, and must then be opened again, because another link may have its inode.
    fn read_link(&self, path: &[u8], waited: bool) -> Result<SettledAnswer<Vec<u8>>> {
        let failed = |errno| os_error(&format!("readlink of '{}'", show_path(path)), errno);
        let fd = self.open_path(path, OFlags::PATH | OFlags::NOFOLLOW)?;
        let young_for = self.lag.young_for(fd.as_fd(), &FileStat::from(&rustix::fs::fstat(&fd).map_err(failed)?));
        match rustix::fs::readlinkat(&fd, "", Vec::new()) {
            Ok(_) if !waited && !young_for.is_zero() => Ok(SettledAnswer::Young(young_for)),
            Ok(target) => Ok(SettledAnswer::Final(target.into_bytes())),
            Err(Errno::NOENT | Errno::INVAL) => {
                Err(Error::new(ErrorKind::Invalid, format!("'{}' is not a symbolic link", show_path(path))))
            }
            Err(errno) => Err(failed(errno)),
        }
    }

    /// The headers in the extended attribute of the file or folder at `path`.
    fn object_headers(&self, path: &[u8]) -> Result<ObjectHeaders> {
        let fd = self.open_path(path, OFlags::PATH | OFlags::NOFOLLOW)?;
        let node = proc_path(fd.as_fd());
        match read_growing(|buffer| rustix::fs::getxattr(&*node, OBJECT_HEADERS_XATTR, buffer)) {
            Ok(value) => Ok(ObjectHeaders::from_xattr(&value).unwrap_or_default()),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(ObjectHeaders::default()),
            Err(errno) => Err(os_error(&format!("getxattr of '{}'", show_path(path)), errno)),
        }
    }

    /// Opens the file at exactly the version of `object`.
    fn open_version(&self, object: &ObjectRef, waited: bool) -> Result<SettledAnswer<OwnedFd>> {
        let fd = self.open_path(&object.path, FILE);
        // A file that is gone, or is now a link or a folder, no longer has its version.
        let fd = fd.map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => {
                stale_error(object, e.message())
            }
            _ => e,
        })?;
        let young_for = self.lag.young_for(fd.as_fd(), &same_version(fd.as_fd(), object)?);
        Ok(if waited || young_for.is_zero() { SettledAnswer::Final(fd) } else { SettledAnswer::Young(young_for) })
    }

    fn send_pieces(
        &self,
        object: &ObjectRef,
        mut offset: u64,
        mut len: usize,
        waited: bool,
        full: &mpsc::SyncSender<FilePiece>,
        emptied: &mpsc::Receiver<Vec<u8>>,
    ) {
        // The caller left while this was queued: make no system call for it.
        if emptied.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
            return;
        }
        let fd = match self.open_version(object, waited) {
            Ok(SettledAnswer::Final(fd)) => fd,
            Ok(SettledAnswer::Young(left)) => {
                let _ = full.send(Ok(SettledAnswer::Young(left)));
                return;
            }
            Err(error) => {
                let _ = full.send(Err(error));
                return;
            }
        };
        let mut made = 0;
        while len > 0 {
            let buffer = if made < 2 {
                made += 1;
                Some(vec![0; OriginOptions::DIR_CHUNK.min(len)])
            } else {
                emptied.recv().ok()
            };
            // The caller has left: stop reading.
            let Some(mut buffer) = buffer else { return };
            let want = buffer.len().min(len);
            let read = match rustix::io::pread(&fd, &mut buffer[..want], offset) {
                Ok(0) => Err(stale_error(object, "it has become shorter")),
                Ok(n) => still_same_version(fd.as_fd(), object).map(|_| n),
                Err(Errno::INTR) => Ok(0),
                Err(errno) => Err(os_error(&format!("read of '{}' at {offset}", show_path(&object.path)), errno)),
            };
            match read {
                Ok(n) => {
                    offset += n as u64;
                    len -= n;
                    if full.send(Ok(SettledAnswer::Final((buffer, n)))).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let _ = full.send(Err(error));
                    return;
                }
            }
        }
    }
}

/// A name without a readable stat, and the error.
type UnreadableName<'a> = (&'a [u8], Errno);

/// Names of a directory that a page leaves out.
struct SkippedNames<'a> {
    /// Sockets, pipes, devices.
    of_no_kind: u64,
    /// Mounts with a dead server, and those that only their owner may access.
    unreadable: u64,
    first: Option<UnreadableName<'a>>,
}

/// The entries of a range of names. A mount with a dead server does not hide the other names. It fails where no
/// name of the directory is readable, and on any other error.
fn page_entries<'a>(
    names: &'a SortedNames,
    page: Range<usize>,
    look: impl Fn(&[u8]) -> rustix::io::Result<FileStat>,
) -> Result<(Vec<DirEntry>, SkippedNames<'a>), UnreadableName<'a>> {
    let mut entries = Vec::with_capacity(page.len());
    let mut left_out = SkippedNames { of_no_kind: 0, unreadable: 0, first: None };
    for i in page {
        let name = names.get(i);
        match look(name) {
            Ok(seen) => match seen.object_attr() {
                Some(attr) => entries.push(DirEntry { name: name.to_vec(), attr }),
                None => left_out.of_no_kind += 1,
            },
            // Removed since the names were read.
            Err(Errno::NOENT) => {}
            // Only the owner may access a user's FUSE mount; even root may not.
            Err(errno @ (Errno::NOTCONN | Errno::HOSTDOWN | Errno::ACCESS)) => {
                left_out.unreadable += 1;
                left_out.first.get_or_insert((name, errno));
            }
            // A program that copies or deletes by this listing must not take a damaged file for a deleted one.
            Err(errno) => return Err((name, errno)),
        }
    }
    match left_out.first {
        Some(first) if entries.is_empty() && !(0..names.len()).any(|i| look(names.get(i)).is_ok()) => Err(first),
        _ => Ok((entries, left_out)),
    }
}

fn read_names(dir: BorrowedFd<'_>, path: &[u8]) -> Result<SortedNames> {
    let taken = Instant::now();
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut names = Vec::new();
    let mut entries = rustix::fs::RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(|e| os_error(&format!("listing of '{}'", show_path(path)), e))?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(SortedNames::new(taken, names))
}

fn same_version(fd: BorrowedFd<'_>, object: &ObjectRef) -> Result<FileStat> {
    let stat = rustix::fs::fstat(fd).map_err(|e| os_error(&format!("stat of '{}'", show_path(&object.path)), e))?;
    check_version(FileStat::from(&stat), object)
}

/// As [`same_version`], with the stat from the file's server: the attributes cached by an NFS client may be older
/// than the bytes just read.
fn still_same_version(fd: BorrowedFd<'_>, object: &ObjectRef) -> Result<FileStat> {
    let seen = stat_on_server(fd, b"", AtFlags::EMPTY_PATH);
    check_version(seen.map_err(|e| os_error(&format!("stat of '{}'", show_path(&object.path)), e))?, object)
}

fn check_version(seen: FileStat, object: &ObjectRef) -> Result<FileStat> {
    match seen.object_attr() {
        Some(attr) if attr.kind == FileKind::File && attr.version.as_str() == object.version.settled_text() => Ok(seen),
        Some(attr) => Err(stale_error(object, &format!("it is now {}", attr.version))),
        None => Err(stale_error(object, "it is no longer a file")),
    }
}

fn stale_error(object: &ObjectRef, evidence: &str) -> Error {
    Error::new(
        ErrorKind::Stale,
        format!("'{}' no longer has version {}: {evidence}; open it again", show_path(&object.path), object.version),
    )
}

fn open_error(path: &[u8], errno: Errno) -> Error {
    match errno {
        Errno::LOOP => Error::new(
            ErrorKind::NotADirectory,
            format!("a part of '{}' is a symbolic link, and links are not followed here", show_path(path)),
        ),
        errno => os_error(&format!("'{}'", show_path(path)), errno),
    }
}

fn os_error(what: &str, errno: Errno) -> Error {
    Error::io(what, &std::io::Error::from(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_openat2_no_link_is_followed_either() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("data/sub")).unwrap();
        std::fs::write(dir.path().join("data/sub/file"), b"x").unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("data/out")).unwrap();
        let config =
            OriginOptions { within: vec![dir.path().join("data").display().to_string()], ..Default::default() };
        let open = |path: &str| {
            let source = SourceLocation::directory(&dir.path().join(path)).unwrap();
            let under = DirectoryOrigin::new(source, &config, Arc::default());
            under.inner.no_openat2.store(true, Ordering::Relaxed);
            under
        };
        let inner = open("data/sub").inner;
        inner.open_path(b"file", OFlags::RDONLY).unwrap();
        for path in ["data/out", "data/out/data"] {
            let error = open(path).inner.root().unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::NotADirectory), "{error}");
        }
        let error = open("data").inner.open_path(b"out/data", OFlags::RDONLY).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory, "{error}");
    }

    #[test]
    fn a_mount_that_is_dead_hides_no_other_name_and_a_damaged_file_is_not_left_out() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"x").unwrap();
        let seen = FileStat::from(&rustix::fs::stat(dir.path().join("file")).unwrap());
        let names = SortedNames::new(Instant::now(), [b"a", b"b", b"c", b"d"].map(|name| name.to_vec()).into());
        let list = |page: Range<usize>, answers: [Result<(), Errno>; 4]| {
            let listed = page_entries(&names, page, |name| answers[usize::from(name[0] - b'a')].map(|()| seen));
            listed.map(|(entries, left_out)| {
                (entries.into_iter().map(|entry| entry.name[0]).collect::<Vec<_>>(), left_out.unreadable)
            })
        };
        let (dead, io) = (Err(Errno::NOTCONN), Err(Errno::IO));
        assert_eq!(list(0..4, [Ok(()), dead, Err(Errno::NOENT), Ok(())]), Ok((b"ad".to_vec(), 1)));
        // A page of which none can be looked at is no fault while others can.
        assert_eq!(list(1..3, [Ok(()), dead, dead, io]), Ok((vec![], 2)));
        assert_eq!(list(1..3, [io, dead, dead, io]), Err((&b"b"[..], Errno::NOTCONN)));
        assert_eq!(list(0..4, [Err(Errno::NOENT); 4]), Ok((vec![], 0)));
        assert_eq!(list(0..4, [Ok(()), io, dead, Ok(())]), Err((&b"b"[..], Errno::IO)));
    }
}
