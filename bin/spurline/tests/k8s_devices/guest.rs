//! `k8s verify` on Soft-RoCE devices in the virtual machine: passing, and failing each way.

use crate::rig::{run, spurline, wait_for};
use serde_json::Value;
use spurline_testkit::{GuestNet, run_in_guest};
use std::process::{Command, Stdio};

/// Two emulated machines on a busy host: one of them may not run for longer than the default of 15 s.
const TIMEOUT: [&str; 2] = ["--timeout", "90s"];

/// A file that both machines see.
fn shared(name: &str) -> std::path::PathBuf {
    std::path::PathBuf::from(std::env::var_os("SPURLINE_TEST_VM_SHARE").unwrap()).join(name)
}

#[test]
#[ignore = "in_two_virtual_machines runs it in the second guest"]
fn side_b_serves() {
    let mut server = spurline();
    server.args(["net", "serve", "--bind", "all", "--port", "18600"]).args(TIMEOUT).env("NODE_NAME", "node-b");
    server.stdout(Stdio::null());
    let mut server = server.spawn().unwrap();
    wait_for("the server", || std::net::TcpStream::connect("127.0.0.1:18600").ok());
    std::fs::write(shared("serving"), "").unwrap();
    while !shared("done").exists() {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let _ = server.kill();
    let _ = server.wait();
}

/// Two pods on two nodes, and each rail in the state in which it fails.
#[test]
#[ignore = "in_two_virtual_machines runs it in the first guest"]
fn side_a_verifies_the_rails_to_another_node() {
    wait_for("the other machine", || shared("serving").exists().then_some(()));
    let peer = [["--peer", "10.77.0.2:18600"], TIMEOUT].concat();
    let mut command = spurline();
    command.args(["k8s", "verify", "--min-share", "0", "--time", "1s"]).args(&peer).env("NODE_NAME", "node-a");
    let out = command.output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    println!("{text}");
    assert_eq!(out.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&out.stderr));
    assert!(text.contains("on node node-a\n") && text.contains("on node node-b\n"), "{text}");
    assert!(!text.contains("on one node"), "{text}");
    let out = command.arg("--json").output().unwrap();
    let report: Value =
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)));
    assert_eq!((&report["here"]["node"], &report["peer"]["node"]), (&"node-a".into(), &"node-b".into()));
    let guids = |end: &str| -> Vec<String> {
        let rails = report[end]["rails"].as_array().unwrap().iter();
        rails.map(|rail| rail["guid"].as_str().unwrap().to_owned()).collect()
    };
    assert!(guids("here").len() == 2 && guids("here") != guids("peer"), "{report:#}");
    let figures = report["measurements"].as_array().unwrap();
    assert_eq!(figures.len(), 2, "{report:#}");
    for rail in figures {
        let of = |name: &str| rail[name].as_f64().unwrap_or_else(|| panic!("{name} in {rail}"));
        assert!(of("gbps") > 0.0 && of("min_us") <= of("median_us") && of("median_us") <= of("p99_us"), "{rail}");
        assert!(of("stdev_us") >= 0.0, "{rail}");
    }
    // Slow: emulation does not reach the rate, which has to be given, as a device in software makes one up.
    let (code, report) = verify(&[&peer[..], &["--min-share", "100", "--rate", "2.5", "--time", "1s"]].concat());
    assert!(code == 1 && failed(&report, "bandwidth").len() == 2, "{report:#}");
    // One rail without an address, then without a link: the other one is measured.
    sh("ip address flush dev rail1");
    let (code, report) = verify(&[&peer[..], &["--min-share", "0", "--time", "1s"]].concat());
    assert!(code == 1 && failed(&report, "gid").len() == 1, "{report:#}");
    assert_eq!(report["measurements"].as_array().unwrap().len(), 1, "{report:#}");
    sh("ip link set rail1 down");
    let (code, report) = verify(&[&peer[..], &["--min-share", "0", "--time", "1s"]].concat());
    assert!(code == 1 && failed(&report, "port").len() == 1, "{report:#}");
    std::fs::write(shared("done"), "").unwrap();
}

