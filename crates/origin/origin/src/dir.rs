//! A directory as an under-store: a local disk, an NFS mount, any file system.
//! It deliberately knows no cache of attributes; every call asks the operating system, on a thread of the pool.

use crate::cached::split;
use crate::pool::{NoAnswer, Pool};
use crate::seen::{Lag, Seen, ask_server, own_clock};
use crate::snapshots::{Names, Snapshots};
use crate::writers::Askable;
use crate::{Capabilities, Source, StatFs, UnderConfig, UnderStore};
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use spurline_types::{Attr, DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectRef, Result, Sink, Stats};
use std::collections::HashSet;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

/// How a file is opened: never a link, and without waiting for whom a pipe or a lease may belong to.
const FILE: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Folders of which names were left out that are remembered at most.
const INCOMPLETE: usize = 1000;

/// A directory read through the operating system.
pub(crate) struct DirUnder {
    source: Source,
    pool: Pool,
    stats: Arc<Stats>,
    inner: Arc<Inner>,
}

struct Inner {
    root: PathBuf,
    /// What the operator named, the root itself or a directory above it: only to there are links followed.
    base: PathBuf,
    /// From there to the root.
    below: Vec<u8>,
    /// `openat2` is missing (an old kernel or a sandbox); paths are walked part by part.
    walk: AtomicBool,
    /// The source directory itself was not there when it was last looked for.
    gone: AtomicBool,
    snapshots: Snapshots,
    lag: Lag,
    askable: Askable,
    /// Folders whose last listing left out names that are there.
    incomplete: Mutex<HashSet<Vec<u8>>>,
}

impl DirUnder {
    pub(crate) fn new(source: Source, config: &UnderConfig, stats: Arc<Stats>) -> Self {
        let root = source.path();
        let named = config.within.iter().filter_map(|url| Some(Source::parse(url).ok()?.path().to_path_buf()));
        // Of several the nearest: what is above it is the operator's as well.
        let base = named.filter(|base| !base.as_os_str().is_empty() && root.starts_with(base));
        let base = base.max_by_key(|base| base.as_os_str().len()).unwrap_or_else(|| root.to_path_buf());
        let below = root.strip_prefix(&base).unwrap_or(Path::new("")).as_os_str().as_bytes().to_vec();
        let inner = Arc::new(Inner {
            root: root.to_path_buf(),
            base,
            below,
            walk: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            snapshots: Snapshots::default(),
            lag: Lag::new(),
            askable: Askable::default(),
            incomplete: Mutex::default(),
        });
        DirUnder { source, pool: Pool::new(config.dir_threads), stats, inner }
    }

    fn too_long(&self, what: &str, path: &[u8], why: &str) -> Error {
        let why = format!("{what} '{}' of {} took too long: {why}", show(path), self.source.url());
        Error::new(ErrorKind::Timeout, why)
    }

    fn no_answer(&self, what: &str, path: &[u8], why: NoAnswer) -> Error {
        let evidence = match why {
            NoAnswer::Queued => "all threads for this directory are waiting for the operating system",
            NoAnswer::Running => "the operating system has not answered",
        };
        self.too_long(what, path, &format!("{evidence}; look whether that file system answers (df, dmesg)"))
    }

    /// Has `ask` asked what it asks, and a second time when it was told to wait first. The caller's thread is the one that
    /// waits: those of the pool are few, and lookups need them.
    fn once_final<T>(
        &self,
        what: &str,
        path: &[u8],
        deadline: Instant,
        mut ask: impl FnMut(bool) -> Result<Told<T>>,
    ) -> Result<T> {
        let mut waited = false;
        loop {
            match ask(waited)? {
                Told::Final(told) => return Ok(told),
                Told::Young(left) if Instant::now() + left < deadline => std::thread::sleep(left),
                Told::Young(left) => {
                    let why = format!("for another {left:?} it could change and have the same times; try again then");
                    return Err(self.too_long(what, path, &why));
                }
            }
            waited = true;
        }
    }

