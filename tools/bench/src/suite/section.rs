//! The result of a section of the suite, and the rows as a table with charts. Knows only the rows of a measurement.

use crate::measure::{FigureUnit, ResultRow};
use crate::numbers::{short_count, three_digits};
use crate::plot::BenchChart;
use crate::report::{CellVerdict, ReportSection, TableCell, TableRow};
use serde_json::{Value, json};

/// The result of a section.
#[derive(Debug, Clone)]
pub struct SuiteSection {
    /// The name for `--only`.
    pub name: &'static str,
    /// The measured quantity, a sentence.
    pub title: &'static str,
    /// Why the section was skipped.
    pub skipped: Option<String>,
    /// Remarks on the run.
    pub notes: Vec<String>,
    pub rows: Vec<ResultRow>,
}

/// The columns behind the first, whose head is the name of a group.
const COLUMN_HEADS: [&str; 6] = ["median", "min – max", "CPU-s/GiB", "p50 / p99", "of its ceiling", "floor"];

impl SuiteSection {
    /// The section as a part of a report.
    pub fn report(&self) -> ReportSection {
        let mut about = vec![self.title.to_owned()];
        about.extend(self.skipped.iter().map(|why| format!("SKIP: {why}")));
        let mut table = Vec::new();
        let mut charts = Vec::new();
        for (group, rows) in group_rows(&self.rows) {
            table.push(TableRow::head([group].into_iter().chain(COLUMN_HEADS)));
            for row in &rows {
                table.push(TableRow::new(row_cells(row)));
                if let (false, Some(why)) = (row.samples.is_empty(), &row.problem) {
                    table.push(TableRow::new(vec![TableCell { text: format!("! {why}"), verdict: CellVerdict::Bad }]));
                }
            }
            charts.extend(bar_chart(format!("{}: {group}", self.name), &rows));
        }
        ReportSection { heading: self.name.to_owned(), about, table, charts, notes: self.notes.clone() }
    }

    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name, "title": self.title, "skipped": self.skipped, "notes": self.notes,
            "rows": self.rows.iter().map(ResultRow::to_json).collect::<Vec<_>>(),
        })
    }
}

fn show_value(unit: FigureUnit, value: f64) -> String {
    match unit {
        FigureUnit::Bandwidth if value < 9.995e7 => format!("{} MB/s", three_digits(value / 1e6)),
        FigureUnit::Bandwidth => format!("{} GB/s", three_digits(value / 1e9)),
        FigureUnit::Rate => format!("{}/s", short_count(value)),
        FigureUnit::Time if value < 1.0 => format!("{} ms", three_digits(value * 1e3)),
        FigureUnit::Time => format!("{} s", three_digits(value)),
    }
}

fn time_us(us: f64) -> String {
    if us < 1000.0 { format!("{} µs", three_digits(us)) } else { format!("{} ms", three_digits(us / 1e3)) }
}

fn verdict(met: Option<bool>) -> CellVerdict {
    match met {
        Some(true) => CellVerdict::Good,
        Some(false) => CellVerdict::Bad,
        None => CellVerdict::Plain,
    }
}

fn row_cells(row: &ResultRow) -> Vec<TableCell> {
    let mut cells = vec![TableCell::plain(row.name.label.clone())];
    if row.samples.is_empty() {
        let text = row.problem.clone().unwrap_or_else(|| "not measured".into()).replace('\n', " ");
        cells.push(TableCell { text, verdict: CellVerdict::Bad });
        return cells;
    }
    let (min, max) = row.spread();
    cells.push(TableCell::plain(show_value(row.name.unit, row.median())));
    let spread = format!("{} – {}", show_value(row.name.unit, min), show_value(row.name.unit, max));
    cells.push(TableCell { text: spread, verdict: CellVerdict::Dim });
    let cpu: Vec<String> = row.cpu_per_gib().iter().map(|(role, s)| format!("{role} {}", three_digits(*s))).collect();
    cells.push(TableCell::plain(cpu.join(", ")));
    let latency = row.latency_us().map(|(p50, p99)| format!("{} / {}", time_us(p50), time_us(p99)));
    cells.push(TableCell::plain(latency.unwrap_or_default()));
    let ratios: Vec<String> = row.ratios.iter().map(|r| format!("{:.2} {}", r.value, r.name)).collect();
    cells.push(TableCell { text: ratios.join(", "), verdict: verdict(row.is_met()) });
    let floors: Vec<String> = row.ratios.iter().filter_map(|r| r.floor).map(|f| format!("{f:.2}")).collect();
    cells.push(TableCell { text: floors.join(", "), verdict: verdict(row.is_met()) });
    cells
}

