//! `spurline net bw`: measures throughput and the cost on both ends, and judges the result.

use super::causes;
use super::peer::{
    CarrierKind, DIM, HEAD, PeerArgs, RailsArgs, end_text, gigabits_text, interrupt_flag, judgement_json, peer_json,
    print_verdict, progress_line,
};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_probe::client::ProbeSession;
use spurline_probe::drive::{LatencyTimes, RunLimits, RunProgress};
use spurline_probe::judge;
use spurline_probe::measure::{self, ProbeOutcome};
use spurline_probe::message::{MAX_DEPTH, ProbeOp, ProbePlan};
use spurline_types::units::human_bytes;
use spurline_types::{Size, parse_duration};
use std::process::ExitCode;
use std::time::Duration;

const BYTES_PER_GIB: f64 = (1u32 << 30) as f64;
/// Default length of a measurement.
const DEFAULT_MEASUREMENT_TIME: Duration = Duration::from_secs(10);
/// Time limit of a measurement by bytes; a stream that stalls fails earlier, by `--timeout`.
const BYTE_MEASUREMENT_LIMIT: Duration = Duration::from_secs(7 * 86_400);

/// Direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BwDirection {
    /// From the other end to this one
    Read,
    /// From this end to the other
    Write,
    /// Both directions at once, with as many streams each
    Both,
}

impl BwDirection {
    fn name(self) -> &'static str {
        match self {
            BwDirection::Read => "read",
            BwDirection::Write => "write",
            BwDirection::Both => "both",
        }
    }
}

/// The RDMA operation that moves the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BwVerb {
    /// WRITE into the reader's memory, requested by a small message, as between a mount and a node
    Write,
    /// READ from the other end's memory, without its processor
    Read,
    /// SEND: messages, received one after another
    Send,
}

/// The arguments of `net bw`.
#[derive(Debug, Args)]
pub struct BwArgs {
    /// The other end.
    #[command(flatten)]
    pub peer: PeerArgs,
    /// The interfaces.
    #[command(flatten)]
    pub over: RailsArgs,
    /// Direction of the data
    #[arg(short, long, value_name = "WAY", default_value = "read")]
    pub direction: BwDirection,
    /// Connections, with one thread each on both ends
    #[arg(short = 'P', long, value_name = "N", default_value_t = 4)]
    pub streams: usize,
    /// Bytes of one operation
    #[arg(short = 'l', long, value_name = "SIZE", default_value = "1M")]
    pub size: Size,
    /// Operations in flight on each stream
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub depth: u32,
    /// RDMA operation that moves the data [default: write]
    #[arg(long, value_name = "VERB")]
    pub verb: Option<BwVerb>,
    /// Length of the measurement [default: 10s, with --bytes until all are transferred]
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration)]
    pub time: Option<Duration>,
    /// Bytes to transfer, rounded up to whole operations
    #[arg(short = 'n', long, value_name = "SIZE")]
    pub bytes: Option<Size>,
    /// Drop received bytes in the kernel (MSG_TRUNC) instead of copying them to memory: measures the network without
    /// the receiver's copy, and says so
    #[arg(long)]
    pub discard: bool,
}

