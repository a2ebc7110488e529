//! What a run cost: processor time by role, and the counters of mounts and nodes that grew. Knows no workload.

use crate::mount::{CounterValues, counter, counter_growth};
use crate::numbers::gib;
use serde_json::{Map, Value, json};

/// Counters by the role of a process; several processes may have the same role.
pub type RoleCounters = Vec<(&'static str, CounterValues)>;

#[derive(Debug, Clone, Default)]
pub struct RunCost {
    /// Processor seconds by role.
    pub cpu: Vec<(&'static str, f64)>,
    /// Counters that grew, each behind the role and a dot.
    pub grown: CounterValues,
}

impl RunCost {
    /// The cost of a run that used `own` processor seconds in the role `user`, by the counters before and after.
    pub fn new(user: &'static str, own: f64, before: &RoleCounters, after: &RoleCounters) -> RunCost {
        let mut cost = RunCost { cpu: vec![(user, own)], grown: CounterValues::new() };
        for ((role, before), (_, after)) in before.iter().zip(after) {
            let growth = counter_growth(before, after);
            cost.add_cpu(role, counter(&growth, "usage.cpu_us") as f64 / 1e6);
            for (name, n) in growth {
                *cost.grown.entry(format!("{role}.{name}")).or_default() += n;
            }
        }
        cost
    }

    /// Adds processor seconds of a role.
    pub fn add_cpu(&mut self, role: &'static str, seconds: f64) {
        match self.cpu.iter_mut().find(|(known, _)| *known == role) {
            Some((_, sum)) => *sum += seconds,
            None => self.cpu.push((role, seconds)),
        }
    }

    /// Processor seconds of a role for each GiB; `None` where unknown.
    pub fn cpu_per_gib(&self, role: &str, bytes: u64) -> Option<f64> {
        let used = self.cpu.iter().find(|(known, _)| *known == role)?.1;
        (bytes > 0).then(|| used / gib(bytes))
    }

    /// How much a counter grew, in all or in units of `unit` bytes.
    pub fn grown_by(&self, name: &str, unit: u64) -> u64 {
        counter(&self.grown, name) / unit
    }

    /// Counters that grew, each with its words: bytes in MB, others as a count.
    pub fn evidence(&self, counters: &[(&str, &str)]) -> String {
        let part = |(name, what): &(&str, &str)| {
            let unit = if name.ends_with("_bytes") { " MB" } else { "" };
            let amount = self.grown_by(name, if unit.is_empty() { 1 } else { 1_000_000 });
            (amount > 0).then(|| format!("{amount}{unit} {what}"))
        };
        counters.iter().filter_map(part).collect::<Vec<_>>().join(", ")
    }

    /// Seconds of each role, and seconds for each GiB.
    pub fn cpu_json(&self, bytes: u64) -> Map<String, Value> {
        let of_role = |(role, used): &(&'static str, f64)| {
            ((*role).to_owned(), json!({ "seconds": used, "seconds_per_gib": self.cpu_per_gib(role, bytes) }))
        };
        self.cpu.iter().map(of_role).collect()
    }
}

/// A rate over time as JSON.
pub fn rates_json(rates: &[(f64, f64)]) -> Vec<Value> {
    rates.iter().map(|(at, rate)| json!({ "at": at, "bytes_per_second": rate })).collect()
}
