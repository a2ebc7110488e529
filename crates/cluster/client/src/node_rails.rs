//! Owns the rail paths to one node: built from the rails the node announces, dropped when they fail, used only
//! when connected. Knows no verbs: channels come from a [`RailDialer`].

use parking_lot::{Mutex, RwLock};
use spurline_proto::{HelloRequest, NodeRequest, RailInfo, WelcomeAnswer};
use spurline_transport::{
    Channel, Connector, PathSpec, PathTiming, PathView, PathWake, QuietPath, RailLoads, RailPool, TransportKind,
    pair_rails, perform_handshake,
};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Opens channels over this machine's rails.
pub trait RailDialer: Send + Sync {
    /// The local rails, in the order of --rdma-network.
    fn rails(&self) -> &[RailInfo];
    /// The connector from local rail `local` to a node's rail.
    fn connector(&self, local: usize, remote: &RailInfo) -> Arc<dyn Connector>;
    /// Whether the link of local rail `local` is up. Called often; must not block.
    fn link_up(&self, local: usize) -> bool;
    /// Bit mask of the local rails on the NUMA node of this address; 0 without NUMA affinity. Called for each read.
    fn rails_near(&self, _at: usize) -> u64 {
        0
    }
}

/// How rails are used.
#[derive(Debug, Clone)]
pub struct RailsConfig {
    /// Only these paths may carry data (`--transport rdma`).
    pub forced: bool,
    /// Delays before a failed path is retried; shorter when `forced`.
    pub timing: PathTiming,
    /// A path with outstanding requests is dropped after this long without any message, heartbeats included.
    pub silence: Duration,
    /// Maximum channels per path (`--nconnect`).
    pub channels: usize,
    /// Timeout of a connection attempt with its handshake.
    pub connect_timeout: Duration,
    /// Our name in handshakes.
    pub name: String,
    /// The source opened in handshakes.
    pub source: String,
    /// Seed for the choice among equal paths.
    pub seed: u64,
    /// Load of the local rails, over all nodes.
    pub loads: Arc<RailLoads>,
}

/// The paths between a node's rails and ours.
pub(crate) struct RailSet {
    pub pool: RailPool,
    connectors: Vec<Arc<dyn Connector>>,
    /// The process instance that answered the handshake behind these paths.
    instance: AtomicU64,
}

#[derive(Default)]
struct KnownRails {
    rails: Vec<RailInfo>,
    /// Whether a handshake was tried at least once.
    asked: bool,
    /// Whether a handshake succeeded.
    heard: bool,
    asking: bool,
    /// Why there is no path.
    why_none: Option<String>,
}

/// The rail paths to one node.
pub struct NodeRails {
    node: String,
    dialer: Arc<dyn RailDialer>,
    config: RailsConfig,
    stats: Arc<Stats>,
    wake: Arc<PathWake>,
    current_set: RwLock<Option<Arc<RailSet>>>,
    known: Mutex<KnownRails>,
}

impl NodeRails {
    /// Without any path yet; the path monitor connects them.
    pub fn new(
        node: &str,
        dialer: Arc<dyn RailDialer>,
        config: RailsConfig,
        stats: Arc<Stats>,
        wake: Arc<PathWake>,
    ) -> Self {
        let timing = if config.forced { config.timing.without_alternative() } else { config.timing };
        let config = RailsConfig { timing, ..config };
        NodeRails {
            node: node.to_owned(),
            dialer,
            config,
            stats,
            wake,
            current_set: RwLock::new(None),
            known: Mutex::default(),
        }
    }

    /// Whether only these paths may carry data.
    pub fn is_forced(&self) -> bool {
        self.config.forced
    }

    /// The configuration.
    pub(crate) fn config(&self) -> &RailsConfig {
        &self.config
    }

    pub(crate) fn dialer(&self) -> &dyn RailDialer {
        &*self.dialer
    }

