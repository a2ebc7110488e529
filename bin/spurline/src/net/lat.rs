//! `spurline net lat`: measures the round-trip time of a message.

use super::bw::{op_word, times_line, to_json};
use super::causes;
use super::peer::{
    CarrierKind, DIM, HEAD, PeerArgs, RailsArgs, end_text, interrupt_flag, judgement_json, print_verdict, progress_line,
};
use clap::{Args, ValueEnum};
use spurline_config::Fault;
use spurline_probe::client::ProbeSession;
use spurline_probe::drive::RunLimits;
use spurline_probe::judge::{self, ProbeVerdict};
use spurline_probe::measure::{self, ProbeOutcome};
use spurline_probe::message::{ProbeOp, ProbePlan};
use spurline_types::units::human_bytes;
use spurline_types::{Size, parse_duration};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The RDMA operation that moves the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LatVerb {
    /// WRITE into the other end's memory and back, with both ends polling
    Write,
    /// READ from the other end's memory, without its processor
    Read,
    /// SEND: a message each way; both ends sleep during long waits
    Send,
}

/// The arguments of `net lat`.
#[derive(Debug, Args)]
pub struct LatArgs {
    /// The other end.
    #[command(flatten)]
    pub peer: PeerArgs,
    /// The interfaces, measured one after another.
    #[command(flatten)]
    pub over: RailsArgs,
    /// RDMA operation that moves the data [default: write]
    #[arg(long, value_name = "VERB")]
    pub verb: Option<LatVerb>,
    /// Bytes sent each way
    #[arg(short = 'l', long, value_name = "SIZE", default_value = "64B")]
    pub size: Size,
    /// Length of the measurement
    #[arg(short, long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub time: Duration,
    /// Number of round trips, instead of a time
    #[arg(short = 'n', long, value_name = "N")]
    pub count: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// When an argument is wrong, or the other end can't be reached.
pub fn run(args: LatArgs) -> Result<ExitCode, Fault> {
    let op = match (args.peer.transport, args.verb) {
        (CarrierKind::Tcp, Some(_)) => {
            return Err(Fault::usage("--verb: tcp has no verbs", "add --transport rdma, or leave --verb out"));
        }
        (CarrierKind::Tcp, None) | (CarrierKind::Rdma, Some(LatVerb::Send)) => ProbeOp::Echo,
        (CarrierKind::Rdma, Some(LatVerb::Read)) => ProbeOp::Fetch,
        (CarrierKind::Rdma, Some(LatVerb::Write) | None) => ProbeOp::PingPong,
    };
    let plan = ProbePlan {
        size: args.size.bytes(),
        depth: 1,
        streams: vec![op],
        congestion: args.peer.tcp_congestion,
        transport: args.peer.transport.into(),
        ..ProbePlan::default()
    };
    plan.check_bounds().map_err(|e| Fault::usage(e.message(), "see --size"))?;
    let raised = interrupt_flag()?;
    let mut session = args.peer.connect_probe()?;
    let paths = args.over.plan_paths(&mut session, plan.transport)?;
    let plans: Vec<ProbePlan> = if paths.is_empty() {
        vec![plan]
    } else {
        paths.into_iter().map(|path| ProbePlan { paths: vec![path], ..plan.clone() }).collect()
    };
    let mut done = Vec::new();
    for plan in &plans {
        let outcome = measure_one(&args, &mut session, plan, &raised)?;
        let mut judgement = judge::judge_latency(&outcome);
        causes::add_findings(&mut judgement, &mut session, &outcome);
        let over = outcome.measured.interrupted || outcome.error.is_some();
        if !args.peer.json {
            result_text(&session, &outcome, op_word(op));
        }
        done.push((outcome, judgement));
        if over {
            break;
        }
    }
    // The worst verdict; of equal verdicts that of the slowest path.
    let worst = done.iter().max_by(|(a, x), (b, y)| {
        x.level.severity().cmp(&y.level.severity()).then(slowest_median(a).total_cmp(&slowest_median(b)))
    });
    let Some((outcome, judgement)) = worst else { return Err(Fault::failed("nothing was measured", "")) };
    if args.peer.json {
        let of = |(outcome, judgement): (&ProbeOutcome, &ProbeVerdict)| {
            let mut all = to_json(&session, outcome, "lat");
            all["judgement"] = judgement_json(judgement);
            all
        };
        let mut all = of((outcome, judgement));
        if args.over.rails.is_some() {
            all["rails"] = done.iter().map(|(o, j)| of((o, j))).collect();
        }
        anstream::println!("{all:#}");
    }
    Ok(print_verdict(judgement, args.peer.json))
}

fn slowest_median(outcome: &ProbeOutcome) -> f64 {
    outcome.measured.times.iter().map(|(_, t)| t.quantile_us(0.5)).fold(0.0, f64::max)
}

/// Measures over a path.
fn measure_one(
    args: &LatArgs,
    session: &mut ProbeSession,
    plan: &ProbePlan,
    raised: &AtomicBool,
) -> Result<ProbeOutcome, Fault> {
    let limits = RunLimits { time: args.time, ops: args.count, patience: args.peer.timeout, pause: Duration::ZERO };
    let live = progress_line(args.peer.json);
    let outcome = measure::run_measurement(session, plan, &limits, raised, &mut |now| {
        live.set_message(format!("{:.1} s   {} round trips", now.elapsed.as_secs_f64(), now.ops));
        live.tick();
    });
    live.finish_and_clear();
    outcome
}

/// The result of a path as text.
fn result_text(session: &ProbeSession, outcome: &ProbeOutcome, op: &str) {
    let plan = &outcome.plan;
    let there = outcome.report.as_ref().map_or(&session.welcome.link, |r| &r.link);
    anstream::println!("from {}", end_text(&outcome.link));
    anstream::println!("to   {}, {}", end_text(there), session.welcome.host);
    anstream::println!(
        "{HEAD}{} round trip over {}{HEAD:#} ({}), {} times in {:.1} s",
        human_bytes(plan.size),
        plan.transport.name(),
        op,
        outcome.measured.total.ops,
        outcome.measured.elapsed.as_secs_f64()
    );
    for (_, times) in outcome.measured.times.iter().filter(|(_, times)| times.count() > 0) {
        anstream::println!("shortest {}, {}", judge::format_micros(times.min_us()), times_line(times));
        let [mean, deviation] = [times.mean_us(), times.deviation_us()].map(judge::format_micros);
        anstream::println!("mean {mean}, standard deviation {deviation}");
    }
    let cpu = |seconds: f64| judge::format_micros(seconds * 1e6 / outcome.measured.total.ops.max(1) as f64);
    let peer_cpu = outcome.report.as_ref().map_or("unknown".into(), |r| cpu(r.cpu_seconds));
    anstream::println!("{DIM}CPU{DIM:#} {} each here, {peer_cpu} there", cpu(outcome.measured.cpu_seconds));
}
