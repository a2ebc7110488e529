//! Shows a job: a progress bar during the run, a few lines after the end.

use crate::report::{printable, printable_json};
use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use spurline_jobs::{CountOptions, JobAction, JobProgress, JobReport, JobState};
use spurline_types::units::human_bytes;
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::process::ExitCode;

const RED: Style = AnsiColor::Red.on_default().bold();
const GREEN: Style = AnsiColor::Green.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default();
/// Failed files listed on a terminal; `--json` lists more.
const LISTED_FAILED_FILES: usize = 10;
const PROGRESS_BAR_STEPS: u64 = 1000;

/// Whether standard error is a terminal.
pub fn is_terminal() -> bool {
    std::io::stderr().is_terminal()
}

/// The bar, on a terminal only.
pub struct JobBar(ProgressBar);

impl JobBar {
    /// An empty bar; none when `quiet`.
    pub fn new(quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template("{spinner} {bar:28.cyan/dim} {msg}");
        let bar = ProgressBar::with_draw_target(Some(PROGRESS_BAR_STEPS), target);
        JobBar(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// Shows the progress.
    pub fn show(&self, job: &JobReport) {
        let counts = job.count_options();
        let share = job.progress.share(counts).unwrap_or(0.0);
        self.0.set_position((share * PROGRESS_BAR_STEPS as f64) as u64);
        self.0.set_message(progress_line(&printable_progress(job), counts));
        self.0.tick();
    }

    /// Prints a line above the bar.
    pub fn say(&self, words: &str) {
        self.0.suspend(|| anstream::eprintln!("{words}"));
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// The progress without control characters, which file names may contain.
fn printable_progress(job: &JobReport) -> JobProgress {
    serde_json::from_value(printable_json(json!(job.progress))).unwrap_or_default()
}

/// The number of files shown: paths that were not found are failures, but no part of the total.
fn total_text(p: &JobProgress, done: u64) -> u64 {
    p.files_total.max(done + p.files_failed)
}

fn duration_text(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// The line beside the bar.
fn progress_line(p: &JobProgress, counts: CountOptions) -> String {
    let at_least = if p.listed { "" } else { "+" };
    let (files, bytes) = match p.state {
        JobState::Verifying => (p.files_verified, p.bytes_verified),
        _ => (p.files_done, p.bytes_done),
    };
    let mut line = format!("{} {files} of {}{at_least} files", p.state.word().to_lowercase(), total_text(p, files));
    if counts.metadata_only {
        let _ = write!(line, ", {:.0}/s", p.files_per_second);
    } else {
        let all = p.bytes_total;
        let now = p.bytes_per_second as u64;
        let _ = write!(line, ", {} of {}{at_least}, {}/s", human_bytes(bytes), human_bytes(all), human_bytes(now));
    }
    if p.files_failed > 0 {
        let _ = write!(line, ", {} failed", p.files_failed);
    }
    if let Some(left) = p.remaining(counts) {
        let _ = write!(line, ", {} left", duration_text(left));
    }
    if !p.why.is_empty() {
        let _ = write!(line, " ({})", p.why);
    }
    line
}

/// Prints the outcome or the progress of a job; the exit code is 1 after a failure or a stop.
pub fn print_report(job: &JobReport, as_json: bool) -> ExitCode {
    let bad = matches!(job.progress.state, JobState::Failed | JobState::Stopped);
    if as_json {
        print_json(job);
    } else {
        let id = printable(job.id.as_bytes());
        let frees = job.action == JobAction::Free;
        anstream::print!("{}", report_text(&id, frees, &printable_progress(job), job.count_options()));
    }
    ExitCode::from(u8::from(bad))
}

/// Prints a job as a line of JSON.
pub fn print_json(job: &JobReport) {
    anstream::println!("{}", json!(job));
}

fn report_text(id: &str, free: bool, p: &JobProgress, counts: CountOptions) -> String {
    let colour = match p.state {
        JobState::Succeeded => GREEN,
        JobState::Failed | JobState::Stopped => RED,
        JobState::Waiting | JobState::Running | JobState::Verifying => YELLOW,
    };
    let mut out = format!("{id}  {colour}{}{colour:#}  {}", p.state, duration_text(p.seconds));
    if !p.why.is_empty() {
        let _ = write!(out, "  {}", p.why);
    }
    let at_least = if p.listed { "" } else { "+" };
    // A file that fails the check was loaded, but is not done.
    let (done, word) = match counts {
        CountOptions { verify: true, .. } => (p.files_verified, "verified"),
        CountOptions { metadata_only: true, .. } => (p.files_done, "looked up"),
        _ => (p.files_done, "done"),
    };
    if free && p.listed && total_text(p, done) == 0 {
        // Blocks of no known files.
        bytes_line(&mut out, free, p, counts);
        return out + &note_line(p);
    }
    let _ = write!(out, "\n  files   {done} of {}{at_least} {word}", total_text(p, done));
    if counts.verify {
        let _ = write!(out, ", {} loaded", p.files_done);
    }
    if p.files_skipped > 0 {
        let _ = write!(out, ", {} were held already", p.files_skipped);
    }
    if p.files_failed > 0 {
        let _ = write!(out, ", {RED}{} failed{RED:#}", p.files_failed);
    }
    bytes_line(&mut out, free, p, counts);
    if let Some(left) = p.remaining(counts) {
        let _ = write!(out, ", {} left", duration_text(left));
    }
    out.push_str(&note_line(p));
    for failed in p.failed.iter().take(LISTED_FAILED_FILES) {
        let _ = writeln!(out, "  failed  {}: {}", failed.path, failed.reason);
    }
    if p.files_failed > LISTED_FAILED_FILES as u64 {
        let _ = writeln!(
            out,
            "  failed  {} more; --progress --json names up to 1000",
            p.files_failed - LISTED_FAILED_FILES as u64
        );
    }
    out
}

/// The end of the line before, and the note.
fn note_line(p: &JobProgress) -> String {
    if p.note.is_empty() { "\n".to_owned() } else { format!("\n  note    {YELLOW}{}{YELLOW:#}\n", p.note) }
}

/// The line of bytes, for jobs that transfer any.
fn bytes_line(out: &mut String, free: bool, p: &JobProgress, counts: CountOptions) {
    if counts.metadata_only {
        return;
    }
    let at_least = if p.listed { "" } else { "+" };
    let done = human_bytes(p.bytes_done);
    let total = human_bytes(p.bytes_total);
    let moved = human_bytes(p.bytes_moved);
    if free {
        // The size of the files says neither how much was cached nor how fast that was dropped.
        let files = if p.files_total > 0 { format!("; the files have {total}{at_least}") } else { String::new() };
        let _ = write!(out, "\n  bytes   {moved} freed{files}");
        return;
    }
    let _ = write!(out, "\n  bytes   {done} of {total}{at_least}, {moved} fetched");
    if p.state.is_ended() && p.seconds > 0.0 {
        let _ = write!(out, ", {}/s", human_bytes((p.bytes_done as f64 / p.seconds) as u64));
    } else {
        let _ = write!(out, ", {}/s now", human_bytes(p.bytes_per_second as u64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(p: &JobProgress, counts: CountOptions) -> String {
        anstream::adapter::strip_str(&report_text("load-1", false, p, counts)).to_string()
    }

    #[test]
    fn nothing_is_told_as_done_and_as_failed() {
        let p = JobProgress {
            state: JobState::Failed,
            listed: true,
            files_total: 3,
            files_done: 3,
            files_failed: 3,
            bytes_total: 300,
            bytes_done: 300,
            ..JobProgress::default()
        };
        let said = told(&p, CountOptions { verify: true, metadata_only: false });
        assert!(said.contains("files   0 of 3 verified, 3 loaded, 3 failed"), "{said}");
        // Three files were done, three names were not found.
        let said = told(&p, CountOptions::default());
        assert!(said.contains("files   3 of 6 done, 3 failed"), "{said}");
        let p = JobProgress { files_failed: 0, note: "1 node is up: 1 copy at most".into(), ..p };
        let said = told(&p, CountOptions { verify: false, metadata_only: true });
        assert!(said.contains("files   3 of 3 looked up\n") && !said.contains("300 B"), "{said}");
        assert!(said.contains("note    1 node is up"), "{said}");
    }
}
