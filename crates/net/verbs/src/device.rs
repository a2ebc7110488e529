//! Devices, ports and limits, all queried from the device. Knows no connection.
//!
//! Missing values are expected: a port may have no LID (RoCE, iWARP), the first GID may be of any type, the firmware version may
//! be empty.

use crate::cm::CmId;
use crate::error::{RdmaUnavailable, VerbsError};
use crate::load::VerbsLibrary;
use crate::sys;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::c_char;
use std::fmt;
use std::net::Ipv6Addr;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::Arc;

/// The link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE, or iWARP.
    Ethernet,
    /// Another, by number.
    Other(u8),
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkLayer::InfiniBand => f.write_str("InfiniBand"),
            LinkLayer::Ethernet => f.write_str("Ethernet"),
            LinkLayer::Other(n) => write!(f, "link layer {n}"),
        }
    }
}

/// A port's logical state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortState(pub u32);

impl PortState {
    /// Whether the port carries data.
    pub fn is_active(self) -> bool {
        self.0 == sys::PORT_ACTIVE
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("DOWN"),
            2 => f.write_str("INIT"),
            3 => f.write_str("ARMED"),
            4 => f.write_str("ACTIVE"),
            5 => f.write_str("ACTIVE_DEFER"),
            n => write!(f, "state {n}"),
        }
    }
}

/// The type of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GidType {
    /// InfiniBand, or iWARP.
    Ib,
    /// RoCE v1: Ethernet only, not routable.
    RoceV1,
    /// RoCE v2: UDP, routable.
    RoceV2,
    /// The library is too old to report the type.
    Unknown,
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidInfo {
    /// The index in the table.
    pub index: u32,
    /// The address; IPv4 addresses are mapped into IPv6.
    pub gid: Ipv6Addr,
    /// The type of the address.
    pub kind: GidType,
    /// Index of the network interface, 0 for none.
    pub interface: u32,
}

/// A port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    /// Counted from 1.
    pub number: u8,
    /// The state.
    pub state: PortState,
    /// The link layer.
    pub link_layer: LinkLayer,
    /// Current path MTU in bytes.
    pub mtu: u32,
    /// The longest message in bytes.
    pub max_message: u32,
    /// The LID; 0 where there are no LIDs.
    pub lid: u16,
    /// The subnet manager's LID; 0 where there is none.
    pub sm_lid: u16,
    /// Lanes and speed in the device's encoding.
    pub width_and_speed: (u8, u8),
    /// The GID table without empty entries.
    pub gids: Vec<GidInfo>,
}

/// Limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Work requests in a queue.
    pub work_requests: u32,
    /// Scatter-gather elements of a work request.
    pub sge: u32,
    /// Entries of a completion queue.
    pub completions: u32,
    /// Outstanding reads per connection; 0 on devices without RDMA READ.
    pub reads: u32,
    /// The largest memory region in bytes.
    pub region: u64,
    /// Ports.
    pub ports: u8,
    /// Vendor and part.
    pub vendor: (u32, u32),
}

/// A device and the ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The kernel's name: `mlx5_0`, `rxe0`.
    pub name: String,
    /// Node GUID.
    pub guid: u64,
    /// Firmware version, empty for software devices.
    pub firmware: String,
    /// The limits.
    pub limits: DeviceLimits,
    /// The ports.
    pub ports: Vec<PortInfo>,
}

