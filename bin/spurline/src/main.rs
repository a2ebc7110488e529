//! The command line: parses arguments, starts what they name, prints the outcome. Everything else lies in the crates //! below.
#![forbid(unsafe_code)]
#![allow(rustdoc::broken_intra_doc_links, reason = "comments of flags are texts of --help, with brackets of their own")]

mod args;
mod background;
mod bench;
mod cache;
mod cli;
mod config_file;
mod coordinator;
mod degraded;
mod demo;
mod drain;
mod export;
mod fstab;
mod gateway;
mod generate;
mod group_status;
mod habits;
mod info;
mod jobs;
mod k8s;
mod keeper;
mod logging;
mod mount;
mod net;
mod node;
mod remount;
mod report;
mod rules;
mod signals;
mod stage;
mod stats;
mod status;
mod umount;
mod upgrade;

use cli::CliCommand;
use spurline_config::{Fault, HostLimits, LogConfig};
use spurline_runtime::limits::{obey_quotas, raise_open_files};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    spurline_mem::allocator::limit_heaps();
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(fault) = fstab::run_as_helper(&cli::cli_command(), &words) {
        return report::print_fault(&fault);
    }
    let cli = match config_file::parse_args(cli::cli_command(), words).and_then(|matches| cli::from_matches(&matches)) {
        Ok(cli) => cli,
        Err(config_file::ArgsRefusal::Fault(fault)) => return report::print_fault(&fault),
        Err(config_file::ArgsRefusal::Clap(error)) => {
            // A closed pipe (`spurline --help | head -1`) is not an error.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match run_command(cli.command) {
        Ok(code) => code,
        Err(fault) => report::print_fault(&fault),
    }
}

fn run_command(command: CliCommand) -> Result<ExitCode, Fault> {
    match command {
        CliCommand::Mount(args) => {
            habits::check_mount_options(&args.settings.fuse.options)?;
            let host = HostLimits::detect();
            let background = args.background;
            let config = args.settings.check(&host)?;
            if config.volume.writes.is_some() {
                obey_quotas()?;
            }
            match start_service(
                &config.log,
                background,
                &config.volume.warnings,
                config.volume.under.timeout,
                &host,
                &config.mountpoint.display().to_string(),
            )? {
                StartOutcome::Waited(code) => Ok(code),
                StartOutcome::Run(ready) if config.recover && !background::has_keeper() => {
                    keeper::run(ready, &config.mountpoint)
                }
                StartOutcome::Run(ready) => mount::run(config, background, ready).map(success),
            }
        }
        CliCommand::Node(words) => {
            if let Some(cli::NodeAction::Drain(args)) = words.action {
                return drain::run(args);
            }
            let host = HostLimits::detect();
            let config = words.args.settings.check(&host)?;
            if config.writes.is_some() {
                obey_quotas()?;
            }
            let service = config.name.as_ref().map_or_else(|| "node".to_owned(), |name| format!("node {name}"));
            match start_service(
                &config.log,
                words.args.background,
                &config.warnings,
                config.under.timeout,
                &host,
                &service,
            )? {
                StartOutcome::Waited(code) => Ok(code),
                StartOutcome::Run(ready) => node::run(config, ready).map(success),
            }
        }
        CliCommand::Gateway(args) => run_gateway(*args),
        CliCommand::Coordinator(args) => {
            let host = HostLimits::detect();
            let config = args.settings.check(&host)?;
            match start_service(&config.log, args.background, &[], Duration::ZERO, &host, "coordinator")? {
                StartOutcome::Waited(code) => Ok(code),
                StartOutcome::Run(ready) => coordinator::run(config, ready).map(success),
            }
        }
        CliCommand::Umount(args) => umount::run(args).map(success),
        CliCommand::Upgrade(args) => upgrade::run(args).map(success),
        CliCommand::Stats(args) => stats::run(args).map(success),
        CliCommand::Info(args) => info::run(args),
        CliCommand::Status(args) => status::run(args),
        CliCommand::Load(args) => jobs::load_files(args),
        CliCommand::Free(args) => jobs::free_files(args),
        CliCommand::Cache(args) => cache::run(&args.action),
        CliCommand::Pin(args) => rules::pin_folders(args),
        CliCommand::Unpin(args) => rules::unpin_folders(args),
        CliCommand::Limit(args) => rules::limit_folders(args),
        CliCommand::Rules(args) => rules::list_rules(args),
        CliCommand::Stage(args) => stage::run(&args.action),
        CliCommand::Export(args) => export::run(args),
        CliCommand::Bench(args) => bench::run(&args),
        CliCommand::Net(args) => net::run(args),
        CliCommand::K8s(args) => k8s::run(args),
        CliCommand::Demo(args) => demo::run(args),
        CliCommand::Completions(args) => generate::print_completions(args).map(success),
        CliCommand::Man(args) => generate::write_man_pages(args).map(success),
        CliCommand::ConfigReference => generate::config_reference().map(success),
    }
}

fn run_gateway(args: args::GatewayArgs) -> Result<ExitCode, Fault> {
    let host = HostLimits::detect();
    let config = args.settings.check(&host)?;
    if config.volume.writes.is_some() {
        obey_quotas()?;
    }
    let service = format!("gateway {}", config.s3.listen);
    let limit = config.volume.under.timeout;
    match start_service(&config.log, args.background, &config.volume.warnings, limit, &host, &service)? {
        StartOutcome::Waited(code) => Ok(code),
        StartOutcome::Run(ready) => gateway::run(config, ready).map(|()| ExitCode::SUCCESS),
    }
}

/// The process that does the work.
enum StartOutcome {
    /// This process, which signals when the service is ready.
    Run(background::ReadySignal),
    /// A background process, for which this process waited, and now exits.
    Waited(ExitCode),
}

fn start_service(
    log: &LogConfig,
    in_background: bool,
    warnings: &[String],
    limit: Duration,
    host: &HostLimits,
    service: &str,
) -> Result<StartOutcome, Fault> {
    raise_open_files()?;
    signals::survive_file_limit()?;
    if in_background && !background::is_child() && !background::has_keeper() {
        let log = log.file.clone().map_or_else(|| logging::default_log(host), Ok)?;
        return background::launch_background(limit, &log).map(StartOutcome::Waited);
    }
    let ready = background::ReadySignal::new()?;
    logging::start_logging(log, in_background, host, service)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok(StartOutcome::Run(ready))
}

fn success(_done: ()) -> ExitCode {
    ExitCode::SUCCESS
}
