//! Rows as tables: for a terminal, as Markdown, as an HTML page with bars. It knows only the rows of a measurement.

use crate::measure::{FigureUnit, ResultRow};
use crate::numbers::{short_count, three_digits};
use crate::plot::{BenchChart, ChartSeries};
use anstyle::{AnsiColor, Style};
use std::fmt::Write as _;

/// The result of a section.
#[derive(Debug, Clone)]
pub struct SuiteSection {
    /// Its name, as `--only` takes it.
    pub name: &'static str,
    /// What it measures, one sentence.
    pub title: &'static str,
    /// Why it was skipped.
    pub skipped: Option<String>,
    /// Remarks on the run.
    pub notes: Vec<String>,
    /// Its figures.
    pub rows: Vec<ResultRow>,
}

const RED: Style = AnsiColor::Red.on_default().bold();
const GREEN: Style = AnsiColor::Green.on_default();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();

/// The meaning of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CellMood {
    Plain,
    Good,
    Bad,
    Dim,
}

type TableCell = (String, CellMood);

const HEADS: [&str; 7] = ["", "median", "min – max", "CPU-s/GiB", "p50 / p99", "of its ceiling", "floor"];

/// A value with its unit.
pub fn show_value(unit: FigureUnit, value: f64) -> String {
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

fn row_cells(row: &ResultRow) -> Vec<TableCell> {
    let plain = |text: String| (text, CellMood::Plain);
    let mut out = vec![plain(row.label.clone())];
    if row.samples.is_empty() {
        let why = row.problem.clone().unwrap_or_else(|| "not measured".into());
        out.push((why, CellMood::Bad));
        return out;
    }
    let (min, max) = row.spread();
    out.push(plain(show_value(row.unit, row.median())));
    out.push((format!("{} – {}", show_value(row.unit, min), show_value(row.unit, max)), CellMood::Dim));
    let cpu: Vec<String> = row.cpu_per_gib().iter().map(|(role, s)| format!("{role} {}", three_digits(*s))).collect();
    out.push((cpu.join(", "), if row.limits.iter().any(|l| l.1 > l.2) { CellMood::Bad } else { CellMood::Plain }));
    out.push(plain(row.latency_us().map(|(a, b)| format!("{} / {}", time_us(a), time_us(b))).unwrap_or_default()));
    let ratios: Vec<String> = row.ratios.iter().map(|r| format!("{:.2} {}", r.value, r.name)).collect();
    let judged = |met: Option<bool>| match met {
        Some(true) => CellMood::Good,
        Some(false) => CellMood::Bad,
        None => CellMood::Plain,
    };
    let ratio_met = row.ratios.iter().filter_map(crate::measure::CeilingRatio::is_met).reduce(|a, b| a && b);
    out.push((ratios.join(", "), judged(ratio_met)));
    let mut floors: Vec<String> = row.ratios.iter().filter_map(|r| r.floor).map(|f| format!("{f:.2}")).collect();
    floors.extend(row.limits.iter().map(|(role, used, most)| format!("{role} {used:.3} ≤ {most:.2}/GB")));
    out.push((floors.join(", "), judged(row.is_met())));
    out
}

fn text_width(text: &str) -> usize {
    text.chars().count()
}

fn group_rows(rows: &[ResultRow]) -> Vec<(&str, Vec<&ResultRow>)> {
    let mut groups: Vec<(&str, Vec<&ResultRow>)> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|(name, _)| *name == row.group) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((&row.group, vec![row])),
        }
    }
    groups
}

