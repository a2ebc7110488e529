//! Finds the files of a job: folders depth first, page by page, filtered by patterns. The position is as small as the folders are
//! deep, so that another process can resume the walk.

use crate::spec::JobSpec;
use crate::spool::FileRecord;
use crate::{JobRun, JobTarget};
use glob::{MatchOptions, Pattern};
use serde::{Deserialize, Serialize};
use spurline_sys::join_path;
use spurline_types::{DirEntry, FileKind, Result, RetryAdvice};
use std::hash::Hasher as _;

/// Include and exclude patterns of a job. A pattern with `/` matches the path below the source, others match the last
/// name.
#[derive(Debug, Clone, Default)]
pub struct FileFilter {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

const PATTERN_OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

impl FileFilter {
    /// Takes files that match `include` (all when empty) and not `exclude`.
    ///
    /// # Errors
    /// Which pattern is invalid, and why.
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self, String> {
        Ok(FileFilter { include: compile_patterns(include)?, exclude: compile_patterns(exclude)? })
    }

    fn matches(patterns: &[Pattern], path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        patterns.iter().any(|p| p.matches_with(if p.as_str().contains('/') { path } else { name }, PATTERN_OPTIONS))
    }

    /// Whether a file is included.
    pub fn includes_file(&self, path: &[u8]) -> bool {
        let path = String::from_utf8_lossy(path);
        !Self::matches(&self.exclude, &path) && (self.include.is_empty() || Self::matches(&self.include, &path))
    }

    /// Whether a folder is walked.
    pub fn enters_folder(&self, path: &[u8]) -> bool {
        !Self::matches(&self.exclude, &String::from_utf8_lossy(path))
    }
}

fn compile_patterns(patterns: &[String]) -> Result<Vec<Pattern>, String> {
    patterns
        .iter()
        .map(|text| {
            Pattern::new(text.trim_start_matches('/'))
                .map_err(|e| format!("'{text}' is not a valid pattern: {} (character {})", e.msg, e.pos + 1))
        })
        .collect()
}

/// A position in a walk: all earlier files were reported.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WalkPosition {
    /// Number of the job's paths that are finished.
    paths: u64,
    /// Open folders of the next path, outermost first.
    #[serde(default)]
    folders: Vec<FolderPosition>,
}

/// Position in a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct FolderPosition {
    /// Cursor of the page.
    page: Option<Vec<u8>>,
    /// Absent before the page was read.
    inside: Option<SubfolderPosition>,
}

/// The subfolder of a page of the walk, or the last subfolder if there is no deeper level.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SubfolderPosition {
    /// A hash of all names of the page: after a change, the reported files are unknown.
    names: u64,
    name: Vec<u8>,
}

impl WalkPosition {
    /// After this many paths of the job.
    pub(crate) fn at_path(paths: u64) -> WalkPosition {
        WalkPosition { paths, folders: Vec::new() }
    }
}

pub(crate) enum WalkEvent {
    /// A file of the job.
    File(FileRecord),
    /// A missing path or a folder that cannot be listed, with the error.
    Failed(Vec<u8>, String),
    /// Everything before this was reported.
    Position(WalkPosition),
}

