//! `load` and `free` with the real binary: files enter the cache before they are read, and leave it on request.

use rustix::process::Signal;
use serde_json::Value;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, S3Server};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn json(out: &Output) -> Value {
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"))
}

fn source(world: &World) -> String {
    for n in 0..40 {
        world.file(&format!("source/train/{n}.bin"), &bytes(n, n as usize * 1000));
    }
    world.file("source/train/deep/large", &bytes(99, 5 * MIB + 3));
    world.file("source/other", b"not asked for");
    world.path("source").to_str().unwrap().to_owned()
}

#[test]
fn what_was_loaded_is_read_without_the_source_and_what_was_freed_is_not_there() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let url = source(&world);
    let mount = world.mount(&url, &["--attr-cache", "1h", "--no-passthrough"]);
    let train = mount.path("train");
    let train = train.to_str().unwrap();
    let out = world.run(&["load", train, "--verify", "--json"]);
    let job = json(&out);
    assert_eq!(out.status.code(), Some(0), "{job}");
    let n = |key: &str| job[key].as_u64().unwrap();
    let size = 40 * 39 / 2 * 1000 + 5 * MIB as u64 + 3;
    assert_eq!((job["state"].as_str(), n("files_done"), n("files_verified")), (Some("SUCCEEDED"), 41, 41), "{job}");
    assert_eq!((n("bytes_done"), n("bytes_moved"), n("bytes_verified")), (size, size, size), "{job}");
    // Reading fetches nothing more.
    let before = mount.count("object", "get_bytes");
    assert!(before >= size);
    for name in fs::read_dir(train).unwrap().flatten().filter(|e| e.file_type().unwrap().is_file()) {
        let name = name.file_name();
        assert_eq!(
            mount.read(format!("train/{}", name.to_str().unwrap())),
            fs::read(format!("{url}/train/{}", name.to_str().unwrap())).unwrap()
        );
    }
    assert_eq!(mount.read("train/deep/large"), bytes(99, 5 * MIB + 3));
    assert_eq!(mount.count("object", "get_bytes"), before);
    // The same job again finds all of it there, and reports that.
    let again = json(&world.run(&["load", train, "--skip-if-exists", "--json"]));
    assert_eq!((again["files_skipped"].as_u64(), again["bytes_moved"].as_u64()), (Some(40), Some(0)), "{again}");
    let out = world.run(&["free", train]);
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("freed"), "{out:?}");
    let info = json(&world.run(&["info", mount.path("train/deep/large").to_str().unwrap(), "--json"]));
    assert_eq!(info["blocks"]["cached"], 0, "{info}");
    mount.unmount();
}

#[test]
fn jobs_are_begun_looked_at_and_stopped() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let url = source(&world);
    let mount = world.mount(&url, &[]);
    let at = mount.at.to_str().unwrap();
    // So slow that it can't end by itself during the test.
    let out = world.run(&["load", at, "--submit", "--rate", "4K", "-p", "1"]);
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    let job = json(&world.run(&["load", at, "--progress", "--json"]));
    assert!(matches!(job["state"].as_str(), Some("WAITING" | "RUNNING")), "{job}");
    let out = world.run(&["load", at, "--submit"]);
    refused(&out, 2, &["is running already, with --rate 4K and -p 1", "stop it first"]);
    let out = world.run(&["load", at, "--stop"]);
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("STOPPED"), "{out:?}");
    let out = world.run(&["load", at, "--progress"]);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    // A different request for the same paths is another job.
    let out = world.run(&["load", at, "--include", "other", "--json"]);
    assert_eq!((out.status.code(), &json(&out)["files_done"]), (Some(0), &1.into()), "{out:?}");
    let out = world.run(&["load", at, "--verify", "--progress"]);
    refused(&out, 1, &["with these options", "without them --progress and --stop mean load-"]);
    let out = world.run(&["load", at, "--metadata-only"]);
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(said.contains("files   42 of 42 looked up") && !said.contains("bytes"), "{out:?}");
    let out = world.run(&["load", mount.path("train").to_str().unwrap(), "--progress"]);
    refused(&out, 1, &["nothing was submitted for these paths", "--submit"]);
    let out = world.run(&["load", mount.path("nowhere").to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("failed  nowhere"), "{out:?}");
    refused(&world.run(&["load"]), 2, &["nothing to load"]);
    refused(&world.run(&["load", "/proc"]), 1, &["not in a mount"]);
    refused(&world.run(&["load", at, "--include", "["]), 2, &["is not a valid pattern"]);
    let list = world.file("list", format!("{at}/other\n{at}/train\n").as_bytes());
    let out = world.run(&["load", "--files-from", list.to_str().unwrap(), "--json"]);
    let job = json(&out);
    assert_eq!((job["files_done"].as_u64(), job["failed"][0]["path"].as_str()), (Some(1), Some("train")), "{job}");
    // A job under way does not keep a mount from ending.
    assert!(world.run(&["load", at, "--submit", "--rate", "4K", "-p", "1"]).status.success());
    mount.unmount();
}

