//! How errors and warnings look: what is wrong, then what to do; coloured on a terminal only. And that nothing of what
//! others say steers the terminal.

use anstyle::{AnsiColor, Style};
use serde_json::Value;
use spurline_config::Fault;
use std::fmt::Write as _;
use std::process::ExitCode;

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default().bold();
const GREEN: Style = AnsiColor::Green.on_default().bold();

/// Prints an error and gives its exit code.
pub fn fault(fault: &Fault) -> ExitCode {
    anstream::eprintln!("{RED}error{RED:#}: {}", lines(&fault.what));
    if !fault.remedy.is_empty() {
        anstream::eprintln!("  {GREEN}fix{GREEN:#}: {}", lines(&fault.remedy));
    }
    ExitCode::from(fault.code as u8)
}

/// Prints warnings.
pub fn warnings(warnings: &[String]) {
    for warning in warnings {
        anstream::eprintln!("{YELLOW}warning{YELLOW:#}: {}", lines(warning));
    }
}

/// Words of our own, which may have several lines, with others' in them.
fn lines(words: &str) -> String {
    words.split('\n').map(|line| printable(line.as_bytes())).collect::<Vec<_>>().join("\n")
}

/// An answer as a terminal may show it.
pub fn plain(answer: Value) -> Value {
    match answer {
        Value::String(text) => printable(text.as_bytes()).into(),
        Value::Array(many) => many.into_iter().map(plain).collect(),
        Value::Object(named) => {
            named.into_iter().map(|(name, value)| (printable(name.as_bytes()), plain(value))).collect()
        }
        other => other,
    }
}

/// A name as a terminal may show it: what is no text or would steer the terminal is escaped.
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
        assert_eq!(plain(json!([{"a\u{9b}": "\u{1b}c", "b": 1}])), json!([{"a\\u{9b}": "\\u{1b}c", "b": 1}]));
        assert_eq!(lines("wrong\n\u{7}x"), "wrong\n\\u{7}x");
        assert_eq!(printable(b"\x1b[2J\n\xff"), "\\u{1b}[2J\\n\\xff");
    }
}
