//! A writable mount of a directory: what POSIX asks, with the bare directory beside it as the oracle, and real
//! programs.

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, XattrFlags};
use spurline_rig::disk_image::DiskImage;
use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, TmpFs, WAYS};
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn writable(world: &World, more: &[&str]) -> Option<(PathBuf, Mount)> {
    if !can_mount() {
        return None;
    }
    let source = world.dir("source");
    fs::set_permissions(&source, fs::Permissions::from_mode(0o755)).unwrap();
    let words = [&["--rw", "-o", "allow_other"], more].concat();
    let mount = world.mount(source.to_str().unwrap(), &words);
    Some((source, mount))
}

#[test]
fn what_posix_promises_holds_in_a_writable_mount() {
    for way in WAYS {
        let world = World::new();
        let Some((source, mount)) = writable(&world, way) else { return };
        own_writes_are_read_and_removed_files_work(&mount, &source);
        names_are_exchanged_and_attributes_stored(&mount, &source);
        unnamed_files_holes_and_copies_work(&mount, &source);
        appends_and_changes_beside_the_mount_are_seen(&mount, &source);
        opens_empty_files_that_do_not_run(&mount, &source);
        readers_see_each_write(&mount);
        listings_have_every_name(&mount, &source);
        let info = world.run(&["info", "--json", mount.path("x").to_str().unwrap()]);
        let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
        assert_eq!(info["writes"]["rename_directory"], "atomic", "{info}");
        let changes = mount.count("fuse", "change_ops");
        assert!(changes > 3000, "{changes}");
        mount.unmount();
    }
}

/// Reads a file of the mount, whose last access was long after its last change; the access time then.
fn access_time_after_read(source: &Path, mount: &Mount) -> i64 {
    let file = File::options().write(true).create(true).truncate(true).open(source.join("read")).unwrap();
    let time = |seconds| std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    let times = fs::FileTimes::new().set_modified(time(1_000_000_000)).set_accessed(time(LAST_READ as u64));
    (&file).write_all(b"text").unwrap();
    file.set_times(times).unwrap();
    assert_eq!(mount.read("read"), b"text");
    fs::metadata(source.join("read")).unwrap().atime()
}

const LAST_READ: i64 = 1_000_000_001;

#[test]
fn the_options_about_access_times_count_for_the_source() {
    for (option, is_changed) in [("noatime", false), ("strictatime", true)] {
        let world = World::new();
        let Some((source, mount)) = writable(&world, &["-o", option]) else { return };
        let read = access_time_after_read(&source, &mount);
        assert_eq!(read != LAST_READ, is_changed, "{option}: {read}; {}", mount.process().log());
        mount.unmount();
    }
}

/// Stores into shared maps of files, after each of which the time of the last change is asked for; `sys.argv[1]` is the folder.
const STORES: &str = r#"
import mmap, os, sys
def changed_by(path, store):
    # The next store is the first to a page again.
    with open(path, "rb") as stored:
        os.fsync(stored.fileno())
    os.utime(path, (0, 0))
    os.stat(path)
    store()
    return os.stat(path).st_mtime > 0
path = os.path.join(sys.argv[1], "mapped")
open(path, "wb").write(bytes(3 * 4096))
file = os.open(path, os.O_RDWR)
map = mmap.mmap(file, 0)
def store(page):
    map[page * 4096] = 1
def store_and_sync():
    store(1)
    map.flush()
print(changed_by(path, lambda: store(0)))
print(changed_by(path, store_and_sync))
def of_program():
    if os.fork() == 0:
        own = os.open(path, os.O_RDWR)
        mmap.mmap(own, 0)[2 * 4096] = 1
        os._exit(0)
    os.wait()
map.close()
os.close(file)
print(changed_by(path, of_program))
"#;

