//! `bench train`: how many accelerators a folder, a mount or a mount with a node feeds, by replaying the reading of MLPerf
//! Storage. This module finds and reports the number.

mod data_set;
mod model;

use crate::cost::{RunCost, rates_json};
use crate::engine::agent::own_cpu;
use crate::engine::pattern::{ComputeSteps, FileAccess, FileList, FilePattern};
use crate::engine::{SAMPLE_INTERVAL, ThreadCrew};
use crate::error::{BenchError, FileContext as _, Result};
use crate::numbers::{known_digits, median_known, median_of, three_digits};
use crate::places::{BenchPlace, PlaceBuilder, PlaceKind};
use crate::plot::{BenchChart, ChartSeries};
use crate::report::CommandReport;
use crate::workplace::{WorkArgs, Workplace};
use data_set::DataFile;
use model::{AcceleratorName, ModelName, TrainLoad};
use serde_json::{Map, Value, json};
use spurline_types::Size;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes of a read, as numpy and TensorFlow read.
const READ_BYTES: usize = 256 << 10;
/// Longest wait for the first batch of every accelerator.
const FIRST_BATCH: Duration = Duration::from_secs(120);

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
    pub feed: Vec<PlaceKind>,
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
    /// The work folder, the program and the reports.
    #[command(flatten)]
    pub work: WorkArgs,
}

/// A folder of files.
struct TrainFeed {
    place: BenchPlace,
    files: Vec<DataFile>,
}

/// A measurement of a feed.
#[derive(Debug, Clone, Default)]
struct TrainRun {
    accelerators: usize,
    /// Length of the measurement in seconds.
    seconds: f64,
    bytes: u64,
    /// Files opened.
    opens: u64,
    /// Steps of all accelerators.
    steps: u64,
    /// Share of the time that each accelerator computed.
    utilisations: Vec<f64>,
    /// Seconds since the start, and bytes per second.
    over_time: Vec<(f64, f64)>,
    cost: RunCost,
}

impl TrainRun {
    /// The mean utilisation.
    fn utilisation(&self) -> f64 {
        self.utilisations.iter().sum::<f64>() / self.utilisations.len().max(1) as f64
    }

    /// Processors that a role uses for each accelerator.
    fn cpus_per_accelerator(&self, seconds: f64) -> f64 {
        seconds / self.seconds.max(1e-9) / self.accelerators.max(1) as f64
    }

    /// Processors that the client (reader and mount) uses for each accelerator.
    fn client_cpus(&self) -> f64 {
        self.cpus_per_accelerator(self.cost.cpu.iter().filter(|(role, _)| *role != "node").map(|(_, used)| used).sum())
    }
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
    fn utilisation(&self) -> f64 {
        median_of(&self.runs, TrainRun::utilisation)
    }

    fn accelerators(&self) -> usize {
        self.runs.first().map_or(0, |run| run.accelerators)
    }

    fn cpu_per_gib(&self, role: &str) -> Option<f64> {
        median_known(&self.runs, |run| run.cost.cpu_per_gib(role, run.bytes))
    }

    /// Corrects the number of a single measurement by the median of all rounds. Without a confirmation, the result is the next
    /// smaller number that was fed on the way, from a single measurement.
    fn correct_number(&mut self, required: f64) {
        let Some(fed) = self.fed else { return };
        if self.utilisation() >= required {
            // A single measurement may also fail by chance.
            self.fed = Some(self.accelerators());
            return;
        }
        if fed == 0 {
            return;
        }
        let refused = self.accelerators();
        self.tried.append(&mut self.runs);
        let best = self
            .tried
            .iter()
            .filter(|run| run.accelerators < refused && run.utilisation() >= required)
            .max_by_key(|run| run.accelerators)
            .cloned();
        self.fed = Some(best.as_ref().map_or(0, |run| run.accelerators));
        self.runs =
            best.or_else(|| self.tried.iter().min_by_key(|run| run.accelerators).cloned()).into_iter().collect();
    }
}

