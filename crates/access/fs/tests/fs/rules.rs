//! The rules of POSIX and of versions, one by one.

use crate::support;
use parking_lot::Mutex;
use spurline_fs::{
    FileAttr, ForgetCandidate, FsCaller, FsConfig, LimitedInodes as _, LookupOutcome, ROOT, RegisterBacking,
    RegisteredBacking, RequestForgets,
};
use spurline_types::{ErrorKind, FileKind};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{BLOCK, Rig, STAGED_VERSION, byte};

fn found(rig: &Rig, parent: u64, name: &[u8]) -> spurline_fs::InodeEntry {
    match rig.fs.lookup(parent, name).unwrap() {
        LookupOutcome::Found(entry) => entry,
        LookupOutcome::Absent { .. } => panic!("{} is there", name.escape_ascii()),
    }
}

fn rig() -> Rig {
    let config = FsConfig {
        uid: 7,
        gid: 8,
        attr_ttl: Duration::from_secs(2),
        entry_ttl: Duration::from_secs(9),
        dir_entry_ttl: Duration::from_secs(5),
        ..FsConfig::default()
    };
    let rig = Rig::new(config);
    rig.tree.dir(b"d");
    rig.tree.dir(b"d/e");
    rig.tree.put(b"d/f", 1, 3 * BLOCK + 5);
    rig.tree.put(b"a", 1, 10);
    rig.tree.link(b"l", b"d/f");
    rig
}

#[test]
fn attributes_and_times_of_names() {
    let rig = rig();
    let f = found(&rig, ROOT, b"a");
    let FileAttr { kind, size, blocks, mode, nlink, uid, gid, .. } = f.attr;
    assert_eq!((kind, size, blocks, mode, nlink, uid, gid), (FileKind::File, 10, 1, 0o640, 1, 7, 8));
    // A changed file is noticed by its name, so that holds no longer than attributes do.
    assert_eq!((f.entry_ttl.as_secs(), f.attr_ttl.as_secs()), (2, 2));
    let d = found(&rig, ROOT, b"d");
    assert_eq!((d.entry_ttl.as_secs(), d.attr.nlink, d.attr.mode), (5, 1, 0o755));
    assert_eq!(rig.fs.lookup(ROOT, b"none").unwrap(), LookupOutcome::Absent { ttl: Duration::from_secs(1) });
    assert_eq!(found(&rig, ROOT, b"l").attr.mode, 0o777);
}

#[test]
fn bits_that_lend_rights_are_not_shown() {
    let rig = Rig::new(FsConfig { file_mode: Some(0o6755), dir_mode: Some(0o3777), ..FsConfig::default() });
    rig.tree.dir(b"d");
    rig.tree.put(b"a", 1, 1);
    assert_eq!(found(&rig, ROOT, b"a").attr.mode, 0o755);
    assert_eq!(found(&rig, ROOT, b"d").attr.mode, 0o1777);
}

#[test]
fn options_decide_modes() {
    let rig = Rig::new(FsConfig { file_mode: Some(0o666), dir_mode: Some(0o777), umask: 0o022, ..FsConfig::default() });
    rig.tree.put(b"a", 1, 1);
    assert_eq!(found(&rig, ROOT, b"a").attr.mode, 0o644);
    assert_eq!(rig.fs.getattr(ROOT, None).unwrap().0.mode, 0o755);
}

