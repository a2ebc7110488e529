//! Measures the TCP transport against the bare block reader: same socket options, connections and depth, client and
//! server in processes of their own, interleaved, medians.
//!
//! `cargo run --release -p spurline-net-tcp --example tcpbench -- --size 1M --conns 4 --depth 1 --secs 2 --rounds 5`
//!
//! A channel has one request under way, so depth D on C connections of the bare reader is compared with C x D
//! channels. `--server` and `--client` are the two processes; they are started by the measuring one.

use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer, bare};
use spurline_proto::{Capabilities, Hello, Read, Request, VolumeId, Welcome};
use spurline_transport::{Channel, ChannelPool, ConnState, PoolConfig, Responder, Service, greet};
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
    align: usize,
    rounds: usize,
    sndbuf: Option<usize>,
    rcvbuf: Option<usize>,
    mode: String,
    addr: Option<SocketAddr>,
    role: Role,
    host: String,
}

#[derive(PartialEq)]
enum Role {
    Measure,
    Server,
    Client,
}

fn parse() -> Args {
    let mut args = Args {
        size: 1 << 20,
        conns: 4,
        depth: 1,
        secs: 2.0,
        align: 0,
        rounds: 5,
        sndbuf: None,
        rcvbuf: None,
        mode: String::new(),
        addr: None,
        role: Role::Measure,
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
            "--align" => args.align = value().parse().expect("a number"),
            "--rounds" => args.rounds = value().parse().expect("a number"),
            "--sndbuf" => args.sndbuf = Some(size(value())),
            "--rcvbuf" => args.rcvbuf = Some(size(value())),
            "--host" => args.host = value(),
            "--server" => (args.role, args.mode) = (Role::Server, value()),
            "--client" => (args.role, args.mode) = (Role::Client, value()),
            "--addr" => args.addr = value().parse().ok(),
            other => panic!("unknown word {other}"),
        }
    }
    args
}

struct InMemory(Arc<Vec<u8>>);

