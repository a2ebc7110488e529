//! Automounts: an autofs at the mountpoint, as systemd makes it for `x-systemd.automount`, starts the mount helper at the first
//! access. A Python program stands in for systemd.

use spurline_rig::world::*;
use spurline_rig::writable_group::has;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// Mounts an autofs, lets another process list the mountpoint, and answers the kernel's request by a mount helper in its own
/// process group. Prints the listing.
const AUTOMOUNTER: &str = r#"
import ctypes, fcntl, os, struct, subprocess, sys
MISSING_DIRECT, READY, FAIL = 5, 0x9360, 0x9361
at, helper = sys.argv[1], sys.argv[2:]
os.setpgid(0, 0)
requests, kernel = os.pipe()
options = f"fd={kernel},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"systemd-1", at.encode(), b"autofs", 0, options.encode()) != 0:
    sys.exit(77)
os.close(kernel)
trap = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
lister = subprocess.Popen(["ls", at], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
kind, token = struct.unpack_from("=4xiI", os.read(requests, 4096))
assert kind == MISSING_DIRECT, kind
code = subprocess.run(helper).returncode
fcntl.ioctl(trap, FAIL if code else READY, token)
print("listed:", lister.communicate()[0].decode().strip())
sys.exit(code)
"#;

/// An automount at a directory of a world; whatever is mounted there is detached at the end.
struct Automount {
    world: World,
    at: PathBuf,
}

impl Automount {
    fn new() -> Option<Automount> {
        if !can_mount() || !has("python3") {
            return None;
        }
        let world = World::new();
        world.file("source/file", b"1");
        let at = world.dir("mnt");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_spurline"), world.path("mount.spurline")).unwrap();
        Some(Automount { world, at })
    }

    /// The outcome of the first access, where the helper mounts `source` with these options; `None` without autofs.
    fn access(&self, source: &str, options: &str) -> Option<Output> {
        let mut python = Command::new("python3");
        python.args(["-c", AUTOMOUNTER]).arg(&self.at).arg(self.world.path("mount.spurline"));
        python.arg(self.world.path(source)).arg(&self.at);
        let log = self.world.path("log");
        python.args(["-o", &format!("_netdev,noauto,x-systemd.automount,cache-size=0,log={}{options}", log.display())]);
        same_environment(&mut python, &self.world.command(&[]));
        let out = finish(python.stdin(Stdio::null()));
        if out.status.code() == Some(77) {
            skip("autofs", "this kernel has no autofs");
            return None;
        }
        Some(out)
    }
}

impl Drop for Automount {
    fn drop(&mut self) {
        // Before the directory is removed: an access would start a mount.
        detach(&self.at);
    }
}

#[test]
fn the_first_access_to_an_automount_mounts() {
    let Some(automount) = Automount::new() else { return };
    for options in ["", ",nonempty"] {
        let Some(out) = automount.access("source", options) else { return };
        let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success() && said.contains("listed: file"), "{options}: {said}");
        // The automount stays below the mount, which ends as any other.
        let mut umount = automount.world.command(&["umount"]);
        let out = finish(umount.arg(&automount.at));
        assert!(out.status.success(), "{out:?}");
        assert!(is_mounted(&automount.at), "the automount is gone");
        detach(&automount.at);
    }
}

#[test]
fn a_failed_mount_ends_the_access_to_its_automount() {
    let Some(automount) = Automount::new() else { return };
    let Some(out) = automount.access("none", "") else { return };
    let said = refused(&out, 3, &["the source directory", "can't be opened"]);
    assert!(String::from_utf8_lossy(&out.stdout).contains("No such file or directory"), "{said}");
}
