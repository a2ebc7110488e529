//! The messages that TROUBLESHOOTING.md quotes exist in the source.

use regex::Regex;
use spurline_tidy::{root, texts};
use std::collections::BTreeSet;

/// Quotes of other programs, and names that are no messages: columns of `stats`, commands.
const NOT_OURS: &[&str] = &[
    "Address already in use",
    "Cannot allocate memory",
    "Failed to modify",
    "Failed to stat",
    "Input/output error",
    "Insufficient rdma/ib",
    "No locks available",
    "No such file or directory",
    "Read-only file system",
    "Stale file handle",
    "blockcache hit%",
    "dd iflag=direct",
    "fuse lat",
    "load --verify",
    "object lat",
    "remotecache recv",
    "ss -tnp",
    "stats --json",
    "usage buf",
];

/// The fewest words of a part that says something by itself; a shorter quote is compared by its longest part.
const WORDS_OF_A_PART: usize = 3;

/// Whether a word of a quote stands for a value: an omission, a number, a name in capitals or in quotation marks.
fn is_value(word: &str) -> bool {
    let letters: Vec<char> = word.chars().filter(|c| c.is_alphabetic()).collect();
    word.contains('…')
        || word.starts_with('\'')
        || word.contains(|c: char| c.is_ascii_digit())
        || (!letters.is_empty() && letters.iter().all(|c| c.is_uppercase()))
}

/// The parts of a quote between values and punctuation.
fn parts_of(quote: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for word in quote.split_whitespace() {
        if is_value(word) || word.starts_with('(') {
            parts.push(String::new());
        }
        if is_value(word) {
            continue;
        }
        let plain = word.trim_matches(['.', ',', ';', ':', '(', ')', '?']);
        if let Some(part) = parts.last_mut() {
            part.push_str(if part.is_empty() { "" } else { " " });
            part.push_str(plain);
        }
        if word.ends_with(['.', ',', ';', ':', '(', ')', '?']) {
            parts.push(String::new());
        }
    }
    parts.retain(|part| !part.is_empty());
    let long: Vec<String> = parts.iter().filter(|part| part.split(' ').count() >= WORDS_OF_A_PART).cloned().collect();
    if long.is_empty() { parts.into_iter().max_by_key(String::len).into_iter().collect() } else { long }
}

/// The quotes of the document, with their lines: code in the first cell of a table's row, or at the start of a paragraph.
fn quotes_of(document: &str) -> Vec<(usize, String)> {
    let code = Regex::new("`([^`]+)`").expect("a valid pattern");
    let mut quotes = Vec::new();
    for (number, line) in document.lines().enumerate() {
        let (place, most) = match line.strip_prefix("| ") {
            Some(row) => (row.split(" | ").next().unwrap_or_default(), usize::MAX),
            None if line.starts_with('`') => (line, 1),
            None => continue,
        };
        for quote in code.captures_iter(place).take(most).map(|found| found[1].to_owned()) {
            if quote.contains(' ') && !quote.starts_with("spurline ") {
                quotes.push((number + 1, quote));
            }
        }
    }
    quotes
}

/// The program's source without tests, with every message in one line and a mark in place of its values.
fn source_text() -> String {
    let joined = Regex::new(r"\\\n\s*").expect("a valid pattern");
    let value = Regex::new(r"\{[^{}\n]*\}").expect("a valid pattern");
    let mut all = String::new();
    for (path, text) in texts(&[".rs"]) {
        let shown = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        let product = shown.starts_with("crates/") || shown.starts_with("bin/");
        if !product || !shown.contains("/src/") {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        let messages: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        let text = joined.replace_all(&messages.join("\n"), "").replace("\\\"", "\"").replace("\\n", " ");
        all.push_str(&value.replace_all(&text, "\0"));
    }
    all
}

#[test]
fn quoted_messages_exist() {
    let document = std::fs::read_to_string(root().join("TROUBLESHOOTING.md")).expect("the document is there");
    let source = source_text();
    let quotes = quotes_of(&document);
    assert!(quotes.len() > 150, "{} quotes", quotes.len());
    let mut unused: BTreeSet<&str> = NOT_OURS.iter().copied().collect();
    let mut missing = Vec::new();
    for (line, quote) in &quotes {
        for part in parts_of(quote) {
            if NOT_OURS.contains(&part.as_str()) {
                unused.remove(part.as_str());
            } else if !source.contains(&part) {
                missing.push(format!("TROUBLESHOOTING.md:{line}: `{quote}`: no message has '{part}'"));
            }
        }
    }
    let rule = "quote a message as the source has it, with … in place of its values";
    assert!(missing.is_empty(), "{rule}:\n  {}", missing.join("\n  "));
    assert!(unused.is_empty(), "not quoted any more: {unused:?}");
}

#[test]
fn a_quote_is_compared_between_its_values() {
    assert_eq!(parts_of("the registry … is lost: …; continuing with N nodes"), ["continuing with"]);
    assert_eq!(parts_of("`port 1 of mlx5_0 is not active: it has no address"), ["is not active", "it has no address"]);
    assert_eq!(parts_of("stats --json"), ["stats --json"]);
}
