//! `spurline net ping`: tests whether the other end answers, over which interfaces, and with large packets.

use super::peer::{DIM, PeerArgs, end_text, interrupt_flag, judgement_json, peer_json, print_verdict};
use clap::Args;
use serde_json::json;
use spurline_config::Fault;
use spurline_probe::judge;
use spurline_probe::link::KernelFiles;
use spurline_probe::measure::{self, PingConfig, PingOutcome, RpingStep};
use spurline_probe::message::ProbeTransport;
use spurline_types::{Size, parse_duration};
use std::process::ExitCode;
use std::time::Duration;

/// The arguments of `net ping`.
#[derive(Debug, Args)]
pub struct PingArgs {
    /// The other end.
    #[command(flatten)]
    pub peer: PeerArgs,
    /// Number of pings; 0 for no end until Ctrl-C
    #[arg(short, long, value_name = "N", default_value_t = 5)]
    pub count: u64,
    /// Time between pings
    #[arg(short, long, value_name = "TIME", default_value = "500ms", value_parser = parse_duration)]
    pub interval: Duration,
    /// Bytes per ping
    #[arg(short, long, value_name = "SIZE", default_value = "64B")]
    pub size: Size,
}

/// Runs the command.
///
/// # Errors
/// When the other end can't be reached.
pub fn run(args: PingArgs) -> Result<ExitCode, Fault> {
    let raised = interrupt_flag()?;
    let mut session = args.peer.connect_probe()?;
    let mut here = KernelFiles::default().link_of(session.local());
    let there = session.welcome.link.clone();
    let json = args.peer.json;
    if !json {
        let welcome = &session.welcome;
        anstream::println!("from {}", end_text(&here));
        anstream::println!("to   {}, {} with spurline {}", end_text(&there), welcome.host, welcome.program);
        anstream::println!("connected in {}", judge::format_micros(session.connect_time.as_secs_f64() * 1e6));
    }
    let pings = PingConfig {
        count: args.count,
        size: args.size.bytes(),
        interval: args.interval,
        timeout: args.peer.timeout,
        congestion: args.peer.tcp_congestion,
        transport: args.peer.transport.into(),
    };
    let steps = match pings.transport {
        ProbeTransport::Rdma => measure::run_rping_steps(&mut session, pings.size, pings.timeout)?,
        ProbeTransport::Tcp => Vec::new(),
    };
    if !json {
        steps.iter().for_each(print_step);
    }
    let pinged = match steps.iter().find_map(|step| Some(format!("{}: {}", step.name, step.error.as_ref()?))) {
        Some(why) => PingOutcome { error: Some(why), ..PingOutcome::default() },
        None => measure::run_pings(&mut session, &pings, &raised, &mut |pong| {
            if !json {
                let time = judge::format_micros(pong.time.as_secs_f64() * 1e6);
                anstream::println!("{} bytes {DIM}#{}{DIM:#} {time}", pong.size, pong.number);
            }
        })?,
    };
    if here.address == there.address {
        here.carried_by = Some("lo".into());
    }
    let judgement = judge::judge_pings(&pinged, here.mtu, there.mtu);
    let mut sorted: Vec<f64> = pinged.times.iter().map(|t| t.as_secs_f64() * 1e6).collect();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| sorted.get(((sorted.len().max(1) - 1) as f64 * share).round() as usize).copied();
    let large_us = pinged.large.map(|t| t.as_secs_f64() * 1e6);
    if json {
        let all = json!({
            "command": "ping", "peer": peer_json(&session), "link": here, "peer_link": there,
            "size_bytes": pings.size, "answers": sorted.len(),
            "round_trip_us": { "min": at(0.0), "p50": at(0.5), "max": at(1.0) },
            "large_bytes": pinged.large_size, "large_us": large_us,
            "steps": steps.iter().map(|step| json!({
                "name": step.name, "what": step.what, "us": step.time.map(|time| time.as_secs_f64() * 1e6),
                "error": step.error,
            })).collect::<Vec<_>>(),
            "error": pinged.error, "judgement": judgement_json(&judgement),
        });
        anstream::println!("{all:#}");
    } else if let (Some(min), Some(middle), Some(max)) = (at(0.0), at(0.5), at(1.0)) {
        let large = large_us.map_or_else(String::new, |us| {
            format!("; {} KiB round trip {}", pinged.large_size >> 10, judge::format_micros(us))
        });
        let [min, middle, max] = [min, middle, max].map(judge::format_micros);
        anstream::println!("shortest {min}, median {middle}, longest {max}{large}");
    }
    Ok(print_verdict(&judgement, json))
}

/// A step that rping also has, by the name there.
fn print_step(step: &RpingStep) {
    let result = match (&step.error, step.time) {
        (Some(why), _) => format!("failed: {why}"),
        (None, Some(time)) => judge::format_micros(time.as_secs_f64() * 1e6),
        (None, None) => "done".to_owned(),
    };
    anstream::println!("{:<19} {result} {DIM}({}){DIM:#}", step.name, step.what);
}
