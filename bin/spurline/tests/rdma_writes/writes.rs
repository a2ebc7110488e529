//! Writable mounts over rails: nodes read the bytes from the mount's memory. Writers see nothing of links that go down and of
//! nodes that die.

use spurline_rig::disk_image::DiskImage;
use spurline_rig::rdma_rig::{Mount, Rig, count, link_down, link_up, run};
use spurline_rig::{fsx, pjdfstest};
use spurline_testkit::{ACCESS_KEY, S3Server, SECRET_KEY};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const BLOCK: usize = 256 << 10;
const BLOCKS: u64 = 32;
const EIO: i32 = 5;

/// The bytes of a block in the round in which it is written.
fn block(file: usize, at: u64, round: u64) -> Vec<u8> {
    let seed = (file as u64) << 48 ^ at << 32 ^ round;
    (0..BLOCK as u64 / 8)
        .flat_map(|word| (seed ^ word << 16).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}

fn sent(mount: &Mount<'_>, transport: &str) -> u64 {
    mount.count(transport, "send_bytes")
}

/// Bytes that both nodes read from the mount's memory.
fn read_by_nodes(rig: &Rig, ports: &[u16]) -> u64 {
    ports.iter().map(|port| count(&rig.log(&format!("node-{port}")), "rdma", "read_bytes")).sum()
}

/// A file of blocks, and the last round in which each was written.
pub struct BlockFile {
    file: File,
    number: usize,
    rounds: Vec<u64>,
    steps: u64,
}

impl BlockFile {
    pub fn open(dir: &Path, number: usize) -> BlockFile {
        BlockFile { file: open(dir, number), number, rounds: vec![0; BLOCKS as usize], steps: 0 }
    }

    fn put(&self, at: u64) {
        let bytes = block(self.number, at, self.rounds[at as usize]);
        self.file.write_all_at(&bytes, at * BLOCK as u64).expect("a writer sees no error");
    }

    fn compare(&self, file: &File, at: u64) {
        let round = self.rounds[at as usize];
        if round > 0 {
            let mut read = vec![0u8; BLOCK];
            file.read_exact_at(&mut read, at * BLOCK as u64).expect("a reader sees no error");
            assert!(read == block(self.number, at, round), "wrong bytes in block {at} of file {}", self.number);
        }
    }

    /// Writes a block and reads another one back; whether it is time for a sync.
    pub fn step(&mut self) -> bool {
        self.steps += 1;
        let at = self.steps * 7 % BLOCKS;
        self.rounds[at as usize] += 1;
        self.put(at);
        self.compare(&self.file, self.steps * 3 % BLOCKS);
        self.steps.is_multiple_of(16)
    }

    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Bytes of a lost node that were not synced are reported once: they are written again.
    fn sync_after_losses(&self) {
        while let Err(error) = self.sync() {
            assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
            (0..BLOCKS).filter(|at| self.rounds[*at as usize] > 0).for_each(|at| self.put(at));
        }
    }

    /// Compares the file of the source.
    pub fn check(&self, source: &Path) {
        let file = open(source, self.number);
        (0..BLOCKS).for_each(|at| self.compare(&file, at));
    }
}

/// Writes the blocks of one file again and again, and syncs now and then, until `stop`.
fn write_rounds(mount: &Path, number: usize, stop: &AtomicBool, done: &AtomicU64) -> BlockFile {
    let mut file = BlockFile::open(mount, number);
    while !stop.load(Ordering::Acquire) {
        if file.step() {
            file.sync_after_losses();
        }
        done.fetch_add(BLOCK as u64, Ordering::Release);
    }
    file.sync_after_losses();
    file
}

fn open(dir: &Path, number: usize) -> File {
    let path = dir.join(format!("file-{number}"));
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_writers_outlive_links_and_nodes() {
    let rig = Rig::at(Path::new("/vmtmp/writers"));
    let ports = [7100, 7101];
    let rails = ["--writable", "--rdma-network", "rail0:rail1"];
    let mut nodes = ports.map(|port| rig.node(port, &rails));
    let mount = rig.mount("writes", &ports, &["--rw", "--rdma-network", "rail0:rail1"]);
    mount.wait("all paths", |m| m.count("rdma", "paths_up") == 4);
    let (rdma, tcp) = (sent(&mount, "rdma"), sent(&mount, "tcp"));
    for name in ["one", "two", "three", "four"] {
        fs::write(mount.at.join(name), &rig.data).unwrap();
        File::open(mount.at.join(name)).unwrap().sync_all().unwrap();
        assert!(fs::read(rig.dir.join("src").join(name)).unwrap() == rig.data, "wrong bytes of {name}");
    }
    let len = 4 * rig.data.len() as u64;
    let (over_rdma, over_tcp) = (sent(&mount, "rdma") - rdma, sent(&mount, "tcp") - tcp);
    assert!(over_rdma >= len && over_tcp == 0, "{over_rdma} of {len} bytes over RDMA, {over_tcp} over TCP");
    let read = read_by_nodes(&rig, &ports);
    assert!(read >= len, "the nodes read {read} of {len} bytes from the mount's memory");
    // The NIC reads the programs' requests where they lie.
    assert_eq!(mount.count("rdma", "bounced_bytes"), 0, "bytes copied on their way to the node");

    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let files = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|number| {
                let (stop, done, at) = (&stop, &done, &mount.at);
                scope.spawn(move || write_rounds(at, number, stop, done))
            })
            .collect();
        let ended = || writers.iter().any(|writer| writer.is_finished());
        let over = |what: &str, transport: &str, paths: u64| {
            mount.wait(what, |m| ended() || m.count("rdma", "paths_up") == paths);
            let before = (sent(&mount, transport), done.load(Ordering::Acquire));
            let more = 8 * BLOCK as u64;
            mount.wait(what, |m| {
                ended() || sent(m, transport) >= before.0 + more && done.load(Ordering::Acquire) >= before.1 + more
            });
            assert!(!ended(), "a writer ended: {what}");
        };
        let script = std::panic::AssertUnwindSafe(|| {
            over("writes over all rails", "rdma", 4);
            for _ in 0..2 {
                link_down("rail0");
                over("writes over the other rail", "rdma", 2);
                link_down("rail1");
                over("writes over TCP, as no rail is left", "tcp", 0);
                link_up("rail0", "10.77.0.1");
                link_up("rail1", "10.77.1.1");
                over("writes over both rails again", "rdma", 4);
            }
            for (node, port) in nodes.iter_mut().zip(ports) {
                node.kill();
                over("writes to the other node", "rdma", 2);
                *node = rig.node(port, &rails);
                over("writes to both nodes", "rdma", 4);
            }
        });
        let outcome = std::panic::catch_unwind(script);
        stop.store(true, Ordering::Release);
        let files: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        files.into_iter().map(|file| file.unwrap()).collect::<Vec<_>>()
    });
    files.iter().for_each(|file| file.check(&rig.dir.join("src")));
    assert!(mount.count("rdma", "failovers") >= 4 && mount.count("rdma", "failbacks") >= 4);
    assert!(mount.count("rdma", "retries") > 0);
}

