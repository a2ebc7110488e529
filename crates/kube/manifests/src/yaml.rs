//! Prints objects as YAML, with keys in alphabetical order. Knows no object.

use serde_json::Value;
use std::fmt::Write as _;

/// Prints a document.
pub(crate) fn print(value: &Value) -> String {
    let mut out = String::new();
    emit(value, 0, &mut out);
    out
}

/// Prints a map or a list as lines at `indent`.
fn emit(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let _ = write!(out, "{:indent$}{}:", "", scalar(&Value::String(key.clone())));
                emit_after_key(value, indent, out);
            }
        }
        Value::Array(items) => {
            for item in items {
                emit_item(item, indent, out);
            }
        }
        other => {
            let _ = writeln!(out, "{:indent$}{}", "", scalar(other));
        }
    }
}

fn emit_item(item: &Value, indent: usize, out: &mut String) {
    match item {
        Value::Object(map) if !map.is_empty() => {
            let mut lines = String::new();
            emit(item, indent + 2, &mut lines);
            let _ = write!(out, "{:indent$}- {}", "", lines.trim_start());
        }
        _ => {
            let _ = writeln!(out, "{:indent$}- {}", "", scalar(item));
        }
    }
}

fn emit_after_key(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push('\n');
            emit(value, indent + 2, out);
        }
        Value::Array(items) if !items.is_empty() => {
            out.push('\n');
            emit(value, indent + 2, out);
        }
        // Files stay readable.
        Value::String(text) if is_block_text(text) => {
            out.push_str(if text.ends_with('\n') { " |\n" } else { " |-\n" });
            for line in text.lines() {
                let _ = writeln!(out, "{:indent$}  {line}", "");
            }
        }
        other => {
            let _ = writeln!(out, " {}", scalar(other));
        }
    }
}

/// Whether a text of several lines can be printed unchanged.
fn is_block_text(text: &str) -> bool {
    let plain = text.chars().all(|c| c == '\n' || !c.is_control()) && !text.starts_with([' ', '\n']);
    plain && text.trim_end_matches('\n').contains('\n') && !text.ends_with("\n\n")
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        // Every string of JSON is a string of YAML.
        other => other.to_string(),
    }
}

/// Whether a text needs no quotes: no number, no word with a meaning, and no character with a meaning.
fn is_plain(text: &str) -> bool {
    let first = text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '/');
    let word = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let inner = text.strip_suffix(':').is_none() && text.chars().all(|c| is_plain_rest(c) || c == ':');
    first && inner && !word.iter().any(|w| w.eq_ignore_ascii_case(text))
}

fn is_plain_rest(c: char) -> bool {
    c.is_ascii_alphanumeric() || "/._-=+$()".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn documents_are_printed_and_read_back() {
        let document = json!({
            "a": { "b": [1, "two", { "c": "d: e", "f": [] }, {}, true], "empty": "" },
            "strings": ["yes", "1.5", "-x", "a:b", "tail:", "quote \" and \\", "line\nbreak", "é", "{{ x }}", "~", "#"],
            "none": null, "http://x": "/a/b.c-d=e",
        });
        let text = print(&document);
        let read: Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(read, document, "{text}");
    }
}