/// Every RDMA device of this host.
///
/// # Errors
/// [`RdmaUnavailable::Device`] without a device, [`RdmaUnavailable::Kernel`] when the kernel cannot list devices,
/// [`RdmaUnavailable::Port`] when no port of any device is active; that error lists every port and state.
pub fn list_devices(verbs: &Arc<VerbsLibrary>) -> Result<Vec<DeviceInfo>, RdmaUnavailable> {
    let mut found = Vec::new();
    let mut failed = Vec::new();
    for_each_raw(verbs, |raw| {
        match DeviceContext::open_raw(verbs, raw).and_then(|context| context.describe()) {
            Ok(info) => found.push(info),
            // SAFETY: the entry is valid while the list is.
            Err(e) => failed.push(format!("{}: {e}", c_text(unsafe { &(*raw).name }))),
        }
    })?;
    if found.is_empty() {
        let why = if failed.is_empty() { "/sys/class/infiniband is empty".into() } else { failed.join("; ") };
        return Err(RdmaUnavailable::Device { why });
    }
    if !found.iter().any(|d| d.ports.iter().any(|p| p.state.is_active())) {
        let ports = found
            .iter()
            .flat_map(|d| d.ports.iter().map(move |p| format!("{} port {}: {}", d.name, p.number, p.state)));
        return Err(RdmaUnavailable::Port { why: ports.collect::<Vec<_>>().join(", ") });
    }
    Ok(found)
}

fn for_each_raw(verbs: &VerbsLibrary, mut f: impl FnMut(*mut sys::IbvDevice)) -> Result<(), RdmaUnavailable> {
    let mut count = 0;
    // SAFETY: the result is NULL or a list of `count` pointers that stays valid until freed below.
    let list = unsafe { (verbs.ib.ibv_get_device_list)(&mut count) };
    if list.is_null() {
        return Err(RdmaUnavailable::Kernel {
            why: format!("ibv_get_device_list: {}", std::io::Error::last_os_error()),
        });
    }
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: `i` is below the count.
        f(unsafe { *list.add(i) });
    }
    // SAFETY: frees the list above, once; opened devices stay open.
    unsafe { (verbs.ib.ibv_free_device_list)(list) };
    Ok(())
}

