//! A mount alone: of a directory and of a bucket, every byte compared.

use rustix::process::Signal;
use spurline_rig::world::*;
use spurline_runtime::mount::UNMOUNT_GRACE;
use spurline_testkit::S3Server;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Names that break careless quoting, splitting or decoding.
pub const ODD_NAMES: [&str; 10] = [
    "#%? é",
    "new\nline",
    "back\\slash",
    "tab\t\"quote'",
    "%2e%2E%2f",
    " leading and trailing ",
    "-rf",
    "*[a]{b}?",
    "日本語",
    "a+b=c&d;e@f:g,h$i!",
];

fn longest() -> String {
    "n".repeat(255)
}

#[test]
fn a_directory_is_there_byte_for_byte() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let source = world.dir("source");
    fs::create_dir_all(source.join("a/b/c/d/e/f")).unwrap();
    fs::create_dir(source.join("empty folder")).unwrap();
    for (n, name) in ODD_NAMES.iter().enumerate() {
        fs::write(source.join(name), bytes(n as u64, 1000 + n)).unwrap();
        fs::create_dir(source.join(format!("d{name}"))).unwrap();
        fs::write(source.join(format!("d{name}")).join(name), bytes(n as u64, 10)).unwrap();
    }
    fs::write(source.join(longest()), b"long").unwrap();
    fs::write(source.join(OsStr::from_bytes(b"not \xff\xfe utf-8")), b"bytes").unwrap();
    for (n, len) in [0, 1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 5 * MIB + 12345].into_iter().enumerate() {
        fs::write(source.join("a/b/c/d").join(format!("{len}")), bytes(n as u64, len)).unwrap();
    }
    symlink("a/b/c/d/4097", source.join("link")).unwrap();
    symlink("/nowhere/at all", source.join("dangling")).unwrap();
    symlink("a/b", source.join("folder link")).unwrap();
    let want = tree(&source);

    let mount = world.mount(source.to_str().unwrap(), &[]);
    assert_same(&tree(&mount.at), &want);
    // Once more from caches, and the links lead where they should.
    assert_same(&tree(&mount.at), &want);
    assert_eq!(mount.read("link"), bytes(4, 4097));
    assert_eq!(mount.read("folder link/c/d/1"), bytes(1, 1));
    assert_eq!(fs::read(mount.path("dangling")).unwrap_err().kind(), ErrorKind::NotFound);
    for absent in ["none", "a/none", "a/b/c/d/4097 "] {
        assert_eq!(fs::metadata(mount.path(absent)).unwrap_err().kind(), ErrorKind::NotFound, "{absent}");
    }
    assert_eq!(fs::metadata(mount.path("link/x")).unwrap_err().kind(), ErrorKind::NotADirectory);
    let over = fs::metadata(mount.path("n".repeat(256))).unwrap_err();
    assert_eq!(over.raw_os_error(), Some(libc::ENAMETOOLONG));
    mount.unmount();
}

#[test]
fn a_bucket_is_there_byte_for_byte() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let mut want = BTreeMap::new();
    let mut put = |key: &str, bytes: Vec<u8>| {
        server.put("data", &format!("some/prefix/{key}"), &bytes);
        let parts: Vec<&str> = key.split('/').collect();
        for n in 1..parts.len() {
            want.insert(parts[..n].join("/").into_bytes(), Thing::Folder);
        }
        if !key.ends_with('/') {
            want.insert(key.as_bytes().to_vec(), Thing::File(bytes));
        }
    };
    for (n, name) in ODD_NAMES.iter().enumerate() {
        put(name, bytes(n as u64, 1000 + n));
        put(&format!("d{name}/{name}"), bytes(n as u64, 10));
    }
    put(&longest(), b"long".to_vec());
    put("empty folder/", Vec::new());
    put("a/b/empty/", Vec::new());
    for (n, len) in [0, 1, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB + 12345].into_iter().enumerate() {
        put(&format!("a/b/c/{len}"), bytes(n as u64, len));
    }
    put("both/below", b"reachable".to_vec());
    // Left out: the folder has the name; and what no file can be called.
    server.put("data", "some/prefix/both", b"not seen");
    server.put("data", "some/prefix/a//b", b"not seen");
    server.put("data", "some/prefix/a/./b", b"not seen");
    // Beside the prefix, not below it.
    server.put("data", "some/prefixed", b"not seen");

    let endpoint = server.endpoint();
    let mount = world.mount("s3://data/some/prefix", &["--endpoint-url", &endpoint]);
    assert_same(&tree(&mount.at), &want);
    assert_same(&tree(&mount.at), &want);
    assert!(mount.count("metadata", "skipped_names") >= 3);
    assert_eq!(fs::metadata(mount.path("a/b/none")).unwrap_err().kind(), ErrorKind::NotFound);
    let unmappable = mount.path(OsStr::from_bytes(b"\xff"));
    assert_eq!(fs::metadata(unmappable).unwrap_err().kind(), ErrorKind::NotFound);
    mount.unmount();
}

