//! A mount in the guest, and the kernel's NFS server and client beside it.

use spurline_testkit::{GuestKernel, GuestNet, run_in_guest_of, skip};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Once;

/// The program in the guest's own memory: the files of the host are far away from there.
pub const BIN: &str = "/vmtmp/spurline";

/// Runs the guest tests of this program; prints the reason if the tools of NFS are not there.
pub fn run_nfs_guest() {
    run_nfs_guest_of(GuestKernel::Stock, "guest_");
}

/// The same of tests with another prefix, and with a choice of the kernel.
pub fn run_nfs_guest_of(kernel: GuestKernel, prefix: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/nfs-tools.sh");
    let tools = Command::new(script).output().unwrap();
    if tools.status.success() {
        run_in_guest_of(kernel, GuestNet::Two, &[prefix]);
    } else {
        skip("nfs", &format!("no tools of NFS: {}", String::from_utf8_lossy(&tools.stderr).trim()));
    }
}

/// Whether this is the long form: many names, and all programs over every transport.
pub fn is_nightly() -> bool {
    ["SPURLINE_TEST_NFS_NAMES", "SPURLINE_TEST_NFS_ALL"].iter().any(|name| std::env::var_os(name).is_some())
}

/// Runs a script; each of its commands has to succeed.
pub fn sh(script: &str) {
    // A client of a server that is gone waits for ever. The output goes to a file: a daemon would keep a pipe open.
    let log = std::fs::File::create("/vmtmp/script.log").unwrap();
    let mut command = Command::new("timeout");
    let limit = if is_nightly() { "1800" } else { "200" };
    command.args(["-k", "5", limit, "bash", "-euxo", "pipefail", "-c", script]).stdin(std::process::Stdio::null());
    let status = command.stdout(log.try_clone().unwrap()).stderr(log).status().unwrap();
    let text = std::fs::read_to_string("/vmtmp/script.log").unwrap();
    assert!(status.success(), "{status}: {text}");
}

/// Every version and transport. A client that has mounted a server by NFSv4 uses the same connection for all of its
/// NFSv4 mounts, so that TCP and RDMA take turns.
pub const CASES: [[(&str, &str); 2]; 2] = [
    [("v4tcp", "vers=4.2,proto=tcp"), ("v3tcp", "vers=3,proto=tcp,nolock")],
    [("v4rdma", "vers=4.2,proto=rdma,port=20049"), ("v3rdma", "vers=3,proto=rdma,port=20049,nolock,mountproto=tcp")],
];

/// New opens and locks need a server that grants them at once: seconds after it has started, not minutes.
pub const SHORT_GRACE: &str = "rpc.nfsd 0; echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime
    echo 5 >/proc/sys/fs/nfs/nlm_grace_period; rpc.nfsd 8";

fn run(words: &[&str], code: i32) -> String {
    let out = Command::new(BIN).args(words).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert_eq!(out.status.code(), Some(code), "{words:?}: {text}");
    if code == 0 { String::from_utf8(out.stdout).unwrap() } else { text }
}

/// Output of a command that succeeds.
pub fn output(words: &[&str]) -> String {
    run(words, 0)
}

/// Output of a command that ends with `code`.
pub fn fails(words: &[&str], code: i32) -> String {
    run(words, code)
}

/// A process of this test; it ends with it.
pub struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a script whose output goes to `log`.
pub fn start(script: &str, log: &str) -> Started {
    let log = std::fs::File::create(log).unwrap();
    let mut command = Command::new("bash");
    command.args(["-euo", "pipefail", "-c", script]).stdin(std::process::Stdio::null());
    Started(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
}

/// Installs the tools into the guest, which forgets them with all else, and loads the client's modules.
fn ready() {
    static READY: Once = Once::new();
    READY.call_once(|| {
        let tools = output_of("scripts/nfs-tools.sh");
        sh(&format!(
            "(cd {tools}; tar c .) | tar x -C / --keep-directory-symlink; ldconfig
            mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/sm /var/lib/nfs/rpc_pipefs /etc/exports.d /run/rpcbind
            touch /var/lib/nfs/etab /var/lib/nfs/rmtab /etc/exports
            grep -q ^_rpc: /etc/passwd || echo '_rpc:x:399:65534::/run/rpcbind:/usr/sbin/nologin' >>/etc/passwd
            [ -e /var/run ] || ln -s /run /var/run
            modprobe -a nfs nfsv4 nfsv3 fuse
            rpcbind; rpc.statd --no-notify
            printf '[exports]\\nrootdir=/vmtmp\\n' >/etc/nfs.conf"
        ));
        std::fs::copy(crate::program::program_path(), BIN).unwrap();
    });
}

fn output_of(script: &str) -> String {
    let out = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(script)).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

/// A source, its mount and the mountpoints of clients.
pub struct NfsRig {
    dir: String,
}

impl NfsRig {
    /// A rig in a folder of this name: the guest forgets it at its end.
    pub fn new(name: &str) -> NfsRig {
        ready();
        let dir = format!("/vmtmp/{name}");
        for folder in ["src", "mnt"] {
            std::fs::create_dir_all(Path::new(&dir).join(folder)).unwrap();
        }
        NfsRig { dir }
    }

    pub fn dir(&self) -> &str {
        &self.dir
    }

    /// The mountpoint.
    pub fn at(&self) -> String {
        format!("{}/mnt", self.dir())
    }

    /// Flags of every mount.
    pub fn flags(&self) -> String {
        format!("--cache-dir {0}/cache --cache-size 32M --log {0}/log --metrics none", self.dir())
    }

    /// Fills the source.
    pub fn fill(&self) {
        sh(&format!(
            "cd {}/src; mkdir -p folder/sub; head -c 3000000 /dev/urandom >folder/big; echo hello >folder/sub/small
            ln -s big folder/link; : >folder/empty",
            self.dir()
        ));
    }

    pub fn mount(&self, words: &[&str]) {
        sh(&format!("{BIN} mount {}/src {} -d {} {}", self.dir(), self.at(), self.flags(), words.join(" ")));
    }

    pub fn unmount(&self) {
        sh(&format!("{BIN} umount {}", self.at()));
    }

    /// Unmounts after writes that the source has refused. The source may report their errors once more, when the unmount makes the
    /// rest durable.
    pub fn unmount_after_refusals(&self) {
        let allowed = "not all changes of the mount are durable";
        sh(&format!(
            "out=$({BIN} umount {} 2>&1) || grep '{allowed}' <<< \"$out\" || {{ echo \"$out\"; exit 1; }}",
            self.at()
        ));
    }

    /// Mounts the export as a client.
    pub fn client_mount(&self, name: &str, options: &str) {
        let dir = self.dir();
        let shown = self.at().trim_start_matches("/vmtmp").to_owned();
        sh(&format!("mkdir {dir}/{name}; timeout 60 mount -t nfs -o {options} 10.77.0.1:{shown} {dir}/{name}"));
    }
}
