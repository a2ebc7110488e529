//! What was changed, so that it can be taken back: values of the running host and files with their copies. The journal
//! is a file below the same root as the files it is about.

use super::FixError;
use super::apply::apply;
use super::files::Wanted;
use crate::change::Change;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Below the root.
const JOURNAL: &str = "var/lib/spurline/net-fix.json";
/// Added to the name of a file's copy; none of the systems reads files that end so.
const COPY: &str = "spurline-before";

/// What was done and is not taken back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Journal {
    /// Changes of the running host, in the order they were made.
    pub changes: Vec<Change>,
    /// Files written.
    pub files: Vec<Written>,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Below the root.
    pub path: String,
    /// The copy of what was there before; none when nothing was.
    pub before: Option<String>,
    /// What was written.
    pub text: String,
}

/// What was taken back, and how that went.
pub type TakenBack = (String, Result<(), FixError>);

impl Journal {
    /// Opens the journal below a root; empty when there is none.
    ///
    /// # Errors
    /// When it is there and can't be read.
    pub fn open(root: &Path) -> Result<Self, FixError> {
        match fs::read(root.join(JOURNAL)) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|e| FixError::File(format!("/{JOURNAL}: {e}; move it away to begin anew"))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Journal::default()),
            Err(e) => Err(FixError::io(format!("/{JOURNAL}"), &e)),
        }
    }

    /// Whether there is nothing to take back.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.files.is_empty()
    }

    /// Makes a change of the running host and notes it at once; says whether anything had to be changed.
    ///
    /// # Errors
    /// As [`apply`], or when the journal can't be written; then the change is taken back.
    pub fn apply(&mut self, change: &Change, root: &Path) -> Result<bool, FixError> {
        let Some(made) = apply(change)? else { return Ok(false) };
        self.changes.push(made.clone());
        if let Err(e) = self.save(root) {
            self.changes.pop();
            if let Some(back) = made.back() {
                apply(&back)?;
            }
            return Err(e);
        }
        Ok(true)
    }

    /// Writes a file, with a copy of what was there before; says whether anything had to be changed.
    ///
    /// # Errors
    /// When a file can't be written.
    pub fn write(&mut self, wanted: &Wanted, root: &Path) -> Result<bool, FixError> {
        let path = root.join(&wanted.path);
        let failed = |e: std::io::Error| FixError::io(format!("/{}", wanted.path), &e);
        let now = text_of(&path).map_err(failed)?;
        if now.as_deref() == Some(wanted.text.as_str()) {
            return Ok(false);
        }
        let known = self.files.iter().position(|f| f.path == wanted.path);
        match known {
            // The copy of before the first time is the one to go back to.
            Some(at) => self.files[at].text.clone_from(&wanted.text),
            None => {
                let before = now.is_some().then(|| copy_of(&wanted.path));
                if let Some(copy) = &before {
                    if let Some(dir) = root.join(copy).parent() {
                        fs::create_dir_all(dir).map_err(failed)?;
                    }
                    fs::copy(&path, root.join(copy)).map_err(failed)?;
                }
                self.files.push(Written { path: wanted.path.clone(), before, text: wanted.text.clone() });
            }
        }
        // Noted before it is done: taking back what was not done yet does no harm.
        self.save(root)?;
        let mode = fs::metadata(&path).map_or(if wanted.private { 0o600 } else { 0o644 }, |m| m.permissions().mode());
        replace(&path, wanted.text.as_bytes(), mode & 0o7777).map_err(failed)?;
        Ok(true)
    }

    /// Takes everything back, the last first; what can't be taken back stays in the journal.
    ///
    /// # Errors
    /// When the journal can't be written.
    pub fn revert(&mut self, root: &Path) -> Result<Vec<TakenBack>, FixError> {
        let mut report = Vec::new();
        for file in std::mem::take(&mut self.files).into_iter().rev() {
            let done = restore(&file, root);
            if done.is_err() {
                self.files.insert(0, file.clone());
            }
            report.push((format!("/{}", file.path), done));
        }
        for change in std::mem::take(&mut self.changes).into_iter().rev() {
            let Some(back) = change.back() else {
                report.push((format!("{} stays", change.command()), Ok(())));
                continue;
            };
            let done = apply(&back).map(|_| ());
            if done.is_err() {
                self.changes.insert(0, change);
            }
            report.push((back.command(), done));
        }
        self.save(root)?;
        Ok(report)
    }

    fn save(&self, root: &Path) -> Result<(), FixError> {
        let path = root.join(JOURNAL);
        let failed = |e: std::io::Error| FixError::io(format!("/{JOURNAL}"), &e);
        if self.is_empty() {
            return match fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(failed(e)),
                _ => Ok(()),
            };
        }
        let text = serde_json::to_vec_pretty(self).map_err(|e| FixError::File(e.to_string()))?;
        // Configuration files may hold keys, and their text is in it.
        replace(&path, &text, 0o600).map_err(failed)
    }
}

/// Copies lie apart, so that no system takes them for configuration.
fn copy_of(path: &str) -> String {
    format!("var/lib/spurline/{}.{COPY}", path.replace('/', "_"))
}

/// What is in a file; `None` when there is none.
fn text_of(path: &Path) -> std::io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn restore(file: &Written, root: &Path) -> Result<(), FixError> {
    let path = root.join(&file.path);
    let failed = |e: std::io::Error| FixError::io(format!("/{}", file.path), &e);
    let now = text_of(&path).map_err(failed)?;
    if now.as_deref().is_some_and(|now| now != file.text) {
        let copy = file.before.as_ref().map_or("nothing".to_owned(), |b| format!("/{b}"));
        return Err(FixError::File(format!(
            "/{} was changed since it was written; what was there before is in {copy}: put it right by hand",
            file.path
        )));
    }
    let Some(copy) = &file.before else {
        return match fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(failed(e)),
            _ => Ok(()),
        };
    };
    let copy = root.join(copy);
    let bytes = fs::read(&copy).map_err(failed)?;
    let mode = fs::metadata(&copy).map_or(0o600, |m| m.permissions().mode());
    replace(&path, &bytes, mode & 0o7777).map_err(failed)?;
    fs::remove_file(copy).map_err(failed)
}

/// All of the new text or all of the old, whatever happens in between.
fn replace(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let dir = path.parent().map_or(PathBuf::from("."), Path::to_owned);
    fs::create_dir_all(&dir)?;
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("file");
    // Systems that read directories leave out names with a leading dot.
    let beside = dir.join(format!(".{name}.spurline-{}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&beside)?;
    file.write_all(bytes)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    fs::rename(&beside, path)
}
