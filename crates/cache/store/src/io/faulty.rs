//! A disk that fails on demand: errors, hangs, wrong bytes, torn writes, no space. For tests and chaos runs.

use super::{DataFile, DiskIo, DiskSpace, ReadTarget};
use parking_lot::{Condvar, Mutex};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The fault that the disk shows from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskFault {
    /// Nothing.
    #[default]
    None,
    /// Reads and writes fail with EIO.
    Errors,
    /// Operations hang until the fault is changed; deadlines pass meanwhile.
    Hangs,
    /// A bit of each read is turned.
    Corrupts,
    /// Writes stop half-way and report success.
    Tears,
    /// Writes fail with ENOSPC.
    Full,
    /// Writes stop half-way with ENOSPC.
    FillsUp,
    /// Reads that touch this offset of a data file fail with EIO, until a write there.
    BadSector(u64),
    /// Reads that touch this offset of a data file hang until the fault is changed or the offset is written to.
    SlowSector(u64),
    /// No file can be opened: the process has no descriptors left.
    NoDescriptors,
    /// This many removals of files fail with EIO.
    Keeps(u32),
    /// Creating a data file fails with EDQUOT while there are this many: a limit that the file system's space does
    /// not show.
    Quota(usize),
    /// The index log takes no record until the fault is changed; all else works.
    StuckLog,
    /// No file is removed and no space freed until the fault is changed; all else works.
    Sticks,
}

/// Wraps the operations of a disk and applies the fault of [`FaultyDisk::set_fault`].
pub struct FaultyDisk {
    inner: Arc<dyn DiskIo>,
    fault: Mutex<DiskFault>,
    /// The reported space, if not the real space.
    space: Mutex<Option<DiskSpace>>,
    changed: Condvar,
    reads: AtomicU64,
    /// Operations that hang now.
    held: AtomicU64,
    /// A removal missed its deadline and has not ended.
    stuck: AtomicBool,
}

impl FaultyDisk {
    /// A disk without a fault.
    pub fn new(inner: Arc<dyn DiskIo>) -> Arc<FaultyDisk> {
        Arc::new(FaultyDisk {
            inner,
            fault: Mutex::new(DiskFault::None),
            space: Mutex::default(),
            changed: Condvar::new(),
            reads: AtomicU64::new(0),
            held: AtomicU64::new(0),
            stuck: AtomicBool::new(false),
        })
    }

