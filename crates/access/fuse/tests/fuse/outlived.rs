//! What the kernel does with a FUSE connection whose process is killed while another process keeps the descriptor: the facts
//! that recoverable mounts rely on (docs/design/survive.md). A minimal server in this file speaks the protocol by itself.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Set in a server's process: what that server does with reads.
const SERVER_VARIABLE: &str = "SPURLINE_TEST_OUTLIVED";
/// `FUSE_NOTIFY_RESEND`.
const NOTIFY_RESEND: i32 = 7;
/// The mark of a request that is sent again.
const RESENT_BIT: u64 = 1 << 63;
const DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;
const DEV_IOC_BACKING_OPEN: libc::c_ulong = 0x4010_e501;
/// INIT_EXT, and PASSTHROUGH in the second word.
const INIT_EXT: u32 = 1 << 30;
const PASSTHROUGH: u32 = 1 << (37 - 32);
const FOPEN_DIRECT_IO: u32 = 1;
/// Without FLUSH requests: a program that starts another closes files, and would wait for a server.
const FOPEN_NOFLUSH: u32 = 1 << 5;
const FOPEN_PASSTHROUGH: u32 = 1 << 7;
const FILE_LEN: u64 = 1 << 16;
const FILE_INO: u64 = 2;

/// How a server treats requests.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Answer,
    /// Takes a read and never answers.
    HoldReads,
}

/// A request as far as these trials look.
struct Seen {
    opcode: u32,
    unique: u64,
}

/// A mount without a server, and the descriptor of its connection.
struct Kept {
    device: OwnedFd,
    dir: tempfile::TempDir,
    /// The number of the backing file that servers in this process answer an open with; 0 for none.
    backing: Arc<AtomicI32>,
}

