//! Records of a group's jobs in the store that several coordinators share.

use spurline_jobs::{JobRecord, JobRecords};
use spurline_membership::{BeginResult, JobStore, StoredJob};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The records of a group.
pub struct SharedJobRecords {
    pub store: Arc<JobStore>,
    /// The group, as part of a key.
    pub group: String,
}

/// In two parts: the specification is written once, the progress every two seconds.
fn to_stored(kept: &JobRecord) -> Result<StoredJob> {
    let (spec, state) = kept.to_parts(JobStore::MAX_JOB_BYTES)?;
    Ok(StoredJob { spec, state })
}

/// Joins the two parts.
///
/// # Errors
/// When the records are invalid.
pub fn from_stored(stored: &StoredJob) -> Result<JobRecord> {
    JobRecord::from_parts(&stored.spec, &stored.state)
}

impl JobRecords for SharedJobRecords {
    fn begin_job(&self, id: &str, job: &JobRecord) -> Result<Option<JobRecord>> {
        match self.store.begin_job(&self.group, id, &to_stored(job)?)? {
            BeginResult::Mine => Ok(None),
            BeginResult::Elsewhere(stored) => from_stored(&stored).map(Some),
        }
    }

    fn save_job(&self, id: &str, job: &JobRecord) -> Result<()> {
        if self.store.save_state(&self.group, id, &to_stored(job)?.state, job.progress().state.is_ended())? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::PermissionDenied, "another coordinator has it by now"))
    }

    fn load_jobs(&self) -> Result<Vec<(String, JobRecord)>> {
        // The search for jobs without a worker also finds jobs of an earlier start.
        Ok(Vec::new())
    }

    fn remove_job(&self, _id: &str) -> Result<()> {
        // The store removes such records.
        Ok(())
    }

    fn may_work(&self) -> bool {
        self.store.holds_lease()
    }

    fn read_job(&self, id: &str) -> Result<Option<JobRecord>> {
        self.store.read_job(&self.group, id)?.as_ref().map(from_stored).transpose()
    }

    fn other_jobs(&self, prefix: &str) -> Result<Vec<(String, JobRecord)>> {
        Ok(self
            .store
            .list_jobs(&self.group, prefix)?
            .into_iter()
            .filter_map(|(id, stored)| from_stored(&stored).ok().map(|kept| (id, kept)))
            .collect())
    }

    fn request_stop(&self, id: &str) -> Result<bool> {
        self.store.stop(&self.group, id)
    }

    fn leave_job(&self, id: &str) {
        if let Err(error) = self.store.release_job(&self.group, id) {
            tracing::warn!("job {id} is left to other coordinators only when this one's lease is over: {error}");
        }
    }
}
