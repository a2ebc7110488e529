//! `bench checkpoint`: ranks write a checkpoint, sync and rename it; caches are dropped; it is read back through another
//! mount or on other hosts, with checksums compared. The score is the slowest rank. This module runs the rounds.

mod crew;
pub mod places;
mod plan;
mod report;
mod worker;

use crate::error::{BenchError, Result};
use crate::fleet::AgentHost;
use crate::machine;
use crate::mount::{CounterValues, counter_growth};
use crate::report::ReportOutputs;
use crate::scratch::{self, ScratchDir};
use crate::suite;
use crew::WorkerCrew;
use indicatif::{ProgressBar, ProgressStyle};
use places::{CheckpointPlace, PlaceBuilder, PlaceKind};
use plan::{CheckpointModel, RANKS_OF_HOST, RankPlan, plan_ranks};
use report::{PhaseRun, PlaceOutcome};
use serde_json::Value;
use spurline_types::Size;
use std::path::{Path, PathBuf};
use worker::{DropResult, HostPhase, WorkerOrder};

pub use worker::run as run_worker;

/// Bytes of a rank, unless given.
const RANK_BYTES: u64 = 256 << 20;

/// The arguments of `bench checkpoint`.
#[derive(Debug, clap::Args)]
pub struct CheckpointArgs {
    /// Model whose checkpoint is written: it decides which files a rank has
    #[arg(long, value_name = "MODEL", default_value = "llama3-8b")]
    pub model: CheckpointModel,
    /// Ranks that write at once, over all hosts [default: 8 for each host]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    /// Bytes of each rank in the mean [default: 256M]
    #[arg(long, value_name = "SIZE", conflicts_with = "full_size")]
    pub size: Option<Size>,
    /// Give each rank as many bytes as MLPerf Storage does
    #[arg(long)]
    pub full_size: bool,
    /// Writable folder, such as one of a mount, with a name for reports; a second DIR reads back through another mount of
    /// the same source. Repeat for more: the others are compared with the first [default: own places, by --place]
    #[arg(long, value_name = "[NAME=]DIR[:DIR]", conflicts_with = "place")]
    pub dir: Vec<String>,
    /// Own places to write to; repeat for more [default: all]
    #[arg(long, value_name = "KIND")]
    pub place: Vec<PlaceKind>,
    /// Hosts that share the ranks, reached by ssh; each reads what the host before it wrote [default: this host]
    #[arg(long, value_name = "HOST[,HOST]", value_delimiter = ',', requires = "dir")]
    pub hosts: Vec<String>,
    /// Checkpoints, all places in turn; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,
    /// Forms of the report.
    #[command(flatten)]
    pub report: ReportOutputs,
    /// Folder for the sources and mountpoints of own places
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub work_dir: PathBuf,
    /// The spurline to measure [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "FILE")]
    pub spurline: Option<PathBuf>,
}

/// A run of the command.
struct CheckpointBench<'a> {
    args: &'a CheckpointArgs,
    crew: WorkerCrew,
    spurline: PathBuf,
    ranks: usize,
    size: u64,
    /// The name of the folder that each place gets.
    folder: String,
    bar: ProgressBar,
}

