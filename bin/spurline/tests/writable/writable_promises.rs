//! Promises of SEMANTICS about writable mounts that no suite shows: replaced objects, users, devices, killed processes.

use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, TmpFs, WAYS};
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::process::{Command, Output};

/// Runs a script as a user without rights, in `at`.
fn as_nobody(at: &std::path::Path, script: &str) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", "cd \"$1\" && eval \"$2\"", "sh"]);
    finish(command.arg(at).arg(script).current_dir("/"))
}

/// Long cache times: the kernel uses names that are no longer right.
const OLD_NAMES: [&str; 6] = ["--attr-cache", "60s", "--entry-cache", "60s", "--dir-entry-cache", "60s"];

#[test]
fn what_another_host_has_replaced_is_found_under_its_name() {
    for nodes in [0, 2] {
        let Some(group) = Group::start(nodes) else { return };
        let mount = group.mount("mnt", 0, &[&OLD_NAMES[..], &["--no-passthrough"]].concat());
        fs::create_dir(mount.path("dir")).unwrap();
        fs::write(mount.path("dir/file"), "first").unwrap();
        assert_eq!(fs::read(mount.path("dir/file")).unwrap(), b"first");
        // Beside the mount: another file and another folder come under the names that the kernel holds.
        fs::write(group.source.join("dir/new"), "second, longer").unwrap();
        fs::rename(group.source.join("dir/new"), group.source.join("dir/file")).unwrap();
        // A handle that is still being closed keeps the first one.
        eventually("the name leads to the new file", || fs::read(mount.path("dir/file")).unwrap() == b"second, longer");
        // An open file is found by its old name for as long as the kernel holds that.
        eventually("no file is open", || mount.count("fuse", "open_handles") == 0);
        fs::rename(group.source.join("dir"), group.source.join("old")).unwrap();
        fs::create_dir(group.source.join("dir")).unwrap();
        fs::write(mount.path("dir/file"), "third").unwrap();
        assert_eq!(fs::read(group.source.join("dir/file")).unwrap(), b"third");
        assert_eq!(fs::read(group.source.join("old/file")).unwrap(), b"second, longer");
        mount.unmount();
    }
}

/// Linux sends `FUSE_SYNCFS` to virtiofs and fuseblk only.
#[test]
fn a_sync_of_the_file_system_makes_nothing_durable_and_one_of_the_file_does() {
    let Some(group) = Group::start(1) else { return };
    let mount = group.mount("mnt", 0, &[]);
    let file = File::create(mount.path("file")).unwrap();
    file.write_all_at(&bytes(1, 300_000), 0).unwrap();
    rustix::fs::syncfs(&file).unwrap();
    // What is not durable is in the mount's memory.
    assert!(mount.count("writes", "memory_bytes") >= 300_000);
    file.sync_all().unwrap();
    assert_eq!(mount.count("writes", "memory_bytes"), 0);
    drop(file);
    mount.unmount();
}

