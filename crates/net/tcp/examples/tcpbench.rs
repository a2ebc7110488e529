//! Measures the TCP transport against the bare block reader: same socket options, connections and depth, servers in
//! processes of their own, short slices taken in turn, medians.
//!
//! `cargo run --release -p spurline-net-tcp --example tcpbench -- --size 1M --conns 4 --depth 1 --secs 0.2 --rounds 15`
//!
//! A channel has one request in flight, so depth D on C connections of the bare reader is compared with C x D
//! channels, one per thread. `tls` is `channel` with a token and TLS, which no part of `spurline bench` measures. `of
//! bare` is the median of the rounds' own ratios, so a machine with other work still gives a fair one. Seconds are
//! those of one slice.

use spurline_net_tcp::{ServerConfig, SocketOptions, TcpChannel, TcpConnector, TcpServer, bare};
use spurline_proto::{HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{Channel, ConnState, Responder, Service, perform_handshake};
use spurline_trust::{GroupTokens, Trust};
use spurline_types::{Error, ErrorKind, Result, Size, Stats};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const DATA: usize = 64 << 20;

struct Args {
    size: usize,
    conns: usize,
    depth: usize,
    secs: f64,
    rounds: usize,
    mode: String,
    server: bool,
    host: String,
}

fn parse() -> Args {
    let mut args = Args {
        size: 1 << 20,
        conns: 4,
        depth: 1,
        secs: 0.2,
        rounds: 15,
        mode: String::new(),
        server: false,
        host: "127.0.0.1".into(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        let size = |text: String| text.parse::<Size>().expect("a size").bytes() as usize;
        match word.as_str() {
            "--size" => args.size = size(value()),
            "--conns" => args.conns = value().parse().expect("a number"),
            "--depth" => args.depth = value().parse().expect("a number"),
            "--secs" => args.secs = value().parse().expect("a number"),
            "--rounds" => args.rounds = value().parse().expect("a number"),
            "--host" => args.host = value(),
            "--server" => (args.server, args.mode) = (true, value()),
            other => panic!("unknown word {other}"),
        }
    }
    args
}

/// The proofs of both sides: none, or a token over TLS.
fn trust(tls: bool) -> Arc<Trust> {
    if !tls {
        return Trust::without_checks();
    }
    let token = GroupTokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").expect("a token");
    Trust::with_tokens("bench", token).with_tls(None).expect("TLS")
}

struct InMemory(Arc<Vec<u8>>);

impl Service for InMemory {
    fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        let (volume, node) = (VolumeId(1), "bench".to_owned());
        Ok(WelcomeAnswer { version: 0, volume, block_size: 4 << 20, node, ..WelcomeAnswer::default() })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        let NodeRequest::Read(ReadRequest { offset, len, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads only"));
        };
        let start = offset as usize % (self.0.len() - len as usize + 1);
        responder.send_data(&[], &[&self.0[start..start + len as usize]])
    }
}

/// CPU time of this process, user and system, in seconds; threads that ended included.
fn cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn serve(args: &Args) {
    let options = SocketOptions::default();
    let data = Arc::new((0..DATA).map(|i| (i / 3) as u8).collect::<Vec<u8>>());
    let any: SocketAddr = format!("{}:0", args.host).parse().expect("an address");
    let (addr, _server) = if args.mode == "bare" {
        (bare::serve_data(any, data, options).expect("a server"), None)
    } else {
        let trust = trust(args.mode == "tls");
        let config = ServerConfig { socket: options, trust, ..ServerConfig::default() };
        let server = TcpServer::bind(&[any], Arc::new(InMemory(data)), config, Arc::new(Stats::default()));
        let server = server.expect("a server");
        (server.local_addrs()[0], Some(server))
    };
    println!("{addr}");
    // Each line requests the CPU time so far; the end of the input ends the process.
    for _ in std::io::stdin().lines() {
        println!("{}", cpu());
    }
}

/// A client: one per thread, kept over all slices.
enum Asker {
    Bare(bare::BareReader),
    Channel(TcpChannel, VolumeId),
}

/// A thread's read buffer and its last offset.
struct Job {
    asker: Asker,
    room: Vec<u8>,
    offset: u64,
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

impl Job {
    fn next(&mut self) -> u64 {
        self.offset = self.offset.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.offset >> 20) & !4095
    }

    /// Reads until `stop` is set; returns the number of bytes.
    fn run(&mut self, args: &Args, stop: &AtomicBool) -> u64 {
        let size = args.size;
        let start = self.room.as_ptr().align_offset(4096);
        let mut room = std::mem::take(&mut self.room);
        let dst = &mut room[start..start + size];
        let mut body = Vec::new();
        let mut done = 0;
        let request = |volume, offset| {
            let (path, version, len) = (b"some/dir/some-file.bin".as_slice(), "0123456789abcdef-1", size as u32);
            NodeRequest::Read(ReadRequest { volume, path, version, size: 1 << 40, offset, len, flags: ReadFlags::NONE })
        };
        let ahead = if matches!(self.asker, Asker::Bare(_)) { args.depth } else { 0 };
        for _ in 0..ahead {
            let offset = self.next();
            if let Asker::Bare(reader) = &mut self.asker {
                reader.send_request(offset, size as u64).expect("a request");
            }
        }
        let mut owed = ahead;
        while owed > 0 || !stop.load(Ordering::Relaxed) {
            let offset = self.next();
            match &mut self.asker {
                Asker::Bare(reader) => {
                    reader.receive_answer(dst).expect("an answer");
                    if stop.load(Ordering::Relaxed) {
                        owed -= 1;
                    } else {
                        reader.send_request(offset, size as u64).expect("a request");
                    }
                }
                Asker::Channel(channel, volume) => {
                    let request = request(*volume, offset);
                    channel.call(&request, &mut body, dst, &mut |_| {}, deadline()).expect("an answer");
                }
            }
            done += size as u64;
        }
        self.room = room;
        done
    }
}

struct ServerProcess {
    child: std::process::Child,
    out: BufReader<std::process::ChildStdout>,
    addr: String,
}

impl ServerProcess {
    fn start(mode: &str, extra: &[String]) -> Self {
        let exe = std::env::current_exe().expect("this program");
        let mut child = Command::new(exe)
            .args(["--server", mode])
            .args(extra)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a server process");
        let mut out = BufReader::new(child.stdout.take().expect("its output"));
        let mut addr = String::new();
        out.read_line(&mut addr).expect("its address");
        ServerProcess { child, out, addr: addr.trim().to_owned() }
    }
    fn cpu(&mut self) -> f64 {
        let stdin = self.child.stdin.as_mut().expect("its input");
        stdin.write_all(b"\n").expect("asking it");
        let mut line = String::new();
        self.out.read_line(&mut line).expect("its CPU time");
        line.trim().parse().expect("a number")
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn main() {
    let args = parse();
    if args.server {
        return serve(&args);
    }
    let options = SocketOptions::default();
    let extra: Vec<String> = std::env::args().skip(1).collect();
    let mut servers = ["bare", "frames", "tls"].map(|mode| ServerProcess::start(mode, &extra));
    let bare_addr: SocketAddr = servers[0].addr.parse().expect("an address");
    let connector = TcpConnector::new(&servers[1].addr, vec![], options, Arc::default());
    let many = args.conns * args.depth;
    let job = |n: usize, asker| Job { asker, room: vec![0; args.size + 8192], offset: n as u64 * 7_654_321 };
    let sealed = TcpConnector::new(&servers[2].addr, vec![], options, Arc::default()).with_trust(trust(true));
    let channel = |connector: &TcpConnector| {
        let mut channel = connector.open_channel(deadline()).expect("a channel");
        let welcome =
            perform_handshake(&mut channel, &HelloRequest::new("bench", "mem"), deadline()).expect("a welcome");
        Asker::Channel(channel, welcome.volume)
    };
    let bare = || Asker::Bare(bare::BareReader::connect(bare_addr, &options).expect("a connection"));
    let modes = ["bare", "channel", "tls"];
    let mut jobs: [Vec<Job>; 3] = [
        (0..args.conns).map(|n| job(n, bare())).collect(),
        (0..many).map(|n| job(n, channel(&connector))).collect(),
        (0..many).map(|n| job(n, channel(&sealed))).collect(),
    ];
    // Per mode and round: GB/s, client and server CPU-seconds per GB.
    let mut seen: [Vec<[f64; 3]>; 3] = Default::default();
    for round in 0..=args.rounds {
        for turn in 0..modes.len() {
            let i = (turn + round) % modes.len();
            let server = &mut servers[i];
            let before = (server.cpu(), cpu(), Instant::now());
            let (stop, bytes) = (AtomicBool::new(false), AtomicU64::new(0));
            std::thread::scope(|scope| {
                for job in &mut jobs[i] {
                    let (stop, bytes, args) = (&stop, &bytes, &args);
                    scope.spawn(move || bytes.fetch_add(job.run(args, stop), Ordering::Relaxed));
                }
                std::thread::sleep(Duration::from_secs_f64(args.secs));
                stop.store(true, Ordering::Relaxed);
            });
            let gb = bytes.into_inner() as f64 / 1e9;
            let row = [gb / before.2.elapsed().as_secs_f64(), (cpu() - before.1) / gb, (server.cpu() - before.0) / gb];
            // The first round warms up.
            if round > 0 {
                seen[i].push(row);
            }
        }
    }
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    println!("size {} conns {} depth {}", Size(args.size as u64), args.conns, args.depth);
    println!("mode       GB/s  answers/s  of bare  CPU-s/GB client (of bare)  server (of bare)");
    for (i, mode) in modes.iter().enumerate() {
        let m = |column: usize| median(seen[i].iter().map(|row| row[column]).collect());
        let r = |column: usize| median(seen[i].iter().zip(&seen[0]).map(|(a, b)| a[column] / b[column]).collect());
        let answers = m(0) * 1e9 / args.size as f64;
        println!(
            "{mode:8} {:6.2} {answers:10.0} {:8.3} {:16.3} ({:5.3}) {:9.3} ({:5.3})",
            m(0),
            r(0),
            m(1),
            r(1),
            m(2),
            r(2)
        );
    }
}
