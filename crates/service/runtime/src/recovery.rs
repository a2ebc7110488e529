//! A mount that outlives its process: the state that a keeper holds, taken over from the process before or made anew. Knows no
//! signals and no command line.

use crate::volume::open_volume;
use crate::writes::KeptWrites;
use parking_lot::Mutex;
use spurline_config::{Fault, MountConfig};
use spurline_fuse::{FuseSession, KeptSession, KeptState, NotificationRelay};
use spurline_keeper::{
    KeeperLink, KeeperNotifications, KeptDescriptors, LifeOrder, MountLife, STORED_NAME_BYTES, StoredFiles, StoredName,
    monotonic_ns,
};
use spurline_observe::documents::KeeperStatus;
use spurline_types::stats::Recovery;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::kept_files::{KeptFileKey, KeptFiles};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// A process in the life of a mount.
pub struct MountRecovery {
    view: Arc<KeeperView>,
    /// The connection of the process before; `None` for a new mount.
    device: Option<OwnedFd>,
    mountpoint: Option<PathBuf>,
    /// Of a mount that makes changes.
    files: Option<Arc<KeeperFiles>>,
    relay: Option<Arc<KeeperRelay>>,
}

/// The facts of the keeper that the admin services show.
pub struct KeeperView {
    link: KeeperLink,
    order: LifeOrder,
    state: Arc<KeptState>,
    pause_us: AtomicU64,
}

/// Checks whether this program could continue a mount: the state can be read, and the source or the nodes answer.
///
/// # Errors
/// The reason why not.
pub fn check_takeover(life: MountLife, config: &MountConfig) -> std::result::Result<(), Fault> {
    MountRecovery::begin(life, config)?;
    // The process that serves the mount has the cache directories.
    let mut volume = config.volume.clone();
    volume.cache = volume.cache.without_dirs();
    open_volume(&volume, &Arc::default()).map(drop)
}

/// The settings that can't change while the mount lives, each with its flag.
fn fixed_settings(config: &MountConfig) -> String {
    let fuse = &config.fuse;
    let mut options = fuse.options.clone();
    options.sort();
    format!(
        "SOURCE={}\n--max-write={}\n--rw={}\n--registry with --rw={}\n-o={}\n",
        config.volume.source,
        fuse.max_write,
        config.volume.writes.is_some(),
        config.volume.writes.is_some() && config.volume.group.is_some(),
        options.join(",")
    )
}

/// The first setting that differs: the flag, the value of the mount, and that of this process. A setting that only one of two releases
/// has does not differ.
fn changed_setting<'a>(kept: &'a str, own: &'a str) -> Option<(&'a str, &'a str, &'a str)> {
    let kept: HashMap<&str, &str> = kept.lines().filter_map(|line| line.split_once('=')).collect();
    own.lines().find_map(|line| {
        let (flag, own_value) = line.split_once('=')?;
        let kept_value = *kept.get(flag)?;
        (kept_value != own_value).then_some((flag, kept_value, own_value))
    })
}

fn state_fault(error: impl std::fmt::Display) -> Fault {
    Fault::failed(format!("the state of the mount: {error}"), "")
}

fn keeper_fault(error: std::io::Error) -> Fault {
    Fault::failed(format!("the keeper of the mount: {error}"), "")
}

impl MountRecovery {
    /// Takes the state of the process before over, or makes one for a new mount.
    ///
    /// # Errors
    /// When the state is of another version, or settings differ that can't change while the mount lives.
    pub fn begin(life: MountLife, config: &MountConfig) -> std::result::Result<MountRecovery, Fault> {
        let MountLife { link, mut order } = life;
        let settings = fixed_settings(config);
        let mut device = None;
        let mut mountpoint = None;
        let state = match order.kept.take() {
            None => KeptState::create(2 * config.volume.budget.inode_bytes).map_err(state_fault)?,
            Some(kept) => {
                let state = KeptState::open(kept.state).map_err(state_fault)?;
                let (at, kept_settings) = state.mount().ok_or_else(|| state_fault("it names no mountpoint"))?;
                if let Some((flag, before, now)) = changed_setting(&kept_settings, &settings) {
                    return Err(Fault::usage(
                        format!("{flag} can't change while the mount lives: it is '{before}' and would be '{now}'"),
                        "unmount, and mount again",
                    ));
                }
                mountpoint = Some(at);
                device = Some(kept.device);
                state
            }
        };
        let files = order.files.take().filter(|_| config.volume.writes.is_some());
        let files = files.map(KeeperFiles::begin).transpose().map_err(state_fault)?;
        let relay = order.notifications.take().map(KeeperRelay::new);
        let view = KeeperView { link, order, state: Arc::new(state), pause_us: AtomicU64::new(0) };
        Ok(MountRecovery {
            view: Arc::new(view),
            device,
            mountpoint,
            files: files.map(Arc::new),
            relay: relay.map(Arc::new),
        })
    }

