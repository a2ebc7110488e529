//! What programs do on a mount beyond reading: follow a log, copy with attributes, seek in a folder, and the calls that
//! the kernel or the mount refuses.

use rustix::fs::{Mode, chmod};
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::{Command, Stdio};

/// Short cache times, for tests that wait for a change.
const FRESH: [&str; 6] = ["--attr-cache", "100ms", "--entry-cache", "100ms", "--dir-entry-cache", "100ms"];

/// `tail` with these words on a log that `append` extends: shows each line once.
fn tail_shows(world: &World, path: &Path, words: &[&str], append: &mut dyn FnMut(&str)) {
    let out = world.log_path("tail");
    let mut command = Command::new("tail");
    command.args(words).args(["-s", "0.05", "-n", "+1"]).arg(path).stdin(Stdio::null());
    append("line 0\n");
    let mut tail = Process::start_telling(&mut command, &out);
    let mut want = "line 0\n".to_owned();
    for n in 1..=13 {
        tail.wait_for(&format!("line {}", n - 1));
        let line = format!("line {n}\n");
        append(&line);
        want.push_str(&line);
    }
    tail.wait_for("line 13");
    assert_eq!(tail.log(), want, "tail {words:?}");
    tail.kill();
}

#[test]
fn tail_follows_a_log_that_is_opened_appended_to_and_closed() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    server.put("data", "other", b"beside the log");
    for words in [&["-F"][..], &["-f"]] {
        let source = world.dir("source");
        let log = source.join("app.log");
        let _ = fs::remove_file(&log);
        let mount = world.mount(source.to_str().unwrap(), &FRESH);
        tail_shows(&world, &mount.path("app.log"), words, &mut |line| {
            OpenOptions::new().create(true).append(true).open(&log).unwrap().write_all(line.as_bytes()).unwrap();
        });
        assert_eq!(mount.count("fuse", "errors"), 0);
        mount.unmount();

        let key = format!("app{}.log", words[0]);
        let mount = world.mount("s3://data", &[&FRESH[..], &["--endpoint-url", &server.endpoint()]].concat());
        let mut whole = String::new();
        tail_shows(&world, &mount.path(&key), words, &mut |line| {
            whole.push_str(line);
            server.put("data", &key, whole.as_bytes());
        });
        mount.unmount();
    }
}

#[test]
fn without_mode_checks_every_user_enters_every_folder() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let inside = world.file("source/private/inside", b"text");
    chmod(&inside, Mode::from_raw_mode(0o600)).unwrap();
    chmod(inside.parent().unwrap(), Mode::from_raw_mode(0o700)).unwrap();
    chmod(world.path(""), Mode::from_raw_mode(0o755)).unwrap();
    // -r and -x are access(2).
    let script = "cd \"$1/private\" && test -r . && test -x . && test -r inside && ! test -w inside && cat inside";
    let as_nobody = |mount: &Mount| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", script, "sh"]).arg(&mount.at);
        finish(command.current_dir("/"))
    };
    let source = world.path("source").to_str().unwrap().to_owned();
    let mount = world.mount(&source, &["-o", "allow_other,no_default_permissions"]);
    let out = as_nobody(&mount);
    assert_eq!(out.stdout, b"text", "{}", String::from_utf8_lossy(&out.stderr));
    mount.unmount();
    let mount = world.mount(&source, &["-o", "allow_other"]);
    let out = as_nobody(&mount);
    // The words are those of the shell.
    assert!(!out.status.success() && String::from_utf8_lossy(&out.stderr).contains("cd"), "{out:?}");
    mount.unmount();
}

fn xattr_names(path: &Path) -> Vec<u8> {
    let mut names = vec![0; 4096];
    let len = rustix::fs::listxattr(path, &mut names[..]).unwrap();
    names.truncate(len);
    names
}

