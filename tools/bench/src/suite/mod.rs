//! The suite: measurements, ceilings and floors. There is a module for each section; this module assembles and reports a run.

mod buffered;
mod disk;
mod far;
mod files;
mod group;
mod local;
mod net;
mod peers;
mod remote;
mod s3;
mod s3_server;
mod section;
mod setup;
mod staged;
mod start;
mod uploads;
mod writes;

use crate::error::{BenchError, Result};
use crate::machine;
use crate::report::{ReportOutputs, ReportSection};
use crate::scratch::{self, ScratchDir};
use crate::stop;
use crate::terminal::show_progress;
use crate::workplace::Workplace;
use section::SuiteSection;
use serde_json::json;
use setup::BenchSuite;
use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// The arguments of `bench suite`.
#[derive(Debug, clap::Args)]
pub struct SuiteArgs {
    /// Three short rounds of smaller data: minutes, not tens of minutes
    #[arg(long)]
    pub quick: bool,
    /// Sections to run; repeat for more [default: all]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(SECTIONS.map(|section| section.0)))]
    pub only: Vec<String>,
    /// Rounds [default: 5, with --quick 3]
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,
    /// Length of one sample [default: 1500ms, with --quick 500ms]
    #[arg(long, value_name = "TIME", value_parser = spurline_types::parse_duration)]
    pub time: Option<Duration>,
    /// Further forms of the report.
    #[command(flatten)]
    pub report: ReportOutputs,
    /// A directory in memory (tmpfs) to work in
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub memory_dir: PathBuf,
    /// A directory on the disk to measure
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub disk_dir: PathBuf,
    /// Files of the tree that the section `writes` unpacks [default: 10000, with --quick 2000]
    #[arg(long, value_name = "N")]
    pub tree_files: Option<usize>,
    /// The spurline to measure [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "FILE")]
    pub spurline: Option<PathBuf>,
    /// The program with the embedded S3 server [default: spurline-testkit beside this program]
    #[arg(long, value_name = "FILE")]
    pub s3_server: Option<PathBuf>,
    /// Exit with 1 when a figure is below its floor
    #[arg(long)]
    pub strict: bool,
}

/// Greatest memory use of a section, including data sets and page cache.
const SECTION_MEMORY_BYTES: u64 = 10 << 30;

type SectionRun = fn(&BenchSuite) -> Result<SuiteSection>;

const SECTIONS: [(&str, SectionRun); 13] = [
    ("local", local::run),
    ("remote", remote::run),
    ("group", group::run),
    ("net", net::run),
    ("buffered", buffered::run),
    ("disk", disk::run),
    ("files", files::run),
    ("s3", s3::run),
    ("far", far::run),
    ("start", start::run),
    ("writes", writes::run),
    ("uploads", uploads::run),
    ("staged", staged::run),
];

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuiteOutcome {
    /// Figures at the floor or above.
    pub met: usize,
    pub below: usize,
    /// Figures that are missing or doubtful.
    pub broken: usize,
    /// Sections with figures.
    pub measured: usize,
    /// Whether anything below a floor is a failure.
    pub strict: bool,
}

