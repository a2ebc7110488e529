//! `spurline net bw` and `net lat` over a veth pair between two network namespaces, against iperf3 and the bare
//! reader between the same two: rate, and processor time of both ends per byte.

use super::BenchSuite;
use super::section::SuiteSection;
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::iperf;
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::netns::NamespacePair;
use serde_json::Value;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const PROBE_PORT: u16 = 7111;

/// A transfer pattern, the same for all programs.
struct NetLoad {
    name: &'static str,
    cpu: &'static str,
    streams: usize,
    read: bool,
}

const NET_LOADS: [NetLoad; 4] = [
    NetLoad { name: "read, 1 stream", cpu: "CPU-s/GiB of both ends, read, 1 stream", streams: 1, read: true },
    NetLoad { name: "read, 4 streams", cpu: "CPU-s/GiB of both ends, read, 4 streams", streams: 4, read: true },
    NetLoad { name: "write, 1 stream", cpu: "CPU-s/GiB of both ends, write, 1 stream", streams: 1, read: false },
    NetLoad { name: "write, 4 streams", cpu: "CPU-s/GiB of both ends, write, 4 streams", streams: 4, read: false },
];

/// The programs; `system` is the host's congestion control, iperf3's default.
const IPERF_PROGRAMS: [(&str, &str, &[&str]); 2] =
    [("iperf3", "iperf3", &[]), ("iperf3-cubic-1m", "iperf3 -C cubic -l 1M", &["-C", "cubic", "-l", "1M"])];
const PROBE_PROGRAMS: [(&str, &str, &str); 2] =
    [("own", "net bw", "auto"), ("own-system", "net bw --tcp-congestion system", "system")];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let pair = NamespacePair::new()?;
    let client = pair.client.as_str();
    let mut notes = Vec::new();
    let peer = format!("{}:{PROBE_PORT}", pair.server_ip);
    let mut serve = child::command_in(&suite.spurline, Some(&pair.server));
    serve.args(["net", "serve", "--json", "--bind", pair.server_ip, "--port", &PROBE_PORT.to_string()]);
    let limit = Duration::from_secs(30);
    let (server, _) =
        ServerProcess::start_announcing(serve, &["{"], "net serve", &suite.log_path("net-serve")?, limit)?;
    let iperf = iperf::start_server(&pair.server, pair.server_ip, &suite.log_path("net-iperf3")?);
    if let Err(e) = &iperf {
        notes.push(format!("No iperf3: {e}"));
    }
    let words = ["bare-serve", &format!("{}:7112", pair.server_ip), "--size", "64M"].map(String::from);
    let bare = suite.part_command(&words, Some(&pair.server));
    let (bare, _) =
        ServerProcess::start_announcing(bare, &["ready"], "bare-serve", &suite.log_path("net-bare")?, limit)?;
    let mut cases = Vec::new();
    // Processor time is a separate row, with the figures of the previous run in the same round.
    let mut costs = Vec::new();
    for load in &NET_LOADS {
        let mut add = |(case, cost)| {
            cases.push(case);
            costs.push(cost);
        };
        if let Ok(daemon) = &iperf {
            for (variant, label, more) in IPERF_PROGRAMS {
                let ip = pair.server_ip;
                let time = suite.time;
                add(both_directions(load, variant, label, move || {
                    let before = daemon.cpu()?;
                    let (got, used) = iperf::run_client(client, ip, load.streams, load.read, time, more)?;
                    let cpu = vec![("client", used), ("server", daemon.cpu()? - before)];
                    Ok(CaseSample { value: got.bandwidth, bytes: got.bytes, ops: 0, cpu, latency_us: None })
                }));
            }
        }
        for (variant, label, congestion) in PROBE_PROGRAMS {
            let streams = load.streams.to_string();
            let time = format!("{}ms", suite.time.as_millis().max(1000));
            let way = if load.read { "read" } else { "write" };
            let words = ["bw", &peer, "--streams", &streams, "--direction", way, "--time", &time];
            let words = [&words[..], &["--tcp-congestion", congestion, "--json"]].concat();
            let words: Vec<String> = words.into_iter().map(String::from).collect();
            let server = &server;
            add(both_directions(load, variant, label, move || {
                let before = server.cpu()?;
                let (said, used) = run_net(suite, client, &words)?;
                Ok(CaseSample {
                    value: number_in(&said, "read_bytes_per_second") + number_in(&said, "write_bytes_per_second"),
                    bytes: (number_in(&said, "read_bytes") + number_in(&said, "write_bytes")) as u64,
                    ops: number_in(&said, "operations") as u64,
                    cpu: vec![("client", used), ("server", server.cpu()? - before)],
                    latency_us: None,
                })
            }));
        }
    }
    cases.extend(costs);
    let time = format!("{}ms", suite.time.as_millis());
    let words = ["bare-read", &format!("{}:7112", pair.server_ip), "--block", "64B", "--size", "64M", "--time", &time];
    let words = words.map(String::from);
    let around = "64 B there and back";
    let bare = &bare;
    cases.push(BenchCase::new(around, "bare", "bare reader, 64 B", FigureUnit::Rate, move || {
        super::part_sample(
            suite.part_command(&words, Some(client)),
            suite.time * 3 + limit,
            FigureUnit::Rate,
            &[("server", bare)],
        )
    }));
    let words = ["lat", &peer, "--size", "64B", "--time", &time, "--json"].map(String::from);
    let server = &server;
    let lat = BenchCase::new(around, "own", "net lat", FigureUnit::Rate, move || {
        let before = server.cpu()?;
        let (said, used) = run_net(suite, client, &words)?;
        let ops = number_of(&said["operations"]);
        let seconds = number_of(&said["seconds"]);
        let cpu = vec![("client", used), ("server", server.cpu()? - before)];
        let latency_us = Some((number_of(&said["echo_us"]["p50"]), number_of(&said["echo_us"]["p99"])));
        Ok(CaseSample { value: ops / seconds.max(1e-9), bytes: 0, ops: ops as u64, cpu, latency_us })
    });
    cases.push(lat.against("of bare", &["bare"], Some(0.9)));
    let rows = suite.rounds("net", cases)?;
    notes.push(
        "CPU-s/GiB rows are seconds of both ends together for one GiB, of the runs above; less is better.".into(),
    );
    notes.push("net bw takes cubic where the host's own congestion control is BBR, as mounts and nodes do.".into());
    let title =
        "Point-to-point measurements over veth between two network namespaces, `net bw` and `net lat` beside iperf3.";
    Ok(SuiteSection { name: "net", title, skipped: None, notes, rows })
}