/// Objects of a bucket over rails: nodes read their bytes from the mount's memory, another mount reads them from the nodes, and a
/// node that is lost takes nothing along.
#[test]
#[ignore = "runs in the virtual machine"]
fn guest_a_bucket_is_written_over_rails() {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let mut rig = Rig::at(Path::new("/vmtmp/bucket"));
    rig.source = "s3://bucket/p".into();
    let keys = [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)];
    rig.variables.extend(keys.map(|(name, value)| (name, value.to_owned())));
    rig.variables.push(("AWS_ENDPOINT_URL", server.endpoint()));
    let ports = [7130, 7131];
    let rails = ["--rdma-network", "rail0:rail1"];
    let mut nodes = ports.map(|port| rig.node(port, &[&rails[..], &["--writable"]].concat()));
    let mounts = ["one", "other"].map(|name| rig.mount(name, &ports, &[&rails[..], &["--rw"]].concat()));
    let [mount, other] = &mounts;
    for mount in &mounts {
        mount.wait("all paths", |m| m.count("rdma", "paths_up") == 4);
    }
    let object = |name: &str| server.bytes("bucket", &format!("p/{name}")).unwrap_or_default();
    let rdma = sent(mount, "rdma");
    fs::write(mount.at.join("a"), &rig.data).unwrap();
    assert!(object("a") == rig.data, "the object");
    assert!(fs::read(other.at.join("a")).unwrap() == rig.data, "wrong bytes");
    let mut changed = rig.data.clone();
    changed[5 << 20..][..7].copy_from_slice(b"changed");
    let file = OpenOptions::new().write(true).open(mount.at.join("a")).unwrap();
    file.write_all_at(b"changed", 5 << 20).unwrap();
    file.sync_all().unwrap();
    assert!(object("a") == changed, "the changed object");
    assert!(fs::read(other.at.join("a")).unwrap() == changed, "wrong bytes after a change");
    let len = rig.data.len() as u64;
    assert!(sent(mount, "rdma") - rdma >= len, "{} of {len} bytes over RDMA", sent(mount, "rdma") - rdma);
    assert!(read_by_nodes(&rig, &ports) >= len, "the nodes read from the mount's memory");
    assert_eq!(mounts.iter().map(|mount| sent(mount, "tcp")).sum::<u64>(), 0, "bytes went over TCP");

    // Less than the memory of the mount, which sends all to the next node.
    let half = 256 << 10;
    let open: Vec<File> = (0..4).map(|number| open(&mount.at, number)).collect();
    for file in &open {
        file.write_all_at(&rig.data[..half], 0).unwrap();
    }
    nodes[0].kill();
    for file in &open {
        file.write_all_at(&rig.data[half..2 * half], half as u64).unwrap();
        file.sync_all().unwrap();
    }
    for number in 0..open.len() {
        assert!(object(&format!("file-{number}")) == rig.data[..2 * half], "the object of file {number}");
    }
    drop(open);
    assert_eq!(sent(mount, "tcp"), 0, "bytes went over TCP");
}

