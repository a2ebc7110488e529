//! The forms of a report: tables for a terminal, a page of HTML that needs neither network nor scripts, JSON.
//! Knows no figures.

use crate::error::{BenchError, Result};
use crate::plot::BenchChart;
use anstyle::{AnsiColor, Style};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The page around a report, with `{title}` and `{body}`.
const REPORT_PAGE: &str = include_str!("report.html");

/// The verdict of a cell about the figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellVerdict {
    /// Nothing.
    Plain,
    /// The aim is reached.
    Good,
    /// The aim is not reached, or the figure is missing.
    Bad,
    /// A figure of less interest.
    Dim,
}

impl CellVerdict {
    fn style(self) -> Style {
        match self {
            CellVerdict::Plain => Style::new(),
            CellVerdict::Good => AnsiColor::Green.on_default(),
            CellVerdict::Bad => AnsiColor::Red.on_default().bold(),
            CellVerdict::Dim => Style::new().dimmed(),
        }
    }

    fn html_class(self) -> &'static str {
        match self {
            CellVerdict::Plain => "",
            CellVerdict::Good => " class=\"good\"",
            CellVerdict::Bad => " class=\"bad\"",
            CellVerdict::Dim => " class=\"dim\"",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableCell {
    /// The text, a single line.
    pub text: String,
    /// The verdict of the text.
    pub verdict: CellVerdict,
}

impl TableCell {
    pub fn plain(text: impl Into<String>) -> Self {
        TableCell { text: text.into(), verdict: CellVerdict::Plain }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRow {
    /// Whether the row has the heads of the columns below.
    pub is_head: bool,
    /// The cells. A row that is shorter than the head ends in a remark, which may be wider than the column.
    pub cells: Vec<TableCell>,
}

impl TableRow {
    /// A row of figures.
    pub fn new(cells: Vec<TableCell>) -> Self {
        TableRow { is_head: false, cells }
    }

    /// The names of columns.
    pub fn head(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        TableRow { is_head: true, cells: names.into_iter().map(TableCell::plain).collect() }
    }
}

/// A table with charts and notes.
#[derive(Debug, Clone, Default)]
pub struct ReportSection {
    /// The heading; empty for the only section of a report.
    pub heading: String,
    /// Sentences before the table.
    pub about: Vec<String>,
    pub table: Vec<TableRow>,
    pub charts: Vec<BenchChart>,
    /// Sentences behind everything.
    pub notes: Vec<String>,
}

impl ReportSection {
    /// A report's only section, whose table has the head in the first row.
    pub fn of_table(table: Vec<Vec<String>>, charts: Vec<BenchChart>) -> Self {
        let mut rows = table.into_iter();
        let head = rows.next().map(TableRow::head);
        let rows = rows.map(|row| TableRow::new(row.into_iter().map(TableCell::plain).collect()));
        ReportSection { table: head.into_iter().chain(rows).collect(), charts, ..ReportSection::default() }
    }

    /// For a terminal, without charts; the stream removes unsupported colours.
    pub fn to_terminal(&self) -> String {
        let bold = Style::new().bold();
        let dim = CellVerdict::Dim.style();
        let mut out = format!("\n{bold}{}{bold:#}  {dim}{}{dim:#}\n", self.heading, self.about.join(" "));
        out += &self.table_text();
        for note in &self.notes {
            let _ = writeln!(out, "  {dim}{note}{dim:#}");
        }
        out
    }

    /// The table for a terminal: columns as wide as the widest cell.
    pub fn table_text(&self) -> String {
        let columns = self.table.iter().map(|row| row.cells.len()).max().unwrap_or(0);
        let mut widths = vec![0; columns];
        for row in &self.table {
            let has_remark = row.cells.len() < columns;
            let measured = row.cells.len() - usize::from(has_remark && !row.cells.is_empty());
            for (width, cell) in widths.iter_mut().zip(&row.cells[..measured]) {
                *width = cell.width().max(*width);
            }
        }
        let mut out = String::new();
        for row in &self.table {
            let mut line = String::new();
            for (column, (cell, width)) in row.cells.iter().zip(&widths).enumerate() {
                let style = match (row.is_head, column) {
                    (true, 0) => Style::new().bold(),
                    (true, _) => CellVerdict::Dim.style(),
                    (false, _) => cell.verdict.style(),
                };
                let is_remark = column + 1 == row.cells.len() && row.cells.len() < columns;
                let gap = if is_remark { 0 } else { width.saturating_sub(cell.width()) };
                let (before, after) = if column == 0 { (0, gap) } else { (gap, 0) };
                let _ = write!(line, "  {:before$}{style}{}{style:#}{:after$}", "", cell.text, "");
            }
            let _ = writeln!(out, "{}", line.trim_end());
        }
        out
    }

    fn to_html(&self) -> String {
        let mut out = String::new();
        if !self.heading.is_empty() {
            let _ = writeln!(out, "<h2>{}</h2>", escape_html(&self.heading));
        }
        self.about.iter().for_each(|line| out += &format!("<p>{}</p>\n", escape_html(line)));
        let columns = self.table.iter().map(|row| row.cells.len()).max().unwrap_or(0);
        out.push_str("<table>\n");
        for row in &self.table {
            let tag = if row.is_head { "th" } else { "td" };
            out.push_str("<tr>");
            for (column, cell) in row.cells.iter().enumerate() {
                let rest = if column + 1 == row.cells.len() { columns - column } else { 1 };
                let span = if rest > 1 { format!(" colspan=\"{rest}\"") } else { String::new() };
                let _ = write!(out, "<{tag}{span}{}>{}</{tag}>", cell.verdict.html_class(), escape_html(&cell.text));
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</table>\n");
        self.charts.iter().for_each(|chart| out += &chart.to_svg());
        self.notes.iter().for_each(|note| out += &format!("<p>{}</p>\n", escape_html(note)));
        out
    }
}

pub fn page(title: &str, sections: &[ReportSection]) -> String {
    let body: String = sections.iter().map(ReportSection::to_html).collect();
    REPORT_PAGE.replace("{title}", &escape_html(title)).replacen("{body}", &body, 1)
}

/// Text for HTML and SVG.
pub fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Forms of a report beside the table.
#[derive(Debug, clap::Args)]
pub struct ReportOutputs {
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with plots, which needs no network
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Plot on the terminal
    #[arg(long)]
    pub plot: bool,
}

impl ReportOutputs {
    /// Checks that the requested files have a folder, before anything is measured.
    /// `Missing` for a file without a directory.
    pub fn check_places(&self) -> Result<()> {
        check_report_place("--json", self.json.as_deref())?;
        check_report_place("--html", self.html.as_deref())
    }

    /// Plots on the terminal, where that was requested.
    pub fn plot_charts(&self, section: &ReportSection) {
        if self.plot {
            section.charts.iter().for_each(|chart| anstream::print!("{}", chart.to_text(100)));
        }
    }

    /// Writes the requested files, and prints the names.
    pub fn write_reports(&self, result: &Value, title: &str, sections: &[ReportSection]) -> Result<()> {
        write_report(self.json.as_deref(), || format!("{result:#}\n"))?;
        write_report(self.html.as_deref(), || page(title, sections))
    }
}

/// The report of a command: the table and charts of all that was compared, between sentences.
pub struct CommandReport<'a> {
    /// The forms that were requested.
    pub outputs: &'a ReportOutputs,
    pub command: &'static str,
    /// Sentences before the table, which are printed already.
    pub about: Vec<String>,
    /// The table, with the head in the first row.
    pub table: Vec<Vec<String>>,
    pub charts: Vec<BenchChart>,
    /// Sentences of the result.
    pub scores: Vec<String>,
    pub notes: Vec<String>,
    pub result: Value,
}

impl CommandReport<'_> {
    /// Prints the table and the sentences, and writes the requested files; the JSON also gets the names of this program and of the
    /// format, the machine and the remarks.
    pub fn finish(mut self, machine: Value) -> Result<()> {
        let mut section = ReportSection::of_table(self.table, self.charts);
        anstream::print!("\n{}", section.table_text());
        self.outputs.plot_charts(&section);
        self.scores.iter().chain(&self.notes).for_each(|line| anstream::println!("{line}"));
        self.result["schema"] = format!("spurline-bench-{}/1", self.command).into();
        self.result["spurline"] = env!("CARGO_PKG_VERSION").into();
        self.result["machine"] = machine;
        self.result["notes"] = self.notes.clone().into();
        section.about = self.about;
        section.about.extend(self.scores);
        section.notes = self.notes;
        self.outputs.write_reports(&self.result, &format!("Spurline bench {}", self.command), &[section])
    }
}

/// Writes a report and prints the name of the file, where a path is given.
pub fn write_report(path: Option<&Path>, text: impl FnOnce() -> String) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, text()).map_err(|e| BenchError::io(path.display(), &e))?;
    anstream::println!("written: {}", path.display());
    Ok(())
}

/// Checks that the file of a flag has a folder, where the flag is given.
/// `Missing` without the folder.
pub fn check_report_place(flag: &str, path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if folder.is_dir() && !path.is_dir() {
        return Ok(());
    }
    Err(BenchError::Missing(if path.is_dir() {
        format!("{flag} {}: this is a folder; name a file", path.display())
    } else {
        format!("{flag} {}: there is no folder {}; make it, or name another file", path.display(), folder.display())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section() -> ReportSection {
        let cells = |texts: &[&str]| TableRow::new(texts.iter().copied().map(TableCell::plain).collect());
        let mut low = cells(&["low", "0.5"]);
        low.cells[1].verdict = CellVerdict::Bad;
        ReportSection {
            heading: "Parts".into(),
            about: vec!["A & B".into()],
            table: vec![
                TableRow::head(["1 MiB", "ratio"]),
                cells(&["fast", "10.5"]),
                low,
                cells(&["no <disk> | here"]),
            ],
            notes: vec!["note".into()],
            ..ReportSection::default()
        }
    }

    #[test]
    fn a_page_needs_no_network_and_escapes_its_words() {
        let text = page("A & B", &[section()]);
        assert!(text.contains("<h1>A &amp; B</h1>") && text.contains("<p>A &amp; B</p>"), "{text}");
        assert!(
            text.contains("<td colspan=\"2\">no &lt;disk&gt; | here</td>") && text.contains("<th>ratio</th>"),
            "{text}"
        );
        assert!(text.contains("<td class=\"bad\">0.5</td>") && text.ends_with("<p>note</p>\n</html>\n"), "{text}");
        assert!(!text.contains("http") && !text.contains("<script") && !text.contains("{title}"), "{text}");
    }

    #[test]
    fn tables_of_a_terminal_have_columns() {
        let text = section().to_terminal();
        assert!(text.contains(&format!("{:#}", CellVerdict::Bad.style())), "the verdict has a colour");
        let plain = anstream::adapter::strip_str(&text).to_string();
        assert_eq!(
            plain,
            "\nParts  A & B\n  1 MiB  ratio\n  fast    10.5\n  low      0.5\n  no <disk> | here\n  note\n"
        );
    }

    #[test]
    fn a_report_needs_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let said = |path: &Path| check_report_place("--json", Some(path)).map_err(|error| error.to_string());
        assert_eq!(said(&dir.path().join("r.json")), Ok(()));
        assert_eq!(said(Path::new("r.json")), Ok(()));
        assert!(check_report_place("--json", None).is_ok());
        assert!(said(&dir.path().join("no/r.json")).unwrap_err().contains("there is no folder"));
        assert!(said(dir.path()).unwrap_err().contains("name a file"));
        assert!(!dir.path().join("no").exists());
    }
}
