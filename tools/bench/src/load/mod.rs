//! `bench load`: replays how loaders read models, and with `--kv` how key-value caches use files, through folders and mounts beside
//! each other; with `--hosts` on one host beside several. This module runs the rounds and reports.

mod hosts;
mod kv;
mod mapping;
mod model;
mod replay;

use crate::checkpoint::places::{CheckpointPlace, PlaceBuilder, PlaceKind};
use crate::error::{BenchError, Result};
use crate::machine;
use crate::numbers::{median, short_count, three_digits};
use crate::report::{ReportOutputs, ReportSection};
use crate::scratch::{self, ScratchDir};
use crate::suite;
use crate::train::feeds::{FeedKind, FeedWorkplace};
use hosts::run_hosts;
use kv::{KvFigures, KvPlan, run_blocks};
use model::{ModelFiles, find_model, write_model};
use replay::{LoadCase, LoadFigures, run_load};
use serde_json::{Value, json};
use spurline_types::Size;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The arguments of `bench load`.
#[derive(Debug, clap::Args)]
pub struct LoadArgs {
    /// Absolute path of a folder with safetensors files, such as one of a mount, with a name for reports; repeat for more: the others are compared
    /// with the first. With --kv, a second DIR reads through another mount [default: own files, by --feed]
    #[arg(long, value_name = "[NAME=]DIR[:DIR]", conflicts_with = "feed")]
    pub dir: Vec<String>,
    /// Ways to read own files; repeat for more [default: all]
    #[arg(long, value_name = "KIND")]
    pub feed: Vec<FeedKind>,
    /// Only write a model into this folder, for example into the source of a mount
    #[arg(long, value_name = "DIR", conflicts_with_all = ["dir", "feed", "kv"])]
    pub make: Option<PathBuf>,
    /// Bytes of the model, about: names and shapes are those of Llama 3, with as many layers as fit
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub size: Size,
    /// Files of the model
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub files: u32,
    /// Ways to load; repeat for more [default: all]
    #[arg(long, value_name = "CASE", value_delimiter = ',', conflicts_with = "kv")]
    pub case: Vec<LoadCase>,
    /// Numbers of threads that load
    #[arg(long, value_name = "N[,N]", value_delimiter = ',', default_value = "1,8,32", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,
    /// Load on one of N hosts, then on all at the same moment. Each is a network namespace with a node and a mount; every load is cold
    #[arg(long, value_name = "N", conflicts_with_all = ["dir", "feed", "make", "kv"], value_parser = clap::value_parser!(u32).range(2..=64))]
    pub hosts: Option<u32>,
    /// Rate of each host's link with --hosts, each way
    #[arg(long, value_name = "MBIT/S", requires = "hosts", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub link: u32,
    /// Round trip between the node and the mount that reads from it, by a relay on loopback; between two hosts with --hosts, where
    /// the kernel has netem
    #[arg(long, value_name = "TIME", conflicts_with_all = ["dir", "make", "kv"], default_value = "0s", value_parser = spurline_types::parse_duration)]
    pub delay: Duration,
    /// Replay a key-value cache instead: blocks that are files, and lookups of absent blocks
    #[arg(long)]
    pub kv: bool,
    /// Bytes of a block of --kv
    #[arg(long, value_name = "SIZE", default_value = "16M")]
    pub block: Size,
    /// Blocks of --kv
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub blocks: u32,
    /// Lookups of absent blocks by --kv
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub lookups: u32,
    /// Rounds, all folders in turn; medians are reported
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

/// All rounds of a case in a folder.
struct CaseOutcome {
    place: String,
    case: LoadCase,
    threads: usize,
    rounds: Vec<LoadFigures>,
    /// Why the case can't be run there.
    refused: Option<String>,
}

impl CaseOutcome {
    fn median_of(&self, of: impl Fn(&LoadFigures) -> f64) -> f64 {
        median(&self.rounds.iter().map(of).collect::<Vec<_>>())
    }

