//! `spurline export`, with the real binary: the kernel's NFS server and client in the virtual machine, over TCP and over
//! RDMA, NFSv3 and NFSv4.2. Every test compares what a client reads with the source. `nfs_writes` has the clients that write.

mod sharing;
mod sources;

use spurline_rig::nfs_rig::{BIN, CASES, NfsRig, fails, output, run_nfs_guest, sh};
use std::path::Path;

#[test]
#[ignore = "needs the virtual machine"]
fn guest_requirements_and_words_are_checked_before_anything_is_changed() {
    let rig = NfsRig::new("words");
    let usage = |words: &[&str]| fails(&[&["export"], words].concat(), 2);
    assert!(usage(&["/x", "--clients", "10.0.0.0/64"]).contains("0 to 32"));
    assert!(usage(&["/x", "--clients", "10.0.0.300"]).contains("10.0.0.300 is no address"));
    assert!(usage(&["/x", "--apply", "--remove"]).contains("--remove"));
    assert!(fails(&["export", "/vmtmp"], 1).contains("not a mountpoint of spurline"));
    assert!(fails(&["export", "--check", "192.0.2.1"], 1).contains("192.0.2.1"));
    rig.mount(&[]);
    let text = fails(&["export", &rig.at(), "--apply", "--clients", "10.77.0.0/16"], 3);
    assert!(text.contains("allow_other") && text.contains("-o allow_other"), "{text}");
    assert!(!Path::new("/etc/nfs.conf.d/spurline.conf").exists());
    rig.unmount();
    rig.mount(&["-o", "allow_other"]);
    let text = fails(&["export", &rig.at(), "--rw", "--apply", "--clients", "10.77.0.0/16"], 3);
    assert!(text.contains("read-only"), "{text}");
    let plan: serde_json::Value = serde_json::from_str(&output(&["export", &rig.at(), "--rdma", "--json"])).unwrap();
    assert_eq!(plan["applied"], false);
    assert!(plan["requirements"].as_array().unwrap().iter().all(|r| r["state"] != "error"), "{plan}");
    assert!(plan["changes"].as_array().unwrap().len() > 3, "{plan}");
    assert!(!Path::new("/etc/nfs.conf.d/spurline.conf").exists(), "printing changes nothing");
    assert!(fails(&["export", &rig.at(), "--remove"], 1).contains("not exported"));
    rig.unmount();
}

#[test]
#[ignore = "needs the virtual machine"]
fn guest_clients_read_over_every_transport_and_their_handles_outlive_the_mount() {
    let rig = NfsRig::new("reads");
    rig.fill();
    let options = ["-o", "allow_other"];
    rig.mount(&options);
    let made = output(&["export", &rig.at(), "--rdma", "--clients", "10.77.0.0/16", "--apply"]);
    assert!(made.contains("is exported to 10.77.0.0/16") && made.contains("proto=rdma,port=20049"), "{made}");
    // Once more changes nothing.
    output(&["export", &rig.at(), "--rdma", "--clients", "10.77.0.0/16", "--apply"]);
    for cases in CASES {
        let names = cases.map(|(name, _)| name).join(" ");
        for (name, options) in cases {
            rig.client_mount(name, options);
            sh(&format!("diff -r {}/src {}/{name}", rig.dir(), rig.dir()));
        }
        println!("{}", output(&["export", "--check", "10.77.0.1"]));
        let check = output(&["export", "--check", "10.77.0.1", "--json"]);
        let check: serde_json::Value = serde_json::from_str(&check).unwrap();
        assert_eq!(check["mounts"].as_array().unwrap().len(), 2, "{check}");
        for mount in check["mounts"].as_array().unwrap() {
            let transport = if mount["mountpoint"].as_str().unwrap().contains("rdma") { "rdma" } else { "tcp" };
            assert_eq!(mount["connections"][0]["transport"], transport, "{mount}");
            assert!(mount["read_bytes"].as_u64().unwrap() > 1 << 20, "{mount}");
        }
        // The kernel forgets what it has cached; then the mount is another process. Files that clients have open stay open.
        sh(&format!(
            "cd {dir}
            declare -A open
            head -c 1000 src/folder/big >head
            for name in {names}; do
                exec {{fd}}<$name/folder/big
                open[$name]=$fd
                head -c 1000 <&$fd | cmp - head
            done
            echo 3 >/proc/sys/vm/drop_caches
            for name in {names}; do timeout 60 cat $name/folder/sub/small | cmp - src/folder/sub/small; done
            rpc.nfsd 0
            # How long new opens wait for clients that had files open.
            echo 10 >/proc/fs/nfsd/nfsv4leasetime
            echo 10 >/proc/fs/nfsd/nfsv4gracetime
            {BIN} umount mnt
            # The mount keeps what it inherits open.
            (for fd in ${{open[@]}}; do exec {{fd}}<&-; done; {BIN} mount src mnt -d -o allow_other {flags})
            rpc.nfsd 8
            for name in {names}; do
                timeout 150 cat <&${{open[$name]}} >got
                tail -c $(stat -c %s got) src/folder/big | cmp - got
                test $(stat -c %s got) -gt 1000000
                timeout 150 ls $name/folder/sub >/dev/null
            done",
            dir = rig.dir(),
            flags = rig.flags(),
        ));
        let status: serde_json::Value = serde_json::from_str(&output(&["status", &rig.at(), "--json"])).unwrap();
        assert_eq!(status["export"]["handles_kept"], true, "{status}");
        assert_eq!(
            (&status["export"]["active"], &status["export"]["writable"]),
            (&true.into(), &false.into()),
            "{status}"
        );
        assert!(status["export"]["clients"].as_array().unwrap().iter().any(|c| c == "10.77.0.1"), "{status}");
        assert!(status["export"]["read_bytes"].as_u64().unwrap() > 1 << 20, "{status}");
        let shown = output(&["status", &rig.at()]);
        assert!(shown.contains("export: read-only by NFS over TCP and RDMA, 1 client (10.77.0.1)"), "{shown}");
        let stats: serde_json::Value =
            serde_json::from_str(&output(&["stats", &rig.at(), "--json", "-c", "1"])).unwrap();
        assert_eq!((&stats["export"]["active"], &stats["export"]["clients"]), (&1.into(), &1.into()), "{stats}");
        // A folder of many names is listed in pages.
        let count: usize = std::env::var("SPURLINE_TEST_NFS_NAMES").map_or(1_000, |n| n.parse().unwrap());
        sh(&format!(
            "cd {dir}; mkdir -p src/many; (cd src/many; seq {count} | xargs touch); sleep 1.5
            for name in {names}; do
                test $(ls $name/many | sort -u | wc -l) = {count}
                # A client closes files in the background.
                for n in 1 2 3 4 5 6 7 8 9; do umount $name && break; sleep 1; done
            done",
            dir = rig.dir()
        ));
    }
    let gone = output(&["export", &rig.at(), "--remove"]);
    assert!(gone.contains("no longer exported"), "{gone}");
    // The server was started for the export.
    sh("grep -qx 0 /proc/fs/nfsd/threads");
    for left in ["/etc/nfs.conf.d/spurline.conf", "/etc/exports.d/spurline*", "/var/lib/spurline/exports/*"] {
        sh(&format!("! ls {left} 2>/dev/null"));
    }
    rig.unmount();
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_the_virtual_machine() {
        run_nfs_guest();
    }
}