#[test]
fn bad_names_and_wrong_kinds() {
    let rig = rig();
    let (a, d, l) = (rig.walk(b"a").unwrap(), rig.walk(b"d").unwrap(), rig.walk(b"l").unwrap());
    assert_eq!(Rig::errno(rig.fs.lookup(ROOT, &[b'x'; 256])), libc::ENAMETOOLONG);
    assert_eq!(rig.fs.lookup(ROOT, &[b'x'; 255]).unwrap(), LookupOutcome::Absent { ttl: Duration::from_secs(1) });
    assert_eq!(Rig::errno(rig.fs.lookup(ROOT, b"a/b")), libc::EINVAL);
    assert_eq!(Rig::errno(rig.fs.lookup(ROOT, b"")), libc::EINVAL);
    assert_eq!(Rig::errno(rig.fs.lookup(a, b"x")), libc::ENOTDIR);
    assert_eq!(Rig::errno(rig.fs.open(d, libc::O_RDONLY, None)), libc::EISDIR);
    assert_eq!(Rig::errno(rig.fs.open(a, libc::O_DIRECTORY, None)), libc::ENOTDIR);
    assert_eq!(Rig::errno(rig.fs.open(l, libc::O_RDONLY, None)), libc::EINVAL);
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC] {
        assert_eq!(Rig::errno(rig.fs.open(a, flags, None)), libc::EROFS);
    }
    assert_eq!(Rig::errno(rig.fs.opendir(a)), libc::ENOTDIR);
    assert_eq!(Rig::errno(rig.fs.readlink(a)), libc::EINVAL);
    assert_eq!(rig.fs.readlink(l).unwrap(), b"d/f");
    assert_eq!(Rig::errno(rig.fs.release(99)), libc::EBADF);
    let fh = rig.fs.opendir(d).unwrap();
    assert_eq!(Rig::errno(rig.read(d, fh, 0, 1)), libc::EISDIR);
    assert_eq!(Rig::errno(rig.fs.readdir(a, fh, 0, &mut |_| true)), libc::EBADF);
    rig.fs.release(fh).unwrap();
    assert_eq!(Rig::errno(rig.fs.release(fh)), libc::EBADF);
    let fh = rig.fs.open(a, 0, None).unwrap().fh;
    assert_eq!(Rig::errno(rig.fs.readdir(a, fh, 0, &mut |_| true)), libc::ENOTDIR);
}

#[test]
fn dot_and_dot_dot() {
    let rig = rig();
    let d = rig.walk(b"d").unwrap();
    let (e, f) = (rig.walk(b"d/e").unwrap(), rig.walk(b"d/f").unwrap());
    assert_eq!(found(&rig, e, b"..").attr.ino, d);
    assert_eq!(found(&rig, d, b"..").attr.ino, ROOT);
    assert_eq!(found(&rig, ROOT, b"..").attr.ino, ROOT);
    assert_eq!(found(&rig, ROOT, b".").attr.ino, ROOT);
    // An NFS server sends these for any inode.
    assert_eq!(found(&rig, f, b".").attr.ino, f);
    assert_eq!(found(&rig, f, b"..").attr.ino, d);
}

#[test]
fn what_took_long_to_look_up_holds_that_much_shorter() {
    let rig = rig();
    rig.tree.slow_ms.store(600, Ordering::SeqCst);
    let f = found(&rig, ROOT, b"a");
    assert_eq!((f.entry_ttl.as_millis(), f.attr_ttl.as_millis()), (1400, 1400));
    assert_eq!(rig.fs.lookup(ROOT, b"none").unwrap(), LookupOutcome::Absent { ttl: Duration::from_millis(400) });
    rig.tree.slow_ms.store(60_000, Ordering::SeqCst);
    assert_eq!(found(&rig, ROOT, b"a").attr_ttl, Duration::ZERO);
    assert_eq!(rig.fs.lookup(ROOT, b"none").unwrap(), LookupOutcome::Absent { ttl: Duration::ZERO });
}

/// Number, directory and name of an inode.
type NamedInode = (u64, Option<u64>, Vec<u8>);

/// The inodes that the kernel was requested to forget.
#[derive(Default)]
struct Requested(Mutex<Vec<NamedInode>>);

impl RequestForgets for Requested {
    fn request_forgets(&self, inodes: &[ForgetCandidate]) -> io::Result<()> {
        self.0.lock().extend(inodes.iter().map(|inode| (inode.ino, inode.parent, inode.name.to_vec())));
        Ok(())
    }
}

