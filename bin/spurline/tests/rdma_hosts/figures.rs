//! Figures, not tests: the cost of reads through a mount over TCP, one rail and two, and the cost of a fault and of
//! its end. Run by hand in the virtual machine, as in BENCHMARKS.md.

use crate::loss::{DIR, lose, pass_all, prepare, shared};
use spurline_rig::rdma_rig::{LEN, Mount, Rig, ask, count, run};
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: usize = 3;
const READERS: usize = 4;
const READ: usize = 1 << 20;
const O_DIRECT: i32 = 0o40_000;

/// When each read began and ended.
type Reads = Vec<(Instant, Instant)>;

/// Reads past the page cache by several threads while `meanwhile` runs; each its own part of the file, again and again.
fn read_while<R>(file: &Path, meanwhile: impl FnOnce() -> R) -> (Reads, R) {
    let (stop, all) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let result = std::thread::scope(|scope| {
        for reader in 0..READERS {
            let (stop, all) = (&stop, &all);
            scope.spawn(move || {
                let file: File = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(file).unwrap();
                let (mut buf, mut reads) = (vec![0u8; READ], Vec::new());
                let mut at = reader * (LEN / READERS);
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    file.read_exact_at(&mut buf, at as u64).expect("a reader sees no error");
                    reads.push((begun, Instant::now()));
                    at = (at + READ) % LEN;
                }
                all.lock().unwrap().extend(reads);
            });
        }
        let result = meanwhile();
        stop.store(true, Ordering::Relaxed);
        result
    });
    (all.into_inner().unwrap(), result)
}

/// MiB/s of the reads that ended between the two.
fn speed(reads: &Reads, from: Instant, to: Instant) -> f64 {
    let bytes = reads.iter().filter(|(_, end)| (from..to).contains(end)).count() * READ;
    bytes as f64 / f64::from(1 << 20) / (to - from).as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn slice(mount: &Mount<'_>) -> f64 {
    let (reads, (from, to)) = read_while(&mount.at.join("file"), || {
        let from = Instant::now();
        std::thread::sleep(Duration::from_secs(2));
        (from, Instant::now())
    });
    speed(&reads, from, to)
}

#[test]
#[ignore = "a measurement, by hand"]
fn figures_of_transports_through_the_mount() {
    let rig = Rig::new();
    rig.fill();
    let _node = rig.node(7050, &["--rdma-network", "rail0:rail1"]);
    let tcp = rig.mount("tcp", &[7050], &[]);
    let one = rig.mount("one", &[7050], &["--rdma-network", "rail0"]);
    let two = rig.mount("two", &[7050], &["--rdma-network", "rail0:rail1"]);
    // The node's own rails are two, and each of a mount's reaches both where the subnets do.
    two.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    one.wait("its path", |m| m.count("rdma", "paths_up") == 1);
    let mut rounds: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for (column, mount) in rounds.iter_mut().zip([&tcp, &one, &two]) {
            column.push(slice(mount));
        }
    }
    let ratio = |a: &[f64], b: &[f64]| median(a.iter().zip(b).map(|(a, b)| a / b).collect());
    let [over_tcp, over_one, over_two] = &rounds;
    println!("| {READERS} readers of 1 MiB through the mount | MiB/s | |");
    println!("| TCP | {:.1} | |", median(over_tcp.clone()));
    println!("| one rail | {:.1} | {:.2} of TCP |", median(over_one.clone()), ratio(over_one, over_tcp));
    println!("| two rails | {:.1} | {:.2} of one |", median(over_two.clone()), ratio(over_two, over_one));
}

/// What one fault of a path and its end cost, median of all rounds.
#[derive(Default)]
struct Fault {
    usual: Vec<f64>,
    over: Vec<f64>,
    back: Vec<f64>,
    ratios: Vec<f64>,
}

impl Fault {
    /// Has `strike` end paths until `left` carry data, and `mend` bring all `paths` back, while readers read.
    fn round(&mut self, mount: &Mount<'_>, (left, paths): (u64, u64), strike: &dyn Fn(), mend: &dyn Fn()) {
        let window = || {
            let from = Instant::now();
            std::thread::sleep(Duration::from_secs(3));
            (from, Instant::now())
        };
        let (reads, (before, fault, mended, carries, after)) = read_while(&mount.at.join("file"), || {
            let before = window();
            let fault = Instant::now();
            strike();
            mount.wait("failover", |m| m.count("rdma", "paths_up") == left);
            std::thread::sleep(Duration::from_secs(1));
            mend();
            let mended = Instant::now();
            mount.wait("failback", |m| m.count("rdma", "paths_up") == paths);
            let carries = Instant::now();
            (before, fault, mended, carries, window())
        });
        let took = |(begun, end): &(Instant, Instant)| (*end - *begun).as_secs_f64() * 1e3;
        self.usual.push(median(reads.iter().filter(|(_, end)| *end < fault).map(took).collect()));
        // The slowest read of all that the fault can have met: striking takes a while itself.
        let met = reads.iter().filter(|(begun, end)| *begun < mended && *end > fault);
        self.over.push(met.map(|(begun, end)| (*end - *begun).as_secs_f64()).fold(0.0, f64::max));
        self.back.push((carries - mended).as_secs_f64());
        self.ratios.push(speed(&reads, after.0, after.1) / speed(&reads, before.0, before.1));
    }

