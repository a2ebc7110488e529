//! A rail: an RDMA device reached through an address of this host, with the pool registered once, and a thread that monitors the
//! device. Knows no peer.
//!
//! A device that fails or is removed is released; the next user opens the device again.

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use spurline_mem::BufferPool;
use spurline_sys::Backoff;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_verbs::{
    CmChannel, CmEventKind, ConnectOptions, DeviceContext, DeviceProblem, MemoryAccess, MemoryRegion, ProtectionDomain,
    QueuePairBreaker, VerbsLibrary,
};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time limits of a rail's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RdmaTimeouts {
    /// Time without a response from the peer's NIC after which a waiting connection has failed.
    pub silence: Duration,
}

impl Default for RdmaTimeouts {
    fn default() -> Self {
        RdmaTimeouts { silence: Duration::from_secs(2) }
    }
}

impl RdmaTimeouts {
    /// Retransmissions by the NIC. Seven means unlimited on some drivers.
    const RETRIES: u8 = 6;

    /// Interval between probes of the peer's NIC by a waiting connection.
    pub(crate) fn probe_interval(self) -> Duration {
        (self.silence / 4).max(Duration::from_millis(10))
    }

    /// Options of a connection: the NIC reports failure within half of `silence`. The specification allows up to four
    /// times the configured timeout; by then the path monitor's probes have found the failure. A shorter timeout
    /// would tolerate less than promised and detect nothing earlier.
    pub(crate) fn connect_options(self) -> ConnectOptions {
        let budget = self.silence.as_nanos() / 2;
        let tries = u128::from(Self::RETRIES) + 1;
        let ack_timeout = (8..=20u8).rev().find(|exponent| tries * (4096u128 << *exponent) <= budget).unwrap_or(8);
        ConnectOptions { ack_timeout: Some(ack_timeout), retries: Self::RETRIES, rnr_retries: Self::RETRIES }
    }
}

/// Bytes in memory of the rail's NUMA node, and of other nodes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NumaBytes {
    pub near: u64,
    pub far: u64,
}

impl NumaBytes {
    /// Counts bytes carried by a rail of node `rail`, where the pool has memory on several nodes.
    pub fn count_bytes(&mut self, pool: &BufferPool, rail: Option<u32>, bytes: &[u8]) {
        let memory = pool.node_of(bytes.as_ptr() as usize + bytes.len() / 2);
        if let (Some(rail), Some(memory)) = (rail, memory) {
            *(if rail == memory { &mut self.near } else { &mut self.far }) += bytes.len() as u64;
        }
    }

    /// Adds the numbers to the process's counters.
    pub fn add_to(self, stats: &Stats) {
        if self.near > 0 {
            stats.rdma.near_bytes.add(self.near);
        }
        if self.far > 0 {
            stats.rdma.far_bytes.add(self.far);
        }
    }
}

/// A rail's open device.
pub(crate) struct OpenRail {
    pub domain: Arc<ProtectionDomain>,
    pub memory: Arc<MemoryRegion>,
    pub port: u8,
    /// The NUMA node of the device, where known.
    pub numa_node: Option<u32>,
    /// The longest message of the port in bytes.
    pub max_message: usize,
    breakers: Mutex<Vec<QueuePairBreaker>>,
    stop: OwnedFd,
}

impl OpenRail {
    /// Registers `breaker`, which is triggered when the device fails.
    pub fn watch_breaker(&self, breaker: QueuePairBreaker) {
        let mut breakers = self.breakers.lock();
        breakers.retain(|b| !b.is_broken());
        breakers.push(breaker);
    }

    fn break_all(&self, why: &'static str) -> usize {
        let breakers = std::mem::take(&mut *self.breakers.lock());
        breakers.iter().filter(|b| !b.is_broken()).map(|b| b.break_now(why)).count()
    }
}

impl Drop for OpenRail {
    fn drop(&mut self) {
        // Any non-zero value wakes the monitor.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }
}

/// An RDMA device reached through an address of this host.
pub struct RdmaRail {
    verbs: Arc<VerbsLibrary>,
    name: String,
    ip: IpAddr,
    numa_node: Option<u32>,
    pool: Arc<BufferPool>,
    access: MemoryAccess,
    open: Mutex<Option<Arc<OpenRail>>>,
}

impl RdmaRail {
    /// Opens the device of `ip` and registers `pool` there. `name` is the interface's, for messages. Readers let peers write,
    /// nodes do not.
    ///
    /// # Errors
    /// `Unavailable` when the address belongs to no device, `NoMemory` when the pool cannot be registered.
    pub fn open(
        verbs: &Arc<VerbsLibrary>,
        name: &str,
        ip: IpAddr,
        pool: &Arc<BufferPool>,
        access: MemoryAccess,
    ) -> Result<Arc<RdmaRail>> {
        Self::open_on(verbs, name, ip, None, pool, access)
    }

