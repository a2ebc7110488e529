//! Connections through rdma_cm: ids, events, addresses. Every wait takes a deadline from the caller, since the kernel's own
//! timers exceed a minute. Knows no queue pair internals.

use crate::error::VerbsError;
use crate::load::VerbsLibrary;
use crate::queue::to_timespec;
use crate::sys;
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Exponent of the acknowledgement timeout: the NIC waits 4.096 µs x 2^this. `None` keeps rdma_cm's default (19:
    /// 2 s).
    pub ack_timeout: Option<u8>,
    /// Retransmissions before the NIC reports failure, at most 7. Some drivers treat 7 as unlimited.
    pub retries: u8,
    /// Retransmissions by the peer's NIC while no receive is posted here, at most 7 (unlimited).
    pub rnr_retries: u8,
}

/// The reason of a refused connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CmRejection {
    /// The reason code of the InfiniBand specification, or a negative errno from iWARP.
    pub reason: i32,
    /// Private data of the peer's program.
    pub private: Vec<u8>,
}

impl CmRejection {
    /// The reason as text.
    pub fn describe(&self) -> String {
        match self.reason {
            8 => "no process listens there for RDMA (invalid service id)".into(),
            28 => "the peer's program refused it".into(),
            10 => "the peer considers the connection stale".into(),
            1 | 3 => "the peer is out of queue pairs or other resources".into(),
            24 => "the peer redirects to another port".into(),
            12..=23 => {
                format!("the two ports are not compatible (GID, LID, MTU or service level; reason {})", self.reason)
            }
            n if n < 0 => std::io::Error::from_raw_os_error(-n).to_string(),
            n => format!("reason {n} of the InfiniBand connection manager"),
        }
    }
}

/// The kind of a connection event.
#[derive(Debug)]
pub enum CmEventKind {
    /// The address is resolved to a device.
    AddressResolved,
    /// The route to the peer is resolved.
    RouteResolved,
    /// A peer requests a connection; the private data may be padded with zeros.
    ConnectRequest {
        /// The new id, to be accepted with a queue pair, or dropped.
        id: CmId,
        /// Private data of the peer's program.
        private: Vec<u8>,
    },
    /// The connection is established.
    Established {
        /// Private data of the accepting program.
        private: Vec<u8>,
    },
    /// The peer refused the connection.
    Rejected(CmRejection),
    /// No reply, or no address or route: the errno, 0 if there is none.
    Failed(&'static str, i32),
    /// The peer ended the connection, or the peer's process died.
    Disconnected,
    /// The device is being removed.
    DeviceRemoved,
    /// The interface's address moved, as in a bond's failover.
    AddressChanged,
    /// An event that needs no action.
    Other(u32),
}

/// An event of an id.
#[derive(Debug)]
pub struct CmEvent {
    /// [`CmId::key`] of the id; of the listener for a connect request.
    pub key: usize,
    /// The kind of event.
    pub kind: CmEventKind,
}

/// The channel on which events of ids arrive.
pub struct CmChannel {
    verbs: Arc<VerbsLibrary>,
    raw: *mut sys::RdmaEventChannel,
}

// SAFETY: librdmacm allows calls on a channel from any thread.
unsafe impl Send for CmChannel {}
// SAFETY: as above.
unsafe impl Sync for CmChannel {}

impl CmChannel {
    /// A new channel.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the kernel module is not loaded, or file descriptors are exhausted.
    pub fn new(verbs: &Arc<VerbsLibrary>) -> Result<Arc<CmChannel>, VerbsError> {
        // SAFETY: no arguments.
        let raw = unsafe { (verbs.cm.rdma_create_event_channel)() };
        if raw.is_null() {
            return Err(VerbsError::last_os("rdma_create_event_channel", "rdma_cm"));
        }
        let channel = CmChannel { verbs: Arc::clone(verbs), raw };
        // SAFETY: the channel's own descriptor.
        if unsafe { libc::fcntl(channel.raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return Err(VerbsError::last_os("fcntl", "rdma_cm"));
        }
        Ok(Arc::new(channel))
    }

    pub(crate) fn raw_fd(&self) -> i32 {
        // SAFETY: the channel is open.
        unsafe { (*self.raw).fd }
    }

    /// Becomes readable when an event is available.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and stays open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(self.raw_fd()) }
    }

