//! Prints objects as YAML, and as templates of Helm: strings that are expressions stay unquoted, and blocks surround
//! items. It knows no object.

use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Begins a string that is an expression of Helm, to be printed without quotes.
const RAW: char = '\u{1}';
/// Begins a key that is a block of Helm around its value: `{ "\u{7f}if .Values.a": [items] }`.
/// Behind all letters, so that a block comes after the keys of its map.
const BLOCK: char = '\u{7f}';
/// A map with this one key is printed as the text of the document in it.
const TEXT: &str = "\u{3}";

/// An expression of Helm.
pub(crate) fn expression(text: &str) -> Value {
    Value::String(format!("{RAW}{{{{ {text} }}}}"))
}

/// A block of list items, under a condition or a loop of Helm.
pub(crate) fn block(head: &str, items: Vec<Value>) -> Value {
    let mut map = Map::new();
    map.insert(format!("{BLOCK}{head}"), Value::Array(items));
    Value::Object(map)
}

/// A block of keys, under a condition of Helm: the key and the value to put into a map.
pub(crate) fn key_block(head: &str, keys: Map<String, Value>) -> (String, Value) {
    (format!("{BLOCK}{head}"), Value::Object(keys))
}

/// A document as a text, such as a file in a ConfigMap.
pub(crate) fn text_of(document: Value) -> Value {
    let mut map = Map::new();
    map.insert(TEXT.to_owned(), document);
    Value::Object(map)
}

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
                if let Some(head) = key.strip_prefix(BLOCK) {
                    emit_block(head, value, indent, out);
                    continue;
                }
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

/// A list item that is a block: its head and its items.
fn block_of(item: &Value) -> Option<(&str, &Value)> {
    let map = item.as_object().filter(|map| map.len() == 1)?;
    let (key, items) = map.iter().next()?;
    Some((key.strip_prefix(BLOCK)?, items))
}

fn emit_block(head: &str, body: &Value, indent: usize, out: &mut String) {
    let _ = writeln!(out, "{:indent$}{{{{- {head} }}}}", "");
    emit(body, indent, out);
    let _ = writeln!(out, "{:indent$}{{{{- end }}}}", "");
}

fn emit_item(item: &Value, indent: usize, out: &mut String) {
    if let Some((head, items)) = block_of(item) {
        emit_block(head, items, indent, out);
        return;
    }
    match item {
        Value::Object(map) if !map.is_empty() && !map.contains_key(TEXT) => {
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
        Value::Object(map) if map.contains_key(TEXT) => {
            out.push_str(" |\n");
            emit(&map[TEXT], indent + 2, out);
        }
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

/// Whether a text of several lines can be printed as it is.
fn is_block_text(text: &str) -> bool {
    let plain = text.chars().all(|c| c == '\n' || !c.is_control()) && !text.starts_with([' ', '\n']);
    plain && text.trim_end_matches('\n').contains('\n') && !text.ends_with("\n\n")
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => match text.strip_prefix(RAW) {
            Some(raw) => raw.to_owned(),
            None if is_plain(text) => text.clone(),
            // Every string of JSON is one of YAML.
            None => Value::String(text.clone()).to_string(),
        },
        other => other.to_string(),
    }
}

/// Whether a text needs no quotes: it is no number, no word with a meaning, and has no character with one.
fn is_plain(text: &str) -> bool {
    let first = text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '/');
    let word = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let rest = |c: char| c.is_ascii_alphanumeric() || "/._-=+$()".contains(c);
    let inner = text.strip_suffix(':').is_none() && text.chars().all(|c| rest(c) || c == ':');
    first && inner && !word.iter().any(|w| w.eq_ignore_ascii_case(text))
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

    #[test]
    fn expressions_blocks_and_texts() {
        let document = json!({
            "image": expression(".Values.image"),
            "args": ["a", block("if .Values.x", vec![json!("b"), json!({ "k": expression(".y") })])],
            "file": text_of(json!({ "inner": ["z"] })),
        });
        let wanted = "args:\n  - a\n  {{- if .Values.x }}\n  - b\n  - k: {{ .y }}\n  {{- end }}\n\
                      file: |\n  inner:\n    - z\nimage: {{ .Values.image }}\n";
        assert_eq!(print(&document), wanted);
    }
}
