//! A file system of its own for a test: ext4 in an image on a loop device, with quotas, and with a host that loses its
//! power. It knows neither mounts of Spurline nor nodes.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// From `fs/ext4/ext4.h`: `EXT4_IOC_SHUTDOWN`, and the flag to write nothing more, not even the journal.
const SHUTDOWN: libc::Ioctl = 0x8004_587d_u32 as libc::Ioctl;
const NO_LOG_FLUSH: u32 = 2;
/// From `linux/quota.h`: `Q_SETQUOTA` for users.
const SET_QUOTA: libc::c_int = 0x80_0008 << 8;

/// The image, mounted; taken away when dropped.
pub struct DiskImage {
    /// Where it is mounted.
    pub at: PathBuf,
    image: PathBuf,
    options: &'static str,
}

fn run(command: &mut Command) -> Result<Output, String> {
    match command.output() {
        Ok(out) if out.status.success() => Ok(out),
        Ok(out) => Err(String::from_utf8_lossy(&out.stderr).trim().to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl DiskImage {
    /// Makes an image of 64 MiB in the file `image`, with these features, and mounts it on `at`; the reason if this kernel
    /// can't.
    pub fn mount(image: &Path, at: &Path, features: &[&str]) -> Result<DiskImage, String> {
        File::create(image).unwrap().set_len(64 << 20).unwrap();
        run(Command::new("mkfs.ext4").arg("-q").args(features).arg(image))?;
        // Without this option the kernel counts, and limits nothing.
        let options = if features.contains(&"quota") { "loop,usrquota" } else { "loop" };
        let disk = DiskImage { at: at.to_owned(), image: image.to_owned(), options };
        disk.mount_image()?;
        Ok(disk)
    }

    fn mount_image(&self) -> Result<(), String> {
        run(Command::new("mount").args(["-t", "ext4", "-o", self.options]).arg(&self.image).arg(&self.at)).map(drop)
    }

    /// The host loses its power and starts again: what was not durable is gone. No process may have files of it open.
    pub fn lose_power(&self) -> Result<(), String> {
        let root = File::open(&self.at).unwrap();
        // SAFETY: the descriptor is open, and the kernel reads a number of 32 bits.
        let ended = unsafe { libc::ioctl(root.as_raw_fd(), SHUTDOWN, &NO_LOG_FLUSH) };
        if ended != 0 {
            return Err(std::io::Error::last_os_error().to_string());
        }
        drop(root);
        run(Command::new("umount").arg(&self.at))?;
        self.mount_image()
    }

    /// Limits a user to so many KiB; the reason if this kernel has no quotas.
    pub fn limit_user(&self, user: u32, kib: u64) -> Result<(), String> {
        let device = run(Command::new("findmnt").args(["-n", "-o", "SOURCE"]).arg(&self.at))?;
        let device = std::ffi::CString::new(String::from_utf8_lossy(&device.stdout).trim()).unwrap();
        // `struct if_dqblk`: the hard limit of blocks comes first, and the last word says which values count.
        let mut limits = [0u64; 9];
        (limits[0], limits[8]) = (kib, 1);
        // SAFETY: the name ends with a NUL, and the structure is as long as the kernel reads.
        let set =
            unsafe { libc::quotactl(SET_QUOTA, device.as_ptr(), user as libc::c_int, limits.as_mut_ptr().cast()) };
        if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().to_string()) }
    }
}

impl Drop for DiskImage {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}