    /// A new id for RC connections over IP addresses.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the kernel has no more.
    pub fn create_id(self: &Arc<Self>) -> Result<CmId, VerbsError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the channel is open and `raw` receives the result.
        let failed = unsafe { (self.verbs.cm.rdma_create_id)(self.raw, &mut raw, std::ptr::null_mut(), sys::PS_TCP) };
        if failed != 0 {
            return Err(VerbsError::last_os("rdma_create_id", "rdma_cm"));
        }
        Ok(CmId { channel: Arc::clone(self), raw })
    }

    /// The next event, waiting until `deadline`; `None` when none came.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the channel fails.
    pub fn next_event(self: &Arc<Self>, deadline: Instant) -> Result<Option<CmEvent>, VerbsError> {
        loop {
            let mut raw: *mut sys::RdmaCmEvent = std::ptr::null_mut();
            // SAFETY: the channel is open and non-blocking; `raw` receives the result.
            if unsafe { (self.verbs.cm.rdma_get_cm_event)(self.raw, &mut raw) } == 0 && !raw.is_null() {
                let event = self.convert_event(raw);
                // SAFETY: acknowledges the event just taken, once; everything was copied.
                unsafe { (self.verbs.cm.rdma_ack_cm_event)(raw) };
                return Ok(Some(event));
            }
            match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => {}
                _ => return Err(VerbsError::last_os("rdma_get_cm_event", "rdma_cm")),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut poll = libc::pollfd { fd: self.raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: a valid entry.
            unsafe { libc::ppoll(&mut poll, 1, &to_timespec(left), std::ptr::null()) };
        }
    }

    fn convert_event(self: &Arc<Self>, raw: *mut sys::RdmaCmEvent) -> CmEvent {
        // SAFETY: an event that was taken and not yet acknowledged is valid.
        let event = unsafe { &*raw };
        // SAFETY: private data lives as long as the event. Events without any have a length of 0.
        let private = || unsafe {
            let conn = &event.conn;
            if conn.private_data.is_null() || conn.private_data_len == 0 {
                return Vec::new();
            }
            std::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into()).to_vec()
        };
        let kind = match event.event {
            0 => CmEventKind::AddressResolved,
            1 => CmEventKind::Failed("no RDMA device reaches the address", event.status),
            2 => CmEventKind::RouteResolved,
            3 => CmEventKind::Failed("there is no route", event.status),
            4 => CmEventKind::ConnectRequest {
                id: CmId { channel: Arc::clone(self), raw: event.id },
                private: private(),
            },
            // The library's status for a queue pair whose setup failed; no errno.
            6 if event.status == -1 => {
                CmEventKind::Failed("the queue pair could not be set up with the peer's parameters", 0)
            }
            6 => CmEventKind::Failed("the connection could not be made", event.status),
            7 => CmEventKind::Failed("the peer does not answer", event.status),
            8 => CmEventKind::Rejected(CmRejection { reason: event.status, private: private() }),
            9 => CmEventKind::Established { private: private() },
            10 => CmEventKind::Disconnected,
            11 => CmEventKind::DeviceRemoved,
            14 => CmEventKind::AddressChanged,
            other => CmEventKind::Other(other),
        };
        let about = if event.event == 4 { event.listen_id } else { event.id };
        CmEvent { key: about.addr(), kind }
    }
}

impl Drop for CmChannel {
    fn drop(&mut self) {
        // SAFETY: ids hold the `Arc` of this value, so none is left.
        unsafe { (self.verbs.cm.rdma_destroy_event_channel)(self.raw) };
    }
}

