//! Measures the RDMA transport against perftest and against the TCP transport: servers in processes of their own, short
//! slices taken in turn, medians of each round's own ratios.
//!
//! On two hosts with NICs: `rdmabench --server IP[,IP]` on one, which prints its addresses, TCP last, and
//! `rdmabench --ip IP[,IP] --to` with those addresses on the other; perftest is then run by hand. On one machine, or in the
//! virtual machine of `scripts/vm`: `rdmabench --ip 10.77.0.1` starts all there is to start, perftest included.
//!
//! A channel has one request under way, so depth D is D channels on D threads.

use spurline_mem::{Buf, Pool};
use spurline_net_rdma::{Patience, Rail, RdmaConnector, RdmaServer, RdmaServerConfig};
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{Hello, Read, Request, VolumeId, Welcome};
use spurline_transport::{Channel, ConnState, Connector, Responder, Service, greet};
use spurline_types::{Error, ErrorKind, Result, Size, Stats};
use spurline_verbs::{Access, Verbs};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const DATA: usize = 16 << 20;

struct Args {
    ips: Vec<IpAddr>,
    to: Vec<SocketAddr>,
    server: bool,
    secs: f64,
    rounds: usize,
    only: String,
}

fn parse() -> Args {
    let mut args = Args { ips: Vec::new(), to: Vec::new(), server: false, secs: 1.0, rounds: 5, only: String::new() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        match word.as_str() {
            "--server" => (args.server, args.ips) = (true, list(&value())),
            "--ip" => args.ips = list(&value()),
            "--to" => args.to = list(&value()),
            "--secs" => args.secs = value().parse().expect("a number"),
            "--rounds" => args.rounds = value().parse().expect("a number"),
            "--only" => args.only = value(),
            other => panic!("{other}: see the head of this program's source"),
        }
    }
    assert!(!args.ips.is_empty(), "--ip: an address of an RDMA device");
    args
}

fn list<T: std::str::FromStr>(text: &str) -> Vec<T>
where
    T::Err: std::fmt::Debug,
{
    text.split(',').map(|part| part.parse().expect("an address")).collect()
}

struct Blocks(Buf);

impl Service for Blocks {
    fn hello(&self, _: &ConnState, _: &Hello<'_>) -> Result<Welcome> {
        Ok(Welcome { block_size: 4 << 20, node: "bench".into(), ..Welcome::default() })
    }
    fn serve(&self, _: &ConnState, request: Request<'_>, to: &mut dyn Responder) -> Result<()> {
        match request {
            Request::Read(read) => {
                let at = read.offset as usize % DATA;
                to.data(&[], &[&self.0[at..(at + read.len as usize).min(DATA)]])
            }
            _ => Err(Error::new(ErrorKind::Unsupported, "not here")),
        }
    }
}

/// Serves over RDMA and TCP until its standard input ends.
fn serve(ips: &[IpAddr]) -> Result<()> {
    let verbs = Verbs::load()?;
    let pool = Pool::new(64 << 20, DATA)?;
    let mut data = pool.alloc(DATA, Instant::now())?;
    data.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
    let rails: Vec<_> =
        ips.iter().map(|ip| Rail::open(&verbs, "bench", *ip, &pool, Access::Local)).collect::<Result<_>>()?;
    let service = Arc::new(Blocks(data));
    let stats = Arc::new(Stats::default());
    let rdma = RdmaServer::bind(&rails, 0, service.clone(), RdmaServerConfig::default(), stats.clone())?;
    let tcp = TcpServer::bind(&[SocketAddr::new(ips[0], 0)], service, ServerConfig::default(), stats)?;
    let all: Vec<String> = rdma.local_addrs().iter().chain(tcp.local_addrs()).map(SocketAddr::to_string).collect();
    println!("{}", all.join(","));
    let _ = std::io::stdout().flush();
    for _ in std::io::stdin().lines() {}
    Ok(())
}

/// A child that ends with this process's interest in it.
struct Kid(Child);

