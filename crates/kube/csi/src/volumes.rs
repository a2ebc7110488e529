//! The volumes of this node: which are mounted, for which pods, by which process. A lock per volume orders the calls; an
//! unpublish or unstage ends a start that is under way. Does not know the protocol of the calls, nor where processes run.

use crate::condition::VolumeHealth;
use crate::descriptors::{VolumeDescriptors, store_socket};
use crate::launcher::{LaunchPlan, MountLauncher, PodReference, ProcessState, VolumeEvent};
use crate::mounts;
use crate::record::{PublishedTarget, VolumeRecord, make_private_dir};
use crate::secrets::{check_secrets, find_secrets, write_secrets};
use crate::settings::{MountArguments, MountRequest, MountWords, VolumeSettings};
use parking_lot::Mutex;
use spurline_config::{ExitKind, Fault};
use spurline_keeper::STORE_VARIABLE;
use spurline_observe::client::AdminPeer;
use spurline_observe::dial;
use spurline_observe::documents::ProcessStatus;
use spurline_observe::locate::{RUNTIME_DIR_ENV, SocketOwner};
use spurline_sys::Backoff;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tonic::Status;

/// Longest start of a mount. The kubelet abandons a call after two minutes, and what was started has to end before.
const START_LIMIT: Duration = Duration::from_secs(90);
/// Interval of looking at the mount table during a start.
const MOUNT_POLL: Duration = Duration::from_millis(20);
/// First and longest interval of querying the state of a process during a start.
const STATE_POLL: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));
/// How long a mount that is gone waits for the report about the end of the process.
const END_REPORT_LIMIT: Duration = Duration::from_secs(10);
/// Interval of checking that mount processes live.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// First and longest pause before a failed replacement is tried again.
const REPLACEMENT_PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Deadline of a mount's status.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// A volume as named by a call.
#[derive(Debug, Clone)]
pub(crate) struct VolumeDemand {
    pub volume_id: String,
    pub settings: VolumeSettings,
    pub secrets: HashMap<String, String>,
}

/// A volume: the record, under a lock that calls hold during work.
#[derive(Debug, Default)]
struct VolumeSlot {
    record: tokio::sync::Mutex<Option<VolumeRecord>>,
    /// Grows with every unpublish and unstage. A start that began at a lower value ends early.
    stops: AtomicU64,
    /// Why the volume can't be read at present, and when the next process is started.
    trouble: Mutex<Option<VolumeTrouble>>,
}

#[derive(Debug, Clone)]
struct VolumeTrouble {
    why: String,
    retry_at: Instant,
    pauses: Backoff,
    /// Whether a replacement failed, which is reported once.
    failed: bool,
}

/// What a volume table works with.
pub(crate) struct VolumeTableParts {
    /// Directory of records and mounts, absolute and without symbolic links.
    pub state_dir: PathBuf,
    pub launcher: Arc<dyn MountLauncher>,
    pub arguments: Arc<dyn MountArguments>,
    /// Memory limit of a mount process in bytes, where the volume names none.
    pub default_memory: u64,
}

/// The volumes of this node.
pub(crate) struct VolumeTable {
    parts: VolumeTableParts,
    slots: Mutex<HashMap<String, Arc<VolumeSlot>>>,
    descriptors: VolumeDescriptors,
    /// The processes in the records of an earlier driver.
    found: Vec<String>,
}

