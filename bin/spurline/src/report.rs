//! Prints errors and warnings: the problem, then the remedy; in colour on a terminal. Text from other processes can't
//! send control sequences to the terminal.

use anstyle::{AnsiColor, Style};
use serde_json::Value;
use spurline_config::Fault;
use std::fmt::Write as _;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::process::ExitCode;

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default().bold();
const GREEN: Style = AnsiColor::Green.on_default().bold();

/// Prints an error and returns the exit code.
pub fn print_fault(fault: &Fault) -> ExitCode {
    anstream::eprintln!("{RED}error{RED:#}: {}", printable_lines(&fault.what));
    if !fault.remedy.is_empty() {
        anstream::eprintln!("  {GREEN}fix{GREEN:#}: {}", printable_lines(&fault.remedy));
    }
    ExitCode::from(fault.code as u8)
}

pub fn print_warnings(warnings: &[String]) {
    for warning in warnings {
        // Also called while logging: a terminal that is gone must not end the thread.
        let _ = writeln!(anstream::stderr(), "{YELLOW}warning{YELLOW:#}: {}", printable_lines(warning));
    }
}

/// Whether the person at the terminal consents to what is about to happen; false without a terminal.
pub fn has_consent(what: &str) -> bool {
    if !std::io::stdin().is_terminal() {
        return false;
    }
    anstream::eprint!("{YELLOW}{}{YELLOW:#}. Go on? [y/N] ", printable_lines(what));
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

/// Prints a line of progress.
pub fn print_note(line: &str) {
    let _ = writeln!(anstream::stderr(), "{}", printable_lines(line));
}

/// A text of this program, in one or more lines, which may contain foreign text.
fn printable_lines(words: &str) -> String {
    words.split('\n').map(|line| printable(line.as_bytes())).collect::<Vec<_>>().join("\n")
}

/// An answer without control characters.
pub fn printable_json(answer: Value) -> Value {
    match answer {
        Value::String(text) => printable(text.as_bytes()).into(),
        Value::Array(many) => many.into_iter().map(printable_json).collect(),
        Value::Object(named) => {
            named.into_iter().map(|(name, value)| (printable(name.as_bytes()), printable_json(value))).collect()
        }
        other => other,
    }
}

/// A name as text: invalid UTF-8 and control characters are escaped.
pub fn printable(name: &[u8]) -> String {
    let mut out = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
        }
        let _ = write!(out, "{}", chunk.invalid().escape_ascii());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_do_not_steer_the_terminal() {
        assert_eq!(printable(b"plain \xc3\xa9"), "plain \u{e9}");
        assert_eq!(printable_json(json!([{"a\u{9b}": "\u{1b}c", "b": 1}])), json!([{"a\\u{9b}": "\\u{1b}c", "b": 1}]));
        assert_eq!(printable_lines("wrong\n\u{7}x"), "wrong\n\\u{7}x");
        assert_eq!(printable(b"\x1b[2J\n\xff"), "\\u{1b}[2J\\n\\xff");
    }
}