    fn print(self, what: &str) {
        println!(
            "| {what}: slowest read from the fault to its end, of {:.2?} | a read's usual time | back after | speed then |",
            self.over
        );
        println!(
            "| {what} | {:.2} s | {:.0} ms | {:.1} s | {:.2} |",
            median(self.over),
            median(self.usual),
            median(self.back),
            median(self.ratios)
        );
    }
}

const DEFAULT_SILENCE: [&str; 2] = ["--rdma-silence", "2s"];

#[test]
#[ignore = "a measurement, by hand"]
fn figures_of_failover_and_failback() {
    for (name, rails) in [("link down, to the other rail", "rail0:rail1"), ("link down, to TCP", "rail0")] {
        let rig = Rig::new();
        rig.fill();
        let paths = rails.split(':').count() as u64;
        let words = [&["--rdma-network", rails][..], &DEFAULT_SILENCE].concat();
        let _node = rig.node(7060, &["--rdma-network", "rail0:rail1"]);
        let mount = rig.mount("mount", &[7060], &words);
        mount.wait("the paths", |m| m.count("rdma", "paths_up") == paths);
        let link = |to: &str| run("ip", &["link", "set", "rail0", to]);
        let mut fault = Fault::default();
        for _ in 0..ROUNDS {
            fault.round(&mount, (paths - 1, paths), &|| link("down"), &|| link("up"));
        }
        fault.print(name);
    }
    let rig = Rig::new();
    rig.fill();
    let words = [&["--rdma-network", "rail0:rail1"][..], &DEFAULT_SILENCE].concat();
    let ports = [7061, 7062];
    let nodes = ports.map(|port| RefCell::new(Some(rig.node(port, &words))));
    let mount = rig.mount("mount", &ports, &words);
    mount.wait("the paths", |m| m.count("rdma", "paths_up") == 4);
    mount.pass();
    // The rail that carries the bytes; no wait for the other.
    let carried = |port: u16| -> u64 {
        let (stats, peer) = (ask(&mount.log, "stats"), format!("127.0.0.1:{port}"));
        let paths = stats["paths"].as_array().unwrap().iter().filter(|p| p["peer"] == *peer);
        paths.filter_map(|p| p["recv_bytes"].as_u64()).sum()
    };
    let dies = (0..2).max_by_key(|at| carried(ports[*at])).unwrap();
    let mut fault = Fault::default();
    for _ in 0..ROUNDS {
        let again = || *nodes[dies].borrow_mut() = Some(rig.node(ports[dies], &words));
        fault.round(&mount, (2, 4), &|| drop(nodes[dies].take()), &again);
    }
    fault.print("a node killed, to another");
}

/// In two guests: packets of RDMA lost without a word, under readers.
#[test]
#[ignore = "a measurement, by hand"]
fn figures_of_silence() {
    let rig = Rig::at(Path::new(DIR));
    if std::env::var("SPURLINE_TEST_VM_SIDE").as_deref() == Ok("b") {
        rig.fill();
        let _node = rig.node(7000, &["--rdma-network", "rail0:rail1", "--group-network", "rail0"]);
        std::fs::write(shared("serving"), "").unwrap();
        while !shared("done").exists() {
            std::thread::sleep(Duration::from_millis(100));
        }
        return;
    }
    prepare("rail0");
    spurline_rig::rdma_rig::wait("the node on the other machine", &[], || shared("serving").exists());
    for (name, rails) in [("packets lost, to the other rail", "rail0:rail1"), ("packets lost, to TCP", "rail0")] {
        let paths = rails.split(':').count() as u64;
        let words = [&["--rdma-network", rails][..], &DEFAULT_SILENCE].concat();
        let mount = rig.mount_of("mount", "static:10.77.0.2:7000", &words);
        mount.wait("the paths", |m| m.count("rdma", "paths_up") == paths);
        let mut fault = Fault::default();
        for _ in 0..ROUNDS {
            fault.round(&mount, (paths - 1, paths), &|| lose("rail0"), &|| pass_all("rail0"));
        }
        fault.print(name);
    }
    std::fs::write(shared("done"), "").unwrap();
}