impl Service for InMemory {
    fn hello(&self, _: &ConnState, _: &Hello<'_>) -> Result<Welcome> {
        let (volume, node) = (VolumeId(1), "bench".to_owned());
        Ok(Welcome { version: 0, volume, block_size: 4 << 20, node, capabilities: Capabilities(0) })
    }
    fn serve(&self, _: &ConnState, request: Request<'_>, responder: &mut dyn Responder) -> Result<()> {
        let Request::Read(Read { offset, len, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads only"));
        };
        let start = offset as usize % (self.0.len() - len as usize + 1);
        responder.data(&[], &[&self.0[start..start + len as usize]])
    }
}

/// CPU time of this process, user and system, in seconds; threads that ended included.
fn cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn serve(args: &Args, options: SocketOptions) {
    let data = Arc::new((0..DATA).map(|i| (i / 3) as u8).collect::<Vec<u8>>());
    let any: SocketAddr = format!("{}:0", args.host).parse().expect("an address");
    let (addr, _server) = if args.mode == "bare" {
        (bare::serve(any, data, options).expect("a server"), None)
    } else {
        let config = ServerConfig { socket: options, ..ServerConfig::default() };
        let server = TcpServer::bind(&[any], Arc::new(InMemory(data)), config, Arc::new(Stats::default()));
        let server = server.expect("a server");
        (server.local_addrs()[0], Some(server))
    };
    println!("{addr}");
    // Each line asks for the CPU time so far; the end of the input ends the process.
    for _ in std::io::stdin().lines() {
        println!("{}", cpu());
    }
}

fn client(args: &Args, options: SocketOptions) {
    let addr = args.addr.expect("--addr");
    let stop = AtomicBool::new(false);
    let bytes = AtomicU64::new(0);
    let stats = Arc::new(Stats::default());
    let connector = TcpConnector::new(&addr.to_string(), vec![], options, Arc::clone(&stats));
    let jobs = if args.mode == "bare" { args.conns } else { args.conns * args.depth };
    let config = PoolConfig { nconnect: jobs, ..PoolConfig::default() };
    let pool = ChannelPool::new(Arc::new(connector), "bench", "mem", config, stats);
    let deadline = || Instant::now() + Duration::from_secs(10);
    let direct = TcpConnector::new(&addr.to_string(), vec![], options, Arc::default());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for job in 0..jobs {
            let (stop, bytes, pool, direct) = (&stop, &bytes, &pool, &direct);
            scope.spawn(move || {
                // Where the destination lies within a page decides how fast the kernel's copy runs (below).
                let mut room = vec![0u8; args.size + 8192];
                let start = room.as_ptr().align_offset(4096) + args.align;
                let dst = &mut room[start..start + args.size];
                let mut offset = job as u64 * 7_654_321;
                let mut done = 0u64;
                let mut next = || {
                    offset = offset.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (offset >> 20) & !4095
                };
                let mut body = Vec::new();
                let read = |volume, offset| {
                    let (path, version, len) =
                        (b"some/dir/some-file.bin".as_slice(), "0123456789abcdef-1", args.size as u32);
                    Request::Read(Read { volume, path, version, size: 1 << 40, offset, len })
                };
                if args.mode == "bare" {
                    let mut reader = bare::Reader::connect(addr, &options).expect("a connection");
                    for _ in 0..args.depth {
                        reader.ask(next(), args.size as u64).expect("a request");
                    }
                    while !stop.load(Ordering::Relaxed) {
                        reader.take(dst).expect("an answer");
                        done += args.size as u64;
                        reader.ask(next(), args.size as u64).expect("a request");
                    }
                } else if args.mode == "channel" {
                    let mut channel = direct.open(deadline()).expect("a channel");
                    let welcome = greet(&mut channel, &Hello::new("bench", "mem"), deadline()).expect("a welcome");
                    while !stop.load(Ordering::Relaxed) {
                        let request = read(welcome.volume, next());
                        channel.call(&request, &mut body, dst, &mut |_| {}, deadline()).expect("an answer");
                        done += args.size as u64;
                    }
                } else {
                    while !stop.load(Ordering::Relaxed) {
                        let mut lease = pool.checkout(deadline()).expect("a channel");
                        let request = read(lease.welcome().volume, next());
                        lease.call(&request, &mut body, dst, &mut |_| {}, deadline()).expect("an answer");
                        done += args.size as u64;
                    }
                }
                bytes.fetch_add(done, Ordering::Relaxed);
            });
        }
        std::thread::sleep(Duration::from_secs_f64(args.secs));
        stop.store(true, Ordering::Relaxed);
    });
    let secs = start.elapsed().as_secs_f64();
    println!("{} {secs} {}", bytes.into_inner(), cpu());
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
    let options = SocketOptions { send_buffer: args.sndbuf, recv_buffer: args.rcvbuf, ..SocketOptions::default() };
    match args.role {
        Role::Server => return serve(&args, options),
        Role::Client => return client(&args, options),
        Role::Measure => {}
    }
    let mut extra: Vec<String> = Vec::new();
    let mut words = std::env::args().skip(1);
    while let (Some(word), Some(value)) = (words.next(), words.next()) {
        extra.extend([word, value]);
    }
    let modes = ["bare", "channel", "pool"];
    // The pool talks to the same kind of server as the channel.
    let mut servers: Vec<_> = modes.iter().map(|mode| ServerProcess::start(mode, &extra)).collect();
    // Per mode: GB/s, answers per second, client and server CPU-seconds per GB.
    let mut seen: Vec<Vec<[f64; 4]>> = vec![Vec::new(); modes.len()];
    for _ in 0..args.rounds {
        for (i, mode) in modes.iter().enumerate() {
            let before = servers[i].cpu();
            let exe = std::env::current_exe().expect("this program");
            let out = Command::new(exe)
                .args(["--client", mode, "--addr", &servers[i].addr])
                .args(&extra)
                .output()
                .expect("a client process");
            let text = String::from_utf8_lossy(&out.stdout);
            let numbers: Vec<f64> = text.split_whitespace().filter_map(|n| n.parse().ok()).collect();
            let [bytes, secs, cpu] = numbers[..] else {
                panic!("the client said: {text} {}", String::from_utf8_lossy(&out.stderr))
            };
            let gb = bytes / 1e9;
            let server = servers[i].cpu() - before;
            seen[i].push([gb / secs, bytes / args.size as f64 / secs, cpu / gb, server / gb]);
        }
    }
    let median = |rows: &[[f64; 4]], column: usize| {
        let mut all: Vec<f64> = rows.iter().map(|row| row[column]).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let ceiling = median(&seen[0], 0);
    println!("size {} conns {} depth {}", Size(args.size as u64), args.conns, args.depth);
    println!("mode       GB/s  answers/s  of bare  CPU-s/GB client  server");
    for (i, mode) in modes.iter().enumerate() {
        let m = |column| median(&seen[i], column);
        println!("{mode:8} {:6.2} {:10.0} {:8.3} {:16.3} {:7.3}", m(0), m(1), m(0) / ceiling, m(2), m(3));
    }
}
