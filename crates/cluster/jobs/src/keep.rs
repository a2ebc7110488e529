//! Where jobs are kept so that they outlive the process that runs them, and which of several processes works on one. It
//! knows nothing of running them.

use crate::progress::Progress;
use crate::run::Checkpoint;
use crate::spec::Spec;
use serde::{Deserialize, Serialize};
use spurline_types::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// A job as it is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// What it is to do.
    pub spec: Spec,
    /// How far it was when it was saved.
    #[serde(flatten)]
    pub(crate) checkpoint: Checkpoint,
}

impl Kept {
    /// A job that has not begun.
    pub fn new(spec: Spec) -> Self {
        Kept { spec, checkpoint: Checkpoint::default() }
    }

    /// How far it was.
    pub fn progress(&self) -> &Progress {
        &self.checkpoint.progress
    }

    /// What it is to do and how far it was, each as JSON. The latter is at most `most` bytes long, if need be by naming
    /// fewer of the files that failed; all are counted.
    ///
    /// # Errors
    /// When it can't be written so.
    pub fn to_parts(&self, most: usize) -> Result<(Vec<u8>, Vec<u8>)> {
        let wrong = |e: serde_json::Error| Error::new(ErrorKind::Corrupt, format!("the job can't be written: {e}"));
        let spec = serde_json::to_vec(&self.spec).map_err(wrong)?;
        let mut state = serde_json::to_vec(&self.checkpoint).map_err(wrong)?;
        let mut shorter = self.checkpoint.clone();
        while state.len() > most && !shorter.progress.failed.is_empty() {
            let room = shorter.progress.failed.len() * most / state.len();
            shorter.progress.failed.truncate(room);
            shorter.failed_by.truncate(room);
            state = serde_json::to_vec(&shorter).map_err(wrong)?;
        }
        Ok((spec, state))
    }

    /// A job of what [`Kept::to_parts`] gave.
    ///
    /// # Errors
    /// When they are no job that this version knows.
    pub fn from_parts(spec: &[u8], state: &[u8]) -> Result<Self> {
        let wrong = |e| Error::new(ErrorKind::Corrupt, format!("it is no job that this version knows: {e}"));
        Ok(Kept {
            spec: serde_json::from_slice(spec).map_err(wrong)?,
            checkpoint: serde_json::from_slice(state).map_err(wrong)?,
        })
    }
}

/// Keeps jobs by their names. What is not said here of several processes holds for a place that one process has alone.
pub trait Keep: Send + Sync {
    /// Keeps a job that begins here, in the place of what was kept so before; answers the one that is in its way, if
    /// another process works on it.
    ///
    /// # Errors
    /// When it can't be kept.
    fn begin(&self, id: &str, job: &Kept) -> Result<Option<Kept>> {
        self.save(id, job).map(|()| None)
    }
    /// Keeps how far a job of this process is.
    ///
    /// # Errors
    /// When it can't be kept; `PermissionDenied` when it is another process's by now.
    fn save(&self, id: &str, job: &Kept) -> Result<()>;
    /// The jobs that this process goes on with when it starts. One that can't be understood is put aside and left out, with
    /// a line in the log.
    ///
    /// # Errors
    /// When they can't be read.
    fn load(&self) -> Result<Vec<(String, Kept)>>;
    /// Whether this process may work on what it began: not when others have to think that it is gone.
    fn holds(&self) -> bool {
        true
    }
    /// A job that another process may have.
    ///
    /// # Errors
    /// When it can't be read.
    fn read(&self, _id: &str) -> Result<Option<Kept>> {
        Ok(None)
    }
    /// All jobs that other processes may have whose names begin with `prefix`.
    ///
    /// # Errors
    /// When they can't be read.
    fn others(&self, _prefix: &str) -> Result<Vec<(String, Kept)>> {
        Ok(Vec::new())
    }
    /// Asks the other process that works on a job to end it; answers whether it is under way.
    ///
    /// # Errors
    /// When that can't be said to it.
    fn stop(&self, _id: &str) -> Result<bool> {
        Ok(false)
    }
    /// Leaves a job to other processes, which go on from what was saved last.
    fn leave(&self, _id: &str) {}
    /// Forgets a job.
    ///
    /// # Errors
    /// When it can't be forgotten.
    fn remove(&self, id: &str) -> Result<()>;
}