impl Kept {
    fn new() -> Option<Kept> {
        // SAFETY: geteuid has no conditions.
        if unsafe { libc::geteuid() } != 0 || !Path::new("/dev/fuse").exists() {
            let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|word| word == "fuse"), "no root or no /dev/fuse");
            println!("SKIP: mounting needs root and /dev/fuse");
            return None;
        }
        let device: OwnedFd = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap().into();
        let dir = tempfile::tempdir().unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let target = std::ffi::CString::new(dir.path().as_os_str().as_encoded_bytes()).unwrap();
        let kind = c"fuse.outlived";
        // SAFETY: all strings live through the call, and the descriptor is open.
        let answer = unsafe { libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast()) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
        Some(Kept { device, dir, backing: Arc::default() })
    }

    fn file(&self) -> std::path::PathBuf {
        self.dir.path().join("file")
    }

    /// A server in this process.
    fn serve_here(&self, manner: Manner) -> (JoinHandle<()>, mpsc::Receiver<Seen>) {
        let device: File = self.device.try_clone().unwrap().into();
        let (sender, seen) = mpsc::channel();
        let backing = Arc::clone(&self.backing);
        let server = std::thread::spawn(move || {
            serve(&device, manner, &backing, &mut |request| {
                let _ = sender.send(request);
            });
        });
        (server, seen)
    }

    /// A server in a process of its own, with this descriptor as standard input.
    fn serve_there(&self, device: &OwnedFd, word: &str) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "outlived::server_process", "--nocapture", "--ignored"])
            .env(SERVER_VARIABLE, word)
            .stdin(Stdio::from(device.try_clone().unwrap()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn request_again(&self) {
        let mut note = Vec::from(16u32.to_ne_bytes());
        note.extend(NOTIFY_RESEND.to_ne_bytes());
        note.extend(0u64.to_ne_bytes());
        File::from(self.device.try_clone().unwrap()).write_all(&note).unwrap();
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let target = std::ffi::CString::new(self.dir.path().as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the path ends with a NUL.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Another channel of the connection.
fn clone_channel(device: &OwnedFd) -> OwnedFd {
    let fresh: OwnedFd = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap().into();
    let session = device.as_raw_fd() as u32;
    // SAFETY: both descriptors are open, and the kernel reads 4 bytes.
    let answer = unsafe { libc::ioctl(fresh.as_raw_fd(), DEV_IOC_CLONE as _, &raw const session) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    fresh
}

fn register_backing(device: &OwnedFd, file: &File) -> i32 {
    let map: [u32; 4] = [file.as_raw_fd() as u32, 0, 0, 0];
    // SAFETY: both descriptors are open, and the kernel reads 16 bytes.
    unsafe { libc::ioctl(device.as_raw_fd(), DEV_IOC_BACKING_OPEN as _, map.as_ptr()) }
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn long_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Attributes of the root or of the file.
fn attr_of(ino: u64) -> Vec<u8> {
    let mut attr = Vec::new();
    let (size, mode) = if ino == 1 { (0, libc::S_IFDIR | 0o755) } else { (FILE_LEN, libc::S_IFREG | 0o644) };
    for long in [ino, size, size / 512, 0, 0, 0] {
        attr.extend(long.to_ne_bytes());
    }
    for word in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        attr.extend(word.to_ne_bytes());
    }
    attr
}

fn byte_of(offset: u64) -> u8 {
    (offset / 512) as u8
}

/// Serves until the connection ends.
fn serve(mut device: &File, manner: Manner, backing: &AtomicI32, note: &mut dyn FnMut(Seen)) {
    let mut bytes = vec![0; (1 << 20) + 4096];
    loop {
        let len = match device.read(&mut bytes) {
            Ok(len) => len,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::ENOENT)) => continue,
            Err(_) => return,
        };
        let request = &bytes[..len];
        let opcode = word_at(request, 4);
        let unique = long_at(request, 8);
        note(Seen { opcode, unique });
        let (error, body) = match opcode {
            // LOOKUP
            1 => {
                let mut entry = Vec::new();
                for long in [FILE_INO, 0, 60, 60, 0] {
                    entry.extend(long.to_ne_bytes());
                }
                entry.extend(attr_of(FILE_INO));
                (0, entry)
            }
            // FORGET, BATCH_FORGET, INTERRUPT
            2 | 42 | 36 => continue,
            // GETATTR
            3 => {
                let mut out = Vec::from([0; 16]);
                out.extend(attr_of(long_at(request, 16)));
                (0, out)
            }
            // OPEN
            14 => {
                let mut out = Vec::from(7u64.to_ne_bytes());
                let id = backing.load(Ordering::SeqCst);
                let reads = if id == 0 { FOPEN_DIRECT_IO } else { FOPEN_PASSTHROUGH };
                out.extend((reads | FOPEN_NOFLUSH).to_ne_bytes());
                out.extend(id.to_ne_bytes());
                (0, out)
            }
            // READ
            15 if manner == Manner::HoldReads => continue,
            15 => {
                let offset = long_at(request, 48);
                let len = u64::from(word_at(request, 56));
                (0, (offset..(offset + len).min(FILE_LEN)).map(byte_of).collect())
            }
            // RELEASE, FLUSH
            18 | 25 => (0, Vec::new()),
            // INIT
            26 => {
                let mut out = Vec::new();
                for word in [7, 40, 0, INIT_EXT] {
                    out.extend(word.to_ne_bytes());
                }
                out.extend([0; 4]);
                for word in [1u32 << 20, 1, 0, PASSTHROUGH, 1] {
                    out.extend(word.to_ne_bytes());
                }
                out.resize(64, 0);
                (0, out)
            }
            _ => (-libc::ENOSYS, Vec::new()),
        };
        let mut reply = Vec::from((16 + body.len() as u32).to_ne_bytes());
        reply.extend(error.to_ne_bytes());
        reply.extend(unique.to_ne_bytes());
        reply.extend(body);
        let _ = device.write_all(&reply);
    }
}

/// Not a test: the process of a server, whose standard input is the device.
#[test]
#[ignore = "the process of a server in the other tests"]
fn server_process() {
    let Ok(word) = std::env::var(SERVER_VARIABLE) else { return };
    let device: OwnedFd = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned().unwrap();
    let device = if word == "clone" { clone_channel(&device) } else { device };
    let backing = AtomicI32::new(word.parse().unwrap_or(0));
    serve(&device.into(), Manner::HoldReads, &backing, &mut |request| {
        if request.opcode == 15 {
            println!("\nholds {}", request.unique);
        }
    });
}

/// Waits until the server holds a read, and kills that server; returns the read's number.
fn kill_holder(mut server: Child) -> u64 {
    let mut out = std::io::BufReader::new(server.stdout.take().unwrap());
    let unique = loop {
        let mut line = String::new();
        assert_ne!(std::io::BufRead::read_line(&mut out, &mut line).unwrap(), 0, "the server ended");
        if let Some(number) = line.strip_prefix("holds ") {
            break number.trim().parse().unwrap();
        }
    };
    server.kill().unwrap();
    server.wait().unwrap();
    unique
}

fn read_in_thread(file: &File) -> mpsc::Receiver<std::io::Result<Vec<u8>>> {
    let file = file.try_clone().unwrap();
    let (sender, answer) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = vec![0; 4096];
        let read = file.read_at(&mut bytes, 8192);
        let _ = sender.send(read.map(|n| bytes[..n].to_vec()));
    });
    answer
}

#[test]
fn a_killed_server_leaves_its_requests_to_the_next_who_has_the_descriptor() {
    let Some(kept) = Kept::new() else { return };
    let server = kept.serve_there(&kept.device, "hold");
    let file = File::open(kept.file()).unwrap();
    let answer = read_in_thread(&file);
    let held = kill_holder(server);
    // Without a server, the program waits and gets no error; a new request waits too.
    let (next, seen) = kept.serve_here(Manner::Answer);
    assert!(file.metadata().is_ok(), "the connection lives");
    assert!(matches!(answer.recv_timeout(Duration::from_millis(200)), Err(mpsc::RecvTimeoutError::Timeout)));
    kept.request_again();
    let bytes = answer.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    assert_eq!(bytes, (8192..8192 + 4096).map(byte_of).collect::<Vec<_>>());
    let again: Vec<u64> =
        seen.try_iter().filter(|request| request.opcode == 15).map(|request| request.unique).collect();
    assert_eq!(again, [held | RESENT_BIT]);
    drop(file);
    drop(kept);
    next.join().unwrap();
}

#[test]
fn requests_taken_by_a_channel_of_the_killed_process_alone_fail() {
    let Some(kept) = Kept::new() else { return };
    let server = kept.serve_there(&kept.device, "clone");
    let file = File::open(kept.file()).unwrap();
    let answer = read_in_thread(&file);
    kill_holder(server);
    let failed = answer.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::ECONNABORTED));
    // A channel that the other process keeps too loses nothing.
    let channel = clone_channel(&kept.device);
    let server = kept.serve_there(&channel, "hold");
    let answer = read_in_thread(&file);
    kill_holder(server);
    let (next, _seen) = kept.serve_here(Manner::Answer);
    kept.request_again();
    assert!(answer.recv_timeout(Duration::from_secs(60)).unwrap().is_ok());
    drop(file);
    drop(channel);
    drop(kept);
    next.join().unwrap();
}