#[test]
fn a_store_into_a_map_shows_its_time_at_once() {
    let world = World::new();
    let Some((source, mount)) = writable(&world, &["--attr-cache", "1h"]) else { return };
    let stores = |folder: &Path| {
        let out = finish(Command::new("python3").args(["-c", STORES]).arg(folder));
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let bare = stores(&source);
    assert_eq!(stores(&mount.at), bare);
    if bare != "True\nTrue\nTrue\n" {
        skip("mapped_times", "stores into maps change no times in the directory for temporary files");
    }
    mount.unmount();
}

fn own_writes_are_read_and_removed_files_work(mount: &Mount, source: &Path) {
    let at = |name: &str| mount.path(name);
    // Own writes are read at once, in the mount and in the source.
    fs::create_dir_all(at("a/b")).unwrap();
    fs::write(at("a/b/file"), bytes(1, 300_000)).unwrap();
    assert_eq!(fs::read(at("a/b/file")).unwrap(), fs::read(source.join("a/b/file")).unwrap());
    // A directory is renamed with all below it, also while a file in it is open.
    let mut open = OpenOptions::new().read(true).write(true).open(at("a/b/file")).unwrap();
    fs::rename(at("a"), at("z")).unwrap();
    open.write_all(b"renamed").unwrap();
    assert_eq!(&fs::read(at("z/b/file")).unwrap()[..7], b"renamed");
    assert!(!source.join("a").exists() && source.join("z/b/file").exists());
    // Hard links share an inode, whose number is the source's.
    fs::hard_link(at("z/b/file"), at("link")).unwrap();
    let (one, other) = (fs::metadata(at("link")).unwrap(), fs::metadata(source.join("z/b/file")).unwrap());
    assert_eq!((one.ino(), one.nlink(), one.mtime_nsec()), (other.ino(), 2, other.mtime_nsec()));
    // A removed file works by its handle.
    fs::remove_file(at("z/b/file")).unwrap();
    fs::remove_file(at("link")).unwrap();
    open.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    open.set_len(10).unwrap();
    open.rewind().unwrap();
    let mut text = String::new();
    open.take(7).read_to_string(&mut text).unwrap();
    assert_eq!(text, "renamed");
    fs::remove_dir(at("z/b")).unwrap();
}

fn names_are_exchanged_and_attributes_stored(mount: &Mount, source: &Path) {
    let at = |name: &str| mount.path(name);
    // Flags of rename.
    fs::write(at("x"), "x").unwrap();
    fs::write(at("y"), "y").unwrap();
    let (x, y) = (at("x"), at("y"));
    let refused = rustix::fs::renameat_with(CWD, &x, CWD, &y, RenameFlags::NOREPLACE);
    assert_eq!(refused, Err(rustix::io::Errno::EXIST));
    rustix::fs::renameat_with(CWD, &x, CWD, &y, RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(&x).unwrap(), fs::read(&y).unwrap()), (b"y".to_vec(), b"x".to_vec()));
    // Links, pipes, attributes.
    symlink("x", at("symlink")).unwrap();
    assert_eq!(fs::read(at("symlink")).unwrap(), b"y");
    rustix::fs::mknodat(CWD, at("pipe"), rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
    rustix::fs::setxattr(at("x"), "user.a", b"value", XattrFlags::CREATE).unwrap();
    let mut value = [0; 16];
    assert_eq!(rustix::fs::getxattr(source.join("x"), "user.a", &mut value[..]), Ok(5));
}

fn unnamed_files_holes_and_copies_work(mount: &Mount, source: &Path) {
    let at = |name: &str| mount.path(name);
    // A file without a name gets one.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mut unnamed = File::from(rustix::fs::open(&mount.at, flags, Mode::RUSR | Mode::WUSR).unwrap());
    unnamed.write_all(b"named").unwrap();
    let own = format!("/proc/self/fd/{}", unnamed.as_raw_fd());
    rustix::fs::linkat(CWD, &own, CWD, at("named"), AtFlags::SYMLINK_FOLLOW).unwrap();
    assert_eq!(fs::read(source.join("named")).unwrap(), b"named");
    // Holes and copies.
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(at("holes")).unwrap();
    file.write_all_at(&bytes(2, 3 * 4096), 0).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 8192).unwrap();
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(0)), Ok(8192));
    let (mut from, mut to) = (8192, 0);
    assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 4096), Ok(4096));
    let now = fs::read(at("holes")).unwrap();
    assert!(now[..4096] == now[8192..] && now[4096..8192].iter().all(|byte| *byte == 0));
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    File::open(&mount.at).unwrap().sync_all().unwrap();
}

