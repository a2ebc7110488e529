//! Writes a file of a directory, in this process or through the nodes of a group: no mount, no command line. The file is
//! locked meanwhile, and durable at the end.
//!
//! `cargo run -p spurline-runtime --example write_a_file DIRECTORY [static:NODE:PORT]`

use rustix::fs::OFlags;
use spurline_config::{Fault, HostLimits, RawMemory, RawVolume, SourceUrl, WritesConfig};
use spurline_fs::{
    CallerGroups, CreateMode, FileService, FileWrite, FsCaller, FsError, HandleRef, KernelSide, LockRequest, ROOT,
    RequestNumber,
};
use spurline_runtime::open_writable_files;
use spurline_types::{Size, Stats};
use spurline_volume::locks::LAST_BYTE;
use spurline_volume::writes::{FileLock, LockFamily, LockKind, LockRange, S_IFREG, WritePlace};
use std::sync::Arc;

const NAME: &[u8] = b"written-by-a-program";
const TEXT: &[u8] = b"written without a mount\n";

fn main() -> Result<(), Fault> {
    let mut words = std::env::args().skip(1);
    let source: SourceUrl = words.next().ok_or_else(|| usage("no source".to_owned()))?.parse().map_err(usage)?;

    // 100 MiB of memory, of which a part is for bytes that no node has made durable yet; everything else by default.
    let mut raw = RawVolume { memory: RawMemory { buffer_size: Size(100 << 20) }, ..RawVolume::new(source) };
    raw.group.registry = words.next().map(|registry| registry.parse().map_err(usage)).transpose()?;
    let config = raw.check_writable(WritesConfig::default(), &HostLimits::detect())?;
    let open = open_writable_files(&config, &Arc::new(Stats::default()))?;

    write_locked(&*open.service()).map_err(|error| Fault::failed(format!("{}: {error}", config.source), ""))?;
    // Bytes that nodes do not have yet would be lost with this process.
    open.finish()?;
    println!("{} bytes of {} written", TEXT.len(), String::from_utf8_lossy(NAME));
    Ok(())
}

fn write_locked(files: &dyn FileService) -> Result<(), FsError> {
    // The user of this process; the source checks the rights by it and these groups.
    let caller = FsCaller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: CallerGroups::All(&[]),
        pid: std::process::id(),
        umask: 0o022,
        request: RequestNumber::NONE,
    };
    // A program keeps no pages, so it needs no notifications.
    let no_kernel = KernelSide::default();

    let how = CreateMode { flags: (OFlags::CREATE | OFlags::RDWR).bits(), mode: S_IFREG | 0o666 };
    let (entry, opened) = files.create(ROOT, NAME, how, &caller, &no_kernel)?;
    let file = HandleRef { ino: entry.ino, fh: opened.fh };

    // Waits until no other program, on any mount of the source, has a lock of the file.
    let range = LockRange { start: 0, end: LAST_BYTE };
    let lock = FileLock { family: LockFamily::Flock, owner: file.fh, range, kind: LockKind::Write };
    let request = LockRequest { lock, pid: std::process::id(), number: 1 };
    files.set_lock(file, &request, true, &caller, &no_kernel)?;

    let write = FileWrite { offset: 0, place: WritePlace::Offset, data: TEXT, lose_privileges: false };
    let written = files.write(file, &write, &caller)?;
    assert_eq!(written, TEXT.len(), "a file takes all bytes, or says why not");
    files.fsync(file, false)?;

    // The lock ends with the file.
    files.release(file.fh)?;
    files.forget(entry.ino, 1);
    Ok(())
}

fn usage(why: String) -> Fault {
    Fault::usage(why, "give a directory, and the registry of its nodes if there are some (static:NODE:PORT)")
}
