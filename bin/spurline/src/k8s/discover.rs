//! `spurline k8s discover`: the configuration goes to standard output, the reasons to standard error, so that the output can be
//! stored unchanged.

use super::nodes::NodeArgs;
use clap::Args;
use serde_json::json;
use spurline_config::Fault;
use spurline_kube_devices::discover::{DEFAULT_SLOTS, DiscoveryReport, discover};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
The configuration is that of Mellanox/k8s-rdma-shared-dev-plugin, which also reads it. Exit code 0, also on a node \
without RDMA devices.

Examples:
  This node:
    spurline k8s discover > config.json
  Many nodes, each collected with `spurline net collect -o NODE.tar.zst`:
    spurline k8s discover --from node1.tar.zst --from node2.tar.zst \\
        > config.json";

/// The arguments of `k8s discover`.
#[derive(Debug, Args)]
pub struct DiscoverArgs {
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// Slots for each HCA: the most containers of a node that share it
    #[arg(long, value_name = "N", default_value_t = DEFAULT_SLOTS, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub slots: u32,
    /// Print one JSON object with the configuration, the groups and the reasons
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// When `--from` names no facts.
pub fn run(args: &DiscoverArgs) -> Result<ExitCode, Fault> {
    let report = discover(&args.nodes.read()?, args.slots);
    if args.json {
        anstream::println!("{}", json!(report));
    } else {
        anstream::eprint!("{}", reasons_text(&report));
        anstream::println!("{:#}", report.config);
    }
    Ok(ExitCode::SUCCESS)
}

fn reasons_text(report: &DiscoveryReport) -> String {
    let mut out = String::new();
    for group in &report.groups {
        let _ = writeln!(out, "{}: {}", group.resource, group.why);
        for (node, hcas) in &group.hcas {
            let _ = writeln!(out, "    {node}: {}", hcas.join(", "));
        }
    }
    for hca in &report.left_out {
        let _ = writeln!(out, "left out: {} on {}: {}", hca.hca, hca.node, hca.why);
    }
    for note in &report.notes {
        let _ = writeln!(out, "note: {note}");
    }
    if report.groups.is_empty() {
        let _ = writeln!(out, "no RDMA device on {}: configList is empty", report.nodes.join(", "));
    }
    out
}