fn c_text(raw: &[c_char]) -> String {
    let bytes: Vec<u8> = raw.iter().take_while(|c| **c != 0).map(|c| u8::from_ne_bytes(c.to_ne_bytes())).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

enum ContextOwner {
    /// Opened here, closed on drop.
    Opened,
    /// rdma_cm's own, which exists while an id is bound there.
    Bound(#[expect(dead_code, reason = "held for its drop")] CmId),
}

/// An asynchronous event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceProblem {
    /// A port went down.
    PortDown(u8),
    /// A port came up.
    PortUp(u8),
    /// The device failed or is being removed: everything created there must be destroyed.
    Fatal,
    /// Addresses changed: a bond failed over, or an address was removed.
    Addresses(u8),
    /// Another event, by number in the C headers.
    Other(u32),
}

/// The use of a context of rdma_cm by this process.
#[derive(Default)]
struct ContextUse {
    /// Number of [`DeviceContext`]s with this context.
    users: usize,
    /// Whether the kernel is removing the device.
    is_removed: bool,
}

/// Contexts of rdma_cm in use, by address. All rails of a device share a context.
static BOUND_CONTEXTS: Mutex<BTreeMap<usize, ContextUse>> = Mutex::new(BTreeMap::new());

/// An open device.
pub struct DeviceContext {
    verbs: Arc<VerbsLibrary>,
    raw: *mut sys::IbvContext,
    owner: ContextOwner,
    name: String,
    /// Ids of connections that ended while the port was down.
    leaving: Mutex<Vec<CmId>>,
}

// SAFETY: libibverbs locks the contexts; calls are allowed from any thread.
unsafe impl Send for DeviceContext {}
// SAFETY: as above.
unsafe impl Sync for DeviceContext {}

impl DeviceContext {
    /// Opens the device with this name.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] without such a device, [`VerbsError::Call`] when the device cannot be opened.
    pub fn open(verbs: &Arc<VerbsLibrary>, name: &str) -> Result<Arc<DeviceContext>, VerbsError> {
        let mut opened = None;
        let listed = for_each_raw(verbs, |raw| {
            // SAFETY: the entry is valid while the list is.
            if c_text(unsafe { &(*raw).name }) == name {
                opened = Some(DeviceContext::open_raw(verbs, raw));
            }
        });
        match (opened, listed) {
            (Some(result), _) => result.map(Arc::new),
            (None, Err(absent)) => Err(VerbsError::Misuse(absent.to_string())),
            (None, Ok(())) => Err(VerbsError::Misuse(format!("there is no RDMA device named {name}; see 'rdma link'"))),
        }
    }

    fn open_raw(verbs: &Arc<VerbsLibrary>, device: *mut sys::IbvDevice) -> Result<DeviceContext, VerbsError> {
        // SAFETY: the caller's device is valid as long as the list.
        let name = c_text(unsafe { &(*device).name });
        // SAFETY: as above.
        let raw = unsafe { (verbs.ib.ibv_open_device)(device) };
        if raw.is_null() {
            return Err(VerbsError::last_os("ibv_open_device", name));
        }
        set_nonblocking(raw);
        Ok(DeviceContext {
            verbs: Arc::clone(verbs),
            raw,
            owner: ContextOwner::Opened,
            name,
            leaving: Mutex::default(),
        })
    }

    /// The device that `id` is bound to, in the context opened by rdma_cm. Connections of rdma_cm need memory and queues in this
    /// context.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when the id is bound to no device: the address belongs to none.
    pub fn of_id(id: CmId) -> Result<Arc<DeviceContext>, VerbsError> {
        let raw = id.context_raw();
        if raw.is_null() {
            return Err(VerbsError::Misuse(format!("{} belongs to no RDMA device; see 'rdma link'", id.subject())));
        }
        // SAFETY: rdma_cm keeps context and device while an id is bound there.
        let name = c_text(unsafe { &(*(*raw).device).name });
        let verbs = Arc::clone(id.verbs());
        set_nonblocking(raw);
        BOUND_CONTEXTS.lock().entry(raw.addr()).or_default().users += 1;
        Ok(Arc::new(DeviceContext { verbs, raw, owner: ContextOwner::Bound(id), name, leaving: Mutex::default() }))
    }

    pub(crate) fn raw(&self) -> *mut sys::IbvContext {
        self.raw
    }

    /// The opened libraries.
    pub fn verbs(&self) -> &Arc<VerbsLibrary> {
        &self.verbs
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Completion vectors, at least 1: completion queues can be spread over these.
    pub fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is open.
        unsafe { (*self.raw).num_comp_vectors }.max(1).cast_unsigned()
    }

    /// Whether writes can carry immediate data. Standard iWARP has none; most iWARP drivers refuse the first such request at its
    /// posting.
    pub fn supports_immediate(&self) -> bool {
        // SAFETY: the context is open, and so is the device.
        unsafe { (*(*self.raw).device).transport_type != sys::TRANSPORT_IWARP }
    }

    fn query_attributes(&self) -> Result<sys::IbvDeviceAttr, VerbsError> {
        // SAFETY: zeroes are a valid IbvDeviceAttr.
        let mut attr: sys::IbvDeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open and `attr` is of the type the function fills.
        match unsafe { (self.verbs.ib.ibv_query_device)(self.raw, &mut attr) } {
            0 => Ok(attr),
            failed => Err(VerbsError::from_return("ibv_query_device", &*self.name, failed)),
        }
    }

    /// The limits of the device.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the query fails.
    pub fn limits(&self) -> Result<DeviceLimits, VerbsError> {
        let attr = self.query_attributes()?;
        Ok(DeviceLimits {
            queue_pairs: count_of(attr.max_qp),
            work_requests: count_of(attr.max_qp_wr),
            sge: count_of(attr.max_sge).max(1),
            completions: count_of(attr.max_cqe),
            reads: count_of(attr.max_qp_rd_atom),
            region: attr.max_mr_size,
            ports: attr.phys_port_cnt,
            vendor: (attr.vendor_id, attr.vendor_part_id),
        })
    }

    fn query_port(&self, number: u8) -> Result<sys::IbvPortAttr, VerbsError> {
        // SAFETY: zeroes are a valid IbvPortAttr.
        let mut attr: sys::IbvPortAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the exported function fills the front part of `attr`, which never grew.
        match unsafe { (self.verbs.ib.ibv_query_port)(self.raw, number, &mut attr) } {
            0 => Ok(attr),
            failed => Err(VerbsError::from_return("ibv_query_port", format!("{} port {number}", self.name), failed)),
        }
    }

    /// A port's state, cheaper than [`DeviceContext::port_info`].
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the query fails.
    pub fn port_state(&self, number: u8) -> Result<PortState, VerbsError> {
        Ok(PortState(self.query_port(number)?.state))
    }

    /// Keeps the id of a connection that ended while the port was down. The destruction sends a disconnect, and some drivers (rxe
    /// of Linux 6.1) never connect again after a disconnect over a port that is down.
    pub(crate) fn defer_destroy(&self, id: CmId) {
        self.leaving.lock().push(id);
    }

    /// Destroys the kept ids whose port is active again.
    pub fn destroy_deferred(&self) {
        let ready: Vec<CmId> = {
            let mut leaving = self.leaving.lock();
            if leaving.is_empty() {
                return;
            }
            leaving.extract_if(.., |id| self.port_state(id.port_number()).is_ok_and(PortState::is_active)).collect()
        };
        drop(ready);
    }

    /// Records that the kernel is removing the device ([`CmEventKind::DeviceRemoved`](crate::CmEventKind)). The last user of the
    /// context then closes the descriptors: librdmacm keeps these open until another device is found, and a driver without
    /// disassociation (Soft-RoCE) cannot remove an open device.
    pub fn mark_removed(&self) {
        if let Some(used) = BOUND_CONTEXTS.lock().get_mut(&self.raw.addr()) {
            used.is_removed = true;
        }
    }

    /// A port, counted from 1.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the query fails.
    pub fn port_info(&self, number: u8) -> Result<PortInfo, VerbsError> {
        let attr = self.query_port(number)?;
        let gids = (0..u32::try_from(attr.gid_tbl_len).unwrap_or(0)).filter_map(|i| self.gid_info(number, i)).collect();
        Ok(PortInfo {
            number,
            state: PortState(attr.state),
            link_layer: match attr.link_layer {
                // Old InfiniBand drivers leave the link layer unspecified.
                0 | 1 => LinkLayer::InfiniBand,
                2 => LinkLayer::Ethernet,
                other => LinkLayer::Other(other),
            },
            mtu: 128 << attr.active_mtu.min(5),
            max_message: attr.max_msg_sz,
            lid: attr.lid,
            sm_lid: attr.sm_lid,
            width_and_speed: (attr.active_width, attr.active_speed),
            gids,
        })
    }

    fn gid_info(&self, port: u8, index: u32) -> Option<GidInfo> {
        if let Some(query) = self.verbs.ib._ibv_query_gid_ex {
            let mut entry = sys::IbvGidEntry::default();
            // SAFETY: the context is open and `entry` has the given size.
            let failed = unsafe { query(self.raw, port.into(), index, &mut entry, 0, size_of::<sys::IbvGidEntry>()) };
            if failed != 0 {
                return None;
            }
            let kind = [GidType::Ib, GidType::RoceV1, GidType::RoceV2].get(entry.gid_type as usize).copied();
            let kind = kind.unwrap_or(GidType::Unknown);
            return Some(GidInfo { index, gid: Ipv6Addr::from(entry.gid), kind, interface: entry.ndev_ifindex });
        }
        let mut gid = sys::IbvGid::default();
        // SAFETY: the context is open and `gid` is of the type the function fills.
        let failed = unsafe { (self.verbs.ib.ibv_query_gid)(self.raw, port, index.cast_signed(), &mut gid) };
        let empty = gid == sys::IbvGid::default();
        (failed == 0 && !empty).then(|| GidInfo { index, gid: gid.into(), kind: GidType::Unknown, interface: 0 })
    }

    fn describe(&self) -> Result<DeviceInfo, VerbsError> {
        let attr = self.query_attributes()?;
        let ports = (1..=attr.phys_port_cnt).map(|n| self.port_info(n)).collect::<Result<_, _>>()?;
        Ok(DeviceInfo {
            name: self.name.clone(),
            guid: u64::from_be(attr.node_guid),
            firmware: c_text(&attr.fw_ver),
            limits: self.limits()?,
            ports,
        })
    }

    /// Becomes readable when [`DeviceContext::next_problem`] has an event.
    pub fn problems_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context and stays open as long as the context.
        unsafe { BorrowedFd::borrow_raw((*self.raw).async_fd) }
    }

    /// The next event of the device, without waiting.
    pub fn next_problem(&self) -> Option<DeviceProblem> {
        let fd = self.problems_fd().as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: a valid pollfd.
        if unsafe { libc::poll(&mut poll, 1, 0) } <= 0 || poll.revents & libc::POLLIN == 0 {
            return None;
        }
        let mut event = sys::IbvAsyncEvent { element: 0, event_type: 0 };
        // SAFETY: the context is open and the descriptor readable, so this does not block.
        if unsafe { (self.verbs.ib.ibv_get_async_event)(self.raw, &mut event) } != 0 {
            return None;
        }
        // SAFETY: acknowledges the event just taken, once.
        unsafe { (self.verbs.ib.ibv_ack_async_event)(&mut event) };
        // Events of ports carry the port's number in the element's first four bytes.
        let port = event.element.to_ne_bytes()[if cfg!(target_endian = "little") { 0 } else { 3 }];
        Some(match event.event_type {
            8 => DeviceProblem::Fatal,
            9 => DeviceProblem::PortUp(port),
            10 => DeviceProblem::PortDown(port),
            11 | 18 => DeviceProblem::Addresses(port),
            other => DeviceProblem::Other(other),
        })
    }
}

