//! The command line: parses, wires the layers together, prints. Every rule of the file system lives below it.
#![forbid(unsafe_code)]

mod args;
mod background;
mod bench;
mod cli;
mod config_file;
mod coordinator;
mod demo;
mod drain;
mod fstab;
mod generate;
mod info;
mod jobs;
mod logging;
mod mount;
mod net;
mod node;
mod report;
mod roster;
mod rules;
mod signals;
mod stats;
mod status;
mod umount;

use cli::Command;
use spurline_config::{Fault, HostLimits, LogConfig, RawCoordinator, RawMount, RawNode};
use spurline_runtime::limits::raise_open_files;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    spurline_mem::allocator::limit_heaps();
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(fault) = fstab::go_on(&cli::command(), &words) {
        return report::fault(&fault);
    }
    let cli = match config_file::parse_args(cli::command(), words).and_then(|matches| cli::from_matches(&matches)) {
        Ok(cli) => cli,
        Err(config_file::ArgsRefusal::Fault(fault)) => return report::fault(&fault),
        Err(config_file::ArgsRefusal::Clap(error)) => {
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
            let host = HostLimits::detect();
            let config = RawMount::from(*args).check(&host)?;
            match start(&config.log, config.background, &config.volume.warnings, config.volume.under.timeout, &host)? {
                Start::Waited(code) => Ok(code),
                Start::Run(ready) => mount::run(config, ready).map(done),
            }
        }
        Command::Node(words) => {
            if let Some(cli::NodeAction::Drain(args)) = words.action {
                return drain::run(args);
            }
            let host = HostLimits::detect();
            let config = RawNode::from(words.args).check(&host)?;
            match start(&config.log, config.background, &config.warnings, config.under.timeout, &host)? {
                Start::Waited(code) => Ok(code),
                Start::Run(ready) => node::run(config, ready).map(done),
            }
        }
        Command::Coordinator(args) => {
            let host = HostLimits::detect();
            let config = RawCoordinator::from(*args).check(&host)?;
            match start(&config.log, config.background, &[], Duration::ZERO, &host)? {
                Start::Waited(code) => Ok(code),
                Start::Run(ready) => coordinator::run(config, ready).map(done),
            }
        }
        Command::Umount(args) => umount::run(args).map(done),
        Command::Stats(args) => stats::run(args).map(done),
        Command::Info(args) => info::run(args),
        Command::Status(args) => status::run(args),
        Command::Load(args) => jobs::load(args),
        Command::Free(args) => jobs::free(args),
        Command::Pin(args) => rules::pin(args),
        Command::Unpin(args) => rules::unpin(args),
        Command::Limit(args) => rules::limit(args),
        Command::Rules(args) => rules::list(args),
        Command::Bench(args) => match bench::run(&args)? {},
        Command::Net(args) => net::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Completions(args) => generate::completions(args).map(done),
        Command::Man(args) => generate::man(args).map(done),
        Command::ConfigReference => generate::config_reference().map(done),
    }
}

/// Whether this process is the one that does the work.
enum Start {
    /// It is; to be told when the work has begun.
    Run(background::Ready),
    /// Another one does, in the background; this one has waited for it and ends.
    Waited(ExitCode),
}

fn start(
    log: &LogConfig,
    in_background: bool,
    warnings: &[String],
    limit: Duration,
    host: &HostLimits,
) -> Result<Start, Fault> {
    raise_open_files()?;
    if in_background && !background::is_child() {
        report::warnings(warnings);
        let log = log.file.clone().map_or_else(|| logging::default_log(host), Ok)?;
        return background::launch(limit, &log).map(Start::Waited);
    }
    let ready = background::Ready::new()?;
    logging::start_logging(log, background::is_child(), host)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok(Start::Run(ready))
}
