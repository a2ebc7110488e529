//! `bench checkpoint`: ranks write a checkpoint, sync and rename it; caches are dropped; it is read back through another
//! mount or on other hosts, with checksums compared. The score is the slowest rank. This module runs the rounds.

mod plan;
mod report;

use crate::cost::{RoleCounters, RunCost};
use crate::engine::agent::{AgentOrder, HostRun};
use crate::engine::crew::AgentCrew;
use crate::engine::pattern::{FileAccess, FilePattern};
use crate::error::{BenchError, Result};
use crate::fleet::AgentHost;
use crate::machine;
use crate::mount::CounterValues;
use crate::places::{BenchPlace, PlaceBuilder, PlaceKind};
use crate::terminal::{show_progress, word_of};
use crate::workplace::{WorkArgs, Workplace};
use plan::{CheckpointModel, RANKS_OF_HOST, RankFiles, lists_in, plan_ranks};
use report::{PhaseRun, PlaceOutcome};
use serde_json::Value;
use spurline_types::Size;
use std::path::Path;
use std::time::Duration;

/// Bytes of a write and of a read.
const RANK_PIECE_BYTES: usize = 1 << 20;
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
    /// The work folder, the program and the reports.
    #[command(flatten)]
    pub work: WorkArgs,
}

/// A run of the command.
struct CheckpointBench<'a> {
    args: &'a CheckpointArgs,
    crew: AgentCrew,
    work: &'a Workplace,
    ranks: usize,
    size: u64,
    /// The name of the folder that each place gets.
    folder: String,
}

/// Runs the command.
pub fn run(args: &CheckpointArgs) -> Result<()> {
    crate::stop::catch_signals()?;
    args.work.report.check_places()?;
    let hosts = args.hosts.iter().map(|text| AgentHost::parse(text)).collect::<Result<Vec<_>>>()?;
    let named = args.dir.iter().map(|text| BenchPlace::parse(text)).collect::<Result<Vec<_>>>()?;
    let ranks = args.ranks.map_or(RANKS_OF_HOST * hosts.len().max(1), |n| n as usize);
    let size = if args.full_size { args.model.rank_bytes() } else { args.size.map_or(RANK_BYTES, |size| size.0) };
    if size < 1 << 16 {
        return Err(BenchError::Usage("--size below 64K measures nothing: give 256M".to_owned()));
    }
    if ranks < hosts.len() {
        return Err(BenchError::Usage(format!("--ranks {ranks}: --hosts names {}, and each has a rank", hosts.len())));
    }
    let work = args.work.open("checkpoint")?;
    work.spurline()?;
    let machine = work.describe_machine();
    let about = vec![machine::one_line(&machine), demand_text(args.model, ranks, size)];
    anstream::println!("{}", about.join("\n"));
    let (places, mut notes) = if named.is_empty() {
        let source = work.scratch.subdir("source")?;
        PlaceBuilder { work: &work, source, writable: true, round_trip: Duration::ZERO }.open_all(&args.place)?
    } else {
        (named, Vec::new())
    };
    let folder = format!("spurline-checkpoint-{}-{}", host_name(), std::process::id());
    let crew = AgentCrew::start(&work, &hosts)?;
    let mut bench = CheckpointBench { args, crew, work: &work, ranks, size, folder };
    let mut outcomes = bench.open_places(&places)?;
    for round in 1..=args.rounds {
        for (place, outcome) in places.iter().zip(&mut outcomes) {
            bench.run_round(place, outcome, round)?;
        }
    }
    let hosts = bench.crew.hosts();
    // Agents remove their folders before the mounts end.
    drop(bench);
    notes.extend(outcomes.iter().flat_map(PlaceOutcome::notes));
    if hosts.len() == 1 {
        notes.extend(places.iter().filter(|place| !place.has_reader() && place.source.is_none()).map(|place| {
            format!("{}: read back through the mount that wrote; DIR:DIR2 reads through another one, --hosts on other hosts.", place.name)
        }));
    }
    notes.push(work.load_note());
    report::CheckpointReport { args, ranks, size, hosts, about, notes, outcomes }.finish(machine)
}

fn demand_text(model: CheckpointModel, ranks: usize, size: u64) -> String {
    let (bytes, published) = model.published();
    let all = ranks as u64 * size;
    let scale = bytes as f64 / all as f64;
    let scaled = if scale > 1.5 { format!("scaled to 1/{scale:.0}") } else { "in full size".to_owned() };
    format!(
        "Checkpoint of {} (published: {} GB by {published} ranks), {scaled}: {} MB by {ranks} ranks, each file written, synced, renamed",
        word_of(&model),
        bytes / 1_000_000_000,
        all / 1_000_000
    )
}

/// The host's name, as far as allowed in a file name.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}

