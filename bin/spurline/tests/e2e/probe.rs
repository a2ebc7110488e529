//! `net serve`, `ping`, `bw` and `lat` as people run them: between two hosts (network namespaces), as an ordinary user,
//! and with each end stopped, killed or cut off midway.

use rustix::process::Signal;
use serde_json::Value;
use spurline_rig::world::{Hosts, Process, World, eventually, finish, ip, is_root, refused, skip};
use std::process::{Command, Output, Stdio};

/// A server that has printed its address.
struct Served {
    process: Process,
    port: u16,
}

impl Served {
    /// Its lines are JSON.
    fn start(world: &World, command: &Command) -> Served {
        let mut command = copy(command);
        let process = Process::start_telling(&mut command, &world.log_path("serve"));
        let line = process.wait_for("\"listening\"");
        let said: Value = serde_json::from_str(&line).unwrap();
        let port = said["addresses"][0]["port"].as_u64().unwrap_or_else(|| panic!("{said}"));
        Served { process, port: port as u16 }
    }
    fn begun(&self) {
        self.process.wait_for("\"begun\"");
    }
    /// It serves as before.
    fn still_serves(&self, world: &World, host: Option<&str>) {
        let out = json(world, host, &["bw", &format!("{}:{}", address(host), self.port), "-n", "8M"]);
        assert_eq!(out["error"], Value::Null, "{out}");
    }
}

fn address(host: Option<&str>) -> &'static str {
    if host.is_some() { "10.213.0.1" } else { "127.0.0.1" }
}

fn copy(command: &Command) -> Command {
    let mut copy = Command::new(command.get_program());
    copy.args(command.get_args()).stdin(Stdio::null());
    spurline_rig::world::same_environment(&mut copy, command);
    copy
}

/// `spurline net …` on a host, with that host's own /sys.
fn net(world: &World, host: Option<&str>, words: &[&str]) -> Command {
    let command = world.command(&[&["net"], words].concat());
    let Some(host) = host else { return command };
    let mut on = Command::new("ip");
    on.args(["netns", "exec", host]).arg(command.get_program()).args(command.get_args());
    spurline_rig::world::same_environment(&mut on, &command);
    on
}

/// Runs it with --json.
fn json(world: &World, host: Option<&str>, words: &[&str]) -> Value {
    parsed(&finish(&mut net(world, host, &[words, &["--json"]].concat())))
}

fn parsed(out: &Output) -> Value {
    let (said, wrong) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}{wrong}"))
}