/// Keeps nothing: jobs end with the process.
pub struct NoKeep;

impl Keep for NoKeep {
    fn save(&self, _id: &str, _job: &Kept) -> Result<()> {
        Ok(())
    }
    fn load(&self) -> Result<Vec<(String, Kept)>> {
        Ok(Vec::new())
    }
    fn remove(&self, _id: &str) -> Result<()> {
        Ok(())
    }
}

/// Keeps each job as one file of a directory, replaced as a whole.
pub struct DirKeep {
    dir: PathBuf,
}

impl DirKeep {
    /// Uses `dir`, which is made if it is not there.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn open(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(format_args!("{}", dir.display()), &e))?;
        Ok(DirKeep { dir: dir.to_owned() })
    }

    fn file(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }
}

impl Keep for DirKeep {
    fn save(&self, id: &str, job: &Kept) -> Result<()> {
        let path = self.file(id);
        let cant = |e: std::io::Error| Error::io(format_args!("{}", path.display()), &e);
        let text = serde_json::to_vec(job).map_err(|e| cant(e.into()))?;
        let mut file = tempfile::NamedTempFile::new_in(&self.dir).map_err(cant)?;
        std::io::Write::write_all(&mut file, &text).map_err(cant)?;
        // The name must not be there before the bytes are, whenever the power goes.
        file.as_file().sync_all().map_err(cant)?;
        file.persist(&path).map_err(|e| cant(e.error))?;
        Ok(())
    }

    fn load(&self) -> Result<Vec<(String, Kept)>> {
        let cant = |e: std::io::Error| Error::io(format_args!("{}", self.dir.display()), &e);
        let mut jobs = Vec::new();
        for entry in std::fs::read_dir(&self.dir).map_err(cant)? {
            let path = entry.map_err(cant)?.path();
            let (Some(id), true) =
                (path.file_stem().and_then(|s| s.to_str()), path.extension().is_some_and(|e| e == "json"))
            else {
                continue;
            };
            let text = std::fs::read(&path).map_err(|e| {
                let error = Error::io(format_args!("job {id} can't be read from {}", path.display()), &e);
                let remedy = "let this user read it, or move it away: the job is not gone on with then";
                Error::new(error.kind(), format!("{}; {remedy}", error.message()))
            })?;
            match serde_json::from_slice(&text) {
                Ok(job) => jobs.push((id.to_owned(), job)),
                Err(why) => {
                    // The same job may begin anew, in its place; an older one put aside is replaced.
                    let aside = path.with_extension("json.spoilt");
                    std::fs::rename(&path, &aside).map_err(cant)?;
                    tracing::error!(
                        "{} is no job ({why}): it is kept as {} and not gone on with; start the job again",
                        path.display(),
                        aside.display()
                    );
                }
            }
        }
        Ok(jobs)
    }

    fn remove(&self, id: &str) -> Result<()> {
        match std::fs::remove_file(self.file(id)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format_args!("{}", self.file(id).display()), &e))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spoilt_job_is_put_aside_and_one_that_can_not_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let keep = DirKeep::open(dir.path()).unwrap();
        std::fs::write(keep.file("load-1"), "{").unwrap();
        assert!(keep.load().unwrap().is_empty());
        assert!(!keep.file("load-1").exists());
        assert_eq!(std::fs::read(dir.path().join("load-1.json.spoilt")).unwrap(), b"{");
        assert!(keep.load().unwrap().is_empty());
        // A directory can't be read by anybody; the rights of a file would be no hindrance to root.
        std::fs::create_dir(keep.file("load-2")).unwrap();
        let error = keep.load().unwrap_err();
        assert!(error.message().contains("load-2.json") && error.message().contains("move it away"), "{error}");
    }
}
