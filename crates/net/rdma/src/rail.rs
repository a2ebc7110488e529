//! A rail: an RDMA device reached through one of this host's addresses, with the pool registered once, and a thread
//! that watches over it. It knows no peer.
//!
//! A device that fails or is taken away is let go of, and opened again by the next who needs it.

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use spurline_mem::Pool;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_verbs::{
    Access, Breaker, CmChannel, CmEventKind, ConnectOptions, Context, DeviceProblem, MemoryRegion, ProtectionDomain,
    Verbs,
};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long silence is borne before a path counts as dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// From the last sign of the peer's NIC to giving up, for a connection that waits for something.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { silence: Duration::from_secs(2) }
    }
}

impl Patience {
    /// How often a NIC sends again. Seven is for ever on some drivers.
    const RETRIES: u8 = 6;

    /// How often one that waits asks the peer's NIC for a sign of life.
    pub(crate) fn probe_every(self) -> Duration {
        (self.silence / 4).max(Duration::from_millis(10))
    }

    /// What a connection is made with: the NIC gives up within half of the silence that is borne. The specification lets
    /// it take up to four times as long as it is told; by then who keeps the paths has found out by asking for a sign of
    /// life, so a shorter time would bear less than was promised and find out nothing sooner.
    pub(crate) fn connect_options(self) -> ConnectOptions {
        let budget = self.silence.as_nanos() / 2;
        let tries = u128::from(Self::RETRIES) + 1;
        let fits = |exponent: &u8| tries * (4096u128 << *exponent) <= budget;
        let ack_timeout = (8..=20u8).rev().find(fits).unwrap_or(8);
        ConnectOptions { ack_timeout: Some(ack_timeout), retries: Self::RETRIES, rnr_retries: Self::RETRIES }
    }
}

/// Bytes in memory of a rail's own NUMA node, and of others.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Nearness {
    pub near: u64,
    pub far: u64,
}

impl Nearness {
    /// Counts bytes that a rail of this node carries, where the pool has memory on several.
    pub fn count(&mut self, pool: &Pool, rail: Option<u32>, bytes: &[u8]) {
        let memory = pool.node_of(bytes.as_ptr() as usize + bytes.len() / 2);
        if let (Some(rail), Some(memory)) = (rail, memory) {
            *(if rail == memory { &mut self.near } else { &mut self.far }) += bytes.len() as u64;
        }
    }

    /// Adds them to the counters of the process.
    pub fn add_to(self, stats: &Stats) {
        if self.near > 0 {
            stats.rdma.near_bytes.add(self.near);
        }
        if self.far > 0 {
            stats.rdma.far_bytes.add(self.far);
        }
    }
}

/// A device in use.
pub(crate) struct Open {
    pub domain: Arc<ProtectionDomain>,
    pub memory: Arc<MemoryRegion>,
    pub port: u8,
    /// The NUMA node of the device, where that is known.
    pub numa_node: Option<u32>,
    /// The longest message of the port in bytes.
    pub max_message: usize,
    breakers: Mutex<Vec<Breaker>>,
    stop: OwnedFd,
}

impl Open {
    /// Has `breaker` pulled when the device fails.
    pub fn watch(&self, breaker: Breaker) {
        let mut breakers = self.breakers.lock();
        breakers.retain(|b| !b.is_broken());
        breakers.push(breaker);
    }

    fn break_all(&self, why: &'static str) -> usize {
        let breakers = std::mem::take(&mut *self.breakers.lock());
        breakers.iter().filter(|b| !b.is_broken()).map(|b| b.break_now(why)).count()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // The counter only has to be non-zero.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }
}

/// An RDMA device reached through one of this host's addresses.
pub struct Rail {
    verbs: Arc<Verbs>,
    name: String,
    ip: IpAddr,
    numa_node: Option<u32>,
    pool: Arc<Pool>,
    access: Access,
    open: Mutex<Option<Arc<Open>>>,
}

impl Rail {
    /// Opens the device that `ip` belongs to and registers `pool` with it. `name` is the interface's, for messages.
    /// Readers let peers write, nodes don't.
    ///
    /// # Errors
    /// `Unavailable` when the address belongs to no device, `NoMemory` when the pool can't be registered.
    pub fn open(verbs: &Arc<Verbs>, name: &str, ip: IpAddr, pool: &Arc<Pool>, access: Access) -> Result<Arc<Rail>> {
        Self::open_on(verbs, name, ip, None, pool, access)
    }

