//! The life of a mount: mounted, negotiated with the kernel, served by threads, unmounted. Knows the session's transport and does
//! not interpret requests.

use crate::backing::BackingRegistrar;
use crate::buffer::{HEAD_LEN, SlotBuffer, page_size};
use crate::config::{FuseIo, SessionConfig, TransportChoice};
use crate::dev::{self, ConnectionEnd, slot_bytes};
use crate::dispatch::RequestDispatcher;
use crate::failed_reads::FailedReads;
use crate::init::{InitAgreement, negotiate_init};
use crate::kernel::{BackingRegistrations, NegotiatedKernel, SessionKernel};
use crate::mount::{self, MountError, MountedDevice, abort_connection, detach_mount};
use crate::notify::KernelNotifier;
use crate::ring::{self, QueueCpus, ThreadPlacement};
use crate::under_way::RequestsUnderWay;
use crate::waiting::{SlotWaits, WaitingSlots};
use crate::watch::{self, RequestWatch};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spurline_fs::FileService;
use spurline_sys::{MountEntry, MountTable, mounted_at};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

/// Retry interval of the unmount of a busy mount.
const RETRY_EVERY: Duration = Duration::from_millis(50);
/// How long threads have to notice an aborted connection.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// Linux 6.9: requests that a process has taken are sent again to its successor.
const OLDEST_RESENDING_MINOR: u32 = 40;

/// The kernel sends no request to a buffer smaller than this (FUSE_MIN_READ_BUFFER).
const MIN_MAX_WRITE: u32 = 8 << 10;

/// The memory of a slot.
#[derive(Default)]
pub(crate) struct RequestSlot {
    /// `None` once another thread has the buffer.
    buffer: Option<Box<dyn SlotBuffer>>,
}

impl RequestSlot {
    pub(crate) fn new<S>(buffer: Box<dyn SlotBuffer>, shared: &SessionShared<S>) -> io::Result<RequestSlot> {
        if buffer.len() < shared.config.slot_len() || !(buffer.as_ptr().as_ptr() as usize).is_multiple_of(HEAD_LEN) {
            return Err(io::Error::other("a slot's buffer is too short or not aligned to a page"));
        }
        Ok(RequestSlot::of_buffer(buffer))
    }

    pub(crate) fn of_buffer(buffer: Box<dyn SlotBuffer>) -> RequestSlot {
        RequestSlot { buffer: Some(buffer) }
    }

    /// The memory as a single slice.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match &mut self.buffer {
            Some(buffer) => slot_bytes(&mut **buffer),
            None => &mut [],
        }
    }
}

/// State shared by the threads of a session.
pub(crate) struct SessionShared<S> {
    pub(crate) dispatcher: RequestDispatcher<S>,
    pub(crate) config: SessionConfig,
    pub(crate) device: Arc<OwnedFd>,
    /// Threads on /dev/fuse, and the number of these that wait for a request.
    pub(crate) dev_threads: AtomicUsize,
    pub(crate) dev_idle: AtomicUsize,
    /// Idle threads kept after a peak.
    pub(crate) dev_keep: usize,
    /// Requests that wait for others.
    pub(crate) waits: SlotWaits,
    /// What each thread serves.
    pub(crate) under_way: RequestsUnderWay,
    /// Requests that were answered before their threads are done.
    pub(crate) left_requests: AtomicUsize,
    pub(crate) watch: Arc<RequestWatch>,
    /// Entries of each io_uring queue.
    pub(crate) ring_depth: usize,
    core: Arc<SessionCore>,
}

/// State that outlives the threads and does not depend on the file system's type.
struct SessionCore {
    /// The path at mount time; a rename of a parent directory moves the mount.
    path: PathBuf,
    /// The mount's id, and the minor number of the device: the connection's name in sysfs.
    number: Option<u32>,
    minor: Option<u32>,
    /// From INIT on.
    notifier: OnceLock<KernelNotifier>,
    /// Weak, so that the connection ends with the threads.
    device: Weak<OwnedFd>,
    /// A successor of this process continues the session, unless the mount was unmounted.
    is_kept: bool,
    state: Mutex<SessionState>,
    changed: Condvar,
}

