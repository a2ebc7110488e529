//! The attributes of a file that the kernel certainly has. It knows neither the file nor how the kernel is reached.

use spurline_volume::writes::NodeAttr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Set-user-ID and set-group-ID.
pub(super) const PRIVILEGE_BITS: u32 = 0o6000;

/// The attributes of a file in the kernel.
#[derive(Default)]
pub(super) struct KernelInode {
    /// A length that its file certainly has at least: it wrote them itself, or got them stored. Any answer with attributes can lower
    /// it; none raises it for certain, because the kernel drops some.
    size: AtomicU64,
    /// It may have set-user-ID or set-group-ID bits.
    privileged: AtomicBool,
}

impl KernelInode {
    /// The kernel wrote up to `end`.
    pub fn note_written(&self, end: u64) {
        self.size.fetch_max(end, Ordering::AcqRel);
    }

    /// An answer with these attributes goes to the kernel.
    pub fn note_sent(&self, attr: &NodeAttr) {
        self.lower_size(attr.size);
        self.note_mode(attr.mode);
    }

    pub fn note_mode(&self, mode: u32) {
        if mode & PRIVILEGE_BITS != 0 {
            self.privileged.store(true, Ordering::Release);
        }
    }

    /// The kernel may have a shorter length.
    pub fn lower_size(&self, size: u64) {
        self.size.fetch_min(size, Ordering::AcqRel);
    }

    /// The length that the kernel has at least.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Whether the kernel may have such bits; from now on, it is known to have none.
    pub fn take_privileged(&self) -> bool {
        self.privileged.swap(false, Ordering::AcqRel)
    }
}