fn xattr(path: &Path, name: &str) -> Result<String, rustix::io::Errno> {
    let mut value = vec![0; 4096];
    let len = rustix::fs::getxattr(path, name, &mut value)?;
    Ok(String::from_utf8(value[..len].to_vec()).unwrap())
}

#[test]
fn attributes_say_what_a_program_asks() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let etag = server.put("data", "f/one", &bytes(1, 3 * MIB));
    server.put("data", "two", b"2");
    let mount = world.mount("s3://data", &["--endpoint-url", &server.endpoint()]);
    let (file, folder) = (mount.path("f/one"), mount.path("f"));
    assert_eq!(xattr(&file, "user.spurline.etag").unwrap().trim_matches('"'), etag);
    assert!(xattr(&file, "user.spurline.version").unwrap().contains(&etag));
    assert_eq!(xattr(&file, "user.spurline.source").unwrap(), "s3://data/f/one");
    assert_eq!(xattr(&file, "user.other"), Err(rustix::io::Errno::NODATA));
    assert_eq!(xattr(&folder, "user.spurline.etag"), Err(rustix::io::Errno::NODATA));
    let mut names = vec![0; 4096];
    let len = rustix::fs::listxattr(&file, &mut names).unwrap();
    assert_eq!(len, 0, "not listed: cp -a and tar --xattrs would copy them");

    let (of_file, of_folder) = (fs::metadata(&file).unwrap(), fs::metadata(&folder).unwrap());
    assert_eq!((of_file.mode() & 0o7777, of_folder.mode() & 0o7777), (0o444, 0o555));
    assert_eq!((of_file.uid(), of_file.gid()), (0, 0));
    // A folder is as old as what is known of it, or as the mount.
    server.put("data", "deep/er/file", b"3");
    eventually("the folder's file is known", || fs::metadata(&folder).unwrap().mtime() == of_file.mtime());
    let root = fs::metadata(&mount.at).unwrap().mtime();
    assert!(of_file.mtime() > 1_700_000_000 && (root - of_file.mtime()).abs() < 1000, "{root}");
    assert!(fs::metadata(mount.path("deep")).unwrap().mtime() >= of_file.mtime());
    assert_eq!(of_file.blocks(), (3 * MIB as u64) / 512);
    assert_ne!(of_file.ino(), of_folder.ino());
    assert_ne!(of_file.dev(), fs::metadata(world.path("run")).unwrap().dev());

    let space = rustix::fs::statvfs(&mount.at).unwrap();
    assert!(space.f_blocks > 0 && space.f_bavail > 0 && space.f_bsize >= 4096 && space.f_namemax == 255);
    use rustix::fs::{Access, access};
    assert_eq!(access(&file, Access::EXISTS | Access::READ_OK), Ok(()));
    assert_eq!(access(&file, Access::WRITE_OK), Err(rustix::io::Errno::ROFS));
    assert_eq!(access(&file, Access::EXEC_OK), Err(rustix::io::Errno::ACCESS));
    assert_eq!(access(&folder, Access::READ_OK | Access::EXEC_OK), Ok(()));
    mount.unmount();
}

