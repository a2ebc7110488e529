//! Finds the files of a job: folders depth first, page by page, filtered by patterns.

use crate::spec::Spec;
use crate::spool::Record;
use crate::{Run, Target};
use glob::{MatchOptions, Pattern};
use spurline_types::{FileKind, Result, Retry};

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

/// Finds all files and gives each to `found`; folders that can't be listed and paths that are not there are failures of
/// the job, and the walk goes on.
pub(crate) fn walk(
    target: &dyn Target,
    spec: &Spec,
    filter: &Filter,
    run: &Run,
    found: &mut dyn FnMut(Record) -> Result<()>,
) -> Result<()> {
    for path in &spec.paths {
        let path = path.trim_matches('/').as_bytes();
        if run.stopping() {
            return Ok(());
        }
        let attr = match persist(run, || target.lookup(path)) {
            Ok(attr) => attr,
            Err(error) => {
                run.change(|p| p.fail(path, &error.to_string()));
                continue;
            }
        };
        match attr.kind {
            FileKind::File if filter.takes(path) => found(Record::new(path.to_vec(), &attr))?,
            FileKind::File | FileKind::Symlink => {}
            FileKind::Directory if spec.listed => {
                run.change(|p| p.fail(path, "a folder: the list has to name files"));
            }
            FileKind::Directory => folders(target, path, filter, run, found)?,
        }
    }
    Ok(())
}

fn folders(
    target: &dyn Target,
    top: &[u8],
    filter: &Filter,
    run: &Run,
    found: &mut dyn FnMut(Record) -> Result<()>,
) -> Result<()> {
    let mut waiting = vec![top.to_vec()];
    while let Some(folder) = waiting.pop() {
        let mut cursor: Option<Vec<u8>> = None;
        loop {
            if run.stopping() {
                return Ok(());
            }
            let page = match persist(run, || target.list(&folder, cursor.as_deref())) {
                Ok(page) => page,
                Err(error) => {
                    run.change(|p| p.fail(&folder, &format!("can't list it: {error}")));
                    break;
                }
            };
            for entry in page.entries {
                let mut path = folder.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(&entry.name);
                match entry.attr.kind {
                    FileKind::File if filter.takes(&path) => found(Record::new(path, &entry.attr))?,
                    FileKind::Directory if filter.enters(&path) => waiting.push(path),
                    // A link's own bytes are its name; what it leads to is found under its own name, if it is below.
                    FileKind::File | FileKind::Directory | FileKind::Symlink => {}
                }
            }
            match page.next {
                Some(next) if Some(&next) != cursor.as_ref() => cursor = Some(next),
                _ => break,
            }
        }
    }
    Ok(())
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