#[test]
fn a_group_is_loaded_from_a_bucket_by_its_nodes() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    for n in 0..30 {
        server.put("data", &format!("set/{n}"), &bytes(n, 40_000));
    }
    server.put("data", "set/big", &bytes(31, 3 * MIB));
    let more = ["--endpoint-url", &server.endpoint()];
    let nodes = [world.node(&["s3://data"], 0, &more), {
        let mut command = world.command(&["node", "--group-port", "0", "--source", "s3://data"]);
        command.args(["--cache-dir", world.dir("other-cache").to_str().unwrap()]).args(more);
        world.node_with(with_credentials(&mut command))
    }];
    let both = nodes.each_ref().map(|node| node.address.as_str()).join(",");
    let mount = world.consumer("s3://data", &both, &[]);
    let set = mount.path("set");
    let out = world.run(&["load", set.to_str().unwrap(), "--verify", "--json"]);
    let job = json(&out);
    assert_eq!(job["state"], "SUCCEEDED", "{job}");
    assert_eq!(job["bytes_moved"].as_u64(), Some(30 * 40_000 + 3 * MIB as u64), "{job}");
    // Each node fetched its share, the mount none of it.
    let fetched = nodes.each_ref().map(|node| node.count("object", "get_bytes"));
    assert_eq!(fetched.iter().sum::<u64>(), 30 * 40_000 + 3 * MIB as u64);
    assert!(fetched.iter().all(|bytes| *bytes > 0), "{fetched:?}");
    assert_eq!(mount.count("tcp", "recv_bytes"), 0, "warming sends no data to its client");
    for n in 0..30 {
        assert_eq!(mount.read(format!("set/{n}")), bytes(n, 40_000));
    }
    assert_eq!(nodes.each_ref().map(|node| node.count("object", "get_bytes")), fetched);
    mount.unmount();
}

/// One that keeps its jobs, and its address.
fn coordinator(world: &World, port: &str) -> (Process, String) {
    let file = world.dir("state").join("coordinator.json");
    let mut command = world.command(&["coordinator", "--group-port", port, "--state-file", file.to_str().unwrap()]);
    let process = Process::start(&mut command, &world.log_path("coordinator"));
    let line = process.wait_for("coordinating on ");
    (process, line.split("coordinating on ").nth(1).unwrap().trim().to_owned())
}

#[test]
fn who_waits_for_a_job_outlives_its_coordinator_and_only_who_began_it_ends_it() {
    let world = World::new();
    let url = source(&world);
    let (mut process, address) = coordinator(&world, "0");
    // The group is named by the environment alone.
    let group = |words: &[&str], registry: &str| {
        let mut command = world.command(words);
        command.args(["--source", &url]).env("SPURLINE_REGISTRY", registry).env("SPURLINE_CACHE_GROUP", "g");
        command
    };
    let registry = format!("coordinator://{address}");
    let _node = world.node(&[&url], 0, &["--registry", &registry, "--cache-group", "g"]);
    let words = ["load", &url, "--rate", "4K", "-p", "1"];
    let attached = || Process::start_telling(&mut group(&words, &registry), &world.log_path("load"));
    let known = || {
        let out = finish(&mut group(&["load", &url, "--progress", "--json"], &registry));
        serde_json::from_slice::<Value>(&out.stdout).unwrap_or_default()
    };
    // So slow that it can't end by itself during the test.
    let mut load = attached();
    eventually("the job", || known()["state"] == "RUNNING");
    let mut other = attached();
    other.wait_for("was under way already; Ctrl-C ends this look at it");
    other.signal(Signal::INT);
    assert_eq!(other.wait().code(), Some(0), "{}", other.log());
    assert!(other.log().contains("goes on; --stop ends it"), "{}", other.log());
    process.kill();
    load.wait_for("the coordinator of group g does not answer: ");
    refused(&finish(&mut group(&["load", &url, "--progress"], &registry)), 3, &[&address]);
    (process, _) = coordinator(&world, address.rsplit(':').next().unwrap());
    load.wait_for("the coordinator of group g answers again");
    assert_eq!(load.log().matches("does not answer").count(), 1, "{}", load.log());
    load.signal(Signal::INT);
    assert_eq!(load.wait().code(), Some(1), "{}", load.log());
    assert!(load.log().contains("STOPPED"), "{}", load.log());
    let out = finish(&mut group(&["load", "train/1.bin", "--replicas", "9"], &registry));
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("note    1 node is up: 1 copy at most"), "{out:?}");
    process.kill();
}

