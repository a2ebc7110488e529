//! Mount and unmount: mount(2) as root, fusermount3 otherwise. Knows nothing of requests.

use crate::options::MountOptions;
use spurline_sys::{MountEntry, mounted_at, resolve_mountpoint};
use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const FUSE_DEVICE: &str = "/dev/fuse";
const FUSERMOUNT_PROGRAM: &str = "fusermount3";
/// File system type of an automount: of systemd (`x-systemd.automount`) or of autofs.
const AUTOMOUNT_FS_TYPE: &str = "autofs";
/// Deadlines of fusermount3, and of a probe of a mount that may hang.
const HELPER_DEADLINE: Duration = Duration::from_secs(20);
const LOOK_DEADLINE: Duration = Duration::from_secs(2);

/// Why a mount could not be made, served or removed: the fault, the evidence, the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The mountpoint, or a directory on the way, does not exist.
    #[error("mountpoint {} does not exist ({source}); create it: mkdir -p {}", path.display(), path.display())]
    Missing {
        /// The mountpoint.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The mountpoint is not a directory.
    #[error("mountpoint {} is not a directory; name an empty directory", path.display())]
    NotADirectory {
        /// The mountpoint.
        path: PathBuf,
    },
    /// The mountpoint has entries that a mount would hide.
    #[error("mountpoint {} is not empty (it holds '{entry}'); name an empty directory, or hide what is there with -o nonempty", path.display())]
    NotEmpty {
        /// The mountpoint.
        path: PathBuf,
        /// An entry there.
        entry: String,
    },
    /// Another mount is there.
    #[error("mountpoint {} is busy: {fstype} from '{mounted}' is mounted there; unmount it (spurline umount for Spurline's mounts, umount for others), or name another directory", path.display())]
    Busy {
        /// The mountpoint.
        path: PathBuf,
        /// File system type of that mount.
        fstype: String,
        /// Source of that mount.
        mounted: String,
    },
    /// The access to an automount failed.
    #[error("mountpoint {} is an automount, and the mount that it starts for this access failed ({source}); look at that mount (systemctl status, journalctl), or stop the automount first", path.display())]
    Automount {
        /// The mountpoint.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A dead mount is there: the process ended.
    #[error("mountpoint {} holds a dead {fstype} mount of '{mounted}' whose process is gone (Transport endpoint is not connected); remove it: spurline umount {} (or fusermount3 -u, or umount -l)", path.display(), path.display())]
    Stale {
        /// The mountpoint.
        path: PathBuf,
        /// File system type of that mount.
        fstype: String,
        /// Source of that mount.
        mounted: String,
    },
    /// The kernel has no FUSE, or the container lacks the device.
    #[error(
        "/dev/fuse can't be opened: {source}; load the module (modprobe fuse), in a container pass the device (--device /dev/fuse --cap-add SYS_ADMIN)"
    )]
    NoDevice {
        /// The system's error.
        source: io::Error,
    },
    /// The device is there, and this process may not open the device.
    #[error(
        "/dev/fuse can't be opened: {source}; its mode has to admit this user (chmod 666 /dev/fuse), and a container has to be given the device (--device /dev/fuse --cap-add SYS_ADMIN)"
    )]
    DeviceDenied {
        /// The system's error.
        source: io::Error,
    },
    /// Not root, and no fusermount3.
    #[error(
        "mounting as user {uid} needs fusermount3, and it was not found ({source}); install the package fuse3, or mount as root"
    )]
    NoFusermount {
        /// The user.
        uid: u32,
        /// The system's error.
        source: io::Error,
    },
    /// Only root may grant access to others, unless /etc/fuse.conf permits that.
    #[error(
        "-o allow_other is refused to user {uid}: /etc/fuse.conf has no line 'user_allow_other'; add it as root, or mount without allow_other"
    )]
    AllowOther {
        /// The user.
        uid: u32,
    },
    /// The system refused the mount.
    #[error("mounting on {} was refused: {detail}; mounting needs root with CAP_SYS_ADMIN (in a container --cap-add SYS_ADMIN and an AppArmor profile that allows mount), or fusermount3 and a mountpoint the user owns", path.display())]
    Denied {
        /// The mountpoint.
        path: PathBuf,
        /// The system's error.
        detail: String,
    },
    /// SELinux labels, on a host without SELinux.
    #[error("mounting on {} was refused: this kernel takes no {labels}, as SELinux is not enabled; leave the labels out", path.display())]
    NoLabels {
        /// The mountpoint.
        path: PathBuf,
        /// The options.
        labels: String,
    },
    /// SELinux labels that SELinux refuses.
    #[error("mounting on {} was refused: {detail}; check the labels {labels} against this host's policy (dmesg and ausearch -m avc name the reason)", path.display())]
    Labels {
        /// The mountpoint.
        path: PathBuf,
        /// The options.
        labels: String,
        /// The system's error.
        detail: String,
    },
    /// SELinux labels of a mount by a user.
    #[error("mounting on {} was refused: only root can give SELinux labels ({labels}), as fusermount3 takes none; mount as root, or leave them out", path.display())]
    LabelsOfUser {
        /// The mountpoint.
        path: PathBuf,
        /// The options.
        labels: String,
    },
    /// No FUSE mount is there.
    #[error("{} is not a FUSE mount{found}; see /proc/self/mounts for what is mounted", path.display())]
    NotMounted {
        /// The path.
        path: PathBuf,
        /// The file system found instead.
        found: String,
    },
    /// Files are open there.
    #[error("{} is in use ({detail}); close what is open below it (fuser -vm {}), or detach it at once with umount --lazy", path.display(), path.display())]
    InUse {
        /// The mountpoint.
        path: PathBuf,
        /// The system's error.
        detail: String,
    },
    /// Another mount covers the path, and the system unmounts only the topmost mount of a path.
    #[error("{} can't be unmounted: {over} lies over it; unmount that one first (umount {}), then this one (spurline umount {})", path.display(), at.display(), path.display())]
    Covered {
        /// The mountpoint.
        path: PathBuf,
        /// Type and source of the covering mount.
        over: String,
        /// Mountpoint of the covering mount.
        at: PathBuf,
    },
    /// The session could not start, or failed.
    #[error("the FUSE session on {} failed: {detail}", path.display())]
    Session {
        /// The mountpoint.
        path: PathBuf,
        /// The failure.
        detail: String,
    },
    /// Any other system error.
    #[error("{what} {} failed: {source}", path.display())]
    System {
        /// The failed operation.
        what: &'static str,
        /// The mountpoint.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl MountError {
    /// The command line's exit code: 3 for a missing prerequisite or permission, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            MountError::Missing { .. }
            | MountError::NoDevice { .. }
            | MountError::DeviceDenied { .. }
            | MountError::NoFusermount { .. }
            | MountError::AllowOther { .. }
            | MountError::NoLabels { .. }
            | MountError::LabelsOfUser { .. }
            | MountError::Denied { .. } => 3,
            _ => 1,
        }
    }
}