#[test]
fn without_mode_checks_of_the_kernel_the_source_decides() {
    for nodes in [0, 1] {
        let Some(group) = Group::start(nodes) else { return };
        let mount = group.mount("mnt", 0, &["-o", "no_default_permissions"]);
        fs::write(mount.path("private"), "text").unwrap();
        fs::set_permissions(mount.path("private"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::create_dir(mount.path("public")).unwrap();
        fs::set_permissions(mount.path("public"), fs::Permissions::from_mode(0o777)).unwrap();
        let out = as_nobody(&mount.at, "echo x > public/own && ! cat private && ! echo x >> private && ! mkdir new");
        assert!(out.status.success(), "{nodes} nodes: {out:?}");
        assert_eq!(fs::metadata(group.source.join("public/own")).unwrap().uid(), 65534);
        assert_eq!(fs::read(group.source.join("private")).unwrap(), b"text");
        mount.unmount();
    }
}

#[test]
fn a_user_mounts_for_itself_only() {
    let Some(group) = Group::start(0) else { return };
    let (at, run) = (group.world.dir("mnt"), group.world.dir("user-run"));
    for path in [&at, &run, &group.source] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    rustix::fs::chmod(&run, rustix::fs::Mode::RWXU).unwrap();
    let mut command = group.world.command(&["mount"]);
    command.arg(&group.source).arg(&at).args(["--rw", "-o", "allow_other", "--cache-size", "0"]);
    let mut wrapped = Command::new("setpriv");
    wrapped.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    // A program below a private folder can't be run by that user.
    let program = group.world.path("spurline");
    fs::copy(command.get_program(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    wrapped.arg(&program).args(command.get_args());
    same_environment(&mut wrapped, &command);
    let out = finish(wrapped.env("SPURLINE_RUNTIME_DIR", &run).current_dir("/"));
    refused(&out, 3, &["allow_other", "--squash 65534:65534"]);
}

#[test]
fn device_files_are_made_and_open_only_with_dev() {
    for (words, opens) in [(&[][..], false), (&["-o", "dev"][..], true)] {
        let Some(group) = Group::start_in_memory(0, "2m") else { return };
        let mount = group.mount("mnt", 0, words);
        let null = rustix::fs::makedev(1, 3);
        let kind = rustix::fs::FileType::CharacterDevice;
        let made = rustix::fs::mknodat(rustix::fs::CWD, mount.path("null"), kind, rustix::fs::Mode::RUSR, null);
        if made == Err(rustix::io::Errno::PERM) {
            return skip("mknod", "this container may make no device files");
        }
        made.unwrap();
        assert!(fs::metadata(mount.path("null")).unwrap().file_type().is_char_device());
        assert_eq!(fs::metadata(group.source.join("null")).unwrap().rdev(), null);
        let opened = File::open(mount.path("null"));
        assert_eq!(opened.is_ok(), opens, "{words:?}: {opened:?}");
        drop(opened);
        mount.unmount();
    }
}

#[test]
fn a_mount_inside_the_source_has_inode_numbers_of_its_own() {
    let Some(group) = Group::start(0) else { return };
    let inner = TmpFs::mount(&group.world.dir("source/inner"), "size=1m");
    fs::write(inner.0.join("file"), "inner").unwrap();
    fs::write(group.source.join("file"), "outer").unwrap();
    let mount = group.mount("mnt", 0, &[]);
    let number = |path: &str| fs::metadata(mount.path(path)).unwrap().ino();
    assert_eq!(number("file"), fs::metadata(group.source.join("file")).unwrap().ino());
    assert_ne!(number("inner/file"), fs::metadata(inner.0.join("file")).unwrap().ino());
    assert_eq!(fs::read(mount.path("inner/file")).unwrap(), b"inner");
    mount.unmount();
}

#[test]
fn what_was_written_is_in_the_source_after_a_kill_of_the_mount() {
    for way in WAYS {
        let Some(group) = Group::start(0) else { return };
        let mut mount = group.mount("mnt", 0, way);
        let file = File::create(mount.path("file")).unwrap();
        let text = bytes(5, 3 * MIB + 17);
        (&file).write_all(&text).unwrap();
        file.write_all_at(b"changed", 100).unwrap();
        mount.process_mut().kill();
        drop(file);
        let got = fs::read(group.source.join("file")).unwrap();
        assert!(got.len() == text.len() && got[100..107] == *b"changed" && got[107..] == text[107..], "{way:?}");
    }
}

/// What a successful command has printed.
fn printed(out: Output) -> String {
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// The ways of lone mounts, and a mount through a node.
fn each_way(test: impl Fn(&Group, &Mount)) {
    for (nodes, way) in WAYS.into_iter().map(|way| (0, way)).chain([(1, &[][..])]) {
        let Some(group) = Group::start(nodes) else { return };
        // What the kernel keeps, it keeps for longer than the test.
        let mount = group.mount("mnt", 0, &[&OLD_NAMES[..], way].concat());
        fs::set_permissions(&mount.at, fs::Permissions::from_mode(0o777)).unwrap();
        test(&group, &mount);
        mount.unmount();
    }
}

#[test]
fn programs_that_others_may_run_and_not_read_run() {
    each_way(|_, mount| {
        let program = mount.path("program");
        fs::copy("/bin/true", &program).unwrap();
        for (mode, runs) in [(0o711, true), (0o4111, true), (0o710, false), (0o744, false)] {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(as_nobody(&mount.at, "./program").status.success(), runs, "{mode:o}");
            assert_eq!(as_nobody(&mount.at, "cat program").status.success(), mode == 0o744, "{mode:o}");
        }
    });
}

#[test]
fn privileges_go_with_the_change_of_a_stranger() {
    let changes = [
        "printf x >> file",
        "printf x > file",
        "printf x 1<> file",
        "dd if=/dev/zero of=file bs=4096 count=1 oflag=direct conv=notrunc",
        "truncate -s 100 file",
        "fallocate -l 1M file",
        "fallocate -p -o 0 -l 4096 file",
        "fallocate -z -o 0 -l 4096 file",
    ];
    each_way(|group, mount| {
        let (file, source) = (mount.path("file"), group.source.join("file"));
        for change in changes {
            // Bits that a file has had when the kernel got it to write itself, and such that come later.
            for open in [None, Some(fs::OpenOptions::new().read(true).write(true))] {
                fs::write(&file, bytes(1, 9000)).unwrap();
                let open = open.map(|options| options.open(&file).unwrap());
                let modes = [(0o6777, 0o777), (0o2767, 0o2767)];
                for (mode, left) in modes.into_iter().take(if open.is_some() { 1 } else { 2 }) {
                    fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
                    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, mode);
                    printed(as_nobody(&mount.at, change));
                    // No attribute but the mode: the kernel answers from what it keeps.
                    let seen = printed(finish(Command::new("stat").args(["-c", "%a"]).arg(&file)));
                    let kept = fs::metadata(&source).unwrap().mode() & 0o7777;
                    assert_eq!(seen.trim(), format!("{kept:o}"), "{change}");
                    assert!(kept == left || kept == left & 0o777, "{change}: {kept:o}");
                }
            }
            fs::remove_file(&file).unwrap();
            fs::write(&file, bytes(1, 9000)).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o777)).unwrap();
            printed(finish(Command::new("setcap").arg("cap_setuid+ep").arg(&file)));
            assert!(!as_nobody(&mount.at, "setfattr -x security.capability file").status.success());
            printed(as_nobody(&mount.at, change));
            let mut value = [0; 64];
            let found = rustix::fs::getxattr(&file, "security.capability", &mut value[..]);
            assert_eq!(found, Err(rustix::io::Errno::NODATA), "{change}");
        }
    });
}
