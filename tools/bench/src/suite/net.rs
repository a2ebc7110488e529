//! `spurline net bw` and `net lat` over a veth pair between two network namespaces, against iperf3 and the bare
//! reader between the same two: rate, and processor time of both ends per byte.

use super::section::SuiteSection;
use super::setup::{BenchSuite, FioLoad, optional};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::iperf;
use crate::measure::{BenchCase, CaseSample, CeilingFloor, CeilingSpec, FigureUnit, best_of};
use crate::netns::NamespacePair;
use crate::part::{BlockPart, BlockWire};
use serde_json::Value;
use std::time::Duration;

const PROBE_PORT: u16 = 7111;
const NET_BARE_PORT: u16 = 7112;
const ECHO_LOAD: FioLoad = FioLoad::random("64 B there and back", 64, 1, 0.9);

/// A transfer pattern, the same for all programs.
struct NetLoad {
    name: &'static str,
    streams: usize,
    read: bool,
}

const NET_LOADS: [NetLoad; 4] = [
    NetLoad { name: "read, 1 stream", streams: 1, read: true },
    NetLoad { name: "read, 4 streams", streams: 4, read: true },
    NetLoad { name: "write, 1 stream", streams: 1, read: false },
    NetLoad { name: "write, 4 streams", streams: 4, read: false },
];

/// The programs; `system` is the host's congestion control, iperf3's default.
const IPERF_PROGRAMS: [(&str, &str, &[&str]); 2] =
    [("iperf3", "iperf3", &[]), ("iperf3-cubic-1m", "iperf3 -C cubic -l 1M", &["-C", "cubic", "-l", "1M"])];
const PROBE_PROGRAMS: [(&str, &str, &str, &[CeilingSpec]); 2] = [
    ("own", "net bw", "auto", &[best_of("of iperf3", &["iperf3", "iperf3-cubic-1m"], CeilingFloor::At(1.0))]),
    (
        "own-system",
        "net bw --tcp-congestion system",
        "system",
        // The same congestion control as plain iperf3.
        &[best_of("of iperf3", &["iperf3"], CeilingFloor::None)],
    ),
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let pair = &NamespacePair::new()?;
    let mut notes = Vec::new();
    let mut serve = child::command_in(suite.memory.spurline()?, Some(&pair.server));
    serve.args(["net", "serve", "--json", "--bind", pair.server_ip, "--port", &PROBE_PORT.to_string()]);
    let limit = Duration::from_secs(30);
    let log = suite.memory.log("net-serve")?;
    let server = &ServerProcess::start_announcing(serve, &["{"], "net serve", &log, limit)?.0;
    let iperf = iperf::start_server(&pair.server, pair.server_ip, &suite.memory.log("net-iperf3")?);
    let iperf = optional(&mut notes, "iperf3", iperf)?;
    let bare = suite.serve_blocks(pair.server_address(NET_BARE_PORT), BlockWire::Bare, &pair.server)?;
    let mut cases = Vec::new();
    for load in &NET_LOADS {
        for (variant, label, more) in IPERF_PROGRAMS {
            let Some(daemon) = &iperf else { break };
            cases.push(BenchCase::new(load.name, variant, label, FigureUnit::Bandwidth, move || {
                let before = daemon.cpu()?;
                let (got, used) =
                    iperf::run_client(&pair.client, pair.server_ip, load.streams, load.read, suite.time, more)?;
                let cpu = vec![("client", used), ("server", daemon.cpu()? - before)];
                Ok(CaseSample { value: got.bandwidth, bytes: got.bytes, ops: 0, cpu, latency_us: None })
            }));
        }
        for (variant, label, congestion, ceilings) in PROBE_PROGRAMS {
            let case = BenchCase::new(load.name, variant, label, FigureUnit::Bandwidth, move || {
                probe_rate(suite, pair, load, congestion, server)
            });
            cases.push(case.below(ceilings));
        }
    }
    let part = BlockPart { addr: pair.server_address(NET_BARE_PORT), bytes: 64 << 20, ..BlockPart::default() };
    cases.push(suite.block_case(&ECHO_LOAD, "bare", "bare reader, 64 B", part, &pair.client, ("server", &bare)));
    let lat = BenchCase::new(ECHO_LOAD.name, "own", "net lat", FigureUnit::Rate, move || {
        let time = format!("{}ms", suite.time.as_millis());
        let (said, cpu) = run_net(suite, pair, server, "lat", &["--size", "64B", "--time", &time])?;
        let ops = number_of(&said["operations"]);
        let latency_us = Some((number_of(&said["echo_us"]["p50"]), number_of(&said["echo_us"]["p99"])));
        let value = ops / number_of(&said["seconds"]).max(1e-9);
        Ok(CaseSample { value, bytes: 0, ops: ops as u64, cpu, latency_us })
    });
    cases.push(lat.against("of bare", &["bare"], Some(ECHO_LOAD.floor)));
    notes.push("net bw takes cubic where the host's own congestion control is BBR, as mounts and nodes do.".into());
    let title =
        "Point-to-point measurements over veth between two network namespaces, `net bw` and `net lat` beside iperf3.";
    suite.measure("net", title, cases, notes)
}

fn number_of(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn probe_rate(
    suite: &BenchSuite,
    pair: &NamespacePair,
    load: &NetLoad,
    congestion: &str,
    server: &ServerProcess,
) -> Result<CaseSample> {
    let streams = load.streams.to_string();
    let time = format!("{}ms", suite.time.as_millis().max(1000));
    let direction = if load.read { "read" } else { "write" };
    let words = ["--streams", &streams, "--direction", direction, "--time", &time, "--tcp-congestion", congestion];
    let (said, cpu) = run_net(suite, pair, server, "bw", &words)?;
    let value = number_of(&said["read_bytes_per_second"]) + number_of(&said["write_bytes_per_second"]);
    let bytes = (number_of(&said["read_bytes"]) + number_of(&said["write_bytes"])) as u64;
    Ok(CaseSample { value, bytes, ops: number_of(&said["operations"]) as u64, cpu, latency_us: None })
}

/// `spurline net …` with the JSON and the processor seconds of both ends.
fn run_net(
    suite: &BenchSuite,
    pair: &NamespacePair,
    server: &ServerProcess,
    kind: &str,
    words: &[&str],
) -> Result<(Value, Vec<(&'static str, f64)>)> {
    let before = server.cpu()?;
    let mut command = child::command_in(suite.memory.spurline()?, Some(&pair.client));
    command.arg("net").arg(kind).arg(format!("{}:{PROBE_PORT}", pair.server_ip)).args(words).arg("--json");
    let done = child::run_to_end(command, suite.time * 3 + Duration::from_secs(60))?;
    let said: Value =
        serde_json::from_str(&done.out).map_err(|e| BenchError::Failed(format!("net printed {:?}: {e}", done.out)))?;
    match said["error"].as_str() {
        Some(error) => Err(BenchError::Failed(format!("net: {error}"))),
        None => Ok((said, vec![("client", done.cpu), ("server", server.cpu()? - before)])),
    }
}
