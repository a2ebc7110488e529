//! `bench fio` on two hosts, which are network namespaces: with running fio servers, over a stand-in for ssh, and with
//! what goes wrong.

use super::{bench, check_page, has_fio, passed, path_in, report, said, skip, write_script};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

const HOSTS: [&str; 2] = ["10.232.9.1", "10.232.9.2"];

/// Two hosts with a cable between them; removed when dropped.
struct TwoHosts {
    names: [String; 2],
}

fn ip(words: &str) -> Result<(), String> {
    let out = Command::new("ip").args(words.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
}

impl TwoHosts {
    fn new(id: &str) -> Result<TwoHosts, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("network namespaces need root".into());
        }
        let hosts = TwoHosts { names: ["a", "b"].map(|side| format!("spf{}{id}{side}", std::process::id())) };
        let [a, b] = &hosts.names;
        for step in [format!("netns add {a}"), format!("netns add {b}")] {
            ip(&step)?;
        }
        ip(&format!("-n {a} link add lan0 type veth peer name lan0 netns {b}"))?;
        for (name, address) in hosts.names.iter().zip(HOSTS) {
            ip(&format!("-n {name} addr add {address}/24 dev lan0"))?;
            ip(&format!("-n {name} link set lan0 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(hosts)
    }

    /// The hosts, or a message that the test is skipped.
    fn or_skip(id: &str) -> Option<TwoHosts> {
        if !has_fio() {
            return None;
        }
        TwoHosts::new(id).map_err(|why| skip("netns", &why)).ok()
    }

    fn on(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host], program]);
        command
    }

    /// `bench fio` from the first host, which may find a stand-in for ssh.
    fn bench(&self, words: &[&str], path: &Path) -> Output {
        let mut command = self.on(0, env!("CARGO_BIN_EXE_spurline-bench"));
        let all = format!("{}:{}", path.display(), std::env::var("PATH").unwrap_or_default());
        command.arg("fio").args(words).args(["--work-dir", path.to_str().unwrap()]).env("PATH", all);
        command.output().unwrap()
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// A fio server, ended when dropped.
struct FioServer(Child);

impl FioServer {
    fn start(hosts: &TwoHosts, host: usize) -> FioServer {
        let mut command = hosts.on(host, "fio");
        command.arg("--server").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = FioServer(command.spawn().unwrap());
        for _ in 0..3000 {
            let mut probe = hosts.on(host, "bash");
            probe.args(["-c", "exec 3<>/dev/tcp/127.0.0.1/8765"]).stderr(Stdio::null());
            if probe.status().unwrap().success() {
                return server;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("fio does not listen");
    }
}

impl Drop for FioServer {
    fn drop(&mut self) {
        // `ip netns exec` has become fio.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const JOB: &str = "[global]\ndirectory=${DIR}\nfilename_format=spurline.$jobnum\nunique_filename=0\nrw=randread\nbs=${BS}\n\
size=${SIZE}\nioengine=psync\niodepth=${DEPTH}\ntime_based=1\nruntime=${TIME}\ngroup_reporting=1\n[own]\nnumjobs=${JOBS}\n";

#[test]
fn one_job_file_runs_on_both_hosts_at_once_in_turn_over_two_folders() {
    let Some(hosts) = TwoHosts::or_skip("r") else { return };
    let dir = tempfile::tempdir().unwrap();
    let data = path_in(&dir, "data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(path_in(&dir, "own.fio"), JOB).unwrap();
    let all = HOSTS.join(",");
    // Nothing listens yet.
    let out = hosts.bench(&["--hosts", &all, "--dir", &data, "--job", "prepare"], dir.path());
    assert_eq!(out.status.code(), Some(3), "{}", said(&out));
    assert!(said(&out).contains("no fio server answers at 10.232.9.1:8765") && said(&out).contains("--ssh"));
    let _servers = [0, 1].map(|host| FioServer::start(&hosts, host));
    let small = ["--size", "2m", "--time", "1s", "--rounds", "1"];
    let prepare = ["--hosts", HOSTS[1], "--dir", &data, "--job", "prepare", "--jobs", "2"];
    let out = hosts.bench(&[&prepare[..], &small].concat(), dir.path());
    passed(&out);
    let (json, html, job, tcp, rdma) = (
        path_in(&dir, "r.json"),
        path_in(&dir, "r.html"),
        path_in(&dir, "own.fio"),
        format!("tcp={data}"),
        format!("rdma={data}/../data"),
    );
    let words = ["--hosts", &all, "--job", &job, "--set", "BS=4k", "--dir", &tcp, "--dir", &rdma, "--clients", "1,2"];
    let more = ["--jobs", "2", "--json", &json, "--html", &html, "--plot"];
    let out = hosts.bench(&[&words[..], &small, &more].concat(), dir.path());
    passed(&out);
    for part in ["of tcp", "CPU-s/GiB fio", "Throughput over hosts", "Throughput over time", "p99"] {
        assert!(said(&out).contains(part), "{part:?} is missing: {}", said(&out));
    }
    let report = report(&json);
    let rows = report["rows"].as_array().unwrap();
    let shape: Vec<(&str, u64)> =
        rows.iter().map(|row| (row["folder"].as_str().unwrap(), row["hosts"].as_u64().unwrap())).collect();
    assert_eq!(shape, [("tcp", 1), ("rdma", 1), ("tcp", 2), ("rdma", 2)]);
    let run = &rows[3]["runs"][0];
    let each: Vec<u64> = run["hosts"].as_array().unwrap().iter().map(|host| host["bytes"].as_u64().unwrap()).collect();
    assert!(each.len() == 2 && each.iter().all(|bytes| *bytes > 0), "{run}");
    assert_eq!(run["all"]["bytes"].as_u64(), Some(each.iter().sum()), "summed as fio does");
    assert!(rows[3]["cpu_seconds_per_gib"]["fio"].is_number() && rows[3]["bytes_per_second"].as_f64() > Some(0.0));
    check_page(&html);
    // A job that fails on the hosts: what to do, with fio's own words.
    let out = hosts
        .bench(&["--hosts", &all, "--dir", "/no/such/folder", "--job", "seq-read-1m", "--rounds", "1"], dir.path());
    assert!(
        out.status.code() == Some(3) && said(&out).contains("there is no folder /no/such/folder"),
        "{}",
        said(&out)
    );
    assert!(said(&out).contains("failed parsing directory"), "{}", said(&out));
}

#[test]
fn servers_are_started_over_ssh_and_end_with_the_run() {
    let Some(hosts) = TwoHosts::or_skip("s") else { return };
    let dir = tempfile::tempdir().unwrap();
    let data = path_in(&dir, "data");
    std::fs::create_dir(&data).unwrap();
    // ssh OPTIONS -- HOST WORDS…, where the host is a namespace.
    let script = format!(
        "#!/bin/bash\nwhile [ \"$1\" != -- ]; do shift; done\n[ \"$2\" = {} ] && to={} || to={}\nshift 2\n[ \"$1\" = exec ] && shift\n\
         exec ip netns exec $to \"$@\"\n",
        HOSTS[0], hosts.names[0], hosts.names[1]
    );
    write_script(path_in(&dir, "ssh"), &script);
    let all = format!("{}:8770,{}:8770", HOSTS[0], HOSTS[1]);
    let words = ["--hosts", &all, "--ssh", "--dir", &data, "--job", "prepare", "--size", "1m", "--rounds", "1"];
    let out = hosts.bench(&words, dir.path());
    passed(&out);
    // fio's process for the last connection ends by itself, a moment after the server.
    let listens = || {
        let mut probe = hosts.on(1, "bash");
        probe.args(["-c", "exec 3<>/dev/tcp/127.0.0.1/8770"]).stderr(Stdio::null());
        probe.status().unwrap().success()
    };
    for _ in 0..1500 {
        if !listens() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(!listens(), "the server is still there");
    // A host where fio can't be started.
    std::fs::write(path_in(&dir, "ssh"), "#!/bin/sh\necho 'Permission denied (publickey).' >&2; exit 255\n").unwrap();
    let out = hosts.bench(&words, dir.path());
    assert_eq!(out.status.code(), Some(3), "{}", said(&out));
    assert!(said(&out).contains("Permission denied (publickey)"), "{}", said(&out));
}

/// `bench fio` on this machine, whose fio server it starts; none without fio.
fn bench_here(words: &[&str], work: &Path) -> Option<Output> {
    has_fio().then(|| bench(&[&["fio"], words, &["--work-dir", work.to_str().unwrap()]].concat()))
}

#[test]
fn the_rates_of_all_processes_are_summed_over_time() {
    let dir = tempfile::tempdir().unwrap();
    // Each of four processes is held at 1 MiB/s.
    std::fs::write(path_in(&dir, "own.fio"), format!("{}rate=1m\n", JOB.replace("randread", "read"))).unwrap();
    let (data, job, json) = (dir.path().display().to_string(), path_in(&dir, "own.fio"), path_in(&dir, "r.json"));
    let words = ["--dir", &data, "--job", &job, "--set", "BS=4k", "--size", "1m", "--jobs", "4"];
    let more = ["--time", "3s", "--rounds", "1", "--json", &json];
    let Some(out) = bench_here(&[&words[..], &more].concat(), dir.path()) else { return };
    passed(&out);
    let report = report(&json);
    let over_time = report["rows"][0]["runs"][0]["over_time"].as_array().unwrap();
    let most = over_time.iter().filter_map(|point| point["bytes_per_second"].as_f64()).fold(0.0, f64::max);
    assert!(most > 2.5 * f64::from(1 << 20), "{report}");
}

#[test]
fn reading_jobs_make_no_files_and_writing_jobs_leave_none() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let left = || -> Vec<(String, u64)> {
        let entry = |entry: std::io::Result<std::fs::DirEntry>| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())
        };
        let mut all: Vec<_> = std::fs::read_dir(&data).unwrap().map(entry).collect();
        all.sort();
        all
    };
    let run = |job: &str, more: &[&str]| {
        let words = ["--dir", data.to_str().unwrap(), "--job", job, "--time", "1s", "--rounds", "1"];
        bench_here(&[&words[..], more].concat(), dir.path())
    };
    let Some(out) = run("seq-read-1m", &["--size", "4m", "--jobs", "2"]) else { return };
    let hint = "--job prepare --dir SOURCE --jobs 2 --size 4m";
    assert!(out.status.code() == Some(3) && said(&out).contains(hint), "{}", said(&out));
    assert!(left().is_empty(), "{:?}", left());
    // Too short a file is not extended, and stays.
    let prepared = run("prepare", &["--size", "2m", "--jobs", "2"]).unwrap();
    assert!(prepared.status.success(), "{}", said(&prepared));
    let out = run("rand-read-4k", &["--size", "4m", "--jobs", "2"]).unwrap();
    assert!(out.status.code() == Some(3) && said(&out).contains(hint), "{}", said(&out));
    let files = [("spurline.0".to_owned(), 2 << 20), ("spurline.1".to_owned(), 2 << 20)];
    assert_eq!(left(), files);
    let out = run("rand-read-4k", &["--size", "2m", "--jobs", "2"]).unwrap();
    passed(&out);
    let out = run("rand-write-4k", &["--size", "2m", "--jobs", "2"]).unwrap();
    passed(&out);
    assert_eq!(left(), files);
    let absent = bench_here(&["--dir", "/no/such/folder"], dir.path()).unwrap();
    assert!(absent.status.code() == Some(3) && said(&absent).contains("there is no folder"), "{}", said(&absent));
}

#[test]
fn wrong_words_and_shipped_job_files() {
    assert!(passed(&bench(&["fio", "--list-jobs"])).contains("rand-write-4k"));
    assert!(passed(&bench(&["fio", "--print-job", "seq-read-1m"])).contains("rw=read\nbs=1m"));
    let refused = |words: &[&str], code, says| super::refused(&[&["fio"], words].concat(), code, says);
    refused(&[], 2, "--dir");
    if !has_fio() {
        return;
    }
    refused(&["--hosts", "a", "--dir", "mnt"], 2, "absolute folder");
    refused(&["--hosts=-oProxyCommand=x", "--dir", "/mnt"], 2, "no host");
    refused(&["--hosts", "a", "--dir", "/mnt", "--clients", "2"], 2, "--hosts names 1");
    let dir = tempfile::tempdir().unwrap();
    let job = dir.path().join("j.fio");
    std::fs::write(&job, "[j]\nbs=${BS}\n").unwrap();
    refused(&["--hosts", "a", "--dir", "/mnt", "--job", job.to_str().unwrap()], 2, "--set BS=VALUE");
    refused(&["--hosts", "a", "--dir", "/mnt", "--job", "/no/such.fio"], 3, "/no/such.fio");
}