#[test]
fn every_kind_of_write_answers_erofs() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/file", b"as it was");
    world.dir("source/folder");
    let mount = world.mount(world.path("source").to_str().unwrap(), &[]);
    let (file, folder, new) = (mount.path("file"), mount.path("folder"), mount.path("new"));
    let refused = |what: &str, error: std::io::Error| {
        assert_eq!(error.raw_os_error(), Some(libc::EROFS), "{what}: {error}");
    };
    refused("open for writing", OpenOptions::new().write(true).open(&file).unwrap_err());
    refused("open for both", OpenOptions::new().read(true).write(true).open(&file).unwrap_err());
    refused("append", OpenOptions::new().append(true).open(&file).unwrap_err());
    refused("truncating open", OpenOptions::new().write(true).truncate(true).open(&file).unwrap_err());
    refused("create", File::create(&new).unwrap_err());
    refused("mkdir", fs::create_dir(&new).unwrap_err());
    refused("rmdir", fs::remove_dir(&folder).unwrap_err());
    refused("unlink", fs::remove_file(&file).unwrap_err());
    refused("rename", fs::rename(&file, &new).unwrap_err());
    refused("symlink", symlink("file", &new).unwrap_err());
    refused("link", fs::hard_link(&file, &new).unwrap_err());
    let os = std::io::Error::from;
    use rustix::fs as rfs;
    refused("truncate", {
        let path = std::ffi::CString::new(file.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path is a C string that lives through the call.
        assert_eq!(unsafe { libc::truncate(path.as_ptr(), 0) }, -1);
        std::io::Error::last_os_error()
    });
    refused("chmod", os(rfs::chmod(&file, rfs::Mode::RWXU).unwrap_err()));
    refused("chown", std::os::unix::fs::chown(&file, Some(1), Some(1)).unwrap_err());
    refused("mknod", os(rfs::mknodat(rfs::CWD, &new, rfs::FileType::Fifo, rfs::Mode::RWXU, 0).unwrap_err()));
    refused("setxattr", os(rfs::setxattr(&file, "user.a", b"b", rfs::XattrFlags::empty()).unwrap_err()));
    refused("removexattr", os(rfs::removexattr(&file, "user.spurline.etag").unwrap_err()));
    let times = fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH);
    refused("utimens", File::open(&file).unwrap().set_times(times).unwrap_err());
    assert!(File::open(&file).unwrap().write_all(b"x").is_err());
    assert_eq!(mount.read("file"), b"as it was");
    assert_eq!(fs::read(world.path("source/file")).unwrap(), b"as it was");
    mount.unmount();
}

#[test]
fn a_file_over_four_gib_is_read_near_its_end_and_mapped() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let (len, at) = (5u64 << 30, (4u64 << 30) + 12345);
    let text = bytes(9, 3 * MIB);
    let sparse = File::create(world.dir("source").join("sparse")).unwrap();
    sparse.set_len(len).unwrap();
    sparse.write_all_at(&text, at).unwrap();
    sparse.write_all_at(b"the end", len - 7).unwrap();
    // Older than the epoch, as files out of archives can be.
    let old = std::time::SystemTime::UNIX_EPOCH - std::time::Duration::from_millis(86_400_250);
    sparse.set_modified(old).unwrap();
    let mount = world.mount(world.path("source").to_str().unwrap(), &[]);
    let file = File::open(mount.path("sparse")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), len);
    assert_eq!(file.metadata().unwrap().modified().unwrap(), old);
    let mut got = vec![0; text.len()];
    file.read_exact_at(&mut got, at).unwrap();
    assert!(got == text);
    let mut end = [1; 64];
    assert_eq!(file.read_at(&mut end, len - 7).unwrap(), 7);
    assert_eq!(&end[..7], b"the end");
    assert_eq!(file.read_at(&mut end, len).unwrap(), 0);

    // Mapped from below 4 GiB to beyond, touched here and there.
    use std::os::fd::AsRawFd as _;
    let from = 4u64 << 30;
    let size = 4 * MIB;
    // SAFETY: a new private mapping of an open file, read only within its length, and taken away below.
    unsafe {
        let start = libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            from as libc::off_t,
        );
        assert_ne!(start, libc::MAP_FAILED);
        let mapped = std::slice::from_raw_parts(start.cast::<u8>(), size);
        let begin = (at - from) as usize;
        for offset in [text.len() - 1, 0, MIB, 2 * MIB + 4095] {
            assert_eq!(mapped[begin + offset], text[offset], "{offset}");
        }
        assert!(mapped[begin..begin + text.len()] == text[..]);
        assert!(mapped[..begin].iter().all(|b| *b == 0));
        libc::munmap(start, size);
    }
    drop(file);
    // Parts that were never read were never fetched.
    assert!(mount.count("object", "get_bytes") < 256 << 20);
    mount.unmount();
}

