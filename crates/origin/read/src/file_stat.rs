//! The stat of one file: its attributes, its version, and how long that version is not yet final. It knows no path
//! and never blocks.

use parking_lot::Mutex;
use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, FileType, Stat, Statx, StatxFlags, makedev};
use rustix::io::Errno;
use spurline_types::{FileKind, ObjectAttr, Version, unix_time};
use spurline_volume::writes::{FileTime, NodeAttr};
use std::time::{Duration, Instant, SystemTime};

/// A change within this time of the one before may carry the same timestamp: kernels before 6.13 stamp files by the
/// timer tick, 10 ms at most.
const TICK: Duration = Duration::from_millis(20);
/// The same where times are whole seconds (ext3, ext4 with small inodes, sshfs) or every other second (vfat).
const WHOLE_SECONDS_TICK: Duration = Duration::from_millis(2020);

/// Assumed bound on the clock error of file servers, in nanoseconds.
const OFF: i128 = 60_000_000_000;
/// Lifetime of a measured clock error, since clocks are adjusted.
const KNOWN: Duration = Duration::from_secs(60);

/// File systems with timestamps of this machine's clock: ext2 to ext4, XFS, btrfs, tmpfs, overlay, F2FS, ZFS,
/// bcachefs, vfat, exFAT. An unknown one is assumed to use another machine's clock.
const OWN_CLOCK: [u32; 10] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x794c_7630,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
    0x4d44,
    0x2011_bab0,
];

/// Whether a file has timestamps of this machine's clock.
pub fn own_clock(fd: BorrowedFd<'_>) -> bool {
    // The numbers have 32 bits, whatever the width of the field, and some are sign-extended.
    rustix::fs::fstatfs(fd).is_ok_and(|found| OWN_CLOCK.contains(&(found.f_type as u32)))
}

/// Upper bounds of how far file systems' clocks are behind this machine's, in nanoseconds; negative for a clock
/// ahead. A clock that has stamped a file has reached that time. Bounds are kept for a few file systems and a limited
/// time.
#[derive(Default)]
pub struct ClockLag(Mutex<Vec<SmallestAge>>);

/// Most file systems below one source that are tracked at once.
const FILE_SYSTEMS: usize = 8;

struct SmallestAge {
    device: u64,
    age: i128,
    since: Instant,
}

impl ClockLag {
    /// How long a file can still change without changing its times.
    pub fn young_for(&self, fd: BorrowedFd<'_>, seen: &FileStat) -> Duration {
        let now = SystemTime::now();
        let own = seen.young_for(now, 0);
        let server = seen.young_for(now, self.observe_file(seen, now));
        if server > own && !own_clock(fd) { server } else { own }
    }

    /// Records a file's time, and returns the bound of its clock's lag.
    pub fn observe_file(&self, seen: &FileStat, now: SystemTime) -> i128 {
        let age = seen.changed_ago(now);
        if age.abs() >= OFF {
            return OFF;
        }
        let mut known = self.0.lock();
        known.retain(|least| least.since.elapsed() <= KNOWN);
        if let Some(least) = known.iter_mut().find(|least| least.device == seen.device) {
            least.age = least.age.min(age);
            return least.age;
        }
        if known.len() == FILE_SYSTEMS {
            // The oldest.
            known.remove(0);
        }
        known.push(SmallestAge { device: seen.device, age, since: Instant::now() });
        age
    }
}

/// The stat of `name` in `dir`, from its server where it has one: an NFS client's cached attributes may be a minute
/// old.
pub fn stat_on_server(dir: BorrowedFd<'_>, name: &[u8], flags: AtFlags) -> rustix::io::Result<FileStat> {
    match rustix::fs::statx(dir, name, flags | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS) {
        Ok(stat) => Ok(FileStat::from(&stat)),
        // Not supported by this kernel, or not permitted in this container.
        Err(Errno::NOSYS | Errno::PERM | Errno::INVAL) => {
            rustix::fs::statat(dir, name, flags).map(|stat| FileStat::from(&stat))
        }
        Err(errno) => Err(errno),
    }
}

