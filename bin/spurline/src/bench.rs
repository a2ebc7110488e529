//! `spurline bench`: finds the program spurline-bench and replaces this process by it. It knows no benchmark.

use crate::cli::BenchArgs;
use spurline_config::Fault;
use std::convert::Infallible;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = "spurline-bench";

/// Replaces this process by spurline-bench, with the same arguments.
///
/// # Errors
/// With exit code 3 when it is not installed.
pub fn run(args: &BenchArgs) -> Result<Infallible, Fault> {
    let program = find_program().ok_or_else(|| {
        Fault::missing(
            format!("{PROGRAM} is neither beside this program nor in PATH"),
            "install it: 'make install' does, or copy target/release/spurline-bench of the same build beside spurline",
        )
    })?;
    let error = Command::new(&program).args(&args.arguments).exec();
    Err(Fault::missing(format!("{} can't be started: {error}", program.display()), "install it again"))
}

/// The one beside this program is of the same build, so it comes before those in PATH.
fn find_program() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name(PROGRAM));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|dir| dir.join(PROGRAM));
    beside.into_iter().chain(in_path).find(|file| file.is_file())
}
