//! A disk that fails on demand: errors, hangs, wrong bytes, torn writes, no space. For tests and chaos runs.

use super::{DiskIo, OpenFile, Space, Target};
use parking_lot::{Condvar, Mutex};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What the disk does wrong from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Reads and writes fail with EIO.
    Errors,
    /// Nothing is answered until the fault is changed; deadlines pass meanwhile.
    Hangs,
    /// Reads have one bit turned.
    Corrupts,
    /// Writes stop half-way and say nothing; the second half is never written.
    Tears,
    /// Writes fail with ENOSPC.
    Full,
    /// Writes stop half-way with ENOSPC.
    FillsUp,
    /// Reads that touch this offset of a data file fail with EIO, until it is written to.
    BadSector(u64),
    /// Reads that touch this offset of a data file are not answered until the fault is changed, or it is written to.
    SlowSector(u64),
    /// No file can be opened: the process has no descriptors left.
    NoDescriptors,
    /// So many removals of files fail with EIO.
    Keeps(u32),
    /// No data file is made with EDQUOT while there are this many: a limit that the file system's space does not show.
    Quota(usize),
    /// The index log takes nothing until the fault is changed; all else goes well.
    StuckLog,
    /// No file is removed and no space given back until the fault is changed; all else goes well.
    Sticks,
}

/// Wraps the operations of a disk and does to them what [`FaultyDisk::set`] says.
pub struct FaultyDisk {
    inner: Arc<dyn DiskIo>,
    fault: Mutex<Fault>,
    /// What it says it has, if not what is so.
    space: Mutex<Option<Space>>,
    changed: Condvar,
    reads: AtomicU64,
    /// Operations that hang now.
    held: AtomicU64,
    /// A removal missed its deadline and has not ended.
    stuck: AtomicBool,
}

impl FaultyDisk {
    /// A disk without faults yet.
    pub fn new(inner: Arc<dyn DiskIo>) -> Arc<FaultyDisk> {
        Arc::new(FaultyDisk {
            inner,
            fault: Mutex::new(Fault::None),
            space: Mutex::default(),
            changed: Condvar::new(),
            reads: AtomicU64::new(0),
            held: AtomicU64::new(0),
            stuck: AtomicBool::new(false),
        })
    }

    /// Changes what goes wrong; operations that hang go on.
    pub fn set(&self, fault: Fault) {
        *self.fault.lock() = fault;
        self.stuck.store(false, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Has the file system say that it has this space; `None`: what it really has.
    pub fn set_space(&self, space: Option<Space>) {
        *self.space.lock() = space;
    }

    /// Reads of data files asked for so far.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Operations that hang now.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Waits out a hang for at most `timeout`; the fault to act on, or `TimedOut`.
    fn pass(&self, timeout: Duration) -> io::Result<Fault> {
        self.wait_while(timeout, |fault| fault == Fault::Hangs)
    }

    fn pass_removal(&self, timeout: Duration) -> io::Result<()> {
        let passed = self.wait_while(timeout, |fault| matches!(fault, Fault::Hangs | Fault::Sticks));
        if passed.is_err() {
            self.stuck.store(*self.fault.lock() == Fault::Sticks, Ordering::Relaxed);
        }
        passed.map(drop)
    }

    fn wait_while(&self, timeout: Duration, hangs: impl Fn(Fault) -> bool) -> io::Result<Fault> {
        let mut fault = self.fault.lock();
        let deadline = std::time::Instant::now() + timeout;
        while hangs(*fault) {
            self.held.fetch_add(1, Ordering::Relaxed);
            let late = self.changed.wait_until(&mut fault, deadline).timed_out();
            self.held.fetch_sub(1, Ordering::Relaxed);
            if late {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(*fault)
    }

    fn pass_for_write(&self, timeout: Duration) -> io::Result<Fault> {
        match self.pass(timeout)? {
            Fault::Errors => Err(io::Error::from_raw_os_error(libc::EIO)),
            Fault::Full => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            fault => Ok(fault),
        }
    }
}

/// How many data files there are where this is to be one.
fn beside(path: &Path) -> usize {
    let data = path.ancestors().nth(2).filter(|dir| dir.ends_with("data"));
    let folders = data.and_then(|data| std::fs::read_dir(data).ok()).into_iter().flatten().flatten();
    folders.filter_map(|folder| std::fs::read_dir(folder.path()).ok()).map(Iterator::count).sum()
}

/// Hanging operations without a deadline of their own wait no longer than this, so that tests end.
const LONG: Duration = Duration::from_secs(600);

impl DiskIo for FaultyDisk {
    fn open(&self, path: &Path, create: bool, timeout: Duration) -> io::Result<OpenFile> {
        match self.pass(timeout)? {
            Fault::NoDescriptors => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            Fault::Quota(most) if create && !path.exists() && beside(path) >= most => {
                Err(io::Error::from_raw_os_error(libc::EDQUOT))
            }
            _ => self.inner.open(path, create, timeout),
        }
    }

    fn open_to_share(&self, path: &Path, timeout: Duration) -> io::Result<File> {
        self.pass(timeout)?;
        self.inner.open_to_share(path, timeout)
    }

    fn read(
        &self,
        file: &OpenFile,
        offset: u64,
        target: &mut Target<'_>,
        timeout: Duration,
        done: &mut dyn FnMut(Range<usize>),
    ) -> io::Result<usize> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let touched = offset..offset + target.len as u64;
        let slow = |fault| matches!(fault, Fault::SlowSector(at) if touched.contains(&at));
        match self.wait_while(timeout, |fault| fault == Fault::Hangs || slow(fault)) {
            // What a hung disk does at its worst: the bytes arrive after the reader has given up.
            Err(error) => {
                let keep = (target.keep)();
                let (ptr, len) = (target.ptr as usize, target.len);
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(20));
                    // SAFETY: `keep` holds the memory, and nobody else uses it, until it is dropped below.
                    unsafe { std::ptr::write_bytes(ptr as *mut u8, 0xee, len) };
                    drop(keep);
                });
                Err(error)
            }
            Ok(Fault::Errors) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Ok(Fault::BadSector(at)) if touched.contains(&at) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Ok(Fault::Corrupts) => {
                let n = self.inner.read(file, offset, target, timeout, &mut |_| {})?;
                if n > 0 {
                    // SAFETY: the inner read has ended, so the target is this call's alone.
                    unsafe { *target.ptr.add(n / 2) ^= 0x10 };
                }
                done(0..n);
                Ok(n)
            }
            Ok(_) => self.inner.read(file, offset, target, timeout, done),
        }
    }

