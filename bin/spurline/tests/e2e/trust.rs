//! Access with real nodes and mounts: the right token, a wrong one, none, and one that changes while everything runs.

use spurline_rig::world::*;
use std::fs;
use std::path::Path;

const OLD: &str = "old-q5Ykm0WJ7b2uR1xTzv9sLd3f";
const NEW: &str = "new-q5Ykm0WJ7b2uR1xTzv9sLd3f";

/// A token file, replaced at once as deployments do it.
fn token(world: &World, name: &str, lines: &[&str]) -> String {
    let (path, fresh) = (world.path(name), world.file(&format!("{name}.fresh"), lines.join("\n").as_bytes()));
    rustix::fs::chmod(&fresh, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    fs::rename(fresh, &path).unwrap();
    path.to_str().unwrap().to_owned()
}

fn source(world: &World) -> (String, Vec<u8>) {
    let text = bytes(21, 3 * MIB + 5);
    world.file("source/file", &text);
    (world.path("source").to_str().unwrap().to_owned(), text)
}

#[test]
fn the_token_decides_who_reads_and_can_be_changed_while_all_runs() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let (url, text) = source(&world);
    let theirs = token(&world, "node-token", &[OLD]);
    let node = world.node(&[&url], 0, &["--group-token-file", &theirs]);
    let ours = token(&world, "mount-token", &[OLD]);
    let with = |file: &str| world.consumer(&url, &node.address, &["--group-token-file", file]);
    let tries = |words: &[&str]| finish(&mut world.consumer_command(&url, &node.address, words));
    let mount = with(&ours);
    assert!(mount.read("file") == text);
    mount.unmount();
    // A mount without the proof is refused with the reason.
    let wrong = token(&world, "wrong-token", &[NEW]);
    for (words, says) in
        [(vec!["--group-token-file", wrong.as_str()], "another group token"), (vec![], "--group-token-file")]
    {
        let said = refused(&tries(&words), 3, &[says]);
        assert!(!said.contains(OLD) && !said.contains(NEW), "{said}");
    }
    assert!(node.count("trust", "refused_proof") >= 2);
    assert!(node.count("trust", "proved") >= 1);
    let log = node.process.log();
    assert!(log.contains("connection of 127.0.0.1"), "{log}");
    assert!(!log.contains(OLD) && !log.contains(NEW), "{log}");
    // Old and new on the node, which was not restarted; then the old one is gone.
    token(&world, "node-token", &[OLD, NEW]);
    let until = |what: &str, words: &[&str], good: bool| {
        let start = std::time::Instant::now();
        loop {
            let mut process =
                Process::start(&mut world.consumer_command(&url, &node.address, words), &world.log_path("try"));
            let up = loop {
                if process.log().contains(" is mounted on ") {
                    break true;
                }
                if process.log().contains("error:") {
                    break false;
                }
                assert!(start.elapsed() < PATIENCE, "{what}: {}", process.log());
                std::thread::sleep(std::time::Duration::from_millis(20));
            };
            process.signal(rustix::process::Signal::TERM);
            process.wait();
            detach(&world.dir("mnt"));
            if up == good {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{what}");
        }
    };
    until("the new token is taken", &["--group-token-file", &wrong], true);
    until("the old token still is", &["--group-token-file", &ours], true);
    token(&world, "node-token", &[NEW]);
    until("the old token is refused", &["--group-token-file", &ours], false);
    until("the new token goes on", &["--group-token-file", &wrong], true);
    assert!(node.process.log().contains("was read again"), "{}", node.process.log());
}

#[test]
fn a_mount_with_a_token_reads_from_no_node_without_one() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let (url, _) = source(&world);
    let node = world.node(&[&url], 0, &[]);
    let file = token(&world, "token", &[OLD]);
    let out = finish(&mut world.consumer_command(&url, &node.address, &["--group-token-file", &file]));
    refused(&out, 3, &["requires no group token"]);
}

#[test]
fn a_node_listens_beyond_this_machine_only_when_told_who_may_come() {
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let (url, _) = source(&world);
    let start = |more: &[&str]| {
        let mut command = world.command(&[]);
        command.args(world.node_words(&[&url], 0)).args(["--group-network", "spl0"]).args(more);
        Hosts::on(&hosts.0, &command)
    };
    let says = ["10.213.0.1", "--group-token-file", "--allow-anyone", "openssl rand"];
    refused(&finish(&mut start(&[])), 2, &says);
    let node = world.node_with(&mut start(&["--allow-anyone"]));
    assert!(node.process.log().contains("--allow-anyone: whoever reaches 10.213.0.1"), "{}", node.process.log());
    drop(node);
    let file = token(&world, "token", &[OLD]);
    let both = ["--allow-anyone", "--group-token-file", file.as_str()];
    refused(&finish(&mut start(&both)), 2, &["contradict"]);
    let node = world.node_with(&mut start(&both[1..]));
    assert!(!node.process.log().contains("whoever reaches"), "{}", node.process.log());
}

