//! Cases measured in turns, round after round, so that other load on the machine affects all alike. Computes medians, ratios to
//! ceilings, and comparisons with floors. Knows no workload.

use crate::error::{BenchError, Result};
use crate::mount::CounterValues;
use crate::numbers::{median, median_known, median_of, spread};
use crate::stop;
use serde_json::{Value, json};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FigureUnit {
    /// Bytes per second; more is better.
    Bandwidth,
    /// Operations or files per second; more is better.
    Rate,
    /// Seconds; less is better.
    Time,
}

impl FigureUnit {
    fn name(self) -> &'static str {
        match self {
            FigureUnit::Bandwidth => "bytes/s",
            FigureUnit::Rate => "1/s",
            FigureUnit::Time => "s",
        }
    }
}

/// A measurement.
#[derive(Debug, Clone, Default)]
pub struct CaseSample {
    /// In the case's unit.
    pub value: f64,
    pub bytes: u64,
    /// Operations or files.
    pub ops: u64,
    /// Processor seconds by role: `mount`, `node`, `server`, `reader`.
    pub cpu: Vec<(&'static str, f64)>,
    /// Median and 99th percentile of an operation's time in microseconds, where known.
    pub latency_us: Option<(f64, f64)>,
}

/// A ceiling that a case is compared with.
#[derive(Debug, Clone, Copy)]
pub struct CeilingSpec {
    /// The ceiling's name in tables.
    pub name: &'static str,
    /// Variants of the same group.
    pub variants: &'static [&'static str],
    /// All count in series: the combined rate when each does the whole work on the same processors. Else the best counts.
    pub in_turn: bool,
    /// The least acceptable ratio.
    pub floor: CeilingFloor,
}

/// The least acceptable ratio to a ceiling.
#[derive(Debug, Clone, Copy)]
pub enum CeilingFloor {
    None,
    /// That of the case's load.
    OfLoad,
    /// This ratio.
    At(f64),
}

