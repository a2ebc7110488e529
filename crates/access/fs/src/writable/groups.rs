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
    let status = if pid == 0 { Vec::new() } else { std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default() };
    parse_status(&status)
}

fn parse_status(status: &[u8]) -> CallerRights {
    let field = |name: &[u8]| {
        let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name));
        line.and_then(|line| std::str::from_utf8(line).ok()).unwrap_or_default().trim()
    };
    // A program can have the name, but not the parent.
    if field(b"PPid:") == KERNEL_THREADS && matches!(field(b"Name:"), "nfsd" | "lockd") {
        return CallerRights::NfsServer;
    }
    CallerRights::Groups(field(b"Groups:").split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect())
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
