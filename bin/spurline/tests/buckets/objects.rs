//! A bucket that is written through a mount: what is in the bucket when a call has returned, and what others find there.

use spurline_rig::fsx;
use spurline_rig::installed_tool::tool;
use spurline_rig::world::*;
use spurline_rig::writable_group::WAYS;
use spurline_testkit::{ACCESS_KEY, ChaosProxy, ProxyFault, S3Server, SECRET_KEY};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, ErrorKind, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub const BUCKET: &str = "bucket";

/// A bucket in memory and a mount of it, or of what lies below a prefix.
pub struct BucketRig {
    pub server: S3Server,
    pub world: World,
}

impl BucketRig {
    pub fn start() -> Option<BucketRig> {
        if !can_mount() {
            return None;
        }
        let server = S3Server::in_memory().unwrap();
        server.create_bucket(BUCKET);
        Some(BucketRig { server, world: World::new() })
    }

    pub fn mount(&self, name: &str, more: &[&str]) -> Mount {
        self.mount_from(name, &self.server.endpoint(), more)
    }

    pub fn mount_from(&self, name: &str, endpoint: &str, more: &[&str]) -> Mount {
        let cache = self.world.dir(&format!("cache-{name}"));
        let flags = [&["--endpoint-url", endpoint, "--cache-dir", cache.to_str().unwrap()], more].concat();
        self.start_mount(name, &flags)
    }

    /// A mount without a cache directory of its own.
    pub fn mount_with_flags(&self, name: &str, flags: &[&str]) -> Mount {
        self.start_mount(name, &[&["--endpoint-url", &self.server.endpoint()], flags].concat())
    }

    fn start_mount(&self, name: &str, flags: &[&str]) -> Mount {
        let at = self.world.dir(name);
        let source = format!("s3://{BUCKET}/p");
        let mut command = self.world.command(&["mount", &source, at.to_str().unwrap(), "--rw"]);
        self.world.mount_at(with_credentials(command.args(flags)), &at)
    }

    pub fn object(&self, key: &str) -> Option<Vec<u8>> {
        self.server.bytes(BUCKET, key)
    }
}

/// An S3 server that others have written, over a folder with the bucket.
pub struct OtherServer {
    pub endpoint: String,
    pub store: PathBuf,
    _process: Process,
}

