//! An origin that is stopped, or refuses the credentials: what is cached reads on.

use spurline_rig::world::*;
use spurline_testkit::{ACCESS_KEY, ChaosProxy, ProxyFault, S3Server, SECRET_KEY};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Beyond the cache times of the mount.
const PAST_THE_CACHES: Duration = Duration::from_millis(1200);

#[test]
fn a_cached_data_set_reads_on_while_its_server_is_stopped() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    let at = server.address();
    let fill = |server: &S3Server| {
        server.create_bucket("data");
        for n in 0..60u64 {
            server.put("data", &format!("train/{}/{n}.bin", n % 3), &bytes(n, 20_000 + n as usize * 30_000));
        }
    };
    fill(&server);
    let mount = world.mount("s3://data", &["--endpoint-url", &server.endpoint(), "--origin-timeout", "5s"]);
    let want = tree(&mount.at);
    assert_eq!(want.len(), 64);
    let fetched = mount.count("object", "get_ops");

    drop(server);
    for round in 0..3 {
        std::thread::sleep(PAST_THE_CACHES);
        assert_same(&tree(&mount.at), &want);
        assert_eq!(mount.count("object", "get_ops"), fetched, "round {round}: no block is requested");
    }
    let stats = mount.stats();
    assert!(count(&stats, "metadata", "stale_answers") > 0, "{stats}");
    assert_eq!((count(&stats, "metadata", "silent_origins"), count(&stats, "fuse", "errors")), (1, 0));
    let status = String::from_utf8(world.run(&["status", "--json"]).stdout).unwrap();
    assert!(status.contains("origin does not respond"), "{status}");
    // A name that was never seen is an error, not an absence.
    let unknown = fs::metadata(mount.path("train/9")).unwrap_err();
    assert!(unknown.raw_os_error() != Some(libc::ENOENT), "{unknown}");

    let server = S3Server::in_memory_on(at).unwrap();
    fill(&server);
    mount.process().wait_for("responds again");
    std::thread::sleep(PAST_THE_CACHES);
    assert_same(&tree(&mount.at), &want);
    assert_eq!((mount.count("metadata", "silent_origins"), mount.count("object", "get_ops")), (0, fetched));
    let log = mount.process().log();
    for once in ["does not respond: ", "stay valid for 300 s (--stale-if-error)", "responds again after"] {
        assert_eq!(log.matches(once).count(), 1, "{once:?} in {log}");
    }
    mount.unmount();
}

/// The status of a process, with the exit code of the command.
fn status_of(world: &World, target: &str) -> (Option<i32>, String) {
    let out = world.run(&["status", target]);
    (out.status.code(), String::from_utf8(out.stdout).unwrap())
}

/// The answer of the health page whose address a log names.
fn health_of(process: &Process) -> String {
    let line = process.wait_for("metrics page address=");
    let page = line.split("address=").nth(1).unwrap().split([' ', ';']).next().unwrap().to_owned();
    let mut stream = TcpStream::connect(page).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

const REFUSED: &str = "the server does not know this access key";

#[test]
fn cached_files_are_read_and_status_says_why_while_the_store_refuses_the_credentials() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    for n in 0..20u64 {
        server.put("data", &format!("train/{n}.bin"), &bytes(n, 30_000));
    }
    let endpoint = server.endpoint();
    let mount = world.mount("s3://data", &["--endpoint-url", &endpoint, "--metrics", "127.0.0.1:0"]);
    let want = tree(&mount.at);
    let at = mount.at.to_str().unwrap().to_owned();
    assert_eq!(status_of(&world, &at).0, Some(0));
    assert!(health_of(mount.process()).starts_with("HTTP/1.1 200"));

    server.revoke_key(ACCESS_KEY);
    for _ in 0..2 {
        std::thread::sleep(PAST_THE_CACHES);
        assert_same(&tree(&mount.at), &want);
    }
    mount.process().wait_for("refuses all requests of this process");
    let (code, status) = status_of(&world, &at);
    assert!(code == Some(1) && status.contains("degraded") && status.contains(REFUSED), "{code:?} {status}");
    assert!(!status.contains("does not respond"), "{status}");
    let health = health_of(mount.process());
    assert!(health.starts_with("HTTP/1.1 503") && health.contains(REFUSED), "{health}");
    let stats = mount.stats();
    assert_eq!((count(&stats, "object", "refused_buckets"), count(&stats, "metadata", "silent_origins")), (1, 0));
    // A name that was never seen is an error, not an absence.
    let unknown = fs::metadata(mount.path("train/none")).unwrap_err();
    assert_eq!(unknown.raw_os_error(), Some(libc::EACCES));

    server.allow_key(ACCESS_KEY, SECRET_KEY);
    mount.process().wait_for("accepts the requests of this process again");
    assert_same(&tree(&mount.at), &want);
    assert_eq!((status_of(&world, &at).0, mount.count("object", "refused_buckets")), (Some(0), 0));
    mount.unmount();
}

