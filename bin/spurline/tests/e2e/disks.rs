//! The cache's disks: kept over a kill, wrong bytes on them, full, shared, unwritable, taken away underneath.

use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// A bucket with one file, and a mount of it whose passthrough and page cache do not hide the cache's disk.
struct Rig {
    world: World,
    server: S3Server,
    text: Vec<u8>,
}

impl Rig {
    fn new(len: usize) -> Rig {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("data");
        let text = bytes(50, len);
        server.put("data", "file", &text);
        Rig { world: World::new(), server, text }
    }
    fn mount(&self, more: &[&str]) -> Mount {
        let endpoint = self.server.endpoint();
        self.world.mount("s3://data", &[&["--endpoint-url", &endpoint][..], more].concat())
    }
    /// The largest files of the cache directory: those with blocks in them.
    fn data_files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        files_below(&self.world.path("cache/data"), &mut found);
        found.retain(|path| fs::metadata(path).is_ok_and(|m| m.len() >= 64 << 10));
        found
    }
    fn cached_whole(&self) {
        // A disk that is busy leaves a block in memory alone, and the next mount fetches the block again.
        eventually("all blocks on disk", || self.is_cached_by_mount());
    }
    fn is_cached_by_mount(&self) -> bool {
        let mount = self.mount(&[]);
        assert!(mount.read("file") == self.text);
        let mut is_whole = false;
        for _ in 0..50 {
            let out = self.world.run(&["info", mount.path("file").to_str().unwrap(), "--json"]);
            let info: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
            is_whole = info["blocks"]["disk"] == info["blocks"]["total"] && info["blocks"]["disk"].is_u64();
            if is_whole {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        mount.unmount();
        is_whole
    }
}

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files_below(&entry.path(), found),
            Ok(_) => found.push(entry.path()),
            Err(_) => {}
        }
    }
}

fn flip(path: &Path) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    for at in (4000..len).step_by(300_000) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    }
    file.sync_all().unwrap();
}

#[test]
fn a_killed_mount_leaves_a_cache_that_the_next_one_uses() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new(7 * MIB + 11);
    rig.cached_whole();
    let mut mount = rig.mount(&[]);
    assert!(mount.read("file") == rig.text);
    mount.process_mut().kill();
    // Calls under way end with any result; then the mount is dead and reports it.
    eventually("a dead mount", || fs::metadata(&mount.at).err().and_then(|e| e.raw_os_error()) == Some(libc::ENOTCONN));
    // A new mount over the dead one prints the remedy, and the remedy works.
    let mut command = rig.world.command(&[]);
    command.args(rig.world.mount_words("s3://data")).args(["--endpoint-url", &rig.server.endpoint()]);
    refused(&finish(with_credentials(&mut command)), 1, &["dead", "spurline umount"]);
    let out = rig.world.run(&["umount", mount.at.to_str().unwrap()]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(!is_mounted(&mount.at));
    drop(mount);
    let mount = rig.mount(&[]);
    assert!(mount.read("file") == rig.text);
    assert_eq!(mount.count("object", "get_ops"), 0);
    mount.unmount();
}

#[test]
fn bytes_flipped_on_disk_are_noticed_and_fetched_again() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new(6 * MIB + 77);
    rig.cached_whole();
    for more in [&[][..], &["--no-passthrough"], &["--iorpc-mode", "pagecache", "--no-passthrough"]] {
        // While nothing is mounted.
        rig.data_files().iter().for_each(|path| flip(path));
        let mount = rig.mount(more);
        assert!(mount.read("file") == rig.text, "{more:?}");
        let stats = mount.stats();
        assert!(count(&stats, "blockcache", "checksum_errors") > 0, "{more:?}: {stats}");
        assert!(count(&stats, "object", "get_ops") > 0);
        mount.unmount();
        rig.cached_whole();
    }
}

#[test]
fn bytes_flipped_while_mounted_are_noticed() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new(6 * MIB + 77);
    rig.cached_whole();
    let mount = rig.mount(&["--no-passthrough"]);
    assert!(!rig.data_files().is_empty());
    rig.data_files().iter().for_each(|path| flip(path));
    assert!(mount.read("file") == rig.text);
    assert!(mount.count("blockcache", "checksum_errors") > 0);
    mount.unmount();
}

#[test]
fn cache_files_deleted_underneath_cost_nothing_but_time() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new(6 * MIB + 77);
    rig.cached_whole();
    // Between two mounts, and below one.
    rig.data_files().iter().for_each(|path| fs::remove_file(path).unwrap());
    let mount = rig.mount(&[]);
    assert!(mount.read("file") == rig.text);
    mount.unmount();
    rig.cached_whole();
    let mount = rig.mount(&[]);
    rig.data_files().iter().for_each(|path| fs::remove_file(path).unwrap());
    assert!(mount.read("file") == rig.text);
    mount.unmount();
    rig.cached_whole();
    fs::remove_dir_all(rig.world.path("cache")).unwrap();
    rig.cached_whole();
    let mount = rig.mount(&[]);
    fs::remove_dir_all(rig.world.path("cache")).unwrap();
    assert!(mount.read("file") == rig.text);
    mount.unmount();
}

