//! Connecting by rdma_cm: ids, their events, addresses. Nothing here waits without a deadline of the caller's: the
//! kernel's own timers are longer than a minute. It knows no queue pair's insides.

use crate::error::VerbsError;
use crate::load::Verbs;
use crate::queue::timespec;
use crate::sys;
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// How a connection is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectOptions {
    /// The NIC waits 4.096 µs x 2^this for an acknowledgement; `None` leaves rdma_cm's choice (19: 2 s).
    pub ack_timeout: Option<u8>,
    /// How often it sends again before it gives up, at most 7. Some drivers take 7 as for ever.
    pub retries: u8,
    /// How often the peer's NIC sends again when no receive is posted here, at most 7 (for ever).
    pub rnr_retries: u8,
}

/// Why a connection was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The reason's number: of the InfiniBand specification, or a negative error number from iWARP.
    pub reason: i32,
    /// What the peer's program sent along.
    pub private: Vec<u8>,
}

impl Rejection {
    /// The reason in words.
    pub fn words(&self) -> String {
        match self.reason {
            8 => "nobody listens there for RDMA (invalid service id)".into(),
            28 => "the peer's program refused it".into(),
            10 => "the peer takes it for a stale connection".into(),
            1 | 3 => "the peer is out of queue pairs or other resources".into(),
            24 => "the peer wants another port".into(),
            12..=23 => {
                format!("the two ports do not fit together (GID, LID, MTU or service level; reason {})", self.reason)
            }
            n if n < 0 => std::io::Error::from_raw_os_error(-n).to_string(),
            n => format!("reason {n} of the InfiniBand connection manager"),
        }
    }
}

/// What happened to a connection.
#[derive(Debug)]
pub enum CmEventKind {
    /// The address belongs to a device now.
    AddressResolved,
    /// The way to the peer is known.
    RouteResolved,
    /// Somebody wants to connect; what he sent along may be padded with zeros.
    ConnectRequest {
        /// To be given a queue pair and accepted, or dropped.
        id: CmId,
        /// What the peer's program sent along.
        private: Vec<u8>,
    },
    /// The connection stands.
    Established {
        /// What the accepting side's program sent along.
        private: Vec<u8>,
    },
    /// The peer refused.
    Rejected(Rejection),
    /// Nobody answered, or no address or route was found: the error number, 0 when there is none.
    Failed(&'static str, i32),
    /// The peer ended the connection, or its process died.
    Disconnected,
    /// The device is being taken away.
    DeviceRemoved,
    /// The interface's address moved, as a bond's on failover.
    AddressChanged,
    /// One that needs nothing done.
    Other(u32),
}

/// An event of one id.
#[derive(Debug)]
pub struct CmEvent {
    /// [`CmId::key`] of the id it is about; of the listener for a connect request.
    pub key: usize,
    /// What happened.
    pub kind: CmEventKind,
}

/// Where events of ids arrive.
pub struct CmChannel {
    verbs: Arc<Verbs>,
    raw: *mut sys::CmChannel,
}

// SAFETY: librdmacm allows calls on a channel from any thread.
unsafe impl Send for CmChannel {}
// SAFETY: as above.
unsafe impl Sync for CmChannel {}

impl CmChannel {
    /// A new channel.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the kernel's part is not there or descriptors are used up.
    pub fn new(verbs: &Arc<Verbs>) -> Result<Arc<CmChannel>, VerbsError> {
        // SAFETY: no arguments.
        let raw = unsafe { (verbs.cm.rdma_create_event_channel)() };
        if raw.is_null() {
            return Err(VerbsError::last("rdma_create_event_channel", "rdma_cm"));
        }
        let channel = CmChannel { verbs: Arc::clone(verbs), raw };
        // SAFETY: the channel's own descriptor.
        if unsafe { libc::fcntl(channel.raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return Err(VerbsError::last("fcntl", "rdma_cm"));
        }
        Ok(Arc::new(channel))
    }

    pub(crate) fn raw_fd(&self) -> i32 {
        // SAFETY: the channel is open.
        unsafe { (*self.raw).fd }
    }

    /// Becomes readable when there is an event.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and stays open as long as it.
        unsafe { BorrowedFd::borrow_raw(self.raw_fd()) }
    }