#[test]
fn nodes_gateways_and_writable_mounts_say_that_the_store_refuses_the_credentials() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    server.put("data", "file", b"text");
    let endpoint = server.endpoint();
    let more = ["--endpoint-url", &endpoint, "--metrics", "127.0.0.1:0"];
    let mount = world.mount("s3://data", &[&more[..], &["--rw"]].concat());
    let node = world.node(&["s3://data"], 0, &[&more[..], &["--writable"]].concat());
    let mut command = world.command(&["gateway", "s3://data", "--s3-listen", "127.0.0.1:0", "--cache-dir"]);
    let gateway = Process::start(
        with_credentials(command.arg(world.dir("gateway-cache")).args(more)),
        &world.log_path("gateway"),
    );
    let line = gateway.wait_for("serving S3 on ");
    let gateway_at = line.split("://").last().unwrap().trim().to_owned();
    let reader_at = world.dir("reader");
    let mut command = world.command(&["mount", "s3://data", reader_at.to_str().unwrap(), "--rw"]);
    let reader = world.mount_at(command.args(["--registry", &format!("static:{}", node.address)]), &reader_at);

    server.revoke_key(ACCESS_KEY);
    fs::write(mount.path("new"), b"text").unwrap_err();
    fs::write(reader.path("new"), b"text").unwrap_err();
    let mut client = TcpStream::connect(&gateway_at).unwrap();
    client.write_all(b"GET /data/file HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    client.read_to_end(&mut Vec::new()).unwrap();
    let targets =
        [(mount.at.to_str().unwrap(), mount.process()), (&node.address, &node.process), (&gateway_at, &gateway)];
    for (target, process) in targets {
        process.wait_for("refuses all requests of this process");
        let (code, status) = status_of(&world, target);
        assert!(code == Some(1) && status.contains("degraded") && status.contains(REFUSED), "{code:?} {status}");
        let health = health_of(process);
        assert!(health.starts_with("HTTP/1.1 503") && health.contains(REFUSED), "{health}");
    }

    server.allow_key(ACCESS_KEY, SECRET_KEY);
    for (target, process) in targets {
        process.wait_for("accepts the requests of this process again");
        assert_eq!(status_of(&world, target).0, Some(0), "{target}");
    }
    fs::write(mount.path("new"), b"text").unwrap();
    reader.unmount();
    mount.unmount();
}

/// Starts `program` on a path of a mount, and waits until it waits for the mount.
fn start_waiting(program: &[&str], path: &Path) -> Child {
    let mut command = Command::new(program[0]);
    let child = command.args(&program[1..]).arg(path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_request(&child);
    child
}

/// Programs that wait for a mount whose requests have no answer end by a signal; `status` counts their requests.
fn signals_end_programs(world: &World, mount: &Mount) {
    let programs = [(&["stat"][..], "none"), (&["ls"], "train"), (&["cat"], "train/0.bin")];
    let began = Instant::now();
    for (program, path) in programs {
        let mut waiting = start_waiting(program, &mount.path(path));
        send(waiting.id(), rustix::process::Signal::KILL);
        waiting.wait().unwrap();
        let mut timed = Command::new("timeout");
        let timed = timed.arg("1").args(program).arg(mount.path(path)).stdout(Stdio::null()).stderr(Stdio::null());
        assert_eq!(timed.status().unwrap().code(), Some(124), "{program:?}");
    }
    assert!(began.elapsed() < Duration::from_secs(50), "they have waited for their answers");
    let mut waiting = start_waiting(&["stat"], &mount.path("absent"));
    eventually("status counts it", || status_of(world, mount.at.to_str().unwrap()).1.contains("waiting: 1 request"));
    send(waiting.id(), rustix::process::Signal::KILL);
    waiting.wait().unwrap();
}

#[test]
fn signals_end_programs_that_wait_for_a_silent_store() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    for n in 0..3u64 {
        server.put("data", &format!("train/{n}.bin"), &bytes(n, 30_000));
    }
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let endpoint = proxy.endpoint();
    // Without known answers, each program waits until --origin-timeout.
    for io in ["dev", "uring"] {
        let mount = world.mount("s3://data", &["--endpoint-url", &endpoint, "--fuse-io", io, "--stale-if-error", "0s"]);
        assert_eq!(fs::read_dir(mount.path("train")).unwrap().count(), 3);
        proxy.inject(ProxyFault::Stall, u32::MAX);
        signals_end_programs(&world, &mount);
        proxy.clear_faults();
        assert_eq!(mount.read("train/2.bin"), bytes(2, 30_000));
        mount.unmount();
    }
}

#[test]
fn signals_end_programs_that_wait_for_a_stopped_node() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    for n in 0..3 {
        world.file(&format!("source/train/{n}.bin"), &bytes(n, 30_000));
    }
    let source = world.path("source").to_str().unwrap().to_owned();
    let node = world.node(&[&source], 0, &[]);
    let mount = world.consumer(&source, &node.address, &[]);
    assert_eq!(fs::read_dir(mount.path("train")).unwrap().count(), 3);
    node.process.signal(rustix::process::Signal::STOP);
    signals_end_programs(&world, &mount);
    node.process.signal(rustix::process::Signal::CONT);
    assert_eq!(mount.read("train/2.bin"), bytes(2, 30_000));
    mount.unmount();
}
