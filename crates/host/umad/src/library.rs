//! Functions of libibumad, resolved at run time, behind safe calls. Owns every unsafe line of this crate, and knows no management
//! datagram.

use crate::{MAD_BYTES, SmQueryError};
use libc::{c_char, c_int, c_long, c_uint, c_void};
use std::ffi::{CStr, CString};

const LIBRARY_NAME: &str = "libibumad.so.3";
/// Length of a device name in the library's structures.
const CA_NAME: usize = 20;
/// The library's limit of devices.
const MAX_CAS: usize = 32;
/// More than `struct umad_port` in any version; the structure ends with pointers that belong to the library.
const PORT_BYTES: usize = 512;
/// More than the header of a datagram in any version.
const HEADER_BYTES: usize = 256;

/// The functions.
#[derive(Debug)]
pub(crate) struct UmadLibrary {
    cas: unsafe extern "C" fn(*mut c_char, c_int) -> c_int,
    get_port: unsafe extern "C" fn(*const c_char, c_int, *mut c_void) -> c_int,
    release_port: unsafe extern "C" fn(*mut c_void) -> c_int,
    open_port: unsafe extern "C" fn(*const c_char, c_int) -> c_int,
    close_port: unsafe extern "C" fn(c_int) -> c_int,
    register: unsafe extern "C" fn(c_int, c_int, c_int, u8, *mut c_long) -> c_int,
    size: unsafe extern "C" fn() -> usize,
    set_addr: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, c_int) -> c_int,
    send: unsafe extern "C" fn(c_int, c_int, *mut c_void, c_int, c_int, c_int) -> c_int,
    receive: unsafe extern "C" fn(c_int, *mut c_void, *mut c_int, c_int) -> c_int,
    status: unsafe extern "C" fn(*mut c_void) -> c_int,
}

impl UmadLibrary {
    /// Opens the library; the loader's message when that fails.
    pub(crate) fn open() -> Result<Self, String> {
        let name = CString::new(LIBRARY_NAME).unwrap_or_default();
        // SAFETY: a NUL-terminated name; constructors of a system library run.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: dlerror answers NULL or a NUL-terminated text that lives until the thread's next call of dlerror.
            let why = unsafe {
                let text = libc::dlerror();
                if text.is_null() { LIBRARY_NAME.into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
            };
            return Err(why);
        }
        let symbol = |name: &str| {
            let c_name = CString::new(name).unwrap_or_default();
            // SAFETY: `handle` came from dlopen and is never closed.
            let found = unsafe { libc::dlsym(handle, c_name.as_ptr()) };
            if found.is_null() { Err(format!("{LIBRARY_NAME} has no function {name}")) } else { Ok(found) }
        };
        let init = symbol("umad_init")?;
        // SAFETY: the types are as in infiniband/umad.h, which have not changed since libibumad 3.
        let (library, init) = unsafe {
            let init: unsafe extern "C" fn() -> c_int = std::mem::transmute(init);
            let library = UmadLibrary {
                cas: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_char, c_int) -> c_int>(symbol(
                    "umad_get_cas_names",
                )?),
                get_port: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const c_char, c_int, *mut c_void) -> c_int,
                >(symbol("umad_get_port")?),
                release_port: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> c_int>(symbol(
                    "umad_release_port",
                )?),
                open_port: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, c_int) -> c_int>(
                    symbol("umad_open_port")?,
                ),
                close_port: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> c_int>(symbol(
                    "umad_close_port",
                )?),
                register: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, c_int, c_int, u8, *mut c_long) -> c_int,
                >(symbol("umad_register")?),
                size: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> usize>(symbol("umad_size")?),
                set_addr: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, c_int) -> c_int,
                >(symbol("umad_set_addr")?),
                send: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, c_int, *mut c_void, c_int, c_int, c_int) -> c_int,
                >(symbol("umad_send")?),
                receive: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, *mut c_void, *mut c_int, c_int) -> c_int,
                >(symbol("umad_recv")?),
                status: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> c_int>(symbol(
                    "umad_status",
                )?),
            };
            (library, init)
        };
        // SAFETY: takes nothing and may be called more than once.
        unsafe { init() };
        // SAFETY: as above.
        let header = unsafe { (library.size)() };
        if header > HEADER_BYTES {
            return Err(format!("{LIBRARY_NAME} has a header of {header} bytes"));
        }
        Ok(library)
    }

    pub(crate) fn list_devices(&self) -> Vec<String> {
        let mut names = [0u8; CA_NAME * MAX_CAS];
        // SAFETY: the array has room for as many names as requested, each of the library's fixed length.
        let count = unsafe { (self.cas)(names.as_mut_ptr().cast(), MAX_CAS as c_int) };
        names
            .chunks(CA_NAME)
            .take(usize::try_from(count).unwrap_or(0))
            .map(|name| {
                let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
                String::from_utf8_lossy(&name[..end]).into_owned()
            })
            .collect()
    }

    pub(crate) fn port_info(&self, device: &CStr, port: c_int) -> Result<crate::UmadPort, i32> {
        // Eight-byte words, for the alignment of the library's structure.
        let mut bytes = [0u64; PORT_BYTES / 8];
        // SAFETY: more room than the structure needs, aligned for the widest member.
        let code = unsafe { (self.get_port)(device.as_ptr(), port, bytes.as_mut_ptr().cast()) };
        if code != 0 {
            return Err(code.abs());
        }
        let at = |offset: usize| {
            let word = bytes[offset / 8].to_ne_bytes();
            let start = offset % 8;
            c_uint::from_ne_bytes([word[start], word[start + 1], word[start + 2], word[start + 3]])
        };
        // ca_name[20], portnum, base_lid, lmc, sm_lid, sm_sl, state.
        let info = crate::UmadPort { lid: at(24), sm_lid: at(32), state: at(40) };
        // SAFETY: filled by the library above, released once.
        unsafe { (self.release_port)(bytes.as_mut_ptr().cast()) };
        Ok(info)
    }

    pub(crate) fn open_port(&self, device: &CStr, port: c_int) -> Result<OpenPort<'_>, i32> {
        // SAFETY: a NUL-terminated name.
        let id = unsafe { (self.open_port)(device.as_ptr(), port) };
        if id < 0 { Err(-id) } else { Ok(OpenPort { library: self, id }) }
    }
}