    /// The mountpoint of a mount that exists.
    pub fn mountpoint(&self) -> Option<&Path> {
        self.mountpoint.as_deref()
    }

    pub(crate) fn view(&self) -> Arc<KeeperView> {
        Arc::clone(&self.view)
    }

    /// The connection of the process before, which this process is about to serve; `None` for a new mount.
    ///
    /// # Errors
    /// When the keeper does not get a state that was converted.
    pub(crate) fn take_device(&mut self) -> std::result::Result<Option<OwnedFd>, Fault> {
        let Some(device) = self.device.take() else { return Ok(None) };
        let KeeperView { link, state, .. } = &*self.view;
        if state.is_converted() {
            let reported = device.try_clone().and_then(|device| {
                let state = state.duplicate_file()?;
                link.report_mounted(KeptDescriptors { device, state })
            });
            reported.map_err(keeper_fault)?;
        }
        Ok(Some(device))
    }

    pub(crate) fn kept_writes(&self) -> KeptWrites {
        KeptWrites { client: Arc::clone(&self.view.state) as _, goes_on: self.mountpoint.is_some() }
    }

    pub(crate) fn kept_session(&self) -> KeptSession {
        let order = &self.view.order;
        let since_end = Duration::from_nanos(monotonic_ns().saturating_sub(order.ended_at_ns));
        KeptSession {
            state: Arc::clone(&self.view.state),
            files: self.files.clone().map(|files| files as _),
            relay: self.relay.clone().map(|relay| relay as _),
            takeovers: order.takeovers,
            ended_at: SystemTime::now().checked_sub(since_end).unwrap_or(SystemTime::UNIX_EPOCH),
        }
    }

    /// Requests are served: gives a new mount to the keeper, or logs the pause.
    pub(crate) fn report_served(&self, session: &FuseSession, config: &MountConfig) -> std::result::Result<(), Fault> {
        let KeeperView { link, order, state, pause_us } = &*self.view;
        if self.mountpoint.is_some() {
            let pause = monotonic_ns().saturating_sub(order.ended_at_ns) / 1000;
            pause_us.store(pause, Ordering::Relaxed);
            tracing::warn!(
                pause_ms = pause / 1000,
                takeovers = order.takeovers,
                "the mount goes on with this process after {}; programs waited {} ms",
                order.cause,
                pause / 1000
            );
        } else {
            if state.keep_mount(session.mountpoint(), &fixed_settings(config)) == 0 {
                return Err(Fault::usage(
                    "the mountpoint, the source and the options have no room in the state of the mount",
                    "",
                ));
            }
            let device = session.duplicate_device().map_err(keeper_fault)?;
            let device = device.ok_or_else(|| Fault::failed("the mount ended while it started", ""))?;
            let state = state.duplicate_file().map_err(keeper_fault)?;
            link.report_mounted(KeptDescriptors { device, state }).map_err(keeper_fault)?;
        }
        link.report_ready().map_err(keeper_fault)?;
        let view = Arc::clone(&self.view);
        let watch = std::thread::Builder::new().name("keeper-watch".into());
        watch.spawn(move || view.log_end_of_keeper()).map(drop).map_err(keeper_fault)
    }
}

impl KeeperView {
    fn log_end_of_keeper(&self) {
        if self.link.wait_for_end().is_ok() {
            tracing::error!(
                "the keeper of the mount, process {}, has ended: the mount goes on, and will not survive this process; mount again \
                 when convenient",
                self.order.keeper
            );
        }
    }

    pub(crate) fn status(&self) -> KeeperStatus {
        KeeperStatus {
            pid: self.order.keeper,
            alive: self.link.has_keeper(),
            restarts: self.order.takeovers,
            cause: self.order.cause.clone(),
            pause_ms: self.pause_us.load(Ordering::Relaxed) / 1000,
            state_bytes: self.state.used_bytes(),
            not_kept: self.state.refused_records(),
        }
    }

