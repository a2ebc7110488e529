//! `spurline k8s lint`: findings about a configuration on a node or many.

use super::nodes::NodeArgs;
use crate::net::doctor::findings_text;
use clap::Args;
use serde_json::json;
use spurline_config::Fault;
use spurline_fabric::{HostFinding, Severity};
use spurline_kube_devices::{embedded_configs, lint_node, read_config};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
Exit code 0 when no finding is an error, else 1.

Examples:
  spurline k8s lint --config config.json
  On nodes that were collected with `spurline net collect -o NODE.tar.zst`:
    spurline k8s lint --config config.json --from node1.tar.zst \\
        --from node2.tar.zst
  What a finding means:
    spurline net doctor --explain K8S-SLOTS";

/// The arguments of `k8s lint`.
#[derive(Debug, Args)]
pub struct LintArgs {
    /// The configuration, or a manifest of a ConfigMap or NicClusterPolicy that has it; - is standard input
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the configuration or the facts can't be read.
pub fn run(args: &LintArgs) -> Result<ExitCode, Fault> {
    let text = read_text(&args.config, "--config")?;
    let nodes = args.nodes.read()?;
    let mut findings = Vec::new();
    for (name, text) in config_texts(&args.config.display().to_string(), text) {
        let reading = read_config(&text, &name);
        findings.extend(reading.findings);
        if let Some(config) = reading.config {
            findings.extend(nodes.iter().flat_map(|node| lint_node(&config, node)));
        }
    }
    Ok(print_findings(findings, args.json))
}

/// The configurations of a file with names: the file itself, or the configurations in the objects of Kubernetes there.
pub fn config_texts(file: &str, text: String) -> Vec<(String, String)> {
    let embedded = embedded_configs(&text);
    if embedded.is_empty() {
        return vec![(file.to_owned(), text)];
    }
    embedded.into_iter().map(|config| (format!("{file} ({})", config.object), config.text)).collect()
}

/// The text of a file, or of standard input.
///
/// # Errors
/// When the file can't be read or is no text.
pub fn read_text(path: &Path, flag: &str) -> Result<String, Fault> {
    let read =
        if path.as_os_str() == "-" { std::io::read_to_string(std::io::stdin()) } else { std::fs::read_to_string(path) };
    read.map_err(|error| Fault::missing(format!("{flag} {}: {error}", path.display()), "name a readable text file"))
}

/// Prints findings, errors first; gives the exit code.
pub fn print_findings(mut findings: Vec<HostFinding>, as_json: bool) -> ExitCode {
    findings.sort_by_key(|f| f.severity);
    if as_json {
        anstream::println!("{}", json!({ "findings": findings }));
    } else {
        anstream::print!("{}", findings_text(&findings));
    }
    ExitCode::from(u8::from(findings.iter().any(|f| f.severity == Severity::Error)))
}
