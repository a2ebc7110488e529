//! The life of mounts: refusals, unmounting under load, dead mounts, blocked handlers, passthrough, users.

use crate::common;
use common::*;
use spurline_fuse::*;
use spurline_sys::mounted_at;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

fn refused(path: &std::path::Path, config: SessionConfig) -> MountError {
    match FuseSession::mount(Arc::new(TestFs::default()), path, config) {
        Ok(_) => panic!("{} was mounted", path.display()),
        Err(e) => e,
    }
}

#[test]
fn mountpoints_that_can_not_be() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let try_on = |name: &str| refused(&dir.path().join(name), SessionConfig::default());
    let missing = try_on("none");
    assert!(matches!(missing, MountError::Missing { .. }) && missing.exit_code() == 3, "{missing}");
    assert!(missing.to_string().contains("mkdir"), "{missing}");
    assert!(matches!(try_on("none/none"), MountError::Missing { .. }));
    fs::write(dir.path().join("file"), "x").unwrap();
    assert!(matches!(try_on("file"), MountError::NotADirectory { .. }));
    assert!(matches!(try_on("file/below"), MountError::NotADirectory { .. }));
    let full = try_on("");
    assert!(matches!(full, MountError::NotEmpty { .. }) && full.exit_code() == 1, "{full}");
    assert!(full.to_string().contains("'file'") && full.to_string().contains("nonempty"), "{full}");
    assert!(matches!(unmount_path(dir.path(), false), Err(MountError::NotMounted { .. })));

    let mount = Mount::new(FuseIo::Dev);
    let busy = refused(mount.dir.path(), SessionConfig::default());
    assert!(busy.to_string().contains("fuse.spurline") && busy.exit_code() == 1, "{busy}");

    let mut over = SessionConfig::default();
    over.options.apply_list("nonempty").unwrap();
    let session = FuseSession::mount(Arc::new(TestFs::default()), dir.path(), over).unwrap();
    session.wait_ready(Duration::from_secs(10)).unwrap();
    assert!(dir.path().join("data").exists() && !dir.path().join("file").exists());
    assert!(session.shutdown(Duration::from_secs(5)).unwrap());
    assert!(dir.path().join("file").exists());
}

#[test]
fn requests_of_every_size_that_can_be_work() {
    if !can_mount() {
        return;
    }
    for max_write in [4096, 8192, 12 << 10, 64 << 10, 1 << 20] {
        let config = SessionConfig { max_write, io: FuseIo::Dev, ..Default::default() };
        if max_write < 8192 {
            // The kernel would hand out not one request.
            let dir = tempfile::tempdir().unwrap();
            let said = refused(dir.path(), config).to_string();
            assert!(said.contains("8K"), "{said}");
            continue;
        }
        let mount = Mount::with(FuseIo::Dev, |c| c.max_write = max_write);
        let table = fs::read_to_string("/proc/self/mounts").unwrap();
        let at = fs::canonicalize(mount.dir.path()).unwrap().display().to_string();
        let line = table.lines().find(|line| line.contains(&at)).unwrap();
        assert!(line.contains(&format!("max_read={max_write}")), "{line}");
        assert!(fs::read(mount.path("filled")).unwrap() == pattern(0, DATA_LEN as usize));
        assert!(mount.fs.max_read_seen.load(Ordering::SeqCst) <= u64::from(max_write));
    }
}

#[test]
fn clean_unmount_ends_the_session() {
    if !can_mount() {
        return;
    }
    let mut mount = Mount::new(FuseIo::Dev);
    assert!(fs::metadata(mount.path("data")).is_ok());
    let seen = mounted_at(mount.session().mountpoint()).unwrap().unwrap();
    assert_eq!((seen.fstype.as_str(), seen.source.as_str()), ("fuse.spurline", "spurline"));
    assert_eq!(mount.session().unmounter().unmount(Duration::from_secs(5)).unwrap(), UnmountOutcome::Clean);
    mount.session.take().unwrap().join().unwrap();
    assert!(mount.fs.destroyed.load(Ordering::SeqCst));
    assert!(!mount.path("data").exists());
}

