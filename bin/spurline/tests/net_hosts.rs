//! `spurline net` on real interfaces: network namespaces as hosts, changes made and taken back, both ends compared.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

const BIN: &str = env!("CARGO_BIN_EXE_spurline");

/// A namespace that goes with its value.
struct Host(String);

impl Host {
    fn new(name: &str) -> Self {
        let host = Host(format!("spurline-net-{}-{name}", std::process::id()));
        ip(&["netns", "add", &host.0]);
        host.ip(&["link", "set", "lo", "up"]);
        host
    }

    fn ip(&self, words: &[&str]) {
        ip(&[&["-n", &self.0], words].concat());
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, BIN, "net"]).args(words).env_remove("SSH_CONNECTION");
        command
    }

    fn net(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn json(&self, words: &[&str]) -> serde_json::Value {
        let out = self.net(words);
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"))
    }

    /// Ids of the doctor's findings that name `subject`.
    fn found(&self, subject: &str, words: &[&str]) -> Vec<String> {
        let json = self.json(&[&["doctor", "--json"], words].concat());
        let about = |f: &&serde_json::Value| f["subject"].as_str().unwrap().contains(subject);
        json["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(about)
            .map(|f| f["id"].as_str().unwrap().to_owned())
            .collect()
    }

    fn read(&self, path: &str) -> String {
        let out = Command::new("ip").args(["netns", "exec", &self.0, "cat", path]).output().unwrap();
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

fn try_ip(words: &[&str]) -> Result<(), String> {
    let out = Command::new("ip").args(words).output().map_err(|e| e.to_string())?;
    if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).trim().to_owned()) }
}

fn ip(words: &[&str]) {
    try_ip(words).unwrap_or_else(|e| panic!("ip {words:?}: {e}"));
}

/// Whether namespaces can be made here; prints SKIP if not. Tried once: parallel tests would use the same trial name.
fn here() -> bool {
    static TRIED: OnceLock<Result<(), String>> = OnceLock::new();
    let tried = TRIED.get_or_init(|| {
        let name = format!("spurline-net-{}-probe", std::process::id());
        let made = try_ip(&["netns", "add", &name]);
        let _ = try_ip(&["netns", "del", &name]);
        made
    });
    if let Err(why) = tried {
        skip("netns", &format!("no network namespaces: {why}"));
    }
    tried.is_ok()
}

fn skip(thing: &str, why: &str) {
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == thing), "SPURLINE_TEST_REQUIRE lists {thing}: {why}");
    println!("SKIP: {why}");
}

/// Two hosts and a cable, with names and MTUs of both ends.
fn pair(name: &str, mtus: (u32, u32)) -> (Host, Host) {
    let (a, b) = (Host::new(&format!("{name}a")), Host::new(&format!("{name}b")));
    ip(&["-n", &a.0, "link", "add", "c0", "type", "veth", "peer", "name", "c0", "netns", &b.0]);
    for (host, address, mtu) in [(&a, "10.77.0.1/24", mtus.0), (&b, "10.77.0.2/24", mtus.1)] {
        host.ip(&["addr", "add", address, "dev", "c0"]);
        host.ip(&["link", "set", "c0", "mtu", &mtu.to_string(), "up"]);
    }
    (a, b)
}

