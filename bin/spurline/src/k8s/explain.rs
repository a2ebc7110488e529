//! `spurline k8s explain`: whether the pods of a manifest will get working RDMA.

use super::lint::{print_findings, read_text};
use super::nodes::NodeArgs;
use clap::Args;
use spurline_config::Fault;
use spurline_kube_devices::discover::{DEFAULT_SLOTS, discover};
use spurline_kube_devices::{PluginConfig, PodContext, explain_pods, read_config};
use std::path::PathBuf;
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
The file may also hold the NetworkAttachmentDefinitions that the pods use; they are checked, too. Exit code 0 when no \
finding is an error, else 1.

Examples:
  spurline k8s explain -f pod.yaml --config config.json --from node1.tar.zst \\
      --from node2.tar.zst
  With the configuration that `spurline k8s discover` proposes for this node:
    spurline k8s explain -f pod.yaml";

/// The arguments of `k8s explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Manifest of a pod, or of an object with a pod template; - is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Configuration of the device plugin [default: that of `k8s discover`]
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
    let config = match &args.config {
        Some(path) => {
            let reading = read_config(&read_text(path, "--config")?, &path.display().to_string());
            reading.config.ok_or_else(|| {
                Fault::usage(
                    format!("--config {}: the configuration has errors", path.display()),
                    format!("`spurline k8s lint --config {}` shows them", path.display()),
                )
            })?
        }
        // A node without RDMA devices has no resources.
        None => read_config(&discover(&nodes, DEFAULT_SLOTS).config.to_string(), "")
            .config
            .unwrap_or(PluginConfig { update_interval: None, resources: Vec::new() }),
    };
    let context = PodContext { config, nodes };
    Ok(print_findings(explain_pods(&manifest, &args.file.display().to_string(), &context), args.json))
}
