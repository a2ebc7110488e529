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

use clap::Parser as _;
use error::BenchError;
use part::SuitePart;
use std::path::PathBuf;
use std::process::ExitCode;
use suite::SuiteArgs;

/// Measure spurline: throughput, operations, latency, processor time
#[derive(Debug, clap::Parser)]
#[command(name = "spurline-bench", bin_name = "spurline bench", version, propagate_version = true)]
#[command(max_term_width = 110, arg_required_else_help = true)]
struct BenchCli {
    /// What to run.
    #[command(subcommand)]
    command: BenchCommand,
}

/// What to run.
#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    /// Measure everything beside its ceilings, in one run
    #[command(after_long_help = SUITE_EXAMPLES)]
    Suite(SuiteArgs),
    /// Be one ceiling or one load of the suite
    #[command(hide = true)]
    Part {
        /// Which.
        #[command(subcommand)]
        part: SuitePart,
    },
    /// Write man pages into a directory
    #[command(hide = true)]
    Man {
        /// The directory.
        dir: PathBuf,
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

fn main() -> ExitCode {
    match run(BenchCli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            let red = anstyle::AnsiColor::Red.on_default().bold();
            anstream::eprintln!("{red}error{red:#}: bench: {error}");
            ExitCode::from(if matches!(error, BenchError::Missing(_)) { 3 } else { 1 })
        }
    }
}

/// Runs a command; exit code 1 when a figure could not be taken, or with `--strict` is below its floor.
fn run(command: BenchCommand) -> Result<ExitCode, BenchError> {
    match command {
        BenchCommand::Suite(args) => {
            let outcome = suite::run(&args)?;
            let failed = outcome.broken > 0 || (outcome.strict && outcome.below > 0);
            Ok(ExitCode::from(u8::from(failed)))
        }
        BenchCommand::Part { part } => part::run(&part).map(|()| ExitCode::SUCCESS),
        BenchCommand::Man { dir } => clap_mangen::generate_to(<BenchCli as clap::CommandFactory>::command(), &dir)
            .map(|()| ExitCode::SUCCESS)
            .map_err(|e| BenchError::io(format_args!("man pages into {}", dir.display()), &e)),
    }
}
