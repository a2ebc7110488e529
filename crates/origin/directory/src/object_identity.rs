//! Attributes of the objects of a directory that is changed, read and set, and what makes each the same object on every host: device, inode
//! number and birth. It knows no path and no caller.

use rustix::fd::BorrowedFd;
use rustix::fs::{
    Access, AtFlags, CWD, Gid, Mode, Statx, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, makedev,
};
use rustix::io::Errno;
use spurline_sys::{ProcPath, proc_path};
use spurline_volume::writes::{AttrChange, FileIdentity, FileTime, NewTime, NodeAttr};

const STAT: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// The device of a source's root. Each host numbers its mounts itself: in identities this device is 0, so that an object has
/// the same identity on each host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RootDevice(u64);

impl RootDevice {
    /// The device of an open root.
    pub fn of(root: BorrowedFd<'_>) -> rustix::io::Result<RootDevice> {
        rustix::fs::statx(root, c"", AtFlags::EMPTY_PATH, STAT).map(|stat| RootDevice(device_of(&stat)))
    }

    /// The attributes of an open object.
    pub fn stat_fd(self, fd: BorrowedFd<'_>) -> rustix::io::Result<NodeAttr> {
        rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, STAT).map(|stat| self.attr_of(&stat))
    }

    /// The attributes of a name; a symbolic link is not followed.
    pub fn stat_name(self, dir: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<NodeAttr> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        rustix::fs::statx(dir, name, flags, STAT).map(|stat| self.attr_of(&stat))
    }

    /// Compares an open object with the expected one.
    pub fn verify(self, fd: BorrowedFd<'_>, expected: Option<FileIdentity>) -> rustix::io::Result<()> {
        match expected {
            Some(expected) if self.stat_fd(fd)?.identity != expected => Err(Errno::STALE),
            _ => Ok(()),
        }
    }

    fn attr_of(self, stat: &Statx) -> NodeAttr {
        NodeAttr {
            identity: self.identity_of(stat),
            inode: self.shown_inode(stat),
            mode: stat.stx_mode.into(),
            nlink: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            rdev: makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            blksize: stat.stx_blksize,
            atime: time_of(&stat.stx_atime),
            mtime: time_of(&stat.stx_mtime),
            ctime: time_of(&stat.stx_ctime),
        }
    }

    /// Without a time of birth, the number of a removed inode and so its identity can belong to a later object.
    fn identity_of(self, stat: &Statx) -> FileIdentity {
        let has_birth = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
        let mut born: i128 = 0;
        if has_birth {
            born = i128::from(stat.stx_btime.tv_sec) * 1_000_000_000 + i128::from(stat.stx_btime.tv_nsec);
        }
        let device = if self.is_device_of(stat) { 0 } else { device_of(stat) };
        let mut bytes = [0; FileIdentity::LEN];
        bytes[..8].copy_from_slice(&device.to_le_bytes());
        bytes[8..16].copy_from_slice(&stat.stx_ino.to_le_bytes());
        bytes[16..].copy_from_slice(&born.to_le_bytes());
        FileIdentity::new(bytes, born != 0)
    }

    /// The source's own number, mixed with the device below other mounts in the source.
    fn shown_inode(self, stat: &Statx) -> u64 {
        if self.is_device_of(stat) {
            return stat.stx_ino;
        }
        stat.stx_ino ^ device_of(stat).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn is_device_of(self, stat: &Statx) -> bool {
        device_of(stat) == self.0
    }
}

fn device_of(stat: &Statx) -> u64 {
    makedev(stat.stx_dev_major, stat.stx_dev_minor)
}

fn time_of(time: &rustix::fs::StatxTimestamp) -> FileTime {
    FileTime { seconds: time.tv_sec, nanos: time.tv_nsec }
}

/// Sets attributes of an object that may be open without access to its bytes.
pub(crate) fn change_attr(
    fd: BorrowedFd<'_>,
    set: &AttrChange,
    truncate: impl FnOnce(u64) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    // The owner first: it clears set-user-ID bits, which the mode may set again.
    if set.uid.is_some() || set.gid.is_some() {
        let uid = set.uid.map(Uid::from_raw);
        let gid = set.gid.map(Gid::from_raw);
        rustix::fs::chownat(fd, c"", uid, gid, AtFlags::EMPTY_PATH)?;
    }
    if let Some(mode) = set.mode {
        rustix::fs::chmodat(CWD, &*proc_path(fd), Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())?;
    }
    if let Some(len) = set.size {
        truncate(len)?;
    }
    if set.atime.is_some() || set.mtime.is_some() {
        let times = Timestamps { last_access: timespec(set.atime), last_modification: timespec(set.mtime) };
        match rustix::fs::utimensat(fd, c"", &times, AtFlags::EMPTY_PATH) {
            // Before Linux 5.8.
            Err(Errno::INVAL) => rustix::fs::utimensat(CWD, &*proc_path(fd), &times, AtFlags::empty())?,
            answer => answer?,
        }
    }
    Ok(())
}

fn timespec(time: Option<NewTime>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(NewTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(NewTime::At(time)) => Timespec { tv_sec: time.seconds, tv_nsec: time.nanos.into() },
    }
}

/// `access(2)` of an open descriptor.
pub(crate) fn check_access(path: &ProcPath, mask: u32) -> rustix::io::Result<()> {
    rustix::fs::accessat(CWD, &**path, Access::from_bits_truncate(mask), AtFlags::EACCESS)
}