/// Unmounts by `how` while four threads read; answers when all have ended.
fn under_load(io: FuseIo, how: impl FnOnce(&Mount)) {
    let mut mount = Mount::new(io);
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..4)
        .map(|i| {
            let (path, stop) = (mount.path(["data", "filled"][i % 2]), stop.clone());
            thread::spawn(move || {
                let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
                let mut memory = vec![0u8; (1 << 20) + 4096];
                let start = memory.as_ptr().align_offset(4096);
                let mut reads = 0u64;
                while !stop.load(Ordering::SeqCst) {
                    if file.read_at(&mut memory[start..start + (1 << 20)], (reads % 3) << 20).is_err() {
                        break;
                    }
                    reads += 1;
                }
                reads
            })
        })
        .collect();
    eventually("reads", || mount.stats.fuse.read_ops.get() > 20);
    let unmounter = mount.session().unmounter();
    assert_eq!(unmounter.check_serving(), Ok(()));
    how(&mount);
    stop.store(true, Ordering::SeqCst);
    for reader in readers {
        assert!(reader.join().unwrap() > 0);
    }
    let session = mount.session.take().unwrap();
    assert!(session.wait_ended(Duration::from_secs(10)));
    assert!(mount.fs.destroyed.load(Ordering::SeqCst));
    assert!(unmounter.check_serving().is_err());
}

fn detach_under_load(io: FuseIo) {
    under_load(io, |mount| {
        let done = mount.session().unmounter().unmount(Duration::from_millis(200)).unwrap();
        assert_eq!(done, UnmountOutcome::Detached);
        assert!(!mount.path("data").exists());
    });
}

fn abort_under_load(io: FuseIo) {
    under_load(io, |mount| {
        mount.session().unmounter().abort().unwrap();
        let _ = unmount_path(mount.dir.path(), true);
    });
}

#[test]
fn unmount_under_load() {
    if can_mount() {
        detach_under_load(FuseIo::Dev);
        abort_under_load(FuseIo::Dev);
    }
}

#[test]
fn unmount_under_load_over_io_uring() {
    if !can_mount() {
        return;
    }
    let Some(_parameter) = UringParameter::enable() else { return };
    detach_under_load(FuseIo::Uring);
    abort_under_load(FuseIo::Uring);
}

#[test]
fn umount_by_the_system_ends_the_session_too() {
    if !can_mount() {
        return;
    }
    let mut mount = Mount::new(FuseIo::Dev);
    let open = File::open(mount.path("data")).unwrap();
    let in_use = unmount_path(mount.dir.path(), false).unwrap_err();
    assert!(matches!(in_use, MountError::InUse { .. }) && in_use.to_string().contains("--lazy"), "{in_use}");
    drop(open);
    eventually("umount", || unmount_path(mount.dir.path(), false).is_ok());
    mount.session.take().unwrap().join().unwrap();
}

#[test]
fn a_connection_broken_off_from_outside_is_a_failure_and_leaves_no_dead_mount() {
    if !can_mount() {
        return;
    }
    let mut mount = Mount::new(FuseIo::Dev);
    let session = mount.session.take().unwrap();
    // The kernel holds its attributes for longer than is waited for the unmount.
    for _ in 0..2 {
        fs::metadata(mount.dir.path()).unwrap();
    }
    session.unmounter().abort().unwrap();
    let error = session.join().unwrap_err().to_string();
    assert!(error.contains("aborted"), "{error}");
    let gone = unmount_path(mount.dir.path(), false).unwrap_err();
    assert!(matches!(gone, MountError::NotMounted { .. }), "{gone}");
}

/// Something over a mount of a test, taken away when dropped.
struct Over(std::path::PathBuf);

impl Over {
    fn tmpfs(at: &std::path::Path) -> Over {
        system("mount", &["-t", "tmpfs", "cover", at.to_str().unwrap()]);
        Over(at.to_owned())
    }
}

impl Drop for Over {
    fn drop(&mut self) {
        system("umount", &["-l", self.0.to_str().unwrap()]);
    }
}

