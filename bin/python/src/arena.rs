//! Memory of the package's own that reads fill: a writable buffer of bytes for memoryview, numpy and torch. Knows no reads.

use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// Alignment of the first byte: a page, so that any element type and direct I/O fit.
const ARENA_ALIGN: usize = 4096;
/// Alignment that the allocator is asked for. With a larger alignment the allocator writes zeros to each page,
/// although pages of the system are zero already.
const ALLOCATED_ALIGN: usize = 16;

/// Bytes that live as long as any view of them, aligned to 4096 bytes and zero at first.
#[pyclass(frozen, module = "spurline._native")]
pub(crate) struct Arena {
    allocated: NonNull<u8>,
    layout: Layout,
    len: usize,
}

// SAFETY: an arena is plain memory; the reads and the program decide which bytes each thread uses.
unsafe impl Send for Arena {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Arena {}

impl Arena {
    /// `len` bytes; the system gives pages at the first write.
    pub fn with_len(len: usize) -> PyResult<Arena> {
        let size = len.checked_add(ARENA_ALIGN);
        let layout = size.and_then(|size| Layout::from_size_align(size, ALLOCATED_ALIGN).ok());
        // SAFETY: the size is not zero.
        let allocated = layout.and_then(|layout| NonNull::new(unsafe { alloc_zeroed(layout) }).zip(Some(layout)));
        match allocated {
            Some((allocated, layout)) => Ok(Arena { allocated, layout, len }),
            None => Err(PyMemoryError::new_err(format!("no memory for {len} bytes"))),
        }
    }

    /// The first byte.
    fn start(&self) -> *mut u8 {
        let allocated = self.allocated.as_ptr();
        // SAFETY: the memory is longer than the arena by the alignment.
        unsafe { allocated.add(allocated.align_offset(ARENA_ALIGN)) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once; views keep the object alive.
        unsafe { dealloc(self.allocated.as_ptr(), self.layout) }
    }
}

#[pymethods]
impl Arena {
    #[new]
    fn py_new(len: usize) -> PyResult<Arena> {
        Arena::with_len(len)
    }

    fn __len__(&self) -> usize {
        self.len
    }

    /// The buffer protocol.
    ///
    /// # Safety
    /// Python calls this with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("a view is null"));
        }
        let start = slf.get().start().cast::<c_void>();
        let len = slf.get().len as ffi::Py_ssize_t;
        // SAFETY: the memory lives as long as the object, to which the view gets a reference.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
