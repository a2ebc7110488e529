//! `spurline bench`: finds the program spurline-bench and replaces this process by that program. Knows no benchmark.

use crate::cli::{BenchArgs, cli_command};
use spurline_config::Fault;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const BENCH_PROGRAM: &str = "spurline-bench";

/// The benchmarks of spurline-bench, for the help where that program is not installed.
pub const BENCH_HELP: &str = "\
Benchmarks, whose flags `spurline bench NAME --help` prints:
  suite       Measure everything beside its ceilings, in one run
  fio         Run one fio job file on many hosts at once, over several mounts in turn
  train       Replay the reading of MLPerf Storage's training, and find how many accelerators are fed
  checkpoint  Write checkpoints by many ranks, and read them back elsewhere
  load        Replay how loaders read models, or how key-value caches use files

The packages of 'make package' and 'make install' contain spurline-bench; 'cargo build --release -p spurline-bench' builds it.";

/// Replaces this process by spurline-bench, with the same arguments. Help that is requested where that program is not installed
/// names the benchmarks.
///
/// # Errors
/// With exit code 3 when the program is not installed.
pub fn run(args: &BenchArgs) -> Result<ExitCode, Fault> {
    let Some(program) = find_program() else {
        if args.arguments.is_empty() || args.arguments.iter().any(|word| word == "--help" || word == "-h") {
            let mut command = cli_command();
            command.build();
            let help = command.find_subcommand_mut("bench").map(clap::Command::render_help);
            anstream::println!("{}", help.unwrap_or_default().ansi());
            return Ok(ExitCode::SUCCESS);
        }
        return Err(Fault::missing(
            format!("{BENCH_PROGRAM} is neither beside this program nor in PATH"),
            "install it: 'make install' does, or copy target/release/spurline-bench of the same build beside spurline",
        ));
    };
    let error = Command::new(&program).args(&args.arguments).exec();
    Err(Fault::missing(format!("{} can't be started: {error}", program.display()), "install it again"))
}

/// The program beside this one is of the same build, and so comes before those in PATH.
fn find_program() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name(BENCH_PROGRAM));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|dir| dir.join(BENCH_PROGRAM));
    beside.into_iter().chain(in_path).find(|file| file.is_file())
}
