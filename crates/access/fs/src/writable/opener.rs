//! The process that opened a file. It knows neither the file nor the request.
//!
//! A process that starts a program has its descriptors copied into a new process, which closes the copies. For the kernel
//! each of those is a close like any other, so what a source does at a close waits for that of the opener. A shell opens the file of a
//! redirection, copies the descriptor, and closes the first: that is a close by the opener, before the first byte.

use super::groups::{status_field, status_of};
use std::cell::Cell;

thread_local! {
    /// The process of the last opener: most opens are of few processes, and a look at the status of a thread takes 12 µs.
    static LAST_PROCESS: Cell<u32> = const { Cell::new(0) };
}

/// The process that opened a file; `None` where it is not known.
pub(super) struct FileOpener(Option<u32>);

impl FileOpener {
    /// As [`FileOpener::kept`] has it.
    pub fn of_kept(process: u32) -> FileOpener {
        FileOpener(Some(process).filter(|process| *process != 0))
    }

    /// The process, for a record; 0 where it is not known.
    pub fn kept(&self) -> u32 {
        self.0.unwrap_or(0)
    }

    /// The process of the thread `pid`.
    pub fn of_thread(pid: u32) -> FileOpener {
        let last = LAST_PROCESS.get();
        if has_thread(last, pid) {
            return FileOpener(Some(last));
        }
        let process = process_of(pid);
        LAST_PROCESS.set(process.unwrap_or(0));
        FileOpener(process)
    }

    /// Whether a close by the thread `pid` counts: it is the opener's, or the opener has ended, or one of the two is not known.
    pub fn counts_close_of(&self, pid: u32) -> bool {
        let Some(opener) = self.0 else { return true };
        if has_thread(opener, pid) {
            return true;
        }
        let is_other = process_of(pid).is_some_and(|process| process != opener);
        !is_other || process_of(opener).is_none()
    }
}

/// Whether a process has this thread.
fn has_thread(process: u32, thread: u32) -> bool {
    std::fs::exists(format!("/proc/{process}/task/{thread}")).unwrap_or(false)
}

/// Whether the process of the thread `pid` has the file with this inode number open to write, beside a descriptor that it closes;
/// false where the system does not show that.
pub(super) fn has_other_writer(pid: u32, inode: u64) -> bool {
    // Work of the kernel, and processes of another process namespace, have no number.
    let folder = if pid == 0 { None } else { std::fs::read_dir(format!("/proc/{pid}/fdinfo")).ok() };
    let descriptors = folder.into_iter().flatten().flatten();
    descriptors.into_iter().any(|descriptor| {
        // The descriptor may be closed by now.
        let shown = std::fs::read(descriptor.path()).unwrap_or_default();
        let flags = i32::from_str_radix(status_field(&shown, b"flags:"), 8).unwrap_or_default();
        flags & libc::O_ACCMODE != libc::O_RDONLY && status_field(&shown, b"ino:").parse() == Ok(inode)
    })
}

/// The process of a thread; `None` when it is gone, of the kernel, or of another process namespace.
fn process_of(pid: u32) -> Option<u32> {
    status_field(&status_of(pid), b"Tgid:").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn another_descriptor_that_writes_is_found() {
        let own = std::process::id();
        let file = tempfile::NamedTempFile::new().unwrap();
        let inode = file.as_file().metadata().unwrap().ino();
        let path = file.into_temp_path();
        assert!(!has_other_writer(own, inode), "the file is closed");
        let reader = std::fs::File::open(&path).unwrap();
        assert!(!has_other_writer(own, inode), "the descriptor only reads");
        let writer = std::fs::File::options().append(true).open(&path).unwrap();
        let copy = writer.try_clone().unwrap();
        drop(writer);
        assert!(has_other_writer(own, inode));
        assert!(!has_other_writer(0, inode) && !has_other_writer(u32::MAX, inode));
        drop((copy, reader));
        assert!(!has_other_writer(own, inode));
    }

    #[test]
    fn threads_of_the_opener_count_and_other_processes_do_not() {
        let own = std::process::id();
        let opener = FileOpener::of_thread(own);
        assert!(opener.counts_close_of(own) && opener.counts_close_of(0) && !opener.counts_close_of(1));
        let thread = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get() as u32).join().unwrap();
        // The thread has ended, so its process is not known.
        assert!(opener.counts_close_of(thread));
        assert!(FileOpener::of_thread(0).counts_close_of(1));
        assert!(FileOpener::of_thread(u32::MAX).counts_close_of(1));
        assert!(FileOpener(Some(u32::MAX)).counts_close_of(1), "the opener has ended");
    }
}