/// Runs the command.
///
/// # Errors
/// `Usage` and `Missing` for wrong arguments and missing prerequisites; `Failed` when a rank fails or a checksum differs.
pub fn run(args: &CheckpointArgs) -> Result<()> {
    crate::stop::catch_signals()?;
    args.report.check_places()?;
    let hosts = args.hosts.iter().map(|text| AgentHost::parse(text)).collect::<Result<Vec<_>>>()?;
    let named = args.dir.iter().map(|text| CheckpointPlace::parse(text)).collect::<Result<Vec<_>>>()?;
    let me = std::env::current_exe().map_err(|e| BenchError::io("can't find this program", &e))?;
    let spurline = suite::program(args.spurline.as_deref(), &me)?;
    let ranks = args.ranks.map_or(RANKS_OF_HOST * hosts.len().max(1), |n| n as usize);
    let size = if args.full_size { args.model.rank_bytes() } else { args.size.map_or(RANK_BYTES, |size| size.0) };
    if size < 1 << 16 {
        return Err(BenchError::Usage("--size below 64K measures nothing: give 256M".to_owned()));
    }
    if ranks < hosts.len() {
        return Err(BenchError::Usage(format!("--ranks {ranks}: --hosts names {}, and each has a rank", hosts.len())));
    }
    scratch::sweep_stale(&args.work_dir);
    let own = args.dir.is_empty();
    let scratch = own.then(|| ScratchDir::new(&args.work_dir, "checkpoint", "--work-dir")).transpose()?;
    let about_dir = scratch.as_ref().map_or(Path::new("/"), ScratchDir::path);
    let about = machine::describe_machine(about_dir, about_dir);
    let load_before = machine::load_average();
    let summary = suite::one_line(&about);
    let demand = demand_text(args.model, ranks, size);
    anstream::println!("{summary}\n{demand}");
    let (places, mut notes) = match &scratch {
        Some(scratch) => own_places(args, &spurline, scratch)?,
        None => (named, Vec::new()),
    };
    let folder = format!("spurline-checkpoint-{}-{}", host_name(), std::process::id());
    let crew = WorkerCrew::start(&me, &hosts)?;
    let bar = progress_bar(places.len() as u64 * u64::from(args.rounds) * 2 * ranks as u64 * size);
    let mut bench = CheckpointBench { args, crew, spurline, ranks, size, folder, bar };
    let mut outcomes = bench.open_places(&places)?;
    for round in 1..=args.rounds {
        for (place, outcome) in places.iter().zip(&mut outcomes) {
            bench.run_round(place, outcome, round)?;
        }
    }
    bench.bar.finish_and_clear();
    let hosts: Vec<String> = bench.crew.hosts().into_iter().map(str::to_owned).collect();
    // Workers remove their folders before the mounts end.
    drop(bench);
    notes.extend(outcomes.iter().flat_map(PlaceOutcome::notes));
    if hosts.len() == 1 {
        notes.extend(places.iter().filter(|place| !place.has_reader() && place.source.is_none()).map(|place| {
            format!("{}: read back through the mount that wrote; DIR:DIR2 reads through another one, --hosts on other hosts.", place.name)
        }));
    }
    notes.push(format!(
        "Load average of this machine: {load_before:.1} before, {:.1} after, on {} processors.",
        machine::load_average(),
        machine::cpu_count()
    ));
    let shown = report::CheckpointReport { args, ranks, size, hosts, about, summary, demand, notes, outcomes };
    shown.print_and_write()
}

fn demand_text(model: CheckpointModel, ranks: usize, size: u64) -> String {
    let (bytes, published) = model.published();
    let all = ranks as u64 * size;
    let scale = bytes as f64 / all as f64;
    let scaled = if scale > 1.5 { format!("scaled to 1/{scale:.0}") } else { "in full size".to_owned() };
    format!(
        "Checkpoint of {} (published: {} GB by {published} ranks), {scaled}: {} MB by {ranks} ranks, each file written, synced, renamed",
        model.word(),
        bytes / 1_000_000_000,
        all / 1_000_000
    )
}

/// The host's name, as far as allowed in a file name.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}

