//! Jobs of one group in the store that several coordinators share, as the board wants them kept.

use serde_json::{Map, Value};
use spurline_group::{Begun, JobStore, StoredJob};
use spurline_jobs::{Keep, Kept};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The jobs of one group, under its name in keys.
pub struct Shared {
    /// The store.
    pub store: Arc<JobStore>,
    /// The group, as it stands in keys.
    pub group: String,
}

fn wrong(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Corrupt, format!("it is no job that this version knows: {error}"))
}

/// In two parts: what it is to do is written once, how far it is every two seconds.
fn to_stored(kept: &Kept) -> Result<StoredJob> {
    let mut state = serde_json::to_value(kept).map_err(wrong)?;
    let spec = state["spec"].take();
    Ok(StoredJob { spec: spec.to_string().into_bytes(), state: state.to_string().into_bytes() })
}

/// The two parts as one again.
///
/// # Errors
/// When they make no sense.
pub fn from_stored(stored: &StoredJob) -> Result<Kept> {
    let mut job: Map<String, Value> = serde_json::from_slice(&stored.state).map_err(wrong)?;
    job.insert("spec".to_owned(), serde_json::from_slice(&stored.spec).map_err(wrong)?);
    serde_json::from_value(Value::Object(job)).map_err(wrong)
}

impl Keep for Shared {
    fn begin(&self, id: &str, job: &Kept) -> Result<Option<Kept>> {
        match self.store.begin(&self.group, id, &to_stored(job)?)? {
            Begun::Mine => Ok(None),
            Begun::Elsewhere(stored) => from_stored(&stored).map(Some),
        }
    }

    fn save(&self, id: &str, job: &Kept) -> Result<()> {
        if self.store.save(&self.group, id, &to_stored(job)?, job.progress().state.ended())? {
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

    fn others(&self) -> Result<Vec<(String, Kept)>> {
        let good = |(id, stored): (String, StoredJob)| from_stored(&stored).ok().map(|kept| (id, kept));
        Ok(self.store.all(&self.group)?.into_iter().filter_map(good).collect())
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
