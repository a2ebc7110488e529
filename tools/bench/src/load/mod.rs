//! `bench load`: replays how loaders read models, and with `--kv` how key-value caches use files, through folders and mounts beside
//! each other; with `--hosts` on one host beside several. This module runs the rounds and reports.

mod cases;
mod hosts;
mod kv;
mod model;

use crate::error::{BenchError, FileContext as _, Result};
use crate::machine;
use crate::numbers::{gib, median_of, short_count, three_digits};
use crate::places::{BenchPlace, PlaceBuilder, PlaceKind};
use crate::report::CommandReport;
use crate::terminal::word_of;
use crate::workplace::{WorkArgs, Workplace};
use cases::{LoadCase, LoadFigures, drop_pages, run_load};
use clap::ValueEnum as _;
use kv::{KvFigures, KvPlan, run_blocks};
use model::{ModelFiles, find_model, write_model};
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
    pub feed: Vec<PlaceKind>,
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
    /// The work folder, the program and the reports.
    #[command(flatten)]
    pub work: WorkArgs,
}

/// All rounds of a case in a folder.
struct CaseOutcome {
    place: String,
    /// Number of the place.
    model: usize,
    case: LoadCase,
    threads: usize,
    rounds: Vec<LoadFigures>,
    /// Why the case can't be run there.
    refused: Option<String>,
}

impl CaseOutcome {
    fn rate(&self) -> f64 {
        median_of(&self.rounds, |figures| figures.bytes as f64 / figures.seconds.max(1e-9))
    }
}

/// The result of a run.
struct LoadResult {
    about: String,
    table: Vec<Vec<String>>,
    notes: Vec<String>,
    json: Value,
}

/// Runs the command.
pub fn run(args: &LoadArgs) -> Result<()> {
    crate::stop::catch_signals()?;
    args.work.report.check_places()?;
    if args.block.0 == 0 {
        return Err(BenchError::Usage("--block 0 has no bytes: give 16M".to_owned()));
    }
    if args.size.0 < 1 << 20 {
        return Err(BenchError::Usage("--size below 1M has no layer: give 2G".to_owned()));
    }
    if let Some(dir) = &args.make {
        write_model(dir, args.size.0, args.files as usize)?;
        anstream::println!("{} in {}", find_model(dir)?.describe(), dir.display());
        return Ok(());
    }
    let work = args.work.open("load")?;
    let machine = work.describe_machine();
    let summary = machine::one_line(&machine);
    anstream::println!("{summary}");
    let LoadResult { about, table, mut notes, json } = match args.hosts {
        Some(hosts) => hosts::run_hosts(args, hosts as usize, &work)?,
        None if args.kv => run_kv(args, &work)?,
        None => run_models(args, &work)?,
    };
    notes.push(work.load_note());
    let about = vec![summary, about];
    let outputs = &args.work.report;
    let charts = Vec::new();
    CommandReport { outputs, command: "load", about, table, charts, scores: Vec::new(), notes, result: json }
        .finish(machine)
}

