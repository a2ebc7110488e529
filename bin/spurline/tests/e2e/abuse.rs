//! Hostile clients against real processes: a node, a coordinator and a metrics page get nonsense, silence and
//! replays, while a mount reads on and compares.

use spurline_rig::world::*;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TOKEN: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";
/// More than a flood may add to a process: its buffers are in the budget, and what strangers get is small.
const ROOM: u64 = 96 << 20;

/// Invalid handshakes: too short, too long, of other protocols, and frames of this one out of order.
fn nonsense() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = [
        &b""[..],
        b"\0",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
        b"SPUR",
    ]
    .map(<[u8]>::to_vec)
    .to_vec();
    for fill in [0, 1, 0x7f, 0xff] {
        let mut frame = b"SPUR".to_vec();
        frame.resize(64, fill);
        all.push(frame.clone());
        frame.resize(1 << 20, fill);
        all.push(frame);
    }
    all.push(bytes(7, 300_000));
    all
}

/// Sends `words` and waits for the end of the connection; the answer must be short.
fn shout(at: SocketAddr, words: &[u8]) {
    let mut stranger = TcpStream::connect(at).unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    stranger.set_write_timeout(Some(PATIENCE)).unwrap();
    // It may be closed in the middle.
    let _ = stranger.write_all(words);
    let _ = stranger.shutdown(Shutdown::Write);
    let mut heard = Vec::new();
    if let Err(error) = stranger.take(1 << 20).read_to_end(&mut heard) {
        let kept = matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
        assert!(!kept, "a connection that sent {} bytes of nonsense stayed open", words.len());
    }
}

/// Forwards connections to `to`, and records the first one.
fn recorder(to: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (at, kept) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let record = Arc::clone(&kept);
    std::thread::spawn(move || {
        for (number, from) in listener.incoming().enumerate() {
            let (Ok(mut from), Ok(mut there)) = (from, TcpStream::connect(to)) else { continue };
            let (mut back, mut answers) = (from.try_clone().unwrap(), there.try_clone().unwrap());
            let record = (number == 0).then(|| Arc::clone(&record));
            std::thread::spawn(move || {
                let mut part = [0; 4096];
                while let Ok(len @ 1..) = from.read(&mut part) {
                    if let Some(record) = &record {
                        record.lock().unwrap().extend_from_slice(&part[..len]);
                    }
                    if there.write_all(&part[..len]).is_err() {
                        break;
                    }
                }
                let _ = there.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut answers, &mut back);
                let _ = back.shutdown(Shutdown::Write);
            });
        }
    });
    (at, kept)
}

#[test]
fn strangers_who_mean_harm_cost_members_nothing() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let text = bytes(77, 3 * MIB);
    world.file("source/file", &text);
    let source = world.path("source").to_str().unwrap().to_owned();
    let token = world.file("token", TOKEN.as_bytes());
    rustix::fs::chmod(&token, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let trust = ["--group-token-file", token.to_str().unwrap()];
    let mut command = world.command(&["coordinator", "--state-file", "none"]);
    let coordinator = Process::start(command.args(trust), &world.log_path("coordinator"));
    let line = coordinator.wait_for("coordinating on ");
    let desk: SocketAddr = line.split("coordinating on ").nth(1).unwrap().trim().parse().unwrap();
    let registry = format!("coordinator://{desk}");
    let more = [&trust[..], &["--registry", &registry, "--metrics", "127.0.0.1:0"]].concat();
    let node = world.node(&[&source], 0, &more);
    let line = node.process.wait_for("metrics page address=");
    let page = line.split("address=").nth(1).unwrap().split([' ', ';']).next().unwrap().parse().unwrap();
    let door: SocketAddr = node.address.parse().unwrap();
    // Records a member's handshake byte for byte; the mount ends again.
    let (relay, recorded) = recorder(door);
    let mount = world.consumer(&source, &relay.to_string(), &trust);
    assert!(mount.read("file") == text);
    mount.unmount();
    let recorded = recorded.lock().unwrap().clone();
    assert!(recorded.starts_with(b"SPUR") && recorded.len() > 128);
    let mut command = world.command(&["mount", &source, world.dir("mnt").to_str().unwrap(), "--registry", &registry]);
    let mount = world.mount_with(command.args(trust));
    let before = [node.process.most_resident(), coordinator.most_resident()];
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert!(mount.read("file") == text);
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _guard = StopOnDrop(&stop);
        // Some connections stay silent, others stop after a first part.
        let mut waiting = Vec::new();
        for at in [door, desk, page] {
            for number in 0..60usize {
                let mut stranger = TcpStream::connect(at).unwrap();
                let _ = stranger.write_all(&recorded[..number]);
                waiting.push(stranger);
            }
        }
        for at in [door, desk, page] {
            for words in nonsense() {
                shout(at, &words);
            }
        }
        // Recordings: whole, twice, cut, and one bit otherwise.
        let mut bent = recorded.clone();
        bent[40] ^= 1;
        let twice = recorded.repeat(2);
        for words in [&recorded[..], &twice, &recorded[..100], &recorded[64..], &bent] {
            shout(door, words);
            shout(desk, words);
        }
        let seen = rounds.load(Ordering::Relaxed);
        eventually("reads after that", || rounds.load(Ordering::Relaxed) > seen + 1);
        // The page answers again once the silent connections are closed.
        eventually("the page", || {
            let mut asked = TcpStream::connect(page).unwrap();
            asked.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let _ = asked.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let mut said = String::new();
            let _ = asked.read_to_string(&mut said);
            said.contains("spurline_trust_refused_proof")
        });
        drop(waiting);
    });
    // No recording proved anything, and nothing of it was kept.
    let refused = node.stats()["trust"].clone();
    let n = |name: &str| refused[name].as_u64().unwrap();
    assert!(n("refused_proof") >= 1 && n("refused_proof") + n("refused_frames") >= 5, "{refused}");
    let after = [node.process.most_resident(), coordinator.most_resident()];
    for (before, after) in before.into_iter().zip(after) {
        assert!(after < before + ROOM, "from {before} to {after} bytes");
    }
    for log in [node.process.log(), coordinator.log()] {
        assert!(log.contains("connection of 127.0.0.1") && !log.contains("panicked") && !log.contains(TOKEN), "{log}");
        let lines = log.lines().filter(|line| line.contains("connection of 127.0.0.1")).count();
        assert!(lines < 60, "{lines} lines: {log}");
    }
    assert!(world.run(&[&["status", "--registry", registry.as_str()][..], &trust].concat()).status.success());
    mount.unmount();
}

/// Ends the reader also when an assertion beside it fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