fn system(program: &str, args: &[&str]) {
    let out = Command::new(program).args(args).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn a_mount_is_unmounted_wherever_it_was_moved_to() {
    if !can_mount() {
        return;
    }
    let mut mount = Mount::below("m");
    let moved = mount.dir.path().join("moved");
    fs::rename(mount.dir.path().join("place"), &moved).unwrap();
    assert!(moved.join("m/data").exists());
    assert_eq!(mount.session().unmounter().unmount(Duration::from_secs(5)).unwrap(), UnmountOutcome::Clean);
    mount.session.take().unwrap().join().unwrap();
    assert_eq!(fs::read_dir(moved.join("m")).unwrap().count(), 0);
}

#[test]
fn a_mount_that_something_lies_over_says_so_and_stays() {
    if !can_mount() {
        return;
    }
    for over in ["place/m", "place"] {
        let mut mount = Mount::below("m");
        let at = fs::canonicalize(mount.dir.path()).unwrap().join(over);
        let cover = Over::tmpfs(&at);
        let unmounter = mount.session().unmounter();
        let covered = unmounter.unmount(Duration::from_millis(200)).unwrap_err();
        assert!(matches!(covered, MountError::Covered { .. }), "{covered}");
        let said = covered.to_string();
        assert!(said.contains("tmpfs from 'cover'") && said.contains(&format!("umount {}", at.display())), "{said}");
        assert_eq!(mounted_at(&at).unwrap().unwrap().fstype, "tmpfs");
        drop(cover);
        assert!(mount.dir.path().join("place/m/data").exists());
        assert_eq!(unmounter.unmount(Duration::from_secs(5)).unwrap(), UnmountOutcome::Clean);
        mount.session.take().unwrap().join().unwrap();
    }
}

#[test]
fn a_dead_mount_that_something_lies_over_is_told_of() {
    if !can_mount() {
        return;
    }
    let mut mount = Mount::below("m");
    let at = fs::canonicalize(mount.dir.path()).unwrap().join("place/m");
    let cover = Over::tmpfs(&at);
    let session = mount.session.take().unwrap();
    session.unmounter().abort().unwrap();
    let error = session.join().unwrap_err().to_string();
    assert!(error.contains("tmpfs from 'cover' lies over it"), "{error}");
    drop(cover);
    unmount_path(&at, false).unwrap();
}

#[test]
fn a_bind_mount_keeps_the_session() {
    if !can_mount() {
        return;
    }
    let mut mount = Mount::below("m");
    let (at, other) = (mount.dir.path().join("place/m"), mount.dir.path().join("other"));
    fs::create_dir(&other).unwrap();
    system("mount", &["--bind", at.to_str().unwrap(), other.to_str().unwrap()]);
    assert_eq!(mount.session().unmounter().unmount(Duration::from_secs(5)).unwrap(), UnmountOutcome::Detached);
    assert!(!at.join("data").exists() && other.join("data").exists());
    system("umount", &[other.to_str().unwrap()]);
    mount.session.take().unwrap().join().unwrap();
}

#[test]
fn blocked_handlers_do_not_stop_others() {
    if !can_mount() {
        return;
    }
    let mount = Mount::with(FuseIo::Dev, |c| c.max_threads = Some(80));
    let slow: Vec<_> = (0..64)
        .map(|i| {
            let path = mount.path("slow");
            thread::spawn(move || {
                let mut buf = [0u8; 64];
                let n = File::open(path).unwrap().read_at(&mut buf, i * 4096).unwrap();
                (i, buf[..n].to_vec())
            })
        })
        .collect();
    eventually("64 blocked handlers", || mount.fs.blocked_now() >= 64);
    assert!(fs::read(mount.path("data")).unwrap() == pattern(0, DATA_LEN as usize));
    assert_eq!(fs::read_dir(mount.path("many")).unwrap().count() as u64, MANY);
    let most = session_threads();
    assert!(most >= 64);
    mount.fs.unblock();
    for reader in slow {
        let (i, bytes) = reader.join().unwrap();
        assert_eq!(bytes, pattern(i * 4096, 64));
    }
    // The threads that are no longer needed go away.
    eventually("fewer threads", || session_threads() < most - 40);
}

/// Threads of sessions on /dev/fuse in this process, those of other tests included.
fn session_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter(|t| fs::read_to_string(t.path().join("comm")).is_ok_and(|name| name.starts_with("fuse-dev"))).count()
}

