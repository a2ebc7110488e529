//! `spurline node drain`: the runtime's drain with a progress bar, and its outcome as text or JSON.

use crate::cli::DrainArgs;
use crate::jobs::show::is_terminal;
use crate::signals;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_runtime::{DrainProgress, DrainRequest, drain_node};
use spurline_types::units::human_bytes;
use std::process::ExitCode;
use std::time::Instant;

/// Failed files listed on a terminal; `--json` lists all.
const NAMED: usize = 10;

/// Runs the command; exit code 1 when not all blocks were moved, or it was interrupted.
///
/// # Errors
/// With exit code 3 when the registry, the group or the node can't be reached.
pub fn run(args: DrainArgs) -> Result<ExitCode, Fault> {
    let stop = signals::stop_flag(1)?;
    let request = DrainRequest {
        registry: args.registry,
        cache_group: args.cache_group,
        trust: args.trust.check()?,
        node: args.node,
    };
    let bar = DrainBar::new(args.json);
    let drained = drain_node(&request, &stop, &|progress| bar.show(progress))?;
    bar.end();
    let progress = &drained.progress;
    let state = match (drained.interrupted, progress.failed.is_empty()) {
        (true, _) => "interrupted",
        (false, true) => "drained",
        (false, false) => "incomplete",
    };
    let outcome = json!({
        "node": drained.node,
        "state": state,
        "was_drained": drained.was_drained,
        "bytes_total": progress.total,
        "bytes_handed_on": progress.handed,
        "bytes_not_listed": progress.unlisted,
        "bytes_moved": drained.moved,
        "failed": progress.failed.iter().map(|(path, why)| json!({"path": path, "reason": why.to_string()})).collect::<Vec<_>>(),
        "weight": drained.weight,
    });
    if args.json {
        anstream::println!("{outcome}");
    } else {
        print_outcome(&outcome);
    }
    Ok(ExitCode::from(u8::from(state != "drained")))
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

fn print_outcome(outcome: &Value) {
    let number = |key: &str| human_bytes(outcome[key].as_u64().unwrap_or(0));
    let node = outcome["node"].as_str().unwrap_or_default();
    let (handed, total) = (number("bytes_handed_on"), number("bytes_total"));
    let share = if outcome["weight"].is_null() { "keeps its share" } else { "has no share any more" };
    if outcome["state"] == "interrupted" {
        anstream::println!(
            "interrupted: {handed} of {total} handed on, node {node} {share}; run it again to go on, what was handed on \
             is not sent again"
        );
        return;
    }
    let again = if outcome["was_drained"] == true { " (it had no share before)" } else { "" };
    anstream::println!(
        "node {node}{again}: {handed} of {total} of its recently read data handed on, {} sent now",
        number("bytes_moved")
    );
    if outcome["bytes_not_listed"].as_u64() > Some(0) {
        anstream::println!(
            "  not handed on  {} of files that were not read or loaded lately: when they are read, other nodes fetch them \
             from their source",
            number("bytes_not_listed")
        );
    }
    let failed: Vec<&Value> = outcome["failed"].as_array().into_iter().flatten().collect();
    for failed in failed.iter().take(NAMED) {
        let text = |key: &str| failed[key].as_str().unwrap_or_default();
        anstream::println!("  not handed on  {}: {}", text("path"), text("reason"));
    }
    if failed.len() > NAMED {
        anstream::println!("  and {} more, which --json names", failed.len() - NAMED);
    }
    if outcome["weight"].is_null() {
        anstream::println!("its registry stores no weights: remove the node from the list, or stop it");
    } else {
        anstream::println!(
            "it has no share of the blocks until it is started again; until it ends, other nodes fetch missing blocks from it"
        );
    }
}