    fn write(&self, file: &OpenFile, offset: u64, data: &[u8], timeout: Duration) -> io::Result<()> {
        match self.pass_for_write(timeout)? {
            fault @ (Fault::Tears | Fault::FillsUp) => {
                let half = data.len() / 2 / super::ALIGN * super::ALIGN;
                if half > 0 {
                    self.inner.write(file, offset, &data[..half], timeout)?;
                }
                if fault == Fault::Tears { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) }
            }
            // As a real disk does, which puts another sector in its place.
            Fault::BadSector(at) | Fault::SlowSector(at) if (offset..offset + data.len() as u64).contains(&at) => {
                self.set(Fault::None);
                self.inner.write(file, offset, data, timeout)
            }
            _ => self.inner.write(file, offset, data, timeout),
        }
    }

    fn punch(&self, file: &OpenFile, offset: u64, len: u64, timeout: Duration) -> io::Result<()> {
        self.pass_removal(timeout)?;
        self.pass_for_write(timeout)?;
        self.inner.punch(file, offset, len, timeout)
    }

    fn truncate(&self, file: &OpenFile, len: u64, timeout: Duration) -> io::Result<()> {
        self.pass_for_write(timeout)?;
        self.inner.truncate(file, len, timeout)
    }

    fn unlink(&self, path: &Path, timeout: Duration) -> io::Result<()> {
        self.pass_removal(timeout)?;
        if let Fault::Keeps(left) = &mut *self.fault.lock()
            && *left > 0
        {
            *left -= 1;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.inner.unlink(path, timeout)
    }

    fn sync(&self, log: &File, timeout: Duration) -> io::Result<()> {
        self.pass_for_write(timeout)?;
        self.inner.sync(log, timeout)
    }

    fn append(&self, log: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        self.wait_while(LONG, |fault| fault == Fault::StuckLog)?;
        match self.pass_for_write(LONG)? {
            Fault::Tears => {
                self.inner.append(log, offset, &data[..data.len() / 2])?;
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            _ => self.inner.append(log, offset, data),
        }
    }

    fn space(&self, path: &Path) -> io::Result<Space> {
        let told = *self.space.lock();
        told.map_or_else(|| self.inner.space(path), Ok)
    }

    fn late(&self) -> usize {
        self.inner.late() + usize::from(self.stuck.load(Ordering::Relaxed))
    }
}