#[test]
fn blocked_handlers_over_io_uring_hold_up_only_their_entries() {
    if !can_mount() {
        return;
    }
    let Some(_parameter) = UringParameter::enable() else { return };
    let mount = Mount::with(FuseIo::Uring, |c| c.depth = Some(16));
    assert_eq!(mount.session().transport().unwrap().io, FuseIo::Uring);
    let slow: Vec<_> = (0..8)
        .map(|i| {
            let path = mount.path("slow");
            thread::spawn(move || File::open(path).unwrap().read_at(&mut [0u8; 64], i * 4096).unwrap())
        })
        .collect();
    eventually("8 blocked handlers", || mount.fs.blocked_now() >= 8);
    assert!(fs::read(mount.path("data")).unwrap() == pattern(0, DATA_LEN as usize));
    mount.fs.unblock();
    assert!(slow.into_iter().all(|t| t.join().unwrap() == 64));
}

#[test]
fn a_hung_handler_does_not_stop_the_shutdown() {
    if !can_mount() {
        return;
    }
    let mount = Mount::new(FuseIo::Dev);
    let path = mount.path("slow");
    let reader = thread::spawn(move || File::open(path).unwrap().read_at(&mut [0u8; 64], 0));
    eventually("a blocked handler", || mount.fs.blocked_now() == 1);
    // The handler never answers: the connection is broken, and its caller gets an error. One thread is left.
    assert!(!mount.session().shutdown(Duration::from_millis(500)).unwrap());
    assert!(reader.join().unwrap().is_err());
    mount.fs.unblock();
    assert!(mount.session().wait_ended(Duration::from_secs(10)));
}

#[test]
fn passthrough_reads_the_backing_file() {
    if !can_mount() {
        return;
    }
    for io in [FuseIo::Dev, FuseIo::Uring] {
        let _parameter = match io {
            FuseIo::Uring => match UringParameter::enable() {
                None => continue,
                some => some,
            },
            _ => None,
        };
        let mount = Mount::with(io, |c| c.passthrough = true);
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.write_all(&pattern(7, 1 << 20)).unwrap();
        *mount.fs.backing_file.lock().unwrap() = Some(file);
        // The handler answers reads of this file with EIO, so what is read came from the backing file.
        let opened = File::open(mount.path("pass"));
        if opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP)) {
            return skip("fuse-passthrough", "this kernel has no FUSE passthrough");
        }
        let mut one = opened.unwrap();
        let mut bytes = Vec::new();
        one.read_to_end(&mut bytes).unwrap();
        assert!(bytes == pattern(7, 1 << 20));
        assert_eq!(mount.stats.fuse.read_ops.get(), 0);
        // What the kernel forbids: another backing registration of a different file, and cached mode beside it.
        let mut other = tempfile::tempfile_in("/dev/shm").unwrap();
        other.write_all(b"other").unwrap();
        let first = mount.fs.backing_file.lock().unwrap().replace(other);
        let second = File::open(mount.path("pass")).map(drop).map_err(|e| e.raw_os_error());
        assert_eq!(second, Err(Some(libc::EIO)));
        *mount.fs.backing_file.lock().unwrap() = first;
        mount.fs.cached_too.store(true, Ordering::SeqCst);
        let cached = File::open(mount.path("pass")).map(drop).map_err(|e| e.raw_os_error());
        assert_eq!(cached, Err(Some(libc::EIO)));
        drop(one);
        eventually("the registration's end", || mount.fs.registered.lock().unwrap().is_empty());
        // With no passthrough handle left, cached mode is allowed again.
        assert!(File::open(mount.path("pass")).is_ok());
    }
}

/// Lets users open /dev/fuse, as hosts with udev do, and puts its mode back when dropped.
struct OpenToUsers(fs::Permissions);

impl OpenToUsers {
    const DEVICE: &str = "/dev/fuse";
    fn device() -> OpenToUsers {
        let before = fs::metadata(Self::DEVICE).unwrap().permissions();
        let _ = fs::set_permissions(Self::DEVICE, fs::Permissions::from_mode(0o666));
        OpenToUsers(before)
    }
}

impl Drop for OpenToUsers {
    fn drop(&mut self) {
        let _ = fs::set_permissions(Self::DEVICE, self.0.clone());
    }
}

struct Nullfs {
    child: Child,
    said: String,
}

