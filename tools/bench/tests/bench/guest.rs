//! `bench fio` in the virtual machine: the NFS cases by scripts/nfs-bench, with the kernel's server and client, and TCP beside
//! RDMA on two machines by scripts/rdma-bench; and wrong words.

use super::{passed, report, said, skip};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The report and the page of a script that runs guests, or a message that the test is skipped.
fn reports_of(script: &str, more: &[&str]) -> Option<(Value, String)> {
    let programs = Path::new(env!("CARGO_BIN_EXE_spurline-bench")).parent().unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(script));
    command.arg("--programs").arg(programs).arg("--out").arg(out.path()).args(["--seconds", "900"]);
    let done = command.args(more).args(["--time", "1s", "--rounds", "1"]).output().unwrap();
    if done.status.code() == Some(3) {
        skip(if script.starts_with("nfs") { "nfs" } else { "rdma" }, &said(&done));
        return None;
    }
    passed(&done);
    Some((report(out.path().join("report.json")), std::fs::read_to_string(out.path().join("report.html")).unwrap()))
}

#[test]
#[ignore = "takes minutes in an emulated guest; .ci/nightly runs it"]
fn cases_stand_beside_tmpfs_the_mount_itself_and_perftest() {
    let more = ["--size", "16m", "--depth", "2", "--nfs-case", "v3-tcp,v4-rdma-nconnect,v4-tcp-addresses"];
    // Client and server are one machine.
    let Some((report, page)) = reports_of("nfs-bench", &[&more[..], &["--server-host", "localhost"]].concat()) else {
        return;
    };
    assert_eq!(report["perftest"]["program"], "ib_write_bw");
    let rows = report["rows"].as_array().unwrap();
    let row = |name: &str| rows.iter().find(|row| row["folder"] == name).unwrap_or_else(|| panic!("{name}: {report}"));
    assert_eq!((rows.len(), row("mount-itself")["nfs_case"].is_null()), (7, true));
    let connections = |name: &str, kind: &str| row(name)["runs"][0]["connections"][kind].as_u64();
    assert_eq!(connections("spurline v3-tcp", "tcp"), Some(1), "{report}");
    assert_eq!(connections("spurline v4-tcp-addresses", "tcp"), Some(2), "{report}");
    assert!(connections("spurline v4-rdma-nconnect", "rdma") >= Some(1), "{report}");
    for name in ["spurline v3-tcp", "spurline v4-rdma-nconnect"] {
        let row = row(name);
        assert!(row["ratio"].as_f64() > Some(0.0) && row["cpu_seconds_per_gib"]["machine"].is_number(), "{row}");
        assert!(row["cpu_seconds_per_gib"]["server"].is_number(), "{row}");
    }
    assert!(row("tmpfs v3-tcp")["ratio"].is_null());
    assert!(page.contains("<svg") && page.contains("v4-rdma-nconnect") && !page.contains("http://"));
}

#[test]
fn wrong_words_say_what_is_right() {
    let refused = |words: &[&str], code, says| super::refused(&[&["fio"], words].concat(), code, says);
    refused(&["--hosts", "a", "--dir", "/x", "--nfs-case", "v3-tcp"], 2, "--nfs");
    refused(&["--hosts", "a", "--dir", "/x", "--perftest"], 2, "--nfs");
    if !super::has_fio() {
        return;
    }
    refused(&["--hosts", "localhost", "--nfs", "nas"], 2, "[NAME=]HOST[,HOST]:/PATH");
    refused(&["--hosts", "localhost", "--nfs", "nas:/x", "--nfs-case", "v5-tcp"], 2, "v4-rdma-addresses");
    refused(&["--hosts", "c1", "--nfs", "nas:/x"], 2, "give --ssh");
    refused(&["--hosts", "localhost", "--nfs", "nas:/x", "--server-host", "nas"], 2, "--server-host: give --ssh");
    refused(&["--hosts", "localhost", "--dir", "/x", "--server-host", "nas"], 2, "--nfs");
    // Where mounting is possible at all, this export is not there.
    refused(
        &["--hosts", "localhost:8799", "--nfs", "127.0.0.1:/no/such/export", "--nfs-case", "v4-tcp"],
        3,
        "localhost: ",
    );
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn tcp_stands_beside_rdma_on_two_machines() {
        let Some((report, page)) = reports_of("rdma-bench", &["--size", "4m", "--jobs", "2"]) else { return };
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2, "{report}");
        for (row, transport) in rows.iter().zip(["tcp", "rdma"]) {
            assert_eq!(row["folder"], transport);
            // The counters prove which transport carried the bytes.
            let received =
                |name: &str| row["runs"][0]["counters"][format!("mounts.{name}.recv_bytes")].as_u64().unwrap_or(0);
            assert!(received(transport) >= 1 << 20, "{row}");
            assert!(row["cpu_seconds_per_gib"]["nodes"].is_number(), "{row}");
        }
        assert!(page.contains("<svg") && page.contains("Folders beside each other"));
    }
}
