//! Whole measurements: bandwidth, latency and reachability between this host and a server, with what each end saw.
//! It prints nothing and judges nothing.

use crate::client::Session;
use crate::drive::{self, Limits, Measured, Progress};
use crate::lane::{Lane, Stop};
use crate::link::{self, Files, Link};
use crate::message::{Op, Plan, Report, Transport};
use spurline_types::Fault;
use spurline_types::{Congestion, Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the server is told that the client lives.
const ALIVE: Duration = Duration::from_secs(1);
/// Round trips of a message as large as this tell whether large packets get through.
const LARGE: u64 = 64 << 10;

/// A measurement and its surroundings.
#[derive(Debug)]
pub struct Outcome {
    /// What was to be measured.
    pub plan: Plan,
    /// What was.
    pub measured: Measured,
    /// The other end's report; `None` when it was gone.
    pub report: Option<Report>,
    /// The interface the bytes took here; of several paths that of the first.
    pub link: Link,
    /// What each path carried, where there are several.
    pub rails: Vec<RailOutcome>,
    /// Whether both addresses are this host's.
    pub same_host: bool,
    /// What ended it early, in words that name who.
    pub error: Option<String>,
}

/// What one of several paths carried.
#[derive(Debug, Clone)]
pub struct RailOutcome {
    /// Its interface here.
    pub link: Link,
    /// Its interface there; `None` without a report.
    pub peer: Option<Link>,
    /// Bytes from the server to the client while it was measured.
    pub read_bytes: u64,
    /// Bytes the other way.
    pub write_bytes: u64,
}

/// Measures `plan` until a limit, an error or `interrupt`; `observe` is told what moved meanwhile.
///
/// # Errors
/// When it can't begin. What goes wrong later is in the outcome, beside what was measured until then.
pub fn run(
    session: &mut Session,
    plan: &Plan,
    limits: &Limits,
    interrupt: &AtomicBool,
    observe: &mut dyn FnMut(&Progress),
) -> Result<Outcome, Fault> {
    let files = Files::default();
    let before = files.counters();
    let lanes = session.open(plan)?;
    let lanes = plan.streams.iter().copied().zip(lanes).collect();
    let mut told = Instant::now();
    let measured = drive::drive(lanes, plan.depth, limits, interrupt, &mut |progress| {
        if told.elapsed() >= ALIVE {
            told = Instant::now();
            // A server that is gone is noticed by the streams.
            let _ = session.alive();
        }
        observe(progress);
    });
    let after = files.counters();
    let seen = |address: SocketAddr, bytes: u64| {
        let mut link = files.link_of(address);
        // Interfaces do not count what their NIC moves by itself.
        if plan.transport == Transport::Tcp {
            link::compare(&mut link, &before, &after, bytes);
        }
        link
    };
    let mut rails: Vec<RailOutcome> = Vec::new();
    if plan.paths.len() > 1 {
        for (index, path) in plan.paths.iter().enumerate() {
            let mut bytes = [0; 2];
            for (stream, op) in plan.streams.iter().enumerate().filter(|(s, _)| plan.path_of(*s) == index) {
                bytes[usize::from(op.reads())] += measured.stream_bytes.get(stream).copied().unwrap_or(0);
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
        error = Some(explain(session, e));
    }
    // Without a report what was measured here still stands.
    let report = if error.is_some() { None } else { session.finish().ok() };
    if let Some(report) = &report {
        rails.iter_mut().zip(&report.links).for_each(|(rail, link)| rail.peer = Some(link.clone()));
    }
    let same_host = is_same(session.local().ip(), session.remote().ip(), &link);
    Ok(Outcome { plan: plan.clone(), measured, report, link, rails, same_host, error })
}

fn is_same(local: IpAddr, remote: IpAddr, link: &Link) -> bool {
    local.to_canonical() == remote.to_canonical() || link.interface == "lo" || link.carried_by.as_deref() == Some("lo")
}

/// Why streams ended: the server's own words when it had any.
fn explain(session: &Session, e: &Error) -> String {
    let peer = session.peer();
    match session.last_words() {
        Some(words) => format!("{peer} ended it: {words}"),
        None if e.kind() == ErrorKind::Timeout => format!("{peer} stopped answering: {e}"),
        None => format!("{peer} is gone: {e}"),
    }
}

/// One answer to a ping, or why there is none.
#[derive(Debug, Clone)]
pub struct Pong {
    /// From 1.
    pub number: u64,
    /// Bytes there and back.
    pub size: u64,
    /// The round trip.
    pub time: Duration,
}

/// How pings are sent.
#[derive(Debug, Clone, Copy)]
pub struct Pings {
    /// How many; 0 until interrupted.
    pub count: u64,
    /// Bytes of each.
    pub size: u64,
    /// From one to the next.
    pub interval: Duration,
    /// How long to wait for each answer.
    pub timeout: Duration,
    /// The congestion control.
    pub congestion: Congestion,
    /// What carries them.
    pub transport: Transport,
}

/// What pings found.
#[derive(Debug)]
pub struct Pinged {
    /// Times of the answers, in order.
    pub times: Vec<Duration>,
    /// Time of one large message there and back.
    pub large: Option<Duration>,
    /// The size of that message in bytes.
    pub large_size: u64,
    /// Why it ended early.
    pub error: Option<String>,
    /// Whether small messages came back and the large one did not.
    pub large_lost: bool,
}

/// The most times that are kept: as many seconds are days.
const KEPT: usize = 1 << 20;

/// Sends messages and waits for their answers, one at a time, then one large one.
///
/// # Errors
/// When it can't begin.
pub fn ping(
    session: &mut Session,
    pings: &Pings,
    interrupt: &AtomicBool,
    observe: &mut dyn FnMut(&Pong),
) -> Result<Pinged, Fault> {
    let mut pinged = Pinged { times: Vec::new(), large: None, large_size: LARGE, error: None, large_lost: false };
    let plan = |size| Plan {
        size,
        depth: 1,
        streams: vec![Op::Echo],
        congestion: pings.congestion,
        transport: pings.transport,
        ..Plan::default()
    };
    let stop = Stop::new(pings.timeout);
    let mut lane = one(session.open(&plan(pings.size))?)?;
    let done = AtomicBool::new(false);
    let watched = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut told = Instant::now();
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                if interrupt.load(Ordering::Relaxed) {
                    stop.cut();
                }
                if told.elapsed() >= ALIVE {
                    told = Instant::now();
                    // The next answer tells whether the server is gone.
                    let _ = session.alive();
                }
            }
        });
        let mut number = 0;
        let result = drive::one_by_one(lane.as_mut(), pings.count, pings.interval, &stop, &mut |time| {
            number += 1;
            observe(&Pong { number, size: pings.size, time });
            if pinged.times.len() < KEPT {
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
        pinged.error = Some(explain(session, &e));
        return Ok(pinged);
    }
    session.finish()?;
    let mut lane = one(session.open(&plan(LARGE))?)?;
    match drive::one_by_one(lane.as_mut(), 1, Duration::ZERO, &stop, &mut |time| pinged.large = Some(time)) {
        Ok(()) => {
            drop(lane);
            // Only so that the server does not wonder.
            let _ = session.finish();
        }
        Err(e) => {
            pinged.large_lost = e.kind() == ErrorKind::Timeout && !pinged.times.is_empty();
            pinged.error = Some(explain(session, &e));
        }
    }
    Ok(pinged)
}

fn one(mut lanes: Vec<Box<dyn Lane>>) -> Result<Box<dyn Lane>, Fault> {
    lanes.pop().ok_or_else(|| Fault::failed("a measurement without a stream", ""))
}