/// A mount that was made: device descriptor and path.
#[derive(Debug)]
pub(crate) struct MountedDevice {
    pub(crate) device: OwnedFd,
    pub(crate) path: PathBuf,
}

fn effective_uid() -> u32 {
    // SAFETY: geteuid has no conditions.
    unsafe { libc::geteuid() }
}

/// Makes the mount, with reads of at most `max_read` bytes. The kernel's first request is then waiting on the
/// descriptor.
///
/// # Errors
/// See [`MountError`].
pub(crate) fn mount_device(
    mountpoint: &Path,
    options: &MountOptions,
    max_read: u32,
) -> Result<MountedDevice, MountError> {
    let path = check_mountpoint(mountpoint, options)?;
    let device = match effective_uid() {
        0 => mount_as_root(&path, options, max_read)?,
        _ => mount_by_helper(&path, options, max_read)?,
    };
    Ok(MountedDevice { device, path })
}

/// Checks a mountpoint before a session starts. An automount there gives way to this process where that is in the process group
/// of the mount helper; any other access starts the mount of the automount.
///
/// # Errors
/// See [`MountError`].
pub fn check_mountpoint(mountpoint: &Path, options: &MountOptions) -> Result<PathBuf, MountError> {
    let path = resolve_mountpoint(mountpoint).map_err(|e| look_error(mountpoint.to_path_buf(), e))?;
    let automount = check_mounted(&path, options)?;
    let metadata = fs::metadata(&path).map_err(|source| match automount {
        Some(_) => MountError::Automount { path: path.clone(), source },
        None => look_error(path.clone(), source),
    })?;
    if automount.is_some() {
        // The mount that the access has started.
        check_mounted(&path, options)?;
    }
    if !metadata.is_dir() {
        return Err(MountError::NotADirectory { path });
    }
    if !options.nonempty
        && let Some(Ok(entry)) = fs::read_dir(&path).map_err(|e| look_error(path.clone(), e))?.next()
    {
        return Err(MountError::NotEmpty { path, entry: entry.file_name().to_string_lossy().into_owned() });
    }
    Ok(path)
}