/// The folders of the arguments, or own places whose source has what `fill` makes there.
fn open_places(
    args: &LoadArgs,
    work: &Workplace,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<(Vec<BenchPlace>, Vec<String>)> {
    if !args.dir.is_empty() {
        let places = args.dir.iter().map(|text| BenchPlace::parse(text)).collect::<Result<_>>()?;
        return Ok((places, Vec::new()));
    }
    let source = work.scratch.subdir("source")?;
    fill(&source)?;
    PlaceBuilder { work, source, writable: args.kv, round_trip: args.delay }.open_all(&args.feed)
}

fn run_models(args: &LoadArgs, work: &Workplace) -> Result<LoadResult> {
    let make = |source: &Path| write_model(source, args.size.0, args.files as usize);
    let (places, mut notes) = open_places(args, work, make)?;
    let models = places.iter().map(|place| find_model(&place.read)).collect::<Result<Vec<_>>>()?;
    let mut about = models.first().map(ModelFiles::describe).unwrap_or_default();
    if !args.delay.is_zero() {
        about.push_str(&format!("; the node has a round trip of {} ms", args.delay.as_secs_f64() * 1e3));
    }
    anstream::println!("{about}");
    let outcomes = run_cases(args, &places, &models, work)?;
    for outcome in &outcomes {
        let Some(why) = &outcome.refused else { continue };
        let case = word_of(&outcome.case);
        notes.push(format!("SKIP: {} {case} by {} threads: {why}", outcome.place, outcome.threads));
    }
    let cases: Vec<Value> = outcomes.iter().map(case_json).collect();
    let json = json!({ "model": about, "round_trip_seconds": args.delay.as_secs_f64(), "cases": cases });
    Ok(LoadResult { about, table: case_table(&outcomes), notes, json })
}

fn run_cases(
    args: &LoadArgs,
    places: &[BenchPlace],
    models: &[ModelFiles],
    work: &Workplace,
) -> Result<Vec<CaseOutcome>> {
    let copies = work.scratch.subdir("copies")?;
    let mut outcomes = Vec::new();
    for (number, place) in places.iter().enumerate() {
        // The first pass fills the caches.
        run_load(&models[number..=number], LoadCase::Cat, 1, 0, &copies)?;
        let wanted = LoadCase::value_variants().iter().filter(|case| args.case.is_empty() || args.case.contains(case));
        for case in wanted {
            outcomes.extend(case.threads(&args.threads).iter().map(|threads| CaseOutcome {
                place: place.name.clone(),
                model: number,
                case: *case,
                threads: *threads as usize,
                rounds: Vec::new(),
                refused: None,
            }));
        }
    }
    for round in 1..=args.rounds {
        for outcome in outcomes.iter_mut().filter(|outcome| outcome.refused.is_none()) {
            let model = &models[outcome.model..=outcome.model];
            drop_pages(&model[0]);
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
    let measured: Vec<&CaseOutcome> = outcomes.iter().filter(|outcome| outcome.refused.is_none()).collect();
    for outcome in &measured {
        let cat = measured.iter().find(|other| other.model == outcome.model && other.case == LoadCase::Cat);
        let same = measured
            .iter()
            .find(|other| other.model == 0 && other.case == outcome.case && other.threads == outcome.threads);
        let share = |of: Option<&&CaseOutcome>| {
            of.map_or_else(String::new, |of| format!("{:.2}", outcome.rate() / of.rate().max(1.0)))
        };
        table.push(vec![
            outcome.place.clone(),
            word_of(&outcome.case),
            outcome.threads.to_string(),
            three_digits(outcome.rate() / 1e9),
            share(cat),
            share(same),
            short_count(median_of(&outcome.rounds, |figures| figures.faults as f64)),
            three_digits(median_of(&outcome.rounds, |figures| figures.cpu_seconds / gib(figures.bytes))),
        ]);
    }
    table
}

fn case_json(outcome: &CaseOutcome) -> Value {
    let of_round = |figures: &LoadFigures| {
        json!({
            "bytes": figures.bytes, "seconds": figures.seconds, "faults": figures.faults,
            "cpu_seconds": figures.cpu_seconds,
        })
    };
    json!({
        "folder": outcome.place, "case": word_of(&outcome.case), "threads": outcome.threads,
        "bytes_per_second": if outcome.refused.is_none() { json!(outcome.rate()) } else { Value::Null },
        "refused": outcome.refused, "rounds": outcome.rounds.iter().map(of_round).collect::<Vec<_>>(),
    })
}

fn run_kv(args: &LoadArgs, work: &Workplace) -> Result<LoadResult> {
    let (places, notes) = open_places(args, work, |_| Ok(()))?;
    let plan =
        KvPlan { block_bytes: args.block.0 as usize, blocks: args.blocks as usize, lookups: args.lookups as usize };
    let mut rounds: Vec<Vec<KvFigures>> = places.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (place, figures) in places.iter().zip(&mut rounds) {
            // A new folder, which is removed.
            let name = format!("spurline-kv-{}-{round}", std::process::id());
            let folder = place.write.join(&name);
            std::fs::create_dir_all(&folder).in_file(&folder)?;
            let run = run_blocks(&plan, &folder, &place.read.join(&name), round);
            let _ = std::fs::remove_dir_all(&folder);
            figures.push(run?);
        }
    }
    let about = format!("{} blocks of {}, {} lookups of absent names", plan.blocks, args.block, plan.lookups);
    anstream::println!("{about}");
    let head = ["folder", "write GB/s", "read GB/s", "absent us", "absent us, p99", "present us"];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    let mut folders = Vec::new();
    for (place, figures) in places.iter().zip(&rounds) {
        let write = median_of(figures, |run| run.write_rate);
        let read = median_of(figures, |run| run.read_rate);
        let absent = median_of(figures, |run| run.absent_us);
        let slow = median_of(figures, |run| run.absent_slow_us);
        let present = median_of(figures, |run| run.present_us);
        let values = [write / 1e9, read / 1e9, absent, slow, present];
        table.push(std::iter::once(place.name.clone()).chain(values.map(three_digits)).collect());
        folders.push(json!({
            "folder": place.name, "write_bytes_per_second": write, "read_bytes_per_second": read,
            "absent_us": absent, "absent_p99_us": slow, "present_us": present,
        }));
    }
    let json =
        json!({ "block_bytes": plan.block_bytes, "blocks": plan.blocks, "lookups": plan.lookups, "kv": folders });
    Ok(LoadResult { about, table, notes, json })
}