/// A source that fills up and then becomes read-only gives its errno; reads and other files go on, all over RDMA.
#[test]
#[ignore = "runs in the virtual machine"]
fn guest_a_full_or_read_only_source_gives_its_errno_over_rails() {
    let rig = Rig::at(Path::new("/vmtmp/refusing"));
    let source = rig.dir.join("src");
    let remount = |options: &str| run("mount", &["-o", &format!("remount,{options}"), source.to_str().unwrap()]);
    run("mount", &["-t", "tmpfs", "-o", "size=4m", "tmpfs", source.to_str().unwrap()]);
    {
        let rails = ["--rdma-network", "rail0:rail1"];
        let _node = rig.node(7140, &[&rails[..], &["--writable"]].concat());
        let mount = rig.mount("mnt", &[7140], &[&rails[..], &["--rw"]].concat());
        mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
        let tcp = sent(&mount, "tcp");
        let errno = |result: std::io::Result<()>| result.expect_err("the source refuses it").raw_os_error();
        // Which of the calls reports it depends on when the bytes are sent.
        let too_much = File::create(mount.at.join("big")).and_then(|mut file| {
            file.write_all(&rig.data[..8 << 20])?;
            file.sync_all()
        });
        assert_eq!(errno(too_much), Some(libc::ENOSPC));
        fs::remove_file(mount.at.join("big")).unwrap();
        fs::write(mount.at.join("small"), &rig.data[..BLOCK]).unwrap();
        // The kernel reports the last close of a file some time after close(2).
        spurline_rig::rdma_rig::wait("the source can be made read-only", &[], || {
            let words = ["-o", "remount,ro", source.to_str().unwrap()];
            Command::new("mount").args(words).output().unwrap().status.success()
        });
        for refused in [
            fs::write(mount.at.join("new"), "x"),
            OpenOptions::new().write(true).open(mount.at.join("small")).map(drop),
            fs::create_dir(mount.at.join("folder")),
            fs::remove_file(mount.at.join("small")),
            fs::rename(mount.at.join("small"), mount.at.join("other")),
        ] {
            assert_eq!(errno(refused), Some(libc::EROFS));
        }
        assert!(fs::read(mount.at.join("small")).unwrap() == rig.data[..BLOCK], "wrong bytes");
        remount("rw");
        fs::write(mount.at.join("new"), &rig.data[..BLOCK]).unwrap();
        File::open(mount.at.join("new")).unwrap().sync_all().unwrap();
        assert!(fs::read(source.join("new")).unwrap() == rig.data[..BLOCK], "wrong bytes in the source");
        assert_eq!(sent(&mount, "tcp"), tcp, "bytes went over TCP");
    }
    run("umount", &[source.to_str().unwrap()]);
}