#[test]
fn copies_carry_no_attributes_of_the_mount() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/folder/file", b"text");
    let mount = world.mount(world.path("source").to_str().unwrap(), &[]);
    let to = world.dir("copies");
    let copied = finish(Command::new("cp").arg("-a").arg(mount.path("folder")).arg(&to));
    assert!(copied.status.success() && copied.stderr.is_empty(), "{copied:?}");
    let archive = world.path("archive.tar");
    let packed = finish(
        Command::new("tar")
            .args(["--xattrs", "--xattrs-include=*", "-C"])
            .arg(&mount.at)
            .arg("-cf")
            .arg(&archive)
            .arg("folder"),
    );
    assert!(packed.status.success() && packed.stderr.is_empty(), "{packed:?}");
    let packed = fs::read(&archive).unwrap();
    assert!(!packed.windows(13).any(|window| window == b"user.spurline"));
    for path in [to.join("folder"), to.join("folder/file")] {
        assert_eq!(xattr_names(&path), b"", "{}", path.display());
        let mut value = [0; 64];
        let copy = rustix::fs::getxattr(&path, "user.spurline.source", &mut value[..]);
        assert!(copy.is_err(), "{}", path.display());
    }
    assert_eq!(fs::read(to.join("folder/file")).unwrap(), b"text");
    assert_eq!(xattr_names(&mount.path("folder/file")), b"");
    let mut value = [0; 4096];
    assert!(rustix::fs::getxattr(mount.path("folder/file"), "user.spurline.source", &mut value[..]).is_ok());
    mount.unmount();
}

#[test]
fn modes_and_owners_of_a_bucket_are_those_of_the_flags() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    server.put("data", "bin/hello", b"#!/bin/sh\necho hello\n");
    let endpoint = server.endpoint();
    let show = |mount: &Mount| {
        let of = |path: &str| {
            let meta = fs::metadata(mount.path(path)).unwrap();
            (meta.mode() & 0o7777, meta.uid(), meta.gid())
        };
        (of("bin/hello"), of("bin"), of(""))
    };
    let mount = world.mount("s3://data", &["--endpoint-url", &endpoint]);
    assert_eq!(show(&mount), ((0o444, 0, 0), (0o555, 0, 0), (0o555, 0, 0)));
    let refused = Command::new(mount.path("bin/hello")).output().unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    mount.unmount();
    let flags = ["--file-mode", "554", "--dir-mode", "751", "--uid", "1234", "--gid", "2345"];
    let mount = world.mount("s3://data", &[&flags[..], &["--endpoint-url", &endpoint]].concat());
    assert_eq!(show(&mount), ((0o554, 1234, 2345), (0o751, 1234, 2345), (0o751, 1234, 2345)));
    let out = finish(&mut Command::new(mount.path("bin/hello")));
    assert_eq!(out.stdout, b"hello\n", "{}", String::from_utf8_lossy(&out.stderr));
    mount.unmount();
}

/// The errno of a system call that returned `result`.
fn errno_of(result: i64) -> i32 {
    if result >= 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(0) }
}