/// Runs the command.
///
/// # Errors
/// When an argument is wrong, or the other end can't be reached.
pub fn run(args: BwArgs) -> Result<ExitCode, Fault> {
    let mut plan = bandwidth_plan(&args, args.streams)?;
    let raised = interrupt_flag()?;
    let mut session = args.peer.connect_probe()?;
    let paths = args.over.plan_paths(&mut session, plan.transport)?;
    if !paths.is_empty() {
        // The same number of streams on each path.
        plan = ProbePlan {
            paths: paths.clone(),
            ..self::bandwidth_plan(&args, args.streams.next_multiple_of(paths.len()))?
        };
    }
    let limits = RunLimits {
        time: args.time.unwrap_or(if args.bytes.is_some() { BYTE_MEASUREMENT_LIMIT } else { DEFAULT_MEASUREMENT_TIME }),
        ops: args.bytes.map(|bytes| bytes.bytes().div_ceil(plan.size)),
        patience: args.peer.timeout,
        pause: Duration::ZERO,
    };
    let live = progress_line(args.peer.json);
    let mut last = RunProgress::default();
    let outcome = measure::run_measurement(&mut session, &plan, &limits, &raised, &mut |now| {
        let since = now.elapsed.saturating_sub(last.elapsed).as_secs_f64();
        if since >= 0.2 {
            let mut words = format!("{:.1} s", now.elapsed.as_secs_f64());
            for (word, now, last) in
                [("read", now.read_bytes, last.read_bytes), ("written", now.write_bytes, last.write_bytes)]
            {
                if now > 0 {
                    let rate = now.saturating_sub(last) as f64 / since / 1e9;
                    words.push_str(&format!("   {word} {} ({rate:.2} GB/s)", human_bytes(now)));
                }
            }
            live.set_message(words);
            live.tick();
            last = *now;
        }
    });
    live.finish_and_clear();
    let outcome = outcome?;
    let mut judgement = judge::judge_bandwidth(&outcome);
    causes::add_findings(&mut judgement, &mut session, &outcome);
    if args.peer.json {
        let mut all = to_json(&session, &outcome, "bw");
        all["direction"] = json!(args.direction.name());
        all["judgement"] = judgement_json(&judgement);
        anstream::println!("{all:#}");
    } else {
        result_text(&session, &outcome, args.direction);
    }
    Ok(print_verdict(&judgement, args.peer.json))
}

fn bandwidth_plan(args: &BwArgs, streams: usize) -> Result<ProbePlan, Fault> {
    let count = streams;
    let rdma = args.peer.transport == CarrierKind::Rdma;
    if args.verb.is_some() && !rdma {
        return Err(Fault::usage("--verb: tcp has no verbs", "add --transport rdma, or leave --verb out"));
    }
    let (read, write) = match args.verb.unwrap_or(BwVerb::Write) {
        BwVerb::Write => (ProbeOp::Read, ProbeOp::Write),
        BwVerb::Read if args.direction == BwDirection::Write => {
            let remedy = "give --direction read, or both (READ one way, WRITE the other)";
            return Err(Fault::usage("--verb read moves bytes to this end", remedy));
        }
        BwVerb::Read => (ProbeOp::Fetch, ProbeOp::Write),
        BwVerb::Send => (ProbeOp::Receive, ProbeOp::Send),
    };
    let streams = match args.direction {
        BwDirection::Read => vec![read; count],
        BwDirection::Write => vec![write; count],
        BwDirection::Both => [vec![read; count], vec![write; count]].concat(),
    };
    let plan = ProbePlan {
        transport: args.peer.transport.into(),
        size: args.size.bytes(),
        depth: args.depth,
        streams,
        discard: args.discard,
        congestion: args.peer.tcp_congestion,
        paths: Vec::new(),
    };
    plan.check_bounds().map_err(|e| Fault::usage(e.message(), "see --size, --depth and --streams"))?;
    if args.time.is_some_and(|t| t.is_zero()) || args.bytes.is_some_and(|b| b.bytes() == 0) {
        return Err(Fault::usage("nothing can be measured in no time and no bytes", "give --time or --bytes more"));
    }
    Ok(plan)
}

/// Processor seconds per GiB transferred.
fn per_gib(seconds: f64, bytes: u64) -> Option<f64> {
    (bytes > 0).then(|| seconds / (bytes as f64 / BYTES_PER_GIB))
}