/// A tool that scripts/setup installs; prints the reason if it is not there.
fn find_tool(name: &str) -> Option<PathBuf> {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/bin").join(name);
    let found = Some(tool).filter(|tool| tool.is_file());
    if found.is_none() {
        spurline_testkit::skip(name, &format!("{name} is not installed (scripts/setup test does it)"));
    }
    found
}

/// Tests of pjdfstest that run here each time: calls that act as their caller, and names that are made once. An emulated
/// machine takes minutes for all of them, which `SPURLINE_TEST_PJDFSTEST=all` asks for.
const PATTERNS: [&str; 2] = ["open::", "ftruncate::"];

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_pjdfstest_passes_where_it_passes_on_the_bare_directory() {
    let Some(tool) = find_tool("pjdfstest") else { return };
    let rig = Rig::at(Path::new("/vmtmp/posix"));
    let (source, bare, program) = (rig.dir.join("src"), rig.dir.join("bare"), Path::new("/vmtmp/pjdfstest"));
    fs::copy(tool, program).unwrap();
    fs::create_dir_all(&bare).unwrap();
    for path in [&rig.dir, &source, &bare] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    let config = rig.dir.join("pjdfstest.toml");
    fs::write(&config, pjdfstest::configuration("0.05")).unwrap();
    let rails = ["--rdma-network", "rail0:rail1"];
    let _node = rig.node(7110, &[&rails[..], &["--writable"]].concat());
    let mount = rig.mount("mnt", &[7110], &[&rails[..], &["--rw", "-o", "allow_other,suid,dev"]].concat());
    mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    let all = std::env::var("SPURLINE_TEST_PJDFSTEST").is_ok_and(|which| which == "all");
    let patterns: &[&str] = if all { &[] } else { &PATTERNS };
    let least = if all { 50 } else { 20 };
    let (ops, tcp) = (mount.count("remotecache", "ops"), sent(&mount, "tcp"));
    let begun = std::time::Instant::now();
    let want = pjdfstest::run_in(program, &config, &bare, patterns, least);
    let bare_took = begun.elapsed();
    let got = pjdfstest::run_in(program, &config, &mount.at, patterns, least);
    // The C library answers pathconf(_PC_LINK_MAX) itself, with 127 for every file system it does not know. The program that
    // must be busy runs for ten seconds, which is too short for a busy emulated machine.
    let counts = |name: &str| name != "link::link_count_max" && !name.ends_with("::etxtbsy");
    let passed = pjdfstest::check_equal("over RDMA", &want, &got, counts);
    let skipped = got.values().filter(|outcome| outcome.starts_with("skip")).count();
    println!(
        "pjdfstest over RDMA: {passed} of {} tests pass, as on the bare directory, {skipped} are skipped; {:.0?} after {bare_took:.0?}, {} requests",
        got.len(),
        begun.elapsed() - bare_took,
        mount.count("remotecache", "ops") - ops
    );
    assert_eq!(sent(&mount, "tcp"), tcp, "bytes went over TCP");
}

