//! What the operating system tells of one file: its attributes, its version, and how long that version is not yet final.
//! It knows no path and waits for nothing.

use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, FileType, Stat, Statx, StatxFlags};
use rustix::io::Errno;
use spurline_types::{Attr, FileKind, Version};
use std::time::{Duration, SystemTime};

/// A change within this time of the one before may carry the same timestamp: kernels before 6.13 stamp files by the
/// timer tick, 10 ms at most.
const TICK: Duration = Duration::from_millis(20);
/// The same where times are whole seconds (ext3, ext4 with small inodes, sshfs) or every other second (vfat).
const WHOLE_SECONDS_TICK: Duration = Duration::from_millis(2020);

/// What is at `name` in `dir`, by its server where it has one: what a client of NFS remembers of a file may be a minute old.
pub(crate) fn ask_server(dir: BorrowedFd<'_>, name: &[u8], flags: AtFlags) -> rustix::io::Result<Seen> {
    match rustix::fs::statx(dir, name, flags | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS) {
        Ok(stat) => Ok(Seen::from(&stat)),
        // Not by this kernel, or not in this container.
        Err(Errno::NOSYS | Errno::PERM | Errno::INVAL) => {
            rustix::fs::statat(dir, name, flags).map(|stat| Seen::from(&stat))
        }
        Err(errno) => Err(errno),
    }
}

fn time(seconds: i64, nanos: u64) -> SystemTime {
    let nanos = Duration::from_nanos(nanos);
    match u64::try_from(seconds) {
        Ok(s) => SystemTime::UNIX_EPOCH + Duration::from_secs(s) + nanos,
        Err(_) => SystemTime::UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()) + nanos,
    }
}

/// What `fstat` and `statx` tell alike.
pub(crate) struct Seen {
    mode: u32,
    ino: u64,
    size: u64,
    mtime: (i64, u64),
    ctime: (i64, u64),
}

impl From<&Stat> for Seen {
    fn from(stat: &Stat) -> Seen {
        Seen {
            mode: stat.st_mode,
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
        }
    }
}

impl From<&Statx> for Seen {
    fn from(stat: &Statx) -> Seen {
        Seen {
            mode: stat.stx_mode.into(),
            ino: stat.stx_ino,
            size: stat.stx_size,
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec.into()),
            ctime: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec.into()),
        }
    }
}

impl Seen {
    /// How long the file can still be changed under the time it has now.
    pub fn young_for(&self, now: SystemTime) -> Duration {
        let tick = if self.mtime.1 == 0 && self.ctime.1 == 0 { WHOLE_SECONDS_TICK } else { TICK };
        let old_at = time(self.ctime.0, self.ctime.1) + tick;
        // A file server's clock may be a little ahead. A time far in the future has been set by somebody, or is that of
        // a clock that is wrong: waiting for it would help nobody.
        old_at.duration_since(now).ok().filter(|left| *left <= 2 * tick).unwrap_or_default()
    }

    /// The attributes of a file, a directory or a link; `None` for all else.
    pub fn attr(&self) -> Option<Attr> {
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
        Some(Attr {
            kind,
            size: if kind == FileKind::Directory { 0 } else { self.size },
            mtime: time(self.mtime.0, self.mtime.1),
            mode: (self.mode & 0o7777) as u16,
            version: Version::new(&version),
            etag: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_young_for_as_long_as_its_clock_ticks() {
        let at = |nanos| Seen { mode: 0, ino: 1, size: 1, mtime: (1000, nanos), ctime: (1000, nanos) };
        let now = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        let left = |seen: &Seen, millis| seen.young_for(now(millis)).as_millis();
        let fine = at(500_000_000);
        assert_eq!([left(&fine, 1_000_505), left(&fine, 1_000_520), left(&fine, 1_000_495)], [15, 0, 25]);
        let whole = at(0);
        assert_eq!([left(&whole, 1_000_900), left(&whole, 1_001_999), left(&whole, 1_002_020)], [1120, 21, 0]);
        assert_eq!([left(&whole, 999_700), left(&whole, 990_000), left(&fine, 990_000)], [2320, 0, 0]);
        // One time alone that is a whole second is set by hand (touch -d), or is chance.
        assert_eq!(left(&Seen { mtime: (1000, 0), ..at(500_000_000) }, 1_000_600), 0);
    }
}
