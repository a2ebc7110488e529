//! Benchmarks: workloads, their ceilings, and reports. It runs the program under test in processes of their own and
//! deliberately knows only its command line and counters.
#![forbid(unsafe_code)]

mod child;
mod cpu;
mod error;
mod fio;
mod iperf;
mod machine;
mod measure;
mod mount;
mod netns;
mod numbers;
mod part;
mod scratch;
mod stop;
mod suite;
mod table;

pub use error::BenchError;
pub use part::SuitePart;
pub use suite::{SuiteArgs, SuiteOutcome};

/// The arguments of `spurline bench`.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// The command to run.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// Measure everything beside its ceilings, in one run
    #[command(after_long_help = SUITE_EXAMPLES)]
    Suite(SuiteArgs),
    /// Run one ceiling or one load of the suite
    #[command(hide = true)]
    Part {
        /// The part to run.
        #[command(subcommand)]
        part: SuitePart,
    },
}

const SUITE_EXAMPLES: &str = "\
It needs root (mounts, network namespaces), fio and iperf3; what is missing is skipped with a message.

Examples:
  Everything, about a quarter of an hour:
    spurline bench suite --json bench.json --html bench.html
  One section, quickly:
    spurline bench suite --quick --only remote
  With the disk that is to hold the cache:
    spurline bench suite --only disk --disk-dir /nvme0";

/// Runs the command; returns `Some` for a suite.
///
/// # Errors
/// When nothing could run, or it was interrupted.
pub fn run(args: &BenchArgs) -> Result<Option<SuiteOutcome>, BenchError> {
    match &args.command {
        BenchCommand::Suite(args) => suite::run(args).map(Some),
        BenchCommand::Part { part } => part::run(part).map(|()| None),
    }
}