    /// Bit mask of the local rails on the NUMA node of the address `lands`; 0 when all are equally near.
    pub(crate) fn near_mask(&self, lands: Option<usize>) -> u64 {
        lands.map_or(0, |at| self.dialer.rails_near(at))
    }

    pub(crate) fn current(&self) -> Option<Arc<RailSet>> {
        self.current_set.read().clone()
    }

    /// Number of connected paths.
    pub fn up_count(&self) -> usize {
        self.current_set.read().as_ref().map_or(0, |current| current.pool.up())
    }

    /// All paths, and the reason if some or all are missing.
    pub fn path_views(&self) -> (Vec<PathView>, Option<String>) {
        let paths = self.current().map(|current| current.pool.view()).unwrap_or_default();
        (paths, self.known.lock().why_none.clone())
    }

    /// The error of a request that may only use these paths when none is connected.
    pub(crate) fn unavailable_error(&self) -> Error {
        let (paths, why) = self.path_views();
        let reasons: Vec<String> = paths
            .iter()
            .map(|p| format!("{} {} ({})", p.spec.name, p.phase.name(), p.reason.as_deref().unwrap_or("not tried yet")))
            .collect();
        let why = why.unwrap_or_else(|| match reasons.is_empty() {
            true => "the rails of the node are not known yet".to_owned(),
            false => reasons.join(", "),
        });
        let text = format!(
            "{}: no RDMA path carries data and --transport rdma rules out TCP: {why}; --transport auto would use TCP",
            self.node
        );
        Error::new(ErrorKind::Unavailable, text)
    }

    /// Whether the node's rails are known and every path was tried.
    pub(crate) fn is_decided(&self) -> bool {
        let known = self.known.lock();
        known.asked && self.current().is_none_or(|current| !current.pool.is_undecided())
    }

    /// Whether the node's rails must be fetched: they were never fetched, or a path is down, which a restart of the
    /// node would explain. Marks the fetch as started.
    pub(crate) fn needs_rails(&self) -> bool {
        let mut known = self.known.lock();
        let all_up = self.current().is_some_and(|current| current.pool.up() == current.pool.len());
        let ask = !all_up && !known.asking;
        known.asking |= ask;
        ask
    }

    /// Updates the paths from a handshake answer, or records its error.
    pub(crate) fn learn_rails(&self, welcome: Result<&WelcomeAnswer>) {
        let mut known = self.known.lock();
        known.asking = false;
        let welcome = match welcome {
            Ok(welcome) => welcome,
            Err(error) => {
                if !known.heard {
                    known.why_none = Some(format!("the node does not answer: {error}"));
                }
                known.asked = true;
                return;
            }
        };
        if known.heard && known.rails == welcome.rails {
            if let Some(current) = self.current()
                && current.instance.swap(welcome.instance, Ordering::AcqRel) != welcome.instance
            {
                tracing::info!(node = %self.node, "the node was restarted: its paths are connected again");
                // Check idle paths too: their connections belong to the process before the restart.
                current.pool.check_idle(Duration::ZERO);
                current.pool.peer_restarted();
            }
            return;
        }
        let next = pair_rails(self.dialer.rails(), &welcome.rails).map(|pairs| {
            let local = self.dialer.rails();
            let specs = pairs.iter().map(|p| PathSpec {
                name: format!("{}-{}", local[p.local].name, welcome.rails[p.remote].name),
                kind: TransportKind::Rdma,
                local: p.local,
                speed_mbit: p.speed_mbit,
            });
            let connectors = pairs.iter().map(|p| self.dialer.connector(p.local, &welcome.rails[p.remote])).collect();
            let RailsConfig { channels, timing, seed, .. } = self.config;
            let stats = Arc::clone(&self.stats);
            let wake = Arc::clone(&self.wake);
            let pool = RailPool::new(&self.node, specs.collect(), channels, timing, seed, stats, wake);
            let pool = pool.with_rail_loads(Arc::clone(&self.config.loads));
            Arc::new(RailSet { pool, connectors, instance: AtomicU64::new(welcome.instance) })
        });
        known.rails.clone_from(&welcome.rails);
        known.asked = true;
        known.heard = true;
        let (next, why) = match next {
            Ok(current) => (Some(current), None),
            Err(why) => (None, Some(why)),
        };
        if let Some(why) = &why {
            let instead = if self.config.forced { "and --transport rdma rules out TCP" } else { "TCP" };
            tracing::warn!(node = %self.node, "no RDMA path carries data, {instead}: {why}");
        }
        known.why_none = why;
        let before = std::mem::replace(&mut *self.current_set.write(), next);
        drop(known);
        if let Some(before) = before {
            before.pool.close("the rails of the node changed");
        }
        self.wake.wake_monitor();
    }

