//! `spurline k8s explain`: whether the pods of a manifest will get working RDMA.

use super::lint::{config_texts, print_findings, read_text};
use super::nodes::NodeArgs;
use clap::Args;
use spurline_config::Fault;
use spurline_kube_devices::discover::{DEFAULT_SLOTS, discover};
use spurline_kube_devices::{PluginConfig, PodContext, embedded_configs, explain_pods, read_config};
use std::path::PathBuf;
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
The file may also hold what the pods use, which is checked, too: NetworkAttachmentDefinitions, IPoIBNetworks, \
MacvlanNetworks and HostDeviceNetworks; SriovNetworks with their SriovNetworkNodePolicies; ResourceClaims, templates and \
DeviceClasses; and a NicClusterPolicy or ConfigMap with the plugin's configuration. What is not there is not judged. Exit \
code 0 when no finding is an error, else 1.

Examples:
  spurline k8s explain -f pod.yaml --config config.json --from node1.tar.zst \\
      --from node2.tar.zst
  With the configuration that `spurline k8s discover` proposes for this node:
    spurline k8s explain -f pod.yaml";

/// The arguments of `k8s explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Manifest of a pod, or of any object with pod templates (PyTorchJob, JobSet, …); - is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Configuration of the device plugin [default: that in FILE of -f, else that of `k8s discover`]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// When a file can't be read, or the configuration has errors.
pub fn run(args: &ExplainArgs) -> Result<ExitCode, Fault> {
    let manifest = read_text(&args.file, "-f")?;
    let nodes = args.nodes.read()?;
    // A ConfigMap or a NicClusterPolicy beside the pods has the configuration, unless a file is named.
    let given = match &args.config {
        Some(path) => config_texts(&path.display().to_string(), read_text(path, "--config")?).into_iter().next(),
        None => embedded_configs(&manifest).into_iter().next().map(|config| (config.object, config.text)),
    };
    let config = match given {
        Some((name, text)) => read_config(&text, &name).config.ok_or_else(|| {
            let file = args.config.as_ref().unwrap_or(&args.file).display();
            Fault::usage(
                format!("the configuration of {name} has errors"),
                format!("`spurline k8s lint --config {file}` shows them"),
            )
        })?,
        // A node without RDMA devices has no resources.
        None => read_config(&discover(&nodes, DEFAULT_SLOTS).config.to_string(), "")
            .config
            .unwrap_or(PluginConfig { update_interval: None, resources: Vec::new() }),
    };
    let context = PodContext { config, nodes };
    Ok(print_findings(explain_pods(&manifest, &args.file.display().to_string(), &context), args.json))
}
