//! `spurline net fix`: the changes that findings ask for, printed, made, written into configuration, or taken back.
//! What a change is and how it is made is the fabric crate's to know.

use super::doctor::AskArgs;
use super::table::{BAD, DIM, GOOD, WARN};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_fabric::fix::files::{self, NetworkSystem};
use spurline_fabric::fix::journal::FixJournal;
use spurline_fabric::fix::{FixError, FixStep, affects_session, needs_naming, plan_steps, session_interface};
use spurline_fabric::{HostChange, HostFacts, HostFinding, examine, finding};
use std::io::{BufRead, IsTerminal, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
Without --apply and --persist nothing is changed: the commands are printed. A larger MTU of an Ethernet interface is
only set where its finding is named (`spurline net fix MTU-LOW --apply`): switch ports that carry less drop large packets
without a word, and that can't be seen from here.

Examples:
  What would be changed:
    spurline net fix
  Connected mode on old InfiniBand cards, now and after each restart:
    spurline net fix IPOIB-MODE --apply --persist ifupdown
  Take back all that was changed:
    spurline net fix --revert";

/// What `net fix` is told.
#[derive(Debug, Args)]
pub struct FixArgs {
    /// Findings to put right, by id [default: all that have a change; larger Ethernet MTUs only by name]
    pub id: Vec<String>,
    /// Make the changes on the running host
    #[arg(long)]
    pub apply: bool,
    /// Write the changes into the system's configuration, so that they outlive a restart
    #[arg(long, value_name = "SYSTEM")]
    pub persist: Option<Persist>,
    /// Take back all that --apply and --persist did, the last first
    #[arg(long, conflicts_with_all = ["apply", "persist", "id", "from", "peer", "for_rdma", "expect"])]
    pub revert: bool,
    /// Also change the interface that this session's own packets take, without asking
    #[arg(long, short)]
    pub yes: bool,
    /// Where configuration and the note of what was changed are written, instead of /: an image, say
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    #[command(flatten)]
    pub ask: AskArgs,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// The system that sets interfaces up at start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Persist {
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

/// What became of each step.
#[derive(Default)]
struct Report {
    changes: Vec<Value>,
    files: Vec<Value>,
    failed: bool,
}

/// Runs the command.
///
/// # Errors
/// When the facts can't be read, or a change would cut this session off and nobody agreed to it.
pub fn run(args: FixArgs) -> Result<ExitCode, Fault> {
    if args.revert {
        return revert(&args);
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
    let found: Vec<HostFinding> = examine(&tree, &args.ask.ask(&tree)?)
        .into_iter()
        .filter(|f| args.id.is_empty() || args.id.iter().any(|id| id.eq_ignore_ascii_case(f.id)))
        .collect();
    let host = HostFacts::read_from(&tree);
    let all = plan_steps(&found, &host);
    let (by_name, steps): (Vec<FixStep>, Vec<FixStep>) =
        all.into_iter().partition(|step| args.id.is_empty() && needs_naming(&host, &step.change));
    let mut report = Report::default();
    if args.apply {
        consent(&args, &host, &steps)?;
        apply(&args, &steps, &mut report)?;
    } else {
        for step in &steps {
            note(&args, &mut report, step, "would", None);
        }
    }
    for step in &by_name {
        note(&args, &mut report, step, "by-name", None);
    }
    if let Some(persist) = args.persist {
        write(&args, persist, &host, &steps, &mut report)?;
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

/// Prints or keeps what became of a step.
fn note(args: &FixArgs, report: &mut Report, step: &FixStep, done: &str, error: Option<&FixError>) {
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
        // What stands already and is only to be written down.
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

/// Asks before a change touches the interface that this session's packets take.
fn consent(args: &FixArgs, host: &HostFacts, steps: &[FixStep]) -> Result<(), Fault> {
    let client: Option<IpAddr> =
        std::env::var("SSH_CONNECTION").ok().and_then(|c| c.split_whitespace().next()?.parse().ok());
    let Some(session) = session_interface(host, client).filter(|_| !args.yes) else { return Ok(()) };
    let risky: Vec<String> =
        steps.iter().filter(|s| affects_session(host, &s.change, &session)).map(|s| s.change.shell_command()).collect();
    if risky.is_empty() {
        return Ok(());
    }
    let what = format!("{session} carries this session's own packets, and `{}` may interrupt them", risky.join("`, `"));
    let refused = || Fault::failed(what.clone(), "say --yes, or run it from the host's console");
    if args.json || !std::io::stdin().is_terminal() {
        return Err(refused());
    }
    anstream::eprint!("{WARN}{what}{WARN:#}. Go on? [y/N] ");
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    match read {
        Ok(_) if matches!(answer.trim(), "y" | "Y" | "yes") => Ok(()),
        _ => Err(refused()),
    }
}

fn opened(root: &Path) -> Result<FixJournal, Fault> {
    FixJournal::open(root).map_err(|e| Fault::failed(e.to_string(), "run it as root"))
}

fn apply(args: &FixArgs, steps: &[FixStep], report: &mut Report) -> Result<(), Fault> {
    let mut journal = opened(&args.root)?;
    for step in steps {
        match journal.apply_change(&step.change, &args.root) {
            Ok(true) => note(args, report, step, "made", None),
            Ok(false) => note(args, report, step, "there", None),
            Err(e) => note(args, report, step, "failed", Some(&e)),
        }
    }
    Ok(())
}

fn write(
    args: &FixArgs,
    persist: Persist,
    host: &HostFacts,
    steps: &[FixStep],
    report: &mut Report,
) -> Result<(), Fault> {
    let system = match persist {
        Persist::Ifupdown => NetworkSystem::Ifupdown,
        Persist::Networkd => NetworkSystem::Networkd,
        Persist::NetworkManager => NetworkSystem::NetworkManager,
        Persist::ModulesLoad => NetworkSystem::ModulesLoad,
    };
    let failed = |e: FixError| Fault::failed(e.to_string(), "run it as root, or name another --root");
    let mut journal = opened(&args.root)?;
    let changes: Vec<HostChange> =
        journal.changes.iter().cloned().chain(steps.iter().map(|s| s.change.clone())).collect();
    for wanted in files::wanted_files(&changes, host, system, &args.root).map_err(failed)? {
        let written = journal.write_file(&wanted, &args.root).map_err(failed)?;
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

fn revert(args: &FixArgs) -> Result<ExitCode, Fault> {
    let mut journal = opened(&args.root)?;
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