#[test]
fn a_token_file_that_is_no_good_is_refused_at_start() {
    let world = World::new();
    let (url, _) = source(&world);
    let with = |file: &Path| {
        let mut command = world.command(&[]);
        command.args(world.node_words(&[&url], 0)).arg("--group-token-file").arg(file);
        finish(&mut command)
    };
    refused(&with(Path::new("/no/such/token")), 3, &["/no/such/token", "openssl rand"]);
    refused(&with(&world.file("short", b"secret\n")), 2, &["line 1 has 6 bytes", "openssl rand"]);
    refused(&with(&world.file("empty", b"\n")), 2, &["holds no token"]);
    let open = world.file("open", OLD.as_bytes());
    rustix::fs::chmod(&open, rustix::fs::Mode::from_raw_mode(0o666)).unwrap();
    refused(&with(&open), 2, &["every user of this host may change it", "chmod 600"]);
}

/// Frames as they pass an interface of a host, kept by a packet socket.
fn watch(host: &str, interface: &str) -> Option<(Process, std::path::PathBuf, tempfile::TempDir)> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("packets");
    let mut command = std::process::Command::new("tcpdump");
    command.args(["-i", interface, "-s", "0", "-U", "-B", "65536", "-w"]).arg(&file).arg("tcp");
    if finish(std::process::Command::new("sh").args(["-c", "command -v tcpdump"])).status.code() != Some(0) {
        skip("tcpdump", "tcpdump is not installed");
        return None;
    }
    let process = Process::start(&mut Hosts::on(host, &command), &dir.path().join("log"));
    process.wait_for("listening on");
    Some((process, file, dir))
}

#[test]
fn who_watches_the_network_sees_the_bytes_only_without_tls_and_the_token_never() {
    if !can_mount() {
        return;
    }
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let (mark, len) = (b"a mark in the file that is easily found", 2 * MIB);
    let text: Vec<u8> = mark.iter().copied().cycle().take(len).collect();
    world.file("source/named-file", &text);
    let url = world.path("source").to_str().unwrap().to_owned();
    let file = token(&world, "token", &[OLD]);
    for tls in [false, true] {
        let Some((mut watching, packets, _dir)) = watch(&hosts.0, "spl0") else { return };
        let more: &[&str] = if tls { &["--tls"] } else { &[] };
        let mut node = world.command(&[]);
        node.args(world.node_words(&[&url], 0))
            .args(["--group-network", "spl0", "--group-token-file", &file])
            .args(more);
        let node = world.node_with(&mut Hosts::on(&hosts.0, &node));
        let mut mount = world.consumer_command(&url, &node.address, &["--group-token-file", &file]);
        let mount = world.mount_with(&mut Hosts::on(&hosts.1, mount.args(more)));
        assert!(mount.read("named-file") == text);
        assert!(mount.count("tcp", "recv_bytes") >= len as u64);
        assert!(node.count("trust", "proved") > 0);
        mount.unmount();
        drop(node);
        // The kernel delivers packets in order: the last ones of the connections prove that all are there.
        let has = |part: &[u8]| fs::read(&packets).unwrap().windows(part.len()).any(|window| window == part);
        let start = std::time::Instant::now();
        while fs::metadata(&packets).unwrap().len() < len as u64 {
            assert!(start.elapsed() < PATIENCE, "the packets were not caught: {}", watching.log());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        watching.signal(rustix::process::Signal::INT);
        watching.wait();
        assert!(!has(OLD.as_bytes()), "the token is to be seen");
        assert_eq!((has(mark), has(b"named-file")), (!tls, !tls), "tls: {tls}");
    }
}

#[test]
fn certificates_let_in_who_has_one_of_the_authority() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let (url, text) = source(&world);
    let issuer = {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap()
    };
    let ca = world.file("ca.pem", issuer.pem().as_bytes()).to_str().unwrap().to_owned();
    let words = |name: &str| {
        let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &issuer).unwrap();
        let at = |end: &str, text: String| {
            world.file(&format!("{name}.{end}"), text.as_bytes()).to_str().unwrap().to_owned()
        };
        let (cert, key) = (at("crt", cert.pem()), at("key", key.serialize_pem()));
        ["--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &ca].map(str::to_owned)
    };
    fn refs(words: &[String]) -> Vec<&str> {
        words.iter().map(String::as_str).collect()
    }
    let node = world.node(&[&url], 0, &refs(&words("127.0.0.1")));
    let mount = world.consumer(&url, &node.address, &refs(&words("mount")));
    assert!(mount.read("file") == text);
    mount.unmount();
    // A node without a certificate is refused, and so is one whose certificate has another name.
    let out = finish(&mut world.consumer_command(&url, &node.address, &[]));
    refused(&out, 3, &["speaks TLS only", "--tls-cert"]);
    let by_name = node.address.replace("127.0.0.1", "localhost");
    let out = finish(&mut world.consumer_command(&url, &by_name, &refs(&words("mount"))));
    refused(&out, 3, &["is for", "127.0.0.1", "not for localhost", "subject alternative names"]);
    let half = words("mount");
    let out = finish(&mut world.consumer_command(&url, &by_name, &refs(&half[..2])));
    refused(&out, 2, &["--tls-key"]);
    assert!(node.count("trust", "refused_tls") >= 1);
}