#[test]
fn inodes_used_long_ago_and_not_open_are_forgotten_first() {
    let rig = rig();
    let d = found(&rig, ROOT, b"d").attr.ino;
    let open = found(&rig, d, b"f").attr.ino;
    let fh = rig.fs.open(open, 0, None).unwrap().fh;
    rig.pass(1000);
    let old = found(&rig, ROOT, b"a").attr.ino;
    rig.pass(60_000);
    let link = found(&rig, ROOT, b"l").attr.ino;
    rig.pass(1000);
    assert!(rig.fs.getattr(d, None).is_ok(), "a directory that is used");
    let requested = Requested::default();
    assert!(!rig.fs.request_forgets(&requested, 1).unwrap(), "there are more");
    assert_eq!(*requested.0.lock(), [(old, Some(ROOT), b"a".to_vec())]);
    // More bytes than there are: all but the open one.
    requested.0.lock().clear();
    assert!(rig.fs.request_forgets(&requested, 1 << 30).unwrap(), "these are all");
    let mut all: Vec<u64> = requested.0.lock().iter().map(|(ino, ..)| *ino).collect();
    all.sort_unstable();
    let mut want = vec![old, link, d];
    want.sort_unstable();
    assert_eq!(all, want);
    rig.fs.release(fh).unwrap();
    requested.0.lock().clear();
    rig.fs.request_forgets(&requested, 1).unwrap();
    assert_eq!(*requested.0.lock(), [(open, Some(d), b"f".to_vec())], "closed, and the oldest");
    let counted = rig.stats.fuse.inode_bytes.get();
    rig.fs.forget(old, 1);
    assert!(rig.stats.fuse.inode_bytes.get() < counted && rig.stats.fuse.forgets_requested.get() == 5);
}

#[test]
fn lookups_are_taken_back_to_the_last() {
    let rig = rig();
    let first = found(&rig, ROOT, b"a").attr.ino;
    assert_eq!(found(&rig, ROOT, b"a").attr.ino, first, "one number per version while it is known");
    assert_eq!(rig.stats.fuse.inodes.get(), 2);
    rig.fs.forget(first, 1);
    assert!(rig.fs.getattr(first, None).is_ok());
    rig.fs.forget(first, 1);
    assert_eq!(Rig::errno(rig.fs.getattr(first, None)), libc::ESTALE);
    assert_eq!(Rig::errno(rig.fs.open(first, 0, None)), libc::ESTALE);
    assert_eq!(Rig::errno(rig.fs.lookup(first, b".")), libc::ESTALE);
    assert_eq!(rig.stats.fuse.inodes.get(), 1);
    assert_eq!(found(&rig, ROOT, b"a").attr.ino, first, "a version has the same number again");
    rig.fs.forget(ROOT, 1 << 40);
    assert!(rig.fs.getattr(ROOT, None).is_ok());
    // A count that does not add up ends at nothing rather than at a very large number.
    let d = found(&rig, ROOT, b"d").attr.ino;
    rig.fs.forget(d, 1000);
    assert_eq!(Rig::errno(rig.fs.getattr(d, None)), libc::ESTALE);
    rig.fs.forget(d, 1);
    rig.fs.forget(123_456_789, 1);
    assert_eq!(rig.stats.fuse.inodes.get(), 2);
}

#[test]
fn a_replaced_file_is_another_inode_and_old_readers_see_the_old_bytes() {
    let rig = rig();
    let old = found(&rig, ROOT, b"a").attr.ino;
    let fh = rig.fs.open(old, 0, None).unwrap().fh;
    rig.tree.put(b"a", 2, 20);
    rig.tree.cached.lock().push((b"a".to_vec(), 1));
    let new = found(&rig, ROOT, b"a").attr;
    assert_ne!(new.ino, old);
    assert_eq!((new.size, rig.fs.getattr(old, Some(fh)).unwrap().0.size), (20, 10));
    let bytes = rig.read(old, fh, 0, 100).unwrap();
    assert_eq!(bytes, (0..10).map(|i| byte(1, i)).collect::<Vec<_>>());
    // Not cached any more: an error, not the new bytes.
    rig.tree.cached.lock().clear();
    assert_eq!(Rig::errno(rig.read(old, fh, 0, 100)), libc::ESTALE);
    rig.tree.remove(b"a");
    assert_eq!(Rig::errno(rig.read(old, fh, 0, 100)), libc::ESTALE);
    // The version comes back while its inode is known: the same inode again.
    rig.tree.put(b"a", 1, 10);
    assert_eq!(found(&rig, ROOT, b"a").attr.ino, old);
    assert_eq!(rig.read(old, fh, 8, 100).unwrap(), [byte(1, 8), byte(1, 9)]);
}