/// A table for a terminal; the stream removes colours where they are not supported.
pub fn to_terminal(section: &SuiteSection) -> String {
    let mut out = format!("\n{BOLD}{}{BOLD:#}  {DIM}{}{DIM:#}\n", section.name, section.title);
    if let Some(why) = &section.skipped {
        let _ = writeln!(out, "  {YELLOW}SKIP{YELLOW:#}: {why}");
    }
    let mut widths: Vec<usize> = HEADS.iter().map(|h| text_width(h)).collect();
    for row in section.rows.iter().filter(|r| !r.samples.is_empty()) {
        for (w, cell) in widths.iter_mut().zip(row_cells(row)) {
            *w = (*w).max(text_width(&cell.0));
        }
    }
    for (group, _) in group_rows(&section.rows) {
        widths[0] = widths[0].max(text_width(group).saturating_sub(2));
    }
    for (group, rows) in group_rows(&section.rows) {
        let mut line = format!("  {BOLD}{group:<first$}{BOLD:#}", first = widths[0] + 2);
        for (head, w) in HEADS.iter().zip(&widths).skip(1) {
            let _ = write!(line, "  {DIM}{head:<w$}{DIM:#}");
        }
        let _ = writeln!(out, "{}", line.trim_end());
        for row in rows {
            let mut line = String::from("    ");
            for (i, ((text, mood), w)) in row_cells(row).into_iter().zip(&widths).enumerate() {
                let style = match mood {
                    CellMood::Plain => Style::new(),
                    CellMood::Good => GREEN,
                    CellMood::Bad => RED,
                    CellMood::Dim => DIM,
                };
                let pad = w.saturating_sub(text_width(&text));
                let gap = if i == 0 { "" } else { "  " };
                let _ = write!(line, "{gap}{style}{text}{style:#}{:pad$}", "");
            }
            let _ = writeln!(out, "{}", line.trim_end());
            if let (false, Some(why)) = (row.samples.is_empty(), &row.problem) {
                let _ = writeln!(out, "      {RED}! {why}{RED:#}");
            }
        }
    }
    for note in &section.notes {
        let _ = writeln!(out, "  {DIM}{note}{DIM:#}");
    }
    out
}

/// A chart with a bar per row for each group that was measured.
pub fn to_charts(section: &SuiteSection) -> Vec<BenchChart> {
    let chart = |(group, rows): (&str, Vec<&ResultRow>)| {
        let measured: Vec<&ResultRow> = rows.into_iter().filter(|row| !row.samples.is_empty()).collect();
        let (scale, y) = match measured.first()?.unit {
            FigureUnit::Bandwidth => (1e-9, "GB/s"),
            FigureUnit::Rate => (1.0, "1/s"),
            FigureUnit::Time => (1.0, "s"),
        };
        let bar = |row: &&ResultRow| ChartSeries { name: row.label.clone(), points: vec![(0.0, row.median() * scale)] };
        let series = measured.iter().map(bar).collect();
        let title = format!("{}: {group}", section.name);
        Some(BenchChart { title, x: String::new(), y: y.to_owned(), mark: None, series })
    };
    group_rows(&section.rows).into_iter().filter_map(chart).collect()
}