#[test]
fn calls_that_are_refused_are_refused_as_documented() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let source = world.file("source/file", &bytes(1, 10_000));
    let mount = world.mount(world.path("source").to_str().unwrap(), &FRESH);
    let file = File::open(mount.path("file")).unwrap();
    let mut got = vec![0u8; 10_000];
    (&file).read_exact(&mut got).unwrap();

    let mut buffer = [0u8; 100];
    let piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: one piece of memory that outlives the call.
    let read = |flags| unsafe { libc::preadv2(file.as_raw_fd(), &raw const piece, 1, 0, flags) };
    assert_eq!(read(0), 100);
    assert_eq!(errno_of(read(libc::RWF_NOWAIT) as i64), libc::EOPNOTSUPP);

    // struct fiemap: start, length, flags, mapped, extent count, reserved; no room for extents.
    let mut fiemap = [0u32; 8];
    (fiemap[2], fiemap[3]) = (u32::MAX, u32::MAX);
    const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
    // SAFETY: the kernel reads and writes the 32 bytes of the struct.
    let mapped = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP as _, fiemap.as_mut_ptr()) };
    assert_eq!(errno_of(mapped.into()), libc::EOPNOTSUPP);
    let mut block = 1u32;
    // SAFETY: FIBMAP reads and writes one integer.
    let mapped = unsafe { libc::ioctl(file.as_raw_fd(), 1, &raw mut block) };
    assert_eq!((errno_of(mapped.into()), block), (0, 0), "no block");

    let copy = File::create(world.path("copy")).unwrap();
    // SAFETY: both descriptors are open; no offsets are given.
    let copied = unsafe {
        libc::copy_file_range(file.as_raw_fd(), std::ptr::null_mut(), copy.as_raw_fd(), std::ptr::null_mut(), 100, 0)
    };
    assert_eq!(errno_of(copied as i64), libc::EXDEV);

    // Events of programs in the mount, and none of the source.
    let path = CString::new(mount.path("file").as_os_str().as_bytes()).unwrap();
    // SAFETY: a new descriptor, and a path that outlives the call.
    let watch = unsafe {
        let watch = libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC);
        assert!(watch >= 0 && libc::inotify_add_watch(watch, path.as_ptr(), libc::IN_ALL_EVENTS) >= 0);
        <File as std::os::fd::FromRawFd>::from_raw_fd(watch)
    };
    OpenOptions::new().append(true).open(&source).unwrap().write_all(b"more").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    let mut events = [0u8; 4096];
    assert_eq!((&watch).read(&mut events).unwrap_err().raw_os_error(), Some(libc::EAGAIN), "no event of the source");
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), 100);
    assert!((&watch).read(&mut events).unwrap() > 0, "a read in the mount is an event");
    drop(file);
    mount.unmount();
}

/// The names of a folder with the position of each, from the C library's calls.
struct Listing(*mut libc::DIR);

impl Listing {
    fn open(path: &Path) -> Listing {
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path outlives the call.
        let dir = unsafe { libc::opendir(path.as_ptr()) };
        assert!(!dir.is_null());
        Listing(dir)
    }
    /// The position, and the name there.
    fn next(&self) -> Option<(libc::c_long, String)> {
        // SAFETY: the directory is open, and its entry is copied before the next call.
        unsafe {
            let at = libc::telldir(self.0);
            let entry = libc::readdir(self.0);
            let name = (!entry.is_null()).then(|| std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()))?;
            Some((at, name.to_str().unwrap().to_owned()))
        }
    }
    fn seek(&self, to: libc::c_long) {
        // SAFETY: the directory is open.
        unsafe { libc::seekdir(self.0, to) }
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        // SAFETY: opened in `open`, and closed once.
        unsafe { libc::closedir(self.0) };
    }
}

#[test]
fn a_seek_in_a_large_folder_costs_one_page() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    for n in 0..10_000 {
        server.put("data", &format!("many/{n:05}"), b"x");
    }
    // Without cache times every page is a request.
    let none = ["--attr-cache", "0", "--entry-cache", "0", "--dir-entry-cache", "0"];
    let mount = world.mount("s3://data", &[&none[..], &["--endpoint-url", &server.endpoint()]].concat());
    let requests = || mount.count("object", "list_ops");
    let listing = Listing::open(&mount.path("many"));
    let before = requests();
    let names: Vec<(libc::c_long, String)> =
        std::iter::from_fn(|| listing.next()).filter(|(_, name)| !name.starts_with('.')).collect();
    assert_eq!(names.len(), 10_000);
    let whole = requests() - before;
    println!("{whole} list requests for 10,000 keys");
    assert!(whole <= 12, "{whole} requests for 10 pages");
    let before = requests();
    let places = [9_900, 100, 9_100, 5_000, 8_100, 200, 7_700, 40, 9_950, 1_500];
    for place in places {
        let (at, name) = &names[place];
        listing.seek(*at);
        assert_eq!(listing.next().unwrap().1, *name, "{place}");
    }
    let seeks = requests() - before;
    println!("{seeks} list requests for {} seeks", places.len());
    assert!(seeks <= 2 * places.len() as u64, "{seeks} requests");
    drop(listing);
    mount.unmount();
}