/// Checks the mount at a path; an automount is no obstacle, and is returned.
fn check_mounted(path: &Path, options: &MountOptions) -> Result<Option<MountEntry>, MountError> {
    let mounted = mounted_at(path).map_err(|source| MountError::System {
        what: "reading the mount table for",
        path: path.to_owned(),
        source,
    })?;
    let Some(there) = mounted else { return Ok(None) };
    if there.fstype == AUTOMOUNT_FS_TYPE {
        return Ok(Some(there));
    }
    let seen = there.is_fuse().then(|| probe_mount(path));
    let MountEntry { fstype, source: mounted, .. } = there;
    let path = path.to_owned();
    match seen {
        Some(MountHealth::Dead) => Err(MountError::Stale { path, fstype, mounted }),
        _ if !options.nonempty => Err(MountError::Busy { path, fstype, mounted }),
        Some(MountHealth::Silent) => {
            let why = format!("the mount that is there ({mounted}) does not respond");
            let source = io::Error::new(io::ErrorKind::TimedOut, why);
            Err(MountError::System { what: "checking mountpoint", path, source })
        }
        Some(MountHealth::Alive) | None => Ok(None),
    }
}

fn look_error(path: PathBuf, source: io::Error) -> MountError {
    match source.kind() {
        io::ErrorKind::NotFound => MountError::Missing { path, source },
        io::ErrorKind::NotADirectory => MountError::NotADirectory { path },
        io::ErrorKind::PermissionDenied => MountError::Denied { path, detail: source.to_string() },
        _ => MountError::System { what: "checking mountpoint", path, source },
    }
}

/// The state of a FUSE mount.
pub(crate) enum MountHealth {
    Alive,
    /// The process ended, or the connection was aborted.
    Dead,
    /// No reply within [`LOOK_DEADLINE`].
    Silent,
}

/// Probes a FUSE mount in a separate thread, which may hang for ever.
pub(crate) fn probe_mount(path: &Path) -> MountHealth {
    let (sender, receiver) = mpsc::channel();
    let path = path.to_path_buf();
    let started = std::thread::Builder::new().name("fuse-look".into()).spawn(move || {
        // ECONNABORTED: the connection was aborted during this request.
        let gone = [Some(libc::ENOTCONN), Some(libc::ECONNABORTED)];
        // Not stat, which the kernel may serve from a cache: this request always reaches the process.
        let dead = fs_answers(&path).is_err_and(|e| gone.contains(&e.raw_os_error()));
        let _ = sender.send(dead);
    });
    match started.map(|_| receiver.recv_timeout(LOOK_DEADLINE)) {
        Ok(Ok(true)) => MountHealth::Dead,
        Ok(Ok(false)) | Err(_) => MountHealth::Alive,
        Ok(Err(_)) => MountHealth::Silent,
    }
}

