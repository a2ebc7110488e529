//! The calls of the file system, each with its rule. What they answer with is decided elsewhere: numbers in
//! `inode`, names in `dir`, errnos in `errno`.

use crate::attr::{Config, Entry, FileAttr, Lookup, StatFs};
use crate::errno::{FsError, Result};
use crate::handle::{Handle, Handles, Open, OpenFile};
use crate::inode::{Inode, Inodes, ROOT};
use crate::passthrough::{LiveBacking, RegisterBacking};
use crate::readahead::ReadAhead;
use crate::starts::Starts;
use crate::{NAME_MAX, dir};
use parking_lot::Mutex;
use spurline_types::{Attr, Error, ErrorKind, FileKind, Stats};
use spurline_volume::{Capacity, Data, Volume};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time since some moment before the file system was made; only grows.
pub type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

/// An open file, as the kernel is told of it.
pub struct Opened {
    /// The handle's number.
    pub fh: u64,
    /// The cached file the kernel may read instead of asking; the handle keeps it too.
    pub backing: Option<Arc<LiveBacking>>,
}

/// A mounted volume. Every call may be made from any thread; those that ask the volume block as long as it
/// does, and hold no lock meanwhile other than one of the very directory or file they are about.
pub struct Fs {
    // Dropped in this order: what is open lets go of its backing files before the volume may go.
    pub(crate) handles: Handles,
    pub(crate) inodes: Inodes,
    pub(crate) volume: Arc<dyn Volume>,
    pub(crate) config: Config,
    pub(crate) stats: Arc<Stats>,
    pub(crate) starts: Starts,
    clock: Clock,
    block_size: u64,
    capacity: Mutex<Option<(Duration, Capacity)>>,
    readers: Readers,
}

impl Fs {
    /// Shows `volume` with the options of `config`.
    pub fn new(volume: Arc<dyn Volume>, config: Config, stats: Arc<Stats>) -> Self {
        let start = Instant::now();
        Self::with_clock(volume, config, stats, Box::new(move || start.elapsed()))
    }

    /// The same on a clock of the caller's.
    pub fn with_clock(volume: Arc<dyn Volume>, config: Config, stats: Arc<Stats>, clock: Clock) -> Self {
        let inodes = Inodes::new(volume.source());
        let block_size = volume.block_size().max(1);
        stats.fuse.inodes.add(1);
        let (handles, capacity, readers) = (Handles::new(), Mutex::default(), Readers::default());
        let starts = Starts::default();
        Fs { volume, config, stats, starts, inodes, handles, clock, block_size, capacity, readers }
    }

