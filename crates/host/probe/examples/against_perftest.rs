//! `net bw` and `net lat` over verbs beside perftest's tools, in turn, on one RDMA device that talks to itself: for a
//! machine without hardware, in the virtual machine.
//!
//! ```text
//! cargo build --release -p spurline-probe --example against_perftest
//! scripts/vm --seconds 600 target/release/examples/against_perftest rxe0 10.77.0.1
//! ```
//!
//! The third argument is the number of rounds (5), the fourth a part of the tools' names. Prints the median of each and
//! the ratio; on a busy machine only ratios of one run have a meaning.

use spurline_probe::client::{ConnectConfig, ProbeSession};
use spurline_probe::drive::RunLimits;
use spurline_probe::judge;
use spurline_probe::measure;
use spurline_probe::message::{ProbeOp, ProbePlan, ProbeTransport};
use spurline_probe::server::{ProbeServer, ServeConfig};
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

/// A tool of perftest and the equivalent operation.
struct Case {
    tool: &'static str,
    op: ProbeOp,
    size: u64,
    depth: u32,
    count: u64,
    /// Required fraction of the tool's bandwidth, or multiple of its latency.
    wanted: f64,
}

impl Case {
    fn is_latency(&self) -> bool {
        self.tool.ends_with("_lat")
    }

    /// Mean bandwidth in MiB/s, or typical one-way latency in microseconds.
    fn perftest(&self, device: &str, ip: IpAddr) -> Option<f64> {
        let (size, count) = (self.size.to_string(), self.count.to_string());
        let words = ["-d", device, "-F", "-s", &size, "-n", &count];
        let mut server =
            Command::new(self.tool).args(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        let mut out = None;
        // It listens soon, and prints nothing when it does.
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(200));
            let one = Command::new(self.tool).args(words).arg(ip.to_string()).output().ok()?;
            if one.status.success() {
                out = Some(String::from_utf8_lossy(&one.stdout).into_owned());
                break;
            }
        }
        if out.is_none() {
            let _ = server.kill();
        }
        let _ = server.wait();
        let out = out?;
        // Both tables begin with bytes and count; then peak and mean, or shortest, longest and typical.
        let mut rows = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.find(|row| row.first() == Some(&size.as_str()))?;
        row.get(if self.is_latency() { 4 } else { 3 })?.parse().ok()
    }

    fn ours(&self, session: &mut ProbeSession) -> f64 {
        let plan = ProbePlan {
            transport: ProbeTransport::Rdma,
            size: self.size,
            depth: self.depth,
            streams: vec![self.op],
            ..ProbePlan::default()
        };
        let limits = RunLimits { time: LONG, ops: Some(self.count), patience: LONG, pause: Duration::ZERO };
        let done = measure::run_measurement(session, &plan, &limits, &AtomicBool::new(false), &mut |_| {})
            .unwrap_or_else(|e| panic!("{}: {}", self.tool, e.what));
        if let Some(error) = done.error {
            panic!("{}: {error}", self.tool);
        }
        let rates = judge::byte_rates(&done);
        match (self.is_latency(), self.op) {
            (false, _) => (rates.read + rates.write) / f64::from(1 << 20),
            // perftest halves a round trip, but not a read.
            (true, ProbeOp::Fetch) => done.measured.times[0].1.quantile_us(0.5),
            (true, _) => done.measured.times[0].1.quantile_us(0.5) / 2.0,
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (Some(device), Some(Ok(ip))) = (words.first(), words.get(1).map(|ip| ip.parse::<IpAddr>())) else {
        eprintln!("usage: against_perftest DEVICE ADDRESS [ROUNDS [TOOL]]");
        std::process::exit(2);
    };
    let rounds = words.get(2).and_then(|n| n.parse().ok()).unwrap_or(5);
    // The server runs in a process of its own, as perftest's does.
    if device == "--serve" {
        return serve();
    }
    let mut other = Command::new(std::env::current_exe().expect("its own path"))
        .args(["--serve", words[1].as_str()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a server");
    let mut port = String::new();
    BufReader::new(other.stdout.take().expect("its output")).read_line(&mut port).expect("a port");
    let peer = SocketAddr::new(ip, port.trim().parse().expect("a port")).to_string();
    let mut session = ProbeSession::connect(&ConnectConfig { peer, from: vec![ip], timeout: LONG }).expect("a session");
    measure_all(&mut session, device, ip, rounds, words.get(3).map(String::as_str));
    drop(session);
    let _ = other.kill();
    let _ = other.wait();
}

/// Prints its port, and serves until its input ends.
fn serve() {
    let config = ServeConfig {
        addresses: Vec::new(),
        port: 0,
        patience: LONG,
        max_connections: 100,
        facts: None,
        on_event: Box::new(drop),
    };
    let server = ProbeServer::start(config).expect("a server");
    println!("{}", server.addresses()[0].port());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn measure_all(session: &mut ProbeSession, device: &str, ip: IpAddr, rounds: usize, only: Option<&str>) {
    let (large, small) = (1 << 20, 64);
    let case = |tool, op, size, depth, count, wanted| Case { tool, op, size, depth, count, wanted };
    let cases = [
        case("ib_write_bw", ProbeOp::Write, large, 16, 150, 0.95),
        case("ib_read_bw", ProbeOp::Fetch, large, 16, 150, 0.95),
        case("ib_send_bw", ProbeOp::Send, large, 16, 150, 0.95),
        case("ib_write_bw", ProbeOp::Read, large, 16, 150, 0.9),
        case("ib_write_lat", ProbeOp::PingPong, small, 1, 3000, 1.1),
        case("ib_read_lat", ProbeOp::Fetch, small, 1, 3000, 1.1),
        case("ib_send_lat", ProbeOp::Echo, small, 1, 3000, 1.1),
    ];
    println!("{:<13} {:>10} {:>10} {:>10} {:>7} {:>7}", "perftest", "operation", "perftest", "net", "ratio", "wanted");
    for case in cases.into_iter().filter(|case| only.is_none_or(|only| case.tool.contains(only))) {
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            theirs.extend(case.perftest(device, ip));
            ours.push(case.ours(session));
        }
        if theirs.is_empty() {
            println!("{:<13} did not run; is perftest installed?", case.tool);
            continue;
        }
        let (theirs, ours) = (median(&mut theirs), median(&mut ours));
        let unit = if case.is_latency() { "µs" } else { "MiB/s" };
        let operation = format!("{:?}", case.op).to_lowercase();
        println!(
            "{:<13} {operation:>10} {theirs:>10.1} {ours:>10.1} {:>7.2} {:>7.2}  {unit}",
            case.tool,
            ours / theirs,
            case.wanted
        );
    }
}
