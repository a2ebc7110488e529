//! Jobs of one group in the store that several coordinators share, as the board wants them kept.

use spurline_jobs::{Keep, Kept};
use spurline_membership::{Begun, JobStore, StoredJob};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The jobs of one group, under its name in keys.
pub struct Shared {
    /// The store.
    pub store: Arc<JobStore>,
    /// The group, as it stands in keys.
    pub group: String,
}

/// In two parts: what it is to do is written once, how far it is every two seconds.
fn to_stored(kept: &Kept) -> Result<StoredJob> {
    let (spec, state) = kept.to_parts(JobStore::MOST)?;
    Ok(StoredJob { spec, state })
}

/// The two parts as one again.
///
/// # Errors
/// When they make no sense.
pub fn from_stored(stored: &StoredJob) -> Result<Kept> {
    Kept::from_parts(&stored.spec, &stored.state)
}

impl Keep for Shared {
    fn begin(&self, id: &str, job: &Kept) -> Result<Option<Kept>> {
        match self.store.begin(&self.group, id, &to_stored(job)?)? {
            Begun::Mine => Ok(None),
            Begun::Elsewhere(stored) => from_stored(&stored).map(Some),
        }
    }

    fn save(&self, id: &str, job: &Kept) -> Result<()> {
        if self.store.save(&self.group, id, &to_stored(job)?.state, job.progress().state.ended())? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::PermissionDenied, "another coordinator has it by now"))
    }

    fn load(&self) -> Result<Vec<(String, Kept)>> {
        // Who looks for jobs that nobody works on finds those of before, too.
        Ok(Vec::new())
    }

    fn remove(&self, _id: &str) -> Result<()> {
        // They go by themselves.
        Ok(())
    }

    fn holds(&self) -> bool {
        self.store.holds()
    }

    fn read(&self, id: &str) -> Result<Option<Kept>> {
        self.store.read(&self.group, id)?.as_ref().map(from_stored).transpose()
    }

    fn others(&self, prefix: &str) -> Result<Vec<(String, Kept)>> {
        let good = |(id, stored): (String, StoredJob)| from_stored(&stored).ok().map(|kept| (id, kept));
        Ok(self.store.all(&self.group, prefix)?.into_iter().filter_map(good).collect())
    }

    fn stop(&self, id: &str) -> Result<bool> {
        self.store.stop(&self.group, id)
    }

    fn leave(&self, id: &str) {
        if let Err(error) = self.store.release(&self.group, id) {
            tracing::warn!("job {id} is left to other coordinators only when this one's lease is over: {error}");
        }
    }
}
