//! Per-thread memory that makes reads allocation-free: an aligned buffer and a list of checksums. 256 KiB and a few hundred bytes
//! for each thread that reads or writes cache disks.

use crate::io::{ALIGN, IoBuf};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Length of a thread's buffer; a multiple of the checksum granule.
pub const SCRATCH_BYTES: usize = 256 << 10;

/// A buffer of [`SCRATCH_BYTES`] bytes aligned for O_DIRECT.
pub struct BounceBuffer(NonNull<u8>);

// SAFETY: a `BounceBuffer` exclusively owns the memory.
unsafe impl Send for BounceBuffer {}

const SCRATCH_LAYOUT: Layout = match Layout::from_size_align(SCRATCH_BYTES, ALIGN) {
    Ok(layout) => layout,
    Err(_) => panic!("the bounce buffer's size and alignment are valid"),
};

impl BounceBuffer {
    fn new() -> Self {
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc_zeroed(SCRATCH_LAYOUT) };
        BounceBuffer(NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(SCRATCH_LAYOUT)))
    }
}

impl Drop for BounceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout by `new`.
        unsafe { dealloc(self.0.as_ptr(), SCRATCH_LAYOUT) };
    }
}

impl Deref for BounceBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `SCRATCH_BYTES` initialised bytes owned by `self`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), SCRATCH_BYTES) }
    }
}

impl DerefMut for BounceBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `SCRATCH_BYTES` initialised bytes owned by `self`.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), SCRATCH_BYTES) }
    }
}

/// A thread's scratch memory.
#[derive(Default)]
pub struct ThreadScratch {
    /// Checksums of the granules about to be read.
    pub sums: Vec<u32>,
    bounce: Option<BounceBuffer>,
}

// SAFETY: the buffer does not move while owned, and `keep_alive` gives the whole away.
unsafe impl IoBuf for Option<BounceBuffer> {
    fn raw_parts(&mut self) -> (*mut u8, usize) {
        let bounce = self.get_or_insert_with(BounceBuffer::new);
        (bounce.0.as_ptr(), SCRATCH_BYTES)
    }
    fn keep_alive(&mut self) -> Box<dyn Send> {
        Box::new(self.take())
    }
}

impl ThreadScratch {
    /// The buffer as a read target; a new buffer is allocated after a late read has taken the last.
    pub fn bounce(&mut self) -> (&mut Option<BounceBuffer>, &mut Vec<u32>) {
        (&mut self.bounce, &mut self.sums)
    }

    /// The buffer's bytes.
    pub fn bounce_bytes(&mut self) -> &mut BounceBuffer {
        self.bounce.get_or_insert_with(BounceBuffer::new)
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<ThreadScratch>>> = const { Cell::new(None) };
}

/// Runs `f` with this thread's scratch.
pub fn with_scratch<R>(f: impl FnOnce(&mut ThreadScratch) -> R) -> R {
    let mut scratch = SCRATCH.try_with(Cell::take).ok().flatten().unwrap_or_default();
    let result = f(&mut scratch);
    // A thread that is ending can't store the scratch any more.
    let _ = SCRATCH.try_with(|cell| cell.set(Some(scratch)));
    result
}