    /// Opens a channel for data of `source`.
    fn connect_channel(
        &self,
        connector: &dyn Connector,
        source: &str,
        deadline: Instant,
    ) -> Result<(Box<dyn Channel>, Arc<WelcomeAnswer>)> {
        let mut channel = connector.connect(deadline)?;
        let welcome = perform_handshake(&mut *channel, &HelloRequest::new(&self.config.name, source), deadline)?;
        Ok((channel, Arc::new(welcome)))
    }

    /// Opens a heartbeat channel. It names no source, so the node answers it even while all its workers are blocked.
    fn connect_heartbeat(&self, connector: &dyn Connector, deadline: Instant) -> Result<Box<dyn Channel>> {
        self.connect_channel(connector, "", deadline).map(|(channel, _)| channel)
    }

    /// Connects a path that is due: one data channel and one heartbeat channel.
    pub(crate) fn connect_path(&self, current: &RailSet, path: usize) {
        let connector = &*current.connectors[path];
        let connected = connector.prepare_device().and_then(|()| {
            self.connect_channel(connector, &self.config.source, Instant::now() + self.config.connect_timeout)
        });
        let made = connected.and_then(|(channel, welcome)| {
            let expected = current.instance.load(Ordering::Acquire);
            if expected != 0 && welcome.instance != 0 && welcome.instance != expected {
                let why = format!(
                    "another node ({}) answers at {}: two machines have this address, or the node just restarted",
                    welcome.node,
                    connector.peer()
                );
                return Err(Error::new(ErrorKind::Protocol, why));
            }
            let probe = self.connect_heartbeat(connector, Instant::now() + self.config.connect_timeout)?;
            Ok((channel, welcome, probe))
        });
        match made {
            Ok((channel, welcome, probe)) => current.pool.path_connected(path, channel, welcome, Some(probe)),
            Err(error) => current.pool.connect_failed(path, &error),
        }
    }

    /// Adds one channel to a connected path.
    pub(crate) fn add_channel(&self, current: &RailSet, path: usize, generation: u64) {
        let deadline = Instant::now() + self.config.connect_timeout;
        let made = self.connect_channel(&*current.connectors[path], &self.config.source, deadline);
        if let Err(error) = &made {
            tracing::warn!(node = %self.node, %error, "cannot add a channel to a path");
        }
        current.pool.add_channel(path, generation, made);
    }

    /// Sends a heartbeat over a quiet path.
    pub(crate) fn probe_path(&self, current: &RailSet, mut quiet: QuietPath) {
        let deadline = Instant::now() + self.config.silence / 2;
        let probe = match quiet.probe.take() {
            Some(probe) => Ok(probe),
            None => self.connect_heartbeat(&*current.connectors[quiet.path], deadline),
        };
        let answer = probe.and_then(|mut probe| {
            probe.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
            Ok(probe)
        });
        match answer {
            Ok(probe) => current.pool.probe_answered(&quiet, probe),
            Err(error) => {
                let why = format!("no message for {:?} with requests outstanding: {error}", self.config.silence);
                current.pool.probe_failed(&quiet, &why);
            }
        }
    }
}
