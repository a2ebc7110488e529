//! Tables on a terminal: columns as wide as the widest cell, each cell in a colour.

use anstyle::{AnsiColor, Style};
use std::fmt::Write as _;

pub const HEAD: Style = AnsiColor::Yellow.on_default().bold();
pub const GOOD: Style = AnsiColor::Green.on_default();
pub const WARN: Style = AnsiColor::Yellow.on_default();
pub const BAD: Style = AnsiColor::Red.on_default().bold();
pub const DIM: Style = Style::new().dimmed();

/// A text and the style.
pub struct StyledCell {
    text: String,
    style: Style,
}

pub fn styled_cell(text: impl Into<String>, style: Style) -> StyledCell {
    StyledCell { text: text.into(), style }
}

/// Appends the rows to `out`; a column that has only `-` is left out.
pub fn append_table(out: &mut String, rows: &[Vec<StyledCell>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let kept: Vec<(usize, usize)> = (0..columns)
        .filter(|c| rows.iter().skip(1).filter_map(|r| r.get(*c)).any(|cell| cell.text != "-"))
        .map(|c| (c, rows.iter().filter_map(|r| r.get(c)).map(|c| c.text.chars().count()).max().unwrap_or(0)))
        .collect();
    for row in rows {
        let mut line = String::new();
        for (i, (column, width)) in kept.iter().enumerate() {
            let Some(StyledCell { text, style }) = row.get(*column) else { continue };
            // No padding at the end of a line.
            let pad = if i + 1 == kept.len() { 0 } else { width + 2 - text.chars().count() };
            let _ = write!(line, "{style}{text}{style:#}{}", " ".repeat(pad));
        }
        let _ = writeln!(out, "{line}");
    }
}