    /// The same for a device that is attached to this NUMA node: its own buffers are taken from there.
    ///
    /// # Errors
    /// As [`Rail::open`].
    pub fn open_on(
        verbs: &Arc<Verbs>,
        name: &str,
        ip: IpAddr,
        numa_node: Option<u32>,
        pool: &Arc<Pool>,
        access: Access,
    ) -> Result<Arc<Rail>> {
        let rail = Arc::new(Rail {
            verbs: Arc::clone(verbs),
            name: name.to_owned(),
            ip,
            numa_node,
            pool: Arc::clone(pool),
            access,
            open: Mutex::new(None),
        });
        rail.device()?;
        Ok(rail)
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address it is reached through.
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    pub(crate) fn verbs(&self) -> &Arc<Verbs> {
        &self.verbs
    }

    /// The NUMA node of its device, where that is known.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// Whether its device is open, found out without waiting for who opens it.
    pub(crate) fn is_open(&self) -> bool {
        self.open.try_lock().is_some_and(|open| open.is_some())
    }

    /// Whether its port can carry data now.
    pub fn is_up(&self) -> bool {
        self.usable().is_ok()
    }

    /// The device, if its port can carry data. Nobody should try to connect over a port that is down: some drivers do
    /// not recover from it.
    ///
    /// # Errors
    /// `Unavailable` with the port's state.
    pub(crate) fn usable(self: &Rail) -> Result<Arc<Open>> {
        let open = self.open.lock().clone();
        let open = open.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, format!("rail {}: its RDMA device is gone", self.name))
        })?;
        let device = open.domain.context();
        let state = device.port_state(open.port)?;
        if !state.is_active() {
            self.let_go_if_moved(&open)?;
            let why = format!("rail {}: port {} of {} is {}, not ACTIVE", self.name, open.port, device.name(), state);
            return Err(Error::new(ErrorKind::Unavailable, why));
        }
        device.say_goodbyes();
        Ok(open)
    }

    /// Looks whether the rail's address is reached through another device or port by now, as a bond's is whose active
    /// member went down; forgets `open` then. Nothing else tells of it for certain.
    ///
    /// # Errors
    /// `Unavailable` when it is.
    pub(crate) fn let_go_if_moved(&self, open: &Arc<Open>) -> Result<()> {
        let bound = CmChannel::new(&self.verbs).and_then(|channel| {
            let mut id = channel.id()?;
            id.bind(SocketAddr::new(self.ip, 0))?;
            Ok(id)
        });
        // An address that is nobody's may come back.
        let Ok(id) = bound else { return Ok(()) };
        if id.port() == 0 || (id.is_on(open.domain.context()) && id.port() == open.port) {
            return Ok(());
        }
        self.let_go(open);
        let (from, port) = (open.domain.context().name(), open.port);
        let why = format!("rail {}: {} moved from port {port} of {from} to {}", self.name, self.ip, id.subject());
        Err(Error::new(ErrorKind::Unavailable, why))
    }

    /// Forgets `open`, so that the next who needs the device opens it anew; connections made from it go on.
    pub(crate) fn let_go(&self, open: &Arc<Open>) {
        let mut current = self.open.lock();
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, open)) {
            *current = None;
        }
    }

    /// The device, opened again when it was let go of.
    ///
    /// # Errors
    /// As [`Rail::open`].
    pub(crate) fn device(self: &Arc<Self>) -> Result<Arc<Open>> {
        let mut open = self.open.lock();
        if let Some(open) = &*open {
            return Ok(Arc::clone(open));
        }
        let context = |e: spurline_verbs::VerbsError| Error::from(e).context(format_args!("rail {}", self.name));
        let channel = CmChannel::new(&self.verbs).map_err(context)?;
        let verbs = Arc::clone(&self.verbs);
        let mut anchor = channel.id().map_err(context)?;
        anchor.bind(SocketAddr::new(self.ip, 0)).map_err(context)?;
        let port = anchor.port();
        let device = Context::of(anchor).map_err(context)?;
        let max_message = device.port(port).map_err(context)?.max_message as usize;
        let domain = ProtectionDomain::new(&device).map_err(context)?;
        let memory = domain.register(&self.pool, self.access).map_err(context)?;
        let os = |e: rustix::io::Errno| Error::io("can't watch over an RDMA device", &e.into());
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os)?;
        let stopped = stop.try_clone().map_err(|e| Error::io("can't watch over an RDMA device", &e))?;
        let made = Arc::new(Open {
            domain,
            memory,
            port,
            numa_node: self.numa_node,
            max_message,
            breakers: Mutex::default(),
            stop,
        });
        let (rail, watched) = (Arc::downgrade(self), Arc::downgrade(&made));
        std::thread::Builder::new()
            .name(format!("rail-{}", self.name))
            .spawn(move || {
                let gone = watch_over(&rail, &watched, &device, &channel, port, &stopped);
                let left = Arc::downgrade(&device);
                drop((device, channel));
                if gone {
                    forget(&verbs, &left);
                }
            })
            .map_err(|e| Error::io("can't start the thread that watches over an RDMA device", &e))?;
        *open = Some(Arc::clone(&made));
        Ok(made)
    }
}