#[test]
fn two_hosts_measure_what_is_between_them() {
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let served =
        Served::start(&world, &net(&world, Some(&hosts.0), &["serve", "--json", "--port", "0", "--bind", "all"]));
    let client = Some(hosts.1.as_str());
    let (four, six) = (format!("10.213.0.1:{}", served.port), format!("[fd13::1]:{}", served.port));
    for (peer, direction) in [(&four, "read"), (&four, "write"), (&six, "both"), (&six, "read")] {
        let out = json(&world, client, &["bw", peer, "-d", direction, "-t", "300ms", "-P", "2", "-l", "64K"]);
        for (way, moves) in [("read", direction != "write"), ("write", direction != "read")] {
            assert_eq!(out[format!("{way}_bytes_per_second")].as_f64().unwrap() > 0.0, moves, "{out}");
            assert_eq!(out[format!("{way}_us")]["p99"].is_number(), moves, "{out}");
        }
        for end in ["link", "peer_link"] {
            let link = &out[end];
            assert_eq!(
                (&link["interface"], &link["medium"], &link["mtu"]),
                (&"spl0".into(), &"virtual".into(), &1500.into()),
                "{out}"
            );
            assert!(link["carried_by"].is_null() && link["bits_per_second"].is_null(), "{out}");
        }
        assert!(out["cpu"]["client_seconds_per_gib"].is_number() && out["cpu"]["server_seconds_per_gib"].is_number());
        assert!(out["tcp"]["client"]["retransmits"].is_number() && out["tcp"]["server"]["retransmits"].is_number());
        assert_eq!((&out["judgement"]["level"], &out["share"]), (&"unknown".into(), &Value::Null), "{out}");
        assert!(out["judgement"]["sentence"].as_str().unwrap().contains("spl0 is virtual"), "{out}");
    }
    let out = json(&world, client, &["lat", &four, "-n", "200"]);
    assert_eq!(out["operations"], 200);
    assert!(out["echo_us"]["p50"].as_f64().unwrap() > 0.0, "{out}");
    assert!(out["echo_us"]["stdev"].is_number() && out["echo_us"]["mean"].is_number(), "{out}");
    let out = finish(&mut net(&world, client, &["lat", &four, "-n", "20"]));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains("standard deviation "), "{text}");
    let out = json(&world, client, &["ping", &six, "-c", "2", "-i", "1ms"]);
    assert_eq!((&out["answers"], &out["judgement"]["level"]), (&2.into(), &"healthy".into()), "{out}");
    assert!(out["large_us"].is_number() && out["peer_link"]["interface"] == "spl0", "{out}");
    // A link-local address needs no configuration. (Without duplicate address detection, which takes a second.)
    for (host, address) in [(&hosts.0, "fe80::13:1"), (&hosts.1, "fe80::13:2")] {
        ip(&format!("-n {host} addr add {address}/64 dev spl0 nodad")).unwrap();
    }
    let out = json(&world, client, &["bw", &format!("[fe80::13:1%spl0]:{}", served.port), "-n", "8M"]);
    assert_eq!((&out["error"], &out["link"]["interface"]), (&Value::Null, &"spl0".into()), "{out}");
    // Output for people.
    let out = finish(&mut net(&world, client, &["bw", &four, "-n", "64M", "--discard"]));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}");
    for part in ["from 10.213.0.2 on spl0 (virtual, MTU 1500)", "dropped in the kernel", "s/GiB there", "retransmits"] {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
}

#[test]
fn traffic_that_takes_another_interface_is_told() {
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let (a, b) = (&hosts.0, &hosts.1);
    // An address on an interface that leads nowhere: the route takes the other.
    for step in [
        format!("-n {b} link add spl1 type veth peer name spl9"),
        format!("-n {b} addr add 10.214.0.2/32 dev spl1"),
        format!("-n {b} link set spl1 up"),
        format!("-n {a} route add 10.214.0.2/32 dev spl0"),
    ] {
        if let Err(why) = ip(&step) {
            return skip("netns", &why);
        }
    }
    let served = Served::start(&world, &net(&world, Some(a), &["serve", "--json", "--port", "0", "--bind", "spl0"]));
    let peer = format!("10.213.0.1:{}", served.port);
    let out = json(&world, Some(b), &["bw", &peer, "--interface", "spl1", "-n", "64M"]);
    assert_eq!((&out["link"]["interface"], &out["link"]["carried_by"]), (&"spl1".into(), &"spl0".into()), "{out}");
    assert!(out["judgement"]["sentence"].as_str().unwrap().contains("it went over spl0, not over spl1"), "{out}");
    let out = finish(&mut net(&world, Some(b), &["bw", &peer, "--interface", "spl7"]));
    refused(&out, 2, &["--interface 'spl7'", "no interface has that name", "spl0 10.213.0.2"]);
}