impl Nullfs {
    /// Starts the example and waits for its first line: what it serves, or `None` when it ended instead.
    fn start(mut command: Command) -> (Option<Nullfs>, String) {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        if said.is_empty() {
            let out = child.wait_with_output().unwrap();
            return (None, String::from_utf8_lossy(&out.stderr).into_owned());
        }
        (Some(Nullfs { child, said }), String::new())
    }
}

impl Drop for Nullfs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_killed_process_leaves_a_mount_that_can_be_removed() {
    if !can_mount() {
        return;
    }
    killed("dev");
    if let Some(_parameter) = UringParameter::enable() {
        killed("uring");
    }
}

fn killed(io: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(nullfs_binary());
    command.arg(dir.path()).args(["--io", io]);
    let (nullfs, why) = Nullfs::start(command);
    let nullfs = nullfs.expect(&why);
    assert!(dir.path().join("data").exists(), "{}", nullfs.said);
    drop(nullfs);
    // io_uring is taken down a moment after its process: requests are aborted until then.
    let errno = || fs::metadata(dir.path()).err().and_then(|e| e.raw_os_error());
    eventually("the connection's end", || errno() == Some(libc::ENOTCONN));
    let stale = refused(dir.path(), SessionConfig::default());
    assert!(matches!(stale, MountError::Stale { .. }) && stale.to_string().contains("spurline umount"), "{stale}");
    unmount_path(dir.path(), false).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn sigterm_unmounts() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(nullfs_binary());
    command.arg(dir.path());
    let (nullfs, why) = Nullfs::start(command);
    let mut nullfs = nullfs.expect(&why);
    // SAFETY: the process is our child and not waited for yet.
    unsafe { libc::kill(nullfs.child.id() as i32, libc::SIGTERM) };
    assert!(nullfs.child.wait().unwrap().success());
    assert!(mounted_at(&fs::canonicalize(dir.path()).unwrap()).unwrap().is_none());
}

#[test]
fn users_mount_through_fusermount() {
    if !can_mount() {
        return;
    }
    let works = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !works("fusermount3") || !works("setpriv") {
        return skip("fusermount3", "fusermount3 or setpriv is not installed");
    }
    let _device = OpenToUsers::device();
    // Somewhere another user can reach, whatever the umask and the build directory.
    let dir = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o755)).tempdir_in("/tmp").unwrap();
    let (binary, mountpoint) = (dir.path().join("nullfs"), dir.path().join("m"));
    fs::copy(nullfs_binary(), &binary).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    std::os::unix::fs::chown(&mountpoint, Some(65534), Some(65534)).unwrap();
    let as_user = |program: &std::path::Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(program).current_dir("/");
        command
    };
    let mut command = as_user(&binary);
    command.arg(&mountpoint).args(["--size", "1M", "-o", "fsname=a\\,b c"]);
    let (nullfs, why) = Nullfs::start(command);
    let Some(mut nullfs) = nullfs else {
        return skip("fusermount3", &format!("users can't mount here: {}", why.trim()));
    };
    let seen = mounted_at(&fs::canonicalize(&dir).unwrap().join("m")).unwrap().unwrap();
    assert_eq!((seen.fstype.as_str(), seen.source.as_str()), ("fuse.spurline", "a,b c"));
    let read = as_user("sha256sum".as_ref()).arg(mountpoint.join("data")).output().unwrap();
    assert!(read.status.success(), "{read:?}");
    // Another user is kept out without allow_other, root included.
    assert_eq!(fs::metadata(mountpoint.join("data")).unwrap_err().raw_os_error(), Some(libc::EACCES));
    // SAFETY: the process is our child and not waited for yet.
    unsafe { libc::kill(nullfs.child.id() as i32, libc::SIGTERM) };
    assert!(nullfs.child.wait().unwrap().success());
    assert_eq!(fs::read_dir(&mountpoint).unwrap().count(), 0);
    if !fs::read_to_string("/etc/fuse.conf").unwrap_or_default().lines().any(|l| l.trim() == "user_allow_other") {
        let mut command = as_user(&binary);
        command.arg(&mountpoint).args(["-o", "allow_other"]);
        let (none, why) = Nullfs::start(command);
        assert!(none.is_none() && why.contains("user_allow_other"), "{why}");
    }
}
