//! The keeper's loop: starts the mount's process, waits for its end, and starts it again as long as the mount lives.

use crate::descriptor_socket::conversation;
use crate::life::LIFE_VARIABLE;
use crate::messages::{
    KeeperMessage, KeptDescriptors, KeptMount, LifeOrder, UPGRADE_ACCEPTED, UPGRADE_CAUSE, monotonic_ns,
};
use crate::notifications::serve_notifications;
use crate::store::{STORE_RETRY_INTERVAL, StoreLink};
use crate::stored_files::{FileConversation, FileStore};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The keeper gives up after this many processes in a row that crashed or were killed early.
const EARLY_DEATHS_MAX: u32 = 5;
/// The keeper gives up after this long without a process that served, if each ended with an error of its own: the source may
/// be out of reach for a while.
const FAILED_STARTS_LIMIT: Duration = Duration::from_secs(300);
/// A process that served for less than this died early.
const EARLY_DEATH_AGE: Duration = Duration::from_secs(1);
/// The pause before the second restart in a row; doubled with each further one, up to the longest.
const RESTART_PAUSE: Duration = Duration::from_millis(100);
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(5);
/// The last pause before the start of a process is abandoned.
const START_PAUSE_MAX: Duration = Duration::from_secs(10);
/// How long all threads of a process may take to stop, and the interval of looks.
const HALT_LIMIT: Duration = Duration::from_millis(500);
const HALT_INTERVAL: Duration = Duration::from_millis(1);
/// How long a new program may take to check the state.
pub const CHECK_LIMIT: Duration = Duration::from_secs(30);
/// The kernel reads no request into less than the largest one needs.
const REQUEST_ROOM_BYTES: usize = 2 << 20;
/// The exit code of a mount that the keeper gave up, or whose process was killed before it had mounted.
const FAILED_CODE: u8 = 1;

/// The program of a mount's process.
#[derive(Debug)]
pub struct SupervisedProgram {
    path: PathBuf,
    /// Kept open: the file may be replaced or removed while the mount lives.
    file: File,
    arguments: Vec<OsString>,
    /// The working directory, for relative paths in the arguments. Kept open: a path below the mountpoint is resolved by the
    /// mount, which has no process yet, and the start would hang.
    folder: Option<File>,
}

impl SupervisedProgram {
    /// The program at `path`, with the arguments and the working directory of this process.
    ///
    /// # Errors
    /// When the program can't be opened.
    pub fn open(path: PathBuf) -> io::Result<SupervisedProgram> {
        let arguments = std::env::args_os().skip(1).collect();
        Ok(SupervisedProgram { file: File::open(&path)?, path, arguments, folder: File::open(".").ok() })
    }

    fn with_program(&self, path: PathBuf) -> io::Result<SupervisedProgram> {
        let file = File::open(&path)?;
        let folder = self.folder.as_ref().map(File::try_clone).transpose()?;
        Ok(SupervisedProgram { path, file, arguments: self.arguments.clone(), folder })
    }

    fn command(&self) -> Command {
        let same = |at: std::fs::Metadata| {
            self.file.metadata().is_ok_and(|kept| (kept.dev(), kept.ino()) == (at.dev(), at.ino()))
        };
        let path = if self.path.metadata().is_ok_and(same) { self.path.clone() } else { open_file_path(&self.file) };
        let mut command = Command::new(path);
        command.arg0("spurline").args(&self.arguments).env(LIFE_VARIABLE, "1");
        if let Some(folder) = &self.folder {
            command.current_dir(open_file_path(folder));
        }
        command
    }
}

fn open_file_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Requests to end the mount, from a thread of signals.
#[derive(Debug)]
pub struct StopRequests {
    process: AtomicI32,
    /// Whether the process unmounts at a signal. A successor that is killed at its start would leave a dead mount.
    unmounts: AtomicBool,
    /// Whether a stop ends only the keeper and the process, because a store holds the mount for the next keeper.
    leaves_mount: AtomicBool,
    /// Open files that this keeper has and no store.
    held_files: Arc<AtomicUsize>,
    ends_files: AtomicBool,
    count: AtomicU32,
    /// Readable after a request.
    wake: OwnedFd,
}