fn group_rows(rows: &[ResultRow]) -> Vec<(&str, Vec<&ResultRow>)> {
    let mut groups: Vec<(&str, Vec<&ResultRow>)> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|(name, _)| *name == row.name.group) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((&row.name.group, vec![row])),
        }
    }
    groups
}

/// A bar for each row that was measured.
fn bar_chart(title: String, rows: &[&ResultRow]) -> Option<BenchChart> {
    let measured: Vec<&&ResultRow> = rows.iter().filter(|row| !row.samples.is_empty()).collect();
    let (scale, unit) = match measured.first()?.name.unit {
        FigureUnit::Bandwidth => (1e-9, "GB/s"),
        FigureUnit::Rate => (1.0, "1/s"),
        FigureUnit::Time => (1.0, "s"),
    };
    let bars = measured.iter().map(|row| (row.name.label.clone(), row.median() * scale));
    Some(BenchChart::bars(title, unit, bars))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{CaseName, CaseSample, CeilingRatio};
    use anstyle::AnsiColor;

    fn row(label: &str, group: &str, value: f64, ratio: Option<f64>) -> ResultRow {
        let sample = CaseSample {
            value,
            bytes: 1 << 30,
            ops: 1024,
            cpu: vec![("mount", 0.15), ("reader", 0.04)],
            latency_us: Some((220.0, 1500.0)),
        };
        let ratios = ratio.map(|value| CeilingRatio {
            name: "null",
            id: format!("{group}/null"),
            value,
            spread: (value, value),
            floor: Some(0.9),
        });
        ResultRow {
            name: CaseName {
                id: format!("{group}/{label}"),
                group: group.into(),
                label: label.into(),
                unit: FigureUnit::Bandwidth,
            },
            samples: vec![sample],
            ratios: ratios.into_iter().collect(),
            carried: Default::default(),
            problem: None,
        }
    }

    fn section() -> SuiteSection {
        let mut broken = row("broken", "1 MiB", 0.0, None);
        broken.samples.clear();
        broken.problem = Some("no <disk> | here".into());
        let rows = vec![
            row("null", "1 MiB", 4.4e9, None),
            row("fast", "1 MiB", 4.2e9, Some(0.95)),
            row("slow", "1 MiB", 2.2e9, Some(0.5)),
            broken,
        ];
        SuiteSection { name: "local", title: "Hot reads.", skipped: None, notes: vec!["A note.".into()], rows }
    }

    #[test]
    fn a_section_is_a_table_with_charts() {
        let shown = section().report().to_terminal();
        let text = anstream::adapter::strip_str(&shown).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "local  Hot reads.");
        assert!(lines[2].contains("1 MiB") && lines[2].contains("median") && lines[2].contains("CPU-s/GiB"), "{text}");
        assert!(lines[3].contains("4.40 GB/s") && lines[3].contains("mount 0.150, reader 0.040"), "{text}");
        assert!(lines[4].contains("0.95 null") && lines[4].contains("220 µs / 1.50 ms"), "{text}");
        let end = |line: &str, cell: &str| line.find(cell).map(|at| line[..at].chars().count() + cell.chars().count());
        assert_eq!(end(lines[3], "4.40 GB/s"), end(lines[4], "4.20 GB/s"));
        assert_eq!(end(lines[2], "median"), end(lines[4], "4.20 GB/s"));
        assert!(lines[6].contains("no <disk>"));
        let red = AnsiColor::Red.on_default().bold();
        assert!(shown.contains(&format!("{red}0.50 null")) && shown.contains(&format!("{red}0.90")));
        let skipped = SuiteSection { skipped: Some("no fio".into()), rows: Vec::new(), ..section() };
        assert!(skipped.report().to_terminal().contains("SKIP: no fio"));
    }

    #[test]
    fn charts_have_the_measured_rows() {
        let charts = section().report().charts;
        assert_eq!((charts.len(), charts[0].title.as_str(), charts[0].y.as_str()), (1, "local: 1 MiB", "GB/s"));
        let bars: Vec<(&str, f64)> =
            charts[0].series.iter().map(|bar| (bar.name.as_str(), (bar.points[0].1 * 10.0).round() / 10.0)).collect();
        assert_eq!(bars, [("null", 4.4), ("fast", 4.2), ("slow", 2.2)]);
        assert!(charts[0].to_text(80).contains("null"));
        assert!(SuiteSection { rows: Vec::new(), ..section() }.report().charts.is_empty());
    }

    #[test]
    fn values() {
        assert_eq!(show_value(FigureUnit::Bandwidth, 5.2e9), "5.20 GB/s");
        assert_eq!(show_value(FigureUnit::Bandwidth, 4.2e7), "42.0 MB/s");
        assert_eq!(show_value(FigureUnit::Rate, 92_000.0), "92.0k/s");
        assert_eq!(show_value(FigureUnit::Time, 0.0421), "42.1 ms");
    }
}
