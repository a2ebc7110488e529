//! What a thread keeps from one read to the next so that reads allocate nothing: an aligned buffer and a list of
//! checksums. One of each per thread that reads or writes cache disks: 256 KiB and a few hundred bytes.

use crate::io::{ALIGN, IoBuf};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Length of a thread's buffer; a multiple of the checksum granule.
pub const BOUNCE: usize = 256 << 10;

/// A buffer of [`BOUNCE`] bytes aligned for O_DIRECT.
pub struct Bounce(NonNull<u8>);

// SAFETY: a `Bounce` owns its memory alone.
unsafe impl Send for Bounce {}

const LAYOUT: Layout = match Layout::from_size_align(BOUNCE, ALIGN) {
    Ok(layout) => layout,
    Err(_) => panic!("the bounce buffer's size and alignment are valid"),
};

impl Bounce {
    fn new() -> Self {
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc_zeroed(LAYOUT) };
        Bounce(NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(LAYOUT)))
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout by `new`.
        unsafe { dealloc(self.0.as_ptr(), LAYOUT) };
    }
}

impl Deref for Bounce {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `BOUNCE` initialised bytes owned by `self`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), BOUNCE) }
    }
}

impl DerefMut for Bounce {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `BOUNCE` initialised bytes owned by `self`.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), BOUNCE) }
    }
}

/// One thread's scratch.
#[derive(Default)]
pub struct Scratch {
    /// Checksums of the granules about to be read.
    pub sums: Vec<u32>,
    bounce: Option<Bounce>,
}

// SAFETY: the bounce never moves in memory while owned, and `keep` gives the whole of it away.
unsafe impl IoBuf for Option<Bounce> {
    fn parts(&mut self) -> (*mut u8, usize) {
        let bounce = self.get_or_insert_with(Bounce::new);
        (bounce.0.as_ptr(), BOUNCE)
    }
    fn keep(&mut self) -> Box<dyn Send> {
        Box::new(self.take())
    }
}

impl Scratch {
    /// The buffer as a place to read to; a new one is made after the last was kept by a late read.
    pub fn bounce(&mut self) -> (&mut Option<Bounce>, &mut Vec<u32>) {
        (&mut self.bounce, &mut self.sums)
    }

    /// The buffer's bytes.
    pub fn bytes(&mut self) -> &mut Bounce {
        self.bounce.get_or_insert_with(Bounce::new)
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Runs `f` with this thread's scratch.
pub fn with<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    let mut scratch = SCRATCH.try_with(Cell::take).ok().flatten().unwrap_or_default();
    let result = f(&mut scratch);
    // A thread that is ending has no place for it any more.
    let _ = SCRATCH.try_with(|cell| cell.set(Some(scratch)));
    result
}
