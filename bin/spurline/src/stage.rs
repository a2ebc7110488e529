//! `spurline status --unsaved`, `spurline stage drop` and `spurline stage export`: the files of a group that the store does not have.

use crate::cli::{StageAction, StageDropArgs, StageExportArgs, StageGroupArgs};
use crate::report::{has_consent, print_fault, print_note, printable, printable_json};
use crate::rules::url_of;
use anstyle::{AnsiColor, Style};
use serde::Serialize;
use serde_json::json;
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_runtime::rules::human_time;
use spurline_runtime::staged_files::{GroupStage, StagedFile, UnsavedList, UnsavedObject};
use spurline_types::Stats;
use spurline_types::units::human_bytes;
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::SystemTime;

const BOLD: Style = Style::new().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const RED: Style = AnsiColor::Red.on_default().bold();
/// Seconds after a close until which a file is to be at the store.
const UPLOAD_DEADLINE_S: u64 = 60;

/// An unsaved file in the output of `--json`.
#[derive(Serialize)]
struct UnsavedFile<'a> {
    source: &'a str,
    path: &'a str,
    bytes: u64,
    age_seconds: u64,
    nodes: &'a [String],
    scratch: bool,
    removal: bool,
    error: Option<&'a str>,
}

/// Runs `spurline stage`.
///
/// # Errors
/// As [`GroupStage::find`]; without consent to a loss with exit code 2.
pub fn run(action: &StageAction) -> Result<ExitCode, Fault> {
    match action {
        StageAction::Drop(args) => drop_files(args),
        StageAction::Export(args) => export_file(args),
    }
}