pub fn run(args: &SuiteArgs) -> Result<SuiteOutcome> {
    stop::catch_signals()?;
    args.report.check_places()?;
    scratch::sweep_stale(&args.disk_dir);
    let suite = BenchSuite {
        quick: args.quick,
        rounds: args.rounds.unwrap_or(if args.quick { 3 } else { 5 }).max(1),
        time: args.time.unwrap_or(Duration::from_millis(if args.quick { 500 } else { 1500 })),
        memory: Workplace::new(&args.memory_dir, "memory", "--memory-dir", args.spurline.as_deref())?,
        disk: ScratchDir::new(&args.disk_dir, "disk", "--disk-dir")?,
        s3_server: args.s3_server.clone(),
        tree_files: args.tree_files.unwrap_or(if args.quick { 2_000 } else { 10_000 }).max(1),
        next_number: Cell::new(0),
    };
    suite.memory.spurline()?;
    let about = machine::describe_machine(suite.memory.scratch.path(), suite.disk.path());
    let summary = machine::one_line(&about);
    anstream::println!("{summary}");
    let load = machine::load_average();
    let cpus = machine::cpu_count();
    if load > cpus as f64 / 2.0 {
        anstream::println!("The machine is busy (load {load:.1} on {cpus} CPUs): only ratios are meaningful.");
    }
    let start = Instant::now();
    if machine::virtual_machine() {
        let bytes = SECTION_MEMORY_BYTES.min(machine::available_bytes() / 2);
        show_progress("touching memory, so that the hypervisor has it ready");
        machine::touch_memory(bytes);
    }
    let mut sections = Vec::new();
    let mut pages = vec![ReportSection { about: vec![summary.clone()], ..ReportSection::default() }];
    for (name, run) in
        SECTIONS.into_iter().filter(|(name, _)| args.only.is_empty() || args.only.iter().any(|o| o == name))
    {
        let section = section_of(name, run(&suite), stop::check_stop())?;
        show_progress("");
        let shown = section.report();
        anstream::print!("{}", shown.to_terminal());
        args.report.plot_charts(&shown);
        sections.push(section);
        pages.push(shown);
    }
    let result = json!({
        "schema": "spurline-bench/1",
        "spurline": env!("CARGO_PKG_VERSION"),
        "taken": SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        "seconds": start.elapsed().as_secs_f64(),
        "quick": suite.quick, "rounds": suite.rounds, "sample_seconds": suite.time.as_secs_f64(),
        "machine": about, "load": { "before": load, "after": machine::load_average() },
        "sections": sections.iter().map(SuiteSection::to_json).collect::<Vec<_>>(),
    });
    let outcome = count_outcome(&sections, args.strict);
    anstream::println!(
        "\n{} of {} floors met, {} figures broken, {:.0} s",
        outcome.met,
        outcome.met + outcome.below,
        outcome.broken,
        start.elapsed().as_secs_f64()
    );
    if outcome.measured == 0 {
        anstream::println!("Nothing was measured: see the reasons above.");
    }
    args.report.write_reports(&result, "Spurline bench", &pages)?;
    Ok(outcome)
}

/// A section's result, or why there is none. A section may take an interruption for a part that is missing, so `stopped`
/// counts first.
fn section_of(name: &'static str, done: Result<SuiteSection>, stopped: Result<()>) -> Result<SuiteSection> {
    stopped?;
    match done {
        Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
        Err(e) => {
            let failed = matches!(e, BenchError::Failed(_));
            let why = if failed { format!("failed: {e}") } else { e.to_string() };
            Ok(SuiteSection { name, title: "", skipped: Some(why), notes: Vec::new(), rows: Vec::new() })
        }
        section => section,
    }
}

fn count_outcome(sections: &[SuiteSection], strict: bool) -> SuiteOutcome {
    let skipped = sections.iter().filter(|section| section.skipped.is_some()).count();
    let mut outcome = SuiteOutcome { met: 0, below: 0, broken: 0, measured: sections.len() - skipped, strict };
    for section in sections {
        outcome.broken += usize::from(section.skipped.as_ref().is_some_and(|s| s.starts_with("failed")));
        for row in &section.rows {
            outcome.broken += usize::from(row.problem.is_some());
            match row.is_met() {
                Some(true) => outcome.met += 1,
                Some(false) => outcome.below += 1,
                None => {}
            }
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_skipped_and_interrupted() {
        let name = "net";
        let missing = || Err(BenchError::Missing("no fio".into()));
        let skipped = section_of(name, missing(), Ok(())).unwrap();
        assert_eq!(skipped.skipped.as_deref(), Some("no fio"));
        let interrupted = |done, stopped| section_of(name, done, stopped).unwrap_err() == BenchError::Interrupted;
        assert!(interrupted(Err(BenchError::Interrupted), Ok(())));
        assert!(interrupted(missing(), Err(BenchError::Interrupted)));
        assert!(interrupted(Ok(skipped.clone()), Err(BenchError::Interrupted)));
        let failed = section_of(name, Err(BenchError::Failed("broken".into())), Ok(())).unwrap();
        let done = SuiteSection { skipped: None, ..skipped.clone() };
        let counts = |sections: &[SuiteSection]| {
            let outcome = count_outcome(sections, false);
            (outcome.measured, outcome.broken)
        };
        assert_eq!(counts(std::slice::from_ref(&skipped)), (0, 0));
        assert_eq!(counts(&[skipped, failed, done]), (1, 1));
    }
}