impl VolumeTable {
    /// Reads the records of an earlier driver, whose mounts go on. Waits for no launcher.
    ///
    /// # Errors
    /// When the directory can't be read.
    pub(crate) async fn open(parts: VolumeTableParts) -> Result<Arc<Self>, Fault> {
        let mut table = VolumeTable {
            parts,
            slots: Mutex::default(),
            descriptors: VolumeDescriptors::default(),
            found: Vec::new(),
        };
        let root = table.volumes_dir();
        let io = |e: std::io::Error| {
            Fault::missing(format!("the directory {}: {e}", root.display()), "give --state-dir a writable directory")
        };
        make_private_dir(&root).map_err(io)?;
        for entry in std::fs::read_dir(&root).map_err(io)? {
            let dir = entry.map_err(io)?.path();
            let record = match VolumeRecord::load(&dir) {
                Ok(Some(record)) => record,
                Ok(None) => {
                    table.remove_dir(&dir).unwrap_or_else(|fault| tracing::warn!("{fault}"));
                    continue;
                }
                Err(fault) => {
                    tracing::error!("{fault}; the volume is left as it is");
                    continue;
                }
            };
            tracing::info!("found volume {} with {} pods", record.volume_id, record.targets.len());
            table.found.extend(record.process.clone());
            if record.recovers
                && let Err(fault) = table.descriptors.open(&record.volume_id, &dir, None)
            {
                tracing::error!("{fault}; the mount of volume {} ends with its process", record.volume_id);
            }
            let slot = table.slot(&record.volume_id);
            *slot.record.lock().await = Some(record);
        }
        Ok(Arc::new(table))
    }

    /// Ends processes of an earlier driver whose records are gone; tried until success.
    pub(crate) async fn end_others(self: Arc<Self>) {
        let mut pauses = REPLACEMENT_PAUSES;
        while let Err(fault) = self.parts.launcher.end_others(&self.found).await {
            tracing::warn!("mount processes of volumes that are gone: {fault}");
            tokio::time::sleep(pauses.next_pause()).await;
        }
    }

    fn volumes_dir(&self) -> PathBuf {
        self.parts.state_dir.join("v")
    }

    fn dir_of(&self, volume_id: &str) -> PathBuf {
        self.volumes_dir().join(volume_key(volume_id))
    }

    fn slot(&self, volume_id: &str) -> Arc<VolumeSlot> {
        Arc::clone(self.slots.lock().entry(volume_id.to_owned()).or_default())
    }

    /// Removes the slot of a volume that is gone, unless another call waits for the slot.
    fn forget(&self, volume_id: &str, slot: &Arc<VolumeSlot>) {
        let mut slots = self.slots.lock();
        if Arc::strong_count(slot) == 2 && slot.record.try_lock().is_ok_and(|record| record.is_none()) {
            slots.remove(volume_id);
        }
    }

    /// Mounts a volume for the pods of this node.
    ///
    /// # Errors
    /// When the volume is mounted with other settings, or the mount can't start.
    pub(crate) async fn stage(&self, demand: VolumeDemand, staging: PathBuf) -> Result<(), Status> {
        let slot = self.slot(&demand.volume_id);
        let since = slot.stops.load(Ordering::SeqCst);
        let mut guard = slot.record.lock().await;
        let staged = self.mount_volume(&slot, &mut guard, &demand, since).await;
        if let (Ok(()), Some(record)) = (&staged, guard.as_mut()) {
            record.staged = Some(staging);
            record.save(&self.dir_of(&demand.volume_id)).map_err(status)?;
        }
        drop(guard);
        self.forget(&demand.volume_id, &slot);
        staged
    }

    /// Binds a volume to a pod's directory. `staged` says that [`VolumeTable::stage`] has to have been called before; other
    /// volumes belong to a single pod and are mounted now.
    ///
    /// # Errors
    /// As [`VolumeTable::stage`], and when the directory can't be bound.
    pub(crate) async fn publish(
        &self,
        demand: VolumeDemand,
        target: PublishedTarget,
        staged: bool,
    ) -> Result<(), Status> {
        let slot = self.slot(&demand.volume_id);
        let since = slot.stops.load(Ordering::SeqCst);
        let mut guard = slot.record.lock().await;
        let published = match guard.as_ref().filter(|record| record.is_used()) {
            None if staged => Err(Status::failed_precondition(format!(
                "volume {} is not staged on this node: NodeStageVolume comes first",
                demand.volume_id
            ))),
            _ => self.publish_locked(&slot, &mut guard, &demand, target, since).await,
        };
        drop(guard);
        self.forget(&demand.volume_id, &slot);
        published
    }

