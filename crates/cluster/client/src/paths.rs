//! The paths to one node beside its TCP connections: learned from what the node says of its rails, given up when
//! they fail, none used that is not connected. It knows no verbs: channels come from a [`Dialer`].

use parking_lot::{Mutex, RwLock};
use spurline_proto::{Hello, Rail, Request, Welcome};
use spurline_transport::{
    Channel, Connector, PathPool, PathSpec, PathTiming, PathView, Quiet, RailLoads, TransportKind, Wake, greet, pair,
};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Makes channels over this machine's rails.
pub trait Dialer: Send + Sync {
    /// The rails of this machine, in the order of --rdma-network.
    fn rails(&self) -> &[Rail];
    /// What connects from local rail `local` to a node's rail.
    fn connector(&self, local: usize, remote: &Rail) -> Arc<dyn Connector>;
    /// Whether the link of local rail `local` carries packets now; asked often, answers at once.
    fn link_up(&self, local: usize) -> bool;
    /// The local rails (a bit each) on the NUMA node of the memory at this address; 0 where there is nothing to choose.
    /// Asked for each read.
    fn near(&self, _at: usize) -> u64 {
        0
    }
}

/// How paths are used.
#[derive(Debug, Clone)]
pub struct PathsConfig {
    /// Nothing but these paths may carry anything (`--transport rdma`).
    pub forced: bool,
    /// When a failed path is tried again; sooner where they are `forced`.
    pub timing: PathTiming,
    /// A path that owes answers is given up when nothing came over it for this long, a ping's answer included.
    pub silence: Duration,
    /// The most channels on a path (`--nconnect`).
    pub channels: usize,
    /// The longest a connection attempt with its greeting may take.
    pub connect_timeout: Duration,
    /// This side's name in greetings.
    pub name: String,
    /// The source asked for.
    pub source: String,
    /// Seed of the choice among equal paths.
    pub seed: u64,
    /// What this machine's rails carry, to all nodes.
    pub loads: Arc<RailLoads>,
}

/// The paths that a node's rails and this machine's make.
pub(crate) struct Current {
    pub pool: PathPool,
    connectors: Vec<Arc<dyn Connector>>,
    /// The process that answered the greeting these paths were made from.
    instance: AtomicU64,
}

#[derive(Default)]
struct Known {
    rails: Vec<Rail>,
    /// Whether the node was asked at least once, whatever came of it.
    asked: bool,
    /// Whether it answered.
    heard: bool,
    asking: bool,
    /// Why there is no path.
    why_none: Option<String>,
}

/// The paths to one node.
pub struct Paths {
    node: String,
    dialer: Arc<dyn Dialer>,
    config: PathsConfig,
    stats: Arc<Stats>,
    wake: Arc<Wake>,
    current: RwLock<Option<Arc<Current>>>,
    known: Mutex<Known>,
}

impl Paths {
    /// No path yet; whoever keeps the paths of a process connects them.
    pub fn new(node: &str, dialer: Arc<dyn Dialer>, config: PathsConfig, stats: Arc<Stats>, wake: Arc<Wake>) -> Self {
        let timing = if config.forced { config.timing.forced() } else { config.timing };
        let config = PathsConfig { timing, ..config };
        Paths {
            node: node.to_owned(),
            dialer,
            config,
            stats,
            wake,
            current: RwLock::new(None),
            known: Mutex::default(),
        }
    }

    /// Whether nothing but these paths may carry anything.
    pub fn forced(&self) -> bool {
        self.config.forced
    }

    /// How they are used.
    pub(crate) fn config(&self) -> &PathsConfig {
        &self.config
    }

    pub(crate) fn dialer(&self) -> &dyn Dialer {
        &*self.dialer
    }

    pub(crate) fn current(&self) -> Option<Arc<Current>> {
        self.current.read().clone()
    }

    /// Paths that carry data now.
    pub fn up(&self) -> usize {
        self.current.read().as_ref().map_or(0, |current| current.pool.up())
    }

    /// Every path, and why there is none or fewer than could be.
    pub fn view(&self) -> (Vec<PathView>, Option<String>) {
        let paths = self.current().map(|current| current.pool.view()).unwrap_or_default();
        (paths, self.known.lock().why_none.clone())
    }

    /// Why no path carries data, for the error of a request that may go no other way.
    pub(crate) fn why_none(&self) -> Error {
        let (paths, why) = self.view();
        let reasons: Vec<String> = paths
            .iter()
            .map(|p| format!("{} {} ({})", p.spec.name, p.phase.name(), p.reason.as_deref().unwrap_or("not tried yet")))
            .collect();
        let why = why.unwrap_or_else(|| match reasons.is_empty() {
            true => "the node has not said yet where RDMA reaches it".to_owned(),
            false => reasons.join(", "),
        });
        let text = format!(
            "{}: no RDMA path carries data and --transport rdma rules out TCP: {why}; --transport auto would use TCP",
            self.node
        );
        Error::new(ErrorKind::Unavailable, text)
    }

    /// Whether the node's rails are known and every path was tried.
    pub(crate) fn decided(&self) -> bool {
        let known = self.known.lock();
        known.asked && self.current().is_none_or(|current| !current.pool.undecided())
    }

