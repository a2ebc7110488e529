//! Measures each rail: to itself through a server in this process, or to another pod. Judges nothing.

use crate::net::peer::TokenArgs;
use serde::Serialize;
use spurline_config::Fault;
use spurline_fabric::{HostTree, archive};
use spurline_probe::client::{self, ConnectConfig, ProbeSession};
use spurline_probe::drive::RunLimits;
use spurline_probe::judge::byte_rates;
use spurline_probe::measure::run_measurement;
use spurline_probe::message::{ProbeOp, ProbePlan, ProbeTransport};
use spurline_probe::paths::{PathPlan, choose_paths, local_interfaces};
use spurline_probe::server::{ProbeServer, ServeConfig};
use spurline_runtime::group;
use spurline_trust::Trust;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Connections of the server in this process: a measurement has a handful.
const MAX_VERIFY_CONNECTIONS: usize = 32;
/// Bytes of a message of the latency test, as in ib_write_lat.
const LATENCY_BYTES: u64 = 2;

/// Figures of a rail.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RailFigures {
    pub interface: String,
    /// Bandwidth in Gb/s.
    pub gbps: f64,
    /// The port's rate in Gb/s.
    pub rate_gbps: Option<f64>,
    /// Lowest latency of a round trip's half in microseconds.
    pub min_us: Option<f64>,
    pub median_us: Option<f64>,
    /// The 99th percentile.
    pub p99_us: Option<f64>,
    /// The standard deviation.
    pub stdev_us: Option<f64>,
}

/// A rail with figures, or the reason why there are none.
pub struct RailMeasurement {
    pub interface: String,
    pub result: Result<RailFigures, Fault>,
}

/// Connects to `net serve` in another pod.
///
/// # Errors
/// As [`ProbeSession::connect`].
pub fn connect_peer(peer: &str, token: &TokenArgs, timeout: Duration) -> Result<ProbeSession, Fault> {
    let peer = client::parse_peer(peer)?;
    let trust = token.open()?;
    ProbeSession::connect(&ConnectConfig { peer, from: Vec::new(), timeout, trust })
}

/// The facts of the other end.
///
/// # Errors
/// When the facts are not sent, or can't be read.
pub fn fetch_tree(session: &mut ProbeSession, timeout: Duration) -> Result<HostTree, Fault> {
    let packed = session.fetch_facts(timeout)?;
    let entries = archive::read_archive(packed.as_slice()).map_err(|error| {
        Fault::failed(format!("the other end's facts: {error}"), "use the same version on both ends")
    })?;
    Ok(HostTree::from_memory(entries))
}

/// Measures each rail of this pod to a rail within reach.
///
/// # Errors
/// When the other end does not list interfaces.
pub fn measure_to_peer(session: &mut ProbeSession, limits: &RunLimits) -> Result<Vec<RailMeasurement>, Fault> {
    let local_rails = local_interfaces(ProbeTransport::Rdma, session.local().ip())?;
    let peer_rails = session.fetch_interfaces(ProbeTransport::Rdma)?;
    Ok(local_rails
        .iter()
        .map(|rail| {
            let names = [rail.interface.clone()];
            let paths = choose_paths(Some(&names), &local_rails, &peer_rails);
            let result = paths
                .map_err(|why| Fault::missing(why, "see both ends with: spurline net list"))
                .and_then(|paths| measure_path(session, &rail.interface, paths, limits));
            RailMeasurement { interface: rail.interface.clone(), result }
        })
        .collect())
}

/// Measures each rail of this pod to itself.
///
/// # Errors
/// When the server in this process can't listen at the rails' addresses.
pub fn measure_loopback(limits: &RunLimits) -> Result<Vec<RailMeasurement>, Fault> {
    let local_rails = local_interfaces(ProbeTransport::Rdma, IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    if local_rails.is_empty() {
        return Ok(Vec::new());
    }
    let trust = Trust::new(&group::hostname(), None)?;
    // An RDMA connection is accepted at the address of the control connection, so not on loopback.
    let server = ProbeServer::start(ServeConfig {
        addresses: local_rails.iter().map(|rail| rail.address).collect(),
        port: 0,
        patience: limits.patience,
        max_connections: MAX_VERIFY_CONNECTIONS,
        trust: Arc::clone(&trust),
        facts: None,
        on_event: Box::new(|_| {}),
    })?;
    Ok(local_rails
        .iter()
        .map(|rail| {
            let at = server.addresses().iter().find(|at| at.ip() == rail.address);
            let peer = at.map(ToString::to_string).unwrap_or_default();
            let config =
                ConnectConfig { peer, from: vec![rail.address], timeout: limits.patience, trust: Arc::clone(&trust) };
            let path = PathPlan { from: rail.address, to: rail.address };
            let result = ProbeSession::connect(&config)
                .and_then(|mut session| measure_path(&mut session, &rail.interface, vec![path], limits));
            RailMeasurement { interface: rail.interface.clone(), result }
        })
        .collect())
}

fn measure_path(
    session: &mut ProbeSession,
    interface: &str,
    paths: Vec<PathPlan>,
    limits: &RunLimits,
) -> Result<RailFigures, Fault> {
    let never = AtomicBool::new(false);
    let plan = ProbePlan {
        transport: ProbeTransport::Rdma,
        streams: vec![ProbeOp::Read; 2 * paths.len().max(1)],
        paths,
        ..ProbePlan::default()
    };
    let bandwidth = run_measurement(session, &plan, limits, &never, &mut |_| {})?;
    if let Some(why) = bandwidth.error {
        return Err(Fault::failed(
            why,
            "`spurline net bw` and `spurline net doctor` find the cause; a busy peer may need a longer --timeout",
        ));
    }
    let rates = byte_rates(&bandwidth);
    let plan = ProbePlan { size: LATENCY_BYTES, depth: 1, streams: vec![ProbeOp::PingPong], ..plan };
    let latency = run_measurement(session, &plan, limits, &never, &mut |_| {})?;
    if let Some(why) = latency.error {
        return Err(Fault::failed(
            why,
            "`spurline net lat` and `spurline net doctor` find the cause; a busy peer may need a longer --timeout",
        ));
    }
    let times = latency.measured.times.iter().map(|(_, times)| times).find(|times| times.count() > 0);
    // perftest reports half a round trip, and so does this.
    Ok(RailFigures {
        interface: interface.to_owned(),
        gbps: (rates.read + rates.write) * 8.0 / 1e9,
        rate_gbps: None,
        min_us: half(times.map(|t| t.min_us())),
        median_us: half(times.map(|t| t.quantile_us(0.5))),
        p99_us: half(times.map(|t| t.quantile_us(0.99))),
        stdev_us: half(times.map(|t| t.deviation_us())),
    })
}

fn half(value: Option<f64>) -> Option<f64> {
    value.map(|us| us / 2.0)
}
