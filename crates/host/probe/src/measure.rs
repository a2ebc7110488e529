//! Whole measurements: bandwidth, latency and reachability between this host and a server, with the report of each
//! end. Prints nothing and judges nothing.

use crate::client::{HEARTBEAT, ProbeSession};
use crate::drive::{self, RunLimits, RunProgress, RunResult};
use crate::link::{self, InterfaceLink, KernelFiles};
use crate::message::{ProbeOp, ProbePlan, ProbeTransport, ServerReport};
use crate::stream::{ProbeStream, StopSignal};
use spurline_types::Fault;
use spurline_types::{Congestion, Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A round trip of this size shows whether large packets pass.
const LARGE_MESSAGE: u64 = 64 << 10;

/// A measurement and the surroundings.
#[derive(Debug)]
pub struct ProbeOutcome {
    /// The plan.
    pub plan: ProbePlan,
    /// The result.
    pub measured: RunResult,
    /// The server's report; `None` when lost.
    pub report: Option<ServerReport>,
    /// The local interface; of several paths that of the first.
    pub link: InterfaceLink,
    /// Results of each path, where there are several.
    pub rails: Vec<RailOutcome>,
    /// Whether both addresses are on this host.
    pub same_host: bool,
    /// Why the measurement ended early, and which end was the cause.
    pub error: Option<String>,
}

/// Result of a path among several.
#[derive(Debug, Clone)]
pub struct RailOutcome {
    /// The local interface.
    pub link: InterfaceLink,
    /// The remote interface; `None` without a report.
    pub peer: Option<InterfaceLink>,
    /// Bytes from the server to the client during the measurement.
    pub read_bytes: u64,
    /// Bytes from the client to the server.
    pub write_bytes: u64,
}

/// Runs `plan` until a limit, an error or `interrupt`; `observe` gets the totals meanwhile.
///
/// # Errors
/// When the measurement can't begin. Later errors are in the outcome, beside the result so far.
pub fn run_measurement(
    session: &mut ProbeSession,
    plan: &ProbePlan,
    limits: &RunLimits,
    interrupt: &AtomicBool,
    observe: &mut dyn FnMut(&RunProgress),
) -> Result<ProbeOutcome, Fault> {
    let files = KernelFiles::default();
    let before = files.read_counters();
    let lanes = session.open_streams(plan)?;
    let lanes = plan.streams.iter().copied().zip(lanes).collect();
    let mut told = Instant::now();
    let measured = drive::drive_streams(lanes, plan.depth, limits, interrupt, &mut |progress| {
        if told.elapsed() >= HEARTBEAT {
            told = Instant::now();
            // The streams notice a lost server.
            let _ = session.send_heartbeat();
        }
        observe(progress);
    });
    let after = files.read_counters();
    let seen = |address: SocketAddr, bytes: u64| {
        let mut link = files.link_of(address);
        // Interface counters do not include RDMA traffic.
        if plan.transport == ProbeTransport::Tcp {
            link::detect_carrier(&mut link, &before, &after, bytes);
        }
        link
    };
    let mut rails: Vec<RailOutcome> = Vec::new();
    if plan.paths.len() > 1 {
        for (index, path) in plan.paths.iter().enumerate() {
            let mut bytes = [0; 2];
            for (stream, op) in plan.streams.iter().enumerate().filter(|(s, _)| plan.path_of(*s) == index) {
                bytes[usize::from(op.reads_server())] += measured.stream_bytes.get(stream).copied().unwrap_or(0);
            }
            let [write_bytes, read_bytes] = bytes;
            let link = seen((path.from, 0).into(), read_bytes + write_bytes);
            rails.push(RailOutcome { link, peer: None, read_bytes, write_bytes });
        }
    }
    let first = plan.paths.first().map_or(session.local(), |p| (p.from, 0).into());
    let link = rails.first().map_or_else(|| seen(first, measured.moved_bytes), |rail| rail.link.clone());
    let mut error = None;
    if let Some(e) = &measured.error {
        error = Some(explain_failure(session, e));
    }
    // The local result is valid without a report.
    let report = if error.is_some() { None } else { session.finish_measurement().ok() };
    if let Some(report) = &report {
        rails.iter_mut().zip(&report.links).for_each(|(rail, link)| rail.peer = Some(link.clone()));
    }
    let same_host = is_same_host(session.local().ip(), session.remote().ip(), &link);
    Ok(ProbeOutcome { plan: plan.clone(), measured, report, link, rails, same_host, error })
}

fn is_same_host(local: IpAddr, remote: IpAddr, link: &InterfaceLink) -> bool {
    local.to_canonical() == remote.to_canonical() || link.interface == "lo" || link.carried_by.as_deref() == Some("lo")
}

/// Why streams ended: the server's reason, if any came.
fn explain_failure(session: &ProbeSession, e: &Error) -> String {
    let peer = session.peer();
    match session.refusal_reason() {
        Some(words) => format!("{peer} ended it: {words}"),
        None if e.kind() == ErrorKind::Timeout => format!("{peer} stopped answering: {e}"),
        None => format!("the connection to {peer} was lost: {e}"),
    }
}

/// An answer to a ping.
#[derive(Debug, Clone)]
pub struct PingReply {
    /// Counted from 1.
    pub number: u64,
    /// Bytes in each direction.
    pub size: u64,
    /// The round trip.
    pub time: Duration,
}

/// How pings are sent.
#[derive(Debug, Clone, Copy)]
pub struct PingConfig {
    /// Number of pings; 0: until interrupted.
    pub count: u64,
    /// Bytes of each.
    pub size: u64,
    /// Time between two pings.
    pub interval: Duration,
    /// Time limit of each answer.
    pub timeout: Duration,
    /// The congestion control.
    pub congestion: Congestion,
    /// The transport.
    pub transport: ProbeTransport,
}

/// Result of a series of pings.
#[derive(Debug, Default)]
pub struct PingOutcome {
    /// Round-trip times, in order.
    pub times: Vec<Duration>,
    /// Round-trip time of a large message.
    pub large: Option<Duration>,
    /// Size of that message in bytes.
    pub large_size: u64,
    /// Why the pings ended early.
    pub error: Option<String>,
    /// Whether small messages came back and the large message did not.
    pub large_lost: bool,
}

/// Most round-trip times kept: days at a ping per second.
const MAX_TIMES: usize = 1 << 20;

/// Sends messages and waits for each answer, then sends a large message.
///
/// # Errors
/// When the pings can't begin.
pub fn run_pings(
    session: &mut ProbeSession,
    pings: &PingConfig,
    interrupt: &AtomicBool,
    observe: &mut dyn FnMut(&PingReply),
) -> Result<PingOutcome, Fault> {
    let mut pinged =
        PingOutcome { times: Vec::new(), large: None, large_size: LARGE_MESSAGE, error: None, large_lost: false };
    let plan = |size| ProbePlan {
        size,
        depth: 1,
        streams: vec![ProbeOp::Echo],
        congestion: pings.congestion,
        transport: pings.transport,
        ..ProbePlan::default()
    };
    let stop = StopSignal::new(pings.timeout);
    let mut lane = single_stream(session.open_streams(&plan(pings.size))?)?;
    let done = AtomicBool::new(false);
    let watched = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut told = Instant::now();
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                if interrupt.load(Ordering::Relaxed) {
                    stop.cut();
                }
                if told.elapsed() >= HEARTBEAT {
                    told = Instant::now();
                    // A missing answer shows that the server is gone.
                    let _ = session.send_heartbeat();
                }
            }
        });
        let mut number = 0;
        let result = drive::run_single(lane.as_mut(), pings.count, pings.interval, &stop, &mut |time| {
            number += 1;
            observe(&PingReply { number, size: pings.size, time });
            if pinged.times.len() < MAX_TIMES {
                pinged.times.push(time);
            }
        });
        done.store(true, Ordering::Relaxed);
        result
    });
    drop(lane);
    if interrupt.load(Ordering::Relaxed) {
        return Ok(pinged);
    }
    if let Err(e) = watched {
        pinged.error = Some(explain_failure(session, &e));
        return Ok(pinged);
    }
    session.finish_measurement()?;
    let mut lane = single_stream(session.open_streams(&plan(LARGE_MESSAGE))?)?;
    match drive::run_single(lane.as_mut(), 1, Duration::ZERO, &stop, &mut |time| pinged.large = Some(time)) {
        Ok(()) => {
            drop(lane);
            // A courtesy: the server then logs no early end.
            let _ = session.finish_measurement();
        }
        Err(e) => {
            pinged.large_lost = e.kind() == ErrorKind::Timeout && !pinged.times.is_empty();
            pinged.error = Some(explain_failure(session, &e));
        }
    }
    Ok(pinged)
}