/// Random operations on one file, each read compared. `SPURLINE_TEST_FSX_OPS` asks for more of them.
#[test]
#[ignore = "runs in the virtual machine"]
fn guest_fsx_finds_no_wrong_byte() {
    let Some(tool) = find_tool("fsx") else { return };
    let rig = Rig::at(Path::new("/vmtmp/fsx"));
    let program = Path::new("/vmtmp/fsx-program");
    fs::copy(tool, program).unwrap();
    let rails = ["--rdma-network", "rail0:rail1"];
    let ports = [7120, 7121];
    let _nodes = ports.map(|port| rig.node(port, &[&rails[..], &["--writable"]].concat()));
    let mount = rig.mount("mnt", &ports, &[&rails[..], &["--rw"]].concat());
    mount.wait("all paths", |m| m.count("rdma", "paths_up") == 4);
    let (config, left) = (rig.dir.join("fsx.toml"), rig.dir.join("left"));
    fs::write(&config, fsx::OPERATIONS).unwrap();
    fs::create_dir_all(&left).unwrap();
    let ops = fsx::more_operations().unwrap_or(200).to_string();
    let (tcp, begun) = (sent(&mount, "tcp"), std::time::Instant::now());
    let mut command = Command::new(program);
    command.args(["-N", &ops, "-S", "18", "-f"]).arg(&config).arg("-P").arg(left).arg(mount.at.join("file"));
    let out = command.output().unwrap();
    assert!(out.status.success(), "{out:?}");
    println!("fsx over RDMA: {ops} operations in {:.0?}", begun.elapsed());
    assert_eq!(sent(&mount, "tcp"), tcp, "bytes went over TCP");
}

/// Writes more than the quota, as the user that it limits, and returns the error of the write or of the sync.
fn write_too_much(file: &Path) -> std::io::Error {
    use std::io::Write as _;
    let mut open = File::create(file).unwrap();
    open.write_all(&vec![7u8; 4 << 20]).and_then(|()| open.sync_all()).expect_err("a user exceeds the quota")
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_quotas_of_the_source_hold_alone_and_through_a_node() {
    let rig = Rig::at(Path::new("/vmtmp/quota"));
    run("modprobe", &["-a", "loop", "ext4", "quota_v2"]);
    let source = rig.dir.join("src");
    let features = ["-O", "quota", "-E", "quotatype=usrquota"];
    let disk = DiskImage::mount(&rig.dir.join("image"), &source, &features).unwrap();
    disk.limit_user(65534, 1024).unwrap();
    for path in [&rig.dir, &source] {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    let words = ["--rw", "-o", "allow_other", "--squash", "65534:65534"];
    let check = |at: &Path| {
        let error = write_too_much(&at.join("big"));
        assert_eq!(error.raw_os_error(), Some(libc::EDQUOT), "{}", at.display());
        // The next user of the same file system finds room again.
        fs::remove_file(at.join("big")).unwrap();
        let fits =
            || fs::write(at.join("small"), vec![1u8; 100_000]).and_then(|()| File::open(at.join("small"))?.sync_all());
        spurline_rig::rdma_rig::wait("room after the removal", &[], || fits().is_ok());
    };
    {
        let _node = rig.node(7130, &["--writable"]);
        let mount = rig.mount("through", &[7130], &words);
        check(&mount.at);
    }
    let alone = rig.dir.join("alone");
    fs::create_dir_all(&alone).unwrap();
    let words: Vec<&str> = [&["mount", source.to_str().unwrap(), alone.to_str().unwrap(), "-d"][..], &words].concat();
    run(spurline_rig::rdma_rig::BIN, &words);
    let outcome = std::panic::catch_unwind(|| check(&alone));
    run(spurline_rig::rdma_rig::BIN, &["umount", alone.to_str().unwrap()]);
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