fn appends_and_changes_beside_the_mount_are_seen(mount: &Mount, source: &Path) {
    let at = |name: &str| mount.path(name);
    // Two appenders never overwrite each other.
    let append = || OpenOptions::new().append(true).create(true).open(at("log")).unwrap();
    let (mut one, mut other) = (append(), append());
    for _ in 0..100 {
        one.write_all(b"one\n").unwrap();
        other.write_all(b"other\n").unwrap();
    }
    let log = fs::read_to_string(source.join("log")).unwrap();
    assert_eq!((log.matches("one\n").count(), log.matches("other\n").count(), log.len()), (100, 100, 1000));
    // A change beside the mount is seen at the next open.
    let y = at("y");
    assert_eq!(fs::read(&y).unwrap(), b"x");
    fs::write(source.join("y"), "changed beside it").unwrap();
    assert_eq!(fs::read(&y).unwrap(), b"changed beside it");
}

fn opens_empty_files_that_do_not_run(mount: &Mount, source: &Path) {
    let at = |name: &str| mount.path(name);
    // An open that empties a file takes the bytes of another open file too, once, and none that come later.
    let (early, flags) = (File::create(at("cut")).unwrap(), OFlags::WRONLY | OFlags::TRUNC | OFlags::CLOEXEC);
    early.write_all_at(&bytes(3, 5000), 0).unwrap();
    let late = File::from(rustix::fs::open(at("cut"), flags, Mode::empty()).unwrap());
    assert_eq!((fs::read(at("cut")).unwrap(), late.metadata().unwrap().len()), (vec![], 0));
    late.write_all_at(b"late", 0).unwrap();
    early.write_all_at(b"early", 4).unwrap();
    drop((early, late));
    assert_eq!(fs::read(source.join("cut")).unwrap(), b"lateearly");
    // A program that runs is not emptied.
    fs::copy("/bin/sleep", at("program")).unwrap();
    fs::set_permissions(at("program"), fs::Permissions::from_mode(0o755)).unwrap();
    let mut program = Command::new(at("program")).arg("1000").spawn().unwrap();
    for access in [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR] {
        let opened = rustix::fs::open(at("program"), access | OFlags::TRUNC | OFlags::CLOEXEC, Mode::empty());
        assert_eq!(opened.err(), Some(rustix::io::Errno::TXTBSY));
    }
    program.kill().unwrap();
    program.wait().unwrap();
    assert!(fs::read(at("program")).unwrap() == fs::read("/bin/sleep").unwrap());
}

fn readers_see_each_write(mount: &Mount) {
    let at = |name: &str| mount.path(name);
    // Readers of a file that is being written see each write.
    let written = File::create(at("growing")).unwrap();
    let readers =
        [File::open(at("growing")).unwrap(), OpenOptions::new().read(true).write(true).open(at("growing")).unwrap()];
    for n in 0..200_u64 {
        let whole = bytes(n, 3000);
        written.write_all_at(&whole, n % 3 * 3000).unwrap();
        for reader in &readers {
            let mut seen = vec![0; 3000];
            reader.read_exact_at(&mut seen, n % 3 * 3000).unwrap();
            assert!(seen == whole, "write {n}");
        }
    }
}

fn listings_have_every_name(mount: &Mount, source: &Path) {
    let at = |name: &str| mount.path(name);
    // A listing has every name, and names can be removed during it.
    for n in 0..3000 {
        fs::write(source.join("z").join(format!("{n}")), "").unwrap();
    }
    assert_eq!(fs::read_dir(at("z")).unwrap().count(), 3000);
    fs::remove_dir_all(at("z")).unwrap();
}