/// The best of these variants.
pub const fn best_of(name: &'static str, variants: &'static [&'static str], floor: CeilingFloor) -> CeilingSpec {
    CeilingSpec { name, variants, in_turn: false, floor }
}

/// The rate of these variants one after the other.
pub const fn in_turn(name: &'static str, variants: &'static [&'static str], floor: CeilingFloor) -> CeilingSpec {
    CeilingSpec { name, variants, in_turn: true, floor }
}

/// The counters that grew in a case's warm-up run, and the problem, if any.
pub type WarmUpResult = (CounterValues, Option<String>);

/// A repeated measurement.
pub struct BenchCase<'a> {
    pub name: CaseName,
    /// The floor of the load, for [`CeilingFloor::OfLoad`].
    pub floor: f64,
    ceilings: Vec<CeilingSpec>,
    pub take: Box<dyn FnMut() -> Result<CaseSample> + 'a>,
    /// The warm-up, run once before the rounds and not measured; returns the counters that grew.
    warm: Option<Box<dyn FnMut() -> Result<WarmUpResult> + 'a>>,
}

/// The names of a case.
#[derive(Debug, Clone)]
pub struct CaseName {
    /// Unique in the section: `group/variant`.
    pub id: String,
    /// The workload: rows of the same table section.
    pub group: String,
    pub label: String,
    /// The unit of the values.
    pub unit: FigureUnit,
}

impl<'a> BenchCase<'a> {
    /// A case `group/variant` with no ceilings or warm-up yet.
    pub fn new(
        group: &str,
        variant: &str,
        label: &str,
        unit: FigureUnit,
        take: impl FnMut() -> Result<CaseSample> + 'a,
    ) -> Self {
        let id = format!("{group}/{variant}");
        let name = CaseName { id, group: group.to_owned(), label: label.to_owned(), unit };
        BenchCase { name, floor: 0.0, ceilings: Vec::new(), take: Box::new(take), warm: None }
    }
    /// A known figure, beside which others stand.
    pub fn known(group: &str, variant: &str, label: &str, unit: FigureUnit, value: f64) -> Self {
        BenchCase::new(group, variant, label, unit, move || Ok(CaseSample { value, ..CaseSample::default() }))
    }
    /// Compares with ceilings.
    #[must_use]
    pub fn below(mut self, ceilings: &[CeilingSpec]) -> Self {
        self.ceilings.extend_from_slice(ceilings);
        self
    }
    /// Compares with the best of these variants of the same group.
    #[must_use]
    pub fn against(self, name: &'static str, variants: &'static [&'static str], floor: Option<f64>) -> Self {
        self.below(&[best_of(name, variants, floor.map_or(CeilingFloor::None, CeilingFloor::At))])
    }
    /// Sets the warm-up.
    #[must_use]
    pub fn warm(mut self, warm: impl FnMut() -> Result<WarmUpResult> + 'a) -> Self {
        self.warm = Some(Box::new(warm));
        self
    }
}

/// The result of a case relative to a ceiling.
#[derive(Debug, Clone)]
pub struct CeilingRatio {
    pub name: &'static str,
    /// The id of the ceiling in use.
    pub id: String,
    /// Ratio of the medians; for times, the ceiling's over the case's, so that 1 is equal and more is better.
    pub value: f64,
    /// Smallest and largest of the same ratio within single rounds.
    pub spread: (f64, f64),
    pub floor: Option<f64>,
}

impl CeilingRatio {
    /// Whether the ratio reaches the floor; `None` without a floor.
    pub fn is_met(&self) -> Option<bool> {
        // Compared with two digits, as shown.
        self.floor.map(|floor| (self.value * 100.0).round() >= (floor * 100.0).round())
    }
}

/// A case with figures.
#[derive(Debug, Clone)]
pub struct ResultRow {
    /// The names of the case.
    pub name: CaseName,
    /// A sample for each round.
    pub samples: Vec<CaseSample>,
    /// A ratio for each measured ceiling.
    pub ratios: Vec<CeilingRatio>,
    /// Counters that grew during the warm-up.
    pub carried: CounterValues,
    /// Why figures are missing or doubtful.
    pub problem: Option<String>,
}

impl ResultRow {
    fn values(&self) -> Vec<f64> {
        self.samples.iter().map(|s| s.value).collect()
    }
    pub fn median(&self) -> f64 {
        median_of(&self.samples, |sample| sample.value)
    }
    /// The smallest and the largest value.
    pub fn spread(&self) -> (f64, f64) {
        spread(&self.values())
    }
    /// Median processor seconds per GiB of each role.
    pub fn cpu_per_gib(&self) -> BTreeMap<&'static str, f64> {
        self.cpu_per(|sample| sample.bytes as f64 / f64::from(1u32 << 30))
    }
    fn cpu_per(&self, amount: impl Fn(&CaseSample) -> f64) -> BTreeMap<&'static str, f64> {
        let mut by_role: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        for sample in &self.samples {
            let amount = amount(sample);
            for &(role, seconds) in sample.cpu.iter().filter(|_| amount > 0.0) {
                by_role.entry(role).or_default().push(seconds / amount);
            }
        }
        by_role.into_iter().map(|(role, values)| (role, median(&values))).collect()
    }
    /// Median of the samples' latencies, in microseconds.
    pub fn latency_us(&self) -> Option<(f64, f64)> {
        let p50 = median_known(&self.samples, |sample| Some(sample.latency_us?.0))?;
        Some((p50, median_known(&self.samples, |sample| Some(sample.latency_us?.1))?))
    }
    /// Whether this row keeps every floor; `None` without any.
    pub fn is_met(&self) -> Option<bool> {
        self.ratios.iter().filter_map(CeilingRatio::is_met).reduce(|all, met| all && met)
    }
    pub fn to_json(&self) -> Value {
        let (min, max) = self.spread();
        let latency = self.latency_us();
        json!({
            "id": self.name.id, "group": self.name.group, "label": self.name.label, "unit": self.name.unit.name(),
            "median": self.median(), "min": min, "max": max, "samples": self.values(),
            "cpu_s_per_gib": self.cpu_per_gib(), "cpu_us_per_op": self.cpu_per(|sample| sample.ops as f64 / 1e6),
            "p50_us": latency.map(|l| l.0), "p99_us": latency.map(|l| l.1),
            "ratios": self.ratios.iter().map(|r| json!({
                "ceiling": r.name, "ceiling_id": r.id, "ratio": r.value, "min": r.spread.0, "max": r.spread.1,
                "floor": r.floor, "met": r.is_met(),
            })).collect::<Vec<_>>(),
            "carried": self.carried, "problem": self.problem,
        })
    }
}