    /// Whether the node is to be asked for its rails: it was never heard, or some path does not carry data, which its
    /// restart would explain. Counts as being asked from here on.
    pub(crate) fn ask(&self) -> bool {
        let mut known = self.known.lock();
        let all_up = self.current().is_some_and(|current| current.pool.up() == current.pool.len());
        let ask = !all_up && !known.asking;
        known.asking |= ask;
        ask
    }

    /// What the node answered to a greeting, or why it did not.
    pub(crate) fn learn(&self, welcome: Result<&Welcome>) {
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
                tracing::info!(node = %self.node, "the node is another process than before: its paths are tried anew");
                // Connections to the process before are found out first, on paths that nobody uses, too.
                current.pool.look(Duration::ZERO);
                current.pool.renew();
            }
            return;
        }
        let next = pair(self.dialer.rails(), &welcome.rails).map(|pairs| {
            let local = self.dialer.rails();
            let specs = pairs.iter().map(|p| PathSpec {
                name: format!("{}-{}", local[p.local].name, welcome.rails[p.remote].name),
                kind: TransportKind::Rdma,
                local: p.local,
                speed_mbit: p.speed_mbit,
            });
            let connectors = pairs.iter().map(|p| self.dialer.connector(p.local, &welcome.rails[p.remote])).collect();
            let PathsConfig { channels, timing, seed, .. } = self.config;
            let (stats, wake) = (Arc::clone(&self.stats), Arc::clone(&self.wake));
            let pool = PathPool::new(&self.node, specs.collect(), channels, timing, seed, stats, wake);
            let pool = pool.sharing(Arc::clone(&self.config.loads));
            Arc::new(Current { pool, connectors, instance: AtomicU64::new(welcome.instance) })
        });
        known.rails.clone_from(&welcome.rails);
        (known.asked, known.heard) = (true, true);
        let (next, why) = match next {
            Ok(current) => (Some(current), None),
            Err(why) => (None, Some(why)),
        };
        if let Some(why) = &why {
            let instead = if self.config.forced { "--transport rdma rules out TCP, so nothing does" } else { "TCP" };
            tracing::warn!(node = %self.node, "no RDMA path carries data, {instead}: {why}");
        }
        known.why_none = why;
        let before = std::mem::replace(&mut *self.current.write(), next);
        drop(known);
        if let Some(before) = before {
            before.pool.close("the node has other rails than before");
        }
        self.wake.ring();
    }

    /// A channel that is asked for data of `source`.
    fn greeted(
        &self,
        connector: &dyn Connector,
        source: &str,
        deadline: Instant,
    ) -> Result<(Box<dyn Channel>, Arc<Welcome>)> {
        let mut channel = connector.connect(deadline)?;
        let welcome = greet(&mut *channel, &Hello::new(&self.config.name, source), deadline)?;
        Ok((channel, Arc::new(welcome)))
    }

    /// A channel for signs of life: one of no source is answered though every worker of the node waits for something slow.
    fn for_signs_of_life(&self, connector: &dyn Connector, deadline: Instant) -> Result<Box<dyn Channel>> {
        self.greeted(connector, "", deadline).map(|(channel, _)| channel)
    }

    /// Connects a path that is due: two channels, one of them for signs of life.
    pub(crate) fn connect(&self, current: &Current, path: usize) {
        let connector = &*current.connectors[path];
        let greeted = || {
            connector.prepare()?;
            self.greeted(connector, &self.config.source, Instant::now() + self.config.connect_timeout)
        };
        let made = greeted().and_then(|(channel, welcome)| {
            let expected = current.instance.load(Ordering::Acquire);
            if expected != 0 && welcome.instance != 0 && welcome.instance != expected {
                let why = format!(
                    "another node ({}) answers at {}: two machines have this address, or the node just restarted",
                    welcome.node,
                    connector.peer()
                );
                return Err(Error::new(ErrorKind::Protocol, why));
            }
            let probe = self.for_signs_of_life(connector, Instant::now() + self.config.connect_timeout)?;
            Ok((channel, welcome, probe))
        });
        match made {
            Ok((channel, welcome, probe)) => current.pool.connected(path, channel, welcome, Some(probe)),
            Err(error) => current.pool.connect_failed(path, &error),
        }
    }

    /// Makes one more channel for a path that carries data.
    pub(crate) fn grow(&self, current: &Current, path: usize, generation: u64) {
        let deadline = Instant::now() + self.config.connect_timeout;
        let made = self.greeted(&*current.connectors[path], &self.config.source, deadline);
        if let Err(error) = &made {
            tracing::warn!(node = %self.node, %error, "a path gets no further channel");
        }
        current.pool.add(path, generation, made);
    }

    /// Asks a quiet path for a sign of life.
    pub(crate) fn probe(&self, current: &Current, mut quiet: Quiet) {
        let deadline = Instant::now() + self.config.silence / 2;
        let probe = match quiet.probe.take() {
            Some(probe) => Ok(probe),
            None => self.for_signs_of_life(&*current.connectors[quiet.path], deadline),
        };
        let answer = probe.and_then(|mut probe| {
            probe.call(&Request::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
            Ok(probe)
        });
        match answer {
            Ok(probe) => current.pool.answered(&quiet, probe),
            Err(error) => {
                let why = format!("nothing came over it for {:?} while answers were due: {error}", self.config.silence);
                current.pool.silent(&quiet, &why);
            }
        }
    }
}
