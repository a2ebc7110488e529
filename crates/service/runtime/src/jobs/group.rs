//! The jobs of a coordinator's groups. Each group has a job manager. The records lie beside the coordinator's node list, so that
//! a restart resumes the jobs, or in a store shared by several coordinators, where each takes over jobs without a worker.

use super::shared_records::{SharedJobRecords, from_stored};
use super::target;
use crate::group;
use crate::peers::PeerConnector;
use parking_lot::{Condvar, Mutex};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::Value;
use spurline_jobs::{DirJobRecords, JobManager, JobRecords, JobTarget, JobTotals};
use spurline_membership::{JobHandler, JobStore, Registry};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, IoContext, Result, Stats};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Time limit of a fetch request, which a node answers when all data is there.
const FETCH_TIMEOUT: Duration = Duration::from_secs(60);
/// Connections to each node, and so the most concurrent requests.
const NODE_CONNECTIONS: usize = 64;
/// A node that owes an answer and sends no heartbeat for this long is abandoned.
const FETCH_SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// How long a node that left keeps a share.
const SHARE_HOLD_TIME: Duration = Duration::from_secs(60);
/// Interval of the search for jobs without a worker.
const UNWORKED_JOBS_INTERVAL: Duration = Duration::from_secs(1);
/// Characters of a group's name that stay unchanged in a file name.
const FILE_NAME_ESCAPES: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// Opens the registry of a group.
pub type OpenRegistry = dyn Fn(&str) -> Option<Arc<dyn Registry>> + Send + Sync;

/// Access of jobs to the nodes of this coordinator's groups.
#[derive(Clone)]
struct NodeAccess {
    registry: Arc<OpenRegistry>,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
}

/// The jobs of all groups.
pub struct GroupJobs {
    dir: PathBuf,
    node_access: NodeAccess,
    managers: Mutex<BTreeMap<String, Arc<JobManager>>>,
    store: Option<Arc<JobStore>>,
    /// Jobs in the store that this release can't read: group and name.
    unreadable_jobs: Mutex<BTreeSet<(String, String)>>,
    watcher: Mutex<Option<JoinHandle<()>>>,
    stop: Mutex<bool>,
    wake: Condvar,
}

impl GroupJobs {
    /// Resumes the jobs kept in `dir`, or in the `store` that several coordinators share; `registry` opens the node
    /// lists.
    ///
    /// # Errors
    /// When the directory can't be used.
    pub fn start(
        dir: &Path,
        store: Option<Arc<JobStore>>,
        registry: Arc<OpenRegistry>,
        trust: Arc<Trust>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        std::fs::create_dir_all(dir).io_context(dir.display())?;
        let node_access = NodeAccess { registry, trust, stats };
        let jobs = Arc::new(GroupJobs {
            dir: dir.to_owned(),
            node_access,
            managers: Mutex::default(),
            store: store.clone(),
            unreadable_jobs: Mutex::default(),
            watcher: Mutex::default(),
            stop: Mutex::default(),
            wake: Condvar::new(),
        });
        if let Some(store) = store {
            let watched_jobs = Arc::clone(&jobs);
            let thread =
                std::thread::Builder::new().name("jobs-look".into()).spawn(move || watched_jobs.watch_store(&store));
            let thread = thread.map_err(|e| Error::io("a thread for the jobs' store", &e))?;
            *jobs.watcher.lock() = Some(thread);
            return Ok(jobs);
        }
        for entry in std::fs::read_dir(dir).io_context(dir.display())? {
            let entry = entry.io_context(dir.display())?;
            let name = entry.file_name();
            if let Some(name) = name.to_str().and_then(|name| percent_decode_str(name).decode_utf8().ok())
                && entry.path().is_dir()
            {
                jobs.job_manager(&name)?;
            }
        }
        Ok(jobs)
    }

    fn job_manager(&self, group: &str) -> Result<Arc<JobManager>> {
        let mut managers = self.managers.lock();
        if let Some(manager) = managers.get(group) {
            return Ok(Arc::clone(manager));
        }
        if group.is_empty() || group.len() > 255 {
            return Err(Error::new(ErrorKind::Invalid, "a group has a name of at most 255 bytes"));
        }
        let plain = utf8_percent_encode(group, FILE_NAME_ESCAPES).to_string();
        let dir = self.dir.join(&plain);
        let node_access = self.node_access.clone();
        let name = group.to_owned();
        let open = move |source: &str| node_access.open_target(&name, source);
        let keep: Arc<dyn JobRecords> = match &self.store {
            Some(store) => Arc::new(SharedJobRecords { store: Arc::clone(store), group: plain }),
            None => Arc::new(DirJobRecords::open(&dir)?),
        };
        let manager = JobManager::start(keep, Some(&dir.join("files")), Arc::new(open))?;
        managers.insert(group.to_owned(), Arc::clone(&manager));
        Ok(manager)
    }

