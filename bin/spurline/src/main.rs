//! The command line: parses, wires the layers together, prints. Every rule of the file system lives below it.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "used once mount and node are wired")]
mod background;
mod bench;
mod cli;
mod demo;
mod generate;
mod info;
mod mount;
mod node;
mod report;
#[allow(dead_code, reason = "used once mount and node are wired")]
mod signals;
mod stats;
mod status;
mod umount;

use cli::Command;
use spurline_config::{Fault, Host, file};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words = std::env::args_os().collect();
    let cli = match file::parse(cli::command(), words).and_then(|matches| cli::from_matches(&matches)) {
        Ok(cli) => cli,
        Err(file::Refusal::Fault(fault)) => return report::fault(&fault),
        Err(file::Refusal::Clap(error)) => {
            // A closed pipe (`spurline --help | head -1`) is no error of ours.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match dispatch(cli.command) {
        Ok(code) => code,
        Err(fault) => report::fault(&fault),
    }
}

fn dispatch(command: Command) -> Result<ExitCode, Fault> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Mount(args) => {
            let config = args.check(&Host::here())?;
            report::warnings(&config.warnings);
            if config.background && !background::is_child() {
                return background::launch(config.under.timeout);
            }
            let ready = background::Ready::new(&config.log)?;
            mount::run(config, ready).map(done)
        }
        Command::Node(args) => {
            let config = args.check(&Host::here())?;
            report::warnings(&config.warnings);
            if config.background && !background::is_child() {
                return background::launch(config.under.timeout);
            }
            let ready = background::Ready::new(&config.log)?;
            node::run(config, ready).map(done)
        }
        Command::Umount(args) => umount::run(args).map(done),
        Command::Stats(args) => stats::run(args).map(done),
        Command::Info(args) => info::run(args).map(done),
        Command::Status(args) => status::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Completions(args) => generate::completions(args).map(done),
        Command::Man(args) => generate::man(args).map(done),
        Command::ConfigReference => generate::config_reference().map(done),
    }
}