impl OtherServer {
    /// `None`, with the reason printed, where it can't be built.
    pub fn start(world: &World) -> Option<OtherServer> {
        let binary = spurline_testkit::go_program("versitygw", "versitygw")?;
        let store = world.dir("store");
        fs::create_dir(store.join(BUCKET)).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut server = Command::new(binary);
        server.args(["--access", ACCESS_KEY, "--secret", SECRET_KEY, "--port", &format!("127.0.0.1:{port}"), "posix"]);
        let process = Process::start(server.arg(&store), &world.log_path("server"));
        eventually("the server listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        Some(OtherServer { endpoint: format!("http://127.0.0.1:{port}"), store, _process: process })
    }
}

#[test]
fn a_closed_file_is_an_object_whole() {
    let Some(rig) = BucketRig::start() else { return };
    let mount = rig.mount("mnt", &[]);
    for (name, len) in [("empty", 0), ("small", 1000), ("one-part", 8 * MIB), ("parts", 30 * MIB + 17)] {
        let bytes = bytes(len as u64, len);
        let mut file = File::create(mount.path(name)).unwrap();
        for piece in bytes.chunks(1 << 20) {
            file.write_all(piece).unwrap();
        }
        // Another program closes its copy of the descriptor when it starts.
        assert!(Command::new("true").status().unwrap().success());
        assert!(rig.object(&format!("p/{name}")).is_none(), "{name} is visible before its close");
        assert!(fs::metadata(mount.path(name)).unwrap().len() == len as u64);
        drop(file);
        assert!(rig.object(&format!("p/{name}")).unwrap() == bytes, "{name}");
        assert!(mount.read(name) == bytes, "{name}");
    }
    assert_eq!(rig.server.open_uploads(), 0);
    let names: Vec<_> = fs::read_dir(&mount.at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    // One request for each file of at most a part, and for each part.
    let counts = ["put_ops", "put_bytes", "uploads", "conflicts"].map(|name| mount.count("object", name));
    assert!(counts[0] >= 7 && counts[1] >= (38 * MIB + 1017) as u64 && counts[2..] == [0, 0], "{counts:?}");
    mount.unmount();
}

/// The shell opens the file, copies the descriptor, and closes the first before the program writes.
#[test]
fn a_redirection_replaces_its_file_when_the_program_ends() {
    let Some(rig) = BucketRig::start() else { return };
    rig.server.put(BUCKET, "p/old", b"before");
    let mount = rig.mount("mnt", &[]);
    let puts_before = mount.count("object", "put_ops");
    for (name, before) in [("old", Some(&b"before"[..])), ("new", None)] {
        let mut shell = Command::new("sh");
        shell.args(["-c", "(echo ready >&2; read word; printf after) > \"$1\"", "sh"]).arg(mount.path(name));
        let mut child = shell.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!((line.as_str(), rig.object(&format!("p/{name}")).as_deref()), ("ready\n", before));
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(rig.object(&format!("p/{name}")).unwrap(), b"after");
    }
    let emptied = Command::new("sh").args(["-c", ": > \"$1\"", "sh"]).arg(mount.path("old")).status();
    assert!(emptied.unwrap().success());
    assert_eq!(rig.object("p/old").unwrap(), b"");
    assert_eq!(mount.count("object", "put_ops") - puts_before, 3, "a request for each file");
    mount.unmount();
}

#[test]
fn files_are_changed_in_every_way() {
    for way in WAYS {
        change_in_every_way(way);
    }
}

fn change_in_every_way(way: &[&str]) {
    let Some(rig) = BucketRig::start() else { return };
    rig.server.put(BUCKET, "p/file", &bytes(7, 20 * MIB));
    let mount = rig.mount("mnt", way);
    make_every_change(&mount, &rig.server);
    mount.unmount();
}

/// Changes the file `file` of 20 MiB in every way, and compares it and its object after each.
pub fn make_every_change(mount: &Mount, server: &S3Server) {
    let mut model = mount.read("file");
    let check = |model: &[u8], what: &str| {
        assert!(server.bytes(BUCKET, "p/file").unwrap() == model, "{what}: the object");
        assert!(mount.read("file") == model, "{what}: the file");
    };
    // In the middle: parts that did not change are copied in the store.
    let file = OpenOptions::new().read(true).write(true).open(mount.path("file")).unwrap();
    file.write_all_at(b"changed", 9_000_000).unwrap();
    model[9_000_000..9_000_007].copy_from_slice(b"changed");
    let mut seen = [0; 9];
    file.read_exact_at(&mut seen, 8_999_999).unwrap();
    assert_eq!(seen[..], model[8_999_999..9_000_008]);
    file.sync_all().unwrap();
    check(&model, "a change in the middle");
    // The same open file goes on.
    file.write_all_at(b"again", 100).unwrap();
    model[100..105].copy_from_slice(b"again");
    drop(file);
    check(&model, "a second change");
    let mut file = OpenOptions::new().append(true).open(mount.path("file")).unwrap();
    file.write_all(&model.clone()[..3 * MIB]).unwrap();
    drop(file);
    model.extend_from_within(..3 * MIB);
    check(&model, "an append");
    let file = OpenOptions::new().write(true).open(mount.path("file")).unwrap();
    file.set_len(5_000_000).unwrap();
    file.set_len(6_000_000).unwrap();
    drop(file);
    model.truncate(5_000_000);
    model.resize(6_000_000, 0);
    check(&model, "a cut and zeros");
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"sh").unwrap();
    assert!(server.bytes(BUCKET, "p/file").unwrap() == model, "others see the object before until the close");
    file.write_all(b"ort").unwrap();
    drop(file);
    check(b"short", "an overwrite");
    // The length first, then the bytes, as safetensors does.
    let mut file = File::create(mount.path("file")).unwrap();
    file.set_len(18 * MIB as u64).unwrap();
    let model = bytes(8, 18 * MIB);
    file.seek(SeekFrom::Start(0)).unwrap();
    file.write_all(&model).unwrap();
    drop(file);
    check(&model, "a file of known length");
    assert_eq!(server.open_uploads(), 0);
}

#[test]
fn names_are_made_and_removed() {
    let Some(rig) = BucketRig::start() else { return };
    let mount = rig.mount("mnt", &[]);
    make_and_remove_names(&mount, &rig.server);
    mount.unmount();
}

/// Makes and removes files and folders in an empty bucket, and compares the keys.
pub fn make_and_remove_names(mount: &Mount, server: &S3Server) {
    fs::create_dir(mount.path("folder")).unwrap();
    assert!(server.bytes(BUCKET, "p/folder/").unwrap().is_empty());
    assert_eq!(fs::create_dir(mount.path("folder")).unwrap_err().kind(), ErrorKind::AlreadyExists);
    fs::write(mount.path("folder/a"), b"one").unwrap();
    assert_eq!(fs::remove_dir(mount.path("folder")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    let exclusive = || OpenOptions::new().write(true).create_new(true).open(mount.path("folder/a"));
    assert_eq!(exclusive().unwrap_err().kind(), ErrorKind::AlreadyExists);
    fs::rename(mount.path("folder/a"), mount.path("folder/b")).unwrap();
    assert_eq!(server.keys(BUCKET), ["p/folder/", "p/folder/b"]);
    assert_eq!(mount.read("folder/b"), b"one");
    fs::write(mount.path("folder/c"), b"two").unwrap();
    fs::rename(mount.path("folder/c"), mount.path("folder/b")).unwrap();
    assert_eq!(mount.read("folder/b"), b"two");
    fs::remove_file(mount.path("folder/b")).unwrap();
    assert_eq!(fs::metadata(mount.path("folder/b")).unwrap_err().kind(), ErrorKind::NotFound);
    fs::remove_dir(mount.path("folder")).unwrap();
    assert_eq!(server.keys(BUCKET), Vec::<String>::new());
}

/// A program that finds another time than before takes the file for one that was changed meanwhile.
#[test]
fn times_stay_when_a_file_is_closed_and_renamed() {
    let Some(rig) = BucketRig::start() else { return };
    let uncached = ["--attr-cache", "0s", "--entry-cache", "0s", "--dir-entry-cache", "0s"];
    for flags in [&uncached[..], &[&uncached[..], &["--object-attrs"]].concat()] {
        let mount = rig.mount("mnt", flags);
        let mut file = File::create(mount.path("file")).unwrap();
        file.write_all(b"bytes").unwrap();
        let time = file.metadata().unwrap().modified().unwrap();
        drop(file);
        let found = |name: &str| fs::metadata(mount.path(name)).unwrap();
        assert_eq!(found("file").modified().unwrap(), time);
        let changed = (found("file").ctime(), found("file").ctime_nsec());
        fs::rename(mount.path("file"), mount.path("moved")).unwrap();
        assert_eq!(found("moved").modified().unwrap(), time);
        fs::create_dir(mount.path("folder")).unwrap();
        fs::rename(mount.path("moved"), mount.path("folder/file")).unwrap();
        fs::rename(mount.path("folder"), mount.path("again")).unwrap();
        assert_eq!(found("again/file").modified().unwrap(), time);
        assert_eq!((found("again/file").ctime(), found("again/file").ctime_nsec()), changed);
        let listed = fs::read_dir(mount.path("again")).unwrap().next().unwrap().unwrap();
        assert_eq!(listed.metadata().unwrap().modified().unwrap(), time);
        drop(listed);
        fs::remove_dir_all(mount.path("again")).unwrap();
        mount.unmount();
    }
}

#[test]
fn a_folder_is_renamed_within_the_store() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    for n in 0..40 {
        rig.server.put(BUCKET, &format!("p/step.tmp/part{}/{n}", n % 3), format!("bytes {n}").as_bytes());
    }
    rig.server.put(BUCKET, "p/step.tmp-beside", b"stays");
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &["--rename-limit", "60"]);
    fs::create_dir(mount.path("step.tmp/empty")).unwrap();
    let file = File::create(mount.path("step.tmp/open")).unwrap();
    file.write_all_at(b"open", 0).unwrap();
    assert_eq!(
        fs::rename(mount.path("step.tmp"), mount.path("step.tmp/in")).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    fs::rename(mount.path("step.tmp"), mount.path("step")).unwrap();
    assert!(rig.server.keys(BUCKET).iter().all(|key| !key.starts_with("p/step.tmp/")), "{:?}", rig.server.keys(BUCKET));
    assert_eq!(proxy.count_requests("GET", "/p/step"), 0, "no bytes come through the mount");
    for n in 0..40 {
        assert_eq!(mount.read(format!("step/part{}/{n}", n % 3)), format!("bytes {n}").as_bytes());
    }
    assert!(fs::metadata(mount.path("step/empty")).unwrap().is_dir());
    assert_eq!(mount.read("step.tmp-beside"), b"stays");
    // The file that is open goes with its folder.
    file.write_all_at(b"more", 4).unwrap();
    drop(file);
    assert_eq!(rig.object("p/step/open").unwrap(), b"openmore");
    // Onto an empty folder, and not onto another one.
    fs::create_dir(mount.path("target")).unwrap();
    fs::write(mount.path("target/file"), b"x").unwrap();
    assert_eq!(fs::rename(mount.path("step"), mount.path("target")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    fs::remove_file(mount.path("target/file")).unwrap();
    fs::rename(mount.path("step"), mount.path("target")).unwrap();
    assert_eq!(mount.read("target/open"), b"openmore");
    // A store that fails in the middle: every file is under one of the names, and a second attempt completes it.
    proxy.inject_on(Some("PUT"), "part1", ProxyFault::Error(403, "AccessDenied", "no"), 3);
    assert!(fs::rename(mount.path("target"), mount.path("again")).is_err());
    for n in 0..40 {
        let name = format!("part{}/{n}", n % 3);
        assert!(rig.object(&format!("p/target/{name}")).is_some(), "{name}");
    }
    // Above the limit, programs copy.
    for n in 0..70 {
        rig.server.put(BUCKET, &format!("p/large/{n}"), b"x");
    }
    assert_eq!(fs::rename(mount.path("large"), mount.path("larger")).unwrap_err().kind(), ErrorKind::CrossesDevices);
    mount.unmount();
}

#[test]
fn nothing_is_written_over_the_change_of_somebody_else() {
    let Some(rig) = BucketRig::start() else { return };
    rig.server.put(BUCKET, "p/file", b"first");
    let mount = rig.mount("mnt", &[]);
    let file = OpenOptions::new().write(true).open(mount.path("file")).unwrap();
    file.write_all_at(b"ours!", 0).unwrap();
    rig.server.put(BUCKET, "p/file", b"theirs");
    let error = file.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
    assert_eq!(rig.object("p/file").unwrap(), b"theirs");
    drop(file);
    assert_eq!(mount.read("file"), b"theirs");
    // A new name that another writer has made meanwhile.
    let new = File::create(mount.path("new")).unwrap();
    rig.server.put(BUCKET, "p/new", b"theirs too");
    assert_eq!(new.sync_all().unwrap_err().raw_os_error(), Some(libc::ESTALE));
    drop(new);
    assert_eq!(rig.object("p/new").unwrap(), b"theirs too");
    assert!(mount.process().log().contains("was changed by another writer since it was opened"));
    assert_eq!(mount.count("object", "conflicts"), 2);
    let wins = rig.mount("wins", &["--last-writer-wins"]);
    let file = OpenOptions::new().write(true).truncate(true).open(wins.path("file")).unwrap();
    file.write_all_at(b"ours", 0).unwrap();
    rig.server.put(BUCKET, "p/file", b"theirs");
    file.sync_all().unwrap();
    assert_eq!(rig.object("p/file").unwrap(), b"ours");
    drop(file);
    wins.unmount();
    mount.unmount();
}

/// Each kind of request loses its answer once, is refused for a while, and meets a closed connection: the file is the object
/// that was written, once.
#[test]
fn lost_answers_and_refusals_leave_whole_objects() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &["--origin-timeout", "30s"]);
    write_through_faults(&mount, &rig.server, &proxy);
    mount.unmount();
}

/// Writes while requests lose their answers, are refused, and meet closed connections.
pub fn write_through_faults(mount: &Mount, server: &S3Server, proxy: &ChaosProxy) {
    let object = |key: &str| server.bytes(BUCKET, key);
    let faults = [
        ProxyFault::LoseAnswer,
        ProxyFault::SlowDown,
        ProxyFault::Error(500, "InternalError", "try again"),
        ProxyFault::Close,
    ];
    for (round, fault) in faults.iter().enumerate() {
        let large = bytes(round as u64, 17 * MIB);
        for method in ["PUT", "POST"] {
            for path in ["small", "uploads=", "partNumber=1", "partNumber=2", "uploadId="] {
                proxy.inject_on(Some(method), path, fault.clone(), 1);
            }
        }
        fs::write(mount.path("small"), format!("round {round}")).unwrap();
        assert_eq!(object("p/small").unwrap(), format!("round {round}").into_bytes(), "{fault:?}");
        let file = File::create(mount.path("large")).unwrap();
        file.write_all_at(&large, 0).unwrap();
        file.sync_all().unwrap();
        file.write_all_at(b"changed", 100).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let mut wanted = large;
        wanted[100..107].copy_from_slice(b"changed");
        assert!(object("p/large").unwrap() == wanted, "{fault:?}");
        proxy.inject_on(Some("PUT"), "moved", fault.clone(), 1);
        proxy.inject_on(Some("DELETE"), "large", fault.clone(), 1);
        fs::rename(mount.path("large"), mount.path("moved")).unwrap();
        assert!(object("p/moved").unwrap() == wanted && object("p/large").is_none(), "{fault:?}");
        proxy.inject_on(Some("DELETE"), "moved", fault.clone(), 1);
        fs::remove_file(mount.path("moved")).unwrap();
        assert!(object("p/moved").is_none(), "{fault:?}");
    }
}

/// Random operations on one file of several parts, each read compared.
#[test]
fn fsx_finds_no_wrong_byte_in_a_bucket() {
    for way in WAYS {
        run_fsx(way);
    }
}

fn run_fsx(way: &[&str]) {
    let Some(program) = tool("fsx") else { return };
    let Some(rig) = BucketRig::start() else { return };
    let mount = rig.mount("mnt", way);
    run_fsx_on(&program, &mount, &rig.world);
    assert!(rig.object("p/file").unwrap() == mount.read("file"));
    assert_eq!(rig.server.open_uploads(), 0);
    mount.unmount();
}

/// Runs fsx on the file `file`.
pub fn run_fsx_on(program: &Path, mount: &Mount, world: &World) {
    let operations =
        fsx::OPERATIONS.replace("flen = 1048576", "flen = 18874368").replace("max = 131072", "max = 2097152");
    let config = world.file("fsx.toml", operations.as_bytes());
    let count = fsx::more_operations().map_or(300, |ops| ops / 100).to_string();
    let mut command = Command::new(program);
    command.args(["-N", &count, "-S", "7", "-f"]).arg(config).arg("-P").arg(world.dir("left"));
    let out = command.arg(mount.path("file")).output().unwrap();
    assert!(out.status.success(), "{out:?}");
}

#[test]
fn a_store_without_conditions_is_refused() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let at = rig.world.dir("mnt");
    let source = format!("s3://{BUCKET}/p");
    let words =
        ["mount", &source, at.to_str().unwrap(), "--rw", "--cache-size", "0", "--endpoint-url", &proxy.endpoint()];
    // It knows the first condition, and not the second one.
    proxy.inject_on(Some("PUT"), "probe", ProxyFault::Delay(std::time::Duration::ZERO), 1);
    proxy.inject_on(Some("PUT"), "probe", ProxyFault::Error(501, "NotImplemented", "no conditions"), 1);
    let out = finish(with_credentials(&mut rig.world.command(&words)));
    refused(&out, 3, &["refuses the condition of PutObject with If-None-Match", "--allow-unguarded-writes"]);
    assert_eq!(rig.server.keys(BUCKET), Vec::<String>::new(), "the probe is removed");
    proxy.inject_on(Some("PUT"), "probe", ProxyFault::Error(403, "AccessDenied", "read-only key"), 1);
    let out = finish(with_credentials(&mut rig.world.command(&words)));
    refused(&out, 3, &["AccessDenied", "s3:PutObject"]);
    proxy.inject_on(Some("PUT"), "probe", ProxyFault::Delay(std::time::Duration::ZERO), 1);
    proxy.inject_on(Some("PUT"), "probe", ProxyFault::Error(501, "NotImplemented", "no conditions"), 1);
    let mount = rig.mount_from("unguarded", &proxy.endpoint(), &["--allow-unguarded-writes"]);
    fs::write(mount.path("file"), b"written").unwrap();
    assert_eq!(rig.object("p/file").unwrap(), b"written");
    let log = mount.process().log();
    assert!(log.contains("--allow-unguarded-writes: ") && !log.contains("give --allow-unguarded-writes"), "{log}");
    mount.unmount();
}

#[test]
fn a_listing_excludes_new_names_and_overwrites_nothing() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let times = ["--attr-cache", "1h", "--entry-cache", "1h", "--dir-entry-cache", "1h"];
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &times);
    rig.server.put(BUCKET, "p/old/there", b"theirs");
    fs::create_dir(mount.path("new")).unwrap();
    // A folder with other files is looked up eight times, and then listed.
    for (folder, looked_up) in [("new", 0), ("old", 8)] {
        for n in 0..20 {
            fs::write(mount.path(format!("{folder}/f{n}")), b"own").unwrap();
        }
        let heads = proxy.count_requests("HEAD", &format!("/p/{folder}/f"));
        assert_eq!(heads, looked_up, "{folder}: {:?}", proxy.requests());
        // Own files are found, and those of the listing.
        assert_eq!(fs::read(mount.path(format!("{folder}/f19"))).unwrap(), b"own");
    }
    assert_eq!(mount.read("old/there"), b"theirs");
    // What others make since is not replaced.
    rig.server.put(BUCKET, "p/old/late", b"theirs");
    let mut late = File::create(mount.path("old/late")).unwrap();
    late.write_all(b"own").unwrap();
    assert_eq!(rustix::fs::fsync(&late).unwrap_err(), rustix::io::Errno::STALE);
    drop(late);
    assert_eq!(rig.object("p/old/late").unwrap(), b"theirs");
    rig.server.put(BUCKET, "p/old/later", b"theirs");
    let exists = File::create_new(mount.path("old/later")).unwrap_err();
    assert_eq!(exists.kind(), ErrorKind::AlreadyExists);
    // A rename of a file and a removal leave the rest known.
    fs::rename(mount.path("old/f1"), mount.path("old/renamed")).unwrap();
    fs::remove_file(mount.path("old/f2")).unwrap();
    assert_eq!(mount.read("old/renamed"), b"own");
    assert!(!mount.path("old/f2").exists());
    mount.unmount();
}

