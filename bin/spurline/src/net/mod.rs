//! `spurline net`: the state, the faults and the speed of the fabric. Each subcommand owns flags and output; this file only
//! dispatches.

mod bw;
mod causes;
pub mod collect;
pub(crate) mod doctor;
pub(crate) mod facts;
mod fix;
mod lat;
mod list;
pub(crate) mod peer;
mod ping;
mod serve;
mod subnet;
pub(crate) mod table;
mod trials;

use clap::{Args, Subcommand};
use spurline_config::Fault;
use std::process::ExitCode;

/// The arguments of `net`.
#[derive(Debug, Args)]
pub struct NetCommandArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: NetCommand,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// List all RDMA devices, ports and network interfaces
    List(list::ListArgs),
    /// Collect the facts about this host in one file, for examination elsewhere
    Collect(collect::CollectArgs),
    /// Serve `net ping`, `bw` and `lat` for another host
    #[command(after_long_help = SERVE_EXAMPLES)]
    Serve(serve::ServeArgs),
    /// Test whether another host answers, over which interfaces, and with large packets
    Ping(ping::PingArgs),
    /// Measure throughput and its cost, and compare it with the speed of the link
    #[command(after_long_help = BW_EXAMPLES)]
    Bw(bw::BwArgs),
    /// Measure the round-trip time of a message
    Lat(lat::LatArgs),
    /// Find faults of the fabric and the host, with their remedies
    #[command(after_long_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Print, make, persist or revert the changes that remedy findings
    #[command(after_long_help = fix::EXAMPLES)]
    Fix(fix::FixArgs),
}

const SERVE_EXAMPLES: &str = "\
Examples:
  On one host, for members of the group, for all hosts, or at one interface:
    spurline net serve --group-token-file /etc/spurline/token
    spurline net serve --bind all
    spurline net serve --bind ib0
  And on the other:
    spurline net bw HOST";

const BW_EXAMPLES: &str = "\
An operation is a request and its answer: bytes of a read count when they are here, bytes of a write when the other \
end has said that they are there.

Examples (with `spurline net serve` on node2):
  spurline net bw node2
  spurline net bw node2 --direction both --streams 8 --time 30s
  spurline net bw node2 --interface ib0 --direction write --bytes 100G
  spurline net bw node2 --transport rdma --rails ib0:ib1 --verb read
  spurline net bw 'fe80::1%eth1' --json";

/// Runs the subcommand.
///
/// # Errors
/// The errors of the subcommand.
pub fn run(args: NetCommandArgs) -> Result<ExitCode, Fault> {
    match args.command {
        NetCommand::List(args) => list::run(args),
        NetCommand::Collect(args) => collect::run(args),
        NetCommand::Serve(args) => serve::run(args),
        NetCommand::Ping(args) => ping::run(args),
        NetCommand::Bw(args) => bw::run(args),
        NetCommand::Lat(args) => lat::run(args),
        NetCommand::Doctor(args) => doctor::run(args),
        NetCommand::Fix(args) => fix::run(args),
    }
}
