//! The suite: measurements, ceilings and floors. There is a module for each section; this module holds the common parts and
//! assembles and reports a run.

mod buffered;
mod disk;
mod files;
mod fio_load;
mod group;
mod load;
mod local;
mod net;
mod remote;
mod s3;
mod section;
mod start;
mod uploads;
mod writes;

use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::fio;
use crate::machine;
use crate::measure::{self, BenchCase, CaseSample, FigureUnit, WarmUpResult};
use crate::mount::{CounterValues, MountUnderTest, NodeUnderTest, counter_growth};
use crate::report::{self, ReportOutputs, ReportSection};
use crate::scratch::{self, ScratchDir};
use crate::stop;
use section::SuiteSection;
use serde_json::{Value, json};
use spurline_types::Size;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

/// The arguments of `bench suite`.
#[derive(Debug, clap::Args)]
pub struct SuiteArgs {
    /// Three short rounds of smaller data: minutes, not tens of minutes
    #[arg(long)]
    pub quick: bool,
    /// Sections to run; repeat for more [default: all]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(SECTION_NAMES))]
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
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
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

/// All sections.
const SECTION_NAMES: [&str; 12] =
    ["local", "remote", "group", "net", "buffered", "disk", "files", "s3", "load", "start", "writes", "uploads"];

/// Greatest memory use of a section, including data sets and page cache.
const SECTION_MEMORY_BYTES: u64 = 10 << 30;

type SectionRun = fn(&BenchSuite) -> Result<SuiteSection>;

const SECTION_RUNS: [SectionRun; 12] = [
    local::run,
    remote::run,
    group::run,
    net::run,
    buffered::run,
    disk::run,
    files::run,
    s3::run,
    load::run,
    start::run,
    writes::run,
    uploads::run,
];

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuiteOutcome {
    /// Figures at the floor or above.
    pub met: usize,
    /// Figures below.
    pub below: usize,
    /// Figures that are missing or doubtful.
    pub broken: usize,
    /// Sections with figures.
    pub measured: usize,
    /// Whether anything below a floor is a failure.
    pub strict: bool,
}

/// The state shared by all sections.
pub struct BenchSuite {
    quick: bool,
    rounds: usize,
    time: Duration,
    /// The program under test.
    spurline: PathBuf,
    /// This program, for the parts.
    me: PathBuf,
    memory: ScratchDir,
    disk: ScratchDir,
    s3_server: Option<PathBuf>,
    tree_files: usize,
}

/// The program under test: the given program, the program beside this one, or the first in PATH.
///
/// # Errors
/// `Missing` when there is none.
pub fn program(given: Option<&Path>, me: &Path) -> Result<PathBuf> {
    given
        .map(Path::to_owned)
        .or_else(|| Some(me.with_file_name("spurline")).filter(|file| file.is_file()))
        .or_else(|| child::find_program("spurline"))
        .ok_or_else(|| {
            BenchError::Missing(
                "spurline is neither beside this program nor in PATH: name it with --spurline".to_owned(),
            )
        })
}

/// Runs the suite.
///
/// # Errors
/// When nothing could be measured, or the user interrupts; sections that can't run are skipped with the reason.
pub fn run(args: &SuiteArgs) -> Result<SuiteOutcome> {
    stop::catch_signals()?;
    args.report.check_places()?;
    report::check_report_place("--markdown", args.markdown.as_deref())?;
    let me = std::env::current_exe().map_err(|e| BenchError::io("can't find this program", &e))?;
    for dir in [&args.memory_dir, &args.disk_dir] {
        scratch::sweep_stale(dir);
    }
    let suite = BenchSuite {
        quick: args.quick,
        rounds: args.rounds.unwrap_or(if args.quick { 3 } else { 5 }).max(1),
        time: args.time.unwrap_or(Duration::from_millis(if args.quick { 500 } else { 1500 })),
        spurline: program(args.spurline.as_deref(), &me)?,
        me,
        memory: ScratchDir::new(&args.memory_dir, "memory", "--memory-dir")?,
        disk: ScratchDir::new(&args.disk_dir, "disk", "--disk-dir")?,
        s3_server: args.s3_server.clone(),
        tree_files: args.tree_files.unwrap_or(if args.quick { 2_000 } else { 10_000 }).max(1),
    };
    let about = machine::describe_machine(suite.memory.path(), suite.disk.path());
    let summary = one_line(&about);
    anstream::println!("{summary}");
    let load = machine::load_average();
    let cpus = machine::cpu_count();
    if load > cpus as f64 / 2.0 {
        anstream::println!("The machine is busy (load {load:.1} on {cpus} CPUs): only ratios are meaningful.");
    }
    let start = Instant::now();
    if machine::virtual_machine() {
        let bytes = SECTION_MEMORY_BYTES.min(machine::available_bytes() / 2);
        show_progress("start", "touching memory, so that the hypervisor has it ready");
        machine::touch_memory(bytes);
    }
    let mut sections = Vec::new();
    let mut pages = vec![ReportSection { about: vec![summary.clone()], ..ReportSection::default() }];
    for (name, run) in SECTION_NAMES.into_iter().zip(SECTION_RUNS) {
        if !args.only.is_empty() && !args.only.iter().any(|o| o == name) {
            continue;
        }
        let section = section_of(name, run(&suite), stop::check_stop())?;
        clear_line();
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
    report::write_report(args.markdown.as_deref(), || {
        let tables: String = pages[1..].iter().map(ReportSection::to_markdown).collect();
        format!("{summary}\n\nMedians of {} interleaved rounds.\n\n{tables}", suite.rounds)
    })?;
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

/// A machine in a line.
pub fn one_line(about: &Value) -> String {
    format!(
        "{}, Linux {}, {} × {}{}, {:.0} GiB of memory; memory dir: {}; disk dir: {}",
        text_of(about, "os"),
        text_of(about, "kernel"),
        about["cpus"],
        text_of(about, "cpu"),
        if about["hypervisor"] == true { " (virtual)" } else { "" },
        about["memory_bytes"].as_f64().unwrap_or(0.0) / f64::from(1u32 << 30),
        text_of(about, "memory_dir"),
        text_of(about, "disk_dir"),
    )
}

fn text_of(about: &Value, key: &str) -> String {
    about[key].as_str().unwrap_or("?").to_owned()
}

/// Shows progress: a line that is overwritten on a terminal, nothing elsewhere.
fn show_progress(section: &str, what: &str) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // A closed terminal needs no output.
        let _ = write!(err, "\r\x1b[K{section}  {what}");
        let _ = err.flush();
    }
}

fn clear_line() {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // As above.
        let _ = write!(err, "\r\x1b[K");
        let _ = err.flush();
    }
}