fn str(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn an_mtu_is_changed_written_down_and_taken_back() {
    if !here() {
        return;
    }
    let (host, _other) = pair("mtu", (1500, 9000));
    let root = tempfile::tempdir().unwrap();
    let etc = root.path().join("etc/network");
    std::fs::create_dir_all(&etc).unwrap();
    let before = "auto c0\niface c0 inet static\n    address 10.77.0.1/24\n    # by hand\n    mtu 1500\n";
    std::fs::write(etc.join("interfaces"), before).unwrap();
    let ask = ["MTU-LOW", "--for-rdma", "c0", "--root", str(root.path())];
    let fix = |words: &[&str]| {
        let out = host.net(&[&["fix"], ask.as_slice(), words].concat());
        (out.status.code(), String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned())
    };
    let mtu = || host.read("/sys/class/net/c0/mtu");

    let (code, said) = fix(&[]);
    assert!(
        code == Some(0) && said.contains("would ip link set c0 mtu 9000") && said.contains("nothing was changed"),
        "{said}"
    );
    assert_eq!(mtu(), "1500");
    let (code, said) = fix(&["--apply", "--persist", "ifupdown"]);
    assert!(code == Some(0) && said.contains("made ip link set c0 mtu 9000"), "{said}");
    assert_eq!(mtu(), "9000");
    let written = std::fs::read_to_string(etc.join("interfaces")).unwrap();
    assert_eq!(written, "auto c0\niface c0 inet static\n    mtu 9000\n    address 10.77.0.1/24\n    # by hand\n");
    // Once more changes nothing: neither the host nor the file nor the way back.
    let (code, said) = fix(&["--apply", "--persist", "ifupdown"]);
    assert!(code == Some(0) && said.contains("there already /etc/network/interfaces"), "{said}");
    assert_eq!(std::fs::read_to_string(etc.join("interfaces")).unwrap(), written);

    let revert = || host.net(&["fix", "--revert", "--root", str(root.path())]);
    // A file that was changed since stays, and is reported; the rest is taken back.
    std::fs::write(etc.join("interfaces"), format!("{written}# later\n")).unwrap();
    let out = revert();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.code() == Some(1) && said.contains("was changed since it was written"), "{said}");
    assert_eq!(mtu(), "1500");
    std::fs::write(etc.join("interfaces"), &written).unwrap();
    assert_eq!(revert().status.code(), Some(0));
    assert_eq!(std::fs::read_to_string(etc.join("interfaces")).unwrap(), before);
    assert!(String::from_utf8_lossy(&revert().stdout).contains("nothing to take back"));
}

#[test]
fn other_systems_get_files_of_their_own_kind() {
    if !here() {
        return;
    }
    let (host, _other) = pair("sys", (1500, 1500));
    for (system, file, holds) in [
        ("networkd", "etc/systemd/network/10-spurline-c0.network", "MTUBytes=9000"),
        ("networkmanager", "etc/NetworkManager/system-connections/spurline-c0.nmconnection", "mtu=9000"),
        ("ifupdown", "etc/network/interfaces.d/spurline-c0", "mtu 9000"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let words = ["fix", "MTU-LOW", "--for-rdma", "c0", "--persist", system, "--root", str(root.path())];
        let out = host.net(&words);
        assert!(out.status.success(), "{out:?}");
        let text = std::fs::read_to_string(root.path().join(file)).unwrap();
        assert!(text.contains(holds), "{system}: {text}");
        // NetworkManager takes the addresses that are there; networkd keeps them.
        assert!(system == "ifupdown" || text.contains("10.77.0.1/24") || text.contains("KeepConfiguration"), "{text}");
        assert_eq!(host.read("/sys/class/net/c0/mtu"), "1500", "--persist alone changes no running host");
        assert!(host.net(&["fix", "--revert", "--root", str(root.path())]).status.success());
        assert!(!root.path().join(file).exists());
    }
    // The drop-in for a matching file is found again.
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("etc/systemd/network");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("20-c0.network"), "[Match]\nName=c0\n[Network]\nAddress=10.77.0.1/24\n").unwrap();
    let words = ["fix", "MTU-LOW", "--for-rdma", "c0", "--persist", "networkd", "--root", str(root.path())];
    assert!(host.net(&words).status.success());
    assert!(dir.join("20-c0.network.d/50-spurline.conf").exists());
    std::fs::write(dir.join("20-c0.network"), "[Match]\nName=c*\n").unwrap();
    let out = host.net(&words);
    assert!(
        out.status.code() == Some(1) && String::from_utf8_lossy(&out.stderr).contains("other interfaces"),
        "{out:?}"
    );
}