#[test]
fn large_packets_that_get_lost_are_told() {
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let (a, b) = (&hosts.0, &hosts.1);
    let middle = Middle(format!("{a}m"));
    let m = &middle.0;
    // A switch with a smaller MTU than the hosts. The hosts cut segments, not the switch.
    for step in [
        format!("netns add {m}"),
        format!("-n {m} link add br0 type bridge"),
        format!("-n {m} link add p0 type veth peer name spl9 netns {a}"),
        format!("-n {m} link add p1 type veth peer name spl9 netns {b}"),
        format!("-n {m} link set p0 master br0 up"),
        format!("-n {m} link set p1 master br0 up"),
        format!("-n {m} link set br0 up"),
        format!("-n {a} link set spl9 mtu 9000 gso_max_segs 1 up"),
        format!("-n {b} link set spl9 mtu 9000 gso_max_segs 1 up"),
        format!("-n {a} addr add 10.215.0.1/24 dev spl9"),
        format!("-n {b} addr add 10.215.0.2/24 dev spl9"),
    ] {
        if let Err(why) = ip(&step) {
            return skip("netns", &why);
        }
    }
    let served = Served::start(&world, &net(&world, Some(a), &["serve", "--json", "--port", "0", "--bind", "all"]));
    let peer = format!("10.215.0.1:{}", served.port);
    let out = json(&world, Some(b), &["ping", &peer, "-c", "2", "-i", "1ms", "--timeout", "3s"]);
    assert_eq!((&out["answers"], &out["large_us"]), (&2.into(), &Value::Null), "{out}");
    let sentence = out["judgement"]["sentence"].as_str().unwrap();
    assert!(
        sentence.contains("something between drops large packets") && sentence.contains("MTU 9000 here, 9000 there")
    );
}

/// A third namespace, taken away when dropped.
struct Middle(String);

impl Drop for Middle {
    fn drop(&mut self) {
        let _ = ip(&format!("netns del {}", self.0));
    }
}

#[test]
fn loss_shows_as_retransmits() {
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let (a, b) = (hosts.0.as_str(), hosts.1.as_str());
    let on = |host: &str, words: &[&str]| {
        let out = Command::new("ip").args(["netns", "exec", host]).args(words).stdin(Stdio::null()).output();
        out.is_ok_and(|out| out.status.success())
    };
    let netem = on(b, &["tc", "qdisc", "add", "dev", "spl0", "root", "netem", "delay", "2ms", "loss", "1%"]);
    let rules = "table inet loss { chain arriving { type filter hook input priority 0; \
                 iifname spl0 meta length > 1000 numgen random mod 40 == 0 drop; }; }";
    if !netem && !on(a, &["nft", rules]) {
        return skip("loss", "neither tc with netem nor nft is to be had here");
    }
    let served = Served::start(&world, &net(&world, Some(a), &["serve", "--json", "--port", "0", "--bind", "all"]));
    let peer = format!("10.213.0.1:{}", served.port);
    let out = json(&world, Some(b), &["bw", &peer, "-d", "write", "-n", "64M", "-l", "64K", "--timeout", "30s"]);
    assert_eq!((&out["error"], &out["write_bytes"]), (&Value::Null, &(64 << 20).into()), "{out}");
    assert!(out["tcp"]["client"]["retransmits"].as_u64().unwrap() > 0, "{out}");
    if netem {
        assert!(out["tcp"]["client"]["rtt_us"].as_u64().unwrap() >= 1000, "{out}");
    }
}

#[test]
fn an_ordinary_user_can_do_all_of_it() {
    if !is_root() {
        // Every other test then shows it.
        return;
    }
    let world = World::new();
    // Other users may lack access to the build directory.
    let copy = world.path("spurline");
    std::fs::copy(env!("CARGO_BIN_EXE_spurline"), &copy).unwrap();
    rustix::fs::chmod(world.path("."), rustix::fs::Mode::from_raw_mode(0o755)).unwrap();
    let user = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&copy).arg("net").args(words);
        command.current_dir("/").stdin(Stdio::null());
        command
    };
    if !user(&["--help"]).output().is_ok_and(|out| out.status.success()) {
        return skip("setpriv", "setpriv can't change the user here");
    }
    let served = Served::start(&world, &user(&["serve", "--json", "--port", "0", "--bind", "127.0.0.1"]));
    let peer = format!("127.0.0.1:{}", served.port);
    for words in [&["ping", &peer, "-c", "1"][..], &["bw", &peer, "-n", "8M"], &["lat", &peer, "-n", "10"]] {
        let out = parsed(&finish(user(words).arg("--json")));
        assert!(out["error"].is_null() && out["peer_link"]["interface"] == "lo", "{out}");
    }
}

