//! Bytes that go to a node after their write has returned: errors are reported at fsync and at close, and an unmount waits
//! for the bytes.

use rustix::process::{Pid, Signal, kill_process};
use spurline_rig::world::*;
use spurline_rig::writable_group::Group;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::process::{Command, Stdio};

/// What each program begins with.
const ERRORS: &str = r#"
import os, sys
path, filler = sys.argv[1:]
def open_file():
    return os.open(path, os.O_CREAT | os.O_WRONLY)
def error(call, *arguments):
    try:
        call(*arguments)
    except OSError as failed:
        return failed.errno
def synced_twice_and_closed(file):
    return error(os.fsync, file), error(os.fsync, file), error(os.close, file)
"#;

/// One handle with two descriptors, one that is synced, and one that is closed only; and one that is opened later.
const REFUSED: &str = r#"
file, beside, only_closed = open_file(), open_file(), open_file()
os.write(file, b"no room")
print(error(os.fsync, file), error(os.fsync, file), error(os.close, os.dup(file)), error(os.close, file))
print(*synced_twice_and_closed(beside), error(os.close, only_closed))
print(error(os.fsync, open_file()))
"#;

/// After an unreported error a write fails itself; with room again, all is as before.
const ROOM_AGAIN: &str = r#"
late = open_file()
os.write(late, b"no room")
print(os.stat(path).st_size, error(os.write, late, b"no room"))
os.remove(filler)
os.write(late, b"room")
print(*synced_twice_and_closed(late))
"#;

#[test]
fn refused_bytes_are_reported_once_at_fsync_and_once_at_close() {
    let Some(group) = Group::start_in_memory(1, "4m") else { return };
    let mount = group.mount("mnt", 0, &[]);
    let filler = group.source.join("filler");
    fs::write(&filler, vec![7; 8 * MIB]).unwrap_err();
    // Processes of their own: this one has copies of its descriptors while it starts programs, and closes these with the error.
    let said = |script: &str| {
        let mut program = Command::new("python3");
        let out = finish(program.args(["-c", &format!("{ERRORS}{script}")]).arg(mount.path("file")).arg(&filler));
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    assert_eq!(said(REFUSED), "28 None 28 None\n28 None 28 28\nNone\n");
    assert_eq!(mount.stats()["writes"]["failures"].as_u64(), Some(1));
    let log = mount.process().log();
    assert!(log.contains("7 bytes at 0 of '/file' were not written: "), "{log}");
    assert_eq!(said(ROOM_AGAIN), "0 28\n28 None 28\n");
    assert!(fs::read(group.source.join("file")).unwrap().ends_with(b"room"));
    mount.unmount();
}

#[test]
fn an_unmount_waits_for_a_node_that_takes_the_bytes() {
    let Some(mut group) = Group::start(1) else { return };
    let mount = group.mount("mnt", 0, &["--peer-timeout", "300s"]);
    let mut file = File::create(mount.path("file")).unwrap();
    group.nodes[0].process.kill();
    file.write_all(b"on its way").unwrap();
    let mut command = group.world.command(&["umount", "--force", "--timeout", "300s"]);
    let mut unmount = command.arg(&mount.at).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(unmount.stderr.take().unwrap()).lines();
    let mut find = |words: &str| {
        let line = lines.by_ref().map(Result::unwrap).find(|line| line.contains(words));
        line.unwrap_or_else(|| panic!("no line with {words:?}"))
    };
    let line = find("waiting for a node to take");
    assert!(line.contains("10 B of written bytes: /file (10 B)"), "{line}");
    kill_process(Pid::from_child(&unmount), Signal::INT).unwrap();
    find("a second signal ends the wait");
    let port = group.nodes[0].port();
    group.nodes[0] = group.node(0, port);
    assert!(unmount.wait().unwrap().success());
    assert_eq!(fs::read(group.source.join("file")).unwrap(), b"on its way");
    drop((file, mount));
}

mod test_all {
    use super::*;

    /// The bytes of a write that failed are not sent later, however often it is made again; those of others are.
    #[test]
    fn a_write_that_failed_is_not_made_later() {
        let Some(mut group) = Group::start(1) else { return };
        let mount = group.mount("mnt", 0, &["--peer-timeout", "2s"]);
        let flags = libc::O_SYNC;
        let mut log = File::options().create(true).append(true).custom_flags(flags).open(mount.path("log")).unwrap();
        let synced =
            File::options().create_new(true).write(true).custom_flags(flags).open(mount.path("synced")).unwrap();
        let mut plain = File::create(mount.path("plain")).unwrap();
        log.write_all(b"first\n").unwrap();
        log.sync_all().unwrap();
        synced.write_all_at(b"old-old-old", 0).unwrap();
        plain.write_all(b"sent, ").unwrap();
        plain.sync_all().unwrap();
        group.nodes[0].process.kill();
        plain.write_all(b"on its way").unwrap();
        for _ in 0..2 {
            log.write_all(b"transfer\n").unwrap_err();
            synced.write_all_at(b"NEW", 4).unwrap_err();
        }
        let said = mount.process().log();
        assert!(said.contains(" '/log': ") && said.contains(" '/synced': "), "{said}");
        let port = group.nodes[0].port();
        group.nodes[0] = group.node(0, port);
        eventually("the node is reached again", || log.write_all(b"second\n").is_ok());
        for file in [&log, &synced, &plain] {
            eventually("the file is durable", || file.sync_all().is_ok());
        }
        drop((log, synced, plain));
        mount.unmount();
        let found = |name: &str| fs::read_to_string(group.source.join(name)).unwrap();
        assert_eq!(
            [found("log"), found("synced"), found("plain")],
            ["first\nsecond\n", "old-old-old", "sent, on its way"]
        );
    }
}