fn result_text(session: &ProbeSession, outcome: &ProbeOutcome, direction: BwDirection) {
    let plan = &outcome.plan;
    let measured = &outcome.measured;
    let there = outcome.report.as_ref().map_or(&session.welcome.link, |r| &r.link);
    if outcome.rails.is_empty() {
        anstream::println!("from {}", end_text(&outcome.link));
        anstream::println!("to   {}, {}", end_text(there), session.welcome.host);
    }
    for rail in &outcome.rails {
        let to = rail.peer.as_ref().map_or("the other end".to_owned(), end_text);
        let rate = (rail.read_bytes + rail.write_bytes) as f64 / measured.elapsed.as_secs_f64().max(1e-9);
        anstream::println!("{} to {to}: {:.3} GB/s", end_text(&rail.link), rate / 1e9);
    }
    let streams = plan.streams.len();
    let word = if streams == 1 { "stream" } else { "streams" };
    let discard = if plan.discard { "; received bytes were dropped in the kernel" } else { "" };
    let interrupted = if measured.interrupted { ", interrupted" } else { "" };
    anstream::println!(
        "{HEAD}{} over {}{HEAD:#}, {streams} {word}, {} x {} under way on each, {:.1} s{interrupted}{discard}",
        direction.name(),
        plan.transport.name(),
        plan.depth,
        human_bytes(plan.size),
        measured.elapsed.as_secs_f64()
    );
    let rates = judge::byte_rates(outcome);
    let port = judge::port_rate(outcome);
    for (word, rate, bytes) in
        [("read", rates.read, measured.total.read_bytes), ("write", rates.write, measured.total.write_bytes)]
    {
        if plan.streams.iter().any(|op| op.reads_server() == (word == "read")) {
            let share = match port {
                Some((bits, _)) if !outcome.rails.is_empty() => {
                    let count = outcome.rails.len();
                    format!("{:.0} % of {} of {count} interfaces", rate * 800.0 / bits as f64, gigabits_text(bits))
                }
                Some((bits, link)) => {
                    format!("{:.0} % of {} of {}", rate * 800.0 / bits as f64, gigabits_text(bits), link.interface)
                }
                None => "port rate unknown".into(),
            };
            let gigabytes = rate / 1e9;
            let gigabit = rate * 8.0 / 1e9;
            anstream::println!(
                "{word:<6} {gigabytes:.3} GB/s ({gigabit:.2} Gb/s), {share}  {DIM}{}{DIM:#}",
                human_bytes(bytes)
            );
        }
    }
    for (op, times) in measured.times.iter().filter(|(_, times)| times.count() > 0) {
        anstream::println!("{DIM}each {}{DIM:#} {}", op_word(*op), times_line(times));
    }
    let peer_cost =
        outcome.report.as_ref().map_or("unknown".into(), |r| cost_text(r.cpu_seconds, r.sent_bytes + r.received_bytes));
    anstream::println!(
        "{DIM}CPU{DIM:#}    {} s/GiB here, {peer_cost} s/GiB there",
        cost_text(measured.cpu_seconds, measured.moved_bytes)
    );
    if let Some(mine) = &measured.tcp {
        let there = outcome.report.as_ref().map(|r| &r.tcp);
        let retransmits = there.map_or("unknown".into(), |t| t.retransmits.to_string());
        let rtt = mine.rtt_us.max(there.map_or(0, |t| t.rtt_us));
        anstream::println!(
            "{DIM}TCP{DIM:#}    {}, {} retransmits here, {retransmits} there; round trip under load {}",
            mine.congestion,
            mine.retransmits,
            judge::format_micros(rtt as f64)
        );
    }
}

fn cost_text(seconds: f64, bytes: u64) -> String {
    per_gib(seconds, bytes).map_or("unknown".into(), |n| format!("{n:.3}"))
}

/// The name of an operation, in text and JSON.
pub(super) fn op_word(op: ProbeOp) -> &'static str {
    match op {
        ProbeOp::Read => "read",
        ProbeOp::Fetch => "rdma_read",
        ProbeOp::Receive => "receive",
        ProbeOp::Send => "send",
        ProbeOp::Write => "write",
        ProbeOp::Echo => "echo",
        ProbeOp::PingPong => "ping_pong",
    }
}

