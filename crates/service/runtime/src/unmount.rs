//! Unmounts, also a mount that hangs or whose process is gone. Does not access the mount before the unmount call.

use crate::exported::{is_exported, renew_export};
use crate::locator::{ProcessAbsence, find_mount, mount_process};
use crate::writes::{UnsentBytes, describe_doubt, describe_unsent, find_loss, loss_fault};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use spurline_config::Fault;
use spurline_export::ServerState;
use spurline_observe::client::{AdminPeer, EndWatch};
use spurline_observe::dial;
use spurline_observe::locate::{FS_TYPE, SpurlineMount};
use spurline_sys::MountTable;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Interval of the reports during the wait for the mount's process.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Time for a process to take the request of a report, and for the report of an ended process to arrive.
const END_WATCH_LIMIT: Duration = Duration::from_secs(2);

/// Longest time that a mount without users is busy, and the pause between two attempts.
const BUSY_WITHOUT_USERS: Duration = Duration::from_secs(1);
const BUSY_PAUSE: Duration = Duration::from_millis(50);
/// Time for the mapped files of a process.
const MAPS_PATIENCE: Duration = Duration::from_millis(200);

/// How to unmount.
#[derive(Debug, Clone, Copy)]
pub struct UnmountRequest {
    /// Abort pending requests first.
    pub force: bool,
    /// Detach now; the mount ends when the last file is closed.
    pub lazy: bool,
    /// Longest wait for the mount's process to end.
    pub timeout: Duration,
}

/// The progress of an unmount.
pub struct UnmountReport<'a> {
    /// Receives what was left undone.
    pub warn: &'a dyn Fn(String),
    /// Receives the cause of the wait.
    pub note: &'a dyn Fn(String),
    /// Receives every second, during the wait for the mount's process, the written bytes that are not in the source yet.
    pub unsent: &'a dyn Fn(&UnsentBytes),
}

/// Unmounts the mount of Spurline at `mountpoint`, and waits for the end of the process unless that is lazy.
///
/// # Errors
/// When the path is no mountpoint, is busy, or may not be unmounted by this user; when the process does not end, or has lost
/// written bytes.
pub fn unmount_mount(mountpoint: &Path, request: UnmountRequest, report: &UnmountReport<'_>) -> Result<(), Fault> {
    let mount = find_mount(mountpoint)?;
    let me = rustix::process::geteuid();
    if !me.is_root() && mount.uid != me.as_raw() {
        return Err(Fault::missing(
            format!("the mount at {} belongs to user {}", mount.mountpoint.display(), mount.uid),
            "unmount it as that user or as root",
        ));
    }
    check_uncovered(&mount)?;
    let process = MountProcess::of_mount(&mount);
    let end = process.as_ref().filter(|_| !request.lazy).and_then(MountProcess::watch_end);
    if request.force {
        abort_requests(&mount, report.warn)?;
    }
    // The NFS server holds the mount of a killed process, and answers clients with errors.
    let gone = process.is_none() && mount_process(&mount).is_err_and(|absent| absent.absence == ProcessAbsence::Ended);
    let dead_export = gone && is_exported(&mount.source, &mount.mountpoint);
    unmount_now(&mount, request.lazy || request.force || dead_export, request.force)?;
    if dead_export {
        renew_export(&mount.source, &mount.mountpoint);
        (report.note)("its NFS clients wait until it is mounted again".into());
    }
    match process {
        // With --lazy, an open file may keep the process for days.
        Some(process) if !request.lazy => process.wait_for_exit(request, &mount, report, end),
        _ => Ok(()),
    }
}

/// Checks that no other mount covers this mount: the kernel unmounts the topmost mount of a path.
fn check_uncovered(mount: &SpurlineMount) -> Result<(), Fault> {
    let table = MountTable::read().map_err(|e| Fault::failed(format!("/proc/self/mountinfo: {e}"), ""))?;
    let at = &mount.mountpoint;
    match table.seen_at(at) {
        Some(seen) if seen.mountpoint != *at || seen.device != (0, mount.minor) => Err(Fault::failed(
            format!("{} from '{}' lies over the mount at {}", seen.fstype, seen.source, at.display()),
            format!("unmount that one first (umount {}), then this one", seen.mountpoint.display()),
        )),
        _ => Ok(()),
    }
}