    /// Changes the fault; hanging operations continue.
    pub fn set_fault(&self, fault: DiskFault) {
        *self.fault.lock() = fault;
        self.stuck.store(false, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Sets the space that the file system reports; `None`: the real space.
    pub fn set_space(&self, space: Option<DiskSpace>) {
        *self.space.lock() = space;
    }

    /// Number of reads of data files so far.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Operations that hang now.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Waits for a hang to end for at most `timeout`; returns the fault to act on, or `TimedOut`.
    fn wait_hang(&self, timeout: Duration) -> io::Result<DiskFault> {
        self.wait_while(timeout, |fault| fault == DiskFault::Hangs)
    }

    fn wait_removal(&self, timeout: Duration) -> io::Result<()> {
        let passed = self.wait_while(timeout, |fault| matches!(fault, DiskFault::Hangs | DiskFault::Sticks));
        if passed.is_err() {
            self.stuck.store(*self.fault.lock() == DiskFault::Sticks, Ordering::Relaxed);
        }
        passed.map(drop)
    }

    fn wait_while(&self, timeout: Duration, hangs: impl Fn(DiskFault) -> bool) -> io::Result<DiskFault> {
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

    fn wait_write(&self, timeout: Duration) -> io::Result<DiskFault> {
        match self.wait_hang(timeout)? {
            DiskFault::Errors => Err(io::Error::from_raw_os_error(libc::EIO)),
            DiskFault::Full => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            fault => Ok(fault),
        }
    }
}

/// Number of data files in the directory of this file.
fn data_file_count(path: &Path) -> usize {
    let data = path.ancestors().nth(2).filter(|dir| dir.ends_with("data"));
    let folders = data.and_then(|data| std::fs::read_dir(data).ok()).into_iter().flatten().flatten();
    folders.filter_map(|folder| std::fs::read_dir(folder.path()).ok()).map(Iterator::count).sum()
}

/// Limit for hanging operations without a deadline, so that tests end.
const HANG_LIMIT: Duration = Duration::from_secs(600);

impl DiskIo for FaultyDisk {
    fn open(&self, path: &Path, create: bool, timeout: Duration) -> io::Result<DataFile> {
        match self.wait_hang(timeout)? {
            DiskFault::NoDescriptors => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            DiskFault::Quota(most) if create && !path.exists() && data_file_count(path) >= most => {
                Err(io::Error::from_raw_os_error(libc::EDQUOT))
            }
            _ => self.inner.open(path, create, timeout),
        }
    }

    fn open_to_share(&self, path: &Path, timeout: Duration) -> io::Result<File> {
        self.wait_hang(timeout)?;
        self.inner.open_to_share(path, timeout)
    }

    fn read(
        &self,
        file: &DataFile,
        offset: u64,
        target: &mut ReadTarget<'_>,
        timeout: Duration,
        done: &mut dyn FnMut(Range<usize>),
    ) -> io::Result<usize> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let touched = offset..offset + target.len as u64;
        match self.wait_while(timeout, |fault| {
            fault == DiskFault::Hangs || matches!(fault, DiskFault::SlowSector(at) if touched.contains(&at))
        }) {
            // The worst case of a hung disk: the bytes arrive after the reader has timed out.
            Err(error) => {
                let keep = (target.keep)();
                let ptr = target.ptr as usize;
                let len = target.len;
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(20));
                    // SAFETY: `keep` owns the memory, and there is no other user until `keep` is dropped below.
                    unsafe { std::ptr::write_bytes(ptr as *mut u8, 0xee, len) };
                    drop(keep);
                });
                Err(error)
            }
            Ok(DiskFault::Errors) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Ok(DiskFault::BadSector(at)) if touched.contains(&at) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Ok(DiskFault::Corrupts) => {
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

    fn write(&self, file: &DataFile, offset: u64, data: &[u8], timeout: Duration) -> io::Result<()> {
        match self.wait_write(timeout)? {
            fault @ (DiskFault::Tears | DiskFault::FillsUp) => {
                let half = data.len() / 2 / super::ALIGN * super::ALIGN;
                if half > 0 {
                    self.inner.write(file, offset, &data[..half], timeout)?;
                }
                if fault == DiskFault::Tears { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) }
            }
            // As a real disk does, which remaps the sector.
            DiskFault::BadSector(at) | DiskFault::SlowSector(at)
                if (offset..offset + data.len() as u64).contains(&at) =>
            {
                self.set_fault(DiskFault::None);
                self.inner.write(file, offset, data, timeout)
            }
            _ => self.inner.write(file, offset, data, timeout),
        }
    }

    fn punch(&self, file: &DataFile, offset: u64, len: u64, timeout: Duration) -> io::Result<()> {
        self.wait_removal(timeout)?;
        self.wait_write(timeout)?;
        self.inner.punch(file, offset, len, timeout)
    }

    fn truncate(&self, file: &DataFile, len: u64, timeout: Duration) -> io::Result<()> {
        self.wait_write(timeout)?;
        self.inner.truncate(file, len, timeout)
    }

    fn unlink(&self, path: &Path, timeout: Duration) -> io::Result<()> {
        self.wait_removal(timeout)?;
        if let DiskFault::Keeps(left) = &mut *self.fault.lock()
            && *left > 0
        {
            *left -= 1;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.inner.unlink(path, timeout)
    }

    fn sync(&self, log: &File, timeout: Duration) -> io::Result<()> {
        self.wait_write(timeout)?;
        self.inner.sync(log, timeout)
    }

    fn append(&self, log: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        self.wait_while(HANG_LIMIT, |fault| fault == DiskFault::StuckLog)?;
        match self.wait_write(HANG_LIMIT)? {
            DiskFault::Tears => {
                self.inner.append(log, offset, &data[..data.len() / 2])?;
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            _ => self.inner.append(log, offset, data),
        }
    }

    fn disk_space(&self, path: &Path) -> io::Result<DiskSpace> {
        let told = *self.space.lock();
        told.map_or_else(|| self.inner.disk_space(path), Ok)
    }

    fn late_count(&self) -> usize {
        self.inner.late_count() + usize::from(self.stuck.load(Ordering::Relaxed))
    }
}
