//! `spurline net lat`: how long one message takes there and back.

use super::bw::{op_word, times_line, to_json};
use super::causes;
use super::peer::{Carrier, DIM, HEAD, PeerArgs, RailsArgs, conclude, end, interrupt, judgement_json, line};
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

/// What carries the bytes over rdma.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LatVerb {
    /// WRITE into the other end's memory and back into this one's, both ends looking at it all the time
    Write,
    /// READ of the other end's memory, whose program has no part in it
    Read,
    /// SEND: a message there and one back, both ends asleep where waiting is long
    Send,
}

/// What `net lat` is told.
#[derive(Debug, Args)]
pub struct LatArgs {
    /// The other end.
    #[command(flatten)]
    pub peer: PeerArgs,
    /// Over which interfaces, one after the other.
    #[command(flatten)]
    pub over: RailsArgs,
    /// What carries the bytes over rdma [default: write]
    #[arg(long, value_name = "VERB")]
    pub verb: Option<LatVerb>,
    /// Bytes there and as many back
    #[arg(short = 'l', long, value_name = "SIZE", default_value = "64")]
    pub size: Size,
    /// How long
    #[arg(short, long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub time: Duration,
    /// Or how many
    #[arg(short = 'n', long, value_name = "N")]
    pub count: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// When the words are wrong, or the other end can't be called.
pub fn run(args: LatArgs) -> Result<ExitCode, Fault> {
    let op = match (args.peer.transport, args.verb) {
        (Carrier::Tcp, Some(_)) => {
            return Err(Fault::usage("--verb: tcp has no verbs", "add --transport rdma, or leave --verb out"));
        }
        (Carrier::Tcp, None) | (Carrier::Rdma, Some(LatVerb::Send)) => ProbeOp::Echo,
        (Carrier::Rdma, Some(LatVerb::Read)) => ProbeOp::Fetch,
        (Carrier::Rdma, Some(LatVerb::Write) | None) => ProbeOp::PingPong,
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
    let raised = interrupt()?;
    let mut session = args.peer.connect()?;
    let paths = args.over.paths(&mut session, plan.transport)?;
    let plans: Vec<ProbePlan> = match paths.is_empty() {
        true => vec![plan],
        false => paths.into_iter().map(|path| ProbePlan { paths: vec![path], ..plan.clone() }).collect(),
    };
    let mut done = Vec::new();
    for plan in &plans {
        let outcome = one(&args, &mut session, plan, &raised)?;
        let mut judgement = judge::judge_latency(&outcome);
        causes::name(&mut judgement, &mut session, &outcome);
        let over = outcome.measured.interrupted || outcome.error.is_some();
        if !args.peer.json {
            show(&session, &outcome, op_word(op));
        }
        done.push((outcome, judgement));
        if over {
            break;
        }
    }
    // The worst speaks for all; of equals the slowest.
    let slow =
        |outcome: &ProbeOutcome| outcome.measured.times.iter().map(|(_, t)| t.quantile_us(0.5)).fold(0.0, f64::max);
    let worst = done
        .iter()
        .max_by(|(a, x), (b, y)| x.level.severity().cmp(&y.level.severity()).then(slow(a).total_cmp(&slow(b))));
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
    Ok(conclude(judgement, args.peer.json))
}

/// Measures over one path.
fn one(
    args: &LatArgs,
    session: &mut ProbeSession,
    plan: &ProbePlan,
    raised: &AtomicBool,
) -> Result<ProbeOutcome, Fault> {
    let limits = RunLimits { time: args.time, ops: args.count, patience: args.peer.timeout, pause: Duration::ZERO };
    let live = line(args.peer.json);
    let outcome = measure::run_measurement(session, plan, &limits, raised, &mut |now| {
        live.set_message(format!("{:.1} s   {} round trips", now.elapsed.as_secs_f64(), now.ops));
        live.tick();
    });
    live.finish_and_clear();
    outcome
}

/// What one path came to, for a person.
fn show(session: &ProbeSession, outcome: &ProbeOutcome, op: &str) {
    let plan = &outcome.plan;
    let there = outcome.report.as_ref().map_or(&session.welcome.link, |r| &r.link);
    anstream::println!("from {}", end(&outcome.link));
    anstream::println!("to   {}, {}", end(there), session.welcome.host);
    anstream::println!(
        "{HEAD}{} there and back over {}{HEAD:#} ({}), {} times in {:.1} s",
        human_bytes(plan.size),
        plan.transport.name(),
        op,
        outcome.measured.total.ops,
        outcome.measured.elapsed.as_secs_f64()
    );
    for (_, times) in outcome.measured.times.iter().filter(|(_, times)| times.count() > 0) {
        anstream::println!("shortest {}, {}", judge::format_micros(times.min_us()), times_line(times));
    }
    let cpu = |seconds: f64| judge::format_micros(seconds * 1e6 / outcome.measured.total.ops.max(1) as f64);
    let theirs = outcome.report.as_ref().map_or("unknown".into(), |r| cpu(r.cpu_seconds));
    anstream::println!("{DIM}CPU{DIM:#} {} each here, {theirs} there", cpu(outcome.measured.cpu_seconds));
}