#[test]
fn a_written_file_is_read_without_a_request() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &["--no-passthrough"]);
    let written = bytes(5, 11 * MIB);
    fs::write(mount.path("file"), &written).unwrap();
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    assert!(mount.read("file") == written);
    assert_eq!(proxy.count_requests("GET", "/p/file"), 0, "{:?}", proxy.requests());
    // Nor after a rename, which many programs end a file with.
    fs::rename(mount.path("file"), mount.path("renamed")).unwrap();
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    assert!(mount.read("renamed") == written);
    assert_eq!(proxy.count_requests("GET", "/p/renamed"), 0, "{:?}", proxy.requests());
    fs::rename(mount.path("renamed"), mount.path("file")).unwrap();
    // A file that is replaced stays readable for the program that has it open.
    let old = File::open(mount.path("file")).unwrap();
    fs::write(mount.path("new"), b"new").unwrap();
    fs::rename(mount.path("new"), mount.path("file")).unwrap();
    let mut seen = vec![0; written.len()];
    old.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == written);
    assert_eq!(mount.read("file"), b"new");
    drop(old);
    mount.unmount();
}

/// A store that refuses changes from one moment on: the failure is reported by fsync and close, and the object stays.
#[test]
fn a_lost_permission_is_reported_and_nothing_is_published() {
    let Some(rig) = BucketRig::start() else { return };
    rig.server.put(BUCKET, "p/file", b"before");
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &[]);
    let file = OpenOptions::new().write(true).open(mount.path("file")).unwrap();
    file.write_all_at(b"after!", 0).unwrap();
    let long = File::create(mount.path("file-in-parts")).unwrap();
    long.write_all_at(b"begin", 0).unwrap();
    proxy.inject_on(Some("PUT"), "file", ProxyFault::Error(403, "AccessDenied", "no"), 1000);
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(libc::EACCES));
    long.write_all_at(&bytes(1, 20 * MIB), 0).unwrap();
    assert_eq!(long.sync_all().unwrap_err().raw_os_error(), Some(libc::EACCES));
    assert_eq!(rig.object("p/file").unwrap(), b"before");
    // With the permission, the same bytes are published.
    proxy.clear_faults();
    file.sync_all().unwrap();
    assert_eq!(rig.object("p/file").unwrap(), b"after!");
    long.sync_all().unwrap();
    assert!(rig.object("p/file-in-parts").unwrap() == bytes(1, 20 * MIB));
    drop((file, long));
    mount.unmount();
}