    async fn publish_locked(
        &self,
        slot: &VolumeSlot,
        guard: &mut Option<VolumeRecord>,
        demand: &VolumeDemand,
        target: PublishedTarget,
        since: u64,
    ) -> Result<(), Status> {
        self.mount_volume(slot, guard, demand, since).await?;
        let Some(record) = guard.as_mut() else { return Err(Status::internal("the volume is gone")) };
        let dir = self.dir_of(&record.volume_id);
        let path = target.path.clone();
        if !record.targets.iter().any(|known| known.path == path) {
            record.targets.push(target);
            // Before the bind: a driver that ends here finds the directory again.
            record.save(&dir).map_err(status)?;
        }
        let bound = record.targets.iter().find(|known| known.path == path);
        if let Err(fault) = bound.map_or(Ok(()), |target| bind_target(&dir, target)) {
            record.targets.retain(|known| known.path != path);
            if record.is_used() {
                record.save(&dir).map_err(status)?;
            } else if self.end_volume(record).await.is_ok() {
                *guard = None;
            }
            return Err(status(fault));
        }
        Ok(())
    }

    /// Takes a volume from a pod's directory, and ends an unused mount.
    ///
    /// # Errors
    /// When the directory can't be freed or the mount process can't be ended.
    pub(crate) async fn unpublish(&self, volume_id: &str, target: &Path) -> Result<(), Status> {
        let slot = self.slot(volume_id);
        slot.stops.fetch_add(1, Ordering::SeqCst);
        let mut guard = slot.record.lock().await;
        let done = async {
            mounts::remove_mountpoint(target)?;
            let Some(record) = guard.as_mut() else { return Ok(()) };
            record.targets.retain(|known| known.path != target);
            self.end_unused(&mut guard).await
        };
        let done = done.await.map_err(status);
        drop(guard);
        self.forget(volume_id, &slot);
        done
    }

    /// Ends the mount of a volume.
    ///
    /// # Errors
    /// As [`VolumeTable::unpublish`].
    pub(crate) async fn unstage(&self, volume_id: &str) -> Result<(), Status> {
        let slot = self.slot(volume_id);
        slot.stops.fetch_add(1, Ordering::SeqCst);
        let mut guard = slot.record.lock().await;
        let done = async {
            let Some(record) = guard.as_mut() else { return Ok(()) };
            for target in std::mem::take(&mut record.targets) {
                tracing::warn!("volume {volume_id} is unstaged while it is published at {}", target.path.display());
                mounts::remove_mountpoint(&target.path)?;
            }
            record.staged = None;
            self.end_unused(&mut guard).await
        };
        let done = done.await.map_err(status);
        drop(guard);
        self.forget(volume_id, &slot);
        done
    }

    /// Saves the record, or ends an unused volume.
    async fn end_unused(&self, guard: &mut Option<VolumeRecord>) -> Result<(), Fault> {
        let Some(record) = guard.as_ref() else { return Ok(()) };
        if record.is_used() {
            return record.save(&self.dir_of(&record.volume_id));
        }
        self.end_volume(record).await?;
        *guard = None;
        Ok(())
    }

    /// Mounts a volume unless mounted. A volume that nothing uses leaves nothing behind when this fails.
    async fn mount_volume(
        &self,
        slot: &VolumeSlot,
        guard: &mut Option<VolumeRecord>,
        demand: &VolumeDemand,
        since: u64,
    ) -> Result<(), Status> {
        check_secrets(&demand.secrets).map_err(status)?;
        if let Some(record) = guard.as_ref()
            && record.settings != demand.settings
        {
            if record.is_used() {
                return Err(Status::already_exists(format!(
                    "volume {} is mounted on this node with other attributes or mount options; remove the pods that use \
                     it here, then start them again",
                    demand.volume_id
                )));
            }
            // Left from a call that could not end the volume.
            self.end_volume(record).await.map_err(status)?;
            *guard = None;
        }
        let dir = self.dir_of(&demand.volume_id);
        let record = guard.get_or_insert_with(|| VolumeRecord::new(&demand.volume_id, demand.settings.clone()));
        let outcome = async {
            make_private_dir(&dir).map_err(|e| {
                status(Fault::failed(format!("the directory {}: {e}", dir.display()), "make --state-dir writable"))
            })?;
            // A process reads changed secrets again. Calls without secrets keep the secrets of the stage.
            if !demand.secrets.is_empty() || !record.is_used() {
                write_secrets(&demand.secrets, &dir.join("secret")).map_err(status)?;
            }
            if record.is_used() && !serves(&dir).map_err(status)? {
                // Events inform the other pods; this call waits for the mount in any case.
                self.note_end(slot, record).await;
            }
            self.restore_mount(slot, record, since).await
        };
        let outcome = outcome.await;
        if outcome.is_err() && !record.is_used() {
            match self.end_volume(record).await {
                Ok(()) => *guard = None,
                Err(fault) => tracing::warn!("{fault}"),
            }
        }
        outcome
    }