impl StopRequests {
    /// None yet.
    ///
    /// # Errors
    /// When no descriptor is free.
    pub fn new() -> io::Result<StopRequests> {
        Ok(StopRequests {
            process: AtomicI32::new(0),
            unmounts: AtomicBool::new(false),
            leaves_mount: AtomicBool::new(false),
            held_files: Arc::default(),
            ends_files: AtomicBool::new(false),
            count: AtomicU32::new(0),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Ends the mount: each call is a signal for the mount's process, as soon as that can unmount. The second call does not wait
    /// for that. With a store the mount is left to the next keeper, unless that would lack open files: their changes are published by
    /// an unmount.
    pub fn request_stop(&self) {
        if self.held_files.load(Ordering::SeqCst) > 0 {
            self.ends_files.store(true, Ordering::SeqCst);
        }
        self.count.fetch_add(1, Ordering::SeqCst);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        if !self.leaves_mount() && (self.unmounts.load(Ordering::SeqCst) || self.is_forced()) {
            self.signal_process();
        }
    }

    fn signal_process(&self) {
        if let Some(process) = Pid::from_raw(self.process.load(Ordering::SeqCst)) {
            let _ = kill_process(process, Signal::TERM);
        }
    }

    fn is_stopping(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    fn is_forced(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 1
    }

    fn leaves_mount(&self) -> bool {
        self.leaves_mount.load(Ordering::SeqCst) && !self.ends_files.load(Ordering::SeqCst)
    }

    fn set_leaves_mount(&self, leaves: bool) {
        self.leaves_mount.store(leaves, Ordering::SeqCst);
        if !leaves && self.is_stopping() && self.unmounts.load(Ordering::SeqCst) {
            self.signal_process();
        }
    }

    fn clear_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn set_process(&self, id: u32) {
        self.unmounts.store(false, Ordering::SeqCst);
        self.process.store(id as i32, Ordering::SeqCst);
        if self.is_forced() && !self.leaves_mount() {
            self.signal_process();
        }
    }

    /// From now on the process unmounts at a signal, or leaves nothing behind.
    fn set_unmounts(&self) {
        self.unmounts.store(true, Ordering::SeqCst);
        if self.is_stopping() && !self.leaves_mount() {
            self.signal_process();
        }
    }
}

/// Where a keeper reports.
pub trait KeeperReports {
    /// The mount is ready for the first time.
    ///
    /// # Errors
    /// When the mount is not wanted any more.
    fn report_ready(&mut self) -> Result<(), String>;

    /// A line of the log: what happened to the mount's process.
    fn report_restart(&mut self, text: &str);

    /// The mount is lost.
    fn report_loss(&mut self, text: &str);

    /// The mount is to end, and has no process that could unmount.
    fn remove_mount(&mut self);
}

/// Events that a keeper has waited for.
struct LifeEvents {
    ended: bool,
    spoke: bool,
}

/// How a life ended.
struct LifeEnd {
    status: ExitStatus,
    /// How long requests were served; `None` if never.
    served: Option<Duration>,
    /// The program of the next life, of an accepted upgrade.
    upgrade: Option<SupervisedProgram>,
    /// The process has put a state of another version in the place of that of the process before.
    has_converted: bool,
}

/// The keeper's state.
struct Keeper<'a> {
    kept: Option<KeptDescriptors>,
    /// Open files of the mount's processes.
    files: FileStore,
    /// The socket of the conversation about these with the process.
    process_files: Option<Arc<OwnedFd>>,
    stop: &'a StopRequests,
    reports: &'a mut dyn KeeperReports,
    store: Option<StoreLink>,
    takeovers: u64,
    /// Why the process before ended, and when; empty and 0 at first.
    cause: String,
    ended_at_ns: u64,
    is_ready: bool,
    /// A stop has left the mount to the next keeper.
    has_left: bool,
}

/// Runs the mount's process, again and again until the mount ends; returns the exit code. With a `store` whose mount lives, the first
/// process continues that mount.
///
/// # Errors
/// When the process can't be started, or the store does not answer.
pub fn supervise(
    program: SupervisedProgram,
    stop: &StopRequests,
    reports: &mut dyn KeeperReports,
    store: Option<StoreLink>,
) -> io::Result<u8> {
    let mut keeper = Keeper {
        kept: None,
        files: FileStore::new(Arc::clone(&stop.held_files)),
        process_files: None,
        stop,
        reports,
        store,
        takeovers: 0,
        cause: String::new(),
        ended_at_ns: 0,
        is_ready: false,
        has_left: false,
    };
    keeper.take_from_store()?;
    let mut program = program;
    let mut before: Option<SupervisedProgram> = None;
    let mut early_deaths = EarlyDeaths::default();
    loop {
        let mut end = keeper.run_life(&program)?;
        if let Some(code) = keeper.end_of_mount(&end) {
            return Ok(code);
        }
        keeper.takeovers += 1;
        if let Some(next) = end.upgrade.take() {
            keeper.cause = format!("{UPGRADE_CAUSE}{}", next.path.display());
            before = Some(std::mem::replace(&mut program, next));
            early_deaths = EarlyDeaths::default();
            continue;
        }
        keeper.cause = format!("its process ended: {}", end.status);
        let early = end.served.is_none_or(|served| served < EARLY_DEATH_AGE);
        // The program of before can't read another state.
        before = before.filter(|_| !end.has_converted);
        if early && let Some(old) = before.take() {
            keeper.cause = format!("the upgrade to {} failed, {}", program.path.display(), keeper.cause);
            program = old;
            keeper.reports.report_restart(&format!("{}; {} goes on", keeper.cause, program.path.display()));
            continue;
        }
        if !early {
            // The program of an upgrade has proved itself.
            before = None;
        }
        if early {
            early_deaths.count_death(&end);
        } else {
            early_deaths = EarlyDeaths::default();
        }
        if let Some(code) = keeper.pause_or_give_up(&early_deaths, &end) {
            return Ok(code);
        }
    }
}

/// Processes in a row that died early.
#[derive(Default)]
struct EarlyDeaths {
    /// The last ones, which crashed or were killed.
    crashes: u32,
    /// Processes since the last that served, which ended with an error of their own; and the end of the first.
    failed_starts: u32,
    failing_since: Option<Instant>,
}

impl EarlyDeaths {
    fn count_death(&mut self, end: &LifeEnd) {
        if end.served.is_some() {
            self.failed_starts = 0;
            self.failing_since = None;
        }
        if end.status.code().is_none() {
            self.crashes += 1;
        } else {
            self.crashes = 0;
            self.failed_starts += 1;
            self.failing_since.get_or_insert_with(Instant::now);
        }
    }

    /// Why the keeper gives up.
    fn are_too_many(&self) -> Option<String> {
        if self.crashes >= EARLY_DEATHS_MAX {
            return Some(format!("the mount's process died {EARLY_DEATHS_MAX} times in a row soon after its start"));
        }
        let failed = self.failing_since.is_some_and(|since| since.elapsed() >= FAILED_STARTS_LIMIT);
        failed.then(|| {
            let limit = FAILED_STARTS_LIMIT.as_secs();
            format!("the mount's process could not serve for {limit} s, in {} starts", self.failed_starts)
        })
    }

    fn pause(&self) -> Option<Duration> {
        let doublings = (self.crashes + self.failed_starts).checked_sub(2)?.min(16);
        Some((RESTART_PAUSE * 2u32.pow(doublings)).min(RESTART_PAUSE_MAX))
    }
}

impl Keeper<'_> {
    /// Continues the mount of the store, if that lives.
    fn take_from_store(&mut self) -> io::Result<()> {
        let Some(store) = &mut self.store else { return Ok(()) };
        let held = store.connect().map_err(|error| {
            io::Error::new(error.kind(), format!("the store of the mount's descriptors does not answer: {error}"))
        })?;
        let Some(kept) = held.kept.filter(|kept| !kept.is_dead()) else {
            return held.files.map_or(Ok(()), |files| self.files.mirror_to(files));
        };
        held.files.map_or(Ok(()), |files| self.files.continue_from(files))?;
        held.unread_files.iter().for_each(|socket| self.files.take_unread(socket));
        self.kept = Some(kept);
        self.takeovers = held.takeovers;
        self.cause = held.cause;
        self.ended_at_ns = held.ended_at_ns;
        self.stop.set_leaves_mount(true);
        Ok(())
    }

    /// The mount as a store holds it.
    fn kept_mount(&self, kept: &KeptDescriptors) -> io::Result<KeptMount> {
        let files = self.process_files.as_ref().map(|files| files.try_clone()).transpose()?;
        let descriptors = kept.duplicate()?;
        Ok(KeptMount { descriptors, takeovers: self.takeovers, cause: self.cause.clone(), files })
    }

    /// Gives the mount to the store, so that the next keeper can follow the process that is served by now.
    fn keep_in_store(&mut self) {
        let Some(kept) = self.kept.as_ref().filter(|_| self.store.is_some()) else { return };
        let Ok(mount) = self.kept_mount(kept) else { return };
        let Some(store) = &mut self.store else { return };
        if let Some(files) = store.keep(mount)
            && let Err(error) = self.files.mirror_to(files)
        {
            let text = format!("open files are lost if this keeper ends: the store of the mount takes none: {error}");
            self.reports.report_restart(&text);
        }
        self.forget_lost_store();
        self.stop.set_leaves_mount(true);
    }

    /// Without a connection to the store, only this keeper has the open files.
    fn forget_lost_store(&self) {
        if self.store.as_ref().is_none_or(|store| store.socket().is_none()) {
            self.files.forget_mirror();
        }
    }

    /// The exit code, if the mount ends with this process.
    fn end_of_mount(&mut self, end: &LifeEnd) -> Option<u8> {
        if self.has_left {
            return Some(0);
        }
        if end.served.is_some() {
            // Programs wait since then, however many processes fail to serve.
            self.ended_at_ns = monotonic_ns();
        }
        let Some(kept) = &self.kept else {
            if end.status.code().is_none() && !self.stop.is_stopping() {
                self.reports.report_loss(&format!(
                    "the mount's process ended before the mount was ready ({}): if the mountpoint answers ENOTCONN, remove it \
                     with spurline umount, and mount again",
                    end.status
                ));
            }
            return Some(exit_code(end.status));
        };
        if kept.is_dead() {
            // An unmount without a process that could take part is no failure.
            let had_no_part = end.served.is_none() || end.status.code().is_none();
            return Some(if had_no_part && is_unmounted(&kept.device) { 0 } else { exit_code(end.status) });
        }
        if self.stop.is_forced() || self.stop.is_stopping() && end.served.is_none() {
            self.end_without_process();
            return Some(exit_code(end.status));
        }
        None
    }

    /// A stop while no process can unmount.
    fn end_without_process(&mut self) {
        if !self.stop.leaves_mount() {
            self.reports.remove_mount();
        }
    }

    /// Pauses before the next process, or returns the exit code after too many early deaths.
    fn pause_or_give_up(&mut self, early_deaths: &EarlyDeaths, end: &LifeEnd) -> Option<u8> {
        if let Some(deaths) = early_deaths.are_too_many() {
            // Closes the connection: programs get errors instead of waiting for ever.
            self.kept = None;
            self.reports.report_loss(&format!(
                "{deaths} (last: {}): the keeper gives up, and programs in the mount get ENOTCONN; remove the \
                 mount with spurline umount, look at the log, and mount again",
                end.status
            ));
            return Some(FAILED_CODE);
        }
        self.reports.report_restart(&format!("{}; it is started again", self.cause));
        let pause = early_deaths.pause()?;
        let kept = self.kept.as_ref()?;
        pause_while_mounted(&kept.device, pause);
        if kept.is_dead() {
            return Some(if is_unmounted(&kept.device) { 0 } else { FAILED_CODE });
        }
        if self.stop.is_stopping() {
            self.end_without_process();
            return Some(0);
        }
        None
    }

    fn run_life(&mut self, program: &SupervisedProgram) -> io::Result<LifeEnd> {
        let FileConversation { thread, own_socket, peer_socket } = self.files.serve()?;
        self.process_files = Some(own_socket);
        let end = self.run_process(program, peer_socket)?;
        // The last files of the process are here then.
        let _ = thread.join();
        Ok(end)
    }

    fn run_process(&mut self, program: &SupervisedProgram, files: OwnedFd) -> io::Result<LifeEnd> {
        self.keep_in_store();
        let order = LifeOrder {
            keeper: std::process::id(),
            takeovers: self.takeovers,
            cause: self.cause.clone(),
            ended_at_ns: self.ended_at_ns,
            check_only: false,
            files: Some(files),
            notifications: serve_notifications().ok(),
            unread_files: None,
            kept: self.kept.as_ref().map(KeptDescriptors::duplicate).transpose()?,
        };
        let (keeper_socket, process_socket) = conversation()?;
        let mut child = start_patiently(program, process_socket)?;
        let is_new = self.kept.is_none();
        self.stop.set_process(child.id());
        if is_new {
            // Nothing is mounted before the process has its signal handlers.
            self.stop.set_unmounts();
        }
        // A process that is gone already is found below.
        let _ = KeeperMessage::Order(order).send(&keeper_socket);
        let mut ready_at = None;
        let mut upgrade = None;
        let mut has_converted = false;
        let process = Pid::from_child(&child);
        let process = pidfd_open(process, PidfdFlags::empty())?;
        loop {
            let LifeEvents { ended, spoke } = self.wait_for_events(&keeper_socket, &process)?;
            if self.is_to_leave() {
                self.has_left = true;
                halt(&child);
                // Requests that the process has taken are sent again to the process of the next keeper.
                let _ = child.kill();
            }
            if spoke && let Ok(Some(message)) = KeeperMessage::receive(&keeper_socket) {
                match message {
                    KeeperMessage::Mounted(kept) => {
                        has_converted = self.kept.replace(kept).is_some();
                        self.keep_in_store();
                    }
                    KeeperMessage::Ready => {
                        ready_at = Some(Instant::now());
                        self.note_ready();
                    }
                    KeeperMessage::Upgrade(path) => match self.check_program(program, path.into(), &process) {
                        Ok(next) => {
                            let _ = KeeperMessage::UpgradeAnswer(UPGRADE_ACCEPTED.into()).send(&keeper_socket);
                            upgrade = Some(next);
                            halt(&child);
                            // Requests that the process has taken are sent again to the next.
                            let _ = child.kill();
                        }
                        Err(refusal) => {
                            let _ = KeeperMessage::UpgradeAnswer(refusal).send(&keeper_socket);
                        }
                    },
                    _ => {}
                }
            } else if ended {
                // Before the wait frees the number for other processes.
                self.stop.set_process(0);
                let served = ready_at.map(|at| at.elapsed());
                return Ok(LifeEnd { status: child.wait()?, served, upgrade, has_converted });
            } else if spoke {
                // The other side is closed, and the process is about to end.
                wait_for_end(&process)?;
            }
        }
    }

    fn note_ready(&mut self) {
        self.stop.set_unmounts();
        if !std::mem::replace(&mut self.is_ready, true)
            && let Err(unwanted) = self.reports.report_ready()
        {
            self.reports.report_restart(&unwanted);
            self.stop.request_stop();
        }
    }

    /// Whether a stop leaves the mount now: the store is connected, or the stop does not wait for a store.
    fn is_to_leave(&self) -> bool {
        let is_stored = self.store.as_ref().is_some_and(|store| store.socket().is_some());
        self.stop.leaves_mount() && !self.has_left && (self.stop.is_stopping() && is_stored || self.stop.is_forced())
    }

    /// Waits for the process, a stop, or the store.
    fn wait_for_events(&mut self, conversation: &OwnedFd, process: &OwnedFd) -> io::Result<LifeEvents> {
        let retry = Timespec::try_from(STORE_RETRY_INTERVAL).map_err(io::Error::other)?;
        loop {
            let store = self.store.as_ref().and_then(StoreLink::socket);
            let is_unconnected = self.store.is_some() && store.is_none();
            let mut events = vec![
                PollFd::new(conversation, PollFlags::IN),
                PollFd::new(process, PollFlags::IN),
                PollFd::new(&self.stop.wake, PollFlags::IN),
            ];
            events.extend(store.map(|store| PollFd::new(store, PollFlags::IN)));
            match poll(&mut events, is_unconnected.then_some(&retry)) {
                Err(rustix::io::Errno::INTR) => continue,
                polled => polled?,
            };
            let seen = LifeEvents {
                spoke: events[0].revents().contains(PollFlags::IN),
                ended: !events[1].revents().is_empty(),
            };
            let is_woken = !events[2].revents().is_empty();
            let store_spoke = events.get(3).is_some_and(|store| !store.revents().is_empty());
            if store_spoke && self.store.as_mut().is_some_and(StoreLink::read_end) {
                self.store = None;
                self.stop.set_leaves_mount(false);
            } else if is_unconnected {
                self.keep_in_store();
            }
            if store_spoke {
                self.forget_lost_store();
            }
            if is_woken {
                self.stop.clear_wake();
            }
            return Ok(seen);
        }
    }

    /// Lets another program check whether it can take over; the reason if not.
    fn check_program(
        &self,
        program: &SupervisedProgram,
        path: PathBuf,
        serving: &OwnedFd,
    ) -> Result<SupervisedProgram, String> {
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let Some(kept) = &self.kept else { return Err("the mount is being made".into()) };
        let next = program.with_program(path.clone()).map_err(failed)?;
        let (keeper_socket, process_socket) = conversation().map_err(failed)?;
        let mut command = next.command();
        command.stdin(Stdio::from(process_socket)).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let kept = Some(kept.duplicate().map_err(failed)?);
        let order = LifeOrder { check_only: true, takeovers: self.takeovers, kept, ..LifeOrder::default() };
        let _ = KeeperMessage::Order(order).send(&keeper_socket);
        match wait_for_check(&mut child, serving) {
            Ok(status) if status.success() => Ok(next),
            Ok(status) => {
                let mut said = String::new();
                if let Some(mut errors) = child.stderr.take() {
                    let _ = errors.read_to_string(&mut said);
                }
                let said = said.trim();
                Err(if said.is_empty() { format!("{} can't take over: {status}", path.display()) } else { said.into() })
            }
            Err(error) => Err(failed(error)),
        }
    }
}

/// Starts a process; a host without memory for one may have some a moment later.
fn start_patiently(program: &SupervisedProgram, socket: OwnedFd) -> io::Result<Child> {
    let mut pause = RESTART_PAUSE;
    loop {
        match program.command().stdin(Stdio::from(socket.try_clone()?)).spawn() {
            Err(error) if pause > START_PAUSE_MAX => return Err(error),
            Err(_) => std::thread::sleep(pause),
            started => return started,
        }
        pause *= 2;
    }
}

/// Waits for the end of a check, unless the process that serves the mount ends first.
fn wait_for_check(child: &mut Child, serving: &OwnedFd) -> io::Result<ExitStatus> {
    let checking = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let until = Instant::now() + CHECK_LIMIT;
    let failure = loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut events = [PollFd::new(&checking, PollFlags::IN), PollFd::new(serving, PollFlags::IN)];
        match poll(&mut events, Some(&left)) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(0) => {
                break io::Error::new(io::ErrorKind::TimedOut, format!("its check did not end within {CHECK_LIMIT:?}"));
            }
            Ok(_) => {}
            Err(error) => break error.into(),
        }
        if !events[0].revents().is_empty() {
            return child.wait();
        }
        break io::Error::other("the mount's process ended during its check");
    };
    let _ = child.kill();
    let _ = child.wait();
    Err(failure)
}