/// Ends every pending request with an error, so that no process waits in the mount any more.
fn abort_requests(mount: &SpurlineMount, warn: &dyn Fn(String)) -> Result<(), Fault> {
    let file = format!("/sys/fs/fuse/connections/{}/abort", mount.minor);
    match std::fs::write(&file, "1") {
        Ok(()) => Ok(()),
        // The control file system is not mounted everywhere. Root's unmount does the same.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            if !rustix::process::geteuid().is_root() {
                warn(format!(
                    "{file} is missing, so pending requests are not aborted; unmount as root, or mount -t fusectl none \
                     /sys/fs/fuse/connections"
                ));
            }
            Ok(())
        }
        Err(e) => Err(Fault::missing(format!("{file}: {e}"), "run as the user who mounted it, or as root")),
    }
}

fn unmount_now(mount: &SpurlineMount, lazy: bool, force: bool) -> Result<(), Fault> {
    let at = &mount.mountpoint;
    if rustix::process::geteuid().is_root() {
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() } | UnmountFlags::NOFOLLOW;
        // A forced unmount breaks the connection as the control file does.
        let forced = if force { flags | UnmountFlags::FORCE } else { flags };
        let done = match unmount_idle(at, forced) {
            // Root of a user namespace may unmount, but not by force.
            Err(rustix::io::Errno::PERM) if force => unmount(at, flags),
            done => done,
        };
        return done.map_err(|e| match e {
            rustix::io::Errno::BUSY => busy_fault(at),
            other => Fault::failed(format!("unmounting {}: {other}", at.display()), ""),
        });
    }
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(at);
    let out = command
        .output()
        .map_err(|e| Fault::missing(format!("fusermount3: {e}"), "install the package fuse3, or unmount as root"))?;
    if out.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&out.stderr).trim().to_owned();
    if text.contains("busy") { Err(busy_fault(at)) } else { Err(Fault::failed(text, "")) }
}

/// Unmounts. What keeps a mount busy and is no process that has a file there passes: a program between fork and exec, a scan.
fn unmount_idle(at: &Path, flags: UnmountFlags) -> rustix::io::Result<()> {
    let until = Instant::now() + BUSY_WITHOUT_USERS;
    loop {
        match unmount(at, flags) {
            Err(rustix::io::Errno::BUSY) if Instant::now() < until && users_of(at).is_empty() => {
                std::thread::sleep(BUSY_PAUSE);
            }
            done => return done,
        }
    }
}

fn busy_fault(at: &Path) -> Fault {
    let users = users_of(at);
    let at_text = at.display();
    // The kernel's server keeps what clients have used, and has no process that could be named.
    if ServerState::read().exported.iter().any(|exported| Path::new(exported) == at) {
        let evidence = if users.is_empty() { String::new() } else { format!(", and {}", users.join(", ")) };
        return Fault::failed(
            format!("{at_text} is busy: in use by the NFS server, which exports it{evidence}"),
            format!(
                "stop the server before the unmount and start it after the next mount (systemctl stop nfs-server, or rpc.nfsd 0): \
                 its clients wait; or take the export back (`spurline export {at_text} --remove`)"
            ),
        );
    }
    let evidence = if users.is_empty() { String::new() } else { format!(": in use by {}", users.join(", ")) };
    Fault::failed(
        format!("{at_text} is busy{evidence}"),
        "end those programs, or give --lazy to detach it now and finish when they are done, or --force to fail their requests",
    )
}

/// The names of up to five processes that `is_wanted` accepts by the folders in /proc.
fn find_processes(mut is_wanted: impl FnMut(&Path) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let path = process.path();
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        if is_wanted(&path) {
            let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
            found.push(format!("{} ({pid})", name.trim()));
            if found.len() == 5 {
                break;
            }
        }
    }
    found
}