fn to_system_time(seconds: i64, nanos: u64) -> SystemTime {
    let nanos = Duration::from_nanos(nanos);
    match u64::try_from(seconds) {
        Ok(s) => SystemTime::UNIX_EPOCH + Duration::from_secs(s) + nanos,
        Err(_) => SystemTime::UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()) + nanos,
    }
}

/// The common part of `fstat` and `statx`.
#[derive(Clone, Copy)]
pub struct FileStat {
    device: u64,
    mode: u32,
    ino: u64,
    size: u64,
    mtime: (i64, u64),
    ctime: (i64, u64),
    /// Distinguishes this stat from others while the bytes may change without changing the times.
    mark: Option<u64>,
}

impl From<&Stat> for FileStat {
    fn from(stat: &Stat) -> FileStat {
        FileStat {
            device: stat.st_dev,
            mode: stat.st_mode,
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
            mark: None,
        }
    }
}

impl From<&Statx> for FileStat {
    fn from(stat: &Statx) -> FileStat {
        FileStat {
            device: makedev(stat.stx_dev_major, stat.stx_dev_minor),
            mode: stat.stx_mode.into(),
            ino: stat.stx_ino,
            size: stat.stx_size,
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec.into()),
            ctime: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec.into()),
            mark: None,
        }
    }
}

impl FileStat {
    /// Time since the file's last change by this machine's clock, in nanoseconds; negative for a time in the future.
    fn changed_ago(&self, now: SystemTime) -> i128 {
        let now = unix_time(now);
        total_nanos(now.0, now.1.into()) - total_nanos(self.ctime.0, self.ctime.1)
    }

    /// How long the file can still change without changing its times, by a clock that is `lag` nanoseconds behind.
    pub fn young_for(&self, now: SystemTime, lag: i128) -> Duration {
        let tick = if self.mtime.1 == 0 && self.ctime.1 == 0 { WHOLE_SECONDS_TICK } else { TICK };
        let left = tick.as_nanos() as i128 + lag - self.changed_ago(now);
        // This machine's clock may have been put back a little. A time far in the future was set by a program, or
        // comes from a wrong clock: waiting for it would not help.
        u64::try_from(left).map(Duration::from_nanos).ok().filter(|left| *left <= 2 * tick).unwrap_or_default()
    }

    /// The device of its file system.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Whether it is a file that changed at most `period` before `now`. Only the kernel sets ctime; a future one
    /// comes from a clock that was put back.
    pub fn changed_within(&self, period: Duration, now: SystemTime) -> bool {
        let file = FileType::from_raw_mode(self.mode) == FileType::RegularFile;
        file && self.changed_ago(now) <= period.as_nanos() as i128
    }

    /// The same stat, marked as having bytes that may still change; the mark is unique.
    pub fn mark_unsettled(self, mark: u64) -> FileStat {
        FileStat { mark: Some(mark), ..self }
    }

    /// Whether its bytes may still change.
    pub fn is_unsettled(&self) -> bool {
        self.mark.is_some()
    }

    /// Whether the length and the times are those of `attr`.
    pub fn has_times_of(&self, attr: &NodeAttr) -> bool {
        self.size == attr.size
            && self.mtime == seconds_and_nanos(attr.mtime)
            && self.ctime == seconds_and_nanos(attr.ctime)
    }