impl CheckpointBench<'_> {
    /// Checks every place before the first byte is written.
    fn open_places(&mut self, places: &[BenchPlace]) -> Result<Vec<PlaceOutcome>> {
        let bytes = self.ranks as u64 * self.size;
        let mut outcomes = Vec::new();
        for place in places {
            let dir = place.write.clone();
            let folder = place.write.join(&self.folder);
            self.order(|_| AgentOrder::Open { dir: dir.clone(), folder: folder.clone(), bytes })?;
            let folder = place.read.join(&self.folder);
            self.order(|_| AgentOrder::Find { folder: folder.clone() })?;
            let counters = self.counters(place)?;
            outcomes.push(PlaceOutcome::new(&place.name, counters.iter().any(|(role, _)| *role == "mount")));
        }
        Ok(outcomes)
    }

    /// An order that shows no progress.
    fn order(&mut self, order: impl Fn(usize) -> AgentOrder) -> Result<Vec<Value>> {
        self.crew.order_all(order, |_| {})
    }

    /// The ranks of agent `index`; with `read` those of the host before.
    fn ranks_of(&self, index: usize, read: bool) -> Vec<usize> {
        let agents = self.crew.len();
        let writer = if read { (index + agents - 1) % agents } else { index };
        // Neighbours share a host.
        (0..self.ranks).filter(|rank| rank * agents / self.ranks == writer).collect()
    }

    /// A checkpoint at a place: written, dropped from caches, read back, compared, removed.
    fn run_round(&mut self, place: &BenchPlace, outcome: &mut PlaceOutcome, round: u32) -> Result<()> {
        let files = plan_ranks(self.args.model, self.ranks, self.size, round);
        let all = files.concat();
        let write = place.write.join(&self.folder);
        let read = place.read.join(&self.folder);
        let access = FileAccess::Write { piece: RANK_PIECE_BYTES, sync: true, rename: true };
        let wrote = self.run_phase(place, &write, &files, access, round)?;
        let mut folders = vec![read.clone()];
        folders.extend(place.has_reader().then(|| write.clone()));
        folders.extend(place.source.as_ref().map(|source| source.join(&self.folder)));
        let lists: Vec<_> = folders.iter().map(|folder| lists_in(folder, &[&all]).remove(0)).collect();
        outcome.dropped = self.crew.order_all(|_| AgentOrder::Drop { lists: lists.clone() }, |_| {})?;
        let access = FileAccess::Read { piece: RANK_PIECE_BYTES, cold: false, to_end: true };
        let got = self.run_phase(place, &read, &files, access, round)?;
        compare_checksums(&place.name, &files, &wrote, &got)?;
        let written: Vec<_> = (0..self.crew.len())
            .map(|index| self.ranks_of(index, false).iter().map(|rank| &files[*rank]).collect::<Vec<_>>())
            .collect();
        self.order(|index| AgentOrder::Remove { lists: lists_in(&write, &written[index]) })?;
        show_progress("");
        anstream::eprintln!("{}", outcome.round_text(&wrote, &got));
        outcome.writes.push(wrote);
        outcome.reads.push(got);
        Ok(())
    }

    /// Runs a phase on all agents, with counters before and after.
    fn run_phase(
        &mut self,
        place: &BenchPlace,
        folder: &Path,
        files: &[RankFiles],
        access: FileAccess,
        round: u32,
    ) -> Result<PhaseRun> {
        let reads = matches!(access, FileAccess::Read { .. });
        let shares: Vec<Vec<usize>> = (0..self.crew.len()).map(|index| self.ranks_of(index, reads)).collect();
        let before = self.counters(place)?;
        let order = |index: usize| {
            let ranks: Vec<&RankFiles> = shares[index].iter().map(|rank| &files[*rank]).collect();
            let lists = lists_in(folder, &ranks);
            let pattern = FilePattern { lists, threads: 1, access, measured: true, endless: None, steps: None };
            AgentOrder::Run { pattern }
        };
        let what = format!("{}: {}, round {round}", place.name, if reads { "read" } else { "write" });
        let all = (self.ranks as u64 * self.size) >> 20;
        let hosts: Vec<HostRun> =
            self.crew.order_all(order, |bytes| show_progress(&format!("{what}  {} of {all} MiB", bytes >> 20)))?;
        let after = self.counters(place)?;
        let cost = RunCost::new("ranks", hosts.iter().map(|host| host.cpu).sum(), &before, &after);
        Ok(PhaseRun::new(&shares, hosts, cost))
    }

    /// The counters of the mounts on all hosts, and of the node.
    fn counters(&mut self, place: &BenchPlace) -> Result<RoleCounters> {
        let mut all = Vec::new();
        let mut dirs = vec![place.write.clone()];
        dirs.extend(place.has_reader().then(|| place.read.clone()));
        let spurline = if self.args.hosts.is_empty() { Some(self.work.spurline()?.to_owned()) } else { None };
        for dir in dirs {
            let order = |_| AgentOrder::Counters { dir: dir.clone(), spurline: spurline.clone() };
            let known: Vec<Option<CounterValues>> = self.crew.order_all(order, |_| {})?;
            all.extend(known.into_iter().flatten().map(|values| ("mount", values)));
        }
        all.extend(place.node_counters()?);
        Ok(all)
    }
}

/// Compares what was read with what was written.
fn compare_checksums(place: &str, files: &[RankFiles], wrote: &PhaseRun, got: &PhaseRun) -> Result<()> {
    let sum = |run: &PhaseRun, rank: usize, file: usize| -> Option<u32> {
        run.ranks.iter().find(|known| known.rank == rank)?.lane.checksums.get(file).copied()
    };
    let text = |sum: Option<u32>| sum.map_or("none".to_owned(), |sum| format!("{sum:08x}"));
    for (rank, files) in files.iter().enumerate() {
        for (index, (name, _)) in files.iter().enumerate() {
            let written = sum(wrote, rank, index);
            let read = sum(got, rank, index);
            if written.is_none() || written != read {
                return Err(BenchError::Failed(format!(
                    "{place}: rank {rank}: {name} has the checksum {} where it is read, and {} where it was written",
                    text(read),
                    text(written)
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pattern::LaneFigures;

    #[test]
    fn a_wrong_checksum_names_the_rank_and_the_file() {
        let plans = plan_ranks(CheckpointModel::Llama3x8b, 2, 1 << 20, 1);
        let phase = |sums: [[u32; 2]; 2]| {
            let lane = |sums: [u32; 2]| LaneFigures { checksums: sums.to_vec(), ..LaneFigures::default() };
            let host = HostRun { lanes: sums.map(lane).to_vec(), ..HostRun::default() };
            PhaseRun::new(&[vec![0, 1]], vec![host], RunCost::default())
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
