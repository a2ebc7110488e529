//! Opening the two libraries at run time. It knows their names and nothing of what their functions do.

use crate::error::Absent;
use crate::sys::{Ibverbs, Rdmacm};
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

/// Both libraries, open. They stay open for the life of the process: their drivers keep threads and memory of their
/// own, so closing them is nothing they are made for.
pub struct Verbs {
    pub(crate) ib: Ibverbs,
    pub(crate) cm: Rdmacm,
}

impl Verbs {
    /// Opens libibverbs.so.1 and librdmacm.so.1.
    ///
    /// # Errors
    /// [`Absent::Library`] when one is not installed or lacks a function; [`Absent::Kernel`] when the kernel's part is
    /// not loaded.
    pub fn load() -> Result<Arc<Verbs>, Absent> {
        Self::load_named("libibverbs.so.1", "librdmacm.so.1")
    }

    /// Has librdmacm close devices that were taken away and that nothing here uses any more. By itself it keeps them open
    /// until it meets a new one, and a driver without disassociation (Soft-RoCE's) takes no device away that is open:
    /// `rdma link delete` would wait until this process ends. Also opens all devices there are, as a side effect.
    pub fn forget_lost_devices(&self) {
        let (Some(get), Some(free)) = (self.cm.rdma_get_devices, self.cm.rdma_free_devices) else { return };
        let mut count = 0;
        // SAFETY: the number is written during the call.
        let list = unsafe { get(&mut count) };
        if !list.is_null() {
            // SAFETY: the list just made, given back once.
            unsafe { free(list) };
        }
    }

    pub(crate) fn load_named(ibverbs: &'static str, rdmacm: &'static str) -> Result<Arc<Verbs>, Absent> {
        let missing = |library, symbol: &str| Absent::Library { library, why: format!("it has no function {symbol}") };
        let ib = open(ibverbs)?;
        // SAFETY: the names and types are those of the libraries' headers, which a test compares.
        let ib = unsafe { Ibverbs::resolve(|name| symbol(ib, name)) }.map_err(|name| missing(ibverbs, name))?;
        let cm = open(rdmacm)?;
        // SAFETY: as above.
        let cm = unsafe { Rdmacm::resolve(|name| symbol(cm, name)) }.map_err(|name| missing(rdmacm, name))?;
        kernel_has_it()?;
        Ok(Arc::new(Verbs { ib, cm }))
    }
}

fn open(library: &'static str) -> Result<*mut c_void, Absent> {
    let name = CString::new(library).unwrap_or_default();
    // SAFETY: a NUL-terminated name; constructors of a system library run.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        // SAFETY: dlerror answers NULL or a NUL-terminated text that lives until the thread's next call of it.
        let why = unsafe {
            let text = libc::dlerror();
            if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        return Err(Absent::Library { library, why });
    }
    Ok(handle)
}

fn symbol(library: *mut c_void, name: &'static str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: `library` came from dlopen and is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Looks before the first call: the libraries only say "function not implemented" or "no such device".
fn kernel_has_it() -> Result<(), Absent> {
    let class = std::path::Path::new("/sys/class/infiniband_verbs");
    if !class.exists() {
        return Err(Absent::Kernel { why: "no /sys/class/infiniband_verbs: ib_uverbs is not loaded".into() });
    }
    // Its device node is /dev/infiniband/rdma_cm; in a container it has to be passed in.
    if !std::path::Path::new("/sys/class/misc/rdma_cm").exists() {
        return Err(Absent::Kernel { why: "no /sys/class/misc/rdma_cm: rdma_ucm is not loaded".into() });
    }
    let node = "/dev/infiniband/rdma_cm";
    match std::fs::File::options().read(true).write(true).open(node) {
        Ok(_) => Ok(()),
        Err(e) => {
            Err(Absent::Kernel { why: format!("{node} can't be opened: {e}; in a container, pass /dev/infiniband in") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_that_are_not_there_are_named() {
        let error = Verbs::load_named("libibverbs-none.so.1", "librdmacm.so.1").err().unwrap();
        assert!(matches!(error, Absent::Library { library: "libibverbs-none.so.1", .. }), "{error}");
        // libc is no libibverbs: the missing function is named.
        let error = Verbs::load_named("libc.so.6", "librdmacm.so.1").err().unwrap();
        assert!(error.to_string().contains("ibv_get_device_list"), "{error}");
    }
}