/// An open port; a drop closes the port and ends the agents.
pub(crate) struct OpenPort<'a> {
    library: &'a UmadLibrary,
    id: c_int,
}

impl OpenPort<'_> {
    /// Registers an agent for requests and responses of a management class.
    pub(crate) fn register_agent(&self, class: c_int) -> Result<c_int, SmQueryError> {
        // SAFETY: no method mask: the agent serves no requests.
        let agent = unsafe { (self.library.register)(self.id, class, 1, 0, std::ptr::null_mut()) };
        if agent < 0 { Err(SmQueryError::Call { call: "umad_register", code: agent }) } else { Ok(agent) }
    }

    /// Sends a datagram to `lid` and waits for the response; the inner error says why none came.
    pub(crate) fn exchange_mad(
        &self,
        agent: c_int,
        lid: c_int,
        mad: &[u8; MAD_BYTES],
        try_ms: c_int,
        tries: c_int,
    ) -> Result<Result<[u8; MAD_BYTES], String>, SmQueryError> {
        // SAFETY: takes nothing.
        let header = unsafe { (self.library.size)() }.min(HEADER_BYTES);
        let mut buffer = [0u64; (HEADER_BYTES + MAD_BYTES) / 8];
        let start = buffer.as_mut_ptr().cast::<u8>();
        // SAFETY: header and datagram fit into the buffer; the library writes only the header.
        let code = unsafe {
            start.add(header).copy_from_nonoverlapping(mad.as_ptr(), MAD_BYTES);
            // Queue pair 0 is the subnet manager's, and has no key.
            (self.library.set_addr)(start.cast(), lid, 0, 0, 0);
            (self.library.send)(self.id, agent, start.cast(), MAD_BYTES as c_int, try_ms, tries - 1)
        };
        if code != 0 {
            return Err(SmQueryError::Call { call: "umad_send", code });
        }
        let mut length = MAD_BYTES as c_int;
        // The kernel returns the datagram after the last try; the margin is for the kernel's delay.
        let limit = try_ms * tries + 200;
        // SAFETY: the buffer has room for a header and `length` bytes.
        let code = unsafe { (self.library.receive)(self.id, start.cast(), &raw mut length, limit) };
        if code < 0 {
            return Ok(Err(format!("no answer within {limit} ms")));
        }
        // SAFETY: the header was filled by the library above.
        let status = unsafe { (self.library.status)(start.cast()) };
        if status != 0 {
            return Ok(Err(if status == libc::ETIMEDOUT {
                format!("no answer to {tries} tries of {try_ms} ms")
            } else {
                format!("error {status}")
            }));
        }
        let mut answer = [0; MAD_BYTES];
        // SAFETY: the same bytes of the same buffer as above, all written.
        unsafe { answer.as_mut_ptr().copy_from_nonoverlapping(start.add(header), MAD_BYTES) };
        Ok(Ok(answer))
    }
}

impl Drop for OpenPort<'_> {
    fn drop(&mut self) {
        // SAFETY: opened by the library, closed once.
        unsafe { (self.library.close_port)(self.id) };
    }
}
