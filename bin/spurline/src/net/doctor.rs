//! `spurline net doctor`: prints findings, the worst first. The fabric crate makes the findings.

use super::facts::{self, FromArgs};
use super::peer::TokenArgs;
use super::table::{BAD, DIM, GOOD, WARN};
use super::{subnet, trials};
use anstyle::Style;
use clap::{Args, ValueEnum};
use serde_json::json;
use spurline_config::Fault;
use spurline_fabric::finding::id;
use spurline_fabric::{
    DoctorOptions, HostFacts, HostFinding, HostTree, LinkLayer, RailObstacle, Severity, archive, examine, finding,
};
use spurline_probe::client::{self, ConnectConfig, ProbeSession};
use spurline_rails::{UnusableRail, host_addresses, resolve_rails};
use spurline_trust::Trust;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for the other end's answer, and for the facts there.
const PEER_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Examples of --help.
pub const EXAMPLES: &str = "\
Exit code 0 when no finding is an error, else 1.

Examples:
  This host:
    spurline net doctor
  May these two interfaces be rails, and what is in their way?
    spurline net doctor --for-rdma ib0:ib1
  Both ends of a link, with `spurline net serve` on node2, or its facts in a file:
    spurline net doctor --peer node2
    spurline net doctor --peer node2.tar.zst
  Another host, by a file of `spurline net collect` there:
    spurline net doctor --from node2.tar.zst
  What a finding means:
    spurline net doctor --explain SAME-SUBNET";

/// The arguments of `net doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// Print the page about a finding, and nothing else
    #[arg(long, value_name = "ID")]
    pub explain: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of an examination, for `net doctor` and `net fix`.
#[derive(Debug, Clone, Args)]
pub struct AskArgs {
    #[command(flatten)]
    pub from: FromArgs,
    /// Interfaces that must carry RDMA; obstacles on them are errors
    #[arg(long, value_name = "IF[:IF]")]
    pub for_rdma: Option<String>,
    /// Other end to compare with: a host that runs `net serve`, a file of `net collect`, or a folder laid out like /
    #[arg(long, value_name = "HOST|FILE|DIR")]
    pub peer: Option<String>,
    #[command(flatten)]
    pub token: TokenArgs,
    /// Expected link layer of every port
    #[arg(long, value_name = "LAYER")]
    pub expect: Option<ExpectedTransport>,
}

/// A link layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExpectedTransport {
    /// InfiniBand.
    Infiniband,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
}

impl AskArgs {
    /// The options of the examination, with the peer's facts.
    ///
    /// # Errors
    /// When the peer's facts can't be read, or a name is not valid.
    pub fn to_options(&self, tree: &HostTree) -> Result<DoctorOptions, Fault> {
        let for_rdma: Vec<String> = match &self.for_rdma {
            None => Vec::new(),
            Some(list) => list.split([':', ',']).map(|n| n.trim().to_owned()).collect(),
        };
        if for_rdma.iter().any(String::is_empty) {
            return Err(Fault::usage(
                "--for-rdma names an empty interface",
                "give names with a colon between, ib0:ib1",
            ));
        }
        let mut trials = Vec::new();
        let peer = match &self.peer {
            None => None,
            Some(peer) if Path::new(peer).exists() => Some(HostFacts::read_from(&facts::open_facts(Path::new(peer))?)),
            Some(peer) => {
                let trust = self.token.open()?;
                let (there, port) = fetch_host(peer, &trust)?;
                let there = HostFacts::read_from(&there);
                if tree.is_live() {
                    trials = trials::run_trials(&HostFacts::read_from(tree), &there, &for_rdma, port, &trust);
                }
                Some(there)
            }
        };
        let expect = self.expect.map(|e| match e {
            ExpectedTransport::Infiniband => LinkLayer::InfiniBand,
            ExpectedTransport::Ethernet => LinkLayer::Ethernet,
        });
        let obstacles = rail_obstacles(tree, &for_rdma)?;
        Ok(DoctorOptions {
            for_rdma,
            expect,
            peer,
            trials,
            subnet_manager: subnet::query_subnet_manager(tree),
            obstacles,
        })
    }
}

