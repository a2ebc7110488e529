//! File handles of a bucket's files, as an NFS server keeps them, after the kernel has forgotten the inodes.

use crate::objects::{BUCKET, BucketRig};
use spurline_rig::world::*;
use std::process::Command;

/// `sys.argv`: the mountpoint, the folder of admin sockets, and the command of a mount. Prints what each handle leads to.
const SCRIPT: &str = r#"
import ctypes, errno, glob, json, os, re, socket, subprocess, sys, time
at, run, command = sys.argv[1], sys.argv[2], sys.argv[3:]
# Where names of exported mounts are kept.
subprocess.run(["mount", "-t", "tmpfs", "exports", "/var/lib"], check=True)
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

def ask(request):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(glob.glob(run + "/mount-*.sock")[0])
        peer.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(peer.makefile().readline())

folder = re.search(r"(/\S+)/names.redb", ask({"op": "export"})["error"]["message"]).group(1)
os.makedirs(folder)
assert "ok" in ask({"op": "export"})

class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("kind", ctypes.c_int), ("room", ctypes.c_ubyte * 128)]

libc = ctypes.CDLL(None, use_errno=True)

def path(name):
    return os.path.join(at, name)

def handle_of(name):
    handle, mount = Handle(128, 0), ctypes.c_int()
    if libc.name_to_handle_at(-100, path(name).encode(), ctypes.byref(handle), ctypes.byref(mount), 0):
        raise OSError(ctypes.get_errno(), name)
    return handle

def forget_all():
    # The kernel forgets in the background.
    while True:
        with open("/proc/sys/vm/drop_caches", "w") as caches:
            caches.write("2")
        if ask({"op": "stats"})["ok"]["fuse"]["inodes"] == 1:
            return
        time.sleep(0.05)

def reach(handle):
    forget_all()
    root = os.open(at, os.O_RDONLY)
    try:
        file = libc.open_by_handle_at(root, ctypes.byref(handle), os.O_RDONLY)
        if file < 0:
            return errno.errorcode[ctypes.get_errno()]
        number = os.fstat(file).st_ino
        text = sorted(os.listdir(file)) if os.path.isdir(f"/proc/self/fd/{file}") else os.pread(file, 100, 0).decode()
        os.close(file)
        return text, number
    finally:
        os.close(root)

def write(name, text):
    with open(path(name), "w") as file:
        file.write(text)

os.mkdir(path("folder"))
names = ["changed", "replaced", "renamed", "rights", "removed", "made-again", "folder/below"]
for name in names:
    write(name, "old " + name)
handles = {name: handle_of(name) for name in names + ["folder"]}
write("changed", "new")
write("new", "over")
os.rename(path("new"), path("replaced"))
os.rename(path("renamed"), path("moved"))
os.chmod(path("rights"), 0o600)
os.remove(path("removed"))
os.remove(path("made-again"))
write("made-again", "another")
os.rename(path("folder"), path("elsewhere"))
now = {"renamed": "moved", "folder": "elsewhere", "folder/below": "elsewhere/below"}
for again in range(2):
    for name, handle in handles.items():
        reached = reach(handle)
        if not isinstance(reached, str):
            reached = (reached[0], os.stat(path(now.get(name, name))).st_ino == reached[1])
        print(name, json.dumps(reached))
    # A change while the kernel knows nothing of the file.
    forget_all()
    write("changed", "newer")
    write("elsewhere/below", "newer below")
"#;

#[test]
fn handles_lead_to_their_files_after_changes_and_renames() {
    let Some(rig) = BucketRig::start() else { return };
    let (at, cache) = (rig.world.dir("mnt"), rig.world.dir("cache"));
    let mut command = rig.world.command(&["mount", &format!("s3://{BUCKET}/p"), at.to_str().unwrap(), "--rw", "-d"]);
    command.args(["--object-attrs", "--endpoint-url", &rig.server.endpoint(), "--cache-dir"]).arg(cache);
    command.arg("--log").arg(rig.world.log_path("mount"));
    let mut apart = Command::new("unshare");
    apart.args([
        "--mount",
        "--propagation",
        "private",
        "--kill-child",
        "--pid",
        "--mount-proc",
        "--fork",
        "python3",
        "-c",
        SCRIPT,
    ]);
    apart.arg(&at).arg(rig.world.path("run")).arg(command.get_program()).args(command.get_args());
    same_environment(&mut apart, with_credentials(&mut command));
    let out = finish(&mut apart);
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{said}{}", String::from_utf8_lossy(&out.stderr));
    let after = |changed: &str, below: &str| {
        format!(
            "changed [\"{changed}\", true]\nreplaced \"ESTALE\"\nrenamed [\"old renamed\", true]\nrights [\"old rights\", true]\n\
             removed \"ESTALE\"\nmade-again \"ESTALE\"\nfolder/below [\"{below}\", true]\nfolder [[\"below\"], true]\n"
        )
    };
    assert_eq!(said, after("new", "old folder/below") + &after("newer", "newer below"));
}
