//! The end of a job: the state, the reason, and the note for people. Knows the counts, and works on no file.

use super::{JobRun, STOPPED};
use crate::JobTarget;
use crate::progress::{JobProgress, JobState};
use crate::spec::{JobAction, JobSpec};
use crate::spool::ListReader;
use spurline_types::Result;
use spurline_types::units::human_bytes;
use std::path::Path;

/// Records how a job ended; `result` is that of the passes.
pub(super) fn note_end(target: &dyn JobTarget, spec: &JobSpec, run: &JobRun, spool: &Path, result: Result<()>) {
    let remark = result.as_ref().ok().and_then(|()| match spec.action {
        JobAction::Load => load_remark(target, spec, run, spool),
        JobAction::Free => free_remark(run.progress().bytes_pinned),
    });
    let stopped = run.is_stopping();
    run.update_progress(|progress| {
        progress.bytes_per_second = 0.0;
        progress.files_per_second = 0.0;
        if let Some(remark) = remark {
            let between = if progress.note.is_empty() { "" } else { "; " };
            progress.note = format!("{}{between}{remark}", progress.note);
        }
        (progress.state, progress.why) = end_state(progress, spec, stopped, result);
    });
}

/// The last state and the reason.
fn end_state(progress: &JobProgress, spec: &JobSpec, stopped: bool, result: Result<()>) -> (JobState, String) {
    if let Err(error) = result {
        return (JobState::Failed, error.to_string());
    }
    if stopped {
        return (JobState::Stopped, STOPPED.to_owned());
    }
    if progress.files_failed > 0 {
        let files = if progress.files_failed == 1 { "file" } else { "files" };
        return (JobState::Failed, format!("{} {files} could not be done", progress.files_failed));
    }
    if progress.files_total == 0 && spec.has_patterns() {
        return (JobState::Failed, "no file matches --include and --exclude".to_owned());
    }
    (JobState::Succeeded, String::new())
}

/// The target's note on the loaded files, read from the list of files. Nothing for files done before the list was started, or
/// when the list cannot be read.
fn load_remark(target: &dyn JobTarget, spec: &JobSpec, run: &JobRun, spool: &Path) -> Option<String> {
    // Overlapping paths put a file in the list twice, while the cache has the file once.
    if spec.metadata_only || run.is_stopping() || spec.has_overlaps() {
        return None;
    }
    let (bytes, undone) = {
        let inner = run.inner.lock();
        (inner.progress.bytes_done, inner.undone.clone())
    };
    let mut list = ListReader::new(std::fs::File::open(spool).ok()?);
    let records = std::iter::from_fn(|| list.next().ok().flatten());
    let done = (run.first..).zip(records).filter(|(number, _)| !undone.has(*number));
    target.load_remark(spec.replicas, bytes, &mut done.map(|(_, record)| (record.path, record.size)))
}

/// The note on pinned blocks that a free job kept.
fn free_remark(bytes_pinned: u64) -> Option<String> {
    let kept = human_bytes(bytes_pinned);
    (bytes_pinned > 0).then(|| format!("{kept} are pinned and were kept; --pinned frees them too"))
}
