//! Access to a coordinator, with real processes: members by token and by TLS; all others are refused with the missing
//! proof.

use spurline_rig::world::*;
use std::process::Command;

const TOKEN: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";
const OTHER: &str = "another-WJ7b2uR1xTzv9sLd3f";

fn token(world: &World, name: &str, text: &str) -> String {
    let path = world.file(name, text.as_bytes());
    rustix::fs::chmod(&path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A coordinator without a file, and where it is.
fn coordinator(world: &World, command: &mut Command) -> (Process, String) {
    let process = Process::start(command.args(["--state-file", "none"]), &world.log_path("coordinator"));
    let line = process.wait_for("coordinating on ");
    let address = line.split("coordinating on ").nth(1).unwrap().trim().to_owned();
    (process, address)
}

#[test]
fn a_coordinator_lets_members_in_and_tells_others_what_is_missing() {
    let world = World::new();
    world.file("source/file", &bytes(5, 3 * MIB));
    let source = world.path("source").to_str().unwrap().to_owned();
    let (file, wrong) = (token(&world, "token", TOKEN), token(&world, "wrong", OTHER));
    for tls in [false, true] {
        let with = |file| [&["--group-token-file", file][..], if tls { &["--tls"] } else { &[] }].concat();
        let (ours, theirs) = (with(file.as_str()), with(wrong.as_str()));
        let (process, address) = coordinator(&world, world.command(&["coordinator"]).args(&ours));
        let registry = format!("coordinator://{address}");
        let group = ["--registry", registry.as_str()];
        let node = world.node(&[&source], 0, &[&group[..], &ours].concat());
        let status = |more: &[&str]| world.run(&[&["status"][..], &group, more].concat());
        eventually("the node in the list", || status(&ours).status.success());
        // By variables, as services have it.
        let mut command = world.command(&["status", "--json"]);
        command.args(group).env("SPURLINE_GROUP_TOKEN_FILE", &file).env("SPURLINE_TLS", if tls { "1" } else { "0" });
        let out = finish(&mut command);
        assert!(out.status.success(), "{out:?}");
        assert!(String::from_utf8_lossy(&out.stdout).contains(&node.address), "{out:?}");
        let job = |what: &str, more: &[&str]| {
            world.run(&[&[what, source.as_str(), "--source", source.as_str()][..], &group, more].concat())
        };
        for what in ["load", "free"] {
            let out = job(what, &ours);
            assert_eq!(out.status.code(), Some(0), "{out:?}");
        }
        // Strangers of both kinds, in all they could want.
        let none = if tls { "speaks TLS only" } else { "requires a proof of the group token" };
        let no_words: &[&str] = &[];
        for (words, says) in [(&theirs[..], "another group token"), (no_words, none)] {
            let says = [says, "--group-token-file", address.as_str()];
            refused(&status(words), 3, &says);
            refused(&job("load", words), 3, &says);
            let mut enter = world.command(&["node", "--source", &source, "--cache-size", "0"]);
            let said = refused(&finish(enter.args(group).args(words)), 3, &says);
            assert!(!said.contains(TOKEN) && !said.contains(OTHER), "{said}");
        }
        let log = process.log();
        assert!(log.contains("connection of 127.0.0.1") && !log.contains(TOKEN), "{log}");
        let refusals = stats(&world.path("run"), address.as_ref())["trust"]["refused_proof"].as_u64().unwrap();
        let lines = log.lines().filter(|line| line.contains("connection of 127.0.0.1")).count();
        assert!(refusals >= 6 && lines < refusals as usize, "{lines} lines for {refusals} strangers: {log}");
        assert!(status(&ours).status.success());
    }
}

#[test]
fn a_coordinator_listens_beyond_this_machine_only_when_told_who_may_come() {
    let Some(hosts) = Hosts::new() else { return };
    let world = World::new();
    let file = token(&world, "token", TOKEN);
    let command = |more: &[&str]| {
        let mut command = world.command(&["coordinator", "--group-network", "spl0"]);
        Hosts::on(&hosts.0, command.args(more))
    };
    let says = ["10.213.0.1", "enter the group as a node", "--group-token-file", "--allow-anyone", "openssl rand"];
    refused(&finish(&mut command(&[])), 2, &says);
    refused(&finish(&mut command(&["--allow-anyone", "--group-token-file", &file])), 2, &["contradict"]);
    let (process, address) = coordinator(&world, &mut command(&["--group-token-file", &file]));
    assert!(address.contains("10.213.0.1:") && !process.log().contains("allow-anyone"), "{}", process.log());
    let (process, _) = coordinator(&world, &mut command(&["--allow-anyone"]));
    assert!(process.log().contains("--allow-anyone: whoever reaches 10.213.0.1"), "{}", process.log());
}