    /// Starts the mount process unless the mount serves, and waits for the mount.
    async fn start_process(&self, slot: &VolumeSlot, record: &mut VolumeRecord, since: u64) -> Result<(), Status> {
        let dir = self.dir_of(&record.volume_id);
        let point = mount_point(&dir);
        if serves(&dir).map_err(status)? {
            return Ok(());
        }
        let plan = self.plan(record).map_err(status)?;
        let continues = self.descriptors.hold_mount(&record.volume_id);
        if let Some(process) = record.process.clone() {
            if continues && matches!(self.parts.launcher.process_state(&process).await, Ok(ProcessState::Running)) {
                // The keeper is about to replace the process.
                return self.await_mount(slot, record, &process, since).await;
            }
            self.parts.launcher.stop(&process).await.map_err(status)?;
        }
        if continues {
            self.descriptors.expect_process(&record.volume_id);
        } else {
            self.prepare_mount(record, &plan).map_err(status)?;
        }
        record.recovers = plan.recovers;
        record.launches += 1;
        let started = Instant::now();
        let launched = self.parts.launcher.launch(&plan).await;
        record.process = match &launched {
            Ok(process) => Some(process.clone()),
            Err(failure) => failure.may_run.clone(),
        };
        record.save(&dir).map_err(status)?;
        let process = launched.map_err(|failure| status(failure.fault))?;
        let ready = self.await_mount(slot, record, &process, since).await;
        match &ready {
            Ok(()) => tracing::info!(
                "volume {}: {} is mounted by {process} after {} ms",
                record.volume_id,
                record.settings.source,
                started.elapsed().as_millis()
            ),
            Err(why) => {
                tracing::warn!("volume {}: {}", record.volume_id, why.message());
                match self.parts.launcher.stop(&process).await {
                    Ok(()) => record.process = None,
                    Err(fault) => tracing::warn!("{fault}"),
                }
                self.descriptors.close(&record.volume_id);
                mounts::detach_all(&point).unwrap_or_else(|fault| tracing::warn!("{fault}"));
                record.save(&dir).map_err(status)?;
            }
        }
        ready
    }

    /// Makes the directories of a new mount, in the place of a dead one. A mount that goes on is not accessed, as no process would answer.
    fn prepare_mount(&self, record: &VolumeRecord, plan: &LaunchPlan) -> Result<(), Fault> {
        let point = mount_point(&plan.dir);
        mounts::detach_all(&point)?;
        for part in [&point, &plan.dir.join("run")] {
            make_private_dir(part).map_err(|e| Fault::failed(format!("the directory {}: {e}", part.display()), ""))?;
        }
        self.descriptors.close(&record.volume_id);
        if plan.recovers {
            self.descriptors.open(&record.volume_id, &plan.dir, Some(0))?;
        }
        Ok(())
    }

