//! Bytes that go to a node after their write has returned: errors are reported at fsync and at close, and an unmount waits
//! for the bytes.

use rustix::process::{Pid, Signal, kill_process};
use spurline_rig::world::*;
use spurline_rig::writable_group::Group;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::IntoRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::process::Stdio;

fn close(file: File) -> Option<i32> {
    // SAFETY: the descriptor is the file's own, and is not used again.
    let closed = unsafe { libc::close(file.into_raw_fd()) };
    (closed != 0).then(|| std::io::Error::last_os_error().raw_os_error().unwrap())
}

fn sync(file: &File) -> Option<i32> {
    file.sync_all().err().map(|error| error.raw_os_error().unwrap())
}

#[test]
fn refused_bytes_are_reported_once_at_fsync_and_once_at_close() {
    let Some(group) = Group::start_in_memory(1, "4m") else { return };
    let mount = group.mount("mnt", 0, &[]);
    let open = || OpenOptions::new().create(true).write(true).truncate(false).open(mount.path("file")).unwrap();
    let (mut file, beside, only_closed) = (open(), open(), open());
    let filler = group.source.join("filler");
    fs::write(&filler, vec![7; 8 * MIB]).unwrap_err();
    file.write_all(b"no room").unwrap();
    assert_eq!(sync(&file), Some(libc::ENOSPC));
    assert_eq!(sync(&file), None, "reported before");
    let again = file.try_clone().unwrap();
    assert_eq!((close(again), close(file)), (Some(libc::ENOSPC), None), "one handle with two descriptors");
    assert_eq!((sync(&beside), sync(&beside), close(beside)), (Some(libc::ENOSPC), None, Some(libc::ENOSPC)));
    assert_eq!(close(only_closed), Some(libc::ENOSPC));
    let mut late = open();
    assert_eq!((sync(&late), mount.stats()["writes"]["failures"].as_u64()), (None, Some(1)));
    let log = mount.process().log();
    assert!(log.contains("7 bytes at 0 of '/file' were not written: "), "{log}");
    // After an unreported error a write fails itself; with room again, all is as before.
    late.write_all(b"no room").unwrap();
    assert_eq!(fs::metadata(mount.path("file")).unwrap().len(), 0);
    assert_eq!(late.write_all(b"no room").unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    fs::remove_file(&filler).unwrap();
    late.write_all(b"room").unwrap();
    assert_eq!((sync(&late), sync(&late), close(late)), (Some(libc::ENOSPC), None, Some(libc::ENOSPC)));
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
        let mut log = OpenOptions::new().create(true).append(true).open(mount.path("log")).unwrap();
        let flags = libc::O_SYNC;
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
            eventually("the file is durable", || sync(file).is_none());
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
