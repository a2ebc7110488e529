//! A query to an InfiniBand fabric: does the subnet manager still respond? Sent as a management datagram through libibumad,
//! opened at run time; without the library, the result says why. Does not interpret the response and reads no sysfs.

mod library;

use library::UmadLibrary;
use std::ffi::CString;

/// Timeout of a try, and number of tries: a response takes a millisecond, and longer from a busy subnet manager.
const TRY_MS: i32 = 300;
const QUERY_ATTEMPTS: i32 = 3;

/// Length of a management datagram, and offsets there (InfiniBand Architecture 13.4.2, 14.2.1.2, 14.2.5.13).
const MAD_BYTES: usize = 256;
const SUBN_LID_ROUTED: u8 = 0x01;
const METHOD_GET: u8 = 0x01;
const GET_RESPONSE: u8 = 0x81;
const SM_INFO: u16 = 0x0020;
const STATUS_OFFSET: usize = 4;
const ATTRIBUTE_OFFSET: usize = 16;
const DATA_OFFSET: usize = 64;

/// Why a query could not be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SmQueryError {
    /// The library cannot be opened.
    #[error("{0}; install libibumad3 (Debian, Ubuntu) or libibumad (RHEL, Rocky)")]
    Library(String),
    /// The port cannot be opened for management.
    #[error(
        "port {port} of {device} can't be opened for management (errno {errno}): /dev/infiniband/umad* needs root and the module ib_umad"
    )]
    Port {
        /// The device.
        device: String,
        /// The port.
        port: u32,
        /// The errno; 13 for no permission.
        errno: i32,
    },
    /// A function of the library failed.
    #[error("libibumad: {call} returned {code}")]
    Call {
        /// The function.
        call: &'static str,
        /// The return value.
        code: i32,
    },
}

/// The result of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SmResponse {
    /// The subnet manager responded.
    Alive {
        /// The port's GUID.
        guid: u64,
        /// The priority among several.
        priority: u8,
        /// 3: master; 2: standby; 1: discovering; 0: not active.
        state: u8,
    },
    /// No response, or an error, as text.
    Silent(String),
}

/// A port as reported by the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UmadPort {
    /// The LID.
    pub lid: u32,
    /// The subnet manager's LID; 0 when none has configured the port.
    pub sm_lid: u32,
    /// Logical state, 4 for active.
    pub state: u32,
}

/// The opened library.
#[derive(Debug)]
pub struct Umad {
    library: UmadLibrary,
}

impl Umad {
    /// Opens libibumad.
    ///
    /// # Errors
    /// When the library is not installed, or too old.
    pub fn open() -> Result<Self, SmQueryError> {
        Ok(Umad { library: UmadLibrary::open().map_err(SmQueryError::Library)? })
    }

    /// Names of the devices that the library knows.
    pub fn devices(&self) -> Vec<String> {
        self.library.list_devices()
    }

    /// The library's data about a port.
    ///
    /// # Errors
    /// When the library does not know the port.
    pub fn port_info(&self, device: &str, port: u32) -> Result<UmadPort, SmQueryError> {
        let name = device_name(device, port)?;
        self.library.port_info(&name, port as i32).map_err(|errno| open_error(device, port, errno))
    }

    /// Queries the subnet manager at `sm_lid`, through a port; takes at most a second.
    ///
    /// # Errors
    /// When the query could not be sent.
    pub fn query_sm(&self, device: &str, port: u32, sm_lid: u32) -> Result<SmResponse, SmQueryError> {
        let name = device_name(device, port)?;
        let open = self.library.open_port(&name, port as i32).map_err(|errno| open_error(device, port, errno))?;
        let agent = open.register_agent(i32::from(SUBN_LID_ROUTED))?;
        let mut mad = [0; MAD_BYTES];
        mad[0] = 1;
        mad[1] = SUBN_LID_ROUTED;
        mad[2] = 1;
        mad[3] = METHOD_GET;
        mad[ATTRIBUTE_OFFSET..ATTRIBUTE_OFFSET + 2].copy_from_slice(&SM_INFO.to_be_bytes());
        let answer = open.exchange_mad(agent, sm_lid as i32, &mad, TRY_MS, QUERY_ATTEMPTS)?;
        Ok(answer.map_or_else(SmResponse::Silent, |mad| parse_response(&mad)))
    }
}

fn device_name(device: &str, port: u32) -> Result<CString, SmQueryError> {
    CString::new(device).map_err(|_| open_error(device, port, libc::EINVAL))
}

fn open_error(device: &str, port: u32, errno: i32) -> SmQueryError {
    SmQueryError::Port { device: device.to_owned(), port, errno }
}

/// The response in a datagram.
fn parse_response(mad: &[u8; MAD_BYTES]) -> SmResponse {
    let status = u16::from_be_bytes([mad[STATUS_OFFSET], mad[STATUS_OFFSET + 1]]);
    if mad[3] != GET_RESPONSE || status != 0 {
        return SmResponse::Silent(format!("method {:#x}, status {status:#x}", mad[3]));
    }
    let guid = mad[DATA_OFFSET..DATA_OFFSET + 8].iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
    // After GUID, key and count: four bits of priority, four of state.
    let last = mad[DATA_OFFSET + 20];
    SmResponse::Alive { guid, priority: last >> 4, state: last & 15 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let mut mad = [0; MAD_BYTES];
        mad[3] = GET_RESPONSE;
        mad[DATA_OFFSET + 7] = 9;
        mad[DATA_OFFSET + 20] = 0xf3;
        assert_eq!(parse_response(&mad), SmResponse::Alive { guid: 9, priority: 15, state: 3 });
        mad[STATUS_OFFSET + 1] = 0x1c;
        assert!(matches!(parse_response(&mad), SmResponse::Silent(why) if why.contains("0x1c")));
    }

    #[test]
    fn a_library_or_port_that_is_not_here_is_said_so() {
        match Umad::open() {
            Err(SmQueryError::Library(why)) => assert!(why.contains("libibumad"), "{why}"),
            Err(other) => panic!("{other}"),
            Ok(umad) => {
                let asked = umad.query_sm("no-such-device", 1, 1);
                assert!(matches!(asked, Err(SmQueryError::Port { .. })), "{asked:?}");
                assert!(umad.query_sm("nul\0", 1, 1).is_err() && umad.port_info("x", 1).is_err());
            }
        }
    }
}