    /// Waits until the mount serves, the process ends, the volume is no longer wanted, or the time is over.
    async fn await_mount(
        &self,
        slot: &VolumeSlot,
        record: &VolumeRecord,
        process: &str,
        since: u64,
    ) -> Result<(), Status> {
        let dir = self.dir_of(&record.volume_id);
        let source = &record.settings.source;
        let started = Instant::now();
        let mut query_at = started + STATE_POLL.0;
        let mut interval = STATE_POLL.0;
        let mut pending = String::new();
        loop {
            if serves(&dir).map_err(status)? && is_ready(&dir).await {
                return Ok(());
            }
            if slot.stops.load(Ordering::SeqCst) != since {
                return Err(Status::aborted(format!("the mount of {source} was stopped while it started")));
            }
            if Instant::now() >= query_at {
                interval = (interval * 3 / 2).min(STATE_POLL.1);
                query_at = Instant::now() + interval;
                let left = START_LIMIT.saturating_sub(started.elapsed());
                match tokio::time::timeout(left, self.parts.launcher.process_state(process)).await {
                    Ok(Ok(ProcessState::Running)) => pending.clear(),
                    Ok(Ok(ProcessState::Pending(why))) => pending = why,
                    Ok(Ok(ProcessState::Ended(why))) => {
                        return Err(Status::failed_precondition(format!("{source} can't be mounted: {why}")));
                    }
                    Ok(Err(fault)) => pending = fault.to_string(),
                    // The time is over, see below.
                    Err(_) => {}
                }
            }
            if started.elapsed() >= START_LIMIT {
                let why = match pending.as_str() {
                    "" => format!("its process {process} runs and has not mounted it yet: look at its log"),
                    why => format!("its process {process} does not run: {why}"),
                };
                let seconds = START_LIMIT.as_secs();
                return Err(Status::deadline_exceeded(format!("{source} is not mounted after {seconds} s; {why}")));
            }
            tokio::time::sleep(MOUNT_POLL).await;
        }
    }

    /// The checked words of a volume's process.
    fn plan(&self, record: &VolumeRecord) -> Result<LaunchPlan, Fault> {
        let dir = self.dir_of(&record.volume_id);
        let files = find_secrets(&dir.join("secret"));
        let MountWords { words, memory, writable, recovers } = self.parts.arguments.of_mount(MountRequest {
            settings: &record.settings,
            own_flags: &files.flags,
            mountpoint: &mount_point(&dir),
            default_memory: self.parts.default_memory,
        })?;
        let mut environment = files.environment;
        environment.push((RUNTIME_DIR_ENV.to_owned(), dir.join("run").display().to_string()));
        if recovers {
            environment.push((STORE_VARIABLE.to_owned(), store_socket(&dir).display().to_string()));
        }
        Ok(LaunchPlan {
            key: volume_key(&record.volume_id),
            volume_id: record.volume_id.clone(),
            dir,
            words,
            environment,
            memory,
            launch: record.launches + 1,
            source_dir: record.settings.source_dir(),
            writable,
            recovers,
        })
    }

    /// Ends the mount and removes all that the volume has on this node.
    async fn end_volume(&self, record: &VolumeRecord) -> Result<(), Fault> {
        let dir = self.dir_of(&record.volume_id);
        // Detached before the end of the process: pods that read would otherwise keep the process.
        mounts::detach_all(&mount_point(&dir))?;
        self.descriptors.end(&record.volume_id);
        if let Some(process) = &record.process {
            self.parts.launcher.stop(process).await?;
        }
        self.remove_dir(&dir)
    }

