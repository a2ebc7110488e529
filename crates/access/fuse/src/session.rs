//! The life of one mount: made, agreed on with the kernel, served by threads, unmounted. It knows which kind
//! of session runs and nothing of what requests mean.

use crate::backing::Backings;
use crate::buffer::{HEAD_LEN, SlotBuffer, page_size};
use crate::config::{Chosen, FuseIo, SessionConfig};
use crate::dev::{self, End};
use crate::dispatch::Dispatcher;
use crate::handler::{Handler, InitInfo};
use crate::init::{Agreed, negotiate};
use crate::mount::{self, MountError, Mounted, abort_connection, detach};
use crate::mountinfo::{MountEntry, MountTable, mounted_at};
use crate::ring::{self, Cpus};
use parking_lot::{Condvar, Mutex};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

/// How often a busy mount is tried again before it is detached.
const RETRY_EVERY: Duration = Duration::from_millis(50);
/// How long threads get to notice that the connection was aborted.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// The kernel hands out no request to who has room for less (FUSE_MIN_READ_BUFFER).
const MIN_MAX_WRITE: u32 = 8 << 10;

/// The memory of one slot.
pub(crate) struct Slot {
    pub(crate) buffer: Box<dyn SlotBuffer>,
}

impl Slot {
    pub(crate) fn new<H>(buffer: Box<dyn SlotBuffer>, shared: &Shared<H>) -> io::Result<Slot> {
        if buffer.len() < shared.config.slot_len() || !(buffer.as_ptr().as_ptr() as usize).is_multiple_of(HEAD_LEN) {
            return Err(io::Error::other("a slot's buffer is too short or not aligned to a page"));
        }
        Ok(Slot { buffer })
    }
}

/// What the threads of a session share.
pub(crate) struct Shared<H> {
    pub(crate) dispatcher: Dispatcher<H>,
    pub(crate) config: SessionConfig,
    pub(crate) device: Arc<OwnedFd>,
    /// Threads on /dev/fuse, and those of them that wait for a request.
    pub(crate) dev_threads: AtomicUsize,
    pub(crate) dev_idle: AtomicUsize,
    /// Idle threads kept, however many were needed once.
    pub(crate) dev_keep: usize,
    core: Arc<Core>,
}

/// What outlives the threads and does not depend on the handler's type.
struct Core {
    /// Where it was mounted; who renames a directory above takes it elsewhere.
    path: PathBuf,
    /// The mount's own number, and the minor number of its device: the connection's name in sysfs.
    number: Option<u32>,
    minor: Option<u32>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    phase: Phase,
    /// Threads that run.
    live: usize,
    chosen: Option<Chosen>,
    failure: Option<String>,
    /// Whether a thread found the connection gone.
    gone: bool,
    /// Whether it was broken off, by whomever, and not unmounted.
    broken: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Ready,
    Ended,
}

impl Core {
    fn update(&self, f: impl FnOnce(&mut State)) {
        f(&mut self.state.lock());
        self.changed.notify_all();
    }

    fn fail(&self, detail: String) {
        tracing::error!("the FUSE session on {} failed: {detail}", self.path.display());
        self.update(|s| {
            s.failure.get_or_insert(detail);
        });
    }