#[test]
fn changes_are_made_as_their_callers_or_as_one_user() {
    for squash in [None, Some("1:1")] {
        let world = World::new();
        let more = squash.map_or(vec![], |squash| vec!["--squash", squash]);
        let Some((source, mount)) = writable(&world, &more) else { return };
        // Other users reach the mount.
        fs::set_permissions(world.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        for (name, mode) in [("public", 0o777), ("private", 0o700), ("shared", 0o770)] {
            fs::create_dir(source.join(name)).unwrap();
            fs::set_permissions(source.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        std::os::unix::fs::chown(source.join("shared"), None, Some(4321)).unwrap();
        let run = |script: &str, groups: &[u32]| {
            let groups: Vec<_> = groups.iter().map(|group| rustix::process::Gid::from_raw(*group)).collect();
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(&mount.at).stderr(Stdio::null());
            // SAFETY: only a system call is made between fork and exec.
            unsafe {
                command.pre_exec(move || {
                    rustix::thread::set_thread_groups(&groups)?;
                    rustix::thread::set_thread_gid(rustix::process::Gid::from_raw(65534))?;
                    Ok(rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534))?)
                })
            };
            command.status().unwrap().success()
        };
        assert!(run("umask 027; echo x > public/file && mkdir public/dir", &[]));
        let owner = |name: &str| {
            let found = fs::metadata(source.join(name)).unwrap();
            (found.uid(), found.gid(), found.mode() & 0o7777)
        };
        let id = if squash.is_some() { 1 } else { 65534 };
        assert_eq!(owner("public/file"), (id, id, 0o640));
        assert_eq!(owner("public/dir"), (id, id, 0o750));
        assert!(!run("echo x > private/file", &[]));
        if squash.is_none() {
            assert!(!run("echo x > shared/file", &[]));
            assert!(run("echo x > shared/file", &[4321]), "a supplementary group counts");
            // Only an owner changes a mode, and a group is given only to one's own.
            assert!(run("chmod 600 public/file && ! chmod 777 public && ! chgrp 4321 public/file", &[]));
            assert!(run("chgrp 4321 public/file", &[4321]));
            assert_eq!(owner("public/file"), (65534, 4321, 0o600));
            // What a member makes in a directory with the set-group-ID bit gets its group, and the bit.
            fs::set_permissions(source.join("shared"), fs::Permissions::from_mode(0o2770)).unwrap();
            assert!(run("umask 022; echo x > shared/new; mkdir shared/dir; ln -s new shared/link", &[4321]));
            assert_eq!(owner("shared/new"), (65534, 4321, 0o644));
            assert_eq!(owner("shared/dir"), (65534, 4321, 0o2755));
            assert!(run("touch shared/own && chmod 2755 shared/own", &[4321]));
            assert_eq!(owner("shared/own"), (65534, 4321, 0o2755));
        }
        mount.unmount();
    }
}

/// Reads go to the source's files, so that such mounts share the default directory, or none.
#[test]
fn a_lone_writable_mount_has_no_block_cache() {
    let world = World::new();
    let Some((source, one)) = writable(&world, &[]) else { return };
    let (other, cache) = (world.dir("other"), world.path("cache/not-made"));
    let mut command =
        world.command(&["mount", source.to_str().unwrap(), other.to_str().unwrap(), "--rw", "--cache-dir"]);
    let two = world.mount_at(command.arg(&cache), &other);
    fs::write(one.path("file"), bytes(1, 300_000)).unwrap();
    assert_eq!(fs::read(two.path("file")).unwrap(), bytes(1, 300_000));
    let log = two.process().log();
    assert!(log.contains("--cache-dir, ") && log.contains("not used: a mount with --rw has no block cache"), "{log}");
    assert!(!log.contains("cache directory"), "{log}");
    assert_eq!(fs::read_dir(world.path("cache")).unwrap().count(), 0);
    one.unmount();
    two.unmount();
}

#[test]
fn a_directory_that_was_replaced_beside_the_mount_is_stale_and_nothing_else_breaks() {
    for way in WAYS {
        let world = World::new();
        let Some((source, mount)) = writable(&world, way) else { return };
        fs::create_dir(mount.path("d")).unwrap();
        let old = File::open(mount.path("d")).unwrap();
        fs::rename(source.join("d"), source.join("e")).unwrap();
        fs::create_dir(source.join("d")).unwrap();
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&old, "in the old one", flags, Mode::RUSR);
        assert_eq!(made.err(), Some(rustix::io::Errno::STALE));
        assert_eq!(fs::read_dir(source.join("d")).unwrap().count(), 0, "nothing is made in the new one");
        drop(old);
        eventually("the new directory is found", || fs::write(mount.path("d/new"), "x").is_ok());
        assert_eq!(fs::read(source.join("d/new")).unwrap(), b"x");
        fs::write(mount.path("e/old"), "y").unwrap();
        mount.unmount();
    }
}