#[test]
fn passthrough_goes_on_without_a_server_and_its_number_serves_further_opens() {
    let Some(kept) = Kept::new() else { return };
    // On the disk of the build: the temporary folder may be on a file system that is stacked itself.
    let folder = env!("CARGO_TARGET_TMPDIR");
    let mut backing = tempfile::tempfile_in(folder).unwrap();
    backing.write_all(&vec![9; FILE_LEN as usize]).unwrap();
    let mut server = kept.serve_there(&kept.device, "0");
    assert!(kept.dir.path().metadata().is_ok());
    server.kill().unwrap();
    server.wait().unwrap();
    let id = register_backing(&kept.device, &backing);
    if id <= 0 {
        println!("SKIP: no passthrough here: {}", std::io::Error::last_os_error());
        return;
    }
    drop(backing);
    let mut server = kept.serve_there(&kept.device, &id.to_string());
    let file = File::open(kept.file()).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    let mut bytes = [0; 4096];
    assert_eq!(file.read_at(&mut bytes, 4096).unwrap(), bytes.len(), "without any server");
    assert_eq!(bytes, [9; 4096]);
    kept.backing.store(id, Ordering::SeqCst);
    let (next, _seen) = kept.serve_here(Manner::HoldReads);
    let second = File::open(kept.file()).unwrap();
    assert_eq!(second.read_at(&mut bytes, 0).unwrap(), bytes.len());
    // A number of another registration is refused while the file is open.
    let mut other = tempfile::tempfile_in(folder).unwrap();
    other.write_all(&vec![8; FILE_LEN as usize]).unwrap();
    kept.backing.store(register_backing(&kept.device, &other), Ordering::SeqCst);
    assert_eq!(File::open(kept.file()).unwrap_err().raw_os_error(), Some(libc::EIO));
    drop((file, second));
    drop(kept);
    next.join().unwrap();
}
