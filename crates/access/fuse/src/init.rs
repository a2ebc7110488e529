//! Negotiates the session's features with the kernel at INIT. No I/O.

use crate::abi::{self, init};
use crate::config::SessionConfig;

/// The outcome of INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InitAgreement {
    pub(crate) minor: u32,
    pub(crate) passthrough: bool,
    pub(crate) uring: bool,
    /// Requests that make something have the group of the directory, if the caller is a member.
    pub(crate) create_group: bool,
    /// Files that bypass the kernel's pages can be mapped (Linux 6.6). Such a kernel also drops cached pages before such writes.
    pub(crate) direct_mmap: bool,
}

/// Linux 4.20: requests may have more than 32 pages.
const OLDEST_MINOR: u32 = 28;

/// The reply to the kernel's INIT. Not requested, on purpose: splicing (measured at a third of the speed); by a read-only mount
/// the flags of writes, and AUTO_INVAL_DATA (an inode's bytes never change there, and the flag costs a GETATTR per read). `page`:
/// the kernel's page size, the unit of the limits.
pub(crate) fn negotiate_init(
    config: &SessionConfig,
    page: u32,
    uring: bool,
    minor: u32,
    flags: u64,
) -> Result<(abi::InitOut, InitAgreement), String> {
    if minor < OLDEST_MINOR {
        return Err(format!(
            "the kernel speaks FUSE 7.{minor}; 7.{OLDEST_MINOR} (Linux 4.20) is the oldest that works"
        ));
    }
    let mut want = init::ASYNC_READ
        | init::EXPORT_SUPPORT
        | init::BIG_WRITES
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::ABORT_ERROR
        | init::MAX_PAGES
        | init::CACHE_SYMLINKS
        | init::INIT_EXT
        | init::DIRECT_IO_ALLOW_MMAP;
    if config.readdirplus {
        // Always, since a listing has the attributes anyway. With the kernel's own rule (READDIRPLUS_AUTO) a walk that stats
        // every file looks up a third of the files singly, and takes five times as long.
        want |= init::DO_READDIRPLUS;
    }
    if config.passthrough {
        want |= init::PASSTHROUGH;
    }
    if let Some(writes) = config.writes {
        // Not write-back, which trusts sizes that another mount may have changed. Bytes change here, so attributes that moved
        // invalidate pages. The source applies the mask, because a default ACL replaces the mask. Not ATOMIC_O_TRUNC: the kernel
        // would send the truncation before the check whether the file is being executed.
        want |= init::AUTO_INVAL_DATA | init::HANDLE_KILLPRIV_V2 | init::DONT_MASK | init::CREATE_SUPP_GROUP;
        if writes.acls {
            want |= init::POSIX_ACL;
        }
        if writes.locks {
            want |= init::POSIX_LOCKS | init::FLOCK_LOCKS;
        }
    }
    if uring {
        want |= init::OVER_IO_URING;
    }
    let got = want & flags;
    let max_pages = (config.max_write / page).max(1) as u16;
    let out = abi::InitOut {
        major: abi::MAJOR,
        minor: minor.min(abi::MINOR),
        max_readahead: config.max_readahead,
        flags: got as u32,
        flags2: (got >> 32) as u32,
        max_background: config.max_background,
        congestion_threshold: (config.max_background / 4 * 3).max(1),
        max_write: config.max_write,
        time_gran: 1,
        max_pages,
        // Backing files must not be on a stacked file system.
        max_stack_depth: u32::from(got & init::PASSTHROUGH != 0),
        ..Default::default()
    };
    let agreed = InitAgreement {
        minor,
        passthrough: got & init::PASSTHROUGH != 0,
        uring: got & init::OVER_IO_URING != 0,
        create_group: got & init::CREATE_SUPP_GROUP != 0,
        direct_mmap: got & init::DIRECT_IO_ALLOW_MMAP != 0,
    };
    Ok((out, agreed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_both_have() {
        let config = SessionConfig { passthrough: true, ..Default::default() };
        let (out, agreed) = negotiate_init(&config, 4096, true, 45, u64::MAX).unwrap();
        assert!(agreed.passthrough && agreed.uring);
        assert_eq!((out.minor, out.max_pages, out.max_stack_depth), (abi::MINOR, 256, 1));
        let (out, agreed) = negotiate_init(&config, 4096, true, 38, init::ASYNC_READ | init::INIT_EXT).unwrap();
        assert!(!agreed.passthrough && !agreed.uring);
        assert_eq!((u64::from(out.flags), out.flags2, out.max_stack_depth), (init::ASYNC_READ | init::INIT_EXT, 0, 0));
        assert!(negotiate_init(&config, 4096, false, 27, 0).unwrap_err().contains("4.20"));
    }

    #[test]
    fn no_read_is_longer_than_a_slot_whatever_a_page_is() {
        for max_write in [8 << 10, 64 << 10, 68 << 10, 1 << 20] {
            for page in [4 << 10, 16 << 10, 64 << 10] {
                for flags in [u64::MAX, init::ASYNC_READ] {
                    let config = SessionConfig { max_write, ..Default::default() };
                    let (out, _) = negotiate_init(&config, page, false, 45, flags).unwrap();
                    // Below a page there is no mount: see `Session::mount`.
                    assert!(u32::from(out.max_pages) * page <= max_write || max_write < page, "{max_write} {page}");
                }
            }
        }
    }
}
