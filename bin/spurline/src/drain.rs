//! `spurline node drain`: the runtime's drain with a progress bar, and the outcome as text or JSON.

use crate::cli::DrainArgs;
use crate::jobs::show::is_terminal;
use crate::report::printable;
use crate::signals;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::json;
use spurline_config::Fault;
use spurline_runtime::{DrainOutcome, DrainProgress, DrainRequest, drain_node};
use spurline_types::units::human_bytes;
use std::process::ExitCode;
use std::time::Instant;

/// Failed files listed on a terminal; `--json` lists all.
const SHOWN_FAILED_FILES: usize = 10;

/// Runs the command; exit code 1 when not all blocks were moved, or after an interruption.
///
/// # Errors
/// With exit code 3 when the registry, the group or the node can't be reached.
pub fn run(args: DrainArgs) -> Result<ExitCode, Fault> {
    let stop = signals::stop_flag(1)?;
    let request = DrainRequest {
        registry: args.registry,
        cache_group: args.cache_group,
        trust: args.trust.check(false)?,
        node: args.node,
    };
    let bar = DrainBar::new(args.json);
    let drained = drain_node(&request, &stop, &|progress| bar.show(progress))?;
    bar.end();
    let report = DrainReport::of_outcome(drained);
    if args.json {
        anstream::println!("{}", json!(report));
    } else {
        print_report(&report);
    }
    Ok(ExitCode::from(u8::from(report.state != STATE_DRAINED)))
}

const STATE_DRAINED: &str = "drained";
const STATE_INTERRUPTED: &str = "interrupted";
const STATE_INCOMPLETE: &str = "incomplete";

/// The outcome, as printed by `--json`.
#[derive(Serialize)]
struct DrainReport {
    node: String,
    state: &'static str,
    was_drained: bool,
    bytes_total: u64,
    bytes_handed_on: u64,
    bytes_not_listed: u64,
    bytes_moved: u64,
    failed: Vec<UnmovedFile>,
    weight: Option<u32>,
    unsaved_files: u64,
    scratch_files: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    unsaved_error: Option<String>,
}

/// A file that was not handed over completely.
#[derive(Serialize)]
struct UnmovedFile {
    path: String,
    reason: String,
}

impl DrainReport {
    fn of_outcome(outcome: DrainOutcome) -> Self {
        let DrainProgress { total, handed, unlisted, failed } = outcome.progress;
        let is_complete = failed.is_empty() && outcome.staged.files == 0 && outcome.staged_failure.is_none();
        let state = if outcome.interrupted {
            STATE_INTERRUPTED
        } else if is_complete {
            STATE_DRAINED
        } else {
            STATE_INCOMPLETE
        };
        DrainReport {
            node: outcome.node,
            state,
            was_drained: outcome.was_drained,
            bytes_total: total,
            bytes_handed_on: handed,
            bytes_not_listed: unlisted,
            bytes_moved: outcome.moved,
            failed: failed.into_iter().map(|(path, error)| UnmovedFile { path, reason: error.to_string() }).collect(),
            weight: outcome.weight,
            unsaved_files: outcome.staged.files,
            scratch_files: outcome.staged.scratch,
            unsaved_error: outcome.staged_failure,
        }
    }
}

/// The bar, on a terminal only.
struct DrainBar(ProgressBar, Instant);

impl DrainBar {
    fn new(quiet: bool) -> Self {
        let target = if quiet || !is_terminal() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template("{spinner} {bar:28.cyan/dim} {msg}");
        let bar = ProgressBar::with_draw_target(Some(1), target);
        DrainBar(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())), Instant::now())
    }

    fn show(&self, sums: &DrainProgress) {
        let rate = sums.handed as f64 / self.1.elapsed().as_secs_f64().max(0.001);
        self.0.set_length(sums.total.max(1));
        self.0.set_position(sums.handed);
        self.0.set_message(format!(
            "{} of {} handed on, {}/s",
            human_bytes(sums.handed),
            human_bytes(sums.total),
            human_bytes(rate as u64)
        ));
    }

    fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// The staged files of the node.
fn print_staged(report: &DrainReport) {
    if let Some(why) = &report.unsaved_error {
        anstream::println!(
            "  not known  whether the node keeps staged files that the store does not have: {}",
            printable(why.as_bytes())
        );
    }
    if report.unsaved_files > 0 {
        anstream::println!(
            "  not uploaded  {} staged files on its disks: stop the node after their upload; 'spurline status --unsaved' lists the \
             files and the reasons",
            report.unsaved_files
        );
    }
    if report.scratch_files > 0 {
        anstream::println!("  scratch  {} files on its disks are gone with the node", report.scratch_files);
    }
}

fn print_report(report: &DrainReport) {
    let node = &report.node;
    let handed = human_bytes(report.bytes_handed_on);
    let total = human_bytes(report.bytes_total);
    let share = if report.weight.is_none() { "keeps its share" } else { "has no share any more" };
    if report.state == STATE_INTERRUPTED {
        anstream::println!(
            "interrupted: {handed} of {total} handed on, node {node} {share}; run it again to go on, what was handed on \
             is not sent again"
        );
        return;
    }
    let again = if report.was_drained { " (it had no share before)" } else { "" };
    let moved = human_bytes(report.bytes_moved);
    anstream::println!("node {node}{again}: {handed} of {total} of its recently read data handed on, {moved} sent now");
    if report.bytes_not_listed > 0 {
        anstream::println!(
            "  not handed on  {} of files that were not read or loaded lately: when they are read, other nodes fetch them \
             from their source",
            human_bytes(report.bytes_not_listed)
        );
    }
    for UnmovedFile { path, reason } in report.failed.iter().take(SHOWN_FAILED_FILES) {
        anstream::println!("  not handed on  {path}: {reason}");
    }
    if report.failed.len() > SHOWN_FAILED_FILES {
        anstream::println!("  and {} more, which --json names", report.failed.len() - SHOWN_FAILED_FILES);
    }
    print_staged(report);
    if report.weight.is_none() {
        anstream::println!("its registry stores no weights: remove the node from the list, or stop it");
    } else {
        anstream::println!(
            "it has no share of the blocks until it is started again; until it ends, other nodes fetch missing blocks from it"
        );
    }
}
