//! Sends some bytes to each address of the other end that this host shares a subnet with, to see which interfaces carry
//! them. What follows from it is the doctor's.

use spurline_fabric::{HostFacts, RouteTrial, interface_pairs};
use spurline_probe::client::{ConnectConfig, ProbeSession};
use spurline_probe::drive::RunLimits;
use spurline_probe::measure;
use spurline_probe::message::{ProbeOp, ProbePlan};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Enough that the counters of an interface tell it from what else goes on.
const BYTES: u64 = 4 << 20;
/// Bytes of one operation.
const SIZE: u64 = 1 << 20;
/// How long one trial may take.
const ONE: Duration = Duration::from_secs(3);
/// How long all of them may.
const ALL: Duration = Duration::from_secs(15);

/// A trial for each interface of this host with each of the peer's that is in its subnet; `port` is that of its `net
/// serve`, `wanted` the interfaces that matter, all when empty.
pub fn run(host: &HostFacts, peer: &HostFacts, wanted: &[String], port: u16) -> Vec<RouteTrial> {
    let end = Instant::now() + ALL;
    let meant = |name: &String| wanted.is_empty() || wanted.contains(name);
    let all = interface_pairs(host, peer).into_iter().filter(|pair| meant(&pair.own.name));
    all.map(|pair| {
        let carried = match end.saturating_duration_since(Instant::now()) {
            left if left.is_zero() => Err(format!("the {} s for all of them were over", ALL.as_secs())),
            left => one(pair.from, pair.to, port, ONE.min(left)),
        };
        RouteTrial { interface: pair.own.name.clone(), to: pair.to, bytes: BYTES, carried }
    })
    .collect()
}

fn one(from: IpAddr, to: IpAddr, port: u16, timeout: Duration) -> Result<[Option<String>; 2], String> {
    let call = ConnectConfig { peer: SocketAddr::new(to, port).to_string(), from: vec![from], timeout };
    let mut session = ProbeSession::connect(&call).map_err(|fault| fault.what)?;
    let plan = ProbePlan { size: SIZE, depth: 4, streams: vec![ProbeOp::Write], ..ProbePlan::default() };
    let limits = RunLimits { time: timeout, ops: Some(BYTES / SIZE), patience: timeout, pause: Duration::ZERO };
    let done = measure::run_measurement(&mut session, &plan, &limits, &AtomicBool::new(false), &mut |_| {})
        .map_err(|fault| fault.what)?;
    match (done.error, done.report) {
        (Some(error), _) => Err(error),
        (None, None) => Err("the other end gave no report".to_owned()),
        (None, Some(report)) => Ok([done.link.carried_by, report.link.carried_by]),
    }
}