impl Drop for Kid {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Bench {
    args: Args,
    rails: Vec<Arc<Rail>>,
    pool: Arc<Pool>,
    rdma: Vec<SocketAddr>,
    tcp: SocketAddr,
    node: Option<Kid>,
}

/// What one slice of time gave.
#[derive(Clone, Copy, Default)]
struct Slice {
    bytes: u64,
    ops: u64,
    secs: f64,
    /// User time of both ends, where both are here.
    user: f64,
}

impl Slice {
    fn mib_per_s(self) -> f64 {
        self.bytes as f64 / self.secs / f64::from(1 << 20)
    }
    fn per_s(self) -> f64 {
        self.ops as f64 / self.secs
    }
    fn user_per_gib(self) -> f64 {
        self.user / (self.bytes as f64 / f64::from(1 << 30))
    }
}

fn user_time(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit(')').next().unwrap_or_default();
    rest.split_whitespace().nth(11).and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0) / 100.0
}

impl Bench {
    fn channel(&self, rail: Option<usize>) -> Box<dyn Channel> {
        let soon = Instant::now() + Duration::from_secs(30);
        let connector: Box<dyn Connector> = match rail {
            Some(rail) => {
                let (ours, theirs) = (Arc::clone(&self.rails[rail]), self.rdma[rail]);
                Box::new(RdmaConnector::new(ours, theirs, Patience::default(), Arc::default()))
            }
            None => {
                let to = self.tcp.to_string();
                Box::new(TcpConnector::new(&to, Vec::new(), SocketOptions::default(), Arc::default()))
            }
        };
        let mut channel = connector.connect(soon).expect("the node answers");
        greet(&mut *channel, &Hello::new("bench", ""), soon).expect("the node greets");
        channel
    }

    /// `depth` threads read `size` bytes at a time for a slice, each over a channel of its own: of the rails in turn,
    /// or of TCP.
    fn read(&self, rails: usize, size: usize, depth: usize) -> Slice {
        let stop = AtomicBool::new(false);
        let mut channels: Vec<_> = (0..depth).map(|i| self.channel((rails > 0).then(|| i % rails.max(1)))).collect();
        let node = self.node.as_ref().map(|kid| kid.0.id());
        let user = || user_time(std::process::id()) + node.map_or(0.0, user_time);
        let (before, begun) = (user(), Instant::now());
        let ops = std::thread::scope(|scope| {
            let readers: Vec<_> = channels
                .drain(..)
                .enumerate()
                .map(|(i, mut channel)| {
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut dst = self.pool.alloc(size, Instant::now()).expect("memory for a reader");
                        let (mut body, mut ops) = (Vec::new(), 0u64);
                        while !stop.load(Ordering::Relaxed) {
                            let offset = (i as u64 * 31 + ops) * size as u64 % (DATA - size + 1) as u64;
                            let read = Read {
                                volume: VolumeId(0),
                                path: b"data",
                                version: "v",
                                size: DATA as u64,
                                offset,
                                len: size as u32,
                            };
                            let deadline = Instant::now() + Duration::from_secs(60);
                            let answer = channel
                                .call(&Request::Read(read), &mut body, &mut dst, &mut |_| {}, deadline)
                                .expect("a read");
                            assert_eq!((answer.payload_len, dst[0]), (size, (offset % 251) as u8));
                            ops += 1;
                        }
                        ops
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_secs_f64(self.args.secs));
            stop.store(true, Ordering::Relaxed);
            readers.into_iter().map(|reader| reader.join().expect("a reader")).sum::<u64>()
        });
        let secs = begun.elapsed().as_secs_f64();
        Slice { bytes: ops * size as u64, ops, secs, user: user() - before }
    }

    /// The numbers of perftest's last line, for as long as a slice.
    fn perftest(&self, program: &str, words: &[&str]) -> Option<Vec<f64>> {
        // Its other end is on another host.
        self.node.as_ref()?;
        let ip = self.args.ips[0].to_string();
        let mut server = Command::new(program);
        server.args(words).args(["-R", "-p", "18600"]).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Kid(server.spawn().ok()?);
        std::thread::sleep(Duration::from_millis(500));
        let client = Command::new(program).args(words).args(["-R", "-p", "18600", &ip]).output().ok()?;
        drop(server);
        let text = String::from_utf8_lossy(&client.stdout);
        let line = text.lines().rfind(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))?;
        Some(line.split_whitespace().filter_map(|word| word.parse().ok()).collect())
    }