/// Time of an attempt to resolve an address. The kernel looks again when the neighbour table changes, or when this time is over.
/// An answer that comes after the first look and before the wait for changes is seen only then.
const ADDRESS_TRY: Duration = Duration::from_secs(1);

/// A connection in any state, or a listener.
pub struct CmId {
    channel: Arc<CmChannel>,
    raw: *mut sys::RdmaCmId,
}

// SAFETY: librdmacm allows calls on an id from any thread, one at a time.
unsafe impl Send for CmId {}

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CmId({})", self.subject())
    }
}

impl CmId {
    pub(crate) fn verbs(&self) -> &Arc<VerbsLibrary> {
        &self.channel.verbs
    }

    pub(crate) fn raw(&self) -> *mut sys::RdmaCmId {
        self.raw
    }

    /// The channel of the events.
    pub fn channel(&self) -> &Arc<CmChannel> {
        &self.channel
    }

    /// The key of the events; unique during the life of the id.
    pub fn key(&self) -> usize {
        self.raw.addr()
    }

    /// Whether the id is bound to this very context. librdmacm opens a new context for a device that looks like another: after a
    /// removal and return, or when the sysfs entry was recreated.
    pub fn is_on(&self, context: &crate::device::DeviceContext) -> bool {
        self.context_raw() == context.raw()
    }

    pub(crate) fn context_raw(&self) -> *mut sys::IbvContext {
        // SAFETY: the id is open.
        unsafe { (*self.raw).verbs }
    }

    /// The device's port, counted from 1; 0 when bound to none.
    pub fn port_number(&self) -> u8 {
        // SAFETY: the id is open.
        if self.context_raw().is_null() { 0 } else { unsafe { (*self.raw).port_num } }
    }

    /// GIDs of this side and of the peer; zeros where there are none.
    pub fn gids(&self) -> (Ipv6Addr, Ipv6Addr) {
        // SAFETY: the id is open.
        unsafe { (Ipv6Addr::from((*self.raw).sgid), Ipv6Addr::from((*self.raw).dgid)) }
    }