    /// Waits until `done`; false when `within` passed first.
    fn wait(&self, within: Duration, mut done: impl FnMut(&State) -> bool) -> bool {
        let until = Instant::now() + within;
        let mut state = self.state.lock();
        while !done(&state) {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return done(&state);
            }
        }
        true
    }

    /// Whether `mount` shows this session's files: its own mount, or a bind mount of it.
    fn shows(&self, mount: &MountEntry) -> bool {
        mount.is_fuse() && self.minor.is_none_or(|minor| mount.device == (0, minor))
    }

    /// Where the mount is now.
    fn place(&self) -> Result<Place, MountError> {
        let table = MountTable::read().map_err(|source| MountError::System {
            what: "reading the mount table for",
            path: self.path.clone(),
            source,
        })?;
        let ours = |m: &&MountEntry| {
            self.shows(m) && self.number.map_or_else(|| m.mountpoint == self.path, |number| m.id == number)
        };
        let Some(mount) = table.entries().iter().rfind(ours) else { return Ok(Place::Gone) };
        let at = mount.mountpoint.clone();
        Ok(match table.seen_at(&at) {
            Some(seen) if seen.id == mount.id => Place::Seen(at),
            seen => {
                let over = seen.map(|m| (format!("{} from '{}'", m.fstype, m.source), m.mountpoint.clone()));
                let (over, over_at) = over.unwrap_or_else(|| ("another file system".into(), at.clone()));
                Place::Covered(MountError::Covered { path: at, over, at: over_at })
            }
        })
    }

    /// A place other than the mount's own, now gone, where the session's files are seen still.
    fn bound_at(&self) -> Option<PathBuf> {
        self.minor?;
        let table = MountTable::read().ok()?;
        table.entries().iter().find(|m| self.shows(m) && self.number != Some(m.id)).map(|m| m.mountpoint.clone())
    }

    /// Takes away the mount that is there still and answers nobody, its connection being broken; true when there was one.
    /// Who breaks it with an unmount to come, `umount --force` above all, gets a moment for that.
    fn remove_dead(&self) -> Result<bool, MountError> {
        let until = Instant::now() + ABORT_GRACE;
        loop {
            match self.place()? {
                Place::Gone => return Ok(false),
                _ if Instant::now() < until => thread::sleep(RETRY_EVERY),
                Place::Covered(error) => return Err(error),
                // Not somebody's new mount in its place.
                Place::Seen(at) if matches!(mount::look(&at), mount::Look::Dead) => {
                    return detach(&at, libc::MNT_DETACH).map(|()| true);
                }
                Place::Seen(_) => return Ok(false),
            }
        }
    }

    /// Breaks the connection: all requests under way and to come fail with ENOTCONN.
    fn abort(&self) -> io::Result<()> {
        match (self.minor.map(abort_connection), self.place()) {
            (Some(Ok(())), _) => Ok(()),
            // A forced unmount does the same, as long as the mount is seen.
            (_, Ok(Place::Seen(at))) => detach(&at, libc::MNT_FORCE | libc::MNT_DETACH).map_err(io::Error::other),
            (Some(Err(e)), _) => Err(e),
            (None, _) => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }
}

/// Where the mount of a session is.
enum Place {
    /// In no mount table of this process's any more.
    Gone,
    /// At this path, which leads to it.
    Seen(PathBuf),
    /// At a path that leads to something else: [`MountError::Covered`].
    Covered(MountError),
}

impl<H: Handler> Shared<H> {
    /// Runs `serve` in a thread of its own with `slot` as its memory.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        name: &str,
        mut slot: Slot,
        serve: impl FnOnce(&Arc<Shared<H>>, &mut Slot) + Send + 'static,
    ) -> io::Result<()> {
        let shared = self.clone();
        self.core.update(|s| s.live += 1);
        let started = thread::Builder::new().name(name.into()).spawn(move || {
            // What panics here was no request's handler; its request is never answered, so the connection ends.
            if catch_unwind(AssertUnwindSafe(|| serve(&shared, &mut slot))).is_err() {
                shared.connection_ended(End::Failed(io::Error::other("a thread that serves requests panicked")));
            }
            drop(slot);
            shared.thread_ended();
        });
        started.map(drop).inspect_err(|_| self.core.update(|s| s.live -= 1))
    }

    fn thread_ended(&self) {
        let mut last = false;
        self.core.update(|s| {
            s.live -= 1;
            last = s.live == 0;
        });
        if last {
            self.dispatcher.handler.destroy();
            self.core.update(|s| s.phase = Phase::Ended);
        }
    }

    /// A thread found the connection gone.
    pub(crate) fn connection_ended(&self, end: End) {
        self.core.update(|s| s.gone = true);
        match end {
            End::Unmounted => {}
            End::Aborted => {
                tracing::warn!("the FUSE connection of {} was aborted", self.core.path.display());
                self.core.update(|s| s.broken = true);
            }
            End::Failed(e) => {
                self.core.fail(format!("reading requests failed: {e}"));
                // The other threads would wait for requests that this one can no longer take.
                let _ = self.core.abort();
            }
        }
    }
}