    /// Removes a volume's directory, in which nothing may be mounted.
    fn remove_dir(&self, dir: &Path) -> Result<(), Fault> {
        mounts::detach_all(&mount_point(dir))?;
        if mounts::is_mounted_below(dir)? {
            return Err(Fault::failed(format!("there are mounts below {}", dir.display()), "unmount them"));
        }
        match std::fs::remove_dir_all(dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Fault::failed(format!("removing {}: {e}", dir.display()), ""))
            }
            _ => Ok(()),
        }
    }

    /// The condition of a volume at a directory; `None` when the volume is not there.
    pub(crate) async fn health(&self, volume_id: &str, path: &Path) -> Result<Option<VolumeHealth>, Status> {
        let Some(slot) = self.slots.lock().get(volume_id).cloned() else { return Ok(None) };
        let Ok(guard) = tokio::time::timeout(STATUS_LIMIT, slot.record.lock()).await else {
            return Err(Status::aborted(format!("volume {volume_id} is being mounted or unmounted")));
        };
        let Some(record) = guard.as_ref() else { return Ok(None) };
        let known = record.staged.as_deref() == Some(path) || record.targets.iter().any(|target| target.path == path);
        if !known {
            return Ok(None);
        }
        let dir = self.dir_of(volume_id);
        let stale = stale_targets(&dir, record).map_err(status)?;
        let is_bound = !stale.iter().any(|target| target.path == path);
        let source = record.settings.source.clone();
        let last_end = record.last_end.clone();
        drop(guard);
        let is_readable = is_bound && serves(&dir).map_err(status)?;
        let trouble = slot.trouble.lock().clone();
        if let Some(trouble) = trouble.filter(|_| !is_readable) {
            return Ok(Some(VolumeHealth::abnormal(trouble.why)));
        }
        if !is_bound {
            let message = format!("{} does not have the present mount of {source}", path.display());
            return Ok(Some(VolumeHealth::abnormal(message)));
        }
        Ok(Some(VolumeHealth::of_status(fetch_status(&dir).await, last_end)))
    }

    /// Replaces mount processes that ended, and removes what earlier calls could not, for ever.
    pub(crate) async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            let slots: Vec<Arc<VolumeSlot>> = self.slots.lock().values().cloned().collect();
            for slot in slots {
                self.note_restart(&slot).await;
                let trouble = slot.trouble.lock().clone();
                let is_due = trouble.as_ref().is_none_or(|trouble| trouble.retry_at <= Instant::now());
                // A volume that a call works on is checked next time.
                let is_wrong = match slot.record.try_lock() {
                    Ok(guard) => trouble.is_some() || guard.as_ref().is_some_and(|record| self.needs_work(record)),
                    Err(_) => false,
                };
                if is_wrong && is_due {
                    let table = Arc::clone(&self);
                    tokio::spawn(async move {
                        table.replace(&slot).await;
                        table.remove_unused(&slot).await;
                    });
                }
            }
        }
    }

    /// Whether a volume is to be removed, or the mount does not serve every pod.
    fn needs_work(&self, record: &VolumeRecord) -> bool {
        let dir = self.dir_of(&record.volume_id);
        // What can't be determined is looked at next time.
        !record.is_used()
            || !serves(&dir).unwrap_or(true)
            || stale_targets(&dir, record).is_ok_and(|stale| !stale.is_empty())
    }

    /// Reports a process that the keeper of a volume's mount has replaced.
    async fn note_restart(&self, slot: &VolumeSlot) {
        let Ok(mut guard) = slot.record.try_lock() else { return };
        let Some(record) = guard.as_mut() else { return };
        let Some(why) = self.descriptors.note_process(&record.volume_id) else { return };
        let message = format!(
            "the mount of {} goes on with another process, and open files are kept: {why}",
            record.settings.source
        );
        tracing::warn!("volume {}: {message}", record.volume_id);
        record.last_end = Some(why);
        record.save(&self.dir_of(&record.volume_id)).unwrap_or_else(|fault| tracing::warn!("{fault}"));
        self.report(record.pods(), true, "VolumeMountRestarted", message).await;
    }

    /// Continues a volume whose process ended, or whose mount is not at each pod's directory.
    async fn replace(&self, slot: &VolumeSlot) {
        let since = slot.stops.load(Ordering::SeqCst);
        let Ok(mut guard) = slot.record.try_lock() else { return };
        let Some(record) = guard.as_mut().filter(|record| record.is_used()) else { return };
        let is_served = serves(&self.dir_of(&record.volume_id)).unwrap_or(true);
        if is_served || self.note_end(slot, record).await {
            // Said in an event, and tried again after a pause.
            let _ = self.restore_mount(slot, record, since).await;
        }
    }

    /// Notes and reports, once, that the process of a used volume ended. Gives false where the keeper of the mount replaces the
    /// process itself.
    async fn note_end(&self, slot: &VolumeSlot, record: &mut VolumeRecord) -> bool {
        if slot.trouble.lock().is_some() {
            return true;
        }
        let why = match &record.process {
            None => "it was not started".to_owned(),
            Some(process) => match self.cause_of_end(process, record).await {
                Some(why) => why,
                None => return false,
            },
        };
        let message = format!("the mount process of {} ended: {why}", record.settings.source);
        record.last_end = Some(why);
        tracing::warn!("volume {}: {message}", record.volume_id);
        set_trouble(slot, &message);
        self.report(record.pods(), true, "VolumeMountEnded", message).await;
        true
    }

    /// Makes the mount of a volume serve, binds the mount to each pod's directory where this is missing, and reports the
    /// replacement. Calls, the watch and a restarted driver replace a mount in this way only.
    async fn restore_mount(&self, slot: &VolumeSlot, record: &mut VolumeRecord, since: u64) -> Result<(), Status> {
        let is_used = record.is_used();
        let is_served = serves(&self.dir_of(&record.volume_id)).map_err(status)?;
        let continues = !is_served && self.descriptors.hold_mount(&record.volume_id);
        if !is_served && let Err(why) = self.start_process(slot, record, since).await {
            if is_used {
                let message = format!("no mount process could be started: {}", why.message());
                self.report_failure(slot, record, message).await;
            }
            return Err(why);
        }
        match self.bind_targets(record) {
            Err(fault) => self.report_failure(slot, record, fault.to_string()).await,
            Ok(bound) => {
                let was_reported = slot.trouble.lock().take().is_some();
                if is_used && (was_reported || bound > 0) {
                    let source = &record.settings.source;
                    let message = if continues {
                        format!("the mount of {source} goes on with another process, and open files are kept")
                    } else {
                        format!(
                            "{source} is mounted again by another process; containers without mountPropagation: \
                             HostToContainer have to be restarted to see it"
                        )
                    };
                    self.report(record.pods(), false, "VolumeMountReplaced", message).await;
                }
            }
        }
        Ok(())
    }

    /// Notes why a used volume can't be read, with a report of the first failure since the last success.
    async fn report_failure(&self, slot: &VolumeSlot, record: &VolumeRecord, message: String) {
        set_trouble(slot, &message);
        let is_first =
            slot.trouble.lock().as_mut().is_some_and(|trouble| !std::mem::replace(&mut trouble.failed, true));
        if is_first {
            self.report(record.pods(), true, "VolumeMountFailed", message).await;
        }
    }

    /// Binds the mount to each pod's directory that lacks the mount, and gives the number; the first error, after all that can be
    /// bound.
    fn bind_targets(&self, record: &VolumeRecord) -> Result<usize, Fault> {
        let dir = self.dir_of(&record.volume_id);
        let stale = stale_targets(&dir, record)?;
        let bound = stale.iter().map(|target| bind_target(&dir, target)).fold(Ok(()), Result::and);
        bound.map(|()| stale.len())
    }

    /// Why a process ended whose mount is gone; `None` while the keeper of the mount replaces the process itself. The kubelet
    /// reports the end of a container up to seconds later.
    async fn cause_of_end(&self, process: &str, record: &VolumeRecord) -> Option<String> {
        let until = Instant::now() + END_REPORT_LIMIT;
        loop {
            if serves(&self.dir_of(&record.volume_id)).unwrap_or(true) {
                return None;
            }
            match self.parts.launcher.process_state(process).await {
                Ok(ProcessState::Ended(why)) => return Some(why),
                Ok(_) if Instant::now() < until => tokio::time::sleep(STATE_POLL.0).await,
                Ok(_) if self.descriptors.hold_mount(&record.volume_id) => return None,
                Ok(_) => return Some(format!("{process} runs on without its mount")),
                Err(fault) => return Some(fault.to_string()),
            }
        }
    }

    /// Removes a volume that nothing uses: the process could not be ended by the call that wanted that.
    async fn remove_unused(&self, slot: &Arc<VolumeSlot>) {
        let Ok(mut guard) = slot.record.try_lock() else { return };
        let Some(record) = guard.as_ref().filter(|record| !record.is_used()) else { return };
        let volume_id = record.volume_id.clone();
        match self.end_volume(record).await {
            Ok(()) => {
                tracing::info!("volume {volume_id}, which nothing uses, is removed");
                *guard = None;
                *slot.trouble.lock() = None;
                drop(guard);
                self.forget(&volume_id, slot);
            }
            Err(fault) => {
                let why = format!("volume {volume_id}, which nothing uses, can't be removed: {fault}");
                if slot.trouble.lock().is_none() {
                    tracing::warn!("{why}; it is tried again");
                }
                set_trouble(slot, &why);
            }
        }
    }

    async fn report(&self, pods: Vec<PodReference>, warning: bool, reason: &'static str, message: String) {
        self.parts.launcher.report(&VolumeEvent { pods, warning, reason, message }).await;
    }

    /// Checks a volume's settings without a mount, for volumes that are provisioned.
    ///
    /// # Errors
    /// As `spurline mount` would refuse the settings.
    pub(crate) fn check(&self, settings: &VolumeSettings) -> Result<(), Fault> {
        let request = MountRequest {
            settings,
            own_flags: &[],
            mountpoint: &mount_point(&self.dir_of("")),
            default_memory: self.parts.default_memory,
        };
        self.parts.arguments.of_mount(request).map(drop)
    }
}