/// A step of the loop of `rping`, by the name there.
#[derive(Debug, Clone)]
pub struct RpingStep {
    /// The name in rping.
    pub name: &'static str,
    /// The action here.
    pub what: &'static str,
    /// The duration.
    pub time: Option<Duration>,
    /// The failure, after which later steps are not tried.
    pub error: Option<String>,
}

/// The steps, in pairs: connection and exchange of a memory region, then the operation there.
const RPING_STEPS: [(ProbeOp, [(&str, &str); 2]); 2] = [
    (
        ProbeOp::Fetch,
        [
            ("RDMA_READ_ADV", "connect; SEND with address and key of the other end's memory"),
            ("RDMA_READ_COMPLETE", "RDMA READ of that memory"),
        ],
    ),
    (
        ProbeOp::Read,
        [
            ("RDMA_WRITE_ADV", "connect; memory of this end for the other end's writes"),
            ("RDMA_WRITE_COMPLETE", "SEND with its address and key; RDMA WRITE by the other end"),
        ],
    ),
];

/// Runs the four steps of rping's loop over verbs, once, with `size` bytes each; ends at the first failure.
///
/// # Errors
/// When a connection is not made; the fault begins with the step's name.
pub fn run_rping_steps(session: &mut ProbeSession, size: u64, timeout: Duration) -> Result<Vec<RpingStep>, Fault> {
    let mut steps = Vec::new();
    for (op, [(adv, adv_what), (complete, complete_what)]) in RPING_STEPS {
        let transport = ProbeTransport::Rdma;
        let plan = ProbePlan { size, depth: 1, streams: vec![op], transport, ..ProbePlan::default() };
        let start = Instant::now();
        let mut lane = match session.open_streams(&plan).and_then(single_stream) {
            Ok(lane) => lane,
            Err(fault) => return Err(Fault { what: format!("{adv}: {}", fault.what), ..fault }),
        };
        steps.push(RpingStep { name: adv, what: adv_what, time: Some(start.elapsed()), error: None });
        let mut time = None;
        let stop = StopSignal::new(timeout);
        let result = drive::run_single(lane.as_mut(), 1, Duration::ZERO, &stop, &mut |took| time = Some(took));
        drop(lane);
        let error = result.err().map(|e| explain_failure(session, &e));
        let failed = error.is_some();
        steps.push(RpingStep { name: complete, what: complete_what, time, error });
        if failed {
            break;
        }
        // A courtesy: the server then logs no early end.
        let _ = session.finish_measurement();
    }
    Ok(steps)
}

fn single_stream(mut lanes: Vec<Box<dyn ProbeStream>>) -> Result<Box<dyn ProbeStream>, Fault> {
    lanes.pop().ok_or_else(|| Fault::failed("a measurement without a stream", ""))
}