#[test]
fn a_folder_of_twenty_thousand_names() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    for n in 0..20_000 {
        server.put("data", &format!("many/file-{n:05}"), &n.to_string().into_bytes());
    }
    let mount = world.mount("s3://data", &["--endpoint-url", &server.endpoint()]);
    let mut names: Vec<_> =
        fs::read_dir(mount.path("many")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names.len(), 20_000);
    for (n, name) in names.iter().enumerate() {
        assert_eq!(*name, format!("file-{n:05}"));
    }
    // Their attributes came with the names: looking at some costs the store nothing.
    let before = mount.count("object", "list_ops");
    for n in (0..20_000).step_by(997) {
        assert_eq!(fs::metadata(mount.path(format!("many/file-{n:05}"))).unwrap().len(), n.to_string().len() as u64);
        assert_eq!(mount.read(format!("many/file-{n:05}")), n.to_string().into_bytes());
    }
    println!("{} more listings and heads for 21 names after a listing", mount.count("object", "list_ops") - before);
    mount.unmount();
}

#[test]
fn an_object_is_no_source_and_its_folder_is_named() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    server.put("data", "models/one.bin", b"bytes");
    let mut command = world.command(&[]);
    command.args(world.mount_words("s3://data/models/one.bin")).args(["--endpoint-url", &server.endpoint()]);
    let said = refused(&finish(with_credentials(&mut command)), 2, &["is an object", "mount s3://data/models,"]);
    assert!(said.contains("the file one.bin"), "{said}");
}

#[test]
fn two_processes_read_one_file_and_each_block_is_fetched_once() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let text = bytes(3, 24 * MIB + 5);
    server.put("data", "file", &text);
    let mount = world.mount("s3://data", &["--endpoint-url", &server.endpoint()]);
    let script = "cat \"$1\" | cksum";
    let file = mount.path("file");
    let start = || {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(&file);
        std::thread::spawn(move || finish(&mut command).stdout)
    };
    let readers = [start(), start()];
    let sums = readers.map(|r| r.join().unwrap());
    let plain = world.file("plain", &text);
    let want = finish(Command::new("sh").args(["-c", script, "sh"]).arg(&plain)).stdout;
    assert!(!want.is_empty() && sums.iter().all(|sum| *sum == want));
    assert_eq!(mount.count("object", "get_ops"), 25);
    assert_eq!(mount.count("object", "get_bytes"), text.len() as u64);
    mount.unmount();
}

#[test]
fn a_second_signal_ends_a_mount_in_use_at_once() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let source = world.file("source/file", &bytes(1, 1000));
    let mut mount = world.mount(source.parent().unwrap().to_str().unwrap(), &[]);
    let held = File::open(mount.path("file")).unwrap();
    mount.process().signal(Signal::TERM);
    mount.process().wait_for("unmounting");
    let start = Instant::now();
    mount.process().signal(Signal::TERM);
    let status = mount.process_mut().wait();
    assert!(start.elapsed() < UNMOUNT_GRACE, "it waited for the open file");
    let log = mount.process().log();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("was unmounted by force"), "{log}");
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(mount.at.to_str().unwrap()), "the mount is left: {table}");
    drop(held);
}

#[test]
fn a_second_signal_after_a_clean_unmount_changes_nothing() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let source = world.file("source/file", &bytes(1, 1000));
    let mut mount = world.mount(source.parent().unwrap().to_str().unwrap(), &[]);
    // Two of one kind could arrive as one.
    mount.process().signal(Signal::TERM);
    mount.process().signal(Signal::INT);
    let status = mount.process_mut().wait();
    assert_eq!(status.code(), Some(0), "{}", mount.process().log());
}