    /// Local and peer address, as far as known.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        // SAFETY: the id is open.
        unsafe { (parse_sockaddr(&(*self.raw).src_addr), parse_sockaddr(&(*self.raw).dst_addr)) }
    }

    /// Device, port, GIDs and addresses, for errors and logs.
    pub fn subject(&self) -> String {
        let context = self.context_raw();
        let (local, peer) = self.addresses();
        if context.is_null() {
            return format!("{} to {}", shown_address(local), shown_address(peer));
        }
        // SAFETY: rdma_cm keeps context and device while the id is bound there.
        let name: String = unsafe {
            (*(*context).device)
                .name
                .iter()
                .take_while(|c| **c != 0)
                .map(|c| char::from(u8::from_ne_bytes(c.to_ne_bytes())))
                .collect()
        };
        let (sgid, dgid) = self.gids();
        format!(
            "{name} port {}, GID {sgid} to {dgid} ({} to {})",
            self.port_number(),
            shown_address(local),
            shown_address(peer)
        )
    }

    /// Binds to a local address and, if that belongs to a device, to the device; with port 0 the kernel chooses.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when no device has the address, or the port is in use.
    pub fn bind(&mut self, addr: SocketAddr) -> Result<(), VerbsError> {
        let mut raw = RawSockaddr::from(addr);
        // SAFETY: the id is open, the address has the size of the address family.
        match unsafe { (self.verbs().cm.rdma_bind_addr)(self.raw, raw.as_mut()) } {
            0 => Ok(()),
            _ => Err(VerbsError::last_os("rdma_bind_addr", addr.to_string())),
        }
    }

    /// Binds and listens; returns the bound address and port.
    ///
    /// # Errors
    /// As [`CmId::bind`]; [`VerbsError::Call`] when listening fails.
    pub fn listen(&mut self, addr: SocketAddr, backlog: i32) -> Result<SocketAddr, VerbsError> {
        // A restarted node can use the address again at once. Old libraries lack the option.
        self.set_option(sys::OPTION_ID_REUSEADDR, &mut 1i32.to_ne_bytes());
        if addr.is_ipv6() {
            self.set_option(sys::OPTION_ID_AFONLY, &mut 1i32.to_ne_bytes());
        }
        self.bind(addr)?;
        // SAFETY: the id is open.
        if unsafe { (self.verbs().cm.rdma_listen)(self.raw, backlog) } != 0 {
            return Err(VerbsError::last_os("rdma_listen", addr.to_string()));
        }
        // SAFETY: the id is open.
        let port = u16::from_be(unsafe { (self.verbs().cm.rdma_get_src_port)(self.raw) });
        Ok(SocketAddr::new(addr.ip(), port))
    }

    /// Resolves device and route to `remote`, from `local`.
    ///
    /// # Errors
    /// [`VerbsError::Unreachable`] when there is none, [`VerbsError::Timeout`] when `deadline` passed.
    pub fn resolve(&mut self, local: IpAddr, remote: SocketAddr, deadline: Instant) -> Result<(), VerbsError> {
        let mut from = RawSockaddr::from(match (local, remote) {
            // A link-local address needs a scope.
            (IpAddr::V6(ip), SocketAddr::V6(to)) => SocketAddr::V6(SocketAddrV6::new(ip, 0, 0, to.scope_id())),
            _ => SocketAddr::new(local, 0),
        });
        let mut to = RawSockaddr::from(remote);
        let subject = || format!("{remote} from {local}");
        loop {
            let until = deadline.min(Instant::now() + ADDRESS_TRY);
            // SAFETY: the id is open, both addresses have the sizes of the address families.
            let failed =
                unsafe { (self.verbs().cm.rdma_resolve_addr)(self.raw, from.as_mut(), to.as_mut(), timeout_ms(until)) };
            if failed != 0 {
                return Err(VerbsError::last_os("rdma_resolve_addr", subject()));
            }
            match self.expect_event(deadline, "resolving the address")? {
                CmEventKind::AddressResolved => break,
                CmEventKind::Failed(_, status) if status == -libc::ETIMEDOUT && Instant::now() < deadline => {}
                other => return Err(unexpected_event(subject(), &other)),
            }
        }
        // SAFETY: the id is open and the address resolved.
        if unsafe { (self.verbs().cm.rdma_resolve_route)(self.raw, timeout_ms(deadline)) } != 0 {
            return Err(VerbsError::last_os("rdma_resolve_route", subject()));
        }
        match self.expect_event(deadline, "resolving the route")? {
            CmEventKind::RouteResolved => Ok(()),
            other => Err(unexpected_event(subject(), &other)),
        }
    }

    /// Refuses the connect request of this id, with `private` (up to 148 bytes) for the peer's program.
    pub fn reject(self, private: &[u8]) {
        let len = private.len().min(148) as u8;
        // SAFETY: the id is open; the bytes are read during the call. A failure means that the peer is gone, which
        // needs no action.
        unsafe { (self.verbs().cm.rdma_reject)(self.raw, private.as_ptr().cast(), len) };
    }

    /// The next event of this id, on a channel without other ids.
    pub(crate) fn expect_event(&self, deadline: Instant, what: &str) -> Result<CmEventKind, VerbsError> {
        loop {
            match self.channel.next_event(deadline)? {
                Some(event) if event.key != self.key() => {}
                Some(CmEvent { kind: CmEventKind::AddressChanged | CmEventKind::Other(_), .. }) => {}
                Some(event) => return Ok(event.kind),
                None => {
                    return Err(VerbsError::Timeout { what: format!("{what}: {}", self.subject()) });
                }
            }
        }
    }

    /// Sets the acknowledgement timeout; before connecting or accepting. iWARP has none.
    pub(crate) fn set_ack_timeout(&mut self, exponent: u8) {
        self.set_option(sys::OPTION_ID_ACK_TIMEOUT, &mut [exponent.min(31)]);
    }

    /// Sets an option; unsupported options have no effect.
    fn set_option(&mut self, option: c_int, value: &mut [u8]) {
        if let Some(set) = self.verbs().cm.rdma_set_option {
            // SAFETY: the id is open, the value has the given length.
            unsafe { set(self.raw, sys::OPTION_ID, option, value.as_mut_ptr().cast::<c_void>(), value.len()) };
        }
    }
}