    /// As [`RdmaRail::open`], for a device on this NUMA node, where the rail's buffers come from.
    pub fn open_on(
        verbs: &Arc<VerbsLibrary>,
        name: &str,
        ip: IpAddr,
        numa_node: Option<u32>,
        pool: &Arc<BufferPool>,
        access: MemoryAccess,
    ) -> Result<Arc<RdmaRail>> {
        let rail = Arc::new(RdmaRail {
            verbs: Arc::clone(verbs),
            name: name.to_owned(),
            ip,
            numa_node,
            pool: Arc::clone(pool),
            access,
            open: Mutex::new(None),
        });
        rail.open_device()?;
        Ok(rail)
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The IP address.
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    pub(crate) fn verbs(&self) -> &Arc<VerbsLibrary> {
        &self.verbs
    }

    /// The NUMA node of the device, where known.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// Whether the device is open; does not wait for an opening in progress.
    pub(crate) fn is_open(&self) -> bool {
        self.open.try_lock().is_some_and(|open| open.is_some())
    }

    /// Whether the port can carry data now.
    pub fn is_up(&self) -> bool {
        self.usable_device().is_ok()
    }

    /// The device, if the port can carry data. Connecting over a port that is down must be avoided: some drivers do not recover.
    ///
    /// # Errors
    /// `Unavailable` with the port's state.
    pub(crate) fn usable_device(self: &RdmaRail) -> Result<Arc<OpenRail>> {
        let open = self.open.lock().clone();
        let open = open.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, format!("rail {}: its RDMA device is gone", self.name))
        })?;
        let device = open.domain.context();
        let state = device.port_state(open.port)?;
        if !state.is_active() {
            self.forget_if_moved(&open)?;
            let why = format!("rail {}: port {} of {} is {}, not ACTIVE", self.name, open.port, device.name(), state);
            return Err(Error::new(ErrorKind::Unavailable, why));
        }
        device.destroy_deferred();
        Ok(open)
    }

    /// Checks whether the rail's address has moved to another device or port, as when a bond's active member went
    /// down; forgets `open` then. No event reports this reliably.
    ///
    /// # Errors
    /// `Unavailable` when the address has moved.
    pub(crate) fn forget_if_moved(&self, open: &Arc<OpenRail>) -> Result<()> {
        let bound = CmChannel::new(&self.verbs).and_then(|channel| {
            let mut id = channel.create_id()?;
            id.bind(SocketAddr::new(self.ip, 0))?;
            Ok(id)
        });
        // An address without a device may come back.
        let Ok(id) = bound else { return Ok(()) };
        if id.port_number() == 0 || (id.is_on(open.domain.context()) && id.port_number() == open.port) {
            return Ok(());
        }
        self.forget_device(open);
        let from = open.domain.context().name();
        let port = open.port;
        let why = format!("rail {}: {} moved from port {port} of {from} to {}", self.name, self.ip, id.subject());
        Err(Error::new(ErrorKind::Unavailable, why))
    }

    /// Forgets `open`, so that the next user opens the device again; existing connections continue.
    pub(crate) fn forget_device(&self, open: &Arc<OpenRail>) {
        let mut current = self.open.lock();
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, open)) {
            *current = None;
        }
    }

    /// The device, opened again after a release.
    ///
    /// # Errors
    /// As [`RdmaRail::open`].
    pub(crate) fn open_device(self: &Arc<Self>) -> Result<Arc<OpenRail>> {
        let mut open = self.open.lock();
        if let Some(open) = &*open {
            return Ok(Arc::clone(open));
        }
        let context = |e: spurline_verbs::VerbsError| Error::from(e).context(format_args!("rail {}", self.name));
        let channel = CmChannel::new(&self.verbs).map_err(context)?;
        let verbs = Arc::clone(&self.verbs);
        let mut anchor = channel.create_id().map_err(context)?;
        anchor.bind(SocketAddr::new(self.ip, 0)).map_err(context)?;
        let port = anchor.port_number();
        let device = DeviceContext::of_id(anchor).map_err(context)?;
        let max_message = device.port_info(port).map_err(context)?.max_message as usize;
        let domain = ProtectionDomain::new(&device).map_err(context)?;
        let memory = domain.register_pool(&self.pool, self.access).map_err(context)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("can't monitor an RDMA device", &e.into()))?;
        let stopped = stop.try_clone().map_err(|e| Error::io("can't monitor an RDMA device", &e))?;
        let made = Arc::new(OpenRail {
            domain,
            memory,
            port,
            numa_node: self.numa_node,
            max_message,
            breakers: Mutex::default(),
            stop,
        });
        let rail = Arc::downgrade(self);
        let watched = Arc::downgrade(&made);
        std::thread::Builder::new()
            .name(format!("rail-{}", self.name))
            .spawn(move || {
                let gone = monitor_device(&rail, &watched, &device, &channel, port, &stopped);
                let left = Arc::downgrade(&device);
                let name = device.name().to_owned();
                drop((device, channel));
                if gone {
                    close_lost_device(&verbs, &left, &name);
                }
            })
            .map_err(|e| Error::io("can't start the thread that monitors an RDMA device", &e))?;
        *open = Some(Arc::clone(&made));
        Ok(made)
    }
}