/// Finds all files from `place` on. A path that fails is reported, and the walk continues.
pub(crate) fn walk_files(
    target: &dyn JobTarget,
    spec: &JobSpec,
    filter: &FileFilter,
    run: &JobRun,
    place: WalkPosition,
    tell: &mut dyn FnMut(WalkEvent) -> Result<()>,
) -> Result<()> {
    let mut levels = place.folders;
    let walked = usize::try_from(place.paths).unwrap_or(usize::MAX);
    for (path, number) in spec.paths.iter().zip(1..).skip(walked) {
        let path = path.trim_matches('/').as_bytes();
        if run.is_stopping() {
            return Ok(());
        }
        let levels = std::mem::take(&mut levels);
        let kind = if levels.is_empty() {
            match retry_request(run, || target.lookup(path)) {
                Ok(attr) if attr.kind == FileKind::File && filter.includes_file(path) => {
                    tell(WalkEvent::File(FileRecord::new(path.to_vec(), &attr)))?;
                    attr.kind
                }
                Ok(attr) if attr.kind == FileKind::Symlink => {
                    tell(WalkEvent::Failed(path.to_vec(), "a symbolic link: name what it leads to".to_owned()))?;
                    attr.kind
                }
                Ok(attr) => attr.kind,
                Err(error) => {
                    tell(WalkEvent::Failed(path.to_vec(), error.to_string()))?;
                    FileKind::File
                }
            }
        } else {
            FileKind::Directory
        };
        if kind == FileKind::Directory && spec.listed {
            tell(WalkEvent::Failed(path.to_vec(), "a folder: the list has to name files".to_owned()))?;
        } else if kind == FileKind::Directory {
            let mut walk = FolderWalk { target, filter, run, paths: number - 1, stack: Vec::new() };
            walk.restart_at(path, levels);
            if !walk.walk_all(tell)? {
                return Ok(());
            }
        }
        // An error after a stop is no failure.
        if run.is_stopping() {
            return Ok(());
        }
        tell(WalkEvent::Position(WalkPosition::at_path(number)))?;
    }
    Ok(())
}

struct OpenFolder {
    path: Vec<u8>,
    level: FolderPosition,
    page: Option<FolderPage>,
    /// The page cursor is from an earlier run.
    saved: bool,
}

/// A page that was read.
struct FolderPage {
    /// The folders not yet entered.
    folders: std::vec::IntoIter<Vec<u8>>,
    /// The hash of the names.
    names: u64,
    /// Cursor of the next page.
    next: Option<Vec<u8>>,
}

/// Why a folder fails whose listing makes no progress.
const REPEATED_CURSOR: &str = "can't list all of it: the next page has the cursor of this page, so that the names behind it \
                               are unknown; find out why the source or its node lists no further, and run the job again";

/// Everything below a folder.
struct FolderWalk<'a> {
    target: &'a dyn JobTarget,
    filter: &'a FileFilter,
    run: &'a JobRun,
    /// Number of the job's earlier paths.
    paths: u64,
    stack: Vec<OpenFolder>,
}

fn hash_names(entries: &[DirEntry]) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for entry in entries {
        hash.write(&(entry.name.len() as u64).to_le_bytes());
        hash.write(&entry.name);
    }
    hash.finish()
}

/// Whether `name` may be listed after `other`: folders sort by name, or by name with `/`.
fn may_follow(name: &[u8], other: &[u8]) -> bool {
    name > other || with_slash(name) > with_slash(other)
}

fn with_slash(name: &[u8]) -> Vec<u8> {
    [name, b"/"].concat()
}