#[test]
fn a_killed_mount_leaves_the_object_before() {
    let Some(rig) = BucketRig::start() else { return };
    let before = bytes(1, 20 * MIB);
    rig.server.put(BUCKET, "p/file", &before);
    let mut mount = rig.mount("mnt", &[]);
    let file = OpenOptions::new().write(true).open(mount.path("file")).unwrap();
    file.write_all_at(&bytes(2, 20 * MIB), 0).unwrap();
    eventually("parts are uploaded", || rig.server.open_uploads() == 1);
    assert_eq!(mount.count("object", "uploads"), 1);
    mount.process_mut().kill();
    drop(file);
    assert!(rig.object("p/file").unwrap() == before);
    detach(&mount.at);
    let again = rig.mount("again", &[]);
    assert!(again.read("file") == before);
    fs::write(again.path("file"), b"after").unwrap();
    assert_eq!(rig.object("p/file").unwrap(), b"after");
    again.unmount();
}

/// Other files are listed, looked up and written while one is published slowly.
#[test]
fn a_slow_publication_holds_up_no_other_file() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &[]);
    let slow = File::create(mount.path("slow")).unwrap();
    slow.write_all_at(b"slow", 0).unwrap();
    proxy.inject_on(Some("PUT"), "slow", ProxyFault::Stall, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(slow));
        eventually("the publication has begun", || proxy.count_requests("PUT", "slow") == 1);
        fs::write(mount.path("other"), b"other").unwrap();
        let mut names: Vec<_> = fs::read_dir(&mount.at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["other", "slow"]);
        assert_eq!(fs::metadata(mount.path("slow")).unwrap().len(), 4);
        assert!(rig.object("p/slow").is_none(), "it is still being published");
        proxy.refuse_connections(true);
        proxy.refuse_connections(false);
    });
    assert_eq!(rig.object("p/slow").unwrap(), b"slow");
    mount.unmount();
}