/// Takes `rounds` samples of every case in turns. A failed case stays in the result with the reason.
pub fn run_rounds(mut cases: Vec<BenchCase<'_>>, rounds: usize, mut tell: impl FnMut(&str)) -> Result<Vec<ResultRow>> {
    let mut rows: Vec<ResultRow> = cases.iter().map(empty_row).collect();
    for (case, row) in cases.iter_mut().zip(&mut rows) {
        let Some(warm) = &mut case.warm else { continue };
        stop::check_stop()?;
        tell(&format!("warm-up  {}  {}", case.name.group, case.name.label));
        if let Some((carried, wrong)) = unless_failed(warm(), &mut row.problem)? {
            row.carried = carried;
            row.problem = wrong;
        }
    }
    let mut failed: Vec<bool> = vec![false; cases.len()];
    for round in 1..=rounds {
        for ((case, row), failed) in cases.iter_mut().zip(&mut rows).zip(&mut failed).filter(|(_, failed)| !**failed) {
            stop::check_stop()?;
            tell(&format!("{round}/{rounds}  {}  {}", case.name.group, case.name.label));
            match unless_failed((case.take)(), &mut row.problem)? {
                Some(sample) => row.samples.push(sample),
                None => *failed = true,
            }
        }
    }
    let done = rows.clone();
    for (case, row) in cases.iter().zip(&mut rows) {
        row.ratios = case.ceilings.iter().filter_map(|ceiling| ceiling_ratio(case, row, ceiling, &done)).collect();
    }
    Ok(rows)
}

/// The result; the reason of a failure becomes the problem of a row.
fn unless_failed<T>(done: Result<T>, problem: &mut Option<String>) -> Result<Option<T>> {
    match done {
        Ok(value) => Ok(Some(value)),
        Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
        Err(e) => {
            *problem = Some(e.to_string());
            Ok(None)
        }
    }
}

fn empty_row(case: &BenchCase<'_>) -> ResultRow {
    ResultRow {
        name: case.name.clone(),
        samples: Vec::new(),
        ratios: Vec::new(),
        carried: CounterValues::new(),
        problem: None,
    }
}

fn ceiling_ratio(
    case: &BenchCase<'_>,
    row: &ResultRow,
    ceiling: &CeilingSpec,
    all: &[ResultRow],
) -> Option<CeilingRatio> {
    let better = |of: f64, than: f64| if row.name.unit == FigureUnit::Time { than / of } else { of / than };
    let ids: Vec<String> = ceiling.variants.iter().map(|variant| format!("{}/{variant}", row.name.group)).collect();
    let measured: Vec<&ResultRow> =
        all.iter().filter(|other| ids.contains(&other.name.id) && !other.samples.is_empty()).collect();
    if row.samples.is_empty() || (ceiling.in_turn && measured.len() != ids.len()) {
        return None;
    }
    // The best ceiling is that with the lowest ratio.
    let best = measured.iter().min_by(|a, b| better(1.0, a.median()).total_cmp(&better(1.0, b.median())))?;
    let parts = if ceiling.in_turn { &measured[..] } else { std::slice::from_ref(best) };
    let paired: Vec<f64> = (0..parts.iter().map(|part| part.samples.len()).min()?.min(row.samples.len()))
        .map(|i| better(row.samples[i].value, rate_in_turn(parts.iter().map(|part| part.samples[i].value))))
        .collect();
    Some(CeilingRatio {
        name: ceiling.name,
        id: parts.iter().map(|part| part.name.id.as_str()).collect::<Vec<_>>().join(" + "),
        value: better(row.median(), rate_in_turn(parts.iter().map(|part| part.median()))),
        spread: spread(&paired),
        floor: match ceiling.floor {
            CeilingFloor::None => None,
            CeilingFloor::OfLoad => Some(case.floor),
            CeilingFloor::At(floor) => Some(floor),
        },
    })
}

