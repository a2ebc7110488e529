//! `spurline demo`: runs a node and a mount on this machine over a copied data set, reads the data cold and hot, compares
//! checksums, prints figures, and removes everything, also after Ctrl-C. Uses the command line only.

mod dataset;
mod passes;
mod stage;

use crate::cli::DemoArgs;
use crate::signals;
use anstyle::{AnsiColor, Style};
use dataset::DemoDataset;
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use passes::DemoPass;
use serde_json::json;
use spurline_config::Fault;
use spurline_types::units::human_bytes;
use stage::DemoStage;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const TITLE_STYLE: Style = Style::new().bold();
const RESULT_STYLE: Style = AnsiColor::Green.on_default().bold();
const COMMAND_STYLE: Style = AnsiColor::Cyan.on_default();
const NOTE_STYLE: Style = Style::new().dimmed();

/// Reader threads: enough to show parallel reads on any machine.
const READER_THREADS: usize = 4;

/// The controls of every step: the stop flag, the time limit, the output.
pub struct DemoControl {
    stop: AtomicBool,
    limit: Duration,
    quiet: bool,
}

impl DemoControl {
    /// An error after Ctrl-C.
    fn go_on(&self) -> Result<(), Fault> {
        if self.stop.load(Ordering::Acquire) {
            return Err(Fault::failed("interrupted; everything the demo made is removed", ""));
        }
        Ok(())
    }

    /// Prints a line, unless only figures are printed.
    fn print_line(&self, text: std::fmt::Arguments<'_>) {
        if !self.quiet {
            anstream::eprintln!("{COMMAND_STYLE}::{COMMAND_STYLE:#} {text}");
        }
    }

    /// A bar over `bytes`, drawn on terminals only.
    fn progress_bar(&self, what: &'static str, bytes: u64) -> ProgressBar {
        if self.quiet {
            return ProgressBar::hidden();
        }
        let style = "   {msg:<10} {bar:32.cyan/dim} {bytes:>10} of {total_bytes}  {binary_bytes_per_sec:>12}  {eta}";
        let style = ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(bytes).with_style(style).with_message(what)
    }
}

/// Runs the command.
///
/// # Errors
/// When FUSE is missing (3), a step fails or takes too long, or a checksum differs (1).
pub fn run(args: DemoArgs) -> Result<ExitCode, Fault> {
    let control = Arc::new(DemoControl { stop: AtomicBool::new(false), limit: args.timeout, quiet: args.json });
    let stopped = Arc::clone(&control);
    signals::on_stop(move |_| stopped.stop.store(true, Ordering::Release))?;
    stage::require_fuse()?;
    // Dropped last, after all users of the directory.
    let mut stage = DemoStage::new(args.dir.as_deref(), args.timeout)?;
    control.print_line(format_args!("working in {}; it is removed at the end", stage.dir().display()));

    let dataset = dataset::make_dataset(&stage.path("data"), stage.available_bytes(args.size.bytes())?, &control)?;
    control.print_line(format_args!(
        "a data set of {TITLE_STYLE}{} files, {}{TITLE_STYLE:#} copied from /usr",
        dataset.files.len(),
        human_bytes(dataset.bytes)
    ));
    let started = stage.start_node(dataset.bytes, &control)?;
    control.print_line(format_args!(
        "a cache node serves it on {} {NOTE_STYLE}(up after {}){NOTE_STYLE:#}",
        stage.address(),
        time_text(started)
    ));

    let first = stage.start_mount(&control)?;
    control.print_line(format_args!(
        "mounted through the node at {} {NOTE_STYLE}(up after {}){NOTE_STYLE:#}",
        stage.mountpoint().display(),
        time_text(first)
    ));
    let cold = run_pass("cold", &stage, &dataset, &control)?;
    // A second pass over the same mount would read the kernel's page cache.
    stage.stop_mount(&control)?;
    let second = stage.start_mount(&control)?;
    control.print_line(format_args!(
        "mounted again: the kernel's cache is empty, the node's is warm {NOTE_STYLE}(up after {}){NOTE_STYLE:#}",
        time_text(second)
    ));
    let hot = run_pass("hot", &stage, &dataset, &control)?;
    stage.stop_mount(&control)?;
    stage.stop_node(&control)?;

    if args.json {
        let report = json!({
            "files": dataset.files.len(), "bytes": dataset.bytes, "readers": READER_THREADS, "checksums": "equal",
            "node_start_seconds": started.as_secs_f64(), "mount_start_seconds": second.as_secs_f64(),
            "passes": [cold.to_json(), hot.to_json()],
        });
        anstream::println!("{report}");
    } else {
        results_table(&dataset, &[cold, hot]);
    }
    Ok(ExitCode::SUCCESS)
}

fn run_pass(
    name: &'static str,
    stage: &DemoStage,
    dataset: &DemoDataset,
    control: &Arc<DemoControl>,
) -> Result<DemoPass, Fault> {
    let before = stage.counters()?;
    let read = passes::read_all(name, &stage.mountpoint(), dataset, READER_THREADS, control)?;
    let after = stage.counters()?;
    Ok(DemoPass::new(name, read, &before, &after))
}

fn results_table(dataset: &DemoDataset, passes: &[DemoPass]) {
    let head = ["pass", "throughput", "files/s", "time", "origin", "node to mount", "CPU node", "CPU mount"];
    anstream::println!();
    let cells: Vec<String> = head.iter().map(|h| format!("{h:>14}")).collect();
    anstream::println!("{TITLE_STYLE}{}{TITLE_STYLE:#}", cells.join(""));
    for pass in passes {
        let row = pass.row();
        let style = if pass.name == "hot" { RESULT_STYLE } else { Style::new() };
        let cells: Vec<String> = row.iter().map(|c| format!("{c:>14}")).collect();
        anstream::println!("{style}{}{style:#}", cells.join(""));
    }
    anstream::println!();
    anstream::println!(
        "{RESULT_STYLE}checksums equal{RESULT_STYLE:#}: {} files, {}, read twice through the mount by {READER_THREADS} threads.",
        dataset.files.len(),
        human_bytes(dataset.bytes)
    );
    anstream::println!(
        "{NOTE_STYLE}CPU is seconds of processor time. Node, mount and source share this machine, and the
source is in its page cache, so cold is not as slow as a real origin; BENCHMARKS.md measures properly.{NOTE_STYLE:#}"
    );
}

fn time_text(time: Duration) -> String {
    if time < Duration::from_secs(10) {
        format!("{:.2} s", time.as_secs_f64())
    } else {
        HumanDuration(time).to_string()
    }
}