#[test]
fn a_cache_directory_belongs_to_one() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new(MIB);
    let mount = rig.mount(&[]);
    let second = rig.world.dir("second");
    let mut words = rig.world.mount_words("s3://data");
    words[2] = second.into();
    let mut command = rig.world.command(&[]);
    command.args(&words).args(["--endpoint-url", &rig.server.endpoint()]);
    let cache = rig.world.path("cache");
    let pid = mount.process().pid().to_string();
    refused(&finish(with_credentials(&mut command)), 3, &[cache.to_str().unwrap(), "in use", &pid, "--cache-dir"]);
    assert!(mount.read("file") == rig.text);
    mount.unmount();
}

#[test]
fn a_cache_directory_that_can_not_be_used_is_refused() {
    if !can_mount() {
        return;
    }
    use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
    let rig = Rig::new(MIB);
    let file = rig.world.file("plain", b"1");
    let try_with = |cache: &Path| {
        let words: Vec<_> = rig.world.mount_words("s3://data");
        let mut command = rig.world.command(&[]);
        let at = words.iter().position(|w| w == "--cache-dir").unwrap();
        command.args(&words[..=at]).arg(cache).args(&words[at + 2..]).args(["--endpoint-url", &rig.server.endpoint()]);
        finish(with_credentials(&mut command))
    };
    refused(&try_with(&file), 3, &["plain", "is not a directory", "--cache-dir"]);
    let dir = rig.world.dir("readonly");
    if mount_bind(&dir, &dir).is_err() || mount_remount(&dir, MountFlags::BIND | MountFlags::RDONLY, "").is_err() {
        let _ = unmount(&dir, UnmountFlags::DETACH);
        return skip("root", "no read-only bind mount here");
    }
    let out = try_with(&dir);
    detach(&dir);
    refused(&out, 3, &["readonly", "can't be written", "--cache-dir"]);
}

#[test]
fn a_cache_larger_than_its_disk_is_said_and_works() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new(3 * MIB);
    let mount = rig.mount(&["--cache-size", "900T"]);
    mount.process().wait_for("the cache disks have room for");
    assert!(mount.read("file") == rig.text);
    mount.unmount();
    let mount = rig.mount(&["--cache-size", "900T"]);
    assert!(mount.read("file") == rig.text);
    assert_eq!(mount.count("object", "get_ops"), 0);
    mount.unmount();
}

#[test]
fn a_full_cache_disk_stops_nobody() {
    if !can_mount() {
        return;
    }
    use rustix::mount::{MountFlags, mount};
    let rig = Rig::new(24 * MIB);
    let cache = rig.world.dir("cache");
    if mount("tmpfs", &cache, "tmpfs", MountFlags::empty(), c"size=8m").is_err() {
        return skip("root", "no tmpfs can be mounted here");
    }
    struct Gone<'a>(&'a Path);
    impl Drop for Gone<'_> {
        fn drop(&mut self) {
            detach(self.0);
        }
    }
    let _gone = Gone(&cache);
    let mount = rig.mount(&["--cache-size", "1G"]);
    // Another program uses the space that the cache counted on.
    let others = fs::write(cache.join("others"), vec![1; 6 * MIB]);
    others.unwrap();
    for _ in 0..2 {
        let file = File::open(mount.path("file")).unwrap();
        let mut got = vec![0; rig.text.len()];
        file.read_exact_at(&mut got, 0).unwrap();
        assert!(got == rig.text);
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
    assert_eq!(mount.count("object", "errors"), 0);
    mount.unmount();
}

#[test]
fn a_start_that_fails_leaves_alone_the_cache_that_another_made_meanwhile() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new(MIB);
    let mut words = rig.world.mount_words("s3://data");
    words[2] = rig.world.dir("other").into();
    let cache = rig.world.path("cache");
    fs::remove_dir(&cache).unwrap();
    // The first is held up by its bucket, and knows by then that there is no cache directory.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mut command = rig.world.command(&[]);
    command.args(&words).args(["--endpoint-url", &endpoint, "--origin-timeout", "10s"]);
    let mut first = Process::start(with_credentials(&mut command), &rig.world.log_path("first"));
    let asked = silent.accept().unwrap();
    // `Rig::mount` would make the directory.
    let mut command = rig.world.command(&["mount", "s3://data"]);
    command.arg(rig.world.dir("mnt")).arg("--cache-dir").arg(&cache).args(["--endpoint-url", &rig.server.endpoint()]);
    let mount = rig.world.mount_with(with_credentials(&mut command));
    assert!(mount.read("file") == rig.text);
    drop((asked, silent));
    assert_eq!(first.wait().code(), Some(3), "{}", first.log());
    assert!(cache.join("format").exists(), "{}", first.log());
    assert!(mount.read("file") == rig.text);
    mount.unmount();
}