#[test]
fn an_open_asks_again_only_after_the_attribute_cache_time() {
    let rig = rig();
    let a = found(&rig, ROOT, b"a").attr.ino;
    let lookups = || rig.tree.lookups.load(Ordering::Relaxed);
    let before = lookups();
    rig.pass(1999);
    rig.fs.open(a, 0, None).unwrap();
    assert_eq!(lookups(), before);
    rig.pass(2);
    rig.fs.open(a, 0, None).unwrap();
    rig.fs.open(a, 0, None).unwrap();
    assert_eq!(lookups(), before + 1);
    rig.tree.put(b"a", 2, 10);
    rig.pass(2001);
    assert_eq!(Rig::errno(rig.fs.open(a, 0, None)), libc::ESTALE);
    rig.tree.remove(b"a");
    assert_eq!(Rig::errno(rig.fs.open(a, 0, None)), libc::ESTALE);
    rig.tree.fail_next("lookup", ErrorKind::Timeout);
    assert_eq!(Rig::errno(rig.fs.open(a, 0, None)), libc::ETIMEDOUT);
    assert_eq!(rig.stats.fuse.open_handles.get(), 3);
}

#[test]
fn a_forgotten_inode_lives_in_its_handles() {
    let rig = rig();
    let a = found(&rig, ROOT, b"a").attr.ino;
    let fh = rig.fs.open(a, 0, None).unwrap().fh;
    rig.fs.forget(a, 1);
    assert_eq!(rig.read(a, fh, 9, 5).unwrap(), [byte(1, 9)]);
    assert_eq!(rig.fs.getattr(a, Some(fh)).unwrap().0.size, 10);
    assert_eq!(Rig::errno(rig.fs.getattr(a, None)), libc::ESTALE);
    rig.fs.release(fh).unwrap();
    assert_eq!(Rig::errno(rig.read(a, fh, 9, 5)), libc::EBADF);
    assert_eq!(rig.stats.fuse.open_handles.get(), 0);
}

#[test]
fn directories_are_asked_for_after_their_time_and_may_vanish() {
    let rig = rig();
    let d = found(&rig, ROOT, b"d").attr.ino;
    let before = rig.tree.lookups.load(Ordering::Relaxed);
    rig.fs.getattr(d, None).unwrap();
    assert_eq!(rig.tree.lookups.load(Ordering::Relaxed), before);
    rig.pass(2001);
    rig.fs.getattr(d, None).unwrap();
    assert_eq!(rig.tree.lookups.load(Ordering::Relaxed), before + 1);
    rig.pass(2001);
    rig.tree.put(b"d", 1, 1);
    assert_eq!(Rig::errno(rig.fs.getattr(d, None)), libc::ESTALE);
    assert_ne!(found(&rig, ROOT, b"d").attr.ino, d);
    rig.tree.dir(b"d");
    assert_eq!(found(&rig, ROOT, b"d").attr.ino, d, "a directory's inode is bound to its path");
}

#[test]
fn reads_end_at_the_end_and_are_never_short_before() {
    let rig = rig();
    let f = rig.walk(b"d/f").unwrap();
    let fh = rig.fs.open(f, 0, None).unwrap().fh;
    let size = 3 * BLOCK + 5;
    assert_eq!(rig.read(f, fh, size, 10).unwrap().len(), 0);
    assert_eq!(rig.read(f, fh, u64::MAX, 10).unwrap().len(), 0);
    assert_eq!(rig.read(f, fh, size - 3, 10).unwrap().len(), 3);
    assert_eq!(rig.read(f, fh, 0, 0).unwrap().len(), 0);
    rig.tree.short.store(true, Ordering::Relaxed);
    assert_eq!(Rig::errno(rig.read(f, fh, 0, 100)), libc::EIO);
    rig.tree.short.store(false, Ordering::Relaxed);
    for (kind, errno) in [
        (ErrorKind::Timeout, libc::ETIMEDOUT),
        (ErrorKind::Unavailable, libc::EHOSTDOWN),
        (ErrorKind::Corrupt, libc::EIO),
    ] {
        rig.tree.fail_next("read", kind);
        assert_eq!(Rig::errno(rig.read(f, fh, 0, 100)), errno);
    }
    assert_eq!(rig.read(f, fh, 7, 2).unwrap(), [byte(1, 7), byte(1, 8)]);
}

