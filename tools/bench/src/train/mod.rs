//! `bench train`: how many accelerators a folder, a mount or a mount with a node feeds, by replaying the reading of MLPerf
//! Storage. This module finds and reports the number.

mod data_set;
pub mod feeds;
mod model;
mod replay;

use crate::cpu;
use crate::error::{BenchError, Result};
use crate::machine;
use crate::mount::{CounterValues, counter_growth};
use crate::numbers::{median, three_digits};
use crate::plot::{BenchChart, ChartSeries};
use crate::report::{ReportOutputs, ReportSection};
use crate::scratch::{self, ScratchDir};
use crate::suite;
use feeds::{FeedCounters, FeedKind, FeedWorkplace, TrainFeed};
use model::{AcceleratorName, ModelName, TrainLoad};
use replay::{ReplayFigures, ReplayPlan, run_replay};
use serde_json::{Value, json};
use spurline_types::Size;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The arguments of `bench train`.
#[derive(Debug, clap::Args)]
pub struct TrainArgs {
    /// Model whose reading is replayed
    #[arg(long, value_name = "MODEL")]
    pub model: ModelName,
    /// Accelerator that is emulated
    #[arg(long, value_name = "KIND", default_value = "h100")]
    pub accelerator: AcceleratorName,
    /// Folder to read, such as one of a mount; repeat for more [default: own files, by --feed]
    #[arg(long, value_name = "DIR", conflicts_with = "feed")]
    pub dir: Vec<PathBuf>,
    /// Ways to read own files; repeat for more [default: all]
    #[arg(long, value_name = "KIND")]
    pub feed: Vec<FeedKind>,
    /// Only write the files into this folder, for example into the source of a mount
    #[arg(long, value_name = "DIR", conflicts_with_all = ["dir", "feed"])]
    pub make: Option<PathBuf>,
    /// Bytes of the files in all; MLPerf asks for five times the memory of all clients
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub data: Size,
    /// Emulated accelerators [default: the greatest number that is fed]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub accelerators: Option<u32>,
    /// Length of one measurement
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = spurline_types::parse_duration)]
    pub time: Duration,
    /// Measurements at the number that is reported; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,
    /// Forms of the report.
    #[command(flatten)]
    pub report: ReportOutputs,
    /// Folder for own files, caches and mountpoints
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub work_dir: PathBuf,
    /// The spurline to measure [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "FILE")]
    pub spurline: Option<PathBuf>,
}

/// A measurement of a feed.
#[derive(Debug, Clone)]
struct TrainRun {
    accelerators: usize,
    figures: ReplayFigures,
    /// Processor seconds by role.
    cpu: Vec<(&'static str, f64)>,
    /// Counters of the mount and the node that grew.
    grown: CounterValues,
}

/// The result of a feed.
struct FeedOutcome {
    name: String,
    /// Accelerators fed at the required utilisation; `None` for a given number.
    fed: Option<usize>,
    /// Measurements on the way.
    tried: Vec<TrainRun>,
    /// Measurements at the reported number.
    runs: Vec<TrainRun>,
}

impl FeedOutcome {
    fn median_of(&self, of: impl Fn(&TrainRun) -> f64) -> f64 {
        median(&self.runs.iter().map(of).collect::<Vec<_>>())
    }