    /// Takes over jobs without a worker, until the end.
    fn watch_store(&self, store: &JobStore) {
        let mut lost = false;
        loop {
            match self.take_over_jobs(store) {
                Ok(()) => lost = false,
                Err(error) if !lost => {
                    lost = true;
                    tracing::warn!("the jobs' store can't be looked at: {error}");
                }
                Err(_) => {}
            }
            let mut stop = self.stop.lock();
            self.wake.wait_while_for(&mut stop, |stop| !*stop, UNWORKED_JOBS_INTERVAL);
            if *stop {
                return;
            }
        }
    }

    fn take_over_jobs(&self, store: &JobStore) -> Result<()> {
        if !store.holds_lease() {
            return Ok(());
        }
        let all = store.active_jobs()?;
        self.unreadable_jobs.lock().retain(|of| all.get(of).is_some_and(|now| now.open));
        for (of, now) in &all {
            let (plain, id) = of;
            let Ok(group) = percent_decode_str(plain).decode_utf8() else { continue };
            let manager = self.job_manager(&group)?;
            if manager.works_on(id) {
                if now.stop {
                    manager.stop_job(id)?;
                }
            } else if now.mine {
                // The job ended here while the store could not record that.
                store.release_job(plain, id)?;
            } else if now.open && !now.owned && (now.stop || !self.unreadable_jobs.lock().contains(of)) {
                self.take_over(store, &manager, of, now.stop)?;
            }
        }
        Ok(())
    }

    /// Takes over a job without a worker, unless another coordinator is faster. A job that this release can't read is left to
    /// releases that can, until a stop is requested.
    fn take_over(&self, store: &JobStore, manager: &JobManager, of: &(String, String), stop: bool) -> Result<()> {
        let (plain, id) = of;
        let Some(stored) = store.claim_job(plain, id)? else { return Ok(()) };
        match from_stored(&stored) {
            Ok(kept) => {
                tracing::info!("job {id} of group {plain} is taken over");
                manager.adopt_job(id, kept)
            }
            Err(error) if stop => {
                tracing::warn!("job {id} of group {plain} is ended, as it was to be stopped: {error}");
                store.save_state(plain, id, &stored.state, true).map(drop)
            }
            Err(error) => {
                tracing::warn!("job {id} of group {plain} is left to coordinators of its release: {error}");
                self.unreadable_jobs.lock().insert(of.clone());
                store.release_job(plain, id)
            }
        }
    }

    /// Updates the gauges of jobs.
    pub fn set_gauges(&self, stats: &Stats) {
        let mut totals = JobTotals::default();
        let managers: Vec<_> = self.managers.lock().values().cloned().collect();
        managers.iter().for_each(|manager| manager.add_totals(&mut totals));
        totals.set_gauges(&stats.jobs);
    }

    /// Suspends the jobs; a later start resumes the jobs, or another coordinator at once.
    pub fn suspend_jobs(&self) {
        *self.stop.lock() = true;
        self.wake.notify_all();
        if let Some(watcher) = self.watcher.lock().take() {
            // The thread ends after the current search, which has a deadline.
            let _ = watcher.join();
        }
        let managers: Vec<_> = self.managers.lock().values().cloned().collect();
        for manager in managers {
            manager.suspend();
        }
        if let Some(store) = &self.store {
            store.close_store();
        }
    }
}

impl JobHandler for GroupJobs {
    fn handle_request(&self, group: &str, request: &Value) -> Result<Value> {
        self.job_manager(group)?.answer_request(request)
    }
}

impl NodeAccess {
    fn open_target(&self, group: &str, source: &str) -> Result<Arc<dyn JobTarget>> {
        let registry =
            (self.registry)(group).ok_or_else(|| Error::new(ErrorKind::Unavailable, "the coordinator ends"))?;
        // The gauges of members count all groups of the coordinator.
        let (follower, members) = group::follow_group(&registry, group, SHARE_HOLD_TIME, &Arc::default())
            .map_err(|fault| Error::new(ErrorKind::Unavailable, fault.what))?;
        let name = format!("{}:coordinator", group::hostname());
        let calls = PeerConnector::for_calls(name, Arc::clone(&self.trust), Arc::clone(&self.stats));
        let reach = PeerConnector { nconnect: NODE_CONNECTIONS, ..calls };
        let members = reach.group_members(source, &members);
        group::update_members_from(&follower, &members);
        let remote = reach.open_group(source, members, FETCH_TIMEOUT, FETCH_SILENCE_LIMIT)?;
        Ok(Arc::new(target::GroupTarget::with_follower(remote, follower)))
    }
}
