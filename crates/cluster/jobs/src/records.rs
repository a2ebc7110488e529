//! Stores jobs beyond the life of a process, and decides which of several processes runs a job. Knows nothing of running jobs.

use crate::progress::JobProgress;
use crate::run::JobCheckpoint;
use crate::spec::JobSpec;
use serde::{Deserialize, Serialize};
use spurline_sys::replace_file;
use spurline_types::{Error, ErrorKind, IoContext, Result};
use std::path::{Path, PathBuf};

/// A stored job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The specification.
    pub spec: JobSpec,
    /// The state when saved.
    #[serde(flatten)]
    pub(crate) checkpoint: JobCheckpoint,
}

impl JobRecord {
    /// A job that has not begun.
    pub fn new(spec: JobSpec) -> Self {
        JobRecord { spec, checkpoint: JobCheckpoint::default() }
    }

    /// The progress.
    pub fn progress(&self) -> &JobProgress {
        &self.checkpoint.progress
    }

    /// The specification and the state, each as JSON. The state is at most `most` bytes long; if necessary, names of failed files
    /// are left out, while the counts stay.
    ///
    /// # Errors
    /// When the state cannot be made short enough.
    pub fn to_parts(&self, most: usize) -> Result<(Vec<u8>, Vec<u8>)> {
        let spec = serde_json::to_vec(&self.spec).map_err(unwritable_error)?;
        let mut state = serde_json::to_vec(&self.checkpoint).map_err(unwritable_error)?;
        let mut shorter = self.checkpoint.clone();
        while state.len() > most && !shorter.progress.failed.is_empty() {
            let room = shorter.progress.failed.len() * most / state.len();
            shorter.progress.failed.truncate(room);
            shorter.failed_by.truncate(room);
            state = serde_json::to_vec(&shorter).map_err(unwritable_error)?;
        }
        Ok((spec, state))
    }

    /// Parses the result of [`JobRecord::to_parts`].
    ///
    /// # Errors
    /// When this version cannot read the parts.
    pub fn from_parts(spec: &[u8], state: &[u8]) -> Result<Self> {
        Ok(JobRecord {
            spec: serde_json::from_slice(spec).map_err(unreadable_error)?,
            checkpoint: serde_json::from_slice(state).map_err(unreadable_error)?,
        })
    }
}

fn unwritable_error(e: serde_json::Error) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the job can't be written: {e}"))
}

/// Stores jobs by name. The default methods suit a store that only a single process uses.
pub trait JobRecords: Send + Sync {
    /// Stores a job that begins here, replacing an older record. Returns the conflicting job if another process is running the
    /// job.
    ///
    /// # Errors
    /// When the job cannot be stored.
    fn begin_job(&self, id: &str, job: &JobRecord) -> Result<Option<JobRecord>> {
        self.save_job(id, job).map(|()| None)
    }
    /// Saves the state of a job of this process.
    ///
    /// # Errors
    /// When the job cannot be saved; `PermissionDenied` when another process owns the job now.
    fn save_job(&self, id: &str, job: &JobRecord) -> Result<()>;
    /// The jobs to resume at start. An unreadable record is set aside and logged.
    ///
    /// # Errors
    /// When the records cannot be read.
    fn load_jobs(&self) -> Result<Vec<(String, JobRecord)>>;
    /// Whether this process may go on with jobs; false when others must assume that this process is gone.
    fn may_work(&self) -> bool {
        true
    }
    /// A job that may belong to another process.
    ///
    /// # Errors
    /// When the record cannot be read.
    fn read_job(&self, _id: &str) -> Result<Option<JobRecord>> {
        Ok(None)
    }
    /// All jobs of other processes with names that begin with `prefix`.
    ///
    /// # Errors
    /// When the records cannot be read.
    fn other_jobs(&self, _prefix: &str) -> Result<Vec<(String, JobRecord)>> {
        Ok(Vec::new())
    }
    /// Requests the stop of a job in the process that runs the job; returns whether the job is running.
    ///
    /// # Errors
    /// When that process cannot be notified.
    fn request_stop(&self, _id: &str) -> Result<bool> {
        Ok(false)
    }
    /// Releases a job to other processes, which resume from the last saved state.
    fn leave_job(&self, _id: &str) {}
    /// Removes a job.
    ///
    /// # Errors
    /// When the job cannot be removed.
    fn remove_job(&self, id: &str) -> Result<()>;
}