#[test]
fn extended_attributes() {
    let rig = rig();
    let (a, d, l) = (rig.walk(b"a").unwrap(), rig.walk(b"d").unwrap(), rig.walk(b"l").unwrap());
    let get = |ino, name: &str| rig.fs.getxattr(ino, name.as_bytes());
    assert_eq!(get(a, "user.spurline.version").unwrap(), b"v1");
    assert_eq!(get(a, "user.spurline.etag").unwrap(), b"\"1\"");
    assert_eq!(Rig::errno(get(a, "user.spurline.staged")), libc::ENODATA);
    rig.tree.put(b"staged", STAGED_VERSION, 10);
    let staged = rig.walk(b"staged").unwrap();
    assert_eq!(get(staged, "user.spurline.staged").unwrap(), b"1");
    assert_eq!(rig.fs.listxattr(staged).unwrap(), b"");
    // The version stays after the upload, and the nodes know of the upload.
    rig.tree.put(b"uploaded", STAGED_VERSION, 10);
    let uploaded = rig.walk(b"uploaded").unwrap();
    assert_eq!(Rig::errno(get(uploaded, "user.spurline.staged")), libc::ENODATA);
    assert_eq!(get(a, "user.spurline.source").unwrap(), b"s3://bucket/prefix/a");
    assert_eq!(get(d, "user.spurline.source").unwrap(), b"s3://bucket/prefix/d");
    assert_eq!(Rig::errno(get(d, "user.spurline.version")), libc::ENODATA);
    assert_eq!(Rig::errno(get(a, "user.other")), libc::ENODATA);
    assert_eq!(Rig::errno(get(a, "system.posix_acl_access")), libc::EOPNOTSUPP);
    assert_eq!(Rig::errno(get(a, "security.selinux")), libc::EOPNOTSUPP);
    // Not listed: cp -a and tar --xattrs would copy them.
    for ino in [a, d, l] {
        assert_eq!(rig.fs.listxattr(ino).unwrap(), b"");
    }
}

#[test]
fn access_by_mode_bits() {
    let rig = rig();
    let a = rig.walk(b"a").unwrap();
    let d = rig.walk(b"d").unwrap();
    let (r, x, w) = (libc::R_OK, libc::X_OK, libc::W_OK);
    for (ino, mask, uid, gid, errno) in [
        (a, libc::F_OK, 99, 99, 0),
        (a, r, 7, 99, 0),
        (a, r, 99, 8, 0),
        (a, r, 99, 99, libc::EACCES),
        (a, x, 7, 8, libc::EACCES),
        (a, r, 0, 0, 0),
        (a, x, 0, 0, libc::EACCES),
        (a, w, 0, 0, libc::EROFS),
        (d, r | x, 99, 99, 0),
        (d, x, 0, 0, 0),
    ] {
        let caller = FsCaller { uid, gid, ..FsCaller::default() };
        let got = rig.fs.access(ino, mask, &caller).err().map_or(0, |error| error.errno());
        assert_eq!(got, errno, "mask {mask} by {uid}:{gid}");
    }
}

/// Where the kernel checks no modes (`no_default_permissions`), `cd` and access(2) grant what reading grants.
#[test]
fn access_without_checked_modes() {
    let rig =
        Rig::new(FsConfig { check_modes: false, dir_mode: Some(0o700), file_mode: Some(0o600), ..FsConfig::default() });
    rig.tree.dir(b"d");
    rig.tree.put(b"a", 1, 10);
    let (a, d) = (rig.walk(b"a").unwrap(), rig.walk(b"d").unwrap());
    let caller = FsCaller { uid: 99, gid: 99, ..FsCaller::default() };
    assert!(rig.fs.access(d, libc::X_OK | libc::R_OK, &caller).is_ok());
    assert!(rig.fs.access(a, libc::R_OK, &caller).is_ok());
    assert_eq!(Rig::errno(rig.fs.access(a, libc::X_OK, &caller)), libc::EACCES, "it is not executable at all");
    assert_eq!(Rig::errno(rig.fs.access(a, libc::W_OK, &caller)), libc::EROFS);
}