/// Queries the size of the file system at `path`.
fn fs_answers(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path ends with a zero, and the answer has room for the written bytes.
    match unsafe { libc::statvfs(path.as_ptr(), answer.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn c_string(bytes: &[u8], path: &Path) -> Result<CString, MountError> {
    CString::new(bytes).map_err(|e| MountError::System { what: "mounting on", path: path.into(), source: e.into() })
}

fn device_error(source: io::Error) -> MountError {
    match source.kind() {
        io::ErrorKind::PermissionDenied => MountError::DeviceDenied { source },
        _ => MountError::NoDevice { source },
    }
}

/// The same from the words of fusermount3, which are not translated.
fn helper_device_error(said: String) -> MountError {
    let denied = said.contains("Permission denied") || said.contains("not permitted");
    let source = io::Error::other(said);
    if denied { MountError::DeviceDenied { source } } else { MountError::NoDevice { source } }
}

fn mount_as_root(path: &Path, options: &MountOptions, max_read: u32) -> Result<OwnedFd, MountError> {
    let device: OwnedFd = OpenOptions::new().read(true).write(true).open(FUSE_DEVICE).map_err(device_error)?.into();
    // SAFETY: getuid and getgid have no conditions.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let words = options.kernel_words(max_read);
    // SELinux takes options for SELinux out of the text before FUSE reads the rest.
    let data = format!("fd={},rootmode=40000,user_id={uid},group_id={gid}{words}", device.as_raw_fd());
    let data = c_string(data.as_bytes(), path)?;
    let source = c_string(options.fsname.as_bytes(), path)?;
    let fstype = c_string(format!("fuse.{}", options.subtype).as_bytes(), path)?;
    let target = c_string(path.as_os_str().as_bytes(), path)?;
    // SAFETY: all five strings live through the call, and the descriptor named in `data` is open.
    let answer = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), fstype.as_ptr(), options.mount_flags(), data.as_ptr().cast())
    };
    if answer == 0 {
        return Ok(device);
    }
    let error = io::Error::last_os_error();
    Err(match error.raw_os_error() {
        Some(libc::EINVAL) if !options.labels.is_empty() && !has_selinux() => {
            MountError::NoLabels { path: path.into(), labels: options.labels.join(", ") }
        }
        Some(libc::EINVAL | libc::EACCES) if !options.labels.is_empty() => {
            MountError::Labels { path: path.into(), labels: options.labels.join(", "), detail: error.to_string() }
        }
        Some(libc::EPERM | libc::EACCES) => MountError::Denied { path: path.into(), detail: error.to_string() },
        Some(libc::ENODEV) => MountError::NoDevice { source: error },
        _ => MountError::System { what: "mounting on", path: path.into(), source: error },
    })
}

/// Whether this kernel runs SELinux; the file system of SELinux shows that also without a mount.
fn has_selinux() -> bool {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    known.lines().any(|line| line.split_whitespace().next_back() == Some("selinuxfs"))
}