    /// The attributes of a file, a directory or a link; `None` for other types.
    pub fn object_attr(&self) -> Option<ObjectAttr> {
        let kind = match FileType::from_raw_mode(self.mode) {
            FileType::RegularFile => FileKind::File,
            FileType::Directory => FileKind::Directory,
            FileType::Symlink => FileKind::Symlink,
            _ => return None,
        };
        let version = match kind {
            FileKind::Directory => String::new(),
            FileKind::File | FileKind::Symlink => format!(
                "{:x}-{:x}.{:x}-{:x}.{:x}-{:x}",
                self.ino, self.mtime.0, self.mtime.1, self.ctime.0, self.ctime.1, self.size
            ),
        };
        let version = Version::new(&version);
        Some(ObjectAttr {
            kind,
            size: if kind == FileKind::Directory { 0 } else { self.size },
            mtime: to_system_time(self.mtime.0, self.mtime.1),
            mode: (self.mode & 0o7777) as u16,
            version: self.mark.map_or_else(|| version.clone(), |mark| version.with_unsettled_mark(mark)),
            etag: None,
        })
    }
}

fn total_nanos(seconds: i64, nanos: u64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanos)
}

fn seconds_and_nanos(time: FileTime) -> (i64, u64) {
    (time.seconds, u64::from(time.nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_young_for_as_long_as_its_clock_ticks() {
        let at = |nanos| {
            let time = (1000, nanos);
            FileStat { device: 1, mode: 0, ino: 1, size: 1, mtime: time, ctime: time, mark: None }
        };
        let now = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        let left = |seen: &FileStat, millis| seen.young_for(now(millis), 0).as_millis();
        let fine = at(500_000_000);
        assert_eq!([left(&fine, 1_000_505), left(&fine, 1_000_520), left(&fine, 1_000_495)], [15, 0, 25]);
        let whole = at(0);
        assert_eq!([left(&whole, 1_000_900), left(&whole, 1_001_999), left(&whole, 1_002_020)], [1120, 21, 0]);
        assert_eq!([left(&whole, 999_700), left(&whole, 990_000), left(&fine, 990_000)], [2320, 0, 0]);
        // A single time in whole seconds was set by hand (touch -d), or is chance.
        assert_eq!(left(&FileStat { mtime: (1000, 0), ..at(500_000_000) }, 1_000_600), 0);
    }

    #[test]
    fn a_server_whose_clock_is_off_is_waited_for_by_the_times_of_its_files() {
        let now = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        let at = |millis: u64, device| {
            let time = ((millis / 1000) as i64, millis % 1000 * 1_000_000);
            FileStat { device, mode: 0, ino: 1, size: 1, mtime: time, ctime: time, mark: None }
        };
        let left = |lag: &ClockLag, seen: FileStat, millis| {
            let lag = lag.observe_file(&seen, now(millis));
            seen.young_for(now(millis), lag).as_millis()
        };
        // Three seconds behind, whole seconds: written at 1000.9 by the server, read at 1004 by this machine.
        let lag = ClockLag::default();
        assert_eq!(left(&lag, at(1_000_000, 1), 1_004_000), 2020);
        assert_eq!(left(&lag, at(1_000_000, 1), 1_005_000), 1020);
        assert_eq!(left(&lag, at(1_000_000, 1), 1_006_020), 0);
        // That file's time gives a bound on the server's clock for other files.
        assert_eq!([left(&lag, at(998_000, 1), 1_006_030), left(&lag, at(1_002_000, 1), 1_006_100)], [0, 1920]);
        // Another file system has another clock.
        assert_eq!(left(&lag, at(1_000_500, 2), 1_006_100), 20);
        // Ten seconds ahead.
        let lag = ClockLag::default();
        assert_eq!([left(&lag, at(1_010_500, 1), 1_000_500), left(&lag, at(1_010_500, 1), 1_000_520)], [20, 0]);
        assert_eq!([left(&lag, at(1_010_510, 1), 1_000_520), left(&lag, at(1_005_000, 1), 1_000_520)], [10, 0]);
        // Old files, and times of no real clock, neither wait nor give a bound.
        let lag = ClockLag::default();
        assert_eq!([left(&lag, at(1_000_500, 1), 1_100_000), left(&lag, at(2_000_500, 1), 1_100_000)], [0, 0]);
        assert_eq!(left(&lag, at(1_090_500, 1), 1_100_000), 20);
    }
}
