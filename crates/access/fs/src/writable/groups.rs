//! The rights of a process beside its user and group, as the system shows them. A process of another process namespace
//! has none that can be seen.

/// The process of all threads of the kernel.
const KERNEL_THREADS: &str = "2";

/// What a caller may do beside what its user and group may.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CallerRights {
    /// What its supplementary groups may. None if it is gone or not visible.
    Groups(Vec<u32>),
    /// It is the kernel's NFS server. That acts as users of its clients, whose groups are not shown anywhere, and lets a
    /// file's owner use it whatever the mode is: clients check the mode at their open, and send reads and writes later.
    NfsServer,
}

/// The rights of the thread `pid`.
pub(super) fn rights_of(pid: u32) -> CallerRights {
    parse_status(&status_of(pid))
}

/// The status of the thread `pid` as the system shows it; empty for work of the kernel, and when the thread is gone or not visible.
pub(super) fn status_of(pid: u32) -> Vec<u8> {
    if pid == 0 { Vec::new() } else { std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default() }
}

/// The value in a status behind `name`, which ends with a colon.
pub(super) fn status_field<'a>(status: &'a [u8], name: &[u8]) -> &'a str {
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name));
    line.and_then(|line| std::str::from_utf8(line).ok()).unwrap_or_default().trim()
}

fn parse_status(status: &[u8]) -> CallerRights {
    // A program can have the name, but not the parent.
    let is_of_kernel = status_field(status, b"PPid:") == KERNEL_THREADS;
    if is_of_kernel && matches!(status_field(status, b"Name:"), "nfsd" | "lockd") {
        return CallerRights::NfsServer;
    }
    let groups = status_field(status, b"Groups:").split_ascii_whitespace();
    CallerRights::Groups(groups.filter_map(|word| word.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(numbers: &[u32]) -> CallerRights {
        CallerRights::Groups(numbers.to_vec())
    }

    #[test]
    fn groups_are_read_from_the_status() {
        assert_eq!(parse_status(b"Name:\tx\nGid:\t0\t0\nGroups:\t4 27 1000 \nNStgid:\t1\n"), groups(&[4, 27, 1000]));
        assert_eq!((parse_status(b"Groups:\t\n"), parse_status(b"")), (groups(&[]), groups(&[])));
        assert_eq!((rights_of(0), rights_of(u32::MAX)), (groups(&[]), groups(&[])));
    }

    #[test]
    fn only_a_thread_of_the_kernel_is_its_nfs_server() {
        assert_eq!(parse_status(b"Name:\tnfsd\nPid:\t77\nPPid:\t2\nGroups:\t \n"), CallerRights::NfsServer);
        assert_eq!(parse_status(b"Name:\tnfsd\nPid:\t77\nPPid:\t70\nGroups:\t5\n"), groups(&[5]));
        assert_eq!(parse_status(b"Name:\tkworker/0:1\nPPid:\t2\nGroups:\t\n"), groups(&[]));
    }
}
