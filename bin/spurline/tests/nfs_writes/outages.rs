//! Locks of NFSv3 clients, and what clients meet when the process of an exported mount is killed: errors at first, waits once
//! the mount is taken away, and their files again when it is back.

use spurline_rig::nfs_rig::{BIN, NfsRig, SHORT_GRACE, output, sh};

#[test]
#[ignore = "needs the virtual machine"]
fn guest_clients_lock_and_outlive_a_killed_mount() {
    let (rig, other) = (NfsRig::new("killed"), NfsRig::new("neighbour"));
    rig.fill();
    let dir = rig.dir();
    // With locks in the source, the kernel refuses those of NFSv3 clients, and the export says so.
    rig.mount(&["-o", "allow_other", "--rw"]);
    let plan: serde_json::Value = serde_json::from_str(&output(&["export", &rig.at(), "--rw", "--json"])).unwrap();
    assert!(plan["requirements"].as_array().unwrap().iter().any(|r| r["name"] == "nfsv3-locks"), "{plan}");
    rig.unmount();
    let mount = format!("{BIN} mount {dir}/src {dir}/mnt -d -o allow_other --rw --local-locks {}", rig.flags());
    sh(&format!("{mount} >{dir}/started 2>&1"));
    let export = ["export", &rig.at(), "--rw", "--no-root-squash", "--clients", "10.77.0.0/16", "--apply"];
    assert!(!output(&export).contains("ENOLCK"));
    sh(SHORT_GRACE);
    let clients =
        [("v3", "vers=3,proto=tcp,timeo=50"), ("v3b", "vers=3,proto=tcp,nosharecache"), ("v4", "vers=4.2,proto=tcp")];
    for (name, options) in clients {
        rig.client_mount(name, options);
    }
    // Both clients of NFSv3 and the one of NFSv4 meet in the kernel's locks of the mount. Minutes, if the server just started.
    sh(&format!(
        "cd {dir}; echo x >v3/locked; exec 5<>v3/locked; flock 5
        for name in v3b v4; do
            flock -n $name/locked true 2>error && exit 1; test ! -s error
        done
        exec 5>&-; for name in v3b v4; do flock $name/locked true; done"
    ));
    // The process is killed. Each client has a file open.
    other.mount(&["-o", "allow_other"]);
    sh(&format!(
        "cd {dir}; kill -9 $(grep -o 'process [0-9]*' started | cut -d' ' -f2); sleep 1
        for name in v3 v4; do
            status=0; timeout 60 cat $name/folder/sub/small || status=$?; echo $name: $status; test $status = 1
        done"
    ));
    // Another export is made, and the answer names the dead one.
    let log = format!("{dir}/second");
    sh(&format!("{BIN} export {} --clients 10.77.0.0/16 --apply >{log} 2>&1; cat {log}", other.at()));
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(said.contains("other exports of this host") && said.contains(&rig.at()), "{said}");
    sh(&format!(
        "cd {dir}; {BIN} umount mnt 2>&1 | grep 'NFS clients wait'
        # Nothing is read below the mountpoint meanwhile.
        for name in v3 v4; do (cat $name/folder/sub/small >$name.got) & done
        sleep 5; test ! -s v3.got; test ! -s v4.got
        {mount} >started 2>&1
        for n in $(seq 170); do test -s v3.got && test -s v4.got && break; sleep 1; done
        for name in v3 v4; do cmp $name.got src/folder/sub/small; echo new >$name/after-$name; cmp $name/after-$name src/after-$name; done
        for name in v3 v3b v4; do for n in 1 2 3 4 5 6 7 8 9; do umount $name && break; sleep 1; done; done"
    ));
    output(&["export", &rig.at(), "--remove"]);
    output(&["export", &other.at(), "--remove"]);
    rig.unmount();
    other.unmount();
}