fn mount_by_helper(path: &Path, options: &MountOptions, max_read: u32) -> Result<OwnedFd, MountError> {
    let uid = effective_uid();
    if !options.labels.is_empty() {
        return Err(MountError::LabelsOfUser { path: path.into(), labels: options.labels.join(", ") });
    }
    if options.allow_other && !user_allow_other() {
        return Err(MountError::AllowOther { uid });
    }
    if !Path::new(FUSE_DEVICE).exists() {
        return Err(MountError::NoDevice { source: io::Error::from_raw_os_error(libc::ENOENT) });
    }
    let system = |what, source| MountError::System { what, path: path.into(), source };
    let (own_socket, helper_socket) = socket_pair().map_err(|e| system("making a socket to mount on", e))?;
    let mut command = Command::new(FUSERMOUNT_PROGRAM);
    command.arg("-o").arg(options.fusermount_list(max_read)).arg("--").arg(path);
    // The helper's socket end is the standard input. No code runs in the child before exec, so this process is not forked while
    // NICs may write the memory.
    command.env("_FUSE_COMMFD", "0");
    command.stdin(Stdio::from(helper_socket)).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|source| MountError::NoFusermount { uid, source })?;
    // With our copy closed, the helper's exit ends the wait for the descriptor.
    drop(command);
    let device = receive_fd(&own_socket);
    let mut said = String::new();
    if device.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
        // The helper hangs. No mount was made, so a kill is safe.
        let _ = child.kill();
    } else if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut said);
    }
    let _ = child.wait();
    let said = said.trim().to_string();
    match device {
        Ok(Some(device)) => Ok(device),
        Ok(None) if said.contains("open /dev/fuse") => Err(helper_device_error(said)),
        Ok(None) if said.contains("user_allow_other") => Err(MountError::AllowOther { uid }),
        Ok(None) => Err(MountError::Denied {
            path: path.into(),
            detail: if said.is_empty() { "fusermount3 gave no reason".into() } else { said },
        }),
        Err(e) => Err(system("waiting for fusermount3 on", e)),
    }
}

/// Whether the host allows users to mount for others.
fn user_allow_other() -> bool {
    let conf = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    conf.lines().any(|line| line.trim() == "user_allow_other")
}

fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds: [RawFd; 2] = [0; 2];
    // SAFETY: the kernel writes two descriptors into an array of two.
    if unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both were just made and belong to no other owner.
    let pair = unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) };
    let limit = libc::timeval { tv_sec: HELPER_DEADLINE.as_secs() as libc::time_t, tv_usec: 0 };
    let len = size_of::<libc::timeval>() as libc::socklen_t;
    // SAFETY: the option's value is a timeval of the length given.
    unsafe {
        libc::setsockopt(fds[0], libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const limit).cast(), len);
    }
    Ok(pair)
}

/// Receives the descriptor from fusermount3; `None` when the helper closes the socket without sending a descriptor.
fn receive_fd(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut byte = 0u8;
    let mut iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // Room for a control message with a descriptor, aligned for the header.
    let mut control = [0u64; 8];
    // SAFETY: msghdr is plain data for which zero is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    let n = loop {
        // SAFETY: the message points to memory that lives through the call.
        let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if n >= 0 {
            break n;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    };
    if n == 0 {
        return Ok(None);
    }
    // SAFETY: the header was filled in by recvmsg; CMSG_FIRSTHDR answers null or a header within `control`, and the length is
    // checked to cover a descriptor before the read.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
            || ((*header).cmsg_len as usize) < libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize
        {
            return Ok(None);
        }
        let fd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
        Ok(Some(OwnedFd::from_raw_fd(fd)))
    }
}

/// Removes a FUSE mount, also a dead one. `lazy`: detach at once, even with open files.
///
/// # Errors
/// [`MountError::NotMounted`], [`MountError::InUse`], or the system's error.
pub fn unmount_path(path: &Path, lazy: bool) -> Result<(), MountError> {
    let path = resolve_mountpoint(path).map_err(|e| look_error(path.to_path_buf(), e))?;
    let there = mounted_at(&path).map_err(|e| look_error(path.clone(), e))?;
    match there {
        Some(there) if there.is_fuse() => {}
        other => {
            let found = other.map_or(String::new(), |m| format!(" but {} from '{}'", m.fstype, m.source));
            return Err(MountError::NotMounted { path, found });
        }
    }
    detach_mount(&path, if lazy { libc::MNT_DETACH } else { 0 })
}

