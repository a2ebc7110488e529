//! Several exports on one server, which is the administrator's: what they share, what keeps them apart, and what is left when
//! they are taken back.

use spurline_rig::nfs_rig::{BIN, NfsRig, fails, output, sh};

/// A server with settings of its own: three threads, no NFSv3, and an export that is none of Spurline's.
const OWN_SERVER: &str = "
printf '[exports]\\nrootdir=/vmtmp\\n[nfsd]\\nthreads=3\\nvers3=n\\n' >/etc/nfs.conf
mkdir -p /vmtmp/own; echo '/own 10.77.0.0/16(ro,sync,no_subtree_check,fsid=78)' >/etc/exports.d/own.exports
modprobe nfsd; mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd
rpc.nfsd 0; echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime
exportfs -ra; rpc.nfsd; pgrep rpc.mountd || rpc.mountd
test $(cat /proc/fs/nfsd/threads) = 3; grep -q -- '-3 ' /proc/fs/nfsd/versions";

/// As it was before; the kernel keeps a version switched off.
const NO_SERVER: &str = "
rpc.nfsd 0; echo +3 >/proc/fs/nfsd/versions; rm /etc/exports.d/own.exports; exportfs -ra
printf '[exports]\\nrootdir=/vmtmp\\n' >/etc/nfs.conf";

#[test]
#[ignore = "needs the virtual machine"]
fn guest_exports_share_the_administrators_server_and_leave_it_as_it_was() {
    let rig = NfsRig::new("shared");
    let (dir, at) = (rig.dir().to_owned(), rig.at());
    let [writable, third] = ["mnt2", "mnt3"].map(|name| format!("{dir}/{name}"));
    let flags = format!("-d -o allow_other --cache-size 0 --log {dir}/log --metrics none");
    let clients = ["--clients", "10.77.0.0/16", "--apply"];
    let apply = |at: &str, words: &[&str]| output(&[&["export", at], words, &clients].concat());
    sh(&format!("{OWN_SERVER}; mkdir {writable} {third} {dir}/other; echo a >{dir}/src/a; sleep 1.5"));
    rig.mount(&["-o", "allow_other"]);
    let made = apply(&at, &["--rdma"]);
    assert!(made.contains("NFSv3 is switched off") && !made.contains("# NFSv3"), "{made}");
    let settings = "/etc/nfs.conf.d/spurline.conf";
    let shared = std::fs::read_to_string(settings).unwrap();
    assert!(shared.contains("rdma=y") && !shared.contains("threads") && !shared.contains("vers"), "{shared}");
    let plan = output(&["export", &at, "--rdma", "--clients", "10.77.0.0/16"]);
    assert!(plan.contains("none: it is exported like this already"), "{plan}");
    // A writable mount of the same source has a file system id of its own; a second one of the same kind is refused.
    sh(&format!("{BIN} mount {dir}/src {writable} --rw {flags}; {BIN} mount {dir}/src {third} {flags}"));
    apply(&writable, &["--rw", "--no-root-squash"]);
    assert_eq!(std::fs::read_to_string(settings).unwrap(), shared, "one export does not take RDMA from another");
    let refused = fails(&[&["export", &third][..], &clients].concat(), 3);
    assert!(refused.contains(&format!("export {at} --remove")), "{refused}");
    sh(&format!(
        "{BIN} umount {third}; cd {dir}; mkdir ro rw
        timeout 60 mount -t nfs -o vers=4.2,proto=tcp 10.77.0.1:/shared/mnt ro
        timeout 60 mount -t nfs -o vers=4.2,proto=tcp 10.77.0.1:/shared/mnt2 rw
        if touch ro/new 2>error; then exit 1; fi; grep 'Read-only' error
        echo new >rw/new; test $(cat src/new) = new; test $(cat ro/a) = a
        grep -q server1 /etc/hosts || echo 10.77.0.1 server1 >>/etc/hosts"
    ));
    // Mounted by address, and found by name.
    let check = output(&["export", "--check", "server1"]);
    assert!(
        check.contains(&format!("{dir}/ro")) && check.contains("The NFS server of this host: 3 threads"),
        "{check}"
    );
    let busy = fails(&["umount", &at], 1);
    assert!(busy.contains("in use by the NFS server") && busy.contains("--remove"), "{busy}");
    sh(&format!(
        "cd {dir}; for name in ro rw; do for n in 1 2 3 4 5 6 7 8 9; do umount $name && break; sleep 1; done; done"
    ));
    // exportfs leaves a client out whose name it can't resolve, and succeeds.
    let unknown = fails(&["export", &at, "--rdma", "--clients", "no.such.host", "--apply"], 1);
    assert!(unknown.contains("clients are not admitted: no.such.host"), "{unknown}");
    // Another source is there now, and the export is taken back nevertheless.
    rig.unmount();
    sh(&format!("{BIN} mount {dir}/other {at} {flags}"));
    let user = "setpriv --reuid 1234 --regid 1234 --clear-groups";
    sh(&format!(
        "cd {dir}; chmod 755 . /vmtmp; status=0; {user} {BIN} export {at} --remove >said 2>&1 || status=$?
        test $status = 3; grep -q 'this is user 1234' said; test $(ls /etc/exports.d/spurline* | wc -l) = 2
        status=0; unshare -Ur {BIN} export {at} >said 2>&1 || status=$?; test $status = 3; grep -q 'root of a user namespace' said"
    ));
    let removed = output(&["export", &at, "--remove"]);
    assert!(removed.contains("left the server listens for RDMA at port 20049"), "{removed}");
    rig.unmount();
    output(&["export", &writable, "--remove"]);
    for left in [settings, "/etc/exports.d/spurline*", "/var/lib/spurline/exports/*"] {
        sh(&format!("! ls {left} 2>/dev/null"));
    }
    sh(&format!(
        "{BIN} umount {writable}; exportfs -v | grep -q ^/own
        test $(cat /proc/fs/nfsd/threads) = 3; grep -q -- '-3 ' /proc/fs/nfsd/versions; {NO_SERVER}"
    ));
}