/// A bar on a terminal; nothing elsewhere.
fn progress_bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let style = ProgressStyle::with_template("{spinner} {bar:28.cyan/dim} {bytes} of {total_bytes}, {msg}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Own places; places that lack a prerequisite become notes, unless named.
fn own_places(
    args: &CheckpointArgs,
    spurline: &Path,
    scratch: &ScratchDir,
) -> Result<(Vec<CheckpointPlace>, Vec<String>)> {
    let mut places = Vec::new();
    let mut notes = Vec::new();
    let builder = PlaceBuilder { spurline, scratch };
    for kind in PlaceKind::ALL.into_iter().filter(|kind| args.place.is_empty() || args.place.contains(kind)) {
        match builder.open_place(kind) {
            Ok(place) => places.push(place),
            Err(BenchError::Missing(why)) if args.place.is_empty() => {
                notes.push(format!("SKIP: {}: {why}", kind.word()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok((places, notes))
}

impl CheckpointBench<'_> {
    /// Checks every place before the first byte is written.
    fn open_places(&mut self, places: &[CheckpointPlace]) -> Result<Vec<PlaceOutcome>> {
        let bytes = self.ranks as u64 * self.size;
        let mut outcomes = Vec::new();
        for place in places {
            let dir = place.write.clone();
            let folder = place.write.join(&self.folder);
            self.crew.order_all(|_| WorkerOrder::Open { dir: dir.clone(), folder: folder.clone(), bytes }, |_| {})?;
            let folder = place.read.join(&self.folder);
            self.crew.order_all(|_| WorkerOrder::Find { folder: folder.clone() }, |_| {})?;
            let counters = self.counters(place)?;
            outcomes.push(PlaceOutcome::new(&place.name, counters.iter().any(|(role, _)| *role == "mount")));
        }
        Ok(outcomes)
    }

    /// The ranks that worker `index` has; with `read` those of the host before.
    fn ranks_of(&self, plans: &[RankPlan], index: usize, read: bool) -> Vec<RankPlan> {
        let workers = self.crew.len();
        let writer = if read { (index + workers - 1) % workers } else { index };
        // Neighbours share a host.
        plans.iter().filter(|plan| plan.rank * workers / plans.len() == writer).cloned().collect()
    }

    /// A checkpoint at a place: written, dropped from caches, read back, compared, removed.
    fn run_round(&mut self, place: &CheckpointPlace, outcome: &mut PlaceOutcome, round: u32) -> Result<()> {
        let plans = plan_ranks(self.args.model, self.ranks, self.size, round);
        let write = place.write.join(&self.folder);
        let read = place.read.join(&self.folder);
        self.bar.set_message(format!("{}: write, round {round} of {}", place.name, self.args.rounds));
        let shares: Vec<Vec<RankPlan>> =
            (0..self.crew.len()).map(|index| self.ranks_of(&plans, index, false)).collect();
        let wrote =
            self.run_phase(place, |index| WorkerOrder::Write { folder: write.clone(), ranks: shares[index].clone() })?;
        let folders: Vec<PathBuf> = [
            Some(read.clone()),
            place.has_reader().then(|| write.clone()),
            place.source.as_ref().map(|s| s.join(&self.folder)),
        ]
        .into_iter()
        .flatten()
        .collect();
        outcome.dropped = self
            .crew
            .order_all(|_| WorkerOrder::Drop { folders: folders.clone(), ranks: plans.clone() }, |_| {})?
            .into_iter()
            .map(parse_dropped)
            .collect::<Result<Vec<_>>>()?;
        self.bar.set_message(format!("{}: read, round {round} of {}", place.name, self.args.rounds));
        let readers: Vec<Vec<RankPlan>> =
            (0..self.crew.len()).map(|index| self.ranks_of(&plans, index, true)).collect();
        let got =
            self.run_phase(place, |index| WorkerOrder::Read { folder: read.clone(), ranks: readers[index].clone() })?;
        compare_checksums(&place.name, &plans, &wrote, &got)?;
        self.crew
            .order_all(|index| WorkerOrder::Remove { folder: write.clone(), ranks: shares[index].clone() }, |_| {})?;
        if !self.bar.is_hidden() {
            self.bar.suspend(|| anstream::eprintln!("{}", outcome.round_text(&wrote, &got)));
        } else {
            anstream::eprintln!("{}", outcome.round_text(&wrote, &got));
        }
        outcome.writes.push(wrote);
        outcome.reads.push(got);
        Ok(())
    }

    /// Runs a phase on all workers, with counters before and after.
    fn run_phase(&mut self, place: &CheckpointPlace, order: impl Fn(usize) -> WorkerOrder) -> Result<PhaseRun> {
        let before = self.counters(place)?;
        let bar = self.bar.clone();
        let start = self.bar.position();
        let answers = self.crew.order_all(order, |bytes| bar.set_position(start + bytes))?;
        bar.set_position(start + self.ranks as u64 * self.size);
        let phases = answers.into_iter().map(parse_phase).collect::<Result<Vec<_>>>()?;
        let after = self.counters(place)?;
        let mut cpu = vec![("ranks", phases.iter().map(|phase| phase.cpu).sum())];
        let mut grown = CounterValues::new();
        for ((role, before), (_, after)) in before.iter().zip(&after) {
            let growth = counter_growth(before, after);
            let used = growth.get("usage.cpu_us").copied().unwrap_or(0) as f64 / 1e6;
            match cpu.iter_mut().find(|(known, _)| known == role) {
                Some((_, sum)) => *sum += used,
                None => cpu.push((role, used)),
            }
            for (name, n) in growth {
                *grown.entry(format!("{role}.{name}")).or_default() += n;
            }
        }
        Ok(PhaseRun::new(phases, cpu, grown))
    }

    /// The counters of the mounts on all hosts, and of the node.
    fn counters(&mut self, place: &CheckpointPlace) -> Result<Vec<(&'static str, CounterValues)>> {
        let mut all = Vec::new();
        let mut dirs = vec![place.write.clone()];
        dirs.extend(place.has_reader().then(|| place.read.clone()));
        for index in 0..self.crew.len() {
            let here = self.args.hosts.is_empty();
            for dir in &dirs {
                let spurline = here.then(|| self.spurline.clone());
                let answer = self.crew.order_one(index, &WorkerOrder::Counters { dir: dir.clone(), spurline })?;
                if let Some(known) = answer["counters"].as_object() {
                    let known = known.iter().filter_map(|(name, n)| Some((name.clone(), n.as_u64()?))).collect();
                    all.push(("mount", known));
                }
            }
        }
        all.extend(place.node_counters(&self.spurline)?.map(|known| ("node", known)));
        Ok(all)
    }
}

fn parse_phase(answer: Value) -> Result<HostPhase> {
    serde_json::from_value(answer).map_err(|e| {
        BenchError::Failed(format!("a worker's answer is not understood ({e}): install the same build everywhere"))
    })
}

fn parse_dropped(answer: Value) -> Result<Vec<DropResult>> {
    serde_json::from_value(answer).map_err(|e| {
        BenchError::Failed(format!("a worker's answer is not understood ({e}): install the same build everywhere"))
    })
}

/// Compares what was read with what was written.
fn compare_checksums(place: &str, plans: &[RankPlan], wrote: &PhaseRun, got: &PhaseRun) -> Result<()> {
    for plan in plans {
        let sums =
            |run: &PhaseRun| run.ranks.iter().find(|rank| rank.rank == plan.rank).map(|rank| rank.checksums.clone());
        let written = sums(wrote).unwrap_or_default();
        let read = sums(got).unwrap_or_default();
        let differs = plan.files.iter().enumerate().find(|(index, _)| written.get(*index) != read.get(*index));
        if let Some((index, file)) = differs {
            let sum = |sums: &[u32]| sums.get(index).map_or("none".to_owned(), |sum| format!("{sum:08x}"));
            return Err(BenchError::Failed(format!(
                "{place}: rank {}: {} has the checksum {} where it is read, and {} where it was written",
                plan.rank,
                file.name,
                sum(&read),
                sum(&written)
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use worker::RankFigures;

    #[test]
    fn a_wrong_checksum_names_the_rank_and_the_file() {
        let plans = plan_ranks(CheckpointModel::Llama3x8b, 2, 1 << 20, 1);
        let phase = |sums: [[u32; 2]; 2]| {
            let ranks = sums.into_iter().enumerate().map(|(rank, sums)| RankFigures {
                rank,
                checksums: sums.to_vec(),
                ..Default::default()
            });
            PhaseRun::new(
                vec![HostPhase { ranks: ranks.collect(), ..Default::default() }],
                Vec::new(),
                CounterValues::new(),
            )
        };
        let wrote = phase([[1, 2], [3, 4]]);
        compare_checksums("a", &plans, &wrote, &wrote).unwrap();
        let error = compare_checksums("a", &plans, &wrote, &phase([[1, 2], [3, 5]])).unwrap_err().to_string();
        assert!(error.contains("rank 1: step-001-rank-00001-optimizer.pt has the checksum 00000005"), "{error}");
    }

    #[test]
    fn the_scale_is_said() {
        let text = demand_text(CheckpointModel::Llama3x8b, 8, 256 << 20);
        assert!(text.contains("105 GB by 8 ranks") && text.contains("scaled to 1/49: 2147 MB by 8 ranks"), "{text}");
        let size = CheckpointModel::Llama3x8b.rank_bytes();
        assert!(demand_text(CheckpointModel::Llama3x8b, 8, size).contains("in full size"));
        assert!(!host_name().is_empty() && !host_name().contains('/'));
    }
}
