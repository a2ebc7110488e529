//! Finds the files of a job: folders depth first, page by page, filtered by patterns. What it is through with can be told
//! by a place that is no longer than the folders are deep, so that another process can take the walk up there.

use crate::spec::Spec;
use crate::spool::Record;
use crate::{Run, Target};
use glob::{MatchOptions, Pattern};
use serde::{Deserialize, Serialize};
use spurline_types::{DirEntry, FileKind, Result, Retry};
use std::hash::Hasher as _;

/// What a job takes and what it walks past. A pattern with a `/` is matched against the path below the source, one
/// without against the last name alone.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

impl Filter {
    /// Takes what `include` names (all when it is empty) and `exclude` does not.
    ///
    /// # Errors
    /// Which pattern makes no sense, and why.
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self, String> {
        let compile = |patterns: &[String]| -> Result<Vec<Pattern>, String> {
            let one = |text: &String| {
                Pattern::new(text.trim_start_matches('/'))
                    .map_err(|e| format!("'{text}' is no pattern: {} (character {})", e.msg, e.pos + 1))
            };
            patterns.iter().map(one).collect()
        };
        Ok(Filter { include: compile(include)?, exclude: compile(exclude)? })
    }

    fn matches(patterns: &[Pattern], path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        patterns.iter().any(|p| p.matches_with(if p.as_str().contains('/') { path } else { name }, OPTIONS))
    }

    /// Whether a file is taken.
    pub fn takes(&self, path: &[u8]) -> bool {
        let path = String::from_utf8_lossy(path);
        !Self::matches(&self.exclude, &path) && (self.include.is_empty() || Self::matches(&self.include, &path))
    }

    /// Whether a folder is walked into.
    pub fn enters(&self, path: &[u8]) -> bool {
        !Self::matches(&self.exclude, &String::from_utf8_lossy(path))
    }
}

/// A place in a walk: all before it was told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Paths of the job that are walked through.
    paths: u64,
    /// The folders of the path after them that the walk is in, the outermost first.
    #[serde(default)]
    folders: Vec<Level>,
}

/// Where the walk is in a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Level {
    /// What its page was asked for with.
    page: Option<Vec<u8>>,
    /// Not given before the page was looked at.
    inside: Option<Inside>,
}

/// The folder of a page that the walk is in, or came out of when there is no deeper level.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Inside {
    /// A hash of all names of the page: where it is another one by now, nothing says which of its files were told.
    names: u64,
    /// Its name.
    name: Vec<u8>,
}

impl Place {
    /// After so many paths of the job.
    pub(crate) fn at_path(paths: u64) -> Place {
        Place { paths, folders: Vec::new() }
    }
}

/// What a walk tells.
pub(crate) enum Found {
    /// A file of the job.
    File(Record),
    /// A path that is not there or a folder that can't be listed, and why.
    Failed(Vec<u8>, String),
    /// All before this was told.
    Place(Place),
}

/// Finds all files from `place` on; what can't be found is a failure of the job, and the walk goes on.
pub(crate) fn walk(
    target: &dyn Target,
    spec: &Spec,
    filter: &Filter,
    run: &Run,
    place: Place,
    tell: &mut dyn FnMut(Found) -> Result<()>,
) -> Result<()> {
    let mut levels = place.folders;
    let walked = usize::try_from(place.paths).unwrap_or(usize::MAX);
    for (path, number) in spec.paths.iter().zip(1..).skip(walked) {
        let path = path.trim_matches('/').as_bytes();
        if run.stopping() {
            return Ok(());
        }
        let levels = std::mem::take(&mut levels);
        let kind = if levels.is_empty() {
            match persist(run, || target.lookup(path)) {
                Ok(attr) if attr.kind == FileKind::File && filter.takes(path) => {
                    tell(Found::File(Record::new(path.to_vec(), &attr)))?;
                    attr.kind
                }
                Ok(attr) => attr.kind,
                Err(error) => {
                    tell(Found::Failed(path.to_vec(), error.to_string()))?;
                    FileKind::File
                }
            }
        } else {
            FileKind::Directory
        };
        if kind == FileKind::Directory && spec.listed {
            tell(Found::Failed(path.to_vec(), "a folder: the list has to name files".to_owned()))?;
        } else if kind == FileKind::Directory {
            let mut walk = Folders { target, filter, run, paths: number - 1, stack: Vec::new() };
            walk.take_up(path, levels);
            if !walk.go(tell)? {
                return Ok(());
            }
        }
        // What was not found because nobody looks any more is no failure.
        if run.stopping() {
            return Ok(());
        }
        tell(Found::Place(Place::at_path(number)))?;
    }
    Ok(())
}

/// A folder that the walk is in.
struct Folder {
    path: Vec<u8>,
    level: Level,
    page: Option<Page>,
    /// What its page is asked for with is from an earlier run.
    saved: bool,
}

/// A page that was looked at.
struct Page {
    /// Its folders that were not entered yet.
    folders: std::vec::IntoIter<Vec<u8>>,
    /// The hash of its names.
    names: u64,
    /// What the page after it is asked for with.
    next: Option<Vec<u8>>,
}

/// Everything below one folder.
struct Folders<'a> {
    target: &'a dyn Target,
    filter: &'a Filter,
    run: &'a Run,
    /// Paths of the job before this one.
    paths: u64,
    stack: Vec<Folder>,
}

