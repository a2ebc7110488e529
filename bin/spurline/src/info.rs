//! `spurline info`: queries the mount's process about a file, without access to the mount.

use crate::cli::InfoArgs;
use crate::report::{self, printable, printable_json};
use serde_json::Value;
use spurline_config::Fault;
use spurline_runtime::locator::{ANSWER, locate_path};
use spurline_types::units::human_bytes;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::ExitCode;

/// Runs the command; exit code 1 when the query of one of several paths failed.
///
/// # Errors
/// When the only path is in no mount, or its process does not answer or does not know it.
pub fn run(args: InfoArgs) -> Result<ExitCode, Fault> {
    let mut failed = false;
    for path in &args.path {
        match query_info(path) {
            Ok(answer) if args.json => anstream::println!("{answer}"),
            Ok(answer) => {
                anstream::print!("{}", info_text(&printable(path.as_os_str().as_bytes()), &printable_json(answer)))
            }
            Err(fault) if args.path.len() == 1 => return Err(fault),
            Err(fault) => {
                failed = true;
                report::print_fault(&fault);
            }
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

fn query_info(path: &Path) -> Result<Value, Fault> {
    let (located, peer) = locate_path(path)?;
    let mut answer = peer.fetch_info(&located.below, ANSWER).map_err(|e| {
        let fault = Fault::from(e);
        Fault { what: format!("{}: {}", path.display(), fault.what), ..fault }
    })?;
    let below = &located.below;
    if std::str::from_utf8(below).is_err() {
        // Bytes that JSON text can't hold.
        answer["path_escaped"] = below.escape_ascii().to_string().into();
    }
    Ok(answer)
}

/// The answer as text: facts, then blocks in runs of the same place.
fn info_text(path: &str, answer: &Value) -> String {
    let mut out = format!("{path}\n");
    let mut fact = |name: &str, value: String| {
        let _ = writeln!(out, "  {name:<11} {value}");
    };
    if let Some(object) = answer.as_object() {
        for (key, value) in object {
            match (key.as_str(), value) {
                ("blocks" | "held" | "path" | "path_escaped", _) | (_, Value::Null) => {}
                ("writes", can) => fact(key, can_words(can)),
                ("rule", rule) => fact(
                    key,
                    format!(
                        "{}, by {}",
                        spurline_runtime::rules::describe_rule(rule),
                        rule["url"].as_str().unwrap_or_default()
                    ),
                ),
                ("length" | "block_size", Value::Number(n)) => {
                    fact(key, format!("{n} ({})", human_bytes(n.as_u64().unwrap_or(0))));
                }
                (_, Value::String(text)) => fact(key, text.clone()),
                (_, other) => fact(key, other.to_string()),
            }
        }
    }
    let n = |value: &Value, key: &str| value[key].as_u64().unwrap_or(0);
    let blocks = &answer["blocks"];
    if blocks.is_object() {
        let (total, cached) = (n(blocks, "total"), n(blocks, "cached"));
        let (memory, disk) = (n(blocks, "memory"), n(blocks, "disk"));
        // Several nodes may hold the same block.
        let held = if cached > total { format!("{cached} copies") } else { format!("of them {cached}") };
        fact("blocks", format!("{total}, {held} cached: {memory} in memory, {disk} on disk"));
    }
    for run in answer["held"].as_array().into_iter().flatten() {
        let (first, last) = (n(run, "first"), n(run, "last"));
        let range = if first == last { format!("{first}") } else { format!("{first}-{last}") };
        let (place, holder) = (run["where"].as_str().unwrap_or_default(), run["holder"].as_str().unwrap_or_default());
        let line = format!("    {range:<12} {place:<16} {holder}");
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

/// What the source of a writable mount can do, in words.
fn can_words(can: &Value) -> String {
    let words = [
        ("hard_links", "hard links"),
        ("symlinks", "symbolic links"),
        ("modes", "modes"),
        ("xattrs", "extended attributes"),
        ("acls", "ACLs"),
        ("random_write", "writes anywhere"),
        ("atomic_append", "atomic appends"),
        ("holes", "holes"),
        ("copy", "copies within the source"),
    ];
    let text = |key: &str| can[key].as_str().unwrap_or("?").to_owned();
    let can_do = words.iter().filter(|(key, _)| can[*key] == true).map(|(_, word)| (*word).to_owned());
    let more = [
        format!("rename of directories: {}", text("rename_directory")),
        format!("locks hold within the {}", text("locks")),
    ];
    can_do.chain(more).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn facts_counts_and_runs_of_blocks() {
        let answer = json!({
            "path": "a", "version": "\"etag\"", "length": 20, "etag": null,
            "writes": {"hard_links": true, "acls": false, "rename_directory": "atomic", "locks": "mount"},
            "rule": {"url": "s3://b/x", "pin": true, "ttl_seconds": null, "quota_bytes": null, "number": 1},
            "blocks": {"total": 4, "cached": 3, "memory": 1, "disk": 2},
            "held": [{"first": 0, "last": 0, "where": "memory", "holder": "n1"},
                     {"first": 1, "last": 2, "where": "disk", "holder": "n2"}],
        });
        let text = info_text("/mnt/a", &answer);
        assert!(text.starts_with("/mnt/a\n") && text.contains("length      20 (20 B)"), "{text}");
        let can = "  writes      hard links, rename of directories: atomic, locks hold within the mount\n";
        assert!(text.contains(can), "{text}");
        assert!(text.contains("  rule        pinned, by s3://b/x\n"), "{text}");
        assert!(text.contains("4, of them 3 cached: 1 in memory, 2 on disk") && !text.contains("etag  "), "{text}");
        assert!(
            text.contains("    0            memory           n1\n    1-2          disk             n2\n"),
            "{text}"
        );
    }
}