    /// A new id for RC connections over IP addresses.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the kernel has no more.
    pub fn id(self: &Arc<Self>) -> Result<CmId, VerbsError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the channel is open and `raw` takes the answer.
        let failed = unsafe { (self.verbs.cm.rdma_create_id)(self.raw, &mut raw, std::ptr::null_mut(), sys::PS_TCP) };
        if failed != 0 {
            return Err(VerbsError::last("rdma_create_id", "rdma_cm"));
        }
        Ok(CmId { channel: Arc::clone(self), raw })
    }

    /// The next event, waiting for it until `deadline`; `None` when none came.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the channel fails.
    pub fn next(self: &Arc<Self>, deadline: Instant) -> Result<Option<CmEvent>, VerbsError> {
        loop {
            let mut raw: *mut sys::CmEvent = std::ptr::null_mut();
            // SAFETY: the channel is open and does not block; `raw` takes the answer.
            if unsafe { (self.verbs.cm.rdma_get_cm_event)(self.raw, &mut raw) } == 0 && !raw.is_null() {
                let event = self.read(raw);
                // SAFETY: the event just taken, once; everything of it was copied.
                unsafe { (self.verbs.cm.rdma_ack_cm_event)(raw) };
                return Ok(Some(event));
            }
            match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => {}
                _ => return Err(VerbsError::last("rdma_get_cm_event", "rdma_cm")),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut poll = libc::pollfd { fd: self.raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid entry.
            unsafe { libc::ppoll(&mut poll, 1, &timespec(left), std::ptr::null()) };
        }
    }

    fn read(self: &Arc<Self>, raw: *mut sys::CmEvent) -> CmEvent {
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
            // The library's word for a queue pair that it could not set up, which is no error number.
            6 if event.status == -1 => {
                CmEventKind::Failed("the queue pair could not be set up by what the peer answered", 0)
            }
            6 => CmEventKind::Failed("the connection could not be made", event.status),
            7 => CmEventKind::Failed("the peer does not answer", event.status),
            8 => CmEventKind::Rejected(Rejection { reason: event.status, private: private() }),
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

/// A connection to be, a connection, or a listener.
pub struct CmId {
    channel: Arc<CmChannel>,
    raw: *mut sys::CmId,
}

// SAFETY: librdmacm allows calls on an id from any thread, one at a time.
unsafe impl Send for CmId {}

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CmId({})", self.subject())
    }
}

impl CmId {
    pub(crate) fn verbs(&self) -> &Arc<Verbs> {
        &self.channel.verbs
    }

    pub(crate) fn raw(&self) -> *mut sys::CmId {
        self.raw
    }

    /// The channel its events arrive on.
    pub fn channel(&self) -> &Arc<CmChannel> {
        &self.channel
    }

    /// What events name it by; unique while it lives.
    pub fn key(&self) -> usize {
        self.raw.addr()
    }

    /// Whether it is bound to just this opening of a device. librdmacm opens one anew that seems to be another than
    /// before: one that was taken away and came back, or whose entry in sysfs was made anew.
    pub fn is_on(&self, context: &crate::device::Context) -> bool {
        self.context_raw() == context.raw()
    }

    pub(crate) fn context_raw(&self) -> *mut sys::Context {
        // SAFETY: the id is open.
        unsafe { (*self.raw).verbs }
    }

    /// The device's port it goes through, counted from 1; 0 when it is bound to none.
    pub fn port(&self) -> u8 {
        // SAFETY: the id is open.
        if self.context_raw().is_null() { 0 } else { unsafe { (*self.raw).port_num } }
    }

    /// GIDs of this side and of the peer; zeros where there are none.
    pub fn gids(&self) -> (Ipv6Addr, Ipv6Addr) {
        // SAFETY: the id is open.
        unsafe { (Ipv6Addr::from((*self.raw).sgid), Ipv6Addr::from((*self.raw).dgid)) }
    }