fn shown_address(addr: Option<SocketAddr>) -> String {
    addr.map_or_else(|| "?".into(), |addr| addr.to_string())
}

fn timeout_ms(deadline: Instant) -> c_int {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis();
    c_int::try_from(left).unwrap_or(c_int::MAX).max(1)
}

pub(crate) fn unexpected_event(subject: String, kind: &CmEventKind) -> VerbsError {
    match kind {
        CmEventKind::Rejected(rejection) => {
            // A refusal by a program carries the reason as text.
            let said: Vec<u8> = rejection.private.iter().copied().take_while(|b| *b != 0).collect();
            let why = match String::from_utf8(said) {
                Ok(said) if rejection.reason == 28 && !said.is_empty() => format!("{}: {said}", rejection.describe()),
                _ => rejection.describe(),
            };
            VerbsError::Rejected { subject, why }
        }
        CmEventKind::Failed(why, status) => {
            let os =
                if *status < 0 { format!(": {}", std::io::Error::from_raw_os_error(-*status)) } else { String::new() };
            VerbsError::Unreachable { subject, why: format!("{why}{os}") }
        }
        CmEventKind::Disconnected => {
            VerbsError::Disconnected { subject, why: "the peer ended it, or its process died".into() }
        }
        CmEventKind::DeviceRemoved => VerbsError::Disconnected { subject, why: "the device was removed".into() },
        other => VerbsError::Unreachable { subject, why: format!("unexpected event {other:?}") },
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: the id is open, the queue pair (if any) is destroyed, all events are acknowledged.
        unsafe { (self.verbs().cm.rdma_destroy_id)(self.raw) };
    }
}

/// A socket address in C layout.
struct RawSockaddr(libc::sockaddr_storage);

impl RawSockaddr {
    fn as_mut(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

impl From<SocketAddr> for RawSockaddr {
    fn from(addr: SocketAddr) -> Self {
        // SAFETY: zeroes are a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        match addr {
            SocketAddr::V4(v4) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: a sockaddr_storage holds every kind of socket address.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            }
        }
        RawSockaddr(storage)
    }
}

/// The socket address in 128 bytes of an id.
fn parse_sockaddr(raw: &[u64; 16]) -> Option<SocketAddr> {
    let mut bytes = [0u8; 128];
    for (to, from) in bytes.chunks_exact_mut(8).zip(raw) {
        to.copy_from_slice(&from.to_ne_bytes());
    }
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    match c_int::from(u16::from_ne_bytes([bytes[0], bytes[1]])) {
        libc::AF_INET => {
            let ip = Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7]);
            Some(SocketAddr::new(ip.into(), port))
        }
        libc::AF_INET6 => {
            let ip: [u8; 16] = bytes[8..24].try_into().ok()?;
            let scope = u32::from_ne_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]);
            Some(SocketAddr::V6(SocketAddrV6::new(ip.into(), port, 0, scope)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["10.1.2.3:4", "[fd00::7]:65535", "[fe80::1%3]:9"] {
            let addr: SocketAddr = text.parse().unwrap();
            let mut raw = RawSockaddr::from(addr);
            // SAFETY: a sockaddr_storage is 128 bytes, aligned to 8.
            let words = unsafe { *raw.as_mut().cast::<[u64; 16]>() };
            assert_eq!(parse_sockaddr(&words), Some(addr));
        }
        assert_eq!(parse_sockaddr(&[0; 16]), None);
    }
}