/// How an unmount went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmounted {
    /// Nothing was open; the session has ended or is about to.
    Clean,
    /// Files were open, or it is bound to another place as well: the mount is out of the tree, and the session goes on
    /// until those are gone.
    Detached,
}

/// Unmounts a session from any thread. Cheap to clone.
#[derive(Clone)]
pub struct Unmounter {
    core: Arc<Core>,
}

impl Unmounter {
    /// Unmounts, wherever the mount is by now: tries for `patience` while files are open, then detaches the mount and
    /// says so.
    ///
    /// # Errors
    /// [`MountError::Covered`] when something lies over it; what the system answers; already being unmounted is none.
    pub fn unmount(&self, patience: Duration) -> Result<Unmounted, MountError> {
        let until = Instant::now() + patience;
        loop {
            if self.core.state.lock().phase == Phase::Ended {
                return Ok(Unmounted::Clean);
            }
            let at = match self.core.place()? {
                Place::Gone => return Ok(Unmounted::Clean),
                Place::Covered(error) => return Err(error),
                Place::Seen(at) => at,
            };
            match detach(&at, 0) {
                Ok(()) => return Ok(self.bound()),
                // Whoever else unmounted it meanwhile is seen in the table.
                Err(MountError::InUse { .. } | MountError::NotMounted { .. }) if Instant::now() < until => {
                    thread::sleep(RETRY_EVERY);
                }
                Err(MountError::InUse { detail, .. }) => {
                    tracing::warn!("{} is in use ({detail}); detaching it", at.display());
                    detach(&at, libc::MNT_DETACH)?;
                    return Ok(Unmounted::Detached);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// The mount is gone; a bind mount of it keeps the session.
    fn bound(&self) -> Unmounted {
        let Some(at) = self.core.bound_at() else { return Unmounted::Clean };
        tracing::warn!(
            "{0} shows the same files still: they are served until it is unmounted (umount {0})",
            at.display()
        );
        Unmounted::Detached
    }

    /// Whether requests are answered, as far as this process knows; else why not.
    ///
    /// # Errors
    /// A sentence: the mount is still being made, or its connection is gone.
    pub fn serves(&self) -> Result<(), &'static str> {
        let state = self.core.state.lock();
        match state.phase {
            Phase::Starting => Err("the mount is being made"),
            Phase::Ready if !state.gone => Ok(()),
            Phase::Ready | Phase::Ended => Err("the mount's connection to the kernel is gone"),
        }
    }

    /// Breaks the connection, the last resort when a request hangs: everything under way fails with ENOTCONN.
    ///
    /// # Errors
    /// When neither sysfs nor a forced unmount is allowed.
    pub fn abort(&self) -> io::Result<()> {
        self.core.abort()
    }
}

/// A mounted file system being served. Dropping it detaches the mount.
pub struct Session {
    core: Arc<Core>,
}

impl Session {
    /// Mounts `handler` on `mountpoint` and starts serving. The mount answers once [`Session::wait_ready`] says so.
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn mount<H: Handler>(handler: Arc<H>, mountpoint: &Path, config: SessionConfig) -> Result<Session, MountError> {
        // What can fail for reasons of this process does so before anything is mounted.
        let failed = |detail: String| MountError::Session { path: mountpoint.into(), detail };
        let (largest, page) = (config.max_write, page_size());
        if !(MIN_MAX_WRITE.max(page)..=1 << 20).contains(&largest) || !largest.is_multiple_of(4096) {
            let least = MIN_MAX_WRITE.max(page) >> 10;
            return Err(failed(format!(
                "requests of {largest} bytes can't be here; give {least}K to 1M, a multiple of 4K, with --max-write"
            )));
        }
        let buffer = config.buffers.allocate(config.slot_len());
        let buffer = buffer.map_err(|e| failed(format!("no memory for the first request: {e}")))?;
        // Before mounting: the kernel writes INIT at mount(2), with what it offers at that moment.
        let cpus = Cpus::read();
        let chosen = config.choose(&cpus);
        let Mounted { device, path } = mount::mount(mountpoint, &config.options, config.max_write)?;
        let entry = mounted_at(&path).ok().flatten().filter(|m| m.is_fuse());
        let core = Arc::new(Core {
            path,
            number: entry.as_ref().map(|m| m.id),
            minor: entry.map(|m| m.device.1),
            state: Mutex::new(State {
                phase: Phase::Starting,
                live: 0,
                chosen: None,
                failure: None,
                gone: false,
                broken: false,
            }),
            changed: Condvar::new(),
        });
        // From here on dropping the session takes the mount away again.
        let session = Session { core: core.clone() };
        let shared = Arc::new(Shared {
            dispatcher: Dispatcher { handler, stats: config.stats.clone(), access_log: config.access_log.clone() },
            device: Arc::new(device),
            dev_threads: AtomicUsize::new(1),
            dev_idle: AtomicUsize::new(0),
            dev_keep: (2 * cpus.on.len()).max(4).min(config.dev_threads()),
            config,
            core,
        });
        let slot = Slot::new(buffer, &shared).map_err(|e| failed(e.to_string()))?;
        shared
            .spawn("fuse-dev", slot, move |shared, slot| start(shared, slot, &cpus, chosen))
            .map_err(|e| failed(format!("no thread: {e}")))?;
        Ok(session)
    }

    /// Waits until the kernel's INIT was answered and requests are served.
    ///
    /// # Errors
    /// [`MountError::Session`] when the session failed or `within` passed.
    pub fn wait_ready(&self, within: Duration) -> Result<(), MountError> {
        let in_time = self.core.wait(within, |s| s.phase != Phase::Starting || s.failure.is_some());
        let state = self.core.state.lock();
        let detail = match (&state.failure, state.phase) {
            (Some(why), _) => why.clone(),
            (None, Phase::Ready) => return Ok(()),
            (None, Phase::Ended) => "it was unmounted".into(),
            (None, Phase::Starting) if in_time => "it did not start".into(),
            (None, Phase::Starting) => format!("the kernel's first request did not come within {within:?}"),
        };
        Err(MountError::Session { path: self.core.path.clone(), detail })
    }

    /// Which kind of session runs and why; `None` before it is ready.
    pub fn describe(&self) -> Option<Chosen> {
        self.core.state.lock().chosen.clone()
    }

    /// Where it is mounted: absolute, without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.core.path
    }

    /// Unmounts from another thread, such as one that waits for signals.
    pub fn unmounter(&self) -> Unmounter {
        Unmounter { core: self.core.clone() }
    }

    /// Waits until the session has ended: unmounted by whomever, all threads gone, the handler's `destroy` called. A mount
    /// whose connection was broken off is taken away.
    ///
    /// # Errors
    /// [`MountError::Session`] when it ended by a failure, or was broken off and not unmounted.
    pub fn join(self) -> Result<(), MountError> {
        // Bounded by whoever unmounts; a mount is meant to live for months.
        let mut state = self.core.state.lock();
        while state.phase != Phase::Ended {
            self.core.changed.wait(&mut state);
        }
        let (failure, broken) = (state.failure.clone(), state.broken);
        drop(state);
        let left = match failure.is_some() || broken {
            true => self.core.remove_dead(),
            false => Ok(false),
        };
        let broken_off = || "its connection to the kernel was broken off from outside".to_owned();
        let detail = match (failure, left) {
            (None, Ok(false)) => return Ok(()),
            (failure, Ok(_)) => failure.unwrap_or_else(broken_off),
            (failure, Err(error)) => {
                format!("{}; the dead mount is left: {error}", failure.unwrap_or_else(broken_off))
            }
        };
        Err(MountError::Session { path: self.core.path.clone(), detail })
    }

    /// Waits like [`Session::join`] for at most `within`; true when the session has ended.
    pub fn wait_ended(&self, within: Duration) -> bool {
        self.core.wait(within, |s| s.phase == Phase::Ended)
    }

    /// Unmounts within `grace`: cleanly, else detached, and when requests still hang at its end by breaking
    /// the connection. True when all threads have ended; a handler that never returns keeps its own for ever.
    ///
    /// # Errors
    /// What unmounting answers.
    pub fn shutdown(&self, grace: Duration) -> Result<bool, MountError> {
        let until = Instant::now() + grace;
        self.unmounter().unmount(grace / 2)?;
        if self.wait_ended(until.saturating_duration_since(Instant::now())) {
            return Ok(true);
        }
        tracing::warn!("{} is still in use after {grace:?}; breaking its connection", self.core.path.display());
        if let Err(e) = self.core.abort() {
            tracing::warn!("the connection of {} could not be broken: {e}", self.core.path.display());
        }
        Ok(self.wait_ended(ABORT_GRACE))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let (ended, failed) = {
            let state = self.core.state.lock();
            (state.phase == Phase::Ended, state.failure.is_some())
        };
        if let Ok(Place::Seen(at)) = self.core.place()
            && (!ended || failed && matches!(mount::look(&at), mount::Look::Dead))
        {
            let _ = detach(&at, libc::MNT_DETACH);
        }
    }
}

/// The first thread's life: INIT, the other slots, then one slot of its own.
fn start<H: Handler>(shared: &Arc<Shared<H>>, slot: &mut Slot, cpus: &Cpus, mut chosen: Chosen) {
    let mut gate = None;
    if chosen.io == FuseIo::Uring {
        match ring::prepare(shared, cpus) {
            Ok(ready) => gate = Some(ready),
            Err(why) => chosen = Chosen { io: FuseIo::Dev, reason: format!("io_uring could not be set up: {why}") },
        }
    }
    let mut agreed = None;
    let shaken = dev::handshake(&shared.device, dev::slot_bytes(&mut *slot.buffer), |minor, _, flags| {
        let (out, with) = negotiate(&shared.config, page_size(), gate.is_some(), minor, flags)?;
        agreed = Some(with);
        // The handler hears of it before the kernel does, so that it is ready for the first request.
        shared.dispatcher.handler.init(&init_info(shared, with));
        Ok(out)
    });
    let (Ok(()), Some(agreed)) = (&shaken, agreed) else {
        if let Some((gate, _)) = gate {
            gate.cancel();
        }
        shared.core.fail(shaken.err().unwrap_or_default());
        return;
    };
    if let Some((gate, entries)) = gate {
        if agreed.uring {
            if let Err(why) = gate.open(entries) {
                shared.core.fail(format!("FUSE over io_uring broke off: {why}; mount with /dev/fuse"));
                let _ = shared.core.abort();
                return;
            }
            chosen.reason = format!("{}; {entries} entries on {} CPUs", chosen.reason, cpus.all);
        } else {
            gate.cancel();
            chosen = Chosen { io: FuseIo::Dev, reason: "io_uring was not offered by the kernel at INIT".into() };
        }
    }
    if let Some(note) = raise_readahead(shared) {
        chosen.reason = format!("{}; {note}", chosen.reason);
    }
    let dev = chosen.io == FuseIo::Dev;
    shared.core.update(|s| {
        s.chosen = Some(chosen);
        if s.phase == Phase::Starting {
            s.phase = Phase::Ready;
        }
    });
    dev::serve(shared, slot, &shared.device, dev);
}

fn init_info<H: Handler>(shared: &Shared<H>, agreed: Agreed) -> InitInfo {
    let backings = agreed.passthrough.then(|| Backings::new(&shared.device));
    InitInfo { minor: agreed.minor, max_read: agreed.max_read, backings }
}

/// The kernel limits a mount's read-ahead to 128 KiB whatever INIT says, and lets root raise it in sysfs.
/// Answers a note when it could not be raised.
fn raise_readahead<H>(shared: &Shared<H>) -> Option<String> {
    let want = shared.config.max_readahead >> 10;
    if want <= 128 {
        return None;
    }
    let minor = shared.core.minor?;
    let file = format!("/sys/class/bdi/0:{minor}/read_ahead_kb");
    let e = fs::write(&file, want.to_string()).err()?;
    Some(format!("read-ahead of the kernel stays at 128 KiB ({file}: {e})"))
}
