//! `spurline net doctor` queries a subnet manager through libibumad: ibsim simulates the fabric, opensm is the
//! manager, and the port's kernel files are those of a host whose manager died: active, with its address.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// One switch, two hosts.
const FABRIC: &str =
    "Switch 8 \"S1\"\n[1] \"H1\"[1]\n[2] \"H2\"[1]\n\nHca 1 \"H1\"\n[1] \"S1\"[1]\n\nHca 1 \"H2\"\n[1] \"S1\"[2]\n";
/// How long a program of others may take to come up.
const LIMIT: Duration = Duration::from_secs(60);

/// Puts the port's files where the kernel has them, in a mount namespace of its own, and runs what follows there. Beside
/// them the interfaces of this host stay.
const WITH_PORT: &str = r#"
set -e
keep=$1 port=$2; shift 2
mount --bind /sys/class/net "$keep"
mount -t tmpfs none /sys/class
mkdir -p /sys/class/net /sys/class/infiniband_mad "$port/gids"
mount --move "$keep" /sys/class/net
echo 5 >/sys/class/infiniband_mad/abi_version
echo "1: CA" >"${port%/ports/*}/node_type"
cd "$port"
echo "4: ACTIVE" >state; echo "5: LinkUp" >phys_state; echo InfiniBand >link_layer
echo "40 Gb/sec (4X QDR)" >rate; echo 0x2 >lid; echo 0x1 >sm_lid
echo fe80:0000:0000:0000:0000:0000:0020:0001 >gids/0
cd "$PLACE"
export LD_PRELOAD=$PRELOAD
exec "$@"
"#;

fn skip(thing: &str, why: &str) {
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == thing), "SPURLINE_TEST_REQUIRE lists {thing}: {why}");
    println!("SKIP: {why}");
}

fn found(name: &str) -> bool {
    ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].iter().any(|dir| Path::new(dir).join(name).exists())
}

/// A program that ends with its value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The doctor's findings on the port, as a host of the simulated fabric.
fn doctor(preload: &Path, dir: &Path, socket: &str) -> String {
    let out = Command::new("unshare")
        .args(["-m", "bash", "-c", WITH_PORT, "-"])
        .arg(dir.join("keep"))
        .arg("/sys/class/infiniband/ibsim0/ports/1")
        .args([env!("CARGO_BIN_EXE_spurline"), "net", "doctor", "--json"])
        .env("PLACE", dir)
        .env("PRELOAD", preload)
        .env("SIM_HOST", "H1")
        .env("IBSIM_SOCKNAME", socket)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let json: serde_json::Value = serde_json::from_str(said.trim())
        .unwrap_or_else(|e| panic!("{e}: {said} {}", String::from_utf8_lossy(&out.stderr)));
    let about = |f: &&serde_json::Value| {
        f["subject"].as_str().unwrap().starts_with("ibsim0/1") || f["subject"] == "subnet manager"
    };
    let lines = json["findings"].as_array().unwrap().iter().filter(about);
    lines.map(|f| format!("{} {}: {}\n", f["id"], f["severity"], f["evidence"])).collect()
}

fn until(preload: &Path, dir: &Path, socket: &str, what: &str, good: impl Fn(&str) -> bool) -> String {
    let end = Instant::now() + LIMIT;
    loop {
        let said = doctor(preload, dir, socket);
        if good(&said) {
            return said;
        }
        assert!(Instant::now() < end, "not {what} within {LIMIT:?}: {said}");
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[test]
fn a_manager_that_died_is_found_by_asking_it() {
    let libraries = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let preload = libraries.iter().map(|d| Path::new(d).join("umad2sim/libumad2sim.so")).find(|p| p.exists());
    let (Some(preload), true, true) = (preload, found("ibsim"), found("opensm")) else {
        return skip("ibsim", "no simulated fabric: ibsim, its libumad2sim.so and opensm are needed");
    };
    if !Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|s| s.success()) {
        return skip("netns", "no mount namespace, for which root is needed");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("keep")).unwrap();
    let net = dir.path().join("net");
    std::fs::write(&net, FABRIC).unwrap();
    let socket = format!("spurline-doctor-{}", std::process::id());
    let run = |command: &mut Command| {
        command.env("IBSIM_SOCKNAME", &socket).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(Running)
    };
    // Its console has to stay open, or it ends.
    let Ok(mut sim) = run(Command::new("ibsim").arg("-s").arg(&net).stdin(Stdio::piped())) else {
        return skip("ibsim", "ibsim does not start");
    };
    let mut opensm = Command::new("opensm");
    opensm.arg("-f").arg(dir.path().join("opensm.log")).current_dir(dir.path()).stdin(Stdio::null());
    for (key, value) in [("LD_PRELOAD", preload.as_path()), ("OSM_CACHE_DIR", dir.path()), ("OSM_TMP_DIR", dir.path())]
    {
        opensm.env(key, value);
    }
    let opensm = run(opensm.env("SIM_HOST", "H2")).unwrap();
    // The port itself is always remarked upon, so that an empty answer is no good one.
    let answers = |said: &str| !said.contains("SM-SILENT") && !said.contains("CHECK-LEFT-OUT");
    let alive = until(&preload, dir.path(), &socket, "well", answers);
    drop(opensm);
    let silent = |said: &str| said.contains("SM-SILENT");
    let died = until(&preload, dir.path(), &socket, "SM-SILENT", silent);
    assert!(!alive.contains("SM-SILENT") && died.contains("error"), "{alive} then {died}");
    let _ = sim.0.stdin.take().map(|mut console| console.write_all(b"quit\n"));
}