/// Seconds that the machine's processors have worked.
fn busy() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap();
    let all: Vec<f64> =
        stat.lines().next().unwrap().split_whitespace().skip(1).map(|n| n.parse::<f64>().unwrap() / 100.0).collect();
    // All but idle and waiting for disks.
    all[..3].iter().chain(&all[5..8]).sum()
}

/// MiB/s, and processor time in milliseconds for each MiB.
struct Rate(f64, f64);

/// Sequential writes of 1 MiB by so many writers, each to a file of its own, for some seconds and to the end of a sync.
fn write_slice(dir: &Path, writers: usize) -> Rate {
    let block = vec![0x5a; READ];
    let (begun, worked) = (Instant::now(), busy());
    let bytes: usize = std::thread::scope(|scope| {
        let write = |writer: usize| {
            let path = dir.join(format!("slice-{writer}"));
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
            let mut done = 0;
            while begun.elapsed() < Duration::from_secs(4) {
                file.write_all_at(&block, (done % LEN) as u64).unwrap();
                done += READ;
            }
            file.sync_all().unwrap();
            done
        };
        let all: Vec<_> = (0..writers).map(|writer| scope.spawn(move || write(writer))).collect();
        all.into_iter().map(|one| one.join().unwrap()).sum()
    });
    let mib = bytes as f64 / f64::from(1 << 20);
    Rate(mib / begun.elapsed().as_secs_f64(), (busy() - worked) * 1e3 / mib)
}

/// Reads of 1 MiB by perftest. A number of them, and no time (`-D`): with a time it stalls on Soft-RoCE.
fn ib_read_bw() -> Rate {
    const READS: &str = "200";
    const WORDS: [&str; 9] = ["-d", "rxe0", "-s", "1048576", "-n", READS, "-F", "-p", "18600"];
    let mut server =
        Command::new("ib_read_bw").args(WORDS).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let worked = busy();
    let out = Command::new("timeout").args(["60", "ib_read_bw"]).args(WORDS).arg("10.77.0.1").output().unwrap();
    let worked = busy() - worked;
    // It waits for ever for a client that has failed.
    let _ = server.kill();
    let _ = server.wait();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text.lines().rfind(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()));
    let numbers: Vec<f64> = line.unwrap_or_default().split_whitespace().filter_map(|word| word.parse().ok()).collect();
    // #bytes #iterations BW-peak BW-average
    let speed = *numbers.get(3).unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&out.stderr)));
    Rate(speed, worked * 1e3 / READS.parse::<f64>().unwrap())
}

#[test]
#[ignore = "a measurement, by hand"]
fn figures_of_writes() {
    let rig = Rig::new();
    let node = rig.node(7070, &["--writable", "--rdma-network", "rail0:rail1"]);
    let tcp = rig.mount("tcp", &[7070], &["--rw"]);
    let one = rig.mount("one", &[7070], &["--rw", "--rdma-network", "rail0"]);
    one.wait("its path", |m| m.count("rdma", "paths_up") == 1);
    let log = rig.log("node-7070");
    let (mut rows, mut bare, mut reading) = ([const { Vec::new() }; 4], Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        bare.push(ib_read_bw());
        let before = (count(&log, "rdma", "r_us"), count(&log, "rdma", "r_ops"), node.cpu(), one.cpu());
        rows[0].push(write_slice(&one.at, 1));
        let after = (count(&log, "rdma", "r_us"), count(&log, "rdma", "r_ops"), node.cpu(), one.cpu());
        let ops = (after.1 - before.1).max(1) as f64;
        reading.push((
            (after.0 - before.0) as f64 / ops,
            (after.2 - before.2) * 1e3 / ops,
            (after.3 - before.3) * 1e3 / ops,
        ));
        rows[1].push(write_slice(&one.at, 4));
        rows[2].push(write_slice(&tcp.at, 1));
        rows[3].push(write_slice(&rig.dir.join("src"), 1));
    }
    let over = |rates: &[Rate], of: fn(&Rate) -> f64| median(rates.iter().map(of).collect());
    println!("| 1 MiB writes, with a sync at the end | MiB/s | of ib_read_bw | CPU-s/GiB of the machine |");
    println!("| ib_read_bw | {:.1} | | {:.1} |", over(&bare, |r| r.0), over(&bare, |r| r.1 * 1.024));
    for (name, rates) in
        ["RDMA, 1 writer", "RDMA, 4 writers", "TCP, 1 writer", "the bare source (tmpfs)"].iter().zip(&rows)
    {
        let ratio = median(rates.iter().zip(&bare).map(|(ours, bare)| ours.0 / bare.0).collect());
        println!("| {name} | {:.1} | {ratio:.2} | {:.1} |", over(rates, |r| r.0), over(rates, |r| r.1 * 1.024));
    }
    for (us, node, mount) in reading {
        println!(
            "  of each request over RDMA: RDMA READ {us:.0} us; processor of the node {node:.2} ms, of the mount {mount:.2} ms"
        );
    }
}
