//! `spurline net serve`: the other end of `net ping`, `bw` and `lat`. Prints addresses, the commands for clients, and events; the
//! probe crate serves.

use super::peer::{DIM, HEAD, TokenArgs, gigabits_text};
use clap::Args;
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_fabric::HostTree;
use spurline_net_tcp::{flag_addresses, local_addresses};
use spurline_probe::DEFAULT_PORT;
use spurline_probe::link::{InterfaceLink, KernelFiles};
use spurline_probe::message::{ProbeOp, ProbePlan};
use spurline_probe::server::{ProbeServer, ServeConfig, ServerEvent};
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, parse_duration};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Several times the largest measurement with the control connection.
const MAX_PROBE_CONNECTIONS: usize = 512;

/// The arguments of `net serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Interfaces, addresses or CIDRs to listen on, with ':' between them, or all [default: loopback; all with a token]
    #[arg(long, value_name = "IF[:IF]")]
    pub bind: Option<String>,
    /// Port; 0 chooses a free one
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_PORT)]
    pub port: u16,
    /// Exit after the first measurement
    #[arg(long)]
    pub once: bool,
    /// Disconnect a client that sends nothing for this long
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// Print events as JSON, one object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub token: TokenArgs,
}

/// What ends or reports.
enum ServeMessage {
    Event(ServerEvent),
    Stop,
}

/// Runs the command.
///
/// # Errors
/// When the server can't listen there (exit code 3 for an address or a port that is not available).
pub fn run(args: ServeArgs) -> Result<ExitCode, Fault> {
    if args.timeout < Duration::from_secs(2) {
        let remedy = "clients speak up every second: give it 2s or more";
        return Err(Fault::usage(format!("--timeout {}s is too short", args.timeout.as_secs_f64()), remedy));
    }
    let addresses = match &args.bind {
        Some(all) if all == "all" => Vec::new(),
        Some(spec) => flag_addresses("--bind", spec)?,
        None if args.token.group_token_file.is_some() => Vec::new(),
        None => vec![Ipv4Addr::LOCALHOST.into()],
    };
    let trust = args.token.open()?;
    let (tx, rx) = channel();
    let stop = tx.clone();
    crate::signals::on_stop(move |count| {
        // The receiver may have ended.
        let _ = stop.send(ServeMessage::Stop);
        if count > 1 {
            std::process::exit(130);
        }
    })?;
    let config = ServeConfig {
        addresses,
        port: args.port,
        patience: args.timeout,
        max_connections: MAX_PROBE_CONNECTIONS,
        trust,
        facts: Some(Box::new(host_facts)),
        // As above.
        on_event: Box::new(move |event| drop(tx.send(ServeMessage::Event(event)))),
    };
    let mut server = ProbeServer::start(config).map_err(|e| bind_fault(&e, args.port))?;
    print_addresses(&args, &server)?;
    for news in rx {
        let ServeMessage::Event(event) = news else { break };
        if args.json {
            anstream::println!("{}", event_json(&event));
        } else if let Some(line) = event_line(&event) {
            anstream::println!("{line}");
        }
        if args.once && matches!(event, ServerEvent::Ended { .. }) {
            // The client receives the report on the connection that is still open.
            std::thread::sleep(Duration::from_millis(200));
            break;
        }
    }
    server.stop_server();
    Ok(ExitCode::SUCCESS)
}

/// The archive of `net collect`, for `net doctor --peer`.
fn host_facts() -> Result<Vec<u8>, Error> {
    let packed = super::collect::pack_facts(&HostTree::live().with_recording());
    packed.map(|(bytes, _)| bytes).map_err(|e| Error::io("gathering this host's facts", &e))
}

fn bind_fault(e: &Error, port: u16) -> Fault {
    let taken = e.message().contains("in use");
    let remedy = match e.kind() {
        _ if taken => {
            format!("another program has port {port}, perhaps a `spurline net serve`: choose another with --port")
        }
        ErrorKind::PermissionDenied => "ports below 1024 need root: choose another with --port".into(),
        _ => "see this host's addresses with: spurline net list".into(),
    };
    Fault::missing(e.message(), remedy)
}

/// An address for clients, with the interface.
type ReachableAddress = (SocketAddr, InterfaceLink);

/// Addresses that other hosts reach come first, the fastest ports before others.
fn reachable_addresses(server: &ProbeServer) -> Result<Vec<ReachableAddress>, Fault> {
    let files = KernelFiles::default();
    let mut found = Vec::new();
    for bound in server.addresses() {
        let ip = bound.ip().to_canonical();
        if !ip.is_unspecified() {
            found.push((SocketAddr::new(ip, bound.port()), files.link_of(*bound)));
            continue;
        }
        for local in local_addresses()? {
            let fits = local.ip.is_ipv4() || ip.is_ipv6();
            if fits && !local.link_local && !local.ip.is_loopback() {
                let link = InterfaceLink { address: local.ip.to_string(), ..files.link_named(&local.interface) };
                found.push((SocketAddr::new(local.ip, bound.port()), link));
            }
        }
        if found.is_empty() {
            let ip: IpAddr = std::net::Ipv4Addr::LOCALHOST.into();
            let at = SocketAddr::new(ip, bound.port());
            found.push((at, files.link_of(at)));
        }
    }
    found.sort_by_key(|(_, link)| std::cmp::Reverse(link.rate_bits.unwrap_or(0)));
    Ok(found)
}

