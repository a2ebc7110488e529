//! `spurline info`: what a mount knows of a file, asked beside the mount.

use crate::cli::InfoArgs;
use crate::target::{ANSWER, locate};
use serde_json::Value;
use spurline_config::Fault;
use spurline_types::units::human_bytes;
use std::fmt::Write as _;

/// Runs the command.
///
/// # Errors
/// When a path is in no mount, or its process does not answer or does not know it.
pub fn run(args: InfoArgs) -> Result<(), Fault> {
    for path in &args.path {
        let (located, peer) = locate(path)?;
        let answer = peer.info(&located.below, ANSWER).map_err(|e| {
            let fault = Fault::from(e);
            Fault::failed(format!("{}: {}", path.display(), fault.what), fault.remedy)
        })?;
        if args.json {
            anstream::println!("{answer}");
        } else {
            anstream::print!("{}", show(&path.display().to_string(), &answer));
        }
    }
    Ok(())
}

/// The answer for a person: facts, then blocks in runs of the same place.
fn show(path: &str, answer: &Value) -> String {
    let mut out = format!("{path}\n");
    let mut fact = |name: &str, value: String| {
        let _ = writeln!(out, "  {name:<11} {value}");
    };
    if let Some(object) = answer.as_object() {
        for (key, value) in object {
            match (key.as_str(), value) {
                ("blocks" | "path", _) | (_, Value::Null) => {}
                ("length" | "block_size", Value::Number(n)) => {
                    fact(key, format!("{n} ({})", human_bytes(n.as_u64().unwrap_or(0))));
                }
                (_, Value::String(text)) => fact(key, text.clone()),
                (_, other) => fact(key, other.to_string()),
            }
        }
    }
    if let Some(counts) = answer["blocks"].as_object() {
        let n = |key: &str| counts.get(key).and_then(Value::as_u64).unwrap_or(0);
        let (total, cached, memory, disk) = (n("total"), n("cached"), n("memory"), n("disk"));
        fact("blocks", format!("{total}, of them {cached} cached: {memory} in memory, {disk} on disk"));
        return out;
    }
    let Some(blocks) = answer["blocks"].as_array() else { return out };
    let place = |b: &Value| {
        let holders = match &b["holder"] {
            Value::String(one) => one.clone(),
            Value::Array(many) => many.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "),
            _ => String::new(),
        };
        (b["where"].as_str().unwrap_or("not cached").to_owned(), holders)
    };
    let cached = blocks.iter().filter(|b| b["where"].as_str().is_some_and(|w| w != "absent")).count();
    fact("blocks", format!("{} ({cached} cached)", blocks.len()));
    let mut start = 0;
    while start < blocks.len() {
        let this = place(&blocks[start]);
        let len = blocks[start..].iter().take_while(|b| place(b) == this).count();
        let range = if len == 1 { format!("{start}") } else { format!("{start}-{}", start + len - 1) };
        let (what, holder) = this;
        let what = if what == "absent" { "not cached".to_owned() } else { what };
        let _ = writeln!(out, "    {range:<12} {what:<10} {holder}");
        start += len;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn blocks_are_shown_in_runs() {
        let block = |place: &str, holder: Value| json!({"where": place, "holder": holder});
        let answer = json!({
            "path": "a", "version": "\"etag\"", "length": 20, "etag": null,
            "blocks": [block("memory", json!("node1:7000")), block("disk", json!("/nvme0")), block("disk", json!("/nvme0")),
                       block("absent", Value::Null)],
        });
        let text = show("/mnt/a", &answer);
        assert!(text.starts_with("/mnt/a\n") && text.contains("length      20 (20 B)"), "{text}");
        assert!(text.contains("4 (3 cached)") && !text.contains("etag  "), "{text}");
        assert!(text.contains("    0            memory     node1:7000\n    1-2          disk       /nvme0\n    3            not cached"), "{text}");
    }

    #[test]
    fn counts_of_blocks_are_a_sentence() {
        let answer = json!({"length": 9, "node": "n1", "blocks": {"total": 3, "cached": 2, "memory": 1, "disk": 2}});
        let text = show("/mnt/a", &answer);
        assert!(
            text.contains("3, of them 2 cached: 1 in memory, 2 on disk") && text.contains("node        n1"),
            "{text}"
        );
    }
}