/// Processes with an open or mapped file, program, root or working directory below the mountpoint.
fn users_of(at: &Path) -> Vec<String> {
    // The descriptors of this process are those of the shell, which is in the list.
    let own = PathBuf::from(format!("/proc/{}", std::process::id()));
    find_processes(|process| {
        process != own
            && (leads_below(at, &process.join("cwd"))
                || leads_below(at, &process.join("root"))
                || std::fs::read_dir(process.join("fd"))
                    .into_iter()
                    .flatten()
                    .flatten()
                    .any(|fd| leads_below(at, &fd.path()))
                || maps_file_below(at, process))
    })
}

/// Whether a process maps a file there, or is a program from there: such files need no descriptor.
fn maps_file_below(at: &Path, process: &Path) -> bool {
    let maps = process.join("maps");
    // In execve(2), a process can wait for this very mount to close its files, and its maps wait for the end of that.
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::Builder::new().name("read-maps".into());
    let started = reader.spawn(move || sender.send(std::fs::read(maps)));
    let read = started.ok().and_then(|_| receiver.recv_timeout(MAPS_PATIENCE).ok());
    let maps = read.and_then(Result::ok).unwrap_or_default();
    let inside = [at.as_os_str().as_bytes(), b"/"].concat();
    maps.split(|byte| *byte == b'\n')
        .filter_map(|line| line.iter().position(|byte| *byte == b'/').map(|start| line[start..].to_vec()))
        .any(|path| path.starts_with(&inside))
}

fn leads_below(at: &Path, link: &Path) -> bool {
    std::fs::read_link(link).is_ok_and(|target| target.starts_with(at))
}

/// A process of each other mount namespace that still holds the mount.
fn namespaces_with(mount: &SpurlineMount) -> Vec<String> {
    // In this namespace the mount is gone, and another mount may have the number.
    let mut seen: Vec<PathBuf> = std::fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    find_processes(|process| {
        let Ok(namespace) = std::fs::read_link(process.join("ns/mnt")) else { return false };
        if seen.contains(&namespace) {
            return false;
        }
        seen.push(namespace);
        let table = MountTable::read_file(&process.join("mountinfo")).unwrap_or_default();
        // The number of a mount that is gone can be that of another file system.
        table.entries().iter().any(|entry| entry.device == (0, mount.minor) && entry.fstype == FS_TYPE)
    })
}

/// The state of a process or a thread by the text of `stat`: the letter behind the name, which can have any character.
fn state_letter(stat: &str) -> Option<char> {
    stat.rsplit(") ").next()?.chars().next()
}

/// Why a process does not run until it is continued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessHalt {
    /// By a signal, or from its terminal.
    Stopped,
    /// By the control group.
    Frozen,
}

impl ProcessHalt {
    /// Where the kernel keeps a process of a frozen control group, of either version.
    const FREEZERS: [&str; 2] = ["do_freezer_trap", "__refrigerator"];

    /// Reads the state of a process; `None` if running or gone.
    fn of_process(pid: Pid) -> Option<ProcessHalt> {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        if state_letter(&read("stat")) == Some('T') {
            return Some(ProcessHalt::Stopped);
        }
        Self::FREEZERS.contains(&read("wchan").as_str()).then_some(ProcessHalt::Frozen)
    }

    fn describe(self, pid: Pid) -> String {
        match self {
            ProcessHalt::Stopped => format!("its process {pid} is stopped (state T, by SIGSTOP or from a terminal)"),
            ProcessHalt::Frozen => format!("its process {pid} is frozen, as its control group or container is paused"),
        }
    }

    fn remedy(self, pid: Pid) -> String {
        let go_on = match self {
            ProcessHalt::Stopped => format!("let it go on (kill -CONT {pid})"),
            ProcessHalt::Frozen => "let its control group or container go on (such as docker unpause)".to_owned(),
        };
        format!(
            "{go_on}, then it ends by itself; kill -KILL {pid} ends it without the written bytes that no node has; until its end its \
             cache directory is in use"
        )
    }
}