/// The name of a volume on this node: the id may be any text.
fn volume_key(volume_id: &str) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(volume_id.as_bytes()))
}

/// Where a volume's process mounts, in the volume's directory.
fn mount_point(dir: &Path) -> PathBuf {
    dir.join("mnt")
}

fn admin_socket(dir: &Path) -> PathBuf {
    dir.join("run").join(SocketOwner::Mount(&mount_point(dir)).file_name())
}

/// Whether the mount is there and a process listens at the admin socket.
fn serves(dir: &Path) -> Result<bool, Fault> {
    let mounted = mounts::spurline_mount_at(&mount_point(dir))?.is_some();
    Ok(mounted && dial::probe_socket(&admin_socket(dir), None).is_ok())
}

/// Whether the process has answered the kernel.
async fn is_ready(dir: &Path) -> bool {
    fetch_status(dir).await.is_ok_and(|answer| !answer.is_starting())
}

async fn fetch_status(dir: &Path) -> Result<ProcessStatus, String> {
    let peer = AdminPeer::Socket(admin_socket(dir), None);
    let answer = tokio::task::spawn_blocking(move || peer.fetch_status(STATUS_LIMIT)).await;
    answer.map_err(|e| e.to_string())?.map_err(|e| e.message().to_owned())
}

/// The pods' directories that do not have the present mount: that of a process that ended, or none.
fn stale_targets<'a>(dir: &Path, record: &'a VolumeRecord) -> Result<Vec<&'a PublishedTarget>, Fault> {
    let paths: Vec<&Path> = record.targets.iter().map(|target| target.path.as_path()).collect();
    let stale = mounts::paths_without_mount(&mount_point(dir), &paths)?;
    Ok(record.targets.iter().filter(|target| stale.contains(&target.path.as_path())).collect())
}

