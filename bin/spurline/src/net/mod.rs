//! `spurline net`: the fabric, its state, its faults and its speed. Each subcommand owns its flags and its output;
//! this file only tells them apart.

mod bw;
mod causes;
mod collect;
mod doctor;
mod facts;
mod fix;
mod lat;
mod list;
mod peer;
mod ping;
mod serve;
mod subnet;
mod table;
mod trials;

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
    /// Answer `net ping`, `bw` and `lat` from another host
    #[command(after_long_help = SERVE_EXAMPLES)]
    Serve(serve::ServeArgs),
    /// Whether the other end answers, over which interfaces, also to large packets
    Ping(ping::PingArgs),
    /// How much goes through to HOST and back, at what cost, and whether that is what the link can do
    #[command(after_long_help = BW_EXAMPLES)]
    Bw(bw::BwArgs),
    /// How long a message takes there and back
    Lat(lat::LatArgs),
    /// What is wrong with the fabric as this host sees it, and what to do
    #[command(after_long_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Print, make, write down or take back the changes that findings ask for
    #[command(after_long_help = fix::EXAMPLES)]
    Fix(fix::FixArgs),
}

const SERVE_EXAMPLES: &str = "\
Examples:
  On one host, for all its interfaces, or for one:
    spurline net serve
    spurline net serve --bind ib0
  And on the other:
    spurline net bw HOST";

const BW_EXAMPLES: &str = "\
An operation is a request and its answer: bytes of a read count when they are here, bytes of a write when the other
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
/// As the subcommand says.
pub fn run(args: NetArgs) -> Result<ExitCode, Fault> {
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