#[test]
fn a_coordinator_goes_on_with_a_job_after_it_was_killed() {
    let world = World::new();
    let url = source(&world);
    let (mut process, address) = coordinator(&world, "0");
    let registry = format!("coordinator://{address}");
    let _node = world.node(&[&url], 0, &["--registry", &registry, "--cache-group", "g"]);
    let group = ["--source", &url, "--registry", &registry, "--cache-group", "g"];
    let load = |words: &[&str]| world.run(&[&["load", &url][..], words, &group].concat());
    // About five seconds of work for the large file alone: it is under way when the coordinator is killed.
    let out = load(&["--submit", "--rate", "1M", "--verify"]);
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    eventually("some work", || json(&load(&["--progress", "--json"]))["files_done"].as_u64().is_some_and(|n| n > 5));
    process.kill();
    refused(&load(&["--progress"]), 3, &["coordinator 127.0.0.1"]);
    let (mut process, _) = coordinator(&world, address.rsplit(':').next().unwrap());
    let mut job = Value::Null;
    eventually("the end", || {
        job = json(&load(&["--progress", "--json"]));
        job["state"] == "SUCCEEDED"
    });
    assert_eq!((job["files_done"].as_u64(), job["files_verified"].as_u64()), (Some(42), Some(42)), "{job}");
    assert_eq!((&job["bytes_done"], &job["bytes_verified"]), (&job["bytes_total"], &job["bytes_total"]), "{job}");
    refused(&world.run(&[&["load", "/proc"][..], &group].concat()), 2, &["is not below --source"]);
    process.kill();
}

/// All files below a directory whose names end so.
fn files_below(dir: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files_below(&path, end));
        } else if path.to_str().is_some_and(|path| path.ends_with(end)) {
            found.push(path);
        }
    }
    found
}

/// A coordinator that takes a job over does not list again what the first one finished: it has the record, not the
/// list of files.
#[test]
fn a_job_that_is_taken_over_goes_on_listing_where_it_was_recorded() {
    const FOLDERS: u64 = 30;
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    for n in 0..FOLDERS * 10 {
        server.put("data", &format!("set/f{:02}/{}", n / 10, n % 10), &bytes(n, 1000));
    }
    let proxy = ChaosProxy::start(server.address()).unwrap();
    // Nothing of the last ten folders comes before it is let through.
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    proxy.on_request(move |_, path| {
        let begun = Instant::now();
        while path.contains("/set/f2") && !gate.load(Ordering::Acquire) && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let state = world.dir("state");
    let file = state.join("coordinator.json");
    let (mut process, address) = coordinator(&world, "0");
    let registry = format!("coordinator://{address}");
    let more = ["--registry", &registry, "--cache-group", "g", "--endpoint-url", &proxy.endpoint()];
    let _node = world.node(&["s3://data"], 0, &more);
    let load = |words: &[&str]| {
        let group = ["--source", "s3://data", "--registry", &registry, "--cache-group", "g"];
        world.run(&[&["load", "s3://data/set"][..], words, &group].concat())
    };
    assert_eq!(load(&["--submit", "-p", "2"]).status.code(), Some(0));
    let lists = || proxy.count_requests("GET", "list-type=2");
    let settled = || -> Option<u64> {
        let record: Value =
            serde_json::from_slice(&fs::read(files_below(&state, ".json").iter().find(|path| **path != file)?).ok()?)
                .ok()?;
        record["settled"]["sums"]["files"].as_u64()
    };
    eventually("the record", || settled() >= Some(150));
    assert!(lists() >= FOLDERS as usize, "every folder was listed: {} requests", lists());
    process.kill();
    files_below(&state, ".files").iter().for_each(|list| fs::remove_file(list).unwrap());
    let settled = settled().unwrap();
    proxy.forget_requests();
    open.store(true, Ordering::Release);
    let (mut process, _) = coordinator(&world, address.rsplit(':').next().unwrap());
    let mut job = Value::Null;
    eventually("the end", || {
        job = json(&load(&["--progress", "--json"]));
        job["state"] == "SUCCEEDED"
    });
    assert_eq!((job["files_done"].as_u64(), job["files_total"].as_u64()), (Some(300), Some(300)), "{job}");
    assert_eq!((job["bytes_done"].as_u64(), job["bytes_total"].as_u64()), (Some(300_000), Some(300_000)), "{job}");
    // Slow machines may repeat a request, but none concerns finished work.
    let of_done = |path: &str| (0..settled / 10).any(|n| path.contains(&format!("f{n:02}")));
    let again: Vec<_> = proxy.requests().into_iter().filter(|(_, path)| of_done(path)).collect();
    assert!(again.is_empty(), "{settled} files were done, and yet: {again:?}");
    assert!(lists() > 0, "the rest is listed");
    process.kill();
}