    /// Both addresses, as far as they are known.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        // SAFETY: the id is open.
        unsafe { (parse(&(*self.raw).src_addr), parse(&(*self.raw).dst_addr)) }
    }

    /// Device, port, GIDs and addresses, for errors and logs.
    pub fn subject(&self) -> String {
        let context = self.context_raw();
        let (local, peer) = self.addresses();
        let shown = |addr: Option<SocketAddr>| addr.map_or_else(|| "?".into(), |addr| addr.to_string());
        if context.is_null() {
            return format!("{} to {}", shown(local), shown(peer));
        }
        // SAFETY: rdma_cm keeps context and device while the id is bound to them.
        let name: String = unsafe {
            (*(*context).device).name.iter().take_while(|c| **c != 0).map(|c| char::from(c.cast_unsigned())).collect()
        };
        let (sgid, dgid) = self.gids();
        format!("{name} port {}, GID {sgid} to {dgid} ({} to {})", self.port(), shown(local), shown(peer))
    }

    /// Binds it to a local address and, when that is a device's, to the device; port 0 lets the kernel choose.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when no device has the address, or the port is taken.
    pub fn bind(&mut self, addr: SocketAddr) -> Result<(), VerbsError> {
        let mut raw = Sockaddr::from(addr);
        // SAFETY: the id is open, the address is of its family's size.
        match unsafe { (self.verbs().cm.rdma_bind_addr)(self.raw, raw.as_mut()) } {
            0 => Ok(()),
            _ => Err(VerbsError::last("rdma_bind_addr", addr.to_string())),
        }
    }

    /// Binds and listens, and answers with the address and port it got.
    ///
    /// # Errors
    /// As [`CmId::bind`]; [`VerbsError::Call`] when it can't listen.
    pub fn listen(&mut self, addr: SocketAddr, backlog: i32) -> Result<SocketAddr, VerbsError> {
        // Addresses of a node that was restarted can be used again at once. Old libraries can't be asked.
        self.set_option(sys::OPTION_ID_REUSEADDR, &mut 1i32.to_ne_bytes());
        if addr.is_ipv6() {
            self.set_option(sys::OPTION_ID_AFONLY, &mut 1i32.to_ne_bytes());
        }
        self.bind(addr)?;
        // SAFETY: the id is open.
        if unsafe { (self.verbs().cm.rdma_listen)(self.raw, backlog) } != 0 {
            return Err(VerbsError::last("rdma_listen", addr.to_string()));
        }
        // SAFETY: the id is open.
        let port = u16::from_be(unsafe { (self.verbs().cm.rdma_get_src_port)(self.raw) });
        Ok(SocketAddr::new(addr.ip(), port))
    }

    /// Finds device and route to `remote`, from `local`.
    ///
    /// # Errors
    /// [`VerbsError::Unreachable`] when there is none, [`VerbsError::Timeout`] when `deadline` passed.
    pub fn resolve(&mut self, local: IpAddr, remote: SocketAddr, deadline: Instant) -> Result<(), VerbsError> {
        let mut from = Sockaddr::from(match (local, remote) {
            // A link-local address means nothing without its interface.
            (IpAddr::V6(ip), SocketAddr::V6(to)) => SocketAddr::V6(SocketAddrV6::new(ip, 0, 0, to.scope_id())),
            _ => SocketAddr::new(local, 0),
        });
        let mut to = Sockaddr::from(remote);
        let timeout = |deadline: Instant| {
            let left = deadline.saturating_duration_since(Instant::now()).as_millis();
            c_int::try_from(left).unwrap_or(c_int::MAX).max(1)
        };
        let subject = || format!("{remote} from {local}");
        // SAFETY: the id is open, both addresses are of their families' sizes.
        let failed =
            unsafe { (self.verbs().cm.rdma_resolve_addr)(self.raw, from.as_mut(), to.as_mut(), timeout(deadline)) };
        if failed != 0 {
            return Err(VerbsError::last("rdma_resolve_addr", subject()));
        }
        match self.expect(deadline, "resolving the address")? {
            CmEventKind::AddressResolved => {}
            other => return Err(unexpected(subject(), &other)),
        }
        // SAFETY: the id is open and its address resolved.
        if unsafe { (self.verbs().cm.rdma_resolve_route)(self.raw, timeout(deadline)) } != 0 {
            return Err(VerbsError::last("rdma_resolve_route", subject()));
        }
        match self.expect(deadline, "resolving the route")? {
            CmEventKind::RouteResolved => Ok(()),
            other => Err(unexpected(subject(), &other)),
        }
    }

