//! `spurline net`: the fabric, its state, its faults and its speed. Each subcommand owns its flags and its output;
//! this file only tells them apart.

mod collect;
mod facts;
mod list;
mod table;

use clap::{Args, Subcommand};
use spurline_config::Fault;
use std::process::ExitCode;

/// What `net` is told.
#[derive(Debug, Args)]
pub struct NetArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: NetCommand,
}

/// What to do with the fabric. One line each.
#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// Every RDMA device, port and network interface in one table
    List(list::ListArgs),
    /// Gather what the reading commands read of this host into one file
    Collect(collect::CollectArgs),
}

/// Runs the subcommand.
///
/// # Errors
/// As the subcommand says.
pub fn run(args: NetArgs) -> Result<ExitCode, Fault> {
    match args.command {
        NetCommand::List(args) => list::run(args),
        NetCommand::Collect(args) => collect::run(args),
    }
}