/// Makes, changes and renames a file of a bucket on a server of others, and lets another mount replace it while it is open. What
/// `maker` makes, `changer` changes.
pub fn check_kept_objects(server: &OtherServer, maker: &Mount, changer: &Mount, other: &Mount) {
    let object = |name: &str| fs::read(server.store.join(BUCKET).join("p").join(name));
    let mut model = bytes(3, 19 * MIB);
    fs::write(maker.path("file"), &model).unwrap();
    assert!(object("file").unwrap() == model && changer.read("file") == model);
    let file = OpenOptions::new().write(true).open(changer.path("file")).unwrap();
    file.write_all_at(b"changed", 9_000_000).unwrap();
    drop(file);
    model[9_000_000..9_000_007].copy_from_slice(b"changed");
    assert!(object("file").unwrap() == model);
    assert!(changer.read("file") == model);
    fs::create_dir(maker.path("folder")).unwrap();
    fs::rename(maker.path("file"), maker.path("folder/file")).unwrap();
    assert!(object("folder/file").unwrap() == model && object("file").is_err());
    // Another writer replaces the object while it is open.
    let file = OpenOptions::new().write(true).open(maker.path("folder/file")).unwrap();
    file.write_all_at(b"ours", 0).unwrap();
    fs::write(other.path("folder/file"), b"theirs").unwrap();
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(libc::ESTALE));
    drop(file);
    assert_eq!(object("folder/file").unwrap(), b"theirs");
    fs::remove_file(other.path("folder/file")).unwrap();
    fs::remove_dir(other.path("folder")).unwrap();
    assert!(!server.store.join(BUCKET).join("p/folder").exists());
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    /// The store's own conditions and parts, on a server of others.
    #[test]
    fn a_server_of_others_keeps_written_objects() {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let Some(server) = OtherServer::start(&world) else { return };
        let endpoint = &server.endpoint;
        let at = world.dir("mnt");
        let source = format!("s3://{BUCKET}/p");
        let mut command = world.command(&["mount", &source, at.to_str().unwrap(), "--rw", "--endpoint-url", endpoint]);
        command.arg("--cache-dir").arg(world.dir("cache"));
        let mount = world.mount_at(with_credentials(&mut command), &at);
        let other = world.dir("other");
        let mut command =
            world.command(&["mount", &source, other.to_str().unwrap(), "--rw", "--endpoint-url", endpoint]);
        command.arg("--cache-dir").arg(world.dir("other-cache"));
        let second = world.mount_at(with_credentials(&mut command), &other);
        check_kept_objects(&server, &mount, &mount, &second);
        second.unmount();
        mount.unmount();
        drop(server);
    }
}