    /// Messages per second of ib_write_bw.
    fn write_bw(&self, size: usize, depth: usize) -> Option<f64> {
        let (size_word, depth_word) = (size.to_string(), depth.to_string());
        let secs = (self.args.secs.ceil() as u64).max(1).to_string();
        let words = ["-s", &size_word, "-t", &depth_word, "-D", &secs, "-F"];
        let numbers = self.perftest("ib_write_bw", &words)?;
        // #bytes #iterations BW-peak BW-average MsgRate[Mpps]; the average is in MiB/s.
        numbers.get(3).map(|mib| mib * f64::from(1 << 20) / size as f64)
    }

    /// One-way microseconds of a small message and of a write of `size`, together the shape of a read.
    fn latency(&self, size: usize) -> Option<f64> {
        let size = size.to_string();
        // #bytes #iterations t_min t_max t_typical t_avg …
        let send = self.perftest("ib_send_lat", &["-s", "128", "-n", "2000", "-F"])?;
        let write = self.perftest("ib_write_lat", &["-s", &size, "-n", "2000", "-F"])?;
        Some(send.get(4)? + write.get(4)?)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.retain(|v| v.is_finite());
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    let args = parse();
    if args.server {
        serve(&args.ips).expect("the node starts");
        return;
    }
    let (node, all) = if args.to.is_empty() {
        let ips: Vec<String> = args.ips.iter().map(IpAddr::to_string).collect();
        let mut node = Command::new(std::env::current_exe().expect("own path"))
            .args(["--server", &ips.join(",")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the node starts");
        let mut line = String::new();
        BufReader::new(node.stdout.take().expect("its output")).read_line(&mut line).expect("its addresses");
        (Some(Kid(node)), list::<SocketAddr>(line.trim()))
    } else {
        (None, args.to.clone())
    };
    let (tcp, rdma) = all.split_last().expect("the node's addresses, TCP last");
    let verbs = Verbs::load().expect("RDMA");
    let pool = Pool::new(128 << 20, 8 << 20).expect("memory");
    let open = |ip: &IpAddr| Rail::open(&verbs, "bench", *ip, &pool, Access::PeerWrites).expect("a rail");
    let rails = args.ips.iter().map(open).collect();
    let bench = Bench { rails, pool, rdma: rdma.to_vec(), tcp: *tcp, node, args };
    let rounds = bench.args.rounds;
    let wanted = |name: &str| bench.args.only.is_empty() || name.contains(&bench.args.only);
    for (size, depth) in [(1 << 20, 8), (128 << 10, 8), (4 << 10, 16)] {
        let name = format!("{} depth {depth}", Size(size as u64));
        if !wanted(&name) {
            continue;
        }
        let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let (mut tcp, mut user, mut user_tcp) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let bare = bench.write_bw(size, depth).unwrap_or(f64::NAN);
            let slice = bench.read(1, size, depth);
            let over_tcp = bench.read(0, size, depth);
            ours.push(slice.mib_per_s());
            theirs.push(bare * size as f64 / f64::from(1 << 20));
            ratios.push(slice.per_s() / bare);
            tcp.push(over_tcp.mib_per_s());
            user.push(slice.user_per_gib());
            user_tcp.push(over_tcp.user_per_gib());
        }
        println!(
            "{name}: channel {:.1} MiB/s, ib_write_bw {:.1} MiB/s, of it {:.2}; TCP {:.1} MiB/s; \
             user s/GiB: RDMA {:.2}, TCP {:.2}",
            median(ours),
            median(theirs),
            median(ratios),
            median(tcp),
            median(user),
            median(user_tcp)
        );
    }
    if wanted("latency") {
        let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let bare = bench.latency(4096).unwrap_or(f64::NAN);
            let us = 1e6 / bench.read(1, 4096, 1).per_s();
            ours.push(us);
            theirs.push(bare);
            ratios.push(us / bare);
        }
        println!(
            "4 KiB latency depth 1: channel {:.1} us, perftest send + write {:.1} us, ratio {:.2}",
            median(ours),
            median(theirs),
            median(ratios)
        );
    }
    if bench.rails.len() > 1 && wanted("rails") {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            one.push(bench.read(1, 1 << 20, 8).mib_per_s());
            two.push(bench.read(2, 1 << 20, 8).mib_per_s());
        }
        println!("1 MiB rails: one {:.1} MiB/s, two {:.1} MiB/s", median(one), median(two));
    }
}