/// A process, the processor time of which is shown with a figure.
type CpuRole<'a> = (&'static str, &'a ServerProcess);

impl BenchSuite {
    /// The command of a part of this program, in `net`.
    fn part_command(&self, words: &[String], net: Option<&str>) -> Command {
        let mut command = child::command_in(&self.me, net);
        command.arg("part").args(words);
        command
    }

    fn log_path(&self, name: &str) -> Result<PathBuf> {
        Ok(self.memory.subdir("logs")?.join(format!("{name}.log")))
    }

    /// A mount of `source` with additional arguments, at `mnt-NAME`.
    fn start_mount(&self, name: &str, source: &str, net: Option<&str>, more: &[&str]) -> Result<MountUnderTest> {
        self.mount_with(name, source, net, more, &[])
    }

    /// The same with environment variables.
    fn mount_with(
        &self,
        name: &str,
        source: &str,
        net: Option<&str>,
        more: &[&str],
        env: &[(&str, &str)],
    ) -> Result<MountUnderTest> {
        let at = self.memory.subdir(&format!("mnt-{name}"))?;
        let mut command = child::command_in(&self.spurline, net);
        command.args(["mount", source]).arg(&at).args(["--metrics", "none"]).args(more).envs(env.iter().copied());
        MountUnderTest::start(command, &at, net, &self.log_path(name)?)
    }

    /// The empty file system, answering from a mebibyte.
    fn mount_null(&self, io: &str) -> Result<MountUnderTest> {
        self.mount_holding(io, 1 << 20)
    }

    /// The empty file system, answering from `held` bytes of memory.
    fn mount_holding(&self, io: &str, held: u64) -> Result<MountUnderTest> {
        self.mount_empty(&format!("null-{io}-{held}"), &["--io", io, "--held", &Size(held).to_string()])
    }

    fn mount_empty(&self, name: &str, more: &[&str]) -> Result<MountUnderTest> {
        let at = self.memory.subdir(&format!("mnt-{name}"))?;
        let words: Vec<String> =
            ["null", &at.display().to_string()].iter().chain(more).map(|word| (*word).to_owned()).collect();
        MountUnderTest::start(self.part_command(&words, None), &at, None, &self.log_path(name)?)
    }