    /// The mount's options.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The volume shown.
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.volume
    }

    /// How many inodes the kernel knows, the root included.
    pub fn known_inodes(&self) -> usize {
        self.inodes.len()
    }

    pub(crate) fn now(&self) -> Duration {
        (self.clock)()
    }

    pub(crate) fn inode(&self, ino: u64) -> Result<Arc<Inode>> {
        self.inodes.get(ino).ok_or(FsError::Stale(ino))
    }

    /// The inode `path` with `attr` seen at `at`, counted as looked up once.
    pub(crate) fn intern(&self, path: &[u8], attr: &Attr, at: Duration) -> Arc<Inode> {
        let (inode, new) = self.inodes.intern(path, attr, at);
        if new {
            self.stats.fuse.inodes.add(1);
        }
        inode
    }

    /// Finds `name` in the directory `parent`; `.` and `..` are names like others. What is found is counted
    /// as looked up once more, until [`Fs::forget`].
    ///
    /// # Errors
    /// `Stale` for a forgotten parent, `NotADirectory`, `NameTooLong`, or the volume's own.
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Lookup> {
        let dir = self.inode(parent)?;
        match name {
            b"." => return self.found(&dir.object.path),
            b".." => return self.found(parent_of(&dir.object.path)),
            b"" => return Err(FsError::Invalid("an empty name")),
            _ if name.len() > NAME_MAX => return Err(FsError::NameTooLong),
            _ if name.contains(&b'/') || name.contains(&0) => {
                return Err(FsError::Invalid("a name with a slash or a NUL in it"));
            }
            _ => {}
        }
        if dir.kind != FileKind::Directory {
            return Err(FsError::NotADirectory);
        }
        with_child(&dir.object.path, name, |path| self.found(path))
    }

    fn found(&self, path: &[u8]) -> Result<Lookup> {
        let at = self.now();
        let answer = self.volume.lookup(path);
        // What the volume said may be as old as the question.
        let age = self.now().saturating_sub(at);
        let attr = match answer {
            Ok(attr) => attr,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Lookup::Absent { ttl: self.config.negative_ttl.saturating_sub(age) });
            }
            Err(error) => return Err(error.into()),
        };
        if path.is_empty() && attr.kind != FileKind::Directory {
            return Err(FsError::NotADirectory);
        }
        let inode = self.intern(path, &attr, at);
        Ok(Lookup::Found(inode.entry(&self.config, age)))
    }

    /// Takes back `n` lookups of `ino`; at none left the number is unknown for ever. Open handles go on.
    pub fn forget(&self, ino: u64, n: u64) {
        if self.inodes.forget(ino, n) {
            self.stats.fuse.inodes.sub(1);
        }
    }

    /// Attributes of an inode, and how long they hold. A file's are its version's; a directory's are asked
    /// for anew when they are older than the attribute cache time.
    ///
    /// # Errors
    /// `Stale` for an inode that was forgotten (unless `fh` has it open) or is no directory any more.
    pub fn getattr(&self, ino: u64, fh: Option<u64>) -> Result<(FileAttr, Duration)> {
        let inode = match self.inodes.get(ino) {
            Some(inode) => inode,
            None => {
                let handle = fh.and_then(|fh| self.handles.get(fh)).filter(|handle| handle.inode.ino == ino);
                Arc::clone(&handle.ok_or(FsError::Stale(ino))?.inode)
            }
        };
        let mut ttl = self.config.attr_ttl;
        if inode.kind == FileKind::Directory {
            self.revalidate(&inode)?;
            ttl = ttl.saturating_sub(self.now().saturating_sub(inode.seen_at()));
        }
        Ok((inode.attr(&self.config), ttl))
    }

    /// Makes sure that the path held this inode not longer ago than the attribute cache time.
    fn revalidate(&self, inode: &Inode) -> Result<()> {
        let at = self.now();
        // The root starts without attributes of its own, so time 0 is not taken for having seen it.
        let seen = inode.seen_at();
        if seen > Duration::ZERO && at < seen + self.config.attr_ttl {
            return Ok(());
        }
        match self.volume.lookup(&inode.object.path) {
            Ok(attr) if inode.may_be(&attr) => {
                inode.refresh(&attr, at.max(Duration::from_nanos(1)));
                Ok(())
            }
            Ok(_) => Err(FsError::Stale(inode.ino)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(FsError::Stale(inode.ino))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a file with the flags of `open(2)`. With `register` a file that is whole in the cache may be
    /// handed to the kernel. The pages the kernel holds of an inode are right for as long as it exists.
    ///
    /// # Errors
    /// `ReadOnly` for any way of writing, `IsADirectory`, `NotADirectory` for `O_DIRECTORY`; `Stale` when
    /// the path has held another version since, or nothing: the kernel then looks the path up again.
    pub fn open(&self, ino: u64, flags: i32, register: Option<&dyn RegisterBacking>) -> Result<Opened> {
        let inode = self.inode(ino)?;
        match inode.kind {
            FileKind::Directory => return Err(FsError::IsADirectory),
            _ if flags & libc::O_DIRECTORY != 0 => return Err(FsError::NotADirectory),
            FileKind::Symlink => return Err(FsError::Invalid("a symbolic link can't be opened")),
            FileKind::File => {}
        }
        if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return Err(FsError::ReadOnly);
        }
        self.revalidate(&inode)?;
        let register = register.filter(|_| inode.object.size >= self.config.passthrough_min.max(1));
        let direct = flags & libc::O_DIRECT != 0;
        let backing = inode.opens.lock().open(&*self.volume, &inode.object, register, direct);
        let ahead = backing.is_none() && self.config.max_readahead > 0 && inode.object.size > self.block_size;
        let readahead = ahead.then(|| Mutex::new(Box::new(ReadAhead::new(inode.object.size, self.block_size))));
        if backing.is_some() {
            self.stats.fuse.passthrough_opens.add(1);
        }
        let open = OpenFile { readahead, counted: AtomicU64::new(u64::MAX), backing: backing.clone() };
        let fh = self.insert(Handle { inode, open: Open::File(open) })?;
        Ok(Opened { fh, backing })
    }

    pub(crate) fn insert(&self, handle: Handle) -> Result<u64> {
        let handle = Arc::new(handle);
        let Some(fh) = self.handles.insert(Arc::clone(&handle)) else {
            close(&handle);
            return Err(Error::new(ErrorKind::Io(libc::ENFILE), "too many open files").into());
        };
        self.stats.fuse.open_handles.add(1);
        Ok(fh)
    }

    /// Reads up to `dst.len()` bytes from `offset`: less only at the end of the file. On a hit it allocates
    /// nothing and holds no lock while bytes are copied.
    ///
    /// # Errors
    /// `BadHandle`; `IsADirectory`; `Stale` when the version is gone and its bytes are not in the cache; the
    /// volume's own.
    pub fn read(&self, ino: u64, fh: u64, offset: u64, dst: &mut [u8]) -> Result<Data> {
        let handle = self.handles.get(fh).filter(|handle| handle.inode.ino == ino).ok_or(FsError::BadHandle(fh))?;
        let Open::File(file) = &handle.open else { return Err(FsError::IsADirectory) };
        let object = &handle.inode.object;
        let len = usize::try_from(object.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(dst.len());
        if len == 0 {
            return Ok(Data::Copied(0));
        }
        if let Some(readahead) = &file.readahead {
            let blocks = readahead.lock().observe(offset, len, || self.share(file));
            if let Some(blocks) = blocks {
                self.volume.prefetch(object, blocks, len);
            }
        }
        let data = match self.volume.read(object, offset, &mut dst[..len]) {
            Ok(data) => data,
            // An object that is gone altogether is a version that is gone.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Stale) => {
                return Err(FsError::Stale(ino));
            }
            Err(error) => return Err(error.into()),
        };
        let got = match &data {
            Data::Copied(n) => *n,
            Data::Shared(slice) => slice.len(),
        };
        // The kernel takes a short answer for the end of the file and fills the rest with zeros.
        if got != len {
            let what = format!("a read of {len} bytes at {offset} brought {got} of an object of {}", object.size);
            return Err(Error::new(ErrorKind::Corrupt, what).into());
        }
        Ok(data)
    }

    /// The most blocks a reader may be read ahead now: its own limit, or its share of what all may.
    fn share(&self, file: &OpenFile) -> u32 {
        let readers = self.readers.count(&file.counted, self.now().as_secs());
        let bytes = self.config.max_readahead.min(self.config.readahead_budget / readers.max(1));
        u32::try_from(bytes / self.block_size).unwrap_or(u32::MAX).max(1)
    }

    /// Closes a file or a directory.
    ///
    /// # Errors
    /// `BadHandle` when it is not open.
    pub fn release(&self, fh: u64) -> Result<()> {
        let handle = self.handles.remove(fh).ok_or(FsError::BadHandle(fh))?;
        self.stats.fuse.open_handles.sub(1);
        close(&handle);
        Ok(())
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// `NotADirectory`; `Stale` for an inode that was forgotten.
    pub fn opendir(&self, ino: u64) -> Result<u64> {
        let inode = self.inode(ino)?;
        if inode.kind != FileKind::Directory {
            return Err(FsError::NotADirectory);
        }
        self.insert(Handle { inode, open: Open::Dir(Mutex::new(dir::DirState::default())) })
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// `Invalid` for anything else; `Stale`; the volume's own.
    pub fn readlink(&self, ino: u64) -> Result<Vec<u8>> {
        let inode = self.inode(ino)?;
        if inode.kind != FileKind::Symlink {
            return Err(FsError::Invalid("not a symbolic link"));
        }
        match self.volume.readlink(&inode.object.path) {
            // Another kind of file by now, or none.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => Err(FsError::Stale(ino)),
            answer => Ok(answer?),
        }
    }

    /// Whether the mode bits let `uid` and `gid` do what `mask` says (`R_OK`, `W_OK`, `X_OK`); root may read
    /// all, search all directories, and execute what somebody may.
    ///
    /// # Errors
    /// `ReadOnly` for `W_OK`; `AccessDenied`; `Stale`.
    pub fn access(&self, ino: u64, mask: i32, uid: u32, gid: u32) -> Result<()> {
        let inode = self.inode(ino)?;
        if mask & libc::W_OK != 0 {
            return Err(FsError::ReadOnly);
        }
        let attr = inode.attr(&self.config);
        let bits = if uid == 0 {
            let any = attr.mode >> 6 | attr.mode >> 3 | attr.mode | 4;
            if inode.kind == FileKind::Directory { any | 1 } else { any }
        } else if uid == attr.uid {
            attr.mode >> 6
        } else if gid == attr.gid {
            attr.mode >> 3
        } else {
            attr.mode
        };
        let wanted = mask & (libc::R_OK | libc::X_OK);
        if i32::from(bits) & wanted == wanted { Ok(()) } else { Err(FsError::AccessDenied) }
    }

    /// How large the volume is; asked at most once in [`Config::statfs_ttl`].
    ///
    /// # Errors
    /// The volume's own, unless it answered before.
    pub fn statfs(&self) -> Result<StatFs> {
        let now = self.now();
        let held = *self.capacity.lock();
        let capacity = match held {
            Some((at, capacity)) if now < at + self.config.statfs_ttl => capacity,
            _ => match (self.volume.capacity(), held) {
                (Ok(capacity), _) => {
                    *self.capacity.lock() = Some((now, capacity));
                    capacity
                }
                // `df` is asked when something is wrong: the size last known serves it better than an error.
                (Err(_), Some((_, capacity))) => capacity,
                (Err(error), None) => return Err(error.into()),
            },
        };
        let block_size = 4096;
        Ok(StatFs {
            block_size,
            blocks: capacity.total_bytes / u64::from(block_size),
            free: capacity.free_bytes / u64::from(block_size),
            files: capacity.files,
            files_free: capacity.files_free,
            name_max: NAME_MAX as u32,
        })
    }

    /// An entry for an inode, `age` after the volume said so.
    pub(crate) fn entry(&self, inode: &Inode, age: Duration) -> Entry {
        inode.entry(&self.config, age)
    }

    /// The number of the directory that `path` is in.
    pub(crate) fn parent_number(&self, path: &[u8]) -> u64 {
        self.inodes.directory_number(parent_of(path)).unwrap_or(ROOT)
    }
}

fn close(handle: &Handle) {
    if let Open::File(file) = &handle.open {
        // The statement's lock is let go before the backing file is: taking it back from the kernel is slow.
        let unused = handle.inode.opens.lock().release(file.backing.is_some());
        drop(unused);
    }
}

impl Drop for Fs {
    fn drop(&mut self) {
        self.stats.fuse.inodes.sub(self.inodes.len() as u64);
    }
}

fn parent_of(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(b"", |slash| &path[..slash])
}

/// Calls `f` with the path of `name` in `dir`, put together in a buffer that each thread keeps.
pub(crate) fn with_child<T>(dir: &[u8], name: &[u8], f: impl FnOnce(&[u8]) -> T) -> T {
    thread_local!(static PATH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) });
    let mut path = PATH.take();
    path.clear();
    path.extend_from_slice(dir);
    if !dir.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    let answer = f(&path);
    PATH.set(path);
    answer
}

/// How many handles were read ahead lately. Seconds are counted apart, so that a handle that is open but
/// idle takes no share from the others.
#[derive(Default)]
struct Readers {
    second: AtomicU64,
    now: AtomicU64,
    before: AtomicU64,
}

impl Readers {
    /// Counts the handle whose mark is `counted`, and says how many there are. Two threads that meet at the
    /// turn of a second may miscount by one for that second, which does no harm.
    fn count(&self, counted: &AtomicU64, second: u64) -> u64 {
        let last = self.second.load(Ordering::Relaxed);
        if last != second && self.second.compare_exchange(last, second, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let now = self.now.swap(0, Ordering::Relaxed);
            self.before.store(if second == last + 1 { now } else { 0 }, Ordering::Relaxed);
        }
        if counted.swap(second, Ordering::Relaxed) != second {
            self.now.fetch_add(1, Ordering::Relaxed);
        }
        self.now.load(Ordering::Relaxed).max(self.before.load(Ordering::Relaxed))
    }
}
