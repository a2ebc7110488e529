//! The report of `bench checkpoint`: table, sentences, charts, JSON. Runs nothing.

use super::CheckpointArgs;
use super::worker::{DropResult, HostPhase, RankFigures};
use crate::error::Result;
use crate::mount::CounterValues;
use crate::numbers::{median, three_digits};
use crate::plot::{BenchChart, ChartSeries};
use crate::report::ReportSection;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Interval over which hosts' samples are summed, in seconds.
const BUCKET_SECONDS: f64 = 0.25;

/// A phase of a checkpoint: all ranks wrote, or all read.
#[derive(Debug, Clone, Default)]
pub struct PhaseRun {
    /// All ranks of all hosts.
    pub ranks: Vec<RankFigures>,
    /// Seconds since the start, and bytes per second of all hosts.
    pub over_time: Vec<(f64, f64)>,
    /// Processor seconds by role.
    pub cpu: Vec<(&'static str, f64)>,
    /// Counters that grew, by role.
    pub grown: CounterValues,
}

impl PhaseRun {
    /// The phase of all hosts.
    pub fn new(phases: Vec<HostPhase>, cpu: Vec<(&'static str, f64)>, grown: CounterValues) -> Self {
        let mut buckets: BTreeMap<u64, f64> = BTreeMap::new();
        for phase in &phases {
            let mut last = (0.0, 0);
            for &(at, bytes) in &phase.over_time {
                let rate = (bytes - last.1) as f64 / (at - last.0).max(1e-3);
                // A short rest at the end is no separate sample.
                if at - last.0 > BUCKET_SECONDS / 5.0 || last.0 == 0.0 {
                    *buckets.entry((at / BUCKET_SECONDS).ceil() as u64).or_default() += rate;
                }
                last = (at, bytes);
            }
        }
        let over_time = buckets.into_iter().map(|(bucket, rate)| (bucket as f64 * BUCKET_SECONDS, rate)).collect();
        let mut ranks: Vec<RankFigures> = phases.into_iter().flat_map(|phase| phase.ranks).collect();
        ranks.sort_by_key(|rank| rank.rank);
        PhaseRun { ranks, over_time, cpu, grown }
    }

    fn bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.bytes).sum()
    }

    /// Seconds of the slowest rank.
    fn seconds(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max)
    }

    /// Bytes per second of the rank that has the fewest.
    fn slowest_rate(&self) -> f64 {
        let least =
            self.ranks.iter().map(|rank| rank.bytes as f64 / rank.seconds.max(1e-9)).fold(f64::INFINITY, f64::min);
        if least.is_finite() { least } else { 0.0 }
    }

    /// Bytes per second of all ranks, over the time of the slowest.
    fn rate(&self) -> f64 {
        self.bytes() as f64 / self.seconds().max(1e-9)
    }

    /// The share of fsync in the slowest rank's time.
    fn sync_share(&self) -> f64 {
        let slowest = self.ranks.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds));
        slowest.map_or(0.0, |rank| rank.sync_seconds / rank.seconds.max(1e-9))
    }

    fn cpu_per_gib(&self, role: &str) -> Option<f64> {
        let used = self.cpu.iter().find(|(name, _)| *name == role)?.1;
        (self.bytes() > 0).then(|| used / (self.bytes() as f64 / f64::from(1u32 << 30)))
    }

    fn grown_mb(&self, name: &str) -> u64 {
        self.grown.get(name).copied().unwrap_or(0) / 1_000_000
    }
}