#[test]
fn statfs_is_held_and_survives_an_outage() {
    let rig = rig();
    let first = rig.fs.statfs().unwrap();
    assert_eq!((first.blocks * 4096, first.free * 4096, first.files, first.name_max), (1 << 40, 1 << 39, 77, 255));
    rig.fs.statfs().unwrap();
    assert_eq!(rig.tree.capacities.load(Ordering::Relaxed), 1);
    rig.pass(1001);
    rig.tree.fail_next("capacity", ErrorKind::Unavailable);
    assert_eq!(rig.fs.statfs().unwrap(), first);
    let rig = Rig::new(FsConfig::default());
    rig.tree.fail_next("capacity", ErrorKind::Unavailable);
    assert_eq!(Rig::errno(rig.fs.statfs()), libc::EHOSTDOWN);
}

/// A kernel that checks the rules of passthrough.
#[derive(Default)]
struct Kernel {
    next: AtomicU64,
    live: Arc<Mutex<Vec<i32>>>,
    refuse: Mutex<bool>,
}

struct KernelId(i32, Arc<Mutex<Vec<i32>>>);

impl RegisteredBacking for KernelId {
    fn backing_id(&self) -> i32 {
        self.0
    }
}

impl Drop for KernelId {
    fn drop(&mut self) {
        self.1.lock().retain(|id| *id != self.0);
    }
}

impl RegisterBacking for Kernel {
    fn register_file(&self, _file: &File) -> io::Result<Box<dyn RegisteredBacking>> {
        if *self.refuse.lock() {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed) as i32;
        self.live.lock().push(id);
        Ok(Box::new(KernelId(id, Arc::clone(&self.live))))
    }
}

#[test]
fn passthrough_and_cached_opens_never_mix() {
    let rig = Rig::new(FsConfig { passthrough_min: 1000, ..FsConfig::default() });
    rig.tree.put(b"big", 1, 2000);
    rig.tree.put(b"small", 1, 999);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[0; 2000]).unwrap();
    let kernel = Kernel::default();
    let (big, small) = (rig.walk(b"big").unwrap(), rig.walk(b"small").unwrap());
    let open = |ino| {
        let opened = rig.fs.open(ino, 0, Some(&kernel)).unwrap();
        (opened.fh, opened.backing.map(|backing| backing.id()))
    };
    // Not cached whole: cached mode, and it stays so while one such open lives.
    let (first, mode) = open(big);
    assert_eq!(mode, None);
    *rig.tree.backing.lock() = Some(Arc::new(file));
    let (second, mode) = open(big);
    assert_eq!(mode, None);
    rig.fs.release(first).unwrap();
    rig.fs.release(second).unwrap();
    // Now passed through, with one number for all; an open that may not register shares it too.
    let (first, id) = open(big);
    assert_eq!(id, Some(0));
    assert_eq!(open(big).1, Some(0));
    assert_eq!(rig.fs.open(big, 0, None).unwrap().backing.map(|b| b.id()), Some(0));
    rig.fs.release(first).unwrap();
    assert_eq!(rig.stats.fuse.passthrough_opens.get(), 3);
    assert_eq!(*kernel.live.lock(), [0]);
    assert_eq!(open(small).1, None);

    let other = Rig::new(FsConfig { passthrough_min: 1000, ..FsConfig::default() });
    other.tree.put(b"big", 1, 2000);
    other.tree.put(b"long", 1, 2001);
    *other.tree.backing.lock() = rig.tree.backing.lock().clone();
    let ino = other.walk(b"big").unwrap();
    *kernel.refuse.lock() = true;
    let cached = other.fs.open(ino, 0, Some(&kernel)).unwrap();
    assert!(cached.backing.is_none(), "what the kernel refuses is read in cached mode");
    other.fs.release(cached.fh).unwrap();
    *kernel.refuse.lock() = false;
    let passed = other.fs.open(ino, 0, Some(&kernel)).unwrap();
    assert_eq!(passed.backing.as_ref().map(|backing| backing.id()), Some(1));
    other.fs.release(passed.fh).unwrap();
    drop(passed);
    assert_eq!(*kernel.live.lock(), [0], "the last release takes the number back");
    let long = other.walk(b"long").unwrap();
    assert!(
        other.fs.open(long, 0, Some(&kernel)).unwrap().backing.is_none(),
        "a file of another length is not trusted"
    );
    *rig.tree.backing.lock() = None;
}