#[test]
fn an_interruption_prints_what_was_measured() {
    let world = World::new();
    let served = Served::start(&world, &net(&world, None, &["serve", "--json", "--port", "0", "--bind", "127.0.0.1"]));
    let peer = format!("127.0.0.1:{}", served.port);
    let mut bw =
        Process::start_telling(&mut net(&world, None, &["bw", &peer, "-t", "1h", "--json"]), &world.log_path("bw"));
    served.begun();
    bw.signal(Signal::INT);
    assert!(bw.wait().success(), "{}", bw.log());
    let out: Value = serde_json::from_str(&bw.log()).unwrap();
    assert!(out["interrupted"] == true && out["read_bytes"].is_u64() && out["error"].is_null(), "{out}");
    // The same to the server ends it, without complaint.
    let mut served = served;
    served.process.signal(Signal::INT);
    assert!(served.process.wait().success());
}

#[test]
fn a_server_that_stops_dies_or_hangs_midway() {
    for (signal, says) in [
        (Signal::TERM, "ended it: the server was stopped"),
        (Signal::KILL, "was lost: "),
        (Signal::STOP, "stopped answering: nothing moved for 2.0 s"),
    ] {
        let world = World::new();
        let words = ["serve", "--json", "--port", "0", "--bind", "127.0.0.1"];
        let served = Served::start(&world, &net(&world, None, &words));
        let peer = format!("127.0.0.1:{}", served.port);
        let words = ["bw", &peer, "-t", "1h", "--json", "--timeout", "2s"];
        let mut bw = Process::start_telling(&mut net(&world, None, &words), &world.log_path("bw"));
        served.begun();
        // Some bytes first.
        std::thread::sleep(std::time::Duration::from_millis(200));
        served.process.signal(signal);
        assert_eq!(bw.wait().code(), Some(1), "{}", bw.log());
        let out: Value = serde_json::from_str(&bw.log()).unwrap();
        let (error, level) = (out["error"].as_str().unwrap(), &out["judgement"]["level"]);
        assert!(error.contains(says) && level == "broken", "{out}");
    }
}

#[test]
fn a_client_that_hangs_is_given_up() {
    let world = World::new();
    let words = ["serve", "--json", "--port", "0", "--bind", "127.0.0.1", "--timeout", "2s"];
    let served = Served::start(&world, &net(&world, None, &words));
    let peer = format!("127.0.0.1:{}", served.port);
    let mut bw =
        Process::start_telling(&mut net(&world, None, &["bw", &peer, "-t", "1h", "--json"]), &world.log_path("bw"));
    served.begun();
    bw.signal(Signal::STOP);
    served.process.wait_for("the client sent nothing for 2 s");
    served.process.wait_for("the client left");
    served.still_serves(&world, None);
    bw.signal(Signal::CONT);
    assert_eq!(bw.wait().code(), Some(1), "{}", bw.log());
    let out: Value = serde_json::from_str(&bw.log()).unwrap();
    assert!(out["error"].as_str().unwrap().contains("the client sent nothing"), "{out}");
}

#[test]
fn a_link_that_goes_down_midway() {
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let served =
        Served::start(&world, &net(&world, Some(&hosts.0), &["serve", "--json", "--port", "0", "--bind", "all"]));
    let peer = format!("10.213.0.1:{}", served.port);
    let words = ["bw", &peer, "-t", "1h", "--json", "--timeout", "2s"];
    let mut bw = Process::start_telling(&mut net(&world, Some(&hosts.1), &words), &world.log_path("bw"));
    served.begun();
    std::thread::sleep(std::time::Duration::from_millis(200));
    ip(&format!("-n {} link set spl0 down", hosts.0)).unwrap();
    assert_eq!(bw.wait().code(), Some(1), "{}", bw.log());
    let out: Value = serde_json::from_str(&bw.log()).unwrap();
    assert!(out["error"].as_str().unwrap().contains("nothing moved for 2.0 s"), "{out}");
    ip(&format!("-n {} link set spl0 up", hosts.0)).unwrap();
    // The kernel asks for the host's link address again: "No route to host" until the answer.
    let few = ["bw", &peer, "-n", "64K"];
    eventually("a way to the host", || finish(&mut net(&world, Some(&hosts.1), &few)).status.success());
    served.still_serves(&world, Some(&hosts.1));
}