/// Why a node or a mount on this host would refuse these interfaces as rails, by the function that nodes and mounts use.
fn rail_obstacles(tree: &HostTree, names: &[String]) -> Result<Vec<RailObstacle>, Fault> {
    if !tree.is_live() {
        return Ok(Vec::new());
    }
    let here = host_addresses()?;
    Ok(names
        .iter()
        .filter_map(|name| {
            let refused = resolve_rails(std::slice::from_ref(name), tree, &here).err()?;
            let id = match &refused {
                UnusableRail::PortDown { .. } => id::PORT_DOWN,
                UnusableRail::NoAddress { .. } => id::NO_ADDRESS,
                UnusableRail::NoGid { .. } => id::GID_ROCE_V2,
                _ => id::NO_RDMA_DEVICE,
            };
            let port = match &refused {
                UnusableRail::PortDown { device, port, .. } => Some(format!("{device}/{port}")),
                _ => None,
            };
            Some(RailObstacle {
                interface: name.clone(),
                port,
                id,
                what: refused.to_string(),
                remedy: refused.remedy(),
            })
        })
        .collect())
}

/// The facts of a host that runs `net serve`, and the port there.
fn fetch_host(host: &str, trust: &Arc<Trust>) -> Result<(HostTree, u16), Fault> {
    let peer = client::parse_peer(host)?;
    let trust = Arc::clone(trust);
    let call = ConnectConfig { peer, from: Vec::new(), timeout: PEER_ANSWER_TIMEOUT, trust };
    let answer = ProbeSession::connect(&call).and_then(|mut session| {
        let facts = session.fetch_facts(PEER_ANSWER_TIMEOUT)?;
        Ok((facts, session.remote().port()))
    });
    let (facts, port) = answer.map_err(|fault| {
        let remedy = format!(
            "there: spurline net serve --bind all; or collect the facts: ssh {host} spurline net collect -o - > peer.tar.zst, then \
             --peer peer.tar.zst"
        );
        Fault { remedy, ..fault }
    })?;
    let entries = archive::read_archive(facts.as_slice())
        .map_err(|e| Fault::failed(format!("the facts that {host} sent: {e}"), "use the same version on both ends"))?;
    Ok((HostTree::from_memory(entries), port))
}

/// Runs the command.
///
/// # Errors
/// When `--from` or `--peer` names no facts.
pub fn run(args: DoctorArgs) -> Result<ExitCode, Fault> {
    if let Some(id) = &args.explain {
        let page = finding::page_of(id).ok_or_else(|| {
            let known = finding::PAGES.iter().map(|(id, _)| *id).collect::<Vec<_>>().join(", ");
            Fault::usage(format!("no finding is called {id}"), format!("the ids are {known}"))
        })?;
        anstream::print!("{page}");
        return Ok(ExitCode::SUCCESS);
    }
    let tree = args.ask.from.tree()?;
    let found = examine(&tree, &args.ask.to_options(&tree)?);
    if args.json {
        anstream::println!("{}", json!({ "findings": found }));
    } else {
        anstream::print!("{}", findings_text(&found));
    }
    let failed = found.iter().any(|f| f.severity == Severity::Error);
    Ok(ExitCode::from(u8::from(failed)))
}

pub fn findings_text(found: &[HostFinding]) -> String {
    let mut out = String::new();
    for f in found {
        let (word, style) = match f.severity {
            Severity::Error => ("error", BAD),
            Severity::Warning => ("warning", WARN),
            Severity::Info => ("info", DIM),
        };
        let bold = Style::new().bold();
        let _ = writeln!(out, "{style}{word}{style:#} {bold}{}{bold:#} {}", f.id, f.subject);
        let _ = writeln!(out, "    {}", f.evidence);
        let _ = writeln!(out, "    {GOOD}fix{GOOD:#}: {}", f.remedy);
    }
    let words = [("error", Severity::Error), ("warning", Severity::Warning), ("note", Severity::Info)];
    let sums: Vec<String> = words
        .iter()
        .map(|(word, severity)| (word, found.iter().filter(|f| f.severity == *severity).count()))
        .filter(|(_, n)| *n > 0)
        .map(|(word, n)| format!("{n} {word}{}", if n == 1 { "" } else { "s" }))
        .collect();
    if sums.is_empty() {
        let _ = writeln!(out, "{GOOD}nothing found{GOOD:#}");
    } else {
        let _ = writeln!(out, "{}; `spurline net doctor --explain {}` says more", sums.join(", "), found[0].id);
    }
    out
}
