//! The keeper's loop: starts the mount's process, waits for its end, and starts it again as long as the mount lives.

use crate::life::LIFE_VARIABLE;
use crate::messages::{KeeperMessage, KeptDescriptors, LifeOrder, UPGRADE_ACCEPTED};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid};
use rustix::time::{ClockId, clock_gettime};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The keeper gives up after this many processes in a row that died early.
const EARLY_DEATHS_MAX: u32 = 5;
/// A process that served for less than this died early.
const EARLY_DEATH_AGE: Duration = Duration::from_secs(1);
/// The pause before the second restart in a row; doubled with each further one.
const RESTART_PAUSE: Duration = Duration::from_millis(100);
/// The last pause before the start of a process is abandoned.
const START_PAUSE_MAX: Duration = Duration::from_secs(10);
/// How long all threads of a process may take to stop, and the interval of looks.
const HALT_LIMIT: Duration = Duration::from_millis(500);
const HALT_INTERVAL: Duration = Duration::from_millis(1);
/// How long a new program may take to check the state.
const CHECK_LIMIT: Duration = Duration::from_secs(30);
/// The exit code of a mount that the keeper gave up, or whose process was killed before it had mounted.
const FAILED_CODE: u8 = 1;

/// The program of a mount's process.
#[derive(Debug)]
pub struct SupervisedProgram {
    path: PathBuf,
    /// Kept open: the file may be replaced or removed while the mount lives.
    file: File,
    arguments: Vec<OsString>,
    /// The working directory, for relative paths in the arguments.
    folder: Option<PathBuf>,
}

impl SupervisedProgram {
    /// The program at `path`, with the arguments and the working directory of this process.
    ///
    /// # Errors
    /// When the program can't be opened.
    pub fn open(path: PathBuf) -> io::Result<SupervisedProgram> {
        let arguments = std::env::args_os().skip(1).collect();
        Ok(SupervisedProgram { file: File::open(&path)?, path, arguments, folder: std::env::current_dir().ok() })
    }

    fn with_program(&self, path: PathBuf) -> io::Result<SupervisedProgram> {
        let file = File::open(&path)?;
        Ok(SupervisedProgram { path, file, arguments: self.arguments.clone(), folder: self.folder.clone() })
    }

    fn command(&self) -> Command {
        let same = |at: std::fs::Metadata| {
            self.file.metadata().is_ok_and(|kept| (kept.dev(), kept.ino()) == (at.dev(), at.ino()))
        };
        let path = if self.path.metadata().is_ok_and(same) {
            self.path.clone()
        } else {
            PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
        };
        let mut command = Command::new(path);
        command.arg0("spurline").args(&self.arguments).env(LIFE_VARIABLE, "1");
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        command
    }
}

/// Requests to end the mount, from a thread of signals.
#[derive(Debug, Default)]
pub struct StopRequests {
    process: AtomicI32,
    count: AtomicU32,
}

impl StopRequests {
    /// Ends the mount: each call is a signal for the mount's process.
    pub fn request_stop(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.signal_process();
    }

    fn signal_process(&self) {
        if let Some(process) = Pid::from_raw(self.process.load(Ordering::SeqCst)) {
            let _ = kill_process(process, Signal::TERM);
        }
    }

