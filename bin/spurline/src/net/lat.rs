//! `spurline net lat`: how long one message takes there and back.

use super::bw::{times_line, to_json};
use super::peer::{DIM, HEAD, PeerArgs, conclude, end, interrupt, judgement_json, line};
use clap::Args;
use spurline_config::Fault;
use spurline_probe::drive::Limits;
use spurline_probe::judge;
use spurline_probe::measure;
use spurline_probe::message::{Op, Plan};
use spurline_types::units::human_bytes;
use spurline_types::{Size, parse_duration};
use std::process::ExitCode;
use std::time::Duration;

/// What `net lat` is told.
#[derive(Debug, Args)]
pub struct LatArgs {
    /// The other end.
    #[command(flatten)]
    pub peer: PeerArgs,
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
    let plan = Plan {
        size: args.size.bytes(),
        depth: 1,
        streams: vec![Op::Echo],
        congestion: args.peer.tcp_congestion,
        transport: args.peer.transport.into(),
        ..Plan::default()
    };
    plan.check().map_err(|e| Fault::usage(e.message(), "see --size"))?;
    let raised = interrupt()?;
    let mut session = args.peer.connect()?;
    let limits = Limits { time: args.time, ops: args.count, patience: args.peer.timeout, pause: Duration::ZERO };
    let live = line(args.peer.json);
    let outcome = measure::run(&mut session, &plan, &limits, &raised, &mut |now| {
        live.set_message(format!("{:.1} s   {} round trips", now.elapsed.as_secs_f64(), now.ops));
        live.tick();
    });
    live.finish_and_clear();
    let outcome = outcome?;
    let judgement = judge::latency(&outcome);
    if args.peer.json {
        let mut all = to_json(&session, &outcome, "lat");
        all["judgement"] = judgement_json(&judgement);
        anstream::println!("{all:#}");
        return Ok(conclude(&judgement, true));
    }
    let there = outcome.report.as_ref().map_or(&session.welcome.link, |r| &r.link);
    anstream::println!("from {}", end(&outcome.link));
    anstream::println!("to   {}, {}", end(there), session.welcome.host);
    anstream::println!(
        "{HEAD}{} there and back over {}{HEAD:#}, {} times in {:.1} s",
        human_bytes(plan.size),
        plan.transport.name(),
        outcome.measured.total.ops,
        outcome.measured.elapsed.as_secs_f64()
    );
    for (_, times) in outcome.measured.times.iter().filter(|(_, times)| times.count() > 0) {
        anstream::println!("shortest {}, {}", judge::micros(times.min_us()), times_line(times));
    }
    let cpu = |seconds: f64| judge::micros(seconds * 1e6 / outcome.measured.total.ops.max(1) as f64);
    let theirs = outcome.report.as_ref().map_or("unknown".into(), |r| cpu(r.cpu_seconds));
    anstream::println!("{DIM}CPU{DIM:#} {} each here, {theirs} there", cpu(outcome.measured.cpu_seconds));
    Ok(conclude(&judgement, false))
}
