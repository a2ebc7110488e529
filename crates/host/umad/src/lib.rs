//! One question to an InfiniBand fabric: does the subnet manager still answer? It goes out as a management datagram
//! through libibumad, opened at run time; where that is missing, the answer is why. It knows nothing of what the answer
//! means, and reads no sysfs.

mod library;

use library::Library;
use std::ffi::CString;

/// How long one try waits, and how many there are: an answer takes a millisecond, a busy subnet manager longer.
const TRY_MS: i32 = 300;
const TRIES: i32 = 3;

/// A management datagram's length, and what stands where in it (InfiniBand Architecture 13.4.2, 14.2.1.2, 14.2.5.13).
const MAD: usize = 256;
const SUBN_LID_ROUTED: u8 = 0x01;
const GET: u8 = 0x01;
const GET_RESPONSE: u8 = 0x81;
const SM_INFO: u16 = 0x0020;
const AT_STATUS: usize = 4;
const AT_ATTRIBUTE: usize = 16;
const AT_DATA: usize = 64;

/// Why a question could not be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotAsked {
    /// The library is not here.
    #[error("{0}; install libibumad3 (Debian, Ubuntu) or libibumad (RHEL, Rocky)")]
    Library(String),
    /// The port can't be opened for management.
    #[error(
        "port {port} of {device} can't be opened for management (errno {errno}): /dev/infiniband/umad* is root's, and ib_umad makes it"
    )]
    Port {
        /// The device.
        device: String,
        /// The port.
        port: u32,
        /// The system's number, 13 for no permission.
        errno: i32,
    },
    /// The library refused.
    #[error("libibumad: {call} answered {code}")]
    Call {
        /// Its function.
        call: &'static str,
        /// Its answer.
        code: i32,
    },
}

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The subnet manager says it is there.
    Alive {
        /// Its port's GUID.
        guid: u64,
        /// Its priority among several.
        priority: u8,
        /// 3: it is the one that works; 2: it stands by; 1: it is looking round; 0: it is switched off.
        state: u8,
    },
    /// Nothing came, or a refusal; in words.
    Silent(String),
}

/// A port as the library sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortInfo {
    /// Own address.
    pub lid: u32,
    /// The subnet manager's address; 0 when none has been here.
    pub sm_lid: u32,
    /// Logical state, 4 for active.
    pub state: u32,
}

/// The library, opened.
#[derive(Debug)]
pub struct Umad {
    library: Library,
}

impl Umad {
    /// Opens libibumad.
    ///
    /// # Errors
    /// When it is not here, or too old.
    pub fn open() -> Result<Self, NotAsked> {
        Ok(Umad { library: Library::open().map_err(NotAsked::Library)? })
    }

    /// Names of the devices that the library knows.
    pub fn devices(&self) -> Vec<String> {
        self.library.devices()
    }

    /// What the library says of a port.
    ///
    /// # Errors
    /// When it does not know the port.
    pub fn port(&self, device: &str, port: u32) -> Result<PortInfo, NotAsked> {
        let name = name(device, port)?;
        self.library.port(&name, port as i32).map_err(|errno| unopened(device, port, errno))
    }

    /// Asks the subnet manager at `sm_lid`, through a port; takes at most a second.
    ///
    /// # Errors
    /// When the question could not be sent.
    pub fn ask(&self, device: &str, port: u32, sm_lid: u32) -> Result<Answer, NotAsked> {
        let name = name(device, port)?;
        let open = self.library.open_port(&name, port as i32).map_err(|errno| unopened(device, port, errno))?;
        let agent = open.register(i32::from(SUBN_LID_ROUTED))?;
        let mut mad = [0; MAD];
        (mad[0], mad[1], mad[2], mad[3]) = (1, SUBN_LID_ROUTED, 1, GET);
        mad[AT_ATTRIBUTE..AT_ATTRIBUTE + 2].copy_from_slice(&SM_INFO.to_be_bytes());
        let answer = open.exchange(agent, sm_lid as i32, &mad, TRY_MS, TRIES)?;
        Ok(answer.map_or_else(Answer::Silent, |mad| read(&mad)))
    }
}

fn name(device: &str, port: u32) -> Result<CString, NotAsked> {
    CString::new(device).map_err(|_| unopened(device, port, libc::EINVAL))
}

fn unopened(device: &str, port: u32, errno: i32) -> NotAsked {
    NotAsked::Port { device: device.to_owned(), port, errno }
}

/// The answer in a datagram.
fn read(mad: &[u8; MAD]) -> Answer {
    let status = u16::from_be_bytes([mad[AT_STATUS], mad[AT_STATUS + 1]]);
    if mad[3] != GET_RESPONSE || status != 0 {
        return Answer::Silent(format!("method {:#x}, status {status:#x}", mad[3]));
    }
    let guid = mad[AT_DATA..AT_DATA + 8].iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
    // After GUID, key and count: four bits of priority, four of state.
    let last = mad[AT_DATA + 20];
    Answer::Alive { guid, priority: last >> 4, state: last & 15 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let mut mad = [0; MAD];
        mad[3] = GET_RESPONSE;
        mad[AT_DATA + 7] = 9;
        mad[AT_DATA + 20] = 0xf3;
        assert_eq!(read(&mad), Answer::Alive { guid: 9, priority: 15, state: 3 });
        mad[AT_STATUS + 1] = 0x1c;
        assert!(matches!(read(&mad), Answer::Silent(why) if why.contains("0x1c")));
    }

    #[test]
    fn a_library_or_port_that_is_not_here_is_said_so() {
        match Umad::open() {
            Err(NotAsked::Library(why)) => assert!(why.contains("libibumad"), "{why}"),
            Err(other) => panic!("{other}"),
            Ok(umad) => {
                let asked = umad.ask("no-such-device", 1, 1);
                assert!(matches!(asked, Err(NotAsked::Port { .. })), "{asked:?}");
                assert!(umad.ask("nul\0", 1, 1).is_err() && umad.port("x", 1).is_err());
            }
        }
    }
}