/// Breaks the connections of a device whose port went down or that is being taken away, instead of letting them wait for
/// what never comes. Ends with the device, and says whether it was taken away.
fn watch_over(
    rail: &Weak<Rail>,
    open: &Weak<Open>,
    device: &Arc<Context>,
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
            tracing::error!("nobody watches over {} any more: {e}", device.name());
            return lost;
        }
        if !fds[2].revents().is_empty() {
            return lost;
        }
        let mut broken = None;
        let mut gone = false;
        while let Some(problem) = device.next_problem() {
            match problem {
                // Addresses that come and go concern only connections that use them, and those fail by themselves.
                DeviceProblem::PortDown(n) if n == port => broken = Some("its port went down"),
                DeviceProblem::Fatal => (broken, gone) = (Some("the device failed"), true),
                DeviceProblem::PortUp(n) if n == port => {
                    tracing::info!("{} port {port} is up", device.name());
                    device.say_goodbyes();
                }
                _ => {}
            }
        }
        while let Ok(Some(event)) = channel.next(Instant::now()) {
            if let CmEventKind::DeviceRemoved = event.kind {
                (broken, gone) = (Some("the device is being taken away"), true);
            }
        }
        lost |= gone;
        let (Some(why), Some(open)) = (broken, open.upgrade()) else { continue };
        let name = rail.upgrade().map_or_else(|| "?".into(), |rail| rail.name.clone());
        let count = open.break_all(why);
        tracing::warn!("rail {name} ({} port {port}): {why}; {count} connections broken off", device.name());
        if gone && let Some(rail) = rail.upgrade() {
            rail.let_go(&open);
        }
    }
}

/// Lets a device go that was taken away: its last connections may end later than the rail, with the requests that are
/// under way on them. What is left then is let go of a little later.
fn forget(verbs: &Verbs, device: &Weak<Context>) {
    let mut pause = Duration::from_millis(50);
    let mut used = true;
    while used || pause < Duration::from_secs(20) {
        used = device.strong_count() > 0;
        std::thread::sleep(pause);
        verbs.forget_lost_devices();
        pause = (pause * 2).min(Duration::from_secs(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_end_well_within_the_silence_that_is_borne() {
        for ms in [500u64, 2000, 10_000] {
            let patience = Patience { silence: Duration::from_millis(ms) };
            let options = patience.connect_options();
            let exponent = options.ack_timeout.unwrap();
            let gives_up = 4.096e-6 * f64::from(1u32 << exponent) * f64::from(options.retries + 1);
            assert!(gives_up <= ms as f64 / 2000.0 && gives_up > ms as f64 / 5000.0, "{ms}: {gives_up}");
            assert!(patience.probe_every() <= patience.silence / 4);
        }
    }
}
