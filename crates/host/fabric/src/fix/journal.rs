//! The journal of changes, for their reversal: values of the running host, and copies of files. The journal is a file below the
//! same root as these files.

use super::FixError;
use super::apply::apply_change;
use super::files::WantedFile;
use crate::change::HostChange;
use serde::{Deserialize, Serialize};
use spurline_sys::replace_file;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The path below the root.
const JOURNAL_FILE: &str = "var/lib/spurline/net-fix.json";
/// Suffix of a file's copy; none of the systems reads files with this suffix.
const COPY_SUFFIX: &str = "spurline-before";

/// Changes that were made and not undone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FixJournal {
    /// Changes of the running host, in the order of application.
    pub changes: Vec<HostChange>,
    /// Files written.
    pub files: Vec<WrittenFile>,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFile {
    /// Below the root.
    pub path: String,
    /// Path of the copy of the previous file; `None` when there was none.
    pub before: Option<String>,
    /// The content that was written.
    pub text: String,
}

/// An undone change or file, and the result.
pub type RevertResult = (String, Result<(), FixError>);

impl FixJournal {
    /// Opens the journal below a root; empty when there is none.
    ///
    /// # Errors
    /// When the journal exists and cannot be read.
    pub fn open(root: &Path) -> Result<Self, FixError> {
        match fs::read(root.join(JOURNAL_FILE)) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|e| FixError::File(format!("/{JOURNAL_FILE}: {e}; move it away to start a new one"))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(FixJournal::default()),
            Err(e) => Err(FixError::from_io(format!("/{JOURNAL_FILE}"), &e)),
        }
    }

    /// Whether there is nothing to undo.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.files.is_empty()
    }

    /// Applies a change to the running host and records the change at once. Returns whether anything had to be changed.
    ///
    /// # Errors
    /// As `apply_change` of the host, or when the journal cannot be written; then the change is
    /// undone.
    pub fn apply_change(&mut self, change: &HostChange, root: &Path) -> Result<bool, FixError> {
        let Some(made) = apply_change(change)? else { return Ok(false) };
        self.changes.push(made.clone());
        if let Err(e) = self.save(root) {
            self.changes.pop();
            if let Some(back) = made.back() {
                apply_change(&back)?;
            }
            return Err(e);
        }
        Ok(true)
    }

    /// Writes a file, with a copy of the previous file. Returns whether anything had to be changed.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write_file(&mut self, wanted: &WantedFile, root: &Path) -> Result<bool, FixError> {
        let path = root.join(&wanted.path);
        let now = read_optional_text(&path).map_err(|e| file_error(&wanted.path, &e))?;
        if now.as_deref() == Some(wanted.text.as_str()) {
            return Ok(false);
        }
        let known = self.files.iter().position(|f| f.path == wanted.path);
        match known {
            // The copy from before the first change is the copy to restore.
            Some(at) => self.files[at].text.clone_from(&wanted.text),
            None => {
                let before = now.is_some().then(|| backup_path(&wanted.path));
                if let Some(copy) = &before {
                    if let Some(dir) = root.join(copy).parent() {
                        fs::create_dir_all(dir).map_err(|e| file_error(&wanted.path, &e))?;
                    }
                    fs::copy(&path, root.join(copy)).map_err(|e| file_error(&wanted.path, &e))?;
                }
                self.files.push(WrittenFile { path: wanted.path.clone(), before, text: wanted.text.clone() });
            }
        }
        // Recorded before the write: undoing a write that did not happen does no harm.
        self.save(root)?;
        let mode = fs::metadata(&path).map_or(if wanted.private { 0o600 } else { 0o644 }, |m| m.permissions().mode());
        write_file(&path, wanted.text.as_bytes(), mode & 0o7777).map_err(|e| file_error(&wanted.path, &e))?;
        Ok(true)
    }

    /// Undoes everything, the last change first; what cannot be undone stays in the journal.
    ///
    /// # Errors
    /// When the journal cannot be written.
    pub fn revert_all(&mut self, root: &Path) -> Result<Vec<RevertResult>, FixError> {
        let mut report = Vec::new();
        for file in std::mem::take(&mut self.files).into_iter().rev() {
            let done = restore_file(&file, root);
            if done.is_err() {
                self.files.insert(0, file.clone());
            }
            report.push((format!("/{}", file.path), done));
        }
        for change in std::mem::take(&mut self.changes).into_iter().rev() {
            let Some(back) = change.back() else {
                report.push((format!("{} stays", change.shell_command()), Ok(())));
                continue;
            };
            let done = apply_change(&back).map(|_| ());
            if done.is_err() {
                self.changes.insert(0, change);
            }
            report.push((back.shell_command(), done));
        }
        self.save(root)?;
        Ok(report)
    }

    fn save(&self, root: &Path) -> Result<(), FixError> {
        let path = root.join(JOURNAL_FILE);
        if self.is_empty() {
            return match fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(journal_error(e)),
                _ => Ok(()),
            };
        }
        let text = serde_json::to_vec_pretty(self).map_err(|e| FixError::File(e.to_string()))?;
        // The journal contains configuration text, which may hold keys.
        write_file(&path, &text, 0o600).map_err(journal_error)
    }
}

fn journal_error(e: std::io::Error) -> FixError {
    FixError::from_io(format!("/{JOURNAL_FILE}"), &e)
}

/// Copies are in another directory, so that no system reads a copy as configuration.
fn backup_path(path: &str) -> String {
    format!("var/lib/spurline/{}.{COPY_SUFFIX}", path.replace('/', "_"))
}

/// The text of a file; `None` without a file.
fn read_optional_text(path: &Path) -> std::io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn restore_file(file: &WrittenFile, root: &Path) -> Result<(), FixError> {
    let path = root.join(&file.path);
    let now = read_optional_text(&path).map_err(|e| file_error(&file.path, &e))?;
    if now.as_deref().is_some_and(|now| now != file.text) {
        let copy = file.before.as_ref().map_or("nothing".to_owned(), |b| format!("/{b}"));
        return Err(FixError::File(format!(
            "/{} was changed since it was written; the previous content is in {copy}: repair it by hand",
            file.path
        )));
    }
    let Some(copy) = &file.before else {
        return match fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(file_error(&file.path, &e)),
            _ => Ok(()),
        };
    };
    let copy = root.join(copy);
    let bytes = fs::read(&copy).map_err(|e| file_error(&file.path, &e))?;
    let mode = fs::metadata(&copy).map_or(0o600, |m| m.permissions().mode());
    write_file(&path, &bytes, mode & 0o7777).map_err(|e| file_error(&file.path, &e))?;
    fs::remove_file(copy).map_err(|e| file_error(&file.path, &e))
}

/// Replaces a file below a directory; a missing directory is made.
fn write_file(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    replace_file(path, bytes, mode)
}

fn file_error(path_below_root: &str, error: &std::io::Error) -> FixError {
    FixError::from_io(format!("/{path_below_root}"), error)
}
