//! The report of `bench checkpoint`: table, sentences, charts, JSON. Runs nothing.

use super::CheckpointArgs;
use crate::cost::{RunCost, rates_json};
use crate::engine::agent::{DropResult, HostRun};
use crate::engine::pattern::LaneFigures;
use crate::error::Result;
use crate::numbers::{known_digits, median_known, median_of, three_digits};
use crate::plot::{BenchChart, ChartSeries};
use crate::report::CommandReport;
use crate::terminal::word_of;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Interval over which hosts' samples are summed, in seconds.
const BUCKET_SECONDS: f64 = 0.25;

/// The figures of a rank in a phase.
#[derive(Debug, Clone, Default)]
pub struct RankFigures {
    pub rank: usize,
    /// The thread that was the rank.
    pub lane: LaneFigures,
}

/// A phase of a checkpoint: all ranks wrote, or all read.
#[derive(Debug, Clone, Default)]
pub struct PhaseRun {
    /// All ranks of all hosts.
    pub ranks: Vec<RankFigures>,
    /// Seconds since the start, and bytes per second of all hosts.
    over_time: Vec<(f64, f64)>,
    cost: RunCost,
}

impl PhaseRun {
    /// The phase of all hosts, each with the numbers of the ranks there.
    pub fn new(shares: &[Vec<usize>], hosts: Vec<HostRun>, cost: RunCost) -> Self {
        let mut buckets: BTreeMap<u64, f64> = BTreeMap::new();
        let mut ranks = Vec::new();
        for (share, host) in shares.iter().zip(hosts) {
            let mut last = (0.0, 0);
            for (at, bytes) in host.over_time {
                let rate = (bytes - last.1) as f64 / (at - last.0).max(1e-3);
                // A short rest at the end is no separate sample.
                if at - last.0 > BUCKET_SECONDS / 5.0 || last.0 == 0.0 {
                    *buckets.entry((at / BUCKET_SECONDS).ceil() as u64).or_default() += rate;
                }
                last = (at, bytes);
            }
            ranks.extend(share.iter().zip(host.lanes).map(|(rank, lane)| RankFigures { rank: *rank, lane }));
        }
        let over_time = buckets.into_iter().map(|(bucket, rate)| (bucket as f64 * BUCKET_SECONDS, rate)).collect();
        ranks.sort_by_key(|rank| rank.rank);
        PhaseRun { ranks, over_time, cost }
    }

    fn bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.lane.bytes).sum()
    }

    /// Seconds of the slowest rank.
    fn seconds(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.lane.seconds).fold(0.0, f64::max)
    }

    /// Bytes per second of the rank that has the fewest.
    fn slowest_rate(&self) -> f64 {
        let rates = self.ranks.iter().map(|rank| rank.lane.bytes as f64 / rank.lane.seconds.max(1e-9));
        let least = rates.fold(f64::INFINITY, f64::min);
        if least.is_finite() { least } else { 0.0 }
    }

    /// Bytes per second of all ranks, over the time of the slowest.
    fn rate(&self) -> f64 {
        self.bytes() as f64 / self.seconds().max(1e-9)
    }

    /// The share of fsync in the slowest rank's time.
    fn sync_share(&self) -> f64 {
        let slowest = self.ranks.iter().max_by(|a, b| a.lane.seconds.total_cmp(&b.lane.seconds));
        slowest.map_or(0.0, |rank| rank.lane.sync_seconds / rank.lane.seconds.max(1e-9))
    }

    fn cpu_per_gib(&self, role: &str) -> Option<f64> {
        self.cost.cpu_per_gib(role, self.bytes())
    }

    fn json(&self) -> Value {
        let ranks: Vec<Value> = self
            .ranks
            .iter()
            .map(|RankFigures { rank, lane }| {
                json!({
                    "rank": rank, "bytes": lane.bytes, "seconds": lane.seconds, "fsync_seconds": lane.sync_seconds,
                })
            })
            .collect();
        json!({
            "seconds": self.seconds(), "bytes": self.bytes(), "bytes_per_second": self.rate(),
            "slowest_rank_bytes_per_second": self.slowest_rate(), "cpu": self.cost.cpu_json(self.bytes()),
            "counters": self.cost.grown, "ranks": ranks, "over_time": rates_json(&self.over_time),
        })
    }
}

/// All rounds of a place.
pub struct PlaceOutcome {
    name: String,
    /// Whether a mount of Spurline answers there.
    has_counters: bool,
    /// What became of page caches before the last read: of the read folder, then of folders with the same files.
    pub dropped: Vec<Vec<DropResult>>,
    pub writes: Vec<PhaseRun>,
    pub reads: Vec<PhaseRun>,
}

const CHECKPOINT_ROLES: [&str; 3] = ["ranks", "mount", "node"];

impl PlaceOutcome {
    /// A place without rounds.
    pub fn new(name: &str, has_counters: bool) -> Self {
        PlaceOutcome { name: name.to_owned(), has_counters, dropped: Vec::new(), writes: Vec::new(), reads: Vec::new() }
    }