struct SessionState {
    phase: SessionPhase,
    /// Running threads.
    live: usize,
    chosen: Option<TransportChoice>,
    failure: Option<String>,
    /// Whether a thread found the connection gone.
    gone: bool,
    /// Whether the connection was aborted, rather than unmounted.
    broken: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionPhase {
    Starting,
    Ready,
    Ended,
}

impl SessionCore {
    fn update_state(&self, f: impl FnOnce(&mut SessionState)) {
        f(&mut self.state.lock());
        self.changed.notify_all();
    }

    fn record_failure(&self, detail: String) {
        tracing::error!("the FUSE session on {} failed: {detail}", self.path.display());
        self.update_state(|s| {
            s.failure.get_or_insert(detail);
        });
    }

    /// Waits until `done`; false when `within` passed first.
    fn wait_for(&self, within: Duration, mut done: impl FnMut(&SessionState) -> bool) -> bool {
        let until = Instant::now() + within;
        let mut state = self.state.lock();
        while !done(&state) {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return done(&state);
            }
        }
        true
    }

    /// Whether `mount` shows this session's files: the session's mount, or a bind mount.
    fn is_ours(&self, mount: &MountEntry) -> bool {
        mount.is_fuse() && self.minor.is_none_or(|minor| mount.device == (0, minor))
    }

    /// Where the mount is now.
    fn find_mount(&self) -> Result<MountPlace, MountError> {
        let table = MountTable::read().map_err(|source| MountError::System {
            what: "reading the mount table for",
            path: self.path.clone(),
            source,
        })?;
        let ours = |m: &&MountEntry| {
            self.is_ours(m) && self.number.map_or_else(|| m.mountpoint == self.path, |number| m.id == number)
        };
        let Some(mount) = table.entries().iter().rfind(ours) else { return Ok(MountPlace::Gone) };
        let at = mount.mountpoint.clone();
        Ok(match table.seen_at(&at) {
            Some(seen) if seen.id == mount.id => MountPlace::Seen(at),
            seen => {
                let over = seen.map(|m| (format!("{} from '{}'", m.fstype, m.source), m.mountpoint.clone()));
                let (over, over_at) = over.unwrap_or_else(|| ("another file system".into(), at.clone()));
                MountPlace::Covered(MountError::Covered { path: at, over, at: over_at })
            }
        })
    }

    /// Another mountpoint of this file system (a bind mount), after the end of the session's mount.
    fn bound_at(&self) -> Option<PathBuf> {
        self.minor?;
        let table = MountTable::read().ok()?;
        table.entries().iter().find(|m| self.is_ours(m) && self.number != Some(m.id)).map(|m| m.mountpoint.clone())
    }

    /// Removes a dead mount whose connection is gone; true when there was such a mount. An aborting program may be about to
    /// unmount (`umount --force` above all), and gets a moment for that.
    fn remove_dead(&self) -> Result<bool, MountError> {
        let until = Instant::now() + ABORT_GRACE;
        loop {
            match self.find_mount()? {
                MountPlace::Gone => return Ok(false),
                _ if Instant::now() < until => thread::sleep(RETRY_EVERY),
                MountPlace::Covered(error) => return Err(error),
                // Only a dead mount, and not a new mount in the same place.
                MountPlace::Seen(at) if matches!(mount::probe_mount(&at), mount::MountHealth::Dead) => {
                    return detach_mount(&at, libc::MNT_DETACH).map(|()| true);
                }
                MountPlace::Seen(_) => return Ok(false),
            }
        }
    }

    /// Whether the kernel has the connection: the mount is neither unmounted nor aborted.
    fn is_connected(&self) -> bool {
        let Some(device) = self.device.upgrade() else { return false };
        let mut polled = [PollFd::new(&*device, PollFlags::IN)];
        // Without a wait.
        poll(&mut polled, Some(&Timespec::default())).is_ok() && !polled[0].revents().contains(PollFlags::ERR)
    }