impl FolderWalk<'_> {
    /// Starts with `top`, or resumes at `levels`.
    fn restart_at(&mut self, top: &[u8], levels: Vec<FolderPosition>) {
        let levels = if levels.is_empty() { vec![FolderPosition::default()] } else { levels };
        let mut path = top.to_vec();
        for level in levels {
            let deeper = level.inside.as_ref().map(|inside| join_path(&path, &inside.name));
            self.stack.push(OpenFolder { path, level, page: None, saved: true });
            path = deeper.unwrap_or_default();
        }
    }

    /// Walks to the end; false when stopped.
    fn walk_all(&mut self, tell: &mut dyn FnMut(WalkEvent) -> Result<()>) -> Result<bool> {
        while let Some(top) = self.stack.last_mut() {
            if self.run.is_stopping() {
                return Ok(false);
            }
            let Some(FolderPage { folders, names, next }) = &mut top.page else {
                self.read_page(tell)?;
                continue;
            };
            if let Some(name) = folders.next() {
                let path = join_path(&top.path, &name);
                top.level.inside = Some(SubfolderPosition { names: *names, name });
                self.stack.push(OpenFolder { path, level: FolderPosition::default(), page: None, saved: false });
                continue;
            }
            match next.take() {
                Some(next) if Some(&next) == top.level.page.as_ref() => {
                    tell(WalkEvent::Failed(top.path.clone(), REPEATED_CURSOR.to_owned()))?;
                    self.stack.pop();
                }
                Some(next) => {
                    top.level = FolderPosition { page: Some(next), inside: None };
                    top.page = None;
                }
                None => drop(self.stack.pop()),
            }
        }
        Ok(true)
    }

    /// Reads the next page of the innermost folder; a folder that cannot be listed is skipped.
    fn read_page(&mut self, tell: &mut dyn FnMut(WalkEvent) -> Result<()>) -> Result<()> {
        let folders = self.stack.iter().map(|folder| folder.level.clone()).collect();
        tell(WalkEvent::Position(WalkPosition { paths: self.paths, folders }))?;
        let Some(OpenFolder { path, level, page, saved }) = self.stack.last_mut() else { return Ok(()) };
        let from_before = std::mem::take(saved) && level.page.is_some();
        let listed = match retry_request(self.run, || self.target.list(path, level.page.as_deref())) {
            Ok(listed) => listed,
            // The cursor may be invalid for another origin client, with any error: restart the folder once.
            Err(_) if from_before => {
                *level = FolderPosition::default();
                return Ok(());
            }
            Err(error) => {
                tell(WalkEvent::Failed(path.clone(), format!("can't list it: {error}")))?;
                self.stack.pop();
                return Ok(());
            }
        };
        let names = hash_names(&listed.entries);
        let before = level.inside.as_ref();
        let told = before.is_some_and(|inside| inside.names == names);
        let mut folders = Vec::new();
        for entry in &listed.entries {
            let path = join_path(path, &entry.name);
            match entry.attr.kind {
                FileKind::File if !told && self.filter.includes_file(&path) => {
                    tell(WalkEvent::File(FileRecord::new(path, &entry.attr)))?;
                }
                FileKind::Directory if self.filter.enters_folder(&path) => folders.push(entry.name.clone()),
                // A symbolic link has no bytes to cache; a target below the source is found under the target's name.
                FileKind::File | FileKind::Directory | FileKind::Symlink => {}
            }
        }
        if let Some(inside) = before {
            match folders.iter().position(|name| *name == inside.name).filter(|_| told) {
                Some(at) => drop(folders.drain(..=at)),
                None => folders.retain(|name| may_follow(name, &inside.name)),
            }
        }
        *page = Some(FolderPage { folders: folders.into_iter(), names, next: listed.next });
        Ok(())
    }
}

/// Repeats a request, with growing pauses, while the group or the origin does not answer.
pub(crate) fn retry_request<T>(run: &JobRun, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let mut tries = 0;
    loop {
        match ask() {
            Err(error)
                if tries < crate::run::TRIES
                    && error.kind().retry_advice() != RetryAdvice::Never
                    && !run.is_stopping() =>
            {
                run.update_progress(|p| p.why = error.to_string());
                run.pause(crate::run::FIRST_PAUSE * (1 << tries));
                tries += 1;
            }
            result => {
                if tries > 0 && result.is_ok() {
                    run.update_progress(|p| p.why.clear());
                }
                return result;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_paths_or_names() {
        let words = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let filter = FileFilter::new(&words(&["*.bin", "top/*/x"]), &words(&["tmp", "/a/**"])).unwrap();
        assert!(
            filter.includes_file(b"deep/er/1.bin")
                && filter.includes_file(b"top/b/x")
                && !filter.includes_file(b"top/b/c/x")
        );
        assert!(
            !filter.includes_file(b"a/1.bin") && !filter.includes_file(b"a/b/1.bin") && !filter.includes_file(b"1.txt")
        );
        assert!(!filter.enters_folder(b"b/tmp") && filter.enters_folder(b"b/tmp2"));
        assert!(filter.includes_file(b"\xff\xfe.bin"));
        let error = FileFilter::new(&words(&["a/***"]), &[]).unwrap_err();
        assert!(error.contains("a/***") && error.contains("character"), "{error}");
    }
}
