//! Exports of mounts with `--recover`: the process of the mount is killed while clients read and write. They wait for the next
//! process, as local programs do, and get no error.

use spurline_rig::nfs_rig::{BIN, CASES, NfsRig, SHORT_GRACE, output, sh, start};
use spurline_rig::steady_work::{SteadyWork, WorkEnd};
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const KILLS: usize = 10;

fn status(rig: &NfsRig) -> serde_json::Value {
    serde_json::from_str(&output(&["status", &rig.at(), "--json"])).unwrap()
}

/// How long requests waited for the processes of the mount, in milliseconds.
fn pauses(rig: &NfsRig) -> Vec<u64> {
    let log = fs::read_to_string(format!("{}/log", rig.dir())).unwrap();
    let waited = log.lines().filter_map(|line| line.split("programs waited ").nth(1)?.split(' ').next());
    waited.map(|pause| pause.parse().unwrap()).collect()
}

#[test]
#[ignore = "needs the virtual machine"]
fn takeover_under_clients_of_a_read_only_export() {
    let rig = NfsRig::new("recover");
    rig.fill();
    rig.mount(&["-o", "allow_other", "--recover"]);
    output(&["export", &rig.at(), "--rdma", "--clients", "10.77.0.0/16", "--apply"]);
    for (round, (name, options)) in CASES.as_flattened().iter().enumerate() {
        rig.client_mount(name, options);
        let server = status(&rig)["pid"].as_u64().unwrap();
        sh(&format!(
            "cd {dir}
            exec 5<{name}/folder/big
            head -c 1000 <&5 | cmp - <(head -c 1000 src/folder/big)
            echo 3 >/proc/sys/vm/drop_caches
            kill -KILL {server}
            timeout 60 cat <&5 | cmp - <(tail -c +1001 src/folder/big)
            exec 5<&-
            timeout 60 diff -r src {name}
            for n in 1 2 3 4 5 6 7 8 9; do umount {name} && break; sleep 1; done",
            dir = rig.dir(),
        ));
        assert_eq!(status(&rig)["keeper"]["restarts"], round + 1);
    }
    let status = status(&rig);
    assert!(status["export"]["handles_kept"] == true && status["export"]["active"] == true, "{status}");
    println!("a read-only export: pauses of {:?} ms", pauses(&rig));
    output(&["export", &rig.at(), "--remove"]);
    rig.unmount();
}

/// A client that appends records, changes names and files, and compares a file: its own folder has the name of the client.
struct Client<'a> {
    name: &'static str,
    appends: SteadyWork<'a>,
    replaces: SteadyWork<'a>,
    reads: SteadyWork<'a>,
}

impl<'a> Client<'a> {
    fn new(rig: &NfsRig, name: &'static str, options: &str, stop: &'a AtomicBool) -> Client<'a> {
        rig.client_mount(name, options);
        let at = Path::new(rig.dir()).join(name);
        let own = at.join(name);
        fs::create_dir(&own).unwrap();
        Client {
            name,
            appends: SteadyWork::new(&own, stop),
            replaces: SteadyWork::new(&own, stop),
            reads: SteadyWork::new(&at, stop),
        }
    }

    fn works(&self) -> [&SteadyWork<'a>; 3] {
        [&self.appends, &self.replaces, &self.reads]
    }
}

/// Waits until each program has come two rounds further.
fn wait_for_rounds(clients: &[Client<'_>], what: &str) {
    let deadline = Instant::now() + Duration::from_secs(300);
    for (client, work) in clients.iter().flat_map(|client| client.works().map(|work| (client.name, work))) {
        let wanted = work.rounds() + 2;
        while work.rounds() < wanted {
            assert!(Instant::now() < deadline, "{client} hangs: {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Kills the process of the exported mount, again and again, under clients of NFSv3 and NFSv4.
fn clients_survive(rig: &NfsRig) {
    let dir = rig.dir();
    output(&["export", &rig.at(), "--rdma", "--rw", "--no-root-squash", "--clients", "10.77.0.0/16", "--apply"]);
    sh(SHORT_GRACE);
    let stop = AtomicBool::new(false);
    let kinds = [("v3tcp", "vers=3,proto=tcp,nolock"), ("v4rdma", "vers=4.2,proto=rdma,port=20049")];
    let clients = kinds.map(|(name, options)| Client::new(rig, name, options, &stop));
    let source = Path::new(dir).join("src");
    let big = fs::read(source.join("folder/big")).unwrap();
    std::thread::scope(|scope| {
        let end = WorkEnd(&stop);
        let running = clients.each_ref().map(|client| {
            let records = scope.spawn(|| client.appends.append_records());
            let files = scope.spawn(|| client.replaces.replace_files());
            let reads = scope.spawn(|| client.reads.read_past_memory("folder/big", &big));
            (client.name, records, files, reads)
        });
        wait_for_rounds(&clients, "at the start");
        for kill in 0..KILLS {
            let status = status(rig);
            assert_eq!(status["keeper"]["restarts"], kill, "{status}");
            let server = status["pid"].to_string();
            // With every other kill the kernel forgets the names, so that the server finds files by their handles alone.
            let forget = if kill % 2 == 0 { "echo 3 >/proc/sys/vm/drop_caches" } else { "true" };
            sh(&format!("{forget}; kill -KILL {server}; {forget}"));
            wait_for_rounds(&clients, &format!("after kill {kill}"));
        }
        drop(end);
        for (name, records, files, reads) in running {
            let records = records.join().unwrap();
            let files = files.join().unwrap();
            SteadyWork::check_records(&source.join(name), records);
            SteadyWork::check_files(&source.join(name), files);
            println!(
                "{name}: {records} records, {files} files, {} reads of {} bytes",
                reads.join().unwrap(),
                big.len()
            );
        }
    });
    let status = status(rig);
    assert!(status["keeper"]["restarts"] == KILLS && status["export"]["handles_kept"] == true, "{status}");
    println!("{KILLS} kills: pauses of {:?} ms", pauses(rig));
    for (name, _) in kinds {
        sh(&format!("for n in 1 2 3 4 5 6 7 8 9; do umount {dir}/{name} && break; sleep 1; done"));
    }
    output(&["export", &rig.at(), "--remove"]);
    rig.unmount();
}

#[test]
#[ignore = "needs the virtual machine"]
fn takeover_under_clients_that_write_a_directory() {
    let rig = NfsRig::new("alone");
    rig.fill();
    rig.mount(&["-o", "allow_other", "--rw", "--recover"]);
    clients_survive(&rig);
}

#[test]
#[ignore = "needs the virtual machine"]
fn takeover_under_clients_that_write_through_nodes() {
    let rig = NfsRig::new("nodes");
    rig.fill();
    let dir = rig.dir();
    let nodes = [7400, 7401].map(|port| {
        let words = format!("--group-port {port} --cache-dir {dir}/node-{port} --cache-size 32M --buffer-size 64M");
        let log = format!("{dir}/node-{port}.log");
        let node = start(&format!("exec {BIN} node --writable --source {dir}/src {words} --metrics none"), &log);
        sh(&format!("for n in $(seq 60); do grep -q 'over tcp' {log} && exit; sleep 1; done; cat {log}; exit 1"));
        node
    });
    sh(&format!(
        "{BIN} mount {dir}/src {at} -d -o allow_other --rw --recover --registry static:127.0.0.1:7400,127.0.0.1:7401 \
         --buffer-size 64M --log {dir}/log --metrics none",
        at = rig.at()
    ));
    clients_survive(&rig);
    drop(nodes);
}