    /// Aborts the connection: all current and future requests fail with ENOTCONN.
    fn abort_session(&self) -> io::Result<()> {
        // The number of a connection that has ended is free for the next mount of this host.
        if !self.is_connected() {
            return Err(io::Error::from_raw_os_error(libc::ENOTCONN));
        }
        match (self.minor.map(abort_connection), self.find_mount()) {
            (Some(Ok(())), _) => Ok(()),
            // A forced unmount has the same effect, if the mount is visible.
            (_, Ok(MountPlace::Seen(at))) => {
                detach_mount(&at, libc::MNT_FORCE | libc::MNT_DETACH).map_err(io::Error::other)
            }
            (Some(Err(e)), _) => Err(e),
            (None, _) => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }
}

/// The location of a session's mount.
enum MountPlace {
    /// No longer in this process's mount table.
    Gone,
    /// At this path, not covered.
    Seen(PathBuf),
    /// Covered by another mount: [`MountError::Covered`].
    Covered(MountError),
}

impl<S: FileService> SessionShared<S> {
    /// Runs `serve` in a new thread with `slot` as memory.
    pub(crate) fn spawn_slot(
        self: &Arc<Self>,
        name: &str,
        mut slot: RequestSlot,
        serve: impl FnOnce(&Arc<SessionShared<S>>, &mut RequestSlot) + Send + 'static,
    ) -> io::Result<()> {
        self.spawn_thread(name, move |shared| serve(shared, &mut slot))
    }

    /// Runs `serve` in a new thread of the session.
    pub(crate) fn spawn_thread(
        self: &Arc<Self>,
        name: &str,
        serve: impl FnOnce(&Arc<SessionShared<S>>) + Send + 'static,
    ) -> io::Result<()> {
        let shared = self.clone();
        self.core.update_state(|s| s.live += 1);
        let started = thread::Builder::new().name(name.into()).spawn(move || {
            // A panic outside a call of the file system: the request stays without a reply, so the connection ends.
            if catch_unwind(AssertUnwindSafe(|| serve(&shared))).is_err() {
                if shared.core.is_kept {
                    // The successor gets the request again.
                    std::process::abort();
                }
                shared.connection_ended(ConnectionEnd::Failed(io::Error::other(
                    "a thread that serves requests panicked",
                )));
            }
            shared.thread_ended();
        });
        started.map(drop).inspect_err(|_| self.core.update_state(|s| s.live -= 1))
    }

    /// Makes the entries of a CPU's io_uring queue take queued requests: the kernel gives these to an entry that replies to
    /// another request, and not to a new entry.
    pub(crate) fn wake_queue(&self, cpu: usize) {
        let path = self.core.path.clone();
        if let Err(error) =
            thread::Builder::new().name("fuse-poke".into()).spawn(move || ThreadPlacement::poke_queue(cpu, &path))
        {
            tracing::debug!("queued requests wait for the next one: {error}");
        }
    }

    /// A thread has ended, or goes on with a call that the end of the session does not wait for.
    pub(crate) fn thread_ended(&self) {
        let mut last = false;
        self.core.update_state(|s| {
            s.live -= 1;
            last = s.live == 0 && s.phase != SessionPhase::Ended;
        });
        if last {
            self.dispatcher.kernel.stop(&*self.dispatcher.service);
            self.core.update_state(|s| s.phase = SessionPhase::Ended);
        }
    }

    /// A thread is done with such a call.
    pub(crate) fn thread_returned(&self) {
        self.core.update_state(|s| s.live += 1);
    }

    /// A thread found the connection gone.
    pub(crate) fn connection_ended(&self, end: ConnectionEnd) {
        self.core.update_state(|s| s.gone = true);
        self.dispatcher.service.end_waits();
        match end {
            ConnectionEnd::Unmounted => {}
            ConnectionEnd::Aborted => {
                tracing::warn!("the FUSE connection of {} was aborted", self.core.path.display());
                self.core.update_state(|s| s.broken = true);
            }
            ConnectionEnd::Failed(e) => {
                self.core.record_failure(format!("reading requests failed: {e}"));
                if self.core.is_kept {
                    // The successor serves the connection, which an abort would end.
                    std::process::abort();
                }
                // Without this, the other threads would wait for requests that this thread can no longer read.
                let _ = self.core.abort_session();
            }
        }
    }
}

/// The outcome of an unmount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmountOutcome {
    /// Nothing was open; the session has ended or is about to.
    Clean,
    /// Files were open, or a bind mount exists: the mount is out of the tree, and the session continues until the end of these.
    Detached,
}