#[test]
fn a_quota_of_the_source_gives_its_errno_and_nothing_else_breaks() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let features = ["-O", "quota", "-E", "quotatype=usrquota"];
    let memory = TmpFs::mount(&world.dir("memory"), "size=80m");
    let limited = DiskImage::mount(&memory.0.join("image"), &world.dir("limited"), &features);
    let limited = match limited.and_then(|disk| disk.limit_user(65534, 1024).map(|()| disk)) {
        Ok(limited) => limited,
        Err(why) => return skip("quota", &format!("this kernel mounts no ext4 image with quotas: {why}")),
    };
    for path in [&world.path(""), &limited.at] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mount = world.mount(limited.at.to_str().unwrap(), &["--rw", "-o", "allow_other", "--squash", "65534:65534"]);
    let error = fs::write(mount.path("big"), bytes(1, 4 * MIB)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EDQUOT));
    assert_eq!(fs::read(mount.path("big")).unwrap(), fs::read(limited.at.join("big")).unwrap());
    fs::remove_file(mount.path("big")).unwrap();
    eventually("there is room again", || fs::write(mount.path("small"), bytes(2, 100_000)).is_ok());
    mount.unmount();
}

#[test]
fn a_full_or_read_only_source_gives_its_errno_and_nothing_else_breaks() {
    for way in WAYS {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let small = TmpFs::mount(&world.dir("small"), "size=2m");
        let mount = world.mount(small.0.to_str().unwrap(), &[&["--rw"], way].concat());
        let error = fs::write(mount.path("big"), bytes(1, 4 * MIB)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(fs::read(mount.path("big")).unwrap(), fs::read(small.0.join("big")).unwrap());
        fs::remove_file(mount.path("big")).unwrap();
        // The kernel reports the last close of a file some time after close(2).
        eventually("there is room again", || fs::write(mount.path("small"), "fits").is_ok());
        eventually("the source can be made read-only", || {
            let remount = Command::new("mount").args(["-o", "remount,ro"]).arg(&small.0).output().unwrap();
            remount.status.success()
        });
        let error = fs::write(mount.path("new"), "x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        assert_eq!(fs::read(mount.path("small")).unwrap(), b"fits");
        mount.unmount();
    }
}

#[test]
fn writes_are_seen_in_the_access_log_in_stats_and_in_status() {
    if !can_mount() {
        return;
    }
    for nodes in [0, 1] {
        let Some(group) = Group::start_in_memory(nodes, "2m") else { return };
        let log = group.world.path("access.log");
        let mount = group.mount("mnt", 0, &["--no-passthrough", "--access-log", log.to_str().unwrap()]);
        let file = File::create(mount.path("file")).unwrap();
        file.write_all_at(&bytes(1, 5000), 0).unwrap();
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 4096, 8192).unwrap();
        file.sync_all().unwrap();
        let full = rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 4 << 20);
        assert_eq!(full, Err(rustix::io::Errno::NOSPC));
        drop(file);
        let lines = [
            ("write", "off=0 len=5000 errno=0"),
            ("write", "path=\"/file\""),
            ("create", "path=\"/\""),
            ("fallocate", "off=4096 len=8192 errno=0"),
            ("fsync", "errno=0"),
            ("fallocate", "off=0 len=4194304 errno=28"),
        ];
        eventually("the log has each request", || {
            let text = fs::read_to_string(&log).unwrap_or_default();
            lines
                .iter()
                .all(|(op, rest)| text.lines().any(|line| line.contains(&format!(" {op} ")) && line.contains(rest)))
        });
        let stats = mount.stats();
        assert_eq!((count(&stats, "fuse", "write_ops"), count(&stats, "fuse", "write_bytes")), (1, 5000));
        assert!(count(&stats, "fuse", "change_ops") >= 1);
        let status = |target: &str| {
            let out = group.world.run(&["status", target]);
            assert!(out.status.success(), "{out:?}");
            String::from_utf8_lossy(&out.stdout).into_owned()
        };
        let said = status(mount.at.to_str().unwrap());
        let way = if nodes == 0 { "writes: straight to the source; " } else { "writes: through nodes; " };
        assert!(said.contains(way), "{said}");
        // Status, load and free agree about reads.
        assert!(said.contains(if nodes == 0 { "no block cache (--rw)" } else { "cache on its nodes" }), "{said}");
        for command in ["load", "free"] {
            let out = group.world.run(&[command, mount.at.to_str().unwrap()]);
            if nodes == 0 {
                refused(
                    &out,
                    3,
                    &["writable (--rw)", "a directory of this host", "a mount of the source without --rw"],
                );
            } else {
                assert!(out.status.success(), "{out:?}");
            }
        }
        for node in &group.nodes {
            let said = status(&node.address);
            assert!(said.contains("writes: taken from mounts with --rw; 1 connected, "), "{said}");
            assert!(node.count("writes", "served_bytes") >= 5000 && node.count("writes", "served_ops") > 3);
        }
        mount.unmount();
    }
}

