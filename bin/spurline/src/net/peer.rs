//! What `net ping`, `bw` and `lat` share: the flags that name the other end, the call, Ctrl-C, and how both ends look in
//! reports. It measures nothing.

use anstyle::{AnsiColor, Style};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_net_tcp::flag_addresses;
use spurline_probe::client::{self, ConnectConfig, ProbeSession};
use spurline_probe::judge::{ProbeVerdict, VerdictLevel};
use spurline_probe::link::{InterfaceLink, LinkMedium};
use spurline_probe::message::ProbeTransport;
use spurline_probe::paths::{self, PathPlan};
use spurline_types::{Congestion, parse_duration};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub(super) const HEAD: Style = AnsiColor::Yellow.on_default().bold();
pub(super) const DIM: Style = Style::new().dimmed();

/// What carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Carrier {
    /// TCP connections
    Tcp,
    /// Verbs: InfiniBand, RoCE, iWARP
    Rdma,
}

impl From<Carrier> for ProbeTransport {
    fn from(carrier: Carrier) -> Self {
        match carrier {
            Carrier::Tcp => ProbeTransport::Tcp,
            Carrier::Rdma => ProbeTransport::Rdma,
        }
    }
}

/// The other end.
#[derive(Debug, Args)]
pub struct PeerArgs {
    /// Where `spurline net serve` runs: HOST or HOST:PORT (18600 when not given); IPv6 as 2001:db8::1, fe80::1%eth0 or
    /// [2001:db8::1]:PORT
    pub host: String,
    /// Call from this interface or address of this host [default: the kernel's choice]
    #[arg(short = 'I', long, value_name = "IF")]
    pub interface: Option<String>,
    /// Longest wait for an answer, and longest time in which nothing moves
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// What carries the bytes: tcp, or rdma from and to the addresses of RDMA devices
    #[arg(long, value_name = "KIND", default_value = "tcp")]
    pub transport: Carrier,
    /// Congestion control of TCP on both ends: auto (the host's own, and cubic where that is BBR), system, cubic, reno or
    /// dctcp
    #[arg(long, value_name = "NAME", default_value_t)]
    pub tcp_congestion: Congestion,
    /// The result as JSON
    #[arg(long)]
    pub json: bool,
}

impl PeerArgs {
    /// Calls.
    ///
    /// # Errors
    /// As [`Session::connect`], or for an interface this host does not have.
    pub(super) fn connect(&self) -> Result<ProbeSession, Fault> {
        if self.timeout.is_zero() {
            return Err(Fault::usage("--timeout 0s: nothing answers at once", "give it a second or more"));
        }
        let from = match &self.interface {
            Some(spec) => flag_addresses("--interface", spec)?,
            None => Vec::new(),
        };
        ProbeSession::connect(&ConnectConfig { peer: client::parse_peer(&self.host)?, from, timeout: self.timeout })
    }
}

/// Interfaces to measure over at once.
#[derive(Debug, Args)]
pub struct RailsArgs {
    /// Measure over these interfaces of this host, each to one it reaches there: names with ':' between, or all
    #[arg(long, value_name = "IF[:IF]|all", conflicts_with = "interface")]
    pub rails: Option<String>,
}

impl RailsArgs {
    /// The paths; none where nothing was asked for.
    ///
    /// # Errors
    /// When an interface can't be used for it, or reaches nothing there.
    pub(super) fn paths(&self, session: &mut ProbeSession, transport: ProbeTransport) -> Result<Vec<PathPlan>, Fault> {
        let Some(spec) = &self.rails else { return Ok(Vec::new()) };
        let names: Vec<String> = spec.split([':', ',']).map(|name| name.trim().to_owned()).collect();
        if names.iter().any(String::is_empty) {
            return Err(Fault::usage("--rails names an empty interface", "give names with a colon between, ib0:ib1"));
        }
        let names = (names != ["all"]).then_some(names);
        let ours = paths::local_interfaces(transport, session.local().ip())?;
        let theirs = session.fetch_interfaces(transport)?;
        paths::choose_paths(names.as_deref(), &ours, &theirs).map_err(|why| {
            let over = transport.name();
            Fault::missing(format!("--rails {spec} over {over}: {why}"), "see both ends with: spurline net list")
        })
    }
}

/// A flag that Ctrl-C raises; the second Ctrl-C ends the program.
///
/// # Errors
/// When signals can't be caught.
pub(super) fn interrupt() -> Result<Arc<AtomicBool>, Fault> {
    crate::signals::raised(130)
}

/// A line that moves on a terminal, and nothing elsewhere.
pub(super) fn line(json: bool) -> ProgressBar {
    if json {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{spinner:.cyan} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new_spinner().with_style(style)
}

/// Bits per second of a port, for a person.
pub(super) fn gigabits(bits: u64) -> String {
    let value = bits as f64 / 1e9;
    if value >= 1.0 { format!("{value} Gb/s") } else { format!("{} Mb/s", value * 1e3) }
}

/// An end, for a person: `10.0.0.1 on ib0 (400 Gb/s, MTU 2044, datagram)`.
pub(super) fn end(link: &InterfaceLink) -> String {
    let mut known = Vec::new();
    match (link.rate_bits, link.medium) {
        (Some(bits), _) => known.push(gigabits(bits)),
        (None, LinkMedium::Loopback) => known.push("loopback".into()),
        (None, LinkMedium::Virtual) => known.push("virtual".into()),
        (None, _) => known.push("rate unknown".into()),
    }
    known.extend(link.mtu.map(|mtu| format!("MTU {mtu}")));
    known.extend(link.mode.clone());
    let interface = if link.interface.is_empty() { "an unknown interface" } else { &link.interface };
    format!("{} on {interface} ({})", link.address, known.join(", "))
}

/// The other end in JSON.
pub(super) fn peer_json(session: &ProbeSession) -> Value {
    let welcome = &session.welcome;
    json!({
        "name": session.peer(), "address": session.remote().ip().to_canonical().to_string(),
        "port": session.remote().port(), "host": welcome.host, "version": welcome.program,
        "connect_us": session.connect_time.as_secs_f64() * 1e6,
    })
}

/// The judgement in JSON.
pub(super) fn judgement_json(judgement: &ProbeVerdict) -> Value {
    let findings: Vec<Value> = judgement
        .causes
        .iter()
        .map(|c| json!({ "id": c.id, "subject": c.subject, "end": if c.here { "here" } else { "there" } }))
        .collect();
    json!({
        "level": judgement.level.name(), "sentence": judgement.sentence, "finding": judgement.finding,
        "findings": findings,
    })
}

/// Prints the judgement, last and in colour, and gives the exit code.
pub(super) fn conclude(judgement: &ProbeVerdict, json: bool) -> ExitCode {
    if !json {
        let style = match judgement.level {
            VerdictLevel::Healthy => AnsiColor::Green.on_default().bold(),
            VerdictLevel::Poor => AnsiColor::Yellow.on_default().bold(),
            VerdictLevel::Unknown => Style::new().bold(),
            VerdictLevel::Broken => AnsiColor::Red.on_default().bold(),
        };
        anstream::println!("{style}{}{style:#}", judgement.sentence);
    }
    ExitCode::from(u8::from(judgement.level == VerdictLevel::Broken))
}