    /// A line about a round.
    pub fn round_text(&self, wrote: &PhaseRun, got: &PhaseRun) -> String {
        format!("{}: slowest rank: write {}, read {}", self.name, phase_text(wrote), phase_text(got))
    }

    fn phases(&self) -> [(&'static str, &Vec<PhaseRun>); 2] {
        [("write", &self.writes), ("read", &self.reads)]
    }

    /// Sentences about caches and counters.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let name = &self.name;
        if !self.has_counters {
            notes.push(format!("{name}: no mount of Spurline answers there, so there are no counters of one."));
        }
        let has = |wanted: DropResult| self.dropped.iter().flatten().any(|result| *result == wanted);
        for (result, what) in [
            (DropResult::InMemory, "the files are on a file system in memory: its pages can't be dropped."),
            (
                DropResult::Kept,
                "the page cache kept files after it was requested to drop them: reads may come from memory.",
            ),
            (
                DropResult::Requested,
                "the page cache of the mount was requested to drop the files; the kernel does not tell whether it did.",
            ),
            (DropResult::Dropped, "the page cache dropped the files before they were read."),
        ] {
            notes.extend(has(result).then(|| format!("{name}: {what}")));
        }
        for (word, runs) in self.phases() {
            let Some(run) = runs.last() else { continue };
            let evidence = run.cost.evidence(&[
                ("mount.fuse.write_bytes", "written through FUSE"),
                ("mount.fuse.read_bytes", "read through FUSE"),
                ("mount.fuse.passthrough_opens", "files handed to the kernel (passthrough)"),
                ("mount.rdma.recv_bytes", "received over RDMA"),
                ("mount.rdma.write_bytes", "sent over RDMA"),
                ("mount.tcp.recv_bytes", "received over TCP"),
                ("mount.tcp.send_bytes", "sent over TCP"),
            ]);
            if !evidence.is_empty() {
                notes.push(format!("{name}, last {word} of {} MB: {evidence}.", run.bytes() / 1_000_000));
            }
        }
        notes
    }
}

fn phase_text(run: &PhaseRun) -> String {
    format!("{} s ({} GB/s)", three_digits(run.seconds()), three_digits(run.rate() / 1e9))
}

fn cpu_of(runs: &[PhaseRun], role: &str) -> Option<f64> {
    median_known(runs, |run| run.cpu_per_gib(role))
}

pub struct CheckpointReport<'a> {
    pub args: &'a CheckpointArgs,
    pub ranks: usize,
    /// Bytes of each in the mean.
    pub size: u64,
    pub hosts: Vec<String>,
    /// The machine and the checkpoint, in a line each.
    pub about: Vec<String>,
    pub notes: Vec<String>,
    pub outcomes: Vec<PlaceOutcome>,
}