mod test_all {
    use super::*;

    #[test]
    fn a_source_that_cannot_be_written_is_refused_with_the_reason() {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let (source, at) = (world.dir("source"), world.dir("mnt"));
        let (source, at) = (source.to_str().unwrap(), at.to_str().unwrap());
        let mount = |more: &[&str]| world.run(&[&["mount", source, at, "--cache-size", "0"], more].concat());
        refused(&mount(&["--rw", "--registry", "static:127.0.0.1:1"]), 3, &["connection refused"]);
        refused(&mount(&["--rw", "--read-only"]), 2, &["not both"]);
        refused(&mount(&["-o", "ro,rw"]), 2, &["not both"]);
        refused(&mount(&["--squash", "1:1"]), 2, &["--rw"]);
        refused(&mount(&["--rw", "--squash", "me"]), 2, &["UID:GID"]);
        refused(&mount(&["--rw", "--uid", "7"]), 2, &["--uid"]);
        refused(
            &world.run(&["mount", "gs://bucket", at, "--rw"]),
            2,
            &["gs://bucket", "neither a directory nor an S3 bucket"],
        );
        let through_nodes =
            ["mount", "s3://bucket", at, "--rw", "--registry", "static:127.0.0.1:1", "--last-writer-wins"];
        refused(&world.run(&through_nodes), 2, &["--last-writer-wins", "give them to the nodes"]);
        refused(&mount(&["--last-writer-wins"]), 2, &["--last-writer-wins", "give --rw too"]);
        let read_only = TmpFs::mount(&world.dir("small"), "ro");
        let out = world.run(&["mount", read_only.0.to_str().unwrap(), at, "--rw", "--cache-size", "0"]);
        refused(&out, 3, &["read-only", "remount,rw", "--rw out"]);
        let node = |more: &[&str]| world.run(&[&["node", "--cache-size", "0", "--source"], more].concat());
        refused(
            &node(&[read_only.0.to_str().unwrap(), "--writable"]),
            3,
            &["read-only", "remount,rw", "--writable out"],
        );
        let reader = world.node(&[source], 0, &[]);
        let registry = format!("static:{}", reader.address);
        refused(&mount(&["--rw", "--registry", &registry]), 3, &["takes no changes", "start it with --writable"]);
        // A source that is not there is reported once, and a file is no source.
        let missing = world.path("missing");
        let said = refused(&world.run(&["mount", missing.to_str().unwrap(), at, "--rw"]), 3, &["create it"]);
        assert_eq!(said.matches("can't be opened").count(), 1, "{said}");
        let file = world.file("file", b"x");
        refused(&world.run(&["mount", file.to_str().unwrap(), at, "--rw"]), 2, &["give a directory"]);
        refused(&node(&[file.to_str().unwrap()]), 2, &["give a directory"]);
    }
}