fn wait_for_end(process: &OwnedFd) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => {}
            polled => return polled.map(drop).map_err(io::Error::from),
        }
    }
}

/// Stops a process that is about to be killed: the kernel then copies no request or answer, which would fail with EIO.
fn halt(child: &Child) {
    let process = Pid::from_child(child);
    if kill_process(process, Signal::STOP).is_err() {
        return;
    }
    let until = Instant::now() + HALT_LIMIT;
    while Instant::now() < until {
        match waitid(WaitId::Pid(process), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG) {
            Ok(None) => std::thread::sleep(HALT_INTERVAL),
            _ => return,
        }
    }
}

/// Whether a connection that has ended was unmounted, rather than aborted. A living connection would lose a request.
fn is_unmounted(device: &OwnedFd) -> bool {
    let mut request = vec![0; REQUEST_ROOM_BYTES];
    rustix::io::read(device, &mut request) == Err(rustix::io::Errno::NODEV)
}

/// Pauses, at most until the mount ends.
fn pause_while_mounted(device: &OwnedFd, pause: Duration) {
    let Ok(limit) = Timespec::try_from(pause) else { return };
    // The end is reported without being waited for, and a request is not.
    let _ = poll(&mut [PollFd::new(device, PollFlags::empty())], Some(&limit));
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, _) => FAILED_CODE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_leaves_a_mount_only_without_open_files_of_this_keeper() {
        for (files, leaves) in [(0, true), (1, false)] {
            let stop = StopRequests::new().unwrap();
            stop.set_leaves_mount(true);
            stop.held_files.store(files, Ordering::SeqCst);
            stop.request_stop();
            // The unmount closes the files.
            stop.held_files.store(0, Ordering::SeqCst);
            assert_eq!(stop.leaves_mount(), leaves, "{files} files");
        }
    }
}