/// umount2(2) with `flags`, or fusermount3 for users.
pub(crate) fn detach_mount(path: &Path, flags: libc::c_int) -> Result<(), MountError> {
    let lazy = flags & libc::MNT_DETACH != 0;
    if effective_uid() != 0 {
        let mut command = Command::new(FUSERMOUNT_PROGRAM);
        command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(path).stdin(Stdio::null());
        let out = command.output().map_err(|source| MountError::NoFusermount { uid: effective_uid(), source })?;
        let said = String::from_utf8_lossy(&out.stderr).trim().to_string();
        return if out.status.success() {
            Ok(())
        } else if said.to_lowercase().contains("busy") {
            Err(MountError::InUse { path: path.into(), detail: said })
        } else {
            Err(MountError::Denied { path: path.into(), detail: said })
        };
    }
    let target = c_string(path.as_os_str().as_bytes(), path)?;
    // SAFETY: the path lives through the call.
    if unsafe { libc::umount2(target.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    let path = path.to_path_buf();
    Err(match error.raw_os_error() {
        Some(libc::EBUSY) => MountError::InUse { path, detail: error.to_string() },
        Some(libc::EINVAL) => MountError::NotMounted { path, found: String::new() },
        Some(libc::EPERM | libc::EACCES) => MountError::Denied { path, detail: error.to_string() },
        _ => MountError::System { what: "unmounting", path, source: error },
    })
}

/// Aborts connection `minor` through the FUSE control file system. Where the host has no mount of that file system, a private
/// instance without a mountpoint is used.
pub(crate) fn abort_connection(minor: u32) -> io::Result<()> {
    let name = format!("{minor}/abort");
    let in_place = OpenOptions::new().write(true).open(format!("/sys/fs/fuse/connections/{name}"));
    let mut file: File = match in_place {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let control = unseen_mount(c"fusectl")?;
            let name = CString::new(name)?;
            // SAFETY: the directory descriptor is open and the name a C string.
            let fd = unsafe { libc::openat(control.as_raw_fd(), name.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
            owned_fd(i64::from(fd))?.into()
        }
        found => found?,
    };
    file.write_all(b"1")
}

/// Mounts file system type `fstype` without a mountpoint; the mount is gone when the descriptor is closed.
fn unseen_mount(fstype: &CStr) -> io::Result<OwnedFd> {
    const CLONE_CLOEXEC: libc::c_uint = 1;
    const CMD_CREATE: libc::c_uint = 6;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: the system calls of Linux 5.2, whose arguments are a C string, integers, nulls and open descriptors.
    unsafe {
        let context = owned_fd(libc::syscall(libc::SYS_fsopen, fstype.as_ptr(), CLONE_CLOEXEC))?;
        if libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), CMD_CREATE, none, none, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        owned_fd(libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), CLONE_CLOEXEC, 0))
    }
}

/// The descriptor that a system call returned, or the error.
fn owned_fd(fd: i64) -> io::Result<OwnedFd> {
    match RawFd::try_from(fd) {
        // SAFETY: the callers pass the answer of a call that makes a descriptor, which no other code has yet.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_denied_has_another_remedy_than_one_that_is_missing() {
        let of_helper = |why| helper_device_error(format!("fusermount3: failed to open /dev/fuse: {why}"));
        let of_system = |errno| device_error(io::Error::from_raw_os_error(errno));
        for denied in [of_system(libc::EACCES), of_system(libc::EPERM), of_helper("Permission denied")] {
            let said = denied.to_string();
            assert!(said.contains("chmod 666 /dev/fuse") && !said.contains("modprobe"), "{said}");
            assert_eq!(denied.exit_code(), 3);
        }
        for missing in [of_system(libc::ENOENT), of_system(libc::ENODEV), of_helper("No such device")] {
            let said = missing.to_string();
            assert!(said.contains("modprobe fuse") && !said.contains("chmod"), "{said}");
            assert_eq!(missing.exit_code(), 3);
        }
    }
}