/// The bars of a place's phase: names and values.
type BarsOf = dyn Fn(&PlaceOutcome, &'static str, &[PhaseRun]) -> Vec<(String, f64)>;

/// All rounds of a place.
pub struct PlaceOutcome {
    name: String,
    /// Whether a mount of Spurline answers there.
    has_counters: bool,
    /// What became of page caches before the last read: of the read folder, then of folders with the same files.
    pub dropped: Vec<Vec<DropResult>>,
    /// The writes.
    pub writes: Vec<PhaseRun>,
    /// The reads.
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
        if has(DropResult::InMemory) {
            notes.push(format!("{name}: the files are on a file system in memory: its pages can't be dropped."));
        }
        if has(DropResult::Kept) {
            notes.push(format!(
                "{name}: the page cache kept files after it was requested to drop them: reads may come from memory."
            ));
        }
        if has(DropResult::Requested) {
            notes.push(format!("{name}: the page cache of the mount was requested to drop the files; the kernel does not tell whether it did."));
        }
        if has(DropResult::Dropped) {
            notes.push(format!("{name}: the page cache dropped the files before they were read."));
        }
        for (word, runs) in self.phases() {
            let Some(run) = runs.last() else { continue };
            let parts = [
                ("mount.fuse.write_bytes", "written through FUSE"),
                ("mount.fuse.read_bytes", "read through FUSE"),
                ("mount.fuse.passthrough_opens", "files handed to the kernel (passthrough)"),
                ("mount.rdma.recv_bytes", "received over RDMA"),
                ("mount.rdma.write_bytes", "sent over RDMA"),
                ("mount.tcp.recv_bytes", "received over TCP"),
                ("mount.tcp.send_bytes", "sent over TCP"),
            ];
            let parts: Vec<String> = parts
                .iter()
                .filter_map(|(counter, what)| match *counter {
                    "mount.fuse.passthrough_opens" => {
                        run.grown.get(*counter).filter(|n| **n > 0).map(|n| format!("{n} {what}"))
                    }
                    _ => Some(run.grown_mb(counter)).filter(|mb| *mb > 0).map(|mb| format!("{mb} MB {what}")),
                })
                .collect();
            if !parts.is_empty() {
                notes.push(format!("{name}, last {word} of {} MB: {}.", run.bytes() / 1_000_000, parts.join(", ")));
            }
        }
        notes
    }
}

fn phase_text(run: &PhaseRun) -> String {
    format!("{} s ({} GB/s)", three_digits(run.seconds()), three_digits(run.rate() / 1e9))
}

fn median_of(runs: &[PhaseRun], of: impl Fn(&PhaseRun) -> f64) -> f64 {
    median(&runs.iter().map(of).collect::<Vec<_>>())
}

fn cpu_of(runs: &[PhaseRun], role: &str) -> Option<f64> {
    let all: Vec<f64> = runs.iter().filter_map(|run| run.cpu_per_gib(role)).collect();
    (!all.is_empty()).then(|| median(&all))
}

/// A report.
pub struct CheckpointReport<'a> {
    /// The arguments.
    pub args: &'a CheckpointArgs,
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes of each in the mean.
    pub size: u64,
    /// The hosts.
    pub hosts: Vec<String>,
    /// The machine.
    pub about: Value,
    /// The machine in a line.
    pub summary: String,
    /// The checkpoint in a line.
    pub demand: String,
    /// Further sentences.
    pub notes: Vec<String>,
    /// The places.
    pub outcomes: Vec<PlaceOutcome>,
}