fn sh(script: &str) {
    let out = Command::new("sh").args(["-c", script]).output().unwrap();
    assert!(out.status.success(), "{script}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Runs `k8s verify --json`; its exit code and report.
fn verify(arguments: &[&str]) -> (i32, Value) {
    let (code, out, err) = run(&[&["k8s", "verify", "--json"], arguments].concat());
    (code, serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}")))
}

/// Subjects and evidence of the rows of a check that failed.
fn failed(report: &Value, check: &str) -> Vec<String> {
    let rows = report["rows"].as_array().unwrap().iter();
    let rows = rows.filter(|r| r["check"] == check && r["pass"] == false);
    rows.map(|r| format!("{} {}", r["subject"].as_str().unwrap(), r["evidence"].as_str().unwrap())).collect()
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_1_a_pod_passes_and_both_rails_are_measured() {
    let (code, report) = verify(&["--here", "--min-share", "0", "--time", "1s"]);
    assert_eq!((code, &report["pass"]), (0, &Value::from(true)), "{report:#}");
    let figures = report["measurements"].as_array().unwrap();
    assert_eq!(figures.len(), 2, "{report:#}");
    for rail in figures {
        let of = |name: &str| rail[name].as_f64().unwrap_or_else(|| panic!("{name} in {rail}"));
        assert!(of("gbps") > 0.0 && of("min_us") > 0.0 && of("p99_us") >= of("median_us"), "{rail}");
        println!("measured: {rail}");
    }
    let here = &report["here"]["rails"][0];
    assert!(here["hca"] == "rxe0" && here["gid"].as_str().unwrap().contains("RoCE v2"), "{here}");
    let (code, out, _) = run(&["k8s", "verify", "--here", "--time", "0s"]);
    assert!(code == 0 && out.contains("rxe0/1") && out.contains("nothing was measured"), "{out}");
    // The same devices for the plugin's configuration.
    let (code, out, err) = run(&["k8s", "discover"]);
    assert!(code == 0 && out.contains("rail0") && err.contains("rdma/roce"), "{out}{err}");
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_2_two_pods_on_one_node_are_measured_and_named() {
    let mut server = spurline();
    server.args(["net", "serve", "--bind", "all", "--port", "18600"]).stdout(Stdio::null());
    let mut server = server.spawn().unwrap();
    wait_for("the server", || std::net::TcpStream::connect("127.0.0.1:18600").ok());
    let (code, report) = verify(&["--peer", "10.77.0.1", "--min-share", "0", "--time", "1s"]);
    let _ = server.kill();
    let _ = server.wait();
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["here"]["rails"], report["peer"]["rails"]);
    let notes = report["notes"].to_string();
    assert!(notes.contains("both pods are on one node and share rxe0, rxe1"), "{notes}");
    let (code, _, err) = run(&["k8s", "verify", "--peer", "127.0.0.1:1"]);
    assert!(code == 3 && err.contains("net serve"), "{code} {err}");
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_3_each_failure_has_its_row_and_remedy() {
    // Slow: emulation does not reach the rate, which has to be given, as a device in software makes one up.
    let (code, report) = verify(&["--here", "--min-share", "100", "--rate", "2.5", "--time", "1s"]);
    assert!(code == 1 && failed(&report, "bandwidth").len() == 2, "{report:#}");
    let (code, report) = verify(&["--here", "--min-share", "0", "--max-latency", "0s", "--time", "1s"]);
    assert!(code == 1 && failed(&report, "latency").len() == 2, "{report:#}");
    // Little memory can be locked, and no capability lifts the limit.
    let mut command = Command::new("prlimit");
    command.args(["--memlock=65536:65536", "setpriv", "--bounding-set=-all", "--inh-caps=-all"]);
    let out = command.arg(env!("CARGO_BIN_EXE_spurline")).args(["k8s", "verify", "--here"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.code() == Some(1) && text.contains("64 KiB can be locked, 256 MiB are needed"), "{text}");
    assert!(
        text.contains("IPC_LOCK") && text.contains("--cdi-memlock") && text.contains("nothing was measured"),
        "{text}"
    );
    // A port that is down.
    sh("ip link set rail0 down");
    let (code, report) = verify(&["--here", "--min-share", "0", "--time", "0s"]);
    assert!(code == 1 && failed(&report, "port")[0].starts_with("rxe0/1 DOWN"), "{report:#}");
    sh("ip link set rail0 up");
    // No interface with an address: as in a pod without a network attachment.
    sh("ip address flush dev rail0; ip address flush dev rail1");
    let (code, report) = verify(&["--here", "--min-share", "0"]);
    assert!(code == 1 && failed(&report, "gid").len() == 2, "{report:#}");
    // No device node, then no device.
    sh("mv /dev/infiniband /dev/away");
    let (code, report) = verify(&["--here"]);
    assert!(code == 1 && failed(&report, "device").len() == 2, "{report:#}");
    assert!(report["rows"].to_string().contains("a hostPath does not suffice"), "{report:#}");
    sh("mv /dev/away /dev/infiniband; rdma link delete rxe0; rdma link delete rxe1");
    let (code, report) = verify(&["--here"]);
    assert!(code == 1 && failed(&report, "device") == ["all /sys/class/infiniband shows no device"], "{report:#}");
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_2_the_output_of_perftest_is_read() {
    let run_test = |program: &str, more: &str| {
        sh(&format!(
            "{program} -d rxe0 -x 1 {more} >/tmp/server.txt 2>&1 & sleep 2; \
             timeout 60 {program} -d rxe0 -x 1 {more} 10.77.0.1 >/tmp/client.txt 2>&1; wait"
        ));
        std::fs::read_to_string("/tmp/client.txt").unwrap()
    };
    let text = run_test("ib_write_bw", "-s 65536 -n 200");
    let (code, _) = verify(&["--read", "/tmp/client.txt", "--rate", "0.01"]);
    assert_eq!(code, 1, "no port carries more than its rate");
    let (code, report) = verify(&["--read", "/tmp/client.txt", "--rate", "400", "--min-share", "0"]);
    assert!(code == 0 && report["rows"][0]["check"] == "bandwidth", "{report:#}\n{text}");
    assert_eq!(report["perftest"]["device"], "rxe0", "{text}");
    let (code, _) = verify(&["--read", "/tmp/client.txt", "--rate", "400"]);
    assert_eq!(code, 1);
    let text = run_test("ib_write_lat", "-n 200");
    let (code, report) = verify(&["--read", "/tmp/client.txt"]);
    assert!(code == 0 && report["perftest"]["rows"][0]["p99_us"].as_f64().is_some(), "{report:#}\n{text}");
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_the_virtual_machine() {
        run_in_guest(GuestNet::Two, &["guest_"]);
    }

    #[test]
    fn in_two_virtual_machines() {
        run_in_guest(GuestNet::Pair, &["side_"]);
    }
}