impl CheckpointReport<'_> {
    /// Prints the table and what was requested, and writes the files.
    pub fn finish(self, machine: Value) -> Result<()> {
        let table = self.table();
        let charts = self.charts();
        let scores = self.scores();
        let result = self.json();
        let outputs = &self.args.work.report;
        let CheckpointReport { about, notes, .. } = self;
        CommandReport { outputs, command: "checkpoint", about, table, charts, scores, notes, result }.finish(machine)
    }

    /// The phase of the first place, which the others are compared with.
    fn first(&self, phase: usize) -> Option<f64> {
        let runs = self.outcomes.first()?.phases()[phase].1;
        Some(median_of(runs, PhaseRun::rate))
    }

    fn ratio(&self, outcome: &PlaceOutcome, phase: usize) -> Option<(f64, &str)> {
        let first = self.outcomes.first().filter(|first| first.name != outcome.name)?;
        Some((median_of(outcome.phases()[phase].1, PhaseRun::rate) / self.first(phase)?.max(1e-9), &first.name))
    }

    fn scores(&self) -> Vec<String> {
        self.outcomes
            .iter()
            .map(|outcome| {
                let part = |phase: usize| {
                    let (word, runs) = outcome.phases()[phase];
                    let ratio = self
                        .ratio(outcome, phase)
                        .map_or(String::new(), |(ratio, name)| format!(", {ratio:.2} of {name}"));
                    let slowest = three_digits(median_of(runs, PhaseRun::seconds));
                    format!("{word} {slowest} s, {} GB/s{ratio}", three_digits(median_of(runs, PhaseRun::rate) / 1e9))
                };
                format!("{}: slowest rank: {}; {}; all checksums agree", outcome.name, part(0), part(1))
            })
            .collect()
    }

    fn table(&self) -> Vec<Vec<String>> {
        let heads = [
            "place",
            "phase",
            "slowest rank s",
            "of these fsync",
            "its GB/s",
            "all GB/s",
            "CPU-s/GiB ranks",
            "mount",
            "node",
            "ratio",
        ];
        let mut table = vec![heads.map(str::to_owned).to_vec()];
        for outcome in &self.outcomes {
            for (phase, (word, runs)) in outcome.phases().into_iter().enumerate() {
                let mut line = vec![
                    outcome.name.clone(),
                    word.to_owned(),
                    three_digits(median_of(runs, PhaseRun::seconds)),
                    if phase == 0 {
                        format!("{:.0} %", median_of(runs, PhaseRun::sync_share) * 100.0)
                    } else {
                        "-".into()
                    },
                    three_digits(median_of(runs, PhaseRun::slowest_rate) / 1e9),
                    three_digits(median_of(runs, PhaseRun::rate) / 1e9),
                ];
                line.extend(CHECKPOINT_ROLES.map(|role| known_digits(cpu_of(runs, role))));
                line.push(
                    self.ratio(outcome, phase).map_or("-".to_owned(), |(ratio, name)| format!("{ratio:.2} of {name}")),
                );
                table.push(line);
            }
        }
        table
    }

    fn charts(&self) -> Vec<BenchChart> {
        let mut charts = Vec::new();
        let mut rates = Vec::new();
        let mut cpu = Vec::new();
        for phase in 0..2 {
            let word = ["write", "read"][phase];
            let mut over_time = Vec::new();
            let mut times = Vec::new();
            for outcome in &self.outcomes {
                let runs = outcome.phases()[phase].1;
                let name = &outcome.name;
                rates.push((format!("{name}: {word}"), median_of(runs, PhaseRun::rate) / 1e9));
                cpu.extend(
                    CHECKPOINT_ROLES
                        .iter()
                        .filter_map(|role| Some((format!("{name}: {word}, {role}"), cpu_of(runs, role)?))),
                );
                let Some(run) = runs.last() else { continue };
                over_time.push(ChartSeries::rates(name.clone(), &run.over_time));
                let points = run.ranks.iter().map(|rank| (rank.rank as f64, rank.lane.seconds)).collect();
                times.push(ChartSeries { name: name.clone(), points });
            }
            charts.push(BenchChart::lines(format!("Throughput over time, {word}"), "seconds", "GB/s", over_time));
            charts.push(BenchChart::lines(format!("Time of each rank, {word}"), "rank", "seconds", times));
        }
        charts.push(BenchChart::bars("Bytes of the checkpoint over the time of the slowest rank", "GB/s", rates));
        charts.push(BenchChart::bars("Processor time", "CPU-s/GiB", cpu));
        charts
    }

    fn json(&self) -> Value {
        let phase = |outcome: &PlaceOutcome, index: usize| {
            let runs = outcome.phases()[index].1;
            json!({
                "seconds": median_of(runs, PhaseRun::seconds), "bytes_per_second": median_of(runs, PhaseRun::rate),
                "slowest_rank_bytes_per_second": median_of(runs, PhaseRun::slowest_rate),
                "ratio": self.ratio(outcome, index).map(|(ratio, _)| ratio),
                "runs": runs.iter().map(PhaseRun::json).collect::<Vec<_>>(),
            })
        };
        let place = |outcome: &PlaceOutcome| {
            json!({
                "place": outcome.name, "spurline_mount": outcome.has_counters, "page_cache": outcome.dropped,
                "checksums_agree": true, "write": phase(outcome, 0), "read": phase(outcome, 1),
            })
        };
        json!({
            "model": word_of(&self.args.model), "ranks": self.ranks, "rank_bytes": self.size, "hosts": self.hosts,
            "rounds": self.args.rounds, "places": self.outcomes.iter().map(place).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_is_the_score() {
        let lane = |bytes, seconds| LaneFigures { bytes, seconds, sync_seconds: seconds / 2.0, ..Default::default() };
        let host = |lanes| HostRun { lanes, over_time: vec![(0.25, 1_000), (0.5, 3_000), (0.501, 3_000)], cpu: 1.0 };
        let hosts = vec![host(vec![lane(1_000, 1.0), lane(4_000, 4.0)]), host(vec![lane(900, 3.0), lane(100, 0.1)])];
        let run = PhaseRun::new(&[vec![1, 3], vec![0, 2]], hosts, RunCost::default());
        assert_eq!((run.seconds(), run.slowest_rate(), run.rate()), (4.0, 300.0, 1_500.0));
        assert_eq!(run.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(run.over_time, [(0.25, 8_000.0), (0.5, 16_000.0)]);
        assert_eq!(run.sync_share(), 0.5);
        assert_eq!((PhaseRun::default().rate(), PhaseRun::default().slowest_rate()), (0.0, 0.0));
    }

    #[test]
    fn what_caches_did_is_said() {
        let mut outcome = PlaceOutcome::new("mount", false);
        outcome.dropped = vec![vec![DropResult::Requested, DropResult::InMemory]];
        let mut run = PhaseRun::default();
        run.cost.grown.insert("mount.tcp.recv_bytes".into(), 7_000_000);
        outcome.reads.push(run);
        let text = outcome.notes().join("\n");
        for part in ["no mount of Spurline", "in memory", "does not tell", "7 MB received over TCP"] {
            assert!(text.contains(part), "{part:?} is missing: {text}");
        }
    }
}
