//! `spurline net fix`: prints, makes, persists or reverts the changes for findings. The fabric crate knows the changes.

use super::doctor::AskArgs;
use super::table::{BAD, DIM, GOOD, WARN};
use crate::report::has_consent;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_fabric::fix::files::{self, NetworkSystem};
use spurline_fabric::fix::journal::FixJournal;
use spurline_fabric::fix::{FixError, FixStep, affects_session, needs_naming, plan_steps, session_interface};
use spurline_fabric::{HostChange, HostFacts, HostFinding, examine, finding};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
Without --apply and --persist nothing is changed: the commands are printed. A larger MTU of an Ethernet interface is \
only set where its finding is named (`spurline net fix MTU-LOW --apply`): switch ports that carry less drop large packets \
silently, and that can't be seen from here.

Examples:
  What would be changed:
    spurline net fix
  Connected mode on old InfiniBand cards, now and after each restart:
    spurline net fix IPOIB-MODE --apply --persist ifupdown
  Take back all that was changed:
    spurline net fix --revert";

/// The arguments of `net fix`.
#[derive(Debug, Args)]
pub struct FixArgs {
    /// Findings to fix, by id [default: all that have a fix; larger Ethernet MTUs only by name]
    pub id: Vec<String>,
    /// Make the changes on the running system
    #[arg(long)]
    pub apply: bool,
    /// Write the changes to the system's configuration, so that they survive a reboot
    #[arg(long, value_name = "SYSTEM")]
    pub persist: Option<PersistMode>,
    /// Revert all changes of --apply and --persist, the last first
    #[arg(long, conflicts_with_all = ["apply", "persist", "id", "from", "peer", "for_rdma", "expect"])]
    pub revert: bool,
    /// Also change the interface that carries this session, without confirmation
    #[arg(long, short)]
    pub yes: bool,
    /// Root of the files that are written (configuration and journal) instead of /, such as an image
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    #[command(flatten)]
    pub ask: AskArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The system that configures interfaces at boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PersistMode {
    /// /etc/network/interfaces (Debian).
    Ifupdown,
    /// /etc/systemd/network.
    Networkd,
    /// /etc/NetworkManager/system-connections.
    #[value(name = "networkmanager")]
    NetworkManager,
    /// Kernel modules only: /etc/modules-load.d.
    ModulesLoad,
}

/// The outcome of each step.
#[derive(Default)]
struct FixReport {
    changes: Vec<Value>,
    files: Vec<Value>,
    failed: bool,
}

/// Runs the command.
///
/// # Errors
/// When the facts can't be read, or a change that would cut off this session is not confirmed.
pub fn run(args: FixArgs) -> Result<ExitCode, Fault> {
    if args.revert {
        return revert_fixes(&args);
    }
    if args.apply && args.ask.from.from.is_some() {
        return Err(Fault::usage(
            "--apply with --from: the facts are another host's",
            "run `spurline net fix --apply` on that host",
        ));
    }
    if let Some(id) = args.id.iter().find(|id| finding::page_of(id).is_none()) {
        return Err(Fault::usage(format!("no finding is called {id}"), "`spurline net doctor` prints the ids"));
    }
    let tree = args.ask.from.tree()?;
    let found: Vec<HostFinding> = examine(&tree, &args.ask.to_options(&tree)?)
        .into_iter()
        .filter(|f| args.id.is_empty() || args.id.iter().any(|id| id.eq_ignore_ascii_case(f.id)))
        .collect();
    let host = HostFacts::read_from(&tree);
    let all = plan_steps(&found, &host);
    let (by_name, steps): (Vec<FixStep>, Vec<FixStep>) =
        all.into_iter().partition(|step| args.id.is_empty() && needs_naming(&host, &step.change));
    let mut report = FixReport::default();
    if args.apply {
        ask_consent(&args, &host, &steps)?;
        apply_steps(&args, &steps, &mut report)?;
    } else {
        for step in &steps {
            note_result(&args, &mut report, step, "would", None);
        }
    }
    for step in &by_name {
        note_result(&args, &mut report, step, "by-name", None);
    }
    if let Some(persist) = args.persist {
        write_script(&args, persist, &host, &steps, &mut report)?;
    }
    if args.json {
        anstream::println!("{}", json!({ "changes": report.changes, "files": report.files }));
    } else if steps.is_empty() && by_name.is_empty() {
        anstream::println!(
            "{GOOD}nothing to change{GOOD:#}; `spurline net doctor` says what can't be changed from here"
        );
    } else if !args.apply && args.persist.is_none() {
        anstream::println!("{DIM}nothing was changed: --apply makes the changes, --persist SYSTEM writes them{DIM:#}");
    }
    Ok(ExitCode::from(u8::from(report.failed)))
}

/// Prints or records the outcome of a step.
fn note_result(args: &FixArgs, report: &mut FixReport, step: &FixStep, done: &str, error: Option<&FixError>) {
    let command = step.change.shell_command();
    report.failed |= error.is_some();
    if args.json {
        let error = error.map(ToString::to_string);
        report.changes.push(json!({ "id": step.id, "command": command, "done": done, "error": error }));
        return;
    }
    let (word, style) = match (done, error) {
        (_, Some(_)) => ("failed", BAD),
        ("made", None) => ("made", GOOD),
        ("there", None) => ("there already", DIM),
        ("by-name", None) => ("left out", DIM),
        // A setting that is right already, and is only persisted.
        ("would", None) if step.change.is_done() => ("keep", DIM),
        _ => ("would", WARN),
    };
    anstream::println!("{style}{word}{style:#} {command}  {DIM}{}{DIM:#}", step.id);
    if done == "by-name" {
        let id = step.id;
        anstream::println!(
            "    can end all traffic where a switch port carries less: change the network first, then `spurline net fix {id} \
             --apply`"
        );
    }
    if let Some(error) = error {
        anstream::println!("    {error}");
    }
}

/// Asks for confirmation before a change affects the interface that carries this session.
fn ask_consent(args: &FixArgs, host: &HostFacts, steps: &[FixStep]) -> Result<(), Fault> {
    let client: Option<IpAddr> =
        std::env::var("SSH_CONNECTION").ok().and_then(|c| c.split_whitespace().next()?.parse().ok());
    let Some(session) = session_interface(host, client).filter(|_| !args.yes) else { return Ok(()) };
    let risky: Vec<String> =
        steps.iter().filter(|s| affects_session(host, &s.change, &session)).map(|s| s.change.shell_command()).collect();
    if risky.is_empty() {
        return Ok(());
    }
    let what = format!("{session} carries this session's own packets, and `{}` may interrupt them", risky.join("`, `"));
    if args.json || !has_consent(&what) {
        return Err(Fault::failed(what, "say --yes, or run it from the host's console"));
    }
    Ok(())
}

fn open_journal(root: &Path) -> Result<FixJournal, Fault> {
    FixJournal::open(root).map_err(|e| Fault::failed(e.to_string(), "run it as root"))
}

fn apply_steps(args: &FixArgs, steps: &[FixStep], report: &mut FixReport) -> Result<(), Fault> {
    let mut journal = open_journal(&args.root)?;
    for step in steps {
        match journal.apply_change(&step.change, &args.root) {
            Ok(true) => note_result(args, report, step, "made", None),
            Ok(false) => note_result(args, report, step, "there", None),
            Err(e) => note_result(args, report, step, "failed", Some(&e)),
        }
    }
    Ok(())
}

fn write_script(
    args: &FixArgs,
    persist: PersistMode,
    host: &HostFacts,
    steps: &[FixStep],
    report: &mut FixReport,
) -> Result<(), Fault> {
    let system = match persist {
        PersistMode::Ifupdown => NetworkSystem::Ifupdown,
        PersistMode::Networkd => NetworkSystem::Networkd,
        PersistMode::NetworkManager => NetworkSystem::NetworkManager,
        PersistMode::ModulesLoad => NetworkSystem::ModulesLoad,
    };
    let mut journal = open_journal(&args.root)?;
    let changes: Vec<HostChange> =
        journal.changes.iter().cloned().chain(steps.iter().map(|s| s.change.clone())).collect();
    for wanted in files::wanted_files(&changes, host, system, &args.root).map_err(fix_fault)? {
        let written = journal.write_file(&wanted, &args.root).map_err(fix_fault)?;
        let path = format!("/{}", wanted.path);
        if args.json {
            report.files.push(json!({ "path": path, "written": written }));
        } else {
            let (word, style) = if written { ("wrote", GOOD) } else { ("there already", DIM) };
            anstream::println!("{style}{word}{style:#} {path}");
        }
    }
    Ok(())
}

fn fix_fault(e: FixError) -> Fault {
    Fault::failed(e.to_string(), "run it as root, or name another --root")
}

fn revert_fixes(args: &FixArgs) -> Result<ExitCode, Fault> {
    let mut journal = open_journal(&args.root)?;
    let done = journal.revert_all(&args.root).map_err(|e| Fault::failed(e.to_string(), "run it as root"))?;
    let failed = done.iter().any(|(_, result)| result.is_err());
    if args.json {
        let list: Vec<Value> = done
            .iter()
            .map(|(what, result)| json!({ "what": what, "error": result.as_ref().err().map(ToString::to_string) }))
            .collect();
        anstream::println!("{}", json!({ "reverted": list }));
    } else if done.is_empty() {
        anstream::println!("nothing to take back");
    } else {
        for (what, result) in &done {
            match result {
                Ok(()) => anstream::println!("{GOOD}taken back{GOOD:#} {what}"),
                Err(e) => anstream::println!("{BAD}failed{BAD:#} {what}\n    {e}"),
            }
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}
