//! Measures the RDMA transport beside perftest, iperf3 and the TCP transport: the node in a process of its own, short
//! slices taken in turn, medians of each round's own ratios, as rows of a table.
//!
//! On two hosts with NICs: `rdmabench --server IP[,IP]` on one, which prints its addresses, and
//! `rdmabench --ip IP[,IP] --to` with those addresses on the other. On one machine, or in the virtual machine of
//! `scripts/vm`, `rdmabench --ip 10.77.0.1` starts the node itself.
//!
//! A channel has one request under way, so depth D is D channels. `--threads` says how many threads share them (D when
//! it is not given): each asks over all of its channels before it waits for the first. `--alone rdma`, `tcp` or
//! `rdma,tcp` leaves out all but these, for a profiler. In a guest of `scripts/vm --count` the instructions outside the
//! kernel are shown beside the user time.

mod perftest;

use perftest::{Bare, Control, Kid, answer};
use spurline_mem::{BufferPool, PoolBuf};
use spurline_net_rdma::{RdmaConnector, RdmaRail, RdmaServer, RdmaServerConfig, RdmaTimeouts};
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{Channel, ConnState, Connector, Responder, Service, perform_handshake};
use spurline_types::{Error, ErrorKind, Result, Size, Stats};
use spurline_verbs::{MemoryAccess, VerbsLibrary};
use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Command, Stdio};
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
    threads: usize,
    only: String,
    alone: String,
}

fn parse() -> Args {
    let (ips, to, only, alone) = (Vec::new(), Vec::new(), String::new(), String::new());
    let mut args = Args { ips, to, server: false, secs: 1.0, rounds: 5, threads: usize::MAX, only, alone };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        match word.as_str() {
            "--server" => (args.server, args.ips) = (true, list(&value())),
            "--ip" => args.ips = list(&value()),
            "--to" => args.to = list(&value()),
            "--secs" => args.secs = value().parse().expect("a number"),
            "--rounds" => args.rounds = value().parse().expect("a number"),
            "--threads" => args.threads = value().parse().expect("a number"),
            "--alone" => args.alone = value(),
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

struct Blocks(PoolBuf);

impl Service for Blocks {
    fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        Ok(WelcomeAnswer { block_size: 4 << 20, node: "bench".into(), ..WelcomeAnswer::default() })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, to: &mut dyn Responder) -> Result<()> {
        match request {
            NodeRequest::Read(read) => {
                let at = read.offset as usize % DATA;
                to.send_data(&[], &[&self.0[at..(at + read.len as usize).min(DATA)]])
            }
            _ => Err(Error::new(ErrorKind::Unsupported, "not here")),
        }
    }
}

/// Serves over RDMA and TCP for ever.
fn serve(ips: &[IpAddr]) -> Result<()> {
    let verbs = VerbsLibrary::load()?;
    let pool = BufferPool::new(64 << 20, DATA)?;
    let mut data = pool.alloc(DATA, Instant::now())?;
    data.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
    let rails: Vec<_> =
        ips.iter().map(|ip| RdmaRail::open(&verbs, "bench", *ip, &pool, MemoryAccess::Local)).collect::<Result<_>>()?;
    let service = Arc::new(Blocks(data));
    let stats = Arc::new(Stats::default());
    let rdma = RdmaServer::bind(&rails, 0, service.clone(), RdmaServerConfig::default(), stats.clone())?;
    let tcp = TcpServer::bind(&[SocketAddr::new(ips[0], 0)], service, ServerConfig::default(), stats)?;
    let control = TcpListener::bind((ips[0], 0)).map_err(|e| Error::io("no port to be controlled at", &e))?;
    let at = control.local_addr().map_err(|e| Error::io("no port to be controlled at", &e))?;
    let all = rdma.local_addrs().iter().chain(tcp.local_addrs()).chain([&at]).map(SocketAddr::to_string);
    println!("{}", all.collect::<Vec<_>>().join(","));
    let _ = std::io::stdout().flush();
    answer(&control, user_time);
    Ok(())
}

struct Bench {
    args: Args,
    rails: Vec<Arc<RdmaRail>>,
    pool: Arc<BufferPool>,
    rdma: Vec<SocketAddr>,
    tcp: SocketAddr,
    control: RefCell<Control>,
    _node: Option<Kid>,
}

/// What one slice of time gave.
#[derive(Clone, Copy, Default)]
struct Slice {
    bytes: u64,
    ops: u64,
    secs: f64,
    /// User time of client and node, in seconds.
    user: [f64; 2],
    /// Instructions outside the kernel, of both; not a number without a counter.
    instructions: f64,
}

impl Slice {
    fn mib_per_s(self) -> f64 {
        self.bytes as f64 / self.secs / f64::from(1 << 20)
    }
}

/// This process's user time in seconds.
fn user_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let rest = stat.rsplit(')').next().unwrap_or_default();
    rest.split_whitespace().nth(11).and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0) / 100.0
}

