//! The memory of a slot: a page for headers, and a payload. Does not know the memory budget.

use spurline_mem::{AnnexPiece, BufferPool};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes before the payload: a page, so that the payload is page-aligned.
pub const HEAD_LEN: usize = 4096;

/// The kernel's page size in bytes: 4096, or up to 64K on some ARM and POWER machines.
pub(crate) fn page_size() -> u32 {
    // SAFETY: sysconf has no conditions.
    u32::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Memory for a slot.
///
/// # Safety
/// `as_ptr` returns the same page-aligned address for the value's whole life, with `len` initialised bytes behind that no other
/// code accesses until the value is dropped: the kernel writes there.
pub unsafe trait SlotBuffer: Send {
    /// The start of the memory.
    fn as_ptr(&self) -> NonNull<u8>;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Whether the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Allocates the memory of slots, within the caller's budget.
pub trait BufferSource: Send + Sync {
    /// Memory of at least `len` bytes, a multiple of the page size. A drop frees the memory.
    ///
    /// # Errors
    /// When there is none: the session then runs with fewer slots.
    fn allocate(&self, len: usize) -> io::Result<Box<dyn SlotBuffer>>;
}

/// Private anonymous pages; a page costs memory once written.
#[derive(Debug, Default, Clone, Copy)]
pub struct AnonymousPages;

struct MappedPages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and knows no thread.
unsafe impl Send for MappedPages {}

// SAFETY: the mapping is private, page-aligned, zeroed by the kernel and stays until drop.
unsafe impl SlotBuffer for MappedPages {
    fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }
    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // SAFETY: start and len are those of the mapping made in `allocate`, and nothing borrows the memory now.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl BufferSource for AnonymousPages {
    fn allocate(&self, len: usize) -> io::Result<Box<dyn SlotBuffer>> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Box::new(MappedPages { start, len }))
    }
}

/// Memory from a pool's annex, so that a NIC registered with the arena can write a reply straight into a slot. When
/// the annex is full, memory comes from [`AnonymousPages`].
pub struct PoolAnnex(pub Arc<BufferPool>);

// SAFETY: a piece of the annex keeps its address, is aligned to a page and belongs to this value until the drop.
unsafe impl SlotBuffer for AnnexPiece {
    fn as_ptr(&self) -> NonNull<u8> {
        AnnexPiece::as_ptr(self)
    }
    fn len(&self) -> usize {
        AnnexPiece::len(self)
    }
}

impl BufferSource for PoolAnnex {
    fn allocate(&self, len: usize) -> io::Result<Box<dyn SlotBuffer>> {
        match self.0.annex(len) {
            Some(piece) => Ok(Box::new(piece)),
            None => AnonymousPages.allocate(len),
        }
    }
}
