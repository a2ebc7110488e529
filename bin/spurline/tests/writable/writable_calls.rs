//! System calls with unusual flags and values: their results on a writable mount are those on the bare directory.

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps, XattrFlags, fallocate,
    getxattr, listxattr, renameat_with, seek, setxattr, utimensat,
};
use spurline_rig::writable_group::{Group, WAYS};
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// FUSE has no others.
const MODES_OF_FALLOCATE: [FallocateFlags; 6] = [
    FallocateFlags::empty(),
    FallocateFlags::KEEP_SIZE,
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE),
    FallocateFlags::PUNCH_HOLE,
    FallocateFlags::ZERO_RANGE,
    FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE),
];

/// An access ACL as the kernel stores it: the owner, user 1 with the right to read, the group, the mask, and others.
const ACL: [u8; 44] = [
    2, 0, 0, 0, //
    1, 0, 6, 0, 255, 255, 255, 255, //
    2, 0, 4, 0, 1, 0, 0, 0, //
    4, 0, 4, 0, 255, 255, 255, 255, //
    16, 0, 4, 0, 255, 255, 255, 255, //
    32, 0, 0, 0, 255, 255, 255, 255,
];

struct CallResults(Vec<String>);

impl CallResults {
    fn note(&mut self, call: &str, result: impl Debug) {
        self.0.push(format!("{call}: {result:?}"));
    }
}

fn allocate(folder: &Path, results: &mut CallResults) {
    for mode in MODES_OF_FALLOCATE {
        let path = folder.join("space");
        fs::write(&path, vec![7; 5 * 4096 + 100]).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        results.note(&format!("{mode:?}"), fallocate(&file, mode, 4096, 8192));
        results.note(&format!("{mode:?} behind the end"), fallocate(&file, mode, 40_960, 4096));
        // Allocated space without bytes may count as a hole, or not.
        if mode.contains(FallocateFlags::PUNCH_HOLE) {
            results.note(&format!("the first hole after {mode:?}"), seek(&file, SeekFrom::Hole(0)));
        }
        drop(file);
        let bytes = fs::read(&path).unwrap();
        results.note(
            &format!("length and sum after {mode:?}"),
            (bytes.len(), bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>()),
        );
    }
}

fn rename(folder: &Path, results: &mut CallResults) {
    let flags = [
        RenameFlags::empty(),
        RenameFlags::NOREPLACE,
        RenameFlags::EXCHANGE,
        RenameFlags::NOREPLACE | RenameFlags::EXCHANGE,
    ];
    for flags in flags {
        for (old, new) in [("file", "other"), ("file", "none"), ("none", "file"), ("dir", "file"), ("file", "dir")] {
            fs::write(folder.join("file"), "file").unwrap();
            fs::write(folder.join("other"), "other").unwrap();
            fs::create_dir(folder.join("dir")).unwrap();
            let renamed = renameat_with(CWD, folder.join(old), CWD, folder.join(new), flags);
            let mut names: Vec<_> = ["dir", "file", "none", "other"].map(|name| (name, folder.join(name))).into();
            names.retain(|(_, path)| path.symlink_metadata().is_ok());
            let found: Vec<_> = names.iter().map(|(name, path)| (*name, fs::read_to_string(path).ok())).collect();
            results.note(&format!("{flags:?} {old} {new}"), (renamed, found));
            for (_, path) in names {
                if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) }.unwrap();
            }
        }
    }
}

fn attributes(folder: &Path, results: &mut CallResults) {
    let path = folder.join("attributes");
    File::create(&path).unwrap();
    for seconds in [-1, -86_400 * 365, 0, i64::from(i32::MAX) + 1, 8_583_840_000] {
        let time = Timespec { tv_sec: seconds, tv_nsec: 987_654_321 };
        let times = Timestamps { last_access: time, last_modification: time };
        let set = utimensat(CWD, &path, &times, AtFlags::empty());
        let seen = fs::metadata(&path).unwrap();
        results.note("times", (set, seen.atime(), seen.mtime(), seen.mtime_nsec()));
    }
    for flags in [XattrFlags::REPLACE, XattrFlags::CREATE, XattrFlags::CREATE, XattrFlags::REPLACE, XattrFlags::empty()]
    {
        results.note("setxattr", setxattr(&path, "user.name", b"value", flags));
    }
    let mut value = [0; 64];
    results.note("getxattr into too little", getxattr(&path, "user.name", &mut value[..2]));
    results.note("length of an attribute", getxattr(&path, "user.name", &mut value[..0]));
    results.note("ACL", setxattr(&path, "system.posix_acl_access", &ACL, XattrFlags::empty()));
    results.note("ACL", (getxattr(&path, "system.posix_acl_access", &mut value[..]), value));
    results.note("mode with an ACL", fs::metadata(&path).unwrap().mode());
    results.note("broken ACL", setxattr(&path, "system.posix_acl_access", &ACL[..7], XattrFlags::empty()));
    results.note("names", listxattr(&path, &mut value[..]).is_ok());
}

fn direct(folder: &Path, results: &mut CallResults) {
    let path = folder.join("direct");
    let flags = OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).custom_flags(flags).open(&path);
    let file = file.unwrap();
    let mut memory = vec![3u8; 4 * 4096];
    let start = memory.as_ptr().align_offset(4096);
    results.note("write", file.write_at(&memory[start..start + 8192], 4096).map_err(|error| error.raw_os_error()));
    memory.fill(0);
    results.note("read", file.read_at(&mut memory[start..start + 4096], 8192).map_err(|error| error.raw_os_error()));
    results.note("bytes", memory[start..start + 4096].iter().all(|byte| *byte == 3));
    results.note("length", fs::metadata(&path).unwrap().len());
    let unnamed = rustix::fs::open(folder, OFlags::TMPFILE | OFlags::EXCL | OFlags::WRONLY, Mode::RUSR).unwrap();
    let linked = rustix::fs::linkat(&unnamed, c"", CWD, folder.join("linked"), AtFlags::EMPTY_PATH);
    results.note("link of an unnamed file that may get no name", linked);
}

fn call_all(folder: &Path) -> Vec<String> {
    let mut results = CallResults(Vec::new());
    allocate(folder, &mut results);
    rename(folder, &mut results);
    attributes(folder, &mut results);
    direct(folder, &mut results);
    results.0
}

#[test]
fn unusual_calls_have_the_results_of_the_bare_directory() {
    for (nodes, way) in WAYS.into_iter().map(|way| (0, way)).chain([(2, &[][..])]) {
        let Some(group) = Group::start(nodes) else { return };
        let bare = group.source.join("bare");
        fs::create_dir(&bare).unwrap();
        let mount = group.mount("mnt", 0, way);
        fs::create_dir(mount.path("mounted")).unwrap();
        let wanted = call_all(&bare);
        let seen = call_all(&mount.path("mounted"));
        for (seen, wanted) in seen.iter().zip(&wanted) {
            assert_eq!(seen, wanted, "{nodes} nodes, {way:?}");
        }
        assert_eq!(seen.len(), wanted.len());
        mount.unmount();
    }
}
