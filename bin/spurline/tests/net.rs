//! `spurline net` on made-up hosts, as a person meets it: tables, JSON, collected files, exit codes.

use spurline_testkit::hosts::Made;
use std::path::Path;
use std::process::{Command, Output};

fn net(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spurline")).arg("net").args(words).output().unwrap()
}

fn text(out: &Output) -> String {
    assert!(out.status.success(), "{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout.clone()).unwrap()
}

fn folder(made: &Made) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    made.write_to(dir.path());
    dir
}

fn str(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn list_of_a_folder_as_table_and_json() {
    let dir = folder(&spurline_testkit::hosts::gb200());
    let table = text(&net(&["list", "--gids", "--from", str(dir.path())]));
    let line = |with: &str| table.lines().find(|l| l.contains(with)).unwrap_or_else(|| panic!("{with}: {table}"));
    for part in ["ibP2p3s0", "InfiniBand", "ACTIVE", "LinkUp", "400 Gb/s (4X NDR)", "4092", "datagram"] {
        assert!(line("mlx5_1 ").contains(part), "{part}: {table}");
    }
    for part in ["bond0", "Ethernet RoCE", "v2 from 1", "9000"] {
        assert!(line("mlx5_bond_0 ").contains(part), "{part}: {table}");
    }
    assert!(table.contains("15b3:1021") && table.contains("ConnectX-7") && table.contains("32 GT/s x16"), "{table}");
    assert!(table.contains("0000:0000:0000:0000:0000:ffff:0a14:0001") && table.contains("10.20.0.1"), "{table}");
    assert!(line("bond0 ").contains("mlx5_bond_0") && table.contains("bond 802.3ad"), "{table}");
    assert!(!table.contains('\u{1b}'), "no colour where there is no terminal");

    let json: serde_json::Value =
        serde_json::from_str(&text(&net(&["list", "--json", "--from", str(dir.path())]))).unwrap();
    let port = &json["devices"][0]["ports"][0];
    assert_eq!(json["devices"][0]["device"], "mlx5_0");
    assert_eq!(
        (&port["link_layer"], &port["state"], &port["sm_lid"]),
        (&"InfiniBand".into(), &"ACTIVE".into(), &1.into())
    );
    assert_eq!(port["rate"]["gbps"], 400.0);
    assert_eq!(json["devices"][0]["pci"]["vendor"], 0x15b3);
}

#[test]
fn a_collected_file_says_the_same_as_the_folder() {
    let dir = folder(&spurline_testkit::hosts::mt25208());
    let file = dir.path().join("facts.tar.zst");
    text(&net(&["collect", "--from", str(dir.path()), "-o", str(&file)]));
    let of = |from: &Path| text(&net(&["list", "--json", "--from", str(from)]));
    assert_eq!(of(&file), of(dir.path()));
    // An ordinary tar unpacks it to a folder that reads the same.
    let Ok(plain) = Command::new("zstd").args(["-dqc", str(&file)]).output() else {
        println!("SKIP: no zstd to unpack a collected file with");
        return;
    };
    let out = tempfile::tempdir().unwrap();
    let tar = out.path().join("facts.tar");
    std::fs::write(&tar, plain.stdout).unwrap();
    assert!(Command::new("tar").args(["-xf", str(&tar), "-C", str(out.path())]).status().unwrap().success());
    assert_eq!(of(out.path()), of(dir.path()));
}

#[test]
fn this_host_can_be_listed_and_collected() {
    assert!(text(&net(&["list"])).contains("INTERFACE"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("here.tar.zst");
    text(&net(&["collect", "-o", str(&file)]));
    let names = |words: &[&str]| {
        let json: serde_json::Value = serde_json::from_str(&text(&net(words))).unwrap();
        json["interfaces"].as_array().unwrap().iter().map(|i| i["interface"].clone()).collect::<Vec<_>>()
    };
    let loopback = serde_json::Value::from("lo");
    assert!(names(&["list", "--json", "--from", str(&file)]).contains(&loopback));
}

#[test]
fn facts_that_are_none_exit_3() {
    let dir = tempfile::tempdir().unwrap();
    let junk = dir.path().join("junk");
    std::fs::write(&junk, "this is no archive").unwrap();
    for from in [junk, dir.path().join("missing")] {
        let out = net(&["list", "--from", str(&from)]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(3), "{said}");
        assert!(said.contains("net collect"), "{said}");
    }
}

fn findings(out: &Output) -> Vec<serde_json::Value> {
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
    assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    json["findings"].as_array().unwrap().clone()
}

#[test]
fn doctor_says_what_is_wrong_and_its_exit_code_how_bad() {
    let dir = folder(&spurline_testkit::hosts::no_sm());
    let out = net(&["doctor", "--from", str(dir.path())]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.starts_with("error NO-SUBNET-MANAGER mthca0/1"), "the worst first: {said}");
    assert!(said.contains("fix: on ONE host of the fabric") && !said.contains('\u{1b}'), "{said}");
    let found = findings(&net(&["doctor", "--json", "--from", str(dir.path())]));
    for f in &found {
        let keys: Vec<&str> = f.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["doc", "evidence", "id", "remedy", "severity", "subject"]);
        assert!(["error", "warning", "info"].contains(&f["severity"].as_str().unwrap()));
    }
    let well = folder(&spurline_testkit::hosts::gb200());
    assert_eq!(net(&["doctor", "--from", str(well.path())]).status.code(), Some(0));
    let plain = folder(&spurline_testkit::hosts::plain());
    assert_eq!(net(&["doctor", "--from", str(plain.path())]).status.code(), Some(0));
    let wanted = net(&["doctor", "--for-rdma", "eth0", "--from", str(plain.path())]);
    assert_eq!(wanted.status.code(), Some(1), "RDMA is wanted, and there is none");
    assert!(matches!(net(&["doctor"]).status.code(), Some(0 | 1)));
}

#[test]
fn doctor_explains_and_compares() {
    let page = text(&net(&["doctor", "--explain", "same-subnet"]));
    assert!(page.starts_with("# SAME-SUBNET"));
    let out = net(&["doctor", "--explain", "NONSENSE"]);
    assert_eq!(out.status.code(), Some(2));
    let (one, two) = (folder(&spurline_testkit::hosts::roce_jumbo()), folder(&spurline_testkit::hosts::mt25208()));
    let file = two.path().join("peer.tar.zst");
    text(&net(&["collect", "--from", str(two.path()), "-o", str(&file)]));
    let found = findings(&net(&["doctor", "--json", "--from", str(one.path()), "--peer", str(&file)]));
    assert!(found.iter().any(|f| f["id"] == "PEER-LINK-LAYER" && f["severity"] == "error"), "{found:?}");
    let out = net(&["doctor", "--peer", "127.0.0.1:1"]);
    assert_eq!(out.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&out.stderr).contains("net collect"));
}