/// The rate of work that each of these rates does whole, in turn; a single value stays.
fn rate_in_turn(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    if let [value] = values[..] { value } else { 1.0 / values.iter().map(|v| 1.0 / v).sum::<f64>() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn sample(value: f64) -> CaseSample {
        CaseSample { value, bytes: 1 << 30, ops: 1024, cpu: vec![("mount", 0.2)], latency_us: Some((1.0, 9.0)) }
    }

    #[test]
    fn turns_medians_and_ratios() {
        let order = RefCell::new(Vec::new());
        let take = |name: &'static str, values: [f64; 3]| {
            let order = &order;
            let mut next = values.into_iter();
            move || {
                order.borrow_mut().push(name);
                Ok(sample(next.next().unwrap()))
            }
        };
        let cases = vec![
            BenchCase::new("g", "dev", "null dev", FigureUnit::Bandwidth, take("dev", [10.0, 20.0, 30.0])),
            BenchCase::new("g", "uring", "null uring", FigureUnit::Bandwidth, take("uring", [40.0, 10.0, 50.0])),
            BenchCase::new("g", "own", "mount", FigureUnit::Bandwidth, take("own", [32.0, 40.0, 36.0]))
                .against("null", &["dev", "uring", "absent"], Some(0.9))
                .against("other", &["absent"], Some(0.5))
                .below(&[
                    in_turn("both in turn", &["dev", "uring"], CeilingFloor::None),
                    in_turn("one of them is absent", &["dev", "absent"], CeilingFloor::OfLoad),
                ]),
        ];
        let rows = run_rounds(cases, 3, |_| ()).unwrap();
        assert_eq!(*order.borrow(), ["dev", "uring", "own"].repeat(3));
        let own = &rows[2];
        assert_eq!((own.median(), own.spread()), (36.0, (32.0, 40.0)));
        assert_eq!(own.ratios.len(), 2);
        // 20 and 40 in series are 13.3.
        assert!((own.ratios[1].value - 2.7).abs() < 1e-9 && own.ratios[1].is_met().is_none());
        let ratio = &own.ratios[0];
        assert_eq!((ratio.id.as_str(), ratio.value, ratio.is_met()), ("g/uring", 0.9, Some(true)));
        assert_eq!(ratio.spread, (0.72, 4.0));
        assert_eq!(own.is_met(), Some(true));
        assert_eq!(rows[0].is_met(), None);
        assert_eq!(own.cpu_per_gib()["mount"], 0.2);
        let json = own.to_json();
        assert_eq!(
            (&json["median"], &json["p99_us"], &json["ratios"][0]["met"]),
            (&36.0.into(), &9.0.into(), &true.into())
        );
    }

    #[test]
    fn less_time_is_better() {
        let cases = vec![
            BenchCase::new("g", "plain", "plain", FigureUnit::Time, || Ok(sample(2.0))),
            BenchCase::new("g", "slow", "slow", FigureUnit::Time, || Ok(sample(1.0))).against(
                "plain",
                &["plain"],
                Some(1.0),
            ),
            BenchCase::new("g", "own", "own", FigureUnit::Time, || Ok(sample(4.0))).against(
                "plain",
                &["plain", "slow"],
                Some(0.5),
            ),
        ];
        let rows = run_rounds(cases, 1, |_| ()).unwrap();
        assert_eq!(rows[1].ratios[0].value, 2.0);
        assert_eq!((rows[2].ratios[0].value, rows[2].is_met()), (0.25, Some(false)));
    }

    #[test]
    fn a_failing_case_does_not_take_the_others_along() {
        let cases = vec![
            BenchCase::new("g", "bad", "bad", FigureUnit::Rate, || Err(BenchError::Failed("broke".into()))),
            BenchCase::new("g", "odd", "odd", FigureUnit::Rate, || Ok(sample(1.0)))
                .warm(|| Ok((CounterValues::new(), Some("the wrong way".into())))),
            BenchCase::new("g", "good", "good", FigureUnit::Rate, || Ok(sample(1.0))).against(
                "bad",
                &["bad"],
                Some(1.0),
            ),
        ];
        let rows = run_rounds(cases, 2, |_| ()).unwrap();
        assert_eq!((rows[0].samples.len(), rows[0].problem.as_deref()), (0, Some("broke")));
        assert_eq!((rows[1].samples.len(), rows[1].problem.as_deref()), (2, Some("the wrong way")));
        assert_eq!((rows[2].samples.len(), rows[2].ratios.len()), (2, 0));
        let stopped = vec![BenchCase::new("g", "x", "x", FigureUnit::Rate, || Err(BenchError::Interrupted))];
        assert_eq!(run_rounds(stopped, 1, |_| ()).unwrap_err(), BenchError::Interrupted);
    }
}