    /// Corrects the number of a single measurement by the median of all rounds. Without a confirmation, the result is the next
    /// smaller number that was fed on the way, from a single measurement.
    fn correct_number(&mut self, required: f64) {
        let Some(fed) = self.fed else { return };
        if median(&self.runs.iter().map(|run| run.figures.utilisation()).collect::<Vec<_>>()) >= required {
            // A single measurement may also fail by chance.
            self.fed = Some(self.runs.first().map_or(fed, |run| run.accelerators));
            return;
        }
        if fed == 0 {
            return;
        }
        let refused = self.runs.first().map_or(0, |run| run.accelerators);
        self.tried.append(&mut self.runs);
        let best = self
            .tried
            .iter()
            .filter(|run| run.accelerators < refused && run.figures.utilisation() >= required)
            .max_by_key(|run| run.accelerators)
            .cloned();
        self.fed = Some(best.as_ref().map_or(0, |run| run.accelerators));
        self.runs =
            best.or_else(|| self.tried.iter().min_by_key(|run| run.accelerators).cloned()).into_iter().collect();
    }
}

/// Runs the command.
///
/// # Errors
/// `Usage` and `Missing` for wrong arguments and missing prerequisites; `Failed` when a feed does not work.
pub fn run(args: &TrainArgs) -> Result<()> {
    crate::stop::catch_signals()?;
    args.report.check_places()?;
    let load = TrainLoad::find(args.model, args.accelerator)?;
    if args.time < Duration::from_millis(100) {
        return Err(BenchError::Usage("--time below 100ms measures nothing: give 10s".into()));
    }
    let files = data_set::plan_files(&load, args.data.0);
    if let Some(dir) = &args.make {
        data_set::make_files(dir, &files)?;
        anstream::println!("{} files of {} in {}", files.len(), load.model_word(), dir.display());
        return Ok(());
    }
    let me = std::env::current_exe().map_err(|e| BenchError::io("can't find this program", &e))?;
    let spurline = suite::program(args.spurline.as_deref(), &me)?;
    scratch::sweep_stale(&args.work_dir);
    let scratch = ScratchDir::new(&args.work_dir, "train", "--work-dir")?;
    let about = machine::describe_machine(scratch.path(), scratch.path());
    let load_before = machine::load_average();
    let summary = suite::one_line(&about);
    let demand = demand_text(&load);
    anstream::println!("{summary}\n{demand}");
    let (feeds, mut notes) = open_feeds(args, &files, &spurline, &scratch)?;
    let mut outcomes = Vec::new();
    for feed in &feeds {
        outcomes.push(search_feed(args, &load, feed, &spurline)?);
    }
    // In turn, so that other load on the machine affects all feeds alike.
    for round in 1..args.rounds {
        for (feed, outcome) in feeds.iter().zip(&mut outcomes) {
            let accelerators = outcome.runs.first().map_or(1, |run| run.accelerators);
            outcome.runs.push(measure_feed(args, &load, feed, &spurline, accelerators, round)?);
        }
    }
    outcomes.iter_mut().for_each(|outcome| outcome.correct_number(load.required));
    notes.push(format!(
        "Load average of this machine: {load_before:.1} before, {:.1} after, on {} processors.",
        machine::load_average(),
        machine::cpu_count()
    ));
    let mut section = ReportSection::of_table(result_table(&load, &outcomes), charts_of(&load, &outcomes));
    anstream::print!("\n{}", section.table_text());
    args.report.plot_charts(&section);
    section.about = vec![summary, demand];
    for outcome in &outcomes {
        let sentence = sentence(&load, outcome);
        anstream::println!("{sentence}");
        section.about.push(sentence);
    }
    notes.iter().for_each(|note| anstream::println!("{note}"));
    let result = json!({
        "schema": "spurline-bench-train/1", "spurline": env!("CARGO_PKG_VERSION"),
        "model": load.model_word(), "accelerator": load.accelerator_word(), "required_utilisation": load.required,
        "needs_bytes_per_second": load.bytes_per_second(), "needs_opens_per_second": load.opens_per_second(),
        "batch": load.batch, "threads": load.threads, "compute_seconds": load.compute.as_secs_f64(),
        "machine": about, "notes": notes, "feeds": outcomes.iter().map(outcome_json).collect::<Vec<_>>(),
    });
    section.notes = notes;
    args.report.write_reports(&result, "Spurline bench train", &[section])
}

fn demand_text(load: &TrainLoad) -> String {
    format!(
        "{} on {}: {} GB/s and {} opens/s for each accelerator, fed at {:.0} % utilisation; {} readers, batches of {}",
        load.model_word(),
        load.accelerator_word(),
        three_digits(load.bytes_per_second() / 1e9),
        three_digits(load.opens_per_second()),
        load.required * 100.0,
        load.threads,
        load.batch
    )
}

/// Makes the feeds; feeds that lack a prerequisite become notes, unless named.
fn open_feeds(
    args: &TrainArgs,
    files: &[data_set::DataFile],
    spurline: &Path,
    scratch: &ScratchDir,
) -> Result<(Vec<TrainFeed>, Vec<String>)> {
    let mut feeds = Vec::new();
    let mut notes = Vec::new();
    if !args.dir.is_empty() {
        for dir in &args.dir {
            feeds.push(feeds::open_folder(spurline, dir)?);
        }
        return Ok((feeds, notes));
    }
    let source = scratch.subdir("source")?;
    data_set::make_files(&source, files)?;
    let bytes: u64 = files.iter().map(|file| file.len).sum();
    notes.push(format!(
        "{} files, {} MB, compared byte by byte through each feed first.",
        files.len(),
        bytes / 1_000_000
    ));
    let place = FeedWorkplace { spurline, scratch, source: &source, files, round_trip: Duration::ZERO };
    let all = [FeedKind::Directory, FeedKind::Mount, FeedKind::Node];
    for kind in all.into_iter().filter(|kind| args.feed.is_empty() || args.feed.contains(kind)) {
        match place.open_feed(kind) {
            Ok(feed) => feeds.push(feed),
            Err(BenchError::Missing(why)) if args.feed.is_empty() => {
                notes.push(format!("SKIP: {}: {why}", kind.word()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok((feeds, notes))
}

/// Finds the greatest number of accelerators that the feed serves, and measures that number once.
fn search_feed(args: &TrainArgs, load: &TrainLoad, feed: &TrainFeed, spurline: &Path) -> Result<FeedOutcome> {
    let measure = |n: usize| -> Result<TrainRun> {
        let run = measure_feed(args, load, feed, spurline, n, 0)?;
        let share = run.figures.utilisation() * 100.0;
        anstream::eprintln!("{}: {n} accelerators, utilisation {share:.1} %", feed.name);
        Ok(run)
    };
    let name = feed.name.clone();
    if let Some(n) = args.accelerators {
        return Ok(FeedOutcome { name, fed: None, tried: Vec::new(), runs: vec![measure(n as usize)?] });
    }
    // How many there could be: the rate without computing, by a short measurement.
    let plan = ReplayPlan {
        load,
        dir: &feed.dir,
        files: &feed.files,
        accelerators: 2,
        compute: Duration::ZERO,
        time: args.time.min(Duration::from_secs(3)),
        seed: 1,
    };
    let most = run_replay(&plan, || Ok(()), Ok)?;
    let rate = most.bytes as f64 / most.seconds.max(1e-9);
    let mut n = ((rate / load.bytes_per_second() / load.required) as usize).clamp(1, 4096);
    let mut tried: Vec<TrainRun> = Vec::new();
    let mut best: Option<TrainRun> = None;
    let mut least_failed = usize::MAX;
    // Each step halves the unknown range, or moves by an eighth.
    for _ in 0..8 {
        let run = measure(n)?;
        tried.push(run.clone());
        if run.figures.utilisation() >= load.required {
            best = Some(run);
            let next = n + (n / 8).max(1);
            if next >= least_failed {
                break;
            }
            n = next;
        } else {
            least_failed = n;
            let served = best.as_ref().map_or(0, |run| run.accelerators);
            // What was delivered is about what can be fed.
            let guess = (n as f64 * run.figures.utilisation() / load.required) as usize;
            n = guess.clamp(served + 1, n.saturating_sub(1).max(served + 1));
            if n >= least_failed {
                break;
            }
        }
    }
    let fed = best.as_ref().map_or(0, |run| run.accelerators);
    let reported = best.or_else(|| tried.last().cloned());
    Ok(FeedOutcome { name, fed: Some(fed), tried, runs: reported.into_iter().collect() })
}

/// A measurement with processor times and counters before and after.
fn measure_feed(
    args: &TrainArgs,
    load: &TrainLoad,
    feed: &TrainFeed,
    spurline: &Path,
    accelerators: usize,
    round: u32,
) -> Result<TrainRun> {
    let plan = ReplayPlan {
        load,
        dir: &feed.dir,
        files: &feed.files,
        accelerators,
        compute: load.compute,
        time: args.time,
        seed: u64::from(round) * 1000 + accelerators as u64 + 1,
    };
    let mut outcome = None;
    let figures = run_replay(
        &plan,
        || Ok((own_cpu()?, feed.read_counters(spurline)?)),
        |(cpu_before, before)| {
            let used = own_cpu()? - cpu_before;
            outcome = Some((used, before, feed.read_counters(spurline)?));
            Ok(())
        },
    )?;
    let (used, before, after) = outcome.unwrap_or_default();
    let (cpu, grown) = role_figures(used, &before, &after);
    Ok(TrainRun { accelerators, figures, cpu, grown })
}

fn own_cpu() -> Result<f64> {
    cpu::of_process(std::process::id()).map(|time| time.own)
}

/// Processor seconds by role, and what grew: the node's counters with a prefix.
fn role_figures(reader: f64, before: &FeedCounters, after: &FeedCounters) -> (Vec<(&'static str, f64)>, CounterValues) {
    let mut cpu = vec![("reader", reader)];
    let mut grown = CounterValues::new();
    for (role, prefix, before, after) in
        [("mount", "", &before.mount, &after.mount), ("node", "node.", &before.node, &after.node)]
    {
        let (Some(before), Some(after)) = (before, after) else { continue };
        let growth = counter_growth(before, after);
        cpu.push((role, growth.get("usage.cpu_us").copied().unwrap_or(0) as f64 / 1e6));
        grown.extend(growth.into_iter().map(|(name, n)| (format!("{prefix}{name}"), n)));
    }
    (cpu, grown)
}

/// Processor seconds of a role for each GiB.
fn cpu_per_gib(run: &TrainRun, role: &str) -> Option<f64> {
    let used = run.cpu.iter().find(|(name, _)| *name == role)?.1;
    (run.figures.bytes > 0).then(|| used / (run.figures.bytes as f64 / f64::from(1u32 << 30)))
}

/// Processors that the client (reader and mount) uses for each accelerator.
fn client_cpu(run: &TrainRun) -> f64 {
    let used: f64 = run.cpu.iter().filter(|(role, _)| *role != "node").map(|(_, used)| used).sum();
    used / run.figures.seconds.max(1e-9) / run.accelerators.max(1) as f64
}

fn result_table(load: &TrainLoad, outcomes: &[FeedOutcome]) -> Vec<Vec<String>> {
    let heads = [
        "feed",
        "accelerators fed",
        "measured with",
        "utilisation",
        "GB/s",
        "opens/s",
        "CPU-s/GiB reader",
        "mount",
        "node",
        "client CPUs per accelerator",
    ];
    let mut table = vec![heads.map(str::to_owned).to_vec()];
    for outcome in outcomes {
        let cpu = |role: &'static str| {
            let all: Vec<f64> = outcome.runs.iter().filter_map(|run| cpu_per_gib(run, role)).collect();
            if all.is_empty() { "-".to_owned() } else { three_digits(median(&all)) }
        };
        let per_second = |of: fn(&ReplayFigures) -> u64| {
            outcome.median_of(|run| of(&run.figures) as f64 / run.figures.seconds.max(1e-9))
        };
        table.push(vec![
            outcome.name.clone(),
            outcome.fed.map_or("-".into(), |fed| fed.to_string()),
            outcome.runs.first().map_or("-".into(), |run| run.accelerators.to_string()),
            format!(
                "{:.1} % (of {:.0} %)",
                outcome.median_of(|run| run.figures.utilisation()) * 100.0,
                load.required * 100.0
            ),
            three_digits(per_second(|figures| figures.bytes) / 1e9),
            three_digits(per_second(|figures| figures.opens)),
            cpu("reader"),
            cpu("mount"),
            cpu("node"),
            three_digits(outcome.median_of(client_cpu)),
        ]);
    }
    table
}

/// A sentence: how many are fed, and the bytes that the counters prove.
fn sentence(load: &TrainLoad, outcome: &FeedOutcome) -> String {
    let share = outcome.median_of(|run| run.figures.utilisation()) * 100.0;
    let required = load.required * 100.0;
    let measured = outcome.runs.first().map_or(0, |run| run.accelerators);
    let fed = match outcome.fed {
        Some(0) => format!("none is fed: {} at {share:.1} %, {required:.0} % required", accelerator_count(measured)),
        Some(n) => format!("{} fed at {required:.0} % or more (median {share:.1} %)", accelerator_count(n)),
        None => format!("{} at {share:.1} %, {required:.0} % required", accelerator_count(measured)),
    };
    format!("{}: {fed}{}", outcome.name, outcome.runs.last().map_or(String::new(), proof))
}

fn accelerator_count(n: usize) -> String {
    if n == 1 { "1 accelerator".to_owned() } else { format!("{n} accelerators") }
}

/// The evidence of the mount's and the node's counters about a run.
fn proof(run: &TrainRun) -> String {
    let grown = |name: &str| run.grown.get(name).copied().unwrap_or(0);
    let mb = |name: &str| grown(name) / 1_000_000;
    if !run.cpu.iter().any(|(role, _)| *role == "mount") {
        return String::new();
    }
    let read = run.figures.bytes / 1_000_000;
    let parts = [
        ("passthrough opens", grown("fuse.passthrough_opens"), ""),
        ("through FUSE", mb("fuse.read_bytes"), " MB"),
        ("over RDMA", mb("rdma.recv_bytes"), " MB"),
        ("over TCP", mb("tcp.recv_bytes"), " MB"),
        ("from the origin", mb("object.get_bytes") + mb("node.object.get_bytes"), " MB"),
    ];
    let parts: Vec<String> =
        parts.iter().filter(|(_, n, _)| *n > 0).map(|(what, n, unit)| format!("{n}{unit} {what}")).collect();
    format!("; {read} MB read in the last measurement, by the counters {}", parts.join(", "))
}

fn charts_of(load: &TrainLoad, outcomes: &[FeedOutcome]) -> Vec<BenchChart> {
    let over_time = outcomes.iter().filter_map(|outcome| {
        let run = outcome.runs.last()?;
        let points = run.figures.over_time.iter().map(|(at, rate)| (*at, rate / 1e9)).collect();
        Some(ChartSeries { name: format!("{} ({})", outcome.name, run.accelerators), points })
    });
    let over_count = outcomes.iter().map(|outcome| {
        let mut points: Vec<(f64, f64)> = outcome
            .tried
            .iter()
            .chain(&outcome.runs)
            .map(|run| (run.accelerators as f64, run.figures.utilisation() * 100.0))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        ChartSeries { name: outcome.name.clone(), points }
    });
    let cpu = outcomes.iter().flat_map(|outcome| {
        ["reader", "mount", "node"].into_iter().filter_map(|role| {
            let all: Vec<f64> = outcome.runs.iter().filter_map(|run| cpu_per_gib(run, role)).collect();
            let name = format!("{}: {role}", outcome.name);
            (!all.is_empty()).then(|| ChartSeries::bar(name, median(&all)))
        })
    });
    let required = Some(("required".to_owned(), load.required * 100.0));
    let utilisation =
        BenchChart::lines("Utilisation over accelerators", "accelerators", "percent", over_count.collect());
    vec![
        BenchChart::lines("Throughput over time", "seconds", "GB/s", over_time.collect()),
        BenchChart { mark: required, ..utilisation },
        BenchChart::bars("Processor time", "CPU-s/GiB", cpu.collect()),
    ]
}

fn outcome_json(outcome: &FeedOutcome) -> Value {
    json!({
        "feed": outcome.name, "accelerators_fed": outcome.fed,
        "utilisation": outcome.median_of(|run| run.figures.utilisation()),
        "client_cpus_per_accelerator": outcome.median_of(client_cpu),
        "runs": outcome.runs.iter().map(run_json).collect::<Vec<_>>(),
        "tried": outcome.tried.iter().map(run_json).collect::<Vec<_>>(),
    })
}

fn run_json(run: &TrainRun) -> Value {
    let figures = &run.figures;
    let cpu: serde_json::Map<String, Value> = run
        .cpu
        .iter()
        .map(|(role, used)| {
            (
                (*role).to_owned(),
                json!({ "seconds": used, "seconds_per_gib": cpu_per_gib(run, role),
                    "cpus_per_accelerator": used / figures.seconds.max(1e-9) / run.accelerators.max(1) as f64 }),
            )
        })
        .collect();
    json!({
        "accelerators": run.accelerators, "utilisation": figures.utilisation(), "utilisations": figures.utilisations,
        "seconds": figures.seconds, "bytes": figures.bytes, "opens": figures.opens, "steps": figures.steps,
        "cpu": cpu, "counters": run.grown,
        "over_time": figures.over_time.iter()
            .map(|(at, rate)| json!({ "at": at, "bytes_per_second": rate })).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_at(accelerators: usize, utilisation: f64) -> TrainRun {
        let figures =
            ReplayFigures { utilisations: vec![utilisation], bytes: 1 << 30, seconds: 1.0, ..Default::default() };
        let cpu = vec![("reader", 0.2), ("mount", 0.3), ("node", 0.4)];
        TrainRun { accelerators, figures, cpu, grown: [("tcp.recv_bytes".to_owned(), 5_000_000)].into() }
    }

    #[test]
    fn a_number_that_the_rounds_do_not_confirm_is_withdrawn() {
        let load = TrainLoad::find(ModelName::Retinanet, AcceleratorName::B200).unwrap();
        let outcome = |runs| FeedOutcome {
            name: "mount".into(),
            fed: Some(5),
            tried: vec![run_at(4, 0.95), run_at(6, 0.5), run_at(5, 0.9)],
            runs,
        };
        let mut confirmed = outcome(vec![run_at(5, 0.9), run_at(5, 0.86), run_at(5, 0.2)]);
        confirmed.correct_number(load.required);
        assert_eq!((confirmed.fed, confirmed.runs.len()), (Some(5), 3));
        assert!(sentence(&load, &confirmed).contains("5 accelerators fed at 85 % or more (median 86.0 %)"));
        assert!(sentence(&load, &confirmed).contains("5 MB over TCP"), "{}", sentence(&load, &confirmed));
        let mut refused = outcome(vec![run_at(5, 0.9), run_at(5, 0.5), run_at(5, 0.2)]);
        refused.correct_number(load.required);
        assert_eq!((refused.fed, refused.runs.len(), refused.runs[0].accelerators), (Some(4), 1, 4));
        let mut none =
            FeedOutcome { tried: Vec::new(), ..outcome(vec![run_at(1, 0.9), run_at(1, 0.5), run_at(1, 0.2)]) };
        none.correct_number(load.required);
        assert_eq!(none.fed, Some(0));
        assert!(sentence(&load, &none).contains("none is fed: 1 accelerator at"), "{}", sentence(&load, &none));
        let mut by_chance = FeedOutcome {
            fed: Some(0),
            tried: Vec::new(),
            ..outcome(vec![run_at(1, 0.8), run_at(1, 0.9), run_at(1, 0.95)])
        };
        by_chance.correct_number(load.required);
        assert_eq!(by_chance.fed, Some(1));
        assert_eq!((client_cpu(&run_at(5, 1.0)) * 10.0).round(), 1.0, "reader and mount, not the node");
        assert_eq!(result_table(&load, &[confirmed])[1][6..9], ["0.200", "0.300", "0.400"].map(str::to_owned));
    }
}