    fn is_stopping(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    fn set_process(&self, id: u32) {
        self.process.store(id as i32, Ordering::SeqCst);
        if id != 0 && self.is_stopping() {
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
}

/// How a life ended.
struct LifeEnd {
    status: ExitStatus,
    /// How long requests were served; `None` if never.
    served: Option<Duration>,
    /// The program of the next life, of an accepted upgrade.
    upgrade: Option<SupervisedProgram>,
}

/// The keeper's state.
struct Keeper<'a> {
    kept: Option<KeptDescriptors>,
    stop: &'a StopRequests,
    reports: &'a mut dyn KeeperReports,
    takeovers: u64,
    is_ready: bool,
}

/// Runs the mount's process, again and again until the mount ends; returns the exit code.
///
/// # Errors
/// When the process can't be started.
pub fn supervise(program: SupervisedProgram, stop: &StopRequests, reports: &mut dyn KeeperReports) -> io::Result<u8> {
    let mut keeper = Keeper { kept: None, stop, reports, takeovers: 0, is_ready: false };
    let mut program = program;
    let mut before: Option<SupervisedProgram> = None;
    let mut cause = String::new();
    let mut ended_at_ns = 0;
    let mut early_deaths = 0;
    loop {
        let order = LifeOrder {
            keeper: std::process::id(),
            takeovers: keeper.takeovers,
            cause: cause.clone(),
            ended_at_ns,
            check_only: false,
            kept: keeper.kept.as_ref().map(KeptDescriptors::duplicate).transpose()?,
        };
        let end = keeper.run_life(&program, order)?;
        ended_at_ns = monotonic_ns();
        let Some(kept) = &keeper.kept else { return Ok(exit_code(end.status)) };
        if stop.is_stopping() || is_dead(&kept.device) {
            return Ok(exit_code(end.status));
        }
        keeper.takeovers += 1;
        if let Some(next) = end.upgrade {
            cause = format!("upgrade to {}", next.path.display());
            before = Some(std::mem::replace(&mut program, next));
            early_deaths = 0;
            continue;
        }
        cause = format!("its process ended: {}", end.status);
        let early = end.served.is_none_or(|served| served < EARLY_DEATH_AGE);
        if early && let Some(old) = before.take() {
            cause = format!("the upgrade to {} failed, {cause}", program.path.display());
            program = old;
            keeper.reports.report_restart(&format!("{cause}; {} goes on", program.path.display()));
            continue;
        }
        if !early {
            // The program of an upgrade has proved itself.
            before = None;
        }
        early_deaths = if early { early_deaths + 1 } else { 0 };
        if early_deaths >= EARLY_DEATHS_MAX {
            // Closes the connection: programs get errors instead of waiting for ever.
            keeper.kept = None;
            keeper.reports.report_loss(&format!(
                "the mount's process died {EARLY_DEATHS_MAX} times in a row soon after its start (last: {}): the keeper gives \
                 up, and programs in the mount get ENOTCONN; remove the mount with spurline umount, look at the log, and \
                 mount again",
                end.status
            ));
            return Ok(FAILED_CODE);
        }
        keeper.reports.report_restart(&format!("{cause}; it is started again"));
        if early_deaths > 1 {
            std::thread::sleep(RESTART_PAUSE * 2u32.pow(early_deaths - 2));
        }
    }
}

impl Keeper<'_> {
    fn run_life(&mut self, program: &SupervisedProgram, order: LifeOrder) -> io::Result<LifeEnd> {
        let (ours, theirs) = conversation()?;
        let mut child = start_patiently(program, theirs)?;
        self.stop.set_process(child.id());
        // A process that is gone already is found below.
        let _ = KeeperMessage::Order(order).send(&ours);
        let mut ready_at = None;
        let mut upgrade = None;
        let process = Pid::from_child(&child);
        let process = pidfd_open(process, PidfdFlags::empty())?;
        loop {
            let mut events = [PollFd::new(&ours, PollFlags::IN), PollFd::new(&process, PollFlags::IN)];
            match poll(&mut events, None) {
                Err(rustix::io::Errno::INTR) => continue,
                polled => polled?,
            };
            let ended = !events[1].revents().is_empty();
            let spoke = events[0].revents().contains(PollFlags::IN);
            if spoke && let Ok(Some(message)) = KeeperMessage::receive(&ours) {
                match message {
                    KeeperMessage::Mounted(kept) => self.kept = Some(kept),
                    KeeperMessage::Ready => {
                        ready_at = Some(Instant::now());
                        if !std::mem::replace(&mut self.is_ready, true)
                            && let Err(unwanted) = self.reports.report_ready()
                        {
                            self.reports.report_restart(&unwanted);
                            self.stop.request_stop();
                        }
                    }
                    KeeperMessage::Upgrade(path) => match self.check_program(program, path.into()) {
                        Ok(next) => {
                            let _ = KeeperMessage::UpgradeAnswer(UPGRADE_ACCEPTED.into()).send(&ours);
                            upgrade = Some(next);
                            halt(&child);
                            // Requests that the process has taken are sent again to the next.
                            let _ = child.kill();
                        }
                        Err(refusal) => {
                            let _ = KeeperMessage::UpgradeAnswer(refusal).send(&ours);
                        }
                    },
                    KeeperMessage::Order(_) | KeeperMessage::UpgradeAnswer(_) => {}
                }
            } else if ended {
                // Before the wait frees the number for other processes.
                self.stop.set_process(0);
                let served = ready_at.map(|at| at.elapsed());
                return Ok(LifeEnd { status: child.wait()?, served, upgrade });
            } else if spoke {
                // The other side is closed, and the process is about to end.
                wait_for_end(&process)?;
            }
        }
    }

    /// Lets another program check whether it can take over; the reason if not.
    fn check_program(&self, program: &SupervisedProgram, path: PathBuf) -> Result<SupervisedProgram, String> {
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let Some(kept) = &self.kept else { return Err("the mount is being made".into()) };
        let next = program.with_program(path.clone()).map_err(failed)?;
        let (ours, theirs) = conversation().map_err(failed)?;
        let mut command = next.command();
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let kept = Some(kept.duplicate().map_err(failed)?);
        let order = LifeOrder { check_only: true, takeovers: self.takeovers, kept, ..LifeOrder::default() };
        let _ = KeeperMessage::Order(order).send(&ours);
        match wait_for_check(&mut child) {
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

fn conversation() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn wait_for_check(child: &mut Child) -> io::Result<ExitStatus> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let limit = Timespec::try_from(CHECK_LIMIT).map_err(io::Error::other)?;
    if poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit))? == 0 {
        let _ = child.kill();
        let _ = child.wait();
        return Err(io::Error::new(io::ErrorKind::TimedOut, format!("its check did not end within {CHECK_LIMIT:?}")));
    }
    child.wait()
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

/// Whether the connection to the kernel has ended: unmounted, or aborted.
fn is_dead(device: &OwnedFd) -> bool {
    let mut events = [PollFd::new(device, PollFlags::IN)];
    let polled = poll(&mut events, Some(&Timespec::default()));
    polled.is_ok() && events[0].revents().contains(PollFlags::ERR)
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, _) => FAILED_CODE,
    }
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