fn print_addresses(args: &ServeArgs, server: &ProbeServer) -> Result<(), Fault> {
    let found = reachable_addresses(server)?;
    if args.json {
        let all: Vec<Value> = found
            .iter()
            .map(|(at, link)| json!({ "address": at.ip().to_string(), "port": at.port(), "link": link }))
            .collect();
        anstream::println!("{}", json!({ "event": "listening", "addresses": all }));
        return Ok(());
    }
    for (at, link) in &found {
        let rate = link.rate_bits.map_or_else(String::new, |bits| format!(", {}", gigabits_text(bits)));
        let mode = link.mode.as_ref().map_or_else(String::new, |mode| format!(", {mode} mode"));
        anstream::println!("listening on {at}  {DIM}{}{rate}{mode}{DIM:#}", link.interface);
    }
    if let Some((at, _)) = found.first() {
        let host = if at.port() == DEFAULT_PORT { at.ip().to_string() } else { at.to_string() };
        anstream::println!("from the other host:  {HEAD}spurline net bw {host}{HEAD:#}   (or ping, lat)");
    }
    let clients = match (&args.token.group_token_file, &args.bind) {
        (Some(_), _) => "Holders of the group token can measure, and read what `net collect` gathers",
        (None, None) => "Only this host can connect: --bind all (or an interface), or --group-token-file, admit others",
        (None, Some(_)) => "All hosts that reach the port can measure, and read what `net collect` gathers",
    };
    anstream::println!("{DIM}{clients}. Ctrl-C ends it.{DIM:#}");
    Ok(())
}

/// A plan in a few words.
fn plan_text(plan: &ProbePlan) -> String {
    let mut parts = Vec::new();
    for (op, word) in [
        (ProbeOp::Read, "reads"),
        (ProbeOp::Fetch, "RDMA reads"),
        (ProbeOp::Receive, "receives"),
        (ProbeOp::Write, "writes"),
        (ProbeOp::Send, "sends"),
        (ProbeOp::Echo, "echoes"),
        (ProbeOp::PingPong, "ping-pongs"),
    ] {
        if stream_count(plan, op) > 0 {
            let streams =
                if stream_count(plan, op) == 1 { "1 stream" } else { &format!("{} streams", stream_count(plan, op)) };
            parts.push(format!("{word} of {} on {streams}", human_bytes(plan.size)));
        }
    }
    format!("{} over {}", parts.join(" and "), plan.transport.name())
}

fn stream_count(plan: &ProbePlan, op: ProbeOp) -> usize {
    plan.streams.iter().filter(|one| **one == op).count()
}

fn event_line(event: &ServerEvent) -> Option<String> {
    Some(match event {
        ServerEvent::Begun { .. } => return None,
        ServerEvent::Ended { from, plan, elapsed, report } => {
            let seconds = elapsed.as_secs_f64();
            let bytes = report.received_bytes + report.sent_bytes;
            let mut line = format!("{from}: {}: {} in {seconds:.1} s", plan_text(plan), human_bytes(bytes));
            if plan.streams.iter().any(|op| !op.is_round_trip()) {
                let per_gib = report.cpu_seconds / (bytes.max(1) as f64 / f64::from(1u32 << 30));
                line.push_str(&format!(", {per_gib:.2} CPU-s/GiB here"));
            }
            if !report.error.is_empty() {
                line.push_str(&format!("; {}", report.error));
            }
            line
        }
        ServerEvent::Facts { from, bytes } => format!("{from}: facts, {}", human_bytes(*bytes as u64)),
        ServerEvent::Refused { from, why } => format!("{from}: {why}"),
    })
}

fn event_json(event: &ServerEvent) -> Value {
    match event {
        ServerEvent::Begun { from, plan } => json!({ "event": "begun", "from": from.to_string(), "plan": plan }),
        ServerEvent::Ended { from, plan, elapsed, report } => json!({
            "event": "ended", "from": from.to_string(), "plan": plan, "seconds": elapsed.as_secs_f64(), "report": report,
        }),
        ServerEvent::Facts { from, bytes } => json!({ "event": "facts", "from": from.to_string(), "bytes": bytes }),
        ServerEvent::Refused { from, why } => json!({ "event": "refused", "from": from.to_string(), "why": why }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_probe::message::ServerReport;

    #[test]
    fn events_are_one_line_each() {
        let from = [10, 0, 0, 2].into();
        let plan = ProbePlan { streams: vec![ProbeOp::Read, ProbeOp::Read, ProbeOp::Write], ..ProbePlan::default() };
        let report = ServerReport { received_bytes: 1 << 30, cpu_seconds: 0.25, ..ServerReport::default() };
        let event = ServerEvent::Ended { from, plan, elapsed: Duration::from_secs(2), report: Box::new(report) };
        assert_eq!(
            event_line(&event).unwrap(),
            "10.0.0.2: reads of 1.00 MiB on 2 streams and writes of 1.00 MiB on 1 stream over tcp: 1.00 GiB in 2.0 s, \
             0.25 CPU-s/GiB here"
        );
        assert_eq!(event_json(&event)["report"]["received_bytes"], 1 << 30);
        let event = ServerEvent::Refused { from, why: "it said \"GET\"".into() };
        assert_eq!(event_line(&event).unwrap(), "10.0.0.2: it said \"GET\"");
    }
}