    /// `N` files of `len` bytes in a directory in memory, made once.
    fn make_source(&self, name: &str, files: usize, len: u64) -> Result<PathBuf> {
        let dir = self.memory.path().join(name);
        if !dir.exists() {
            let room = scratch::free_bytes(self.memory.path());
            let wanted = files as u64 * len * 3;
            if room < wanted {
                let path = self.memory.path().display();
                let need = wanted >> 20;
                let have = room >> 20;
                return Err(BenchError::Missing(format!(
                    "{path} has {have} MiB free, {need} are needed: see --memory-dir"
                )));
            }
            let dir = self.memory.subdir(name)?;
            for i in 0..files {
                scratch::write_file(&dir.join(file_name(i)), i as u64, len)?;
            }
        }
        Ok(dir)
    }

    /// Reads files `0..files` through `at` and compares every byte.
    fn check_files(&self, section: &str, at: &Path, files: usize, len: u64) -> Result<()> {
        show_progress(section, &format!("checking {}", at.display()));
        (0..files).try_for_each(|i| scratch::check_file(&at.join(file_name(i)), i as u64, len))
    }

    fn rounds(&self, section: &'static str, cases: Vec<BenchCase<'_>>) -> Result<Vec<measure::ResultRow>> {
        measure::run_rounds(cases, self.rounds, |what| show_progress(section, what))
    }

    /// An fio job for the duration of a sample.
    fn new_job(&self, files: Vec<PathBuf>, pattern: &'static str, block: u64, jobs: usize, size: u64) -> fio::FioJob {
        fio::FioJob {
            files,
            pattern,
            block,
            jobs,
            depth: 1,
            direct: true,
            drop_cache: false,
            runtime: Some(self.time),
            size,
            apart: 0,
            net: None,
        }
    }
}

/// The name of file `i` of a source.
fn file_name(i: usize) -> String {
    format!("file-{i:05}.bin")
}

/// Processor seconds of the roles around `work`.
fn with_cpu<T>(roles: &[CpuRole<'_>], work: impl FnOnce() -> Result<T>) -> Result<(T, Vec<(&'static str, f64)>)> {
    let before: Vec<f64> = roles.iter().map(|(_, d)| d.cpu()).collect::<Result<_>>()?;
    let done = work()?;
    let used = roles
        .iter()
        .zip(before)
        .map(|((role, daemon), before)| Ok((*role, daemon.cpu()? - before)))
        .collect::<Result<Vec<_>>>()?;
    Ok((done, used))
}