fn below(folder: &[u8], name: &[u8]) -> Vec<u8> {
    let parts: &[&[u8]] = if folder.is_empty() { &[name] } else { &[folder, b"/", name] };
    parts.concat()
}

fn hash(entries: &[DirEntry]) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for entry in entries {
        hash.write(&(entry.name.len() as u64).to_le_bytes());
        hash.write(&entry.name);
    }
    hash.finish()
}

/// Whether `name` may be listed after `other`: folders stand by their names, or by what the names are with a `/`.
fn may_follow(name: &[u8], other: &[u8]) -> bool {
    let slashed = |name: &[u8]| [name, b"/"].concat();
    name > other || slashed(name) > slashed(other)
}

impl Folders<'_> {
    /// Begins with `top`, or goes on where `levels` says.
    fn take_up(&mut self, top: &[u8], levels: Vec<Level>) {
        let levels = if levels.is_empty() { vec![Level::default()] } else { levels };
        let mut path = top.to_vec();
        for level in levels {
            let deeper = level.inside.as_ref().map(|inside| below(&path, &inside.name));
            self.stack.push(Folder { path, level, page: None, saved: true });
            path = deeper.unwrap_or_default();
        }
    }

    /// Whether it came to the end; else it was stopped.
    fn go(&mut self, tell: &mut dyn FnMut(Found) -> Result<()>) -> Result<bool> {
        while let Some(top) = self.stack.last_mut() {
            if self.run.stopping() {
                return Ok(false);
            }
            let Some(Page { folders, names, next }) = &mut top.page else {
                self.look(tell)?;
                continue;
            };
            if let Some(name) = folders.next() {
                let path = below(&top.path, &name);
                top.level.inside = Some(Inside { names: *names, name });
                self.stack.push(Folder { path, level: Level::default(), page: None, saved: false });
            } else if let Some(next) = next.take().filter(|next| Some(next) != top.level.page.as_ref()) {
                (top.level, top.page) = (Level { page: Some(next), inside: None }, None);
            } else {
                self.stack.pop();
            }
        }
        Ok(true)
    }

    /// Looks at the next page of the innermost folder; a folder that can't be listed is left.
    fn look(&mut self, tell: &mut dyn FnMut(Found) -> Result<()>) -> Result<()> {
        let folders = self.stack.iter().map(|folder| folder.level.clone()).collect();
        tell(Found::Place(Place { paths: self.paths, folders }))?;
        let Some(Folder { path, level, page, saved }) = self.stack.last_mut() else { return Ok(()) };
        let from_before = std::mem::take(saved) && level.page.is_some();
        let listed = match persist(self.run, || self.target.list(path, level.page.as_deref())) {
            Ok(listed) => listed,
            // Where it went on may mean nothing to who is asked now, whatever that calls it: then from the start, once.
            Err(_) if from_before => {
                *level = Level::default();
                return Ok(());
            }
            Err(error) => {
                tell(Found::Failed(path.clone(), format!("can't list it: {error}")))?;
                self.stack.pop();
                return Ok(());
            }
        };
        let names = hash(&listed.entries);
        let before = level.inside.as_ref();
        let told = before.is_some_and(|inside| inside.names == names);
        let mut folders = Vec::new();
        for entry in &listed.entries {
            let path = below(path, &entry.name);
            match entry.attr.kind {
                FileKind::File if !told && self.filter.takes(&path) => {
                    tell(Found::File(Record::new(path, &entry.attr)))?;
                }
                FileKind::Directory if self.filter.enters(&path) => folders.push(entry.name.clone()),
                // A link's own bytes are its name; what it leads to is found under its own name, if it is below.
                FileKind::File | FileKind::Directory | FileKind::Symlink => {}
            }
        }
        if let Some(inside) = before {
            match folders.iter().position(|name| *name == inside.name).filter(|_| told) {
                Some(at) => drop(folders.drain(..=at)),
                None => folders.retain(|name| may_follow(name, &inside.name)),
            }
        }
        *page = Some(Page { folders: folders.into_iter(), names, next: listed.next });
        Ok(())
    }
}

/// Asks again, with growing pauses, while the group or its under-store can't answer.
pub(crate) fn persist<T>(run: &Run, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let mut tries = 0;
    loop {
        match ask() {
            Err(error) if tries < crate::run::TRIES && error.kind().retry() != Retry::Never && !run.stopping() => {
                run.change(|p| p.why = error.to_string());
                run.pause(crate::run::FIRST_PAUSE * (1 << tries));
                tries += 1;
            }
            result => {
                if tries > 0 && result.is_ok() {
                    run.change(|p| p.why.clear());
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
        let filter = Filter::new(&words(&["*.bin", "top/*/x"]), &words(&["tmp", "/a/**"])).unwrap();
        assert!(filter.takes(b"deep/er/1.bin") && filter.takes(b"top/b/x") && !filter.takes(b"top/b/c/x"));
        assert!(!filter.takes(b"a/1.bin") && !filter.takes(b"a/b/1.bin") && !filter.takes(b"1.txt"));
        assert!(!filter.enters(b"b/tmp") && filter.enters(b"b/tmp2"));
        assert!(filter.takes(b"\xff\xfe.bin"));
        let error = Filter::new(&words(&["a/***"]), &[]).unwrap_err();
        assert!(error.contains("a/***") && error.contains("character"), "{error}");
    }
}
