//! A directory on a file system that answers from cached attributes, as an NFS client does: a FUSE mount of which the kernel
//! holds names and attributes for an hour.

use spurline_object_store::OriginOptions;
use spurline_origin::open;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ESTALE: i32 = 116;
const ENOSYS: i32 = 38;
const ENOENT: i32 = 2;
/// The first file called `f`; the one that takes its place has the number after it.
const FIRST: u64 = 2;

/// The state of the server; the kernel is not notified of changes.
struct Server {
    node: AtomicU64,
    size: AtomicU64,
}

impl Server {
    /// The answer to a request, or none where none is awaited.
    fn answer(&self, request: &[u8]) -> Option<Result<Vec<u8>, i32>> {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let node = u64::from_ne_bytes(request[16..24].try_into().unwrap());
        let held = [3600u64.to_ne_bytes(); 2].concat();
        let attr = |node: u64| {
            let (mode, size) = if node == 1 { (0o40755u32, 0) } else { (0o100644, self.size.load(Ordering::SeqCst)) };
            // Number, size, blocks and three times; their nanoseconds; mode, links, owner, group, device, block size, flags.
            let mut attr: Vec<u8> = [node, size, 0, 1000, 1000, 1000].iter().flat_map(|n| n.to_ne_bytes()).collect();
            attr.extend([0, 0, 5, mode, 1, 0, 0, 0, 4096, 0].iter().flat_map(|n: &u32| n.to_ne_bytes()));
            attr
        };
        let now = self.node.load(Ordering::SeqCst);
        Some(Ok(match word(4) {
            // LOOKUP
            1 if request[40..].starts_with(b"f\0") => {
                [&now.to_ne_bytes()[..], &[0; 8], &held, &[0; 8], &attr(now)].concat()
            }
            1 => return Some(Err(ENOENT)),
            // FORGET, INTERRUPT, BATCH_FORGET
            2 | 36 | 42 => return None,
            // GETATTR
            3 if node != 1 && node != now => return Some(Err(ESTALE)),
            3 => [&held[..8], &[0; 8], &attr(node)].concat(),
            // INIT: the version, then a max_write in its place, and no feature.
            26 => {
                let mut words = [0u32; 16];
                (words[0], words[1], words[5]) = (7, 31, 4096);
                words.iter().flat_map(|n| n.to_ne_bytes()).collect()
            }
            // OPENDIR, RELEASEDIR
            27 => vec![0; 16],
            29 => vec![],
            _ => return Some(Err(ENOSYS)),
        }))
    }

    fn serve(&self, mut device: File) {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = match device.read(&mut buffer) {
                Ok(read) => read,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::NotFound) => continue,
                // It is unmounted.
                Err(_) => return,
            };
            let Some(answer) = self.answer(&buffer[..read]) else { continue };
            let (errno, body) = answer.map_or_else(|errno| (errno, vec![]), |body| (0, body));
            let head = [(16 + body.len() as u32).to_ne_bytes(), (-errno).to_ne_bytes()].concat();
            // The caller may be gone.
            let _ = device.write_all(&[&head[..], &buffer[8..16], &body].concat());
        }
    }
}

struct Mount(PathBuf);

impl Mount {
    fn make(at: &Path, server: &Arc<Server>) -> std::io::Result<Mount> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let words = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let words = std::ffi::CString::new(words).unwrap();
        rustix::mount::mount("held", at, "fuse", rustix::mount::MountFlags::empty(), words.as_c_str())?;
        let server = Arc::clone(server);
        std::thread::spawn(move || server.serve(device));
        Ok(Mount(at.into()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_lookup_asks_the_server_and_not_what_the_kernel_remembers() {
    let dir = tempfile::tempdir().unwrap();
    let server = Arc::new(Server { node: AtomicU64::new(FIRST), size: AtomicU64::new(10) });
    let _mount = match Mount::make(dir.path(), &server) {
        Ok(mount) => mount,
        Err(why) => return spurline_testkit::skip("mount", &format!("a FUSE file system can't be mounted: {why}")),
    };
    let store = open(dir.path().to_str().unwrap(), &OriginOptions::default(), Arc::default()).unwrap();
    let soon = || Instant::now() + Duration::from_secs(20);
    let by_the_kernel = || std::fs::symlink_metadata(dir.path().join("f")).unwrap().len();
    assert_eq!(store.lookup(b"f", soon()).unwrap().size, 10);
    // Written in place, by another machine.
    server.size.store(20, Ordering::SeqCst);
    assert_eq!(by_the_kernel(), 10, "the kernel holds attributes");
    assert_eq!(store.lookup(b"f", soon()).unwrap().size, 20);
    // Another file took its name, and it is gone.
    server.node.store(FIRST + 1, Ordering::SeqCst);
    server.size.store(30, Ordering::SeqCst);
    assert_eq!(by_the_kernel(), 20, "the kernel holds names");
    assert_eq!(store.lookup(b"f", soon()).unwrap().size, 30);
    assert!(store.lookup(b"other", soon()).is_err());
}