/// Lists the files that the store does not have.
///
/// # Errors
/// With exit code 3 when the registry can't be reached, or no node leads.
pub fn list_unsaved(registry: &Registry, name: &str, trust: &TrustConfig, as_json: bool) -> Result<ExitCode, Fault> {
    let listed = GroupStage::open(registry, name, trust)?.list_unsaved()?;
    let keeps_files = listed.is_some();
    let unsaved = listed.unwrap_or_default();
    if as_json {
        let files: Vec<UnsavedFile<'_>> = unsaved.oldest.iter().map(described).collect();
        anstream::println!(
            "{}",
            json!({
                "unsaved": files,
                "count": unsaved.count,
                "bytes": unsaved.bytes,
                "scratch_count": unsaved.scratch_count,
                "scratch_bytes": unsaved.scratch_bytes,
                "keeps_staged_files": keeps_files,
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    if unsaved.count > 0 {
        print_unsaved(&unsaved);
    } else if keeps_files {
        anstream::println!("every file is at the store");
    } else {
        anstream::println!("every file is at the store: no node of group {name} keeps staged files (--stage-size)");
    }
    if unsaved.scratch_count > 0 {
        let bytes = human_bytes(unsaved.scratch_bytes);
        anstream::println!("scratch, never uploaded: {}, {bytes}", files_in_words(unsaved.scratch_count));
    }
    Ok(ExitCode::SUCCESS)
}

fn described(object: &UnsavedObject) -> UnsavedFile<'_> {
    UnsavedFile {
        source: &object.at.bucket,
        path: &object.at.key,
        bytes: object.size,
        age_seconds: object.age_s,
        nodes: &object.holders,
        scratch: object.is_scratch,
        removal: object.is_removal,
        error: object.error.as_deref(),
    }
}

/// A number of files, in words.
fn files_in_words(count: u64) -> String {
    if count == 1 { "1 file".to_owned() } else { format!("{count} files") }
}

fn print_unsaved(unsaved: &UnsavedList) {
    let waiting: Vec<&UnsavedObject> = unsaved.oldest.iter().filter(|object| !object.is_scratch).collect();
    for object in &waiting {
        let url = printable(format!("{}/{}", object.at.bucket, object.at.key).as_bytes());
        let is_late = object.age_s > UPLOAD_DEADLINE_S;
        let style = if is_late { RED } else { Style::new() };
        let kind = if object.is_removal { ", removed, and the store's object is still there" } else { "" };
        anstream::println!(
            "{BOLD}{url}{BOLD:#}  {}, {style}{}{style:#}, at {}{kind}",
            human_bytes(object.size),
            human_time(object.age_s),
            printable(object.holders.join(" and ").as_bytes()),
        );
        if let Some(error) = &object.error {
            anstream::println!("  {YELLOW}{}{YELLOW:#}", printable(error.as_bytes()));
        }
    }
    let more = unsaved.count.saturating_sub(waiting.len() as u64);
    if more > 0 {
        anstream::println!("and {more} more, closed later");
    }
    let oldest = waiting.first().map_or(0, |object| object.age_s);
    anstream::println!(
        "{}, {}, not at the store; the oldest was closed {} ago",
        files_in_words(unsaved.count),
        human_bytes(unsaved.bytes),
        human_time(oldest)
    );
}

/// The files that are not uploaded, as the node that leads counts these; `None` for none.
pub fn unsaved_words(stats: &Stats) -> Option<String> {
    let stage = &stats.stage;
    let count = stage.unsaved_objects.get();
    (count > 0).then(|| {
        format!(
            "unsaved {}, {}, oldest {}",
            files_in_words(count),
            human_bytes(stage.unsaved_bytes.get()),
            human_time(stage.oldest_unsaved_s.get())
        )
    })
}

/// The finding for uploads that are late.
pub fn late_uploads(stats: &Stats) -> Option<String> {
    let stage = &stats.stage;
    let oldest = stage.oldest_unsaved_s.get();
    (oldest > UPLOAD_DEADLINE_S).then(|| {
        format!(
            "uploads are late: {} not at the store, the oldest for {}; 'spurline status --unsaved' has the reasons",
            files_in_words(stage.unsaved_objects.get()),
            human_time(oldest)
        )
    })
}

fn open_stage(args: &StageGroupArgs) -> Result<GroupStage, Fault> {
    let Some(registry) = &args.registry else {
        return Err(Fault::usage(
            "no registry: the nodes of a group keep the staged files",
            "give --registry coordinator://HOST:PORT or etcd://HOST:PORT, and --cache-group",
        ));
    };
    GroupStage::open(registry, &args.cache_group, &args.trust.check(false)?)
}

fn drop_files(args: &StageDropArgs) -> Result<ExitCode, Fault> {
    let urls = args.file.iter().map(|file| url_of(file)).collect::<Result<Vec<String>, Fault>>()?;
    let stage = open_stage(&args.group)?;
    let mut found = Vec::new();
    let mut absent = None;
    for url in &urls {
        match stage.find(url) {
            Ok(file) => found.push((url, file)),
            // The other files can still be given up.
            Err(fault) if fault.code == spurline_types::fault::ExitKind::Failed => {
                print_fault(&fault);
                absent = Some(ExitCode::FAILURE);
            }
            Err(fault) => return Err(fault),
        }
    }
    if found.is_empty() {
        return Ok(absent.unwrap_or(ExitCode::SUCCESS));
    }
    let losses: Vec<String> = found.iter().map(|(url, file)| loss_words(url, file)).collect();
    let what = losses.join("\n");
    if !args.yes && (args.group.json || !has_consent(&what)) {
        if !args.group.json && std::io::stdin().is_terminal() {
            print_note("nothing was dropped");
            return Ok(ExitCode::FAILURE);
        }
        return Err(Fault::usage(what, "say --yes, or copy the bytes first with 'spurline stage export'"));
    }
    for (url, file) in &found {
        stage.give_up(file)?;
        let url = printable(url.as_bytes());
        if args.group.json {
            let done = json!({"dropped": url, "bytes": file.len_bytes(), "removal": file.is_removal()});
            anstream::println!("{}", printable_json(done));
        } else {
            anstream::println!("{url}: dropped, {}", human_bytes(file.len_bytes()));
        }
    }
    Ok(absent.unwrap_or(ExitCode::SUCCESS))
}

/// The loss with a staged file.
fn loss_words(url: &str, file: &StagedFile) -> String {
    if file.is_removal() {
        return format!("{url} is removed, and the store has the object still: the object comes back");
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let age = human_time(now.saturating_sub(file.closed_s()));
    let size = human_bytes(file.len_bytes());
    let nodes = file.nodes().join(" and ");
    let rest = if file.is_scratch() { "" } else { "; what the store has under the name, if anything, stays" };
    format!("{url}, {size}, closed {age} ago, is on {nodes} only, and will be lost{rest}")
}

fn export_file(args: &StageExportArgs) -> Result<ExitCode, Fault> {
    let url = url_of(&args.file)?;
    let stage = open_stage(&args.group)?;
    let file = stage.find(&url)?;
    let dest = stage.export(&file, &args.dest, args.force)?;
    let dest = printable(dest.as_os_str().as_encoded_bytes());
    if args.group.json {
        anstream::println!("{}", json!({"exported": printable(url.as_bytes()), "to": dest, "bytes": file.len_bytes()}));
    } else {
        anstream::println!("{dest}: {} of {}", human_bytes(file.len_bytes()), printable(url.as_bytes()));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_uploads_are_a_finding_and_all_are_counted() {
        let stats = Stats::default();
        assert_eq!((unsaved_words(&stats), late_uploads(&stats)), (None, None));
        stats.stage.unsaved_objects.set(3);
        stats.stage.unsaved_bytes.set(5 << 20);
        stats.stage.oldest_unsaved_s.set(60);
        assert_eq!(unsaved_words(&stats).unwrap(), "unsaved 3 files, 5.00 MiB, oldest 60 s");
        assert_eq!(late_uploads(&stats), None);
        stats.stage.oldest_unsaved_s.set(300);
        let said = late_uploads(&stats).unwrap();
        assert!(said.contains("3 files not at the store, the oldest for 5 min"), "{said}");
    }
}