#[test]
fn the_facts_of_the_other_end_are_those_of_net_collect() {
    let world = World::new();
    let served = Served::start(&world, &net(&world, None, &["serve", "--json", "--port", "0", "--bind", "127.0.0.1"]));
    let peer = format!("127.0.0.1:{}", served.port);
    let call = spurline_probe::client::ConnectConfig {
        peer,
        from: vec![],
        timeout: spurline_rig::world::PATIENCE,
        trust: spurline_trust::Trust::without_checks(),
    };
    let mut session = spurline_probe::client::ProbeSession::connect(&call).unwrap();
    let packed = world.file("facts.tar.zst", &session.fetch_facts(spurline_rig::world::PATIENCE).unwrap());
    let out = finish(&mut net(&world, None, &["list", "--json", "--from", packed.to_str().unwrap()]));
    assert!(out.status.success(), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("\"lo\""), "{out:?}");
    served.process.wait_for("\"facts\"");
}

#[test]
fn words_that_are_wrong_and_ports_that_are_taken() {
    let world = World::new();
    let run = |words: &[&str]| finish(&mut net(&world, None, words));
    for (words, code, says) in [
        (&["bw"][..], 2, &["HOST"][..]),
        (&["bw", "http://node2"], 2, &["is no host", "fe80::1%eth0"]),
        (&["bw", "node2", "-P", "1000"], 2, &["1000 streams", "--streams"]),
        (&["bw", "node2", "-l", "0"], 2, &["operations of 0 bytes"]),
        (&["bw", "node2", "--depth", "0"], 2, &["--depth"]),
        (&["bw", "node2", "-t", "0s"], 2, &["no time"]),
        (&["bw", "127.0.0.1:1", "--timeout", "0s"], 2, &["--timeout"]),
        (&["ping", "127.0.0.1:1"], 3, &["connection refused", "spurline net serve"]),
        (&["serve", "--bind", "spl77"], 2, &["--bind 'spl77'", "lo 127.0.0.1"]),
        (&["serve", "--timeout", "1s"], 2, &["2s or more"]),
    ] {
        refused(&run(words), code, says);
    }
    let words = ["serve", "--json", "--port", "0", "--bind", "127.0.0.1", "--once"];
    let mut served = Served::start(&world, &net(&world, None, &words));
    let port = served.port.to_string();
    refused(&run(&["serve", "--bind", "127.0.0.1", "--port", &port]), 3, &["in use", "--port"]);
    served.still_serves(&world, None);
    assert!(served.process.wait().success(), "{}", served.process.log());
    served.process.wait_for("\"ended\"");
}

#[test]
fn a_server_without_a_token_listens_on_loopback_unless_told_where() {
    let world = World::new();
    let token = world.file("token", b"a secret of thirty-two characters\n");
    let token = token.to_str().unwrap();
    let addresses = |words: &[&str]| {
        let words = [&["serve", "--json", "--port", "0"], words].concat();
        let served = Served::start(&world, &net(&world, None, &words));
        let line = served.process.log().lines().next().unwrap_or_default().to_owned();
        let first: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let all = first["addresses"].as_array().unwrap().clone();
        (served, all.iter().map(|one| one["address"].as_str().unwrap().to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(addresses(&[]).1, ["127.0.0.1"]);
    let (served, _) = addresses(&["--group-token-file", token, "--bind", "127.0.0.1"]);
    let peer = format!("127.0.0.1:{}", served.port);
    let ping = |words: &[&str]| net(&world, None, &[&["ping", &peer, "-c", "1"], words].concat()).output().unwrap();
    refused(&ping(&[]), 3, &["--group-token-file"]);
    let out = ping(&["--group-token-file", token]);
    assert!(out.status.success(), "{out:?}");
}