#[test]
fn a_sequential_reader_is_read_ahead() {
    let rig = Rig::new(FsConfig::default());
    rig.tree.put(b"f", 1, 64 * BLOCK);
    let ino = rig.walk(b"f").unwrap();
    let fh = rig.fs.open(ino, 0, None).unwrap().fh;
    for i in 0..128 {
        rig.read(ino, fh, i * BLOCK / 2, BLOCK as usize / 2).unwrap();
    }
    let mut blocks: Vec<u32> = rig.tree.prefetched.lock().iter().flat_map(|(_, range)| range.clone()).collect();
    let requested = blocks.len();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(requested, blocks.len(), "no block is requested twice");
    assert_eq!(blocks, (1..64).collect::<Vec<_>>());
}

#[test]
fn no_lock_is_held_while_a_read_waits() {
    let rig = rig();
    let f = rig.walk(b"d/f").unwrap();
    let fh = rig.fs.open(f, 0, None).unwrap().fh;
    *rig.tree.stalled.lock() = true;
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|i| {
                scope.spawn({
                    let rig = &rig;
                    move || rig.read(f, fh, i, 1).unwrap()
                })
            })
            .collect();
        while rig.tree.waiting.load(Ordering::SeqCst) < 4 {
            std::thread::yield_now();
        }
        // Everything else goes on meanwhile, the same file and handle included.
        assert_eq!(found(&rig, ROOT, b"a").attr.size, 10);
        rig.fs.getattr(f, Some(fh)).unwrap();
        let again = rig.fs.open(f, 0, None).unwrap().fh;
        rig.fs.release(again).unwrap();
        rig.fs.release(fh).unwrap();
        *rig.tree.stalled.lock() = false;
        rig.tree.go_on.notify_all();
        for (i, reader) in readers.into_iter().enumerate() {
            assert_eq!(reader.join().unwrap(), [byte(1, i as u64)]);
        }
    });
}

#[test]
fn a_directorys_attributes_hold_from_when_the_volume_said_them() {
    let rig = Rig::new(FsConfig { attr_ttl: Duration::from_millis(1000), ..FsConfig::default() });
    rig.tree.dir(b"d");
    let d = rig.walk(b"d").unwrap();
    rig.pass(700);
    assert_eq!(rig.fs.getattr(d, None).unwrap().1, Duration::from_millis(300));
    rig.pass(301);
    assert_eq!(rig.fs.getattr(d, None).unwrap().1, Duration::from_millis(1000));
}

/// Each lookup of a file that is being written finds another version of it, also the lookup of an open.
#[test]
fn a_file_that_is_being_written_can_be_opened_and_is_another_one_each_time() {
    let rig = Rig::new(FsConfig { attr_ttl: Duration::ZERO, ..FsConfig::default() });
    rig.tree.put(b"a", 1, 10);
    rig.tree.written.store(true, Ordering::Relaxed);
    let [one, other] = [(); 2].map(|()| found(&rig, ROOT, b"a").attr.ino);
    assert_ne!(one, other);
    for ino in [one, other] {
        let fh = rig.fs.open(ino, libc::O_RDONLY, None).unwrap().fh;
        assert!(matches!(rig.fs.read(ino, fh, 0, &mut [0; 10]).unwrap(), spurline_volume::ReadData::Copied(10)));
    }
    rig.tree.written.store(false, Ordering::Relaxed);
    // Data read during the write is not served to a later open.
    assert!(matches!(rig.fs.open(other, libc::O_RDONLY, None), Err(spurline_fs::FsError::Stale(_))));
    let ino = found(&rig, ROOT, b"a").attr.ino;
    assert!(ino != one && ino != other);
    rig.fs.open(ino, libc::O_RDONLY, None).unwrap();
    rig.tree.written.store(true, Ordering::Relaxed);
    rig.fs.open(ino, libc::O_RDONLY, None).unwrap();
    rig.tree.put(b"a", 2, 10);
    assert!(matches!(rig.fs.open(ino, libc::O_RDONLY, None), Err(spurline_fs::FsError::Stale(_))));
}