/// Unmounts a session from any thread. Cheap to clone.
#[derive(Clone)]
pub struct SessionUnmounter {
    core: Arc<SessionCore>,
}

impl SessionUnmounter {
    /// Unmounts, wherever the mount is now. Retries for `patience` while files are open, then detaches the mount and
    /// returns [`UnmountOutcome::Detached`].
    ///
    /// # Errors
    /// [`MountError::Covered`] when another mount covers the path; the system's error. A mount already gone is no error.
    pub fn unmount(&self, patience: Duration) -> Result<UnmountOutcome, MountError> {
        let until = Instant::now() + patience;
        loop {
            if self.core.state.lock().phase == SessionPhase::Ended {
                return Ok(UnmountOutcome::Clean);
            }
            let at = match self.core.find_mount()? {
                MountPlace::Gone => return Ok(UnmountOutcome::Clean),
                MountPlace::Covered(error) => return Err(error),
                MountPlace::Seen(at) => at,
            };
            match detach_mount(&at, 0) {
                Ok(()) => return Ok(self.bound_outcome()),
                // If another process unmounted meanwhile, the next round sees that in the table.
                Err(MountError::InUse { .. } | MountError::NotMounted { .. }) if Instant::now() < until => {
                    thread::sleep(RETRY_EVERY);
                }
                Err(MountError::InUse { detail, .. }) => {
                    tracing::warn!("{} is in use ({detail}); detaching it", at.display());
                    detach_mount(&at, libc::MNT_DETACH)?;
                    return Ok(UnmountOutcome::Detached);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether the session ends within `patience`.
    pub fn ends_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.core.state.lock().phase != SessionPhase::Ended {
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(RETRY_EVERY.min(patience));
        }
        true
    }

    /// The outcome after a successful unmount; a bind mount keeps the session alive.
    fn bound_outcome(&self) -> UnmountOutcome {
        let Some(at) = self.core.bound_at() else { return UnmountOutcome::Clean };
        tracing::warn!(
            "{0} still shows the same files: they are served until it is unmounted (umount {0})",
            at.display()
        );
        UnmountOutcome::Detached
    }

    /// Whether requests are served, as far as this process knows; else why not.
    ///
    /// # Errors
    /// A sentence: the mount is not ready yet, or the connection is gone.
    pub fn check_serving(&self) -> Result<(), &'static str> {
        let state = self.core.state.lock();
        match state.phase {
            SessionPhase::Starting => Err("the mount is starting"),
            SessionPhase::Ready if !state.gone => Ok(()),
            SessionPhase::Ready | SessionPhase::Ended => Err("the mount's connection to the kernel is gone"),
        }
    }

    /// Aborts the connection, the last resort when a request hangs: all requests in flight fail with ENOTCONN.
    ///
    /// # Errors
    /// When neither sysfs nor a forced unmount is permitted.
    pub fn abort(&self) -> io::Result<()> {
        self.core.abort_session()
    }
}

/// A mounted file system being served. A drop detaches the mount.
pub struct FuseSession {
    core: Arc<SessionCore>,
}

impl FuseSession {
    /// Mounts `service` on `mountpoint` and starts to serve. The mount responds once [`FuseSession::wait_ready`]
    /// returns.
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn mount<S: FileService>(
        service: Arc<S>,
        mountpoint: &Path,
        config: SessionConfig,
    ) -> Result<FuseSession, MountError> {
        FuseSession::begin(service, mountpoint, config, None)
    }

    /// Continues the session of a process that has ended, with its connection `device` and the state in [`SessionConfig::kept`].
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn resume<S: FileService>(
        service: Arc<S>,
        mountpoint: &Path,
        config: SessionConfig,
        device: OwnedFd,
    ) -> Result<FuseSession, MountError> {
        FuseSession::begin(service, mountpoint, config, Some(device))
    }

    fn begin<S: FileService>(
        service: Arc<S>,
        mountpoint: &Path,
        config: SessionConfig,
        resumed: Option<OwnedFd>,
    ) -> Result<FuseSession, MountError> {
        let is_resumed = resumed.is_some();
        // Everything that can fail within this process comes before the mount.
        let failed = |detail: String| MountError::Session { path: mountpoint.into(), detail };
        let largest = config.max_write;
        let page = page_size();
        if !(MIN_MAX_WRITE.max(page)..=1 << 20).contains(&largest) || !largest.is_multiple_of(4096) {
            let least = MIN_MAX_WRITE.max(page) >> 10;
            return Err(failed(format!(
                "requests of {largest} bytes are not possible; give {least}K to 1M, a multiple of 4K, with --max-write"
            )));
        }
        let buffer = config.buffers.allocate(config.slot_len());
        let buffer = buffer.map_err(|e| failed(format!("no memory for the first request: {e}")))?;
        // Before the mount: the kernel writes INIT at mount(2), with the features of that moment.
        let cpus = QueueCpus::detect();
        let chosen = config.choose_transport(&cpus);
        let mounted = match resumed {
            Some(device) => MountedDevice { device, path: mountpoint.to_owned() },
            None => mount::mount_device(mountpoint, &config.options, config.max_write)?,
        };
        let MountedDevice { device, path } = mounted;
        let entry = mounted_at(&path).ok().flatten().filter(|m| m.is_fuse());
        let device = Arc::new(device);
        let core = Arc::new(SessionCore {
            path,
            number: entry.as_ref().map(|m| m.id),
            minor: entry.map(|m| m.device.1),
            notifier: OnceLock::new(),
            device: Arc::downgrade(&device),
            is_kept: config.kept.is_some(),
            state: Mutex::new(SessionState {
                phase: SessionPhase::Starting,
                live: 0,
                chosen: None,
                failure: None,
                gone: false,
                broken: false,
            }),
            changed: Condvar::new(),
        });
        // From here on, dropping the session removes the mount.
        let session = FuseSession { core: core.clone() };
        let shared = Arc::new(SessionShared {
            dispatcher: RequestDispatcher {
                service,
                kernel: SessionKernel::default(),
                stats: config.stats.clone(),
                access_log: config.access_log.clone(),
                failed_reads: FailedReads::default(),
            },
            device,
            dev_threads: AtomicUsize::new(1),
            dev_idle: AtomicUsize::new(0),
            waits: SlotWaits::default(),
            under_way: RequestsUnderWay::default(),
            left_requests: AtomicUsize::new(0),
            watch: Arc::default(),
            ring_depth: config.ring_depth(&cpus),
            dev_keep: (2 * cpus.on.len()).max(4).min(config.dev_threads()),
            config,
            core,
        });
        let slot = RequestSlot::new(buffer, &shared).map_err(|e| failed(e.to_string()))?;
        watch::start_watch(&shared);
        shared
            .spawn_slot("fuse-dev", slot, move |shared, slot| {
                if is_resumed {
                    resume_first_slot(shared, slot, chosen);
                } else {
                    run_first_slot(shared, slot, &cpus, chosen);
                }
            })
            .map_err(|e| failed(format!("no thread: {e}")))?;
        Ok(session)
    }

    /// Waits until INIT is done and requests are served.
    ///
    /// # Errors
    /// [`MountError::Session`] when the session failed or `within` passed.
    pub fn wait_ready(&self, within: Duration) -> Result<(), MountError> {
        let in_time = self.core.wait_for(within, |s| s.phase != SessionPhase::Starting || s.failure.is_some());
        let state = self.core.state.lock();
        let detail = match (&state.failure, state.phase) {
            (Some(why), _) => why.clone(),
            (None, SessionPhase::Ready) => return Ok(()),
            (None, SessionPhase::Ended) => "it was unmounted".into(),
            (None, SessionPhase::Starting) if in_time => "it did not start".into(),
            (None, SessionPhase::Starting) => format!("the kernel's first request did not come within {within:?}"),
        };
        Err(MountError::Session { path: self.core.path.clone(), detail })
    }

    /// The session's transport and why; `None` before that is known.
    pub fn transport(&self) -> Option<TransportChoice> {
        self.core.state.lock().chosen.clone()
    }

    /// The mountpoint: absolute, without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.core.path
    }

    /// Sends notifications to the kernel; `None` before the session is ready.
    pub fn notifier(&self) -> Option<&KernelNotifier> {
        self.core.notifier.get()
    }

    /// The connection to the kernel once more, for a keeper; `None` after the end.
    ///
    /// # Errors
    /// When no descriptor is free.
    pub fn duplicate_device(&self) -> io::Result<Option<OwnedFd>> {
        self.core.device.upgrade().map(|device| device.try_clone()).transpose()
    }

    /// A handle to unmount from another thread, such as a signal handler's.
    pub fn unmounter(&self) -> SessionUnmounter {
        SessionUnmounter { core: self.core.clone() }
    }

    /// Waits until the session has ended: unmounted, all threads gone, all files closed. Removes the mount if the connection was
    /// aborted.
    ///
    /// # Errors
    /// [`MountError::Session`] when the session ended by a failure, or was aborted and not unmounted.
    pub fn join(self) -> Result<(), MountError> {
        // No deadline: a mount may live for months.
        let mut state = self.core.state.lock();
        while state.phase != SessionPhase::Ended {
            self.core.changed.wait(&mut state);
        }
        let failure = state.failure.clone();
        let broken = state.broken;
        drop(state);
        let left = if failure.is_some() || broken { self.core.remove_dead() } else { Ok(false) };
        let detail = match (failure, left) {
            (None, Ok(false)) => return Ok(()),
            (failure, Ok(_)) => failure.unwrap_or_else(aborted_outside),
            (failure, Err(error)) => {
                format!("{}; the dead mount is left: {error}", failure.unwrap_or_else(aborted_outside))
            }
        };
        Err(MountError::Session { path: self.core.path.clone(), detail })
    }

    /// Whether the connection was aborted: no request gets an answer any more.
    pub fn is_broken(&self) -> bool {
        self.core.state.lock().broken
    }

    /// Waits like [`FuseSession::join`] for at most `within`; true when the session has ended.
    pub fn wait_ended(&self, within: Duration) -> bool {
        self.core.wait_for(within, |s| s.phase == SessionPhase::Ended)
    }

    /// Unmounts within `grace`: cleanly, else detached; if requests still hang at the end of `grace`, aborts the connection. True
    /// when all threads have ended; a call that never returns keeps a thread for ever.
    ///
    /// # Errors
    /// The errors of an unmount.
    pub fn shutdown(&self, grace: Duration) -> Result<bool, MountError> {
        let until = Instant::now() + grace;
        self.unmounter().unmount(grace / 2)?;
        if self.wait_ended(until.saturating_duration_since(Instant::now())) {
            return Ok(true);
        }
        tracing::warn!("{} is still in use after {grace:?}; aborting its connection", self.core.path.display());
        if let Err(e) = self.core.abort_session() {
            tracing::warn!("the connection of {} could not be aborted: {e}", self.core.path.display());
        }
        Ok(self.wait_ended(ABORT_GRACE))
    }
}

fn aborted_outside() -> String {
    "its connection to the kernel was aborted from outside".to_owned()
}

impl Drop for FuseSession {
    fn drop(&mut self) {
        if self.core.is_kept {
            // The keeper decides.
            return;
        }
        let (ended, failed) = {
            let state = self.core.state.lock();
            (state.phase == SessionPhase::Ended, state.failure.is_some())
        };
        if let Ok(MountPlace::Seen(at)) = self.core.find_mount()
            && (!ended || failed && matches!(mount::probe_mount(&at), mount::MountHealth::Dead))
        {
            let _ = detach_mount(&at, libc::MNT_DETACH);
        }
    }
}

/// The first thread: INIT, the start of the other slots, then the thread's own slot.
fn run_first_slot<S: FileService>(
    shared: &Arc<SessionShared<S>>,
    slot: &mut RequestSlot,
    cpus: &QueueCpus,
    mut chosen: TransportChoice,
) {
    let mut gate = None;
    if chosen.io == FuseIo::Uring {
        match ring::prepare_entries(shared, cpus) {
            Ok(ready) => gate = Some(ready),
            Err(why) => {
                chosen = TransportChoice { io: FuseIo::Dev, reason: format!("io_uring could not be set up: {why}") }
            }
        }
    }
    let mut agreed = None;
    let shaken = dev::negotiate_session(&shared.device, slot.bytes(), |minor, _, flags| {
        let (out, with) = negotiate_init(&shared.config, page_size(), gate.is_some(), minor, flags)?;
        agreed = Some(with);
        // Before the reply, so that the file system is ready for the first request.
        let kernel = negotiated_kernel(shared, with);
        let _ = shared.core.notifier.set(kernel.notifier.clone());
        if let Some(kept) = &shared.config.kept {
            if with.minor < OLDEST_RESENDING_MINOR {
                return Err(format!(
                    "--recover needs Linux 6.9 (FUSE 7.{OLDEST_RESENDING_MINOR}), and this kernel speaks FUSE 7.{}; mount without \
                     --recover",
                    with.minor
                ));
            }
            kept.state.set_agreement(&with);
        }
        shared.dispatcher.kernel.start(&shared.dispatcher.service, kernel, shared.config.kept.as_ref());
        Ok(out)
    });
    let (Ok(()), Some(agreed)) = (&shaken, agreed) else {
        if let Some((gate, _)) = gate {
            gate.cancel_start();
        }
        shared.core.record_failure(shaken.err().unwrap_or_default());
        return;
    };
    if let Some((gate, entries)) = gate {
        if agreed.uring {
            if let Err(why) = gate.open_gate(entries) {
                shared
                    .core
                    .record_failure(format!("FUSE over io_uring failed to start: {why}; mount with --fuse-io dev"));
                let _ = shared.core.abort_session();
                return;
            }
            chosen.reason = format!("{}; {entries} entries on {} CPUs", chosen.reason, cpus.all);
        } else {
            gate.cancel_start();
            chosen =
                TransportChoice { io: FuseIo::Dev, reason: "io_uring was not offered by the kernel at INIT".into() };
        }
    }
    if let Some(note) = raise_readahead(shared) {
        chosen.reason = format!("{}; {note}", chosen.reason);
    }
    let dev = chosen.io == FuseIo::Dev;
    shared.core.update_state(|s| {
        s.chosen = Some(chosen);
        if s.phase == SessionPhase::Starting {
            s.phase = SessionPhase::Ready;
        }
    });
    dev::serve_device(shared, slot, &shared.device, dev);
}

/// The first thread of a session that continues another's.
fn resume_first_slot<S: FileService>(shared: &Arc<SessionShared<S>>, slot: &mut RequestSlot, chosen: TransportChoice) {
    let kept = shared.config.kept.as_ref();
    let Some(agreed) = kept.and_then(|kept| kept.state.agreement()) else {
        return shared.core.record_failure("the process before had agreed nothing with the kernel".into());
    };
    let kernel = negotiated_kernel(shared, agreed);
    let notifier = kernel.notifier.clone();
    let _ = shared.core.notifier.set(notifier.clone());
    shared.dispatcher.kernel.start(&shared.dispatcher.service, kernel, kept);
    if let Err(error) = notifier.request_again() {
        return shared.core.record_failure(format!("the kernel sends no request again: {error}"));
    }
    shared.core.update_state(|s| {
        s.chosen = Some(chosen);
        s.phase = SessionPhase::Ready;
    });
    dev::serve_device(shared, slot, &shared.device, true);
}

fn negotiated_kernel<S: FileService>(shared: &Arc<SessionShared<S>>, agreed: InitAgreement) -> NegotiatedKernel {
    NegotiatedKernel {
        backings: agreed.passthrough.then(|| BackingRegistrations::new(BackingRegistrar::new(&shared.device))),
        notifier: KernelNotifier::new(
            &shared.device,
            agreed.minor,
            shared.config.kept.as_ref().and_then(|kept| kept.relay.clone()),
        ),
        waiting: WaitingSlots::new(shared),
        create_group: agreed.create_group,
        direct_mmap: agreed.direct_mmap,
    }
}

/// The kernel limits a mount's read-ahead to 128 KiB whatever INIT requests; root can raise the limit in sysfs. Returns a note if
/// that failed.
fn raise_readahead<S>(shared: &SessionShared<S>) -> Option<String> {
    let want = shared.config.max_readahead >> 10;
    if want <= 128 {
        return None;
    }
    let minor = shared.core.minor?;
    let file = format!("/sys/class/bdi/0:{minor}/read_ahead_kb");
    let e = fs::write(&file, want.to_string()).err()?;
    Some(format!("read-ahead of the kernel stays at 128 KiB ({file}: {e})"))
}