/// Runs the command.
pub fn run(args: &TrainArgs) -> Result<()> {
    crate::stop::catch_signals()?;
    args.work.report.check_places()?;
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
    let work = args.work.open("train")?;
    work.spurline()?;
    let machine = work.describe_machine();
    let about = vec![crate::machine::one_line(&machine), demand_text(&load)];
    anstream::println!("{}", about.join("\n"));
    let (feeds, mut notes) = open_feeds(args, files, &work)?;
    let mut outcomes = Vec::new();
    for feed in &feeds {
        outcomes.push(search_feed(args, &load, feed, &work)?);
    }
    // In turn, so that other load on the machine affects all feeds alike.
    for round in 1..args.rounds {
        for (feed, outcome) in feeds.iter().zip(&mut outcomes) {
            let accelerators = outcome.accelerators().max(1);
            outcome.runs.push(measure_feed(args, &load, feed, &work, accelerators, round)?);
        }
    }
    outcomes.iter_mut().for_each(|outcome| outcome.correct_number(load.required));
    notes.push(work.load_note());
    let result = json!({
        "model": load.model_word(), "accelerator": load.accelerator_word(), "required_utilisation": load.required,
        "needs_bytes_per_second": load.bytes_per_second(), "needs_opens_per_second": load.opens_per_second(),
        "batch": load.batch, "threads": load.threads, "compute_seconds": load.compute.as_secs_f64(),
        "feeds": outcomes.iter().map(outcome_json).collect::<Vec<_>>(),
    });
    let report = CommandReport {
        outputs: &args.work.report,
        command: "train",
        about,
        table: result_table(&load, &outcomes),
        charts: charts_of(&load, &outcomes),
        scores: outcomes.iter().map(|outcome| sentence(&load, outcome)).collect(),
        notes,
        result,
    };
    report.finish(machine)
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

/// The folders of the arguments, or own files, which are compared byte by byte through each place; that also fills the caches.
fn open_feeds(args: &TrainArgs, files: Vec<DataFile>, work: &Workplace) -> Result<(Vec<TrainFeed>, Vec<String>)> {
    let mut feeds = Vec::new();
    for dir in &args.dir {
        let files = data_set::list_files(dir)?;
        let dir = dir.canonicalize().in_file(dir)?;
        feeds.push(TrainFeed { place: BenchPlace::of_dirs(&dir.display().to_string(), dir.clone(), dir), files });
    }
    if !feeds.is_empty() {
        return Ok((feeds, Vec::new()));
    }
    let source = work.scratch.subdir("source")?;
    data_set::make_files(&source, &files)?;
    let builder = PlaceBuilder { work, source, writable: false, round_trip: Duration::ZERO };
    let (places, mut notes) = builder.open_all(&args.feed)?;
    for place in places {
        data_set::check_files(&place.read, &files)?;
        feeds.push(TrainFeed { place, files: files.clone() });
    }
    let bytes: u64 = files.iter().map(|file| file.len).sum();
    let count = files.len();
    let sentence = format!("{count} files, {} MB, compared byte by byte through each feed first.", bytes / 1_000_000);
    notes.insert(0, sentence);
    Ok((feeds, notes))
}

/// Finds the greatest number of accelerators that the feed serves, and measures that number once.
fn search_feed(args: &TrainArgs, load: &TrainLoad, feed: &TrainFeed, work: &Workplace) -> Result<FeedOutcome> {
    let name = feed.place.name.clone();
    if let Some(n) = args.accelerators {
        let run = measure_told(args, load, feed, work, n as usize)?;
        return Ok(FeedOutcome { name, fed: None, tried: Vec::new(), runs: vec![run] });
    }
    // How many there could be: the rate without computing, by a short measurement.
    let without = TrainLoad { compute: Duration::ZERO, ..*load };
    let time = args.time.min(Duration::from_secs(3));
    let most = measure_reading(&without, feed, 2, time, 1, |_| Ok(()))?;
    let rate = most.bytes as f64 / most.seconds.max(1e-9);
    let mut n = ((rate / load.bytes_per_second() / load.required) as usize).clamp(1, 4096);
    let mut tried: Vec<TrainRun> = Vec::new();
    let mut best: Option<TrainRun> = None;
    let mut least_failed = usize::MAX;
    // Each step halves the unknown range, or moves by an eighth.
    for _ in 0..8 {
        let run = measure_told(args, load, feed, work, n)?;
        tried.push(run.clone());
        if run.utilisation() >= load.required {
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
            let guess = (n as f64 * run.utilisation() / load.required) as usize;
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

fn measure_told(
    args: &TrainArgs,
    load: &TrainLoad,
    feed: &TrainFeed,
    work: &Workplace,
    accelerators: usize,
) -> Result<TrainRun> {
    let run = measure_feed(args, load, feed, work, accelerators, 0)?;
    let share = run.utilisation() * 100.0;
    anstream::eprintln!("{}: {accelerators} accelerators, utilisation {share:.1} %", feed.place.name);
    Ok(run)
}

/// A measurement with processor times and counters before and after.
fn measure_feed(
    args: &TrainArgs,
    load: &TrainLoad,
    feed: &TrainFeed,
    work: &Workplace,
    accelerators: usize,
    round: u32,
) -> Result<TrainRun> {
    let seed = u64::from(round) * 1000 + accelerators as u64 + 1;
    let mut known = Vec::new();
    let mut run = measure_reading(load, feed, accelerators, args.time, seed, |_| {
        known.push((own_cpu()?, feed.place.counters(work.spurline()?)?));
        Ok(())
    })?;
    if let [(cpu_before, before), (cpu_after, after)] = &known[..] {
        run.cost = RunCost::new("reader", cpu_after - cpu_before, before, after);
    }
    Ok(run)
}

/// Replays the reading: each accelerator has reader threads that fetch whole batches, and sleeps for the time a step computes. The
/// measurement begins when every accelerator has computed once; `mark` is called at the begin and at the end.
fn measure_reading(
    load: &TrainLoad,
    feed: &TrainFeed,
    accelerators: usize,
    time: Duration,
    seed: u64,
    mut mark: impl FnMut(&ThreadCrew) -> Result<()>,
) -> Result<TrainRun> {
    let files = feed.files.iter().map(|file| (feed.place.read.join(&file.name), file.len));
    // Real data sets are larger than the memory: pages of an earlier epoch must not serve this epoch.
    let access = FileAccess::Read { piece: READ_BYTES, cold: true, to_end: false };
    let mut pattern = FilePattern::of_list(FileList::of_files(files), accelerators * load.threads, access);
    pattern.endless = Some(seed);
    pattern.steps = Some(ComputeSteps {
        readers: load.threads,
        batch: load.batch_amount(),
        of_files: load.samples_per_file == 1,
        compute: load.compute,
    });
    let mut run = TrainRun { accelerators, ..TrainRun::default() };
    // Elapsed time, bytes and opens at the begin.
    let mut begin: Option<(Duration, u64, u64)> = None;
    let mut last = (0.0, 0);
    let readers = pattern.threads;
    let done = pattern.run(|crew, elapsed| {
        let Some((since, bytes, opens)) = begin else {
            // Accelerators that wait this long are starved: the measurement shows that.
            if crew.ready() < accelerators && elapsed < FIRST_BATCH {
                return Ok(true);
            }
            let started = std::time::Instant::now();
            mark(crew)?;
            begin = Some((elapsed + started.elapsed(), crew.bytes(), crew.items()));
            last.1 = crew.bytes();
            crew.start_window();
            return Ok(true);
        };
        let seconds = elapsed.saturating_sub(since).as_secs_f64();
        let is_over = seconds >= time.as_secs_f64();
        let interval = SAMPLE_INTERVAL.as_secs_f64() * if is_over { 0.2 } else { 1.0 };
        if seconds - last.0 >= interval {
            let now = crew.bytes();
            run.over_time.push((seconds, (now - last.1) as f64 / (seconds - last.0).max(1e-9)));
            last = (seconds, now);
        }
        if is_over {
            run.seconds = seconds;
            run.bytes = crew.bytes() - bytes;
            run.opens = crew.items() - opens;
            mark(crew)?;
        }
        Ok(!is_over)
    })?;
    let lanes = &done.lanes[readers..];
    run.utilisations = lanes.iter().map(|lane| lane.utilisation).collect();
    run.steps = lanes.iter().map(|lane| lane.steps).sum();
    Ok(run)
}

const TRAIN_ROLES: [&str; 3] = ["reader", "mount", "node"];

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
        let opens = median_of(&outcome.runs, |run| run.opens as f64 / run.seconds.max(1e-9));
        let rate = median_of(&outcome.runs, |run| run.bytes as f64 / run.seconds.max(1e-9));
        let mut line = vec![
            outcome.name.clone(),
            outcome.fed.map_or("-".into(), |fed| fed.to_string()),
            outcome.accelerators().to_string(),
            format!("{:.1} % (of {:.0} %)", outcome.utilisation() * 100.0, load.required * 100.0),
            three_digits(rate / 1e9),
            three_digits(opens),
        ];
        line.extend(TRAIN_ROLES.map(|role| known_digits(outcome.cpu_per_gib(role))));
        line.push(three_digits(median_of(&outcome.runs, TrainRun::client_cpus)));
        table.push(line);
    }
    table
}

/// A sentence: how many are fed, and the bytes that the counters prove.
fn sentence(load: &TrainLoad, outcome: &FeedOutcome) -> String {
    let share = outcome.utilisation() * 100.0;
    let required = load.required * 100.0;
    let measured = outcome.accelerators();
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
    if !run.cost.cpu.iter().any(|(role, _)| *role == "mount") {
        return String::new();
    }
    let evidence = run.cost.evidence(&[
        ("mount.fuse.passthrough_opens", "passthrough opens"),
        ("mount.fuse.read_bytes", "through FUSE"),
        ("mount.rdma.recv_bytes", "over RDMA"),
        ("mount.tcp.recv_bytes", "over TCP"),
        ("mount.object.get_bytes", "from the origin"),
        ("node.object.get_bytes", "from the origin to the node"),
    ]);
    format!("; {} MB read in the last measurement, by the counters {evidence}", run.bytes / 1_000_000)
}

fn charts_of(load: &TrainLoad, outcomes: &[FeedOutcome]) -> Vec<BenchChart> {
    let over_time = outcomes.iter().filter_map(|outcome| {
        let run = outcome.runs.last()?;
        Some(ChartSeries::rates(format!("{} ({})", outcome.name, run.accelerators), &run.over_time))
    });
    let over_count = outcomes.iter().map(|outcome| {
        let runs = outcome.tried.iter().chain(&outcome.runs);
        let mut points: Vec<(f64, f64)> =
            runs.map(|run| (run.accelerators as f64, run.utilisation() * 100.0)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        ChartSeries { name: outcome.name.clone(), points }
    });
    let cpu = outcomes.iter().flat_map(|outcome| {
        TRAIN_ROLES
            .into_iter()
            .filter_map(|role| Some((format!("{}: {role}", outcome.name), outcome.cpu_per_gib(role)?)))
    });
    let required = Some(("required".to_owned(), load.required * 100.0));
    let utilisation =
        BenchChart::lines("Utilisation over accelerators", "accelerators", "percent", over_count.collect());
    vec![
        BenchChart::lines("Throughput over time", "seconds", "GB/s", over_time.collect()),
        BenchChart { mark: required, ..utilisation },
        BenchChart::bars("Processor time", "CPU-s/GiB", cpu),
    ]
}

fn outcome_json(outcome: &FeedOutcome) -> Value {
    json!({
        "feed": outcome.name, "accelerators_fed": outcome.fed, "utilisation": outcome.utilisation(),
        "client_cpus_per_accelerator": median_of(&outcome.runs, TrainRun::client_cpus),
        "runs": outcome.runs.iter().map(run_json).collect::<Vec<_>>(),
        "tried": outcome.tried.iter().map(run_json).collect::<Vec<_>>(),
    })
}

fn run_json(run: &TrainRun) -> Value {
    let mut cpu = run.cost.cpu_json(run.bytes);
    for (role, used) in &run.cost.cpu {
        cpu[*role]["cpus_per_accelerator"] = run.cpus_per_accelerator(*used).into();
    }
    // The mount's counters have no prefix.
    let counters: Map<String, Value> = run
        .cost
        .grown
        .iter()
        .map(|(name, n)| (name.strip_prefix("mount.").unwrap_or(name).to_owned(), (*n).into()))
        .collect();
    json!({
        "accelerators": run.accelerators, "utilisation": run.utilisation(), "utilisations": run.utilisations,
        "seconds": run.seconds, "bytes": run.bytes, "opens": run.opens, "steps": run.steps, "cpu": cpu,
        "counters": counters, "over_time": rates_json(&run.over_time),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_at(accelerators: usize, utilisation: f64) -> TrainRun {
        let cost = RunCost {
            cpu: vec![("reader", 0.2), ("mount", 0.3), ("node", 0.4)],
            grown: [("mount.tcp.recv_bytes".to_owned(), 5_000_000)].into(),
        };
        let utilisations = vec![utilisation];
        TrainRun { accelerators, utilisations, bytes: 1 << 30, seconds: 1.0, cost, ..Default::default() }
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
        assert_eq!((run_at(5, 1.0).client_cpus() * 10.0).round(), 1.0, "reader and mount, not the node");
        assert_eq!(result_table(&load, &[confirmed])[1][6..9], ["0.200", "0.300", "0.400"].map(str::to_owned));
    }
}