/// Threads of a process that stay in the same system call, at several times.
#[derive(Default)]
struct HungCalls {
    /// By the thread: where the kernel sleeps, and how often in turn the thread was there.
    seen: HashMap<OsString, (String, u32)>,
}

impl HungCalls {
    /// So many looks in turn: a busy disk lets a call wait for less.
    const CERTAIN: u32 = 4;

    fn look_at(&mut self, pid: Pid) {
        let before = std::mem::take(&mut self.seen);
        let threads = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
        for thread in threads.into_iter().flatten().flatten() {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            let sleeps = std::fs::read_to_string(thread.path().join("wchan")).unwrap_or_default();
            // D: only the end of the call wakes the thread. A call on a FUSE source waits in that place of the kernel, and can't
            // end before the answer either.
            let ends_alone = state_letter(&stat) != Some('D');
            if ends_alone && sleeps != "request_wait_answer" {
                continue;
            }
            let times =
                before.get(&thread.file_name()).filter(|(at, _)| *at == sleeps).map_or(1, |(_, times)| times + 1);
            self.seen.insert(thread.file_name(), (sleeps, times));
        }
    }

    /// The place in the kernel where most looks found a thread; `None` if no call hangs for certain.
    fn describe(&self) -> Option<String> {
        let (at, _) =
            self.seen.values().filter(|(_, times)| *times >= Self::CERTAIN).max_by_key(|(_, times)| *times)?;
        Some(if at.is_empty() || at == "0" { "uninterruptible".into() } else { format!("in {at}") })
    }
}

struct MountProcess {
    socket: PathBuf,
    pid: Option<Pid>,
    /// `None` in another PID namespace, or before Linux 5.3.
    process: Option<OwnedFd>,
}

impl MountProcess {
    fn of_mount(mount: &SpurlineMount) -> Option<MountProcess> {
        let Ok(AdminPeer::Socket(socket, _)) = mount_process(mount) else { return None };
        let pid = dial::listener_process(&socket);
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Some(MountProcess { socket, pid, process })
    }

    /// Requests the process's report of the end; `None` if that is impossible.
    fn watch_end(&self) -> Option<EndWatch> {
        AdminPeer::Socket(self.socket.clone(), None).watch_end(END_WATCH_LIMIT).ok()
    }