    /// Runs a metadata call on the pool, with its counters.
    fn ask<T: Send + 'static>(
        &self,
        what: &'static str,
        path: &[u8],
        deadline: Instant,
        f: impl FnOnce(&Inner, &[u8]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let started = Instant::now();
        let (inner, owned) = (Arc::clone(&self.inner), path.to_vec());
        let answer = self
            .pool
            .call(deadline, move || f(&inner, &owned))
            .unwrap_or_else(|why| Err(self.no_answer(what, path, why)));
        self.stats.metadata.ops.add(1);
        self.stats.metadata.lat_us.add_us(started.elapsed());
        if answer.as_ref().is_err_and(|e| e.kind() != ErrorKind::NotFound) {
            self.stats.metadata.errors.add(1);
        }
        answer
    }
}

impl UnderStore for DirUnder {
    fn source(&self) -> &str {
        self.source.url()
    }

    fn describe(&self) -> String {
        format!("{} (directory)", self.source.url())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { symlinks: true, byte_names: true, modes: true, etags: false, together: false }
    }

    fn check(&self, deadline: Instant) -> Result<()> {
        let url = self.source.url().to_owned();
        self.ask("checking", b"", deadline, move |inner, _| {
            let root = inner.root()?;
            let mut buffer = Vec::with_capacity(4096);
            let mut entries = rustix::fs::RawDir::new(&root, buffer.spare_capacity_mut());
            match entries.next() {
                Some(Err(errno)) => Err(os(&format!("{url} can't be listed"), errno)),
                _ => Ok(()),
            }
        })
    }

    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<Attr> {
        validate(path)?;
        let what = "looking up";
        let seen = self.once_final(what, path, deadline, |waited| {
            self.ask(what, path, deadline, move |inner, path| inner.look(path, waited))
        })?;
        seen.attr().ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                format!("'{}' is a socket, a pipe or a device, and those are left out", show(path)),
            )
        })
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        validate(path)?;
        let cursor = cursor.map(<[u8]>::to_vec);
        let stats = Arc::clone(&self.stats);
        self.ask("listing", path, deadline, move |inner, path| inner.list(path, cursor.as_deref(), max.max(1), &stats))
    }

    fn lists_all(&self, path: &[u8]) -> bool {
        !self.inner.incomplete.lock().contains(path)
    }

    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        validate(path)?;
        let what = "reading the link";
        self.once_final(what, path, deadline, |waited| {
            self.ask(what, path, deadline, move |inner, path| inner.readlink(path, waited))
        })
    }

    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        validate(&object.path)?;
        crate::object::validate_range(object, offset, sink.spare().len())?;
        let started = Instant::now();
        self.stats.object.in_flight.add(1);
        let read = |waited| self.read_pieces(object, offset, sink, deadline, waited);
        let answer = self.once_final("reading", &object.path, deadline, read);
        self.stats.object.in_flight.sub(1);
        self.stats.object.get_ops.add(1);
        self.stats.object.get_us.add_us(started.elapsed());
        if answer.is_err() {
            self.stats.object.errors.add(1);
        }
        answer
    }

    fn statfs(&self, deadline: Instant) -> Result<Option<StatFs>> {
        self.ask("statfs of", b"", deadline, |inner, _| {
            let s = rustix::fs::fstatvfs(inner.root()?).map_err(|e| os("statfs", e))?;
            Ok(Some(StatFs {
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

/// A buffer on its way from the reading thread to the caller: its bytes are of the right version.
type Piece = Result<Told<(Vec<u8>, usize)>>;

/// What a thread of the pool has to tell of a file or a link.
enum Told<T> {
    Final(T),
    /// Nothing yet: for this long it can be changed again under the time, and so the version, that it has now.
    Young(Duration),
}

impl DirUnder {
    /// A thread of the pool reads pieces into buffers of its own and this thread copies them out: a thread that hangs
    /// in the operating system must not hold the caller's memory.
    fn read_pieces(
        &self,
        object: &ObjectRef,
        offset: u64,
        sink: &mut dyn Sink,
        deadline: Instant,
        waited: bool,
    ) -> Result<Told<()>> {
        let (full, filled) = mpsc::sync_channel::<Piece>(2);
        let (empty, emptied) = mpsc::sync_channel::<Vec<u8>>(2);
        let (inner, wanted, len) = (Arc::clone(&self.inner), object.clone(), sink.spare().len());
        if !self.pool.submit(move || inner.read(&wanted, offset, len, waited, &full, &emptied)) {
            return Err(self.no_answer("reading", &object.path, NoAnswer::Queued));
        }
        let mut done = 0;
        while done < len {
            let left = deadline.saturating_duration_since(Instant::now());
            match filled.recv_timeout(left) {
                Ok(Ok(Told::Young(left))) => return Ok(Told::Young(left)),
                Ok(Ok(Told::Final((buffer, n)))) => {
                    sink.spare()[..n].copy_from_slice(&buffer[..n]);
                    sink.commit(n);
                    done += n;
                    self.stats.object.get_bytes.add(n as u64);
                    // The reading thread may be through and gone.
                    let _ = empty.send(buffer);
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(self.no_answer("reading", &object.path, NoAnswer::Running)),
            }
        }
        Ok(Told::Final(()))
    }
}

impl Inner {
    fn root(&self) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let base = rustix::fs::open(&self.base, flags, Mode::empty());
        let opened = match &*self.below {
            b"" => base,
            below => base.and_then(|base| self.beneath(base, below, flags | OFlags::NOFOLLOW)),
        };
        let opened = opened.map_err(|errno| self.no_root(errno));
        match &opened {
            Ok(_) if self.gone.load(Ordering::Relaxed) && self.gone.swap(false, Ordering::Relaxed) => {
                tracing::info!("the source directory '{}' is there again", self.root.display());
            }
            Err(error) if !self.gone.swap(true, Ordering::Relaxed) => tracing::warn!("{error}"),
            _ => {}
        }
        opened
    }

    fn no_root(&self, errno: Errno) -> Error {
        let what = format!("the source directory '{}' can't be opened", self.root.display());
        let is_link = || std::fs::symlink_metadata(&self.root).is_ok_and(|found| found.is_symlink());
        if !self.below.is_empty() && (errno == Errno::LOOP || (errno == Errno::NOTDIR && is_link())) {
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
        let error = os(&format!("{what}{hint}"), errno);
        // Not a file that was deleted: whoever takes it for one forgets what is still there.
        if errno == Errno::NOENT { Error::new(ErrorKind::Unavailable, error.message()) } else { error }
    }

    /// Opens what is at `path` without following any symbolic link, wherever in the path it stands.
    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        let root = self.root()?;
        if path.is_empty() {
            return Ok(root);
        }
        self.beneath(root, path, flags).map_err(|errno| not_opened(path, errno))
    }

    /// What is at `path`, by its server. It is asked for by name: when a client of NFS finds that the file it has there is
    /// gone from its server, the name is looked up anew.
    fn look(&self, path: &[u8], waited: bool) -> Result<Told<Seen>> {
        let (folder, name) = split(path);
        let mut dir = self.root()?;
        if !folder.is_empty() {
            let opened = self.beneath(dir, folder, OFlags::PATH | OFlags::DIRECTORY);
            dir = opened.map_err(|errno| not_opened(path, errno))?;
        }
        let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
        let seen = ask_server(dir.as_fd(), name, flags | AtFlags::NO_AUTOMOUNT);
        let seen = seen.inspect(|seen| self.note_time(seen)).map_err(|errno| not_opened(path, errno))?;
        let (seen, left) = self.settle(seen, dir.as_fd(), name);
        Ok(if waited || left.is_zero() { Told::Final(seen) } else { Told::Young(left) })
    }

    /// The same from a directory; a link on the way is `LOOP`.
    fn beneath(&self, dir: OwnedFd, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        if !self.walk.load(Ordering::Relaxed) {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            // With O_PATH and O_NOFOLLOW a link at the end is opened itself, one on the way is refused.
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
            self.walk.store(true, Ordering::Relaxed);
        }
        walk(dir, path, flags)
    }

    /// What was seen as `name` in `dir`, marked where its bytes may still change under its version, and for how long they may
    /// for no other reason than that the clock has not ticked.
    fn settle(&self, seen: Seen, dir: BorrowedFd<'_>, name: &[u8]) -> (Seen, Duration) {
        self.askable.settle(seen, || rustix::fs::openat(dir, name, FILE | OFlags::CLOEXEC, Mode::empty()))
    }

    /// The newer a file that was seen, the fewer reads have to wait for the clock of its server.
    fn note_time(&self, seen: &Seen) {
        self.lag.with(seen, SystemTime::now());
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, stats: &Stats) -> Result<ListPage> {
        let dir = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW)?;
        let names = match cursor.and_then(|_| self.snapshots.of(path)) {
            Some(names) => names,
            None => Arc::new(read_names(dir.as_fd(), path)?),
        };
        let start = cursor.map_or(0, |c| names.after(c));
        let end = names.len().min(start.saturating_add(max));
        let look = |name: &[u8]| {
            let seen = Seen::from(&rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?);
            self.note_time(&seen);
            Ok(self.settle(seen, dir.as_fd(), name).0)
        };
        let (entries, left_out) = entries(&names, start..end, look)
            .map_err(|(name, errno)| os(&format!("stat of '{}' in '{}'", show(name), show(path)), errno))?;
        stats.metadata.skipped_names.add(left_out.of_no_kind + left_out.unseen);
        self.note(path, &left_out, end - start == names.len());
        let more = end < names.len();
        let page = ListPage { entries, next: more.then(|| names.get(end - 1).to_vec()) };
        self.snapshots.listed(path, names, more);
        Ok(page)
    }

    /// Keeps in mind, and says once, that names of a folder which are there were left out; `whole` is a listing of all.
    fn note(&self, path: &[u8], left_out: &LeftOut<'_>, whole: bool) {
        let mut incomplete = self.incomplete.lock();
        match left_out.first {
            Some((name, errno)) if !incomplete.contains(path) => {
                if incomplete.len() >= INCOMPLETE {
                    incomplete.clear();
                }
                incomplete.insert(path.to_vec());
                drop(incomplete);
                tracing::warn!(
                    "'{}' is left out of '{}' of '{}': {errno}; what is mounted there is gone, or is its owner's alone",
                    show(name),
                    show(path),
                    self.root.display()
                );
            }
            None if whole => {
                incomplete.remove(path);
            }
            _ => {}
        }
    }

    /// What the link at `path` points to. The kernel keeps it for as long as the link has its version, so a young one is
    /// waited for as a file is, and opened anew: another may have its inode then.
    fn readlink(&self, path: &[u8], waited: bool) -> Result<Told<Vec<u8>>> {
        let failed = |errno| os(&format!("readlink of '{}'", show(path)), errno);
        let fd = self.open(path, OFlags::PATH | OFlags::NOFOLLOW)?;
        let young_for = self.young_for(fd.as_fd(), &Seen::from(&rustix::fs::fstat(&fd).map_err(failed)?));
        match rustix::fs::readlinkat(&fd, "", Vec::new()) {
            Ok(_) if !waited && !young_for.is_zero() => Ok(Told::Young(young_for)),
            Ok(target) => Ok(Told::Final(target.into_bytes())),
            Err(Errno::NOENT | Errno::INVAL) => {
                Err(Error::new(ErrorKind::Invalid, format!("'{}' is no symbolic link", show(path))))
            }
            Err(errno) => Err(failed(errno)),
        }
    }

    /// How long the file can still be changed under the time it has now.
    fn young_for(&self, fd: BorrowedFd<'_>, seen: &Seen) -> Duration {
        let now = SystemTime::now();
        let (own, server) = (seen.young_for(now, 0), seen.young_for(now, self.lag.with(seen, now)));
        if server > own && !own_clock(fd) { server } else { own }
    }

    /// The file at exactly the version of `object`.
    fn opened(&self, object: &ObjectRef, waited: bool) -> Result<Told<OwnedFd>> {
        let fd = self.open(&object.path, FILE);
        // A file that is gone, or is a link or a folder by now, no longer has its version.
        let fd = fd.map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => gone(object, e.message()),
            _ => e,
        })?;
        let young_for = self.young_for(fd.as_fd(), &same_version(fd.as_fd(), object)?);
        Ok(if waited || young_for.is_zero() { Told::Final(fd) } else { Told::Young(young_for) })
    }

    fn read(
        &self,
        object: &ObjectRef,
        mut offset: u64,
        mut len: usize,
        waited: bool,
        full: &mpsc::SyncSender<Piece>,
        emptied: &mpsc::Receiver<Vec<u8>>,
    ) {
        // The caller has left while this was queued: no system call is made in its name.
        if emptied.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
            return;
        }
        let fd = match self.opened(object, waited) {
            Ok(Told::Final(fd)) => fd,
            Ok(Told::Young(left)) => {
                let _ = full.send(Ok(Told::Young(left)));
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
                Some(vec![0; UnderConfig::DIR_CHUNK.min(len)])
            } else {
                emptied.recv().ok()
            };
            // The caller has left: no more reads in its name.
            let Some(mut buffer) = buffer else { return };
            let want = buffer.len().min(len);
            let read = match rustix::io::pread(&fd, &mut buffer[..want], offset) {
                Ok(0) => Err(gone(object, "it has become shorter")),
                Ok(n) => still_same_version(fd.as_fd(), object).map(|_| n),
                Err(Errno::INTR) => Ok(0),
                Err(errno) => Err(os(&format!("read of '{}' at {offset}", show(&object.path)), errno)),
            };
            match read {
                Ok(n) => {
                    offset += n as u64;
                    len -= n;
                    if full.send(Ok(Told::Final((buffer, n)))).is_err() {
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

/// Opens what is at `path` below `dir` part by part, following no link: where there is no `openat2`.
fn walk(dir: OwnedFd, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let mut at = dir;
    let mut parts = path.split(|b| *b == b'/').peekable();
    while let Some(part) = parts.next() {
        let flags = match parts.peek() {
            Some(_) => OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY,
            None => flags | OFlags::NOFOLLOW,
        };
        at = rustix::fs::openat(&at, part, flags | OFlags::CLOEXEC, Mode::empty())?;
    }
    Ok(at)
}

/// A name that can't be looked at, and why.
type Unseen<'a> = (&'a [u8], Errno);

/// What a page has not though its directory has it.
struct LeftOut<'a> {
    /// Sockets, pipes, devices.
    of_no_kind: u64,
    /// Mounts whose server is gone, and those that are their owner's alone.
    unseen: u64,
    /// The first of those.
    first: Option<Unseen<'a>>,
}

/// The entries of some of a directory's names. A mount in it whose server is gone does not hide the others; fails where
/// no name of the directory can be looked at, and for any other error.
fn entries<'a>(
    names: &'a Names,
    page: Range<usize>,
    look: impl Fn(&[u8]) -> rustix::io::Result<Seen>,
) -> Result<(Vec<DirEntry>, LeftOut<'a>), Unseen<'a>> {
    let mut entries = Vec::with_capacity(page.len());
    let mut left_out = LeftOut { of_no_kind: 0, unseen: 0, first: None };
    for i in page {
        let name = names.get(i);
        match look(name) {
            Ok(seen) => match seen.attr() {
                Some(attr) => entries.push(DirEntry { name: name.to_vec(), attr }),
                None => left_out.of_no_kind += 1,
            },
            // Removed since the names were read.
            Err(Errno::NOENT) => {}
            // Another user's FUSE mount is nobody else's to look at, not even root's.
            Err(errno @ (Errno::NOTCONN | Errno::HOSTDOWN | Errno::ACCESS)) => {
                left_out.unseen += 1;
                left_out.first.get_or_insert((name, errno));
            }
            // Who copies and deletes by this listing must not take a damaged file for one that is gone.
            Err(errno) => return Err((name, errno)),
        }
    }
    match left_out.first {
        Some(first) if entries.is_empty() && !(0..names.len()).any(|i| look(names.get(i)).is_ok()) => Err(first),
        _ => Ok((entries, left_out)),
    }
}

fn read_names(dir: BorrowedFd<'_>, path: &[u8]) -> Result<Names> {
    let taken = Instant::now();
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut names = Vec::new();
    let mut entries = rustix::fs::RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(|e| os(&format!("listing of '{}'", show(path)), e))?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(Names::new(taken, names))
}

fn same_version(fd: BorrowedFd<'_>, object: &ObjectRef) -> Result<Seen> {
    let stat = rustix::fs::fstat(fd).map_err(|e| os(&format!("stat of '{}'", show(&object.path)), e))?;
    compare(Seen::from(&stat), object)
}

/// As [`same_version`], by the file's server where it has one: what an NFS client remembers of a file may be older than the
/// bytes that were read last.
fn still_same_version(fd: BorrowedFd<'_>, object: &ObjectRef) -> Result<Seen> {
    let seen = ask_server(fd, b"", AtFlags::EMPTY_PATH);
    compare(seen.map_err(|e| os(&format!("stat of '{}'", show(&object.path)), e))?, object)
}

fn compare(seen: Seen, object: &ObjectRef) -> Result<Seen> {
    match seen.attr() {
        Some(attr) if attr.kind == FileKind::File && attr.version.as_str() == object.version.settled() => Ok(seen),
        Some(attr) => Err(gone(object, &format!("it is {} by now", attr.version))),
        None => Err(gone(object, "it is no file any more")),
    }
}

fn gone(object: &ObjectRef, evidence: &str) -> Error {
    Error::new(
        ErrorKind::Stale,
        format!("'{}' no longer has version {}: {evidence}; open it again", show(&object.path), object.version),
    )
}

fn not_opened(path: &[u8], errno: Errno) -> Error {
    match errno {
        Errno::LOOP => Error::new(
            ErrorKind::NotADirectory,
            format!("a part of '{}' is a symbolic link, and links are not followed here", show(path)),
        ),
        errno => os(&format!("'{}'", show(path)), errno),
    }
}

fn os(what: &str, errno: Errno) -> Error {
    Error::io(what, &std::io::Error::from(errno))
}

/// A path for a message.
pub(crate) fn show(path: &[u8]) -> String {
    if path.is_empty() { "/".into() } else { String::from_utf8_lossy(path).into_owned() }
}

/// Refuses paths that could leave the source or name nothing.
pub(crate) fn validate(path: &[u8]) -> Result<()> {
    let bad = !path.is_empty() && path.split(|b| *b == b'/').any(|part| matches!(part, b"" | b"." | b".."));
    if bad || path.contains(&0) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("'{}' is no path: a part is empty, '.' or '..', or holds NUL", show(path)),
        ));
    }
    Ok(())
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
        let config = UnderConfig { within: vec![dir.path().join("data").display().to_string()], ..Default::default() };
        let open = |path: &str| {
            let source = Source::directory(&dir.path().join(path)).unwrap();
            let under = DirUnder::new(source, &config, Arc::default());
            under.inner.walk.store(true, Ordering::Relaxed);
            under
        };
        let inner = open("data/sub").inner;
        inner.open(b"file", OFlags::RDONLY).unwrap();
        for path in ["data/out", "data/out/data"] {
            let error = open(path).inner.root().unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::NotADirectory), "{error}");
        }
        let error = open("data").inner.open(b"out/data", OFlags::RDONLY).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory, "{error}");
    }

    #[test]
    fn a_mount_that_is_dead_hides_no_other_name_and_a_damaged_file_is_not_left_out() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"x").unwrap();
        let seen = Seen::from(&rustix::fs::stat(dir.path().join("file")).unwrap());
        let names = Names::new(Instant::now(), [b"a", b"b", b"c", b"d"].map(|name| name.to_vec()).into());
        let list = |page: Range<usize>, answers: [Result<(), Errno>; 4]| {
            let listed = entries(&names, page, |name| answers[usize::from(name[0] - b'a')].map(|()| seen));
            listed.map(|(entries, left_out)| {
                (entries.into_iter().map(|entry| entry.name[0]).collect::<Vec<_>>(), left_out.unseen)
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