/// Breaks the connections of a device whose port went down or that is being removed, as completions would never come. Ends with
/// the device; returns whether the device was removed.
fn monitor_device(
    rail: &Weak<RdmaRail>,
    open: &Weak<OpenRail>,
    device: &Arc<DeviceContext>,
    channel: &Arc<CmChannel>,
    port: u8,
    stopped: &OwnedFd,
) -> bool {
    let mut lost = false;
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(device.problems_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN),
            PollFd::new(stopped, PollFlags::IN),
        ];
        if let Err(e) = poll(&mut fds, None)
            && e != rustix::io::Errno::INTR
        {
            tracing::error!("monitoring of {} has failed: {e}", device.name());
            return lost;
        }
        if !fds[2].revents().is_empty() {
            return lost;
        }
        let mut broken = None;
        let mut gone = false;
        while let Some(problem) = device.next_problem() {
            match problem {
                // Changed addresses affect only connections that use these addresses, and such connections fail by themselves.
                DeviceProblem::PortDown(n) if n == port => broken = Some("its port went down"),
                DeviceProblem::Fatal => {
                    broken = Some("the device failed");
                    gone = true;
                }
                DeviceProblem::PortUp(n) if n == port => {
                    tracing::info!("{} port {port} is up", device.name());
                    device.destroy_deferred();
                }
                _ => {}
            }
        }
        while let Ok(Some(event)) = channel.next_event(Instant::now()) {
            if let CmEventKind::DeviceRemoved = event.kind {
                device.mark_removed();
                broken = Some("the device is being removed");
                gone = true;
            }
        }
        lost |= gone;
        let (Some(why), Some(open)) = (broken, open.upgrade()) else { continue };
        let name = rail.upgrade().map_or_else(|| "?".into(), |rail| rail.name.clone());
        let count = open.break_all(why);
        tracing::warn!("rail {name} ({} port {port}): {why}; {count} connections ended", device.name());
        if gone && let Some(rail) = rail.upgrade() {
            rail.forget_device(&open);
        }
    }
}

/// Waits until the last connections of a removed device have ended; that closes the device. Where a driver's memory mappings
/// still keep the device open, librdmacm has to release these too.
fn close_lost_device(verbs: &VerbsLibrary, device: &Weak<DeviceContext>, name: &str) {
    let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    while device.strong_count() > 0 {
        std::thread::sleep(pauses.next_pause());
    }
    let present = std::path::Path::new("/sys/class/infiniband").join(name);
    for _ in 0..10 {
        std::thread::sleep(Duration::from_secs(1));
        if !present.exists() {
            return;
        }
        verbs.forget_lost_devices();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_end_well_within_the_silence_that_is_borne() {
        for ms in [500u64, 2000, 10_000] {
            let patience = RdmaTimeouts { silence: Duration::from_millis(ms) };
            let options = patience.connect_options();
            let exponent = options.ack_timeout.unwrap();
            let gives_up = 4.096e-6 * f64::from(1u32 << exponent) * f64::from(options.retries + 1);
            assert!(gives_up <= ms as f64 / 2000.0 && gives_up > ms as f64 / 5000.0, "{ms}: {gives_up}");
            assert!(patience.probe_interval() <= patience.silence / 4);
        }
    }
}