/// A run of fio as a sample.
fn fio_sample(job: &fio::FioJob, unit: FigureUnit, roles: &[CpuRole<'_>]) -> Result<CaseSample> {
    let ((got, done), mut cpu) = with_cpu(roles, || job.run())?;
    cpu.push(("reader", done.cpu));
    let value = if unit == FigureUnit::Bandwidth { got.bandwidth } else { got.iops };
    let ops = got.bytes / job.block.max(1);
    Ok(CaseSample { value, bytes: got.bytes, ops, cpu, latency_us: Some((got.p50_us, got.p99_us)) })
}

/// A run of a reading part as a sample.
fn part_sample(command: Command, limit: Duration, unit: FigureUnit, roles: &[CpuRole<'_>]) -> Result<CaseSample> {
    user_sample(command, limit, unit, "reader", roles)
}

/// The same of a part whose own processor time is shown under this name.
fn user_sample(
    command: Command,
    limit: Duration,
    unit: FigureUnit,
    user: &'static str,
    roles: &[CpuRole<'_>],
) -> Result<CaseSample> {
    let (done, mut cpu) = with_cpu(roles, || child::run_to_end(command, limit))?;
    cpu.push((user, done.cpu));
    let line = done.out.lines().rfind(|l| l.starts_with('{')).unwrap_or_default();
    let json: Value =
        serde_json::from_str(line).map_err(|e| BenchError::Failed(format!("a part printed {:?}: {e}", done.out)))?;
    let number = |key: &str| json[key].as_f64().unwrap_or(0.0);
    let seconds = number("seconds");
    let bytes = number("bytes");
    let ops = number("ops");
    if seconds <= 0.0 || ops <= 0.0 {
        return Err(BenchError::Failed(format!("a part measured nothing: {line}")));
    }
    let value = if unit == FigureUnit::Bandwidth { bytes / seconds } else { ops / seconds };
    let latency_us = json["p50_us"].as_f64().zip(json["p99_us"].as_f64());
    Ok(CaseSample { value, bytes: bytes as u64, ops: ops as u64, cpu, latency_us })
}

/// The expected source of the bytes.
#[derive(Debug, Clone, Copy)]
enum BytePath {
    /// The kernel read the cached file itself.
    Passthrough,
    /// From blocks in the mount's memory.
    Memory,
    /// Over TCP.
    Tcp,
}

/// Whether a mount's counters confirm that `bytes` came by `way`; otherwise the reason.
fn wrong_path(way: BytePath, bytes: u64, grown: &CounterValues) -> Option<String> {
    let most = bytes / 10 * 9;
    let (right, names): (bool, &[&str]) = match way {
        BytePath::Passthrough => (
            growth_of(grown, "fuse.passthrough_opens") > 0 && growth_of(grown, "fuse.read_bytes") < bytes / 20,
            &["fuse.passthrough_opens", "fuse.read_bytes"],
        ),
        BytePath::Memory => (
            growth_of(grown, "fuse.read_bytes") >= most && growth_of(grown, "blockcache.mem_hit_bytes") >= most,
            &["fuse.read_bytes", "blockcache.mem_hit_bytes", "blockcache.disk_hit_bytes", "blockcache.miss_bytes"],
        ),
        BytePath::Tcp => (growth_of(grown, "tcp.recv_bytes") >= most, &["tcp.recv_bytes", "blockcache.mem_hit_bytes"]),
    };
    if right {
        return None;
    }
    let seen: Vec<String> = names.iter().map(|n| format!("{n} {}", growth_of(grown, n))).collect();
    Some(format!("{bytes} bytes did not come by {way:?}: {}", seen.join(", ")))
}

fn growth_of(grown: &crate::mount::CounterValues, name: &str) -> u64 {
    grown.get(name).copied().unwrap_or(0)
}

impl BenchSuite {
    /// Runs `job` once as a warm-up of a mount; returns the counters that grew and whether the bytes came by `way`.
    fn warm_up(&self, mounted: &MountUnderTest, job: &fio::FioJob, way: BytePath) -> Result<WarmUpResult> {
        let mut job = job.clone();
        if job.runtime.is_some() {
            job.runtime = Some(Duration::from_millis(300));
        }
        let before = mounted.counters(&self.spurline)?;
        let (got, _) = job.run()?;
        let grown = counter_growth(&before, &mounted.counters(&self.spurline)?);
        let wrong = wrong_path(way, got.bytes, &grown);
        Ok((grown, wrong))
    }

    /// A node in `net` serving `source` from a cache in memory.
    fn start_node(&self, source: &Path, addr: &str, net: Option<&str>, more: &[&str]) -> Result<NodeUnderTest> {
        self.node_with(&source.display().to_string(), addr, net, more, &[])
    }

    /// The same with environment variables.
    fn node_with(
        &self,
        source: &str,
        addr: &str,
        net: Option<&str>,
        more: &[&str],
        env: &[(&str, &str)],
    ) -> Result<NodeUnderTest> {
        let (ip, port) = addr.rsplit_once(':').unwrap_or((addr, "0"));
        let cache = self.memory.empty_subdir(&format!("cache-node-{port}"))?.display().to_string();
        let mut words: Vec<String> =
            ["--source", source, "--cache-dir", &cache, "--group-network", ip, "--group-port", port, "--allow-anyone"]
                .into_iter()
                .chain(["--metrics", "none"])
                .map(String::from)
                .collect();
        words.extend(more.iter().map(|w| (*w).to_owned()));
        let mut command = child::command_in(&self.spurline, net);
        command.arg("node").args(words).envs(env.iter().copied());
        NodeUnderTest::start(command, addr, net, &self.log_path(&format!("node-{port}"))?)
    }
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

    #[test]
    fn ways_are_told_apart() {
        let grown = |pairs: &[(&str, u64)]| pairs.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect::<CounterValues>();
        let passthrough = grown(&[("fuse.passthrough_opens", 1), ("fuse.ops", 4)]);
        assert_eq!(wrong_path(BytePath::Passthrough, 1000, &passthrough), None);
        assert!(wrong_path(BytePath::Memory, 1000, &passthrough).is_some());
        let memory = grown(&[("fuse.read_bytes", 1000), ("blockcache.mem_hit_bytes", 1000)]);
        assert_eq!(wrong_path(BytePath::Memory, 1000, &memory), None);
        assert!(wrong_path(BytePath::Passthrough, 1000, &memory).is_some_and(|w| w.contains("passthrough_opens 0")));
        assert_eq!(wrong_path(BytePath::Tcp, 1000, &grown(&[("tcp.recv_bytes", 990)])), None);
        assert!(wrong_path(BytePath::Tcp, 1000, &memory).is_some_and(|w| w.contains("tcp.recv_bytes 0")));
    }
}
