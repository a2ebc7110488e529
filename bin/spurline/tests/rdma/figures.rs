//! Figures, not tests: what reads through a mount cost over TCP, one rail and two, and what a fault and its end cost
//! those who read. By hand, in the virtual machine: BENCHMARKS.md says how.

use crate::rig::{LEN, Mount, Rig, run};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: usize = 5;
const READERS: usize = 4;
const READ: usize = 1 << 20;
const O_DIRECT: i32 = 0o40_000;
const SETTLE: Duration = Duration::from_secs(2);

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

#[test]
#[ignore = "a measurement, by hand"]
fn figures_of_failover_and_failback() {
    for (name, rails) in [("to the other rail", &["--rdma-network", "rail0:rail1"][..]), ("to TCP", &[])] {
        let rig = Rig::new();
        rig.fill();
        let rails = if rails.is_empty() { &["--rdma-network", "rail0"][..] } else { rails };
        let paths = rails[1].split(':').count() as u64;
        let _node = rig.node(7060, &["--rdma-network", "rail0:rail1"]);
        let mount = rig.mount("mount", &[7060], rails);
        mount.wait("the paths", |m| m.count("rdma", "paths_up") == paths);
        let (mut usual, mut over, mut back, mut ratios) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let window = || {
                let from = Instant::now();
                std::thread::sleep(Duration::from_secs(3));
                (from, Instant::now())
            };
            let (reads, (before, fault, return_of_link, carries, after)) = read_while(&mount.at.join("file"), || {
                let before = window();
                let fault = Instant::now();
                run("ip", &["link", "set", "rail0", "down"]);
                mount.wait("failover", |m| m.count("rdma", "paths_up") == paths - 1);
                std::thread::sleep(Duration::from_secs(1));
                run("ip", &["link", "set", "rail0", "up"]);
                let return_of_link = Instant::now();
                mount.wait("failback", |m| m.count("rdma", "paths_up") == paths);
                let carries = Instant::now();
                (before, fault, return_of_link, carries, window())
            });
            let took = |(begun, end): &(Instant, Instant)| (*end - *begun).as_secs_f64() * 1e3;
            usual.push(median(reads.iter().filter(|(_, end)| *end < fault).map(took).collect()));
            // The slowest of the reads that were under way.
            let under_way = reads.iter().filter(|(begun, end)| *begun <= fault && *end >= fault);
            over.push(under_way.map(|(_, end)| (*end - fault).as_secs_f64() * 1e3).fold(0.0, f64::max));
            back.push((carries - return_of_link).as_secs_f64());
            ratios.push(speed(&reads, after.0, after.1) / speed(&reads, before.0, before.1));
        }
        println!(
            "| link down, {name} | the slowest read under way ended {:.0} ms after it (a read takes {:.0} ms) | \
             data over it {:.1} s after it was up again, {:.0} s of them settling | speed after failback {:.2} of before |",
            median(over),
            median(usual),
            median(back),
            SETTLE.as_secs_f64(),
            median(ratios)
        );
    }
}