/// A table in Markdown.
pub fn to_markdown(section: &SuiteSection) -> String {
    let mut out = format!("### {}\n\n{}\n\n", section.name, section.title);
    if let Some(why) = &section.skipped {
        let _ = writeln!(out, "Skipped: {why}\n");
    }
    if !section.rows.is_empty() {
        let _ = writeln!(out, "| {} |\n|{}", HEADS.join(" | "), "---|".repeat(HEADS.len()));
    }
    for (group, rows) in group_rows(&section.rows) {
        let _ = writeln!(out, "| **{group}** |{}", " |".repeat(HEADS.len() - 1));
        for row in rows {
            let mut line = String::from("|");
            let cells = row_cells(row);
            let count = cells.len();
            for (i, (text, mood)) in cells.into_iter().enumerate() {
                let text = text.replace('|', "\\|").replace('\n', " ");
                let _ = match mood {
                    // Marks the judged cell, once per row.
                    CellMood::Bad if i + 1 == count => write!(line, " **{text}** (below) |"),
                    _ => write!(line, " {text} |"),
                };
            }
            line.push_str(&" |".repeat(HEADS.len() - count));
            let _ = writeln!(out, "{line}");
        }
    }
    for note in &section.notes {
        let _ = writeln!(out, "\n{note}");
    }
    out.push('\n');
    out
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A self-contained page with a bar per row, without scripts.
pub fn to_html(machine: &str, sections: &[SuiteSection]) -> String {
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>Spurline bench</title>\n<style>\n\
body{font:14px/1.4 system-ui,sans-serif;margin:2em auto;max-width:76em;color:#222;background:#fff}\n\
h2{margin:1.6em 0 .2em}p{margin:.2em 0;color:#555}svg{display:block;margin:.4em 0}text{font:12px system-ui,sans-serif}\n\
.g{font-weight:600}.d{fill:#666}.bad{fill:#b3261e;font-weight:600}.ok{fill:#1b6e3a}\n</style>\n<h1>Spurline bench</h1>\n",
    );
    let _ = writeln!(out, "<p>{}</p>", escape_html(machine));
    out.push_str(
        "<p>Bars are medians, lines reach from the smallest to the largest round. Grey: ceilings. Blue: no floor. \
Green: at its floor or above. Red: below.</p>\n",
    );
    for section in sections {
        let _ = writeln!(out, "<h2>{}</h2><p>{}</p>", escape_html(section.name), escape_html(section.title));
        if let Some(why) = &section.skipped {
            let _ = writeln!(out, "<p>Skipped: {}</p>", escape_html(why));
        }
        for (group, rows) in group_rows(&section.rows) {
            bar_chart(&mut out, group, &rows, &section.rows);
        }
        for note in &section.notes {
            let _ = writeln!(out, "<p>{}</p>", escape_html(note));
        }
    }
    out.push_str("</html>\n");
    out
}

fn bar_chart(out: &mut String, group: &str, rows: &[&ResultRow], all: &[ResultRow]) {
    const LABEL: f64 = 260.0;
    const BAR: f64 = 420.0;
    const LINE: f64 = 20.0;
    let most = rows.iter().map(|r| r.spread().1).fold(f64::MIN_POSITIVE, f64::max);
    let height = LINE * (rows.len() as f64 + 1.2);
    let _ =
        writeln!(out, "<svg width=\"1120\" height=\"{height:.0}\" role=\"img\" aria-label=\"{}\">", escape_html(group));
    let _ = writeln!(out, "<text class=\"g\" x=\"0\" y=\"14\">{}</text>", escape_html(group));
    for (i, row) in rows.iter().enumerate() {
        let y = LINE * (i as f64 + 1.0);
        let base = y + 14.0;
        let _ = writeln!(out, "<text x=\"12\" y=\"{base:.0}\">{}</text>", escape_html(&row.label));
        if row.samples.is_empty() {
            let why = row.problem.as_deref().unwrap_or("not measured");
            let _ = writeln!(out, "<text class=\"bad\" x=\"{LABEL}\" y=\"{base:.0}\">{}</text>", escape_html(why));
            continue;
        }
        let is_ceiling = row.ratios.is_empty() && all.iter().any(|r| r.ratios.iter().any(|x| x.id == row.id));
        let colour = match (row.is_met(), is_ceiling) {
            (Some(true), _) => "#3f9d63",
            (Some(false), _) => "#cf4b40",
            (None, true) => "#b8bcc2",
            (None, false) => "#6b9bd1",
        };
        let scale = |v: f64| v / most * BAR;
        let (low, high) = row.spread();
        let _ = writeln!(
            out,
            "<rect x=\"{LABEL}\" y=\"{:.0}\" width=\"{:.1}\" height=\"13\" fill=\"{colour}\"/>\
<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#222\"/>",
            y + 3.0,
            scale(row.median()),
            LABEL + scale(low),
            LABEL + scale(high),
            y + 9.5,
            y + 9.5,
        );
        let cells = row_cells(row);
        let class = match row.is_met() {
            Some(true) => "ok",
            Some(false) => "bad",
            None => "d",
        };
        let text = |i: usize| cells.get(i).map_or("", |c| c.0.as_str());
        let _ = writeln!(
            out,
            "<text x=\"{:.0}\" y=\"{base:.0}\">{} <tspan class=\"{class}\">{}</tspan> <tspan class=\"d\">{}</tspan></text>",
            LABEL + BAR + 12.0,
            escape_html(text(1)),
            escape_html(text(5)),
            escape_html(text(3)),
        );
    }
    out.push_str("</svg>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{CaseSample, CeilingRatio};

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
            id: format!("{group}/{label}"),
            group: group.into(),
            label: label.into(),
            unit: FigureUnit::Bandwidth,
            samples: vec![sample],
            ratios: ratios.into_iter().collect(),
            limits: Vec::new(),
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
    fn terminal_tables() {
        let text = anstream::adapter::strip_str(&to_terminal(&section())).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "local  Hot reads.");
        assert!(lines[2].contains("1 MiB") && lines[2].contains("median") && lines[2].contains("CPU-s/GiB"), "{text}");
        assert!(lines[3].contains("4.40 GB/s") && lines[3].contains("mount 0.150, reader 0.040"), "{text}");
        assert!(lines[4].contains("0.95 null") && lines[4].contains("220 µs / 1.50 ms"), "{text}");
        let column = |line: &str, what: &str| line.find(what).map(|at| line[..at].chars().count());
        assert_eq!(column(lines[3], "4.40"), column(lines[4], "4.20"));
        assert_eq!(column(lines[2], "median"), column(lines[4], "4.20"));
        assert!(lines[6].contains("no <disk>"));
        let red = format!("{RED}0.50 null");
        assert!(to_terminal(&section()).contains(&red));
    }

    #[test]
    fn markdown_tables() {
        let text = to_markdown(&section());
        let rows: Vec<&str> = text.lines().filter(|l| l.starts_with('|')).collect();
        let bars = |l: &str| l.replace("\\|", "").matches('|').count();
        assert!(rows.iter().all(|l| bars(l) == HEADS.len() + 1), "{text}");
        assert!(text.contains("**0.90** (below)") && text.contains("no <disk> \\| here"), "{text}");
        let skipped = SuiteSection { skipped: Some("no fio".into()), rows: Vec::new(), ..section() };
        assert!(to_markdown(&skipped).contains("Skipped: no fio"));
        assert!(to_terminal(&skipped).contains("no fio"));
    }

    #[test]
    fn pages() {
        let text = to_html("a machine <x>", &[section()]);
        assert!(text.contains("a machine &lt;x&gt;") && text.contains("no &lt;disk&gt;"));
        assert_eq!(text.matches("<rect").count(), 3);
        assert!(text.contains("#3f9d63") && text.contains("#cf4b40") && text.contains("#b8bcc2"));
        assert!(!text.contains("http"));
    }

    #[test]
    fn charts_have_the_measured_rows() {
        let charts = to_charts(&section());
        assert_eq!((charts.len(), charts[0].title.as_str(), charts[0].y.as_str()), (1, "local: 1 MiB", "GB/s"));
        let bars: Vec<(&str, f64)> =
            charts[0].series.iter().map(|bar| (bar.name.as_str(), (bar.points[0].1 * 10.0).round() / 10.0)).collect();
        assert_eq!(bars, [("null", 4.4), ("fast", 4.2), ("slow", 2.2)]);
        assert!(charts[0].to_text(80).contains("null"));
        assert!(to_charts(&SuiteSection { rows: Vec::new(), ..section() }).is_empty());
    }

    #[test]
    fn values() {
        assert_eq!(show_value(FigureUnit::Bandwidth, 5.2e9), "5.20 GB/s");
        assert_eq!(show_value(FigureUnit::Bandwidth, 4.2e7), "42.0 MB/s");
        assert_eq!(show_value(FigureUnit::Rate, 92_000.0), "92.0k/s");
        assert_eq!(show_value(FigureUnit::Time, 0.0421), "42.1 ms");
    }
}
