//! `spurline info`: queries the mount's process about a file, without access to the mount.

use crate::cli::InfoArgs;
use crate::report::{self, printable, printable_json};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_observe::documents::{BlockCounts, BlockRun, FileReads, InfoDocument, SourceAbilities};
use spurline_runtime::locator::{PROCESS_ANSWER_LIMIT, locate_path};
use spurline_types::FileKind;
use spurline_types::units::human_bytes;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::ExitCode;

/// Runs of blocks in a line; `--json` has more.
const RUNS_SHOWN: usize = 8;

/// Runs the command; exit code 1 when the query of a path among several failed.
///
/// # Errors
/// When the only path is in no mount, or the process there does not answer or does not know the path.
pub fn run(args: InfoArgs) -> Result<ExitCode, Fault> {
    let mut failed = false;
    for path in &args.path {
        match query_info(path) {
            Ok(answer) if args.json => anstream::println!("{answer}"),
            Ok(answer) => {
                let info = InfoDocument::from_json(&printable_json(answer))?;
                anstream::print!("{}", info_text(&printable(path.as_os_str().as_bytes()), &info));
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
    let mut answer = peer.fetch_info_json(&located.below, PROCESS_ANSWER_LIMIT).map_err(|e| {
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

/// The answer as text: facts, then blocks by place and node.
fn info_text(path: &str, info: &InfoDocument) -> String {
    let file = &info.file;
    let mut text = format!("{path}\n");
    let mut add_fact = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<11} {value}");
    };
    add_fact("block_size", format!("{} ({})", file.block_size, human_bytes(file.block_size)));
    if let Some(etag) = &file.etag {
        add_fact("etag", etag.clone());
    }
    add_fact("kind", kind_word(file.kind).to_owned());
    add_fact("length", format!("{} ({})", file.length, human_bytes(file.length)));
    if !file.nodes.is_empty() {
        add_fact("nodes", json!(file.nodes).to_string());
    }
    if let Some(reads) = &info.reads {
        add_fact("reads", read_words(reads));
    }
    if let Some(rule) = &file.rule {
        add_fact("rule", format!("{}, by {}", spurline_runtime::rules::describe_rule(rule), rule.url));
    }
    if !file.silent.is_empty() {
        add_fact("silent", json!(file.silent).to_string());
    }
    add_fact("source", file.source.clone());
    add_fact("version", file.version.clone());
    if let Some(abilities) = &info.writes {
        add_fact("writes", ability_words(abilities));
    }
    let BlockCounts { total, cached, memory, disk } = file.blocks;
    // Several nodes may hold the same block.
    let held = if cached > total { format!("{cached} copies") } else { format!("of them {cached}") };
    add_fact("blocks", format!("{total}, {held} cached: {memory} in memory, {disk} on disk"));
    for group in held_groups(&file.held) {
        let HeldGroup { place, holder, blocks, runs } = group;
        let _ = writeln!(text, "    {place:<16} {holder:<24} {blocks:>6}: {}", runs_text(&runs));
    }
    text
}

/// Blocks in the same place of the same node.
struct HeldGroup<'a> {
    place: &'a str,
    /// Empty for this host.
    holder: &'a str,
    blocks: u64,
    runs: Vec<&'a BlockRun>,
}

/// The runs by place and node: consecutive blocks of a file lie on different nodes.
fn held_groups(held: &[BlockRun]) -> Vec<HeldGroup<'_>> {
    let mut groups: Vec<HeldGroup<'_>> = Vec::new();
    for run in held {
        let place = run.place.as_str();
        let holder = run.holder.as_deref().unwrap_or_default();
        let at = groups.iter().position(|group| group.place == place && group.holder == holder);
        let at = at.unwrap_or_else(|| {
            groups.push(HeldGroup { place, holder, blocks: 0, runs: Vec::new() });
            groups.len() - 1
        });
        groups[at].blocks += run.last + 1 - run.first;
        groups[at].runs.push(run);
    }
    groups
}

/// The first runs, and the number of the others.
fn runs_text(runs: &[&BlockRun]) -> String {
    let shown = runs.iter().take(RUNS_SHOWN).map(|run| match run.last - run.first {
        0 => run.first.to_string(),
        _ => format!("{}-{}", run.first, run.last),
    });
    let text = shown.collect::<Vec<_>>().join(", ");
    match runs.len().checked_sub(RUNS_SHOWN) {
        None | Some(0) => text,
        Some(others) => format!("{text} and {others} more runs"),
    }
}

fn kind_word(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
    }
}

/// Where the next open of a file reads from.
fn read_words(reads: &FileReads) -> String {
    match &reads.why_not {
        _ if reads.cached => "from the cache".to_owned(),
        Some(why_not) => format!("from the source's file: {why_not}"),
        None => "from the source's file".to_owned(),
    }
}

/// The abilities of a writable mount's source in words.
fn ability_words(abilities: &SourceAbilities) -> String {
    let words = [
        (abilities.hard_links, "hard links"),
        (abilities.symlinks, "symbolic links"),
        (abilities.modes, "modes"),
        (abilities.xattrs, "extended attributes"),
        (abilities.acls, "ACLs"),
        (abilities.random_write, "writes anywhere"),
        (abilities.atomic_append, "atomic appends"),
        (abilities.holes, "holes"),
        (abilities.copy, "copies within the source"),
    ];
    let mut present: Vec<String> =
        words.iter().filter(|(is_present, _)| *is_present).map(|(_, word)| (*word).to_owned()).collect();
    present.push(format!("rename of directories: {}", abilities.rename_directory));
    present.push(format!("locks hold within the {}", abilities.locks));
    present.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_counts_and_runs_of_blocks() {
        let answer = json!({
            "path": "a", "version": "\"etag\"", "length": 20, "etag": null,
            "source": "s3://b", "kind": "file", "block_size": 5,
            "writes": {"hard_links": true, "acls": false, "rename_directory": "atomic", "locks": "mount"},
            "reads": {"cached": false, "why_not": "it was just changed"},
            "rule": {"url": "s3://b/x", "pin": true, "ttl_seconds": null, "quota_bytes": null, "number": 1},
            "blocks": {"total": 4, "cached": 3, "memory": 1, "disk": 2},
            "held": [{"first": 0, "last": 0, "where": "memory", "holder": "n1"},
                     {"first": 1, "last": 2, "where": "disk", "holder": "n2"}],
        });
        let text = info_text("/mnt/a", &InfoDocument::from_json(&answer).unwrap());
        assert!(
            text.starts_with("/mnt/a\n  block_size  5 (5 B)\n  kind        file\n  length      20 (20 B)\n"),
            "{text}"
        );
        let can = "  writes      hard links, rename of directories: atomic, locks hold within the mount\n";
        assert!(text.contains(can), "{text}");
        assert!(text.contains("  reads       from the source's file: it was just changed\n"), "{text}");
        assert!(text.contains("  rule        pinned, by s3://b/x\n"), "{text}");
        assert!(text.contains("4, of them 3 cached: 1 in memory, 2 on disk") && !text.contains("etag  "), "{text}");
        assert!(
            text.ends_with(
                "    memory           n1                            1: 0\n    disk             n2                            2: 1-2\n"
            ),
            "{text}"
        );
    }

    /// One block, or two from an odd number on.
    fn held_run(first: u64, holder: &str) -> Value {
        json!({"first": first, "last": first + first % 2, "where": "disk", "holder": holder})
    }

    #[test]
    fn blocks_of_a_node_have_one_line() {
        let held: Vec<Value> = (0..40).map(|n| held_run(3 * n, if n % 4 == 0 { "n2" } else { "n1" })).collect();
        let answer = json!({
            "path": "a", "version": "v", "length": 600, "etag": null, "source": "s3://b", "kind": "file", "block_size": 5,
            "blocks": {"total": 120, "cached": 60, "memory": 0, "disk": 60}, "held": held,
        });
        let text = info_text("/mnt/a", &InfoDocument::from_json(&answer).unwrap());
        let lines: Vec<&str> = text.lines().skip_while(|line| !line.contains("    disk")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].ends_with("10: 0, 12, 24, 36, 48, 60, 72, 84 and 2 more runs"), "{text}");
        assert!(lines[1].ends_with("50: 3-4, 6, 9-10, 15-16, 18, 21-22, 27-28, 30 and 22 more runs"), "{text}");
    }
}