    /// Refuses the connect request that the id came with, and tells the peer's program `private` (up to 148 bytes).
    pub fn reject(self, private: &[u8]) {
        let len = private.len().min(148) as u8;
        // SAFETY: the id is open; the bytes are read during the call. That the peer is gone already changes nothing.
        unsafe { (self.verbs().cm.rdma_reject)(self.raw, private.as_ptr().cast(), len) };
    }

    /// The next event of this id, on a channel that has no other.
    pub(crate) fn expect(&self, deadline: Instant, what: &str) -> Result<CmEventKind, VerbsError> {
        loop {
            match self.channel.next(deadline)? {
                Some(event) if event.key != self.key() => {}
                Some(CmEvent { kind: CmEventKind::AddressChanged | CmEventKind::Other(_), .. }) => {}
                Some(event) => return Ok(event.kind),
                None => {
                    return Err(VerbsError::Timeout { what: format!("{what}: {}", self.subject()) });
                }
            }
        }
    }

    /// Sets how long the NIC waits for acknowledgements; before connecting or accepting. iWARP has no such thing.
    pub(crate) fn set_ack_timeout(&mut self, exponent: u8) {
        self.set_option(sys::OPTION_ID_ACK_TIMEOUT, &mut [exponent.min(31)]);
    }

    /// Sets an option; one that the library or kernel does not have changes nothing.
    fn set_option(&mut self, option: c_int, value: &mut [u8]) {
        if let Some(set) = self.verbs().cm.rdma_set_option {
            // SAFETY: the id is open, the value has the length that is said.
            unsafe { set(self.raw, sys::OPTION_ID, option, value.as_mut_ptr().cast::<c_void>(), value.len()) };
        }
    }
}

pub(crate) fn unexpected(subject: String, kind: &CmEventKind) -> VerbsError {
    match kind {
        CmEventKind::Rejected(rejection) => {
            // A program's own refusal comes with its reason as text.
            let said: Vec<u8> = rejection.private.iter().copied().take_while(|b| *b != 0).collect();
            let why = match String::from_utf8(said) {
                Ok(said) if rejection.reason == 28 && !said.is_empty() => format!("{}: {said}", rejection.words()),
                _ => rejection.words(),
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
        CmEventKind::DeviceRemoved => VerbsError::Disconnected { subject, why: "the device was taken away".into() },
        other => VerbsError::Unreachable { subject, why: format!("unexpected event {other:?}") },
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: the id is open, its queue pair (if it had one) is destroyed, its events are all acknowledged.
        unsafe { (self.verbs().cm.rdma_destroy_id)(self.raw) };
    }
}

/// A socket address as C has it.
struct Sockaddr(libc::sockaddr_storage);

impl Sockaddr {
    fn as_mut(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

impl From<SocketAddr> for Sockaddr {
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
        Sockaddr(storage)
    }
}

/// The socket address in 128 bytes of an id.
fn parse(raw: &[u64; 16]) -> Option<SocketAddr> {
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
            let mut raw = Sockaddr::from(addr);
            // SAFETY: a sockaddr_storage is 128 bytes, aligned to 8.
            let words = unsafe { *raw.as_mut().cast::<[u64; 16]>() };
            assert_eq!(parse(&words), Some(addr));
        }
        assert_eq!(parse(&[0; 16]), None);
    }
}