/// Percentiles as text.
pub(super) fn times_line(times: &LatencyTimes) -> String {
    let at = |share: f64| judge::format_micros(times.quantile_us(share));
    format!(
        "p50 {}, p90 {}, p99 {}, p99.9 {}, longest {}",
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999),
        judge::format_micros(times.max_us())
    )
}

/// Percentiles in microseconds.
pub(super) fn times_json(times: &LatencyTimes) -> Value {
    json!({
        "count": times.count(), "min": times.min_us(), "mean": times.mean_us(), "p50": times.quantile_us(0.5),
        "p90": times.quantile_us(0.9), "p99": times.quantile_us(0.99), "p999": times.quantile_us(0.999),
        "max": times.max_us(), "stdev": times.deviation_us(),
    })
}

/// The operations of a plan, each once.
fn plan_ops(plan: &ProbePlan) -> Vec<&'static str> {
    let mut words: Vec<&str> = plan.streams.iter().map(|op| op_word(*op)).collect();
    words.dedup();
    words
}

/// The outcome of a measurement as JSON; the names are stable.
pub(super) fn to_json(session: &ProbeSession, outcome: &ProbeOutcome, command: &str) -> Value {
    let plan = &outcome.plan;
    let measured = &outcome.measured;
    let report = outcome.report.as_ref();
    let rates = judge::byte_rates(outcome);
    let times = |ops: &[ProbeOp]| {
        measured.times.iter().find(|(o, t)| ops.contains(o) && t.count() > 0).map(|(_, t)| times_json(t))
    };
    let served = report.map(|r| r.sent_bytes + r.received_bytes);
    let seconds: Vec<Value> = measured
        .seconds
        .iter()
        .map(|p| json!({ "at": p.elapsed.as_secs_f64(), "read_bytes": p.read_bytes, "write_bytes": p.write_bytes }))
        .collect();
    let rails: Vec<Value> = outcome
        .rails
        .iter()
        .map(|rail| {
            let rate = |bytes: u64| bytes as f64 / measured.elapsed.as_secs_f64().max(1e-9);
            json!({
                "link": rail.link, "peer_link": rail.peer,
                "read_bytes": rail.read_bytes, "write_bytes": rail.write_bytes,
                "read_bytes_per_second": rate(rail.read_bytes), "write_bytes_per_second": rate(rail.write_bytes),
            })
        })
        .collect();
    json!({
        "command": command, "peer": peer_json(session), "transport": plan.transport.name(),
        "streams": plan.streams.len(), "size_bytes": plan.size, "depth": plan.depth, "discard": plan.discard,
        "seconds": measured.elapsed.as_secs_f64(), "operations": measured.total.ops,
        "read_bytes": measured.total.read_bytes, "write_bytes": measured.total.write_bytes,
        "read_bytes_per_second": rates.read, "write_bytes_per_second": rates.write,
        "port_bits_per_second": judge::port_rate(outcome).map(|(bits, _)| bits), "share": judge::port_share(outcome),
        "read_us": times(&[ProbeOp::Read, ProbeOp::Fetch, ProbeOp::Receive]), "write_us": times(&[ProbeOp::Write, ProbeOp::Send]),
        "echo_us": times(&[ProbeOp::Echo, ProbeOp::PingPong]),
        "operations_are": plan_ops(plan),
        "cpu": {
            "client_seconds": measured.cpu_seconds, "server_seconds": report.map(|r| r.cpu_seconds),
            "client_seconds_per_gib": per_gib(measured.cpu_seconds, measured.moved_bytes),
            "server_seconds_per_gib": report.zip(served).and_then(|(r, bytes)| per_gib(r.cpu_seconds, bytes)),
        },
        "tcp": { "client": measured.tcp, "server": report.map(|r| &r.tcp) },
        "link": outcome.link, "peer_link": report.map_or(&session.welcome.link, |r| &r.link),
        "rails": rails,
        "same_host": outcome.same_host, "shared_with": report.map(|r| r.shared_with), "each_second": seconds,
        "interrupted": measured.interrupted, "error": outcome.error,
    })
}