    /// Waits for the end of the process, so that the next mount can use the cache.
    fn wait_for_exit(
        &self,
        request: UnmountRequest,
        mount: &SpurlineMount,
        report: &UnmountReport<'_>,
        end: Option<EndWatch>,
    ) -> Result<(), Fault> {
        let start = Instant::now();
        let limit = request.timeout;
        let admin = AdminPeer::Socket(self.socket.clone(), None);
        let mut next = start + REPORT_INTERVAL;
        let mut finishing = false;
        let mut hung = HungCalls::default();
        let mut unsent = None;
        while start.elapsed() < limit {
            if let Some((pid, halt)) = self.pid.and_then(|pid| Some((pid, ProcessHalt::of_process(pid)?))) {
                let what = format!("{} is unmounted, but {}", mount.mountpoint.display(), halt.describe(pid));
                return Err(Fault::failed(what, halt.remedy(pid)));
            }
            let left = limit.saturating_sub(start.elapsed());
            if self.ends_within(left.min(REPORT_INTERVAL)) {
                return report_losses(mount, end, unsent, report);
            }
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + REPORT_INTERVAL;
            // A process that ends meanwhile does not answer.
            let status = admin.fetch_status(REPORT_INTERVAL).ok();
            let behind = status.as_ref().and_then(|status| status.mount()?.writes.behind.as_ref());
            unsent = behind.and_then(describe_unsent);
            unsent.iter().for_each(report.unsent);
            if behind.is_some_and(|behind| behind.finishing) && !std::mem::replace(&mut finishing, true) {
                (report.note)("waiting for the nodes to make the changes durable".into());
            }
            if let Some(pid) = self.pid {
                hung.look_at(pid);
            }
            if request.force && hung.describe().is_some() {
                break;
            }
        }
        let at = mount.mountpoint.display();
        let seconds = limit.as_secs();
        if let Some((pid, call)) = self.pid.zip(hung.describe()) {
            return Err(Fault::failed(
                format!(
                    "{at} is unmounted, but its process {pid} can't end: a system call on the source does not return ({call})"
                ),
                "it ends when the source responds, or when the source itself is unmounted by force (umount -f); until then its \
                 cache directory is in use",
            ));
        }
        if let Some(unsent) = unsent {
            let UnsentBytes { bytes, .. } = &unsent;
            let taker = unsent.taker();
            return Err(Fault::failed(
                format!("{at} is unmounted, but {taker} has not taken all bytes after {seconds} s: {bytes}"),
                "its process goes on and then ends; its log says so if bytes are lost. Wait longer with --timeout",
            ));
        }
        if finishing {
            return Err(Fault::failed(
                format!("{at} is unmounted, but its nodes have not made all changes durable after {seconds} s"),
                "its process goes on and then ends; its log says so if a node fails. Wait longer with --timeout",
            ));
        }
        // After force, the process serves no namespace any more.
        let others = if request.force { Vec::new() } else { namespaces_with(mount) };
        Err(match others.as_slice() {
            [] => Fault::failed(
                format!("{at} is unmounted, but its process still runs after {seconds} s"),
                "look at its log: it may wait for a node or a store to take written bytes, which kill -KILL would lose",
            ),
            others => Fault::failed(
                format!(
                    "{at} is unmounted here, but its process still serves other mount namespaces, for example that of {}",
                    others.join(", ")
                ),
                "unmount it there too (nsenter -t PID -m umount MOUNTPOINT), or end its process with two signals",
            ),
        })
    }

    /// A step of the wait, which may be shorter than `limit`.
    fn ends_within(&self, limit: Duration) -> bool {
        match &self.process {
            Some(process) => {
                let mut ended = [PollFd::new(process, PollFlags::IN)];
                // Interrupted: the caller tries again.
                Timespec::try_from(limit).is_ok_and(|limit| poll(&mut ended, Some(&limit)).is_ok_and(|n| n > 0))
            }
            None => {
                let ended = dial::probe_socket(&self.socket, None).is_err();
                if !ended {
                    std::thread::sleep(Duration::from_millis(20));
                }
                ended
            }
        }
    }
}

/// The outcome of a process that has ended: the reported losses, or those that are certain without a report.
fn report_losses(
    mount: &SpurlineMount,
    end: Option<EndWatch>,
    unsent: Option<UnsentBytes>,
    report: &UnmountReport<'_>,
) -> Result<(), Fault> {
    let at = mount.mountpoint.display().to_string();
    let end_report = end.and_then(|end| end.read_report(END_WATCH_LIMIT).ok());
    let behind = end_report.as_ref().and_then(Option::as_ref);
    if let Some(doubt) = behind.and_then(describe_doubt) {
        (report.warn)(format!("{at}: {doubt}"));
    }
    let lost = match end_report {
        Some(_) => behind.and_then(|behind| find_loss(&at, behind)),
        None => unsent.map(|unsent| {
            let lost = format!("its process ended without a word before {} had taken {}", unsent.taker(), unsent.bytes);
            loss_fault(&at, &lost, unsent.publishes)
        }),
    };
    lost.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_process_is_behind_its_name() {
        assert_eq!(state_letter("12 (a) T (b) S 1 2"), Some('S'));
        assert_eq!(state_letter("12 (a b) T 1 2"), Some('T'));
        assert_eq!(state_letter(""), None);
        assert_eq!(ProcessHalt::of_process(rustix::process::getpid()), None);
    }
}