    fn rate(&self) -> f64 {
        self.median_of(|figures| figures.bytes as f64 / figures.seconds.max(1e-9))
    }

    fn cpu_per_gib(&self) -> f64 {
        self.median_of(|figures| figures.cpu_seconds / (figures.bytes as f64 / f64::from(1u32 << 30)))
    }
}

/// Runs the command.
///
/// # Errors
/// `Usage` and `Missing` for wrong arguments and missing prerequisites; `Failed` when a read fails.
pub fn run(args: &LoadArgs) -> Result<()> {
    crate::stop::catch_signals()?;
    args.report.check_places()?;
    if args.block.0 == 0 {
        return Err(BenchError::Usage("--block 0 has no bytes: give 16M".to_owned()));
    }
    if args.size.0 < 1 << 20 {
        return Err(BenchError::Usage("--size below 1M has no layer: give 2G".to_owned()));
    }
    if let Some(dir) = &args.make {
        write_model(dir, args.size.0, args.files as usize)?;
        let model = find_model(dir)?;
        anstream::println!("{} in {}", describe_model(&model), dir.display());
        return Ok(());
    }
    scratch::sweep_stale(&args.work_dir);
    let scratch = ScratchDir::new(&args.work_dir, "load", "--work-dir")?;
    let about = machine::describe_machine(scratch.path(), scratch.path());
    let summary = suite::one_line(&about);
    anstream::println!("{summary}");
    let load_before = machine::load_average();
    let (mut section, mut result, mut notes) = match args.hosts {
        Some(hosts) => run_hosts(args, hosts as usize, &scratch)?,
        None if args.kv => run_kv(args, &scratch)?,
        None => run_models(args, &scratch)?,
    };
    notes.push(format!(
        "Load average of this machine: {load_before:.1} before, {:.1} after, on {} processors.",
        machine::load_average(),
        machine::cpu_count()
    ));
    anstream::print!("\n{}", section.table_text());
    notes.iter().for_each(|note| anstream::println!("{note}"));
    section.about.insert(0, summary);
    result["schema"] = "spurline-bench-load/1".into();
    result["spurline"] = env!("CARGO_PKG_VERSION").into();
    result["machine"] = about;
    result["notes"] = json!(notes);
    section.notes = notes;
    args.report.write_reports(&result, "Spurline bench load", &[section])
}

fn describe_model(model: &ModelFiles) -> String {
    format!("{} tensors in {} files, {} MB", model.tensors.len(), model.paths.len(), model.bytes / 1_000_000)
}

/// Table, JSON and notes of a run.
type LoadReport = (ReportSection, Value, Vec<String>);

fn run_models(args: &LoadArgs, scratch: &ScratchDir) -> Result<LoadReport> {
    let mut notes = Vec::new();
    let mut places: Vec<(String, ModelFiles)> = Vec::new();
    // Kept until the end: mounts and the node.
    let mut feeds = Vec::new();
    for text in &args.dir {
        let place = CheckpointPlace::parse(text)?;
        places.push((place.name.clone(), find_model(&place.read)?));
    }
    if args.dir.is_empty() {
        let source = scratch.subdir("source")?;
        write_model(&source, args.size.0, args.files as usize)?;
        let me = std::env::current_exe().map_err(|error| BenchError::io("can't find this program", &error))?;
        let spurline = suite::program(args.spurline.as_deref(), &me)?;
        let workplace =
            FeedWorkplace { spurline: &spurline, scratch, source: &source, files: &[], round_trip: args.delay };
        for kind in [FeedKind::Directory, FeedKind::Mount, FeedKind::Node] {
            if !args.feed.is_empty() && !args.feed.contains(&kind) {
                continue;
            }
            match workplace.open_feed(kind) {
                Ok(feed) => {
                    places.push((feed.name.clone(), find_model(&feed.dir)?));
                    feeds.push(feed);
                }
                Err(BenchError::Missing(why)) if args.feed.is_empty() => {
                    notes.push(format!("SKIP: {}: {why}", kind.word()))
                }
                Err(error) => return Err(error),
            }
        }
    }
    let mut model = places.first().map(|(_, model)| describe_model(model)).unwrap_or_default();
    if !args.delay.is_zero() {
        model.push_str(&format!("; the node has a round trip of {} ms", args.delay.as_secs_f64() * 1e3));
    }
    anstream::println!("{model}");
    let outcomes = run_cases(args, &places, scratch)?;
    let mut section = ReportSection::of_table(case_table(&outcomes), Vec::new());
    section.about.push(model.clone());
    for outcome in outcomes.iter().filter(|outcome| outcome.refused.is_some()) {
        let why = outcome.refused.as_deref().unwrap_or_default();
        notes.push(format!("SKIP: {} {} by {} threads: {why}", outcome.place, outcome.case.word(), outcome.threads));
    }
    let result = json!({"model": model, "round_trip_seconds": args.delay.as_secs_f64(), "cases": outcomes.iter().map(case_json).collect::<Vec<_>>()});
    Ok((section, result, notes))
}

fn run_cases(args: &LoadArgs, places: &[(String, ModelFiles)], scratch: &ScratchDir) -> Result<Vec<CaseOutcome>> {
    let copies = scratch.subdir("copies")?;
    let mut outcomes = Vec::new();
    for (place, model) in places {
        // The first pass fills the caches.
        run_load(model, LoadCase::Cat, 1, 0, &copies)?;
        for case in LoadCase::ALL.into_iter().filter(|case| args.case.is_empty() || args.case.contains(case)) {
            let threads = if case.has_threads() { args.threads.as_slice() } else { &[1] };
            outcomes.extend(threads.iter().map(|threads| CaseOutcome {
                place: place.clone(),
                case,
                threads: *threads as usize,
                rounds: Vec::new(),
                refused: None,
            }));
        }
    }
    for round in 1..=args.rounds {
        for outcome in outcomes.iter_mut().filter(|outcome| outcome.refused.is_none()) {
            let Some((_, model)) = places.iter().find(|(name, _)| *name == outcome.place) else { continue };
            match run_load(model, outcome.case, outcome.threads, round, &copies) {
                Ok(figures) => outcome.rounds.push(figures),
                Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
                // A file system without direct reads, a missing cp.
                Err(error) if outcome.rounds.is_empty() => outcome.refused = Some(error.to_string()),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(outcomes)
}

fn case_table(outcomes: &[CaseOutcome]) -> Vec<Vec<String>> {
    let head = ["folder", "case", "threads", "GB/s", "of cat", "of the first", "faults", "CPU s/GiB"];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    let first = outcomes.first().map(|outcome| outcome.place.clone()).unwrap_or_default();
    for outcome in outcomes.iter().filter(|outcome| outcome.refused.is_none()) {
        let cat = outcomes.iter().find(|other| other.place == outcome.place && other.case == LoadCase::Cat);
        let same = outcomes.iter().find(|other| {
            other.place == first
                && other.case == outcome.case
                && other.threads == outcome.threads
                && other.refused.is_none()
        });
        table.push(vec![
            outcome.place.clone(),
            outcome.case.word().to_owned(),
            outcome.threads.to_string(),
            three_digits(outcome.rate() / 1e9),
            share_text(outcome, cat),
            share_text(outcome, same),
            short_count(outcome.median_of(|figures| figures.faults as f64)),
            three_digits(outcome.cpu_per_gib()),
        ]);
    }
    table
}

fn share_text(outcome: &CaseOutcome, of: Option<&CaseOutcome>) -> String {
    of.map_or_else(String::new, |of| format!("{:.2}", outcome.rate() / of.rate().max(1.0)))
}

fn case_json(outcome: &CaseOutcome) -> Value {
    let rounds: Vec<Value> = outcome
        .rounds
        .iter()
        .map(|figures| {
            json!({
                "bytes": figures.bytes, "seconds": figures.seconds, "faults": figures.faults,
                "cpu_seconds": figures.cpu_seconds,
            })
        })
        .collect();
    json!({
        "folder": outcome.place, "case": outcome.case.word(), "threads": outcome.threads,
        "bytes_per_second": if outcome.refused.is_none() { json!(outcome.rate()) } else { Value::Null },
        "refused": outcome.refused, "rounds": rounds,
    })
}

fn run_kv(args: &LoadArgs, scratch: &ScratchDir) -> Result<LoadReport> {
    let mut notes = Vec::new();
    let mut places = args.dir.iter().map(|text| CheckpointPlace::parse(text)).collect::<Result<Vec<_>>>()?;
    if places.is_empty() {
        let me = std::env::current_exe().map_err(|error| BenchError::io("can't find this program", &error))?;
        let spurline = suite::program(args.spurline.as_deref(), &me)?;
        let builder = PlaceBuilder { spurline: &spurline, scratch };
        for (kind, feed) in PlaceKind::ALL.into_iter().zip([FeedKind::Directory, FeedKind::Mount, FeedKind::Node]) {
            if !args.feed.is_empty() && !args.feed.contains(&feed) {
                continue;
            }
            match builder.open_place(kind) {
                Ok(place) => places.push(place),
                Err(BenchError::Missing(why)) if args.feed.is_empty() => {
                    notes.push(format!("SKIP: {}: {why}", kind.word()))
                }
                Err(error) => return Err(error),
            }
        }
    }
    let plan =
        KvPlan { block_bytes: args.block.0 as usize, blocks: args.blocks as usize, lookups: args.lookups as usize };
    let mut rounds: Vec<Vec<KvFigures>> = places.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (place, figures) in places.iter().zip(&mut rounds) {
            figures.push(run_kv_round(&plan, &place.write, &place.read, round)?);
        }
    }
    let about = format!("{} blocks of {}, {} lookups of absent names", plan.blocks, args.block, plan.lookups);
    anstream::println!("{about}");
    let head = ["folder", "write GB/s", "read GB/s", "absent us", "absent us, p99", "present us"];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    let mut folders = Vec::new();
    for (place, figures) in places.iter().zip(&rounds) {
        let middle = |of: fn(&KvFigures) -> f64| median(&figures.iter().map(of).collect::<Vec<_>>());
        let values = [
            middle(|figures| figures.write_rate / 1e9),
            middle(|figures| figures.read_rate / 1e9),
            middle(|figures| figures.absent_us),
            middle(|figures| figures.absent_slow_us),
            middle(|figures| figures.present_us),
        ];
        table.push(std::iter::once(place.name.clone()).chain(values.map(three_digits)).collect());
        folders.push(json!({
            "folder": place.name, "write_bytes_per_second": values[0] * 1e9, "read_bytes_per_second": values[1] * 1e9,
            "absent_us": values[2], "absent_p99_us": values[3], "present_us": values[4],
        }));
    }
    let mut section = ReportSection::of_table(table, Vec::new());
    section.about.push(about);
    let result =
        json!({"block_bytes": plan.block_bytes, "blocks": plan.blocks, "lookups": plan.lookups, "kv": folders});
    Ok((section, result, notes))
}

/// A round in a folder of its own, which is removed.
fn run_kv_round(plan: &KvPlan, write: &Path, read: &Path, round: u32) -> Result<KvFigures> {
    let name = format!("spurline-kv-{}-{round}", std::process::id());
    let folder = write.join(&name);
    std::fs::create_dir_all(&folder).map_err(|error| BenchError::io(folder.display(), &error))?;
    let figures = run_blocks(plan, &folder, &read.join(&name), round);
    let _ = std::fs::remove_dir_all(&folder);
    figures
}
