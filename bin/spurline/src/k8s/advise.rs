//! `spurline k8s advise`: whether Multus is needed, why, and the manifests that follow.

use super::nodes::NodeArgs;
use clap::{Args, ValueEnum};
use serde_json::json;
use spurline_config::Fault;
use spurline_kube_devices::advise::{ClusterAdvice, PodIsolation, RdmaUse, advise};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
The answer goes to standard error, the manifests to standard output. Replace the subnets in them.

Examples:
  spurline k8s advise
  spurline k8s advise --use rdma-cm --from node1.tar.zst --from node2.tar.zst \\
      > networks.yaml
  spurline k8s advise --isolation virtual-function";

/// The arguments of `k8s advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// How pods use RDMA
    #[arg(long = "use", value_name = "USE", default_value = "verbs")]
    pub usage: UsageChoice,
    /// How pods are kept apart
    #[arg(long, value_name = "KIND", default_value = "shared")]
    pub isolation: IsolationChoice,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// How pods use RDMA.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum UsageChoice {
    /// Verbs whose programs exchange LIDs or GIDs: MPI, NCCL, UCX, perftest
    Verbs,
    /// Connections by IP address (librdmacm): Spurline, NVMe-oF, NFS over RDMA
    RdmaCm,
}

/// How pods are kept apart.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum IsolationChoice {
    /// They share the HCAs of a node
    Shared,
    /// They use the node's network namespace
    HostNetwork,
    /// A virtual function each: hard isolation, or one address per pod
    VirtualFunction,
}

/// Runs the command.
///
/// # Errors
/// When `--from` names no facts.
pub fn run(args: &AdviseArgs) -> Result<ExitCode, Fault> {
    let usage = match args.usage {
        UsageChoice::Verbs => RdmaUse::Verbs,
        UsageChoice::RdmaCm => RdmaUse::ConnectionManager,
    };
    let isolation = match args.isolation {
        IsolationChoice::Shared => PodIsolation::Shared,
        IsolationChoice::HostNetwork => PodIsolation::HostNetwork,
        IsolationChoice::VirtualFunction => PodIsolation::VirtualFunction,
    };
    let advice = advise(&args.nodes.read()?, usage, isolation);
    if args.json {
        anstream::println!("{}", json!(advice));
        return Ok(ExitCode::SUCCESS);
    }
    anstream::eprint!("{}", advice_text(&advice));
    let of_networks = advice.networks.iter().flat_map(|network| &network.manifests);
    let manifests: Vec<&str> = advice.manifests.iter().chain(of_networks).map(String::as_str).collect();
    if !manifests.is_empty() {
        anstream::print!("{}", manifests.join("---\n"));
    }
    Ok(ExitCode::SUCCESS)
}

fn advice_text(advice: &ClusterAdvice) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "Multus is {}", if advice.multus { "needed" } else { "not needed" });
    for network in &advice.networks {
        let _ = writeln!(out, "{}: {}", network.network.as_str(), network.attachment);
        for reason in &network.reasons {
            let _ = writeln!(out, "    {reason}");
        }
        for (node, interfaces) in &network.interfaces {
            let names = if interfaces.is_empty() { "no interface".to_owned() } else { interfaces.join(", ") };
            let _ = writeln!(out, "    {node}: {names}");
        }
    }
    for note in &advice.notes {
        let _ = writeln!(out, "note: {note}");
    }
    out
}