/// Binds the mount to a pod's directory, unless bound already. A dead mount stays below the new mount: containers have copies as
/// volumes, and with `HostToContainer` these get the mount above.
fn bind_target(dir: &Path, target: &PublishedTarget) -> Result<(), Fault> {
    let point = mount_point(dir);
    let source = mounts::mount_at(&point)?.map(|entry| entry.device);
    let bound = mounts::mount_at(&target.path)?;
    if bound.is_some_and(|bound| Some(bound.device) == source) {
        return Ok(());
    }
    if mounts::count_layers(&target.path)? >= mounts::MOST_LAYERS / 2 {
        mounts::detach_all(&target.path)?;
    }
    mounts::bind(&point, &target.path, target.read_only, &dir.join("bind"))
}

/// Notes why a volume can't be read, and when to try again.
fn set_trouble(slot: &VolumeSlot, why: &str) {
    let mut trouble = slot.trouble.lock();
    let mut pauses = trouble.as_ref().map_or(REPLACEMENT_PAUSES, |before| before.pauses);
    let retry_at = Instant::now() + pauses.next_pause();
    let failed = trouble.as_ref().is_some_and(|before| before.failed);
    *trouble = Some(VolumeTrouble { why: why.to_owned(), retry_at, pauses, failed });
}

/// The status of a call that failed: the fault and the remedy, in a sentence.
pub(crate) fn status(fault: Fault) -> Status {
    let text = fault.to_string();
    match fault.code {
        ExitKind::Usage => Status::invalid_argument(text),
        ExitKind::Missing => Status::failed_precondition(text),
        ExitKind::Failed => Status::internal(text),
    }
}
