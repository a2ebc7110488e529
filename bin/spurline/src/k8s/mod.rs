//! `spurline k8s`: RDMA devices and volumes for pods. Each subcommand owns flags and output; this file only dispatches.

mod advise;
pub mod csi_driver;
pub mod device_plugin;
mod discover;
mod explain;
mod lint;
mod mount_words;
mod nodes;
mod render;
mod verify;

use clap::{Args, Subcommand};
use spurline_config::Fault;
use std::process::ExitCode;

/// The arguments of `k8s`.
#[derive(Debug, Args)]
pub struct KubeCommandArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: KubeCommand,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum KubeCommand {
    /// Propose a device-plugin configuration for this node, or for many, with reasons
    #[command(after_long_help = discover::EXAMPLES)]
    Discover(discover::DiscoverArgs),
    /// Check a device-plugin configuration: its rules, and what it matches on a node
    #[command(after_long_help = lint::EXAMPLES)]
    Lint(lint::LintArgs),
    /// Explain whether a pod will get working RDMA
    #[command(after_long_help = explain::EXAMPLES)]
    Explain(explain::ExplainArgs),
    /// Advise whether pods need further networks (Multus), with the manifests that follow
    #[command(after_long_help = advise::EXAMPLES)]
    Advise(advise::AdviseArgs),
    /// Verify RDMA from inside a pod, or between two: devices, GIDs, locked memory, ports, bandwidth, latency
    #[command(after_long_help = verify::EXAMPLES)]
    Verify(Box<verify::VerifyArgs>),
    /// Run the device plugin, which gives pods the RDMA devices that they request
    #[command(after_help = device_plugin::DEVICE_PLUGIN_NOTE, after_long_help = device_plugin::DEVICE_PLUGIN_EXAMPLES)]
    DevicePlugin(Box<device_plugin::DevicePluginArgs>),
    /// Run the CSI driver, which mounts volumes for the pods of this node
    #[command(after_help = csi_driver::CSI_DRIVER_NOTE)]
    CsiDriver(Box<csi_driver::CsiDriverArgs>),
    /// Print the manifests of a cluster: cache nodes, volumes, devices
    #[command(after_long_help = render::EXAMPLES)]
    Render(render::RenderArgs),
}

/// Runs the subcommand.
///
/// # Errors
/// The errors of the subcommand.
pub fn run(args: KubeCommandArgs) -> Result<ExitCode, Fault> {
    match args.command {
        KubeCommand::Discover(args) => discover::run(&args),
        KubeCommand::Lint(args) => lint::run(&args),
        KubeCommand::Explain(args) => explain::run(&args),
        KubeCommand::Advise(args) => advise::run(&args),
        KubeCommand::Verify(args) => verify::run(&args),
        KubeCommand::DevicePlugin(args) => device_plugin::run(*args),
        KubeCommand::CsiDriver(args) => csi_driver::run(*args),
        KubeCommand::Render(args) => render::run(args),
    }
}