fn count_of(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

/// Makes event reads non-blocking: rdma_cm gives all rails of a device the same context, so another thread may have
/// taken the event.
fn set_nonblocking(raw: *mut sys::IbvContext) {
    // SAFETY: the context is open; the descriptor's flags are integers. A failure has no effect.
    unsafe {
        let fd = (*raw).async_fd;
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags >= 0 {
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        }
    }
}

/// Closes the descriptors of a removed device's context and puts an eventfd in place of each, since librdmacm closes the same
/// numbers later.
fn close_descriptors(raw: *mut sys::IbvContext) {
    // SAFETY: no pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return;
    }
    // SAFETY: a new descriptor without another owner.
    let placeholder = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the caller's context is open; the descriptors are replaced atomically and still belong to the context.
    unsafe {
        for own in [(*raw).cmd_fd, (*raw).async_fd] {
            if own >= 0 {
                libc::dup3(placeholder.as_raw_fd(), own, libc::O_CLOEXEC);
            }
        }
    }
}

impl Drop for DeviceContext {
    fn drop(&mut self) {
        // Ids go before the device.
        self.leaving.get_mut().clear();
        match self.owner {
            ContextOwner::Opened => {
                // SAFETY: opened here, and everything created there holds the `Arc` of this context.
                unsafe { (self.verbs.ib.ibv_close_device)(self.raw) };
            }
            ContextOwner::Bound(_) => {
                let mut bound = BOUND_CONTEXTS.lock();
                let Some(used) = bound.get_mut(&self.raw.addr()) else { return };
                used.users -= 1;
                if used.users > 0 {
                    return;
                }
                // The id is dropped after this, so librdmacm still has the context.
                if used.is_removed {
                    close_descriptors(self.raw);
                }
                bound.remove(&self.raw.addr());
            }
        }
    }
}
