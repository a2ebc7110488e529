//! Owner, mode, times, symbolic links and extended attributes in the metadata of a bucket's objects (`--object-attrs`).

use crate::objects::{BUCKET, BucketRig};
use spurline_rig::installed_tool::tool;
use spurline_rig::pjdfstest;
use spurline_rig::world::*;
use spurline_rig::writable_group::{has, shell};
use spurline_testkit::S3Server;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::time::{Duration, SystemTime};

const ATTRS: &[&str] = &["--object-attrs", "-o", "allow_other"];
/// The kernel asks for everything at every call.
pub const UNCACHED_FLAGS: &[&str] = &["--attr-cache", "0s", "--entry-cache", "0s", "--dir-entry-cache", "0s"];

fn at(seconds: u64, nanos: u32) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos)
}

#[test]
fn attributes_are_in_the_metadata_of_objects() {
    let Some(rig) = BucketRig::start() else { return };
    let mount = rig.mount("mnt", ATTRS);
    let other = rig.mount("other", &[&["--object-attrs"], UNCACHED_FLAGS].concat());
    check_attributes(&mount, &other, &rig.server);
    other.unmount();
    mount.unmount();
}

/// Sets attributes in `mount`, which `other`, without a cache of the kernel, and the store have then.
pub fn check_attributes(mount: &Mount, other: &Mount, server: &S3Server) {
    // A file of one request, and one of several parts, whose upload begins before its attributes are set.
    for (name, len) in [("small", 1000), ("parts", 17 * MIB)] {
        let written = bytes(3, len);
        let mut file = File::create(mount.path(name)).unwrap();
        file.write_all(&written).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
        chown(mount.path(name), Some(7), Some(8)).unwrap();
        file.set_modified(at(1_000_000_000, 123_456_789)).unwrap();
        assert!(server.bytes(BUCKET, &format!("p/{name}")).is_none(), "the attributes go with the bytes");
        drop(file);
        for seen in [mount, other] {
            let found = fs::metadata(seen.path(name)).unwrap();
            assert_eq!((found.mode(), found.uid(), found.gid()), (0o100_640, 7, 8), "{name}");
            assert_eq!(found.modified().unwrap(), at(1_000_000_000, 123_456_789), "{name}");
            assert!(seen.read(name) == written, "{name}");
        }
        let metadata = |key: &str| server.metadata(BUCKET, &format!("p/{name}"), key).unwrap();
        assert_eq!(metadata("file-permissions"), "0100640");
        assert_eq!(metadata("file-owner"), "7");
        assert_eq!(metadata("file-mtime"), "1000000000123456789ns");
        // Without bytes to publish, a change is a copy within the store.
        fs::set_permissions(mount.path(name), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(metadata("file-permissions"), "0100755");
        // What was written later is newer, and the rest stays.
        fs::OpenOptions::new().append(true).open(mount.path(name)).unwrap().write_all(b"more").unwrap();
        let found = fs::metadata(other.path(name)).unwrap();
        assert_eq!((found.mode(), found.uid(), found.len()), (0o100_755, 7, len as u64 + 4), "{name}");
        assert!(found.modified().unwrap() > at(1_700_000_000, 0));
        let time = found.modified().unwrap();
        fs::rename(mount.path(name), mount.path("moved")).unwrap();
        let found = fs::metadata(other.path("moved")).unwrap();
        assert_eq!((found.mode(), found.modified().unwrap()), (0o100_755, time), "{name}");
        fs::remove_file(mount.path("moved")).unwrap();
    }
    fs::create_dir(mount.path("folder")).unwrap();
    fs::set_permissions(mount.path("folder"), fs::Permissions::from_mode(0o2770)).unwrap();
    File::open(mount.path("folder")).unwrap().set_modified(at(1_000_000_000, 0)).unwrap();
    symlink("../some/where", mount.path("folder/link")).unwrap();
    assert_eq!(symlink("x", mount.path("folder/link")).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(fs::metadata(other.path("folder")).unwrap().mode(), 0o042_770);
    assert_eq!(fs::metadata(other.path("folder")).unwrap().modified().unwrap(), at(1_000_000_000, 0));
    assert_eq!(fs::read_link(other.path("folder/link")).unwrap().to_str(), Some("../some/where"));
    assert_eq!(server.bytes(BUCKET, "p/folder/link").unwrap(), b"../some/where");
    let listed = fs::read_dir(other.path("folder")).unwrap().next().unwrap().unwrap();
    assert!(listed.file_type().unwrap().is_symlink());
    drop(listed);
    fs::rename(mount.path("folder"), mount.path("renamed")).unwrap();
    assert_eq!(fs::metadata(other.path("renamed")).unwrap().mode(), 0o042_770);
    assert_eq!(fs::read_link(other.path("renamed/link")).unwrap().to_str(), Some("../some/where"));
}

#[test]
fn attributes_of_other_programs_are_read_and_keep_their_form() {
    let Some(rig) = BucketRig::start() else { return };
    let of_s3fs = [("mode", "33188"), ("uid", "5"), ("gid", "6"), ("mtime", "1000000000.5"), ("note", "stays")];
    rig.server.put_with_metadata(BUCKET, "p/s3fs", b"one", &of_s3fs);
    rig.server.put_with_metadata(BUCKET, "p/s3fs-link", b"s3fs", &[("mode", "41471")]);
    let of_fsx = [("file-permissions", "0100600"), ("file-owner", "9"), ("file-mtime", "1000000000000")];
    rig.server.put_with_metadata(BUCKET, "p/fsx", b"two", &of_fsx);
    rig.server.put(BUCKET, "p/plain", b"three");
    let of_rclone = [("mtime", "1000000000.25"), ("md5chksum", "stale")];
    rig.server.put_with_metadata(BUCKET, "p/rclone", b"four", &of_rclone);
    let mount = rig.mount("mnt", ATTRS);
    let seen = |name: &str| fs::symlink_metadata(mount.path(name)).unwrap();
    assert_eq!((seen("s3fs").mode(), seen("s3fs").uid(), seen("s3fs").gid()), (0o100_644, 5, 6));
    assert_eq!(seen("s3fs").modified().unwrap(), at(1_000_000_000, 500_000_000));
    assert_eq!(fs::read_link(mount.path("s3fs-link")).unwrap().to_str(), Some("s3fs"));
    assert_eq!((seen("fsx").mode(), seen("fsx").uid()), (0o100_600, 9));
    assert_eq!(seen("fsx").modified().unwrap(), at(1_000_000_000, 0));
    assert_eq!(seen("plain").mode(), 0o100_644);
    fs::set_permissions(mount.path("s3fs"), fs::Permissions::from_mode(0o600)).unwrap();
    let metadata = |name: &str, key: &str| rig.server.metadata(BUCKET, &format!("p/{name}"), key);
    assert_eq!(metadata("s3fs", "mode").as_deref(), Some("33152"));
    assert_eq!(metadata("s3fs", "note").as_deref(), Some("stays"));
    assert_eq!(metadata("s3fs", "file-permissions"), None);
    mount.unmount();
    // Without the flag the metadata stay as they are, but not what new bytes make wrong.
    let mount = rig.mount("plain", &[]);
    fs::set_permissions(mount.path("fsx"), fs::Permissions::from_mode(0o755)).unwrap();
    chown(mount.path("fsx"), Some(1), Some(1)).unwrap();
    assert_eq!(fs::metadata(mount.path("fsx")).unwrap().mode(), 0o100_644);
    assert_eq!(symlink("x", mount.path("link")).unwrap_err().kind(), ErrorKind::PermissionDenied);
    fs::write(mount.path("rclone"), b"five").unwrap();
    assert_eq!(metadata("rclone", "md5chksum"), None);
    assert_ne!(metadata("rclone", "mtime").as_deref(), Some("1000000000.25"));
    assert_eq!(metadata("fsx", "file-permissions").as_deref(), Some("0100600"));
    mount.unmount();
}

/// The store checks signatures, which cover a run of blanks as a single one.
#[test]
fn metadata_with_runs_of_blanks_stay_through_every_change() {
    let Some(rig) = BucketRig::start() else { return };
    for (name, flags) in [("plain", &[][..]), ("attrs", ATTRS)] {
        let note = "two  and   three";
        rig.server.put_with_metadata(BUCKET, &format!("p/{name}"), b"one", &[("note", note)]);
        let mount = rig.mount(&format!("mnt-{name}"), flags);
        let file = mount.path(name);
        let renamed = mount.path("renamed");
        OpenOptions::new().append(true).open(&file).unwrap().write_all(b" two").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(&file, &renamed).unwrap();
        OpenOptions::new().append(true).open(&renamed).unwrap().write_all(b" three").unwrap();
        assert_eq!(rig.object("p/renamed").unwrap(), b"one two three");
        assert_eq!(rig.server.metadata(BUCKET, "p/renamed", "note").as_deref(), Some(note));
        fs::remove_file(&renamed).unwrap();
        mount.unmount();
    }
}

#[test]
fn copies_have_nothing_to_do_the_second_time() {
    if !has("rsync") || !has("tar") || !has("setfattr") {
        return;
    }
    let Some(rig) = BucketRig::start() else { return };
    let mount = rig.mount("mnt", ATTRS);
    copy_twice(&mount, &rig.world, &rig.server);
    mount.unmount();
}

/// Copies a tree with rsync, cp and tar.
pub fn copy_twice(mount: &Mount, world: &World, server: &S3Server) {
    let tree = world.dir("tree");
    shell(
        &tree,
        "mkdir -p a/b empty && printf one > a/one && head -c 9000000 /dev/zero > a/b/large && printf x > 'a/b/a name'
         chmod 600 a/one && chmod 755 a/b/large && chown 3:4 a/one && chmod 2775 a/b && ln -s ../a/one a/link && ln -s no dangling
         setfattr -n user.note -v 'some text' a/one && setfattr -n user.of.folder -v x a
         touch -d '2001-02-03 04:05:06.789' a/one a/b && touch -h -d '2002-02-03 04:05:06' a/link",
    );
    let tree_text = tree.display();
    let differences = |to: &str| {
        let mut command = std::process::Command::new("rsync");
        command.arg("-aXnic").arg("--delete").arg(tree.join("")).arg(mount.path(to).join(""));
        let out = finish(&mut command);
        assert!(out.status.success(), "{out:?}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    shell(&mount.at, &format!("rsync -aX '{tree_text}/' copied/"));
    assert_eq!(differences("copied"), "");
    let writes = server.writes();
    shell(&mount.at, &format!("rsync -aX '{tree_text}/' copied/"));
    assert_eq!(server.writes(), writes, "the second time writes nothing");
    shell(
        &mount.at,
        &format!("cp -a '{tree_text}' cp && test \"$(getfattr --only-values -n user.note cp/a/one)\" = 'some text'"),
    );
    assert_eq!(differences("cp"), "");
    shell(
        &mount.at,
        &format!(
            "tar --xattrs -C '{tree_text}' -cf tree.tar . && mkdir untarred && tar --xattrs --xattrs-include='*' -xpf tree.tar -C untarred"
        ),
    );
    assert_eq!(differences("untarred"), "");
    shell(
        &mount.at,
        "mv copied again && setfattr -x user.note again/a/one && setfattr -n user.note -v 'some text' again/a/one",
    );
    assert_eq!(differences("again"), "");
    let too_long = "x".repeat(3000);
    shell(&mount.at, &format!("! setfattr -n user.long -v {too_long} again/a/one 2> /dev/null"));
}

/// Parts of the names of tests that a bucket can't pass, and why. All tests of `link(2)` are left out too.
const LEFT_OUT: [(&str, &str); 19] = [
    ("::fifo", "a bucket has no pipes"),
    ("::char", "a bucket has no devices"),
    ("::block", "a bucket has no devices"),
    ("::socket", "a bucket has no sockets"),
    ("mkfifo::", "a bucket has no pipes"),
    ("mknod::", "a bucket has no devices and pipes"),
    ("open::socket", "a bucket has no sockets"),
    ("to_multiply_linked", "a bucket has no hard links"),
    ("unlink::update_ctime_success", "made with a hard link"),
    ("unlink::unchanged_ctime_failed", "made with a hard link"),
    ("updates_link_parent", "the links of a folder do not count its folders"),
    ("enametoolong_path", "a key has at most 1024 bytes"),
    ("rename::changed_ctime_success", "a rename keeps the times; POSIX leaves that open"),
    ("rename::preserve_metadata", "the inode number follows from the path"),
    ("unlink::update_mtime_ctime_success_folder", "the time of a folder does not follow its names"),
    ("open::changed_time_fields_success", "the time of a folder does not follow its names"),
    ("symlink::changed_parent_time_success", "the time of a folder does not follow its names"),
    ("rmdir::changed_time_parent_success", "the time of a folder does not follow its names"),
    ("mkdir::changed_time_fields_success", "the time of a folder does not follow its names"),
];

fn is_left_out(name: &str) -> bool {
    name.starts_with("link::") || LEFT_OUT.iter().any(|(part, _)| name.contains(part))
}

mod test_all {
    use super::*;

    #[test]
    fn pjdfstest_passes_as_far_as_a_bucket_goes() {
        let Some(program) = tool("pjdfstest") else { return };
        let Some(rig) = BucketRig::start() else { return };
        let mount = rig.mount("mnt", &["--object-attrs", "-o", "allow_other,suid,dev"]);
        let config = rig.world.file("pjdfstest.toml", pjdfstest::configuration("0.02").as_bytes());
        let outcomes = pjdfstest::run_in(&program, &config, &mount.at, &[], 100);
        let failed = outcomes.iter().filter(|(name, outcome)| *outcome == "FAILED" && !is_left_out(name));
        let failed: Vec<_> = failed.map(|(name, _)| name).collect();
        assert!(failed.is_empty(), "{failed:?}");
        let passed = outcomes.values().filter(|outcome| *outcome == "ok").count();
        println!("{passed} of {} tests pass", outcomes.len());
        assert!(passed > 100);
        mount.unmount();
    }
}