/// Instructions outside the kernel so far, in a guest that has them counted.
fn instructions() -> f64 {
    let said = std::env::var_os("SPURLINE_VM_COUNT").and_then(|file| std::fs::read_to_string(file).ok());
    said.and_then(|said| said.trim().parse().ok()).unwrap_or(f64::NAN)
}

impl Bench {
    fn channel(&self, rail: Option<usize>) -> Box<dyn Channel> {
        let soon = Instant::now() + Duration::from_secs(30);
        let connector: Box<dyn Connector> = match rail {
            Some(rail) => {
                let (ours, theirs) = (Arc::clone(&self.rails[rail]), self.rdma[rail]);
                Box::new(RdmaConnector::new(ours, theirs, RdmaTimeouts::default(), Arc::default()))
            }
            None => {
                let to = self.tcp.to_string();
                Box::new(TcpConnector::new(&to, Vec::new(), SocketOptions::default(), Arc::default()))
            }
        };
        let mut channel = connector.connect(soon).expect("the node answers");
        perform_handshake(&mut *channel, &HelloRequest::new("bench", "bench"), soon).expect("the handshake succeeds");
        channel
    }

    /// `depth` channels read `size` bytes at a time for a slice: of the rails in turn, or of TCP.
    fn read(&self, rails: usize, size: usize, depth: usize) -> Slice {
        let stop = AtomicBool::new(false);
        let mut lanes: Vec<Lane> = (0..depth)
            .map(|i| Lane {
                channel: self.channel((rails > 0).then(|| i % rails.max(1))),
                dst: self.pool.alloc(size, Instant::now()).expect("memory for a reader"),
                body: Vec::new(),
                at: i * 31,
            })
            .collect();
        let each = depth.div_ceil(self.args.threads.clamp(1, depth));
        let user = || {
            let node = self.control.borrow_mut().ask("user").and_then(|said| said.parse().ok());
            [user_time(), node.unwrap_or(f64::NAN)]
        };
        let (before, counted, begun) = (user(), instructions(), Instant::now());
        let ops = std::thread::scope(|scope| {
            let readers: Vec<_> = lanes
                .chunks_mut(each)
                .map(|lanes| {
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut ops = 0;
                        while !stop.load(Ordering::Relaxed) {
                            ask_all(lanes, size);
                            ops += lanes.len() as u64;
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
        let (instructions, after) = (instructions() - counted, user());
        let user = [after[0] - before[0], after[1] - before[1]];
        Slice { bytes: ops * size as u64, ops, secs, user, instructions }
    }

    fn bare(&self, what: Bare) -> f64 {
        self.median_and_mean(what)[0]
    }

    fn median_and_mean(&self, what: Bare) -> [f64; 2] {
        if !self.args.alone.is_empty() {
            return [f64::NAN; 2];
        }
        what.measure(&mut self.control.borrow_mut(), self.rdma[0].ip()).unwrap_or([f64::NAN; 2])
    }
}

/// A channel, and where its reads go.
struct Lane {
    channel: Box<dyn Channel>,
    dst: PoolBuf,
    body: Vec<u8>,
    at: usize,
}

/// One read over every lane, each asked for before the first is waited for.
fn ask_all(lanes: &mut [Lane], size: usize) {
    let Some((lane, rest)) = lanes.split_first_mut() else { return };
    let offset = (lane.at * size % (DATA - size + 1)) as u64;
    lane.at += 1;
    let (volume, len) = (VolumeId(0), size as u32);
    let read = NodeRequest::Read(ReadRequest {
        volume,
        path: b"data",
        version: "v",
        size: DATA as u64,
        offset,
        len,
        flags: ReadFlags::NONE,
    });
    let deadline = Instant::now() + Duration::from_secs(60);
    let (body, dst) = (&mut lane.body, &mut lane.dst);
    let answer = lane.channel.call_while(&read, body, dst, &mut |_| {}, deadline, &mut || ask_all(rest, size));
    assert_eq!((answer.expect("a read").payload_len, lane.dst[0]), (size, (offset % 251) as u8));
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
    let mut all = args.to.clone();
    let node = all.is_empty().then(|| {
        let ips: Vec<String> = args.ips.iter().map(IpAddr::to_string).collect();
        let exe = std::env::current_exe().expect("own path");
        let node = Command::new(exe).args(["--server", &ips.join(",")]).stdout(Stdio::piped()).spawn();
        let mut node = Kid(node.expect("the node starts"));
        let mut line = String::new();
        BufReader::new(node.0.stdout.take().expect("its output")).read_line(&mut line).expect("its addresses");
        all = list(line.trim());
        node
    });
    let [rdma @ .., tcp, control] = &all[..] else { panic!("--to: the addresses that --server printed") };
    let control = RefCell::new(Control::connect(*control).expect("the node's control port"));
    let verbs = VerbsLibrary::load().expect("RDMA");
    let pool = BufferPool::new(128 << 20, 8 << 20).expect("memory");
    let open = |ip: &IpAddr| RdmaRail::open(&verbs, "bench", *ip, &pool, MemoryAccess::PeerWrites).expect("a rail");
    let rails = args.ips.iter().map(open).collect();
    let bench = Bench { rails, pool, rdma: rdma.to_vec(), tcp: *tcp, control, _node: node, args };
    let wanted = |name: &str| bench.args.only.is_empty() || name.contains(&bench.args.only);
    for (size, depth) in [(1 << 20, 8), (128 << 10, 8), (4 << 10, 16)] {
        let name = format!("{} depth {depth}", Size(size as u64));
        if wanted(&name) {
            bench.throughput(&name, size, depth);
        }
    }
    if wanted("latency") {
        bench.latency();
    }
    if wanted("beside") {
        bench.beside();
    }
    if bench.rails.len() > 1 && wanted("rails") {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        for _ in 0..bench.args.rounds {
            one.push(bench.read(1, 1 << 20, 8).mib_per_s());
            two.push(bench.read(2, 1 << 20, 8).mib_per_s());
        }
        let ratio = median(one.iter().zip(&two).map(|(one, two)| two / one).collect());
        println!("| 1 MiB, two rails against one | {:.1} and {:.1} MiB/s | {ratio:.2} |", median(two), median(one));
    }
}

impl Bench {
    /// Reads beside `ib_write_bw`, TCP and iperf3, and the user time of each transport.
    fn throughput(&self, name: &str, size: usize, depth: usize) {
        let secs = (self.args.secs.ceil() as u64).max(1);
        let mib = f64::from(1 << 20);
        let mut columns: [Vec<f64>; 5] = Default::default();
        let mut users = [[0f64; 5]; 2];
        let wanted = |kind| self.args.alone.is_empty() || self.args.alone.contains(kind);
        for _ in 0..self.args.rounds {
            let bare = self.bare(Bare::WriteBw(size, depth, secs)) * size as f64 / mib;
            let slices = [("rdma", 1), ("tcp", 0)].map(|(kind, rails)| match wanted(kind) {
                true => self.read(rails, size, depth),
                false => Slice::default(),
            });
            let iperf = self.bare(Bare::Iperf(depth, secs)) / mib;
            let ours = slices[0].mib_per_s();
            for (column, value) in columns.iter_mut().zip([ours, bare, ours / bare, slices[1].mib_per_s(), iperf]) {
                column.push(value);
            }
            for (sum, slice) in users.iter_mut().zip(&slices) {
                let of_slice = [slice.user[0], slice.user[1], slice.instructions, slice.ops as f64, slice.bytes as f64];
                sum.iter_mut().zip(of_slice).for_each(|(sum, value)| *sum += value);
            }
        }
        let [ours, bare, ratio, tcp, iperf] = columns.map(median);
        println!(
            "| {name} | {ours:.1} MiB/s | ib_write_bw {bare:.1} MiB/s | {ratio:.2} | TCP {tcp:.1} MiB/s | iperf3 {iperf:.1} MiB/s |"
        );
        // Sums, as the kernel's clock is coarse.
        let [rdma, tcp] =
            users.map(|[client, node, .., bytes]| [client, node].map(|user| user / bytes * f64::from(1 << 30)));
        println!(
            "| {name}, user s/GiB, client and node | RDMA {:.3} + {:.3} | TCP {:.3} + {:.3} | {:.2} |",
            rdma[0],
            rdma[1],
            tcp[0],
            tcp[1],
            (rdma[0] + rdma[1]) / (tcp[0] + tcp[1])
        );
        let [rdma, tcp] = users.map(|[_, _, instructions, ops, _]| instructions / ops);
        if rdma.is_finite() || tcp.is_finite() {
            println!(
                "| {name}, user instructions of a read, client and node | RDMA {rdma:.0} | TCP {tcp:.0} | {:.2} |",
                rdma / tcp
            );
        }
    }

    /// One read at a time beside a message and a write of perftest: the medians of single reads, and the means, in which
    /// the few are that something else held up.
    fn latency(&self) {
        let mut rounds: [[Vec<f64>; 3]; 2] = Default::default();
        for _ in 0..self.args.rounds {
            let (send, write) = (self.median_and_mean(Bare::SendLat(128)), self.median_and_mean(Bare::WriteLat(4096)));
            let mut lane = [self.lane(4096, 0)];
            let (mut took, begun) = (Vec::new(), Instant::now());
            while begun.elapsed().as_secs_f64() < self.args.secs {
                let one = Instant::now();
                ask_all(&mut lane, 4096);
                took.push(one.elapsed().as_secs_f64() * 1e6);
            }
            let mean = took.iter().sum::<f64>() / took.len() as f64;
            for (at, us) in [median(took), mean].into_iter().enumerate() {
                let bare = send[at] + write[at];
                rounds[at].iter_mut().zip([us, bare, us / bare]).for_each(|(column, value)| column.push(value));
            }
        }
        for (what, columns) in ["median", "mean"].into_iter().zip(rounds) {
            let [ours, theirs, ratio] = columns.map(median);
            println!(
                "| 4 KiB latency, one at a time, {what} | {ours:.1} us | send + write {theirs:.1} us | {ratio:.2} |"
            );
        }
    }

    /// A lane over the first rail.
    fn lane(&self, size: usize, at: usize) -> Lane {
        Lane {
            channel: self.channel(Some(0)),
            dst: self.pool.alloc(size, Instant::now()).expect("memory for a reader"),
            body: Vec::new(),
            at,
        }
    }

    /// Small reads while two channels read bulk: on a channel of their own, and as they would be on the queue pair of one
    /// that is full of bulk, where they would wait for what is before them.
    fn beside(&self) {
        let (mut own, mut behind) = (Vec::new(), Vec::new());
        for _ in 0..self.args.rounds {
            let stop = AtomicBool::new(false);
            let (mut small, mut bulk) = ([self.lane(4 << 10, 0)], [[self.lane(1 << 20, 1)], [self.lane(1 << 20, 2)]]);
            let reads = |lane: &mut [Lane; 1], size| {
                let (begun, mut ops) = (Instant::now(), 0f64);
                while !stop.load(Ordering::Relaxed) {
                    ask_all(lane, size);
                    ops += 1.0;
                }
                begun.elapsed().as_secs_f64() * 1e6 / ops
            };
            let reads = &reads;
            std::thread::scope(|scope| {
                let bulk = bulk.each_mut().map(|lane| scope.spawn(move || reads(lane, 1 << 20)));
                let small = scope.spawn(|| reads(&mut small, 4 << 10));
                std::thread::sleep(Duration::from_secs_f64(self.args.secs));
                stop.store(true, Ordering::Relaxed);
                own.push(small.join().expect("a reader"));
                behind.extend(bulk.map(|reader| reader.join().expect("a reader")));
            });
        }
        let [own, behind] = [own, behind].map(median);
        println!(
            "| 4 KiB beside 1 MiB | {own:.1} us on a queue pair of its own | {behind:.1} us for the bulk before it |"
        );
    }
}