fn number_in(json: &Value, key: &str) -> f64 {
    json[key].as_f64().unwrap_or(0.0)
}

fn number_of(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

/// A run as two cases: the rate, and the processor time of both ends per GiB.
fn both_directions<'a>(
    load: &NetLoad,
    variant: &str,
    label: &str,
    mut take: impl FnMut() -> Result<CaseSample> + 'a,
) -> (BenchCase<'a>, BenchCase<'a>) {
    let spent = Rc::new(Cell::new(None));
    let seen = Rc::clone(&spent);
    let rate = BenchCase::new(load.name, variant, label, FigureUnit::Bandwidth, move || {
        let sample = take()?;
        let seconds: f64 = sample.cpu.iter().map(|(_, seconds)| seconds).sum();
        seen.set(Some(seconds / (sample.bytes.max(1) as f64 / f64::from(1u32 << 30))));
        Ok(sample)
    });
    let cost = BenchCase::new(load.cpu, variant, label, FigureUnit::Time, move || {
        let value = spent.take().ok_or_else(|| BenchError::Failed("the run it belongs to failed".into()))?;
        Ok(CaseSample { value, ..CaseSample::default() })
    });
    let all = IPERF_PROGRAMS.map(|(id, _, _)| id);
    match variant {
        "own" => (rate.against("of iperf3", &all, Some(1.0)), cost.against("of iperf3", &all, Some(1.0))),
        // The same congestion control as plain iperf3.
        "own-system" => (rate.against("of iperf3", &all[..1], None), cost.against("of iperf3", &all[..1], None)),
        _ => (rate, cost),
    }
}

/// `spurline net …` with the JSON and the processor seconds.
fn run_net(suite: &BenchSuite, client: &str, words: &[String]) -> Result<(Value, f64)> {
    let mut command = child::command_in(&suite.spurline, Some(client));
    command.arg("net").args(words);
    let done = child::run_to_end(command, suite.time * 3 + Duration::from_secs(60))?;
    let said: Value =
        serde_json::from_str(&done.out).map_err(|e| BenchError::Failed(format!("net printed {:?}: {e}", done.out)))?;
    match said["error"].as_str() {
        Some(error) => Err(BenchError::Failed(format!("net: {error}"))),
        None => Ok((said, done.cpu)),
    }
}
