//! Where the bytes of a write land: at the end or at an offset, as the open file's flags say now, and pages of a memory map
//! at their own place.

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use spurline_rig::writable_group::{Group, WAYS};
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

const PAGE: usize = 4096;

/// The mounts that the tests run on: lone ones, and one through a node.
fn mounts() -> impl Iterator<Item = (usize, &'static [&'static str])> {
    WAYS.into_iter().map(|way| (0, way)).chain([(1, &[][..])])
}

/// The first page of a file, mapped for stores.
struct MappedPage(*mut libc::c_void);

impl MappedPage {
    fn of(file: &File) -> MappedPage {
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a new mapping of an open file, removed when the value is dropped.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, libc::MAP_SHARED, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        MappedPage(start)
    }

    fn store(&self, bytes: &[u8]) {
        // SAFETY: the bytes are fewer than the mapping has, and nothing refers to it meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.cast(), bytes.len()) };
        // SAFETY: the mapping that was made with this length.
        assert_eq!(unsafe { libc::msync(self.0, PAGE, libc::MS_SYNC) }, 0);
    }
}

impl Drop for MappedPage {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made with this length.
        unsafe { libc::munmap(self.0, PAGE) };
    }
}

#[test]
fn stores_into_a_map_land_at_their_place_beside_appends() {
    for (nodes, way) in mounts() {
        let Some(group) = Group::start(nodes) else { return };
        let mount = group.mount("mnt", 0, way);
        let (path, source) = (mount.path("file"), group.source.join("file"));
        let both = || OpenOptions::new().read(true).append(true).create(true).open(&path).unwrap();
        let mut log = both();
        log.write_all(&[b'x'; PAGE]).unwrap();
        MappedPage::of(&log).store(b"ABC");
        log.write_all(b"line\n").unwrap();
        log.sync_all().unwrap();
        let seen = || {
            let bytes = fs::read(&source).unwrap();
            (bytes.len(), bytes[..6].to_vec(), bytes[PAGE..].to_vec())
        };
        assert_eq!(seen(), (PAGE + 5, b"ABCxxx".to_vec(), b"line\n".to_vec()), "{nodes} nodes, {way:?}");
        // Mapped through a plain handle and one that appends: the kernel sends the pages through either.
        let plain = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let (one, other) = (MappedPage::of(&plain), MappedPage::of(&log));
        one.store(b"DE");
        other.store(b"FGHI");
        drop((one, other));
        plain.sync_all().unwrap();
        assert_eq!(seen(), (PAGE + 5, b"FGHIxx".to_vec(), b"line\n".to_vec()), "{nodes} nodes, {way:?}");
        drop((plain, log));
        mount.unmount();
    }
}

#[test]
fn a_program_turns_appending_on_and_off() {
    for (nodes, way) in mounts() {
        let Some(group) = Group::start(nodes) else { return };
        let (one, two) = (group.mount("one", 0, way), group.mount("two", 0, way));
        let source = group.source.join("log");
        let mut first = File::create(one.path("log")).unwrap();
        fcntl_setfl(&first, fcntl_getfl(&first).unwrap() | OFlags::APPEND).unwrap();
        let mut second = OpenOptions::new().append(true).open(two.path("log")).unwrap();
        for n in 0..50 {
            first.write_all(format!("A{n}\n").as_bytes()).unwrap();
            // The next record of the other mount comes after.
            first.sync_data().unwrap();
            second.write_all(format!("B{n}\n").as_bytes()).unwrap();
            second.sync_data().unwrap();
        }
        let log = fs::read_to_string(&source).unwrap();
        let wanted: String = (0..50).map(|n| format!("A{n}\nB{n}\n")).collect();
        assert_eq!(log, wanted, "{nodes} nodes, {way:?}");
        // The kernel writes the source's file itself, as it was opened.
        let passthrough = one.count("fuse", "passthrough_opens") > 0;
        for file in [&first, &second].into_iter().take(if passthrough { 0 } else { 2 }) {
            let before = fs::read(&source).unwrap().len();
            fcntl_setfl(file, fcntl_getfl(file).unwrap() - OFlags::APPEND).unwrap();
            file.write_all_at(b"here", 10).unwrap();
            file.sync_all().unwrap();
            let bytes = fs::read(&source).unwrap();
            assert_eq!((bytes.len(), &bytes[10..14]), (before, &b"here"[..]), "{nodes} nodes, {way:?}");
            fcntl_setfl(file, fcntl_getfl(file).unwrap() | OFlags::APPEND).unwrap();
            file.write_all_at(b"end\n", 10).unwrap();
            file.sync_all().unwrap();
            assert!(fs::read(&source).unwrap().ends_with(b"end\n"), "{nodes} nodes, {way:?}");
            fs::write(&source, vec![b'-'; before]).unwrap();
        }
        drop((first, second));
        one.unmount();
        two.unmount();
    }
}
