//! POSIX suites of clients over NFSv4.2: what passes on the same server's export of a tmpfs passes on the export of a mount,
//! too. Every night.

use spurline_rig::nfs_rig::{NfsRig, SHORT_GRACE, output, sh};
use spurline_rig::{fsx, pjdfstest};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tool that scripts/setup installs, in the guest's own memory; prints the reason if it is not there.
fn find_tool(name: &str, dir: &str) -> Option<PathBuf> {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/bin").join(name);
    if !tool.is_file() {
        spurline_testkit::skip(name, &format!("{name} is not installed (scripts/setup test does it)"));
        return None;
    }
    let copy = Path::new(dir).join(name);
    fs::copy(tool, &copy).unwrap();
    Some(copy)
}

#[test]
#[ignore = "needs the virtual machine"]
fn guest_posix_suites_pass_where_they_pass_on_an_exported_tmpfs() {
    if std::env::var_os("SPURLINE_TEST_NFS_ALL").is_none() {
        println!("SKIP: the POSIX suites of clients run every night (SPURLINE_TEST_NFS_ALL)");
        return;
    }
    let rig = NfsRig::new("suites");
    let dir = rig.dir().to_owned();
    let (Some(suite), Some(random)) = (find_tool("pjdfstest", &dir), find_tool("fsx", &dir)) else { return };
    rig.mount(&["-o", "allow_other", "--rw"]);
    output(&["export", &rig.at(), "--rw", "--no-root-squash", "--clients", "10.77.0.0/16", "--apply"]);
    sh(&format!(
        "mkdir {dir}/ram; mount -t tmpfs tmpfs {dir}/ram
        echo '/suites/ram 10.77.0.0/16(rw,sync,no_root_squash,no_subtree_check,fsid=77)' >/etc/exports.d/ram.exports
        exportfs -ra; {SHORT_GRACE}
        mkdir {dir}/bare; timeout 60 mount -t nfs -o vers=4.2,proto=tcp 10.77.0.1:/suites/ram {dir}/bare"
    ));
    rig.client_mount("served", "vers=4.2,proto=tcp");
    let places = ["bare", "served"].map(|name| Path::new(&dir).join(name));
    let (config, left) = (Path::new(&dir).join("fsx.toml"), Path::new(&dir).join("left"));
    fs::write(&config, fsx::OPERATIONS).unwrap();
    fs::create_dir_all(&left).unwrap();
    let ops = fsx::more_operations().unwrap_or(1_500).to_string();
    for place in &places {
        let mut command = Command::new(&random);
        command.args(["-N", &ops, "-S", "19", "-f"]).arg(&config).arg("-P").arg(&left).arg(place.join("file"));
        let out = command.output().unwrap();
        assert!(out.status.success(), "fsx at {}: {out:?}", place.display());
    }
    let config = Path::new(&dir).join("pjdfstest.toml");
    fs::write(&config, pjdfstest::configuration("0.1")).unwrap();
    for path in [Path::new("/vmtmp"), Path::new(&dir)] {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    let [want, got] = places.map(|place| {
        let below = place.join("suite");
        fs::create_dir(&below).unwrap();
        fs::set_permissions(&below, Permissions::from_mode(0o777)).unwrap();
        pjdfstest::run_in(&suite, &config, &below, &[], 300)
    });
    // The program that must be busy runs for ten seconds, which is too short for a busy emulated machine.
    let passed = pjdfstest::check_equal("over NFSv4.2", &want, &got, |name| !name.ends_with("::etxtbsy"));
    println!(
        "over NFSv4.2: {ops} operations of fsx, {passed} of {} tests of pjdfstest pass, as on an exported tmpfs",
        got.len()
    );
    sh(&format!(
        "cd {dir}; for name in bare served; do for n in 1 2 3 4 5 6 7 8 9; do umount $name && break; sleep 1; done; done
        rm /etc/exports.d/ram.exports; exportfs -ra; exportfs -f; umount ram"
    ));
    output(&["export", &rig.at(), "--remove"]);
    rig.unmount();
}
