//! Sends some bytes to each address of the other end in a subnet of this host, to see which interfaces carry the bytes. The
//! doctor draws the conclusions.

use spurline_fabric::{HostFacts, RouteTrial, interface_pairs};
use spurline_probe::client::{ConnectConfig, ProbeSession};
use spurline_probe::drive::RunLimits;
use spurline_probe::measure;
use spurline_probe::message::{ProbeOp, ProbePlan};
use spurline_trust::Trust;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Enough for the counters of an interface to stand out from other traffic.
const TRIAL_BYTES: u64 = 4 << 20;
const TRIAL_OPERATION_BYTES: u64 = 1 << 20;
/// Time limit of a trial.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit of all trials.
const TRIALS_TIMEOUT: Duration = Duration::from_secs(15);

/// A trial for each pair of interfaces of this host and the peer in the same subnet; `port` is that of the peer's `net serve`,
/// `wanted` the interfaces to test, all when empty.
pub fn run_trials(
    host: &HostFacts,
    peer: &HostFacts,
    wanted: &[String],
    port: u16,
    trust: &Arc<Trust>,
) -> Vec<RouteTrial> {
    let end = Instant::now() + TRIALS_TIMEOUT;
    let all =
        interface_pairs(host, peer).into_iter().filter(|pair| wanted.is_empty() || wanted.contains(&pair.own.name));
    all.map(|pair| {
        let carried = match end.saturating_duration_since(Instant::now()) {
            left if left.is_zero() => Err(format!("the {} s for all of them were over", TRIALS_TIMEOUT.as_secs())),
            left => try_route(pair.from, pair.to, port, TRIAL_TIMEOUT.min(left), trust),
        };
        RouteTrial { interface: pair.own.name.clone(), to: pair.to, bytes: TRIAL_BYTES, carried }
    })
    .collect()
}

fn try_route(
    from: IpAddr,
    to: IpAddr,
    port: u16,
    timeout: Duration,
    trust: &Arc<Trust>,
) -> Result<[Option<String>; 2], String> {
    let peer = SocketAddr::new(to, port).to_string();
    let trust = Arc::clone(trust);
    let call = ConnectConfig { peer, from: vec![from], timeout, trust };
    let mut session = ProbeSession::connect(&call).map_err(|fault| fault.what)?;
    let plan =
        ProbePlan { size: TRIAL_OPERATION_BYTES, depth: 4, streams: vec![ProbeOp::Write], ..ProbePlan::default() };
    let limits = RunLimits {
        time: timeout,
        ops: Some(TRIAL_BYTES / TRIAL_OPERATION_BYTES),
        patience: timeout,
        pause: Duration::ZERO,
    };
    let done = measure::run_measurement(&mut session, &plan, &limits, &AtomicBool::new(false), &mut |_| {})
        .map_err(|fault| fault.what)?;
    match (done.error, done.report) {
        (Some(error), _) => Err(error),
        (None, None) => Err("the other end gave no report".to_owned()),
        (None, Some(report)) => Ok([done.link.carried_by, report.link.carried_by]),
    }
}
