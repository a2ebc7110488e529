//! A source on NFS that goes stale under a writable mount: a file that the server replaces, and an export that is taken
//! back. The server is the kernel's own; nothing of it is a mount of Spurline.

use spurline_rig::nfs_rig::{BIN, NfsRig, sh, start};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// Repeats a call until it has this errno; NFS clients keep attributes and pages for a while.
fn becomes_stale(what: &str, mut call: impl FnMut() -> io::Result<()>) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match call() {
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => return,
            other => assert!(Instant::now() < deadline, "{what}: {other:?} and no ESTALE"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Repeats a call until it succeeds; every failure before that is `ESTALE`.
fn recovers<T>(what: &str, mut call: impl FnMut() -> io::Result<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match call() {
            Ok(value) => return value,
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{what}: {error}");
                assert!(Instant::now() < deadline, "{what}: {error}");
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn write_and_sync(file: &File) -> io::Result<()> {
    file.write_all_at(b"more", 0)?;
    file.sync_all()
}

/// With `keeps_open`, the server keeps a removed file for a client that has it open, as NFSv4 can.
fn check_stale_source(at: &Path, disk: &Path, export: &str, keeps_open: bool) {
    fs::write(at.join("kept"), "kept").unwrap();
    fs::write(at.join("gone"), "old").unwrap();
    let both = |name| OpenOptions::new().read(true).write(true).open(at.join(name)).unwrap();
    let (gone, kept) = (both("gone"), both("kept"));
    // The server removes a file that is open here, and makes another one of that name.
    fs::remove_file(disk.join("gone")).unwrap();
    fs::write(disk.join("gone"), "another").unwrap();
    if keeps_open {
        write_and_sync(&gone).unwrap();
    } else {
        becomes_stale("a removed file", || write_and_sync(&gone));
    }
    drop(gone);
    write_and_sync(&kept).unwrap();
    recovers("the file in its place", || match fs::read(at.join("gone"))? {
        bytes if bytes == b"another" => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::ESTALE)),
    });
    // The export goes, and everything with it; then it is back.
    sh(&format!("exportfs -u 10.77.0.0/16:{export}; exportfs -f"));
    becomes_stale("a write without the export", || write_and_sync(&kept));
    becomes_stale("a new file without the export", || fs::write(at.join("new"), "new"));
    sh(&format!("exportfs -o rw,sync,no_root_squash,no_subtree_check,fsid=77 10.77.0.0/16:{export}"));
    recovers("a new file", || fs::write(at.join("new"), "new"));
    recovers("the file that stayed open", || write_and_sync(&kept));
    drop(kept);
    for (name, bytes) in [("kept", "more"), ("gone", "another"), ("new", "new")] {
        assert_eq!(fs::read_to_string(at.join(name)).unwrap(), bytes, "{name}");
        assert_eq!(fs::read_to_string(disk.join(name)).unwrap(), bytes, "{name} on the server");
        fs::remove_file(at.join(name)).unwrap();
    }
}

#[test]
#[ignore = "needs the virtual machine"]
fn guest_a_source_on_nfs_that_goes_stale_gives_its_errno_and_nothing_else_breaks() {
    let rig = NfsRig::new("stale");
    let (dir, export) = (rig.dir().to_owned(), "/stale/disk");
    sh(&format!(
        "mkdir {dir}/disk {dir}/other; modprobe nfsd; mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd
        exportfs -o rw,sync,no_root_squash,no_subtree_check,fsid=77 10.77.0.0/16:{export}
        # A server that exports nothing else refuses its clients: EACCES.
        exportfs -o ro,no_subtree_check,fsid=78 10.77.0.0/16:/stale/other
        # How long the first opens wait for clients of an earlier server; it can be set while none runs.
        rpc.nfsd 0
        echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime
        rpc.nfsd 4; pgrep rpc.mountd || rpc.mountd"
    ));
    for (options, nodes) in [("vers=3,proto=tcp,nolock", true), ("vers=4.2,proto=tcp", false)] {
        sh(&format!("timeout 60 mount -t nfs -o {options},actimeo=1 10.77.0.1:{export} {dir}/src"));
        let node = nodes.then(|| {
            let words = format!("--cache-dir {dir}/node --cache-size 32M --buffer-size 64M --metrics none");
            let log = format!("{dir}/node.log");
            let words = format!("--writable --source {dir}/src --group-port 7310 {words}");
            let node = start(&format!("exec {BIN} node {words}"), &log);
            sh(&format!("for n in $(seq 60); do grep -q 'over tcp' {log} && exit; sleep 1; done; cat {log}; exit 1"));
            node
        });
        rig.mount(&[&["--rw"][..], if nodes { &["--registry", "static:127.0.0.1:7310"] } else { &[] }].concat());
        check_stale_source(Path::new(&rig.at()), &Path::new(&dir).join("disk"), export, options.starts_with("vers=4"));
        rig.unmount_after_refusals();
        drop(node);
        sh(&format!("for n in 1 2 3 4 5 6 7 8 9; do umount {dir}/src && exit; sleep 1; done; exit 1"));
        println!("{options}: a stale source");
    }
    sh(&format!("for path in {export} /stale/other; do exportfs -u 10.77.0.0/16:$path; done; exportfs -f; rpc.nfsd 0"));
}
