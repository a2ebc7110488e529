//! Benchmarks: workloads, the ceilings they are held against, and reports. It runs the program it measures as
//! processes of their own and deliberately knows nothing of their inside but their command line and counters.
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

pub use error::Error;
pub use part::Part;
pub use suite::{Outcome, SuiteArgs};

/// What `spurline bench` is told.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to run.
    #[command(subcommand)]
    pub command: Bench,
}

/// What to run.
#[derive(Debug, clap::Subcommand)]
pub enum Bench {
    /// Measure everything beside its ceilings, in one run
    #[command(after_long_help = SUITE_EXAMPLES)]
    Suite(SuiteArgs),
    /// Be one ceiling or one load of the suite
    #[command(hide = true)]
    Part {
        /// Which.
        #[command(subcommand)]
        part: Part,
    },
}

const SUITE_EXAMPLES: &str = "\
It needs root (mounts, network namespaces), fio and iperf3; what is missing is skipped and said.

Examples:
  Everything, about a quarter of an hour:
    spurline bench suite --json bench.json --html bench.html
  One section, quickly:
    spurline bench suite --quick --only remote
  With the disk that is to hold the cache:
    spurline bench suite --only disk --disk-dir /nvme0";

/// Runs it; `Some` for a suite that ran.
///
/// # Errors
/// When there was nothing to run, or it was interrupted.
pub fn run(args: &Args) -> Result<Option<Outcome>, Error> {
    match &args.command {
        Bench::Suite(args) => suite::run(args).map(Some),
        Bench::Part { part } => part::run(part).map(|()| None),
    }
}
