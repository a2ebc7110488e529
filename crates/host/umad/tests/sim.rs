//! The query on a simulated fabric: ibsim simulates the hardware, opensm the subnet manager, libibumad is the real one.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// One switch, two hosts.
const FABRIC: &str =
    "Switch 8 \"S1\"\n[1] \"H1\"[1]\n[2] \"H2\"[1]\n\nHca 1 \"H1\"\n[1] \"S1\"[1]\n\nHca 1 \"H2\"\n[1] \"S1\"[2]\n";
/// How long a program of others may take to come up.
const LIMIT: Duration = Duration::from_secs(60);

fn skip(why: &str) {
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == "ibsim"), "SPURLINE_TEST_REQUIRE lists ibsim: {why}");
    println!("SKIP: {why}");
}

fn found(name: &str) -> bool {
    ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].iter().any(|dir| Path::new(dir).join(name).exists())
}

/// A program that ends when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the example prints, run as a host of the simulated fabric.
fn asked(preload: &Path, dir: &Path, socket: &str) -> String {
    let mut program = std::env::current_exe().unwrap();
    program.pop();
    program.pop();
    let out = Command::new(program.join("examples/sm"))
        .env("LD_PRELOAD", preload)
        .env("SIM_HOST", "H1")
        // The preload makes files in the working directory.
        .current_dir(dir)
        .env("IBSIM_SOCKNAME", socket)
        .output()
        .unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Queries until the answer contains `part`.
fn until(preload: &Path, dir: &Path, socket: &str, part: &str) -> String {
    let end = Instant::now() + LIMIT;
    loop {
        let said = asked(preload, dir, socket);
        if said.contains(part) {
            return said;
        }
        assert!(Instant::now() < end, "no {part:?} within {LIMIT:?}: {said}");
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[test]
fn a_subnet_manager_comes_and_goes() {
    let libraries = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let preload = libraries.iter().map(|d| Path::new(d).join("umad2sim/libumad2sim.so")).find(|p| p.exists());
    let (Some(preload), true, true) = (preload, found("ibsim"), found("opensm")) else {
        return skip("no simulated fabric: ibsim, its libumad2sim.so and opensm are needed (ibsim-utils, opensm)");
    };
    let dir = tempfile::tempdir().unwrap();
    let net = dir.path().join("net");
    std::fs::write(&net, FABRIC).unwrap();
    let socket = format!("spurline-{}", std::process::id());
    // Without an open console the simulator ends.
    let sim = Command::new("ibsim")
        .arg("-s")
        .arg(&net)
        .env("IBSIM_SOCKNAME", &socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(sim) = sim else { return skip("ibsim does not start") };
    let mut sim = Running(sim);

    let before = until(&preload, dir.path(), &socket, "sm_lid 0");
    assert!(before.contains("state 2") && before.contains("Silent"), "{before}");

    let log = dir.path().join("opensm.log");
    let opensm = Command::new("opensm")
        .arg("-f")
        .arg(&log)
        .current_dir(dir.path())
        .env("LD_PRELOAD", &preload)
        .env("SIM_HOST", "H2")
        .env("IBSIM_SOCKNAME", &socket)
        .env("OSM_CACHE_DIR", dir.path())
        .env("OSM_TMP_DIR", dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let opensm = Running(opensm);
    let during = until(&preload, dir.path(), &socket, "Alive");
    assert!(during.contains("state 4") && during.contains("state: 3"), "the one that works: {during}");

    // The subnet manager has ended: the port stays active, with a LID of no host.
    drop(opensm);
    let after = until(&preload, dir.path(), &socket, "Silent");
    assert!(after.contains("state 4") && !after.contains("sm_lid 0"), "{after}");
    let _ = sim.0.stdin.take().map(|mut console| console.write_all(b"quit\n"));
}
