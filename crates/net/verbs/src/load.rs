//! Opens the two libraries at run time. Knows names, not the purpose of functions.

use crate::error::RdmaUnavailable;
use crate::sys::{Ibverbs, Rdmacm};
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

/// Both libraries, opened. The libraries stay open for the life of the process: drivers own threads and memory, and do not
/// support unloading.
pub struct VerbsLibrary {
    pub(crate) ib: Ibverbs,
    pub(crate) cm: Rdmacm,
}

impl VerbsLibrary {
    /// Opens libibverbs.so.1 and librdmacm.so.1.
    ///
    /// # Errors
    /// [`RdmaUnavailable::Library`] when a library is not installed or lacks a function; [`RdmaUnavailable::Kernel`] when the
    /// kernel modules are not loaded.
    pub fn load() -> Result<Arc<VerbsLibrary>, RdmaUnavailable> {
        Self::load_named("libibverbs.so.1", "librdmacm.so.1")
    }

    /// Makes librdmacm close removed devices that are no longer used here, with the memory that the drivers have mapped.
    /// Otherwise librdmacm keeps such devices until a new device is found. No effect when the last device was removed. As a side
    /// effect, librdmacm opens all present devices.
    pub fn forget_lost_devices(&self) {
        let (Some(get), Some(free)) = (self.cm.rdma_get_devices, self.cm.rdma_free_devices) else { return };
        let mut count = 0;
        // SAFETY: the count is written during the call.
        let list = unsafe { get(&mut count) };
        if !list.is_null() {
            // SAFETY: frees the list just returned, once.
            unsafe { free(list) };
        }
    }

    pub(crate) fn load_named(
        ibverbs: &'static str,
        rdmacm: &'static str,
    ) -> Result<Arc<VerbsLibrary>, RdmaUnavailable> {
        let missing =
            |library, symbol: &str| RdmaUnavailable::Library { library, why: format!("it has no function {symbol}") };
        let ib = open_library(ibverbs)?;
        // SAFETY: the names and types are as in the libraries' headers, which a test compares.
        let ib = unsafe { Ibverbs::resolve(|name| find_symbol(ib, name)) }.map_err(|name| missing(ibverbs, name))?;
        let cm = open_library(rdmacm)?;
        // SAFETY: as above.
        let cm = unsafe { Rdmacm::resolve(|name| find_symbol(cm, name)) }.map_err(|name| missing(rdmacm, name))?;
        check_kernel()?;
        Ok(Arc::new(VerbsLibrary { ib, cm }))
    }
}

fn open_library(library: &'static str) -> Result<*mut c_void, RdmaUnavailable> {
    let name = CString::new(library).unwrap_or_default();
    // SAFETY: a NUL-terminated name; constructors of a system library run.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        // SAFETY: dlerror returns NULL or a NUL-terminated text that lives until the thread's next call of dlerror.
        let why = unsafe {
            let text = libc::dlerror();
            if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        return Err(RdmaUnavailable::Library { library, why });
    }
    Ok(handle)
}

fn find_symbol(library: *mut c_void, name: &'static str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: `library` came from dlopen and is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Checks the kernel before the first call: the libraries report only "function not implemented" or "no such device".
fn check_kernel() -> Result<(), RdmaUnavailable> {
    let class = std::path::Path::new("/sys/class/infiniband_verbs");
    if !class.exists() {
        return Err(RdmaUnavailable::Kernel { why: "no /sys/class/infiniband_verbs: ib_uverbs is not loaded".into() });
    }
    // The device node is /dev/infiniband/rdma_cm; a container needs it passed in.
    if !std::path::Path::new("/sys/class/misc/rdma_cm").exists() {
        return Err(RdmaUnavailable::Kernel { why: "no /sys/class/misc/rdma_cm: rdma_ucm is not loaded".into() });
    }
    let node = "/dev/infiniband/rdma_cm";
    match std::fs::File::options().read(true).write(true).open(node) {
        Ok(_) => Ok(()),
        Err(e) => Err(RdmaUnavailable::Kernel {
            why: format!("{node} can't be opened: {e}; in a container, pass /dev/infiniband in"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_that_are_not_there_are_named() {
        let error = VerbsLibrary::load_named("libibverbs-none.so.1", "librdmacm.so.1").err().unwrap();
        assert!(matches!(error, RdmaUnavailable::Library { library: "libibverbs-none.so.1", .. }), "{error}");
        // libc is no libibverbs: the missing function is named.
        let error = VerbsLibrary::load_named("libc.so.6", "librdmacm.so.1").err().unwrap();
        assert!(error.to_string().contains("ibv_get_device_list"), "{error}");
    }
}