impl CheckpointReport<'_> {
    /// Prints the table and what was requested, and writes the files.
    ///
    /// # Errors
    /// When a file can't be written.
    pub fn print_and_write(self) -> Result<()> {
        let mut section = ReportSection::of_table(self.table(), self.charts());
        anstream::print!("\n{}", section.table_text());
        self.args.report.plot_charts(&section);
        let scores = self.scores();
        for line in scores.iter().chain(&self.notes) {
            anstream::println!("{line}");
        }
        let result = self.json();
        section.about = vec![self.summary, self.demand];
        section.about.extend(scores);
        section.notes = self.notes;
        self.args.report.write_reports(&result, "Spurline bench checkpoint", &[section])
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
                line.extend(CHECKPOINT_ROLES.map(|role| cpu_of(runs, role).map_or("-".to_owned(), three_digits)));
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
        for phase in 0..2 {
            let word = ["write", "read"][phase];
            let lines = |of: &dyn Fn(&PhaseRun) -> Vec<(f64, f64)>| -> Vec<ChartSeries> {
                self.outcomes
                    .iter()
                    .filter_map(|outcome| {
                        let points = of(outcome.phases()[phase].1.last()?);
                        Some(ChartSeries { name: outcome.name.clone(), points })
                    })
                    .collect()
            };
            let over_time = lines(&|run| run.over_time.iter().map(|(at, rate)| (*at, rate / 1e9)).collect());
            charts.push(BenchChart::lines(format!("Throughput over time, {word}"), "seconds", "GB/s", over_time));
            let ranks = lines(&|run| run.ranks.iter().map(|rank| (rank.rank as f64, rank.seconds)).collect());
            charts.push(BenchChart::lines(format!("Time of each rank, {word}"), "rank", "seconds", ranks));
        }
        let bars = |of: &BarsOf| -> Vec<ChartSeries> {
            let all = self.outcomes.iter().flat_map(|outcome| {
                outcome.phases().into_iter().flat_map(|(word, runs)| of(outcome, word, runs)).collect::<Vec<_>>()
            });
            all.map(|(name, value)| ChartSeries::bar(name, value)).collect()
        };
        let rates = bars(&|outcome, word, runs| {
            vec![(format!("{}: {word}", outcome.name), median_of(runs, PhaseRun::rate) / 1e9)]
        });
        charts.push(BenchChart::bars("Bytes of the checkpoint over the time of the slowest rank", "GB/s", rates));
        let cpu = bars(&|outcome, word, runs| {
            let one = |role: &str| Some((format!("{}: {word}, {role}", outcome.name), cpu_of(runs, role)?));
            CHECKPOINT_ROLES.iter().filter_map(|role| one(role)).collect()
        });
        charts.push(BenchChart::bars("Processor time", "CPU-s/GiB", cpu));
        charts
    }

    fn json(&self) -> Value {
        json!({
            "schema": "spurline-bench-checkpoint/1", "spurline": env!("CARGO_PKG_VERSION"), "model": self.args.model.word(),
            "ranks": self.ranks, "rank_bytes": self.size, "hosts": self.hosts, "rounds": self.args.rounds,
            "machine": self.about, "notes": self.notes, "places": self.outcomes.iter().map(|outcome| {
            let phase = |index: usize| {
                let runs = outcome.phases()[index].1;
                json!({
                    "seconds": median_of(runs, PhaseRun::seconds), "bytes_per_second": median_of(runs, PhaseRun::rate),
                    "slowest_rank_bytes_per_second": median_of(runs, PhaseRun::slowest_rate),
                    "ratio": self.ratio(outcome, index).map(|(ratio, _)| ratio),
                    "runs": runs.iter().map(|run| {
            let cpu: serde_json::Map<String, Value> = run
                .cpu
                .iter()
                .map(|(role, used)| {
                    ((*role).to_owned(), json!({ "seconds": used, "seconds_per_gib": run.cpu_per_gib(role) }))
                })
                .collect();
            json!({
                "seconds": run.seconds(), "bytes": run.bytes(), "bytes_per_second": run.rate(),
                "slowest_rank_bytes_per_second": run.slowest_rate(), "cpu": cpu, "counters": run.grown,
                "ranks": run.ranks.iter().map(|rank| json!({
                    "rank": rank.rank, "bytes": rank.bytes, "seconds": rank.seconds, "fsync_seconds": rank.sync_seconds,
                })).collect::<Vec<_>>(),
                "over_time": run.over_time.iter()
                    .map(|(at, rate)| json!({ "at": at, "bytes_per_second": rate })).collect::<Vec<_>>(),
            })
        }).collect::<Vec<_>>(),
                })
            };
            json!({
                "place": outcome.name, "spurline_mount": outcome.has_counters, "page_cache": outcome.dropped,
                "checksums_agree": true, "write": phase(0), "read": phase(1),
            })
        }).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_is_the_score() {
        let rank =
            |rank, bytes, seconds| RankFigures { rank, bytes, seconds, sync_seconds: seconds / 2.0, checksums: vec![] };
        let host = |ranks| HostPhase { ranks, over_time: vec![(0.25, 1_000), (0.5, 3_000), (0.501, 3_000)], cpu: 1.0 };
        let phases = vec![
            host(vec![rank(1, 1_000, 1.0), rank(3, 4_000, 4.0)]),
            host(vec![rank(0, 900, 3.0), rank(2, 100, 0.1)]),
        ];
        let run = PhaseRun::new(phases, vec![("ranks", 2.0)], CounterValues::new());
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
        run.grown.insert("mount.tcp.recv_bytes".into(), 7_000_000);
        outcome.reads.push(run);
        let text = outcome.notes().join("\n");
        for part in ["no mount of Spurline", "in memory", "does not tell", "7 MB received over TCP"] {
            assert!(text.contains(part), "{part:?} is missing: {text}");
        }
    }
}