    pub(crate) fn set_gauges(&self, shown: &Recovery) {
        shown.has_keeper.set(u64::from(self.link.has_keeper()));
        shown.restarts.set(self.order.takeovers);
        shown.pause_us.set(self.pause_us.load(Ordering::Relaxed));
        shown.state_bytes.set(self.state.used_bytes());
        shown.not_kept.set(self.state.refused_records());
    }

    /// Makes the mount continue with another program.
    pub(crate) fn request_upgrade(&self, program: &Path) -> Result<()> {
        self.link.request_upgrade(program).map_err(|refusal| Error::new(ErrorKind::Invalid, refusal))
    }
}

/// Open files of the source that the keeper holds for the next process.
struct KeeperFiles {
    stored: StoredFiles,
    /// Of the processes before.
    earlier: Mutex<HashMap<StoredName, OwnedFd>>,
    is_failing: AtomicBool,
}

impl KeeperFiles {
    fn begin(socket: OwnedFd) -> std::io::Result<KeeperFiles> {
        let (stored, earlier) = StoredFiles::begin(socket)?;
        Ok(KeeperFiles { stored, earlier: Mutex::new(earlier), is_failing: AtomicBool::new(false) })
    }

    fn report(&self, done: std::io::Result<()>) {
        if let Err(error) = done
            && !self.is_failing.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("open files are lost if this process ends: the keeper of the mount takes no more: {error}");
        }
    }
}

fn stored_name(key: KeptFileKey) -> StoredName {
    let (kind, fh, owner) = match key {
        KeptFileKey::File(fh) => (1, fh, 0),
        KeptFileKey::Directory(fh) => (2, fh, 0),
        KeptFileKey::Lock { fh, owner } => (3, fh, owner),
        KeptFileKey::ChangedBytes(number) => (4, number, 0),
    };
    let mut name = [kind; STORED_NAME_BYTES];
    name[1..9].copy_from_slice(&fh.to_le_bytes());
    name[9..].copy_from_slice(&owner.to_le_bytes());
    name
}

impl KeptFiles for KeeperFiles {
    fn keep_file(&self, key: KeptFileKey, file: BorrowedFd<'_>) {
        self.report(self.stored.store(&stored_name(key), file));
    }

    fn drop_file(&self, key: KeptFileKey) {
        self.report(self.stored.close(&stored_name(key)));
    }

    fn take_file(&self, key: KeptFileKey) -> Option<OwnedFd> {
        self.earlier.lock().remove(&stored_name(key))
    }

    fn drop_untaken(&self) {
        for (name, _) in self.earlier.lock().drain() {
            self.report(self.stored.close(&name));
        }
    }
}

/// Notifications that the keeper sends.
#[derive(Debug)]
struct KeeperRelay {
    notifications: KeeperNotifications,
    is_failing: AtomicBool,
}

impl KeeperRelay {
    fn new(socket: OwnedFd) -> KeeperRelay {
        KeeperRelay { notifications: KeeperNotifications::new(socket), is_failing: AtomicBool::new(false) }
    }
}

impl NotificationRelay for KeeperRelay {
    fn relay(&self, device: BorrowedFd<'_>, notification: &[u8], if_ended: &[u8]) -> Option<i32> {
        let sent = self.notifications.send(device, notification, if_ended);
        let failed = sent.as_ref().err();
        if let Some(error) = failed
            && !self.is_failing.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "this process notifies the kernel itself, and may not end when it is killed: the keeper sends no notification: {error}"
            );
        }
        sent.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_descriptors_have_the_names_of_this_version() {
        let names = [
            KeptFileKey::File(5),
            KeptFileKey::Directory(5),
            KeptFileKey::Lock { fh: 5, owner: 258 },
            KeptFileKey::ChangedBytes(258),
        ];
        let wanted: [StoredName; 4] = [
            *b"\x01\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
            *b"\x02\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
            *b"\x03\x05\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0",
            *b"\x04\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        ];
        assert_eq!(
            names.map(stored_name),
            wanted,
            "other names need another version of the state of a mount (fuse/kept_state)"
        );
    }

    #[test]
    fn the_setting_that_differs_is_named() {
        let kept = "SOURCE=/a\n--old=1\n--max-write=1048576\n";
        assert_eq!(changed_setting(kept, kept), None);
        let own = "SOURCE=/a\n--new=2\n--max-write=65536\n";
        assert_eq!(changed_setting(kept, own), Some(("--max-write", "1048576", "65536")));
    }
}