/// Stores nothing: jobs end with the process.
pub struct NoJobRecords;

impl JobRecords for NoJobRecords {
    fn save_job(&self, _id: &str, _job: &JobRecord) -> Result<()> {
        Ok(())
    }
    fn load_jobs(&self) -> Result<Vec<(String, JobRecord)>> {
        Ok(Vec::new())
    }
    fn remove_job(&self, _id: &str) -> Result<()> {
        Ok(())
    }
}

/// Stores each job as a file in a directory, replaced atomically.
pub struct DirJobRecords {
    dir: PathBuf,
}

impl DirJobRecords {
    /// Uses `dir`, created if missing.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn open(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(format_args!("{}", dir.display()), &e))?;
        Ok(DirJobRecords { dir: dir.to_owned() })
    }

    fn file(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }
}

impl JobRecords for DirJobRecords {
    fn save_job(&self, id: &str, job: &JobRecord) -> Result<()> {
        let path = self.file(id);
        let text = serde_json::to_vec(job).map_err(std::io::Error::from).io_context(path.display())?;
        replace_file(&path, &text, 0o600).io_context(path.display())
    }

    fn load_jobs(&self) -> Result<Vec<(String, JobRecord)>> {
        let mut jobs = Vec::new();
        for entry in std::fs::read_dir(&self.dir).io_context(self.dir.display())? {
            let path = entry.io_context(self.dir.display())?.path();
            let (Some(id), true) =
                (path.file_stem().and_then(|s| s.to_str()), path.extension().is_some_and(|e| e == "json"))
            else {
                continue;
            };
            let text = std::fs::read(&path).map_err(|e| {
                let error = Error::io(format_args!("job {id} can't be read from {}", path.display()), &e);
                let remedy = "make it readable for this user, or move it away to drop the job";
                Error::new(error.kind(), format!("{}; {remedy}", error.message()))
            })?;
            match serde_json::from_slice(&text) {
                Ok(job) => jobs.push((id.to_owned(), job)),
                Err(why) => {
                    // The same job may start again under the same name; an older file set aside is replaced.
                    let aside = path.with_extension("json.spoilt");
                    std::fs::rename(&path, &aside).io_context(self.dir.display())?;
                    tracing::error!(
                        "{} is not a valid job ({why}): moved to {} and not resumed; start the job again",
                        path.display(),
                        aside.display()
                    );
                }
            }
        }
        Ok(jobs)
    }

    fn remove_job(&self, id: &str) -> Result<()> {
        match std::fs::remove_file(self.file(id)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format_args!("{}", self.file(id).display()), &e))
            }
            _ => Ok(()),
        }
    }
}

fn unreadable_error(e: serde_json::Error) -> Error {
    Error::new(ErrorKind::Corrupt, format!("this version cannot read the job: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spoilt_job_is_put_aside_and_one_that_can_not_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let keep = DirJobRecords::open(dir.path()).unwrap();
        std::fs::write(keep.file("load-1"), "{").unwrap();
        assert!(keep.load_jobs().unwrap().is_empty());
        assert!(!keep.file("load-1").exists());
        assert_eq!(std::fs::read(dir.path().join("load-1.json.spoilt")).unwrap(), b"{");
        assert!(keep.load_jobs().unwrap().is_empty());
        // A directory is unreadable even for root, unlike a file without permissions.
        std::fs::create_dir(keep.file("load-2")).unwrap();
        let error = keep.load_jobs().unwrap_err();
        assert!(error.message().contains("load-2.json") && error.message().contains("move it away"), "{error}");
    }
}
