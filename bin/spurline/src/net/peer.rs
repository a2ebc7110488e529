//! Common parts of `net ping`, `bw` and `lat`: the flags of the other end, the connection, Ctrl-C, and the description of both
//! ends. Measures nothing.

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
use spurline_runtime::group;
use spurline_trust::Trust;
use spurline_types::{Congestion, parse_duration};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub(super) const HEAD: Style = AnsiColor::Yellow.on_default().bold();
pub(super) const DIM: Style = Style::new().dimmed();

/// The transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CarrierKind {
    /// TCP connections
    Tcp,
    /// Verbs: InfiniBand, RoCE, iWARP
    Rdma,
}

impl From<CarrierKind> for ProbeTransport {
    fn from(carrier: CarrierKind) -> Self {
        match carrier {
            CarrierKind::Tcp => ProbeTransport::Tcp,
            CarrierKind::Rdma => ProbeTransport::Rdma,
        }
    }
}

/// The other end.
#[derive(Debug, Args)]
pub struct PeerArgs {
    /// Host that runs `spurline net serve`: HOST or HOST:PORT (default 18600); IPv6 as 2001:db8::1, fe80::1%eth0 or
    /// [2001:db8::1]:PORT
    pub host: String,
    /// Interface or address of this host to connect from [default: the kernel's choice]
    #[arg(short = 'I', long, value_name = "IF")]
    pub interface: Option<String>,
    /// Longest wait for an answer, and longest stall of a transfer
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// Transport: tcp, or rdma between the addresses of RDMA devices
    #[arg(long, value_name = "KIND", default_value = "tcp")]
    pub transport: CarrierKind,
    /// TCP congestion control on both ends: auto (the host's default, or cubic where that is BBR), system, cubic,
    /// reno or dctcp
    #[arg(long, value_name = "NAME", default_value_t)]
    pub tcp_congestion: Congestion,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub token: TokenArgs,
}

/// The group token of a measurement.
#[derive(Debug, Clone, Args)]
pub struct TokenArgs {
    /// File with the secret of the group, the same on both ends [default: none, `net serve` listens on loopback only]
    #[arg(long, value_name = "FILE", env = "SPURLINE_GROUP_TOKEN_FILE")]
    pub group_token_file: Option<PathBuf>,
}

impl TokenArgs {
    /// Reads the file.
    ///
    /// # Errors
    /// When the file can't be read, or contains no usable secret.
    pub(crate) fn open(&self) -> Result<Arc<Trust>, Fault> {
        Ok(Trust::new(&group::hostname(), self.group_token_file.as_deref())?)
    }
}

impl PeerArgs {
    /// Connects.
    ///
    /// # Errors
    /// As [`ProbeSession::connect`], or for an interface this host does not have.
    pub(super) fn connect_probe(&self) -> Result<ProbeSession, Fault> {
        if self.timeout.is_zero() {
            return Err(Fault::usage("--timeout 0s: nothing answers at once", "give it a second or more"));
        }
        let from = match &self.interface {
            Some(spec) => flag_addresses("--interface", spec)?,
            None => Vec::new(),
        };
        let peer = client::parse_peer(&self.host)?;
        let trust = self.token.open()?;
        ProbeSession::connect(&ConnectConfig { peer, from, timeout: self.timeout, trust })
    }
}

/// The interfaces to measure over.
#[derive(Debug, Args)]
pub struct RailsArgs {
    /// Interfaces of this host to measure over, each to one that it reaches: names with ':' between them, or all
    #[arg(long, value_name = "IF[:IF]|all", conflicts_with = "interface")]
    pub rails: Option<String>,
}

impl RailsArgs {
    /// The paths; none without `--rails`.
    ///
    /// # Errors
    /// When an interface can't be used, or reaches no interface of the other end.
    pub(super) fn plan_paths(
        &self,
        session: &mut ProbeSession,
        transport: ProbeTransport,
    ) -> Result<Vec<PathPlan>, Fault> {
        let Some(spec) = &self.rails else { return Ok(Vec::new()) };
        let names: Vec<String> = spec.split([':', ',']).map(|name| name.trim().to_owned()).collect();
        if names.iter().any(String::is_empty) {
            return Err(Fault::usage("--rails names an empty interface", "give names with a colon between, ib0:ib1"));
        }
        let names = (names != ["all"]).then_some(names);
        let local_interfaces = paths::local_interfaces(transport, session.local().ip())?;
        let peer_interfaces = session.fetch_interfaces(transport)?;
        paths::choose_paths(names.as_deref(), &local_interfaces, &peer_interfaces).map_err(|why| {
            let over = transport.name();
            Fault::missing(format!("--rails {spec} over {over}: {why}"), "see both ends with: spurline net list")
        })
    }
}

/// A flag that Ctrl-C sets; the second Ctrl-C ends the program.
///
/// # Errors
/// When signals can't be handled.
pub(super) fn interrupt_flag() -> Result<Arc<AtomicBool>, Fault> {
    crate::signals::stop_flag(130)
}

/// A progress line, on a terminal only.
pub(super) fn progress_line(json: bool) -> ProgressBar {
    if json {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{spinner:.cyan} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new_spinner().with_style(style)
}

/// Bits per second of a port as text.
pub(super) fn gigabits_text(bits: u64) -> String {
    let value = bits as f64 / 1e9;
    if value >= 1.0 { format!("{value} Gb/s") } else { format!("{} Mb/s", value * 1e3) }
}

/// An end as text: `10.0.0.1 on ib0 (400 Gb/s, MTU 2044, datagram)`.
pub(super) fn end_text(link: &InterfaceLink) -> String {
    let mut known = Vec::new();
    match (link.rate_bits, link.medium) {
        (Some(bits), _) => known.push(gigabits_text(bits)),
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

/// The verdict as JSON.
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

/// Prints the verdict, last and in colour, and returns the exit code.
pub(super) fn print_verdict(judgement: &ProbeVerdict, json: bool) -> ExitCode {
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