#[test]
fn two_interfaces_in_one_subnet_are_found_and_settled() {
    if !here() {
        return;
    }
    let (host, other) = pair("twin", (1500, 1500));
    ip(&["-n", &host.0, "link", "add", "c1", "type", "veth", "peer", "name", "c1", "netns", &other.0]);
    host.ip(&["addr", "add", "10.77.0.3/24", "dev", "c1"]);
    host.ip(&["link", "set", "c1", "up"]);
    let rp = Command::new("ip")
        .args(["netns", "exec", &host.0, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/c1/rp_filter"])
        .status();
    assert!(rp.unwrap().success());
    // The counters show the carrier: packets from the second interface's address leave by the first.
    let served = serve(&other);
    let json = host.json(&["doctor", "--json", "--peer", "10.77.0.2"]);
    let all = json["findings"].as_array().unwrap();
    let about: Vec<_> = all.iter().filter(|f| f["id"] == "PEER-ROUTE").collect();
    assert!(about.len() == 1 && about[0]["subject"] == "c1", "{json:#}");
    let evidence = about[0]["evidence"].as_str().unwrap();
    assert!(
        evidence.contains("of 4096 KiB sent from c1 to 10.77.0.2") && evidence.contains("moved on c0 here"),
        "{evidence}"
    );
    // A rule that the main table knows nothing of puts it right here.
    other.ip(&["link", "set", "c1", "up"]);
    host.ip(&["route", "add", "10.77.0.2", "dev", "c1", "table", "77"]);
    host.ip(&["rule", "add", "from", "10.77.0.3", "table", "77"]);
    let json = host.json(&["doctor", "--json", "--peer", "10.77.0.2"]);
    let found = json["findings"].as_array().unwrap().iter().find(|f| f["id"] == "PEER-ROUTE").cloned();
    let says = found.map_or(String::new(), |f| f["evidence"].as_str().unwrap().to_owned());
    assert!(says.contains("moved on c1 here and on c1 there"), "{says}");
    drop(served);
    let ids = host.found("c0, c1", &[]);
    for id in ["SAME-SUBNET", "ARP-FLUX", "RP-FILTER"] {
        assert!(ids.iter().any(|i| i == id), "{id}: {ids:?}");
    }
    let root = tempfile::tempdir().unwrap();
    let fixed =
        host.net(&["fix", "ARP-FLUX", "RP-FILTER", "--apply", "--persist", "networkd", "--root", str(root.path())]);
    assert!(fixed.status.success(), "{fixed:?}");
    assert_eq!(host.found("c0, c1", &[]), ["SAME-SUBNET"], "the cause stays");
    assert_eq!(host.read("/proc/sys/net/ipv4/conf/c0/arp_ignore"), "1");
    let text = std::fs::read_to_string(root.path().join("etc/sysctl.d/90-spurline.conf")).unwrap();
    assert!(text.contains("net.ipv4.conf.c1.rp_filter = 2\n"), "{text}");
    assert!(host.net(&["fix", "--revert", "--root", str(root.path())]).status.success());
    assert_eq!(host.read("/proc/sys/net/ipv4/conf/c1/rp_filter"), "1");
    // An address of its own subnet settles it for good.
    host.ip(&["addr", "del", "10.77.0.3/24", "dev", "c1"]);
    host.ip(&["addr", "add", "10.78.0.3/24", "dev", "c1"]);
    assert!(host.found("c1", &[]).is_empty());
}

#[test]
fn the_session_is_not_cut_off_unasked() {
    if !here() {
        return;
    }
    let (host, _other) = pair("ssh", (1500, 1500));
    let root = tempfile::tempdir().unwrap();
    let words = ["fix", "MTU-LOW", "--for-rdma", "c0", "--apply", "--root", str(root.path())];
    let from = |words: &[&str]| {
        host.command(words).env("SSH_CONNECTION", "10.77.0.2 5000 10.77.0.1 22").stdin(Stdio::null()).output().unwrap()
    };
    let out = from(&words);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        out.status.code() == Some(1) && said.contains("this session's own packets") && said.contains("--yes"),
        "{said}"
    );
    assert_eq!(host.read("/sys/class/net/c0/mtu"), "1500");
    assert!(from(&[words.as_slice(), &["--yes"]].concat()).status.success());
    assert_eq!(host.read("/sys/class/net/c0/mtu"), "9000");
}

/// `net serve` in a namespace.
struct Served(
    Child,
    #[expect(dead_code, reason = "kept open: what it prints must go somewhere")] BufReader<ChildStdout>,
);

/// Starts it; its first line reports that it listens.
fn serve(host: &Host) -> Served {
    let mut child = host
        .command(&["serve", "--json", "--bind", "all"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.contains("listening"), "{line}");
    Served(child, out)
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn both_ends_are_compared_through_net_serve() {
    if !here() {
        return;
    }
    let (host, other) = pair("peer", (1500, 9000));
    let _served = serve(&other);
    let found = host.found("c0", &["--peer", "10.77.0.2"]);
    assert!(found.iter().any(|id| id == "PEER-MTU"), "{found:?}");
    // The requested change is the other end's value.
    let root = tempfile::tempdir().unwrap();
    let fix = host.net(&["fix", "PEER-MTU", "--peer", "10.77.0.2", "--apply", "--root", str(root.path())]);
    assert!(fix.status.success(), "{fix:?}");
    assert_eq!(host.read("/sys/class/net/c0/mtu"), "9000");
    assert!(host.found("c0", &["--peer", "10.77.0.2"]).is_empty());
}

#[test]
fn bonds_and_vlans_are_listed_as_what_they_are() {
    if here() {
        bonds_and_vlans(skip);
    }
}

/// Things that can't be created are passed to `missing`.
fn bonds_and_vlans(missing: fn(&str, &str)) {
    let (host, other) = pair("kind", (1500, 1500));
    let list = || host.json(&["list", "--json"])["interfaces"].as_array().unwrap().clone();
    let of = |name: &str| list().into_iter().find(|i| i["interface"] == name).unwrap();
    assert_eq!(of("c0")["kind"], "veth");
    assert_eq!(of("c0")["addresses"][0], "10.77.0.1/24");
    assert_eq!(of("c0")["lower_is_elsewhere"], true);
    assert_eq!(of("c0")["max_mtu"], 65535);
    match try_ip(&["-n", &host.0, "link", "add", "link", "c0", "name", "c0.7", "type", "vlan", "id", "7"]) {
        Ok(()) => {
            let vlan = of("c0.7");
            assert_eq!((&vlan["kind"], &vlan["vlan"], &vlan["lower"][0]), (&"vlan".into(), &7.into(), &"c0".into()));
        }
        Err(why) => missing("vlan", &format!("no VLAN interfaces in this kernel: {why}")),
    }
    match try_ip(&["-n", &host.0, "link", "add", "b0", "type", "bond", "mode", "balance-rr"]) {
        Ok(()) => {
            ip(&["-n", &host.0, "link", "add", "c1", "type", "veth", "peer", "name", "c1", "netns", &other.0]);
            host.ip(&["link", "set", "c1", "master", "b0"]);
            host.ip(&["link", "set", "b0", "up"]);
            assert_eq!((&of("b0")["kind"], &of("b0")["bond_mode"]), (&"bond".into(), &"balance-rr".into()));
            assert_eq!(of("c1")["master"], "b0");
            assert!(host.found("c1", &[]).iter().any(|id| id == "BOND-MEMBER"), "its other end is down");
        }
        Err(why) => missing("bond", &format!("no bonds in this kernel: {why}")),
    }
}

#[test]
fn an_ordinary_user_gets_an_answer_too() {
    if !is_root() {
        println!("SKIP: this test gives up root, and there is none to give up");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("spurline");
    // By a process of its own: a file that this one writes stays busy in children that other tests start meanwhile.
    assert!(Command::new("cp").arg(BIN).arg(&copy).status().unwrap().success());
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).unwrap();
    use std::os::unix::process::CommandExt;
    for words in [["list", "--json"], ["doctor", "--json"]] {
        let out = Command::new(&copy).arg("net").args(words).current_dir("/").uid(65534).gid(65534).output().unwrap();
        assert!(matches!(out.status.code(), Some(0 | 1)), "{out:?}");
        serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap();
    }
}

fn is_root() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|s| s.lines().any(|l| l.starts_with("Uid:\t0\t")))
}

fn here_net(words: &[&str]) -> Output {
    Command::new(BIN).arg("net").args(words).output().unwrap()
}

fn here_json(words: &[&str]) -> serde_json::Value {
    let out = here_net(words);
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"))
}

/// Ids of the findings about `subject` on the guest itself.
fn here_found(subject: &str) -> Vec<(String, String)> {
    let json = here_json(&["doctor", "--json", "--for-rdma", "rail0:rail1"]);
    let text = |f: &serde_json::Value, key: &str| f[key].as_str().unwrap().to_owned();
    let all = json["findings"].as_array().unwrap().iter().filter(|f| text(f, "subject").contains(subject));
    all.map(|f| (text(f, "id"), text(f, "severity"))).collect()
}

#[test]
#[ignore = "needs RDMA devices: run by in_a_guest_with_soft_roce"]
fn guest_lists_and_examines_real_devices() {
    let list = here_json(&["list", "--json"]);
    let devices = list["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2, "{list}");
    let port = &devices[0]["ports"][0];
    assert_eq!((&devices[0]["device"], &devices[0]["protocol"]), (&"rxe0".into(), &"roce".into()));
    assert_eq!(
        (&port["link_layer"], &port["state"], &port["netdevs"][0]),
        (&"Ethernet".into(), &"ACTIVE".into(), &"rail0".into())
    );
    let gids = port["gids"].as_array().unwrap();
    assert!(gids.iter().any(|g| g["kind"] == "RoCE v2" && g["address"] == "::ffff:10.77.0.1"), "{gids:?}");
    let table = String::from_utf8(here_net(&["list", "--gids"]).stdout).unwrap();
    assert!(
        table.contains("software on rail1") && table.contains("10.77.1.1/24") && table.contains("RoCE v2"),
        "{table}"
    );
    println!("{table}");
    let out = here_net(&["doctor", "--for-rdma", "rail0:rail1"]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    println!("{said}");
    assert_eq!(out.status.code(), Some(0), "two rails that are well: {said}");
    assert!(said.contains("SOFT-RDMA rxe0"), "{said}");
}

#[test]
#[ignore = "needs RDMA devices: run by in_a_guest_with_soft_roce"]
fn guest_mtu_link_and_subnet() {
    ip(&["link", "set", "rail0", "mtu", "1500"]);
    assert!(here_found("rail0").iter().any(|(id, _)| id == "MTU-LOW"));
    let root = tempfile::tempdir().unwrap();
    let fix =
        |id: &str| here_net(&["fix", id, "--for-rdma", "rail0:rail1", "--apply", "--yes", "--root", str(root.path())]);
    let out = fix("MTU-LOW");
    assert!(out.status.success(), "{out:?}");
    assert_eq!(std::fs::read_to_string("/sys/class/net/rail0/mtu").unwrap().trim(), "9000");
    assert!(!here_found("rail0").iter().any(|(id, _)| id == "MTU-LOW"));
    assert!(here_net(&["fix", "--revert", "--root", str(root.path())]).status.success());
    assert_eq!(std::fs::read_to_string("/sys/class/net/rail0/mtu").unwrap().trim(), "1500");
    ip(&["link", "set", "rail0", "mtu", "9000"]);

    ip(&["link", "set", "rail1", "down"]);
    let down = here_found("rxe1/1");
    assert!(down.contains(&("PORT-DOWN".to_owned(), "error".to_owned())), "{down:?}");
    assert!(fix("PORT-DOWN").status.success());
    assert!(!here_found("rxe1/1").iter().any(|(id, _)| id == "PORT-DOWN"));

    ip(&["addr", "add", "10.77.0.9/24", "dev", "rail1"]);
    let twins = here_found("rail0, rail1");
    assert!(twins.contains(&("SAME-SUBNET".to_owned(), "error".to_owned())), "{twins:?}");
    ip(&["addr", "del", "10.77.0.9/24", "dev", "rail1"]);
}

#[test]
#[ignore = "needs the guest's kernel with bonds and VLANs: run by in_a_guest_with_soft_roce"]
fn guest_bonds_and_vlans() {
    bonds_and_vlans(|thing, why| panic!("the guest's kernel has {thing}: {why}"));
}

/// RoCE over a VLAN and over a bond: the RDMA device's own addresses name them.
#[test]
#[ignore = "needs RDMA devices: run by in_a_guest_with_soft_roce"]
fn guest_roce_over_a_vlan_and_a_bond() {
    ip(&["link", "add", "link", "rail0", "name", "rail0.7", "type", "vlan", "id", "7"]);
    ip(&["addr", "add", "10.70.7.1/24", "dev", "rail0.7"]);
    ip(&["link", "set", "rail0.7", "up"]);
    ip(&["link", "add", "bond0", "type", "bond", "mode", "active-backup"]);
    for member in ["bm0", "bm1"] {
        ip(&["link", "add", member, "type", "dummy"]);
        ip(&["link", "set", member, "master", "bond0"]);
        ip(&["link", "set", member, "up"]);
    }
    ip(&["addr", "add", "10.70.8.1/24", "dev", "bond0"]);
    ip(&["link", "set", "bond0", "up"]);
    let made = Command::new("rdma").args(["link", "add", "rxe8", "type", "rxe", "netdev", "bond0"]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    // The kernel fills GID tables a moment later.
    let table = |list: &serde_json::Value, netdev: &str, address: &str| {
        let devices = list["devices"].as_array().unwrap().iter();
        let ports = devices.flat_map(|d| d["ports"].as_array().unwrap());
        let mut gids = ports.flat_map(|p| p["gids"].as_array().unwrap());
        gids.any(|g| g["netdev"] == netdev && g["address"] == address && g["kind"] == "RoCE v2")
    };
    let wanted = [("rail0.7", "::ffff:10.70.7.1"), ("bond0", "::ffff:10.70.8.1")];
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let list = loop {
        let list = here_json(&["list", "--json"]);
        if wanted.iter().all(|(netdev, address)| table(&list, netdev, address)) {
            break list;
        }
        assert!(std::time::Instant::now() < end, "{list:#}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    let of = |name: &str| {
        let all = list["interfaces"].as_array().unwrap();
        all.iter().find(|i| i["interface"] == name).unwrap().clone()
    };
    assert_eq!((&of("rail0.7")["kind"], &of("rail0.7")["vlan"]), (&"vlan".into(), &7.into()));
    assert_eq!((&of("bond0")["bond_mode"], &of("bond0")["bond_active"]), (&"active-backup".into(), &"bm0".into()));
    println!("{}", String::from_utf8_lossy(&here_net(&["list"]).stdout));
    // Both may be rails, and none of what would be an error is found.
    let out = here_net(&["doctor", "--for-rdma", "rail0.7:bond0"]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stdout));
    // All of it goes with the guest, in its last test: the kernel never finishes deleting a bond below Soft-RoCE.
}

#[test]
fn tcp_over_two_interfaces_at_once() {
    if !here() {
        return;
    }
    let (a, b) = pair("rails", (1500, 1500));
    ip(&["-n", &a.0, "link", "add", "c1", "type", "veth", "peer", "name", "c1", "netns", &b.0]);
    for (host, address) in [(&a, "10.78.0.1/24"), (&b, "10.78.0.2/24")] {
        host.ip(&["addr", "add", address, "dev", "c1"]);
        host.ip(&["link", "set", "c1", "up"]);
    }
    let served = serve(&b);
    let words = ["bw", "10.77.0.2", "--rails", "all", "-P", "3", "-n", "64M", "--json"];
    let json = a.json(&words);
    assert_eq!(json["streams"], 4, "as many over each: {json:#}");
    let rails = json["rails"].as_array().unwrap();
    assert_eq!(rails.len(), 2, "{json:#}");
    for (rail, name) in rails.iter().zip(["c0", "c1"]) {
        assert_eq!((&rail["link"]["interface"], &rail["peer_link"]["interface"]), (&name.into(), &name.into()));
        assert!(rail["link"]["carried_by"].is_null(), "{rail:#}");
    }
    // How much each carried is the scheduler's choice.
    let sum: u64 = rails.iter().map(|rail| rail["read_bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, 64 << 20, "{json:#}");
    // One of them by name, and latency over each in turn.
    let json = a.json(&["lat", "10.77.0.2", "--rails", "c1:c0", "-n", "20", "--json"]);
    let names: Vec<&str> =
        json["rails"].as_array().unwrap().iter().map(|r| r["link"]["interface"].as_str().unwrap()).collect();
    assert_eq!(names, ["c1", "c0"], "{json:#}");
    let out = a.net(&["bw", "10.77.0.2", "--rails", "c0:c9"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(3) && said.contains("c9 can't be used") && said.contains("c0, c1"), "{said}");
    let out = a.net(&["bw", "10.77.0.2", "--rails", "c0", "--transport", "rdma"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(3) && said.contains("c0 can't be used"), "{said}");
    drop(served);
}

#[test]
fn a_larger_ethernet_mtu_is_set_by_name_only() {
    if !here() {
        return;
    }
    let (host, _other) = pair("named", (1500, 1500));
    let root = tempfile::tempdir().unwrap();
    let fix = |words: &[&str]| {
        let more = ["--for-rdma", "c0", "--root", str(root.path())];
        let out = host.net(&[&["fix"], words, more.as_slice()].concat());
        String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned()
    };
    let said = fix(&["--apply"]);
    assert!(said.contains("left out ip link set c0 mtu 9000") && said.contains("fix MTU-LOW --apply"), "{said}");
    assert_eq!(host.read("/sys/class/net/c0/mtu"), "1500");
    fix(&["MTU-LOW", "--apply"]);
    assert_eq!(host.read("/sys/class/net/c0/mtu"), "9000");
}

/// A TUN device of type InfiniBand: without a card the kernel has no more of IPoIB.
#[test]
fn an_interface_of_infinibands_type_gets_its_mtu_without_being_named() {
    if !here() {
        return;
    }
    let host = Host::new("tun");
    let script = "open(F, '+<', '/dev/net/tun') or die; my $r = pack('a16sx22', 'ib7', 0x1001); \
        ioctl(F, 0x400454ca, $r) or die; ioctl(F, 0x400454cb, 1) or die; ioctl(F, 0x400454cd, 32) or die;";
    let made = Command::new("ip").args(["netns", "exec", &host.0, "perl", "-e", script]).output();
    if !made.as_ref().is_ok_and(|out| out.status.success()) {
        println!("SKIP: no TUN device of InfiniBand's type can be made: {made:?}");
        return;
    }
    host.ip(&["addr", "add", "10.79.0.1/24", "dev", "ib7"]);
    host.ip(&["link", "set", "ib7", "up"]);
    let found = host.found("ib7", &[]);
    for id in ["IPOIB-MODE", "MTU-LOW"] {
        assert!(found.iter().any(|f| f == id), "{id}: {found:?}");
    }
    let root = tempfile::tempdir().unwrap();
    let out = host.net(&["fix", "--apply", "--root", str(root.path())]);
    assert!(out.status.success() && host.read("/sys/class/net/ib7/mtu") == "2044", "{out:?}");
    let out = host.net(&["fix", "--revert", "--root", str(root.path())]);
    assert!(out.status.success() && host.read("/sys/class/net/ib7/mtu") == "1500", "{out:?}");
}

/// Run by `make test-all` only.
mod test_all {
    #[test]
    fn in_a_guest_with_soft_roce() {
        spurline_testkit::run_in_guest(spurline_testkit::GuestNet::Two, &["guest_"]);
    }
}
